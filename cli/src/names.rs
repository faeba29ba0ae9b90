//! The names of ports, for a shell to complete: those that the running daemon has.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use nightporter_api::{PortStatus, Status};

use super::{CONTROL, Client, status};

/// How long an operator waits who has pressed Tab.
const LIMIT: Duration = Duration::from_secs(1);

/// Of VMs.
pub(crate) fn vms() -> ArgValueCandidates {
    ArgValueCandidates::new(|| names(|port| port.vm.is_some()))
}

/// Of VMs, uplinks and overlays.
pub(crate) fn ports() -> ArgValueCandidates {
    ArgValueCandidates::new(|| names(|_| true))
}

/// Of uplinks.
pub(crate) fn uplinks() -> ArgValueCandidates {
    ArgValueCandidates::new(|| names(|port| matches!(port.kind.as_str(), "tap" | "macvtap")))
}

/// None if the daemon does not answer, or not this user.
fn names(is_wanted: fn(&PortStatus) -> bool) -> Vec<CompletionCandidate> {
    let ports = known().map_or_else(|_| Vec::new(), |status| status.ports);
    let names = ports.into_iter().filter(is_wanted).map(|port| port.name);
    names.map(CompletionCandidate::new).collect()
}

fn known() -> Result<Status> {
    let mut client = Client::connect(Path::new(CONTROL))?;
    client.wait_for(LIMIT)?;
    status(&mut client)
}
