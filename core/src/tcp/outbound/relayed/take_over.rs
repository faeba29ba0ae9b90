//! The bytes that G hands over: from its first segment on for which H sends, until the box goes.

use crate::congestion::SenderConfig;
use crate::congestion::controller::initial_window;
use crate::drops::DropReason;
use crate::tcp::flow::Flow;
use crate::tcp::from_net::needs_verbatim;
use crate::tcp::outbound::intake::{Handed, Intake};
use crate::tcp::outbound::relayed::Relayed;
use crate::tcp::receiver::Range;
use crate::tcp::{Fate, FlowContext, Frame};
use crate::wire::packet::TcpFlags;
use crate::wire::seq::Seq;

impl Flow {
    /// A segment of G with data or a FIN, if H sends for it. `None`: it leaves as it comes.
    pub(in crate::tcp) fn take_over(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &Frame<'_>,
        range: Range,
    ) -> Option<Fate> {
        if !cx.vm.congestion_offload && self.losses.relayed().is_none() {
            return None; // nearly always
        }
        self.settle_relayed(cx, needs_verbatim(f));
        if self.losses.relayed().is_none() && self.begin_relayed(cx, f, range).is_none() {
            self.note_uncontrolled(cx, range);
            return None;
        }
        if let Some(relayed) = self.losses.relayed_mut() {
            relayed.note_shown(range);
        }
        if needs_verbatim(f) {
            return Some(Fate::Drop(DropReason::Draining)); // its turn comes behind what is kept
        }
        if !f.checksum_ok() {
            return Some(Fate::Drop(DropReason::BadChecksum)); // H would make it a right one
        }
        let una = self.outbound.una();
        let is_old = range.end + u64::from(range.fin) <= una;
        let asks = is_old && !self.keeps_bytes();
        if asks && self.losses.relayed().is_some_and(|relayed| relayed.holds_ack) {
            self.hand_back(cx); // it is G that R's window keeps waiting
            return None;
        }
        if asks && range.len() <= 1 {
            return None; // a keepalive: R answers
        }
        self.try_longer_to_net(cx.now);
        let own = self.own_mss();
        let gso = f.hdr.is_gso().then_some(u64::from(f.hdr.gso_size));
        let longest = gso.unwrap_or(range.len());
        // Longer ones than G takes itself are G's decision (FLOOD-07).
        let most_to_net = u64::from(self.options.mss_to_net);
        let most = own.max(longest).min(most_to_net);
        let full = gso.map_or(most, |gso| gso.min(most));
        let relayed = self.losses.relayed_mut()?;
        if gso.is_some() || !relayed.is_trial(range, most_to_net) {
            relayed.longest = relayed.longest.max(longest.max(1));
            if gso.is_some() || longest > own {
                relayed.set_mss(full); // G may know of a narrow path
            }
        }
        let is_copy = range.end <= relayed.intake.accepted() && range.seq < range.end;
        cx.vm.counters.guest_copies += u64::from(is_copy);
        self.hand_over(cx, &Handed { range, payload: f.payload(), full })
    }

    /// A segment of G leaves as it comes. If nothing of G was under way, G may send all that it has
    /// behind this segment (FLOOD-28).
    fn note_uncontrolled(&self, cx: &mut FlowContext<'_, '_>, range: Range) {
        let sent = self.outbound.sent();
        let begins = self.outbound.una() == sent && range.end > sent;
        if begins && self.outbound.edge(self.options.shift_r) > sent {
            cx.vm.uncontrolled_at = Some(cx.now);
        } // else it is a copy, or a probe of R's window
    }

    /// G hands this over. `None`: H does not send for it.
    #[inline(always)]
    fn hand_over(&mut self, cx: &mut FlowContext<'_, '_>, handed: &Handed<'_>) -> Option<Fate> {
        let wanted = self.wants_relayed(cx);
        let relayed = self.losses.relayed_mut()?;
        let una = relayed.sender.una();
        let probes = relayed.intake.is_probe(handed.range, una, self.options.shift_r);
        let result = relayed.on_data(cx, handed);
        relayed.arm(cx, true);
        let owes_duplicate = relayed.owes_duplicate();
        let goes_on = wanted && relayed.may_go_on(cx.now, cx.vm, self.options.shift_r);
        // G does not know R's acknowledgement (FLOOD-04), H's window (FLOOD-15), or which bytes H
        // lacks.
        let is_old = handed.range.seq < self.outbound.una();
        let unknown = is_old || probes || result == Err(DropReason::OutOfWindow);
        self.outbound.note_ack_to_guest(unknown || owes_duplicate || goes_on);
        Some(result.map_or_else(Fate::Drop, |()| Fate::Absorbed))
    }

    /// If H sends for G, G's next segment has as many bytes as G itself takes, and begins at `seq`.
    #[inline]
    pub(in crate::tcp) fn expects_handed(
        &self,
        cx: &FlowContext<'_, '_>,
        seq: Seq,
        len: u64,
    ) -> bool {
        let own = self.own_mss();
        let is_known = |f: &Relayed| len <= f.longest && f.intake.expects(seq);
        cx.vm.congestion_offload && len <= own && self.losses.relayed().is_some_and(is_known)
    }

    /// [`Self::take_over`] for such a segment.
    #[inline]
    pub(in crate::tcp) fn take_expected(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        payload: &[u8],
    ) -> Option<Fate> {
        let (own, len) = (self.own_mss(), payload.len() as u64);
        let relayed = self.losses.relayed_mut()?;
        let seq = relayed.accepted();
        let range = Range { seq, end: seq + len, fin: false };
        relayed.shown = relayed.shown.max(range.end);
        self.hand_over(
            cx,
            &Handed { range, payload, full: own.min(self.options.mss_to_net.into()) },
        )
    }

    /// H sends for G from here on, if no bytes are under way of which H has no copy (COM-28,
    /// mirrored), G goes on behind them, and there is a place.
    fn begin_relayed(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &Frame<'_>,
        r: Range,
    ) -> Option<()> {
        let sent = self.outbound.sent();
        let may = self.wants_relayed(cx)
            && self.outbound.una() == sent
            && r.seq == sent
            && r.len() > 0
            && !self.outbound.fin_sent()
            && !self.receiver.reset_waits()
            && !needs_verbatim(f);
        let shift = self.options.shift_r;
        let edge = self.outbound.edge(shift);
        let shown = (self.losses.promised(), self.losses.used());
        let intake = may.then(|| Intake::new(cx.vm, sent, edge, shift, shown))?;
        if intake.is_none() && edge > sent {
            cx.vm.counters.floods_refused += 1;
        }
        let intake = intake?;
        self.try_longer_to_net(cx.now);
        let before = self.losses.take_before();
        let ceiling = before.as_ref().map_or(u64::MAX, |before| before.ceiling);
        let mss = self.own_mss().min(ceiling);
        // Only the first sender uses the number of SYN copies.
        let syn_copies = if before.is_none() { self.outbound.syn_copies() } else { 0 };
        let config = SenderConfig {
            algorithm: cx.vm.congestion_control,
            mss,
            initial_window: initial_window(mss, syn_copies > 1),
            sack: self.options.sack,
            ecn: self.options.ecn,
        };
        let mut relayed = Relayed::new(cx, intake, edge, &config);
        relayed.shown = relayed.shown.max(self.losses.unsent());
        if syn_copies > 0 {
            relayed.sender.on_syn_timeout();
        }
        if let Some(before) = before {
            relayed.resume(*before);
        }
        if f.tcp.flags.contains(TcpFlags::CWR) {
            relayed.sender.owe_cwr(); // G has reduced its window, and R waits for this
        }
        if self.outbound.has_sent() {
            relayed.sender.on_earlier_sender();
        }
        relayed.on_net_edge(sent, edge, self.outbound.window_max(), shift);
        self.losses.begin_relayed(relayed);
        self.outbound.on_segment_from_net(TcpFlags::ACK); // R's marks are for H from here on
        Some(())
    }
}
