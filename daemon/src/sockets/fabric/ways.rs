//! UCX beside the streams: which way payload takes, and what UCX has to say about it.

use std::io::{self, ErrorKind};
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use nightporter_core::time::Instant;
use nightporter_core::toe::message::{Kind, Message};
use nightporter_core::toe::sockets::SocketId;

use super::progress::Progress;
use super::{Fabric, Heard, Lost, Stream, StreamId, Streams};
use crate::port::vhost_user::VhostUserPort;
use crate::sockets::batch::Batch;
use crate::sockets::ucx::{Channel, EndId, Event, Head, Next, Payload, Piece, Ucx};
use crate::vhost::vsock::Vsock;

/// UCX, for the payload of one stream.
struct Beside<'s> {
    channel: &'s mut Channel,
    ucx: &'s mut Ucx,
    tag: u64,
}

/// Payload is copied, out of guest memory and into it.
impl Fabric for Beside<'_> {
    fn poll(&mut self) -> Heard {
        match self.channel.poll() {
            Next::Nothing => Heard::Nothing,
            Next::Message(message) => Heard::Message(message),
            Next::Held(message) => Heard::Held(message),
            Next::Payload(left) => Heard::Payload(left),
        }
    }

    fn receive(&mut self, port: &mut VhostUserPort<Vsock>, room: usize) -> io::Result<usize> {
        let front = self.channel.front().ok_or(ErrorKind::WouldBlock)?;
        let len = room.min(front.len());
        if !port.write_payload(&front[..len]) {
            return Err(ErrorKind::Other.into()); // its device goes down
        }
        self.channel.deliver(len);
        Ok(len)
    }

    fn carry(
        &mut self,
        _: Instant,
        batch: &Batch,
        port: &mut VhostUserPort<Vsock>,
    ) -> Result<(), Lost> {
        let mut first = 0;
        for (message, packets) in batch.messages() {
            let Kind::Data { len, .. } = message.kind else { continue };
            let mut payload = Vec::with_capacity(len as usize);
            for (packet, len) in (first..).zip(packets) {
                let start = payload.len();
                payload.resize(start + len, 0);
                if !port.read_kept(packet, 0, &mut payload[start..]) {
                    return Err(Lost);
                }
                first += 1;
            }
            self.channel.send(self.ucx, self.tag, message, payload).map_err(|()| Lost)?;
        }
        Ok(())
    }
}

impl Streams {
    fn beside(&mut self, id: StreamId) -> Option<Beside<'_>> {
        let Self { places, ucx, .. } = self;
        let place = places.get_mut(id.place as usize)?;
        let stream = place.stream.as_deref_mut().filter(|_| place.generation == id.generation)?;
        Some(Beside { channel: &mut stream.channel, ucx: ucx.as_mut()?, tag: id.tag() })
    }

    /// The next part of a stream, by either way. A part that has begun is finished first.
    pub(in super::super) fn poll(&mut self, id: StreamId) -> Heard {
        let has_begun = self.get(id).is_none_or(Stream::is_in_payload);
        if !has_begun && let Some(mut beside) = self.beside(id) {
            let heard = beside.poll();
            if heard != Heard::Nothing {
                return heard;
            }
        }
        self.get_mut(id).map_or(Heard::Nothing, Stream::poll)
    }

    /// Payload of a stream; see [`Fabric::receive`].
    ///
    /// # Errors
    /// As of that.
    pub(in super::super) fn receive(
        &mut self,
        id: StreamId,
        port: &mut VhostUserPort<Vsock>,
        room: usize,
    ) -> io::Result<usize> {
        let is_beside = self.get(id).is_some_and(|stream| stream.channel.front().is_some());
        if is_beside && let Some(mut beside) = self.beside(id) {
            return beside.receive(port, room);
        }
        self.get_mut(id).ok_or(ErrorKind::NotConnected)?.receive(port, room)
    }

    /// Sends payload; see [`Fabric::carry`].
    ///
    /// # Errors
    /// As of that.
    pub(in super::super) fn carry(
        &mut self,
        now: Instant,
        id: StreamId,
        batch: &Batch,
        port: &mut VhostUserPort<Vsock>,
    ) -> Result<(), Lost> {
        let Some(stream) = self.get_mut(id) else { return Ok(()) };
        if stream.channel.end().is_none() {
            return stream.carry(now, batch, port);
        }
        if stream.waiting() == 0 {
            stream.progress = Progress::new(now);
        }
        self.stats.ucx_sent += batch.messages().count() as u64;
        let mut beside = self.beside(id).ok_or(Lost)?;
        beside.carry(now, batch, port)
    }

    /// This host's words about itself in a new stream.
    pub(super) fn introduce(&mut self, id: StreamId) {
        let said = self.ucx.as_ref().and_then(|ucx| ucx.introduce(id.tag()).ok());
        let all = std::sync::Arc::clone(&self.ucx_waits);
        if let Some(stream) = self.get_mut(id)
            && let Some(said) = said
        {
            stream.introduce(Channel::new(&all), said);
        }
    }

    /// The other host has said where its worker is.
    pub(in super::super) fn meet_worker(&mut self, id: StreamId) {
        let Some(stream) = self.get_mut(id) else { return };
        let host = stream.host;
        // A host without UCX does not say where it is, and is not asked for payload that way.
        let Some(said) = stream.take_introduction() else { return };
        if stream.channel.introduction().is_none() || stream.channel.end().is_some() {
            return;
        }
        let end = self.ucx.as_mut().and_then(|ucx| ucx.meet(host, &said));
        if let (Some(end), Some(stream)) = (end, self.get_mut(id)) {
            stream.channel.lead(end, &said);
        }
    }

    /// A stream that is no more uses no endpoint.
    pub(super) fn leave_worker(&mut self, stream: &Stream) {
        if let (Some(ucx), Some(end)) = (&mut self.ucx, stream.channel.end()) {
            ucx.leave(end);
        }
    }

    /// The part that the core was shown is ahead of others. `false`: in a stream of TCP nothing is.
    pub(in super::super) fn hold(&mut self, id: StreamId) -> bool {
        let Some(stream) = self.get_mut(id) else { return false };
        let is_there = stream.channel.front().is_some();
        stream.channel.hold();
        is_there
    }

    /// The part that the core was shown is not wanted.
    pub(in super::super) fn drop_payload(&mut self, id: StreamId) {
        if let Some(stream) = self.get_mut(id) {
            stream.channel.drop();
        }
    }

    /// Whether payload may go by UCX.
    pub(in super::super) const fn has_ucx(&self) -> bool {
        self.ucx.is_some()
    }

    /// Readable when UCX has something to do.
    pub(in super::super) fn ucx_fd(&self) -> Option<BorrowedFd<'_>> {
        self.ucx.as_ref().map(Ucx::fd)
    }

    /// Whether it has something to do of which its descriptor does not tell.
    pub(in super::super) fn is_ucx_ready(&self) -> bool {
        self.ucx.as_ref().is_some_and(Ucx::is_ready)
    }

    /// Lets UCX do its work.
    pub(in super::super) fn progress_ucx(&mut self) {
        self.ucx.iter_mut().for_each(Ucx::progress);
    }

    /// Its words meanwhile.
    #[must_use]
    pub(in super::super) fn poll_ucx(&mut self) -> Option<Event> {
        self.ucx.as_mut()?.poll_event()
    }

    /// A turn ends.
    pub(in super::super) fn arm_ucx(&mut self) {
        self.ucx.iter_mut().for_each(Ucx::arm);
    }

    /// Payload has come for a stream. `told`: bytes that the other host may have under way to a
    /// socket.
    ///
    /// # Errors
    /// No honest host sends it to this one.
    pub(in super::super) fn arrive(
        &mut self,
        head: &Head,
        payload: Payload,
        told: impl FnOnce(SocketId) -> u64,
    ) -> Result<(), StreamId> {
        let id = StreamId::of(head.tag);
        let known = self.get_mut(id).filter(|it| it.is_proven && it.channel.is_its(head));
        let Some(stream) = known else {
            self.stats.ucx_strays += 1; // its stream has ended, or never was
            return Ok(());
        };
        if stream.closes {
            return Ok(());
        }
        let message = Message::parse(&head.message).map_err(|_| id)?;
        let carried = stream.carried.filter(|it| it.name == message.id).ok_or(id)?;
        let piece = Piece::new(message, payload).filter(|_| message.to == stream.ours).ok_or(id)?;
        if !stream.channel.push(piece, told(carried.socket)) {
            return Err(id);
        }
        self.stats.ucx_received += 1;
        self.wake(id);
        Ok(())
    }

    /// UCX has sent so many bytes for a stream.
    pub(in super::super) fn note_sent(
        &mut self,
        now: Instant,
        tag: u64,
        len: usize,
    ) -> Option<StreamId> {
        let id = StreamId::of(tag);
        let stream = self.get_mut(id)?;
        stream.channel.unsent -= len;
        let waiting = stream.waiting();
        stream.progress.note_taken(now, len, waiting);
        Some(id)
    }

    /// An endpoint has failed: the streams that use it.
    pub(in super::super) fn fail(&mut self, end: EndId) -> Vec<StreamId> {
        self.ucx.iter_mut().for_each(|ucx| ucx.close(end));
        let all = self.places.iter().zip(0..).filter_map(|(place, at)| {
            let stream = place.stream.as_deref()?;
            let id = StreamId { place: at, generation: place.generation };
            (stream.channel.end() == Some(end)).then_some(id)
        });
        all.collect()
    }

    /// Bytes that UCX has brought and that are not with their guests.
    pub(super) fn waits_by_ucx(&self) -> u64 {
        self.ucx_waits.load(Ordering::Relaxed) as u64
    }

    /// Endpoints to other hosts.
    pub(super) fn ends_of_ucx(&self) -> u64 {
        self.ucx.as_ref().map_or(0, Ucx::ends)
    }
}
