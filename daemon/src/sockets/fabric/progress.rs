//! How fast a stream takes what waits for it.
//!
//! A guest's ring may wait for its streams (`sockets/stalls`), and with it all other sockets of
//! that guest. A receiver that takes a trickle must not make it wait for long, and a stream on a
//! slow path must live. So time is divided into periods: a period ends when the stream has taken a
//! quarter of what waited in it. A stream whose period lasts too long is stuck.
//!
//! Nothing is added while the ring waits. The period in which that begins may be nearly over, and
//! three more leave less than half (0.75 to the power of 3): so a ring that waits until half has
//! gone waits for four periods at most, of streams that are not stuck.

use nightporter_core::time::{Duration, Instant};

/// Of what waits, this part is to be taken in a period.
const PART: usize = 4;

/// See the module's doc.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// When the period began.
    since: Instant,
    /// Bytes that are to be taken before it ends. `None`: none was taken in it yet.
    owed: Option<usize>,
}

impl Progress {
    /// Something is about to wait.
    pub(super) const fn new(now: Instant) -> Self {
        Self { since: now, owed: None }
    }

    /// So many bytes were taken, and so many still wait.
    pub(super) fn note_taken(&mut self, now: Instant, taken: usize, waiting: usize) {
        let owed = self.owed.unwrap_or_else(|| (taken + waiting).div_ceil(PART));
        match owed.saturating_sub(taken) {
            0 => *self = Self::new(now),
            owed => self.owed = Some(owed),
        }
    }

    /// Whether the period has lasted since then.
    pub(super) fn has_lasted_since(&self, then: Instant) -> bool {
        self.since <= then
    }

    /// For so long nobody was asked to take anything.
    pub(super) fn forgive(&mut self, pause: Duration) {
        self.since = self.since + pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant::from_secs(1000);
    const PERIOD: Duration = Duration::from_secs(5);
    const MIB: usize = 1 << 20;

    /// Takes so much of what waits each second; what waits when it is stuck, or after a minute.
    fn take_each_second(bytes: usize) -> usize {
        let (mut progress, mut waiting, mut now) = (Progress::new(NOW), MIB, NOW);
        while waiting > 0 && now < NOW + Duration::from_secs(60) {
            now = now + Duration::from_secs(1);
            if progress.has_lasted_since(now - PERIOD) {
                break;
            }
            let taken = bytes.min(waiting);
            waiting -= taken;
            progress.note_taken(now, taken, waiting);
        }
        waiting
    }

    #[test]
    fn who_takes_less_than_a_quarter_in_a_period_is_stuck() {
        assert_eq!(take_each_second(0), MIB);
        for trickle in [1, 4096, MIB / 20] {
            assert_eq!(take_each_second(trickle), MIB - 4 * trickle, "{trickle}");
        }
        assert_eq!(take_each_second(MIB / 16), 0);
    }

    #[test]
    fn a_ring_that_waits_for_half_waits_for_four_periods_at_most() {
        // It takes as little as it may: a quarter at the end of each period.
        let (mut progress, mut waiting, mut now) = (Progress::new(NOW), MIB, NOW);
        let almost = Duration::from_nanos(PERIOD.as_nanos() - 1);
        while waiting > MIB / 2 {
            now = now + almost;
            assert!(!progress.has_lasted_since(now - PERIOD));
            let taken = waiting.div_ceil(PART);
            waiting -= taken;
            progress.note_taken(now, taken, waiting);
        }
        assert!(now.since(NOW) < PERIOD + PERIOD + PERIOD, "after the one that has begun before");
    }
}
