//! The predicted path: the two segments that nearly all traffic is made of, in a straight line.
//!
//! 1. R sends what is next in order, and with it nothing else that is new to the connection.
//! 2. G acknowledges more of what it was given, and says nothing else.
//!
//! **When it is taken.** `predicts_from_net` and `predicts_from_guest` have the conditions. They
//! change nothing: what they refuse takes the ordinary path (`from_net`, `from_guest`).
//!
//! **Why it is the same.** Each path is the ordinary one without the branches that its conditions
//! rule out: the same parts, in the same order. Only the store is written earlier, for a segment
//! that finds no page takes the ordinary way too.
//!
//! **How we know.** A test gives two engines the same frames, one with prediction and one without
//! (`Engine::set_prediction`), and compares them after each.

use crate::tcp::flow::Flow;
use crate::tcp::gates::CE;
use crate::tcp::receiver::Range;
use crate::tcp::{Ended, Fate, FlowContext, Frame};
use crate::wire::packet::TcpFlags;

impl Flow {
    /// The segment of R that was expected. `None`: it is another one, and nothing has changed.
    #[inline(always)]
    pub(super) fn on_predicted_from_net(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &Frame<'_>,
    ) -> Option<Ended> {
        let (tcp, ts) = (f.tcp, f.tcp.options.timestamps);
        let seq = tcp.seq.unwrap(self.receiver.next());
        let r = Range { seq, end: seq + u64::from(tcp.payload_len), fin: false };
        let known = self.outbound.is_known(tcp);
        let rec = self.receiver.record().filter(|_| self.predicts_from_net(cx, f, r, known))?;
        if !self.store.write(cx.arena, rec, seq, f.payload()) {
            return None;
        }
        self.outbound.on_seen();
        self.template.learn_from_net(f.ip);
        self.outbound.on_segment_from_net(tcp);
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
            let new = self.on_ack_from_net(seq, tcp);
            self.outbound.note_ack_to_guest(new);
        }
        let taken = self.receiver.on_expected(r);
        self.after_accepting(cx, r, taken);
        let waits = self.sender.is_waiting();
        Some(self.end_predicted(cx, waits))
    }

    /// It is next in order, wholly in the window, and has no more than data, an acknowledgement of
    /// what H saw G send, and the timestamps that were negotiated.
    #[inline]
    fn predicts_from_net(
        &self,
        cx: &FlowContext<'_, '_>,
        f: &Frame<'_>,
        r: Range,
        known: bool,
    ) -> bool {
        let tcp = f.tcp;
        let current = match (self.options.timestamps, tcp.options.timestamps) {
            (true, Some(ts)) => self.timestamps.is_current(cx.now, ts.tsval, 0),
            (expected, there) => !expected && there.is_none(),
        };
        cx.predicts
            && self.standing.is_on()
            && is_plain(f)
            && r.len() > 1 // one octet may be a probe
            && self.receiver.expects(r)
            && current
            && !(self.options.ecn && f.ip.tos & CE == CE)
            && (known || self.outbound.ack_in_range(tcp))
            && f.checksum_ok()
    }

    /// The acknowledgement of G that was expected. `None`: it is another segment, and nothing has
    /// changed.
    #[inline(always)]
    pub(super) fn on_predicted_from_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &Frame<'_>,
    ) -> Option<Ended> {
        let tcp = f.tcp;
        let ack = tcp.ack.unwrap(self.sender.una());
        let seq = tcp.seq.unwrap(self.outbound.newest());
        if !self.predicts_from_guest(cx, f, seq, ack) {
            return None;
        }
        self.template.learn_from_guest(f.l2(), f.ip);
        if let Some(ts) = tcp.options.timestamps {
            self.timestamps.on_tsval_from_guest(cx.now, ts.tsval);
        }
        self.sender.on_established();
        self.take_ack_from_guest(cx, tcp, ack);
        self.grow_buffer(cx);
        self.outbound.on_seen();
        self.outbound.on_absorbed();
        cx.vm.counters.acks_absorbed += 1;
        self.maybe_window_update(cx);
        Some(self.end_predicted(cx, true))
    }

    /// What [`Flow::after_event`] does for a flow that stays in `On`; `waits`: as it did before.
    #[inline(always)]
    fn end_predicted(&mut self, cx: &mut FlowContext<'_, '_>, waits: bool) -> Ended {
        let fate = Fate::Absorbed;
        if !self.standing.is_on() {
            return self.end_frame(cx, fate); // there was no budget to grow: it drains
        }
        if !waits {
            self.wait_for_guest(cx, false);
        }
        self.want_delivery(cx);
        self.commit(cx);
        self.note_owing(cx);
        self.assert_order();
        // The end of its idle time has only moved away from now: the wheel knows an earlier one.
        let wake_at = if self.timers.is_idle() { None } else { self.wake_for_timers(cx) };
        Ended { fate, wake_at }
    }

    /// It acknowledges more of the bytes that G was given, while nothing is known to be lost.
    #[inline]
    fn predicts_from_guest(
        &self,
        cx: &FlowContext<'_, '_>,
        f: &Frame<'_>,
        seq: u64,
        ack: u64,
    ) -> bool {
        let tcp = f.tcp;
        let timely = match (self.options.timestamps, tcp.options.timestamps) {
            (true, Some(_)) => !self.timestamps.is_guest_outdated(cx.now),
            (expected, there) => !expected && there.is_none(),
        };
        cx.predicts
            && self.standing.is_on()
            && is_plain(f)
            && tcp.payload_len == 0
            && (self.outbound.una()..=self.outbound.accepted()).contains(&seq)
            && ack > self.sender.una()
            && ack <= self.sender.sent()
            && ack <= self.receiver.next()
            && !self.receiver.has_fin()
            && !self.receiver.is_answer_awaited()
            && timely
    }
}

/// Nothing but ACK and perhaps PSH, and no option besides timestamps.
#[inline]
fn is_plain(f: &Frame<'_>) -> bool {
    let options = &f.tcp.options;
    f.tcp.flags.without(TcpFlags::PSH) == TcpFlags::ACK
        && options.understood()
        && options.sack.is_empty()
        && !f.ip.options
}

#[cfg(test)]
mod tests;
