//! Requests and answers on an open connection, and what the other guests lost meanwhile.

use std::collections::BTreeMap;

use serde::Serialize;

use super::NetPath;
use crate::experiment::stats::{percentile, round3};

/// The measurements over one path.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// From when a request was due until its answer was there, in milliseconds.
    pub times: Vec<f64>,
    /// For each window of a second and each other guest: what it got less of the core than an equal
    /// share, in percent of a second.
    pub losses: Vec<f64>,
}

impl Asked {
    /// More of the same path.
    pub fn extend(&mut self, more: Self) {
        self.times.extend(more.times);
        self.losses.extend(more.losses);
    }
}

/// A row of `result.json`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Requests {
    /// The path.
    pub path: NetPath,
    /// How many there were.
    pub n: usize,
    p50_ms: f64,
    p90_ms: f64,
    p99_ms: f64,
    /// Times of this path over those of the tap, if that was measured.
    p50_of_tap: Option<f64>,
    /// See there.
    p99_of_tap: Option<f64>,
    /// Windows of a second, times the other guests.
    windows: usize,
    /// The loss of another guest in such a window, in percent of a second.
    neighbour_loss_p50: f64,
    /// See there.
    neighbour_loss_p99: f64,
}

impl Requests {
    /// Sums up a path; `None` without answers.
    #[must_use]
    pub fn of(path: NetPath, asked: &Asked, all: &BTreeMap<NetPath, Asked>) -> Option<Self> {
        let of_tap = |per_mille| {
            let tap = percentile(&all.get(&NetPath::Tap)?.times, per_mille)?;
            Some(round3(percentile(&asked.times, per_mille)? / tap))
        };
        let loss = |per_mille| percentile(&asked.losses, per_mille).map_or(0.0, round3);
        Some(Self {
            path,
            n: asked.times.len(),
            p50_ms: round3(percentile(&asked.times, 500)?),
            p90_ms: round3(percentile(&asked.times, 900)?),
            p99_ms: round3(percentile(&asked.times, 990)?),
            p50_of_tap: of_tap(500),
            p99_of_tap: of_tap(990),
            windows: asked.losses.len(),
            neighbour_loss_p50: loss(500),
            neighbour_loss_p99: loss(990),
        })
    }
}

impl std::fmt::Display for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, n, p50_ms, p90_ms, p99_ms, .. } = self;
        write!(f, "{:18} {n:5} {p50_ms:7.2} {p90_ms:7.2} {p99_ms:7.2}", path.name())?;
        for ratio in [self.p50_of_tap, self.p99_of_tap] {
            match ratio {
                Some(ratio) => write!(f, " {ratio:7.2}")?,
                None => write!(f, "       -")?,
            }
        }
        let (p50, p99) = (self.neighbour_loss_p50, self.neighbour_loss_p99);
        write!(f, " {p50:7.1} {p99:7.1} ({})", self.windows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_compared_with_the_tap_and_neighbours_losses_are_percentiles() {
        let asked = |from: u32| Asked {
            times: (0..=100).map(|ms| f64::from(from + ms)).collect(),
            losses: (-100..=100).map(f64::from).collect(),
        };
        let all = BTreeMap::from([(NetPath::Tap, asked(100)), (NetPath::Passt, asked(25))]);
        let row = Requests::of(NetPath::Passt, &all[&NetPath::Passt], &all).expect("answers");
        assert_eq!((row.n, row.windows), (101, 201));
        assert_eq!((row.p50_ms, row.p90_ms, row.p99_ms), (75.0, 115.0, 124.0));
        assert_eq!((row.p50_of_tap, row.p99_of_tap), (Some(0.5), Some(0.623)));
        assert_eq!((row.neighbour_loss_p50, row.neighbour_loss_p99), (0.0, 98.0));
        let alone = Requests::of(NetPath::Passt, &all[&NetPath::Passt], &BTreeMap::new());
        assert_eq!(alone.expect("answers").p50_of_tap, None);
        assert_eq!(Requests::of(NetPath::Tap, &Asked::default(), &all), None);
    }
}
