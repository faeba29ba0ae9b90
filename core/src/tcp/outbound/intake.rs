//! The receiver of the outbound pipe: the bytes of G that H has and R was not sent (FLOOD-04 to
//! FLOOD-07).
//!
//! The mirror of [`crate::tcp::receiver`], with one difference: it acknowledges nothing. G still
//! has the bytes that it takes, and repeats those that it does not take.
//!
//! **The edge that G is shown** (FLOOD-13 to FLOOD-15) never moves left. It covers only bytes that
//! have a place, and no more than the path takes in a while ([`QUEUE_TIME`]). As long as R keeps
//! pace it may lie beyond R's own edge, so that G need not be there when R makes room. Room beyond
//! R's edge is lent: it ends with this box, unless G has used it. A G that was not told of that end
//! still uses it. So the bytes that are taken (up to `net_edge` and 1 MiB) may lie beyond the edge
//! that is shown.
//!
//! `edge_shown <= edge`, and `edge` grows to `limit` at most, or to the end of the bytes that G has
//! sent.

use std::collections::VecDeque;

use crate::drops::DropReason;
use crate::limits;
use crate::store::flow_store::{FlowStore, Owner};
use crate::store::ranges::Ranges;
use crate::tcp::receiver::Range;
use crate::tcp::vm::Vm;
use crate::tcp::{FlowContext, index};
use crate::time::Duration;
use crate::wire::packet::SackBlocks;
use crate::wire::seq::Seq;

/// G may be ahead of the bytes sent to R by as much as the path takes in this time, which keeps G's
/// own retransmission timer quiet (FLOOD-17), and by as much as it takes while G is off its core.
const QUEUE_TIME: Duration = Duration::from_millis(50);

/// Duplicate ACKs by which a sender knows of a loss (RFC 5681 section 3.2).
const DUPLICATES: u64 = 3;

/// A segment of G.
#[derive(Debug)]
pub(crate) struct Handed<'a> {
    pub(super) range: Range,
    pub(super) payload: &'a [u8],
    /// Bytes of a full segment; a frame may have several.
    pub(super) full: u64,
}

/// H as the receiver for G.
#[derive(Debug)]
pub(crate) struct Intake {
    /// End of the bytes in order, FIN included.
    accepted: u64,
    /// G's FIN is the last of that.
    fin: bool,
    /// Ranges above `accepted` that are there.
    out_of_order: Ranges,
    /// Segments that arrived behind a hole, and ACKs due to G for it.
    behind: u64,
    duplicates_due: u64,
    /// Where G ended a segment that is not full: later bytes are not joined to it.
    ends: VecDeque<u64>,
    /// Pages of the VM's budget taken for all of it (INV-06).
    reserved_pages: u32,
    /// The highest right edge of R.
    net_edge: u64,
    /// The right edge that G is shown.
    edge: u64,
    /// The edge in the last header for G.
    edge_shown: u64,
    /// The highest that it may be for R's sake.
    limit: u64,
    /// The right edge that G was shown before.
    promised: u64,
}

/// The bounds of the room that G is shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// R has acknowledged everything below, and was sent everything below `next`.
    pub(super) una: u64,
    pub(super) next: u64,
    /// Bytes that may be under way in a round trip, and how long one takes; none while unknown.
    pub(super) cwnd: u64,
    pub(super) srtt: Option<Duration>,
    /// For how long G is off its core at a time.
    pub(super) absence: Duration,
}

impl Room {
    /// The edge that the path allows, `limit` at most.
    fn wanted(&self, limit: u64) -> u64 {
        let of_path = self.srtt.map_or(limits::FLOW_BUFFER_INITIAL, |srtt| {
            let time = QUEUE_TIME + self.absence;
            self.cwnd.saturating_mul(time.as_nanos()) / srtt.as_nanos().max(1)
        });
        let queue = of_path.clamp(limits::FLOW_BUFFER_MIN, limits::FLOW_BUFFER_MAX);
        limit.min(self.next + queue).min(self.una + limits::FLOW_BUFFER_MAX / 2)
    }
}

impl Intake {
    /// G's next byte is `first`, and R has shown room up to `net_edge`, in units of `1 << shift`
    /// bytes. It may be almost a unit more, by the field of a SYN-ACK, which has no unit, or before
    /// R rounded its edge down. A box before this one has shown G room up to `promised`, and G has
    /// used some of it, up to `used`. `None`: there is no place for the room that R shows, or for a
    /// first window of it (FLOOD-13).
    pub(super) fn new(
        vm: &mut Vm,
        first: u64,
        net_edge: u64,
        shift: u8,
        (promised, used): (u64, u64),
    ) -> Option<Self> {
        let edge = net_edge + (1 << shift) - 1;
        let bytes = (net_edge - first).min(limits::FLOW_BUFFER_MIN);
        let pages = FlowStore::pages_for(bytes);
        let taken = pages > 0 && vm.lend(pages);
        taken.then(|| Self {
            accepted: first,
            fin: false,
            out_of_order: Ranges::default(),
            behind: 0,
            duplicates_due: 0,
            ends: VecDeque::new(),
            reserved_pages: u32::try_from(pages).unwrap_or(u32::MAX),
            net_edge: edge,
            edge: edge.max(used), // G keeps it, with a place or without (INV-05)
            edge_shown: net_edge,
            limit: net_edge,
            promised,
        })
    }

    /// The right edge that G was shown, by this box or one before it.
    pub(super) fn promised(&self) -> u64 {
        self.edge_shown.max(self.promised)
    }

    /// End of the bytes in order, FIN included.
    pub(super) const fn accepted(&self) -> u64 {
        self.accepted
    }

    /// G's FIN is there, in order.
    pub(super) const fn is_closed(&self) -> bool {
        self.fin
    }

    /// End of the bytes that are there in order.
    pub(super) const fn bytes_end(&self) -> u64 {
        self.accepted - self.fin as u64
    }

    /// G goes on with `seq`, and misses nothing.
    pub(super) fn expects(&self, seq: Seq) -> bool {
        seq == Seq::wrap(self.accepted) && !self.fin && self.out_of_order.is_empty()
    }

    /// G was not shown room for this byte: it asks for some, as FreeBSD and Windows do.
    pub(super) const fn is_probe(&self, r: Range, una: u64, shift: u8) -> bool {
        r.len() == 1 && r.end > una + (self.shown(una, shift) << shift)
    }

    /// Pages taken.
    pub(super) const fn reserved_pages(&self) -> u32 {
        self.reserved_pages
    }

    /// How far a segment that begins at `from` may reach.
    pub(super) fn cut(&self, from: u64) -> u64 {
        if self.ends.is_empty() {
            return u64::MAX; // nearly always
        }
        self.ends.iter().copied().find(|end| *end > from).unwrap_or(u64::MAX)
    }

    /// Bytes beyond this are never taken: this box has shown G no room for them.
    pub(super) fn end_max(&self) -> u64 {
        self.edge.max(self.net_edge + limits::OUTBOUND_AHEAD_MAX)
    }

    /// R was sent everything below `sent`.
    pub(super) fn on_sent(&mut self, sent: u64) {
        while self.ends.front().is_some_and(|end| *end <= sent) {
            self.ends.pop_front();
        }
    }

    /// Takes the new bytes of a segment; R has acknowledged everything below `una`. An error: the
    /// segment is dropped, as if the network had lost it.
    pub(super) fn on_data(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        store: &mut FlowStore,
        una: u64,
        h: &Handed<'_>,
    ) -> Result<(), DropReason> {
        let Range { seq, end, fin } = h.range;
        if self.fin {
            return if end < self.accepted { Ok(()) } else { Err(DropReason::OutOfWindow) };
        }
        let (from, end) = (seq.max(self.accepted), end.min(self.end_max()));
        if from < end {
            if end <= self.promised {
                self.edge = end.max(self.edge); // G keeps it, with a place or without (INV-05)
            }
            let fills = from == self.accepted;
            if !fills && !self.out_of_order.has_room_for(from, end) {
                return Err(DropReason::OutOfOrderLimit);
            }
            if end - una > limits::FLOW_BUFFER_MAX / 2 {
                return Err(DropReason::NoStore); // R showed more than H keeps for one flow
            }
            self.reserve(cx.vm, una, end)?;
            // All of it, because none of these bytes can have left (INV-15).
            let lent = Owner::Lent(cx.vm.name_hash);
            if !store.write(cx.arena, lent, from, &h.payload[index(from - seq)..index(end - seq)]) {
                return Err(DropReason::NoStore);
            }
            self.edge = self.edge.max(end); // a box before this one has shown it room for that
            if !(end - seq).is_multiple_of(h.full) {
                self.note_end(end);
            }
            if fills {
                self.accepted = self.out_of_order.contiguous_from(end);
                self.out_of_order.remove_below(self.accepted);
                self.note_hole(self.accepted > end, 0);
            } else {
                self.out_of_order.insert(from, end);
                self.note_hole(false, (end - from).div_ceil(h.full));
            }
        }
        if h.range.end > end {
            return Err(DropReason::OutOfWindow); // a probe, or G minds no window (FLOOD-06)
        }
        if fin && end == self.accepted {
            // Out of order it does not count: G repeats it.
            self.fin = true;
            self.accepted += 1;
        }
        Ok(())
    }

    /// Three segments behind a hole tell G of it, and a hole that is not the last of the next one:
    /// as a receiver does that had these bytes alone (FLOOD-05, RFC 5681 section 3.2).
    fn note_hole(&mut self, filled: bool, segments: u64) {
        if self.out_of_order.is_empty() {
            (self.behind, self.duplicates_due) = (0, 0);
            return;
        }
        let before = self.behind;
        self.behind += segments;
        let third = before < DUPLICATES && self.behind >= DUPLICATES;
        if third || (filled && before >= DUPLICATES) {
            self.duplicates_due = DUPLICATES;
        }
    }

    /// A duplicate ACK that reports a hole to G is due.
    pub(super) const fn owes_duplicate(&self) -> bool {
        self.duplicates_due > 0
    }

    /// The SACK blocks of such an ACK, at most `room`.
    pub(super) fn duplicate(&mut self, room: usize) -> SackBlocks {
        self.duplicates_due = self.duplicates_due.saturating_sub(1);
        let mut blocks = [(Seq(0), Seq(0)); SackBlocks::MAX];
        let mut n = 0;
        for (slot, (from, to)) in blocks.iter_mut().zip(self.out_of_order.newest_first().take(room))
        {
            *slot = (Seq::wrap(from), Seq::wrap(to));
            n += 1;
        }
        SackBlocks::new(&blocks[..n])
    }

    /// Takes a place for bytes up to `end`, because G may have been shown more than has a place
    /// now. Room that a box before this one has shown was lent. It is lent again, from the pages
    /// that may be lent ahead of R.
    fn reserve(&mut self, vm: &mut Vm, una: u64, end: u64) -> Result<(), DropReason> {
        let more = FlowStore::pages_for(end - una).saturating_sub(self.reserved_pages.into());
        if more == 0 {
            return Ok(()); // nearly always
        }
        let is_ahead = end > self.net_edge;
        if (is_ahead && more > vm.lendable_ahead(self.reserved_pages.into())) || !vm.lend(more) {
            return Err(DropReason::NoStore);
        }
        self.reserved_pages += u32::try_from(more).unwrap_or(u32::MAX);
        Ok(())
    }

    /// R has shown this right edge. If H lends G more, G may be ahead of the edge, as far as a
    /// window field behind `una` can show.
    pub(super) fn on_net_edge(&mut self, una: u64, edge: u64, lends: bool, shift: u8) {
        self.net_edge = self.net_edge.max(edge);
        let ahead = if lends { limits::OUTBOUND_AHEAD_MAX } else { 0 };
        let most = (una + (u64::from(u16::MAX) << shift)).max(edge);
        self.limit = self.limit.max(most.min(edge + ahead));
    }

    /// R has let H wait: G is shown no more than it was, until R itself shows more.
    pub(super) const fn wait_for_net(&mut self) {
        self.limit = self.edge;
    }

    /// G has handed over half of the room that it was shown.
    pub(super) const fn is_half_used(&self, una: u64) -> bool {
        2 * self.accepted >= una + self.edge_shown
    }

    /// Moves the edge as far as R, the path and the VM's budget allow now. The acknowledgement of R
    /// that moves it shows it to G.
    pub(super) fn open(&mut self, vm: &mut Vm, room: &Room) {
        let (una, own) = (room.una, u64::from(self.reserved_pages));
        let wanted = room.wanted(self.limit);
        let pages = |edge: u64| FlowStore::pages_for(edge.saturating_sub(una)).saturating_sub(own);
        let more = pages(wanted);
        if more > 0 {
            let within = pages(wanted.min(self.net_edge)).min(vm.lendable_growth(own));
            let more = more.min(vm.lendable_ahead(own)).max(within);
            if more > 0 && vm.lend(more) {
                self.reserved_pages += u32::try_from(more).unwrap_or(u32::MAX);
            }
        }
        let held = una + u64::from(self.reserved_pages).saturating_sub(1) * limits::PAGE as u64;
        self.edge = self.edge.max(wanted.min(held));
        self.shrink(vm, una);
    }

    /// Pages that are behind no byte below the edge go back, except for a first window: the path
    /// has become slower, and other flows can use them (FLOOD-16).
    fn shrink(&mut self, vm: &mut Vm, una: u64) {
        let used = self.edge.saturating_sub(una).max(limits::FLOW_BUFFER_MIN);
        let used = u32::try_from(FlowStore::pages_for(used)).unwrap_or(u32::MAX);
        let free = self.reserved_pages.saturating_sub(used);
        if free > 0 {
            self.reserved_pages -= free;
            vm.take_back(free.into());
        }
    }

    /// The window field for G behind an acknowledgement of `una`. Rounded down it shows less than a
    /// unit less (RFC 7323 section 2.4).
    pub(super) fn window(&mut self, una: u64, shift: u8) -> u16 {
        self.edge_shown = self.edge;
        u16::try_from(self.edge_shown.saturating_sub(una) >> shift).unwrap_or(u16::MAX)
    }

    /// The window field that G has seen last, behind an acknowledgement of `una` today.
    pub(super) const fn shown(&self, una: u64, shift: u8) -> u64 {
        self.edge_shown.saturating_sub(una) >> shift
    }

    /// The window field for G would be larger than when it was last shown.
    pub(super) fn opens(&self, una: u64, shift: u8) -> bool {
        self.edge.saturating_sub(una) >> shift > self.shown(una, shift)
    }

    /// R shows more than G was shown.
    pub(super) const fn is_short_of(&self, net_edge: u64) -> bool {
        self.edge_shown < net_edge
    }

    /// A segment of G that is not full ends here. If G writes very many of them, some may be
    /// joined.
    fn note_end(&mut self, end: u64) {
        let newest = self.ends.back().is_none_or(|last| *last < end);
        if newest && self.ends.len() < limits::SEGMENT_ENDS_MAX {
            self.ends.push_back(end);
        }
    }

    /// The pages go back, and so do the bytes out of order.
    pub(super) fn release(&mut self, vm: &mut Vm) {
        self.out_of_order.clear();
        vm.take_back(core::mem::take(&mut self.reserved_pages).into());
    }
}
