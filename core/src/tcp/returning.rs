//! A connection that an absence of the daemon took out of the path comes back (COM-28).
//!
//! It passes, its options are known from its handshake, and no SYN has passed by, nor a FIN that H
//! or G has seen.
//!
//! 1. **Numbers.** Each segment that passes shows some. One of each end is enough, for all others
//!    were sent before; behind a copy of R there may be more, and G's word says so. G is believed;
//!    R is believed numbers that fit to G's. Segments that waited in the daemon's taps meanwhile
//!    are older than some that passed, and show nothing.
//! 2. **Into the path, late** ([`Why::PassedPlain`] in `Drain`). Of the bytes that G has not
//!    acknowledged H has no copy, so those of R that come from now on wait in the store behind
//!    them, and R hears nothing of them: it would take a SACK block for the loss of the others. If
//!    some were lost R repeats them, and they go through the store.
//! 3. **`On`**, once G has acknowledged all that was seen to pass.
//!
//! G may have got bytes that nobody saw. It says so by an acknowledgement of more than H gave it,
//! which is believed up to the edge that R was shown ([`Losses::past`]).
//!
//! [`Losses::past`]: crate::tcp::losses::Losses::past

use crate::tcp::absence::{PASSED_MAX, Passed};
use crate::tcp::flow::{Flow, Why};
use crate::tcp::from_net::needs_verbatim;
use crate::tcp::gates::CE;
use crate::tcp::state::Heard;
use crate::tcp::vm::Presence;
use crate::tcp::{Ended, Fate, FlowContext, Frame};
use crate::time::Instant;
use crate::wire::packet::{SackBlocks, Tcp, TcpFlags, Timestamps};

/// The connection ends or begins.
const ENDS: TcpFlags = TcpFlags::SYN.union(TcpFlags::FIN).union(TcpFlags::RST);

impl Flow {
    /// Frames passed the daemon by once more. Numbers that were heard before may be old.
    pub(super) fn stay_away(&mut self, passed: Passed) {
        match passed {
            Passed::Nothing => {}
            Passed::Segments if self.standing.heard().is_some() => {
                self.standing.set_heard(Some(Heard::default()));
            }
            Passed::Segments | Passed::Anything => self.standing.set_heard(None),
        }
    }

    /// A segment of R passes.
    pub(super) fn on_passing_from_net(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &Frame<'_>,
    ) -> Ended {
        if f.checksum_ok() && self.is_telling(cx, f) && self.learn_from_net(cx, f) {
            self.on_heard(cx, Heard { guest: false, net: true });
        }
        self.end_passing(cx)
    }

    /// A segment of G passes.
    pub(super) fn on_passing_from_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &Frame<'_>,
    ) -> Ended {
        if self.is_telling(cx, f) && self.learn_from_guest_passing(cx, f) {
            self.on_heard(cx, Heard { guest: true, net: false });
        }
        self.end_passing(cx)
    }

    fn end_passing(&mut self, cx: &mut FlowContext<'_, '_>) -> Ended {
        if self.is_live() {
            return self.end_frame(cx, Fate::Pass);
        }
        // It owes nothing and waits for nothing.
        Ended { fate: Fate::Pass, wake_at: Instant::MAX }
    }

    /// The segment may show numbers of a connection that may come back.
    fn is_telling(&mut self, cx: &FlowContext<'_, '_>, f: &Frame<'_>) -> bool {
        if self.standing.heard().is_none() {
            return false;
        }
        if f.tcp.flags.intersects(ENDS) {
            self.standing.set_heard(None);
            return false;
        }
        !cx.vm.catches_up
            && f.tcp.flags.contains(TcpFlags::ACK)
            && !needs_verbatim(f)
            && f.tcp.options.timestamps.is_some() == self.options.timestamps
    }

    /// `false`: its numbers are not those of the next segments, as far as G has shown them.
    fn learn_from_net(&mut self, cx: &FlowContext<'_, '_>, f: &Frame<'_>) -> bool {
        let Tcp { seq, ack, window, payload_len, .. } = *f.tcp;
        let (taken, timestamps) = (self.sender.una(), f.tcp.options.timestamps);
        let first = seq.unwrap(taken);
        let end = first + u64::from(payload_len);
        let acked = ack.unwrap(self.outbound.una());
        let is_next = (taken - 1..=self.receiver.edge()).contains(&end)
            && (self.outbound.una()..=self.outbound.sent()).contains(&acked);
        let is_current = |ts: Timestamps| self.timestamps.is_current(cx.now, ts.tsval, 0);
        if !(taken - 1..taken + PASSED_MAX).contains(&end) || !timestamps.is_none_or(is_current) {
            return false;
        }
        if self.options.ecn {
            let marked = f.ip.tos & CE == CE && payload_len > 0;
            self.receiver.on_congestion_marks(f.tcp.flags.contains(TcpFlags::CWR), marked);
        }
        // The number of a bare one may count a FIN that nobody has seen.
        self.receiver.on_passed(if payload_len > 0 { end } else { end - 1 });
        if !is_next {
            return false;
        }
        self.on_ack_from_net(first, ack, window, timestamps, &SackBlocks::default());
        self.template.learn_from_net(f.ip.tos, f.ip.ttl, f.ip.flow_label);
        if let Some(ts) = timestamps {
            self.timestamps.on_tsval_from_net(ts.tsval);
        }
        true
    }

    /// `false`: its numbers cannot be those of the connection.
    fn learn_from_guest_passing(&mut self, cx: &FlowContext<'_, '_>, f: &Frame<'_>) -> bool {
        let Tcp { seq, ack, window, payload_len, .. } = *f.tcp;
        let (taken, sent) = (self.sender.una(), self.outbound.sent());
        let (first, acked) = (seq.unwrap(sent), ack.unwrap(taken));
        let is_near = (sent - PASSED_MAX..sent + PASSED_MAX).contains(&first);
        if !is_near || !(taken..taken + PASSED_MAX).contains(&acked) {
            return false;
        }
        let edge = acked + (u64::from(window) << self.options.shift_g);
        self.sender.on_syn_ack(acked, edge);
        self.sender.on_established();
        self.receiver.on_passed(acked);
        self.receiver.on_edge_of_guest(edge);
        self.outbound.on_past(first + u64::from(payload_len));
        self.template.learn_from_guest(f.l2(), f.ip.tos, f.ip.ttl, f.ip.flow_label);
        if self.options.ecn && f.tcp.flags.contains(TcpFlags::ECE) {
            self.receiver.on_congestion_marks(false, true); // H echoes it from now on
        }
        if let Some(ts) = f.tcp.options.timestamps {
            self.timestamps.on_tsval_from_guest(cx.now, ts.tsval);
            if self.timestamps.is_current(cx.now, ts.tsecr, 0) {
                self.timestamps.on_recent(cx.now, ts.tsecr); // as R gets it
                self.timestamps.on_tsval_from_net(ts.tsecr); // G takes no older one
            }
        }
        true
    }

    /// On its way back: bytes that H saw pass are not acknowledged yet.
    pub(super) fn awaits_copies(&self) -> bool {
        self.standing.draining() == Some(Why::PassedPlain)
            && self.sender.una() < self.receiver.passed()
    }

    /// This end has shown its numbers. If both have, the flow comes back, as far as there is a
    /// place for it; else the next segment tries again.
    fn on_heard(&mut self, cx: &mut FlowContext<'_, '_>, by: Heard) {
        let before = self.standing.heard().unwrap_or_default();
        let heard = Heard { guest: before.guest || by.guest, net: before.net || by.net };
        self.standing.set_heard(Some(heard));
        let may = cx.vm.offload && !cx.vm.draining && cx.vm.presence == Presence::Here;
        let (una, passed, edge) = (self.sender.una(), self.receiver.passed(), self.receiver.edge());
        if !(heard.guest && heard.net && may && passed <= edge) {
            return;
        }
        self.receiver.on_syn_ack(una, edge, passed);
        if !self.take_place(cx) {
            return;
        }
        self.note_past();
        self.timestamps.on_taken_on(cx.now);
        self.standing.come_back();
    }
}
