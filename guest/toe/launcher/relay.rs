//! Bytes between a program's TCP socket and a TOE socket, until both directions have ended.

use std::ops::Range;

use nightporter_core::toe::control::Ask;
use nightporter_core::toe::vsock::Ports;

use crate::host::Host;
use crate::sys::{self, Fd, Res};
use crate::watch::Owned;

/// Bytes that wait in one direction.
const ROOM: usize = 64 * 1024;

/// One direction.
struct Half {
    from: Fd,
    to: Fd,
    bytes: Vec<u8>,
    waiting: Range<usize>,
    /// `from` has ended.
    has_ended: bool,
    /// And `to` was told.
    is_over: bool,
}

impl Half {
    fn new(from: Fd, to: Fd) -> Self {
        let (bytes, waiting) = (vec![0; ROOM], 0..0);
        Self { from, to, bytes, waiting, has_ended: false, is_over: false }
    }

    fn read(&mut self) -> Res {
        match sys::receive(self.from, &mut self.bytes, libc::MSG_DONTWAIT) {
            Ok(0) => self.has_ended = true,
            Ok(got) => self.waiting = 0..got,
            Err(libc::EAGAIN | libc::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        Ok(())
    }

    fn write(&mut self) -> Res {
        match sys::send(self.to, &self.bytes[self.waiting.clone()]) {
            Ok(sent) => self.waiting.start += sent,
            Err(libc::EAGAIN | libc::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        Ok(())
    }

    /// What it waits for.
    fn interest(&self) -> (Fd, i16) {
        match (self.waiting.is_empty(), self.has_ended) {
            (false, _) => (self.to, libc::POLLOUT),
            (true, false) => (self.from, libc::POLLIN),
            (true, true) => (-1, 0),
        }
    }
}

/// Carries bytes, and gives `tcp` the end that the TOE socket has, and the other way round.
/// `unsent` is dropped when all is sent that the program has written.
pub(crate) fn run<T>(host: &Host, tcp: &Owned, toe: &Owned, ports: Ports, unsent: T) {
    let mut unsent = Some(unsent);
    for fd in [tcp.0, toe.0] {
        sys::set_nonblocking(fd, true);
    }
    let mut out = Half::new(tcp.0, toe.0);
    let mut back = Half::new(toe.0, tcp.0);
    while !out.is_over || !back.is_over {
        let interests = [out.interest(), back.interest()];
        match sys::wait(&interests, -1) {
            Ok(_) | Err(libc::EINTR) => {}
            Err(_) => break,
        }
        if step(&mut out).is_err() || step(&mut back).is_err() {
            // Either side is gone. The other one learns that it has not got everything.
            reset(host, tcp, ports);
            return;
        }
        if back.has_ended && !back.is_over && host.describe(Ask::Describe(ports)).is_err() {
            reset(host, tcp, ports);
            return;
        }
        for half in [&mut out, &mut back] {
            if half.has_ended && !half.is_over && half.waiting.is_empty() {
                let _ = sys::shut(half.to, libc::SHUT_WR);
                half.is_over = true;
            }
        }
        if out.is_over {
            drop(unsent.take());
        }
    }
}

fn step(half: &mut Half) -> Res {
    if half.waiting.is_empty() && !half.has_ended {
        half.read()?;
    }
    if half.waiting.is_empty() { Ok(()) } else { half.write() }
}

/// What is closed after this is reset.
fn reset(host: &Host, tcp: &Owned, ports: Ports) {
    let linger = [1, 0].map(i32::to_ne_bytes).concat();
    let _ = sys::set_option(tcp.0, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
    host.ask(Ask::Linger(ports));
}
