//! The report as CSV: a line for each connection, direction and side.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::report::{Connection, DirectionReport, Report};

/// The columns, and how each is written. Nothing has a comma or a quotation mark in it.
type Column = (&'static str, fn(&Connection, &DirectionReport) -> String);

const COLUMNS: &[Column] = &[
    ("id", |c, _| c.id.to_string()),
    ("remote", |c, _| c.remote.clone()),
    ("guest", |c, _| c.guest.clone()),
    ("side", |_, d| d.side.to_owned()),
    ("way", |_, d| d.way.to_owned()),
    ("begins_s", |c, _| c.begins_s.to_string()),
    ("lasts_s", |c, _| c.lasts_s.to_string()),
    ("handshake_us", |c, _| optional(c.handshake_us)),
    ("segments", |_, d| d.segments.to_string()),
    ("bytes", |_, d| d.bytes.to_string()),
    ("acked_bytes", |_, d| d.acked_bytes.to_string()),
    ("gaps", |_, d| d.gaps.to_string()),
    ("out_of_order", |_, d| d.out_of_order.to_string()),
    ("filled_late", |_, d| d.filled_late.to_string()),
    ("repeated", |_, d| d.repeated.to_string()),
    ("spurious", |_, d| d.spurious.to_string()),
    ("acks", |_, d| d.acks.to_string()),
    ("duplicate_acks", |_, d| d.duplicate_acks.to_string()),
    ("unseen_acks", |_, d| d.unseen_acks.to_string()),
    ("zero_windows", |_, d| d.zero_windows.to_string()),
    ("full_windows", |_, d| d.full_windows.to_string()),
    ("acked_after_p50_us", |_, d| d.acked_after.p50_us.to_string()),
    ("acked_after_p99_us", |_, d| d.acked_after.p99_us.to_string()),
    ("next_after_p50_us", |_, d| d.next_after.p50_us.to_string()),
    ("next_after_p99_us", |_, d| d.next_after.p99_us.to_string()),
    ("between_acks_mean_us", |_, d| d.between_acks.times.mean_us.to_string()),
    ("compressed", |_, d| optional(d.between_acks.compressed)),
    ("limited_by_sender_s", |_, d| d.limited.sender_s.to_string()),
    ("limited_by_window_s", |_, d| d.limited.window_s.to_string()),
    ("limited_by_path_s", |_, d| d.limited.path_s.to_string()),
    ("burstiness_per_round_trip", |_, d| burstiness(d, 0)),
    ("burstiness_per_second", |_, d| burstiness(d, 1)),
    ("bursts_ms", |_, d| d.bursts.above_ms.to_string()),
    ("host_p50_us", |c, d| host(c, d, |host| host.delay.p50_us)),
    ("host_p99_us", |c, d| host(c, d, |host| host.delay.p99_us)),
    ("early_bytes", |c, d| host(c, d, |host| host.early_bytes as f64)),
];

/// Writes the file.
pub(super) fn write(path: &Path, report: &Report) -> Result<()> {
    let names: Vec<_> = COLUMNS.iter().map(|(name, _)| *name).collect();
    let mut text = names.join(",") + "\n";
    for connection in &report.connections {
        for direction in &connection.streams.streams {
            let cells = COLUMNS.iter().map(|(_, of)| of(connection, direction));
            writeln!(text, "{}", cells.collect::<Vec<_>>().join(",")).expect("a string grows");
        }
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn optional(number: Option<f64>) -> String {
    number.map_or_else(String::new, |number| number.to_string())
}

fn burstiness(it: &DirectionReport, which: usize) -> String {
    optional(it.rates.get(which).and_then(|rate| rate.burstiness))
}

/// A number of the host's, which is the same at both sides.
fn host(c: &Connection, d: &DirectionReport, of: fn(&super::report::HostDelays) -> f64) -> String {
    optional(c.streams.host.iter().find(|host| host.way == d.way).map(of))
}
