//! RACK-TLP (RFC 8985): a segment that was sent some time before one that has arrived is lost.
//! Where no later segment could arrive, a probe takes the place of a timeout.
//!
//! H's timestamps do not tell an original from its copy (`rtt`). The acknowledgement of an original
//! may then be taken for that of the copy, and the only guard is the round trip itself: one shorter
//! than the shortest does not count (section 6.2, step 2).

use crate::congestion::rtt::RttEstimator;
use crate::congestion::scoreboard::Piece;
use crate::limits::REORDERING_MAX;
use crate::time::{Duration, Instant};
use crate::wire::saved::saved;

/// Segments SACKed that mean a loss without waiting, while no reordering was seen (`DupThresh`).
pub const DUP_THRESHOLD: u64 = 3;
/// Recoveries after which a reordering window that DSACKs have widened is the first again.
const PERSIST: u8 = 16;
/// Additional wait of a probe of a single segment, whose ACK R may delay (`TLP.max_ack_delay`):
/// Linux's value, and the longest delay of a Linux receiver.
const MAX_ACK_DELAY: Duration = Duration::from_millis(200);
/// Additional wait of any other probe: within a host or a rack a core that is busy for a moment
/// takes longer than a round trip (Linux: `TCP_TIMEOUT_MIN_US`).
const TIMEOUT_MIN: Duration = Duration::from_millis(2);
/// When a probe is due before the first round trip was measured (section 7.2).
const PROBE_INITIAL: Duration = Duration::from_secs(1);

/// State of loss detection: the newest arrival judges all segments that were sent before it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rack {
    /// When the newest segment that has arrived left (`RACK.xmit_ts`).
    sent_at: Instant,
    /// Its end (`RACK.end_seq`).
    end: u64,
    /// Its round trip (`RACK.rtt`).
    rtt: Duration,
    /// The highest byte that has arrived (`RACK.fack`).
    highest: u64,
    /// Segments have arrived in another order than they were sent (`RACK.reordering_seen`).
    reordering_seen: bool,
    /// Quarters of the shortest round trip in the reordering window, but for the first (`RACK.
    /// reo_wnd_mult` - 1).
    wider: u8,
    /// Recoveries left before it is narrow again (`RACK.reo_wnd_persist`).
    persist: u8,
    /// The window was widened in a round that ends here (`RACK.dsack_round`).
    dsack_round: Option<u64>,
    /// Segments that have overtaken one without SACK, if more than `DUP_THRESHOLD`.
    overtaking: u64,
}

saved! {
    Rack {
        sent_at as Wall, end, rtt, highest, reordering_seen, wider, persist, dsack_round,
        overtaking,
    }
    check |it| it.overtaking <= REORDERING_MAX
}

impl Rack {
    /// R has a piece for the first time (section 6.2, steps 2 and 3).
    pub fn on_delivered(&mut self, now: Instant, p: &Piece, rtt: &RttEstimator) {
        if p.to > self.highest {
            self.highest = p.to;
        } else if p.to < self.highest && !p.again {
            self.reordering_seen = true;
        }
        let sample = now.since(p.sent_at);
        if p.again && rtt.min().is_some_and(|min| sample < min) {
            return; // the original has arrived, not the copy
        }
        if self.is_newer(p.sent_at, p.to) {
            (self.sent_at, self.end, self.rtt) = (p.sent_at, p.to, sample);
        }
    }

    /// Something was thought lost because of what had arrived, and was only late (FLOOD-45).
    pub const fn on_late(&mut self) {
        self.reordering_seen = true;
    }

    /// So many segments have overtaken one, as far as R without SACK can tell, and it was not lost
    /// (Linux: `tcp_check_reno_reordering()`).
    pub fn on_overtaken(&mut self, segments: u64) {
        self.overtaking = self.overtaking.max(segments.min(REORDERING_MAX));
    }

    /// A timeout although more than the least number had overtaken: that number is enough again
    /// (Linux: `tcp_enter_loss()`).
    pub const fn forget_overtaking(&mut self) {
        self.overtaking = 0;
    }

    /// Duplicate ACKs that mean a loss without SACK.
    #[must_use]
    pub fn duplicates_of_loss(&self) -> u64 {
        self.overtaking.max(DUP_THRESHOLD)
    }

    /// R has got something twice: reordering was taken for loss (section 6.2, step 4).
    pub fn on_dsack(&mut self, una: u64, next: u64) {
        if self.dsack_round.is_some_and(|end| una >= end) {
            self.dsack_round = None;
        }
        if self.dsack_round.is_none() {
            self.dsack_round = Some(next);
            self.wider = self.wider.saturating_add(1);
            self.persist = PERSIST;
        }
    }

    /// A recovery is over.
    pub const fn on_recovered(&mut self) {
        self.persist = self.persist.saturating_sub(1);
        if self.persist == 0 {
            self.wider = 0;
        }
    }

    /// How much later than a segment sent after it a segment may arrive (`RACK.reo_wnd`).
    #[must_use]
    pub fn reordering_window(&self, rtt: &RttEstimator, at_once: bool) -> Duration {
        if at_once && !self.reordering_seen {
            return Duration::ZERO;
        }
        let quarter = rtt.min().unwrap_or_default().as_nanos() / 4;
        let window = Duration::from_nanos(quarter).saturating_mul(u64::from(self.wider) + 1);
        window.min(rtt.srtt().unwrap_or_default())
    }

    /// When a flying piece is lost, should it not have arrived by then; never, while nothing that
    /// was sent after it has arrived (section 6.2, step 5).
    #[must_use]
    pub fn lost_at(&self, p: &Piece, window: Duration) -> Option<Instant> {
        self.was_sent_after(p.sent_at, p.to).then(|| p.sent_at + self.rtt + window)
    }

    /// The same at a timeout, which needs no later arrival (section 6.3).
    #[must_use]
    pub fn is_lost_at_timeout(&self, p: &Piece, una: u64, now: Instant, window: Duration) -> bool {
        p.from == una || p.sent_at + self.rtt + window <= now
    }

    /// The newest arrival was sent after a piece that left at `sent_at` and ends with `end`.
    fn was_sent_after(&self, sent_at: Instant, end: u64) -> bool {
        (self.sent_at, self.end) > (sent_at, end)
    }

    fn is_newer(&self, sent_at: Instant, end: u64) -> bool {
        (sent_at, end) > (self.sent_at, self.end)
    }
}

/// The tail loss probe (section 7).
#[derive(Clone, Copy, Debug, Default)]
pub struct LossProbe {
    /// The probe that is out: everything below was sent (`TLP.end_seq`), and whether it was a copy
    /// (`TLP.is_retrans`).
    out: Option<(u64, bool)>,
    /// A round trip was measured since the last probe.
    measured: bool,
}

saved!(LossProbe { out, measured });

/// The answer of an ACK to a probe.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ProbeAnswer {
    /// Nothing, or there was none.
    None,
    /// It was not needed: R had everything.
    Unneeded,
    /// It has repaired a loss: the window must be reduced (section 7.4.2).
    Repaired,
}

impl LossProbe {
    /// A probe may be sent when its time has come (section 7.3).
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        self.out.is_none() && self.measured
    }

    /// How long after the last segment or ACK (section 7.2; the caller takes the earlier of this
    /// and the retransmission timeout).
    #[must_use]
    pub fn delay(rtt: &RttEstimator, single_segment: bool) -> Duration {
        let Some(srtt) = rtt.srtt() else { return PROBE_INITIAL };
        srtt.saturating_mul(2) + if single_segment { MAX_ACK_DELAY } else { TIMEOUT_MIN }
    }

    /// A round trip was measured.
    pub const fn on_sample(&mut self) {
        self.measured = true;
    }

    /// A probe leaves. `next`: everything below was sent; `copy`: it was sent before.
    pub const fn on_sent(&mut self, next: u64, copy: bool) {
        self.out = Some((next, copy));
        self.measured = false;
    }

    /// The probed bytes are being repaired: the probe's answer means nothing more (section 7.1).
    pub const fn forget(&mut self) {
        self.out = None;
    }

    /// An acknowledgement of all below `ack` (section 7.4.2). `twice`: it reports that bytes which
    /// end there came twice; `duplicate`: it says nothing new and has no SACK blocks.
    pub fn on_ack(&mut self, ack: u64, twice: Option<u64>, duplicate: bool) -> ProbeAnswer {
        let Some((end, copy)) = self.out.filter(|(end, _)| ack >= *end) else {
            return ProbeAnswer::None;
        };
        let answer = if !copy || twice == Some(end) {
            ProbeAnswer::Unneeded
        } else if ack > end {
            ProbeAnswer::Repaired
        } else if duplicate {
            ProbeAnswer::Unneeded
        } else {
            return ProbeAnswer::None; // whether R got it once or twice its next ACK says
        };
        self.out = None;
        answer
    }
}

#[cfg(test)]
mod tests;
