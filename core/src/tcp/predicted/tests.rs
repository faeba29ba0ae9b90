//! Two engines get the same frames, one with prediction and one without. After each frame the
//! frames that they sent and their whole states are compared.

use crate::engine::{Departure, Engine, EngineConfig, Transmit, Verdict};
use crate::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use crate::store::arena::Arena;
use crate::tcp::flow::{State, Why};
use crate::time::{Duration, Instant};
use crate::wire::checksum;
use crate::wire::emit::{CsumMode, TcpEmit};
use crate::wire::packet::{IpAddr16, IpVersion, Seq, TcpFlags, Timestamps};
use crate::wire::virtio_net::VirtioNetHdr;
use proptest::prelude::*;
use zerocopy::IntoBytes;

pub(in crate::tcp) const UPLINK: PortId = PortId(0);
pub(in crate::tcp) const GUEST: PortId = PortId(1);
pub(in crate::tcp) const PAGES: usize = 64;
/// R's first byte, and G's. R's numbers wrap after two segments.
const FIRST: [u32; 2] = [0xffff_f001, 0x7fff_ffff];
/// Window scale and SACK-Permitted of both SYNs, in whole words.
const SYN_OPTIONS: [u8; 12] = [2, 4, 0x05, 0xb4, 1, 3, 3, 7, 4, 2, 1, 1];

/// The parts of a connection besides its segments.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct Shape {
    pub(in crate::tcp) v6: bool,
    pub(in crate::tcp) timestamps: bool,
    pub(in crate::tcp) ecn: bool,
    /// All frames have a VLAN tag.
    pub(in crate::tcp) tagged: bool,
    /// R is another guest of this host.
    pub(in crate::tcp) neighbours: bool,
    /// H sends for G.
    pub(in crate::tcp) floods: bool,
    pub(in crate::tcp) budget_pages: usize,
}

/// A segment near what is expected: in most steps it is that, or off in one place.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct Wish {
    /// Of the stream's next byte, and of the acknowledgement.
    seq_off: i32,
    ack_off: i32,
    len: usize,
    /// Besides ACK.
    flags: u16,
    window: u16,
    ts_off: i32,
    /// None, the negotiated timestamps, or those that were not negotiated.
    odd_timestamps: bool,
    sack: bool,
    tos: u8,
    broken: bool,
    /// The TTL is not the one that the IP header's checksum covers.
    bad_header: bool,
    /// The checksum is partial.
    partial: bool,
    /// An option that H does not know.
    option: bool,
    /// IPv4 options.
    ip_option: bool,
    ttl: u8,
}

#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) enum Step {
    FromNet(Wish),
    FromGuest(Wish),
    BatchEnd,
    /// The guest's ring takes so many frames, and perhaps the guest sees them.
    Deliver(usize, bool),
    /// So many frames leave that H has for R.
    Depart(usize),
    Millis(u32),
    Days(u64),
    /// R goes on where H expects it, and so does G, where H sends for it.
    Resync,
    Syn,
    RingReset,
    Drain,
    /// R's bytes are acknowledged late from now on, or early.
    Late(bool),
}

/// One engine, and what it was told and said.
pub(in crate::tcp) struct Side<'m> {
    pub(in crate::tcp) engine: Engine<'m>,
    pub(in crate::tcp) now: Instant,
    pub(in crate::tcp) shape: Shape,
    /// Its clock is ahead of that of R and G by this.
    ahead: Duration,
    /// Relative to [`FIRST`]: what R and G send next, and the end of what G was given. An image
    /// that lies may have said anything.
    next: [u32; 2],
    given: u32,
    /// End of what R was sent, where H sends for G.
    left: u32,
    pub(in crate::tcp) said: Vec<String>,
    /// Orders of the operator.
    drains: bool,
    late: bool,
}

impl<'m> Side<'m> {
    pub(in crate::tcp) fn new(memory: &'m mut [u8], shape: Shape, predicts: bool) -> Self {
        let mut side = Self::without_flows(Instant::from_secs(1_000), memory, shape, predicts);
        let ecn = if shape.ecn { TcpFlags::ECE } else { TcpFlags::NONE };
        let cwr = if shape.ecn { TcpFlags::CWR } else { TcpFlags::NONE };
        side.sends(UPLINK, TcpFlags::SYN | ecn | cwr, Wish::PLAIN, &SYN_OPTIONS);
        side.sends(GUEST, TcpFlags::SYN | TcpFlags::ACK | ecn, Wish::PLAIN, &SYN_OPTIONS);
        side.sends(UPLINK, TcpFlags::ACK, Wish::PLAIN, &[]);
        let flow = side.engine.flows().next().expect("a handshake makes a flow").2;
        assert_eq!((flow.state(), flow.why()), (State::On, Why::Nothing));
        side
    }

    /// An engine that was just started.
    fn without_flows(now: Instant, memory: &'m mut [u8], shape: Shape, predicts: bool) -> Self {
        let arena = Arena::format(memory, 4, PAGES, 1).unwrap();
        let config = EngineConfig::new(16, [1, 2, 3, 4]);
        let mut engine = Engine::new(now, config, arena);
        engine.set_prediction(predicts);
        let guest = GuestConfig {
            mac: Some([2, 0, 0, 0, 0, 2]),
            ack_offload: true,
            congestion_offload: shape.floods,
            budget_bytes: (shape.budget_pages * crate::limits::PAGE) as u64,
            flows_max: 16,
            ..GuestConfig::default()
        };
        let r = match shape.neighbours {
            true => PortConfig::guest("r", GuestConfig { flows_max: 16, ..GuestConfig::default() }),
            false => PortConfig::uplink("uplink"),
        };
        engine.add_port(now, r).unwrap();
        engine.add_port(now, PortConfig::guest("guest", guest)).unwrap();
        let features = PortFeatures { uso: false, ..PortFeatures::ALL };
        engine.set_port_features(now, UPLINK, Some(features));
        engine.set_port_features(now, GUEST, Some(features));
        let said = Vec::new();
        Self {
            engine,
            now,
            shape,
            ahead: Duration::ZERO,
            next: [0; 2],
            given: 0,
            left: 0,
            said,
            drains: false,
            late: false,
        }
    }

    /// All that it has of the guest goes on in another engine, whose clock is ahead by `shift`. H
    /// sends for no guest then, in either. Both switches have just heard of both ends.
    pub(in crate::tcp) fn moved<'o>(
        &mut self,
        memory: &'o mut [u8],
        shift: Duration,
        predicts: bool,
    ) -> Side<'o> {
        self.engine.hand_back(self.now, GUEST);
        let mut other = Side::without_flows(self.now + shift, memory, self.shape, predicts);
        (other.drains, other.late, other.ahead) = (self.drains, self.late, shift);
        (other.next, other.given, other.left) = (self.next, self.given, self.left);
        if other.drains {
            other.engine.drain(other.now, GUEST);
        }
        other.engine.set_late(other.now, GUEST, other.late);
        self.hears_of_both();
        other.hears_of_both();
        let image = self.image();
        let imported = other.engine.import(other.now, GUEST, &image);
        assert_eq!(imported.map(|it| it.reset), Ok(0));
        (self.said, other.said) = (vec![], vec![]);
        other
    }

    /// The same with an image that somebody has changed, and sealed again.
    pub(in crate::tcp) fn moved_as<'o>(
        &mut self,
        memory: &'o mut [u8],
        change: impl FnOnce(&mut [u8]),
    ) -> Side<'o> {
        self.engine.hand_back(self.now, GUEST);
        let mut other = Side::without_flows(self.now, memory, self.shape, true);
        (other.next, other.given, other.left) = (self.next, self.given, self.left);
        other.hears_of_both();
        let mut image = self.image();
        change(&mut image);
        Self::seal(&mut image);
        let _ = other.engine.import(other.now, GUEST, &image);
        other
    }

    /// Makes the checksum of an image right.
    pub(in crate::tcp) fn seal(image: &mut [u8]) {
        crate::engine::seal_image(image);
    }

    /// An engine that was just started, at the time at which others begin.
    pub(in crate::tcp) fn other(memory: &'m mut [u8], shape: Shape) -> Self {
        Self::without_flows(Instant::from_secs(1_000), memory, shape, true)
    }

    /// R sends the next bytes.
    pub(in crate::tcp) fn sends_bytes(&mut self, len: usize) {
        self.step(Step::FromNet(Wish { len, ..Wish::PLAIN }));
    }

    /// So many bytes of R are lost.
    pub(in crate::tcp) fn skips_bytes(&mut self, len: usize) {
        self.next[0] = self.next[0].wrapping_add(small(len));
    }

    /// G does.
    pub(in crate::tcp) fn hands_over(&mut self, len: usize) {
        self.step(Step::FromGuest(Wish { len, ..Wish::PLAIN }));
    }

    /// The image of the guest's flows.
    pub(in crate::tcp) fn image(&mut self) -> Vec<u8> {
        self.transmits();
        self.engine.export(self.now, GUEST).expect("nothing is sent for it")
    }

    /// Frames without an IP packet.
    fn hears_of_both(&mut self) {
        self.transmits();
        self.is_heard_at(UPLINK, 1);
        self.is_heard_at(GUEST, 2);
    }

    /// A station sends such a frame.
    pub(in crate::tcp) fn is_heard_at(&mut self, from: PortId, mac: u8) {
        let macs = [[0xff; 6], [2, 0, 0, 0, 0, mac]].concat();
        let tag: &[u8] = if self.shape.tagged { &[0x81, 0, 0, 7] } else { &[] };
        let mut frame = [&macs[..], tag, &[0x88, 0xb5], &[0; 46]].concat();
        let hdr = &mut VirtioNetHdr::default();
        let _ = self.engine.handle_frame(self.now, from, hdr, &mut frame);
    }

    /// A segment of either end. A SYN has options for a payload, which its header then covers.
    fn sends(&mut self, from: PortId, flags: TcpFlags, wish: Wish, options: &[u8]) {
        let (me, other) = if from == UPLINK { (0, 1) } else { (1, 0) };
        let syn = u32::from(flags.syn());
        let acked = match from {
            UPLINK if self.shape.floods => self.left,
            UPLINK => self.next[1],
            _ => self.given,
        };
        let seq = FIRST[me].wrapping_add(self.next[me]).wrapping_add_signed(wish.seq_off);
        let ack = FIRST[other].wrapping_add(acked).wrapping_add_signed(wish.ack_off);
        let ack = if flags.ack() { ack } else { 0 };
        let host = |n: u8| match self.shape.v6 {
            true => IpAddr16([0x20, 1, 13, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n]),
            false => IpAddr16::from_v4([10, 0, 0, n]),
        };
        let ethertype = if self.shape.v6 { [0x86, 0xdd] } else { [8, 0] };
        let (mine, theirs) = if from == UPLINK { (1, 2) } else { (2, 1) };
        let l2 = [[2, 0, 0, 0, 0, theirs], [2, 0, 0, 0, 0, mine]].concat();
        let tag: &[u8] = if self.shape.tagged { &[0x81, 0, 0, 7] } else { &[] };
        let l2 = [&l2[..], tag, &ethertype].concat();
        let ms = u32::try_from((self.now - self.ahead).as_millis() % (1 << 32)).unwrap();
        let ts = Timestamps { tsval: ms.wrapping_add_signed(wish.ts_off), tsecr: ms };
        let blocks = [(Seq(ack.wrapping_add(2000)), Seq(ack.wrapping_add(3000)))];
        let payload: Vec<u8> =
            (0..wish.len).map(|i| seq.wrapping_add(small(i)).to_be_bytes()[3]).collect();
        let emit = TcpEmit {
            l2: &l2,
            version: if self.shape.v6 { IpVersion::V6 } else { IpVersion::V4 },
            src: host(mine),
            dst: host(theirs),
            tos: wish.tos,
            ttl: wish.ttl,
            flow_label: wish.ttl.into(),
            src_port: if from == UPLINK { 40_000 } else { 80 },
            dst_port: if from == UPLINK { 80 } else { 40_000 },
            seq: Seq(seq.wrapping_sub(syn)),
            ack: Seq(ack),
            flags,
            window: wish.window,
            timestamps: (self.shape.timestamps != wish.odd_timestamps).then_some(ts),
            sack: if wish.sack { &blocks } else { &[] },
            ip_id: 0,
        };
        let options = if wish.option { &[28, 4, 0, 0][..] } else { options };
        let body = &[options, &payload].concat()[..];
        let mut header = [0; TcpEmit::MAX_LEN];
        let partial = wish.partial || !options.is_empty();
        let mode = if partial { CsumMode::Partial } else { CsumMode::Full(&[body]) };
        let len = emit.emit(&mut header, body.len(), mode);
        let mut hdr = VirtioNetHdr::default();
        if partial {
            hdr = emit.partial_hdr(len, body.len(), u16::MAX);
        }
        header[self.tcp_at() + 12] += u8::try_from(options.len() / 4 * 16).unwrap();
        let mut frame = [&header[..len], body].concat();
        if wish.ip_option && !self.shape.v6 {
            add_ip_option(&mut frame, l2.len());
            hdr.csum_start += if partial { 4 } else { 0 };
        }
        if wish.bad_header && !self.shape.v6 {
            frame[l2.len() + 8] += 1;
        }
        if wish.broken {
            *frame.last_mut().unwrap() ^= 1;
        }
        let verdict = self.engine.handle_frame(self.now, from, &mut hdr, &mut frame);
        self.said.push(match verdict {
            Verdict::Forward(_) | Verdict::Flood => format!("{verdict:?} {hdr:?} {frame:?}"),
            Verdict::Absorbed | Verdict::Drop(_) => format!("{verdict:?}"),
        });
        self.transmits();
    }

    /// H sends for G.
    fn is_relayed(&self) -> bool {
        self.engine.flows().any(|(_, _, flow)| flow.losses.relayed().is_some())
    }

    /// Where the TCP header is in a frame.
    fn tcp_at(&self) -> usize {
        14 + if self.shape.tagged { 4 } else { 0 } + if self.shape.v6 { 40 } else { 20 }
    }

    fn transmits(&mut self) {
        while let Some(made) = self.engine.poll_transmit(self.now) {
            self.said.push(text(&made));
        }
    }

    pub(in crate::tcp) fn step(&mut self, step: Step) {
        match step {
            Step::FromNet(wish) => {
                let mut flags = TcpFlags::ACK | TcpFlags(wish.flags);
                if wish.len > 1 && self.is_relayed() {
                    // The one difference (module doc): a mark keeps it from the predicted path.
                    flags = flags | TcpFlags::ECE;
                }
                self.sends(UPLINK, flags, wish, &[]);
                if wish.seq_off == 0 {
                    self.next[0] = self.next[0].wrapping_add(small(wish.len));
                }
            }
            Step::FromGuest(wish) => {
                self.sends(GUEST, TcpFlags::ACK | TcpFlags(wish.flags), wish, &[]);
                if wish.seq_off == 0 {
                    self.next[1] = self.next[1].wrapping_add(small(wish.len));
                }
            }
            Step::BatchEnd => {
                self.engine.handle_batch_end(self.now);
                self.transmits();
            }
            Step::Deliver(frames, sees) => {
                let tcp_at = self.tcp_at();
                for _ in 0..frames {
                    let Some(made) = self.engine.poll_delivery(self.now, GUEST, 65_562) else {
                        break;
                    };
                    let payload: usize = made.parts()[1..].iter().map(|part| part.len()).sum();
                    let tcp = &made.parts()[0][tcp_at..];
                    let seq = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
                    let end = seq.wrapping_sub(FIRST[0]) + small(payload);
                    self.given = self.given.max(end);
                    self.said.push(text(&made));
                }
                self.engine.handle_guest_progress(self.now, GUEST, sees);
            }
            Step::Depart(frames) => {
                let tcp_at = self.tcp_at();
                for _ in 0..frames {
                    let Some(made) = self.engine.poll_departure(self.now) else { break };
                    let Departure::Given(made) = made else {
                        self.said.push(format!("{made:?}"));
                        continue;
                    };
                    self.said.push(text(&made));
                    // It may be in one piece.
                    let frame = made.parts().concat();
                    let tcp = &frame[tcp_at..];
                    let payload = tcp.len() - usize::from(tcp[12] >> 4) * 4;
                    let seq = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
                    let end = seq.wrapping_sub(FIRST[1]).wrapping_add(small(payload));
                    self.left = self.left.max(if end < 1 << 31 { end } else { 0 });
                }
            }
            Step::Millis(ms) => self.pass(Duration::from_millis(ms.into())),
            Step::Resync => {
                if let Some((_, _, flow)) = self.engine.flows().next() {
                    self.next[0] = Seq::wrap(flow.receiver.next()).0.wrapping_sub(FIRST[0]);
                    if let Some(relayed) = flow.losses.relayed() {
                        let accepted = Seq::wrap(relayed.accepted());
                        self.next[1] = accepted.0.wrapping_sub(FIRST[1]);
                    }
                }
            }
            Step::Syn => self.sends(UPLINK, TcpFlags::SYN, Wish::PLAIN, &SYN_OPTIONS),
            Step::Drain => {
                self.drains = true;
                self.engine.drain(self.now, GUEST);
            }
            Step::Late(late) => {
                self.late = late;
                self.engine.set_late(self.now, GUEST, late);
            }
            Step::RingReset => {
                let features = PortFeatures { uso: false, ..PortFeatures::ALL };
                self.engine.set_port_features(self.now, GUEST, None);
                self.engine.set_port_features(self.now, GUEST, Some(features));
            }
            Step::Days(days) => self.pass(Duration::from_secs(days * 86_400)),
        }
    }

    fn pass(&mut self, span: Duration) {
        self.now = self.now + span;
        // After days there is more to do than one call does (LIFE-11).
        while self.engine.poll_timeout().is_some_and(|at| at <= self.now) {
            self.engine.handle_timeout(self.now);
            self.transmits();
        }
    }

    /// All there is to see of it.
    fn state(&self) -> String {
        let engine = &self.engine;
        let flows: Vec<_> = engine.flows().collect();
        let records: Vec<_> = engine.arena().records().collect();
        let timeout = engine.poll_timeout();
        format!("{:#?}\n{flows:#?}\n{records:#?}\n{timeout:?}\n{:?}", self.said, engine.vm(GUEST))
    }
}

/// Four bytes of IPv4 options: no operations.
fn add_ip_option(frame: &mut Vec<u8>, ip_at: usize) {
    frame.splice(ip_at + 20..ip_at + 20, [1; 4]);
    frame[ip_at] += 1;
    let len = u16::from_be_bytes([frame[ip_at + 2], frame[ip_at + 3]]) + 4;
    frame[ip_at + 2..ip_at + 4].copy_from_slice(&len.to_be_bytes());
    frame[ip_at + 10..ip_at + 12].fill(0);
    let check = !checksum::fold(checksum::sum(&frame[ip_at..ip_at + 24], 0));
    frame[ip_at + 10..ip_at + 12].copy_from_slice(&check.to_be_bytes());
}

/// All of it but the pieces that it is in.
fn text(made: &Transmit<'_>) -> String {
    format!("{:?} {:?} {:?} {:?}", made.port, made.ingress, made.hdr, made.parts().concat())
}

fn small(len: usize) -> u32 {
    u32::try_from(len).unwrap()
}

impl Wish {
    const PLAIN: Self = Self {
        seq_off: 0,
        ack_off: 0,
        len: 0,
        flags: 0,
        window: 500,
        ts_off: 0,
        odd_timestamps: false,
        sack: false,
        tos: 0,
        broken: false,
        bad_header: false,
        partial: false,
        option: false,
        ip_option: false,
        ttl: 64,
    };
}

/// The expected field, or one that is off in one place.
fn wish(lens: &'static [usize]) -> impl Strategy<Value = Wish> {
    let off = prop_oneof![(-3_i32..4), (-3000_i32..3000)];
    (prop::sample::select(lens), 0_u8..60, off, any::<u16>()).prop_map(|(len, what, off, any)| {
        let plain = Wish { len, partial: any & 1 == 1, ..Wish::PLAIN };
        match what {
            0 => Wish { seq_off: off, ..plain },
            1 => Wish { ack_off: off, ..plain },
            2 if any & 15 == 0 => Wish { flags: any >> 4 & 0xff, ..plain },
            2 | 13 | 14 => Wish {
                flags: [0x40, 0x80, 0xc0, 0x20, 1, 0x100, 9, 0x48][usize::from(any & 7)],
                ..plain
            },
            11 => Wish { option: true, ..plain },
            12 => Wish { ttl: 65 + (any & 1) as u8, ..plain },
            3 => Wish { window: any, ..plain },
            4 => Wish { ts_off: off, ..plain },
            5 => Wish { odd_timestamps: true, ..plain },
            6 => Wish { sack: true, ..plain },
            7 => Wish { tos: 3, ..plain },
            8 => Wish { broken: true, ..plain },
            15 => Wish { bad_header: true, ..plain },
            16 => Wish { ip_option: true, ..plain },
            9 => Wish { flags: 8, ..plain },
            10 => Wish { window: 0, ..plain },
            _ => plain,
        }
    })
}

pub(in crate::tcp) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => wish(&[1448, 1448, 1448, 700, 4000, 20000, 1, 2, 0]).prop_map(Step::FromNet),
        3 => wish(&[0, 0, 0, 0, 300]).prop_map(Step::FromGuest),
        4 => wish(&[0, 1448, 1448, 300, 1, 5000]).prop_map(Step::FromGuest),
        3 => wish(&[0]).prop_map(Step::FromNet),
        4 => (0_usize..4).prop_map(Step::Depart),
        4 => Just(Step::BatchEnd),
        4 => (0_usize..4, any::<bool>()).prop_map(|(n, sees)| Step::Deliver(n, sees)),
        2 => (0_u32..400).prop_map(Step::Millis),
        1 => prop_oneof![Just(2_000), Just(20_000)].prop_map(Step::Millis),
        6 => Just(Step::Resync),
        1 => prop_oneof![8 => Just(Step::Resync), 1 => Just(Step::Syn), 1 => Just(Step::RingReset)],
        1 => prop_oneof![80 => Just(Step::Resync), 1 => Just(Step::Drain)],
        1 => prop_oneof![4 => Just(Step::Resync), 1 => any::<bool>().prop_map(Step::Late)],
        1 => prop_oneof![19 => Just(0_u64), 1 => Just(25)].prop_map(Step::Days),
    ]
}

pub(in crate::tcp) fn shape() -> impl Strategy<Value = Shape> {
    (any::<[bool; 4]>(), 0..8_u8, prop_oneof![Just(PAGES), Just(8)]).prop_map(
        |([v6, timestamps, ecn, floods], place, budget_pages)| {
            let (tagged, neighbours) = (place & 6 == 6, place & 5 == 5);
            Shape { v6, timestamps, ecn, tagged, neighbours, floods, budget_pages }
        },
    )
}

proptest! {
    // A case takes a tenth of a second, and all of core's tests run once for each mutation.
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    #[test]
    fn a_flow_is_the_same_with_and_without_prediction(
        shape in shape(),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let words = Arena::layout_len(4, PAGES) / 8;
        let mut memory = [vec![0_u64; words], vec![0_u64; words]];
        let [with, without] = memory.each_mut().map(|m| m.as_mut_bytes());
        let mut sides = [Side::new(with, shape, true), Side::new(without, shape, false)];
        for step in steps {
            sides.iter_mut().for_each(|side| side.step(step));
            let [with, without] = sides.each_ref().map(Side::state);
            prop_assert_eq!(with, without, "after {:?}", step);
        }
    }
}
