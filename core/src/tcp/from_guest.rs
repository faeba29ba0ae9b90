//! Segments from G: its ACKs are input, its data passes EMIT-R (SNOOP-16, SNOOP-24, SNOOP-25).

use crate::drops::DropReason;
use crate::limits;
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::receiver::Range;
use crate::tcp::sender::GuestAck;
use crate::tcp::{Ended, Fate, FlowContext, Frame};
use crate::wire::packet::{SackBlocks, Tcp, TcpFlags};

impl Flow {
    /// A frame of G that is not a SYN, in whatever state the flow is.
    #[inline(never)]
    pub(crate) fn on_frame_from_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
    ) -> Ended {
        self.timers.on_seen(cx.now);
        if self.receiver.is_translated() {
            return self.on_frame_from_guest_translated(cx, f);
        }
        let fate = match self.state() {
            State::On | State::Drain => self.on_segment_from_guest(cx, f),
            State::Handshake => self.on_handshake_from_guest(cx, f),
            State::Pass => return self.on_passing_from_guest(cx, f),
            State::Abort => self.on_segment_in_abort(cx, true, f.tcp),
            State::Opening | State::Translated => Fate::Absorbed, // those are translated
        };
        self.end_frame(cx, fate)
    }

    /// A segment from G while `On` or `Drain`; never a SYN.
    pub(super) fn on_segment_from_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
    ) -> Fate {
        let tcp = f.tcp;
        if tcp.payload_len > 0 {
            self.note_ttl_of_data(cx, f.ip.ttl);
        }
        self.template.learn_from_guest(f.l2(), f.ip.tos, f.ip.ttl, f.ip.flow_label);
        if let Some(ts) = tcp.options.timestamps {
            if self.timestamps.is_guest_outdated(cx.now) {
                self.owe_ack(cx); // see `ack_now`
            }
            self.timestamps.on_tsval_from_guest(cx.now, ts.tsval);
        }
        if tcp.flags.contains(TcpFlags::RST) {
            return self.on_rst_from_guest(cx);
        }
        if !tcp.flags.contains(TcpFlags::ACK) {
            return Fate::Drop(DropReason::BadFlags);
        }
        if !tcp.options.understood() || f.ip.options {
            self.drain(Why::Options);
        }
        if self.receiver.is_asking()
            && let Some(fate) = self.on_guest_asked(cx, f)
        {
            return fate;
        }
        let fin_acked_before = self.fin_acked_by_guest();
        let told = (self.receiver.acks.sent(), self.receiver.edge());
        if !self.sender.is_established() && cx.vm.accepting.is_some() {
            self.note_completed(cx, f.l2());
        }
        self.sender.on_established();
        self.on_ack_from_guest(cx, tcp);
        self.grow_buffer(cx); // before anything shows a window
        let seq = tcp.seq.unwrap(self.outbound.sent());
        let fin = tcp.flags.contains(TcpFlags::FIN);
        let fate = if tcp.payload_len > 0 || fin {
            let range = Range { seq, end: seq + u64::from(tcp.payload_len), fin };
            self.take_over(cx, f, range).unwrap_or_else(|| self.pass_on(f, range))
        } else {
            if self.losses.past() > 0 {
                self.believe(tcp.seq);
            }
            self.on_pure_ack_from_guest(cx, seq);
            Fate::Absorbed
        };
        if self.fin_acked_by_guest() && !fin_acked_before && fate != Fate::Pass {
            self.ack_now(cx, None); // SNOOP-25 (b)
        }
        if self.receiver.is_late() && !self.receiver.reset_waits() {
            self.acknowledge_early(cx); // if it was late only for what G has now
        }
        self.relay_room(cx);
        let is_told =
            fate == Fate::Pass || told != (self.receiver.acks.sent(), self.receiver.edge());
        if self.receiver.take_anew() && !is_told {
            self.ack_now(cx, None); // the last one was perhaps lost with the process
        }
        fate
    }

    /// R gets to know of G's room, as far as it is to.
    #[inline(always)]
    pub(super) fn relay_room(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.receiver.is_late() {
            self.relay_ack(cx);
        } else {
            self.maybe_window_update(cx);
        }
    }

    /// LIFE-13: R gets to know that G acknowledges more, or shows more room.
    #[cold]
    #[inline(never)]
    fn relay_ack(&mut self, cx: &mut FlowContext<'_, '_>) {
        let una = self.sender.una();
        if self.losses.sacked_end() > 0 {
            self.losses.forget_sacked_below(una);
            self.losses.forget(una);
        }
        let more = self.ack_to_net() > self.receiver.acks.sent();
        if more || self.receiver.has_new_edge(&self.terms()) {
            self.ack_now(cx, None);
            if !more {
                self.timers.repeat_window_update(cx.now); // if it acknowledges early by then
            }
        }
    }

    /// A segment of G with data or a FIN that leaves as it comes.
    #[inline(always)]
    pub(super) fn pass_on(&mut self, f: &mut Frame<'_>, range: Range) -> Fate {
        let end = range.end + u64::from(range.fin);
        if self.has_no_room_for(range.seq, end) {
            self.on_no_room(end);
            return Fate::Drop(DropReason::OutOfWindow);
        }
        if self.losses.any() {
            self.on_passed_on(range.seq == self.outbound.una());
        }
        if range.end <= self.outbound.una() {
            self.timers.on_guest_asks();
        }
        self.outbound.on_sent(range.end, range.fin);
        if self.losses.any() {
            self.losses.on_sent(self.outbound.sent(), self.sender.una());
        }
        let partial = f.hdr.needs_csum();
        self.gate_to_net(f.bytes, f.ip, f.tcp, partial, end);
        Fate::Pass
    }

    /// SNOOP-25: absorbed. R gets an ACK only for a probe of G, or for the answer to its own.
    fn on_pure_ack_from_guest(&mut self, cx: &mut FlowContext<'_, '_>, seq: u64) {
        if seq < self.outbound.una() && self.keeps_bytes() {
            // It missed an ACK, or its window is shut: H shows it the present state (FLOOD-15).
            self.outbound.note_ack_to_guest(true);
        } else if seq < self.outbound.una() {
            // A keepalive or window probe of G: R has to answer it.
            self.timers.on_guest_asks();
            let probe = self.outbound.una() - 1;
            self.emit_to_net(cx, probe, TcpFlags::ACK, None);
            return;
        }
        if seq <= self.outbound.sent() {
            self.outbound.on_seen(); // G denies to have sent more: this is its SND.NXT
        }
        if self.receiver.on_answer() {
            self.ack_now(cx, None);
        }
        self.outbound.on_absorbed();
        cx.vm.counters.acks_absorbed += 1;
    }

    /// G's cumulative ACK and window: releases the store, moves the delivery window.
    fn on_ack_from_guest(&mut self, cx: &mut FlowContext<'_, '_>, tcp: &Tcp) {
        let una = self.sender.una();
        let ack = tcp.ack.unwrap(una);
        if ack < una || ack > self.ack_limit_from_guest(cx) {
            return; // old, or an optimistic ACK: no state of ours moves (SNOOP-24, S-31)
        }
        if self.receiver.is_doubted() {
            self.end_doubt();
        }
        let pure = tcp.payload_len == 0 && !tcp.flags.contains(TcpFlags::FIN);
        let sack = Some(&tcp.options.sack).filter(|sack| self.options.sack && !sack.is_empty());
        self.take_ack_from_guest(cx, ack, tcp.window, pure, sack);
    }

    /// An acknowledgement that can be true. `pure`: it came without data and without a FIN; `sack`:
    /// if SACK was negotiated, and there are blocks.
    #[inline(always)]
    pub(super) fn take_ack_from_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        ack: u64,
        window: u16,
        pure: bool,
        sack: Option<&SackBlocks>,
    ) {
        let una = self.sender.una();
        let bytes_end = ack.min(self.receiver.fin()); // one more is R's FIN
        if ack > una && self.receiver.on_taken_by_guest(bytes_end) && !self.receiver.is_late() {
            self.owe_ack(cx);
        }
        let edge = ack + (u64::from(window) << self.options.shift_g);
        let said = GuestAck { ack, edge, pure, sack };
        let (sender, mut sending) = self.sending(cx);
        sender.on_ack(&said, &mut sending);
        if self.losses.any() {
            self.try_longer_segments(cx.now);
            self.try_longer_to_net(cx.now);
        }
        if bytes_end > una {
            cx.ack_moments.on_ack_from_guest(&mut cx.vm.leads, cx.now, cx.id, bytes_end);
        }
        if ack > una {
            if let Some(rec) = self.receiver.record() {
                cx.arena.commit_guest_una(rec, bytes_end); // before its bytes go (LIFE-09)
            }
            self.store.release(cx.arena, bytes_end);
            if self.receiver.is_lent() {
                self.return_lent(cx);
            }
        }
    }

    /// The highest ACK that can be true: the end of the bytes that were delivered, or passed to G
    /// by other means.
    #[inline]
    pub(super) fn ack_limit_from_guest(&self, cx: &FlowContext<'_, '_>) -> u64 {
        let fragments = cx.vm.fragment_at.is_some_and(|at| cx.now.since(at) <= limits::T_FRAGMENT);
        let passed = if fragments { self.receiver.edge() } else { self.receiver.passed() };
        let passed = passed.max(self.losses.past());
        self.sender.sent().max(passed).min(self.receiver.fin().saturating_add(1))
    }

    /// SNOOP-16: G's word is final. The RST R gets must be exact for R, not for G.
    fn on_rst_from_guest(&mut self, cx: &mut FlowContext<'_, '_>) -> Fate {
        self.reset_to_net(cx);
        self.abort(cx, Why::Reset, false);
        Fate::Absorbed
    }

    /// An ACK whose point is its window (SNOOP-34); repeated once in case it is lost.
    #[inline(always)]
    pub(super) fn maybe_window_update(&mut self, cx: &mut FlowContext<'_, '_>) {
        // Of a flow that has just begun to acknowledge late the number is not exact; R is told once
        // more then.
        if self.receiver.window_update_due(&self.terms_for(self.early_ack())) {
            self.ack_now(cx, None);
            self.timers.repeat_window_update(cx.now);
        }
    }
}
