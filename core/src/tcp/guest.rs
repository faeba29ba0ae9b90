//! Segments from G: its ACKs are input, its data passes EMIT-R.
//! SNOOP-24 to SNOOP-32.

use crate::limits;
use crate::tcp::flow::{Flow, Losses, NONE, Recovery, Why};
use crate::tcp::timers::FromGuest;
use crate::tcp::{Cx, Fate, Frame, RST_ACK};
use crate::time::Instant;
use crate::wire::packet::{Tcp, TcpFlags};

impl Flow {
    /// A segment from G while `On` or `Drain`; never a SYN.
    pub(crate) fn on_segment_from_guest(&mut self, cx: &mut Cx<'_, '_>, f: &mut Frame<'_>) -> Fate {
        let tcp = f.tcp;
        self.template.learn_from_guest(f.l2(), f.ip);
        if let Some(ts) = tcp.options.timestamps {
            self.note_tsval_from_guest(ts.tsval);
        }
        if tcp.flags.contains(TcpFlags::RST) {
            return self.on_rst_from_guest(cx, f);
        }
        if !tcp.flags.contains(TcpFlags::ACK) {
            return Fate::Drop(crate::drops::DropReason::BadFlags);
        }
        if !tcp.options.understood() || f.ip.options {
            self.drain(Why::Options);
        }
        let fin_acked_before = self.fin_acked_by_guest();
        self.flags.proven = true;
        self.on_ack_from_guest(cx, tcp);
        self.maybe_grow_buffer(cx); // before anything shows a window
        let seq = tcp.seq.unwrap(self.tx.w_nxt);
        let fin = tcp.flags.contains(TcpFlags::FIN);
        let fate = if tcp.payload_len > 0 || fin {
            let end = seq + u64::from(tcp.payload_len);
            if fin {
                self.flags.fin_from_guest = true;
            }
            self.tx.w_nxt = self.tx.w_nxt.max(end + u64::from(fin));
            let partial = f.hdr.needs_csum();
            self.gate_to_net(f.bytes, f.ip, tcp, partial);
            Fate::Pass
        } else {
            self.on_pure_ack_from_guest(cx, seq);
            Fate::Absorbed
        };
        if self.fin_acked_by_guest() && !fin_acked_before && fate == Fate::Absorbed {
            self.ack_now(cx, None); // SNOOP-25 (b)
        }
        self.maybe_window_update(cx);
        fate
    }

    /// SNOOP-25: absorbed, but for what R must hear.
    fn on_pure_ack_from_guest(&mut self, cx: &mut Cx<'_, '_>, seq: u64) {
        if seq < self.tx.w_una {
            // A keepalive or window probe of G: R has to answer it.
            let probe = self.tx.w_una - 1;
            self.emit_to_net(cx, probe, TcpFlags::ACK, None);
            return;
        }
        if seq <= self.tx.w_nxt {
            self.on_seen(); // G denies to have sent more: this is its SND.NXT
        }
        if self.flags.keepalive {
            self.flags.keepalive = false;
            self.ack_now(cx, None);
        }
        self.counters.absorbed_acks += 1;
        cx.vm.counters.acks_absorbed += 1;
    }

    /// G's cumulative ACK and window: releases the store, moves the delivery window.
    fn on_ack_from_guest(&mut self, cx: &mut Cx<'_, '_>, tcp: &Tcp) {
        let ack = tcp.ack.unwrap(self.rx.g_una);
        if ack < self.rx.g_una || ack > self.ack_limit_from_guest(cx) {
            return; // old, or an optimistic ACK: no state of ours moves (SNOOP-24, S-31)
        }
        let edge = ack + (u64::from(tcp.window) << self.opt.shift_g);
        let moved = edge != self.rx.g_re;
        self.rx.g_re = edge;
        if self.timers.is_probing() {
            // G answers: it is slow, not dead. Once it takes bytes again, all counts anew.
            self.stuck_since = Instant::MAX;
            if edge > self.rx.g_snd {
                self.timers.on_guest_progress();
            }
        }
        if ack > self.rx.g_una {
            self.advance_guest(cx, ack);
        } else if tcp.payload_len == 0 && !tcp.flags.contains(TcpFlags::FIN) {
            self.on_duplicate_ack(moved, ack);
        }
        self.on_sack_from_guest(cx, tcp);
        self.arm_guest_timer(cx, moved);
    }

    /// The highest ACK that can be true: what was delivered, or passed to G by other means.
    fn ack_limit_from_guest(&self, cx: &Cx<'_, '_>) -> u64 {
        let fragments = cx.vm.fragment_at.is_some_and(|at| cx.now.since(at) <= limits::T_FRAGMENT);
        let passed = if fragments { self.rx.re } else { self.rx.passed_max };
        self.rx.g_nxt.max(passed).min(self.rx.fin_seen.saturating_add(1))
    }

    fn advance_guest(&mut self, cx: &mut Cx<'_, '_>, ack: u64) {
        let bytes_end = ack.min(self.rx.fin_seen); // one more is R's FIN
        if bytes_end > self.rx.rcv_nxt {
            // Bytes that reached G past us (fragments, urgent data): they are acknowledged now.
            self.rx.rcv_nxt = bytes_end;
            self.rx.re = self.rx.re.max(bytes_end);
            self.pull_in_order();
            self.ack_due(cx);
        }
        let acked = ack - self.rx.g_una;
        self.rx.g_una = ack;
        self.rx.g_snd = self.rx.g_snd.max(ack);
        self.rx.g_nxt = self.rx.g_nxt.max(ack);
        if let Some(rec) = self.rec {
            cx.arena.commit_g_una(rec, bytes_end); // before its bytes go (LIFE-09)
        }
        self.store.release(cx.arena, bytes_end);
        self.dup_acks = 0;
        self.timers.on_guest_progress();
        self.stuck_since = if self.rx.g_una < self.delivery_end() {
            cx.vm.clock.now(cx.now)
        } else {
            Instant::MAX
        };
        self.timers.stop_waiting_for_guest();
        self.on_losses_acked(ack, acked);
    }

    /// G has acknowledged `acked` bytes more: recovery goes on, or is over.
    fn on_losses_acked(&mut self, ack: u64, acked: u64) {
        let Some(losses) = &mut self.losses else { return };
        let most = &mut losses.in_flight_max;
        *most = most.saturating_add(acked.min(*most));
        if ack.saturating_add(*most) >= self.rx.g_nxt {
            *most = u64::MAX; // all that was lost is under way again
        }
        let r = &mut losses.recovery;
        if r.end <= ack {
            *r = Recovery::default();
            self.forget_losses();
        } else if r.to <= ack {
            self.retransmit_first_hole(ack); // a partial ACK names the next hole (RFC 6582)
        } else {
            r.from = r.from.max(ack);
        }
    }

    /// Without losses there is nothing to remember of them.
    pub(crate) fn forget_losses(&mut self) {
        let over = |l: &Losses| {
            l.recovery.end <= self.rx.g_una && l.in_flight_max == u64::MAX && l.sack.is_empty()
        };
        if self.losses.as_deref().is_some_and(over) {
            self.losses = None;
        }
    }

    fn recovering(&self) -> bool {
        self.losses.as_ref().is_some_and(|l| l.recovery.end > self.rx.g_una)
    }

    /// Three duplicates mean a loss inside G (SNOOP-29).
    fn on_duplicate_ack(&mut self, window_moved: bool, ack: u64) {
        if window_moved || self.rx.g_snd <= self.rx.g_una || self.recovering() {
            return;
        }
        self.dup_acks = self.dup_acks.saturating_add(1);
        if self.dup_acks == 3 {
            let end = self.rx.g_snd;
            let losses = self.losses.get_or_insert_default();
            losses.recovery = Recovery { from: ack, to: ack, done: ack, end };
            self.retransmit_first_hole(ack);
        }
    }

    /// A SACK block above `g_una` is a hole: H delivers in order, so nothing was merely late.
    fn on_sack_from_guest(&mut self, _cx: &mut Cx<'_, '_>, tcp: &Tcp) {
        if !self.opt.sack {
            return;
        }
        let mut hole_end = NONE;
        let mut top = self.rx.g_una;
        for (from, to) in tcp.options.sack.as_slice() {
            let (from, to) = (from.unwrap(self.rx.g_una), to.unwrap(self.rx.g_una));
            if from > self.rx.g_una && from < to && to <= self.rx.g_nxt {
                hole_end = hole_end.min(from);
                top = top.max(to);
            }
        }
        if hole_end == NONE {
            return;
        }
        let una = self.rx.g_una;
        let r = &mut self.losses.get_or_insert_default().recovery;
        if r.end <= una {
            *r = Recovery { from: una, to: una, done: una, end: top };
        }
        let from = r.done.max(una);
        if from < hole_end && r.from >= r.to {
            r.from = from;
            r.to = hole_end.min(self.rx.g_snd);
            r.done = hole_end;
        }
    }

    fn retransmit_first_hole(&mut self, ack: u64) {
        let to = (ack + u64::from(self.opt.mss_to_guest)).min(self.rx.g_snd).min(self.rx.rcv_nxt);
        if let Some(r) = self.losses.as_mut().map(|l| &mut l.recovery) {
            r.from = ack.max(r.done);
            r.to = to;
            r.done = r.done.max(to);
        }
    }

    /// SNOOP-16: G's word is final. The RST R gets must be exact for R, not for G.
    fn on_rst_from_guest(&mut self, cx: &mut Cx<'_, '_>, _f: &mut Frame<'_>) -> Fate {
        let seq = self.tx.w_nxt;
        self.emit_to_net(cx, seq, RST_ACK, None);
        self.abort(cx, Why::Reset, false);
        Fate::Absorbed
    }

    fn maybe_window_update(&mut self, cx: &mut Cx<'_, '_>) {
        if self.window_update_due() {
            self.window_update(cx);
        }
    }

    /// An ACK whose point is its window (SNOOP-34); repeated once in case it is lost.
    pub(crate) fn window_update(&mut self, cx: &mut Cx<'_, '_>) {
        self.ack_now(cx, None);
        self.timers.repeat_window_update(cx.now);
    }

    /// The timer for what G owes us: retransmission while bytes are out, persist while its window
    /// is shut, T_rst behind a waiting RST. `restart`: G has just moved.
    pub(crate) fn arm_guest_timer(&mut self, cx: &Cx<'_, '_>, restart: bool) {
        let owed = self.rx.g_una < self.delivery_end();
        let running = cx.vm.clock.now(cx.now);
        if !owed {
            self.stuck_since = Instant::MAX;
        } else if self.stuck_since == Instant::MAX {
            self.stuck_since = running;
        }
        let what = if self.rx.g_snd > self.rx.g_una {
            FromGuest::Acknowledgement
        } else if owed && self.rx.g_re <= self.rx.g_snd {
            FromGuest::Window
        } else {
            FromGuest::Nothing
        };
        let behind_rst = self.flags.rst_pending && owed;
        let latest = if behind_rst { self.stuck_since + limits::T_RST } else { Instant::MAX };
        self.timers.wait_for_guest(what, running, restart, latest);
    }

    /// A closed flow leaves the path; a draining one leaves or goes back on once it is quiescent.
    #[inline]
    pub(crate) fn settle_drain(&mut self, cx: &mut Cx<'_, '_>) {
        // Neither closing nor draining: nearly every event.
        if self.flags.fin_from_guest || self.standing.draining().is_some() {
            self.leave_if_quiescent(cx);
        }
    }

    fn leave_if_quiescent(&mut self, cx: &mut Cx<'_, '_>) {
        let closed = self.fin_acked_by_guest() && self.fin_acked_by_net();
        if closed && self.quiescent() {
            self.leave(cx, Why::Closed);
        } else if let Some(why) = self.standing.draining() {
            let passed = self.rx.g_una >= self.rx.passed_max;
            let may_resume = self.standing.may_resume();
            if may_resume && self.owes_nothing() && passed {
                self.standing.resume();
                self.maybe_window_update(cx); // the edge stood still meanwhile
            } else if !may_resume && (self.quiescent() || self.may_leave_unseen()) {
                self.leave(cx, why);
            }
        }
    }
}
