//! The settling run: the end of LIFE-17 when no daemon comes after one that was killed, or that
//! stopped with bytes it had acknowledged. `nightporterd --settle` does this alone.
//!
//! Frames of VMs with taps pass plain meanwhile, but a guest still lacks bytes that its remote
//! believes delivered. So this process takes the arena and attaches the taps of the configuration
//! file, and then it is a daemon that stops: it promises nothing, gives guests what they are owed,
//! and after [`LIMIT`] resets the connections that are left. Flows of other VMs, and of those whose
//! taps are not there, stay in the arena as they are, for the next daemon.
//!
//! A daemon that starts has priority: it says that it waits for the arena, and this process ends
//! after its turn, as after a kill.

use nightporter_core::engine::Restarted;
use nightporter_core::time::Duration;

use crate::arena_file;
use crate::config::{Config, DaemonConfig, Source};
use crate::errors::StartError;
use crate::sandbox::Sandbox;
use crate::start::{failed, start};

/// How long bytes are delivered (LIFE-17).
const LIMIT: Duration = Duration::from_secs(30);
/// How long those who were reset may ask whether that is meant: longer than a round trip.
const ANSWERS: Duration = Duration::from_secs(1);

/// The part of a configuration for a settling run: VMs with taps, and nothing by which others could
/// reach it. `None`: there are none.
#[must_use]
pub fn settling(config: &Config) -> Option<Config> {
    let daemon = DaemonConfig {
        metrics: None,
        busy_poll_us: 0,
        cpu: None,
        rt_priority: 0,
        ..config.daemon.clone()
    };
    let vms = config.vms.iter().filter(|vm| vm.tap.is_some()).cloned().collect::<Vec<_>>();
    (!vms.is_empty() || !config.attach.is_empty()).then_some(Config {
        daemon,
        uplinks: Vec::new(),
        overlays: Vec::new(),
        registry: None,
        toe: None,
        toe_rules: Vec::new(),
        stations: Vec::new(),
        attach: config.attach.clone(),
        vms,
    })
}

/// See the module doc. A first signal resets at once what is still owed, a second one ends it.
///
/// # Errors
/// Everything that keeps it from starting, or one error of the running worker.
pub fn settle(config: &Config, source: Source, sandbox: &Sandbox) -> Result<(), Vec<StartError>> {
    let Some(before) = arena_file::left_at(&config.daemon.arena) else { return Ok(()) };
    let (mut daemon, arena) = start(config, source, sandbox, None, Some(before.size))?;
    let worker = &mut daemon.worker;
    let Restarted { resumed, reset } = worker.settle(LIMIT);
    let is_wanted = || arena.is_wanted();
    worker.run_until(is_wanted).map_err(failed)?;
    let owed = worker.owed();
    if resumed + reset > 0 && !is_wanted() {
        worker.give_up(ANSWERS);
        worker.run_until(is_wanted).map_err(failed)?;
    }
    worker.unlink().map_err(failed)?;
    let left = worker.left();
    sandbox.broker.detach(0);
    if is_wanted() {
        tracing::info!("a daemon starts, and goes on with the connections");
    } else {
        tracing::info!(resumed, reset = reset + owed as usize, left, "settled");
        if left == 0
            && worker.owed() == 0
            && let Err(e) = arena.remove()
        {
            tracing::warn!("the empty arena cannot be removed: {e}");
        }
    }
    // Before the taps go, which takes its time.
    arena.give_up().map_err(failed)
}
