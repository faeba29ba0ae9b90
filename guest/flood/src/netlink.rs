//! netlink(7): a request to the kernel, and the answer.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    socket,
};

// include/uapi/linux/netlink.h, Linux 6.1.
const NLMSG_ERROR: u16 = 2;
pub(crate) const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 0x01;
const NLM_F_ACK: u16 = 0x04;
pub(crate) const NLM_F_DUMP: u16 = 0x300;
/// Bytes of `struct nlmsghdr`.
const NLMSGHDR: usize = 16;
/// More than any answer of the kernel (NLMSG_GOODSIZE is at most 8 KiB, a dump's skb 32 KiB).
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// A socket.
#[derive(Debug)]
pub(crate) struct Netlink(OwnedFd);

impl Netlink {
    /// Opens it, in the caller's network namespace, to hear of these groups.
    ///
    /// # Errors
    /// The kernel has no netlink, or not this protocol of it.
    pub(crate) fn open(protocol: SockProtocol, groups: u32, flags: SockFlag) -> Result<Self> {
        let flags = flags | SockFlag::SOCK_CLOEXEC;
        let fd =
            socket(AddressFamily::Netlink, SockType::Raw, flags, protocol).context("netlink")?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups)).context("netlink")?;
        Ok(Self(fd))
    }

    /// Asks for something, and waits until it is done.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn request(&self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        self.send(kind, flags | NLM_F_ACK, body)?;
        self.answers(|kind, _, _| Ok(kind == NLMSG_ERROR)) // one that is none: an acknowledgement
    }

    /// Sends a request.
    ///
    /// # Errors
    /// The kernel does not take it.
    pub(crate) fn send(&self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        let length = u32::try_from(NLMSGHDR + body.len())?;
        let head = [
            &length.to_ne_bytes()[..],
            &kind.to_ne_bytes(),
            &(flags | NLM_F_REQUEST).to_ne_bytes(),
            &[0; 8],
        ];
        send(self.0.as_raw_fd(), &[&head.concat(), body].concat(), MsgFlags::empty())?;
        Ok(())
    }

    /// Reads the kernel's messages until `is_last` says so of one; it gets type, flags and body.
    ///
    /// # Errors
    /// The kernel's, or `is_last`'s.
    pub(crate) fn answers(
        &self,
        mut is_last: impl FnMut(u16, u16, &[u8]) -> Result<bool>,
    ) -> Result<()> {
        let mut buffer = vec![0; ANSWER_BYTES_MAX];
        loop {
            let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::MSG_TRUNC)?;
            let mut rest = buffer.get(..length).context("an answer that is too long")?;
            while let Some((head, _)) = rest.split_first_chunk::<NLMSGHDR>() {
                let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
                let length = usize::try_from(length)?;
                ensure!((NLMSGHDR..=rest.len()).contains(&length), "a message of {length} bytes");
                let kind = u16::from_ne_bytes([head[4], head[5]]);
                let flags = u16::from_ne_bytes([head[6], head[7]]);
                let body = &rest[NLMSGHDR..length];
                if kind == NLMSG_ERROR {
                    let code = body.first_chunk().context("an error without a number")?;
                    match i32::from_ne_bytes(*code) {
                        0 => {}
                        code => return Err(Errno::from_raw(-code).into()),
                    }
                }
                if is_last(kind, flags, body)? {
                    return Ok(());
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
