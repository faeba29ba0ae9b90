//! The bytes one flow holds, addressed by unwrapped sequence number.
//!
//! In-order and out-of-order bytes live at the same addresses: byte `seq` is at `seq % PAGE` of
//! page `seq / PAGE`, so a filled gap needs no copy. The caller knows which bytes are meaningful
//! (`[g.una, rcv_nxt)` and its out-of-order ranges). It must also ensure that the first copy wins
//! (INV-15), because a second write to the same address overwrites.

use std::collections::BTreeMap;

use super::arena::{Arena, PageId, RecordId};
use super::record::Record;
use crate::limits::{FLOW_BUFFER_MAX, PAGE, pages_for};

const PAGE_BYTES: u64 = PAGE as u64;
/// The longest run of pages a store spans, holes included.
const SPAN_MAX: u64 = pages_for(FLOW_BUFFER_MAX);
/// A table of this many slots stays with an empty store (32 bytes), so that a flow whose bytes
/// come and go does not allocate; a longer one is given back.
const SLOTS_MIN: usize = 8;

/// The owner of a store's pages.
#[derive(Clone, Copy, Debug)]
pub enum Owner {
    /// A record: its bytes are promised, and a restarted daemon finds them.
    Record(RecordId),
    /// No record: the VM with this `name_hash` still has the bytes, and a restarted daemon finds
    /// the pages free.
    Lent(u64),
}

impl Owner {
    fn take_page(self, arena: &mut Arena<'_>, page_no: u64) -> Option<PageId> {
        match self {
            Self::Record(record) => arena.alloc_page(record, page_no),
            Self::Lent(vm) => arena.lend_page(vm),
        }
    }
}

impl From<RecordId> for Owner {
    fn from(record: RecordId) -> Self {
        Self::Record(record)
    }
}

/// A window of a flow's stream in arena pages. 40 bytes, and no heap before the first byte.
#[derive(Debug, Default)]
pub struct FlowStore {
    /// The page of page number n is in slot `n % len`. A power of two long, or empty.
    slots: Box<[Option<PageId>]>,
    /// Lowest page number that may be held. Meaningless while `held` is 0.
    first: u64,
    /// End of the highest byte written. Meaningless while `held` is 0.
    end: u64,
    /// Pages held.
    held: u32,
}

const _: () = assert!(size_of::<FlowStore>() == 40);

impl FlowStore {
    /// Worst-case pages of a window of `bytes` bytes at any alignment (INV-06 arithmetic).
    #[must_use]
    pub const fn pages_for(bytes: u64) -> u64 {
        pages_for(bytes)
    }

    /// Pages held now: the flow's cost in the arena.
    #[must_use]
    pub fn held_pages(&self) -> u32 {
        self.held
    }

    /// Copies `bytes` to address `seq`, into pages of `owner`.
    ///
    /// `false`, with nothing written and no page taken, if the arena has too few pages or the
    /// window would span more than [`FLOW_BUFFER_MAX`].
    #[must_use]
    #[inline(always)]
    pub fn write(
        &mut self,
        arena: &mut Arena<'_>,
        owner: impl Into<Owner>,
        seq: u64,
        bytes: &[u8],
    ) -> bool {
        if bytes.is_empty() {
            return true; // it holds nothing, so it must not keep the page it points into
        }
        let offset = offset_in_page(seq);
        if offset + bytes.len() <= PAGE {
            // Within one page, which is held, or the first one: nearly every call.
            if let Some(page) = self.page_at(seq / PAGE_BYTES) {
                self.end = self.end.max(seq + bytes.len() as u64);
                arena.write(page, offset, bytes);
                return true;
            }
            if self.held == 0 && !self.slots.is_empty() {
                return self.write_first(arena, owner.into(), seq, bytes);
            }
        }
        self.write_and_take_pages(arena, owner.into(), seq, bytes)
    }

    /// [`Self::write_and_take_pages`] for bytes within one page, when none is held.
    fn write_first(&mut self, arena: &mut Arena<'_>, owner: Owner, seq: u64, bytes: &[u8]) -> bool {
        let page_no = seq / PAGE_BYTES;
        let Some(page) = owner.take_page(arena, page_no) else { return false };
        let slot = self.slot(page_no);
        self.slots[slot] = Some(page);
        (self.first, self.end, self.held) = (page_no, seq + bytes.len() as u64, 1);
        arena.write(page, offset_in_page(seq), bytes);
        true
    }

    /// Gives back every page whose bytes are all below `upto`, and all pages if nothing at or
    /// above `upto` was ever written.
    #[inline]
    pub fn release(&mut self, arena: &mut Arena<'_>, upto: u64) {
        if self.held > 0 && (upto >= self.end || upto / PAGE_BYTES > self.first) {
            self.release_pages(arena, upto);
        }
    }

    #[inline(never)] // most acknowledgements end in the page in which the one before ended
    fn release_pages(&mut self, arena: &mut Arena<'_>, upto: u64) {
        if upto >= self.end {
            self.clear(arena);
            return;
        }
        while self.first < upto / PAGE_BYTES {
            self.drop_page(arena, self.first);
            self.first += 1;
        }
    }

    /// The bytes `[from, to)`, a piece per page, none empty.
    ///
    /// The caller knows that all of them were written; the pieces end early where no page is held.
    pub fn slices<'a>(
        &self,
        arena: &'a Arena<'_>,
        from: u64,
        to: u64,
    ) -> impl Iterator<Item = &'a [u8]> {
        let mut at = from;
        core::iter::from_fn(move || {
            if at >= to {
                return None;
            }
            let page = self.page_at(at / PAGE_BYTES);
            debug_assert!(page.is_some(), "read of bytes that are not held");
            let offset = offset_in_page(at);
            let left = usize::try_from(to - at).unwrap_or(usize::MAX);
            let end = offset + left.min(PAGE - offset);
            at += (end - offset) as u64;
            Some(&arena.page(page?)[offset..end])
        })
    }

    /// Reads the page table.
    #[inline]
    pub(crate) fn fetch(&self) -> u64 {
        self.slots.first().copied().flatten().map_or(0, |page| page.index() as u64)
    }

    /// Gives every page back.
    pub fn clear(&mut self, arena: &mut Arena<'_>) {
        if self.held == 1 {
            self.drop_page(arena, self.last()); // it is the last, unless after a restart
        }
        if self.held > 0 {
            for page_no in self.first..=self.last() {
                self.drop_page(arena, page_no);
            }
        }
        debug_assert_eq!(self.held, 0, "a page outside the window");
        if self.slots.len() > SLOTS_MIN {
            self.slots = Box::default();
        }
    }

    /// Page number of the highest byte written; only while `held` is not 0.
    fn last(&self) -> u64 {
        (self.end - 1) / PAGE_BYTES
    }

    fn slot(&self, page_no: u64) -> usize {
        // The mask is at most 4095, so the bits that a 32-bit usize would lose do not matter.
        #[expect(clippy::cast_possible_truncation)]
        let page_no = page_no as usize;
        page_no & (self.slots.len() - 1)
    }

    #[inline]
    fn page_at(&self, page_no: u64) -> Option<PageId> {
        let within = self.held > 0 && page_no >= self.first && page_no <= self.last();
        if within { self.slots[self.slot(page_no)] } else { None }
    }

    fn drop_page(&mut self, arena: &mut Arena<'_>, page_no: u64) {
        let slot = self.slot(page_no);
        if let Some(page) = self.slots[slot].take() {
            arena.free_page(page);
            self.held -= 1;
        }
    }

    /// Makes slots for `page_no..=last_no` beside what is held, or returns `false`.
    fn cover(&mut self, page_no: u64, last_no: u64) -> bool {
        let (mut low, mut high) = (page_no, last_no);
        if self.held > 0 {
            low = low.min(self.first);
            high = high.max(self.last());
        }
        if high - low >= SPAN_MAX {
            return false;
        }
        let span = usize::try_from(high - low + 1).unwrap_or(usize::MAX);
        if span > self.slots.len() {
            let mut old = vec![None; span.next_power_of_two().max(SLOTS_MIN)].into_boxed_slice();
            core::mem::swap(&mut old, &mut self.slots);
            if self.held > 0 {
                for n in self.first..=self.last() {
                    let before = usize::try_from(n & (old.len() as u64 - 1)).unwrap_or(0);
                    self.slots[self.slot(n)] = old[before];
                }
            }
        }
        true
    }

    #[cold]
    fn write_and_take_pages(
        &mut self,
        arena: &mut Arena<'_>,
        owner: Owner,
        seq: u64,
        bytes: &[u8],
    ) -> bool {
        let Some(end) = seq.checked_add(bytes.len() as u64) else { return false };
        let (from_page, to_page) = (seq / PAGE_BYTES, (end - 1) / PAGE_BYTES);
        if !self.cover(from_page, to_page) {
            return false;
        }
        let missing = (from_page..=to_page).filter(|&n| self.page_at(n).is_none()).count();
        if missing > arena.free_pages() {
            return false;
        }
        (self.first, self.end) = match self.held {
            0 => (from_page, end),
            _ => (self.first.min(from_page), self.end.max(end)),
        };
        let (mut at, mut rest) = (seq, bytes);
        for page_no in from_page..=to_page {
            let slot = self.slot(page_no);
            if self.slots[slot].is_none() {
                self.slots[slot] = owner.take_page(arena, page_no);
                self.held += 1;
            }
            let page = self.slots[slot].expect("counted as free above");
            let offset = offset_in_page(at);
            let (now, later) = rest.split_at(rest.len().min(PAGE - offset));
            arena.write(page, offset, now);
            (at, rest) = (at + now.len() as u64, later);
        }
        true
    }
}

/// A flow found in an arena that another process left.
#[derive(Debug)]
pub struct Recovered {
    /// Its record's place.
    pub id: RecordId,
    /// The record, with `rcv_nxt >= guest_una`.
    pub record: Record,
    /// The bytes `[guest_una, rcv_nxt)`, if `complete`.
    pub store: FlowStore,
    /// Whether every promised byte is there. If not, both sides must be reset (INV-21).
    pub complete: bool,
}

/// Every flow of an arena that was just opened, with its bytes (LIFE-09).
///
/// Out-of-order bytes are dropped: they were never acknowledged, and their ranges are not recorded.
/// Pages that hold no promised byte become free.
pub fn recover(arena: &mut Arena<'_>) -> Vec<Recovered> {
    let mut flows: BTreeMap<RecordId, Recovered> = arena
        .records()
        .map(|(id, mut record)| {
            // A kill between the two commits of SNOOP-24; bytes that G acknowledged are owed to
            // nobody.
            record.fins.next &= record.rcv_nxt >= record.guest_una;
            record.rcv_nxt = record.rcv_nxt.max(record.guest_una);
            let store = FlowStore { end: record.rcv_nxt, ..FlowStore::default() };
            (id, Recovered { id, record, store, complete: true })
        })
        .collect();
    let pages: Vec<_> = arena.owned_pages().collect();
    for (id, page_no, page) in pages {
        let taken = flows.get_mut(&id).is_some_and(|flow| flow.adopt(page_no, page));
        if !taken {
            arena.free_page(page);
        }
    }
    for (&id, flow) in &mut flows {
        if flow.record.rcv_nxt == flow.record.guest_una && !flow.record.fins.next {
            arena.commit_rcv_nxt(id, flow.record.rcv_nxt); // see above
        }
        flow.complete &= u64::from(flow.store.held) == flow.promised_pages().count() as u64;
        if !flow.complete {
            flow.store.clear(arena);
        }
    }
    flows.into_values().collect()
}

impl Recovered {
    /// Page numbers of `[guest_una, rcv_nxt)`.
    fn promised_pages(&self) -> core::ops::Range<u64> {
        let (from, to) = (self.record.guest_una, self.record.rcv_nxt);
        let first = from / PAGE_BYTES;
        if from == to { first..first } else { first..(to - 1) / PAGE_BYTES + 1 }
    }

    /// Whether the page holds promised bytes; then it is part of the store.
    fn adopt(&mut self, page_no: u64, page: PageId) -> bool {
        let promised = self.promised_pages();
        let Some(last) = promised.end.checked_sub(1).filter(|_| promised.contains(&page_no)) else {
            return false;
        };
        // More than any flow may promise, or two pages for the same bytes: not written by us.
        if !self.store.cover(promised.start, last) {
            self.complete = false;
            return false;
        }
        self.store.first = promised.start;
        let slot = self.store.slot(page_no);
        if self.store.slots[slot].is_some() {
            self.complete = false;
            return false;
        }
        self.store.slots[slot] = Some(page);
        self.store.held += 1;
        true
    }
}

fn offset_in_page(seq: u64) -> usize {
    (seq % PAGE_BYTES) as usize
}

#[cfg(test)]
mod tests;
