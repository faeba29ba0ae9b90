//! What H promises R: the right edge, and the reservation behind it (SNOOP-08, SNOOP-09, SNOOP-33,
//! SNOOP-34, SNOOP-39).
//!
//! We reason in edges, not sizes. Every byte below `re` has a reserved place in the store, so a
//! conforming R can never send what H cannot take, and INV-05 and INV-06 hold by construction.
//!
//! Only a parked flow has none: it was idle, owes nothing, and G has room for what a sender may
//! send after a pause. Its next data takes the place again, or passes to G while there is none.

use crate::limits::{self, PAGE};
use crate::store::flow_store::FlowStore;
use crate::tcp::Cx;
use crate::tcp::flow::{Flow, Why};

/// Segments that a sender may send after a pause (RFC 5681 section 4.1, RFC 6928).
const RESTART_SEGMENTS: u64 = 10;

impl Flow {
    /// The window field for the next segment to R; moves `re` if that is worth a segment.
    pub(crate) fn window_to_net(&mut self) -> u16 {
        let ack = self.ack_to_net();
        let shift = self.opt.shift_g;
        let mut field = self.field_for(self.edge_wanted());
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

    /// The most that a window field can say of an edge.
    fn field_for(&self, edge: u64) -> u64 {
        let window = edge.saturating_sub(self.ack_to_net());
        (window >> self.opt.shift_g).min(u64::from(u16::MAX))
    }

    /// The edge H would like to show: as it is, unless it can move by a useful amount
    /// (receiver SWS avoidance, RFC 9293 section 3.8.6.2.2).
    fn edge_wanted(&self) -> u64 {
        if !self.standing.is_on() || self.flags.rst_pending {
            return self.rx.re;
        }
        if self.is_parked() {
            return self.rx.re.max(self.rx.g_re); // what passes to G, G itself has room for
        }
        let edge = self.rx.g_una + u64::from(self.rx.buffer_bytes);
        let useful = u64::from(self.opt.mss_to_guest).min(u64::from(self.rx.buffer_bytes) / 2);
        if edge >= self.rx.re + useful { edge } else { self.rx.re }
    }

    /// R sees a window of zero, though a few bytes may be left of a field's unit.
    pub(crate) fn window_shut(&self) -> bool {
        self.rx.re < self.rx.rcv_nxt + self.rounding_slack()
    }

    /// R is short of window and a segment would give it more (SNOOP-34): more than a field can say
    /// of the edge it knows, or R would get a duplicate ACK, and take the third for a loss.
    pub(crate) fn window_update_due(&self) -> bool {
        let left = self.rx.re.saturating_sub(self.rx.rcv_nxt);
        let field = self.field_for(self.edge_wanted());
        let gain = (self.ack_to_net() + (field << self.opt.shift_g)).saturating_sub(self.rx.re);
        let short = left < u64::from(self.rx.buffer_bytes) / 2 || gain >= left;
        (gain > 0 && short) || self.unit_is_free()
    }

    /// R sees no window because what is left is less than a field's unit, and by now the
    /// reservation covers the whole unit, which is worth a segment.
    fn unit_is_free(&self) -> bool {
        let (ack, unit) = (self.ack_to_net(), self.rounding_slack());
        let on = self.standing.is_on() && !self.flags.rst_pending;
        let hidden = self.window_shut() && ack < self.rx.re;
        on && hidden
            && unit >= u64::from(self.opt.mss_to_guest)
            && ack + unit <= self.reserved_edge()
    }

    /// Reserves what was shown so far: the first edge, which G's own window fixes (SNOOP-09), or
    /// that of a parked flow. `false`: nothing changed.
    fn reserve_edge(&mut self, cx: &mut Cx<'_, '_>) -> bool {
        let bytes = self.rx.re - self.rx.rcv_nxt + self.rounding_slack();
        if bytes > limits::FLOW_BUFFER_MAX {
            return false;
        }
        let bytes = self.useful_buffer(bytes.max(limits::FLOW_BUFFER_MIN));
        let pages = FlowStore::pages_for(bytes);
        // What is more than a first window leaves room for those of others.
        let first = bytes <= limits::FLOW_BUFFER_MIN + self.rounding_slack();
        let fits = first || pages <= cx.vm.spare();
        if !fits || !cx.vm.reserve(pages) {
            return false;
        }
        self.set_buffer(pages, bytes);
        true
    }

    /// Takes a reservation for the edge that was shown, and a record. `false`: there is none.
    pub(crate) fn take_place(&mut self, cx: &mut Cx<'_, '_>) -> bool {
        let taken = self.reserve_edge(cx) && self.take_record(cx);
        if !taken {
            self.give_back(cx);
        }
        taken
    }

    /// Has, or takes again, a place for what R sends; not while G has bytes that H has no copy of
    /// (COM-28). `false`: it has none.
    pub(crate) fn wake(&mut self, cx: &mut Cx<'_, '_>) -> bool {
        !self.is_parked() || (self.rx.g_una >= self.rx.passed_max && self.take_place(cx))
    }

    /// G itself has room for what R may send after a pause: its place need not be kept.
    pub(crate) fn guest_has_room(&self) -> bool {
        let restart = RESTART_SEGMENTS * u64::from(self.opt.mss_to_guest);
        self.rx.g_re >= self.rx.re.min(self.rx.rcv_nxt + restart)
    }

    /// The highest edge the reservation covers.
    pub(crate) fn reserved_edge(&self) -> u64 {
        self.rx.g_una + u64::from(self.rx.buffer_bytes) + self.rounding_slack()
    }

    /// Grows the buffer to the initial size once data flows, follows G's own window, which knows
    /// the round trip, and doubles each time R filled it and G then drained it (SNOOP-39); at first
    /// without waiting for G. It grows by what fits, and only to follow G's window when half of the
    /// VM's budget is taken.
    ///
    /// The first step does not wait until G has proved to be ESTABLISHED (COM-29). To stop at the
    /// edge of G's SYN-ACK, 64 KiB at most, would make every upload of 100 KB wait for G's next
    /// time slice. What G has not accepted is held and repeated either way, and a G that
    /// never accepts ends in a reset of both sides; only the amount differs.
    pub(crate) fn maybe_grow_buffer(&mut self, cx: &mut Cx<'_, '_>) {
        if !self.standing.is_on() || self.is_parked() {
            return;
        }
        let now = u64::from(self.rx.buffer_bytes);
        let slack = self.rounding_slack();
        let shown = self.rx.g_re.saturating_sub(self.rx.g_una);
        if shown > now {
            self.grow(cx, shown + slack);
            self.let_go_if_short(cx, shown);
            return;
        }
        let roomy = cx.vm.reserved_pages < cx.vm.budget_pages / 2;
        if now + slack < limits::FLOW_BUFFER_INITIAL && self.counters.early_acked_bytes > 0 {
            if roomy {
                self.grow(cx, limits::FLOW_BUFFER_INITIAL);
            }
        } else if self.flags.filled && (self.held_bytes() == 0 || self.grows_ahead(now)) {
            self.flags.filled = false;
            if roomy {
                self.grow(cx, (now * 2).min(limits::FLOW_BUFFER_DOUBLED_MAX));
            }
        }
    }

    /// A G that has answered and has room takes more in its next time slice: R need not wait for
    /// that.
    fn grows_ahead(&self, now: u64) -> bool {
        let open = self.flags.proven && self.rx.g_re > self.rx.g_una;
        open && now * 2 <= limits::FLOW_BUFFER_AHEAD_MAX
    }

    /// R must not be shown less than G shows for good: the flow drains, passes and stays so.
    /// At once if H can never show as much; else after a whole window of bytes, for only then R may
    /// have wanted more. G has all there is, so that nothing stops while it drains.
    fn let_go_if_short(&mut self, cx: &mut Cx<'_, '_>, shown: u64) {
        let now = u64::from(self.rx.buffer_bytes);
        let most = (cx.vm.growth_max() * PAGE as u64).min(limits::FLOW_BUFFER_MAX);
        let short = shown > now && (shown > most || self.counters.early_acked_bytes > now);
        if short && self.held_bytes() == 0 && self.ooo.is_empty() {
            cx.vm.counters.flows_refused += 1;
            self.drain(Why::NoBudget);
        }
    }

    /// Grows toward room for `bytes`, rounding slack included, by as much as the VM has for it.
    fn grow(&mut self, cx: &mut Cx<'_, '_>, bytes: u64) {
        let mut bytes = self.useful_buffer(bytes);
        let own = u64::from(self.rx.reserved_pages);
        let wanted = FlowStore::pages_for(bytes).saturating_sub(own);
        let more = wanted.min(cx.vm.growth(own));
        if more < wanted {
            // The window that this many pages hold at any alignment, see `pages_for`.
            bytes = (own + more - 1) * PAGE as u64;
        }
        if cx.vm.reserve(more) {
            self.set_buffer(own + more, bytes);
        }
    }

    /// A window field cannot say more than this; beyond it a reservation would be wasted.
    fn useful_buffer(&self, bytes: u64) -> u64 {
        let sayable = u64::from(u16::MAX) << self.opt.shift_g;
        bytes.min(limits::FLOW_BUFFER_MAX).min(sayable + self.rounding_slack())
    }

    fn set_buffer(&mut self, pages: u64, bytes: u64) {
        let buffer = u32::try_from(bytes - self.rounding_slack()).unwrap_or(u32::MAX);
        self.rx.reserved_pages = u32::try_from(pages).unwrap_or(u32::MAX);
        self.rx.buffer_bytes = self.rx.buffer_bytes.max(buffer);
    }

    /// How far rounding a window field up may push the edge.
    fn rounding_slack(&self) -> u64 {
        1 << self.opt.shift_g
    }
}
