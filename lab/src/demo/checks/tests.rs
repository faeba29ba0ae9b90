use std::time::Duration;

use super::*;
use crate::demo::measures::{Cost, MEASURES, cell, values};
use crate::experiment::verdict::Verdict::{self, Broken, Kept, NotDecided};
use crate::transfer::Outcome;

const UP: Direction = Direction::Up;
const DOWN: Direction = Direction::Down;

pub(in crate::demo) fn results() -> Results {
    Results::of_nothing(&MEASURES)
}

/// Thirty transfers that all took the same: ms until they were acknowledged and delivered.
pub(in crate::demo) fn note(
    results: &mut Results,
    case: String,
    path: NetPath,
    (acked, delivered): (u64, u64),
    hash_ok: bool,
) {
    for round in 0..30 {
        let [acked, delivered] = [acked, delivered].map(Duration::from_millis);
        let connect = Duration::from_millis(1);
        let outcome = Outcome { connect, acked, delivered, hash_ok, ..Outcome::default() };
        let sample = values(Duration::ZERO, &outcome, &Cost::default());
        results.note(&cell(case.clone(), path), round, sample);
    }
}

/// Transfers over paths: direction, path, bytes, and the two times.
fn measured<T>(
    terms: Terms,
    transfers: &[(Direction, NetPath, usize, (u64, u64))],
    look: impl FnOnce(Measured<'_>) -> T,
) -> T {
    let mut results = results();
    let mut kinds = Vec::new();
    for &(direction, path, bytes, times) in transfers {
        note(&mut results, terms.one_way(direction, bytes), path, times, true);
        if !kinds.contains(&(direction, bytes)) {
            kinds.push((direction, bytes));
        }
    }
    look(Measured { terms, results: &results, kinds: &kinds, both: 1_000_000 })
}

fn kept(terms: Terms, transfers: &[(Direction, NetPath, usize, (u64, u64))]) -> Vec<Verdict> {
    measured(terms, transfers, |it| it.checks().iter().map(|check| check.verdict).collect())
}

const EEVDF: Terms = Terms::usual(Scheduler::Eevdf, Link::Lan);
const RR30: Terms = Terms::usual(Scheduler::Rr30, Link::Lan);

#[test]
fn a_gain_of_fourteen_is_not_fifteen() {
    let transfers =
        [(UP, NetPath::Tap, 100_000, (56, 60)), (UP, NetPath::AckOffload, 100_000, (4, 40))];
    assert_eq!(kept(EEVDF, &transfers), [Kept, Broken, Kept, Kept]);
    assert_eq!(kept(RR30, &transfers), [Kept, Kept], "promises nothing more");
}

#[test]
fn each_small_download_gains_and_the_best_of_them_more() {
    let mut transfers = vec![
        (DOWN, NetPath::Tap, 10_000, (120, 120)),
        (DOWN, NetPath::FloodRoute, 10_000, (10, 10)),
        (DOWN, NetPath::Tap, 100_000, (80, 80)),
        (DOWN, NetPath::FloodRoute, 100_000, (20, 20)),
    ];
    assert_eq!(kept(RR30, &transfers), [Kept, Kept, Kept, Broken]);
    transfers.truncate(2);
    transfers[0].3 = (130, 130);
    assert_eq!(kept(RR30, &transfers), [Kept, Kept, Kept]);
    assert_eq!(kept(Terms::usual(Scheduler::Quota30, Link::Lan), &transfers), [Kept]);
}

#[test]
fn a_wrong_hash_or_a_failed_transfer_breaks_the_first_promise() {
    for is_damaged in [true, false] {
        let (mut results, kinds) = (results(), [(UP, 100_000)]);
        let case = EEVDF.one_way(UP, 100_000);
        note(&mut results, case.clone(), NetPath::Tap, (120, 130), true);
        let tap = cell(case, NetPath::Tap);
        if is_damaged {
            let sample = values(Duration::ZERO, &Outcome::default(), &Cost::default());
            results.note(&tap, 30, sample);
        } else {
            results.fail(&tap, "timed out".to_owned());
        }
        let it = Measured { terms: EEVDF, results: &results, kinds: &kinds, both: 0 };
        let verdicts: Vec<_> = it.checks().iter().map(|check| check.verdict).collect();
        assert_eq!(verdicts, [Broken]);
    }
}

#[test]
fn each_way_of_a_transfer_both_ways_keeps_nine_tenths_of_its_gain() {
    let bytes = 1_000_000;
    let kept = |down_ms| {
        let mut results = results();
        let alone = [
            (UP, NetPath::Tap, 100),
            (UP, NetPath::AckOffload, 50), // 2x
            (DOWN, NetPath::Tap, 120),
            (DOWN, NetPath::FloodRoute, 30), // 4x
        ];
        for (way, path, ms) in alone {
            note(&mut results, EEVDF.one_way(way, bytes), path, (ms, ms), true);
        }
        let both = [
            (UP, NetPath::Tap, 180),
            (DOWN, NetPath::Tap, 180),
            (UP, NetPath::FloodRoute, 90), // 2x
            (DOWN, NetPath::FloodRoute, down_ms),
        ];
        for (way, path, ms) in both {
            note(&mut results, EEVDF.both_ways(way, bytes), path, (ms, ms), true);
        }
        let it = Measured { terms: EEVDF, results: &results, kinds: &[], both: bytes };
        it.of_both_ways().iter().map(|c| (c.measured, c.verdict)).collect::<Vec<_>>()
    };
    assert_eq!(kept(45), [(1.0, Kept), (1.0, Kept), (1.0, Kept)]);
    assert_eq!(kept(60), [(1.0, Kept), (1.0, Kept), (0.75, Broken)]);
    assert!(measured(EEVDF, &[], |it| it.of_both_ways()).is_empty());
}

#[test]
fn the_remotes_findings_break_a_promise_and_a_guests_timeout_does_if_tap_has_fewer() {
    let quiet = Trouble { looks: 10, ..Trouble::none(NetPath::Tap) };
    let flood = Trouble { path: NetPath::FloodRoute, looks_with_timeouts: 1, ..quiet };
    let of = |all: &[Trouble]| {
        let checks = measured(EEVDF, &[], |it| it.of_troubles(all));
        checks.iter().map(|c| c.verdict).collect::<Vec<_>>()
    };
    assert_eq!(of(&[quiet, flood]), [Kept, Broken]);
    assert_eq!(of(&[Trouble { looks_with_timeouts: 2, ..quiet }, flood]), [Kept, Kept]);
    let paws = Trouble { looks_with_remote: 1, looks_with_timeouts: 0, ..flood };
    assert_eq!(of(&[quiet, paws]), [Broken, Kept]);
    assert!(of(&[quiet]).is_empty(), "others' are not judged");
}

#[test]
fn a_path_is_slower_if_its_whole_interval_is_and_not_if_none_of_it_is() {
    // Of thirty so many are faster.
    let verdict = |faster| {
        let (terms, kinds) = (Terms::usual(Scheduler::Idle, Link::Lan), [(UP, 1_000_000)]);
        let (mut results, case) = (results(), terms.one_way(UP, 1_000_000));
        note(&mut results, case.clone(), NetPath::Tap, (9, 10), true);
        for round in 0..30 {
            let delivered = Duration::from_millis(if round < faster { 9 } else { 11 });
            let outcome = Outcome { delivered, hash_ok: true, ..Outcome::default() };
            let sample = values(Duration::ZERO, &outcome, &Cost::default());
            results.note(&cell(case.clone(), NetPath::Off), round, sample);
        }
        let it = Measured { terms, results: &results, kinds: &kinds, both: 0 };
        it.checks()[1].verdict
    };
    let verdicts = [0, 2, 13, 17, 28, 30].map(verdict);
    assert_eq!(verdicts, [Broken, Broken, NotDecided, NotDecided, Kept, Kept]);
}

#[test]
fn boost_promises_a_gain_over_tap_and_passt_and_boost_from_outside_promise_nothing() {
    let of = |path, ms| {
        let tap = (UP, NetPath::Tap, 100_000, (20, 40));
        kept(EEVDF, &[tap, (UP, path, 100_000, (5, ms))])
    };
    assert_eq!(of(NetPath::AckOffloadBoost, 10), [Kept, Kept, Kept]);
    assert_eq!(of(NetPath::AckOffloadBoost, 11), [Kept, Broken, Kept]);
    assert_eq!(of(NetPath::AckOffloadBoost, 60), [Kept, Broken, Broken]);
    assert_eq!(of(NetPath::Passt, 60), [Kept], "but the hashes");
    assert_eq!(of(NetPath::TapBoost, 60), [Kept]);
}
