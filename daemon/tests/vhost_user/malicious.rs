//! Guests whose rings lie: a fault that says how, a queue out of use, and nothing else.

use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::vhost::guest_mem::GuestMemory;
use nightporterd::vhost::queue::{Layout, PushError, Queue};
use nightporterd::vhost::ring::RingFault::{self, *};
use nightporterd::vhost::ring::{CHAIN_MAX, QUEUE_SIZE_MAX, Ring, RingAddrs, RingFeatures};
use proptest::prelude::*;
use std::os::fd::AsFd;
use vhost::vhost_user::message::{FrontendReq as Req, VhostUserMemoryRegion};

use crate::driver::{Desc, Driver, GUEST_BASE, INDIRECT, NEXT, Ram, USER_BASE, WRITE};
use crate::world::{
    BUFFERS, LINUX, QUEUE_SIZE, RAM_LEN, RING_FROM_GUEST, RING_TO_GUEST, World, count, new_eventfd,
    vring_addr, vring_state,
};
use nightporterd::vhost::features::bit;

/// First byte after guest memory.
const END: u64 = GUEST_BASE + RAM_LEN as u64;
const SIZE: u16 = QUEUE_SIZE;

/// The guest tells this lie on its transmit queue: it must be found out, cost only that queue, and
/// be gone after a driver reset.
fn transmit_lie(what: &str, expected: RingFault, features: u64, lie: impl Fn(&mut World)) {
    let mut world = World::running(features);
    lie(&mut world);
    assert!(world.poll_frames().is_empty(), "{what}");
    assert_eq!(world.events(), [format!("broken 1: {expected:?}"), "link down".into()], "{what}");
    expect_contained(&mut world, what, 1);
}

/// The same on its receive queue.
fn receive_lie(what: &str, expected: RingFault, features: u64, lie: impl Fn(&mut World)) {
    let mut world = World::running(features);
    lie(&mut world);
    let push = world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&[0xaa; 1000]]);
    assert_eq!(push, Err(PushError::Full), "{what}");
    assert_eq!(world.events(), [format!("broken 0: {expected:?}"), "link down".into()], "{what}");
    expect_contained(&mut world, what, 0);
}

fn expect_contained(world: &mut World, what: &str, index: u32) {
    assert_eq!(count(&world.err[index as usize]), 1, "{what}: the front-end is told");
    assert_eq!(world.port.stats().ring_faults, 1, "{what}");
    // The queue stays out of use and says so once, whatever is asked of it.
    world.port.flush_from_guest(0);
    world.port.flush_to_guest(0);
    let _ = world.port.guest_progress(0);
    match index {
        0 => assert_eq!(world.port.room_to_guest(0, 60), 0, "{what}"),
        _ => assert!(!world.port.enable_kicks_from_guest(0), "{what}"),
    }
    assert_eq!(world.events(), [""; 0], "{what}");
    // The other queue works.
    if index == 0 {
        expect_transmit_works(world, what);
    } else {
        expect_receive_works(world, what);
    }
    // The driver resets the device: both work.
    world.stop_ring(0);
    world.stop_ring(1);
    world.rx = Driver::new(&world.ram, RING_TO_GUEST, SIZE);
    world.tx = Driver::new(&world.ram, RING_FROM_GUEST, SIZE);
    world.start_rings();
    assert!(world.link().is_some(), "{what}");
    expect_transmit_works(world, what);
    expect_receive_works(world, what);
    assert_eq!(world.port.stats().connections, 1, "{what}: the front-end never noticed");
}

fn expect_transmit_works(world: &mut World, what: &str) {
    let buffer = world.put_frame(BUFFERS + 0x9000, 12, b"honest frame");
    world.tx.offer(&[buffer], 0);
    let frames = world.poll_frames();
    assert_eq!(frames.last().expect(what).1, b"honest frame", "{what}");
}

fn expect_receive_works(world: &mut World, what: &str) {
    world.rx.offer(&[(BUFFERS + 0xa000, 2000)], WRITE);
    world.port.push_to_guest(0, &VirtioNetHdr::default(), &[b"honest"]).expect(what);
    world.port.flush_to_guest(0);
    assert_eq!(world.ram.read(BUFFERS + 0xa000 + 12, 6), b"honest", "{what}");
}

#[test]
fn a_lie_in_a_further_queue_takes_down_the_link_too_until_that_starts_anew() {
    let mut world = World::connected(2);
    world.negotiate(LINUX);
    world.set_memory();
    world.start_rings();
    let mut further = Driver::new(&world.ram, GUEST_BASE + 0x3_0000, SIZE);
    let start = |world: &mut World, further: &Driver| {
        let (kick, number) = (new_eventfd(), 3_u64.to_ne_bytes());
        world.say(Req::SET_VRING_NUM, &vring_state(3, SIZE.into()), &[]);
        world.say(Req::SET_VRING_BASE, &vring_state(3, 0), &[]);
        world.say(Req::SET_VRING_ADDR, &vring_addr(3, further), &[]);
        world.say(Req::SET_VRING_KICK, &number, &[kick.as_fd()]);
        world.say(Req::SET_VRING_ENABLE, &vring_state(3, 1), &[]);
    };
    start(&mut world, &further);
    assert!(world.port.link().is_some());
    world.events();
    further.set_avail_idx(SIZE + 1);
    assert_eq!(world.port.poll_from_guest(1, &mut [0; 2000]), None);
    let broken = format!("broken 3: {AvailJump:?}");
    assert_eq!(world.events(), [broken, "link down".into()]);
    assert_eq!((world.port.link(), world.port.stats().ring_faults), (None, 1));
    world.stop_ring(3);
    assert!(world.port.link().is_some(), "its driver uses it no more");
    further = Driver::new(&world.ram, GUEST_BASE + 0x3_0000, SIZE);
    start(&mut world, &further);
    assert!(world.port.link().is_some() && world.port.stats().ring_faults == 1);
}

#[test]
fn the_available_index_jumps() {
    for jump in [SIZE + 1, 1000, 0x8000, 0xffff] {
        transmit_lie("jump", AvailJump, LINUX, |w| w.tx.set_avail_idx(jump));
        receive_lie("jump", AvailJump, LINUX, |w| w.rx.set_avail_idx(jump));
    }
}

#[test]
fn the_available_index_goes_back() {
    transmit_lie("back", AvailJump, LINUX, |world| {
        let buffer = world.put_frame(BUFFERS, 12, b"x");
        world.tx.offer(&[buffer], 0);
        world.tx.offer(&[buffer], 0);
        assert_eq!(world.poll_frames().len(), 2);
        world.tx.set_avail_idx(1);
    });
}

#[test]
fn buffers_are_offered_again_before_they_were_shown_back() {
    let mut world = World::running(LINUX);
    let buffer = world.put_frame(BUFFERS, 12, b"x");
    for _ in 0..SIZE {
        world.tx.offer(&[buffer], 0);
    }
    let mut buf = [0; 100];
    for _ in 0..10 {
        world.port.poll_from_guest(0, &mut buf).expect("a frame");
    }
    // Ten are completed and not published. Its ring is full, and it goes on.
    world.tx.offer(&[buffer], 0);
    assert!(!world.port.enable_kicks_from_guest(0));
    assert_eq!(world.events(), ["broken 1: AvailJump", "link down"]);
}

#[test]
fn a_descriptor_index_is_out_of_range() {
    for head in [SIZE, SIZE + 1, 0x8000, 0xffff] {
        transmit_lie("head", IndexOutOfRange, LINUX, |world| world.tx.offer_head(head));
        receive_lie("head", IndexOutOfRange, LINUX, |world| world.rx.offer_head(head));
        transmit_lie("next", IndexOutOfRange, LINUX, |world| {
            world.tx.set_desc(0, Desc { addr: BUFFERS, len: 12, flags: NEXT, next: head });
            world.tx.offer_head(0);
        });
    }
}

#[test]
fn a_chain_loops() {
    for length in [1, 2, SIZE] {
        let loop_of = move |driver: &mut Driver, flags: u16| {
            for index in 0..length {
                let next = (index + 1) % length;
                let desc = Desc { addr: BUFFERS, len: 16, flags: flags | NEXT, next };
                driver.set_desc(index, desc);
            }
            driver.offer_head(0);
        };
        transmit_lie("loop", ChainTooLong, LINUX, |world| loop_of(&mut world.tx, 0));
        receive_lie("loop", ChainTooLong, LINUX, |world| loop_of(&mut world.rx, WRITE));
    }
}

#[test]
fn a_buffer_is_outside_memory() {
    let outside: &[(u64, u32)] = &[
        (0, 100),
        (GUEST_BASE - 1, 100),
        (END - 99, 100),
        (END, 100),
        (u64::MAX, 100),
        (u64::MAX - 50, 100),
        (BUFFERS, 0x8000_0000),
        (GUEST_BASE, u32::MAX),
    ];
    for &(addr, len) in outside {
        let what = format!("{addr:#x} {len:#x}");
        receive_lie(&what, OutsideMemory, LINUX, |world| {
            world.rx.offer(&[(addr, len)], WRITE);
        });
    }
    // Transmit buffers are only as long as what is read of them: the caller's buffer.
    for &(addr, len) in &outside[..6] {
        let what = format!("{addr:#x} {len:#x}");
        transmit_lie(&what, OutsideMemory, LINUX, |world| {
            world.tx.offer(&[(addr, len)], 0);
        });
        transmit_lie(&what, OutsideMemory, LINUX, |world| {
            world.tx.offer(&[(BUFFERS, 12), (addr, len)], 0);
        });
        transmit_lie(&what, OutsideMemory, LINUX, |world| {
            world.tx.offer_indirect(BUFFERS + 0x8000, &[(BUFFERS, 12), (addr, len)], 0);
        });
    }
}

#[test]
fn lengths_that_overflow_are_only_too_big() {
    let mut world = World::running(LINUX);
    world.tx.offer(&[(BUFFERS, u32::MAX), (BUFFERS, u32::MAX), (BUFFERS, u32::MAX)], 0);
    assert!(world.poll_frames().is_empty());
    assert_eq!((world.port.stats().too_big, world.port.stats().ring_faults), (1, 0));
    expect_transmit_works(&mut world, "after it");
}

#[test]
fn directions_are_wrong() {
    transmit_lie("writable", WrongDirection, LINUX, |world| {
        world.tx.offer(&[(BUFFERS, 100)], WRITE);
    });
    transmit_lie("writable after readable", WrongDirection, LINUX, |world| {
        world.tx.set_desc(0, Desc { addr: BUFFERS, len: 50, flags: NEXT, next: 1 });
        world.tx.set_desc(1, Desc { addr: BUFFERS, len: 50, flags: WRITE, next: 0 });
        world.tx.offer_head(0);
    });
    receive_lie("readable", WrongDirection, LINUX, |world| {
        world.rx.offer(&[(BUFFERS, 2000)], 0);
    });
    receive_lie("readable before writable", WrongDirection, LINUX, |world| {
        world.rx.set_desc(0, Desc { addr: BUFFERS, len: 50, flags: NEXT, next: 1 });
        world.rx.set_desc(1, Desc { addr: BUFFERS, len: 2000, flags: WRITE, next: 0 });
        world.rx.offer_head(0);
    });
}

#[test]
fn a_receive_buffer_is_too_small_for_the_header() {
    for buffers in [&[(BUFFERS, 11)][..], &[(BUFFERS, 5), (BUFFERS + 99, 6)]] {
        receive_lie("small", BufferTooSmall, LINUX, |world| {
            world.rx.offer(buffers, WRITE);
        });
    }
}

#[test]
fn a_buffer_is_empty() {
    let table = BUFFERS + 0x8000;
    for buffers in [&[(BUFFERS, 0)][..], &[(BUFFERS, 12), (BUFFERS, 0), (BUFFERS, 100)]] {
        receive_lie("empty", EmptyBuffer, LINUX, |world| {
            world.rx.offer(buffers, WRITE);
        });
        receive_lie("empty in a table", EmptyBuffer, LINUX, |world| {
            world.rx.offer_indirect(table, buffers, WRITE);
        });
        transmit_lie("empty", EmptyBuffer, LINUX, |world| {
            world.tx.offer(buffers, 0);
        });
    }
}

/// A queue of the largest size whose every chain is the whole table: the driver may do so, and a
/// device that keeps what it has seen of each chain would need gigabytes.
#[test]
fn chains_that_share_a_long_tail_cost_no_more_than_a_frame() {
    let size = QUEUE_SIZE_MAX;
    let (desc, avail, used) = (GUEST_BASE, GUEST_BASE + (1 << 20), GUEST_BASE + (2 << 20));
    let ram = Ram::new(4 << 20);
    let user = |guest: u64| guest - GUEST_BASE + USER_BASE;
    let region = VhostUserMemoryRegion::new(GUEST_BASE, ram.len() as u64, USER_BASE, 0);
    let memory = GuestMemory::new([(region, ram.fd())]).unwrap();
    let addrs = RingAddrs { desc: user(desc), avail: user(avail), used: user(used) };
    let layout = Layout { hdr_len: 12, merge: true };
    for (len, tail) in [(1, size), (0, size), (1, CHAIN_MAX), (16, CHAIN_MAX)] {
        for index in 0..tail {
            let more = if index + 1 < tail { NEXT } else { 0 };
            let len = if index == 0 { 12 } else { len };
            let desc_of = Desc { addr: BUFFERS, len, flags: WRITE | more, next: index + 1 };
            ram.write(desc + 16 * u64::from(index), &desc_of.bytes());
        }
        ram.set_u16(used + 2, 0);
        ram.set_u16(avail + 2, size); // every entry of the ring names chain 0
        let ring = Ring::start(&memory, addrs, size, RingFeatures::default(), None).unwrap();
        let mut queue = Queue::new(ring);
        let expected = match (len, tail) {
            (0, _) => Err(EmptyBuffer),
            (1, CHAIN_MAX) => Err(BufferTooSmall),
            // Two chains, and then it was enough for a turn.
            (_, CHAIN_MAX) => Ok(2 * (12 + 16 * (usize::from(CHAIN_MAX) - 1)) - 12),
            _ => Err(ChainTooLong),
        };
        assert_eq!(queue.room(&memory, layout, 65_562), expected, "{tail} buffers of {len}");
    }
}

#[test]
fn an_indirect_table_is_where_none_may_be() {
    let table = BUFFERS + 0x8000;
    transmit_lie("not negotiated", IndirectMisplaced, LINUX & !bit::INDIRECT_DESC, |world| {
        world.tx.offer_indirect(table, &[(BUFFERS, 100)], 0);
    });
    transmit_lie("nested", IndirectMisplaced, LINUX, |world| {
        world.tx.offer_indirect(table, &[(table, 16)], INDIRECT);
    });
    transmit_lie("nested deeper", IndirectMisplaced, LINUX, |world| {
        world.ram.write(table, &Desc { addr: BUFFERS, len: 20, flags: NEXT, next: 1 }.bytes());
        let nested = Desc { addr: table, len: 32, flags: INDIRECT, next: 0 };
        world.ram.write(table + 16, &nested.bytes());
        world.tx.offer(&[(table, 32)], INDIRECT);
    });
    transmit_lie("chained", IndirectMisplaced, LINUX, |world| {
        world.tx.set_desc(0, Desc { addr: table, len: 16, flags: INDIRECT | NEXT, next: 1 });
        world.tx.offer_head(0);
    });
}

#[test]
fn an_indirect_table_is_impossible() {
    let table = BUFFERS + 0x8000;
    for len in [0, 15, 17, 1025 * 16, 0xffff_fff0, u32::MAX] {
        transmit_lie("length", IndirectLength, LINUX, |world| {
            world.tx.offer(&[(table, len)], INDIRECT);
        });
    }
    for at in [0, END - 8, END, u64::MAX - 7] {
        transmit_lie("outside", OutsideMemory, LINUX, |world| {
            world.tx.offer(&[(at, 16)], INDIRECT);
        });
    }
    transmit_lie("next outside the table", IndexOutOfRange, LINUX, |world| {
        world.ram.write(table, &Desc { addr: BUFFERS, len: 20, flags: NEXT, next: 2 }.bytes());
        world.tx.offer(&[(table, 32)], INDIRECT);
    });
    receive_lie("loop inside the table", ChainTooLong, LINUX, |world| {
        for (index, next) in [(0, 1), (1, 0)] {
            let desc = Desc { addr: BUFFERS, len: 20, flags: WRITE | NEXT, next };
            world.ram.write(table + 16 * index, &desc.bytes());
        }
        world.rx.offer(&[(table, 32)], INDIRECT);
    });
}

#[test]
fn a_table_that_straddles_two_places_in_memory_is_read_right() {
    let mut world = World::running(LINUX);
    // Not aligned to anything: only the ring itself must be.
    let buffer = world.put_frame(BUFFERS + 1, 12, b"odd places");
    world.tx.offer_indirect(BUFFERS + 0x8003, &[buffer], 0);
    assert_eq!(world.poll_frames()[0].1, b"odd places");
}

/// A descriptor with values that like to break things.
fn any_desc() -> impl Strategy<Value = Desc> {
    let addr = prop_oneof![
        4 => GUEST_BASE..END,
        1 => END - 64..END + 64,
        1 => GUEST_BASE.saturating_sub(64)..GUEST_BASE,
        1 => any::<u64>(),
    ];
    let len = prop_oneof![
        4 => 0_u32..4096,
        2 => (1_u32..20).prop_map(|n| 16 * n),
        1 => any::<u32>(),
    ];
    let next = prop_oneof![4 => 0..SIZE, 1 => any::<u16>()];
    (addr, len, 0_u16..8, next).prop_map(|(addr, len, flags, next)| Desc { addr, len, flags, next })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Random descriptor tables, rings and indices, both queues: no panic, and every byte that
    /// changed in guest memory lies in a used ring or in a buffer marked as writable.
    #[test]
    fn nothing_is_written_outside_writable_buffers(
        descs in prop::collection::vec(any_desc(), usize::from(SIZE)),
        table in prop::collection::vec(any_desc(), 8),
        heads in prop::collection::vec(prop_oneof![8 => 0..SIZE, 1 => any::<u16>()], 1..64),
        jump in prop_oneof![8 => Just(0_u16), 1 => any::<u16>()],
        frame_len in 0_usize..9000,
        features in prop::sample::select(vec![LINUX, LINUX & !bit::MRG_RXBUF, bit::VERSION_1]),
    ) {
        let mut world = World::running(features);
        let table_at = BUFFERS + 0x8000;
        for (i, desc) in (0_u64..).zip(&table) {
            world.ram.write(table_at + 16 * i, &desc.bytes());
        }
        for (i, desc) in (0..).zip(&descs) {
            // Some indirect descriptors point to the prepared table.
            let to_table = desc.flags & INDIRECT != 0 && desc.next % 2 == 0;
            let addr = if to_table { table_at } else { desc.addr };
            let len = if to_table { 128 } else { desc.len };
            world.rx.set_desc(i, Desc { addr, len, ..*desc });
            world.tx.set_desc(i, Desc { addr, len, ..*desc });
        }
        for head in &heads {
            world.rx.offer_head(*head);
            world.tx.offer_head(*head);
        }
        world.rx.set_avail_idx(world.rx.avail_idx.wrapping_add(jump));
        world.tx.set_avail_idx(world.tx.avail_idx.wrapping_add(jump));

        let before = world.ram.all();
        let mut polled = 0;
        let mut buf = vec![0; 3000];
        while world.port.poll_from_guest(0, &mut buf).is_some() {
            polled += 1;
        }
        prop_assert!(polled <= usize::from(SIZE), "no more chains than the ring holds");
        world.port.flush_from_guest(0);
        let after = world.ram.all();
        expect_changes_within(&before, &after, &[used_ring(&world.tx)])?;

        let before = after;
        let frame = vec![0x5a; frame_len];
        let mut pushed = 0;
        while world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&frame]).is_ok() {
            pushed += 1;
        }
        prop_assert!(pushed <= usize::from(SIZE));
        world.port.flush_to_guest(0);
        let mut allowed = vec![used_ring(&world.rx)];
        // Possible writable buffers, in the ring or in any table: even the ring itself.
        allowed.extend(writable(&before));
        expect_changes_within(&before, &world.ram.all(), &allowed)?;
    }
}

/// Offsets of a used ring in guest memory.
fn used_ring(driver: &Driver) -> (usize, usize) {
    let at = usize::try_from(driver.used - GUEST_BASE).unwrap();
    (at, at + 6 + 8 * usize::from(driver.size))
}

/// Everything that some 16 bytes of guest memory, at any place where a table was, call writable.
/// Only the part inside memory matters.
fn writable(before: &[u8]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for chunk in before.chunks_exact(16) {
        if chunk.iter().all(|b| *b == 0) {
            continue;
        }
        let addr = u64::from_le_bytes(chunk[..8].try_into().unwrap());
        let len = u32::from_le_bytes(chunk[8..12].try_into().unwrap());
        let flags = u16::from_le_bytes(chunk[12..14].try_into().unwrap());
        if flags & WRITE != 0 && (GUEST_BASE..END).contains(&addr) {
            let at = usize::try_from(addr - GUEST_BASE).unwrap();
            found.push((at, at.saturating_add(len as usize).min(RAM_LEN)));
        }
    }
    found
}

fn expect_changes_within(
    before: &[u8],
    after: &[u8],
    allowed: &[(usize, usize)],
) -> Result<(), TestCaseError> {
    for (page, (a, b)) in before.chunks(4096).zip(after.chunks(4096)).enumerate() {
        if a == b {
            continue;
        }
        for (i, _) in a.iter().zip(b).enumerate().filter(|(_, (a, b))| a != b) {
            let at = 4096 * page + i;
            let inside = allowed.iter().any(|(from, to)| (*from..*to).contains(&at));
            prop_assert!(inside, "byte {at:#x} changed");
        }
    }
    Ok(())
}
