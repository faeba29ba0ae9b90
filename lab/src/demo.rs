//! `make demo`: three real guests on one core; uploads into one of them and downloads from it, over
//! several paths, interleaved; and transfers both ways at once.

mod case;
mod checks;
mod measures;
mod page;
mod paths;
mod requests;
mod rounds;
mod short;
mod sizes;
mod troubles;

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};
use serde::Serialize;
use serde_json::{Value, json};

use crate::accel::Accel;
use crate::boost::{Boosting, Source};
use crate::cpus::{Awake, Cores};
use crate::download::{both, download};
use crate::experiment::verdict::Check;
use crate::experiment::{Experiment, Results};
use crate::flood::{Complaints, Flood};
use crate::image::{Image, NO_NP_FLOOD};
use crate::link::Link;
use crate::passt::Passt;
use crate::placement::{HostCore, Placement, move_to_guests};
use crate::process::{self, CpuUse};
use crate::progress::Progress;
use crate::rundir::RunDir;
use crate::sched::{Competition, Layout, Scheduler};
use crate::transfer::{Outcome, Upload};
use crate::world::{Net, World, address, guest_name};

use case::{Case, Kit, run_case};
use measures::MEASURES;
pub use measures::Terms;
pub(crate) use measures::{ACKED, ANSWER, BACK_END_CPU, DELIVERED, VMM_CPU, size};
use page::Shown;
pub use paths::{Direction, NetPath};
use rounds::BOTH_BYTES;
pub(crate) use rounds::GOLDEN;
use sizes::{SIZES, sizes};
use troubles::{GuestShare, GuestTcp};

/// The guest at the other end of all transfers.
pub(crate) const RECEIVER: u8 = 0;

/// Sizes that are captured for the trace checker.
const TRACED: [usize; 3] = [10_000, 100_000, 1_000_000];

/// No transfer takes this long unless something is broken.
const TRANSFER_LIMIT: Duration = Duration::from_secs(60);
/// Between two transfers at least: the work of the last one is done by then.
const PAUSE_MIN: Duration = Duration::from_millis(30);
/// Moments to start at are spread over so long where the guests' cycle has no fixed length.
const CYCLE: Duration = Duration::from_millis(90);

/// The measurements.
#[derive(Debug, Clone, Serialize)]
pub struct Options {
    /// One case after the other.
    pub cases: Vec<Terms>,
    /// The cgroups in which the guests compete.
    pub layout: Layout,
    /// Transfers for each path and size, at most.
    pub transfers: usize,
    /// Time for the transfers of one case; every cell gets at least one.
    pub time: Duration,
    /// Sizes of the transfers, bytes; `None`: 10 KB to 10 MB, and without competition 50 MB.
    pub sizes: Option<Vec<usize>>,
    /// The directions: one after the other, each for its share of the time.
    pub directions: Vec<Direction>,
    /// The paths of uploads, in table order.
    pub paths: Vec<NetPath>,
    /// The paths of downloads.
    pub down_paths: Vec<NetPath>,
    /// Requests and answers on an open connection over each path of uploads; 0: none.
    pub requests: usize,
    /// `vm.boost` of the guest at the other end, for paths that have it.
    pub boost: String,
    /// Buffers in the guests' receive rings; `None`: the VMM's default.
    pub rx_ring: Option<u16>,
    /// Downloads of more than 1 MB too.
    pub full: bool,
    /// `make demo` alone: its cases, paths, sizes and times hold, whatever stands here.
    pub is_short: bool,
    /// `None` probes.
    pub accel: Option<Accel>,
    /// Seed of payloads, moments and the order within a round.
    pub seed: u64,
}

/// Runs the cases, prints their tables and writes `target/demo/result.json`; whether all of them
/// showed what they had to.
///
/// # Errors
/// Whatever kept it from finishing.
pub fn run(options: &Options) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    let options = &if options.is_short { options.clone().short() } else { options.clone() };
    if options.is_short {
        short::warn_if_busy();
    }
    let cores = Cores::plan()?;
    let Run { mut results, cases, machine } = measure("demo", options, &cores)?;
    let checks: Vec<Check> = cases.iter().flat_map(|case| case.checks(&results)).collect();
    checks.into_iter().for_each(|check| results.check(check));
    if options.is_short {
        let shown = |case| Case::shown(case, &results, &machine);
        let shown: Vec<Shown<'_>> = cases.iter().map(shown).collect();
        let is_sound = short::finish(&shown)?;
        drop(shown);
        results.save()?;
        return Ok(is_sound);
    }
    println!("{LEGEND}");
    cases.iter().for_each(|case| println!("{}", case.told));
    results.finish()
}

/// The cases that were measured.
pub(crate) struct Run {
    pub(crate) results: Results,
    cases: Vec<Case>,
    /// How QEMU ran the guests, and on how many cores.
    machine: String,
}

/// The result of the experiment of this name.
pub(crate) const fn result(name: &'static str) -> Experiment {
    Experiment { name, measures: &MEASURES, settings: Value::Null, out: None }
}

/// These are results for the same options.
pub(crate) fn is_of(results: &Results, options: &Options) -> bool {
    results.settings()["options"] == json!(options)
}

/// Measures the cases, for the experiment of this name.
///
/// # Errors
/// Whatever kept it from finishing.
pub(crate) fn measure(name: &'static str, options: &Options, cores: &Cores) -> Result<Run> {
    let mut progress = Progress::start();
    cores.leave_contended()?;
    let _awake = Awake::hold();
    progress.step("preparing the guests' kernel and initramfs");
    let image = Image::for_qemu()?;
    let mut options = options.clone();
    if !image.np_flood && options.down_paths.contains(&NetPath::FloodBpf) {
        options.down_paths.retain(|&path| path != NetPath::FloodBpf);
        eprintln!("no downloads over {}: {NO_NP_FLOOD}", NetPath::FloodBpf);
    }
    let passt = find_passt(&mut options, &mut progress);
    let options = &options;
    progress.step("seeing whether KVM works here");
    let accel = Accel::or_probe(options.accel, &image)?;
    if options.is_short {
        progress.expect(options.about());
    }
    let settings = json!({ "options": options, "accel": accel });
    let mut results = Results::open(&Experiment { settings, ..result(name) })?;
    let mut cases = Vec::new();
    for &case in &options.cases {
        // A thread of its own, because a world takes its thread into its network namespace.
        let (image, progress) = (&image, &mut progress);
        let (options, results) = (&options.of_case(case.scheduler), &mut results);
        let case = thread::scope(|scope| {
            let kit = Kit { image, passt: passt.as_ref(), accel };
            let inside =
                scope.spawn(move || run_case(case, options, cores, kit, (progress, results)));
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        cases.push(case);
    }
    progress.clear();
    let machine = format!("{accel} on {} cores", cores.others.len() + 1);
    Ok(Run { results, cases, machine })
}

const LEGEND: &str = "
  connect    the sender calls connect() ... it returns
  acked      connect() has returned ... everything written is acknowledged: the sender is done;
             down: the remote's application has read everything
  delivered  the sender calls connect() ... the receiver's application has read everything
  answer     when a request was due ... its answer is there
";

/// passt, if a path asks for it. Where it cannot be had, its paths are left out.
fn find_passt(options: &mut Options, progress: &mut Progress) -> Option<Passt> {
    if !all_paths(options).any(NetPath::is_passt) {
        return None;
    }
    progress.step("fetching and building passt");
    match Passt::build() {
        Ok(passt) => Some(passt),
        Err(why) => {
            eprintln!("NOT MEASURED: passt, which cannot be had here: {why:#}");
            options.paths.retain(|path| !path.is_passt());
            options.down_paths.retain(|path| !path.is_passt());
            None
        }
    }
}

/// A case's world and the results about it.
pub(crate) struct Lab {
    pub(crate) world: World,
    scheduler: Scheduler,
    placement: Placement,
    /// Moments of the guests' cycle are counted from here.
    origin: Instant,
    loops_per_ms: u64,
    offload: Option<bool>,
    congestion_offload: bool,
    /// The daemon answers SYNs for the guest; `None`: it was never to.
    accepts: Option<bool>,
    flood: Option<Flood>,
    /// The guest's interrupts when they were last told.
    interrupts: u64,
    /// The complaints when they were last noted.
    complaints: Complaints,
    boosting: Option<Boosting>,
    boost_refused: Option<String>,
    /// The path that is selected, and the guests' clocks since then.
    selected: Option<(NetPath, Clock)>,
    /// The time that each guest's vCPU had, by path.
    vcpu_times: BTreeMap<NetPath, Vec<Duration>>,
}

impl Lab {
    pub(crate) fn new(world: World, scheduler: Scheduler, placement: Placement) -> Self {
        let origin = Instant::now();
        Self {
            world,
            scheduler,
            placement,
            origin,
            loops_per_ms: 0,
            offload: None,
            congestion_offload: false,
            accepts: None,
            flood: None,
            interrupts: 0,
            complaints: Complaints::default(),
            boosting: None,
            boost_refused: None,
            selected: None,
            vcpu_times: BTreeMap::new(),
        }
    }

    /// The same, of guests that have begun to compete, with their loads.
    pub(crate) fn compete(
        world: World,
        terms: Terms,
        cores: &Cores,
        run_dir: &RunDir,
    ) -> Result<(Self, Competition)> {
        let mut lab = Self::new(world, terms.scheduler, terms.placement);
        lab.warm_up()?;
        let how = (terms.scheduler, Layout::Session);
        let competition = Competition::start(how, cores, &lab.world.guests, run_dir)?;
        lab.place_host(cores)?;
        lab.start_load()?;
        Ok((lab, competition))
    }

    /// Lets every path carry data once (caches, translated code), then finds out how fast a vCPU
    /// is while the others are idle.
    pub(crate) fn warm_up(&mut self) -> Result<()> {
        let mut paths = vec![NetPath::Tap];
        if self.world.daemon.is_some() {
            paths.extend([NetPath::Off, NetPath::AckOffload]);
        }
        for path in paths {
            for bytes in [SIZES[0], SIZES[2], SIZES[3]] {
                self.select(path)?;
                let outcome = self.send(path, &Upload::new(bytes, 0));
                let outcome = outcome.with_context(|| format!("first transfer over {path}"))?;
                if !outcome.hash_ok {
                    bail!("the first transfer over {path} arrived damaged");
                }
                self.interrupts = outcome.guest_interrupts;
            }
        }
        match self.world.guests[usize::from(RECEIVER)].call(&Command::Calibrate)? {
            Reply::Calibrated { loops_per_ms } => self.loops_per_ms = loops_per_ms,
            other => bail!("calibrate was answered with {other:?}"),
        }
        Ok(())
    }

    /// The same for uploads over passt, the attached tap and with accept offload, which begins a
    /// minute after it was turned on, and for downloads.
    fn warm_up_more(&mut self, options: &Options) -> Result<()> {
        let more = |path: &&NetPath| {
            path.is_passt() || [NetPath::Attached, NetPath::AcceptOffload].contains(path)
        };
        for &path in options.paths.iter().filter(more) {
            for bytes in [SIZES[0], SIZES[2], SIZES[3]] {
                self.select(path)?;
                let outcome = self.send(path, &Upload::new(bytes, 0));
                let outcome = outcome.with_context(|| format!("first transfer over {path}"))?;
                ensure!(outcome.hash_ok, "the first transfer over {path} arrived damaged");
                self.interrupts = outcome.guest_interrupts;
            }
        }
        self.warm_up_downloads(options)
    }

    /// The same for downloads. The guest makes its data.
    fn warm_up_downloads(&mut self, options: &Options) -> Result<()> {
        if !options.directions.contains(&Direction::Down) {
            return Ok(());
        }
        let sizes = sizes(Direction::Down, self.scheduler, options);
        let both_paths = options.both_paths();
        for &path in &options.down_paths {
            self.select(path)?;
            for &bytes in &sizes {
                let outcome = self.fetch(path, bytes, u64::MAX);
                let outcome = outcome.with_context(|| format!("first download over {path}"))?;
                ensure!(outcome.hash_ok, "the first download over {path} arrived damaged");
            }
            if both_paths.contains(&path) {
                let (guest, limit) = (receiver(path), TRANSFER_LIMIT);
                let first = self.world.remote().enter(|| both(guest, BOTH_BYTES, 0, limit));
                first.with_context(|| format!("first transfer both ways over {path}"))?;
            }
        }
        Ok(())
    }

    pub(crate) fn start_load(&mut self) -> Result<()> {
        if !self.scheduler.has_load() {
            return Ok(());
        }
        let (loops_per_ms, percent) = (self.loops_per_ms, self.placement.load_percent);
        for guest in &mut self.world.guests {
            guest.call(&Command::LoadStart { loops_per_ms, percent })?;
        }
        Ok(())
    }

    /// Moves the host's side to the guests' core, if it is to be there.
    fn place_host(&self, cores: &Cores) -> Result<()> {
        if self.placement.host == HostCore::Own {
            return Ok(());
        }
        for guest in &self.world.guests {
            move_to_guests(guest.pid(), &guest.vcpu_threads()?, self.scheduler, cores)?;
        }
        for pid in self.world.back_ends() {
            move_to_guests(pid, &[], self.scheduler, cores)?;
        }
        Ok(())
    }

    /// The booster, for the guest at the other end.
    fn start_boosting(&mut self, link: Link, logs: &Path) -> Result<()> {
        let dir = self.world.daemon()?.dir().to_owned();
        let tap = format!("tap{RECEIVER}");
        let mut boosting = Boosting::start(&dir, &logs.join("boost.log"), &tap, link)?;
        self.boost_refused = boosting.wait_judged(1)?;
        self.boosting = Some(boosting);
        Ok(())
    }

    /// Each guest's share of the core since `before`.
    fn guest_shares(&mut self, before: &Clock) -> Result<Vec<GuestShare>> {
        let now = self.clock()?;
        let elapsed = now.at.duration_since(before.at).as_secs_f64();
        let loaded = self.scheduler.has_load();
        let mut shares = Vec::new();
        for (index, guest) in self.world.guests.iter_mut().enumerate() {
            let (was, is) = (before.vcpu[index], now.vcpu[index]);
            let used = is.time.saturating_sub(was.time).as_secs_f64();
            let load_done_percent = match loaded {
                false => 0,
                true => match guest.call(&Command::LoadStatus)? {
                    Reply::Load { done_ms, elapsed_ms, .. } => done_ms * 100 / elapsed_ms.max(1),
                    other => bail!("load status was answered with {other:?}"),
                },
            };
            let cpu_percent = (used / elapsed * 100.0).round();
            let switches_per_s = ((is.switches - was.switches) as f64 / elapsed).round();
            shares.push(GuestShare { cpu_percent, switches_per_s, load_done_percent });
        }
        Ok(shares)
    }

    /// The counters of the guest's TCP so far.
    fn guest_tcp(&mut self) -> Result<GuestTcp> {
        let guest = &mut self.world.guests[usize::from(RECEIVER)];
        let names = ["TCPTimeouts", "TCPLossProbes", "TCPLossProbeRecovery"];
        let [timeouts, loss_probes, losses_probed] = guest.counted(names)?;
        Ok(GuestTcp { timeouts, loss_probes, losses_probed })
    }

    fn clock(&self) -> Result<Clock> {
        let vcpu = self.world.guests.iter().map(|guest| Ok(guest.cpu_use()?.0));
        Ok(Clock { vcpu: vcpu.collect::<Result<_>>()?, at: Instant::now() })
    }

    /// How long it takes until all guests have had their turn, or what is taken for it.
    pub(crate) fn cycle(&self) -> Duration {
        self.scheduler.cycle(self.placement.guests).unwrap_or(CYCLE)
    }

    /// Waits for the next time this moment of the cycle comes, after a pause.
    pub(crate) fn wait_for(&self, phase: Duration) {
        let least = self.origin.elapsed() + PAUSE_MIN;
        let cycle = self.cycle();
        let cycles = least.saturating_sub(phase).div_duration_f64(cycle).ceil();
        let at = self.origin + phase + cycle.mul_f64(cycles);
        thread::sleep(at.saturating_duration_since(Instant::now())); // the point of it
    }

    /// Captures one more upload of each size while the guests compete, after all measurements,
    /// because captures cost time, and has the trace checker judge them. Returns what was checked.
    fn check_traces(
        &mut self,
        paths: &[NetPath],
        dir: &Path,
        progress: &mut Progress,
    ) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        if !paths.is_empty() {
            progress.step("checking both sides' captures of one more upload of each size");
        }
        // The checker does not know two numberings of one connection.
        let checked = |path: &&NetPath| path.is_nightporter() && **path != NetPath::AcceptOffload;
        for &path in paths.iter().filter(checked) {
            self.select(path)?;
            let captures = self.world.capture(RECEIVER, net_of(path), dir)?;
            for bytes in TRACED {
                let outcome = self.send(path, &Upload::new(bytes, bytes as u64))?;
                ensure!(outcome.hash_ok, "a captured upload over {path} arrived damaged");
            }
            let report =
                captures.check(self.world.daemon()?, [path != NetPath::Off, false], None)?;
            ensure!(report.flows == TRACED.len() as u64, "connections are missing: {report}");
            lines.push(format!("Captures, {path}: {report}"));
        }
        Ok(lines)
    }

    /// Turns the offloads on or off, the guest's flood and boost, as the path needs it.
    pub(crate) fn select(&mut self, path: NetPath) -> Result<()> {
        if let Some(boosting) = &mut self.boosting {
            boosting.select(match path {
                NetPath::TapBoost => Source::Tap,
                path if path.is_boosted() => Source::Daemon,
                _ => Source::None,
            })?;
        }
        self.note_vcpu_times(path)?;
        let path = path.unboosted();
        let flood = match path {
            NetPath::FloodRoute => Some(Flood::Route),
            NetPath::FloodBpf => Some(Flood::Bpf),
            _ => None,
        };
        let guest = guest_name(RECEIVER);
        let ours = path.is_nightporter() && path != NetPath::Attached; // which is always on
        if ours && self.offload != Some(path != NetPath::Off) {
            self.world.daemon()?.set_offload(&guest, path != NetPath::Off)?;
            self.offload = Some(path != NetPath::Off);
        }
        if ours && self.congestion_offload != flood.is_some() {
            self.world.daemon()?.set_congestion_offload(&guest, flood.is_some())?;
            self.congestion_offload = flood.is_some();
        }
        let accepts = path == NetPath::AcceptOffload;
        if ours && (accepts || self.accepts.is_some()) && self.accepts != Some(accepts) {
            self.world.daemon()?.set_accepts(&guest, accepts)?;
            self.accepts = Some(accepts);
        }
        if self.flood != flood {
            self.world.guests[usize::from(RECEIVER)].flood(flood)?;
            self.flood = flood;
        }
        Ok(())
    }

    /// The guests' times until now are of the path that was selected before.
    fn note_vcpu_times(&mut self, path: NetPath) -> Result<()> {
        let now = self.clock()?;
        if let Some((before, clock)) = &self.selected {
            let times = self.vcpu_times.entry(*before).or_default();
            times.resize(now.vcpu.len(), Duration::ZERO);
            for (time, (was, is)) in times.iter_mut().zip(clock.vcpu.iter().zip(&now.vcpu)) {
                *time += is.time.saturating_sub(was.time);
            }
        }
        self.selected = Some((path, now));
        Ok(())
    }

    fn forget_vcpu_times(&mut self) {
        self.selected = None;
        self.vcpu_times.clear();
    }

    /// The guests' shares of the time that they had together, in percent, by path; where paths with
    /// boost were measured, including the time until everything was paid back.
    fn cpu_shares(&self) -> BTreeMap<&'static str, Vec<f64>> {
        let share = |times: &Vec<Duration>| {
            let all: Duration = times.iter().sum();
            let of = |time: &Duration| time.as_secs_f64() / all.as_secs_f64().max(1e-9);
            times.iter().map(|time| (of(time) * 1000.0).round() / 10.0).collect()
        };
        self.vcpu_times.iter().map(|(path, times)| (path.name(), share(times))).collect()
    }

    pub(crate) fn send(&self, path: NetPath, upload: &Upload) -> Result<Outcome> {
        self.world.remote().enter(|| upload.send(receiver(path), TRANSFER_LIMIT))
    }

    pub(crate) fn fetch(&self, path: NetPath, bytes: usize, seed: u64) -> Result<Outcome> {
        let (from, limit) = (receiver(path), TRANSFER_LIMIT);
        self.world.remote().enter(|| download(from, bytes, seed, limit))
    }
}

/// The receiving guest's address on a path.
pub(crate) fn receiver(path: NetPath) -> std::net::Ipv4Addr {
    address(RECEIVER, net_of(path))
}

/// The NIC of a path.
fn net_of(path: NetPath) -> Net {
    match path.unboosted() {
        NetPath::Tap => Net::Tap,
        NetPath::Passt => Net::Passt,
        NetPath::PasstTuned => Net::PasstTuned,
        NetPath::Attached => Net::Attached,
        _ => Net::Nightporter,
    }
}

/// The paths of all directions.
fn all_paths(options: &Options) -> impl Iterator<Item = NetPath> {
    options.paths.iter().chain(&options.down_paths).copied()
}

/// A moment, and the core time of each guest's vCPU by then.
struct Clock {
    at: Instant,
    vcpu: Vec<CpuUse>,
}
