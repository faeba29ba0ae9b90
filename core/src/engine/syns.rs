//! The frames of a handshake: what each leaves behind, and which of them makes a flow (LIFE-01,
//! COM-24 to COM-28). `tcp::handshake` learns from them.

use crate::engine::Engine;
use crate::flow::key::FlowKey;
use crate::flow::table::{FlowId, HashedKey};
use crate::port::PortId;
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::options::{Offers, SynInfo};
use crate::tcp::{Fate, Frame};
use crate::time::Instant;
use crate::wire::packet::{Ip, Tcp, TcpFlags};

impl Engine<'_> {
    pub(super) fn process_syn_from_net(
        &mut self,
        now: Instant,
        port: PortId,
        key: &HashedKey,
        f: &mut Frame<'_>,
    ) -> Fate {
        let id = self.flows.lookup_hashed(key).map(|(id, ..)| id);
        if !f.tcp.flags.intersects(TcpFlags::ACK.union(TcpFlags::RST)) {
            // SNOOP-17: for a flow that owes something H answers, else G.
            let owes = |f: &Flow| f.is_live() && !f.holds_nothing();
            if !id.and_then(|id| self.flows.get(id)).is_some_and(owes) {
                if f.checksum_ok() {
                    if self.answer_syn(now, port, &key.key, id.is_some(), f) {
                        return Fate::Absorbed;
                    }
                    self.on_syn_from_net(now, port, key.key, id, f.ip, f.tcp);
                } // else G will drop it; nothing is learned from it
                return Fate::Pass;
            }
        }
        match id {
            Some(id) => self.process_from_net(now, id, f),
            None if self.common.half_open > 0 => self.process_half_open(now, &key.key, f),
            None => Fate::Pass,
        }
    }

    /// R's SYN leaves 32 bytes in the SYN cache; the flow comes with G's answer (LIFE-01), whose
    /// number says which SYN it answers (COM-28).
    pub(super) fn on_syn_from_net(
        &mut self,
        now: Instant,
        port: PortId,
        key: FlowKey,
        id: Option<FlowId>,
        ip: &Ip,
        tcp: &Tcp,
    ) {
        let opened = |id: &FlowId| self.flows.get(*id).is_some_and(Flow::is_opened_by_guest);
        if let Some(id) = id.filter(opened) {
            // Simultaneous open (COM-25).
            self.with_flow(now, id, |flow, _| flow.pass(now, Why::Ambiguous));
            return;
        }
        if let Some(wanting) = self.wanting_mut(port) {
            wanting.on_syn(now, key.g_port);
        }
        self.remember_syn(now, port, key, id, ip, tcp);
    }

    /// The options of R's SYN, until G answers.
    pub(super) fn remember_syn(
        &mut self,
        now: Instant,
        port: PortId,
        key: FlowKey,
        id: Option<FlowId>,
        ip: &Ip,
        tcp: &Tcp,
    ) {
        let mut syn = SynInfo::learn(now, tcp, ip.version);
        match id.and_then(|id| Some((id, self.flows.get_mut(id)?))) {
            // Later frames are of another connection, even if G's answer takes another path.
            Some((id, flow)) if flow.is_over() => self.remove_flow(id),
            Some((_, flow)) => syn = flow.on_syn_from_net(syn),
            None => {}
        }
        let isn = syn.isn;
        let is_copy = |earlier: &SynInfo| earlier.isn == isn;
        let earlier = self.syn_cache.only(&key, is_copy);
        if let Some(earlier) = earlier {
            syn = syn.after(earlier);
        } else if !self.wants_flows(port) {
            return; // of what is known all copies count (COM-24)
        }
        self.syn_cache.insert(&key, syn, is_copy);
    }

    /// G's SYN or SYN-ACK makes a flow. With a SYN, whatever it had under this key, it has
    /// forgotten; a SYN-ACK says so only of what owes nothing (see [`Self::outlives_syn_ack`]).
    /// `true`: it is for H, whose SYN it answers.
    pub(super) fn on_syn_from_guest(&mut self, now: Instant, key: FlowKey, f: &Frame<'_>) -> bool {
        let port = PortId(key.port);
        let tcp = f.tcp;
        let client = !tcp.flags.contains(TcpFlags::ACK);
        let syn_g = SynInfo::learn(now, tcp, f.ip.version);
        if !client && let Some(wanting) = self.wanting_mut(port) {
            wanting.on_accepted(now, key.g_port);
        }
        self.note_offer(now, &key, syn_g, f);
        if let Some(id) = self.flows.lookup(&key) {
            let Some(flow) = self.flows.get_mut(id) else { return false };
            // G repeats none of a closed one: it has acknowledged R's FIN.
            let asked = || self.syn_cache.has(&key);
            let is_its = flow.is_live() || (flow.state() == State::Abort && !asked());
            if flow.is_of_host() && !client && is_its {
                self.with_flow(now, id, |flow, cx| flow.on_syn_ack_translated(cx, f));
                return true;
            }
            if flow.on_syn_copy_from_guest(now, syn_g, client, tcp) {
                return false; // a retransmission of the SYN that made this flow
            }
            if !client && self.outlives_syn_ack(now, id, &key, tcp) {
                return false;
            }
            self.with_flow(now, id, |flow, cx| flow.on_forgotten_by_guest(cx));
            self.remove_flow(id);
        }
        let begun = self.begin_flow(now, key, client, syn_g, f);
        if !begun && let Some(p) = self.port_mut(port) {
            p.vm.missed_connection = true;
        }
        false
    }

    /// `false`: H cannot follow this connection, and will have no entry for it.
    fn begin_flow(
        &mut self,
        now: Instant,
        key: FlowKey,
        client: bool,
        syn_g: SynInfo,
        f: &Frame<'_>,
    ) -> bool {
        let port = PortId(key.port);
        if !self.wants_flows(port) || !self.is_own_ip(port, f.ip.src) {
            return false;
        }
        let is_opened_by_net = self.syn_cache.has(&key);
        let syn_r = self.syn_cache.only(&key, |syn| !client && syn.is_acknowledged_by(f.tcp.ack));
        self.syn_cache.forget(&key);
        if client == is_opened_by_net || client == syn_r.is_some() {
            return false; // simultaneous open, or a SYN nobody remembers: PASS for life
        }
        let mac = self.mac_of(port);
        let is_of_a_station = mac.is_some_and(|mac| mac != f.eth.src);
        let (r, ttl_g) = (syn_r.unwrap_or_default(), f.ip.ttl);
        let offers = Offers { r, g: syn_g, ttl_g, is_of_a_station };
        let mut flow = Flow::new(now, offers, client);
        if !flow.on_first_from_guest(&offers, f) {
            return false;
        }
        let id = self.insert_flow(key, flow);
        if let Some(id) = id {
            self.with_flow(now, id, |_, _| ());
        } else if let Some(p) = self.port_mut(port) {
            p.vm.counters.flows_refused += 1;
        }
        id.is_some()
    }

    /// Whether a SYN-ACK of G with another ISN leaves the flow as it is.
    ///
    /// A repeated SYN of R may wait in G's ring while R completes the handshake. A G that answers
    /// with SYN cookies gives it another ISN and is, or will be, established with the one that R
    /// acknowledged. R refuses the second (RFC 9293 section 3.10.7.4); a G that does not know the
    /// first says so by RST. Only an R that has opened anew since, on a flow that owes nothing, is
    /// answered with a new connection.
    fn outlives_syn_ack(&mut self, now: Instant, id: FlowId, key: &FlowKey, tcp: &Tcp) -> bool {
        let asked = self.syn_cache.has(key);
        let outlives = |flow: &Flow| match flow.state() {
            State::Opening | State::On | State::Drain => !(asked && flow.holds_nothing()),
            State::Abort => !(asked || flow.owes_nothing()), // G has yet to hear of the reset
            State::Handshake | State::Pass | State::Translated => false,
        };
        self.with_flow(now, id, |flow, _| {
            flow.on_tsval_of_syn_from_guest(now, tcp);
            outlives(flow)
        })
        .unwrap_or(false)
    }

    fn wants_flows(&self, port: PortId) -> bool {
        self.port(port).is_some_and(|p| p.vm.offload && !p.vm.draining)
    }
}
