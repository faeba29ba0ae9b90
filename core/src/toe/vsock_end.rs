//! A guest's socket: its vsock connection, and the end of the shadow connection behind it.
//!
//! # Use
//!
//! After every `handle_*` and after [`VsockEnd::give`]: [`VsockEnd::poll_message`] until `None`,
//! for the other end. [`VsockEnd::poll_packet`] as long as the guest's ring has room: a packet that
//! is due and not taken stays due, once; and payload, as much as [`VsockEnd::room_to_guest`]
//! allows. When [`VsockEnd::is_spent`] it may be dropped.

use super::end::{End, GuestEvent};
use super::errno::Errno;
use super::id::ShadowId;
use super::inbound::Verdict;
use super::message::{Kind, Message};
use super::state::State;
use super::vsock::{Connection, Lie, Meaning, Ports};
use crate::limits::{T_TOE_ASK, T_TOE_ASK_MAX};
use crate::time::{Duration, Instant};
use crate::wire::vsock::Header;

/// A vsock connection and its end. See the module's doc.
#[derive(Debug)]
pub struct VsockEnd {
    connection: Connection,
    end: End,
    lie: Option<Lie>,
    resets_on_close: bool,
    /// Set while others wait for the guest to read and it has not reported how far it has.
    ask: Option<Question>,
    /// Limit of the room shown to the guest.
    limit: u64,
}

/// A request for credit (CREDIT_REQUEST).
#[derive(Clone, Copy, Debug)]
struct Question {
    at: Instant,
    /// Time to the next request.
    wait: Duration,
    /// Bytes that it had read at the last request.
    read: u64,
}

impl VsockEnd {
    /// The socket of a guest that asks for a connection with this header; `id` is its name.
    #[must_use]
    pub fn connect(now: Instant, guest_cid: u64, header: &Header, id: ShadowId) -> Self {
        let connection = Connection::asked(guest_cid, header);
        let end = End::connect(now, id, connection.edge_to_promise());
        Self::new(connection, end)
    }

    /// The socket of a listening guest, for an opener that has room up to `edge`.
    #[must_use]
    pub fn offer(now: Instant, guest_cid: u64, ports: Ports, id: ShadowId, edge: u64) -> Self {
        let end = End::offer(now, id, edge);
        let mut vsock = Self::new(Connection::call(guest_cid, ports), end);
        vsock.pass_on(now);
        vsock
    }

    const fn new(connection: Connection, end: End) -> Self {
        Self { connection, end, lie: None, resets_on_close: false, ask: None, limit: u64::MAX }
    }

    /// The end behind the vsock connection.
    #[must_use]
    pub const fn end(&self) -> &End {
        &self.end
    }

    /// The name of the vsock connection.
    #[must_use]
    pub const fn ports(&self) -> Ports {
        self.connection.ports()
    }

    /// The guest's violation, if there was one.
    #[must_use]
    pub const fn lie(&self) -> Option<Lie> {
        self.lie
    }

    /// Whether the guest's connect() or the host's has no answer yet.
    #[must_use]
    pub const fn is_opening(&self) -> bool {
        self.connection.is_opening()
    }

    /// Whether the guest's kernel has dropped the connection, or gets a reset next.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    /// Whether a reset is still due to the guest's kernel: if so the caller sends it from now on.
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

    /// Bytes that may be given in `packets` packets together.
    #[must_use]
    pub fn room_in(&self, packets: u64) -> u64 {
        self.connection.room_in(packets)
    }

    /// Of `waiting` bytes, the number to give to the guest in a packet now; few bytes wait for more
    /// that are about to come, so that packets are full.
    #[must_use]
    pub fn takes(&self, waiting: u64) -> u64 {
        self.connection.takes(waiting, self.end.promised())
    }

    /// Whether both are over and no message or packet is due.
    #[must_use]
    pub const fn is_spent(&self) -> bool {
        self.connection.is_spent() && self.end.is_spent()
    }

    /// A packet of the guest, with `payload` bytes behind its header. Returns the message for the
    /// other end, which says how much of the payload follows it.
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
            Ok(Meaning::Data(len)) => self.end.send(now, len),
            Ok(Meaning::Nothing) => None,
            Ok(Meaning::Accepted) => {
                self.end.accept(now, edge);
                None
            }
            Ok(Meaning::Finished) => {
                self.end.finish(now);
                None
            }
            Ok(Meaning::Closed { unread }) => {
                self.end.close(now, unread || self.resets_on_close);
                None
            }
            Ok(Meaning::Reset) => {
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

    /// Held data is presented again.
    pub fn handle_held(&mut self, now: Instant, kind: Kind) -> Verdict {
        let verdict = self.end.handle_held(now, kind);
        self.pass_on(now);
        verdict
    }

    /// Handles the timers that are due.
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

    /// The guest may not keep this connection and gets a reset.
    pub fn handle_reset(&mut self, now: Instant) {
        self.connection.reset();
        self.end.abort(now, Errno::Reset);
    }

    /// Limits the room shown to the guest to `share` bytes beyond those sent so far, until the next
    /// call. Shown room is not taken back.
    pub fn limit_room(&mut self, now: Instant, share: u64) {
        self.limit = self.end.sent().saturating_add(share);
        self.pass_on(now);
    }

    /// Limits the other end to `share` bytes under way, however much room the guest has. Announced
    /// room is not taken back.
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

    /// The guest's process reads no more: blocked reads return an end of file. Later data is still
    /// given: Linux passes it to a process that reads after all.
    pub fn end_reads(&mut self) {
        self.connection.finish();
    }

    /// The header of the next `len` bytes for the guest's memory. There must be room.
    #[must_use]
    pub fn give(&mut self, now: Instant, len: u32) -> Header {
        let header = self.connection.give(len);
        self.end.delivered(now, len.into());
        // The room shown beyond the guest's taken bytes is bounded, and the guest has taken more.
        self.end.give_room(self.connection.edge_to_promise());
        self.pass_on(now);
        header
    }

    /// The next message for the other end.
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

    /// Time at which [`Self::handle_timeout`] is to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.end.poll_timeout().into_iter().chain(self.ask.map(|ask| ask.at)).min()
    }

    /// Turns events for the guest into packets.
    fn pass_on(&mut self, now: Instant) {
        self.end.set_buffer(self.connection.buffer());
        while let Some(event) = self.end.poll_event() {
            match event {
                // The request to the guest is due already.
                GuestEvent::ConnectRequest => {}
                GuestEvent::Established => self.connection.respond(),
                GuestEvent::Ended => self.connection.finish(),
                GuestEvent::Failed(_) => self.connection.reset(),
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
