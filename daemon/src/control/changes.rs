//! Adding, removing and changing ports while the daemon runs, and settings of VMs by commands: one
//! at a time, so that none of them undoes another. `change` plans and prepares a change, and the
//! worker takes one of its steps after the other.

use std::collections::VecDeque;
use std::sync::Arc;

use nightporter_api::{Change, Plan, Reply, Request};

use super::Control;
use super::operators::line;
use crate::change::{Prepared, Preparer, Refusal, Setting};
use crate::charges;
use crate::config::Config;
use crate::log;
use crate::timer::monotonic_now;
use crate::watchdog;
use crate::worker::orders::{Client, Order};
use crate::worker::steps::Step;

/// Changes that may wait for the one that is under way.
const WAITING_MAX: usize = 64;

/// A request of a client; `None` is a signal.
type Asked = (Option<Client>, Request);

/// See the module doc.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// `None`: this daemon cannot change.
    preparer: Option<Preparer>,
    waiting: VecDeque<Asked>,
    /// The client that waits for the change that is under way, and how far it is.
    under_way: Option<(Option<Client>, Stage)>,
}

/// How far a change is.
#[derive(Debug)]
enum Stage {
    /// The worker executes the command of the client with this number.
    Setting(Client, String, Setting),
    /// The worker is asked for the memory that is in use.
    Counting { change: Change, dry_run: bool },
    /// The worker takes a step: so many were taken before, and these failed. With that step an
    /// attached tap goes, by its number.
    Applying { prepared: Box<Prepared>, at: usize, failed: Vec<String>, goes: Option<u32> },
}

impl Changes {
    pub(super) fn new(preparer: Option<Preparer>) -> Self {
        Self { preparer, ..Self::default() }
    }

    /// Whether the file system of the configuration file answers.
    pub(super) fn can_read(&mut self) -> bool {
        self.preparer.as_mut().is_none_or(|it| it.file.must_answer().is_ok())
    }

    /// No change is under way, and none waits.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_none() && self.waiting.is_empty()
    }

    /// The running configuration.
    pub(super) fn config(&self) -> Option<&Config> {
        self.preparer.as_ref().map(|it| &*it.running.config)
    }
}

impl Control {
    /// A request that changes ports or a setting: it waits for its turn. Errors: why it cannot.
    pub(super) fn ask(&mut self, client: Option<Client>, request: Request) -> Result<(), Reply> {
        let changes_ports = matches!(request, Request::Change { .. });
        let (what, fix) = if changes_ports && self.stops {
            return Err(refused(stopping()));
        } else if self.changes.waiting.len() >= WAITING_MAX {
            ("too many changes wait", "try again later")
        } else if changes_ports && self.changes.preparer.is_none() {
            ("this daemon takes no changes", "restart it")
        } else {
            self.changes.waiting.push_back((client, request));
            self.next_change();
            return Ok(());
        };
        Err(refused(Refusal { what: what.into(), fix: fix.into() }))
    }

    /// The daemon stops: changes that wait are not made, and the one whose memory is being counted
    /// is dropped when that is done.
    pub(super) fn refuse_waiting(&mut self) {
        let all = std::mem::take(&mut self.changes.waiting);
        let (changes, settings) =
            all.into_iter().partition(|(_, it)| matches!(it, Request::Change { .. }));
        self.changes.waiting = settings;
        let changes: VecDeque<Asked> = changes;
        changes.into_iter().for_each(|(client, _)| self.tell(client, refused(stopping())));
    }

    /// The client has gone, and the worker has its request or not; the change that it wanted goes
    /// on.
    pub(super) fn forget_asker(&mut self, gone: Client, has_request: bool) {
        self.changes.waiting.retain(|(client, _)| *client != Some(gone));
        match &mut self.changes.under_way {
            Some((_, Stage::Setting(client, ..))) if *client == gone && !has_request => {
                self.changes.under_way = None;
                self.next_change();
            }
            Some((client, _)) if *client == Some(gone) => *client = None,
            _ => {}
        }
    }

    /// Begins with the change that has waited longest, if none is under way.
    fn next_change(&mut self) {
        if self.changes.under_way.is_some() {
            return;
        }
        let Some((client, request)) = self.changes.waiting.pop_front() else { return };
        match (client, Setting::of(&request), request) {
            (client, _, Request::Change { change, dry_run }) => {
                self.begin_change(client, change, dry_run);
            }
            (Some(client), Some((vm, setting)), request) => {
                let stage = Stage::Setting(client, vm, setting);
                self.changes.under_way = Some((Some(client), stage));
                self.mail.order(Order::Request(client, request));
            }
            (_, _, request) => unreachable!("no change: {request:?}"),
        }
    }

    /// Begins with a change; none is under way.
    pub(super) fn begin_change(&mut self, client: Option<Client>, change: Change, dry_run: bool) {
        self.changes.under_way = Some((client, Stage::Counting { change, dry_run }));
        self.mail.order(Order::CountPages);
    }

    /// A client is answered: perhaps a command that changed one key of a VM. The next reload puts
    /// it back.
    pub(super) fn note_setting(&mut self, of: Client, reply: &Reply) {
        let is_it = |stage: &Stage| matches!(stage, Stage::Setting(client, ..) if *client == of);
        let under_way = self.changes.under_way.take_if(|(_, stage)| is_it(stage));
        let Some((_, Stage::Setting(_, vm, setting))) = under_way else { return };
        if let Some(preparer) = &mut self.changes.preparer
            && *reply == (Reply::Done {})
        {
            setting.set(&mut preparer.running.config, &vm);
        }
        self.next_change();
    }

    /// VMs may use, or still use, so many pages: prepares the change.
    pub(super) fn handle_pages(&mut self, pages: u64) {
        let Changes { preparer: Some(preparer), under_way, .. } = &mut self.changes else { return };
        let Some((_, Stage::Counting { change, dry_run })) = under_way else { return };
        if self.stops {
            return self.end_change(refused(stopping()));
        }
        let dry_run = *dry_run;
        watchdog::handle_control(Some(monotonic_now())); // its file may be read for some time
        match preparer.prepare(change, dry_run, pages) {
            Err(refusal) => self.end_change(refused(refusal)),
            Ok(prepared) if dry_run => self.end_change(plan(&prepared, false)),
            Ok(prepared) => {
                self.mail.order(Order::Resize(prepared.target.size));
                let (prepared, failed) = (Box::new(prepared), Vec::new());
                if let Some((_, stage)) = &mut self.changes.under_way {
                    *stage = Stage::Applying { prepared, at: 0, failed, goes: None };
                }
                self.go_on_changing();
            }
        }
    }

    /// The worker has taken a step.
    pub(super) fn handle_step(&mut self, result: Result<(), String>) {
        let Some((_, Stage::Applying { prepared, at, failed, goes })) = &mut self.changes.under_way
        else {
            return;
        };
        let step = &prepared.plan.steps[*at];
        let comes = match step {
            Step::AddUplink(uplink) => Some(&uplink.name),
            Step::AddOverlay(overlay) => Some(&overlay.name),
            Step::AddVm(vm) if vm.tap.is_some() => Some(&vm.name),
            _ => None,
        };
        match result {
            Ok(()) => tracing::info!("changed: {}", prepared.plan.lines[*at]),
            Err(e) => {
                tracing::error!("not done: {}: {e}", prepared.plan.lines[*at]);
                prepared.target.without(step);
                if let Some(index) = comes.and_then(|name| self.interfaces.remove(name)) {
                    self.interfaces.detach(index);
                }
                failed.push(e);
            }
        }
        *at += 1;
        goes.take().into_iter().for_each(|index| self.interfaces.detach(index));
        if comes.is_some() {
            self.handle_links();
        }
        self.go_on_changing();
    }

    /// Orders the next step of a change, or ends it.
    fn go_on_changing(&mut self) {
        let Changes { preparer: Some(preparer), under_way, .. } = &mut self.changes else { return };
        let Some((_, Stage::Applying { prepared, at, failed, goes })) = under_way else { return };
        if let Some(step) = prepared.plan.steps.get(*at) {
            let opened = prepared.resources.take(step, &prepared.owners);
            match (step, &mut self.directory) {
                (Step::AddVm(vm), Some(directory)) => {
                    directory.forget_place(&vm.name, &mut self.mail);
                }
                (Step::SetVm(both), Some(directory)) if both.0.mac != both.1.mac => {
                    directory.forget_mac(&both.0.name);
                }
                (Step::SetStations(list), Some(directory)) => directory.set_list(list.clone()),
                _ => {}
            }
            match step {
                Step::RemoveUplink(name) | Step::RemoveOverlay(name) | Step::RemoveVm(name, _) => {
                    *goes = self.interfaces.remove(name);
                }
                Step::SetOverlay(overlay) => self.interfaces.set(overlay),
                _ => opened.port.iter().for_each(|port| self.interfaces.add(port)),
            }
            return self.mail.order(Order::Step(Box::new((step.clone(), opened))));
        }
        let log = &prepared.target.config.daemon.log;
        if preparer.running.config.daemon.log != *log {
            log::set_filter(log);
            tracing::warn!("the log's filter is {log:?} now");
        }
        preparer.running = prepared.target.clone();
        charges::set_max(preparer.running.config.charges_max());
        let reply = match failed.is_empty() {
            true => plan(prepared, true),
            false => refused(Refusal {
                what: format!("done but for: {}", failed.join("; ")),
                fix: "report this".into(),
            }),
        };
        self.tell_registry(monotonic_now());
        self.end_change(reply);
    }

    /// Answers the client of the change that was under way, and begins with the next.
    fn end_change(&mut self, reply: Reply) {
        let client = self.changes.under_way.take().and_then(|(client, _)| client);
        if !self.bridges.handle_reply(monotonic_now(), &reply) {
            self.tell(client, reply);
        }
        self.next_change();
    }

    /// Tells the client that waits, or the log.
    pub(super) fn tell(&mut self, client: Option<Client>, reply: Reply) {
        match (client, reply) {
            (Some(client), reply) => self.answer(client, Arc::new(line(&reply)), false),
            (None, Reply::Plan(plan)) => {
                tracing::info!(steps = plan.steps.len(), "reloaded");
                for what in plan.needs_restart {
                    tracing::warn!("waits for a restart: {what}");
                }
            }
            (None, Reply::Error { what, fix }) => {
                tracing::error!("the reload failed: {what}\n    fix: {fix}");
            }
            (None, _) => {}
        }
    }
}

fn plan(prepared: &Prepared, done: bool) -> Reply {
    Reply::Plan(Plan {
        steps: prepared.plan.lines.clone(),
        needs_restart: prepared.plan.needs_restart.clone(),
        section: prepared.plan.section.clone(),
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
