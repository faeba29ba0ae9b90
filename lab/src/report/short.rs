//! The short form of a demo's result: a table of 80 columns, and the same as a page.

use std::fmt::Write as _;

use super::checks::size;
use super::{Direction, NetPath, Report, Row};
use crate::experiment::stats::Ratio;
use crate::link::Link;
use crate::sched::Scheduler;

/// Columns of a bar at most, and times faster than tap that fill it.
const BAR: usize = 8;
const BAR_GAIN: f64 = 4.0;
/// A path is slower than tap for certain if its whole interval is below this.
const SLOWER: f64 = 0.95;

/// One size of transfers in one direction.
struct Line<'a> {
    bytes: usize,
    direction: Direction,
    tap: &'a Row,
    /// As installed, and with all that is opt-in.
    others: [Other<'a>; 2],
}

/// A path beside tap.
#[derive(Clone, Copy)]
enum Other<'a> {
    Measured(&'a Row, Ratio),
    /// Nothing came through.
    Failed,
    /// No opt-in is for this case.
    Same,
}

impl<'a> Other<'a> {
    fn measured(self) -> Option<(&'a Row, Ratio)> {
        if let Self::Measured(row, ratio) = self { Some((row, ratio)) } else { None }
    }
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

fn lines(report: &Report) -> Vec<Line<'_>> {
    let taps = report.rows.iter().filter(|row| row.path == NetPath::Tap);
    taps.map(|tap| {
        let (bytes, direction) = (tap.bytes, tap.direction);
        let others = paths(direction, report.scheduler).map(|path| {
            let Some(path) = path else { return Other::Same };
            let is_it = |at: (Direction, NetPath, usize)| at == (direction, path, bytes);
            let row = report.rows.iter().find(|row| is_it((row.direction, row.path, row.bytes)));
            let gain = report.gains.iter().find(|gain| {
                is_it((gain.direction, gain.path, gain.bytes)) && gain.over == NetPath::Tap
            });
            let both = row.zip(gain);
            both.map_or(Other::Failed, |(row, gain)| Other::Measured(row, gain.delivered))
        });
        Line { bytes, direction, tap, others }
    })
    .collect()
}

/// Transfers that arrived whole, and all.
fn whole(reports: &[Report]) -> (usize, usize) {
    let rows = reports.iter().flat_map(|report| &report.rows);
    rows.fold((0, 0), |(right, all), row| (right + row.hash_ok, all + row.n))
}

/// Rows that are slower than tap for certain.
fn slower(reports: &[Report]) -> Vec<String> {
    let mut slower = Vec::new();
    for report in reports {
        for line in lines(report) {
            let others = line.others.iter().filter_map(|other| other.measured());
            slower.extend(
                others.filter(|(_, ratio)| ratio.high < SLOWER).map(|(row, _)| {
                    format!("{} {}: {}", size(line.bytes), line.direction, row.path)
                }),
            );
        }
    }
    slower
}

/// All data was right, everything was measured, and nothing is slower than tap for certain.
#[must_use]
pub fn is_sound(reports: &[Report]) -> bool {
    let (right, all) = whole(reports);
    let is_there =
        |line: &Line<'_>| !line.others.iter().any(|other| matches!(other, Other::Failed));
    let complete = reports.iter().all(|report| lines(report).iter().all(is_there));
    right == all && all > 0 && complete && slower(reports).is_empty()
}

fn case(report: &Report) -> String {
    let scheduler = match report.scheduler {
        Scheduler::Strict30 => "Whole slices of 30 ms, as Xen and KVM under SCHED_RR give them",
        Scheduler::Eevdf => "The kernel's default scheduler",
        _ => "Guests that share a core",
    };
    let link = match report.link {
        Link::Lan => "10 Gbit/s, 0.1 ms",
        Link::Metro => "1 Gbit/s, 10 ms",
        Link::Wan => "100 Mbit/s, 40 ms",
    };
    format!("{scheduler}; {link}:")
}

fn bar(ratio: f64) -> String {
    let is_filled = |place: &usize| ratio / BAR_GAIN * BAR as f64 >= *place as f64 + 0.5;
    "=".repeat((0..BAR).filter(is_filled).count().max(1))
}

fn ms(value: f64) -> String {
    if value < 99.95 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn row(line: &Line<'_>) -> String {
    let way = if line.direction == Direction::Up { "up" } else { "down" };
    let mut text =
        format!("  {:>6} {way:4} {:>7}", size(line.bytes), ms(line.tap.delivered_ms.p50));
    for other in &line.others {
        let _ = match other {
            Other::Measured(row, ratio) => {
                let unclear = if ratio.low <= 1.0 { "~" } else { "" };
                let times = format!("{unclear}{:.1}x", ratio.ratio);
                write!(
                    text,
                    "   {:>7} {times:>6} {:BAR$}",
                    ms(row.delivered_ms.p50),
                    bar(ratio.ratio)
                )
            }
            Other::Failed => write!(text, "   {:>7} {:>6} {:BAR$}", "failed", "", ""),
            Other::Same => write!(text, "   {:>7}", "same"),
        };
    }
    text.trim_end().to_owned()
}

/// At most 30 lines of 80 columns.
#[must_use]
pub fn summary(reports: &[Report]) -> String {
    let mut out = String::from(
        "\nThree real guests want one core. One of them receives (up) and sends (down).\n\
         Medians of ms until the receiver has read everything; times faster than tap.\n\n\
         \x20                   tap       as installed              opt-ins on\n",
    );
    for report in reports {
        let _ = writeln!(out, "{}", case(report));
        for line in lines(report) {
            let _ = writeln!(out, "{}", row(&line));
        }
    }
    let (right, all) = whole(reports);
    let _ = writeln!(
        out,
        "\nOpt-ins: boost (not in whole slices, whose vCPUs have a real-time class); down:\n\
         congestion offload, and a guest that floods. same: there is no opt-in for it."
    );
    for why in reports.iter().filter_map(|report| report.boost_refused.as_ref()).take(1) {
        let _ = writeln!(out, "Boost was refused: {why}");
    }
    let _ = match right == all {
        true => writeln!(out, "Data: all {all} transfers arrived whole (their hashes are right)."),
        false => writeln!(out, "DATA WAS WRONG: of {all} transfers {right} arrived whole."),
    };
    for what in slower(reports).into_iter().take(4) {
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
pub fn page(reports: &[Report]) -> String {
    let mut out = String::from(PAGE);
    for report in reports {
        let _ = writeln!(
            out,
            "<h2>{}</h2><p>{} on {} cores, kernel {}.</p>{TABLE}",
            escaped(&case(report)),
            escaped(&report.accel.to_string()),
            report.cores,
            escaped(&report.host_kernel),
        );
        for line in lines(report) {
            let tap = (line.tap, Ratio { ratio: 1.0, low: 1.0, high: 1.0 });
            for (row, ratio) in
                [tap].into_iter().chain(line.others.into_iter().filter_map(Other::measured))
            {
                let _ = writeln!(
                    out,
                    "<tr><td>{} {}<td>{}<td>{}<td>{}<td>{}<td>{:.2} [{:.2}, {:.2}]<td>\
                     <div style=\"width:{:.0}px\"></div><td>{}/{}",
                    size(line.bytes),
                    line.direction,
                    row.path,
                    ms(row.connect_ms.p50),
                    ms(row.acked_ms.p50),
                    ms(row.delivered_ms.p50),
                    ratio.ratio,
                    ratio.low,
                    ratio.high,
                    (ratio.ratio * 40.0).min(400.0),
                    row.hash_ok,
                    row.n,
                );
            }
        }
        out += "</table>\n";
    }
    out + "<pre>" + &escaped(&summary(reports)) + "</pre>\n</html>\n"
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
mod tests {
    use super::*;
    use crate::report::tests::report_of;

    #[test]
    fn the_summary_has_80_columns_and_few_lines_and_says_what_is_wrong() {
        let good =
            [report_of(Scheduler::Strict30, 600, true), report_of(Scheduler::Eevdf, 1200, true)];
        let text = summary(&good);
        assert!(text.lines().count() <= 30, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(
            text.contains("  2.0x ====          same\n") && text.contains("arrived whole"),
            "{text}"
        );
        assert!(text.contains(" ~1.0x ==") && text.contains("~: no gain"), "{text}");
        assert!(is_sound(&good));
        let page = page(&good);
        assert!(page.contains("ack-offload+boost") && page.ends_with("</html>\n"), "{page}");
        let damaged = [report_of(Scheduler::Eevdf, 600, false)];
        assert!(!is_sound(&damaged) && summary(&damaged).contains("DATA WAS WRONG"));
        let slow = [report_of(Scheduler::Eevdf, 2400, true)];
        assert!(!is_sound(&slow) && summary(&slow).contains("SLOWER THAN TAP: "));
    }
}
