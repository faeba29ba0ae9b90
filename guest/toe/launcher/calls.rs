//! The calls that are handed over, and what is done in their place.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use libc::{SOL_SOCKET, c_int};
use nightporter_core::toe::control::{Ask, Asked, Code, Program, SOCKETS};
use nightporter_core::toe::vsock::Ports;

use crate::host::{self, Host};
use crate::sys::{self, Fd, Name, Res};
use crate::watch::{Call, Owned, Watch};
use crate::{address, relay, transport};

/// tcpi_state of a socket that is neither connected nor about to be.
const CLOSED: u8 = 7;
/// How often who waits in accept() is looked after, ms.
const LOOK_MS: c_int = 100;
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// An own address and the other side's.
type Pair = (SocketAddr, SocketAddr);

/// All programs, and their host.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) watch: Watch,
    host: Host,
    known: Mutex<Known>,
    is_sent: Condvar,
}

#[derive(Debug, Default)]
struct Known {
    /// By what the kernel thinks the addresses of a program's socket are: what they are.
    names: BTreeMap<Pair, Pair>,
    /// Where programs listen for TOE.
    listeners: BTreeSet<SocketAddr>,
    /// Relays that have not yet passed on all that their program has written.
    unsent: usize,
}

/// A relay that is one of those.
struct Unsent(Arc<World>);

impl Unsent {
    fn new(world: &Arc<World>) -> Self {
        world.known().unsent += 1;
        Self(Arc::clone(world))
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.0.known().unsent -= 1;
        self.0.is_sent.notify_all();
    }
}

/// What becomes of a call.
enum Done {
    /// The kernel does it.
    Native,
    /// It was done.
    With(Res<i64>),
    /// It was done, and was answered.
    Answered,
}

fn name(fd: Fd) -> Option<SocketAddr> {
    sys::name_of(fd).ok().and_then(|name| address::parse(&name))
}

fn peer(fd: Fd) -> Option<SocketAddr> {
    sys::peer_of(fd).ok().and_then(|name| address::parse(&name))
}

/// SO_RCVTIMEO.
fn receive_limit(fd: Fd) -> Option<Duration> {
    let mut time = [0; 16];
    sys::option(fd, SOL_SOCKET, libc::SO_RCVTIMEO, &mut time).ok()?;
    let part = |at: usize| u64::from_ne_bytes(time[at..at + 8].try_into().expect("eight"));
    let limit = Duration::from_secs(part(0)) + Duration::from_micros(part(8));
    (!limit.is_zero()).then_some(limit)
}

fn any_port(family: c_int, ip: IpAddr) -> Res<Owned> {
    let fd = sys::new_socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)?;
    let fd = Owned(fd);
    sys::bind_to(fd.0, &address::name(family, SocketAddr::new(ip, 0)))?;
    Ok(fd)
}

impl World {
    /// Nobody has called yet.
    pub(crate) fn new(watch: Watch) -> Self {
        let (host, known) = (Host::default(), Mutex::default());
        Self { watch, host, known, is_sent: Condvar::new() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until all that programs have written is on its way. Of what comes nobody is left to read it.
    pub(crate) fn wait_until_sent(&self) {
        let waited = self.is_sent.wait_while(self.known(), |known| known.unsent > 0);
        drop(waited);
    }

    /// Answers a call.
    pub(crate) fn answer(self: Arc<Self>, call: &Call) {
        let done = match call.number {
            libc::SYS_connect => self.connect(call),
            libc::SYS_listen => self.listen(call),
            libc::SYS_accept => self.accept(call, 0),
            libc::SYS_accept4 => self.accept(call, call.arguments[3]),
            libc::SYS_getsockname => self.name(call, |(own, _)| own),
            _ => self.name(call, |(_, other)| other),
        };
        match done.unwrap_or(Done::Native) {
            Done::Native => self.watch.let_through(call),
            Done::With(result) => self.watch.answer(call, result),
            Done::Answered => {}
        }
    }

    /// The program's TCP socket, and its family.
    fn socket(&self, call: &Call) -> Option<(Owned, c_int)> {
        let fd = self.watch.descriptor(call, call.arguments[0])?;
        let family = sys::number(fd.0, SOL_SOCKET, libc::SO_DOMAIN).ok()?;
        let is_tcp = sys::number(fd.0, SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
            && sys::number(fd.0, SOL_SOCKET, libc::SO_TYPE) == Ok(libc::SOCK_STREAM);
        (is_tcp && [libc::AF_INET, libc::AF_INET6].contains(&family)).then_some((fd, family))
    }

    fn connect(self: &Arc<Self>, call: &Call) -> Option<Done> {
        let mut bytes = [0; 128];
        let len = usize::try_from(call.arguments[2]).ok().filter(|len| *len <= 128)?;
        self.watch.read(call, call.arguments[1], &mut bytes[..len]).ok()?;
        let to =
            address::parse(&Name::of(&bytes[..len])).filter(|to| address::is_elsewhere(*to))?;
        let (fd, family) = self.socket(call)?;
        let mut info = [0; 8];
        sys::option(fd.0, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).ok()?;
        // One that hears only IPv6 cannot be led over the loopback of IPv4.
        let is_v6_only = sys::number(fd.0, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Ok(1);
        if info[0] != CLOSED || is_v6_only {
            return None;
        }
        let toe = match self.reach(&fd, family, to, self.watch.program(call))? {
            Ok((toe, guest)) => (toe, Ports { guest, host: SOCKETS }),
            Err(errno) => return Some(Done::With(Err(errno))),
        };
        let blocking = !sys::is_nonblocking(fd.0);
        match self.join(&fd, family, toe) {
            Ok(()) if blocking => Some(Done::With(Ok(0))),
            Ok(()) => Some(Done::With(Err(libc::EINPROGRESS))),
            Err(errno) => Some(Done::With(Err(errno))),
        }
    }

    /// A TOE socket that is connected to there, or what it failed with. `None`: a matter of TCP.
    fn reach(
        &self,
        fd: &Owned,
        family: c_int,
        to: SocketAddr,
        program: Program,
    ) -> Option<Res<(Owned, u32)>> {
        let own = name(fd.0);
        let unspecified: IpAddr = match family {
            libc::AF_INET => Ipv4Addr::UNSPECIFIED.into(),
            _ => std::net::Ipv6Addr::UNSPECIFIED.into(),
        };
        let reserved = match own.filter(|own| own.port() != 0) {
            Some(_) => None,
            None => Some(any_port(family, unspecified).ok()?),
        };
        let port = reserved.as_ref().map_or(own, |reserved| name(reserved.0))?.port();
        let toe = Owned(transport::socket().ok()?);
        transport::prepare(toe.0);
        let guest = transport::take_port(toe.0).ok()?;
        let from = address::from(own.filter(|own| !own.ip().is_unspecified()), to, port);
        match self.host.ask(Ask::Connect { guest, from, to, program })?.code {
            Code::Done => {}
            Code::Failed(errno) if errno.number() != libc::EADDRNOTAVAIL.cast_unsigned() => {
                return Some(Err(errno.number().cast_signed()));
            }
            _ => return None,
        }
        if let Some(reserved) = reserved {
            drop(reserved);
            sys::bind_to(fd.0, &address::any(family, port)).ok()?;
        }
        sys::set_nonblocking(toe.0, true);
        let outcome = match transport::call(toe.0, SOCKETS) {
            Ok(()) | Err(libc::EINPROGRESS) => {
                transport::wait(toe.0, -1).and_then(|_| transport::outcome(toe.0))
            }
            Err(errno) => Err(errno),
        };
        let ports = Ports { guest, host: SOCKETS };
        match outcome.map_err(|errno| (errno, self.host.describe(Ask::Describe(ports)))) {
            Ok(()) => Some(Ok((toe, guest))),
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
            // Anybody on this machine could have come.
            if address::parse(&from) == own {
                let key = (own.ok_or(libc::ENOTCONN)?, at);
                self.known().names.insert(key, addresses);
                self.relay(key, tcp, toe);
                return Ok(());
            }
        }
    }

    /// Carries bytes, in a thread of its own. The program's socket has the addresses `key`.
    fn relay(self: &Arc<Self>, key: Pair, tcp: Owned, (toe, ports): (Owned, Ports)) {
        relay::resets_on_close(tcp.0, true);
        // What comes in small pieces goes on so, and what is sent as urgent is not left out.
        let on = 1_i32.to_ne_bytes();
        let _ = sys::set_option(tcp.0, libc::IPPROTO_TCP, libc::TCP_NODELAY, &on);
        let _ = sys::set_option(tcp.0, SOL_SOCKET, libc::SO_OOBINLINE, &on);
        let unsent = Unsent::new(self);
        let world = Arc::clone(self);
        thread::spawn(move || {
            relay::run(&world.host, &tcp, &toe, ports, unsent);
            world.known().names.remove(&key);
            drop((tcp, toe));
        });
    }

    fn listen(self: &Arc<Self>, call: &Call) -> Option<Done> {
        let (fd, family) = self.socket(call)?;
        let backlog = c_int::try_from(call.arguments[1].cast_signed()).unwrap_or(c_int::MAX);
        if let Err(errno) = sys::listen_at(fd.0, backlog) {
            return Some(Done::With(Err(errno)));
        }
        let done = Some(Done::With(Ok(0)));
        let Some(at) = name(fd.0).filter(|at| !at.ip().is_loopback()) else { return done };
        let v4 = sys::number(fd.0, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) != Ok(1);
        if self.known().listeners.insert(at) && self.serve(at, v4, family, backlog).is_err() {
            self.known().listeners.remove(&at);
        }
        done
    }

    /// Lets hosts connect to who listens there, by a listener of our own and in a thread of its
    /// own.
    fn serve(self: &Arc<Self>, at: SocketAddr, v4: bool, family: c_int, backlog: c_int) -> Res {
        let toe = Owned(transport::socket()?);
        transport::prepare(toe.0);
        let guest = transport::take_port(toe.0)?;
        sys::listen_at(toe.0, backlog)?;
        let lease = host::connect()?;
        let asked = Asked { tag: 0, ask: Ask::Listen { guest, at, v4 } };
        if host::exchange(&lease, asked)?.code != Code::Done {
            return Err(libc::EOPNOTSUPP);
        }
        let world = Arc::clone(self);
        thread::spawn(move || {
            while let Ok((accepted, _)) = sys::accept_from(toe.0, libc::SOCK_CLOEXEC) {
                if world.lead_in(at, family, Owned(accepted)).is_err() {
                    // The program listens no more.
                    break;
                }
            }
            drop((toe, lease));
            world.known().listeners.remove(&at);
        });
        Ok(())
    }

    /// Somebody has come by TOE to who listens there.
    fn lead_in(self: &Arc<Self>, at: SocketAddr, family: c_int, toe: Owned) -> Res {
        let Some(ports) = transport::ports(toe.0) else { return Ok(()) };
        let ip = if at.ip().is_unspecified() { LOOPBACK } else { at.ip() };
        let to = SocketAddr::new(ip, at.port());
        // By the loopback the address that one comes from is the one that one goes to.
        let tcp = any_port(if ip.is_ipv4() { libc::AF_INET } else { family }, ip)?;
        let from = name(tcp.0).ok_or(libc::EADDRNOTAVAIL)?;
        let family = if ip.is_ipv4() { libc::AF_INET } else { family };
        // The names are to be known before the program asks for them.
        let Some(addresses) = self.host.hold(ports) else { return Ok(()) };
        self.known().names.insert((to, from), addresses);
        if let Err(errno) = sys::connect_to(tcp.0, &address::name(family, to)) {
            self.known().names.remove(&(to, from));
            return Err(errno);
        }
        self.relay((to, from), tcp, (toe, ports));
        Ok(())
    }

    fn accept(&self, call: &Call, flags: u64) -> Option<Done> {
        let (fd, family) = self.socket(call)?;
        let at = name(fd.0)?;
        if !self.known().listeners.contains(&at) {
            return None;
        }
        let flags = c_int::try_from(flags).ok()?;
        let on_exec = flags & libc::SOCK_CLOEXEC != 0;
        let limit = receive_limit(fd.0);
        let began = Instant::now();
        while !sys::is_nonblocking(fd.0) && sys::wait(&[(fd.0, libc::POLLIN)], LOOK_MS) != Ok(true)
        {
            if !self.watch.is_waiting(call) {
                return Some(Done::Answered);
            }
            if limit.is_some_and(|limit| began.elapsed() >= limit) {
                return Some(Done::With(Err(libc::EAGAIN)));
            }
        }
        let (accepted, from) = match sys::accept_from(fd.0, flags | libc::SOCK_CLOEXEC) {
            Ok((accepted, from)) => (Owned(accepted), from),
            Err(errno) => return Some(Done::With(Err(errno))),
        };
        let key = name(accepted.0).zip(address::parse(&from));
        let known = key.and_then(|key| self.known().names.get(&key).copied());
        let from = known.map_or(from, |(_, other)| address::name(family, other));
        // The program may close its own at once, and its port has to be free then.
        drop(fd);
        if let Err(errno) = self.put(call, &from) {
            return Some(Done::With(Err(errno)));
        }
        self.watch.give(call, accepted.0, on_exec);
        Some(Done::Answered)
    }

    /// Writes an address to where the call's second and third arguments say.
    fn put(&self, call: &Call, name: &Name) -> Res {
        let [_, at, len_at, ..] = call.arguments;
        if at == 0 {
            return Ok(());
        }
        let mut room = [0; 4];
        self.watch.read(call, len_at, &mut room)?;
        let room = usize::try_from(u32::from_ne_bytes(room)).unwrap_or(0);
        let bytes = name.bytes();
        self.watch.write(call, at, &bytes[..bytes.len().min(room)])?;
        let len = u32::try_from(bytes.len()).unwrap_or(0);
        self.watch.write(call, len_at, &len.to_ne_bytes())
    }

    fn name(&self, call: &Call, which: impl FnOnce(Pair) -> SocketAddr) -> Option<Done> {
        let (fd, family) = self.socket(call)?;
        let key = (name(fd.0)?, peer(fd.0)?);
        let known = self.known().names.get(&key).copied()?;
        Some(Done::With(self.put(call, &address::name(family, which(known))).map(|()| 0)))
    }
}
