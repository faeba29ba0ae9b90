//! How long a guest has run, from its rings alone: the frames that it was given, has seen, and
//! sent.

use std::collections::VecDeque;

use nightporter_core::time::{Duration, Instant};

/// A sign of life is worth so much running time, if so much has passed since the last.
const CREDIT: Duration = Duration::from_millis(10);

/// Running time of one guest ("running time" in `docs/spec.md`): all the time in which it has seen
/// everything, and the worth of its signs of life besides.
#[derive(Clone, Debug)]
pub(crate) struct GuestClock {
    /// Frames in its ring, and of each whether it brought stored bytes: others' frames never end,
    /// and do not keep an idle guest's time standing.
    unseen: VecDeque<Stored>,
    /// How many of them may have, and how many certainly did.
    stored: [usize; 2],
    /// Since when there are none; `None` also while it has no driver.
    idle_since: Option<Instant>,
    /// At least and at most, because time may stand still for bytes that may have been stored.
    ran: [Duration; 2],
    /// Up to when each of them counts.
    at: [Instant; 2],
    has_driver: bool,
    /// Frames that its ring takes.
    slots: usize,
    /// Since when its host's worker has had a processor.
    worker_runs_since: Instant,
}

/// Whether a frame brought bytes that the host held.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stored {
    No,
    /// Between two guests of one host a frame that only passes looks like it.
    Perhaps,
    Surely,
}

impl Stored {
    const fn counts(self) -> [bool; 2] {
        [!matches!(self, Self::No), matches!(self, Self::Surely)]
    }
}

impl Default for GuestClock {
    fn default() -> Self {
        let (ran, at) = (Duration::ZERO, Instant::ZERO);
        Self {
            unseen: VecDeque::new(),
            stored: [0; 2],
            idle_since: Some(at),
            ran: [ran; 2],
            at: [at; 2],
            has_driver: true,
            slots: usize::MAX,
            worker_runs_since: at,
        }
    }
}

impl GuestClock {
    /// For a ring of so many frames.
    pub(crate) fn with_slots(slots: usize) -> Self {
        Self { slots, ..Self::default() }
    }

    /// A frame was put into its ring.
    pub(crate) fn on_given(&mut self, now: Instant) {
        self.settle(now);
        self.unseen.push_back(Stored::No);
        self.idle_since = None;
    }

    /// The last frame for it brought bytes from the store, certainly if `sure`.
    pub(crate) fn on_stored(&mut self, sure: bool) {
        if let Some(newest) = self.unseen.back_mut() {
            *newest = if sure { Stored::Surely } else { Stored::Perhaps };
            for (stored, counts) in self.stored.iter_mut().zip(newest.counts()) {
                *stored += usize::from(counts);
            }
        }
    }

    /// It has taken `frames` from its ring.
    pub(crate) fn on_seen(&mut self, now: Instant, frames: usize) {
        self.on_life(now);
        for seen in self.unseen.drain(..frames.min(self.unseen.len())) {
            for (stored, counts) in self.stored.iter_mut().zip(seen.counts()) {
                *stored -= usize::from(counts);
            }
        }
        if self.unseen.is_empty() && self.has_driver {
            self.idle_since.get_or_insert(now);
        }
    }

    /// It has sent something.
    pub(crate) fn on_life(&mut self, now: Instant) {
        self.settle(now);
        for (ran, at) in self.ran.iter_mut().zip(&mut self.at) {
            let since = now.since(*at);
            *ran += if since < CREDIT { since } else { CREDIT };
            *at = now;
        }
    }

    /// The frames in its rings are gone, and none can be put there.
    pub(crate) fn on_driver_gone(&mut self, now: Instant) {
        self.settle(now);
        self.unseen.clear();
        self.stored = [0; 2];
        (self.idle_since, self.has_driver) = (None, false);
    }

    /// Its rings are there again, and empty. `false`: they were there already, with what is in
    /// them, because a driver that was reset twice before it was back comes back twice.
    #[must_use]
    pub(crate) fn on_driver_back(&mut self, now: Instant) -> bool {
        let was_gone = !std::mem::replace(&mut self.has_driver, true);
        if was_gone {
            self.at = [now; 2];
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

    /// Since when its host's worker has had a processor.
    #[must_use]
    pub(crate) fn worker_runs_since(&self) -> Instant {
        self.worker_runs_since
    }

    /// How long it has run, at least.
    #[must_use]
    pub(crate) fn ran(&self, now: Instant) -> Duration {
        self.ran_by(0, now)
    }

    /// The same, at most.
    #[must_use]
    pub(crate) fn may_have_run(&self, now: Instant) -> Duration {
        self.ran_by(1, now)
    }

    fn ran_by(&self, which: usize, now: Instant) -> Duration {
        let since = now.since(self.at[which]);
        self.ran[which] + if self.runs(which) { since } else { Duration::ZERO }
    }

    /// While its ring is full of what others sent it, something of the host's own may be due, which
    /// stops its time (seed 111118).
    fn runs(&self, which: usize) -> bool {
        let full = which == 0 && self.unseen.len() >= self.slots;
        self.has_driver && self.stored[which] == 0 && !full
    }

    fn settle(&mut self, now: Instant) {
        for which in 0..2 {
            if self.runs(which) {
                self.ran[which] += now.since(self.at[which]);
                self.at[which] = now;
            }
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
        clock.on_stored(true);
        assert_eq!(clock.ran(ms(5_000)), Duration::from_millis(100));
        clock.on_life(ms(5_000));
        assert_eq!(clock.ran(ms(6_000)), Duration::from_millis(110), "a sign of life is little");
        clock.on_seen(ms(6_000), 2);
        assert_eq!(clock.idle_since(), Some(ms(6_000)));
        assert_eq!(clock.ran(ms(6_050)), Duration::from_millis(170));
    }

    /// Seeds 41032, 43041: data between two guests, which had no place, came to one that was
    /// paused.
    #[test]
    fn time_may_pass_for_one_that_was_perhaps_given_stored_bytes() {
        let mut clock = GuestClock::default();
        clock.on_given(ms(100));
        clock.on_stored(false);
        let ran = [clock.ran(ms(500)), clock.may_have_run(ms(500))];
        assert_eq!(ran, [100, 500].map(Duration::from_millis));
    }

    #[test]
    fn time_may_stand_while_there_is_no_room_for_more() {
        let mut clock = GuestClock::with_slots(2);
        clock.on_given(ms(100));
        clock.on_given(ms(200));
        let ran = [clock.ran(ms(500)), clock.may_have_run(ms(500))];
        assert_eq!(ran, [200, 500].map(Duration::from_millis));
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
        clock.on_stored(true);
        clock.on_driver_gone(ms(2));
        assert_eq!((clock.idle_since(), clock.ran(ms(500))), (None, Duration::from_millis(1)));
        assert!(clock.on_driver_back(ms(500)));
        assert_eq!(clock.ran(ms(510)), Duration::from_millis(11));
        clock.on_given(ms(510));
        clock.on_stored(true);
        assert!(!clock.on_driver_back(ms(515)), "its ring was there, and what is in it");
        assert_eq!((clock.idle_since(), clock.ran(ms(600))), (None, Duration::from_millis(11)));
    }
}
