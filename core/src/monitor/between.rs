//! Comparison of the two sides of a port: the host's delay, and the origin of acknowledgements.
//!
//! A direction of data enters the host at the side of its sender and leaves at the side of its
//! receiver. Bytes are known by their sequence numbers, so a host that cuts or joins segments
//! changes nothing.
//!
//! - **Delay in the host** (vSnoop, Figure 1(b) and (c): the time up to the ring, or from it): from
//!   a segment's arrival at the sender's side until all of its bytes have left at the receiver's.
//! - **Early bytes**: bytes that the sender was shown an ACK of before the receiver's own ACK of
//!   them had reached the host. The host signed for them (SNOOP-24); all others the receiver
//!   acknowledged itself.
//! - **Lead**: by how much the sender's ACK of early bytes was earlier than the receiver's own.

use super::histogram::Histogram;
use super::ring::Ring;
use crate::time::Instant;

/// One direction of data, at both sides.
#[derive(Clone, Debug, Default)]
pub struct Between {
    came: Ring,
    /// When segments came that had already left: the same instant, or clocks that disagree.
    left: u64,
    left_at: Instant,
    /// See the module doc.
    pub delay: Histogram,
    /// Segments that left before they came: the captures' clocks disagree, or it is not the host
    /// that is between them.
    pub backwards: u64,
    /// The highest ACK that was shown to the sender, and the receiver's own.
    shown: Option<u64>,
    own: Option<u64>,
    /// See the module doc.
    pub early_bytes: u64,
    /// Bytes whose ACK is the receiver's.
    pub own_bytes: u64,
    early: Ring,
    /// See the module doc; a time for each ACK that was shown early.
    pub lead: Histogram,
}

impl Between {
    /// A new segment came, at the sender's side.
    pub(super) fn on_came(&mut self, now: Instant, end: u64) {
        if self.left < end {
            self.came.push(end, now);
        } else if self.left_at == now {
            self.delay.add(now.since(now));
        } else {
            self.backwards += 1;
        }
    }

    /// A new segment left, at the receiver's side.
    pub(super) fn on_left(&mut self, now: Instant, end: u64) {
        (self.left, self.left_at) = (end, now);
        while let Some(came) = self.came.pop_up_to(end) {
            self.delay.add(now.since(came));
        }
    }

    /// A segment was repeated at the sender's side: what follows it may be held up by it.
    pub(super) fn on_repeated(&mut self, seq: u64) {
        self.came.forget_beyond(seq);
    }

    /// An ACK left for the sender.
    pub(super) fn on_shown(&mut self, now: Instant, ack: u64) {
        let before = self.shown.unwrap_or(ack);
        if ack > before {
            let own = self.own.unwrap_or(before).clamp(before, ack);
            self.own_bytes += own - before;
            self.early_bytes += ack - own;
            if ack > own {
                self.early.push(ack, now);
            }
        }
        self.shown = Some(before.max(ack));
    }

    /// An ACK of the receiver came.
    pub(super) fn on_own(&mut self, now: Instant, ack: u64) {
        self.own = Some(self.own.map_or(ack, |own| own.max(ack)));
        while let Some(shown) = self.early.pop_up_to(ack) {
            self.lead.add(now.since(shown));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Instant = Instant::from_millis;

    #[test]
    fn a_segment_is_delayed_until_all_of_it_has_left() {
        let mut b = Between::default();
        b.on_came(MS(0), 1000);
        b.on_came(MS(1), 2000);
        b.on_left(MS(4), 1500); // cut elsewhere
        b.on_left(MS(9), 2000);
        assert_eq!((b.delay.count(), b.delay.sum().as_millis()), (2, 4 + 8));
        b.on_left(MS(10), 3000);
        b.on_came(MS(10), 3000); // one turn of the host, the other file first
        b.on_came(MS(11), 3000);
        assert_eq!((b.delay.count(), b.backwards), (3, 1));
    }

    #[test]
    fn bytes_are_early_if_the_receiver_had_not_acknowledged_them() {
        let mut b = Between::default();
        b.on_own(MS(0), 1);
        b.on_shown(MS(0), 1); // the handshake
        b.on_shown(MS(1), 1001);
        b.on_shown(MS(2), 1001);
        b.on_own(MS(31), 1501);
        b.on_shown(MS(31), 1601);
        b.on_own(MS(32), 1601);
        assert_eq!((b.early_bytes, b.own_bytes), (1100, 500));
        assert_eq!((b.lead.count(), b.lead.sum().as_millis()), (2, 31));
    }
}
