//! connect(): a program's socket is connected with a TOE socket.

use std::net::SocketAddr;
use std::sync::Arc;

use libc::c_int;
use nightporter_core::toe::control::{Ask, Code, SOCKETS};
use nightporter_core::toe::vsock::Ports;

use crate::calls::{Done, LOOPBACK, Pair, World, any_port, name};
use crate::sys::{self, Name, Res};
use crate::transport::Patience;
use crate::watch::{Call, Owned};
use crate::{address, home, transport};

/// tcpi_state of a socket that is neither connected nor about to be.
const CLOSED: u8 = 7;
/// How often it is looked whether a signal waits for a connect() to end, ms.
const LOOK_MS: c_int = 100;
/// A connect() that must not block is given so much time, ms. Guest TCP, which does not hold up the
/// program, has its turn then. A host that is there usually knows within a round trip.
const LIMIT_MS: c_int = 500;

/// How often a connect() is looked after before it is left to guest TCP. `None`: until its end.
/// Looks are counted, so a guest that waits for its CPU meanwhile has waited for one.
fn looks_max(fd: &Owned) -> Option<c_int> {
    let limit_ms = match sys::timeout_ms(fd.0, libc::SO_SNDTIMEO) {
        _ if sys::is_nonblocking(fd.0) => LIMIT_MS,
        -1 => return None,
        // TCP will wait for as long again.
        timeout_ms => timeout_ms.min(LIMIT_MS),
    };
    Some((limit_ms / LOOK_MS).max(1))
}

impl World {
    /// connect().
    pub(crate) fn connect(self: &Arc<Self>, call: &Call) -> Option<Done> {
        let mut bytes = [0; 128];
        let len = usize::try_from(call.arguments[2]).ok().filter(|len| *len <= 128)?;
        self.watch.read(call, call.arguments[1], &mut bytes[..len]).ok()?;
        let to = address::parse(&Name::of(&bytes[..len]));
        let to = to.filter(|to| address::is_elsewhere(*to))?;
        let (fd, family) = self.socket(call).ok()?;
        let mut info = [0; 8];
        sys::option(fd.0, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).ok()?;
        // A socket for IPv6 alone cannot be connected over the loopback of IPv4.
        let is_v6_only = sys::number(fd.0, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Ok(1);
        let is_ours = info[0] == CLOSED && !is_v6_only && !self.is_native(&fd);
        if !is_ours || !self.is_home(&fd, Patience::Brief) {
            return None;
        }
        let toe = match self.reach(call, &fd, family, to)? {
            Ok(toe) => toe,
            Err(errno) => return Some(Done::With(Err(errno))),
        };
        let blocking = !sys::is_nonblocking(fd.0);
        let made = self.join(&fd, family, toe);
        Some(Done::With(made.and(if blocking { Ok(0) } else { Err(libc::EINPROGRESS) })))
    }

    /// A TOE socket that is connected to the destination, or its error. `None`: a matter of TCP.
    fn reach(
        &self,
        call: &Call,
        fd: &Owned,
        family: c_int,
        to: SocketAddr,
    ) -> Option<Res<(Owned, Ports)>> {
        let own = name(fd.0)?;
        let reserved = match own.port() {
            0 => Some(any_port(family, address::unspecified(family)).ok()?),
            _ => None,
        };
        let port = reserved.as_ref().map_or(Some(own), |reserved| name(reserved.0))?.port();
        let toe = Owned(transport::socket().ok()?);
        transport::prepare(toe.0);
        let guest = transport::take_port(toe.0).ok()?;
        let from = address::from(Some(own).filter(|own| !own.ip().is_unspecified()), to, port);
        let program = self.watch.program(call);
        let source = from.ip().is_unspecified().then(|| home::source_of(fd.0, to)).flatten();
        let ask = |from| self.host.ask(Ask::Connect { guest, from, to, program });
        match home::ask_to_connect(from, source, ask)? {
            Code::Done => {}
            Code::Failed(errno) if errno.number() != libc::EADDRNOTAVAIL.cast_unsigned() => {
                return Some(Err(errno.number().cast_signed()));
            }
            _ => return None,
        }
        if let Some(reserved) = reserved {
            drop(reserved);
            // It may have an address already, and no port (IP_BIND_ADDRESS_NO_PORT).
            sys::bind_to(fd.0, &address::name(family, SocketAddr::new(own.ip(), port))).ok()?;
        }
        sys::set_nonblocking(toe.0, true);
        let looks_max = looks_max(fd);
        let outcome = match transport::call(toe.0, SOCKETS) {
            Ok(()) | Err(libc::EINPROGRESS) => {
                let mut looks = 0;
                while transport::wait(toe.0, LOOK_MS) == Ok(false) {
                    looks += 1;
                    let is_late = looks_max.is_some_and(|max| looks >= max);
                    if is_late || self.watch.interruption(call).is_some() {
                        // TCP's can be interrupted, and goes on all the same.
                        return None;
                    }
                }
                transport::outcome(toe.0)
            }
            Err(errno) => Err(errno),
        };
        let ports = Ports { guest, host: SOCKETS };
        match outcome.map_err(|errno| (errno, self.host.describe(Ask::Describe(ports)))) {
            Ok(()) => Some(Ok((toe, ports))),
            Err((_, Err(None))) => None,
            Err((_, Err(Some(known)))) => Some(Err(known)),
            Err((errno, Ok(()))) => Some(Err(errno)),
        }
    }

    /// Leads a program's socket to a TOE socket.
    fn join(self: &Arc<Self>, fd: &Owned, family: c_int, toe: (Owned, Ports)) -> Res {
        let addresses = self.host.hold(toe.1).ok_or(libc::ECONNRESET)?;
        let inward = any_port(libc::AF_INET, LOOPBACK)?;
        sys::listen_at(inward.0, 1)?;
        let at = name(inward.0).ok_or(libc::EADDRNOTAVAIL)?;
        match sys::connect_to(fd.0, &address::name(family, at)) {
            Err(libc::EINPROGRESS) => drop(sys::wait(&[(fd.0, libc::POLLOUT)], -1)),
            connected => connected?,
        }
        let own = name(fd.0);
        loop {
            let (tcp, from) = sys::accept_from(inward.0, libc::SOCK_CLOEXEC)?;
            let tcp = Owned(tcp);
            // Any process of this machine could have connected.
            if address::parse(&from) == own {
                let key: Pair = (own.ok_or(libc::ENOTCONN)?, at);
                self.known().names.insert(key, addresses);
                self.relay(key, Arc::new(tcp), toe);
                return Ok(());
            }
        }
    }
}
