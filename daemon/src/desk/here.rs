//! What this host has on its overlays, as the configuration and the ports say.

use std::collections::BTreeMap;
use std::net::IpAddr;

use nightporter_api::StationKey;
use nightporter_core::port::PortId;
use nightporter_registry::Mac;

use crate::config::{Config, VmConfig};
use crate::port::Port;
use crate::worker::data_path::DataPath;

/// A VM of this host, as the configuration has it.
#[derive(Debug)]
pub(super) struct Vm {
    pub(super) name: String,
    /// Its overlay, and this host's address there.
    pub(super) vni: u32,
    pub(super) host: IpAddr,
    pub(super) mac: Option<Mac>,
    /// Those of a VM in a VLAN are left out: a claim has no VLAN, and a station that asks without a
    /// tag cannot reach the VM.
    pub(super) ips: Vec<IpAddr>,
    /// It is in no VLAN. Other hosts reach no other VM by the virtual TOE.
    pub(super) is_untagged: bool,
    /// Its link.
    pub(super) is_up: bool,
}

impl Vm {
    /// The station that it is on its overlay, if it has a `mac`.
    pub(super) fn key(&self) -> Option<StationKey> {
        Some((self.vni, self.mac?))
    }
}

/// The VMs of this host on overlays, and the ports of those with a MAC that are on none.
pub(super) fn look(config: &Config, path: &DataPath) -> (BTreeMap<PortId, Vm>, Vec<PortId>) {
    let overlays: BTreeMap<_, _> = config.overlays.iter().map(|o| (&o.network, o)).collect();
    let of_name: BTreeMap<&str, &VmConfig> =
        config.vms.iter().map(|vm| (vm.name.as_str(), vm)).collect();
    let (mut vms, mut alone) = (BTreeMap::new(), Vec::new());
    for (id, at) in path.ports.iter() {
        let Port::Guest(guest) = &at.port else { continue };
        let Some(vm) = of_name.get(at.name.as_str()) else { continue };
        let Some(overlay) = overlays.get(&vm.network) else {
            alone.extend(vm.mac.map(|_| id));
            continue;
        };
        let is_untagged = vm.vlan.is_none() && vm.trunk.is_none();
        let ips = vm.ips.clone().filter(|_| is_untagged).unwrap_or_default();
        let (name, is_up) = (vm.name.clone(), guest.port.link().is_some());
        let (vni, host, mac) = (overlay.vni, overlay.local.ip(), vm.mac);
        vms.insert(id, Vm { name, vni, host, mac, ips, is_untagged, is_up });
    }
    (vms, alone)
}

/// The ports of overlays that are there, by their numbers.
pub(super) fn overlay_ports(path: &DataPath) -> BTreeMap<u32, PortId> {
    let ports = path.ports.iter().filter_map(|(id, at)| match &at.port {
        Port::Overlay(overlay) => Some((overlay.config().vni, id)),
        _ => None,
    });
    ports.collect()
}
