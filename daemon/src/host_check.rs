//! The part of `--check` about this host: what would keep the daemon from starting here, and what
//! would not work.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::unistd::Pid;

use crate::broker::uplink::{missing_interface, wrong_interface};
use crate::config::proof::proof_of;
use crate::config::reader::human_bytes;
use crate::config::registry_files::registry_files;
use crate::config::station::at_strangers;
use crate::config::warnings::uneven_mtus;
use crate::config::{Config, OverlayConfig, VmConfig};
use crate::daemon_user::Judge;
use crate::owners::Owners;
use crate::start::{large_mtus, no_metrics};

/// How long whoever listens at the address of the metrics may take to answer.
const ANSWER_MAX: Duration = Duration::from_millis(500);

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
    problems.extend(config.uplinks.iter().filter_map(wrong_interface));
    problems.extend(config.vms.iter().filter_map(wrong_tap));
    problems.extend(config.vms.iter().filter_map(no_socket));
    problems.extend(no_room(config));
    // Those come later, or never.
    let interfaces = config.uplinks.iter().filter_map(missing_interface);
    let missing = interfaces.chain(config.overlays.iter().filter_map(missing_address));
    let warnings = missing.chain(large_mtus(config)).chain(in_all_vlans(config));
    let warnings = warnings.chain(behind_boosted(config));
    let warnings = warnings.chain(uneven_mtus(config)).chain(at_strangers(config));
    let warnings = warnings.chain(silent_log(&config.daemon.log)).chain(missing_dirs(config));
    let warnings = warnings.chain(config.daemon.metrics.and_then(taken_metrics));
    let warnings = warnings.chain(slow_arena(&config.daemon.arena)).collect();
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

/// The directory of the defaults, which comes with the daemon.
const OWN_DIR: &str = "/run/nightporter";

/// Directories that are not there: the start makes them, also if their names are mistyped.
fn missing_dirs(config: &Config) -> Vec<String> {
    let daemon =
        [("daemon.control", &config.daemon.control), ("daemon.arena", &config.daemon.arena)];
    let vms = config.vms.iter().map(|vm| (format!("vm.{}.socket", vm.name), &vm.socket));
    let all = daemon.map(|(key, path)| (key.to_owned(), path)).into_iter().chain(vms);
    let missing = all.filter_map(|(key, path)| {
        let dir = path.parent()?;
        let is_fine = dir == Path::new(OWN_DIR) || dir.as_os_str().is_empty() || dir.is_dir();
        let what =
            format!("{key}: there is no directory {}, and the start makes it", dir.display());
        (!is_fine).then(|| format!("{what}\n    fix: correct the path, if it is mistyped"))
    });
    missing.collect()
}

/// Budgets that the host's memory, or the file system of the arena, cannot hold.
fn no_room(config: &Config) -> Option<String> {
    let needed = config.budget_sum();
    let too_much = |place: &str, has: u64| {
        let (needed, has) = (human_bytes(needed), human_bytes(has));
        format!("the budgets of all VMs are {needed}, and {place} has {has}")
    };
    let memory = memory_total()?;
    if needed > memory {
        let what = too_much("this host's memory", memory);
        return Some(format!("{what}\n    fix: lower vm.budget"));
    }
    let mut dirs = config.daemon.arena.ancestors().skip(1);
    let dir = dirs.find(|dir| dir.is_dir())?;
    let fs = rustix::fs::statvfs(dir).ok()?;
    let room = fs.f_blocks.saturating_mul(fs.f_frsize);
    (needed > room).then(|| {
        let what = too_much(&format!("the file system of {}", dir.display()), room);
        format!("{what}\n    fix: lower vm.budget, choose another daemon.arena, or enlarge it")
    })
}

/// The start makes it there, and says so too.
fn slow_arena(arena: &Path) -> Option<String> {
    let dir = arena.ancestors().skip(1).find(|dir| dir.is_dir())?;
    let is_slow = statfs(dir).is_ok_and(|fs| fs.filesystem_type() != TMPFS_MAGIC);
    is_slow.then(|| {
        format!(
            "daemon.arena: {} is on no tmpfs, and its write-back can stall all VMs\n    \
             fix: choose a file on a tmpfs, as in /dev/shm/nightporter/arena",
            dir.display()
        )
    })
}

/// In bytes, by `/proc/meminfo`.
fn memory_total() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Another process has the address of the metrics: not a daemon, whose successor this one will be.
fn taken_metrics(address: SocketAddr) -> Option<String> {
    let e = TcpListener::bind(address).err()?;
    (!serves_metrics(address)).then(|| no_metrics(address, &e).to_string())
}

/// A nightporterd answers there.
fn serves_metrics(address: SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect_timeout(&address, ANSWER_MAX) else { return false };
    let mut begin = vec![0; 1 << 12];
    let asked = stream
        .set_read_timeout(Some(ANSWER_MAX))
        .and_then(|()| stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n"))
        .and_then(|()| stream.read(&mut begin));
    asked.is_ok_and(|n| String::from_utf8_lossy(&begin[..n]).contains("nightporter_"))
}

/// An interface is there with the name of a VM's tap, and is none.
fn wrong_tap(vm: &VmConfig) -> Option<String> {
    let tap = vm.tap.as_deref()?; // there is none with a pattern for a name
    let of = Path::new("/sys/class/net").join(tap);
    let is_wrong = of.exists() && !of.join("tun_flags").exists();
    let fix = "name the tap of a VM: ip -details link show type tun";
    is_wrong.then(|| format!("vm.{}: {tap} is there, and is no tap\n    fix: {fix}", vm.name))
}

/// Something is where the VM's socket is to be, and is none.
fn no_socket(vm: &VmConfig) -> Option<String> {
    let found = vm.socket.symlink_metadata().ok().filter(|_| vm.tap.is_none())?;
    let (name, path) = (&vm.name, vm.socket.display());
    let fix = "remove it, or choose another vm.socket";
    let what = || format!("vm.{name}: {path} is there, and is no socket\n    fix: {fix}");
    (!found.file_type().is_socket()).then(what)
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
