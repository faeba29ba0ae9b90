//! How long a guest has run, from its rings alone: what it was given, has seen, and sent.

use std::collections::VecDeque;

use nightporter_core::time::{Duration, Instant};

/// A sign of life is worth so much running time, if so much has passed since the last.
const CREDIT: Duration = Duration::from_millis(10);

/// Running time of one guest ("running time" in `docs/spec.md`): all the time in
/// which it has seen everything, and what its signs of life are worth besides.
#[derive(Clone, Debug)]
pub(crate) struct GuestClock {
    /// Frames in its ring, and of each whether it brought stored bytes: others' frames never end,
    /// and do not keep an idle guest's time standing.
    unseen: VecDeque<bool>,
    /// How many of them did.
    stored: usize,
    /// Since when there are none; `None` also while it has no driver.
    idle_since: Option<Instant>,
    ran: Duration,
    /// Up to when `ran` counts.
    at: Instant,
    has_driver: bool,
    /// Since when its host's worker has had a processor.
    worker_runs_since: Instant,
}

impl Default for GuestClock {
    fn default() -> Self {
        let (ran, at) = (Duration::ZERO, Instant::ZERO);
        Self {
            unseen: VecDeque::new(),
            stored: 0,
            idle_since: Some(at),
            ran,
            at,
            has_driver: true,
            worker_runs_since: at,
        }
    }
}

impl GuestClock {
    /// A frame was put into its ring.
    pub(crate) fn on_given(&mut self, now: Instant) {
        self.settle(now);
        self.unseen.push_back(false);
        self.idle_since = None;
    }

    /// What was put there last brought bytes from the store.
    pub(crate) fn on_stored(&mut self) {
        if let Some(newest) = self.unseen.back_mut() {
            *newest = true;
            self.stored += 1;
        }
    }

    /// It has taken `frames` from its ring.
    pub(crate) fn on_seen(&mut self, now: Instant, frames: usize) {
        self.on_life(now);
        let seen = self.unseen.drain(..frames.min(self.unseen.len()));
        self.stored -= seen.filter(|stored| *stored).count();
        if self.unseen.is_empty() && self.has_driver {
            self.idle_since.get_or_insert(now);
        }
    }

    /// It has sent something.
    pub(crate) fn on_life(&mut self, now: Instant) {
        self.settle(now);
        let since = now.since(self.at);
        self.ran += if since < CREDIT { since } else { CREDIT };
        self.at = now;
    }

    /// What was in its rings is gone, and nothing can be put there.
    pub(crate) fn on_driver_gone(&mut self, now: Instant) {
        self.settle(now);
        self.unseen.clear();
        self.stored = 0;
        (self.idle_since, self.has_driver) = (None, false);
    }

    /// Its rings are there again, and empty. `false`: they were there already, with what is in
    /// them, because a driver that was reset twice before it was back comes back twice.
    #[must_use]
    pub(crate) fn on_driver_back(&mut self, now: Instant) -> bool {
        let was_gone = !std::mem::replace(&mut self.has_driver, true);
        if was_gone {
            self.at = now;
            self.idle_since = Some(now);
        }
        was_gone
    }

    /// Its host's worker waits for a processor, or waited until `since`.
    pub(crate) fn on_worker(&mut self, since: Instant) {
        self.worker_runs_since = since;
    }

    /// Since when it has seen everything, and more could be given.
    #[must_use]
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        self.idle_since
    }

    /// Since when, besides, there is somebody to give it: a worker that shares its processor with
    /// guests does nothing in their slices.
    #[must_use]
    pub(crate) fn served_since(&self) -> Option<Instant> {
        self.idle_since.map(|since| since.max(self.worker_runs_since))
    }

    /// How long it has run.
    #[must_use]
    pub(crate) fn ran(&self, now: Instant) -> Duration {
        let live = if self.runs() { now.since(self.at) } else { Duration::ZERO };
        self.ran + live
    }

    fn runs(&self) -> bool {
        self.has_driver && self.stored == 0
    }

    fn settle(&mut self, now: Instant) {
        if self.runs() {
            self.ran += now.since(self.at);
            self.at = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    #[test]
    fn time_passes_for_a_guest_that_has_seen_all_and_stands_for_one_that_has_not() {
        let mut clock = GuestClock::default();
        clock.on_given(ms(50));
        clock.on_given(ms(100));
        clock.on_stored();
        assert_eq!(clock.ran(ms(5_000)), Duration::from_millis(100));
        clock.on_life(ms(5_000));
        assert_eq!(clock.ran(ms(6_000)), Duration::from_millis(110), "a sign of life is little");
        clock.on_seen(ms(6_000), 2);
        assert_eq!(clock.idle_since(), Some(ms(6_000)));
        assert_eq!(clock.ran(ms(6_050)), Duration::from_millis(170));
    }

    #[test]
    fn nobody_is_served_while_the_worker_waits_for_a_processor() {
        let mut clock = GuestClock::default();
        clock.on_given(ms(8));
        clock.on_seen(ms(10), 1);
        clock.on_worker(ms(5));
        assert_eq!(clock.served_since(), clock.idle_since());
        clock.on_worker(ms(40));
        assert_eq!(clock.served_since(), Some(ms(40)));
        clock.on_given(ms(50));
        assert_eq!(clock.served_since(), None);
    }

    #[test]
    fn without_a_driver_nothing_counts_until_it_is_back() {
        let mut clock = GuestClock::default();
        clock.on_given(ms(1));
        clock.on_stored();
        clock.on_driver_gone(ms(2));
        assert_eq!((clock.idle_since(), clock.ran(ms(500))), (None, Duration::from_millis(1)));
        assert!(clock.on_driver_back(ms(500)));
        assert_eq!(clock.ran(ms(510)), Duration::from_millis(11));
        clock.on_given(ms(510));
        clock.on_stored();
        assert!(!clock.on_driver_back(ms(515)), "its ring was there, and what is in it");
        assert_eq!((clock.idle_since(), clock.ran(ms(600))), (None, Duration::from_millis(11)));
    }
}
