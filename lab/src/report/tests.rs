//! Rows, gains and the file's shape, from transfers that were never made.

use super::*;
use crate::experiment::verdict::Wanted;

/// A cell of 30 transfers that all took the same.
pub(super) fn cell(path: NetPath, bytes: usize, acked_ms: u64, delivered_ms: u64) -> Cell {
    let outcome = Outcome {
        connect: Duration::from_millis(1),
        acked: Duration::from_millis(acked_ms),
        delivered: Duration::from_millis(delivered_ms),
        guest_read: Duration::from_millis(1),
        guest_interrupts: 1000,
        retransmits: 0,
        hash_ok: true,
    };
    let cost = Cost { interrupts: 7, ..Cost::default() };
    let sample = |round| Sample { round, phase: Duration::ZERO, outcome, cost };
    Cell {
        direction: Direction::Up,
        path,
        bytes,
        samples: (0..30).map(sample).collect(),
        failures: Vec::new(),
    }
}

pub(super) fn rows(cells: &[Cell]) -> Vec<Row> {
    cells.iter().map(|c| Row::of(c).expect("something came through")).collect()
}

#[test]
fn a_gain_is_over_the_paths_before_and_of_the_same_size() {
    let rows = rows(&[
        cell(NetPath::Tap, 100_000, 20, 30),
        cell(NetPath::Off, 100_000, 10, 15),
        cell(NetPath::Tap, 1_000_000, 200, 300),
    ]);
    let gains = Gain::all(&rows);
    let [gain] = gains.as_slice() else { panic!("{gains:?}") };
    assert_eq!((gain.path, gain.over, gain.bytes), (NetPath::Off, NetPath::Tap, 100_000));
    assert_eq!((gain.connect.ratio, gain.acked.ratio), (1.0, 2.0));
    assert_eq!((gain.connect_acked.ratio, gain.delivered.ratio), (1.909, 2.0));
}

#[test]
fn a_round_in_which_one_path_failed_counts_for_neither() {
    let mut tap = cell(NetPath::Tap, 100_000, 20, 30);
    tap.samples[4].outcome.delivered = Duration::from_secs(60);
    let mut off = cell(NetPath::Off, 100_000, 10, 15);
    off.samples.remove(4);
    let gains = Gain::all(&rows(&[tap, off]));
    assert_eq!(gains[0].delivered, Ratio { ratio: 2.0, low: 2.0, high: 2.0 });
}

/// A case with these rows.
fn report(scheduler: Scheduler, rows: Vec<Row>) -> Report {
    let share = GuestShare { cpu_percent: 33.0, switches_per_s: 11.0, load_done_percent: 20 };
    Report {
        scheduler,
        layout: Layout::Session,
        link: Link::Metro,
        link_measured: Some(Measured { round_trip_ms: 10.1, rate_mbit_s: 990.0 }),
        accel: Accel::Tcg,
        profile: "release".into(),
        rx_ring: None,
        host_kernel: "6.1".to_owned(),
        cores: 2,
        guests: vec![share; 3],
        cpu_shares: std::collections::BTreeMap::new(),
        boost_refused: None,
        passt: None,
        guest_tcp: GuestTcp::default(),
        gains: Gain::all(&rows),
        both_ways: None,
        requests: Vec::new(),
        troubles: vec![Trouble::none(NetPath::Tap)],
        rows,
        checks: vec![Check::of_interval(
            "a path",
            Ratio { ratio: 0.9, low: 0.8, high: 1.0 },
            Wanted::AtLeast(0.95),
        )],
        others: Vec::new(),
    }
}

/// A case of the short form, in which tap takes 1200 ms and all other paths so many.
pub(super) fn report_of(scheduler: Scheduler, delivered_ms: u64, is_whole: bool) -> Report {
    let mut cells = Vec::new();
    let up = [NetPath::Tap, NetPath::AckOffload, NetPath::AckOffloadBoost];
    let down = [NetPath::Tap, NetPath::AckOffload, NetPath::FloodRouteBoost];
    for (direction, paths) in [(Direction::Up, up), (Direction::Down, down)] {
        for (bytes, path) in [1_000_000, 10_000_000].into_iter().flat_map(|n| paths.map(|p| (n, p)))
        {
            let delivered_ms = if path == NetPath::Tap { 1200 } else { delivered_ms };
            let is_slices = scheduler == Scheduler::Strict30;
            let path = if is_slices { path.unboosted() } else { path };
            let mut cell = Cell { direction, ..cell(path, bytes, 20, delivered_ms) };
            cell.samples.iter_mut().for_each(|sample| sample.outcome.hash_ok = is_whole);
            cells.push(cell);
        }
    }
    report(scheduler, rows(&cells))
}

#[test]
fn the_json_has_the_documented_shape() {
    let rows =
        rows(&[cell(NetPath::Tap, 100_000, 40, 60), cell(NetPath::AckOffload, 100_000, 4, 60)]);
    let both = [NetPath::Tap, NetPath::FloodRoute].map(|path| cell(path, 1_000_000, 9, 10));
    let both_ways = BothWays::of(&both, &rows, &Gain::all(&rows));
    let report = Report { both_ways, ..report(Scheduler::Strict30, rows) };
    let json = serde_json::to_value(&report).expect("serialises");
    assert_eq!((&json["scheduler"], &json["accel"]), (&"strict30".into(), &"tcg".into()));
    assert_eq!((&json["link"], &json["others"]), (&"metro".into(), &serde_json::Value::Null));
    let row = &json["rows"][1];
    assert_eq!((&row["path"], &row["bytes"]), (&"ack-offload".into(), &100_000.into()));
    assert_eq!((&row["n"], &row["hash_ok"]), (&30.into(), &30.into()));
    for time in ["connect_ms", "acked_ms", "connect_acked_ms", "delivered_ms"] {
        for summary in ["p10", "p50", "p90", "mean"] {
            assert!(row[time][summary].is_number(), "{time}.{summary} in {row}");
        }
    }
    assert_eq!(row["samples"].as_array().map(Vec::len), Some(30));
    assert_eq!(
        (&row["samples"][3]["acked_ms"], &row["cost"]["interrupts"]),
        (&4.0.into(), &7.0.into())
    );
    assert_eq!(json["gains"][0]["acked"]["ratio"], 10.0);
    let both = &json["both_ways"];
    assert_eq!(
        (&both["rows"][1]["direction"], &both["rows"][1]["bytes"]),
        (&"up".into(), &1_000_000.into())
    );
    assert!(both["rows"][1]["goodput_mb_s"]["p50"].is_number(), "{both}");
    assert_eq!(
        (&both["gains"][0]["over"], &json["troubles"][0]["path"]),
        (&"tap".into(), &"tap".into())
    );
    assert_eq!(json["checks"][0]["verdict"], "not-decided");
    assert!(report.kept(), "nothing is broken");
    let lines = report.table();
    let verdict = "  not decided  a path: 0.90 [0.80, 1.00], at least 0.95\n";
    assert!(lines.contains(verdict), "{lines}");
    assert!(lines.lines().all(|line| line.chars().count() <= 120), "{lines}");
}
