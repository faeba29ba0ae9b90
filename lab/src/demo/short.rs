//! `make demo` alone: two cases, four sizes, three columns, and a page to read.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use super::page::{Shown, is_sound, page, summary};
use super::{Direction, NetPath, Options, Terms};
use crate::image::source_root;
use crate::link::Link;
use crate::sched::Scheduler;

/// Sizes of transfers in whole slices, and else.
const SIZES_OF_SLICES: [usize; 2] = [1_000_000, 10_000_000];
const SIZES: [usize; 2] = [100_000, 10_000_000];

/// How long the machine is watched before the run, and which part of it others may use.
const LOOK: Duration = Duration::from_secs(1);
const BUSY: f64 = 0.1;

/// All of the run besides the transfers and the images: booting twice.
const AROUND: Duration = Duration::from_secs(40);

impl Options {
    /// The short form: what an operator has as installed, and with all that is opt-in, beside tap.
    #[must_use]
    pub(super) fn short(self) -> Self {
        Self {
            cases: vec![
                Terms::usual(Scheduler::Strict30, Link::Metro),
                Terms::usual(Scheduler::Eevdf, Link::Lan),
            ],
            directions: vec![Direction::Up, Direction::Down],
            paths: vec![NetPath::Tap, NetPath::AckOffload, NetPath::AckOffloadBoost],
            down_paths: vec![NetPath::Tap, NetPath::AckOffload, NetPath::FloodRouteBoost],
            sizes: None,
            requests: 0,
            full: false,
            is_short: true,
            ..self
        }
    }

    /// The paths of uploads that are captured for the trace checker.
    pub(super) fn traced_paths(&self) -> &[NetPath] {
        let traced = self.directions.contains(&Direction::Up) && !self.is_short;
        if traced { &self.paths } else { &[] }
    }

    /// The same for one case. In whole slices vCPUs have a real-time class, and boost refuses them.
    pub(super) fn of_case(&self, scheduler: Scheduler) -> Self {
        let mut options = self.clone();
        if self.is_short {
            options.time = time_of(scheduler);
        }
        if self.is_short && scheduler == Scheduler::Strict30 {
            for paths in [&mut options.paths, &mut options.down_paths] {
                paths.iter_mut().for_each(|path| *path = path.unboosted());
                paths.dedup();
            }
        }
        options
    }

    /// How long it takes, about.
    pub(super) fn about(&self) -> Duration {
        AROUND + self.cases.iter().map(|case| time_of(case.scheduler)).sum::<Duration>()
    }
}

/// Time for the transfers of a case. In whole slices a round of downloads takes 7 s, and an
/// interval takes six rounds.
const fn time_of(scheduler: Scheduler) -> Duration {
    Duration::from_secs(if matches!(scheduler, Scheduler::Strict30) { 84 } else { 36 })
}

/// The sizes of the short form.
pub(super) const fn sizes(scheduler: Scheduler) -> [usize; 2] {
    match scheduler {
        Scheduler::Strict30 => SIZES_OF_SLICES,
        _ => SIZES,
    }
}

/// Says that others use this machine, if they do.
pub(super) fn warn_if_busy() {
    let Some(before) = busy_and_all() else { return };
    thread::sleep(LOOK); // the point of it
    let Some(after) = busy_and_all() else { return };
    let all = after.1.saturating_sub(before.1).max(1);
    let share = after.0.saturating_sub(before.0) as f64 / all as f64;
    if share > BUSY {
        let percent = share * 100.0;
        eprintln!("This machine is busy: others use {percent:.0} % of its cores, and the times");
        eprintln!("below show that too. Stop them, and run this again.");
    }
}

/// Ticks of all cores that were not idle, and all, by `/proc/stat` (proc(5)).
fn busy_and_all() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    let first = text.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = first.split_whitespace().filter_map(|it| it.parse().ok()).collect();
    let all = ticks.iter().take(8).sum();
    let idle = ticks.get(3)? + ticks.get(4)?; // with what waits for a disk
    Some((all - idle, all))
}

/// Prints the summary and writes the page; whether nothing is wrong.
pub(super) fn finish(cases: &[Shown<'_>]) -> Result<bool> {
    let path = source_root().join("target/demo/report.html");
    let dir = path.parent().context("a file has a directory")?;
    fs::create_dir_all(dir)?;
    fs::write(&path, page(cases)).with_context(|| format!("writing {}", path.display()))?;
    print!("{}", summary(cases));
    Ok(is_sound(cases))
}
