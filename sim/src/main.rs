//! The command line of the simulator.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use nightporter_sim::figures;
use nightporter_sim::mutants::hunt_all;
use nightporter_sim::plan::Plan;
use nightporter_sim::run::{explain, run_plan, run_seeds};

/// A world in virtual time around the core of Nightporter: one seed decides everything.
///
/// Exit codes: 0 nothing found, 2 wrong usage, 10 crash, 11 safety, 12 liveness.
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
    /// Break core in one way after the other, and tell which seed notices first.
    Mutants {
        /// Seeds until a mutation counts as not noticed.
        #[arg(long, default_value_t = 2000)]
        seeds: u64,
        /// Seeds at a time; as many as there are processors.
        #[arg(long)]
        jobs: Option<usize>,
        /// The root of the repository.
        #[arg(long, default_value = ".")]
        root: PathBuf,
    },
    /// Draw the figures of the vSnoop paper, and a table with our numbers beside its.
    Figures {
        /// Where the files go.
        #[arg(long, default_value = "target/figures")]
        out: PathBuf,
        /// Runs at a time; as many as there are processors.
        #[arg(long)]
        jobs: Option<usize>,
    },
    /// Print what a seed decides, as JSON.
    Plan {
        /// The seed.
        seed: u64,
    },
}

#[derive(clap::Args)]
struct RunArgs {
    /// How many seeds.
    #[arg(long, default_value_t = 500)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// This seed alone, with all there is to tell about it.
    #[arg(long, conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// A plan of an earlier failure instead of a seed.
    #[arg(long, conflicts_with_all = ["seeds", "from", "seed"])]
    plan: Option<PathBuf>,
    /// Stop at the first failure, the one with the lowest seed among those under way.
    #[arg(long)]
    first: bool,
    /// Seeds at a time; as many as there are processors.
    #[arg(long)]
    jobs: Option<usize>,
    /// Where plans and captures of failures go.
    #[arg(long, default_value = "target/sim")]
    out: PathBuf,
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Run(args) => run(&args),
        Command::Mutants { seeds, jobs, root } => mutants(seeds, jobs, &root),
        Command::Figures { out, jobs: wanted } => {
            figures::draw(&figures::Effort::FULL, jobs(wanted), &out).map(|table| {
                println!("{table}\nfigures are in {}", out.display());
                ExitCode::SUCCESS
            })
        }
        Command::Plan { seed } => print_plan(seed),
    };
    result.unwrap_or_else(|error| {
        eprintln!("nightporter-sim: {error:#}");
        ExitCode::from(2)
    })
}

fn print_plan(seed: u64) -> anyhow::Result<ExitCode> {
    println!("{}", serde_json::to_string_pretty(&Plan::from_seed(seed))?);
    Ok(ExitCode::SUCCESS)
}

fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let plan = match (&args.plan, args.seed) {
        (Some(path), _) => Some(serde_json::from_slice(&std::fs::read(path)?)?),
        (None, seed) => seed.map(Plan::from_seed),
    };
    if let Some(plan) = plan {
        return run_one(&plan, args);
    }
    quiet_panics();
    let totals = run_seeds(args.from..args.from + args.seeds, jobs(args.jobs), args.first);
    let mut code = 0;
    for (n, &seed) in totals.failures.keys().enumerate() {
        let plan = Plan::from_seed(seed);
        let Err(failure) = run_plan(&plan) else {
            anyhow::bail!("seed {seed} fails only sometimes")
        };
        code = code.max(failure.exit_code());
        if n < 3 && !args.first {
            print!("{}", explain(&plan, &failure, &args.out)?);
        } else {
            println!("seed {seed}: {failure}");
        }
    }
    println!(
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
    let faults: Vec<String> = totals.faults.iter().map(|(k, n)| format!("{k} {n}")).collect();
    println!("faults: {}", faults.join(", "));
    Ok(ExitCode::from(code))
}

fn run_one(plan: &Plan, args: &RunArgs) -> anyhow::Result<ExitCode> {
    match run_plan(plan) {
        Ok(end) => {
            println!(
                "nothing found; {} frames, {} bytes read, ended at {}, trace {:016x}",
                end.frames, end.bytes, end.at, end.trace_hash
            );
            for e in &end.ends {
                println!("  {e:?}");
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(failure) => {
            print!("{}", explain(plan, &failure, &args.out)?);
            Ok(ExitCode::from(failure.exit_code()))
        }
    }
}

fn mutants(seeds: u64, jobs_wanted: Option<usize>, root: &Path) -> anyhow::Result<ExitCode> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let survived = hunt_all(root, &target.join("mutants"), seeds, jobs(jobs_wanted))?;
    if survived.is_empty() {
        println!("every mutation was noticed");
        return Ok(ExitCode::SUCCESS);
    }
    println!("not noticed by {seeds} seeds: {}", survived.join("; "));
    Ok(ExitCode::from(1))
}

fn jobs(wanted: Option<usize>) -> usize {
    wanted.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// A crash is reported with its seed; the default message would come without.
fn quiet_panics() {
    std::panic::set_hook(Box::new(|_| {}));
}
