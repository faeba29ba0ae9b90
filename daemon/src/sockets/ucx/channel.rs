//! The part of a stream that UCX has: payload that has come and is not with its guest, and where
//! its own goes.
//!
//! A message is presented to the core once, in the order in which messages have come, and again if
//! it was ahead of others. One that is next is delivered before another one is looked at.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nightporter_core::limits::{TOE_HELD_MAX, TOE_WINDOW_MAX};
use nightporter_core::toe::message::{DATA_MAX, Kind, Message};

use super::{EndId, HELD_MIN, Head, Introduction, Payload, SECRET_LEN, Ucx};

/// Messages of one stream that have come and are not with its guest. Two that are next to each
/// other and short become one, but one that UCX holds stays as it is.
#[expect(clippy::cast_possible_truncation, reason = "it is 1 MiB")]
const PIECES_MAX: usize = TOE_HELD_MAX + 2 * TOE_WINDOW_MAX as usize / HELD_MIN;
const _: () = assert!(HELD_MIN <= DATA_MAX as usize);

/// Whether they are the same, in a time that does not tell where they differ.
fn is_same(a: &[u8; SECRET_LEN], b: &[u8; SECRET_LEN]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b))) == 0
}

/// A message with its payload.
#[derive(Debug)]
pub(in super::super) struct Piece {
    pub(in super::super) message: Message,
    offset: u64,
    payload: Payload,
}

impl Piece {
    /// `None`: it is no message with that payload.
    pub(in super::super) fn new(message: Message, payload: Payload) -> Option<Self> {
        let Kind::Data { offset, len } = message.kind else { return None };
        (len as usize == payload.bytes().len()).then_some(Self { message, offset, payload })
    }

    fn len(&self) -> usize {
        self.payload.bytes().len()
    }

    fn end(&self) -> u64 {
        self.offset.saturating_add(self.len() as u64)
    }

    /// Takes this one behind it, if they are next to each other, one message can have both, and
    /// both are copies.
    fn join(&mut self, next: &Self) -> bool {
        let Ok(len) = u32::try_from(self.len() + next.len()) else { return false };
        let fits = len <= DATA_MAX && self.end() == next.offset;
        let is_one = self.message.id == next.message.id && self.message.to == next.message.to;
        let (Payload::Own(bytes), Payload::Own(more)) = (&mut self.payload, &next.payload) else {
            return false;
        };
        if fits && is_one {
            bytes.extend(more);
            self.message.kind = Kind::Data { offset: self.offset, len };
        }
        fits && is_one
    }
}

/// The next part of a channel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in super::super) enum Next {
    Nothing,
    /// For the core.
    Message(Message),
    /// Likewise, again.
    Held(Message),
    /// So many bytes are to be delivered.
    Payload(u32),
}

/// See the module's doc.
#[derive(Debug, Default)]
pub(in super::super) struct Channel {
    /// This host's words, if there are some.
    own: Option<Introduction>,
    /// Where payload goes, and what the other host calls this stream.
    to: Option<(EndId, u64, [u8; SECRET_LEN])>,
    arrived: VecDeque<Piece>,
    held: Vec<Piece>,
    /// The part that the core was shown last, and so many bytes of it are delivered.
    front: Option<(Piece, usize)>,
    /// The end of what was delivered last.
    next: u64,
    /// In all of these.
    waiting: usize,
    /// Of all channels.
    all: Arc<AtomicUsize>,
    /// Bytes that UCX has not sent yet.
    pub(in super::super) unsent: usize,
}

impl Channel {
    /// With this count of what waits in all.
    pub(in super::super) fn new(all: &Arc<AtomicUsize>) -> Self {
        let mut channel = Self::default();
        channel.all = Arc::clone(all);
        channel
    }

    /// This host is known by this from now on.
    pub(in super::super) fn introduce(&mut self, own: Introduction) {
        self.own = Some(own);
    }

    /// The words about it, if this host has UCX.
    pub(in super::super) const fn introduction(&self) -> Option<&Introduction> {
        self.own.as_ref()
    }

    /// The other host has no UCX: nothing comes by it.
    pub(in super::super) fn stay_away(&mut self) {
        self.own = None;
    }

    /// Payload goes there from now on.
    pub(in super::super) fn lead(&mut self, end: EndId, said: &Introduction) {
        self.to = Some((end, said.tag, said.key));
    }

    /// The endpoint by which payload goes.
    pub(in super::super) fn end(&self) -> Option<EndId> {
        self.to.map(|(end, ..)| end)
    }

    /// Whether a message shows what this host has told in its stream.
    pub(in super::super) fn is_its(&self, head: &Head) -> bool {
        self.own.as_ref().is_some_and(|own| is_same(&own.key, &head.key))
    }

    /// Another connection begins.
    pub(in super::super) fn forget(&mut self) {
        self.arrived.clear();
        self.held.clear();
        (self.front, self.next) = (None, 0);
        self.set_waiting(0);
    }

    /// A message has come. The other host was told of room for `told` bytes that its guest does not
    /// have. `false`: no honest host sends more, or in so many messages.
    #[must_use]
    pub(in super::super) fn push(&mut self, piece: Piece, told: u64) -> bool {
        let waiting = self.waiting + piece.len();
        if waiting as u64 > told {
            return false;
        }
        self.set_waiting(waiting);
        if !self.arrived.back_mut().is_some_and(|last| last.join(&piece)) {
            self.arrived.push_back(piece);
        }
        self.arrived.len() + self.held.len() <= PIECES_MAX
    }

    /// The next part. A message is there until [`Self::deliver`], [`Self::hold`] or [`Self::drop`].
    pub(in super::super) fn poll(&mut self) -> Next {
        if let Some((piece, done)) = &self.front {
            let left = piece.len() - done;
            return Next::Payload(u32::try_from(left).expect("no more than a message has"));
        }
        if let Some(at) = self.held.iter().position(|piece| piece.offset == self.next) {
            let piece = self.held.swap_remove(at);
            let message = piece.message;
            self.front = Some((piece, 0));
            return Next::Held(message);
        }
        let Some(piece) = self.arrived.pop_front() else { return Next::Nothing };
        let message = piece.message;
        self.front = Some((piece, 0));
        Next::Message(message)
    }

    /// The part that was presented is ahead of others.
    pub(in super::super) fn hold(&mut self) {
        self.held.extend(self.front.take().map(|(piece, _)| piece));
    }

    /// The part that was presented is not wanted.
    pub(in super::super) fn drop(&mut self) {
        if let Some((piece, done)) = self.front.take() {
            self.set_waiting(self.waiting - (piece.len() - done));
        }
    }

    /// The part to be delivered, if there is one.
    pub(in super::super) fn front(&self) -> Option<&[u8]> {
        self.front.as_ref().map(|(piece, done)| &piece.payload.bytes()[*done..])
    }

    /// So many bytes of it are.
    pub(in super::super) fn deliver(&mut self, len: usize) {
        let Some((piece, done)) = &mut self.front else { return };
        *done += len;
        if *done == piece.len() {
            self.next = piece.end();
            self.front = None;
        }
        self.set_waiting(self.waiting - len);
    }

    /// Sends payload, as this message.
    ///
    /// # Errors
    /// It is lost, and with it the connection.
    pub(in super::super) fn send(
        &mut self,
        ucx: &mut Ucx,
        stream: u64,
        message: &Message,
        payload: Vec<u8>,
    ) -> Result<(), ()> {
        let (end, tag, key) = self.to.ok_or(())?;
        let (head, len) = (Head { tag, key, message: message.emit() }, payload.len());
        match ucx.worker.send(end, stream, head.emit(), payload) {
            Ok(true) => {}
            Ok(false) => self.unsent += len,
            Err(error) => {
                tracing::debug!(%error, "toe: UCX does not send");
                return Err(());
            }
        }
        Ok(())
    }

    fn set_waiting(&mut self, now: usize) {
        self.all.fetch_sub(self.waiting, Ordering::Relaxed);
        self.all.fetch_add(now, Ordering::Relaxed);
        self.waiting = now;
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.set_waiting(0);
    }
}

#[cfg(test)]
mod tests {
    use nightporter_core::toe::id::{ShadowId, Side};

    use super::*;

    fn piece(offset: u64, bytes: &[u8]) -> Piece {
        let id = ShadowId { incarnation: 7, serial: 7 };
        let kind = Kind::Data { offset, len: u32::try_from(bytes.len()).unwrap() };
        let payload = Payload::Own(bytes.to_vec());
        Piece::new(Message { id, to: Side::Acceptor, kind }, payload).unwrap()
    }

    fn offset(next: Next) -> u64 {
        match next {
            Next::Message(Message { kind: Kind::Data { offset, .. }, .. })
            | Next::Held(Message { kind: Kind::Data { offset, .. }, .. }) => offset,
            next => panic!("{next:?}"),
        }
    }

    #[test]
    fn what_is_ahead_of_others_is_presented_again_when_it_is_next() {
        let all = Arc::default();
        let mut channel = Channel::new(&all);
        for (at, bytes) in [(3, &b"defg"[..]), (7, b"h"), (0, b"abc")] {
            assert!(channel.push(piece(at, bytes), 8));
        }
        assert_eq!(offset(channel.poll()), 3);
        channel.hold();
        assert_eq!(offset(channel.poll()), 0);
        assert_eq!((channel.poll(), channel.front()), (Next::Payload(3), Some(&b"abc"[..])));
        channel.deliver(1);
        assert_eq!(channel.poll(), Next::Payload(2));
        channel.deliver(2);
        let next = channel.poll();
        assert!(matches!(next, Next::Held(_)) && offset(next) == 3);
        assert_eq!(channel.front(), Some(&b"defgh"[..]), "two that came together are one");
        channel.deliver(5);
        assert_eq!((channel.poll(), all.load(Ordering::Relaxed)), (Next::Nothing, 0));
        assert!(channel.push(piece(8, b"i"), 8));
        assert_eq!((offset(channel.poll()), all.load(Ordering::Relaxed)), (8, 1));
        channel.drop();
        assert_eq!((channel.poll(), all.load(Ordering::Relaxed)), (Next::Nothing, 0));
        assert!(channel.push(piece(9, b"j"), 8));
        drop(channel);
        assert_eq!(all.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_waits_is_bounded_in_bytes_and_in_messages() {
        let all = Arc::default();
        let mut channel = Channel::new(&all);
        let full = vec![0; DATA_MAX as usize];
        let mut at = 0;
        while channel.push(piece(at, &full), 200_000) {
            at += full.len() as u64;
        }
        assert_eq!((at, all.load(Ordering::Relaxed)), (3 * 65_536, 3 * 65_536));
        assert_eq!(offset(channel.poll()), 0);
        assert!(!channel.push(piece(at, &full), 200_000), "its guest has nothing yet");
        channel.deliver(65_536);
        assert!(channel.push(piece(at, &full), 200_000));
        // Byte by byte there are as many.
        let mut channel = Channel::new(&Arc::default());
        let most = TOE_WINDOW_MAX;
        assert!((0..most).all(|at| channel.push(piece(at, b"x"), most)));
        assert!(channel.arrived.len() <= 17);
        // Those that leave holes are not.
        let mut channel = Channel::new(&Arc::default());
        let many = (0_u64..).take_while(|at| channel.push(piece(at * 2, b"x"), most)).count();
        assert_eq!(many, PIECES_MAX);
    }
}
