//! The order of arrivals: retransmissions, reordering and losses.
//!
//! A place knows which numbers it has seen. A segment that begins beyond the next number leaves a
//! hole: what belongs there was lost before this place, or comes later. A segment that begins below
//! the next number is one of four:
//!
//! - **out of order**: it fills a hole soon after the segment that left it, within the connection's
//!   first round trip (3 ms if that is unknown). Wireshark draws the line at the same time.
//! - **filled late**: it fills a hole later than that. It was lost before this place and repeated.
//! - **repeated**: this place has seen it before, so it was lost behind this place, or not at all.
//! - **spurious**: the receiver had acknowledged all of a repeated segment.
//!
//! Sources: RFC 4737 (reordering), packet-tcp.c of Wireshark 4.0 (`tcp_analyze_sequence_number`),
//! whose counts docs/monitor.md compares.

use crate::time::{Duration, Instant};

/// Holes that are remembered; the oldest is forgotten for another one.
const HOLES: usize = 16;
/// Reordering in a connection whose round trip is unknown takes at most this long.
const REORDERED_WITHIN: Duration = Duration::from_millis(3);

/// A segment among those before it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Place {
    /// It has the highest number so far.
    Newest,
    /// It fills a hole.
    Fills,
    /// All of it was there before.
    Repeats,
}

/// The segments of one direction at one place.
#[derive(Clone, Debug, Default)]
pub struct Order {
    /// The number after the highest one.
    next: Option<u64>,
    /// When that was seen.
    next_at: Instant,
    /// From and to; the first `holes_len`.
    holes: [(u64, u64); HOLES],
    holes_len: usize,
    /// Segments with data, SYN or FIN.
    pub segments: u64,
    /// Bytes of payload, repeated ones too.
    pub bytes: u64,
    /// Segments that began beyond the next number.
    pub gaps: u64,
    /// See the module doc.
    pub out_of_order: u64,
    /// See the module doc.
    pub filled_late: u64,
    /// See the module doc; spurious ones too.
    pub repeated: u64,
    /// See the module doc.
    pub spurious: u64,
}

impl Order {
    /// The number after the highest one; `None` before the first segment.
    #[must_use]
    pub(super) const fn next(&self) -> Option<u64> {
        self.next
    }

    /// Retransmissions: segments that are repeated or fill a hole late.
    #[must_use]
    pub const fn retransmissions(&self) -> u64 {
        self.repeated + self.filled_late
    }

    /// Share of the segments that were lost somewhere: retransmissions that were not spurious.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    pub fn loss(&self) -> Option<f64> {
        let lost = self.retransmissions() - self.spurious;
        (self.segments > 0).then(|| lost as f64 / self.segments as f64)
    }

    /// The segment of these numbers; the receiver has acknowledged all before `una`.
    pub(super) fn on_segment(
        &mut self,
        now: Instant,
        numbers: (u64, u64),
        una: Option<u64>,
        first_round_trip: Option<Duration>,
    ) -> Place {
        let (seq, end) = numbers;
        self.segments += 1;
        let next = *self.next.get_or_insert(seq);
        if end > next {
            if seq > next {
                self.gaps += 1;
                self.add_hole(next, seq);
            } else if seq < next {
                self.repeated += 1; // a part of it
            }
            (self.next, self.next_at) = (Some(end), now);
            return Place::Newest;
        }
        if self.fill(seq, end) {
            let soon = first_round_trip.unwrap_or(REORDERED_WITHIN);
            let is_soon = now.since(self.next_at) < soon;
            *(if is_soon { &mut self.out_of_order } else { &mut self.filled_late }) += 1;
            return Place::Fills;
        }
        self.repeated += 1;
        self.spurious += u64::from(una.is_some_and(|una| end <= una));
        Place::Repeats
    }

    fn add_hole(&mut self, from: u64, to: u64) {
        if self.holes_len == HOLES {
            self.holes.rotate_left(1);
            self.holes_len -= 1;
        }
        self.holes[self.holes_len] = (from, to);
        self.holes_len += 1;
    }

    /// Takes the numbers out of the holes, and says if there were any.
    fn fill(&mut self, seq: u64, end: u64) -> bool {
        let old = self.holes;
        let len = std::mem::take(&mut self.holes_len);
        let mut filled = false;
        for (from, to) in &old[..len] {
            if seq >= *to || end <= *from {
                self.add_hole(*from, *to);
                continue;
            }
            filled = true;
            if seq > *from {
                self.add_hole(*from, seq);
            }
            if end < *to {
                self.add_hole(end, *to);
            }
        }
        filled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn see(order: &mut Order, ms: u64, seq: u64, end: u64) -> Place {
        order.on_segment(Instant::from_millis(ms), (seq, end), Some(1100), None)
    }

    #[test]
    fn a_segment_that_comes_soon_is_reordered_and_one_that_comes_late_was_lost() {
        let mut order = Order::default();
        assert_eq!(see(&mut order, 0, 1000, 1100), Place::Newest);
        assert_eq!(see(&mut order, 1, 1300, 1400), Place::Newest); // leaves 1100 to 1300
        assert_eq!(see(&mut order, 2, 1200, 1300), Place::Fills);
        assert_eq!(see(&mut order, 300, 1100, 1200), Place::Fills);
        let counts = (order.gaps, order.out_of_order, order.filled_late, order.repeated);
        assert_eq!(counts, (1, 1, 1, 0));
        assert_eq!(see(&mut order, 301, 1150, 1250), Place::Repeats);
        assert_eq!((order.repeated, order.spurious), (1, 0));
        assert_eq!(see(&mut order, 302, 1000, 1100), Place::Repeats);
        assert_eq!((order.repeated, order.spurious), (2, 1));
        assert_eq!((order.retransmissions(), order.loss()), (3, Some(2.0 / 6.0)));
    }

    #[test]
    fn the_middle_of_a_hole_leaves_two_and_the_oldest_hole_makes_room() {
        let mut order = Order::default();
        see(&mut order, 0, 0, 10);
        see(&mut order, 0, 100, 110);
        see(&mut order, 0, 40, 50);
        assert_eq!(&order.holes[..order.holes_len], [(10, 40), (50, 100)]);
        for n in 1..=15 {
            see(&mut order, 0, 110 + n * 20, 120 + n * 20);
        }
        assert_eq!((order.holes_len, order.holes[0]), (HOLES, (50, 100)));
        assert_eq!(see(&mut order, 0, 10, 40), Place::Repeats, "that hole was forgotten");
    }
}
