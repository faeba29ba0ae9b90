//! One end of a shadow connection: between a guest's socket and a fabric.
//!
//! # Use
//!
//! After every `handle_*` and every command: [`End::poll_message`] until `None`, what it gives goes
//! to the other end; then [`End::poll_event`] until `None`, what it gives goes to the guest; then
//! [`End::poll_timeout`]. When [`End::is_spent`] the end may be dropped.
//!
//! Whoever breaks the rules, the guest or the other end, fails the connection (`ECONNRESET`) and
//! nothing else; the caller need not ask which.

use super::errno::Errno;
use super::id::{ShadowId, Side};
use super::inbound::{Inbound, Verdict};
use super::message::{Breach, Kind, Message};
use super::outbound::Outbound;
use super::state::{Standing, State, Step};
use crate::limits::{T_TOE_CONNECT, T_TOE_DRAIN, T_TOE_ORPHAN, T_TOE_PROBE, T_TOE_SILENCE};
use crate::time::Instant;

/// What the guest is to hear of, in the words of the VTOE paper (section 4.3) where it has one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// CONNECT_REQUEST: somebody wants to connect to the guest.
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

/// One end. See the module's doc.
#[derive(Debug)]
pub struct End {
    id: ShadowId,
    side: Side,
    standing: Standing,
    outbound: Outbound,
    inbound: Inbound,
    due: Due,
    /// The guest has closed its socket: nobody is there for events or data.
    guest_is_gone: bool,
    /// When its state changed.
    since: Instant,
    /// When the other end was last heard of.
    heard: Instant,
    /// When it was last told where this end stands.
    probed: Instant,
}

impl End {
    /// The guest wants to connect, and has room for what the other one sends up to `edge`.
    #[must_use]
    pub fn connect(now: Instant, id: ShadowId, edge: u64) -> Self {
        let mut end = Self::new(now, id, Side::Opener, Standing::asking());
        end.inbound.give_room(edge);
        end.due.opening = true;
        end
    }

    /// Somebody else's guest wants to connect, and has room up to `edge`.
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

    /// Which end of it this is.
    #[must_use]
    pub const fn side(&self) -> Side {
        self.side
    }

    /// Where it stands.
    #[must_use]
    pub const fn state(&self) -> State {
        self.standing.state()
    }

    /// How it failed, if it did.
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

    /// Whether the guest does not have all that came.
    #[must_use]
    pub const fn has_undelivered(&self) -> bool {
        self.inbound.has_undelivered()
    }

    /// Whether it ended, and everybody has been told.
    #[must_use]
    pub const fn is_spent(&self) -> bool {
        let due = self.due.taken || self.due.reset || self.due.fin;
        let untold = self.due.ended || self.due.failed;
        matches!(self.state(), State::Over | State::Failed) && !due && !untold
    }

    /// A message for this end came.
    pub fn handle_message(&mut self, now: Instant, kind: Kind) -> Verdict {
        if matches!(self.state(), State::Over | State::Failed) {
            // It does not know that its guest's stream has arrived.
            let asks = matches!(kind, Kind::Probe { finished: true, .. });
            self.due.taken |= asks && self.state() == State::Over;
            return Verdict::Done;
        }
        self.heard = now;
        if let Kind::Reset(errno) = kind {
            // Older daemons say so of a listener that is full.
            let errno = if errno == Errno::Refused { Errno::NotByToe } else { errno };
            // After the connection is established there is but one way to lose it.
            let errno = if self.state() == State::Asking { errno } else { Errno::Reset };
            self.fail_silently(now, errno);
            return Verdict::Done;
        }
        if self.state() == State::Asking && !matches!(kind, Kind::Request { .. }) {
            // Whoever says anything else has accepted, and this may have overtaken its answer.
            self.due.established = true;
            self.probed = now;
            self.step(now, Step::Established);
        }
        let obeyed = self.obey(now, kind);
        self.judge(now, obeyed)
    }

    /// Data that is held is presented again. All else is not, and nothing becomes of it.
    pub fn handle_held(&mut self, now: Instant, kind: Kind) -> Verdict {
        let Kind::Data { offset, len } = kind else { return Verdict::Done };
        if matches!(self.state(), State::Over | State::Failed) {
            return Verdict::Done;
        }
        let taken = self.inbound.take_held(now, offset, len.into());
        self.judge(now, taken)
    }

    /// Whoever breaks the rules loses the connection, and so does whoever sends to a socket that
    /// its guest has closed.
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
            // A copy that comes late says nothing new.
            Kind::Request { .. } if self.side == Side::Acceptor => {}
            Kind::Established { edge } if self.side == Side::Opener => {
                self.outbound.give_room(edge);
            }
            Kind::Request { .. } | Kind::Established { .. } => return Err(Breach::State),
            // The opener knows of no answer yet.
            _ if state == State::Offered => return Err(Breach::State),
            Kind::Data { offset, len } => return self.inbound.take(now, offset, len.into()),
            Kind::Credit { edge } => self.outbound.give_room(edge),
            Kind::Fin { total } => {
                self.inbound.end(now, total)?;
                self.look_for_end(now);
            }
            Kind::Taken if state.has_finished() => {
                // A copy changes nothing.
                let _ = self.try_step(now, Step::Taken);
            }
            Kind::Taken => return Err(Breach::State),
            Kind::Probe { sent, finished, edge } => {
                self.outbound.give_room(edge);
                if finished {
                    // Its FIN was lost, or our answer.
                    self.due.taken |= !state.may_receive();
                    self.inbound.end(now, sent)?;
                    self.look_for_end(now);
                } else {
                    self.inbound.claim(now, sent)?;
                }
            }
            // It was handled before.
            Kind::Reset(_) => {}
        }
        Ok(Verdict::Done)
    }

    /// Time has passed.
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
            // It was not called for so long: the daemon stood still, and nobody was silent.
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

    /// The fabric has lost the other end, and says so.
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
            self.step(now, Step::Established);
        }
    }

    /// The guest sends `len` bytes. What is to go to the other end, before their bytes; `None`: it
    /// may not, and the connection has failed.
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

    /// `len` bytes of what was to be delivered are in the guest's memory now.
    pub fn delivered(&mut self, now: Instant, len: u64) {
        self.inbound.deliver(now, len);
        self.heard = now;
        self.look_for_end(now);
    }

    /// The guest has room up to `edge`.
    pub fn give_room(&mut self, edge: u64) {
        self.inbound.give_room(edge);
    }

    /// From now on the other end may have `share` bytes under way: see [`Inbound::limit`].
    pub fn limit_arrivals(&mut self, share: u64) {
        self.inbound.limit(share);
    }

    /// Bytes that the other end may have under way: it knows of room for so many.
    #[must_use]
    pub const fn told(&self) -> u64 {
        self.inbound.told()
    }

    /// Bytes that the guest may get before it says of more room.
    #[must_use]
    pub fn promised(&self) -> u64 {
        self.inbound.promised()
    }

    /// Whether the other end may have stopped because it knows of little room.
    #[must_use]
    pub const fn is_low(&self) -> bool {
        self.standing.state().may_receive() && self.inbound.is_low()
    }

    /// So large is the guest's buffer: see [`Inbound::set_buffer`].
    pub fn set_buffer(&mut self, buffer: u64) {
        self.inbound.set_buffer(buffer);
    }

    /// The guest has finished its stream: shutdown(SHUT_WR).
    pub fn finish(&mut self, now: Instant) {
        if self.try_step(now, Step::Finish) {
            self.due.fin = true;
        } else if matches!(self.state(), State::Asking | State::Offered) {
            self.abort(now, Errno::Reset);
        }
    }

    /// The guest has closed its socket. `unread`: it has not read all it was given, so the other
    /// one hears of a reset (VTOE-05, RFC 1122 section 4.2.2.13).
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

    /// What is due to the other end.
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

    /// What the guest is to hear of.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<Event> {
        let due = &mut self.due;
        if std::mem::take(&mut due.failed) {
            return Some(Event::Failed(self.standing.errno()?));
        }
        if self.standing.state() == State::Failed {
            return None;
        }
        let events = [
            (&mut due.connect_request, Event::ConnectRequest),
            (&mut due.established, Event::Established),
            (&mut due.ended, Event::Ended),
        ];
        let mut events = events.into_iter();
        events.find_map(|(due, event)| std::mem::take(due).then_some(event))
    }

    /// When [`Self::handle_timeout`] is to be called.
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

    /// When a closed socket has waited long enough for the other guest.
    fn orphan_deadline(&self) -> Option<Instant> {
        let wait = match self.state() {
            State::Finished => T_TOE_ORPHAN,
            State::Finishing | State::Closing => T_TOE_DRAIN,
            _ => return None,
        };
        self.guest_is_gone.then(|| self.since + wait)
    }

    /// When the other end was silent for too long. While the guest does not take what it is to
    /// have, as one that is paused, an orderly fabric is not read, and what the other end says
    /// waits.
    fn silence_deadline(&self) -> Option<Instant> {
        (!self.inbound.has_undelivered()).then(|| self.heard + T_TOE_SILENCE)
    }

    /// The other stream may have ended just now.
    fn look_for_end(&mut self, now: Instant) {
        if self.inbound.is_complete() && self.try_step(now, Step::Ended) {
            self.due.taken = true;
            self.due.ended = !self.guest_is_gone;
        }
    }

    /// Nobody hears of events any more.
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
        if self.try_step(now, Step::Fail(errno)) {
            // Who was never asked need not hear that it is over.
            self.due.reset = !(self.side == Side::Opener && self.due.opening);
            self.due.failed = !self.guest_is_gone;
            self.forget();
        }
    }

    /// The other end knows, or cannot be told.
    fn fail_silently(&mut self, now: Instant, errno: Errno) {
        if self.try_step(now, Step::Fail(errno)) {
            self.due.failed = !self.guest_is_gone;
            self.forget();
        }
    }

    /// Nothing else is due when a connection has failed.
    fn forget(&mut self) {
        let Due { reset, failed, .. } = self.due;
        self.due = Due { reset, failed, ..Due::default() };
    }

    fn try_step(&mut self, now: Instant, step: Step) -> bool {
        let moved = self.standing.go(step);
        if moved {
            self.since = now;
        }
        moved
    }

    fn step(&mut self, now: Instant, step: Step) {
        let moved = self.try_step(now, step);
        debug_assert!(moved, "{step:?} in {:?}", self.state());
    }

    const fn message(&self, kind: Kind) -> Message {
        Message { id: self.id, to: self.side.other(), kind }
    }
}
