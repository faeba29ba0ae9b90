//! The map: how many times sooner transfers are over with Nightporter, over the things that decide
//! it, in virtual time; and beside it what real guests showed.
//!
//! [`place`] is one world, [`measured`] reads what the lab has measured, [`page`] and [`picture`]
//! show both. As for the figures of the paper, the result is the same everywhere, bit for bit.

pub mod measured;
mod page;
mod picture;
pub mod place;

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::figures::measure::{in_parallel, millis, quantile};
use crate::plan::Plan;
use crate::stack::Outcome;
use crate::world::World;
use measured::Measured;
use place::{Direction, Place, Sharing};

/// Of the map's paths, and of a VM under KVM for a frame.
const RATE_BPS: u64 = 1_000_000_000;
const FRAME_NS: u64 = 1_000;
/// Of a VM that QEMU emulates (TCG), as those of the lab here: with this its uploads of 10 MB take
/// as long as there.
const FRAME_EMULATED_NS: u64 = 5_000;
/// Beyond so many bytes a cell has fewer runs.
const LARGE: u64 = 10_000_000;

/// How much is run.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Runs of a cell: up to 10 MB, and above.
    pub runs: [usize; 2],
    /// Columns, bytes.
    pub sizes: &'static [u64],
    /// Rows, microseconds.
    pub round_trips_us: &'static [u32],
    /// In the table of shares, bytes.
    pub share_sizes: &'static [u64],
}

impl Effort {
    /// For the page: some minutes on two cores.
    pub const FULL: Self = Self {
        runs: [21, 3],
        sizes: &[10_000, 100_000, 1_000_000, 10_000_000, 100_000_000],
        round_trips_us: &[100, 1_000, 10_000, 40_000, 100_000],
        share_sizes: &[1_000_000, 10_000_000],
    };
}

/// The sharings of the map.
const SHARINGS: [Sharing; 4] = [
    Sharing::Slices { ms: 30 },
    Sharing::Slices { ms: 10 },
    Sharing::Fair,
    Sharing::Quota { ms: 33 },
];
/// VMs that have the core in its tables, and in the table of shares.
const VMS: u16 = 3;
const VMS_ALL: [u16; 4] = [1, 2, 3, 5];
/// Path of the table of shares.
const SHARES_AT_US: u32 = 10_000;

/// The times of one transfer in milliseconds, on the clocks of the demo.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// From connect()'s call to its return.
    pub connect: f64,
    /// From then until all is acknowledged to the client; of a download, until it has all.
    pub acked: f64,
    /// From connect()'s call until the receiving application has read all.
    pub delivered: f64,
}

/// A transfer of `place`, once.
///
/// # Panics
/// If it does not end well: nothing in these worlds could break it.
#[must_use]
pub fn transfer(place: &Place, seed: u64, offload: bool) -> Times {
    times(&place.plan(seed, offload), place.direction)
}

fn times(plan: &Plan, direction: Direction) -> Times {
    let end = World::new(plan, false, None).run();
    for report in &end.ends {
        assert!(report.outcome == Outcome::Closed && report.wrong_at.is_none(), "{report:?}");
    }
    let of = |is_server| end.ends.iter().find(|e| (e.machine == plan.conns[0].server) == is_server);
    let read = || {
        let [client, server] = [of(false)?, of(true)?];
        let (opened, connected) = (client.opened_at?, client.connected_at?);
        let (acked, delivered) = match direction {
            Direction::Up => (client.acked_at?, server.delivered_at?),
            Direction::Down => (client.delivered_at?, client.delivered_at?),
        };
        Some(Times {
            connect: millis(connected.since(opened)),
            acked: millis(acked.since(connected)),
            delivered: millis(delivered.since(opened)),
        })
    };
    read().expect("both ends closed")
}

/// How many times sooner transfers of a place are over, by medians.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gain {
    /// See [`Times::acked`].
    pub acked: f64,
    /// See [`Times::delivered`].
    pub delivered: f64,
    /// Medians of [`Times::delivered`] without and with the offload.
    pub delivered_ms: [f64; 2],
}

/// The gains of these places, with so many runs each, on `jobs` threads.
fn gains(places: &[Place], runs: [usize; 2], jobs: usize) -> Vec<Gain> {
    let of = |place: &Place| runs[usize::from(place.bytes > LARGE)];
    let work = places.iter().enumerate().flat_map(|(at, place)| {
        (0..of(place) as u64).flat_map(move |seed| [(at, seed, false), (at, seed, true)])
    });
    let mut work: Vec<(usize, u64, bool)> = work.collect();
    work.sort_by_key(|(at, ..)| std::cmp::Reverse(places[*at].bytes)); // the long ones first
    let done = in_parallel(jobs, work.len(), |i| {
        let (at, seed, offload) = work[i];
        transfer(&places[at], seed, offload)
    });
    let mut all: Vec<[Vec<Times>; 2]> = vec![Default::default(); places.len()];
    for ((at, _, offload), times) in work.into_iter().zip(done) {
        all[at][usize::from(offload)].push(times);
    }
    all.iter().map(|[without, with]| gain(without, with)).collect()
}

fn gain(without: &[Times], with: &[Times]) -> Gain {
    let median = |all: &[Times], of: fn(&Times) -> f64| {
        quantile(&all.iter().map(of).collect::<Vec<_>>(), 0.5)
    };
    let ratio = |of| median(without, of) / median(with, of);
    let delivered_ms = [without, with].map(|all| median(all, |t| t.delivered));
    Gain { acked: ratio(|t| t.acked), delivered: ratio(|t| t.delivered), delivered_ms }
}

/// The whole map.
#[derive(Clone, Debug)]
pub struct Map {
    effort: Effort,
    /// By sharing and direction, and then by round trip and size.
    cells: Vec<(Place, Gain)>,
    /// More and fewer VMs.
    shares: Vec<(Place, Gain)>,
    /// Results of real guests, and the same places in virtual time.
    checks: Vec<(Measured, Gain)>,
}

impl Map {
    /// Computes it.
    #[must_use]
    pub fn of(effort: Effort, measured: Vec<Measured>, jobs: usize) -> Self {
        let run = |places: Vec<Place>| {
            let gains = gains(&places, effort.runs, jobs);
            places.into_iter().zip(gains).collect::<Vec<_>>()
        };
        let checked = run(measured.iter().map(|it| it.place).collect());
        Self {
            effort,
            cells: run(cells(effort)),
            shares: run(shares(effort)),
            checks: measured.into_iter().zip(checked.into_iter().map(|(_, gain)| gain)).collect(),
        }
    }

    fn cell(&self, of: impl Fn(&Place) -> bool) -> Option<Gain> {
        self.cells.iter().find(|(place, _)| of(place)).map(|(_, gain)| *gain)
    }
}

fn cells(Effort { sizes, round_trips_us, .. }: Effort) -> Vec<Place> {
    let mut all = Vec::new();
    for sharing in SHARINGS {
        for direction in [Direction::Up, Direction::Down] {
            for &round_trip_us in round_trips_us {
                all.extend(
                    sizes
                        .iter()
                        .map(|&bytes| Place { round_trip_us, ..usual(sharing, bytes, direction) }),
                );
            }
        }
    }
    all
}

fn shares(Effort { share_sizes, .. }: Effort) -> Vec<Place> {
    let round_trip_us = SHARES_AT_US;
    let mut all = Vec::new();
    for sharing in [Sharing::Slices { ms: 30 }, Sharing::Fair, Sharing::Quota { ms: 33 }] {
        for direction in [Direction::Up, Direction::Down] {
            for &bytes in share_sizes {
                let of = |vms| {
                    let place = Place { round_trip_us, ..usual(sharing, bytes, direction) };
                    match sharing {
                        Sharing::Quota { .. } => {
                            Place { sharing: Sharing::Quota { ms: 100 / u32::from(vms) }, ..place }
                        }
                        _ => Place { vms, ..place },
                    }
                };
                all.extend(VMS_ALL.map(of));
            }
        }
    }
    all
}

fn usual(sharing: Sharing, bytes: u64, direction: Direction) -> Place {
    let round_trip_us = SHARES_AT_US;
    let vms = if matches!(sharing, Sharing::Quota { .. }) { 1 } else { VMS };
    let (rate_bps, frame_ns) = (RATE_BPS, FRAME_NS);
    Place { sharing, vms, round_trip_us, rate_bps, frame_ns, bytes, direction }
}

/// Writes the page and its pictures: `will-it-help.md`, `img/idea.svg`, `img/gain.svg` below `out`.
///
/// # Errors
/// If a result of the lab cannot be read, or `out` not be written to.
pub fn draw(effort: Effort, jobs: usize, lab: &[PathBuf], out: &Path) -> anyhow::Result<()> {
    let read = lab.iter().map(|path| measured::read(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let map = Map::of(effort, read.into_iter().flatten().collect(), jobs);
    let images = out.join("img");
    std::fs::create_dir_all(&images).with_context(|| format!("make {}", images.display()))?;
    picture::idea(&images.join("idea.svg"))?;
    picture::gain(&map, &images.join("gain.svg"))?;
    let path = out.join("will-it-help.md");
    std::fs::write(&path, page::markdown(&map)).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests;
