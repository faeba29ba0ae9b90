//! Medians, means, and the uncertainty of a ratio of medians.

use nightporter_guest::data::splitmix64;
use serde::Serialize;

/// 10th, 50th and 90th percentile, and the mean: where times have two peaks (the guest had its
/// core, or waited a turn) the median says which peak is higher and the mean what is paid.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quantiles {
    /// One in ten is at or below this.
    pub p10: f64,
    /// The median.
    pub p50: f64,
    /// One in ten is at or above this.
    pub p90: f64,
    /// The arithmetic mean.
    pub mean: f64,
}

impl Quantiles {
    /// Of a sample of at least one, linear between neighbours (type 7 of Hyndman and Fan, 1996).
    /// `None` for an empty sample.
    #[must_use]
    pub fn of(sample: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = sample.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        if sorted.is_empty() {
            return None;
        }
        let at = |per_mille| round3(quantile(&sorted, per_mille));
        let mean = round3(sorted.iter().sum::<f64>() / sorted.len() as f64);
        Some(Self { p10: at(100), p50: at(500), p90: at(900), mean })
    }
}

/// The same for any percentile, in thousandths.
pub(crate) fn percentile(sample: &[f64], per_mille: usize) -> Option<f64> {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    (!sorted.is_empty()).then(|| quantile(&sorted, per_mille))
}

/// Of a sorted sample of at least one, linear between neighbours.
fn quantile(sorted: &[f64], per_mille: usize) -> f64 {
    let last = sorted.len() - 1;
    let (low, rest) = (last * per_mille / 1000, last * per_mille % 1000);
    let high = (low + 1).min(last);
    sorted[low] + (sorted[high] - sorted[low]) * rest as f64 / 1000.0
}

/// Microseconds and bytes per millisecond are as fine as a result needs to be.
pub(crate) fn round3(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// How many times faster, with the interval that 95 of 100 such runs would give.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ratio {
    /// Median over median.
    pub ratio: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// With fewer pairs no interval holds the median 95 times in 100: all of five lie on one side of it
/// in 2 of 32 cases (the sign test).
const PAIRS_LEAST: usize = 6;

/// Resamples of a bootstrap. The ends of the interval lie beyond 50 of them each.
const RESAMPLES: usize = 2000;

impl Ratio {
    /// The median of the first over the median of the second, of pairs that belong together (the
    /// same round, the same moment of the guests' cycle). The interval is the percentile bootstrap
    /// over pairs (Efron and Tibshirani, 1993, chapter 13), from 0 to infinity if there are fewer
    /// than six. `None` without pairs.
    #[must_use]
    pub fn of_medians(pairs: &[(f64, f64)]) -> Option<Self> {
        if pairs.is_empty() {
            return None;
        }
        let mut random = 0x6e70; // the same numbers give the same interval
        let mut column = Vec::with_capacity(pairs.len());
        let mut median = |picks: &[usize], of: fn(&(f64, f64)) -> f64| {
            column.clear();
            column.extend(picks.iter().map(|&i| of(&pairs[i])));
            column.sort_by(f64::total_cmp);
            quantile(&column, 500)
        };
        let mut ratio = |picks: &[usize]| median(picks, |p| p.0) / median(picks, |p| p.1);
        let all: Vec<usize> = (0..pairs.len()).collect();
        if pairs.len() < PAIRS_LEAST {
            return Some(Self { ratio: round3(ratio(&all)), low: 0.0, high: f64::INFINITY });
        }
        let mut picks = all.clone();
        let mut ratios: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                picks.fill_with(|| {
                    let pick = splitmix64(&mut random) % pairs.len() as u64;
                    usize::try_from(pick).expect("below a length")
                });
                ratio(&picks)
            })
            .collect();
        ratios.sort_by(f64::total_cmp);
        let [low, high] = [25, 975].map(|per_mille| round3(quantile(&ratios, per_mille)));
        Some(Self { ratio: round3(ratio(&all)), low, high })
    }

    /// This ratio over another of other transfers. The interval is put together from both, which
    /// are independent, on the scale of logarithms (Zou and Donner, Statistics in Medicine 27,
    /// 2008: how far each estimate is from the end that counts, squared and added).
    #[must_use]
    pub fn over(self, other: Self) -> Self {
        let log = |ratio: f64, end: f64| (ratio / end).ln();
        let ratio = self.ratio / other.ratio;
        let below = f64::hypot(log(self.ratio, self.low), log(other.ratio, other.high));
        let above = f64::hypot(log(self.ratio, self.high), log(other.ratio, other.low));
        let (low, high) = (ratio * (-below).exp(), ratio * above.exp());
        Self { ratio: round3(ratio), low: round3(low), high: round3(high) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_neighbours() {
        let quantiles = Quantiles::of((0..=10).map(f64::from)).expect("not empty");
        assert_eq!(quantiles, Quantiles { p10: 1.0, p50: 5.0, p90: 9.0, mean: 5.0 });
        let two = Quantiles::of([4.0, 2.0]).expect("not empty");
        assert_eq!(two, Quantiles { p10: 2.2, p50: 3.0, p90: 3.8, mean: 3.0 });
        assert_eq!(Quantiles::of([]), None);
    }

    #[test]
    fn a_ratio_that_is_the_same_in_all_pairs_is_certain() {
        let pairs: Vec<_> = (1..40).map(|i| (f64::from(3 * i), f64::from(i))).collect();
        let ratio = Ratio::of_medians(&pairs).expect("pairs");
        assert_eq!(ratio, Ratio { ratio: 3.0, low: 3.0, high: 3.0 });
        assert_eq!(Ratio::of_medians(&[]), None);
    }

    #[test]
    fn a_ratio_of_ratios_is_less_sure_than_each() {
        let sure = Ratio { ratio: 2.0, low: 2.0, high: 2.0 };
        let twice = Ratio { ratio: 4.0, low: 2.0, high: 8.0 };
        assert_eq!(twice.over(sure), Ratio { ratio: 2.0, low: 1.0, high: 4.0 });
        assert_eq!(sure.over(twice), Ratio { ratio: 0.5, low: 0.25, high: 1.0 });
        let both = twice.over(twice);
        assert_eq!((both.ratio, both.low), (1.0, round3(0.5_f64.powf(2.0_f64.sqrt()))));
        let few = Ratio { ratio: 2.0, low: 0.0, high: f64::INFINITY };
        assert_eq!(few.over(sure), Ratio { ratio: 1.0, low: 0.0, high: f64::INFINITY });
    }

    #[test]
    fn five_pairs_say_nothing_of_the_median() {
        let ratio = Ratio::of_medians(&[(1.0, 2.0); 5]).expect("pairs");
        assert_eq!(ratio, Ratio { ratio: 0.5, low: 0.0, high: f64::INFINITY });
        let ratio = Ratio::of_medians(&[(1.0, 2.0); 6]).expect("pairs");
        assert_eq!(ratio, Ratio { ratio: 0.5, low: 0.5, high: 0.5 });
    }

    #[test]
    fn the_interval_of_noise_holds_one_and_narrows_with_more_pairs() {
        let mut random = 7;
        let mut noise = |n: usize| -> Vec<(f64, f64)> {
            let mut one = || 1000.0 + (splitmix64(&mut random) % 1000) as f64;
            (0..n).map(|_| (one(), one())).collect()
        };
        let (few, many) = (noise(12), noise(600));
        let [few, many] = [few, many].map(|pairs| Ratio::of_medians(&pairs).expect("pairs"));
        for interval in [few, many] {
            assert!((interval.low..=interval.high).contains(&1.0), "{interval:?}");
            assert!((interval.low..=interval.high).contains(&interval.ratio), "{interval:?}");
        }
        assert!(many.high - many.low < (few.high - few.low) / 2.0, "{few:?} {many:?}");
    }

    #[test]
    fn a_median_that_jumps_between_two_peaks_has_a_wide_interval() {
        let pairs: Vec<_> = (0..20).map(|i| (if i % 2 == 0 { 5.0 } else { 60.0 }, 5.0)).collect();
        let ratio = Ratio::of_medians(&pairs).expect("pairs");
        assert!(ratio.low < 2.0 && ratio.high > 10.0, "{ratio:?}");
    }
}
