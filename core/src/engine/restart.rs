//! After a restart: promises of a predecessor that this process cannot keep (LIFE-09, INV-21).

use crate::engine::{Common, Engine, Port, context};
use crate::flow::key::FlowKey;
use crate::flow::table::FlowId;
use crate::port::PortId;
use crate::store::flow_store::recover;
use crate::store::record::{Record, network_hash};
use crate::tcp::FlowContext;
use crate::tcp::flow::Flow;
use crate::tcp::vm::Vm;
use crate::time::Instant;

impl Engine<'_> {
    /// Resets, on both sides, every flow of the arena that has bytes R believes delivered and G has
    /// not acknowledged. Flows that owed nothing are PASS from now on. Returns how many were reset,
    /// without those that had been by a predecessor.
    ///
    /// Call once, after the ports were added. A guest that connects later gets its RST then. Of a
    /// VM that has no port any more, as when a command added it, or that is in another network now,
    /// only R is told; if nobody is in its network any more, nobody.
    pub fn handle_restart(&mut self, now: Instant) -> usize {
        let mut reset = 0;
        for found in recover(&mut self.common.arena) {
            let record = found.record;
            let mut store = found.store;
            store.clear(&mut self.common.arena);
            let port = self.port_of(&record);
            let owed = record.rcv_nxt > record.guest_una;
            if !owed {
                self.common.arena.free_record(found.id);
                continue;
            }
            let Some(port) = port else {
                reset += 1;
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
            reset += usize::from(!self.common.arena.note_told(found.id));
            if !self.flows.has_room(key.port) {
                // The limit is lower than it was. R is told now; G is told when R answers it.
                self.tell_remote(now, &key, Flow::recovered(now, &record, None));
                self.common.arena.free_record(found.id);
                continue;
            }
            // The record stays until the entry goes: another crash before then tells them again.
            let flow = Flow::recovered(now, &record, Some(found.id));
            if let Some(id) = self.insert_flow(key, flow) {
                self.with_flow(now, id, |flow, cx| flow.reset_after_restart(cx));
            }
        }
        reset
    }

    /// The reset of a flow that has no place in the table.
    fn tell_remote(&mut self, now: Instant, key: &FlowKey, mut flow: Flow) {
        let cx = context(now, FlowId::NONE, key, &mut self.ports, &mut self.common);
        if let Some(mut cx) = cx {
            flow.reset_after_restart(&mut cx);
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
        Flow::recovered(now, record, None).reset_after_restart(&mut cx);
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
