//! The table of an experiment: arms side by side, a line for each measure of a case, and below it
//! how many times better each arm is than the first.

use std::fmt::Write as _;

use super::stats::{Quantiles, Ratio, percentile};
use super::{Also, Better, Measure, Results};

/// Arms side by side: with their names 80 columns.
const ARMS: usize = 4;
/// Columns of a measure's name, and of an arm.
const NAME: usize = 28;
const ARM: usize = 13;

impl Results {
    /// All cases, and the checks.
    pub(crate) fn table(&self) -> String {
        let mut out = String::from(
            "\nMedians; in brackets the 95 % interval of how many times better an arm is than the \
             first.\n",
        );
        for case in self.cases() {
            let arms: Vec<(&str, usize)> =
                self.arms(case).map(|arm| (&*arm.arm, arm.samples.len())).collect();
            for part in parts(&arms) {
                self.part(&mut out, case, arms[0].0, &part);
            }
        }
        if !self.checks().is_empty() {
            out += "\nWhat this run had to show. Not decided: the bound is within the interval.\n";
        }
        for check in self.checks() {
            let _ = writeln!(out, "{check}");
        }
        out
    }

    /// Some arms of a case.
    fn part(&self, out: &mut String, case: &str, first: &str, arms: &[(&str, usize)]) {
        let _ = writeln!(out, "\n{case}");
        let names = arms.iter().map(|(arm, _)| (*arm).to_owned());
        line(out, "", names);
        line(out, "  samples", arms.iter().map(|(_, count)| count.to_string()));
        for measure in self.measures {
            let values = arms.iter().map(|(arm, _)| self.quantiles(case, arm, measure.name));
            let values: Vec<Option<Quantiles>> = values.collect();
            if values.iter().all(Option::is_none) {
                continue;
            }
            let told = |value: &Option<Quantiles>| value.map_or("-".to_owned(), |q| digits(q.p50));
            line(out, &name(measure), values.iter().map(told));
            match measure.also {
                Also::Nothing => {}
                Also::Tail => {
                    let tail = |(arm, _): &(&str, usize)| {
                        let values = self.values(case, arm, measure.name);
                        percentile(&values, 990).map_or("-".to_owned(), digits)
                    };
                    line(out, "    one in a hundred", arms.iter().map(tail));
                }
                Also::Spread => {
                    let of = |of: fn(&Quantiles) -> String| {
                        move |it: &Option<Quantiles>| it.as_ref().map_or("-".to_owned(), of)
                    };
                    let tenths = |q: &Quantiles| format!("{}-{}", digits(q.p10), digits(q.p90));
                    line(out, "    all but two in ten", values.iter().map(of(tenths)));
                    line(out, "    mean", values.iter().map(of(|q| digits(q.mean))));
                }
            }
            let gains: Vec<Option<Ratio>> =
                arms.iter().map(|(arm, _)| self.gain(case, arm, first, measure)).collect();
            if measure.better != Better::Neither && gains.len() > 1 {
                let of = |(gain, (arm, _)): (&Option<Ratio>, &(&str, usize))| match gain {
                    Some(gain) if *arm != first => times(*gain),
                    _ => String::new(),
                };
                line(out, "    times better", gains.iter().zip(arms).map(of));
            }
        }
    }
}

/// Arms that stand side by side; the first, with which the others are compared, in each part.
fn parts<'a>(arms: &[(&'a str, usize)]) -> Vec<Vec<(&'a str, usize)>> {
    let Some((first, others)) = arms.split_first() else { return Vec::new() };
    if others.is_empty() {
        return vec![vec![*first]];
    }
    let with = |part: &[(&'a str, usize)]| [&[*first], part].concat();
    others.chunks(ARMS - 1).map(with).collect()
}

fn name(measure: &Measure) -> String {
    match measure.unit {
        "" => format!("  {}", measure.name),
        unit => format!("  {}, {unit}", measure.name),
    }
}

fn line(out: &mut String, name: &str, cells: impl Iterator<Item = String>) {
    let mut text = format!("{name:NAME$}");
    for cell in cells {
        let _ = write!(text, "{cell:>ARM$}");
    }
    let _ = writeln!(out, "{}", text.trim_end());
}

/// Three significant digits or so.
fn digits(value: f64) -> String {
    match value.abs() {
        v if v < 9.995 => format!("{value:.2}"),
        v if v < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn times(ratio: Ratio) -> String {
    let of = |value: f64| if value < 9.95 { format!("{value:.1}") } else { format!("{value:.0}") };
    match ratio.high.is_finite() {
        true => format!("{:.2}[{},{}]", ratio.ratio, of(ratio.low), of(ratio.high)),
        false => format!("{:.2}", ratio.ratio),
    }
}
