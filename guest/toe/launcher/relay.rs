//! Bytes between a program's TCP socket and a TOE socket, until both directions have ended.

use std::ops::Range;

use nightporter_core::toe::control::Ask;
use nightporter_core::toe::vsock::Ports;

use crate::host::HostControl;
use crate::sys::{self, Fd, Res};
use crate::watch::Owned;

/// Bytes that wait in one direction.
const ROOM: usize = 64 * 1024;
/// How often a TOE socket without an awaited event is looked at, ms.
const LOOK_MS: i32 = 500;

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

    /// The event that it waits for.
    fn interest(&self) -> (Fd, i16) {
        match (self.waiting.is_empty(), self.has_ended) {
            (false, _) => (self.to, libc::POLLOUT),
            (true, false) => (self.from, libc::POLLIN),
            (true, true) => (-1, 0),
        }
    }

    /// All data of `from` is with `to`, which has to be told.
    fn is_at_end(&self) -> bool {
        self.has_ended && !self.is_over && self.waiting.is_empty()
    }

    fn end(&mut self) {
        let _ = sys::shut(self.to, libc::SHUT_WR);
        self.is_over = true;
    }
}

/// Carries bytes, and gives `tcp` the end that the TOE socket has, and the other way round.
/// `unsent` is dropped when all is sent that the program has written.
///
/// Until a direction has come to its clean end, the close of the socket that it leads to is a reset
/// (`join` and `lead_in` have said so): if the launcher is killed, the kernel closes both.
pub(crate) fn run<T>(host: &HostControl, tcp: &Owned, toe: &Owned, ports: Ports, unsent: T) {
    let mut unsent = Some(unsent);
    for fd in [tcp.0, toe.0] {
        sys::set_nonblocking(fd, true);
    }
    let mut out = Half::new(tcp.0, toe.0);
    let mut back = Half::new(toe.0, tcp.0);
    while !out.is_over || !back.is_over {
        if turn(host, ports, &mut out, &mut back).is_err() {
            // Either side is gone. The other one learns that it has not got everything.
            resets_on_close(tcp.0, true);
            host.ask(Ask::Linger(ports));
            return;
        }
        if out.is_over {
            drop(unsent.take());
        }
    }
}

/// Waits until there is something to do, and does it.
fn turn(host: &HostControl, ports: Ports, out: &mut Half, back: &mut Half) -> Res {
    let (tcp, toe) = (out.from, out.to);
    // A socket without an awaited event may still be reset. TCP's reset wakes a poll().
    let unawaited = if out.is_over { tcp } else { -1 };
    let limit_ms = if back.is_over { LOOK_MS } else { -1 };
    match sys::wait(&[out.interest(), back.interest(), (unawaited, 0)], limit_ms) {
        Ok(_) | Err(libc::EINTR) => {}
        Err(errno) => return Err(errno),
    }
    if out.is_over && sys::number(tcp, libc::SOL_SOCKET, libc::SO_ERROR) != Ok(0) {
        return Err(libc::ECONNRESET);
    }
    if back.is_over {
        // vsock's does not, but a write fails, even of nothing.
        sys::send(toe, &[])?;
    }
    step(out)?;
    step(back)?;
    if out.is_at_end() {
        host.describe(Ask::Unlinger(ports)).map_err(|_| libc::ECONNRESET)?;
        out.end();
    }
    if back.is_at_end() {
        host.describe(Ask::Describe(ports)).map_err(|_| libc::ECONNRESET)?;
        resets_on_close(tcp, false);
        back.end();
    }
    Ok(())
}

fn step(half: &mut Half) -> Res {
    if half.waiting.is_empty() && !half.has_ended {
        half.read()?;
    }
    if half.waiting.is_empty() { Ok(()) } else { half.write() }
}

/// Whether the close of a TCP socket is a reset.
pub(crate) fn resets_on_close(tcp: Fd, resets: bool) {
    let linger = [i32::from(resets), 0].map(i32::to_ne_bytes).concat();
    let _ = sys::set_option(tcp, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
}
