//! vhost-user messages on a UNIX stream socket, with their descriptors.
//!
//! A message is a 12-byte header (request, flags, payload size; all u32 in host order) and a
//! payload. Descriptors travel as ancillary data of the first byte. The socket is non-blocking, and
//! a message is put together over as many calls as it takes, so a front-end that stops half way
//! delays nothing else.
//!
//! Source: QEMU's `docs/interop/vhost-user.rst`, and what QEMU 7.2, UML 6.1 and DPDK 22.11 send.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vhost::vhost_user::message::{FrontendReq, MAX_ATTACHED_FD_ENTRIES, MAX_MSG_SIZE};
use vm_memory::ByteValued;

use crate::closer::{Foreign, Owner};

/// Header bytes.
pub const HEADER_LEN: usize = 12;
/// Largest payload accepted: SET_MEM_TABLE with 32 regions takes 1032, a configuration space 4096.
pub const PAYLOAD_MAX: usize = MAX_MSG_SIZE;
/// Most descriptors in one message.
pub const FDS_MAX: usize = MAX_ATTACHED_FD_ENTRIES;

/// Protocol version 1, in the low two bits of the flags.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const F_REPLY: u32 = 4;
const F_NEED_REPLY: u32 = 8;

/// Why a message was not obeyed. The text is for the operator's log.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Not a request of the specification, or one for a feature that was not offered.
    #[error("request {0} is not supported")]
    Unsupported(u32),
    /// The payload is shorter than the request needs.
    #[error("the payload has {have} bytes of {need}")]
    Short {
        /// Bytes that came.
        have: usize,
        /// Bytes that this request needs.
        need: usize,
    },
    /// The request needs descriptors that did not come.
    #[error("a file descriptor is missing")]
    NoDescriptor,
    /// A kick, call or error descriptor that cannot be waited for, would write to a file, or with
    /// which its owner could stop us.
    #[error(
        "a notification descriptor is not an eventfd (nor a pipe or a socket, which are taken with \
         vm.allow_unsealed_memory = true)"
    )]
    BadDescriptor,
    /// A queue that the device does not have.
    #[error("there is no queue {0}")]
    NoQueue(u32),
    /// A value outside what the specification or the offer allows.
    #[error("{0}")]
    Value(&'static str),
    /// Features that were not offered.
    #[error("features {0:#x} were not offered")]
    Features(u64),
    /// Memory that cannot be used.
    #[error("memory: {0}")]
    Memory(#[from] super::guest_mem::MemError),
    /// A ring that cannot be used.
    #[error("ring: {0}")]
    Ring(#[from] super::ring::RingFault),
    /// The system refused something.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Why the connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The front-end closed it.
    #[error("the front-end closed the connection")]
    Closed,
    /// The bytes are not vhost-user.
    #[error("not a vhost-user message: {0}")]
    Framing(&'static str),
    /// A request failed whose protocol has no error answer.
    #[error("{request}: {refusal}")]
    Refused {
        /// The request's name or number.
        request: String,
        /// Why.
        refusal: Refusal,
    },
    /// The front-end does not read its replies.
    #[error("the front-end does not read its replies")]
    Stuffed,
    /// It passes descriptors, and too many of those before do not close.
    #[error("descriptors or memory that the front-end passed before do not close")]
    Behind,
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// One request, whole.
#[derive(Debug)]
pub struct Message {
    /// The number; [`Self::request`] names it.
    pub code: u32,
    /// The front-end waits for a yes or no (if REPLY_ACK was negotiated).
    pub need_reply: bool,
    /// The payload, possibly longer than the request needs (UML 6.1's SET_MEM_TABLE is).
    pub payload: Vec<u8>,
    /// Descriptors; those that are not taken are closed.
    pub fds: Vec<Foreign>,
}

impl Message {
    /// The request, if it is one.
    #[must_use]
    pub fn request(&self) -> Option<FrontendReq> {
        FrontendReq::try_from(self.code).ok()
    }

    /// The name for logs.
    #[must_use]
    pub fn name(&self) -> String {
        self.request().map_or_else(|| format!("request {}", self.code), |r| format!("{r:?}"))
    }

    /// The `T` that starts at byte `at` of the payload.
    pub fn body<T: ByteValued + Default>(&self, at: usize) -> Result<T, Refusal> {
        let mut value = T::default();
        let to = value.as_mut_slice();
        let (have, need) = (self.payload.len(), at + to.len());
        to.copy_from_slice(self.payload.get(at..need).ok_or(Refusal::Short { have, need })?);
        Ok(value)
    }

    /// The first descriptor.
    pub fn take_fd(&mut self) -> Result<Foreign, Refusal> {
        if self.fds.is_empty() {
            return Err(Refusal::NoDescriptor);
        }
        Ok(self.fds.swap_remove(0))
    }
}

/// An answer to a request.
#[derive(Debug, Default)]
pub struct Reply {
    /// The payload.
    pub payload: Vec<u8>,
    /// A descriptor to go with it.
    pub fd: Option<OwnedFd>,
}

impl Reply {
    /// A reply of one value.
    pub fn of<T: ByteValued>(value: T) -> Self {
        Self { payload: value.as_slice().to_vec(), fd: None }
    }
}

/// A connected front-end.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    /// The owner of incoming descriptors.
    owner: Owner,
    /// Header and payload as far as they have come.
    bytes: Vec<u8>,
    fds: Vec<Foreign>,
}

impl Channel {
    /// Takes over a connection to `owner` and makes it non-blocking.
    pub fn new(stream: UnixStream, owner: Owner) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, owner, bytes: Vec::new(), fds: Vec::new() })
    }

    /// The socket, to wait for.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether the other end has closed, even if its last messages still wait to be read.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Whether part of a message has been read.
    pub(crate) const fn is_amid_message(&self) -> bool {
        !self.bytes.is_empty()
    }

    /// Hangs up, and gives the socket back, to be taken out of an epoll set before it is closed.
    #[must_use]
    pub fn into_fd(self) -> Foreign {
        hang_up(self.stream, &self.owner)
    }

    /// The next whole message; `None` if more has to arrive first.
    pub fn receive(&mut self) -> Result<Option<Message>, Broken> {
        loop {
            let want = match self.bytes.first_chunk::<HEADER_LEN>() {
                None => HEADER_LEN,
                Some(header) => HEADER_LEN + payload_len(header)?,
            };
            if self.bytes.len() == want && want >= HEADER_LEN && self.has_header() {
                return Ok(Some(self.finish()));
            }
            if !self.read_up_to(want)? {
                return Ok(None);
            }
        }
    }

    /// Sends the answer to the request `code`.
    pub fn reply(&self, code: u32, reply: &Reply) -> Result<(), Broken> {
        let size = u32::try_from(reply.payload.len()).expect("replies are small");
        let mut bytes = Vec::with_capacity(HEADER_LEN + reply.payload.len());
        for word in [code, VERSION | F_REPLY, size] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(&reply.payload);
        let fd = reply.fd.as_ref().map(AsFd::as_fd);
        let fds = fd.as_slice();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "room for one");
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, flags) {
            Ok(n) if n == bytes.len() => Ok(()),
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Err(Broken::Stuffed),
            Err(error) => Err(Broken::Io(error.into())),
        }
    }

    const fn has_header(&self) -> bool {
        self.bytes.len() >= HEADER_LEN
    }

    /// Reads until `want` bytes are there; `false` if the socket ran dry first.
    fn read_up_to(&mut self, want: usize) -> Result<bool, Broken> {
        while self.bytes.len() < want {
            let have = self.bytes.len();
            self.bytes.resize(want, 0);
            let got = self.read_into(have);
            self.bytes.truncate(have + got.as_ref().map_or(0, |n| *n));
            match got {
                Ok(0) => return Err(Broken::Closed),
                Ok(_) => {}
                Err(Broken::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(Broken::Io(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    fn read_into(&mut self, from: usize) -> Result<usize, Broken> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut to = [IoSliceMut::new(&mut self.bytes[from..])];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = recvmsg(&self.stream, &mut to, &mut control, flags).map_err(io::Error::from)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds.map(|fd| Foreign::of(&self.owner, fd)));
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > FDS_MAX {
            return Err(Broken::Framing("too many descriptors"));
        }
        Ok(got.bytes)
    }

    fn finish(&mut self) -> Message {
        let payload = self.bytes.split_off(HEADER_LEN);
        let header = std::mem::take(&mut self.bytes);
        let (code, flags) = (word(&header, 0), word(&header, 4));
        let fds = std::mem::take(&mut self.fds);
        Message { code, need_reply: flags & F_NEED_REPLY != 0, payload, fds }
    }
}

/// Ends a connection to `owner`, to be closed later: its unread descriptors are closed with it.
#[must_use]
pub fn hang_up(stream: UnixStream, owner: &Owner) -> Foreign {
    // It may have hung up itself.
    let _ = stream.shutdown(Shutdown::Both);
    Foreign::of(owner, stream.into())
}

/// The payload size that a header announces. Errors: it is not the header of a request.
fn payload_len(header: &[u8; HEADER_LEN]) -> Result<usize, Broken> {
    let (flags, size) = (word(header, 4), word(header, 8) as usize);
    if flags & VERSION_MASK != VERSION {
        return Err(Broken::Framing("the version is not 1"));
    }
    if flags & F_REPLY != 0 {
        return Err(Broken::Framing("a reply where a request should be"));
    }
    if size > PAYLOAD_MAX {
        return Err(Broken::Framing("the payload is too long"));
    }
    Ok(size)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
