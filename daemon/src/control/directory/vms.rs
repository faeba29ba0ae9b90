//! The VMs of this host on its overlays, as the configuration has them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use nightporter_api::StationKey;
use nightporter_registry::Mac;

use crate::config::Config;

/// A VM of this host on an overlay.
#[derive(Debug)]
pub(super) struct Vm {
    /// Its overlay, and this host's address there.
    pub(super) vni: u32,
    pub(super) host: IpAddr,
    pub(super) mac: Option<Mac>,
    /// Those of a VM in a VLAN are left out: a claim has no VLAN, and a station that asks without a
    /// tag cannot reach the VM.
    pub(super) ips: Vec<IpAddr>,
    /// It is in no VLAN. Other hosts reach no other VM by the virtual TOE.
    pub(super) is_untagged: bool,
}

impl Vm {
    /// The station that it is on its overlay, if it has a `mac`.
    pub(super) fn key(&self) -> Option<StationKey> {
        Some((self.vni, self.mac?))
    }
}

/// The VMs of this host on overlays, by their names.
pub(super) fn vms_of(config: &Config) -> BTreeMap<String, Vm> {
    let overlays: BTreeMap<_, _> = config.overlays.iter().map(|o| (&o.network, o)).collect();
    let vms = config.vms.iter().filter_map(|vm| {
        let overlay = overlays.get(&vm.network)?;
        let is_untagged = vm.vlan.is_none() && vm.trunk.is_none();
        let ips = vm.ips.clone().filter(|_| is_untagged).unwrap_or_default();
        let (vni, host, mac) = (overlay.vni, overlay.local.ip(), vm.mac);
        Some((vm.name.clone(), Vm { vni, host, mac, ips, is_untagged }))
    });
    vms.collect()
}
