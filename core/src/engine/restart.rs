//! After a restart: promises of a predecessor that this process cannot keep (LIFE-09, INV-21).

use crate::engine::{Common, Engine, Port, context};
use crate::flow::key::FlowKey;
use crate::flow::table::FlowId;
use crate::port::PortId;
use crate::store::flow_store::{Recovered, recover};
use crate::store::record::{Record, network_hash};
use crate::tcp::FlowContext;
use crate::tcp::flow::Flow;
use crate::tcp::vm::{Presence, Vm};
use crate::time::Instant;

/// The fate of a predecessor's flows.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Restarted {
    /// They go on once their guests are there.
    pub resumed: usize,
    /// Promises that are broken: both sides are reset. Without those that a predecessor had reset.
    pub reset: usize,
}

impl Engine<'_> {
    /// Flows of the arena go on if their records are whole and say all that is needed: they stand
    /// still until [`Self::handle_guest_back`] says that their guest is there, as it was, and end
    /// with any other driver, or after [`T_AWAITED`]. On a wire their guest is here, and is asked
    /// what it has (LIFE-17). Every other flow that has bytes R believes delivered and G has not
    /// acknowledged is reset on both sides; one that owes nothing is PASS.
    ///
    /// Call once, after the ports were added, before drivers are reported. A guest that connects
    /// later gets its RST then. Of a VM that has no port any more, as when a command added it, or
    /// that is in another network now, only R is told, if anybody is in its network any more.
    ///
    /// [`T_AWAITED`]: crate::limits::T_AWAITED
    pub fn handle_restart(&mut self, now: Instant) -> Restarted {
        self.restart(now, false).0
    }

    /// Like [`Self::handle_restart`] for VMs whose wires are there. The flows of others stay in the
    /// arena as they are, for the next process; how many those are.
    pub fn handle_restart_on_wires(&mut self, now: Instant) -> (Restarted, usize) {
        self.restart(now, true)
    }

    fn restart(&mut self, now: Instant, on_wires: bool) -> (Restarted, usize) {
        let (mut restarted, mut left) = (Restarted::default(), 0);
        let Restarted { resumed, reset } = &mut restarted;
        for mut found in recover(&mut self.common.arena) {
            let record = found.record;
            let port = self.port_of(&record);
            if on_wires && !port.is_some_and(|port| self.has_wire(port)) {
                left += 1;
                continue; // its pages are the record's
            }
            if let Some(port) = port.filter(|_| found.complete)
                && self.resume(now, port, &mut found)
            {
                *resumed += 1;
                continue;
            }
            found.store.clear(&mut self.common.arena);
            let owed = record.rcv_nxt > record.guest_una;
            if !owed {
                self.common.arena.free_record(found.id);
                continue;
            }
            let Some(port) = port else {
                *reset += 1;
                self.tell_remote_of_nobody(now, &record);
                self.common.arena.free_record(found.id);
                continue;
            };
            let key = FlowKey { port: port.0, ..record.key };
            if self.flows.lookup(&key).is_some() {
                // Its record was found before. We never write two of one flow.
                self.common.arena.free_record(found.id);
                continue;
            }
            *reset += usize::from(!self.common.arena.note_told(found.id));
            if !self.flows.has_room(key.port) {
                // The limit is lower than it was. R is told now; G is told when R answers it.
                self.tell_remote(now, &key, Flow::recovered(now, &record, None));
                self.common.arena.free_record(found.id);
                continue;
            }
            // The record stays until the entry goes: another crash before then tells them again.
            let flow = Flow::recovered(now, &record, Some(found.id));
            let is_wire = self.wire_of(port).is_some();
            if let Some(id) = self.insert_flow(key, flow) {
                self.with_flow(now, id, |flow, cx| flow.reset_after_restart(cx, is_wire));
            }
        }
        (restarted, left)
    }

    /// Whether a VM is on a wire, which is there.
    fn has_wire(&self, port: PortId) -> bool {
        self.port(port).is_some_and(|port| port.wire.is_some() && port.features.is_some())
    }

    /// A flow goes on in the name of the guest of `port`, which is awaited. `false`: it cannot, and
    /// nothing has changed.
    fn resume(&mut self, now: Instant, port: PortId, found: &mut Recovered) -> bool {
        let key = FlowKey { port: port.0, ..found.record.key };
        let has_driver = self.port(port).is_none_or(|port| port.features.is_some());
        // Without a daemon frames of a wire have passed plain, and nobody knows which: its guest is
        // here, and is asked (LIFE-17). A flow that owes nothing leaves the path.
        let is_wire = self.wire_of(port).is_some();
        let owes = found.record.rcv_nxt > found.record.guest_una;
        if has_driver != is_wire
            || (is_wire && !owes)
            || self.flows.lookup(&key).is_some()
            || !self.flows.has_room(key.port)
        {
            return false;
        }
        let store = std::mem::take(&mut found.store);
        let mut flow = match Flow::resumed(now, &found.record, found.id, store) {
            Ok(flow) => flow,
            Err(store) => {
                found.store = store;
                return false;
            }
        };
        let source = flow.eth(&key).map(|eth| (eth, key.g_addr));
        let is_its = source.is_some_and(|source| match self.wire_of(port) {
            Some(wire) => {
                // The probe that asks a G on a wire completes no handshake.
                wire.mac.is_none_or(|mac| mac == source.0.src)
                    && flow.has_current_clock(now)
                    && flow.guest_has_spoken()
            }
            None => self.networks.of(port).check_arrivals(port, &[source]).is_ok(),
        });
        let cx = context(now, FlowId::NONE, &key, &mut self.ports, &mut self.common);
        if !(is_its && cx.is_some_and(|mut cx| flow.resume(&mut cx))) {
            found.store = flow.into_store();
            return false;
        }
        if let Some(wire) = self.wire_mut(port) {
            wire.mac = source.map(|(eth, _)| eth.src);
            let id = self.insert_flow(key, flow).expect("there is room, and no such flow");
            self.with_flow(now, id, |flow, cx| flow.ask_guest(cx, true));
            return true;
        }
        self.networks.of_mut(port).learn_arrivals(now, port, source.as_slice());
        let id = self.insert_flow(key, flow).expect("there is room, and no such flow");
        self.with_flow(now, id, |_, _| ());
        if self.vm(port).is_some_and(|vm| vm.presence != Presence::Awaited) {
            self.note_stopped(now, port);
            self.await_guest(now, port);
        }
        true
    }

    /// The reset of a flow that has no place in the table.
    fn tell_remote(&mut self, now: Instant, key: &FlowKey, mut flow: Flow) {
        let cx = context(now, FlowId::NONE, key, &mut self.ports, &mut self.common);
        if let Some(mut cx) = cx {
            flow.reset_after_restart(&mut cx, false);
        }
    }

    /// The reset of a flow whose VM does not exist. It comes from a port that no VM has.
    fn tell_remote_of_nobody(&mut self, now: Instant, record: &Record) {
        let network = self.ports.iter().flatten().map(|port| &port.config.network);
        let network = network.into_iter().find(|name| network_hash(name) == record.network_hash);
        let nobody = network.and_then(|name| self.networks.nobody_in(name, self.ports.len()));
        let Some(PortId(nobody)) = nobody else { return };
        let host_mac = self.host_mac(record.network_hash);
        let Common { arena, out, ack_list, ack_moments, ready_ports, predicts } = &mut self.common;
        let mut cx = FlowContext {
            now,
            id: FlowId::NONE,
            key: &FlowKey { port: nobody, ..record.key },
            arena,
            vm: &mut Vm { host_mac, ..Vm::new(now, record.name_hash) },
            features: &None,
            out,
            ack_list,
            ack_moments,
            ready_ports,
            predicts: *predicts,
        };
        Flow::recovered(now, record, None).reset_after_restart(&mut cx, false);
    }

    fn port_of(&self, record: &Record) -> Option<PortId> {
        let (hash, network) = (record.name_hash, record.network_hash);
        let is_it = |p: &Port| p.config.is_guest() && p.vm.name_hash == hash;
        let at = self
            .ports
            .iter()
            .position(|p| p.as_ref().is_some_and(|p| is_it(p) && p.vm.network_hash == network))?;
        u16::try_from(at).ok().map(PortId)
    }
}
