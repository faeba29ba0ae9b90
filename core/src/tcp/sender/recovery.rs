//! Losses inside G, or behind it: which of the bytes that it was given H gives it again (SNOOP-29,
//! FWD-04).
//!
//! Bytes leave in order. So holes below a byte that has arrived are lost, and are repeated in
//! order, which is a sweep. A hole that is still there when something behind it that the sweep has
//! repeated arrives was lost again.

use crate::store::ranges::Ranges;
use crate::wire::saved::saved;

/// The bytes that are given to G again. Over, or never begun, once `end` is acknowledged.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recovery {
    /// Bytes that are missing from here...
    from: u64,
    /// ...to here is sent before the sweep goes on.
    to: u64,
    /// The sweep is here: everything lost below was sent again.
    swept: u64,
    /// Recovery ends when G acknowledges this.
    end: u64,
    /// All bytes below `end` that have not arrived are lost: there was a timeout.
    all: bool,
    /// G names no holes; a partial ACK does (RFC 6582).
    blind: bool,
    /// Something that begins here was swept, and has arrived: holes below were lost again.
    seen: u64,
    /// Holes below are, or will be, sent a third time.
    again: u64,
    /// Bytes from here on left behind all that was sent again; 0 if nothing was since one arrived.
    behind: u64,
}

saved!(Recovery { from, to, swept, end, all, blind, seen, again, behind });

impl Recovery {
    /// After a timeout: everything below `end` is lost.
    pub(super) fn of_all(una: u64, end: u64) -> Self {
        Self { swept: una, end, all: true, ..Self::default() }
    }

    /// Nothing of it is beyond `sent`.
    pub(in crate::tcp) fn is_below(&self, sent: u64) -> bool {
        let Self { from, to, swept, end, all: _, blind: _, seen, again, behind } = *self;
        [from, to, swept, end, seen, again, behind].iter().all(|number| *number <= sent)
    }

    /// G has yet to acknowledge the lost bytes.
    pub(super) const fn is_under_way(&self, una: u64) -> bool {
        self.end > una
    }

    /// There is nothing to remember.
    pub(in crate::tcp) const fn is_over(&self, una: u64) -> bool {
        !self.is_under_way(una)
    }

    /// Duplicate ACKs say nothing new: they are about what is being repeated.
    pub(super) const fn explains_duplicates(&self, una: u64) -> bool {
        self.is_under_way(una) && !self.all
    }

    /// The bytes that are sent next.
    pub(super) fn due(&self, una: u64, arrived: &Ranges) -> Option<(u64, u64)> {
        let first = arrived.gaps(self.from.max(una), self.to).next();
        first.or_else(|| {
            let (from, to) = self.lost(arrived);
            arrived.gaps(from.max(una), to).next().filter(|_| self.is_under_way(una))
        })
    }

    /// Bytes of this range that have not arrived are lost, and not under way.
    pub(super) fn lost(&self, arrived: &Ranges) -> (u64, u64) {
        let top = match arrived.max_end() {
            _ if self.blind => 0,
            _ if self.all => self.end,
            top => top.unwrap_or(0).min(self.end),
        };
        (self.swept, top)
    }

    /// The third duplicate of an acknowledgement: the segment that begins there is lost, and ends
    /// at `to`; perhaps more below `end` is.
    pub(super) fn on_duplicates(&mut self, ack: u64, to: u64, end: u64) {
        if self.is_under_way(ack) {
            // A copy, if it has left.
            (self.from, self.to) = (ack, to.min(self.swept));
        } else {
            let swept = to;
            *self = Self { from: ack, to, swept, end, blind: true, ..Self::default() };
        }
    }

    /// G has bytes above a hole, up to `top`.
    pub(super) fn on_hole(&mut self, una: u64, top: u64) {
        if self.end <= una {
            *self = Self { swept: una, ..Self::default() };
        }
        self.end = self.end.max(top);
        self.blind = false;
    }

    /// Bytes have arrived, of which those from `from` to `to` are new.
    pub(super) fn on_arrived(&mut self, from: u64, to: u64) {
        if self.behind > 0 && to > self.behind {
            (self.seen, self.again, self.behind) = (self.swept, 0, 0);
        } else if from < self.swept {
            self.seen = self.seen.max(from); // it was a hole before
        }
    }

    /// An ACK was taken: what is missing below [`Self::seen`] was lost again.
    pub(super) fn end_ack(&mut self, una: u64) {
        if una < self.seen && self.again < self.seen {
            let goes_on = self.from < self.to;
            self.from = if goes_on { self.from } else { self.again };
            (self.to, self.again) = (self.seen, self.seen);
        }
    }

    /// G has acknowledged all bytes below `ack`, and its next segment would end at `to`. `true`:
    /// recovery is over.
    pub(super) fn on_progress(&mut self, ack: u64, to: u64) -> bool {
        if self.end <= ack {
            *self = Self::default();
            return true;
        }
        if self.blind && self.to <= ack {
            // A partial ACK names the next hole (RFC 6582).
            (self.from, self.to) = (ack.max(self.swept), to);
            self.swept = self.swept.max(to);
        }
        false
    }

    /// Bytes that were due leave, behind all below `sent`.
    pub(super) fn on_sent(&mut self, from: u64, to: u64, sent: u64) {
        self.behind = sent;
        if from < self.to {
            self.from = to;
        } else {
            self.swept = self.swept.max(to);
        }
    }
}
