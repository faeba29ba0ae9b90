//! The checks that check the checks: `core` broken in one way after the other.
//!
//! The sources of `core` know nothing of this. [`build`] makes a copy of `core` and `sim` that
//! contains all mutations at once, behind a switch that selects one; [`judge`] runs it with one
//! after the other. The mutations are ours ([`table`], [`hunt`]: all must be noticed) or those that
//! cargo-mutants lists ([`chance`], [`survey`]: a sample, and a record of what noticed them).

pub mod build;
pub mod chance;
pub mod hunt;
pub mod judge;
pub mod known;
mod place;
mod second;
mod sending;
mod sockets;
pub mod source;
pub mod survey;
mod table;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, bail};
pub use table::{Mutation, all};

use build::{Built, Edits};
use judge::{by_seeds, by_tests};
use source::Edit;

/// Processor seconds after which a program of tests is taken for one without an end.
const TESTS_LIMIT_S: u64 = 12;
/// The same of the core as it is, which has an end: on a machine that does much else besides a
/// program of tests takes twice its time.
const UNTOUCHED_LIMIT_S: u64 = 10 * TESTS_LIMIT_S;
/// Mutations for each job between two looks at the clock, or two reports.
const BATCH: usize = 8;

/// The changes of the table, by file. Numbers count from 1.
///
/// # Errors
/// A place that is not found, or not once: the table is older than the source.
pub fn table_edits(root: &Path) -> anyhow::Result<Edits> {
    let sources = build::files(&root.join("core"), &["src"])?;
    let functions: Vec<_> =
        sources.iter().flat_map(|(file, source)| place::functions(file, source)).collect();
    let mut edits = Edits::new();
    for (i, m) in all().enumerate() {
        let found = place::find(&functions, m.function, m.place)
            .with_context(|| format!("\"{}\" in {}: mend the table", m.name, m.function))?;
        let statement = sources[found.file][found.range.clone()].ends_with(';');
        let instead = found.rename(m.instead);
        let with = if statement { instead } else { format!("({instead})") };
        let file = found.file.strip_prefix("src/").unwrap_or(found.file).to_owned();
        edits.entry(file).or_default().push(Edit { n: i + 1, range: found.range, with });
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
fn check_untouched(built: &Built, seeds: Range<u64>, jobs: usize) -> anyhow::Result<()> {
    if let Some(caught) = by_tests(built, 0, UNTOUCHED_LIMIT_S)? {
        bail!("the core as it is does not pass its tests: {}", caught.by);
    }
    check_untouched_seeds(built, seeds, jobs)
}

fn check_untouched_seeds(built: &Built, seeds: Range<u64>, jobs: usize) -> anyhow::Result<()> {
    match by_seeds(built, 0, seeds, jobs)? {
        Some(caught) => bail!("the core as it is does not pass: {}", caught.by),
        None => Ok(()),
    }
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
