//! One stream of TCP: messages in and out, whole or in parts, and payload between them that stays
//! in guest memory, unless it is encrypted.
//!
//! Both hosts say [`HELLO_LEN`] bytes first, who connected before the other; then messages
//! (`core/src/toe/message.rs`), of one connection at a time. When that is over, all well, or was
//! refused, the stream can have the next, of the same opener; anything else is the end of it.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use nightporter_core::time::Instant;
use nightporter_core::toe::id::{HostId, ShadowId, Side};
use nightporter_core::toe::message::{Kind, LEN, Message, REQUEST_LEN, Request};
use nightporter_core::toe::sockets::SocketId;

use super::Fabric;
use super::arrival::{Heard, Lost, Waits};
use super::pipe::Pipe;
use super::progress::Progress;
use crate::port::vhost_user::VhostUserPort;
use crate::sockets::batch::Batch;
use crate::sockets::ucx::{ADDRESS_MAX, Channel, Introduction};
use crate::vhost::vsock::Vsock;

/// The first words of hosts: that this is it, their version, and zeros. That a connection was
/// accepted says nothing: the kernel does that for a daemon that stands.
const HELLO_LEN: usize = MAGIC.len() + 1 + 32;
const MAGIC: [u8; 7] = *b"npvtoe\0";
/// Versions: what follows is messages; or an [`Introduction`] before them.
const PLAIN: u8 = 1;
const INTRODUCED: u8 = 2;
const HEAD_LEN: usize = LEN + REQUEST_LEN;
const _: () = assert!(HELLO_LEN <= HEAD_LEN);
/// Bytes of an introduction, at most.
pub(super) const INTRODUCTION_MAX: usize = HEAD_LEN + ADDRESS_MAX;
/// Bytes that wait and are written in a turn.
const FLUSHED_PER_TURN: usize = 256 << 10;
/// Bytes that were written are cut off when they are so many, so that moving the others costs less
/// than writing did.
const CUT_AT: usize = 256 << 10;

/// The connection that a stream has now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in super::super) struct Carried {
    pub(in super::super) name: ShadowId,
    pub(in super::super) socket: SocketId,
    /// The device of its guest.
    pub(in super::super) device: usize,
    /// Network and address of the other host's guest.
    pub(super) guest: (u32, IpAddr),
    /// The other guest has accepted.
    pub(in super::super) is_established: bool,
    /// It has not, and nothing else comes.
    pub(in super::super) is_refused: bool,
    /// Whether `Taken` was said, and heard: after both it is over.
    said_taken: bool,
    heard_taken: bool,
}

/// See the module's doc.
#[derive(Debug)]
pub(in super::super) struct Stream {
    /// `None`: it is not there yet.
    pipe: Option<Pipe>,
    /// Where its other end is.
    pub(in super::super) host: HostId,
    /// The address of this host that it is at.
    pub(in super::super) own: IpAddr,
    /// Our end of its connections: this host connected, or was connected to.
    pub(in super::super) ours: Side,
    pub(in super::super) carried: Option<Carried>,
    /// The other host has said hello.
    pub(in super::super) is_proven: bool,
    /// This host could not begin it, which says nothing of the other one.
    pub(in super::super) has_failed_here: bool,
    /// It ends as soon as what there is to say is said.
    pub(in super::super) closes: bool,
    /// The next message, but for payload: so much of it has come, and so much of it there is to be.
    head: [u8; HEAD_LEN],
    /// The other host's introduction, if it is next or is coming, and if it has come.
    introduces: bool,
    said: Vec<u8>,
    introduction: Option<Introduction>,
    /// Its part of UCX.
    pub(in super::super) channel: Channel,
    have: usize,
    wanted: usize,
    /// Bytes of payload that are next.
    left: u32,
    /// Bytes that the pipe has not taken, from `taken` on.
    out: Vec<u8>,
    taken: usize,
    /// The pipe may take more of it, and no event will say so.
    has_more_to_flush: bool,
    /// How fast it takes that, and what UCX has not sent.
    pub(super) progress: Progress,
    /// Bytes of `out` that are counted for the guest behind it.
    pub(in super::super) charged: usize,
    /// Bytes that are counted for it as promised to the other host: see
    /// [`crate::sockets::arrivals`].
    pub(in super::super) promised: u64,
    /// The period in which its connection sent last, or 0: see [`crate::sockets::shares`].
    pub(in super::super) sent_in: u64,
    /// It stands in a queue.
    pub(in super::super) is_ready: bool,
    /// The reason why its payload waits.
    pub(in super::super) waits: Option<Waits>,
    /// When somebody looks whether it still may be as it is.
    pub(super) deadline: Option<Instant>,
}

impl Stream {
    /// To this host, from an address of this one; the socket comes later.
    pub(super) fn to(now: Instant, host: HostId, own: IpAddr) -> Self {
        let mut stream = Self::new(now, None, (host, own), Side::Opener);
        stream.out.extend(hello(PLAIN));
        stream
    }

    /// From this host, to an address of this one.
    pub(super) fn from(now: Instant, (host, own): (HostId, IpAddr), pipe: impl Into<Pipe>) -> Self {
        Self::new(now, Some(pipe.into()), (host, own), Side::Acceptor)
    }

    fn new(now: Instant, pipe: Option<Pipe>, (host, own): (HostId, IpAddr), ours: Side) -> Self {
        Self {
            pipe,
            host,
            own,
            ours,
            carried: None,
            is_proven: false,
            has_failed_here: false,
            closes: false,
            head: [0; HEAD_LEN],
            introduces: false,
            said: Vec::new(),
            introduction: None,
            channel: Channel::default(),
            have: 0,
            wanted: HELLO_LEN,
            left: 0,
            out: Vec::new(),
            taken: 0,
            has_more_to_flush: false,
            progress: Progress::new(now),
            charged: 0,
            promised: 0,
            sent_in: 0,
            is_ready: false,
            waits: None,
            deadline: None,
        }
    }

    /// This host is to say where its worker is, if the other one may want to know. Nothing but
    /// hello has been said in it.
    pub(super) fn introduce(&mut self, mut channel: Channel, said: Introduction) {
        if self.ours == Side::Opener {
            self.out[MAGIC.len()] = INTRODUCED;
            self.out.extend(said.emit());
        }
        channel.introduce(said);
        self.channel = channel;
    }

    /// Where the other host's worker is, as it has just said.
    pub(super) fn take_introduction(&mut self) -> Option<Introduction> {
        self.introduction.take()
    }

    /// The other host has said hello, and is answered.
    fn meet(&mut self) {
        (self.is_proven, self.have) = (true, 0);
        self.wanted = if self.introduces { size_of::<u16>() } else { LEN };
        if !self.introduces {
            self.channel.stay_away();
        }
        if self.ours == Side::Acceptor {
            match self.channel.introduction() {
                Some(own) => {
                    self.out.extend(hello(INTRODUCED));
                    self.out.extend(own.emit());
                }
                None => self.out.extend(hello(PLAIN)),
            }
            self.has_more_to_flush = true;
        }
    }

    /// Its socket has come.
    pub(super) fn set_pipe(&mut self, pipe: impl Into<Pipe>) {
        self.pipe = Some(pipe.into());
    }

    /// Whether its socket has come.
    pub(super) const fn has_pipe(&self) -> bool {
        self.pipe.is_some()
    }

    /// Whether its bytes are encrypted.
    pub(super) fn is_sealed(&self) -> bool {
        self.pipe.as_ref().is_some_and(Pipe::is_sealed)
    }

    /// The fault of TLS, if there was one.
    pub(super) fn why(&self) -> Option<&str> {
        self.pipe.as_ref().and_then(Pipe::why)
    }

    /// Bytes that wait until the socket takes them, or UCX has sent them.
    pub(in super::super) fn waiting(&self) -> usize {
        self.not_gone() + self.channel.unsent
    }

    /// Whether something waits, and too little of it was taken since then: see [`Progress`].
    pub(in super::super) fn is_stuck(&self, since: Instant) -> bool {
        self.waiting() > 0 && self.progress.has_lasted_since(since)
    }

    /// Bytes that wait until the pipe takes them.
    fn untaken(&self) -> usize {
        self.out.len() - self.taken
    }

    /// And until the socket does.
    fn not_gone(&self) -> usize {
        self.untaken() + self.pipe.as_ref().map_or(0, Pipe::held)
    }

    /// Whether payload is next in the stream itself.
    pub(super) const fn is_in_payload(&self) -> bool {
        self.left > 0
    }

    /// Bytes of an introduction that are in memory for it.
    pub(super) const fn said_len(&self) -> usize {
        self.said.len()
    }

    /// Bytes that are in memory for it.
    #[cfg(test)]
    pub(super) const fn kept_len(&self) -> usize {
        self.out.len()
    }

    /// It has this connection from now on, of a guest with this device and that one of the other
    /// host.
    pub(super) fn set_carried(
        &mut self,
        name: ShadowId,
        (socket, device): (SocketId, usize),
        guest: (u32, IpAddr),
    ) {
        self.channel.forget();
        self.sent_in = 0;
        self.carried = Some(Carried {
            name,
            socket,
            device,
            guest,
            is_established: false,
            is_refused: false,
            said_taken: false,
            heard_taken: false,
        });
    }

    /// Whether the other host owes the rest of a message, and its guest has a place for it.
    pub(in super::super) const fn is_owed(&self) -> bool {
        let has_begun = self.left > 0 || self.have > 0;
        has_begun && self.waits.is_none()
    }

    /// Whether its connection is over at both ends, all well.
    pub(in super::super) fn is_over(&self) -> bool {
        self.carried.is_some_and(|it| it.said_taken && it.heard_taken)
    }

    /// Whether nothing more comes of its connection, and both ends know: it is over, or refused.
    pub(in super::super) fn is_settled(&self) -> bool {
        self.is_over() || self.carried.is_some_and(|it| it.is_refused)
    }

    /// The message that has come, if it is all of it.
    fn whole(&mut self) -> Option<Heard> {
        if self.have < self.wanted {
            return None;
        }
        if !self.is_proven {
            self.introduces = match &self.head[..HELLO_LEN] {
                said if *said == hello(PLAIN) => false,
                said if *said == hello(INTRODUCED) => true,
                _ => return Some(Heard::Nonsense),
            };
            self.meet();
            return Some(Heard::Hello);
        }
        if self.introduces {
            return self.hear_introduction();
        }
        let (head, request) = self.head.split_first_chunk::<LEN>().expect("it is longer");
        let Ok(message) = Message::parse(head) else { return Some(Heard::Nonsense) };
        // Only the host that has begun a stream asks for connections in it.
        let asks = matches!(message.kind, Kind::Request { .. });
        if message.to != self.ours || asks && self.ours == Side::Opener {
            return Some(Heard::Nonsense);
        }
        let heard = match message.kind {
            Kind::Request { .. } if self.wanted == LEN => {
                self.wanted = HEAD_LEN;
                return None;
            }
            Kind::Request { .. } => {
                let request = Request::parse(request.first_chunk().expect("it is as long"));
                request.map_or(Heard::Nonsense, |request| Heard::Request(message, request))
            }
            Kind::Data { len, .. } => {
                self.left = len;
                Heard::Message(message)
            }
            _ => Heard::Message(message),
        };
        (self.have, self.wanted) = (0, LEN);
        self.note(&message, false);
        Some(heard)
    }

    /// Its length, or all of it, has come.
    fn hear_introduction(&mut self) -> Option<Heard> {
        self.have = 0;
        if self.said.is_empty() {
            let len = usize::from(u16::from_le_bytes([self.head[0], self.head[1]]));
            if !(1..=INTRODUCTION_MAX).contains(&len) {
                return Some(Heard::Nonsense);
            }
            (self.said, self.wanted) = (vec![0; len], len);
            return None;
        }
        (self.introduces, self.wanted) = (false, LEN);
        self.introduction = Introduction::parse(&std::mem::take(&mut self.said));
        let is_sound = self.introduction.is_some();
        Some(if is_sound { Heard::Introduced } else { Heard::Nonsense })
    }

    /// Says a message without payload.
    ///
    /// # Errors
    /// The stream is at its end.
    pub(in super::super) fn say(
        &mut self,
        now: Instant,
        message: &Message,
        request: Option<&Request>,
    ) -> Result<(), Lost> {
        // It arrives, or the stream ends: whoever asks for it again has it said once all the same.
        let is_repeated = matches!(message.kind, Kind::Taken)
            && self.carried.is_some_and(|it| it.name == message.id && it.said_taken);
        if is_repeated {
            return Ok(());
        }
        self.note(message, true);
        let mut bytes = message.emit().to_vec();
        bytes.extend(request.iter().flat_map(|request| request.emit()));
        self.begin_to_say(now);
        let sent = match &mut self.pipe {
            Some(pipe) if self.out.is_empty() => sent(pipe.write(&bytes))?,
            _ => 0,
        };
        if sent < bytes.len() {
            self.begin_to_keep();
            self.out.extend(&bytes[sent..]);
        }
        Ok(())
    }

    /// Something is about to be said, and may wait.
    fn begin_to_say(&mut self, now: Instant) {
        if self.waiting() == 0 {
            self.progress = Progress::new(now);
        }
    }

    /// Something is about to wait here.
    const fn begin_to_keep(&mut self) {
        if self.out.is_empty() {
            // The socket may have taken less than it has room for.
            self.has_more_to_flush = self.pipe.is_some();
        }
    }

    /// Says what waits, as far as the socket takes it.
    ///
    /// # Errors
    /// The stream is at its end.
    pub(in super::super) fn flush(&mut self, now: Instant) -> Result<(), Lost> {
        let mut budget = FLUSHED_PER_TURN;
        loop {
            let before = self.not_gone();
            let Some(pipe) = self.pipe.as_mut().filter(|_| before > 0) else { break };
            let end = self.out.len().min(self.taken.saturating_add(budget));
            self.taken += sent(pipe.write(&self.out[self.taken..end]))?;
            match before.saturating_sub(self.not_gone()) {
                0 => break,
                n => {
                    self.progress.note_taken(now, n, self.waiting());
                    budget = budget.saturating_sub(n);
                }
            }
            if budget == 0 {
                self.has_more_to_flush = self.not_gone() > 0;
                break;
            }
        }
        if self.untaken() == 0 {
            (self.out, self.taken) = (Vec::new(), 0);
        } else if self.taken >= CUT_AT {
            self.out.drain(..self.taken);
            self.taken = 0;
        }
        Ok(())
    }

    /// Whether it is to be served again without being asked to: the socket was not full, or not
    /// empty. Once.
    pub(super) fn take_more(&mut self) -> bool {
        let has_more_to_read = self.pipe.as_mut().is_some_and(Pipe::take_more);
        std::mem::take(&mut self.has_more_to_flush) || has_more_to_read
    }

    /// It is served now: what it reads may cost as much as before.
    pub(in super::super) fn begin_turn(&mut self) {
        self.pipe.iter_mut().for_each(Pipe::begin_turn);
    }

    /// The cost of reading in this turn, in bytes, if bytes are encrypted.
    pub(in super::super) fn cost(&self) -> usize {
        self.pipe.as_ref().map_or(0, Pipe::cost)
    }

    /// The meaning of a message for the connection: it may be late, and about the one before.
    fn note(&mut self, message: &Message, is_said: bool) {
        let Some(it) = self.carried.as_mut().filter(|it| it.name == message.id) else { return };
        match message.kind {
            Kind::Established { .. } => it.is_established = true,
            Kind::Taken if is_said => it.said_taken = true,
            Kind::Taken => it.heard_taken = true,
            // The acceptor alone can refuse.
            Kind::Reset(_) => {
                it.is_refused = !it.is_established && is_said == (self.ours == Side::Acceptor);
            }
            _ => {}
        }
    }

    /// Reads payload, `room` bytes at most, by a call that takes a plain socket, how many bytes
    /// there may be, and the place of what is behind them. How many there were.
    ///
    /// # Errors
    /// As of [`Fabric::receive`].
    pub(super) fn receive_by(
        &mut self,
        room: usize,
        call: impl FnOnce(BorrowedFd<'_>, usize, &mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let Some(Pipe::Plain(socket)) = &self.pipe else {
            return Err(ErrorKind::NotConnected.into());
        };
        let left = self.left as usize;
        let len = room.min(left);
        // The next header comes with the last of it.
        let behind = if len == left { &mut self.head[..LEN] } else { &mut [] };
        let got = call(socket.as_fd(), len, behind)?;
        if got == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let payload = got.min(len);
        self.left -= u32::try_from(payload).expect("no more than is left");
        self.have = got - payload;
        Ok(payload)
    }

    /// Its socket, if it is there.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }
}

/// By the stream itself. Only what the socket does not take at once is copied; and all, if it is
/// encrypted.
impl Fabric for Stream {
    fn poll(&mut self) -> Heard {
        if self.left > 0 {
            return Heard::Payload(self.left);
        }
        loop {
            if let Some(heard) = self.whole() {
                return heard;
            }
            let Some(pipe) = &mut self.pipe else { return Heard::Nothing };
            let to = if self.said.is_empty() { &mut self.head[..] } else { &mut self.said };
            let space = &mut to[self.have..self.wanted];
            match pipe.read(space) {
                Ok(0) => return Heard::Lost,
                Ok(len) => self.have += len,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Heard::Nothing,
                Err(_) => return Heard::Lost,
            }
        }
    }

    fn receive(&mut self, port: &mut VhostUserPort<Vsock>, room: usize) -> io::Result<usize> {
        if let Some(Pipe::Sealed(sealed)) = &mut self.pipe {
            let len = room.min(self.left as usize);
            let got = sealed.deliver(len, |at, bytes| port.write_payload_at(at, bytes))?;
            self.left -= u32::try_from(got).expect("no more than is left");
            return Ok(got);
        }
        self.receive_by(room, |socket, len, behind| port.receive(socket, len, behind))
    }

    fn carry(
        &mut self,
        now: Instant,
        batch: &Batch,
        port: &mut VhostUserPort<Vsock>,
    ) -> Result<(), Lost> {
        let heads = batch.heads();
        self.begin_to_say(now);
        let is_first = self.out.is_empty();
        let sent = match &self.pipe {
            Some(Pipe::Plain(socket)) if is_first => {
                sent(port.send(socket.as_fd(), batch.packets(&heads)))?
            }
            _ => 0,
        };
        if sent == batch.len() {
            return Ok(());
        }
        self.begin_to_keep();
        self.out.reserve(batch.len() - sent);
        let mut skip = sent;
        for (packet, (head, len)) in batch.packets(&heads).enumerate() {
            let head = head.unwrap_or_default();
            let from = skip.min(head.len());
            self.out.extend(&head[from..]);
            let at = (skip - from).min(len);
            skip -= from + at;
            let start = self.out.len();
            self.out.resize(start + len - at, 0);
            if !port.read_kept(packet, at, &mut self.out[start..]) {
                return Err(Lost);
            }
        }
        if is_first && self.is_sealed() {
            self.has_more_to_flush = false; // or the socket is full
            return self.flush(now);
        }
        Ok(())
    }
}

fn hello(version: u8) -> [u8; HELLO_LEN] {
    let mut hello = [0; HELLO_LEN];
    hello[..MAGIC.len()].copy_from_slice(&MAGIC);
    hello[MAGIC.len()] = version;
    hello
}

/// Bytes that a socket has taken: none if it is full, or does not reach the other host yet.
fn sent(result: io::Result<usize>) -> Result<usize, Lost> {
    match result {
        Ok(sent) => Ok(sent),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(_) => Err(Lost),
    }
}

#[cfg(test)]
mod tests {
    use nightporter_core::toe::errno::Errno;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use rustix::io::write;

    use super::super::pipe::tests::{sealed, sockets};
    use super::*;

    const NOW: Instant = Instant::from_secs(1000);
    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    /// The messages, with the bytes of payload that came together; and the rest behind them.
    #[derive(Debug, PartialEq)]
    enum Word {
        Heard(Heard),
        Payload(Vec<u8>),
    }

    /// The words of a host, in pieces of these lengths, and then no more.
    fn hear(said: &[u8], cuts: &[usize]) -> Vec<Word> {
        let (ours, theirs) = sockets();
        let mut stream = Stream::from(NOW, (HostId(1), HERE), ours);
        let (mut rest, mut words) = (said, Vec::new());
        for cut in cuts {
            let (now, later) = rest.split_at(rest.len().min(*cut));
            assert_eq!(write(&theirs, now).unwrap(), now.len());
            rest = later;
            if !hear_now(&mut stream, &mut words) {
                return words;
            }
        }
        assert_eq!(write(&theirs, rest).unwrap(), rest.len());
        if hear_now(&mut stream, &mut words) {
            drop(theirs);
            assert!(!hear_now(&mut stream, &mut words), "its end is one");
        }
        words
    }

    /// Likewise by TLS, in records of these lengths, and these in such pieces.
    fn hear_sealed(said: &[u8], records: &[usize], cuts: &[usize]) -> Vec<Word> {
        let (pipe, mut other) = sealed(sockets());
        let mut stream = Stream::from(NOW, (HostId(1), HERE), pipe);
        let (mut rest, mut words) = (said, Vec::new());
        let mut bytes = Vec::new();
        for len in records.iter().chain([&usize::MAX]) {
            let (now, later) = rest.split_at(rest.len().min(*len));
            bytes.extend(other.seal(now));
            rest = later;
        }
        let mut rest = &bytes[..];
        for cut in cuts.iter().chain([&usize::MAX]) {
            let (now, later) = rest.split_at(rest.len().min(*cut));
            assert_eq!(write(&other.socket, now).unwrap(), now.len());
            rest = later;
            if !hear_now(&mut stream, &mut words) {
                return words;
            }
        }
        drop(other);
        assert!(!hear_now(&mut stream, &mut words), "its end is one");
        words
    }

    /// `false`: nothing more is heard.
    fn hear_now(stream: &mut Stream, words: &mut Vec<Word>) -> bool {
        loop {
            stream.begin_turn();
            match stream.poll() {
                Heard::Nothing => return true,
                Heard::Payload(left) => {
                    let mut bytes = vec![0; left as usize];
                    let len = match stream.pipe.as_mut().unwrap().read(&mut bytes) {
                        Err(e) if e.kind() == ErrorKind::WouldBlock => return true,
                        Ok(0) | Err(_) => {
                            words.push(Word::Heard(Heard::Lost));
                            return false;
                        }
                        Ok(len) => len,
                    };
                    stream.left -= u32::try_from(len).unwrap();
                    match words.last_mut() {
                        Some(Word::Payload(before)) => before.extend(&bytes[..len]),
                        _ => words.push(Word::Payload(bytes[..len].to_vec())),
                    }
                }
                heard => {
                    words.push(Word::Heard(heard));
                    if matches!(heard, Heard::Lost | Heard::Nonsense) {
                        return false;
                    }
                }
            }
        }
    }

    fn kinds() -> impl Strategy<Value = Kind> {
        prop_oneof![
            any::<u64>().prop_map(|edge| Kind::Request { edge }),
            any::<u64>().prop_map(|edge| Kind::Established { edge }),
            (any::<u64>(), 0..200_u32).prop_map(|(offset, len)| Kind::Data { offset, len }),
            any::<u64>().prop_map(|edge| Kind::Credit { edge }),
            any::<u64>().prop_map(|total| Kind::Fin { total }),
            Just(Kind::Taken),
            (any::<u64>(), any::<bool>(), any::<u64>())
                .prop_map(|(sent, finished, edge)| Kind::Probe { sent, finished, edge }),
            Just(Kind::Reset(Errno::Reset)),
        ]
    }

    /// Messages with what has to be behind them, or, now and then, something else; one byte of all
    /// may be another.
    fn said() -> impl Strategy<Value = Vec<u8>> {
        let message = (any::<u64>(), kinds(), vec(any::<u8>(), 0..REQUEST_LEN)).prop_map(
            |(serial, kind, noise)| {
                let id = ShadowId { incarnation: 7, serial };
                let request = Request {
                    network: 7,
                    from: "10.0.0.1:5".parse().unwrap(),
                    to: "10.0.0.2:80".parse().unwrap(),
                };
                let behind = match kind {
                    _ if serial % 16 == 0 => noise,
                    Kind::Request { .. } => request.emit().to_vec(),
                    Kind::Data { len, .. } => vec![0xda; len as usize],
                    _ => Vec::new(),
                };
                [&Message { id, to: Side::Acceptor, kind }.emit()[..], &behind].concat()
            },
        );
        let change = proptest::option::of((any::<prop::sample::Index>(), any::<u8>()));
        // Tag, key and address, or less than that.
        let introduction = proptest::option::of(vec(any::<u8>(), 30..200));
        let all = (introduction, vec(message, 0..12), change);
        all.prop_map(|(introduction, all, change)| {
            let mut said = match introduction {
                None => hello(PLAIN).to_vec(),
                Some(bytes) => {
                    let len = u16::try_from(bytes.len()).unwrap().to_le_bytes();
                    [&hello(INTRODUCED)[..], &len, &bytes].concat()
                }
            };
            said.extend(all.concat());
            if let Some((at, byte)) = change {
                let at = at.index(said.len());
                said[at] = byte;
            }
            said
        })
    }

    proptest! {
        #[test]
        fn whatever_a_host_says_means_the_same_in_any_pieces(
            said in said(),
            cuts in vec(1..120_usize, 0..40),
        ) {
            prop_assert_eq!(hear(&said, &cuts), hear(&said, &[]));
        }

        #[test]
        fn whatever_a_host_says_means_the_same_by_tls_in_any_records_and_pieces(
            said in said(),
            records in vec(1..120_usize, 0..40),
            cuts in vec(1..120_usize, 0..40),
        ) {
            prop_assert_eq!(hear_sealed(&said, &records, &cuts), hear(&said, &[]));
        }
    }
}
