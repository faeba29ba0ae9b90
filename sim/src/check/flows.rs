//! Which flow and which connection a frame belongs to, and how the engine and the plan name them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use nightporter_core::flow::key::FlowKey;
use nightporter_core::port::PortId;

use super::history::{History, Side};
use super::{FlowName, Tapped};
use crate::plan::{Fault, FaultKind, Machine, Plan, StackKind, StackPlan};
use crate::stack::address::Ports;
use crate::stack::pattern::Stream;
use crate::wire::{Ip, IpAddr16, IpVersion, Tcp};

/// The history of a flow; it begins with a SYN.
pub(super) fn history_of<'a>(
    flows: &'a mut BTreeMap<FlowName, History>,
    plan: &Plan,
    name: FlowName,
    tcp: &Tcp,
) -> Option<&'a mut History> {
    let guest = Machine::Guest(name.guest);
    let place = match flows.entry(name) {
        Entry::Occupied(place) => {
            let h = place.into_mut();
            if tcp.flags.syn() && h.conn.is_some_and(|conn| plan.conns[conn].reuse.is_some()) {
                h.note_next(plan.conn_of(name, tcp).map(|(conn, client)| (conn, client == guest)));
            }
            return Some(h);
        }
        Entry::Vacant(_) if !tcp.flags.syn() => return None,
        Entry::Vacant(place) => place,
    };
    let (conn, client) = plan.conn_of(name, tcp)?;
    let server = plan.conns[conn].server;
    let means_harm = |m: Machine| plan.stack_of(m).kind == StackKind::Hostile;
    let hostile = means_harm(client) || means_harm(server);
    let streams = streams_of(conn, client == guest);
    let other = if client == guest { server } else { client };
    let opaque = matches!(other, Machine::Guest(_));
    let mut h = History::new(name, Some(conn), opaque, (!hostile).then_some(streams));
    h.hostile = [means_harm(other), means_harm(guest)];
    let shrinks = |f: &Fault| f.kind == FaultKind::ShrinkWindow { machine: guest };
    h.mtu = Some(plan.guests[usize::from(name.guest)].mtu);
    h.shrinks = plan.faults.iter().any(shrinks);
    h.deaf = plan.is_deaf(conn);
    h.ecn = plan.stack_of(client).ecn && plan.stack_of(server).ecn;
    Some(place.insert(h))
}

/// What R and G write.
pub(super) fn streams_of(conn: usize, guest_is_client: bool) -> [Stream; 2] {
    [Stream::of(conn, !guest_is_client), Stream::of(conn, guest_is_client)]
}

/// What a frame is, but for what a driver may finish on the way: the TCP checksum.
pub(crate) fn fingerprint(t: &Tapped<'_>, ip: &Ip) -> u64 {
    fingerprint_of(t.bytes, ip)
}

pub(super) fn fingerprint_of(bytes: &[u8], ip: &Ip) -> u64 {
    let all = bytes;
    let from = usize::from(ip.header_offset);
    let checksum_at = usize::from(ip.payload_offset) + 16;
    let end = (ip.end as usize).min(all.len());
    let mut hash = 0x9e37_79b9_7f4a_7c15_u64;
    let mut feed = |bytes: &[u8]| {
        for word in bytes.chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            hash = (hash ^ u64::from_le_bytes(padded)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            hash ^= hash >> 29;
        }
    };
    feed(&all[from..checksum_at]);
    feed(&all[checksum_at + 2..end]);
    hash
}

/// How the engine knows a flow.
pub(super) fn key_of(name: FlowName, port: PortId, vlan: u64) -> FlowKey {
    let address = Machine::Guest(name.guest).address();
    let v6 = name.remote[..10] != [0; 10];
    FlowKey {
        g_addr: address.ip(v6),
        r_addr: IpAddr16(name.remote),
        vlan,
        g_port: name.guest_port,
        r_port: name.remote_port,
        port: port.0,
        version: if v6 { IpVersion::V6 } else { IpVersion::V4 },
    }
}

impl Plan {
    /// The TCP of a machine.
    pub(in crate::check) fn stack_of(&self, machine: Machine) -> &StackPlan {
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
        let is_it = |(id, conn): &(usize, &crate::plan::ConnPlan)| {
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

impl History {
    /// Whose end is on `side`.
    pub(super) fn machine(&self, plan: &Plan, side: Side) -> Option<Machine> {
        let conn = &plan.conns[self.conn?];
        let guest = Machine::Guest(self.name.guest);
        let other = if conn.client == guest { conn.server } else { conn.client };
        Some(if side == Side::G { guest } else { other })
    }
}
