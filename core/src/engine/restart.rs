//! After a restart: promises of a predecessor that this process cannot keep (LIFE-09, INV-21).

use crate::engine::{Common, Engine, Port, context};
use crate::flow::key::FlowKey;
use crate::flow::table::FlowId;
use crate::limits::T_LEFT;
use crate::port::PortId;
use crate::store::flow_store::{Recovered, recover};
use crate::store::record::{MARK_TRANSLATED, Record, network_hash};
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

/// See [`Engine::left`].
#[derive(Debug, Default)]
pub(super) struct Left {
    flows: Vec<Recovered>,
    /// They are forgotten then; `None`: there are none.
    pub(super) until: Option<Instant>,
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
    /// that is in another network now, only R is told. If there is no way to R, because the wire of
    /// the VM is not there or nobody is in its network any more, the flow is [left](Self::left).
    ///
    /// [`T_AWAITED`]: crate::limits::T_AWAITED
    pub fn handle_restart(&mut self, now: Instant) -> Restarted {
        self.restart(now, false)
    }

    /// Like [`Self::handle_restart`] for VMs with wires. The flows of all others are left.
    pub fn handle_restart_on_wires(&mut self, now: Instant) -> Restarted {
        self.restart(now, true)
    }

    /// Flows of a predecessor that stay in the arena as they are, until the wire of their VM is
    /// there, for [`T_LEFT`] at most, or for the next process.
    ///
    /// [`T_LEFT`]: crate::limits::T_LEFT
    #[must_use]
    pub fn left(&self) -> usize {
        self.left.flows.len()
    }

    /// Both ends of the wire of this VM are there from now on: as [`Self::handle_restart`] for the
    /// flows of the VM that were left. Call it before any frame of that wire.
    pub fn handle_wire(&mut self, now: Instant, port: PortId) -> Restarted {
        let Left { flows, until } = std::mem::take(&mut self.left);
        let is_its = |it: &Recovered| self.port_of(&it.record) == Some(port);
        let (found, others) = flows.into_iter().partition(is_its);
        self.leave(others, until);
        self.take_up(now, found)
    }

    /// The process ends: the next one hears nothing of connections that were reset, and of which
    /// both sides know.
    pub fn forget_ended(&mut self) {
        let ended = |flow: &Flow| !flow.is_live() && flow.owes_nothing();
        let ids: Vec<_> =
            self.flows.iter().filter(|(_, _, flow)| ended(flow)).map(|(id, ..)| id).collect();
        ids.into_iter().for_each(|id| self.remove_flow(id));
    }

    fn restart(&mut self, now: Instant, on_wires: bool) -> Restarted {
        let found = recover(&mut self.common.arena);
        let (left, found) = found.into_iter().partition(|it| self.is_left(&it.record, on_wires));
        self.leave(left, Some(now + T_LEFT));
        self.take_up(now, found)
    }

    fn leave(&mut self, flows: Vec<Recovered>, until: Option<Instant>) {
        self.left = Left { until: until.filter(|_| !flows.is_empty()), flows };
    }

    fn is_left(&self, record: &Record, on_wires: bool) -> bool {
        let owes = record.rcv_nxt > record.guest_una;
        match self.port_of(record) {
            Some(port) if self.has_wire(port) => false,
            Some(port) => on_wires || (owes && self.wire_of(port).is_some()),
            None => on_wires || (owes && network_of(&self.ports, record).is_none()),
        }
    }

    /// Nobody has come for the flows that were left.
    #[cold]
    pub(super) fn forget_left(&mut self) {
        for mut found in std::mem::take(&mut self.left).flows {
            found.store.clear(&mut self.common.arena);
            self.common.arena.free_record(found.id);
        }
    }

    fn take_up(&mut self, now: Instant, found: Vec<Recovered>) -> Restarted {
        let mut restarted = Restarted::default();
        let Restarted { resumed, reset } = &mut restarted;
        for mut found in found {
            let record = found.record;
            let port = self.port_of(&record);
            if let Some(port) = port.filter(|_| found.complete)
                && self.resume(now, port, &mut found)
            {
                *resumed += 1;
                continue;
            }
            found.store.clear(&mut self.common.arena);
            let owed = record.rcv_nxt > record.guest_una;
            if !owed && record.marks & MARK_TRANSLATED == 0 {
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
        restarted
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
        if !(is_its && cx.is_some_and(|mut cx| flow.resume(&mut cx, &found.record))) {
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
        let network = network_of(&self.ports, record);
        let nobody = network.and_then(|name| self.networks.nobody_in(name, self.ports.len()));
        let Some(PortId(nobody)) = nobody else { return };
        let host_mac = self.host_mac(record.network_hash);
        let Common { arena, out, ack_list, ack_moments, ready_ports, predicts, half_open: _ } =
            &mut self.common;
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

/// The network of its VM, if anybody is there.
fn network_of<'a>(ports: &'a [Option<Port>], record: &Record) -> Option<&'a str> {
    let mut networks = ports.iter().flatten().map(|port| port.config.network.as_str());
    networks.find(|name| network_hash(name) == record.network_hash)
}
