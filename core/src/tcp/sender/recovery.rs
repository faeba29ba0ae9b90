//! Losses inside G: which of the bytes that it was given H gives it again (SNOOP-29).

/// The bytes that are given to G again. Over, or never begun, once `end` is acknowledged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recovery {
    /// Range that is sent next; empty if `from >= to`.
    from: u64,
    /// End of that range.
    to: u64,
    /// Everything below was retransmitted in this recovery.
    done: u64,
    /// Recovery ends when G acknowledges this.
    end: u64,
    /// After a local timeout: bytes that may be under way to G at once, a segment at first and up
    /// to twice as many with each ACK (RFC 6298 section 5.4). Else `u64::MAX`, no limit.
    in_flight_max: u64,
}

impl Default for Recovery {
    fn default() -> Self {
        Self { from: 0, to: 0, done: 0, end: 0, in_flight_max: u64::MAX }
    }
}

impl Recovery {
    /// A range is to be sent.
    pub(super) const fn is_due(&self) -> bool {
        self.from < self.to
    }

    /// G has yet to acknowledge the lost bytes.
    pub(super) const fn is_under_way(&self, una: u64) -> bool {
        self.end > una
    }

    /// Bytes that may be under way to G at once.
    pub(super) const fn in_flight_max(&self) -> u64 {
        self.in_flight_max
    }

    /// There is nothing to remember.
    pub(in crate::tcp) const fn is_over(&self, una: u64) -> bool {
        !self.is_under_way(una) && self.in_flight_max == u64::MAX
    }

    /// The third duplicate: the segment `[ack, to)` is lost, and perhaps more below `end`.
    pub(super) fn begin(&mut self, ack: u64, to: u64, end: u64) {
        self.start(ack, end);
        self.first_hole(ack, to);
    }

    /// G lacks bytes below `hole_end` and has some above it, up to `top`.
    pub(super) fn on_hole(&mut self, una: u64, hole_end: u64, top: u64, next: u64) {
        if self.end <= una {
            self.start(una, top);
        }
        let from = self.done.max(una);
        if from < hole_end && !self.is_due() {
            self.from = from;
            self.to = hole_end.min(next);
            self.done = hole_end;
        }
    }

    /// G has acknowledged `acked` bytes more, up to `ack`; it was handed all below `sent`, and its
    /// next segment would end at `to`. `true`: recovery is over.
    pub(super) fn on_progress(&mut self, ack: u64, acked: u64, sent: u64, to: u64) -> bool {
        let most = &mut self.in_flight_max;
        *most = most.saturating_add(acked.min(*most));
        if ack.saturating_add(*most) >= sent {
            *most = u64::MAX; // all that was lost is under way again
        }
        if self.end <= ack {
            self.start(0, 0);
            return true;
        }
        if self.to <= ack {
            self.first_hole(ack, to); // a partial ACK names the next hole (RFC 6582)
        } else {
            self.from = self.from.max(ack);
        }
        false
    }

    /// A local timeout: the lost bytes are not known, so one segment goes first.
    pub(super) fn on_timeout(&mut self, mss: u64) {
        self.start(0, 0);
        self.in_flight_max = mss;
    }

    /// The ring was lost, not G's patience.
    pub(super) fn on_ring_reset(&mut self) {
        *self = Self::default();
    }

    /// The next range to send, of at most `payload_max` bytes.
    pub(super) fn poll(&mut self, una: u64, payload_max: u64) -> Option<(u64, u64)> {
        let from = self.from.max(una);
        let to = self.to.min(from + payload_max);
        if from >= to {
            self.from = self.to;
            return None;
        }
        self.from = to;
        Some((from, to))
    }

    fn start(&mut self, from: u64, end: u64) {
        *self = Self { from, to: from, done: from, end, in_flight_max: self.in_flight_max };
    }

    fn first_hole(&mut self, ack: u64, to: u64) {
        self.from = ack.max(self.done);
        self.to = to;
        self.done = self.done.max(to);
    }
}
