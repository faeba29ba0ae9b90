//! The guests of a case, what each wants of the core that they share, and where the host's side
//! runs.

use std::fmt;
use std::fs;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::cpus::{Cores, pin};
use crate::sched::Scheduler;
use crate::sys;

/// The host's side in whole slices on the guests' core: above whoever has its turn, as a driver
/// domain that wakes.
const PRIORITY_HOST: i32 = 30;

/// The core of the daemon, passt and the VMMs' own threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostCore {
    /// One that guests do not have.
    Own,
    /// The guests' core. In whole slices it preempts the guests, else it competes with them.
    Guests,
}

/// How many guests share a core, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Placement {
    /// Guests on the core.
    pub guests: usize,
    /// Each one's demand of it, percent. It is never shed: time that was missing is caught up on.
    pub load_percent: u64,
    /// Where the host's side runs.
    pub host: HostCore,
}

impl Placement {
    /// The demo's: three guests that want all of their core.
    pub const USUAL: Self = Self { guests: 3, load_percent: 100, host: HostCore::Own };
}

impl fmt::Display for Placement {
    /// The unusual parts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guests, load_percent, host } = *self;
        if guests != Self::USUAL.guests {
            write!(f, ", {guests} guest{}", if guests == 1 { "" } else { "s" })?;
        }
        if load_percent != Self::USUAL.load_percent {
            write!(f, ", {load_percent} % load")?;
        }
        if host == HostCore::Guests {
            write!(f, ", one core")?;
        }
        Ok(())
    }
}

/// Moves all threads of a process, but for some, to the guests' core.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn move_to_guests(
    pid: i32,
    without: &[i32],
    scheduler: Scheduler,
    cores: &Cores,
) -> Result<()> {
    for entry in fs::read_dir(format!("/proc/{pid}/task")).context("a process's threads")? {
        let thread = entry?.file_name().to_string_lossy().parse()?;
        if without.contains(&thread) {
            continue;
        }
        pin(thread, &[cores.contended])?;
        if matches!(scheduler, Scheduler::Strict30 | Scheduler::Rr30) {
            sys::set_fifo(thread, PRIORITY_HOST).context("a real-time class was refused")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placement_names_what_is_not_usual() {
        assert_eq!(Placement::USUAL.to_string(), "");
        let one = Placement { guests: 1, load_percent: 60, host: HostCore::Guests };
        assert_eq!(one.to_string(), ", 1 guest, 60 % load, one core");
    }
}
