//! A sample of cargo-mutants' list, and what noticed each, in a file that has the run's progress.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant as Clock};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use super::build::{Built, Edits, build};
use super::chance::{Listed, read, sample};
use super::judge::{Caught, by_named, by_seeds, by_tests};
use super::{BATCH, TESTS_LIMIT_S, check_untouched, in_parallel};

/// Seeds that the untouched core passes first.
const UNTOUCHED_SEEDS: u64 = 20;

/// The order for a survey.
#[derive(Clone, Debug)]
pub struct Order {
    /// The output of `cargo mutants --list --json`.
    pub list: PathBuf,
    /// Mutations to draw.
    pub sample: usize,
    /// Decides which.
    pub seed: u64,
    /// Seeds of the simulator until a mutation counts as not noticed.
    pub seeds: u64,
    /// When to stop; the rest is left for the next time.
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
    /// A test of core noticed.
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
    /// Of core, its tests and the simulator.
    pub version: String,
    /// See [`Order::seed`].
    pub seed: u64,
    /// See [`Order::seeds`].
    pub seeds: u64,
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
    let drawn = order.draw(0)?;
    let mut edits = Edits::new();
    let may_compile = |m: &Listed| state.fates.get(&m.name) != Some(&Fate::Uncompilable);
    drawn.add_edits(root, &mut edits, may_compile)?;
    let built = build(root, dir, edits)?;
    let fresh = state.version.is_empty();
    ensure!(
        fresh
            || (&state.version, state.seed, state.seeds)
                == (&built.version, order.seed, order.seeds),
        "{} is of other sources or another order: remove it to begin anew",
        path.display()
    );
    (state.version, state.seed, state.seeds) = (built.version.clone(), order.seed, order.seeds);
    check_untouched(&built, 0..UNTOUCHED_SEEDS, order.jobs)?;
    state.save(&path)?;
    tell(&format!("built after {} s", began.elapsed().as_secs()));
    let over = || began.elapsed() >= order.limit;
    let near = Near::new(); // a survey is of what the tests notice, the quickest first
    judge_all(&built, &drawn, order, &near, &mut state, |state| {
        state.save(&path).map(|()| over())
    })?;
    Ok((drawn.list, state))
}

impl Order {
    /// The sample; its numbers in a build come after `first`.
    ///
    /// # Errors
    /// See [`read`].
    pub fn draw(&self, first: usize) -> anyhow::Result<Drawn> {
        Ok(Drawn { list: sample(read(&self.list)?, self.sample, self.seed), first })
    }
}

/// A sample and its numbers in a build.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// In the list's order.
    pub list: Vec<Listed>,
    first: usize,
}

impl Drawn {
    fn numbered(&self) -> impl Iterator<Item = (usize, &Listed)> {
        (self.first + 1..).zip(&self.list)
    }

    fn name(&self, n: usize) -> String {
        self.list[n - self.first - 1].name.clone()
    }

    /// Below `core/src`.
    fn file(&self, n: usize) -> &str {
        let file = &self.list[n - self.first - 1].file;
        file.strip_prefix("core/src/").unwrap_or(file)
    }

    /// Adds the changes that `wanted` is true for.
    ///
    /// # Errors
    /// A list of other sources.
    pub fn add_edits(
        &self,
        root: &Path,
        edits: &mut Edits,
        wanted: impl Fn(&Listed) -> bool,
    ) -> anyhow::Result<()> {
        for (n, m) in self.numbered().filter(|(_, m)| wanted(m)) {
            let source = std::fs::read_to_string(root.join(&m.file))
                .with_context(|| format!("read {}", m.file))?;
            let file = m.file.strip_prefix("core/src/").context("a mutation outside core")?;
            edits.entry(file.to_owned()).or_default().push(m.edit(n, &source)?);
        }
        Ok(())
    }
}

/// Tests that probably notice a mutation, by the file below `core/src` that it changes.
pub type Near = BTreeMap<String, BTreeSet<String>>;

/// The tests of core, those that are `near` first, then seeds for mutations that passed, until all
/// are judged or `save` says that time is over.
///
/// # Errors
/// What did not run.
pub fn judge_all(
    built: &Built,
    drawn: &Drawn,
    order: &Order,
    near: &Near,
    state: &mut State,
    save: impl Fn(&State) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    for (n, m) in drawn.numbered() {
        if built.left_out.contains(&n) {
            state.fates.insert(m.name.clone(), Fate::LeftOut);
        } else if built.uncompilable.contains(&n) {
            state.fates.insert(m.name.clone(), Fate::Uncompilable);
        }
    }
    let of = |state: &State, fate: Option<&Fate>| -> Vec<usize> {
        let numbered = drawn.numbered().filter(|(_, m)| state.fates.get(&m.name) == fate);
        numbered.map(|(n, _)| n).collect()
    };
    for batch in of(state, None).chunks(BATCH * order.jobs.max(1)) {
        if save(state)? {
            return Ok(());
        }
        let found = in_parallel(batch, order.jobs, |n| {
            let first = near.get(drawn.file(n)).into_iter().flatten().map(String::as_str);
            match by_named(built, n, first, TESTS_LIMIT_S)? {
                None => by_tests(built, n, TESTS_LIMIT_S),
                caught => Ok(caught),
            }
        })?;
        for (n, caught) in found {
            let fate = caught.map_or(Fate::PastTests, Fate::ByTest);
            state.fates.insert(drawn.name(n), fate);
        }
    }
    for n in of(state, Some(&Fate::PastTests)) {
        if save(state)? {
            return Ok(());
        }
        let caught = by_seeds(built, n, 0..order.seeds, order.jobs)?;
        state.fates.insert(drawn.name(n), caught.map_or(Fate::Survived, Fate::BySeed));
    }
    save(state).map(drop)
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
        ("noticed by core's tests", tests),
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
