//! INFLIGHT_SHMFD: a daemon dies with chains in its hands, and the next one gets the log back.
//!
//! Layout of a queue's region, from the specification: version at 8, desc_num at 10,
//! last_batch_head at 12, used_idx at 14, then 16 bytes per descriptor: inflight at 0, next at 6,
//! counter at 8.

use std::os::fd::{AsFd, OwnedFd};

use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::world::{BUFFERS, LINUX, QUEUE_SIZE, Req, World};

/// Bytes of a region for [`QUEUE_SIZE`] descriptors.
const REGION: usize = (16 + 16 * QUEUE_SIZE as usize).next_multiple_of(64);

/// The log file, as the front-end sees it.
struct Log {
    file: OwnedFd,
    map: MmapRegion,
    spec: Vec<u8>,
}

impl Log {
    /// Asks the port for a log of two queues.
    fn new(world: &mut World) -> Self {
        let mut ask = vec![0; 16];
        ask.extend([2, QUEUE_SIZE, 0, 0].into_iter().flat_map(u16::to_ne_bytes));
        let (spec, file) = world.ask(Req::GET_INFLIGHT_FD, &ask);
        let file = file.expect("a file comes along");
        let copy = std::fs::File::from(file.try_clone().unwrap());
        let map = MmapRegion::from_file(FileOffset::new(copy, 0), 2 * REGION).unwrap();
        Self { file, map, spec }
    }

    fn hand_over(&self, world: &mut World) {
        world.say(Req::SET_INFLIGHT_FD, &self.spec, &[self.file.as_fd()]);
    }

    fn word(&self, queue: usize, at: usize) -> u16 {
        self.map.as_volatile_slice().read_obj(queue * REGION + at).unwrap()
    }

    fn set<T: vm_memory::ByteValued>(&self, queue: usize, at: usize, value: T) {
        self.map.as_volatile_slice().write_obj(value, queue * REGION + at).unwrap();
    }

    /// As a back-end leaves it that took `head` as its `order`-th and never completed it.
    fn mark(&self, queue: usize, head: u16, order: u64) {
        let at = 16 + 16 * usize::from(head);
        self.set(queue, at + 8, order);
        self.set(queue, at, 1_u8);
    }

    fn heads_in_flight(&self, queue: usize) -> Vec<u16> {
        let flag = |head: u16| {
            let at = queue * REGION + 16 + 16 * usize::from(head);
            self.map.as_volatile_slice().read_obj::<u8>(at).unwrap()
        };
        (0..QUEUE_SIZE).filter(|head| flag(*head) == 1).collect()
    }
}

/// A world with a log, whose guest has sent frames 0 to `n`.
fn world_with_log(n: u8) -> (World, Log) {
    let mut log = None;
    let mut world = World::prepared(LINUX, |world| {
        let made = Log::new(world);
        made.hand_over(world);
        log = Some(made);
        for i in 0..n {
            let buffer = world.put_frame(BUFFERS + 0x100 * u64::from(i), 12, &[i; 60]);
            world.tx.offer(&[buffer], 0);
        }
    });
    world.events();
    (world, log.unwrap())
}

/// The front-end finds the next daemon and hands the log over.
fn restart(world: &mut World, log: &Log) {
    world.reconnect();
    world.negotiate(LINUX);
    log.hand_over(world);
    world.set_memory();
    world.start_rings();
    assert!(world.link().is_some());
}

fn first_bytes(frames: &[(nightporter_core::wire::virtio_net::VirtioNetHdr, Vec<u8>)]) -> Vec<u8> {
    frames.iter().map(|(_, frame)| frame[0]).collect()
}

#[test]
fn the_log_says_what_is_in_our_hands() {
    let (mut world, log) = world_with_log(3);
    assert_eq!((log.word(1, 8), log.word(1, 10)), (1, QUEUE_SIZE), "version and size");
    let mut buf = [0; 2000];
    assert!(world.port.poll_from_guest(0, &mut buf).is_some());
    assert!(world.port.poll_from_guest(0, &mut buf).is_some());
    assert_eq!(log.heads_in_flight(1), [0, 1], "completed, but the guest does not know yet");
    world.port.flush_from_guest(0);
    assert_eq!(log.heads_in_flight(1), [0_u16; 0]);
    assert_eq!(log.word(1, 14), 2, "used_idx");

    world.offer_buffers(BUFFERS, 4, 1526);
    assert_eq!(world.port.room_to_guest(0, 2000), 2 * 1526 - 12);
    assert_eq!(log.heads_in_flight(0), [0, 1], "receive buffers that we hold");
}

#[test]
fn chains_a_dead_daemon_had_taken_come_first_in_their_old_order() {
    let (mut world, log) = world_with_log(8);
    // Its predecessor worked out of order: 0 to 4 taken, 1 and 3 completed, and then it died.
    for (head, order) in [(4, 12), (0, 7), (2, 9)] {
        log.mark(1, head, order);
    }
    log.set(1, 14, 2_u16);
    let used = world.tx.used;
    world.ram.write(used + 4, &[1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    world.ram.set_u16(used + 2, 2);
    assert_eq!(world.tx.used().len(), 2);

    restart(&mut world, &log);
    assert_eq!(first_bytes(&world.poll_frames()), [0, 2, 4, 5, 6, 7]);
    assert_eq!(log.heads_in_flight(1), [0_u16; 0]);
    let heads: Vec<u32> = world.tx.used().iter().map(|(head, _)| *head).collect();
    assert_eq!(heads, [0, 2, 4, 5, 6, 7], "each exactly once");

    restart(&mut world, &log);
    assert!(world.poll_frames().is_empty(), "and not again");
}

#[test]
fn a_publication_cut_short_is_finished() {
    let (mut world, log) = world_with_log(4);
    // Died between the used index and the log: 0 and 1 are published, the log does not know.
    log.mark(1, 0, 0);
    log.mark(1, 1, 1);
    log.mark(1, 2, 2);
    log.set(1, 16 + 16 + 6, 0_u16); // 1's next is 0
    log.set(1, 12, 1_u16); // last_batch_head
    let used = world.tx.used;
    world.ram.write(used + 4, &[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    world.ram.set_u16(used + 2, 2);
    restart(&mut world, &log);
    assert_eq!(first_bytes(&world.poll_frames()), [2, 3]);
    assert_eq!(world.tx.used().len(), 4);
}

#[test]
fn a_ring_stopped_in_good_order_leaves_nothing_in_flight() {
    let (mut world, log) = world_with_log(0);
    world.offer_buffers(BUFFERS, 4, 1526);
    assert!(world.port.room_to_guest(0, 5000) >= 5000);
    assert_eq!(log.heads_in_flight(0).len(), 4);
    assert_eq!(world.stop_ring(0), 0, "none was used");
    assert_eq!(log.heads_in_flight(0), [0_u16; 0]);
    world.start_ring(0);
    assert!(world.port.room_to_guest(0, 5000) >= 5000, "they are taken again");
}

#[test]
fn a_log_full_of_lies_hurts_nobody() {
    let (mut world, log) = world_with_log(4);
    for head in 0..QUEUE_SIZE {
        log.mark(1, head, u64::MAX);
        log.set(1, 16 + 16 * usize::from(head) + 6, 0xffff_u16);
    }
    log.set(1, 12, 0xffff_u16);
    log.set(1, 14, 0x1234_u16);
    restart(&mut world, &log);
    // It takes at most as many as a queue holds, and the driver's reset repairs it.
    assert!(world.poll_frames().len() <= usize::from(QUEUE_SIZE));
    world.stop_ring(1);
    world.tx = crate::driver::Driver::new(&world.ram, crate::world::RING_FROM_GUEST, QUEUE_SIZE);
    world.start_ring(1);
    let buffer = world.put_frame(BUFFERS, 12, b"repaired");
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames()[0].1, b"repaired");
}
