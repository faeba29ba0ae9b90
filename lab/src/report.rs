//! What a demo found: the table for people and `result.json` for programs.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::accel::Accel;
use crate::sched::Scheduler;
use crate::transfer::Outcome;

/// A way from the remote host into the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Path3 {
    /// QEMU's own tap on a Linux bridge.
    Tap,
    /// Nightporter with the offload off.
    Off,
    /// Nightporter with the offload on.
    AckOffload,
}

impl Path3 {
    /// Its name, as in `result.json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tap => "tap",
            Self::Off => "off",
            Self::AckOffload => "ack-offload",
        }
    }
}

/// 10th, 50th and 90th percentile.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quantiles {
    /// One in ten is at or below this.
    pub p10: f64,
    /// The median.
    pub p50: f64,
    /// One in ten is at or above this.
    pub p90: f64,
}

impl Quantiles {
    /// Of a sample of at least one, linear between neighbours (type 7 of Hyndman and Fan, 1996).
    /// `None` for an empty sample.
    #[must_use]
    pub fn of(sample: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = sample.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let at = |percent: usize| {
            let (low, rest) = (last * percent / 100, last * percent % 100);
            let high = (low + 1).min(last);
            round3(sorted[low] + (sorted[high] - sorted[low]) * rest as f64 / 100.0)
        };
        Some(Self { p10: at(10), p50: at(50), p90: at(90) })
    }
}

/// Microseconds and bytes per millisecond are as fine as a result needs to be.
fn round3(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// All transfers of one size over one path.
#[derive(Debug, Clone)]
pub struct Cell {
    /// The path.
    pub path: Path3,
    /// Size of each transfer, bytes on the wire.
    pub bytes: usize,
    /// Those that came through.
    pub outcomes: Vec<Outcome>,
    /// Those that did not, and why.
    pub failures: Vec<String>,
}

/// One row of `result.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    path: Path3,
    bytes: usize,
    /// Transfers tried.
    n: usize,
    /// Transfers that came through and whose hash was right. Times are of those that came through.
    hash_ok: usize,
    /// Segments the sender retransmitted, all transfers together.
    retransmits: u32,
    connect_ms: Quantiles,
    acked_ms: Quantiles,
    delivered_ms: Quantiles,
    /// Guest's accept() until its application had read everything, guest's clock.
    guest_read_ms: Quantiles,
    /// Bytes over delivered time, MB/s (10^6 bytes).
    goodput_mb_s: Quantiles,
    /// Bytes over acked time, MB/s: what a sender sees that does not wait for an answer.
    acked_mb_s: Quantiles,
}

impl Row {
    /// Sums up a cell; `None` if nothing came through.
    #[must_use]
    pub fn of(cell: &Cell) -> Option<Self> {
        let of = |value: fn(&Outcome) -> Duration| {
            Quantiles::of(cell.outcomes.iter().map(|o| value(o).as_secs_f64() * 1e3))
        };
        let rate = |value: fn(&Outcome) -> Duration| {
            let megabytes = cell.bytes as f64 / 1e6;
            Quantiles::of(cell.outcomes.iter().map(|o| megabytes / value(o).as_secs_f64()))
        };
        Some(Self {
            path: cell.path,
            bytes: cell.bytes,
            n: cell.outcomes.len() + cell.failures.len(),
            hash_ok: cell.outcomes.iter().filter(|o| o.hash_ok).count(),
            retransmits: cell.outcomes.iter().map(|o| o.retransmits).sum(),
            connect_ms: of(|o| o.connect)?,
            acked_ms: of(|o| o.acked)?,
            delivered_ms: of(|o| o.delivered)?,
            guest_read_ms: of(|o| o.guest_read)?,
            goodput_mb_s: rate(|o| o.delivered)?,
            acked_mb_s: rate(|o| o.acked)?,
        })
    }
}

/// A whole demo's result.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// How the guests competed.
    pub scheduler: Scheduler,
    /// How QEMU ran them.
    pub accel: Accel,
    /// Host kernel, to compare results by.
    pub host_kernel: String,
    /// Cores the run had: one for the guests' vCPUs, the rest for everything else.
    pub cores: usize,
    /// What each guest got of the contended core.
    pub guests: Vec<GuestShare>,
    /// One row per path and size.
    pub rows: Vec<Row>,
    /// What the demo must show in this case, and whether it did.
    pub checks: Vec<Check>,
}

/// What a guest got of the contended core.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GuestShare {
    /// CPU time of its vCPU, percent of the core.
    pub cpu_percent: f64,
    /// Work its load has done, in percent of what the vCPU does alone on the core. The rest of
    /// `cpu_percent` went into network and timer work, and under TCG into cold caches.
    pub load_done_percent: u64,
}

/// One promise and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// The promise.
    pub what: String,
    /// What was measured, in the promise's unit.
    pub measured: f64,
    /// The least that keeps the promise.
    pub wanted: f64,
    /// Whether it was kept.
    pub ok: bool,
    /// What bounds the number, where that is known and it was missed.
    pub bound: Option<&'static str>,
}

const ACKED_BOUND: &str = "the daemon, the sender and QEMU's main threads share the other cores: \
    whatever else runs there delays the acknowledgements";
const DELIVERED_BOUND: &str = "the guest has to run to answer the SYN, to take the data and to \
    answer; under TCG a turn may end early, because a vCPU that waits for QEMU's lock, as it does \
    at most timer ticks, goes to the end of the queue";

impl Check {
    fn at_least(what: &str, measured: f64, wanted: f64) -> Self {
        Self {
            what: what.to_owned(),
            measured: (measured * 100.0).round() / 100.0,
            wanted,
            ok: measured >= wanted,
            bound: None,
        }
    }

    fn bounded_by(mut self, bound: &'static str) -> Self {
        self.bound = (!self.ok).then_some(bound);
        self
    }
}

/// The size every promise about contended guests is made for.
const PROMISED_BYTES: usize = 100_000;
/// The size of the bulk row.
const BULK_BYTES: usize = 50_000_000;

/// What the rows must show in this scheduling case. Rows that were not measured promise nothing.
#[must_use]
pub fn checks(scheduler: Scheduler, rows: &[Row]) -> Vec<Check> {
    let row = |path, bytes| rows.iter().find(|r| r.path == path && r.bytes == bytes);
    let mut checks = Vec::new();
    let tried: usize = rows.iter().map(|r| r.n).sum();
    let right: usize = rows.iter().map(|r| r.hash_ok).sum();
    if tried > 0 {
        let share = right as f64 / tried as f64;
        checks.push(Check::at_least("share of transfers whose hash was right", share, 1.0));
    }
    if let (Some(tap), Some(on)) =
        (row(Path3::Tap, PROMISED_BYTES), row(Path3::AckOffload, PROMISED_BYTES))
    {
        let acked = tap.acked_ms.p50 / on.acked_ms.p50;
        let delivered = tap.delivered_ms.p50 / on.delivered_ms.p50;
        let wanted = match scheduler {
            Scheduler::Rr30 => Some((31.0, 2.0)),
            Scheduler::Eevdf | Scheduler::Quota30 => Some((5.0, 1.0)),
            Scheduler::Idle => None,
        };
        if let Some((wanted_acked, wanted_delivered)) = wanted {
            let what = "100 KB, median: times faster acked than over tap";
            checks.push(Check::at_least(what, acked, wanted_acked).bounded_by(ACKED_BOUND));
            let what = "100 KB, median: times faster delivered than over tap";
            checks.push(
                Check::at_least(what, delivered, wanted_delivered).bounded_by(DELIVERED_BOUND),
            );
        }
    }
    for (better, base) in [(Path3::AckOffload, Path3::Off), (Path3::Off, Path3::Tap)] {
        if let (Some(better), Some(base)) = (row(better, BULK_BYTES), row(base, BULK_BYTES)) {
            let what = format!("50 MB, median goodput: {} over {}", better.path, base.path);
            let measured = better.goodput_mb_s.p50 / base.goodput_mb_s.p50;
            checks.push(Check::at_least(&what, measured, 0.95));
        }
    }
    checks
}

impl std::fmt::Display for Path3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Report {
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

    /// The table a newcomer reads.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "{}", self.headline());
        out.push_str(LEGEND);
        let mut bytes = 0;
        for row in &self.rows {
            if row.bytes != bytes {
                bytes = row.bytes;
                let _ = writeln!(out, "\n{}", size_header(bytes));
            }
            let tap = self.rows.iter().find(|r| r.path == Path3::Tap && r.bytes == bytes);
            let _ = writeln!(out, "{}", table_line(row, tap));
        }
        if !self.checks.is_empty() {
            out.push_str("\nWhat this run had to show:\n");
        }
        for check in &self.checks {
            let mark = if check.ok { "yes" } else { "NO " };
            let Check { what, measured, wanted, .. } = check;
            let _ = writeln!(out, "  {mark}  {what}: {measured} (at least {wanted})");
            if let Some(bound) = check.bound {
                let _ = writeln!(out, "       What bounds it: {bound}.");
            }
        }
        out
    }

    fn headline(&self) -> String {
        let shares: Vec<String> =
            self.guests.iter().map(|g| format!("{} %", g.cpu_percent)).collect();
        let load = match self.scheduler.load_percent() {
            None => "no load in the guests".to_owned(),
            Some(wanted) => format!("each wants {wanted} % of it; they got {}", shares.join(", ")),
        };
        format!(
            "\nUploads into one of three guests that share a core ({}, {}; {load}).",
            self.scheduler, self.accel
        )
    }
}

const LEGEND: &str = "
  connect    the sender calls connect() … it returns
  acked      … everything written is acknowledged, from connect()'s return: the sender is done
  delivered  the sender calls connect() … the guest's application has read everything
  All in ms: one in ten is faster than p10, half are faster than p50, one in ten is slower than p90.
  gain       how many times faster than tap, by the medians of acked and of delivered
";

fn size_header(bytes: usize) -> String {
    format!(
        "{:>9}            connect              acked            delivered     goodput      gain\n\
         {:12}  p10   p50   p90   p10   p50   p90    p10   p50   p90     MB/s  acked  deliv.  \
         hashes",
        size(bytes),
        "path"
    )
}

fn table_line(row: &Row, tap: Option<&Row>) -> String {
    let three = |q: &Quantiles| format!("{} {} {}", ms(q.p10), ms(q.p50), ms(q.p90));
    let gain = |of: fn(&Row) -> f64| match tap {
        Some(tap) if row.path != Path3::Tap => times(of(tap) / of(row)),
        _ => "-".to_owned(),
    };
    format!(
        "{:12} {} {}  {}  {:>7.2} {:>6}  {:>6}  {}/{}",
        row.path.name(),
        three(&row.connect_ms),
        three(&row.acked_ms),
        three(&row.delivered_ms),
        row.goodput_mb_s.p50,
        gain(|r| r.acked_ms.p50),
        gain(|r| r.delivered_ms.p50),
        row.hash_ok,
        row.n
    )
}

/// Three significant digits or so, five columns.
fn ms(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:5.2}"),
        v if v < 99.95 => format!("{v:5.1}"),
        v => format!("{v:5.0}"),
    }
}

fn times(value: f64) -> String {
    if value < 10.0 { format!("{value:.1}x") } else { format!("{value:.0}x") }
}

fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1_000_000 => format!("{} MB", b / 1_000_000),
        b => format!("{} KB", b / 1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(path: Path3, acked_ms: u64, delivered_ms: u64) -> Cell {
        let outcome = Outcome {
            connect: Duration::from_millis(1),
            acked: Duration::from_millis(acked_ms),
            delivered: Duration::from_millis(delivered_ms),
            guest_read: Duration::from_millis(1),
            retransmits: 0,
            hash_ok: true,
        };
        Cell { path, bytes: PROMISED_BYTES, outcomes: vec![outcome; 30], failures: Vec::new() }
    }

    #[test]
    fn quantiles_lie_between_neighbours() {
        let quantiles = Quantiles::of((0..=10).map(f64::from)).expect("not empty");
        assert_eq!(quantiles, Quantiles { p10: 1.0, p50: 5.0, p90: 9.0 });
        let two = Quantiles::of([4.0, 2.0]).expect("not empty");
        assert_eq!(two, Quantiles { p10: 2.2, p50: 3.0, p90: 3.8 });
        assert_eq!(Quantiles::of([]), None);
    }

    #[test]
    fn a_gain_of_thirty_is_not_thirty_one() {
        let tap = Row::of(&cell(Path3::Tap, 120, 130)).expect("came through");
        let on = Row::of(&cell(Path3::AckOffload, 4, 60)).expect("came through");
        let checks = checks(Scheduler::Rr30, &[tap, on]);
        let kept: Vec<bool> = checks.iter().map(|c| c.ok).collect();
        assert_eq!(kept, [true, false, true], "{checks:?}");
    }

    #[test]
    fn a_wrong_hash_or_a_failed_transfer_breaks_the_first_promise() {
        let mut bad = cell(Path3::Tap, 120, 130);
        bad.outcomes[7].hash_ok = false;
        let row = Row::of(&bad).expect("came through");
        assert!(!checks(Scheduler::Eevdf, &[row])[0].ok);
        let mut failed = cell(Path3::Tap, 120, 130);
        failed.failures.push("timed out".to_owned());
        let row = Row::of(&failed).expect("came through");
        assert_eq!((row.n, row.hash_ok), (31, 30));
        assert!(!checks(Scheduler::Eevdf, &[row])[0].ok);
    }

    #[test]
    fn the_json_has_the_documented_shape() {
        let row = Row::of(&cell(Path3::AckOffload, 4, 60)).expect("came through");
        let report = Report {
            scheduler: Scheduler::Rr30,
            accel: Accel::Tcg,
            host_kernel: "6.1".to_owned(),
            cores: 2,
            guests: vec![GuestShare { cpu_percent: 33.0, load_done_percent: 20 }; 3],
            rows: vec![row],
            checks: Vec::new(),
        };
        let json = serde_json::to_value(&report).expect("serialises");
        assert_eq!((&json["scheduler"], &json["accel"]), (&"rr30".into(), &"tcg".into()));
        let row = &json["rows"][0];
        assert_eq!((&row["path"], &row["bytes"]), (&"ack-offload".into(), &100_000.into()));
        assert_eq!((&row["n"], &row["hash_ok"]), (&30.into(), &30.into()));
        for time in ["connect_ms", "acked_ms", "delivered_ms"] {
            for quantile in ["p10", "p50", "p90"] {
                assert!(row[time][quantile].is_number(), "{time}.{quantile} in {row}");
            }
        }
    }
}
