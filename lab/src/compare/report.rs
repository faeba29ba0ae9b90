//! The numbers of a run of an arm, and the conditions of a cell.

use std::time::Duration;

use serde_json::{Value, json};

use super::Run;
use super::cells::{Cell, Which};
use super::flows::SLOT;
use crate::experiment::stats::{percentile, round3};
use crate::experiment::verdict::{Check, Wanted};
use crate::experiment::{Better, Measure, Results, Values, measure};

/// How far goodput may be from Linux's.
const GOODPUT: Wanted = Wanted::Between(0.95, 1.05);
/// Jain's index of goodputs.
const JAIN: Wanted = Wanted::AtLeast(0.95);

/// Of all flows together.
const GOODPUT_OF_ALL: &str = "goodput";
const JAINS_INDEX: &str = "Jain's index";

pub(super) const MEASURES: [Measure; 8] = [
    measure(GOODPUT_OF_ALL, "Mbit/s", Better::More),
    measure("its second half", "Mbit/s", Better::More),
    measure(JAINS_INDEX, "", Better::Neither),
    // Behind a loss, over that at it, without the first of each flow.
    measure("window after a loss", "", Better::Neither),
    measure("losses answered", "1/s", Better::Neither),
    measure("sent again", "%", Better::Neither),
    measure("lost", "%", Better::Neither),
    measure("wait in the queue", "ms", Better::Neither),
];

/// Of one run of an arm.
pub(super) fn values(runs: &[Run], time: Duration) -> Values {
    let total = |without| runs.iter().map(|flow| flow.rate(without)).sum::<f64>();
    let segments: u64 = runs.iter().map(|flow| flow.wire.segments).sum();
    let percent =
        |of: fn(&Run) -> u64| 100.0 * runs.iter().map(of).sum::<u64>() as f64 / segments as f64;
    // Behind the first quarter.
    let parts: Vec<f64> = runs.iter().map(|flow| flow.rate(1)).collect();
    let responses = runs.iter().flat_map(|flow| flow.wire.responses.iter().skip(1));
    let responses: Vec<f64> =
        responses.map(|&(before, after)| after as f64 / before as f64).collect();
    let answered: usize = runs.iter().map(|flow| flow.wire.responses.len()).sum();
    let waits: Vec<u64> =
        runs.iter().flat_map(|flow| &flow.wire.samples).map(|sample| sample.waits).collect();
    let numbers = [
        total(0),
        total(2),
        jain(&parts),
        percentile(&responses, 500).unwrap_or(f64::NAN),
        answered as f64 / time.as_secs_f64(),
        percent(|flow| flow.wire.repeated),
        percent(|flow| flow.wire.lost),
        waits.iter().sum::<u64>() as f64 / waits.len() as f64 / 1e6,
    ];
    let of = MEASURES.iter().map(|measure| measure.name).zip(numbers).collect();
    Values { of, detail: json!({ "flows": runs.iter().map(detail).collect::<Vec<_>>() }) }
}

/// One flow.
fn detail(run: &Run) -> Value {
    let slots = run.received.slots.iter().map(|bytes| round3(mbit_s(*bytes, SLOT)));
    let window = run.wire.samples.iter().map(|s| (ms(s.at), s.under_way, ms(s.waits)));
    json!({
        "goodput_mbit_s": round3(run.rate(0)),
        "second_half_mbit_s": round3(run.rate(2)),
        "segments": run.wire.segments,
        "repeated": run.wire.repeated,
        "lost": run.wire.lost,
        // Bytes under way at each loss, and behind its recovery.
        "responses": run.wire.responses,
        "each_100_ms_mbit_s": slots.collect::<Vec<_>>(),
        // Each 10 ms: since the beginning, ms; bytes under way; wait in the queue, ms.
        "window": window.collect::<Vec<_>>(),
    })
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

/// The condition of a cell: its last arm, which is ours, beside its first, which is Linux's.
pub(super) fn judge(results: &mut Results, cell: &Cell) {
    let case = cell.to_string();
    let [first, last] = [&cell.arms[0].name, &cell.arms[cell.arms.len() - 1].name];
    let check = match cell.which {
        Which::Alone => results.ratio(&case, last, first, GOODPUT_OF_ALL).map(|ratio| {
            Check::of_median(format!("{case}, goodput: {last} over {first}"), ratio, GOODPUT)
        }),
        Which::Beside => results
            .quantiles(&case, last, JAINS_INDEX)
            .map(|jain| Check::of(format!("{case}, {last}: {JAINS_INDEX}"), jain.p50, JAIN)),
        Which::Far => None,
    };
    check.into_iter().for_each(|check| results.check(check));
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
