//! listen() and accept(): clients that come by TOE are connected with the program's own listener,
//! over the loopback.
//!
//! The launcher sends the program none of their bytes before it has seen the accept(), because only
//! then the program knows the client's address. A program that the launcher may not inspect (it has
//! changed its user, or protects itself) accepts unseen, and would take the clients for local ones:
//! they are reset.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use libc::{SOL_SOCKET, c_int};
use nightporter_core::toe::control::Ask;
use nightporter_core::toe::vsock::Ports;

use crate::calls::{Done, LOOPBACK, Pair, World, any_port, name};
use crate::sys::{self, Name, Res};
use crate::transport::Patience;
use crate::watch::{Call, Owned};
use crate::{address, host, relay, transport};

/// How often who waits in accept() is looked after, and who waits for that, ms.
const LOOK_MS: c_int = 100;
/// A host that has lost a listener, or a launcher that lacks descriptors, is given so long, ms.
const PAUSE_MS: c_int = 500;

/// A client that came by TOE and was not accepted yet. If this is dropped, the client is reset.
#[derive(Debug)]
pub(crate) struct Arrived {
    tcp: Arc<Owned>,
    toe: Owned,
    ports: Ports,
    addresses: Pair,
}

/// A connection that was accepted for an interrupted call: the next call gets it.
pub(crate) struct Accepted {
    fd: Owned,
    from: Name,
    arrived: Option<(Pair, Arrived)>,
}

/// A listener of ours beside a program's.
struct Serving {
    at: SocketAddr,
    family: c_int,
    ask: Ask,
    toe: Owned,
    lease: Option<Owned>,
}

/// SO_RCVTIMEO.
fn receive_limit(fd: &Owned) -> Option<Duration> {
    let mut time = [0; 16];
    sys::option(fd.0, SOL_SOCKET, libc::SO_RCVTIMEO, &mut time).ok()?;
    let part = |at: usize| u64::from_ne_bytes(time[at..at + 8].try_into().expect("eight"));
    let limit = Duration::from_secs(part(0)) + Duration::from_micros(part(8));
    (!limit.is_zero()).then_some(limit)
}

impl World {
    /// listen().
    pub(crate) fn listen(self: &Arc<Self>, call: &Call) -> Option<Done> {
        let (fd, family) = self.socket(call).ok()?;
        if self.is_native(&fd) || self.known().accepts_unseen {
            return None;
        }
        let backlog = c_int::try_from(call.arguments[1].cast_signed()).unwrap_or(c_int::MAX);
        if let Err(errno) = sys::listen_at(fd.0, backlog) {
            return Some(Done::With(Err(errno)));
        }
        let done = Some(Done::With(Ok(0)));
        let at = name(fd.0).filter(|at| !at.ip().is_loopback());
        let Some(at) = at.filter(|_| self.is_home(&fd, Patience::Long)) else { return done };
        let v4 = sys::number(fd.0, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) != Ok(1);
        if self.known().listeners.insert(at) && self.serve(at, v4, family, backlog).is_err() {
            self.known().listeners.remove(&at);
        }
        done
    }

    /// Accepts the host's connections for the listener there, in a thread of its own.
    fn serve(self: &Arc<Self>, at: SocketAddr, v4: bool, family: c_int, backlog: c_int) -> Res {
        let toe = Owned(transport::socket()?);
        transport::prepare(toe.0);
        let ask = Ask::Listen { guest: transport::take_port(toe.0)?, at, v4 };
        sys::listen_at(toe.0, backlog)?;
        sys::set_nonblocking(toe.0, true);
        let lease = Some(host::lease(ask)?);
        let mut serving = Serving { at, family, ask, toe, lease };
        let world = Arc::clone(self);
        thread::spawn(move || {
            while world.turn(&mut serving).is_ok() {}
            world.known().listeners.remove(&at);
        });
        Ok(())
    }

    /// Waits for a client, or for the host to have forgotten the listener.
    fn turn(self: &Arc<Self>, serving: &mut Serving) -> Res {
        let limit_ms = match &serving.lease {
            _ if self.has_arrived(serving.at) => LOOK_MS,
            Some(_) => -1,
            None => PAUSE_MS,
        };
        let lease = serving.lease.as_ref().map_or(-1, |lease| lease.0);
        let halves = [(serving.toe.0, libc::POLLIN), (lease, libc::POLLIN)];
        let _ = sys::wait(&halves, limit_ms);
        self.reset_unawaited(serving.at);
        if !serving.lease.as_ref().is_some_and(host::is_alive) {
            // A daemon that was started anew knows of no listener.
            serving.lease = None;
            serving.lease = host::lease(serving.ask).ok();
        }
        match sys::accept_from(serving.toe.0, libc::SOCK_CLOEXEC) {
            Ok((accepted, _)) => match self.lead_in(serving, Owned(accepted)) {
                // A client that TCP would reach has to be reached by TCP.
                Err(libc::ECONNREFUSED) => Err(libc::ECONNREFUSED),
                // That one is reset; others may fare better.
                _ => Ok(()),
            },
            Err(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                let _ = sys::wait(&[], PAUSE_MS);
                Ok(())
            }
            Err(_) => Ok(()),
        }
    }

    fn has_arrived(&self, at: SocketAddr) -> bool {
        self.known().arrived.keys().any(|(to, _)| to.port() == at.port())
    }

    /// Resets clients that were connected to a listener which was closed.
    fn reset_unawaited(&self, at: SocketAddr) {
        let is_awaited = |tcp: &Owned| sys::wait(&[(tcp.0, 0)], 0) == Ok(false);
        let mut known = self.known();
        known.arrived.retain(|(to, _), it| to.port() != at.port() || is_awaited(&it.tcp));
    }

    /// A client has come by TOE to the listener there.
    fn lead_in(&self, serving: &Serving, toe: Owned) -> Res {
        let Some(ports) = transport::ports(toe.0) else { return Ok(()) };
        let only_v6 = matches!(serving.ask, Ask::Listen { v4: false, .. });
        let ip = match serving.at.ip() {
            IpAddr::V6(any) if any.is_unspecified() && only_v6 => Ipv6Addr::LOCALHOST.into(),
            any if any.is_unspecified() => LOOPBACK,
            ip => ip,
        };
        let to = SocketAddr::new(ip, serving.at.port());
        // By the loopback the address that one comes from is the one that one goes to.
        let family = if ip.is_ipv4() { libc::AF_INET } else { serving.family };
        let addresses = self.host.hold(ports).ok_or(libc::ECONNRESET)?;
        let tcp = Arc::new(any_port(family, ip)?);
        relay::resets_on_close(tcp.0, true);
        let key = (to, name(tcp.0).ok_or(libc::EADDRNOTAVAIL)?);
        // It has to be known before the program accepts it.
        let arrived = Arrived { tcp: Arc::clone(&tcp), toe, ports, addresses };
        let mut known = self.known();
        if known.accepts_unseen {
            return Err(libc::ECONNREFUSED);
        }
        known.arrived.insert(key, arrived);
        drop(known);
        sys::connect_to(tcp.0, &address::name(family, to)).inspect_err(|_| {
            self.known().arrived.remove(&key);
        })
    }

    /// accept().
    pub(crate) fn accept(self: &Arc<Self>, call: &Call, flags: u64) -> Option<Done> {
        let (fd, family) = match self.socket(call) {
            Ok(found) => found,
            Err(libc::EPERM) => {
                // Its accept() calls are not seen, now and later.
                let mut known = self.known();
                known.arrived.clear();
                known.accepts_unseen = true;
                return None;
            }
            Err(errno @ (libc::EMFILE | libc::ENFILE)) => return Some(Done::With(Err(errno))),
            Err(_) => return None,
        };
        let at = name(fd.0)?;
        if !self.known().listeners.contains(&at) {
            return None;
        }
        let flags = c_int::try_from(flags).ok()?;
        let accepted = match self.accepted(call, (&fd, family), at, flags) {
            Ok(Some(accepted)) => accepted,
            Ok(None) => return Some(Done::Answered),
            Err(errno) => return Some(Done::With(Err(errno))),
        };
        // The program may close its own at once, and its port has to be free then.
        drop(fd);
        let put = self.put(call, &accepted.from);
        let closes_on_exec = flags & libc::SOCK_CLOEXEC != 0;
        if put.is_err() || !self.watch.give(call, accepted.fd.0, closes_on_exec) {
            self.known().returned.entry(at).or_default().push_back(accepted);
        } else if let Some((key, Arrived { tcp, toe, ports, .. })) = accepted.arrived {
            self.relay(key, tcp, (toe, ports));
        }
        Some(put.map_or_else(|errno| Done::With(Err(errno)), |()| Done::Answered))
    }

    /// Waits for a client. `None`: the call no longer waits.
    fn accepted(
        &self,
        call: &Call,
        (fd, family): (&Owned, c_int),
        at: SocketAddr,
        flags: c_int,
    ) -> Res<Option<Accepted>> {
        let (began, limit) = (Instant::now(), receive_limit(fd));
        loop {
            let returned = self.known().returned.get_mut(&at).and_then(|known| known.pop_front());
            if returned.is_some() {
                return Ok(returned);
            }
            if sys::is_nonblocking(fd.0) || sys::wait(&[(fd.0, libc::POLLIN)], LOOK_MS) == Ok(true)
            {
                break;
            }
            if !self.watch.is_waiting(call) {
                return Ok(None);
            }
            if let Some(errno) = self.watch.interruption(call) {
                return Err(errno);
            }
            if limit.is_some_and(|limit| began.elapsed() >= limit) {
                return Err(libc::EAGAIN);
            }
        }
        let (accepted, from) = sys::accept_from(fd.0, flags | libc::SOCK_CLOEXEC)?;
        let accepted = Owned(accepted);
        let key = address::parse(&from).and_then(|from| Some((name(accepted.0)?, from)));
        let mut known = self.known();
        let arrived = key.and_then(|key| Some((key, known.arrived.remove(&key)?)));
        let Some((key, arrived)) = arrived else {
            return Ok(Some(Accepted { fd: accepted, from, arrived: None }));
        };
        known.names.insert(key, arrived.addresses);
        let from = address::name(family, arrived.addresses.1);
        Ok(Some(Accepted { fd: accepted, from, arrived: Some((key, arrived)) }))
    }
}
