//! The arithmetic of the edge: the edge that H would like to show R, and the value of a window
//! field.
//!
//! We reason in edges, not sizes. Every byte below `edge` has a reserved place in the store, so a
//! conforming R can never send what H cannot take, and INV-05 and INV-06 hold by construction.
//!
//! Only a parked flow has no place: it was idle, owes nothing, and G has room for the bytes that a
//! sender may send after a pause. Its next data takes the place again, or passes to G while there
//! is none.

use crate::limits::{self, PAGE};
use crate::tcp::receiver::Receiver;
use crate::tcp::vm::Vm;

/// The state on which the window depends, besides the receiver's numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// R may be shown another edge.
    pub(crate) on: bool,
    /// Shift of the window field.
    pub(crate) scale: u8,
    /// Largest payload of a segment of R.
    pub(crate) mss: u64,
    /// The acknowledgement number for R.
    pub(crate) ack: u64,
    /// Everything below has left the store.
    pub(crate) guest_una: u64,
    /// The edge that G itself shows.
    pub(crate) guest_edge: u64,
    /// G has answered.
    pub(crate) guest_is_established: bool,
    /// The connection ends behind G: R gets more room only if it needs that (FWD-02).
    pub(crate) is_behind: bool,
}

impl Terms {
    /// How far rounding a window field up may push the edge.
    pub(super) const fn rounding_slack(&self) -> u64 {
        1 << self.scale
    }

    /// A window field cannot show more than this; a larger reservation would be wasted.
    pub(super) fn useful_buffer(&self, bytes: u64) -> u64 {
        let sayable = u64::from(u16::MAX) << self.scale;
        bytes.min(limits::FLOW_BUFFER_MAX).min(sayable + self.rounding_slack())
    }

    /// A buffer of `now` bytes, which R has filled, may double: G has drained it, or has answered
    /// and has room, so that it takes more in its next time slice, and R need not wait for that. A
    /// container gets no more than it shows (FWD-02).
    pub(super) fn may_double(&self, now: u64, is_drained: bool) -> bool {
        let ahead = self.is_open() && now * 2 <= limits::FLOW_BUFFER_AHEAD_MAX;
        (is_drained || ahead) && !self.is_behind
    }

    /// G has answered, and has room.
    pub(super) const fn is_open(&self) -> bool {
        self.guest_is_established && self.guest_edge > self.guest_una
    }
}

impl Receiver {
    /// The largest value of a window field for an edge.
    #[inline]
    pub(super) fn field_for(&self, t: &Terms, edge: u64) -> u64 {
        let window = edge.saturating_sub(t.ack);
        (window >> t.scale).min(u64::from(u16::MAX))
    }

    /// The edge H would like to show: as it is, unless it can move by a useful amount
    /// (receiver SWS avoidance, RFC 9293 section 3.8.6.2.2).
    #[inline]
    pub(super) fn edge_wanted(&self, t: &Terms) -> u64 {
        let own = t.guest_una + u64::from(self.buffer_bytes);
        if !t.on || self.makes_no_promise() {
            // LIFE-12: late, R is shown the edge of G, as far as it is reserved.
            let late = t.on && !self.reset_waits();
            let follows = late && (t.guest_edge <= own || self.is_parked());
            return if follows { self.edge.max(t.guest_edge) } else { self.moved(t, own, late) };
        }
        if self.is_parked() {
            return self.edge.max(t.guest_edge); // what passes to G, G itself has room for
        }
        self.moved(t, own, true)
    }

    /// The edge, or `edge` if it is beyond that by a useful amount, and may be shown.
    #[inline]
    fn moved(&self, t: &Terms, edge: u64, may: bool) -> u64 {
        let useful = t.mss.min(u64::from(self.buffer_bytes) / 2);
        if may && edge >= self.edge + useful { edge } else { self.edge }
    }

    /// R sees a window of zero, though a few bytes may be left of a field's unit.
    pub(crate) fn window_shut(&self, t: &Terms) -> bool {
        self.edge < self.next + t.rounding_slack()
    }

    /// R is short of window and a segment would give it more (SNOOP-34): more than a field can show
    /// beyond the edge that R knows. Otherwise R would get a duplicate ACK, and take the third for
    /// a loss.
    #[inline]
    pub(crate) fn window_update_due(&self, t: &Terms) -> bool {
        let left = self.edge.saturating_sub(self.next);
        let gain_max = (t.guest_una + u64::from(self.buffer_bytes)).saturating_sub(self.edge);
        let enough = left >= t.rounding_slack().max(u64::from(self.buffer_bytes) / 2);
        if enough && gain_max < left && !self.is_parked() {
            return false; // nearly always
        }
        let field = self.field_for(t, self.edge_wanted(t));
        let gain = (t.ack + (field << t.scale)).saturating_sub(self.edge);
        let short = left < u64::from(self.buffer_bytes) / 2 || gain >= left;
        (gain > 0 && short) || self.unit_is_free(t)
    }

    /// In the late mode: G shows an edge that R has not seen (LIFE-13). While an ACK waits behind a
    /// block, each of G's makes it a crumb larger: then it has to be so by a useful amount.
    pub(crate) fn has_new_edge(&self, t: &Terms) -> bool {
        let field = self.field_for(t, self.edge_wanted(t));
        let useful = t.mss.min(u64::from(self.buffer_bytes) / 2);
        let least = if t.guest_una > t.ack { useful.max(1) } else { 1 };
        t.ack + (field << t.scale) >= self.edge + least
    }

    /// R sees no window because less than a field's unit is left, and by now the reservation covers
    /// the whole unit, which is worth a segment.
    #[inline]
    fn unit_is_free(&self, t: &Terms) -> bool {
        let unit = t.rounding_slack();
        let on = t.on && !self.makes_no_promise();
        let hidden = self.window_shut(t) && t.ack < self.edge;
        on && hidden && unit >= t.mss && t.ack + unit <= self.reserved_edge(t)
    }

    /// The highest edge the reservation covers.
    pub(crate) fn reserved_edge(&self, t: &Terms) -> u64 {
        t.guest_una + u64::from(self.buffer_bytes) + t.rounding_slack()
    }

    /// G itself has room for the bytes that R may send after a pause, so their place need not be
    /// kept. Of jumbo segments only so many as fit into a first window, which G shows as whole
    /// segments (`tcp_select_initial_window` of Linux 6.18).
    pub(crate) fn guest_has_room(&self, t: &Terms) -> bool {
        t.guest_edge >= edge_after_pause(self.next, self.edge, t.mss)
    }

    /// Nothing is held, in order or not.
    pub(super) fn is_drained(&self, t: &Terms) -> bool {
        self.next <= t.guest_una
    }

    /// R must not permanently be shown less than G shows, so the flow is let go: at once if H can
    /// never show as much, else after a whole window of bytes, because only then R may have wanted
    /// more. G has all bytes, so nothing stops while it drains.
    pub(super) fn is_short(&self, t: &Terms, vm: &Vm, shown: u64) -> bool {
        let now = u64::from(self.buffer_bytes);
        let most = (vm.growth_max() * PAGE as u64).min(limits::FLOW_BUFFER_MAX);
        let short = shown > now && (shown > most || self.early_acked_bytes > now);
        short && self.is_drained(t) && self.out_of_order.is_empty()
    }
}

/// The end of what R may send after a pause, of which it has sent the bytes below `next` and was
/// shown `edge`: segments of `mss` bytes.
pub(crate) fn edge_after_pause(next: u64, edge: u64, mss: u64) -> u64 {
    let first = limits::FLOW_BUFFER_MIN.saturating_sub(mss);
    edge.min(next + (limits::RESTART_SEGMENTS * mss).min(first))
}
