//! Sets of sequence numbers as sorted, disjoint ranges that do not touch.

/// A place in a stream, unwrapped: 0 is the SYN, byte n is n + 1.
pub(super) type Place = i64;

/// Ranges `[from, to)`.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Ranges(Vec<(Place, Place)>);

impl Ranges {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Adds what lies from `from` up to `to`; returns how much of it is new.
    pub(super) fn insert(&mut self, from: Place, to: Place) -> i64 {
        if from >= to {
            return 0;
        }
        // Those that overlap or touch become one.
        let first = self.0.partition_point(|r| r.1 < from);
        let last = self.0.partition_point(|r| r.0 <= to);
        let old = &self.0[first..last];
        let known: i64 = old.iter().map(|r| (r.1.min(to) - r.0.max(from)).max(0)).sum();
        let merged = old.iter().fold((from, to), |m, r| (m.0.min(r.0), m.1.max(r.1)));
        self.0.splice(first..last, [merged]);
        to - from - known
    }

    /// Forgets everything before `at`.
    pub(super) fn remove_below(&mut self, at: Place) {
        let gone = self.0.partition_point(|r| r.1 <= at);
        self.0.drain(..gone);
        if let Some(first) = self.0.first_mut() {
            first.0 = first.0.max(at);
        }
    }

    /// Removes the range that starts at or before `at` and returns its end.
    pub(super) fn take_at(&mut self, at: Place) -> Option<Place> {
        let first = *self.0.first().filter(|r| r.0 <= at)?;
        self.0.remove(0);
        Some(first.1)
    }

    /// The range that `at` is in.
    pub(super) fn containing(&self, at: Place) -> Option<(Place, Place)> {
        let n = self.0.partition_point(|r| r.1 <= at);
        self.0.get(n).copied().filter(|r| r.0 <= at)
    }

    /// The first hole at or after `at`: where it starts, and where the next range starts.
    pub(super) fn hole(&self, at: Place) -> (Place, Option<Place>) {
        let at = self.containing(at).map_or(at, |r| r.1);
        let next = self.0.partition_point(|r| r.1 <= at);
        (at, self.0.get(next).map(|r| r.0))
    }

    /// How much of `[from, to)` is not in it.
    pub(super) fn missing(&self, from: Place, to: Place) -> i64 {
        let known = self.0.iter().map(|r| (r.1.min(to) - r.0.max(from)).max(0));
        (to - from).max(0) - known.sum::<i64>()
    }

    /// The end of the last range.
    pub(super) fn end(&self) -> Option<Place> {
        self.0.last().map(|r| r.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(of: &[(Place, Place)]) -> Ranges {
        let mut ranges = Ranges::default();
        for &(from, to) in of {
            ranges.insert(from, to);
        }
        ranges
    }

    #[test]
    fn ranges_that_overlap_or_touch_are_one() {
        let mut it = ranges(&[(10, 20), (30, 40)]);
        assert_eq!(it.insert(20, 25), 5);
        assert_eq!(it.0, [(10, 25), (30, 40)]);
        assert_eq!(it.insert(15, 35), 5);
        assert_eq!(it.0, [(10, 40)]);
        assert_eq!((it.insert(0, 5), it.insert(12, 14)), (5, 0));
        assert_eq!(it.0, [(0, 5), (10, 40)]);
    }

    #[test]
    fn holes_are_found_from_any_place() {
        let it = ranges(&[(10, 20), (30, 40)]);
        assert_eq!(it.hole(5), (5, Some(10)));
        assert_eq!(it.hole(10), (20, Some(30)));
        assert_eq!(it.hole(25), (25, Some(30)));
        assert_eq!(it.hole(35), (40, None));
        assert_eq!(it.missing(0, 50), 30);
        assert_eq!(it.missing(15, 35), 10);
        assert_eq!(it.containing(20), None);
    }

    #[test]
    fn what_is_below_is_forgotten() {
        let mut it = ranges(&[(10, 20), (30, 40)]);
        it.remove_below(35);
        assert_eq!(it.0, [(35, 40)]);
        assert_eq!((it.take_at(34), it.take_at(35)), (None, Some(40)));
    }
}
