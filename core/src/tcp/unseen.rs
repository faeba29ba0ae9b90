//! What G sends past H: as IP fragments, or by another NIC when its route changes (SNOOP-42).
//!
//! R's ACKs are then above what H saw. Without congestion offload G judges its own ACKs:
//!
//! 1. An ACK above what H saw G send is plausible as far as R's windows allowed G to send, in an
//!    acceptable segment, or in a bare one from where R has gone back to repeat.
//! 2. A plausible ACK without data goes on to G, so that its transmission does not stall. G refuses
//!    one for what it has not sent by an ACK with its SND.NXT (RFC 5961 section 5.2), which H sees.
//!    Data that comes with a plausible ACK is not taken: H's ACK makes R say again what it has, if
//!    R takes its clock for new enough (`tcp_disordered_ack_check` of Linux 6.18).
//! 3. After [`limits::AHEAD_ACKS`] of them in a row, data behind the first counted, with neither an
//!    ACK of R in between for what H did see, nor an ACK of G that denies them, H believes R. After
//!    a fragment of G to R, at once. The flow drains for good: R's timestamps and windows come from
//!    two sides now.
//!
//! While H sends for G, G judges nothing (FLOOD-08): it may have handed over what R was not sent,
//! because it waits, or because H has dropped it. An ACK for that goes no further. It counts if G
//! has sent a fragment since H began, or if it comes although H has repeated what R, by its own
//! account, has; and one for what G has not even handed over counts always. Believed, it ends what
//! H sends for G.
//!
//! The bytes held are held on: if G acknowledges them by the other path alone, they end in a reset
//! of both sides (SNOOP-32), for nothing shows H that G has them.

use crate::drops::DropReason;
use crate::limits;
use crate::tcp::flow::{Flow, Why};
use crate::tcp::outbound::flooded::Flooded;
use crate::tcp::{Fate, FlowContext, Frame};
use crate::time::Instant;
use crate::wire::packet::{Tcp, TcpFlags};

impl Flow {
    /// A segment of R whose ACK is out of range; `bare`: nothing but an ACK, with IP options or
    /// without. `None`: it is in range now.
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
        // Of what G has sent, and H has dropped, G would believe it.
        let shown = f.tcp.ack.unwrap(self.outbound.una()) <= self.losses.shown();
        if bare && self.outbound.is_plausible(f.tcp) && !self.keeps_bytes() && !shown {
            self.gate_unseen_to_guest(f);
            return Some(Fate::Pass);
        }
        self.challenge_ack(cx);
        Some(Fate::Drop(DropReason::BadAck))
    }

    /// Counts a plausible ACK above what H saw G send. `true`: it is believed.
    pub(super) fn believes(&mut self, cx: &mut FlowContext<'_, '_>, tcp: &Tcp, bare: bool) -> bool {
        // What G has sent H for R since then it may have sent past H besides.
        let since = self.losses.flooded().map_or(Instant::ZERO, Flooded::since);
        let fragments = cx.vm.fragment_from_guest.is_some_and(|(at, remote)| {
            remote == cx.key.r_addr && cx.now.since(at) <= limits::T_FRAGMENT && at >= since
        });
        let ack = tcp.ack.unwrap(self.outbound.una());
        let kept = |f: &Flooded| ack <= f.accepted() && !f.repeats_in_vain();
        if !fragments && self.losses.flooded().is_some_and(kept) {
            return false;
        }
        let believed = self.outbound.on_unseen_ack(tcp, bare, fragments);
        if believed {
            self.hand_back(cx);
            self.drain(Why::Asymmetric);
        }
        believed
    }

    /// G sends past H and is owed nothing. It may never show here that it takes what H has shown
    /// R: what is too much, G drops and R repeats.
    pub(super) fn may_leave_unseen(&self) -> bool {
        self.outbound.sends_unseen() && self.holds_nothing()
    }
}
