use super::*;
use crate::congestion::scoreboard::State;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn at(n: u64) -> Instant {
    Instant::from_secs(9) + ms(n)
}

fn piece(from: u64, to: u64, sent_at_ms: u64, again: bool) -> Piece {
    Piece { from, to, sent_at: at(sent_at_ms), again, state: State::Flying }
}

/// A path of 100 ms, on which the segment up to 2000 has arrived.
fn arrived() -> (Rack, RttEstimator) {
    let (mut rack, mut rtt) = (Rack::default(), RttEstimator::new());
    rtt.on_sample(at(0), ms(100));
    rack.on_delivered(at(100), &piece(1000, 2000, 0, false), &rtt);
    (rack, rtt)
}

#[test]
fn only_what_left_before_the_newest_arrival_can_be_lost() {
    let (rack, _) = arrived();
    let lost_at = |p| rack.lost_at(&p, ms(25));
    assert_eq!(lost_at(piece(0, 1000, 0, false)), Some(at(125)), "at the same time, before it");
    assert_eq!(lost_at(piece(2000, 3000, 0, false)), None, "at the same time, behind it");
    assert_eq!(lost_at(piece(0, 1000, 1, true)), None, "a copy that left later");
}

#[test]
fn an_arrival_sooner_than_any_round_trip_is_that_of_the_original() {
    let (mut rack, rtt) = arrived();
    let later = piece(2000, 3000, 60, false);
    rack.on_delivered(at(159), &piece(0, 1000, 70, true), &rtt);
    assert_eq!(rack.lost_at(&later, ms(0)), None);
    rack.on_delivered(at(170), &piece(0, 1000, 70, true), &rtt);
    assert_eq!(rack.lost_at(&later, ms(0)), Some(at(160)));
}

#[test]
fn who_has_seen_reordering_does_not_call_a_segment_lost_at_once() {
    let (mut rack, rtt) = arrived();
    assert_eq!(rack.reordering_window(&rtt, true), ms(0));
    rack.on_delivered(at(101), &piece(0, 1000, 0, true), &rtt);
    assert_eq!(rack.reordering_window(&rtt, true), ms(0), "a copy is late by nature");
    rack.on_delivered(at(101), &piece(0, 1000, 0, false), &rtt);
    assert_eq!(rack.reordering_window(&rtt, true), ms(25));
}

#[test]
fn sixteen_recoveries_without_a_dsack_make_the_reordering_window_narrow_again() {
    let (mut rack, rtt) = arrived();
    let window = |rack: &Rack| rack.reordering_window(&rtt, false).as_millis();
    assert_eq!(window(&rack), 25);
    rack.on_dsack(0, 1000);
    rack.on_dsack(500, 1500); // in the same round
    assert_eq!(window(&rack), 50);
    for una in [1000, 2000, 3000, 4000] {
        rack.on_dsack(una, una + 1000);
    }
    assert_eq!(window(&rack), 100, "never more than SRTT");
    (0..15).for_each(|_| rack.on_recovered());
    assert_eq!(window(&rack), 100);
    rack.on_recovered();
    assert_eq!(window(&rack), 25);
}

#[test]
fn at_a_timeout_the_first_segment_is_lost_and_what_left_a_round_trip_ago() {
    let (rack, _) = arrived();
    let lost = |p| rack.is_lost_at_timeout(&p, 2000, at(300), ms(25));
    assert!(lost(piece(2000, 3000, 299, true)), "the first, whenever it left");
    assert!(lost(piece(3000, 4000, 175, false)));
    assert!(!lost(piece(4000, 5000, 176, false)));
}

#[test]
fn one_probe_at_a_time_and_a_round_trip_measured_in_between() {
    let mut probe = LossProbe::default();
    assert!(!probe.is_allowed(), "nothing was measured");
    probe.on_sample();
    assert!(probe.is_allowed());
    probe.on_sent(5000, true);
    probe.on_sample();
    assert!(!probe.is_allowed(), "one is out");
    assert_eq!(probe.on_ack(5000, Some(5000), false), ProbeAnswer::Unneeded);
    assert!(probe.is_allowed());
    probe.on_sent(6000, true);
    assert_eq!(probe.on_ack(6000, Some(6000), false), ProbeAnswer::Unneeded);
    assert!(!probe.is_allowed(), "nothing was measured since");
}

#[test]
fn what_an_ack_says_of_a_probe() {
    // Copy or new data, acknowledgement, DSACK, duplicate (RFC 8985 section 7.4.2).
    let answer = |copy, ack, dsack, duplicate| {
        let mut probe = LossProbe::default();
        probe.on_sent(5000, copy);
        probe.on_ack(ack, dsack, duplicate)
    };
    assert_eq!(answer(true, 4999, Some(5000), false), ProbeAnswer::None, "of what came before");
    assert_eq!(answer(false, 5000, None, false), ProbeAnswer::Unneeded, "it was new");
    assert_eq!(answer(true, 5000, None, false), ProbeAnswer::None, "which of the two?");
    assert_eq!(answer(true, 5000, Some(5000), false), ProbeAnswer::Unneeded, "both");
    assert_eq!(answer(true, 5000, None, true), ProbeAnswer::Unneeded, "both, without SACK");
    assert_eq!(answer(true, 5001, None, false), ProbeAnswer::Repaired, "the copy alone");
    let other = answer(true, 5001, Some(3000), false);
    assert_eq!(other, ProbeAnswer::Repaired, "something else came twice");
}
