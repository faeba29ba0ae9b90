//! The time from an ACK that reaches the sender until its next new segment.
//!
//! At a guest's port this is how long a sending guest takes for its turn on a core; at the network
//! it is the rest of the path and the remote. The vSnoop paper's Figure 1(c) has the former. A
//! sender that has nothing to send looks the same as one that does not run: only of a sender with
//! data at all times is this its delay alone.

use super::histogram::Histogram;
use crate::time::Instant;

/// One direction at one place.
#[derive(Clone, Debug, Default)]
pub struct Turnaround {
    /// The first ACK of something new since the sender's last new segment.
    since: Option<Instant>,
    /// One time for each new segment that follows such an ACK.
    pub times: Histogram,
}

impl Turnaround {
    /// An ACK of something new passed on its way to the sender.
    pub(super) fn on_ack(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// A new segment of the sender.
    pub(super) fn on_sent(&mut self, now: Instant) {
        if let Some(since) = self.since.take() {
            self.times.add(now.since(since));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    #[test]
    fn the_first_of_several_acks_begins_it_and_the_first_segment_ends_it() {
        let mut turn = Turnaround::default();
        turn.on_sent(Instant::from_millis(1));
        turn.on_ack(Instant::from_millis(2));
        turn.on_ack(Instant::from_millis(20));
        turn.on_sent(Instant::from_millis(32));
        turn.on_sent(Instant::from_millis(33));
        assert_eq!((turn.times.count(), turn.times.longest()), (1, Duration::from_millis(30)));
    }
}
