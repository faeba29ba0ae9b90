//! What used to end the process, and every VM's network with it (docs/safety.md, "What is not
//! promised").

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Instant;

use nix::sys::signal::Signal;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::pipe::pipe;

use crate::driver::{GUEST_BASE, Ram, USER_BASE};
use crate::guest::{Guest, PLAIN, RAM_LEN};
use crate::host::{Dir, Host, LIMIT};
use crate::street::{QUIET, Street};
use crate::world::{LINUX, RAM_LEN as WORLD_RAM_LEN, Req, World, config, mem_table, region};

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

#[test]
fn memory_that_can_shrink_is_taken_only_if_the_configuration_says_so() {
    for (allowed, sealed, taken) in
        [(false, false, false), (false, true, true), (true, false, true)]
    {
        let mut world = World::connected(1);
        let config = config(world.socket.clone());
        world.anew(nightporterd::port::vhost_user::VhostUserConfig {
            allow_unsealed_memory: allowed,
            ..config
        });
        world.negotiate(LINUX);
        let ram = if sealed { Ram::new(WORLD_RAM_LEN) } else { Ram::unsealed(WORLD_RAM_LEN) };
        let table = mem_table(&[region(GUEST_BASE, WORLD_RAM_LEN as u64, USER_BASE, 0)]);
        assert_eq!(world.is_obeyed(Req::SET_MEM_TABLE, &table, &[ram.fd()]), taken);
    }
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
    let lines = std::fs::read_to_string(dir.join("log")).unwrap().lines().count() as u64;
    // Of the daemon itself there are a few, and one for each time that lines were lost.
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
    ] {
        street.host.signal(signal);
        street.goes_on();
    }
    assert!(!street.host.status().stopping);
}
