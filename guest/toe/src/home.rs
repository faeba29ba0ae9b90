//! Whether a socket is in the network of the VM itself. Containers of a guest have others, which do
//! not have the VM's addresses: their listeners do not use the VM's ports, and they connect by
//! their own network. Their sockets stay native.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use libc::{AF_INET, AF_INET6, SOL_SOCKET, c_int};
use nightporter_core::toe::control::{Ask, Program, Reply};

use crate::address;
use crate::sys::{self, Fd};

/// `include/uapi/asm-generic/socket.h`, since Linux 5.14: a number of the network, never 0.
const SO_NETNS_COOKIE: c_int = 71;
/// RFC 863's port.
const DISCARD: u16 = 9;
/// The VM may be given other addresses: a network that has none of them is asked about again after
/// so long.
const AWAY_MS: i64 = 10_000;

/// The network that is known to have an address of the VM, and the one that is known to have none.
static HOME: AtomicU64 = AtomicU64::new(0);
static AWAY: AtomicU64 = AtomicU64::new(0);
static AWAY_UNTIL_MS: AtomicI64 = AtomicI64::new(0);

/// Whether a socket is home, in a process whose network is the socket's; `ask` asks the host.
pub(crate) fn is_home(fd: Fd, ask: impl Fn(Ask) -> Option<Reply>) -> bool {
    let network = network(fd);
    if network != 0 && network == HOME.load(Ordering::Relaxed) {
        return true;
    }
    let is_away = network != 0 && network == AWAY.load(Ordering::Relaxed);
    if is_away && sys::now_ms() < AWAY_UNTIL_MS.load(Ordering::Relaxed) {
        return false;
    }
    for family in [AF_INET, AF_INET6] {
        // Without an answer nothing is known of it.
        let Some(reply) = ask_for_own(family, &ask) else { return false };
        if reply.addresses.is_some_and(|(own, _)| is_one_of(network, family, own)) {
            HOME.store(network, Ordering::Relaxed);
            return true;
        }
    }
    AWAY.store(network, Ordering::Relaxed);
    AWAY_UNTIL_MS.store(sys::now_ms() + AWAY_MS, Ordering::Relaxed);
    false
}

/// 0 before Linux 5.14.
fn network(fd: Fd) -> u64 {
    let mut bytes = [0; 8];
    let read = sys::option(fd, SOL_SOCKET, SO_NETNS_COOKIE, &mut bytes);
    read.map_or(0, |_| u64::from_ne_bytes(bytes))
}

/// An answer with the VM's first address of a family, which the host puts into every answer to
/// `Connect`, also for the unspecified address.
fn ask_for_own(family: c_int, ask: impl Fn(Ask) -> Option<Reply>) -> Option<Reply> {
    let nowhere = SocketAddr::new(address::unspecified(family), 1);
    ask(Ask::Connect { guest: 0, from: nowhere, to: nowhere, program: Program::NONE })
}

/// Whether this process's network has the address, and is that one. A datagram to an own address
/// would come from that address; nothing is sent. (A network without any address lets sockets be
/// bound to all.)
fn is_one_of(wanted: u64, family: c_int, own: SocketAddr) -> bool {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    let Ok(fd) = sys::new_socket(family, kind, 0) else { return false };
    let from = sys::connect_to(fd, &address::name(family, SocketAddr::new(own.ip(), DISCARD)))
        .and_then(|()| sys::name_of(fd));
    let is_own = from.ok().and_then(|name| address::parse(&name)).map(|from| from.ip());
    let has_it = network(fd) == wanted && is_own == Some(own.ip());
    sys::close_fd(fd);
    has_it
}
