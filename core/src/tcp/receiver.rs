//! The receiver of the inbound pipe: the bytes of R that H has, those it has acknowledged, and the
//! edge it has shown (SNOOP-06 to SNOOP-11, SNOOP-33, SNOOP-34, SNOOP-39).
//!
//! It acknowledges "early", once bytes are stored, or "late", once G has acknowledged them
//! (LIFE-12). `Flow::acknowledge_late` and `Flow::acknowledge_early` change the mode at any time.
//! In the late mode it shows R the edge of G, promises nothing, and is silent while it has bytes
//! that are not acknowledged (LIFE-13).
//!
//! It moves its numbers and calls nobody; `from_net` checks segments, `gates` writes headers,
//! [`window`] has the arithmetic of the edge.

pub(crate) mod acks;
mod ahead;
mod mode;
mod resumed;
pub(crate) mod window;

use crate::drops::DropReason;
use crate::limits;
use crate::store::arena::{Arena, RecordId};
use crate::store::flow_store::FlowStore;
use crate::store::ranges::Ranges;
use crate::tcp::index;
use crate::tcp::receiver::acks::Acks;
use crate::tcp::receiver::mode::Odd;
use crate::tcp::receiver::window::Terms;
use crate::tcp::sender::Stream;
use crate::tcp::vm::Vm;
use crate::time::Instant;
use crate::wire::saved::saved;
use crate::wire::seq::Seq;

/// "No such sequence number": above anything 64-bit unwrapping can reach.
const NONE: u64 = u64::MAX;

/// A data-bearing or empty segment with its range in the 64-bit space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) seq: u64,
    pub(crate) end: u64,
    pub(crate) fin: bool,
}

impl Range {
    pub(crate) const fn len(self) -> u64 {
        self.end - self.seq
    }
}

/// Where a segment lies in R's stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    /// Empty, and one below the next number: R asks for an ACK (SNOOP-36).
    Keepalive,
    /// All of it is there (SNOOP-11, SNOOP-37).
    Old,
    /// Beyond the edge; or empty, and not at a number of the window.
    Outside,
    /// In the window, at least in part (SNOOP-02).
    Window,
}

/// H as the receiver for R.
///
/// Order: `next <= edge`, and, unless the flow is parked, `edge <= reserved_edge()`.
#[derive(Debug)]
pub(crate) struct Receiver {
    /// Next in-order byte expected from R; an ACK of `next` promises every byte below it.
    next: u64,
    /// Highest right edge ever shown to R; H must take every byte below it.
    edge: u64,
    /// Sequence of R's FIN once seen in window, or [`NONE`].
    fin: u64,
    /// End of the bytes that reached G past the store: urgent data, bytes before `On` (SNOOP-24).
    passed: u64,
    /// Payload bytes acknowledged to R ahead of G.
    early_acked_bytes: u64,
    /// When it acknowledges.
    pub(super) acks: Acks,
    /// Ranges above `next` that are held.
    out_of_order: Ranges,
    /// Bytes H may hold and promise for this flow at once.
    buffer_bytes: u32,
    /// Store pages reserved for that from the VM's budget (INV-06).
    reserved_pages: u16,
    /// The record in the arena, while `On` or `Drain`, or rebuilt.
    record: Option<RecordId>,
    /// CE was seen and R has not answered with CWR (SNOOP-19).
    ece: bool,
    /// Its unusual states, nearly always none.
    odd: Odd,
    /// The store ran into its bound since it was last empty (SNOOP-39).
    filled: bool,
    /// A part of the buffer goes back as G takes bytes, see [`ahead`].
    lent: bool,
}

saved! {
    Receiver {
        next, edge, fin as OrNone, passed, early_acked_bytes, acks, out_of_order, buffer_bytes,
        reserved_pages, ece, odd, filled,
    }
    reset {
        record = None, // import takes one of its own arena
        lent = false, // the flow keeps that part
    }
    check |it| it.edge >= it.next && it.fin >= it.next
}

impl Receiver {
    /// A receiver that expects `first`.
    pub(crate) fn new(now: Instant, first: u64) -> Self {
        Self {
            next: first,
            acks: Acks::new(now, first),
            edge: first,
            fin: NONE,
            passed: first,
            early_acked_bytes: 0,
            out_of_order: Ranges::default(),
            buffer_bytes: 0,
            reserved_pages: 0,
            record: None,
            ece: false,
            odd: Odd::default(),
            filled: false,
            lent: false,
        }
    }

    /// The state in a predecessor's record: bytes below `next` were acknowledged.
    pub(crate) fn recovered(now: Instant, next: u64, edge: u64, record: Option<RecordId>) -> Self {
        Self { edge: edge.max(next), record, ..Self::new(now, next) }
    }

    // --- Its knowledge ---------------------------------------------------------------------------

    /// Next in-order byte expected from R.
    #[inline]
    pub(crate) const fn next(&self) -> u64 {
        self.next
    }

    /// Highest right edge ever shown to R.
    #[inline]
    pub(crate) const fn edge(&self) -> u64 {
        self.edge
    }

    /// Sequence of R's FIN, once seen in window; else above every other.
    #[inline]
    pub(crate) const fn fin(&self) -> u64 {
        self.fin
    }

    /// R's FIN has been seen in window.
    pub(crate) const fn has_fin(&self) -> bool {
        self.fin != NONE
    }

    /// R's FIN is next in order, or was.
    #[inline]
    pub(crate) const fn is_closed(&self) -> bool {
        self.fin == self.next
    }

    /// The bytes in order, for the sender.
    #[inline]
    pub(crate) const fn stream(&self) -> Stream {
        Stream { end: self.next, fin: self.is_closed() }
    }

    /// End of the bytes that reached G past the store.
    pub(crate) const fn passed(&self) -> u64 {
        self.passed
    }

    /// Ranges above `next` that are held.
    #[inline]
    pub(crate) const fn out_of_order(&self) -> &Ranges {
        &self.out_of_order
    }

    /// Payload bytes acknowledged to R ahead of G.
    pub(crate) const fn early_acked_bytes(&self) -> u64 {
        self.early_acked_bytes
    }

    /// Bytes H may hold and promise for this flow at once.
    pub(crate) const fn buffer_bytes(&self) -> u32 {
        self.buffer_bytes
    }

    /// Store pages reserved for that.
    pub(crate) fn reserved_pages(&self) -> u32 {
        self.reserved_pages.into()
    }

    /// The record in the arena.
    #[inline]
    pub(crate) const fn record(&self) -> Option<RecordId> {
        self.record
    }

    /// CE has to be echoed.
    #[inline]
    pub(crate) const fn ece(&self) -> bool {
        self.ece
    }

    /// A valid RST of R waits behind the store.
    #[inline]
    pub(crate) const fn reset_waits(&self) -> bool {
        self.odd.has(Odd::RESET_WAITS)
    }

    /// The segment asks for an ACK and brings nothing: it begins one below the next number, and has
    /// an octet at most. That may lie in the place of R's FIN (RFC 9293 section 3.8.4).
    pub(crate) fn is_keepalive(&self, r: Range) -> bool {
        r.len() <= 1 && !r.fin && r.seq + 1 == self.stream().all()
    }

    /// Where a segment lies.
    pub(crate) fn place(&self, r: Range) -> Place {
        let next = self.stream().all();
        if self.is_keepalive(r) && r.len() == 0 {
            return Place::Keepalive;
        }
        if r.len() == 0 && !r.fin {
            // In the late mode R may have gone back to the end of the acknowledged bytes; G takes
            // an ACK from there (`rcv_wup` in `tcp_sequence` of Linux 6.18).
            let first = if self.is_late() { self.acks.sent().min(self.next) } else { self.next };
            let outside = r.seq < first || r.seq > self.edge.max(next);
            return if outside { Place::Outside } else { Place::Window };
        }
        let new_fin = r.fin && !self.is_closed() && r.end == self.next;
        if r.end <= next && !new_fin {
            return Place::Old;
        }
        let beyond = r.seq > self.edge || (r.len() > 0 && r.seq >= self.edge);
        if beyond { Place::Outside } else { Place::Window }
    }

    /// An RST counts exactly where Linux says so: at the next number, at the end of a range that is
    /// held, and at R's FIN (SNOOP-15). For R the next number is the one that it was shown last.
    pub(crate) fn takes_reset(&self, seq: u64) -> bool {
        let next = self.stream().all();
        seq == next
            || self.out_of_order.max_end().is_some_and(|end| seq == end)
            || (self.is_closed() && seq + 1 == next)
            || (self.is_late() && seq == self.acks.sent()) // an answer to an ACK of H
    }

    /// This is the next sequence number.
    #[inline]
    pub(crate) fn is_next(&self, seq: Seq) -> bool {
        seq == Seq::wrap(self.next)
    }

    /// The segment is next, as a whole, and nothing that came before makes it unusual.
    #[inline]
    pub(crate) fn expects(&self, r: Range) -> bool {
        r.seq == self.next
            && r.end <= self.edge
            && self.fin == NONE
            && self.out_of_order.is_empty()
            && self.is_plain()
    }

    /// A byte may lie there.
    pub(crate) fn is_in_window(&self, seq: u64) -> bool {
        (self.next..self.edge).contains(&seq)
    }

    /// The first run of bytes of a segment that R had sent before, for its DSACK: below `next`, or
    /// in an out-of-order range (RFC 2883 section 4).
    fn duplicate_part(&self, seq: u64, end: u64) -> Option<(u64, u64)> {
        if seq < self.next && seq < end {
            return Some((seq, end.min(self.next)));
        }
        let shared = |(from, to): (u64, u64)| (from.max(seq), to.min(end));
        self.out_of_order.iter().map(shared).find(|(from, to)| from < to)
    }

    // --- Reassembly ----------------------------------------------------------------------------

    /// R's stream begins with `first`, at the edge that G has shown.
    pub(crate) fn on_syn_ack(&mut self, first: u64, edge: u64, passed: u64) {
        self.next = first;
        self.acks.on_syn_ack(first);
        self.edge = edge;
        self.passed = passed;
    }

    /// R's third ACK begins where G's SYN-ACK ends: data of its SYN that G did not acknowledge R
    /// counts as not sent.
    pub(crate) fn on_third_ack_from_net(&mut self) {
        self.passed = self.next;
    }

    /// G's third ACK shows R the first edge.
    pub(crate) fn on_third_ack_from_guest(&mut self, edge: u64) {
        self.edge = edge;
    }

    /// Takes the new bytes of the segment within the window into the store.
    pub(crate) fn on_data(
        &mut self,
        range: Range,
        payload: &[u8],
        store: &mut FlowStore,
        arena: &mut Arena<'_>,
    ) -> Result<Taken, DropReason> {
        let before = self.next;
        let from = range.seq.max(before);
        // Of two FINs the first counts, and nothing lies behind it.
        let to = range.end.min(self.edge).min(self.fin);
        let duplicate = self.duplicate_part(range.seq, range.end);
        if from < to {
            let skip = index(from - range.seq);
            let take = index(to - from);
            self.keep(&payload[skip..skip + take], from, to, store, arena)?;
        }
        if range.fin {
            self.on_fin(range.end);
        }
        let in_order = self.next >= to && from == before;
        let advanced = self.next - before;
        self.early_acked_bytes += if self.is_late() { 0 } else { advanced };
        let whole = range.seq == before && advanced == range.len();
        let plain = in_order && whole && self.out_of_order.is_empty();
        Ok(Taken { advanced, plain, duplicate })
    }

    /// A segment that was expected ([`Self::expects`]) is in the store.
    #[inline]
    pub(crate) fn on_expected(&mut self, range: Range) -> Taken {
        self.next = range.end;
        self.early_acked_bytes += range.len();
        Taken { advanced: range.len(), plain: true, duplicate: None }
    }

    /// Copies `bytes` for `[from, to)` into the store; the first copy of a byte wins (INV-15).
    fn keep(
        &mut self,
        bytes: &[u8],
        from: u64,
        to: u64,
        store: &mut FlowStore,
        arena: &mut Arena<'_>,
    ) -> Result<(), DropReason> {
        let Some(rec) = self.record else { return Err(DropReason::NoStore) };
        let fills = from == self.next;
        // Its bytes have a reserved place like all below `edge`; only the ranges are bounded.
        if !fills && !self.out_of_order.has_room_for(from, to) {
            return Err(DropReason::OutOfOrderLimit);
        }
        for (a, b) in self.out_of_order.gaps(from, to) {
            let part = &bytes[index(a - from)..index(b - from)];
            if !store.write(arena, rec, a, part) {
                return Err(DropReason::NoStore);
            }
        }
        if fills {
            // Never through the ranges: their bounds must not keep the one segment out that R will
            // repeat.
            self.next = to;
            self.pull_in_order();
        } else {
            self.out_of_order.insert(from, to);
        }
        Ok(())
    }

    /// R's stream ends at `fin`, unless it ended before: no byte lies behind the first FIN, be it
    /// held or passed to G.
    pub(crate) fn on_fin(&mut self, fin: u64) {
        let held = self.out_of_order.max_end().unwrap_or(0).max(self.next);
        let last = held.max(self.passed);
        if (last..=self.edge).contains(&fin) && self.fin == NONE {
            self.fin = fin;
        }
    }

    /// A part of R's stream went to G past the store, up to `end`.
    pub(crate) fn on_passed(&mut self, end: u64) {
        self.passed = self.passed.max(end);
    }

    /// G has acknowledged bytes below `end`. `true`: some reached it past H (fragments, urgent
    /// data), so that they are acknowledged now.
    #[inline]
    pub(crate) fn on_taken_by_guest(&mut self, end: u64) -> bool {
        let past = end > self.next;
        if past {
            self.next = end;
            self.edge = self.edge.max(end);
            self.pull_in_order();
        }
        past
    }

    /// Out-of-order ranges that `next` has reached become in order.
    fn pull_in_order(&mut self) {
        if !self.out_of_order.is_empty() {
            self.next = self.out_of_order.contiguous_from(self.next);
            self.out_of_order.remove_below(self.next);
        }
    }

    /// R answers CE marks with CWR, and its data carries them (SNOOP-19).
    pub(crate) fn on_congestion_marks(&mut self, cwr: bool, marked: bool) {
        if cwr {
            self.ece = false;
        }
        if marked {
            self.ece = true;
        }
    }

    // --- Edge and reservation ------------------------------------------------------------------

    /// The window field for the next segment to R; moves the edge if that is worth a segment.
    #[inline]
    pub(crate) fn advertise_window(&mut self, t: &Terms) -> u16 {
        let shift = t.scale;
        let mut field = self.field_for(t, self.edge_wanted(t));
        if t.ack + (field << shift) < self.edge {
            // Rounding down would move the edge left: round up, as far as the reservation goes.
            // Each ACK may add another 2^shift - 1; beyond that R sees it move left by less than
            // 2^shift (RFC 7323 section 2.4), and H still takes what R sends up to `edge`.
            let up = (self.edge - t.ack).div_ceil(1 << shift);
            let reserved = t.ack + (up << shift) <= self.reserved_edge(t);
            field = if reserved { up } else { (self.edge - t.ack) >> shift };
            field = field.min(u64::from(u16::MAX));
        }
        self.edge = self.edge.max(t.ack + (field << shift));
        u16::try_from(field).unwrap_or(u16::MAX)
    }

    /// G itself shows R at least `edge` from now on.
    pub(crate) fn on_edge_of_guest(&mut self, edge: u64) {
        self.edge = self.edge.max(edge);
    }

    /// Reserves the window shown so far: the first edge, which G's own window fixes (SNOOP-09), or
    /// that of a parked flow. `false`: nothing changed.
    #[must_use]
    pub(crate) fn reserve_edge(&mut self, t: &Terms, vm: &mut Vm) -> bool {
        let bytes = self.edge - self.next + t.rounding_slack();
        if bytes > limits::FLOW_BUFFER_MAX {
            return false;
        }
        let bytes = t.useful_buffer(bytes.max(limits::FLOW_BUFFER_MIN));
        let pages = FlowStore::pages_for(bytes);
        // A window larger than a first one leaves room for the first ones of other flows.
        let first = bytes <= limits::FLOW_BUFFER_MIN + t.rounding_slack();
        let fits = first || pages <= vm.spare();
        if !fits || !vm.reserve(pages) {
            return false;
        }
        self.set_buffer(t, pages, bytes);
        true
    }

    /// The record that stands for the reservation.
    pub(crate) fn set_record(&mut self, record: Option<RecordId>) {
        self.record = record;
    }

    /// The store ran, or nearly, into its bound: less than `least` bytes are left, a segment, or
    /// a unit of the window field, which R does not see.
    #[inline]
    pub(crate) fn note_filled(&mut self, least: u64) {
        if self.edge - self.next.min(self.edge) < least {
            self.filled = true;
        }
    }

    /// Grows the buffer to the initial size once data flows, follows G's own window, which knows
    /// the round trip, and doubles each time R filled it and G then drained it (SNOOP-39); at first
    /// without waiting for G. It grows by what fits, and only to follow G's window when half of the
    /// VM's budget is taken. `false`: it stays short of what G shows, for good.
    ///
    /// The first step does not wait until G has proved to be ESTABLISHED (COM-29). To stop at the
    /// edge of G's SYN-ACK, 64 KiB at most, would make every upload of 100 KB wait for G's next
    /// time slice. Bytes that G has not accepted are held and repeated either way, and a G that
    /// never accepts ends in a reset of both sides; only the amount differs.
    #[must_use]
    #[inline(always)]
    pub(crate) fn grow_buffer(&mut self, t: &Terms, vm: &mut Vm) -> bool {
        let now = u64::from(self.buffer_bytes);
        let slack = t.rounding_slack();
        let shown = t.guest_edge.saturating_sub(t.guest_una);
        if shown > now {
            return self.follow_guest(t, vm, shown);
        }
        let roomy = vm.reserved_pages < vm.budget_pages / 2;
        if now + slack < limits::FLOW_BUFFER_INITIAL && self.early_acked_bytes > 0 {
            if roomy {
                self.grow(t, vm, limits::FLOW_BUFFER_INITIAL);
            }
        } else if self.filled && roomy && t.may_double(now, self.is_drained(t)) {
            self.filled = false;
            self.grow(t, vm, (now * 2).min(limits::FLOW_BUFFER_DOUBLED_MAX));
        }
        true
    }

    /// G shows more than the buffer has room for. `false`: it stays short of that, for good.
    #[cold]
    fn follow_guest(&mut self, t: &Terms, vm: &mut Vm, shown: u64) -> bool {
        if t.is_behind {
            return self.grow_as_needed(t, vm, shown);
        }
        self.grow(t, vm, shown + t.rounding_slack());
        !self.is_short(t, vm, shown)
    }

    /// FWD-02: a path behind G that is slower than R never needs more than the first step, as it
    /// always has bytes to send. Only if R has filled the buffer, and G then drained it, does it
    /// wait for R. `false`: it does, and there is no more.
    fn grow_as_needed(&mut self, t: &Terms, vm: &mut Vm, shown: u64) -> bool {
        let now = u64::from(self.buffer_bytes);
        let is_first = now + t.rounding_slack() < limits::FLOW_BUFFER_INITIAL;
        let is_needed = self.filled && self.is_drained(t) && self.out_of_order.is_empty();
        if is_first || is_needed {
            let most = (now * 2).max(limits::FLOW_BUFFER_INITIAL);
            self.grow(t, vm, (shown + t.rounding_slack()).min(most));
            self.filled &= !is_needed;
        }
        !is_needed || u64::from(self.buffer_bytes) > now
    }

    /// Grows toward room for `bytes`, rounding slack included, by as much as the VM has for it.
    #[cold]
    fn grow(&mut self, t: &Terms, vm: &mut Vm, bytes: u64) {
        if self.odd.has(Odd::OPENING) {
            return; // ACC-10
        }
        let mut bytes = t.useful_buffer(bytes);
        let own = u64::from(self.reserved_pages);
        let wanted = FlowStore::pages_for(bytes).saturating_sub(own);
        let more = wanted.min(vm.growth(own));
        if more < wanted {
            // The window that this many pages hold at any alignment, see `pages_for`.
            bytes = (own + more - 1) * limits::PAGE as u64;
        }
        if vm.reserve(more) {
            self.set_buffer(t, own + more, bytes);
        }
    }

    fn set_buffer(&mut self, t: &Terms, pages: u64, bytes: u64) {
        let buffer = u32::try_from(bytes - t.rounding_slack()).unwrap_or(u32::MAX);
        self.reserved_pages = u16::try_from(pages).unwrap_or(u16::MAX);
        self.buffer_bytes = self.buffer_bytes.max(buffer);
        self.odd.set(Odd::WIDE, t.is_behind && bytes > limits::PROMISED_BEHIND_MAX);
    }

    /// Ranges and reservation go back; the record stays. The store was cleared.
    pub(crate) fn release(&mut self, vm: &mut Vm) {
        vm.unreserve(u64::from(self.reserved_pages));
        self.forget_place();
        self.odd.set(Odd::WIDE, false);
    }

    /// There is no place for what an image says that it holds.
    pub(crate) fn forget_place(&mut self) {
        self.out_of_order = Ranges::default();
        (self.reserved_pages, self.buffer_bytes, self.lent) = (0, 0, false);
    }

    /// The flow leaves the path, owing nothing.
    pub(crate) fn on_left(&mut self) {
        self.ece = false;
    }

    /// The flow is reset: R is owed nothing any more.
    pub(crate) fn on_abort(&mut self) {
        self.odd.set(Odd::RESET_WAITS, false);
    }
}

/// The fate of a segment with data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// Bytes that became in order.
    pub(crate) advanced: u64,
    /// The segment was next, as a whole, and nothing is missing or out of order.
    pub(crate) plain: bool,
    /// The part that R had sent before.
    pub(crate) duplicate: Option<(u64, u64)>,
}

#[cfg(test)]
mod tests;
