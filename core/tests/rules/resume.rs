//! LIFE-09: after a kill flows go on in the next engine, from their records.

use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, tear, warms_up};
use nightporter_core::engine::Restarted;
use nightporter_core::tcp::flow::{State, Why};
use zerocopy::IntoBytes;

/// A connection of an engine that was killed: `before` has happened to it, and its guest's driver
/// is not there yet.
fn killed(
    setup: &Setup,
    before: impl FnOnce(&World<'_>, &Peer<'_>, &Peer<'_>),
    change: impl FnOnce(&mut [u64]),
) -> (World<'static>, Peer<'static>, Peer<'static>, Restarted) {
    killed_times(1, setup, before, change)
}

/// The same, so many times before the guest is back.
fn killed_times(
    times: usize,
    setup: &Setup,
    before: impl FnOnce(&World<'_>, &Peer<'_>, &Peer<'_>),
    change: impl FnOnce(&mut [u64]),
) -> (World<'static>, Peer<'static>, Peer<'static>, Restarted) {
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    {
        let w = setup.opens_in(memory.as_mut_bytes());
        let (r, g) = w.connects();
        warms_up(&r, &g);
        before(&w, &r, &g);
    }
    change(&mut memory);
    for _ in 1..times {
        let w = setup.reopens_in(memory.as_mut_bytes());
        w.set_features(GUEST, None);
        drop(w.pair(setup));
        w.set_lenient(0, true);
        let restarted = w.engine(|e, now| e.handle_restart(now));
        assert_eq!(restarted, Restarted { resumed: 1, reset: 0 });
    }
    let w = setup.reopens_in(memory.leak().as_mut_bytes());
    w.set_features(GUEST, None);
    let (r, g) = w.pair(setup);
    w.set_lenient(0, true);
    let restarted = w.engine(|e, now| e.handle_restart(now));
    (w, r, g, restarted)
}

/// The same with a guest that is back as it was.
fn resumed(
    setup: &Setup,
    before: impl FnOnce(&World<'_>, &Peer<'_>, &Peer<'_>),
) -> (World<'static>, Peer<'static>, Peer<'static>) {
    resumed_after(1, setup, before)
}

/// The same after so many kills, before the guest has spoken.
fn resumed_after(
    kills: usize,
    setup: &Setup,
    before: impl FnOnce(&World<'_>, &Peer<'_>, &Peer<'_>),
) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g, restarted) = killed_times(kills, setup, before, |_| ());
    assert_eq!(restarted, Restarted { resumed: 1, reset: 0 });
    r.gets_nothing();
    g.gets_nothing();
    is_back(&w, setup);
    (w, r, g)
}

/// G speaks and gets the byte range that R was promised, and then what R repeats, with its FIN.
fn takes_promised_then_fin(r: &Peer<'_>, g: &Peer<'_>) {
    g.takes_all();
    g.sends("1 ack 1001");
    g.gets_last("1001:2001");
    g.sends("1 ack 2001");
    r.takes_all();
    r.sends("F. 2001:3001 ack 1");
    g.gets_last("F. 2001:3001");
}

fn is_back(w: &World<'_>, setup: &Setup) {
    w.engine(|e, _| e.handle_guest_back(GUEST));
    w.set_features(GUEST, Some(setup.features));
}

#[test]
fn life_09_owed_bytes_are_delivered_and_nobody_is_reset() {
    let setup = Setup::new();
    let (w, r, g) = resumed(&setup, |_, r, g| {
        g.stops(0);
        r.sends("1001:2001 ack 1");
        r.gets("1 ack 2001");
    });
    // Of a G that was given none of them no room is known, so it is asked.
    g.gets("1000 ack 1");
    assert!(flow(&w, |f| f.acknowledges_late()));
    g.sends("1 ack 1001");
    g.gets_last("1001:2001");
    assert!(!flow(&w, |f| f.acknowledges_late()));
    g.sends("1 ack 2001");
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes())), (State::On, 0));
    r.takes_all();
    r.sends("2001:3001 ack 1");
    r.gets("1 ack 3001");
    g.gets_last("2001:3001");
    g.sends("1:501 ack 3001");
    r.gets_last("1:501 ack 3001");
}

#[test]
fn life_09_what_g_has_seen_is_given_to_it_again_at_once() {
    let setup = Setup::new();
    let (_, r, g) = resumed(&setup, |_, r, g| {
        r.sends("1001:2001 ack 1");
        r.gets("1 ack 2001");
        g.gets("1001:2001");
    });
    g.gets_last("1001:2001");
    g.sends("1 ack 2001");
    r.takes_all();
    r.sends("2001:3001 ack 1");
    r.gets("1 ack 3001");
}

/// LIFE-12: until G has spoken nothing is promised.
#[test]
fn life_09_a_resumed_flow_is_late_until_g_has_spoken() {
    let setup = Setup::new();
    let (_, r, g) = resumed(&setup, |_, r, g| {
        g.stops(0);
        r.sends("1001:2001 ack 1");
        r.gets("1 ack 2001");
    });
    r.sends("2001:3001 ack 1");
    r.gets_nothing();
    g.gets_last("1000 ack 1");
    g.sends("1 ack 1001");
    r.gets_last("1 ack 3001");
    g.gets_last("1001:3001");
}

#[test]
fn life_09_the_fins_of_both_sides_are_remembered() {
    let setup = Setup::new();
    let (w, r, g) = resumed(&setup, |_, r, g| {
        r.sends("F. 1001:2001 ack 1");
        r.takes_all();
        g.gets_last("F. 1001:2001");
        g.sends("1 ack 2002");
        r.gets("1 ack 2002");
        g.sends("1:301 ack 2002");
        g.sends("F. 301 ack 2002");
        r.gets("1:301");
        r.gets("F. 301 ack 2002");
    });
    g.takes_all();
    r.takes_all();
    r.sends("2002 ack 302");
    g.gets_last("ack 302");
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Closed));
}

#[test]
fn life_09_bytes_of_g_are_its_own_to_repeat() {
    let setup = Setup::new();
    let (_, r, g) = resumed(&setup, |_, r, g| {
        g.sends("1:1001 ack 1001");
        r.gets("1:1001 ack 1001");
        r.sends("1001 ack 501");
        g.gets("1001 ack 501");
    });
    g.takes_all();
    g.sends("501:1001 ack 1001");
    r.gets_last("501:1001 ack 1001");
    r.sends("1001 ack 1001");
    g.gets_last("1001 ack 1001");
}

#[test]
fn life_09_another_guest_gets_a_reset_and_so_does_the_remote() {
    let setup = Setup::new();
    let before = |_: &World<'_>, r: &Peer<'_>, g: &Peer<'_>| {
        g.stops(0);
        r.sends("1001:2001 ack 1");
    };
    let (w, r, g, restarted) = killed(&setup, before, |_| ());
    assert_eq!(restarted, Restarted { resumed: 1, reset: 0 });
    w.set_features(GUEST, Some(setup.features)); // whose rings begin anew
    r.gets("R. 1 ack 2001");
    g.gets("R.");
    assert_eq!(flow(&w, |f| f.state()), State::Abort);
    // And of a guest that does not come the remote is told.
    let (w, r, _, _) = killed(&setup, before, |_| ());
    w.after_ms(2100);
    r.gets("R. 1 ack 2001");
    // A record that says too little ends both at once.
    let (w, r, _, restarted) = killed(&setup, before, tear);
    assert_eq!(restarted, Restarted { resumed: 0, reset: 1 });
    r.gets("R. 1 ack 2001");
    assert_eq!(flow(&w, |f| f.state()), State::Abort);
}

/// Bytes that reach G past the store have no copy.
#[test]
fn life_09_a_flow_whose_record_does_not_say_all_is_reset() {
    let setup = Setup::new();
    let (_, _, _, restarted) = killed(
        &setup,
        |_, r, g| {
            r.sends("1001:2001 ack 1");
            g.gets("1001:2001");
            r.sends("R 2001"); // it waits behind them
        },
        |_| (),
    );
    assert_eq!(restarted, Restarted { resumed: 0, reset: 1 });
}

#[test]
fn life_09_a_second_kill_changes_nothing() {
    let setup = Setup::new();
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    {
        let w = setup.opens_in(memory.as_mut_bytes());
        let (r, g) = w.connects();
        warms_up(&r, &g);
        g.stops(0);
        r.sends("1001:2001 ack 1");
    }
    for is_back_before in [false, true, false] {
        let w = setup.reopens_in(memory.as_mut_bytes());
        w.set_features(GUEST, None);
        let (_, g) = w.pair(&setup);
        w.set_lenient(0, true);
        let restarted = w.engine(|e, now| e.handle_restart(now));
        assert_eq!(restarted, Restarted { resumed: 1, reset: 0 });
        if is_back_before {
            is_back(&w, &setup);
            g.takes_all();
        }
        assert_eq!(flow(&w, |f| f.held_bytes()), 1000);
    }
}

/// Late, R's FIN lies behind bytes that are not promised: the stream does not end before them.
#[test]
fn life_09_a_fin_behind_bytes_that_were_not_acknowledged_cuts_no_stream() {
    let setup = Setup::new();
    let (w, r, g) = resumed(&setup, |w, r, g| {
        g.stops(0);
        r.sends("1001:2001 ack 1");
        r.gets("1 ack 2001");
        w.engine(|e, now| e.set_late(now, GUEST, true));
        r.sends("F. 2001:3001 ack 1");
        r.gets_nothing();
    });
    takes_promised_then_fin(&r, &g);
    assert_eq!(flow(&w, |f| f.state()), State::On);
}

/// G has bytes and a FIN that R was not acknowledged, because they came late; no copy is left.
#[test]
fn life_09_g_may_acknowledge_what_it_was_given_before_two_kills() {
    let setup = Setup::new();
    let (w, r, g) = resumed_after(2, &setup, |w, r, g| {
        r.sends("1001:2001 ack 1");
        r.gets("1 ack 2001");
        g.gets("1001:2001");
        w.engine(|e, now| e.set_late(now, GUEST, true));
        r.sends("F. 2001:3001 ack 1");
        r.gets_nothing();
        g.gets("F. 2001:3001");
    });
    g.takes_all();
    g.sends("1 ack 3002");
    r.gets_last("1 ack 3002");
    g.sends("F. 1 ack 3002");
    r.gets_last("F. 1 ack 3002");
    r.sends("3002 ack 2");
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Closed));
}

/// G's answer shows H its window: R is told again what it was perhaps not told.
#[test]
fn life_09_r_hears_of_the_window_as_soon_as_g_has_spoken() {
    let setup = Setup::new();
    let (_, r, g) = resumed(&setup, |_, r, _| {
        r.sends("1001:2001 ack 1");
        r.gets("1 ack 2001");
    });
    g.gets_last("1001:2001");
    g.sends("1 ack 2001");
    r.gets("1 ack 2001");
    r.gets_nothing();
}

/// A flow that was idle has no place for R's bytes, and takes one when R sends some.
#[test]
fn life_09_an_idle_flow_goes_on() {
    let setup = Setup::new();
    let (w, r, g) = resumed_after(2, &setup, |w, r, g| {
        w.after_ms(3000);
        assert!(flow(w, |f| f.is_parked()));
        g.sends("1:501 ack 1001");
        r.gets_last("1:501 ack 1001");
        r.sends("1001 ack 501");
        g.takes_all();
    });
    assert_eq!(flow(&w, |f| (f.state(), f.is_parked(), f.held_bytes())), (State::On, true, 0));
    w.after_ms(60_000);
    r.gets_nothing();
    g.gets_nothing(); // its room is known, so it is not asked
    r.sends("1001:2001 ack 501");
    r.gets_nothing(); // until G has spoken nothing is promised
    g.gets_last("1001:2001");
    g.sends("501 ack 2001");
    r.gets_last("501 ack 2001");
    g.stops(0);
    r.sends("2001:3001 ack 501");
    r.gets_last("501 ack 3001");
    assert!(!flow(&w, |f| f.is_parked()));
}

/// A parked G is known to have room for ten segments, and perhaps for no more.
#[test]
fn life_09_an_idle_guest_is_given_no_more_than_it_has_room_for() {
    let setup = Setup::new();
    let (w, r, g) = resumed(&setup, |w, _, g| {
        g.sends("1 ack 1001");
        w.after_ms(3000);
        assert!(flow(w, |f| f.is_parked() && f.stats().edge_to_net > 21_001));
    });
    w.after_ms(5000);
    for n in 0..20 {
        r.sends(&format!("{}:{} ack 1", 1001 + 1000 * n, 2001 + 1000 * n));
    }
    r.gets_nothing();
    g.gets_last("10001:11001");
}

/// An idle flow of a guest that does not come back is forgotten, and R is told nothing.
#[test]
fn life_09_nobody_is_told_of_the_end_of_an_idle_flow() {
    let setup = Setup::new();
    let idles = |w: &World<'_>, _: &Peer<'_>, _: &Peer<'_>| w.after_ms(3000);
    let (w, r, _, restarted) = killed_times(1, &setup, idles, |_| ());
    assert_eq!(restarted, Restarted { resumed: 1, reset: 0 });
    w.after_ms(3000);
    r.gets_nothing();
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::GuestGone));
}

/// LIFE-08: a daemon that stops leaves flows that owe nothing to the next one.
#[test]
fn life_08_a_flow_that_owes_nothing_when_its_daemon_stops_goes_on() {
    for idles in [false, true] {
        let setup = Setup::new();
        let (w, r, g) = resumed(&setup, |w, r, g| {
            if idles {
                w.after_ms(3000);
            }
            w.engine(|e, now| e.drain_all(now));
            assert_eq!(flow(w, |f| (f.state(), f.is_parked())), (State::Drain, idles));
            assert!(w.engine(|e, _| e.is_drained(GUEST)));
            r.sends("1001:2001 ack 1");
            g.gets_last("1001:2001");
            r.gets_nothing(); // it is late
            g.sends("1 ack 2001");
            r.gets_last("1 ack 2001");
            assert_eq!(flow(w, |f| f.state()), State::Drain);
        });
        g.gets_last("2000 ack 1"); // nobody knows its room
        g.sends("1 ack 2001");
        w.after_ms(if idles { 3000 } else { 0 }); // R's clock begins anew in this world
        r.takes_all();
        g.stops(0);
        r.sends("2001:3001 ack 1");
        r.gets_last("1 ack 3001");
        assert_eq!(flow(&w, |f| f.state()), State::On);
    }
}

/// LIFE-08: connections that were reset do not end once more in the next process.
#[test]
fn life_08_a_daemon_that_stops_says_nothing_of_what_has_ended() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(0);
    r.sends("1001:2001 ack 1");
    g.sends("R 1 ack 1001");
    assert_eq!(flow(&w, |f| f.state()), State::Abort);
    let (_, _other) = w.connects();
    let recorded = |w: &World<'_>| w.engine(|e, _| e.recorded());
    assert_eq!(recorded(&w), 2);
    w.engine(|e, now| e.drain_all(now));
    w.engine(|e, _| e.forget_ended());
    assert_eq!(recorded(&w), 1, "of the other connection");
}

/// LIFE-08: what a drain has not brought to its end goes on in the next daemon, with the offload.
#[test]
fn life_09_a_flow_that_drained_goes_on() {
    let setup = Setup::new();
    let (w, r, g) = resumed_after(2, &setup, |w, r, g| {
        g.stops(0);
        r.sends("1001:2001 ack 1");
        r.gets("1 ack 2001");
        w.engine(|e, now| e.drain_all(now));
        r.sends("F. 2001:3001 ack 1");
        assert_eq!(flow(w, |f| f.state()), State::Drain);
    });
    takes_promised_then_fin(&r, &g);
    g.sends("1 ack 3002");
    r.gets_last("1 ack 3002");
    assert_eq!(flow(&w, |f| f.state()), State::On);
}

/// A connection whose G has sent nothing but its SYN-ACK, and that was killed: `before` has
/// happened to it, and the guest is back.
fn resumed_new(
    before: impl FnOnce(&World<'_>, &Peer<'_>, &Peer<'_>),
) -> (World<'static>, Peer<'static>, Peer<'static>, Restarted) {
    let setup = Setup::new();
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    {
        let w = setup.opens_in(memory.as_mut_bytes());
        let (r, g) = w.connects();
        before(&w, &r, &g);
    }
    let w = setup.reopens_in(memory.leak().as_mut_bytes());
    w.set_features(GUEST, None);
    let (r, g) = w.pair(&setup);
    w.set_lenient(0, true);
    let restarted = w.engine(|e, now| e.handle_restart(now));
    is_back(&w, &setup);
    (w, r, g, restarted)
}

/// COM-29: data complete the handshake of a G that has lost R's third ACK, and a probe would not.
#[test]
fn life_09_a_guest_that_has_said_no_more_than_its_syn_is_asked_by_data() {
    let (w, r, g, restarted) = resumed_new(|_, r, g| {
        g.stops(0);
        r.sends("1:3001 ack 1");
        r.gets("1 ack 3001");
    });
    assert_eq!(restarted, Restarted { resumed: 1, reset: 0 });
    g.gets_last("1:1001 ack 1");
    r.sends("3001:4001 ack 1");
    r.gets_nothing();
    g.gets_nothing();
    assert!(flow(&w, |f| f.acknowledges_late()));
    // It has lost that one, too: its accept queue was full.
    w.after_ms(300);
    g.gets_last("1:1001 ack 1");
    g.sends("1 ack 1001");
    assert!(!flow(&w, |f| f.acknowledges_late()));
    r.gets("1 ack 4001");
    g.gets_last("1001:4001 ack 1");
    g.sends("1 ack 4001");
    r.takes_all();
    r.sends("4001:5001 ack 1");
    r.gets("1 ack 5001");
    assert_eq!(flow(&w, |f| f.state()), State::On);
}

/// K-04, COM-28: a G that has seen no third ACK says its SYN-ACK again, with the same number or, by
/// a SYN cookie, with another; R refuses the second, and the flow stays.
#[test]
fn life_09_a_syn_ack_of_g_that_comes_again_passes() {
    let (w, r, g, _) = resumed_new(|_, r, g| {
        g.stops(0);
        r.sends("1:1001 ack 1");
        r.gets("1 ack 1001");
    });
    g.gets_last("1:1001 ack 1");
    // Nothing says that this G knows the connection, so it is asked at once, and by no probe.
    g.sends_syn_spec("S. 5000:5000 ack 1", &Setup::new());
    r.gets_syn();
    g.gets_last("1:1001 ack 1");
    g.sends_syn_ack();
    r.gets_syn();
    g.gets_nothing();
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes())), (State::On, 1000));
    w.after_ms(300);
    g.gets_last("1:1001 ack 1");
    g.sends("1 ack 1001");
    r.gets("1 ack 1001");
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes())), (State::On, 0));
}

/// Nothing says whether such a G has R's third ACK, and there are no data to ask it: R and G go on
/// by themselves.
#[test]
fn life_09_a_guest_that_has_said_no_more_than_its_syn_and_is_owed_nothing_is_left_alone() {
    let (w, r, g, restarted) = resumed_new(|_, _, _| ());
    assert_eq!(restarted, Restarted::default());
    r.gets_nothing();
    g.gets_nothing();
    r.sends("1:1001 ack 1");
    g.gets_last("1:1001 ack 1");
    assert!(w.flow(0, |_| ()).is_none());
}

/// The settling run between two daemons is about wires that are there.
#[test]
fn life_17_a_settling_run_leaves_flows_of_others_to_the_next_daemon() {
    for (wire, is_there) in [(false, false), (true, false), (true, true)] {
        let setup = Setup { wire, ..Setup::new() };
        let found = usize::from(is_there);
        let settle = |w: &World<'_>| w.engine(|e, now| e.handle_restart_on_wires(now));
        let mut memory = vec![0_u64; setup.memory_len() / 8];
        {
            let w = setup.opens_in(memory.as_mut_bytes());
            let (r, g) = w.connects();
            warms_up(&r, &g);
            g.stops(0);
            r.sends("1001:2001");
            r.gets("1 ack 2001");
        }
        for _ in 0..2 {
            let w = setup.reopens_in(memory.as_mut_bytes());
            if !is_there {
                w.set_features(GUEST, None);
            }
            let (r, _g) = w.pair(&setup);
            w.set_lenient(0, true);
            assert_eq!(settle(&w), Restarted { resumed: found, reset: 0 });
            assert_eq!(w.engine(|e, _| e.left()), 1 - found);
            r.gets_nothing();
        }
        let w = setup.reopens_in(memory.as_mut_bytes());
        if !wire {
            w.set_features(GUEST, None);
        }
        drop(w.pair(&setup));
        w.set_lenient(0, true);
        let restarted = w.engine(|e, now| e.handle_restart(now));
        assert_eq!(restarted, Restarted { resumed: 1, reset: 0 });
    }
}
