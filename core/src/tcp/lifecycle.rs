//! Entering and leaving the offload, and the timeouts of a flow (COM-28, LIFE-01 to LIFE-06).

use crate::drops::DropReason;
use crate::flow::key::FlowKey;
use crate::limits;
use crate::store::arena::Arena;
use crate::tcp::distance::Distance;
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::losses::Translated;
use crate::tcp::timers::Timer;
use crate::tcp::vm::{Presence, Vm};
use crate::tcp::{Fate, FlowContext};
use crate::time::Instant;
use crate::wire::packet::{Tcp, TcpFlags};

impl Flow {
    /// The third ACK was seen: take the flow on if everything it needs is there (COM-28).
    pub(super) fn go_on(&mut self, cx: &mut FlowContext<'_, '_>) {
        self.accept_offers(cx);
        // If it ends behind G, no stack on this NIC sends, and nobody floods (FWD-05).
        let is_of_guest = self.why() != Why::NotLocal;
        if !self.is_live() && is_of_guest && cx.vm.congestion_offload {
            cx.vm.uncontrolled_at = Some(cx.now); // H will not send for it
        }
    }

    fn accept_offers(&mut self, cx: &mut FlowContext<'_, '_>) {
        let Some(offers) = self.standing.offers().copied() else { return };
        match offers.negotiate(self.outbound.guest_is_client(), cx.key.version, cx.vm.mtu) {
            Ok(options) => self.options = options,
            Err(why) => return self.pass(cx.now, why),
        }
        if !cx.vm.offload || cx.vm.draining {
            return self.pass(cx.now, Why::Operator);
        }
        if cx.vm.presence != Presence::Here {
            return self.pass(cx.now, Why::GuestGone);
        }
        if cx.vm.refuses(cx.now, cx.key.r_addr, cx.key.g_port) {
            return self.pass(cx.now, Why::GuestRefuses);
        }
        self.options.distance = self.judge_distance(cx, &offers);
        if self.options.distance == Distance::Far {
            cx.vm.counters.flows_not_local += 1;
            return self.pass(cx.now, Why::NotLocal);
        }
        if !self.take_place(cx) {
            cx.vm.counters.flows_refused += 1;
            return self.pass(cx.now, Why::NoBudget);
        }
        self.timestamps.on_taken_on(cx.now);
        self.standing.take_on();
        if cx.vm.acknowledges_late {
            self.acknowledge_late();
        }
        self.begin_on_path(cx, &offers);
        cx.vm.counters.flows_offloaded += 1;
    }

    // --- The place of its bytes ----------------------------------------------------------------

    /// Takes a reservation for the edge that was shown, and a record. `false`: there is none.
    pub(super) fn take_place(&mut self, cx: &mut FlowContext<'_, '_>) -> bool {
        let terms = self.terms();
        let taken = self.receiver.reserve_edge(&terms, cx.vm) && self.renew_record(cx);
        if taken {
            self.begin_again_on_path();
        } else {
            self.park(cx);
        }
        taken
    }

    /// Has, or takes again, a place for R's bytes; not while bytes are under way to G of which H
    /// has no copy (COM-28). `false`: it has none.
    pub(super) fn wake(&mut self, cx: &mut FlowContext<'_, '_>) -> bool {
        let copied = self.sender.una() >= self.receiver.passed();
        !self.is_parked() || (copied && self.take_place(cx))
    }

    /// Store, record and reservation go back: the flow leaves.
    fn give_back(&mut self, cx: &mut FlowContext<'_, '_>) {
        self.release(cx.arena, cx.vm);
        self.give_record_back(cx.arena);
    }

    /// The flow is idle, or without a place: R's bytes get one later. Data that G has handed over
    /// stays until R has it, and the record, by which the flow goes on after a restart (LIFE-09).
    fn park(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.keeps_bytes() {
            self.release_inbound(cx.arena, cx.vm);
        } else {
            let (shown, promised) = (self.losses.shown(), self.losses.promised());
            let before = self.losses.take_before();
            let (narrow, narrow_to_net) = (self.losses.narrow(), self.losses.narrow_to_net());
            let past = self.losses.past();
            self.release(cx.arena, cx.vm);
            self.losses.note_before(before); // it was only idle
            self.losses.set_narrow(narrow);
            self.losses.set_narrow_to_net(narrow_to_net);
            self.note_promised(promised);
            if past > self.sender.una() {
                self.losses.note_past(past); // G may yet acknowledge them
            }
            if shown > self.outbound.sent() {
                self.losses.note_unsent(shown); // FLOOD-08
            }
        }
    }

    /// Store and reservation go back; the record stays.
    fn release(&mut self, arena: &mut Arena<'_>, vm: &mut Vm) {
        self.release_inbound(arena, vm);
        if let Some(relayed) = self.losses.relayed_mut() {
            relayed.release(arena, vm);
        }
        self.losses.clear();
    }

    fn release_inbound(&mut self, arena: &mut Arena<'_>, vm: &mut Vm) {
        self.store.clear(arena);
        self.receiver.release(vm);
    }

    /// The entry goes. Its place in lists is skipped when its turn comes.
    pub(crate) fn dispose(mut self, key: &FlowKey, arena: &mut Arena<'_>, vm: Option<&mut Vm>) {
        self.store.clear(arena);
        self.free_record(arena);
        if let Some(vm) = vm {
            self.uncount_bound(key, vm);
            let relayed = self.losses.relayed_mut();
            relayed.into_iter().for_each(|relayed| relayed.release(arena, vm));
            self.receiver.release(vm);
            vm.owing_flows -= u32::from(self.is_counted_as_owing());
        } else if let Some(relayed) = self.losses.relayed_mut() {
            relayed.clear(arena);
        }
    }

    /// The buffer grows with R's data and G's window (SNOOP-39). If it must stay too short for
    /// good, the flow lets go.
    #[inline(always)]
    pub(super) fn grow_buffer(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.is_parked() {
            return;
        }
        let terms = self.terms_for(self.early_ack()); // the size does not depend on the ACK
        if !self.receiver.grow_buffer(&terms, cx.vm) && self.standing.is_on() {
            cx.vm.counters.flows_refused += 1;
            self.drain(Why::NoBudget);
        }
    }

    /// R gets more room if G is off its core (SNOOP-39). A path behind G that loses bytes needs
    /// none.
    #[cold]
    #[inline(never)]
    pub(super) fn grow_ahead(&mut self, cx: &mut FlowContext<'_, '_>) {
        let is_wanted = self.standing.is_on() && self.losses.path().is_none();
        if is_wanted && cx.vm.is_off_core(cx.now) {
            self.receiver.grow_ahead(&self.terms_for(self.early_ack()), cx.vm);
        }
    }

    /// Room that was only lent goes back.
    #[cold]
    #[inline(never)]
    pub(super) fn return_lent(&mut self, cx: &mut FlowContext<'_, '_>) {
        self.receiver.return_lent(&self.terms_for(self.early_ack()), cx.vm);
    }

    /// New data, or an ACK with news, for a VM that has boost (BST-01).
    #[cold] // few have
    #[inline(never)]
    pub(super) fn want_core(&self, cx: &mut FlowContext<'_, '_>, data: bool) {
        let (now, id) = (cx.now, cx.id);
        let is_wanted = self.standing.draining().is_none();
        match &mut cx.vm.wanting {
            Some(wanting) if is_wanted && data => wanting.on_data(now, id),
            Some(wanting) if is_wanted => wanting.on_turn(now),
            _ => {}
        }
    }

    // --- The mode of the receiver --------------------------------------------------------------

    /// LIFE-12: R's bytes are acknowledged once G has acknowledged them, and R is shown G's own
    /// edge. Nothing more is promised until [`Self::acknowledge_early`].
    pub(crate) fn acknowledge_late(&mut self) {
        if self.is_live() && !self.receiver.is_late() {
            self.receiver.set_late(true);
            if self.options.sack {
                // R was sent a block for each range when its newest bytes came.
                for (from, end) in self.receiver.out_of_order().iter() {
                    self.losses.note_sacked(from, end);
                }
            }
        }
    }

    /// R's bytes are acknowledged once they are stored, and those that are stored now, unless the
    /// flow drains, its VM wants late acknowledgements (LIFE-13), or a container is owed much
    /// (FWD-02).
    pub(crate) fn acknowledge_early(&mut self, cx: &mut FlowContext<'_, '_>) {
        let may = self.receiver.is_late()
            && self.standing.is_on()
            && !self.receiver.is_asking()
            && !cx.vm.acknowledges_late;
        let most = limits::PROMISED_BEHIND_AGAIN;
        if !may || self.receiver.holds_more(self.sender.una(), most) {
            return;
        }
        self.receiver.set_late(false);
        self.losses.forget_sacked();
        self.losses.forget(self.sender.una());
        self.grow_buffer(cx);
        if cx.vm.presence != Presence::Here {
            return; // R asks
        }
        if self.ack_to_net() > self.receiver.acks.sent() {
            self.ack_now(cx, None);
        }
        self.maybe_window_update(cx);
    }

    // --- Leaving -------------------------------------------------------------------------------

    /// The flow acknowledges late from here on, and leaves the path when it is quiescent.
    pub(crate) fn drain(&mut self, why: Why) {
        self.standing.drain(why);
        self.acknowledge_late();
    }

    /// A closed flow leaves the path; a draining one leaves or goes back on once it is quiescent.
    #[inline]
    pub(crate) fn settle_drain(&mut self, cx: &mut FlowContext<'_, '_>) {
        // Neither closing nor draining: nearly every event.
        if self.outbound.fin_sent() || self.standing.draining().is_some() {
            self.leave_if_quiescent(cx);
        }
    }

    fn leave_if_quiescent(&mut self, cx: &mut FlowContext<'_, '_>) {
        if !self.is_live() {
            return; // it has left
        }
        if self.is_closed() && self.quiescent() {
            self.leave(cx, Why::Closed);
        } else if let Some(why) = self.standing.draining() {
            let copied = self.sender.una() >= self.receiver.passed();
            let called_off = why == Why::Operator && cx.vm.offload && !cx.vm.draining;
            let may_resume = self.standing.may_resume() || called_off;
            let stays = why == Why::Operator && cx.vm.stops && self.receiver.record().is_some();
            if may_resume && self.owes_nothing() && copied {
                self.standing.resume();
                self.acknowledge_early(cx);
            } else if !may_resume && !stays && (self.quiescent() || self.may_leave_unseen()) {
                self.leave(cx, why);
            }
        }
    }

    /// The flow leaves the path, owing nothing. R gets one more ACK if G shows it more than H did,
    /// unless R has just asked G, which shows it itself (INV-19). It also gets one if G sent past
    /// H, because R may have taken H's last ACKs for old ones (PAWS).
    pub(super) fn leave(&mut self, cx: &mut FlowContext<'_, '_>, why: Why) {
        let quiescent = self.quiescent() || self.may_leave_unseen();
        debug_assert!(quiescent, "left the path with promises open");
        let more = why != Why::Closed && self.sender.edge() > self.receiver.edge();
        let may_speak = cx.vm.presence == Presence::Here;
        if !may_speak {
            // R learns it from G.
        } else if self.outbound.sends_unseen() || (more && !self.receiver.is_answer_awaited()) {
            self.receiver.on_edge_of_guest(self.sender.edge());
            self.ack_now(cx, None);
        }
        self.step_aside(cx, why);
    }

    /// Gives everything back and passes from here on.
    pub(super) fn step_aside(&mut self, cx: &mut FlowContext<'_, '_>, why: Why) {
        if cx.vm.congestion_offload && !matches!(why, Why::Closed | Why::NotLocal) {
            cx.vm.uncontrolled_at = Some(cx.now); // and G may flood it
        }
        self.receiver.on_left();
        self.sender.stop();
        let edits = self.close_translated();
        self.give_back(cx);
        self.timers.stop();
        if edits {
            self.timers.on_seen(cx.now);
        } else {
            self.pass(cx.now, why);
        }
    }

    /// Promises end here; the caller has made the RST for R. The entry answers challenge ACKs,
    /// and its record stays as long: if the process ends before an RST left, the next one sends it.
    /// `tell_guest`: an RST to G is due.
    pub(super) fn abort(&mut self, cx: &mut FlowContext<'_, '_>, why: Why, tell_guest: bool) {
        self.release(cx.arena, cx.vm);
        self.end_bound(cx);
        self.standing.abort(why, tell_guest);
        self.receiver.on_abort();
        self.sender.stop();
        self.outbound.stop();
        self.timers.stop();
        self.timers.on_seen(cx.now);
    }

    /// INV-21: a promise that cannot be kept ends in a reset of both sides.
    pub(crate) fn abort_both(&mut self, cx: &mut FlowContext<'_, '_>, why: Why) {
        self.reset_to_net(cx);
        cx.vm.counters.flows_aborted += 1;
        self.abort(cx, why, true);
    }

    /// A predecessor acknowledged bytes that are no longer kept: both sides are reset (LIFE-09).
    /// `is_wire`: frames have passed plain since.
    pub(crate) fn reset_after_restart(&mut self, cx: &mut FlowContext<'_, '_>, is_wire: bool) {
        if is_wire {
            self.note_past();
        }
        self.reset_to_net(cx);
        cx.vm.counters.flows_aborted += 1;
        self.standing.abort(Why::Restart, true);
    }

    /// G has opened a new connection under this key. R is reset if it believes bytes delivered that
    /// G did not take (INV-21, SNOOP-17). The entry goes.
    pub(crate) fn on_forgotten_by_guest(&mut self, cx: &mut FlowContext<'_, '_>) {
        // Nobody can translate for another connection, so R hears of the end of this one.
        let owed = self.promised() > self.sender.una() || self.receiver.is_translated();
        if self.is_live() && owed && !self.receiver.reset_waits() {
            self.reset_to_net(cx);
            cx.vm.counters.flows_aborted += 1;
        }
    }

    /// LIFE-05: there is no G any more. A connection that owes nothing may go on elsewhere if it
    /// acknowledges late (LIFE-06), or if G is known to have moved (LIFE-16), so R is not told.
    pub(crate) fn on_guest_gone(&mut self, cx: &mut FlowContext<'_, '_>) {
        if cx.vm.presence == Presence::Moved {
            self.hand_back_now(cx); // where G is now, it has what R was not sent
            self.outbound.stop(); // and R tells it the rest
        }
        let may_go_on = (self.receiver.is_late() || cx.vm.presence == Presence::Moved)
            && !self.receiver.is_translated();
        let is_replaced = cx.vm.presence == Presence::Replaced;
        if self.is_live() && may_go_on && self.owes_nothing() {
            self.step_aside(cx, Why::GuestGone);
        } else if self.is_live() || self.state() == State::Translated {
            self.reset_to_net(cx); // what G repeats elsewhere nobody translates
            cx.vm.counters.flows_aborted += 1;
            self.abort(cx, Why::GuestGone, is_replaced);
        } else {
            self.standing.tell_guest(is_replaced && self.standing.is_guest_untold());
        }
    }

    /// Before anything is sent in G's name: G may be gone, and this flow may not know yet. `true`:
    /// nobody knows whether G is gone, and the flow stands still (LIFE-16).
    #[inline]
    pub(super) fn hear_of_end(&mut self, cx: &mut FlowContext<'_, '_>) -> bool {
        if cx.vm.presence == Presence::Here || !self.is_live() {
            return false;
        }
        let stands = cx.vm.presence == Presence::Awaited;
        if !stands {
            self.on_guest_gone(cx);
        }
        stands
    }

    /// A segment of either side meets a flow in `Abort`: a challenge ACK gets an exact RST.
    pub(super) fn on_segment_in_abort(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        from_guest: bool,
        tcp: &Tcp,
    ) -> Fate {
        let rst = tcp.flags.contains(TcpFlags::RST);
        if !rst && tcp.flags.contains(TcpFlags::ACK) {
            if from_guest {
                // R's view stands: `una` does not move by G's ACKs now (INV-07).
                self.sender.on_ack_in_abort(tcp.ack.unwrap(self.sender.sent()));
                self.standing.tell_guest(true);
            } else if cx.vm.presence != Presence::Moved // LIFE-07
                && self.receiver.acks.may_answer_odd(cx.now, limits::ABORT_RST_INTERVAL)
            {
                let seq = tcp.ack.unwrap(self.outbound.sent());
                self.emit_reset(cx, seq);
            }
        }
        Fate::Drop(DropReason::FlowAborted)
    }

    // --- Rings and time ------------------------------------------------------------------------

    /// Driver reset: frames in the ring may be lost, so they count as not delivered (LIFE-04).
    pub(crate) fn on_ring_reset(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.is_live() {
            let (sender, mut sending) = self.sending(cx);
            sender.on_ring_reset(&mut sending);
            if self.state() != State::Opening {
                self.begin_doubt(cx); // an opening one asks by its SYN
                self.losses.translated_mut().into_iter().for_each(Translated::ask_soon);
            }
            // It may have been silent for a guest that was awaited.
            let owes_ack = self.ack_to_net() > self.receiver.acks.sent();
            if owes_ack && !self.receiver.is_late() && cx.vm.presence == Presence::Here {
                self.ack_now(cx, None);
            }
        }
    }

    /// The earliest wall-clock instant at which a timer may be due.
    #[inline]
    pub(super) fn next_deadline(&self, cx: &FlowContext<'_, '_>) -> Instant {
        let stood_for = cx.vm.clock.stood_for(cx.now);
        self.timers.next(cx.now, cx.running(), stood_for).min(self.end())
    }

    /// When the entry's time is over, unless it is used before then.
    #[inline]
    fn end(&self) -> Instant {
        let span = match self.state() {
            State::Handshake => limits::T_HANDSHAKE,
            State::Opening => return self.opening_wakes_at(),
            State::Abort => limits::T_ABORT,
            State::Pass | State::Translated if self.why() == Why::Closed => limits::T_LINGER,
            _ if self.has_place() => limits::T_PARK,
            State::On | State::Drain if self.receiver.is_translated() => self.asks_after(),
            _ => limits::T_IDLE,
        };
        self.timers.idle_until(span)
    }

    /// Runs what is due. `true`: the entry may go.
    pub(crate) fn on_timeout(&mut self, cx: &mut FlowContext<'_, '_>) -> bool {
        self.timers.on_wheel();
        let stands = self.hear_of_end(cx);
        if self.state() == State::Opening {
            self.on_opening_time(cx);
        } else if self.end() <= cx.now {
            // G drops bytes that R sends beyond G's own window after this, and R repeats them.
            let over = !self.has_place() || !self.is_live();
            if over && self.is_bound() {
                if !stands {
                    self.ask_both(cx);
                }
            } else if over && self.owes_nothing() && !self.awaits_word(cx.vm) {
                return true;
            } else if self.holds_nothing() && self.receiver.guest_has_room(&self.terms()) {
                self.park(cx);
            }
            self.timers.on_seen(cx.now);
        }
        while let Some(timer) = self.timers.poll(cx.now, cx.running()) {
            match timer {
                Timer::Retransmission | Timer::Probe => self.on_guest_timeout(cx, timer),
                // Late, R has perhaps sent bytes since, and would count a duplicate.
                Timer::WindowUpdate if !self.receiver.is_late() && !stands => {
                    self.ack_now(cx, None);
                }
                Timer::WindowUpdate => {}
            }
        }
        false
    }

    /// G had its time and did not move (SNOOP-15, SNOOP-29, SNOOP-31, SNOOP-32, SNOOP-42).
    fn on_guest_timeout(&mut self, cx: &mut FlowContext<'_, '_>, timer: Timer) {
        let stuck = self.sender.stuck_for(cx.running());
        if self.receiver.reset_waits() && stuck >= limits::T_RST {
            self.abort(cx, Why::Reset, true);
            return;
        }
        if self.state() == State::Opening {
            return self.on_unanswered_run(cx);
        }
        if let Some(heard_at) = self.heard_in_doubt(cx) {
            return self.on_doubt_timeout(cx, heard_at);
        }
        let timeouts = self.timers.back_off();
        let tried = u32::from(timeouts) >= limits::REFUSED_RETRANSMISSIONS;
        // R, which was promised nothing, does not give up sooner.
        let late = self.receiver.is_late() && self.owes_nothing();
        let may_go = late && !self.receiver.is_translated() && self.answers_elsewhere();
        if tried && stuck >= limits::REFUSED_RUNNING && may_go {
            self.step_aside(cx, self.why()); // R repeats what G lacks
            return;
        }
        let most = if late { limits::REFUSED_LATE } else { self.patience() };
        if tried && stuck >= most {
            cx.vm.refuse(cx.now, cx.key.r_addr, cx.key.g_port);
            self.abort_both(cx, Why::GuestRefuses);
            return;
        }
        if timer == Timer::Probe {
            self.sender.on_window_shut();
        } else {
            // It took nothing, and said nothing.
            if self.sender.is_unheard() && stuck >= limits::T_ASYMMETRIC {
                self.drain(Why::Asymmetric);
            }
            let (sender, mut sending) = self.sending(cx);
            sender.on_timeout(&mut sending);
        }
        self.timers.wait_again(cx.running());
    }

    /// Waits for what G owes; see [`crate::tcp::sender::Sender::wait`].
    #[inline(always)]
    pub(super) fn wait_for_guest(&mut self, cx: &FlowContext<'_, '_>, restart: bool) {
        let (sender, mut sending) = self.sending(cx);
        sender.wait(&mut sending, restart);
    }
}
