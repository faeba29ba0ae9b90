//! Samples by their size.

use serde::{Deserialize, Serialize};

/// How many samples have which size, and their sum.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Histogram {
    /// The highest sample of each bucket in nanoseconds, ascending, and how many are in it.
    pub buckets: Vec<(u64, u64)>,
    /// How many are above all of them.
    pub above: u64,
    /// The sum of all samples, in nanoseconds.
    pub sum_ns: u64,
}

impl Histogram {
    /// How many samples there are.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.buckets.iter().map(|(_, n)| n).sum::<u64>() + self.above
    }

    /// The size, in nanoseconds, below which the share `q` of all samples is: within a bucket by
    /// a straight line, and the highest bound for those above it, as Prometheus has it. `None`:
    /// there is no sample.
    #[must_use]
    pub fn quantile_ns(&self, q: f64) -> Option<f64> {
        let rank = q * self.samples() as f64;
        let (mut below, mut from) = (0.0, 0.0);
        for &(to, n) in &self.buckets {
            let (to, n) = (to as f64, n as f64);
            if below + n >= rank && n > 0.0 {
                return Some(from + (to - from) * (rank - below) / n);
            }
            (below, from) = (below + n, to);
        }
        (self.above > 0).then_some(from)
    }
}
