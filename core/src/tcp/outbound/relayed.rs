//! The outbound pipe with congestion offload: G hands over its data, and H sends it to R as the
//! path allows.
//!
//! ```text
//! R <-- congestion::Sender <-- store <-- Intake <-- G
//! ```
//!
//! docs/design/congestion-offload.md has the design. The box exists from the first segment of G for
//! which the flow is taken over until the flow is handed back. Without it bytes leave as they
//! arrive. `from_guest` and `from_net` report events to it, `depart` makes its frames.
//!
//! **End to end.** This code acknowledges nothing: G frees its bytes by R's own acknowledgement. So
//! these bytes need not survive H: their pages are lent (`store/arena.rs`).
//!
//! **A FIN** is a number of the stream like a byte, so the sender need not know of it.

mod sizes;
mod take_over;

use crate::congestion::sender::{NetAck, Waits};
use crate::congestion::{Controller, Learned, Segment, Sender, SenderConfig};
use crate::counters::VmCounters;
use crate::drops::DropReason;
use crate::limits;
use crate::store::arena::Arena;
use crate::store::flow_store::FlowStore;
use crate::tcp::FlowContext;
use crate::tcp::flow::Flow;
use crate::tcp::outbound::Said;
use crate::tcp::outbound::intake::{Handed, Intake, Room};
use crate::tcp::outbound::relayed::sizes::{Trial, V4_MSS_MIN, V6_MSS_MIN};
use crate::tcp::receiver::Range;
use crate::tcp::stats::RelayedStats;
use crate::tcp::vm::Vm;
use crate::time::Instant;
use crate::wire::packet::{IpVersion, SackBlocks};
use crate::wire::saved::saved;

/// The state of a flow for which H sends. It is behind a box, because most flows only receive.
#[derive(Debug)]
pub(crate) struct Relayed {
    /// G's bytes that H has.
    intake: Intake,
    /// The bytes that R has not acknowledged.
    store: FlowStore,
    /// How they leave.
    sender: Sender,
    /// Payload bytes of a segment.
    mss: u64,
    /// The longest segment of G: its MTU may be smaller than its MSS option says (FLOOD-07).
    longest: u64,
    /// The segment size that the path was found to take.
    ceiling: u64,
    /// R has acknowledged a segment as long as this...
    proven: u64,
    /// ...and will prove that they may be longer by acknowledging this.
    proof: Option<(u64, u64)>,
    /// Longer ones are tried by this (FLOOD-40).
    trial: Option<Trial>,
    /// It is in [`crate::tcp::outbound::departures::Departures`], for its turn.
    listed: bool,
    /// When the wheel wakes it, at the latest.
    wheel: Instant,
    /// Since when H sends for G.
    since: Instant,
    /// End of the bytes that G has sent H since then, whether H took them or not.
    shown: u64,
    /// R has always made room for the bytes that H had for it, so G may be ahead of R's edge.
    keeps_pace: bool,
    /// R has acknowledged a byte, and G was not told (FLOOD-12).
    holds_ack: bool,
    /// R has made room for bytes that waited for it, and H has not sent since.
    has_new_room: bool,
}

/// The state from which the next sender of the flow goes on: after a pause, or a hand-back.
#[derive(Debug)]
pub(crate) struct Before {
    learned: Learned,
    /// As in [`Relayed`].
    ceiling: u64,
    proven: u64,
    trial: Option<Trial>,
    keeps_pace: bool,
}

saved! {
    Before { learned, ceiling as OrNone, proven, trial, keeps_pace }
    check |it| it.ceiling >= limits::PAYLOAD_MIN.into()
}

impl Relayed {
    /// R takes bytes below `edge`.
    fn new(cx: &mut FlowContext<'_, '_>, intake: Intake, edge: u64, config: &SenderConfig) -> Self {
        cx.vm.counters.flows_flooded += 1;
        cx.vm.relayed_flows += 1;
        let first = intake.accepted();
        Self {
            intake,
            store: FlowStore::default(),
            sender: Sender::new(cx.now, first, edge, config),
            mss: config.mss,
            longest: 0,
            ceiling: u64::MAX,
            proven: 0,
            proof: None,
            trial: None,
            listed: false,
            wheel: Instant::MAX,
            since: cx.now,
            shown: first,
            keeps_pace: true,
            holds_ack: false,
            has_new_room: false,
        }
    }

    /// The state from which the next sender goes on.
    pub(in crate::tcp) fn before(&self) -> Before {
        let Self { ceiling, proven, trial, keeps_pace, .. } = *self;
        let trial = trial.filter(|trial| matches!(trial, Trial::Due { .. }));
        Before { learned: self.sender.learned(), ceiling, proven, trial, keeps_pace }
    }

    /// Goes on from there.
    fn resume(&mut self, before: Before) {
        self.sender.resume(before.learned);
        (self.ceiling, self.proven, self.trial) = (before.ceiling, before.proven, before.trial);
        self.keeps_pace = before.keeps_pace;
    }

    /// Since when H sends for G.
    pub(in crate::tcp) const fn since(&self) -> Instant {
        self.since
    }

    /// End of the bytes that G has sent H, whether H took them or not.
    pub(in crate::tcp) const fn shown(&self) -> u64 {
        self.shown
    }

    /// G sends bytes of `range`. Bytes beyond all room that G can ever have been shown are no part
    /// of the stream: R will never acknowledge them.
    fn note_shown(&mut self, range: Range) {
        let most = self.intake.end_max().max(self.intake.promised());
        if range.seq <= most {
            self.shown = self.shown.max(most.min(range.end + u64::from(range.fin)));
        }
    }

    /// The right edge that G was shown.
    pub(in crate::tcp) fn promised(&self) -> u64 {
        self.intake.promised()
    }

    /// The bytes.
    pub(crate) const fn store(&self) -> &FlowStore {
        &self.store
    }

    /// Pages taken for them.
    pub(crate) const fn reserved_pages(&self) -> u32 {
        self.intake.reserved_pages()
    }

    /// End of the bytes that G has handed over in order.
    pub(in crate::tcp) const fn accepted(&self) -> u64 {
        self.intake.accepted()
    }

    /// R has yet to acknowledge something that G has handed over.
    pub(crate) const fn keeps_bytes(&self) -> bool {
        self.sender.una() < self.intake.accepted()
    }

    /// R was silent, H has repeated bytes, and R has not acknowledged them.
    pub(in crate::tcp) const fn repeats_in_vain(&self) -> bool {
        self.sender.rtt().backoffs() > 0 || self.sender.probes() > 0
    }

    /// Takes data that G hands over.
    fn on_data(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        handed: &Handed<'_>,
    ) -> Result<(), DropReason> {
        let una = self.sender.una();
        let result = self.intake.on_data(cx, &mut self.store, una, handed);
        self.sender.on_offered(cx.now, self.intake.accepted());
        result
    }

    /// R's acknowledgement, which moves `una`.
    fn on_ack(&mut self, cx: &mut FlowContext<'_, '_>, ack: &NetAck<'_>) {
        self.sender.on_ack(cx.now, ack);
        if let Some((_, mss)) = self.proof.take_if(|(end, _)| *end <= self.sender.una()) {
            self.proven = mss;
        }
        if self.trial.is_some() {
            self.end_trial(ack.ack);
        }
        self.store.release(cx.arena, self.sender.una().min(self.intake.bytes_end()));
    }

    /// The acknowledgement that G is shown: all that R has acknowledged, or one byte less
    /// (FLOOD-12).
    fn told(&self) -> u64 {
        self.sender.una() - u64::from(self.holds_ack)
    }

    /// R has acknowledged `una` and shows room up to `edge`. If that is none, and G was shown more,
    /// the last byte is not acknowledged to G before R makes room or H lets go of the flow: with it
    /// G takes the window of 0, which it would not believe from an ACK that it knows (K-05).
    fn hold_ack(&mut self, una: u64, edge: u64, shift: u8) {
        self.holds_ack = edge == una && self.would_hold(una, shift);
    }

    fn would_hold(&self, una: u64, shift: u8) -> bool {
        let moved = una > self.sender.una();
        let fin = self.intake.is_closed() && una == self.intake.accepted();
        (moved || self.holds_ack) && !fin && self.intake.shown(una, shift) > 0
    }

    /// R shows room up to `edge`, and never showed a window of more than `window_max`. A G with
    /// room for few segments sends half ones (Linux: `tcp_bound_to_half_wnd`): none is lent to it.
    fn on_net_edge(&mut self, una: u64, edge: u64, window_max: u32, shift: u8) {
        let lends = self.keeps_pace && u64::from(window_max) >= 4 * self.mss;
        self.intake.on_net_edge(una, edge, lends, shift);
    }

    /// G may hand over more, as far as R's edge.
    fn open(&mut self, now: Instant, vm: &mut Vm) {
        let absence = vm.absence(now);
        let (una, next) = (self.sender.una(), self.sender.next());
        let (cwnd, srtt) = (self.sender.controller().cwnd(), self.sender.own_srtt());
        self.intake.open(vm, &Room { una, next, cwnd, srtt, absence });
    }

    /// G has used half of the room that R has shown, R has not answered yet, and G may go on,
    /// because its time slice may be over when R answers (FLOOD-13). `true`: G has to be told.
    fn may_go_on(&mut self, now: Instant, vm: &mut Vm, shift: u8) -> bool {
        let may = self.sender.own_srtt().is_none() && self.intake.is_half_used(self.sender.una());
        if may {
            self.open(now, vm);
        }
        may && self.intake.opens(self.sender.una(), shift)
    }

    /// The wheel has come to the flow's place. `false`: the flow is handed back. R has been silent
    /// for so long that G may try by itself (FLOOD-23); sooner if the flow is to be handed back
    /// anyway. Or R has shown no room although it had shown G some before, so only R's own answers
    /// keep G waiting (FLOOD-12).
    fn on_wheel(&mut self, now: Instant, vm: &mut Vm, wanted: bool) -> bool {
        self.wheel = Instant::MAX;
        if self.timeout() <= now {
            let waits = self.sender.waits();
            vm.counters.remote_timeouts += u64::from(waits == Waits::Retransmission);
            self.sender.on_timeout(now);
            self.keeps_pace &= self.sender.probes() == 0;
            if !self.keeps_pace {
                self.intake.wait_for_net();
            }
        }
        let most = if wanted { limits::WIRE_TIMEOUTS_MAX } else { limits::WINDOW_PROBES_MAX };
        self.sender.waits() == Waits::Nothing
            || (self.sender.rtt().backoffs() < most
                && self.sender.probes() < limits::WINDOW_PROBES_MAX)
    }

    /// When the sender has waited long enough for R. R cannot answer a copy or probe that waits for
    /// the turn or the rate of its VM: that time begins when it leaves (FLOOD-23).
    fn timeout(&self) -> Instant {
        if self.listed && self.sender.owes_first() { Instant::MAX } else { self.sender.timeout() }
    }

    /// ACK number and window field for G.
    pub(in crate::tcp) fn shown_to_guest(&mut self, shift: u8) -> (u64, u16) {
        let told = self.told();
        (told, self.intake.window(told, shift))
    }

    /// An ACK that reports a hole in G's data is due.
    pub(in crate::tcp) const fn owes_duplicate(&self) -> bool {
        self.intake.owes_duplicate()
    }

    /// The blocks of that ACK, at most `room`.
    pub(in crate::tcp) fn duplicate(&mut self, room: usize) -> SackBlocks {
        self.intake.duplicate(room)
    }

    /// G would see a larger window than it was shown.
    pub(in crate::tcp) fn opens(&self, una: u64, shift: u8) -> bool {
        self.intake.opens(una, shift)
    }

    /// The next bytes, at most `room`, how many of them make a segment, and whether they end a
    /// write of G. Their frame carries this timestamp.
    pub(in crate::tcp) fn poll(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        room: u64,
        stamp: Option<u32>,
    ) -> Option<(Segment, u64, bool)> {
        self.listed = false;
        self.sender.set_stamp(stamp);
        let cut = self.cut_for_trial(self.intake.cut(self.sender.next()));
        let segment = self.sender.poll(cx.now, room, cut)?;
        self.count(&mut cx.vm.counters, &segment);
        self.note_longest(&segment);
        let mss = self.note_size(&segment);
        self.intake.on_sent(self.sender.next());
        let push = segment.to == cut || segment.to >= self.intake.bytes_end();
        Some((segment, mss, push))
    }

    /// An ACK of R made room for these bytes, and they are the first that leave by it.
    pub(in crate::tcp) fn is_by_new_room(&mut self, s: &Segment) -> bool {
        !s.again && core::mem::take(&mut self.has_new_room)
    }

    fn count(&self, counters: &mut VmCounters, s: &Segment) {
        let segments = (s.to - s.from).div_ceil(self.mss);
        if s.again {
            counters.remote_retransmissions += segments;
        } else {
            counters.sent_for_guest_bytes += s.to.min(self.intake.bytes_end()) - s.from;
            counters.sent_for_guest_segments += segments;
        }
    }

    /// The state for operators.
    pub(crate) fn stats(&self) -> RelayedStats {
        let Self { sender, intake, .. } = self;
        RelayedStats {
            kept_bytes: intake.accepted() - sender.una(),
            unsent_bytes: intake.accepted() - sender.next(),
            in_flight_bytes: sender.in_flight(),
            cwnd_bytes: sender.controller().cwnd(),
            ssthresh_bytes: sender.controller().ssthresh(),
            srtt: sender.rtt().srtt(),
            mss: self.mss,
            retransmissions: sender.retransmissions(),
            timeouts_in_a_row: sender.rtt().backoffs().saturating_add(sender.probes()),
        }
    }

    /// End of G's bytes, and whether a FIN follows.
    pub(in crate::tcp) const fn end(&self) -> (u64, bool) {
        (self.intake.bytes_end(), self.intake.is_closed())
    }

    /// Its turn comes, or a time is waited for. `may_send`: there may be something to send.
    pub(in crate::tcp) fn arm(&mut self, cx: &mut FlowContext<'_, '_>, may_send: bool) {
        let may_send = may_send && self.sender.may_send(cx.now);
        if may_send && !core::mem::replace(&mut self.listed, true) {
            cx.out.departures.push(cx.key.port, cx.id);
        }
        // Nearly always the wheel wakes the flow before anything can be due.
        let floor = self.sender.timeout_floor();
        debug_assert!(floor <= self.sender.timeout(), "a timeout before its floor");
        let mut at = if self.wheel <= floor { Instant::MAX } else { self.timeout() };
        if !may_send && self.sender.paced_until() > cx.now {
            at = at.min(self.sender.paced_until());
        }
        if at < self.wheel {
            self.wheel = at;
            cx.out.departures.wake(cx.id, at);
        }
    }

    /// Everything goes back.
    pub(crate) fn release(&mut self, arena: &mut Arena<'_>, vm: &mut Vm) {
        self.store.clear(arena);
        self.intake.release(vm);
        vm.relayed_flows -= 1;
    }

    /// The same for a flow whose VM is gone.
    pub(crate) fn clear(&mut self, arena: &mut Arena<'_>) {
        self.store.clear(arena);
    }

    /// The orders that always hold; `una`, `sent`: the counters beside this box.
    pub(in crate::tcp) fn assert_order(&self, una: u64, sent: u64) {
        let Self { sender, intake, store, .. } = self;
        debug_assert!((sender.una(), sender.next()) == (una, sent), "who is right?");
        debug_assert!(sender.end() == intake.accepted(), "what G has handed over");
        debug_assert!(store.held_pages() <= intake.reserved_pages(), "more kept than reserved");
    }
}

impl Flow {
    /// G's bytes, if H sends them.
    #[must_use]
    pub fn departing(&self) -> Option<&FlowStore> {
        self.losses.relayed().map(Relayed::store)
    }

    /// R has yet to acknowledge something that H sends for G. Until then R's ACKs are H's affair.
    pub(crate) fn keeps_bytes(&self) -> bool {
        self.losses.relayed().is_some_and(Relayed::keeps_bytes)
    }

    /// R's acknowledgement, window and SACK blocks; `edge`: the right edge that R showed before.
    /// Returns whether that is news for G, if H sends for it. R's window is not, because G is shown
    /// a window of H (FLOOD-09).
    pub(in crate::tcp) fn on_ack_for_relayed(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        said: &Said<'_>,
        edge: u64,
    ) -> Option<bool> {
        let (una, shift) = (self.outbound.una(), self.options.shift_r);
        let shown = self.outbound.edge(shift);
        let (wanted, window_max) = (self.wants_relayed(cx), self.outbound.window_max());
        let relayed = self.losses.relayed_mut()?;
        let mut blocks = [(0, 0); SackBlocks::MAX];
        let sack = said.sack.as_slice();
        for (block, (from, to)) in blocks.iter_mut().zip(sack) {
            *block = (from.unwrap(una), to.unwrap(una));
        }
        let ack = NetAck {
            ack: said.ack.unwrap(una),
            blocks: &blocks[..sack.len()],
            edge: shown,
            ece: said.ece,
            echo: said.timestamps.map(|ts| ts.tsecr),
            bare: said.bare && shown == edge,
        };
        let before = relayed.told();
        relayed.hold_ack(una, shown, shift);
        relayed.on_ack(cx, &ack);
        relayed.on_net_edge(una, shown, window_max, shift);
        if wanted {
            relayed.open(cx.now, cx.vm);
        } // else G comes to an end of what it may hand over, and the flow to its hand-back
        relayed.arm(cx, true);
        let new = relayed.told() > before || relayed.opens(relayed.told(), shift);
        relayed.has_new_room |= new && relayed.accepted() > relayed.sender.next();
        if !wanted {
            self.settle_relayed(cx, false);
            self.losses.relayed()?;
        }
        Some(new)
    }

    /// The wheel of senders has woken the flow.
    pub(crate) fn on_sender_woken(&mut self, cx: &mut FlowContext<'_, '_>) {
        let wanted = self.wants_relayed(cx);
        let Some(relayed) = self.losses.relayed_mut() else { return };
        if relayed.on_wheel(cx.now, cx.vm, wanted) {
            let least = if cx.key.version == IpVersion::V4 { V4_MSS_MIN } else { V6_MSS_MIN };
            if let Some(mss) = relayed.mss_of_black_hole(least) {
                relayed.lower_mss_for_hole(mss, relayed.wire_mss());
            }
            relayed.arm(cx, true);
        } else {
            self.hand_back_now(cx);
        }
    }

    /// H should send for G.
    fn wants_relayed(&self, cx: &FlowContext<'_, '_>) -> bool {
        cx.vm.congestion_offload && self.standing.is_on()
    }

    /// If H should no longer send for G, the flow is handed back as soon as nothing is kept.
    fn settle_relayed(&mut self, cx: &mut FlowContext<'_, '_>, verbatim: bool) {
        let leaves = !self.wants_relayed(cx) && !self.is_ahead();
        if (verbatim || leaves) && !self.keeps_bytes() {
            let promised = self.losses.promised();
            self.hand_back(cx);
            self.note_promised(promised);
        }
    }

    /// A box has gone that has shown G room up to `edge`.
    pub(in crate::tcp) fn note_promised(&mut self, edge: u64) {
        if edge > self.outbound.edge(self.options.shift_r) {
            self.losses.note_promised(edge); // INV-05
        }
    }

    /// G was shown more room than R shows now, which H has promised.
    pub(in crate::tcp) fn is_ahead(&self) -> bool {
        let (una, shift) = (self.outbound.una(), self.options.shift_r);
        let shown = self.losses.relayed().map(|relayed| relayed.intake.shown(una, shift));
        shown.is_some_and(|shown| shown > u64::from(self.outbound.window()))
    }

    /// As [`Self::hand_back`], even if G was shown more room than R shows; G is told.
    pub(crate) fn hand_back_now(&mut self, cx: &mut FlowContext<'_, '_>) {
        let ahead = self.is_ahead();
        self.hand_back(cx);
        self.outbound.note_ack_to_guest(ahead);
    }

    /// G was shown more room than R has, by a box that is gone, and uses it: R would complain of
    /// each such segment. A segment that begins with the first byte that R lacks is a probe
    /// (FLOOD-12). Or R has reset the connection, H sends for G no longer, and G does not know yet.
    pub(in crate::tcp) fn has_no_room_for(&self, seq: u64, end: u64) -> bool {
        let una = self.outbound.una();
        let shown = self.losses.unsent().max(self.losses.promised());
        let is_lent = end <= shown || self.receiver.reset_waits();
        is_lent && seq > una && seq >= self.outbound.edge(self.options.shift_r)
    }

    /// A segment of G up to `end` is dropped for lack of room. G is still shown the room that it
    /// has used, until R's window has been shut for long.
    pub(in crate::tcp) fn on_no_room(&mut self, end: u64) {
        self.losses.note_unsent(end);
    }

    /// A segment of G leaves as it comes. `is_first`: with the first byte that R does not have.
    pub(in crate::tcp) fn on_passed_on(&mut self, is_first: bool) {
        if is_first && self.losses.used() > 0 {
            let over = self.losses.on_asked(self.outbound.window() == 0);
            self.outbound.note_ack_to_guest(over);
        }
    }

    /// ACK number and window field for G where H does not send for it: R's own, except that room of
    /// a larger window that G has used stays shown.
    pub(in crate::tcp) fn shown_to_guest_by_net(&self) -> (u64, u16) {
        let una = self.outbound.una();
        let used = self.losses.used().saturating_sub(una) >> self.options.shift_r;
        (una, self.outbound.window().max(u16::try_from(used).unwrap_or(u16::MAX)))
    }

    /// From here on G's segments leave as they arrive. Bytes that H has not sent are lost, and G
    /// repeats them.
    pub(in crate::tcp) fn hand_back(&mut self, cx: &mut FlowContext<'_, '_>) {
        if let Some(mut relayed) = self.losses.take_relayed() {
            self.losses.note_before(Some(Box::new(relayed.before())));
            relayed.release(cx.arena, cx.vm);
            cx.vm.counters.flows_handed_back += 1;
            if relayed.shown > self.outbound.sent() {
                self.losses.note_unsent(relayed.shown);
            }
            let edge = self.outbound.edge(self.options.shift_r);
            let news = relayed.holds_ack || relayed.intake.is_short_of(edge);
            self.outbound.note_ack_to_guest(news);
        }
    }
}

#[cfg(test)]
mod tests;
