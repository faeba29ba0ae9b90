//! Whether a window was used, so that it may grow (RFC 7661).
//!
//! A guest that is off its core for 90 ms of 120 is limited by itself and not by the path. If the
//! path has not carried a window, it may be unable to carry it. So the window then stays as it is,
//! and a loss reduces the bytes that were under way, not those that might have been.

use crate::time::{Duration, Instant};

/// Least time for which a round trip's delivery counts (section 4.2: the sampling period)...
const PERIOD_MIN: Duration = Duration::from_secs(1);
/// ...or this many round trips.
const PERIOD_ROUNDS: u64 = 3;
/// A window that was not used for so long is reduced (section 4.4.3: the non-validated period).
const UNUSED_MAX: Duration = Duration::from_secs(300);

/// See the module doc.
#[derive(Clone, Copy, Debug)]
pub struct Validation {
    /// The round ends when this is acknowledged.
    round_end: u64,
    /// Bytes delivered in this round.
    delivered: u64,
    /// Most bytes delivered in a round of this period, and of the one before; zero is undefined.
    most: [u64; 2],
    /// When this period began.
    since: Instant,
    /// Data waited for the window, or for its pace: in this round, in the one before.
    pressed: [bool; 2],
    /// When the window was last used.
    used_at: Instant,
}

impl Validation {
    /// Nothing was sent yet.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self {
            round_end: 0,
            delivered: 0,
            most: [0; 2],
            since: now,
            pressed: [false; 2],
            used_at: now,
        }
    }

    /// Most bytes delivered in a round trip lately (`pipeACK`); none while undefined.
    #[must_use]
    pub fn pipe_ack(&self) -> Option<u64> {
        let most = self.most[0].max(self.most[1]);
        (most > 0).then_some(most)
    }

    /// The window may grow: data waited for it, and half of it at least is under way, or was
    /// delivered in a round trip (section 4.3). The delivered bytes alone would halve the pace of
    /// slow start: they are those of the round before.
    #[must_use]
    pub fn is_used(&self, flight: u64, cwnd: u64) -> bool {
        let pressed = self.pressed[0] || self.pressed[1];
        pressed && self.pipe_ack().is_none_or(|bytes| bytes.max(flight) * 2 >= cwnd)
    }

    /// Bytes of the window that were really used: the start of a reduction (section 4.4.1).
    #[must_use]
    pub fn in_use(&self, flight: u64, cwnd: u64) -> u64 {
        flight.min(cwnd).max(self.pipe_ack().unwrap_or(0).min(cwnd))
    }

    /// Data waits for the window, or for its pace.
    pub const fn on_pressed(&mut self) {
        self.pressed[0] = true;
    }

    /// R has got `delivered` bytes; all below `una` are acknowledged, all below `next` sent.
    pub fn on_ack(&mut self, now: Instant, delivered: u64, una: u64, next: u64, srtt: Duration) {
        self.delivered += delivered;
        if self.round_end == 0 {
            self.round_end = next; // the first round
        }
        if una < self.round_end {
            return;
        }
        let rounds = srtt.saturating_mul(PERIOD_ROUNDS);
        if now.since(self.since) > if rounds > PERIOD_MIN { rounds } else { PERIOD_MIN } {
            self.most = [0, self.most[0]];
            self.since = now;
        }
        self.most[0] = self.most[0].max(self.delivered);
        self.pressed = [false, self.pressed[0]];
        self.delivered = 0;
        self.round_end = next;
    }

    /// The window was, or was not, used up to now. `true`: it was not for so long that half of it
    /// is forgotten (section 4.4.3).
    #[must_use]
    pub fn on_judged(&mut self, now: Instant, used: bool) -> bool {
        let over = !used && now.since(self.used_at) > UNUSED_MAX;
        if used || over {
            self.used_at = now;
        }
        over
    }

    /// The window was reduced: earlier measurements say nothing of it (section 4.4.2).
    pub fn on_reduction(&mut self, next: u64) {
        self.most = [0; 2];
        self.delivered = 0;
        self.round_end = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SRTT: Duration = Duration::from_millis(100);

    fn at(ms: u64) -> Instant {
        Instant::from_secs(50) + Duration::from_millis(ms)
    }

    #[test]
    fn a_window_of_which_half_is_delivered_in_a_round_trip_is_used() {
        let mut v = Validation::new(at(0));
        assert!(!v.is_used(0, 20_000), "nothing waited for it");
        v.on_pressed();
        assert!(v.is_used(0, 20_000), "nothing is known: it may grow");
        v.on_ack(at(100), 9_999, 10_000, 10_000, SRTT);
        assert!(!v.is_used(0, 20_000) && v.is_used(0, 19_998));
        assert!(v.is_used(10_000, 20_000), "half of it is under way");
        v.on_pressed();
        v.on_ack(at(150), 5_000, 9_999, 35_000, SRTT); // in the middle of a round
        assert_eq!(v.pipe_ack(), Some(9_999));
        v.on_ack(at(200), 6_000, 30_000, 40_000, SRTT);
        assert_eq!(v.pipe_ack(), Some(11_000));
        assert!(v.is_used(0, 20_000));
    }

    #[test]
    fn a_guest_that_never_fills_the_window_does_not_make_it_grow() {
        let mut v = Validation::new(at(0));
        v.on_pressed();
        for round in 1..=3 {
            v.on_ack(at(round * 100), 20_000, round * 20_000, round * 20_000, SRTT);
        }
        assert!(!v.is_used(0, 20_000), "for two rounds nothing waited");
    }

    #[test]
    fn what_was_delivered_a_second_or_two_ago_still_counts_and_no_longer() {
        let mut v = Validation::new(at(0));
        v.on_ack(at(0), 50_000, 2, 2, SRTT);
        for (ms, most) in [(900, 50_000), (1100, 50_000), (2000, 50_000), (2200, 1000)] {
            v.on_ack(at(ms), 1000, 2 + ms, 2 + ms, SRTT);
            assert_eq!(v.pipe_ack(), Some(most), "after {ms} ms");
        }
    }

    #[test]
    fn a_period_has_its_last_instant() {
        let mut v = Validation::new(at(0));
        v.on_ack(at(0), 50_000, 2, 2, SRTT);
        v.on_ack(at(1000), 1000, 3, 3, SRTT); // a second later, not more
        v.on_ack(at(1500), 1000, 4, 4, SRTT);
        v.on_ack(at(2000), 1000, 5, 5, SRTT);
        assert_eq!(v.pipe_ack(), Some(50_000));
    }

    #[test]
    fn a_loss_reduces_what_was_in_use() {
        let mut v = Validation::new(at(0));
        v.on_ack(at(0), 8_000, 2, 2, SRTT);
        assert_eq!(v.in_use(3_000, 40_000), 8_000);
        assert_eq!(v.in_use(12_000, 40_000), 12_000);
        assert_eq!(v.in_use(50_000, 40_000), 40_000); // SACKed bytes are no longer under way
        v.on_reduction(2);
        assert_eq!(v.pipe_ack(), None);
    }

    #[test]
    fn after_five_minutes_half_of_an_unused_window_is_forgotten() {
        let mut v = Validation::new(at(0));
        assert!(!v.on_judged(at(0), true));
        assert!(!v.on_judged(at(299_000), false));
        assert!(v.on_judged(at(301_000), false));
        assert!(!v.on_judged(at(302_000), false), "once in five minutes");
    }
}
