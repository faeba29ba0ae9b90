//! One end of a shadow connection: between a guest's socket and a fabric.
//!
//! # Use
//!
//! After every `handle_*` and every command: [`End::poll_message`] until `None`, for the other end;
//! then [`End::poll_event`] until `None`, for the guest; then [`End::poll_timeout`]. When
//! [`End::is_spent`] the end may be dropped.
//!
//! A violation of the rules by the guest or the other end fails this connection alone
//! (`ECONNRESET`); the caller need not ask which side it was.

use super::errno::Errno;
use super::id::{ShadowId, Side};
use super::inbound::{Inbound, Verdict};
use super::message::{Breach, Kind, Message};
use super::outbound::Outbound;
use super::state::{Standing, State, Transition};
use crate::limits::{T_TOE_CONNECT, T_TOE_DRAIN, T_TOE_ORPHAN, T_TOE_PROBE, T_TOE_SILENCE};
use crate::time::Instant;

/// An event for the guest, with its name in the VTOE paper (section 4.3) if it has one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GuestEvent {
    /// CONNECT_REQUEST: a guest wants to connect to this one.
    ConnectRequest,
    /// ESTABLISHED: the guest's connect() has succeeded.
    Established,
    /// The other stream has ended, and the guest has all of it.
    Ended,
    /// CONNECT_REJECTED, UNREACHABLE, ADDRESS_ERROR or DISCONNECTED, as the errno is.
    Failed(Errno),
}

/// Messages and events that are due.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    /// Request or Established.
    opening: bool,
    fin: bool,
    taken: bool,
    probe: bool,
    reset: bool,
    connect_request: bool,
    established: bool,
    ended: bool,
    failed: bool,
}

/// One end of a shadow connection. See the module's doc.
#[derive(Debug)]
pub struct End {
    id: ShadowId,
    side: Side,
    standing: Standing,
    outbound: Outbound,
    inbound: Inbound,
    due: Due,
    /// The guest has closed its socket: events and data have no receiver.
    guest_is_gone: bool,
    /// Time of the last change of state.
    since: Instant,
    /// Time of the other end's last message.
    heard: Instant,
    /// Time of the last probe to it.
    probed: Instant,
}

impl End {
    /// The end of a guest that wants to connect, and has room up to `edge`.
    #[must_use]
    pub fn connect(now: Instant, id: ShadowId, edge: u64) -> Self {
        let mut end = Self::new(now, id, Side::Opener, Standing::asking());
        end.inbound.give_room(edge);
        end.due.opening = true;
        end
    }

    /// The end of a listening guest, for an opener that has room up to `edge`.
    #[must_use]
    pub fn offer(now: Instant, id: ShadowId, edge: u64) -> Self {
        let mut end = Self::new(now, id, Side::Acceptor, Standing::offered());
        end.outbound.give_room(edge);
        end.due.connect_request = true;
        end
    }

    fn new(now: Instant, id: ShadowId, side: Side, standing: Standing) -> Self {
        Self {
            id,
            side,
            standing,
            outbound: Outbound::default(),
            inbound: Inbound::default(),
            due: Due::default(),
            guest_is_gone: false,
            since: now,
            heard: now,
            probed: now,
        }
    }

    /// The connection's name.
    #[must_use]
    pub const fn id(&self) -> ShadowId {
        self.id
    }

    /// The side of the connection.
    #[must_use]
    pub const fn side(&self) -> Side {
        self.side
    }

    /// The state.
    #[must_use]
    pub const fn state(&self) -> State {
        self.standing.state()
    }

    /// The error, if the connection failed.
    #[must_use]
    pub const fn errno(&self) -> Option<Errno> {
        self.standing.errno()
    }

    /// The first byte that the guest may not send yet.
    #[must_use]
    pub const fn edge_from_guest(&self) -> u64 {
        self.outbound.edge()
    }

    /// Bytes that the guest has sent.
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.outbound.sent()
    }

    /// Bytes that were delivered to the guest.
    #[must_use]
    pub const fn delivered_bytes(&self) -> u64 {
        self.inbound.delivered()
    }

    /// Whether arrived bytes are not in the guest's memory yet.
    #[must_use]
    pub const fn has_undelivered(&self) -> bool {
        self.inbound.has_undelivered()
    }

    /// Whether the connection has ended and no message or event is due.
    #[must_use]
    pub const fn is_spent(&self) -> bool {
        let due = self.due.taken || self.due.reset || self.due.fin;
        let untold = self.due.ended || self.due.failed;
        matches!(self.state(), State::Over | State::Failed) && !due && !untold
    }

    /// A message for this end came.
    pub fn handle_message(&mut self, now: Instant, kind: Kind) -> Verdict {
        if matches!(self.state(), State::Over | State::Failed) {
            // The other end does not know that its guest's stream has arrived.
            let asks = matches!(kind, Kind::Probe { finished: true, .. });
            self.due.taken |= asks && self.state() == State::Over;
            return Verdict::Done;
        }
        self.heard = now;
        if let Kind::Reset(errno) = kind {
            // Older daemons send this for a full listener.
            let errno = if errno == Errno::Refused { Errno::NotByToe } else { errno };
            // An established connection is lost by a reset only.
            let errno = if self.state() == State::Asking { errno } else { Errno::Reset };
            self.fail_silently(now, errno);
            return Verdict::Done;
        }
        if self.state() == State::Asking && !matches!(kind, Kind::Request { .. }) {
            // Any other message implies that the other end has accepted; it may have overtaken that
            // answer.
            self.due.established = true;
            self.probed = now;
            self.step(now, Transition::Established);
        }
        let obeyed = self.obey(now, kind);
        self.judge(now, obeyed)
    }

    /// Held data is presented again. Other messages are ignored.
    pub fn handle_held(&mut self, now: Instant, kind: Kind) -> Verdict {
        let Kind::Data { offset, len } = kind else { return Verdict::Done };
        if matches!(self.state(), State::Over | State::Failed) {
            return Verdict::Done;
        }
        let taken = self.inbound.take_held(now, offset, len.into());
        self.judge(now, taken)
    }

    /// A violation of the rules fails the connection, and so does data for a socket that its guest
    /// has closed.
    fn judge(&mut self, now: Instant, obeyed: Result<Verdict, Breach>) -> Verdict {
        match obeyed {
            Ok(verdict) if verdict == Verdict::Done || !self.guest_is_gone => verdict,
            Ok(_) | Err(_) => {
                self.fail(now, Errno::Reset);
                Verdict::Done
            }
        }
    }

    fn obey(&mut self, now: Instant, kind: Kind) -> Result<Verdict, Breach> {
        let state = self.state();
        match kind {
            // A late copy changes nothing.
            Kind::Request { .. } if self.side == Side::Acceptor => {}
            Kind::Established { edge } if self.side == Side::Opener => {
                self.outbound.give_room(edge);
            }
            Kind::Request { .. } | Kind::Established { .. } => return Err(Breach::State),
            // The opener has no answer yet.
            _ if state == State::Offered => return Err(Breach::State),
            Kind::Data { offset, len } => return self.inbound.take(now, offset, len.into()),
            Kind::Credit { edge } => self.outbound.give_room(edge),
            Kind::Fin { total } => {
                self.inbound.end(now, total)?;
                self.look_for_end(now);
            }
            Kind::Taken if state.has_finished() => {
                // A copy changes nothing.
                let _ = self.try_step(now, Transition::Taken);
            }
            Kind::Taken => return Err(Breach::State),
            Kind::Probe { sent, finished, edge } => {
                self.outbound.give_room(edge);
                if finished {
                    // The FIN was lost, or our answer.
                    self.due.taken |= !state.may_receive();
                    self.inbound.end(now, sent)?;
                    self.look_for_end(now);
                } else {
                    self.inbound.claim(now, sent)?;
                }
            }
            // Handled above.
            Kind::Reset(_) => {}
        }
        Ok(Verdict::Done)
    }

    /// Handles the timers that are due.
    pub fn handle_timeout(&mut self, now: Instant) {
        let state = self.state();
        let passed = |at: Instant| at <= now;
        if matches!(state, State::Asking | State::Offered) {
            if passed(self.since + T_TOE_CONNECT) {
                self.fail(now, Errno::TimedOut);
            }
            return;
        }
        if !state.is_live() {
            return;
        }
        if passed(self.probed + T_TOE_PROBE + T_TOE_PROBE) {
            // A call this late means that the daemon stood still, not that the other end was
            // silent.
            self.heard = now;
        }
        let hole = self.inbound.hole_deadline().is_some_and(passed);
        let orphan = self.orphan_deadline().is_some_and(passed);
        let silence = self.silence_deadline().is_some_and(passed);
        if hole || orphan || silence {
            self.fail(now, Errno::Reset);
        } else if passed(self.probed + T_TOE_PROBE) {
            self.due.probe = true;
        }
    }

    /// The fabric has lost the other end.
    pub fn handle_loss(&mut self, now: Instant) {
        let asking = self.state() == State::Asking;
        self.fail_silently(now, if asking { Errno::HostUnreachable } else { Errno::Reset });
    }

    /// The guest that listens has accepted, and has room up to `edge`.
    pub fn accept(&mut self, now: Instant, edge: u64) {
        if self.state() == State::Offered {
            self.inbound.give_room(edge);
            self.due.opening = true;
            self.probed = now;
            self.step(now, Transition::Established);
        }
    }

    /// The guest sends `len` bytes. Returns the message that precedes them; `None`: it had no room,
    /// and the connection has failed.
    #[must_use]
    pub fn send(&mut self, now: Instant, len: u32) -> Option<Message> {
        let may = self.state().may_send() && !self.guest_is_gone && len > 0;
        let offset = if may { self.outbound.send(len.into()).ok() } else { None };
        let Some(offset) = offset else {
            self.fail(now, Errno::Reset);
            return None;
        };
        Some(self.message(Kind::Data { offset, len }))
    }

    /// `len` bytes more are in the guest's memory.
    pub fn delivered(&mut self, now: Instant, len: u64) {
        self.inbound.deliver(now, len);
        self.heard = now;
        self.look_for_end(now);
    }

    /// The guest has room up to `edge`.
    pub fn give_room(&mut self, edge: u64) {
        self.inbound.give_room(edge);
    }

    /// Limits the other end to `share` bytes under way: see [`Inbound::limit`].
    pub fn limit_arrivals(&mut self, share: u64) {
        self.inbound.limit(share);
    }

    /// Bytes that the other end may have under way: the room that it was shown.
    #[must_use]
    pub const fn told(&self) -> u64 {
        self.inbound.told()
    }

    /// Bytes that the guest may get before more room is announced.
    #[must_use]
    pub fn promised(&self) -> u64 {
        self.inbound.promised()
    }

    /// Whether the other end may have stopped for lack of room.
    #[must_use]
    pub const fn is_low(&self) -> bool {
        self.standing.state().may_receive() && self.inbound.is_low()
    }

    /// Sets the size of the guest's buffer: see [`Inbound::set_buffer`].
    pub fn set_buffer(&mut self, buffer: u64) {
        self.inbound.set_buffer(buffer);
    }

    /// The guest has finished its stream: shutdown(SHUT_WR).
    pub fn finish(&mut self, now: Instant) {
        if self.try_step(now, Transition::Finish) {
            self.due.fin = true;
        } else if matches!(self.state(), State::Asking | State::Offered) {
            self.abort(now, Errno::Reset);
        }
    }

    /// The guest has closed its socket. `unread`: it has not read everything, so the other one gets
    /// a reset (VTOE-05, RFC 1122 section 4.2.2.13).
    pub fn close(&mut self, now: Instant, unread: bool) {
        if unread || self.inbound.has_undelivered() {
            return self.abort(now, Errno::Reset);
        }
        self.finish(now);
        self.leave();
        self.since = now;
    }

    /// The guest gives the connection up, or refuses it with this errno.
    pub fn abort(&mut self, now: Instant, errno: Errno) {
        self.leave();
        self.fail(now, errno);
        self.due.failed = false;
    }

    /// The next message for the other end.
    #[must_use]
    pub fn poll_message(&mut self, now: Instant) -> Option<Message> {
        let due = &mut self.due;
        let kind = if std::mem::take(&mut due.reset) {
            Kind::Reset(self.standing.errno().unwrap_or(Errno::Reset))
        } else if self.standing.state() == State::Failed {
            return None;
        } else if std::mem::take(&mut due.opening) {
            let edge = self.inbound.tell_edge();
            match self.side {
                Side::Opener => Kind::Request { edge },
                Side::Acceptor => Kind::Established { edge },
            }
        } else if std::mem::take(&mut due.fin) {
            Kind::Fin { total: self.outbound.sent() }
        } else if std::mem::take(&mut due.taken) {
            Kind::Taken
        } else if std::mem::take(&mut due.probe) {
            self.probed = now;
            let edge = self.inbound.tell_edge();
            let finished = self.standing.state().has_finished();
            Kind::Probe { sent: self.outbound.sent(), finished, edge }
        } else if self.standing.state().may_receive() && self.inbound.is_credit_due() {
            Kind::Credit { edge: self.inbound.tell_edge() }
        } else {
            return None;
        };
        Some(self.message(kind))
    }

    /// The next event for the guest.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<GuestEvent> {
        let due = &mut self.due;
        if std::mem::take(&mut due.failed) {
            return Some(GuestEvent::Failed(self.standing.errno()?));
        }
        if self.standing.state() == State::Failed {
            return None;
        }
        let events = [
            (&mut due.connect_request, GuestEvent::ConnectRequest),
            (&mut due.established, GuestEvent::Established),
            (&mut due.ended, GuestEvent::Ended),
        ];
        let mut events = events.into_iter();
        events.find_map(|(due, event)| std::mem::take(due).then_some(event))
    }

    /// Time at which [`Self::handle_timeout`] is to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let state = self.state();
        if matches!(state, State::Asking | State::Offered) {
            return Some(self.since + T_TOE_CONNECT);
        }
        if !state.is_live() {
            return None;
        }
        let probe = Some(self.probed + T_TOE_PROBE);
        let (hole, orphan) = (self.inbound.hole_deadline(), self.orphan_deadline());
        [probe, hole, orphan, self.silence_deadline()].into_iter().flatten().min()
    }

    /// Time at which a closed socket stops waiting for the other guest.
    fn orphan_deadline(&self) -> Option<Instant> {
        let wait = match self.state() {
            State::Finished => T_TOE_ORPHAN,
            State::Finishing | State::Closing => T_TOE_DRAIN,
            _ => return None,
        };
        self.guest_is_gone.then(|| self.since + wait)
    }

    /// Time at which the other end's silence fails the connection. While the guest takes no data,
    /// as when it is paused, an orderly fabric is not read, and messages of the other end wait.
    fn silence_deadline(&self) -> Option<Instant> {
        (!self.inbound.has_undelivered()).then(|| self.heard + T_TOE_SILENCE)
    }

    /// Checks whether the other stream has ended.
    fn look_for_end(&mut self, now: Instant) {
        if self.inbound.is_complete() && self.try_step(now, Transition::Ended) {
            self.due.taken = true;
            self.due.ended = !self.guest_is_gone;
        }
    }

    /// The guest gets no more events.
    fn leave(&mut self) {
        self.guest_is_gone = true;
        self.due = Due {
            connect_request: false,
            established: false,
            ended: false,
            failed: false,
            ..self.due
        };
    }

    fn fail(&mut self, now: Instant, errno: Errno) {
        if self.try_step(now, Transition::Fail(errno)) {
            // An end that never got the request needs no reset.
            self.due.reset = !(self.side == Side::Opener && self.due.opening);
            self.due.failed = !self.guest_is_gone;
            self.forget();
        }
    }

    /// Fails without a message: the other end knows, or cannot be reached.
    fn fail_silently(&mut self, now: Instant, errno: Errno) {
        if self.try_step(now, Transition::Fail(errno)) {
            self.due.failed = !self.guest_is_gone;
            self.forget();
        }
    }

    /// Drops all due messages and events of a failed connection.
    fn forget(&mut self) {
        let Due { reset, failed, .. } = self.due;
        self.due = Due { reset, failed, ..Due::default() };
    }

    fn try_step(&mut self, now: Instant, step: Transition) -> bool {
        let moved = self.standing.go(step);
        if moved {
            self.since = now;
        }
        moved
    }

    fn step(&mut self, now: Instant, step: Transition) {
        let moved = self.try_step(now, step);
        debug_assert!(moved, "{step:?} in {:?}", self.state());
    }

    const fn message(&self, kind: Kind) -> Message {
        Message { id: self.id, to: self.side.other(), kind }
    }
}
