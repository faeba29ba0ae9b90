//! rtnetlink(7): a request, and whether it was done; or a list.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recvmsg, sendmsg, socket,
};

// include/uapi/linux/netlink.h.
const NLM_F_REQUEST: u16 = 0x01;
const NLM_F_ACK: u16 = 0x04;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// Nothing of that kind is there.
pub(crate) const NLM_F_EXCL: u16 = 0x200;
/// It is made.
pub(crate) const NLM_F_CREATE: u16 = 0x400;
/// Bytes of `struct nlmsghdr`, and of `struct rtattr`.
const HEADER: usize = 16;
const ATTRIBUTE: usize = 4;
/// More than a message has.
const ANSWER: usize = 32 << 10;

/// An attribute: its type, its value, and zeros up to the next multiple of four bytes.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(ATTRIBUTE + value.len()).expect("short");
    let mut bytes = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The value of the first attribute of this type.
pub(crate) fn value(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let [a, b, c, d] = *bytes.first_chunk::<ATTRIBUTE>()?;
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let value = bytes.get(ATTRIBUTE..len)?;
        if u16::from_ne_bytes([c, d]) == wanted {
            return Some(value);
        }
        bytes = bytes.get(len.next_multiple_of(4)..)?;
    }
}

/// A socket in the network namespace of the process that made it.
#[derive(Debug)]
pub(crate) struct Netlink {
    fd: OwnedFd,
    /// Of the last request; answers have it, too.
    number: AtomicU32,
}

impl Netlink {
    pub(crate) fn open() -> io::Result<Self> {
        let (kind, flags) = (SockType::Raw, SockFlag::SOCK_CLOEXEC);
        let fd = socket(AddressFamily::Netlink, kind, flags, SockProtocol::NetlinkRoute)?;
        Ok(Self { fd, number: AtomicU32::new(0) })
    }

    /// Asks the kernel for something, and waits until it is done.
    pub(crate) fn request(&self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        self.ask(kind, flags | NLM_F_ACK, body, &mut |_| {})
    }

    /// Asks for a list, of whose members `take` gets the bodies.
    pub(crate) fn list(
        &self,
        kind: u16,
        body: &[u8],
        take: &mut impl FnMut(&[u8]),
    ) -> io::Result<()> {
        self.ask(kind, NLM_F_DUMP, body, take)
    }

    fn ask(
        &self,
        kind: u16,
        flags: u16,
        body: &[u8],
        take: &mut impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let number = self.number.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let len = u32::try_from(HEADER + body.len()).expect("short");
        let head = [
            &len.to_ne_bytes()[..],
            &kind.to_ne_bytes(),
            &(flags | NLM_F_REQUEST).to_ne_bytes(),
            &number.to_ne_bytes(),
            &[0; 4],
        ]
        .concat();
        let parts = [IoSlice::new(&head), IoSlice::new(body)];
        sendmsg::<()>(self.fd.as_raw_fd(), &parts, &[], MsgFlags::empty(), None)?;
        let mut bytes = vec![0; ANSWER];
        loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let got = recvmsg::<()>(self.fd.as_raw_fd(), &mut parts, None, MsgFlags::empty())?;
            let len = got.bytes;
            if let Some(end) = Self::read(&bytes[..len], number, take) {
                return end;
            }
        }
    }

    /// Reads messages that are answers to the request with this number. `None`: there are more.
    fn read(
        mut messages: &[u8],
        number: u32,
        take: &mut impl FnMut(&[u8]),
    ) -> Option<io::Result<()>> {
        while let Some(head) = messages.first_chunk::<HEADER>() {
            let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
            let len = word(0) as usize;
            let Some(body) = messages.get(HEADER..len) else { break };
            let code = || body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
            match u16::from_ne_bytes([head[4], head[5]]) {
                _ if word(8) != number => {} // of one whose answer was not awaited
                NLMSG_DONE => return Some(Ok(())),
                // An acknowledgement is an error with a number, which may be 0.
                NLMSG_ERROR if code() == 0 => return Some(Ok(())),
                NLMSG_ERROR => return Some(Err(Errno::from_raw(-code()).into())),
                _ => take(body),
            }
            messages = messages.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        None
    }
}
