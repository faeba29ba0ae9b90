//! The limits of a sender: time by the bound that keeps it from sending more, at one place.
//!
//! As the kernel's `tcpi_rwnd_limited` and `tcpi_busy_time` count it (Linux 4.9, net/ipv4/tcp.c,
//! `tcp_chrono_start`), but from frames: a segment is under way here until its acknowledgement
//! comes by here. The limits of a path (congestion window, queues, length) cannot be told apart
//! from outside.

use crate::time::{Duration, Instant};

/// The bound in force.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Limit {
    /// Nothing is under way: the sender has nothing to send, or does not run.
    #[default]
    Sender,
    /// Something is under way, and less room is left than its largest segment takes; or there is no
    /// room at all.
    Window,
    /// Something is under way, and there is room for more.
    Path,
}

/// A super-segment counts as a full segment of Ethernet: the sender would send a part of it.
const SEGMENT_MAX: u64 = 1460;

/// One direction's times.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limited {
    current: Limit,
    /// Since when; `None` before the first segment.
    since: Option<Instant>,
    largest: u64,
    times: [Duration; 3],
    is_waiting: bool,
    busy: Duration,
}

impl Limited {
    /// How long this was the bound, up to the last segment or ACK.
    #[must_use]
    pub const fn time(&self, limit: Limit) -> Duration {
        self.times[limit as usize]
    }

    /// Time in which something was under way. At the guest's port, toward the guest, it is the
    /// guest's: the host waits for its ACK.
    #[must_use]
    pub const fn busy(&self) -> Duration {
        self.busy
    }

    /// A segment of the sender takes so many numbers.
    pub(super) fn on_sent(&mut self, len: u64) {
        self.largest = self.largest.max(len.min(SEGMENT_MAX));
    }

    /// The numbers after a segment or an ACK: acknowledged, sent, allowed.
    pub(super) fn on_change(&mut self, now: Instant, una: u64, next: u64, edge: Option<u64>) {
        if let Some(since) = self.since.replace(now) {
            let span = now.since(since);
            self.times[self.current as usize] += span;
            self.busy += if self.is_waiting { span } else { Duration::ZERO };
        }
        let room = edge.map(|edge| edge.saturating_sub(next));
        let is_waiting = next > una;
        self.is_waiting = is_waiting;
        let is_full = room.is_some_and(|room| room == 0 || (is_waiting && room < self.largest));
        self.current = match is_waiting {
            _ if is_full => Limit::Window,
            true => Limit::Path,
            false => Limit::Sender,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_span_counts_for_the_bound_that_was_in_force() {
        let mut limited = Limited::default();
        limited.on_sent(1000);
        limited.on_change(Instant::from_millis(0), 0, 1000, Some(3000));
        limited.on_change(Instant::from_millis(5), 0, 2500, Some(3000));
        limited.on_change(Instant::from_millis(25), 2500, 2500, Some(5500));
        limited.on_change(Instant::from_millis(125), 2500, 3500, None);
        limited.on_change(Instant::from_millis(126), 3500, 3500, Some(3500));
        limited.on_change(Instant::from_millis(129), 3500, 3500, Some(9500));
        let ms = [Limit::Sender, Limit::Window, Limit::Path].map(|l| limited.time(l).as_millis());
        assert_eq!((ms, limited.busy().as_millis()), ([100, 23, 6], 26));
    }
}
