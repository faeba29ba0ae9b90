//! The frames of an interface, with the kernel's times (packet(7), socket(7)).

use std::io::{self, IoSliceMut};
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{ControlMessageOwned, LinkAddr, MsgFlags, recvmsg, setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, socket_with};

/// Bytes of frames that may wait to be read, as the kernel counts them.
const WAITING: usize = 64 << 20;
/// linux/if_packet.h: `struct tpacket_stats`, frames for the socket and those of them that were
/// lost, since it was read last.
const PACKET_STATISTICS: libc::c_int = 6;

/// A socket that gets each frame of an interface, both ways (packet(7)).
pub(crate) fn listen(interface: &str) -> io::Result<OwnedFd> {
    let index = if_nametoindex(interface)?;
    let all = u16::try_from(libc::ETH_P_ALL).expect("3 fits").to_be();
    // Of no protocol until it is bound: nothing comes before, of other interfaces.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None::<Protocol>)?;
    setsockopt(&socket, sockopt::RcvBufForce, &WAITING)?;
    setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
    // SAFETY: sockaddr_ll is plain data for which all zeros is a value.
    let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
    address.sll_family = libc::c_ushort::try_from(libc::AF_PACKET).expect("17 fits");
    address.sll_protocol = all;
    address.sll_ifindex = index.try_into().map_err(io::Error::other)?;
    let size = libc::socklen_t::try_from(mem::size_of_val(&address)).expect("a small struct");
    let pointer: *const libc::sockaddr_ll = &raw const address;
    // SAFETY: the kernel reads a sockaddr_ll, of that size, that outlives the call.
    Errno::result(unsafe { libc::bind(socket.as_raw_fd(), pointer.cast(), size) })?;
    Ok(socket)
}

/// The next frame: when it was here, since 1970, and its length, however much of it there is room
/// for.
pub(crate) fn receive(socket: &OwnedFd, frame: &mut [u8]) -> nix::Result<(Duration, usize)> {
    let mut space = nix::cmsg_space!(TimeSpec);
    let mut parts = [IoSliceMut::new(frame)];
    // With MSG_TRUNC the length is the frame's own.
    let flags = MsgFlags::MSG_TRUNC;
    let message = recvmsg::<LinkAddr>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    let len = message.bytes;
    let stamped = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::ScmTimestampns(at) => Some(Duration::from(at)),
        _ => None,
    });
    Ok((stamped.ok_or(Errno::ENODATA)?, len))
}

/// Frames that were lost since the last call.
pub(crate) fn lost(socket: &OwnedFd) -> io::Result<u64> {
    let mut seen_and_lost = [0_u32; 2];
    let mut size = libc::socklen_t::try_from(mem::size_of_val(&seen_and_lost)).expect("eight");
    // SAFETY: the kernel writes at most `size` bytes into the two numbers, which outlive the call.
    Errno::result(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            PACKET_STATISTICS,
            (&raw mut seen_and_lost).cast(),
            &raw mut size,
        )
    })?;
    Ok(seen_and_lost[1].into())
}
