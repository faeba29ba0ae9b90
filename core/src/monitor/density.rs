//! ACK inter-arrival density: times between ACKs that acknowledge something new.
//!
//! Source: "Virtual Machine Effects on Network Traffic Dynamics", Figures 2 to 6. Its bars have
//! 0.025 ms, centred at 0.0125, 0.0375, ... ms; a full segment takes 0.12 ms at 100 Mbit/s. ACKs of
//! the leftmost bar were **compressed** on their way: they arrive together although the segments
//! that they acknowledge did not. Quick ACKs and the delayed-ACK timer fill the two leftmost bars
//! as well, so compression by a VM is the excess over the same measurement without it.

use super::histogram::Histogram;
use crate::time::{Duration, Instant};

/// Width of a bar.
pub const BAR: Duration = Duration::from_micros(25);
/// Bars: 4 ms. Longer times are counted beyond them.
pub const BARS: usize = 160;

/// The ACKs of one direction of data at one place.
#[derive(Clone, Debug)]
pub struct AckDensity {
    last: Option<Instant>,
    bars: [u32; BARS],
    /// The same times in bins of equal ratio, and those beyond the bars.
    gaps: Histogram,
}

impl Default for AckDensity {
    fn default() -> Self {
        Self { last: None, bars: [0; BARS], gaps: Histogram::default() }
    }
}

impl AckDensity {
    /// Times in each bar of [`BAR`], from the left.
    #[must_use]
    pub const fn bars(&self) -> &[u32; BARS] {
        &self.bars
    }

    /// All times.
    #[must_use]
    pub const fn gaps(&self) -> &Histogram {
        &self.gaps
    }

    /// Share of the times that are in the first `bars` bars; `None` without times. 1 for the ACKs
    /// that the study calls compressed.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    pub fn share_of_first(&self, bars: usize) -> Option<f64> {
        let first: u64 = self.bars.iter().take(bars).map(|n| u64::from(*n)).sum();
        (self.gaps.count() > 0).then(|| first as f64 / self.gaps.count() as f64)
    }

    /// Adds all times of another one.
    pub fn merge(&mut self, other: &Self) {
        for (bar, n) in self.bars.iter_mut().zip(other.bars) {
            *bar = bar.saturating_add(n);
        }
        self.gaps.merge(&other.gaps);
    }

    /// An ACK of something new.
    pub(super) fn on_ack(&mut self, now: Instant) {
        if let Some(last) = self.last.replace(now) {
            let gap = now.since(last);
            self.gaps.add(gap);
            let bar = usize::try_from(gap.as_nanos() / BAR.as_nanos()).unwrap_or(BARS);
            if let Some(bar) = self.bars.get_mut(bar) {
                *bar = bar.saturating_add(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_centred_where_the_study_has_them() {
        let mut density = AckDensity::default();
        assert_eq!(density.share_of_first(1), None);
        let mut now = Instant::from_secs(7);
        for us in [0, 24, 25, 49, 250, 3_999, 4_000] {
            now = now + Duration::from_micros(us);
            density.on_ack(now);
        }
        let bars: Vec<_> = (0..).zip(density.bars).filter(|(_, n)| *n > 0).collect();
        assert_eq!(bars, [(0, 1), (1, 2), (10, 1), (159, 1)]);
        assert_eq!(density.gaps().count(), 6);
        assert_eq!(density.share_of_first(2), Some(0.5));
    }
}
