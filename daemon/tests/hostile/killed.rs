//! Attacks that used to end the process, and every VM's network with it (docs/safety.md, "What is
//! not promised").

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use nightporterd::closer;
use nightporterd::config::{REGION_TABLES, page_tables_max};
use nightporterd::port::vhost_user::VhostUserConfig;
use nightporterd::spans::PORT_MAX;
use nightporterd::vhost::features::bit;
use nightporterd::vhost::guest_mem::REGIONS_MAX;
use nix::sys::signal::Signal;
use rustix::fs::{
    FallocateFlags, MemfdFlags, OFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals,
    fcntl_setfl, ftruncate, memfd_create,
};
use rustix::pipe::pipe;

use crate::driver::{Driver, GUEST_BASE, Ram, USER_BASE};
use crate::guest::{Guest, PLAIN, RAM_LEN};
use crate::host::{Dir, Host, LIMIT, NOBODY, command_after, copy_for_everybody};
use crate::street::{QUIET, Street};
use crate::world::{
    BUFFERS, LINUX, QUEUE_SIZE, RAM_LEN as WORLD_RAM_LEN, RING_FROM_GUEST, RING_TO_GUEST, Req,
    World, config, mem_table, region,
};

#[test]
fn a_guest_whose_memory_is_cut_off_loses_its_own_port_and_nobody_else_anything() {
    let mut street = Street::new("allow_unsealed_memory = true");
    for times in 1..=2 {
        let ram = Ram::unsealed(usize::try_from(RAM_LEN).unwrap());
        let bad = Guest::boot_in(&street.dir.join("bad"), PLAIN, Rc::clone(&ram));
        street.host.until("bad", |port| port.link);
        ram.cut();
        bad.kicks(1);
        let is_down = |faults| faults == times;
        street.host.until("bad", |port| {
            !port.link && port.vm.as_ref().is_some_and(|vm| is_down(vm.memory_faults))
        });
        street.goes_on();
    }
    // It may come back with memory that is there.
    let _good = Guest::boot(&street.dir.join("bad"), PLAIN);
    street.host.until("bad", |port| port.link);
}

/// A file system in memory, of which only root can have one.
pub(crate) struct Tmpfs(PathBuf);

impl Tmpfs {
    pub(crate) fn mount(at: PathBuf, size: &str) -> Option<Self> {
        std::fs::create_dir(&at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(&at);
        mount.status().unwrap().success().then(|| Self(at))
    }

    /// A file without a name of `len` bytes, of which the first `there` are there and nothing else
    /// finds room. `None`: there is not so much room.
    pub(crate) fn file(&self, len: u64, there: u64) -> Option<File> {
        File::create(self.0.join("ballast")).unwrap();
        let path = self.0.join("ram");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(len).unwrap();
        let has_room = fallocate(&file, FallocateFlags::KEEP_SIZE, 0, there).is_ok();
        self.fill();
        has_room.then_some(file)
    }

    /// Leaves no room in it.
    fn fill(&self) {
        let mut ballast = File::create(self.0.join("ballast")).unwrap();
        while ballast.write(&[1; 4096]).is_ok_and(|n| n > 0) {}
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_guest_that_offers_a_page_for_which_there_is_no_room_loses_its_own_port() {
    let mut street = Street::new("allow_unsealed_memory = true");
    let Some(tmpfs) = Tmpfs::mount(street.dir.join("small"), "1M") else { return };
    let path = tmpfs.0.join("ram");
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    // An honest VMM and an ordinary guest: its rings are in memory, its buffers not yet.
    let ram = Ram::of(file, usize::try_from(RAM_LEN).unwrap());
    let mut bad = Guest::boot_in(&street.dir.join("bad"), PLAIN, ram);
    bad.offer(8);
    tmpfs.fill();
    street.goes_on(); // a broadcast
    let port = street.host.until("bad", |port| !port.link);
    assert_eq!(port.vm.unwrap().memory_faults, 1);
    street.goes_on();
}

#[test]
fn memory_that_may_have_to_be_fetched_is_not_taken() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ram-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    if fcntl_get_seals(&file).is_ok() {
        return; // all of this host's files are in memory
    }
    let mut world = World::connected(1);
    let config = config(world.socket.clone());
    world.anew(VhostUserConfig { allow_unsealed_memory: true, ..config });
    world.negotiate(LINUX);
    let ram = Ram::of(file, WORLD_RAM_LEN);
    let table = mem_table(&[region(GUEST_BASE, WORLD_RAM_LEN as u64, USER_BASE, 0)]);
    assert!(!world.is_obeyed(Req::SET_MEM_TABLE, &table, &[ram.fd()]));
}

/// Lines of the log.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(line)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn memory_that_would_count_against_our_limit_is_warned_of() {
    for (limited, allocated, warns) in
        [(true, false, true), (true, true, false), (false, false, false)]
    {
        let (lines, mut world) = (Lines::default(), World::connected(1));
        let config = config(world.socket.clone());
        world.anew(VhostUserConfig { memory_is_limited: limited, ..config });
        if allocated {
            let all = world.ram.all();
            world.ram.write(GUEST_BASE, &all);
        }
        let writer = lines.clone();
        let log = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(log, || {
            world.negotiate(LINUX);
            world.set_memory();
            world.start_rings();
        });
        assert!(world.link().is_some());
        let said = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert!(said.contains("the guest's driver is running"), "{said}");
        assert_eq!(said.contains("guest memory is not preallocated"), warns, "{said}");
    }
}

#[test]
fn the_process_can_be_neither_dumped_nor_read_by_its_own_user() {
    let dir = Dir::new();
    let config = dir.configure(QUIET, &dir.vm("a", ""));
    let is_root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    let program = copy_for_everybody("dumpable");
    let mut command = Command::new(&program);
    command.arg("--config").arg(&config);
    if is_root {
        chown(dir.join(""), Some(NOBODY), Some(NOBODY)).unwrap();
        command.uid(NOBODY).gid(NOBODY);
    }
    let host = Host::start_as(&dir, &mut command);
    std::fs::remove_file(&program).unwrap();
    // The kernel gives what a process that can be dumped has in /proc to its user (proc(5)).
    let owner = std::fs::metadata(format!("/proc/{}/maps", host.pid())).unwrap().uid();
    assert_eq!(owner, 0);
}

#[test]
fn memory_that_can_shrink_is_taken_only_if_the_configuration_says_so() {
    for (allowed, sealed, taken) in
        [(false, false, false), (false, true, true), (true, false, true)]
    {
        let mut world = World::connected(1);
        let config = config(world.socket.clone());
        world.anew(VhostUserConfig { allow_unsealed_memory: allowed, ..config });
        world.negotiate(LINUX);
        let ram = if sealed { Ram::new(WORLD_RAM_LEN) } else { Ram::unsealed(WORLD_RAM_LEN) };
        let table = mem_table(&[region(GUEST_BASE, WORLD_RAM_LEN as u64, USER_BASE, 0)]);
        assert_eq!(world.is_obeyed(Req::SET_MEM_TABLE, &table, &[ram.fd()]), taken);
        // The log of what is in flight is such memory too: two queues of 64.
        let mut log = region(WORLD_RAM_LEN as u64, 0, 0, 0);
        log.truncate(16);
        log.extend([2, 64, 0, 0].into_iter().flat_map(u16::to_ne_bytes));
        assert_eq!(world.is_obeyed(Req::SET_INFLIGHT_FD, &log, &[ram.fd()]), taken);
    }
}

/// ADD_MEM_REG and REM_MEM_REG: at the same address for guest and front-end.
fn slot(at: u64, len: u64) -> Vec<u8> {
    [vec![0; 8], region(at, len, at, 0)].concat()
}

#[test]
fn files_of_any_size_take_a_bounded_part_of_the_addresses() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("sparse", flags).unwrap();
    ftruncate(&file, PORT_MAX).unwrap(); // without content, it costs nobody anything
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let fd = || [file.try_clone().unwrap()];
    let mut world = World::connected(1);
    world.negotiate(LINUX);
    let part = PORT_MAX / 4;
    for n in 0..4 {
        assert!(world.is_obeyed(Req::ADD_MEM_REG, &slot(n * part, part), &fd()), "{n}");
    }
    assert!(!world.is_obeyed(Req::ADD_MEM_REG, &slot(PORT_MAX, 4096), &fd()));
    assert_eq!(world.port.stats().refused, 1);
    // A neighbour has its own; and what is unmapped can be mapped again.
    let neighbour = World::running(LINUX);
    assert!(neighbour.link().is_some());
    assert!(world.is_obeyed(Req::REM_MEM_REG, &slot(0, part), &[]));
    closer::flush();
    assert!(world.is_obeyed(Req::ADD_MEM_REG, &slot(PORT_MAX, part), &fd()));
}

/// A port with so much memory in a file of this name, which may be cut.
fn world_in(name: &str, len: usize) -> World {
    let ram = Ram::of(File::from(memfd_create(name, MemfdFlags::CLOEXEC).unwrap()), len);
    let mut world = World::connected(1);
    let config = config(world.socket.clone());
    world.anew(VhostUserConfig { allow_unsealed_memory: true, ..config });
    world.rx = Driver::new(&ram, RING_TO_GUEST, QUEUE_SIZE);
    world.tx = Driver::new(&ram, RING_FROM_GUEST, QUEUE_SIZE);
    world.ram = Rc::clone(&ram);
    world.negotiate(LINUX);
    let table = mem_table(&[region(GUEST_BASE, len as u64, USER_BASE, 0)]);
    assert!(world.is_obeyed(Req::SET_MEM_TABLE, &table, &[ram.fd()]));
    world.start_rings();
    assert!(world.link().is_some());
    world
}

#[test]
fn a_frame_whose_memory_has_gone_does_not_leave_as_zeros() {
    let mut world = world_in("cut", 2 << 20);
    world.tx.offer(&[(GUEST_BASE + (1 << 20), 72)], 0);
    ftruncate(world.ram.fd(), 1 << 20).unwrap();
    assert!(world.poll_frames().is_empty());
    world.port.handle_faults();
    assert_eq!(world.port.stats().memory_faults, 1);
}

#[test]
fn a_thousand_missing_pages_are_one_fault_and_one_mapping() {
    let name = format!("storm-{}", std::process::id());
    let mut world = world_in(&name, 16 << 20);
    // A frame in a thousand crumbs, each in a page of its own, of which every other one is not
    // touched; and then the pages are not there any more.
    let crumbs: Vec<_> = (0..1024).map(|n| (GUEST_BASE + (1 << 20) + n * 2 * 4096, 60)).collect();
    world.tx.offer_indirect(BUFFERS, &crumbs, 0);
    ftruncate(world.ram.fd(), 1 << 20).unwrap();
    let mappings = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains(&name)).count()
    };
    assert_eq!(mappings(), 2, "the guest's and the port's");
    assert!(world.poll_frames().is_empty(), "zeros are no frame");
    assert_eq!(mappings(), 1, "the guest's: what is left of the port's would be a thousand");
    world.port.handle_faults();
    assert_eq!(world.port.stats().memory_faults, 1);
}

#[test]
fn page_tables_take_what_check_says_of_them() {
    const GUEST: u64 = 2 << 30;
    let street = Street::new("");
    let file = memfd_create("large", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let ram = Ram::of(File::from(file), usize::try_from(RAM_LEN).unwrap());
    ftruncate(ram.fd(), GUEST).unwrap();
    fcntl_add_seals(ram.fd(), SealFlags::SHRINK).unwrap();
    let mut large = Guest::boot_in(&street.dir.join("bad"), PLAIN | bit::INDIRECT_DESC, ram);
    large.has_memory(GUEST);
    street.host.until("bad", |port| port.link);
    let before = street.host.bytes("VmPTE:");
    // A piece in each page of the tables: what it takes whatever it touches besides.
    let pages = GUEST >> 21;
    large.sends_scattered(0, 2 << 20, pages);
    street.host.until("bad", |port| port.frames_from_port > 0);
    let taken = street.host.bytes("VmPTE:") - before;
    assert!(taken >= (pages - 8) * 4096, "{taken}");
    let most = page_tables_max(GUEST) + 16 * 4096;
    assert!(taken <= most, "{taken} of {most}");
}

#[test]
fn page_tables_of_scattered_pieces_take_what_check_says_of_vmms_that_mean_harm() {
    const LEN: u64 = 32 << 20;
    const MORE: u64 = REGIONS_MAX as u64 - 1;
    let street = Street::new("");
    let mut bad = Guest::boot(&street.dir.join("bad"), PLAIN | bit::INDIRECT_DESC);
    street.host.until("bad", |port| port.link);
    let before = street.host.bytes("VmPTE:");
    let file = memfd_create("sparse", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, 4096 + LEN).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    // As many pieces as there may be, and of each a byte in each page of tables.
    for n in 1..=MORE {
        bad.has_more_memory(n << 34, LEN, file.as_fd());
        bad.sends_scattered(n << 34, 2 << 20, LEN >> 21);
        street.host.until("bad", |port| port.frames_from_port == n);
    }
    let taken = street.host.bytes("VmPTE:") - before;
    assert!(taken >= MORE * (LEN >> 21) * 4096, "{taken}");
    let most = page_tables_max(MORE * LEN) + MORE * REGION_TABLES;
    assert!(taken <= most, "{taken} of {most}");
}

#[test]
fn guest_memory_is_in_no_core_dump() {
    let _world = World::running(LINUX);
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut of_guest = false;
    let flags = maps.lines().filter_map(|line| {
        if line.contains(" /memfd:ram") {
            of_guest = true;
        }
        let flags = line.strip_prefix("VmFlags:")?;
        std::mem::take(&mut of_guest).then_some(flags)
    });
    let flags: Vec<_> = flags.collect();
    assert!(flags.iter().any(|flags| flags.contains(" dd")), "the port's: {flags:?}");
}

#[test]
fn a_log_that_cannot_be_written_ends_nothing() {
    let dir = Dir::new();
    let config = dir.configure(QUIET, &dir.vm("a", ""));
    let full = File::options().write(true).open("/dev/full").unwrap();
    let host = Host::start_with_log(&dir, &config, full.into());
    let _guest = Guest::boot(&dir.join("a"), PLAIN);
    host.until("a", |port| port.link);
    host.until_a_line_is_lost();
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
}

#[test]
fn a_daemon_without_standard_error_or_whose_reader_is_gone_works() {
    for (before, log) in [("exec 2>&-", Stdio::null()), ("true", pipe().unwrap().1.into())] {
        let dir = Dir::new();
        let config = dir.configure(QUIET, &dir.vm("a", ""));
        let mut command = command_after(before, &config);
        let host = Host::start_unheard(&dir, command.stderr(log));
        let _guest = Guest::boot(&dir.join("a"), PLAIN);
        host.until("a", |port| port.link);
        host.signal(Signal::SIGTERM);
        assert_eq!(host.wait(), Some(0), "{before}");
    }
}

/// A pipe that takes nothing more, and nobody reads.
fn stuffed_pipe() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = pipe().unwrap();
    fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&writer, &[b'x'; 4096]).is_ok() {}
    fcntl_setfl(&writer, OFlags::empty()).unwrap();
    (reader, writer)
}

#[test]
fn a_log_whose_reader_stands_holds_up_nobody() {
    let dir = Dir::new();
    let config = dir.configure(QUIET, &dir.vm("a", ""));
    let (_reader, writer) = stuffed_pipe();
    let host = Host::start_with_log(&dir, &config, Stdio::from(writer));
    let _guest = Guest::boot(&dir.join("a"), PLAIN);
    host.until("a", |port| port.link);
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0), "and it can be stopped");
}

#[test]
fn a_front_end_that_connects_in_a_loop_writes_fifty_lines_and_one_a_second() {
    let dir = Dir::new();
    let config = dir.configure(QUIET, &dir.vm("a", ""));
    let log = File::create(dir.join("log")).unwrap();
    let (start, host) = (Instant::now(), Host::start_with_log(&dir, &config, log.into()));
    while host.status().log_lines_lost < 500 {
        for _ in 0..100 {
            match UnixStream::connect(dir.join("a")) {
                Ok(_) => {}
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock, "a full backlog"),
            }
        }
        assert!(start.elapsed() < LIMIT);
    }
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
    let log = std::fs::read_to_string(dir.join("log")).unwrap();
    // In front of each there may be one that says how many were lost since the one before.
    let lines = log.lines().filter(|line| !line.ends_with("log lines were lost")).count() as u64;
    // Of the daemon itself there are a few.
    let most = 50 + 2 * start.elapsed().as_secs() + 20;
    assert!((50..most).contains(&lines), "{lines} lines, at most {most}");
}

#[test]
fn signals_that_mean_nothing_to_a_daemon_do_not_kill_it() {
    let mut street = Street::new("");
    for signal in [
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGALRM,
        Signal::SIGVTALRM,
        Signal::SIGPROF,
        Signal::SIGIO,
        Signal::SIGPWR,
        Signal::SIGXCPU,
        Signal::SIGPIPE,
        Signal::SIGSYS, // nobody's call was refused
    ] {
        street.host.signal(signal);
        street.goes_on();
    }
    assert!(!street.host.status().stopping);
}

#[test]
fn a_guest_that_breaks_the_rules_of_a_ring_loses_its_link_and_is_counted() {
    let mut street = Street::new("");
    let mut bad = Guest::boot(&street.dir.join("bad"), PLAIN);
    street.host.until("bad", |bad| bad.link);
    bad.lies();
    let port = street.host.until("bad", |bad| !bad.link);
    assert_eq!(port.vm.unwrap().ring_faults, 1);
    street.goes_on();
    drop(bad);
    let _next = Guest::boot(&street.dir.join("bad"), PLAIN);
    street.host.until("bad", |bad| bad.link);
}
