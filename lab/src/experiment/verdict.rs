//! Conditions of an experiment, and the verdicts on them.
//!
//! A bound on a median is kept or broken by the median ([`Check::of_median`]). A bound on a ratio
//! may be judged by all of its interval instead ([`Check::of_interval`]): it is kept if the whole
//! interval is within the bound, broken if all of it is beyond, and else not decided, for a longer
//! run may decide either way. All show their intervals.

use serde::Serialize;

use super::stats::Ratio;

/// The wanted bound of a number.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wanted {
    /// No less.
    AtLeast(f64),
    /// No more.
    AtMost(f64),
    /// Neither less nor more.
    Between(f64, f64),
}

impl Wanted {
    fn holds(self, value: f64) -> bool {
        let (least, most) = self.bounds();
        (least..=most).contains(&value)
    }

    const fn bounds(self) -> (f64, f64) {
        match self {
            Self::AtLeast(least) => (least, f64::INFINITY),
            Self::AtMost(most) => (f64::NEG_INFINITY, most),
            Self::Between(least, most) => (least, most),
        }
    }

    /// Of what a run can tell.
    fn as_far_as(self, ratio: Ratio) -> Verdict {
        let (least, most) = self.bounds();
        if self.holds(ratio.low) && self.holds(ratio.high) {
            Verdict::Kept
        } else if ratio.high < least || ratio.low > most {
            Verdict::Broken
        } else {
            Verdict::NotDecided
        }
    }
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(least) => write!(f, "at least {least}"),
            Self::AtMost(most) => write!(f, "at most {most}"),
            Self::Between(least, most) => write!(f, "from {least} to {most}"),
        }
    }
}

/// The verdict on a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It was kept.
    Kept,
    /// The bound is within the interval.
    NotDecided,
    /// It was not.
    Broken,
}

impl Verdict {
    /// For people.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Kept => "yes",
            Self::NotDecided => "not decided",
            Self::Broken => "NO",
        }
    }
}

/// One condition and its result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// The condition.
    pub what: String,
    /// The measured value, in the condition's unit.
    pub measured: f64,
    /// Its 95 % interval, where it is a ratio of medians.
    pub interval: Option<[f64; 2]>,
    /// The bound that keeps it.
    pub wanted: Wanted,
    /// The value of the paper that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paper: Option<&'static str>,
    /// The verdict.
    pub verdict: Verdict,
    /// The bound of the number, if that is known and the condition was missed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<&'static str>,
}

impl Check {
    /// Of a number that one look decides.
    #[must_use]
    pub fn of(what: impl Into<String>, measured: f64, wanted: Wanted) -> Self {
        let verdict = if wanted.holds(measured) { Verdict::Kept } else { Verdict::Broken };
        let (what, interval, paper, bound) = (what.into(), None, None, None);
        Self { what, measured, interval, wanted, paper, verdict, bound }
    }

    /// Of a ratio, by its medians.
    #[must_use]
    pub fn of_median(what: impl Into<String>, ratio: Ratio, wanted: Wanted) -> Self {
        let interval = Some([ratio.low, ratio.high]);
        Self { interval, ..Self::of(what, ratio.ratio, wanted) }
    }

    /// Of a ratio, by its interval.
    #[must_use]
    pub fn of_interval(what: impl Into<String>, ratio: Ratio, wanted: Wanted) -> Self {
        Self { verdict: wanted.as_far_as(ratio), ..Self::of_median(what, ratio, wanted) }
    }

    /// Says why, if it was missed.
    #[must_use]
    pub fn bounded_by(self, bound: &'static str) -> Self {
        Self { bound: (self.verdict == Verdict::Broken).then_some(bound), ..self }
    }
}

impl std::fmt::Display for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, measured, wanted, .. } = self;
        write!(f, "  {:11}  {what}: {measured:.2}", self.verdict.word())?;
        if let Some([low, high]) = self.interval {
            write!(f, " [{low:.2}, {high:.2}]")?;
        }
        write!(f, ", {wanted}")?;
        if let Some(paper) = self.paper {
            write!(f, " (paper: {paper})")?;
        }
        match self.bound {
            Some(bound) => write!(f, "\n               What bounds it: {bound}."),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_kept_or_broken_by_its_median_or_by_its_whole_interval() {
        let ratio = |low, ratio, high| Ratio { ratio, low, high };
        let both = |ratio, wanted| {
            let checks =
                [Check::of_median("", ratio, wanted), Check::of_interval("", ratio, wanted)];
            checks.map(|check| check.verdict)
        };
        use Verdict::{Broken, Kept, NotDecided};
        assert_eq!(both(ratio(2.8, 2.8, 2.8), Wanted::AtLeast(2.7)), [Kept, Kept]);
        assert_eq!(both(ratio(2.6, 2.8, 2.9), Wanted::AtLeast(2.7)), [Kept, NotDecided]);
        assert_eq!(both(ratio(2.5, 2.6, 2.65), Wanted::AtLeast(2.7)), [Broken, Broken]);
        assert_eq!(both(ratio(0.0, 2.8, f64::INFINITY), Wanted::AtLeast(2.7)), [Kept, NotDecided]);
        assert_eq!(both(ratio(0.4, 0.5, 0.6), Wanted::AtMost(0.5)), [Kept, NotDecided]);
        assert_eq!(both(ratio(0.51, 0.6, 0.7), Wanted::AtMost(0.5)), [Broken, Broken]);
        assert_eq!(both(ratio(0.96, 1.0, 1.04), Wanted::Between(0.95, 1.05)), [Kept, Kept]);
        assert_eq!(both(ratio(1.06, 1.07, 1.08), Wanted::Between(0.95, 1.05)), [Broken, Broken]);
    }

    #[test]
    fn a_check_says_what_bounds_it_only_if_it_was_missed() {
        let missed = Check::of("rate", 1.0, Wanted::AtLeast(2.0)).bounded_by("the core");
        assert_eq!(
            missed.to_string(),
            "  NO           rate: 1.00, at least 2\n               What bounds it: the core."
        );
        let kept = Check::of("rate", 2.0, Wanted::AtLeast(2.0)).bounded_by("the core");
        assert_eq!((kept.bound, kept.to_string().lines().count()), (None, 1));
    }
}
