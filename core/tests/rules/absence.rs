//! The daemon was away, and frames have passed it by (LIFE-17).
//!
//! The judges saw none of them, so they are lenient from then on.

use crate::common::{Peer, Setup, World};
use crate::{GUEST, flow, warms_up};
use nightporter_core::engine::Restarted;
use nightporter_core::flow::key::FlowKey;
use nightporter_core::limits::T_LEFT;
use nightporter_core::tcp::Passed;
use nightporter_core::tcp::flow::{State, Why};
use nightporter_core::time::Duration;
use zerocopy::IntoBytes;

fn wire() -> Setup {
    Setup { wire: true, ..Setup::new() }
}

/// The daemon is back, and finds that this has passed.
fn returns(w: &World<'_>, passed: Passed) {
    w.set_lenient(0, true);
    w.engine(|engine, now| engine.handle_passed_plain(now, GUEST, |_| passed));
    w.engine(|engine, _| engine.handle_caught_up(GUEST));
}

/// Of a connection that was acknowledged 1,000 bytes which G may not have; G is asked.
fn asks(setup: &Setup, passed: Passed) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    g.stops(0);
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    returns(&w, passed);
    g.runs();
    g.gets("1000 ack 1");
    (w, r, g)
}

fn is_reset(w: &World<'_>) {
    flow(w, |f| assert_eq!((f.state(), f.why()), (State::Abort, Why::PassedPlain)));
}

fn has_left(w: &World<'_>) {
    flow(w, |f| assert_eq!((f.state(), f.why()), (State::Pass, Why::PassedPlain)));
}

#[test]
fn life_17_a_flow_of_which_nothing_has_passed_plain_goes_on_as_if_nothing_had_been() {
    let (w, r, g) = wire().established();
    warms_up(&r, &g);
    g.stops(0);
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    let passed = |key: &FlowKey| match key.g_port {
        0 => Passed::Segments,
        _ => Passed::Nothing,
    };
    w.engine(|engine, now| engine.handle_passed_plain(now, GUEST, passed));
    r.sends("2001:3001");
    r.gets("1 ack 3001");
    g.runs();
    g.gets("1001:3001");
    g.sends("ack 3001");
    r.gets_nothing();
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn life_17_a_flow_that_owes_nothing_leaves_the_path() {
    for passed in [Passed::Segments, Passed::Anything] {
        let (w, r, g) = wire().established();
        warms_up(&r, &g);
        returns(&w, passed); // G's own window is smaller than the one that R was shown
        has_left(&w);
        r.takes_all();
        r.sends("5001:6001"); // those between passed plain
        g.gets("5001:6001");
        has_left(&w);
        g.sends("ack 6001");
        r.gets("ack 6001");
        r.gets_nothing();
    }
}

/// A connection of which nothing was owed when the daemon came back. 1001:5001 passed plain.
fn passes() -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = wire().established();
    warms_up(&r, &g);
    returns(&w, Passed::Segments);
    r.takes_all();
    (w, r, g)
}

fn is_early(w: &World<'_>) {
    flow(w, |f| assert!(f.state() == State::On && !f.acknowledges_late(), "{:?}", f.state()));
}

#[test]
fn com_28_after_an_absence_a_flow_comes_back_by_one_segment_of_each_end() {
    let (w, r, g) = passes();
    r.sends("5001:6001 <ts 20 0>");
    g.gets("5001:6001 <ts 20 0>");
    g.sends("1:501 ack 6001 <ts 30 20>");
    r.gets("1:501 ack 6001 <ts 30 20>");
    is_early(&w);
    g.stops(0);
    r.sends("6001:7001 ack 501 <ts 40 30>");
    r.gets("501 ack 7001 <ts 30 40>");
    g.runs();
    g.gets("6001:7001 ack 501 <ts 40 30>");
    g.sends("501 ack 7001 <ts 50 40>");
    r.gets_nothing();
}

#[test]
fn com_28_bytes_without_a_copy_come_first_and_r_hears_nothing_of_others() {
    for repeats in [false, true] {
        let (w, r, g) = passes();
        r.sends("5001:6001");
        g.gets("5001:6001");
        g.sends("1 ack 3001");
        r.gets("1 ack 3001");
        assert_eq!(w.state(), Some(State::Drain));
        r.sends("6001:7001");
        g.gets_nothing();
        r.gets_nothing();
        g.sends("1 ack 3501");
        r.gets_last("1 ack 3501"); // without a block
        if repeats {
            r.sends("3501:4001"); // G has lost them, and has the others
            r.gets_nothing();
            g.gets("3501:4001");
        }
        g.sends("1 ack 6001");
        g.gets("6001:7001");
        r.gets_last("1 ack 7001");
        is_early(&w);
        g.sends("1 ack 7001");
        r.gets_nothing();
    }
}

/// R's segments that are beyond the edge that H knows reach G, too: they are waited for.
#[test]
fn com_28_bytes_beyond_the_edge_that_r_was_shown_are_seen_to_pass() {
    let (w, r, g) = passes();
    let edge = 1001 + flow(&w, |f| f.stats().edge_to_net - f.stats().guest_una);
    r.sends("5001:6001");
    r.sends(&format!("{edge}:{}", edge + 1000));
    g.takes_all();
    g.sends("1 ack 6001");
    r.takes_all();
    has_left(&w);
    g.sends(&format!("1 ack {}", edge + 1000));
    is_early(&w);
}

/// The number of R's ACK counts its FIN, which was lost on its way.
#[test]
fn com_28_a_fin_that_nobody_has_seen_is_taken_when_it_comes_again() {
    let (w, r, g) = passes();
    r.sends("5002 ack 1");
    g.takes_all();
    g.sends("1:101 ack 5001");
    r.takes_all();
    r.sends("F. 5001:5001 ack 101");
    g.gets_last("F. 5001:5001 ack 101");
    g.sends("101 ack 5002");
    r.gets_last("101 ack 5002");
    assert!(matches!(w.state(), Some(State::On | State::Drain)));
}

/// G acknowledges bytes that H did not see, after the flow has given its place back.
#[test]
fn com_28_a_flow_that_was_parked_on_its_way_back_still_believes_its_guest() {
    let (w, r, g) = passes();
    r.sends("1001:2001"); // lost when it passed plain; what is behind it has reached G
    g.takes_all();
    g.sends("1 ack 1001");
    r.takes_all();
    w.after_ms(5000);
    g.sends("1 ack 5001");
    r.gets_last("1 ack 5001");
    r.sends("5001:6001");
    g.gets_last("5001:6001");
}

/// SNOOP-19: a mark that passed is echoed by the host from then on.
#[test]
fn com_28_marks_that_passed_are_echoed() {
    let setup = Setup { ecn: true, ..wire() };
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    returns(&w, Passed::Segments);
    r.takes_all();
    r.sends("5001:6001 ce");
    g.takes_all();
    g.sends("1 ack 6001");
    r.takes_all();
    is_early(&w);
    r.sends("6001:7001");
    r.gets_last("E. 1 ack 7001");
}

#[test]
fn com_28_bytes_that_nobody_saw_are_believed_to_be_the_guests() {
    let (w, r, g) = passes();
    r.sends("5001:6001");
    g.gets("5001:6001");
    g.sends("1 ack 6001");
    r.gets("1 ack 6001");
    g.sends("1 ack 9001"); // 6001:9001 passed plain before the others
    r.gets("1 ack 9001");
    r.sends("9001:10001");
    r.gets("1 ack 10001");
    g.gets("9001:10001");
    is_early(&w);
}

#[test]
fn com_28_segments_from_before_the_absence_show_nothing() {
    let (w, r, g) = wire().established();
    warms_up(&r, &g);
    w.set_lenient(0, true);
    w.engine(|engine, now| engine.handle_passed_plain(now, GUEST, |_| Passed::Segments));
    r.sends("1001:2001");
    g.sends("1 ack 1001");
    has_left(&w);
    w.engine(|engine, _| engine.handle_caught_up(GUEST));
    r.sends("8001:9001");
    returns(&w, Passed::Segments); // and what was heard is forgotten
    g.sends("1 ack 9001");
    has_left(&w);
    r.sends("9001:9501");
    assert_eq!(w.state(), Some(State::Drain));
}

#[test]
fn com_28_a_flow_whose_numbers_may_be_anothers_or_that_ends_stays_away() {
    let both = |r: &Peer<'_>, g: &Peer<'_>| {
        r.sends("5001:6001");
        g.sends("1 ack 6001");
    };
    for end in ["F. 5001:6001", "R. 5001", "S 5001"] {
        let (w, r, g) = passes();
        r.sends(end);
        both(&r, &g);
        assert_eq!(w.state(), Some(State::Pass), "{end}");
    }
    let (w, r, g) = passes();
    returns(&w, Passed::Anything);
    both(&r, &g);
    has_left(&w);
    let (w, r, g) = wire().established();
    warms_up(&r, &g);
    g.sends("F. 1 ack 1001");
    r.sends("1001 ack 2");
    returns(&w, Passed::Segments);
    both(&r, &g);
    has_left(&w);
    // Nor does one whose numbers cannot be, whose clocks are missing, or that nobody wants.
    for (of_r, of_g) in [
        ("5001:6001", "1 ack -5000"),
        ("5001:6001 ack 2000000001", "1 ack 6001"),
        ("1900000001:1900000101", "1 ack 6001"),
        ("500001:501001", "1 ack 6001"), // G has shown no such room
        ("5001:6001 <nots>", "1 ack 6001"),
        ("5001:6001", "1 ack 6001 <nots>"),
    ] {
        let (w, r, g) = passes();
        r.sends(of_r);
        g.sends(of_g);
        has_left(&w);
    }
    let (w, r, g) = passes();
    w.engine(|engine, now| engine.drain(now, GUEST));
    both(&r, &g);
    has_left(&w);
}

#[test]
fn life_17_bytes_that_r_was_not_told_of_are_not_owed() {
    let (w, r, g) = wire().established();
    warms_up(&r, &g);
    w.engine(|engine, now| engine.set_late(now, GUEST, true));
    g.stops(0);
    r.sends("1001:2001");
    returns(&w, Passed::Segments);
    has_left(&w);
    g.runs();
    r.sends("1001:2001");
    g.gets("1001:2001");
    g.sends("ack 2001");
    r.gets("ack 2001");
}

#[test]
fn life_17_a_guest_that_lacks_promised_bytes_is_asked_and_gets_them() {
    for passed in [Passed::Segments, Passed::Anything] {
        let (w, r, g) = asks(&wire(), passed);
        // Meanwhile R's bytes are not taken, and R hears nothing.
        r.sends("2001:3001");
        r.gets_nothing();
        if passed == Passed::Anything {
            g.gets("1000 ack 1"); // R has spoken, too
        }
        g.gets_nothing();
        g.sends("1 ack 1001");
        g.gets("1001:2001");
        r.sends("2001:3001");
        r.takes_all();
        g.gets("2001:3001");
        g.sends("ack 3001");
        r.gets_nothing();
        flow(&w, |f| assert!(f.state() == State::On && !f.acknowledges_late()));
    }
}

#[test]
fn life_17_a_segment_from_before_the_absence_is_no_answer() {
    let (w, r, g) = wire().established();
    warms_up(&r, &g);
    g.stops(0);
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    w.set_lenient(0, true);
    w.engine(|engine, now| engine.handle_passed_plain(now, GUEST, |_| Passed::Anything));
    g.runs();
    g.gets("1000 ack 1");
    g.sends("1 ack 1001"); // it waited in the daemon's tap
    r.sends("2001 ack 1");
    g.gets_nothing();
    w.engine(|engine, _| engine.handle_caught_up(GUEST));
    g.sends("1 ack 1001");
    g.gets("1001:2001");
}

#[test]
fn life_17_a_silent_guest_is_asked_again() {
    let (w, _r, g) = asks(&wire(), Passed::Segments);
    w.after_ms(201);
    g.gets("1000 ack 1");
    w.after_ms(401);
    g.gets("1000 ack 1");
    g.sends("1 ack 1001");
    g.gets("1001:2001");
}

#[test]
fn life_17_a_guest_that_has_all_is_left_alone() {
    // By H, although its ACKs passed plain; and by R, since.
    for answer in ["1 ack 2001", "1 ack 900001 <ts 5 7>"] {
        for passed in [Passed::Segments, Passed::Anything] {
            let (w, r, g) = asks(&wire(), passed);
            g.sends(answer);
            r.gets(answer);
            has_left(&w);
            r.sends("900001:901001 ack 1");
            g.gets("900001:901001 ack 1");
            r.gets_nothing();
        }
    }
}

#[test]
fn life_17_an_answer_that_cannot_be_the_connections_resets_both_sides() {
    let broken = [
        (Passed::Segments, "1 ack 2001 <ts 5 4294967289>", false),
        (Passed::Segments, "1 ack 900001 <ts 5 4294967289>", true), // R has not sent that before
        (Passed::Anything, "1 ack 1501 <ts 5 7>", true),            // R's clock cannot have moved
        (Passed::Anything, "1 ack -5000 <ts 5 7>", true),
        (Passed::Segments, "1 ack 1501 <ts 5 7>", false), // H's ACK was lost, and R repeats
    ];
    for (passed, answer, is_broken) in broken {
        let (w, r, g) = asks(&wire(), passed);
        g.sends(answer);
        if is_broken {
            r.gets("R. 1 ack 2001");
            g.gets_last("R.");
            is_reset(&w);
        } else {
            assert_ne!(w.state(), Some(State::Abort), "{answer}");
        }
    }
}

#[test]
fn life_17_an_answer_from_before_the_absence_is_none() {
    let (w, r, g) = asks(&wire(), Passed::Segments);
    g.sends("1 ack 501");
    g.gets_nothing();
    r.gets_nothing();
    g.sends("1 ack 1001");
    g.gets("1001:2001");
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn life_17_without_timestamps_numbers_alone_have_to_do() {
    let setup = Setup { ts: [false; 2], ..wire() };
    let (w, _r, g) = asks(&setup, Passed::Segments);
    g.sends("1 ack 1001");
    g.gets("1001:2001");
    assert_eq!(w.state(), Some(State::On));
    let (w, _r, g) = asks(&setup, Passed::Segments);
    g.sends("1 ack 9000001"); // R has sent all that by itself
    has_left(&w);
    let (w, r, g) = asks(&setup, Passed::Segments);
    g.sends("1 ack 1500000001");
    r.gets("R. 1 ack 2001");
    is_reset(&w);
    // And where they do not, both sides are reset at once.
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    g.stops(0);
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    returns(&w, Passed::Anything);
    g.runs();
    r.gets("R. 1 ack 2001");
    g.gets_last("R.");
    is_reset(&w);
}

#[test]
fn life_17_r_is_asked_if_the_guest_has_sent_more_than_its_window() {
    for passed in [Passed::Segments, Passed::Anything] {
        let (w, r, g) = asks(&wire(), passed);
        g.sends("1000001 ack 1001");
        g.gets_nothing();
        r.gets("0 ack 2001");
        r.sends("3001 ack 1000001"); // it has sent data that G could not take
        g.gets("1000 ack 1000001");
        g.sends("1000001 ack 1001");
        g.gets("1001:2001 ack 1000001");
        g.sends("1000001:1000101 ack 2001");
        r.gets_last("1000001:1000101 ack 2001");
        r.sends("2001:3001 ack 1000101");
        r.gets("1000101 ack 3001");
        assert_eq!(w.state(), Some(State::On));
    }
}

#[test]
fn life_17_a_segment_that_is_not_understood_explains_no_other() {
    let (_w, r, g) = asks(&wire(), Passed::Segments);
    for answer in ["1000001:1000101 ack 1001", "1000101 ack 1001"] {
        g.sends(answer);
        g.gets_nothing();
    }
    r.gets("0 ack 2001"); // and none of G's bytes, which G repeats
    r.gets_nothing();
}

#[test]
fn inv_21_an_r_that_is_further_than_h_knows_gets_an_exact_reset() {
    let (w, r, g) = asks(&wire(), Passed::Segments);
    g.sends("1 ack -5000 <ts 5 7>");
    is_reset(&w);
    r.gets("R. 1 ack 2001");
    r.gets("0 ack 2001");
    r.sends("2001 ack 5001"); // 1:5001 passed plain
    r.gets("R. 5001 ack 2001");
}

#[test]
fn life_17_a_stranger_moves_no_acknowledgement() {
    let (_w, r, g) = asks(&wire(), Passed::Segments);
    for forged in ["900001 ack 50001", "3001 ack 50001 <ts 4294958296 0>", "2001 ack -50001"] {
        r.sends(forged);
        g.gets_nothing();
    }
    g.sends("1 ack 1001");
    g.gets("1001:2001 ack 1");
}

#[test]
fn life_17_bytes_of_r_that_passed_plain_are_acknowledged_behind_the_ones_that_were_owed() {
    let (w, r, g) = asks(&wire(), Passed::Segments);
    g.sends("1 ack 1001 <sack 2001:4001>");
    g.gets("1001:2001");
    g.sends("1 ack 4001");
    r.gets_last("1 ack 4001");
    r.sends("4001:5001");
    r.gets("1 ack 5001");
    g.gets("4001:5001");
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn life_17_data_of_the_guest_passed_plain_and_r_acknowledges_it() {
    let (w, r, g) = asks(&wire(), Passed::Segments);
    g.sends("5001 ack 1001"); // 1:5001 passed plain
    g.gets("1001:2001 ack 1");
    g.sends("ack 2001");
    r.takes_all();
    r.sends("2001 ack 5001");
    g.gets("2001 ack 5001");
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn life_17_a_guest_that_knows_no_connection_resets_r() {
    let (w, r, g) = asks(&wire(), Passed::Anything);
    g.sends("R 1");
    r.gets("R. 1 ack 2001");
    assert_eq!(w.state(), Some(State::Abort));
}

#[test]
fn life_17_a_fin_of_r_that_passed_plain_ends_no_byte_too_early() {
    let (w, r, g) = asks(&wire(), Passed::Segments);
    g.sends("1 ack 1001");
    g.gets("1001:2001");
    g.sends("1 ack 2002"); // and the FIN behind them
    r.gets_last("1 ack 2002");
    g.sends("F. 1 ack 2002");
    r.gets("F. 1 ack 2002");
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn life_17_a_second_absence_asks_again() {
    let (w, _r, g) = asks(&wire(), Passed::Segments);
    returns(&w, Passed::Anything);
    g.gets("1000 ack 1");
    g.sends("1 ack 1001");
    g.gets("1001:2001");
    returns(&w, Passed::Segments);
    g.gets("1000 ack 1");
    g.sends("1 ack 2001");
    has_left(&w);
}

#[test]
fn life_17_a_handshake_that_frames_have_passed_by_is_followed_no_further() {
    let w = wire().opens();
    let (r, g) = w.pair(&wire());
    r.sends_syn();
    g.gets_syn();
    g.sends_syn_ack();
    r.gets_syn();
    returns(&w, Passed::Segments);
    r.sends("ack 1");
    g.gets("ack 1");
    assert_eq!(w.state(), Some(State::Pass));
    // Nor one of which only the SYN was seen.
    let w = wire().opens();
    let (r, g) = w.pair(&wire());
    r.sends_syn();
    g.gets_syn();
    returns(&w, Passed::Segments);
    g.sends_syn_ack();
    r.gets_syn();
    r.sends("ack 1");
    g.gets("ack 1");
    assert_eq!(w.state(), None);
}

/// The same after a kill.
fn killed(
    setup: &Setup,
    before: impl FnOnce(&Peer<'_>),
) -> (World<'static>, Peer<'static>, Peer<'static>, Restarted) {
    killed_for(setup, Duration::ZERO, before)
}

/// The same; the next one comes so much later.
fn killed_for(
    setup: &Setup,
    away: Duration,
    before: impl FnOnce(&Peer<'_>),
) -> (World<'static>, Peer<'static>, Peer<'static>, Restarted) {
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    {
        let w = setup.opens_in(memory.as_mut_bytes());
        let (r, g) = w.connects();
        warms_up(&r, &g);
        g.stops(0);
        before(&r);
    }
    let later = Setup { start: setup.start + away, ..setup.clone() };
    let w = later.reopens_in(memory.leak().as_mut_bytes());
    let (r, g) = w.pair(setup);
    w.set_lenient(0, true);
    let restarted = w.engine(|e, now| e.handle_restart(now));
    (w, r, g, restarted)
}

#[test]
fn life_17_after_a_kill_a_guest_that_lacks_promised_bytes_is_asked_and_gets_them() {
    let (w, r, g, restarted) = killed(&wire(), |r| {
        r.sends("1001:2001");
        r.gets("1 ack 2001");
    });
    assert_eq!(restarted, Restarted { resumed: 1, reset: 0 });
    g.gets("1000 ack 1");
    r.gets_nothing();
    g.sends("1 ack 1001");
    g.gets("1001:2001");
    g.sends("1 ack 2001");
    r.takes_all();
    r.sends("2001:3001 ack 1");
    r.gets("1 ack 3001");
    g.gets("2001:3001");
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn life_17_after_a_kill_what_is_owed_waits_for_a_wire_that_is_not_there() {
    let soon = Duration::from_secs(5);
    for (ts, comes_after, resumed, reset) in
        [([true; 2], soon, 1, 0), ([false; 2], soon, 0, 1), ([true; 2], T_LEFT, 0, 0)]
    {
        let setup = Setup { ts, ..wire() };
        let mut memory = vec![0_u64; setup.memory_len() / 8];
        {
            let w = setup.opens_in(memory.as_mut_bytes());
            let (r, g) = w.connects();
            warms_up(&r, &g);
            g.stops(0);
            r.sends("1001:2001");
            r.gets("1 ack 2001");
        }
        let w = setup.reopens_in(memory.as_mut_bytes());
        let records = w.engine(|e, _| e.arena().free_records());
        w.set_features(GUEST, None);
        let (r, g) = w.pair(&setup);
        w.set_lenient(0, true);
        assert_eq!(w.engine(|e, now| e.handle_restart(now)), Restarted::default());
        assert_eq!(w.engine(|e, _| e.left()), 1);
        w.until(w.now() + comes_after);
        r.gets_nothing();
        w.set_features(GUEST, Some(setup.features));
        let restarted = w.engine(|e, now| e.handle_wire(now, GUEST));
        assert_eq!(restarted, Restarted { resumed, reset });
        assert_eq!(w.engine(|e, _| e.left()), 0);
        if resumed > 0 {
            g.gets("1000 ack 1");
            g.sends("1 ack 1001");
            g.gets("1001:2001");
            g.sends("1 ack 2001");
            r.takes_all();
            assert_eq!(w.state(), Some(State::On));
        } else if reset > 0 {
            r.gets("R. 1 ack 2001");
            g.gets("R.");
        } else {
            r.gets_nothing();
            g.gets_nothing();
            assert_eq!(w.engine(|e, _| e.arena().free_records()), records + 1);
        }
    }
}

#[test]
fn life_17_after_a_kill_a_guest_that_has_all_or_cannot_say_so_by_its_clock() {
    let owes = |r: &Peer<'_>| {
        r.sends("1001:2001");
        r.gets("1 ack 2001");
    };
    for (answer, state) in [
        ("1 ack 2001", State::Pass),
        ("1 ack 500001 <ts 5 7>", State::Pass),
        ("1 ack 1501 <ts 5 7>", State::Abort),
        ("1 ack -9000 <ts 5 7>", State::Abort),
    ] {
        let (w, _r, g, restarted) = killed(&wire(), owes);
        assert_eq!(restarted.resumed, 1);
        g.gets("1000 ack 1");
        g.sends(answer);
        assert_eq!(w.state(), Some(state), "{answer}");
    }
    // Without timestamps nobody can tell, nor by a clock that may have gone half way round; and
    // without debts nobody asks.
    let month = Duration::from_secs(30 * 86_400);
    for (ts, away) in [([false; 2], Duration::ZERO), ([true; 2], month)] {
        let (w, r, g, restarted) = killed_for(&Setup { ts, ..wire() }, away, owes);
        assert_eq!(restarted, Restarted { resumed: 0, reset: 1 });
        r.gets("R. 1 ack 2001");
        r.gets("0 ack 2001"); // whose answer says where R is
        r.sends("2001 ack 501");
        r.gets("R. 501 ack 2001");
        g.gets("R.");
        assert_eq!(w.state(), Some(State::Abort));
    }
    let (w, r, g, restarted) = killed(&wire(), |_| ());
    assert_eq!((restarted, w.state()), (Restarted::default(), None));
    r.gets_nothing();
    g.gets_nothing();
}

/// By a reader: R's word spared G the proof, and bytes of another gigabyte could have been given.
#[test]
fn life_17_after_a_kill_r_proves_nothing_of_the_guest() {
    let (w, r, g, _) = killed(&wire(), |r| {
        r.sends("1001:2001");
        r.gets("1 ack 2001");
    });
    g.gets("1000 ack 1");
    r.sends("2001 ack 1");
    g.gets("1000 ack 1");
    g.sends("1 ack 1501 <ts 5 7>");
    assert_eq!(w.state(), Some(State::Abort));
}

#[test]
fn life_17_after_a_kill_r_is_asked_if_the_guest_has_sent_anything() {
    let (w, r, g, _) = killed(&wire(), |r| {
        r.sends("1001:2001");
        r.gets("1 ack 2001");
    });
    g.gets("1000 ack 1");
    g.sends("501 ack 1001"); // how many billions of bytes these were nobody knows
    g.gets_nothing();
    r.gets("0 ack 2001");
    r.sends("2001 ack 501");
    g.gets("1000 ack 501");
    g.sends("501 ack 1001");
    g.gets("1001:2001 ack 501");
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn life_17_a_wire_that_is_plain_for_a_while_is_late_first_and_then_connections_come_back() {
    let (w, r, g) = wire().established();
    warms_up(&r, &g);
    g.stops(0);
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    w.engine(|engine, now| engine.set_late(now, GUEST, true));
    let may_be_plain = || w.engine(|engine, _| engine.is_drained(GUEST));
    assert!(!may_be_plain(), "it owes");
    r.sends("2001:3001");
    g.runs();
    g.gets("1001:3001");
    g.sends("1 ack 2001");
    assert!(may_be_plain(), "R was not told of the rest");
    returns(&w, Passed::Segments); // the wire becomes plain
    has_left(&w);
    returns(&w, Passed::Segments); // and it is turned again
    w.engine(|engine, now| engine.set_late(now, GUEST, false));
    r.takes_all();
    r.sends("5001:6001");
    g.gets("5001:6001");
    g.sends("1 ack 6001");
    r.gets("1 ack 6001");
    is_early(&w);
}
