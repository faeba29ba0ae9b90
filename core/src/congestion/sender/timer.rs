//! The one timer of a sender, and which of four it is.
//!
//! No timer is armed: the deadline follows from the state whenever it is asked for. Deadlines are
//! kept as the instants from which they count, because a new round trip changes their length.

use super::{Due, Sender};
use crate::congestion::episode::Phase;
use crate::congestion::rack::LossProbe;
use crate::limits::{WIRE_RTO_MAX, WIRE_RTO_VARIANCE_MIN};
use crate::time::Instant;

/// The timers of a sender.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Waits {
    /// Nothing: all is acknowledged, or G has to go on.
    #[default]
    Nothing,
    /// An arrival that may only be late (RFC 8985 section 6.2, step 5).
    Reordering,
    /// An ACK for the tail of what was sent (RFC 8985 section 7.2).
    Probe,
    /// An ACK at all (RFC 6298 section 5).
    Retransmission,
    /// Room at R (RFC 9293 section 3.8.6.1).
    Window,
}

impl Sender {
    /// [`Self::timeout`] is no earlier than this, which costs less to know: an acknowledgement is
    /// given two round trips, or one and the least that a timeout adds to it.
    #[must_use]
    pub fn timeout_floor(&self) -> Instant {
        let srtt = self.rtt.srtt().unwrap_or_default();
        let least = srtt + srtt.min(WIRE_RTO_VARIANCE_MIN);
        (self.since + least.min(WIRE_RTO_MAX)).min(self.reordering)
    }

    /// The next timer and its time.
    pub(super) fn deadline(&self) -> (Waits, Instant) {
        if self.board.flight() == 0 {
            if !self.is_shut() {
                return (Waits::Nothing, Instant::MAX);
            }
            return (Waits::Window, self.since + self.rtt.rto_after(self.probes));
        }
        let timeouts = self.rtt.backoffs().saturating_add(self.probes);
        let timeout = self.since + self.rtt.rto_after(timeouts);
        if self.reordering < timeout {
            return (Waits::Reordering, self.reordering);
        }
        if !self.may_probe() {
            return (Waits::Retransmission, timeout);
        }
        let single = self.board.flight() <= self.mss;
        let last = self.since.max(self.sent_at);
        let probe = last + LossProbe::delay(&self.rtt, single);
        // In place of the timeout, should that come first (RFC 8985 section 7.2); except for bytes
        // that left so lately that no answer can have come.
        let heard = self.sent_at + self.rtt.srtt().unwrap_or_default() <= timeout;
        if probe <= timeout || heard {
            (Waits::Probe, probe.min(timeout))
        } else {
            (Waits::Retransmission, timeout)
        }
    }

    /// The segment whose answer a timeout waits for has yet to leave: the first bytes under way are
    /// lost, or a probe is due.
    #[must_use]
    pub fn owes_first(&self) -> bool {
        let first_lost = self.board.first_lost().is_some_and(|(from, _)| from == self.una());
        first_lost || matches!(self.due, Due::Probe | Due::WindowProbe)
    }

    /// All is acknowledged, and R has no room for G's bytes.
    pub(super) fn is_shut(&self) -> bool {
        self.end > self.next() && self.board.flight() == 0 && self.net_edge <= self.next()
    }

    /// A loss probe may be sent (RFC 8985 section 7.2).
    fn may_probe(&self) -> bool {
        self.sack
            && self.episode.phase() == Phase::Open
            && self.board.sacked() == 0
            && self.probe.is_allowed()
            && self.due == Due::Nothing
    }
}
