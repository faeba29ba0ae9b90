//! The mutations of the table: core's tests must notice each, and most of the seeds that noticed
//! one.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::ensure;

use super::build::{Built, Edits, build};
use super::judge::{Caught, by_named, by_seeds, by_tests};
use super::known::{self, Known};
use super::source::Edit;
use super::survey::{self, Near, Order, State};
use super::{
    BATCH, Mutation, TESTS_LIMIT_S, all, check_untouched, check_untouched_seeds, in_parallel,
    table_edits,
};

/// Seeds that the untouched core passes before all are hunted anew.
const UNTOUCHED_SEEDS: u64 = 200;

/// Of `/proc/self/stat`: USER_HZ, which every kernel shows to programs.
const TICKS_PER_S: u64 = 100;

/// The order for a hunt.
#[derive(Clone, Debug)]
pub struct Hunt {
    /// Seeds until a mutation counts as not noticed.
    pub seeds: u64,
    /// The known tests and seeds are not tried first, and the record is written anew.
    pub anew: bool,
    /// Only mutations whose names contain one of these; all if there is none.
    pub only: Vec<String>,
    /// Mutations at a time.
    pub jobs: usize,
    /// A sample of cargo-mutants' list that is built and judged besides, and only reported.
    pub chance: Option<Order>,
}

/// Hunts all mutations of the table and gives its lines to `tell`. Returns what is not as it should
/// be: a mutation that no test noticed, or no seed of those tried in a hunt anew, although the
/// record says that one does; or judges of the simulated worlds that have become deaf.
///
/// A seed is another world with each change of the core, so a recorded one may not notice any more
/// what it did. Most still do unless the judges hear nothing.
///
/// # Errors
/// See [`table_edits`], [`build`] and [`known::read`]; or a program that did not run.
pub fn hunt_all(
    root: &Path,
    dir: &Path,
    hunt: &Hunt,
    tell: impl Fn(&str),
) -> anyhow::Result<Vec<String>> {
    let table: Vec<&Mutation> = all().collect();
    let record = known::read(root)?;
    let drawn = hunt.chance.as_ref().map(|order| order.draw(table.len())).transpose()?;
    let mut edits = table_edits(root)?;
    let near = near(&edits, &table, &record);
    if let Some(drawn) = &drawn {
        drawn.add_edits(root, &mut edits, |_| true)?;
    }
    tell(&format!("building core with {} mutations", edits.values().map(Vec::len).sum::<usize>()));
    let built = build(root, dir, edits)?;
    tell(&spent("built"));
    let unfit = built.left_out.iter().chain(&built.uncompilable).filter(|&&n| n <= table.len());
    let unfit: Vec<_> = unfit.collect();
    ensure!(unfit.is_empty(), "mutations {unfit:?} do not compile: mend the table");
    check_untouched_for(&built, &record, hunt)?;
    tell(&spent("the core as it is passed"));
    let (lost, found) = hunt_table(&built, &table, &record, hunt, &tell)?;
    tell(&spent("those of the table judged"));
    if hunt.anew {
        let text = known::text(&found, table.iter().map(|m| m.name));
        std::fs::write(root.join(known::FILE), text)?;
    }
    if let Some((order, drawn)) = hunt.chance.as_ref().zip(drawn) {
        let mut state = State::default();
        survey::judge_all(&built, &drawn, order, &near, &mut state, |_| Ok(false))?;
        tell(&format!("\nOf mutations by chance, seed {}:\n", order.seed));
        tell(&survey::table(&drawn.list, &state));
    }
    tell(&spent("all judged"));
    Ok(lost)
}

/// What has been done, and the processor time of programs until then.
fn spent(what: &str) -> String {
    // User and system time of children that have ended, behind the name in parentheses: proc(5).
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(13).take(2).filter_map(|it| it.parse::<u64>().ok()).sum();
    format!("{what}: {} s of processor time since the start", ticks / TICKS_PER_S)
}

/// The tests that are known to notice mutations of the table, by the file that these change.
fn near(edits: &Edits, table: &[&Mutation], record: &known::Record) -> Near {
    let test = |n: usize| record.get(table[n - 1].name)?.test.clone();
    let tests = |edits: &[Edit]| edits.iter().filter_map(|edit| test(edit.n)).collect();
    edits.iter().map(|(file, edits)| (file.clone(), tests(edits))).collect()
}

/// The rows of the table go to `tell`. Returns the deviations from the record, and a new record.
fn hunt_table(
    built: &Built,
    table: &[&Mutation],
    record: &known::Record,
    hunt: &Hunt,
    tell: &impl Fn(&str),
) -> anyhow::Result<(Vec<String>, known::Record)> {
    tell("\n| # | mutation | breaks | by seeds | seeds | by core's tests |");
    tell("|---|---|---|---|---|---|");
    let (mut lost, mut found) = (Vec::new(), known::Record::new());
    let (mut silent, mut known_seeds) = (Vec::new(), 0);
    let is_asked = |name: &str| hunt.only.is_empty() || hunt.only.iter().any(|o| name.contains(o));
    let numbers: Vec<usize> = (1..=table.len()).filter(|n| is_asked(table[n - 1].name)).collect();
    for batch in numbers.chunks(BATCH * hunt.jobs.max(1)) {
        let judge = |n: usize| judge(built, n, record.get(table[n - 1].name), hunt);
        for (n, now) in in_parallel(batch, hunt.jobs, judge)? {
            let m = table[n - 1];
            tell(&now.row(n, m));
            let expected = record.get(m.name);
            let seed_is_known = expected.is_none_or(|known| known.seed.is_some());
            known_seeds += usize::from(seed_is_known);
            if now.seed.is_none() && seed_is_known {
                silent.push(format!("\"{}\" by seeds", m.name));
            }
            if now.test.is_none() && expected.is_none_or(|known| known.test.is_some()) {
                lost.push(format!("\"{}\" by core's tests", m.name));
            }
            found.insert(m.name.to_owned(), now.known());
        }
    }
    if !silent.is_empty() {
        tell(&format!(
            "\nof {known_seeds} known seeds {} do not notice: {}",
            silent.len(),
            silent.join("; ")
        ));
    }
    if hunt.anew || 2 * silent.len() > known_seeds {
        lost.append(&mut silent);
    }
    for (name, known) in record {
        found.entry(name.clone()).or_insert_with(|| known.clone()); // who was not asked
    }
    let by = |is: fn(&Known) -> bool| found.values().filter(|&known| is(known)).count();
    let (seeds, tests) = (by(|known| known.seed.is_some()), by(|known| known.test.is_some()));
    let count = table.len();
    tell(&format!("\n{count} mutations; {seeds} noticed by seeds, {tests} by core's tests"));
    Ok((lost, found))
}

/// Whether the tests and seeds that should notice mutations pass while none is on.
fn check_untouched_for(built: &Built, record: &known::Record, hunt: &Hunt) -> anyhow::Result<()> {
    if hunt.anew {
        return check_untouched(built, 0..hunt.seeds.min(UNTOUCHED_SEEDS), hunt.jobs);
    }
    check_untouched(built, 0..1, hunt.jobs)?;
    let seeds: BTreeSet<u64> = record.values().filter_map(|known| known.seed).collect();
    let seeds: Vec<u64> = seeds.into_iter().collect();
    let numbers: Vec<usize> = (0..seeds.len()).collect();
    let check = |i: usize| check_untouched_seeds(built, seeds[i]..seeds[i] + 1, 1);
    in_parallel(&numbers, hunt.jobs, check).map(drop)
}

/// The test and the seed that noticed a mutation now.
struct Noticed {
    seed: Option<Caught>,
    test: Option<Caught>,
}

/// Tries the known test, then all others, and the known seed; all seeds in a hunt anew. What is
/// known to be noticed by nobody is not tried.
fn judge(built: &Built, n: usize, known: Option<&Known>, hunt: &Hunt) -> anyhow::Result<Noticed> {
    // For a few mutations the tests are not in question.
    let known_test = known.filter(|_| !hunt.anew || !hunt.only.is_empty());
    let known = known.filter(|_| !hunt.anew);
    let mut now = Noticed { seed: None, test: None };
    if let Some(test) = known_test.and_then(|known| known.test.as_deref()) {
        now.test = by_named(built, n, std::iter::once(test), TESTS_LIMIT_S)?;
    }
    if now.test.is_none() && known_test.is_none_or(|known| known.test.is_some()) {
        now.test = by_tests(built, n, TESTS_LIMIT_S)?;
    }
    if let Some(seed) = known.and_then(|known| known.seed) {
        now.seed = by_seeds(built, n, seed..seed + 1, 1)?;
    }
    if known.is_none() {
        now.seed = by_seeds(built, n, 0..hunt.seeds, 1)?;
    }
    Ok(now)
}

impl Noticed {
    fn row(&self, n: usize, m: &Mutation) -> String {
        let who = |caught: &Option<Caught>| {
            caught.as_ref().map_or_else(|| "nobody".to_owned(), |caught| caught.by.clone())
        };
        let seeds = self.seed.as_ref().map_or(0, |caught| caught.seeds);
        let (name, breaks, seed, test) = (m.name, m.breaks, who(&self.seed), who(&self.test));
        format!("| {n} | {name} | {breaks} | {seed} | {seeds} | {test} |")
    }

    fn known(&self) -> Known {
        Known {
            seed: self.seed.as_ref().map(|caught| caught.seeds.saturating_sub(1)),
            test: self.test.as_ref().map(|caught| caught.by.clone()),
        }
    }
}
