//! Landlock: which files can be opened, made and removed, by name. Files that arrive as
//! descriptors, as guests' memory does, are not affected.

use std::collections::BTreeSet;
use std::fs::create_dir;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath,
    PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use crate::config::{Config, RegistryConfig, ToeConfig, conf_dir};
use crate::errors::{StartError, error};

/// The rights that are restricted. Kernels that know fewer restrict fewer; later ones know more,
/// which this daemon does not.
const RIGHTS: ABI = ABI::V6;
/// The kernel has none of it.
const NONE: &str = "this kernel has no Landlock, or it is off (CONFIG_SECURITY_LANDLOCK, lsm=): \
                    somebody who takes the daemon over can open every file that its user can";

/// The kernel has an older one.
const LESS: &str = "this kernel's Landlock is older than Linux 6.12's: docs/hardening.md says what \
                    somebody who takes the daemon over can do besides";

/// Places that UCX reads: its parts, its configuration, and lists of adapters and interfaces.
const UCX_PLACES: [&str; 6] = ["/usr/lib", "/lib", "/etc", "/sys", "/proc/self", "/proc/cpuinfo"];

/// Directories for sockets and the store, which are made if they are missing.
pub(super) fn dirs_of(config: &Config) -> Vec<PathBuf> {
    let daemon = &config.daemon;
    let files = [&daemon.control, &daemon.arena].into_iter();
    let files = files.chain(config.vms.iter().map(|vm| &vm.socket));
    let parents = files.filter_map(|file| file.parent()).map(Path::to_owned);
    let dirs: BTreeSet<_> = parents.chain(daemon.socket_dirs.iter().cloned()).collect();
    for dir in &dirs {
        // The user of a directory that cannot be made reports it.
        let _ = create_dir(dir);
    }
    dirs.into_iter().collect()
}

/// The rights to a file or beneath a directory.
pub(crate) type Place = (PathBuf, BitFlags<AccessFs>);

/// From now on this thread and those that it starts open no other files, and use no other TCP ports
/// (`None`: any, as UCX does). `Some`: the reason why the kernel does not enforce it.
pub(crate) fn restrict(
    places: Vec<Place>,
    ports: Option<&[(u16, AccessNet)]>,
) -> Result<Option<&'static str>, StartError> {
    match try_to_restrict(places, ports) {
        Ok(RulesetStatus::NotEnforced) => Ok(Some(NONE)),
        Ok(RulesetStatus::PartiallyEnforced) => Ok(Some(LESS)),
        Ok(RulesetStatus::FullyEnforced) => Ok(None),
        Err(e) => {
            Err(error(format!("cannot restrict access to files (Landlock): {e}"), "report this"))
        }
    }
}

/// Of the daemon.
pub(super) fn of_daemon(path: &Path, config: &Config, dirs: &[PathBuf]) -> Vec<Place> {
    let (read, write) = (AccessFs::ReadFile, AccessFs::WriteFile);
    let make = AccessFs::MakeReg | AccessFs::MakeSock | AccessFs::MakeDir;
    let own = read | write | AccessFs::Truncate | AccessFs::RemoveFile | make;
    // The MTUs of uplinks, all of which are virtual.
    let mtus = ("/sys/devices/virtual/net".into(), read.into());
    // The kernel's view of the threads that are watched (`sleeps::Eye`).
    let threads = ("/proc/self/task".into(), read.into());
    let dirs = dirs.iter().map(|dir| (dir.clone(), own));
    // Files that are renewed while it runs.
    let of_registry = config.registry.iter().flat_map(RegistryConfig::tls_files);
    let of_toe = config.toe.iter().flat_map(ToeConfig::proof_files);
    let certificates = of_registry.chain(of_toe);
    let certificates = certificates.flat_map(of_configuration);
    let has_ucx = config.toe.as_ref().is_some_and(ToeConfig::has_ucx);
    let of_ucx = UCX_PLACES.iter().filter(|_| has_ucx);
    let of_ucx = of_ucx.map(|place| (place.into(), read | AccessFs::ReadDir));
    let adapters = has_ucx.then(|| ("/dev/infiniband".into(), read | write | AccessFs::IoctlDev));
    let files = of_configuration(path).chain(certificates).chain([listed(path)]);
    dirs.chain(files).chain([mtus, threads]).chain(of_ucx).chain(adapters).collect()
}

/// Of the broker.
pub(crate) fn of_broker(path: &Path, has_macvtap: bool) -> Vec<Place> {
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    // The /dev/tapN of a macvtap may come, and come back, with another number.
    let devices = if has_macvtap { "/dev" } else { "/dev/net/tun" };
    of_configuration(path).chain([listed(path), (devices.into(), device)]).collect()
}

/// `conf.d` is listed, and its files are read. The place is the directory above, for `conf.d` may
/// come later than the daemon.
fn listed(path: &Path) -> Place {
    (conf_dir::of_file(path).to_owned(), AccessFs::ReadFile | AccessFs::ReadDir)
}

/// An editor puts another file in the file's place, so the place is its directory, and that of its
/// target if it is a link.
fn of_configuration(path: &Path) -> impl Iterator<Item = Place> {
    let files = [Some(path.to_owned()), path.canonicalize().ok()].into_iter().flatten();
    files.filter_map(|file| Some((file.parent()?.to_owned(), AccessFs::ReadFile.into())))
}

fn try_to_restrict(
    places: Vec<Place>,
    ports: Option<&[(u16, AccessNet)]>,
) -> Result<RulesetStatus, RulesetError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(RIGHTS))?;
    if ports.is_some() {
        rules = rules.handle_access(AccessNet::from_all(RIGHTS))?;
    }
    let mut rules = rules.scope(Scope::from_all(RIGHTS))?.create()?;
    for (place, rights) in places {
        // A file that does not exist is not opened either.
        if let Ok(fd) = PathFd::new(&place) {
            rules = rules.add_rule(PathBeneath::new(fd, rights))?;
        }
    }
    for &(port, access) in ports.unwrap_or_default() {
        rules = rules.add_rule(NetPort::new(port, access))?;
    }
    Ok(rules.restrict_self()?.ruleset)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn certificates_can_be_read_again_by_who_needs_any() {
        let places = |scheme: &str, toe: &str| {
            let text = format!(
                "[registry]\netcd = [\"{scheme}://192.0.2.9:2379\"]\nca = \"/np-ca/a.pem\"\n\
                 certificate = \"/np-own/c.pem\"\nkey = \"/np-own/k.pem\"\n[[overlay]]\n\
                 name = \"o\"\nvni = 7\nlocal = \"192.0.2.1\"\n{toe}"
            );
            let config = Config::parse("np.toml", &text, &BTreeMap::new()).unwrap();
            let places = of_daemon(Path::new("/etc/np.toml"), &config, &[]);
            let read = |dir: &str| places.contains(&(dir.into(), AccessFs::ReadFile.into()));
            ["/np-ca", "/np-own", "/np-toe"].map(read)
        };
        let toe = "[toe]\nencrypt = true\nca = \"/np-toe/a\"\ncertificate = \"/np-toe/c\"\n\
                   key = \"/np-toe/k\"\n";
        assert_eq!(places("https", ""), [true, true, false]);
        assert_eq!(places("http", "[toe]\n"), [false; 3]);
        assert_eq!(places("http", toe), [false, false, true]);
    }
}
