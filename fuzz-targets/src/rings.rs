//! Descriptor chains of a hostile driver: `daemon::vhost`'s rings and queues over guest memory that
//! the input writes, with and without an in-flight log, across restarts.
//!
//! Input: a shape, then operations. The driver's own steps are honest as far as the used ring can
//! be judged (`Driver::honest`): which chains it offered, in which order. Once it has rewritten the
//! ring itself, only the conditions of any ring are checked.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

use crate::noise;
use arbitrary::Unstructured;
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::vhost::guest_mem::GuestMemory;
use nightporterd::vhost::inflight::InflightLog;
use nightporterd::vhost::queue::{Layout, Polled, PushError, Queue};
use nightporterd::vhost::ring::{CHAIN_MAX, Ring, RingAddrs, RingFeatures};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::{VhostUserInflight, VhostUserMemoryRegion};

/// Guest and user address, place in the file and length of every region: the second follows on the
/// first, the last ends where addresses do. Between them in the file are bytes of nobody.
const REGIONS: [(u64, u64, u64, u64); 4] = [
    (0x4000_0000, 0x7f00_0000_0000, 0x1000, 0x8000),
    (0x4000_8000, 0x7f00_1000_0000, 0xa000, 0x2000),
    (0x1_0000_0000, 0x7f00_2000_0000, 0xd800, 0x2800),
    (0xffff_ffff_ffff_efff, 0x7f00_3000_0000, 0x11000, 0x1000),
];
const FILE_LEN: usize = 0x13000;
/// The bytes between the regions, before and after.
const NOBODYS: u8 = 0xa7;
/// Places of the ring's three areas in the first region, and the end of the last.
const DESC: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x1800;
const RING_END: u64 = 0x2800;
const DESC_LEN: u64 = 16;
/// Largest queue here, as a power of two.
const SIZE_LOG_MAX: u32 = 8;
/// Longest frame given to the driver: more than any chain of this memory can hold.
const FRAME_MAX: usize = 70_000;
const OPS_MAX: usize = 300;

/// Judges one input.
pub fn run(data: &[u8]) {
    thread_local! {
        static MEMORY: RefCell<Memory> = RefCell::new(Memory::new());
    }
    MEMORY.with_borrow_mut(|memory| {
        let mut u = Unstructured::new(data);
        let Ok(mut world) = World::new(memory, &mut u) else { return };
        for _ in 0..OPS_MAX {
            if u.is_empty() || world.step(&mut u).is_err() {
                break;
            }
            world.check();
        }
        world.memory.expect_nobodys_bytes();
    });
}

/// Queues of several sizes whose driver offers a little of everything.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (1..6).map(|n| noise(n, 400 * n as usize)).collect()
}

/// The regions of a guest in one file, which the driver maps as a whole.
struct Memory {
    guest: GuestMemory,
    whole: GuestMemory,
}

impl Memory {
    fn new() -> Self {
        let file = memfd(FILE_LEN);
        let region = |(guest, user, at, len)| {
            let file = file.try_clone().expect("a descriptor");
            (VhostUserMemoryRegion::new(guest, len, user, at), file)
        };
        let guest = GuestMemory::new(REGIONS.map(region)).expect("four regions");
        let whole = GuestMemory::new([region((0, 0, 0, FILE_LEN as u64))]).expect("the file");
        Self { guest, whole }
    }

    fn clear(&self) {
        self.whole.write(0, &[NOBODYS; FILE_LEN]).expect("inside");
        for (guest, _, _, len) in REGIONS {
            let zeros = vec![0; usize::try_from(len).expect("small")];
            self.guest.write(guest, &zeros).expect("inside");
        }
    }

    /// Nothing was written outside the regions, however near the mappings are.
    fn expect_nobodys_bytes(&self) {
        let mut all = vec![0; FILE_LEN];
        self.whole.read(0, &mut all).expect("inside");
        for (_, _, at, len) in REGIONS {
            let region =
                usize::try_from(at).expect("small")..usize::try_from(at + len).expect("small");
            all[region].fill(NOBODYS);
        }
        assert!(all.iter().all(|b| *b == NOBODYS), "a byte outside guest memory was written");
    }

    /// Writes the part inside the regions; a driver cannot write elsewhere either.
    fn put(&self, guest: u64, bytes: &[u8]) {
        let _ = self.guest.write(guest, bytes);
    }

    fn u16(&self, guest: u64) -> u16 {
        let mut bytes = [0; 2];
        self.guest.read(guest, &mut bytes).expect("the ring is inside");
        u16::from_le_bytes(bytes)
    }

    fn u32(&self, guest: u64) -> u32 {
        let mut bytes = [0; 4];
        self.guest.read(guest, &mut bytes).expect("the ring is inside");
        u32::from_le_bytes(bytes)
    }
}

fn memfd(len: usize) -> OwnedFd {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&file, len as u64).expect("a length");
    file
}

/// The driver's knowledge of its ring.
struct Driver {
    size: u16,
    avail_idx: u16,
    /// Heads it has offered, from the start of this ring on.
    offered: Vec<u16>,
    /// Bytes that each completed frame to the guest has, with its header.
    given: u64,
    /// The ring's areas hold this driver's own writes, as far as it may write.
    honest: bool,
    /// A descriptor somewhere may name the ring itself as a buffer, from now on.
    spoiled: bool,
    /// It offered a chain again before that was shown back, since the in-flight log was empty.
    twice: bool,
    /// Used elements written since the start of this ring, shown or not: a restart may take some
    /// back, but what they were written over is gone.
    written: usize,
}

impl Driver {
    fn new(size: u16, avail_idx: u16) -> Self {
        let (offered, given, honest) = (Vec::new(), 0, true);
        Self { size, avail_idx, offered, given, honest, spoiled: false, twice: false, written: 0 }
    }
}

struct World<'m> {
    memory: &'m Memory,
    driver: Driver,
    to_guest: bool,
    layout: Layout,
    features: RingFeatures,
    log: Option<InflightLog>,
    queue: Option<Queue>,
    /// The used index when the ring started, and the completed part of `offered` then.
    used_from: u16,
    frame: Vec<u8>,
}

impl<'m> World<'m> {
    fn new(memory: &'m Memory, u: &mut Unstructured<'_>) -> arbitrary::Result<Self> {
        memory.clear();
        let size = 1 << u.int_in_range(0..=SIZE_LOG_MAX)?;
        let features = RingFeatures { event_idx: u.arbitrary()?, indirect: u.ratio(3, 4)? };
        let merge = u.arbitrary()?;
        let layout = Layout { hdr_len: if merge || u.arbitrary()? { 12 } else { 10 }, merge };
        let log = if u.arbitrary()? { Some(inflight_log(size)) } else { None };
        let start = u.arbitrary()?;
        let driver = Driver::new(size, start);
        let to_guest = u.arbitrary()?;
        let (queue, frame) = (None, vec![0; FRAME_MAX]);
        let mut world = Self {
            memory,
            driver,
            to_guest,
            layout,
            features,
            log,
            queue,
            used_from: start,
            frame,
        };
        world.set_word(AVAIL + 2, start);
        world.set_word(USED + 2, start);
        world.start();
        Ok(world)
    }

    fn base(&self) -> u64 {
        REGIONS[0].0
    }

    fn set_word(&self, at: u64, value: u16) {
        self.memory.put(self.base() + at, &value.to_le_bytes());
    }

    fn start(&mut self) {
        let user = REGIONS[0].1;
        let addrs = RingAddrs { desc: user + DESC, avail: user + AVAIL, used: user + USED };
        let log = self.log.as_ref().and_then(|log| log.queue(0, self.driver.size));
        let ring = Ring::start(&self.memory.guest, addrs, self.driver.size, self.features, log);
        self.queue = Some(Queue::new(ring.expect("its areas are inside")));
    }

    /// One step of the driver or of the device.
    fn step(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        match u.int_in_range(0..=19)? {
            0..=3 => self.writes_descriptor(u)?,
            4 => self.writes_table(u)?,
            5..=8 => self.offers(u)?,
            9 => self.lies(u)?,
            10 => self.set_word(AVAIL, u.arbitrary()?),
            11 => self.set_word(AVAIL + 4 + 2 * u64::from(self.driver.size), u.arbitrary()?),
            12 => self.restarts(u)?,
            13 => self.renegotiates(u)?,
            14 => self.looks_around(),
            15 => self.publishes(),
            _ if self.to_guest => self.pushes(u)?,
            _ => self.polls(u)?,
        }
        Ok(())
    }

    /// Where a buffer may be; `honest` ones never touch the ring.
    fn address(&mut self, u: &mut Unstructured<'_>, len: u32) -> arbitrary::Result<u64> {
        let (guest, _, _, region_len) = *u.choose(&REGIONS)?;
        let place = match u.int_in_range(0..=9)? {
            0 => u.arbitrary()?,
            1 => guest.wrapping_add_signed(u.int_in_range(-20..=20)?),
            2 => (guest + region_len).wrapping_add_signed(u.int_in_range(-2000..=20)?),
            _ => guest.wrapping_add(u.int_in_range(0..=region_len)?),
        };
        let (from, to) = (self.base(), self.base() + RING_END);
        let end = u128::from(place) + u128::from(len);
        if place < to && end > u128::from(from) {
            if u.ratio(15, 16)? {
                return Ok(place | RING_END); // behind it, wherever that is
            }
            (self.driver.honest, self.driver.spoiled) = (false, true);
        }
        Ok(place)
    }

    fn descriptor(&mut self, u: &mut Unstructured<'_>, n: u16) -> arbitrary::Result<[u8; 16]> {
        let len = match u.int_in_range(0..=9)? {
            0 => u.arbitrary()?,
            1 => u.int_in_range(0..=13)?,
            2 => 16 * u.int_in_range(0..=9)?,
            _ => u.int_in_range(1..=2500)?,
        };
        let usual: u16 = if self.to_guest { 2 } else { 0 };
        let flags = match u.int_in_range(0..=9)? {
            0 => u.arbitrary()?,
            1 => 4, // indirect
            2..=4 => usual | 1,
            _ => usual,
        };
        let next = if u.ratio(15, 16)? { u.int_in_range(0..=n - 1)? } else { u.arbitrary()? };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address(u, len)?.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        Ok(bytes)
    }

    fn writes_descriptor(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let size = self.driver.size;
        let index = u.int_in_range(0..=size - 1)?;
        let descriptor = self.descriptor(u, size)?;
        self.memory.put(self.base() + DESC + DESC_LEN * u64::from(index), &descriptor);
        Ok(())
    }

    /// An indirect table, and a descriptor that names it.
    fn writes_table(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let entries = u.int_in_range(1..=8)?;
        let at = self.base() + RING_END + u.int_in_range(0..=0x7000)?;
        for index in 0..entries {
            let descriptor = self.descriptor(u, entries)?;
            self.memory.put(at + DESC_LEN * u64::from(index), &descriptor);
        }
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&at.to_le_bytes());
        bytes[8..12].copy_from_slice(&(u32::from(entries) * 16).to_le_bytes());
        bytes[12] = 4;
        let index = u.int_in_range(0..=self.driver.size - 1)?;
        self.memory.put(self.base() + DESC + DESC_LEN * u64::from(index), &bytes);
        Ok(())
    }

    fn offers(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let Driver { size, .. } = self.driver;
        for _ in 0..u.int_in_range(1..=4)? {
            let head =
                if u.ratio(31, 32)? { u.int_in_range(0..=size - 1)? } else { u.arbitrary()? };
            let slot = u64::from(self.driver.avail_idx % size);
            self.set_word(AVAIL + 4 + 2 * slot, head);
            self.driver.avail_idx = self.driver.avail_idx.wrapping_add(1);
            self.driver.offered.push(head);
            // No more than the ring has places, as far as the driver was shown.
            let shown = self.memory.u16(self.base() + USED + 2);
            let out = self.driver.avail_idx.wrapping_sub(shown);
            self.driver.honest &= out <= size;
            let out = self.driver.offered.iter().rev().take(out.into()).filter(|&&h| h == head);
            self.driver.twice |= out.count() > 1;
        }
        self.set_word(AVAIL + 2, self.driver.avail_idx);
        Ok(())
    }

    fn lies(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        self.driver.honest = false;
        let at = match u.int_in_range(0..=2)? {
            0 => AVAIL + 2,
            1 => USED + 2,
            _ => {
                self.driver.spoiled = true;
                u.int_in_range(0..=RING_END)?
            }
        };
        let value: u16 = u.arbitrary()?;
        self.set_word(at, if u.arbitrary()? { value } else { self.driver.avail_idx ^ value & 7 });
        Ok(())
    }

    /// The driver stops the ring, or the daemon dies; then it runs again.
    fn restarts(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let Some(mut queue) = self.queue.take() else { return Ok(()) };
        let in_order: bool = u.arbitrary()?;
        if in_order {
            queue.ring.publish();
            queue.ring.abandon();
        } else if self.log.is_some() {
            // The log has one place for each head: a driver that offers one twice loses order.
            self.driver.honest &= !self.driver.twice;
        }
        let base = queue.ring.base();
        drop(queue);
        self.start();
        let again = self.queue.as_ref().expect("it runs").ring.base();
        assert!(!in_order || !self.driver.honest || again == base, "the used index moved");
        Ok(())
    }

    fn renegotiates(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        self.features = RingFeatures { event_idx: u.arbitrary()?, indirect: u.ratio(3, 4)? };
        let merge = u.arbitrary()?;
        self.layout = Layout { hdr_len: if merge || u.arbitrary()? { 12 } else { 10 }, merge };
        if let Some(queue) = &mut self.queue {
            queue.ring.set_features(self.features);
        }
        Ok(())
    }

    /// Everything that only looks.
    fn looks_around(&mut self) {
        let Some(queue) = &mut self.queue else { return };
        let ring = &mut queue.ring;
        let _ = (ring.wants_signal(), ring.is_drained(), ring.driver_marks());
        ring.disable_kicks();
        if ring.enable_kicks().is_err() {
            self.fails();
        }
    }

    fn publishes(&mut self) {
        let Some(queue) = &mut self.queue else { return };
        queue.ring.publish();
        assert_eq!(queue.ring.unpublished(), 0);
        let base = queue.ring.base();
        assert!(!self.driver.honest || self.memory.u16(self.base() + USED + 2) == base);
    }

    /// The ring is out of use, as after any fault, until the driver starts it again.
    fn fails(&mut self) {
        self.queue = None;
        self.driver.offered.truncate(0);
        let used = self.memory.u16(self.base() + USED + 2);
        (self.used_from, self.driver.avail_idx) = (used, used);
        self.driver.honest = !self.driver.spoiled;
        (self.driver.twice, self.driver.written) = (false, 0);
        self.set_word(AVAIL + 2, used);
        if self.log.is_some() {
            self.log = Some(inflight_log(self.driver.size));
        }
        self.start();
    }

    fn polls(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let len = if u.arbitrary()? { FRAME_MAX } else { u.int_in_range(0..=3000)? };
        let before = queue.ring.base();
        let buf = &mut self.frame[..len];
        match queue.poll_frame(&self.memory.guest, self.layout.hdr_len, buf) {
            Ok(Polled::Empty) => assert_eq!(queue.ring.base(), before),
            Ok(polled) => {
                assert_eq!(queue.ring.base(), before.wrapping_add(1), "one chain, one completion");
                assert!(!matches!(polled, Polled::Frame(_, n) if n > len));
            }
            Err(_) => self.fails(),
        }
        Ok(())
    }

    fn pushes(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let len = if u.ratio(1, 8)? { FRAME_MAX } else { u.int_in_range(1..=5000)? };
        let room = if u.arbitrary()? {
            match queue.room(&self.memory.guest, self.layout, len) {
                Ok(room) => Some(room),
                Err(_) => {
                    self.fails();
                    return Ok(());
                }
            }
        } else {
            None
        };
        let before = queue.ring.base();
        let frame = &self.frame[..len];
        let (a, b) = frame.split_at(u.int_in_range(0..=len)?);
        let hdr = VirtioNetHdr::parse(&u.arbitrary()?);
        match queue.push_frame(&self.memory.guest, self.layout, &hdr, &[a, b]) {
            Ok(Ok(())) => {
                assert_ne!(queue.ring.base(), before, "a frame without a chain");
                self.driver.given = (self.layout.hdr_len + len) as u64;
                self.expect_written(before);
            }
            Ok(Err(why)) => {
                assert_eq!(queue.ring.base(), before, "completed for nothing");
                assert!(room.is_none_or(|room| room < len), "{why:?} with room for {room:?}");
                let out = self.driver.avail_idx.wrapping_sub(before);
                let never = !self.layout.merge || !self.driver.honest || out >= self.driver.size;
                assert!(why == PushError::Full || never, "dropped, and there may be room later");
            }
            Err(_) => self.fails(),
        }
        Ok(())
    }

    /// The used elements of the frame just given say as many bytes as it has.
    fn expect_written(&self, from: u16) {
        let queue = self.queue.as_ref().expect("it runs");
        if self.driver.honest {
            let chains = queue.ring.base().wrapping_sub(from);
            let bytes = |n| u64::from(self.used(from.wrapping_add(n)).1);
            let written: u64 = (0..chains).map(bytes).sum();
            assert_eq!(written, self.driver.given, "the used ring lies about {chains} chains");
        }
    }

    /// A used element: head and bytes written.
    fn used(&self, index: u16) -> (u32, u32) {
        let at = self.base() + USED + 4 + 8 * u64::from(index % self.driver.size);
        (self.memory.u32(at), self.memory.u32(at + 4))
    }

    /// Chains completed since the driver set the ring up: fewer than 65536.
    fn completed(&self) -> usize {
        let base = self.queue.as_ref().map_or(self.used_from, |q| q.ring.base());
        usize::from(base.wrapping_sub(self.used_from))
    }

    /// Between two steps.
    fn check(&mut self) {
        let completed = self.completed();
        self.driver.written = self.driver.written.max(completed);
        let Some(queue) = &self.queue else { return };
        assert!(queue.ring.unpublished() <= queue.ring.size(), "more completed than there are");
        if !self.driver.honest {
            return;
        }
        let published = self.memory.u16(self.base() + USED + 2);
        assert_eq!(queue.ring.base().wrapping_sub(published), queue.ring.unpublished());
        assert!(completed <= self.driver.offered.len(), "completed what nobody offered");
        let recent = self.driver.written.saturating_sub(usize::from(self.driver.size));
        for n in recent..completed {
            let index = self.used_from.wrapping_add(u16::try_from(n & 0xffff).expect("masked"));
            let (head, written) = self.used(index);
            assert_eq!(head, u32::from(self.driver.offered[n]), "completed out of order");
            assert!(self.to_guest || written == 0, "{written} bytes into a buffer to read");
        }
    }
}

fn inflight_log(size: u16) -> InflightLog {
    let (file, len) = InflightLog::create(1, size).expect("a memfd");
    let spec = VhostUserInflight::new(len, 0, 1, size);
    InflightLog::open(file, &spec).expect("its own size")
}

/// How one op fuzzer input could work longest: every operation a frame over the longest chain.
const _: () = assert!(OPS_MAX * CHAIN_MAX as usize <= 1 << 20);
