use super::*;
use crate::congestion::tests::{MSS, assert_windows, rounds};

const RTT: Duration = Duration::from_millis(100);

// The figures of this file: a program with floating-point numbers, in segments, that follows RFC
// 5681 section 3.1 ACK by ACK.

#[test]
fn the_window_doubles_up_to_ssthresh_then_grows_by_a_segment_a_round_trip() {
    let mut c = Reno::new(MSS, 128 * MSS);
    c.on_congestion(Instant::from_secs(9), 128 * MSS);
    assert_eq!((c.cwnd(), c.ssthresh()), (64 * MSS, 64 * MSS));
    c.on_idle(10 * MSS);
    let expected = [20.0, 40.0, 64.0, 65.0, 66.0, 67.0, 68.0, 69.0, 70.0, 71.0, 72.0, 73.0];
    assert_windows(&rounds(&mut c, RTT, 12), 1, &expected);
}

#[test]
fn what_an_ack_covers_beyond_a_window_counts_for_the_next_segment() {
    let mut c = Reno::new(MSS, 20 * MSS);
    c.on_congestion(Instant::from_secs(9), 20 * MSS);
    for (acks, segments) in [(3, 10), (1, 11), (2, 11), (1, 12)] {
        for _ in 0..acks {
            let now = Instant::from_secs(9);
            c.on_ack(&Ack { now, delivered: 3 * MSS, una: 1, next: 2, rtt: None, srtt: RTT });
        }
        assert_eq!(c.cwnd(), segments * MSS);
    }
}

#[test]
fn after_a_timeout_it_begins_with_one_segment() {
    let mut c = Reno::new(MSS, 32 * MSS);
    c.on_timeout(Instant::from_secs(9), 32 * MSS, true);
    let expected = [2.0, 4.0, 8.0, 16.0, 17.0, 18.0, 19.0, 20.0, 21.0, 22.0, 23.0, 24.0];
    assert_windows(&rounds(&mut c, RTT, 12), 1, &expected);
    // The second timeout in a row does not halve again what the first did (RFC 5681 section 3.1).
    c.on_timeout(Instant::from_secs(9), 24 * MSS, true);
    c.on_timeout(Instant::from_secs(10), MSS, false);
    assert_eq!((c.cwnd(), c.ssthresh()), (MSS, 12 * MSS));
}
