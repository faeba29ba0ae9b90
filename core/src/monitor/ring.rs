//! Numbers of a stream and when each was seen, in order, a few at a time.

use crate::time::Instant;

/// Segments under way that are timed. With more under way the next one is timed once the first of
/// these has been answered: so many of a window, whatever its size.
const LEN: usize = 32;

/// See the module doc.
#[derive(Clone, Debug)]
pub(super) struct Ring {
    entries: [(u64, Instant); LEN],
    first: usize,
    len: usize,
}

impl Default for Ring {
    fn default() -> Self {
        Self { entries: [(0, Instant::ZERO); LEN], first: 0, len: 0 }
    }
}

impl Ring {
    /// Remembers a number higher than all others, if there is room.
    pub(super) fn push(&mut self, end: u64, now: Instant) {
        if self.len < LEN {
            self.entries[(self.first + self.len) % LEN] = (end, now);
            self.len += 1;
        }
    }

    /// Takes the lowest number, if it is at most `end`, and says when it was seen.
    pub(super) fn pop_up_to(&mut self, end: u64) -> Option<Instant> {
        let (lowest, at) = self.entries[self.first];
        if self.len == 0 || lowest > end {
            return None;
        }
        self.first = (self.first + 1) % LEN;
        self.len -= 1;
        Some(at)
    }

    /// Forgets all numbers above `end`.
    pub(super) fn forget_beyond(&mut self, end: u64) {
        while self.len > 0 && self.entries[(self.first + self.len - 1) % LEN].0 > end {
            self.len -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_out_in_order_and_none_is_taken_beyond_the_room() {
        let mut ring = Ring::default();
        for round in 0..3 {
            let base = round * 1000;
            (1..=40).for_each(|n| ring.push(base + n, Instant::from_millis(n)));
            assert_eq!(ring.pop_up_to(base), None);
            ring.forget_beyond(base + 30);
            let taken: Vec<_> = std::iter::from_fn(|| ring.pop_up_to(base + 500)).collect();
            assert_eq!((taken.len(), taken[29]), (30, Instant::from_millis(30)));
        }
    }
}
