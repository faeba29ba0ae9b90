//! FWD: a guest that forwards, so that what is behind it is not a ring but a network.

use crate::common::segment::Seen;
use crate::common::world::{Peer, mac};
use crate::common::{Setup, World};
use crate::{GUEST, flow, from_uplink, sends_segments, warms_up};
use nightporter_core::engine::Verdict;
use nightporter_core::limits::T_PARK;
use nightporter_core::port::Local;
use nightporter_core::port::PortId;
use nightporter_core::tcp::flow::{State, Why};
use nightporter_core::wire::checksum::Checksum;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

const UPLINK: PortId = PortId(0);

/// An ICMP error of a router behind G: R's segment that begins with byte `at` is longer than `mtu`.
fn too_big_behind(w: &World<'_>, r: &Peer<'_>, at: i64, mtu: u16) -> Verdict {
    let v6 = r.end(|end| end.ip.to_ip().is_ipv6());
    let frame = r.frame_of(&format!("{at}:{}", at + 1000));
    let ip_header = if v6 { 40 } else { 20 };
    let [high, low] = mtu.to_be_bytes();
    let mut icmp =
        if v6 { vec![2, 0, 0, 0, 0, 0, high, low] } else { vec![3, 4, 0, 0, 0, 0, high, low] };
    icmp.extend(&frame[14..14 + ip_header + 8]);
    let len = u8::try_from(icmp.len()).expect("short");
    let ip = if v6 {
        let address = |end: &mut crate::common::world::End| end.ip.0;
        let router = [&[0x20, 1, 0xd, 0xb8][..], &[0; 11], &[99]].concat();
        [&[0x60, 0, 0, 0, 0, len, 58, 64][..], &router, &r.end(address)].concat()
    } else {
        let mut header =
            vec![0x45, 0, 0, 20 + len, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 99, 10, 0, 0, 2];
        let mut sum = Checksum::default();
        sum.add_bytes(&header);
        header[10..12].copy_from_slice(&sum.finish().to_be_bytes());
        header
    };
    let ethertype: &[u8] = if v6 { &[0x86, 0xdd] } else { &[8, 0] };
    let bytes = [&mac(2)[..], &mac(1)[..], ethertype, &ip, &icmp].concat();
    w.frame(GUEST, VirtioNetHdr::default(), &bytes)
}

/// A connection whose guest shows this TTL, and takes so many milliseconds to answer.
fn at_a_distance(
    setup: &Setup,
    ttl: u8,
    answer_ms: u64,
) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let w = setup.opens();
    let (r, g) = w.pair(setup);
    g.end(|end| end.ttl = ttl);
    shakes_hands(&w, &r, &g, answer_ms);
    (w, r, g)
}

fn shakes_hands(w: &World<'static>, r: &Peer<'static>, g: &Peer<'static>, answer_ms: u64) {
    let guest_is_client = w.0.borrow().outside.conns[r.conn].setup.guest_is_client;
    let (client, server) = if guest_is_client { (g, r) } else { (r, g) };
    client.sends_syn();
    server.gets_syn();
    w.after_ms(if guest_is_client { 0 } else { answer_ms });
    server.sends_syn_ack();
    client.gets_syn();
    w.after_ms(if guest_is_client { answer_ms } else { 0 });
    client.sends("1 ack 1");
    server.gets("1 ack 1");
    r.end(|end| end.acked = 1);
    g.end(|end| end.acked = 1);
}

fn stands(w: &World<'_>, conn: usize) -> (State, Why) {
    w.flow(conn, |f| (f.state(), f.why())).expect("a flow")
}

const PASSES: (State, Why) = (State::Pass, Why::NotLocal);
const IS_ON: (State, Why) = (State::On, Why::Nothing);

#[test]
fn fwd_01_ttl_and_answer_say_where_a_connection_ends() {
    for guest_is_client in [false, true] {
        let setup = Setup { guest_is_client, ..Setup::new() }.small();
        for (ttl, answer_ms, expected) in [
            (64, 100, IS_ON),
            (128, 0, IS_ON),
            (255, 0, IS_ON),
            (63, 2, IS_ON),
            (63, 4, PASSES),
            (62, 0, PASSES),
            (200, 0, PASSES),
            (1, 0, PASSES), // eBGP
        ] {
            let (w, ..) = at_a_distance(&setup, ttl, answer_ms);
            assert_eq!(stands(&w, 0), expected, "{ttl}, {answer_ms} ms, client: {guest_is_client}");
        }
        let setup = |local| Setup { local, ..setup.clone() };
        assert_eq!(stands(&at_a_distance(&setup(Local::Always), 62, 9).0, 0), IS_ON);
        assert_eq!(stands(&at_a_distance(&setup(Local::Never), 64, 0).0, 0), PASSES);
    }
}

/// A container's guest is off its CPU at times.
#[test]
fn fwd_01_a_server_that_was_quick_lately_is_near_though_its_guest_has_to_wait() {
    let setup = Setup::new().small();
    let (w, ..) = at_a_distance(&setup, 63, 1);
    let (r, g) = w.pair(&setup);
    g.end(|end| end.ttl = 63);
    shakes_hands(&w, &r, &g, 30);
    assert_eq!(stands(&w, 1), IS_ON);
}

#[test]
fn fwd_02_a_container_gets_a_window_from_the_first_byte_on_and_256_kib_are_held() {
    let (w, r, g) = at_a_distance(&Setup::new().small(), 63, 0);
    sends_segments(&r, 1, 40);
    let given: usize = g.takes_all().iter().map(|seen| seen.payload().len()).sum();
    assert_eq!(given, 10_000, "an initial window");
    g.sends("ack 10001");
    let given: usize = g.takes_all().iter().map(|seen| seen.payload().len()).sum();
    assert_eq!(given, 20_000, "slow start");
    for at in 41..400_i64 {
        let edge = r.takes_all().iter().map(|seen| i64::from(seen.ack() + seen.window())).max();
        if edge.is_some_and(|edge| edge < 1000 * (at + 1)) {
            break;
        }
        r.sends(&format!("{}:{}", 1000 * (at - 1) + 1, 1000 * at + 1));
    }
    let held = flow(&w, |f| f.held_bytes());
    assert!((200_000..=262_144 + 16_384).contains(&held), "{held}");
}

/// An upload to a container that shows a megabyte: what R has sent, may send and was acknowledged,
/// and what the container has.
struct ToContainer {
    w: World<'static>,
    r: Peer<'static>,
    g: Peer<'static>,
    sent: i64,
    edge: i64,
    acked: i64,
    given: i64,
    has: i64,
}

impl ToContainer {
    fn new() -> Self {
        let setup = Setup { budget_bytes: 16 << 20, ..Setup::new() }.small();
        let (w, r, g) = at_a_distance(&setup, 63, 0);
        warms_up(&r, &g);
        g.shows_window(1_000_000);
        g.sends("ack 1001");
        Self { w, r, g, sent: 1001, edge: 65_001, acked: 1001, given: 1001, has: 1001 }
    }

    fn hears(&mut self) {
        for seen in self.r.takes_all() {
            self.acked = self.acked.max(seen.ack().into());
            self.edge = self.edge.max((seen.ack() + seen.window()).into());
        }
    }

    /// R sends so many segments at most, as far as it may. Returns how many.
    fn sends(&mut self, most: i64) -> i64 {
        for n in 0..most {
            self.hears();
            if self.sent + 1000 > self.edge {
                return n;
            }
            sends_segments(&self.r, self.sent, 1);
            self.sent += 1000;
        }
        self.hears();
        most
    }

    /// The container acknowledges so many segments at most. `false`: it has none.
    fn takes(&mut self, most: i64) -> bool {
        let given = self.g.takes_all();
        let end = given.iter().map(|seen| seen.range().1.into()).fold(self.given, i64::max);
        self.given = end;
        let more = end > self.has;
        if more {
            self.has = end.min(self.has + 1000 * most);
            self.g.sends(&format!("ack {}", self.has));
        }
        self.hears();
        more
    }

    fn stands(&self) -> (State, Why, bool) {
        flow(&self.w, |f| (f.state(), f.why(), f.acknowledges_late()))
    }

    fn buffer(&self) -> i64 {
        flow(&self.w, |f| f.stats().buffer_bytes).into()
    }
}

const EARLY: (State, Why, bool) = (State::On, Why::Nothing, false);
const LATE: (State, Why, bool) = (State::On, Why::Nothing, true);

/// Found with real guests: such a flow left the path as soon as it was drained once.
#[test]
fn fwd_02_a_container_that_shows_more_than_is_held_is_acknowledged_early_to_its_end() {
    let mut upload = ToContainer::new();
    // R gets faster than the way to the container.
    let mut held_max = 0;
    for round in 0..80 {
        upload.sends(round);
        held_max = held_max.max(upload.acked - upload.has);
        upload.takes(15);
        assert_eq!(upload.stands(), EARLY, "at {}", upload.has);
    }
    while upload.takes(15) {}
    assert!(upload.sent > 900_000, "{}", upload.sent);
    assert_eq!((upload.acked, upload.has), (upload.sent, upload.sent));
    assert!((230_000..=262_144).contains(&held_max), "{held_max}");
    assert_eq!(upload.stands(), EARLY);
}

/// R is far away, and its window has to be as large as the container's.
#[test]
fn fwd_02_r_gets_more_room_if_it_waits_for_that_and_is_acknowledged_late_above_256_kib() {
    let mut upload = ToContainer::new();
    for _ in 0..5 {
        assert!(upload.sends(2000) > 0, "R has no window: {}", upload.buffer());
        while upload.takes(2000) {}
        assert_eq!((upload.stands(), upload.has), (EARLY, upload.sent));
    }
    assert!((900_000..=1_000_128).contains(&upload.buffer()), "{}", upload.buffer());
    // The container is off its CPU.
    upload.g.stops(1);
    let from = upload.has;
    upload.sends(2000);
    assert!(upload.sent - from > 900_000, "{}", upload.sent - from);
    assert!((245_000..=262_144).contains(&(upload.acked - from)), "{}", upload.acked - from);
    assert_eq!(upload.stands(), LATE);
    upload.g.runs();
    while upload.stands() == LATE {
        assert!(upload.takes(2000));
        assert!(upload.acked - upload.has <= 262_144, "{}", upload.acked - upload.has);
    }
    assert!(upload.has < upload.sent && upload.sent == upload.acked, "early before the end");
    upload.sends(100);
    while upload.takes(2000) {}
    assert_eq!((upload.stands(), upload.acked, upload.has), (EARLY, upload.sent, upload.sent));
}

#[test]
fn fwd_02_an_error_from_behind_ends_the_offload_and_is_remembered_for_the_server() {
    let setup = Setup::new().small();
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    sends_segments(&r, 1001, 4);
    g.takes_all();
    too_big_behind(&w, &r, 1001, 700);
    assert_eq!(stands(&w, 0), (State::Drain, Why::NotLocal));
    g.shows_window(512_000);
    g.takes_all();
    g.sends("ack 5001");
    assert_eq!(stands(&w, 0), PASSES);
    let (r2, g2) = w.pair(&setup);
    shakes_hands(&w, &r2, &g2, 0);
    assert_eq!(stands(&w, 1), PASSES);
    w.after_ms(600_000);
    let (r3, g3) = w.pair(&setup);
    shakes_hands(&w, &r3, &g3, 0);
    assert_eq!(stands(&w, 2), IS_ON);
    assert_eq!(w.engine(|engine, _| engine.vm(GUEST).expect("a VM").counters.flows_not_local), 2);
}

#[test]
fn fwd_01_two_data_segments_in_a_row_from_behind_are_a_sign_and_one_is_none() {
    let (w, _r, g) = Setup::new().small().established();
    let mut next = 1;
    let mut sends = |ttl: u8, bytes: i64| {
        g.end(|end| end.ttl = ttl);
        g.sends(&format!("{next}:{}", next + bytes));
        next += bytes;
    };
    sends(63, 100);
    sends(64, 100);
    sends(63, 100);
    sends(255, 100);
    sends(62, 0);
    sends(62, 0);
    assert_eq!(stands(&w, 0), IS_ON);
    sends(63, 100);
    sends(63, 100);
    assert_eq!(stands(&w, 0).1, Why::NotLocal);
}

#[test]
fn fwd_05_a_connection_that_ends_behind_g_does_not_end_its_floods() {
    for (ttl, goes_on) in [(62, true), (64, true)] {
        let setup = Setup { floods: true, ..Setup::new() }.small();
        let (w, r, g) = at_a_distance(&setup, ttl, 0);
        g.sends("1:1001");
        r.takes_all();
        let controls = w.engine(|engine, now| engine.controls_congestion(now, GUEST));
        assert_eq!(controls, goes_on, "{ttl}");
    }
}

#[test]
fn fwd_06_who_sleeps_behind_g_is_waited_for_as_long_as_linux_would() {
    for (ttl, seconds) in [(64, 120), (63, 924)] {
        let (w, r, g) = at_a_distance(&Setup::new().small(), ttl, 0);
        g.sends("ack 1");
        sends_segments(&r, 1, 1);
        w.set_lenient(0, true); // the promise will be broken
        let mut waited = 0;
        while w.state() != Some(State::Abort) {
            g.takes_all();
            w.after_ms(1000);
            waited += 1;
            assert!(waited < 2000, "{}", w.trace());
        }
        assert!((seconds..seconds + 5).contains(&waited), "{waited} s with a TTL of {ttl}");
    }
}

/// Bytes of the longest segment of a frame.
fn longest(seen: &Seen) -> usize {
    match usize::from(seen.hdr.gso_size) {
        0 => seen.payload().len(),
        gso => gso.min(seen.payload().len()),
    }
}

/// Found in the field: behind a narrower link all of a megabyte was acknowledged, and nothing
/// arrived.
#[test]
fn fwd_03_segments_that_are_too_long_for_the_way_behind_g_come_again_shorter() {
    for v6 in [false, true] {
        let (mss, mtu, payload) = if v6 { (1400, 1300, 1228) } else { (1000, 700, 648) };
        let setup = Setup { v6, mss, ..Setup::new() }.small();
        let (w, r, g) = setup.established();
        warms_up(&r, &g);
        let full = if v6 { 1400 } else { 1000 };
        (0..20)
            .for_each(|n| _ = r.sends(&format!("{}:{}", 1001 + full * n, 1001 + full * (n + 1))));
        let end = u32::try_from(1001 + 20 * full).expect("small");
        assert!(g.takes_all().iter().any(|seen| longest(seen) > payload));
        assert_eq!(too_big_behind(&w, &r, 50_001, mtu), Verdict::Forward(UPLINK), "not under way");
        g.gets_nothing();
        assert_eq!(too_big_behind(&w, &r, 1001, mtu), Verdict::Forward(UPLINK));
        let (mut acked, mut frames) = (1001, 0);
        while acked < end {
            let copies = g.takes_all();
            assert!(!copies.is_empty(), "at {acked}\n{}", w.trace());
            assert!(copies.iter().all(|seen| longest(seen) <= payload), "{}", w.trace());
            acked = copies.iter().map(|seen| seen.range().1).max().expect("some");
            frames += copies.len();
            g.sends(&format!("ack {acked}"));
        }
        assert!(frames < 60, "{frames}");
        r.takes_all();
        // R's next data, too, until the way may have changed.
        let mut at = i64::from(end);
        let mut more = |count: i64| {
            let next = at + count * full;
            let texts: Vec<_> = (0..count).map(|n| (at + n * full, at + (n + 1) * full)).collect();
            at = next;
            texts.iter().map(|(a, b)| format!("{a}:{b}")).collect::<Vec<_>>()
        };
        more(2).iter().for_each(|text| _ = r.sends(text));
        assert!(g.takes_all().iter().all(|seen| longest(seen) <= payload));
        g.sends(&format!("ack {}", i64::from(end) + 2 * full));
        w.after_ms(600_001);
        more(1).iter().for_each(|text| _ = r.sends(text));
        g.takes_all();
        g.sends(&format!("ack {}", i64::from(end) + 3 * full));
        let last = more(2);
        r.sends_all(&last.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(g.takes_all().iter().any(|seen| longest(seen) > payload), "{}", w.trace());
    }
}

#[test]
fn fwd_03_an_error_makes_segments_no_smaller_than_every_way_takes() {
    let (w, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    sends_segments(&r, 1001, 4);
    g.takes_all();
    too_big_behind(&w, &r, 1001, 68);
    assert_eq!(g.takes_all().iter().map(longest).max(), Some(524), "an MSS of 536, and timestamps");
    // Once is enough, for the others that the router has dropped.
    too_big_behind(&w, &r, 2001, 68);
    g.gets_nothing();
}

/// A way behind G: a link with a queue, then a client with SACK, as far away as one may be.
struct Way {
    /// Microseconds that a segment takes on the link, and that its answer takes then.
    segment_us: u64,
    round_us: u64,
    /// Segments that find place in the queue.
    queue: usize,
    /// When the queued segments are at the client's end of the link, in microseconds.
    leaves: Vec<(u64, (i64, i64))>,
    /// When acknowledgements arrive at G.
    answers: Vec<(u64, String)>,
    has: i64,
    beyond: Vec<(i64, i64)>,
    dropped: usize,
    copies: i64,
}

impl Way {
    fn new(segment_us: u64, round_us: u64, queue: usize) -> Self {
        let (leaves, answers, beyond) = (vec![], vec![], vec![]);
        Self { segment_us, round_us, queue, leaves, answers, has: 1, beyond, dropped: 0, copies: 0 }
    }

    /// G gets these bytes at `now`.
    fn takes(&mut self, now: u64, (from, to): (i64, i64)) {
        let mut at = from;
        while at < to {
            let end = (at + 1000).min(to);
            if self.leaves.len() >= self.queue {
                self.dropped += 1;
            } else {
                let free = self.leaves.last().map_or(now, |(at, _)| now.max(*at));
                self.leaves.push((free + self.segment_us, (at, end)));
            }
            at = end;
        }
    }

    /// The client gets what has crossed the link, and acknowledges each.
    fn passes(&mut self, now: u64) {
        while self.leaves.first().is_some_and(|(at, _)| *at <= now) {
            let (at, (from, to)) = self.leaves.remove(0);
            let known = to <= self.has || self.beyond.iter().any(|r| r.0 <= from && to <= r.1);
            self.copies += if known { to - from } else { 0 };
            self.beyond.push((from, to));
            self.beyond.sort_unstable();
            let mut merged: Vec<(i64, i64)> = vec![];
            for (from, to) in self.beyond.drain(..) {
                match merged.last_mut() {
                    Some(last) if from <= last.1 => last.1 = last.1.max(to),
                    _ => merged.push((from, to)),
                }
            }
            if let Some(first) = merged.first().copied().filter(|r| r.0 <= self.has) {
                self.has = self.has.max(first.1);
                merged.remove(0);
            }
            self.beyond = merged;
            // The block of the newest segment first (RFC 2018 section 4).
            let mut blocks: Vec<_> = self.beyond.clone();
            blocks.sort_by_key(|r| (r.0 > from || r.1 < to, r.0));
            let blocks: Vec<_> =
                blocks.iter().take(3).map(|r| format!("{}:{}", r.0, r.1)).collect();
            let sack = if blocks.is_empty() {
                String::new()
            } else {
                format!(" <sack {}>", blocks.join(" "))
            };
            self.answers.push((at + self.round_us, format!("ack {}{sack}", self.has)));
        }
    }
}

fn wide() -> Setup {
    Setup { window: [64_000; 2], scale: [Some(7); 2], ..Setup::new() }.small()
}

/// R uploads `bytes` over H to a client behind G; milliseconds until the client has all.
fn uploads(way: &mut Way, bytes: i64) -> u64 {
    let (w, r, g) = wide().established();
    warms_up(&r, &g);
    way.has = 1001;
    uploads_over(way, bytes, &w, &r, &g)
}

/// The same, over a connection that has shaken hands, and had no other data.
fn uploads_over(way: &mut Way, bytes: i64, w: &World<'_>, r: &Peer<'_>, g: &Peer<'_>) -> u64 {
    g.shows_window(400_000);
    let (begins, end) = (w.now(), way.has + bytes);
    let (mut sent, mut edge) = (way.has, 64_000);
    loop {
        let now = w.now().since(begins).as_nanos() / 1000;
        for seen in r.takes_all() {
            edge = edge.max(i64::from(seen.ack() + seen.window()));
        }
        while sent < end && sent + 1000 <= edge {
            r.sends(&format!("{sent}:{}", sent + 1000));
            sent += 1000;
        }
        for seen in g.takes_all() {
            let (from, to) = seen.range();
            way.takes(now, (from.into(), to.into()));
        }
        way.passes(now);
        let (due, later) = way.answers.drain(..).partition(|(at, _)| *at <= now);
        way.answers = later;
        let due: Vec<(u64, String)> = due;
        due.iter().for_each(|(_, ack)| _ = g.sends(ack));
        if way.has >= end {
            return now / 1000;
        }
        assert!(now < 60_000_000, "{} of {bytes}\n{}", way.has, w.trace());
        w.after_ms(1);
    }
}

/// Measured before: 12.3 s instead of 2.4, and more than half of all that was given was dropped.
#[test]
fn fwd_04_a_queue_behind_g_that_overflows_slows_h_down() {
    let mut way = Way::new(840, 40_000, 100); // 10 Mbit/s, 40 ms, 100 KB
    let ms = uploads(&mut way, 3_000_000);
    assert!(ms < 2520 * 12 / 10, "{ms} ms, {} dropped, {} copied", way.dropped, way.copies);
    assert!(
        way.dropped < 500 && way.copies < 300_000,
        "{ms} ms, {} dropped, {} copied",
        way.dropped,
        way.copies
    );
}

/// Milliseconds until so many bytes are at the end of a way of 400 ms, after the handshake, by slow
/// start (RFC 6928), with a window of `most` bytes.
fn needed_ms(bytes: i64, most: i64) -> u64 {
    let (mut sent, mut flight, mut ms) = (0, 10_000, 0);
    while sent + flight < bytes {
        (sent, flight, ms) = (sent + flight, (2 * flight).min(most), ms + 400);
    }
    ms
}

/// Measured before: 44 of 100 bytes were copies, and later one flight of each connection.
#[test]
fn fwd_04_the_handshake_says_how_long_a_way_of_400_ms_is_waited_for() {
    for ttl in [64, 63] {
        let mut way = Way::new(100, 400_000, 2000);
        let (w, ..) = at_a_distance(&wide(), ttl, 1);
        let (r, g) = w.pair(&wide());
        g.end(|end| end.ttl = ttl);
        shakes_hands(&w, &r, &g, 400);
        // R is held back, because the buffer for a container does not follow what that shows.
        w.set_lenient(1, ttl == 63);
        let ms = uploads_over(&mut way, 1_000_000, &w, &r, &g);
        let needed_ms = needed_ms(1_000_000, 400_000);
        assert_eq!((way.copies, way.dropped), (0, 0), "TTL {ttl}: {ms} ms");
        assert!(ms * 10 <= needed_ms * 12, "TTL {ttl}: {ms} ms where {needed_ms} are needed");
    }
}

/// Nobody can know it when the server's answers are those of a proxy.
#[test]
fn fwd_04_a_way_of_400_ms_that_the_handshake_does_not_show_is_waited_for_after_one_flight() {
    let mut way = Way::new(100, 400_000, 2000);
    uploads(&mut way, 3_000_000);
    assert!(way.copies < 200_000, "{}", way.copies);
}

/// RFC 6298 section 2.2, and no longer than the longest of local timeouts, because a guest that was
/// off its CPU shows the same. Its first acknowledgement shows that there is no way behind it.
#[test]
fn fwd_04_the_first_timeout_is_three_times_the_handshakes_answer() {
    for (answer_ms, timeout_ms) in
        [(0, 250), (83, 250), (90, 270), (400, 1200), (700, 2000), (5000, 2000)]
    {
        for (ttl, first_ms, guest_is_client) in [(64, 0, false), (64, 0, true), (63, 1, false)] {
            let setup = Setup { guest_is_client, ..Setup::new() }.small();
            let (w, ..) = at_a_distance(&setup, ttl, first_ms);
            let (r, g) = w.pair(&setup);
            g.end(|end| end.ttl = ttl);
            shakes_hands(&w, &r, &g, answer_ms);
            g.sends("ack 1");
            r.sends("1:1001");
            g.gets("1:1001");
            w.after_ms(timeout_ms - 5);
            g.gets_nothing();
            w.after_ms(25); // timeouts are counted in 16 ms
            g.gets("1:1001");
        }
        // A connection that was idle first, and gave its place back, still learns it.
        let (w, r, g) = at_a_distance(&Setup::new().small(), 64, answer_ms);
        g.sends("ack 1");
        w.after_ms(2 * T_PARK.as_millis());
        r.sends("1:1001");
        g.gets("1:1001");
        g.sends("ack 1001");
        r.sends("1001:2001");
        g.gets("1001:2001");
        w.after_ms(255);
        g.gets("1001:2001");
        let (w, r, g) = at_a_distance(&Setup::new().small(), 64, answer_ms);
        warms_up(&r, &g);
        assert!(flow(&w, |f| !f.stats().has_losses));
        r.sends("1001:2001");
        g.gets("1001:2001");
        w.after_ms(255);
        g.gets("1001:2001");
    }
}

#[test]
fn fwd_04_without_a_loss_nothing_is_remembered() {
    let mut way = Way::new(8, 100, 2000);
    uploads(&mut way, 1_000_000);
    let (w, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    sends_segments(&r, 1001, 20);
    g.takes_all();
    g.sends("ack 21001");
    assert!(flow(&w, |f| !f.stats().has_losses));
    assert_eq!((way.dropped, way.copies), (0, 0));
}

/// FWD-02: its guest is off its core for 60 ms, and R is not shown more for that.
#[test]
fn fwd_02_a_container_gets_no_room_ahead() {
    let setup = Setup { budget_bytes: 64 << 20, arena: (4096, 128), ..Setup::new() };
    let (w, r, g) = at_a_distance(&setup, 63, 1);
    warms_up(&r, &g);
    g.stops(0);
    let mut next = 1001;
    for _ in 0..60 {
        let room = flow(&w, |f| f.stats().edge_to_net - f.stats().rcv_nxt);
        let end = next + i64::try_from(room).expect("small").min(60_000);
        if end > next {
            r.sends(&format!("{next}:{end} gso 1000"));
            next = end;
        }
        w.after_ms(1);
    }
    assert!((200_000..=1001 + 256 * 1024).contains(&next), "{next}");
}

/// A connection of a station behind a trusted guest, which has acknowledged 1,000 bytes.
fn station_with_data() -> (World<'static>, Peer<'static>, Peer<'static>) {
    let local = Local::Always;
    let setup = Setup { is_station: true, guest_is_client: true, local, ..Setup::new() };
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    g.gets("1001:2001");
    g.sends("ack 2001");
    (w, r, g)
}

/// The switch forgets a station behind a trusted guest that is silent for five minutes, and frames
/// for it are flooded; they went past its flow.
#[test]
fn fwd_01_a_station_that_was_silent_keeps_its_flow() {
    let (w, r, g) = station_with_data();
    for at in [2001, 3001] {
        w.after_ms(301_000);
        r.sends(&format!("{at}:{}", at + 1000));
        r.gets_last(&format!("1 ack {}", at + 1000));
        g.gets_last(&format!("{at}:{}", at + 1000));
        g.sends(&format!("ack {}", at + 1000));
    }
}

/// Its first frame of all is the answer: R's SYN goes everywhere.
#[test]
fn fwd_01_a_station_that_was_never_heard_gets_a_flow() {
    let setup = Setup { is_station: true, local: Local::Always, ..Setup::new() };
    let (w, r, g) = setup.established();
    assert_eq!(stands(&w, 0), IS_ON);
    r.sends("1:1001");
    r.gets("1 ack 1001");
    g.gets("1:1001");
    // Only behind a guest that has such stations.
    let (w, ..) = Setup { local: Local::Auto, ..setup }.established();
    assert_eq!(w.state(), None);
}

/// It was heard behind the uplink since, so it has moved there with its connection.
#[test]
fn fwd_01_a_station_that_was_heard_elsewhere_is_not_where_its_flow_is() {
    let (w, r, _g) = station_with_data();
    let announcement = [&[0xff; 6][..], &mac(1), &[0x80, 0x35], &[0; 46]].concat();
    from_uplink(&w, &announcement);
    w.after_ms(301_000);
    r.sends("2001:3001");
    r.gets_nothing();
}
