//! listen() and accept(): the application's descriptor is an epoll of two listeners.
//!
//! The native one has the port in the guest's own stack, and takes whoever comes by TCP; the other
//! takes whom the host connects. An epoll polls as one, is shared by dup() and fork() as a
//! listener is, and says itself what is in it: a program that has inherited it reads the numbers of
//! its halves from the kernel. The third thing in it is the *lease*, the control connection
//! that has asked: the host keeps the listener as long as anybody has that.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use libc::{EPOLL_CTL_ADD, EPOLLIN, SOL_SOCKET, c_int, epoll_event};
use nightporter_core::toe::control::{Ask, Code};

use crate::sys::{self, Fd, Name, Res};
use crate::table::{self, Hidden, Kind, Socket};
use crate::{address, connect, control, ends, note, options, transport};

/// What the halves are registered with, beside which one it is.
const MAGIC: u64 = 0x6e70_746f_6500_0000;
const NATIVE: u64 = MAGIC + 1;
const TOE: u64 = MAGIC + 2;
const LEASE: u64 = MAGIC + 3;
/// A lease that was lost is not asked for again before this.
const RENEWAL_MS: i64 = 1_000;

/// A listener, with all descriptors of this process for it.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) native: Hidden,
    toe: Hidden,
    lease: Mutex<Lease>,
    /// Whose turn it is.
    toe_first: AtomicBool,
}

#[derive(Debug)]
struct Lease {
    line: Option<Hidden>,
    not_before_ms: i64,
}

fn ask_for(native: Fd, toe: Fd) -> Res<Ask> {
    let at = sys::name_of(native).ok().and_then(|name| address::parse(&name));
    let guest = transport::own_port(toe)?;
    let only_v6 = sys::number(native, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Ok(1);
    Ok(Ask::Listen { guest, at: at.ok_or(libc::EAFNOSUPPORT)?, v4: !only_v6 })
}

fn interest(what: u64) -> epoll_event {
    // Of a lease only its end is of interest, once.
    let events = if what == LEASE { libc::EPOLLET } else { EPOLLIN };
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
    let is_there = control::is_there(&mut table::lock());
    let made = if is_there { make(fd, backlog) } else { Err(libc::ENETDOWN) };
    match made {
        Ok(listener) => {
            note!("listen {at}: by TOE and TCP");
            let mut state = table::lock();
            table::set_kind(fd, Kind::Listener);
            if let Err(errno) = enter(&mut state, fd, &listener) {
                note!("listen {at}: native, error {errno}");
                table::set_kind(fd, Kind::Other);
                return;
            }
            state.listeners.insert(fd, Arc::new(listener));
        }
        Err(errno) => {
            note!("listen {at}: native, error {errno}");
            table::set_kind(fd, Kind::Other);
        }
    }
}

fn make(fd: Fd, backlog: c_int) -> Res<Listener> {
    let on_exec = sys::closes_on_exec(fd);
    let toe = Hidden::instead_of(transport::socket()?, on_exec)?;
    transport::prepare(toe.0);
    transport::take_port(toe.0)?;
    sys::listen_at(toe.0, backlog)?;
    sys::set_nonblocking(toe.0, true);
    let (line, answer) = control::lease(ask_for(fd, toe.0)?)?;
    let line = Hidden::instead_of(line, on_exec)?;
    if answer.code != Code::Done {
        return Err(libc::EOPNOTSUPP);
    }
    let native = Hidden::of(fd, on_exec)?;
    let lease = Mutex::new(Lease { line: Some(line), not_before_ms: 0 });
    Ok(Listener { native, toe, lease, toe_first: AtomicBool::new(false) })
}

/// The descriptor becomes an epoll of the halves.
fn enter(state: &mut table::State, fd: Fd, listener: &Listener) -> Res {
    let epoll = sys::new_epoll()?;
    let lease = listener.lease.lock().unwrap_or_else(PoisonError::into_inner);
    let lease = lease.line.as_ref().map(|line| (line.0, LEASE));
    let halves = [Some((listener.native.0, NATIVE)), Some((listener.toe.0, TOE)), lease];
    for (half, what) in halves.into_iter().flatten() {
        sys::set_epoll(epoll, EPOLL_CTL_ADD, half, interest(what))?;
    }
    // The file behind the native half is the one that the application has had.
    sys::set_nonblocking(epoll, sys::is_nonblocking(fd));
    sys::set_nonblocking(listener.native.0, true);
    connect::exchange(state, fd, epoll);
    sys::close_fd(epoll);
    Ok(())
}

/// The listener behind a descriptor.
pub(crate) fn of(fd: Fd) -> Option<Arc<Listener>> {
    if table::kind(fd) == Kind::Listener { table::lock().listeners.get(&fd).cloned() } else { None }
}

/// What is no socket, and is asked what only a socket knows, may be a listener that another program
/// has left to this one.
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
        *halves.get_mut(usize::try_from(which).ok()?)? = Some(half);
    }
    let [Some(native), Some(toe), lease] = halves else { return None };
    [Some(native), Some(toe), lease]
        .into_iter()
        .flatten()
        .for_each(|half| table::set_kind(half, Kind::Hidden));
    let lease = Mutex::new(Lease { line: lease.map(Hidden), not_before_ms: 0 });
    let (native, toe) = (Hidden(native), Hidden(toe));
    let listener = Arc::new(Listener { native, toe, lease, toe_first: AtomicBool::new(false) });
    table::lock().listeners.insert(fd, Arc::clone(&listener));
    table::set_kind(fd, Kind::Listener);
    Some(listener)
}

impl Listener {
    /// listen() once more: both have the new backlog.
    pub(crate) fn set_backlog(&self, backlog: c_int) -> Res {
        sys::listen_at(self.native.0, backlog)?;
        sys::listen_at(self.toe.0, backlog)
    }

    /// What exec() does with the descriptor it does with its halves.
    pub(crate) fn set_flags(&self, flags: c_int) {
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        let lease = lease.line.as_ref().map(|line| line.0);
        for fd in [Some(self.native.0), Some(self.toe.0), lease].into_iter().flatten() {
            let _ = sys::control(fd, libc::F_SETFD, flags);
        }
    }

    /// accept4() of the descriptor `fd`.
    pub(crate) fn accept(&self, fd: Fd, flags: c_int) -> Res<(Fd, Name)> {
        loop {
            let toe_first = self.toe_first.fetch_xor(true, Ordering::Relaxed);
            for is_toe in [toe_first, !toe_first] {
                let accepted = if is_toe {
                    self.accept_toe(flags)
                } else {
                    sys::accept_from(self.native.0, flags).inspect(|(fd, _)| table::is_foreign(*fd))
                };
                if !matches!(accepted, Err(libc::EAGAIN)) {
                    return accepted;
                }
            }
            self.renew(fd);
            if sys::is_nonblocking(fd) {
                return Err(libc::EAGAIN);
            }
            let halves = [(self.native.0, libc::POLLIN), (self.toe.0, libc::POLLIN)];
            match sys::wait(&halves, connect::timeout_ms(self.native.0, libc::SO_RCVTIMEO)) {
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
            let known = ports.and_then(|ports| ends::addresses(&mut table::lock(), ports));
            let Some((ports, (own, other))) = ports.zip(known) else {
                // Nobody whom the host knows.
                sys::close_fd(fd);
                continue;
            };
            options::carry_over(self.native.0, fd);
            let socket = Socket::new(family, ports);
            let _ = socket.addresses.set((own, other));
            let mut state = table::lock();
            if options::lingers_for_nothing(fd) {
                control::ask(&mut state, Ask::Linger(ports));
            }
            state.sockets.insert(fd, Arc::new(socket));
            table::set_kind(fd, Kind::Toe);
            return Ok((fd, address::name(family, other)));
        }
    }

    /// A daemon that was started anew knows of no listener.
    fn renew(&self, fd: Fd) {
        let mut lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        let is_alive = |line: &Hidden| {
            let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
            sys::receive(line.0, &mut [0], flags) == Err(libc::EAGAIN)
        };
        if lease.line.as_ref().is_some_and(is_alive) || sys::now_ms() < lease.not_before_ms {
            return;
        }
        lease.not_before_ms = sys::now_ms() + RENEWAL_MS;
        lease.line = None;
        let on_exec = sys::closes_on_exec(fd);
        let renewed = ask_for(self.native.0, self.toe.0)
            .and_then(control::lease)
            .and_then(|(line, answer)| Ok((Hidden::instead_of(line, on_exec)?, answer)));
        if let Ok((line, answer)) = renewed
            && answer.code == Code::Done
        {
            let _ = sys::set_epoll(fd, EPOLL_CTL_ADD, line.0, interest(LEASE));
            lease.line = Some(line);
        }
    }
}
