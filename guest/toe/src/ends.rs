//! How streams end. The kernel ends a stream in the same way whether its other side has finished or
//! is lost. So when a read returns 0 or a write is refused, the library asks the host which of both
//! it was.

use std::net::SocketAddr;
use std::sync::Arc;

use libc::{c_int, ssize_t};
use nightporter_core::toe::control::{Ask, Code};
use nightporter_core::toe::vsock::Ports;

use crate::connect::{self, Progress};
use crate::sys::{self, Fd, Res};
use crate::table::{self, Kind, Socket};
use crate::{control, note, transport};

/// FIONREAD counts no more bytes than this, where the kernel does not count.
const UNREAD_MAX: usize = 256 * 1024;

/// Both addresses of a socket, if the host knows it.
pub(crate) fn addresses(ports: Ports) -> Option<(SocketAddr, SocketAddr)> {
    control::ask(Ask::Describe(ports)).and_then(|answer| answer.addresses)
}

/// The TOE socket behind a descriptor. An unknown descriptor is examined.
pub(crate) fn socket(fd: Fd) -> Option<Arc<Socket>> {
    match table::kind(fd) {
        Kind::Connecting | Kind::Toe => {
            let known = table::lock().sockets.get(&fd).cloned();
            // The hint is stale if the number was closed behind our back.
            if known.is_some() && (table::is_confined() || transport::is_one(fd)) {
                return known;
            }
            table::is_foreign(fd);
            None
        }
        Kind::Unknown => look_at(fd),
        _ => None,
    }
}

/// It was there before this program, or another process has handed it over.
fn look_at(fd: Fd) -> Option<Arc<Socket>> {
    if !table::is_ours() || table::is_confined() {
        return None;
    }
    let Some(ports) = Some(fd).filter(|fd| transport::is_one(*fd)).and_then(transport::ports)
    else {
        table::set_kind(fd, Kind::Other);
        return None;
    };
    let answer = control::ask(Ask::Describe(ports));
    let addresses = answer.and_then(|answer| answer.addresses);
    if answer.is_some() && addresses.is_none() {
        // A vsock connection of the program's own.
        table::set_kind(fd, Kind::Other);
        return None;
    }
    let is_v6 = addresses.is_some_and(|(own, _)| own.is_ipv6());
    let socket = Socket::new(if is_v6 { libc::AF_INET6 } else { libc::AF_INET }, ports);
    if let Some(addresses) = addresses {
        let _ = socket.addresses.set(addresses);
    }
    let socket = Arc::new(socket);
    let mut state = table::lock();
    if table::kind(fd) != Kind::Unknown {
        // Another thread has looked at it meanwhile, or closed it.
        return state.sockets.get(&fd).cloned();
    }
    state.sockets.insert(fd, Arc::clone(&socket));
    table::set_kind(fd, Kind::Toe);
    Some(socket)
}

/// Before data is read or written: a connect() that is under way has to end first.
pub(crate) fn before(fd: Fd, nonblocking: bool) -> Res {
    if table::kind(fd) != Kind::Connecting {
        return Ok(());
    }
    let at_once = nonblocking || sys::is_nonblocking(fd);
    match connect::settle(fd, if at_once { 0 } else { -1 }) {
        // The kernel answers for a native socket, whose connect() may be under way.
        Progress::Established | Progress::ByTcp => Ok(()),
        Progress::Pending => Err(libc::EAGAIN),
        Progress::Interrupted => Err(libc::EINTR),
        Progress::Failed(errno) => Err(errno),
    }
}

/// Nothing is waited for after shutdown(SHUT_RD): whether a read has nothing to do.
pub(crate) fn is_silent(fd: Fd) -> bool {
    table::is_deaf(fd) && sys::wait(&[(fd, libc::POLLIN)], 0) == Ok(false)
}

/// The result of a read that gave an end, or failed.
pub(crate) fn after_read(fd: Fd, got: ssize_t) -> ssize_t {
    let errno = if got < 0 { sys::errno() } else { 0 };
    // After shutdown() the kernel reports a reset as "not connected".
    if table::kind(fd) == Kind::Other || ![0, libc::ENOTCONN, libc::ECONNRESET].contains(&errno) {
        return got;
    }
    let Some(socket) = socket(fd) else {
        sys::set_errno(errno);
        return got;
    };
    if errno == libc::ECONNRESET {
        table::tell(fd);
        sys::set_errno(errno);
        return got;
    }
    match failure(fd, &socket) {
        Some(errno) => {
            sys::set_errno(errno);
            -1
        }
        None => 0,
    }
}

/// The error of a socket whose stream is over, if it was not reported before.
fn failure(fd: Fd, socket: &Socket) -> Option<c_int> {
    if table::was_told(fd) {
        return None;
    }
    let answer = control::ask(Ask::Describe(socket.ports));
    if answer.is_some_and(|answer| answer.code == Code::Done) {
        return None;
    }
    table::tell(fd);
    note!("socket {}:{} was reset", socket.ports.guest, socket.ports.host);
    Some(match answer.map(|answer| answer.code) {
        Some(Code::Failed(errno)) => connect::number(errno),
        // No answer is no clean end.
        _ => libc::ECONNRESET,
    })
}

/// Whether a write goes to a TOE socket, and so without SIGPIPE: it may turn out to be no EPIPE.
pub(crate) fn is_toe(fd: Fd) -> bool {
    match table::kind(fd) {
        Kind::Connecting | Kind::Toe => true,
        Kind::Unknown => socket(fd).is_some(),
        _ => false,
    }
}

/// The result of a write that failed. With `quiet` it raises no SIGPIPE.
pub(crate) fn after_write(fd: Fd, sent: ssize_t, quiet: bool) -> ssize_t {
    if sent >= 0 {
        return sent;
    }
    let mut errno = sys::errno();
    if errno == libc::ENOTCONN || errno == libc::EPIPE {
        let socket = socket(fd);
        if socket.is_some() {
            errno = libc::EPIPE;
        }
        errno = socket.and_then(|socket| failure(fd, &socket)).unwrap_or(errno);
        if errno == libc::EPIPE && !quiet {
            sys::raise_sigpipe();
        }
    } else if errno == libc::ECONNRESET {
        table::tell(fd);
    }
    sys::set_errno(errno);
    -1
}

/// SO_ERROR.
pub(crate) fn error(fd: Fd) -> Res<c_int> {
    if table::kind(fd) == Kind::Connecting {
        return match connect::settle(fd, 0) {
            Progress::Failed(errno) => Ok(errno),
            Progress::ByTcp if connect::wait_for_tcp(fd) => {
                sys::number(fd, libc::SOL_SOCKET, libc::SO_ERROR)
            }
            // Event loops poll again after it.
            Progress::ByTcp => Ok(libc::EINPROGRESS),
            Progress::Established | Progress::Pending | Progress::Interrupted => Ok(0),
        };
    }
    let socket = socket(fd);
    let known = sys::number(fd, libc::SOL_SOCKET, libc::SO_ERROR)?;
    let Some(socket) = socket else { return Ok(known) };
    if known != 0 {
        table::tell(fd);
        return Ok(known);
    }
    // Only if the other side is gone is there anything to ask.
    if sys::wait(&[(fd, libc::POLLRDHUP)], 0) == Ok(true) {
        return Ok(failure(fd, &socket).unwrap_or(0));
    }
    Ok(0)
}

/// shutdown(). In TCP it is local that one side no longer wants to read. In vsock a host cannot
/// tell it from close(): bytes that are under way to this socket would be lost, and those that it
/// has written with them. So the kernel is told only that no more is written.
pub(crate) fn shutdown(fd: Fd, how: c_int) -> Res {
    if !(libc::SHUT_RD..=libc::SHUT_RDWR).contains(&how) {
        return Err(libc::EINVAL);
    }
    if table::kind(fd) == Kind::Connecting && connect::settle(fd, 0) != Progress::Established {
        return Err(libc::ENOTCONN);
    }
    if table::was_told(fd) {
        return Err(libc::ENOTCONN);
    }
    let shut = if how == libc::SHUT_RD { Ok(()) } else { sys::shut(fd, libc::SHUT_WR) };
    if how != libc::SHUT_WR {
        table::deafen(fd);
        // As in TCP, unread bytes stay readable, and threads that wait in read() wake.
        if let Some(socket) = socket(fd) {
            control::ask(Ask::Deafen(socket.ports));
        }
    }
    shut
}

/// How many bytes can be read, up to a bound.
pub(crate) fn unread(fd: Fd) -> c_int {
    let mut bytes = vec![0; UNREAD_MAX];
    let got = sys::receive(fd, &mut bytes, libc::MSG_PEEK | libc::MSG_DONTWAIT);
    got.ok().and_then(|got| c_int::try_from(got).ok()).unwrap_or(0)
}
