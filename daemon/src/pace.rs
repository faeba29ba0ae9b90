//! The pace at which the registry is told of a VM.
//!
//! A guest decides how often its listeners change and how often its network card is reset. News for
//! the registry reach all hosts, and etcd keeps each value until it is compacted. So the writes
//! about one VM are limited: [`BURST`] may follow each other, and then there is one per [`REFILL`].

use std::collections::{BTreeMap, BTreeSet};

use nightporter_core::time::{Duration, Instant};

/// More programs than are started one after the other, and more resets than a start of a VM or two
/// makes.
pub(crate) const BURST: u64 = 8;
/// 1,440 times a day.
pub(crate) const REFILL: Duration = Duration::from_secs(60);

/// Those of which the registry is told, and when.
#[derive(Debug)]
pub(crate) struct Pace<K> {
    /// How long a write waits for changes that follow the first.
    merged_for: Duration,
    of: BTreeMap<K, State>,
    /// The writes that wait, by their times.
    due: BTreeSet<(Instant, K)>,
}

/// The memory of one.
#[derive(Debug, Default)]
struct State {
    /// When [`BURST`] writes may follow each other again.
    full: Instant,
    /// When the write that waits is due.
    waits: Option<Instant>,
}

impl<K: Copy + Ord> Pace<K> {
    pub(crate) const fn new(merged_for: Duration) -> Self {
        Self { merged_for, of: BTreeMap::new(), due: BTreeSet::new() }
    }

    /// When the next write is due.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// A write is wanted. `false`: it is one with a write that waits already.
    pub(crate) fn note(&mut self, now: Instant, key: K) -> bool {
        let state = self.of.entry(key).or_default();
        if state.waits.is_some() {
            return false;
        }
        let at = (now + self.merged_for).max(state.full - REFILL.saturating_mul(BURST - 1));
        state.waits = Some(at);
        self.due.insert((at, key));
        true
    }

    /// The writes about `key` so far are forgotten. One that waits is due at once.
    pub(crate) fn forget(&mut self, key: K) {
        let Some(State { waits: Some(at), .. }) = self.of.remove(&key) else { return };
        self.due.remove(&(at, key));
        let at = Instant::ZERO;
        self.due.insert((at, key));
        self.of.insert(key, State { full: at, waits: Some(at) });
    }

    /// The next write that is due. A write that is not `wanted` any more is left out, and does not
    /// count.
    #[must_use]
    pub(crate) fn poll_due(&mut self, now: Instant, wanted: impl Fn(K) -> bool) -> Option<K> {
        while let Some((_, key)) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.pop_first();
            let full = self.of.remove(&key).unwrap_or_default().full;
            let is_wanted = wanted(key);
            let full = if is_wanted { now.max(full) + REFILL } else { full };
            if full > now {
                self.of.insert(key, State { full, waits: None });
            }
            if is_wanted {
                return Some(key);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Instant = Instant::from_secs(1000);

    fn seconds(n: u64) -> Instant {
        START + Duration::from_secs(n)
    }

    /// Writes as often as it may at once.
    fn use_up(pace: &mut Pace<char>) {
        for n in 0..BURST {
            assert!(pace.note(START, 'a'));
            assert_eq!(pace.poll_due(START, |_| true), Some('a'), "{n}");
        }
    }

    #[test]
    fn a_write_without_a_delay_is_due_at_once_eight_times_and_then_once_a_minute() {
        let mut pace = Pace::new(Duration::ZERO);
        use_up(&mut pace);
        assert!(pace.note(START, 'a') && !pace.note(seconds(1), 'a'), "the ninth waits");
        assert_eq!(pace.poll_due(seconds(59), |_| true), None);
        assert_eq!(pace.poll_timeout(), Some(seconds(60)));
        assert!(pace.note(seconds(59), 'b'), "another has its own");
        assert_eq!(pace.poll_due(seconds(59), |_| true), Some('b'));
        assert_eq!(pace.poll_due(seconds(60), |_| true), Some('a'));
        assert_eq!(pace.poll_timeout(), None);
    }

    #[test]
    fn a_write_that_is_not_wanted_when_it_is_due_does_not_count() {
        let mut pace = Pace::new(Duration::ZERO);
        use_up(&mut pace);
        pace.note(START, 'a');
        assert_eq!(pace.poll_due(seconds(61), |_| false), None);
        pace.note(seconds(62), 'a');
        assert_eq!(pace.poll_due(seconds(62), |_| true), Some('a'));
        // Nothing is kept of one that has all of its writes again.
        pace.note(seconds(9999), 'a');
        assert_eq!(pace.poll_due(seconds(9999), |_| false), None);
        assert!(pace.of.is_empty());
    }

    #[test]
    fn a_write_that_waits_is_due_when_the_earlier_ones_are_forgotten() {
        let mut pace = Pace::new(Duration::ZERO);
        use_up(&mut pace);
        pace.note(START, 'a');
        assert_eq!(pace.poll_due(seconds(5), |_| true), None);
        pace.forget('a');
        assert_eq!(pace.poll_due(seconds(5), |_| true), Some('a'));
        assert_eq!(pace.poll_timeout(), None, "once");
        pace.forget('a');
        assert!(pace.of.is_empty());
        pace.note(seconds(5), 'a');
        assert_eq!(pace.poll_due(seconds(5), |_| true), Some('a'), "as if it were another");
    }
}
