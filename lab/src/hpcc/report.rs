//! The results of runs of the HPC Challenge.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::demo_toe::Between;
use crate::peer::Sockets;
use crate::report::stats::{Ratio, round3};

/// A number of hpcc's summary.
#[derive(Debug)]
struct Metric {
    /// Its name there.
    name: &'static str,
    /// For people.
    text: &'static str,
    /// Its unit here, and the factor for its number there.
    unit: (&'static str, f64),
    /// More of it is better.
    is_rate: bool,
    /// The TOE's gain over the overlay in the VTOE paper (its figures 5 and 6 and their text).
    paper: &'static str,
}

const fn metric(
    name: &'static str,
    text: &'static str,
    unit: (&'static str, f64),
    is_rate: bool,
    paper: &'static str,
) -> Metric {
    Metric { name, text, unit, is_rate, paper }
}

const MICROSECONDS: (&str, f64) = ("us", 1.0);
/// Of gigabytes a second.
const MEGABITS: (&str, f64) = ("Mbit/s", 8000.0);

const METRICS: [Metric; 9] = [
    metric("AvgPingPongLatency_usec", "ping-pong latency", MICROSECONDS, false, "2"),
    metric("AvgPingPongBandwidth_GBytes", "ping-pong bandwidth", MEGABITS, true, "2 to 3"),
    metric("NaturallyOrderedRingLatency_usec", "natural ring latency", MICROSECONDS, false, "2"),
    metric(
        "NaturallyOrderedRingBandwidth_GBytes",
        "natural ring bandwidth",
        MEGABITS,
        true,
        "2 to 3",
    ),
    metric("RandomlyOrderedRingLatency_usec", "random ring latency", MICROSECONDS, false, "2"),
    metric(
        "RandomlyOrderedRingBandwidth_GBytes",
        "random ring bandwidth",
        MEGABITS,
        true,
        "2 to 3",
    ),
    metric("MPIRandomAccess_GUPs", "MPIRandomAccess", ("kUP/s", 1e6), true, "1.3 to 1.6"),
    metric("PTRANS_GBs", "PTRANS", MEGABITS, true, "10 to 20"),
    metric("MPIFFT_Gflops", "MPIFFT", ("Mflop/s", 1000.0), true, "2 to 5"),
];

/// As the tables of the demo call it.
pub(super) const fn name(path: Sockets) -> &'static str {
    match path {
        Sockets::Native => "overlay",
        Sockets::Toe => "toe",
    }
}

/// One run: a number for each metric.
#[derive(Debug, Clone)]
pub(super) struct Run {
    guests: usize,
    path: Sockets,
    values: Vec<f64>,
}

impl Run {
    /// Of what hpcc has written.
    ///
    /// # Errors
    /// It says that it failed, or that what it has computed is wrong; or there is a number missing.
    pub(super) fn read(guests: usize, path: Sockets, text: &str) -> Result<Self> {
        let number = |name: &str| -> Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            let line = line.with_context(|| format!("no {name} in what hpcc wrote: {text}"))?;
            line.trim().parse().with_context(|| format!("{name}={line}"))
        };
        ensure!(number("Success")? == 1.0, "hpcc has failed: {text}");
        ensure!(number("CommWorldProcs")? == guests as f64, "not all processes took part");
        // It lets one in a hundred updates be lost; none may be lost here.
        ensure!(number("MPIRandomAccess_Errors")? == 0.0, "MPIRandomAccess has lost updates");
        let failed = text.lines().find(|line| line.contains("FAILED") && !line.contains(" 0 "));
        ensure!(failed.is_none(), "hpcc has failed: {failed:?}");
        let value = |metric: &Metric| Ok(number(metric.name)? * metric.unit.1);
        Ok(Self { guests, path, values: METRICS.iter().map(value).collect::<Result<_>>()? })
    }

    /// For people who wait.
    pub(super) fn line(&self) -> String {
        let mut line = format!("{} guests by {}:", self.guests, name(self.path));
        for (metric, value) in METRICS.iter().zip(&self.values) {
            let _ = write!(line, " {value:.1} {},", metric.unit.0);
        }
        line.trim_end_matches(',').to_owned()
    }
}

/// A metric by both paths.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    guests: usize,
    metric: &'static str,
    unit: &'static str,
    overlay: f64,
    toe: f64,
    /// How many times better by TOE, with the 95 % interval of six pairs of runs and more.
    better: Ratio,
    paper: &'static str,
    /// In the order of the rounds: overlay and TOE.
    samples: Vec<(f64, f64)>,
}

/// All rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    guest: Between,
    rows: Vec<Row>,
}

impl Report {
    pub(super) fn of(runs: &[Run], guest: Between) -> Self {
        let mut rows = Vec::new();
        let mut counts: Vec<usize> = runs.iter().map(|run| run.guests).collect();
        counts.dedup();
        for guests in counts {
            let of = |path| runs.iter().filter(move |run| run.guests == guests && run.path == path);
            for (at, metric) in METRICS.iter().enumerate() {
                let pairs = of(Sockets::Native).zip(of(Sockets::Toe));
                let samples: Vec<(f64, f64)> = pairs
                    .map(|(native, toe)| (round3(native.values[at]), round3(toe.values[at])))
                    .collect();
                let ordered: Vec<(f64, f64)> = samples
                    .iter()
                    .map(
                        |&(native, toe)| if metric.is_rate { (toe, native) } else { (native, toe) },
                    )
                    .collect();
                let Some(better) = Ratio::of_medians(&ordered) else { continue };
                let medians = median_of(&samples);
                rows.push(Row {
                    guests,
                    metric: metric.text,
                    unit: metric.unit.0,
                    overlay: medians.0,
                    toe: medians.1,
                    better,
                    paper: metric.paper,
                    samples,
                });
            }
        }
        Self { guest, rows }
    }

    /// Whether the TOE was better in each.
    #[must_use]
    pub fn is_better(&self) -> bool {
        self.rows.iter().all(|row| row.better.ratio > 1.0)
    }

    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = format!(
            "\n{:7} {:23} {:8} {:>10} {:>10} {:>7} {:16} {:>10}\n",
            "guests", "metric", "unit", "overlay", "toe", "better", "95 %", "paper"
        );
        for row in &self.rows {
            let Ratio { ratio, low, high } = row.better;
            let interval = match high.is_finite() {
                true => format!("{low:.2} to {high:.2}"),
                false => "too few runs".to_owned(),
            };
            let (overlay, toe) = (row.overlay, row.toe);
            let verdict = if ratio > 1.0 { "" } else { "  NOT BETTER" };
            let _ = writeln!(
                out,
                "{:<7} {:23} {:8} {overlay:>10.1} {toe:>10.1} {ratio:>7.2} {interval:16} \
                 {:>10}{verdict}",
                row.guests, row.metric, row.unit, row.paper
            );
        }
        out
    }

    /// As JSON.
    pub(super) fn write_json(&self, path: &std::path::Path) -> Result<()> {
        let dir = path.parent().context("a file has a directory")?;
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    }
}

fn median_of(samples: &[(f64, f64)]) -> (f64, f64) {
    let median = |of: fn(&(f64, f64)) -> f64| {
        crate::report::stats::Quantiles::of(samples.iter().map(of)).map_or(0.0, |all| all.p50)
    };
    (median(|pair| pair.0), median(|pair| pair.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of hpcc, if each number is this one.
    fn said(number: f64, errors: u32) -> String {
        let mut text = format!(
            "Begin of Summary section.\nSuccess=1\nCommWorldProcs=2\n\
             MPIRandomAccess_Errors={errors}\n"
        );
        for metric in &METRICS {
            let _ = writeln!(text, "{}={number:e}", metric.name);
        }
        text
    }

    #[test]
    fn half_the_latency_and_half_the_bandwidth_are_better_and_worse() {
        let run = |path, number| Run::read(2, path, &said(number, 0)).expect("whole");
        let runs = [run(Sockets::Native, 0.004), run(Sockets::Toe, 0.002)];
        let report = Report::of(&runs, Between::Uml);
        let ratios: Vec<f64> = report.rows.iter().map(|row| row.better.ratio).collect();
        assert_eq!(ratios[..2], [2.0, 0.5]);
        assert_eq!((report.rows[1].overlay, report.rows[1].toe), (32.0, 16.0), "in Mbit/s");
        assert!(!report.is_better() && report.table().contains("NOT BETTER"));
    }

    #[test]
    fn a_run_that_lost_updates_or_a_number_is_none() {
        assert!(Run::read(2, Sockets::Toe, &said(1.0, 1)).is_err());
        assert!(Run::read(4, Sockets::Toe, &said(1.0, 0)).is_err(), "of other processes");
        let text = said(1.0, 0).replace("PTRANS_GBs", "PTRANS");
        assert!(Run::read(2, Sockets::Toe, &text).is_err());
    }
}
