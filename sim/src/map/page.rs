//! The map as a page.

use std::fmt::Write as _;

use super::measured::Measured;
use super::place::{Direction, Place, Sharing};
use super::{FRAME_EMULATED_NS, Gain, LARGE, Map, RATE_BPS, SHARES_AT_US, SHARINGS, VMS, VMS_ALL};

/// A gain below this is none, and beyond the other it is a loss.
const NO_GAIN: f64 = 1.05;
const LOSS: f64 = 0.95;
/// Model and guests may differ by so much.
const AGREES: f64 = 2.0;

/// The whole page.
pub(super) fn markdown(map: &Map) -> String {
    let mut text = String::from(INTRODUCTION);
    for sharing in SHARINGS {
        let _ = write!(text, "## {}\n\n", name(sharing));
        for direction in [Direction::Up, Direction::Down] {
            table(&mut text, map, sharing, direction);
        }
    }
    shares(&mut text, map);
    nothing(&mut text, map);
    checks(&mut text, &map.checks);
    assumptions(&mut text, map);
    text
}

const INTRODUCTION: &str = include_str!("introduction.txt");

fn name(sharing: Sharing) -> String {
    match sharing {
        Sharing::Slices { ms } => format!("Whole slices of {ms} ms"),
        Sharing::Fair => "Linux's default class (EEVDF)".to_owned(),
        Sharing::Quota { .. } => "A quota in each 100 ms (`cpu.max`)".to_owned(),
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        1_000_000.. => format!("{} MB", bytes / 1_000_000),
        _ => format!("{} KB", bytes / 1_000),
    }
}

fn round_trip(us: u32) -> String {
    format!("{} ms", f64::from(us) / 1e3)
}

fn times(gain: f64) -> String {
    if gain < 9.95 { format!("{gain:.1}") } else { format!("{gain:.0}") }
}

fn cell(direction: Direction, gain: Gain) -> String {
    match direction {
        Direction::Up => format!("{} / {}", times(gain.acked), times(gain.delivered)),
        Direction::Down => times(gain.delivered),
    }
}

fn heading(text: &mut String, first: &str, columns: impl Iterator<Item = String>) {
    let columns: Vec<String> = columns.collect();
    let _ = writeln!(text, "| {first} | {} |", columns.join(" | "));
    let _ = writeln!(text, "|---|{}", "---:|".repeat(columns.len()));
}

fn table(text: &mut String, map: &Map, sharing: Sharing, direction: Direction) {
    let first = match direction {
        Direction::Up => "up",
        Direction::Down => "down",
    };
    heading(text, first, map.effort.sizes.iter().map(|&bytes| size(bytes)));
    for &round_trip_us in map.effort.round_trips_us {
        let is_it = |place: &Place, bytes| {
            let of = (place.sharing, place.direction, place.round_trip_us, place.bytes);
            of == (sharing, direction, round_trip_us, bytes)
        };
        let gain = |&bytes: &u64| map.cell(|place| is_it(place, bytes));
        let cells = map.effort.sizes.iter().filter_map(gain).map(|it| cell(direction, it));
        let cells: Vec<String> = cells.collect();
        let _ = writeln!(text, "| {} | {} |", round_trip(round_trip_us), cells.join(" | "));
    }
    text.push('\n');
}

fn shares(text: &mut String, map: &Map) {
    let sizes = map.effort.share_sizes;
    let _ = write!(
        text,
        "## The share of the core\n\nThe same over {}, where so many VMs share the core (with a \
         quota: where it has that part of it).\n\n",
        round_trip(SHARES_AT_US)
    );
    heading(text, "", VMS_ALL.iter().map(|vms| format!("1 of {vms}")));
    let rows = map.shares.chunks(VMS_ALL.len()).zip(sizes.iter().cycle());
    for (row, &bytes) in rows {
        let place = row[0].0;
        let cells: Vec<String> =
            row.iter().map(|(place, gain)| cell(place.direction, *gain)).collect();
        let direction = if place.direction == Direction::Up { "up" } else { "down" };
        let (how, size) = (name(place.sharing), size(bytes));
        let _ = writeln!(text, "| {how}, {size} {direction} | {} |", cells.join(" | "));
    }
    text.push('\n');
}

/// Where it does not help.
fn nothing(text: &mut String, map: &Map) {
    let count = |of: &dyn Fn(&Gain) -> bool| map.cells.iter().filter(|(_, g)| of(g)).count();
    let (none, all) = (count(&|gain| gain.delivered < NO_GAIN), map.cells.len());
    let _ = write!(
        text,
        "## Where it gains nothing, or costs something\n\n{none} of the {all} cells above are \
         delivered less than {NO_GAIN} times as soon: transfers that fit into one\nturn of the VM, \
         those whose time the VM's own processor or the path's rate decides, and those whose\n\
         answers come just when the VM runs (a round trip as long as the quota's period). A VM \
         that is alone on its core\ngains nothing either (the column \"1 of 1\"). "
    );
    let slower: Vec<String> = map
        .cells
        .iter()
        .filter(|(_, gain)| gain.delivered < LOSS)
        .map(|(place, gain)| {
            let direction = if place.direction == Direction::Up { "up" } else { "down" };
            format!(
                "- {}, {} {direction} over {}: {:.2}",
                name(place.sharing),
                size(place.bytes),
                round_trip(place.round_trip_us),
                gain.delivered
            )
        })
        .collect();
    if slower.is_empty() {
        let _ = write!(text, "No cell is below {LOSS}.\n\n");
    } else {
        let _ = write!(text, "Slower than {LOSS} are:\n\n{}\n\n", slower.join("\n"));
    }
}

/// Model and real guests, side by side.
fn checks(text: &mut String, checks: &[(Measured, Gain)]) {
    text.push_str("## Beside real guests\n\n");
    if checks.is_empty() {
        text.push_str("No result of the lab was given.\n\n");
        return;
    }
    let within = |of: &dyn Fn(&Measured, &Gain) -> [f64; 2]| {
        let far = |[real, model]: [f64; 2]| (model / real).max(real / model) > AGREES;
        checks.iter().filter(|(it, gain)| !far(of(it, gain))).count()
    };
    let delivered = within(&|it, gain| [it.delivered, gain.delivered]);
    let is_up = |it: &&(Measured, Gain)| it.0.place.direction == Direction::Up;
    let acked = checks
        .iter()
        .filter(is_up)
        .filter(|(it, gain)| (gain.acked / it.acked).max(it.acked / gain.acked) <= AGREES);
    let _ = write!(
        text,
        "Three guests of QEMU that share a core, measured by `nightporter-lab demo`, and the same \
         in virtual time. Times\nare medians until the transfer was delivered, over tap and over \
         Nightporter. Of {} points {delivered} agree within {AGREES} times in\nwhat is gained \
         until delivery, and of {} uploads {} in what is gained until the acknowledgement.\n\n",
        checks.len(),
        checks.iter().filter(is_up).count(),
        acked.count()
    );
    text.push_str(
        "| case | rounds | guests, ms | gain | model, ms | gain | acknowledged: guests | model |\n\
         |---|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for (it, gain) in checks {
        let acked = match it.place.direction {
            Direction::Up => [it.acked, gain.acked].map(times),
            Direction::Down => ["", ""].map(str::to_owned),
        };
        let ms = |[tap, ours]: [f64; 2]| format!("{tap:.0} → {ours:.0}");
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            it.name,
            it.rounds,
            ms(it.delivered_ms),
            times(it.delivered),
            ms(gain.delivered_ms),
            times(gain.delivered),
            acked[0],
            acked[1],
        );
    }
    text.push_str(DIFFERENCES);
}

const DIFFERENCES: &str = include_str!("differences.txt");

fn assumptions(text: &mut String, map: &Map) {
    let [runs, runs_large] = map.effort.runs;
    let _ = write!(
        text,
        "## What is assumed\n\n\
         - The path takes {} Mbit/s, loses nothing and holds what is sent.\n\
         - {VMS} VMs share the core, but in the table of shares; one that has a quota of a third \
         is alone. Each wants all of\n  its core, always. Network work of the VM that runs comes \
         before its other work.\n\
         - The daemon has a core of its own, as in the demo, and its default budget for a VM.\n\
         - A VM needs {} us for a frame of 1,448 bytes. Beside real guests it is {} us, because \
         QEMU emulates them (TCG).\n\
         - TCP on both sides is the simulator's, with Linux's defaults: ten segments at first, \
         SACK, timestamps, CUBIC with\n  HyStart, a receive buffer that is tuned, up to 6 MB, \
         and a send buffer of 4 MB.\n\
         - Medians of {runs} runs a cell ({runs_large} beyond {}), each of which begins at another \
         moment; with and without Nightporter\n  at the same ones. Times come in steps of a slice, \
         so a median may jump.\n",
        RATE_BPS / 1_000_000,
        super::FRAME_NS as f64 / 1e3,
        FRAME_EMULATED_NS as f64 / 1e3,
        size(LARGE),
    );
}
