//! A front-end that we did not write: the `vhost` crate's. The port echoes frames in a thread.

use std::os::fd::AsRawFd;
use std::sync::atomic::{Ordering, fence};
use std::thread;

use nightporterd::port::vhost_user::VhostUserPort;
use nightporterd::vhost::{Event, Source};
use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::driver::{Driver, GUEST_BASE, Ram, USER_BASE, WRITE};
use crate::world::{BUFFERS, LINUX, QUEUE_SIZE, RAM_LEN, RING_FROM_GUEST, RING_TO_GUEST, port};

/// A worker for one port: every frame goes back to the guest. Ends with the connection.
fn echo(mut port: VhostUserPort) -> VhostUserPort {
    let mut buf = vec![0; 70_000];
    loop {
        let sources = [Source::Listener, Source::Connection, Source::Kick(0), Source::Kick(1)];
        let (mut known, mut fds) = (Vec::new(), Vec::new());
        for source in sources {
            if let Some(fd) = port.fd(source) {
                known.push(source);
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
            }
        }
        poll(&mut fds, None).unwrap();
        let ready: Vec<_> = known.into_iter().zip(fds.iter().map(PollFd::revents)).collect();
        drop(fds);
        for (source, _) in ready.into_iter().filter(|(_, events)| !events.is_empty()) {
            match source {
                Source::Listener => port.handle_listener(),
                Source::Connection => port.handle_connection(),
                Source::Kick(vring) => port.handle_kick(vring),
            }
        }
        loop {
            while let Some((hdr, len)) = port.poll_from_guest(0, &mut buf) {
                port.push_to_guest(0, &hdr, &[&buf[..len]]).expect("room for every frame");
            }
            port.flush_from_guest(0);
            port.flush_to_guest(0);
            if !port.enable_kicks_from_guest(0) {
                break;
            }
        }
        while let Some(event) = port.poll_event() {
            if matches!(event, Event::Disconnected(_)) {
                return port;
            }
        }
    }
}

/// Waits for a signal.
fn wait(fd: &EventFd) {
    let epoll = Epoll::new().unwrap();
    let event = EpollEvent::new(EventSet::IN, 0);
    epoll.ctl(ControlOperation::Add, fd.as_raw_fd(), event).unwrap();
    let found = epoll.wait(20_000, &mut [EpollEvent::default()]).unwrap();
    assert_eq!(found, 1, "no signal from the device");
    fd.read().unwrap();
}

/// Everything the crate can ask of a network device, then frames there and back.
#[test]
fn the_vhost_crates_front_end_gets_its_frames_back() {
    // The crate takes the number of queue pairs for the number of queues.
    let (port, socket) = port(2);
    let echo = thread::spawn(move || echo(port));
    let mut front = Frontend::connect(&socket, 2).unwrap();
    negotiate(&mut front);

    let ram = Ram::new(RAM_LEN);
    let memory = ram.fd();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST_BASE,
        memory_size: RAM_LEN as u64,
        userspace_addr: USER_BASE,
        mmap_offset: 0,
        mmap_handle: memory.as_raw_fd(),
    };
    front.set_mem_table(&[region]).unwrap();
    let mut rx = Driver::new(&ram, RING_TO_GUEST, QUEUE_SIZE);
    let mut tx = Driver::new(&ram, RING_FROM_GUEST, QUEUE_SIZE);
    let eventfd = || EventFd::new(EFD_NONBLOCK).unwrap();
    let (kicks, calls) = ([eventfd(), eventfd()], [eventfd(), eventfd()]);
    for (index, driver) in [&rx, &tx].into_iter().enumerate() {
        let user = |guest: u64| guest - GUEST_BASE + USER_BASE;
        let addrs = VringConfigData {
            queue_max_size: 1024,
            queue_size: driver.size,
            flags: 0,
            desc_table_addr: user(driver.desc),
            used_ring_addr: user(driver.used),
            avail_ring_addr: user(driver.avail),
            log_addr: None,
        };
        front.set_vring_num(index, driver.size).unwrap();
        front.set_vring_base(index, 0).unwrap();
        front.set_vring_addr(index, &addrs).unwrap();
        front.set_vring_err(index, &eventfd()).unwrap();
        front.set_vring_call(index, &calls[index]).unwrap();
        front.set_vring_kick(index, &kicks[index]).unwrap();
        front.set_vring_enable(index, true).unwrap();
    }

    for i in 0..10_u8 {
        let (from, to) = (BUFFERS, BUFFERS + 0x1000);
        ram.write(from, &[&[0; 12][..], &[i; 64]].concat());
        rx.offer(&[(to, 2000)], WRITE);
        tx.offer(&[(from, 76)], 0);
        kicks[1].write(1).unwrap();
        // The driver waits for the next frame only, as one that goes back to sleep.
        rx.set_used_event(rx.used_idx);
        fence(Ordering::SeqCst);
        let mut used = rx.used();
        while used.is_empty() {
            wait(&calls[0]);
            used = rx.used();
        }
        assert_eq!(used, [(u32::from(i), 76)]);
        assert_eq!(ram.read(to + 12, 64), [i; 64]);
    }
    assert_eq!(front.get_vring_base(0).unwrap(), 10);
    assert_eq!(front.get_vring_base(1).unwrap(), 10);
    front.remove_mem_region(&region).unwrap();
    front.add_mem_region(&region).unwrap();
    front.reset_device().unwrap();
    drop(front);
    let port = echo.join().unwrap();
    assert_eq!((port.stats().refused, port.stats().ring_faults), (0, 0));
}

fn negotiate(front: &mut Frontend) {
    front.set_owner().unwrap();
    assert_eq!(front.get_features().unwrap() & LINUX, LINUX);
    let protocol = front.get_protocol_features().unwrap();
    let wanted = VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    assert!(protocol.contains(wanted));
    front.set_protocol_features(wanted).unwrap();
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    assert!(LINUX & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0);
    front.set_features(LINUX).unwrap();
    assert_eq!(front.get_queue_num().unwrap(), 2);
    assert!(front.get_max_mem_slots().unwrap() >= 32);
    let (_, mac) = front.get_config(0, 6, VhostUserConfigFlags::empty(), &[0; 6]).unwrap();
    assert_eq!(mac, [2, 0, 0, 0, 0, 7]);
    front.set_backend_request_fd(&EventFd::new(0).unwrap()).unwrap();
    let size = VhostUserInflight { num_queues: 2, queue_size: QUEUE_SIZE, ..Default::default() };
    let (inflight, file) = front.get_inflight_fd(&size).unwrap();
    front.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
}
