//! Ack offload: H is the TCP receiver for what R sends and a sender to G inside the host.
//!
//! Read first: `docs/spec.md`, RFC 9293 section 3.10.7.4, RFC 5961, RFC 7323.
//!
//! # Theory of operation
//!
//! **R to G.** A segment that G's kernel would accept ([`receive`]) is copied into the store, then
//! acknowledged to R ([`emit`], EMIT-R) with a window that H has reserved ([`window`]). The bytes
//! wait in the store and go to G inside G's own window ([`deliver`], EMIT-G) as the ring has room.
//! They leave the store only by G's cumulative ACK ([`guest`]). What G drops, H retransmits.
//!
//! **G to R.** G's pure ACKs are absorbed; its data passes EMIT-R, which writes H's
//! acknowledgement, window, timestamp echo and ECE over G's.
//!
//! **In and out.** [`handshake`] learns the options, [`lifecycle`] takes a flow on when all is
//! understood and lets it go when nothing is owed. Everything else is forwarded verbatim.
//!
//! # Invariants
//!
//! 1. INV-03: `ack_sent <= rcv_nxt`, and `[g_una, rcv_nxt)` is in the store. Order of writing:
//!    payload, commit record, ACK.
//! 2. INV-04: R's FIN is acknowledged only once G has acknowledged it.
//! 3. INV-05: `re` never moves left. INV-06: every byte below `re` has a reserved place.
//! 4. INV-13: fresh bytes for G end at or before `g_re`.
//! 5. A flow enters PASS only when it owes nobody anything.

pub(crate) mod deliver;
pub(crate) mod emit;
pub mod flow;
pub(crate) mod guest;
pub mod handshake;
pub(crate) mod lifecycle;
pub(crate) mod receive;
pub mod state;
pub mod stats;
pub(crate) mod timers;
pub(crate) mod unseen;
pub mod vm;
pub(crate) mod window;

use crate::drops::DropReason;
use crate::flow::key::FlowKey;
use crate::flow::table::FlowId;
use crate::port::PortFeatures;
use crate::store::arena::Arena;
use crate::tcp::emit::OutQueue;
use crate::tcp::vm::Vm;
use crate::time::Instant;
use crate::wire::packet::{Eth, Ip, Tcp, TcpFlags, ipv4_header_ok, tcp_checksum_ok};
use crate::wire::virtio_net::{F_DATA_VALID, VirtioNetHdr};

/// What a flow may touch besides itself.
pub(crate) struct Cx<'a, 'm> {
    pub(crate) now: Instant,
    pub(crate) id: FlowId,
    pub(crate) key: &'a FlowKey,
    pub(crate) arena: &'a mut Arena<'m>,
    pub(crate) vm: &'a mut Vm,
    pub(crate) features: PortFeatures,
    pub(crate) out: &'a mut OutQueue,
    pub(crate) ack_list: &'a mut Vec<FlowId>,
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
    pub(crate) fn l2(&self) -> &[u8] {
        &self.bytes[..usize::from(self.eth.len)]
    }

    /// The TCP payload.
    #[inline]
    pub(crate) fn payload(&self) -> &[u8] {
        let from = self.tcp.payload_offset as usize;
        &self.bytes[from..from + self.tcp.payload_len as usize]
    }

    /// COM-13: vouched for by a host-local producer, or verified here.
    /// The IP header's own nobody vouches for, and G looks at it first (INV-25).
    pub(crate) fn checksum_ok(&self) -> bool {
        let vouched_for = self.hdr.needs_csum() || self.hdr.flags & F_DATA_VALID != 0;
        ipv4_header_ok(self.bytes, self.ip)
            && (vouched_for || tcp_checksum_ok(self.bytes, self.ip, self.tcp))
    }
}

/// The flags of every RST H makes.
pub(crate) const RST_ACK: TcpFlags = TcpFlags::RST.union(TcpFlags::ACK);

/// A distance inside one frame or flow buffer, far below what `usize` holds.
pub(crate) fn index(distance: u64) -> usize {
    usize::try_from(distance).unwrap_or(usize::MAX)
}

/// What becomes of the frame itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fate {
    /// It goes on, as edited.
    Pass,
    /// Its content was taken over.
    Absorbed,
    /// It goes no further.
    Drop(DropReason),
}
