//! Another host's bytes in a stream of the virtual TOE: `daemon`'s reader of it, over a socket, in
//! pieces of any length, with a guest that takes payload in parts of any length.
//!
//! Input: who has connected, then operations: bytes and messages that the other host is about to
//! say, pieces of them that are sent, what the guest takes. A model that parses all bytes again and
//! again says what must be heard, and how far the reader may have read: of the next message what
//! stands before its payload, and nothing behind what waits to be decided or taken.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;

use arbitrary::Unstructured;
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::id::{ShadowId, Side};
use nightporter_core::toe::message::{DATA_MAX, Kind, LEN, Message, REQUEST_LEN, Request};
use nightporterd::sockets::{Heard, StreamReader};
use rustix::io::{ioctl_fionread, write};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::noise;

const OPS_MAX: usize = 100;
/// Magic, version, zeros.
const HELLO_LEN: usize = 40;
const MAGIC: &[u8] = b"npvtoe\0";
/// A tag and a key, then an address of so many bytes.
const INTRODUCTION_HEAD: usize = 40;
const ADDRESS_MAX: usize = 4096;

/// Judges one input.
pub fn run(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(mut world) = World::new(&mut u) else { return };
    for _ in 0..OPS_MAX {
        if u.is_empty() || world.step(&mut u).is_err() {
            break;
        }
        if !world.hears() {
            return;
        }
    }
    world.ends();
}

/// Hosts that say a little of everything.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (1..8).map(|n| noise(n, 300 * n as usize)).collect()
}

/// The next part of a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    Hello,
    /// Of an introduction, which it is heard with.
    Length,
    Head,
    Payload(usize),
}

/// The other host, and what its bytes mean.
struct World {
    reader: StreamReader,
    /// Another descriptor of the reader's socket, and the other host's end of it.
    ours: OwnedFd,
    theirs: OwnedFd,
    is_opener: bool,
    /// All that it says, and so much of it is on its way.
    said: Vec<u8>,
    sent: usize,
    /// The part behind it was read.
    heard: usize,
    stage: Stage,
    has_ended: bool,
    /// Bytes of payload that the guest takes at a time.
    room: usize,
}

impl World {
    fn new(u: &mut Unstructured<'_>) -> arbitrary::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (ours, theirs) = pair.expect("two sockets");
        let is_opener = u.arbitrary()?;
        let socket = ours.try_clone().expect("a descriptor");
        let mut world = Self {
            reader: StreamReader::new(socket, is_opener),
            ours,
            theirs,
            is_opener,
            said: Vec::new(),
            sent: 0,
            heard: 0,
            stage: Stage::Hello,
            has_ended: false,
            room: 1,
        };
        if u.ratio(31, 32)? {
            world.says_hello(u)?;
        }
        Ok(world)
    }

    fn says_hello(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let version = if u.ratio(15, 16)? { u.int_in_range(1..=2)? } else { u.arbitrary()? };
        self.said.extend(MAGIC);
        self.said.push(version);
        let zeros = if u.ratio(15, 16)? { [0; 32] } else { u.arbitrary()? };
        self.said.extend(zeros);
        if version == 2 {
            let len: u16 = match u.int_in_range(0..=7)? {
                0 => u.arbitrary()?,
                1 => u.int_in_range(4090..=4200)?,
                _ => u.int_in_range(30..=200)?,
            };
            self.said.extend(len.to_le_bytes());
            let len = usize::from(len).min(5000);
            self.said.extend(noise(u32::from(version) + 1, len));
        }
        Ok(())
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        match u.int_in_range(0..=11)? {
            0 => {
                let len = u.int_in_range(0..=100)?;
                let bytes = u.bytes(usize::min(len, u.len()))?.to_vec();
                self.said.extend(bytes);
            }
            1 => self.room = u.int_in_range(1..=1000)?,
            2 => self.room = 1 << u.int_in_range(0..=17)?,
            3..=6 => self.says_message(u)?,
            7 => self.sends(1),
            8 | 9 => self.sends(u.int_in_range(1..=100)?),
            _ => self.sends(usize::MAX),
        }
        Ok(())
    }

    /// A message, with what stands behind it, or nearly.
    fn says_message(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let len = match u.int_in_range(0..=7)? {
            0 => u.int_in_range(0..=DATA_MAX + 1)?,
            _ => u.int_in_range(0..=300)?,
        };
        let kind = match u.int_in_range(0..=9)? {
            0 | 1 => Kind::Request { edge: u.arbitrary()? },
            2 => Kind::Established { edge: u.arbitrary()? },
            3..=5 => Kind::Data { offset: u.arbitrary()?, len },
            6 => Kind::Credit { edge: u.arbitrary()? },
            7 => Kind::Fin { total: u.arbitrary()? },
            8 => Kind::Taken,
            _ => Kind::Reset(*u.choose(&Errno::ALL)?),
        };
        let is_ours = u.ratio(31, 32)?;
        let to = if is_ours == self.is_opener { Side::Opener } else { Side::Acceptor };
        let id = ShadowId { incarnation: 7, serial: u.arbitrary()? };
        self.said.extend(Message { id, to, kind }.emit());
        if u.ratio(1, 32)? {
            return Ok(()); // and something else comes
        }
        match kind {
            Kind::Request { .. } => {
                let (from, to) = (([10, 0, 0, 1], u.arbitrary()?), ([10, 0, 0, 2], 80));
                let request = Request { network: 7, from: from.into(), to: to.into() };
                self.said.extend(request.emit());
            }
            Kind::Data { len, .. } => self.said.extend(noise(len, len as usize)),
            _ => {}
        }
        Ok(())
    }

    /// The next bytes are on their way, `most` at most, as far as the socket takes them.
    fn sends(&mut self, most: usize) {
        let rest = &self.said[self.sent..];
        let rest = &rest[..rest.len().min(most)];
        match write(&self.theirs, rest) {
            Ok(len) => self.sent += len,
            Err(e) => assert_eq!(std::io::Error::from(e).kind(), ErrorKind::WouldBlock),
        }
    }

    /// All that there is, until there is no more. `false`: nothing more is heard.
    fn hears(&mut self) -> bool {
        loop {
            let (expected, next) = self.expects();
            let heard = self.reader.poll();
            assert_eq!(heard, expected, "{:?} at byte {}", self.stage, self.heard);
            if let Some((len, stage)) = next {
                (self.heard, self.stage) = (self.heard + len, stage);
            }
            self.look();
            match heard {
                Heard::Nothing => return true,
                Heard::Lost | Heard::Nonsense => return false,
                Heard::Introduced => assert!(self.reader.take_introduction()),
                Heard::Payload(left) => {
                    let before = self.heard;
                    let may_go_on = self.takes(left as usize);
                    self.look();
                    if self.heard == before {
                        return may_go_on;
                    }
                }
                Heard::Hello | Heard::Message(_) | Heard::Request(..) => {}
                Heard::Held(_) => panic!("nothing overtakes in a stream"),
            }
        }
    }

    /// The guest takes payload. `false`: the stream has ended in it.
    fn takes(&mut self, left: usize) -> bool {
        let there = self.sent - self.heard;
        match self.reader.receive(self.room) {
            Ok(payload) => {
                assert!(payload.len() <= self.room.min(left) && !payload.is_empty());
                assert_eq!(payload[..], self.said[self.heard..self.heard + payload.len()]);
                self.heard += payload.len();
                let left = left - payload.len();
                self.stage = if left == 0 { Stage::Head } else { Stage::Payload(left) };
                true
            }
            Err(e) => {
                let kind =
                    if self.has_ended { ErrorKind::UnexpectedEof } else { ErrorKind::WouldBlock };
                assert_eq!((e.kind(), there), (kind, 0));
                !self.has_ended
            }
        }
    }

    /// The expected next result, its number of bytes, and the next part behind it.
    fn expects(&self) -> (Heard, Option<(usize, Stage)>) {
        let there = &self.said[self.heard..self.sent];
        let nothing = (if self.has_ended { Heard::Lost } else { Heard::Nothing }, None);
        let nonsense = (Heard::Nonsense, None);
        match self.stage {
            Stage::Hello => {
                let Some(hello) = there.first_chunk::<HELLO_LEN>() else { return nothing };
                let (head, zeros) = hello.split_last_chunk::<32>().expect("it is longer");
                let stage = match head.strip_prefix(MAGIC) {
                    Some([1]) => Stage::Head,
                    Some([2]) => Stage::Length,
                    _ => return nonsense,
                };
                if *zeros != [0; 32] {
                    return nonsense;
                }
                (Heard::Hello, Some((HELLO_LEN, stage)))
            }
            Stage::Length => {
                let Some(len) = there.first_chunk() else { return nothing };
                let len = usize::from(u16::from_le_bytes(*len));
                match len {
                    // One that is too short, or a little too long, is read as a whole before.
                    1..=StreamReader::BYTES_MAX if there.len() < 2 + len => nothing,
                    _ if is_introduction(len) => (Heard::Introduced, Some((2 + len, Stage::Head))),
                    _ => nonsense,
                }
            }
            Stage::Head => {
                let Some(head) = there.first_chunk::<LEN>() else { return nothing };
                let ours = if self.is_opener { Side::Opener } else { Side::Acceptor };
                let Some(message) = Message::parse(head).ok().filter(|it| it.to == ours) else {
                    return nonsense;
                };
                match message.kind {
                    // Only the host that has connected asks.
                    Kind::Request { .. } if self.is_opener => nonsense,
                    Kind::Request { .. } => {
                        let Some(request) = there[LEN..].first_chunk::<REQUEST_LEN>() else {
                            return nothing;
                        };
                        let len = LEN + REQUEST_LEN;
                        Request::parse(request).map_or(nonsense, |request| {
                            (Heard::Request(message, request), Some((len, Stage::Head)))
                        })
                    }
                    Kind::Data { len, .. } => {
                        let stage = Stage::Payload(len as usize);
                        (Heard::Message(message), Some((LEN, stage)))
                    }
                    _ => (Heard::Message(message), Some((LEN, Stage::Head))),
                }
            }
            Stage::Payload(left) => {
                (Heard::Payload(u32::try_from(left).expect("no more than 64 KiB")), None)
            }
        }
    }

    /// Nothing is in memory that need not be, and nothing was read that may have to wait.
    fn look(&self) {
        assert!(self.reader.kept_bytes() <= StreamReader::BYTES_MAX);
        let unread = ioctl_fionread(&self.ours).expect("it is a socket");
        let read = self.sent - usize::try_from(unread).expect("small") - self.heard;
        let there = &self.said[self.heard..self.sent];
        let most = match self.stage {
            Stage::Hello => HELLO_LEN,
            Stage::Payload(_) => 0,
            Stage::Length => {
                let len = there.first_chunk().map_or(0, |len| u16::from_le_bytes(*len).into());
                if len <= StreamReader::BYTES_MAX { 2 + len } else { 2 }
            }
            Stage::Head => match there.first_chunk().map(Message::parse) {
                Some(Ok(Message { kind: Kind::Request { .. }, .. })) if !self.is_opener => {
                    LEN + REQUEST_LEN
                }
                _ => LEN,
            },
        };
        assert!(read <= most, "{read} bytes beyond what was heard, before {:?}", self.stage);
    }

    /// All is sent, and then no more: whatever was said, it comes to an end.
    fn ends(mut self) {
        while self.sent < self.said.len() {
            let before = (self.sent, self.heard);
            self.sends(usize::MAX);
            if !self.hears() {
                return;
            }
            assert_ne!((self.sent, self.heard), before, "it stands still");
        }
        rustix::net::shutdown(&self.theirs, rustix::net::Shutdown::Write).expect("it is there");
        self.has_ended = true;
        assert!(!self.hears(), "its end is one");
    }
}

const fn is_introduction(len: usize) -> bool {
    INTRODUCTION_HEAD < len && len <= INTRODUCTION_HEAD + ADDRESS_MAX
}
