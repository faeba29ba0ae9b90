//! `make figures`: experiments of the papers, on real guests, and one page about all of them.
//!
//! A [`Study`] is a run of the demo with its own guests, loads and placement; a figure of a paper
//! is drawn from one or more of them ([`page`]). Each study has a result of its own, so a run that
//! was cut off goes on, and one that is there is not taken again.

mod page;

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde_json::{Value, json};

use crate::accel::Accel;
use crate::always_on;
use crate::cpus::Cores;
use crate::delays;
use crate::demo::{self, Direction, NetPath, Options, Terms};
use crate::experiment::{Experiment, Results};
use crate::image::source_root;
use crate::link::Link;
use crate::placement::{HostCore, Placement};
use crate::process;
use crate::sched::{Layout, Scheduler};
use crate::together;

/// How long it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Effort {
    /// A quarter of an hour.
    Quick,
    /// Hours.
    Usual,
    /// A night.
    Full,
}

/// A run of the demo.
struct Study {
    /// Its directory below `target`.
    name: &'static str,
    /// The numbers of guests, and what each wants of its core: a case for each.
    guests: &'static [usize],
    loads: &'static [u64],
    host: HostCore,
    direction: Direction,
}

/// All of them: the vSnoop paper's Figures 1(a), 5 and 6, and vFlood's Figure 1.
const STUDIES: [Study; 4] = [
    Study {
        name: "figure-vms",
        guests: &[1, 2, 3, 5],
        loads: &[60],
        host: HostCore::Guests,
        direction: Direction::Up,
    },
    Study {
        name: "figure-loads",
        guests: &[3],
        loads: &[40, 80],
        host: HostCore::Guests,
        direction: Direction::Up,
    },
    Study {
        name: "figure-own-core",
        guests: &[3],
        loads: &[60],
        host: HostCore::Own,
        direction: Direction::Up,
    },
    Study {
        name: "figure-sender",
        guests: &[3],
        loads: &[40],
        host: HostCore::Guests,
        direction: Direction::Down,
    },
];

impl Study {
    fn terms(&self, effort: Effort) -> Vec<Terms> {
        let schedulers: &[Scheduler] = match effort {
            Effort::Quick => &[Scheduler::Strict30],
            Effort::Usual | Effort::Full => &[Scheduler::Strict30, Scheduler::Eevdf],
        };
        let mut all = Vec::new();
        for &scheduler in schedulers {
            for &guests in self.guests {
                all.extend(self.loads.iter().map(|&load_percent| {
                    let placement = Placement { guests, load_percent, host: self.host };
                    Terms { scheduler, link: Link::Gigabit, placement }
                }));
            }
        }
        all
    }

    fn options(&self, effort: Effort, accel: Option<Accel>) -> Options {
        let (sizes, transfers, seconds): (&[usize], usize, u64) = match effort {
            Effort::Quick => (&[100_000, 1_000_000], 20, 40),
            Effort::Usual => (&[10_000, 100_000, 1_000_000, 10_000_000], 50, 420),
            Effort::Full => (&[10_000, 100_000, 1_000_000, 10_000_000, 100_000_000], 300, 2400),
        };
        let mut opponents = match effort {
            Effort::Quick => Vec::new(),
            Effort::Usual | Effort::Full => vec![NetPath::Passt, NetPath::PasstTuned],
        };
        if self.direction == Direction::Down {
            opponents.pop(); // a receive buffer is not for what is sent
        }
        let paths = |ours| [vec![NetPath::Tap, ours], opponents.clone()].concat();
        Options {
            cases: self.terms(effort),
            layout: Layout::Session,
            transfers,
            time: Duration::from_secs(seconds),
            sizes: Some(sizes.to_vec()),
            directions: vec![self.direction],
            paths: paths(NetPath::AckOffload),
            down_paths: paths(NetPath::FloodRoute),
            requests: match (self.direction, effort) {
                (Direction::Down, _) => 0,
                (Direction::Up, Effort::Quick) => 120,
                (Direction::Up, _) => 480,
            },
            boost: String::from("15ms/90ms"),
            rx_ring: None,
            full: self.direction == Direction::Down,
            is_short: false,
            accel,
            seed: 1,
        }
    }
}

/// The delays of segments, for the vSnoop paper's Figures 1(b) and 1(c), by scheduler.
const DELAYS: [(&str, Scheduler); 2] =
    [("figure-delays", Scheduler::Strict30), ("figure-delays-eevdf", Scheduler::Eevdf)];

fn delays(effort: Effort, scheduler: Scheduler, accel: Option<Accel>) -> delays::Options {
    let (transfers, rounds) = match effort {
        Effort::Quick => (20, 1),
        Effort::Usual => (50, 5),
        Effort::Full => (50, 20),
    };
    let placement = Placement { guests: 3, load_percent: 60, host: HostCore::Guests };
    let terms = Terms { scheduler, link: Link::Gigabit, placement };
    delays::Options { terms, bytes: 1_000_000, transfers, rounds, accel }
}

/// Ten uploads at once, for the vSnoop paper's Figure 6(g), by scheduler.
const TOGETHER: [(&str, Scheduler); 2] =
    [("figure-together", Scheduler::Strict30), ("figure-together-eevdf", Scheduler::Eevdf)];

fn together(effort: Effort, scheduler: Scheduler, accel: Option<Accel>) -> together::Options {
    let (sizes, rounds): (&[usize], usize) = match effort {
        Effort::Quick => (&[100_000, 1_000_000], 10),
        Effort::Usual => (&[10_000, 100_000, 1_000_000], 50),
        Effort::Full => (&[10_000, 100_000, 1_000_000], 300),
    };
    let placement = Placement { guests: 3, load_percent: 60, host: HostCore::Guests };
    let terms = Terms { scheduler, link: Link::Gigabit, placement };
    together::Options { terms, connections: 10, sizes: sizes.to_vec(), rounds, accel }
}

/// Guests that send without end, for the study of VM effects.
const ALWAYS_ON: &str = "figure-always-on";

/// The runs of it: a result of one scheduler each, in a directory of its own.
fn always_on(effort: Effort, accel: Option<Accel>) -> Vec<(&'static str, always_on::Options)> {
    let (senders, bytes, rounds): (&[usize], u64, usize) = match effort {
        Effort::Quick => (&[1, 4], 50_000_000, 1),
        Effort::Usual => (&[1, 4, 7], 100_000_000, 3),
        Effort::Full => (&[1, 4, 7], 250_000_000, 5),
    };
    let of = |scheduler, link| {
        let senders = senders.to_vec();
        always_on::Options { senders, scheduler, link, bytes, rounds, exact: true, accel }
    };
    let mut all = vec![(ALWAYS_ON, of(Scheduler::Strict30, Link::Hundred))];
    if effort != Effort::Quick {
        all.push(("figure-always-on-eevdf", of(Scheduler::Eevdf, Link::Hundred)));
    }
    all
}

/// Runs the studies that have no result of this effort yet, or all with `anew`, and writes
/// `target/report/index.html`.
///
/// # Errors
/// Whatever kept it from finishing.
pub fn run(effort: Effort, anew: bool, accel: Option<Accel>) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    let cores = Cores::plan()?; // once: then this process has left one of them
    for study in &STUDIES {
        let options = study.options(effort, accel);
        let before = Results::read(&demo::result(study.name))?;
        if !anew && before.is_some_and(|results| demo::is_of(&results, &options)) {
            eprintln!("target/{}/result.json is there: not measured again", study.name);
            continue;
        }
        demo::measure(study.name, &options, &cores)?.results.save()?;
    }
    let is_there = |result: &Experiment, options: Value| -> Result<bool> {
        let is_of = |results: Results| *results.settings() == options;
        let is_there = !anew && Results::read(result)?.is_some_and(is_of);
        if is_there {
            eprintln!("target/{}/result.json is there: not measured again", result.name);
        }
        Ok(is_there)
    };
    let schedulers = if effort == Effort::Quick { 1 } else { 2 };
    for (name, scheduler) in TOGETHER.into_iter().take(schedulers) {
        let options = together(effort, scheduler, accel);
        if !is_there(&together::result(name), json!(options))? {
            together::run_as(name, &options, &cores)?.save()?;
        }
    }
    for (name, scheduler) in DELAYS.into_iter().take(schedulers) {
        let options = delays(effort, scheduler, accel);
        if !is_there(&delays::result(name), json!(options))? {
            delays::run_as(name, &options, &cores)?.save()?;
        }
    }
    for (name, options) in always_on(effort, accel) {
        if !is_there(&always_on::result(name), json!(options))? {
            always_on::run_as(name, &options, &cores)?.save()?;
        }
    }
    report().map(|()| true)
}

/// Writes the page of all results that are there.
///
/// # Errors
/// The disk does not take it.
pub fn report() -> Result<()> {
    let read = |study: &Study| Results::read(&demo::result(study.name)).transpose();
    let mut found: Vec<Results> = STUDIES.iter().filter_map(read).collect::<Result<_>>()?;
    for (name, _) in TOGETHER {
        found.extend(Results::read(&together::result(name))?);
    }
    for (name, _) in DELAYS {
        found.extend(Results::read(&delays::result(name))?);
    }
    for (name, _) in always_on(Effort::Usual, None) {
        found.extend(Results::read(&always_on::result(name))?);
    }
    let path = source_root().join("target/report/index.html");
    let dir = path.parent().context("a file has a directory")?;
    fs::create_dir_all(dir)?;
    fs::write(&path, page::page(&found)?).with_context(|| format!("writing {}", path.display()))?;
    println!("The report: {}", path.display());
    Ok(())
}

/// One figure, of a run of seconds, from guests to the page: for the tests on real guests.
///
/// # Errors
/// It cannot be measured, or the page does not have it.
pub(crate) fn one(accel: Accel) -> Result<()> {
    let options = always_on::Options {
        senders: vec![1],
        scheduler: Scheduler::Eevdf,
        link: Link::Hundred,
        bytes: 2_000_000,
        rounds: 1,
        exact: false, // the machine is busy
        accel: Some(accel),
    };
    let results = always_on::run_as("figure-test", &options, &Cores::plan()?)?;
    let page = page::page(&[results])?;
    let of_guest = page.contains("tap, in the guest") && page.contains("flood-route");
    ensure!(of_guest && page.matches("<svg").count() == 2, "the page lacks its figures: {page}");
    Ok(())
}

#[cfg(test)]
mod tests;
