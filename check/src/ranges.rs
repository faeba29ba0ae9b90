//! Places of a stream, as ranges that neither overlap nor touch.

use std::collections::BTreeMap;

/// First place and end of each range.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Joins `[from, to)` with the ranges.
    pub(crate) fn insert(&mut self, mut from: u64, mut to: u64) {
        while let Some((&a, &b)) = self.0.range(..=to).next_back().filter(|(_, b)| **b >= from) {
            self.0.remove(&a);
            (from, to) = (from.min(a), to.max(b));
        }
        self.0.insert(from, to);
    }

    /// Forgets ranges that end at `place` or before.
    pub(crate) fn forget_below(&mut self, place: u64) {
        while self.0.first_key_value().is_some_and(|(_, to)| *to <= place) {
            self.0.pop_first();
        }
    }

    /// `place` is in one of them.
    pub(crate) fn has(&self, place: u64) -> bool {
        self.end_of_run(place) > place
    }

    /// `[from, to)` overlaps one of them, or is next to it.
    pub(crate) fn touches(&self, from: u64, to: u64) -> bool {
        self.0.range(..=to).next_back().is_some_and(|(_, end)| *end >= from)
    }

    /// End of the bytes from `place` on without a hole.
    pub(crate) fn end_of_run(&self, place: u64) -> u64 {
        self.0.range(..=place).next_back().map_or(place, |(_, to)| place.max(*to))
    }

    /// How many begin above `place`.
    pub(crate) fn above(&self, place: u64) -> usize {
        self.0.range(place + 1..).count()
    }

    /// How many that begin above `place` have something of `others`.
    pub(crate) fn runs_with(&self, others: &Self, place: u64) -> usize {
        let has = |(from, to): &(&u64, &u64)| others.0.range(**from..**to).next().is_some();
        self.0.range(place + 1..).filter(has).count()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
