//! INV-06, budget: the bytes that a VM's flows hold and have promised are within the VM's budget,
//! and the sum of the flows equals the VM's account.

use nightporter_core::engine::Engine;
use nightporter_core::port::PortId;

use super::Ensure;

pub(crate) fn on_step(engine: &Engine<'_>, ports: &[Option<PortId>], recount: bool) -> Ensure {
    for port in ports.iter().flatten() {
        let Some(vm) = engine.vm(*port) else { continue };
        let of_port = |what| format!("port {}: {what}", port.0);
        account(vm.reserved_pages, vm.budget_pages, None).map_err(of_port)?;
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
        account(vm.reserved_pages, vm.budget_pages, Some(sum)).map_err(of_port)?;
    }
    Ok(())
}

/// The account of a VM, in pages; `flows`: what its flows reserved together, if they were counted.
pub(crate) fn account(reserved: u64, budget: u64, flows: Option<u64>) -> Ensure {
    if reserved > budget {
        return Err(format!("{reserved} pages of {budget} reserved"));
    }
    match flows {
        Some(sum) if sum != reserved => {
            Err(format!("flows reserved {sum}, the account says {reserved}"))
        }
        _ => Ok(()),
    }
}
