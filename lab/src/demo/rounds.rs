//! The transfers of a case: rounds of one for each path and size, and their records.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nightporter_guest::data::splitmix64;

use super::{Lab, Options, RECEIVER, sizes};
use crate::download::both;
use crate::experiment::shuffled;
use crate::process::CpuUse;
use crate::progress::Progress;
use crate::report::requests::Requests;
use crate::report::{Cell, Cost, Direction, NetPath, Sample, Trouble};
use crate::sched::Scheduler;
use crate::transfer::{Outcome, Upload};

const BULK: usize = 50_000_000;
/// Repetitions of the bulk row, and what they take: not all of the time is for the others.
const BULK_ROUNDS: usize = 15;
const BULK_TIME: Duration = Duration::from_secs(35);
/// Bytes each way of transfers both ways at once, and their share of the time: two paths only.
pub(super) const BOTH_BYTES: usize = 1_000_000;
const BOTH_SHARE: u32 = 5;
/// Rounds of downloads over one path before the guest floods in another way.
const DOWN_ROUNDS: usize = 3;
/// Failed transfers after which a run is given up.
const FAILURES_MAX: usize = 10;
/// The golden section's fractional part.
pub(crate) const GOLDEN: f64 = 0.618_033_988_749_895;

/// The transfers of a case.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// One way at a time.
    pub(super) cells: Vec<Cell>,
    /// Both ways at once: two of each path.
    pub(super) both: Vec<Cell>,
    /// Requests and answers.
    pub(super) requests: Vec<Requests>,
    /// Complaints over each path of downloads.
    pub(super) troubles: Vec<Trouble>,
}

/// How much of one direction is measured at a time.
struct Rounds {
    direction: Direction,
    most: usize,
    time: Duration,
}

impl Options {
    /// The paths of transfers both ways at once: the first of downloads, and the first that floods.
    pub(super) fn both_paths(&self) -> Vec<NetPath> {
        let asked = [Direction::Up, Direction::Down].iter().all(|d| self.directions.contains(d))
            && self.sizes.as_ref().is_none_or(|sizes| sizes.contains(&BOTH_BYTES))
            && !self.is_short;
        let flood = self.down_paths.iter().find(|path| path.is_flood());
        match (asked, flood) {
            (true, Some(&flood)) if self.down_paths.contains(&NetPath::Tap) => {
                vec![NetPath::Tap, flood]
            }
            _ => Vec::new(),
        }
    }
}

impl Lab {
    pub(super) fn measure(
        &mut self,
        options: &Options,
        progress: &mut Progress,
    ) -> Result<Measured> {
        let mut random = options.seed;
        let both_paths = options.both_paths();
        let for_both = match both_paths.as_slice() {
            [] => Duration::ZERO,
            _ => options.time / BOTH_SHARE,
        };
        let one_way = options.time - for_both;
        let share = one_way / u32::try_from(options.directions.len().max(1))?;
        let mut all = Measured::default();
        for &direction in &options.directions {
            let bulk = direction == Direction::Up
                && self.scheduler == Scheduler::Idle
                && !options.is_short
                && options.sizes.is_none();
            let time = share.saturating_sub(if bulk { BULK_TIME } else { Duration::ZERO });
            let plan = Rounds { direction, most: options.transfers, time };
            let sizes = sizes(direction, self.scheduler, options);
            self.rounds(plan, &sizes, options, &mut random, progress, &mut all)?;
            if bulk {
                let most = options.transfers.min(BULK_ROUNDS);
                let plan = Rounds { direction, most, time: BULK_TIME };
                self.rounds(plan, &[BULK], options, &mut random, progress, &mut all)?;
            }
        }
        if !both_paths.is_empty() {
            let plan = (options.transfers, for_both);
            self.rounds_both_ways(plan, &both_paths, &mut random, progress, &mut all)?;
        }
        all.requests = self.ask(options, &mut random, progress)?;
        // Nothing floods any more, and all is paid back.
        self.select(if self.world.daemon.is_some() { NetPath::Off } else { NetPath::Tap })?;
        self.selected = None;
        Ok(all)
    }

    /// Rounds of one transfer for each path and size, at most so many and as long as there is time.
    /// Uploads are in random order. Downloads of a path are together, those of three rounds,
    /// because it takes a guest a while to flood in another way (seconds, under `rr30`); every
    /// second time they go through the paths backwards. In a round all paths start at the same
    /// moment of the guests' cycle; from round to round it moves on by the golden section of the
    /// cycle, so that any number of rounds covers the cycle evenly (Weyl's sequence).
    fn rounds(
        &mut self,
        plan: Rounds,
        sizes: &[usize],
        options: &Options,
        random: &mut u64,
        progress: &mut Progress,
        all: &mut Measured,
    ) -> Result<()> {
        let Rounds { direction, most, time } = plan;
        let start = Instant::now();
        let paths = match direction {
            Direction::Up => &options.paths,
            Direction::Down => &options.down_paths,
        };
        let mut cells: Vec<Cell> = sizes
            .iter()
            .flat_map(|&bytes| paths.iter().map(move |&path| Cell::new(direction, path, bytes)))
            .collect();
        let firsts: Vec<f64> = sizes.iter().map(|_| fraction(random)).collect();
        let mut failed = 0;
        let at_a_time = match direction {
            Direction::Down if !options.full => DOWN_ROUNDS,
            _ => 1,
        };
        for (visit, first) in (0..most).step_by(at_a_time).enumerate() {
            if visit > 0 && start.elapsed() > time {
                break;
            }
            let mut order = Vec::new(); // of rounds and cells
            for round in first..most.min(first + at_a_time) {
                order.extend(shuffled(cells.len(), random).into_iter().map(|cell| (round, cell)));
            }
            let path = |(_, cell): (usize, usize)| cell % paths.len();
            if direction == Direction::Down {
                order.sort_by_key(|&which| place(path(which), paths.len(), visit)); // stable
            }
            for (at, &(round, index)) in order.iter().enumerate() {
                let cell = &mut cells[index];
                let text = format!("{} bytes {direction} over {}", cell.bytes, cell.path);
                progress.update(seconds(start.elapsed()), seconds(time), &text);
                let part = moment(firsts[index / paths.len()], round);
                failed += usize::from(!self.one(cell, round, part, random)?);
                if failed > FAILURES_MAX {
                    bail!("too many failed transfers: {:?}", cells[index].failures);
                }
                let path_index = path((round, index));
                let last = order.get(at + 1).is_none_or(|&next| path(next) != path_index);
                if direction == Direction::Down && last {
                    self.note(paths[path_index], &mut all.troubles)?;
                }
            }
        }
        all.cells.extend(cells);
        Ok(())
    }

    /// Rounds of one transfer both ways at once over each path.
    fn rounds_both_ways(
        &mut self,
        (most, time): (usize, Duration),
        paths: &[NetPath],
        random: &mut u64,
        progress: &mut Progress,
        all: &mut Measured,
    ) -> Result<()> {
        let start = Instant::now();
        let cells = paths.iter().flat_map(|&path| {
            [Direction::Up, Direction::Down].map(|way| Cell::new(way, path, BOTH_BYTES))
        });
        let mut cells: Vec<Cell> = cells.collect();
        let first = fraction(random);
        for (visit, first_round) in (0..most).step_by(DOWN_ROUNDS).enumerate() {
            if visit > 0 && start.elapsed() > time {
                break;
            }
            let mut order: Vec<usize> = (0..paths.len()).collect();
            order.sort_by_key(|&path| place(path, paths.len(), visit));
            for index in order {
                let text = format!("{BOTH_BYTES} bytes both ways over {}", paths[index]);
                progress.update(seconds(start.elapsed()), seconds(time), &text);
                let [up, down] = &mut cells[2 * index..][..2] else { unreachable!("two a path") };
                for round in first_round..most.min(first_round + DOWN_ROUNDS) {
                    self.one_both_ways(up, down, (round, moment(first, round)), random)?;
                }
                if up.failures.len() > FAILURES_MAX {
                    bail!("too many failed transfers: {:?}", up.failures);
                }
                self.note(paths[index], &mut all.troubles)?;
            }
        }
        all.both.extend(cells);
        Ok(())
    }

    /// One transfer that starts at this part of the guests' cycle; whether it came through.
    fn one(&mut self, cell: &mut Cell, round: usize, part: f64, random: &mut u64) -> Result<bool> {
        let seed = splitmix64(random);
        let upload = (cell.direction == Direction::Up).then(|| Upload::new(cell.bytes, seed));
        self.select(cell.path)?;
        let phase = self.cycle().mul_f64(part);
        let before = self.costs()?;
        self.wait_for(phase);
        let outcome = match &upload {
            Some(upload) => self.send(cell.path, upload),
            None => self.fetch(cell.path, cell.bytes, seed),
        };
        match outcome {
            Ok(outcome) => {
                let cost = self.cost_since(&before, &outcome)?;
                cell.samples.push(Sample { round, phase, outcome, cost });
            }
            Err(error) => {
                self.check_alive()?;
                cell.failures.push(format!("{}, {} bytes: {error:#}", cell.path, cell.bytes));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The same both ways at once. Each way has the cost of both.
    fn one_both_ways(
        &mut self,
        up: &mut Cell,
        down: &mut Cell,
        (round, part): (usize, f64),
        random: &mut u64,
    ) -> Result<()> {
        let (path, bytes, seed) = (up.path, up.bytes, splitmix64(random));
        self.select(path)?;
        let phase = self.cycle().mul_f64(part);
        let before = self.costs()?;
        self.wait_for(phase);
        let (guest, limit) = (super::receiver(path), super::TRANSFER_LIMIT);
        match self.world.remote().enter(|| both(guest, bytes, seed, limit)) {
            Ok(outcome) => {
                let cost = self.cost_since(&before, &outcome.up)?;
                up.samples.push(Sample { round, phase, outcome: outcome.up, cost });
                down.samples.push(Sample { round, phase, outcome: outcome.down, cost });
            }
            Err(error) => {
                self.check_alive()?;
                let text = format!("{path}, {bytes} bytes both ways: {error:#}");
                up.failures.push(text.clone());
                down.failures.push(text);
            }
        }
        Ok(())
    }

    fn check_alive(&mut self) -> Result<()> {
        self.world.daemon.as_mut().map_or(Ok(()), |daemon| daemon.check_alive())
    }

    /// Notes new complaints since the last time, over this path.
    fn note(&mut self, path: NetPath, troubles: &mut Vec<Trouble>) -> Result<()> {
        let now = self.world.complaints(usize::from(RECEIVER))?;
        let before = std::mem::replace(&mut self.complaints, now);
        let index = troubles.iter().position(|t| t.path == path).unwrap_or_else(|| {
            troubles.push(Trouble::none(path));
            troubles.len() - 1
        });
        troubles[index].add(&before, &now);
        Ok(())
    }

    fn costs(&self) -> Result<[CpuUse; 3]> {
        let (vcpu, vmm) = self.world.guests[usize::from(RECEIVER)].cpu_use()?;
        let daemon = self.world.daemon.as_ref().map(|daemon| daemon.cpu_use()).transpose()?;
        Ok([vcpu, vmm, daemon.unwrap_or_default()])
    }

    fn cost_since(&mut self, before: &[CpuUse; 3], outcome: &Outcome) -> Result<Cost> {
        let after = self.costs()?;
        let [vcpu, vmm, daemon] = [0, 1, 2].map(|i| after[i].time.saturating_sub(before[i].time));
        let interrupts = outcome.guest_interrupts.saturating_sub(self.interrupts);
        self.interrupts = self.interrupts.max(outcome.guest_interrupts);
        let vcpu_switches = after[0].switches.saturating_sub(before[0].switches);
        Ok(Cost { interrupts, vcpu, vcpu_switches, vmm, daemon })
    }
}

/// When a path's turn is in a round: every second round goes backwards.
fn place(path: usize, paths: usize, round: usize) -> usize {
    if round % 2 == 1 { paths - 1 - path } else { path }
}

/// The part of the cycle at which the transfers of a round start.
fn moment(first: f64, round: usize) -> f64 {
    (first + GOLDEN * round as f64).fract()
}

fn seconds(time: Duration) -> usize {
    usize::try_from(time.as_secs()).unwrap_or(usize::MAX)
}

/// A number from 0 up to 1.
fn fraction(random: &mut u64) -> f64 {
    (splitmix64(random) % 1_000_000) as f64 / 1e6
}
