//! System calls that no crate wraps safely: tap and interface ioctls, an option of UDP sockets, the
//! real-time scheduler, the mapping of the arena, the content of core dumps, a second process,
//! guest memory that goes to a socket or comes from one, and the handlers of SIGBUS and SIGSYS. The
//! rest of the daemon has no `unsafe`.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::fcntl::Flock;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use nix::unistd::{ForkResult, fork};
use rustix::fs::{FlockOperation, flock};
use vm_memory::{MmapRegion, VolatileSlice};

use crate::supervisor::take_stored;
use crate::{faults, refused};

/// One `ifreq` (netdevice(7)), always with a name.
pub(crate) struct IfReq(libc::ifreq);

impl IfReq {
    /// For the interface `name`. Errors: the name is longer than 15 bytes.
    pub(crate) fn new(name: &str) -> io::Result<Self> {
        let mut ifr_name = [0; libc::IFNAMSIZ];
        if name.len() >= ifr_name.len() {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }
        for (to, from) in ifr_name.iter_mut().zip(name.bytes()) {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        let ifr_ifru = libc::__c_anonymous_ifr_ifru { ifru_flags: 0 };
        Ok(Self(libc::ifreq { ifr_name, ifr_ifru }))
    }
}

mod ioctl {
    use nix::libc;
    nix::ioctl_write_int!(tun_set_iff, b'T', 202);
    nix::ioctl_write_int!(tun_set_offload, b'T', 208);
    nix::ioctl_write_ptr!(tun_set_vnet_hdr_size, b'T', 216, libc::c_int);
    nix::ioctl_write_ptr!(tun_set_vnet_le, b'T', 220, libc::c_int);
    nix::ioctl_readwrite_bad!(get_flags, libc::SIOCGIFFLAGS, libc::ifreq);
    nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, libc::ifreq);
    nix::ioctl_write_ptr_bad!(set_address, libc::SIOCSIFHWADDR, libc::ifreq);
    nix::ioctl_write_ptr_bad!(bridge_add, SIOCBRADDIF, libc::ifreq);
    /// linux/sockios.h; `libc` does not have it.
    const SIOCBRADDIF: libc::c_int = 0x89a2;
}

/// `IFF_VNET_HDR` and its like fit the 16 bits of `ifr_flags` (linux/if_tun.h).
const TUN_FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
/// linux/if_tun.h: the reader's features: CSUM, TSO4, TSO6, TSO_ECN.
const TUN_OFFLOADS: u64 = 0x01 | 0x02 | 0x04 | 0x08;

/// Makes `file` (an open `/dev/net/tun`) the tap `name`, creating it if it does not exist; only so
/// if `is_new`.
///
/// Errors: EPERM without CAP_NET_ADMIN, EBUSY if another process has it or it is not new, EINVAL if
/// it is a tun or multi-queue interface.
pub(crate) fn tun_attach(file: &File, name: &str, is_new: bool) -> io::Result<()> {
    let mut request = IfReq::new(name)?;
    let flags = if is_new { TUN_FLAGS | libc::IFF_TUN_EXCL } else { TUN_FLAGS };
    request.0.ifr_ifru.ifru_flags = u16::try_from(flags).expect("0xd002 fits").cast_signed();
    // TUNSETIFF is declared as writing an int but takes a pointer to ifreq.
    let pointer: *const libc::ifreq = &raw const request.0;
    // SAFETY: the kernel reads and writes one ifreq behind the pointer, which outlives the call.
    // JUSTIFICATION: no crate wraps TUNSETIFF.
    unsafe { ioctl::tun_set_iff(file.as_raw_fd(), pointer.addr() as u64) }?;
    Ok(())
}

/// Gives the tap behind `file` this Ethernet address.
pub(crate) fn tun_set_address(file: &File, name: &str, address: [u8; 6]) -> io::Result<()> {
    let mut request = IfReq::new(name)?;
    let mut sa_data = [0; 14];
    for (to, from) in sa_data.iter_mut().zip(address) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let hwaddr = libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data };
    request.0.ifr_ifru.ifru_hwaddr = hwaddr;
    // SAFETY: the kernel reads one ifreq that outlives the call.
    // JUSTIFICATION: no crate in use here wraps this ioctl.
    unsafe { ioctl::set_address(file.as_raw_fd(), &raw const request.0) }?;
    Ok(())
}

/// Sets up a tap or macvtap queue: little-endian headers of `hdr_len` bytes, and super-segments and
/// partial checksums toward us.
pub(crate) fn tun_configure(file: &File, hdr_len: usize) -> io::Result<()> {
    let fd = file.as_raw_fd();
    let hdr_len = libc::c_int::try_from(hdr_len).expect("10 or 12");
    // SAFETY: each call reads one int that outlives it, or takes its argument by value.
    // JUSTIFICATION: no crate wraps these ioctls.
    unsafe {
        ioctl::tun_set_vnet_hdr_size(fd, &raw const hdr_len)?;
        ioctl::tun_set_vnet_le(fd, &raw const ONE)?;
        ioctl::tun_set_offload(fd, TUN_OFFLOADS)?;
    }
    Ok(())
}

static ONE: libc::c_int = 1;

/// Every socket takes the requests of netdevice(7); one of this family can do nothing else.
fn any_socket() -> nix::Result<OwnedFd> {
    socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
}

/// Brings the interface up.
pub(crate) fn interface_up(name: &str) -> io::Result<()> {
    let control = any_socket()?;
    let mut request = IfReq::new(name)?;
    // SAFETY: the kernel reads and writes one ifreq that outlives the calls, and SIOCGIFFLAGS fills
    // `ifru_flags`, so it is the live field of the union.
    // JUSTIFICATION: no crate in use here wraps these ioctls.
    unsafe {
        ioctl::get_flags(control.as_raw_fd(), &raw mut request.0)?;
        request.0.ifr_ifru.ifru_flags |= libc::c_short::try_from(libc::IFF_UP).expect("1 fits");
        ioctl::set_flags(control.as_raw_fd(), &raw const request.0)?;
    }
    Ok(())
}

/// Makes the interface with index `member` a port of `bridge`. EBUSY: it is in a bridge already.
pub(crate) fn bridge_add(bridge: &str, member: u32) -> io::Result<()> {
    let control = any_socket()?;
    let mut request = IfReq::new(bridge)?;
    request.0.ifr_ifru.ifru_ifindex = libc::c_int::try_from(member).unwrap_or(0);
    // SAFETY: the kernel reads one ifreq that outlives the call.
    // JUSTIFICATION: the alternative is a netlink stack for one message.
    unsafe { ioctl::bridge_add(control.as_raw_fd(), &raw const request.0) }?;
    Ok(())
}

/// Puts the calling thread under `SCHED_FIFO` at `priority` (1 to 99). EPERM without CAP_SYS_NICE.
pub(crate) fn set_realtime(priority: u8) -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority: libc::c_int::from(priority) };
    // SAFETY: the kernel reads one sched_param that outlives the call.
    // JUSTIFICATION: nix does not wrap sched_setscheduler.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameter) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Files that are mapped for ever: device and inode.
static MAPPED: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

/// Maps the first `len` bytes of a file, and keeps its lock, both until this process ends: nobody
/// who asks for the lock has the file meanwhile, here or in another process.
///
/// Errors: the system's. EWOULDBLOCK: others have the lock, too, which is not exclusive. EINVAL:
/// the file is shorter. EBUSY: it is mapped already.
pub(crate) fn map_forever(
    file: Flock<File>,
    len: usize,
) -> io::Result<(&'static mut [u8], &'static File)> {
    // A value that is never dropped never unlocks.
    let file: &'static Flock<File> = Box::leak(Box::new(file));
    flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive)?;
    let meta = file.metadata()?;
    if meta.len() < len as u64 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    if !MAPPED.lock().unwrap_or_else(PoisonError::into_inner).insert((meta.dev(), meta.ino())) {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
    // JUSTIFICATION: std has no mmap.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    keep_range_out_of_dumps(start, len);
    // SAFETY: the mapping is `len` bytes, page-aligned, of any bit pattern, as u8 may be, and never
    // unmapped. This is the only reference into it: the file is in `MAPPED` from now on, so it is
    // mapped once, and in no other process, whose `map_forever` would want the lock that this one
    // keeps. (Root and this user can write to the file without asking for a lock, as they can to
    // /proc/self/mem.) Where the file has holes, an access takes memory for them; where there is
    // none, or somebody has cut the file, it is a SIGBUS that ends the process (`on_bus_error`),
    // and no access to what is not there.
    // JUSTIFICATION: the arena is used as plain memory on the fast path.
    let memory = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>(), len) };
    Ok((memory, file))
}

/// As the end of a process does: the file may be mapped again. Nothing has `memory` any more.
#[cfg(test)]
pub(crate) fn end_of_process(memory: impl Sized, file: &File) {
    drop(memory);
    let meta = file.metadata().unwrap();
    MAPPED.lock().unwrap().remove(&(meta.dev(), meta.ino()));
    flock(file, FlockOperation::Unlock).unwrap();
}

/// Core dumps do not hold this mapping.
pub(crate) fn keep_out_of_dumps(map: &MmapRegion) {
    keep_range_out_of_dumps(map.as_ptr().cast(), map.size());
}

/// Nothing is lost if the kernel does not know how.
fn keep_range_out_of_dumps(start: *mut libc::c_void, len: usize) {
    // SAFETY: MADV_DONTDUMP changes no memory, only what a core dump holds, wherever it points.
    // JUSTIFICATION: nix and rustix leave madvise unsafe, for what other advice does.
    let _ = unsafe { libc::madvise(start, len, libc::MADV_DONTDUMP) };
}

/// Bytes of a mapping whose pages are taken from it in one call: half a millisecond's.
const EMPTIED_BYTES: usize = 8 << 20;

/// Takes all pages from a mapping that nobody uses any more; its file keeps them. Piece by piece,
/// because `munmap` of many pages holds the lock of the address space for all of them: 30 ms for
/// 512 MiB, which the worker's next `mmap` would wait for.
pub(crate) fn empty(map: &MmapRegion) {
    for at in (0..map.size()).step_by(EMPTIED_BYTES) {
        let (start, len) = (map.as_ptr().wrapping_add(at), EMPTIED_BYTES.min(map.size() - at));
        // SAFETY: the range lies in the mapping, to whose bytes nothing refers any more.
        // JUSTIFICATION: as above. Where the kernel refuses, `munmap` takes them.
        let _ = unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) };
    }
}

/// Pieces of guest memory that go in one call, at most; others are left for the next.
const PIECES_MAX: usize = 128;

/// A part of the bytes for a socket.
pub(crate) enum Part<'a> {
    Own(&'a [u8]),
    Guest(VolatileSlice<'a>),
}

/// Writes these parts to a socket that does not wait; how many bytes.
///
/// Errors: the socket's; EFAULT if some of the memory is not there, and nothing before it.
pub(crate) fn write_parts(socket: BorrowedFd<'_>, parts: &[Part<'_>]) -> io::Result<usize> {
    let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut list = [none; PIECES_MAX];
    for (to, part) in list.iter_mut().zip(parts) {
        *to = match part {
            Part::Own(bytes) => {
                libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
            }
            // The mapping is alive as long as the slice, and no guard does more.
            Part::Guest(piece) => libc::iovec {
                iov_base: piece.ptr_guard().as_ptr().cast_mut().cast(),
                iov_len: piece.len(),
            },
        };
    }
    let count = libc::c_int::try_from(parts.len().min(PIECES_MAX)).expect("few");
    // SAFETY: the kernel reads `count` pieces, each of which is alive: our own are borrowed, and
    // the others are mapped as long as their slices are. It copies as volatile accesses do: what a
    // guest changes meanwhile is the guest's own data, and memory that is missing is an error.
    // JUSTIFICATION: safe wrappers want references to bytes, which there are none of in memory that
    // a guest may change; vm-memory writes one piece a call, and payload would have to be copied.
    let done = unsafe { libc::writev(socket.as_raw_fd(), list.as_ptr(), count) };
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}

/// Reads from a socket that does not wait into guest memory, and what is behind it into `rest`; how
/// many bytes. 0: it has ended.
///
/// Errors: as of [`write_parts`].
pub(crate) fn read_guest(
    socket: BorrowedFd<'_>,
    pieces: &[VolatileSlice<'_>],
    rest: &mut [u8],
) -> io::Result<usize> {
    let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut list = [none; PIECES_MAX + 1];
    let count = pieces.len().min(PIECES_MAX);
    for (to, piece) in list.iter_mut().zip(&pieces[..count]) {
        let iov_base = piece.ptr_guard_mut().as_ptr().cast();
        *to = libc::iovec { iov_base, iov_len: piece.len() };
    }
    if count == pieces.len() {
        list[count] = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
    }
    let count = libc::c_int::try_from(count + 1).expect("few");
    // SAFETY: the kernel writes to `count` pieces, each of which is alive and may be written to:
    // those of guest memory are mapped so and accessed as volatile by everybody, and `rest` is
    // borrowed.
    // JUSTIFICATION: as of `write_parts`.
    let done = unsafe { libc::readv(socket.as_raw_fd(), list.as_ptr(), count) };
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}

/// From now on a SIGBUS in a mapping that [`faults`] knows puts zeros there; see its module doc.
pub(crate) fn handle_bus_errors() -> io::Result<()> {
    let flags = SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK;
    let action = SigAction::new(SigHandler::SigAction(on_bus_error), flags, SigSet::empty());
    // SAFETY: the handler calls nothing but sigaction and what maps memory, which are system calls,
    // and reads atomics; it keeps errno.
    // JUSTIFICATION: nothing else tells a fault in memory of others from one of our own.
    unsafe { sigaction(Signal::SIGBUS, &action) }?;
    Ok(())
}

extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let errno = Errno::last();
    // SAFETY: with SA_SIGINFO the kernel gives a whole siginfo_t, and for SIGBUS it has an address.
    // JUSTIFICATION: there is no other way to learn where the fault is.
    let address = unsafe { (*info).si_addr() }.addr();
    // All of the mapping counts as ours where nothing is promised that is not there
    // (`vm.overcommit_memory = 2`), and may be too much; the block is not.
    let mended = faults::note(address)
        .is_some_and(|ranges| ranges.into_iter().any(|(start, len)| put_zeros(start, len)));
    if !mended {
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: the default action runs no code of ours: the access faults again and ends us.
        // JUSTIFICATION: a fault in memory of our own is a bug and must not be hidden.
        let _ = unsafe { sigaction(Signal::SIGBUS, &default) };
    }
    errno.set();
}

/// Replaces the pages at `start` by private zeros; whether that worked. If not they are as before:
/// `mmap` over them could leave nothing there. The calls are made by number: UCX puts code of its
/// own before libc's functions for memory, and that is not for a signal's handler.
fn put_zeros(start: usize, len: usize) -> bool {
    // Zeros are charged to us page by page as they are written to, not when they are mapped.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
    // JUSTIFICATION: the access that faulted can only go on if there is memory.
    let zeros =
        unsafe { libc::syscall(libc::SYS_mmap, 0_usize, len, writable, flags, -1_isize, 0_usize) };
    if zeros == -1 {
        return false;
    }
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the range lies in a mapping of a front-end's file that exists as long as it is on the
    // list. All access to it is volatile and expects others to change it at any time; it stays
    // mapped, readable and writable throughout, and its owner unmaps it whole. The zeros are
    // nobody's but this function's: moved there, or unmapped here.
    // JUSTIFICATION: as above; and a byte that is written must not cost us a huge page.
    unsafe {
        libc::syscall(libc::SYS_madvise, zeros, len, libc::MADV_NOHUGEPAGE);
        let moved = libc::syscall(libc::SYS_mremap, zeros, len, len, flags, start) != -1;
        if !moved {
            libc::syscall(libc::SYS_munmap, zeros, len);
        }
        moved
    }
}

/// From now on the socket takes datagrams of IPv6 without a UDP checksum, as a tunnel's endpoint
/// has to (RFC 6935, RFC 7348 section 5; udp(7)). The kernel drops them otherwise, and counts them
/// as errors of its own.
pub(crate) fn take_without_checksum(socket: &UdpSocket) -> io::Result<()> {
    let size = libc::socklen_t::try_from(size_of_val(&ONE)).expect("4 fits");
    let (level, name) = (libc::SOL_UDP, libc::UDP_NO_CHECK6_RX);
    // SAFETY: the kernel reads one int that outlives the call.
    // JUSTIFICATION: no crate in use here has this option, nor lets others define one.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const ONE).cast(), size) };
    Errno::result(result).map(drop)?;
    Ok(())
}

/// Whether a file takes words of eight bytes as an eventfd does, without one being written: a write
/// of eight bytes that are nowhere fails with EFAULT there (Linux, fs/eventfd.c, `eventfd_write`),
/// before anybody is woken. A descriptor that cannot be written to, such as an epoll, says EINVAL
/// or EBADF.
pub(crate) fn may_be_eventfd(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: the kernel reads eight bytes at address 0, where there is nothing, and says so.
    // JUSTIFICATION: safe wrappers take bytes that are there, and a write of those calls all that
    // wait for the eventfd, of whom there may be millions.
    let result = unsafe { libc::write(fd.as_raw_fd(), std::ptr::null(), size_of::<u64>()) };
    result == -1 && Errno::last() == Errno::EFAULT
}

/// From now on `signal` ends a call that waits (EINTR), and does nothing else.
pub(crate) fn let_interrupt(signal: Signal) -> io::Result<()> {
    let handler = SigHandler::Handler(do_nothing);
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing.
    // JUSTIFICATION: a signal that is ignored interrupts nothing.
    unsafe { sigaction(signal, &action) }?;
    Ok(())
}

/// From now on a system call that is refused fails with ENOSYS and is noted; see
/// [`crate::sandbox`].
pub(crate) fn handle_refused_calls() -> io::Result<()> {
    let flags = SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK;
    let action = SigAction::new(SigHandler::SigAction(on_refused_call), flags, SigSet::empty());
    // SAFETY: the handler writes to atomics and to the context that it was given, nothing else.
    // JUSTIFICATION: the kernel refuses without telling, or tells by this signal.
    unsafe { sigaction(Signal::SIGSYS, &action) }?;
    Ok(())
}

extern "C" fn on_refused_call(
    _: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    /// The kernel's own code, which no process can send (`SYS_SECCOMP`, asm-generic/siginfo.h).
    const REFUSED: libc::c_int = 1;
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: with SA_SIGINFO the kernel gives a whole siginfo_t.
    // JUSTIFICATION: nothing else tells a refused call from a signal that somebody sent, which
    // comes between any two instructions: whatever RAX is then, it is not the number of a call.
    if unsafe { (*info).si_code } != REFUSED {
        return;
    }
    // SAFETY: with SA_SIGINFO the kernel gives a ucontext_t that it reads again afterwards, and
    // nobody else has it. RAX has the number of the call that was not made, and then its result
    // (seccomp(2), SECCOMP_RET_TRAP; x86-64).
    // JUSTIFICATION: there is no other way to give the call a result.
    let rax = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RAX as usize] };
    refused::note(std::mem::replace(rax, i64::from(-libc::ENOSYS)));
}

extern "C" fn do_nothing(_: libc::c_int) {}

/// From now on processes that this one starts leave nothing behind when they end.
pub(crate) fn let_children_go() -> io::Result<()> {
    let action = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
    // SAFETY: no code of ours runs.
    // JUSTIFICATION: nobody waits for them, and the kernel keeps who is waited for.
    unsafe { sigaction(Signal::SIGCHLD, &action) }?;
    Ok(())
}

/// The descriptors that whoever has started this process has passed to it, from the third on
/// (sd_listen_fds(3)); `None`: there is none with this number. They concern no program that this
/// one might start. To be called once, before any is opened.
pub(crate) fn passed_fds() -> impl Iterator<Item = Option<OwnedFd>> {
    (3..).map(|number| {
        // SAFETY: fcntl(2) looks at a number and at no memory.
        // JUSTIFICATION: it is not known yet whether there is such a descriptor.
        let is_there = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } == 0;
        // SAFETY: it is open, and nobody in this process has opened it, so nobody owns it.
        // JUSTIFICATION: only its number was passed.
        is_there.then(|| unsafe { OwnedFd::from_raw_fd(number) })
    })
}

/// Another process that is as this one, which must have a single thread; `true` in the new one.
///
/// # Panics
/// If there is more than one thread.
pub(crate) fn split() -> io::Result<bool> {
    let threads = std::fs::read_dir("/proc/self/task").map_err(|e| {
        let what = format!("cannot see threads in /proc/self/task, is /proc mounted? {e}");
        io::Error::other(what)
    })?;
    assert_eq!(threads.count(), 1, "a lock that another thread has would never be free there");
    // SAFETY: there is no other thread, so nothing is locked or half done in the copy.
    // JUSTIFICATION: a program of its own would have to be found, and be of this very version.
    let is_child = matches!(unsafe { fork() }?, ForkResult::Child);
    if is_child {
        drop(take_stored()); // they are the daemon's alone
    }
    Ok(is_child)
}
