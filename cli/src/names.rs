//! The names of ports, for a shell to complete: those that the running daemon has.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use nightporter_api::{PortStatus, Status};

use super::{CONTROL, Client, status};
use crate::changes::tap_of;

/// How long an operator waits who has pressed Tab.
const LIMIT: Duration = Duration::from_secs(1);

/// Of VMs.
pub(crate) fn vms() -> ArgValueCandidates {
    ArgValueCandidates::new(|| names(|port| port.vm.is_some()))
}

/// Of taps that are attached.
pub(crate) fn taps() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let ports = known();
        ports.iter().filter_map(tap_of).map(CompletionCandidate::new).collect()
    })
}

/// Of VMs, uplinks and overlays, and the network's ends of attached VMs.
pub(crate) fn ports() -> ArgValueCandidates {
    ArgValueCandidates::new(|| names(|_| true))
}

/// Of those that have a place in the switch.
pub(crate) fn of_the_switch() -> ArgValueCandidates {
    ArgValueCandidates::new(|| names(|port| !is_end(port) && tap_of(port).is_none()))
}

/// Of uplinks.
pub(crate) fn uplinks() -> ArgValueCandidates {
    ArgValueCandidates::new(|| names(is_uplink))
}

fn is_uplink(port: &PortStatus) -> bool {
    matches!(port.kind.as_str(), "tap" | "macvtap") && !is_end(port)
}

/// `NAME/net`: no name of the configuration has a slash.
fn is_end(port: &PortStatus) -> bool {
    port.name.contains('/')
}

/// None if the daemon does not answer, or not this user.
fn names(is_wanted: fn(&PortStatus) -> bool) -> Vec<CompletionCandidate> {
    known().into_iter().filter(is_wanted).map(|port| CompletionCandidate::new(port.name)).collect()
}

fn known() -> Vec<PortStatus> {
    let ask = || -> Result<Status> {
        let mut client = Client::connect(&control(std::env::args()))?;
        client.wait_for(LIMIT)?;
        status(&mut client)
    };
    ask().map_or_else(|_| Vec::new(), |status| status.ports)
}

/// The socket that the command line names which is being completed.
fn control(mut words: impl Iterator<Item = String>) -> PathBuf {
    let given = words.find_map(|word| match word.strip_prefix("--control") {
        Some("") => Some(None),
        Some(more) => more.strip_prefix('=').map(|path| Some(path.to_owned())),
        None => None,
    });
    given.and_then(|path| path.or_else(|| words.next())).map_or_else(|| CONTROL.into(), Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_networks_end_of_an_attached_vm_is_no_uplink() {
        let port = |name: &str, kind: &str| PortStatus {
            name: name.into(),
            kind: kind.into(),
            ..PortStatus::default()
        };
        assert!(is_uplink(&port("lan", "tap")) && is_uplink(&port("wan", "macvtap")));
        assert!(!is_uplink(&port("vnet0/net", "tap")) && !is_uplink(&port("web1", "vm")));
    }

    #[test]
    fn names_are_those_of_the_daemon_that_the_line_names() {
        for (line, expected) in [
            ("nightporter vm show", CONTROL),
            ("nightporter --control /a vm show", "/a"),
            ("nightporter vm --control=/b show", "/b"),
            ("nightporter vm show --control", CONTROL),
        ] {
            let words = line.split(' ').map(str::to_owned);
            assert_eq!(control(words), PathBuf::from(expected), "{line}");
        }
    }
}
