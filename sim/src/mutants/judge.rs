//! Whether a mutation is noticed by tests, and by seeds.

use std::ops::Range;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::build::{Built, FIRST_PANIC, VARIABLE};

/// Processor seconds for each seed, on average, after which a run is taken for one without an end.
const SEED_LIMIT_S: u64 = 2;
/// Seconds after which a run is taken for one that waits for ever.
const WAIT_LIMIT_S: u64 = 1800;
/// Private memory of a run in KiB; a mutation may ask for all there is. The tests of `rules` need
/// 7 GiB together: none gives back the arena that it leaks, most of which is never touched. Address
/// space is no measure, of which a daemon reserves a TiB for its arena.
const MEMORY_KIB: u64 = 16 << 20;

/// How a mutation was noticed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Caught {
    /// Seeds that were needed, from seed 0 on; 0 for tests.
    pub seeds: u64,
    /// The test, or the message of the first seed that noticed.
    pub by: String,
}

/// Runs a program of tests, which ends at its first panic.
fn run_tests(
    program: &Path,
    args: &[&str],
    n: usize,
    limit_s: u64,
    built: &Built,
) -> anyhow::Result<Output> {
    // Random cases are the same each time; otherwise the results would vary.
    let settings = [
        ("RUST_TEST_THREADS", "2"),
        ("PROPTEST_RNG_SEED", "1"),
        ("PROPTEST_DISABLE_FAILURE_PERSISTENCE", ""),
        (FIRST_PANIC, ""),
    ];
    run(program, args, n, limit_s, &settings, &built.dir)
}

/// Runs a program, but not for longer than `limit_s` seconds of processor time, nor for
/// [`WAIT_LIMIT_S`].
fn run(
    program: &Path,
    args: &[&str],
    n: usize,
    limit_s: u64,
    settings: &[(&str, &str)],
    dir: &Path,
) -> anyhow::Result<Output> {
    let limits = format!(
        "ulimit -t {limit_s} && ulimit -d {MEMORY_KIB} && ulimit -c 0 && \
         exec timeout --kill-after=1 {WAIT_LIMIT_S} \"$0\" \"$@\""
    );
    Command::new("sh")
        .args(["-c", &limits])
        .arg(program)
        .args(args)
        .env(VARIABLE, n.to_string())
        .envs(settings.iter().copied())
        .current_dir(dir)
        .output()
        .with_context(|| format!("run {}", program.display()))
}

/// Tests that take most of the time; they come last.
const SLOW: [&str; 6] = [
    "com_01_five_gibibytes_wrap_twice",
    "snoop_39_the_buffer_grows_with_what_the_guest_drains",
    "sec_01_a_guest_that_never_reads_bounds_what_its_remotes_can_fill",
    "a_million_flows_cost_what_limits_says_and_no_shard_is_large",
    "what_was_added_is_found_until_it_is_removed",
    "flows_are_found_by_key_and_by_id_until_they_are_removed",
];

/// Runs the tests of the crate with mutation `n` (0: none) until one notices, also those that need
/// root or other programs, as `make test` does. Those of `room` come first, as they notice most.
///
/// # Errors
/// If they do not run.
pub fn by_tests(
    built: &Built,
    n: usize,
    room: Option<&str>,
    limit_s: u64,
) -> anyhow::Result<Option<Caught>> {
    let quick: Vec<&str> = SLOW.iter().flat_map(|name| ["--skip", name]).collect();
    let room = room.map(|room| [&[room], quick.as_slice()].concat());
    for args in room.as_deref().into_iter().chain([quick.as_slice(), &SLOW]) {
        for program in &built.tests {
            let args: Vec<&str> =
                args.iter().copied().chain(["--quiet", "--include-ignored"]).collect();
            let output = run_tests(program, &args, n, limit_s, built)?;
            if !output.status.success() {
                return Ok(Some(noticed(program, &output)));
            }
        }
    }
    Ok(None)
}

/// Cargo's name for a test program.
fn name(program: &Path) -> String {
    let stem = program.file_stem().unwrap_or_default().to_string_lossy();
    stem.split('-').next().unwrap_or_default().to_owned()
}

fn noticed(program: &Path, output: &Output) -> Caught {
    let text = String::from_utf8_lossy(&output.stderr);
    let test = text.lines().find_map(|line| line.strip_prefix("first panic in "));
    let name = name(program);
    let by = match test {
        Some(test) => format!("{name}: {test}"),
        None => format!("{name}: no end, or a crash ({})", output.status),
    };
    Caught { seeds: 0, by }
}

/// Runs seeds with mutation `n` (0: none) until one notices.
///
/// # Errors
/// If the simulator does not run.
pub fn by_seeds(
    built: &Built,
    n: usize,
    seeds: Range<u64>,
    jobs: usize,
) -> anyhow::Result<Option<Caught>> {
    let count = seeds.end - seeds.start;
    let limit_s = SEED_LIMIT_S * count + 60;
    let (from, most, jobs) = (seeds.start.to_string(), count.to_string(), jobs.to_string());
    let args = ["run", "--first", "--from", &from, "--seeds", &most, "--jobs", &jobs];
    let Some(simulator) = &built.simulator else { return Ok(None) };
    let output = run(simulator, &args, n, limit_s, &[], &built.dir)?;
    if output.status.success() {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let found = text.lines().find_map(|line| line.strip_prefix("seed ")?.split_once(": "));
    Ok(Some(match found.and_then(|(seed, by)| Some((seed.parse::<u64>().ok()?, by))) {
        Some((seed, by)) => Caught { seeds: seed + 1, by: by.to_owned() },
        None if let Some(by) = text.lines().find(|line| line.starts_with("too few ")) => {
            Caught { seeds: seeds.end, by: by.to_owned() }
        }
        None => {
            let error = String::from_utf8_lossy(&output.stderr);
            let last = error.lines().last().unwrap_or_default();
            // Nothing was found in seeds that carried too little.
            let too_little = text.lines().find(|line| line.starts_with("too "));
            let no_end = || format!("no end, or a crash ({}) {last}", output.status);
            Caught { seeds: 0, by: too_little.map_or_else(no_end, str::to_owned) }
        }
    }))
}
