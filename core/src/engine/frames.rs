//! A frame's way through the engine: its sender's outbound pipe, the switch, its receiver's inbound
//! pipe.

use crate::drops::DropReason;
use crate::engine::{Engine, Verdict};
use crate::flow::key::FlowKey;
use crate::flow::table::FlowId;
use crate::port::PortId;
use crate::switch::{Mac, Out};
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::options::{Offers, SynInfo};
use crate::tcp::{Fate, Frame};
use crate::time::Instant;
use crate::wire::packet::{Ip, L4, Net, PROTOCOL_TCP, Packet, Tcp, TcpFlags, VlanStack};
use crate::wire::segment::validate_hdr;
use crate::wire::virtio_net::VirtioNetHdr;

impl Engine<'_> {
    /// A frame came in on `port`. It may be edited in place (never in length); on `Forward` and
    /// `Flood` the caller sends it on, with `hdr`.
    #[inline(never)] // so that a profile shows it, and it costs the same wherever it is called
    pub fn handle_frame(
        &mut self,
        now: Instant,
        port: PortId,
        hdr: &mut VirtioNetHdr,
        frame: &mut [u8],
    ) -> Verdict {
        let verdict = self.process_frame(now, port, hdr, frame).unwrap_or_else(Verdict::Drop);
        match verdict {
            Verdict::Drop(reason) => self.count_drop(port, reason),
            Verdict::Forward(out) => self.note_given(now, port, Some(out)),
            Verdict::Flood => self.note_given(now, port, None),
            Verdict::Absorbed => {}
        }
        verdict
    }

    /// One more thing that a guest has yet to see before it counts as alive by itself again;
    /// without `out`, all of them but `ingress` have.
    pub(super) fn note_given(&mut self, now: Instant, ingress: PortId, out: Option<PortId>) {
        let (ingress, count) = (usize::from(ingress.0), self.ports.len());
        let ports = out.map_or(0..count, |PortId(to)| usize::from(to)..usize::from(to) + 1);
        for i in ports.filter(|i| out.is_some() || *i != ingress) {
            if let Some(Some(p)) = self.ports.get_mut(i)
                && p.config.is_guest()
            {
                p.vm.clock.on_forwarded(now);
            }
        }
    }

    fn process_frame(
        &mut self,
        now: Instant,
        port: PortId,
        hdr: &mut VirtioNetHdr,
        frame: &mut [u8],
    ) -> Result<Verdict, DropReason> {
        let Some(guest) = self.port(port).map(|p| p.config.is_guest()) else {
            return Err(DropReason::PortDown);
        };
        let parsed = Packet::parse(frame);
        // By reference, here and below: a `Packet` is too large to move about.
        let packet = parsed.as_ref().map_err(|&reason| reason)?;
        if matches!(packet.net, Net::Ip(Ip { l4: L4::MalformedTcp, .. })) {
            return Err(DropReason::MalformedHeader); // as any receiver would (COM-03)
        }
        if guest {
            *hdr = validate_hdr(hdr, frame, packet)?;
            self.switch.check_source(now, port, packet)?;
            if let Net::Ip(Ip { l4: L4::Fragment, protocol: PROTOCOL_TCP, dst, .. }) = packet.net
                && let Some(p) = self.port_mut(port)
            {
                p.vm.fragment_from_guest = Some((now, dst));
            }
            if let Some((ip, tcp)) = packet.tcp() {
                let mut f = Frame { bytes: frame, hdr, eth: &packet.eth, ip, tcp };
                match self.process_from_guest(now, port, &mut f) {
                    Fate::Pass => {}
                    Fate::Absorbed => return Ok(Verdict::Absorbed),
                    Fate::Drop(reason) => return Err(reason),
                }
            }
        } else {
            self.switch.learn(now, port, packet.eth.vlan, packet.eth.src);
        }
        let Some(out) = self.egress(now, port, packet.eth.vlan, packet.eth.dst)? else {
            return Ok(Verdict::Flood);
        };
        if !self.port(out).is_some_and(|p| p.config.is_guest()) {
            return Ok(Verdict::Forward(out));
        }
        if guest {
            // An emission gate may have edited it.
            return self.process_toward_guest(now, out, hdr, frame, &Packet::parse(frame)?);
        }
        self.process_toward_guest(now, out, hdr, frame, packet)
    }

    /// Where the switch sends a frame; `None` is everywhere.
    pub(super) fn egress(
        &mut self,
        now: Instant,
        ingress: PortId,
        vlan: VlanStack,
        dst: Mac,
    ) -> Result<Option<PortId>, DropReason> {
        match self.switch.lookup(now, ingress, vlan, dst) {
            Out::Port(out) => Ok(Some(out)),
            Out::Flood => Ok(None),
            Out::Drop(reason) => Err(reason),
        }
    }

    /// What the inbound pipe of a flow makes of a frame on its way to the guest of `out`.
    pub(super) fn process_toward_guest(
        &mut self,
        now: Instant,
        out: PortId,
        hdr: &VirtioNetHdr,
        frame: &mut [u8],
        packet: &Packet,
    ) -> Result<Verdict, DropReason> {
        match &packet.net {
            Net::Ip(Ip { l4: L4::Fragment, protocol: PROTOCOL_TCP, .. }) => {
                if let Some(p) = self.port_mut(out) {
                    p.vm.fragment_at = Some(now);
                }
            }
            Net::Ip(ip @ Ip { l4: L4::Tcp(tcp), .. }) => {
                let mut f = Frame { bytes: frame, hdr, eth: &packet.eth, ip, tcp };
                return match self.process_from_net(now, out, &mut f) {
                    Fate::Pass => Ok(Verdict::Forward(out)),
                    Fate::Absorbed => Ok(Verdict::Absorbed),
                    Fate::Drop(reason) => Err(reason),
                };
            }
            _ => {}
        }
        Ok(Verdict::Forward(out))
    }

    fn process_from_guest(&mut self, now: Instant, port: PortId, f: &mut Frame<'_>) -> Fate {
        let key = FlowKey::from_guest(port.0, f.eth, f.ip, f.tcp);
        if f.tcp.flags.contains(TcpFlags::SYN) {
            self.on_syn_from_guest(now, key, f);
            return Fate::Pass;
        }
        let Some(id) = self.flows.lookup(&key) else { return Fate::Pass };
        self.with_frame(now, id, |flow, cx| flow.on_frame_from_guest(cx, f)).unwrap_or(Fate::Pass)
    }

    fn process_from_net(&mut self, now: Instant, port: PortId, f: &mut Frame<'_>) -> Fate {
        let key = FlowKey::from_net(port.0, f.eth, f.ip, f.tcp);
        let id = self.flows.lookup(&key);
        let other = TcpFlags::ACK.union(TcpFlags::RST);
        let pure_syn = f.tcp.flags.contains(TcpFlags::SYN) && !f.tcp.flags.intersects(other);
        if pure_syn {
            // SNOOP-17: for a flow that owes something H answers, else G.
            let owes = |f: &Flow| f.is_live() && !f.holds_nothing();
            if !id.and_then(|id| self.flows.get(id)).is_some_and(owes) {
                if f.checksum_ok() {
                    self.on_syn_from_net(now, port, key, id, f.ip, f.tcp);
                } // else G will drop it; nothing is learned from it
                return Fate::Pass;
            }
        }
        let Some(id) = id else { return Fate::Pass };
        let mut completed = false;
        let fate = self.with_frame(now, id, |flow, cx| {
            let was = flow.state();
            let ended = flow.on_frame_from_net(cx, f);
            completed = was == State::Handshake && flow.is_live();
            ended
        });
        if completed {
            self.syn_cache.take(&key); // copies of the SYN that were seen until now are answered
        }
        fate.unwrap_or(Fate::Pass)
    }

    /// R's SYN leaves 32 bytes in the SYN cache; the flow comes with G's answer (LIFE-01).
    fn on_syn_from_net(
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
        let mut syn = SynInfo::learn(tcp, ip.version);
        match id.and_then(|id| Some((id, self.flows.get_mut(id)?))) {
            // What follows is of another connection, even if G's answer takes another path.
            Some((id, flow)) if flow.is_over() => self.remove_flow(id),
            Some((_, flow)) => syn = flow.on_syn_from_net(syn),
            None => {}
        }
        if !self.wants_flows(port) {
            return;
        }
        if let Some(earlier) = self.syn_cache.lookup(&key) {
            syn = syn.after(earlier);
        }
        self.syn_cache.insert(&key, syn);
    }

    /// G's SYN or SYN-ACK makes a flow. With a SYN, whatever it had under this key, it has
    /// forgotten; a SYN-ACK says so only of what owes nothing (see [`Self::outlives_syn_ack`]).
    fn on_syn_from_guest(&mut self, now: Instant, key: FlowKey, f: &Frame<'_>) {
        let port = PortId(key.port);
        let (ip, tcp) = (f.ip, f.tcp);
        let client = !tcp.flags.contains(TcpFlags::ACK);
        let syn_g = SynInfo::learn(tcp, ip.version);
        if let Some(id) = self.flows.lookup(&key) {
            let Some(flow) = self.flows.get_mut(id) else { return };
            if flow.on_syn_copy_from_guest(now, syn_g, client, tcp) {
                return; // a retransmission of the SYN that made this flow
            }
            if !client && self.outlives_syn_ack(now, id, &key, tcp) {
                return;
            }
            self.with_flow(now, id, |flow, cx| flow.on_forgotten_by_guest(cx));
            self.remove_flow(id);
        }
        if !self.wants_flows(port) || !self.switch.is_own_ip(port, ip.src) {
            return;
        }
        let syn_r = self.syn_cache.take(&key);
        if client == syn_r.is_some() {
            return; // simultaneous open, or a SYN nobody remembers: PASS for life
        }
        let offers = Offers { r: syn_r.unwrap_or_default(), g: syn_g };
        let mut flow = Flow::new(now, offers, client);
        if !flow.on_first_from_guest(&offers, f) {
            return;
        }
        if let Some(id) = self.insert_flow(key, flow) {
            self.with_flow(now, id, |_, _| ());
        } else if let Some(p) = self.port_mut(port) {
            p.vm.counters.flows_refused += 1;
        }
    }

    /// Whether a SYN-ACK of G with another ISN leaves the flow as it is.
    ///
    /// A repeated SYN of R may wait in G's ring while R completes the handshake. A G that answers
    /// with SYN cookies gives it another ISN and is, or will be, established with the one that R
    /// acknowledged. R refuses the second (RFC 9293 section 3.10.7.4); a G that does not know the
    /// first says so by RST. Only an R that has opened anew since, on a flow that owes nothing, is
    /// answered with a new connection.
    fn outlives_syn_ack(&mut self, now: Instant, id: FlowId, key: &FlowKey, tcp: &Tcp) -> bool {
        let asked = self.syn_cache.lookup(key).is_some();
        let outlives = |flow: &Flow| match flow.state() {
            State::On | State::Drain => !(asked && flow.holds_nothing()),
            State::Abort => !(asked || flow.owes_nothing()), // G has yet to hear of the reset
            State::Handshake | State::Pass => false,
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
