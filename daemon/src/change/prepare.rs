//! From an operator's change to steps that the worker can apply without failing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use nightporter_api::Change;
use nightporter_core::store::arena::ArenaSize;

use super::file::File;
use super::plan::{section_of, section_of_bridge};
use super::resources::{Failure, Resources};
use super::{Means, Plan, Prepared, Preparer, Refusal, Running, partial};
use crate::arena_file;
use crate::config::warnings::uneven_mtus;
use crate::config::{AttachConfig, Config, Problems, UplinkConfig, VmConfig};
use crate::worker::steps::Step;

/// How long an interface may take to close.
const CLOSING_MAX: Duration = Duration::from_secs(2);

/// Plans a change, and unless it is only to be shown, opens and allocates the interfaces, sockets
/// and memory that it needs. If the change is refused, they are released.
pub(super) fn prepare(
    Preparer { file, means, arena, running }: &mut Preparer,
    change: &Change,
    dry_run: bool,
    excess_pages: u64,
) -> Result<Prepared, Refusal> {
    let running = &*running;
    let mut target = target(change, running, file)?;
    let mut waits = Vec::new();
    if let Change::Reload {} = change {
        let (reached, left) = partial::reachable(&running.config, &target.config)?;
        (target.config, waits) = (Arc::new(reached), left);
    }
    let mut plan = Plan::between(&running.config, &target.config);
    match change {
        Change::RemoveVm { drain_ms: Some(ms), .. } => plan.set_drain(*ms),
        Change::AddVm { name, .. } => plan.section = unwritten(name, &target, file, dry_run)?,
        Change::AddBridge { bridge, .. } => {
            plan.section = unwritten_bridge(bridge, &target, file, dry_run)?;
        }
        _ => {}
    }
    let owners = means.owners.clone().map_err(|e| refusal(&e))?;
    let mut prepared = Prepared { plan, target, resources: Resources::default(), owners };
    let mut comes = prepared.plan.steps.iter().filter_map(|step| match step {
        Step::AddVm(vm) => Some(&**vm),
        Step::SetVm(both) => Some(&both.1),
        _ => None,
    });
    if let Some(vm) = comes.find(|vm| prepared.owners.find(vm).is_none()) {
        return Err(Refusal {
            what: format!("vm {}: no VM had that socket_user and socket_group", vm.name),
            fix:
                "use those of [daemon] or of another VM: they are looked up at the start; or write \
                  the VM into the file and restart nightporterd; nothing was changed"
                    .into(),
        });
    }
    if !prepared.plan.needs_restart.is_empty() {
        return Err(Refusal {
            what: format!("needs a restart: {}", prepared.plan.needs_restart.join("; ")),
            fix: "write it into the file and restart nightporterd; nothing was changed".into(),
        });
    }
    prepared.plan.needs_restart = waits;
    if dry_run {
        return Ok(prepared);
    }
    let Prepared { plan, target, .. } = &mut prepared;
    target.size = size(running, &target.config, plan, excess_pages);
    if plan.steps.iter().any(|step| matches!(step, Step::AddUplink(_))) {
        // The broker reads the file for it, and its caller waits for that.
        file.must_answer()?;
    }
    let opened = open(&mut prepared, &running.config, means);
    // Last, so that nothing is allocated for an impossible change.
    let grown = opened
        .and_then(|()| arena.grow(running.size, prepared.target.size).map_err(|e| refusal(&e)));
    grown.inspect_err(|_| prepared.resources.detach(&means.openings))?;
    warn_of_mtus(&running.config, &prepared.target.config);
    Ok(prepared)
}

/// Warnings that a start would have given, and did not.
fn warn_of_mtus(before: &Config, now: &Config) {
    let known: BTreeSet<String> = uneven_mtus(before).collect();
    let new = uneven_mtus(now).filter(|warning| !known.contains(warning));
    new.for_each(|warning| tracing::warn!("{warning}"));
}

/// The configuration that should run.
fn target(change: &Change, running: &Running, file: &mut File) -> Result<Running, Refusal> {
    let mut target = running.clone();
    match change {
        Change::Reload {} => target = reloaded(running, file)?,
        Change::AddVm { .. } | Change::SetVm { .. } | Change::RemoveVm { .. } => {
            change_vm(change, &mut target)?;
        }
        Change::AddBridge { .. } | Change::RemoveBridge { .. } => {
            change_bridge(change, &mut target)?;
        }
        Change::AddUplink { name, keys } => {
            let uplink = UplinkConfig::of(name, keys).map_err(|e| problems(&e))?;
            Arc::make_mut(&mut target.config).uplinks.push(uplink);
            target.by_command.insert(name.clone());
        }
        Change::RemoveUplink { name } => {
            let config = Arc::make_mut(&mut target.config);
            let before = config.uplinks.len();
            config.uplinks.retain(|uplink| uplink.name != *name);
            if config.uplinks.len() == before {
                return Err(unknown("uplink", name));
            }
            target.by_command.remove(name);
        }
    }
    target.config.check().map_err(|e| problems(&e))?;
    Ok(target)
}

/// The file's configuration, and the ports that commands have added.
fn reloaded(running: &Running, file: &mut File) -> Result<Running, Refusal> {
    let mut target = running.clone();
    let mut config = file.load()?;
    let is_new = |name: &String, config: &Config| {
        let uplinks = config.uplinks.iter().map(|uplink| &uplink.name);
        let overlays = config.overlays.iter().map(|overlay| &overlay.name);
        let mut ports = uplinks.chain(overlays).chain(config.vms.iter().map(|vm| &vm.name));
        !ports.any(|other| other == name)
    };
    target.by_command.retain(|name| is_new(name, &config));
    let stays = |name: &String| target.by_command.contains(name);
    let old = &running.config;
    config.uplinks.extend(old.uplinks.iter().filter(|u| stays(&u.name)).cloned());
    config.vms.extend(old.vms.iter().filter(|vm| stays(&vm.name)).cloned());
    let is_in_file = |bridge: &String| config.attach.iter().any(|it| it.bridge == *bridge);
    target.bridges_by_command.retain(|bridge| !is_in_file(bridge));
    let stay = old.attach.iter().filter(|it| target.bridges_by_command.contains(&it.bridge));
    config.attach.extend(stay.cloned());
    target.config = Arc::new(config);
    Ok(target)
}

fn change_vm(change: &Change, target: &mut Running) -> Result<(), Refusal> {
    let config = Arc::make_mut(&mut target.config);
    match change {
        Change::AddVm { name, keys } => {
            let vm = VmConfig::of(name, keys).map_err(|e| problems(&e))?;
            if !config.vms.contains(&vm) {
                is_free(config, &vm)?;
                config.vms.push(vm);
                target.by_command.insert(name.clone());
            }
        }
        Change::SetVm { keys, .. } if keys.contains_key("name") => {
            return Err(Refusal {
                what: "a VM keeps its name".into(),
                fix: "add one with the other name, and remove this one".into(),
            });
        }
        Change::SetVm { name, keys } => {
            let vm = config.vms.iter_mut().find(|vm| vm.name == *name);
            let vm = vm.ok_or_else(|| unknown("VM", name))?;
            *vm = vm.with(keys).map_err(|e| problems(&e))?;
        }
        Change::RemoveVm { name, .. } => {
            let before = config.vms.len();
            config.vms.retain(|vm| vm.name != *name);
            if config.vms.len() == before {
                return Err(unknown("VM", name));
            }
            target.by_command.remove(name);
        }
        _ => {}
    }
    Ok(())
}

fn change_bridge(change: &Change, target: &mut Running) -> Result<(), Refusal> {
    let config = Arc::make_mut(&mut target.config);
    match change {
        Change::AddBridge { bridge, keys } => {
            let attach = AttachConfig::of(bridge, keys).map_err(|e| problems(&e))?;
            let before = config.attach.iter().find(|it| it.bridge == *bridge);
            if before.is_some_and(|before| *before != attach) {
                return Err(Refusal {
                    what: format!("the taps of {bridge} are attached already, by other keys"),
                    fix: format!("nightporter detach --bridge {bridge}; nothing was changed"),
                });
            }
            if before.is_none() {
                config.attach.push(attach);
                target.bridges_by_command.insert(bridge.clone());
            }
        }
        Change::RemoveBridge { bridge } => {
            let before = config.attach.len();
            config.attach.retain(|it| it.bridge != *bridge);
            if config.attach.len() == before {
                return Err(unknown("bridge whose taps are attached", bridge));
            }
            target.bridges_by_command.remove(bridge);
        }
        _ => {}
    }
    Ok(())
}

/// The section of a VM that comes, or is there and may be saved now; none if a file has it. Before
/// it is saved (a dry run), the file is read: it or the VM may have changed since.
fn unwritten(
    name: &str,
    target: &Running,
    file: &mut File,
    dry_run: bool,
) -> Result<Option<String>, Refusal> {
    let vm = target.config.vms.iter().find(|vm| vm.name == *name).expect("it was added");
    if target.by_command.contains(name) {
        return Ok(Some(section_of(vm)));
    }
    if !dry_run {
        return Ok(None);
    }
    let config = file.load()?;
    match config.vms.iter().find(|written| written.name == *name) {
        None => Ok(Some(section_of(vm))),
        Some(written) if written == vm => Ok(None),
        Some(_) => Err(Refusal {
            what: format!("VM {name} is in a configuration file, with other keys"),
            fix: "change it in the file, and `nightporter reload`; nothing was changed".into(),
        }),
    }
}

/// Likewise, of a bridge whose taps are attached.
fn unwritten_bridge(
    bridge: &str,
    target: &Running,
    file: &mut File,
    dry_run: bool,
) -> Result<Option<String>, Refusal> {
    let attach = target.config.attach.iter().find(|it| it.bridge == bridge);
    let attach = attach.expect("it was added");
    let is_in_file = !target.bridges_by_command.contains(bridge)
        && (!dry_run || file.load()?.attach.iter().any(|it| it.bridge == bridge));
    Ok((!is_in_file).then(|| section_of_bridge(attach)))
}

/// Nobody has the name or the tap of a VM that comes; an uplink's is found with all that must be
/// unique.
fn is_free(config: &Config, vm: &VmConfig) -> Result<(), Refusal> {
    let name = &vm.name;
    if config.vms.iter().any(|other| other.name == *name) {
        return Err(Refusal {
            what: format!("there is a VM {name} already, with other keys"),
            fix: format!("nightporter vm set {name} KEY=VALUE changes it; nothing was changed"),
        });
    }
    let Some(tap) = vm.tap.as_ref().filter(|_| vm.tap_begins().is_none()) else { return Ok(()) };
    if let Some(other) = config.vms.iter().find(|other| other.tap.as_ref() == Some(tap)) {
        return Err(Refusal {
            what: format!("{tap} is attached already, as VM {}", other.name),
            fix: format!("nightporter detach {tap}, if it is to be another; nothing was changed"),
        });
    }
    Ok(())
}

/// The arena's size: no less than it has, and while budgets get smaller both the old and the new.
fn size(running: &Running, wanted: &Config, plan: &Plan, excess_pages: u64) -> ArenaSize {
    let smaller: u64 = plan
        .steps
        .iter()
        .map(|step| match step {
            Step::SetVm(both) => both.0.budget.saturating_sub(both.1.budget),
            _ => 0,
        })
        .sum();
    let needed = arena_file::size_for(wanted.budget_sum() + smaller, wanted.flows_sum());
    let excess = usize::try_from(excess_pages).expect("64-bit Linux");
    ArenaSize {
        records: running.size.records.max(needed.records),
        pages: running.size.pages.max(needed.pages + excess),
    }
}

/// Opens the interfaces and sockets of new ports.
fn open(prepared: &mut Prepared, now: &Config, means: &Means) -> Result<(), Refusal> {
    let Prepared { plan, resources, owners, .. } = prepared;
    for step in &plan.steps {
        if let Step::RemoveVm(name, _) = step {
            now.vms.iter().filter(|vm| vm.name == *name).for_each(|vm| resources.note_freed(vm));
        }
        let opened = resources.open(step, owners, &means.openings, CLOSING_MAX);
        opened.map_err(|failure| not_open(failure, means))?;
    }
    Ok(())
}

fn not_open(failure: Failure, means: &Means) -> Refusal {
    match failure {
        Failure::Socket(vm, e) if e.is_elsewhere() => {
            let dirs = means.dirs.iter().map(|dir| dir.display().to_string());
            let dirs = dirs.collect::<Vec<_>>().join(" or ");
            let fix = format!(
                "choose a socket under {dirs}, where the daemon may make sockets since its start, \
                 or name its directory in daemon.socket_dirs (and, under systemd, in \
                 ReadWritePaths=) and restart; nothing was changed"
            );
            Refusal { what: format!("vm {vm}: {e}"), fix }
        }
        failure => refusal(&failure.into_error()),
    }
}

fn unknown(kind: &str, name: &str) -> Refusal {
    Refusal {
        what: format!("there is no {kind} \"{name}\""),
        fix: "nightporter status lists those there are".into(),
    }
}

/// Of an error whose text has its fix in it.
pub(super) fn refusal(error: &impl std::fmt::Display) -> Refusal {
    let text = error.to_string();
    match text.split_once("\n    fix: ") {
        Some((what, fix)) => {
            Refusal { what: what.into(), fix: format!("{fix}; nothing was changed") }
        }
        None => Refusal { what: text, fix: "nothing was changed".into() },
    }
}

/// Without lines if there is no file that they are of.
pub(super) fn problems(found: &Problems) -> Refusal {
    if !found.file.is_empty() || found.list.iter().any(|problem| problem.is_of_a_flag()) {
        return refusal(found);
    }
    let list = found.list.iter().map(|p| format!("{}: {}\n    fix: {}", p.key, p.what, p.fix));
    refusal(&list.collect::<Vec<_>>().join("\n"))
}
