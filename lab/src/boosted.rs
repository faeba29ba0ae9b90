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
use serde::Serialize;
use serde_json::Value;

use crate::boost::{Boosting, Source};
use crate::cpus::{Awake, Cores, pin};
use crate::crowd::{Echo, Idle};
use crate::daemon::Daemon;
use crate::experiment::stats::percentile;
use crate::experiment::verdict::{Check, Wanted};
use crate::experiment::{Better, Cell, Experiment, Measure, Results, Values, measure};
use crate::host::ip;
use crate::link::Link;
use crate::process::{CpuUse, Process, die_cleanly_on_signals};
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

const ECHO: &str = "echo";
const SHARE: &str = "share of the core";
/// Against an equal share, of what all had, in a window of a second.
const LOSS: &str = "loss in a second";
const MEASURES: [Measure; 3] = [
    measure(SHARE, "%", Better::Neither),
    measure(LOSS, "%", Better::Neither).with_tail(),
    measure(ECHO, "ms", Better::Neither).with_tail(),
];
/// The arm that echoes are of; the others are the VMs.
const WORKER: &str = "worker";

fn case(boosted: usize) -> String {
    format!("{boosted} VMs boosted all the time")
}

fn arm(vm: usize) -> String {
    format!("VM {vm}")
}

/// The measurements.
#[derive(Debug, Clone, Serialize)]
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
    let mut results = Results::open(&Experiment {
        name: "boosted",
        measures: &MEASURES,
        settings: serde_json::to_value(options)?,
        out: None,
    })?;
    for _ in 0..options.time.as_secs().div_ceil(VISIT.as_secs()) {
        for count in BOOSTED {
            boosting.select(if count == 0 { Source::None } else { Source::Always(count) })?;
            visit(&vms, &mut echo, &case(count), &mut results)?;
        }
    }
    boosting.select(Source::None)?;
    judge(&mut results);
    for (vm, account) in boosting.accounts().iter().enumerate() {
        println!("VM {vm}: {account:?}");
    }
    drop((boosting, vms));
    daemon.stop()?;
    results.finish()
}

/// Shares and echoes are as without boosts, or nearly.
fn judge(results: &mut Results) {
    let shares = |results: &Results, count| {
        let share = |vm| results.quantiles(&case(count), &arm(vm), SHARE).map_or(0.0, |q| q.mean);
        std::array::from_fn::<_, VMS, _>(share)
    };
    let tail = |results: &Results, count| {
        percentile(&results.values(&case(count), WORKER, ECHO), 990).unwrap_or_default()
    };
    let (without, echo) = (shares(results, BOOSTED[0]), tail(results, BOOSTED[0]));
    for &count in &BOOSTED[1..] {
        let shares = shares(results, count);
        let off = shares.iter().zip(without).map(|(is, was)| (is - was).abs()).fold(0.0, f64::max);
        let what = format!("{}: shares differ by, % of the core", case(count));
        results.check(Check::of(what, off, Wanted::AtMost(SHARE_MAX)));
        let what = format!("{}: one in a hundred echoes, ms", case(count));
        let most = Wanted::AtMost((ECHO_MAX.as_secs_f64() * 1e3).max(echo));
        results.check(Check::of(what, tail(results, count), most));
    }
}

/// Echoes for a while, and what the VMs have meanwhile.
fn visit(vms: &[Vm], echo: &mut Echo, case: &str, results: &mut Results) -> Result<()> {
    let used = || -> Result<Vec<Duration>> {
        vms.iter().map(|vm| Ok(CpuUse::of_thread(vm.thread)?.time)).collect()
    };
    let begin = Instant::now();
    let (mut before, mut window_at) = (used()?, begin);
    let mut due = begin;
    let mut note = |arm: &str, of: Vec<(&'static str, f64)>| {
        let round = results.values(case, arm, of[0].0).len();
        results.note(&Cell::new(case, arm), round, Values { of, ..Values::default() });
    };
    while begin.elapsed() < VISIT {
        due += INTERVAL;
        thread::sleep(due.saturating_duration_since(Instant::now())); // the point of it
        note(WORKER, vec![(ECHO, echo.once()?.as_secs_f64() * 1e3)]);
        if window_at.elapsed() < WINDOW {
            continue;
        }
        let (now, length) = (used()?, window_at.elapsed().as_secs_f64());
        window_at = Instant::now();
        let had = |vm: usize| now[vm].saturating_sub(before[vm]).as_secs_f64();
        let all: f64 = (0..VMS).map(had).sum();
        for vm in 0..VMS {
            let loss = 100.0 * (all / VMS as f64 - had(vm)) / length;
            note(&arm(vm), vec![(SHARE, 100.0 * had(vm) / all.max(1e-9)), (LOSS, loss)]);
        }
        before = now;
    }
    Ok(())
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
    use crate::experiment::verdict::Verdict;

    #[test]
    fn bst_06_shares_and_echoes_that_are_off_are_not_kept() {
        let kept = |shares: [f64; VMS], slow: f64| {
            let mut results = Results::of_nothing(&MEASURES);
            let mut note = |count, arm: &str, round, of| {
                let cell = Cell::new(case(count), arm);
                results.note(&cell, round, Values { of: vec![of], ..Values::default() });
            };
            for count in BOOSTED {
                let shares = if count == 1 { shares } else { [33.3; VMS] };
                (0..VMS).for_each(|vm| note(count, &arm(vm), 0, (SHARE, shares[vm])));
                let slow = if count == 0 { 0.3 } else { slow };
                for n in 1..=200 {
                    let ms = if n > 190 { slow } else { n as f64 / 1e3 };
                    note(count, WORKER, n, (ECHO, ms));
                }
            }
            judge(&mut results);
            results.checks().iter().all(|check| check.verdict == Verdict::Kept)
        };
        assert!(kept([33.3; VMS], 1.9));
        assert!(!kept([33.3; VMS], 2.1));
        assert!(!kept([36.6, 31.7, 31.7], 1.9));
        assert!(kept([34.3, 32.8, 32.8], 1.9));
    }
}
