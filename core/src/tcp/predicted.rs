//! The predicted path: the segments that nearly all traffic is made of, in a straight line.
//!
//! 1. R sends the next bytes in order, and nothing else that is new to the connection.
//! 2. G acknowledges more of its bytes, and says nothing else.
//! 3. Where H sends for G (congestion offload): G hands over the next bytes in order, and R
//!    acknowledges some of them.
//!
//! **Conditions.** The frame is [`Plain`], so it need not be parsed. `predicts_from_net` and
//! `predicts_from_guest` have the other conditions. They change nothing: a segment that they refuse
//! is parsed and takes the ordinary path (`from_net`, `from_guest`).
//!
//! **Equality.** Each path is the ordinary one without the branches that its conditions rule out:
//! the same parts, in the same order. Only the store is written earlier, because a segment that
//! finds no page takes the ordinary path too. There is one exception: where H sends for G
//! (congestion offload), an acknowledgement that R has given before does not reach H's sender here,
//! and shows G no more room. On the ordinary path it is one that moves nothing. Seed 12 shows it.
//!
//! **Evidence.** A test gives two engines the same frames, one with prediction and one without
//! (`Engine::set_prediction`), and compares them after each.

use crate::tcp::flow::Flow;
use crate::tcp::gates::CE;
use crate::tcp::outbound::Said;
use crate::tcp::receiver::Range;
use crate::tcp::{Ended, Fate, FlowContext};
use crate::wire::packet::{SackBlocks, TcpFlags};
use crate::wire::plain::Plain;

impl Flow {
    /// A frame of R, whose layer-2 header has `l2_len` bytes, if it is the expected one. `None`: it
    /// is another one, and nothing has changed. `vouched_for`: its TCP checksum need not be
    /// verified.
    #[inline(never)]
    pub(crate) fn on_expected_from_net(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        frame: &[u8],
        l2_len: usize,
        vouched_for: bool,
    ) -> Option<Ended> {
        let p = &Plain::read(frame, l2_len)?;
        if p.payload().len() <= 1 {
            // One byte may be a probe.
            return if p.payload().is_empty() {
                self.on_expected_ack(cx, p, vouched_for)
            } else {
                None
            };
        }
        let (seq, ts) = (self.receiver.next(), p.timestamps());
        let r = Range { seq, end: seq + p.payload().len() as u64, fin: false };
        let known = self.outbound.is_known(p.ack(), p.window());
        let expected =
            self.predicts_from_net(cx, p, r, known) && (vouched_for || p.is_checksum_ok());
        let rec = self.receiver.record().filter(|_| expected && !self.is_parked())?;
        if !self.store.write(cx.arena, rec, seq, p.payload()) {
            return None;
        }
        self.timers.on_seen(cx.now);
        self.outbound.on_seen();
        self.template.learn_from_net(p.tos(), p.ttl(), p.flow_label());
        self.outbound.on_segment_from_net(TcpFlags::ACK);
        if let Some(ts) = ts {
            if seq <= self.receiver.acks.sent() {
                self.timestamps.on_recent(cx.now, ts.tsval);
            }
            if known {
                self.timestamps.on_echo_from_net(ts.tsecr);
            }
            self.timestamps.on_tsval_from_net(ts.tsval);
        }
        if known {
            self.outbound.on_known_ack(seq);
        } else {
            let new = self.on_ack_from_net(seq, p.ack(), p.window(), ts, &SackBlocks::default());
            self.outbound.note_ack_to_guest(new);
        }
        Some(self.after_expected(cx, r))
    }

    /// The acknowledgement of bytes that H sends for G.
    #[inline(never)] // without congestion offload there is none
    fn on_expected_ack(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        p: &Plain<'_>,
        vouched_for: bool,
    ) -> Option<Ended> {
        let expected = cx.vm.congestion_offload
            && self.predicts_ack_from_net(cx, p)
            && (vouched_for || p.is_checksum_ok());
        if !expected {
            return None;
        }
        self.timers.on_seen(cx.now);
        self.outbound.on_seen();
        self.template.learn_from_net(p.tos(), p.ttl(), p.flow_label());
        let (seq, timestamps) = (self.receiver.next(), p.timestamps());
        if let Some(ts) = timestamps
            && seq <= self.receiver.acks.sent()
        {
            self.timestamps.on_recent(cx.now, ts.tsval);
        }
        self.outbound.on_segment_from_net(TcpFlags::ACK);
        let (ack, window, sack) = (p.ack(), p.window(), &SackBlocks::default());
        let said = Said { seq, ack, window, timestamps, sack, ece: false, bare: true };
        let new = self.on_said(cx, &said);
        if let Some(ts) = timestamps {
            self.timestamps.on_tsval_from_net(ts.tsval);
        }
        self.outbound.note_ack_to_guest(new);
        cx.vm.counters.acks_hidden += u64::from(!new);
        Some(self.end_predicted(cx, Fate::Absorbed, true))
    }

    /// It is at the next number, acknowledges bytes that H has sent, though perhaps none that are
    /// new, and contains nothing else.
    #[inline(always)]
    fn predicts_ack_from_net(&self, cx: &FlowContext<'_, '_>, p: &Plain<'_>) -> bool {
        cx.predicts
            && self.keeps_bytes()
            && self.standing.is_on()
            && self.receiver.is_plain()
            && self.receiver.is_next(p.seq())
            && !self.receiver.has_fin()
            && self.is_current(cx, p)
            && self.outbound.ack_in_range(p.ack())
            && !self.outbound.is_old(p.ack())
            && p.is_header_ok()
    }

    /// It has timestamps if they were negotiated, and they are no older than the newest.
    #[inline(always)]
    fn is_current(&self, cx: &FlowContext<'_, '_>, p: &Plain<'_>) -> bool {
        match (self.options.timestamps, p.timestamps()) {
            (true, Some(ts)) => self.timestamps.is_current(cx.now, ts.tsval, 0),
            (expected, there) => !expected && there.is_none(),
        }
    }

    #[inline(never)] // or the compiler has too few registers for both halves
    fn after_expected(&mut self, cx: &mut FlowContext<'_, '_>, r: Range) -> Ended {
        let taken = self.receiver.on_expected(r);
        self.after_accepting(cx, r, taken);
        let waits = self.sender.is_waiting();
        self.end_predicted(cx, Fate::Absorbed, waits)
    }

    /// It is next in order, wholly in the window, and contains only data, an acknowledgement of
    /// bytes that H saw G send, and the timestamps that were negotiated.
    #[inline(always)]
    fn predicts_from_net(
        &self,
        cx: &FlowContext<'_, '_>,
        p: &Plain<'_>,
        r: Range,
        known: bool,
    ) -> bool {
        cx.predicts
            && self.standing.is_on()
            && self.receiver.is_next(p.seq())
            && self.receiver.expects(r)
            && self.is_current(cx, p)
            && !(self.options.ecn && p.tos() & CE == CE)
            && (known || (self.outbound.ack_in_range(p.ack()) && self.losses.relayed().is_none()))
            && p.is_header_ok()
    }

    /// A frame of G, if it is the one that was expected: an acknowledgement, or data that H sends
    /// for it. `None`: it is another one, and nothing has changed. `vouched_for`: as above.
    #[inline(never)]
    pub(crate) fn on_expected_from_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        frame: &[u8],
        l2_len: usize,
        vouched_for: bool,
    ) -> Option<Ended> {
        let p = &Plain::read(frame, l2_len)?;
        if !p.payload().is_empty() {
            return self.on_expected_data(cx, p, vouched_for);
        }
        let ack = p.ack().unwrap(self.sender.una());
        let seq = p.seq().unwrap(self.outbound.sent());
        let expected = self.predicts_from_guest(cx, p, ack)
            && (self.outbound.una()..=self.outbound.sent()).contains(&seq)
            && ack > self.sender.una();
        if !expected {
            return None;
        }
        self.learn_from_guest(cx, p);
        self.take_ack_from_guest(cx, ack, p.window(), true, None);
        self.grow_buffer(cx);
        self.outbound.on_seen();
        self.outbound.on_absorbed();
        cx.vm.counters.acks_absorbed += 1;
        self.relay_room(cx);
        Some(self.end_predicted(cx, Fate::Absorbed, true))
    }

    #[inline(always)]
    fn learn_from_guest(&mut self, cx: &FlowContext<'_, '_>, p: &Plain<'_>) {
        self.timers.on_seen(cx.now);
        self.template.learn_from_guest(p.l2(), p.tos(), p.ttl(), p.flow_label());
        if let Some(ts) = p.timestamps() {
            self.timestamps.on_tsval_from_guest(cx.now, ts.tsval);
        }
    }

    /// The next data that G hands over.
    #[inline(never)] // without congestion offload there is none
    fn on_expected_data(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        p: &Plain<'_>,
        vouched_for: bool,
    ) -> Option<Ended> {
        let ack = p.ack().unwrap(self.sender.una());
        let window = u64::from(p.window()) << self.options.shift_g;
        let expected = self.expects_handed(cx, p.seq(), p.payload().len() as u64)
            && self.predicts_from_guest(cx, p, ack)
            && ack >= self.sender.una()
            && window <= self.receiver.buffer_bytes().into() // or the buffer is to follow
            && p.is_header_ok()
            && (vouched_for || p.is_checksum_ok());
        if !expected {
            return None;
        }
        self.learn_from_guest(cx, p);
        self.note_ttl_of_data(cx, p.ttl());
        let known = ack == self.sender.una() && ack + window == self.sender.edge();
        if !known || self.timers.is_probing() {
            self.take_ack_from_guest(cx, ack, p.window(), false, None);
        }
        self.grow_buffer(cx);
        let fate = self.take_expected(cx, p.payload())?;
        self.relay_room(cx);
        Some(self.end_predicted(cx, fate, true))
    }

    /// It acknowledges no more than the bytes that G was given, and has no more than an
    /// acknowledgement, data, and the timestamps that were negotiated.
    #[inline(always)]
    fn predicts_from_guest(&self, cx: &FlowContext<'_, '_>, p: &Plain<'_>, ack: u64) -> bool {
        let timely = match (self.options.timestamps, p.timestamps()) {
            (true, Some(_)) => !self.timestamps.is_guest_outdated(cx.now),
            (expected, there) => !expected && there.is_none(),
        };
        cx.predicts
            && self.standing.is_on()
            && ack <= self.sender.sent()
            && ack <= self.receiver.next()
            && self.sender.is_established()
            && !self.receiver.has_fin()
            && self.receiver.is_plain()
            && timely
    }

    /// [`Flow::after_event`] for a flow that stays in `On`; `waits`: as it did before.
    #[inline(always)]
    fn end_predicted(&mut self, cx: &mut FlowContext<'_, '_>, fate: Fate, waits: bool) -> Ended {
        if !self.standing.is_on() {
            return self.end_frame(cx, fate); // there was no budget to grow: it drains
        }
        if !waits {
            self.wait_for_guest(cx, false);
        }
        self.want_delivery(cx);
        self.commit(cx, self.receiver.next());
        self.note_owing(cx);
        self.assert_order();
        // The end of its idle time has only moved away from now.
        Ended { fate, wake_at: self.wake_for_timers(cx) }
    }
}

#[cfg(test)]
pub(super) mod tests;
