//! The figures of the vSnoop paper (Kangarlou, Gamage, Kompella, Xu: "vSnoop: Improving TCP
//! Throughput in Virtualized Environments via Acknowledgement Offload", SC 2010) in virtual time.
//!
//! The figures show the simulated world around the real core. [`scene`] describes the paper's
//! testbed here, [`measure`] runs it, `nightporter_plot` draws, [`table`] puts our numbers beside
//! the paper's and states the assumptions. The result is the same everywhere, bit for bit: threads
//! only divide runs among themselves.

pub mod measure;
pub mod scene;
pub mod table;

use std::path::Path;

use anyhow::Context as _;

use measure::{
    Clock, Ping, Transfer, in_parallel, millis, pings, quantile, seconds, sequence, transfers,
};
use nightporter_plot::{self as plot, Chart, Curve, Marks, distribution};
use scene::{Mode, Scene};

/// The number of runs behind the medians.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Pings per number of VMs.
    pub pings: u16,
    /// Transfers of 100 KB for each curve of Figure 5; the paper has 1000.
    pub transfers: usize,
    /// Runs of each transfer size in Figure 6: up to 1 MB, and above.
    pub runs: [usize; 2],
    /// Bytes that are sent in Figure 6. The text of the paper names some of them only.
    pub sizes: &'static [u64],
    /// Bytes that are sent in the sweeps.
    pub sweep: &'static [u64],
}

impl Effort {
    /// For the figures: less than two minutes on two cores.
    pub const FULL: Self = Self {
        pings: 2000,
        transfers: 1000,
        runs: [100, 10],
        sizes: &[50_000, 100_000, 250_000, 500_000, 1_000_000, 10_000_000],
        sweep: &[
            20_000, 30_000, 40_000, 50_000, 60_000, 70_000, 80_000, 90_000, 100_000, 120_000,
            140_000, 160_000, 180_000, 200_000, 250_000, 300_000, 400_000, 500_000, 700_000,
            1_000_000,
        ],
    };
}

/// Of Figure 5.
const FIGURE_5_BYTES: u64 = 100_000;
/// Of Figure 2.
const FIGURE_2_BYTES: u64 = 1_000_000;
/// VMs on the core in Figure 1(a).
const VMS: [u16; 5] = [1, 2, 3, 4, 5];
/// VMs in Figures 1(b), 2 and 5.
const VMS_USUAL: u16 = 3;

/// All that was measured.
#[derive(Clone, Debug)]
pub struct Results {
    /// Figure 1(a) and, for three VMs, 1(b).
    pub pings: Vec<(u16, Vec<Ping>)>,
    /// Figure 2.
    pub traces: Vec<Trace>,
    /// Figure 5.
    pub transfers: Vec<(Mode, Vec<Transfer>)>,
    /// Figure 6, panel by panel.
    pub panels: Vec<Panel>,
    /// The same arrangements on a host of today; no plain mode.
    pub today: Vec<Panel>,
    /// Three VMs, size by size: on the paper's host, and on one of today; no plain mode.
    pub sweeps: [Panel; 2],
}

/// One transfer of Figure 2.
#[derive(Clone, Debug)]
pub struct Trace {
    /// To whom.
    pub name: &'static str,
    /// See [`sequence`].
    pub points: Vec<(f64, f64)>,
    /// Seconds from the SYN until all was acknowledged, and delivered.
    pub took: [f64; 2],
}

/// One panel of Figure 6.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Its letter in the paper.
    pub letter: char,
    /// Its difference from the others.
    pub name: &'static str,
    /// By size and mode, in the order of [`Effort::sizes`] and [`Mode::ALL`].
    pub cells: Vec<(u64, [Vec<Transfer>; 3])>,
}

impl Panel {
    /// How many times sooner ack offload has it than a deeper ring without, at size number `at`:
    /// by the mean of the times, and by their median.
    #[must_use]
    pub fn gains(&self, at: usize, clock: Clock) -> [f64; 2] {
        let times = |mode: Mode| self.times(at, mode, clock);
        let [without, with] = [Mode::DeepRing, Mode::Offload].map(times);
        [mean(&without) / mean(&with), quantile(&without, 0.5) / quantile(&with, 0.5)]
    }

    /// The times of the transfers of size number `at`, in milliseconds.
    #[must_use]
    pub fn times(&self, at: usize, mode: Mode, clock: Clock) -> Vec<f64> {
        self.cells[at].1[mode as usize].iter().map(|t| millis(t.took(clock))).collect()
    }

    /// Median throughput of `mode` by `clock` at size number `at`, in MB/s.
    #[must_use]
    pub fn median(&self, at: usize, mode: Mode, clock: Clock) -> f64 {
        let (bytes, modes) = &self.cells[at];
        median(&modes[mode as usize], *bytes, clock)
    }
}

/// Median throughput in MB/s of transfers of `bytes`.
#[must_use]
pub fn median(transfers: &[Transfer], bytes: u64, clock: Clock) -> f64 {
    let all: Vec<f64> = transfers.iter().map(|t| t.throughput(bytes, clock)).collect();
    quantile(&all, 0.5)
}

/// The panels in the order of the paper's letters.
#[must_use]
pub fn panels() -> Vec<(char, &'static str, Scene)> {
    let usual = Scene::new(VMS_USUAL, Mode::Plain, 0);
    vec![
        ('a', "1 VM", Scene { vms: 1, ..usual }),
        ('b', "2 VMs", Scene { vms: 2, ..usual }),
        ('c', "5 VMs", Scene { vms: 5, ..usual }),
        ('d', "3 VMs, 40 % load", Scene { load_percent: 40, ..usual }),
        ('e', "3 VMs, 60 % load", usual),
        ('f', "3 VMs, 80 % load", Scene { load_percent: 80, ..usual }),
        ('g', "3 VMs, 10 connections", Scene { conns: 10, ..usual }),
        ('h', "3 VMs, sender is one of 3 VMs", Scene { sender_shares: true, ..usual }),
        ('i', "3 VMs, driver domain on its own core", Scene { own_core: true, ..usual }),
    ]
}

/// Those of them that differ on a host of today: there the driver domain has its own core anyway.
#[must_use]
pub fn panels_today() -> Vec<(char, &'static str, Scene)> {
    let kinds = panels().into_iter().filter(|(_, _, scene)| !scene.own_core);
    kinds.map(|(letter, name, scene)| (letter, name, scene.today())).collect()
}

/// The modes that gains compare.
const COMPARED: [Mode; 2] = [Mode::DeepRing, Mode::Offload];

/// Runs everything on `jobs` threads.
#[must_use]
pub fn run(effort: &Effort, jobs: usize) -> Results {
    let probed = in_parallel(jobs, VMS.len(), |i| {
        (VMS[i], pings(&Scene::new(VMS[i], Mode::Plain, 1), 1, effort.pings))
    });
    let all = in_parallel(jobs, Mode::ALL.len() * effort.transfers, |i| {
        let scene = Scene::new(VMS_USUAL, Mode::ALL[i / effort.transfers], FIGURE_5_BYTES);
        transfers(&scene, (i % effort.transfers) as u64)
    });
    let mut all = all.into_iter();
    let of_figure_5 = Mode::ALL.map(|mode| {
        (mode, all.by_ref().take(effort.transfers).flatten().collect::<Vec<Transfer>>())
    });
    Results {
        pings: probed,
        traces: run_traces(effort, jobs),
        transfers: of_figure_5.into(),
        panels: run_panels(effort, jobs, panels(), effort.sizes, &Mode::ALL),
        today: run_panels(effort, jobs, panels_today(), effort.sizes, &COMPARED),
        sweeps: {
            let usual = Scene::new(VMS_USUAL, Mode::Plain, 0);
            let kinds =
                vec![('s', "the paper's host", usual), ('t', "a host of today", usual.today())];
            let swept = run_panels(effort, jobs, kinds, effort.sweep, &COMPARED);
            swept.try_into().expect("two kinds")
        },
    }
}

/// Of each kind the run that is the median in time.
fn run_traces(effort: &Effort, jobs: usize) -> Vec<Trace> {
    let to_vm = |mode| Scene::new(VMS_USUAL, mode, FIGURE_2_BYTES);
    let idle = Scene { vms: VMS_USUAL + 1, own_load_percent: Some(0), ..to_vm(Mode::Plain) };
    let kinds = [
        ("to the driver domain", idle),
        ("to a VM", to_vm(Mode::Plain)),
        ("to a VM, ack offload", to_vm(Mode::Offload)),
    ];
    let runs = 2 * effort.runs[0] + 1; // an odd number has a middle
    let trace = |(name, scene): (&'static str, Scene)| {
        let took = in_parallel(jobs, runs, |seed| {
            let t = transfers(&scene, seed as u64)[0];
            ([t.acked, t.delivered].map(|span| seconds(t.connect + span)), seed as u64)
        });
        let mut by_time = took;
        by_time.sort_by(|a, b| a.0[1].total_cmp(&b.0[1]).then(a.1.cmp(&b.1)));
        let (took, seed) = by_time[runs / 2];
        Trace { name, points: sequence(&scene, seed), took }
    };
    kinds.into_iter().map(trace).collect()
}

fn run_panels(
    effort: &Effort,
    jobs: usize,
    kinds: Vec<(char, &'static str, Scene)>,
    sizes: &[u64],
    modes: &[Mode],
) -> Vec<Panel> {
    let runs = |bytes: u64| effort.runs[usize::from(bytes > 1_000_000)];
    let mut work = Vec::new();
    for (panel, (_, _, scene)) in kinds.iter().enumerate() {
        for (size, &bytes) in sizes.iter().enumerate() {
            for &mode in modes {
                let scene = Scene { mode, bytes, ..*scene };
                work.extend((0..runs(bytes) as u64).map(|seed| (panel, size, scene, seed)));
            }
        }
    }
    let done = in_parallel(jobs, work.len(), |i| transfers(&work[i].2, work[i].3));
    let empty = |(letter, name, _)| {
        let cells = sizes.iter().map(|&bytes| (bytes, Default::default()));
        Panel { letter, name, cells: cells.collect() }
    };
    let mut made: Vec<Panel> = kinds.into_iter().map(empty).collect();
    for ((panel, size, scene, _), transfers) in work.into_iter().zip(done) {
        made[panel].cells[size].1[scene.mode as usize].extend(transfers);
    }
    made
}

/// Draws all figures into `out` and writes the table there; returns the table.
///
/// # Errors
/// If `out` cannot be written to.
pub fn draw(effort: &Effort, jobs: usize, out: &Path) -> anyhow::Result<String> {
    std::fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    let results = run(effort, jobs);
    let large = (560, 380);
    plot::write(&out.join("figure-1a.svg"), large, 1, &[figure_1a(&results)])?;
    plot::write(&out.join("figure-1b.svg"), large, 1, &[figure_1b(&results)])?;
    plot::write(&out.join("figure-2.svg"), large, 1, &[figure_2(&results)])?;
    let clocks = [Clock::Acked, Clock::Delivered, Clock::InGuest];
    let charts: Vec<Chart> = clocks.iter().map(|&c| figure_5(&results, c)).collect();
    plot::write(&out.join("figure-5.svg"), (480, 360), 3, &charts)?;
    for clock in [Clock::Acked, Clock::Delivered] {
        let charts: Vec<Chart> = results.panels.iter().map(|p| figure_6(p, clock)).collect();
        let name = format!("figure-6-{}.svg", clock.name());
        plot::write(&out.join(name), (420, 300), 3, &charts)?;
    }
    let charts: Vec<Chart> = results.sweeps.iter().flat_map(sweep).collect();
    plot::write(&out.join("figure-sweep.svg"), (420, 300), 3, &charts)?;
    let table = table::markdown(effort, &results);
    let path = out.join("figures.md");
    std::fs::write(&path, &table).with_context(|| format!("write {}", path.display()))?;
    Ok(table)
}

fn round_trips(pings: &[Ping]) -> Vec<f64> {
    pings.iter().map(|p| millis(p.round_trip)).collect()
}

fn figure_1a(results: &Results) -> Chart {
    let curve = |name: &str, of: &dyn Fn(&[f64]) -> f64| {
        let point = |(vms, pings): &(u16, Vec<Ping>)| (f64::from(*vms), of(&round_trips(pings)));
        let points = results.pings.iter().map(point).collect();
        Curve { name: name.to_owned(), points, marks: Marks::LineAndDots }
    };
    Chart {
        title: "1(a) Round trip of a ping to a VM at 60 % load".to_owned(),
        x_label: "VMs on the core".to_owned(),
        y_label: "ms".to_owned(),
        x: 0.5..5.5,
        y: 0.0..200.0,
        log_x: false,
        legend_left: true,
        curves: vec![
            curve("mean", &mean),
            curve("90th percentile", &|v| quantile(v, 0.9)),
            curve("longest", &|v| quantile(v, 1.0)),
        ],
    }
}

/// The average.
#[must_use]
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn figure_1b(results: &Results) -> Chart {
    const LONGEST_MS: f64 = 150.0;
    let usual = results.pings.iter().find(|(vms, _)| *vms == VMS_USUAL);
    let pings = usual.map_or(&[][..], |(_, pings)| pings);
    let of = |name: &str, f: &dyn Fn(&Ping) -> f64| {
        let values: Vec<f64> = pings.iter().map(f).collect();
        distribution(name, &values, 0.0, LONGEST_MS)
    };
    Chart {
        title: "1(b) Where a packet to a VM waits, 3 VMs at 60 % load".to_owned(),
        x_label: "ms".to_owned(),
        y_label: "share of packets".to_owned(),
        x: 0.0..LONGEST_MS,
        y: 0.0..1.02,
        log_x: false,
        legend_left: false,
        curves: vec![
            of("in the driver domain", &|p| millis(p.in_host)),
            of("until the VM runs", &|p| millis(p.in_guest)),
        ],
    }
}

fn figure_2(results: &Results) -> Chart {
    let longest = results.traces.iter().map(|t| t.took[1]).fold(0.0, f64::max);
    let curve = |trace: &Trace| Curve {
        name: trace.name.to_owned(),
        points: trace.points.clone(),
        marks: Marks::Line,
    };
    Chart {
        title: "2 Sequence numbers of 1 MB, 3 VMs at 60 % load".to_owned(),
        x_label: "seconds since the SYN".to_owned(),
        y_label: "MB at the host".to_owned(),
        x: 0.0..longest * 1.05,
        y: 0.0..1.05,
        log_x: false,
        legend_left: false,
        curves: results.traces.iter().map(curve).collect(),
    }
}

fn figure_5(results: &Results, clock: Clock) -> Chart {
    let curve = |(mode, transfers): &(Mode, Vec<Transfer>)| {
        let all: Vec<f64> = transfers.iter().map(|t| t.throughput(FIGURE_5_BYTES, clock)).collect();
        distribution(mode.name(), &all, 0.1, 1000.0)
    };
    Chart {
        title: format!("5 Throughput of 100 KB, 3 VMs: {}", clock.name()),
        x_label: "MB/s".to_owned(),
        y_label: "share of transfers".to_owned(),
        x: 0.1..1000.0,
        y: 0.0..1.02,
        log_x: true,
        legend_left: false,
        curves: results.transfers.iter().map(curve).collect(),
    }
}

fn figure_6(panel: &Panel, clock: Clock) -> Chart {
    let relative = |at: usize, mode: Mode| {
        panel.median(at, mode, clock) / panel.median(at, Mode::Offload, clock)
    };
    let points = |mode: Mode| {
        let sizes = panel.cells.iter().enumerate();
        sizes.map(|(at, (bytes, _))| (*bytes as f64 / 1e6, relative(at, mode))).collect()
    };
    let curve = |mode: Mode| Curve {
        name: mode.name().to_owned(),
        points: points(mode),
        marks: Marks::LineAndDots,
    };
    let curves: Vec<Curve> = Mode::ALL.into_iter().map(curve).collect();
    let most = curves.iter().flat_map(|c| &c.points).map(|p| p.1).fold(1.0, f64::max);
    Chart {
        title: format!("6({}) {}", panel.letter, panel.name),
        x_label: "MB".to_owned(),
        y_label: format!("{}, median", clock.name()),
        x: 0.04..2000.0,
        y: 0.0..most * 1.1,
        log_x: true,
        legend_left: false,
        curves,
    }
}

/// Delivered times by size, without and with ack offload, and how many times sooner that is.
fn sweep(panel: &Panel) -> [Chart; 3] {
    let at_sizes = |name: &str, of: &dyn Fn(usize) -> f64| {
        let sizes = panel.cells.iter().enumerate();
        let points = sizes.map(|(at, (bytes, _))| (*bytes as f64 / 1e6, of(at))).collect();
        Curve { name: name.to_owned(), points, marks: Marks::LineAndDots }
    };
    let chart = |title: &str, y_label: &str, most: f64, curves: Vec<Curve>| Chart {
        title: format!("{title}, {}", panel.name),
        x_label: "MB".to_owned(),
        y_label: y_label.to_owned(),
        x: 0.018..1.1,
        y: 0.0..most,
        log_x: true,
        legend_left: true,
        curves,
    };
    let times = |mode: Mode| {
        let of = |f: &dyn Fn(&[f64]) -> f64, at| f(&panel.times(at, mode, Clock::Delivered));
        let curves = vec![
            at_sizes("mean", &|at| of(&mean, at)),
            at_sizes("10 %", &|at| of(&|v| quantile(v, 0.1), at)),
            at_sizes("median", &|at| of(&|v| quantile(v, 0.5), at)),
            at_sizes("90 %", &|at| of(&|v| quantile(v, 0.9), at)),
        ];
        chart(mode.name(), "delivered, ms", 260.0, curves)
    };
    let gain = |clock, which: usize| move |at| panel.gains(at, clock)[which];
    let gains = vec![
        at_sizes("delivered, by the mean", &gain(Clock::Delivered, 0)),
        at_sizes("delivered, by the median", &gain(Clock::Delivered, 1)),
    ];
    let most = gains.iter().flat_map(|c| &c.points).map(|p| p.1).fold(1.0, f64::max);
    let [without, with] = COMPARED.map(times);
    [without, with, chart("times sooner", "", most * 1.2, gains)]
}

#[cfg(test)]
mod tests;
