//! rtnetlink(7): a request, and whether it was done.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

// include/uapi/linux/netlink.h.
const NLM_F_REQUEST: u16 = 0x01;
const NLM_F_ACK: u16 = 0x04;
/// Nothing of that kind is there.
pub(crate) const NLM_F_EXCL: u16 = 0x200;
/// It is made.
pub(crate) const NLM_F_CREATE: u16 = 0x400;
/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
/// More than an acknowledgement has, with the request that it quotes.
const ANSWER: usize = 4096;

/// An attribute: its type, its value, and zeros up to the next multiple of four bytes.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(4 + value.len()).expect("short");
    let mut bytes = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Asks the kernel for something in this network namespace, and waits until it is done.
pub(crate) fn request(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let fd: OwnedFd = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )?;
    let len = u32::try_from(HEADER + body.len()).expect("short");
    let flags = flags | NLM_F_REQUEST | NLM_F_ACK;
    let head = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 8]];
    send(fd.as_raw_fd(), &[&head.concat(), body].concat(), MsgFlags::empty())?;
    let mut answer = [0; ANSWER];
    let len = recv(fd.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    // An acknowledgement is an error with a number, which may be 0.
    let code = answer[..len].get(HEADER..).and_then(|body| body.first_chunk());
    match code.map(|code| i32::from_ne_bytes(*code)) {
        Some(0) => Ok(()),
        Some(code) => Err(Errno::from_raw(-code).into()),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}
