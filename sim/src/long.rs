//! A long run: seeds in batches, with a file that has its progress, so that it can be stopped at
//! any time and continued.

use std::fmt::Write as _;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher as _};
use std::io::Write as _;
use std::path::Path;
use std::time::Instant as Clock;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::plan::Plan;
use crate::run::{Totals, run_seeds};

/// Seeds between two looks at the file.
const BATCH: u64 = 200;

/// How far a long run has come.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct State {
    /// Of the program: another one does something else, and its results are not to be added.
    pub version: String,
    /// The next seed.
    pub next: u64,
    /// Results of this version so far.
    pub totals: Totals,
    /// Earlier versions' results, the oldest first.
    #[serde(default)]
    pub earlier: Vec<Part>,
}

/// The results of one version of the program.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Part {
    /// Which one.
    pub version: String,
    /// Seeds it ran, and how many of them failed.
    pub seeds: u64,
    /// See `seeds`.
    pub failed: u64,
    /// Frames at the taps.
    pub frames: u64,
    /// Bytes read and compared.
    pub bytes: u64,
    /// Bytes acknowledged early.
    pub early_bytes: u64,
    /// Processor time in microseconds.
    pub cpu_us: u64,
}

impl Part {
    fn of(version: &str, totals: &Totals) -> Self {
        Self {
            version: version.to_owned(),
            seeds: totals.seeds,
            failed: totals.failures.len() as u64,
            frames: totals.frames,
            bytes: totals.bytes,
            early_bytes: totals.weight.early_bytes,
            cpu_us: totals.cpu_us,
        }
    }
}

impl State {
    /// The state in `path`, or a new one. The work of another version is kept apart: this version
    /// goes on with the next seed, and counts from zero.
    ///
    /// # Errors
    /// A file that cannot be read, or is no state.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let version = version()?;
        let bytes = match std::fs::read(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let (totals, earlier) = (Totals::default(), Vec::new());
                return Ok(Self { version, next: 0, totals, earlier });
            }
            other => other.with_context(|| format!("read {}", path.display()))?,
        };
        let mut state: Self = serde_json::from_slice(&bytes)
            .with_context(|| format!("{} is no state of a long run", path.display()))?;
        if state.version != version {
            state.earlier.push(Part::of(&state.version, &state.totals));
            (state.version, state.totals) = (version, Totals::default());
        }
        Ok(state)
    }

    /// Writes it so that a crash leaves the old one or the new one.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> anyhow::Result<()> {
        let new = path.with_extension("new");
        let write = || -> anyhow::Result<()> {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_all()?;
            Ok(std::fs::rename(&new, path)?)
        };
        write().with_context(|| format!("write {}", path.display()))
    }
}

/// The version of the program: a hash of its bytes.
fn version() -> anyhow::Result<String> {
    let program = std::env::current_exe().and_then(std::fs::read).context("read this program")?;
    let mut hasher = DefaultHasher::new();
    hasher.write(&program);
    Ok(format!("{:016x}", hasher.finish()))
}

/// Runs seeds up to `seeds`, or until this version has had `cpu_us_max` of processor time, from
/// where `path` says. Progress goes to `progress`, a line a batch.
///
/// # Errors
/// If the state cannot be read or written.
pub fn run(
    path: &Path,
    seeds: u64,
    cpu_us_max: u64,
    jobs: usize,
    mut progress: impl FnMut(&str),
) -> anyhow::Result<State> {
    let mut state = State::load(path)?;
    let (began, from) = (Clock::now(), state.next);
    while state.next < seeds && state.totals.cpu_us < cpu_us_max {
        let to = seeds.min(state.next + BATCH);
        state.totals.merge(run_seeds(state.next..to, Plan::from_seed, jobs, false));
        state.next = to;
        state.save(path)?;
        let rate = (to - from) as f64 / began.elapsed().as_secs_f64().max(0.001);
        let left = (seeds - to) as f64 / rate;
        progress(&format!(
            "{to} of {seeds} seeds, {:.1} a second, {:.0} min to go, {:.2} processor hours; \
             {} failed, {:.1} GB compared, {} faults",
            rate,
            left / 60.0,
            state.totals.cpu_us as f64 / 3.6e9,
            state.totals.failures.len(),
            state.totals.bytes as f64 / 1e9,
            state.totals.faults.values().sum::<u64>(),
        ));
    }
    Ok(state)
}

/// The results as Markdown.
#[must_use]
pub fn table(state: &State) -> String {
    let totals = &state.totals;
    let mut text = String::from("| what | how much |\n|---|---|\n");
    let mut row = |what: &str, how_much: String| {
        let _ = writeln!(text, "| {what} | {how_much} |");
    };
    row("seeds", totals.seeds.to_string());
    row("seeds with a violation", totals.failures.len().to_string());
    row("frames at the taps", totals.frames.to_string());
    row("steps of the core, each checked", totals.steps.to_string());
    row("bytes read and compared", totals.bytes.to_string());
    row("ends of connections closed in order", totals.closed.to_string());
    row("ends reset, refused or of destroyed guests", totals.reset.to_string());
    row("virtual time, hours", (totals.virtual_ns / 3_600_000_000_000).to_string());
    row("bytes acknowledged early", totals.weight.early_bytes.to_string());
    row("processor time, minutes", (totals.cpu_us / 60_000_000).to_string());
    for part in &state.earlier {
        let Part { version, seeds, failed, frames, bytes, cpu_us, .. } = part;
        let what = format!(
            "{seeds} seeds, {failed} failed, {frames} frames, {bytes} bytes, {} min",
            cpu_us / 60_000_000
        );
        row(&format!("before that, version {version}"), what);
    }
    let _ = writeln!(text, "\nCarried: {}.", totals.weight);
    let _ = writeln!(text, "\nExcused: {}.", totals.excuses);
    text += "\n| fault or event | times |\n|---|---|\n";
    for (kind, times) in &totals.faults {
        let _ = writeln!(text, "| {kind} | {times} |");
    }
    text + "\n" + &totals.reach.table()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of its own that goes when the test does.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).expect("a folder");
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// Processor time differs from run to run.
    fn without_time(mut totals: Totals) -> String {
        (totals.cpu_us, totals.slowest_us, totals.slowest) = (0, 0, 0);
        serde_json::to_string(&totals).expect("plain data")
    }

    #[test]
    fn a_run_that_was_stopped_comes_to_what_one_that_was_not_comes_to() {
        let folder = Folder::new("long-resumed");
        let (whole, parts) = (folder.0.join("whole.json"), folder.0.join("parts.json"));
        let mut lines = 0;
        let at_once = run(&whole, 5, u64::MAX, 2, |_| lines += 1).expect("a run");
        assert_eq!(lines, 1);
        run(&parts, 2, u64::MAX, 2, |_| ()).expect("a beginning");
        assert_eq!(State::load(&parts).expect("a state").next, 2);
        let resumed = run(&parts, 5, u64::MAX, 2, |_| ()).expect("the rest");
        assert_eq!(without_time(resumed.totals), without_time(at_once.totals.clone()));
        run(&parts, 5, u64::MAX, 2, |_| panic!("nothing is left")).expect("nothing");
        run(&parts, 99, 1, 2, |_| panic!("its time is up")).expect("nothing");
        assert!(table(&at_once).contains("| seeds | 5 |"));
    }

    #[test]
    fn what_is_no_state_is_refused_and_what_another_version_did_is_kept_apart() {
        let folder = Folder::new("long-refused");
        let path = folder.0.join("state.json");
        std::fs::write(&path, "{").expect("written");
        let error = format!("{:#}", State::load(&path).expect_err("no state"));
        assert!(error.contains("is no state of a long run"), "{error}");
        let totals = Totals { seeds: 7, cpu_us: 120_000_000, ..Totals::default() };
        let other = State { version: "0".to_owned(), next: 7, totals, earlier: Vec::new() };
        other.save(&path).expect("written");
        let state = State::load(&path).expect("a state");
        assert_eq!((state.next, state.totals.seeds, state.earlier.len()), (7, 0, 1));
        assert!(table(&state).contains("| before that, version 0 | 7 seeds, 0 failed, "));
    }
}
