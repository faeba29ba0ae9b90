use super::*;

const MSS: u64 = 1000;

/// The rule's verdict on a trace. A line is a time in ms and an event:
///
/// ```text
/// 0   > 0:10000                   bytes leave; `ect`, `cwr`: their marks
/// 100 ack 2000 3000:4000          R acknowledges, with SACK blocks; `ece`
/// ```
fn judged(ecn: bool, script: &str) -> Result<(), String> {
    judge(Sending::begin(0, MSS, true, ecn), script)
}

fn judge(mut sending: Sending, script: &str) -> Result<(), String> {
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let mut words = line.split_whitespace();
        let ms = words.next().and_then(|ms| ms.parse().ok()).expect(line);
        let at = Instant::from_secs(9) + Duration::from_millis(ms);
        let (what, rest) = (words.next().expect(line), words.collect::<Vec<_>>());
        let ranges = rest.iter().filter_map(|word| word.split_once(':'));
        let number = |word: &str| word.parse::<u64>().expect(line);
        let ranges: Vec<(u64, u64)> = ranges.map(|(a, b)| (number(a), number(b))).collect();
        let says = |word| rest.contains(&word);
        if what == "ack" {
            let (ack, marked) = (number(rest[0]), says("ece"));
            let heard =
                RemoteAck { at, ack, blocks: &ranges, echo: None, alone: true, marked, sure: true };
            sending.on_ack(&heard);
            continue;
        }
        let ((from, to), edge) = (ranges[0], 1_000_000);
        let (capable, cwr) = (says("ect"), says("cwr"));
        sending
            .on_sent(&Left { at, from, to, size: MSS, edge, stamp: None, capable, cwr })
            .map_err(|what| format!("{line}: {what}"))?;
    }
    Ok(())
}

fn is_fine(script: &str) {
    assert_eq!(judged(false, script), Ok(()));
}

fn is_wrong(script: &str, what: &str) {
    let said = judged(false, script).expect_err(script);
    assert!(said.ends_with(what), "{said}");
    let last = script.lines().map(str::trim).rfind(|line| !line.is_empty()).expect("a line");
    assert!(said.starts_with(last), "{said}");
}

/// A window of 20 segments after a round trip, and the ninth lost of those sent then.
const A_LOSS: &str = "
    0   > 0:10000
    100 ack 10000
    100 > 10000:30000
    200 ack 18000
    200 > 30000:46000
    201 ack 18000 19000:30000";

#[test]
fn ten_segments_leave_at_first_and_no_more() {
    is_fine("0 > 0:10000");
    is_wrong("0 > 0:11000", "11000 bytes under way to R in a window of 10000");
}

/// Seed 1560: a sender that began behind a pause knew the path, and sent a probe for the tail of
/// its first window.
#[test]
fn a_sender_behind_a_pause_may_probe_with_new_data_before_it_hears_anything() {
    let knows = |ms, script: &str| {
        let begun = Sending::begin(0, MSS, true, false);
        judge(Sending { shortest: Some(Duration::from_millis(ms)), ..begun }, script)
    };
    let probe = "0 > 0:10000\n 100 > 10000:11000";
    assert_eq!(knows(40, probe), Ok(()));
    assert!(knows(100, probe).is_err(), "too early for one");
    assert!(knows(40, "0 > 0:11000").is_err());
    assert!(knows(40, &format!("{probe}\n 200 > 11000:12000")).is_err(), "a second one");
    is_wrong(probe, "11000 bytes under way to R in a window of 10000");
}

#[test]
fn in_slow_start_a_window_grows_by_what_is_acknowledged() {
    is_fine("0 > 0:10000\n 100 ack 5000\n 100 > 10000:20000");
    is_wrong(
        "0 > 0:10000\n 100 ack 5000\n 100 > 10000:30000",
        "25000 bytes under way to R in a window of 15000",
    );
}

#[test]
fn nothing_leaves_beyond_the_edge_of_r() {
    is_wrong("0 > 999000:1000001", "1 bytes to R beyond its window");
}

#[test]
fn a_burst_is_64_kib() {
    let grown = "
        0   > 0:10000
        100 ack 10000
        100 > 10000:30000
        200 ack 30000
        200 > 30000:70000
        300 ack 70000";
    is_fine(&format!("{grown}\n 300 > 70000:130000\n 301 > 130000:150000"));
    is_wrong(&format!("{grown}\n 300 > 70000:150000"), "80000 bytes to R at once");
    let short = "
        0 > 0:10000
        0 ack 10000
        1 > 10000:30000
        1 ack 30000
        2 > 30000:70000
        2 ack 70000";
    is_fine(&format!("{short}\n 3 > 70000:150000"));
}

#[test]
fn what_is_lost_leaves_again_as_other_segments_arrive() {
    is_fine(&format!(
        "{A_LOSS}\n 201 > 18000:19000\n 250 ack 18000 19000:46000\n 250 > 46000:60000"
    ));
    // Eleven had arrived when the repair began: 22 segments and four, if each ACK moved.
    is_wrong(
        &format!("{A_LOSS}\n 201 > 18000:19000\n 202 > 46000:72000"),
        "27000 bytes to R in a repair, 26000 may leave",
    );
}

#[test]
fn after_a_loss_a_window_is_seven_tenths_of_what_was_used() {
    // 28 segments were under way, so 19.6 are left, and a segment more each round trip.
    let over = "201 > 18000:19000\n 301 ack 46000";
    is_fine(&format!("{A_LOSS}\n {over}\n 301 > 46000:69000"));
    is_wrong(
        &format!("{A_LOSS}\n {over}\n 301 > 46000:72000"),
        "26000 bytes under way to R in a window of 21028",
    );
}

/// As above, but the window of 28 segments is back.
#[test]
fn flood_44_a_reduction_for_what_was_only_late_may_be_undone() {
    let copy = "201 > 18000:19000";
    let all = "46000:72000";
    for said in ["280 ack 46000", "301 ack 46000\n 302 ack 46000 18000:19000"] {
        is_fine(&format!("{A_LOSS}\n {copy}\n {said}\n 303 > {all}"));
    }
    is_wrong(
        &format!("{A_LOSS}\n {copy}\n 301 ack 46000\n 303 > {all}"),
        "26000 bytes under way to R in a window of 21028",
    );
}

/// Seed 319: of two copies one was needed, and then departures go on to follow arrivals.
#[test]
fn flood_44_a_repair_goes_on_of_which_one_copy_was_needed() {
    let sent = "0 > 0:10000\n 100 ack 10000\n 100 > 10000:30000";
    let heard = "200 ack 10000\n".repeat(16);
    let repair = format!("{sent}\n {heard}\n 201 > 10000:11000\n 202 > 30000:46000");
    let late = "302 ack 12000\n 302 > 12000:13000\n 303 ack 14000";
    assert_eq!(without_sack(&format!("{repair}\n {late}\n 303 > 46000:50000")), Ok(()));
    let said = without_sack(&format!("{repair}\n {late}\n 303 > 46000:80000"));
    let said = said.expect_err("more than has arrived");
    assert!(said.contains("bytes under way to R in a window of 22"), "{said}");
}

/// Seed 417: each reduction is told (RFC 3168 section 6.1.2).
#[test]
fn flood_44_a_window_that_came_back_is_reduced_again() {
    let sent = "
        0   > 0:10000 ect
        100 ack 10000
        100 > 10000:30000 ect
        200 ack 18000 19000:28000
        200 > 18000:19000
        201 > 30000:31000 ect cwr";
    let again = "260 > 28000:29000\n 261 > 31000:32000 ect cwr";
    for (said, fine) in [("250 ack 28000 29000:30000", true), ("", false)] {
        let judged = judged(true, &format!("{sent}\n {said}\n {again}"));
        assert_eq!(judged.is_ok(), fine, "{judged:?}");
    }
}

#[test]
fn flood_45_without_sack_each_duplicate_lets_a_segment_out() {
    let sent = "0 > 0:10000\n 100 ack 10000\n 100 > 10000:30000";
    let many = "200 ack 10000\n".repeat(9);
    assert_eq!(without_sack(&format!("{sent}\n {many} 201 > 30000:39000")), Ok(()));
    assert!(without_sack(&format!("{sent}\n {many} 201 > 30000:44000")).is_err());
}

#[test]
fn a_copy_that_is_lost_reduces_the_window_again() {
    let again = "
        201 > 18000:19000
        310 ack 18000 19000:46000
        310 > 18000:19000
        420 ack 46000";
    is_fine(&format!("{A_LOSS}\n {again}\n 420 > 46000:62000"));
    is_wrong(
        &format!("{A_LOSS}\n {again}\n 420 > 46000:66000"),
        "20000 bytes under way to R in a window of 15760",
    );
}

#[test]
fn after_a_timeout_two_leave_for_each_that_arrives() {
    let silence = "0 > 0:10000\n 100 ack 10000\n 100 > 10000:30000\n 700 > 10000:11000";
    is_fine(&format!("{silence}\n 800 ack 11000\n 800 > 11000:13000"));
    is_wrong(
        &format!("{silence}\n 800 ack 11000\n 800 > 11000:17000"),
        "7000 bytes to R in a repair, 6000 may leave",
    );
}

#[test]
fn a_timeout_that_was_for_nothing_is_undone() {
    let silence = "0 > 0:10000\n 100 ack 10000\n 100 > 10000:30000\n 700 > 10000:11000";
    is_fine(&format!("{silence}\n 701 ack 12000\n 702 ack 30000\n 702 > 30000:68000"));
}

/// The ACK of its last segment is still on its way, because R delays it.
#[test]
fn behind_a_pause_a_short_path_s_burst_is_64_kib_whatever_is_under_way() {
    let at = |us| Instant::from_secs(9) + Duration::from_micros(us);
    for (pause_us, is_too_much) in [(900, false), (2000, true)] {
        let mut s = Sending::begin(0, MSS, true, false);
        s.window = Window::first(200_000);
        let left = |at, from, to| {
            let (size, edge, capable, cwr) = (MSS, 1_000_000, false, false);
            Left { at, from, to, size, edge, stamp: None, capable, cwr }
        };
        s.on_sent(&left(at(0), 0, 1000)).expect("a first segment");
        let (blocks, alone, marked, sure) = (&[][..], true, false, true);
        s.on_ack(&RemoteAck { at: at(100), ack: 1000, blocks, echo: None, alone, marked, sure });
        s.on_sent(&left(at(100), 1000, 2000)).expect("a last segment");
        let burst = s.on_sent(&left(at(100 + pause_us), 2000, 100_000));
        assert_eq!(burst.is_err(), is_too_much, "{pause_us} us: {burst:?}");
    }
}

#[test]
fn timeouts_double() {
    let twice = "0 > 0:1000\n 300 > 0:1000\n 600 > 0:1000";
    is_fine(&format!("{twice}\n 1200 > 0:1000\n 2400 > 0:1000"));
    is_wrong(
        &format!("{twice}\n 1200 > 0:1000\n 1800 > 0:1000"),
        "the same again after 600 ms, and before that after 600 ms",
    );
}

#[test]
fn no_copy_leaves_before_anything_can_have_been_heard() {
    let sent = "0 > 0:1000\n 100 ack 1000\n 200 > 1000:3000";
    is_wrong(&format!("{sent}\n 240 > 1000:2000"), "again after 40000 us, on a path of 100000 us");
}

/// Seed 41142: R delays the ACKs of a single segment, and SACKs at once.
#[test]
fn a_path_is_as_short_as_blocks_say_too() {
    let sent = "0 > 0:2000\n 100 ack 2000\n 200 > 2000:5000";
    is_fine(&format!("{sent}\n 210 ack 2000 3000:4000\n 215 > 2000:3000"));
    is_wrong(
        &format!("{sent}\n 210 ack 2000 3000:4000\n 220 > 5000:6000\n 224 > 5000:6000"),
        "again after 4000 us, on a path of 10000 us",
    );
}

#[test]
fn after_a_pause_the_window_is_half_of_what_it_was() {
    let pause = "
        0   > 0:10000
        100 ack 10000
        100 > 10000:30000
        200 ack 30000
        200 > 30000:70000
        300 ack 70000";
    is_fine(&format!("{pause}\n 5000 > 70000:114000"));
    is_wrong(
        &format!("{pause}\n 5000 > 70000:120000"),
        "50000 bytes under way to R in a window of 40000",
    );
}

#[test]
fn a_mark_reduces_the_window_and_the_next_new_data_says_so() {
    let mark = "0 > 0:10000 ect\n 100 ack 10000\n 100 > 10000:30000 ect\n 200 ack 20000 ece";
    let fine = format!("{mark}\n 200 > 30000:31000 ect cwr\n 201 > 31000:36000 ect");
    assert_eq!(judged(true, &fine), Ok(()));
    let said = judged(true, &format!("{mark}\n 200 > 30000:31000 ect")).expect_err("no CWR");
    assert!(said.ends_with("new data without CWR after R spoke of a mark"), "{said}");
    // All that was under way is acknowledged: 14 segments are left of 20, and CUBIC's curve goes
    // back to the 30 of the window before.
    let over = "200 > 30000:31000 ect cwr\n 300 ack 31000";
    assert_eq!(judged(true, &format!("{mark}\n {over}\n 300 > 31000:49000 ect")), Ok(()));
    let said = judged(true, &format!("{mark}\n {over}\n 300 > 31000:59000 ect"));
    let said = said.expect_err("no reduction");
    assert!(said.contains("28000 bytes under way to R in a window of 21"), "{said}");
}

#[test]
fn a_window_is_reduced_once_for_all_that_is_lost_of_it() {
    let twice = "
        0   > 0:10000 ect
        100 ack 10000
        100 > 10000:30000 ect
        200 ack 18000 19000:28000
        200 > 18000:19000
        201 > 30000:31000 ect cwr
        202 ack 18000 19000:28000 29000:30000
        202 > 28000:29000";
    assert_eq!(judged(true, &format!("{twice}\n 203 > 31000:32000 ect")), Ok(()));
    let said = judged(true, &format!("{twice}\n 203 > 31000:32000 ect cwr")).expect_err("twice");
    assert!(said.ends_with("CWR to R twice for one window"), "{said}");
    let over = "203 > 31000:32000 ect\n 300 ack 31000";
    assert_eq!(judged(true, &format!("{twice}\n {over}\n 301 > 32000:33000 ect cwr")), Ok(()));
}

fn without_sack(script: &str) -> Result<(), String> {
    judge(Sending::begin(0, MSS, false, false), script)
}

/// Seeds 47331 and 928: RFC 6582 ignores the time at which the next bytes left, but they leave
/// once.
#[test]
fn without_sack_a_partial_acknowledgement_brings_one_copy_of_what_follows() {
    let repair = "
        0   > 0:10000
        100 ack 10000
        100 > 10000:20000
        180 > 20000:25000
        200 ack 10000
        201 ack 10000
        202 ack 10000
        202 > 10000:11000
        203 ack 20000
        203 > 20000:21000";
    assert_eq!(without_sack(repair), Ok(()));
    let said = without_sack(&format!("{repair}\n 204 ack 20500\n 204 > 20500:21000"));
    let said = said.expect_err("again");
    assert!(said.ends_with("again after 1000 us, on a path of 100000 us"), "{said}");
}

/// Seed 1867: the pace had held back the copy that the duplicates brought.
#[test]
fn a_repair_may_begin_with_what_follows_a_partial_acknowledgement() {
    let sent = "0 > 0:10000\n 100 ack 10000\n 100 > 10000:20000\n 180 > 20000:25000";
    let heard = "200 ack 10000\n 201 ack 10000\n 202 ack 10000\n 203 ack 20000";
    assert_eq!(without_sack(&format!("{sent}\n {heard}\n 204 > 20000:21000")), Ok(()));
}

/// Seed 1200003: the path had become shorter, and only copies had been answered since.
#[test]
fn without_sack_three_duplicates_bring_a_copy_however_long_the_path_was() {
    let sent = "0 > 0:10000\n 100 ack 10000\n 100 > 10000:20000";
    let copy = "104 > 10000:11000";
    let heard = |n| (1..=n).map(|n| format!("{} ack 10000\n", 100 + n)).collect::<String>();
    assert_eq!(without_sack(&format!("{sent}\n {}\n {copy}", heard(3))), Ok(()));
    let again = format!("{sent}\n {}\n {copy}\n 105 > 10000:11000", heard(3));
    for script in [format!("{sent}\n {}\n {copy}", heard(2)), again] {
        let said = without_sack(&script).expect_err("too early");
        assert!(said.ends_with("us, on a path of 100000 us"), "{said}");
    }
}

/// Seed 1200198: the answer to a copy came sooner than all that queues had held up.
#[test]
fn without_sack_a_timeout_that_was_perhaps_for_nothing_may_go_on() {
    let duplicates = |from: u32| (0..20).map(move |n| format!("{} ack 10000\n", from + n));
    let repair: String = duplicates(200).collect();
    let sent = "0 > 0:10000\n 100 ack 10000\n 100 > 10000:30000";
    let repaired = "220 > 10000:11000\n 220 > 30000:50000\n 320 ack 30000";
    let silence = "600 > 30000:31000\n 650 ack 31000";
    let script = format!("{sent}\n {repair} {repaired}\n {silence}\n 650 > 50000");
    assert_eq!(without_sack(&format!("{script}:52000")), Ok(()));
    let said = without_sack(&format!("{script}:62000")).expect_err("as if all had arrived");
    assert!(said.contains("bytes under way to R in a window of"), "{said}");
}

/// Seed 44436: an original came late, and the host thinks nothing of it.
#[test]
fn a_timeout_may_go_on_where_it_was_perhaps_for_nothing() {
    let silence = "0 > 0:10000\n 100 ack 10000\n 100 > 10000:30000\n 700 > 10000:11000";
    let copies = "800 ack 11000\n 800 > 11000:13000\n 900 ack 13000\n 900 > 13000:17000";
    let late = "1000 ack 24000\n 1001 ack 25000";
    is_fine(&format!("{silence}\n {copies}\n {late}\n 1001 > 25000:30000\n 1001 > 30000:33000"));
}

/// Seed 49940: the acknowledgement that names a loss has brought much besides (RFC 9937).
#[test]
fn what_the_newest_ack_acknowledges_buys_as_much_of_a_repair() {
    let sent = "0 > 0:10000\n 100 ack 10000\n 100 > 10000:30000\n 200 ack 25000 28000:30000";
    is_fine(&format!("{sent}\n 200 > 25000:28000\n 200 > 30000:41000"));
    is_wrong(
        &format!("{sent}\n 200 > 25000:28000\n 200 > 30000:66000"),
        "39000 bytes to R in a repair, 38000 may leave",
    );
}

#[test]
fn only_new_data_is_ecn_capable_and_only_where_that_was_agreed_on() {
    is_wrong("0 > 0:1000 ect", "an ECN-capable segment to R that was not agreed on");
    for mark in ["ect", "cwr"] {
        let said = judged(true, &format!("0 > 0:1000 ect\n 900 > 0:1000 {mark}"));
        let said = said.expect_err("a copy");
        assert!(said.ends_with("a copy to R that is ECN-capable, or carries CWR"), "{said}");
    }
}
