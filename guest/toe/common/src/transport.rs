//! The way to the host: vsock, and in builds with assertions UNIX sockets, with which a test plays
//! the host.

#[cfg(debug_assertions)]
mod fake;

use libc::{AF_VSOCK, VMADDR_CID_ANY, VMADDR_CID_HOST, VMADDR_PORT_ANY, c_int};
use nightporter_core::limits::TOE_WINDOW_MAX;
use nightporter_core::toe::vsock::Ports;

use crate::sys::{self, Fd, Name, Res};

/// `include/uapi/linux/vm_sockets.h`.
const BUFFER_SIZE: c_int = 0;
const BUFFER_MAX_SIZE: c_int = 2;
const CONNECT_TIMEOUT: c_int = 6;
/// How long the kernel waits for the answer to a connect(). Linux gives up a SYN after 127 s, and
/// the host before that; without this it would be 2 s.
const PATIENCE_S: i64 = 130;

fn address(cid: u32, port: u32) -> Name {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&family().to_ne_bytes());
    bytes[4..8].copy_from_slice(&port.to_ne_bytes());
    bytes[8..12].copy_from_slice(&cid.to_ne_bytes());
    Name::of(&bytes)
}

fn family() -> u16 {
    u16::try_from(AF_VSOCK).expect("40")
}

/// The CID and the port of an address, if it is one of vsock.
fn parse(name: &Name) -> Option<(u32, u32)> {
    let bytes = name.bytes();
    let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    if bytes.get(..2)? != family().to_ne_bytes() {
        return None;
    }
    Some((word(8)?, word(4)?))
}

/// A socket that can be connected to the host, or listen.
pub fn socket() -> Res<Fd> {
    #[cfg(debug_assertions)]
    if fake::is_in_use() {
        return fake::socket();
    }
    sys::new_socket(AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)
}

/// Takes a port of its own for a socket, and returns it.
pub fn take_port(fd: Fd) -> Res<u32> {
    #[cfg(debug_assertions)]
    if fake::is_in_use() {
        return fake::take_port(fd);
    }
    sys::bind_to(fd, &address(VMADDR_CID_ANY, VMADDR_PORT_ANY))?;
    own_port(fd)
}

/// The port of its own that a socket has.
pub fn own_port(fd: Fd) -> Res<u32> {
    let name = sys::name_of(fd)?;
    #[cfg(debug_assertions)]
    if fake::is_in_use() {
        return fake::port(&name, 'g').ok_or(libc::EAFNOSUPPORT);
    }
    parse(&name).map(|(_, port)| port).ok_or(libc::EAFNOSUPPORT)
}

/// How long a program is held up to find out whether the host is there. The daemon answers within
/// a millisecond if it and the guest run; the rest is for a guest that waits for its CPU, whose
/// clock goes on, or is emulated.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Patience {
    /// A connection by TCP is as good, and the next one may go by TOE.
    Brief,
    /// A listener for TCP alone stays so, and programs seldom listen. So it tries even if others
    /// have just failed.
    Long,
}

impl Patience {
    const fn limit_ms(self) -> c_int {
        match self {
            Self::Brief => 250,
            Self::Long => 2_000,
        }
    }
}

/// Connects a blocking socket to a port at which the host, if it is there, answers at once. If it
/// does not, the kernel takes its packet back, which a device without a daemon would keep.
pub fn call_within(fd: Fd, port: u32, patience: Patience) -> Res {
    let limit_ms = patience.limit_ms();
    #[cfg(debug_assertions)]
    if fake::is_in_use() {
        fake::call(fd, port)?;
        let answered = wait(fd, limit_ms * fake::SLOWNESS)?;
        return if answered { fake::outcome(fd) } else { Err(libc::ETIMEDOUT) };
    }
    let (s, us) = (i64::from(limit_ms) / 1_000, i64::from(limit_ms) % 1_000 * 1_000);
    let limit = [s, us].map(i64::to_ne_bytes).concat();
    let _ = sys::set_option(fd, AF_VSOCK, CONNECT_TIMEOUT, &limit);
    call(fd, port)
}

/// Connects a socket to a port of the host. A blocking one waits as long as [`prepare`] says.
pub fn call(fd: Fd, port: u32) -> Res {
    #[cfg(debug_assertions)]
    if fake::is_in_use() {
        return fake::call(fd, port);
    }
    sys::connect_to(fd, &address(VMADDR_CID_HOST, port))
}

/// Lets the kernel wait for the host as long as the host waits for the other side, and take as much
/// as a host has under way. Call it before connect() or listen(), because a host resets a
/// connection whose buffer shrinks.
pub fn prepare(fd: Fd) {
    let wait = [PATIENCE_S, 0].map(i64::to_ne_bytes).concat();
    let room = TOE_WINDOW_MAX.to_ne_bytes();
    let options =
        [(CONNECT_TIMEOUT, &wait[..]), (BUFFER_MAX_SIZE, &room[..]), (BUFFER_SIZE, &room[..])];
    for (name, value) in options {
        // Of a UNIX socket these are no options, and it needs none.
        let _ = sys::set_option(fd, AF_VSOCK, name, value);
    }
}

/// Whether it is a socket of this family.
pub fn is_one(fd: Fd) -> bool {
    #[cfg(debug_assertions)]
    if fake::is_in_use() {
        return fake::ports(fd).is_some();
    }
    sys::number(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) == Ok(AF_VSOCK)
}

/// The ports of a socket that is connected to the host.
pub fn ports(fd: Fd) -> Option<Ports> {
    #[cfg(debug_assertions)]
    if fake::is_in_use() {
        return fake::ports(fd);
    }
    let (_, guest) = parse(&sys::name_of(fd).ok()?)?;
    let (cid, host) = parse(&sys::peer_of(fd).ok()?)?;
    (cid == VMADDR_CID_HOST).then_some(Ports { guest, host })
}

/// Waits until the connect() of a socket comes to its end, so many ms or (-1) for ever.
pub fn wait(fd: Fd, timeout_ms: c_int) -> Res<bool> {
    #[cfg(debug_assertions)]
    if fake::is_in_use() {
        // A UNIX socket polls as connected at once, so this has to wait.
        let limit_ms = if timeout_ms > 0 { timeout_ms } else { fake::PATIENCE_MS };
        return sys::wait(&[(fd, libc::POLLIN)], limit_ms);
    }
    sys::wait(&[(fd, libc::POLLOUT)], timeout_ms)
}

/// How it came to its end. Asked once.
pub fn outcome(fd: Fd) -> Res {
    #[cfg(debug_assertions)]
    if fake::is_in_use() {
        return fake::outcome(fd);
    }
    match sys::number(fd, libc::SOL_SOCKET, libc::SO_ERROR)? {
        // The error may have been reported before; a socket that is not connected has no peer.
        0 => sys::peer_of(fd).map(drop),
        errno => Err(errno),
    }
}
