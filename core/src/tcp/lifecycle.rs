//! Entering and leaving the offload: go-ON, leave, abort, park.

use crate::limits;
use crate::store::record::{FLAG_ECN, FLAG_SACK, FLAG_TS, L2Header, Progress, RecordInit};
use crate::tcp::flow::{Flow, Recovery, State, Why};
use crate::tcp::handshake::Offers;
use crate::tcp::timers::Timer;
use crate::tcp::{Cx, RST_ACK};
use crate::time::Instant;
use crate::wire::packet::Tcp;

impl Flow {
    /// The third ACK was seen: take the flow on if everything it needs is there (COM-28).
    pub(crate) fn go_on(&mut self, cx: &mut Cx<'_, '_>) {
        let Some(offers) = self.standing.offers().copied() else { return };
        match offers.negotiate(self.flags.guest_is_client, cx.key.version, cx.vm.mtu) {
            Ok(opt) => self.opt = opt,
            Err(why) => return self.pass(cx.now, why),
        }
        if !cx.vm.offload || cx.vm.draining {
            return self.pass(cx.now, Why::Operator);
        }
        if cx.vm.refuses(cx.now, cx.key.r_addr, cx.key.g_port) {
            return self.pass(cx.now, Why::GuestRefuses);
        }
        if !self.take_place(cx) {
            cx.vm.counters.flows_refused += 1;
            return self.pass(cx.now, Why::NoBudget);
        }
        self.ts.recent_at_s = cx.now.second();
        self.standing.take_on();
        cx.vm.counters.flows_offloaded += 1;
    }

    /// R's third ACK, or its first data, seen in `Handshake`: learns from it what R shows.
    pub(crate) fn learn_third_ack_from_net(&mut self, tcp: &Tcp) {
        let Some((_, shift_r)) = self.standing.offers().map(Offers::shifts) else { return };
        let window = u32::from(tcp.window) << shift_r;
        self.tx.w_una = self.tx.w_nxt;
        self.tx.r_window = tcp.window;
        self.tx.r_window_max = window;
        self.tx.r_window_seq = tcp.seq;
        if let Some(ts) = tcp.options.timestamps {
            self.ts.recent = ts.tsval;
            self.ts.emit_g = ts.tsval;
            self.ts.ecr_to_guest = ts.tsecr;
        }
    }

    /// G's third ACK seen in `Handshake`: learns the edge G shows.
    pub(crate) fn learn_third_ack_from_guest(&mut self, tcp: &Tcp) {
        let Some((shift_g, _)) = self.standing.offers().map(Offers::shifts) else { return };
        let edge = self.rx.rcv_nxt + (u64::from(tcp.window) << shift_g);
        self.rx.re = edge;
        self.rx.g_re = edge;
        self.flags.proven = true;
        if let Some(ts) = tcp.options.timestamps {
            self.ts.emit_r = ts.tsval;
        }
    }

    pub(crate) fn take_record(&mut self, cx: &mut Cx<'_, '_>) -> bool {
        let bit = |on: bool, flag: u8| if on { flag } else { 0 };
        let Some(l2) = L2Header::new(self.template.l2_to_net()) else { return false };
        let init = RecordInit {
            name_hash: cx.vm.name_hash,
            key: *cx.key,
            l2,
            ttl: self.template.ttl_to_net,
            ttl_to_g: self.template.ttl_to_guest,
            flags: bit(self.opt.timestamps, FLAG_TS)
                | bit(self.opt.sack, FLAG_SACK)
                | bit(self.opt.ecn, FLAG_ECN),
            s_g: self.opt.shift_g,
            s_r: self.opt.shift_r,
            mss_to_g: self.opt.mss_to_guest,
            mss_to_r: self.opt.mss_to_net,
            rcv_nxt: self.rx.rcv_nxt,
            g_una: self.rx.g_una,
            g_nxt: self.rx.g_nxt,
            h_re: self.rx.re,
            w_nxt: self.tx.w_nxt,
            ts_emit_r: self.ts.emit_r,
            ts_emit_g: self.ts.emit_g,
        };
        self.rec = cx.arena.alloc_record(&init);
        self.rec.is_some()
    }

    /// Store, record and reservation go back.
    pub(crate) fn give_back(&mut self, cx: &mut Cx<'_, '_>) {
        self.release(cx);
        if let Some(rec) = self.rec.take() {
            cx.arena.free_record(rec);
        }
    }

    /// Store and reservation go back; the record stays.
    fn release(&mut self, cx: &mut Cx<'_, '_>) {
        self.store.clear(cx.arena);
        self.ooo = Default::default();
        self.losses = None;
        cx.vm.unreserve(u64::from(self.rx.reserved_pages));
        self.rx.reserved_pages = 0;
        self.rx.buffer_bytes = 0;
    }

    /// Out of the path, owing nothing. If G shows R more than H did, R hears of it once more; and
    /// if G sent past H, for then R may have taken H's last ACKs for old ones (PAWS).
    pub(crate) fn leave(&mut self, cx: &mut Cx<'_, '_>, why: Why) {
        let quiescent = self.quiescent() || self.may_leave_unseen();
        debug_assert!(quiescent, "left the path with promises open");
        if self.sends_unseen() || (why != Why::Closed && self.rx.g_re > self.rx.re) {
            self.rx.re = self.rx.re.max(self.rx.g_re);
            self.ack_now(cx, None);
        }
        self.step_aside(cx, why);
    }

    /// Gives everything back and passes from here on.
    fn step_aside(&mut self, cx: &mut Cx<'_, '_>, why: Why) {
        self.flags.ece = false;
        self.flags.probe_due = false;
        self.give_back(cx);
        self.timers.stop();
        self.pass(cx.now, why);
    }

    /// Promises end here; the caller has made or queued the RSTs. The entry answers challenge ACKs,
    /// and its record stays as long: if the process ends before an RST left, the next one sends it.
    /// `tell_guest`: an RST to G is due.
    pub(crate) fn abort(&mut self, cx: &mut Cx<'_, '_>, why: Why, tell_guest: bool) {
        self.release(cx);
        self.standing.abort(why, tell_guest);
        self.flags.rst_pending = false;
        self.flags.ack_to_guest_due = false;
        self.flags.probe_due = false;
        self.flags.ack_due = false;
        self.timers.stop();
        self.timers.on_seen(cx.now);
    }

    /// INV-21: what cannot be kept is reset on both sides.
    pub(crate) fn abort_both(&mut self, cx: &mut Cx<'_, '_>, why: Why) {
        let seq = self.tx.w_nxt;
        self.emit_to_net(cx, seq, RST_ACK, None);
        cx.vm.counters.flows_aborted += 1;
        self.abort(cx, why, true);
    }

    /// A predecessor acknowledged bytes that are no longer kept: both sides hear of it (LIFE-09).
    pub(crate) fn reset_after_restart(&mut self, cx: &mut Cx<'_, '_>) {
        let seq = self.tx.w_nxt;
        self.emit_to_net(cx, seq, RST_ACK, None);
        cx.vm.counters.flows_aborted += 1;
        self.standing.abort(Why::Restart, true);
    }

    /// G has opened a new connection under this key: bytes that it did not take are gone, and R,
    /// which believes them delivered, hears of it (INV-21, SNOOP-17). The entry goes.
    pub(crate) fn on_forgotten_by_guest(&mut self, cx: &mut Cx<'_, '_>) {
        if self.standing.is_live() && self.held_bytes() > 0 && !self.flags.rst_pending {
            let seq = self.tx.w_nxt;
            self.emit_to_net(cx, seq, RST_ACK, None);
            cx.vm.counters.flows_aborted += 1;
        }
    }

    /// LIFE-05: there is no G any more. A connection that was drained and owes nothing may go on
    /// elsewhere (LIFE-06), so R is not told.
    pub(crate) fn on_guest_gone(&mut self, cx: &mut Cx<'_, '_>) {
        if self.standing.draining().is_some() && self.owes_nothing() {
            self.step_aside(cx, Why::GuestGone);
        } else if self.standing.is_live() {
            let seq = self.tx.w_nxt;
            self.emit_to_net(cx, seq, RST_ACK, None);
            cx.vm.counters.flows_aborted += 1;
            self.abort(cx, Why::GuestGone, false);
        } else {
            self.standing.tell_guest(false);
        }
    }

    /// Driver reset: what the ring held may be lost, so it counts as not delivered (LIFE-04).
    pub(crate) fn on_ring_reset(&mut self, cx: &mut Cx<'_, '_>) {
        if self.standing.is_live() {
            self.rx.g_snd = self.rx.g_una;
            if let Some(losses) = &mut self.losses {
                losses.recovery = Recovery::default();
                losses.in_flight_max = u64::MAX; // the ring was lost, not G's patience
            }
            self.timers.stop_waiting_for_guest();
            self.arm_guest_timer(cx, true);
        }
    }

    /// What every event on a flow ends with.
    pub(crate) fn after_event(&mut self, cx: &mut Cx<'_, '_>) {
        if self.standing.is_live() {
            self.arm_guest_timer(cx, false);
            self.settle_drain(cx);
        }
        self.want_delivery(cx);
        self.commit(cx);
        self.note_owing(cx);
        self.assert_order();
    }

    /// Counts the flow among those of its VM that owe something, or no longer.
    pub(crate) fn note_owing(&mut self, cx: &mut Cx<'_, '_>) {
        let owing = !self.owes_nothing();
        if owing != self.flags.owing {
            self.flags.owing = owing;
            cx.vm.owing_flows = cx.vm.owing_flows.wrapping_add_signed(if owing { 1 } else { -1 });
        }
    }

    /// Brings the record up to date. The payload is in the store; what H made of the event leaves
    /// only when it is polled, so this lies between the two (INV-03: payload, commit record, ACK).
    pub(crate) fn commit(&self, cx: &mut Cx<'_, '_>) {
        let Some(rec) = self.rec else { return };
        let progress = Progress {
            rcv_nxt: self.rx.rcv_nxt,
            g_una: self.rx.g_una.min(self.rx.rcv_nxt),
            g_nxt: self.rx.g_nxt,
            w_nxt: self.tx.w_nxt,
            h_re: self.rx.re,
            ts_emit_r: self.ts.emit_r,
            ts_emit_g: self.ts.emit_g,
        };
        cx.arena.commit(rec, &progress);
    }

    /// The earliest wall-clock instant at which a timer may be due.
    pub(crate) fn next_deadline(&self, cx: &Cx<'_, '_>) -> Instant {
        let clock = &cx.vm.clock;
        self.timers.next(cx.now, clock.now(cx.now), clock.is_running()).min(self.end())
    }

    /// When the entry's time is over, unless it is used before then.
    fn end(&self) -> Instant {
        let span = match self.state() {
            State::Handshake => limits::T_HANDSHAKE,
            State::Abort => limits::T_ABORT,
            State::Pass if self.why() == Why::Closed => limits::T_LINGER,
            _ if self.rec.is_some() => limits::T_PARK,
            _ => limits::T_IDLE,
        };
        self.timers.idle_until(span)
    }

    /// An idle flow that owes nothing needs no place, and so neither reservation nor record.
    fn park(&mut self, cx: &mut Cx<'_, '_>) {
        self.give_back(cx);
    }

    /// Runs what is due. `true`: the entry may go.
    pub(crate) fn on_timeout(&mut self, cx: &mut Cx<'_, '_>) -> bool {
        self.timers.on_wheel();
        if self.end() <= cx.now {
            // What R may send beyond G's own window after this, G drops and R repeats.
            let over = self.rec.is_none() || !self.standing.is_live();
            if over && self.owes_nothing() {
                return true;
            }
            if self.owes_nothing() && self.ooo.is_empty() && self.guest_has_room() {
                self.park(cx);
            }
            self.timers.on_seen(cx.now);
        }
        while let Some(timer) = self.timers.poll(cx.now, cx.vm.clock.now(cx.now)) {
            match timer {
                Timer::Retransmission | Timer::Probe => self.on_guest_timeout(cx, timer),
                Timer::WindowUpdate if self.standing.is_on() => self.ack_now(cx, None),
                Timer::WindowUpdate => {}
            }
        }
        false
    }
}
