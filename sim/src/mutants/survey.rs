//! A sample of cargo-mutants' list, and what noticed each, in a file that has the run's progress.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant as Clock};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use super::build::{Built, Edits, Subject, build};
use super::chance::{Listed, read, sample_rooms};
use super::judge::{Caught, by_seeds, by_tests};

/// Seeds that the untouched core passes first.
const UNTOUCHED_SEEDS: u64 = 20;
/// Processor seconds that a program of tests has, as a multiple of those that all of them took
/// with the crate as it is: on a machine that does much else besides, one takes twice its time.
const TESTS_LIMIT: u64 = 3;
/// The same of the crate as it is, in seconds.
const UNTOUCHED_LIMIT_S: u64 = 300;
/// Mutations for each job between two looks at the clock.
const BATCH: usize = 2;

/// The order for a survey.
#[derive(Clone, Debug)]
pub struct Order {
    /// The output of `cargo mutants --list --json`.
    pub list: PathBuf,
    /// Folders and files from which to draw, by the beginning of their path; all if there are none.
    pub rooms: Vec<String>,
    /// Mutations to draw from each.
    pub sample: usize,
    /// Decides which.
    pub seed: u64,
    /// Seeds of the simulator until a mutation counts as not noticed; the tests alone judge if
    /// there are none.
    pub seeds: u64,
    /// How long to judge; the rest is left for the next time.
    pub limit: Duration,
    /// Mutations or seeds at a time.
    pub jobs: usize,
}

/// The state of a mutation.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Fate {
    /// In a `const fn`, outside functions, or in one that returns `impl Trait`.
    LeftOut,
    /// No compiler takes it.
    Uncompilable,
    /// A test of the crate noticed.
    ByTest(Caught),
    /// No test noticed; seeds have yet to run.
    PastTests,
    /// No test noticed, but a seed.
    BySeed(Caught),
    /// Neither.
    Survived,
}

/// How far a survey has come.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct State {
    /// Of the crate and of those that judge it.
    pub version: String,
    /// See [`Order::seed`].
    pub seed: u64,
    /// See [`Order::seeds`].
    pub seeds: u64,
    /// Processor seconds after which a program of tests is taken for one without an end.
    pub tests_limit_s: u64,
    /// By the mutation's name.
    pub fates: BTreeMap<String, Fate>,
}

impl State {
    fn load(path: &Path) -> anyhow::Result<Self> {
        match std::fs::read(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            bytes => serde_json::from_slice(&bytes?)
                .with_context(|| format!("{} is no state of a survey", path.display())),
        }
    }

    fn may_compile(&self, m: &Listed) -> bool {
        self.fates.get(&m.name) != Some(&Fate::Uncompilable)
    }

    fn save(&self, path: &Path) -> anyhow::Result<()> {
        let new = path.with_extension("new");
        std::fs::write(&new, serde_json::to_vec_pretty(self)?)?;
        std::fs::rename(&new, path).with_context(|| format!("write {}", path.display()))
    }
}

/// Draws the sample, builds it and judges what is not yet judged; progress goes to `tell`.
///
/// # Errors
/// A list or a state of other sources; what did not build or run.
pub fn run(
    root: &Path,
    dir: &Path,
    order: &Order,
    tell: impl Fn(&str),
) -> anyhow::Result<(Vec<Listed>, State)> {
    let began = Clock::now();
    let path = dir.join("state.json");
    let mut state = State::load(&path)?;
    let drawn = sample_rooms(&read(&order.list)?, &order.rooms, order.sample, order.seed);
    let subject = Subject::of(&drawn.first().context("the rooms have no mutation")?.file)?;
    ensure!(order.seeds == 0 || subject.has_seeds, "seeds judge core only: ask for 0");
    let edits = edits(subject, root, &drawn, |m| state.may_compile(m))?;
    let built = build(subject, root, dir, edits, order.seeds > 0)?;
    let fresh = state.version.is_empty();
    ensure!(
        fresh
            || (&state.version, state.seed, state.seeds)
                == (&built.version, order.seed, order.seeds),
        "{} is of other sources or another order: remove it to begin anew",
        path.display()
    );
    tell(&format!("built after {} s", began.elapsed().as_secs()));
    if fresh {
        state.tests_limit_s = TESTS_LIMIT * check_untouched(&built, order)?;
        tell(&format!("what is not broken passed after {} s", began.elapsed().as_secs()));
    }
    (state.version, state.seed, state.seeds) = (built.version.clone(), order.seed, order.seeds);
    state.save(&path)?;
    let judges_since = Clock::now();
    let over = || judges_since.elapsed() >= order.limit;
    judge_all(&built, &drawn, order, &mut state, |state| state.save(&path).map(|()| over()))?;
    Ok((drawn, state))
}

/// The changes that `wanted` is true for; their numbers are their places in `drawn`, from 1.
fn edits(
    subject: Subject,
    root: &Path,
    drawn: &[Listed],
    wanted: impl Fn(&Listed) -> bool,
) -> anyhow::Result<Edits> {
    let mut edits = Edits::new();
    for (n, m) in (1..).zip(drawn).filter(|(_, m)| wanted(m)) {
        let source = std::fs::read_to_string(root.join(&m.file))
            .with_context(|| format!("read {}", m.file))?;
        let file = subject.below(&m.file)?.to_owned();
        edits.entry(file).or_default().push(m.edit(n, &source)?);
    }
    Ok(edits)
}

/// The processor seconds that the tests take while no mutation is on; at least one.
///
/// # Errors
/// If they, or the first seeds, do not pass as they should.
fn check_untouched(built: &Built, order: &Order) -> anyhow::Result<u64> {
    let before_s = ended_children_s()?;
    if let Some(caught) = by_tests(built, 0, None, UNTOUCHED_LIMIT_S)? {
        bail!("the crate as it is does not pass its tests: {}", caught.by);
    }
    let took_s = (ended_children_s()? - before_s).max(1);
    if let Some(caught) = by_seeds(built, 0, 0..order.seeds.min(UNTOUCHED_SEEDS), order.jobs)? {
        bail!("the core as it is does not pass: {}", caught.by);
    }
    Ok(took_s)
}

/// Processor seconds of all child processes that have ended: `cutime` and `cstime` of proc(5), in
/// hundredths.
fn ended_children_s() -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("read /proc/self/stat")?;
    let behind_name = stat.rsplit_once(')').context("no name")?.1;
    let ticks = behind_name.split_whitespace().skip(13).take(2).map(str::parse::<u64>);
    Ok(ticks.sum::<Result<u64, _>>()? / 100)
}

/// The tests, then seeds for mutations that passed, until all are judged or `save` says that time
/// is over.
///
/// # Errors
/// What did not run.
fn judge_all(
    built: &Built,
    drawn: &[Listed],
    order: &Order,
    state: &mut State,
    save: impl Fn(&State) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    for (n, m) in (1..).zip(drawn) {
        if built.left_out.contains(&n) {
            state.fates.insert(m.name.clone(), Fate::LeftOut);
        } else if built.uncompilable.contains(&n) {
            state.fates.insert(m.name.clone(), Fate::Uncompilable);
        }
    }
    let of = |state: &State, fate: Option<&Fate>| -> Vec<usize> {
        let numbered = (1..).zip(drawn).filter(|(_, m)| state.fates.get(&m.name) == fate);
        numbered.map(|(n, _)| n).collect()
    };
    let survived = if order.seeds == 0 { Fate::Survived } else { Fate::PastTests };
    for batch in of(state, None).chunks(BATCH * order.jobs.max(1)) {
        if save(state)? {
            return Ok(());
        }
        let limit_s = state.tests_limit_s;
        let judge = |n: usize| by_tests(built, n, Some(&drawn[n - 1].room()), limit_s);
        for (n, caught) in in_parallel(batch, order.jobs, judge)? {
            let fate = caught.map_or_else(|| survived.clone(), Fate::ByTest);
            state.fates.insert(drawn[n - 1].name.clone(), fate);
        }
    }
    for n in of(state, Some(&Fate::PastTests)) {
        if save(state)? {
            return Ok(());
        }
        let caught = by_seeds(built, n, 0..order.seeds, order.jobs)?;
        state.fates.insert(drawn[n - 1].name.clone(), caught.map_or(Fate::Survived, Fate::BySeed));
    }
    save(state).map(drop)
}

/// Runs `judge` for each of `items` on `jobs` threads.
fn in_parallel<T: Send>(
    items: &[usize],
    jobs: usize,
    judge: impl Fn(usize) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<BTreeMap<usize, T>> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let worker = || -> anyhow::Result<()> {
        while let Some(&n) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = judge(n)?;
            done.lock().expect("no worker panics").insert(n, found);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("no worker panics"))
    })?;
    Ok(done.into_inner().expect("no worker panics"))
}

/// The results as Markdown, and every mutation that was not noticed.
#[must_use]
pub fn table(drawn: &[Listed], state: &State) -> String {
    let fates = || drawn.iter().filter_map(|m| state.fates.get(&m.name));
    let count = |is: fn(&Fate) -> bool| fates().filter(|fate| is(fate)).count();
    let tests = count(|f| matches!(f, Fate::ByTest(_)));
    let seeds = count(|f| matches!(f, Fate::BySeed(_)));
    let survived = count(|f| *f == Fate::Survived);
    let judged = tests + seeds + survived;
    let mut text = String::from("| what | how many |\n|---|---:|\n");
    for (what, how_many) in [
        ("drawn", drawn.len()),
        (
            "left out: in a `const fn`, or one that returns `impl Trait`",
            count(|f| *f == Fate::LeftOut),
        ),
        ("left out: does not compile", count(|f| *f == Fate::Uncompilable)),
        ("judged", judged),
        ("noticed by tests", tests),
        ("noticed by seeds alone", seeds),
        ("not noticed", survived),
        ("not noticed by tests, seeds have yet to run", count(|f| *f == Fate::PastTests)),
    ] {
        let _ = writeln!(text, "| {what} | {how_many} |");
    }
    let noticed = 100.0 * (tests + seeds) as f64 / judged.max(1) as f64;
    let _ = writeln!(text, "\n{noticed:.1} % of those judged were noticed. Not noticed:\n");
    let survived = drawn.iter().filter(|m| state.fates.get(&m.name) == Some(&Fate::Survived));
    for name in survived.map(|m| &m.name).collect::<BTreeSet<_>>() {
        let _ = writeln!(text, "- {name}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_counts_each_mutation_once_and_names_the_survivors() {
        let list = r#"[{"name": "NAME", "file": "core/src/a.rs", "replacement": "*",
            "span": {"start": {"line": 1, "column": 1}, "end": {"line": 1, "column": 2}}}]"#;
        let named = |name: &str| -> Listed {
            let list: Vec<Listed> = serde_json::from_str(list).expect("a list");
            Listed { name: name.to_owned(), ..list[0].clone() }
        };
        let drawn: Vec<Listed> = ["a", "b", "c", "d", "e"].map(named).into();
        let caught = Caught { seeds: 3, by: "INV-03".to_owned() };
        let fates = [
            ("a", Fate::ByTest(caught.clone())),
            ("b", Fate::Survived),
            ("c", Fate::BySeed(caught)),
            ("d", Fate::Uncompilable),
            ("z", Fate::Survived),
        ];
        let fates = fates.map(|(name, fate)| (name.to_owned(), fate)).into();
        let text = table(&drawn, &State { fates, ..State::default() });
        assert!(text.contains("| judged | 3 |") && text.contains("66.7 %"), "{text}");
        assert!(text.contains("\n- b\n") && !text.contains("- z"), "{text}");
    }
}
