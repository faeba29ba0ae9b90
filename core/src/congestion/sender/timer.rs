//! The one timer of a sender, and which of four it is.

use crate::time::{Duration, Instant};

/// What a sender waits for.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Waits {
    /// Nothing: all is acknowledged, or G has to go on.
    #[default]
    Nothing,
    /// An arrival that may only be late (RFC 8985 section 6.2, step 5).
    Reordering,
    /// An ACK for the tail of what was sent (RFC 8985 section 7.2).
    Probe,
    /// An ACK at all (RFC 6298 section 5).
    Retransmission,
    /// Room at R (RFC 9293 section 3.8.6.1).
    Window,
}

/// Deadlines are kept as what they count from, for a new round trip changes how long they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timers {
    waits: Waits,
    at: Instant,
    /// The retransmission timeout counts from here: the last ACK that moved, or the first segment
    /// that left when nothing was under way.
    since: Instant,
    /// A probe counts from the last segment or ACK.
    last: Instant,
    /// The reordering timer; none while `Instant::MAX`.
    reordering: Instant,
    /// The window probe, while it is waited for.
    window: Option<Instant>,
    /// Something is under way.
    running: bool,
}

impl Default for Timers {
    fn default() -> Self {
        Self {
            waits: Waits::Nothing,
            at: Instant::MAX,
            since: Instant::ZERO,
            last: Instant::ZERO,
            reordering: Instant::MAX,
            window: None,
            running: false,
        }
    }
}

impl Timers {
    /// When something is due.
    pub(super) const fn at(&self) -> Instant {
        self.at
    }

    /// What.
    pub(super) const fn waits(&self) -> Waits {
        self.waits
    }

    /// R has acknowledged more, or the timeout has passed: it counts anew (RFC 6298 section 5.3).
    pub(super) const fn restart(&mut self, now: Instant) {
        self.since = now;
        self.last = now;
    }

    /// A segment has left (RFC 6298 section 5.1).
    pub(super) const fn on_sent(&mut self, now: Instant) {
        if !self.running {
            self.running = true;
            self.since = now;
        }
        self.last = now;
    }

    /// Nothing is merely late, as far as is known.
    pub(super) const fn no_reordering(&mut self) {
        self.reordering = Instant::MAX;
    }

    /// A segment that has not arrived by `at` is lost. The last of them counts (RFC 8985 section
    /// 6.2, step 5).
    pub(super) fn wait_for_reordered(&mut self, at: Instant) {
        self.reordering =
            if self.reordering == Instant::MAX { at } else { self.reordering.max(at) };
    }

    /// Something is under way; `probe`: how long after the last segment a probe is due, if one may
    /// be sent.
    pub(super) fn wait_for_ack(&mut self, rto: Duration, probe: Option<Duration>) {
        self.window = None;
        let timeout = self.since + rto;
        (self.waits, self.at) = match probe.map(|delay| self.last + delay) {
            _ if self.reordering < timeout => (Waits::Reordering, self.reordering),
            // In place of the timeout, should that come first (RFC 8985 section 7.2).
            Some(at) => (Waits::Probe, at.min(timeout)),
            None => (Waits::Retransmission, timeout),
        };
    }

    /// Nothing is under way. `interval`: R shows no room, and is asked after so long.
    pub(super) fn wait_for_window(&mut self, now: Instant, interval: Option<Duration>) {
        self.running = false;
        self.reordering = Instant::MAX;
        self.window = interval.map(|interval| self.window.unwrap_or(now + interval));
        (self.waits, self.at) =
            self.window.map_or((Waits::Nothing, Instant::MAX), |at| (Waits::Window, at));
    }

    /// What is due; it is not waited for any more.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Waits> {
        if self.at > now {
            return None;
        }
        self.at = Instant::MAX;
        self.window = None;
        Some(core::mem::take(&mut self.waits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_that_may_only_be_late_is_waited_for() {
        let (mut timers, at) = (Timers::default(), Instant::from_millis);
        timers.on_sent(at(1000));
        [20, 5, 10].iter().for_each(|ms| timers.wait_for_reordered(at(1000 + ms)));
        timers.wait_for_ack(Duration::from_millis(300), None);
        assert_eq!((timers.waits(), timers.at()), (Waits::Reordering, at(1020)));
        assert_eq!((timers.poll(at(1019)), timers.poll(at(1020))), (None, Some(Waits::Reordering)));
        timers.no_reordering();
        timers.wait_for_ack(Duration::from_millis(300), None);
        assert_eq!((timers.waits(), timers.at()), (Waits::Retransmission, at(1300)));
    }
}
