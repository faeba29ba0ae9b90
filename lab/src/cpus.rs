//! The use of cores: the guests' vCPU threads share one, all other threads have the rest.

use std::fs::{File, OpenOptions};
use std::io::Write;

use anyhow::{Context, Result, bail};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The division of the cores this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cores {
    /// The contended core.
    pub contended: usize,
    /// For VMM threads, daemon and sender.
    pub others: Vec<usize>,
}

impl Cores {
    /// Takes the last allowed core for the guests. (`taskset` decides what is allowed.)
    ///
    /// # Errors
    /// Fewer than two cores.
    pub fn plan() -> Result<Self> {
        let allowed = sched_getaffinity(Pid::from_raw(0)).context("reading our CPU affinity")?;
        let mut cores: Vec<usize> =
            (0..CpuSet::count()).filter(|&cpu| allowed.is_set(cpu).unwrap_or(false)).collect();
        match cores.pop() {
            Some(contended) if !cores.is_empty() => Ok(Self { contended, others: cores }),
            _ => bail!("the guests compete for one core and the rest needs another: two at least"),
        }
    }

    /// Moves the calling thread, and so all children it starts from now on, off the contended
    /// core.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn leave_contended(&self) -> Result<()> {
        pin(0, &self.others)
    }
}

/// Keeps idle cores from sleeping for as long as this lives. On a virtual machine a core that
/// sleeps gives itself back to its host, and takes a millisecond to wake, where hardware takes
/// microseconds: each packet and each kick would be measured with that.
#[derive(Debug)]
pub struct Awake {
    _held: File,
}

impl Awake {
    /// Asks the kernel for it (Documentation/power/pm_qos_interface.rst: a latency of 0 us, until
    /// the file is closed). `None` if it cannot be asked: then the cores sleep as they like.
    #[must_use]
    pub fn hold() -> Option<Self> {
        let mut file = OpenOptions::new().write(true).open("/dev/cpu_dma_latency").ok()?;
        file.write_all(&0_i32.to_ne_bytes()).ok()?;
        Some(Self { _held: file })
    }
}

/// Binds a thread (0: the calling one) to these cores.
///
/// # Errors
/// No such thread, or no such core.
pub fn pin(tid: i32, cores: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    cores.iter().try_for_each(|&core| set.set(core))?;
    sched_setaffinity(Pid::from_raw(tid), &set)
        .with_context(|| format!("binding thread {tid} to cores {cores:?}"))
}
