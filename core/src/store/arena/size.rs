//! The size of an arena: its places, and how many of them may be used.

use core::ops::Range;

use super::{
    Arena, ArenaError, ArenaSize, HEADER_BYTES, MAGIC, RawDesc, RawRecord, SIZES, VERSION, header,
};
use crate::limits::PAGE;

impl Arena<'_> {
    /// The bytes of an arena with so many places that need memory before so many of them may be
    /// used: header and records, page descriptors, pages.
    ///
    /// # Panics
    /// If there are not so many places, or the arena is larger than the address space.
    #[must_use]
    pub fn ranges(places: ArenaSize, ready: ArenaSize) -> [Range<usize>; 3] {
        assert!(ready.records <= places.records && ready.pages <= places.pages, "no such places");
        let record_bytes = |n: usize| n * size_of::<RawRecord>();
        let descs_at = HEADER_BYTES + record_bytes(places.records);
        let pages_at = Self::layout_len(places.records, places.pages) - places.pages * PAGE;
        [
            0..HEADER_BYTES + record_bytes(ready.records),
            descs_at..descs_at + ready.pages * size_of::<RawDesc>(),
            pages_at..pages_at + ready.pages * PAGE,
        ]
    }

    /// The header of an arena: its number of places, and the number that may be used.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn sizes_of(head: &[u8]) -> Result<(ArenaSize, ArenaSize), ArenaError> {
        let (head, _) = head.split_first_chunk::<HEADER_BYTES>().ok_or(ArenaError::NotAnArena)?;
        let (words, _) = head.as_chunks::<8>();
        let word = |i: usize| u64::from_le_bytes(words[i]);
        if word(header::MAGIC) != MAGIC {
            return Err(ArenaError::NotAnArena);
        }
        if word(header::VERSION) != VERSION || word(header::SIZES) != SIZES {
            return Err(ArenaError::OtherLayout);
        }
        let size = |records: usize, pages: usize| {
            let count = |i: usize| usize::try_from(word(i)).map_err(|_| ArenaError::WrongLength);
            Ok(ArenaSize { records: count(records)?, pages: count(pages)? })
        };
        let places = size(header::RECORDS, header::PAGES)?;
        let ready = size(header::RECORDS_READY, header::PAGES_READY)?;
        let used = size(header::RECORDS_USED, header::PAGES_USED)?;
        let fits = |small: ArenaSize, large: ArenaSize| {
            small.records <= large.records && small.pages <= large.pages
        };
        if fits(used, ready) && fits(ready, places) {
            Ok((places, ready))
        } else {
            Err(ArenaError::WrongLength)
        }
    }

    /// From now on so many records and pages may be used: there is memory for them ([`ranges`]).
    /// Not fewer than ever were in use.
    ///
    /// [`ranges`]: Self::ranges
    ///
    /// # Panics
    /// If there are no places for so many, or more were in use.
    pub fn resize(&mut self, ready: ArenaSize) {
        let (records, pages) = (self.records_used(), self.page_vm.len());
        assert!(records <= ready.records && pages <= ready.pages, "they are in use");
        assert!(ready.records <= self.records.len() && ready.pages <= self.pages.len(), "no place");
        self.put(header::RECORDS_READY, ready.records as u64);
        self.put(header::PAGES_READY, ready.pages as u64);
        self.ready = ready;
    }

    /// Forgets the content of all pages: none counts as used. A restarted daemon may do so if no
    /// connection is owed the bytes.
    pub fn forget_pages(&mut self) {
        self.put(header::PAGES_USED, 0);
        self.page_vm.clear();
        self.free_pages.clear();
    }
}
