//! By what a stream shows whose it is: a ticket, if hosts prove who they are; zeros otherwise.

use std::os::fd::BorrowedFd;

use nightporter_core::time::{Duration, Instant};
use nightporter_core::toe::id::Side;

use super::{StreamId, Streams};
use crate::toe::trust::{Event, SECRET_LEN, Ticket, Trust, Way, is_same};

/// That a host shows no ticket is said so often.
pub(super) const T_SAY: Duration = Duration::from_secs(10);

impl Streams {
    /// Readable when there may be tickets.
    pub(in super::super) fn trust_fd(&self) -> Option<BorrowedFd<'_>> {
        self.trust.as_ref().map(Trust::fd)
    }

    /// What hosts prove to each other, if they do.
    pub(in super::super) const fn trust_mut(&mut self) -> Option<&mut Trust> {
        self.trust.as_mut()
    }

    /// A new stream to another host is begun, as soon as it has a ticket.
    pub(super) fn begin(&mut self, id: StreamId, way: Way) {
        if self.encrypts() {
            return self.open(id, way);
        }
        let ticket = match &mut self.trust {
            None => Some(Ticket::NONE),
            Some(trust) => {
                let waiting = self.ticketless.get(&way).map_or(0, |all| all.len());
                trust.take(way, waiting)
            }
        };
        match ticket {
            Some(ticket) => self.dial(id, way, ticket),
            None => self.ticketless.entry(way).or_default().push_back(id),
        }
    }

    fn dial(&mut self, id: StreamId, way: Way, ticket: Ticket) {
        let Some(stream) = self.get_mut(id) else { return };
        stream.set_ticket(ticket);
        // Without who dials it ends when it has waited long enough.
        if let Some(dialer) = &mut self.dialer {
            dialer.ask(id.tag(), way.own, way.peer);
            self.stats.dialed += 1;
        }
    }

    /// Tickets have come, or do not come: streams that wait for one that does not.
    pub(in super::super) fn hear_trust(&mut self) -> Vec<StreamId> {
        let mut failed = Vec::new();
        self.trust.iter_mut().for_each(Trust::hear);
        while let Some(event) = self.trust.as_mut().and_then(Trust::poll_event) {
            match event {
                Event::Came(way) => self.go_on(way),
                Event::Lost(way) => failed.extend(self.ticketless.remove(&way).unwrap_or_default()),
            }
        }
        failed
    }

    fn go_on(&mut self, way: Way) {
        let Some(mut waiting) = self.ticketless.remove(&way) else { return };
        while let Some(id) = waiting.front().copied() {
            if self.get(id).is_some() {
                let Some(trust) = &mut self.trust else { return };
                let Some(ticket) = trust.take(way, waiting.len() - 1) else { break };
                self.dial(id, way, ticket);
            }
            waiting.pop_front();
        }
        if !waiting.is_empty() {
            self.ticketless.insert(way, waiting);
        }
    }

    /// Whether what another host has shown in its stream is right.
    pub(in super::super) fn admit(
        &mut self,
        now: Instant,
        id: StreamId,
        shown: &[u8; SECRET_LEN],
        way: Option<Way>,
    ) -> bool {
        let Self { trust, places, .. } = self;
        let stream = places.get_mut(id.place as usize).and_then(|at| at.stream.as_deref_mut());
        let Some(stream) = stream else { return false };
        let is_right = |wanted: &[u8; SECRET_LEN]| is_same(wanted, shown);
        let answer = match (stream.ours, trust) {
            // It has come by TLS, and what a plain one shows is not looked at.
            (Side::Acceptor, Some(trust)) if trust.encrypts() => {
                let is_its = stream.is_sealed() && is_right(&Ticket::NONE.shown);
                is_its.then_some(Ticket::NONE.answer)
            }
            (Side::Acceptor, Some(trust)) => way.and_then(|way| trust.admit(way, shown)),
            (Side::Acceptor, None) => is_right(&Ticket::NONE.shown).then_some(Ticket::NONE.answer),
            (Side::Opener, _) => is_right(&stream.ticket.answer).then_some(Ticket::NONE.answer),
        };
        if let Some(answer) = answer {
            stream.prove(&answer);
            return true;
        }
        self.stats.unproven += 1;
        if self.may_say(now) {
            let peer = way.map(|way| way.peer);
            tracing::warn!(?peer, "toe: a host does not show in a stream what it was told");
        }
        false
    }

    /// Whether something is said of a host that is not believed, which then is.
    pub(super) fn may_say(&mut self, now: Instant) -> bool {
        let may = self.said.is_none_or(|at| now.since(at) >= T_SAY);
        if may {
            self.said = Some(now);
        }
        may
    }
}
