//! `make demo`: three real guests on one core, three paths into one of them, interleaved.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nightporter_guest::control::{Command, Reply};
use nightporter_guest::data::splitmix64;

use crate::accel::Accel;
use crate::cpus::Cores;
use crate::daemon::Daemon;
use crate::host::{self, Host, guest_nic};
use crate::image::{Image, cache_dir, source_root};
use crate::process;
use crate::progress::Progress;
use crate::report::{Cell, Path3, Report, Row, checks};
use crate::rundir::RunDir;
use crate::sched::{Competition, Scheduler};
use crate::transfer::{Outcome, Upload};
use crate::vmm::{Attach, Guest, Places, Spec, Vmm};

/// Guests on the contended core, as in the papers' experiments.
const GUESTS: u8 = 3;
/// The guest that receives.
const RECEIVER: usize = 0;
/// Memory per guest: the bulk row is kept in memory until it is hashed.
const GUEST_MEMORY_MIB: u32 = 192;
/// Subnet numbers of the two NICs.
const TAP_NET: u8 = 1;
const NIGHTPORTER_NET: u8 = 2;

const SIZES: [usize; 3] = [10_000, 100_000, 1_000_000];
const BULK: usize = 50_000_000;
/// Repetitions of the bulk row.
const BULK_ROUNDS: usize = 7;

/// A TCG guest boots in two seconds on an idle machine.
const BOOT_LIMIT: Duration = Duration::from_secs(60);
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
    /// Transfers for each path and size.
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
    process::die_cleanly_on_signals(run_dir.path())?;
    let mut progress = Progress::start();
    let cores = Cores::plan()?;
    cores.leave_contended()?;
    progress.step("preparing the guests' kernel and initramfs");
    let image = Image::prepare()?;
    let logs = cache_dir().join("log");
    fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
    let places = Places { sockets: run_dir.path(), logs: &logs };
    let accel = match options.accel {
        Some(accel) => accel,
        None => {
            progress.step("booting a guest to see whether KVM works here");
            Accel::probe(&image, places)?
        }
    };
    progress.step(&format!("booting three guests under QEMU with {accel}"));
    let mut lab = Lab::start(options, accel, &image, places)?;
    progress.step("warming up, calibrating the guests' load");
    lab.warm_up()?;
    let competition = Competition::start(options.scheduler, &cores, &lab.guests, &run_dir)?;
    lab.start_load(options.scheduler)?;
    let cells = lab.measure(options, &mut progress)?;
    let report = Report {
        scheduler: options.scheduler,
        accel,
        host_kernel: host_kernel()?,
        cores: cores.others.len() + 1,
        load_share_percent: lab.load_shares(options.scheduler)?,
        checks: Vec::new(),
        rows: cells.iter().filter_map(Row::of).collect(),
    };
    let report = Report { checks: checks(options.scheduler, &report.rows), ..report };
    progress.step("cleaning up");
    lab.stop()?;
    drop(competition);
    drop(run_dir);
    let path = source_root().join("target/demo/result.json");
    report.write_json(&path)?;
    for failure in cells.iter().flat_map(|c| &c.failures) {
        eprintln!("failed transfer: {failure}");
    }
    println!("{}\nAll of it: {}", report.table(), path.display());
    Ok(())
}

fn host_kernel() -> Result<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("kernel version")?;
    Ok(release.trim().to_owned())
}

/// Everything that runs.
struct Lab {
    guests: Vec<Guest>,
    daemon: Option<Daemon>,
    host: Host,
    loops_per_ms: u64,
    offload: Option<bool>,
}

impl Lab {
    fn start(options: &Options, accel: Accel, image: &Image, places: Places<'_>) -> Result<Self> {
        let host = Host::create(&[TAP_NET, NIGHTPORTER_NET])?;
        let with_daemon = options.paths.iter().any(|&p| p != Path3::Tap);
        let daemon = if with_daemon { Some(start_daemon(&host, places)?) } else { None };
        let mut guests = Vec::new();
        for index in 0..GUESTS {
            guests.push(start_guest(index, accel, &host, daemon.as_ref(), image, places)?);
        }
        for guest in &mut guests {
            guest.wait_ready(BOOT_LIMIT)?;
        }
        Ok(Self { guests, daemon, host, loops_per_ms: 0, offload: None })
    }

    /// Lets every path carry data once (caches, translated code), then finds out how fast a vCPU
    /// is while the others are idle.
    fn warm_up(&mut self) -> Result<()> {
        let mut paths = vec![Path3::Tap];
        if self.daemon.is_some() {
            paths.extend([Path3::Off, Path3::AckOffload]);
        }
        for path in paths {
            for bytes in [SIZES[0], SIZES[2], SIZES[2]] {
                let outcome = self.transfer(path, &Upload::new(bytes, 0));
                let outcome = outcome.with_context(|| format!("first transfer over {path}"))?;
                if !outcome.hash_ok {
                    bail!("the first transfer over {path} arrived damaged");
                }
            }
        }
        match self.guests[RECEIVER].call(&Command::Calibrate)? {
            Reply::Calibrated { loops_per_ms } => self.loops_per_ms = loops_per_ms,
            other => bail!("calibrate was answered with {other:?}"),
        }
        Ok(())
    }

    fn start_load(&mut self, scheduler: Scheduler) -> Result<()> {
        let Some(percent) = scheduler.load_percent() else { return Ok(()) };
        for guest in &mut self.guests {
            guest.call(&Command::LoadStart { loops_per_ms: self.loops_per_ms, percent })?;
        }
        Ok(())
    }

    /// How much of the core each guest's load got, percent.
    fn load_shares(&mut self, scheduler: Scheduler) -> Result<Vec<u64>> {
        if scheduler.load_percent().is_none() {
            return Ok(Vec::new());
        }
        let share = |guest: &mut Guest| match guest.call(&Command::LoadStatus)? {
            Reply::Load { done_ms, elapsed_ms, .. } => Ok(done_ms * 100 / elapsed_ms.max(1)),
            other => bail!("load status was answered with {other:?}"),
        };
        self.guests.iter_mut().map(share).collect()
    }

    fn measure(&mut self, options: &Options, progress: &mut Progress) -> Result<Vec<Cell>> {
        let mut plan = vec![(options.transfers, SIZES.to_vec())];
        if options.scheduler == Scheduler::Idle {
            plan.push((BULK_ROUNDS, vec![BULK]));
        }
        let total: usize =
            plan.iter().map(|(rounds, sizes)| rounds * sizes.len() * options.paths.len()).sum();
        let mut random = options.seed;
        let (mut done, mut failed) = (0, 0);
        let mut cells = Vec::new();
        for (rounds, sizes) in plan {
            let mut group: Vec<Cell> = sizes
                .iter()
                .flat_map(|&bytes| options.paths.iter().map(move |&path| new_cell(path, bytes)))
                .collect();
            for _ in 0..rounds {
                for index in shuffled(group.len(), &mut random) {
                    let cell = &mut group[index];
                    let text = format!("{} bytes over {}", cell.bytes, cell.path);
                    progress.update(done, total, &text);
                    failed += usize::from(!self.one(cell, &mut random)?);
                    done += 1;
                    if failed > FAILURES_MAX {
                        bail!("too many failed transfers: {:?}", group[index].failures);
                    }
                }
            }
            cells.append(&mut group);
        }
        Ok(cells)
    }

    /// One transfer at a random moment; whether it came through.
    fn one(&mut self, cell: &mut Cell, random: &mut u64) -> Result<bool> {
        let upload = Upload::new(cell.bytes, splitmix64(random));
        thread::sleep(random_pause(random)); // the point of it: see PAUSE_MIN_US
        match self.transfer(cell.path, &upload) {
            Ok(outcome) => cell.outcomes.push(outcome),
            Err(error) => {
                if let Some(daemon) = &mut self.daemon {
                    daemon.check_alive()?;
                }
                cell.failures.push(format!("{}, {} bytes: {error:#}", cell.path, cell.bytes));
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn transfer(&mut self, path: Path3, upload: &Upload) -> Result<Outcome> {
        let net = if path == Path3::Tap { TAP_NET } else { NIGHTPORTER_NET };
        if path != Path3::Tap {
            let daemon = self.daemon.as_mut().context("this path needs nightporterd")?;
            let on = path == Path3::AckOffload;
            if self.offload != Some(on) {
                daemon.set_offload(&guest_name(RECEIVER), on)?;
                self.offload = Some(on);
            }
        }
        let receiver = u8::try_from(RECEIVER).expect("three guests");
        let address = guest_nic(receiver, net).address;
        self.host.remote().enter(|| upload.send(address, TRANSFER_LIMIT))
    }

    fn stop(self) -> Result<()> {
        drop(self.guests);
        self.daemon.map_or(Ok(()), Daemon::stop)
    }
}

fn guest_name(index: usize) -> String {
    format!("guest{index}")
}

fn start_daemon(host: &Host, places: Places<'_>) -> Result<Daemon> {
    host.add_tap("uplink")?;
    let vms: Vec<_> = (0..GUESTS)
        .map(|index| (guest_name(usize::from(index)), guest_nic(index, NIGHTPORTER_NET)))
        .collect();
    Daemon::start("uplink", &vms, places.sockets, &places.logs.join("nightporterd.log"))
}

fn start_guest(
    index: u8,
    accel: Accel,
    host: &Host,
    daemon: Option<&Daemon>,
    image: &Image,
    places: Places<'_>,
) -> Result<Guest> {
    let name = guest_name(usize::from(index));
    let tap = format!("tap{index}");
    host.add_tap(&tap)?;
    let mut nics = vec![(guest_nic(index, TAP_NET), Attach::Tap(tap))];
    if let Some(daemon) = daemon {
        let socket: PathBuf = daemon.socket(&name);
        nics.push((guest_nic(index, NIGHTPORTER_NET), Attach::VhostUser(socket)));
    }
    nics.iter().try_for_each(|(nic, _)| host.remote().know(nic))?;
    let spec = Spec {
        name,
        vmm: Vmm::Qemu(accel),
        memory_mib: GUEST_MEMORY_MIB,
        nics,
        neighbours: host::remote_neighbours(&[TAP_NET, NIGHTPORTER_NET]),
    };
    Guest::start(&spec, image, places)
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
