//! When a receiver acknowledges (SNOOP-07, COM-31).

use crate::limits;
use crate::time::{Duration, Instant};
use crate::wire::saved::saved;

/// The acknowledgements that were sent, and those that are due.
#[derive(Debug)]
pub(crate) struct Acks {
    /// Highest acknowledgement number emitted to R (RFC 7323 Last.ACK.sent).
    sent: u64,
    /// Low bits of the millisecond of the last answer to an odd segment (COM-31).
    odd_ms: u32,
    /// Quick-ACKs left (SNOOP-07).
    quick: u8,
    /// Full segments accepted since the last ACK (SNOOP-07).
    segments: u8,
    /// An ACK is due at the end of the batch.
    due: bool,
    /// The flow stands in the engine's ACK list.
    listed: bool,
}

saved! {
    Acks { sent, odd_ms as Millis, quick, segments, due }
    reset {
        listed = false, // import lists those that were
    }
}

impl Acks {
    /// R expects nothing below `first` to be acknowledged.
    pub(super) fn new(now: Instant, first: u64) -> Self {
        Self {
            sent: first,
            odd_ms: now.low_millis().wrapping_sub(u32::MAX / 2),
            quick: limits::QUICK_ACKS,
            segments: 0,
            due: false,
            listed: false,
        }
    }

    /// Highest acknowledgement number emitted to R.
    #[inline]
    pub(crate) const fn sent(&self) -> u64 {
        self.sent
    }

    /// An ACK is due at the end of the batch.
    pub(crate) const fn is_due(&self) -> bool {
        self.due
    }

    /// The handshake acknowledges everything below `first`.
    pub(super) fn on_syn_ack(&mut self, first: u64) {
        self.sent = first;
    }

    /// G has acknowledged R's FIN, and R may have been told so: everything below `next`.
    pub(crate) fn on_fin_taken(&mut self, next: u64) {
        self.sent = next;
    }

    /// A segment with payload was taken: whether its ACK is due now, or at the end of the batch.
    /// At once after two segments' worth or anything unusual (SNOOP-07).
    #[must_use]
    pub(crate) fn on_segment(&mut self, bytes: u64, mss: u64, plain: bool) -> bool {
        let full = bytes > mss; // one ACK per super-frame, as Linux
        self.segments = self.segments.saturating_add(1 + u8::from(full));
        let quick = self.quick > 0;
        self.quick = self.quick.saturating_sub(1);
        !plain || quick || self.segments >= 2
    }

    /// Everything below `ack` has just been promised to R.
    pub(crate) fn on_sent(&mut self, ack: u64) {
        debug_assert!(ack >= self.sent, "ack to R moved back (INV-07)");
        self.sent = ack;
        self.due = false;
        self.segments = 0;
    }

    /// The flow enters the engine's ACK list, as it stood in that of another. `false`: it has.
    #[must_use]
    pub(crate) fn enter_list(&mut self) -> bool {
        !core::mem::replace(&mut self.listed, true)
    }

    /// No ACK is due any more.
    pub(crate) fn forget_due(&mut self) {
        self.due = false;
    }

    /// The flow has left the engine's ACK list.
    pub(crate) fn on_left_list(&mut self) {
        self.listed = false;
    }

    /// An ACK is due at the end of the batch. `true`: the flow enters the engine's ACK list.
    #[must_use]
    pub(crate) fn owe(&mut self) -> bool {
        self.due = true;
        !core::mem::replace(&mut self.listed, true)
    }

    /// An answer to an odd segment may leave: one per flow and `interval` (COM-31, SEC-07).
    #[must_use]
    pub(crate) fn may_answer_odd(&mut self, now: Instant, interval: Duration) -> bool {
        let since = u64::from(now.low_millis().wrapping_sub(self.odd_ms));
        let may = Duration::from_millis(since) >= interval;
        if may {
            self.odd_ms = now.low_millis();
        }
        may
    }
}
