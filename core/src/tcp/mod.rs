//! Ack offload: H is the TCP receiver for R's data, and a sender to G inside the host.
//!
//! Read first: `docs/spec.md`, RFC 9293 section 3.10.7.4, RFC 5961, RFC 7323.
//!
//! # Theory of operation
//!
//! A [`flow::Flow`] is two pipes. Inbound, R to G: a [`receiver`], the store, a [`sender`].
//! Outbound, G to R: counters ([`outbound`]), and with congestion offload the same parts.
//!
//! **A segment of R** ([`from_net`]) that G's kernel would accept is copied into the store, then
//! acknowledged with a reserved window (`receiver`). The sender gives the bytes to G inside G's own
//! window (`sender`) when the ring has room ([`deliver`]). They leave the store only by G's
//! cumulative ACK. If G drops them, H retransmits them.
//!
//! **A segment of G** ([`from_guest`]): its ACK moves the sender, and a pure ACK is absorbed. Its
//! data passes the gate for R. With congestion offload it is stored, and leaves when the path has
//! room for it ([`depart`]).
//!
//! **A gate** ([`gates`]) writes every header: for R the receiver's acknowledgement and window, for
//! G the sender's sequence number and R's acknowledgement.
//!
//! **Ordinary segments** take a straight way through both ([`predicted`]).
//!
//! **Begin and end.** [`handshake`] learns the [`options`]. [`lifecycle`] takes a flow into the
//! path when everything is understood, and lets it go when nothing is owed. [`state`] has every
//! transition, [`timers`] the deadlines of a flow. Everything else is forwarded verbatim.
//!
//! # Writers of each part
//!
//! | File | Writes |
//! |---|---|
//! | `receiver` | the bytes in order and out of order, the edge shown to R, its reservation |
//! | `receiver/acks` | the acknowledgements that were sent to R, and those that are due |
//! | `sender`, `sender/recovery` | G's progress, the next bytes for G, G's edge, G's losses |
//! | `sender/path` | the way of bytes behind G, once some were lost there |
//! | `outbound` | R's progress with G's bytes, R's window and SACK blocks |
//! | `outbound/relayed` | G's bytes that are kept, with congestion offload |
//! | `lead` | how far H is ahead of G, in samples for operators |
//! | `recorded` | the flow's record in the arena |
//! | `wanting` | who is owed bytes or a turn, for VMs that have boost |
//! | `doubt` | flows whose G may have rebooted |
//! | `absence` | flows whose segments may have passed the daemon by |
//! | `returning` | flows that come back after that |
//! | `accept` | who may be answered in G's place, and how (accept offload) |
//! | `translated` | flows that H has accepted, from the first frame to the last |
//! | `distance` | what is known of servers behind G |
//! | `state`, `timers`, `timestamps`, `template`, `options` | the state in their names |
//!
//! Their fields are private. `losses` is a box for state that most flows do not have.
//!
//! # Invariants
//!
//! 1. INV-03: bytes that were acknowledged to R and not by G are in the store. Order of writing:
//!    payload, commit record, ACK.
//! 2. INV-04: R's FIN is acknowledged only once G has acknowledged it.
//! 3. INV-05: the edge shown to R never moves left. INV-06: every byte below it has a reserved
//!    place.
//! 4. INV-13: fresh bytes for G end at or before G's edge.
//! 5. A flow enters PASS only when it owes nothing to R or G.

mod absence;
pub mod accept;
mod behind;
mod deliver;
mod depart;
pub mod distance;
mod doubt;
pub mod flow;
mod from_guest;
mod from_net;
pub(crate) mod gates;
mod handshake;
pub mod lead;
mod lifecycle;
mod losses;
pub mod options;
mod outbound;
mod predicted;
mod receiver;
mod recorded;
mod resumed;
mod returning;
pub(crate) mod saved;
mod sender;
pub mod state;
pub mod stats;
mod template;
mod timers;
mod timestamps;
mod translated;
mod unseen;
pub mod vm;
pub mod wanting;

use std::collections::VecDeque;

use crate::drops::DropReason;
use crate::flow::key::FlowKey;
use crate::flow::table::FlowId;
use crate::port::{PortFeatures, PortId};
use crate::store::arena::Arena;
use crate::tcp::gates::OutQueue;
use crate::tcp::lead::AckMoments;
use crate::tcp::vm::Vm;
use crate::time::Instant;
use crate::wire::packet::{Eth, Ip, Tcp, TcpFlags, ipv4_header_ok, tcp_checksum_ok};
use crate::wire::virtio_net::VirtioNetHdr;
pub use absence::{PASSED_MAX, Passed};
pub(crate) use deliver::Delivery;

/// The state that a flow may touch besides its own.
pub(crate) struct FlowContext<'a, 'm> {
    pub(crate) now: Instant,
    pub(crate) id: FlowId,
    pub(crate) key: &'a FlowKey,
    pub(crate) arena: &'a mut Arena<'m>,
    pub(crate) vm: &'a mut Vm,
    /// The features of G's driver.
    pub(crate) features: &'a Option<PortFeatures>,
    pub(crate) out: &'a mut OutQueue,
    pub(crate) ack_list: &'a mut Vec<FlowId>,
    pub(crate) ack_moments: &'a mut AckMoments,
    pub(crate) ready_ports: &'a mut VecDeque<PortId>,
    /// The predicted path may be taken.
    pub(crate) predicts: bool,
}

impl FlowContext<'_, '_> {
    /// G's running clock (`vm`).
    #[inline]
    fn running(&self) -> Instant {
        self.vm.clock.now(self.now)
    }
}

/// A TCP frame under inspection: parsed once, edited in place.
pub(crate) struct Frame<'a> {
    pub(crate) bytes: &'a mut [u8],
    pub(crate) hdr: &'a VirtioNetHdr,
    pub(crate) eth: &'a Eth,
    pub(crate) ip: &'a Ip,
    pub(crate) tcp: &'a Tcp,
}

impl Frame<'_> {
    /// Everything before the IP header.
    #[inline]
    pub(crate) fn l2(&self) -> &[u8] {
        &self.bytes[..usize::from(self.eth.len)]
    }

    /// The TCP payload.
    #[inline]
    pub(crate) fn payload(&self) -> &[u8] {
        let from = self.tcp.payload_offset as usize;
        &self.bytes[from..from + self.tcp.payload_len as usize]
    }

    /// COM-13: a host-local producer vouches for it, or it is verified here. Nobody vouches for the
    /// IP header's own checksum, which G verifies first (INV-25).
    #[inline(always)]
    pub(crate) fn checksum_ok(&self) -> bool {
        ipv4_header_ok(self.bytes, self.ip)
            && (self.hdr.is_vouched_for() || tcp_checksum_ok(self.bytes, self.ip, self.tcp))
    }
}

/// The flags of every RST H makes.
pub(crate) const RST_ACK: TcpFlags = TcpFlags::RST.union(TcpFlags::ACK);

/// A distance inside one frame or flow buffer, far below what `usize` holds.
pub(crate) fn index(distance: u64) -> usize {
    usize::try_from(distance).unwrap_or(usize::MAX)
}

/// The end of a frame's event on a flow.
pub(crate) struct Ended {
    pub(crate) fate: Fate,
    /// The timing wheel must wake the flow then, or earlier; `Instant::MAX` if it knows.
    pub(crate) wake_at: Instant,
}

/// The fate of the frame itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fate {
    /// It goes on, as edited.
    Pass,
    /// Its content was taken over.
    Absorbed,
    /// It goes no further.
    Drop(DropReason),
}
