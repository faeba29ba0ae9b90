//! Pacing: a window does not leave as one burst, even if G has just handed over a megabyte.
//!
//! The rate is a little more than the window in a round trip, so in the long run acknowledgements
//! and not the pacer decide. Credit for unused time is bounded by a burst, the bytes that the path
//! takes in a millisecond, up to a super-segment. On a path with a round trip shorter than that no
//! segment waits, because ACKs arrive as soon as a timer would. The exception is data after a
//! pause, for which no ACK is on its way.

use crate::limits::PACED_BURST_MAX as BURST_MAX;
use crate::time::{Duration, Instant};

/// Bursts have the bytes that leave in this time at the paced rate.
const BURST_TIME: Duration = Duration::from_millis(1);

/// How fast, relative to a window in a round trip: a fraction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Gain(pub u64, pub u64);

impl Gain {
    /// Twice as fast: the window doubles in a round trip of slow start.
    pub const SLOW_START: Self = Self(2, 1);
    /// A fifth faster: ACKs that come unevenly must not leave the path idle.
    pub const AVOIDANCE: Self = Self(6, 5);
}

/// When the next segment may leave.
#[derive(Clone, Copy, Debug)]
pub struct Pacer {
    /// Bytes that had left at `at` and were not yet due.
    owed: u64,
    at: Instant,
    /// Time that a byte takes at the newest rate, in 2^-20 ns; zero before the first round trip.
    byte_time: u64,
    /// Bytes that may leave at once, and of a segment.
    burst: u64,
    mss: u64,
}

/// A fraction of a nanosecond: 2^-20.
const FINE_BITS: u32 = 20;
const FINE_MASK: u128 = (1 << FINE_BITS) - 1;
/// Longer round trips and pauses count as 18 minutes: times a gain they fit 64 bits.
const SPAN_MAX: Duration = Duration::from_nanos(1 << 40);
/// A window that no flow has.
const CWND_MAX: u64 = 1 << 40;

fn fine(span: Duration) -> u64 {
    span.min(SPAN_MAX).as_nanos() << FINE_BITS
}

impl Default for Pacer {
    fn default() -> Self {
        Self::new()
    }
}

impl Pacer {
    /// No rate is known: nothing waits.
    #[must_use]
    pub const fn new() -> Self {
        Self { owed: 0, at: Instant::ZERO, byte_time: 0, burst: BURST_MAX, mss: 0 }
    }

    /// It was told a rate.
    #[must_use]
    pub const fn has_rate(&self) -> bool {
        self.byte_time > 0
    }

    /// When the next segment may leave; in the past if nothing waits.
    #[must_use]
    pub fn next(&self) -> Instant {
        let wait = self.owed.saturating_sub(self.burst.saturating_sub(self.mss));
        // Rounded up; the product alone may be longer than 64 bits.
        let time = (u128::from(self.byte_time) * u128::from(wait) + FINE_MASK) >> FINE_BITS;
        self.at + Duration::from_nanos(u64::try_from(time).unwrap_or(u64::MAX))
    }

    /// Bytes that may leave now: a burst, less what has left lately.
    #[must_use]
    pub fn available(&self, now: Instant) -> u64 {
        self.burst.saturating_sub(self.owed(now))
    }

    /// The rate from now on: `gain * cwnd / srtt`.
    pub fn set_rate(&mut self, now: Instant, cwnd: u64, srtt: Duration, gain: Gain, mss: u64) {
        self.settle(now);
        let time = fine(srtt) * gain.1;
        self.byte_time = time / (cwnd.clamp(1, CWND_MAX) * gain.0);
        let in_time = (BURST_TIME.as_nanos() << FINE_BITS) / self.byte_time.max(1);
        let most = if srtt < BURST_TIME { u64::MAX } else { BURST_MAX };
        self.burst = in_time.clamp(2 * mss, most.max(2 * mss));
        self.mss = mss;
    }

    /// Nothing has left since `sent_at`. Behind a pause a short path's window waits for its pace
    /// too, but for a burst, until the next rate: that of the next ACK. The bytes under way may be
    /// one segment whose ACK R delays.
    pub fn on_idle(&mut self, now: Instant, sent_at: Instant) {
        if now.since(sent_at) > BURST_TIME && self.has_rate() {
            self.burst = self.burst.min(BURST_MAX.max(2 * self.mss));
        }
    }

    /// So much has left.
    pub fn on_sent(&mut self, now: Instant, bytes: u64) {
        self.settle(now);
        self.owed += bytes;
    }

    fn owed(&self, now: Instant) -> u64 {
        if self.byte_time == 0 {
            return 0;
        }
        if now <= self.at {
            return self.owed; // settled just now
        }
        self.owed.saturating_sub(fine(now.since(self.at)) / self.byte_time)
    }

    fn settle(&mut self, now: Instant) {
        self.owed = self.owed(now);
        self.at = self.at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends segments of `mss` whenever the pacer lets them, and says when each left, in us.
    fn departures(pacer: &mut Pacer, mut now: Instant, mss: u64, count: usize) -> Vec<u64> {
        let start = now;
        let mut left = vec![];
        for _ in 0..count {
            now = now.max(pacer.next());
            assert!(pacer.available(now) >= mss, "{} available", pacer.available(now));
            pacer.on_sent(now, mss);
            left.push(now.since(start).as_nanos() / 1000);
        }
        left
    }

    #[test]
    fn a_window_is_spread_over_its_round_trip() {
        // 100 segments of 1000 bytes in 100 ms, twice as fast: one every 500 us after a burst of
        // two, for a millisecond's worth is two segments.
        let mut pacer = Pacer::new();
        pacer.set_rate(Instant::ZERO, 100_000, Duration::from_millis(100), Gain::SLOW_START, 1000);
        assert_eq!(pacer.available(Instant::from_secs(7)), 2000);
        let left = departures(&mut pacer, Instant::from_secs(7), 1000, 6);
        assert_eq!(left, [0, 0, 500, 1000, 1500, 2000]);
    }

    #[test]
    fn without_a_round_trip_nothing_waits() {
        let mut pacer = Pacer::new();
        assert_eq!(departures(&mut pacer, Instant::from_secs(7), 1448, 10), [0; 10]);
    }

    #[test]
    fn on_a_short_path_a_window_is_the_burst() {
        for (srtt_us, waits) in [(999, false), (1000, true)] {
            let (mut pacer, now) = (Pacer::new(), Instant::from_secs(7));
            let srtt = Duration::from_micros(srtt_us);
            pacer.set_rate(now, 1_000_000, srtt, Gain::AVOIDANCE, 1000);
            let last = departures(&mut pacer, now, 1000, 1000).pop();
            assert_eq!(last.expect("departures") > 0, waits, "{srtt_us} us");
        }
    }

    #[test]
    fn a_pause_buys_a_burst_and_no_more() {
        let mut pacer = Pacer::new();
        pacer.set_rate(Instant::ZERO, 1_250_000, Duration::from_millis(10), Gain::AVOIDANCE, 1448);
        pacer.on_sent(Instant::from_secs(7), 1448);
        // 150 KB in a millisecond are more than a burst.
        assert_eq!(pacer.available(Instant::from_secs(8)), BURST_MAX);
        let left = departures(&mut pacer, Instant::from_secs(8), 1448, 100);
        let at_once = left.iter().filter(|us| **us == 0).count() as u64;
        assert_eq!(at_once, BURST_MAX / 1448);
        // 100 segments at 1.2 * 125 MB/s take 965 us, less what the burst was.
        assert!((500..=560).contains(left.last().unwrap()), "{left:?}");
    }

    #[test]
    fn on_a_short_path_a_whole_window_is_less_than_a_burst() {
        let mut pacer = Pacer::new();
        pacer.set_rate(Instant::ZERO, 14_480, Duration::from_micros(100), Gain::AVOIDANCE, 1448);
        assert_eq!(departures(&mut pacer, Instant::from_secs(7), 1448, 10), [0; 10]);
    }

    #[test]
    fn behind_a_pause_a_burst_holds_two_segments_however_long() {
        let mss = BURST_MAX; // of a guest that hands over super-segments
        let (mut pacer, now) = (Pacer::new(), Instant::from_secs(7));
        pacer.set_rate(now, 100 * mss, Duration::from_micros(100), Gain::AVOIDANCE, mss);
        pacer.on_idle(now, Instant::from_secs(6));
        assert_eq!(pacer.available(now), 2 * mss);
    }

    #[test]
    fn what_left_at_a_slow_rate_is_paid_for_at_the_new_one() {
        let (mut pacer, now) = (Pacer::new(), Instant::from_secs(7));
        pacer.set_rate(now, 1000, Duration::from_millis(100), Gain::AVOIDANCE, 1000);
        pacer.on_sent(now, 3000); // of which 2000 are a burst
        assert_eq!(pacer.next().since(now), Duration::from_nanos(166_666_667));
        pacer.set_rate(now, 100_000, Duration::from_millis(100), Gain::AVOIDANCE, 1000);
        assert_eq!(pacer.next().since(now), Duration::from_nanos(1_666_667));
    }
}
