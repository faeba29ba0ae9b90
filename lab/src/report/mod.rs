//! The result of a demo: tables for people and `result.json` for programs.
//!
//! [`both`] sums up for transfers both ways at once, [`requests`] for requests
//! and answers, [`checks`] judges, `table` prints, [`short`] prints the short form.

pub mod both;
pub mod checks;
pub mod requests;
pub mod short;
mod table;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::accel::Accel;
use crate::experiment::stats::{Quantiles, Ratio, round3};
use crate::experiment::verdict::{Check, Verdict};
use crate::flood::Complaints;
use crate::link::{Link, Measured};
use crate::sched::{Layout, Scheduler};
use crate::transfer::Outcome;
use both::BothWays;
use requests::Requests;

/// A way from the remote host into the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum NetPath {
    /// QEMU's own tap on a Linux bridge.
    Tap,
    /// Nightporter with the offload off.
    Off,
    /// Nightporter with ack offload.
    AckOffload,
    /// QEMU's own tap, attached to Nightporter, with ack offload.
    Attached,
    /// Nightporter with congestion offload too, and a guest whose routes flood.
    FloodRoute,
    /// The same, with a guest that floods by `np_flood`.
    FloodBpf,
    /// passt, with the kernel's receive buffers.
    Passt,
    /// passt, with receive buffers of 8 MB.
    PasstTuned,
    /// [`Self::Tap`], with boost from outside.
    #[value(name = "tap+boost")]
    #[serde(rename = "tap+boost")]
    TapBoost,
    /// [`Self::AckOffload`], with boost.
    #[value(name = "ack-offload+boost")]
    #[serde(rename = "ack-offload+boost")]
    AckOffloadBoost,
    /// [`Self::FloodRoute`], with boost.
    #[value(name = "flood-route+boost")]
    #[serde(rename = "flood-route+boost")]
    FloodRouteBoost,
}

/// The sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// The remote: an upload into the guest.
    Up,
    /// The guest: a download from it.
    Down,
}

impl NetPath {
    /// Its name, as in `result.json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tap => "tap",
            Self::Off => "off",
            Self::AckOffload => "ack-offload",
            Self::Attached => "attached",
            Self::FloodRoute => "flood-route",
            Self::FloodBpf => "flood-bpf",
            Self::Passt => "passt",
            Self::PasstTuned => "passt-tuned",
            Self::TapBoost => "tap+boost",
            Self::AckOffloadBoost => "ack-offload+boost",
            Self::FloodRouteBoost => "flood-route+boost",
        }
    }

    /// The same without boost.
    #[must_use]
    pub const fn unboosted(self) -> Self {
        match self {
            Self::TapBoost => Self::Tap,
            Self::AckOffloadBoost => Self::AckOffload,
            Self::FloodRouteBoost => Self::FloodRoute,
            path => path,
        }
    }

    /// It has boost.
    #[must_use]
    pub fn is_boosted(self) -> bool {
        self.unboosted() != self
    }

    /// It is over QEMU's tap.
    #[must_use]
    pub fn is_tap(self) -> bool {
        self.unboosted() == Self::Tap
    }

    /// It is over passt.
    #[must_use]
    pub const fn is_passt(self) -> bool {
        matches!(self, Self::Passt | Self::PasstTuned)
    }

    /// It is over Nightporter.
    #[must_use]
    pub fn is_nightporter(self) -> bool {
        !self.is_tap() && !self.is_passt()
    }

    /// The guest floods.
    #[must_use]
    pub const fn is_flood(self) -> bool {
        matches!(self, Self::FloodRoute | Self::FloodBpf | Self::FloodRouteBoost)
    }
}

impl std::fmt::Display for NetPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::fmt::Display for Direction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Self::Up { "up" } else { "down" })
    }
}

/// The cost of one transfer, from before it to after its verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Interrupts of the guest's NICs.
    pub interrupts: u64,
    /// The receiver's vCPU on its core. Under load it is busy all the time: its share.
    pub vcpu: Duration,
    /// How often the vCPU was switched to.
    pub vcpu_switches: u64,
    /// All other threads of the receiver's VMM.
    pub vmm: Duration,
    /// nightporterd.
    pub daemon: Duration,
}

/// One transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Transfers of one round began at the same moment of the guests' cycle.
    pub round: usize,
    /// That moment.
    pub phase: Duration,
    /// Its times.
    pub outcome: Outcome,
    /// Its cost.
    pub cost: Cost,
}

impl Sample {
    /// connect() until everything written was acknowledged.
    fn connect_acked(&self) -> Duration {
        self.outcome.connect + self.outcome.acked
    }
}

/// All transfers of one size over one path.
#[derive(Debug, Clone)]
pub struct Cell {
    /// The sender.
    pub direction: Direction,
    /// The path.
    pub path: NetPath,
    /// Size of each transfer, bytes on the wire.
    pub bytes: usize,
    /// Those that came through.
    pub samples: Vec<Sample>,
    /// Those that did not, and why.
    pub failures: Vec<String>,
}

impl Cell {
    /// Without transfers yet.
    #[must_use]
    pub const fn new(direction: Direction, path: NetPath, bytes: usize) -> Self {
        Self { direction, path, bytes, samples: Vec::new(), failures: Vec::new() }
    }
}

/// One row of `result.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    direction: Direction,
    path: NetPath,
    bytes: usize,
    /// Transfers tried.
    n: usize,
    /// Completed transfers whose hash was right. Times are of completed transfers.
    hash_ok: usize,
    /// Segments the sender retransmitted, all transfers together.
    retransmits: u32,
    connect_ms: Quantiles,
    /// From connect()'s return.
    acked_ms: Quantiles,
    /// From connect()'s call.
    connect_acked_ms: Quantiles,
    delivered_ms: Quantiles,
    /// Guest's accept() until its application had read everything, guest's clock.
    guest_read_ms: Quantiles,
    /// Bytes over delivered time, MB/s (10^6 bytes).
    goodput_mb_s: Quantiles,
    /// Bytes over acked time, MB/s: the view of a sender that does not wait for an answer.
    acked_mb_s: Quantiles,
    /// Means per transfer.
    cost: CostRow,
    samples: Vec<RawSample>,
}

/// Means of [`Cost`].
#[derive(Debug, Clone, PartialEq, Serialize)]
struct CostRow {
    interrupts: f64,
    vcpu_ms: f64,
    vcpu_switches: f64,
    vmm_ms: f64,
    daemon_ms: f64,
}

/// [`Sample`] in numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct RawSample {
    round: usize,
    phase_ms: f64,
    connect_ms: f64,
    acked_ms: f64,
    delivered_ms: f64,
    guest_read_ms: f64,
    retransmits: u32,
    hash_ok: bool,
    interrupts: u64,
    vcpu_ms: f64,
    vcpu_switches: u64,
    vmm_ms: f64,
    daemon_ms: f64,
}

impl RawSample {
    fn of(sample: &Sample) -> Self {
        let Sample { round, phase, outcome, cost } = sample;
        Self {
            round: *round,
            phase_ms: ms(*phase),
            connect_ms: ms(outcome.connect),
            acked_ms: ms(outcome.acked),
            delivered_ms: ms(outcome.delivered),
            guest_read_ms: ms(outcome.guest_read),
            retransmits: outcome.retransmits,
            hash_ok: outcome.hash_ok,
            interrupts: cost.interrupts,
            vcpu_ms: ms(cost.vcpu),
            vcpu_switches: cost.vcpu_switches,
            vmm_ms: ms(cost.vmm),
            daemon_ms: ms(cost.daemon),
        }
    }
}

fn ms(duration: Duration) -> f64 {
    round3(duration.as_secs_f64() * 1e3)
}

impl Row {
    /// Sums up a cell; `None` if nothing came through.
    #[must_use]
    pub fn of(cell: &Cell) -> Option<Self> {
        let samples = &cell.samples;
        let of =
            |value: fn(&Sample) -> Duration| Quantiles::of(samples.iter().map(|s| ms(value(s))));
        let rate = |value: fn(&Sample) -> Duration| {
            let megabytes = cell.bytes as f64 / 1e6;
            Quantiles::of(samples.iter().map(|s| megabytes / value(s).as_secs_f64()))
        };
        let mean = |value: fn(&Cost) -> f64| {
            let sum: f64 = samples.iter().map(|s| value(&s.cost)).sum();
            round3(sum / samples.len() as f64)
        };
        Some(Self {
            direction: cell.direction,
            path: cell.path,
            bytes: cell.bytes,
            n: samples.len() + cell.failures.len(),
            hash_ok: samples.iter().filter(|s| s.outcome.hash_ok).count(),
            retransmits: samples.iter().map(|s| s.outcome.retransmits).sum(),
            connect_ms: of(|s| s.outcome.connect)?,
            acked_ms: of(|s| s.outcome.acked)?,
            connect_acked_ms: of(Sample::connect_acked)?,
            delivered_ms: of(|s| s.outcome.delivered)?,
            guest_read_ms: of(|s| s.outcome.guest_read)?,
            goodput_mb_s: rate(|s| s.outcome.delivered)?,
            acked_mb_s: rate(|s| s.outcome.acked)?,
            cost: CostRow {
                interrupts: mean(|c| c.interrupts as f64),
                vcpu_ms: mean(|c| ms(c.vcpu)),
                vcpu_switches: mean(|c| c.vcpu_switches as f64),
                vmm_ms: mean(|c| ms(c.vmm)),
                daemon_ms: mean(|c| ms(c.daemon)),
            },
            samples: samples.iter().map(RawSample::of).collect(),
        })
    }
}

/// How much faster one path is than another at one size, by medians.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gain {
    direction: Direction,
    path: NetPath,
    over: NetPath,
    bytes: usize,
    connect: Ratio,
    acked: Ratio,
    connect_acked: Ratio,
    delivered: Ratio,
}

impl Gain {
    /// Over the rounds in which both came through; `None` if there is none, or another size.
    fn of(row: &Row, over: &Row) -> Option<Self> {
        let pairs: Vec<_> = row
            .samples
            .iter()
            .filter_map(|s| Some((over.samples.iter().find(|o| o.round == s.round)?, s)))
            .collect();
        let ratio = |value: fn(&RawSample) -> f64| {
            let values: Vec<_> = pairs.iter().map(|(over, s)| (value(over), value(s))).collect();
            Ratio::of_medians(&values)
        };
        let kind = |row: &Row| (row.direction, row.bytes);
        Some(Self {
            direction: row.direction,
            path: row.path,
            over: over.path,
            bytes: (kind(row) == kind(over)).then_some(row.bytes)?,
            connect: ratio(|s| s.connect_ms)?,
            acked: ratio(|s| s.acked_ms)?,
            connect_acked: ratio(|s| s.connect_ms + s.acked_ms)?,
            delivered: ratio(|s| s.delivered_ms)?,
        })
    }

    /// Of each path over each path before it, at each size.
    #[must_use]
    pub fn all(rows: &[Row]) -> Vec<Self> {
        let before = |row: &Row, over: &Row| over.path < row.path;
        rows.iter()
            .flat_map(|row| {
                rows.iter().filter(move |over| before(row, over)).map(move |o| (row, o))
            })
            .filter_map(|(row, over)| Self::of(row, over))
            .collect()
    }
}

/// A whole case's result.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// How the guests competed.
    pub scheduler: Scheduler,
    /// The cgroups in which they did.
    pub layout: Layout,
    /// The link between the sender and the guests' host.
    pub link: Link,
    /// The measured values of that link.
    pub link_measured: Option<Measured>,
    /// How QEMU ran them.
    pub accel: Accel,
    /// Host kernel, to compare results by.
    pub host_kernel: String,
    /// The profile with which daemon and lab were built.
    pub profile: String,
    /// Buffers in the guests' receive rings, if not the VMM's default.
    pub rx_ring: Option<u16>,
    /// Cores the run had: one for the guests' vCPUs, the rest for everything else.
    pub cores: usize,
    /// Each guest's share of the contended core.
    pub guests: Vec<GuestShare>,
    /// The guests' shares of the time that they had together, in percent, by path; where paths
    /// with boost were measured, including the time until everything was paid back.
    pub cpu_shares: BTreeMap<&'static str, Vec<f64>>,
    /// Why no VM was boosted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boost_refused: Option<String>,
    /// Version of passt's source package, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passt: Option<String>,
    /// Counters of the TCP of the guest at the other end.
    pub guest_tcp: GuestTcp,
    /// One row per path and size.
    pub rows: Vec<Row>,
    /// How much faster than the paths before it each path is.
    pub gains: Vec<Gain>,
    /// Transfers both ways at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub both_ways: Option<BothWays>,
    /// Requests and answers on an open connection.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<Requests>,
    /// Complaints over each path of downloads.
    pub troubles: Vec<Trouble>,
    /// The conditions of the demo in this case, and their verdicts.
    pub checks: Vec<Check>,
    /// The other cases of the same run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Self>,
}

/// Counters of a guest's kernel (`TcpExt`), over all paths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct GuestTcp {
    /// `TCPTimeouts`.
    pub timeouts: u64,
    /// `TCPLossProbes`: last segments sent again because no answer had come.
    pub loss_probes: u64,
    /// `TCPLossProbeRecovery`: probes that were taken to have repaired a loss.
    pub losses_probed: u64,
}

impl GuestTcp {
    /// The difference to earlier counters.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            timeouts: self.timeouts - before.timeouts,
            loss_probes: self.loss_probes - before.loss_probes,
            losses_probed: self.losses_probed - before.losses_probed,
        }
    }
}

/// Complaints of the TCPs of guest and remote while the guest sent over one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Trouble {
    /// The path.
    pub path: NetPath,
    /// How often was looked: after the downloads of three rounds, and after three transfers
    /// both ways.
    pub looks: usize,
    /// Looks that found a new timeout of the guest.
    pub looks_with_timeouts: usize,
    /// Looks that found something new at the remote.
    pub looks_with_remote: usize,
    /// `TCPTimeouts` of the guest.
    pub guest_timeouts: u64,
    /// Segments that the guest sent again, timeouts included ([`Complaints::guest_copies`]), and
    /// those of data that it sent for the first time.
    pub guest_copies: u64,
    /// See `guest_copies`.
    pub guest_segments: u64,
    /// `PAWSEstab` of the remote.
    pub remote_paws: u64,
    /// `TCPACKSkipped...` of the remote.
    pub remote_acks_skipped: u64,
}

impl Trouble {
    /// No look yet.
    #[must_use]
    pub const fn none(path: NetPath) -> Self {
        Self {
            path,
            looks: 0,
            looks_with_timeouts: 0,
            looks_with_remote: 0,
            guest_timeouts: 0,
            guest_copies: 0,
            guest_segments: 0,
            remote_paws: 0,
            remote_acks_skipped: 0,
        }
    }

    /// One more look.
    pub fn add(&mut self, before: &Complaints, now: &Complaints) {
        let timeouts = now.guest_timeouts - before.guest_timeouts;
        let paws = now.remote_paws - before.remote_paws;
        let skipped = now.remote_acks_skipped - before.remote_acks_skipped;
        self.looks += 1;
        self.looks_with_timeouts += usize::from(timeouts > 0);
        self.looks_with_remote += usize::from(paws + skipped > 0);
        self.guest_timeouts += timeouts;
        self.guest_copies += now.guest_copies - before.guest_copies;
        self.guest_segments += now.guest_segments - before.guest_segments;
        self.remote_paws += paws;
        self.remote_acks_skipped += skipped;
    }
}

/// A guest's share of the contended core.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GuestShare {
    /// CPU time of its vCPU, percent of the core.
    pub cpu_percent: f64,
    /// How often its vCPU was switched to, per second.
    pub switches_per_s: f64,
    /// Work of its load, in percent of the work that the vCPU does alone on the core. The rest of
    /// `cpu_percent` went into network and timer work, and under TCG into cold caches.
    pub load_done_percent: u64,
}

impl Report {
    /// Whether no promise was broken.
    #[must_use]
    pub fn kept(&self) -> bool {
        self.checks.iter().all(|check| check.verdict != Verdict::Broken)
    }

    /// Writes `result.json`.
    ///
    /// # Errors
    /// The directory or file cannot be written.
    pub fn write_json(&self, path: &Path) -> Result<()> {
        let dir = path.parent().context("a file has a directory")?;
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    }
}

#[cfg(test)]
mod tests;
