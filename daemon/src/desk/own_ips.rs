//! Which addresses VMs of this host have: their overlays answer nobody for these, whatever a
//! registry has told of them. A VM that was made anew has another MAC than the one on the list.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::Desk;
use crate::config::VmConfig;
use crate::port::Port;
use crate::worker::data_path::DataPath;

impl Desk {
    /// If ports have changed since last time: tells overlays of the addresses that are here, of VMs
    /// whose link is up. Those of a VLAN are no concern of who asks without a tag.
    pub(super) fn tell_own_ips(&self, path: &mut DataPath) {
        if !path.ports_changed {
            return;
        }
        let running = self.changes.running().filter(|config| !config.overlays.is_empty());
        let Some(config) = running else { return };
        let vms: BTreeMap<&str, &VmConfig> =
            config.vms.iter().map(|vm| (vm.name.as_str(), vm)).collect();
        let mut here: BTreeMap<&Option<String>, BTreeSet<IpAddr>> = BTreeMap::new();
        for (_, at) in path.ports.iter() {
            if let Port::Guest(guest) = &at.port
                && guest.port.link().is_some()
                && let Some(vm) = vms.get(at.name.as_str())
                && vm.vlan.is_none()
                && vm.trunk.is_none()
            {
                here.entry(&vm.network).or_default().extend(vm.ips.iter().flatten());
            }
        }
        let ids: Vec<_> = path.ports.iter().map(|(id, _)| id).collect();
        for id in ids {
            if let Port::Overlay(overlay) = &mut path.ports.of_mut(id).port {
                let ips = here.get(&overlay.config().network);
                overlay.set_own_ips(ips.into_iter().flatten().copied());
            }
        }
    }
}
