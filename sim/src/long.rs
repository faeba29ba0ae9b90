//! A long run: seeds in batches, with a file that says how far it came, so that it can be stopped
//! at any time and goes on where it was.

use std::fmt::Write as _;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher as _};
use std::io::Write as _;
use std::path::Path;
use std::time::Instant as Clock;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use crate::run::{Totals, run_seeds};

/// Seeds between two looks at the file.
const BATCH: u64 = 500;

/// How far a long run has come.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct State {
    /// Of the program: another one does something else, and its results are not to be added.
    pub version: String,
    /// The next seed.
    pub next: u64,
    /// Results so far.
    pub totals: Totals,
}

impl State {
    /// What is in `path`, or a beginning.
    ///
    /// # Errors
    /// A file that cannot be read, is no state, or is another version's.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let version = version()?;
        let bytes = match std::fs::read(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self { version, next: 0, totals: Totals::default() });
            }
            other => other.with_context(|| format!("read {}", path.display()))?,
        };
        let state: Self = serde_json::from_slice(&bytes)
            .with_context(|| format!("{} is no state of a long run", path.display()))?;
        ensure!(
            state.version == version,
            "{} is of another version of simulator or core: remove it to begin anew",
            path.display()
        );
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

/// What this version does is what its bytes do.
fn version() -> anyhow::Result<String> {
    let program = std::env::current_exe().and_then(std::fs::read).context("read this program")?;
    let mut hasher = DefaultHasher::new();
    hasher.write(&program);
    Ok(format!("{:016x}", hasher.finish()))
}

/// Runs seeds up to `seeds`, from where `path` says. Progress goes to `progress`, a line a batch.
///
/// # Errors
/// If the state cannot be read or written.
pub fn run(
    path: &Path,
    seeds: u64,
    jobs: usize,
    mut progress: impl FnMut(&str),
) -> anyhow::Result<Totals> {
    let mut state = State::load(path)?;
    let (began, from) = (Clock::now(), state.next);
    while state.next < seeds {
        let to = seeds.min(state.next + BATCH);
        state.totals.merge(run_seeds(state.next..to, jobs, false));
        state.next = to;
        state.save(path)?;
        let rate = (to - from) as f64 / began.elapsed().as_secs_f64().max(0.001);
        let left = (seeds - to) as f64 / rate;
        progress(&format!(
            "{to} of {seeds} seeds, {:.0} a second, {:.0} min to go; {} failed, {:.1} GB compared, \
             {} faults",
            rate,
            left / 60.0,
            state.totals.failures.len(),
            state.totals.bytes as f64 / 1e9,
            state.totals.faults.values().sum::<u64>(),
        ));
    }
    Ok(state.totals)
}

/// The results as Markdown.
#[must_use]
pub fn table(totals: &Totals) -> String {
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
    row("processor time, minutes", (totals.cpu_us / 60_000_000).to_string());
    let _ = writeln!(text, "\nCarried: {}.", totals.weight);
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
        let at_once = run(&whole, 12, 2, |_| lines += 1).expect("a run");
        assert_eq!(lines, 1);
        run(&parts, 5, 2, |_| ()).expect("a beginning");
        assert_eq!(State::load(&parts).expect("a state").next, 5);
        let resumed = run(&parts, 12, 2, |_| ()).expect("the rest");
        assert_eq!(without_time(resumed), without_time(at_once.clone()));
        run(&parts, 12, 2, |_| panic!("nothing is left")).expect("nothing");
        assert!(table(&at_once).contains("| seeds | 12 |"));
    }

    #[test]
    fn a_state_of_another_version_or_no_state_at_all_is_refused() {
        let folder = Folder::new("long-refused");
        let path = folder.0.join("state.json");
        std::fs::write(&path, "{").expect("written");
        let error = format!("{:#}", State::load(&path).expect_err("no state"));
        assert!(error.contains("is no state of a long run"), "{error}");
        let other = State { version: "0".to_owned(), next: 1, totals: Totals::default() };
        other.save(&path).expect("written");
        let error = State::load(&path).expect_err("another version").to_string();
        assert!(error.contains("remove it to begin anew"), "{error}");
    }
}
