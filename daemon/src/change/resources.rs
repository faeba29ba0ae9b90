//! The interfaces and sockets of this host that the steps of a plan need. They are opened before
//! the worker takes the first step, so that no step fails for want of one; and at the start before
//! the daemon has given its other rights away.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crate::config::VmConfig;
use crate::errors::{StartError, error};
use crate::owners::Owners;
use crate::port::build::{OpenFailure, Openings, make_parent, toe_name};
use crate::port::vhost_user::Socket;
use crate::port::{Lost, Port, Wanted};
use crate::timer::monotonic_now;
use crate::vhost::listener::{Access, ListenError, Listener};
use crate::watchdog;
use crate::worker::steps::{Opened, Step};

/// How often an interface that is in use is tried again.
const BUSY_LOOK: Duration = Duration::from_millis(10);

/// See the module doc.
#[derive(Debug, Default)]
pub(crate) struct Resources {
    /// For the uplinks and overlays that come, by their names.
    ports: BTreeMap<String, Port>,
    /// For the VMs that come or move, by their names, and for their socket devices
    /// (`port::build::toe_name`).
    listeners: BTreeMap<String, Socket>,
    /// Paths of sockets that earlier steps give up.
    freed: Vec<PathBuf>,
}

/// The error of one resource.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Of an uplink or overlay.
    Port(OpenFailure),
    /// Of a VM's socket: the VM's name.
    Socket(String, ListenError),
    /// Of the directory of a VM's socket.
    Directory(StartError),
}

impl Failure {
    /// With its fix.
    pub(crate) fn into_error(self) -> StartError {
        match self {
            Self::Port(failure) => failure.error,
            Self::Socket(vm, e) => error(format!("vm {vm}: {e}"), e.fix()),
            Self::Directory(e) => e,
        }
    }
}

impl Resources {
    /// Opens the resources of `step`. The interface of an uplink that has just gone may still be
    /// closing, on a thread of its own, so one that is in use is tried again for `patience`.
    ///
    /// # Errors
    /// The first of them that could not be opened. The step can be taken without it, and the port
    /// tries again: a VM's sockets are made later, an uplink or overlay is down until then.
    pub(crate) fn open(
        &mut self,
        step: &Step,
        owners: &Owners,
        openings: &Openings,
        patience: Duration,
    ) -> Result<(), Failure> {
        watchdog::handle_control(Some(monotonic_now()));
        match step {
            Step::RemoveVm(..)
            | Step::RemoveUplink(_)
            | Step::RemoveOverlay(_)
            | Step::SetOverlay(_)
            | Step::SetToeRules(_)
            | Step::SetStations(_)
            | Step::SetDrainTimeout(_) => Ok(()),
            Step::SetVm(both) => {
                let (before, vm) = &**both;
                let (old, new) = (sockets_of(before), sockets_of(vm));
                let comes = new.iter().filter(|socket| !old.contains(socket)).cloned();
                let opened = self.listen(vm, comes, owners.access(vm));
                self.freed.extend(old.into_iter().filter(|it| !new.contains(it)).map(|it| it.1));
                opened
            }
            Step::AddUplink(uplink) => {
                self.open_port(Wanted::Uplink(uplink.clone()), openings, patience)
            }
            Step::AddOverlay(overlay) => {
                self.open_port(Wanted::Overlay((**overlay).clone()), openings, patience)
            }
            Step::AddVm(vm) if vm.tap.is_some() => {
                self.open_port(Wanted::Attached(vm.clone()), openings, patience)
            }
            Step::AddVm(vm) => self.listen(vm, sockets_of(vm), owners.access(vm)),
        }
    }

    /// The change is refused: taps that were attached for it are plain again. Links go with their
    /// descriptors, filters do not, and would turn frames to taps that have gone.
    pub(super) fn detach(&self, openings: &Openings) {
        for port in self.ports.values() {
            if let Port::Attached(port) = port {
                openings.broker.detach(port.index());
            }
        }
    }

    /// The sockets of a VM are free once an earlier step has been taken.
    pub(super) fn note_freed(&mut self, vm: &VmConfig) {
        self.freed.extend(sockets_of(vm).into_iter().map(|(_, path)| path));
    }

    /// The things that were opened for `step`.
    pub(crate) fn take(&mut self, step: &Step, owners: &Owners) -> Opened {
        let port = |ports: &mut BTreeMap<_, _>, name| Opened {
            port: ports.remove(name),
            ..Opened::default()
        };
        let vm = match step {
            Step::AddUplink(uplink) => return port(&mut self.ports, &uplink.name),
            Step::AddOverlay(overlay) => return port(&mut self.ports, &overlay.name),
            Step::AddVm(vm) if vm.tap.is_some() => return port(&mut self.ports, &vm.name),
            Step::AddVm(vm) => vm,
            Step::SetVm(both) => &both.1,
            _ => return Opened::default(),
        };
        let names = [vm.name.clone(), toe_name(&vm.name)];
        let sockets = names.into_iter().filter_map(|name| self.listeners.remove_entry(&name));
        Opened { port: None, sockets: sockets.collect(), access: owners.access(vm) }
    }

    fn open_port(
        &mut self,
        wanted: Wanted,
        openings: &Openings,
        patience: Duration,
    ) -> Result<(), Failure> {
        let deadline = Instant::now() + patience;
        let name = wanted.name().to_owned();
        loop {
            match openings.open(&wanted) {
                Err(e) if e.is_busy && Instant::now() < deadline => thread::sleep(BUSY_LOOK),
                Err(e) => {
                    let why = e.what.clone();
                    self.ports.insert(name, Port::Lost(Box::new(Lost { wanted, why })));
                    return Err(Failure::Port(e));
                }
                Ok(port) => {
                    self.ports.insert(name, port);
                    return Ok(());
                }
            }
        }
    }

    /// Makes sockets of a VM, except those whose paths ports that go still have.
    fn listen(
        &mut self,
        vm: &VmConfig,
        sockets: impl IntoIterator<Item = (String, PathBuf)>,
        access: Access,
    ) -> Result<(), Failure> {
        let mut result = Ok(());
        for (name, path) in sockets {
            if self.freed.contains(&path) {
                continue;
            }
            let without_parent = make_parent(&path).err();
            let socket = match Listener::bind(&path, access) {
                Ok(listener) => Socket::Open(listener),
                Err(e) => {
                    let failure = Failure::Socket(vm.name.clone(), e);
                    result = result.and(Err(without_parent.map_or(failure, Failure::Directory)));
                    Socket::Failed
                }
            };
            self.listeners.insert(name, socket);
        }
        result
    }
}

/// The sockets of a VM, and the names of their listeners.
fn sockets_of(vm: &VmConfig) -> Vec<(String, PathBuf)> {
    if vm.tap.is_some() {
        return Vec::new();
    }
    let toe = vm.toe_socket().map(|socket| (toe_name(&vm.name), socket));
    std::iter::once((vm.name.clone(), vm.socket.clone())).chain(toe).collect()
}
