//! getsockname() and getpeername(): the addresses of the IP world, as the host knows them.

use crate::connect::{self, Progress};
use crate::sys::{self, Fd, Name, Res};
use crate::table::{self, Kind};
use crate::{address, ends, listen};

/// getsockname(). `None`: the kernel's.
pub(crate) fn own(fd: Fd) -> Option<Res<Name>> {
    match table::kind(fd) {
        Kind::Listener => {
            let listener = listen::of(fd)?;
            return Some(sys::name_of(listener.native.0));
        }
        Kind::Connecting | Kind::Toe | Kind::Unknown => {}
        _ => return None,
    }
    let socket = ends::socket(fd)?;
    let known = socket.addresses.get().copied();
    let known = known.or_else(|| ends::addresses(socket.ports));
    Some(match (known, &socket.native) {
        (Some((own, other)), _) => {
            let _ = socket.addresses.set((own, other));
            Ok(address::name(socket.family, own))
        }
        (None, Some(native)) => sys::name_of(native.0),
        (None, None) => Ok(address::any(socket.family, 0)),
    })
}

/// getpeername(). `None`: the kernel's.
pub(crate) fn other(fd: Fd) -> Option<Res<Name>> {
    match table::kind(fd) {
        Kind::Listener => return Some(Err(libc::ENOTCONN)),
        Kind::Connecting => match connect::settle(fd, 0) {
            Progress::Established => {}
            Progress::ByTcp => {
                connect::wait_for_tcp(fd);
                return None;
            }
            _ => return Some(Err(libc::ENOTCONN)),
        },
        Kind::Toe | Kind::Unknown => {}
        _ => return None,
    }
    let socket = ends::socket(fd)?;
    if table::was_told(fd) {
        return Some(Err(libc::ENOTCONN));
    }
    let known = socket.addresses.get().copied();
    let known = known.or_else(|| ends::addresses(socket.ports));
    let Some((own, other)) = known else { return Some(Err(libc::ENOTCONN)) };
    let _ = socket.addresses.set((own, other));
    Some(Ok(address::name(socket.family, other)))
}
