//! What `--check` says of the host that the configuration is for: what would keep the daemon from
//! starting here, and what would not work.

use std::net::UdpSocket;

use nix::net::if_::if_nametoindex;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::config::{Config, OverlayConfig, UplinkConfig, UplinkKind};
use crate::start::{large_mtus, vm_access};

/// What was found, each with its fix.
#[derive(Debug, Default)]
pub struct Findings {
    /// The daemon would not start.
    pub problems: Vec<String>,
    /// It would, and something would not work.
    pub warnings: Vec<String>,
}

/// Looks at this host; makes and changes nothing on it.
#[must_use]
pub fn check_host(config: &Config) -> Findings {
    let mut problems: Vec<String> = Vec::new();
    problems.extend(vm_access(&config.daemon).err().map(|e| e.to_string()));
    problems.extend(config.daemon.cpu.and_then(missing_cpu));
    problems.extend(config.uplinks.iter().filter_map(missing_interface));
    problems.extend(config.overlays.iter().filter_map(missing_address));
    Findings { problems, warnings: large_mtus(config) }
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
