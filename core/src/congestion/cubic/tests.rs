use super::*;
use crate::congestion::tests::{MSS, assert_windows, rounds};

const RTT: Duration = Duration::from_millis(100);

// The figures of this file: a program with floating-point numbers, in segments and seconds, that
// follows RFC 9438 sections 4.2 to 4.8 ACK by ACK.

fn reduced_from(segments: u64) -> Cubic {
    let mut c = Cubic::new(MSS, segments * MSS);
    c.on_congestion(Instant::from_secs(76), segments * MSS);
    c
}

#[test]
fn a_large_window_comes_back_along_the_curve_and_then_beyond() {
    // K = cbrt(300 / 0.4) = 9.09 s: after 90 round trips the window is what it was.
    let mut c = reduced_from(1000);
    let expected =
        [709.7, 796.2, 863.5, 914.1, 950.4, 974.6, 989.3, 996.8, 999.6, 1000.0, 1000.4, 1003.3];
    assert_windows(&rounds(&mut c, RTT, 120), 10, &expected);
}

#[test]
fn a_smaller_one_does_so_in_four_seconds() {
    let mut c = reduced_from(100); // K = cbrt(30 / 0.4) = 4.2 s
    let expected = [72.0, 81.0, 87.8, 92.8, 96.2, 98.3, 99.4, 99.9, 100.0, 100.0, 100.3, 101.1];
    assert_windows(&rounds(&mut c, RTT, 60), 5, &expected);
}

#[test]
fn on_a_short_path_it_grows_as_reno_would() {
    // 9/17 of a segment per round trip up to the window before, then a segment.
    let mut c = reduced_from(20);
    let expected = [14.5, 16.0, 17.6, 19.1, 21.2, 24.1, 27.1, 30.0, 32.9, 35.8];
    assert_windows(&rounds(&mut c, Duration::from_millis(10), 30), 3, &expected);
}

#[test]
fn a_second_reduction_below_the_first_leaves_room_for_newcomers() {
    let mut c = reduced_from(1000);
    c.on_congestion(Instant::from_secs(76), 700 * MSS);
    assert_eq!((c.cwnd(), c.curve.w_max), (490 * MSS, 595 * MSS)); // 0.85 * 700
    let expected = [492.4, 514.8, 533.6, 549.3, 562.0, 572.1, 579.9, 585.7, 589.8, 592.4];
    let windows = rounds(&mut c, Duration::from_millis(50), 100);
    assert_windows(&windows, 10, &expected);
}

#[test]
fn after_a_timeout_slow_start_comes_first_and_no_plateau_is_remembered() {
    let mut c = Cubic::new(MSS, 100 * MSS);
    c.on_timeout(Instant::from_secs(76), 100 * MSS, true);
    let expected =
        [2.0, 8.0, 32.0, 70.4, 71.5, 72.5, 73.6, 74.6, 75.7, 76.7, 77.8, 78.8, 79.9, 80.9, 82.0];
    assert_windows(&rounds(&mut c, RTT, 30), 2, &expected);
}

#[test]
fn time_in_which_the_window_was_not_used_does_not_count() {
    let (mut idle, mut busy) = (reduced_from(1000), reduced_from(1000));
    let (a, b) = (rounds(&mut idle, RTT, 10), rounds(&mut busy, RTT, 10));
    assert_eq!(a, b);
    let pause = Duration::from_secs(30);
    idle.on_unused(pause);
    let from = Instant::from_secs(78);
    let a = super::super::tests::rounds_from(&mut idle, from + pause, RTT, 10);
    let b = super::super::tests::rounds_from(&mut busy, from, RTT, 10);
    assert_eq!(a, b);
}

#[test]
fn a_window_grows_by_half_in_a_round_trip_at_most() {
    let mut c = reduced_from(100);
    let first = rounds(&mut c, RTT, 1)[0];
    let much_later = Instant::from_secs(7700);
    let windows = super::super::tests::rounds_from(&mut c, much_later, RTT, 1);
    assert!(windows[0] > first && windows[0] <= first * 17 / 10, "{first} to {windows:?}");
}

#[test]
fn the_cube_root_is_the_largest_whole_number_whose_cube_fits() {
    for root in [0_u128, 1, 2, 9, 1000, (1 << 31) - 1, 1 << 31, (1 << 35) - 1] {
        let expected = i64::try_from(root).unwrap();
        assert_eq!(cube_root(root.pow(3)), expected);
        assert_eq!(cube_root((root + 1).pow(3) - 1), expected);
    }
}

#[test]
fn fine_units_are_exact_to_a_microsecond() {
    assert_eq!(fine(Duration::from_secs(1)), 1 << 20);
    assert_eq!(fine(Duration::from_secs(864_000)), 864_000 << 20);
    assert_eq!(fine(Duration::from_nanos(u64::MAX)), 864_000 << 20);
    assert_eq!(fine(Duration::from_micros(1)), 1);
}
