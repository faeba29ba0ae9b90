//! A guest: its memory, and the driver's side of a split virtqueue (virtio 1.2 section 2.7).

use std::fs::File;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

/// Where guest memory begins, for the guest. Far from zero, so that a file offset cannot pass.
pub(crate) const GUEST_BASE: u64 = 0x4000_0000;
/// Where it begins for the front-end.
pub(crate) const USER_BASE: u64 = 0x7f12_3400_0000;
/// A descriptor flag: another one follows.
pub(crate) const NEXT: u16 = 1;
/// A descriptor flag: the device writes.
pub(crate) const WRITE: u16 = 2;
/// A descriptor flag: the buffer is a table.
pub(crate) const INDIRECT: u16 = 4;

/// Guest memory in a memfd.
#[derive(Debug)]
pub(crate) struct Ram {
    file: File,
    map: MmapRegion,
}

impl Ram {
    /// As QEMU has it: nobody can shrink it.
    pub(crate) fn new(len: usize) -> Rc<Self> {
        let ram = Self::unsealed(len);
        fcntl_add_seals(&ram.file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        ram
    }

    /// Likewise, of a size that its owner may change.
    pub(crate) fn unsealed(len: usize) -> Rc<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        Self::of(File::from(memfd_create("ram", flags).unwrap()), len)
    }

    /// In a file of whatever kind.
    pub(crate) fn of(file: File, len: usize) -> Rc<Self> {
        ftruncate(&file, len as u64).unwrap();
        let map = FileOffset::new(file.try_clone().unwrap(), 0);
        Rc::new(Self { file, map: MmapRegion::from_file(map, len).unwrap() })
    }

    /// Takes all of it away. An access then gets SIGBUS, the test's too.
    pub(crate) fn cut(&self) {
        self.cut_from(0);
    }

    /// Takes what lies from there on away, counted from its beginning.
    pub(crate) fn cut_from(&self, offset: u64) {
        ftruncate(&self.file, offset).unwrap();
    }

    pub(crate) fn fd(&self) -> OwnedFd {
        self.file.try_clone().unwrap().into()
    }

    pub(crate) fn len(&self) -> usize {
        self.map.size()
    }

    pub(crate) fn write(&self, guest: u64, bytes: &[u8]) {
        let at = usize::try_from(guest - GUEST_BASE).unwrap();
        self.map.as_volatile_slice().write_slice(bytes, at).unwrap();
    }

    pub(crate) fn read(&self, guest: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let at = usize::try_from(guest - GUEST_BASE).unwrap();
        self.map.as_volatile_slice().read_slice(&mut bytes, at).unwrap();
        bytes
    }

    pub(crate) fn all(&self) -> Vec<u8> {
        self.read(GUEST_BASE, self.len())
    }

    pub(crate) fn u16(&self, guest: u64) -> u16 {
        u16::from_le_bytes(self.read(guest, 2).try_into().unwrap())
    }

    fn u32(&self, guest: u64) -> u32 {
        u32::from_le_bytes(self.read(guest, 4).try_into().unwrap())
    }

    pub(crate) fn set_u16(&self, guest: u64, value: u16) {
        self.write(guest, &value.to_le_bytes());
    }
}

/// One raw descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Desc {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Desc {
    pub(crate) fn bytes(self) -> Vec<u8> {
        let mut bytes = self.addr.to_le_bytes().to_vec();
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.next.to_le_bytes());
        bytes
    }
}

/// The driver's side of one queue.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) ram: Rc<Ram>,
    pub(crate) size: u16,
    /// Guest addresses of the three areas.
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
    /// The next descriptor to fill; they are used in turn.
    next_desc: u16,
    pub(crate) avail_idx: u16,
    pub(crate) used_idx: u16,
}

impl Driver {
    /// A fresh ring at `at`, which is 4096-aligned; a ring takes less than [`Self::AREA`] bytes.
    pub(crate) fn new(ram: &Rc<Ram>, at: u64, size: u16) -> Self {
        let desc = at;
        let avail = desc + 16 * u64::from(size);
        let used = (avail + 6 + 2 * u64::from(size)).next_multiple_of(4);
        assert!(used + 6 + 8 * u64::from(size) <= at + Self::AREA);
        ram.write(at, &vec![0; usize::try_from(Self::AREA).unwrap()]);
        let ram = Rc::clone(ram);
        Self { ram, size, desc, avail, used, next_desc: 0, avail_idx: 0, used_idx: 0 }
    }

    /// Bytes set aside for one ring.
    pub(crate) const AREA: u64 = 0x4000;

    /// As after many laps: both indices at `idx`.
    pub(crate) fn start_at(&mut self, idx: u16) {
        self.avail_idx = idx;
        self.used_idx = idx;
        self.set_avail_idx(idx);
        self.ram.set_u16(self.used + 2, idx);
    }

    pub(crate) fn set_desc(&self, index: u16, desc: Desc) {
        self.ram.write(self.desc + 16 * u64::from(index), &desc.bytes());
    }

    /// Puts `head` into the next slot of the available ring, and shows it.
    pub(crate) fn offer_head(&mut self, head: u16) {
        let slot = u64::from(self.avail_idx % self.size);
        self.ram.set_u16(self.avail + 4 + 2 * slot, head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        self.set_avail_idx(self.avail_idx);
    }

    pub(crate) fn set_avail_idx(&self, idx: u16) {
        self.ram.set_u16(self.avail + 2, idx);
    }

    /// Offers a chain of buffers (guest address, bytes); returns its head.
    pub(crate) fn offer(&mut self, buffers: &[(u64, u32)], flags: u16) -> u16 {
        let head = self.next_desc;
        for (i, &(addr, len)) in buffers.iter().enumerate() {
            let index = self.next_desc;
            self.next_desc = (index + 1) % self.size;
            let more = i + 1 < buffers.len();
            let flags = flags | if more { NEXT } else { 0 };
            self.set_desc(index, Desc { addr, len, flags, next: self.next_desc });
        }
        self.offer_head(head);
        head
    }

    /// Offers a chain through an indirect table at `table`.
    pub(crate) fn offer_indirect(&mut self, table: u64, buffers: &[(u64, u32)], flags: u16) -> u16 {
        for (i, &(addr, len)) in (0_u16..).zip(buffers) {
            let more = usize::from(i) + 1 < buffers.len();
            let flags = flags | if more { NEXT } else { 0 };
            let desc = Desc { addr, len, flags, next: i + 1 };
            self.ram.write(table + 16 * u64::from(i), &desc.bytes());
        }
        let len = u32::try_from(16 * buffers.len()).unwrap();
        self.offer(&[(table, len)], INDIRECT)
    }

    /// Buffers that the device has completed since the last call: head and bytes written.
    pub(crate) fn used(&mut self) -> Vec<(u32, u32)> {
        let idx = self.ram.u16(self.used + 2);
        let mut found = Vec::new();
        while self.used_idx != idx {
            let at = self.used + 4 + 8 * u64::from(self.used_idx % self.size);
            found.push((self.ram.u32(at), self.ram.u32(at + 4)));
            self.used_idx = self.used_idx.wrapping_add(1);
        }
        found
    }

    /// With EVENT_IDX: wants a signal once the device has completed more than `idx` chains.
    pub(crate) fn set_used_event(&self, idx: u16) {
        self.ram.set_u16(self.avail + 4 + 2 * u64::from(self.size), idx);
    }

    /// With EVENT_IDX: the device wants a kick once this entry is offered.
    pub(crate) fn avail_event(&self) -> u16 {
        self.ram.u16(self.used + 4 + 8 * u64::from(self.size))
    }

    /// Without EVENT_IDX: the device wants no kicks.
    pub(crate) fn kicks_are_off(&self) -> bool {
        self.ram.u16(self.used) & 1 != 0
    }

    /// Without EVENT_IDX: wants no signals.
    pub(crate) fn set_no_signal(&self, off: bool) {
        self.ram.set_u16(self.avail, u16::from(off));
    }
}
