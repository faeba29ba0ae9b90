//! Repairs that were for nothing: the segments that were thought lost had only been late (FLOOD-44,
//! FLOOD-45).

use super::*;

fn without_sack() -> SenderConfig {
    SenderConfig { sack: false, ..reno() }
}

/// The state that a reduction changes.
fn state(trace: &Trace) -> (Phase, u64, u64) {
    let c = trace.sender.controller();
    (trace.sender.phase(), c.cwnd(), c.ssthresh())
}

#[test]
fn flood_44_an_original_that_comes_within_a_round_trip_of_its_copy_undoes_the_reduction() {
    // From 103 to 150 no answer to the copy can have come, for the shortest round trip is 100. The
    // window is the 12 segments that it was, and 13000 with the ACK.
    let trace = Trace::run(
        &reno(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000 2000:3000
             > 12000:13000
         102 ack 1000 2000:4000
             > 13000:14000
         103 ack 1000 2000:5000
             > again 1000:2000
         150 ack 5000
             > 14000:20000
         160 wait",
    );
    assert_eq!(state(&trace), (Phase::Open, 15_000, u64::MAX));
    assert_eq!(trace.sender.retransmissions(), 1);
}

#[test]
fn flood_44_an_original_that_comes_before_a_copy_has_left_undoes_the_reduction() {
    let mut trace = Trace::run(
        &reno(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000 2000:3000
             > 12000:13000
         102 ack 1000 2000:4000
             > 13000:14000",
    );
    // Both are read in one turn, and what is to leave is asked for after it.
    trace.act("ack 1000 2000:5000");
    assert_eq!(state(&trace), (Phase::Recovery, 5_500, 5_500));
    trace.act("ack 5000");
    assert_eq!(
        (trace.sender.phase(), trace.sender.controller().ssthresh()),
        (Phase::Open, u64::MAX)
    );
    assert_eq!(trace.sender.retransmissions(), 0);
}

#[test]
fn flood_44_a_path_that_has_become_a_little_faster_undoes_nothing() {
    let script = "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000 2000:3000
             > 12000:13000
         102 ack 1000 2000:4000
             > 13000:14000
         103 ack 1000 2000:5000
             > again 1000:2000
         180 ack 5000
         181 wait";
    let trace = Trace::run(&reno(), us, script);
    assert_eq!(state(&trace), (Phase::Recovery, 5_500, 5_500));
}

/// Found by simulation (seed 5038): the answer to the copy of a second timeout was taken for that
/// of the original, all that was lost counted as under way, and the next timeout was minutes away.
#[test]
fn flood_44_behind_several_timeouts_no_answer_is_too_soon() {
    Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 11000
              > 1000:11000
         1200 wait
              > again 10000:11000
         1540 wait
              > again 1000:2000
         2100 wait
              > again 1000:2000
         2170 ack 2000
              > again 2000:3000
         2180 wait",
    );
}

#[test]
fn flood_44_a_dsack_for_the_only_copy_undoes_the_reduction_also_behind_the_repair() {
    // Later than a round trip the acknowledgement may be the copy's; the DSACK says it was not.
    let script = "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000 2000:3000
             > 12000:13000
         102 ack 1000 2000:4000
             > 13000:14000
         103 ack 1000 2000:5000
             > again 1000:2000
         210 ack 14000
             > 14000:19000";
    let repaired = Trace::run(&reno(), us, script);
    assert_eq!(state(&repaired), (Phase::Open, 5_500, 5_500));
    let named = format!("{script}\n 211 ack 14000 1000:2000\n > 19000:25000\n 212 wait");
    assert_eq!(state(&Trace::run(&reno(), us, &named)), (Phase::Open, 11_000, u64::MAX));
    let other = format!("{script}\n 211 ack 14000 3000:4000\n 212 wait");
    assert_eq!(state(&Trace::run(&reno(), us, &other)), (Phase::Open, 5_500, 5_500));
}

#[test]
fn flood_44_a_reduction_for_a_mark_is_not_undone() {
    let config = SenderConfig { ecn: true, ..reno() };
    let trace = Trace::run(
        &config,
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000 2000:3000
             > 12000:13000
         102 ack 1000 2000:4000
             > 13000:14000
         103 ack 1000 2000:5000 ece
             > again 1000:2000
         150 ack 5000
         160 wait",
    );
    assert_eq!(trace.sender.controller().ssthresh(), 5_500);
}

#[test]
fn flood_44_while_another_copy_is_out_new_data_leaves_and_nothing_more_is_marked() {
    // 1000 and 3000 are late, and so is 6000, of which no copy has left yet.
    let trace = Trace::run(
        &SenderConfig { initial_window: 30 * MSS, ..reno() },
        us,
        "0   offer 500000
             > 0:30000
         100 ack 1000
             > 30000:32000
         101 ack 1000 2000:3000
             > 32000:33000
         102 ack 1000 2000:3000 4000:5000
             > 33000:34000
         103 ack 1000 2000:3000 4000:6000
             > again 1000:2000
         104 ack 1000 2000:3000 4000:6000 7000:10000
             > again 3000:4000
         110 ack 3000 4000:6000 7000:10000
         111 ack 6000 7000:10000
             > 34000:43000
         112 ack 10000
             > 43000:48000
         115 wait",
    );
    assert_eq!((trace.sender.phase(), trace.sender.retransmissions()), (Phase::Open, 2));
}

#[test]
fn flood_45_behind_an_undone_repair_an_overtaken_segment_is_given_a_quarter_of_a_round_trip() {
    Trace::run(
        &reno(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000 2000:3000
             > 12000:13000
         102 ack 1000 2000:4000
             > 13000:14000
         103 ack 1000 2000:5000
             > again 1000:2000
         104 ack 5000
             > 14000:20000
         110 ack 5000 6000:10000
             > 20000:24000
         124 ack 10000
             > 24000:30000",
    );
}

#[test]
fn flood_45_without_sack_as_many_duplicates_as_have_overtaken_one_mean_a_loss() {
    // Five segments overtake 1000, so the third duplicate calls for a copy of it in vain; then five
    // overtake 10000, and no fifth one is there to call for it.
    let trace = Trace::run(
        &without_sack(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000
             > 12000:13000
         102 ack 1000
             > 13000:14000
         103 ack 1000
             > again 1000:2000
         104 ack 1000
         105 ack 1000
         106 ack 7000
             > 14000:24000
         107 ack 10000
             > 24000:30000
         200 ack 10000
             > 30000:31000
         201 ack 10000
             > 31000:32000
         202 ack 10000
             > 32000:33000
         203 ack 10000
             > 33000:34000
         204 ack 10000
             > 34000:35000
         205 ack 16000
             > 35000:42000
         206 wait",
    );
    assert_eq!((trace.sender.phase(), trace.sender.retransmissions()), (Phase::Open, 1));
}

#[test]
fn flood_45_without_sack_a_timeout_that_was_only_a_delay_is_undone() {
    // RFC 5682 section 2: two new segments, and then what left once is acknowledged. Two timeouts
    // have passed, the second more than a round trip before the first answer.
    let trace = Trace::run(
        &without_sack(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 500000
              > 1000:11000
         1300 wait
              > again 1000:2000
         1900 wait
              > again 1000:2000
         2100 ack 2000
              > 11000:13000
         2101 ack 4000
              > 13000:16000
         2140 wait",
    );
    assert_eq!(trace.sender.phase(), Phase::Open);
    assert_eq!(trace.sender.retransmissions(), 2);
}

/// As duplicates do: many segments of a path with short ones overtake a late one, and its
/// acknowledgement moves by few full ones.
#[test]
fn flood_45_without_sack_short_segments_that_have_overtaken_one_count_each() {
    let trace = Trace::run(
        &without_sack(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000
             > 12000:13000
         102 ack 1000
             > 13000:14000
         103 ack 1000
             > again 1000:2000
         104 ack 1000
         105 ack 1000
         106 ack 3000
             > 14000:16000
         107 wait",
    );
    assert_eq!((trace.sender.phase(), trace.sender.rack.duplicates_of_loss()), (Phase::Open, 6));
}

/// The original of 1000 comes too late to be told from its copy, and the segments behind it are
/// under way. Each second acknowledgement called for another copy of that.
#[test]
fn flood_45_without_sack_a_needless_copy_ends_the_copies_that_partial_acks_call_for() {
    let trace = Trace::run(
        &without_sack(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000
             > 12000:13000
         102 ack 1000
             > 13000:14000
         103 ack 1000
             > again 1000:2000
         180 ack 9000
             > again 9000:10000
         190 ack 10000
             > 14000:15000
         191 ack 11000
             > 15000:16000
         192 ack 11000
             > 16000:17000
         193 ack 11000
             > 17000:18000
         194 ack 11000
             > again 11000:12000, 18000:19000",
    );
    assert_eq!(trace.sender.phase(), Phase::Recovery);
}
