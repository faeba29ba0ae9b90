//! The command line of the simulator.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use nightporter_check::trace::{self, Options};
use nightporter_check::weight::SEEDS_MIN;
use nightporter_sim::captures;
use nightporter_sim::figures;
use nightporter_sim::long;
use nightporter_sim::map;
use nightporter_sim::mutants::survey;
use nightporter_sim::plan::Plan;
use nightporter_sim::run::{Totals, explain, run_plan, run_seeds};
use nightporter_sim::shrink::shrink;

/// As `println!`, but for a reader that has left: `nightporter-sim plan 5 | head`.
macro_rules! say {
    ($($arg:tt)*) => { tell(&format!("{}\n", format_args!($($arg)*))) };
}

/// Plans tried for a smaller one: a minute's worth.
const SHRINK_RUNS_MAX: u32 = 2000;

/// Exit code of seeds that carried too little, or excused too much.
const TOO_LITTLE: u8 = 13;

/// Simulates a network in virtual time around the core of Nightporter; one seed decides everything.
///
/// Exit codes: 0 nothing found, 2 wrong usage, 10 crash, 11 safety, 12 liveness, 13 nothing found,
/// but the seeds carried too little or excused too much.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run many seeds, or one again, and check every invariant at every step.
    Run(RunArgs),
    /// Break a crate in ways that cargo-mutants lists, and print the tests and seeds that notice.
    Survey(SurveyArgs),
    /// Draw the figures of the vSnoop paper, and print our numbers beside those of the paper.
    Figures {
        /// The directory for the files.
        #[arg(long, default_value = "target/figures")]
        out: PathBuf,
        /// Runs at a time; by default, the number of processors.
        #[arg(long)]
        jobs: Option<usize>,
    },
    /// Compute how much sooner transfers are over, over size, round trip, scheduler and share of
    /// the core: a page and its pictures.
    Map {
        /// The directory for them.
        #[arg(long, default_value = "target/map")]
        out: PathBuf,
        /// A result of `nightporter-lab demo`, to put beside. May be repeated.
        #[arg(long)]
        lab: Vec<PathBuf>,
        /// Runs at a time; by default, the number of processors.
        #[arg(long)]
        jobs: Option<usize>,
    },
    /// Run seeds for hours. A run can be stopped; the next one goes on from there.
    Long {
        /// Number of seeds in all.
        #[arg(long, default_value_t = 200_000)]
        seeds: u64,
        /// Stop when this version has used so many hours of processor time.
        #[arg(long, default_value_t = 1_000_000.0)]
        cpu_hours: f64,
        /// The file that keeps the progress.
        ///
        /// It keeps the results of other versions apart; this version goes on with the next seed.
        #[arg(long, default_value = "target/sim/long.json")]
        state: PathBuf,
        /// Seeds at a time; by default, the number of processors.
        #[arg(long)]
        jobs: Option<usize>,
    },
    /// Check two captures of one run, taken with `nightporter capture` at the same time.
    CheckTrace(TraceArgs),
    /// Write captures of a seed's honest connections on both sides, with the offload and without.
    Captures {
        /// The seed.
        seed: u64,
        /// The directory for the four files.
        #[arg(long, default_value = "target/sim")]
        out: PathBuf,
    },
    /// Print which events met flows in which states, and which never did.
    Coverage {
        /// Number of seeds.
        #[arg(long, default_value_t = 2000)]
        seeds: u64,
        /// Seeds at a time; by default, the number of processors.
        #[arg(long)]
        jobs: Option<usize>,
    },
    /// Print the plan of a seed, as JSON.
    Plan {
        /// The seed.
        seed: u64,
    },
}

#[derive(clap::Args)]
struct SurveyArgs {
    /// The output of `cargo mutants --list --json`.
    #[arg(long)]
    list: PathBuf,
    /// A folder or file of one crate from which to draw, as core/src/switch; by default, the whole
    /// list. May be repeated.
    #[arg(long)]
    room: Vec<String>,
    /// Number of mutations to draw from each room.
    #[arg(long, default_value_t = 1000)]
    sample: usize,
    /// Seed of the draw.
    #[arg(long)]
    seed: u64,
    /// Seeds of the simulator to run until a mutation of core counts as not noticed; 0: tests only.
    #[arg(long, default_value_t = 500)]
    seeds: u64,
    /// Stop after so many seconds of judging; the next run goes on from there.
    #[arg(long, default_value_t = 1_000_000)]
    limit_s: u64,
    /// Programs at a time; by default, the number of processors.
    #[arg(long)]
    jobs: Option<usize>,
    /// The root of the repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
    /// The directory for the copy of the crate, its build and the state.
    #[arg(long, default_value = "target/survey")]
    dir: PathBuf,
}

#[derive(clap::Args)]
struct TraceArgs {
    /// The capture of the uplink.
    #[arg(long)]
    remote: PathBuf,
    /// The capture of the guest's port.
    #[arg(long)]
    guest: PathBuf,
    /// The guest's MAC. May be repeated for a simulated run, whose guests are all in one capture.
    #[arg(long, required = true, value_parser = mac)]
    guest_mac: Vec<[u8; 6]>,
    /// Ack offload was off all the time.
    #[arg(long)]
    offload_off: bool,
    /// The guests have congestion offload, so the host may have sent for them.
    #[arg(long)]
    sends: bool,
    /// Both captures are complete: frames of one after the last frame of the other count too.
    #[arg(long)]
    whole: bool,
    /// The guest's port is an attached tap: `NAME` and `NAME/net` were captured.
    #[arg(long)]
    attached: bool,
}

#[derive(clap::Args)]
struct RunArgs {
    /// Number of seeds.
    #[arg(long, default_value_t = 500)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Run this seed alone, and print everything about it.
    #[arg(long, conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// Run the plan of an earlier failure instead of a seed.
    #[arg(long, conflicts_with_all = ["seeds", "from", "seed"])]
    plan: Option<PathBuf>,
    /// Look for the smallest plan that fails in the same way as the one seed or plan.
    #[arg(long, conflicts_with_all = ["seeds", "from"])]
    shrink: bool,
    /// Turn the offload off in every guest: the run must then fail because it carries too little.
    #[arg(long, conflicts_with_all = ["seed", "plan"])]
    without_offload: bool,
    /// Seeds with a guest behind a tap of its own, whose daemon is away now and then (LIFE-17).
    #[arg(long, conflicts_with_all = ["plan", "without_offload"])]
    tap: bool,
    /// Seeds whose guests have accept offload.
    #[arg(long, conflicts_with_all = ["plan", "without_offload", "tap"])]
    accept: bool,
    /// Stop at the first failure: the lowest of the failed seeds that ran at that time.
    #[arg(long, conflicts_with_all = ["seed", "plan"])]
    first: bool,
    /// Seeds at a time; by default, the number of processors.
    #[arg(long, conflicts_with_all = ["seed", "plan"])]
    jobs: Option<usize>,
    /// The directory for plans and captures of failures.
    #[arg(long, default_value = "target/sim")]
    out: PathBuf,
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Run(args) => run(&args),
        Command::Survey(args) => survey(&args),
        Command::Figures { out, jobs: wanted } => {
            figures::draw(&figures::Effort::FULL, jobs(wanted), &out).map(|table| {
                say!("{table}\nfigures are in {}", out.display());
                ExitCode::SUCCESS
            })
        }
        Command::Map { out, lab, jobs: wanted } => {
            map::draw(map::Effort::FULL, jobs(wanted), &lab, &out).map(|()| {
                say!("the map is in {}", out.display());
                ExitCode::SUCCESS
            })
        }
        Command::Long { seeds, cpu_hours, state, jobs } => run_long(seeds, cpu_hours, &state, jobs),
        Command::CheckTrace(args) => check_trace(&args),
        Command::Coverage { seeds, jobs: wanted } => {
            say!("{}", run_seeds(0..seeds, Plan::from_seed, jobs(wanted), false).reach.table());
            Ok(ExitCode::SUCCESS)
        }
        Command::Captures { seed, out } => captures::write(seed, &out).map(|()| ExitCode::SUCCESS),
        Command::Plan { seed } => print_plan(seed),
    };
    result.unwrap_or_else(|error| {
        eprintln!("nightporter-sim: {error:#}");
        ExitCode::from(2)
    })
}

fn mac(text: &str) -> Result<[u8; 6], String> {
    let bytes: Option<Vec<u8>> =
        text.split(':').map(|part| u8::from_str_radix(part, 16).ok()).collect();
    let mac = bytes.and_then(|bytes| bytes.try_into().ok());
    mac.ok_or_else(|| "a MAC looks like 52:54:00:12:34:56".to_owned())
}

fn check_trace(args: &TraceArgs) -> anyhow::Result<ExitCode> {
    let open = |path: &Path| File::open(path).with_context(|| format!("open {}", path.display()));
    let guests = args.guest_mac.clone();
    let TraceArgs { sends, whole, attached, .. } = *args;
    let options = Options { guests, offload: !args.offload_off, sends, whole, attached };
    let report = trace::check(open(&args.remote)?, open(&args.guest)?, &options)?;
    report.findings.iter().for_each(|finding| say!("{finding}"));
    say!("{report}");
    Ok(ExitCode::from(if report.findings.is_empty() { 0 } else { 11 }))
}

fn print_plan(seed: u64) -> anyhow::Result<ExitCode> {
    say!("{}", serde_json::to_string_pretty(&Plan::from_seed(seed))?);
    Ok(ExitCode::SUCCESS)
}

fn read_plan(path: &Path) -> anyhow::Result<Plan> {
    let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let no_plan = || format!("{} is no plan", path.display());
    let plan: Plan = serde_json::from_slice(&bytes).with_context(no_plan)?;
    plan.check().map_err(anyhow::Error::msg).with_context(no_plan)?;
    Ok(plan)
}

fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let one = args.plan.is_some() || args.seed.is_some();
    anyhow::ensure!(one || !args.shrink, "--shrink goes with --seed or --plan");
    let plan_of = match (args.tap, args.accept, args.without_offload) {
        (true, ..) => Plan::with_tap,
        (_, true, _) => Plan::with_accept,
        (.., true) => Plan::without_offload,
        _ => Plan::from_seed,
    };
    let plan = match (&args.plan, args.seed) {
        (Some(path), _) => Some(read_plan(path)?),
        (None, seed) => seed.map(plan_of),
    };
    if let Some(plan) = plan {
        return run_one(&plan, args);
    }
    quiet_panics();
    let seeds = args.from..args.from.saturating_add(args.seeds);
    let totals = run_seeds(seeds, plan_of, jobs(args.jobs), args.first);
    let code = tell_failures(&totals, plan_of, if args.first { 0 } else { 3 }, &args.out)?;
    say!(
        "{} seeds, {} failed: {} frames, {} steps checked, {:.1} MB read and compared, \
         {} ends closed, {} reset, {:.0} s of virtual time; {:.1} ms a seed, slowest {:.0} ms \
         (seed {})",
        totals.seeds,
        totals.failures.len(),
        totals.frames,
        totals.steps,
        totals.bytes as f64 / 1e6,
        totals.closed,
        totals.reset,
        totals.virtual_ns as f64 / 1e9,
        totals.cpu_us as f64 / 1e3 / totals.seeds.max(1) as f64,
        totals.slowest_us as f64 / 1e3,
        totals.slowest,
    );
    say!("carried: {}", totals.weight);
    say!("excused: {}", totals.excuses);
    let faults: Vec<String> = totals.faults.iter().map(|(k, n)| format!("{k} {n}")).collect();
    say!("faults: {}", faults.join(", "));
    if code != 0 || args.tap {
        return Ok(ExitCode::from(code)); // behind a tap nobody counts
    }
    Ok(ExitCode::from(tell_too_little(&totals, args.first)))
}

/// Nothing was found, but was there anything to find? The exit code. A hunt for the `first` failure
/// asks for no more than work: the excuses of plans are the same whatever is wrong with core.
fn tell_too_little(totals: &Totals, first: bool) -> u8 {
    let mut missing = totals.weight.too_little(totals.seeds);
    if totals.seeds >= SEEDS_MIN && !first {
        missing.extend(totals.excuses.too_many());
    }
    missing.iter().for_each(|what| say!("{what}"));
    if missing.is_empty() { 0 } else { TOO_LITTLE }
}

/// Prints all failures, the first `whole` with all there is to tell. The exit code they ask for.
fn tell_failures(
    totals: &Totals,
    plan_of: fn(u64) -> Plan,
    whole: usize,
    out: &Path,
) -> anyhow::Result<u8> {
    let mut code = 0;
    for (n, &seed) in totals.failures.keys().enumerate() {
        let plan = plan_of(seed);
        let Err(failure) = run_plan(&plan) else {
            anyhow::bail!("seed {seed} fails only sometimes")
        };
        // A crash says more than a violation, and that more than a hang.
        let new = failure.exit_code();
        code = if code == 0 { new } else { new.min(code) };
        if n < whole {
            tell(&explain(&plan, &failure, out, &format!("seed-{seed}"))?);
        } else {
            say!("seed {seed}: {failure}");
        }
    }
    Ok(code)
}

fn run_long(
    seeds: u64,
    cpu_hours: f64,
    path: &Path,
    jobs_wanted: Option<usize>,
) -> anyhow::Result<ExitCode> {
    quiet_panics();
    // On a terminal the line is written over again and again.
    let end = if std::io::stderr().is_terminal() { "\x1b[K\r" } else { "\n" };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "hours")]
    let cpu_us_max = (cpu_hours * 3.6e9) as u64;
    let jobs = jobs(jobs_wanted);
    let state = long::run(path, seeds, cpu_us_max, jobs, |line| eprint!("{line}{end}"))?;
    say!("{}", long::table(&state));
    let (totals, out) = (state.totals, path.parent().unwrap_or(Path::new(".")));
    let code = tell_failures(&totals, Plan::from_seed, 3, out)?;
    Ok(ExitCode::from(if code == 0 { tell_too_little(&totals, false) } else { code }))
}

fn run_one(plan: &Plan, args: &RunArgs) -> anyhow::Result<ExitCode> {
    match run_plan(plan) {
        Ok(end) => {
            say!(
                "nothing found; {} frames, {} bytes read, ended at {}, trace {:016x}",
                end.frames,
                end.bytes,
                end.at,
                end.trace_hash
            );
            say!("carried: {}", end.weight);
            for e in &end.ends {
                say!("  {e:?}");
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(failure) => {
            let name = args.plan.as_deref().and_then(Path::file_stem).and_then(|n| n.to_str());
            let name = name.map_or_else(|| format!("seed-{}", plan.seed), str::to_owned);
            tell(&explain(plan, &failure, &args.out, &name)?);
            let code = ExitCode::from(failure.exit_code());
            if args.shrink {
                quiet_panics();
                let small = shrink(plan, failure, SHRINK_RUNS_MAX);
                say!(
                    "after {} runs: {} faults, {} connections, {} guests, {} remotes left",
                    small.runs,
                    small.plan.faults.len(),
                    small.plan.conns.len(),
                    small.plan.guests.len(),
                    small.plan.remotes.len()
                );
                let name = format!("{name}-small");
                tell(&explain(&small.plan, &small.failure, &args.out, &name)?);
            }
            Ok(code)
        }
    }
}

fn survey(args: &SurveyArgs) -> anyhow::Result<ExitCode> {
    say!("{} mutations of {}, seed {}", args.sample, args.list.display(), args.seed);
    let order = survey::Order {
        list: args.list.clone(),
        rooms: args.room.clone(),
        sample: args.sample,
        seed: args.seed,
        seeds: args.seeds,
        limit: Duration::from_secs(args.limit_s),
        jobs: jobs(args.jobs),
    };
    let dir = std::path::absolute(&args.dir)?; // cargo runs in another folder
    let (drawn, state) = survey::run(&args.root, &dir, &order, |line| say!("{line}"))?;
    if args.room.len() < 2 {
        say!("{}", survey::table(&drawn, &state));
        return Ok(ExitCode::SUCCESS);
    }
    for room in &args.room {
        let of: Vec<_> = drawn.iter().filter(|m| m.file.starts_with(room)).cloned().collect();
        say!("\n{room}:\n\n{}", survey::table(&of, &state));
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints; without a reader there is nothing left to do.
fn tell(text: &str) {
    if std::io::stdout().write_all(text.as_bytes()).is_err() {
        std::process::exit(0);
    }
}

fn jobs(wanted: Option<usize>) -> usize {
    wanted.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// A crash is reported with its seed; the default message would come without.
fn quiet_panics() {
    std::panic::set_hook(Box::new(|_| {}));
}
