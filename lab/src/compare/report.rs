//! The result of a comparison: a table, the verdicts, and `result.json`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::Run;
use super::cells::{Arm, Cell, Which};
use super::flows::SLOT;
use crate::link::{Measured, Shape};
use crate::report::stats::{Quantiles, Ratio, round3};

/// How far goodput may be from Linux's.
const GOODPUT_WITHIN: f64 = 0.05;
/// Jain's index of goodputs, at least.
const JAIN_LEAST: f64 = 0.95;

/// All cells.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) cells: Vec<CellReport>,
}

/// One bottleneck.
#[derive(Debug, Serialize)]
pub(super) struct CellReport {
    name: String,
    which: &'static str,
    shape: Shape,
    link_measured: Measured,
    seconds: f64,
    arms: Vec<ArmReport>,
    /// Of the last arm's goodput, all flows together, to the first's.
    goodput: Ratio,
    /// The same of the second half of each run.
    steady: Ratio,
    what: String,
    ok: bool,
}

/// One arm of a cell.
#[derive(Debug, Serialize)]
pub(super) struct ArmReport {
    name: String,
    #[serde(skip)]
    pub(super) runs: Vec<Vec<Run>>,
    sum: Option<Sum>,
    rows: Vec<Vec<Row>>,
}

/// Medians over the runs of an arm.
#[derive(Debug, Clone, Serialize)]
struct Sum {
    /// All flows together, Mbit/s.
    goodput: f64,
    /// The same in the second half.
    steady: f64,
    /// Each flow's part in the second half and a half before it.
    flows: Vec<f64>,
    /// Jain's index of them.
    jain: f64,
    /// Window behind a loss over window at it, without the first of each flow.
    response: Option<Quantiles>,
    /// Losses per second that were answered, all flows together.
    answered_per_s: f64,
    /// Of a hundred segments, those that were sent again.
    repeated_percent: f64,
    /// And those that were lost.
    lost_percent: f64,
    /// Mean wait in the queue, ms.
    waits_ms: f64,
}

/// One flow of one run.
#[derive(Debug, Clone, Serialize)]
struct Row {
    /// Of the whole run.
    goodput_mbit_s: f64,
    /// Of its second half.
    steady_mbit_s: f64,
    segments: u64,
    repeated: u64,
    lost: u64,
    /// Bytes under way at each loss, and behind its recovery.
    responses: Vec<(u64, u64)>,
    /// Each 0.1 s: Mbit/s.
    slots_mbit_s: Vec<f64>,
    /// Each 10 ms: since the beginning, ms; bytes under way; wait in the queue, ms.
    window: Vec<(f64, u64, f64)>,
}

impl Row {
    fn of(run: &Run) -> Self {
        let slot = |bytes: &u64| round3(mbit_s(*bytes, SLOT));
        let window = run.wire.samples.iter();
        Self {
            goodput_mbit_s: round3(run.rate(0)),
            steady_mbit_s: round3(run.rate(2)),
            segments: run.wire.segments,
            repeated: run.wire.repeated,
            lost: run.wire.lost,
            responses: run.wire.responses.clone(),
            slots_mbit_s: run.received.slots.iter().map(slot).collect(),
            window: window.map(|s| (ms(s.at), s.under_way, ms(s.waits))).collect(),
        }
    }
}

impl Run {
    /// Mbit/s as the reader saw it, without so many quarters of the run at its beginning.
    fn rate(&self, without: usize) -> f64 {
        let slots = &self.received.slots;
        let first = slots.len() * without / 4;
        let bytes = slots[first..].iter().sum();
        mbit_s(bytes, SLOT * u32::try_from(slots.len() - first).expect("minutes"))
    }
}

fn mbit_s(bytes: u64, time: Duration) -> f64 {
    8.0 * bytes as f64 / 1e6 / time.as_secs_f64()
}

fn ms(nanoseconds: u64) -> f64 {
    round3(nanoseconds as f64 / 1e6)
}

/// Jain's index of fairness: one if all have the same, 1/n if one has all.
fn jain(parts: &[f64]) -> f64 {
    let sum: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|part| part * part).sum();
    sum * sum / (parts.len() as f64 * squares)
}

/// Of at least one.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    Quantiles::of(values).map_or(f64::NAN, |quantiles| quantiles.p50)
}

impl ArmReport {
    pub(super) fn new(arm: &Arm) -> Self {
        Self { name: arm.name.clone(), runs: Vec::new(), sum: None, rows: Vec::new() }
    }

    fn summed(mut self, time: Duration) -> Self {
        let runs = &self.runs;
        let total = |run: &[Run], without| run.iter().map(|flow| flow.rate(without)).sum::<f64>();
        let share = |of: fn(&Run) -> u64| {
            let part = |run: &Vec<Run>| run.iter().map(of).sum::<u64>() as f64;
            let all = |run: &Vec<Run>| run.iter().map(|f| f.wire.segments).sum::<u64>() as f64;
            median(runs.iter().map(|run| 100.0 * part(run) / all(run)))
        };
        let parts = |run: &Vec<Run>| run.iter().map(|flow| flow.rate(1)).collect::<Vec<_>>();
        let responses = runs.iter().flatten().flat_map(|flow| flow.wire.responses.iter().skip(1));
        let answered = |run: &Vec<Run>| run.iter().map(|f| f.wire.responses.len()).sum::<usize>();
        let waits = |run: &Vec<Run>| {
            let samples = run.iter().flat_map(|flow| &flow.wire.samples);
            let (sum, count) = samples.fold((0, 0), |(sum, n), s| (sum + s.waits, n + 1));
            sum as f64 / f64::from(count) / 1e6
        };
        self.sum = Some(Sum {
            goodput: median(runs.iter().map(|run| total(run, 0))),
            steady: median(runs.iter().map(|run| total(run, 2))),
            flows: (0..runs[0].len()).map(|i| median(runs.iter().map(|r| r[i].rate(1)))).collect(),
            jain: median(runs.iter().map(|run| jain(&parts(run)))),
            response: Quantiles::of(responses.map(|&(before, after)| after as f64 / before as f64)),
            answered_per_s: median(runs.iter().map(|r| answered(r) as f64 / time.as_secs_f64())),
            repeated_percent: share(|flow| flow.wire.repeated),
            lost_percent: share(|flow| flow.wire.lost),
            waits_ms: median(runs.iter().map(waits)),
        });
        self.rows = runs.iter().map(|run| run.iter().map(Row::of).collect()).collect();
        self
    }

    fn sum(&self) -> &Sum {
        self.sum.as_ref().expect("summed up")
    }
}

impl CellReport {
    pub(super) fn new(
        cell: &Cell,
        link_measured: Measured,
        time: Duration,
        arms: Vec<ArmReport>,
    ) -> Self {
        let arms: Vec<ArmReport> = arms.into_iter().map(|arm| arm.summed(time)).collect();
        let ratio = |without| {
            let sum = |run: &Vec<Run>| run.iter().map(|flow| flow.rate(without)).sum();
            let (first, last) = (&arms[0], &arms[arms.len() - 1]);
            let pairs = last.runs.iter().map(sum).zip(first.runs.iter().map(sum));
            Ratio::of_medians(&pairs.collect::<Vec<_>>()).expect("a round at least")
        };
        let goodput: Ratio = ratio(0);
        let (what, ok) = match cell.which {
            Which::Alone => {
                let off = (goodput.ratio - 1.0).abs();
                (format!("goodput {} of Linux's", goodput.ratio), off <= GOODPUT_WITHIN)
            }
            Which::Beside => {
                let jain = arms[arms.len() - 1].sum().jain;
                (format!("Jain's index {jain}"), jain >= JAIN_LEAST)
            }
            Which::Far => ("shares by round trip".to_owned(), true),
        };
        Self {
            name: cell.to_string(),
            which: match cell.which {
                Which::Alone => "alone",
                Which::Beside => "beside",
                Which::Far => "far",
            },
            shape: cell.shape(),
            link_measured,
            seconds: time.as_secs_f64(),
            goodput,
            steady: ratio(2),
            arms,
            what,
            ok,
        }
    }

    /// The result of a cell, when it is done.
    pub(super) fn line(&self) -> String {
        let (kept, all, late) = (self.verdict(), self.goodput, self.steady.ratio);
        let mut out = format!(
            "{}: {}: {kept}\n  {:.2} [{:.2}, {:.2}] of Linux's, {late:.2} in second halves; \
             round trip {:.2} ms\n",
            self.name, self.what, all.ratio, all.low, all.high, self.link_measured.round_trip_ms
        );
        for arm in &self.arms {
            let sum = arm.sum();
            let flows: Vec<String> = sum.flows.iter().map(|rate| format!("{rate:.1}")).collect();
            let response = sum.response.map_or(f64::NAN, |response| response.p50);
            let _ = writeln!(
                out,
                "  {:>28} {:7.2} Mbit/s ({:7.2} late), window after a loss {response:.2}, {:.2} \
                 losses/s, lost {:.3} %, again {:.3} %, queue {:.1} ms, Jain {:.3}, flows {}",
                arm.name,
                sum.goodput,
                sum.steady,
                sum.answered_per_s,
                sum.lost_percent,
                sum.repeated_percent,
                sum.waits_ms,
                sum.jain,
                flows.join(" ")
            );
        }
        out
    }

    fn verdict(&self) -> &'static str {
        if self.ok { "kept" } else { "NOT KEPT" }
    }
}

/// Of the table.
const HEADER: &str = "| bottleneck | arm | runs | Mbit/s | Linux only, Mbit/s | ratio | |
|---|---|---:|---:|---:|---|---|
";

impl Report {
    pub(super) fn table(&self) -> String {
        let mut out = HEADER.to_owned();
        for cell in &self.cells {
            let (first, last) = (&cell.arms[0], &cell.arms[cell.arms.len() - 1]);
            let Ratio { ratio, low, high } = cell.goodput;
            let (runs, what, kept) = (last.rows.len(), &cell.what, cell.verdict());
            let (goodput, of_linux) = (last.sum().goodput, first.sum().goodput);
            let _ = writeln!(
                out,
                "| {} | {} | {runs} | {goodput:.2} | {of_linux:.2} | {ratio:.2} [{low:.2}, \
                 {high:.2}] | {what}: {kept} |",
                cell.name, last.name
            );
        }
        out
    }

    /// Whether all cells met their conditions.
    pub(super) fn kept(&self) -> bool {
        self.cells.iter().all(|cell| cell.ok)
    }

    pub(super) fn write_json(&self, path: &Path) -> Result<()> {
        let dir = path.parent().context("a file has a directory")?;
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let text = serde_json::to_string(self)?;
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jains_index_is_one_for_equals_and_one_over_n_for_a_tyrant() {
        assert!((jain(&[3.0, 3.0, 3.0]) - 1.0).abs() < 1e-12);
        assert!((jain(&[3.0, 0.0, 0.0]) - 1.0 / 3.0).abs() < 1e-12);
    }
}
