//! Options of TOE sockets. The kernel keeps options that mean something to vsock. A native socket
//! that is not connected keeps those that mean something to TCP and IP only, so that the kernel
//! judges them, and gives them back, as it does for every socket.

use std::sync::PoisonError;

use libc::{IPPROTO_TCP, SOL_SOCKET, c_int};
use nightporter_core::toe::control::Ask;

use crate::sys::{self, Fd, Res};
use crate::table::{self, Kind, Socket};
use crate::tcp_only::TCP_ONLY;
use crate::{control, ends};

/// Options of a socket that has no native one to keep them, in the order in which they were set.
pub(crate) type Options = Vec<(c_int, c_int, Vec<u8>)>;

/// Bytes that a program gives or takes at most, and options that are kept.
const BYTES_MAX: usize = 4096;
const OPTIONS_MAX: usize = 64;

/// Options that vsock implements as TCP does. The second numbers are those of a time of 64 bits.
const OF_THE_KERNEL: [c_int; 6] =
    [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO, 66, 67, libc::SO_LINGER, libc::SO_RCVLOWAT];

/// tcpi_state.
const CONNECTING: u8 = 2;
const CLOSED: u8 = 7;

/// Copies the options that the kernel must apply to the socket that replaces this one, or comes
/// from it.
pub(crate) fn carry_over(from: Fd, to: Fd) {
    for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO, libc::SO_LINGER, libc::SO_RCVLOWAT] {
        let mut bytes = [0; 16];
        let read = sys::option(from, SOL_SOCKET, name, &mut bytes);
        let value = read.map_or(&[][..], |len| &bytes[..len.min(16)]);
        let usual: &[u8] = if name == libc::SO_RCVLOWAT { &[1, 0, 0, 0] } else { &[0; 16] };
        if value != &usual[..value.len()] {
            let _ = sys::set_option(to, SOL_SOCKET, name, value);
        }
    }
}

/// SO_LINGER of 0 s: its close() is a reset.
pub(crate) fn lingers_for_nothing(fd: Fd) -> bool {
    let mut bytes = [0; 8];
    sys::option(fd, SOL_SOCKET, libc::SO_LINGER, &mut bytes).is_ok()
        && bytes[..4] != [0; 4]
        && bytes[4..] == [0; 4]
}

/// setsockopt(). `None`: the kernel's.
pub(crate) fn set(fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Option<Res> {
    let tcp_only = TCP_ONLY.contains(&(level, name));
    match table::kind(fd) {
        Kind::Candidate => {
            if tcp_only {
                table::set_kind(fd, Kind::Other);
            }
            return None;
        }
        Kind::Connecting | Kind::Toe | Kind::Unknown => {}
        _ => return None,
    }
    let socket = ends::socket(fd)?;
    if tcp_only {
        return Some(Err(libc::EOPNOTSUPP));
    }
    if level == SOL_SOCKET && OF_THE_KERNEL.contains(&name) {
        let set = sys::set_option(fd, level, name, value);
        if set.is_ok() && name == libc::SO_LINGER {
            let resets = lingers_for_nothing(fd);
            let ask = if resets { Ask::Linger } else { Ask::Unlinger };
            control::ask(ask(socket.ports));
        }
        return Some(set);
    }
    Some(match &socket.native {
        Some(native) => sys::set_option(native.0, level, name, value),
        None => keep(&socket, level, name, value),
    })
}

/// A socket with the options that are kept of `socket`, to be asked and closed.
pub(crate) fn stand_in(socket: &Socket) -> Res<Fd> {
    let fd = sys::new_socket(socket.family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)?;
    let options = socket.options.lock().unwrap_or_else(PoisonError::into_inner);
    for (level, name, value) in options.iter() {
        let _ = sys::set_option(fd, *level, *name, value);
    }
    Ok(fd)
}

fn keep(socket: &Socket, level: c_int, name: c_int, value: &[u8]) -> Res {
    let fd = stand_in(socket)?;
    let set = sys::set_option(fd, level, name, value);
    sys::close_fd(fd);
    set?;
    let mut options = socket.options.lock().unwrap_or_else(PoisonError::into_inner);
    options.retain(|(known_level, known, _)| (*known_level, *known) != (level, name));
    if value.len() > BYTES_MAX || options.len() >= OPTIONS_MAX {
        return Err(libc::ENOBUFS);
    }
    options.push((level, name, value.to_vec()));
    Ok(())
}

/// getsockopt() into as many bytes as there are: how many it has. `None`: the kernel's.
pub(crate) fn get(fd: Fd, level: c_int, name: c_int, to: &mut [u8]) -> Option<Res<usize>> {
    if !matches!(table::kind(fd), Kind::Connecting | Kind::Toe | Kind::Unknown) {
        return None;
    }
    let socket = ends::socket(fd)?;
    let known = match (level, name) {
        (SOL_SOCKET, libc::SO_ERROR) => ends::error(fd),
        (SOL_SOCKET, libc::SO_DOMAIN) => Ok(socket.family),
        (SOL_SOCKET, libc::SO_PROTOCOL) => Ok(IPPROTO_TCP),
        (SOL_SOCKET, kernels) if OF_THE_KERNEL.contains(&kernels) => {
            return Some(sys::option(fd, level, name, to));
        }
        _ => return Some(get_kept(fd, &socket, level, name, to)),
    };
    Some(known.map(|known| {
        let bytes = known.to_ne_bytes();
        let len = to.len().min(bytes.len());
        to[..len].copy_from_slice(&bytes[..len]);
        len
    }))
}

fn get_kept(fd: Fd, socket: &Socket, level: c_int, name: c_int, to: &mut [u8]) -> Res<usize> {
    let len = match &socket.native {
        Some(native) => sys::option(native.0, level, name, to),
        None => {
            let stand_in = stand_in(socket)?;
            let len = sys::option(stand_in, level, name, to);
            sys::close_fd(stand_in);
            len
        }
    }?;
    if (level, name) == (IPPROTO_TCP, libc::TCP_INFO) && len > 0 {
        to[0] = state(fd, socket);
    }
    Ok(len)
}

/// tcpi_state, the first byte of TCP_INFO.
fn state(fd: Fd, socket: &Socket) -> u8 {
    if table::kind(fd) == Kind::Connecting {
        return CONNECTING;
    }
    let answer = control::ask(Ask::Describe(socket.ports));
    match answer {
        Some(answer) if answer.tcp_state != 0 => answer.tcp_state,
        _ => CLOSED,
    }
}
