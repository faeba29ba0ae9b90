//! Whether a socket is in the network of the VM itself. Containers of a guest have others, which do
//! not have the VM's addresses: their listeners do not use the VM's ports, and they connect by
//! their own network. Their sockets stay native. And the address from which one of that network
//! connects.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use libc::{AF_INET, AF_INET6, SOL_SOCKET, c_int};
use nightporter_core::toe::control::{Ask, Code, Program, Reply};
use nightporter_core::toe::errno::Errno;

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
pub fn is_home(fd: Fd, ask: impl Fn(Ask) -> Option<Reply>) -> bool {
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
/// would come from that address. (A network without any address lets sockets be bound to all.)
fn is_one_of(wanted: u64, family: c_int, own: SocketAddr) -> bool {
    source(wanted, family, own.ip()) == Some(own.ip())
}

/// The address that a datagram to another one would come from, by the routes of this process's
/// network, if it is that one. Nothing is sent.
fn source(wanted: u64, family: c_int, to: IpAddr) -> Option<IpAddr> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    let fd = sys::new_socket(family, kind, 0).ok()?;
    let from = sys::connect_to(fd, &address::name(family, SocketAddr::new(to, DISCARD)))
        .and_then(|()| sys::name_of(fd));
    let is_there = network(fd) == wanted;
    sys::close_fd(fd);
    from.ok().and_then(|name| address::parse(&name)).map(|from| from.ip()).filter(|_| is_there)
}

/// The address from which TCP would connect a socket that is bound to none.
pub fn source_of(fd: Fd, to: SocketAddr) -> Option<IpAddr> {
    source(network(fd), if to.is_ipv4() { AF_INET } else { AF_INET6 }, to.ip())
}

/// Asks the host whether a socket may connect `from` there, or, if that is unspecified, from the
/// `source` that the guest's routes say. If the host does not know that one as the VM's, it has its
/// choice.
pub fn ask_to_connect(
    from: SocketAddr,
    source: Option<IpAddr>,
    ask: impl Fn(SocketAddr) -> Option<Reply>,
) -> Option<Code> {
    if let Some(source) = source.filter(|_| from.ip().is_unspecified()) {
        let code = ask(SocketAddr::new(source, from.port()))?.code;
        if code != Code::Failed(Errno::AddressNotAvailable) {
            return Some(code);
        }
    }
    ask(from).map(|reply| reply.code)
}
