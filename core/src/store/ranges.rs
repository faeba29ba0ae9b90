//! The out-of-order bytes of a flow: sorted, disjoint, bounded ranges (SNOOP-10, SNOOP-11).

use crate::limits::OOO_RANGES_MAX;
use crate::wire::saved::{BadImage, Reader, Saved, Writer, saved};

/// A half-open range of unwrapped sequence numbers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Range {
    start: u64,
    end: u64,
    /// Grows with every change of any range: the highest was changed last.
    stamp: u64,
}

saved!(Range { start, end, stamp });

#[derive(Clone, Debug, Default)]
struct Inner {
    /// By address. Disjoint, never touching, never empty.
    ranges: Vec<Range>,
    bytes: u64,
    last_stamp: u64,
}

/// The result of [`Ranges::insert`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum InsertOutcome {
    /// So many bytes are newly covered; [`Ranges::gaps`] named them before the insert.
    New(u64),
    /// Every byte was covered already (or the range is empty). Counts as a change of its block.
    Duplicate,
    /// The range limit is reached: nothing changed.
    Full,
}

/// Sorted disjoint ranges, at most [`OOO_RANGES_MAX`]. 8 bytes and no heap while empty.
///
/// So that the first copy of a byte wins (INV-15), write only the gaps:
///
/// ```text
/// for (from, to) in ooo.gaps(a, b) { if !store.write(.., from, ..) { drop the segment } }
/// match ooo.insert(a, b) { .. }
/// ```
///
/// A write that is not followed by the insert is harmless: its bytes belong to no range.
#[derive(Clone, Debug, Default)]
pub struct Ranges(Option<Box<Inner>>);

/// Its derived parts are made anew, and its orders are checked.
impl Saved for Ranges {
    fn saved(&self, image: &mut Writer) {
        let Some(inner) = &self.0 else { return 0_u16.saved(image) };
        let Inner { ranges, bytes: _, last_stamp } = &**inner;
        ranges.saved(image);
        last_stamp.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        let ranges = Vec::<Range>::of_saved(image)?;
        if ranges.is_empty() {
            return Ok(Self(None));
        }
        let last_stamp = u64::of_saved(image)?;
        let apart = ranges.windows(2).all(|pair| pair[0].end < pair[1].start);
        let known = |r: &Range| r.start < r.end && r.stamp <= last_stamp;
        let mut stamps: Vec<u64> = ranges.iter().map(|range| range.stamp).collect();
        stamps.sort_unstable();
        stamps.dedup();
        let distinct = stamps.len() == ranges.len();
        if ranges.len() > OOO_RANGES_MAX || !apart || !distinct || !ranges.iter().all(known) {
            return Err(BadImage::Impossible("Ranges"));
        }
        let bytes = ranges.iter().map(|range| range.end - range.start).sum();
        Ok(Self(Some(Box::new(Inner { ranges, bytes, last_stamp }))))
    }
}

const _: () = assert!(size_of::<Ranges>() == 8);

impl Ranges {
    /// Whether nothing is held out of order.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Ranges held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges().len()
    }

    /// Bytes covered.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |inner| inner.bytes)
    }

    /// The end of the highest range: the highest right edge in any SACK block (SNOOP-15).
    #[must_use]
    pub fn max_end(&self) -> Option<u64> {
        self.ranges().last().map(|r| r.end)
    }

    /// Whether an insert of `[a, b)` would not be [`InsertOutcome::Full`].
    #[must_use]
    pub fn has_room_for(&self, a: u64, b: u64) -> bool {
        let ranges = self.ranges();
        let (first, last) = touching(ranges, a, b);
        first < last || ranges.len() < OOO_RANGES_MAX || a >= b
    }

    /// The parts of `[a, b)` that no range covers, lowest first.
    pub fn gaps(&self, a: u64, b: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let ranges = self.ranges();
        let (first, last) = touching(ranges, a, b);
        let mut covered = ranges[first..last].iter();
        let mut at = a;
        core::iter::from_fn(move || {
            while at < b {
                let (gap_end, resume) = covered.next().map_or((b, b), |r| (r.start, r.end));
                let gap = (at, gap_end.min(b));
                at = resume.max(at);
                if gap.0 < gap.1 {
                    return Some(gap);
                }
            }
            None
        })
    }

    /// Covers `[a, b)`, merging with every range it overlaps or touches.
    pub fn insert(&mut self, a: u64, b: u64) -> InsertOutcome {
        if a >= b {
            return InsertOutcome::Duplicate;
        }
        if !self.has_room_for(a, b) {
            return InsertOutcome::Full;
        }
        let inner = self.0.get_or_insert_default();
        inner.last_stamp += 1;
        let stamp = inner.last_stamp;
        let (first, last) = touching(&inner.ranges, a, b);
        let merged = &inner.ranges[first..last];
        let before: u64 = merged.iter().map(|r| r.end - r.start).sum();
        let start = merged.first().map_or(a, |r| r.start.min(a));
        let end = merged.last().map_or(b, |r| r.end.max(b));
        inner.ranges.splice(first..last, [Range { start, end, stamp }]);
        let new = (end - start) - before;
        inner.bytes += new;
        if new == 0 { InsertOutcome::Duplicate } else { InsertOutcome::New(new) }
    }

    /// Where a run that starts at `seq` ends: the end of the range that covers or touches `seq`
    /// from the left, else `seq` itself.
    #[must_use]
    pub fn contiguous_from(&self, seq: u64) -> u64 {
        let ranges = self.ranges();
        let i = ranges.partition_point(|r| r.end < seq);
        ranges.get(i).filter(|r| r.start <= seq).map_or(seq, |r| r.end)
    }

    /// Forgets everything below `seq`.
    pub fn remove_below(&mut self, seq: u64) {
        let Some(inner) = &mut self.0 else { return };
        let gone = inner.ranges.partition_point(|r| r.end <= seq);
        inner.bytes -= inner.ranges.drain(..gone).map(|r| r.end - r.start).sum::<u64>();
        match inner.ranges.first_mut() {
            Some(r) if r.start < seq => {
                inner.bytes -= seq - r.start;
                r.start = seq;
            }
            Some(_) => {}
            None => self.0 = None,
        }
    }

    /// Forgets everything (LIFE-03: out-of-order data goes first).
    pub fn clear(&mut self) {
        self.0 = None;
    }

    /// The ranges as `(start, end)`, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges().iter().map(|r| (r.start, r.end))
    }

    /// The ranges as `(start, end)`, most recently changed first: the order of SACK blocks
    /// (RFC 2018 section 4). Take 3 with timestamps, 4 without.
    pub fn newest_first(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut below = u64::MAX;
        core::iter::from_fn(move || {
            let older = self.ranges().iter().filter(|r| r.stamp < below);
            let newest = older.max_by_key(|r| r.stamp)?;
            below = newest.stamp;
            Some((newest.start, newest.end))
        })
    }

    fn ranges(&self) -> &[Range] {
        self.0.as_ref().map_or(&[], |inner| &inner.ranges)
    }
}

/// Indices `first..last` of the ranges that overlap or touch `[a, b)`.
fn touching(ranges: &[Range], a: u64, b: u64) -> (usize, usize) {
    let first = ranges.partition_point(|r| r.end < a);
    let last = ranges.partition_point(|r| r.start <= b);
    (first, last.max(first))
}

#[cfg(test)]
mod tests;
