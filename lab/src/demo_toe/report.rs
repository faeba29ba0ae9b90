//! The measurements, and the verdicts.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};
use serde::Serialize;

use super::{Between, Case, Path, Sample};
use crate::report::checks::Verdict;
use crate::report::stats::{Quantiles, Ratio, round3};

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
    /// The receiving VMM and the daemon of its host; without a guest the receiving thread instead
    /// of a VMM, and of the hosts' own TCP that alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    receiver_cpu_s_per_gb: Option<f64>,
    /// All arrived as it was sent.
    hash_ok: bool,
    /// In the order of the rounds: Mbit/s or microseconds.
    samples: Vec<f64>,
    /// Likewise, of the receiver's processor time.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cpu_samples: Vec<f64>,
}

/// Which number of a row.
#[derive(Debug, Clone, Copy)]
enum Number {
    /// The rate or the time.
    Sample,
    /// The receiver's processor time.
    Cpu,
}

/// The wanted bound of a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Wanted {
    AtLeast(f64),
    AtMost(f64),
}

/// A row of issue 11's table: the first path over the second.
struct Must {
    case: Case,
    number: Number,
    path: Path,
    over: Path,
    wanted: Wanted,
    /// The VTOE paper's value, over InfiniBand.
    paper: Option<&'static str>,
}

const fn must(
    (case, number): (Case, Number),
    [path, over]: [Path; 2],
    wanted: Wanted,
    paper: Option<&'static str>,
) -> Must {
    Must { case, number, path, over, wanted, paper }
}

const STREAM: (Case, Number) = (Case::Stream, Number::Sample);

/// Between guests.
const MUSTS: [Must; 6] = [
    must(STREAM, [Path::ToeTcp, Path::Overlay], Wanted::AtLeast(2.7), Some("2.7")),
    must(STREAM, [Path::ToeTcp, Path::Switch], Wanted::AtLeast(1.3), None),
    must(
        (Case::Duplex, Number::Sample),
        [Path::ToeTcp, Path::Overlay],
        Wanted::AtLeast(2.7),
        Some("full duplex kept"),
    ),
    must(
        (Case::RoundTrip, Number::Sample),
        [Path::ToeTcp, Path::Overlay],
        Wanted::AtMost(0.5),
        Some("0.5"),
    ),
    must(STREAM, [Path::ToeLocal, Path::ToeTcp], Wanted::AtLeast(2.0), None),
    must(
        (Case::Stream, Number::Cpu),
        [Path::ToeTcp, Path::Overlay],
        Wanted::AtMost(0.6),
        Some("0.77"),
    ),
];

/// Between hosts.
const ALONE: Must = must(STREAM, [Path::Fabric, Path::Host], Wanted::AtLeast(0.94), Some("0.94"));

/// One thing that had to be.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Check {
    guest: Between,
    what: String,
    /// The median over the median.
    measured: f64,
    /// Its 95 % interval.
    interval: [f64; 2],
    wanted: Wanted,
    paper: Option<&'static str>,
    verdict: Verdict,
}

/// All rows, and their conditions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    rows: Vec<Row>,
    checks: Vec<Check>,
}

impl Wanted {
    /// Of what a run can tell: kept or broken is what is so in the whole interval.
    fn verdict(self, ratio: Ratio) -> Verdict {
        let [is_kept, is_broken] = match self {
            Self::AtLeast(least) => [ratio.low >= least, ratio.high < least],
            Self::AtMost(most) => [ratio.high <= most, ratio.low > most],
        };
        match (is_kept, is_broken) {
            (true, _) => Verdict::Kept,
            (_, true) => Verdict::Broken,
            _ => Verdict::NotDecided,
        }
    }
}

/// As JSON has it.
fn word(of: impl Serialize) -> String {
    let value = serde_json::to_value(of).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

/// `None`: of nothing.
fn median_of(values: &[f64]) -> Option<f64> {
    Some(Quantiles::of(values.iter().copied())?.p50)
}

impl Row {
    /// Of all its samples.
    pub(super) fn of(between: Between, path: Path, case: Case, all: &[Sample]) -> Self {
        let is_time = case == Case::RoundTrip;
        let value = |sample: &Sample| if is_time { sample.rtt_us } else { sample.rate * 8e-6 };
        let samples: Vec<f64> = all.iter().map(|sample| round3(value(sample))).collect();
        let p50 = Median { p50: median_of(&samples).unwrap_or_default() };
        let per_gb = |sample: &Sample| round3(sample.cpu_s / (sample.bytes / 1e9));
        let timed = if case == Case::Stream { all } else { &[] };
        let cpu_samples: Vec<f64> = timed.iter().map(per_gb).collect();
        Self {
            case,
            guest: match path {
                Path::Fabric | Path::Encrypted | Path::Host => Between::None,
                _ => between,
            },
            path,
            mbit_s: (!is_time).then_some(p50),
            rtt_us: is_time.then_some(p50),
            receiver_cpu_s_per_gb: median_of(&cpu_samples),
            hash_ok: all.iter().all(|sample| sample.whole),
            samples,
            cpu_samples,
        }
    }

    /// The same, measured again.
    fn join(&mut self, other: Self) {
        self.samples.extend(other.samples);
        let p50 = Median { p50: median_of(&self.samples).unwrap_or_default() };
        (self.mbit_s, self.rtt_us) = (self.mbit_s.map(|_| p50), self.rtt_us.map(|_| p50));
        self.cpu_samples.extend(other.cpu_samples);
        self.receiver_cpu_s_per_gb = median_of(&self.cpu_samples);
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
        let guests = [Between::Uml, Between::Qemu];
        let all = guests.iter().flat_map(|guest| MUSTS.iter().map(move |must| (*guest, must)));
        let all = all.chain([(Between::None, &ALONE)]);
        self.checks = all.filter_map(|(guest, must)| self.check(guest, must)).collect();
    }

    /// Transfers of one round belong together.
    fn check(&self, guest: Between, must: &Must) -> Option<Check> {
        let Must { case, number, path, over, wanted, paper } = *must;
        let samples = |path| {
            let is_it = |row: &&Row| (row.case, row.guest, row.path) == (case, guest, path);
            let row = self.rows.iter().find(is_it)?;
            Some(match number {
                Number::Sample => &row.samples,
                Number::Cpu => &row.cpu_samples,
            })
        };
        let pairs = samples(path)?.iter().copied().zip(samples(over)?.iter().copied());
        let ratio = Ratio::of_medians(&pairs.collect::<Vec<_>>())?;
        let of = match number {
            Number::Sample => "",
            Number::Cpu => ", receiver's CPU per GB",
        };
        let (name, case) = (word(guest), word(case));
        let what = format!("{name}, {case}{of}: {} over {}", word(path), word(over));
        let (measured, interval) = (ratio.ratio, [ratio.low, ratio.high]);
        let verdict = wanted.verdict(ratio);
        Some(Check { guest, what, measured, interval, wanted, paper, verdict })
    }

    /// Whether all was as it has to be.
    #[must_use]
    pub fn kept(&self) -> bool {
        self.rows.iter().all(|row| row.hash_ok)
            && self.checks.iter().all(|check| check.verdict != Verdict::Broken)
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
        out += "\n\
            What this run had to show (ratios of medians; in brackets the 95 % interval). Not\n\
            decided: what is wanted is within the interval, and a longer run may say either.\n";
        for check in &self.checks {
            let Check { what, measured, interval: [low, high], wanted, paper, verdict, .. } = check;
            let wanted = match wanted {
                Wanted::AtLeast(least) => format!("at least {least}"),
                Wanted::AtMost(most) => format!("at most {most}"),
            };
            let paper = paper.map_or_else(String::new, |paper| format!(" (paper: {paper})"));
            let word = verdict.word();
            let _ = writeln!(
                out,
                "  {word:11}  {what}: {measured:.2} [{low:.2}, {high:.2}], {wanted}{paper}"
            );
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

#[cfg(test)]
mod tests {
    use super::*;

    fn row(between: Between, path: Path, case: Case, values: &[f64]) -> Row {
        let sample = |&value: &f64| Sample {
            rate: value * 125_000.0,
            rtt_us: value,
            cpu_s: value / 1000.0,
            bytes: 1e9,
            whole: true,
        };
        Row::of(between, path, case, &values.iter().map(sample).collect::<Vec<_>>())
    }

    fn verdicts(rows: Vec<Row>) -> Vec<(String, Verdict)> {
        let report = Report::of(rows);
        report.checks.into_iter().map(|check| (check.what, check.verdict)).collect()
    }

    #[test]
    fn a_ratio_is_kept_or_broken_by_its_whole_interval() {
        let stream = |path, values: &[f64]| row(Between::Uml, path, Case::Stream, values);
        let both = |toe: &[f64]| {
            verdicts(vec![stream(Path::Overlay, &[100.0; 8]), stream(Path::ToeTcp, toe)])[0].1
        };
        assert_eq!(both(&[280.0; 8]), Verdict::Kept);
        assert_eq!(both(&[260.0; 8]), Verdict::Broken);
        let wide = [200.0, 400.0, 200.0, 400.0, 200.0, 400.0, 200.0, 400.0];
        assert_eq!(both(&wide), Verdict::NotDecided);
        assert_eq!(both(&[280.0; 5]), Verdict::NotDecided, "five say nothing");
    }

    #[test]
    fn times_and_processor_time_have_to_be_less() {
        let trip = |path, us| row(Between::Qemu, path, Case::RoundTrip, &[us; 8]);
        let stream = |path, of| row(Between::Qemu, path, Case::Stream, &[of; 8]);
        let of = |toe| {
            let trips = [trip(Path::Overlay, 100.0), trip(Path::ToeTcp, toe)];
            let streams = [stream(Path::Overlay, 100.0), stream(Path::ToeTcp, toe)];
            let all = verdicts([trips, streams].concat());
            let word = |what: &str| all.iter().find(|(name, _)| name.contains(what)).unwrap().1;
            (word("round-trip"), word("CPU"))
        };
        assert_eq!(of(50.0), (Verdict::Kept, Verdict::Kept));
        assert_eq!(of(55.0), (Verdict::Broken, Verdict::Kept));
        assert_eq!(of(61.0), (Verdict::Broken, Verdict::Broken));
    }

    #[test]
    fn what_has_no_guest_is_one_row_of_all_kinds_and_judged_once() {
        let of = |between| {
            let stream = |path| row(between, path, Case::Stream, &[100.0; 8]);
            [stream(Path::Fabric), stream(Path::Host)]
        };
        let report = Report::of([of(Between::Uml), of(Between::Qemu)].concat());
        assert_eq!(report.rows.len(), 2);
        assert_eq!(report.rows[0].samples.len(), 16);
        assert_eq!(report.checks.len(), 1);
        let text = serde_json::to_value(&report).expect("JSON");
        let (row, check) = (&text["rows"][0], &text["checks"][0]);
        assert_eq!((row["guest"].as_str(), row["path"].as_str()), (Some("none"), Some("toe-tcp")));
        assert_eq!(check["wanted"]["at-least"], 0.94);
    }
}
