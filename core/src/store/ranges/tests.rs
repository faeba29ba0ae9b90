//! Ranges against a set of bytes.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// An odd base, so that nothing works only near zero.
const BASE: u64 = 0xffff_fff0;

fn ranges(pairs: &[(u64, u64)]) -> Ranges {
    let mut ranges = Ranges::default();
    for &(a, b) in pairs {
        assert_ne!(ranges.insert(a, b), InsertOutcome::Full);
    }
    ranges
}

/// The maximal runs of a set.
fn runs(set: &BTreeSet<u64>) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &n in set {
        match runs.last_mut() {
            Some(run) if run.1 == n => run.1 = n + 1,
            _ => runs.push((n, n + 1)),
        }
    }
    runs
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Insert(u64, u64),
    RemoveBelow(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0_u64..200, 0_u64..20).prop_map(|(a, n)| Op::Insert(BASE + a, BASE + a + n)),
        1 => (0_u64..200).prop_map(|a| Op::RemoveBelow(BASE + a)),
    ]
}

proptest! {
    #[test]
    fn snoop_10_ranges_behave_as_a_set_of_bytes(ops in prop::collection::vec(op(), 1..60)) {
        let mut ranges = Ranges::default();
        let mut model = BTreeSet::new();
        for op in ops {
            match op {
                Op::Insert(a, b) => {
                    let new: BTreeSet<u64> = (a..b).filter(|n| !model.contains(n)).collect();
                    prop_assert_eq!(ranges.gaps(a, b).collect::<Vec<_>>(), runs(&new));
                    let expected = match new.len() as u64 {
                        0 => InsertOutcome::Duplicate,
                        n => InsertOutcome::New(n),
                    };
                    prop_assert_eq!(ranges.insert(a, b), expected);
                    model.extend(new);
                    if a < b {
                        let (from, to) = ranges.newest_first().next().unwrap();
                        prop_assert!(from <= a && b <= to, "the first SACK block is the newest");
                    }
                }
                Op::RemoveBelow(seq) => {
                    ranges.remove_below(seq);
                    model = model.split_off(&seq);
                }
            }
            prop_assert_eq!(ranges.iter().collect::<Vec<_>>(), runs(&model));
            prop_assert_eq!(ranges.bytes(), model.len() as u64);
            prop_assert_eq!(ranges.is_empty(), model.is_empty());
            prop_assert_eq!(ranges.max_end(), model.last().map(|n| n + 1));
            for seq in [BASE, BASE + 50, BASE + 100] {
                // One past a run still touches it.
                let from = if model.contains(&(seq - 1)) { seq - 1 } else { seq };
                let end = (from..).find(|n| !model.contains(n)).unwrap().max(seq);
                prop_assert_eq!(ranges.contiguous_from(seq), end);
            }
        }
    }
}

#[test]
fn sack_blocks_come_newest_first_and_a_merge_counts_as_new() {
    let mut ooo = ranges(&[(100, 200), (300, 400), (500, 600)]);
    assert_eq!(ooo.newest_first().collect::<Vec<_>>(), [(500, 600), (300, 400), (100, 200)]);
    assert_eq!(ooo.insert(200, 250), InsertOutcome::New(50));
    assert_eq!(ooo.newest_first().collect::<Vec<_>>(), [(100, 250), (500, 600), (300, 400)]);
    assert_eq!(ooo.insert(310, 320), InsertOutcome::Duplicate);
    assert_eq!(ooo.newest_first().next(), Some((300, 400)));
}

#[test]
fn the_first_copy_wins_because_only_gaps_are_new() {
    let ooo = ranges(&[(100, 200), (300, 400)]);
    assert_eq!(ooo.gaps(150, 450).collect::<Vec<_>>(), [(200, 300), (400, 450)]);
    assert_eq!(ooo.gaps(120, 180).count(), 0);
}

#[test]
fn the_sixty_fifth_range_is_refused_and_a_merge_is_not() {
    let pairs: Vec<_> = (0..64).map(|i| (i * 10, i * 10 + 5)).collect();
    let mut ooo = ranges(&pairs);
    assert_eq!(ooo.insert(1000, 1001), InsertOutcome::Full);
    assert!(!ooo.has_room_for(1000, 1001));
    assert_eq!((ooo.len(), ooo.bytes()), (64, 320));
    assert!(ooo.has_room_for(5, 6));
    assert_eq!(ooo.insert(5, 6), InsertOutcome::New(1));
    assert_eq!(ooo.insert(0, 640), InsertOutcome::New(319));
    assert_eq!((ooo.len(), ooo.bytes()), (1, 640));
}

#[test]
fn a_filled_gap_pulls_in_what_follows_it() {
    let mut ooo = ranges(&[(200, 300), (300, 350), (400, 500)]);
    assert_eq!(ooo.contiguous_from(200), 350);
    ooo.remove_below(350);
    assert_eq!(ooo.iter().collect::<Vec<_>>(), [(400, 500)]);
    ooo.remove_below(u64::MAX);
    assert!(ooo.is_empty(), "the heap goes with the last range");
}
