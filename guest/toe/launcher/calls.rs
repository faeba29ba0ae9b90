//! The calls that are handed over, and their execution by the launcher: the common parts, and the
//! calls that ask and set. `connects` and `listeners` have the others.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use libc::{SOL_SOCKET, c_int};
use nightporter_core::toe::vsock::Ports;

use crate::host::HostControl;
use crate::listeners::{Accepted, Arrived};
use crate::sys::{self, Fd, Name, Res};
use crate::transport::Patience;
use crate::watch::{Call, Owned, Watch};
use crate::{address, home, relay};

/// Sockets that stay TCP are remembered, at most so many.
const NATIVE_MAX: usize = 1 << 16;
/// Where programs are led to.
pub(crate) const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// An own address and the other side's.
pub(crate) type Pair = (SocketAddr, SocketAddr);

/// All programs, and their host.
pub(crate) struct World {
    pub(crate) watch: Watch,
    pub(crate) host: HostControl,
    known: Mutex<Known>,
    is_sent: Condvar,
}

#[derive(Default)]
pub(crate) struct Known {
    /// The real addresses of programs' sockets, by the addresses that the kernel has for them.
    pub(crate) names: BTreeMap<Pair, Pair>,
    /// Where programs listen for TOE.
    pub(crate) listeners: BTreeSet<SocketAddr>,
    /// Clients that were connected to a listener, by the addresses that it will see.
    pub(crate) arrived: BTreeMap<Pair, Arrived>,
    /// Connections whose accept() was interrupted, by listener.
    pub(crate) returned: BTreeMap<SocketAddr, VecDeque<Accepted>>,
    /// A program that the launcher may not inspect accepts: no more clients come by TOE.
    pub(crate) accepts_unseen: bool,
    /// Sockets that stay TCP, by their identities, whatever their descriptors are.
    native: BTreeSet<(u64, u64)>,
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

/// The fate of a call.
pub(crate) enum Done {
    /// The kernel does it.
    Native,
    /// It was done.
    With(Res<i64>),
    /// It was done, and was answered.
    Answered,
}

/// A socket's own address.
pub(crate) fn name(fd: Fd) -> Option<SocketAddr> {
    sys::name_of(fd).ok().and_then(|name| address::parse(&name))
}

/// The other side's.
fn peer(fd: Fd) -> Option<SocketAddr> {
    sys::peer_of(fd).ok().and_then(|name| address::parse(&name))
}

/// A socket that has a port of its own.
pub(crate) fn any_port(family: c_int, ip: IpAddr) -> Res<Owned> {
    let fd = sys::new_socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)?;
    let fd = Owned(fd);
    sys::bind_to(fd.0, &address::name(family, SocketAddr::new(ip, 0)))?;
    Ok(fd)
}

impl World {
    /// Without calls so far.
    pub(crate) fn new(watch: Watch) -> Self {
        let (host, known) = (HostControl::default(), Mutex::default());
        Self { watch, host, known, is_sent: Condvar::new() }
    }

    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all data that programs have written is on its way. Incoming data has no reader
    /// any more.
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
            libc::SYS_setsockopt => self.keep_native(call),
            libc::SYS_getsockname => self.name(call, |(own, _)| own),
            _ => self.name(call, |(_, other)| other),
        };
        match done.unwrap_or(Done::Native) {
            Done::Native => drop(self.watch.let_through(call)),
            Done::With(result) => drop(self.watch.answer(call, result)),
            Done::Answered => {}
        }
    }

    /// The program's TCP socket, and its family. `EPERM`: the launcher may not inspect that
    /// program.
    pub(crate) fn socket(&self, call: &Call) -> Res<(Owned, c_int)> {
        let fd = self.watch.descriptor(call, call.arguments[0])?;
        let family = sys::number(fd.0, SOL_SOCKET, libc::SO_DOMAIN)?;
        let is_tcp = sys::number(fd.0, SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
            && sys::number(fd.0, SOL_SOCKET, libc::SO_TYPE) == Ok(libc::SOCK_STREAM);
        let is_ip = [libc::AF_INET, libc::AF_INET6].contains(&family);
        if is_tcp && is_ip { Ok((fd, family)) } else { Err(libc::EPROTOTYPE) }
    }

    /// Whether it is for TCP alone.
    pub(crate) fn is_native(&self, fd: &Owned) -> bool {
        sys::identity(fd.0).is_ok_and(|key| self.known().native.contains(&key))
    }

    /// Whether it is in the network of the VM itself, which is the launcher's, too.
    pub(crate) fn is_home(&self, fd: &Owned, patience: Patience) -> bool {
        home::is_home(fd.0, |ask| self.host.ask_with(patience, ask))
    }

    /// setsockopt() of an option that makes a socket one for TCP alone.
    fn keep_native(&self, call: &Call) -> Option<Done> {
        let (fd, _) = self.socket(call).ok()?;
        let key = sys::identity(fd.0).ok()?;
        let mut known = self.known();
        known.native.insert(key);
        if known.native.len() > NATIVE_MAX {
            // Numbers of files are counted upward: that one is the oldest.
            known.native.pop_first();
        }
        None
    }

    /// Carries bytes, in a thread of its own. The program's socket has the addresses `key`.
    pub(crate) fn relay(
        self: &Arc<Self>,
        key: Pair,
        tcp: Arc<Owned>,
        (toe, ports): (Owned, Ports),
    ) {
        relay::resets_on_close(tcp.0, true);
        // Small pieces are sent on as they are, and urgent bytes are not left out.
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

    /// Writes an address to the call's second and third arguments.
    pub(crate) fn put(&self, call: &Call, name: &Name) -> Res {
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
        let (fd, family) = self.socket(call).ok()?;
        let key = (name(fd.0)?, peer(fd.0)?);
        let known = self.known().names.get(&key).copied()?;
        Some(Done::With(self.put(call, &address::name(family, which(known))).map(|()| 0)))
    }
}
