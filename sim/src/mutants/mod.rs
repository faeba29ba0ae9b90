//! The checks that check the checks: `core` broken in one way after the other.
//!
//! The sources of `core` know nothing of this. [`build`] makes a copy of `core` and `sim` in which
//! all mutations are there at once, behind a question which one is on; [`judge`] runs it with one
//! after the other. The mutations are ours ([`table`], all must be noticed) or those that
//! cargo-mutants lists ([`chance`], [`survey`]: a sample, and a record of who noticed).

pub mod build;
pub mod chance;
pub mod judge;
mod second;
pub mod source;
pub mod survey;
mod table;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{bail, ensure};
use table::FIRST;
pub use table::{Mutation, all};

use build::{Built, Edits, build};
use judge::{Caught, by_seeds, by_tests};

/// Processor seconds after which a program of tests is taken for one without an end.
const TESTS_LIMIT_S: u64 = 12;
/// The same for a hunt through seeds, for each of them.
const SEED_LIMIT_S: u64 = 2;

/// The changes of the table, by file. Numbers count from 1.
///
/// # Errors
/// A place that does not occur exactly once: the table is older than the source.
pub fn table_edits(root: &Path) -> anyhow::Result<Edits> {
    let mut edits = Edits::new();
    for (i, m) in all().enumerate() {
        let source = std::fs::read_to_string(root.join("core/src").join(m.file))?;
        edits.entry(m.file.to_owned()).or_default().push(m.edit(i + 1, &source)?);
    }
    Ok(edits)
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

/// Whether tests and seeds pass as they should while no mutation is on.
fn check_untouched(built: &Built, seeds: u64, jobs: usize) -> anyhow::Result<()> {
    if let Some(caught) = by_tests(built, 0, TESTS_LIMIT_S)? {
        bail!("the core as it is does not pass its tests: {}", caught.by);
    }
    if let Some(caught) = by_seeds(built, 0, seeds, jobs, SEED_LIMIT_S * seeds + 60)? {
        bail!("the core as it is does not pass: {}", caught.by);
    }
    Ok(())
}

/// Hunts all mutations of the table and gives its lines to `tell`. Returns those that no seed
/// noticed. Those of the second look run through seeds only with `second`; else core's tests alone
/// judge them.
///
/// # Errors
/// See [`table_edits`] and [`build`]; or a program that did not run.
pub fn hunt_all(
    root: &Path,
    dir: &Path,
    (seeds, second): (u64, bool),
    jobs: usize,
    tell: impl Fn(&str),
) -> anyhow::Result<Vec<String>> {
    let count = all().count();
    tell(&format!("building core with {count} mutations"));
    let built = build(root, dir, table_edits(root)?)?;
    let unfit: Vec<_> = built.left_out.iter().chain(&built.uncompilable).collect();
    ensure!(unfit.is_empty(), "mutations {unfit:?} do not compile: mend the table");
    check_untouched(&built, seeds.min(200), jobs)?;
    let numbers: Vec<usize> = (1..=count).collect();
    let tests = in_parallel(&numbers, jobs, |n| by_tests(&built, n, TESTS_LIMIT_S))?;
    tell("\n| # | mutation | breaks | by seeds | seeds | by core's tests |");
    tell("|---|---|---|---|---|---|");
    let (mut survived, mut unheard) = (Vec::new(), 0);
    for (n, m) in (1..).zip(all()) {
        let judged = second || n <= FIRST.len();
        let by_world = if judged {
            by_seeds(&built, n, seeds, jobs, SEED_LIMIT_S * seeds + 60)?
        } else {
            None
        };
        let who = |caught: Option<&Caught>| {
            caught.map_or_else(|| "**nobody**".to_owned(), |caught| caught.by.clone())
        };
        let world_by = if judged { who(by_world.as_ref()) } else { "-".to_owned() };
        let needed = by_world.as_ref().map_or(0, |caught| caught.seeds);
        let test = tests.get(&n).and_then(Option::as_ref);
        unheard += usize::from(test.is_none());
        let test_by = who(test);
        tell(&format!("| {n} | {} | {} | {world_by} | {needed} | {test_by} |", m.name, m.breaks));
        if judged && by_world.is_none() {
            survived.push(m.name.to_owned());
        }
    }
    tell(&format!("\n{count} mutations; {unheard} that no test of core notices"));
    Ok(survived)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_finds_its_place_once_in_a_function_that_can_be_switched() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (file, edits) in table_edits(&root).expect("a place for each") {
            let source = std::fs::read_to_string(root.join("core/src").join(&file));
            let mutated = source::mutate(&source.expect("a file of core"), &edits);
            assert!(mutated.left_out.is_empty(), "{file}: {:?}", mutated.left_out);
        }
    }
}
