//! Written traces that the rules about time and quality refuse, and others that they accept.

use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::turns::Turns;
use super::{check_out, flooding, quality, recovery, senders};
use crate::guest_clock::GuestClock;
use crate::history::{History, Side};
use crate::rule::Rule;
use crate::tap::{FlowName, Tap, Tapped};
use crate::wire::{F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, Packet, Segment, TcpFlags, build};

mod by_step;
mod relayed;

/// Initial sequence numbers of R and G; all numbers below are relative to them.
const ISN: [u32; 2] = [0xffff_fd00, 77_000];
const PUSH: TcpFlags = TcpFlags::ACK.union(TcpFlags::PSH);

/// One flow, and the first findings of its checkers.
struct Scene {
    now: Instant,
    h: History,
    clock: GuestClock,
    turns: Turns,
    wrong: Option<Rule>,
    hdr: VirtioNetHdr,
    /// Frames that leave have waited for the ring.
    waited: bool,
    /// Frames leave as they came.
    passes: bool,
}

/// A segment of R or G with relative numbers.
fn seg(from: Side, seq: u32, ack: u32) -> Segment {
    let (src, dst) = ([10, 0, 0, 2], [10, 0, 0, 1]);
    let (src, dst) = if from == Side::R { (src, dst) } else { (dst, src) };
    let clocks = if from == Side::R { (100, 500) } else { (500, 100) };
    Segment {
        src: src.into(),
        dst: dst.into(),
        src_port: 1,
        dst_port: 1,
        seq: ISN[from as usize].wrapping_add(seq),
        ack: ISN[from.other() as usize].wrapping_add(ack),
        flags: TcpFlags::ACK,
        window: 500,
        timestamps: Some(clocks),
        ..Segment::default()
    }
}

/// R's SYN, or G's SYN-ACK.
fn syn(from: Side) -> Segment {
    let server = from == Side::G;
    with(seg(from, 0, u32::from(server)), |x| {
        x.flags = if server { TcpFlags::SYN | TcpFlags::ACK } else { TcpFlags::SYN };
        x.options = vec![2, 4, 5, 180, 3, 3, 7, 4, 2, 1, 1, 1];
        x.window <<= 7; // not yet in units
    })
}

/// An ACK of the host that leaves the edge where it was, but for rounding.
fn told(ack: u32) -> Segment {
    let left = (64_001 - ack).div_ceil(128);
    with(seg(Side::G, 1, ack), |x| x.window = u16::try_from(left).expect("a field"))
}

fn with(mut segment: Segment, change: impl FnOnce(&mut Segment)) -> Segment {
    change(&mut segment);
    segment
}

impl Scene {
    /// An open connection with timestamps, SACK and windows in units of 128 bytes, with offload.
    fn open() -> Self {
        let mut s = Self::opening();
        s.guest_sends(&seg(Side::G, 1, 1), &[]);
        s.net_gets(&told(1), &[]);
        s
    }

    /// R has completed the handshake, and sent nothing besides.
    fn opening() -> Self {
        let mut s = Self::asked();
        s.answers();
        s.net_sends(&seg(Side::R, 1, 1), &[]);
        s
    }

    /// R's SYN has reached G.
    fn asked() -> Self {
        let name = FlowName { guest: 0, guest_port: 1, remote: [0; 16], remote_port: 1 };
        let mut s = Self {
            now: Instant::from_secs(1),
            h: History::new(name, Some(0), false, None),
            clock: GuestClock::default(),
            turns: Turns::default(),
            wrong: None,
            hdr: VirtioNetHdr::default(),
            waited: false,
            passes: false,
        };
        s.h.known.mtu = Some(1500);
        s.sees(Side::R, &syn(Side::R), &[]);
        s.leaves(Side::G, &syn(Side::R), &[]);
        s
    }

    /// G's SYN-ACK has reached R.
    fn answers(&mut self) {
        self.sees(Side::G, &syn(Side::G), &[]);
        self.leaves(Side::R, &syn(Side::G), &[]);
        (self.h.state, self.h.was_on) = (Some(State::On), true);
    }

    /// R has sent `bytes`, was told, and G was offered them.
    fn promised(bytes: usize) -> Self {
        let mut s = Self::open();
        let end = u32::try_from(bytes).expect("a segment") + 1;
        s.net_sends(&seg(Side::R, 1, 1), &vec![7; bytes]);
        s.net_gets(&told(end), &[]);
        s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.flags = PUSH), &vec![7; bytes]);
        s
    }

    fn sees(&mut self, from: Side, segment: &Segment, payload: &[u8]) {
        let bytes = build(segment, payload);
        let packet = Packet::parse(&bytes).expect("well-formed");
        let (ip, tcp) = packet.tcp().expect("TCP");
        let tap = if from == Side::R { Tap::FromNet } else { Tap::FromGuest(0) };
        let t = tapped(self.now, tap, self.hdr, &bytes, &packet);
        // Nothing here leaves as it came.
        if let Some(s) = self.h.on_in(&t, from, ip, tcp, 0) {
            recovery::on_in(&mut self.h, &s, &self.clock);
        }
        quality::on_any(&mut self.h, self.now, from, (ip, tcp));
        self.turns.on_step(&self.h);
    }

    fn leaves(&mut self, to: Side, segment: &Segment, payload: &[u8]) {
        let bytes = build(segment, payload);
        let packet = Packet::parse(&bytes).expect("well-formed");
        let (ip, tcp) = packet.tcp().expect("TCP");
        let tap = if to == Side::R { Tap::ToNet } else { Tap::ToGuest(0) };
        let t = tapped(self.now, tap, self.hdr, &bytes, &packet);
        let t = Tapped { waited: self.waited, ..t };
        let o = self.h.out(&t, to, !tcp.flags.syn() && !self.passes, ip, tcp);
        let said = check_out(&self.h, &o, false)
            .map_err(|(rule, _)| rule)
            .and_then(|()| recovery::on_out(&self.h, &o, &self.clock).map_err(|_| Rule::Recovery))
            .and(self.turns.on_out(&self.h, &o).map_err(|_| Rule::Turns))
            .and(senders::on_out(&mut self.h, &o).map_err(|_| Rule::WireConformance));
        self.wrong = self.wrong.or(said.err());
        if to == Side::G {
            self.clock.on_given(self.now);
            if o.is_stored() {
                self.clock.on_stored(true);
            }
        }
        recovery::after_out(&mut self.h, &o, &self.clock);
        flooding::on_out(&mut self.h, &o);
        self.h.on_out(&o);
        self.turns.on_step(&self.h);
    }

    fn net_sends(&mut self, segment: &Segment, payload: &[u8]) {
        self.sees(Side::R, segment, payload);
    }

    /// In R's name.
    fn forger_sends(&mut self, segment: &Segment, payload: &[u8]) {
        let bytes = build(segment, payload);
        let packet = Packet::parse(&bytes).expect("well-formed");
        quality::on_any(&mut self.h, self.now, Side::R, packet.tcp().expect("TCP"));
    }

    fn guest_sends(&mut self, segment: &Segment, payload: &[u8]) {
        self.clock.on_seen(self.now, usize::MAX);
        self.sees(Side::G, segment, payload);
    }

    fn net_gets(&mut self, segment: &Segment, payload: &[u8]) {
        self.leaves(Side::R, segment, payload);
    }

    fn guest_gets(&mut self, segment: &Segment, payload: &[u8]) {
        self.leaves(Side::G, segment, payload);
    }

    /// 31,000 bytes, cut by the guest.
    fn guest_gets_super_segment(&mut self, place: u32, flags: TcpFlags) {
        let (flags_of_hdr, gso_type, gso_size) = (F_NEEDS_CSUM, GSO_TCPV4, 1448);
        self.hdr = VirtioNetHdr { flags: flags_of_hdr, gso_type, gso_size, ..self.hdr };
        self.guest_gets(&with(seg(Side::R, place, 1), |x| x.flags = flags), &vec![7; 31_000]);
        self.hdr = VirtioNetHdr::default();
    }

    /// G has seen everything and says nothing; then so many milliseconds pass.
    fn seen_and_ms(&mut self, ms: u64) {
        self.clock.on_seen(self.now, usize::MAX);
        self.ms(ms);
    }

    fn ms(&mut self, ms: u64) {
        for _ in 0..ms {
            self.now = Instant::from_nanos(self.now.as_nanos() + 1_000_000);
            let said = quality::on_step(&mut self.h, self.now, &self.clock);
            self.wrong = self.wrong.or(said.err().map(|(rule, _)| rule));
        }
    }

    #[track_caller]
    fn refused_by(&self, rule: Rule) {
        assert_eq!(self.wrong, Some(rule));
    }

    #[track_caller]
    fn accepted(&self) {
        assert_eq!(self.wrong, None);
    }
}

fn tapped<'a>(
    at: Instant,
    tap: Tap,
    hdr: VirtioNetHdr,
    bytes: &'a [u8],
    packet: &'a Packet,
) -> Tapped<'a> {
    Tapped { at, host: 0, tap, hdr, bytes, packet: Some(packet), forged: false, waited: false }
}

#[test]
fn what_is_acknowledged_offered_and_taken_at_once_is_in_order() {
    let mut s = Scene::promised(1000);
    s.seen_and_ms(5);
    s.guest_sends(&seg(Side::G, 1, 1001), &[]);
    s.ms(1000);
    s.accepted();
}

#[test]
fn data_in_order_that_is_not_acknowledged_while_the_guest_sleeps() {
    let mut s = Scene::open();
    s.guest_gets(&seg(Side::R, 1, 1), &[]); // lies in its ring unseen
    s.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
    s.ms(10);
    s.accepted();
    s.ms(2);
    s.refused_by(Rule::PromptAck);
}

/// R's newest ACK is 60001, and its window 12800.
fn long_acked() -> Scene {
    let mut s = Scene::open();
    for n in 0..2 {
        let segment = with(seg(Side::G, 1 + 30_000 * n, 1), |x| x.flags = PUSH);
        s.guest_sends(&segment, &vec![7; 30_000]);
        s.net_gets(&segment, &vec![7; 30_000]);
    }
    s.net_sends(&with(seg(Side::R, 1, 60_001), |x| x.window = 100), &[]);
    s
}

#[test]
fn data_with_an_ack_older_than_a_window_is_not_owed_an_ack() {
    for (ack, owed) in [(60_001 - 12_800, true), (60_001 - 12_801, false)] {
        let mut s = long_acked();
        s.net_sends(&with(seg(Side::R, 1, ack), |x| x.window = 100), &[7; 100]);
        s.ms(12);
        if owed { s.refused_by(Rule::PromptAck) } else { s.accepted() }
    }
}

#[test]
fn urgent_data_is_not_owed_an_ack_before_the_guest_has_it() {
    let mut s = Scene::open();
    let urgent = with(seg(Side::R, 1, 1), |x| {
        (x.flags, x.urgent) = (TcpFlags::ACK | TcpFlags::URG, 100);
    });
    s.net_sends(&urgent, &[7; 100]);
    s.guest_gets(&urgent, &[7; 100]);
    s.net_sends(&seg(Side::R, 101, 1), &[7; 100]);
    s.ms(12);
    s.accepted();
    s.guest_sends(&seg(Side::G, 1, 101), &[]);
    s.ms(12);
    s.refused_by(Rule::PromptAck);
}

#[test]
fn data_beyond_the_edge_is_not_owed_an_ack() {
    let mut s = Scene::open();
    s.h.ends[Side::G as usize].edge_max += 10_000; // G would take it
    s.net_sends(&seg(Side::R, 1, 1), &vec![7; 32_000]);
    s.net_sends(&seg(Side::R, 32_001, 1), &vec![7; 34_000]);
    s.net_gets(&told(64_001), &[]);
    s.net_gets(&with(seg(Side::G, 1, 64_001), |x| x.window = 100), &[]);
    s.ms(12);
    s.accepted();
}

#[test]
fn of_ranges_out_of_order_some_are_owed_an_ack_when_the_hole_is_filled() {
    for (ranges, filled, owed) in [(100, 60, true), (100, 70, false)] {
        let mut s = Scene::open();
        s.h.ends[0].offer.sack = false;
        let place = |n: u32| 1 + 200 * n;
        for n in 0..ranges {
            s.net_sends(&seg(Side::R, place(n) + 100, 1), &[7; 100]);
            s.net_gets(&told(1), &[]);
        }
        for n in 0..filled {
            s.net_sends(&seg(Side::R, place(n), 1), &[7; 100]);
            s.net_gets(&told(place(n + 1)), &[]);
        }
        s.net_sends(&seg(Side::R, place(filled), 1), &[7; 100]);
        s.net_gets(&told(place(filled) + 100), &[]);
        s.ms(12);
        if owed { s.refused_by(Rule::PromptAck) } else { s.accepted() }
    }
}

#[test]
fn what_the_guest_acknowledged_itself_and_r_does_not_hear() {
    let mut s = Scene::promised(100);
    s.net_sends(&with(seg(Side::R, 101, 1), |x| x.flags = PUSH | TcpFlags::FIN), &[]);
    s.guest_gets(&with(seg(Side::R, 101, 1), |x| x.flags = TcpFlags::ACK | TcpFlags::FIN), &[]);
    s.guest_sends(&seg(Side::G, 1, 102), &[]);
    s.ms(12);
    s.refused_by(Rule::PromptAck);
}

#[test]
fn a_segment_of_the_guest_leaves_with_its_own_header() {
    let mut s = Scene::open();
    let written = with(seg(Side::G, 1, 1), |x| (x.flags, x.ecn) = (PUSH | TcpFlags::CWR, 2));
    s.guest_sends(&written, b"hello");
    s.net_gets(&written, b"hello");
    s.accepted();
    for change in [
        |x: &mut Segment| x.flags = TcpFlags::ACK | TcpFlags::CWR,
        |x: &mut Segment| x.flags = PUSH,
        |x: &mut Segment| x.ecn = 0,
        |x: &mut Segment| x.urgent = 1,
    ] {
        let mut s = Scene::open();
        s.guest_sends(&written, b"hello");
        s.net_gets(&with(written.clone(), change), b"hello");
        s.refused_by(Rule::Fields);
    }
}

#[test]
fn sack_blocks_of_the_guest_are_not_for_r() {
    let mut s = Scene::promised(1000);
    let block = |x: &mut Segment| (x.flags, x.sack) = (PUSH, blocks(&[(501, 1001)]));
    s.guest_sends(&with(seg(Side::G, 1, 1), block), b"hello");
    s.accepted();
    s.net_gets(&with(told(1001), block), b"hello");
    s.refused_by(Rule::Fields);
}

#[test]
fn the_last_byte_there_is_must_be_pushed() {
    let mut s = Scene::open();
    s.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
    s.net_gets(&told(101), &[]);
    s.guest_gets(&seg(Side::R, 1, 1), &[7; 100]);
    s.refused_by(Rule::Fields);
}

#[test]
fn a_ttl_that_r_never_sent() {
    let mut s = Scene::open();
    s.h.quality = quality::Quality::default();
    s.guest_gets(&seg(Side::R, 1, 1), &[]);
    s.refused_by(Rule::Fields);
}

#[test]
fn a_super_segment_says_exactly_what_it_is() {
    let gso = VirtioNetHdr {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        gso_size: 1448,
        hdr_len: 66,
        ..VirtioNetHdr::default()
    };
    let run = |hdr: VirtioNetHdr| {
        let mut s = Scene::open();
        s.net_sends(&seg(Side::R, 1, 1), &[7; 4000]);
        s.net_gets(&told(4001), &[]);
        s.hdr = hdr;
        s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.flags = PUSH), &[7; 4000]);
        s
    };
    run(gso).accepted();
    run(VirtioNetHdr { hdr_len: 54, ..gso }).refused_by(Rule::Fields);
    run(VirtioNetHdr { gso_type: GSO_TCPV6, ..gso }).refused_by(Rule::Fields);
    run(VirtioNetHdr { gso_size: 1460, ..gso }).refused_by(Rule::Fields);
    run(VirtioNetHdr { gso_type: 0, gso_size: 0, ..gso }).refused_by(Rule::Fields);
}

#[test]
fn an_old_echo_toward_r() {
    let mut s = Scene::open();
    s.net_sends(&with(seg(Side::R, 1, 1), |x| x.timestamps = Some((140, 500))), &[7; 100]);
    s.net_gets(&told(101), &[]); // still 100
    s.refused_by(Rule::Echo);
}

/// Seed 27533: both copies came in one batch.
#[test]
fn the_clock_of_what_the_host_has_is_not_echoed() {
    for (end, fine) in [(101, true), (102, false)] {
        let mut s = Scene::open();
        s.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
        let again = with(seg(Side::R, 1, 1), |x| x.timestamps = Some((101, 500)));
        s.net_sends(&again, &vec![7; end as usize - 1]);
        s.net_gets(&with(told(end), |x| x.sack = blocks(&[(1, 101)])), &[]);
        if fine { s.accepted() } else { s.refused_by(Rule::Echo) }
    }
}

#[test]
fn an_old_echo_toward_the_guest() {
    let mut s = Scene::open();
    s.guest_sends(&with(seg(Side::G, 1, 1), |x| x.timestamps = Some((900, 100))), &[]);
    s.net_sends(&with(seg(Side::R, 1, 1), |x| x.timestamps = Some((100, 900))), &[7; 100]);
    s.net_gets(&with(told(101), |x| x.timestamps = Some((900, 100))), &[]);
    let mut stale = s.h.clone();
    s.guest_gets(
        &with(seg(Side::R, 1, 1), |x| (x.flags, x.timestamps) = (PUSH, Some((100, 900)))),
        &[7; 100],
    );
    s.accepted();
    std::mem::swap(&mut s.h, &mut stale);
    s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.flags = PUSH), &[7; 100]);
    s.refused_by(Rule::Echo);
}

#[test]
fn a_duplicate_is_answered_by_a_dsack() {
    for dsack in [true, false] {
        let mut s = Scene::promised(100);
        s.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
        let block = (ISN[0].wrapping_add(1), ISN[0].wrapping_add(101));
        let blocks = if dsack { vec![block] } else { Vec::new() };
        s.net_gets(&with(told(101), |x| x.sack = blocks), &[]);
        if dsack { s.accepted() } else { s.refused_by(Rule::Duplicates) }
    }
}

/// SACK blocks, relative.
fn blocks(relative: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let number = |n: u32| ISN[0].wrapping_add(n);
    relative.iter().map(|(from, to)| (number(*from), number(*to))).collect()
}

#[test]
fn a_duplicate_of_what_is_held_is_answered_by_a_dsack() {
    for said in [&[(201, 301), (201, 401)][..], &[(201, 401)]] {
        let mut s = Scene::open();
        s.net_sends(&seg(Side::R, 201, 1), &[7; 100]);
        s.net_gets(&with(told(1), |x| x.sack = blocks(&[(201, 301)])), &[]);
        s.net_sends(&seg(Side::R, 301, 1), &[7; 100]);
        s.net_gets(&with(told(1), |x| x.sack = blocks(&[(201, 401)])), &[]);
        s.net_sends(&seg(Side::R, 201, 1), &[7; 100]);
        s.net_gets(&with(told(1), |x| x.sack = blocks(said)), &[]);
        if said.len() == 2 { s.accepted() } else { s.refused_by(Rule::Duplicates) }
    }
}

#[test]
fn an_ack_speaks_for_two_segments() {
    for count in [2, 3] {
        let mut s = Scene::open();
        for n in 0..count {
            s.net_sends(&seg(Side::R, 1 + 100 * n, 1), &[7; 100]);
        }
        s.net_gets(&told(1 + 100 * count), &[]);
        if count == 2 { s.accepted() } else { s.refused_by(Rule::PromptAck) }
    }
}

#[test]
fn an_ack_says_all_that_lies_behind_the_hole() {
    for said in [&[(401, 501), (201, 301)][..], &[(401, 501)]] {
        let mut s = Scene::open();
        s.net_sends(&seg(Side::R, 201, 1), &[7; 100]);
        s.net_gets(&with(told(1), |x| x.sack = blocks(&[(201, 301)])), &[]);
        s.net_sends(&seg(Side::R, 401, 1), &[7; 100]);
        s.net_gets(&with(told(1), |x| x.sack = blocks(said)), &[]);
        if said.len() == 2 { s.accepted() } else { s.refused_by(Rule::PromptAck) }
    }
}

#[test]
fn an_ack_that_another_has_overtaken_does_not_reach_the_guest() {
    for (ack, fine) in [(101, true), (51, false)] {
        let mut s = Scene::open();
        s.guest_sends(&with(seg(Side::G, 1, 1), |x| x.flags = PUSH), &[7; 100]);
        s.net_gets(&with(told(1), |x| x.flags = PUSH), &[7; 100]);
        s.net_sends(&seg(Side::R, 1, 101), &[]);
        s.guest_gets(&seg(Side::R, 1, 101), &[]);
        s.net_sends(&seg(Side::R, 1, ack), &[]);
        s.guest_gets(&seg(Side::R, 1, 101), &[]);
        if fine { s.accepted() } else { s.refused_by(Rule::News) }
    }
}

#[test]
fn the_edge_that_the_guest_is_shown_goes_left_only_if_the_remote_moves_it() {
    let less = with(seg(Side::R, 101, 1), |x| x.window = 400);
    for shrinks in [true, false] {
        let mut s = Scene::promised(100);
        s.h.known.net_keeps_window = !shrinks;
        s.net_sends(&less, &[]);
        s.guest_gets(&less, &[]);
        s.accepted(); // of two that the path has swapped the later one counts (seed 81296)
    }
    let mut s = Scene::promised(100);
    s.h.known.net_keeps_window = true;
    s.net_sends(&seg(Side::R, 101, 1), &[]);
    s.guest_gets(&less, &[]);
    s.refused_by(Rule::RightEdge);
}

#[test]
fn the_guest_is_shown_no_more_than_a_mebibyte_beyond_the_remotes_edge() {
    for (floods, field) in [(false, 500), (true, 500 + 8192), (true, 500 + 8194), (false, 501)] {
        let mut s = Scene::open();
        s.h.known.floods = floods;
        let shown = with(seg(Side::R, 1, 1), |x| x.window = field);
        s.net_sends(&seg(Side::R, 1, 1), &[]);
        s.guest_gets(&shown, &[]);
        let fine = field == 500 || floods && field == 500 + 8192;
        if fine { s.accepted() } else { s.refused_by(Rule::RightEdge) }
    }
}

/// A remote that has been shut or silent for so long the host leaves to the guest (FLOOD-12,
/// FLOOD-32: seed 95212).
#[test]
fn what_the_guest_has_used_of_a_loan_goes_only_when_the_remote_acknowledges_nothing() {
    let cases = [
        (true, 0, 6000, true),
        (true, 0, 100, false),
        (true, 6000, 100, false),
        (false, 6000, 100, true),
    ];
    for (used, idle_ms, ms, fine) in cases {
        let mut s = Scene::open();
        (s.h.known.floods, s.h.known.net_keeps_window) = (true, true);
        s.net_sends(&with(seg(Side::R, 1, 1), |x| x.window = 0), &[]);
        s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.window = 900), &[]);
        s.ms(idle_ms);
        if used {
            s.guest_sends(&with(seg(Side::G, 1, 1), |x| x.flags = PUSH), &[7; 1000]);
            s.net_gets(&seg(Side::G, 1, 1), &[7]); // a probe
        }
        let shut = with(seg(Side::R, 1, 1), |x| x.window = 0);
        s.net_sends(&shut, &[]);
        s.ms(ms);
        s.net_sends(&shut, &[]);
        s.guest_gets(&shut, &[]);
        if !fine {
            s.refused_by(Rule::RightEdge);
            continue;
        }
        // From then on the guest counts on what it is shown, though it has sent more.
        for field in [6, 5] {
            let opens = with(seg(Side::R, 1, 1 + u32::from(used)), |x| x.window = field);
            s.net_sends(&opens, &[]);
            s.guest_gets(&opens, &[]);
            s.accepted();
        }
    }
}

#[test]
fn a_reset_of_the_guest_reaches_the_remote_at_once() {
    let mut s = Scene::promised(100);
    s.guest_sends(&with(seg(Side::G, 1, 101), |x| x.flags = TcpFlags::RST), &[]);
    s.h.state = Some(State::Abort);
    s.ms(1);
    s.accepted();
    s.ms(20);
    s.refused_by(Rule::Endings);
}

#[test]
fn of_two_copies_of_a_byte_the_first_counts() {
    let mut s = Scene::open();
    s.h.known.hostile = [true, false];
    s.net_sends(&seg(Side::R, 2, 1), &[1; 100]);
    s.net_sends(&seg(Side::R, 1, 1), &[2; 101]);
    s.net_gets(&told(102), &[]);
    s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.flags = PUSH), &[2; 101]);
    s.refused_by(Rule::Duplicates);
}

/// Seed 11587: a third ACK without a clock leaves the SYN's to be the newest.
#[test]
fn a_byte_older_than_the_syn_is_no_first_copy() {
    for (clock, fine) in [(98, true), (99, false)] {
        let mut s = Scene::asked();
        s.h.known.hostile = [true, false];
        s.answers();
        s.net_sends(&with(seg(Side::R, 1, 1), |x| x.timestamps = None), &[]);
        s.net_sends(&with(seg(Side::R, 2, 1), |x| x.timestamps = Some((clock, 500))), &[1; 100]);
        s.net_sends(&seg(Side::R, 1, 1), &[2; 101]);
        s.net_gets(&told(102), &[]);
        s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.flags = PUSH), &[2; 101]);
        if fine { s.accepted() } else { s.refused_by(Rule::Duplicates) }
    }
}

/// Seed 13219: it becomes true while it waits for the ring, and says nothing of what the host says.
#[test]
fn an_ack_of_the_future_is_a_lying_remotes_own() {
    for lies in [true, false] {
        let mut s = Scene::open();
        s.h.known.hostile = [lies, false];
        s.net_sends(&seg(Side::R, 1, 51), &[]);
        s.guest_sends(&with(seg(Side::G, 1, 1), |x| x.flags = PUSH), &[7; 100]);
        s.net_gets(&with(told(1), |x| x.flags = PUSH), &[7; 100]);
        s.guest_gets(&seg(Side::R, 1, 51), &[]);
        s.guest_gets(&seg(Side::R, 1, 1), &[]);
        if lies { s.accepted() } else { s.refused_by(Rule::AckOrder) }
    }
}

/// Seed 37737: G had not handed it over when R said so, and has when it gets the ACK.
#[test]
fn a_lie_that_waits_for_the_ring_may_become_one_of_what_the_host_has() {
    for waited in [true, false] {
        let mut s = Scene::open();
        s.h.known.floods = true;
        s.net_sends(&seg(Side::R, 1, 51), &[]);
        s.guest_sends(&with(seg(Side::G, 1, 1), |x| x.flags = PUSH), &[7; 100]);
        s.waited = waited;
        s.guest_gets(&seg(Side::R, 1, 51), &[]);
        if waited { s.accepted() } else { s.refused_by(Rule::UnsentAck) }
    }
}

/// Seed 33000: R acknowledges what is missing, as if to be sent more.
#[test]
fn blocks_that_r_itself_contradicts_are_no_fault_of_the_host() {
    for lies in [true, false] {
        let mut s = Scene::open();
        let sent = with(seg(Side::G, 1, 1), |x| x.flags = PUSH);
        s.guest_sends(&sent, &[7; 300]);
        s.net_gets(&with(told(1), |x| x.flags = PUSH), &[7; 300]);
        let number = |n: u32| ISN[1].wrapping_add(n);
        let says = |ack| with(seg(Side::R, 1, ack), |x| x.sack = vec![(number(151), number(301))]);
        s.net_sends(&says(if lies { 201 } else { 101 }), &[]);
        s.net_sends(&seg(Side::R, 1, 201), &[]);
        s.guest_gets(&says(201), &[]);
        if lies { s.accepted() } else { s.refused_by(Rule::OneEndpoint) }
    }
}

/// Seed 38192: it hid what came after it.
#[test]
fn a_late_segment_of_the_connection_before_takes_no_place() {
    let mut s = Scene::open();
    s.net_sends(&with(seg(Side::R, 1, 1), |x| x.seq = x.seq.wrapping_sub(1 << 20)), &[7; 100]);
    s.net_gets(&told(1), &[]);
    s.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
    s.net_gets(&told(101), &[]);
    s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.flags = PUSH), &[7; 100]);
    s.accepted();
}

/// Seed 22679: the host sees another SYN-ACK than the one that R has got.
#[test]
fn r_may_echo_the_clock_of_a_syn_ack_that_went_past_the_host() {
    for (echo, fine) in [(400, true), (401, false)] {
        let mut s = Scene::asked();
        let bytes = build(&with(syn(Side::G), |x| x.timestamps = Some((400, 100))), &[]);
        let packet = Packet::parse(&bytes).expect("well-formed");
        s.h.on_past(packet.tcp().expect("TCP").1);
        s.answers();
        let data = with(seg(Side::R, 1, 1), |x| {
            (x.flags, x.timestamps) = (PUSH, Some((100, echo)));
        });
        s.net_sends(&data, &[7; 100]);
        s.guest_gets(&data, &[7; 100]);
        if fine { s.accepted() } else { s.refused_by(Rule::TsvalOwner) }
    }
}

#[test]
fn the_edge_moves_by_segments() {
    let mut s = Scene::promised(100);
    s.net_gets(&with(seg(Side::G, 1, 101), |x| x.window = 600), &[]);
    s.accepted();
    s.net_gets(&with(seg(Side::G, 1, 101), |x| x.window = 602), &[]);
    s.refused_by(Rule::Window);
}

#[test]
fn the_edge_goes_with_what_the_guest_acknowledges_beyond_it() {
    for (window, fine) in [(0, true), (1, false)] {
        let mut s = Scene::promised(100);
        s.net_gets(&with(seg(Side::G, 1, 101), |x| x.window = 500), &[]);
        s.net_sends(&seg(Side::R, 101, 1), &vec![7; 40_000]);
        s.net_sends(&seg(Side::R, 40_101, 1), &vec![7; 24_200]);
        s.guest_sends(&seg(Side::G, 1, 64_301), &[]); // it passed uncut (SNOOP-13)
        s.net_gets(&with(seg(Side::G, 1, 64_301), |x| x.window = window), &[]);
        if fine { s.accepted() } else { s.refused_by(Rule::Window) }
    }
}

/// Seed 94234: the flow acknowledged late, and has left.
#[test]
fn a_guest_that_took_nothing_for_long_may_show_less_when_its_flow_has_left() {
    for (seconds, fine) in [(121, true), (119, false)] {
        let mut s = Scene::open();
        s.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
        s.now = s.now + Duration::from_secs(seconds);
        s.passes = true;
        let less = with(seg(Side::G, 1, 1), |x| x.window = 10);
        s.guest_sends(&less, &[]);
        s.net_gets(&less, &[]);
        if fine { s.accepted() } else { s.refused_by(Rule::RightEdge) }
    }
}

#[test]
fn r_is_not_held_back_while_the_guest_has_room() {
    let mut s = Scene::open();
    s.h.spare = 1 << 20;
    s.net_sends(&seg(Side::R, 1, 1), &vec![7; 60_000]);
    s.net_sends(&seg(Side::R, 60_001, 1), &vec![7; 4_000]);
    s.net_gets(&with(seg(Side::G, 1, 64_001), |x| x.window = 0), &[]);
    s.guest_gets(&seg(Side::R, 1, 1), &[7; 1448]);
    s.guest_sends(&seg(Side::G, 1, 64_001), &[]);
    s.ms(100);
    s.refused_by(Rule::Window);
}

/// An R with 64,000 bytes under way, and no window left. G has yet to see the first of them.
fn shut() -> Scene {
    let mut s = Scene::open();
    s.h.spare = 8 << 20;
    s.net_sends(&seg(Side::R, 1, 1), &vec![7; 60_000]);
    s.net_sends(&seg(Side::R, 60_001, 1), &vec![7; 4_000]);
    s.net_gets(&with(seg(Side::G, 1, 64_001), |x| x.window = 0), &[]);
    s.guest_gets(&seg(Side::R, 1, 1), &[7; 1448]);
    s.ms(1);
    s
}

/// Seed 11985: G's own field could not say it either.
#[test]
fn less_than_a_unit_of_the_window_field_holds_nobody_back() {
    for (units, fine) in [(1, true), (2, false)] {
        let mut s = shut();
        s.h.ends[Side::G as usize].offer.scale = Some(14);
        s.guest_sends(&with(seg(Side::G, 1, 64_001), |x| x.window = units), &[]);
        s.ms(60);
        if fine { s.accepted() } else { s.refused_by(Rule::Window) }
    }
}

/// Seed 20562: of a VM without budget R had less than half, and wanted no more, for a minute.
#[test]
fn r_is_held_back_from_the_moment_on_at_which_the_window_can_grow() {
    let mut s = shut();
    let more = with(seg(Side::G, 1, 1), |x| x.window = 1000);
    s.sees(Side::G, &more, &[]);
    s.h.cramped_at = s.now;
    s.ms(200);
    s.sees(Side::G, &more, &[]);
    s.ms(50);
    s.accepted();
    s.ms(2);
    s.refused_by(Rule::Window);
}

/// Seed 17891: the flow has grown by it when R is answered.
#[test]
fn of_what_other_flows_give_back_r_may_hear_when_it_asks() {
    for freed in [true, false] {
        let mut s = shut();
        s.ms(30);
        s.h.spare += u64::from(freed) << 17;
        s.net_sends(&seg(Side::R, 64_001, 1), &[7]);
        s.h.spare -= 1 << 18;
        s.net_gets(&with(seg(Side::G, 1, 64_001), |x| x.window = 100), &[]);
        if freed { s.accepted() } else { s.refused_by(Rule::Liveness) }
    }
}

/// Seed 75: what R acknowledges, and what the host then sends for G, are no reason to look for it.
#[test]
fn of_what_other_flows_give_back_r_hears_no_sooner_because_it_acknowledges() {
    let mut s = shut();
    s.ms(30);
    s.h.spare += 1 << 17;
    s.net_sends(&seg(Side::R, 64_001, 0), &[]);
    s.net_gets(&told(64_001), &[]);
    s.ms(1);
    s.net_sends(&seg(Side::R, 64_001, 1), &[7]);
    s.h.spare -= 1 << 18;
    s.net_gets(&with(seg(Side::G, 1, 64_001), |x| x.window = 100), &[]);
    s.accepted();
}

#[test]
fn odd_segments_are_answered_twice_a_second_at_most() {
    let mut s = Scene::promised(100);
    for (ms, fine) in [(0, true), (600, true), (100, false)] {
        s.seen_and_ms(1);
        s.guest_sends(&seg(Side::G, 1, 101), &[]);
        s.ms(ms);
        s.net_sends(&with(seg(Side::R, 5, 0), |x| x.flags = TcpFlags::SYN), &[]);
        s.net_gets(&told(101), &[]);
        if fine { s.accepted() } else { s.refused_by(Rule::OddAcks) }
    }
}

/// Seed 1200207: an R that lies about what it has makes the flow leave.
#[test]
fn the_last_ack_of_a_flow_that_leaves_answers_nothing() {
    for (state, fine) in [(State::Pass, true), (State::Drain, false)] {
        let mut s = Scene::promised(100);
        for n in 0..2 {
            s.seen_and_ms(100);
            s.h.state = Some(if n == 0 { State::On } else { state });
            s.net_sends(&with(seg(Side::R, 5, 0), |x| x.flags = TcpFlags::SYN), &[]);
            s.net_gets(&told(101), &[]);
        }
        if fine { s.accepted() } else { s.refused_by(Rule::OddAcks) }
    }
}

#[test]
fn a_reset_or_a_syn_in_the_window_is_challenged() {
    let (rst, syn) = (TcpFlags::RST, TcpFlags::SYN);
    for (flags, answered) in [(rst, true), (rst, false), (syn, true), (syn, false)] {
        let mut s = Scene::promised(100);
        s.seen_and_ms(600);
        s.forger_sends(&with(seg(Side::R, 2000, 1), |x| x.flags = flags), &[]);
        if answered {
            s.net_gets(&told(101), &[]);
        }
        s.ms(15);
        if answered { s.accepted() } else { s.refused_by(Rule::OddAcks) }
    }
}

#[test]
fn an_odd_segment_is_not_answered_for_a_guest_that_is_long_silent() {
    let (rst, syn) = (TcpFlags::RST, TcpFlags::SYN);
    for (flags, seconds, fine) in [(rst, 61, true), (rst, 63, false), (syn, 63, true)] {
        let mut s = Scene::promised(100);
        (s.h.silent_since, s.h.paused_since) = (Some(s.now), Some(s.now));
        s.ms(seconds * 1000);
        s.forger_sends(&with(seg(Side::R, 2000, 1), |x| x.flags = flags), &[]);
        s.net_gets(&told(101), &[]);
        if fine { s.accepted() } else { s.refused_by(Rule::OddAcks) }
    }
}

#[test]
fn data_with_an_old_clock_is_answered_each_time() {
    for (clock, fine) in [(98, true), (99, false)] {
        let mut s = Scene::promised(100);
        for _ in 0..2 {
            let odd = with(seg(Side::R, 101, 70_000), |x| x.timestamps = Some((clock, 500)));
            s.forger_sends(&odd, &[7; 100]);
            s.net_gets(&told(101), &[]);
        }
        if fine { s.accepted() } else { s.refused_by(Rule::OddAcks) }
    }
}

#[test]
fn what_the_remote_knows_is_said_three_times_only_if_it_asks() {
    for asked in [true, false] {
        let mut s = Scene::promised(100);
        s.guest_sends(&seg(Side::G, 1, 101), &[]);
        for _ in 0..3 {
            if asked {
                s.net_sends(&seg(Side::R, 100, 1), &[]); // a keepalive
            }
            s.net_gets(&told(101), &[]);
        }
        if asked { s.accepted() } else { s.refused_by(Rule::News) }
    }
}

#[test]
fn an_ack_with_an_old_clock_asks_for_an_answer() {
    for (tsval, asks) in [(98, true), (99, false)] {
        let mut s = Scene::promised(100);
        s.guest_sends(&seg(Side::G, 1, 101), &[]);
        for _ in 0..3 {
            s.net_sends(&with(seg(Side::R, 101, 1), |x| x.timestamps = Some((tsval, 500))), &[]);
            s.net_gets(&told(101), &[]);
        }
        if asks { s.accepted() } else { s.refused_by(Rule::News) }
    }
}

#[test]
fn an_ack_older_than_a_window_asks_for_an_answer() {
    for (ack, asks) in [(47_000, true), (47_300, false)] {
        let mut s = long_acked();
        for _ in 0..4 {
            s.net_sends(&with(seg(Side::R, 1, ack), |x| x.window = 0), &[]);
            s.net_gets(&with(told(1), |x| x.seq = ISN[1] + 60_001), &[]);
        }
        if asks { s.accepted() } else { s.refused_by(Rule::News) }
    }
}

#[test]
fn new_bytes_and_a_fin_are_offered_at_once() {
    let mut s = Scene::open();
    s.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
    s.net_gets(&told(101), &[]);
    s.ms(25);
    s.refused_by(Rule::Recovery);

    let mut s = Scene::promised(100);
    s.guest_sends(&seg(Side::G, 1, 101), &[]);
    s.net_sends(&with(seg(Side::R, 101, 1), |x| x.flags = PUSH | TcpFlags::FIN), &[]);
    s.ms(25);
    s.refused_by(Rule::Recovery);

    // Its ACK is older than a window, so that the host refuses it (seed 23493).
    for (ack, owed) in [(60_001 - 12_800, true), (60_001 - 12_801, false)] {
        let mut s = long_acked();
        let fin = with(seg(Side::R, 1, ack), |x| x.flags = PUSH | TcpFlags::FIN);
        s.net_sends(&with(fin, |x| x.window = 100), &[]);
        s.seen_and_ms(25);
        if owed { s.refused_by(Rule::Recovery) } else { s.accepted() }
    }
}

#[test]
fn three_duplicates_ask_for_a_byte() {
    for again in [true, false] {
        let mut s = Scene::promised(1000);
        for _ in 0..3 {
            s.guest_sends(&seg(Side::G, 1, 1), &[]);
        }
        if again {
            s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.flags = PUSH), &[7; 1000]);
        }
        s.seen_and_ms(25);
        if again { s.accepted() } else { s.refused_by(Rule::Recovery) }
    }
}

#[test]
fn what_came_twice_asks_for_nothing() {
    let mut s = Scene::promised(1000);
    s.guest_sends(&seg(Side::G, 1, 1001), &[]);
    s.net_sends(&seg(Side::R, 1001, 1), &[7; 1000]);
    s.net_gets(&told(2001), &[]);
    let next = with(seg(Side::R, 1001, 1), |x| x.flags = PUSH);
    s.guest_gets(&next, &[7; 1000]);
    for _ in 0..3 {
        let twice = vec![(ISN[0].wrapping_add(1), ISN[0].wrapping_add(1001))];
        s.guest_sends(&with(seg(Side::G, 1, 1001), |x| x.sack = twice), &[]);
    }
    s.seen_and_ms(25);
    s.accepted();
    s.guest_gets(&next, &[7; 1000]);
    s.refused_by(Rule::Recovery);
}

#[test]
fn the_first_ack_of_a_server_may_be_a_duplicate() {
    let mut s = Scene::opening();
    s.net_sends(&seg(Side::R, 1, 1), &[7; 1000]);
    s.net_gets(&told(1001), &[]);
    let again = with(seg(Side::R, 1, 1), |x| x.flags = PUSH);
    s.guest_gets(&again, &[7; 1000]);
    for _ in 0..3 {
        s.guest_sends(&seg(Side::G, 1, 1), &[]);
    }
    s.guest_gets(&again, &[7; 1000]);
    s.accepted();
}

#[test]
fn a_silent_guest_is_offered_the_byte_again_neither_early_nor_late() {
    let again = with(seg(Side::R, 1, 1), |x| x.flags = PUSH);
    let mut s = Scene::promised(1000);
    s.ms(60_000); // it has not run
    s.accepted();
    s.seen_and_ms(100);
    s.guest_gets(&again, &[7; 1000]);
    s.refused_by(Rule::Recovery);

    let mut s = Scene::promised(1000);
    s.seen_and_ms(255);
    s.guest_gets(&again, &[7; 1000]);
    s.seen_and_ms(600);
    s.accepted();
    s.ms(800);
    s.refused_by(Rule::Recovery);

    // The next time it gets twice as long.
    for (ms, fine) in [(350, false), (450, true)] {
        let mut s = Scene::promised(1000);
        s.seen_and_ms(255);
        s.guest_gets(&again, &[7; 1000]);
        s.seen_and_ms(ms);
        s.guest_gets(&again, &[7; 1000]);
        if fine { s.accepted() } else { s.refused_by(Rule::Recovery) }
    }
}

#[test]
fn what_lay_in_a_ring_is_offered_again_when_the_ring_is_new() {
    let mut s = Scene::promised(1000);
    s.clock.on_driver_gone(s.now);
    s.ms(20);
    assert!(s.clock.on_driver_back(s.now));
    recovery::on_driver_back(&mut s.h, s.now);
    s.ms(15);
    s.accepted();
    s.ms(10);
    s.refused_by(Rule::Recovery);
}

/// G is offered so many super-segments of 31,000 bytes, one by one.
fn offered(count: u32) -> Scene {
    let mut s = Scene::open();
    for n in 0..count {
        let place = 1 + 31_000 * n;
        s.net_sends(&seg(Side::R, place, 1), &vec![7; 31_000]);
        s.net_gets(&with(seg(Side::G, 1, place + 31_000), |x| x.window = 1000), &[]);
        s.h.ends[Side::G as usize].edge += 31_000;
        s.guest_gets_super_segment(place, PUSH);
    }
    s.accepted();
    s
}

#[test]
fn a_timeout_does_not_send_everything_again() {
    let mut s = offered(2);
    s.seen_and_ms(255);
    s.guest_gets_super_segment(1, TcpFlags::ACK);
    s.guest_gets_super_segment(31_001, PUSH);
    s.accepted();
    s.ms(510);
    s.guest_gets_super_segment(1, TcpFlags::ACK);
    s.refused_by(Rule::Economy);
}

#[test]
fn what_an_ack_behind_a_timeout_allows_may_come_in_two_parts() {
    let mut s = offered(8);
    s.seen_and_ms(255);
    s.guest_gets_super_segment(1, TcpFlags::ACK);
    let acked = with(seg(Side::G, 1, 62_001), |x| x.window = 2000);
    s.guest_sends(&acked, &[]); // 124,000 bytes
    s.guest_gets_super_segment(62_001, TcpFlags::ACK);
    s.guest_sends(&acked, &[]);
    for n in 3..6 {
        s.guest_gets_super_segment(1 + 31_000 * n, TcpFlags::ACK);
    }
    s.accepted();
    s.guest_gets_super_segment(186_001, TcpFlags::ACK);
    s.refused_by(Rule::Economy);
}

/// Its MSS is larger than its port allows: a segment is of 1448 bytes.
#[test]
fn behind_a_timeout_a_guest_that_moves_is_offered_two_segments() {
    for given in [2, 1] {
        let mut s = Scene::open();
        s.h.ends[Side::G as usize].offer.mss = Some(2000);
        s.net_sends(&seg(Side::R, 1, 1), &[7; 11_584]);
        s.net_gets(&told(11_585), &[]);
        let offer = |s: &mut Scene, n: u32| {
            let flags = if n == 7 { PUSH } else { TcpFlags::ACK };
            s.guest_gets(&with(seg(Side::R, 1 + 1448 * n, 1), |x| x.flags = flags), &[7; 1448]);
        };
        (0..8).for_each(|n| offer(&mut s, n));
        s.seen_and_ms(255);
        offer(&mut s, 0);
        s.guest_sends(&seg(Side::G, 1, 2897), &[]);
        (2..2 + given).for_each(|n| offer(&mut s, n));
        s.accepted();
        s.seen_and_ms(25);
        if given == 2 { s.accepted() } else { s.refused_by(Rule::Recovery) }
    }
}

#[test]
fn a_flow_that_waits_while_another_gets_its_turns() {
    let mut waits = Scene::open();
    waits.h.name.guest_port = 2;
    waits.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
    waits.net_gets(&told(101), &[]);
    // Frames of another guest of the host may pass the store.
    for from_guest in [true, false] {
        let mut s = Scene::open();
        s.turns = waits.turns.clone();
        s.h.opaque = from_guest;
        s.net_sends(&seg(Side::R, 1, 1), &[7; 4344]);
        s.net_gets(&told(4345), &[]);
        for place in [1, 1449] {
            s.guest_gets(&seg(Side::R, place, 1), &[7; 1448]);
        }
        s.accepted();
        s.guest_gets(&with(seg(Side::R, 2897, 1), |x| x.flags = PUSH), &[7; 1448]);
        if from_guest { s.accepted() } else { s.refused_by(Rule::Turns) }
    }
}

/// G has sent 300 bytes, of which R misses the first hundred; the scene and R's SACK blocks.
fn r_misses_a_hundred() -> (Scene, Vec<(u32, u32)>) {
    let mut s = Scene::open();
    s.guest_sends(&seg(Side::G, 1, 1), &[7; 300]);
    s.net_gets(&seg(Side::G, 1, 1), &[7; 300]);
    (s, vec![(ISN[1] + 101, ISN[1] + 301)])
}

#[test]
fn r_says_by_sack_what_it_has_and_the_guest_hears_of_it() {
    for told_first in [true, false] {
        let (mut s, sack) = r_misses_a_hundred();
        s.net_sends(&with(seg(Side::R, 1, 1), |x| x.sack = sack.clone()), &[7; 100]);
        s.net_gets(&with(told(101), |x| x.seq += 300), &[]);
        if told_first {
            s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.sack = sack), &[]);
        }
        s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.flags = PUSH), &[7; 100]);
        if told_first { s.accepted() } else { s.refused_by(Rule::Echo) }
    }
    let (mut s, sack) = r_misses_a_hundred();
    s.guest_gets(&with(seg(Side::R, 1, 1), |x| x.sack = sack), &[]); // R did not say so
    s.refused_by(Rule::Echo);
}

#[test]
fn urgent_bytes_reach_the_guest_as_r_wrote_them() {
    let urgent = with(seg(Side::R, 1, 1), |x| (x.flags, x.urgent) = (PUSH | TcpFlags::URG, 5));
    let run = |segment: &Segment| {
        let mut s = Scene::open();
        s.net_sends(&urgent, &[7; 100]);
        s.guest_gets(segment, &[7; 100]);
        s
    };
    run(&urgent).accepted();
    run(&with(urgent.clone(), |x| x.urgent = 6)).refused_by(Rule::Fields);
    run(&with(urgent.clone(), |x| x.flags = TcpFlags::ACK | TcpFlags::URG))
        .refused_by(Rule::Fields);
    run(&with(urgent.clone(), |x| x.flags = PUSH)).refused_by(Rule::Fields);
    let mut s = Scene::open();
    s.net_sends(&urgent, &[7; 100]);
    s.net_gets(&told(101), &[]); // G has not got them
    s.refused_by(Rule::Fields);
}

#[test]
fn bytes_with_options_of_ip_reach_the_guest_with_them_and_before_anybody_says_so() {
    let odd = with(seg(Side::R, 1, 1), |x| (x.flags, x.ip_options) = (PUSH, vec![1; 4]));
    let run = |leaves: fn(&mut Scene, &Segment)| {
        let mut s = Scene::open();
        s.net_sends(&odd, &[7; 100]);
        leaves(&mut s, &odd);
        s
    };
    run(|s, odd| s.guest_gets(odd, &[7; 100])).accepted();
    run(|s, odd| s.guest_gets(&with(odd.clone(), |x| x.ip_options.clear()), &[7; 100]))
        .refused_by(Rule::Fields);
    run(|s, _| s.net_gets(&told(101), &[])).refused_by(Rule::Fields);
    run(|s, odd| {
        // R thinks better of it.
        s.net_sends(&with(odd.clone(), |x| x.ip_options.clear()), &[7; 100]);
        s.net_gets(&told(101), &[]);
    })
    .accepted();
}

#[test]
fn each_segment_behind_a_hole_has_an_ack_of_its_own() {
    for answers in [2, 1] {
        let mut s = Scene::open();
        s.h.ends[0].offer.sack = false;
        for n in 2..4 {
            s.net_sends(&seg(Side::R, 100 * n + 1, 1), &[7; 100]);
        }
        for _ in 0..answers {
            s.net_gets(&told(1), &[]);
        }
        s.ms(12);
        if answers == 2 { s.accepted() } else { s.refused_by(Rule::PromptAck) }
    }
}

#[test]
fn nobody_acknowledges_for_a_guest_whose_clock_is_outdated() {
    for idle_days in [25, 0] {
        let mut s = Scene::open();
        s.now = Instant::from_secs(2 + idle_days * 24 * 3600);
        s.h.spare = 8 << 20;
        for n in 0..3 {
            s.net_sends(&seg(Side::R, 1 + 100 * n, 1), &[7; 100]);
        }
        s.ms(1);
        s.guest_sends(&seg(Side::G, 1, 101), &[]);
        s.net_gets(&told(301), &[]);
        if idle_days > 0 { s.accepted() } else { s.refused_by(Rule::PromptAck) }
    }
}

#[test]
fn no_small_segments_while_more_is_there() {
    let mut s = Scene::open();
    s.net_sends(&seg(Side::R, 1, 1), &[7; 3000]);
    s.net_gets(&told(3001), &[]);
    s.guest_gets(&seg(Side::R, 1, 1), &[7; 100]);
    s.refused_by(Rule::Economy);
}

#[test]
fn r_has_half_of_the_guests_window_while_the_vm_has_budget() {
    for spare in [0, 8 << 20] {
        let mut s = Scene::open();
        s.h.spare = spare;
        s.net_sends(&seg(Side::R, 1, 1), &vec![7; 40_000]);
        s.net_gets(&told(40_001), &[]);
        s.guest_gets(&seg(Side::R, 1, 1), &[7; 1448]);
        s.sees(Side::G, &with(seg(Side::G, 1, 1), |x| x.window = 1000), &[]);
        s.ms(10);
        s.net_sends(&seg(Side::R, 40_001, 1), &[7; 1000]);
        s.net_gets(&told(41_001), &[]);
        s.ms(60);
        if spare == 0 { s.accepted() } else { s.refused_by(Rule::Window) }
    }
}

#[test]
fn a_silent_guest_is_offered_its_one_segment_for_hours() {
    let mut s = Scene::promised(1448);
    let again = with(seg(Side::R, 1, 1), |x| x.flags = PUSH);
    let mut ms = 255;
    for _ in 0..60 {
        s.seen_and_ms(ms);
        s.guest_gets(&again, &[7; 1448]);
        ms = (2 * ms).min(2000);
    }
    s.accepted();
}

#[test]
fn a_window_update_is_repeated_but_no_ack_of_data() {
    for update in [false, true] {
        let mut s = Scene::open();
        s.net_sends(&seg(Side::R, 1, 1), &vec![7; 60_000]);
        s.net_sends(&seg(Side::R, 60_001, 1), &vec![7; 4_000]);
        s.guest_gets(&seg(Side::R, 1, 1), &[7; 1448]); // lies in its ring unseen
        if update {
            s.net_gets(&with(seg(Side::G, 1, 64_001), |x| x.window = 0), &[]);
        }
        s.net_gets(&seg(Side::G, 1, 64_001), &[]);
        s.ms(300);
        if update { s.refused_by(Rule::Window) } else { s.accepted() }
    }
}

#[test]
fn a_keepalive_of_the_guest_is_no_window_update() {
    for again in [TcpFlags::ACK, PUSH] {
        let mut s = Scene::open();
        s.guest_sends(&seg(Side::G, 1, 1), &[7; 100]);
        s.net_gets(&told(1), &[7; 100]);
        s.net_sends(&seg(Side::R, 1, 101), &vec![7; 60_000]);
        s.net_sends(&seg(Side::R, 60_001, 101), &vec![7; 4_000]);
        s.guest_gets(&seg(Side::R, 1, 101), &[7; 1448]); // lies in its ring unseen
        s.net_gets(&with(seg(Side::G, 101, 64_001), |x| x.window = 0), &[]);
        s.net_gets(&seg(Side::G, 101, 64_001), &[]);
        s.ms(100);
        let keepalive = again == TcpFlags::ACK;
        s.net_gets(&seg(Side::G, if keepalive { 100 } else { 101 }, 64_001), &[]);
        s.ms(200);
        if keepalive { s.refused_by(Rule::Window) } else { s.accepted() }
    }
}

#[test]
fn what_the_host_does_not_hold_passes_unpushed() {
    let mut s = Scene::open();
    s.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
    s.guest_gets(&seg(Side::R, 1, 1), &[7; 100]);
    s.accepted();
}
