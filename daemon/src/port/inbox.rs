//! The datagrams that a socket of overlays gives by one call.

use std::io;
use std::net::{IpAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::AsRawFd;

use nightporter_core::overlay::ecn::Ecn;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg};

/// The longest datagram there is, or as many as the kernel puts together.
pub(super) const INBOX_BYTES: usize = 1 << 16;

/// The sender of datagrams, and their marks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Head {
    /// `None`: there is no sender.
    pub(super) from: Option<IpAddr>,
    pub(super) ecn: Ecn,
    /// Bytes of each but the last.
    pub(super) datagram: usize,
}

/// Datagrams of one host that came by one call.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) bytes: Box<[u8]>,
    /// Where those are that are still to be looked at.
    pub(super) left: Range<usize>,
    pub(super) head: Head,
    /// The kernel's control messages: their length, their ECN field.
    control: Vec<u8>,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; INBOX_BYTES].into(),
            left: 0..0,
            head: Head { from: None, ecn: Ecn::NotEct, datagram: 1 },
            control: nix::cmsg_space!(i32, i32),
        }
    }

    /// Where the next datagram is.
    pub(super) fn pop(&mut self) -> Option<Range<usize>> {
        if self.left.is_empty() {
            return None;
        }
        let at = self.left.start;
        self.left.start = self.left.end.min(at + self.head.datagram);
        Some(at..self.left.start)
    }

    /// Reads the datagrams that have arrived. Errors: there are none.
    pub(super) fn fill(&mut self, socket: &UdpSocket) -> Result<(), Errno> {
        let mut to = [io::IoSliceMut::new(&mut self.bytes)];
        let flags = MsgFlags::MSG_DONTWAIT;
        let fd = socket.as_raw_fd();
        let got = recvmsg::<SockaddrStorage>(fd, &mut to, Some(&mut self.control), flags)?;
        let len = got.bytes;
        let mut head = Head { from: None, ecn: Ecn::NotEct, datagram: len.max(1) };
        for said in got.cmsgs()? {
            match said {
                ControlMessageOwned::UdpGroSegments(n) if n > 0 => {
                    head.datagram = usize::try_from(n).unwrap_or(len).max(1);
                }
                ControlMessageOwned::Ipv4Tos(tos) => head.ecn = Ecn::of_tos(tos),
                ControlMessageOwned::Ipv6TClass(class) => {
                    head.ecn = Ecn::of_tos(class.to_le_bytes()[0]);
                }
                _ => {}
            }
        }
        head.from = got.address.and_then(|address| {
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
        });
        (self.left, self.head) = (0..len, head);
        Ok(())
    }
}
