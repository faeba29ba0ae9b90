//! Events of a live flow: SYNs, urgent probes, duplicates, and the end of its port.

use crate::common::segment::pattern_bytes;
use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, from_uplink, warms_up};
use nightporter_check::event::Event;
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::limits;
use nightporter_core::tcp::flow::{State, Why};
use nightporter_core::wire::packet::IpAddr16;

fn warm() -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    w.after_ms(1000);
    r.takes_all();
    (w, r, g)
}

/// G takes nothing, and R has sent all that its window allows: its stream stands at the number
/// returned.
fn sees_a_shut_window(r: &Peer<'_>, g: &Peer<'_>) -> i64 {
    g.sends("ack 1001 win 0");
    let (mut next, mut room) = (1001, 1000);
    while room > 0 {
        let end = next + i64::from(room.min(1000));
        r.sends(&format!("{next}:{end}"));
        room = r.gets_last_any().window();
        next = end;
    }
    g.gets_nothing();
    next
}

/// G takes all there is. Where its stream stands then.
fn takes_everything(g: &Peer<'_>) -> i64 {
    g.sends("ack 1001 win 64000");
    let mut acked = 1001;
    while let Some(last) = g.takes_all().last() {
        acked = i64::from(last.range().1);
        g.sends(&format!("ack {acked} win 64000"));
    }
    acked
}

/// Linux probes like this while urgent data waits: at the next byte, with nothing in it.
#[test]
fn snoop_35_an_urgent_probe_does_not_leave_the_window_shut() {
    let (w, r, g) = warm();
    let end = sees_a_shut_window(&r, &g);
    assert_eq!(r.sends(&format!("U. {end}:{end} urg 1")), Verdict::Drop(DropReason::Draining));
    r.gets(&format!("ack {end} win 0"));
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Drain, Why::Urgent));
    assert_eq!(takes_everything(&g), end);
    assert_eq!(w.state(), Some(State::On));
    let update = r.gets_last(&format!("ack {end}"));
    assert!(update.window() >= 64_000, "R would have to ask: {}", update.window());
    // Lost, it is said once more (SNOOP-34).
    w.after_ms(limits::WINDOW_UPDATE_REPEAT.as_millis() + 1);
    assert_eq!(r.gets(&format!("ack {end}")).window(), update.window());
    r.gets_nothing();
}

#[test]
fn snoop_35_urgent_probes_are_answered_but_not_for_a_guest_that_is_silent() {
    let (w, r, g) = warm();
    let end = sees_a_shut_window(&r, &g);
    let probe = format!("U. {end}:{end} urg 1");
    for _ in 0..3 {
        w.after_ms(limits::ODD_ACK_INTERVAL.as_millis());
        r.sends(&probe);
        r.gets(&format!("ack {end} win 0"));
    }
    g.stops(1); // for the probe of its own window, which it does not see
    w.after_ms(limits::T_PAUSED.as_millis() + 10_000);
    r.sends(&probe);
    r.gets_nothing();
}

#[test]
fn snoop_13_what_is_not_taken_for_its_options_is_asked_for_by_a_duplicate_ack() {
    for text in ["1001:2001 <opt 1e04aabb>", "U. 2001:3001 urg 5", "F. 3001:4001 <opt 1e04aabb>"] {
        let (w, r, g) = warm();
        g.stops(0);
        r.sends("1001:1501");
        r.gets("ack 1501");
        assert_eq!(r.sends(text), Verdict::Drop(DropReason::Draining), "{text}");
        r.gets("ack 1501");
        r.gets_nothing();
        assert_eq!(flow(&w, |f| f.held_bytes()), 500, "{text}");
    }
    // Behind R's FIN.
    let (_, r, g) = warm();
    r.sends("F. 1001:2001");
    g.sends("ack 2002");
    r.gets_last("ack 2002");
    assert_eq!(r.is_forged("U. 2001:2003 urg 1"), Verdict::Drop(DropReason::OutOfWindow));
    r.gets("ack 2002");
}

#[test]
fn snoop_11_a_duplicate_of_what_is_held_out_of_order_is_said_before_its_block() {
    let (_, r, _) = warm();
    r.sends("3001:6001 gso 1000");
    r.gets("ack 1001 <sack 3001:6001>");
    r.sends("8001:9001");
    r.gets("ack 1001 <sack 8001:9001 3001:6001>");
    // RFC 2883 section 4: the duplicate, then the block that it is in.
    r.sends("4001:5001");
    r.gets("ack 1001 <sack 4001:5001 3001:6001 8001:9001>");
    r.sends("8001:9001");
    r.gets("ack 1001 <sack 8001:9001 8001:9001 3001:6001>");
    // Once only, and of a segment that is new in part what is old in it.
    r.sends("10001:11001");
    r.gets("ack 1001 <sack 10001:11001 8001:9001 3001:6001>");
    r.sends("5501:6501");
    r.gets("ack 1001 <sack 5501:6001 3001:6501 10001:11001>");
    r.sends("2501:3501");
    r.gets("ack 1001 <sack 3001:3501 2501:6501 10001:11001>");
    // Two runs of it: the first.
    r.sends("6001:9001 gso 1000");
    r.gets("ack 1001 <sack 6001:6501 2501:9001 10001:11001>");
    // It fills the gap, and brings back some of what was there.
    r.sends("1001:3001 gso 1000");
    r.gets("ack 9001 <sack 2501:3001 10001:11001>");
}

#[test]
fn snoop_11_no_duplicate_is_reported_where_sack_was_not_agreed_on() {
    let (_, r, _) = Setup { sack: [true, false], ..Setup::new() }.small().established();
    for _ in 0..2 {
        r.sends("1001:2001");
        r.gets("ack 1");
    }
}

#[test]
fn snoop_14_a_fin_behind_bytes_that_are_there_already_is_not_forgotten() {
    // Repeated with the FIN in it; where all of it is held, and where G has it.
    for acked in [false, true] {
        let (_, r, g) = warm();
        r.sends("1001:2001");
        g.gets("1001:2001");
        if acked {
            g.sends("ack 2001");
        }
        r.takes_all();
        r.sends("F. 1001:2001");
        r.takes_all();
        g.gets_all(&["F. 2001:2001"]);
        g.sends("ack 2002");
        r.gets_last("ack 2002");
    }
    // And out of order.
    let (_, r, g) = warm();
    r.sends("2001:3001");
    r.sends("F. 2001:3001");
    r.gets_last("ack 1001 <sack 2001:3001 2001:3001>");
    r.sends("1001:2001");
    g.gets_all(&["F. 1001:3001"]);
}

#[test]
fn snoop_19_congestion_experienced_out_of_order_is_told_at_once() {
    let (_, r, g) = Setup { ecn: true, ..Setup::new() }.small().established();
    warms_up(&r, &g);
    r.sends("2001:3001 ce");
    r.gets("E. ack 1001 <sack 2001:3001>");
    r.sends("1001:2001 ect0");
    r.gets("E. ack 3001");
    assert!(g.takes_all().iter().all(|s| s.packet.tcp().expect("TCP").0.tos & 3 != 3));
    r.sends("W. 3001:4001 ect0");
    r.gets("ack 4001");
}

#[test]
fn snoop_08_a_window_that_the_field_can_say_exactly_is_said_exactly() {
    let (w, r, _) = warm();
    let buffer = flow(&w, |f| f.stats().buffer_bytes);
    assert_eq!(buffer % 128, 0, "whole units of the window field");
    for n in 2..6 {
        r.sends(&format!("{n}001:{n}501"));
        assert_eq!(r.gets_last_any().window(), buffer);
    }
}

/// The monitor compares what is in the store with what R sent.
#[test]
fn snoop_10_a_super_segment_fills_the_gaps_around_what_is_held() {
    let (_, r, g) = warm();
    r.sends("4001:5001");
    r.sends("7001:8001");
    r.sends("2001:9001 gso 1000");
    r.sends("501:2501 gso 1000");
    r.gets_last("ack 9001 <sack 501:1001>");
    let stream: Vec<u8> = g.takes_all().iter().flat_map(|s| s.payload().to_vec()).collect();
    assert!(stream == pattern_bytes(0, 1001, 8000));
}

#[test]
fn snoop_17_a_syn_on_a_flow_that_owes_nothing_is_gs_to_answer() {
    let (w, r, g) = warm();
    let syn = r.frame_of("S 777");
    for _ in 0..3 {
        assert_eq!(from_uplink(&w, &syn), Verdict::Forward(GUEST));
        assert_eq!(g.gets("S 777").bytes, syn);
        r.gets_nothing();
        // G knows the connection: its challenge ACK leaves, made by H.
        g.sends("1 ack 1001");
        r.gets("1 ack 1001");
        r.gets_nothing();
    }
    assert_eq!(w.state(), Some(State::On));
    r.sends("1001:2001 ack 1");
    r.gets("1 ack 2001");
    g.gets("1001:2001 ack 1");
    // It owes something now.
    w.after_ms(1000);
    r.takes_all();
    g.takes_all();
    assert_eq!(from_uplink(&w, &syn), Verdict::Drop(DropReason::SynOnLiveFlow));
    r.gets("1 ack 2001");
    g.gets_nothing();
}

#[test]
fn snoop_17_a_remote_that_began_anew_comes_through() {
    for guest_knows in [true, false] {
        let (w, r, g) = warm();
        let again = Setup { isn: [777, 888_000], ..Setup::new() };
        let (r2, g2) = w.pair(&again);
        r2.end(|end| end.tcp_port = 40_000);
        (0..2).for_each(|conn| w.set_lenient(conn, true)); // it takes the old one's for its own
        r2.sends_syn();
        if guest_knows {
            g.sends("1 ack 1001");
            assert_eq!(r2.takes_all().len(), 1, "the challenge ACK");
            r.is_forged("R 1001");
            assert_eq!(w.state(), Some(State::Abort));
            r2.sends_syn();
        }
        g2.takes_all();
        g2.sends_syn_ack();
        r2.gets_last_any();
        r2.sends("1 ack 1");
        assert_eq!(w.flow(1, |f| f.state()), Some(State::On), "{guest_knows}");
        r2.sends("1:1001 ack 1");
        r2.gets("1 ack 1001");
        g2.gets_last("1:1001 ack 1");
    }
}

#[test]
fn com_24_syn_copies_that_disagree_after_gs_answer_are_ambiguous() {
    let plain = Setup::new().small();
    let changed = |f: fn(&mut Setup)| {
        let mut setup = plain.clone();
        f(&mut setup);
        setup
    };
    let cases = [
        ("S", "S", plain.clone(), true),
        ("S", "S", changed(|s| s.scale[0] = Some(2)), false),
        ("S", "S", changed(|s| s.scale[0] = None), false),
        ("S", "S", changed(|s| s.sack[0] = false), false),
        ("S", "S", changed(|s| s.ts[0] = false), false),
        ("S", "S", changed(|s| s.syn_options[0] = "fd04aabb"), false),
        // Another connection's: G will answer it by itself.
        ("S", "S 5", changed(|s| s.scale[0] = Some(2)), true),
        // ECN may be left out, where it was not accepted.
        ("SEW", "S", plain.clone(), true),
    ];
    for (n, (first, second, copy, on)) in cases.iter().enumerate() {
        let w = plain.opens();
        let (r, g) = w.pair(&plain);
        r.sends_syn_spec(first, &plain);
        g.gets_syn();
        g.sends_syn_ack();
        r.gets_syn();
        let next = r.end(|end| end.next);
        r.sends_syn_spec(second, copy);
        g.gets_syn();
        r.end(|end| end.next = next);
        r.sends("1 ack 1");
        let state = if *on { State::On } else { State::Pass };
        assert_eq!(w.state(), Some(state), "case {n}");
    }
    // Accepted in the SYN-ACK, it is ambiguous.
    let w = plain.opens();
    let (r, g) = w.pair(&plain);
    r.sends_syn_spec("SEW", &plain);
    g.sends_syn_spec("SE. ack 1", &plain);
    r.sends_syn_spec("S", &plain);
    r.end(|end| end.next = 1);
    r.sends("1 ack 1");
    assert_eq!(flow(&w, |f| f.state()), State::Pass);
}

#[test]
fn life_06_connections_that_were_drained_and_owe_nothing_are_left_alone() {
    for removed in [true, false] {
        let (w, r, g) = warm();
        let (r2, g2) = w.connects();
        warms_up(&r2, &g2);
        g.stops(0);
        r2.sends("1001:2001");
        r2.gets_last("ack 2001");
        w.engine(|e, now| e.drain(now, GUEST));
        // H has shown more than G: nothing is owed, but they are not out of the path.
        assert_eq!(w.flow(0, |f| (f.state(), f.owes_nothing())), Some((State::Drain, true)));
        if removed {
            w.guest_is_destroyed();
            assert_eq!(w.0.borrow().engine.flows().count(), 0);
        } else {
            w.happens(Event::Destroyed(0));
            w.engine(|e, now| e.handle_guest_gone(now, GUEST));
            w.after_ms(2000);
            assert_eq!(w.flow(0, |f| f.state()), Some(State::Pass));
        }
        r.gets_nothing();
        r2.gets("R. 1 ack 2001"); // what could not be drained is reset
        let held = w.engine(|e, _| e.arena().pages_total() - e.arena().free_pages());
        assert_eq!(held, 0);
    }
}

/// R may still send into the window that H has shown, and G has not.
#[test]
fn life_06_a_flow_that_only_g_has_closed_stays_in_the_path() {
    let (w, r, g) = warm();
    g.sends("F. 1:1 ack 1001");
    r.sends("1001 ack 2");
    w.engine(|e, now| e.drain(now, GUEST));
    assert_eq!(w.flow(0, |f| (f.state(), f.owes_nothing())), Some((State::Drain, true)));
}

#[test]
fn life_05_connections_of_a_guest_that_was_not_drained_are_reset() {
    let (w, r, _) = warm();
    w.guest_is_destroyed();
    r.gets("R. 1 ack 1001");
}

#[test]
fn snoop_32_a_refusal_is_remembered_for_an_hour() {
    let (w, r, g) = warm();
    r.sends("1001:2001");
    w.set_lenient(0, true); // the promise will be broken
    while w.state() != Some(State::Abort) {
        w.after_ms(1000);
        g.takes_all();
    }
    assert_eq!(flow(&w, |f| f.why()), Why::GuestRefuses);
    let aborted = w.engine(|e, _| e.vm(GUEST).map(|vm| vm.counters.flows_aborted));
    assert_eq!(aborted, Some(1));
    for (n, (ms, state)) in
        [(0, State::Pass), (3_500_000, State::Pass), (200_000, State::On)].into_iter().enumerate()
    {
        w.after_ms(ms);
        let again = Setup { isn: [500, 600], ..Setup::new() };
        let (r2, g2) = w.pair(&again);
        r2.end(|end| end.tcp_port = 40_100 + n as u16);
        w.handshake(&r2, &g2);
        assert_eq!(w.flow(n + 1, |f| f.state()), Some(state));
    }
}

/// Its neighbour discovery may come from there, so the switch lets it speak.
#[test]
fn com_11_no_flow_for_an_address_that_is_not_the_guests() {
    let setup = Setup { v6: true, guest_is_client: true, ..Setup::new() };
    for host in [0xfe80_u16, 0x2001] {
        let w = setup.opens();
        let (_, g) = w.pair(&setup);
        let mut ip = g.end(|end| end.ip.0);
        ip[..2].copy_from_slice(&host.to_be_bytes());
        g.end(|end| end.ip = IpAddr16(ip));
        g.sends_syn();
        let own = host == 0x2001;
        assert_eq!(w.0.borrow().engine.flows().count(), usize::from(own), "{host:x}");
    }
}
