//! Lateness: what a path does to single frames with data besides losing them. The frames behind a
//! late one overtake it.

use nightporter_guest::data::splitmix64;
use serde::Serialize;
use std::time::Duration;

use super::nanos;

/// Behind so long a pause, ns, another transfer begins.
const PAUSE_NS: u64 = 200_000_000;

/// The kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Late {
    /// Every frame arrives in its order.
    #[default]
    Never,
    /// One in so many, by chance, arrives so much later.
    OneOf(u64, Duration),
    /// This frame of a transfer alone does.
    Frame(u64, Duration),
    /// Each does, by any time up to this.
    Jitter(Duration),
    /// None is late, but in each period, counted from the transfer's beginning, the line stands
    /// still for so long at the end.
    Stands {
        /// The period.
        each: Duration,
        /// The time for which nothing moves.
        still: Duration,
    },
}

/// The state of it.
#[derive(Debug, Default)]
pub(super) struct Lateness {
    random: u64,
    /// The transfer's frames, its beginning, and its newest frame, ns.
    frames: u64,
    begun: u64,
    newest: u64,
}

impl Lateness {
    /// A frame with data is accepted at `now`, and its last bit would leave at `leaves`: when it
    /// does, and how much later it arrives, ns.
    pub(super) fn next(&mut self, late: Late, now: u64, leaves: u64) -> (u64, u64) {
        if now > self.newest + PAUSE_NS {
            (self.frames, self.begun) = (0, now);
        }
        self.frames += 1;
        self.newest = leaves;
        let random = splitmix64(&mut self.random) >> 11;
        match late {
            Late::OneOf(many, by) if random.is_multiple_of(many) => (leaves, nanos(by)),
            Late::Frame(frame, by) if self.frames == frame => (leaves, nanos(by)),
            Late::Jitter(most) => (leaves, random % nanos(most)),
            Late::Stands { each, still } => {
                let (each, into) = (nanos(each), leaves.saturating_sub(self.begun));
                let stands = into % each >= each - nanos(still);
                self.newest = if stands { leaves + each - into % each } else { leaves };
                (self.newest, 0)
            }
            Late::Never | Late::OneOf(..) | Late::Frame(..) => (leaves, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn all(late: Late, frames: u64) -> Vec<(u64, u64)> {
        let mut state = Lateness::default();
        (1..=frames).map(|i| state.next(late, 900 * MS, 900 * MS + i * MS)).collect()
    }

    #[test]
    fn a_share_of_the_frames_is_late_or_one_or_each_by_some_time() {
        let by = Duration::from_millis(30);
        let count = |late| all(late, 10_000).iter().filter(|(_, by)| *by == 30 * MS).count();
        assert!((70..130).contains(&count(Late::OneOf(100, by))));
        assert_eq!((count(Late::Frame(7, by)), count(Late::Never)), (1, 0));
        let jitter = all(Late::Jitter(by), 1000);
        assert!(jitter.iter().all(|(_, by)| *by < 30 * MS));
        assert!(jitter.iter().any(|(_, by)| *by > 25 * MS));
    }

    #[test]
    fn a_line_stands_still_at_the_end_of_each_period_of_a_transfer() {
        let second = Duration::from_secs(1);
        let all = all(Late::Stands { each: 4 * second, still: second }, 4000);
        assert_eq!(all[2998], (3899 * MS, 0));
        assert_eq!((all[2999], all[3998]), ((4900 * MS, 0), (4900 * MS, 0)));
        assert_eq!(all[3999].0, 4900 * MS);
    }

    #[test]
    fn behind_a_pause_frames_count_anew() {
        let (mut state, late) = (Lateness::default(), Late::Frame(1, Duration::from_millis(3)));
        let mut next = |at| state.next(late, at, at).1;
        assert_eq!([next(900 * MS), next(901 * MS), next(1102 * MS)], [3 * MS, 0, 3 * MS]);
    }
}
