//! Functions that move data. A read that gets bytes makes no checks; a write checks one byte.

use std::mem;
use std::ptr;

use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, SCM_RIGHTS, SOL_SOCKET};
use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, off64_t};
use libc::{size_t, sockaddr, socklen_t, ssize_t};

use crate::sys::{self, Fd};
use crate::table::{self, Kind};
use crate::{ends, listen};

/// Before a read: its immediate result, if it is not to be done.
#[inline]
fn refused(fd: Fd, flags: c_int) -> Option<ssize_t> {
    if table::kind(fd) == Kind::Connecting
        && let Err(errno) = ends::before(fd, flags & MSG_DONTWAIT != 0)
    {
        sys::set_errno(errno);
        return Some(-1);
    }
    if table::is_deaf(fd) && ends::is_silent(fd) { Some(0) } else { None }
}

/// After a read of `wanted` bytes.
#[inline]
fn read_done(fd: Fd, wanted: size_t, got: ssize_t) -> ssize_t {
    if got > 0 || (got == 0 && wanted == 0) { got } else { ends::after_read(fd, got) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn read(fd: Fd, to: *mut c_void, len: size_t) -> ssize_t {
    if let Some(given) = refused(fd, 0) {
        return given;
    }
    // SAFETY: the caller's arguments.
    read_done(fd, len, unsafe { sys::read(fd, to, len) })
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn readv(fd: Fd, to: *const iovec, count: c_int) -> ssize_t {
    if let Some(given) = refused(fd, 0) {
        return given;
    }
    // SAFETY: the caller's arguments.
    read_done(fd, 1, unsafe { sys::readv(fd, to, count) })
}

/// The offset at which preadv2() and pwritev2() are readv() and writev().
const NO_OFFSET: off64_t = -1;

/// MSG_DONTWAIT if the flags of preadv2() and pwritev2() say so.
const fn socket_flags(flags: c_int) -> c_int {
    if flags & libc::RWF_NOWAIT != 0 { MSG_DONTWAIT } else { 0 }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn preadv64v2(
    fd: Fd,
    to: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    let plain = || unsafe { sys::preadv64v2(fd, to, count, at, flags) };
    if at != NO_OFFSET {
        return plain();
    }
    refused(fd, socket_flags(flags)).unwrap_or_else(|| read_done(fd, 1, plain()))
}

/// # Safety
///
/// As of libc's. `off_t` has 64 bits.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn preadv2(
    fd: Fd,
    to: *const iovec,
    count: c_int,
    at: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { preadv64v2(fd, to, count, at, flags) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn recvfrom(
    fd: Fd,
    to: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    size: *mut socklen_t,
) -> ssize_t {
    if let Some(given) = refused(fd, flags) {
        return given;
    }
    // SAFETY: the caller's arguments.
    read_done(fd, len, unsafe { sys::recvfrom(fd, to, len, flags, from, size) })
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn recv(
    fd: Fd,
    to: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { recvfrom(fd, to, len, flags, ptr::null_mut(), ptr::null_mut()) }
}

unsafe extern "C-unwind" {
    /// Ends a program that reads beyond its buffer.
    fn __chk_fail() -> !;
}

/// read() of programs that were compiled with checks.
///
/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn __read_chk(
    fd: Fd,
    to: *mut c_void,
    len: size_t,
    room: size_t,
) -> ssize_t {
    if len > room {
        // SAFETY: it does not come back.
        unsafe { __chk_fail() }
    }
    // SAFETY: the caller's arguments.
    unsafe { read(fd, to, len) }
}

/// recv() of programs that were compiled with checks.
///
/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn __recv_chk(
    fd: Fd,
    to: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { __recvfrom_chk(fd, to, len, room, flags, ptr::null_mut(), ptr::null_mut()) }
}

/// recvfrom() of programs that were compiled with checks.
///
/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn __recvfrom_chk(
    fd: Fd,
    to: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
    from: *mut sockaddr,
    size: *mut socklen_t,
) -> ssize_t {
    if len > room {
        // SAFETY: it does not come back.
        unsafe { __chk_fail() }
    }
    // SAFETY: the caller's arguments.
    unsafe { recvfrom(fd, to, len, flags, from, size) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn recvmsg(fd: Fd, to: *mut msghdr, flags: c_int) -> ssize_t {
    if let Some(given) = refused(fd, flags) {
        return given;
    }
    // SAFETY: the caller's arguments.
    let got = unsafe { sys::recvmsg(fd, to, flags) };
    // SAFETY: the call has looked at the target of `to`.
    if got >= 0 && unsafe { (*to).msg_controllen } > 0 {
        // SAFETY: as before.
        unsafe { each_descriptor(to, |fd| table::forget(*fd)) };
    }
    read_done(fd, 1, got)
}

/// Of a stream it gives pieces, and behind the last one empty ones: its end. An end is reported by
/// a call of its own, because there may be an error instead.
///
/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn recvmmsg(
    fd: Fd,
    to: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    limit: *mut libc::timespec,
) -> c_int {
    match refused(fd, flags) {
        Some(0) if count > 0 => {
            // SAFETY: the caller's arguments.
            unsafe { (*to).msg_len = 0 };
            return 1;
        }
        Some(given) => return c_int::try_from(given).unwrap_or(-1),
        None => {}
    }
    // SAFETY: the caller's arguments.
    let got = unsafe { sys::recvmmsg(fd, to, count, flags, limit) };
    if got < 0 {
        return c_int::try_from(ends::after_read(fd, -1)).unwrap_or(-1);
    }
    let mut whole = 0;
    for i in 0..usize::try_from(got).unwrap_or(0) {
        // SAFETY: the call has filled so many.
        let message = unsafe { &*to.add(i) };
        if message.msg_hdr.msg_controllen > 0 {
            // SAFETY: nobody else has it.
            unsafe { each_descriptor(&raw const message.msg_hdr, |fd| table::forget(*fd)) };
        }
        whole += c_int::from(message.msg_len > 0);
    }
    // A packet may be empty, unlike a piece of a stream.
    if whole == got || table::kind(fd) == Kind::Other || !ends::is_toe(fd) {
        return got;
    }
    match whole {
        0 if ends::after_read(fd, 0) < 0 => -1,
        0 => got,
        whole => whole,
    }
}

/// Calls `each` with the descriptors that a message carries.
///
/// # Safety
///
/// The message is one, and nobody else has it.
unsafe fn each_descriptor(message: *const msghdr, mut each: impl FnMut(&mut Fd)) {
    // SAFETY: the caller's.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: libc gives those that are within the message.
        let (level, kind, len) =
            unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
        if (level, kind) == (SOL_SOCKET, SCM_RIGHTS) {
            // SAFETY: no pointers.
            let before = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = len.saturating_sub(before) / size_of::<Fd>();
            // SAFETY: as before.
            let first = unsafe { libc::CMSG_DATA(header) }.cast::<Fd>();
            for i in 0..count {
                // SAFETY: there are `count`, maybe not aligned.
                unsafe {
                    let mut fd = ptr::read_unaligned(first.add(i));
                    each(&mut fd);
                    ptr::write_unaligned(first.add(i), fd);
                }
            }
        }
        // SAFETY: as before.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
}

/// Does a write. Without SIGPIPE if it goes to a TOE socket: it is raised afterwards if it is due.
#[inline]
fn written(
    fd: Fd,
    flags: c_int,
    plain: impl FnOnce() -> ssize_t,
    quietly: impl FnOnce(c_int) -> ssize_t,
) -> ssize_t {
    if table::kind(fd) == Kind::Other || !ends::is_toe(fd) {
        return plain();
    }
    if table::is_confined() {
        let sent = plain();
        return if sent < 0 { ends::after_write(fd, sent, true) } else { sent };
    }
    if let Err(errno) = ends::before(fd, flags & MSG_DONTWAIT != 0) {
        sys::set_errno(errno);
        return -1;
    }
    let sent = quietly(flags | MSG_NOSIGNAL);
    if sent < 0 && sys::errno() == libc::ENOTSOCK {
        table::is_foreign(fd);
        return plain();
    }
    if sent < 0 { ends::after_write(fd, sent, flags & MSG_NOSIGNAL != 0) } else { sent }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn write(fd: Fd, from: *const c_void, len: size_t) -> ssize_t {
    written(
        fd,
        0,
        // SAFETY: the caller's arguments.
        || unsafe { sys::write(fd, from, len) },
        // SAFETY: the caller's arguments.
        |flags| unsafe { sys::sendto(fd, from, len, flags, ptr::null(), 0) },
    )
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn writev(fd: Fd, from: *const iovec, count: c_int) -> ssize_t {
    written(
        fd,
        0,
        // SAFETY: the caller's arguments.
        || unsafe { sys::writev(fd, from, count) },
        // SAFETY: the caller's arguments.
        |flags| unsafe { send_parts(fd, from, count, flags) },
    )
}

/// writev() with flags.
///
/// # Safety
///
/// As of writev().
unsafe fn send_parts(fd: Fd, from: *const iovec, count: c_int, flags: c_int) -> ssize_t {
    // SAFETY: zeroes are a message without anything.
    let mut message: msghdr = unsafe { mem::zeroed() };
    message.msg_iov = from.cast_mut();
    message.msg_iovlen = usize::try_from(count).unwrap_or(usize::MAX);
    // SAFETY: the caller's arguments; a message is only read.
    unsafe { sys::sendmsg(fd, &raw const message, flags) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pwritev64v2(
    fd: Fd,
    from: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    let plain = || unsafe { sys::pwritev64v2(fd, from, count, at, flags) };
    if at != NO_OFFSET {
        return plain();
    }
    // SAFETY: the caller's arguments.
    written(fd, socket_flags(flags), plain, |flags| unsafe { send_parts(fd, from, count, flags) })
}

/// # Safety
///
/// As of libc's. `off_t` has 64 bits.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pwritev2(
    fd: Fd,
    from: *const iovec,
    count: c_int,
    at: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { pwritev64v2(fd, from, count, at, flags) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendto(
    fd: Fd,
    from: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    size: socklen_t,
) -> ssize_t {
    written(
        fd,
        flags,
        // SAFETY: the caller's arguments.
        || unsafe { sys::sendto(fd, from, len, flags, to, size) },
        // TCP does not look at the address either.
        // SAFETY: the caller's arguments.
        |flags| unsafe { sys::sendto(fd, from, len, flags, ptr::null(), 0) },
    )
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn send(
    fd: Fd,
    from: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { sendto(fd, from, len, flags, ptr::null(), 0) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendmsg(
    fd: Fd,
    from: *const msghdr,
    flags: c_int,
) -> ssize_t {
    written(
        fd,
        flags,
        // SAFETY: the caller's arguments.
        || unsafe {
            if from.is_null() || (*from).msg_control.is_null() || (*from).msg_controllen == 0 {
                return sys::sendmsg(fd, from, flags);
            }
            send_descriptors(fd, from, flags)
        },
        // SAFETY: the caller's arguments.
        |flags| unsafe {
            if from.is_null() {
                return sys::sendmsg(fd, from, flags);
            }
            let message = msghdr { msg_name: ptr::null_mut(), msg_namelen: 0, ..*from };
            sys::sendmsg(fd, &raw const message, flags)
        },
    )
}

/// A listener that is sent to another process is its native half: the epoll of both is of no use
/// where the halves are not.
///
/// # Safety
///
/// The message is one.
unsafe fn send_descriptors(fd: Fd, from: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's.
    let from = unsafe { *from };
    // As aligned as the kernel wants its headers.
    let mut copy = vec![0_u64; from.msg_controllen.div_ceil(size_of::<u64>())];
    // SAFETY: so many bytes are there, here and there.
    unsafe {
        let (bytes, to) = (from.msg_control.cast::<u8>(), copy.as_mut_ptr().cast::<u8>());
        ptr::copy_nonoverlapping(bytes, to, from.msg_controllen);
    }
    let message = msghdr { msg_control: copy.as_mut_ptr().cast(), ..from };
    let mut kept = Vec::new();
    let native = |fd: &mut Fd| {
        if let Some(listener) = listen::of(*fd) {
            *fd = listener.native.0;
            kept.push(listener);
        }
    };
    // SAFETY: the copy is nobody else's.
    unsafe {
        each_descriptor(&raw const message, native);
        sys::sendmsg(fd, &raw const message, flags)
    }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendmmsg(
    fd: Fd,
    from: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let plain = || {
        // SAFETY: the caller's arguments.
        let sent = unsafe { sys::sendmmsg(fd, from, count, flags) };
        ssize_t::try_from(sent).unwrap_or(-1)
    };
    let quietly = |flags| {
        // SAFETY: the caller's arguments.
        let sent = unsafe { sys::sendmmsg(fd, from, count, flags) };
        ssize_t::try_from(sent).unwrap_or(-1)
    };
    c_int::try_from(written(fd, flags, plain, quietly)).unwrap_or(-1)
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendfile64(
    to: Fd,
    from: Fd,
    at: *mut off64_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    let plain = || unsafe { sys::sendfile(to, from, at, count) };
    written(to, 0, plain, |_| plain())
}

/// # Safety
///
/// As of libc's. `off_t` has 64 bits.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendfile(
    to: Fd,
    from: Fd,
    at: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { sendfile64(to, from, at, count) }
}

/// # Safety
///
/// As of libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn splice(
    from: Fd,
    from_at: *mut off64_t,
    to: Fd,
    to_at: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the caller's arguments.
    let plain = || unsafe { sys::splice(from, from_at, to, to_at, len, flags) };
    if ends::is_toe(to) {
        return written(to, 0, plain, |_| plain());
    }
    refused(from, 0).unwrap_or_else(|| read_done(from, len, plain()))
}
