//! The steps of a change of ports, as control orders them: one at a time, between two turns.

use std::collections::BTreeMap;

use nightporter_core::engine::AddPortError;
use nightporter_core::port::{PortConfig, PortId};
use nightporter_core::time::{Duration, Instant};
use nightporter_registry::Station;
use nix::sys::epoll::Epoll;

use super::attached::{DETACH_LOOK, Detaching};
use super::data_path::DataPath;
use super::orders::Client;
use crate::charges;
use crate::config::{OverlayConfig, ToeRule, UplinkConfig, VmConfig};
use crate::port::build::{device_of, network_of, policy_of};
use crate::port::guest::GuestPort;
use crate::port::uplink_port;
use crate::port::vhost_user::{Socket, VhostUserPort};
use crate::port::{Port, Wanted};
use crate::sockets::GUEST_CID;
use crate::sockets::orders::{Change, Setting};
use crate::sockets::toe_of;
use crate::vhost::listener::Access;
use crate::vhost::vsock::Vsock;

/// One thing to do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Step {
    /// The VM's port goes; its connections end (LIFE-05). If it has a tap, they have so long until
    /// none owes anything; `None`: [`super::attached::DETACH_MAX`].
    RemoveVm(String, Option<Duration>),
    /// The uplink goes.
    RemoveUplink(String),
    /// The overlay goes.
    RemoveOverlay(String),
    /// Other keys for a VM whose port stays: the old and the new ones.
    SetVm(Box<(VmConfig, VmConfig)>),
    /// Other rules for connections by TOE.
    SetToeRules(Vec<ToeRule>),
    /// Another list of stations.
    SetStations(Vec<Station>),
    /// Another `daemon.drain_timeout_s`.
    SetDrainTimeout(u64),
    /// Other peers or another MTU for an overlay.
    SetOverlay(Box<OverlayConfig>),
    /// An overlay comes.
    AddOverlay(Box<OverlayConfig>),
    /// An uplink comes.
    AddUplink(UplinkConfig),
    /// A VM comes.
    AddVm(Box<VmConfig>),
}

/// The interface and sockets of this host that were opened for a step.
#[derive(Debug, Default)]
pub(crate) struct Opened {
    /// Of an uplink or overlay that comes.
    pub(crate) port: Option<Port>,
    /// Of a VM that comes or moves, by its name, and of its socket device
    /// (`port::build::toe_name`).
    pub(crate) sockets: BTreeMap<String, Socket>,
    /// The users who may connect to them.
    pub(crate) access: Access,
}

impl Opened {
    fn take_socket(&mut self, name: &str) -> Socket {
        self.sockets.remove(name).unwrap_or(Socket::Later)
    }
}

/// A step that is being taken.
#[derive(Debug)]
pub(super) struct Stepping {
    pub(super) step: Step,
    pub(super) opened: Opened,
    /// The connections that end with it have begun to.
    begun: bool,
    /// Of a VM whose tap is being detached, and when to look at it again.
    detaching: Option<Detaching>,
    look_at: Instant,
}

impl Stepping {
    pub(super) const fn new(step: Step, opened: Opened) -> Self {
        Self { step, opened, begun: false, detaching: None, look_at: Instant::ZERO }
    }

    /// When it is to be gone on with.
    pub(super) fn look_at(&self) -> Instant {
        self.look_at
    }

    /// Ends the connections that the step ends. `false`: they are many, and not all have ended.
    pub(super) fn prepare(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) -> bool {
        match &self.step {
            Step::RemoveVm(name, drain) => {
                let Some(id) = path.ports.find(name) else { return true };
                if now < self.look_at {
                    return false;
                }
                if !path.detach(now, id, *drain, &mut self.detaching) {
                    self.look_at = now + DETACH_LOOK;
                    return false;
                }
                if !std::mem::replace(&mut self.begun, true) {
                    path.sockets.prepare_removal(id);
                }
                !path.prepare_removal(now, epoll, id) && !path.sockets.is_busy()
            }
            Step::SetVm(both) if (both.0.vlan, &both.0.trunk) != (both.1.vlan, &both.1.trunk) => {
                let Some(id) = path.ports.find(&both.1.name) else { return true };
                if !std::mem::replace(&mut self.begun, true) {
                    path.engine.prepare_move(now, id);
                }
                !path.engine.is_ending(id)
            }
            _ => true,
        }
    }
}

impl DataPath {
    /// Takes a step: the clients that watched a port that has gone. Errors: those that should not
    /// occur.
    pub(super) fn take_step(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        step: Step,
        mut opened: Opened,
    ) -> Result<Vec<Client>, String> {
        let (path, opened) = (self, &mut opened);
        let port = |path: &Self, name: &str| {
            path.ports.find(name).ok_or_else(|| format!("there is no port {name}"))
        };
        match step {
            Step::RemoveVm(name, _) | Step::RemoveUplink(name) | Step::RemoveOverlay(name) => {
                let id = port(path, &name)?;
                path.forget_attached(now, epoll, id);
                path.remove_port(now, epoll, id);
                return Ok(path.ports.watchers.remove_port(id));
            }
            Step::SetToeRules(rules) => path.sockets.change(Change::SetRules(rules)),
            Step::SetStations(_) | Step::SetDrainTimeout(_) => {} // control's
            Step::SetVm(both) => set_vm(now, epoll, path, opened, &both.0, &both.1)?,
            Step::SetOverlay(overlay) => {
                let id = port(path, &overlay.name)?;
                set_overlay(&mut path.ports.of_mut(id).port, *overlay);
            }
            Step::AddOverlay(overlay) => {
                let config = uplink_port(&overlay.name, &overlay.network);
                add_uplink(now, epoll, path, opened, config)?;
            }
            Step::AddUplink(uplink) => {
                let config = uplink_port(&uplink.name, &uplink.network);
                add_uplink(now, epoll, path, opened, config)?;
            }
            Step::AddVm(vm) => add_vm(now, epoll, path, opened, &vm)?,
        }
        Ok(Vec::new())
    }
}

/// Another policy for an overlay, also for one that could not be opened yet.
fn set_overlay(port: &mut Port, overlay: OverlayConfig) {
    match port {
        Port::Overlay(at) => at.set(&overlay),
        Port::Lost(lost) => lost.wanted = Wanted::Overlay(overlay),
        _ => {}
    }
}

/// An uplink or overlay comes, be its port open or not.
fn add_uplink(
    now: Instant,
    epoll: &Epoll,
    path: &mut DataPath,
    opened: &mut Opened,
    config: PortConfig,
) -> Result<(), String> {
    let port = opened.port.take();
    let port = port.ok_or_else(|| format!("{}: not opened", config.name))?;
    add_port(now, epoll, path, port, config).map(drop)
}

fn add_port(
    now: Instant,
    epoll: &Epoll,
    path: &mut DataPath,
    port: Port,
    config: PortConfig,
) -> Result<PortId, String> {
    let name = config.name.clone();
    path.add_port(now, epoll, port, config).map_err(|e| {
        let why = match e {
            AddPortError::MacTaken => "the MAC is taken",
            AddPortError::NameTaken => "the name is taken",
            AddPortError::TooManyPorts => "one port too many for one daemon",
            AddPortError::BudgetExceedsArena => "the budgets exceed the arena",
        };
        format!("{name}: {why}")
    })
}

/// A VM comes.
fn add_vm(
    now: Instant,
    epoll: &Epoll,
    path: &mut DataPath,
    opened: &mut Opened,
    vm: &VmConfig,
) -> Result<(), String> {
    if vm.tap.is_some() {
        let port = opened.port.take().ok_or_else(|| format!("{}: not opened", vm.name))?;
        let id = path.add_attached(now, epoll, port, PortConfig::guest(&vm.name, policy_of(vm)))?;
        path.set_limits(now, id, vm);
        return Ok(());
    }
    let device = device_of(vm, opened.access, charges::memory_is_limited());
    let port = VhostUserPort::without_socket(&device);
    let mut port = port.map_err(|e| format!("vm {}: {e}", vm.name))?;
    port.listen_by(opened.take_socket(&vm.name));
    let config = PortConfig::guest(&vm.name, policy_of(vm)).in_network(network_of(&vm.network));
    let port = Port::Guest(Box::new(GuestPort::new(port, vm.vlan)));
    let id = add_port(now, epoll, path, port, config)?;
    path.set_limits(now, id, vm);
    add_toe(path, opened, id, vm);
    Ok(())
}

/// Its socket device, if it has one.
fn add_toe(path: &mut DataPath, opened: &mut Opened, id: PortId, vm: &VmConfig) {
    let Some((device, member)) = toe_of(vm, opened.access, charges::memory_is_limited()) else {
        return;
    };
    let mut port = VhostUserPort::with(&device, Vsock { cid: GUEST_CID });
    port.listen_by(opened.take_socket(&device.name));
    path.add_toe(id, port, member);
}

/// Other keys of a VM; unless that fails, when nothing has changed.
fn set_vm(
    now: Instant,
    epoll: &Epoll,
    path: &mut DataPath,
    opened: &mut Opened,
    before: &VmConfig,
    vm: &VmConfig,
) -> Result<(), String> {
    let name = &vm.name;
    let id = path.ports.find(name).ok_or_else(|| format!("there is no port {name}"))?;
    let device = device_of(vm, opened.access, charges::memory_is_limited());
    let DataPath { engine, turn, .. } = path;
    let set = turn.set_guest(now, engine, id, policy_of(vm));
    set.map_err(|e| format!("vm {name}: {e:?}"))?;
    if let Some(guest) = path.ports.guest_mut(id) {
        guest.port.set(&device);
        guest.set_vlan(vm.vlan);
        if before.socket != vm.socket {
            guest.port.move_to(vm.socket.clone());
            guest.port.listen_by(opened.take_socket(name));
        }
    }
    path.heartbeats.handle_change_of(id);
    path.handle_guest_events(now, epoll, id);
    path.set_limits(now, id, vm);
    set_toe(path, opened, id, before, vm);
    Ok(())
}

/// A VM gets a socket device, loses it, or keeps it with other rules.
fn set_toe(path: &mut DataPath, opened: &mut Opened, id: PortId, before: &VmConfig, vm: &VmConfig) {
    match (before.toe, toe_of(vm, opened.access, charges::memory_is_limited())) {
        (false, _) => add_toe(path, opened, id, vm),
        (true, None) => path.sockets.remove(id),
        (true, Some((config, member))) => {
            let moves = before.toe_socket() != vm.toe_socket();
            let moves = moves.then(|| opened.take_socket(&config.name));
            let setting = Box::new(Setting { config, member, moves });
            path.sockets.change(Change::Set(id, setting));
        }
    }
}
