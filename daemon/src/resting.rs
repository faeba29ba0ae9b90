//! Sources of events that rest for a while. A listener that cannot accept, for example because the
//! process has no descriptor left for another connection, stays readable: it would be tried again
//! and again, and log it each time. Instead it is left alone for a while. So is a front-end whose
//! messages take more than their share. Queues without a notification are looked at in the same
//! way, more often.

use nightporter_core::time::{Duration, Instant};

/// How long they rest.
const REST: Duration = Duration::from_secs(1);

/// The sources that rest now: listeners, front-ends or queues.
#[derive(Debug)]
pub(crate) struct Resting<T> {
    list: Vec<T>,
    /// How long, or less.
    interval: Duration,
    /// When all of them are woken.
    due: Instant,
}

impl<T: PartialEq> Resting<T> {
    pub(crate) const fn new() -> Self {
        Self::for_at_most(REST)
    }

    pub(crate) const fn for_at_most(interval: Duration) -> Self {
        Self { list: Vec::new(), interval, due: Instant::ZERO }
    }

    /// When to [`Self::take_due`].
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        (!self.list.is_empty()).then_some(self.due)
    }

    /// It rests from now on.
    pub(crate) fn add(&mut self, now: Instant, who: T) {
        if self.list.is_empty() {
            self.due = now + self.interval;
        }
        if !self.list.contains(&who) {
            self.list.push(who);
        }
    }

    /// Removes those that no longer exist.
    pub(crate) fn forget(&mut self, is_gone: impl Fn(&T) -> bool) {
        self.list.retain(|who| !is_gone(who));
    }

    /// Of those that have rested, those for which this is true rest again.
    pub(crate) fn keep_due(&mut self, now: Instant, again: impl FnMut(&T) -> bool) {
        if now >= self.due {
            self.list.retain(again);
            self.due = now + self.interval;
        }
    }

    /// Those that have rested.
    #[must_use]
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<T> {
        if now >= self.due { std::mem::take(&mut self.list) } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_cannot_go_on_is_woken_after_a_second_and_together_with_others() {
        let (mut resting, start) = (Resting::new(), Instant::from_secs(1000));
        assert_eq!(resting.poll_timeout(), None);
        resting.add(start, 'a');
        resting.add(start + Duration::from_millis(600), 'b');
        resting.add(start + Duration::from_millis(700), 'a');
        assert_eq!(resting.poll_timeout(), Some(start + REST));
        assert_eq!(resting.take_due(start + Duration::from_millis(999)), []);
        assert_eq!(resting.take_due(start + REST), ['a', 'b']);
        assert_eq!(resting.poll_timeout(), None);
    }
}
