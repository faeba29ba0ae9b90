//! What used to stop the worker, and every VM's network with it.

use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use nix::sys::signal::Signal;
use rustix::net::sockopt::set_socket_linger;

use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, run};
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
    assert!(street.host.status().stalls > 0);
    street.goes_on();
}

/// A TCP socket with bytes that nobody takes, whose close waits an hour for them.
fn lingering() -> (TcpStream, TcpStream) {
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
