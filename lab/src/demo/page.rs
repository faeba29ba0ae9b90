//! The short form of a demo's result: a table of 80 columns, and the same as a page.

use std::fmt::Write as _;

use super::checks::Measured;
use super::measures::{ACKED, CONNECT, DELIVERED, size};
use super::{Direction, NetPath};
use crate::experiment::stats::Ratio;
use crate::link::Link;
use crate::sched::Scheduler;

/// Columns of a bar at most, and times faster than tap that fill it.
const BAR: usize = 8;
const BAR_GAIN: f64 = 4.0;
/// A path is slower than tap for certain if its whole interval is below this.
const SLOWER: f64 = 0.95;

/// A case, and the things that are told about it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shown<'a> {
    pub(super) measured: Measured<'a>,
    /// Why no VM was boosted.
    pub(super) boost_refused: Option<&'a str>,
    /// How QEMU ran the guests, and on how many cores.
    pub(super) machine: &'a str,
}

/// One size of transfers in one direction.
struct Line {
    bytes: usize,
    direction: Direction,
    case: String,
    /// As installed, and with all that is opt-in.
    others: [Other; 2],
}

/// A path beside tap.
#[derive(Clone, Copy)]
enum Other {
    Measured(NetPath, Ratio),
    /// Nothing came through.
    Failed,
    /// No opt-in is for this case.
    Same,
}

/// The paths beside tap: as installed, and with the opt-ins.
const fn paths(direction: Direction, scheduler: Scheduler) -> [Option<NetPath>; 2] {
    let opt_ins = match (direction, scheduler) {
        (Direction::Up, Scheduler::Strict30) => None,
        (Direction::Down, Scheduler::Strict30) => Some(NetPath::FloodRoute),
        (Direction::Up, _) => Some(NetPath::AckOffloadBoost),
        (Direction::Down, _) => Some(NetPath::FloodRouteBoost),
    };
    [Some(NetPath::AckOffload), opt_ins]
}

impl Shown<'_> {
    fn lines(self) -> Vec<Line> {
        let Measured { terms, kinds, .. } = self.measured;
        let line = |&(direction, bytes): &(Direction, usize)| {
            let others = paths(direction, terms.scheduler).map(|path| match path {
                None => Other::Same,
                Some(path) => match self.measured.gain((direction, bytes), path, NetPath::Tap) {
                    Some(ratio) => Other::Measured(path, ratio),
                    None => Other::Failed,
                },
            });
            Line { bytes, direction, case: terms.one_way(direction, bytes), others }
        };
        kinds.iter().map(line).collect()
    }

    /// A median.
    fn median(self, case: &str, path: NetPath, time: &str) -> String {
        let quantiles = self.measured.results.quantiles(case, path.name(), time);
        quantiles.map_or_else(|| "-".to_owned(), |quantiles| ms(quantiles.p50))
    }

    fn row(self, line: &Line) -> String {
        let way = if line.direction == Direction::Up { "up" } else { "down" };
        let tap = self.median(&line.case, NetPath::Tap, DELIVERED.name);
        let mut text = format!("  {:>6} {way:4} {tap:>7}", size(line.bytes));
        for other in &line.others {
            let _ = match other {
                Other::Measured(path, ratio) => {
                    let unclear = if ratio.low <= 1.0 { "~" } else { "" };
                    let times = format!("{unclear}{:.1}x", ratio.ratio);
                    let delivered = self.median(&line.case, *path, DELIVERED.name);
                    write!(text, "   {delivered:>7} {times:>6} {:BAR$}", bar(ratio.ratio))
                }
                Other::Failed => write!(text, "   {:>7} {:>6} {:BAR$}", "failed", "", ""),
                Other::Same => write!(text, "   {:>7}", "same"),
            };
        }
        text.trim_end().to_owned()
    }

    fn name(self) -> String {
        let scheduler = match self.measured.terms.scheduler {
            Scheduler::Strict30 => "Whole slices of 30 ms, as Xen and KVM under SCHED_RR give them",
            Scheduler::Eevdf => "The kernel's default scheduler",
            _ => "Guests that share a core",
        };
        let link = match self.measured.terms.link {
            Link::Lan => "10 Gbit/s, 0.1 ms",
            Link::Gigabit => "1 Gbit/s, 0.1 ms",
            Link::Metro => "1 Gbit/s, 10 ms",
            Link::Wan => "100 Mbit/s, 40 ms",
            Link::Hundred => "100 Mbit/s, 0.1 ms",
        };
        format!("{scheduler}; {link}:")
    }
}

/// Transfers that arrived whole, and all.
fn whole(cases: &[Shown<'_>]) -> (usize, usize) {
    let all = cases.iter().flat_map(|case| case.lines().into_iter().map(|line| (*case, line)));
    let each = all.map(|(case, line)| case.measured.whole(&line.case));
    each.fold((0, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1))
}

/// Rows that are slower than tap for certain.
fn slower(cases: &[Shown<'_>]) -> Vec<String> {
    let mut slower = Vec::new();
    for line in cases.iter().flat_map(|case| case.lines()) {
        for other in &line.others {
            if let Other::Measured(path, ratio) = other
                && ratio.high < SLOWER
            {
                slower.push(format!("{} {}: {path}", size(line.bytes), line.direction));
            }
        }
    }
    slower
}

/// All data was right, everything was measured, and nothing is slower than tap for certain.
#[must_use]
pub(super) fn is_sound(cases: &[Shown<'_>]) -> bool {
    let (right, all) = whole(cases);
    let is_there = |line: Line| !line.others.iter().any(|other| matches!(other, Other::Failed));
    let complete = cases.iter().all(|case| case.lines().into_iter().all(is_there));
    right == all && all > 0 && complete && slower(cases).is_empty()
}

fn bar(ratio: f64) -> String {
    let is_filled = |place: &usize| ratio / BAR_GAIN * BAR as f64 >= *place as f64 + 0.5;
    "=".repeat((0..BAR).filter(is_filled).count().max(1))
}

fn ms(value: f64) -> String {
    if value < 99.95 { format!("{value:.1}") } else { format!("{value:.0}") }
}

/// At most 30 lines of 80 columns.
#[must_use]
pub(super) fn summary(cases: &[Shown<'_>]) -> String {
    let mut out = String::from(
        "\nThree real guests want one core. One of them receives (up) and sends (down).\n\
         Medians of ms until the receiver has read everything; times faster than tap.\n\n\
         \x20                   tap       as installed              opt-ins on\n",
    );
    for case in cases {
        let _ = writeln!(out, "{}", case.name());
        for line in case.lines() {
            let _ = writeln!(out, "{}", case.row(&line));
        }
    }
    let (right, all) = whole(cases);
    let _ = writeln!(
        out,
        "\nOpt-ins: boost (not in whole slices, whose vCPUs have a real-time class); down:\n\
         congestion offload, and a guest that floods. same: there is no opt-in for it."
    );
    for why in cases.iter().filter_map(|case| case.boost_refused).take(1) {
        let _ = writeln!(out, "Boost was refused: {why}");
    }
    let _ = match right == all {
        true => writeln!(out, "Data: all {all} transfers arrived whole (their hashes are right)."),
        false => writeln!(out, "DATA WAS WRONG: of {all} transfers {right} arrived whole."),
    };
    for what in slower(cases).into_iter().take(4) {
        let _ = writeln!(out, "SLOWER THAN TAP: {what}");
    }
    if out.contains('~') {
        out += "~: no gain is shown: the 95 % interval has 1.0 in it.\n";
    }
    out + "Not gained: transfers that fit into one turn; a guest alone on its core.\n\
           All of it: target/demo/report.html, result.json. How: docs/demo.md.\n\
           Your VMs: nightporter advise shows which of them wait. Next: docs/install.md.\n"
}

/// The same for a browser, with intervals and the other times. It needs nothing else.
#[must_use]
pub(super) fn page(cases: &[Shown<'_>]) -> String {
    let mut out = String::from(PAGE);
    for case in cases {
        let (name, machine) = (escaped(&case.name()), escaped(case.machine));
        let _ = writeln!(out, "<h2>{name}</h2><p>{machine}.</p>{TABLE}");
        for line in case.lines() {
            let tap = (NetPath::Tap, Ratio { ratio: 1.0, low: 1.0, high: 1.0 });
            let others = line.others.iter().filter_map(|other| match other {
                Other::Measured(path, ratio) => Some((*path, *ratio)),
                _ => None,
            });
            for (path, ratio) in [tap].into_iter().chain(others) {
                let [connect, acked, delivered] = [CONNECT, ACKED, DELIVERED.name]
                    .map(|time| case.median(&line.case, path, time));
                let (right, tried) = case.measured.whole_by(&line.case, path);
                let _ = writeln!(
                    out,
                    "<tr><td>{} {}<td>{path}<td>{connect}<td>{acked}<td>{delivered}\
                     <td>{:.2} [{:.2}, {:.2}]<td><div style=\"width:{:.0}px\"></div>\
                     <td>{right}/{tried}",
                    size(line.bytes),
                    line.direction,
                    ratio.ratio,
                    ratio.low,
                    ratio.high,
                    (ratio.ratio * 40.0).min(400.0),
                );
            }
        }
        out += "</table>\n";
    }
    out + "<pre>" + &escaped(&summary(cases)) + "</pre>\n</html>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

const PAGE: &str = "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
<title>Nightporter: demo</title>\n<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}\
table{border-collapse:collapse}td,th{padding:2px 8px;text-align:left}div{height:10px;\
background:#47a}</style>\n<h1>What Nightporter gains</h1>\n<p>Three real guests want one core; one \
of them receives (up) and sends (down). Medians, in ms; in brackets the 95 % interval.</p>\n";

const TABLE: &str = "<table><tr><th>transfer<th>path<th>connect<th>acked<th>delivered\
<th>times faster than tap<th><th>hashes";

#[cfg(test)]
mod tests;
