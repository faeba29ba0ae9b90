//! Adding, removing and changing ports while the daemon runs: one change at a time, one step
//! between two turns. `change` plans and prepares changes.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use nightporter_api::{Change, Plan, Reply};
use nightporter_core::engine::AddPortError;
use nightporter_core::limits::PAGE;
use nightporter_core::port::{PortConfig, PortId};
use nightporter_core::time::{Duration, Instant};
use nix::sys::epoll::Epoll;

use super::Desk;
use crate::change::{Job, Prepared, Preparer, Refusal, Running, Setting, Socket, Step};
use crate::charges;
use crate::config::{Config, OverlayConfig, VmConfig};
use crate::port::build::{device_of, network_of, policy_of};
use crate::port::guest::GuestPort;
use crate::port::uplink_port;
use crate::port::vhost_user::VhostUserPort;
use crate::port::{Port, Wanted};
use crate::toe::GUEST_CID;
use crate::toe::toe_of;
use crate::token::{Token, watch_for};
use crate::vhost::device::Device;
use crate::vhost::vsock::Vsock;
use crate::worker::data_path::DataPath;
use crate::worker::orders::{Client, Report};

/// Changes that may wait for the one that is under way.
const WAITING_MAX: usize = 64;

/// A request for a change.
#[derive(Debug)]
pub(super) struct Asked {
    /// The client of control that waits for it; `None` is a signal.
    pub(super) client: Option<Client>,
    pub(super) change: Change,
    pub(super) dry_run: bool,
}

/// A change that is being applied.
#[derive(Debug)]
struct Applying {
    prepared: Prepared,
    /// Steps taken.
    at: usize,
    /// The connections that end with the next step have begun to.
    begun: bool,
    /// Errors that should not occur.
    failed: Vec<String>,
}

/// See the module doc.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// `None`: this daemon cannot change.
    parts: Option<(Preparer, Running)>,
    waiting: VecDeque<Asked>,
    /// The client that waits for the change that is under way.
    busy: Option<Option<Client>>,
    applying: Option<Applying>,
    /// Changes by commands while it was prepared.
    notes: Vec<(String, Setting)>,
}

impl Changes {
    /// The client has gone; the change that it wanted goes on.
    pub(super) fn forget(&mut self, client: Client) {
        self.waiting.retain(|asked| asked.client != Some(client));
        if self.busy == Some(Some(client)) {
            self.busy = Some(None);
        }
    }

    /// A step can be taken.
    pub(super) const fn is_applying(&self) -> bool {
        self.applying.is_some()
    }

    /// A command changed one key of a VM: the next reload puts it back, and the change that is
    /// under way does not.
    pub(super) fn note(&mut self, vm: &str, setting: Setting) {
        let Some((_, running)) = &mut self.parts else { return };
        let is_known = setting.set(&mut running.config, vm);
        if let Some(applying) = &mut self.applying {
            applying.prepared.note(vm, setting);
        } else if self.busy.is_some() && is_known {
            self.notes.retain(|(of, other)| of != vm || !other.is_of_the_key_of(setting));
            self.notes.push((vm.into(), setting));
        }
    }
}

impl Changes {
    /// The running configuration, as of the last change.
    pub(super) fn running(&self) -> Option<Arc<Config>> {
        self.parts.as_ref().map(|(_, running)| Arc::clone(&running.config))
    }
}

impl Desk {
    /// Ports may change from now on.
    pub(crate) fn set_changes(
        &mut self,
        epoll: &Epoll,
        preparer: Preparer,
        running: Running,
    ) -> io::Result<()> {
        watch_for(epoll, &preparer.fd(), Token::Changes)?;
        self.changes.parts = Some((preparer, running));
        Ok(())
    }

    /// Why there can be no change now.
    pub(super) fn cannot_change(&self) -> Option<Reply> {
        let (what, fix) = if self.stop.is_some() {
            return Some(refused(stopping()));
        } else if self.changes.waiting.len() >= WAITING_MAX {
            ("too many changes wait", "try again later")
        } else if self.changes.parts.is_none() {
            ("this daemon takes no changes", "restart it")
        } else {
            return None;
        };
        Some(refused(Refusal { what: what.into(), fix: fix.into() }))
    }

    /// The daemon stops: changes that wait are not made, and the one that is being prepared is
    /// dropped when that is done.
    pub(super) fn refuse_waiting(&mut self) {
        for asked in std::mem::take(&mut self.changes.waiting) {
            self.answer(asked.client, refused(stopping()));
        }
    }

    /// A request for a change that is possible: it waits for its turn.
    pub(super) fn ask(&mut self, path: &DataPath, asked: Asked) {
        self.changes.waiting.push_back(asked);
        self.next_change(path);
    }

    /// Begins with the change that has waited longest, if none is under way.
    fn next_change(&mut self, path: &DataPath) {
        let Changes { parts, waiting, busy, .. } = &mut self.changes;
        if busy.is_some() {
            return;
        }
        let Some(Asked { client, change, dry_run }) = waiting.pop_front() else { return };
        *busy = Some(client);
        let Some((preparer, running)) = parts else { return };
        let budgets = running.config.vms.iter().map(|vm| vm.budget / PAGE as u64);
        let excess_pages = path.engine.pages_promised(None).saturating_sub(budgets.sum());
        preparer.begin(Job { change, dry_run, running: running.clone(), excess_pages });
    }

    /// A change is prepared, or refused.
    pub(super) fn handle_prepared(&mut self, path: &DataPath) {
        let Some((preparer, _)) = &self.changes.parts else { return };
        let Some(result) = preparer.poll() else { return };
        let notes = std::mem::take(&mut self.changes.notes);
        match result {
            _ if self.stop.is_some() => self.end_change(path, refused(stopping())),
            Ok(mut prepared) if !prepared.dry_run => {
                notes.into_iter().for_each(|(vm, setting)| prepared.note(&vm, setting));
                self.changes.applying =
                    Some(Applying { prepared, at: 0, begun: false, failed: Vec::new() });
            }
            Ok(prepared) => self.end_change(path, plan(&prepared, false)),
            Err(refusal) => self.end_change(path, refused(refusal)),
        }
    }

    /// Takes all steps of the start's change: nothing runs yet that could wait meanwhile. The steps
    /// that failed, and their errors.
    pub(crate) fn begin(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        path: &mut DataPath,
        mut prepared: Prepared,
    ) -> (Running, Vec<(Step, String)>) {
        let mut failed = Vec::new();
        for step in std::mem::take(&mut prepared.plan.steps) {
            if let Err(e) = self.take_step(now, epoll, path, &mut prepared, step.clone()) {
                prepared.target.without(&step);
                failed.push((step, e));
            }
        }
        charges::set_max(prepared.target.config.charges_max());
        (prepared.target, failed)
    }

    /// Takes the next step of a change.
    pub(super) fn go_on_changing(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        let Some(mut applying) = self.changes.applying.take() else { return };
        let Applying { prepared, at, begun, failed } = &mut applying;
        if *at == 0 {
            let size = prepared.target.size;
            let flows = u32::try_from(size.records).unwrap_or(u32::MAX);
            path.engine.resize(flows, size);
        }
        if let Some(Step::RemoveVm(name)) = prepared.plan.steps.get(*at)
            && let Some(id) = path.ports.find(name)
            && path.prepare_removal(now, epoll, id)
        {
            self.changes.applying = Some(applying);
            return; // it takes some more turns
        }
        if let Some(Step::SetVm(both)) = prepared.plan.steps.get(*at)
            && (both.0.vlan, &both.0.trunk) != (both.1.vlan, &both.1.trunk)
            && let Some(id) = path.ports.find(&both.1.name)
        {
            if !std::mem::replace(begun, true) {
                path.engine.prepare_move(now, id);
            }
            if path.engine.is_ending(id) {
                self.changes.applying = Some(applying);
                return; // likewise
            }
        }
        if let Some(step) = prepared.plan.steps.get(*at).cloned() {
            *begun = false;
            match self.take_step(now, epoll, path, prepared, step.clone()) {
                Ok(()) => tracing::info!("changed: {}", prepared.plan.lines[*at]),
                Err(e) => {
                    tracing::error!("not done: {}: {e}", prepared.plan.lines[*at]);
                    prepared.target.without(&step);
                    failed.push(e);
                }
            }
            *at += 1;
            self.changes.applying = Some(applying);
            return;
        }
        if let Some((_, running)) = &mut self.changes.parts {
            *running = prepared.target.clone();
            charges::set_max(running.config.charges_max());
        }
        path.heartbeats.handle_change();
        path.ports_changed = true;
        self.handle_links(now, path); // of uplinks that came, and overlays with small buffers
        let reply = match failed.is_empty() {
            true => plan(prepared, true),
            false => refused(Refusal {
                what: format!("done but for: {}", failed.join("; ")),
                fix: "report this".into(),
            }),
        };
        self.end_change(path, reply);
    }

    fn take_step(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        path: &mut DataPath,
        prepared: &mut Prepared,
        step: Step,
    ) -> Result<(), String> {
        let port = |path: &DataPath, name: &str| {
            path.ports.find(name).ok_or_else(|| format!("there is no port {name}"))
        };
        match step {
            Step::RemoveVm(name) | Step::RemoveUplink(name) | Step::RemoveOverlay(name) => {
                let id = port(path, &name)?;
                path.remove_port(now, epoll, id);
                self.survey.census.forget(id);
                for client in path.ports.watchers.remove_port(id) {
                    self.report(Report::End(client));
                }
            }
            Step::SetToeRules(rules) => path.toe.set_rules(rules),
            Step::SetStations(list) => {
                if let Some(directory) = &mut self.directory {
                    directory.set_list(list);
                }
            }
            Step::SetDrainTimeout(seconds) => self.drain_timeout = Duration::from_secs(seconds),
            Step::SetVm(both) => set_vm(now, epoll, path, prepared, &both.0, &both.1)?,
            Step::SetOverlay(overlay) => {
                let id = port(path, &overlay.name)?;
                set_overlay(&mut path.ports.of_mut(id).port, *overlay);
            }
            Step::AddOverlay(overlay) => {
                let config = uplink_port(&overlay.name, &overlay.network);
                add_uplink(now, epoll, path, prepared, config)?;
            }
            Step::AddUplink(uplink) => {
                let config = uplink_port(&uplink.name, &uplink.network);
                add_uplink(now, epoll, path, prepared, config)?;
            }
            Step::AddVm(vm) => add_vm(now, epoll, path, prepared, &vm)?,
        }
        Ok(())
    }

    /// Answers the client of the change that was under way, and begins with the next.
    fn end_change(&mut self, path: &DataPath, reply: Reply) {
        let client = self.changes.busy.take().flatten();
        self.answer(client, reply);
        self.next_change(path);
    }

    /// Tells the client that waits, or the log.
    pub(super) fn answer(&mut self, client: Option<Client>, reply: Reply) {
        match (client, reply) {
            (Some(client), reply) => self.report(Report::Reply(client, reply)),
            (None, Reply::Plan(plan)) => tracing::info!(steps = plan.steps.len(), "reloaded"),
            (None, Reply::Error { what, fix }) => {
                tracing::error!("the reload failed: {what}\n    fix: {fix}");
            }
            (None, _) => {}
        }
    }
}

/// Another policy for an overlay, also for one that could not be opened yet.
fn set_overlay(port: &mut Port, overlay: OverlayConfig) {
    match port {
        Port::Overlay(at) => at.set(&overlay),
        Port::Lost(lost) => lost.wanted = Wanted::Overlay(overlay),
        Port::Uplink(_) | Port::Guest(_) | Port::Vacant => {}
    }
}

/// An uplink or overlay comes, be its port open or not.
fn add_uplink(
    now: Instant,
    epoll: &Epoll,
    path: &mut DataPath,
    prepared: &mut Prepared,
    config: PortConfig,
) -> Result<(), String> {
    let port = prepared.resources.take_port(&config.name);
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
    prepared: &mut Prepared,
    vm: &VmConfig,
) -> Result<(), String> {
    let device = device_of(vm, prepared.owners.access(vm), charges::memory_is_limited());
    let port = VhostUserPort::without_socket(&device);
    let mut port = port.map_err(|e| format!("vm {}: {e}", vm.name))?;
    listen(&mut port, prepared.resources.take_socket(&vm.name));
    let config = PortConfig::guest(&vm.name, policy_of(vm)).in_network(network_of(&vm.network));
    let port = Port::Guest(Box::new(GuestPort::new(port, vm.vlan)));
    let id = add_port(now, epoll, path, port, config)?;
    path.set_limits(now, id, vm);
    add_toe(now, epoll, path, prepared, id, vm);
    Ok(())
}

/// Its socket device, if it has one.
fn add_toe(
    now: Instant,
    epoll: &Epoll,
    path: &mut DataPath,
    prepared: &mut Prepared,
    id: PortId,
    vm: &VmConfig,
) {
    let Some((device, member)) =
        toe_of(vm, prepared.owners.access(vm), charges::memory_is_limited())
    else {
        return;
    };
    let mut port = VhostUserPort::with(&device, Vsock { cid: GUEST_CID });
    listen(&mut port, prepared.resources.take_socket(&device.name));
    path.add_toe(now, epoll, id, port, member);
}

/// The port listens, if its path is free by now; otherwise it tries again.
fn listen<D: Device>(port: &mut VhostUserPort<D>, socket: Socket) {
    match socket {
        Socket::Open(listener) => port.take(listener),
        Socket::Later => port.listen_or_say_so(),
        Socket::Failed => port.listen_later(),
    }
}

/// Other keys of a VM; unless that fails, when nothing has changed.
fn set_vm(
    now: Instant,
    epoll: &Epoll,
    path: &mut DataPath,
    prepared: &mut Prepared,
    before: &VmConfig,
    vm: &VmConfig,
) -> Result<(), String> {
    let name = &vm.name;
    let id = path.ports.find(name).ok_or_else(|| format!("there is no port {name}"))?;
    let device = device_of(vm, prepared.owners.access(vm), charges::memory_is_limited());
    let DataPath { engine, turn, .. } = path;
    let set = turn.set_guest(now, engine, id, policy_of(vm));
    set.map_err(|e| format!("vm {name}: {e:?}"))?;
    if let Some(guest) = path.ports.guest_mut(id) {
        guest.port.set(&device);
        guest.set_vlan(vm.vlan);
        if before.socket != vm.socket {
            guest.port.move_to(vm.socket.clone());
            listen(&mut guest.port, prepared.resources.take_socket(name));
        }
    }
    path.handle_guest_events(now, epoll, id);
    path.set_limits(now, id, vm);
    set_toe(now, epoll, path, prepared, id, before, vm);
    Ok(())
}

/// A VM gets a socket device, loses it, or keeps it with other rules.
fn set_toe(
    now: Instant,
    epoll: &Epoll,
    path: &mut DataPath,
    prepared: &mut Prepared,
    id: PortId,
    before: &VmConfig,
    vm: &VmConfig,
) {
    match (before.toe, toe_of(vm, prepared.owners.access(vm), charges::memory_is_limited())) {
        (false, _) => add_toe(now, epoll, path, prepared, id, vm),
        (true, None) => path.remove_toe(now, epoll, id),
        (true, Some((device, member))) => {
            if let Some(port) = path.toe.port_mut(id) {
                port.set_rules(&device);
                if before.toe_socket() != vm.toe_socket() {
                    port.move_to(device.socket.clone());
                    listen(port, prepared.resources.take_socket(&device.name));
                }
            }
            path.handle_toe_events(now, epoll, id);
            path.toe.set(now, id, member);
        }
    }
}

fn plan(prepared: &Prepared, done: bool) -> Reply {
    Reply::Plan(Plan {
        steps: prepared.plan.lines.clone(),
        needs_restart: prepared.plan.needs_restart.clone(),
        done,
    })
}

fn stopping() -> Refusal {
    Refusal {
        what: "the daemon is stopping".into(),
        fix: "start it again with the ports that you want".into(),
    }
}

fn refused(Refusal { what, fix }: Refusal) -> Reply {
    Reply::Error { what, fix }
}
