//! One piece of memory for everything that must survive a crash (LIFE-09).
//!
//! # Primer
//!
//! The caller maps a memfd and hands the bytes in. They are laid out as
//!
//! ```text
//! header 4096 B | records, 176 B each | page descriptors, 16 B each | pad to 4096 | pages, 16 KiB
//! ```
//!
//! and hold indices only, never pointers, so that another process can map them anywhere.
//!
//! There are places for more records and pages than may be used: the memory may be a sparse file
//! whose owner allocates of each kind what is needed now, from the first place on ([`ranges`]), and
//! more later ([`Arena::resize`]). So an arena grows where it is, and nothing in it moves.
//!
//! [`ranges`]: Arena::ranges
//!
//! SIGKILL can hit between any two stores. These rules keep the memory meaningful at every instant:
//!
//! 1. A record is valid if its state word is the checksum of its static words. The state word is
//!    written last and cleared first.
//! 2. A page belongs to a record if its descriptor names the record's index and generation, and
//!    that record is valid. The page number is written before the owner, so a page with an owner
//!    has its number.
//! 3. Every word that changes with traffic is committed by one aligned 8-byte store. `rcv_nxt` is
//!    a release store behind a fence: payload first, then the promise (INV-03).
//! 4. Records and pages above the high-water marks in the header were never used and are never
//!    read, so formatting touches one page of memory and memory is taken as it is needed.
//!
//! The arena outlives its process in the kernel's page cache: an executed store is there for the
//! next process, however this one dies. It does not outlive the host (LIFE-10).
//!
//! # Pages that are lent
//!
//! A page may be used without an owner for bytes that G still has: those that G has sent and R has
//! not acknowledged. Its owner word stays zero, so a restarted daemon finds the page free, whatever
//! its number and content. It can never be taken for promised bytes of the other direction, whose
//! page numbers may be the same.
//!
//! # The owner of a page's bytes (SEC-10)
//!
//! Invariant: a page that is in use holds only zeros and bytes of its owner's VM. A page that goes
//! back to the VM that had it last is handed out as it is; one that changes hands, or whose past
//! is unknown (first use, after a restart), is zeroed then. That is cheaper than zeroing on every
//! free (a VM's pages mostly return to it) and cheaper to prove than tracking written ranges: the
//! rule needs no assumption about which ranges anybody reads. After a restart only bytes in
//! `[guest_una, rcv_nxt)` of a valid record are read, and those were written before `rcv_nxt` was
//! committed.

mod size;

use core::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use zerocopy::FromBytes;

use super::record::{self, Progress, RawRecord, Record, put};
use crate::limits::PAGE;

const MAGIC: u64 = u64::from_le_bytes(*b"NPARENA1");
/// Raised whenever the layout or the meaning of a word changes.
const VERSION: u64 = 3;
const HEADER_BYTES: usize = 4096;
const HEADER_WORDS: usize = HEADER_BYTES / 8;
const DESC_WORDS: usize = 2;

/// Words of the header.
mod header {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 1;
    /// Record bytes (high half) and page bytes (low half).
    pub(super) const SIZES: usize = 2;
    /// Places for records, and for pages.
    pub(super) const RECORDS: usize = 3;
    pub(super) const PAGES: usize = 4;
    pub(super) const INSTANCE: usize = 5;
    /// Records from here on were never used.
    pub(super) const RECORDS_USED: usize = 6;
    /// Pages from here on were never used.
    pub(super) const PAGES_USED: usize = 7;
    /// How many of the places for records may be used, and of those for pages.
    pub(super) const RECORDS_READY: usize = 8;
    pub(super) const PAGES_READY: usize = 9;
}

const SIZES: u64 = ((record::WORDS as u64 * 8) << 32) | PAGE as u64;

/// Words of a page descriptor. Owner: record index + 1 (low half; 0 is free), generation (high).
const OWNER: usize = 0;
const PAGE_NO: usize = 1;
/// In place of its number: the page is lent. A stream that ends there does not exist.
const LENT: u64 = u64::MAX;

type RawDesc = [AtomicU64; DESC_WORDS];
type RawPage = [u8; PAGE];

/// Index of a record; valid from `alloc_record` to `free_record`, and across restarts.
///
/// Stored as index + 1, so that `Option<RecordId>` is four bytes.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct RecordId(core::num::NonZeroU32);

impl RecordId {
    fn new(index: u32) -> Self {
        Self(core::num::NonZeroU32::MIN.saturating_add(index))
    }

    fn index(self) -> u32 {
        self.0.get() - 1
    }
}

/// Index of a page; valid from `alloc_page` to `free_page`.
///
/// Stored as index + 1, so that `Option<PageId>` is four bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PageId(core::num::NonZeroU32);

impl PageId {
    fn new(index: usize) -> Option<Self> {
        let n = u32::try_from(index).ok()?.checked_add(1)?;
        core::num::NonZeroU32::new(n).map(Self)
    }

    pub(super) fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Why memory is not an arena this program can use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ArenaError {
    /// The memory does not start at a multiple of 8: hand in a mapping.
    Misaligned,
    /// No arena was ever formatted here: format it.
    NotAnArena,
    /// Another version or build with other sizes made it: drain with that version first.
    OtherLayout,
    /// The header has more or fewer bytes than there are, or more entries in use than exist.
    WrongLength,
}

/// The numbers of records and pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ArenaSize {
    /// Connections that can be promised something at a time.
    pub records: usize,
    /// Pages of the store.
    pub pages: usize,
}

/// Records and pages in memory that the caller owns. See the module doc.
#[derive(Debug)]
pub struct Arena<'m> {
    header: &'m [AtomicU64; HEADER_WORDS],
    records: &'m [RawRecord],
    descs: &'m [RawDesc],
    pages: &'m mut [RawPage],
    /// How many of the places may be used.
    ready: ArenaSize,
    /// Free records below the high-water mark, last freed on top.
    free_records: Vec<u32>,
    /// Free pages below the high-water mark, last freed (and still in the cache) on top.
    free_pages: Vec<PageId>,
    /// Per page below the high-water mark: `name_hash` of the VM whose bytes it may hold, or 0 if
    /// that is unknown.
    page_vm: Vec<u64>,
}

impl<'m> Arena<'m> {
    /// Bytes an arena with so many records and pages takes.
    ///
    /// # Panics
    /// If that is more than the address space.
    #[must_use]
    pub const fn layout_len(records: usize, pages: usize) -> usize {
        match Self::checked_len(records, pages) {
            Some(len) => len,
            None => panic!("arena larger than the address space"),
        }
    }

    const fn pages_at(records: usize, pages: usize) -> Option<usize> {
        let Some(records) = records.checked_mul(size_of::<RawRecord>()) else { return None };
        let Some(descs) = pages.checked_mul(size_of::<RawDesc>()) else { return None };
        let Some(both) = records.checked_add(descs) else { return None };
        let Some(end) = both.checked_add(HEADER_BYTES) else { return None };
        end.checked_next_multiple_of(HEADER_BYTES)
    }

    const fn checked_len(records: usize, pages: usize) -> Option<usize> {
        let Some(at) = Self::pages_at(records, pages) else { return None };
        let Some(bytes) = pages.checked_mul(PAGE) else { return None };
        at.checked_add(bytes)
    }

    /// Makes an empty arena of exactly `layout_len(records, pages)` bytes, whatever was there.
    ///
    /// `instance` is the caller's to choose, such as its start time; see [`Self::instance`].
    pub fn format(
        mem: &'m mut [u8],
        records: usize,
        pages: usize,
        instance: u64,
    ) -> Result<Self, ArenaError> {
        let all = ArenaSize { records, pages };
        let arena = Self::split(mem, all, all)?;
        // Until the magic is back, a kill leaves "not an arena" and never half of two.
        arena.put(header::MAGIC, 0);
        arena.put(header::VERSION, VERSION);
        arena.put(header::SIZES, SIZES);
        arena.put(header::RECORDS, records as u64);
        arena.put(header::PAGES, pages as u64);
        arena.put(header::INSTANCE, instance);
        arena.put(header::RECORDS_USED, 0);
        arena.put(header::PAGES_USED, 0);
        arena.put(header::RECORDS_READY, records as u64);
        arena.put(header::PAGES_READY, pages as u64);
        arena.put(header::MAGIC, MAGIC);
        Ok(arena)
    }

    /// Takes over an arena that another process left, in whatever state a kill left it.
    ///
    /// Records that are not valid and pages without a valid owner are free. Nothing but the header
    /// is trusted to make sense: any bytes give an error or a usable arena.
    pub fn open(mem: &'m mut [u8]) -> Result<Self, ArenaError> {
        let (places, ready) = Self::sizes_of(mem)?;
        let mut arena = Self::split(mem, places, ready)?;
        let pages_used = usize::try_from(arena.word(header::PAGES_USED)).unwrap_or(usize::MAX);
        let records_used = arena.records_used();
        arena.rebuild_free_lists(records_used, pages_used);
        Ok(arena)
    }

    fn split(mem: &'m mut [u8], places: ArenaSize, ready: ArenaSize) -> Result<Self, ArenaError> {
        let ArenaSize { records, pages } = places;
        let fits = u32::try_from(records).is_ok() && u32::try_from(pages).is_ok();
        let (Some(pages_at), Some(len), true) =
            (Self::pages_at(records, pages), Self::checked_len(records, pages), fits)
        else {
            return Err(ArenaError::WrongLength);
        };
        if mem.len() != len {
            return Err(ArenaError::WrongLength);
        }
        let (meta, page_bytes) = mem.split_at_mut(pages_at);
        let (head, meta) = meta.split_at_mut(HEADER_BYTES);
        let (record_bytes, meta) = meta.split_at_mut(records * size_of::<RawRecord>());
        let (desc_bytes, _pad) = meta.split_at_mut(pages * size_of::<RawDesc>());
        // The lengths are exact by construction, so the only cast error left is alignment.
        Ok(Self {
            header: FromBytes::mut_from_bytes(head).map_err(|_| ArenaError::Misaligned)?,
            records: FromBytes::mut_from_bytes(record_bytes).map_err(|_| ArenaError::Misaligned)?,
            descs: FromBytes::mut_from_bytes(desc_bytes).map_err(|_| ArenaError::Misaligned)?,
            pages: FromBytes::mut_from_bytes(page_bytes).map_err(|_| ArenaError::Misaligned)?,
            ready,
            free_records: Vec::new(),
            free_pages: Vec::new(),
            page_vm: Vec::new(),
        })
    }

    fn rebuild_free_lists(&mut self, records_used: usize, pages_used: usize) {
        for (index, raw) in (0_u32..).zip(&self.records[..records_used]) {
            if Record::decode(raw).is_none() {
                record::store(raw, record::STATE, 0);
                self.free_records.push(index);
            }
        }
        for index in 0..pages_used {
            let owner = self.page_owner(index);
            if owner.is_none() {
                put(&self.descs[index][OWNER], 0);
                self.free_pages.extend(PageId::new(index));
            }
            self.page_vm.push(owner.map_or(0, |id| self.vm_of(id)));
        }
    }

    // --- Getters -------------------------------------------------------------------------------

    /// The run of the daemon to which this memory belongs; 0 until it is set.
    #[must_use]
    pub fn instance(&self) -> u64 {
        self.word(header::INSTANCE)
    }

    /// Marks the memory as belonging to this run.
    pub fn set_instance(&mut self, instance: u64) {
        self.put(header::INSTANCE, instance);
    }

    /// Pages that can be allocated now.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.ready.pages - self.page_vm.len() + self.free_pages.len()
    }

    /// Records that can be allocated now.
    #[must_use]
    pub fn free_records(&self) -> usize {
        self.ready.records - self.recorded()
    }

    /// Records that are allocated.
    #[must_use]
    pub fn recorded(&self) -> usize {
        self.records_used() - self.free_records.len()
    }

    /// All pages that may be used, free or not.
    #[must_use]
    pub fn pages_total(&self) -> usize {
        self.ready.pages
    }

    /// How many records were ever in use at a time.
    #[must_use]
    pub fn records_used(&self) -> usize {
        // Checked against the record count when the arena was opened.
        usize::try_from(self.word(header::RECORDS_USED)).unwrap_or(usize::MAX)
    }

    /// The valid records, in index order: a restarted daemon has to look after them.
    pub fn records(&self) -> impl Iterator<Item = (RecordId, Record)> + '_ {
        (0_u32..)
            .zip(&self.records[..self.records_used()])
            .filter_map(|(index, raw)| Some((RecordId::new(index), Record::decode(raw)?)))
    }

    /// One record, if it is valid.
    #[must_use]
    pub fn record(&self, id: RecordId) -> Option<Record> {
        Record::decode(self.records.get(id.index() as usize)?)
    }

    /// Every page that belongs to a valid record: `(record, page number, page)`, in page order.
    pub fn owned_pages(&self) -> impl Iterator<Item = (RecordId, u64, PageId)> + '_ {
        (0..self.page_vm.len()).filter_map(|index| {
            let page_no = u64::from_le(self.descs[index][PAGE_NO].load(Ordering::Relaxed));
            Some((self.page_owner(index)?, page_no, PageId::new(index)?))
        })
    }

    // --- Records -------------------------------------------------------------------------------

    /// A valid record with these contents, or `None` if all are in use.
    pub fn alloc_record(&mut self, init: &Record) -> Option<RecordId> {
        let index = if let Some(index) = self.free_records.pop() {
            index
        } else {
            let used = self.records_used();
            record::store(self.records[..self.ready.records].get(used)?, record::STATE, 0);
            compiler_fence(Ordering::Release);
            self.put(header::RECORDS_USED, used as u64 + 1);
            u32::try_from(used).ok()?
        };
        let raw = &self.records[index as usize];
        let generation = record::generation(raw).wrapping_add(1);
        let state = init.encode(generation, raw);
        put(&raw[record::STATE], state);
        Some(RecordId::new(index))
    }

    /// Forgets the flow. Its pages must have been freed before.
    pub fn free_record(&mut self, id: RecordId) {
        let raw = self.raw(id);
        debug_assert_ne!(record::load(raw, record::STATE), 0, "record freed twice");
        put(&raw[record::STATE], 0);
        self.free_records.push(id.index());
    }

    /// Commits `h.rcv_nxt`: from here on the bytes below it may be acknowledged to R (INV-03).
    ///
    /// Call after the payload is in its pages and before the ACK exists.
    pub fn commit_rcv_nxt(&mut self, id: RecordId, seq: u64) {
        compiler_fence(Ordering::Release);
        put(&self.raw(id)[record::RCV_NXT], seq);
    }

    /// After a restart the sides of a record have been reset. Whether they had been before.
    pub fn note_told(&mut self, id: RecordId) -> bool {
        let raw = self.raw(id);
        let before = record::load(raw, record::MARKS);
        put(&raw[record::MARKS], u64::from(record::MARK_TOLD));
        before & u64::from(record::MARK_TOLD) != 0
    }

    /// Commits the `MARK_*` bits of a flow, after all that they are about.
    #[inline]
    pub fn commit_marks(&mut self, id: RecordId, marks: u8) {
        let raw = self.raw(id);
        let told = record::load(raw, record::MARKS) & u64::from(record::MARK_TOLD);
        put(&raw[record::MARKS], told | u64::from(marks));
    }

    /// Commits `g.una`. Call before the pages below it are released.
    pub fn commit_guest_una(&mut self, id: RecordId, seq: u64) {
        put(&self.raw(id)[record::GUEST_UNA], seq);
        compiler_fence(Ordering::Release);
    }

    /// Commits `h.re`, before a segment that advertises it leaves (INV-05 across a restart).
    pub fn commit_edge_to_net(&mut self, id: RecordId, seq: u64) {
        put(&self.raw(id)[record::EDGE_TO_NET], seq);
    }

    /// Commits every word that changes with traffic; for when, see [`Self::commit_rcv_nxt`].
    #[inline(always)]
    pub fn commit(&mut self, id: RecordId, p: &Progress) {
        let raw = self.raw(id);
        compiler_fence(Ordering::Release);
        let [next, una, given] = p.fins.words(p.rcv_nxt, p.guest_una, p.guest_nxt);
        put(&raw[record::RCV_NXT], next);
        put(&raw[record::GUEST_UNA], una);
        put(&raw[record::GUEST_NXT], given);
        put(&raw[record::TO_NET], record::to_net_word(p.net_nxt, p.net_una));
        put(&raw[record::EDGE_TO_NET], p.edge_to_net);
        put(&raw[record::TS_EMIT], record::ts_word(p.ts_emit_r, p.ts_emit_g));
        let from_net = record::from_net_word(p.ts_recent, p.ts_recent_at, p.net_window);
        put(&raw[record::FROM_NET], from_net);
    }

    /// Reads a word of the record in each cache line that a segment reads and writes.
    #[inline]
    pub(crate) fn fetch(&self, id: RecordId) -> u64 {
        let raw = self.raw(id);
        record::load(raw, record::STATE) ^ record::load(raw, record::NAME_HASH)
    }

    // --- Pages ---------------------------------------------------------------------------------

    /// A page for stream bytes `[page_no * PAGE, (page_no + 1) * PAGE)` of a flow, or `None` if all
    /// are in use. It holds nothing of another VM (SEC-10).
    pub fn alloc_page(&mut self, owner: RecordId, page_no: u64) -> Option<PageId> {
        let raw = self.raw(owner);
        debug_assert_ne!(record::load(raw, record::STATE), 0, "page for a free record");
        let owner_word = u64::from(record::generation(raw)) << 32 | (u64::from(owner.index()) + 1);
        let page = self.take_page(self.vm_of(owner))?;
        let desc = &self.descs[page.index()];
        put(&desc[PAGE_NO], page_no);
        put(&desc[OWNER], owner_word);
        Some(page)
    }

    /// A page for bytes of the VM with this `name_hash` that need not survive, or `None` if all are
    /// in use. It holds nothing of another VM (SEC-10), and is free after a restart.
    pub fn lend_page(&mut self, vm: u64) -> Option<PageId> {
        let page = self.take_page(vm)?;
        put(&self.descs[page.index()][PAGE_NO], LENT);
        Some(page)
    }

    /// A page without an owner that holds nothing but bytes of `vm`.
    fn take_page(&mut self, vm: u64) -> Option<PageId> {
        let page = if let Some(page) = self.free_pages.pop() {
            page
        } else {
            let used = self.page_vm.len();
            if used == self.ready.pages {
                return None;
            }
            let page = PageId::new(used)?;
            put(&self.descs.get(used)?[OWNER], 0);
            self.put(header::PAGES_USED, used as u64 + 1);
            self.page_vm.push(0);
            page
        };
        if self.page_vm[page.index()] != vm {
            self.write(page, 0, &[0; PAGE]);
            self.page_vm[page.index()] = vm;
        }
        Some(page)
    }

    /// Gives a page back. Its bytes stay until another VM gets it, or this one overwrites them.
    pub fn free_page(&mut self, page: PageId) {
        let desc = &self.descs[page.index()];
        let lent = u64::from_le(desc[PAGE_NO].load(Ordering::Relaxed)) == LENT;
        debug_assert!(lent || desc[OWNER].load(Ordering::Relaxed) != 0, "page freed twice");
        if lent {
            put(&desc[PAGE_NO], 0);
        }
        put(&desc[OWNER], 0);
        self.free_pages.push(page);
    }

    /// The bytes of a page.
    #[must_use]
    pub fn page(&self, page: PageId) -> &[u8; PAGE] {
        &self.pages[page.index()]
    }

    /// Copies `bytes` to `offset` of a page, in which they must fit.
    #[inline]
    pub fn write(&mut self, page: PageId, offset: usize, bytes: &[u8]) {
        let place = &mut self.pages[page.index()][offset..offset + bytes.len()];
        place.copy_from_slice(bytes);
        #[cfg(test)]
        cuts::on_write(place.as_ptr().addr(), bytes);
    }

    // --- Inside --------------------------------------------------------------------------------

    fn raw(&self, id: RecordId) -> &'m RawRecord {
        &self.records[id.index() as usize]
    }

    fn vm_of(&self, id: RecordId) -> u64 {
        record::load(self.raw(id), record::NAME_HASH)
    }

    fn word(&self, i: usize) -> u64 {
        u64::from_le(self.header[i].load(Ordering::Relaxed))
    }

    fn put(&self, i: usize, value: u64) {
        put(&self.header[i], value);
    }

    /// The valid record that owns the page, if any.
    fn page_owner(&self, index: usize) -> Option<RecordId> {
        let word = u64::from_le(self.descs[index][OWNER].load(Ordering::Relaxed)).to_le_bytes();
        let owner = u32::from_le_bytes([word[0], word[1], word[2], word[3]]).checked_sub(1)?;
        let generation = u32::from_le_bytes([word[4], word[5], word[6], word[7]]);
        let raw = self.records[..self.records_used()].get(owner as usize)?;
        let live = record::load(raw, record::STATE) != 0 && record::generation(raw) == generation;
        live.then_some(RecordId::new(owner))
    }
}

#[cfg(test)]
pub(super) mod cuts;
#[cfg(test)]
pub(crate) mod tests;
