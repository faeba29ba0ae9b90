//! Traces of our TCP: the segments that it takes, refuses, sends and complains of, with the rule of
//! Linux.
//!
//! `t.gets(seg(1, 1001).ack(1))` is a segment from the peer, `t.sent()` the answers, as text:
//! `1:1 ack 1001` is an empty segment at 1. Numbers are relative; streams start at 1.

use nightporter_core::time::{Duration, Instant};

use super::super::address::{Key, Ports};
use super::super::app::{KEEPALIVE, USER_TIMEOUT};
use super::super::emit::{Options, Route, Segment};
use super::super::shell::Shell;
use super::super::{Outcome, Stack};
use super::{MAYBE_NETWORK, Strict};
use crate::plan::{ConnPlan, Floods, Machine, Quirks, StackKind, StackPlan, Workload};
use nightporter_check::frame::Frame;
use nightporter_check::stream::Stream;
use nightporter_check::wire::{GSO_TCPV4, Packet, TcpFlags};

const PEER: Machine = Machine::Remote(0);
const OWN: Machine = Machine::Guest(0);
const PEER_ISN: u32 = 0xffff_fff0;
const MSS: u16 = 1000;

/// A segment from the peer.
#[derive(Clone, Debug)]
struct Seg {
    from: i64,
    to: i64,
    ack: i64,
    flags: TcpFlags,
    window: u16,
    /// `None`: as time goes by. `Some(None)`: no timestamps.
    tsval: Option<Option<u32>>,
    tsecr: u32,
    sack: Vec<(i64, i64)>,
    ce: bool,
    /// Bytes of another stream.
    wrong: bool,
}

fn seg(from: i64, to: i64) -> Seg {
    Seg {
        from,
        to,
        ack: 1,
        flags: TcpFlags::ACK,
        window: 60_000,
        tsval: None,
        tsecr: 0,
        sack: Vec::new(),
        ce: false,
        wrong: false,
    }
}

impl Seg {
    fn ack(self, ack: i64) -> Self {
        Self { ack, ..self }
    }

    fn flags(self, flags: TcpFlags) -> Self {
        Self { flags, ..self }
    }

    fn window(self, window: u16) -> Self {
        Self { window, ..self }
    }

    fn ts(self, tsval: u32) -> Self {
        Self { tsval: Some(Some(tsval)), ..self }
    }

    fn sack(self, sack: &[(i64, i64)]) -> Self {
        Self { sack: sack.to_vec(), ..self }
    }
}

fn plan() -> StackPlan {
    StackPlan {
        kind: StackKind::Strict,
        receive_bytes: 10_000,
        send_bytes: 1_000_000,
        window_scale: Some(0),
        timestamps: true,
        sack: true,
        ecn: false,
        mss: Some(MSS + 12),
        isn: Some(0xffff_0000),
        syn_options: Vec::new(),
        first_segments: None,
        quirks: Quirks::default(),
    }
}

/// A peer made by hand in front of the stack.
struct Trace {
    now: Instant,
    stack: Shell<Strict>,
    plan: StackPlan,
    route: Route,
    stream: Stream,
    /// The last frames it sent.
    frames: Vec<Frame>,
}

impl Trace {
    /// The stack serves; it writes `down` bytes, and closes.
    fn new(plan: StackPlan, down: u64) -> Self {
        Self::serving(plan, Workload::Bulk { up: 1_000_000, down }, 1)
    }

    fn serving(plan: StackPlan, workload: Workload, seed: u64) -> Self {
        let conn = ConnPlan {
            client: PEER,
            server: OWN,
            v6: false,
            opens_at: Instant::ZERO,
            workload,
            reuse: None,
        };
        let mut stack = Shell::new(OWN, Strict::new(&plan, OWN, 1500, seed));
        stack.add_conn(0, &conn);
        let ports = Ports::of(0, &conn);
        let own = OWN.address();
        let peer = own.ip(false).0;
        let key = Key { peer, own_port: ports.client, peer_port: ports.server };
        let route = Route::new(&PEER.address(), &key, own.mac);
        let now = Instant::from_secs(10);
        Self { now, stack, plan, route, stream: Stream::of(0, true), frames: Vec::new() }
    }

    /// As [`Self::new`], and the handshake is over.
    fn open(plan: StackPlan, down: u64) -> Self {
        let mut t = Self::new(plan, down);
        t.syn();
        t.gets(seg(1, 1));
        t
    }

    fn syn(&mut self) {
        let mut options = Options::default();
        options.mss(MSS + 12);
        if self.plan.sack {
            options.sack_permitted();
        }
        options.timestamps(self.ms(), 0);
        options.window_scale(0);
        let ecn = if self.plan.ecn { TcpFlags::ECE | TcpFlags::CWR } else { TcpFlags::NONE };
        let segment = Segment {
            seq: PEER_ISN,
            flags: TcpFlags::SYN | ecn,
            window: 60_000,
            options: options.bytes(),
            ..Segment::default()
        };
        let frame = segment.frame(&self.route);
        self.takes(frame);
    }

    #[expect(clippy::cast_possible_truncation, reason = "ten seconds")]
    fn ms(&self) -> u32 {
        self.now.as_millis() as u32
    }

    fn frame(&self, s: &Seg) -> Frame {
        let own = self.plan.isn.expect("a test's");
        let wrap = super::incoming::wrap;
        let mut options = Options::default();
        if let Some(tsval) = s.tsval.unwrap_or(Some(self.ms())) {
            options.timestamps(tsval, s.tsecr);
        }
        options.sack(s.sack.iter().map(|b| (wrap(b.0, own), wrap(b.1, own))));
        let stream = if s.wrong { Stream::of(1, true) } else { self.stream };
        let len = usize::try_from(s.to - s.from).expect("forwards");
        let mut frame = Segment {
            seq: wrap(s.from, PEER_ISN),
            ack: wrap(s.ack, own),
            flags: s.flags,
            window: s.window,
            options: options.bytes(),
            payload: (len > 0).then_some((stream, (s.from - 1).unsigned_abs(), len)),
            ect: s.ce,
            ..Segment::default()
        }
        .frame(&self.route);
        if s.ce {
            super::super::tests::mark(&mut frame);
        }
        frame
    }

    fn takes(&mut self, frame: Frame) {
        self.stack.handle_frame(self.now, frame);
        self.collect();
    }

    fn gets(&mut self, s: Seg) {
        let frame = self.frame(&s);
        self.takes(frame);
    }

    fn collect(&mut self) {
        self.frames = std::iter::from_fn(|| self.stack.poll_transmit(self.now)).collect();
    }

    /// Time passes, timers run; only what was sent last is kept.
    fn waits(&mut self, span: Duration) {
        let end = self.now + span;
        let mut all = Vec::new();
        while let Some(at) = self.stack.poll_timeout(self.now).filter(|&at| at <= end) {
            self.now = at.max(self.now);
            self.stack.handle_timeout(self.now);
            self.collect();
            all.append(&mut self.frames);
        }
        self.now = end;
        self.frames = all;
    }

    /// Segments sent since the last event, as text.
    fn sent(&self) -> Vec<String> {
        self.frames.iter().map(|frame| self.text(frame)).collect()
    }

    fn text(&self, frame: &Frame) -> String {
        let packet = Packet::parse(&frame.bytes).expect("well-formed");
        let (_, tcp) = packet.tcp().expect("TCP");
        let seq = tcp.seq.0.wrapping_sub(self.plan.isn.expect("a test's"));
        let mut text = format!("{seq}:{}", seq.wrapping_add(tcp.payload_len));
        if tcp.flags.without(TcpFlags::PSH) != TcpFlags::ACK {
            text = format!("{} {text}", tcp.flags.without(TcpFlags::PSH));
        }
        if tcp.flags.ack() {
            text += &format!(" ack {}", tcp.ack.0.wrapping_sub(PEER_ISN));
        }
        for (from, to) in tcp.options.sack.as_slice() {
            text +=
                &format!(" <{}:{}>", from.0.wrapping_sub(PEER_ISN), to.0.wrapping_sub(PEER_ISN));
        }
        text
    }

    fn window(&self) -> u16 {
        let frame = self.frames.last().expect("it sent");
        Packet::parse(&frame.bytes).expect("parsed").tcp().expect("TCP").1.window
    }

    fn tsval(&self) -> u32 {
        let frame = self.frames.last().expect("it sent");
        let packet = Packet::parse(&frame.bytes).expect("parsed");
        packet.tcp().expect("TCP").1.options.timestamps.expect("timestamps").tsval
    }

    fn read(&self) -> u64 {
        self.stack.ends()[0].read
    }

    fn complaints(&self) -> Vec<&'static str> {
        self.stack.complaints().into_iter().map(|c| c.cause).collect()
    }
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

// --- Receiving -----------------------------------------------------------------------------------

#[test]
fn data_in_order_is_read_and_acknowledged_at_once_while_young() {
    let mut t = Trace::open(plan(), 0);
    t.gets(seg(1, 1001));
    // It has nothing to write: its FIN went out when the handshake was over.
    assert_eq!(t.sent(), ["2:2 ack 1001"]);
    assert_eq!((t.read(), t.complaints()), (1000, vec![]));
}

#[test]
fn an_old_connection_acknowledges_every_second_segment_or_after_40_ms() {
    let mut t = Trace::open(plan(), 0);
    for n in 0..20 {
        t.gets(seg(n * 1000 + 1, n * 1000 + 1001).ack(2));
    }
    assert_eq!(t.sent(), ["2:2 ack 20001"]);
    t.gets(seg(20_001, 21_001).ack(2));
    assert!(t.sent().is_empty());
    t.waits(ms(39));
    assert!(t.sent().is_empty());
    t.waits(ms(1));
    assert_eq!(t.sent(), ["2:2 ack 21001"]);
}

#[test]
fn early_data_is_sacked_newest_first_and_what_comes_twice_before_all() {
    let mut t = Trace::open(plan(), 0);
    t.gets(seg(2001, 3001));
    assert_eq!(t.sent(), ["2:2 ack 1 <2001:3001>"]);
    t.gets(seg(4001, 5001));
    assert_eq!(t.sent(), ["2:2 ack 1 <4001:5001> <2001:3001>"]);
    t.gets(seg(2001, 3001));
    assert_eq!(t.sent(), ["2:2 ack 1 <2001:3001> <2001:3001> <4001:5001>"]);
    t.gets(seg(1, 2001));
    assert_eq!(t.sent(), ["2:2 ack 3001 <4001:5001>"]);
    t.gets(seg(1, 1001));
    assert_eq!(t.sent(), ["2:2 ack 3001 <1:1001> <4001:5001>"]);
    assert_eq!(t.read(), 3000);
}

// --- K-01 and K-02: sequence numbers -------------------------------------------------------------

#[test]
fn an_ack_in_a_segment_before_what_was_acknowledged_is_not_looked_at() {
    let mut t = Trace::open(plan(), 5000);
    t.gets(seg(1, 1001));
    t.gets(seg(500, 500).ack(5002)); // its end is before 1001
    assert_eq!(t.stack.ends()[0].acked_at, None);
    t.gets(seg(1001, 1001).ack(5002));
    assert!(t.stack.ends()[0].acked_at.is_some());
}

#[test]
fn an_ack_in_a_segment_beyond_the_window_is_not_looked_at() {
    let mut t = Trace::open(plan(), 5000);
    t.gets(seg(20_000, 20_000).ack(5002));
    assert_eq!(t.stack.ends()[0].acked_at, None);
    assert_eq!(t.sent(), ["5002:5002 ack 1"]);
    assert_eq!(t.complaints(), ["segment beyond the window"]);
}

#[test]
fn data_that_ends_beyond_the_window_is_taken_only_while_nothing_is_unread() {
    for reading in [true, false] {
        let mut t = Trace::open(plan(), 0);
        t.stack.set_reading(reading);
        t.gets(seg(1, 1001));
        t.gets(seg(1001, 9001));
        let edge = 9001 + i64::from(t.window());
        t.gets(seg(9001, edge + 500));
        t.stack.set_reading(true);
        t.waits(ms(1));
        assert_eq!(t.read() > 9000, reading);
        assert_eq!(t.complaints(), ["data beyond the window", "more than the MSS"]);
    }
}

// --- K-03: timestamps ----------------------------------------------------------------------------

#[test]
fn a_pure_ack_that_overtakes_data_with_its_timestamp_kills_the_data() {
    let mut t = Trace::open(plan(), 0);
    let now = t.ms();
    t.gets(seg(1, 1).ts(now + 100));
    t.gets(seg(1, 1001).ts(now + 98));
    assert_eq!((t.read(), t.sent()), (0, vec!["2:2 ack 1".to_string()]));
    assert_eq!(t.complaints(), [format!("{MAYBE_NETWORK}PAWS on something new")]);
    t.gets(seg(1, 1001).ts(now + 99)); // one tick is forgiven
    assert_eq!(t.read(), 1000);
}

#[test]
fn a_segment_after_a_hole_does_not_move_the_clock() {
    let mut t = Trace::open(plan(), 0);
    let now = t.ms();
    t.gets(seg(2001, 3001).ts(now + 100));
    t.gets(seg(1, 2001).ts(now + 1));
    assert_eq!(t.read(), 3000);
}

#[test]
fn what_has_no_timestamp_is_taken_and_noticed() {
    let mut t = Trace::open(plan(), 0);
    t.gets(Seg { tsval: Some(None), ..seg(1, 1001) });
    assert_eq!((t.read(), t.complaints()), (1000, vec!["no timestamp"]));
}

#[test]
fn an_echo_of_what_was_never_sent_is_noticed() {
    let mut t = Trace::open(plan(), 0);
    t.gets(seg(1, 1001));
    let newest = t.tsval();
    t.gets(Seg { tsecr: newest, ..seg(1001, 2001) });
    assert!(t.complaints().is_empty());
    t.gets(Seg { tsecr: newest + 1000, ..seg(2001, 3001) });
    assert_eq!(t.complaints(), ["echo of a timestamp not sent"]);
}

// --- K-04 and K-05: ACKs and windows -------------------------------------------------------------

#[test]
fn data_with_an_ack_of_the_future_is_not_taken() {
    let mut t = Trace::open(plan(), 5000);
    t.gets(seg(1, 1001).ack(5003));
    assert_eq!((t.read(), t.sent()), (0, vec!["5002:5002 ack 1".to_string()]));
    assert_eq!(t.complaints(), ["ACK of something not sent"]);
}

#[test]
fn data_with_an_ack_older_than_a_window_is_not_taken() {
    let mut t = Trace::open(plan(), 200_000);
    let mut acked = 1;
    while acked < 150_000 {
        acked += 10_000;
        t.gets(seg(1, 1).ack(acked).window(20_000));
    }
    t.gets(seg(1, 1001).ack(acked - 60_000)); // the widest window was 60,000
    assert_eq!(t.read(), 1000);
    t.gets(seg(1001, 2001).ack(acked - 60_001));
    assert_eq!(t.read(), 1000);
    assert_eq!(t.complaints(), [format!("{MAYBE_NETWORK}ACK older than a window")]);
}

#[test]
fn a_window_with_the_same_numbers_is_taken_only_if_it_grows_or_is_zero() {
    let mut t = Trace::open(StackPlan { send_bytes: 100_000, ..plan() }, 100_000);
    t.gets(seg(1, 1).ack(10_001).window(3000));
    assert_eq!(t.sent(), ["10001:11001 ack 1", "11001:12001 ack 1", "12001:13001 ack 1"]);
    t.gets(seg(1, 1).ack(10_001).window(2000)); // smaller: an old one
    t.gets(seg(1, 1).ack(10_001).window(5000));
    assert_eq!(t.sent(), ["13001:14001 ack 1", "14001:15001 ack 1"]);
    t.gets(seg(1, 1).ack(10_001).window(0));
    t.gets(seg(1, 1).ack(10_001).window(7000));
    assert_eq!(t.sent(), ["15001:16001 ack 1", "16001:17001 ack 1"]);
}

#[test]
fn a_stale_window_on_late_data_is_taken_if_its_number_is_higher() {
    let mut t = Trace::open(plan(), 100_000);
    t.gets(seg(1, 1).ack(10_001));
    assert_eq!(t.sent().last().expect("twenty"), "29001:30001 ack 1");
    t.gets(seg(1, 1001).ack(10_001).window(100)); // at the same place: not taken
    assert_eq!(t.sent(), ["30001:30001 ack 1001"]);
    t.gets(seg(1001, 2001).ack(10_001).window(100));
    assert_eq!(t.sent(), ["10101:10101 ack 2001"]); // K-06 shows it
}

#[test]
fn a_window_without_scale_is_a_multiple_of_the_segments_that_come_and_not_of_the_mss() {
    let mut t =
        Trace::open(StackPlan { receive_bytes: 1400, window_scale: None, ..plan() }, 100_000);
    t.stack.set_reading(false);
    t.gets(seg(1, 969));
    assert_eq!(t.window(), 432); // the rest of the room, which is never taken back
    t.stack.set_reading(true);
    t.gets(seg(969, 1269));
    assert_eq!(t.window(), 968); // by the MSS 432 would stay, for ever
    t.gets(seg(1269, 1569));
    t.waits(ms(40));
    assert_eq!(t.window(), 1200); // the second of 300 bytes: such are full
    t.gets(seg(1569, 1769).flags(TcpFlags::ACK | TcpFlags::PSH));
    t.gets(seg(1769, 1969).flags(TcpFlags::ACK | TcpFlags::PSH));
    assert_eq!(t.window(), 1200); // and these need not be
}

// --- K-06: a window taken back -------------------------------------------------------------------

#[test]
fn an_empty_segment_is_at_the_window_end_if_the_peer_took_window_back() {
    let mut t = Trace::open(plan(), 100_000);
    t.gets(seg(1, 1001));
    assert_eq!(t.sent(), ["10001:10001 ack 1001"]); // 10,000 bytes are on their way
    t.gets(seg(1001, 2001).window(2000));
    assert_eq!(t.sent(), ["2001:2001 ack 2001"]);
}

#[test]
fn a_window_is_never_taken_back_unless_told_to() {
    let mut t =
        Trace::open(StackPlan { receive_bytes: 60_000, window_scale: Some(1), ..plan() }, 0);
    let mut edge = 0;
    t.stack.set_reading(false);
    for n in 0..30 {
        t.gets(seg(n * 1000 + 1, n * 1000 + 1001).ack(2));
        let Some(window) = t.frames.last().map(|_| t.window()) else { continue };
        // No window scaling was offered by the peer's SYN: shift 0 there, shift 1 here.
        let now = (n + 1) * 1000 + 1 + (i64::from(window) << 1);
        assert!(now >= edge, "{now} after {edge}");
        edge = now;
    }
    t.stack.set_shrinking(true);
    t.waits(ms(1));
    assert!(30_001 + (i64::from(t.window()) << 1) < edge);
}

// --- RST, SYN, challenge -------------------------------------------------------------------------

#[test]
fn only_an_exact_reset_counts_and_others_in_the_window_are_challenged_twice_a_second() {
    let rst = |at| seg(at, at).flags(TcpFlags::RST);
    let mut t = Trace::open(plan(), 0);
    t.gets(rst(5));
    assert_eq!(t.sent(), ["2:2 ack 1"]);
    t.waits(ms(499));
    t.gets(rst(5));
    assert_eq!(t.sent(), [""; 0]);
    t.waits(ms(1));
    t.gets(rst(5));
    assert_eq!(t.sent(), ["2:2 ack 1"]);
    t.gets(rst(50_000)); // outside
    assert_eq!(t.sent(), [""; 0]);
    assert_eq!(t.stack.ends()[0].outcome, Outcome::Open);
    t.gets(rst(1));
    assert_eq!((t.sent(), t.stack.ends()[0].outcome), (vec![], Outcome::Reset));
    t.gets(seg(1, 1001)); // it is forgotten
    assert_eq!(t.sent(), ["R 1:1"]);
}

#[test]
fn a_syn_on_a_live_connection_is_challenged() {
    let mut t = Trace::open(plan(), 0);
    t.waits(ms(1000));
    t.syn();
    assert_eq!(t.sent(), ["2:2 ack 1"]);
    assert_eq!(t.stack.ends()[0].outcome, Outcome::Open);
}

// --- Sending -------------------------------------------------------------------------------------

#[test]
fn ten_segments_leave_at_first_and_twice_as_many_after_every_round_trip() {
    let mut t = Trace::new(plan(), 1_000_000);
    t.syn();
    assert_eq!(t.sent(), ["S. 0:0 ack 1"]);
    t.gets(seg(1, 1));
    assert_eq!(t.frames.len(), 10);
    let mut sent = 0;
    for n in 1..=5 {
        t.gets(seg(1, 1).ack(n * 2000 + 1));
        sent += t.frames.len();
    }
    assert_eq!(sent, 20);
}

#[test]
fn three_segments_beyond_a_hole_bring_it_again_and_the_window_is_halved() {
    let mut t = Trace::open(plan(), 1_000_000);
    t.gets(seg(1, 1).sack(&[(1001, 2001)]));
    assert_eq!(t.sent(), ["10001:11001 ack 1"]); // RFC 3042
    t.gets(seg(1, 1).sack(&[(1001, 3001)]));
    assert_eq!(t.sent(), ["11001:12001 ack 1"]);
    t.gets(seg(1, 1).sack(&[(1001, 4001)]));
    assert_eq!(t.sent(), ["1:1001 ack 1"]);
    t.gets(seg(1, 1).sack(&[(1001, 5001)]));
    assert_eq!(t.sent(), [""; 0]);
    t.gets(seg(1, 1).ack(12_001));
    assert_eq!(t.sent().len(), 6);
}

#[test]
fn without_sack_three_duplicates_and_partial_acks_say_the_same() {
    let mut t = Trace::open(StackPlan { sack: false, ..plan() }, 1_000_000);
    t.gets(seg(1, 1));
    t.gets(seg(1, 1));
    assert_eq!(t.sent(), [""; 0]);
    t.gets(seg(1, 1));
    assert_eq!(t.sent(), ["1:1001 ack 1"]);
    t.gets(seg(1, 1).ack(3001));
    assert_eq!(t.sent()[0], "3001:4001 ack 1");
}

#[test]
fn an_old_linux_begins_with_three_segments() {
    let t = Trace::open(StackPlan { first_segments: Some(3), ..plan() }, 100_000);
    assert_eq!(t.sent(), ["1:1001 ack 1", "1001:2001 ack 1", "2001:3001 ack 1"]);
}

fn with(quirks: Quirks) -> StackPlan {
    StackPlan { quirks, ..plan() }
}

#[test]
fn who_floods_sends_all_that_the_window_takes_and_one_kind_of_them_after_a_loss_as_well() {
    for (floods, after_loss) in [(Floods::Route, 20..40), (Floods::Always, 59..60)] {
        let quirks = Quirks { floods, ..Quirks::default() };
        let plan = StackPlan { timestamps: false, ..with(quirks) };
        let mut t = Trace::open(plan, 1_000_000);
        assert_eq!(t.sent().len(), 59, "60,000 bytes in segments of 1,012");
        t.waits(ms(300));
        t.gets(seg(1, 1).ack(1 + 59 * 1012));
        let sent = t.sent().len();
        assert!(after_loss.contains(&sent), "{floods:?}: {sent}");
    }
}

#[test]
fn who_splits_acks_makes_a_hundred_of_one() {
    let quirks = Quirks { splits_acks: true, ..Quirks::default() };
    let mut t = Trace::open(with(quirks), 0);
    t.gets(seg(1, 1001));
    let acks = t.sent();
    assert_eq!(
        (acks.len(), acks[0].as_str(), acks[99].as_str()),
        (100, "2:2 ack 11", "2:2 ack 1001")
    );
}

#[test]
fn who_reneges_takes_later_what_it_has_said_to_have() {
    let quirks = Quirks { reneges: true, ..Quirks::default() };
    let mut t = Trace::open(StackPlan { receive_bytes: 100_000, ..with(quirks) }, 0);
    for n in 0..60 {
        t.gets(seg(1001 + n * 1000, 2001 + n * 1000));
    }
    t.gets(seg(1, 1001));
    assert_eq!(t.sent(), ["2:2 ack 1001"], "nothing is left of what was SACKed");
}

#[test]
fn who_acknowledges_ahead_names_bytes_that_nobody_can_have_sent() {
    let quirks = Quirks { acks_ahead: true, ..Quirks::default() };
    let mut t = Trace::open(StackPlan { receive_bytes: 65_535, ..with(quirks) }, 0);
    for n in 0..21 {
        t.gets(seg(1 + n * 1000, 1001 + n * 1000));
    }
    assert_eq!(t.sent(), ["2:2 ack 21001", "2:2 ack 56170"]);
}

#[test]
fn a_timeout_sends_the_first_again_and_doubles() {
    let mut t = Trace::open(plan(), 1_000_000);
    let mut at = vec![t.now];
    for _ in 0..4 {
        t.frames.clear();
        while t.frames.is_empty() {
            t.waits(ms(1));
        }
        assert_eq!(t.sent(), ["1:1001 ack 1"]);
        at.push(t.now);
    }
    let gaps: Vec<u64> = at.windows(2).map(|w| w[1].since(w[0]).as_millis()).collect();
    assert_eq!(gaps, [200, 400, 800, 1600]);
}

#[test]
fn a_timeout_for_nothing_is_taken_back() {
    let mut t = Trace::open(plan(), 1_000_000);
    let before = t.tsval();
    t.waits(ms(300));
    assert_eq!(t.sent(), ["1:1001 ack 1"]);
    t.gets(Seg { tsecr: before, ..seg(1, 1).ack(2001) });
    // Two left the network, two are slow start's; nothing is sent again.
    assert_eq!(t.sent(), [10, 11, 12, 13].map(|n| format!("{n}001:{}001 ack 1", n + 1)));
}

#[test]
fn a_closed_window_is_probed_in_one_style_or_the_other() {
    let mut styles = std::collections::BTreeSet::new();
    for seed in 0..8 {
        let workload = Workload::Bulk { up: 0, down: 1_000_000 };
        let mut t = Trace::serving(plan(), workload, seed);
        t.syn();
        t.gets(seg(1, 1));
        t.gets(seg(1, 1).ack(10_001).window(0));
        assert_eq!(t.sent(), [""; 0]);
        t.waits(ms(300));
        styles.insert(t.sent());
        t.gets(seg(1, 1).ack(10_001).window(60_000));
        assert!(t.sent()[0].starts_with("10001:"), "{:?}", t.sent());
    }
    let one = |text: &str| vec![text.to_string()];
    let both = [one("10000:10000 ack 1"), one("10001:10002 ack 1")];
    assert_eq!(styles.into_iter().collect::<Vec<_>>(), both);
}

#[test]
fn an_idle_connection_asks_and_gives_up_without_an_answer() {
    let mut t = Trace::open(plan(), 0);
    t.gets(seg(1, 1).ack(2));
    t.waits(KEEPALIVE);
    assert_eq!(t.sent(), ["1:1 ack 1"]);
    t.waits(USER_TIMEOUT);
    assert_eq!(t.sent().last().map(String::as_str), Some("R. 2:2 ack 1"));
    assert_eq!(t.stack.ends()[0].outcome, Outcome::Reset);
}

#[test]
fn with_offloads_one_frame_carries_many_segments() {
    let mut t = Trace::new(plan(), 1_000_000);
    t.stack.set_offloads(crate::plan::Offloads::ALL);
    t.syn();
    t.gets(seg(1, 1));
    assert_eq!(t.sent(), ["1:10001 ack 1"]);
    let hdr = t.frames[0].hdr;
    assert!(hdr.needs_csum());
    assert_eq!((hdr.gso_type, hdr.gso_size), (GSO_TCPV4, 1000));
    assert_eq!((hdr.csum_start, hdr.csum_offset), (34, 16));
}

#[test]
fn a_packet_too_big_comes_again_in_smaller_pieces() {
    let mut t = Trace::open(plan(), 1_000_000);
    let quoted = t.frames.first().expect("data").bytes.clone();
    let own = OWN.address();
    let mut icmp = quoted[..34].to_vec();
    icmp[16..18].copy_from_slice(&56_u16.to_be_bytes());
    icmp[23] = 1;
    icmp[26..30].copy_from_slice(&[10, 9, 9, 9]);
    icmp[30..34].copy_from_slice(&own.v4);
    icmp.extend([3, 4, 0, 0, 0, 0]);
    icmp.extend(600_u16.to_be_bytes());
    icmp.extend(&quoted[14..42]);
    t.takes(Frame::on_wire(icmp));
    assert_eq!(t.sent()[0], "1:549 ack 1");
}

// --- ECN -----------------------------------------------------------------------------------------

#[test]
fn a_mark_is_echoed_until_the_sender_says_it_has_slowed_down() {
    let ecn = StackPlan { ecn: true, ..plan() };
    let mut t = Trace::new(ecn, 0);
    t.syn();
    assert_eq!(t.sent(), ["S.E 0:0 ack 1"]);
    t.gets(seg(1, 1));
    t.gets(Seg { ce: true, ..seg(1, 1001).ack(2) });
    assert_eq!(t.sent(), [".E 2:2 ack 1001"]);
    t.gets(seg(1001, 2001).ack(2));
    assert_eq!(t.sent(), [".E 2:2 ack 2001"]);
    t.gets(seg(2001, 3001).ack(2).flags(TcpFlags::ACK | TcpFlags::CWR));
    assert_eq!(t.sent(), ["2:2 ack 3001"]);
}

#[test]
fn an_echo_halves_the_window_once_per_round_trip_and_is_answered() {
    let mut t = Trace::open(StackPlan { ecn: true, ..plan() }, 1_000_000);
    assert!(t.frames.iter().all(|frame| frame.bytes[15] & 3 == 2), "ECN-capable");
    let echo = |ack| seg(1, 1).ack(ack).flags(TcpFlags::ACK | TcpFlags::ECE);
    t.gets(echo(5001));
    assert_eq!(t.sent(), [""; 0]);
    t.gets(echo(10_001));
    assert_eq!(t.sent()[0], ".W 10001:11001 ack 1");
    assert_eq!(t.sent()[1], "11001:12001 ack 1");
}

#[test]
fn what_was_not_agreed_on_is_noticed() {
    let mut t = Trace::open(StackPlan { sack: false, ..plan() }, 5000);
    t.gets(Seg { ce: true, ..seg(1, 1).flags(TcpFlags::ACK | TcpFlags::ECE) }.sack(&[(2, 3)]));
    let ect = format!("{MAYBE_NETWORK}ECT not agreed on");
    assert_eq!(t.complaints(), ["ECE not agreed on", "SACK not agreed on", &ect]);
}

// --- The rest ------------------------------------------------------------------------------------

#[test]
fn wrong_bytes_are_noticed_with_their_place() {
    let mut t = Trace::open(plan(), 0);
    t.gets(seg(1, 1001));
    t.gets(Seg { wrong: true, ..seg(1001, 2001) });
    assert_eq!(t.stack.ends()[0].wrong_at, Some(1000));
    assert_eq!(t.complaints(), ["wrong bytes"]);
}

#[test]
fn a_corrupt_segment_is_not_taken() {
    let mut t = Trace::open(plan(), 0);
    let mut frame = t.frame(&seg(1, 1001));
    *frame.bytes.last_mut().expect("bytes") ^= 1;
    t.takes(frame);
    assert_eq!((t.read(), t.sent()), (0, vec![]));
    assert_eq!(t.complaints(), [format!("{MAYBE_NETWORK}wrong checksum")]);
}

#[test]
fn sacks_of_nonsense_are_noticed() {
    let mut t = Trace::open(plan(), 5000);
    t.gets(seg(1, 1).ack(1001).sack(&[(2001, 9000)]));
    t.gets(seg(1, 1).ack(1001).sack(&[(3001, 4001), (1, 500)]));
    assert_eq!(t.complaints(), ["SACK below the ACK", "SACK of nonsense"]);
}

#[test]
fn both_fins_in_either_order_end_well() {
    let fin = TcpFlags::ACK | TcpFlags::FIN;
    for is_passive in [true, false] {
        // A passive end writes, and closes, after the other has closed.
        let mut t = if is_passive {
            Trace::serving(plan(), Workload::HalfClose { up: 100, down: 5000 }, 1)
        } else {
            Trace::new(plan(), 0)
        };
        t.syn();
        t.gets(seg(1, 1));
        let ack = if is_passive { 1 } else { 2 };
        t.gets(seg(1, 101).ack(ack).flags(fin));
        assert_eq!(t.stack.ends()[0].outcome == Outcome::Closed, !is_passive);
        t.gets(seg(102, 102).ack(if is_passive { 5002 } else { 2 }));
        assert_eq!(t.stack.ends()[0].outcome, Outcome::Closed);
        t.waits(ms(1000));
        // The side that closed first answers for a while.
        t.gets(seg(1, 101).ack(2).flags(fin));
        assert_eq!(t.sent(), [if is_passive { "R 2:2" } else { "2:2 ack 102" }]);
    }
}
