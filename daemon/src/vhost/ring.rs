//! One split virtqueue (virtio 1.2 section 2.7), seen from the device.
//!
//! Everything here is read from memory that a guest may change at any time. Each value is copied
//! once, then checked. A value that cannot be right is a [`RingFault`], after which the owner stops
//! using the queue until its driver resets it. No fault can make this code touch memory outside the
//! front-end's regions, or work longer than one queue's worth of descriptors.
//!
//! Invariants:
//! 1. `published_used` <= `next_used` <= `next_avail` <= `avail_idx` (modulo 2^16), all within one
//!    queue size: what was announced, completed, taken, and offered.
//! 2. The device completes in the order in which it took (we always do). So the used index alone
//!    says where a successor goes on, and a ring is started there.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vm_memory::VolatileMemory;

use super::dirty::DirtyLog;
use super::guest_mem::{GuestMemory, Window};
use super::inflight::InflightQueue;

/// Largest queue (virtio 1.2 section 2.7: at most 32768, a power of two).
pub const QUEUE_SIZE_MAX: u16 = 32768;
/// Most descriptors in one chain, in the ring or in an indirect table. Linux makes tables longer
/// than a short queue, and none longer than this; QEMU has the same limit (`VIRTQUEUE_MAX_SIZE`).
pub const CHAIN_MAX: u16 = 1024;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const DESC_F_INDIRECT: u16 = 4;
const AVAIL_F_NO_INTERRUPT: u16 = 1;
const USED_F_NO_NOTIFY: u16 = 1;
const DESC_LEN: usize = 16;

/// How a guest's ring lied. The queue is out of use until its driver resets it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RingFault {
    /// `avail.idx` is further ahead than a queue of this size can be.
    #[error("avail.idx jumped further than the queue is long")]
    AvailJump,
    /// `avail.ring` or `next` names a descriptor that the table does not have.
    #[error("a descriptor index is outside the table")]
    IndexOutOfRange,
    /// More descriptors in a chain than in the queue, or than [`CHAIN_MAX`].
    #[error("a descriptor chain loops or is longer than any driver makes")]
    ChainTooLong,
    /// A buffer without bytes. Chains of them would cost work and memory without end, because
    /// chains on offer may share descriptors. QEMU refuses them too (`virtqueue_map_desc`).
    #[error("a buffer has no bytes")]
    EmptyBuffer,
    /// An indirect descriptor where none is allowed: not negotiated, inside a table, or chained.
    #[error("an indirect descriptor is where none is allowed")]
    IndirectMisplaced,
    /// An indirect table with no, a fractional, or too many descriptors.
    #[error("an indirect table has an impossible length")]
    IndirectLength,
    /// A buffer, an indirect table, or the ring itself is not in guest memory.
    #[error("a buffer, a table or the ring is outside guest memory")]
    OutsideMemory,
    /// A device-writable buffer on a transmit queue or a read-only one on a receive queue.
    #[error("a buffer has the wrong direction")]
    WrongDirection,
    /// A chain that cannot even hold a header, or is one of crumbs.
    #[error("a chain of buffers is shorter than a header, or its buffers are too small")]
    BufferTooSmall,
}

/// Where a ring lies (SET_VRING_ADDR), as *user* addresses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RingAddrs {
    /// Descriptor table.
    pub desc: u64,
    /// Available ring, the driver's.
    pub avail: u64,
    /// Used ring, the device's.
    pub used: u64,
}

/// The ring features that were negotiated.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RingFeatures {
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
}

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Buffer {
    /// Guest address.
    pub guest: u64,
    /// Bytes.
    pub len: u32,
    /// For the device to write, not to read.
    pub writable: bool,
}

/// The three areas of a ring, mapped.
#[derive(Debug)]
struct Areas {
    desc: Window,
    avail: Window,
    used: Window,
    /// The guest address of the used ring.
    used_guest: u64,
}

impl Areas {
    fn map(memory: &GuestMemory, addrs: RingAddrs, size: u16) -> Option<Self> {
        let n = usize::from(size);
        Some(Self {
            desc: memory.window(addrs.desc, DESC_LEN * n, 16)?,
            avail: memory.window(addrs.avail, 6 + 2 * n, 2)?,
            used: memory.window(addrs.used, 6 + 8 * n, 4)?,
            used_guest: memory.guest_of(addrs.used)?,
        })
    }
}

/// A running split virtqueue.
#[derive(Debug)]
pub struct Ring {
    areas: Areas,
    size: u16,
    features: RingFeatures,
    /// The next entry of `avail.ring` to take.
    next_avail: u16,
    /// `avail.idx` as last seen.
    avail_idx: u16,
    /// The next entry of `used.ring` to fill.
    next_used: u16,
    /// `used.idx` as the driver sees it.
    published_used: u16,
    /// `used.idx` when it was last decided whether to signal; `None` before the first time.
    signal_used: Option<u16>,
    /// Most chains ever offered at once; see [`Self::is_drained`].
    offered_max: u16,
    /// Chains that a crashed predecessor had taken and not completed, oldest first.
    retry: VecDeque<u16>,
    inflight: Option<InflightQueue>,
    /// Where writes to the used ring are marked, while the VM may migrate.
    log: Option<Arc<DirtyLog>>,
}

impl Ring {
    /// Starts a ring where its used index says (invariant 2).
    ///
    /// `size` is a power of two up to [`QUEUE_SIZE_MAX`]. With an in-flight log, the chains that it
    /// lists come first, in their old order. Errors: some area is not in guest memory.
    pub fn start(
        memory: &GuestMemory,
        addrs: RingAddrs,
        size: u16,
        features: RingFeatures,
        mut inflight: Option<InflightQueue>,
    ) -> Result<Self, RingFault> {
        assert!(size.is_power_of_two() && size <= QUEUE_SIZE_MAX, "checked by the message handler");
        let areas = Areas::map(memory, addrs, size).ok_or(RingFault::OutsideMemory)?;
        let used = areas.used.u16_at(2).ok_or(RingFault::OutsideMemory)?;
        let used_idx = u16::from_le(used.load(Ordering::Acquire));
        let retry = inflight.as_mut().map_or_else(VecDeque::new, |log| log.recover(used_idx));
        let taken = u16::try_from(retry.len()).unwrap_or(u16::MAX);
        let next_avail = used_idx.wrapping_add(taken);
        Ok(Self {
            areas,
            size,
            features,
            next_avail,
            avail_idx: next_avail,
            next_used: used_idx,
            published_used: used_idx,
            signal_used: None,
            offered_max: 0,
            retry,
            inflight,
            log: None,
        })
    }

    /// Descriptors in the table.
    #[must_use]
    pub const fn size(&self) -> u16 {
        self.size
    }

    /// The answer to GET_VRING_BASE: a successor goes on here.
    #[must_use]
    pub const fn base(&self) -> u16 {
        self.next_used
    }

    /// Chains completed but not yet published.
    #[must_use]
    pub const fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published_used)
    }

    /// Whether the driver has seen everything published so far, as far as the ring tells.
    ///
    /// With EVENT_IDX, a driver that goes back to waiting writes the index it has consumed up to.
    /// Without, having as many buffers on offer as it ever had means that it has recycled them all.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        if self.features.event_idx {
            return self.driver_word(self.event_at()) == Some(self.published_used);
        }
        let offered = self.driver_word(2).map(|idx| idx.wrapping_sub(self.published_used));
        offered.is_some_and(|n| n >= self.offered_max)
    }

    /// The driver's two counters, `avail.idx` and `used_event`: when they move, it is running.
    #[must_use]
    pub fn driver_marks(&self) -> (u16, u16) {
        let event = if self.features.event_idx { self.event_at() } else { 2 };
        (self.driver_word(2).unwrap_or(0), self.driver_word(event).unwrap_or(0))
    }

    /// Maps the areas again, after the memory table changed or SET_VRING_ADDR moved them.
    pub fn remap(&mut self, memory: &GuestMemory, addrs: RingAddrs) -> Result<(), RingFault> {
        self.areas = Areas::map(memory, addrs, self.size).ok_or(RingFault::OutsideMemory)?;
        Ok(())
    }

    /// Marks writes there from now on, or nowhere.
    pub(super) fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.log = log;
    }

    /// `len` bytes of the used ring were written.
    #[inline]
    fn mark_used(&self, at: usize, len: usize) {
        if let Some(log) = &self.log {
            log.mark(self.areas.used_guest.wrapping_add(at as u64), len);
        }
    }

    /// Takes over features that were negotiated while the ring runs.
    pub const fn set_features(&mut self, features: RingFeatures) {
        self.features = features;
    }

    /// Takes the next chain: the index of its first descriptor.
    #[inline]
    pub fn take(&mut self) -> Result<Option<u16>, RingFault> {
        if let Some(head) = self.retry.pop_front() {
            return Ok(Some(head));
        }
        if self.next_avail == self.avail_idx && !self.look()? {
            return Ok(None);
        }
        let slot = usize::from(self.next_avail & (self.size - 1));
        let head = self.driver_word(4 + 2 * slot).ok_or(RingFault::OutsideMemory)?;
        if head >= self.size {
            return Err(RingFault::IndexOutOfRange);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        if let Some(log) = &mut self.inflight {
            log.take(head);
        }
        Ok(Some(head))
    }

    /// The chain at `head`, if it is one buffer, as nearly all are: the quick way past
    /// [`Self::walk`].
    #[inline]
    pub fn single(&self, head: u16) -> Result<Option<Buffer>, RingFault> {
        let desc = self.descriptor(head)?;
        let single = desc.flags & (DESC_F_NEXT | DESC_F_INDIRECT) == 0;
        single.then(|| desc.buffer()).transpose()
    }

    /// Calls `visit` for every buffer of the chain at `head`, in order. Bounded by the queue size
    /// and [`CHAIN_MAX`].
    #[inline]
    pub fn walk(
        &self,
        memory: &GuestMemory,
        head: u16,
        mut visit: impl FnMut(Buffer) -> Result<(), RingFault>,
    ) -> Result<(), RingFault> {
        let mut index = head;
        for _ in 0..self.size.min(CHAIN_MAX) {
            if index >= self.size {
                return Err(RingFault::IndexOutOfRange);
            }
            let desc = self.descriptor(index)?;
            if desc.flags & DESC_F_INDIRECT != 0 {
                if !self.features.indirect || desc.flags & DESC_F_NEXT != 0 {
                    return Err(RingFault::IndirectMisplaced);
                }
                return walk_indirect(memory, &desc, visit);
            }
            visit(desc.buffer()?)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = desc.next;
        }
        Err(RingFault::ChainTooLong)
    }

    /// Completes the chain at `head` with `written` bytes; the driver sees it at [`Self::publish`].
    #[inline]
    pub fn complete(&mut self, head: u16, written: u32) -> Result<(), RingFault> {
        let slot = usize::from(self.next_used & (self.size - 1));
        let element = [u32::from(head).to_le(), written.to_le()];
        let slice = self.areas.used.slice(4 + 8 * slot, 8).ok_or(RingFault::OutsideMemory)?;
        slice.get_ref::<[u32; 2]>(0).map_err(|_| RingFault::OutsideMemory)?.store(element);
        self.mark_used(4 + 8 * slot, 8);
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(log) = &mut self.inflight {
            log.complete(head);
        }
        Ok(())
    }

    /// Shows the driver everything completed so far, without deciding whether to signal.
    #[inline]
    pub fn publish(&mut self) {
        if self.published_used == self.next_used {
            return;
        }
        if let Some(idx) = self.areas.used.u16_at(2) {
            // Release: the elements are there before the index that covers them.
            idx.store(self.next_used.to_le(), Ordering::Release);
            self.mark_used(2, 2);
        }
        self.published_used = self.next_used;
        if let Some(log) = &mut self.inflight {
            log.publish(self.published_used);
        }
    }

    /// Whether the driver wants a signal about the completions published since this was last asked.
    #[must_use]
    pub fn wants_signal(&mut self) -> bool {
        let new = self.published_used;
        if self.signal_used == Some(new) {
            return false;
        }
        // Our index is published before we read the index that the driver waits for; the driver
        // does the reverse.
        fence(Ordering::SeqCst);
        let before = self.signal_used.replace(new);
        if !self.features.event_idx {
            return self.driver_word(0).is_some_and(|flags| flags & AVAIL_F_NO_INTERRUPT == 0);
        }
        match (before, self.driver_word(self.event_at())) {
            (Some(old), Some(event)) => crosses(event, new, old),
            _ => true,
        }
    }

    /// Asks the driver to kick when it offers more, then looks again: `true` means it just did, and
    /// there will be no kick for that.
    pub fn enable_kicks(&mut self) -> Result<bool, RingFault> {
        if self.features.event_idx {
            self.set_device_word(4 + 8 * usize::from(self.size), self.next_avail);
        } else {
            self.set_device_word(0, 0);
        }
        // Our wish is out before we look; the driver offers, then reads our wish.
        fence(Ordering::SeqCst);
        self.look()
    }

    /// Asks the driver not to kick. A kick or two may still come.
    pub fn disable_kicks(&mut self) {
        // With EVENT_IDX the index we last asked for stays behind: that is enough.
        if !self.features.event_idx {
            self.set_device_word(0, USED_F_NO_NOTIFY);
        }
    }

    /// Forgets chains that were taken and not completed, when a driver stops the ring in good
    /// order.
    pub fn abandon(&mut self) {
        if let Some(log) = &mut self.inflight {
            log.clear();
        }
    }

    #[inline]
    fn descriptor(&self, index: u16) -> Result<Descriptor, RingFault> {
        let at = DESC_LEN * usize::from(index);
        let slice = self.areas.desc.slice(at, DESC_LEN).ok_or(RingFault::OutsideMemory)?;
        let raw = slice.get_ref::<[u64; 2]>(0).map_err(|_| RingFault::OutsideMemory)?.load();
        Ok(Descriptor::new(raw))
    }

    /// Reads `avail.idx`; whether something is on offer.
    #[inline]
    fn look(&mut self) -> Result<bool, RingFault> {
        let idx = self.areas.avail.u16_at(2).ok_or(RingFault::OutsideMemory)?;
        // Acquire: the entries are read after the index that covers them.
        let idx = u16::from_le(idx.load(Ordering::Acquire));
        // The driver can only offer again the buffers that it was shown back.
        let offered = idx.wrapping_sub(self.published_used);
        let taken = self.next_avail.wrapping_sub(self.published_used);
        if offered > self.size || offered < taken {
            return Err(RingFault::AvailJump);
        }
        self.avail_idx = idx;
        self.offered_max = self.offered_max.max(offered);
        Ok(idx != self.next_avail)
    }

    const fn event_at(&self) -> usize {
        4 + 2 * self.size as usize
    }

    #[inline]
    fn driver_word(&self, at: usize) -> Option<u16> {
        self.areas.avail.u16_at(at).map(|word| u16::from_le(word.load(Ordering::Relaxed)))
    }

    fn set_device_word(&self, at: usize, value: u16) {
        if let Some(word) = self.areas.used.u16_at(at) {
            word.store(value.to_le(), Ordering::Relaxed);
            self.mark_used(at, 2);
        }
    }
}

/// One entry of a descriptor table, copied.
struct Descriptor {
    guest: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    #[inline]
    const fn new(raw: [u64; 2]) -> Self {
        let [a, b, c, d, e, f, g, h] = raw[1].to_ne_bytes();
        Self {
            guest: u64::from_le(raw[0]),
            len: u32::from_le_bytes([a, b, c, d]),
            flags: u16::from_le_bytes([e, f]),
            next: u16::from_le_bytes([g, h]),
        }
    }

    #[inline]
    const fn buffer(&self) -> Result<Buffer, RingFault> {
        if self.len == 0 {
            return Err(RingFault::EmptyBuffer);
        }
        let writable = self.flags & DESC_F_WRITE != 0;
        Ok(Buffer { guest: self.guest, len: self.len, writable })
    }
}

/// Walks an indirect table, which is itself in guest memory.
fn walk_indirect(
    memory: &GuestMemory,
    table: &Descriptor,
    mut visit: impl FnMut(Buffer) -> Result<(), RingFault>,
) -> Result<(), RingFault> {
    let entries = table.len / 16;
    if !table.len.is_multiple_of(16) || entries == 0 || entries > u32::from(CHAIN_MAX) {
        return Err(RingFault::IndirectLength);
    }
    let mut index = 0;
    for _ in 0..entries {
        let mut raw = [0; DESC_LEN];
        let at = table.guest.checked_add(16 * u64::from(index)).ok_or(RingFault::OutsideMemory)?;
        memory.read(at, &mut raw).ok_or(RingFault::OutsideMemory)?;
        let word = |i: usize| u64::from_ne_bytes(raw[i..i + 8].try_into().expect("eight bytes"));
        let desc = Descriptor::new([word(0), word(8)]);
        if desc.flags & DESC_F_INDIRECT != 0 {
            return Err(RingFault::IndirectMisplaced);
        }
        visit(desc.buffer()?)?;
        if desc.flags & DESC_F_NEXT == 0 {
            return Ok(());
        }
        if u32::from(desc.next) >= entries {
            return Err(RingFault::IndexOutOfRange);
        }
        index = desc.next;
    }
    Err(RingFault::ChainTooLong)
}

/// Whether going from `old` to `new` passed `event` (virtio 1.2 section 2.7.10).
const fn crosses(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
