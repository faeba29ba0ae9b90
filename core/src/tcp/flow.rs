//! One tracked TCP connection: two pipes and their common state.
//!
//! ```text
//! R --> Receiver --> store --> Sender --> G      inbound
//! R <-- Outbound <------------------------ G      outbound: counters, or a pipe (`relayed`)
//! ```
//!
//! Each part has its file and private fields: only `receiver` moves the edge shown to R, only
//! `sender` moves what G has and is given next, only `state` changes the state. The methods of
//! [`Flow`] stand between them; `from_net` and `from_guest` begin with a segment, `lifecycle` with
//! a timer or a command, and every event ends in [`Flow::after_event`]. A gate (`gates`) writes one
//! header from both pipes.
//!
//! All sequence numbers are unwrapped to 64 bits (COM-01) and start above 2^32, so that subtraction
//! of a window can never underflow. `docs/spec.md` draws them, and the states.

use crate::flow::table::Class;
use crate::store::arena::{Arena, RecordId};
use crate::store::flow_store::FlowStore;
use crate::store::ranges::Ranges;
use crate::store::record::{FLAG_TS, MARK_TRANSLATED, Record};
use crate::tcp::distance::Distance;
use crate::tcp::losses::Losses;
use crate::tcp::options::{Negotiated, Offers};
use crate::tcp::outbound::Outbound;
use crate::tcp::receiver::Receiver;
use crate::tcp::receiver::window::Terms;
use crate::tcp::sender::{Sender, Sending};
use crate::tcp::state::Standing;
pub use crate::tcp::state::{State, Why};
use crate::tcp::template::Template;
use crate::tcp::timers::Timers;
use crate::tcp::timestamps::TimestampState;
use crate::tcp::wanting::Owed;
use crate::tcp::{Ended, Fate, FlowContext};
use crate::time::Instant;
use crate::wire::seq::Seq;

/// One tracked connection; see `limits` for what it weighs.
#[derive(Debug)]
pub struct Flow {
    /// Where the connection stands, and why.
    pub(super) standing: Standing,
    /// The result of the handshake's offers.
    pub(super) options: Negotiated,
    /// Inbound, from R.
    pub(super) receiver: Receiver,
    /// The bytes that the receiver has taken and G has not acknowledged.
    pub(super) store: FlowStore,
    /// Inbound, to G.
    pub(super) sender: Sender,
    /// Outbound, from G to R.
    pub(super) outbound: Outbound,
    /// Bytes that either pipe lost, while there are any.
    pub(super) losses: Losses,
    /// The TSvals of both ends that were echoed and shown.
    pub(super) timestamps: TimestampState,
    /// Lower layers of the frames H makes.
    pub(super) template: Template,
    /// The flow's deadlines.
    pub(super) timers: Timers,
    /// The flow is counted in its VM's `owing_flows`.
    pub(super) owing: bool,
}

impl Flow {
    /// A flow in `Handshake`, created on G's SYN or SYN-ACK.
    #[must_use]
    pub(crate) fn new(now: Instant, offers: Offers, guest_is_client: bool) -> Self {
        let r = unwrapped_isn(offers.r.isn) + 1;
        let g = unwrapped_isn(offers.g.isn) + 1;
        Self {
            standing: Standing::handshake(offers),
            options: Negotiated::default(),
            receiver: Receiver::new(now, r),
            store: FlowStore::default(),
            sender: Sender::new(r, r),
            outbound: Outbound::new(offers.g.isn, g, guest_is_client),
            losses: Losses::default(),
            timestamps: TimestampState::default(),
            template: Template::default(),
            timers: Timers::new(now),
            owing: false,
        }
    }

    /// The state in a predecessor's record, as far as its resets need it (LIFE-09). The record
    /// stays the flow's, if there is a place for it.
    pub(crate) fn recovered(now: Instant, record: &Record, id: Option<RecordId>) -> Self {
        let sent = record.guest_nxt.max(record.guest_una); // also what was not acknowledged to R
        let options = Negotiated {
            timestamps: record.flags & FLAG_TS != 0,
            shift_g: record.s_g,
            shift_r: record.s_r,
            ..Negotiated::default()
        };
        let mut receiver = Receiver::recovered(now, record.rcv_nxt, record.edge_to_net, id);
        if record.marks & MARK_TRANSLATED != 0 {
            receiver.set_translated();
        }
        Self {
            options,
            receiver,
            sender: Sender::recovered(record.guest_una, sent),
            outbound: Outbound::recovered(record.net_nxt),
            timestamps: TimestampState::recovered(record),
            template: Template::from_record(record.l2.bytes(), record.ttl, record.ttl_to_g),
            ..Self::new(now, Offers::default(), false)
        }
    }

    /// Where the connection stands.
    #[must_use]
    #[inline]
    pub fn state(&self) -> State {
        self.standing.state()
    }

    /// Why it is there, or, while an RST of R waits, will soon not be there.
    #[must_use]
    pub fn why(&self) -> Why {
        if self.receiver.reset_waits() { Why::Reset } else { self.standing.why() }
    }

    /// The connection was reset, and nothing is owed: G was told, and has acknowledged all bytes
    /// that R believes delivered.
    pub(crate) fn is_over(&self) -> bool {
        self.state() == State::Abort
            && !self.standing.is_guest_untold()
            && self.sender.una() >= self.promised()
    }

    /// In the path: `On` or `Drain`.
    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.standing.is_live()
    }

    /// See [`Standing::is_unnoticed`].
    pub(crate) const fn is_unnoticed(&self) -> bool {
        self.standing.is_unnoticed()
    }

    /// A frame of the flow was seen. `true`: the flow is out of the path for good, and nothing else
    /// has to be done.
    #[inline]
    pub(crate) fn on_passing(&mut self, now: Instant) -> bool {
        let passes = self.state() == State::Pass && self.standing.heard().is_none();
        if passes {
            self.timers.on_seen(now);
        }
        passes
    }

    /// Data of G leaves as it comes, because the flow is out of the path. `true`: as in
    /// `Standing::on_data_past`.
    pub(crate) fn on_data_past(&mut self) -> bool {
        self.standing.on_data_past()
    }

    /// The result of the handshake's offers.
    #[must_use]
    pub const fn options(&self) -> &Negotiated {
        &self.options
    }

    /// The bytes held.
    #[must_use]
    pub const fn store(&self) -> &FlowStore {
        &self.store
    }

    /// Ranges that are held out of order.
    #[must_use]
    pub const fn out_of_order(&self) -> &Ranges {
        self.receiver.out_of_order()
    }

    /// In the arena, for a restart: its promises, or that it has none.
    #[must_use]
    pub const fn record(&self) -> Option<RecordId> {
        self.receiver.record()
    }

    /// While `On` or `Drain`: it gave its reservation back, since it was idle.
    #[must_use]
    pub const fn is_parked(&self) -> bool {
        self.receiver.is_parked()
    }

    /// It has a place for bytes of R, or of G.
    pub(super) fn has_place(&self) -> bool {
        !self.is_parked() || self.losses.relayed().is_some()
    }

    /// The value of the entry when the table is full.
    pub(crate) fn class(&self) -> Class {
        self.standing.class()
    }

    /// [`Self::class`], unless the flow is in the path, as it was before the event if `was_live`.
    #[inline]
    pub(crate) fn class_if_new(&self, was_live: bool) -> Option<Class> {
        (!was_live || !self.is_live()).then(|| self.class())
    }

    /// The acknowledgement number for R: every byte held, and R's FIN once G has it (INV-04). Late:
    /// what G has acknowledged (LIFE-12).
    #[inline]
    pub(super) fn ack_to_net(&self) -> u64 {
        if self.receiver.is_late() {
            return self.late_ack();
        }
        self.early_ack()
    }

    #[cold]
    fn late_ack(&self) -> u64 {
        let una = self.sender.una();
        self.receiver.late_ack(una, self.losses.is_sacked(una))
    }

    /// The same for a flow that is known not to acknowledge late.
    #[inline(always)]
    pub(super) fn early_ack(&self) -> u64 {
        if self.fin_acked_by_guest() { self.receiver.next() + 1 } else { self.receiver.next() }
    }

    /// G has acknowledged R's FIN.
    #[must_use]
    #[inline]
    pub fn fin_acked_by_guest(&self) -> bool {
        self.receiver.is_closed() && self.sender.una() > self.receiver.fin()
    }

    /// End of G's obligation: the stored bytes, and the FIN behind them.
    #[inline]
    pub(super) fn delivery_end(&self) -> u64 {
        self.receiver.stream().all()
    }

    /// Bytes H has acknowledged to R (or holds for it) that G has not.
    #[must_use]
    #[inline]
    pub fn held_bytes(&self) -> u64 {
        self.receiver.next().saturating_sub(self.sender.una())
    }

    /// G owes the acknowledgement of bytes that were acknowledged early (BST-01). `None`: of no
    /// such byte.
    pub(crate) fn owed_bytes(&self) -> Option<Owed> {
        let (una, shown) = (self.sender.una(), self.receiver.acks.sent());
        let owed = self.standing.is_live() && una < shown.min(self.receiver.next());
        owed.then(|| Owed { acknowledged: una, has_room: una < self.sender.edge() })
    }

    /// R's bytes are acknowledged late (LIFE-12).
    #[must_use]
    pub const fn acknowledges_late(&self) -> bool {
        self.receiver.is_late()
    }

    /// Bytes are held that are not to be acknowledged before G has done so: R is not told of them,
    /// nor of others behind them (LIFE-13).
    #[inline]
    pub(super) fn withholds(&self) -> bool {
        self.receiver.is_late() && self.ack_to_net() < self.receiver.next()
    }

    /// End of the bytes that R believes delivered, or may soon.
    #[inline(always)]
    pub(super) fn promised(&self) -> u64 {
        if self.receiver.is_late() { self.promised_late() } else { self.receiver.next() }
    }

    #[cold]
    fn promised_late(&self) -> u64 {
        self.receiver.acks.sent().min(self.receiver.next())
    }

    /// H owes no byte, FIN, RST or acknowledgement: a stop now loses nothing.
    #[must_use]
    #[inline(always)]
    pub fn owes_nothing(&self) -> bool {
        if !self.standing.is_live() {
            return !self.standing.is_guest_untold();
        }
        if self.receiver.makes_no_promise() {
            return self.owes_nothing_late();
        }
        self.held_bytes() == 0
            && self.sender.una() >= self.delivery_end()
            && self.receiver.acks.sent() >= self.early_ack()
            && !self.outbound.ack_to_guest_due()
    }

    /// The same for a flow that acknowledges late, because R repeats what it was not acknowledged;
    /// or behind whose bytes an RST of R waits, which is owed.
    #[cold]
    fn owes_nothing_late(&self) -> bool {
        self.sender.una() >= self.promised()
            && self.receiver.acks.sent() >= self.ack_to_net()
            && !self.receiver.reset_waits()
            && !self.outbound.ack_to_guest_due()
    }

    /// The flow owes nothing, and holds nothing, in order or not.
    pub(crate) fn holds_nothing(&self) -> bool {
        let empty = self.sender.una() >= self.delivery_end();
        self.owes_nothing() && self.receiver.out_of_order().is_empty() && empty
    }

    /// The same, but for bytes that G was given: R, which was not acknowledged them, repeats those
    /// that G lacks.
    fn has_handed_over(&self) -> bool {
        let una = self.sender.una();
        let given = self.sender.next() >= self.delivery_end()
            && (una >= self.losses.sacked_end() || una >= self.receiver.next());
        let late = self.receiver.is_late() && self.receiver.out_of_order().is_empty();
        self.holds_nothing() || (late && given && self.owes_nothing())
    }

    /// G's newest frame came from this MAC.
    pub(crate) fn is_of(&self, mac: [u8; 6]) -> bool {
        self.template.l2_to_guest().starts_with(&mac)
    }

    /// Each side has acknowledged the other's FIN.
    pub(super) fn is_closed(&self) -> bool {
        self.fin_acked_by_guest() && self.outbound.fin_acked()
    }

    /// The flow may be taken out of the path without anyone noticing.
    #[must_use]
    pub fn quiescent(&self) -> bool {
        if !self.standing.is_live() {
            return self.owes_nothing();
        }
        let closed = self.is_closed();
        if self.receiver.is_translated() && !closed {
            return false; // nobody else could translate
        }
        // R reads no ACK from beyond its window. G's ACKs come from the end of the bytes that it
        // has sent, or from within the room that it was shown.
        let edge = self.outbound.edge(self.options.shift_r);
        let within = self.losses.shown() <= edge && !self.is_ahead();
        !self.keeps_bytes()
            && self.has_handed_over()
            && (closed || (within && self.sender.edge() >= self.receiver.edge()))
    }

    /// The state on which the window for R depends, besides the receiver.
    #[inline]
    pub(super) fn terms(&self) -> Terms {
        self.terms_for(self.ack_to_net())
    }

    /// The same; `ack`: the acknowledgement number for R.
    #[inline(always)]
    pub(super) fn terms_for(&self, ack: u64) -> Terms {
        Terms {
            on: true,
            scale: self.options.shift_g,
            mss: self.options.mss_to_guest.into(),
            ack,
            guest_una: self.sender.una(),
            guest_edge: self.sender.edge(),
            guest_is_established: self.sender.is_established(),
            is_behind: self.options.distance != Distance::Local,
        }
    }

    /// The sender, and its arguments.
    #[inline]
    pub(super) fn sending(&mut self, cx: &FlowContext<'_, '_>) -> (&mut Sender, Sending<'_>) {
        let work = Sending {
            stream: self.receiver.stream(),
            mss: self.options.mss_to_guest.into(),
            running: cx.running(),
            reset_waits: self.receiver.reset_waits(),
            timers: &mut self.timers,
            losses: &mut self.losses,
        };
        (&mut self.sender, work)
    }

    /// Reads a word of every cache line that a segment needs, wherever in a line the flow begins:
    /// consecutive words here are at most 64 bytes apart.
    #[inline]
    pub(crate) fn fetch(&self) -> u64 {
        u64::from(self.standing.is_on())
            ^ u64::from(self.store.held_pages())
            ^ u64::from(self.timers.seen_at_s())
            ^ self.outbound.una()
            ^ self.receiver.next()
            ^ self.receiver.acks.sent()
            ^ self.sender.una()
            ^ u64::from(self.timestamps.recent())
            ^ u64::from(self.options.mss_to_guest)
            ^ u64::from(self.template.ttl_to_net())
    }

    /// Reads the data that the flow points to.
    #[inline]
    pub(crate) fn fetch_held(&self, arena: &Arena<'_>) -> u64 {
        self.store.fetch() ^ self.receiver.record().map_or(0, |record| arena.fetch(record))
    }

    /// The end of a batch of frames: the ACK that was put off is due (SNOOP-07).
    pub(crate) fn on_batch_end(&mut self, cx: &mut FlowContext<'_, '_>) {
        self.receiver.acks.on_left_list();
        if self.receiver.acks.is_due() && self.standing.is_live() {
            if self.receiver.is_late() {
                self.ack_late(cx);
            } else {
                self.ack_now(cx, None);
            }
            self.settle_drain(cx); // this ACK may have been the last thing owed
            if let Some(rec) = self.receiver.record() {
                // Nothing else may have moved.
                cx.arena.commit_edge_to_net(rec, self.receiver.edge());
            }
            self.note_owing(cx);
        } else {
            self.note_ack_left(cx); // a segment with data carried it
        }
    }

    /// H's newest ACK is ahead of G's ([`crate::tcp::lead`]).
    #[inline]
    pub(super) fn note_ack_left(&self, cx: &mut FlowContext<'_, '_>) {
        let sent = self.receiver.acks.sent();
        if sent > self.sender.una() {
            cx.ack_moments.on_sent(cx.now, cx.id, sent);
        }
    }

    /// The ACK that was put off, unless it would only repeat the last one.
    #[cold]
    fn ack_late(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.withholds() && self.ack_to_net() == self.receiver.acks.sent() {
            self.receiver.acks.forget_due();
        } else {
            self.ack_now(cx, None);
        }
    }

    /// The end of every event on a flow.
    pub(crate) fn after_event(&mut self, cx: &mut FlowContext<'_, '_>) {
        self.end_any(cx, true);
    }

    /// The same; `may_leave`: the flow may leave the path, and give its store back.
    fn end_any(&mut self, cx: &mut FlowContext<'_, '_>, may_leave: bool) {
        if self.standing.is_live() {
            self.wait_for_guest(cx, false);
            if may_leave {
                self.settle_drain(cx);
            }
        }
        self.want_delivery(cx);
        self.commit(cx, self.promised());
        self.commit_marks(cx);
        self.note_owing(cx);
        self.assert_order();
    }

    /// The end of an event in which a frame was made, or was not. For a flow that stays in `On`
    /// this moves only the bytes that it has sent, acknowledged and shown. Returns the wake-up
    /// time, as [`Self::wake_at`].
    #[inline(always)]
    pub(crate) fn end_making(&mut self, cx: &mut FlowContext<'_, '_>) -> Instant {
        if !self.standing.is_on() || self.outbound.fin_sent() {
            // The caller has yet to copy the frame's bytes from the store.
            self.end_any(cx, self.held_bytes() == 0);
            return self.wake_at(cx);
        }
        self.want_delivery(cx);
        self.commit(cx, self.promised());
        self.note_owing(cx);
        self.assert_order();
        self.wake_for_timers(cx)
    }

    /// The event of a frame ends.
    pub(super) fn end_frame(&mut self, cx: &mut FlowContext<'_, '_>, fate: Fate) -> Ended {
        self.after_event(cx);
        Ended { fate, wake_at: self.wake_at(cx) }
    }

    /// The earliest wall-clock instant at which a timer may be due; `Instant::MAX` if the wheel
    /// wakes the flow by then.
    #[inline]
    pub(crate) fn wake_at(&mut self, cx: &FlowContext<'_, '_>) -> Instant {
        let at = self.next_deadline(cx);
        self.timers.wake_at(at)
    }

    /// When the wheel wakes the flow, at the latest.
    pub(crate) const fn wakes_at(&self) -> Instant {
        self.timers.wakes_at()
    }

    /// As [`Self::wake_at`] for a flow whose idle time will end no earlier than it did before.
    #[inline(always)]
    pub(super) fn wake_for_timers(&mut self, cx: &FlowContext<'_, '_>) -> Instant {
        if self.timers.is_idle() {
            return Instant::MAX; // the wheel knows that end
        }
        let at = self.timers.next(cx.now, cx.running(), cx.vm.clock.stood_for(cx.now));
        self.timers.wake_at(at)
    }

    /// Counts the flow among those of its VM that owe something, or no longer.
    #[inline(always)]
    pub(super) fn note_owing(&mut self, cx: &mut FlowContext<'_, '_>) {
        let owing = !self.owes_nothing();
        if owing != self.owing {
            self.owing = owing;
            cx.vm.owing_flows = cx.vm.owing_flows.wrapping_add_signed(if owing { 1 } else { -1 });
        }
    }

    /// The flow is counted among those of its VM that owe something.
    pub(crate) const fn is_counted_as_owing(&self) -> bool {
        self.owing
    }

    /// The orders that always hold; called after every event in debug builds.
    pub(super) fn assert_order(&self) {
        if !self.standing.is_live() {
            return;
        }
        let (receiver, t) = (&self.receiver, self.terms());
        self.sender.assert_order(receiver.stream());
        self.outbound.assert_order();
        debug_assert!(receiver.acks.sent() <= t.ack, "acked beyond what is held (INV-03)");
        let backed = self.is_parked() || receiver.edge() <= receiver.reserved_edge(&t);
        debug_assert!(backed, "an edge nothing is reserved for (INV-06)");
        if let Some(relayed) = self.losses.relayed() {
            relayed.assert_order(self.outbound.una(), self.outbound.sent());
        }
        let held = self.store.held_pages();
        debug_assert!(held <= receiver.reserved_pages(), "more held than reserved");
    }

    /// In the path without more.
    #[cfg(test)]
    pub(crate) fn take_on(&mut self) {
        self.standing.take_on();
    }
}

/// An initial sequence number in the 64-bit space, well above zero.
#[must_use]
pub fn unwrapped_isn(isn: Seq) -> u64 {
    (1 << 32) | u64::from(isn.0)
}

const _: () = assert!(size_of::<Flow>() <= crate::limits::FLOW_STATE_BYTES);
