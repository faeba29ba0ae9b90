//! Landlock: which files can be opened, made and removed, by name. What comes as a descriptor, as
//! guests' memory does, is not asked about.

use std::collections::BTreeSet;
use std::fs::create_dir;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath,
    PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use crate::config::{Config, UplinkKind};
use crate::start::{StartError, error};

/// Whose rights are asked for. Kernels that know fewer restrict fewer; later ones know more, which
/// this daemon does not.
const RIGHTS: ABI = ABI::V6;
/// The kernel has none of it.
const NONE: &str = "this kernel has no Landlock, or it is off (CONFIG_SECURITY_LANDLOCK, lsm=): \
                    somebody who takes the daemon over can open every file that its user can";

/// The kernel has an older one.
const LESS: &str = "this kernel's Landlock is older than Linux 6.12's: docs/hardening.md says what \
                    somebody who takes the daemon over can do besides";

/// Directories for sockets and the store, which are made if they are missing.
pub(super) fn dirs_of(config: &Config) -> Vec<PathBuf> {
    let daemon = &config.daemon;
    let files = [&daemon.control, &daemon.arena].into_iter();
    let files = files.chain(config.vms.iter().map(|vm| &vm.socket));
    let parents = files.filter_map(|file| file.parent()).map(Path::to_owned);
    let dirs: BTreeSet<_> = parents.chain(daemon.socket_dirs.iter().cloned()).collect();
    for dir in &dirs {
        // Who needs one that cannot be made says so.
        let _ = create_dir(dir);
    }
    dirs.into_iter().collect()
}

/// From now on this thread and those that it starts open no other files. `Some`: the kernel does
/// not keep it from that.
pub(super) fn restrict(
    config: &Config,
    path: &Path,
    dirs: &[PathBuf],
) -> Result<Option<&'static str>, StartError> {
    match try_to_restrict(config, path, dirs) {
        Ok(RulesetStatus::NotEnforced) => Ok(Some(NONE)),
        Ok(RulesetStatus::PartiallyEnforced) => Ok(Some(LESS)),
        Ok(RulesetStatus::FullyEnforced) => Ok(None),
        Err(e) => Err(error(format!("cannot shut files away (Landlock): {e}"), "report this")),
    }
}

fn try_to_restrict(
    config: &Config,
    path: &Path,
    dirs: &[PathBuf],
) -> Result<RulesetStatus, RulesetError> {
    let (read, write) = (AccessFs::ReadFile, AccessFs::WriteFile);
    let device = read | write | AccessFs::IoctlDev;
    let make = AccessFs::MakeReg | AccessFs::MakeSock | AccessFs::MakeDir;
    let own = read | write | AccessFs::Truncate | AccessFs::RemoveFile | make;
    let mut places: Vec<(PathBuf, BitFlags<AccessFs>)> =
        dirs.iter().map(|dir| (dir.clone(), own)).collect();
    // What an editor puts in the file's place is another file: its directory, and that of what it
    // is a link to.
    let files = [Some(path.to_owned()), path.canonicalize().ok()].into_iter().flatten();
    places.extend(files.filter_map(|file| Some((file.parent()?.to_owned(), read.into()))));
    places.push(("/dev/net/tun".into(), device));
    // The MTUs of uplinks, all of which are virtual.
    places.push(("/sys/devices/virtual/net".into(), read.into()));
    if config.uplinks.iter().any(|uplink| uplink.kind == UplinkKind::Macvtap) {
        // Its /dev/tapN may come, and come back, with another number.
        places.push(("/dev".into(), device));
    }
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(RIGHTS))?
        .handle_access(AccessNet::from_all(RIGHTS))?
        .scope(Scope::from_all(RIGHTS))?
        .create()?;
    for (place, rights) in places {
        // What is not there is not opened either.
        if let Ok(fd) = PathFd::new(&place) {
            rules = rules.add_rule(PathBeneath::new(fd, rights))?;
        }
    }
    if let Some(metrics) = config.daemon.metrics {
        rules = rules.add_rule(NetPort::new(metrics.port(), AccessNet::BindTcp))?;
    }
    Ok(rules.restrict_self()?.ruleset)
}
