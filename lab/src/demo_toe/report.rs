//! What was measured, and what it had to show.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};
use serde::Serialize;

use super::{Between, Case, Path, Sample};
use crate::report::stats::round3;

/// A median.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Median {
    p50: f64,
}

/// All transfers of a case by a path.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Row {
    case: Case,
    guest: Between,
    path: Path,
    /// Of a stream, or both together.
    #[serde(skip_serializing_if = "Option::is_none")]
    mbit_s: Option<Median>,
    /// Of a byte.
    #[serde(skip_serializing_if = "Option::is_none")]
    rtt_us: Option<Median>,
    /// The receiving VMM and the daemon of its host; of the hosts' own TCP the receiving thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    receiver_cpu_s_per_gb: Option<f64>,
    /// All arrived as it was sent.
    hash_ok: bool,
    /// In the order of the rounds: Mbit/s or microseconds.
    samples: Vec<f64>,
}

/// Its name; the case and the number; of which path, over that of which; the bound.
type Must<'a> = (&'a str, Case, &'a dyn Fn(&Row) -> Option<f64>, Path, Path, (&'static str, f64));

/// One thing that had to be.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Check {
    what: String,
    ratio: f64,
    /// At least, or at most.
    must: (&'static str, f64),
    kept: bool,
}

/// All rows, and what they had to show.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    rows: Vec<Row>,
    checks: Vec<Check>,
}

/// As JSON has it.
fn word(of: impl Serialize) -> String {
    let value = serde_json::to_value(of).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    match all.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => all[odd / 2],
        even => f64::midpoint(all[even / 2 - 1], all[even / 2]),
    }
}

impl Row {
    /// Of all its samples.
    pub(super) fn of(between: Between, path: Path, case: Case, all: &[Sample]) -> Self {
        let is_time = case == Case::RoundTrip;
        let value = |sample: &Sample| if is_time { sample.rtt_us } else { sample.rate * 8e-6 };
        let samples: Vec<f64> = all.iter().map(|sample| round3(value(sample))).collect();
        let p50 = Median { p50: round3(median(samples.iter().copied())) };
        let per_gb = all.iter().map(|sample| sample.cpu_s / (sample.bytes / 1e9));
        Self {
            case,
            guest: if path == Path::Host { Between::None } else { between },
            path,
            mbit_s: (!is_time).then_some(p50),
            rtt_us: is_time.then_some(p50),
            receiver_cpu_s_per_gb: (case == Case::Stream).then(|| round3(median(per_gb))),
            hash_ok: all.iter().all(|sample| sample.whole),
            samples,
        }
    }

    /// The same, measured again.
    fn join(&mut self, other: Self) {
        self.samples.extend(other.samples);
        let p50 = Median { p50: round3(median(self.samples.iter().copied())) };
        (self.mbit_s, self.rtt_us) = (self.mbit_s.map(|_| p50), self.rtt_us.map(|_| p50));
        let cpu = [self.receiver_cpu_s_per_gb, other.receiver_cpu_s_per_gb];
        self.receiver_cpu_s_per_gb = cpu[0].zip(cpu[1]).map(|(a, b)| round3(f64::midpoint(a, b)));
        self.hash_ok &= other.hash_ok;
    }
}

impl Report {
    /// Of all rows. The hosts' own TCP was measured beside each kind of guests; that is one row.
    pub(super) fn of(rows: Vec<Row>) -> Self {
        let mut all: Vec<Row> = Vec::new();
        for row in rows {
            let name = |row: &Row| (row.case, row.guest, row.path);
            match all.iter_mut().find(|known| name(known) == name(&row)) {
                Some(known) => known.join(row),
                None => all.push(row),
            }
        }
        let mut report = Self { rows: all, checks: Vec::new() };
        report.judge();
        report
    }

    /// The table of issue 11, as far as its paths were measured.
    fn judge(&mut self) {
        let rate = |row: &Row| row.mbit_s.map(|m| m.p50);
        let time = |row: &Row| row.rtt_us.map(|m| m.p50);
        let cpu = |row: &Row| row.receiver_cpu_s_per_gb;
        let (stream, duplex, round_trip) = (Case::Stream, Case::Duplex, Case::RoundTrip);
        let (toe, local, overlay) = (Path::ToeTcp, Path::ToeLocal, Path::Overlay);
        let (least, most) = ("at least", "at most");
        let all: [Must<'_>; 6] = [
            ("stream, toe-tcp to overlay", stream, &rate, toe, overlay, (least, 2.7)),
            ("stream, toe-tcp to switch", stream, &rate, toe, Path::Switch, (least, 1.3)),
            ("duplex, toe-tcp to overlay", duplex, &rate, toe, overlay, (least, 2.7)),
            ("round trip, toe-tcp to overlay", round_trip, &time, toe, overlay, (most, 0.5)),
            ("stream, toe-local to toe-tcp", stream, &rate, local, toe, (least, 2.0)),
            ("receiver's CPU, toe-tcp to overlay", stream, &cpu, toe, overlay, (most, 0.6)),
        ];
        for guest in [Between::Uml, Between::Qemu] {
            for (what, case, of, path, over, must) in all {
                let value = |path| {
                    let found = |row: &&Row| (row.case, row.guest, row.path) == (case, guest, path);
                    self.rows.iter().find(found).and_then(of)
                };
                let (Some(value), Some(over)) = (value(path), value(over)) else { continue };
                let ratio = round3(value / over);
                let kept = if must.0 == least { ratio >= must.1 } else { ratio <= must.1 };
                let what = format!("{guest:?}: {what}").to_lowercase();
                self.checks.push(Check { what, ratio, must, kept });
            }
        }
    }

    /// Whether all was as it has to be.
    #[must_use]
    pub fn kept(&self) -> bool {
        self.rows.iter().all(|row| row.hash_ok) && self.checks.iter().all(|check| check.kept)
    }

    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = format!(
            "\n{:11} {:5} {:10} {:>10} {:>10} {:>12}  arrived\n",
            "case", "guest", "path", "Mbit/s", "us", "CPU s per GB"
        );
        let mut rows: Vec<&Row> = self.rows.iter().collect();
        rows.sort_by_key(|row| (row.guest, row.case, row.path));
        for row in rows {
            let number = |value: Option<f64>, digits: usize| {
                value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
            };
            let _ = writeln!(
                out,
                "{:11} {:5} {:10} {:>10} {:>10} {:>12}  {}",
                word(row.case),
                word(row.guest),
                word(row.path),
                number(row.mbit_s.map(|m| m.p50), 0),
                number(row.rtt_us.map(|m| m.p50), 1),
                number(row.receiver_cpu_s_per_gb, 2),
                if row.hash_ok { "whole" } else { "DAMAGED" }
            );
        }
        for Check { what, ratio, must: (how, bound), kept } in &self.checks {
            let verdict = if *kept { "kept" } else { "MISSED" };
            let _ = writeln!(out, "{what}: {ratio:.2}, must be {how} {bound}: {verdict}");
        }
        out
    }

    /// As JSON.
    pub(super) fn write_json(&self, path: &std::path::Path) -> Result<()> {
        let dir = path.parent().context("a file has a directory")?;
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    }
}
