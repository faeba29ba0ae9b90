//! Controllers driven a round trip at a time, and their windows.

use super::controller::{Ack, Controller, initial_window};
use super::*;
use crate::time::{Duration, Instant};

/// Bytes of a segment in these tests, so that figures in segments are easily read.
pub(super) const MSS: u64 = 1000;

/// R acknowledges every segment by itself, evenly over the round trip; the window after each of
/// `count` round trips.
pub(super) fn rounds(c: &mut dyn Controller, rtt: Duration, count: usize) -> Vec<u64> {
    rounds_from(c, Instant::from_secs(77), rtt, count)
}

/// The same from `start`.
pub(super) fn rounds_from(
    c: &mut dyn Controller,
    start: Instant,
    rtt: Duration,
    count: usize,
) -> Vec<u64> {
    let (mut una, mut round_at) = (1 << 33, start);
    let mut windows = vec![];
    for _ in 0..count {
        let segments = c.cwnd() / MSS;
        let round_end = una + segments * MSS;
        for i in 1..=segments {
            una += MSS;
            let now = round_at + Duration::from_nanos(rtt.as_nanos() * i / segments);
            let next = round_end + (una + c.cwnd()).saturating_sub(round_end);
            c.on_ack(&Ack { now, delivered: MSS, una, next, rtt: Some(rtt), srtt: rtt });
        }
        round_at = round_at + rtt;
        windows.push(c.cwnd());
    }
    windows
}

/// Compares windows with figures in segments, to a tenth of a segment, and a thousandth.
pub(super) fn assert_windows(windows: &[u64], every: usize, expected: &[f64]) {
    let seen: Vec<f64> = windows.iter().step_by(every).map(|w| *w as f64 / MSS as f64).collect();
    assert_eq!(seen.len(), expected.len(), "{seen:.1?}");
    let near = seen.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 0.1 + b / 1000.0);
    assert!(near, "\n is {seen:.1?}\n not {expected:.1?}");
}

#[test]
fn flood_19_the_initial_window_is_ten_segments_jumbo_frames_too() {
    let of = |mss| initial_window(mss, false);
    assert_eq!([536, 1448, 1460, 2000, 8960].map(of), [5360, 14_480, 14_600, 20_000, 89_600]);
    assert_eq!(initial_window(1448, true), 1448);
}

#[test]
fn whoever_splits_its_acks_gets_no_larger_window() {
    for algorithm in Algorithm::ALL {
        let grown = |parts: u64| {
            let mut c = algorithm.controller(MSS, 10 * MSS);
            let now = Instant::from_secs(9);
            c.on_congestion(now, 10 * MSS);
            let srtt = Duration::from_millis(100);
            for i in 1..=500 * parts {
                let una = i * (MSS / parts);
                let now = now + Duration::from_nanos(i * 20_000_000 / parts);
                let delivered = MSS / parts;
                c.on_ack(&Ack { now, delivered, una, next: una + MSS, rtt: None, srtt });
            }
            c.cwnd()
        };
        let (whole, split) = (grown(1), grown(100));
        assert!(split <= whole + MSS, "{}: {whole} whole, {split} split", algorithm.label());
    }
}

#[test]
fn no_controller_goes_below_two_segments_but_for_a_timeout() {
    for algorithm in Algorithm::ALL {
        let mut c = algorithm.controller(MSS, 10 * MSS);
        for _ in 0..20 {
            c.on_congestion(Instant::from_secs(9), c.cwnd());
        }
        assert_eq!((c.cwnd(), c.ssthresh()), (2 * MSS, 2 * MSS));
        c.on_timeout(Instant::from_secs(9), c.cwnd(), true);
        assert_eq!((c.cwnd(), c.ssthresh()), (MSS, 2 * MSS));
    }
}

#[test]
fn a_timeout_for_nothing_gives_the_window_back() {
    for algorithm in Algorithm::ALL {
        let mut c = algorithm.controller(MSS, 100 * MSS);
        let now = Instant::from_secs(9);
        c.on_congestion(now, 100 * MSS);
        let (rtt, reduced) = (Duration::from_millis(50), c.cwnd());
        let before = rounds(&mut c, rtt, 10);
        let mut other = algorithm.controller(MSS, 100 * MSS);
        other.on_congestion(now, 100 * MSS);
        rounds(&mut other, rtt, 10);
        c.keep();
        c.on_timeout(Instant::from_secs(78), c.cwnd(), true);
        c.on_timeout(Instant::from_secs(79), c.cwnd(), false);
        assert_eq!(c.cwnd(), MSS);
        c.on_spurious();
        assert_eq!((Some(&c.cwnd()), c.ssthresh()), (before.last(), reduced));
        // And goes on as if nothing had happened.
        let later = Instant::from_secs(80);
        let (a, b) = (rounds_from(&mut c, later, rtt, 5), rounds_from(&mut other, later, rtt, 5));
        assert_eq!(a, b, "{}", algorithm.label());
    }
}

#[test]
fn after_a_pause_the_window_is_smaller_and_ssthresh_is_not() {
    for algorithm in Algorithm::ALL {
        let mut c = algorithm.controller(MSS, 100 * MSS);
        c.on_congestion(Instant::from_secs(9), 100 * MSS);
        let cwnd = c.cwnd();
        c.on_idle(10 * MSS);
        assert_eq!((c.cwnd(), c.ssthresh()), (10 * MSS, cwnd), "never above ssthresh before");
        c.on_idle(20 * MSS);
        assert_eq!(c.cwnd(), 10 * MSS, "a pause does not widen a window");
    }
}
