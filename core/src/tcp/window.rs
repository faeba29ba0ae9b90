//! What H promises R: the right edge, and the reservation behind it (SNOOP-08, 09, 33, 34, 39).
//!
//! We reason in edges, not sizes. Every byte below `re` has a reserved place in the store, so a
//! conforming R can never send what H cannot take, and INV-05 and INV-06 hold by construction.

use crate::limits;
use crate::store::flow_store::FlowStore;
use crate::tcp::Cx;
use crate::tcp::flow::{Flow, State};

impl Flow {
    /// The window field for the next segment to R; moves `re` if that is worth a segment.
    pub(crate) fn window_to_net(&mut self) -> u16 {
        let ack = self.ack_to_net();
        let shift = self.opt.shift_g;
        let edge = self.edge_wanted();
        let mut field = (edge.saturating_sub(ack) >> shift).min(u64::from(u16::MAX));
        if ack + (field << shift) < self.rx.re {
            // Rounding down would move the edge left: round up, as far as the reservation goes.
            // Each ACK may add another 2^shift - 1; beyond that R sees it move left by less than
            // 2^shift (RFC 7323 section 2.4), and H still takes what R sends up to `re`.
            let up = (self.rx.re - ack).div_ceil(1 << shift);
            let reserved = ack + (up << shift) <= self.reserved_edge();
            field = if reserved { up } else { (self.rx.re - ack) >> shift };
            field = field.min(u64::from(u16::MAX));
        }
        self.rx.re = self.rx.re.max(ack + (field << shift));
        u16::try_from(field).unwrap_or(u16::MAX)
    }

    /// The edge H would like to show: as it is, unless it can move by a useful amount
    /// (receiver SWS avoidance, RFC 9293 section 3.8.6.2.2).
    fn edge_wanted(&self) -> u64 {
        if self.state != State::On || self.flags.rst_pending {
            return self.rx.re;
        }
        let edge = self.rx.g_una + u64::from(self.rx.buffer_bytes);
        let useful = u64::from(self.opt.mss_to_guest).min(u64::from(self.rx.buffer_bytes) / 2);
        if edge >= self.rx.re + useful { edge } else { self.rx.re }
    }

    /// R sees a window of zero, though a few bytes may be left of a field's unit.
    pub(crate) fn window_shut(&self) -> bool {
        self.rx.re < self.rx.rcv_nxt + self.rounding_slack()
    }

    /// R is short of window and a segment would give it more (SNOOP-34).
    pub(crate) fn window_update_due(&self) -> bool {
        let left = self.rx.re.saturating_sub(self.rx.rcv_nxt);
        let gain = self.edge_wanted() - self.rx.re;
        let short = left < u64::from(self.rx.buffer_bytes) / 2 || gain >= left;
        (gain > 0 && short) || self.unit_is_free()
    }

    /// R sees no window because what is left is less than a field's unit, and by now the
    /// reservation covers the whole unit, which is worth a segment.
    fn unit_is_free(&self) -> bool {
        let (ack, unit) = (self.ack_to_net(), self.rounding_slack());
        let on = self.state == State::On && !self.flags.rst_pending;
        let hidden = self.window_shut() && ack < self.rx.re;
        on && hidden
            && unit >= u64::from(self.opt.mss_to_guest)
            && ack + unit <= self.reserved_edge()
    }

    /// Reserves the first edge, which G's own window fixes (SNOOP-09). `false`: stay PASS.
    pub(crate) fn reserve_first_edge(&mut self, cx: &mut Cx<'_, '_>) -> bool {
        let bytes = self.rx.re - self.rx.rcv_nxt + self.rounding_slack();
        bytes <= limits::FLOW_BUFFER_MAX && self.reserve(cx, limits::FLOW_BUFFER_MIN.max(bytes))
    }

    /// The highest edge the reservation covers.
    pub(crate) fn reserved_edge(&self) -> u64 {
        self.rx.g_una + u64::from(self.rx.buffer_bytes) + self.rounding_slack()
    }

    /// Grows the buffer to the initial size once data flows, follows G's own window, which knows
    /// the round trip, and doubles each time R filled it and G then drained it (SNOOP-39). No flow
    /// grows when half of the VM's budget is taken, unless G itself shows as much.
    ///
    /// The first step does not wait until G has proved to be ESTABLISHED. COM-29 would stop at the
    /// edge of G's SYN-ACK, which is 64 KiB at most, and so make every upload of 100 KB wait for
    /// G's next time slice. What G has not accepted is held and repeated either way, and a G that
    /// never accepts ends in a reset of both sides; only the amount differs.
    pub(crate) fn maybe_grow_buffer(&mut self, cx: &mut Cx<'_, '_>) {
        if self.state != State::On {
            return;
        }
        let now = u64::from(self.rx.buffer_bytes);
        let slack = self.rounding_slack();
        let shown = self.rx.g_re.saturating_sub(self.rx.g_una);
        if shown > now {
            self.reserve(cx, shown + slack);
            return;
        }
        let roomy = cx.vm.reserved_pages < cx.vm.budget_pages / 2;
        if now + slack < limits::FLOW_BUFFER_INITIAL && self.counters.early_acked_bytes > 0 {
            if roomy {
                self.reserve(cx, limits::FLOW_BUFFER_INITIAL);
            }
        } else if self.flags.filled && self.held_bytes() == 0 {
            self.flags.filled = false;
            if roomy {
                self.reserve(cx, now * 2);
            }
        }
    }

    /// Reserves room for `bytes` at once, rounding slack included. `false`: nothing changed.
    fn reserve(&mut self, cx: &mut Cx<'_, '_>, bytes: u64) -> bool {
        // A window field cannot say more than this; beyond it a reservation would be wasted.
        let sayable = u64::from(u16::MAX) << self.opt.shift_g;
        let bytes = bytes.min(limits::FLOW_BUFFER_MAX).min(sayable + self.rounding_slack());
        let pages = FlowStore::pages_for(bytes);
        let more = pages.saturating_sub(u64::from(self.rx.reserved_pages));
        if !cx.vm.reserve(more) {
            return false;
        }
        self.rx.reserved_pages += u32::try_from(more).unwrap_or(u32::MAX);
        let buffer = u32::try_from(bytes - self.rounding_slack()).unwrap_or(u32::MAX);
        self.rx.buffer_bytes = self.rx.buffer_bytes.max(buffer);
        true
    }

    /// How far rounding a window field up may push the edge.
    fn rounding_slack(&self) -> u64 {
        1 << self.opt.shift_g
    }
}
