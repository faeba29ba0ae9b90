//! connect(): the decision, the exchange of the native socket for one to the host, and the way
//! back.
//!
//! A socket is native until connect(), so an unconnected socket behaves as always. When the host
//! answers "go", a vsock socket takes its number, and its epolls watch the new socket. The native
//! one stays, hidden: it holds the port in the guest's own stack and the options. If the connection
//! fails, the native socket returns to its number and can be connected again, as TCP allows.

use std::net::SocketAddr;
use std::sync::Arc;

use libc::{SOL_SOCKET, c_int};
use nightporter_core::toe::control::{Ask, Code, SOCKETS};
use nightporter_core::toe::vsock::Ports;

use crate::sys::{self, Fd, Name, Res};
use crate::table::{self, Hidden, Kind, Socket, State};
use crate::transport::Patience;
use crate::{address, control, home, note, options, transport};

/// tcpi_state of a socket that is neither connected nor about to be.
const CLOSED: u8 = 7;
/// A connect() that goes on by TCP is waited for so long, because the program believes that it has
/// ended: longer than a guest usually waits for its core, shorter than until TCP's second SYN (1 s,
/// RFC 6298).
const RESCUE_MS: c_int = 500;

/// A descriptor that is closed unless it was made use of.
pub(crate) struct Temporary(pub(crate) Fd);

impl Drop for Temporary {
    fn drop(&mut self) {
        sys::close_fd(self.0);
    }
}

/// How far a connect() has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Progress {
    /// There is no answer yet.
    Pending,
    /// A signal came before.
    Interrupted,
    /// It is connected.
    Established,
    /// It is a native socket again, whose connect() by TCP is under way.
    ByTcp,
    /// It is not connected, and is a native socket again.
    Failed(c_int),
}

/// connect() of a candidate. `None`: it is a matter of TCP.
pub(crate) fn begin(fd: Fd, name: &Name) -> Option<Res> {
    let to = address::parse(name).filter(|to| address::is_elsewhere(*to))?;
    if !table::is_ours() || !is_unused(fd) {
        return None;
    }
    let family = sys::number(fd, SOL_SOCKET, libc::SO_DOMAIN).ok()?;
    let Prepared { socket, native, guest } = match prepare(fd, family, to) {
        Err(errno) => {
            note!("connect {to}: not allowed");
            return Some(Err(errno));
        }
        Ok(None) => {
            note!("connect {to}: native");
            return None;
        }
        Ok(Some(prepared)) => prepared,
    };
    note!("connect {to}: by TOE");
    let ports = Ports { guest, host: SOCKETS };
    let nonblocking = sys::is_nonblocking(fd);
    let identity = sys::identity(fd);
    sys::set_nonblocking(socket.0, true);
    let progress = match transport::call(socket.0, SOCKETS) {
        Ok(()) | Err(libc::EINPROGRESS) if nonblocking => Progress::Pending,
        Ok(()) | Err(libc::EINPROGRESS) => follow(socket.0, sys::timeout_ms(fd, libc::SO_SNDTIMEO)),
        Err(errno) => Progress::Failed(errno),
    };
    let (kind, result) = match progress {
        Progress::Failed(errno) => match explain(ports, errno) {
            Some(errno) => return Some(Err(errno)),
            None => return None,
        },
        // Said by settle() alone.
        Progress::ByTcp => return None,
        Progress::Established => (Kind::Toe, Ok(())),
        Progress::Pending => (Kind::Connecting, Err(libc::EINPROGRESS)),
        Progress::Interrupted => (Kind::Connecting, Err(libc::EINTR)),
    };
    if options::lingers_for_nothing(fd) {
        control::ask(Ask::Linger(ports));
    }
    let mut state = table::lock();
    if sys::identity(fd) != identity {
        // Another thread has closed it meanwhile, and the number may be another file's.
        return Some(Err(libc::EBADF));
    }
    let replaced = Socket { to: Some(to), native: Some(native), ..Socket::new(family, ports) };
    sys::set_nonblocking(socket.0, nonblocking);
    exchange(&mut state, fd, socket.0);
    state.sockets.insert(fd, Arc::new(replaced));
    table::set_kind(fd, kind);
    Some(result)
}

/// Whether it was never connected, and has no owner for signals.
fn is_unused(fd: Fd) -> bool {
    let mut info = [0; 8];
    let state = sys::option(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).map(|_| info[0]);
    let flags = sys::control(fd, libc::F_GETFL, 0).unwrap_or(libc::O_ASYNC);
    state == Ok(CLOSED) && flags & libc::O_ASYNC == 0
}

/// The prerequisites of a connect() by TOE.
struct Prepared {
    /// May be connected to the host.
    socket: Temporary,
    /// The socket that it takes the place of.
    native: Hidden,
    /// The port of `socket`.
    guest: u32,
}

/// `None`: not this way.
fn prepare(fd: Fd, family: c_int, to: SocketAddr) -> Res<Option<Prepared>> {
    let own = sys::name_of(fd).ok().and_then(|name| address::parse(&name));
    let bound = own.filter(|own| own.port() != 0);
    // While the answer may be "native" the socket stays as free in its choice of a port as it is.
    let reserve = || -> Res<(Temporary, u16)> {
        let taken = Temporary(sys::new_socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)?);
        sys::bind_to(taken.0, &address::any(family, 0))?;
        let name = sys::name_of(taken.0)?;
        Ok((taken, address::parse(&name).map_or(0, |name| name.port())))
    };
    if !control::is_there(Patience::Brief) || !home::is_home(fd, control::ask) {
        return Ok(None);
    }
    let made = || -> Res<Prepared> {
        let socket = Temporary(transport::socket()?);
        transport::prepare(socket.0);
        options::carry_over(fd, socket.0);
        let guest = transport::take_port(socket.0)?;
        Ok(Prepared { native: Hidden::of(fd, true)?, socket, guest })
    };
    let Ok(prepared) = made() else { return Ok(None) };
    let reserved = match bound {
        Some(_) => None,
        None => match reserve() {
            Ok(reserved) => Some(reserved),
            Err(_) => return Ok(None),
        },
    };
    let port = reserved.as_ref().map_or_else(|| bound.map_or(0, |own| own.port()), |r| r.1);
    let from = address::from(own.filter(|own| !own.ip().is_unspecified()), to, port);
    let guest = prepared.guest;
    // One that has confined itself may not be allowed to find out.
    let may_look = from.ip().is_unspecified() && !table::is_confined();
    let source = if may_look { home::source_of(fd, to) } else { None };
    let ask = |from| control::ask(Ask::Connect { guest, from, to, program: crate::program() });
    match home::ask_to_connect(from, source, ask) {
        Some(Code::Done) => {}
        // The host knows some addresses of this guest. It may have others.
        Some(Code::Failed(errno)) if number(errno) != libc::EADDRNOTAVAIL => {
            return Err(number(errno));
        }
        _ => return Ok(None),
    }
    if let Some((taken, port)) = reserved {
        // It may have an address already, and no port (IP_BIND_ADDRESS_NO_PORT).
        let any = address::any(family, port);
        let name = own.map_or(any, |own| address::name(family, SocketAddr::new(own.ip(), port)));
        if take_over(fd, &taken, &name).is_err() {
            return Ok(None);
        }
    }
    Ok(Some(prepared))
}

/// Binds a socket to the port that `taken` has. It is not enough to close that before: a child that
/// another thread has made has it, too, until it calls exec().
fn take_over(fd: Fd, taken: &Temporary, name: &Name) -> Res {
    let share = |fd, shared: c_int| {
        sys::set_option(fd, SOL_SOCKET, libc::SO_REUSEADDR, &shared.to_ne_bytes())
    };
    let before = sys::number(fd, SOL_SOCKET, libc::SO_REUSEADDR)?;
    share(taken.0, 1).and_then(|()| share(fd, 1))?;
    let bound = sys::bind_to(fd, name);
    share(fd, before).and(bound)
}

/// The number of an errno that the host knows.
pub(crate) fn number(errno: nightporter_core::toe::errno::Errno) -> c_int {
    c_int::try_from(errno.number()).unwrap_or(libc::ECONNRESET)
}

/// Waits for a connect(), and returns its end once.
fn follow(fd: Fd, timeout_ms: c_int) -> Progress {
    loop {
        match transport::wait(fd, timeout_ms) {
            Ok(false) => return Progress::Pending,
            Ok(true) => {
                let failed = |errno| Progress::Failed(errno);
                return transport::outcome(fd).map_or_else(failed, |()| Progress::Established);
            }
            Err(libc::EINTR) if sys::signals_restart_calls() => {}
            Err(libc::EINTR) => return Progress::Interrupted,
            Err(errno) => return Progress::Failed(errno),
        }
    }
}

/// The errno of a failed connection, because the kernel has one errno for all. `None`: there is no
/// TOE listener, or it is full, and TCP has to try.
fn explain(ports: Ports, errno: c_int) -> Option<c_int> {
    match control::ask(Ask::Describe(ports)).map(|answer| answer.code) {
        Some(Code::Failed(known)) => Some(number(known)),
        Some(Code::Native) => None,
        Some(Code::Done) | None => Some(errno),
    }
}

/// `new` takes the number `fd`. epoll watches a file, not a number, so its registration is changed.
pub(crate) fn exchange(state: &mut State, fd: Fd, new: Fd) {
    let mut watchers = state.watchers.get(&fd).cloned().unwrap_or_default();
    // Those that do not know it any more are forgotten: their number may be another's.
    watchers.retain(|epoll, event| sys::set_epoll(*epoll, libc::EPOLL_CTL_DEL, fd, *event).is_ok());
    let _ = sys::replace(new, fd);
    for (epoll, event) in &mut watchers {
        if table::kind(fd) == Kind::Listener {
            event.events &= !(libc::EPOLLEXCLUSIVE as u32);
        }
        let _ = sys::set_epoll(*epoll, libc::EPOLL_CTL_ADD, fd, *event);
    }
    state.watchers.insert(fd, watchers);
}

/// epoll_ctl() was called for a socket that may be replaced.
pub(crate) fn watched(epoll: Fd, what: c_int, fd: Fd, event: libc::epoll_event) {
    if !table::is_ours() {
        return;
    }
    let mut state = table::lock();
    let watchers = state.watchers.entry(fd).or_default();
    match what {
        libc::EPOLL_CTL_DEL => watchers.remove(&epoll),
        _ => watchers.insert(epoll, event),
    };
}

/// How far the connect() of a socket has come, after waiting so many ms or (-1) until it has ended.
pub(crate) fn settle(fd: Fd, timeout_ms: c_int) -> Progress {
    if !table::is_ours() {
        return Progress::Established;
    }
    loop {
        match transport::wait(fd, timeout_ms) {
            Ok(true) => break,
            Ok(false) => return Progress::Pending,
            Err(libc::EINTR) if sys::signals_restart_calls() => {}
            Err(libc::EINTR) => return Progress::Interrupted,
            Err(errno) => return Progress::Failed(errno),
        }
    }
    let mut state = table::lock();
    let known = state.sockets.get(&fd).cloned();
    // Another thread may have asked meanwhile: the kernel reports it once.
    let Some(socket) = known.filter(|_| table::kind(fd) == Kind::Connecting) else {
        return Progress::Established;
    };
    if !transport::is_one(fd) {
        // It was closed behind our back, and the number is another file's.
        drop(state);
        table::is_foreign(fd);
        return Progress::Established;
    }
    let Err(errno) = transport::outcome(fd) else {
        table::set_kind(fd, Kind::Toe);
        return Progress::Established;
    };
    if let Some(native) = &socket.native {
        sys::set_nonblocking(native.0, sys::is_nonblocking(fd));
        exchange(&mut state, fd, native.0);
        state.sockets.remove(&fd);
        table::set_kind(fd, Kind::Candidate);
    }
    drop(state);
    match (explain(socket.ports, errno), socket.to) {
        (Some(errno), _) => Progress::Failed(errno),
        (None, Some(to)) if socket.native.is_some() => rescue(fd, socket.family, to),
        (None, _) => Progress::Failed(libc::ECONNREFUSED),
    }
}

/// No listener takes it by TOE, so TCP has to try.
fn rescue(fd: Fd, family: c_int, to: SocketAddr) -> Progress {
    note!("connect {to}: nobody by TOE, native");
    table::set_kind(fd, Kind::Other);
    match sys::connect_to(fd, &address::name(family, to)) {
        Ok(()) => Progress::Established,
        Err(libc::EINPROGRESS) => Progress::ByTcp,
        Err(errno) => Progress::Failed(errno),
    }
}

/// Waits for a connect() that goes on by TCP, though the program's poll() has said that it has
/// ended. Returns whether it has.
pub(crate) fn wait_for_tcp(fd: Fd) -> bool {
    sys::wait(&[(fd, libc::POLLOUT)], RESCUE_MS) == Ok(true)
}

/// connect() to no family: a connection is reset, and the socket can be connected again.
pub(crate) fn undo(fd: Fd, socket: &Arc<Socket>) -> Res {
    control::ask(Ask::Linger(socket.ports));
    let stand_in = match &socket.native {
        Some(_) => None,
        None => Some(Temporary(options::stand_in(socket)?)),
    };
    let native = socket.native.as_ref().map(|native| native.0);
    let native = native.or(stand_in.as_ref().map(|made| made.0)).ok_or(libc::EBADF)?;
    sys::set_nonblocking(native, sys::is_nonblocking(fd));
    let mut state = table::lock();
    let same = state.sockets.iter().filter(|(_, known)| Arc::ptr_eq(known, socket));
    let same: Vec<Fd> = same.map(|(fd, _)| *fd).collect();
    // Of two descriptors of a socket neither can be replaced.
    let kind = if same.len() == 1 { Kind::Candidate } else { Kind::Other };
    for fd in same {
        exchange(&mut state, fd, native);
        state.sockets.remove(&fd);
        table::set_kind(fd, kind);
    }
    Ok(())
}

/// connect() of a socket that is being connected.
pub(crate) fn again(fd: Fd) -> Res {
    let nonblocking = sys::is_nonblocking(fd);
    let timeout = if nonblocking { 0 } else { sys::timeout_ms(fd, libc::SO_SNDTIMEO) };
    match settle(fd, timeout) {
        Progress::Pending | Progress::ByTcp => Err(libc::EALREADY),
        Progress::Interrupted => Err(libc::EINTR),
        Progress::Established => Ok(()),
        Progress::Failed(errno) => Err(errno),
    }
}
