//! The system calls that need `unsafe`, each behind a safe function.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

/// Gives a thread (by its id) the SCHED_RR class with this priority.
pub(crate) fn set_round_robin(tid: i32, priority: i32) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: `param` is a valid sched_param that outlives the call.
    let result = unsafe { libc::sched_setscheduler(tid, libc::SCHED_RR, &raw const param) };
    Errno::result(result)?;
    Ok(())
}

/// Gives a thread (by its id; 0 is the caller) the SCHED_FIFO class with this priority.
pub(crate) fn set_fifo(tid: i32, priority: i32) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: `param` is a valid sched_param that outlives the call.
    let result = unsafe { libc::sched_setscheduler(tid, libc::SCHED_FIFO, &raw const param) };
    Errno::result(result)?;
    Ok(())
}

/// Gives a thread (by its id) the default scheduling class again.
pub(crate) fn set_normal(tid: i32) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: `param` is a valid sched_param that outlives the call.
    let result = unsafe { libc::sched_setscheduler(tid, libc::SCHED_OTHER, &raw const param) };
    Errno::result(result)?;
    Ok(())
}

mod ioctl {
    nix::ioctl_write_int!(tun_set_iff, b'T', 202);
    nix::ioctl_write_int!(tun_set_offload, b'T', 208);
}

/// linux/if_tun.h: the features of a tap's reader: CSUM, TSO4, TSO6, TSO_ECN.
const TUN_OFFLOADS: u64 = 0x01 | 0x02 | 0x04 | 0x08;

/// Makes a tap `name` in the calling thread's network namespace, whose packets carry virtio-net
/// headers. Those that it gives may be super-segments, or else are cut by the kernel. It lives as
/// long as the descriptor, which does not block.
pub(crate) fn make_tap(name: &str, super_segments: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open("/dev/net/tun")?;
    // SAFETY: ifreq is plain data for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    assert!(name.len() < request.ifr_name.len(), "a name of ours");
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).expect("0x5002 fits");
    let pointer: *const libc::ifreq = &raw const request;
    // SAFETY: TUNSETIFF takes a pointer to an ifreq, which outlives the call; TUNSETOFFLOAD takes
    // its argument by value.
    unsafe {
        ioctl::tun_set_iff(file.as_raw_fd(), pointer.addr() as u64)?;
        let offloads = if super_segments { TUN_OFFLOADS } else { 0 };
        ioctl::tun_set_offload(file.as_raw_fd(), offloads)?;
    }
    Ok(file)
}

/// A socket for whole frames of this EtherType on an interface, on which reading takes no longer
/// than `limit`.
pub(crate) fn packet_socket(ifname: &str, ethertype: u16, limit: Duration) -> io::Result<OwnedFd> {
    let protocol = ethertype.to_be();
    // SAFETY: socket(2) takes numbers; what it returns is ours alone.
    let fd = unsafe {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        let fd = Errno::result(libc::socket(libc::AF_PACKET, kind, protocol.into()))?;
        OwnedFd::from_raw_fd(fd)
    };
    // SAFETY: sockaddr_ll is plain data for which all zeros is a value.
    let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
    address.sll_family = libc::c_ushort::try_from(libc::AF_PACKET).expect("17 fits");
    address.sll_protocol = protocol;
    let index = if_nametoindex(ifname)?;
    address.sll_ifindex = index.try_into().map_err(io::Error::other)?;
    let size = libc::socklen_t::try_from(mem::size_of_val(&address)).expect("a small struct");
    let pointer: *const libc::sockaddr_ll = &raw const address;
    // SAFETY: the kernel reads a sockaddr_ll, of that size, that outlives the call.
    Errno::result(unsafe { libc::bind(fd.as_raw_fd(), pointer.cast(), size) })?;
    let limit = TimeVal::microseconds(limit.as_micros().try_into().map_err(io::Error::other)?);
    setsockopt(&fd, sockopt::ReceiveTimeout, &limit)?;
    Ok(fd)
}

/// Segments this TCP socket has retransmitted since it was connected.
pub(crate) fn tcp_retransmits(socket: &impl AsRawFd) -> io::Result<u32> {
    // SAFETY: tcp_info is plain data for which all zeros is a value.
    let mut info: libc::tcp_info = unsafe { mem::zeroed() };
    let mut size = libc::socklen_t::try_from(mem::size_of_val(&info)).expect("a small struct");
    // SAFETY: the kernel writes at most `size` bytes into `info`, which outlives the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut size,
        )
    };
    Errno::result(result)?;
    Ok(info.tcpi_total_retrans)
}

/// Bounds a socket's rate, bytes per second: its segments are paced from now on.
pub(crate) fn set_pacing(socket: &impl AsRawFd, rate: u32) -> io::Result<()> {
    let size = libc::socklen_t::try_from(mem::size_of_val(&rate)).expect("four");
    // SAFETY: the kernel reads `size` bytes of `rate`, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const rate).cast(),
            size,
        )
    };
    Errno::result(result)?;
    Ok(())
}

/// Makes the child get SIGKILL when the thread that spawns it ends, and puts it into a process
/// group of its own, so that a terminal's ^C reaches the lab only.
pub(crate) fn die_with_parent(command: &mut Command) {
    command.process_group(0);
    let parent = nix::unistd::getpid();
    let hook = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have gone before the line above took effect.
        if nix::unistd::getppid() != parent {
            return Err(Errno::ESRCH.into());
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls only: no allocation, no locks, async-signal-safe.
    unsafe { command.pre_exec(hook) };
}
