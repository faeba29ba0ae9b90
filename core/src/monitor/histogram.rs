//! Times in bins of equal ratio, eight to an octave, from 1 µs to 2 minutes.
//!
//! A quantile is the upper edge of its bin, so it is at most an eighth too large.

use crate::time::Duration;

/// Bins of an octave.
const PER_OCTAVE: u32 = 8;
/// Shorter times, in nanoseconds as a power of two, are in the first bin.
const FIRST_BITS: u32 = 10;
/// Octaves: 2^37 ns are 137 s. Longer times are in the last bin.
const OCTAVES: u32 = 27;
const BINS: usize = 1 + (OCTAVES * PER_OCTAVE) as usize;

/// A distribution of times.
#[derive(Clone, Debug)]
pub struct Histogram {
    bins: [u32; BINS],
    count: u64,
    sum_ns: u64,
    longest: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { bins: [0; BINS], count: 0, sum_ns: 0, longest: Duration::ZERO }
    }
}

impl Histogram {
    /// Times in it.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The longest of them.
    #[must_use]
    pub const fn longest(&self) -> Duration {
        self.longest
    }

    /// All of them together.
    #[must_use]
    pub const fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// Their mean; `None` without any.
    #[must_use]
    pub fn mean(&self) -> Option<Duration> {
        self.sum_ns.checked_div(self.count).map(Duration::from_nanos)
    }

    /// The time that `share` (0 to 1) of them do not exceed; `None` without any.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a rank among counts")]
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let (mut below, wanted) = (0, share * self.count as f64);
        let reached = |bin: &(Duration, u32)| {
            below += u64::from(bin.1);
            below as f64 >= wanted
        };
        self.bins().find(reached).map(|(edge, _)| edge.min(self.longest))
    }

    /// The bins that are not empty, in order: the time below which theirs are, and how many.
    pub fn bins(&self) -> impl Iterator<Item = (Duration, u32)> {
        let bins = (0_u32..).zip(self.bins);
        bins.filter(|(_, n)| *n > 0).map(|(at, n)| (Duration::from_nanos(edge(at)), n))
    }

    /// Adds a time.
    pub fn add(&mut self, time: Duration) {
        let bin = &mut self.bins[bin_of(time.as_nanos())];
        *bin = bin.saturating_add(1);
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(time.as_nanos());
        self.longest = self.longest.max(time);
    }

    /// Adds all times of another one.
    pub fn merge(&mut self, other: &Self) {
        for (bin, n) in self.bins.iter_mut().zip(other.bins) {
            *bin = bin.saturating_add(n);
        }
        self.count += other.count;
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.longest = self.longest.max(other.longest);
    }
}

fn bin_of(ns: u64) -> usize {
    let Some(top) = ns.checked_ilog2().filter(|top| *top >= FIRST_BITS) else { return 0 };
    let within = (ns >> (top - PER_OCTAVE.ilog2())) & u64::from(PER_OCTAVE - 1);
    let bin = u64::from((top - FIRST_BITS) * PER_OCTAVE) + within + 1;
    usize::try_from(bin).unwrap_or(BINS).min(BINS - 1)
}

/// Nanoseconds below which the times of a bin are.
fn edge(bin: u32) -> u64 {
    let (octave, within) = (bin / PER_OCTAVE, bin % PER_OCTAVE);
    (1 << (FIRST_BITS + octave)) / u64::from(PER_OCTAVE) * u64::from(PER_OCTAVE + within)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_time_is_below_the_edge_of_its_bin_and_within_an_eighth(ns in 0_u64..1 << 37) {
            let bin = u32::try_from(bin_of(ns)).unwrap();
            prop_assert!(ns < edge(bin));
            prop_assert!(bin == 0 || edge(bin - 1) <= ns);
            prop_assert!(bin == 0 || edge(bin) * 8 <= edge(bin - 1) * 9);
        }
    }

    #[test]
    fn quantiles_are_those_of_the_times() {
        let mut h = Histogram::default();
        assert_eq!((h.mean(), h.quantile(0.5)), (None, None));
        (1..=100).for_each(|ms| h.add(Duration::from_millis(ms)));
        h.add(Duration::from_secs(1000));
        let median = h.quantile(0.5).unwrap();
        assert!((51..=58).contains(&median.as_millis()), "{median:?}");
        assert_eq!(h.quantile(1.0), Some(Duration::from_nanos(1 << 37)), "the last bin's edge");
        assert_eq!(h.longest(), Duration::from_secs(1000));
        let mut twice = h.clone();
        twice.merge(&h);
        assert_eq!((twice.count(), twice.mean()), (202, h.mean()));
    }
}
