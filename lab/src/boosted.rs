//! Boosted VMs that want their core all the time, their neighbours, and the daemon's worker, all on
//! one core (BST-02, BST-06): the case that the demo's pinning does not show.
//!
//! The VMs are programs of ours: each connects to the daemon as a VMM does, and has a thread with
//! the name of a vCPU that never sleeps. They are boosted all the time, first one of them, then all
//! three, as by traffic that never ends. Meanwhile frames go to and fro between two uplinks of the
//! daemon; the program that sends and awaits them is on another core.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, unshare};
use serde_json::Value;

use crate::boost::{Boosting, Source};
use crate::cpus::{Awake, Cores, pin};
use crate::crowd::{Echo, Idle, Times};
use crate::daemon::Daemon;
use crate::host::ip;
use crate::link::Link;
use crate::process::{CpuUse, Process, die_cleanly_on_signals};
use crate::report::stats::percentile;
use crate::rundir::RunDir;
use crate::sched::{CpuCgroups, Layout};

/// VMs on the core.
const VMS: usize = 3;
/// How many of them are boosted, in turns.
const BOOSTED: [usize; 3] = [0, 1, VMS];
const TAPS: [&str; 2] = ["near", "far"];
/// Time of a turn.
const VISIT: Duration = Duration::from_secs(5);
/// Losses are looked at over so long.
const WINDOW: Duration = Duration::from_secs(1);
/// An echo is due in each of these, so that the worker leaves the core to the VMs.
const INTERVAL: Duration = Duration::from_millis(3);
const LIMIT: Duration = Duration::from_secs(20);
/// Of 99 in 100 echoes, beside boosts (BST-06); where they take longer without, so long.
const ECHO_MAX: Duration = Duration::from_millis(2);
/// A share may differ by so many percent of the core from that without boosts.
const SHARE_MAX: f64 = 2.0;

/// The measurements.
#[derive(Debug, Clone)]
pub struct Options {
    /// The cgroups in which the VMs compete.
    pub layout: Layout,
    /// Time for each number of boosted VMs.
    pub time: Duration,
    /// `vm.boost` of each.
    pub boost: String,
}

/// Measures, and prints a table; whether shares and echoes are as they must be.
///
/// # Errors
/// Something does not start or answer, or the booster refuses a VM.
pub fn run(options: &Options) -> Result<bool> {
    die_cleanly_on_signals()?;
    let cores = Cores::plan()?;
    cores.leave_contended()?;
    let _awake = Awake::hold();
    let dir = RunDir::create()?;
    let _core = dir.lock_contended_core()?;
    dir.write(Path::new("/proc/sys/kernel/sched_autogroup_enabled"), "0")?;
    unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
    ip("link set lo up")?;
    let mut daemon = start_daemon(dir.path(), cores.contended, &options.boost)?;
    let vms = start_vms(&dir, options.layout, cores.contended)?;
    wait_connected(&mut daemon)?;
    let mut echo = Echo::new(&TAPS.map(str::to_owned))?;
    let log = dir.path().join("boost.log");
    let mut boosting = Boosting::start(dir.path(), &log, TAPS[0], Link::Lan)?;
    if let Some(why) = boosting.wait_judged(VMS)? {
        anyhow::bail!("the booster refuses a VM: {why}");
    }
    let mut all = BOOSTED.map(|_| Seen::default());
    let mut times = Times::default();
    for _ in 0..options.time.as_secs().div_ceil(VISIT.as_secs()) {
        for (seen, count) in all.iter_mut().zip(BOOSTED) {
            boosting.select(if count == 0 { Source::None } else { Source::Always(count) })?;
            let echoes = visit(&vms, &mut echo, seen)?;
            times.note(&format!("echo, {count} VMs boosted"), echoes);
        }
    }
    boosting.select(Source::None)?;
    println!("{times}");
    let kept = judge(&all, &times);
    for (vm, account) in boosting.accounts().iter().enumerate() {
        println!("VM {vm}: {account:?}");
    }
    drop((boosting, vms));
    daemon.stop()?;
    Ok(kept)
}

/// The findings while so many were boosted.
#[derive(Debug, Default)]
struct Seen {
    /// CPU time of each VM.
    used: [Duration; VMS],
    /// The loss of each against a third of what all had, for each window, in percent of it.
    losses: [Vec<f64>; VMS],
}

impl Seen {
    /// Percent of what all had.
    fn shares(&self) -> [f64; VMS] {
        let all = self.used.iter().sum::<Duration>().as_secs_f64().max(1e-9);
        self.used.map(|used| 100.0 * used.as_secs_f64() / all)
    }
}

/// Prints shares and losses; whether they and the echoes are as they must be.
fn judge(all: &[Seen; BOOSTED.len()], times: &Times) -> bool {
    let mut kept = true;
    let mut must = |what: &str, holds: bool| {
        println!("  {} {what}", if holds { "kept:    " } else { "NOT KEPT:" });
        kept &= holds;
    };
    let without = all[0].shares();
    for (seen, count) in all.iter().zip(BOOSTED) {
        let shares = seen.shares();
        let neighbours: Vec<f64> = seen.losses[1..].iter().flatten().copied().collect();
        let [p50, p99] = [500, 990].map(|at| percentile(&neighbours, at).unwrap_or_default());
        let windows = seen.losses[0].len();
        println!(
            "{count} VMs boosted all the time: shares {shares:.1?} %; losses of the second and \
             third in {windows} windows of a second: p50 {p50:.1} %, p99 {p99:.1} %"
        );
        if count > 0 {
            let off = shares.iter().zip(without).map(|(with, without)| (with - without).abs());
            let off = off.fold(0.0, f64::max);
            must(&format!("shares within {SHARE_MAX} % ({off:.1})"), off <= SHARE_MAX);
            let p99 = times.percentile(&format!("echo, {count} VMs boosted"), 990);
            let most = ECHO_MAX.max(times.percentile("echo, 0 VMs boosted", 990));
            must(&format!("p99 of echoes at most {most:?} ({p99:?})"), p99 <= most);
        }
    }
    kept
}

/// Echoes for a while, and what the VMs have meanwhile.
fn visit(vms: &[Vm], echo: &mut Echo, seen: &mut Seen) -> Result<Vec<Duration>> {
    let used = || -> Result<Vec<Duration>> {
        vms.iter().map(|vm| Ok(CpuUse::of_thread(vm.thread)?.time)).collect()
    };
    let begin = Instant::now();
    let (mut before, mut window_at) = (used()?, begin);
    let (mut times, mut due) = (Vec::new(), begin);
    while begin.elapsed() < VISIT {
        due += INTERVAL;
        thread::sleep(due.saturating_duration_since(Instant::now())); // the point of it
        times.push(echo.once()?);
        if window_at.elapsed() < WINDOW {
            continue;
        }
        let (now, length) = (used()?, window_at.elapsed().as_secs_f64());
        window_at = Instant::now();
        let had = |vm: usize| now[vm].saturating_sub(before[vm]);
        let fair = (0..VMS).map(had).sum::<Duration>().as_secs_f64() / VMS as f64;
        for vm in 0..VMS {
            seen.used[vm] += had(vm);
            seen.losses[vm].push(100.0 * (fair - had(vm).as_secs_f64()) / length);
        }
        before = now;
    }
    Ok(times)
}

fn start_daemon(dir: &Path, core: usize, boost: &str) -> Result<Daemon> {
    let at = dir.display();
    let mut text = format!(
        "[daemon]\ncontrol = \"{at}/control.sock\"\narena = \"{at}/arena\"\nmetrics = \"off\"\n\
         cpu = {core}\nrt_priority = 2\n"
    );
    for tap in TAPS {
        write!(text, "[[uplink]]\nname = \"{tap}\"\nkind = \"tap\"\nifname = \"{tap}\"\n")?;
    }
    for vm in 0..VMS {
        write!(
            text,
            "[[vm]]\nname = \"vm{vm}\"\nsocket = \"{at}/vm{vm}.sock\"\nbudget = \"1M\"\n\
             boost = \"{boost}\"\n"
        )?;
    }
    let sockets: Vec<_> = (0..VMS).map(|vm| format!("vm{vm}.sock")).collect();
    Daemon::start_as(&text, &sockets, dir, &dir.join("nightporterd.log"))
}

/// A program that is a VM to daemon and booster.
#[derive(Debug)]
struct Vm {
    _process: Process,
    /// That of its vCPU.
    thread: i32,
}

fn start_vms(dir: &RunDir, layout: Layout, core: usize) -> Result<Vec<Vm>> {
    let start = |vm: usize| {
        let mut command = Command::new(std::env::current_exe()?);
        let socket = dir.path().join(format!("vm{vm}.sock"));
        command.arg("hog").arg(socket).arg(core.to_string()).stdin(Stdio::null());
        let log = dir.path().join(format!("vm{vm}.log"));
        let mut process = Process::spawn(&format!("VM {vm}"), command, &log)?;
        let deadline = Instant::now() + LIMIT;
        let thread = loop {
            process.check_alive()?;
            if let Some(thread) = vcpu(process.pid())? {
                break thread;
            }
            ensure!(Instant::now() < deadline, "VM {vm} did not begin");
            thread::sleep(Duration::from_millis(5)); // polls two conditions: child, thread
        };
        if layout == Layout::Libvirt {
            let name = format!("np-lab-{}-{vm}", std::process::id());
            CpuCgroups::find()?.divide(&name, process.pid(), &[thread], dir)?;
        }
        Ok(Vm { _process: process, thread })
    };
    (0..VMS).map(start).collect()
}

/// The thread of a VM's vCPU, when it has begun.
fn vcpu(pid: i32) -> Result<Option<i32>> {
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path: PathBuf = entry?.path();
        if fs::read_to_string(path.join("comm")).unwrap_or_default().starts_with("CPU ") {
            let id = path.file_name().context("a task has a name")?;
            return Ok(Some(id.to_string_lossy().parse()?));
        }
    }
    Ok(None)
}

/// Waits until all links are up.
fn wait_connected(daemon: &mut Daemon) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let status: Value = serde_json::from_str(&daemon.cli(&["--json", "status"])?)?;
        let ports = status["ports"].as_array().context("a status has ports")?;
        if ports.iter().filter(|port| port["link"] == true).count() == VMS + TAPS.len() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not all links came up: {status}");
        thread::sleep(Duration::from_millis(5)); // polls two conditions: links, daemon
    }
}

/// Is a VM that wants `core` all the time, until it is killed.
///
/// # Errors
/// The daemon does not take it.
pub fn hog(socket: &Path, core: usize) -> Result<bool> {
    pin(0, &[core])?;
    let _connection = Idle::connect(socket)?;
    let vcpu = || loop {
        std::hint::spin_loop();
    };
    let vcpu: thread::JoinHandle<()> =
        thread::Builder::new().name("CPU 0/TCG".into()).spawn(vcpu)?;
    Ok(vcpu.join().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bst_06_shares_and_echoes_that_are_off_are_not_kept() {
        let seen = |used: [u64; VMS]| Seen {
            used: used.map(Duration::from_millis),
            losses: [(); VMS].map(|()| vec![0.0]),
        };
        let times = |slow: u64| {
            let mut times = Times::default();
            for count in BOOSTED {
                let slow = if count == 0 { 300 } else { slow };
                let list = (1..=200).map(|n| Duration::from_micros(if n > 190 { slow } else { n }));
                times.note(&format!("echo, {count} VMs boosted"), list.collect());
            }
            times
        };
        let fair = || seen([1000, 1000, 1000]);
        assert!(judge(&[fair(), fair(), fair()], &times(1900)));
        assert!(!judge(&[fair(), fair(), fair()], &times(2100)));
        assert!(!judge(&[fair(), seen([1100, 950, 950]), fair()], &times(1900)));
        assert!(judge(&[fair(), seen([1030, 985, 985]), fair()], &times(1900)));
    }
}
