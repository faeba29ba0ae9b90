//! Guest memory: the regions a front-end shares with us, mapped and bounds-checked.
//!
//! Two address spaces meet here. Descriptors hold *guest* addresses. SET_VRING_ADDR holds *user*
//! addresses, which are the front-end's own virtual addresses; they are used for nothing else.
//!
//! All access goes through `vm-memory`'s volatile accessors, so there is no reference to bytes that
//! a guest may change meanwhile, and no `unsafe`. Code that needs a value twice copies it first.
//!
//! **Checks.** The file must be memory itself (tmpfs, a memfd, hugetlbfs), because a page of any
//! other file may have to be fetched by a file system that never answers, and no signal ends that
//! wait. A region must lie inside its file when it is mapped (`fstat`), so that a wrong size cannot
//! cause a fault. The file must be sealed against shrinking, as that of QEMU's
//! `memory-backend-memfd` is, unless the configuration says otherwise. Memory can still go missing:
//! the file system may have no room for a page that was never touched, or a hole may be punched.
//! Then the access finds zeros, and the port goes down (`faults`).
//!
//! **First touches.** The kernel clears a page when it is touched for the first time: one of 2 MiB
//! takes some 0.1 ms, one of 4 KiB with its place in the file and in our page tables 1 to 3 us, and
//! a turn looks at 2,048 buffers. While turns are long (`watchdog`), the first touch of each page
//! after another one is measured and counts as work of the turn ([`GuestMemory::take_work`]).
//! Larger pages, of 1 GiB, must be there before.

mod files;

use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64};
use std::sync::{Arc, Once};

use nightporter_core::time::Duration;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use super::dirty::DirtyLog;
use super::queue::WORK_PER_TURN;
use crate::charges;
use crate::closer::{self, Foreign, Owner};
use crate::faults::{self, Listed};
pub use crate::limits::REGIONS_MAX;
use crate::sleeps;
use crate::spans::{self, Span};
use crate::sys;
use crate::timer::{monotonic_now, time_on_core};
use crate::watchdog;

/// Pages up to this size may be cleared while the worker waits.
const CLEARED_MAX: u64 = 2 << 20;
/// So much time on the core is all the work of a turn. Beside frames in pages that nobody has
/// touched an echo takes 0.8 ms in the median, and 2.4 ms with 500 us.
const WORK_TIME: Duration = Duration::from_micros(100);
/// No frame of an honest guest lies in more pages that nobody has touched: Linux' have 18 pieces,
/// 46 where it was built for the most (MAX_SKB_FRAGS).
const FRESH_MAX: u32 = 64;
/// A small page that is cleared takes longer than this,
const CLEARED: Duration = Duration::from_micros(1);
/// and no longer than this: the rest is a core that was lost meanwhile.
const CLEARED_IN: Duration = Duration::from_micros(10);
/// A page that was there is touched in less.
const TOUCHED: Duration = Duration::from_nanos(300);
/// Smallest mapping granularity assumed when a file does not tell (the x86 and arm64 page).
const PAGE: u64 = 4096;

/// Why a region could not be used.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// A length of zero, or an end beyond 2^64.
    #[error("a region is empty or wraps around")]
    BadRange,
    /// An access to it may have to wait for a disk, or for ever for a file system that does not
    /// answer.
    #[error("the descriptor is not memory: use a memfd, or a file on tmpfs or hugetlbfs")]
    NotMemory,
    /// The region is larger than its file.
    #[error("the region ends at {end:#x} of a file of {file_len:#x} bytes")]
    BeyondFile {
        /// First byte after the region, in the file.
        end: u64,
        /// The file's size.
        file_len: u64,
    },
    /// Two regions claim the same guest addresses.
    #[error("the region overlaps another one")]
    Overlap,
    /// More than [`REGIONS_MAX`].
    #[error("more than {REGIONS_MAX} regions")]
    TooMany,
    /// [`crate::faults`] has a place for so many.
    #[error("all VMs together have too many regions")]
    NoPlace,
    /// [`crate::spans`] has room for so much, whether there is memory behind it or not.
    #[error(
        "too much memory: a VM may share {} TiB, all VMs {} TiB, including memory to be unmapped",
        spans::PORT_MAX >> 40,
        spans::ALL_MAX >> 40
    )]
    TooLong,
    /// The front-end can take the memory away.
    #[error(
        "the guest's memory can shrink: use memory-backend-memfd (QEMU), whose memory is sealed, \
         or set vm.allow_unsealed_memory = true"
    )]
    Unsealed,
    /// The kernel would clear a gigabyte for one byte that we write.
    #[error(
        "the guest's memory is of huge pages larger than {} MiB that are not there yet: \
         preallocate it (QEMU: prealloc=on), or use smaller ones",
        CLEARED_MAX >> 20
    )]
    NotThere,
    /// The limit of [`crate::config::VmConfig::memory_max`].
    #[error("{} MiB of memory: vm.memory_max allows {} MiB", .len >> 20, .most >> 20)]
    TooMuch {
        /// Bytes of all regions.
        len: u64,
        /// Bytes that there may be.
        most: u64,
    },
    /// Files that were shared before may still exist, and their pages are charged to the daemon.
    #[error(
        "files that the VM shared before are still charged to the daemon, and vm.memory_max allows \
         {} MiB together",
        .most >> 20
    )]
    Charged {
        /// Bytes that there may be.
        most: u64,
    },
    /// No such region to remove.
    #[error("no such region")]
    Unknown,
    /// The kernel refused.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The kernel refused to map.
    #[error("mmap: {0}")]
    Map(String),
}

/// Bytes mapped from a file: what a region, a ring or the in-flight log is made of.
///
/// Stays mapped as long as any clone lives.
#[derive(Clone, Debug)]
pub struct Window {
    map: Arc<MmapRegion>,
    /// Dropped after `map`.
    keeper: Arc<Keeper>,
    at: usize,
    len: usize,
}

/// Keeps a mapping while it is used, and then has it unmapped on another thread.
#[derive(Debug)]
struct Keeper(Option<Last>, Option<Owner>);

/// The parts of a mapping that are dropped last, in this order.
type Last = (Listed, Arc<MmapRegion>, Span);

/// A mapping on its way to be unmapped, which the worker may wait for.
struct Mapping(Option<Last>);

impl Drop for Mapping {
    fn drop(&mut self) {
        sleeps::excuse(|| self.0.take().into_iter().for_each(|last| sys::empty(&last.1)));
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(last) = self.0.take() {
            closer::later(self.1.take(), Mapping(Some(last)));
        }
    }
}

impl Window {
    /// Maps `len` bytes of `file` from `offset` on.
    ///
    /// The mapping starts at the file's own block size (hugetlbfs accepts nothing else), so an
    /// offset inside a huge page works.
    pub fn map(file: impl Into<Foreign>, offset: u64, len: u64) -> Result<Self, MemError> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| sys::handle_bus_errors().expect("SIGBUS can be handled"));
        let file = file.into();
        let end = offset.checked_add(len).filter(|_| len > 0).ok_or(MemError::BadRange)?;
        if !is_memory(&file) {
            return Err(MemError::NotMemory);
        }
        let stat = fstat(&file).map_err(std::io::Error::from)?;
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        if end > file_len {
            return Err(MemError::BeyondFile { end, file_len });
        }
        let block = u64::try_from(stat.st_blksize).unwrap_or(PAGE).max(PAGE).next_power_of_two();
        let start = offset & !(block - 1);
        // Rounded up for munmap of huge pages, but never past the end of the file.
        let stop = end.checked_next_multiple_of(block).map_or(file_len, |e| e.min(file_len));
        let size = usize::try_from(stop - start).map_err(|_| MemError::BadRange)?;
        let span = Span::take(file.owner(), stop - start).ok_or(MemError::TooLong)?;
        let (file, owner) = file.into_inner();
        let map = MmapRegion::from_file(FileOffset::new(File::from(file), start), size)
            .map_err(|e| MemError::Map(e.to_string()))?;
        sys::keep_out_of_dumps(&map);
        let block = usize::try_from(block).map_err(|_| MemError::BadRange)?;
        let (at, map) = (map.as_ptr().expose_provenance(), Arc::new(map));
        let listed = Listed::new(at, size, block).ok_or(MemError::NoPlace)?;
        let keeper = Arc::new(Keeper(Some((listed, Arc::clone(&map), span)), owner));
        let narrow = |n: u64| usize::try_from(n).map_err(|_| MemError::BadRange);
        Ok(Self { map, keeper, at: narrow(offset - start)?, len: narrow(len)? })
    }

    /// Whether some of the mapping was not there when it was used.
    #[must_use]
    pub(crate) fn has_faulted(&self) -> bool {
        self.keeper.0.as_ref().is_some_and(|(listed, ..)| listed.has_faulted())
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes (never, for a mapped window).
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of this window, if it lies inside and its first byte has the alignment `align`.
    #[must_use]
    pub fn part(&self, at: u64, len: usize, align: usize) -> Option<Self> {
        let at = usize::try_from(at).ok()?;
        let end = at.checked_add(len)?;
        let at = self.at + at;
        let aligned = self.map.as_ptr().addr().wrapping_add(at).is_multiple_of(align);
        let (map, keeper) = (Arc::clone(&self.map), Arc::clone(&self.keeper));
        (end <= self.len && aligned).then(|| Self { map, keeper, at, len })
    }

    /// The bytes `at..at + len`; `None` if they are not all inside.
    #[must_use]
    pub fn slice(&self, at: usize, len: usize) -> Option<VolatileSlice<'_>> {
        if at.checked_add(len)? > self.len {
            return None;
        }
        self.map.get_slice(self.at + at, len).ok()
    }

    /// A byte that both sides use as a flag.
    #[must_use]
    pub fn u8_at(&self, at: usize) -> Option<&AtomicU8> {
        self.map.get_atomic_ref(self.at + at).ok().filter(|_| at < self.len)
    }

    /// An aligned 16-bit value that both sides use.
    #[must_use]
    pub fn u16_at(&self, at: usize) -> Option<&AtomicU16> {
        self.map.get_atomic_ref(self.at + at).ok().filter(|_| at + 2 <= self.len)
    }

    /// An aligned 64-bit value that both sides use.
    #[must_use]
    pub fn u64_at(&self, at: usize) -> Option<&AtomicU64> {
        self.map.get_atomic_ref(self.at + at).ok().filter(|_| at + 8 <= self.len)
    }
}

/// One stretch of guest memory.
#[derive(Debug)]
struct Region {
    guest: u64,
    user: u64,
    len: u64,
    bytes: Window,
    file: charges::Id,
    sealed: bool,
    /// Bytes of its pages, which the kernel clears one by one.
    page: usize,
    /// All of the file has its memory.
    allocated: bool,
}

/// Whether a file's pages are its storage. Only the files of tmpfs and hugetlbfs, memfds among
/// them, know of seals (fcntl(2)); unlike that of `fstat` the question is never passed to a file
/// system.
pub(super) fn is_memory(file: impl AsFd) -> bool {
    fcntl_get_seals(file).is_ok()
}

/// Whether a file cannot be shrunk.
#[must_use]
pub fn is_sealed(file: impl AsFd) -> bool {
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

impl Region {
    fn map(spec: &VhostUserMemoryRegion, file: Foreign) -> Result<Self, MemError> {
        let (guest, user, len) = (spec.guest_phys_addr, spec.user_addr, spec.memory_size);
        guest.checked_add(len).ok_or(MemError::BadRange)?;
        user.checked_add(len).ok_or(MemError::BadRange)?;
        if !is_memory(&file) {
            return Err(MemError::NotMemory);
        }
        let stat = fstat(&file).map_err(std::io::Error::from)?;
        // `st_blocks` counts in 512 bytes whatever the file system.
        let allocated = stat.st_blocks.saturating_mul(512) >= stat.st_size;
        let block = u64::try_from(stat.st_blksize).unwrap_or(PAGE);
        if block > CLEARED_MAX && !allocated {
            return Err(MemError::NotThere);
        }
        let page = usize::try_from(block.max(PAGE)).map_err(|_| MemError::BadRange)?;
        let (sealed, id) = (is_sealed(&file), (stat.st_dev, stat.st_ino));
        let bytes = Window::map(file, spec.mmap_offset, len)?;
        Ok(Self { guest, user, len, bytes, file: id, sealed, page, allocated })
    }

    const fn is(&self, spec: &VhostUserMemoryRegion) -> bool {
        self.guest == spec.guest_phys_addr
            && self.user == spec.user_addr
            && self.len == spec.memory_size
    }
}

/// The memory of one guest.
#[derive(Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
    /// Where writes are marked, while its VM may migrate.
    log: Option<Arc<DirtyLog>>,
    /// Where the last access was; nearly always where the next one is.
    hot: Cell<usize>,
    /// The page that was touched last: its address divided by its size.
    hot_page: Cell<u64>,
    /// Time that the kernel took to clear pages.
    clearing: Cell<Duration>,
    /// Small pages that it cleared, and the time for them.
    fresh: Cell<(u32, Duration)>,
}

impl GuestMemory {
    /// Maps a whole table (SET_MEM_TABLE); pairs of region and the file behind it.
    pub fn new<F: Into<Foreign>>(
        table: impl IntoIterator<Item = (VhostUserMemoryRegion, F)>,
    ) -> Result<Self, MemError> {
        let mut memory = Self::default();
        for (spec, file) in table {
            memory.add(&spec, file)?;
        }
        Ok(memory)
    }

    /// Bytes of all regions.
    pub(crate) fn len(&self) -> u64 {
        self.regions.iter().fold(0, |sum, region| sum.saturating_add(region.len))
    }

    /// The file of each region, and how much of it that is.
    pub(crate) fn files(&self) -> impl Iterator<Item = (charges::Id, u64)> {
        self.regions.iter().map(|region| (region.file, region.len))
    }

    /// Number of regions.
    #[must_use]
    pub fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Whether none of the files can be shrunk (F_SEAL_SHRINK on all of them).
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.regions.iter().all(|r| r.sealed)
    }

    /// Whether every page was there before we came; else those that we are the first to touch are
    /// charged to us.
    #[must_use]
    pub fn is_allocated(&self) -> bool {
        self.regions.iter().all(|r| r.allocated)
    }

    /// Whether some of it was not there when it was used.
    #[must_use]
    pub(crate) fn has_faulted(&self) -> bool {
        self.regions.iter().any(|r| r.bytes.has_faulted())
    }

    /// Adds one region (ADD_MEM_REG). One that is already there is replaced: a front-end that was
    /// reset may tell us again.
    pub fn add(
        &mut self,
        spec: &VhostUserMemoryRegion,
        file: impl Into<Foreign>,
    ) -> Result<(), MemError> {
        let region = Region::map(spec, file.into())?;
        if let Some(known) = self.regions.iter_mut().find(|r| r.is(spec)) {
            *known = region;
            return Ok(());
        }
        if self.regions.len() == REGIONS_MAX {
            return Err(MemError::TooMany);
        }
        let (start, end) = (region.guest, region.guest + region.len);
        if self.regions.iter().any(|r| r.guest < end && start < r.guest + r.len) {
            return Err(MemError::Overlap);
        }
        self.regions.push(region);
        Ok(())
    }

    /// Removes one region (REM_MEM_REG), named by its addresses and size. Returns its file, and how
    /// much of it that was.
    pub(crate) fn remove(
        &mut self,
        spec: &VhostUserMemoryRegion,
    ) -> Result<(charges::Id, u64), MemError> {
        let at = self.regions.iter().position(|r| r.is(spec)).ok_or(MemError::Unknown)?;
        let region = self.regions.swap_remove(at);
        self.hot.set(0);
        Ok((region.file, region.len))
    }

    /// Marks writes there from now on, or nowhere.
    pub(super) fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.log = log;
    }

    /// `len` bytes at a *guest* address were written.
    #[inline]
    pub(super) fn mark(&self, guest: u64, len: usize) {
        if let Some(log) = &self.log {
            self.mark_in(log, guest, len);
        }
    }

    /// A page of the log may be touched for the first time, too: that is work as well.
    #[cold]
    fn mark_in(&self, log: &DirtyLog, guest: u64, len: usize) {
        if !watchdog::searches() {
            return log.mark(guest, len);
        }
        let begin = monotonic_now();
        log.mark(guest, len);
        let time = monotonic_now().since(begin);
        if time > TOUCHED {
            self.clearing.set(self.clearing.get() + time);
        }
    }

    /// The *guest* address of a *user* address.
    #[must_use]
    pub(super) fn guest_of(&self, user: u64) -> Option<u64> {
        let region = self.regions.iter().find(|r| r.user <= user && user - r.user < r.len)?;
        Some(region.guest + (user - region.user))
    }

    /// The window behind a *user* address, for rings; all in one region, aligned to `align`.
    #[must_use]
    pub fn window(&self, user: u64, len: usize, align: usize) -> Option<Window> {
        let region = self.regions.iter().find(|r| r.user <= user && user - r.user < r.len)?;
        region.bytes.part(user - region.user, len, align)
    }

    /// Copies guest bytes out, once. `None` if some are not mapped; `out` is then undefined.
    #[must_use]
    pub fn read(&self, guest: u64, out: &mut [u8]) -> Option<()> {
        let mut done = 0;
        while done < out.len() {
            let at = guest.checked_add(done as u64)?;
            done += self.slice(at, out.len() - done)?.copy_to(&mut out[done..]);
        }
        Some(())
    }

    /// Copies bytes in. `None` if some are not mapped; those before are then written.
    #[must_use]
    pub fn write(&self, guest: u64, bytes: &[u8]) -> Option<()> {
        let mut done = 0;
        while done < bytes.len() {
            let at = guest.checked_add(done as u64)?;
            let slice = self.slice(at, bytes.len() - done)?;
            slice.copy_from(&bytes[done..]);
            self.mark(at, slice.len());
            done += slice.len();
        }
        Some(())
    }

    /// Whether `len` bytes at a *guest* address are all mapped, in one region or in adjacent ones.
    #[must_use]
    pub fn contains(&self, guest: u64, len: usize) -> bool {
        let mut done = 0;
        while done < len {
            match guest.checked_add(done as u64).and_then(|at| self.find(at, len - done)) {
                Some((slice, _)) => done += slice.len(),
                None => return false,
            }
        }
        true
    }

    /// All `len` bytes at `guest`, if they are in one region, as nearly all buffers are.
    #[inline]
    #[must_use]
    pub fn whole(&self, guest: u64, len: usize) -> Option<VolatileSlice<'_>> {
        self.slice(guest, len).filter(|slice| slice.len() == len)
    }

    /// The mapped bytes from `guest` on, which are about to be used: at least one, at most `len`,
    /// as far as one region goes. `None` also if it was found missing.
    #[inline]
    pub(super) fn slice(&self, guest: u64, len: usize) -> Option<VolatileSlice<'_>> {
        let (slice, page) = self.find(guest, len)?;
        if watchdog::searches() {
            let faults = faults::count();
            self.touch(guest, &slice, page);
            // There are zeros now, which the kernel would take for the guest's bytes. The count
            // alone says nothing: the watchdog raises it at any time, because of any VM.
            if faults::count() != faults && self.has_faulted() {
                return None;
            }
        }
        Some(slice)
    }

    /// The same, and the bytes of the region's pages; none of them is touched.
    #[inline]
    fn find(&self, guest: u64, len: usize) -> Option<(VolatileSlice<'_>, usize)> {
        let inside = |r: &&Region| guest.wrapping_sub(r.guest) < r.len;
        let region = match self.regions.get(self.hot.get()).filter(inside) {
            Some(region) => region,
            None => {
                // To put zeros over a region takes its time: one at most, before the port goes.
                if faults::count() > 0 && self.has_faulted() {
                    return None;
                }
                let at = self.regions.iter().position(|r| inside(&r))?;
                self.hot.set(at);
                &self.regions[at]
            }
        };
        let at = usize::try_from(guest - region.guest).ok()?;
        let slice = region.bytes.slice(at, len.min(region.bytes.len() - at))?;
        Some((slice, region.page))
    }

    /// Touches pages that were not touched just before, and measures the time: that of huge ones by
    /// the time on the core, which takes a system call, and that of others by the clock.
    #[cold]
    fn touch(&self, guest: u64, slice: &VolatileSlice<'_>, page: usize) {
        let is_huge = page as u64 > PAGE;
        let clock = if is_huge { time_on_core } else { monotonic_now };
        for at in (0..slice.len()).step_by(page).chain(slice.len().checked_sub(1)) {
            let number = (guest + at as u64) / page as u64;
            if self.hot_page.replace(number) != number {
                let begin = clock();
                let _ = slice.get_ref::<u8>(at).map(|byte| byte.load());
                let time = clock().since(begin);
                if page as u64 > CLEARED_MAX {
                    sleeps::note_clearing(time);
                }
                if is_huge || time > TOUCHED {
                    self.clearing.set(self.clearing.get() + time);
                }
                if !is_huge && time > CLEARED {
                    let (pages, sum) = self.fresh.get();
                    self.fresh.set((pages + 1, sum + time.min(CLEARED_IN)));
                }
            }
        }
    }

    /// As [`Self::take_work`], where all of it was for one frame: that may not lie in any number of
    /// such pages.
    #[inline]
    #[must_use]
    pub fn take_work_of_frame(&self) -> usize {
        let (pages, time) = self.fresh.get();
        if pages > FRESH_MAX {
            sleeps::note_fresh_pages(time);
        }
        self.take_work()
    }

    /// The kernel's work since the last call for pages that were touched for the first time, as so
    /// many chains and buffers of a queue.
    #[inline]
    #[must_use]
    pub fn take_work(&self) -> usize {
        if self.clearing.get() == Duration::ZERO {
            return 0;
        }
        self.fresh.take();
        let time = self.clearing.take().as_nanos();
        let work = time.saturating_mul(WORK_PER_TURN as u64) / WORK_TIME.as_nanos();
        usize::try_from(work).unwrap_or(usize::MAX).min(WORK_PER_TURN)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::vhost::huge_pages::HugePages;

    #[test]
    fn a_mapping_that_is_emptied_has_no_pages_and_its_file_keeps_them() {
        const LEN: usize = 20 << 20;
        let file = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, LEN as u64).unwrap();
        let map = MmapRegion::from_file(FileOffset::new(File::from(file), 0), LEN).unwrap();
        let byte = |at: usize| map.get_atomic_ref::<AtomicU8>(at).unwrap();
        let resident = || {
            let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let (_, own) = all.split_once(&format!("{:x}-", map.as_ptr().addr())).unwrap();
            own.lines().find(|line| line.starts_with("Rss:")).unwrap().to_owned()
        };
        (0..LEN).step_by(4096).for_each(|at| byte(at).store(7, Ordering::Relaxed));
        assert!(resident().contains(" 20480 kB"), "{}", resident());
        sys::empty(&map);
        assert!(resident().contains(" 0 kB"), "{}", resident());
        assert_eq!(byte(LEN - 4096).load(Ordering::Relaxed), 7);
    }

    #[test]
    fn huge_pages_that_the_kernel_clears_are_work_of_the_turn_once() {
        const PAGES: u64 = 16;
        let Some(_reserved) = HugePages::reserve(21, PAGES) else { return };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = memfd_create("huge", flags).unwrap();
        let (guest, len) = (1 << 32, PAGES << 21);
        ftruncate(&file, len).unwrap();
        let spec = VhostUserMemoryRegion::new(guest, len, 0, 0);
        let memory = GuestMemory::new([(spec, file)]).unwrap();
        let touch = || {
            let pages = (0..PAGES).map(|page| {
                memory.read(guest + (page << 21) + 4096, &mut [0; 64]).unwrap();
                memory.take_work()
            });
            pages.collect::<Vec<_>>()
        };
        watchdog::handle_end(monotonic_now() - Duration::from_secs(1)); // a turn was long
        let (first, again) = (touch(), touch());
        let sum = |work: &[usize]| work.iter().sum::<usize>();
        assert!(sum(&first) > 4 * sum(&again).max(1), "{first:?}, then {again:?}");
        assert!(first.iter().all(|work| *work > 16), "each counts for many buffers: {first:?}");
    }

    #[test]
    fn small_pages_that_the_kernel_clears_are_work_of_the_turn_once() {
        const PAGES: u64 = 512;
        let file = memfd_create("small", MemfdFlags::CLOEXEC).unwrap();
        let (guest, len) = (1 << 32, PAGES * PAGE);
        ftruncate(&file, len).unwrap();
        let memory = GuestMemory::new([(VhostUserMemoryRegion::new(guest, len, 0, 0), file)]);
        let memory = memory.unwrap();
        let touch = || {
            let works = (0..PAGES).map(|page| {
                memory.read(guest + page * PAGE + 100, &mut [0; 64]).unwrap();
                (memory.clearing.get(), memory.take_work())
            });
            let mut works: Vec<_> = works.collect();
            works.sort_unstable();
            works[works.len() / 2]
        };
        watchdog::handle_end(monotonic_now() - Duration::from_secs(1)); // a turn was long
        let (first, again) = (touch(), touch());
        // Where two looks at the clock alone take longer than TOUCHED, they count again.
        let once = again.0.saturating_mul(2) < first.0;
        assert!(first.1 >= 1 && once, "the median: {first:?}, then {again:?}");
    }

    #[test]
    fn a_window_gives_nothing_behind_its_end() {
        let file = memfd_create("window", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, PAGE).unwrap();
        let memory = GuestMemory::new([(VhostUserMemoryRegion::new(0, PAGE, 0, 0), file)]).unwrap();
        let window = memory.window(0, 16, 1).unwrap();
        assert!(window.u8_at(15).is_some() && window.u8_at(16).is_none());
        assert!(window.u16_at(14).is_some() && window.u16_at(16).is_none());
        assert!(window.u64_at(8).is_some() && window.u64_at(16).is_none());
    }

    #[test]
    fn memory_is_there_whatever_the_watchdog_finds_meanwhile() {
        let file = memfd_create("watched", MemfdFlags::CLOEXEC).unwrap();
        let (guest, len) = (1 << 32, 2 * PAGE);
        ftruncate(&file, len).unwrap();
        let memory = GuestMemory::new([(VhostUserMemoryRegion::new(guest, len, 0, 0), file)]);
        let (memory, goes_on) = (memory.unwrap(), AtomicBool::new(true));
        let before = faults::count();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while goes_on.load(Ordering::Relaxed) {
                    faults::raise();
                }
            });
            while faults::count() == before {
                std::hint::spin_loop(); // it runs
            }
            watchdog::handle_end(monotonic_now() - Duration::from_secs(1)); // a turn was long
            let reads = (0..2_000).map(|n| memory.read(guest + n % 2 * PAGE, &mut [0; 64]));
            let missing = reads.filter(Option::is_none).count();
            goes_on.store(false, Ordering::Relaxed);
            assert_eq!(missing, 0);
        });
    }
}
