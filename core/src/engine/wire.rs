//! Wires: a frame that enters at one of two ports leaves at the other, whatever it is.
//!
//! One end is a VM's, the other the network's. No switch is asked: nothing is learned but the VM's
//! MAC, and no frame is flooded, dropped or sent back for its addresses. Segments of TCP between
//! the VM's MAC and the network are offered to flows, as those of other ports. All else passes as
//! it is, with its header, also what nobody here understands.

use super::walks::Deed;
use crate::drops::DropReason;
use crate::engine::{Engine, Verdict};
use crate::flow::key::FlowKey;
use crate::flow::table::Class;
use crate::port::{PortConfig, PortId};
use crate::switch::Mac;
use crate::tcp::{Frame, Passed};
use crate::time::Instant;
use crate::wire::packet::{IpAddr16, Packet};
use crate::wire::segment::validate_hdr;
use crate::wire::virtio_net::VirtioNetHdr;

/// An end of a wire.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wire {
    /// The other end, if it is there.
    pub(super) end: Option<PortId>,
    /// At the VM's end: its MAC, which is configured, or that of its first frame.
    pub(super) mac: Option<Mac>,
}

impl Engine<'_> {
    /// Frames have passed plain between the ends of the wire of this VM (LIFE-17). Nothing is known
    /// of them but of which connections they may have been. Those of these that owe ask G what it
    /// has, or are reset on both sides; the others leave the path. Frames are taken for older than
    /// those until [`Self::handle_caught_up`].
    pub fn handle_passed_plain(
        &mut self,
        now: Instant,
        port: PortId,
        passed: impl Fn(&FlowKey) -> Passed,
    ) {
        self.syn_cache.remove_port(port.0); // what was answered meanwhile is not known
        if let Some(port) = self.port_mut(port) {
            port.vm.catches_up = true;
        }
        for class in [Class::Unproven, Class::Live, Class::Spent] {
            self.for_each(port, class, |engine, id| {
                match engine.flows.key(id).map_or(Passed::Nothing, &passed) {
                    Passed::Nothing => {}
                    passed => engine.does(now, Deed::PassedPlain(passed), id),
                }
            });
        }
    }

    /// All frames that waited at both ends of the wire of this VM when others had passed plain have
    /// been handled: the next ones are newer.
    pub fn handle_caught_up(&mut self, port: PortId) {
        if let Some(port) = self.port_mut(port) {
            port.vm.catches_up = false;
        }
    }

    /// The wire of this VM is about to be taken away: flows that still owe are reset on both sides,
    /// the others leave the path.
    pub fn handle_detached(&mut self, now: Instant, port: PortId) {
        self.syn_cache.remove_port(port.0);
        for class in [Class::Unproven, Class::Live] {
            self.for_each(port, class, |engine, id| engine.does(now, Deed::Detached, id));
        }
    }

    #[inline]
    pub(super) fn wire_of(&self, port: PortId) -> Option<&Wire> {
        self.port(port)?.wire.as_ref()
    }

    /// The other end of a wire, if that is there, also for a port that has just been removed, whose
    /// remotes are still to be told. `None`: the port is on no wire.
    #[inline]
    pub(super) fn end_of_wire(&self, port: PortId) -> Option<Option<PortId>> {
        match self.port(port) {
            Some(port) => Some(port.wire.as_ref()?.end),
            None => self.removed_wire.filter(|(removed, _)| *removed == port).map(|it| Some(it.1)),
        }
    }

    pub(super) fn wire_mut(&mut self, port: PortId) -> Option<&mut Wire> {
        self.port_mut(port)?.wire.as_mut()
    }

    /// The end that a port with this configuration will be.
    pub(super) fn wire_for(&self, config: &PortConfig) -> Wire {
        let is_end = |port: &PortId| {
            let other = self.port_config(*port);
            other.is_some_and(|other| other.wire && other.network == config.network)
        };
        let end = (0..).map(PortId).take(self.ports.len()).find(is_end);
        Wire { end, mac: config.as_guest().and_then(|guest| guest.mac) }
    }

    /// The end `port` is about to be there.
    pub(super) fn join_wire(&mut self, port: PortId, name: &str) {
        let others = self.ports.iter_mut().flatten().filter(|it| it.config.network == name);
        others.filter_map(|it| it.wire.as_mut()).for_each(|wire| wire.end = Some(port));
    }

    /// The end `port` has gone.
    pub(super) fn leave_wire(&mut self, port: PortId, wire: Wire) {
        self.removed_wire = wire.end.map(|end| (port, end));
        let wires = self.ports.iter_mut().flatten().filter_map(|it| it.wire.as_mut());
        wires.filter(|wire| wire.end == Some(port)).for_each(|wire| wire.end = None);
    }

    /// The MAC of the guest behind `port`, once it is known.
    pub(super) fn mac_of(&self, port: PortId) -> Option<Mac> {
        match self.wire_of(port) {
            Some(wire) => wire.mac,
            None => self.networks.of(port).mac_of(port),
        }
    }

    /// Whether the guest behind `port` owns an address: on a wire, which has one station, all.
    pub(super) fn is_own_ip(&self, port: PortId, ip: IpAddr16) -> bool {
        self.wire_of(port).is_some() || self.networks.of(port).is_own_ip(port, ip)
    }

    /// A frame came in at an end of a wire.
    #[inline(never)] // frames of the switch need not pay for this
    pub(super) fn handle_on_wire(
        &mut self,
        now: Instant,
        port: PortId,
        hdr: &mut VirtioNetHdr,
        frame: &mut [u8],
    ) -> Verdict {
        let Some(end) = self.wire_of(port).and_then(|wire| wire.end) else {
            return self.count(now, port, Err(DropReason::PortDown), frame);
        };
        let is_guest = self.port(port).is_some_and(|port| port.config.is_guest());
        let result = match Packet::parse(frame) {
            Ok(packet) if is_guest && self.is_of_guest(port, packet.eth.src) => {
                self.process_wire_from_guest(now, port, end, hdr, frame, &packet)
            }
            Ok(packet) if !is_guest && self.mac_of(end) == Some(packet.eth.dst) => {
                self.process_toward(now, end, hdr, frame, &packet)
            }
            _ => Ok(Verdict::Forward(end)),
        };
        self.count(now, port, result, frame)
    }

    /// Whether a frame from the VM's end with this source is the VM's own. Its first one is.
    fn is_of_guest(&mut self, port: PortId, src: Mac) -> bool {
        let is_station = src[0] & 1 == 0 && src != [0; 6];
        let Some(wire) = self.wire_mut(port).filter(|_| is_station) else { return false };
        *wire.mac.get_or_insert(src) == src
    }

    fn process_wire_from_guest(
        &mut self,
        now: Instant,
        port: PortId,
        end: PortId,
        hdr: &mut VirtioNetHdr,
        frame: &mut [u8],
        packet: &Packet,
    ) -> Result<Verdict, DropReason> {
        let Some((ip, tcp)) = packet.tcp() else {
            let is_for_host = self.on_other_from_guest(now, port, frame, packet);
            return Ok(if is_for_host { Verdict::Absorbed } else { Verdict::Forward(end) });
        };
        // Nobody here understands a header that is wrong, and the tap may.
        let Ok(valid) = validate_hdr(hdr, frame, packet) else { return Ok(Verdict::Forward(end)) };
        let key = self.flows.hashed(FlowKey::from_guest(port.0, &packet.eth, ip, tcp));
        let mut f = Frame { bytes: frame, hdr: &valid, eth: &packet.eth, ip, tcp };
        let edited = self.process_segment_from_guest(now, port, &key, &mut f)?;
        if edited == Some(true) {
            *hdr = valid;
        }
        Ok(if edited.is_some() { Verdict::Forward(end) } else { Verdict::Absorbed })
    }
}
