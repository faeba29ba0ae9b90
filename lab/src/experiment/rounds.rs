//! The order in which samples are taken.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nightporter_guest::data::splitmix64;
use serde_json::Value;

use super::Results;
use crate::progress::Progress;

/// An arm of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) case: String,
    pub(crate) arm: String,
}

impl Cell {
    pub(crate) fn new(case: impl Into<String>, arm: impl Into<String>) -> Self {
        Self { case: case.into(), arm: arm.into() }
    }
}

/// How many rounds there are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rounds {
    /// At least, whatever time they take.
    pub(crate) least: usize,
    /// At most.
    pub(crate) most: usize,
    /// No round begins later, but for the least.
    pub(crate) time: Option<Duration>,
}

impl Rounds {
    /// So many.
    pub(crate) const fn exactly(count: usize) -> Self {
        Self { least: count, most: count, time: None }
    }
}

/// The numbers of one sample, by measure, and whatever else is to be kept of it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Values {
    pub(crate) of: Vec<(&'static str, f64)>,
    pub(crate) detail: Value,
}

impl Results {
    /// Takes a sample of each of the cells in each round, but for those that an earlier run took
    /// before it was cut off. In each round chance decides on the order, the same in each run.
    /// `one` gets the number of the cell and of the round.
    ///
    /// # Errors
    /// A sample could not be taken or kept. Those of the rounds before are kept.
    pub(crate) fn rounds(
        &mut self,
        cells: &[Cell],
        rounds: Rounds,
        progress: &mut Progress,
        mut one: impl FnMut(usize, usize) -> Result<Values>,
    ) -> Result<()> {
        self.expect(cells);
        let begun = Instant::now();
        let mut random = 1;
        let mut taken = 0;
        for round in 0..rounds.most {
            let order = shuffled(cells.len(), &mut random);
            let is_late = rounds.time.is_some_and(|time| begun.elapsed() > time);
            if round >= rounds.least && is_late {
                break;
            }
            for (at, index) in order.into_iter().enumerate() {
                let cell = &cells[index];
                if self.has(cell, round) {
                    continue;
                }
                let (done, of) = (round * cells.len() + at, rounds.most * cells.len());
                let left = left(begun.elapsed(), rounds, (taken, of - done));
                progress.update(done, of, &format!("{}: {}{left}", cell.case, cell.arm));
                let sample = one(index, round);
                let what = || format!("{}, {}, round {round}", cell.case, cell.arm);
                self.note(cell, round, sample.with_context(what)?);
                taken += 1;
            }
            self.keep()?;
        }
        Ok(())
    }
}

/// The time that is left, when so many samples were taken and so many are to come.
fn left(passed: Duration, rounds: Rounds, (taken, to_come): (usize, usize)) -> String {
    if taken == 0 {
        return String::new();
    }
    let by_count = passed.as_secs_f64() / taken as f64 * to_come as f64;
    let by_time = rounds.time.map(|time| time.saturating_sub(passed).as_secs_f64());
    let left = by_time.map_or(by_count, |by_time| by_time.min(by_count));
    format!(", about {left:.0} s left")
}

/// 0 … length-1 in random order (Fisher and Yates).
pub(crate) fn shuffled(length: usize, random: &mut u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..length).collect();
    for i in (1..length).rev() {
        let j = splitmix64(random) % (i as u64 + 1);
        order.swap(i, usize::try_from(j).expect("below length"));
    }
    order
}
