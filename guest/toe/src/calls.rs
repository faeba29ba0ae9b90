//! The functions of libc that programs call: sockets and descriptors here, data in [`data`].
//!
//! They take pointers apart, ask the rest of the crate, and call the function behind. Their
//! arguments are those of their manual pages; as with libc, a program that passes others is wrong.

mod data;

use std::slice;
use std::sync::Arc;

use libc::{c_int, c_uint, c_ulong, c_void, epoll_event, sockaddr, socklen_t};

use crate::listen::Listener;
use crate::sys::{self, Fd, Name, Res};
use crate::table::{self, Kind};
use crate::transport::Patience;
use crate::{connect, control, ends, listen, names, options};

#[used]
// SAFETY: the loader calls what is in this section, once, before main().
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = crate::begin;

/// A result as C has it.
fn give(result: Res<c_int>) -> c_int {
    result.unwrap_or_else(|errno| {
        sys::set_errno(errno);
        -1
    })
}

/// A call that failed because the descriptor is no socket may succeed with a listener after all.
/// The caller's errno stays.
fn inherited(fd: Fd, result: c_int) -> Option<Arc<Listener>> {
    if result >= 0 || sys::errno() != libc::ENOTSOCK {
        return None;
    }
    let listener = listen::adopt(fd);
    sys::set_errno(libc::ENOTSOCK);
    listener
}

fn done(result: Res) -> c_int {
    give(result.map(|()| 0))
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn socket(
    domain: c_int,
    kind: c_int,
    protocol: c_int,
) -> c_int {
    // SAFETY: the caller's arguments.
    let fd = unsafe { sys::socket(domain, kind, protocol) };
    if fd >= 0 {
        table::is_foreign(fd);
        let tcp = [0, libc::IPPROTO_TCP].contains(&protocol);
        let stream = kind & 0xf == libc::SOCK_STREAM;
        if tcp && stream && [libc::AF_INET, libc::AF_INET6].contains(&domain) && table::is_ours() {
            table::set_kind(fd, Kind::Candidate);
        }
    }
    fd
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn connect(
    fd: Fd,
    to: *const sockaddr,
    len: socklen_t,
) -> c_int {
    // SAFETY: the caller's arguments.
    let name = unsafe { Name::taken(to, len) };
    match table::kind(fd) {
        Kind::Candidate => {
            if let Some(result) = name.and_then(|name| connect::begin(fd, &name)) {
                return done(result);
            }
            // SAFETY: the caller's arguments.
            let result = unsafe { sys::connect(fd, to, len) };
            if result == 0 || sys::errno() == libc::EINPROGRESS {
                table::set_kind(fd, Kind::Other);
            }
            return result;
        }
        Kind::Connecting | Kind::Toe | Kind::Unknown
            if name.as_ref().is_some_and(Name::is_none) =>
        {
            if let Some(socket) = ends::socket(fd) {
                return done(connect::undo(fd, &socket));
            }
        }
        Kind::Connecting => return done(connect::again(fd)),
        Kind::Toe | Kind::Unknown if ends::socket(fd).is_some() => return done(Err(libc::EISCONN)),
        Kind::Listener => return done(Err(libc::EISCONN)),
        _ => {}
    }
    // SAFETY: the caller's arguments.
    unsafe { sys::connect(fd, to, len) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn listen(fd: Fd, backlog: c_int) -> c_int {
    if let Some(listener) = listen::of(fd) {
        return done(listener.set_backlog(backlog));
    }
    // SAFETY: no pointers.
    let result = unsafe { sys::listen(fd, backlog) };
    if let Some(listener) = inherited(fd, result) {
        return done(listener.set_backlog(backlog));
    }
    if result == 0 && table::kind(fd) == Kind::Candidate {
        listen::begin(fd, backlog);
    }
    result
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn accept4(
    fd: Fd,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let mut listener = listen::of(fd);
    if listener.is_none() {
        // SAFETY: the caller's arguments.
        let accepted = unsafe { sys::accept4(fd, from, len, flags) };
        if accepted >= 0 {
            table::is_foreign(accepted);
            return accepted;
        }
        listener = inherited(fd, accepted);
    }
    let Some(listener) = listener else { return -1 };
    let accepted = listener.accept(fd, flags).and_then(|(accepted, name)| {
        // SAFETY: the caller's arguments.
        unsafe { name.give(from, len) }?;
        Ok(accepted)
    });
    give(accepted)
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn accept(
    fd: Fd,
    from: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { accept4(fd, from, len, 0) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn getsockname(
    fd: Fd,
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let known = match names::own(fd) {
        None => {
            // SAFETY: the caller's arguments.
            let result = unsafe { sys::getsockname(fd, to, len) };
            let Some(listener) = inherited(fd, result) else { return result };
            sys::name_of(listener.native.0)
        }
        Some(known) => known,
    };
    // SAFETY: the caller's arguments.
    done(known.and_then(|name| unsafe { name.give(to, len) }))
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn getpeername(
    fd: Fd,
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    match names::other(fd) {
        // SAFETY: the caller's arguments.
        None => unsafe { sys::getpeername(fd, to, len) },
        // SAFETY: the caller's arguments.
        Some(known) => done(known.and_then(|name| unsafe { name.give(to, len) })),
    }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn getsockopt(
    fd: Fd,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let mut asked = fd;
    if let Some(listener) = listen::of(fd) {
        asked = listener.native.0;
    } else if !value.is_null() && !len.is_null() {
        // SAFETY: the caller's arguments.
        let room = unsafe { *len } as usize;
        // SAFETY: the caller's arguments.
        let to = unsafe { slice::from_raw_parts_mut(value.cast::<u8>(), room) };
        if let Some(result) = options::get(fd, level, name, to) {
            return done(result.map(|count| {
                // SAFETY: the caller's arguments.
                unsafe { *len = socklen_t::try_from(count).unwrap_or(0) };
            }));
        }
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { sys::getsockopt(asked, level, name, value, len) };
    match inherited(fd, result) {
        // SAFETY: the caller's arguments.
        Some(listener) => unsafe { sys::getsockopt(listener.native.0, level, name, value, len) },
        None => result,
    }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn setsockopt(
    fd: Fd,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let mut asked = fd;
    if let Some(listener) = listen::of(fd) {
        asked = listener.native.0;
    } else if !value.is_null() {
        // SAFETY: the caller's arguments.
        let bytes = unsafe { slice::from_raw_parts(value.cast::<u8>(), len as usize) };
        if let Some(result) = options::set(fd, level, name, bytes) {
            return done(result);
        }
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { sys::setsockopt(asked, level, name, value, len) };
    match inherited(fd, result) {
        // SAFETY: the caller's arguments.
        Some(listener) => unsafe { sys::setsockopt(listener.native.0, level, name, value, len) },
        None => result,
    }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn shutdown(fd: Fd, how: c_int) -> c_int {
    if let Some(listener) = listen::of(fd) {
        // SAFETY: no pointers.
        return unsafe { sys::shutdown(listener.native.0, how) };
    }
    if ends::is_toe(fd) {
        return done(ends::shutdown(fd, how));
    }
    // SAFETY: no pointers.
    unsafe { sys::shutdown(fd, how) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn close(fd: Fd) -> c_int {
    if table::kind(fd) == Kind::Hidden && table::is_ours() {
        // The application has no such descriptor.
        return done(Err(libc::EBADF));
    }
    table::forget(fd);
    // SAFETY: no pointers.
    unsafe { sys::close(fd) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn close_range(
    first: c_uint,
    last: c_uint,
    flags: c_int,
) -> c_int {
    // 4 is CLOSE_RANGE_CLOEXEC: nothing is closed yet.
    let mut from = first;
    if table::is_ours() && flags & 4 == 0 {
        let to_fd = |number: c_uint| Fd::try_from(number).unwrap_or(Fd::MAX);
        for kept in table::forget_range(to_fd(first), to_fd(last)) {
            let kept = kept.cast_unsigned();
            if kept > from {
                // SAFETY: no pointers.
                unsafe { sys::close_range(from, kept - 1, flags) };
            }
            from = kept + 1;
        }
        if from > last {
            return 0;
        }
    }
    // SAFETY: no pointers.
    unsafe { sys::close_range(from, last, flags) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn closefrom(first: c_int) {
    // SAFETY: the caller's arguments.
    unsafe { close_range(first.max(0).cast_unsigned(), c_uint::MAX, 0) };
}

fn copied(from: Fd, to: c_int) -> c_int {
    if to >= 0 {
        table::copied(from, to);
        listen::inheritance_changed(to);
    }
    to
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup(fd: Fd) -> c_int {
    // SAFETY: no pointers.
    copied(fd, unsafe { sys::dup(fd) })
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup2(fd: Fd, over: Fd) -> c_int {
    // SAFETY: no pointers.
    copied(fd, unsafe { sys::dup2(fd, over) })
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup3(fd: Fd, over: Fd, flags: c_int) -> c_int {
    // SAFETY: no pointers.
    copied(fd, unsafe { sys::dup3(fd, over, flags) })
}

/// fcntl() takes any number of arguments, of which the third, if there is one, is a number or a
/// pointer and is where a third argument always is.
///
/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fcntl(fd: Fd, what: c_int, with: usize) -> c_int {
    // SAFETY: the caller's arguments.
    let result = unsafe { sys::fcntl(fd, what, with) };
    if result < 0 {
        return result;
    }
    match what {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => return copied(fd, result),
        libc::F_SETFD => listen::inheritance_changed(fd),
        // A request for signals about a socket includes urgent data. 15 is F_SETOWN_EX.
        libc::F_SETOWN | 15 if table::kind(fd) == Kind::Candidate => {
            table::set_kind(fd, Kind::Other);
        }
        _ => {}
    }
    result
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fcntl64(fd: Fd, what: c_int, with: usize) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { fcntl(fd, what, with) }
}

/// A program that confines itself by seccomp will not be allowed to open what the provider needs,
/// so that is done before. Its arguments after the first are numbers or pointers.
///
/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn prctl(
    what: c_int,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
) -> c_int {
    if what == libc::PR_SET_SECCOMP && table::is_ours() {
        // Afterwards it cannot be connected any more.
        control::is_there(Patience::Long);
        table::confine();
    }
    // SAFETY: the caller's arguments.
    unsafe { sys::prctl(what, a, b, c, d) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ioctl(fd: Fd, what: c_ulong, with: usize) -> c_int {
    // SAFETY: the caller's arguments.
    let result = unsafe { sys::ioctl(fd, what, with) };
    if result == 0 && [libc::FIOCLEX, libc::FIONCLEX].contains(&what) {
        listen::inheritance_changed(fd);
    }
    if result == 0 || ![libc::FIONREAD, libc::TIOCOUTQ].contains(&what) {
        return result;
    }
    let errno = sys::errno();
    if [libc::ENOTTY, libc::EOPNOTSUPP].contains(&errno) && ends::is_toe(fd) && with != 0 {
        // A guest's kernel may not count unread and unsent bytes.
        let count = if what == libc::FIONREAD { ends::unread(fd) } else { 0 };
        // SAFETY: the caller's third argument is a number's address.
        unsafe { *std::ptr::with_exposed_provenance_mut::<c_int>(with) = count };
        return 0;
    }
    done(Err(errno))
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn epoll_ctl(
    epoll: Fd,
    what: c_int,
    fd: Fd,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the caller's arguments.
    let result = unsafe { sys::epoll_ctl(epoll, what, fd, event) };
    let kind = table::kind(fd);
    if result < 0 && kind == Kind::Listener && !event.is_null() {
        // An epoll cannot be watched by one process at a time; all of them wake.
        // SAFETY: the caller's arguments.
        let mut event = unsafe { *event };
        if sys::errno() == libc::EINVAL && event.events & libc::EPOLLEXCLUSIVE as u32 != 0 {
            event.events &= !(libc::EPOLLEXCLUSIVE as u32);
            return done(sys::set_epoll(epoll, what, fd, event));
        }
    }
    if result == 0 && matches!(kind, Kind::Candidate | Kind::Connecting) {
        let none = epoll_event { events: 0, u64: 0 };
        // SAFETY: the caller's arguments.
        let event = if event.is_null() { none } else { unsafe { *event } };
        connect::watched(epoll, what, fd, event);
    }
    result
}
