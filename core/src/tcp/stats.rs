//! The state of a flow as the operator, the simulator's judges and tests see it.

use crate::tcp::flow::Flow;
use crate::tcp::outbound::relayed::Relayed;
use crate::tcp::vm::Vm;
use crate::time::{Duration, Instant};
use crate::wire::seq::Seq;

/// A flow's numbers at one moment. Sequence numbers are unwrapped (COM-01) and named as in the
/// drawings of `docs/spec.md`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FlowStats {
    /// Next in-order byte expected from R.
    pub rcv_nxt: u64,
    /// Highest acknowledgement sent to R.
    pub acked_to_net: u64,
    /// Highest right edge ever shown to R.
    pub edge_to_net: u64,
    /// Sequence of R's FIN once seen in window.
    pub fin_from_net: Option<u64>,
    /// Bytes H may hold and promise for this flow at once.
    pub buffer_bytes: u32,
    /// Store pages reserved, for R's bytes and G's.
    pub reserved_pages: u32,
    /// Of these, for bytes of G that R has not acknowledged.
    pub kept_pages: u32,
    /// H sends for G.
    pub relayed: Option<RelayedStats>,
    /// The flow's promises are in a record of the arena.
    pub has_record: bool,
    /// R's RST waits behind the bytes that are held.
    pub reset_waits: bool,
    /// Highest valid acknowledgement of G.
    pub guest_una: u64,
    /// End of the bytes given to G at least once, FIN included.
    pub guest_nxt: u64,
    /// Newest right edge of G.
    pub guest_edge: u64,
    /// Something is being handed to G again, or R misses bytes of G.
    pub has_losses: bool,
    /// G opened the connection.
    pub guest_is_client: bool,
    /// G has sent a segment that is not a SYN.
    pub guest_is_established: bool,
    /// G's initial sequence number.
    pub guest_isn: Seq,
    /// Highest acknowledgement of R.
    pub net_una: u64,
    /// End of the bytes sent to R, FIN included.
    pub net_nxt: u64,
    /// ACKs of R in a row for bytes that H did not see G send.
    pub unseen_acks: u8,
    /// R's TSval that H echoes.
    pub ts_recent: u32,
    /// Payload bytes acknowledged to R ahead of G.
    pub early_acked_bytes: u64,
    /// Local timeouts, and frames handed to G again.
    pub local_retransmissions: u32,
    /// Pure ACKs of G that went no further.
    pub absorbed_acks: u32,
    /// Second in which a frame of the flow was last seen.
    pub seen_at_s: u32,
}

/// How H sends for the guest of one flow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RelayedStats {
    /// Bytes that G has handed over and R has not acknowledged, FIN included.
    pub kept_bytes: u64,
    /// Of these, the bytes that were not sent yet.
    pub unsent_bytes: u64,
    /// Bytes that are under way to R, as far as is known.
    pub in_flight_bytes: u64,
    /// Bytes that may be under way.
    pub cwnd_bytes: u64,
    /// Slow start ends at this window; `u64::MAX` before the first loss.
    pub ssthresh_bytes: u64,
    /// The smoothed round trip between H and R; none before the first.
    pub srtt: Option<Duration>,
    /// Payload bytes of a segment.
    pub mss: u64,
    /// Frames that were sent again since H began to send.
    pub retransmissions: u64,
    /// Timeouts since the last segment of R.
    pub timeouts_in_a_row: u8,
}

/// A G that has yet to acknowledge bytes that R was acknowledged.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Debt {
    /// For how long it has acknowledged none of them, in running time.
    pub age: Duration,
    /// Its window is shut: its application does not read.
    pub is_unread: bool,
}

impl Flow {
    /// `None`: R was acknowledged no byte that G has not acknowledged, or the flow is out of the
    /// path.
    #[must_use]
    pub fn debt(&self, now: Instant, vm: &Vm) -> Option<Debt> {
        let una = self.sender.una();
        (self.is_live() && una < self.promised()).then(|| Debt {
            age: self.sender.stuck_for(vm.clock.now(now)),
            is_unread: self.sender.edge() <= una,
        })
    }

    /// The flow's numbers now.
    #[must_use]
    pub fn stats(&self) -> FlowStats {
        let (receiver, sender, outbound) = (&self.receiver, &self.sender, &self.outbound);
        let kept_pages = self.losses.relayed().map_or(0, Relayed::reserved_pages);
        FlowStats {
            rcv_nxt: receiver.next(),
            acked_to_net: receiver.acks.sent(),
            edge_to_net: receiver.edge(),
            fin_from_net: receiver.has_fin().then_some(receiver.fin()),
            buffer_bytes: receiver.buffer_bytes(),
            reserved_pages: receiver.reserved_pages() + kept_pages,
            kept_pages,
            relayed: self.losses.relayed().map(Relayed::stats),
            has_record: receiver.record().is_some(),
            reset_waits: receiver.reset_waits(),
            guest_una: sender.una(),
            guest_nxt: sender.sent(),
            guest_edge: sender.edge(),
            has_losses: self.losses.any(),
            guest_is_client: outbound.guest_is_client(),
            guest_is_established: sender.is_established(),
            guest_isn: outbound.isn(),
            net_una: outbound.una(),
            net_nxt: outbound.sent(),
            unseen_acks: outbound.unseen_acks(),
            ts_recent: self.timestamps.recent(),
            early_acked_bytes: receiver.early_acked_bytes(),
            local_retransmissions: sender.retransmissions(),
            absorbed_acks: outbound.absorbed_acks(),
            seen_at_s: self.timers.seen_at_s(),
        }
    }
}
