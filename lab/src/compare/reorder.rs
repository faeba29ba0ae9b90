//! `nightporter-lab compare --reorder`: what comes late and is not lost (FLOOD-44, FLOOD-45).
//!
//! A transfer of 10 MB over 16 Mbit/s and 40 ms, whose queue loses nothing, with frames that come
//! late, with and without SACK and timestamps: by Linux, and by the host for a guest that floods.
//! Several lines, each a world of its own, run side by side and share the cells; the first cell
//! also runs alone before, so that the two can be compared. A run that was stopped goes on.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::cells::Who;
use super::{Bench, PAUSE, flows};
use crate::host;
use crate::image::{Image, log_dir, source_root};
use crate::link::{Late, Shape};
use crate::report::stats::Quantiles;
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

/// One transfer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Transfer {
    seconds: f64,
    copies: u64,
}

/// The result of a cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Done {
    name: String,
    linux: Vec<Transfer>,
    ours: Vec<Transfer>,
    time_most: f64,
    /// Processes that wanted a core when it ended (`/proc/loadavg`).
    load: f64,
}

fn median(of: &[Transfer], value: impl Fn(&Transfer) -> f64) -> f64 {
    Quantiles::of(of.iter().map(value)).map_or(f64::NAN, |quantiles| quantiles.p50)
}

impl Done {
    /// Medians of time, s, and of copies.
    fn medians(of: &[Transfer]) -> (f64, f64) {
        (median(of, |t| t.seconds), median(of, |t| t.copies as f64))
    }

    fn is_kept(&self) -> bool {
        let ((linux, theirs), (ours, copies)) =
            (Self::medians(&self.linux), Self::medians(&self.ours));
        ours <= self.time_most * linux && copies <= COPIES_MOST.0 * theirs + COPIES_MOST.1
    }

    fn line(&self) -> String {
        let ((linux, theirs), (ours, copies)) =
            (Self::medians(&self.linux), Self::medians(&self.ours));
        let kept = if self.is_kept() { "kept" } else { "NOT KEPT" };
        format!(
            "| {} | {} | {linux:.2} | {theirs:.0} | {ours:.2} | {copies:.0} | {:.2} of {:.2} | \
             {kept} |",
            self.name,
            self.ours.len(),
            ours / linux,
            self.time_most
        )
    }
}

/// Runs all cells that the file does not have yet, on so many lines; whether all kept their bounds.
pub(super) fn run(
    lines: usize,
    rounds: usize,
    only: Option<&str>,
    out: Option<&Path>,
) -> Result<bool> {
    let default = source_root().join("target/compare/reorder/result.json");
    let path = out.unwrap_or(&default);
    let known: Vec<Done> = match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).context("the result of an earlier run")?,
        Err(_) => Vec::new(),
    };
    let image = Image::for_uml()?;
    let mut cells = Cell::all();
    cells.retain(|cell| only.is_none_or(|only| cell.name.contains(only)));
    let mut alone: VecDeque<Cell> = cells.iter().take(1).cloned().collect();
    alone.iter_mut().for_each(|cell| cell.name += ", alone");
    let done = Mutex::new(known);
    for (cells, lines) in [(alone, 1), (cells, lines)] {
        let mut left = cells;
        left.retain(|cell| !done.lock().expect("whole").iter().any(|d| d.name == cell.name));
        let lines = lines.min(left.len());
        let left = Mutex::new(left);
        let (left, done, image) = (&left, &done, &image);
        thread::scope(|scope| {
            let begin = |line| scope.spawn(move || run_line(line, rounds, image, left, done, path));
            let lines: Vec<_> = (0..lines).map(begin).collect();
            lines.into_iter().try_for_each(|line| line.join().expect("does not panic"))
        })?;
    }
    let done = done.into_inner().expect("whole");
    println!("| path | runs | Linux, s | copies | Nightporter, s | copies | ratio | |");
    println!("|---|---:|---:|---:|---:|---:|---|---|");
    done.iter().for_each(|cell| println!("{}", cell.line()));
    println!("Every run: {}", path.display());
    Ok(done.iter().all(Done::is_kept))
}

/// A line's world, and the cells that it takes of those left.
fn run_line(
    line: usize,
    rounds: usize,
    image: &Image,
    left: &Mutex<VecDeque<Cell>>,
    done: &Mutex<Vec<Done>>,
    path: &Path,
) -> Result<()> {
    let run_dir = RunDir::create()?;
    let logs = log_dir(&format!("compare-reorder-{line}"))?;
    let places = Places { sockets: run_dir.path(), logs: &logs };
    let mut bench = Bench::start(SHAPE, image, places)?;
    loop {
        let Some(cell) = left.lock().expect("whole").pop_front() else { break };
        let cell = bench.compare(&cell, rounds)?;
        eprintln!("{}", cell.line());
        let mut done = done.lock().expect("whole");
        done.push(cell);
        let dir = path.parent().context("a file has a directory")?;
        fs::create_dir_all(dir)?;
        fs::write(path, serde_json::to_string_pretty(&*done)?)?;
    }
    bench.world.stop()
}

impl Bench {
    fn compare(&mut self, cell: &Cell, rounds: usize) -> Result<Done> {
        self.world.remote().enter(|| -> Result<()> {
            for (name, on) in [("tcp_sack", cell.sack), ("tcp_timestamps", cell.stamps)] {
                host::sysctl(&format!("net/ipv4/{name}"), if on { "1" } else { "0" })?;
            }
            Ok(())
        })?;
        self.watch()?.late = cell.late;
        let (mut linux, mut ours) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            for turn in 0..2 {
                if (round + turn) % 2 == 0 {
                    linux.push(self.transfer(Who::Linux)?);
                } else {
                    ours.push(self.transfer(Who::Nightporter)?);
                }
            }
        }
        let load = fs::read_to_string("/proc/loadavg")?;
        let load = load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(f64::NAN);
        Ok(Done { name: cell.name.clone(), linux, ours, time_most: cell.time_most, load })
    }

    fn transfer(&mut self, who: Who) -> Result<Transfer> {
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
        Ok(Transfer { seconds: took.as_secs_f64(), copies })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(linux: (f64, u64), ours: (f64, u64)) -> Done {
        let of = |(seconds, copies)| vec![Transfer { seconds, copies }];
        let (linux, ours) = (of(linux), of(ours));
        Done { name: String::new(), linux, ours, time_most: TIME_MOST, load: 0.0 }
    }

    #[test]
    fn a_cell_is_kept_within_its_time_and_its_copies() {
        assert!(done((5.0, 4), (5.7, 18)).is_kept());
        assert!(!done((5.0, 4), (5.8, 18)).is_kept());
        assert!(!done((5.0, 4), (5.0, 19)).is_kept());
    }

    #[test]
    fn only_without_sack_a_lateness_of_a_round_trip_may_cost_half_as_much_again() {
        let blind = Cell::all().into_iter().filter(|cell| cell.time_most > TIME_MOST);
        let names: Vec<String> = blind.map(|cell| cell.name).collect();
        assert_eq!(names.len(), 6, "{names:?}");
        assert!(names.iter().all(|name| name.contains("60 ms, SACK off")), "{names:?}");
    }
}
