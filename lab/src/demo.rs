//! `make demo`: three real guests on one core, three paths into one of them, interleaved.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};
use nightporter_guest::data::splitmix64;

use crate::accel::Accel;
use crate::cpus::Cores;
use crate::image::{Image, log_dir, source_root};
use crate::process;
use crate::progress::Progress;
use crate::report::{Cell, GuestShare, Path3, Report, Row, checks};
use crate::rundir::RunDir;
use crate::sched::{Competition, Scheduler};
use crate::transfer::{Outcome, Upload};
use crate::vmm::{Guest, Places, Vmm};
use crate::world::{Net, World, address, guest_name};

/// Guests on the contended core, as in the papers' experiments.
const GUESTS: usize = 3;
/// The guest that receives.
const RECEIVER: u8 = 0;

const SIZES: [usize; 3] = [10_000, 100_000, 1_000_000];
const BULK: usize = 50_000_000;
/// Repetitions of the bulk row.
const BULK_ROUNDS: usize = 7;

/// Until then a run goes on beyond its least number of transfers: medians of more are steadier.
const EXTRA_ROUNDS_LIMIT: Duration = Duration::from_secs(120);
/// No transfer takes this long unless something is broken.
const TRANSFER_LIMIT: Duration = Duration::from_secs(60);
/// Transfers start at a random moment of the guests' scheduling cycle (3 x 30 ms, or the quota's
/// 100 ms). Starting on the heels of the last one would find the guest on its core every time.
const PAUSE_MIN_US: u64 = 30_000;
const PAUSE_MAX_US: u64 = 150_000;
/// Failed transfers after which a run is given up.
const FAILURES_MAX: usize = 10;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// How the guests compete.
    pub scheduler: Scheduler,
    /// Transfers for each path and size, at least; twice that if there is time.
    pub transfers: usize,
    /// The paths, in table order.
    pub paths: Vec<Path3>,
    /// `None` probes.
    pub accel: Option<Accel>,
    /// Seed of payloads, pauses and the order within a round.
    pub seed: u64,
}

/// Runs the demo; prints the table and writes `target/demo/result.json`.
///
/// # Errors
/// Whatever kept it from finishing. A promise not kept is no error: the table says it.
pub fn run(options: &Options) -> Result<()> {
    let run_dir = RunDir::create()?;
    process::die_cleanly_on_signals()?;
    let mut progress = Progress::start();
    let cores = Cores::plan()?;
    cores.leave_contended()?;
    progress.step("preparing the guests' kernel and initramfs");
    let image = Image::for_qemu()?;
    let logs = log_dir("demo")?;
    let places = Places { sockets: run_dir.path(), logs: &logs };
    let accel = match options.accel {
        Some(accel) => accel,
        None => {
            progress.step("booting a guest to see whether KVM works here");
            Accel::probe(&image, places)?
        }
    };
    progress.step(&format!("booting three guests under QEMU with {accel}"));
    let with_daemon = options.paths.iter().any(|&path| path != Path3::Tap);
    let world = World::start(&[(Vmm::Qemu(accel), &image); GUESTS], with_daemon, places)?;
    let mut lab = Lab { world, loops_per_ms: 0, offload: None };
    progress.step("warming up, calibrating the guests' load");
    lab.warm_up()?;
    let competition = Competition::start(options.scheduler, &cores, &lab.world.guests, &run_dir)?;
    lab.start_load(options.scheduler)?;
    let before = lab.clock()?;
    let cells = lab.measure(options, &mut progress)?;
    let report = Report {
        scheduler: options.scheduler,
        accel,
        host_kernel: host_kernel()?,
        cores: cores.others.len() + 1,
        guests: lab.guest_shares(&before, options.scheduler)?,
        checks: Vec::new(),
        rows: cells.iter().filter_map(Row::of).collect(),
    };
    let report = Report { checks: checks(options.scheduler, &report.rows), ..report };
    progress.step("checking both sides' captures of one more upload of each size");
    let traces = lab.check_traces(&options.paths, &logs);
    progress.step("cleaning up");
    lab.world.stop()?;
    drop(competition);
    drop(run_dir);
    let path = source_root().join("target/demo/result.json");
    report.write_json(&path)?;
    for failure in cells.iter().flat_map(|c| &c.failures) {
        eprintln!("failed transfer: {failure}");
    }
    println!("{}\nAll of it: {}", report.table(), path.display());
    for line in traces.context("the trace checker")? {
        println!("{line}");
    }
    Ok(())
}

fn host_kernel() -> Result<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("kernel version")?;
    Ok(release.trim().to_owned())
}

/// The demo's world and what it has found out about it.
struct Lab {
    world: World,
    loops_per_ms: u64,
    offload: Option<bool>,
}

impl Lab {
    /// Lets every path carry data once (caches, translated code), then finds out how fast a vCPU
    /// is while the others are idle.
    fn warm_up(&mut self) -> Result<()> {
        let mut paths = vec![Path3::Tap];
        if self.world.daemon.is_some() {
            paths.extend([Path3::Off, Path3::AckOffload]);
        }
        for path in paths {
            for bytes in [SIZES[0], SIZES[2], SIZES[2]] {
                self.select(path)?;
                let outcome = self.send(path, &Upload::new(bytes, 0));
                let outcome = outcome.with_context(|| format!("first transfer over {path}"))?;
                if !outcome.hash_ok {
                    bail!("the first transfer over {path} arrived damaged");
                }
            }
        }
        match self.world.guests[usize::from(RECEIVER)].call(&Command::Calibrate)? {
            Reply::Calibrated { loops_per_ms } => self.loops_per_ms = loops_per_ms,
            other => bail!("calibrate was answered with {other:?}"),
        }
        Ok(())
    }

    fn start_load(&mut self, scheduler: Scheduler) -> Result<()> {
        let Some(percent) = scheduler.load_percent() else { return Ok(()) };
        for guest in &mut self.world.guests {
            guest.call(&Command::LoadStart { loops_per_ms: self.loops_per_ms, percent })?;
        }
        Ok(())
    }

    /// What each guest got of the core since `before`.
    fn guest_shares(&mut self, before: &Clock, scheduler: Scheduler) -> Result<Vec<GuestShare>> {
        let now = self.clock()?;
        let elapsed = now.at.duration_since(before.at).as_secs_f64();
        let mut shares = Vec::new();
        for (index, guest) in self.world.guests.iter_mut().enumerate() {
            let used = now.vcpu[index].saturating_sub(before.vcpu[index]).as_secs_f64();
            let load_done_percent = match scheduler.load_percent() {
                None => 0,
                Some(_) => match guest.call(&Command::LoadStatus)? {
                    Reply::Load { done_ms, elapsed_ms, .. } => done_ms * 100 / elapsed_ms.max(1),
                    other => bail!("load status was answered with {other:?}"),
                },
            };
            let cpu_percent = (used / elapsed * 100.0).round();
            shares.push(GuestShare { cpu_percent, load_done_percent });
        }
        Ok(shares)
    }

    fn clock(&self) -> Result<Clock> {
        let vcpu = self.world.guests.iter().map(Guest::vcpu_time).collect::<Result<_>>()?;
        Ok(Clock { at: Instant::now(), vcpu })
    }

    fn measure(&mut self, options: &Options, progress: &mut Progress) -> Result<Vec<Cell>> {
        let mut random = options.seed;
        let rounds = options.transfers..=2 * options.transfers;
        let mut cells = self.rounds(rounds, &SIZES, options, &mut random, progress)?;
        if options.scheduler == Scheduler::Idle {
            let bulk = BULK_ROUNDS..=BULK_ROUNDS;
            cells.extend(self.rounds(bulk, &[BULK], options, &mut random, progress)?);
        }
        Ok(cells)
    }

    /// Rounds of one transfer for each path and size in random order: at least the lower number,
    /// then more, up to the upper one, as long as the time for it lasts.
    fn rounds(
        &mut self,
        rounds: RangeInclusive<usize>,
        sizes: &[usize],
        options: &Options,
        random: &mut u64,
        progress: &mut Progress,
    ) -> Result<Vec<Cell>> {
        let start = Instant::now();
        let mut cells: Vec<Cell> = sizes
            .iter()
            .flat_map(|&bytes| options.paths.iter().map(move |&path| new_cell(path, bytes)))
            .collect();
        let total = rounds.end() * cells.len();
        let mut failed = 0;
        for round in 0..*rounds.end() {
            if round >= *rounds.start() && start.elapsed() > EXTRA_ROUNDS_LIMIT {
                break;
            }
            for (position, index) in shuffled(cells.len(), random).into_iter().enumerate() {
                let cell = &mut cells[index];
                let text = format!("{} bytes over {}", cell.bytes, cell.path);
                progress.update(round * sizes.len() * options.paths.len() + position, total, &text);
                failed += usize::from(!self.one(cell, random)?);
                if failed > FAILURES_MAX {
                    bail!("too many failed transfers: {:?}", cells[index].failures);
                }
            }
        }
        Ok(cells)
    }

    /// One transfer at a random moment; whether it came through.
    fn one(&mut self, cell: &mut Cell, random: &mut u64) -> Result<bool> {
        let upload = Upload::new(cell.bytes, splitmix64(random));
        self.select(cell.path)?;
        thread::sleep(random_pause(random)); // the point of it: see PAUSE_MIN_US
        match self.send(cell.path, &upload) {
            Ok(outcome) => cell.outcomes.push(outcome),
            Err(error) => {
                if let Some(daemon) = &mut self.world.daemon {
                    daemon.check_alive()?;
                }
                cell.failures.push(format!("{}, {} bytes: {error:#}", cell.path, cell.bytes));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Captures one more upload of each size while the guests compete, after everything was
    /// measured because that costs time, and has the trace checker judge them. What it looked at.
    fn check_traces(&mut self, paths: &[Path3], dir: &Path) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        for &path in paths.iter().filter(|&&path| path != Path3::Tap) {
            self.select(path)?;
            let captures = self.world.capture(RECEIVER, dir)?;
            for bytes in SIZES {
                let outcome = self.send(path, &Upload::new(bytes, bytes as u64))?;
                ensure!(outcome.hash_ok, "a captured upload over {path} arrived damaged");
            }
            let report = captures.check(self.world.daemon()?, path == Path3::AckOffload)?;
            ensure!(report.flows == SIZES.len() as u64, "connections are missing: {report}");
            lines.push(format!("Captures, {path}: {report}"));
        }
        Ok(lines)
    }

    /// Turns the receiver's offload on or off as the path needs it.
    fn select(&mut self, path: Path3) -> Result<()> {
        let on = path == Path3::AckOffload;
        if path != Path3::Tap && self.offload != Some(on) {
            self.world.daemon()?.set_offload(&guest_name(RECEIVER), on)?;
            self.offload = Some(on);
        }
        Ok(())
    }

    fn send(&self, path: Path3, upload: &Upload) -> Result<Outcome> {
        let net = if path == Path3::Tap { Net::Tap } else { Net::Nightporter };
        self.world.remote().enter(|| upload.send(address(RECEIVER, net), TRANSFER_LIMIT))
    }
}

/// A moment, and what each guest's vCPU had used of its core by then.
struct Clock {
    at: Instant,
    vcpu: Vec<Duration>,
}

fn new_cell(path: Path3, bytes: usize) -> Cell {
    Cell { path, bytes, outcomes: Vec::new(), failures: Vec::new() }
}

fn random_pause(random: &mut u64) -> Duration {
    let span = PAUSE_MAX_US - PAUSE_MIN_US;
    Duration::from_micros(PAUSE_MIN_US + splitmix64(random) % span)
}

/// 0 … length-1 in random order (Fisher and Yates).
fn shuffled(length: usize, random: &mut u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..length).collect();
    for i in (1..length).rev() {
        let j = splitmix64(random) % (i as u64 + 1);
        order.swap(i, usize::try_from(j).expect("below length"));
    }
    order
}
