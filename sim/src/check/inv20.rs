//! INV-20, isolation: whatever the others do, each VM finds the pages and the flow entries that are
//! its own.

use nightporter_core::engine::{Engine, PortId};

use super::Ensure;
use crate::plan::Plan;

pub(super) fn on_step(plan: &Plan, engine: &Engine<'_>, ports: &[Option<PortId>]) -> Ensure {
    let mut owed = 0;
    let mut held = 0;
    for port in ports.iter().flatten() {
        let Some(vm) = engine.vm(*port) else { continue };
        owed += vm.budget_pages;
    }
    let mut flows = vec![0_u32; ports.len()];
    for (_, key, flow) in engine.flows() {
        held += u64::from(flow.store.held_pages());
        let guest = ports.iter().position(|p| *p == Some(PortId(key.port)));
        if let Some(count) = guest.and_then(|g| flows.get_mut(g)) {
            *count += 1;
        }
    }
    let free = engine.arena().free_pages() as u64;
    if free + held < owed {
        return Err(format!("{free} pages free and {held} held, {owed} belong to somebody"));
    }
    for (guest, count) in flows.iter().enumerate() {
        let most = plan.guests[guest].flows_max;
        if *count > most {
            return Err(format!("guest {guest} has {count} flows of {most}"));
        }
    }
    Ok(())
}
