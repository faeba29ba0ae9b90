//! SNOOP-24 to SNOOP-32: what comes from G, and how it is delivered to.

use crate::common::segment::Seen;
use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, sends_segments, warms_up};
use nightporter_core::limits;
use nightporter_core::port::PortFeatures;
use nightporter_core::tcp::flow::{Flow, State, Why};

fn warm() -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    w.after_ms(1000);
    r.takes_all();
    (w, r, g)
}

/// Without offloads: a frame is a segment.
fn plain() -> (World<'static>, Peer<'static>, Peer<'static>) {
    let setup = Setup { features: PortFeatures::default(), ..Setup::new() };
    let (w, r, g) = setup.small().established();
    warms_up(&r, &g);
    (w, r, g)
}

#[test]
fn snoop_24_acks_that_cannot_be_true_change_nothing() {
    let (w, r, g) = warm();
    sends_segments(&r, 1001, 3);
    r.takes_all();
    let before = flow(&w, Flow::stats);
    // A gibibyte ahead, one beyond what was delivered, and old.
    for ack in [1 << 30, 4002, 2_000_000_000, 500] {
        g.lies(&format!("1 ack {ack} win 1024"));
        r.gets_nothing();
        let now = flow(&w, Flow::stats);
        assert_eq!(
            (now.guest_una, now.guest_edge, now.rcv_nxt),
            (before.guest_una, before.guest_edge, before.rcv_nxt),
            "{ack}"
        );
    }
}

#[test]
fn snoop_25_an_idle_connection_lives_by_the_guests_keepalives() {
    let (w, r, g) = warm();
    for _ in 0..13 {
        w.after_ms(5000);
        g.sends("0 ack 1001");
        r.gets("0 ack 1001");
        r.sends("1001 ack 1");
        g.gets("1001 ack 1");
    }
    r.gets_nothing();
    g.gets_nothing();
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn snoop_25_a_window_probe_of_the_guest_reaches_r() {
    let (_, r, g) = warm();
    g.sends("1:1001 ack 1001");
    r.gets("1:1001");
    r.sends("1001 ack 1001 win 0");
    g.gets("1001 ack 1001 win 0");
    g.sends("1000 ack 1001");
    r.gets("1000 ack 1001");
    r.sends("1001 ack 1001 win 0");
    g.gets("1001 ack 1001 win 0");
    // The other style: a byte of new data.
    g.sends("1001:1002 ack 1001");
    r.gets("1001:1002 ack 1001");
    r.sends("1001 ack 1002 win 64000");
    g.gets("1001 ack 1002 win 64000");
}

/// Found by simulation (seed 1711): the repeated segment showed more room than what R had sent
/// before it and behind it in the stream, and seemed to be the newest.
#[test]
fn inv_05_a_late_segment_of_r_takes_no_window_back() {
    let (_, r, g) = warm();
    r.sends("3001:4001 ack 1 win 64000");
    r.sends("1001:2001 ack 1 win 96000");
    r.sends("2001:3001 ack 1 win 64000");
    assert_eq!(g.gets_last("P. 2001:4001 ack 1").window(), 96_000);
}

#[test]
fn snoop_25_plain_acks_and_duplicates_are_not_traffic() {
    let (w, r, g) = warm();
    sends_segments(&r, 1001, 4);
    r.takes_all();
    let absorbed = || flow(&w, |f| f.stats().absorbed_acks);
    let before = absorbed();
    for text in ["1 ack 2001", "1 ack 2001", "1 ack 2001 <sack 3001:4001>", "1 ack 5001"] {
        g.sends(text);
    }
    assert!(r.takes_all().iter().all(|s| s.sack().is_empty() && s.ack() == 5001));
    assert_eq!(absorbed() - before, 4);
}

#[test]
fn snoop_26_both_directions_at_once() {
    let (_, r, g) = warm();
    for n in 0..20_i64 {
        let (rf, gf) = (1001 + 1000 * n, 1 + 1000 * n);
        r.sends(&format!("{rf}:{} ack {gf}", rf + 1000));
        g.sends(&format!("{gf}:{} ack {}", gf + 1000, rf + 1000));
        r.gets_last(&format!("{gf}:{} ack {}", gf + 1000, rf + 1000));
        g.gets_last(&format!("{rf}:{} ack {gf}", rf + 1000));
    }
}

#[test]
fn snoop_26_sack_of_the_guest_never_leaves_on_its_data() {
    let (_, r, g) = warm();
    sends_segments(&r, 1001, 3);
    r.takes_all();
    g.sends("1:101 ack 1001 <sack 2001:3001>");
    r.gets("1:101 ack 4001");
}

#[test]
fn snoop_27_a_guest_with_a_small_window() {
    let (w, r, g) = Setup { window: [64_000, 4096], ..Setup::new() }.established();
    r.sends("1:1001"); // G's window is all that R knows of before H's first ACK
    r.sends("1001:20001 gso 1000");
    r.takes_all();
    let mut acked = 1_u32;
    for _ in 0..200 {
        let seen = g.takes_all();
        let Some(last) = seen.last() else { break };
        acked = last.range().1;
        assert!(seen.iter().map(|s| s.payload().len()).sum::<usize>() <= 4096);
        g.sends(&format!("ack {acked} win 4096"));
    }
    assert_eq!(acked, 20_001, "{}", w.trace());
}

#[test]
fn snoop_27_no_silly_windows() {
    let (_, r, g) = warm();
    r.sends("1001:9001 gso 1000");
    g.gets("1001:9001");
    g.sends("ack 9001 win 2048");
    r.sends("9001:19001 gso 1000");
    g.gets("9001:11049");
    // G's reader takes a little at a time: crumbs wait until they are worth a segment.
    for (ack, win) in [(9101, 2048), (9201, 2048), (9501, 2048)] {
        g.sends(&format!("ack {ack} win {win}"));
        g.gets_nothing();
    }
    g.sends("ack 10049 win 2048");
    assert!(g.gets_last_any().payload().len() >= 1000);
}

#[test]
fn snoop_28_bytes_go_only_by_a_cumulative_ack() {
    let (w, r, g) = plain();
    sends_segments(&r, 1001, 10);
    r.takes_all();
    g.takes_all();
    g.sends("ack 1001 <sack 2001:11001>");
    assert_eq!(flow(&w, |f| f.held_bytes()), 10_000, "SACK is a hint");
    // G takes it back (RFC 2018 section 8): everything is still there.
    g.takes_all();
    w.after_ms(10_000);
    let mut acked = 1001;
    loop {
        let seen = g.takes_all();
        let [first, .., last] = &seen[..] else { break };
        assert_eq!(first.range().0, acked, "a hole");
        acked = last.range().1;
        g.sends(&format!("ack {acked}"));
    }
    assert_eq!(acked, 11_001);
    r.gets_nothing();
}

#[test]
fn snoop_29_three_duplicates_or_a_sack_hole_repeat_at_once() {
    for sack in ["", " <sack 3001:6001>"] {
        let (_, r, g) = plain();
        sends_segments(&r, 1001, 5);
        r.takes_all();
        g.takes_all();
        // 2001:3001 was lost inside G.
        g.sends("ack 2001");
        let mut repeated = Vec::new();
        for _ in 0..3 {
            g.sends(&format!("ack 2001{sack}"));
            repeated.extend(g.takes_all());
        }
        assert_eq!(repeated.len(), 1, "{sack}");
        assert_eq!(repeated[0].range(), (2001, 3001), "{sack}");
        for _ in 0..5 {
            g.sends(&format!("ack 2001{sack}"));
        }
        g.gets_nothing();
        g.sends("ack 6001");
        g.gets_nothing();
        r.gets_nothing();
    }
}

#[test]
fn snoop_29_two_holes_in_one_flight() {
    let (_, r, g) = plain();
    sends_segments(&r, 1001, 8);
    r.takes_all();
    g.takes_all();
    g.sends("ack 2001 <sack 3001:4001>");
    g.gets("2001:3001");
    g.sends("ack 2001 <sack 5001:9001 3001:4001>");
    g.sends("ack 4001 <sack 5001:9001>");
    g.gets("4001:5001");
    g.sends("ack 9001");
    g.gets_nothing();
}

#[test]
fn snoop_29_a_paused_guest_is_not_repeated_to() {
    let (w, r, g) = warm();
    g.stops(100);
    sends_segments(&r, 1001, 5);
    g.takes_all();
    w.after_ms(30_000);
    g.gets_nothing();
    // Resumed, it gets its time first.
    g.runs();
    w.after_ms(200);
    g.gets_nothing();
    g.sends("ack 6001");
    w.after_ms(5000);
    g.gets_nothing();
    assert_eq!(flow(&w, |f| f.stats().local_retransmissions), 0);
}

#[test]
fn snoop_29_backs_off_to_two_seconds() {
    let (w, r, g) = warm();
    r.sends("1001:2001");
    g.gets("1001:2001");
    let start = w.now();
    let mut at = Vec::new();
    while at.len() < 6 {
        w.after_ms(1);
        if !g.takes_all().is_empty() {
            at.push(w.now().since(start).as_millis());
        }
    }
    assert_eq!(at, [250, 750, 1750, 3750, 5750, 7750]);
}

#[test]
fn snoop_30_repeated_bytes_carry_the_newest_timestamp() {
    let (w, r, g) = warm();
    r.sends("1001:2001 <ts 1000>");
    g.gets("1001:2001 <ts 1000>");
    w.after_ms(200);
    r.sends("2001 ack 1 <ts 1200>");
    g.gets("ack 1 <ts 1200>");
    w.after_ms(150); // G has to show that it saw the ACK before its time goes on
    g.gets("1001:2001 <ts 1200>");
}

#[test]
fn snoop_31_a_lost_window_update_is_found_out() {
    let (w, r, g) = warm();
    g.sends("ack 1001 win 0");
    r.takes_all();
    r.sends("1001:2001");
    r.takes_all();
    g.gets_nothing();
    // 200 ms, doubling to 60 s, for as long as G answers.
    let start = w.now();
    let mut at = Vec::new();
    while w.now().since(start).as_millis() < 400_000 {
        w.after_ms(10);
        for seen in g.takes_all() {
            assert_eq!(seen.range(), (1000, 1000), "{}", w.trace());
            at.push(w.now().since(start).as_millis());
            g.sends("ack 1001 win 0");
        }
    }
    let gaps: Vec<u64> = at.windows(2).map(|w| w[1] - w[0]).collect();
    assert_eq!(gaps[..4], [400, 800, 1600, 3200]);
    assert_eq!(gaps.last(), Some(&60_000));
    assert_eq!(w.state(), Some(State::On));
    g.sends("ack 1001 win 64000");
    g.gets("1001:2001");
}

/// Found by simulation: the first probe waited for as long as the last timeout.
#[test]
fn snoop_31_timeouts_before_the_window_shut_delay_no_probe() {
    let (w, r, g) = warm();
    r.sends("1001:2001");
    for after_ms in [0, 250, 500, 1000] {
        w.after_ms(after_ms);
        g.gets("1001:2001");
    }
    g.sends("ack 2001 win 0");
    r.takes_all();
    r.sends("2001:3001");
    r.takes_all();
    g.gets_nothing();
    w.after_ms(210);
    assert_eq!(g.takes_all().iter().map(Seen::range).collect::<Vec<_>>(), [(2000, 2000)]);
}

#[test]
fn snoop_31_after_a_long_pause_of_the_reader_one_lost_frame_is_no_refusal() {
    let (w, r, g) = warm();
    g.sends("ack 1001 win 0");
    r.sends("1001:2001");
    for _ in 0..60 {
        w.after_ms(10_000);
        if !g.takes_all().is_empty() {
            g.sends("ack 1001 win 0");
        }
    }
    g.sends("ack 1001 win 64000");
    g.gets("1001:2001"); // which G loses
    w.after_ms(400);
    g.gets("1001:2001");
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn snoop_32_a_guest_that_refuses_is_reset_with_r_and_remembered() {
    let (w, r, g) = warm();
    r.sends("1001:2001");
    r.takes_all();
    let mut tries = 0;
    while w.state() == Some(State::On) {
        w.after_ms(1000);
        tries += g.takes_all().iter().filter(|s| !s.payload().is_empty()).count();
        // Otherwise alive: it goes on talking.
        if w.state() == Some(State::On) {
            g.sends("1 ack 1001");
        }
        w.set_lenient(0, true); // the promise is about to be broken
    }
    assert!(tries >= 15, "{tries}");
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Abort, Why::GuestRefuses));
    assert!(r.gets_last_any().tcp().flags.rst());
    let refused = w.0.borrow().engine.vm(GUEST).expect("a VM").refused.len();
    assert_eq!(refused, 1);
    assert!(w.now().since(Setup::new().start).as_millis() >= limits::REFUSED_RUNNING.as_millis());
    // The same remote and port are not taken on again.
    let again = Setup { isn: [500, 600], ..Setup::new() };
    let (r2, g2) = w.pair(&again);
    r2.end(|end| end.tcp_port = 40_000);
    w.handshake(&r2, &g2);
    assert_eq!(w.flow(1, |f| f.state()), Some(State::Pass));
}

#[test]
fn snoop_31_the_window_of_a_guest_that_is_owed_nothing_is_not_probed() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.sends("ack 1001 win 0");
    w.after_ms(60_000);
    g.gets_nothing();
    r.sends("1001:1101");
    w.after_ms(1000);
    g.gets("1000 ack 1");
}
