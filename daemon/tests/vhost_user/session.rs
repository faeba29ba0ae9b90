//! Message traces: what front-ends send, and what must come of it.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nightporterd::port::vhost_user::VhostUserConfig;
use nightporterd::vhost::Source;
use nightporterd::vhost::features::bit;
use rustix::event::epoll;
use rustix::fs::{MemfdFlags, SealFlags, ftruncate, inotify, memfd_create};

use crate::driver::{Driver, GUEST_BASE, Ram, USER_BASE, WRITE};
use crate::world::{
    BUFFERS, FrontEnd, LINUX, NEED_REPLY, QUEUE_SIZE, RAM_LEN, REPLY_ACK, RING_TO_GUEST, Req,
    World, config, count, mem_table, new_eventfd, port, region, vring_addr, vring_state,
};

/// VIRTIO_NET_F_CTRL_VQ and VIRTIO_NET_F_GUEST_ANNOUNCE.
const CTRL_VQ_AND_ANNOUNCE: u64 = 1 << 17 | 1 << 21;

#[test]
fn the_link_comes_up_with_both_rings_and_says_what_the_driver_accepts() {
    let mut world = World::connected(1);
    assert_eq!(world.events(), ["watch Listener", "connected", "watch Connection"]);
    world.negotiate(LINUX);
    world.set_memory();
    assert_eq!(world.events(), [""; 0]);
    world.start_rings();
    assert_eq!(
        world.events(),
        ["watch 0", "watch 1", "started 0", "started 1", "link up"],
        "kick descriptors are watched before the rings run"
    );
    let link = world.link().unwrap();
    assert!(link.csum && link.tso4 && !link.tso6 && !link.ecn);
    assert_eq!(world.port.features(), LINUX);
}

/// QEMU's vhost-user-net, at device realize: 7.2 sends this before it knows any feature.
#[test]
fn qemu_enables_rings_before_it_sets_features() {
    let mut world = World::connected(1);
    assert!(world.ask_u64(Req::GET_FEATURES, &[]) & bit::PROTOCOL_FEATURES != 0);
    let protocol = world.ask_u64(Req::GET_PROTOCOL_FEATURES, &[]);
    world.say(Req::SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[]);
    assert_eq!(world.ask_u64(Req::GET_QUEUE_NUM, &[]), 1);
    world.say(Req::SET_OWNER, &[], &[]);
    world.ask_u64(Req::GET_FEATURES, &[]);
    for index in 0..2_u32 {
        let call = world.call[index as usize].try_clone().unwrap();
        world.say(Req::SET_VRING_CALL, &u64::from(index).to_ne_bytes(), &[call.as_fd()]);
    }
    for index in 0..2_u32 {
        assert!(world.is_obeyed(Req::SET_VRING_ENABLE, &vring_state(index, 1), &[]));
    }
    assert_eq!(world.link(), None);
    world.say(Req::SET_FEATURES, &LINUX.to_ne_bytes(), &[]);
    world.set_memory();
    world.start_ring(0);
    world.start_ring(1);
    assert!(world.link().is_some(), "the early enable counts");
}

/// user-mode-linux 6.1: one region named, a payload for two, and the whole configuration space.
#[test]
fn uml_names_one_region_in_a_payload_for_two() {
    let mut world = World::connected(1);
    world.say(Req::SET_OWNER, &[], &[]);
    let offered = world.ask_u64(Req::GET_FEATURES, &[]);
    let protocol = world.ask_u64(Req::GET_PROTOCOL_FEATURES, &[]);
    // REPLY_ACK, SLAVE_REQ (BACKEND_REQ), CONFIG are what UML knows of what we offer.
    // It wants the very message that negotiates acknowledgements acknowledged.
    assert!(world.is_obeyed(Req::SET_PROTOCOL_FEATURES, &(protocol & 0x228).to_ne_bytes(), &[]));
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(world.is_obeyed(Req::SET_BACKEND_REQ_FD, &[], &[theirs.into()]));
    ours.set_nonblocking(true).unwrap();
    assert_eq!(
        rustix::io::read(&ours, &mut [0]).unwrap_err(),
        rustix::io::Errno::AGAIN,
        "the back-end request channel stays open"
    );

    let mut config = [0_u32, 12, 0].map(u32::to_ne_bytes).concat();
    config.extend([0; 12]);
    let (reply, _) = world.ask(Req::GET_CONFIG, &config);
    assert_eq!(reply.len(), 24, "the same size comes back");
    assert_eq!(reply[12..], [2, 0, 0, 0, 0, 7, 1, 0, 1, 0, 220, 5], "MAC, link up, 1 pair, 1500");

    assert!(world.is_obeyed(Req::SET_FEATURES, &(offered & !(1 << 31)).to_ne_bytes(), &[]));
    let mut table = mem_table(&[region(GUEST_BASE, RAM_LEN as u64, USER_BASE, 0)]);
    table.extend(region(0, 0, 0, 0));
    let fd = world.ram.fd();
    assert!(world.is_obeyed(Req::SET_MEM_TABLE, &table, &[fd]));
    world.start_rings();
    assert!(world.link().is_some());
}

#[test]
fn mq_is_offered_only_after_the_front_end_knows_mq_and_the_control_queue_never() {
    let mut world = World::connected(4);
    let before = world.ask_u64(Req::GET_FEATURES, &[]);
    assert_eq!(before & (bit::MQ | CTRL_VQ_AND_ANNOUNCE), 0, "a UML guest would not probe");
    assert_eq!(world.ask_u64(Req::GET_QUEUE_NUM, &[]), 4);
    world.say(Req::SET_PROTOCOL_FEATURES, &1_u64.to_ne_bytes(), &[]);
    let after = world.ask_u64(Req::GET_FEATURES, &[]);
    assert_eq!(after & (bit::MQ | CTRL_VQ_AND_ANNOUNCE), bit::MQ);
    let mut single = World::connected(1);
    single.say(Req::SET_PROTOCOL_FEATURES, &1_u64.to_ne_bytes(), &[]);
    assert_eq!(single.ask_u64(Req::GET_FEATURES, &[]) & bit::MQ, 0);
}

#[test]
fn without_protocol_features_a_ring_runs_without_being_enabled() {
    let mut world = World::connected(1);
    world.negotiate(bit::VERSION_1);
    world.set_memory();
    world.start_ring(0);
    world.start_ring(1);
    assert!(world.link().is_some());
}

#[test]
fn a_disabled_ring_does_nothing_and_goes_on_where_it_stood() {
    let mut world = World::running(LINUX);
    world.say(Req::SET_VRING_ENABLE, &vring_state(1, 0), &[]);
    assert_eq!(world.events(), ["stopped 1", "link down"]);
    let buffer = world.put_frame(BUFFERS, 12, b"frame while disabled");
    world.tx.offer(&[buffer], 0);
    assert!(world.poll_frames().is_empty());
    world.say(Req::SET_VRING_ENABLE, &vring_state(1, 1), &[]);
    assert_eq!(world.events(), ["started 1", "link up"]);
    assert_eq!(world.poll_frames()[0].1, b"frame while disabled");
}

/// A guest reboots, or its driver is bound again: the connection stays.
#[test]
fn a_driver_reset_stops_the_rings_and_new_ones_start() {
    let mut world = World::running(LINUX);
    let buffer = world.put_frame(BUFFERS, 12, b"before");
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames().len(), 1);
    assert_eq!(world.stop_ring(0), 0);
    assert_eq!(world.stop_ring(1), 1, "one frame was taken");
    assert_eq!(
        world.events(),
        ["stopped 0", "unwatch", "link down", "stopped 1", "unwatch"],
        "kick descriptors are handed back"
    );
    world.rx = Driver::new(&world.ram, GUEST_BASE + 0x4_0000, 2 * QUEUE_SIZE);
    world.tx = Driver::new(&world.ram, GUEST_BASE + 0x5_0000, 16);
    world.say(Req::SET_FEATURES, &(LINUX & !bit::GUEST_TSO4).to_ne_bytes(), &[]);
    world.start_rings();
    assert!(!world.link().unwrap().tso4);
    let buffer = world.put_frame(BUFFERS, 12, b"after");
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames()[0].1, b"after");
    assert_eq!(world.port.stats().connections, 1);
}

#[test]
fn a_ring_that_never_ran_gives_its_base_back() {
    let mut world = World::connected(2);
    world.negotiate(LINUX);
    world.say(Req::SET_VRING_BASE, &vring_state(3, 0xfffe), &[]);
    assert_eq!(world.stop_ring(3), 0xfffe);
}

#[test]
fn status_zero_and_reset_device_and_reset_owner_stop_everything() {
    for request in [Req::SET_STATUS, Req::RESET_DEVICE, Req::RESET_OWNER] {
        let mut world = World::running(LINUX);
        world.say(Req::SET_STATUS, &15_u64.to_ne_bytes(), &[]);
        assert_eq!(world.ask_u64(Req::GET_STATUS, &[]), 15);
        world.say(request, &0_u64.to_ne_bytes(), &[]);
        assert_eq!(world.link(), None, "{request:?}");
        assert_eq!(world.port.features(), 0);
        assert_eq!(world.ask_u64(Req::GET_STATUS, &[]), 0);
        // Memory and call descriptors stay: neither QEMU nor a front-end with slots repeats them.
        world.say(Req::SET_FEATURES, &LINUX.to_ne_bytes(), &[]);
        world.rx = Driver::new(&world.ram, RING_TO_GUEST, QUEUE_SIZE);
        world.tx = Driver::new(&world.ram, GUEST_BASE + 0x2_0000, QUEUE_SIZE);
        world.start_rings();
        assert!(world.link().is_some(), "{request:?}");
    }
}

#[test]
fn reply_ack_says_yes_and_no() {
    let mut world = World::connected(1);
    world.say(Req::SET_PROTOCOL_FEATURES, &REPLY_ACK.to_ne_bytes(), &[]);
    assert!(world.is_obeyed(Req::SET_OWNER, &[], &[]));
    let no: &[(Req, Vec<u8>)] = &[
        (Req::SET_FEATURES, (1_u64 << 34).to_ne_bytes().to_vec()),
        (Req::SET_FEATURES, vec![0; 7]),
        (Req::SET_PROTOCOL_FEATURES, u64::MAX.to_ne_bytes().to_vec()),
        (Req::SET_VRING_NUM, vring_state(0, 100)),
        (Req::SET_VRING_NUM, vring_state(0, 0)),
        (Req::SET_VRING_NUM, vring_state(0, 65536)),
        (Req::SET_VRING_NUM, vring_state(2, 64)),
        (Req::SET_VRING_NUM, vring_state(u32::MAX, 64)),
        (Req::SET_VRING_BASE, vring_state(0, 65536)),
        (Req::SET_VRING_ENABLE, vring_state(0, 2)),
        (Req::SET_VRING_KICK, 0_u64.to_ne_bytes().to_vec()),
        (Req::SET_VRING_CALL, 9_u64.to_ne_bytes().to_vec()),
        (Req::SET_MEM_TABLE, mem_table(&[region(0, 4096, 0, 0)])),
        (Req::NET_SET_MTU, 67_u64.to_ne_bytes().to_vec()),
        (Req::SET_STATUS, 256_u64.to_ne_bytes().to_vec()),
        (Req::SET_BACKEND_REQ_FD, vec![]),
        (Req::SET_LOG_BASE, vec![0; 16]),
        (Req::POSTCOPY_ADVISE, vec![]),
    ];
    for (request, payload) in no {
        assert!(!world.is_obeyed(*request, payload, &[]), "{request:?} {payload:?}");
    }
    assert_eq!(world.port.stats().refused, no.len() as u64);
    assert!(world.is_obeyed(Req::NET_SET_MTU, &9000_u64.to_ne_bytes(), &[]));
    assert_eq!(world.port.mtu(), Some(9000));
}

#[test]
fn a_refusal_that_cannot_be_said_ends_the_connection() {
    let mut world = World::connected(1);
    world.events();
    world.say(Req::SET_VRING_NUM, &vring_state(0, 100), &[]);
    assert_eq!(world.events(), ["unwatch", "disconnected"]);
    assert!(world.front.is_hung_up());
}

#[test]
fn requests_from_the_future_are_refused_and_survived() {
    let mut world = World::connected(1);
    world.say(Req::SET_PROTOCOL_FEATURES, &REPLY_ACK.to_ne_bytes(), &[]);
    world.front.send(99, 1, &[1, 2, 3], &[]);
    world.front.send(98, 1 | NEED_REPLY, &[], &[]);
    world.port.handle_connection();
    let (code, payload, _) = world.front.reply().unwrap();
    assert_eq!((code, payload), (98, 1_u64.to_ne_bytes().to_vec()));
    assert!(world.ask_u64(Req::GET_FEATURES, &[]) > 0);
}

#[test]
fn a_message_may_come_in_pieces() {
    let (mut port, socket) = port(1);
    let front = FrontEnd::connect(&mut port, &socket);
    let mut bytes = Vec::new();
    for word in [u32::from(Req::NET_SET_MTU), 1, 8, 1280, 0] {
        bytes.extend(word.to_ne_bytes());
    }
    for piece in bytes.chunks(5) {
        assert_eq!(port.mtu(), None);
        front.send_raw(piece, &[]);
        port.handle_connection();
    }
    assert_eq!(port.mtu(), Some(1280));
}

#[test]
fn what_is_not_vhost_user_ends_the_connection() {
    let headers: [[u32; 3]; 4] = [[1, 0, 0], [1, 2, 0], [1, 5, 0], [5, 1, 5000]];
    for header in headers {
        let (mut port, socket) = port(1);
        let front = FrontEnd::connect(&mut port, &socket);
        front.send_raw(&header.map(u32::to_ne_bytes).concat(), &[]);
        port.handle_connection();
        while port.poll_event().is_some() {}
        assert!(front.is_hung_up(), "{header:?}");
    }
}

#[test]
fn regions_must_be_real() {
    let mut world = World::connected(1);
    world.say(Req::SET_PROTOCOL_FEATURES, &REPLY_ACK.to_ne_bytes(), &[]);
    let ram = Ram::new(0x10_0000);
    let len = ram.len() as u64;
    let refused: &[(&str, Vec<Vec<u8>>)] = &[
        ("larger than its file", vec![region(0, len + 1, 0, 0)]),
        ("offset beyond its file", vec![region(0, 4096, 0, len)]),
        ("offset wraps", vec![region(0, 4096, 0, u64::MAX - 4095)]),
        ("empty", vec![region(0, 0, 0, 0)]),
        ("guest addresses wrap", vec![region(u64::MAX - 10, 4096, 0, 0)]),
        ("user addresses wrap", vec![region(0, 4096, u64::MAX - 10, 0)]),
        ("overlap", vec![region(0, 8192, 0, 0), region(4096, 8192, 1 << 40, 8192)]),
    ];
    for (what, regions) in refused {
        let fds: Vec<_> = regions.iter().map(|_| ram.fd()).collect();
        assert!(!world.is_obeyed(Req::SET_MEM_TABLE, &mem_table(regions), &fds), "{what}");
    }
    let table = mem_table(&[region(0, 4096, 0, 0)]);
    let (pipe, _) = rustix::pipe::pipe().unwrap();
    assert!(!world.is_obeyed(Req::SET_MEM_TABLE, &table, &[pipe]), "a pipe has no size");
    let odd = [region(0, 8192, 0, 0), region(8192, 100, 8192, 12_345)];
    let fds = [ram.fd(), ram.fd()];
    assert!(world.is_obeyed(Req::SET_MEM_TABLE, &mem_table(&odd), &fds), "odd offsets are fine");
    assert!(world.is_obeyed(Req::SET_MEM_TABLE, &mem_table(&[]), &[]), "none at all is fine");
}

#[test]
fn notifiers_must_be_eventfds_and_may_be_pipes_where_the_configuration_says_so() {
    let mut world = World::connected(1);
    world.say(Req::SET_PROTOCOL_FEATURES, &REPLY_ACK.to_ne_bytes(), &[]);
    let file = || memfd_create("no", MemfdFlags::CLOEXEC).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let zero = 0_u64.to_ne_bytes();
    for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
        assert!(!world.is_obeyed(request, &zero, &[file()]), "{request:?}");
        assert!(!world.is_obeyed(request, &zero, &[null.try_clone().unwrap().into()]));
        // Of no type either, and in the kernel's hands for as long as its maker likes.
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let watcher = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
        for fd in [epoll, watcher] {
            assert!(!world.is_obeyed(request, &zero, &[fd]), "{request:?}");
        }
        let eventfd = new_eventfd();
        assert!(world.is_obeyed(request, &zero, &[eventfd.try_clone().unwrap()]));
        assert_eq!(count(&eventfd), 0);
        // A reader at their other end can hold a lock for which a write waits, and no signal ends.
        let (one, _other) = UnixStream::pair().unwrap();
        let (_read, pipe) = rustix::pipe::pipe().unwrap();
        for fd in [one.into(), pipe] {
            assert!(!world.is_obeyed(request, &zero, &[fd]), "{request:?}");
        }
    }
    // UML signals through a pair of sockets, which it calls a pipe.
    let config = config(world.socket.clone());
    world.anew(VhostUserConfig { allow_unsealed_memory: true, ..config });
    world.say(Req::SET_PROTOCOL_FEATURES, &REPLY_ACK.to_ne_bytes(), &[]);
    for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
        let (one, _other) = UnixStream::pair().unwrap();
        let (_, write) = rustix::pipe::pipe().unwrap();
        for fd in [one.into(), write] {
            assert!(world.is_obeyed(request, &zero, &[fd]), "{request:?}");
        }
    }
}

#[test]
fn a_ring_that_lies_outside_memory_starts_when_memory_comes() {
    let mut world = World::connected(1);
    world.negotiate(LINUX);
    world.start_rings();
    let events = world.events();
    assert!(events.contains(&"broken 0: OutsideMemory".to_owned()), "{events:?}");
    assert_eq!(events.iter().filter(|e| e.starts_with("broken")).count(), 2, "said once each");
    assert_eq!((count(&world.err[0]), count(&world.err[1])), (1, 1));
    world.set_memory();
    assert_eq!(world.events(), ["started 0", "started 1", "link up"]);
}

/// CONFIGURE_MEM_SLOTS, as QEMU does it: changes only, also while rings run.
#[test]
fn memory_slots_come_and_go_under_running_rings() {
    let mut world = World::connected(1);
    world.negotiate(LINUX);
    assert!(world.ask_u64(Req::GET_MAX_MEM_SLOTS, &[]) >= 32);
    let slot = |guest, len, offset| {
        let mut payload = vec![0; 8];
        payload.extend(region(guest, len, guest - GUEST_BASE + USER_BASE, offset));
        payload
    };
    let half = RAM_LEN as u64 / 2;
    let (low, high) = (slot(GUEST_BASE, half, 0), slot(GUEST_BASE + half, half, half));
    let fd = || world.ram.fd();
    let fds = [fd(), fd(), fd()];
    assert!(world.is_obeyed(Req::ADD_MEM_REG, &low, &fds[..1]));
    assert!(world.is_obeyed(Req::ADD_MEM_REG, &high, &fds[1..2]));
    assert!(world.is_obeyed(Req::ADD_MEM_REG, &high, &fds[2..]), "said twice is fine");
    world.start_rings();
    assert!(world.link().is_some());
    world.events();

    // A frame that straddles both regions.
    let frame: Vec<u8> = (0..100).collect();
    let buffer = world.put_frame(GUEST_BASE + half - 50, 12, &frame);
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames()[0].1, frame);

    assert!(world.is_obeyed(Req::REM_MEM_REG, &high, &[]));
    assert_eq!(world.events(), [""; 0], "the rings are not in it");
    assert!(world.is_obeyed(Req::REM_MEM_REG, &low, &[]));
    assert!(world.link().is_none());
    assert!(!world.is_obeyed(Req::REM_MEM_REG, &low, &[]), "it is gone");
    let fd = world.ram.fd();
    assert!(world.is_obeyed(Req::ADD_MEM_REG, &low, &[fd]));
    assert!(world.link().is_some(), "the rings found themselves again");
    let buffer = world.put_frame(BUFFERS, 12, b"after the change");
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames()[0].1, b"after the change");
    assert_eq!(world.tx.used().len(), 2);
}

#[test]
fn a_new_memory_table_moves_running_rings_along() {
    let mut world = World::running(LINUX);
    let copy = Ram::new(RAM_LEN);
    copy.write(GUEST_BASE, &world.ram.all());
    world.ram = copy;
    world.rx.ram = std::rc::Rc::clone(&world.ram);
    world.tx.ram = std::rc::Rc::clone(&world.ram);
    world.set_memory();
    assert_eq!(world.events(), [""; 0]);
    let buffer = world.put_frame(BUFFERS, 12, b"in the new memory");
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames()[0].1, b"in the new memory");
}

#[test]
fn ring_addresses_may_change_while_it_runs_but_not_to_nowhere() {
    let mut world = World::running(LINUX);
    let mut moved = Driver::new(&world.ram, GUEST_BASE + 0x6_0000, QUEUE_SIZE);
    assert!(world.is_obeyed(Req::SET_VRING_ADDR, &vring_addr(1, &moved), &[]));
    let buffer = world.put_frame(BUFFERS, 12, b"moved");
    moved.offer(&[buffer], 0);
    assert_eq!(world.poll_frames()[0].1, b"moved");
    moved.desc = GUEST_BASE + RAM_LEN as u64 - 8;
    assert!(!world.is_obeyed(Req::SET_VRING_ADDR, &vring_addr(1, &moved), &[]));
    assert!(!world.is_obeyed(Req::SET_VRING_NUM, &vring_state(1, 128), &[]), "size is fixed");
    assert!(world.link().is_some());
}

#[test]
fn rarp_mtu_and_config_reach_their_places() {
    let mut world = World::connected(1);
    world.events();
    world.say(Req::SEND_RARP, &[0x52, 0x54, 0, 1, 2, 3, 0, 0], &[]);
    assert_eq!(world.events(), ["rarp [82, 84, 0, 1, 2, 3]"]);
    let ask = |offset: u32, size: u32| [offset, size, 0].map(u32::to_ne_bytes).concat();
    assert_eq!(world.ask(Req::GET_CONFIG, &ask(5, 1)).0[12..], [7]);
    assert_eq!(world.ask(Req::GET_CONFIG, &ask(20, 8)).0[12..], [0; 8]);
    assert_eq!(world.ask(Req::GET_CONFIG, &ask(0, 257)).0, [0; 0], "an error has no payload");
    assert_eq!(world.ask(Req::GET_CONFIG, &ask(u32::MAX, 256)).0, [0; 0]);
}

#[test]
fn kicks_are_counted_and_those_of_eventfds_not_read() {
    let mut world = World::running(LINUX);
    rustix::io::write(&world.kick[1], &1_u64.to_ne_bytes()).unwrap();
    assert!(world.port.fd(Source::Kick(1)).is_some());
    world.port.handle_kick(1);
    assert_eq!(world.port.stats().kicks, 1);
    assert_eq!(count(&world.kick[1]), 1, "who waits for it does so edge-triggered");
}

#[test]
fn a_kick_descriptor_that_would_wake_us_for_ever_is_given_up() {
    let mut world = World::connected(1);
    let config = config(world.socket.clone());
    world.anew(VhostUserConfig { allow_unsealed_memory: true, ..config });
    world.negotiate(LINUX);
    world.set_memory();
    world.start_rings();
    world.events();
    let (read, write) = rustix::pipe::pipe().unwrap();
    assert!(world.is_obeyed(Req::SET_VRING_KICK, &1_u64.to_ne_bytes(), &[read]));
    assert_eq!(world.events(), ["unwatch", "watch 1"]);
    rustix::io::write(&write, &1_u64.to_ne_bytes()).unwrap();
    world.port.handle_kick(1);
    assert_eq!(world.events(), [""; 0]);
    drop(write);
    world.port.handle_kick(1);
    assert_eq!(world.events(), ["unwatch", "poll"]);
    assert!(world.link().is_some(), "the ring runs on");
}

#[test]
fn a_legacy_driver_without_version_1_gets_the_short_header() {
    let mut world = World::running(bit::PROTOCOL_FEATURES);
    let buffer = world.put_frame(BUFFERS, 10, b"short header");
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames()[0].1, b"short header");
    world.rx.offer(&[(BUFFERS, 1526)], WRITE);
    world.port.push_to_guest(0, &Default::default(), &[b"to the guest"]).unwrap();
    world.port.flush_to_guest(0);
    assert_eq!(world.rx.used(), [(0, 22)]);
    assert_eq!(world.ram.read(BUFFERS + 10, 12), b"to the guest");
}

#[test]
fn no_inflight_file_is_made_for_more_or_larger_rings_than_there_may_be() {
    for [rings, places] in [[3_u16, 256], [2, 32_769]] {
        let mut world = World::connected(1);
        let mut ask = vec![0; 16];
        ask.extend([rings, places, 0, 0].into_iter().flat_map(u16::to_ne_bytes));
        world.say(Req::GET_INFLIGHT_FD, &ask, &[]);
        let reply = world.front.reply();
        assert!(reply.is_none_or(|(.., file)| file.is_none()), "{rings} rings of {places}");
    }
}

#[test]
fn an_inflight_file_of_the_right_size_is_made() {
    let mut world = World::connected(2);
    let mut ask = vec![0; 16];
    ask.extend([4_u16, 256, 0, 0].into_iter().flat_map(u16::to_ne_bytes));
    let (reply, fd) = world.ask(Req::GET_INFLIGHT_FD, &ask);
    let size = u64::from_ne_bytes(reply[..8].try_into().unwrap());
    // Four regions of 16 + 256 * 16 bytes, each rounded up to 64 (libvhost-user, DPDK).
    assert_eq!(size, 4 * 4160);
    let fd = fd.unwrap();
    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, 4 * 4160);
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    assert_eq!(rustix::fs::fcntl_get_seals(&fd).unwrap(), sealed, "nobody takes it away");
    let small = memfd_create("small", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&small, 4096).unwrap();
    world.say(Req::SET_PROTOCOL_FEATURES, &REPLY_ACK.to_ne_bytes(), &[]);
    assert!(!world.is_obeyed(Req::SET_INFLIGHT_FD, &reply, &[small]), "the file is too small");
}
