//! The conditions of a case. A gain is promised of the median. "Not slower", and the part of its
//! gain that each way of two keeps, are judged by the whole interval.

use super::both::BothWays;
use super::{Direction, Gain, NetPath, Row, Trouble};
use crate::experiment::stats::round3;
use crate::experiment::verdict::{Check, Wanted};
use crate::link::Link;
use crate::sched::Scheduler;

/// No path may be slower than this, as a share of the speed of the paths before it.
const NEVER_WORSE: f64 = 0.95;

/// The least part of its gain alone that each way of a transfer both ways at once keeps.
const KEPT: f64 = 0.9;

const ACKED_BOUND: &str = "the guest answers the SYN and opens its window itself; and the daemon, \
    the sender, the link and QEMU's main threads share the other cores";
const DELIVERED_BOUND: &str = "the guest has to run to answer the SYN, to take the data and to \
    answer; a transfer that fits into one turn of the guest waits for one turn on every path";

const FLOODED_BOUND: &str = "the guest has to run to answer the SYN, to read the request and to \
    write, and has its own load beside that";

/// Which time of a [`Gain`] a promise is about.
#[derive(Debug, Clone, Copy)]
enum Time {
    Acked,
    Delivered,
}

/// The gains over tap that this case wants, with the offload on: bytes, time, times faster.
fn wanted_gains(scheduler: Scheduler, link: Link) -> &'static [(usize, Time, f64)] {
    match (scheduler, link) {
        (Scheduler::Strict30, Link::Metro) => &[
            (100_000, Time::Acked, 2.5),
            (1_000_000, Time::Acked, 2.2),
            (1_000_000, Time::Delivered, 1.7),
            (10_000_000, Time::Acked, 2.2),
            (10_000_000, Time::Delivered, 1.7),
        ],
        (Scheduler::Eevdf, Link::Lan) => {
            &[(100_000, Time::Acked, 15.0), (100_000, Time::Delivered, 1.4)]
        }
        _ => &[],
    }
}

/// The gains in goodput of downloads over tap that are wanted when the guest floods: bytes, times
/// as much.
fn wanted_of_floods(scheduler: Scheduler, link: Link) -> &'static [(usize, f64)] {
    match (scheduler, link) {
        (Scheduler::Strict30, Link::Metro) => &[(100_000, 1.3), (1_000_000, 1.8)],
        (Scheduler::Eevdf, Link::Lan) => &[(100_000, 1.3), (1_000_000, 1.3)],
        (Scheduler::Rr30, Link::Lan) => {
            &[(10_000, 3.2), (100_000, 3.2), (1_000_000, 3.2), (100_000_000, 1.31)]
        }
        _ => &[],
    }
}

/// The gain over tap that is wanted of the best small download when the guest floods: the vFlood
/// poster's best.
fn wanted_of_the_best(scheduler: Scheduler, link: Link) -> Option<f64> {
    (scheduler == Scheduler::Rr30 && link == Link::Lan).then_some(12.5)
}

/// The gains in delivered time over tap that are wanted with boost: direction, path, bytes, times
/// faster.
fn wanted_of_boosts(
    scheduler: Scheduler,
    link: Link,
) -> &'static [(Direction, NetPath, usize, f64)] {
    match (scheduler, link) {
        (Scheduler::Eevdf, Link::Lan) => &[
            (Direction::Up, NetPath::AckOffloadBoost, 100_000, 4.0),
            (Direction::Up, NetPath::AckOffloadBoost, 1_000_000, 3.3),
            (Direction::Down, NetPath::FloodRouteBoost, 100_000, 4.0),
            (Direction::Down, NetPath::FloodRouteBoost, 1_000_000, 4.0),
        ],
        _ => &[],
    }
}

/// A download that is no larger is a small flow, bytes.
const SMALL_MAX: usize = 1_000_000;

/// The conditions of the rows in this case. Rows that were not measured promise nothing.
#[must_use]
pub fn checks(scheduler: Scheduler, link: Link, rows: &[Row], gains: &[Gain]) -> Vec<Check> {
    let mut checks = Vec::new();
    let tried: usize = rows.iter().map(|r| r.n).sum();
    if tried > 0 {
        let right: usize = rows.iter().map(|r| r.hash_ok).sum();
        checks.push(share("share of transfers whose hash was right", right, tried));
    }
    for &(bytes, time, wanted) in wanted_gains(scheduler, link) {
        let of_this =
            |g: &&Gain| (g.path, g.over, g.bytes) == (NetPath::AckOffload, NetPath::Tap, bytes);
        let found = gains.iter().filter(|g| g.direction == Direction::Up).find(of_this);
        checks.extend(found.map(|gain| gained(gain, time, wanted)));
    }
    for &(bytes, wanted) in wanted_of_floods(scheduler, link) {
        let of_this = |g: &&Gain| g.direction == Direction::Down && g.bytes == bytes;
        let floods = gains.iter().filter(of_this).filter(|g| g.path.is_flood());
        checks.extend(floods.filter(|g| g.over == NetPath::Tap).map(|gain| flooded(gain, wanted)));
    }
    if let Some(wanted) = wanted_of_the_best(scheduler, link) {
        let small = |g: &&Gain| g.direction == Direction::Down && g.bytes <= SMALL_MAX;
        let floods = gains.iter().filter(small).filter(|g| g.path.is_flood());
        let over_tap = floods.filter(|g| g.over == NetPath::Tap);
        let best = over_tap.max_by(|a, b| a.delivered.ratio.total_cmp(&b.delivered.ratio));
        checks.extend(best.map(|gain| {
            let check = flooded(gain, wanted);
            Check { what: format!("best of small downloads: {}", check.what), ..check }
        }));
    }
    for &(direction, path, bytes, wanted) in wanted_of_boosts(scheduler, link) {
        let of_this = |g: &&Gain| {
            (g.direction, g.path, g.over, g.bytes) == (direction, path, NetPath::Tap, bytes)
        };
        checks.extend(gains.iter().find(of_this).map(|gain| boosted(gain, wanted)));
    }
    // Others' times are not ours to promise, and no yardstick where nothing is promised of them.
    // Two ways to flood are no alternatives, and a host is only as fast as its guest is scheduled.
    let is_promised =
        |g: &&Gain| g.path.is_nightporter() && !g.over.is_passt() && g.over != NetPath::TapBoost;
    let compared = |g: &&Gain| match g.direction {
        Direction::Up => true,
        Direction::Down => !g.over.is_flood() && scheduler == Scheduler::Idle,
    };
    checks.extend(gains.iter().filter(is_promised).filter(compared).map(not_slower));
    checks
}

/// The condition of transfers both ways at once: each way keeps its gain.
#[must_use]
pub fn of_both_ways(both_ways: &Option<BothWays>) -> Vec<Check> {
    let Some(both) = both_ways else { return Vec::new() };
    let (right, tried) = both.rows.iter().fold((0, 0), |(r, t), row| (r + row.hash_ok, t + row.n));
    let mut checks = vec![share("share of transfers both ways whose hash was right", right, tried)];
    checks.extend(both.kept.iter().map(|kept| {
        let what = format!(
            "{} both ways at once, {}: gain of {} over that of {} alone (their goodput: {:.2})",
            size(kept.bytes),
            kept.direction,
            kept.path,
            kept.alone,
            kept.goodput.ratio
        );
        Check::of_interval(what, kept.delivered, Wanted::AtLeast(KEPT))
    }));
    checks
}

/// Counters that no path of downloads may raise. Guests whose core is taken away have timeouts by
/// themselves: the share of looks that find one may not be larger than over `tap`.
#[must_use]
pub fn of_troubles(troubles: &[Trouble]) -> Vec<Check> {
    let without = |t: &Trouble| round3((t.looks - t.looks_with_timeouts) as f64 / t.looks as f64);
    let tap = troubles.iter().find(|t| t.path == NetPath::Tap).map_or(1.0, without);
    let floods = troubles.iter().filter(|t| t.path.is_flood() && t.looks > 0);
    let of = |t: &Trouble| {
        let (clean, looks) = (t.looks - t.looks_with_remote, t.looks);
        let remote = format!(
            "share of looks after downloads over {} that found PAWSEstab and TCPACKSkipped of the \
             remote as before",
            t.path
        );
        let guest = format!("the same of TCPTimeouts of the guest, over {}", t.path);
        let guest = Check::of(guest, without(t), Wanted::AtLeast(tap));
        [share(&remote, clean, looks), guest]
    };
    floods.flat_map(of).collect()
}

/// All of them must be right.
fn share(what: &str, right: usize, tried: usize) -> Check {
    Check::of(what, right as f64 / tried as f64, Wanted::AtLeast(1.0))
}

fn gained(gain: &Gain, time: Time, wanted: f64) -> Check {
    let (word, ratio, bound) = match time {
        Time::Acked => ("acked", gain.acked, ACKED_BOUND),
        Time::Delivered => ("delivered", gain.delivered, DELIVERED_BOUND),
    };
    let what = format!("{}, {word}: {} over {}", size(gain.bytes), gain.path, gain.over);
    Check::of_median(what, ratio, Wanted::AtLeast(wanted)).bounded_by(bound)
}

fn flooded(gain: &Gain, wanted: f64) -> Check {
    let what = format!("{} down, goodput: {} over {}", size(gain.bytes), gain.path, gain.over);
    Check::of_median(what, gain.delivered, Wanted::AtLeast(wanted)).bounded_by(FLOODED_BOUND)
}

fn boosted(gain: &Gain, wanted: f64) -> Check {
    let (path, over) = (gain.path, gain.over);
    let what = match gain.direction {
        Direction::Up => format!("{}, delivered: {path} over {over}", size(gain.bytes)),
        Direction::Down => format!("{} down, delivered: {path} over {over}", size(gain.bytes)),
    };
    Check::of_median(what, gain.delivered, Wanted::AtLeast(wanted))
}

fn not_slower(gain: &Gain) -> Check {
    let (path, over) = (gain.path, gain.over);
    let what = match gain.direction {
        Direction::Up => format!("{}, delivered: {path} not slower than {over}", size(gain.bytes)),
        Direction::Down => format!("{} down: {path} not slower than {over}", size(gain.bytes)),
    };
    Check::of_interval(what, gain.delivered, Wanted::AtLeast(NEVER_WORSE))
}

/// A size for people.
pub(super) fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1_000_000 => format!("{} MB", b / 1_000_000),
        b => format!("{} KB", b / 1000),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cell;
    use super::super::tests::{cell, rows};
    use super::*;
    use crate::experiment::verdict::Verdict::{self, Broken, Kept, NotDecided};
    use std::time::Duration;

    fn kept(scheduler: Scheduler, link: Link, cells: &[Cell]) -> Vec<Verdict> {
        let rows = rows(cells);
        checks(scheduler, link, &rows, &Gain::all(&rows)).iter().map(|c| c.verdict).collect()
    }

    #[test]
    fn a_gain_of_fourteen_is_not_fifteen() {
        let tap = cell(NetPath::Tap, 100_000, 56, 60);
        let on = cell(NetPath::AckOffload, 100_000, 4, 40);
        let cells = [tap, on];
        assert_eq!(kept(Scheduler::Eevdf, Link::Lan, &cells), [Kept, Broken, Kept, Kept]);
        assert_eq!(kept(Scheduler::Rr30, Link::Lan, &cells), [Kept, Kept], "promises nothing more");
    }

    #[test]
    fn each_small_download_gains_and_the_best_of_them_more() {
        let down = |cell: Cell| Cell { direction: Direction::Down, ..cell };
        let cells =
            [(10_000, 10, 120), (100_000, 20, 80)].into_iter().flat_map(|(bytes, on, tap)| {
                [cell(NetPath::Tap, bytes, tap, tap), cell(NetPath::FloodRoute, bytes, on, on)]
                    .map(down)
            });
        let mut cells: Vec<Cell> = cells.collect();
        assert_eq!(kept(Scheduler::Rr30, Link::Lan, &cells), [Kept, Kept, Kept, Broken]);
        cells.truncate(2);
        cells[0] = down(cell(NetPath::Tap, 10_000, 130, 130));
        assert_eq!(kept(Scheduler::Rr30, Link::Lan, &cells), [Kept, Kept, Kept]);
        assert_eq!(kept(Scheduler::Quota30, Link::Lan, &cells), [Kept]);
    }

    #[test]
    fn a_wrong_hash_or_a_failed_transfer_breaks_the_first_promise() {
        let mut bad = cell(NetPath::Tap, 100_000, 120, 130);
        bad.samples[7].outcome.hash_ok = false;
        assert_eq!(kept(Scheduler::Eevdf, Link::Lan, &[bad]), [Broken]);
        let mut failed = cell(NetPath::Tap, 100_000, 120, 130);
        failed.failures.push("timed out".to_owned());
        assert_eq!(kept(Scheduler::Eevdf, Link::Lan, &[failed]), [Broken]);
    }

    #[test]
    fn each_way_of_a_transfer_both_ways_keeps_nine_tenths_of_its_gain() {
        let way = |direction, path, ms| {
            let cell = Cell { direction, ..cell(path, 1_000_000, ms, ms) };
            [cell.clone(), cell]
        };
        let (up, down) = (Direction::Up, Direction::Down);
        let alone = [
            way(up, NetPath::Tap, 100),
            way(up, NetPath::AckOffload, 50), // 2x
            way(down, NetPath::Tap, 120),
            way(down, NetPath::FloodRoute, 30), // 4x
        ];
        let one_way = rows(&alone.map(|[cell, _]| cell));
        let alone = Gain::all(&one_way);
        let kept = |down_ms| {
            let cells = [
                way(up, NetPath::Tap, 180),
                way(down, NetPath::Tap, 180),
                way(up, NetPath::FloodRoute, 90), // 2x
                way(down, NetPath::FloodRoute, down_ms),
            ];
            let both = BothWays::of(&cells.map(|[cell, _]| cell), &one_way, &alone);
            let kept = both.as_ref().map(|both| both.kept[1].goodput.ratio);
            assert_eq!(kept, Some(round3(30.0 / down_ms as f64)));
            of_both_ways(&both).iter().map(|c| (c.measured, c.verdict)).collect::<Vec<_>>()
        };
        assert_eq!(kept(45), [(1.0, Kept), (1.0, Kept), (1.0, Kept)]);
        assert_eq!(kept(60), [(1.0, Kept), (1.0, Kept), (0.75, Broken)]);
        assert!(of_both_ways(&None).is_empty());
    }

    #[test]
    fn what_the_remote_finds_wrong_breaks_a_promise_and_a_guests_timeout_does_if_tap_has_fewer() {
        let quiet = Trouble { looks: 10, ..Trouble::none(NetPath::Tap) };
        let flood = Trouble { path: NetPath::FloodRoute, looks_with_timeouts: 1, ..quiet };
        let of = |all: &[Trouble]| of_troubles(all).iter().map(|c| c.verdict).collect::<Vec<_>>();
        assert_eq!(of(&[quiet, flood]), [Kept, Broken]);
        assert_eq!(of(&[Trouble { looks_with_timeouts: 2, ..quiet }, flood]), [Kept, Kept]);
        let paws = Trouble { looks_with_remote: 1, looks_with_timeouts: 0, ..flood };
        assert_eq!(of(&[quiet, paws]), [Broken, Kept]);
        assert!(of(&[quiet]).is_empty(), "what is not ours is not judged");
    }

    #[test]
    fn a_path_is_slower_if_its_whole_interval_is_and_not_if_none_of_it_is() {
        let tap = cell(NetPath::Tap, 1_000_000, 9, 10);
        let slower = cell(NetPath::Off, 1_000_000, 9, 11);
        // Of thirty so many are faster.
        let verdict = |faster| {
            let mut off = slower.clone();
            for sample in &mut off.samples[..faster] {
                sample.outcome.delivered = Duration::from_millis(9);
            }
            kept(Scheduler::Idle, Link::Lan, &[tap.clone(), off])[1]
        };
        let verdicts = [0, 2, 13, 17, 28, 30].map(verdict);
        assert_eq!(verdicts, [Broken, Broken, NotDecided, NotDecided, Kept, Kept]);
    }

    #[test]
    fn boost_promises_a_gain_over_tap_and_passt_and_boost_from_outside_promise_nothing() {
        let of = |path, ms| {
            let cells = [cell(NetPath::Tap, 100_000, 20, 40), cell(path, 100_000, 5, ms)];
            kept(Scheduler::Eevdf, Link::Lan, &cells)
        };
        assert_eq!(of(NetPath::AckOffloadBoost, 10), [Kept, Kept, Kept]);
        assert_eq!(of(NetPath::AckOffloadBoost, 11), [Kept, Broken, Kept]);
        assert_eq!(of(NetPath::AckOffloadBoost, 60), [Kept, Broken, Broken]);
        assert_eq!(of(NetPath::Passt, 60), [Kept], "but the hashes");
        assert_eq!(of(NetPath::TapBoost, 60), [Kept]);
    }

    #[test]
    fn a_gain_is_promised_of_the_median() {
        let down = |cell: Cell| Cell { direction: Direction::Down, ..cell };
        let tap = down(cell(NetPath::Tap, 1_000_000, 12, 12));
        let mut flood = down(cell(NetPath::FloodRoute, 1_000_000, 10, 10));
        for sample in &mut flood.samples[..13] {
            sample.outcome.delivered = Duration::from_millis(5);
        }
        let rows = rows(&[tap, flood]);
        let checks = checks(Scheduler::Eevdf, Link::Lan, &rows, &Gain::all(&rows));
        let interval = checks[1].interval.expect("a ratio has one");
        assert!(interval[1] > 1.3 && checks[1].bound.is_some(), "{interval:?}");
        assert_eq!((checks[1].measured, checks[1].verdict), (1.2, Broken));
    }
}
