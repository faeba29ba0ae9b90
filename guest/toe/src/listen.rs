//! listen() and accept(): the application's descriptor is an epoll of two listeners.
//!
//! The native one holds the port in the guest's own stack, and accepts clients by TCP; the other
//! accepts the host's connections. An epoll polls as one, is shared by dup() and fork() as a
//! listener is, and lists its own content: a program that has inherited it reads the numbers of its
//! halves from the kernel. The third file in it is the `lease`, so that waiting processes wake when
//! the host no longer knows the listener.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{EPOLL_CTL_ADD, EPOLLIN, SOL_SOCKET, c_int, epoll_event};
use nightporter_core::toe::control::Ask;

use crate::connect::Temporary;
use crate::lease::Lease;
use crate::sys::{self, Fd, Name, Res};
use crate::table::{self, Hidden, Kind, Socket};
use crate::transport::Patience;
use crate::{address, connect, control, ends, home, note, options, transport};

/// The registration of the halves, with the number of the half.
const MAGIC: u64 = 0x6e70_746f_6500_0000;
const NATIVE: u64 = MAGIC + 1;
const TOE: u64 = MAGIC + 2;
const BOX: u64 = MAGIC + 3;
pub(crate) const LEASE: u64 = MAGIC + 4;

/// A listener, with all descriptors of this process for it.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) native: Hidden,
    toe: Hidden,
    lease: Lease,
    /// The half whose turn it is.
    toe_first: AtomicBool,
}

fn ask_for(native: Fd, toe: Fd) -> Res<Ask> {
    let at = sys::name_of(native).ok().and_then(|name| address::parse(&name));
    let guest = transport::own_port(toe)?;
    let only_v6 = sys::number(native, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Ok(1);
    Ok(Ask::Listen { guest, at: at.ok_or(libc::EAFNOSUPPORT)?, v4: !only_v6 })
}

/// The events of a half that wake waiting processes: of a lease only its end, once.
pub(crate) fn interest(what: u64) -> epoll_event {
    let events = match what {
        LEASE => libc::EPOLLET,
        BOX => 0,
        _ => EPOLLIN,
    };
    epoll_event { events: events.cast_unsigned(), u64: what }
}

/// listen() of a candidate has succeeded natively: hosts are told as well, if there is one to tell.
pub(crate) fn begin(fd: Fd, backlog: c_int) {
    if !table::is_ours() {
        return;
    }
    let at = sys::name_of(fd).ok().and_then(|name| address::parse(&name));
    let Some(at) = at.filter(|at| !at.ip().is_loopback()) else {
        table::set_kind(fd, Kind::Other);
        return;
    };
    let can_be = control::is_there(Patience::Long) && home::is_home(fd, control::ask);
    let made = if can_be { make(fd, backlog) } else { Err(libc::ENETDOWN) };
    match made {
        Ok((listener, epoll)) => {
            note!("listen {at}: by TOE and TCP");
            let mut state = table::lock();
            table::set_kind(fd, Kind::Listener);
            // The file behind the native half is the one that the application has had.
            sys::set_nonblocking(epoll.0, sys::is_nonblocking(fd));
            sys::set_nonblocking(listener.native.0, true);
            connect::exchange(&mut state, fd, epoll.0);
            state.listeners.insert(fd, Arc::new(listener));
        }
        Err(errno) => {
            note!("listen {at}: native, error {errno}");
            table::set_kind(fd, Kind::Other);
        }
    }
}

/// The halves, and the epoll of them that the descriptor becomes.
fn make(fd: Fd, backlog: c_int) -> Res<(Listener, Temporary)> {
    let on_exec = sys::closes_on_exec(fd);
    let toe = Hidden::instead_of(transport::socket()?, on_exec)?;
    transport::prepare(toe.0);
    transport::take_port(toe.0)?;
    sys::listen_at(toe.0, backlog)?;
    sys::set_nonblocking(toe.0, true);
    let native = Hidden::of(fd, on_exec)?;
    let lease = Lease::new(on_exec)?;
    let epoll = Temporary(sys::new_epoll()?);
    for (half, what) in [(native.0, NATIVE), (toe.0, TOE), (lease.held_in.0, BOX)] {
        sys::set_epoll(epoll.0, EPOLL_CTL_ADD, half, interest(what))?;
    }
    lease.take(ask_for(fd, toe.0)?, epoll.0, Patience::Long)?;
    Ok((Listener { native, toe, lease, toe_first: AtomicBool::new(false) }, epoll))
}

/// The listener behind a descriptor.
pub(crate) fn of(fd: Fd) -> Option<Arc<Listener>> {
    if table::kind(fd) == Kind::Listener { table::lock().listeners.get(&fd).cloned() } else { None }
}

/// A descriptor that is no socket, and is asked what only a socket knows, may be a listener that
/// another program has left to this one.
pub(crate) fn adopt(fd: Fd) -> Option<Arc<Listener>> {
    if !table::is_ours() || !matches!(table::kind(fd), Kind::Unknown | Kind::Other) {
        return None;
    }
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
    let mut halves = [None; 3];
    for line in text.lines().filter_map(|line| line.strip_prefix("tfd:")) {
        let mut words = line.split_whitespace();
        let half: Fd = words.next()?.parse().ok()?;
        let data = words.skip_while(|word| *word != "data:").nth(1)?;
        let which = u64::from_str_radix(data, 16).ok()?.checked_sub(NATIVE)?;
        // Of the lease only the box has a descriptor.
        if let Some(place) = halves.get_mut(usize::try_from(which).ok()?) {
            *place = Some(half);
        }
    }
    let [Some(native), Some(toe), Some(held_in)] = halves else { return None };
    [native, toe, held_in].into_iter().for_each(|half| table::set_kind(half, Kind::Hidden));
    let (native, toe, lease) = (Hidden(native), Hidden(toe), Lease::of(Hidden(held_in)));
    let listener = Arc::new(Listener { native, toe, lease, toe_first: AtomicBool::new(false) });
    table::lock().listeners.insert(fd, Arc::clone(&listener));
    table::set_kind(fd, Kind::Listener);
    Some(listener)
}

/// A descriptor is new, or was told what exec() does with it. Whom that leaves any of a listener,
/// it leaves the halves as well.
pub(crate) fn inheritance_changed(fd: Fd) {
    if table::kind(fd) != Kind::Listener || !table::is_ours() {
        return;
    }
    let state = table::lock();
    let Some(listener) = state.listeners.get(&fd) else { return };
    let mut all = state.listeners.iter().filter(|(_, known)| Arc::ptr_eq(known, listener));
    let flags = if all.all(|(fd, _)| sys::closes_on_exec(*fd)) { libc::FD_CLOEXEC } else { 0 };
    for half in [listener.native.0, listener.toe.0, listener.lease.held_in.0] {
        let _ = sys::control(half, libc::F_SETFD, flags);
    }
}

impl Listener {
    /// listen() once more: both have the new backlog.
    pub(crate) fn set_backlog(&self, backlog: c_int) -> Res {
        sys::listen_at(self.native.0, backlog)?;
        sys::listen_at(self.toe.0, backlog)
    }

    /// accept4() of the descriptor `fd`.
    pub(crate) fn accept(&self, fd: Fd, flags: c_int) -> Res<(Fd, Name)> {
        loop {
            let mut interrupted = false;
            let toe_first = self.toe_first.fetch_xor(true, Ordering::Relaxed);
            for is_toe in [toe_first, !toe_first] {
                let accepted = if is_toe {
                    self.accept_toe(flags)
                } else {
                    sys::accept_from(self.native.0, flags).inspect(|(fd, _)| table::is_foreign(*fd))
                };
                match accepted {
                    Err(libc::EAGAIN) => {}
                    // vsock reports it even if the socket does not block.
                    Err(libc::EINTR) => interrupted = true,
                    accepted => return accepted,
                }
            }
            self.lease.renew(|| ask_for(self.native.0, self.toe.0), fd);
            if sys::is_nonblocking(fd) {
                return Err(libc::EAGAIN);
            }
            if interrupted && !sys::signals_restart_calls() {
                return Err(libc::EINTR);
            }
            // The end of the lease wakes as well; the confined cannot renew that.
            let halves = [(self.native.0, libc::POLLIN), (self.toe.0, libc::POLLIN)];
            let whole = [(fd, libc::POLLIN)];
            let awaited = if table::is_confined() { &halves[..] } else { &whole };
            match sys::wait(awaited, sys::timeout_ms(self.native.0, libc::SO_RCVTIMEO)) {
                Ok(true) => {}
                Ok(false) => return Err(libc::EAGAIN),
                Err(libc::EINTR) if sys::signals_restart_calls() => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn accept_toe(&self, flags: c_int) -> Res<(Fd, Name)> {
        loop {
            let (fd, _) = sys::accept_from(self.toe.0, flags)?;
            table::forget(fd);
            if !table::has_room_for(fd) {
                sys::close_fd(fd);
                return Err(libc::EMFILE);
            }
            let family = sys::number(self.native.0, SOL_SOCKET, libc::SO_DOMAIN)?;
            let ports = transport::ports(fd);
            let known = ports.and_then(ends::addresses);
            let Some((ports, (own, other))) = ports.zip(known) else {
                // The host does not know this client.
                sys::close_fd(fd);
                continue;
            };
            options::carry_over(self.native.0, fd);
            let socket = Socket::new(family, ports);
            let _ = socket.addresses.set((own, other));
            if options::lingers_for_nothing(fd) {
                control::ask(Ask::Linger(ports));
            }
            let mut state = table::lock();
            state.sockets.insert(fd, Arc::new(socket));
            table::set_kind(fd, Kind::Toe);
            return Ok((fd, address::name(family, other)));
        }
    }
}
