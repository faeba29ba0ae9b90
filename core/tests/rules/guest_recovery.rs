//! SNOOP-28 and SNOOP-29, LIFE-04: what G lost is sent again, and no more than that.

use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, sends_segments, warms_up};
use nightporter_check::event::Event;
use nightporter_core::port::PortFeatures;

/// Without offloads: a frame is a segment.
fn plain(setup: Setup) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let setup = Setup { features: PortFeatures::default(), ..setup };
    let (w, r, g) = setup.small().established();
    warms_up(&r, &g);
    (w, r, g)
}

/// G gets `count` segments from 1001 on, and none of them reaches its TCP.
fn loses_a_flight(r: &Peer<'_>, g: &Peer<'_>, count: i64) {
    sends_segments(r, 1001, count);
    r.takes_all();
    assert_eq!(g.takes_all().len() as i64, count);
}

/// The ranges of the data segments that came.
fn ranges(g: &Peer<'_>) -> Vec<(u32, u32)> {
    g.takes_all().iter().filter(|s| !s.payload().is_empty()).map(|s| s.range()).collect()
}

/// The segments from `from` to `to`.
fn segments(from: u32, to: u32) -> Vec<(u32, u32)> {
    (from..to).step_by(1000).map(|at| (at, at + 1000)).collect()
}

#[test]
fn snoop_29_a_local_timeout_repeats_the_first_segment_and_what_follows_in_doubling_steps() {
    let (w, r, g) = plain(Setup::new());
    loses_a_flight(&r, &g, 60);
    w.after_ms(249);
    g.gets_nothing();
    w.after_ms(1);
    assert_eq!(ranges(&g), segments(1001, 2001));
    let (mut acked, mut steps) = (2001, Vec::new());
    while acked < 61_001 {
        g.sends(&format!("ack {acked}"));
        let step = ranges(&g);
        assert_eq!(step, segments(acked, acked + 1000 * step.len() as u32), "{}", w.trace());
        steps.push(step.len());
        acked += 1000 * step.len() as u32;
    }
    assert_eq!(steps, [2, 4, 8, 16, 29], "six round trips, and no byte a third time");
    g.sends("ack 61001");
    r.takes_all();
    // Once G has it all, half of what was under way may be, until nothing was lost for long.
    sends_segments(&r, 61_001, 40);
    assert_eq!(ranges(&g), segments(61_001, 91_001));
    w.after_ms(1);
    g.sends("ack 91001");
    assert_eq!(ranges(&g), segments(91_001, 101_001));
    g.sends("ack 101001");
    w.after_ms(10_000);
    sends_segments(&r, 101_001, 1);
    g.sends("ack 102001");
    assert!(flow(&w, |f| !f.stats().has_losses));
}

/// Found by simulation (seed 23): what was new showed that the copy was lost, and nobody looked.
#[test]
fn snoop_29_a_copy_that_is_lost_is_known_by_what_was_sent_behind_it() {
    let (_w, r, g) = plain(Setup::new());
    loses_a_flight(&r, &g, 20);
    g.sends("ack 1001 <sack 2001:21001>");
    assert_eq!(ranges(&g), segments(1001, 2001));
    sends_segments(&r, 21_001, 4);
    assert_eq!(ranges(&g), segments(21_001, 25_001));
    for top in [22_001, 23_001] {
        g.sends(&format!("ack 1001 <sack 2001:{top}>"));
    }
    assert_eq!(ranges(&g), segments(1001, 2001), "once");
    sends_segments(&r, 25_001, 1);
    assert_eq!(ranges(&g), segments(25_001, 26_001));
    g.sends("ack 1001 <sack 2001:26001>");
    assert_eq!(ranges(&g), segments(1001, 2001), "and again");
}

#[test]
fn snoop_29_a_guest_that_was_only_slow_gets_one_segment_twice() {
    let (w, r, g) = plain(Setup::new());
    loses_a_flight(&r, &g, 60);
    w.after_ms(260);
    assert_eq!(ranges(&g), segments(1001, 2001));
    g.sends("ack 61001");
    w.after_ms(5000);
    g.gets_nothing();
    assert_eq!(flow(&w, |f| f.stats().local_retransmissions), 1);
}

#[test]
fn snoop_29_a_segment_lost_again_after_a_timeout_is_repeated_at_once() {
    for sack in ["", " <sack 5001:8001>"] {
        let (w, r, g) = plain(Setup::new());
        loses_a_flight(&r, &g, 20);
        w.after_ms(250);
        for (ack, to) in [(2001, 4001), (4001, 8001)] {
            g.takes_all();
            g.sends(&format!("ack {ack}"));
            assert_eq!(ranges(&g), segments(ack, to));
        }
        for _ in 0..3 {
            g.sends(&format!("ack 4001{sack}"));
        }
        // Arrived bytes are not under way, and let the window grow.
        let arrived = if sack.is_empty() { 0 } else { 6000 };
        let got = ranges(&g);
        assert_eq!(got[0], (4001, 5001), "{sack}");
        assert_eq!(got[1..], segments(8001, 8001 + arrived), "{sack}");
        g.sends("ack 8001");
        assert_eq!(ranges(&g), segments(8001 + arrived, 16_001), "{sack}");
        g.sends("ack 16001");
        assert_eq!(ranges(&g), segments(16_001, 21_001), "{sack}");
    }
}

/// Eight segments that G has all got; the first four of them come to it twice, for it was slow.
fn gets_four_twice(sack: bool) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = plain(Setup { sack: [sack, true], ..Setup::new() });
    loses_a_flight(&r, &g, 8);
    w.after_ms(250);
    assert_eq!(ranges(&g), segments(1001, 2001));
    g.sends("ack 2001");
    assert_eq!(ranges(&g), segments(2001, 4001));
    (w, r, g)
}

/// Found by simulation (seed 3514): what G says of the segments that came twice was taken for a
/// loss of what it got next, and each of its ACKs from there on for a hole.
#[test]
fn snoop_29_a_duplicate_that_says_what_came_twice_names_no_loss() {
    let (_, r, g) = gets_four_twice(true);
    g.sends("ack 9001");
    sends_segments(&r, 9001, 4);
    assert_eq!(ranges(&g), segments(9001, 13_001));
    for at in [1001, 2001, 3001] {
        g.sends(&format!("ack 9001 <sack {at}:{}>", at + 1000));
    }
    g.gets_nothing();
}

/// Without SACK they look the same. Those that come before anything else is under way are not of
/// what is sent next.
#[test]
fn snoop_29_duplicates_count_from_the_acknowledgement_on() {
    let (_, _, g) = gets_four_twice(false);
    g.sends_all(&["ack 4001", "ack 4001", "ack 4001", "ack 4001"]);
    assert_eq!(ranges(&g), segments(4001, 8001));
    for _ in 0..3 {
        g.sends("ack 4001");
    }
    g.gets_nothing();
}

#[test]
fn snoop_29_a_partial_ack_with_blocks_names_its_first_hole_first() {
    let (_w, r, g) = plain(Setup::new());
    loses_a_flight(&r, &g, 6);
    for _ in 0..3 {
        g.sends("ack 1001");
    }
    assert_eq!(ranges(&g), segments(1001, 2001));
    g.sends("ack 2001 <sack 4001:5001>");
    assert_eq!(ranges(&g)[0], (2001, 3001));
}

#[test]
fn snoop_16_what_g_lost_is_forgotten_with_the_connection_that_it_resets() {
    let (w, r, g) = plain(Setup::new());
    loses_a_flight(&r, &g, 6);
    for _ in 0..3 {
        g.sends("ack 1001");
    }
    assert!(flow(&w, |f| f.stats().has_losses));
    g.sends("R. 1 ack 1001");
    assert!(flow(&w, |f| !f.stats().has_losses));
}

#[test]
fn snoop_29_the_fin_is_repeated_as_well() {
    let (w, r, g) = plain(Setup::new());
    r.sends("1001:2001");
    r.sends("F. 2001:2001");
    r.takes_all();
    g.gets_all(&["1001:2001", "F. 2001:2001"]);
    w.after_ms(250);
    g.gets_all(&["F. 1001:2001"]);
    g.sends("ack 2001");
    g.gets_nothing(); // it is under way
    w.after_ms(500); // no round trip is known
    g.gets_all(&["F. 2001:2001"]);
    g.sends("ack 2002");
    r.gets_last("ack 2002");
}

/// Found by simulation: on a host with nothing else to do nobody looked before the timeout, and a
/// guest that had taken all at once was given twice as long.
#[test]
fn snoop_29_a_guest_that_is_silent_is_looked_at_before_its_timeout() {
    let (w, r, g) = plain(Setup::new());
    g.stops(9);
    r.sends("1001:2001");
    r.gets("ack 2001");
    g.gets("1001:2001");
    w.0.borrow_mut().outside.rings[0].slots = None; // it has taken that, as the next look shows
    w.after_ms(335);
    g.gets_nothing();
    w.after_ms(10);
    g.gets("1001:2001");
}

/// And a paused one costs less and less.
#[test]
fn snoop_32_a_guest_that_shows_no_life_is_looked_at_less_and_less_often() {
    let (w, r, g) = plain(Setup::new());
    g.stops(9);
    r.sends("1001:2001");
    r.gets("ack 2001");
    let (begins, mut looks) = (w.now(), Vec::new());
    while looks.len() < 6 {
        let at = w.engine(|engine, _| engine.poll_timeout()).expect("it waits");
        looks.push(at.since(begins).as_millis());
        w.after_ms(at.since(w.now()).as_millis());
    }
    assert_eq!(looks, [100, 200, 400, 650, 900, 1150], "a timeout of 250 ms is left");
    g.gets("1001:2001");
    g.gets_nothing();
}

#[test]
fn snoop_29_a_super_segment_is_repeated_by_its_first_segment() {
    let (w, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    r.sends("1001:61001 gso 1000");
    g.gets("1001:61001");
    w.after_ms(250);
    g.gets_all(&["1001:2001"]);
    g.sends("ack 2001");
    g.gets_all(&["2001:4001"]);
    g.sends("ack 4001");
    g.gets_all(&["4001:8001"]);
}

#[test]
fn snoop_29_patience_that_was_lost_comes_back_with_a_round_trip() {
    let (w, r, g) = plain(Setup::new());
    loses_a_flight(&r, &g, 5);
    let waits = |ms: u64| {
        w.after_ms(ms - 1);
        g.gets_nothing();
        w.after_ms(1);
        assert_eq!(ranges(&g).len(), 1, "after {ms} ms\n{}", w.trace());
    };
    for ms in [250, 500, 1000, 2000, 2000] {
        waits(ms);
    }
    // Bytes that were sent twice tell no round trip (RFC 6298 section 5.5, Karn's algorithm).
    g.sends("ack 2001");
    assert_eq!(ranges(&g), segments(2001, 4001));
    waits(2000);
    g.sends("ack 6001");
    sends_segments(&r, 6001, 1);
    assert_eq!(ranges(&g), segments(6001, 7001));
    g.sends("ack 7001");
    sends_segments(&r, 7001, 1);
    assert_eq!(ranges(&g), segments(7001, 8001));
    waits(250);
    waits(500);
}

#[test]
fn snoop_29_a_partial_ack_names_the_next_hole() {
    let (_, r, g) = plain(Setup { sack: [false; 2], ..Setup::new() });
    loses_a_flight(&r, &g, 10); // of which 2001:3001, 5001:6001 and 6001:7001 are lost
    g.sends("ack 2001");
    for _ in 0..3 {
        g.sends("ack 2001");
    }
    assert_eq!(ranges(&g), segments(2001, 3001));
    g.sends("ack 5001");
    assert_eq!(ranges(&g), segments(5001, 6001), "at once: nothing else may come from G");
    g.sends("ack 6001");
    assert_eq!(ranges(&g), segments(6001, 7001));
    g.sends("ack 11001");
    g.gets_nothing();
}

/// R's sequence numbers wrap at 4097: before the hole, inside it and behind it.
#[test]
fn snoop_29_sack_of_the_guest_is_read_across_the_wrap_of_sequence_numbers() {
    for (lost, sack) in [(1001, "2001:11001"), (4001, "5001:11001"), (7001, "8001:11001")] {
        let isn = [0xffff_f000, 10_000];
        let (_, r, g) = plain(Setup { isn, ..Setup::new() });
        loses_a_flight(&r, &g, 10);
        g.sends(&format!("ack {lost} <sack {sack}>"));
        assert_eq!(ranges(&g), segments(lost, lost + 1000), "{sack}");
        g.sends("ack 11001");
        g.gets_nothing();
    }
}

#[test]
fn life_04_a_new_ring_gets_what_was_in_the_old_one_without_waiting_for_a_timeout() {
    let (w, r, g) = plain(Setup::new());
    loses_a_flight(&r, &g, 60);
    for _ in 0..2 {
        w.happens(Event::DriverReset(0));
        w.set_features(GUEST, None);
        g.gets_nothing();
        w.happens(Event::DriverBack(0));
        w.set_features(GUEST, Some(PortFeatures::default()));
        assert_eq!(ranges(&g), segments(1001, 61_001));
    }
    // A recovery that went step by step does not hold it back.
    w.after_ms(250);
    assert_eq!(ranges(&g), segments(1001, 2001));
    w.happens(Event::DriverReset(0));
    w.set_features(GUEST, None);
    w.happens(Event::DriverBack(0));
    w.set_features(GUEST, Some(PortFeatures::default()));
    assert_eq!(ranges(&g), segments(1001, 61_001));
    g.sends("ack 61001");
    w.after_ms(5000);
    g.gets_nothing();
}

#[test]
fn life_04_patience_that_was_lost_with_a_ring_comes_back_with_the_next_ack() {
    let (w, r, g) = plain(Setup::new());
    w.engine(|e, now| e.set_late(now, GUEST, true)); // or the connection is in doubt (LIFE-04b)
    loses_a_flight(&r, &g, 5);
    for ms in [250, 500] {
        w.after_ms(ms);
        assert_eq!(ranges(&g), segments(1001, 2001));
    }
    w.happens(Event::DriverReset(0));
    w.set_features(GUEST, None);
    w.happens(Event::DriverBack(0));
    w.set_features(GUEST, Some(PortFeatures::default()));
    assert_eq!(ranges(&g), segments(1001, 6001));
    g.sends("ack 6001");
    sends_segments(&r, 6001, 1);
    assert_eq!(ranges(&g), segments(6001, 7001));
    w.after_ms(250);
    assert_eq!(ranges(&g), segments(6001, 7001));
}

#[test]
fn life_04_a_driver_that_negotiates_anew_has_not_seen_what_is_in_its_ring() {
    let (w, r, g) = plain(Setup::new());
    g.stops(100);
    sends_segments(&r, 1001, 5);
    g.takes_all();
    w.set_features(GUEST, Some(Setup::new().features));
    w.after_ms(30_000);
    g.gets_nothing();
    assert_eq!(flow(&w, |f| f.stats().local_retransmissions), 0);
    // Nor is it answered for, for longer than a silent guest.
    r.takes_all();
    r.sends("6000 ack 1");
    r.gets_nothing();
}

#[test]
fn life_04_a_guest_without_a_driver_is_waited_for() {
    let (w, r, g) = plain(Setup::new());
    g.stops(0);
    r.sends("1001:2001");
    r.gets("ack 2001");
    w.set_features(GUEST, None);
    w.after_ms(600_000);
    r.gets_nothing();
    r.sends("2000 ack 1");
    r.gets_nothing(); // nobody is there who could be alive
    w.set_features(GUEST, Some(PortFeatures::default()));
    g.runs();
    g.gets("1001:2001");
    g.sends("ack 2001");
    r.sends("2001:3001 ack 1");
    r.gets_last("ack 3001");
}

/// RFC 2883: the first block may name what G had before.
#[test]
fn snoop_29_a_block_that_reports_a_duplicate_hides_no_hole() {
    let (_, r, g) = plain(Setup::new());
    loses_a_flight(&r, &g, 5);
    g.sends("ack 2001 <sack 1001:2001 3001:6001>");
    assert_eq!(ranges(&g), segments(2001, 3001));
}
