use super::*;
use crate::time::Instant;

const MSS: u64 = 1000;

/// Rounds of slow start, each with its round trip in ms; the window in segments after each.
fn slow_start(w: &mut Window, rtts_ms: &[u64]) -> Vec<u64> {
    let mut una = 1 << 33;
    let mut windows = vec![];
    for &ms in rtts_ms {
        let segments = w.cwnd() / MSS;
        let end = una + segments * MSS;
        for _ in 0..segments {
            una += MSS;
            let rtt = Duration::from_millis(ms);
            let now = Instant::from_secs(9);
            let mut ack = Ack { now, delivered: MSS, una, next: end, rtt: Some(rtt), srtt: rtt };
            if una == end {
                // The next round is as long as the window will be.
                let mut grown = *w;
                let _ = grown.slow_start(&ack);
                ack.next = end + grown.cwnd() / MSS * MSS;
            }
            let _ = w.slow_start(&ack);
        }
        windows.push(w.cwnd() / MSS);
    }
    windows
}

#[test]
fn slow_start_doubles_while_the_round_trip_stays() {
    let mut w = Window::new(MSS, 10 * MSS);
    assert_eq!(slow_start(&mut w, &[50; 5]), [20, 40, 80, 160, 320]);
}

#[test]
fn a_round_trip_that_grows_by_an_eighth_makes_it_conservative_for_five_rounds() {
    // RFC 9406 section 4.2. The third round is 7 ms longer, more than 50 / 8: after its eighth
    // sample the window grows at a quarter, to 40 + 7 + 33/4; four more rounds, then it is over.
    let mut w = Window::new(MSS, 10 * MSS);
    let windows = slow_start(&mut w, &[50, 50, 57, 57, 57, 57, 57, 57]);
    assert_eq!(windows, [20, 40, 55, 69, 86, 107, 134, 134]);
    assert!(!w.is_in_slow_start());
    assert_eq!(w.ssthresh() / MSS, 134);
}

#[test]
fn noise_does_not() {
    // 4 ms at least, 16 ms at most, an eighth in between.
    for (before, after) in [(10, 13), (50, 56), (400, 415)] {
        let mut w = Window::new(MSS, 10 * MSS);
        assert_eq!(slow_start(&mut w, &[before, after, after]), [20, 40, 80], "{before} {after}");
        let mut w = Window::new(MSS, 10 * MSS);
        let windows = slow_start(&mut w, &[before, after + 1, after + 1]);
        assert!(windows[1] < 40, "{before} {after}: {windows:?}");
    }
}

#[test]
fn it_goes_on_if_the_queue_was_only_passing() {
    let mut w = Window::new(MSS, 10 * MSS);
    // The increase is gone in the fourth round: seven samples at a quarter, the rest at full pace.
    assert_eq!(slow_start(&mut w, &[50, 50, 57, 50, 50]), [20, 40, 55, 105, 210]);
}

#[test]
fn a_round_of_less_than_eight_samples_says_nothing() {
    let mut w = Window::new(MSS, 2 * MSS);
    assert_eq!(slow_start(&mut w, &[50, 90]), [4, 8]);
}

#[test]
fn after_a_reduction_slow_start_knows_its_end_and_looks_at_no_round_trip() {
    let mut w = Window::new(MSS, 100 * MSS);
    w.collapse(Some(50 * MSS));
    assert_eq!(slow_start(&mut w, &[50, 50, 50, 90, 90, 90]), [2, 4, 8, 16, 32, 50]);
}

#[test]
fn what_is_left_of_an_ack_at_the_end_of_slow_start_is_for_congestion_avoidance() {
    let mut w = Window::new(MSS, 100 * MSS);
    w.reduce(50 * MSS);
    w.restart(49_500);
    let rtt = Duration::from_millis(50);
    let now = Instant::from_secs(9);
    let ack = Ack { now, delivered: 2 * MSS, una: 1, next: 2, rtt: None, srtt: rtt };
    assert_eq!((w.slow_start(&ack), w.cwnd()), (1500, 50_000));
}

#[test]
fn after_a_pause_slow_start_ends_at_three_quarters_of_what_the_path_carried() {
    let mut w = Window::new(MSS, 100 * MSS);
    w.reduce(50 * MSS);
    w.grow(50 * MSS);
    w.restart(10 * MSS);
    assert_eq!((w.cwnd(), w.ssthresh()), (10 * MSS, 75 * MSS));
    let mut w = Window::new(MSS, 100 * MSS);
    w.restart(10 * MSS);
    assert_eq!(w.ssthresh(), u64::MAX, "it has never found an end");
    let mut w = Window::new(MSS, 100 * MSS);
    w.reduce(50 * MSS);
    w.grow(50 * MSS);
    w.restart(100 * MSS);
    assert_eq!(w.ssthresh(), 50 * MSS, "nothing begins again");
}
