//! The part of `--check` about this host: what would keep the daemon from starting here, and what
//! would not work.

use std::net::UdpSocket;

use nix::net::if_::if_nametoindex;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::config::proof::proof_of;
use crate::config::registry_files::registry_files;
use crate::config::station::at_strangers;
use crate::config::warnings::uneven_mtus;
use crate::config::{Config, OverlayConfig, UplinkConfig, UplinkKind, VmConfig};
use crate::daemon_user::Judge;
use crate::owners::Owners;
use crate::start::large_mtus;

/// The findings, each with its fix.
#[derive(Debug, Default)]
pub struct Findings {
    /// The daemon would not start, or a VM would have no socket that it can use.
    pub problems: Vec<String>,
    /// It would, and something would not work.
    pub warnings: Vec<String>,
}

/// Looks at this host as `judge` would; makes and changes nothing on it.
#[must_use]
pub fn check_host(config: &Config, judge: &Judge) -> Findings {
    let mut problems: Vec<String> = Vec::new();
    match Owners::of(config) {
        Err(e) => problems.push(e.to_string()),
        Ok(owners) => {
            problems.extend(owners.problems().map(ToString::to_string));
            problems.extend(judge.sockets(config, &owners));
        }
    }
    problems.extend(
        config.registry.iter().filter_map(|it| registry_files(it).err()).map(|e| e.to_string()),
    );
    problems.extend(proof_of(config).err().map(|e| e.to_string()));
    problems.extend(config.daemon.cpu.and_then(missing_cpu));
    // Those come later, or never.
    let interfaces = config.uplinks.iter().filter_map(missing_interface);
    let missing = interfaces.chain(config.overlays.iter().filter_map(missing_address));
    let warnings = missing.chain(large_mtus(config)).chain(in_all_vlans(config));
    let warnings = warnings.chain(behind_boosted(config));
    let warnings = warnings.chain(uneven_mtus(config)).chain(at_strangers(config));
    let warnings = warnings.chain(silent_log(&config.daemon.log)).collect();
    Findings { problems, warnings }
}

/// Of VMs that are beside others in VLANs, and in none and so in all.
fn in_all_vlans(config: &Config) -> impl Iterator<Item = String> {
    let is_in_some = |vm: &VmConfig| vm.vlan.is_some() || vm.trunk.is_some();
    let vms = config.vms.iter().filter(move |vm| !is_in_some(vm));
    vms.filter_map(move |vm| {
        let network = config.vms.iter().filter(|other| other.network == vm.network);
        let other = network.into_iter().find(|other| is_in_some(other))?;
        let (name, other) = (&vm.name, &other.name);
        Some(format!(
            "vm.{name}: is in every VLAN, also in those of {other}\n    fix: give it vlan or trunk"
        ))
    })
}

/// The booster boosts nobody where the worker could be behind a boosted vCPU (BST-06).
fn behind_boosted(config: &Config) -> Option<String> {
    let vm = config.vms.iter().find(|vm| vm.boost.is_some())?;
    (config.daemon.cpu.is_none() && config.daemon.rt_priority < 2).then(|| {
        format!(
            "vm.{}.boost: the worker may run on the VM's cores, so that it is not boosted\n    \
             fix: give the worker a core without vCPUs (daemon.cpu), or daemon.rt_priority = 2",
            vm.name
        )
    })
}

/// A filter that names modules logs errors of all others, and a module that there is not is no
/// mistake to it.
fn silent_log(filter: &str) -> Option<String> {
    let is_level = |word: &str| !word.contains(['=', ':', '[']);
    (!filter.split(',').any(is_level)).then(|| {
        format!(
            "daemon.log = \"{filter}\": of everything else only errors are logged\n    \
             fix: begin with a level: \"info,{filter}\""
        )
    })
}

/// Of this process, which ends with the check.
fn missing_cpu(cpu: usize) -> Option<String> {
    let mut set = CpuSet::new();
    let placed = set.set(cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
    let e = placed.err()?;
    Some(format!("daemon.cpu = {cpu}: {e}\n    fix: give a core that is online: nproc"))
}

fn missing_interface(uplink: &UplinkConfig) -> Option<String> {
    let UplinkConfig { name, kind, ifname, create, bridge, .. } = uplink;
    let is_missing = |ifname: &str| if_nametoindex(ifname).is_err();
    let fix = match bridge.as_deref().filter(|bridge| is_missing(bridge)) {
        Some(bridge) => {
            let fix = format!("ip link add {bridge} type bridge && ip link set {bridge} up");
            return Some(format!("uplink.{name}: there is no bridge {bridge}\n    fix: {fix}"));
        }
        None if *kind == UplinkKind::Macvtap => {
            format!("ip link add link eth0 name {ifname} type macvtap mode passthru")
        }
        None if *create => return None,
        None => format!("ip tuntap add dev {ifname} mode tap vnet_hdr, or set create = true"),
    };
    let missing = is_missing(ifname);
    missing.then(|| format!("uplink.{name}: there is no interface {ifname}\n    fix: {fix}"))
}

fn missing_address(overlay: &OverlayConfig) -> Option<String> {
    let (name, local) = (&overlay.name, overlay.local.ip());
    let e = UdpSocket::bind((local, 0)).err()?;
    let fix = "give local an address of this host: ip -br addr";
    Some(format!("overlay.{name}: cannot use {local}: {e}\n    fix: {fix}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_log_of_modules_alone_is_told_to_be_silent_about_all_else() {
        let said = "daemon.log = \"nightporterd::vhots=debug\": of everything else only errors are \
                    logged\n    fix: begin with a level: \"info,nightporterd::vhots=debug\"";
        assert_eq!(silent_log("nightporterd::vhots=debug").as_deref(), Some(said));
        for fine in ["info", "info,nightporterd::vhost=debug", "nightporterd=debug, warn"] {
            assert_eq!(silent_log(fine), None, "{fine}");
        }
    }

    #[test]
    fn a_vm_that_is_in_every_vlan_beside_others_in_some_is_told() {
        let vm = |name: &str, more: &str| format!("[[vm]]\nname = \"{name}\"\n{more}\n");
        let both = |of_b: &str| {
            let text = vm("a", "vlan = 7") + &vm("b", of_b);
            let config = Config::parse("np.toml", &text, &BTreeMap::new()).unwrap();
            in_all_vlans(&config).collect::<Vec<_>>()
        };
        let said = "vm.b: is in every VLAN, also in those of a\n    fix: give it vlan or trunk";
        assert_eq!(both(""), [said]);
        for fine in ["vlan = 8", "trunk = [7]", "network = \"other\""] {
            assert!(both(fine).is_empty(), "{fine}");
        }
    }
}
