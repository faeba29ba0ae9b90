//! Attacks that used to stop the worker, and every VM's network with it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nightporter_api::Change;
use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::set_socket_linger;
use rustix::pipe::pipe;

use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, Host, LIMIT, command_after, run};
use crate::street::{QUIET, Street};

#[test]
fn a_full_eventfd_without_o_nonblock_takes_down_its_own_port() {
    let mut street = Street::new("ack_offload = false");
    let mut bad = Guest::boot(&street.dir.join("bad"), PLAIN);
    bad.offer(8);
    bad.stuffs_its_signal();
    // A broadcast of a neighbour reaches it too, and it wants to be told.
    street.goes_on();
    let port = street.host.until("bad", |port| !port.link);
    assert_eq!(port.vm.unwrap().blocked, 1);
    street.goes_on();
    // And it does not do so again at once: nobody takes its next connection in. A socket that rests
    // is looked at every second.
    let mut again = UnixStream::connect(street.dir.join("bad")).unwrap();
    again.set_read_timeout(Some(Duration::from_millis(2500))).unwrap();
    Guest::begins_to_ask_for_features(&again);
    assert_eq!(again.read(&mut [0; 20]).unwrap_err().kind(), ErrorKind::WouldBlock);
    street.goes_on();
}

/// A TCP socket with bytes that nobody takes, whose close waits an hour for them.
pub(crate) fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    while let Ok(n) = stream.write(&[7; 65536]) {
        assert!(n > 0);
    }
    stream.set_nonblocking(false).unwrap();
    set_socket_linger(&stream, Some(Duration::from_secs(3600))).unwrap();
    (stream, peer)
}

#[test]
fn a_descriptor_whose_closing_waits_holds_up_nobody() {
    let mut street = Street::new("");
    let (stream, _peer) = lingering();
    let front = UnixStream::connect(street.dir.join("bad")).unwrap();
    Guest::says_half(&front, &[stream.as_fd()]);
    // Ours must not be the last.
    drop(stream);
    Guest::says_the_rest(&front);
    street.goes_on();
    drop(front);
    street.goes_on();
    street.host.signal(Signal::SIGTERM);
    assert_eq!(street.host.wait(), Some(0));
}

#[test]
fn who_passes_his_own_connection_keeps_his_own_port_until_it_is_removed() {
    let mut street = Street::new("");
    let path = street.dir.join("bad");
    // The daemon holds both ends of it then.
    let stream = UnixStream::connect(&path).unwrap();
    Guest::says_half(&stream, &[stream.as_fd()]);
    drop(stream);
    let mut second = UnixStream::connect(&path).unwrap();
    second.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(second.read(&mut [0; 20]).unwrap(), 0, "it is turned away");
    street.goes_on();
    street.host.change(Change::RemoveVm { name: "bad".into(), drain_ms: None });
    street.host.change(Change::Reload {}); // the file still has it
    let _next = Guest::boot(&path, PLAIN);
    street.host.until("bad", |bad| bad.link);
}

/// A socket in whose queue another one waits that nobody can defuse: closing it takes an hour.
pub(crate) fn unclosable() -> (UnixStream, TcpStream) {
    let (stream, peer) = lingering();
    let (outer, inner) = UnixStream::pair().unwrap();
    Guest::says_half(&inner, &[stream.as_fd()]);
    (outer, peer)
}

/// Passes a descriptor to the front-end's socket at `path`, and goes.
fn pass(path: &Path, fd: OwnedFd) {
    let front = UnixStream::connect(path).unwrap();
    Guest::says_half(&front, &[fd.as_fd()]);
    drop(fd);
    Guest::says_the_rest(&front);
}

#[test]
fn who_makes_a_closer_stand_keeps_only_what_is_its_own_from_being_closed() {
    let dir = Dir::new();
    let config = dir.configure(QUIET, &(dir.vm("bad", "") + &dir.vm("good", "")));
    let host = Host::start(&dir, &config);
    let (outer, _peer) = unclosable();
    pass(&dir.join("bad"), outer.into());
    for _ in 0..3 {
        let (reader, writer) = pipe().unwrap();
        pass(&dir.join("good"), writer);
        let mut fds = [PollFd::new(&reader, PollFlags::IN)];
        let limit = Timespec { tv_sec: i64::try_from(LIMIT.as_secs()).unwrap(), tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "it is closed");
    }
    // And it cannot use up our descriptors by what is never closed.
    for _ in 0..3000 {
        let _ = crate::street::connect_at_once(&dir.join("bad"));
        if host.descriptors() > 1000 {
            break;
        }
    }
    host.status();
    assert!(host.descriptors() < 1000, "{} descriptors", host.descriptors());
    pass(&dir.join("good"), pipe().unwrap().1);
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
}

#[test]
fn without_descriptors_operators_are_served_and_nobody_is_told_so_all_the_time() {
    let dir = Dir::new();
    let vms: String = (0..30).map(|n| dir.vm(&format!("vm{n}"), "")).collect();
    let config = dir.configure("metrics = \"127.0.0.1:0\"", &vms);
    // Some twenty-three of its own, a listener for each VM, and six connections.
    let mut command = command_after("ulimit -n 59", &config);
    let host = Host::start_unheard(&dir, command.stderr(Stdio::null()));
    let a_hundred_answers = || {
        let start = Instant::now();
        (0..100).for_each(|_| _ = host.status());
        start.elapsed()
    };
    let with_descriptors = a_hundred_answers();
    let fronts: Vec<_> =
        (0..30).map(|n| UnixStream::connect(dir.join(&format!("vm{n}"))).unwrap()).collect();
    // Those who found no place wait in front of sockets that rest.
    let without = a_hundred_answers();
    let most = 4 * with_descriptors + Duration::from_secs(1);
    assert!(without < most, "{without:?} for a hundred answers, {with_descriptors:?} before");
    let status = host.status();
    assert_eq!(status.log_lines_lost, 0);
    // The last is served as soon as there are descriptors again.
    let (last, others) = fronts.split_last().unwrap();
    others.iter().for_each(|front| front.shutdown(Shutdown::Both).unwrap());
    last.set_read_timeout(Some(LIMIT)).unwrap();
    Guest::asks_for_features(last);
}

#[test]
fn a_socket_path_where_too_many_wait_already_is_taken() {
    let dir = Dir::new();
    let path = dir.join("a");
    let _listener = UnixListener::bind(&path).unwrap();
    // std listens with a backlog of its own; a connection that would wait for a place says so.
    let mut waiting = Vec::new();
    loop {
        match crate::street::connect_at_once(&path) {
            Ok(stream) => waiting.push(stream),
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::WouldBlock);
                break;
            }
        }
    }
    let config = dir.configure(QUIET, &dir.vm("a", ""));
    let output = run(&["--config", config.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("vm a: ") && said.contains("taken by a running"), "{said}");
}
