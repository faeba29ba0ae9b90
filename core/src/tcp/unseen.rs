//! Segments that G sends past H: as IP fragments, or by another NIC when its route changes
//! (SNOOP-42).
//!
//! R's ACKs are then above all that H saw. Without congestion offload G judges its own ACKs:
//!
//! 1. An ACK above the bytes that H saw G send is plausible up to the highest number that R's
//!    windows allowed G to send, if it is in an acceptable segment, or in a bare one from the place
//!    where R has gone back to repeat.
//! 2. A plausible ACK without data is forwarded to G, so that G's transmission does not stall. If
//!    the ACK is for bytes that G has not sent, G refuses it by an ACK with its SND.NXT (RFC 5961
//!    section 5.2), which H sees. Data in a segment with a plausible ACK is not taken: H's ACK
//!    makes R repeat its acknowledgement, if R takes the clock of that ACK for new enough
//!    (`tcp_disordered_ack_check` of Linux 6.18).
//! 3. H believes R after [`limits::AHEAD_ACKS`] such ACKs in a row (data behind the first counts),
//!    if R acknowledged no bytes that H did see in between, and G sent no ACK that denies them.
//!    After a fragment of G to R, H believes R at once. The flow drains for good, because R's
//!    timestamps and windows come from two sides now.
//!
//! While H sends for G, G judges nothing (FLOOD-08), because it may have handed over bytes that R
//! was not sent: they wait, or H has dropped them. An ACK for such bytes is not forwarded. It
//! counts if G has sent a fragment since H began, or if it arrives although H has repeated bytes
//! that R, by its own account, has. An ACK for bytes that G has not even handed over always counts.
//! If H believes it, H stops sending for G.
//!
//! The held bytes stay held. If G acknowledges them by the other path alone, the connection ends in
//! a reset of both sides (SNOOP-32), because H sees no sign that G has them. If R was acknowledged
//! none of them, the flow leaves the path instead.

use crate::drops::DropReason;
use crate::limits;
use crate::tcp::flow::{Flow, Why};
use crate::tcp::outbound::relayed::Relayed;
use crate::tcp::{Fate, FlowContext, Frame};
use crate::time::Instant;
use crate::wire::packet::{Tcp, TcpFlags};

impl Flow {
    /// A segment of R whose ACK is out of range; `bare`: it is only an ACK, with IP options or
    /// without. `None`: the ACK is in range now.
    pub(super) fn on_unseen(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
        bare: bool,
    ) -> Option<Fate> {
        if self.believes(cx, f.tcp, bare) {
            if !self.may_leave_unseen() {
                return None;
            }
            // Behind R's CWR no ACK of H echoes a mark any more (SNOOP-19).
            self.receiver.on_congestion_marks(f.tcp.flags.contains(TcpFlags::CWR), false);
            if bare {
                self.gate_unseen_to_guest(f);
            }
            self.leave(cx, self.standing.why());
            return Some(Fate::Pass);
        }
        // G would believe an ACK for bytes that it has sent and H has dropped.
        let shown = f.tcp.ack.unwrap(self.outbound.una()) <= self.losses.shown();
        if bare && self.outbound.is_plausible(f.tcp) && !self.keeps_bytes() && !shown {
            self.gate_unseen_to_guest(f);
            return Some(Fate::Pass);
        }
        self.challenge_ack(cx);
        Some(Fate::Drop(DropReason::BadAck))
    }

    /// Counts a plausible ACK above the bytes that H saw G send. `true`: it is believed.
    pub(super) fn believes(&mut self, cx: &mut FlowContext<'_, '_>, tcp: &Tcp, bare: bool) -> bool {
        // Bytes that G has sent H for R since then it may also have sent past H.
        let since = self.losses.relayed().map_or(Instant::ZERO, Relayed::since);
        let fragments = cx.vm.fragment_from_guest.is_some_and(|(at, remote)| {
            remote == cx.key.r_addr && cx.now.since(at) <= limits::T_FRAGMENT && at >= since
        });
        let ack = tcp.ack.unwrap(self.outbound.una());
        let kept = |f: &Relayed| ack <= f.accepted() && !f.repeats_in_vain();
        if !fragments && self.losses.relayed().is_some_and(kept) {
            return false;
        }
        let believed = self.outbound.on_unseen_ack(tcp, bare, fragments);
        if believed {
            self.hand_back(cx);
            self.drain(Why::Unseen);
        }
        believed
    }

    /// The flow drains because G has been silent here, or because R has heard of it elsewhere.
    pub(super) fn answers_elsewhere(&self) -> bool {
        matches!(self.standing.draining(), Some(Why::Asymmetric | Why::Unseen))
    }

    /// G sends past H and is owed nothing. It may never show here that it takes the room that H has
    /// shown R. G drops the excess, and R repeats it.
    pub(super) fn may_leave_unseen(&self) -> bool {
        let is_bound = self.receiver.is_translated(); // nobody else could translate
        self.outbound.sends_unseen() && self.holds_nothing() && !is_bound
    }
}
