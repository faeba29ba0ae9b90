//! Guest memory that makes whoever touches it sleep inside the kernel, where no signal wakes him.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nightporter_api::PortStatus;
use nightporter_core::toe::vsock::Ports;
use nightporter_core::wire::vsock::Op;
use nightporterd::vhost::features::bit;
use nix::libc;
use nix::sys::signal::Signal;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use vhost::vhost_user::message::FrontendReq as Req;
use vm_memory::{FileOffset, MmapRegion};

use crate::driver::{GUEST_BASE, Ram, USER_BASE};
use crate::guest::{Guest, PLAIN, RAM_LEN};
use crate::host::{Host, LIMIT};
use crate::huge_pages::HugePages;
use crate::sockets::SocketGuest;
use crate::street::Street;
use crate::world::{LINUX, World, mem_table, region};

/// Bytes of guest memory, of which the part behind [`RAM_LEN`] has holes.
const LARGE: u64 = 256 << 20;

/// Memory of which nobody can take anything away, as QEMU has it.
pub(crate) fn sealed_memory(name: &str, len: u64) -> Rc<Ram> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let ram = Ram::of(File::from(file), usize::try_from(RAM_LEN).unwrap());
    ftruncate(ram.fd(), len).unwrap();
    fcntl_add_seals(ram.fd(), SealFlags::SHRINK).unwrap();
    ram
}

/// Punches a hole over everything behind the rings again and again, as long as `goes_on`.
fn punches_holes(file: &OwnedFd, goes_on: &AtomicBool, holes: &AtomicU64) {
    let (file, hole) = (file.as_fd(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE);
    while goes_on.load(Ordering::Relaxed) {
        fallocate(file, FallocateFlags::empty(), RAM_LEN, LARGE - RAM_LEN).unwrap();
        fallocate(file, hole, RAM_LEN, LARGE - RAM_LEN).unwrap();
        holes.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn who_punches_holes_all_the_time_loses_his_port() {
    let mut street = Street::new("");
    let ram = sealed_memory("holes", LARGE);
    let file = ram.fd();
    let mut bad = Guest::boot_in(&street.dir.join("bad"), PLAIN | bit::INDIRECT_DESC, ram);
    bad.has_memory(LARGE);
    street.host.until("bad", |port| port.link);
    let (goes_on, holes) = (AtomicBool::new(true), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| punches_holes(&file, &goes_on, &holes));
        let (start, mut waiting) = (Instant::now(), 0);
        // Frames in pieces of which each is in a page of the hole.
        while street.host.port("bad").link && start.elapsed() < LIMIT {
            for _ in waiting..64 {
                bad.sends_scattered(RAM_LEN, 1 << 20, 200);
            }
            waiting = 64 - bad.taken();
            street.goes_on();
        }
        goes_on.store(false, Ordering::Relaxed);
    });
    let vm = street.host.port("bad").vm.unwrap();
    let holes = holes.load(Ordering::Relaxed);
    assert_eq!((vm.blocked, vm.memory_faults), (1, 0), "after {holes} holes");
    street.goes_on();
}

/// Maps a part of a file so many times, with all of its pages.
pub(crate) fn mapped(file: &OwnedFd, from: u64, len: u64, times: usize) -> Vec<MmapRegion> {
    let map = |_| {
        let part = FileOffset::new(File::from(file.try_clone().unwrap()), from);
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let (len, prot) = (usize::try_from(len).unwrap(), libc::PROT_READ | libc::PROT_WRITE);
        MmapRegion::build(Some(part), len, prot, flags).unwrap()
    };
    (0..times).map(map).collect()
}

/// Makes one hole over all of that; how long it takes.
fn punches_once(file: &OwnedFd, len: u64) -> Duration {
    let (start, hole) = (Instant::now(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE);
    fallocate(file, hole, RAM_LEN, len).unwrap();
    start.elapsed()
}

#[test]
fn who_makes_one_hole_for_which_the_worker_sleeps_long_loses_his_port_at_once() {
    const HOLE: u64 = 16 << 20;
    let mut street = Street::new("");
    let ram = sealed_memory("mapped", RAM_LEN + HOLE);
    let file = ram.fd();
    let mut bad = Guest::boot_in(&street.dir.join("bad"), PLAIN | bit::INDIRECT_DESC, ram);
    bad.has_memory(RAM_LEN + HOLE);
    street.host.until("bad", |port| port.link);
    // As often as it takes here to make one sleep long enough.
    let mut times = 500;
    loop {
        let _maps = mapped(&file, RAM_LEN, HOLE, times);
        if punches_once(&file, HOLE) > Duration::from_millis(500) {
            break;
        }
        times *= 2;
    }
    let _maps = mapped(&file, RAM_LEN, HOLE, times);
    let took = thread::scope(|scope| {
        let puncher = scope.spawn(|| punches_once(&file, HOLE));
        let mut waiting = 0;
        while !puncher.is_finished() {
            for _ in waiting..32 {
                bad.sends_scattered(RAM_LEN, 4096 * 16, HOLE / (4096 * 16));
            }
            waiting = 32 - bad.taken();
        }
        puncher.join().unwrap()
    });
    let port = street.host.until("bad", |port| !port.link);
    assert_eq!(port.vm.unwrap().blocked, 1, "after one hole, which took {took:?}");
    street.goes_on();
}

/// How often the worker lost its core although it could have gone on.
fn times_descheduled(host: &Host) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", host.pid())).unwrap();
    let mut lines = status.lines();
    let count = lines.find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

#[test]
fn a_worker_that_loses_its_core_or_is_stopped_blames_nobody() {
    const TIMES: u64 = 100;
    let mut street = Street::new("");
    let ram = sealed_memory("honest", LARGE);
    let mut honest = Guest::boot_in(&street.dir.join("bad"), PLAIN | bit::INDIRECT_DESC, ram);
    honest.has_memory(LARGE);
    street.host.until("bad", |port| port.link);
    // On one core with two threads that never wait. Only the worker: who looks at it has time.
    let mut core = CpuSet::new();
    core.set(0);
    let worker = Pid::from_raw(i32::try_from(street.host.pid()).unwrap());
    sched_setaffinity(worker, &core).unwrap();
    let goes_on = AtomicBool::new(true);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                sched_setaffinity(None, &core).unwrap();
                while goes_on.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let (first, mut waiting, start) = (times_descheduled(&street.host), 0, Instant::now());
        for round in 0.. {
            for _ in waiting..64 {
                honest.sends_scattered(RAM_LEN, 1 << 20, 200);
            }
            waiting = 64 - honest.taken();
            if round % 8 == 0 {
                street.host.signal(Signal::SIGSTOP);
                street.host.signal(Signal::SIGCONT);
            }
            street.goes_on();
            if times_descheduled(&street.host) > first + TIMES {
                break;
            }
            assert!(start.elapsed() < 3 * LIMIT, "it has its core for itself");
        }
        goes_on.store(false, Ordering::Relaxed);
    });
    let port = street.host.port("bad");
    assert_eq!((port.link, port.vm.unwrap().blocked), (true, 0));
}

#[test]
fn who_makes_the_daemon_wait_by_one_device_loses_the_other_too() {
    for by_card in [true, false] {
        let mut street = Street::new("ips = [\"10.0.0.9\"]\ntoe = true\nack_offload = false");
        let [at_card, at_toe] = ["bad", "bad-toe.sock"].map(|name| street.dir.join(name));
        let mut card = Guest::boot(&at_card, PLAIN);
        let mut sockets = SocketGuest::boot(&at_toe);
        let runs = |port: &PortStatus| port.vm.as_ref().unwrap().toe.as_ref().unwrap().running;
        street.host.until("bad", |port| port.link && runs(port));
        if by_card {
            card.offer(8);
            card.stuffs_its_signal();
            street.goes_on(); // a broadcast
        } else {
            sockets.stuffs_its_signals();
            let nowhere = Ports { guest: 1024, host: 1 };
            assert!(sockets.send(&sockets.header(nowhere, Op::Request), &[]));
        }
        street.host.until("bad", |port| !port.link && !runs(port));
        // Neither takes anybody in. A socket that rests is looked at every second.
        for at in [at_card, at_toe] {
            let mut again = UnixStream::connect(&at).unwrap();
            again.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
            Guest::begins_to_ask_for_features(&again);
            assert_eq!(again.read(&mut [0; 20]).unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        street.goes_on();
    }
}

fn huge_file(size: MemfdFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    memfd_create("huge", flags | size).unwrap()
}

#[test]
fn pages_of_a_gibibyte_are_taken_only_if_they_are_there() {
    let Some(_reserved) = HugePages::reserve(30, 1) else { return };
    let mut world = World::connected(1);
    world.negotiate(LINUX);
    let file = huge_file(MemfdFlags::HUGE_1GB);
    ftruncate(&file, 1 << 30).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let table = mem_table(&[region(GUEST_BASE, 1 << 30, USER_BASE, 0)]);
    let fd = || [file.try_clone().unwrap()];
    assert!(!world.is_obeyed(Req::SET_MEM_TABLE, &table, &fd()));
    fallocate(&file, FallocateFlags::empty(), 0, 1 << 30).unwrap();
    assert!(world.is_obeyed(Req::SET_MEM_TABLE, &table, &fd()));
}

#[test]
fn a_guest_on_huge_pages_that_nobody_has_touched_has_its_frames_read() {
    const PAGES: u64 = 64;
    let Some(_reserved) = HugePages::reserve(21, PAGES) else { return };
    let mut street = Street::new("");
    let ram = Ram::of(huge_file(MemfdFlags::HUGE_2MB).into(), usize::try_from(RAM_LEN).unwrap());
    ftruncate(ram.fd(), PAGES << 21).unwrap();
    fcntl_add_seals(ram.fd(), SealFlags::SHRINK).unwrap();
    let mut guest = Guest::boot_in(&street.dir.join("bad"), PLAIN | bit::INDIRECT_DESC, ram);
    guest.has_memory(PAGES << 21);
    street.host.until("bad", |port| port.link);
    for _ in 0..32 {
        guest.sends_scattered(RAM_LEN, 2 << 20, PAGES - (RAM_LEN >> 21));
    }
    street.host.until("bad", |port| port.frames_from_port == 32);
    street.goes_on();
    let port = street.host.port("bad");
    assert_eq!((port.link, port.vm.unwrap().blocked), (true, 0));
}
