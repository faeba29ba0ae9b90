//! Two ends that we did not write (smoltcp), with the engine between them: a guest that loses its
//! CPU, a ring with few places, a network that loses. Both streams must arrive whole.

mod common;

use common::segment::pattern_bytes;
use common::setup::ALL_FEATURES;
use common::world::{Peer, mac};
use common::{Random, Setup, Side, World};
use nightporter_core::port::{PortFeatures, PortId};
use nightporter_core::tcp::Passed;
use nightporter_core::tcp::flow::{State, Why};
use nightporter_core::time::Duration;
use nightporter_testkit::device::{Wire, clock_ms, set_clock_ms};
use proptest::prelude::*;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr};

/// One end: its stack, and an application that writes a known stream and reads all it can.
struct Party {
    wire: Wire,
    iface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    side: Side,
    /// Application bytes to write in all, and written so far.
    goal: usize,
    written: usize,
    read: Vec<u8>,
    /// Application bytes of the other end.
    expected: usize,
    /// It reads at most so many bytes a millisecond.
    read_rate: usize,
    closed: bool,
}

impl Party {
    fn new(peer: &Peer<'_>, host: u8, goal: usize, buffers: [usize; 2], seed: u64) -> Self {
        let mut wire = Wire::new(1500, false); // the monitor checks them
        let mut config = Config::new(EthernetAddress(mac(host)).into());
        config.random_seed = seed;
        let mut iface = Interface::new(config, &mut wire, Instant::ZERO);
        iface.update_ip_addrs(|addrs| {
            addrs.push(IpCidr::new(IpAddress::v4(10, 0, 0, host), 24)).expect("room");
        });
        let buffer = |len| tcp::SocketBuffer::new(vec![0; len]);
        let mut socket = tcp::Socket::new(buffer(buffers[0]), buffer(buffers[1]));
        socket.set_tsval_generator(Some(clock_ms));
        let mut sockets = SocketSet::new(Vec::new());
        let handle = sockets.add(socket);
        Self {
            wire,
            iface,
            sockets,
            handle,
            side: peer.side,
            goal,
            written: 0,
            read: Vec::new(),
            expected: 0,
            read_rate: usize::MAX,
            closed: false,
        }
    }

    fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    fn poll(&mut self, ms: i64) {
        self.iface.poll(Instant::from_millis(ms), &mut self.wire, &mut self.sockets);
        let (side, goal, mut left) = (self.side, self.goal, self.read_rate);
        let (mut written, mut closed) = (self.written, self.closed);
        // One that reads slowly reads to the end first: smoltcp forgets what was not read in time.
        let (hurried, expected) = (self.read_rate == usize::MAX, self.expected);
        let mut read = std::mem::take(&mut self.read);
        let socket = self.socket();
        while left > 0 && socket.can_recv() {
            let got = socket.recv(|bytes| {
                let take = bytes.len().min(left);
                read.extend(&bytes[..take]);
                (take, take)
            });
            left -= got.expect("can receive");
        }
        while written < goal && socket.can_send() {
            let at = i64::try_from(written + 1).expect("a short stream");
            let piece = pattern_bytes(side as u32, at, (goal - written).min(4096));
            written += socket.send_slice(&piece).expect("can send");
        }
        let may_close = hurried || read.len() == expected;
        if written == goal && may_close && !closed && socket.may_send() {
            socket.close();
            closed = true;
        }
        (self.read, self.written, self.closed) = (read, written, closed);
        self.iface.poll(Instant::from_millis(ms), &mut self.wire, &mut self.sockets);
    }
}

impl Party {
    /// It has taken the FIN of a segment, and not all of its bytes. smoltcp 0.14 cuts a segment at
    /// the window that it remembers, which is not the one that its zero-window probe has shown, and
    /// takes the FIN nevertheless: it acknowledges one byte too many and hears nothing more. The
    /// monitor has judged the segment.
    fn has_lost_its_end(&mut self) -> bool {
        let has = self.read.len() + self.socket().recv_queue();
        let state = self.socket().state();
        has < self.expected
            && matches!(state, tcp::State::CloseWait | tcp::State::LastAck | tcp::State::Closing)
    }
}

/// From here on nothing is lost any more, and both streams must get through (smoltcp backs off
/// to a minute).
const HEALED_MS: u64 = 20_000;

/// How long the ends have for closing after both streams were read. smoltcp 0.14 can stop repeating
/// its FIN when the data before it was acknowledged; that is not for us to judge.
const FIN_PATIENCE_MS: u64 = 5_000;

/// One run.
#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    /// Bytes of R's and of G's stream.
    bytes: [usize; 2],
    guest_is_client: bool,
    /// Percent of frames that the wire between R and H loses.
    loss: u64,
    /// Percent of delivered frames that G's driver loses.
    guest_loss: u64,
    /// G runs so many of so many milliseconds.
    runs: (u64, u64),
    /// Places of G's ring.
    ring: usize,
    features: PortFeatures,
    /// Receive and send buffers of both.
    buffers: [usize; 2],
    /// G's application reads so many bytes per millisecond.
    read_rate: usize,
    /// Milliseconds between which the daemon is away and frames pass plain. The first ones wait for
    /// it (LIFE-17).
    absences: &'static [(u64, u64)],
}

impl Default for Case {
    fn default() -> Self {
        Self {
            seed: 1,
            bytes: [200_000, 0],
            guest_is_client: false,
            loss: 0,
            guest_loss: 0,
            runs: (1, 1),
            ring: 64,
            features: PortFeatures::default(),
            buffers: [65_535, 65_535],
            read_rate: usize::MAX,
            absences: &[],
        }
    }
}

/// The frames that pass a daemon that is away, and those that wait for it.
#[derive(Default)]
struct Plain {
    /// In the queue of G's tap, H's before them.
    to_guest: Vec<Vec<u8>>,
    /// Turned before the limit, of R and of G.
    turned: [Vec<Vec<u8>>; 2],
    any: bool,
    any_syn: bool,
}

/// A daemon that stands for so long has frames pass it by.
const PLAIN_AFTER_MS: u64 = 3;

impl Plain {
    /// The daemon is away, since `since` ms: frames of a side go to the other, or wait.
    fn pass(&mut self, since: u64, from: Side, frames: &mut Wire) -> Vec<Vec<u8>> {
        let sent: Vec<_> = frames.sent.drain(..).collect();
        if since < PLAIN_AFTER_MS {
            self.turned[from as usize].extend(sent);
            return vec![];
        }
        for frame in sent.iter().filter(|frame| frame[12..14] == [8, 0]) {
            self.any = true;
            self.any_syn |= frame[14 + 20 + 13] & 2 != 0;
        }
        sent
    }

    /// The daemon is back.
    fn ends(
        &mut self,
        world: &World<'_>,
        ports: [PortId; 2],
        target: nightporter_core::time::Instant,
    ) {
        world.0.borrow_mut().outside.now = target;
        world.set_lenient(0, true);
        let passed = match (self.any, self.any_syn) {
            (false, _) => Passed::Nothing,
            (true, false) => Passed::Segments,
            (true, true) => Passed::Anything,
        };
        (self.any, self.any_syn) = (false, false);
        world.engine(|engine, now| engine.handle_passed_plain(now, ports[1], |_| passed));
        for (port, frames) in ports.iter().zip(&mut self.turned) {
            for frame in frames.drain(..) {
                world.0.borrow_mut().relay(*port, frame);
            }
        }
        world.0.borrow_mut().settle();
        world.engine(|engine, _| engine.handle_caught_up(ports[1]));
    }
}

struct Outcome {
    world: World<'static>,
    /// Milliseconds until R's stream was acknowledged to R, and until both streams were read.
    acked_ms: u64,
    done_ms: u64,
}

fn run(case: &Case) -> Outcome {
    let wire = !case.absences.is_empty();
    let setup = Setup { features: case.features, wire, ..Setup::new() };
    let world = setup.opens();
    let (r, g) = world.pair(&setup);
    let (mut plain, ports) = (Plain::default(), [&r, &g].map(|it| it.end(|end| end.port)));
    let mut random = Random::new(case.seed);
    let mut remote = Party::new(&r, 2, case.bytes[0], case.buffers, random.next());
    let mut guest = Party::new(&g, 1, case.bytes[1], case.buffers, random.next());
    guest.read_rate = case.read_rate;
    (remote.expected, guest.expected) = (case.bytes[1], case.bytes[0]);
    world.0.borrow_mut().outside.rings[0].lossy = true;
    opens(case, &mut remote, &mut guest);
    let (mut acked_ms, mut read_ms) = (0, u64::MAX);
    let mut case = case.clone();
    for ms in 0..300_000_u64 {
        if ms == HEALED_MS {
            (case.loss, case.guest_loss) = (0, 0);
            world.0.borrow_mut().outside.rings[0].lossy = false;
        }
        set_clock_ms(u32::try_from(ms).expect("short"));
        let now = i64::try_from(ms).expect("short");
        let running = ms < 20 || ms % case.runs.1 < case.runs.0;
        remote.poll(now);
        if let Some(since) = case.absences.iter().find(|(from, to)| (*from..*to).contains(&ms)) {
            let since = ms - since.0;
            plain.to_guest.extend(arrivals(&g));
            let mut sent = plain.pass(since, Side::R, &mut remote.wire);
            sent.retain(|_| !random.percent(case.loss));
            plain.to_guest.extend(sent);
            if running {
                guest.wire.arrived.extend(plain.to_guest.drain(..));
                guest.wire.arrived.retain(|_| !random.percent(case.guest_loss));
                guest.poll(now);
            }
            let mut sent = plain.pass(since, Side::G, &mut guest.wire);
            sent.retain(|_| !random.percent(case.loss));
            remote.wire.arrived.extend(sent);
            continue;
        }
        if case.absences.iter().any(|(_, to)| *to == ms) {
            let target = setup.start + Duration::from_millis(ms);
            plain.ends(&world, ports, target);
        }
        crosses(&world, &mut random, case.loss, &mut remote.wire, &r);
        if running {
            guest.wire.arrived.extend(plain.to_guest.drain(..));
            guest.wire.arrived.extend(arrivals(&g));
            guest.wire.arrived.retain(|_| !random.percent(case.guest_loss));
            guest.poll(now);
            crosses(&world, &mut random, 0, &mut guest.wire, &g);
            world.ring_takes(0, case.ring);
            world.engine(|engine, at| {
                engine.handle_guest_progress(at, nightporter_core::port::PortId(1), true);
            });
        }
        strays(&world, &mut remote.wire, &mut guest.wire);
        let back = arrivals(&r);
        remote.wire.arrived.extend(back.into_iter().filter(|_| !random.percent(case.loss)));
        let at = world.now() + Duration::from_millis(1);
        world.until(at);
        if acked_ms == 0 && remote.written == remote.goal && remote.socket().send_queue() == 0 {
            acked_ms = ms;
        }
        let all = [&remote, &guest]
            .iter()
            .zip([1, 0])
            .all(|(p, other)| p.closed && p.read.len() == case.bytes[other]);
        if remote.has_lost_its_end() || guest.has_lost_its_end() {
            check_streams(&remote, &guest, false);
            return Outcome { world, acked_ms, done_ms: ms };
        }
        let shut =
            |p: &mut Party| matches!(p.socket().state(), tcp::State::Closed | tcp::State::TimeWait);
        read_ms = if all { read_ms.min(ms) } else { u64::MAX };
        let late = ms.saturating_sub(read_ms) > FIN_PATIENCE_MS;
        if all && (late || shut(&mut remote) && shut(&mut guest)) {
            check_streams(&remote, &guest, true);
            return Outcome { world, acked_ms, done_ms: ms };
        }
    }
    let states = [remote.socket().state(), guest.socket().state()];
    panic!(
        "not done: {case:?}, {states:?}: R wrote {} read {}, G wrote {} read {}\n{}",
        remote.written,
        remote.read.len(),
        guest.written,
        guest.read.len(),
        world.trace(),
    );
}

fn opens(case: &Case, remote: &mut Party, guest: &mut Party) {
    let (client, server, host, ports) = if case.guest_is_client {
        (guest, remote, 2, (80, 40_000))
    } else {
        (remote, guest, 1, (40_000, 80))
    };
    server.socket().listen(ports.1).expect("listens");
    let at = (IpAddress::v4(10, 0, 0, host), ports.1);
    let Party { iface, sockets, handle, .. } = client;
    let socket = sockets.get_mut::<tcp::Socket<'_>>(*handle);
    socket.connect(iface.context(), at, ports.0).expect("connects");
}

/// A party's frames go into the engine, unless the wire loses them.
fn crosses(world: &World<'_>, random: &mut Random, loss: u64, wire: &mut Wire, from: &Peer<'_>) {
    let port = from.end(|end| end.port);
    for frame in wire.sent.drain(..) {
        if !random.percent(loss) {
            world.0.borrow_mut().relay(port, frame);
        }
    }
    world.0.borrow_mut().settle();
}

fn arrivals(peer: &Peer<'_>) -> Vec<Vec<u8>> {
    peer.takes_all().into_iter().map(|seen| seen.bytes).collect()
}

/// ARP, by its source.
fn strays(world: &World<'_>, remote: &mut Wire, guest: &mut Wire) {
    for (_, frame) in world.0.borrow_mut().outside.strays.drain(..) {
        let to = if frame[6..12] == mac(2) { &mut *guest } else { &mut *remote };
        to.arrived.push_back(frame);
    }
}

/// Each side has read the beginning of the other's stream, or all of it.
fn check_streams(remote: &Party, guest: &Party, whole: bool) {
    for (from, to) in [(Side::R, guest), (Side::G, remote)] {
        let len = if whole { to.expected } else { to.read.len() };
        assert!(to.read == pattern_bytes(from as u32, 1, len), "{from:?}'s stream");
    }
}

#[test]
fn an_upload_into_a_guest_that_loses_its_cpu_is_acknowledged_while_it_waits() {
    let case = Case { runs: (30, 90), ..Case::default() };
    let with = run(&case);
    assert_eq!(with.world.flow(0, |f| f.state()), Some(State::Pass), "closed");
    assert!(with.acked_ms < 60, "acknowledged after {} ms", with.acked_ms);
    assert!(with.done_ms < 400, "done after {} ms", with.done_ms);
}

#[test]
fn uploads_arrive_whole_whatever_is_lost_and_whoever_opens() {
    for seed in 1..=6_usize {
        let case = Case {
            seed: seed as u64,
            guest_is_client: seed % 2 == 0,
            loss: [0, 2, 5][seed % 3],
            guest_loss: [0, 10][seed / 2 % 2],
            runs: [(1, 1), (5, 50)][seed / 3 % 2],
            ring: [2, 64][seed % 2],
            features: if seed < 4 { PortFeatures::default() } else { ALL_FEATURES },
            ..Case::default()
        };
        run(&case);
    }
}

#[test]
fn downloads_and_both_ways_at_once_arrive_whole() {
    for seed in 1..=6_usize {
        let case = Case {
            seed: seed as u64,
            bytes: if seed % 2 == 0 { [0, 150_000] } else { [100_000, 100_000] },
            guest_is_client: seed % 3 == 0,
            loss: [0, 3][seed / 2 % 2],
            guest_loss: [5, 0][seed / 3 % 2],
            runs: (20, 70),
            ring: 16,
            ..Case::default()
        };
        run(&case);
    }
}

#[test]
fn after_a_half_close_the_other_stream_goes_on() {
    for bytes in [[10, 150_000], [150_000, 10]] {
        run(&Case { bytes, runs: (30, 90), loss: 1, ..Case::default() });
    }
}

#[test]
fn a_reader_that_is_slow_fills_every_buffer_and_loses_nothing() {
    for buffers in [[2_000, 65_535], [65_535, 65_535], [300_000, 300_000]] {
        let case = Case {
            bytes: [200_000, 1000],
            buffers,
            read_rate: 400,
            runs: (30, 60),
            loss: 1,
            guest_loss: 1,
            ..Case::default()
        };
        run(&case);
    }
}

/// Amid an upload whose pipe is always full (COM-28).
#[test]
fn com_28_a_flow_that_an_absence_took_out_of_the_path_comes_back_and_is_closed_there() {
    let case = Case { bytes: [10_000_000, 0], runs: (30, 90), ..Case::default() };
    let outcome = run(&Case { absences: &[(100, 150)], ..case });
    assert!(outcome.done_ms > 300, "over too soon: {}", outcome.done_ms);
    let end = outcome.world.flow(0, |f| (f.state(), f.why()));
    assert_eq!(end, Some((State::Pass, Why::Closed)), "{}", outcome.done_ms);
}

#[test]
fn life_17_streams_arrive_whole_whenever_the_daemon_is_away() {
    let mut back = 0;
    for seed in 1..=100 {
        let mut random = Random::new(seed);
        let mut pick = |list: &[u64]| {
            list[usize::try_from(random.next() % list.len() as u64).expect("below the length")]
        };
        let [r, g] = [pick(&[0, 60_000, 200_000]), pick(&[0, 60_000])];
        let bytes = [r, g].map(|bytes| usize::try_from(bytes).expect("short"));
        let mut at = pick(&[1, 15, 25, 60]);
        let absences = (0..pick(&[1, 2, 4])).map(|_| {
            let from = at + pick(&[1, 7, 20, 50]);
            at = from + pick(&[2, 5, 20, 100, 400]);
            (from, at)
        });
        let absences = absences.collect::<Vec<_>>().leak();
        let case = Case {
            seed,
            bytes,
            guest_is_client: pick(&[0, 1]) == 1,
            loss: pick(&[0, 0, 1, 5]),
            guest_loss: pick(&[0, 0, 5]),
            runs: (pick(&[1, 5, 30]), pick(&[30, 90])),
            read_rate: if pick(&[0, 1]) == 0 { 3_000 } else { usize::MAX },
            absences,
            ..Case::default()
        };
        let outcome = run(&case);
        let end = outcome.world.flow(0, |f| f.why());
        println!("{end:?} {case:?}");
        back += u32::from(end == Some(Why::Closed));
    }
    assert!(back > 30, "{back} of 100 were closed in the path");
}

/// A failure that the property below found once, shrunk. Its seeds would not find them again, for
/// the strategy has changed since.
#[test]
fn what_once_stopped_two_strangers_does_not_any_more() {
    let tiny_ring = Case { bytes: [30_000, 0], ring: 1, ..Case::default() };
    let small_buffer = |receive| [receive, 65_535];
    let cases = [
        Case { seed: 5_134_897_044, guest_loss: 10, runs: (10, 700), read_rate: 100, ..tiny_ring },
        Case {
            seed: 2_764_711_125_928_771_892,
            bytes: [40_000, 20_000],
            loss: 15,
            guest_loss: 10,
            buffers: small_buffer(600),
            read_rate: 100,
            ..tiny_ring
        },
        Case {
            seed: 109_470_117_781_652_253,
            bytes: [0, 30_000],
            loss: 5,
            ring: 7,
            read_rate: 100,
            ..tiny_ring
        },
        Case {
            seed: 13_932_447_634_107_554_635,
            loss: 15,
            buffers: small_buffer(4_000),
            read_rate: 3_000,
            ..tiny_ring
        },
        Case {
            seed: 12_068_233_253_605_605_792,
            bytes: [40_000, 20_000],
            loss: 15,
            runs: (5, 50),
            ring: 2,
            buffers: small_buffer(600),
            read_rate: 100,
            ..Case::default()
        },
    ];
    for case in &cases {
        run(case);
    }
}

prop_compose! {
    fn any_case()(
        seed in 1..u64::MAX,
        bytes in prop::sample::select(vec![[30_000, 0], [0, 30_000], [40_000, 20_000], [1, 1]]),
        guest_is_client in any::<bool>(),
        loss in prop::sample::select(vec![0, 1, 5, 15]),
        guest_loss in prop::sample::select(vec![0, 1, 10]),
        runs in prop::sample::select(vec![(1, 1), (1, 10), (5, 50), (30, 90), (10, 700)]),
        ring in prop::sample::select(vec![1, 2, 7, 64]),
        offloads in any::<bool>(),
        receive in prop::sample::select(vec![600, 4_000, 65_535, 200_000]),
        read_rate in prop::sample::select(vec![100, 3_000, usize::MAX]),
    ) -> Case {
        let features = if offloads { ALL_FEATURES } else { PortFeatures::default() };
        let buffers = [receive, 65_535];
        Case {
            seed,
            bytes,
            guest_is_client,
            loss,
            guest_loss,
            runs,
            ring,
            features,
            buffers,
            read_rate,
            absences: &[],
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 16, failure_persistence: None, ..ProptestConfig::default()
    })]
    #[test]
    fn two_strangers_understand_each_other_across_anything(case in any_case()) {
        run(&case);
    }
}
