//! A guest's socket: its vsock connection, and the end of the shadow connection behind it.
//!
//! # Use
//!
//! After every `handle_*` and after [`Joint::give`]: [`Joint::poll_message`] until `None`, for the
//! other end. [`Joint::poll_packet`] as long as the guest's ring has room: what is due and not
//! taken stays due, once, however often it comes about; and payload, as much as
//! [`Joint::room_to_guest`] allows. When [`Joint::is_spent`] it may be dropped.

use super::end::{End, Event};
use super::errno::Errno;
use super::id::ShadowId;
use super::inbound::Verdict;
use super::message::{Kind, Message};
use super::state::State;
use super::vsock::{Connection, Heard, Lie, Ports};
use crate::limits::{T_TOE_ASK, T_TOE_ASK_MAX};
use crate::time::{Duration, Instant};
use crate::wire::vsock::Header;

/// Both together. See the module's doc.
#[derive(Debug)]
pub struct Joint {
    connection: Connection,
    end: End,
    lie: Option<Lie>,
    resets_on_close: bool,
    /// Others wait for the guest to read, and it has not said what it has read.
    ask: Option<Question>,
    /// The guest is shown no room beyond this, whatever the other one has.
    limit: u64,
}

/// A question that is asked.
#[derive(Clone, Copy, Debug)]
struct Question {
    at: Instant,
    /// How long after that again.
    wait: Duration,
    /// What it had read when it was last asked.
    read: u64,
}

impl Joint {
    /// The guest of this CID asks for a connection with this header; it is to have this name.
    #[must_use]
    pub fn connect(now: Instant, guest_cid: u64, header: &Header, id: ShadowId) -> Self {
        let connection = Connection::asked(guest_cid, header);
        let end = End::connect(now, id, connection.edge_to_promise());
        Self::new(connection, end)
    }

    /// Another guest, that has room up to `edge`, wants to connect to one that listens.
    #[must_use]
    pub fn offer(now: Instant, guest_cid: u64, ports: Ports, id: ShadowId, edge: u64) -> Self {
        let end = End::offer(now, id, edge);
        let mut joint = Self::new(Connection::call(guest_cid, ports), end);
        joint.pass_on(now);
        joint
    }

    const fn new(connection: Connection, end: End) -> Self {
        Self { connection, end, lie: None, resets_on_close: false, ask: None, limit: u64::MAX }
    }

    /// The end behind it.
    #[must_use]
    pub const fn end(&self) -> &End {
        &self.end
    }

    /// Its name in the guest.
    #[must_use]
    pub const fn ports(&self) -> Ports {
        self.connection.ports()
    }

    /// How the guest lied, if it did.
    #[must_use]
    pub const fn lie(&self) -> Option<Lie> {
        self.lie
    }

    /// Whether the guest's connect() has no answer yet, or the host's.
    #[must_use]
    pub const fn is_opening(&self) -> bool {
        self.connection.is_opening()
    }

    /// Whether the guest's kernel has no connection any more, or hears so next.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    /// Whether the guest's kernel is still to hear that it is over: if so the caller sees to that
    /// from now on.
    #[must_use]
    pub fn take_reset(&mut self) -> bool {
        let is_due = self.connection.is_closed() && !self.connection.is_spent();
        if is_due {
            self.connection.forget();
        }
        is_due
    }

    /// Bytes that may be given to the guest now.
    #[must_use]
    pub fn room_to_guest(&self) -> u64 {
        self.connection.room_to_guest()
    }

    /// Likewise in so many packets together.
    #[must_use]
    pub fn room_in(&self, packets: u64) -> u64 {
        self.connection.room_in(packets)
    }

    /// Of so many bytes that wait, these may be given to the guest in a packet now: more of them,
    /// so that its packets are full, if they are about to come.
    #[must_use]
    pub fn takes(&self, waiting: u64) -> u64 {
        self.connection.takes(waiting, self.end.promised())
    }

    /// Whether both are over, and all have heard of it.
    #[must_use]
    pub const fn is_spent(&self) -> bool {
        self.connection.is_spent() && self.end.is_spent()
    }

    /// A packet of the guest, with `payload` bytes behind its header. What is to go to the other
    /// end, followed by as much of the payload as it says.
    #[must_use]
    pub fn handle_packet(
        &mut self,
        now: Instant,
        header: &Header,
        payload: usize,
    ) -> Option<Message> {
        let heard = self.connection.handle(header, payload).inspect_err(|lie| {
            self.lie = Some(*lie);
        });
        let edge = self.connection.edge_to_promise();
        let message = match heard {
            Ok(Heard::Data(len)) => self.end.send(now, len),
            Ok(Heard::Nothing) => None,
            Ok(Heard::Accepted) => {
                self.end.accept(now, edge);
                None
            }
            Ok(Heard::Finished) => {
                self.end.finish(now);
                None
            }
            Ok(Heard::Closed { unread }) => {
                self.end.close(now, unread || self.resets_on_close);
                None
            }
            Ok(Heard::Reset) => {
                // A listener that is full, or that the guest's kernel does not have any more: TCP
                // can tell them apart, and waits for a place at one that is full.
                let offered = self.end.state() == State::Offered;
                self.end.abort(now, if offered { Errno::NotByToe } else { Errno::Reset });
                None
            }
            Err(_) => {
                self.end.abort(now, Errno::Reset);
                None
            }
        };
        self.end.give_room(edge);
        self.pass_on(now);
        message
    }

    /// A message from the other end.
    pub fn handle_message(&mut self, now: Instant, kind: Kind) -> Verdict {
        let verdict = self.end.handle_message(now, kind);
        self.pass_on(now);
        verdict
    }

    /// Data that is held is presented again.
    pub fn handle_held(&mut self, now: Instant, kind: Kind) -> Verdict {
        let verdict = self.end.handle_held(now, kind);
        self.pass_on(now);
        verdict
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.end.handle_timeout(now);
        if let Some(Question { wait, read, .. }) = self.ask.filter(|ask| ask.at <= now) {
            self.connection.ask();
            let stands = read == self.connection.read();
            let next = if stands { (wait + wait).min(T_TOE_ASK_MAX) } else { wait };
            self.ask = Some(Question { at: now + wait, wait: next, read: self.connection.read() });
        }
        self.pass_on(now);
    }

    /// The fabric has lost the other end.
    pub fn handle_loss(&mut self, now: Instant) {
        self.end.handle_loss(now);
        self.pass_on(now);
    }

    /// The guest, its driver or its VMM is gone.
    pub fn handle_guest_loss(&mut self, now: Instant) {
        self.connection.forget();
        self.end.abort(now, Errno::Reset);
    }

    /// The guest may not have this connection any more; it hears so.
    pub fn handle_reset(&mut self, now: Instant) {
        self.connection.reset();
        self.end.abort(now, Errno::Reset);
    }

    /// The guest is shown room for `share` bytes beyond what it has sent so far, and no more until
    /// this is said again. What it was shown stays.
    pub fn limit_room(&mut self, now: Instant, share: u64) {
        self.limit = self.end.sent().saturating_add(share);
        self.pass_on(now);
    }

    /// From now on the other end may have `share` bytes under way, however much room the guest has.
    /// What it was told stays.
    pub fn limit_arrivals(&mut self, now: Instant, share: u64) {
        self.end.limit_arrivals(share);
        self.end.give_room(self.connection.edge_to_promise());
        self.pass_on(now);
    }

    /// Bytes that the guest's socket has room for when it is empty.
    #[must_use]
    pub fn buffer(&self) -> u64 {
        self.connection.buffer()
    }

    /// Whether the guest's close() is to be a reset: SO_LINGER with 0 s.
    pub const fn reset_on_close(&mut self, resets: bool) {
        self.resets_on_close = resets;
    }

    /// The guest's process reads no more: whoever waits for data reads an end. Data that comes
    /// later is still given: Linux passes it to a process that reads after all.
    pub fn end_reads(&mut self) {
        self.connection.finish();
    }

    /// The next `len` bytes that are due go into the guest's memory, behind this header. There must
    /// be room.
    #[must_use]
    pub fn give(&mut self, now: Instant, len: u32) -> Header {
        let header = self.connection.give(len);
        self.end.delivered(now, len.into());
        // What is shown beyond what the guest has taken is bounded, and it has taken more.
        self.end.give_room(self.connection.edge_to_promise());
        self.pass_on(now);
        header
    }

    /// What is due to the other end.
    #[must_use]
    pub fn poll_message(&mut self, now: Instant) -> Option<Message> {
        self.end.poll_message(now)
    }

    /// Whether [`Self::poll_packet`] has one.
    #[must_use]
    pub fn has_packet(&self) -> bool {
        self.connection.has_packet()
    }

    /// A packet without payload that is due to the guest.
    #[must_use]
    pub fn poll_packet(&mut self) -> Option<Header> {
        self.connection.poll_packet()
    }

    /// When [`Self::handle_timeout`] is to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.end.poll_timeout().into_iter().chain(self.ask.map(|ask| ask.at)).min()
    }

    /// What the guest is to hear becomes packets.
    fn pass_on(&mut self, now: Instant) {
        self.end.set_buffer(self.connection.buffer());
        while let Some(event) = self.end.poll_event() {
            match event {
                // The connection has called the guest already.
                Event::ConnectRequest => {}
                Event::Established => self.connection.respond(),
                Event::Ended => self.connection.finish(),
                Event::Failed(_) => self.connection.reset(),
            }
        }
        self.connection.set_edge(self.end.edge_from_guest().min(self.limit));
        let wait = self.end.has_undelivered() || self.end.is_low();
        if !wait || !self.connection.has_unread() || self.connection.is_closed() {
            self.ask = None;
        } else if self.ask.is_none() {
            let (at, read) = (now + T_TOE_ASK, self.connection.read());
            self.ask = Some(Question { at, wait: T_TOE_ASK, read });
        }
    }
}

#[cfg(test)]
mod tests;
