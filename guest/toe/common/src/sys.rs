//! System calls: libc's own functions behind the interposed ones, and safe functions without
//! pointers on top of them.
//!
//! The functions of [`real!`] are found by `dlsym(RTLD_NEXT)` and not called as system calls, so
//! that another preloaded library still sees them and a thread can be cancelled in them. Before
//! [`find`] has run, while other libraries are initialised, they are system calls.

use std::ffi::CStr;
use std::io;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_long, c_short, c_uint, c_void, epoll_event, iovec, mmsghdr, msghdr, off64_t};
use libc::{pollfd, size_t, sockaddr, socklen_t, ssize_t};

/// A descriptor's number.
pub type Fd = c_int;
/// With an errno.
pub type Res<T = ()> = Result<T, c_int>;

macro_rules! real {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty, $number:ident($($raw:expr),*);)*) => {
        #[allow(non_upper_case_globals)]
        mod at {
            use super::{AtomicPtr, c_void, ptr};
            $(pub(super) static $name: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());)*
        }

        $(
            /// libc's.
            ///
            /// # Safety
            ///
            /// As libc's.
            #[allow(clippy::cast_possible_truncation, clippy::too_many_arguments)]
            pub unsafe fn $name($($arg: $ty),*) -> $ret {
                let at = at::$name.load(Ordering::Relaxed);
                if at.is_null() {
                    // SAFETY: the system call behind the function, with the caller's arguments.
                    return unsafe { libc::syscall(libc::$number, $($raw),*) as $ret };
                }
                // SAFETY: `find` has stored the address of the function of this name. It may
                // unwind: a thread may be cancelled in it.
                let call = unsafe {
                    mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($ty),*) -> $ret>(at)
                };
                // SAFETY: the caller's arguments.
                unsafe { call($($arg),*) }
            }
        )*

        /// Finds libc's functions.
        pub fn find() {
            $(
                let name = concat!(stringify!($name), "\0");
                let name = CStr::from_bytes_with_nul(name.as_bytes()).expect("it ends so");
                // SAFETY: a string with an end.
                let at = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
                at::$name.store(at, Ordering::Relaxed);
            )*
        }
    };
}

real! {
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int,
        SYS_socket(domain, kind, protocol);
    connect(fd: Fd, to: *const sockaddr, len: socklen_t) -> c_int, SYS_connect(fd, to, len);
    listen(fd: Fd, backlog: c_int) -> c_int, SYS_listen(fd, backlog);
    accept4(fd: Fd, from: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int,
        SYS_accept4(fd, from, len, flags);
    close(fd: Fd) -> c_int, SYS_close(fd);
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int,
        SYS_close_range(first, last, flags);
    dup(fd: Fd) -> c_int, SYS_dup(fd);
    dup2(fd: Fd, over: Fd) -> c_int, SYS_dup3(fd, over, 0);
    dup3(fd: Fd, over: Fd, flags: c_int) -> c_int, SYS_dup3(fd, over, flags);
    fcntl(fd: Fd, what: c_int, with: usize) -> c_int, SYS_fcntl(fd, what, with);
    ioctl(fd: Fd, what: libc::c_ulong, with: usize) -> c_int, SYS_ioctl(fd, what, with);
    prctl(what: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int,
        SYS_prctl(what, a, b, c, d);
    shutdown(fd: Fd, how: c_int) -> c_int, SYS_shutdown(fd, how);
    getsockopt(fd: Fd, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int,
        SYS_getsockopt(fd, level, name, value, len);
    setsockopt(fd: Fd, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int,
        SYS_setsockopt(fd, level, name, value, len);
    getsockname(fd: Fd, to: *mut sockaddr, len: *mut socklen_t) -> c_int,
        SYS_getsockname(fd, to, len);
    getpeername(fd: Fd, to: *mut sockaddr, len: *mut socklen_t) -> c_int,
        SYS_getpeername(fd, to, len);
    read(fd: Fd, to: *mut c_void, len: size_t) -> ssize_t, SYS_read(fd, to, len);
    readv(fd: Fd, to: *const iovec, count: c_int) -> ssize_t, SYS_readv(fd, to, count);
    recvfrom(
        fd: Fd, to: *mut c_void, len: size_t, flags: c_int,
        from: *mut sockaddr, size: *mut socklen_t
    ) -> ssize_t, SYS_recvfrom(fd, to, len, flags, from, size);
    preadv64v2(fd: Fd, to: *const iovec, count: c_int, at: off64_t, flags: c_int) -> ssize_t,
        SYS_preadv2(fd, to, count, at, 0, flags);
    recvmsg(fd: Fd, to: *mut msghdr, flags: c_int) -> ssize_t, SYS_recvmsg(fd, to, flags);
    recvmmsg(
        fd: Fd, to: *mut mmsghdr, count: c_uint, flags: c_int, limit: *mut libc::timespec
    ) -> c_int, SYS_recvmmsg(fd, to, count, flags, limit);
    write(fd: Fd, from: *const c_void, len: size_t) -> ssize_t, SYS_write(fd, from, len);
    writev(fd: Fd, from: *const iovec, count: c_int) -> ssize_t, SYS_writev(fd, from, count);
    pwritev64v2(fd: Fd, from: *const iovec, count: c_int, at: off64_t, flags: c_int) -> ssize_t,
        SYS_pwritev2(fd, from, count, at, 0, flags);
    sendto(
        fd: Fd, from: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, size: socklen_t
    ) -> ssize_t, SYS_sendto(fd, from, len, flags, to, size);
    sendmsg(fd: Fd, from: *const msghdr, flags: c_int) -> ssize_t, SYS_sendmsg(fd, from, flags);
    sendmmsg(fd: Fd, from: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int,
        SYS_sendmmsg(fd, from, count, flags);
    sendfile(to: Fd, from: Fd, at: *mut off64_t, count: size_t) -> ssize_t,
        SYS_sendfile(to, from, at, count);
    splice(
        from: Fd, from_at: *mut off64_t, to: Fd, to_at: *mut off64_t, len: size_t, flags: c_uint
    ) -> ssize_t, SYS_splice(from, from_at, to, to_at, len, flags);
    epoll_ctl(epoll: Fd, what: c_int, fd: Fd, event: *mut epoll_event) -> c_int,
        SYS_epoll_ctl(epoll, what, fd, event);
}

/// The errno of the last call.
pub fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Sets the errno of this thread's last call.
pub fn set_errno(errno: c_int) {
    // SAFETY: the address of this thread's own.
    unsafe { *libc::__errno_location() = errno };
}

fn check(result: c_int) -> Res<c_int> {
    if result < 0 { Err(errno()) } else { Ok(result) }
}

/// A socket's address as the kernel writes it.
#[derive(Clone, Copy)]
pub struct Name {
    bytes: [u8; 128],
    len: usize,
}

impl Name {
    /// An address of these bytes, at most 128.
    pub fn of(from: &[u8]) -> Self {
        let mut bytes = [0; 128];
        let len = from.len().min(128);
        bytes[..len].copy_from_slice(&from[..len]);
        Self { bytes, len }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Whether it is of no family: a connect() to it ends the connection.
    pub fn is_none(&self) -> bool {
        self.bytes().starts_with(&[0, 0])
    }

    fn written(mut self, result: c_int, len: socklen_t) -> Res<Self> {
        check(result)?;
        self.len = (len as usize).min(128);
        Ok(self)
    }

    /// Writes it where a caller of accept(), getsockname() or getpeername() wants it.
    ///
    /// # Safety
    ///
    /// `to` is null, or has as many bytes as `len` says.
    pub unsafe fn give(&self, to: *mut sockaddr, len: *mut socklen_t) -> Res {
        if to.is_null() || len.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's.
        let room = unsafe { *len } as usize;
        if room > i32::MAX as usize {
            return Err(libc::EINVAL);
        }
        let count = room.min(self.len);
        // SAFETY: `count` bytes are there on both sides, which are not the same.
        unsafe {
            ptr::copy_nonoverlapping(self.bytes.as_ptr(), to.cast::<u8>(), count);
            *len = socklen_t::try_from(self.len).expect("at most 128");
        }
        Ok(())
    }

    /// The address that a caller of connect() has.
    ///
    /// # Safety
    ///
    /// `from` is null or has `len` bytes.
    pub unsafe fn taken(from: *const sockaddr, len: socklen_t) -> Option<Self> {
        if from.is_null() || !(2..=128).contains(&len) {
            return None;
        }
        // SAFETY: so the caller says.
        Some(Self::of(unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len as usize) }))
    }
}

fn length(bytes: &[u8]) -> socklen_t {
    socklen_t::try_from(bytes.len()).unwrap_or(socklen_t::MAX)
}

/// socket().
pub fn new_socket(domain: c_int, kind: c_int, protocol: c_int) -> Res<Fd> {
    // SAFETY: no pointers.
    check(unsafe { socket(domain, kind, protocol) })
}

/// close(). Its errors are ignored.
pub fn close_fd(fd: Fd) {
    // SAFETY: no pointers; the caller owns the descriptor.
    unsafe { close(fd) };
}

/// bind(), which is not interposed.
pub fn bind_to(fd: Fd, name: &Name) -> Res {
    let (at, len) = (name.bytes.as_ptr().cast(), length(name.bytes()));
    // SAFETY: `len` bytes are there.
    check(unsafe { libc::bind(fd, at, len) }).map(drop)
}

/// connect().
pub fn connect_to(fd: Fd, name: &Name) -> Res {
    let (at, len) = (name.bytes.as_ptr().cast(), length(name.bytes()));
    // SAFETY: `len` bytes are there.
    check(unsafe { connect(fd, at, len) }).map(drop)
}

/// listen().
pub fn listen_at(fd: Fd, backlog: c_int) -> Res {
    // SAFETY: no pointers.
    check(unsafe { listen(fd, backlog) }).map(drop)
}

/// accept4().
pub fn accept_from(fd: Fd, flags: c_int) -> Res<(Fd, Name)> {
    let mut name = Name::of(&[0; 128]);
    let mut len: socklen_t = 128;
    let at = name.bytes.as_mut_ptr().cast();
    // SAFETY: `len` bytes are there.
    let accepted = check(unsafe { accept4(fd, at, &raw mut len, flags) })?;
    name.len = (len as usize).min(128);
    Ok((accepted, name))
}

/// getsockname().
pub fn name_of(fd: Fd) -> Res<Name> {
    let mut name = Name::of(&[0; 128]);
    let mut len: socklen_t = 128;
    let at = name.bytes.as_mut_ptr().cast();
    // SAFETY: `len` bytes are there.
    let result = unsafe { getsockname(fd, at, &raw mut len) };
    name.written(result, len)
}

/// getpeername().
pub fn peer_of(fd: Fd) -> Res<Name> {
    let mut name = Name::of(&[0; 128]);
    let mut len: socklen_t = 128;
    let at = name.bytes.as_mut_ptr().cast();
    // SAFETY: `len` bytes are there.
    let result = unsafe { getpeername(fd, at, &raw mut len) };
    name.written(result, len)
}

/// getsockopt(): how many bytes it has written.
pub fn option(fd: Fd, level: c_int, name: c_int, to: &mut [u8]) -> Res<usize> {
    let mut len = length(to);
    // SAFETY: `len` bytes are there.
    check(unsafe { getsockopt(fd, level, name, to.as_mut_ptr().cast(), &raw mut len) })?;
    Ok(len as usize)
}

/// getsockopt() of a number.
pub fn number(fd: Fd, level: c_int, name: c_int) -> Res<c_int> {
    let mut bytes = [0; 4];
    option(fd, level, name, &mut bytes)?;
    Ok(c_int::from_ne_bytes(bytes))
}

/// setsockopt().
pub fn set_option(fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Res {
    let (at, len) = (value.as_ptr().cast(), length(value));
    // SAFETY: `len` bytes are there.
    check(unsafe { setsockopt(fd, level, name, at, len) }).map(drop)
}

/// SO_SNDTIMEO or SO_RCVTIMEO as poll() has it.
pub fn timeout_ms(fd: Fd, name: c_int) -> c_int {
    let mut time = [0; 16];
    let read = option(fd, libc::SOL_SOCKET, name, &mut time);
    let part = |at: usize| i64::from_ne_bytes(time[at..at + 8].try_into().expect("eight"));
    match part(0).saturating_mul(1000).saturating_add((part(8) + 999) / 1000) {
        0 => -1,
        _ if read.is_err() => -1,
        ms => c_int::try_from(ms).unwrap_or(c_int::MAX),
    }
}

/// shutdown().
pub fn shut(fd: Fd, how: c_int) -> Res {
    // SAFETY: no pointers.
    check(unsafe { shutdown(fd, how) }).map(drop)
}

/// fcntl() with a number.
pub fn control(fd: Fd, what: c_int, with: c_int) -> Res<c_int> {
    let with = usize::try_from(with).map_err(|_| libc::EINVAL)?;
    // SAFETY: callers ask for nothing that is a pointer.
    check(unsafe { fcntl(fd, what, with) })
}

/// Whether the descriptor is not blocking.
pub fn is_nonblocking(fd: Fd) -> bool {
    control(fd, libc::F_GETFL, 0).is_ok_and(|flags| flags & libc::O_NONBLOCK != 0)
}

/// Makes it blocking or not.
pub fn set_nonblocking(fd: Fd, nonblocking: bool) {
    if let Ok(flags) = control(fd, libc::F_GETFL, 0) {
        let bit = if nonblocking { libc::O_NONBLOCK } else { 0 };
        let _ = control(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK | bit);
    }
}

/// Whether it is closed by exec().
pub fn closes_on_exec(fd: Fd) -> bool {
    control(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags & libc::FD_CLOEXEC != 0)
}

/// dup3() over a number that there is.
pub fn replace(from: Fd, over: Fd) -> Res {
    let flags = if closes_on_exec(over) { libc::O_CLOEXEC } else { 0 };
    // SAFETY: no pointers; the number is one of a socket that the caller replaces.
    check(unsafe { dup3(from, over, flags) }).map(drop)
}

/// poll() of one descriptor: whether it is ready within so many ms, -1 for ever.
pub fn wait(fds: &[(Fd, c_short)], timeout_ms: c_int) -> Res<bool> {
    let mut list = [pollfd { fd: -1, events: 0, revents: 0 }; 4];
    for (entry, (fd, events)) in list.iter_mut().zip(fds) {
        *entry = pollfd { fd: *fd, events: *events, revents: 0 };
    }
    // SAFETY: four entries are there; those that are not used have no descriptor.
    check(unsafe { libc::poll(list.as_mut_ptr(), 4, timeout_ms) }).map(|ready| ready > 0)
}

/// epoll_create1().
pub fn new_epoll() -> Res<Fd> {
    // SAFETY: no pointers.
    check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
}

/// epoll_ctl().
pub fn set_epoll(epoll: Fd, what: c_int, fd: Fd, mut event: epoll_event) -> Res {
    // SAFETY: an event is there.
    check(unsafe { epoll_ctl(epoll, what, fd, &raw mut event) }).map(drop)
}

/// recv(): how many bytes there were.
pub fn receive(fd: Fd, to: &mut [u8], flags: c_int) -> Res<usize> {
    let (at, len) = (to.as_mut_ptr().cast(), to.len());
    // SAFETY: `len` bytes are there.
    let got = unsafe { recvfrom(fd, at, len, flags, ptr::null_mut(), ptr::null_mut()) };
    usize::try_from(got).map_err(|_| errno())
}

/// send(), without SIGPIPE.
pub fn send(fd: Fd, from: &[u8]) -> Res<usize> {
    let (at, len) = (from.as_ptr().cast(), from.len());
    // SAFETY: `len` bytes are there.
    let sent = unsafe { sendto(fd, at, len, libc::MSG_NOSIGNAL, ptr::null(), 0) };
    usize::try_from(sent).map_err(|_| errno())
}

/// read(), where recv() is not allowed.
pub fn read_some(fd: Fd, to: &mut [u8]) -> Res<usize> {
    // SAFETY: so many bytes are there.
    let got = unsafe { read(fd, to.as_mut_ptr().cast(), to.len()) };
    usize::try_from(got).map_err(|_| errno())
}

/// write(), where send() is not allowed.
pub fn write_some(fd: Fd, from: &[u8]) -> Res<usize> {
    // SAFETY: so many bytes are there.
    let sent = unsafe { write(fd, from.as_ptr().cast(), from.len()) };
    usize::try_from(sent).map_err(|_| errno())
}

/// Room for the header of a message that carries a descriptor, as aligned as the kernel wants it.
type Rights = [u64; 3];

/// Calls `with` with a message of one byte, and that room.
fn with_message<T>(room: &mut Rights, with: impl FnOnce(*mut msghdr) -> T) -> T {
    let mut byte = 0_u8;
    let mut part = iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: zeroes are a message without anything.
    let mut message: msghdr = unsafe { mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (room.as_mut_ptr().cast(), 24);
    with(&raw mut message)
}

/// Sends a descriptor over a UNIX socket.
pub fn send_descriptor(over: Fd, fd: Fd) -> Res {
    let mut room = Rights::default();
    with_message(&mut room, |message| {
        // SAFETY: there is room for the header and one descriptor.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            ptr::write_unaligned(libc::CMSG_DATA(header).cast::<Fd>(), fd);
            let sent = sendmsg(over, message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
            if sent == 1 { Ok(()) } else { Err(errno()) }
        }
    })
}

/// Receives one.
pub fn receive_descriptor(from: Fd, flags: c_int) -> Res<Fd> {
    let mut room = Rights::default();
    with_message(&mut room, |message| {
        // SAFETY: a message is there, and its content is read within its bounds.
        unsafe {
            if recvmsg(from, message, flags | libc::MSG_CMSG_CLOEXEC) < 0 {
                return Err(errno());
            }
            let header = libc::CMSG_FIRSTHDR(message);
            if header.is_null() {
                return Err(libc::EMFILE);
            }
            Ok(ptr::read_unaligned(libc::CMSG_DATA(header).cast::<Fd>()))
        }
    })
}

/// The device and the number of the file behind a descriptor.
pub fn identity(fd: Fd) -> Res<(u64, u64)> {
    // SAFETY: zeroes are a stat.
    let mut stat: libc::stat = unsafe { mem::zeroed() };
    // SAFETY: a stat is there.
    check(unsafe { libc::fstat(fd, &raw mut stat) })?;
    Ok((stat.st_dev, stat.st_ino))
}

/// How many descriptors this process may have.
pub fn descriptors_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a limit is there.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur
}

/// getpid(), also in a child that shares this memory.
pub fn pid() -> c_int {
    // SAFETY: no pointers.
    unsafe { libc::getpid() }
}

/// The name of this thread, with its terminator; that of a program's first thread is the program's.
pub fn thread_name() -> [u8; 16] {
    let mut name = [0; 16];
    // SAFETY: it writes 16 bytes (`TASK_COMM_LEN`), which are there.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name
}

/// Milliseconds of the monotonic clock.
pub fn now_ms() -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a timespec is there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec * 1000 + now.tv_nsec / 1_000_000
}

/// SIGPIPE to this thread, as the kernel does it.
pub fn raise_sigpipe() {
    // SAFETY: no pointers.
    unsafe { libc::raise(libc::SIGPIPE) };
}

/// Whether every signal that this process handles lets interrupted calls go on (SA_RESTART). Not
/// asked of those that a thread causes itself: none comes while it waits, and runtimes handle them.
pub fn signals_restart_calls() -> bool {
    let own = [libc::SIGILL, libc::SIGTRAP, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV];
    (1..=libc::SIGRTMAX()).filter(|signal| !own.contains(signal)).all(|signal| {
        // SAFETY: zeroes are a sigaction.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        // SAFETY: a sigaction is there; nothing is changed.
        let known = unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) } == 0;
        !known
            || [libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction)
            || action.sa_flags & libc::SA_RESTART != 0
    })
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// While it lives no signal handler runs in this thread and it is not cancelled. So no handler is
/// called by the holder of the provider's lock, and the lock is given back.
pub struct Undisturbed {
    mask: libc::sigset_t,
    cancel: c_int,
}

impl Undisturbed {
    /// From now on.
    pub fn begin() -> Self {
        // SAFETY: zeroes are a set of signals.
        let (mut all, mut mask): (libc::sigset_t, libc::sigset_t) = unsafe { mem::zeroed() };
        let mut cancel = 0;
        // SAFETY: the sets and the number are there.
        unsafe {
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut mask);
            pthread_setcancelstate(1, &raw mut cancel);
        }
        Self { mask, cancel }
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        // SAFETY: restores the state from before.
        unsafe {
            pthread_setcancelstate(self.cancel, ptr::null_mut());
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.mask, ptr::null_mut());
        }
    }
}

/// The functions that are called around every fork().
pub fn at_fork(before: extern "C" fn(), parent: extern "C" fn(), child: extern "C" fn()) {
    // SAFETY: the functions stay where they are: this library is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) };
}

/// A line on the standard error of the process.
pub fn print(line: &str) {
    // SAFETY: the bytes are there.
    unsafe { write(2, line.as_ptr().cast(), line.len()) };
}

const _: () = assert!(size_of::<c_long>() == size_of::<ssize_t>());
