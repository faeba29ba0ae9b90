//! Bytes in intervals of equal length: throughput at one time scale, and its burstiness.
//!
//! Source: "Virtual Machine Effects on Network Traffic Dynamics", section 4.1. Burstiness is the
//! coefficient of variation σ/μ of the bytes acknowledged in each interval of 60 ms, a round trip
//! there, over the life of a connection (Figure 8). Figure 9 shows the same at 60 ms and at 1 s.

use crate::time::{Duration, Instant};

/// Intervals whose bytes are kept, the newest: 15 s at 60 ms.
const KEPT: usize = 256;

/// Bytes of one kind by interval. The first interval begins with the first bytes.
#[derive(Clone, Debug)]
pub struct Rate {
    interval: Duration,
    first: Option<Instant>,
    /// Whole intervals that are over.
    over: u64,
    /// Bytes of the interval that is not over.
    bytes: u64,
    sum: u64,
    squares: u128,
    kept: [u32; KEPT],
}

impl Rate {
    pub(super) const fn new(interval: Duration) -> Self {
        Self { interval, first: None, over: 0, bytes: 0, sum: 0, squares: 0, kept: [0; KEPT] }
    }

    /// The length of an interval.
    #[must_use]
    pub const fn interval(&self) -> Duration {
        self.interval
    }

    /// Whole intervals that are over.
    #[must_use]
    pub const fn intervals(&self) -> u64 {
        self.over
    }

    /// Mean bytes of an interval that is over; `None` before the first.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "statistics")]
    pub fn mean(&self) -> Option<f64> {
        (self.over > 0).then(|| self.sum as f64 / self.over as f64)
    }

    /// σ/μ of the bytes of the intervals that are over; `None` if there are fewer than two, or
    /// nothing in them.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "statistics")]
    pub fn variation(&self) -> Option<f64> {
        let mean = self.mean().filter(|mean| self.over > 1 && *mean > 0.0)?;
        let variance = self.squares as f64 / self.over as f64 - mean * mean;
        Some(variance.max(0.0).sqrt() / mean)
    }

    /// The newest intervals, the oldest first: when each began, after the first bytes, and its
    /// bytes.
    pub fn series(&self) -> impl Iterator<Item = (Duration, u32)> {
        let oldest = self.over.saturating_sub(KEPT as u64);
        (oldest..self.over).map(|n| (self.interval.saturating_mul(n), self.kept[place(n)]))
    }

    /// So many bytes more.
    pub(super) fn add(&mut self, now: Instant, bytes: u64) {
        let first = *self.first.get_or_insert(now);
        let current = now.since(first).as_nanos() / self.interval.as_nanos().max(1);
        if current > self.over {
            self.end_intervals(current);
        }
        self.bytes += bytes;
    }

    fn end_intervals(&mut self, current: u64) {
        self.sum += self.bytes;
        self.squares += u128::from(self.bytes) * u128::from(self.bytes);
        self.kept[place(self.over)] = u32::try_from(self.bytes).unwrap_or(u32::MAX);
        let empty = (self.over + 1)..current;
        let forgotten = (empty.end - empty.start).saturating_sub(KEPT as u64);
        (empty.start + forgotten..empty.end).for_each(|n| self.kept[place(n)] = 0);
        (self.over, self.bytes) = (current, 0);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "below KEPT")]
const fn place(interval: u64) -> usize {
    (interval % KEPT as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(bytes: &[(u64, u64)]) -> Rate {
        let mut rate = Rate::new(Duration::from_millis(60));
        for (ms, bytes) in bytes {
            rate.add(Instant::from_millis(1000 + ms), *bytes);
        }
        rate
    }

    #[test]
    fn a_steady_flow_does_not_vary_and_one_of_bursts_does() {
        let steady: Vec<_> = (0..100).map(|n| (n * 60, 1000)).collect();
        let rate = after(&steady);
        assert_eq!((rate.mean(), rate.variation()), (Some(1000.0), Some(0.0)));
        // All of four intervals in one: the variance is 3 times the square of the mean.
        let bursts: Vec<_> = (0..101).map(|n| (n * 240, 4000)).collect();
        let rate = after(&bursts);
        assert_eq!((rate.intervals(), rate.mean()), (400, Some(1000.0)));
        assert!((rate.variation().unwrap() - 3_f64.sqrt()).abs() < 1e-9);
    }

    #[test]
    fn the_interval_that_is_not_over_does_not_count() {
        let rate = after(&[(0, 10), (59, 10), (60, 7), (119, 7), (130, 9)]);
        let series: Vec<_> = rate.series().map(|(at, n)| (at.as_millis(), n)).collect();
        assert_eq!((series, rate.mean()), (vec![(0, 20), (60, 14)], Some(17.0)));
        assert_eq!(after(&[(0, 10), (10, 5)]).variation(), None);
    }

    #[test]
    fn a_long_pause_is_so_many_empty_intervals_and_takes_no_time() {
        let rate = after(&[(0, 10), (60, 11), (3_600_000_000_000, 5), (3_600_000_000_060, 5)]);
        assert_eq!(rate.intervals(), 60_000_000_001);
        assert_eq!(rate.series().map(|(_, n)| n).sum::<u32>(), 5);
    }
}
