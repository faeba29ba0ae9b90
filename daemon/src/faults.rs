//! Accesses to a front-end's shared memory that is missing: its file was cut, or its file system
//! has no room for a hole in it (SIGBUS).
//!
//! Every mapping of a front-end's file is listed here while it exists. The signal's handler looks
//! up the address, maps zeros over the whole mapping and marks it; the access then goes on. The
//! worker asks [`count`] after each turn whether that happened, and takes down the port whose
//! mapping is marked. A fault anywhere else is a bug of ours, and ends the process as it should.
//!
//! The handler replaces the whole mapping, not only the missing page: each page would be a mapping
//! of its own, of which a process has only so many (`vm.max_map_count`), and the next missing page
//! would be another signal.
//!
//! The handler runs in the middle of the code that touched the memory, so the list is made of
//! atomics at fixed places, and the handler never takes the lock on its free places. Meanwhile the
//! other worker may give a place to another mapping. Each place has a number that changes with
//! that, and what the handler has read counts if the number is the same before and after.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use crate::limits::REGIONS_MAX;

/// Mappings of all front-ends together: 256 VMs, each with a network card and a socket device, and
/// with as many regions as both may have.
const MAPPINGS_MAX: usize = 256 * 2 * REGIONS_MAX;

/// Where one mapping is.
struct Place {
    /// Even while the place is free; one more for each mapping that comes or goes.
    generation: AtomicU64,
    start: AtomicUsize,
    /// Bytes.
    len: AtomicUsize,
    /// The size that the kernel maps at a time, from `start` on: a page, or a huge one.
    block: AtomicUsize,
    faulted: AtomicBool,
}

impl Place {
    const fn new() -> Self {
        Self {
            generation: AtomicU64::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            block: AtomicUsize::new(0),
            faulted: AtomicBool::new(false),
        }
    }

    /// A mapping is here from now on. The place was free.
    fn take(&self, start: usize, len: usize, block: usize) {
        // A thread that sees one of the following has seen that the place was free.
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.block.store(block, Ordering::Relaxed);
        self.faulted.store(false, Ordering::Relaxed);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The place is free from now on.
    fn free(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The mapping here, if there is one: its start, bytes, and bytes of a block. `load` loads one
    /// of them.
    fn read(&self, load: impl Fn(&AtomicUsize) -> usize) -> Option<(usize, usize, usize)> {
        let generation = self.generation.load(Ordering::Acquire);
        let [start, len, block] = [&self.start, &self.len, &self.block].map(load);
        // Behind these loads is another look at the number.
        fence(Ordering::Acquire);
        let is_same = self.generation.load(Ordering::Relaxed) == generation;
        (is_same && !generation.is_multiple_of(2)).then_some((start, len, block))
    }
}

static PLACES: [Place; MAPPINGS_MAX] = [const { Place::new() }; MAPPINGS_MAX];
/// Places from here on were never used.
static UNUSED: AtomicUsize = AtomicUsize::new(0);
/// Places below that are free again.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Faults so far, in all mappings, and descriptors that kept the worker waiting.
#[inline]
pub(crate) fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// A descriptor of a front-end kept the worker waiting, or a ring is out of use: ports are looked
/// at as after a fault.
#[cold]
pub(crate) fn raise() {
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// A mapping on the list, as long as this lives.
#[derive(Debug)]
pub(crate) struct Listed(usize);

impl Listed {
    /// Lists the `len` bytes at `start`, which the kernel maps in blocks of `block` bytes. `None`:
    /// the list is full.
    pub(crate) fn new(start: usize, len: usize, block: usize) -> Option<Self> {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.pop().or_else(|| {
            let at = UNUSED.load(Ordering::Relaxed);
            (at < MAPPINGS_MAX).then(|| UNUSED.fetch_add(1, Ordering::Release))
        })?;
        PLACES[at].take(start, len, block);
        Some(Self(at))
    }

    /// Whether some of it was not there.
    pub(crate) fn has_faulted(&self) -> bool {
        PLACES[self.0].faulted.load(Ordering::Relaxed)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        PLACES[self.0].free();
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

/// A range of addresses: the first, and bytes.
type Range = (usize, usize);

/// The memory at `address` is missing: marks its mapping. Returns the ranges to map zeros over: the
/// mapping, or if that does not work, the block of it; `None` if no mapping is there. Called by the
/// signal's handler.
pub(crate) fn note(address: usize) -> Option<[Range; 2]> {
    let places = PLACES.get(..UNUSED.load(Ordering::Acquire))?;
    places.iter().find_map(|place| {
        let (start, len, block) = place.read(|it| it.load(Ordering::Relaxed))?;
        let at = address.checked_sub(start).filter(|at| *at < len)?;
        place.faulted.store(true, Ordering::Relaxed);
        COUNT.fetch_add(1, Ordering::Relaxed);
        let from = at / block * block;
        Some([(start, len), (start + from, block.min(len - from))])
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    // Addresses that no process has: the other tests' mappings are on the same list.
    const NOWHERE: usize = usize::MAX / 2;

    #[test]
    fn a_fault_is_for_the_mapping_that_it_is_in_or_a_block_of_it() {
        let low = Listed::new(NOWHERE, 0x5000, 0x1000).unwrap();
        let high = Listed::new(NOWHERE + 0x10_0000, 0x5800, 0x2000).unwrap();
        assert_eq!(note(NOWHERE - 1), None);
        assert_eq!(note(NOWHERE + 0x5000), None);
        let all = (NOWHERE + 0x10_0000, 0x5800);
        assert_eq!(note(NOWHERE + 0x10_1fff), Some([all, (NOWHERE + 0x10_0000, 0x2000)]));
        assert!(high.has_faulted() && !low.has_faulted());
        let end = (NOWHERE + 0x10_4000, 0x1800);
        assert_eq!(note(NOWHERE + 0x10_57ff), Some([all, end]));
        drop(high);
        assert_eq!(note(NOWHERE + 0x10_1fff), None, "it is no mapping of ours any more");
        let again = Listed::new(NOWHERE + 0x10_0000, 0x1000, 0x1000).unwrap();
        assert!(!again.has_faulted());
    }

    #[test]
    fn a_place_that_another_mapping_takes_meanwhile_is_read_as_none() {
        let place = Place::new();
        let read = |n: usize, meanwhile: &dyn Fn()| {
            let loads = Cell::new(0);
            place.read(|it| {
                if loads.replace(loads.get() + 1) == n {
                    meanwhile();
                }
                it.load(Ordering::Relaxed)
            })
        };
        assert_eq!(read(9, &|| {}), None, "it is free");
        place.take(0x1000, 0x5000, 0x1000);
        assert_eq!(read(9, &|| {}), Some((0x1000, 0x5000, 0x1000)));
        for n in 0..3 {
            let other = || {
                place.free();
                place.take(0x9000, 0x1000 * (n + 1), 0x2000);
            };
            assert_eq!(read(n, &other), None, "before the load {n}");
            assert_eq!(read(n, &|| place.free()), None);
            place.take(0x1000, 0x5000, 0x1000);
        }
    }
}
