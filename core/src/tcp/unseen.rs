//! What G sends past H: as IP fragments, or by another NIC when its route changes (SNOOP-42).
//!
//! R's ACKs are then above what H saw. Without congestion offload G judges its own ACKs:
//!
//! 1. An ACK above `w_nxt` is plausible as far as R's windows allowed G to send.
//! 2. A plausible ACK without data goes on to G, so that its transmission does not stall. G refuses
//!    one for what it has not sent by an ACK with its SND.NXT (RFC 5961 section 5.2), which H sees.
//!    Data that comes with a plausible ACK is not taken: H's ACK makes R say again what it has.
//! 3. After [`limits::AHEAD_ACKS`] of them in a row, with neither an ACK of R in between for what H
//!    did see, nor an ACK of G that denies them, H believes R. After a fragment of G to R, at once.
//!    The flow drains for good: R's timestamps and windows come from two sides now.
//!
//! The bytes held are held on: if G acknowledges them by the other path alone, they end in a reset
//! of both sides (SNOOP-32), for nothing shows H that G has them.

use crate::drops::DropReason;
use crate::limits;
use crate::tcp::flow::{Flow, Why};
use crate::tcp::{Cx, Fate, Frame};
use crate::wire::packet::{Tcp, TcpFlags};

impl Flow {
    /// An acceptable segment of R whose ACK is out of range; `bare`: nothing but an ACK. `None`: it
    /// is in range now.
    pub(crate) fn on_unseen(
        &mut self,
        cx: &mut Cx<'_, '_>,
        f: &mut Frame<'_>,
        bare: bool,
    ) -> Option<Fate> {
        if self.believes(cx, f.tcp, bare) {
            if !self.may_leave_unseen() {
                return None;
            }
            self.leave(cx, self.standing.why());
            return Some(Fate::Pass);
        }
        if bare && self.is_plausible(f.tcp) {
            self.gate_unseen_to_guest(f);
            return Some(Fate::Pass);
        }
        self.limited_ack(cx);
        Some(Fate::Drop(DropReason::BadAck))
    }

    /// Counts a plausible ACK above `w_nxt`. `true`: it is believed, and `w_nxt` is there.
    pub(crate) fn believes(&mut self, cx: &Cx<'_, '_>, tcp: &Tcp, bare: bool) -> bool {
        if !self.is_plausible(tcp) {
            return false;
        }
        let fragments = cx.vm.fragment_from_guest.is_some_and(|(at, remote)| {
            remote == cx.key.r_addr && cx.now.since(at) <= limits::T_FRAGMENT
        });
        if fragments {
            self.tx.ahead = limits::AHEAD_ACKS;
        } else if bare && self.tx.ahead < limits::AHEAD_ACKS {
            self.tx.ahead += 1;
        }
        if self.sends_unseen() {
            self.tx.w_nxt = tcp.ack.unwrap(self.tx.w_una);
            self.drain(Why::Asymmetric);
        }
        self.sends_unseen()
    }

    /// R or G have shown that nothing was sent past H.
    pub(crate) fn on_seen(&mut self) {
        if !self.sends_unseen() {
            self.tx.ahead = 0;
        }
    }

    /// H believes that G sends past it.
    pub(crate) fn sends_unseen(&self) -> bool {
        self.tx.ahead == limits::AHEAD_ACKS
    }

    /// G sends past H and is owed nothing. It may never show here that it takes what H has shown
    /// R: what is too much, G drops and R repeats.
    pub(crate) fn may_leave_unseen(&self) -> bool {
        self.sends_unseen() && self.owes_nothing() && self.ooo.is_empty()
    }

    /// A conforming G, shown what of these ACKs went on to it, may have sent this.
    fn is_plausible(&self, tcp: &Tcp) -> bool {
        let ack = tcp.ack.unwrap(self.tx.w_una);
        let shown = u64::from(self.tx.ahead % limits::AHEAD_ACKS);
        let windows = 1 + limits::AHEAD_WINDOWS * shown;
        let end = self.tx.w_una + u64::from(self.tx.r_window_max) * windows;
        tcp.flags.contains(TcpFlags::ACK)
            && !self.flags.fin_from_guest
            && (self.tx.w_nxt + 1..=end).contains(&ack)
    }
}
