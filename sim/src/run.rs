//! One seed, or many: the results, and the report if an invariant did not hold.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant as Clock;

use anyhow::Context as _;

use crate::observer::excuse::Excuses;
use crate::plan::Plan;
use crate::report::Packets;
use crate::world::{RunEnd, World};
use nightporter_check::reach::Reach;
use nightporter_check::rule::{Rule, Violation};
use nightporter_check::weight::Weight;

/// Packets of the flow that a failure shows.
const PACKETS_SHOWN: usize = 50;

/// The kind of failure, and so the program's exit code.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Failure {
    /// Our own code panicked: exit code 10.
    Crash(String),
    /// Something was promised and not kept, or emitted and not legal: exit code 11.
    Safety(Violation),
    /// Something did not come to its end: exit code 12.
    Liveness(Violation),
}

impl Failure {
    /// The exit code of the class.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Crash(_) => 10,
            Self::Safety(_) => 11,
            Self::Liveness(_) => 12,
        }
    }

    /// Names the class and, except for crashes, the rule, which a smaller plan must fail with too.
    #[must_use]
    pub fn kind(&self) -> String {
        match self {
            Self::Crash(_) => "crash".to_owned(),
            Self::Safety(v) | Self::Liveness(v) => v.rule.id().to_owned(),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Crash(text) => write!(f, "crash: {text}"),
            Self::Safety(v) | Self::Liveness(v) => v.fmt(f),
        }
    }
}

/// Runs one plan.
///
/// # Errors
/// The first thing that was wrong.
pub fn run_plan(plan: &Plan) -> Result<RunEnd, Failure> {
    let run = || World::new(plan, true, None).run();
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(end) => match end.violation.clone() {
            None => Ok(end),
            Some(v) if v.rule == Rule::Liveness => Err(Failure::Liveness(v)),
            Some(v) => Err(Failure::Safety(v)),
        },
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Err(Failure::Crash(text.unwrap_or_default()))
        }
    }
}

/// Tells all about a failure: plan, last packets as text, both captures, as `NAME` in `out`.
///
/// # Errors
/// If `out` cannot be written to.
pub fn explain(plan: &Plan, failure: &Failure, out: &Path, name: &str) -> anyhow::Result<String> {
    let seed = plan.seed;
    std::fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    let flow = match failure {
        Failure::Crash(_) => None,
        Failure::Safety(v) | Failure::Liveness(v) => v.flow,
    };
    let mut packets = Packets::new(flow, PACKETS_SHOWN);
    let run = || World::new(plan, true, Some(&mut packets)).run();
    let _ = catch_unwind(AssertUnwindSafe(run));
    let base = out.join(name);
    let json = base.with_extension("json");
    std::fs::write(&json, serde_json::to_vec_pretty(plan)?)
        .with_context(|| format!("write {}", json.display()))?;
    let [remote, guest] = packets.write(&base)?;
    Ok(format!(
        "seed {seed}: {failure}\n{}  plan {}\n  captures {} {}\n  \
         again: nightporter-sim run --plan {}\n",
        packets.text(),
        json.display(),
        remote.display(),
        guest.display(),
        json.display(),
    ))
}

/// The sums of many runs.
#[derive(Clone, Debug, Default, serde::Deserialize, serde::Serialize)]
pub struct Totals {
    /// Seeds run.
    pub seeds: u64,
    /// Frames at taps.
    pub frames: u64,
    /// Steps of engines, after each of which everything was checked.
    pub steps: u64,
    /// Application bytes read and compared.
    pub bytes: u64,
    /// Connections whose both ends came to an orderly close, and others.
    pub closed: u64,
    /// See `closed`.
    pub reset: u64,
    /// Virtual nanoseconds.
    pub virtual_ns: u128,
    /// Processor microseconds of all seeds, and of the slowest.
    pub cpu_us: u64,
    /// See `cpu_us`.
    pub slowest_us: u64,
    /// The slowest seed.
    pub slowest: u64,
    /// Which event met a flow in which state.
    pub reach: Reach,
    /// The amount that they carried.
    pub weight: Weight,
    /// The excuses.
    pub excuses: Excuses,
    /// Faults by kind.
    pub faults: BTreeMap<String, u64>,
    /// Seeds that failed, and how.
    pub failures: BTreeMap<u64, String>,
}

impl Totals {
    /// One run more.
    pub fn add(&mut self, seed: u64, result: &Result<RunEnd, Failure>, took_us: u64) {
        self.seeds += 1;
        self.cpu_us += took_us;
        if took_us > self.slowest_us {
            (self.slowest_us, self.slowest) = (took_us, seed);
        }
        let end = match result {
            Ok(end) => end,
            Err(failure) => {
                self.failures.insert(seed, failure.to_string());
                return;
            }
        };
        self.reach.merge(&end.reach);
        self.weight.merge(&end.weight);
        self.excuses.merge(&end.excuses);
        self.frames += end.frames;
        self.steps += end.steps;
        self.bytes += end.bytes;
        self.virtual_ns += u128::from(end.at.as_nanos());
        let closed = |e: &crate::stack::EndReport| e.outcome == crate::stack::Outcome::Closed;
        let both = end.ends.iter().filter(|e| closed(e)).count() as u64;
        self.closed += both;
        self.reset += end.ends.len() as u64 - both;
        for (kind, count) in &end.faults {
            *self.faults.entry((*kind).to_owned()).or_default() += count;
        }
    }

    /// The sum of two.
    pub fn merge(&mut self, other: Self) {
        self.seeds += other.seeds;
        self.reach.merge(&other.reach);
        self.weight.merge(&other.weight);
        self.excuses.merge(&other.excuses);
        self.frames += other.frames;
        self.steps += other.steps;
        self.bytes += other.bytes;
        self.closed += other.closed;
        self.reset += other.reset;
        self.virtual_ns += other.virtual_ns;
        self.cpu_us += other.cpu_us;
        if other.slowest_us > self.slowest_us {
            (self.slowest_us, self.slowest) = (other.slowest_us, other.slowest);
        }
        for (kind, count) in other.faults {
            *self.faults.entry(kind).or_default() += count;
        }
        self.failures.extend(other.failures);
    }
}

/// Processor time of this thread in nanoseconds (Linux); waiting for a processor does not count.
fn processor_ns() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Runs seeds on `jobs` threads, each run alone on its thread; with `first` until one fails.
#[must_use]
pub fn run_seeds(
    seeds: std::ops::Range<u64>,
    plan_of: fn(u64) -> Plan,
    jobs: usize,
    first: bool,
) -> Totals {
    let next = AtomicU64::new(seeds.start);
    let end = AtomicU64::new(seeds.end);
    let worker = || {
        let mut totals = Totals::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end.load(Ordering::Relaxed) {
                return totals;
            }
            let (started, began) = (Clock::now(), processor_ns());
            let result = run_plan(&plan_of(seed));
            let wall = started.elapsed().as_nanos();
            let took = processor_ns().zip(began).map_or(wall, |(now, then)| (now - then).into());
            let took = u64::try_from(took / 1000).unwrap_or(u64::MAX);
            totals.add(seed, &result, took);
            if first && result.is_err() {
                end.fetch_min(seed, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        let mut all = Totals::default();
        for thread in threads {
            all.merge(thread.join().expect("a run's panics are caught"));
        }
        all
    })
}
