//! VMs that are owed bytes, or a turn to send, and until when (BST-01): the reasons for which a
//! VM's vCPUs are boosted.
//!
//! A [`Wanting`] exists for each VM that has boost, and for no other. Flows report two kinds of
//! events to it:
//!
//! - **data** of R for a flow in `On`. It makes the VM wanting until G has acknowledged every byte
//!   that was acknowledged early, and [`T_READING`] longer ([`T_READING_ON`] where data keeps
//!   coming): G's kernel acknowledges before G's application reads.
//! - **a turn**: an ACK of R by which waiting data may go, a SYN to a port at which G has lately
//!   accepted, and data that was not acknowledged early. It makes the VM wanting until G has seen
//!   everything that it was given, and as much longer: Linux's virtio-net shows that it has taken a
//!   frame before its TCP gets it (`virtqueue_napi_complete`, 6.1).
//!
//! Either ends [`T_WANTING`] after the last such event. Frames to groups, UDP, ICMP and other SYNs
//! are no events. Bytes for which G shows no room are not owed: G's application waits, not G.
//!
//! Whether a VM uses the time is said by what G takes meanwhile: a boost in which G took nothing of
//! what it was owed was waste ([`Want::taken`]).

use crate::flow::table::FlowId;
use crate::limits::{
    ACCEPTING_PORTS, T_ACCEPTED, T_READING, T_READING_ON, T_WANTING, WANTING_FLOWS,
};
use crate::time::{Duration, Instant};

/// The reason why a VM wants its core.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Claim {
    /// Bytes that H has acknowledged and G has not.
    Bytes,
    /// Its application reads such bytes.
    Reading,
    /// A frame that it has yet to see, or to answer.
    Turn,
}

/// Bytes of one flow whose acknowledgement G owes: bytes that were acknowledged early.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Owed {
    /// G has acknowledged everything before this offset.
    pub(crate) acknowledged: u64,
    /// G has room for them.
    pub(crate) has_room: bool,
}

/// A VM wants its core.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Want {
    /// Its reason.
    pub claim: Claim,
    /// It ends then, if nothing happens before.
    pub until: Instant,
    /// A count that moves whenever G has acknowledged bytes that it was owed or, if it was owed
    /// none, has seen everything that it was given.
    pub taken: u32,
}

/// See the module doc.
#[derive(Debug)]
pub struct Wanting {
    /// Flows with data that G has not acknowledged yet, the last ones, and what each had
    /// acknowledged at the last [`Self::poll`].
    flows: Vec<(FlowId, Option<u64>)>,
    /// Some of them were owed bytes at the last [`Self::poll`].
    owed: bool,
    /// The last data.
    data_at: Option<Instant>,
    /// When G had acknowledged everything, if nothing has come since.
    idle_at: Option<Instant>,
    /// When something last came again, it was within [`T_READING_ON`].
    goes_on: bool,
    /// The last event after which G has not seen everything.
    turn_at: Option<Instant>,
    /// G's application reads what G has acknowledged.
    reading_until: Instant,
    /// Since when G has seen everything, of which it answers the last.
    seen_at: Option<Instant>,
    /// See [`Want::taken`].
    taken: u32,
    /// Ports at which G accepted, and when; a port has one place, by its low bits.
    accepting: [(u16, Instant); ACCEPTING_PORTS],
}

impl Default for Wanting {
    fn default() -> Self {
        Self {
            flows: Vec::new(),
            owed: false,
            data_at: None,
            idle_at: None,
            goes_on: false,
            turn_at: None,
            reading_until: Instant::ZERO,
            seen_at: None,
            taken: 0,
            accepting: [(0, Instant::ZERO); ACCEPTING_PORTS],
        }
    }
}

impl Wanting {
    /// New data of R is held for this flow in `On`.
    pub(super) fn on_data(&mut self, now: Instant, id: FlowId) {
        if !self.flows.iter().any(|&(known, _)| known == id) {
            if self.flows.len() == WANTING_FLOWS {
                self.flows.remove(0);
            }
            self.flows.push((id, None));
        }
        if let Some(at) = self.idle_at.take() {
            self.goes_on = now.since(at) < T_READING_ON;
        }
        self.data_at = Some(now);
        self.on_turn(now);
    }

    /// R's ACK lets waiting data go.
    pub(super) fn on_turn(&mut self, now: Instant) {
        (self.turn_at, self.seen_at) = (Some(now), None);
    }

    /// R's SYN passes to `port` of G.
    pub(crate) fn on_syn(&mut self, now: Instant, port: u16) {
        let (known, at) = self.accepting[usize::from(port) % ACCEPTING_PORTS];
        if known == port && at > Instant::ZERO && now.since(at) <= T_ACCEPTED {
            self.on_turn(now);
        }
    }

    /// G's SYN-ACK leaves from `port`.
    pub(crate) fn on_accepted(&mut self, now: Instant, port: u16) {
        self.accepting[usize::from(port) % ACCEPTING_PORTS] = (port, now);
    }

    fn reading(&self) -> Duration {
        if self.goes_on { T_READING_ON } else { T_READING }
    }

    /// The VM's wish now. To be called at the end of a turn, when flows know what they owe.
    /// `has_seen_all`: G has seen everything that it was given; `owed`: [`Flow::owed_bytes`] of a
    /// flow, `None` also if there is no such flow any more.
    ///
    /// [`Flow::owed_bytes`]: crate::tcp::flow::Flow::owed_bytes
    #[must_use]
    pub(crate) fn poll(
        &mut self,
        now: Instant,
        has_seen_all: bool,
        owed: impl Fn(FlowId) -> Option<Owed>,
    ) -> Option<Want> {
        let was_owed = std::mem::take(&mut self.owed) | !self.flows.is_empty();
        let mut takes = false;
        self.flows.retain_mut(|(id, known)| {
            let owed = owed(*id);
            let before = std::mem::replace(known, owed.map(|owed| owed.acknowledged));
            self.owed |= owed.is_some_and(|owed| owed.has_room);
            takes |= owed.is_none() || before.is_some() && before < *known;
            owed.is_some()
        });
        let until = |at: Instant| Some(at + T_WANTING).filter(|&until| now < until);
        if has_seen_all && self.turn_at.is_some() && self.seen_at.is_none() {
            self.seen_at = Some(now);
            takes |= self.flows.is_empty();
        }
        self.taken = self.taken.wrapping_add(takes.into());
        let taken = self.taken;
        if self.seen_at.is_some_and(|at| now >= at + self.reading()) {
            (self.turn_at, self.seen_at) = (None, None);
        }
        let turn = self.turn_at.and_then(until);
        let turn = turn.map(|until| Want { claim: Claim::Turn, until, taken });
        let data_until = self.data_at.and_then(until);
        let Some(data_until) = data_until else {
            return turn;
        };
        if self.owed {
            return Some(Want { claim: Claim::Bytes, until: data_until, taken });
        }
        if was_owed && self.flows.is_empty() {
            self.reading_until = now + self.reading();
            self.idle_at = Some(now);
        }
        let until = self.reading_until.min(data_until);
        if (self.turn_at.is_none() || self.seen_at.is_some()) && now < until {
            return Some(Want { claim: Claim::Reading, until, taken });
        }
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bst_01_an_application_has_longer_to_read_where_data_keeps_coming() {
        let at = |us| Instant::ZERO + Duration::from_millis(1) + Duration::from_micros(us);
        let mut it = Wanting::default();
        // G acknowledges at once what comes at `begin_us`; how long its application reads then.
        let mut reads = |begin_us, us| {
            it.on_data(at(begin_us), FlowId::NONE);
            let want = it.poll(at(begin_us), true, |_| None).unwrap();
            assert_eq!((want.claim, want.until), (Claim::Reading, at(begin_us + us)));
            it.poll(at(begin_us + us), true, |_| None).is_none()
        };
        assert!(reads(0, 700));
        assert!(reads(10_000, 700), "flights of a remote that is far");
        assert!(reads(11_999, 2000), "of one that is near");
        assert!(reads(13_999, 700), "it was the last piece");
    }

    #[test]
    fn bst_01_a_guest_has_as_long_to_answer() {
        let at = |us| Instant::ZERO + Duration::from_millis(1) + Duration::from_micros(us);
        let mut it = Wanting::default();
        it.on_turn(at(0));
        let mut claim = |us| it.poll(at(us), true, |_| None).map(|it| it.claim);
        assert_eq!((claim(0), claim(699)), (Some(Claim::Turn), Some(Claim::Turn)));
        assert_eq!(claim(700), None);
    }
}
