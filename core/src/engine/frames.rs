//! A frame's way through the engine: its sender's outbound pipe, the switch, its receiver's inbound
//! pipe.

use crate::drops::DropReason;
use crate::engine::{Engine, Port, Staged, Verdict, context};
use crate::flow::key::FlowKey;
use crate::flow::table::{FlowId, HashedKey};
use crate::limits::GROUP_BYTES_MAX;
use crate::port::{Local, PortId};
use crate::switch::{Mac, Out};
use crate::tcp::flow::State;
use crate::tcp::{Fate, Frame};
use crate::time::Instant;
use crate::wire::glance::macs;
use crate::wire::ip::{V4_HEADER, V6_HEADER};
use crate::wire::packet::{Eth, Ip, IpVersion, L4, Net, PROTOCOL_TCP, Packet, TcpFlags, VlanStack};
use crate::wire::segment::validate_hdr;
use crate::wire::tcp::TCP_CHECKSUM_AT;
use crate::wire::virtio_net::VirtioNetHdr;

/// Bytes of an Ethernet header without tags.
const ETHERNET: usize = 14;
/// The longest frame of an acknowledgement that a flow expects: IPv6, and TCP with timestamps.
const EXPECTED_ACK_MAX: usize = ETHERNET + V6_HEADER + 32;

/// The use that a flow has made of a frame for its guest.
enum Offered {
    /// It was the one that the flow expected.
    Taken,
    /// It is for the flow, which looks at it more closely.
    Unexpected(FlowId),
    /// The flow is not in the path.
    Passes,
    /// There is none.
    Unknown,
}

impl Engine<'_> {
    /// A frame came in on `port`. It may be edited in place (never in length); on `Forward` and
    /// `Flood` the caller sends it on, with `hdr`.
    pub fn handle_frame(
        &mut self,
        now: Instant,
        port: PortId,
        hdr: &mut VirtioNetHdr,
        frame: &mut [u8],
    ) -> Verdict {
        let staged = self.stage(now, port, frame);
        self.handle_staged(now, port, hdr, frame, &staged)
    }

    /// The same for a frame that was staged, and is as it was then.
    #[inline(never)] // so that a profile shows it, and it costs the same wherever it is called
    pub fn handle_staged(
        &mut self,
        now: Instant,
        port: PortId,
        hdr: &mut VirtioNetHdr,
        frame: &mut [u8],
        staged: &Staged,
    ) -> Verdict {
        let way = if staged.switch_then == self.networks.alone().changes() {
            staged.flow.as_ref()
        } else {
            let Some(from) = self.port(port) else { return Verdict::Drop(DropReason::PortDown) };
            if from.wire.is_some() {
                return self.handle_on_wire(now, port, hdr, frame);
            }
            if from.config.is_guest() {
                return self.handle_from_guest(now, port, hdr, frame, staged);
            }
            self.find_way(now, port, frame, staged)
        };
        let Some(key) = way else {
            let result = self.process_from_uplink(now, port, hdr, frame);
            return self.count(now, port, result, frame);
        };
        let out = PortId(key.key.port);
        match self.offer_to_flow(now, key, hdr, frame, ETHERNET) {
            Offered::Taken => Verdict::Absorbed,
            Offered::Unexpected(id) => {
                let result = self.process_toward_flow(now, out, id, hdr, frame);
                self.count(now, port, result, frame)
            }
            Offered::Unknown if self.common.half_open > 0 => {
                let result = self.process_toward_half_open(now, out, key, hdr, frame);
                self.count(now, port, result, frame)
            }
            Offered::Unknown | Offered::Passes => {
                self.note_given(now, out);
                Verdict::Forward(out)
            }
        }
    }

    #[inline(always)]
    fn handle_from_guest(
        &mut self,
        now: Instant,
        port: PortId,
        hdr: &mut VirtioNetHdr,
        frame: &mut [u8],
        staged: &Staged,
    ) -> Verdict {
        if let Some(key) = &staged.flow
            && let Some(fate) = self.offer_from_guest(now, port, key, hdr, frame)
        {
            return match fate {
                Fate::Absorbed => Verdict::Absorbed,
                fate => self.count(now, port, verdict(port, fate), frame),
            };
        }
        let result = self.process_from_guest(now, port, hdr, frame, staged);
        self.count(now, port, result, frame)
    }

    /// Counts a drop, and a frame that a guest has yet to see.
    pub(super) fn count(
        &mut self,
        now: Instant,
        port: PortId,
        result: Result<Verdict, DropReason>,
        frame: &[u8],
    ) -> Verdict {
        let verdict = result.unwrap_or_else(Verdict::Drop);
        match verdict {
            Verdict::Drop(reason) => {
                self.count_drop(port, reason);
                if reason == DropReason::SpoofedMac {
                    self.note_spoofed(port, frame);
                }
            }
            Verdict::Forward(out) => self.note_given(now, out),
            Verdict::Flood => return self.flood(now, port, frame),
            Verdict::Absorbed => {}
        }
        verdict
    }

    /// The frame has a source MAC that is not its guest's, or is an ARP that names another one.
    #[cold]
    fn note_spoofed(&mut self, port: PortId, frame: &[u8]) {
        let Ok(Packet { eth, net, .. }) = Packet::parse(frame) else { return };
        let own = self.networks.of(port).mac_of(port);
        let claimed = match net {
            Net::Arp(arp) if own == Some(eth.src) => arp.sender_mac,
            _ => eth.src,
        };
        if let Some(port) = self.port_mut(port) {
            port.spoofed = Some(claimed);
        }
    }

    /// Whether `port` gets a frame of `ingress` that is flooded. A guest whose MAC is known has no
    /// other station behind it, so frames for unknown stations are not for it.
    #[must_use]
    pub fn is_flooded(&self, ingress: PortId, port: PortId, frame: FloodedFrame) -> bool {
        let FloodedFrame { is_group, vlan } = frame;
        port != ingress
            && self.wire_of(port).is_none()
            && !self.networks.are_apart(ingress, port)
            && (is_group || self.networks.of(port).may_be_behind(port))
            && vlan.is_some_and(|vlan| self.networks.of(port).is_in(port, vlan))
    }

    /// A frame is for many: bounded, because all of them have to take it.
    #[cold]
    fn flood(&mut self, now: Instant, ingress: PortId, frame: &[u8]) -> Verdict {
        let storms = |p: &mut Port| p.config.is_guest() && !p.group_frames.allows(now);
        let reason = match is_group(frame) {
            true if frame.len() > GROUP_BYTES_MAX => Some(DropReason::TooBig),
            true if self.port_mut(ingress).is_some_and(storms) => Some(DropReason::Storm),
            _ => None,
        };
        if let Some(reason) = reason {
            self.count_drop(ingress, reason);
            return Verdict::Drop(reason);
        }
        self.note_flooded(now, ingress, frame);
        Verdict::Flood
    }

    /// All receivers of a flooded frame have yet to see it.
    #[cold]
    pub(super) fn note_flooded(&mut self, now: Instant, ingress: PortId, frame: &[u8]) {
        let frame = FloodedFrame::of(frame);
        for port in (0..).map(PortId).take(self.ports.len()) {
            if self.is_flooded(ingress, port, frame) {
                self.note_given(now, port);
            }
        }
    }

    /// The key of a frame from the network, and with it the port to which the frame goes. `None`:
    /// this frame has to be looked at.
    fn find_way<'s>(
        &mut self,
        now: Instant,
        port: PortId,
        frame: &[u8],
        staged: &'s Staged,
    ) -> Option<&'s HashedKey> {
        let key = staged.flow.as_ref()?;
        let (untagged, (dst, src)) = (VlanStack::default(), macs(frame));
        let switch = self.networks.of_mut(port);
        switch.learn(now, port, untagged, src);
        let out = switch.lookup(now, port, untagged, dst);
        (out == Out::Port(PortId(key.key.port))).then_some(key)
    }

    /// One more thing that a guest has yet to see before it counts as alive by itself again.
    #[inline]
    pub(super) fn note_given(&mut self, now: Instant, out: PortId) {
        let port = self.ports.get_mut(usize::from(out.0)).and_then(Option::as_mut);
        if let Some(port) = port.filter(|port| port.config.is_guest()) {
            port.vm.clock.on_forwarded(now);
        }
    }

    /// Offers a frame on its way to the guest of `key`, with a layer-2 header of `l2_len` bytes, to
    /// its flow.
    #[inline(always)]
    fn offer_to_flow(
        &mut self,
        now: Instant,
        key: &HashedKey,
        hdr: &VirtioNetHdr,
        frame: &[u8],
        l2_len: usize,
    ) -> Offered {
        let Some((id, key, flow)) = self.flows.lookup_hashed(key) else { return Offered::Unknown };
        if flow.on_passing(now) {
            return Offered::Passes;
        }
        let Some(mut cx) = context(now, id, key, &mut self.ports, &mut self.common) else {
            return Offered::Passes;
        };
        let ended = flow.on_expected_from_net(&mut cx, frame, l2_len, hdr.is_vouched_for());
        let Some(ended) = ended else { return Offered::Unexpected(id) };
        let class = flow.class_if_new(true);
        self.end_event(id, ended.wake_at, class);
        Offered::Taken
    }

    #[inline(never)] // what is expected, or forwarded as it is, need not pay for this
    fn process_toward_flow(
        &mut self,
        now: Instant,
        out: PortId,
        id: FlowId,
        hdr: &VirtioNetHdr,
        frame: &mut [u8],
    ) -> Result<Verdict, DropReason> {
        let packet = Packet::parse(frame)?;
        let Some((ip, tcp)) = packet.tcp() else { return Ok(Verdict::Forward(out)) };
        let mut f = Frame { bytes: frame, hdr, eth: &packet.eth, ip, tcp };
        verdict(out, self.process_from_net(now, id, &mut f))
    }

    /// The fate of a frame of G, if its flow expects it: an acknowledgement, or data that H sends
    /// for it. `None`: nothing has changed except the switch's knowledge of G.
    #[inline(always)]
    fn offer_from_guest(
        &mut self,
        now: Instant,
        port: PortId,
        key: &HashedKey,
        hdr: &VirtioNetHdr,
        frame: &[u8],
    ) -> Option<Fate> {
        let (_, src) = macs(frame);
        let may_hand_over = || self.port(port).is_some_and(|p| p.vm.relayed_flows > 0);
        if (frame.len() > EXPECTED_ACK_MAX && !may_hand_over())
            || !is_usual_hdr(hdr, key.key.version)
            || self.networks.of_mut(port).check_ip_source(now, port, src, key.key.g_addr).is_err()
        {
            return None;
        }
        let (id, key, flow) = self.flows.lookup_hashed(key)?;
        let mut cx = context(now, id, key, &mut self.ports, &mut self.common)?;
        let ended = flow.on_expected_from_guest(&mut cx, frame, ETHERNET, hdr.needs_csum())?;
        let class = flow.class_if_new(true);
        self.end_event(id, ended.wake_at, class);
        Some(ended.fate)
    }

    #[inline(never)] // likewise
    fn process_from_uplink(
        &mut self,
        now: Instant,
        port: PortId,
        hdr: &VirtioNetHdr,
        frame: &mut [u8],
    ) -> Result<Verdict, DropReason> {
        let packet = parse(frame)?;
        self.networks.of_mut(port).learn(now, port, packet.eth.vlan, packet.eth.src);
        match self.way_of(now, port, &packet)? {
            Some(out) => self.process_toward(now, out, hdr, frame, &packet),
            None => Ok(self.on_unknown_station(now, port, hdr, frame, &packet)),
        }
    }

    #[inline(never)] // likewise
    fn process_from_guest(
        &mut self,
        now: Instant,
        port: PortId,
        hdr: &mut VirtioNetHdr,
        frame: &mut [u8],
        staged: &Staged,
    ) -> Result<Verdict, DropReason> {
        // By reference, here and below: a `Packet` is too large to move about.
        let packet = &parse(frame)?;
        *hdr = validate_hdr(hdr, frame, packet)?;
        let checked = self.networks.of_mut(port).check_source(now, port, packet);
        if checked == Err(DropReason::SpoofedIp) {
            self.networks.of(port).check_error_from_behind(port, packet, frame)?;
        } else {
            checked?;
        }
        let mut edited = false;
        if packet.tcp().is_none() {
            self.networks.of_mut(port).check_claims(port, packet, frame)?;
        }
        if let Some((ip, tcp)) = packet.tcp() {
            let key = || self.flows.hashed(FlowKey::from_guest(port.0, &packet.eth, ip, tcp));
            let key = staged.flow.unwrap_or_else(key);
            let mut f = Frame { bytes: frame, hdr, eth: &packet.eth, ip, tcp };
            match self.process_segment_from_guest(now, port, &key, &mut f)? {
                Some(may_be_edited) => edited = may_be_edited,
                None => return Ok(Verdict::Absorbed),
            }
        } else if self.on_other_from_guest(now, port, frame, packet) {
            return Ok(Verdict::Absorbed);
        }
        let Some(out) = self.way_of(now, port, packet)? else {
            return Ok(self.on_unknown_station(now, port, hdr, frame, packet));
        };
        let packet_len = frame.len() - usize::from(packet.eth.len);
        // As a bridge does: super-segments, which may be cut on their way, pass.
        if !hdr.is_gso() && self.vm(out).is_some_and(|vm| packet_len > usize::from(vm.mtu)) {
            return Err(DropReason::TooBig);
        }
        if edited {
            let packet = Packet::parse(frame)?;
            return self.process_toward(now, out, hdr, frame, &packet);
        }
        self.process_toward(now, out, hdr, frame, packet)
    }

    /// A frame of a guest that is not a TCP segment. `true`: it is for H alone.
    #[inline(never)] // most are, and the others need not be fast
    pub(super) fn on_other_from_guest(
        &mut self,
        now: Instant,
        port: PortId,
        frame: &[u8],
        packet: &Packet,
    ) -> bool {
        if let Net::Ip(ip) = &packet.net {
            self.note_spoke(now, port, ip.src);
        }
        match packet.net {
            Net::Ip(Ip { l4: L4::Fragment, protocol: PROTOCOL_TCP, dst, .. }) => {
                if let Some(p) = self.port_mut(port) {
                    p.vm.fragment_from_guest = Some((now, dst));
                }
            }
            Net::Ip(ref ip) if ip.l4 == L4::Icmp => {
                return self.on_icmp_from_guest(now, port, frame, &packet.eth, ip);
            }
            _ => {}
        }
        false
    }

    /// The flow with this key, if it has anything to do with its frames. Most frames that are
    /// forwarded as they are leave the engine behind this: they are of no flow, or of one that is
    /// out of the path.
    #[inline(always)]
    pub(super) fn flow_in_path(&mut self, now: Instant, key: &HashedKey) -> Option<FlowId> {
        let (id, _, flow) = self.flows.lookup_hashed(key)?;
        (!flow.on_passing(now)).then_some(id)
    }

    /// Where a frame goes; `None` is everywhere.
    fn way_of(
        &mut self,
        now: Instant,
        ingress: PortId,
        packet: &Packet,
    ) -> Result<Option<PortId>, DropReason> {
        let out = self.egress(now, ingress, packet.eth.vlan, packet.eth.dst)?;
        Ok(out.or_else(|| self.port_of_silent_station(ingress, packet)))
    }

    /// The station to which this goes was silent for so long that the switch sends it everywhere.
    /// But a flow of it is in the path: the port behind which it was heard last.
    #[cold]
    #[inline(never)]
    fn port_of_silent_station(&mut self, ingress: PortId, packet: &Packet) -> Option<PortId> {
        let (ip, tcp) = packet.tcp()?;
        let (vlan, dst) = (packet.eth.vlan, packet.eth.dst);
        let out = self.networks.of(ingress).last_heard(vlan, dst)?;
        let frame = FloodedFrame { is_group: is_group(&dst), vlan: Some(vlan) };
        if frame.is_group || self.vm(out).is_none() || !self.is_flooded(ingress, out, frame) {
            return None;
        }
        let key = FlowKey::from_net(out.0, &packet.eth, ip, tcp);
        let flow = self.flows.lookup(&key).and_then(|id| self.flows.get(id))?;
        (flow.is_live() && flow.is_of(dst)).then_some(out)
    }

    /// A frame goes everywhere. If it is a SYN, a station behind any guest may answer it that has
    /// such stations, and whose connections do not end in it alone (FWD-01).
    #[cold]
    #[inline(never)]
    fn on_unknown_station(
        &mut self,
        now: Instant,
        ingress: PortId,
        hdr: &VirtioNetHdr,
        frame: &mut [u8],
        packet: &Packet,
    ) -> Verdict {
        let (eth, dst) = (&packet.eth, packet.eth.dst);
        let flooded = FloodedFrame { is_group: is_group(&dst), vlan: Some(eth.vlan) };
        let Some((ip, tcp)) = packet.tcp() else { return Verdict::Flood };
        let opens = tcp.flags.contains(TcpFlags::SYN)
            && !tcp.flags.intersects(TcpFlags::ACK.union(TcpFlags::RST));
        if !opens || flooded.is_group || !(Frame { bytes: frame, hdr, eth, ip, tcp }).checksum_ok()
        {
            return Verdict::Flood;
        }
        for out in (0..).map(PortId).take(self.ports.len()) {
            let has_stations = self.vm(out).is_some_and(|vm| vm.local == Local::Always);
            let key = FlowKey::from_net(out.0, eth, ip, tcp);
            if has_stations
                && self.is_flooded(ingress, out, flooded)
                && self.flows.lookup(&key).is_none()
            {
                // It begins no boost: any VM may be the one, or none (BST-01).
                self.remember_syn(now, out, key, None, ip, tcp);
            }
        }
        Verdict::Flood
    }

    /// Where the switch sends a frame; `None` is everywhere.
    pub(super) fn egress(
        &mut self,
        now: Instant,
        ingress: PortId,
        vlan: VlanStack,
        dst: Mac,
    ) -> Result<Option<PortId>, DropReason> {
        if self.end_of_wire(ingress).is_some() {
            return Err(DropReason::PortDown); // its other end is not there
        }
        match self.networks.of_mut(ingress).lookup(now, ingress, vlan, dst) {
            Out::Port(out) => Ok(Some(out)),
            Out::Flood => Ok(None),
            Out::Drop(reason) => Err(reason),
        }
    }

    /// A frame on its way to `out`; if a guest is there, the inbound pipe of a flow may edit or
    /// absorb it.
    pub(super) fn process_toward(
        &mut self,
        now: Instant,
        out: PortId,
        hdr: &VirtioNetHdr,
        frame: &mut [u8],
        packet: &Packet,
    ) -> Result<Verdict, DropReason> {
        let Some(Some(port)) = self.ports.get_mut(usize::from(out.0)) else {
            return Ok(Verdict::Forward(out));
        };
        if !port.config.is_guest() {
            return Ok(Verdict::Forward(out));
        }
        let Some((ip, tcp)) = packet.tcp() else {
            match packet.net {
                Net::Ip(Ip { l4: L4::Fragment, protocol: PROTOCOL_TCP, .. }) => {
                    port.vm.fragment_at = Some(now);
                }
                Net::Ip(ref ip)
                    if ip.l4 == L4::Icmp
                        && (port.vm.relayed_flows > 0 || port.vm.translated_flows > 0) =>
                {
                    self.on_icmp(now, out, frame, &packet.eth, ip);
                }
                _ => {}
            }
            return Ok(Verdict::Forward(out));
        };
        let key = &self.flows.hashed(FlowKey::from_net(out.0, &packet.eth, ip, tcp));
        let mut f = Frame { bytes: frame, hdr, eth: &packet.eth, ip, tcp };
        let fate = if tcp.flags.contains(TcpFlags::SYN) {
            self.process_syn_from_net(now, out, key, &mut f)
        } else {
            match self.offer_to_flow(now, key, hdr, f.bytes, f.l2().len()) {
                Offered::Taken => Fate::Absorbed,
                Offered::Unexpected(id) => self.process_from_net(now, id, &mut f),
                Offered::Unknown if self.common.half_open > 0 => {
                    self.process_half_open(now, &key.key, &mut f)
                }
                Offered::Unknown | Offered::Passes => Fate::Pass,
            }
        };
        verdict(out, fate)
    }

    /// A frame of R for a flow that is in the path, or in its handshake.
    pub(super) fn process_from_net(&mut self, now: Instant, id: FlowId, f: &mut Frame<'_>) -> Fate {
        let mut completed = false;
        let fate = self.with_frame(now, id, |flow, cx| {
            let was = flow.state();
            let ended = flow.on_frame_from_net(cx, f);
            completed = was == State::Handshake && flow.is_live();
            ended
        });
        if completed && let Some(key) = self.flows.key(id) {
            self.syn_cache.forget(key); // copies of the SYN that were seen until now are answered
        }
        fate.unwrap_or(Fate::Pass)
    }
}

/// The parsed frame, unless any receiver would drop it (COM-03).
#[inline]
fn parse(frame: &[u8]) -> Result<Packet, DropReason> {
    match Packet::parse(frame)? {
        Packet { net: Net::Ip(Ip { l4: L4::MalformedTcp, .. }), .. } => {
            Err(DropReason::MalformedHeader)
        }
        packet => Ok(packet),
    }
}

/// The guest's header for its untagged TCP frame says only that the checksum is unfinished:
/// [`validate_hdr`] would find nothing wrong with it.
#[inline(always)]
fn is_usual_hdr(hdr: &VirtioNetHdr, version: IpVersion) -> bool {
    let l4_start = match version {
        IpVersion::V4 => ETHERNET + V4_HEADER,
        IpVersion::V6 => ETHERNET + V6_HEADER,
    };
    let usual = usize::from(hdr.csum_start) == l4_start && hdr.csum_offset == TCP_CHECKSUM_AT;
    !hdr.is_gso() && (usual || !hdr.needs_csum())
}

/// The verdict on a frame on its way to `out`.
fn verdict(out: PortId, fate: Fate) -> Result<Verdict, DropReason> {
    match fate {
        Fate::Pass => Ok(Verdict::Forward(out)),
        Fate::Absorbed => Ok(Verdict::Absorbed),
        Fate::Drop(reason) => Err(reason),
    }
}

/// The properties of a frame that decide which ports get it when it is flooded.
#[derive(Clone, Copy, Debug)]
pub struct FloodedFrame {
    is_group: bool,
    /// `None`: it is too short to be a frame, and no port gets it.
    vlan: Option<VlanStack>,
}

impl FloodedFrame {
    /// Of this frame.
    #[must_use]
    pub fn of(frame: &[u8]) -> Self {
        let vlan = Eth::parse(frame).ok().map(|eth| eth.vlan);
        Self { is_group: is_group(frame), vlan }
    }
}

/// Whether a frame is for a group. A frame without an address is for no port.
fn is_group(frame: &[u8]) -> bool {
    frame.first().is_some_and(|first| first & 1 != 0)
}
