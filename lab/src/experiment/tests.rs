use std::path::PathBuf;

use serde_json::json;

use super::verdict::{Check, Wanted};
use super::{Better, Cell, Experiment, Measure, Results, Rounds, Values, measure};
use crate::progress::Progress;

const MEASURES: [Measure; 3] = [
    measure("rate", "Mbit/s", Better::More),
    measure("time", "ms", Better::Less).with_tail(),
    measure("load", "", Better::Neither),
];

/// A file that goes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("np-experiment-{name}-{}", std::process::id()));
        Self(dir)
    }

    fn experiment(&self, rounds: usize) -> Experiment {
        let (settings, out) = (json!({ "rounds": rounds }), Some(self.0.join("result.json")));
        Experiment { name: "test", measures: &MEASURES, settings, out }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn cells() -> Vec<Cell> {
    ["tap", "ours"].map(|arm| Cell::new("one", arm)).into()
}

fn values(rate: f64) -> Values {
    let of = vec![("rate", rate), ("time", 1000.0 / rate), ("load", f64::NAN)];
    Values { of, ..Values::default() }
}

#[test]
fn a_run_that_was_cut_off_goes_on_and_another_does_not() {
    let scratch = Scratch::new("goes-on");
    let run = |rounds: usize, fails_at: usize| {
        let mut results = Results::open(&scratch.experiment(rounds)).expect("a machine");
        let mut taken = Vec::new();
        let of_all = Rounds::exactly(rounds);
        let ended = results.rounds(&cells(), of_all, &mut Progress::start(), |arm, round| {
            anyhow::ensure!(taken.len() < fails_at, "cut off");
            taken.push((round, arm));
            Ok(values(10.0))
        });
        (taken, ended.map(|()| results.finish().expect("written")).is_ok())
    };
    let (first, ended) = run(3, 4);
    assert!(!ended);
    let (rest, ended) = run(3, 9);
    assert!(ended);
    let mut all = [first, rest].concat();
    all.sort_unstable();
    assert_eq!(all, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)], "each once");
    assert_eq!(run(3, 9).0.len(), 6, "a finished one begins anew");
    run(3, 4);
    assert_eq!(run(2, 9).0.len(), 4, "asked for something else");
}

#[test]
fn arms_are_compared_by_rounds_that_both_have_and_the_table_has_80_columns() {
    let mut results = Results::of_nothing(&MEASURES);
    let arms = ["tap", "one", "two", "three", "four"].map(|arm| Cell::new("a case", arm));
    results.expect(&arms);
    for (n, arm) in arms.iter().enumerate() {
        (0..8).for_each(|round| results.note(arm, round, values(10.0 * (n + 1) as f64)));
    }
    results.note(&arms[1], 99, values(1e9)); // of a round that tap has not
    let gain = |measure| results.gain("a case", "one", "tap", measure).map(|gain| gain.ratio);
    let gains: Vec<_> = MEASURES.iter().map(gain).collect();
    assert_eq!(gains, [Some(2.0), Some(2.0), None]);
    assert_eq!(results.ratio("a case", "one", "nobody", "rate"), None);
    results.check(Check::of("a condition", 1.0, Wanted::AtMost(2.0)));
    let table = results.table();
    assert!(table.lines().skip(2).all(|line| line.chars().count() <= 80), "{table}");
    assert!(table.contains("times better") && table.contains("2.00[2.0,2.0]"), "{table}");
    assert_eq!(table.matches(" tap").count(), 2, "in both parts: {table}");
    assert!(table.contains("one in a hundred") && !table.contains("load"), "{table}");
    assert!(table.contains("yes          a condition: 1.00, at most 2"), "{table}");
}
