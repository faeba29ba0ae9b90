//! Two machines with a wire between them that delays, loses, doubles and reorders; no host.

use std::collections::BTreeMap;

use etherparse::checksum::Sum16BitWords;
use nightporter_core::time::{Duration, Instant};

use super::app::USER_TIMEOUT;
use super::{Complaint, EndReport, MAYBE_NETWORK, Outcome, Stack, build};
use crate::plan::{ConnPlan, Machine, Offloads, Quirks, Reuse, StackKind, StackPlan, Workload};
use crate::random::Random;
use nightporter_check::frame::Frame;
use nightporter_check::wire::{Packet, written};

const CLIENT: Machine = Machine::Remote(0);
const SERVER: Machine = Machine::Guest(0);

/// The default plan of a machine.
pub(super) fn plan(kind: StackKind) -> StackPlan {
    StackPlan {
        kind,
        receive_bytes: 65_535,
        send_bytes: 65_535,
        window_scale: Some(7),
        timestamps: true,
        sack: true,
        ecn: false,
        mss: None,
        isn: None,
        syn_options: Vec::new(),
        first_segments: None,
        quirks: Quirks::default(),
    }
}

pub(super) fn conn(workload: Workload) -> ConnPlan {
    ConnPlan {
        client: CLIENT,
        server: SERVER,
        v6: false,
        opens_at: Instant::from_millis(1),
        workload,
        reuse: None,
    }
}

/// Faults of the wire, in parts of a million.
#[derive(Clone, Copy, Default)]
struct Faults {
    loss: u32,
    duplicate: u32,
    reorder: u32,
    /// Packets that can be marked are.
    mark: u32,
}

const LOSSY: Faults = Faults { loss: 30_000, duplicate: 10_000, reorder: 30_000, mark: 0 };

struct World {
    now: Instant,
    ends: [Box<dyn Stack>; 2],
    in_flight: BTreeMap<(Instant, u64), (usize, Frame)>,
    sent: u64,
    random: Random,
    faults: Faults,
    delay: Duration,
    marked: u64,
    /// With `SEED` set: all frames, for a failure.
    trace: Vec<String>,
}

/// A frame in one line.
fn line(at: Instant, from: usize, frame: &Frame) -> String {
    let Ok(packet) = Packet::parse(&frame.bytes) else { return "malformed".into() };
    let Some((ip, tcp)) = packet.tcp() else { return format!("{at} {from} not TCP") };
    let options = &tcp.options;
    format!(
        "{at} {from} {}>{} {} {}+{} ack {} win {} ts {:?} sack {:?} ecn {}",
        tcp.src_port,
        tcp.dst_port,
        tcp.flags,
        tcp.seq.0,
        tcp.payload_len,
        tcp.ack.0,
        tcp.window,
        options.timestamps.map(|ts| (ts.tsval, ts.tsecr)),
        options.sack.as_slice(),
        ip.tos & 3,
    )
}

/// Sets CE on an IPv4 packet that is ECN-capable.
pub(super) fn mark(frame: &mut Frame) -> bool {
    let is_capable = frame.bytes[12..14] == [8, 0] && frame.bytes[15] & 3 == 2;
    if is_capable {
        frame.bytes[15] |= 3;
        frame.bytes[24..26].fill(0);
        let check = written(&Sum16BitWords::new().add_slice(&frame.bytes[14..34]));
        frame.bytes[24..26].copy_from_slice(&check);
    }
    is_capable
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.trace.iter().for_each(|line| println!("{line}"));
        }
    }
}

impl World {
    fn new(plans: [&StackPlan; 2], conns: &[ConnPlan], seed: u64) -> Self {
        let mut ends = [
            build(plans[0], CLIENT, 1500, seed ^ 0xaaaa),
            build(plans[1], SERVER, 1500, seed ^ 0x5555),
        ];
        for end in &mut ends {
            for (id, conn) in conns.iter().enumerate() {
                end.add_conn(id, conn);
            }
        }
        Self {
            now: Instant::ZERO,
            ends,
            in_flight: BTreeMap::new(),
            sent: 0,
            random: Random::new(seed, "wire"),
            faults: Faults::default(),
            delay: Duration::from_micros(100),
            marked: 0,
            trace: Vec::new(),
        }
    }

    fn collect(&mut self, from: usize) {
        while let Some(mut frame) = self.ends[from].poll_transmit(self.now) {
            self.sent += 1;
            if std::env::var_os("SEED").is_some() {
                self.trace.push(line(self.now, from, &frame));
            }
            if self.random.ppm(self.faults.mark) {
                self.marked += u64::from(mark(&mut frame));
            }
            if self.random.ppm(self.faults.loss) {
                continue;
            }
            let copies = 1 + u64::from(self.random.ppm(self.faults.duplicate));
            for copy in 0..copies {
                let late = self.random.ppm(self.faults.reorder) || copy > 0;
                let extra = if late { self.random.below(5_000) } else { 0 };
                let at = self.now + self.delay + Duration::from_micros(extra);
                self.in_flight.insert((at, self.sent * 2 + copy), (1 - from, frame.clone()));
            }
        }
    }

    /// The next thing happens, if there is one before `end`.
    fn step(&mut self, end: Instant) -> bool {
        let timers = [0, 1].map(|n| self.ends[n].poll_timeout(self.now));
        let frame = self.in_flight.first_key_value().map(|(&(at, _), _)| at);
        let Some(next) = timers.into_iter().flatten().chain(frame).min() else { return false };
        if next > end {
            return false;
        }
        self.now = self.now.max(next);
        if frame == Some(next)
            && let Some((_, (to, frame))) = self.in_flight.pop_first()
        {
            self.ends[to].handle_frame(self.now, frame);
        }
        for n in 0..2 {
            if self.ends[n].poll_timeout(self.now).is_some_and(|at| at <= self.now) {
                self.ends[n].handle_timeout(self.now);
            }
            self.collect(n);
        }
        true
    }

    fn run_until(&mut self, end: Instant) {
        while self.step(end) {}
        self.now = end;
    }

    /// Until every connection is over.
    fn run(&mut self) {
        let end = self.now + Duration::from_secs(3600);
        while self.ends.iter().any(|e| e.ends_open() > 0) && self.step(end) {}
    }

    fn reports(&self) -> [Vec<EndReport>; 2] {
        [self.ends[0].ends(), self.ends[1].ends()]
    }

    /// All streams arrived as they were written, and all ended well.
    fn expect_all_well(&self, what: &str) {
        let [clients, servers] = self.reports();
        for (a, b) in clients.iter().zip(&servers) {
            for (writer, reader) in [(a, b), (b, a)] {
                assert_eq!(reader.wrong_at, None, "{what}: {reader:?}");
                assert_eq!(writer.written, writer.to_write, "{what}: {writer:?}");
                assert_eq!(reader.read, writer.written, "{what}: {reader:?}");
                assert_eq!(reader.outcome, Outcome::Closed, "{what}: {reader:?}");
                assert_eq!(writer.acked_at.is_some(), writer.to_write > 0, "{what}: {writer:?}");
                assert_eq!(reader.delivered_at.is_some(), writer.to_write > 0, "{what}");
            }
        }
    }

    fn complaints(&self) -> Vec<Complaint> {
        self.ends.iter().flat_map(|end| end.complaints()).collect()
    }
}

fn workloads() -> Vec<Workload> {
    vec![
        Workload::Bulk { up: 300_000, down: 0 },
        Workload::Bulk { up: 1, down: 300_001 },
        Workload::Bulk { up: 100_000, down: 100_000 },
        Workload::Bulk { up: 0, down: 0 },
        Workload::RequestResponse { request: 100, response: 20_000, count: 10 },
        Workload::HalfClose { up: 50_000, down: 70_000 },
        Workload::HalfClose { up: 0, down: 5 },
        Workload::Idle { idle_s: 100 },
    ]
}

const PAIRINGS: [[StackKind; 2]; 4] = [
    [StackKind::Smoltcp, StackKind::Smoltcp],
    [StackKind::Smoltcp, StackKind::Strict],
    [StackKind::Strict, StackKind::Smoltcp],
    [StackKind::Strict, StackKind::Strict],
];

#[test]
fn on_a_clean_wire_every_pairing_completes_every_workload_without_complaint() {
    for kinds in PAIRINGS {
        for v6 in [false, true] {
            let conns: Vec<ConnPlan> =
                workloads().into_iter().map(|w| ConnPlan { v6, ..conn(w) }).collect();
            let mut world = World::new([&plan(kinds[0]), &plan(kinds[1])], &conns, 1);
            world.run();
            world.expect_all_well(&format!("{kinds:?} v6 {v6}"));
            assert_eq!(world.complaints(), []);
        }
    }
}

#[test]
fn on_a_bad_wire_every_pairing_completes_every_workload() {
    for kinds in PAIRINGS {
        for seed in 0..20 {
            let conns: Vec<ConnPlan> = workloads().into_iter().map(conn).collect();
            let mut world = World::new([&plan(kinds[0]), &plan(kinds[1])], &conns, seed);
            world.faults = LOSSY;
            world.run();
            world.expect_all_well(&format!("{kinds:?} seed {seed}"));
        }
    }
}

#[test]
fn a_reader_that_stops_loses_nothing_however_long_it_stops() {
    for kinds in PAIRINGS {
        for size in [100, 300_000] {
            let conns = [conn(Workload::Bulk { up: size, down: size })];
            let mut world = World::new([&plan(kinds[0]), &plan(kinds[1])], &conns, 1);
            world.ends[1].set_reading(false);
            world.run_until(Instant::from_secs(60));
            world.ends[1].set_reading(true);
            world.run();
            world.expect_all_well(&format!("{kinds:?} {size}"));
        }
    }
}

#[test]
fn an_end_whose_peer_is_gone_gives_up() {
    for kinds in PAIRINGS {
        let conns = [
            conn(Workload::Bulk { up: 10_000_000, down: 0 }),
            conn(Workload::Idle { idle_s: 9000 }),
        ];
        let mut world = World::new([&plan(kinds[0]), &plan(kinds[1])], &conns, 1);
        world.run_until(Instant::from_millis(5));
        assert_eq!(world.ends[0].ends_open(), 2);
        world.faults.loss = 1_000_000;
        let gone_at = world.now;
        world.run();
        assert_eq!([0, 1].map(|n| world.ends[n].ends_open()), [0, 0]);
        assert!(world.now.since(gone_at) < USER_TIMEOUT.saturating_mul(2), "{}", world.now);
        let [clients, servers] = world.reports();
        assert!(clients.iter().chain(&servers).all(|end| end.outcome == Outcome::Reset));
    }
}

#[test]
fn ports_are_used_again_at_once_and_streams_do_not_mix() {
    for kinds in PAIRINGS {
        let conns: Vec<ConnPlan> = (0..5)
            .map(|_| {
                let conn = conn(Workload::Bulk { up: 10_000, down: 5_000 });
                ConnPlan { reuse: Some(Reuse { port: 7, isn: None }), ..conn }
            })
            .collect();
        let mut world = World::new([&plan(kinds[0]), &plan(kinds[1])], &conns, 1);
        world.run();
        world.expect_all_well(&format!("{kinds:?}"));
        assert!(world.now < Instant::from_secs(30), "{}", world.now);
    }
}

#[test]
fn the_same_seed_makes_the_same_frames() {
    for kinds in PAIRINGS {
        let frames = || {
            let conns: Vec<ConnPlan> = workloads().into_iter().map(conn).collect();
            let mut world = World::new([&plan(kinds[0]), &plan(kinds[1])], &conns, 3);
            world.faults = LOSSY;
            world.run_until(Instant::from_millis(500));
            std::mem::take(&mut world.in_flight)
        };
        assert_eq!(frames(), frames());
    }
}

/// Some seeds, or the one in the environment, for which a trace is kept.
fn seeds(count: u64) -> std::ops::Range<u64> {
    match std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..count,
    }
}

/// Any stack that is not hostile.
fn any_plan(random: &mut Random) -> StackPlan {
    StackPlan {
        kind: random.pick(&[StackKind::Smoltcp, StackKind::Strict, StackKind::Strict]),
        receive_bytes: random.pick(&[600, 2_000, 4_096, 65_535, 300_000, 6_000_000]),
        send_bytes: random.pick(&[500, 16_384, 65_535, 1_000_000]),
        window_scale: random.pick(&[None, Some(0), Some(3), Some(7), Some(14), Some(15)]),
        timestamps: random.percent(70),
        sack: random.percent(70),
        ecn: random.percent(50),
        mss: random.pick(&[None, None, Some(1400), Some(536), Some(88)]),
        isn: random.pick(&[None, Some(0), Some(u32::MAX), Some(0xffff_f000), Some(0x7fff_ffff)]),
        syn_options: random.pick(&[vec![], vec![253, 4, 1, 2], vec![1, 1, 1], vec![30, 4, 0, 1]]),
        first_segments: None,
        quirks: Quirks::default(),
    }
}

fn any_world(seed: u64, faults: Faults) -> World {
    let mut random = Random::new(seed, "any world");
    let plans = [any_plan(&mut random), any_plan(&mut random)];
    let v6 = random.percent(30);
    let conns: Vec<ConnPlan> =
        workloads().into_iter().map(|w| ConnPlan { v6, ..conn(w) }).collect();
    let mut world = World::new([&plans[0], &plans[1]], &conns, seed);
    let offloads = if random.percent(50) { Offloads::ALL } else { Offloads::NONE };
    for end in &mut world.ends {
        end.set_offloads(offloads);
    }
    world.faults = faults;
    world
}

#[test]
fn stacks_of_any_kind_understand_each_other_without_complaint() {
    for seed in seeds(60) {
        let mut world = any_world(seed, Faults { mark: 50_000, ..Faults::default() });
        world.run();
        world.expect_all_well(&format!("seed {seed}"));
        assert_eq!(world.complaints(), [], "seed {seed}");
    }
}

#[test]
fn over_a_bad_wire_they_complain_of_the_network_only() {
    for seed in seeds(60) {
        let mut world = any_world(seed, Faults { mark: 50_000, ..LOSSY });
        world.run();
        world.expect_all_well(&format!("seed {seed}"));
        let complaints = world.complaints();
        let other = complaints.iter().find(|c| !c.cause.starts_with(MAYBE_NETWORK));
        assert_eq!(other, None, "seed {seed}");
    }
}

#[test]
fn a_machine_that_takes_window_back_stalls_nobody() {
    for seed in seeds(20) {
        let mut world = any_world(seed, LOSSY);
        for n in 0..20 {
            let (end, on) = (n / 2 % 2, n % 2 == 0);
            world.ends[end].set_shrinking(on);
            world.run_until(world.now + Duration::from_millis(20));
        }
        world.run();
        world.expect_all_well(&format!("seed {seed}"));
    }
}

#[test]
fn marks_slow_down_a_sender_and_lose_nothing() {
    let ecn = StackPlan { ecn: true, ..plan(StackKind::Strict) };
    let conns = [conn(Workload::Bulk { up: 3_000_000, down: 0 })];
    let done_at = |mark| {
        let mut world = World::new([&ecn, &ecn], &conns, 1);
        world.faults.mark = mark;
        world.run();
        world.expect_all_well("marks");
        assert_eq!(world.marked > 0, mark > 0);
        assert_eq!(world.complaints(), []);
        world.reports()[1][0].delivered_at.expect("delivered")
    };
    assert!(done_at(100_000) > done_at(0));
}
