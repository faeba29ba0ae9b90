//! Changes of a running daemon: ports are added, removed and changed (`nightporter vm`, `uplink`,
//! `reload`).
//!
//! A change is planned, prepared and applied. The plan has the wanted configuration, and the steps
//! that lead there from the present one ([`Plan`]). If only a restart can make one of the changes,
//! a command is refused, and a reload makes the others (`partial`). Preparation takes memory,
//! interfaces and sockets, so that nothing can fail any more. Both happen in control's thread
//! ([`Preparer`]), because reading a file, making an interface and taking gigabytes of memory may
//! wait. Then the worker takes one step after the other, each between two turns (`worker::steps`).
//! There is one change at a time. The start is one too, from a configuration without ports: then
//! all steps are taken at once, and an interface or socket that cannot be opened refuses nothing,
//! because its port tries again ([`Prepared::first`]).

mod file;
mod partial;
mod plan;
mod prepare;
mod resources;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use nightporter_api::{Change, Direction, Request};
use nightporter_core::limits::PAGE;
use nightporter_core::store::arena::ArenaSize;

use crate::arena_file::ArenaFile;
use crate::config::{Config, DaemonConfig, Source, VmConfig};
use crate::errors::StartError;
use crate::owners::Owners;
use crate::port::build::Openings;
use crate::worker::steps::Step;

pub use plan::Plan;
pub(crate) use resources::{Failure, Resources};

/// The running configuration.
#[derive(Clone, Debug)]
pub struct Running {
    /// As of the last change.
    pub config: Arc<Config>,
    /// Ports that a command added: they are not in the file, and a reload leaves them.
    pub by_command: BTreeSet<String>,
    /// Likewise, bridges whose taps are attached.
    pub bridges_by_command: BTreeSet<String>,
    /// The arena's memory: the most that was needed since the start.
    pub size: ArenaSize,
}

/// It can be applied.
#[derive(Debug)]
pub struct Prepared {
    /// The way to `target`.
    pub plan: Plan,
    /// The configuration after the change.
    pub target: Running,
    /// For the ports that come or move.
    pub(crate) resources: Resources,
    /// The users who may connect to the VMs' sockets.
    pub(crate) owners: Owners,
}

impl Running {
    /// A step toward it failed: it runs without the result of that step.
    pub fn without(&mut self, step: &Step) {
        let config = Arc::make_mut(&mut self.config);
        let gone = match step {
            // It is not there either way.
            Step::RemoveVm(..)
            | Step::RemoveUplink(_)
            | Step::RemoveOverlay(_)
            | Step::SetOverlay(_)
            | Step::SetToeRules(_)
            | Step::SetStations(_)
            | Step::SetDrainTimeout(_) => return,
            Step::SetVm(both) => {
                let (before, now) = &**both;
                let vms = config.vms.iter_mut().filter(|vm| vm.name == now.name);
                vms.for_each(|vm| *vm = before.clone());
                return;
            }
            Step::AddVm(vm) => &vm.name,
            Step::AddOverlay(overlay) => &overlay.name,
            Step::AddUplink(uplink) => &uplink.name,
        };
        config.vms.retain(|vm| vm.name != *gone);
        config.uplinks.retain(|uplink| uplink.name != *gone);
        config.overlays.retain(|overlay| overlay.name != *gone);
        self.by_command.remove(gone);
    }
}

impl Prepared {
    /// The change with which the daemon starts, in an arena of this size. Nothing is opened yet.
    /// VMs that are not in the file are `by_command`.
    pub(crate) fn first(
        config: &Config,
        by_command: BTreeSet<String>,
        owners: Owners,
        size: ArenaSize,
    ) -> Self {
        let none = Config {
            daemon: DaemonConfig { drain_timeout_s: 0, ..config.daemon.clone() },
            uplinks: Vec::new(),
            overlays: Vec::new(),
            vms: Vec::new(),
            toe_rules: Vec::new(),
            ..config.clone()
        };
        let plan = Plan::between(&none, config); // and this is the restart that it may need
        let config = Arc::new(config.clone());
        let bridges_by_command = BTreeSet::new();
        let target = Running { config, by_command, bridges_by_command, size };
        Self { plan, target, resources: Resources::default(), owners }
    }
}

/// Settings of a VM that commands change at once.
#[derive(Clone, Copy, Debug)]
pub enum Setting {
    /// `ack_offload`.
    AckOffload(bool),
    /// `congestion_offload`.
    CongestionOffload(bool),
    /// `rate_limit_from_guest_mbit_s`, `rate_limit_to_guest_mbit_s`.
    RateLimit(Direction, Option<u32>),
}

impl Setting {
    /// The VM and the setting of a command that changes one.
    pub(crate) fn of(request: &Request) -> Option<(String, Self)> {
        let (vm, setting) = match request {
            Request::Offload { vm, on } => (vm, Self::AckOffload(*on)),
            Request::CongestionOffload { vm, on } => (vm, Self::CongestionOffload(*on)),
            Request::RateLimit { vm, direction, mbit_s } => {
                (vm, Self::RateLimit(*direction, *mbit_s))
            }
            _ => return None,
        };
        Some((vm.clone(), setting))
    }

    /// Sets it; `false`: there is no such VM.
    pub fn set(self, config: &mut Arc<Config>, vm: &str) -> bool {
        let at = Arc::make_mut(config).vms.iter_mut().find(|at| at.name == vm);
        at.map(|at| self.set_vm(at)).is_some()
    }

    fn set_vm(self, vm: &mut VmConfig) {
        match self {
            Self::AckOffload(on) => vm.ack_offload = on,
            Self::CongestionOffload(on) => vm.congestion_offload = on,
            Self::RateLimit(Direction::FromGuest, limit) => vm.rate_limit_from_guest_mbit_s = limit,
            Self::RateLimit(Direction::ToGuest, limit) => vm.rate_limit_to_guest_mbit_s = limit,
        }
    }
}

/// It cannot, and nothing has changed.
#[derive(Debug)]
pub struct Refusal {
    /// The obstacle.
    pub what: String,
    /// Its fix.
    pub fix: String,
}

impl Refusal {
    /// A mistake of ours refuses this change, and no other.
    fn mistake() -> Self {
        let what = "the change could not be prepared: see the log".into();
        Self { what, fix: "report this; nothing was changed".into() }
    }
}

/// The ways in which a running daemon still opens something, after it has given its other rights
/// away.
#[derive(Debug)]
pub(crate) struct Means {
    pub(crate) openings: Openings,
    /// The users who may connect to the VMs' sockets.
    pub(crate) owners: Result<Owners, StartError>,
    /// Where sockets can be made.
    pub(crate) dirs: Vec<PathBuf>,
}

/// Plans and prepares changes of the running configuration.
#[derive(Debug)]
pub(crate) struct Preparer {
    pub(crate) file: file::File,
    means: Means,
    arena: Arc<ArenaFile>,
    pub(crate) running: Running,
}

impl Preparer {
    /// For a daemon whose configuration comes from `source`.
    pub(crate) const fn new(
        source: Source,
        means: Means,
        arena: Arc<ArenaFile>,
        running: Running,
    ) -> Self {
        Self { file: file::File::new(source), means, arena, running }
    }

    /// Prepares a change, unless it is a `dry_run`; a mistake of ours in that refuses this change,
    /// and ends nothing. `pages`: those that VMs may use, or still use.
    pub(crate) fn prepare(
        &mut self,
        change: &Change,
        dry_run: bool,
        pages: u64,
    ) -> Result<Prepared, Refusal> {
        let budgets = self.running.config.vms.iter().map(|vm| vm.budget / PAGE as u64);
        let excess = pages.saturating_sub(budgets.sum());
        let prepared = AssertUnwindSafe(|| prepare::prepare(self, change, dry_run, excess));
        catch_unwind(prepared).unwrap_or_else(|_| Err(Refusal::mistake()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_step_that_failed_would_have_brought_does_not_run() {
        let config = |text: &str| {
            let parsed = Config::parse("np.toml", text, &std::collections::BTreeMap::new());
            Arc::new(parsed.unwrap())
        };
        let lan = "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\n";
        let old = config("[[vm]]\nname = \"a\"\n[[vm]]\nname = \"b\"\n");
        let new = format!("{lan}[[vm]]\nname = \"a\"\nmtu = 9000\n[[vm]]\nname = \"c\"\n");
        let new = config(&new);
        let size = crate::arena_file::size_for(old.budget_sum(), old.flows_sum());
        let by_command = BTreeSet::from(["c".into()]);
        let bridges_by_command = BTreeSet::new();
        let config = Arc::clone(&new);
        let mut running = Running { config, by_command, bridges_by_command, size };
        for step in &Plan::between(&old, &new).steps {
            running.without(step);
        }
        let names: Vec<_> = running.config.vms.iter().map(|vm| (&*vm.name, vm.mtu)).collect();
        assert_eq!((names, running.config.uplinks.len()), (vec![("a", 1500)], 0));
        assert!(running.by_command.is_empty());
    }
}
