//! Attacks that used to take the worker's time from everybody else. Work is counted, not timed: how
//! much of it one port can have done in a turn.

use std::os::fd::AsFd;

use nightporter_core::turn::{Received, Sent};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::port::guest::GuestPort;
use nightporterd::vhost::queue::WORK_PER_TURN;

use crate::driver::{Driver, GUEST_BASE, INDIRECT, USER_BASE, WRITE};
use crate::world::{
    BUFFERS, LINUX, NEED_REPLY, QUEUE_SIZE, RAM_LEN, Req, World, mem_table, new_eventfd, region,
    vring_addr, vring_state,
};

/// Where an indirect table of [`CRUMBS`] buffers is.
const TABLE: u64 = BUFFERS;
const CRUMBS: u64 = 1024;
/// Where its buffers are.
const BYTES: u64 = BUFFERS + 0x1_0000;
const FRAME_MAX: usize = 68 * 1024;

/// Offers as many chains as the ring holds, all of them the same: `CRUMBS` buffers of `len` bytes.
fn offer_crumbs(world: &mut World, to_guest: bool, len: u32) {
    let crumbs: Vec<_> = (0..CRUMBS).map(|i| (BYTES + i * u64::from(len), len)).collect();
    let driver = if to_guest { &mut world.rx } else { &mut world.tx };
    driver.offer_indirect(TABLE, &crumbs, if to_guest { WRITE } else { 0 });
    for _ in 1..QUEUE_SIZE {
        driver.offer(&[(TABLE, u32::try_from(16 * CRUMBS).unwrap())], INDIRECT);
    }
}

/// Frames that are read in each turn, until there are no more.
fn frames_per_turn(port: &mut GuestPort) -> Vec<u64> {
    let (mut turns, mut buf) = (vec![0], vec![0; FRAME_MAX]);
    loop {
        match port.receive(&mut buf) {
            Received::Frame(..) => *turns.last_mut().unwrap() += 1,
            Received::Spent => {
                port.flush();
                turns.push(0);
            }
            Received::Empty => return turns,
            Received::Gone => panic!("a guest's port stays"),
        }
    }
}

#[test]
fn frames_in_a_thousand_crumbs_take_turns() {
    let mut world = World::running(LINUX);
    offer_crumbs(&mut world, false, 64);
    let turns = frames_per_turn(&mut GuestPort::new(world.port, None));
    assert_eq!(turns.iter().sum::<u64>(), u64::from(QUEUE_SIZE), "all of them arrive");
    let most = WORK_PER_TURN as u64 / CRUMBS + 1;
    assert!(turns.iter().all(|frames| *frames <= most), "{turns:?}");
}

#[test]
fn a_guest_with_more_queues_has_no_more_looked_at_in_a_turn() {
    let mut world = World::connected(2);
    world.negotiate(LINUX);
    world.set_memory();
    world.start_rings();
    let mut second = Driver::new(&world.ram, GUEST_BASE + 0x3_0000, QUEUE_SIZE);
    let (kick, call, number) = (new_eventfd(), new_eventfd(), 3_u64.to_ne_bytes());
    world.say(Req::SET_VRING_NUM, &vring_state(3, QUEUE_SIZE.into()), &[]);
    world.say(Req::SET_VRING_ADDR, &vring_addr(3, &second), &[]);
    world.say(Req::SET_VRING_CALL, &number, &[call.as_fd()]);
    world.say(Req::SET_VRING_KICK, &number, &[kick.as_fd()]);
    world.say(Req::SET_VRING_ENABLE, &vring_state(3, 1), &[]);
    offer_crumbs(&mut world, false, 64);
    for _ in 0..QUEUE_SIZE {
        second.offer(&[(TABLE, u32::try_from(16 * CRUMBS).unwrap())], INDIRECT);
    }
    let turns = frames_per_turn(&mut GuestPort::new(world.port, None));
    assert_eq!(turns.iter().sum::<u64>(), 2 * u64::from(QUEUE_SIZE), "all of both arrive");
    let most = WORK_PER_TURN as u64 / CRUMBS + 1;
    assert!(turns.iter().all(|frames| *frames <= most), "{turns:?}");
}

#[test]
fn chains_that_are_no_frames_take_turns_too() {
    let mut world = World::running(LINUX);
    offer_crumbs(&mut world, false, 256); // 256 KiB
    let (mut port, mut buf) = (GuestPort::new(world.port, None), vec![0; FRAME_MAX]);
    let (mut dropped, mut turns) = (0, 1);
    while port.receive(&mut buf) == Received::Spent {
        turns += 1;
        let now = port.port.stats().too_big;
        assert!(now - dropped <= WORK_PER_TURN as u64 / CRUMBS + 1, "{dropped} to {now}");
        dropped = now;
        port.flush();
    }
    assert_eq!(port.port.stats().too_big, u64::from(QUEUE_SIZE));
    assert!(turns >= u64::from(QUEUE_SIZE) * CRUMBS / (2 * WORK_PER_TURN as u64), "{turns} turns");
}

#[test]
fn a_receiver_with_crumbs_for_buffers_gets_its_frame_over_several_turns() {
    let mut world = World::running(LINUX);
    offer_crumbs(&mut world, true, 16); // 16 KiB a chain
    let (mut port, frame) = (GuestPort::new(world.port, None), vec![7; 65_000]);
    let mut turns = 1;
    while port.send(&VirtioNetHdr::default(), &[&frame]) == Sent::Full {
        assert!(port.has_spent(), "it is not the guest that has no room");
        port.flush();
        turns += 1;
    }
    port.flush();
    assert!(turns >= 4 * CRUMBS / WORK_PER_TURN as u64, "{turns} turns for four chains");
    assert_eq!(world.rx.used().iter().map(|(_, len)| len).sum::<u32>(), 65_012);
}

#[test]
fn a_receiver_with_buffers_of_a_byte_is_out_of_use() {
    let mut world = World::running(LINUX);
    offer_crumbs(&mut world, true, 1);
    let sent = world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&[7; 60]]);
    assert!(sent.is_err());
    assert!(!world.port.is_running_to_guest(0));
}

#[test]
fn a_front_end_maps_memory_once_a_turn_and_not_for_ever() {
    let mut world = World::running(LINUX);
    let table = mem_table(&[region(GUEST_BASE, RAM_LEN as u64, USER_BASE, 0)]);
    let fd = world.ram.fd();
    let mut rests = 0;
    for _ in 0..100 {
        for _ in 0..3 {
            let fds = [fd.as_fd()];
            world.front.send(Req::SET_MEM_TABLE.into(), 1 | NEED_REPLY, &table, &fds);
        }
        for _ in 0..3 {
            world.port.handle_connection();
            assert!(world.front.reply().is_some() && world.front.reply().is_none(), "one a turn");
        }
        rests += world.events().iter().filter(|event| *event == "rest Connection").count();
    }
    assert!(rests > 0, "it waits now and then");
}

/// A ring that starts looks at each entry of the log of what is in flight, and clears them when it
/// stops; the link of a device with one ring never changes.
#[test]
fn a_ring_with_a_long_log_starts_or_stops_once_a_turn_and_then_waits() {
    const SIZE: u16 = 32768;
    let mut world = World::connected(1);
    world.negotiate(LINUX);
    world.set_memory();
    let ask = [vec![0; 16], [2, SIZE, 0, 0].map(u16::to_ne_bytes).concat()].concat();
    let (log, file) = world.ask(Req::GET_INFLIGHT_FD, &ask);
    world.say(Req::SET_INFLIGHT_FD, &log, &[file.unwrap().as_fd()]);
    let mut addr = vring_state(1, 0);
    for at in [0, 0x10_0000, 0xa_0000, 0] {
        addr.extend((USER_BASE + at).to_ne_bytes());
    }
    let (kick, number) = (new_eventfd(), 1_u64.to_ne_bytes());
    world.say(Req::SET_VRING_NUM, &vring_state(1, SIZE.into()), &[]);
    world.say(Req::SET_VRING_ADDR, &addr, &[]);
    world.say(Req::SET_VRING_KICK, &number, &[kick.as_fd()]);
    world.events();
    for on in [1, 0, 1] {
        let enable = vring_state(1, on);
        world.front.send(Req::SET_VRING_ENABLE.into(), 1 | NEED_REPLY, &enable, &[]);
    }
    for happens in ["started 1", "stopped 1", "started 1"] {
        world.port.handle_connection();
        assert!(world.front.reply().is_some() && world.front.reply().is_none(), "one a turn");
        assert_eq!(world.events(), [happens, "rest Connection"]);
    }
}

#[test]
fn a_link_that_flaps_rests_after_a_few_times() {
    let mut world = World::running(LINUX);
    let mut changes = 0;
    for i in 0..20 {
        world.say(Req::SET_VRING_ENABLE, &vring_state(0, i % 2), &[]);
        let events = world.events();
        changes += events.iter().filter(|event| event.starts_with("link")).count();
        if events.iter().any(|event| event == "rest Connection") {
            break;
        }
    }
    assert!((4..=8).contains(&changes), "{changes} changes");
}
