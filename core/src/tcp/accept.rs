//! Accept offload: H answers R's SYN for a guest that is off its core.
//!
//! `docs/design/accept-offload.md` is the theory, and says what is left. Here is what is known of a
//! VM; `tcp::translated` has what becomes of a flow, `engine::accepting` the frames before there is
//! one.
//!
//! 1. A SYN comes from a source of which G has lately accepted a connection ([`learned`]), and is
//!    one that H understands ([`grant`]).
//! 2. H answers it with numbers of its own ([`isn`]), and offers what G offered there last. If
//!    there is no place for more, the numbers are a [`cookie`].
//! 3. When R has completed the handshake ([`half_open`]), G gets a SYN that offers just what R was
//!    granted. G's answer says how its numbers differ from H's ([`opening`],
//!    [`crate::wire::translate`]).

pub mod cookie;
pub mod grant;
pub mod half_open;
pub mod isn;
pub mod learned;
pub mod opening;
pub(crate) mod passed;
mod sip;

use std::ops::RangeInclusive;

use crate::flow::key::FlowKey;
use crate::limits::{FLOW_BUFFER_MIN, PAGE};
use crate::time::Instant;
use half_open::HalfOpen;
use isn::IsnKey;
use learned::{AcceptFrom, Learned, Server};
use passed::Passed;

/// Accept offload of a VM, as its operator wants it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AcceptConfig {
    /// The guest's ports at which H may answer.
    pub ports: Vec<RangeInclusive<u16>>,
    /// The connections that speak for a source.
    pub from: AcceptFrom,
    /// H answers from then on. SYNs from before, whose first copies G may have, are unknown to H:
    /// G's answers to them may be on their way for a minute (`T_OPENING`).
    pub begins_at: Instant,
}

/// The state of a VM that has accept offload.
#[derive(Debug)]
pub struct Accepting {
    pub(crate) config: AcceptConfig,
    pub(crate) learned: Learned,
    pub(crate) half_open: HalfOpen,
    pub(crate) isn: IsnKey,
    /// Connections that H has accepted and G has not.
    waiting: u32,
    /// SYNs that went on to G, which answers their copies as well.
    pub(crate) passed: Passed,
    /// The number of G's present run: a run ends when G has seen everything (ACC-10).
    pub(crate) run: u64,
}

impl Accepting {
    /// Nothing is known. `keys` must be unpredictable, and nobody else's.
    #[must_use]
    pub fn new(config: AcceptConfig, keys: [u64; 6]) -> Self {
        let [a, b, c, d, e, f] = keys;
        Self {
            config,
            learned: Learned::default(),
            half_open: HalfOpen::new([a, b, c, d]),
            isn: IsnKey([e, f]),
            waiting: 0,
            passed: Passed::new([c, d, a, b]),
            run: 0,
        }
    }

    /// H may answer at this port.
    pub(crate) fn has_port(&self, port: u16) -> bool {
        self.config.ports.iter().any(|ports| ports.contains(&port))
    }

    /// One connection more may wait for G besides `others`: what all of them are promised is an
    /// eighth of the VM's budget at most (ACC-10).
    pub(crate) fn has_room(&self, budget_pages: u64, others: usize) -> bool {
        (u64::from(self.waiting) + others as u64 + 1) * FLOW_BUFFER_MIN
            <= budget_pages * PAGE as u64 / 8
    }

    /// H has accepted a connection for G.
    pub(crate) fn on_waiting(&mut self, key: &FlowKey) {
        self.waiting += 1;
        self.learned.on_waiting(server(key));
    }

    /// G has accepted it, or it is over.
    pub(crate) fn on_waited(&mut self, key: &FlowKey) {
        self.waiting = self.waiting.saturating_sub(1);
        self.learned.on_waited(server(key));
    }
}

/// The server of a connection.
pub(crate) fn server(key: &FlowKey) -> Server {
    Server { vlan: key.vlan, addr: key.g_addr, port: key.g_port }
}
