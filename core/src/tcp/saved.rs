//! One saved form of a flow: the image, from which another engine goes on as this one would have.
//!
//! `docs/design/saved.md` says what it is for. An image has all of a flow but what `reset` lists
//! name ([`crate::wire::saved`]): places in lists, and what belongs to an arena. A flow for which H
//! sends has to be handed back before (FLOOD-32).
//!
//! The bytes that the flow holds follow its numbers: those in order, then the ranges behind these.
//! They are carried, because the other arena may be on another host.
//!
//! **Nothing that is read is believed.** A hostile image may say what a guest can do anyway: its
//! own connections may hang, end, or carry other bytes. [`Flow::is_possible`] refuses numbers that
//! this code could not have come to, since later code relies on their orders. The engine checks the
//! addresses, and takes the place from the VM's own budget.

use crate::flow::key::FlowKey;
use crate::limits::{
    ANSWERED_AHEAD_MAX, FLOW_BUFFER_MAX, PAYLOAD_MIN, RETRANSMISSIONS_MAX, T_IDLE, pages_for,
};
use crate::store::arena::Arena;
use crate::store::flow_store::FlowStore;
use crate::tcp::FlowContext;
use crate::tcp::flow::{Flow, State};
use crate::tcp::losses::Losses;
use crate::tcp::options::Negotiated;
use crate::tcp::outbound::Outbound;
use crate::tcp::receiver::Receiver;
use crate::tcp::sender::Sender;
use crate::tcp::state::{Standing, Why};
use crate::tcp::template::Template;
use crate::tcp::timers::Timers;
use crate::tcp::timestamps::TimestampState;
use crate::wire::packet::{Eth, IpVersion, Seq};
use crate::wire::saved::{BadImage, NUMBER_MAX, Reader, Saved, Writer};

/// Unwrapped numbers begin here (COM-01).
const NUMBER_MIN: u64 = 1 << 32;
/// The largest window that a window field can show.
const WINDOW_MAX: u64 = (u16::MAX as u64) << 14;
/// Serial comparison needs this.
const DISTANCE_MAX: u64 = 1 << 31;

/// A flow that was read from an image, without a place in this engine.
#[derive(Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) key: FlowKey,
    pub(crate) flow: Flow,
    /// It had a record, and needs one here.
    pub(crate) has_record: bool,
    /// The bytes of [`Flow::held`].
    bytes: &'a [u8],
}

impl Flow {
    /// Writes the flow and the bytes that it holds.
    pub(crate) fn saved(&self, key: &FlowKey, arena: &Arena<'_>, image: &mut Writer) {
        let Self {
            standing,
            options,
            receiver,
            store, // its bytes, below
            sender,
            outbound,
            losses,
            timestamps,
            template,
            timers,
            owing: _, // the other engine counts
        } = self;
        key.saved(image);
        standing.saved(image);
        options.saved(image);
        receiver.saved(image);
        receiver.record().is_some().saved(image);
        sender.saved(image);
        outbound.saved(image);
        losses.saved(image);
        timestamps.saved(image);
        template.saved(image);
        timers.saved(image);
        for (from, to) in self.held() {
            store.slices(arena, from, to).for_each(|piece| image.put(piece));
        }
    }

    /// The ranges of R's stream whose bytes are in the store.
    fn held(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        // Of an opening flow the first number is that of R's SYN.
        let una = self.sender.una() + u64::from(self.state() == State::Opening);
        let next = self.receiver.next();
        let in_order = (self.is_live() && una < next).then_some((una, next));
        in_order.into_iter().chain(self.receiver.out_of_order().iter())
    }

    /// H sends for G, so there is more of the flow than an image has.
    pub(crate) fn is_sent_for(&self) -> bool {
        self.losses.relayed().is_some()
    }

    /// Store pages that it needs.
    pub(crate) fn place_pages(&self) -> u64 {
        self.receiver.reserved_pages().into()
    }

    /// The layers below TCP of its frames, if they are such ones of this key.
    pub(crate) fn eth(&self, key: &FlowKey) -> Option<Eth> {
        let l2 = self.template.l2_to_net();
        let eth = Eth::parse(l2).ok()?;
        let ethertype = if key.version == IpVersion::V4 { 0x0800 } else { 0x86dd };
        let fits = usize::from(eth.len) == l2.len() && eth.vlan.key() == key.vlan;
        (fits && eth.ethertype == ethertype).then_some(eth)
    }

    /// This code can have come to these numbers, or goes on from them without harm.
    fn is_possible(&self, has_record: bool) -> bool {
        let (receiver, has_place) = (&self.receiver, self.receiver.reserved_pages() > 0);
        let numbers = [
            receiver.next(),
            receiver.edge(),
            receiver.acks.sent(),
            self.sender.una(),
            self.outbound.una(),
            self.outbound.sent(),
        ];
        let numbered = numbers.iter().all(|n| (NUMBER_MIN..=NUMBER_MAX / 2).contains(n));
        let counted =
            self.sender.retransmissions().max(self.outbound.absorbed_acks()) <= RETRANSMISSIONS_MAX;
        let placed = match self.state() {
            State::Opening | State::On | State::Drain => self.has_possible_place(has_record),
            State::Abort => !has_place && receiver.out_of_order().is_empty(),
            State::Handshake | State::Pass | State::Translated => {
                !has_place && !has_record && receiver.out_of_order().is_empty()
            }
        };
        let ordered = match self.state() {
            State::Pass | State::Translated => true,
            State::Abort => receiver.acks.sent() <= self.early_ack(), // its RSTs show that
            State::Handshake | State::Opening | State::On | State::Drain => self.is_in_order(),
        };
        numbered && counted && placed && ordered && self.has_possible_translation()
    }

    /// G's numbers are known where they are needed, and nowhere else.
    fn has_possible_translation(&self) -> bool {
        let is_translated = self.receiver.is_translated();
        let is_known = self.losses.translated().is_some();
        match self.state() {
            State::Opening => {
                let (una, isn) = (self.sender.una(), self.standing.isn_of_net());
                let is_at_syn = self.sender.edge() == una + 1 && isn == Some(Seq::wrap(una));
                is_translated && !is_known && is_at_syn
            }
            State::On | State::Drain | State::Translated => is_translated == is_known,
            State::Abort => is_translated || !is_known,
            State::Handshake | State::Pass => !is_translated && !is_known,
        }
    }

    /// Bytes have reserved places, or there are none (INV-06).
    fn has_possible_place(&self, has_record: bool) -> bool {
        let (receiver, options) = (&self.receiver, &self.options);
        let (pages, buffer) = (self.place_pages(), u64::from(receiver.buffer_bytes()));
        let segments = options.mss_to_guest.min(options.mss_to_net) >= PAYLOAD_MIN;
        let placed = if pages > 0 {
            let slack = 1 << options.shift_g;
            has_record
                && buffer <= FLOW_BUFFER_MAX
                && (pages_for(buffer + slack)..=pages_for(FLOW_BUFFER_MAX) + 1).contains(&pages)
                && receiver.edge() <= self.sender.una() + buffer + slack
        } else {
            let empty = receiver.out_of_order().is_empty();
            empty && buffer == 0 && receiver.next() <= self.sender.una()
        };
        segments && placed
    }

    /// The orders that [`Flow::assert_order`] asserts, and those that it takes for granted.
    fn is_in_order(&self) -> bool {
        let Self { receiver, sender, outbound, losses, .. } = self;
        let all = receiver.stream().all();
        let (una, ranges) = (sender.una(), receiver.out_of_order());
        let first = ranges.iter().next().map_or(u64::MAX, |(from, _)| from);
        let last = ranges.max_end().unwrap_or(0);
        let inbound = una <= sender.next()
            && sender.next() <= sender.sent()
            && sender.sent() <= all
            && (una..=una + WINDOW_MAX).contains(&sender.edge())
            && receiver.edge() - receiver.next().min(una) <= DISTANCE_MAX
            && receiver.acks.sent() <= self.early_ack()
            && receiver.next() < first
            && last <= receiver.edge().min(receiver.fin())
            && (!receiver.has_fin() || receiver.fin() <= receiver.edge())
            && receiver.passed() <= receiver.edge() + ANSWERED_AHEAD_MAX;
        let outward = outbound.una() <= outbound.sent()
            && outbound.sent() - outbound.una() <= DISTANCE_MAX
            && u64::from(outbound.window_max()) <= WINDOW_MAX;
        inbound && outward && losses.is_possible(una, sender.sent())
    }
}

impl<'a> Arrival<'a> {
    /// Reads what [`Flow::saved`] has written, for the guest of `port`.
    ///
    /// # Errors
    /// See [`BadImage`].
    pub(crate) fn of_saved(image: &mut Reader<'a>, port: u16) -> Result<Self, BadImage> {
        let key = FlowKey { port, ..FlowKey::of_saved(image)? };
        let standing = Standing::of_saved(image)?;
        let options = Negotiated::of_saved(image)?;
        let receiver = Receiver::of_saved(image)?;
        let has_record = bool::of_saved(image)?;
        let flow = Flow {
            standing,
            options,
            receiver,
            store: FlowStore::default(), // import fills it
            sender: Sender::of_saved(image)?,
            outbound: Outbound::of_saved(image)?,
            losses: Losses::of_saved(image)?,
            timestamps: TimestampState::of_saved(image)?,
            template: Template::of_saved(image)?,
            timers: Timers::of_saved(image)?,
            owing: false, // import counts
        };
        if !flow.is_possible(has_record) {
            return Err(BadImage::Impossible("Flow"));
        }
        let held: u64 = flow.held().map(|(from, to)| to - from).sum();
        let bytes = image.take(usize::try_from(held).map_err(|_| BadImage::Damaged)?)?;
        Ok(Self { key, flow, has_record, bytes })
    }

    /// Takes the place that the flow had, and its bytes into it. `false`: there is no such place,
    /// and the flow is to be reset.
    pub(crate) fn take_place(
        flow: &mut Flow,
        cx: &mut FlowContext<'_, '_>,
        has_record: bool,
        bytes: &[u8],
    ) -> bool {
        flow.count_bound(cx);
        let pages = flow.place_pages();
        if pages > 0 && !cx.vm.reserve(pages) {
            flow.receiver.forget_place();
            return false;
        }
        // The record promises nothing before the bytes are there (INV-03).
        if has_record && !flow.take_record_for(cx, flow.sender.una().min(flow.receiver.next())) {
            return false;
        }
        let mut rest = bytes;
        let held: Vec<_> = flow.held().collect();
        for (from, to) in held {
            let Some(rec) = flow.receiver.record() else { return false };
            let Some((piece, later)) = rest.split_at_checked(super::index(to - from)) else {
                return false;
            };
            if !flow.store.write(cx.arena, rec, from, piece) {
                return false;
            }
            rest = later;
        }
        flow.commit(cx, flow.promised());
        flow.commit_marks(cx);
        flow.timers.bound_wake_up(cx.now + T_IDLE.saturating_mul(2));
        flow.note_owing(cx);
        true
    }

    /// The bytes of [`Self::take_place`].
    pub(crate) const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl Flow {
    /// A flow of an image finds no place: what was promised ends (INV-21).
    pub(crate) fn on_no_place(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.is_live() {
            self.abort_both(cx, Why::Restart);
        }
    }

    /// It stood in the other engine's ACK list.
    pub(crate) fn enter_ack_list(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.receiver.acks.enter_list() {
            cx.ack_list.push(cx.id);
        }
    }

    /// It waited for its turn to be delivered in the other engine.
    pub(crate) fn want_delivery_again(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.sender.enter_list() {
            cx.vm.ready.push_back(cx.id);
        }
    }
}

#[cfg(test)]
mod tests;
