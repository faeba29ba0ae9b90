//! When a worker looks for work without sleeping, and when it does not.
//!
//! Polling after a burst saves the wake-up for the next frame, and saves the guests their kicks. It
//! pays only if no other thread wants the core: a VMM's thread on the same core would wait for the
//! worker while the worker waits for it. So before each look the worker offers the core with
//! sched_yield(2). The kernel shows whether another thread took it, because such a switch counts as
//! involuntary (getrusage(2), `ru_nivcsw`). After a taken offer the worker sleeps at once for a
//! while; the pause doubles with every taken offer. It halves with every window that passes
//! undisturbed and, while work never ends, with every [`PAUSE_MIN`]. So an occasional interruption
//! costs little.

use nightporter_core::time::{Duration, Instant};
use nix::sys::resource::{UsageWho, getrusage};

use crate::timer::monotonic_now;

/// The shortest pause after another thread wanted the core: a hundred times the usual window.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// The longest: on a core that stays shared one offer a second is made.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Decides whether to poll.
#[derive(Debug)]
pub(crate) struct Polling {
    /// How long to look for work after the last there was; zero is never.
    window: Duration,
    /// When there last was work.
    active: Instant,
    /// Since when the pause has not changed and no offer was taken.
    calm_since: Option<Instant>,
    /// Until then the worker sleeps at once.
    paused_until: Instant,
    /// How long the next pause is.
    pause: Duration,
}

impl Polling {
    pub(crate) const fn new(window: Duration, now: Instant) -> Self {
        Self { window, active: now, calm_since: None, paused_until: now, pause: PAUSE_MIN }
    }

    /// There was work.
    pub(crate) const fn handle_work(&mut self, now: Instant) {
        self.active = now;
    }

    /// Offers the core to other threads, and notes whether one took it.
    pub(crate) fn offer_core(&mut self) {
        let before = involuntary_switches();
        std::thread::yield_now();
        let taken = involuntary_switches() != before;
        self.handle_offer(monotonic_now(), taken);
    }

    /// The core was offered to others; `taken`: another thread took it.
    fn handle_offer(&mut self, now: Instant, taken: bool) {
        if taken {
            self.calm_since = None;
            self.paused_until = now + self.pause;
            self.pause = PAUSE_MAX.min(self.pause + self.pause);
        } else if now.since(*self.calm_since.get_or_insert(now)) >= PAUSE_MIN {
            self.calm_since = Some(now);
            self.halve_pause();
        }
    }

    /// Whether to look for work at `now` instead of sleeping.
    #[must_use]
    pub(crate) fn poll(&mut self, now: Instant) -> bool {
        if now.since(self.active) < self.window {
            return now >= self.paused_until;
        }
        if self.calm_since.take().is_some() {
            self.halve_pause();
        }
        false
    }

    fn halve_pause(&mut self) {
        self.pause = PAUSE_MIN.max(Duration::from_nanos(self.pause.as_nanos() / 2));
    }
}

/// How often the calling thread lost its core although it could have gone on, since it began.
fn involuntary_switches() -> u64 {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("who is one of the three there are");
    usage.involuntary_context_switches().cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_micros(50);

    fn at(us: u64) -> Instant {
        Instant::from_nanos(1_000_000_000 + us * 1000)
    }

    /// Offers the core every 5 µs from work at `from` on until polling stops; how many offers.
    fn offers(polling: &mut Polling, from: u64, taken: impl Fn(u64) -> bool) -> u64 {
        polling.handle_work(at(from));
        let mut made = 0;
        while polling.poll(at(from + 5 * made)) {
            made += 1;
            polling.handle_offer(at(from + 5 * made), taken(from + 5 * made));
        }
        made
    }

    #[test]
    fn a_core_of_its_own_is_polled_for_a_window_after_all_work() {
        let mut polling = Polling::new(WINDOW, at(0));
        for burst in 0..100 {
            assert_eq!(offers(&mut polling, burst * 1000, |_| false), 10);
        }
    }

    #[test]
    fn polling_ends_with_the_first_offer_that_is_taken() {
        let mut polling = Polling::new(WINDOW, at(0));
        assert_eq!(offers(&mut polling, 0, |us| us >= 20), 4);
        assert_eq!(offers(&mut polling, 100, |_| false), 0, "and does not come back at once");
        assert_eq!(offers(&mut polling, 5100, |_| false), 10, "but 5 ms later");
    }

    #[test]
    fn work_that_comes_with_whoever_took_the_core_hides_nothing() {
        let mut polling = Polling::new(WINDOW, at(0));
        polling.handle_work(at(0));
        assert!(polling.poll(at(1)));
        polling.handle_offer(at(30), true);
        polling.handle_work(at(30));
        assert!(!polling.poll(at(31)));
    }

    #[test]
    fn a_core_that_stays_shared_is_offered_ever_less_often() {
        let mut polling = Polling::new(WINDOW, at(0));
        let made: u64 = (0..100_000).map(|burst| offers(&mut polling, burst * 100, |_| true)).sum();
        // At 5, 15, 35 ... 1275 ms, then once a second: 10 s.
        assert_eq!(made, 17);
    }

    #[test]
    fn a_core_that_is_free_again_is_polled_as_before() {
        let mut polling = Polling::new(WINDOW, at(0));
        for burst in 0..100_000 {
            offers(&mut polling, burst * 100, |_| true);
        }
        let free = (100_000..).find(|b| offers(&mut polling, b * 100, |_| false) > 0).unwrap_or(0);
        assert!(free <= 110_000, "a second later at the latest");
        for burst in free..free + 10 {
            offers(&mut polling, burst * 100, |_| false);
        }
        let next = (free + 10) * 100;
        assert_eq!(offers(&mut polling, next, |_| true), 1);
        assert_eq!(offers(&mut polling, next + 5100, |_| false), 10, "the shortest pause again");
    }

    #[test]
    fn a_core_that_is_taken_now_and_then_is_polled_in_between_while_work_never_ends() {
        let mut polling = Polling::new(Duration::from_secs(1), at(0));
        let mut made = 0;
        for us in (0..10_000_000).step_by(10) {
            polling.handle_work(at(us));
            if polling.poll(at(us)) {
                polling.handle_offer(at(us), us % 100_000 == 0);
                made += 1;
            }
        }
        // 5 ms of each 100 ms are a pause, and 5 us the offer itself.
        assert!((949_000..=951_000).contains(&made), "{made} of 1,000,000");
    }

    #[test]
    fn a_window_of_zero_never_polls() {
        let mut polling = Polling::new(Duration::ZERO, at(0));
        assert_eq!(offers(&mut polling, 0, |_| false), 0);
    }
}
