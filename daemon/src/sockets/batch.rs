//! Packets of a guest that go to another host together: those of one socket that stand behind each
//! other in its ring. They are one message, as far as a message may be that long, and all go in one
//! system call, from guest memory; until then they are kept where they are.

use nightporter_core::time::Instant;
use nightporter_core::toe::message::{DATA_MAX, Kind, LEN, Message};
use nightporter_core::toe::sockets::SocketId;

use super::Toe;
use super::fabric::StreamId;

/// Packets, and about how many bytes. Each packet is two pieces of memory at least.
const PACKETS_MAX: usize = 32;
const BYTES_MAX: usize = 256 << 10;

/// See the module's doc.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// The device, and the socket.
    of: Option<(usize, SocketId)>,
    /// The header of each message.
    messages: Vec<Message>,
    /// Of each packet, whether it is the first of a message, and its bytes.
    packets: Vec<(bool, usize)>,
    bytes: usize,
}

impl Batch {
    /// The device and the socket of these packets.
    pub(super) const fn of(&self) -> Option<(usize, SocketId)> {
        self.of
    }

    /// Whether it has as much as goes at once.
    pub(super) const fn is_full(&self) -> bool {
        self.packets.len() >= PACKETS_MAX || self.bytes >= BYTES_MAX
    }

    /// One more packet, whose payload this message brings. It is behind the others.
    pub(super) fn add(&mut self, of: (usize, SocketId), message: &Message) {
        assert!(self.of.is_none_or(|known| known == of), "it is another socket's");
        let Kind::Data { len, .. } = message.kind else { return };
        self.of = Some(of);
        let joined = self.messages.last_mut().is_some_and(|last| join(last, message));
        if !joined {
            self.messages.push(*message);
        }
        self.packets.push((!joined, len as usize));
        self.bytes += len as usize;
    }

    /// The headers of all messages.
    pub(super) fn heads(&self) -> Vec<[u8; LEN]> {
        self.messages.iter().map(Message::emit).collect()
    }

    /// Of each packet its bytes, and the header before it if it is the first of a message.
    pub(super) fn packets<'a>(
        &'a self,
        heads: &'a [[u8; LEN]],
    ) -> impl Iterator<Item = (Option<&'a [u8]>, usize)> {
        let mut heads = heads.iter();
        self.packets.iter().map(move |(is_first, len)| {
            let head = if *is_first { heads.next().map(<[u8; LEN]>::as_slice) } else { None };
            (head, *len)
        })
    }

    /// Each message, and the bytes of each of its packets.
    pub(super) fn messages(&self) -> impl Iterator<Item = (&Message, impl Iterator<Item = usize>)> {
        let mut groups = self.packets.chunk_by(|_, (is_first, _)| !is_first);
        self.messages.iter().map(move |message| {
            let group = groups.next().unwrap_or_default();
            (message, group.iter().map(|(_, len)| *len))
        })
    }

    /// Bytes in all, with the headers.
    pub(super) const fn len(&self) -> usize {
        self.bytes + self.messages.len() * LEN
    }

    /// All of it has gone.
    pub(super) fn clear(&mut self) {
        self.of = None;
        self.messages.clear();
        self.packets.clear();
        self.bytes = 0;
    }
}

/// Makes one message of two, if it may be that long.
fn join(first: &mut Message, second: &Message) -> bool {
    let (Kind::Data { offset, len }, Kind::Data { offset: next, len: more }) =
        (first.kind, second.kind)
    else {
        return false;
    };
    let goes_on = offset + u64::from(len) == next && len + more <= DATA_MAX;
    if goes_on {
        first.kind = Kind::Data { offset, len: len + more };
    }
    goes_on
}

impl Toe {
    /// A guest's payload goes to another host, together with what its socket sent just before it.
    pub(super) fn send_away(
        &mut self,
        now: Instant,
        (at, socket): (usize, SocketId),
        message: &Message,
    ) {
        if self.batch.of().is_some_and(|of| of != (at, socket)) {
            self.send_batch(now);
        }
        if let Some(device) = self.devices[at].as_mut() {
            device.port.keep_packet();
        }
        self.batch.add((at, socket), message);
        if self.batch.is_full() {
            self.send_batch(now);
        }
    }

    /// Everything for another host goes there.
    pub(super) fn send_batch(&mut self, now: Instant) {
        let Some((at, socket)) = self.batch.of() else { return };
        let mut batch = std::mem::take(&mut self.batch);
        match self.streams.of(socket) {
            Some(id) => {
                if let Some(stream) = self.streams.get_mut(id)
                    && let Some(device) = self.devices[at].as_mut()
                {
                    device.shares.note(now, &mut stream.sent_in);
                    let said = self.streams.carry(now, id, &batch, &mut device.port);
                    self.said(now, id, said);
                    self.show_room(now, id);
                }
            }
            None => self.host.handle_loss(now, socket), // nothing is lost in silence
        }
        if let Some(device) = self.devices[at].as_mut() {
            device.port.kept_done();
        }
        batch.clear();
        self.batch = batch;
    }

    /// A guest is shown room at a socket for its share, if the stream has taken all it has sent.
    pub(super) fn show_room(&mut self, now: Instant, id: StreamId) {
        let Some(stream) = self.streams.get(id).filter(|it| it.waiting() == 0) else { return };
        let Some(carried) = stream.carried else { return };
        let Some(device) = self.devices[carried.device].as_ref() else { return };
        let kept = self.kept.of_sender(carried.device);
        let has_sent = stream.sent_in > 0;
        let share = if has_sent { device.shares.each(kept) } else { device.shares.first(kept) };
        self.host.limit_room(now, carried.socket, share);
    }

    /// A guest is shown room at a socket that has sent nothing.
    pub(super) fn show_first_room(&mut self, now: Instant, socket: SocketId, at: usize) {
        if let Some(device) = self.devices[at].as_ref() {
            self.host.limit_room(now, socket, device.shares.first(self.kept.of_sender(at)));
        }
    }
}
