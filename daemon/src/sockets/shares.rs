//! The room that a guest is shown at each of its sockets to other hosts.
//!
//! A stream that takes nothing must not stop the guest's ring, in which all its sockets stand
//! behind each other. So a socket is shown its *share* beyond what its stream has taken
//! ([`Host::limit_room`]), and nothing more while anything waits for the stream. All shares are an
//! eighth of what may still be kept of the guest before its ring waits (`TOE_KEPT_MAX`), divided by
//! the sockets that sent in this second, or in the last. The `k`-th that begins to send has been
//! shown a `k`-th of that, so `n` that begin together have at most 2 MiB times `1 + ln n`: a
//! thousand may do so, and all their streams stop at once, and the ring goes on.
//!
//! Room that was shown is not taken back: a guest whose `buf_alloc` shrinks below what is under way
//! would take it for 4 GiB (Linux before 2026, `virtio_transport_get_credit`). So sockets that were
//! few when they sent, were idle, and all send to hosts that take nothing can have more kept
//! together; then the ring waits (`stalls`).
//!
//! [`Host::limit_room`]: nightporter_core::toe::host::Host::limit_room

use nightporter_core::limits::{TOE_KEPT_MAX, TOE_WINDOW_MAX};
use nightporter_core::time::{Duration, Instant};

/// All shares together, of sockets that have sent for a while, are this part of what may be kept.
const PART: u64 = 8;
/// And of one at least: a page.
pub(super) const LEAST: u64 = 4096;
/// Of a socket that has not sent: many that were just connected may send at once.
const FIRST: u64 = 32 << 10;
const PERIOD: Duration = Duration::from_secs(1);

/// See the module's doc.
#[derive(Debug)]
pub(super) struct Shares {
    /// When the present period began, and its number: none is 0.
    since: Instant,
    period: u64,
    /// Sockets that sent in it, and in the one before.
    now: u64,
    before: u64,
}

impl Default for Shares {
    fn default() -> Self {
        Self { since: Instant::ZERO, period: 1, now: 0, before: 0 }
    }
}

impl Shares {
    /// A socket sends, which did so last in the period `last`.
    pub(super) fn note(&mut self, now: Instant, last: &mut u64) {
        if now >= self.since + PERIOD {
            let is_next = now < self.since + PERIOD + PERIOD;
            self.before = if is_next { self.now } else { 0 };
            (self.since, self.period, self.now) = (now, self.period + 1, 0);
        }
        if std::mem::replace(last, self.period) != self.period {
            self.now += 1;
        }
    }

    /// The share of each that sends, when so many bytes are kept of them all.
    pub(super) fn each(&self, kept: usize) -> u64 {
        let all = TOE_KEPT_MAX.saturating_sub(kept) as u64 / PART;
        (all / self.now.max(self.before).max(1)).clamp(LEAST, TOE_WINDOW_MAX)
    }

    /// Of one that has not sent.
    pub(super) fn first(&self, kept: usize) -> u64 {
        self.each(kept).min(FIRST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant::from_secs(1000);

    #[test]
    fn a_thousand_that_begin_to_send_at_once_do_not_fill_what_may_be_kept() {
        let mut shares = Shares::default();
        let mut sum = 0;
        for _ in 0..1000 {
            shares.note(NOW, &mut 0);
            sum += shares.each(0);
        }
        assert!(sum <= TOE_KEPT_MAX as u64, "{sum}");
        assert_eq!(shares.each(TOE_KEPT_MAX), LEAST, "some goes on whatever waits");
        assert_eq!(shares.first(0), LEAST, "and who has not sent has no more than they");
    }

    #[test]
    fn those_that_sent_in_this_second_or_the_last_share() {
        let mut shares = Shares::default();
        assert_eq!((shares.each(0), shares.first(0)), (TOE_WINDOW_MAX, FIRST));
        let mut last = [0; 16];
        last.iter_mut().for_each(|last| shares.note(NOW, last));
        last.iter_mut().for_each(|last| shares.note(NOW, last)); // each counts once
        assert_eq!(shares.each(0), TOE_KEPT_MAX as u64 / PART / 16);
        shares.note(NOW + PERIOD, &mut last[0]);
        assert_eq!(shares.each(0), TOE_KEPT_MAX as u64 / PART / 16);
        shares.note(NOW + PERIOD + PERIOD, &mut last[0]);
        assert_eq!(shares.each(0), TOE_WINDOW_MAX);
        // Nobody has sent for long: what was before counts no more.
        last.iter_mut().for_each(|last| shares.note(NOW + PERIOD + PERIOD, last));
        shares.note(NOW + Duration::from_secs(60), &mut last[0]);
        assert_eq!(shares.each(0), TOE_WINDOW_MAX);
    }
}
