//! Flows that H has accepted in G's place, from the first frame to the last (accept offload).
//!
//! **`Opening`.** R has completed H's handshake, and H begins one with G. Toward R the flow is as
//! in `On`, in the room that H's SYN-ACK has shown. Toward G it has one thing, R's SYN: that is the
//! number below R's first byte, which G owes an acknowledgement like any other. So such a flow
//! always owes something, G's time is counted as for data, and a new ring gets the SYN again.
//!
//! **From G's SYN-ACK on** G's numbers are known. Everything in H is in R's. A frame of G is edited
//! before the flow sees it, a frame that goes on to G after its gate, and a frame that H makes for
//! G is written in G's numbers. An RST for G has no ACK: it needs none, and so it can be made by
//! somebody who does not know G's numbers, before G has accepted and after a kill.
//!
//! **It never leaves the path** while its ends live, because nobody else could translate. Where
//! another flow leaves it for life, this one stays in `Drain`, in which it promises nothing more.
//! Its numbers are known at all times, so that it can be asked or reset. Idle, it gives back the
//! place of its bytes and keeps its record (ACC-07). When both sides have closed it owes nobody an
//! answer any more, and edits the frames that are left.

use crate::drops::DropReason;
use crate::flow::key::FlowKey;
use crate::limits::{ASK_TRANSLATED, ASKED_MAX, MSS_MIN, T_ASK_TRANSLATED};
use crate::store::record::L2Header;
use crate::tcp::accept::grant::Settled;
use crate::tcp::accept::half_open::Entry;
use crate::tcp::accept::learned::{Learned, Server};
use crate::tcp::accept::opening::{Opening, Step, Word};
use crate::tcp::accept::server;
use crate::tcp::deliver::Delivery;
use crate::tcp::distance::Distance;
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::options::Offers;
use crate::tcp::sender::Sender;
use crate::tcp::state::{Heard, Standing};
use crate::tcp::vm::Vm;
use crate::tcp::{Ended, Fate, FlowContext, Frame};
use crate::time::{Duration, Instant};
use crate::wire::emit::{CsumMode, TcpEmit};
use crate::wire::icmp::Quoted;
use crate::wire::packet::{Ip, IpAddr16, Packet, Seq, TcpFlags, Timestamps};
use crate::wire::virtio_net::VirtioNetHdr;

impl Flow {
    // --- Begin ---------------------------------------------------------------------------------

    /// R has completed the handshake of this entry by the segment `f`. `None`: its offers do not go
    /// together.
    pub(crate) fn accepted(now: Instant, mtu: u16, entry: &Entry, f: &Frame<'_>) -> Option<Self> {
        let grant = &entry.grant;
        let lower = grant.lower_shown();
        let offers = Offers {
            r: *grant.of_net(),
            g: *grant.shown(),
            ttl_g: lower.ttl(),
            ..Offers::default()
        };
        let mut flow = Self::new(now, offers, false);
        flow.options = offers.negotiate(false, entry.key.version, mtu).ok()?;
        let l2 = entry.l2.bytes();
        flow.template.learn_from_guest(l2, lower.tos(), lower.ttl(), lower.flow_label());
        flow.template.learn_from_net(f.ip.tos, f.ip.ttl, f.ip.flow_label);
        let first = flow.receiver.next();
        flow.begin(&offers, first, first + u64::from(grant.window_shown()), first);
        flow.sender = Sender::opening(first);
        flow.outbound.on_third_ack_from_net(f.tcp, flow.options.shift_r);
        if let Some(ts) = f.tcp.options.timestamps {
            // Of data that has overtaken the third ACK the clock is not the one to echo.
            let is_next = f.tcp.seq == Seq::wrap(first);
            flow.timestamps.on_third_ack_from_net(Timestamps {
                tsval: if is_next { ts.tsval } else { offers.r.tsval },
                ..ts
            });
        }
        flow.receiver.begin_opening();
        flow.standing = Standing::opening(Opening::new(*grant));
        Some(flow)
    }

    /// It has its entry, and takes its place. `false`: there is none.
    pub(crate) fn begin_opening(&mut self, cx: &mut FlowContext<'_, '_>) -> bool {
        self.count_bound(cx);
        if !self.take_place(cx) {
            return false;
        }
        self.timestamps.on_taken_on(cx.now);
        cx.vm.counters.flows_offloaded += 1;
        cx.vm.counters.flows_accepted += 1;
        true
    }

    /// Such a flow is there, or arrives.
    pub(super) fn count_bound(&self, cx: &mut FlowContext<'_, '_>) {
        if !self.is_counted() {
            return;
        }
        cx.vm.translated_flows += 1;
        if self.state() == State::Opening
            && let Some(accepting) = &mut cx.vm.accepting
        {
            accepting.on_waiting(cx.key);
        }
    }

    /// H has accepted it for G.
    pub(crate) fn is_of_host(&self) -> bool {
        self.receiver.is_translated()
    }

    /// It is such a flow, and in the path: nobody else can translate.
    pub(crate) fn is_bound(&self) -> bool {
        self.receiver.is_translated() && self.is_live()
    }

    /// It counts among those of its VM (ACC-08).
    fn is_counted(&self) -> bool {
        self.is_bound() || self.state() == State::Translated
    }

    /// Such a flow leaves the path, or goes: it does not count any more.
    pub(super) fn end_bound(&mut self, cx: &mut FlowContext<'_, '_>) {
        self.uncount_bound(cx.key, cx.vm);
    }

    /// The same; the flow is about to be in another state, or none.
    pub(super) fn uncount_bound(&self, key: &FlowKey, vm: &mut Vm) {
        if !self.is_counted() {
            return;
        }
        vm.translated_flows -= 1;
        if self.state() == State::Opening
            && let Some(accepting) = &mut vm.accepting
        {
            accepting.on_waited(key);
        }
    }

    /// Both sides have closed, and nothing is owed. `true`: it is such a flow, and goes on editing.
    pub(super) fn close_translated(&mut self) -> bool {
        let is = self.receiver.is_translated();
        if is {
            self.standing.close_translated();
        }
        is
    }

    // --- Opening: R ----------------------------------------------------------------------------

    /// A segment of R while `Opening`: as in `On`, but nothing goes on to G.
    pub(super) fn on_opening_from_net(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
    ) -> Fate {
        if !f.checksum_ok() {
            return Fate::Drop(DropReason::BadChecksum);
        }
        if self.standing.as_opening().is_some_and(Opening::is_abandoned) {
            return Fate::Drop(DropReason::FlowAborted);
        }
        let seq = f.tcp.seq.unwrap(self.receiver.next());
        if f.tcp.flags.contains(TcpFlags::RST) && self.receiver.takes_reset(seq) {
            let is_over = self.standing.as_opening_mut().is_some_and(Opening::on_reset_from_net);
            if is_over {
                self.abort(cx, Why::Reset, false); // G never gets to know of it
            }
            return Fate::Absorbed;
        }
        if f.tcp.flags.contains(TcpFlags::ACK) && !self.outbound.ack_in_range(f.tcp.ack) {
            return Fate::Drop(DropReason::BadAck);
        }
        let fate = self.on_segment_from_net(cx, f);
        self.outbound.on_ack_shown(false); // G's first segment of H shows it all
        if fate == Fate::Pass { Fate::Absorbed } else { fate }
    }

    // --- Opening: G ----------------------------------------------------------------------------

    /// H's SYN for G, or an RST before it.
    pub(super) fn deliver_opening(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
    ) -> Option<Delivery> {
        if self.sender.next() > self.sender.una() {
            return None;
        }
        let l2 = self.template.l2_to_guest();
        let base = TcpEmit {
            l2: &l2[..usize::from(self.template.l2_len())],
            version: cx.key.version,
            src: cx.key.r_addr,
            dst: cx.key.g_addr,
            tos: self.template.tos_to_guest() & !0b11,
            ttl: self.template.ttl_to_guest(),
            flow_label: self.template.label_to_guest(),
            src_port: cx.key.r_port,
            dst_port: cx.key.g_port,
            seq: Seq(0),
            ack: Seq(0),
            flags: TcpFlags::RST,
            window: 0,
            timestamps: None,
            sack: &[],
            ip_id: 0,
        };
        let opening = self.standing.as_opening_mut()?;
        let header_len = if let Some(seq) = opening.take_reset() {
            TcpEmit { seq, ..base }.emit(buf, 0, CsumMode::Full(&[]))
        } else {
            opening.on_given(cx.now);
            let len = opening.grant().syn(base).emit(buf);
            self.sender.on_syn_given();
            self.wait_for_guest(cx, true);
            len
        };
        Some(Delivery { hdr: VirtioNetHdr::default(), header_len, from: 0, to: 0 })
    }

    /// A segment of G while `Opening`, be it a SYN-ACK or not. None of them goes on to R.
    pub(super) fn on_opening_from_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &Frame<'_>,
    ) -> Fate {
        let Some(opening) = self.standing.as_opening_mut() else { return Fate::Absorbed };
        let abandoned = opening.is_abandoned();
        match opening.on_segment_from_guest(cx.now, f.tcp, f.ip.version) {
            Word::Nothing | Word::Opens => return Fate::Drop(DropReason::BadFlags),
            Word::Accepted(settled) => self.settle(cx, f, &settled),
            Word::Another(seq) => {
                opening.reset_first(seq);
                self.sender.repeat_syn();
                self.timers.stop_waiting_for_guest();
            }
            Word::Refused => self.on_refused(cx, abandoned, false),
            Word::Unfit(..) => {
                if !abandoned {
                    self.reset_to_net(cx);
                }
                cx.vm.counters.flows_aborted += 1;
                self.abort(cx, Why::Options, true);
            }
            Word::TooLate(_) => self.abort(cx, Why::Reset, true),
        }
        Fate::Absorbed
    }

    /// G has refused the connection by an ICMP error, which quotes H's SYN.
    pub(crate) fn on_opening_unreachable(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        it: &Quoted,
    ) -> bool {
        let Some(opening) = self.standing.as_opening() else { return false };
        let (abandoned, is_it) = (opening.is_abandoned(), it.seq == opening.grant().of_net().isn);
        if is_it {
            self.on_refused(cx, abandoned, true);
        }
        is_it
    }

    /// G accepts: from here on the flow is like any other, with G's numbers at one place.
    fn settle(&mut self, cx: &mut FlowContext<'_, '_>, f: &Frame<'_>, settled: &Settled) {
        if let Some(accepting) = &mut cx.vm.accepting {
            accepting.on_waited(cx.key);
        }
        self.losses.set_translated(settled.translation);
        let (first, stamps) = (self.sender.edge(), if self.options.timestamps { 12 } else { 0 });
        let mss = settled.mss_to_guest.max(MSS_MIN) - stamps;
        self.options.mss_to_guest = self.options.mss_to_guest.min(mss);
        self.template.learn_from_guest(f.l2(), f.ip.tos, f.ip.ttl, f.ip.flow_label);
        self.sender.on_syn_ack(first, first + u64::from(f.tcp.window));
        self.receiver.end_opening();
        self.timers.on_guest_progress();
        self.timers.stop_waiting_for_guest();
        self.standing.accept();
        self.outbound.note_ack_to_guest(true); // H's third ACK, alone or with R's bytes
        if cx.vm.draining || !cx.vm.offload {
            self.drain(Why::Operator);
        } else {
            self.acknowledge_early(cx);
        }
    }

    /// G refuses, or does not answer. `untold`: it may yet have the SYN.
    fn on_refused(&mut self, cx: &mut FlowContext<'_, '_>, abandoned: bool, untold: bool) {
        self.tell_learned(cx, Learned::on_refused);
        if !abandoned {
            self.reset_to_net(cx);
            cx.vm.counters.accepts_refused += 1;
            cx.vm.counters.flows_aborted += 1;
        }
        self.abort(cx, Why::GuestRefuses, untold);
    }

    fn tell_learned(
        &self,
        cx: &mut FlowContext<'_, '_>,
        tell: fn(&mut Learned, Instant, Server, IpAddr16),
    ) {
        if let Some(accepting) = &mut cx.vm.accepting {
            tell(&mut accepting.learned, cx.now, server(cx.key), cx.key.r_addr);
        }
    }

    /// G had its time, and has not answered H's SYN.
    pub(super) fn on_unanswered_run(&mut self, cx: &mut FlowContext<'_, '_>) {
        let Some(opening) = self.standing.as_opening_mut() else { return };
        let step = opening.on_unanswered_run(cx.now);
        self.timers.back_off();
        self.timers.wait_again(cx.running());
        self.take_step(cx, step);
    }

    /// The wall clock's part of H's handshake with G.
    pub(super) fn on_opening_time(&mut self, cx: &mut FlowContext<'_, '_>) {
        if let Some(opening) = self.standing.as_opening_mut() {
            let step = opening.on_time(cx.now);
            self.take_step(cx, step);
        }
    }

    /// When that has something to do.
    pub(super) fn opening_wakes_at(&self) -> Instant {
        self.standing.as_opening().map_or(Instant::MAX, Opening::wakes_at)
    }

    fn take_step(&mut self, cx: &mut FlowContext<'_, '_>, step: Step) {
        match step {
            Step::Wait => {}
            Step::Repeat => self.sender.repeat_syn(),
            Step::RepeatFirst => {
                self.tell_learned(cx, Learned::on_silence);
                self.sender.repeat_syn();
            }
            Step::GiveUp => {
                let abandoned = self.standing.as_opening().is_some_and(Opening::is_abandoned);
                self.on_refused(cx, abandoned, true);
            }
        }
    }

    /// G sends its first segment behind its SYN-ACK: it has completed a connection of R.
    #[cold]
    pub(super) fn note_completed(&self, cx: &mut FlowContext<'_, '_>, l2: &[u8]) {
        let is_server = !self.outbound.guest_is_client();
        let is_local = self.options.distance == Distance::Local;
        if let (true, Some(l2), Some(accepting)) =
            (is_server && is_local, L2Header::new(l2), &mut cx.vm.accepting)
        {
            let (now, run) = (cx.now, accepting.run);
            accepting.learned.on_completed(now, server(cx.key), cx.key.r_addr, l2, run);
        }
    }

    // --- G's numbers ---------------------------------------------------------------------------

    /// A frame of G, in its own numbers. One that cannot be translated ends the connection
    /// (ACC-17).
    pub(super) fn on_frame_from_guest_translated(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
    ) -> Ended {
        let Some(translated) = self.losses.translated_mut() else {
            let fate = match self.state() {
                State::Opening => self.on_opening_from_guest(cx, f),
                _ => self.on_segment_in_abort(cx, true, f.tcp),
            };
            return self.end_frame(cx, fate);
        };
        translated.heard.guest = true;
        let numbers = translated.numbers;
        let partial = f.hdr.needs_csum();
        if numbers.from_guest(f.bytes, f.ip, partial).is_err() {
            return self.on_untranslatable(cx);
        }
        let Ok(packet) = Packet::parse(f.bytes) else { return self.on_untranslatable(cx) };
        let Some((ip, tcp)) = packet.tcp() else { return self.on_untranslatable(cx) };
        let mut own = Frame { bytes: f.bytes, hdr: f.hdr, eth: f.eth, ip, tcp };
        let fate = match self.state() {
            State::On | State::Drain => self.on_segment_from_guest(cx, &mut own),
            State::Abort => self.on_segment_in_abort(cx, true, own.tcp),
            State::Handshake | State::Opening | State::Pass | State::Translated => Fate::Pass,
        };
        self.end_frame(cx, fate)
    }

    /// A frame of R was seen. If it goes on to G it becomes one that G understands.
    pub(super) fn end_translated(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
        fate: Fate,
    ) -> Fate {
        let Some(translated) = self.losses.translated_mut() else { return fate };
        translated.heard.net = true;
        if fate != Fate::Pass {
            return fate;
        }
        let partial = f.hdr.needs_csum();
        match translated.numbers.to_guest(f.bytes, f.ip, partial) {
            Ok(()) => Fate::Pass,
            Err(_) => self.on_untranslatable(cx).fate,
        }
    }

    fn on_untranslatable(&mut self, cx: &mut FlowContext<'_, '_>) -> Ended {
        if self.is_live() {
            self.abort_both(cx, Why::Options);
        }
        self.end_frame(cx, Fate::Drop(DropReason::FlowAborted))
    }

    /// H stops, and nobody will translate.
    pub(crate) fn end_translated_by_operator(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.is_bound() {
            self.abort_both(cx, Why::Operator);
        }
    }

    /// A SYN-ACK of G under the flow's key, and R has not opened anew: H answers it as R would
    /// (ACC-11).
    pub(crate) fn on_syn_ack_translated(&mut self, cx: &mut FlowContext<'_, '_>, f: &Frame<'_>) {
        match self.state() {
            State::Opening => {
                self.on_opening_from_guest(cx, f);
            }
            State::On | State::Drain => self.outbound.note_ack_to_guest(true),
            State::Abort => {
                self.on_segment_in_abort(cx, true, f.tcp);
            }
            State::Handshake | State::Pass | State::Translated => {}
        }
    }

    /// An ICMP error on its way to G: the number that it quotes becomes G's own.
    pub(crate) fn translate_error(&self, frame: &mut [u8], ip: &Ip, it: &Quoted) {
        if let Some(translated) = self.losses.translated() {
            translated.numbers.error_to_guest(frame, ip, it);
        }
    }

    // --- A long life ---------------------------------------------------------------------------

    /// For how long it may be idle before its ends are asked, or are asked again (ACC-08).
    pub(super) fn asks_after(&self) -> Duration {
        let asks = self.losses.translated().is_some_and(|translated| translated.asked > 0);
        if asks { ASK_TRANSLATED } else { T_ASK_TRANSLATED }
    }

    /// Both sides have closed, and G has yet to see R's last ACK: it may repeat what nobody else
    /// can translate.
    pub(super) fn awaits_word(&self, vm: &Vm) -> bool {
        self.state() == State::Translated && !vm.clock.has_seen_all()
    }

    /// It was idle for that long, and nobody can forget it as long as its ends live: both are
    /// asked. Nine silences end it.
    pub(super) fn ask_both(&mut self, cx: &mut FlowContext<'_, '_>) {
        let Some(translated) = self.losses.translated_mut() else { return };
        let heard = translated.heard;
        let is_first = translated.asked == 0;
        if !is_first && heard.guest && heard.net {
            translated.asked = 0;
            return;
        }
        if is_first {
            translated.heard = Heard::default();
        } else if !cx.vm.clock.has_seen_all() {
            return; // G does not run, and has yet to see the question
        }
        translated.asked += 1;
        if translated.asked > ASKED_MAX {
            return self.abort_both(cx, Why::GuestGone);
        }
        self.sender.on_window_shut(); // a probe
        let probe = self.outbound.una() - 1;
        self.emit_to_net(cx, probe, TcpFlags::ACK, None);
    }
}
