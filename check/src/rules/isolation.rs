//! INV-20, isolation: whatever the others do, each VM finds its own pages and flow entries, and
//! strangers' handshakes take no more of these than their part (LIFE-01).

use nightporter_core::engine::Engine;
use nightporter_core::port::PortId;
use nightporter_core::tcp::flow::State;

use super::Ensure;

/// Entries of one guest.
#[derive(Clone, Copy, Default)]
struct Entries {
    all: u32,
    /// Incomplete handshakes.
    unproven: u32,
    /// Flows that owe something.
    owing: u32,
}

/// `flows_max`: entries of each guest.
pub(crate) fn on_step(
    engine: &Engine<'_>,
    ports: &[Option<PortId>],
    flows_max: impl Fn(usize) -> u32,
) -> Ensure {
    let mut owed = 0;
    let mut held = 0;
    for port in ports.iter().flatten() {
        let Some(vm) = engine.vm(*port) else { continue };
        owed += vm.budget_pages;
    }
    let mut flows = vec![Entries::default(); ports.len()];
    for (_, key, flow) in engine.flows() {
        held += u64::from(flow.store().held_pages());
        held += flow.departing().map_or(0, |store| u64::from(store.held_pages()));
        let guest = ports.iter().position(|p| *p == Some(PortId(key.port)));
        if let Some(entries) = guest.and_then(|g| flows.get_mut(g)) {
            entries.all += 1;
            entries.unproven += u32::from(flow.state() == State::Handshake);
            entries.owing += u32::from(!flow.owes_nothing());
        }
    }
    let free = engine.arena().free_pages() as u64;
    if free + held < owed {
        return Err(format!("{free} pages free and {held} held, {owed} belong to somebody"));
    }
    for (guest, Entries { all, unproven, owing }) in flows.iter().copied().enumerate() {
        let most = flows_max(guest);
        if all > most {
            return Err(format!("guest {guest} has {all} flows of {most}"));
        }
        if unproven > (most / 8).max(1) {
            return Err(format!("guest {guest} has {unproven} unproven handshakes of {most}"));
        }
        let vm = ports[guest].and_then(|port| engine.vm(port));
        let counted = vm.map_or(0, |vm| vm.owing_flows);
        if counted != owing {
            return Err(format!("guest {guest} has {owing} flows that owe and counts {counted}"));
        }
    }
    Ok(())
}
