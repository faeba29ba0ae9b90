//! Proportional rate reduction (RFC 9937): while a window is being reduced, each ACK allows a
//! number of bytes to be sent, so that the bytes under way reach `ssthresh` within a round trip,
//! without a stop or a burst.
//!
//! The RFC has `cwnd = inflight + sndcnt`. Here the budget (`sndcnt` minus the bytes that were sent
//! of it) is kept instead: bytes that a timer declares lost leave `inflight`, and must not become a
//! burst.

use crate::wire::saved::saved;

/// One reduction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prr {
    /// Bytes that were under way when it began (`RecoverFS`).
    flight: u64,
    /// Bytes that R got since (`prr_delivered`).
    delivered: u64,
    /// Bytes that were sent since (`prr_out`).
    sent: u64,
    /// Bytes that may be sent now.
    budget: u64,
}

saved!(Prr { flight, delivered, sent, budget });

/// An ACK during a reduction.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes that R has for the first time (`DeliveredData`).
    pub delivered: u64,
    /// Bytes under way now (`inflight`).
    pub in_flight: u64,
    /// The window to arrive at.
    pub ssthresh: u64,
    /// The acknowledgement moved, and nothing more was found lost (`safeACK`).
    pub safe: bool,
    /// Bytes of a segment.
    pub mss: u64,
}

impl Prr {
    /// A reduction begins. `flight`: bytes from the oldest unacknowledged to the newest that was
    /// sent, before the ACK that began it, without those that were SACKed before it.
    #[must_use]
    pub const fn new(flight: u64) -> Self {
        Self { flight, delivered: 0, sent: 0, budget: 0 }
    }

    /// Bytes that may be sent now.
    #[must_use]
    pub const fn budget(&self) -> u64 {
        self.budget
    }

    /// An ACK, or the timer that began the reduction.
    pub fn on_ack(&mut self, p: &Progress) {
        if p.delivered == 0 && self.sent > 0 {
            return;
        }
        self.delivered += p.delivered;
        let budget = if p.in_flight > p.ssthresh {
            let due = u128::from(self.delivered) * u128::from(p.ssthresh);
            let due = due.div_ceil(u128::from(self.flight.max(1)));
            u64::try_from(due).unwrap_or(u64::MAX).saturating_sub(self.sent)
        } else {
            let conserved = self.delivered.saturating_sub(self.sent).max(p.delivered);
            let growing = if p.safe { conserved + p.mss } else { conserved };
            growing.min(p.ssthresh - p.in_flight)
        };
        // The first retransmission leaves at once.
        self.budget = if self.sent == 0 { budget.max(p.mss) } else { budget };
    }

    /// So much was sent, new or again.
    pub const fn on_sent(&mut self, bytes: u64) {
        self.sent += bytes;
        self.budget = self.budget.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u64 = 1000;

    /// The ACKs of a window of 20 segments of which `lost` were lost, one delivered each; sends
    /// what the budget allows at once. A line each: ACK, bytes under way after it, sent, in
    /// segments.
    fn recovery(lost: u64, ssthresh: u64) -> String {
        let mut prr = Prr::new(20 * MSS);
        let mut in_flight = (20 - lost) * MSS;
        let mut lines = String::new();
        for ack in 1..=(20 - lost) {
            in_flight -= MSS;
            let safe = false;
            let ssthresh = ssthresh * MSS;
            prr.on_ack(&Progress { delivered: MSS, in_flight, ssthresh, safe, mss: MSS });
            let sent = prr.budget() / MSS;
            prr.on_sent(sent * MSS);
            in_flight += sent * MSS;
            lines += &format!("{ack}:{}+{sent} ", in_flight / MSS - sent);
        }
        lines.trim_end().to_owned()
    }

    #[test]
    fn one_loss_of_twenty_is_sent_for_every_other_ack() {
        // n * 10 / 20 segments are due after n deliveries, and whole ones leave; the first did so
        // half a segment early. At 10 under way packets are conserved.
        assert_eq!(
            recovery(1, 10),
            "1:18+1 2:18+0 3:17+0 4:16+1 5:16+0 6:15+1 7:15+0 8:14+1 9:14+0 10:13+1 11:13+0 \
             12:12+1 13:12+0 14:11+1 15:11+0 16:10+0 17:9+1 18:9+1 19:9+1"
        );
    }

    #[test]
    fn fifteen_losses_of_twenty_conserve_packets() {
        // Far below ssthresh, a segment leaves for each that arrived: in flight stays at 4 or 5.
        assert_eq!(recovery(15, 10), "1:4+1 2:4+1 3:4+1 4:4+1 5:4+1");
    }

    #[test]
    fn a_retransmission_that_arrives_buys_one_segment_more() {
        let mut prr = Prr::new(20 * MSS);
        let ack = |safe| Progress {
            delivered: MSS,
            in_flight: 4 * MSS,
            ssthresh: 10 * MSS,
            safe,
            mss: MSS,
        };
        prr.on_ack(&ack(false));
        prr.on_sent(MSS);
        prr.on_ack(&ack(true));
        assert_eq!(prr.budget(), 2 * MSS);
    }

    #[test]
    fn the_first_retransmission_does_not_wait_and_an_ack_without_news_brings_none() {
        let mut prr = Prr::new(20 * MSS);
        let nothing = Progress {
            delivered: 0,
            in_flight: 19 * MSS,
            ssthresh: 10 * MSS,
            safe: false,
            mss: MSS,
        };
        prr.on_ack(&nothing);
        assert_eq!(prr.budget(), MSS);
        prr.on_sent(MSS);
        prr.on_ack(&nothing);
        assert_eq!(prr.budget(), 0);
    }

    #[test]
    fn what_is_due_is_rounded_up() {
        let mut prr = Prr::new(3000);
        let ack =
            Progress { delivered: 1000, in_flight: 1500, ssthresh: 1000, safe: false, mss: MSS };
        prr.on_ack(&ack);
        prr.on_sent(1);
        prr.on_ack(&ack);
        assert_eq!(prr.budget(), 666); // 2000 * 1000 / 3000, less what was sent
    }

    #[test]
    fn at_its_end_what_is_under_way_is_ssthresh() {
        for ssthresh in [7, 10, 14] {
            let last = recovery(1, ssthresh);
            let (_, last) = last.rsplit_once(' ').unwrap();
            let (under_way, sent) = last.split_once(':').unwrap().1.split_once('+').unwrap();
            let sum: u64 = under_way.parse::<u64>().unwrap() + sent.parse::<u64>().unwrap();
            assert_eq!(sum, ssthresh);
        }
    }
}
