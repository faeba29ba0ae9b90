//! The flow and the connection of a frame, and their names in the engine and the plan.

use nightporter_check::history::{History, Side};
use nightporter_check::observer::Setting;
use nightporter_check::stream::streams_of;
use nightporter_check::tap::{FlowName, Tap};
use nightporter_check::wire::{IpAddr16, IpVersion, Packet, Tcp};
use nightporter_core::flow::key::FlowKey;
use nightporter_core::port::PortId;

use crate::plan::{ConnPlan, FaultKind, Machine, Plan, StackKind, StackPlan};
use crate::stack::address::{Ports, machine_of};

/// The flow a segment belongs to, and whether the guest sent it. At the uplink the guest is the
/// end whose MAC is a guest's; between two guests of one host each has a flow of its own, and the
/// tap says whose side this is.
#[must_use]
pub fn flow_of(packet: &Packet, tap: Tap) -> Option<(FlowName, bool)> {
    let (ip, tcp) = packet.tcp()?;
    let from_guest = match tap {
        Tap::FromNet | Tap::ToGuest(_) => false,
        Tap::ToNet | Tap::FromGuest(_) => true,
    };
    let mac = if from_guest { packet.eth.src } else { packet.eth.dst };
    let Some(Machine::Guest(guest)) = machine_of(mac) else { return None };
    // A frame that is flooded, or broken on the way, belongs to no flow.
    let there = match tap {
        Tap::FromNet | Tap::ToNet => true,
        Tap::FromGuest(g) | Tap::ToGuest(g) => g == guest,
    };
    let own = if from_guest { ip.src } else { ip.dst };
    let address = Machine::Guest(guest).address();
    if !there || ![address.ip(false), address.ip(true)].contains(&own) {
        return None;
    }
    let (guest_port, remote, remote_port) = if from_guest {
        (tcp.src_port, ip.dst.0, tcp.dst_port)
    } else {
        (tcp.dst_port, ip.src.0, tcp.src_port)
    };
    Some((FlowName { guest, guest_port, remote, remote_port }, from_guest))
}

/// The machine whose end is on `side` of a flow.
pub(super) fn machine_of_side(h: &History, plan: &Plan, side: Side) -> Option<Machine> {
    let conn = &plan.conns[h.conn?];
    let guest = Machine::Guest(h.name.guest);
    let other = if conn.client == guest { conn.server } else { conn.client };
    Some(if side == Side::G { guest } else { other })
}

impl Setting for Plan {
    fn flow_of(&self, packet: &Packet, tap: Tap) -> Option<(FlowName, bool)> {
        // A frame whose tag was broken on the way is of another VLAN, and no machine takes it.
        flow_of(packet, tap).filter(|_| packet.eth.vlan == self.tag())
    }

    fn begins(&self, name: FlowName, tcp: &Tcp) -> Option<History> {
        let guest = Machine::Guest(name.guest);
        let (conn, client) = self.conn_of(name, tcp)?;
        let server = self.conns[conn].server;
        let means_harm = |m: Machine| self.stack_of(m).kind == StackKind::Hostile;
        let hostile = means_harm(client) || means_harm(server);
        let streams = streams_of(conn, client == guest);
        let other = if client == guest { server } else { client };
        let opaque = matches!(other, Machine::Guest(_));
        let mut h = History::new(name, Some(conn), opaque, (!hostile).then_some(streams));
        h.known.hostile = [means_harm(other), means_harm(guest)];
        let shrinks =
            |machine| self.faults.iter().any(|f| f.kind == FaultKind::ShrinkWindow { machine });
        let hostile_remote = |r: &crate::plan::RemotePlan| r.stack.kind == StackKind::Hostile;
        h.known.mtu = Some(self.guests[usize::from(name.guest)].mtu);
        (h.known.shrinks, h.known.net_keeps_window) = (shrinks(guest), !shrinks(other));
        let hostile_neighbor = |g: u16| guest != Machine::Guest(g) && means_harm(Machine::Guest(g));
        h.known.fragments = self.remotes.iter().any(hostile_remote)
            || (0..=u16::MAX).take(self.guests.len()).any(hostile_neighbor);
        h.known.deaf = self.is_deaf(conn);
        let guest = &self.guests[usize::from(name.guest)];
        (h.known.floods, h.known.forwards) = (guest.congestion_offload, guest.forwards.is_some());
        h.known.ecn = self.stack_of(client).ecn && self.stack_of(server).ecn;
        Some(h)
    }

    fn begins_again(&self, h: &mut History, tcp: &Tcp) {
        if h.conn.is_some_and(|conn| self.conns[conn].reuse.is_some()) {
            let guest = Machine::Guest(h.name.guest);
            let next = self.conn_of(h.name, tcp);
            h.note_next(next.map(|(conn, client)| (conn, client == guest)));
        }
    }

    fn key_of(&self, name: FlowName, port: PortId) -> FlowKey {
        let address = Machine::Guest(name.guest).address();
        let v6 = name.remote[..10] != [0; 10];
        FlowKey {
            g_addr: address.ip(v6),
            r_addr: IpAddr16(name.remote),
            vlan: self.tag() << 32,
            g_port: name.guest_port,
            r_port: name.remote_port,
            port: port.0,
            version: if v6 { IpVersion::V6 } else { IpVersion::V4 },
        }
    }

    fn flows_max(&self, guest: usize) -> u32 {
        self.guests[guest].flows_max
    }

    fn ring_slots(&self, guest: usize) -> usize {
        self.guests[guest].ring_slots
    }

    fn guests(&self) -> usize {
        self.guests.len()
    }

    fn is_crowd(&self) -> bool {
        self.is_crowd()
    }
}

impl Plan {
    /// Its VLAN: type and number of the tag.
    fn tag(&self) -> u64 {
        self.vlan.map_or(0, |id| 0x8100_0000 | u64::from(id))
    }

    /// The TCP of a machine.
    pub(super) fn stack_of(&self, machine: Machine) -> &StackPlan {
        match machine {
            Machine::Guest(i) => &self.guests[usize::from(i)].stack,
            Machine::Remote(i) => &self.remotes[usize::from(i)].stack,
        }
    }

    /// The connection that a flow is a side of and that this SYN or SYN-ACK is part of, and its
    /// client.
    fn conn_of(&self, name: FlowName, tcp: &Tcp) -> Option<(usize, Machine)> {
        let guest = Machine::Guest(name.guest);
        let isn = if tcp.flags.ack() { tcp.ack.0.wrapping_sub(1) } else { tcp.seq.0 };
        let is_it = |(id, conn): &(usize, &ConnPlan)| {
            let ports = Ports::of(*id, conn);
            let its = conn.reuse.and_then(|reuse| reuse.isn).is_none_or(|own| own == isn);
            let (client, server) =
                (conn.client.address().ip(conn.v6), conn.server.address().ip(conn.v6));
            let here = (name.guest_port, name.remote_port, IpAddr16(name.remote));
            its && (conn.client == guest && here == (ports.client, ports.server, server)
                || conn.server == guest && here == (ports.server, ports.client, client))
        };
        self.conns.iter().enumerate().find(is_it).map(|(id, conn)| (id, conn.client))
    }
}
