//! Segments from R: accepted as strictly as G's kernel would, stored, acknowledged
//! (SNOOP-01 to SNOOP-19, SNOOP-35 to SNOOP-37; the order is that of SNOOP-01).

use crate::drops::DropReason;
use crate::limits;
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::gates::CE;
use crate::tcp::outbound::Said;
use crate::tcp::receiver::{Place, Range, Taken};
use crate::tcp::{Ended, Fate, FlowContext, Frame};
use crate::wire::packet::{SackBlocks, Seq, Tcp, TcpFlags, Timestamps};

impl Flow {
    /// A frame of R, in whatever state the flow is. A SYN comes here only if H answers it.
    #[inline(never)]
    pub(crate) fn on_frame_from_net(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
    ) -> Ended {
        self.timers.on_seen(cx.now);
        let stands = self.hear_of_end(cx);
        let fate = match self.state() {
            _ if stands => Fate::Drop(DropReason::PortDown),
            State::Handshake => self.on_handshake_from_net(cx, f),
            State::Opening => self.on_opening_from_net(cx, f),
            State::Translated if f.checksum_ok() => Fate::Pass,
            State::Translated => Fate::Drop(DropReason::BadChecksum),
            State::On | State::Drain => self.on_segment_from_net(cx, f),
            State::Pass => return self.on_passing_from_net(cx, f),
            State::Abort => self.on_segment_in_abort(cx, false, f.tcp),
        };
        let fate =
            if self.receiver.is_translated() { self.end_translated(cx, f, fate) } else { fate };
        self.end_frame(cx, fate)
    }

    /// A segment from R while `On` or `Drain`.
    pub(super) fn on_segment_from_net(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
    ) -> Fate {
        let tcp = f.tcp;
        if !f.checksum_ok() {
            return Fate::Drop(DropReason::BadChecksum);
        }
        if self.receiver.is_asking() {
            return Fate::Drop(self.on_net_while_asking(cx, f));
        }
        if let Err(reason) = self.paws(cx, f) {
            return Fate::Drop(reason);
        }
        let seq = tcp.seq.unwrap(self.receiver.next());
        let end = seq + u64::from(tcp.payload_len);
        let range = Range { seq, end, fin: tcp.flags.contains(TcpFlags::FIN) };
        if tcp.flags.contains(TcpFlags::RST) {
            return self.on_rst_from_net(cx, seq);
        }
        if tcp.flags.contains(TcpFlags::SYN) {
            if self.receiver.reset_waits() {
                return Fate::Drop(DropReason::SynOnLiveFlow); // its turn comes behind the RST
            }
            if tcp.flags.contains(TcpFlags::ACK) {
                self.challenge_ack(cx);
            } else {
                // RFC 5961 section 4: R began anew, and learns that G has not.
                self.rate_limited_ack(cx);
            }
            return Fate::Drop(DropReason::SynOnLiveFlow);
        }
        if !tcp.flags.contains(TcpFlags::ACK) {
            return Fate::Drop(DropReason::BadFlags);
        }
        if let Some(fate) = self.out_of_window(cx, f, range) {
            return fate;
        }
        if self.losses.past() > 0 {
            self.believe(tcp.ack);
        }
        if !self.outbound.ack_in_range(tcp.ack)
            && let Some(fate) = self.on_unseen(cx, f, is_bare(f, range))
        {
            return fate;
        }
        self.on_valid_segment(cx, f, range)
    }

    /// A segment that G would take as well (INV-25).
    fn on_valid_segment(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
        range: Range,
    ) -> Fate {
        let tcp = f.tcp;
        self.outbound.on_seen();
        self.template.learn_from_net(f.ip.tos, f.ip.ttl, f.ip.flow_label);
        self.update_ts_recent(cx, tcp, range.seq);
        if self.options.ecn {
            let marked = f.ip.tos & CE == CE && range.len() > 0;
            self.receiver.on_congestion_marks(tcp.flags.contains(TcpFlags::CWR), marked);
        }
        let hidden = self.keeps_bytes();
        let marks = if self.losses.relayed().is_some() { TcpFlags::ACK } else { tcp.flags };
        self.outbound.on_segment_from_net(marks);
        let new = self.on_ack_of_segment(cx, range, tcp);
        if needs_verbatim(f) && self.state() == State::Opening {
            return self.refuse(cx, range, DropReason::Draining); // it is for G to read
        } else if needs_verbatim(f) {
            let urgent = tcp.flags.contains(TcpFlags::URG);
            self.drain(if urgent { Why::Urgent } else { Why::Options });
            if !is_bare(f, range) {
                self.outbound.note_ack_to_guest(new);
                return self.pass_data(cx, f, range);
            } // else its number is to be one that G takes (K-01), as of any ACK
        }
        if range.len() == 0 && !range.fin {
            // Pure ACKs are information for G's own sending: 1:1 (COM-30), old ones aside (INV-07).
            if self.outbound.is_old_ack(tcp) {
                return Fate::Drop(DropReason::Duplicate);
            }
            if hidden {
                // H sends for G: G is told news, but no losses (FLOOD-09).
                if let Some(ts) = tcp.options.timestamps {
                    self.timestamps.on_tsval_from_net(ts.tsval);
                }
                self.outbound.note_ack_to_guest(new);
                cx.vm.counters.acks_hidden += u64::from(!new);
                return Fate::Absorbed;
            }
            return self.pass_ack(f);
        }
        self.outbound.note_ack_to_guest(new);
        if let Some(ts) = tcp.options.timestamps {
            self.timestamps.on_tsval_from_net(ts.tsval);
        }
        self.accept(cx, f, range)
    }

    /// Takes the new bytes within the window into the store, then schedules the ACK (SNOOP-06).
    fn accept(&mut self, cx: &mut FlowContext<'_, '_>, f: &mut Frame<'_>, range: Range) -> Fate {
        let behind_fin =
            self.receiver.is_closed() && range.seq >= self.receiver.fin() && range.len() > 0;
        if self.receiver.reset_waits() || behind_fin {
            self.owe_ack(cx); // data after FIN or RST is nobody's (SNOOP-14, SNOOP-15)
            return Fate::Drop(DropReason::OutOfWindow);
        }
        if range.len() > 0 && !self.wake(cx) {
            return self.pass_unheld(cx, f, range);
        }
        let taken = self.receiver.on_data(range, f.payload(), &mut self.store, cx.arena);
        let taken = match taken {
            Ok(taken) => taken,
            Err(reason) => return self.refuse(cx, range, reason),
        };
        if self.receiver.holds_more(self.sender.una(), limits::PROMISED_BEHIND_MAX) {
            self.acknowledge_late();
        }
        if self.receiver.is_late() {
            self.after_accepting_late(cx, range, taken);
        } else {
            self.after_accepting(cx, range, taken);
        }
        Fate::Absorbed
    }

    /// LIFE-13: bytes behind those that are not acknowledged cause an ACK only if R repeats them.
    fn after_accepting_late(&mut self, cx: &mut FlowContext<'_, '_>, range: Range, taken: Taken) {
        if self.receiver.is_wide() {
            self.note_filled();
        }
        self.grow_buffer(cx);
        if taken.duplicate.is_some() {
            self.note_repeated(range.seq);
        }
        let is_silent = self.withholds() || self.awaits_copies();
        if range.len() > 0 && (taken.duplicate.is_some() || !is_silent) {
            self.ack_now(cx, taken.duplicate);
        }
    }

    /// R repeats bytes from `seq` on. If they are the first that are not acknowledged, R has waited
    /// for that long enough, whatever it was SACKed behind them.
    fn note_repeated(&mut self, seq: u64) {
        if self.receiver.is_late() && seq <= self.receiver.acks.sent() {
            self.losses.forget_sacked();
            self.losses.forget(self.sender.una());
        }
    }

    /// The buffer grows, and an ACK for data is due: now, or at the end of the batch.
    #[inline(always)]
    pub(super) fn after_accepting(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        range: Range,
        taken: Taken,
    ) {
        cx.vm.counters.early_acked_bytes += taken.advanced;
        if cx.vm.wanting.is_some() && taken.advanced > 0 {
            self.want_core(cx, true);
        }
        self.note_filled();
        self.grow_buffer(cx);
        if self.receiver.has_used_half() {
            self.grow_ahead(cx);
        }
        if range.len() > 0 {
            self.timers.on_window_shown();
            let mss = u64::from(self.options.mss_to_guest);
            if self.receiver.acks.on_segment(range.len(), mss, taken.plain) {
                self.ack_now(cx, taken.duplicate);
            } else {
                self.owe_ack(cx);
            }
        }
    }

    /// R may have filled its window, except for a segment, or a unit of the field.
    #[inline(always)]
    fn note_filled(&mut self) {
        let mss = u64::from(self.options.mss_to_guest);
        self.receiver.note_filled(mss.max(1 << self.options.shift_g));
    }

    /// RFC 7323 section 5: a segment with an old timestamp is not R's. One without a timestamp is
    /// (SNOOP-04).
    fn paws(&mut self, cx: &mut FlowContext<'_, '_>, f: &Frame<'_>) -> Result<(), DropReason> {
        let tcp = f.tcp;
        let Some(ts) = tcp.options.timestamps.filter(|_| self.options.timestamps) else {
            return Ok(());
        };
        if tcp.flags.contains(TcpFlags::RST) {
            return Ok(());
        }
        if !self.timestamps.is_current(cx.now, ts.tsval, limits::PAWS_TICKS) {
            if let Some(judged) = self.on_overtaken_ack(cx, f, ts.tsval) {
                return judged;
            }
            match tcp.payload_len {
                0 => self.challenge_ack(cx),
                // It asks whether G is there: H does not answer for a silent G (INV-19).
                1 if !cx.vm.clock.alive_within(cx.now, limits::T_PAUSED) => {}
                _ => self.ack_now(cx, None),
            }
            return Err(DropReason::Paws);
        }
        Ok(())
    }

    /// A bare ACK with an old timestamp, as when a path reorders. It brings nothing and causes no
    /// answer, or it is a duplicate (`tcp_disordered_ack_check` of Linux 6.18).
    fn on_overtaken_ack(
        &self,
        cx: &FlowContext<'_, '_>,
        f: &Frame<'_>,
        tsval: u32,
    ) -> Option<Result<(), DropReason>> {
        let (tcp, next) = (f.tcp, self.receiver.next());
        let content = TcpFlags::SYN.union(TcpFlags::FIN);
        if tcp.payload_len > 0
            || tcp.flags.intersects(content)
            || !tcp.flags.contains(TcpFlags::ACK)
        {
            return None;
        }
        if tcp.seq.unwrap(next) < next {
            return Some(Err(DropReason::Paws));
        }
        let is_duplicate = tcp.seq == Seq::wrap(next)
            && self.outbound.is_known(tcp.ack, tcp.window)
            && self.timestamps.is_current(cx.now, tsval, limits::PAWS_REPLAY);
        is_duplicate.then_some(Ok(()))
    }

    /// SNOOP-15: an RST that is not exact and yet in the window is challenged.
    fn on_rst_from_net(&mut self, cx: &mut FlowContext<'_, '_>, seq: u64) -> Fate {
        if self.receiver.takes_reset(seq) {
            if self.receiver.on_reset() {
                self.sender.on_reset_waits(cx.running()); // T_rst begins
                self.hand_back(cx); // R takes no more
            }
            return Fate::Absorbed;
        }
        if self.receiver.is_in_window(seq) {
            self.challenge_ack(cx);
        }
        Fate::Drop(DropReason::BadRst)
    }

    /// Lies outside the window or brings nothing new (SNOOP-02, SNOOP-11, SNOOP-35 to SNOOP-37).
    fn out_of_window(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
        r: Range,
    ) -> Option<Fate> {
        let place = self.receiver.place(r);
        // R probes a window that it sees shut. H does not answer for a silent G (LIFE-05), not even
        // by taking the octet where something is left of the field's unit.
        let probe = r.len() == 1 || (r.len() > 0 && place == Place::Outside);
        let unanswered =
            probe && self.window_shut() && !cx.vm.clock.alive_within(cx.now, limits::T_PAUSED);
        match place {
            Place::Keepalive => {
                // For R, whose FIN is not acknowledged, this is its next number, or its edge.
                if r.seq >= self.receiver.acks.sent() {
                    self.update_ts_recent(cx, f.tcp, r.seq);
                    if self.outbound.ack_in_range(f.tcp.ack) {
                        let new = self.on_ack_of_segment(cx, r, f.tcp);
                        self.outbound.note_ack_to_guest(new);
                    }
                }
                let fate = self.on_keepalive_from_net(cx, f);
                return Some(if fate == Fate::Pass {
                    fate
                } else {
                    self.answer_guest(cx, f, r, fate)
                });
            }
            Place::Old => return Some(self.on_old_segment(cx, f, r)),
            Place::Window if !unanswered => return None,
            Place::Outside if r.len() == 0 => {
                if self.is_repeating(r)
                    && !self.outbound.ack_in_range(f.tcp.ack)
                    && let Some(fate) = self.on_unseen(cx, f, is_bare(f, r))
                {
                    return Some(fate);
                }
                self.challenge_ack(cx);
                return Some(self.answer_guest(cx, f, r, Fate::Drop(DropReason::OutOfWindow)));
            }
            Place::Outside if !unanswered => self.ack_now(cx, None),
            Place::Window | Place::Outside => {}
        }
        Some(Fate::Drop(DropReason::OutOfWindow))
    }

    /// R has gone back to the bytes that it repeats, and sends its ACKs from there. It goes back no
    /// further than a window, which a stranger also has to hit elsewhere.
    fn is_repeating(&self, r: Range) -> bool {
        let next = self.receiver.next();
        r.seq < next && next <= r.seq + u64::from(self.receiver.buffer_bytes())
    }

    /// A bare ACK below H's next number, which H need not read. If G has asked whether R is there,
    /// this is the answer, and lies in G's window: between the two H has taken octets, by which R
    /// probes a window that is shut.
    fn answer_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
        r: Range,
        fate: Fate,
    ) -> Fate {
        let taken = (self.sender.una()..=self.receiver.next()).contains(&r.seq);
        let in_range = self.outbound.ack_in_range(f.tcp.ack) && !self.outbound.is_old_ack(f.tcp);
        if !(self.timers.guest_asks() && taken && in_range && is_bare(f, r)) || self.keeps_bytes() {
            return fate;
        }
        self.on_ack_of_segment(cx, r, f.tcp);
        self.pass_ack(f)
    }

    /// R's pure ACK goes on to G.
    fn pass_ack(&mut self, f: &mut Frame<'_>) -> Fate {
        self.timers.on_guest_answered();
        let seq = self.sender.pure_ack_seq(self.receiver.passed());
        self.gate_to_guest(f, seq);
        Fate::Pass
    }

    /// All of the segment is there: R may not have got the ACK (SNOOP-11, SNOOP-37).
    fn on_old_segment(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
        r: Range,
    ) -> Fate {
        let end = r.end + u64::from(r.fin);
        if end > self.receiver.acks.sent() {
            // R was not shown that it is there (LIFE-13): for R this segment is the next one.
            self.update_ts_recent(cx, f.tcp, r.seq);
        }
        let current = end >= self.receiver.acks.sent();
        if current && (self.outbound.ack_in_range(f.tcp.ack) || self.believes(cx, f.tcp, false)) {
            let new = self.on_ack_of_segment(cx, r, f.tcp);
            self.outbound.note_ack_to_guest(new);
        }
        if self.receiver.is_keepalive(r) {
            return self.on_keepalive_from_net(cx, f);
        }
        if r.end + u64::from(r.fin) > self.receiver.acks.sent() {
            self.note_repeated(r.seq);
        }
        if r.len() > 0 {
            // Its last octet may be in the place of a FIN that is not acknowledged.
            let end = r.end.min(self.receiver.next());
            self.ack_now(cx, (r.seq < end).then_some((r.seq, end)));
        } else {
            self.challenge_ack(cx); // R's FIN once more (SNOOP-14)
        }
        Fate::Drop(DropReason::Duplicate)
    }

    /// R asks whether G is there: keepalive, or probe of a closed window (SNOOP-35, SNOOP-36).
    fn on_keepalive_from_net(&mut self, cx: &mut FlowContext<'_, '_>, f: &mut Frame<'_>) -> Fate {
        let shut = self.window_shut();
        let patience = if shut { limits::T_PAUSED } else { limits::T_ALIVE };
        if self.sender.una() >= self.delivery_end() && !shut {
            if !(self.outbound.ack_in_range(f.tcp.ack) || self.believes(cx, f.tcp, false)) {
                self.challenge_ack(cx);
                return Fate::Drop(DropReason::BadAck);
            }
            // Nothing is promised: G itself answers, as it would without us.
            self.receiver.await_answer(true);
            let seq = self.sender.probe_seq();
            self.gate_to_guest(f, seq);
            return Fate::Pass;
        } else if cx.vm.clock.alive_within(cx.now, patience) {
            self.ack_now(cx, None);
        }
        Fate::Drop(DropReason::Duplicate)
    }

    fn window_shut(&self) -> bool {
        self.receiver.window_shut(&self.terms())
    }

    /// RFC 7323 section 4.3: the earliest unacknowledged segment's TSval is the one to echo.
    #[inline]
    pub(super) fn update_ts_recent(&mut self, cx: &FlowContext<'_, '_>, tcp: &Tcp, seq: u64) {
        if let Some(ts) = tcp.options.timestamps
            && self.options.timestamps
            && self.timestamps.is_current(cx.now, ts.tsval, 0)
            && seq <= self.receiver.acks.sent()
        {
            self.timestamps.on_recent(cx.now, ts.tsval);
        }
    }

    /// R's (ack, window, SACK). Whether G should know of it.
    fn on_ack_of_segment(&mut self, cx: &mut FlowContext<'_, '_>, range: Range, tcp: &Tcp) -> bool {
        let said = Said {
            seq: range.seq,
            ack: tcp.ack,
            window: tcp.window,
            timestamps: tcp.options.timestamps,
            sack: &tcp.options.sack,
            ece: tcp.flags.contains(TcpFlags::ECE),
            bare: range.len() == 0 && !range.fin,
        };
        self.on_said(cx, &said)
    }

    /// The same for the content of the segment.
    #[inline(always)]
    pub(super) fn on_said(&mut self, cx: &mut FlowContext<'_, '_>, s: &Said<'_>) -> bool {
        let edge = self.outbound.edge(self.options.shift_r);
        let new = self.on_ack_from_net(s.seq, s.ack, s.window, s.timestamps, s.sack);
        let new = self.on_ack_for_relayed(cx, s, edge).unwrap_or(new);
        if new && cx.vm.wanting.is_some() {
            self.want_core(cx, false);
        }
        new
    }

    /// The same, in parts.
    #[inline(never)] // most segments bring no news
    pub(super) fn on_ack_from_net(
        &mut self,
        seq: u64,
        ack: Seq,
        window: u16,
        timestamps: Option<Timestamps>,
        sack: &SackBlocks,
    ) -> bool {
        let Some(update) = self.outbound.on_ack(seq, ack, window, self.options.shift_r) else {
            return false;
        };
        if let Some(ts) = timestamps {
            self.timestamps.on_echo_from_net(ts.tsecr);
        }
        self.on_sack_from_net(update.advanced, sack) || update.new
    }

    /// R's SACK blocks, which belong to its newest acknowledgement number. Whether G should know of
    /// them: the same blocks twice would look like a duplicate ACK.
    fn on_sack_from_net(&mut self, ack_advanced: bool, sack: &SackBlocks) -> bool {
        if sack.is_empty() && self.losses.of_net().is_none() {
            return false; // nearly always
        }
        if self.losses.relayed().is_some() {
            return false; // H repeats what is lost
        }
        let known = self.losses.of_net().map_or(SackBlocks::default(), |known| known.blocks());
        let new = if sack.is_empty() {
            ack_advanced && !known.is_empty()
        } else {
            ack_advanced || *sack != known
        };
        if !self.options.sack || !new {
            return false;
        }
        self.losses.of_net_or_new().on_blocks(*sack);
        self.losses.forget(self.sender.una());
        !sack.is_empty()
    }

    /// An ACK leaves at the end of the batch, unless a segment of G carries it first.
    #[inline]
    pub(super) fn owe_ack(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.receiver.acks.owe() {
            cx.ack_list.push(cx.id);
        }
    }

    /// An ACK for a segment that R, if it is honest, did not send now (RFC 5961 section 7); but
    /// none for a silent G (INV-19).
    pub(super) fn challenge_ack(&mut self, cx: &mut FlowContext<'_, '_>) {
        if cx.vm.clock.alive_within(cx.now, limits::T_PAUSED) {
            self.rate_limited_ack(cx);
        }
    }

    /// One per flow and 500 ms (COM-31, RFC 5961 section 7).
    fn rate_limited_ack(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.receiver.acks.may_answer_odd(cx.now, limits::ODD_ACK_INTERVAL) {
            self.ack_now(cx, None);
        }
    }

    /// There is no place for the data of a parked flow: G takes it by itself, as in `Pass`, inside
    /// its own window. R repeats the bytes that G has no room for.
    fn pass_unheld(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
        range: Range,
    ) -> Fate {
        let fits = range.end + u64::from(range.fin) <= self.sender.edge();
        if fits {
            self.pass_data(cx, f, range)
        } else {
            self.refuse(cx, range, DropReason::NoStore)
        }
    }

    /// Data goes to G past the store, behind all held bytes and without a gap. So do segments with
    /// URG, or with an option or IP option that H does not understand: nothing in them, nor behind
    /// them, is acknowledged early (SNOOP-13, COM-04, COM-07).
    fn pass_data(&mut self, cx: &mut FlowContext<'_, '_>, f: &mut Frame<'_>, range: Range) -> Fate {
        let passed = self.receiver.stream().all().max(self.receiver.passed());
        let waits = self.sender.una() < self.delivery_end() || range.seq > passed;
        if waits {
            return self.refuse(cx, range, DropReason::Draining);
        }
        if range.fin {
            self.receiver.on_fin(range.end);
        }
        let fin = self.receiver.fin();
        if (range.end > fin && range.len() > 0) || (range.fin && range.end != fin) {
            // Behind R's FIN, or a second one: G must not know more of its end than we.
            return self.refuse(cx, range, DropReason::OutOfWindow);
        }
        self.receiver.on_passed(range.end + u64::from(range.fin)); // uncut: G may take all of it
        self.gate_to_guest(f, range.seq);
        Fate::Pass
    }

    /// A segment that is acceptable and yet not taken: R gets a duplicate ACK, as from a receiver
    /// that has lost it.
    fn refuse(&mut self, cx: &mut FlowContext<'_, '_>, range: Range, reason: DropReason) -> Fate {
        if range.len() == 0 {
            self.challenge_ack(cx);
        } else if !self.withholds() {
            self.ack_now(cx, None);
        }
        Fate::Drop(reason)
    }
}

pub(super) fn needs_verbatim(f: &Frame<'_>) -> bool {
    f.tcp.flags.contains(TcpFlags::URG) || !f.tcp.options.understood() || f.ip.options
}

/// Only an ACK, whatever is in its IP header.
fn is_bare(f: &Frame<'_>, range: Range) -> bool {
    let plain = !f.tcp.flags.contains(TcpFlags::URG) && f.tcp.options.understood();
    plain && range.len() == 0 && !range.fin
}
