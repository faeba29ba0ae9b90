//! Times from a segment to its acknowledgement, at one place.
//!
//! Where the segments leave for the network this is the path's round trip and the receiver's delay;
//! at a guest's port, toward the guest, it is the time that the guest takes: for its turn on a
//! core, and to acknowledge. The vSnoop paper's Figure 1(b) has the latter.
//!
//! A segment that was repeated, or sent after one that was, is not timed (Karn's algorithm, RFC
//! 6298 section 3).

use super::histogram::Histogram;
use super::ring::Ring;
use crate::time::Instant;

/// The timed segments of one direction at one place.
#[derive(Clone, Debug, Default)]
pub struct RoundTrip {
    sent: Ring,
    /// Of each ACK: the time since the newest segment that it acknowledges (RFC 7323 section 4).
    pub acks: Histogram,
    /// Of each segment. Longer than the former where one ACK acknowledges several.
    pub segments: Histogram,
}

impl RoundTrip {
    /// A segment that ends before `end` and has the highest number so far.
    pub(super) fn on_sent(&mut self, now: Instant, end: u64) {
        self.sent.push(end, now);
    }

    /// A segment from `seq` on was repeated.
    pub(super) fn on_repeated(&mut self, seq: u64) {
        self.sent.forget_beyond(seq);
    }

    /// All before `ack` is acknowledged.
    pub(super) fn on_ack(&mut self, now: Instant, ack: u64) {
        let mut newest = None;
        while let Some(sent) = self.sent.pop_up_to(ack) {
            self.segments.add(now.since(sent));
            newest = Some(sent);
        }
        if let Some(sent) = newest {
            self.acks.add(now.since(sent));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    #[test]
    fn an_ack_is_timed_by_its_newest_segment_and_repeated_ones_are_not() {
        let mut trip = RoundTrip::default();
        let ms = Instant::from_millis;
        trip.on_sent(ms(0), 100);
        trip.on_sent(ms(1), 200);
        trip.on_sent(ms(2), 300);
        trip.on_ack(ms(11), 200);
        assert_eq!((trip.acks.count(), trip.acks.longest()), (1, Duration::from_millis(10)));
        assert_eq!((trip.segments.count(), trip.segments.sum().as_millis()), (2, 21));
        trip.on_repeated(200);
        trip.on_ack(ms(300), 300);
        assert_eq!((trip.acks.count(), trip.segments.count()), (1, 2));
    }
}
