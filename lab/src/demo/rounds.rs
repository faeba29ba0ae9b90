//! The transfers of a case: rounds of one for each path and size, and their records.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nightporter_guest::data::splitmix64;

use super::measures::{Cost, Terms, cell, values};
use super::troubles::Trouble;
use super::{Direction, Lab, NetPath, Options, RECEIVER, net_of, sizes};
use crate::download::both;
use crate::experiment::{Cell, Results, shuffled};
use crate::process::CpuUse;
use crate::progress::Progress;
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

/// A case that is being measured.
#[derive(Debug)]
pub(super) struct Record<'a> {
    pub(super) terms: Terms,
    pub(super) results: &'a mut Results,
    pub(super) progress: &'a mut Progress,
    /// For payloads, moments and the order within a round.
    pub(super) random: u64,
    /// The sizes of each direction, in the order of the table.
    pub(super) kinds: Vec<(Direction, usize)>,
    /// Complaints over each path of downloads.
    pub(super) troubles: Vec<Trouble>,
    /// Transfers that did not come through.
    failed: usize,
}

impl<'a> Record<'a> {
    pub(super) fn new(
        terms: Terms,
        results: &'a mut Results,
        progress: &'a mut Progress,
        random: u64,
    ) -> Self {
        let (kinds, troubles, failed) = (Vec::new(), Vec::new(), 0);
        Self { terms, results, progress, random, kinds, troubles, failed }
    }

    fn fail(&mut self, cell: &Cell, why: String) -> Result<()> {
        eprintln!("failed transfer: {}, {}: {why}", cell.case, cell.arm);
        self.failed += 1;
        if self.failed > FAILURES_MAX {
            bail!("too many failed transfers, the last over {}: {why}", cell.arm);
        }
        self.results.fail(cell, why);
        Ok(())
    }
}

/// One transfer of each round.
#[derive(Debug, Clone, Copy)]
struct Transfer {
    direction: Direction,
    path: NetPath,
    bytes: usize,
}

impl Transfer {
    fn cell(self, terms: Terms) -> Cell {
        cell(terms.one_way(self.direction, self.bytes), self.path)
    }
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
    pub(super) fn measure(&mut self, options: &Options, record: &mut Record<'_>) -> Result<()> {
        let both_paths = options.both_paths();
        let for_both = match both_paths.as_slice() {
            [] => Duration::ZERO,
            _ => options.time / BOTH_SHARE,
        };
        let one_way = options.time - for_both;
        let share = one_way / u32::try_from(options.directions.len().max(1))?;
        for &direction in &options.directions {
            let bulk = direction == Direction::Up
                && self.scheduler == Scheduler::Idle
                && !options.is_short
                && options.sizes.is_none();
            let time = share.saturating_sub(if bulk { BULK_TIME } else { Duration::ZERO });
            let plan = Rounds { direction, most: options.transfers, time };
            self.rounds(plan, &sizes(direction, self.scheduler, options), options, record)?;
            if bulk {
                let most = options.transfers.min(BULK_ROUNDS);
                let plan = Rounds { direction, most, time: BULK_TIME };
                self.rounds(plan, &[BULK], options, record)?;
            }
        }
        if !both_paths.is_empty() {
            self.rounds_both_ways((options.transfers, for_both), &both_paths, record)?;
        }
        self.ask(options, record)?;
        // Nothing floods any more, and all is paid back.
        self.select(if self.world.daemon.is_some() { NetPath::Off } else { NetPath::Tap })?;
        self.selected = None;
        Ok(())
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
        record: &mut Record<'_>,
    ) -> Result<()> {
        let Rounds { direction, most, time } = plan;
        let start = Instant::now();
        let paths = match direction {
            Direction::Up => &options.paths,
            Direction::Down => &options.down_paths,
        };
        let transfers: Vec<Transfer> = sizes
            .iter()
            .flat_map(|&bytes| paths.iter().map(move |&path| Transfer { direction, path, bytes }))
            .collect();
        record.kinds.extend(sizes.iter().map(|&bytes| (direction, bytes)));
        let names: Vec<Cell> = transfers.iter().map(|it| it.cell(record.terms)).collect();
        record.results.expect(&names);
        let firsts: Vec<f64> = sizes.iter().map(|_| fraction(&mut record.random)).collect();
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
                let cells = shuffled(transfers.len(), &mut record.random);
                order.extend(cells.into_iter().map(|cell| (round, cell)));
            }
            let path = |(_, cell): (usize, usize)| cell % paths.len();
            if direction == Direction::Down {
                order.sort_by_key(|&which| place(path(which), paths.len(), visit)); // stable
            }
            for (at, &(round, index)) in order.iter().enumerate() {
                let it = &transfers[index];
                let text = format!("{} bytes {direction} over {}", it.bytes, it.path);
                record.progress.update(seconds(start.elapsed()), seconds(time), &text);
                let part = moment(firsts[index / paths.len()], round);
                self.one(it, round, part, record)?;
                let path_index = path((round, index));
                let last = order.get(at + 1).is_none_or(|&next| path(next) != path_index);
                if direction == Direction::Down && last {
                    self.note(paths[path_index], &mut record.troubles)?;
                }
            }
            record.results.keep()?;
        }
        Ok(())
    }

    /// Rounds of one transfer both ways at once over each path.
    fn rounds_both_ways(
        &mut self,
        (most, time): (usize, Duration),
        paths: &[NetPath],
        record: &mut Record<'_>,
    ) -> Result<()> {
        let start = Instant::now();
        let first = fraction(&mut record.random);
        for (visit, first_round) in (0..most).step_by(DOWN_ROUNDS).enumerate() {
            if visit > 0 && start.elapsed() > time {
                break;
            }
            let mut order: Vec<usize> = (0..paths.len()).collect();
            order.sort_by_key(|&path| place(path, paths.len(), visit));
            for index in order {
                let text = format!("{BOTH_BYTES} bytes both ways over {}", paths[index]);
                record.progress.update(seconds(start.elapsed()), seconds(time), &text);
                for round in first_round..most.min(first_round + DOWN_ROUNDS) {
                    self.one_both_ways(paths[index], (round, moment(first, round)), record)?;
                }
                self.note(paths[index], &mut record.troubles)?;
            }
            record.results.keep()?;
        }
        Ok(())
    }

    /// One transfer that starts at this part of the guests' cycle, unless an earlier run made it.
    fn one(
        &mut self,
        it: &Transfer,
        round: usize,
        part: f64,
        record: &mut Record<'_>,
    ) -> Result<()> {
        let (seed, cell) = (splitmix64(&mut record.random), it.cell(record.terms));
        if record.results.has(&cell, round) {
            return Ok(());
        }
        let upload = (it.direction == Direction::Up).then(|| Upload::new(it.bytes, seed));
        self.select(it.path)?;
        let phase = self.cycle().mul_f64(part);
        let before = self.costs(it.path)?;
        self.wait_for(phase);
        let outcome = match &upload {
            Some(upload) => self.send(it.path, upload),
            None => self.fetch(it.path, it.bytes, seed),
        };
        match outcome {
            Ok(outcome) => {
                let cost = self.cost_since(it.path, &before, &outcome)?;
                record.results.note(&cell, round, values(phase, &outcome, &cost));
                Ok(())
            }
            Err(error) => {
                self.check_alive()?;
                record.fail(&cell, format!("{error:#}"))
            }
        }
    }

    /// The same both ways at once. Each way has the cost of both.
    fn one_both_ways(
        &mut self,
        path: NetPath,
        (round, part): (usize, f64),
        record: &mut Record<'_>,
    ) -> Result<()> {
        let ways = [Direction::Up, Direction::Down];
        let cells = ways.map(|way| cell(record.terms.both_ways(way, BOTH_BYTES), path));
        let seed = splitmix64(&mut record.random);
        if record.results.has(&cells[0], round) {
            return Ok(());
        }
        self.select(path)?;
        let phase = self.cycle().mul_f64(part);
        let before = self.costs(path)?;
        self.wait_for(phase);
        let (guest, limit) = (super::receiver(path), super::TRANSFER_LIMIT);
        match self.world.remote().enter(|| both(guest, BOTH_BYTES, seed, limit)) {
            Ok(outcome) => {
                let cost = self.cost_since(path, &before, &outcome.up)?;
                for (cell, outcome) in cells.iter().zip([&outcome.up, &outcome.down]) {
                    record.results.note(cell, round, values(phase, outcome, &cost));
                }
                Ok(())
            }
            Err(error) => {
                self.check_alive()?;
                cells.iter().try_for_each(|cell| record.fail(cell, format!("{error:#}")))
            }
        }
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

    fn costs(&self, path: NetPath) -> Result<[CpuUse; 3]> {
        let (vcpu, vmm) = self.world.guests[usize::from(RECEIVER)].cpu_use()?;
        let back_end = self.world.back_end(net_of(path)).map(|pid| CpuUse::of_process(pid, &[]));
        Ok([vcpu, vmm, back_end.transpose()?.unwrap_or_default()])
    }

    fn cost_since(
        &mut self,
        path: NetPath,
        before: &[CpuUse; 3],
        outcome: &Outcome,
    ) -> Result<Cost> {
        let after = self.costs(path)?;
        let [time, vmm, back_end] = [0, 1, 2].map(|i| after[i].time.saturating_sub(before[i].time));
        let interrupts = outcome.guest_interrupts.saturating_sub(self.interrupts);
        self.interrupts = self.interrupts.max(outcome.guest_interrupts);
        let switches = after[0].switches.saturating_sub(before[0].switches);
        Ok(Cost { interrupts, vcpu: CpuUse { time, switches }, vmm, back_end })
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
