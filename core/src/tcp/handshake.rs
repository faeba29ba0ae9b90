//! Learning a connection from its handshake (COM-20 to COM-29).
//!
//! R's SYN only leaves a record in the SYN cache; a [`Flow`] exists from G's SYN or SYN-ACK on.
//! Every frame is forwarded as it is until the third ACK.

use crate::tcp::flow::{Flow, State, Why, unwrapped_isn};
use crate::tcp::options::{Offers, SynInfo};
use crate::tcp::{Fate, FlowContext, Frame};
use crate::time::Instant;
use crate::wire::packet::{Ip, Tcp, TcpFlags};
use crate::wire::seq::Seq;

/// Flags that keep a segment from completing a handshake.
const NOT_IN_THIRD_ACK: TcpFlags =
    TcpFlags::SYN.union(TcpFlags::RST).union(TcpFlags::FIN).union(TcpFlags::URG);

impl Flow {
    /// G's SYN or SYN-ACK that made this flow has come again: its present offers count as well.
    /// `false`: it is another one.
    pub(crate) fn on_syn_copy_from_guest(
        &mut self,
        now: Instant,
        syn: SynInfo,
        client: bool,
        tcp: &Tcp,
    ) -> bool {
        let unchanged = self.outbound.isn() == syn.isn && self.outbound.guest_is_client() == client;
        if !unchanged || self.state() == State::Abort {
            return false;
        }
        if let Some(&offers) = self.standing.offers() {
            self.standing.learn(Offers { g: syn.after(offers.g), ..offers });
            self.outbound.on_syn_copy();
        }
        if self.receiver.is_doubted() {
            self.end_doubt(); // it knows the connection
        }
        self.on_tsval_of_syn_from_guest(now, tcp);
        true
    }

    /// A SYN or SYN-ACK of G passes: R sees its clock (INV-08).
    pub(crate) fn on_tsval_of_syn_from_guest(&mut self, now: Instant, tcp: &Tcp) {
        if let Some(ts) = tcp.options.timestamps {
            self.timestamps.on_tsval_from_guest(now, ts.tsval);
        }
    }

    /// A SYN of R passes to G, which may answer it with a challenge ACK. Returns R's offers, merged
    /// with its earlier ones.
    pub(crate) fn on_syn_from_net(&mut self, mut syn: SynInfo) -> SynInfo {
        self.receiver.await_answer(self.is_live());
        self.standing.set_heard(None); // another connection may begin
        if let Some(&offers) = self.standing.offers() {
            syn = syn.after(offers.r);
            if syn.isn == offers.r.isn {
                self.standing.learn(Offers { r: syn, ..offers });
            }
        }
        syn
    }

    /// G has opened the connection, and so has R, by a SYN of its own.
    pub(crate) fn is_opened_by_guest(&self) -> bool {
        self.state() == State::Handshake && self.outbound.guest_is_client()
    }

    /// The first frame of G: its SYN or SYN-ACK. `false`: it acknowledges bytes that R never sent.
    pub(crate) fn on_first_from_guest(&mut self, offers: &Offers, f: &Frame<'_>) -> bool {
        self.template.learn_from_guest(f.l2(), f.ip.tos, f.ip.ttl, f.ip.flow_label);
        self.outbound.guest_is_client() || self.on_syn_ack_from_guest(offers, f.tcp)
    }

    /// G's SYN-ACK answers R's SYN: sets where R's stream starts and G's first edge.
    /// `false` if it acknowledges something R never sent.
    fn on_syn_ack_from_guest(&mut self, offers: &Offers, tcp: &Tcp) -> bool {
        let first = unwrapped_isn(offers.r.isn) + 1;
        let seen = first + u64::from(offers.r.data_len);
        let ack = tcp.ack.unwrap(first);
        if !(first..=seen).contains(&ack) {
            return false;
        }
        self.begin(offers, ack, ack + u64::from(tcp.window), seen);
        true
    }

    /// R's SYN-ACK answers G's SYN. `false` if it acknowledges something G never sent.
    fn on_syn_ack_from_net(&mut self, offers: &Offers, tcp: &Tcp) -> bool {
        let first = unwrapped_isn(offers.g.isn) + 1;
        let sent = first + u64::from(offers.g.data_len);
        let ack = tcp.ack.unwrap(first);
        if !(first..=sent).contains(&ack) {
            return false;
        }
        let r = unwrapped_isn(offers.r.isn) + 1;
        self.outbound.on_syn_ack_from_net(ack, sent, tcp, offers.shifts().1);
        self.begin(offers, r, r, r + u64::from(tcp.payload_len));
        if let Some(ts) = tcp.options.timestamps {
            self.timestamps.on_echo_from_net(ts.tsecr);
        }
        true
    }

    /// R's stream begins with `first`; G takes it up to `edge`, and has seen it up to `passed`.
    pub(super) fn begin(&mut self, offers: &Offers, first: u64, edge: u64, passed: u64) {
        self.receiver.on_syn_ack(first, edge, passed);
        self.sender.on_syn_ack(first, edge);
        self.timestamps.on_syns(offers.g.tsval, offers.r.tsval);
    }

    /// A frame of G while `Handshake`, not a SYN.
    pub(super) fn on_handshake_from_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
    ) -> Fate {
        self.template.learn_from_guest(f.l2(), f.ip.tos, f.ip.ttl, f.ip.flow_label);
        if !self.is_third_ack_from_guest(f.tcp) {
            if !f.tcp.flags.contains(TcpFlags::RST) && !self.is_challenge_from_guest(f.tcp) {
                self.pass(cx.now, Why::Ambiguous);
                if f.tcp.payload_len > 0 && self.on_data_past() {
                    cx.vm.uncontrolled_at = Some(cx.now); // the third ACK itself was lost
                }
            }
            return Fate::Pass;
        }
        self.learn_third_ack_from_guest(f.tcp);
        self.go_on(cx);
        let data = self.standing.is_on() && f.tcp.payload_len > 0;
        if data { self.on_segment_from_guest(cx, f) } else { Fate::Pass }
    }

    /// A frame of R while `Handshake`.
    pub(super) fn on_handshake_from_net(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
    ) -> Fate {
        self.template.learn_from_net(f.ip.tos, f.ip.ttl, f.ip.flow_label);
        if !f.checksum_ok() {
            return Fate::Pass; // G will drop it; nothing is learned from it
        }
        if !self.is_third_ack_from_net(f.tcp) {
            self.on_answer_from_net(cx.now, f.tcp, f.ip);
            return Fate::Pass;
        }
        self.learn_third_ack_from_net(f.tcp);
        self.go_on(cx);
        let data = self.standing.is_on() && f.tcp.payload_len > 0;
        if data { self.on_segment_from_net(cx, f) } else { Fate::Pass }
    }

    /// R's third ACK (or the first data segment in its place) completes G's passive open (COM-28).
    fn is_third_ack_from_net(&self, tcp: &Tcp) -> bool {
        !self.outbound.guest_is_client()
            && tcp.flags.contains(TcpFlags::ACK)
            && !tcp.flags.intersects(NOT_IN_THIRD_ACK)
            && tcp.seq == Seq::wrap(self.receiver.next())
            && tcp.ack == Seq::wrap(self.outbound.sent())
            && tcp.options.understood()
    }

    /// G has answered R's SYN, and refuses something that came since, such as another SYN.
    fn is_challenge_from_guest(&self, tcp: &Tcp) -> bool {
        !self.outbound.guest_is_client()
            && tcp.flags == TcpFlags::ACK
            && tcp.payload_len == 0
            && tcp.seq == Seq::wrap(self.outbound.sent())
            && tcp.ack == Seq::wrap(self.receiver.next())
    }

    /// G's third ACK completes its active open (COM-28).
    fn is_third_ack_from_guest(&self, tcp: &Tcp) -> bool {
        self.outbound.guest_is_client()
            && self.standing.offers().is_some_and(|o| o.r != SynInfo::default())
            && tcp.flags.contains(TcpFlags::ACK)
            && !tcp.flags.intersects(NOT_IN_THIRD_ACK)
            && tcp.ack == Seq::wrap(self.receiver.next())
            && tcp.seq == Seq::wrap(self.outbound.una())
            && self.receiver.passed() == self.receiver.next()
            && tcp.options.understood()
    }

    /// A segment from R that is not the third ACK of a passive open: the SYN-ACK, or nothing that
    /// is understood.
    fn on_answer_from_net(&mut self, now: Instant, tcp: &Tcp, ip: &Ip) {
        let flags = tcp.flags;
        if flags.contains(TcpFlags::RST) {
            return; // G decides; an abandoned handshake times out
        }
        if self.is_refused_in_handshake(tcp) {
            return;
        }
        if !(flags.contains(TcpFlags::SYN) && self.outbound.guest_is_client()) {
            return self.pass(now, Why::Ambiguous);
        }
        let offer = SynInfo::learn(now, tcp, ip.version);
        let Some(mut offers) = self.standing.offers().copied() else { return };
        let repeated = offers.r != SynInfo::default();
        let other = repeated && offers.r.isn != offer.isn;
        offers.r = if repeated { offer.after(offers.r) } else { offer };
        if other || !self.on_syn_ack_from_net(&offers, tcp) {
            return self.pass(now, Why::Ambiguous);
        }
        self.standing.learn(offers);
    }

    /// G refuses this, whoever sent it, and goes on waiting (`tcp_check_req` and
    /// `tcp_rcv_synsent_state_process` of Linux 6.18).
    fn is_refused_in_handshake(&self, tcp: &Tcp) -> bool {
        let answers = |o: &Offers| tcp.flags.contains(TcpFlags::SYN) || o.r == SynInfo::default();
        let fits = match self.standing.offers() {
            Some(o) if self.outbound.guest_is_client() && answers(o) => {
                let first = unwrapped_isn(o.g.isn) + 1;
                (first..=first + u64::from(o.g.data_len)).contains(&tcp.ack.unwrap(first))
            }
            _ => self.outbound.ack_in_range(tcp.ack),
        };
        !(fits && tcp.flags.contains(TcpFlags::ACK))
    }

    /// R's third ACK, or its first data: learns R's window from it.
    fn learn_third_ack_from_net(&mut self, tcp: &Tcp) {
        let Some((_, shift_r)) = self.standing.offers().map(Offers::shifts) else { return };
        self.receiver.on_third_ack_from_net();
        self.outbound.on_third_ack_from_net(tcp, shift_r);
        if let Some(ts) = tcp.options.timestamps {
            self.timestamps.on_third_ack_from_net(ts);
        }
    }

    /// G's third ACK: learns the edge G shows.
    fn learn_third_ack_from_guest(&mut self, tcp: &Tcp) {
        let Some((shift_g, _)) = self.standing.offers().map(Offers::shifts) else { return };
        let edge = self.receiver.next() + (u64::from(tcp.window) << shift_g);
        self.receiver.on_third_ack_from_guest(edge);
        self.sender.on_third_ack(edge);
        if let Some(ts) = tcp.options.timestamps {
            self.timestamps.on_third_ack_from_guest(ts.tsval);
        }
    }

    /// Forwarded verbatim from here on.
    pub(crate) fn pass(&mut self, now: Instant, why: Why) {
        debug_assert!(self.owes_nothing(), "PASS entered with promises open");
        self.standing.leave(why);
        self.timers.on_seen(now);
    }
}
