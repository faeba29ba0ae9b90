//! An experiment: arms that are compared over cases, round by round, and what came out.
//!
//! A comparison of the lab is described by an [`Experiment`] and recorded in [`Results`]. These run
//! the rounds, interleaved in an order that chance decides and a seed repeats, keep the samples of
//! each round, go on where a run was cut off, print one table ([`table`]), and judge by checks of
//! one kind ([`verdict`]).
//!
//! | word | meaning |
//! |---|---|
//! | case | a world that all arms are compared in: a bottleneck, a number of guests |
//! | arm | what is compared: a path, a sender, a back-end. The first of a case is the yardstick |
//! | measure | a number of a sample: its name and unit, and which way is better |
//! | round | one sample of each arm; samples of one round belong together |

pub(crate) mod origin;
mod result;
mod rounds;
pub mod stats;
mod table;
pub mod verdict;

use std::path::PathBuf;

use serde_json::Value;

use crate::image::source_root;
pub(crate) use result::Results;
pub(crate) use rounds::{Cell, Rounds, Values, shuffled};

/// Which way is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    /// As of a rate.
    More,
    /// As of a time.
    Less,
    /// It is told and not compared.
    Neither,
}

/// A number of a sample.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measure {
    /// For people and for the result's file.
    pub(crate) name: &'static str,
    /// Its unit; "" of a ratio.
    pub(crate) unit: &'static str,
    /// Arms are compared with the first by it, if one way is better.
    pub(crate) better: Better,
    /// The table's further lines.
    pub(crate) also: Also,
}

/// Lines of the table below the median.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Also {
    Nothing,
    /// One in a hundred is at or above this.
    Tail,
    /// One in ten is at or below this, and at or above that; and the mean. Where times have two
    /// peaks the median says which is higher and the mean what is paid.
    Spread,
}

/// A measure.
pub(crate) const fn measure(name: &'static str, unit: &'static str, better: Better) -> Measure {
    Measure { name, unit, better, also: Also::Nothing }
}

impl Measure {
    /// The same, with one in a hundred in the table.
    pub(crate) const fn with_tail(self) -> Self {
        Self { also: Also::Tail, ..self }
    }

    /// The same, with one in ten and the mean.
    pub(crate) const fn with_spread(self) -> Self {
        Self { also: Also::Spread, ..self }
    }
}

/// The description of an experiment.
#[derive(Debug)]
pub(crate) struct Experiment {
    /// Its directory below `target`, where its result is `result.json`.
    pub(crate) name: &'static str,
    /// In the order of the table.
    pub(crate) measures: &'static [Measure],
    /// All that was asked for. A run goes on with the samples of one that was cut off only if both
    /// were asked for the same.
    pub(crate) settings: Value,
    /// The result's file, instead.
    pub(crate) out: Option<PathBuf>,
}

impl Experiment {
    /// The result's file.
    pub(crate) fn path(&self) -> PathBuf {
        let default = || source_root().join("target").join(self.name).join("result.json");
        self.out.clone().unwrap_or_else(default)
    }
}

#[cfg(test)]
mod tests;
