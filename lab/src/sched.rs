//! How the guests compete for their core. It applies to vCPU threads only: a VMM's other threads do
//! the driver domain's work and have other cores.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use nix::fcntl::Flock;
use serde::Serialize;

use crate::cpus::{Cores, pin};
use crate::process;
use crate::rundir::RunDir;
use crate::sys;
use crate::vmm::Guest;

/// A scheduling case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheduler {
    /// The default class: EEVDF on Linux 6.6 and later, CFS before. All VMMs are in one session
    /// and so in one autogroup.
    Eevdf,
    /// Whole slices of 30 ms in turn, as Xen's credit scheduler and KVM under SCHED_RR give them:
    /// a control thread gives one guest's vCPU SCHED_FIFO 20 and the others 10. Real-time
    /// throttling (`sched_rt_runtime_us`) keeps the host's setting: without it the kernel's own
    /// threads on that core could starve for the length of the run.
    Strict30,
    /// SCHED_RR with slices of 30 ms. Under TCG slices break: a vCPU waits for QEMU's lock at every
    /// kick and device access, and then goes to the end of the queue. So the guest with the I/O
    /// gets less of the core than the others. The emulator causes the gains, not a host.
    Rr30,
    /// A cgroup quota of 30 ms in every 100 ms for each guest's vCPU.
    Quota30,
    /// No load in the guests.
    Idle,
}

/// The cgroups in which the VMs compete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// All in that of the lab, as VMMs that one session has started.
    Session,
    /// One for each VM, and below it one for its vCPUs and one for the rest of its VMM, as libvirt
    /// makes them.
    Libvirt,
}

/// A turn of `strict30`.
const SLICE: Duration = Duration::from_millis(30);
/// SCHED_FIFO priorities of `strict30`: whose turn it is, the others, and who decides.
const PRIORITY_RUNS: i32 = 20;
const PRIORITY_WAITS: i32 = 10;
const PRIORITY_CONTROL: i32 = 60;

const RR_TIMESLICE: &str = "/proc/sys/kernel/sched_rr_timeslice_ms";
const QUOTA_US: u32 = 30_000;
const PERIOD_US: u32 = 100_000;

impl Scheduler {
    /// The guests have a load.
    #[must_use]
    pub fn has_load(self) -> bool {
        self != Self::Idle
    }

    /// How long it takes until the guests have had their turns, where that is fixed.
    #[must_use]
    pub fn cycle(self, guests: usize) -> Option<Duration> {
        match self {
            Self::Strict30 => Some(SLICE * u32::try_from(guests).expect("a handful")),
            Self::Quota30 => Some(Duration::from_micros(PERIOD_US.into())),
            Self::Eevdf | Self::Rr30 | Self::Idle => None,
        }
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().expect("no value is skipped").get_name())
    }
}

/// The guests compete for as long as this lives. Its changes outside the guests are in the run's
/// journal.
#[derive(Debug)]
pub struct Competition {
    _rotation: Option<Rotation>,
    _contended_core: Flock<File>,
}

impl Competition {
    /// Binds all vCPU threads of `guests` to the contended core and applies the scheduler.
    ///
    /// # Errors
    /// Another run is using a contended core, or the kernel refuses; the message says what.
    pub fn start(
        (scheduler, layout): (Scheduler, Layout),
        cores: &Cores,
        guests: &[Guest],
        run_dir: &RunDir,
    ) -> Result<Self> {
        let contended_core = run_dir.lock_contended_core()?;
        let is_normal = matches!(scheduler, Scheduler::Eevdf | Scheduler::Idle);
        ensure!(
            layout == Layout::Session || is_normal,
            "libvirt's cgroups are tried with eevdf and idle: others have their own"
        );
        if scheduler == Scheduler::Rr30 {
            run_dir.write(Path::new(RR_TIMESLICE), "30")?;
        }
        let cgroups = match (scheduler, layout) {
            (Scheduler::Quota30, _) | (_, Layout::Libvirt) => Some(CpuCgroups::find()?),
            _ => None,
        };
        let mut rotated = Vec::new();
        for (index, guest) in guests.iter().enumerate() {
            let threads = guest.vcpu_threads()?;
            if let Some(cgroups) = &cgroups {
                let name = format!("np-lab-{}-{index}", std::process::id());
                match layout {
                    Layout::Session => cgroups.limit(&name, guest.pid(), &threads, run_dir)?,
                    Layout::Libvirt => cgroups.divide(&name, guest.pid(), &threads, run_dir)?,
                }
            }
            for &thread in &threads {
                pin(thread, &[cores.contended])?;
                match scheduler {
                    Scheduler::Rr30 => sys::set_round_robin(thread, 1).context(REFUSED)?,
                    Scheduler::Strict30 => {
                        sys::set_fifo(thread, PRIORITY_WAITS).context(REFUSED)?;
                    }
                    Scheduler::Eevdf | Scheduler::Quota30 | Scheduler::Idle => {}
                }
            }
            rotated.push(threads);
        }
        let rotation = (scheduler == Scheduler::Strict30).then(|| Rotation::start(rotated));
        Ok(Self { _rotation: rotation, _contended_core: contended_core })
    }
}

const REFUSED: &str =
    "a real-time class was refused (with RT_GROUP_SCHED: run from the root cpu cgroup)";

/// A thread that gives each guest its whole slice in turn, until this is dropped.
#[derive(Debug)]
struct Rotation {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Rotation {
    /// `guests` are the vCPU threads of each.
    fn start(guests: Vec<Vec<i32>>) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::spawn(move || {
            let ended = rotate(&guests, &stopped);
            // Turns no longer change: with one guest above the others, they could not even be
            // killed.
            for &thread in guests.iter().flatten() {
                let _ = sys::set_normal(thread); // it may be gone
            }
            if let Err(error) = ended {
                process::yield_to_signal();
                eprintln!("the guests' turns ended: {error:#}");
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Rotation {
    fn drop(&mut self) {
        self.stop = None; // the receiver hears of it
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn rotate(guests: &[Vec<i32>], stopped: &Receiver<()>) -> Result<()> {
    sys::set_fifo(0, PRIORITY_CONTROL).context(REFUSED)?;
    let give = |guest: &Vec<i32>, priority| {
        guest.iter().try_for_each(|&thread| sys::set_fifo(thread, priority))
    };
    let mut at = Instant::now();
    for turn in 0.. {
        // The next one is raised first, so that there is no moment in which all are equal.
        give(&guests[turn % guests.len()], PRIORITY_RUNS)?;
        give(&guests[(turn + guests.len() - 1) % guests.len()], PRIORITY_WAITS)?;
        at += SLICE;
        match stopped.recv_timeout(at.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    Ok(())
}

/// The cgroup hierarchy that has the cpu controller.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CpuCgroups {
    V1(PathBuf),
    V2(PathBuf),
}

impl CpuCgroups {
    pub(crate) fn find() -> Result<Self> {
        let mounts =
            fs::read_to_string("/proc/self/mounts").context("reading /proc/self/mounts")?;
        for (kind, path, options) in mounts.lines().filter_map(mount_fields) {
            let path = PathBuf::from(path);
            let controllers = fs::read_to_string(path.join("cgroup.controllers"));
            let has_cpu = |list: &str| list.split_whitespace().any(|word| word == "cpu");
            if kind == "cgroup" && options.split(',').any(|option| option == "cpu") {
                return Ok(Self::V1(path));
            }
            if kind == "cgroup2" && has_cpu(&controllers.unwrap_or_default()) {
                return Ok(Self::V2(path));
            }
        }
        bail!("no mounted cgroup hierarchy has the cpu controller")
    }

    /// Puts process `pid` into a cgroup of its own, and its vCPUs' `threads` into one below.
    pub(crate) fn divide(
        &self,
        name: &str,
        pid: i32,
        threads: &[i32],
        run_dir: &RunDir,
    ) -> Result<()> {
        let (Self::V1(root) | Self::V2(root)) = self;
        let machine = root.join(name);
        let [emulator, vcpus] = ["emulator", "vcpu0"].map(|name| machine.join(name));
        if matches!(self, Self::V2(_)) {
            enable_cpu_controller(root, run_dir)?;
        }
        [&machine, &emulator, &vcpus].into_iter().try_for_each(|dir| run_dir.make_dir(dir))?;
        let file = match self {
            Self::V1(_) => {
                put(&emulator.join("cgroup.procs"), pid)?;
                "tasks"
            }
            Self::V2(_) => {
                // See `limit`.
                put(&machine.join("cgroup.procs"), pid)?;
                put(&emulator.join("cgroup.type"), "threaded")?;
                put(&vcpus.join("cgroup.type"), "threaded")?;
                put(&machine.join("cgroup.subtree_control"), "+cpu")?;
                for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
                    let thread = entry?.file_name();
                    put(&emulator.join("cgroup.threads"), thread.display())?;
                }
                "cgroup.threads"
            }
        };
        threads.iter().try_for_each(|thread| put(&vcpus.join(file), thread))
    }

    /// Puts `threads` of process `pid` into a cgroup of their own with the quota.
    fn limit(&self, name: &str, pid: i32, threads: &[i32], run_dir: &RunDir) -> Result<()> {
        let group = match self {
            Self::V1(root) => {
                let group = root.join(name);
                run_dir.make_dir(&group)?;
                put(&group.join("cpu.cfs_period_us"), PERIOD_US)?;
                put(&group.join("cpu.cfs_quota_us"), QUOTA_US)?;
                group
            }
            Self::V2(root) => {
                // Threads of one process may be in different cgroups only below a common
                // "threaded domain", which the process enters first (cgroup-v2.rst, Threads).
                let domain = root.join(name);
                let group = domain.join("vcpus");
                enable_cpu_controller(root, run_dir)?;
                run_dir.make_dir(&domain)?;
                run_dir.make_dir(&group)?;
                put(&group.join("cgroup.type"), "threaded")?;
                put(&domain.join("cgroup.subtree_control"), "+cpu")?;
                put(&group.join("cpu.max"), format!("{QUOTA_US} {PERIOD_US}"))?;
                put(&domain.join("cgroup.procs"), pid)?;
                group
            }
        };
        let file = group.join(match self {
            Self::V1(_) => "tasks",
            Self::V2(_) => "cgroup.threads",
        });
        threads.iter().try_for_each(|thread| put(&file, thread))
    }
}

/// Lets children of the root have the cpu controller, if systemd has not done so already.
fn enable_cpu_controller(root: &Path, run_dir: &RunDir) -> Result<()> {
    let file = root.join("cgroup.subtree_control");
    let now = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    if now.split_whitespace().any(|word| word == "cpu") {
        return Ok(());
    }
    run_dir.write_with_undo(&file, "+cpu", "-cpu")
}

fn put(file: &Path, value: impl fmt::Display) -> Result<()> {
    fs::write(file, value.to_string())
        .with_context(|| format!("writing {value} to {}", file.display()))
}

/// Type, mount point and options of a line of /proc/self/mounts.
fn mount_fields(line: &str) -> Option<(&str, &str, &str)> {
    let mut fields = line.split(' ').skip(1);
    let (path, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
    Some((kind, path, options))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_line_gives_type_place_and_options() {
        let line = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0";
        let expected = ("cgroup", "/sys/fs/cgroup/cpu,cpuacct", "rw,relatime,cpu,cpuacct");
        assert_eq!(mount_fields(line), Some(expected));
    }
}
