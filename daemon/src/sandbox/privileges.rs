//! Capabilities: the daemon keeps those of capabilities(7) that it needs, of those that it was
//! given.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities,
    set_no_new_privs,
};

use crate::config::Config;
use crate::errors::{StartError, error};

/// The privileges that a daemon with this configuration can use:
///
/// - CAP_CHOWN for sockets that get another owner or group; a member of the group needs none.
/// - For sockets of another user, which may stay behind when a daemon is killed, and whose
///   directories may be that user's: CAP_FOWNER and CAP_DAC_OVERRIDE, where files may be opened at
///   all (`files`).
fn needed(config: &Config) -> CapabilitySet {
    let Config { daemon, vms, .. } = config;
    let has_user = daemon.socket_user.is_some() || vms.iter().any(|vm| vm.socket_user.is_some());
    let of_daemon = [&daemon.socket_group, &daemon.status_group];
    let has_group =
        of_daemon.iter().any(|it| it.is_some()) || vms.iter().any(|vm| vm.socket_group.is_some());
    let mut needed = CapabilitySet::empty();
    if has_group || has_user {
        needed |= CapabilitySet::CHOWN;
    }
    if has_user {
        needed |= CapabilitySet::FOWNER | CapabilitySet::DAC_OVERRIDE;
    }
    needed
}

/// Drops the capabilities that the daemon does not need, and the ways to get any.
pub(super) fn reduce(config: &Config) -> Result<(), StartError> {
    // So the worker can have its priority without CAP_SYS_NICE. If the limit may not be raised, an
    // error is reported when that priority is set.
    let priority = config.daemon.rt_priority.into();
    if getrlimit(Resource::RLIMIT_RTPRIO).is_ok_and(|(soft, _)| soft < priority) {
        let _ = setrlimit(Resource::RLIMIT_RTPRIO, priority, priority);
    }
    keep(needed(config))
}

/// Gives all other capabilities away, and the ways to get any.
pub(crate) fn keep(needed: CapabilitySet) -> Result<(), StartError> {
    let reduce = || {
        let (kept, inheritable) = (capabilities(None)?.permitted & needed, CapabilitySet::empty());
        clear_ambient_capability_set()?;
        set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })?;
        set_no_new_privs(true)
    };
    reduce().map_err(|e| error(format!("cannot drop privileges: {e}"), "report this"))
}
