//! Who is owed bytes, or a turn to send, and until when (BST-01): the reasons for which a VM's
//! vCPUs are boosted.
//!
//! A [`Wanting`] exists for each VM that has boost, and for no other. Flows report two kinds of
//! events to it:
//!
//! - **data** of R for a flow in `On`. It makes the VM wanting until G has acknowledged every byte
//!   that was acknowledged early, and [`T_READING`] longer: G's kernel acknowledges before G's
//!   application reads.
//! - **a turn**: an ACK of R by which waiting data may go, a SYN to a port at which G has lately
//!   accepted, and data that was not acknowledged early. It makes the VM wanting until G has seen
//!   everything that it was given, and [`T_READING`] longer: Linux's virtio-net shows that it has
//!   taken a frame before its TCP gets it (`virtqueue_napi_complete`, 6.1).
//!
//! Either ends [`T_WANTING`] after the last such event. Frames to groups, UDP, ICMP and other SYNs
//! are no events. Bytes for which G shows no room are not owed: G's application waits, not G.

use crate::flow::table::FlowId;
use crate::limits::{ACCEPTING_PORTS, T_ACCEPTED, T_READING, T_WANTING, WANTING_FLOWS};
use crate::time::Instant;

/// What a VM wants its core for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Claim {
    /// Bytes that H has acknowledged and G has not.
    Bytes,
    /// Its application reads such bytes.
    Reading,
    /// A frame that it has yet to see, or to answer.
    Turn,
}

/// A VM wants its core.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Want {
    /// What for.
    pub claim: Claim,
    /// It ends then, if nothing happens before.
    pub until: Instant,
}

/// See the module doc.
#[derive(Debug)]
pub struct Wanting {
    /// Flows with data that G has not acknowledged yet, the last ones.
    flows: Vec<FlowId>,
    /// Some of them were owed bytes at the last [`Self::poll`].
    owed: bool,
    /// The last data.
    data_at: Option<Instant>,
    /// The last event after which G has not seen everything.
    turn_at: Option<Instant>,
    /// G's application reads what G has acknowledged.
    reading_until: Instant,
    /// Since when G has seen everything, of which it answers the last.
    seen_at: Option<Instant>,
    /// Ports at which G accepted, and when; a port has one place, by its low bits.
    accepting: [(u16, Instant); ACCEPTING_PORTS],
}

impl Default for Wanting {
    fn default() -> Self {
        Self {
            flows: Vec::new(),
            owed: false,
            data_at: None,
            turn_at: None,
            reading_until: Instant::ZERO,
            seen_at: None,
            accepting: [(0, Instant::ZERO); ACCEPTING_PORTS],
        }
    }
}

impl Wanting {
    /// New data of R is held for this flow in `On`.
    pub(super) fn on_data(&mut self, now: Instant, id: FlowId) {
        if !self.flows.contains(&id) {
            if self.flows.len() == WANTING_FLOWS {
                self.flows.remove(0);
            }
            self.flows.push(id);
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

    /// What the VM wants now. To be called at the end of a turn, when flows know what they owe.
    /// `has_seen_all`: G has seen everything that it was given; `owed`: [`Flow::owed_bytes`] of a
    /// flow, `None` if there is no such flow any more.
    ///
    /// [`Flow::owed_bytes`]: crate::tcp::flow::Flow::owed_bytes
    #[must_use]
    pub(crate) fn poll(
        &mut self,
        now: Instant,
        has_seen_all: bool,
        owed: impl Fn(FlowId) -> Option<bool>,
    ) -> Option<Want> {
        let was_owed = std::mem::take(&mut self.owed) | !self.flows.is_empty();
        self.flows.retain(|&id| {
            let owed = owed(id);
            self.owed |= owed == Some(true);
            owed.is_some()
        });
        let until = |at: Instant| Some(at + T_WANTING).filter(|&until| now < until);
        if has_seen_all && self.turn_at.is_some() {
            self.seen_at.get_or_insert(now);
        }
        if self.seen_at.is_some_and(|at| now >= at + T_READING) {
            (self.turn_at, self.seen_at) = (None, None);
        }
        let turn = self.turn_at.and_then(until);
        let turn = turn.map(|until| Want { claim: Claim::Turn, until });
        let data_until = self.data_at.and_then(until);
        let Some(data_until) = data_until else {
            return turn;
        };
        if self.owed {
            return Some(Want { claim: Claim::Bytes, until: data_until });
        }
        if was_owed && self.flows.is_empty() {
            self.reading_until = now + T_READING;
        }
        let until = self.reading_until.min(data_until);
        if (self.turn_at.is_none() || self.seen_at.is_some()) && now < until {
            return Some(Want { claim: Claim::Reading, until });
        }
        turn
    }
}
