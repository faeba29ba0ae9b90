//! `nightporter-lab compare --reorder`: what comes late and is not lost (FLOOD-44, FLOOD-45).
//!
//! A transfer of 10 MB over 16 Mbit/s and 40 ms, whose queue loses nothing, with frames that come
//! late, with and without SACK and timestamps: by Linux, and by the host for a guest that floods.
//! Several lines, each a world of its own, run side by side and share the cells; the first cell
//! also runs alone before, so that the two can be compared. A run that was stopped goes on.

use std::collections::VecDeque;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::cells::Who;
use super::{Bench, PAUSE, flows};
use crate::experiment::verdict::{Check, Wanted};
use crate::experiment::{self, Better, Experiment, Measure, Results, Values, measure};
use crate::host;
use crate::image::{Image, log_dir};
use crate::link::{Late, Shape};
use crate::rundir::RunDir;
use crate::vmm::Places;

/// The transfer, and how long it may take.
const BYTES: u64 = 10_000_000;
const LIMIT: Duration = Duration::from_secs(90);

/// The most that the host may take of Linux's time: where no more can be known than Linux does, and
/// without SACK where the lateness is a round trip or more.
const TIME_MOST: f64 = 1.15;
const TIME_MOST_BLIND: f64 = 1.5;
/// Copies: so many times Linux's, and so many more.
const COPIES_MOST: (f64, f64) = (2.0, 10.0);

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// The line.
const SHAPE: Shape = Shape { rate: 16_000_000, round_trip: ms(40), by_frame: true, ..Shape::GOOD };

/// One cell.
#[derive(Debug, Clone)]
struct Cell {
    name: String,
    late: Late,
    sack: bool,
    stamps: bool,
    time_most: f64,
}

impl Cell {
    fn all() -> VecDeque<Self> {
        let mut kinds = vec![
            ("stalls of 1 s each 4 s".to_owned(), Late::Stands { each: ms(4000), still: ms(1000) }),
            ("jitter 0-5 ms".to_owned(), Late::Jitter(ms(5))),
            ("one late by 3 ms".to_owned(), Late::Frame(100, ms(3))),
            ("none late".to_owned(), Late::Never),
        ];
        for many in [1000, 100, 20] {
            for by in [3, 12, 30, 60] {
                let name = format!("1 of {many} late by {by} ms");
                kinds.insert(0, (name, Late::OneOf(many, ms(by))));
            }
        }
        let with = |(sack, stamps)| {
            kinds.iter().map(move |(kind, late)| {
                let is = |on| if on { "on" } else { "off" };
                let name = format!("{kind}, SACK {}, timestamps {}", is(sack), is(stamps));
                let blind = !sack && matches!(late, Late::OneOf(_, by) if *by >= SHAPE.round_trip);
                let time_most = if blind { TIME_MOST_BLIND } else { TIME_MOST };
                Self { name, late: *late, sack, stamps, time_most }
            })
        };
        let ways = [(true, true), (true, false), (false, true), (false, false)];
        ways.into_iter().flat_map(with).collect()
    }
}

const TIME: &str = "time";
const COPIES: &str = "segments sent again";
const MEASURES: [Measure; 2] =
    [measure(TIME, "s", Better::Less), measure(COPIES, "", Better::Neither)];
/// Linux, and the host for a guest.
const ARMS: [(&str, Who); 2] = [("linux", Who::Linux), ("nightporter", Who::Nightporter)];

/// The two arms.
fn arms(cell: &Cell) -> [experiment::Cell; 2] {
    ARMS.map(|(arm, _)| experiment::Cell::new(&*cell.name, arm))
}

/// Both conditions of a cell.
fn judge(results: &mut Results, cell: &Cell) {
    let case = &*cell.name;
    let [linux, ours] = ARMS.map(|(arm, _)| arm);
    let copies = [linux, ours].map(|arm| results.quantiles(case, arm, COPIES));
    let time = results.ratio(case, ours, linux, TIME);
    let (Some(time), [Some(theirs), Some(copies)]) = (time, copies) else { return };
    let most = Wanted::AtMost(cell.time_most);
    results.check(Check::of_median(format!("{case}, time: {ours} over {linux}"), time, most));
    let most = Wanted::AtMost(COPIES_MOST.0 * theirs.p50 + COPIES_MOST.1);
    results.check(Check::of(format!("{case}, {ours}: {COPIES}"), copies.p50, most));
}

/// Runs all cells that an earlier run has not, on so many lines; whether all kept their bounds.
pub(super) fn run(
    lines: usize,
    rounds: usize,
    only: Option<&str>,
    out: Option<PathBuf>,
) -> Result<bool> {
    let image = Image::for_uml()?;
    let mut cells = Cell::all();
    cells.retain(|cell| only.is_none_or(|only| cell.name.contains(only)));
    let mut alone: VecDeque<Cell> = cells.iter().take(1).cloned().collect();
    alone.iter_mut().for_each(|cell| cell.name += ", alone");
    let mut results = Results::open(&Experiment {
        name: "compare/reorder",
        measures: &MEASURES,
        settings: json!({ "lines": lines, "rounds": rounds, "only": only }),
        out,
    })?;
    let all: Vec<Cell> = alone.iter().chain(&cells).cloned().collect();
    all.iter().for_each(|cell| results.expect(&arms(cell)));
    let shared = Mutex::new(results);
    for (mut left, lines) in [(alone, 1), (cells, lines)] {
        left.retain(|cell| shared.lock().expect("whole").lacks(&arms(cell), rounds));
        let lines = lines.min(left.len());
        let left = Mutex::new(left);
        let (left, results, image) = (&left, &shared, &image);
        thread::scope(|scope| {
            let begin = |line| scope.spawn(move || run_line(line, rounds, image, left, results));
            let lines: Vec<_> = (0..lines).map(begin).collect();
            lines.into_iter().try_for_each(|line| line.join().expect("does not panic"))
        })?;
    }
    let mut results = shared.into_inner().expect("whole");
    all.iter().for_each(|cell| judge(&mut results, cell));
    results.finish()
}

/// A line's world, and the cells that it takes of those left.
fn run_line(
    line: usize,
    rounds: usize,
    image: &Image,
    left: &Mutex<VecDeque<Cell>>,
    results: &Mutex<Results>,
) -> Result<()> {
    let run_dir = RunDir::create()?;
    let logs = log_dir(&format!("compare-reorder-{line}"))?;
    let places = Places { sockets: run_dir.path(), logs: &logs };
    let mut bench = Bench::start(SHAPE, image, places)?;
    loop {
        let Some(cell) = left.lock().expect("whole").pop_front() else { break };
        eprintln!("line {line}: {}", cell.name);
        let samples = bench.compare(&cell, rounds)?;
        let mut results = results.lock().expect("whole");
        for (round, arm, values) in samples {
            results.note(&arms(&cell)[arm], round, values);
        }
        results.keep()?;
    }
    bench.world.stop()
}

impl Bench {
    /// All rounds of a cell: round, arm and numbers.
    fn compare(&mut self, cell: &Cell, rounds: usize) -> Result<Vec<(usize, usize, Values)>> {
        self.world.remote().enter(|| -> Result<()> {
            for (name, on) in [("tcp_sack", cell.sack), ("tcp_timestamps", cell.stamps)] {
                host::sysctl(&format!("net/ipv4/{name}"), if on { "1" } else { "0" })?;
            }
            Ok(())
        })?;
        self.watch()?.late = cell.late;
        let mut samples = Vec::new();
        for round in 0..rounds {
            for turn in 0..2 {
                let arm = (round + turn) % 2;
                let (took, copies) = self.transfer(ARMS[arm].1)?;
                let of = vec![(TIME, took.as_secs_f64()), (COPIES, copies as f64)];
                // Processes that want a core.
                let load = fs::read_to_string("/proc/loadavg")?;
                let detail = json!({ "load": load.split(' ').next() });
                samples.push((round, arm, Values { of, detail }));
            }
        }
        Ok(samples)
    }

    fn transfer(&mut self, who: Who) -> Result<(Duration, u64)> {
        let (sender, reader) = self.addresses(who, false);
        let before = self.world.daemon()?.vm_counter("sent_for_guest_bytes")?;
        let remote = self.world.remote();
        let (took, reader) = remote.enter(|| flows::fetch(sender, reader, BYTES, LIMIT))?;
        let mut watch = self.watch()?;
        let copies = watch.take(sender, reader).context("the line saw no data")?.repeated;
        drop(watch);
        // Bytes that are still under way get through, and the next transfer begins behind a pause.
        thread::sleep(PAUSE);
        while self.watch()?.waits() {
            thread::sleep(PAUSE);
        }
        thread::sleep(PAUSE + SHAPE.round_trip);
        self.watch()?.clear();
        if who == Who::Nightporter {
            let sent = self.world.daemon()?.vm_counter("sent_for_guest_bytes")? - before;
            anyhow::ensure!(sent >= BYTES, "the host has sent {sent} bytes only");
        }
        Ok((took, copies))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::verdict::Verdict;

    #[test]
    fn a_cell_is_kept_within_its_time_and_its_copies() {
        let kept = |linux: (f64, f64), ours: (f64, f64)| {
            let mut results = Results::of_nothing(&MEASURES);
            let cell = Cell { name: "cell".to_owned(), ..Cell::all()[0].clone() };
            for (arm, (seconds, copies)) in arms(&cell).iter().zip([linux, ours]) {
                let of = vec![(TIME, seconds), (COPIES, copies)];
                results.note(arm, 0, Values { of, ..Values::default() });
            }
            judge(&mut results, &cell);
            results.checks().iter().all(|check| check.verdict == Verdict::Kept)
        };
        assert!(kept((5.0, 4.0), (5.7, 18.0)));
        assert!(!kept((5.0, 4.0), (5.8, 18.0)));
        assert!(!kept((5.0, 4.0), (5.0, 19.0)));
    }

    #[test]
    fn only_without_sack_a_lateness_of_a_round_trip_may_cost_half_as_much_again() {
        let blind = Cell::all().into_iter().filter(|cell| cell.time_most > TIME_MOST);
        let names: Vec<String> = blind.map(|cell| cell.name).collect();
        assert_eq!(names.len(), 6, "{names:?}");
        assert!(names.iter().all(|name| name.contains("60 ms, SACK off")), "{names:?}");
    }
}
