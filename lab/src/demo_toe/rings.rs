//! A driver's side of two rings of a socket device, one each way (virtio 1.2 section 2.7), and the
//! memory that it shares with the device. The device runs in another process, so there is a full
//! fence between showing it something and reading its wishes, and the other way round.

use std::fs::File;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use crate::front_end::AT_GUEST;

/// Descriptors of a ring.
pub(super) const SIZE: u16 = 256;
/// Bytes set aside for one.
pub(super) const AREA: usize = 0x4000;
/// Where the available and the used part of a ring are, from its beginning on.
pub(super) const AVAILABLE: usize = 16 * SIZE as usize;
pub(super) const USED: usize = (AVAILABLE + 6 + 2 * SIZE as usize).next_multiple_of(4);
const _: () = assert!(USED + 6 + 8 * SIZE as usize <= AREA);

/// VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Memory that both see.
#[derive(Debug)]
pub(super) struct Memory(MmapRegion);

impl Memory {
    pub(super) fn map(file: &File) -> Result<Self> {
        let len = usize::try_from(file.metadata()?.len())?;
        let map = FileOffset::new(file.try_clone()?, 0);
        Ok(Self(MmapRegion::from_file(map, len).context("mapping a driver's memory")?))
    }

    pub(super) fn all(&self) -> VolatileSlice<'_> {
        self.0.as_volatile_slice()
    }

    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        self.all().write_slice(bytes, at).expect("inside");
    }

    pub(super) fn read(&self, at: usize, bytes: &mut [u8]) {
        self.all().read_slice(bytes, at).expect("inside");
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le(self.all().load(at, Ordering::Acquire).expect("inside"))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le(self.all().load(at, Ordering::Relaxed).expect("inside"))
    }

    fn set_u16(&self, at: usize, value: u16) {
        self.all().store(value.to_le(), at, Ordering::Release).expect("inside");
    }
}

/// One ring.
#[derive(Debug)]
pub(super) struct Ring {
    at: usize,
    next_descriptor: u16,
    /// Chains that were offered, those that the device knows of, and those that it has used.
    offered: u16,
    shown: u16,
    used: u16,
}

impl Ring {
    /// In memory that is zeros.
    pub(super) const fn new(at: usize) -> Self {
        Self { at, next_descriptor: 0, offered: 0, shown: 0, used: 0 }
    }

    /// Chains that the device has.
    pub(super) const fn pending(&self) -> u16 {
        self.offered.wrapping_sub(self.used)
    }

    /// The number of the chain that is offered next.
    pub(super) const fn next(&self) -> u16 {
        self.offered
    }

    /// Offers a chain of buffers, each with its place in the memory and its bytes. The device is
    /// not shown it yet.
    pub(super) fn offer(&mut self, memory: &Memory, buffers: &[(usize, usize)], writes: bool) {
        let head = self.next_descriptor;
        for (index, &(place, len)) in buffers.iter().enumerate() {
            let at = self.at + 16 * usize::from(self.next_descriptor);
            self.next_descriptor = (self.next_descriptor + 1) % SIZE;
            let is_last = index + 1 == buffers.len();
            let flags = if is_last { 0 } else { NEXT } | if writes { WRITE } else { 0 };
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&(AT_GUEST + place as u64).to_le_bytes());
            bytes[8..12].copy_from_slice(&u32::try_from(len).expect("small").to_le_bytes());
            bytes[12..14].copy_from_slice(&flags.to_le_bytes());
            bytes[14..].copy_from_slice(&self.next_descriptor.to_le_bytes());
            memory.write(at, &bytes);
        }
        let slot = usize::from(self.offered % SIZE);
        memory.set_u16(self.at + AVAILABLE + 4 + 2 * slot, head);
        self.offered = self.offered.wrapping_add(1);
    }

    /// Shows the device the new buffers. Returns whether it wants a kick.
    pub(super) fn show(&mut self, memory: &Memory) -> bool {
        if self.offered == self.shown {
            return false;
        }
        memory.set_u16(self.at + AVAILABLE + 2, self.offered);
        fence(Ordering::SeqCst);
        let event = memory.u16(self.at + USED + 4 + 8 * usize::from(SIZE));
        let (old, new) = (std::mem::replace(&mut self.shown, self.offered), self.offered);
        is_passed(event, old, new)
    }

    /// The next chain that the device has used: how many bytes it has written.
    pub(super) fn poll(&mut self, memory: &Memory) -> Option<usize> {
        if memory.u16(self.at + USED + 2) == self.used {
            return None;
        }
        let at = self.at + USED + 4 + 8 * usize::from(self.used % SIZE);
        self.used = self.used.wrapping_add(1);
        Some(memory.u32(at + 4) as usize)
    }

    /// Asks for a notification of the next used chain. `false`: there is one already.
    pub(super) fn ask(&self, memory: &Memory) -> bool {
        memory.set_u16(self.at + AVAILABLE + 4 + 2 * usize::from(SIZE), self.used);
        fence(Ordering::SeqCst);
        memory.u16(self.at + USED + 2) == self.used
    }
}

/// Whether an index that goes from `old` to `new` passes `event` (virtio 1.2 section 2.7.10).
const fn is_passed(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::front_end;

    #[test]
    fn an_event_is_passed_by_the_step_that_goes_beyond_it_and_by_no_other() {
        assert!(is_passed(7, 7, 8) && is_passed(7, 3, 9) && is_passed(u16::MAX, u16::MAX, 2));
        assert!(!is_passed(7, 3, 7) && !is_passed(7, 8, 12) && !is_passed(u16::MAX, 0, 3));
    }

    #[test]
    fn chains_are_shown_at_once_and_used_in_turn() {
        let file = front_end::memory(AREA as u64).expect("memory");
        let (memory, mut ring) = (Memory::map(&file).expect("mapped"), Ring::new(0));
        ring.offer(&memory, &[(0x100, 44), (0x200, 7)], false);
        ring.offer(&memory, &[(0x300, 44)], false);
        assert_eq!(memory.u16(AVAILABLE + 2), 0, "not yet");
        assert!(ring.show(&memory) && !ring.show(&memory));
        assert_eq!((memory.u16(AVAILABLE + 2), memory.u16(AVAILABLE + 6)), (2, 2));
        assert_eq!((memory.u32(8), memory.u16(12), memory.u16(14)), (44, NEXT, 1));
        assert_eq!((memory.u32(16 + 8), memory.u16(16 + 12)), (7, 0));
        assert!(ring.poll(&memory).is_none() && ring.ask(&memory) && ring.pending() == 2);
        memory.write(USED + 4, &[0, 0, 0, 0, 51, 0, 0, 0]);
        memory.set_u16(USED + 2, 1);
        assert!(!ring.ask(&memory));
        assert_eq!((ring.poll(&memory), ring.poll(&memory), ring.pending()), (Some(51), None, 1));
    }
}
