//! INV-06, budget: the bytes that a VM's flows hold and have promised are within the VM's budget,
//! and the sum of the flows equals the VM's account.

use nightporter_core::engine::Engine;
use nightporter_core::port::PortId;

use super::Ensure;

pub(crate) fn on_step(engine: &Engine<'_>, ports: &[Option<PortId>], recount: bool) -> Ensure {
    for port in ports.iter().flatten() {
        let Some(vm) = engine.vm(*port) else { continue };
        if vm.reserved_pages > vm.budget_pages {
            let (reserved, budget) = (vm.reserved_pages, vm.budget_pages);
            return Err(format!("port {}: {reserved} pages of {budget} reserved", port.0));
        }
        if !recount {
            continue;
        }
        let mut sum = 0;
        for (id, _, flow) in engine.flows().filter(|(_, key, _)| key.port == port.0) {
            sum += u64::from(flow.stats().reserved_pages);
            if flow.store().held_pages() > flow.stats().reserved_pages {
                return Err(format!("flow {} holds more pages than it reserved", id.index()));
            }
        }
        if sum != vm.reserved_pages {
            let account = vm.reserved_pages;
            return Err(format!(
                "port {}: flows reserved {sum}, the account says {account}",
                port.0
            ));
        }
    }
    Ok(())
}
