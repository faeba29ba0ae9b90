//! The log of written pages (LIFE-15): a front-end that copies all of a guest's memory, and then
//! the pages that are marked, has the same memory.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::vhost::features::bit;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use crate::driver::{GUEST_BASE, WRITE};
use crate::world::{
    BUFFERS, LINUX, NEED_REPLY, RAM_LEN, Req, World, config, mem_table, vring_addr, vring_state,
};

const PAGE: usize = 4096;
/// The byte of its first page.
#[expect(clippy::cast_possible_truncation)]
const FIRST: usize = GUEST_BASE as usize / PAGE / 8;
/// Bytes of a log for all addresses up to the end of a world's memory.
const LOG_LEN: usize = FIRST + RAM_LEN / PAGE / 8;

/// A log, as the front-end sees it.
struct Log {
    file: OwnedFd,
    map: MmapRegion,
}

impl Log {
    fn new(len: usize) -> Self {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("vhost-log", flags).unwrap();
        ftruncate(&file, len as u64).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let copy = File::from(file.try_clone().unwrap());
        let map = MmapRegion::from_file(FileOffset::new(copy, 0), len).unwrap();
        Self { file, map }
    }

    fn hand_over(&self, world: &mut World) {
        let spec = [self.map.size() as u64, 0].map(u64::to_ne_bytes).concat();
        world.say(Req::SET_LOG_BASE, &spec, &[self.file.as_fd()]);
    }

    /// Whether each page of guest memory is marked; the marks are taken away.
    fn take(&self) -> Vec<bool> {
        let slice = self.map.as_volatile_slice().subslice(FIRST, RAM_LEN / PAGE / 8).unwrap();
        let mut bytes = vec![0_u8; slice.len()];
        slice.copy_to(&mut bytes);
        slice.copy_from(&vec![0_u8; bytes.len()]);
        (0..8 * bytes.len()).map(|page| bytes[page / 8] & 1 << (page % 8) != 0).collect()
    }
}

/// A world whose front-end logs writes.
struct Logged {
    world: World,
    log: Log,
}

impl Logged {
    fn new(features: u64) -> Self {
        let mut world = World::running(features);
        let log = Log::new(LOG_LEN);
        log.hand_over(&mut world);
        let (code, answer, _) = world.front.reply().expect("QEMU waits for an answer");
        assert_eq!((code, answer), (Req::SET_LOG_BASE.into(), vec![0; 8]));
        world.say(Req::SET_FEATURES, &(features | bit::LOG_ALL).to_ne_bytes(), &[]);
        for index in 0..2 {
            let addr = vring_addr(index, [&world.rx, &world.tx][index as usize]);
            world.say(Req::SET_VRING_ADDR, &addr, &[]);
        }
        assert_eq!(world.events(), ["logs true"], "the rings run on");
        Self { world, log }
    }

    /// The device does something, and no vCPU runs: a copy of the memory from before, and then of
    /// the marked pages, is the memory.
    fn step<T>(&mut self, what: &str, act: impl FnOnce(&mut World) -> T) -> T {
        let mut copy = self.world.ram.all();
        let done = act(&mut self.world);
        let now = self.world.ram.all();
        let marks = self.log.take();
        for page in (0..marks.len()).filter(|page| marks[*page]) {
            let range = page * PAGE..(page + 1) * PAGE;
            copy[range.clone()].copy_from_slice(&now[range]);
        }
        assert!(copy == now, "{what}: a page was written and not marked");
        done
    }

    /// Frames of many shapes both ways.
    fn exchange(&mut self, round: u8) {
        let (hdr, at) = (VirtioNetHdr::default(), BUFFERS + 0x1_0000);
        self.world.rx.offer(&[(at + 100, 60), (at + 0x3ff0, 9000)], WRITE);
        for n in 0..6 {
            self.world.rx.offer(&[(at + 0x8000 + n * 0x2000, 3100)], WRITE);
        }
        for len in [60, 1514, 1514, 3000] {
            let frame = vec![round.wrapping_mul(7).wrapping_add(1); len];
            self.step("a frame", |world| world.port.push_to_guest(0, &hdr, &[&frame])).unwrap();
        }
        self.step("the used index", |world| world.port.flush_to_guest(0));
        self.step("kicks on", |world| world.port.enable_kicks_to_guest(0));
        for _ in 0..3 {
            let (buffer, len) = self.world.put_frame(BUFFERS, 12, &[round; 200]);
            self.world.tx.offer(&[(buffer, len)], 0);
        }
        assert_eq!(self.step("frames from it", World::poll_frames).len(), 3);
        self.step("kicks off", |world| world.port.disable_kicks_from_guest(0));
        self.step("kicks on again", |world| world.port.enable_kicks_from_guest(0));
        self.world.rx.used();
        self.world.tx.used();
    }
}

/// GET_VRING_BASE of a ring that waits until the worker has done its part; where it stood.
fn stop_ring(world: &mut World, index: u32) -> u32 {
    world.say(Req::GET_VRING_BASE, &vring_state(index, 0), &[]);
    assert!(world.front.reply().is_none(), "nothing is answered before");
    assert_eq!(world.events().last().map(String::as_str), Some("leaving"));
    world.port.handle_connection();
    let (code, answer, _) = world.front.reply().expect("an answer");
    assert_eq!(code, u32::from(Req::GET_VRING_BASE));
    u32::from_ne_bytes(answer[4..8].try_into().unwrap())
}

#[test]
fn life_15_all_pages_and_then_the_marked_ones_are_the_memory() {
    for features in [LINUX, LINUX & !bit::EVENT_IDX] {
        let mut it = Logged::new(features);
        for round in 0..20 {
            it.exchange(round);
        }
        // A frame that was completed and not shown yet is shown at the stop.
        it.world.offer_buffers(BUFFERS + 0x1_0000, 1, 2000);
        it.world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&[9; 60]]).unwrap();
        it.log.take();
        it.step("the stop", |world| stop_ring(world, 0));
        stop_ring(&mut it.world, 1);
    }
}

/// A page was written for which the log has no bit.
fn written_without_a_mark() -> World {
    let mut world = World::running(LINUX);
    Log::new(PAGE).hand_over(&mut world); // up to 128 MiB, and the memory begins at 1 GiB
    world.front.reply().expect("an answer");
    world.say(Req::SET_FEATURES, &(LINUX | bit::LOG_ALL).to_ne_bytes(), &[]);
    world.offer_buffers(BUFFERS, 1, 2000);
    world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&[9; 60]]).unwrap();
    world
}

/// The worker has ended the connections of the VM before it hears that its VMM may not go on.
#[test]
fn life_15_a_stop_beside_a_page_without_a_mark_ends_the_connection() {
    let mut world = written_without_a_mark();
    world.front.send(Req::GET_VRING_BASE.into(), 1 | NEED_REPLY, &vring_state(0, 0), &[]);
    world.port.handle_connection();
    world.port.handle_connection();
    let (_, answer, _) = world.front.reply().expect("a refusal");
    assert_eq!(answer, 1_u64.to_ne_bytes());
    assert!(world.front.is_hung_up());
}

#[test]
fn life_06_a_vm_whose_memory_was_taken_away_leaves_when_its_rings_are() {
    let mut it = Logged::new(LINUX);
    it.world.say(Req::SET_MEM_TABLE, &mem_table(&[]), &[]);
    assert!(it.world.link().is_none());
    stop_ring(&mut it.world, 0);
    stop_ring(&mut it.world, 1);
}

/// A driver whose VM moves uses each buffer once, whichever of the two hosts has completed it.
#[test]
fn life_06_each_chain_is_completed_once_by_the_source_or_by_the_target() {
    for features in [LINUX, LINUX & !bit::EVENT_IDX] {
        for taken in 0..20 {
            let mut it = Logged::new(features);
            let hdr = VirtioNetHdr::default();
            it.world.offer_buffers(BUFFERS + 0x1_0000, 20, 2000);
            let frames: Vec<u16> = (0..20)
                .map(|n| {
                    let at = BUFFERS + 0x400 * u64::from(n);
                    let (buffer, len) = it.world.put_frame(at + 0x100, 12, &[n; 100]);
                    it.world.tx.offer_indirect(at, &[(buffer, 12), (buffer + 12, len - 12)], 0)
                })
                .collect();
            // The source has taken some, and shown some of those, when the VM stops.
            let mut buf = [0; 2000];
            let mut seen: Vec<u8> = Vec::new();
            for n in 0..taken {
                let (_, len) = it.world.port.poll_from_guest(0, &mut buf).unwrap();
                seen.push(buf[len - 1]);
                it.world.port.push_to_guest(0, &hdr, &[&[n; 60]]).unwrap();
                if n % 7 == 3 {
                    it.world.port.flush_from_guest(0);
                    it.world.port.flush_to_guest(0);
                }
            }
            let bases = [0, 1].map(|index| it.step("the stop", |world| stop_ring(world, index)));
            assert_eq!(bases, [u32::from(taken); 2]);
            // The target has the memory, and another port.
            let mut world = it.world;
            world.anew(config(std::path::PathBuf::new()));
            world.negotiate(features);
            world.set_memory();
            world.start_rings();
            seen.extend(world.poll_frames().iter().map(|(_, frame)| frame[99]));
            for n in taken..20 {
                world.port.push_to_guest(0, &hdr, &[&[n; 60]]).unwrap();
            }
            world.port.flush_to_guest(0);
            assert_eq!(seen, (0..20).collect::<Vec<u8>>(), "each frame once");
            let used = |used: Vec<(u32, u32)>| used.into_iter().map(|(head, _)| head);
            let sent: Vec<u32> = used(world.tx.used()).collect();
            assert_eq!(sent, frames.into_iter().map(u32::from).collect::<Vec<_>>());
            assert_eq!(used(world.rx.used()).collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
        }
    }
}

#[test]
fn life_15_a_ring_runs_only_while_a_log_of_this_start_is_mapped() {
    let mut it = Logged::new(LINUX);
    stop_ring(&mut it.world, 0);
    stop_ring(&mut it.world, 1);
    // The guest reboots: QEMU starts the rings, and then passes a log.
    it.world.start_rings();
    assert!(it.world.link().is_none(), "the old log may be gone");
    it.log.hand_over(&mut it.world);
    assert!(it.world.link().is_some());
    it.world.front.reply().expect("an answer");
    it.world.events();
    it.world.offer_buffers(BUFFERS, 1, 2000);
    it.step("after the reboot", |world| {
        world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&[9; 60]]).unwrap();
        world.port.flush_to_guest(0);
    });
    it.world.say(Req::SET_FEATURES, &LINUX.to_ne_bytes(), &[]);
    assert_eq!(it.world.events(), ["logs false"], "the migration was called off");
    it.world.offer_buffers(BUFFERS, 1, 2000);
    it.world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&[9; 60]]).unwrap();
    it.world.port.flush_to_guest(0);
    assert!(!it.log.take().contains(&true), "nothing is marked without LOG_ALL");
}

#[test]
fn life_15_a_page_beyond_the_log_ends_the_connection() {
    let mut world = written_without_a_mark();
    world.port.handle_faults();
    assert!(world.front.is_hung_up());
    assert_eq!(world.events().last().map(String::as_str), Some("logs false"), "who left is over");
}

#[test]
fn life_15_a_log_that_can_shrink_or_is_no_memory_is_refused() {
    let mut world = World::running(LINUX);
    let refused = |world: &mut World, file: File, spec: [u64; 2]| {
        let spec = spec.map(u64::to_ne_bytes).concat();
        !world.is_obeyed(Req::SET_LOG_BASE, &spec, &[file.into()])
    };
    let unsealed = || {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, LOG_LEN as u64).unwrap();
        File::from(file)
    };
    let sealed = || File::from(Log::new(LOG_LEN).file);
    assert!(refused(&mut world, unsealed(), [LOG_LEN as u64, 0]));
    assert!(refused(&mut world, File::open("/proc/self/exe").unwrap(), [LOG_LEN as u64, 0]));
    assert!(refused(&mut world, sealed(), [LOG_LEN as u64 + 1, 0]), "longer than its file");
    assert!(refused(&mut world, sealed(), [0, 0]));
    assert!(refused(&mut world, sealed(), [u64::MAX, 1]));
    assert!(world.link().is_some(), "nothing has changed");
}
