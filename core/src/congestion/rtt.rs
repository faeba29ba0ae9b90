//! Round-trip time and retransmission timeout (RFC 6298).
//!
//! Samples use H's own clock: from the moment at which a range left for R to its acknowledgement,
//! and by Karn's rule never from a range that was sent twice. Timestamps do not help, because the
//! TSvals on the wire are G's: they show when G handed the bytes over, not when they left.

use crate::limits::{WIRE_RTO_AFTER_SYN, WIRE_RTO_INITIAL, WIRE_RTO_MAX, WIRE_RTO_VARIANCE_MIN};
use crate::time::{Duration, Instant};
use crate::wire::saved::{NUMBER_MAX, saved};

/// The shortest round trip is forgotten after one to two of these: a path may have become longer.
/// Linux: `tcp_min_rtt_wlen`.
const MIN_RTT_WINDOW: Duration = Duration::from_secs(300);

/// Estimator of the time between a segment and its acknowledgement.
#[derive(Clone, Copy, Debug)]
pub struct RttEstimator {
    /// Smoothed round trip; zero before the first sample.
    srtt: Duration,
    /// Smoothed deviation from it.
    variance: Duration,
    /// Shortest round trip of this window and of the one before.
    min: [Duration; 2],
    /// When this window began.
    min_since: Instant,
    /// The timeout before the first sample.
    initial: Duration,
    /// Timeouts since the last sample: each doubles the next (RFC 6298 section 5.5).
    backoffs: u8,
}

saved! {
    RttEstimator { srtt, variance, min as OrNone, min_since as Wall, initial, backoffs }
    check |it| {
        let is_short = |span: &Duration| span.as_nanos() <= NUMBER_MAX / 8;
        [it.srtt, it.variance, it.initial].iter().all(is_short)
    }
}

impl Default for RttEstimator {
    fn default() -> Self {
        Self::new()
    }
}

impl RttEstimator {
    /// Nothing was measured yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            srtt: Duration::ZERO,
            variance: Duration::ZERO,
            min: [NEVER; 2],
            min_since: Instant::ZERO,
            initial: WIRE_RTO_INITIAL,
            backoffs: 0,
        }
    }

    /// The estimator of the next sender. A round trip behind which nothing but timeouts came is
    /// not believed, but the timeout stays as long as they have made it, until a round trip is
    /// measured (RFC 6298 section 5.5; Karn's algorithm): the path may be longer than before.
    #[must_use]
    pub fn resumed(&self) -> Self {
        if self.backoffs == 0 {
            return *self;
        }
        Self { initial: self.rto().max(WIRE_RTO_INITIAL), ..Self::new() }
    }

    /// The smoothed round trip, once there is one.
    #[must_use]
    pub fn srtt(&self) -> Option<Duration> {
        (self.srtt > Duration::ZERO).then_some(self.srtt)
    }

    /// The shortest round trip of the last five to ten minutes.
    #[must_use]
    pub fn min(&self) -> Option<Duration> {
        let min = self.min[0].min(self.min[1]);
        (min < NEVER).then_some(min)
    }

    /// No answer to what has just left comes sooner. A path may have become a little faster than
    /// its shortest round trip. Behind several timeouts nothing is known of it, and a segment that
    /// comes then was hardly late for so long.
    #[must_use]
    pub fn soonest(&self) -> Option<Duration> {
        let min = self.min().filter(|_| self.backoffs <= 1)?;
        Some(Duration::from_nanos(min.as_nanos() / 4 * 3))
    }

    /// Timeouts since the last sample.
    #[must_use]
    pub const fn backoffs(&self) -> u8 {
        self.backoffs
    }

    /// How long to wait for an acknowledgement, doubled for each timeout.
    #[must_use]
    pub fn rto(&self) -> Duration {
        self.rto_after(self.backoffs)
    }

    /// The same, doubled so often.
    #[must_use]
    pub fn rto_after(&self, timeouts: u8) -> Duration {
        let rto = match self.srtt() {
            None => self.initial,
            Some(srtt) => {
                let variance = self.variance.saturating_mul(4);
                srtt + variance.max(WIRE_RTO_VARIANCE_MIN)
            }
        };
        rto.saturating_mul(1 << timeouts.min(20)).min(WIRE_RTO_MAX)
    }

    /// A round trip was measured (RFC 6298 sections 2.2 and 2.3). That alone ends the doubling: an
    /// ACK that a copy may have brought does not, or a path that has become longer than the timeout
    /// would see every segment twice (Karn's algorithm, its second half).
    pub fn on_sample(&mut self, now: Instant, rtt: Duration) {
        let sample = rtt.as_nanos().max(1);
        let (srtt, variance) = (self.srtt.as_nanos(), self.variance.as_nanos());
        let (srtt, variance) = if srtt == 0 {
            (sample, sample / 2)
        } else {
            // 3/4 and 1/4 of RTTVAR with the old SRTT, then 7/8 and 1/8 of SRTT.
            let variance = variance - variance / 4 + srtt.abs_diff(sample) / 4;
            ((srtt - srtt / 8 + sample / 8).max(1), variance)
        };
        (self.srtt, self.variance) = (Duration::from_nanos(srtt), Duration::from_nanos(variance));
        if now.since(self.min_since) > MIN_RTT_WINDOW {
            self.min = [NEVER, self.min[0]];
            self.min_since = now;
        }
        self.min[0] = self.min[0].min(rtt);
        self.backoffs = 0;
    }

    /// The SYN timed out, so the timeout may be shorter than the round trip.
    pub const fn on_syn_timeout(&mut self) {
        self.initial = WIRE_RTO_AFTER_SYN;
    }

    /// The timeout has passed without an acknowledgement.
    pub const fn on_timeout(&mut self) {
        self.backoffs = self.backoffs.saturating_add(1);
    }
}

/// Longer than any round trip.
const NEVER: Duration = Duration::from_nanos(u64::MAX);

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn us(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    #[test]
    fn the_estimate_follows_rfc_6298_step_by_step() {
        // SRTT, RTTVAR, RTO by hand: 100; then 0.75 * 50 + 0.25 * 100 = 62.5 and
        // 0.875 * 100 + 0.125 * 200 = 112.5; then 0.75 * 62.5 + 0.25 * 12.5 = 50 and
        // 0.875 * 112.5 + 0.125 * 100 = 110.9375.
        let mut rtt = RttEstimator::new();
        assert_eq!((rtt.rto(), rtt.srtt(), rtt.min()), (WIRE_RTO_INITIAL, None, None));
        let steps = [
            (ms(100), us(100_000), us(50_000), us(300_000)),
            (ms(200), us(112_500), us(62_500), us(362_500)),
            (ms(100), Duration::from_nanos(110_937_500), us(50_000), us(310_937) + half_us()),
        ];
        for (sample, srtt, variance, rto) in steps {
            rtt.on_sample(Instant::from_secs(9), sample);
            assert_eq!((rtt.srtt, rtt.variance, rtt.rto()), (srtt, variance, rto));
        }
        assert_eq!(rtt.min(), Some(ms(100)));
    }

    fn half_us() -> Duration {
        Duration::from_nanos(500)
    }

    #[test]
    fn a_steady_path_still_leaves_delayed_acks_200_ms() {
        let mut rtt = RttEstimator::new();
        for _ in 0..100 {
            rtt.on_sample(Instant::from_secs(9), ms(300));
        }
        assert!(rtt.variance < ms(1));
        assert_eq!(rtt.rto(), ms(500));
    }

    #[test]
    fn timeouts_double_up_to_two_minutes_until_a_round_trip_is_measured() {
        let mut rtt = RttEstimator::new();
        rtt.on_sample(Instant::ZERO, ms(100));
        let mut seen = vec![];
        for _ in 0..11 {
            seen.push(rtt.rto().as_millis());
            rtt.on_timeout();
        }
        let doubled = [300, 600, 1200, 2400, 4800, 9600, 19_200, 38_400, 76_800, 120_000, 120_000];
        assert_eq!(seen, doubled);
        rtt.on_sample(Instant::ZERO, ms(100));
        assert_eq!(rtt.rto(), us(275_000 + 25_000));
    }

    /// Of a path of 1.5 s each segment would leave twice behind each pause, and none be measured.
    #[test]
    fn flood_23_behind_timeouts_the_next_estimator_begins_with_as_long_a_one() {
        let mut rtt = RttEstimator::new();
        rtt.on_timeout();
        let next = rtt.resumed();
        assert_eq!((next.rto(), next.backoffs(), next.srtt()), (ms(2000), 0, None));
        assert_eq!(next.resumed().rto(), ms(2000), "nothing was measured since");
        rtt.on_sample(Instant::ZERO, ms(10));
        assert_eq!(rtt.resumed().rto(), ms(210));
        rtt.on_timeout();
        assert_eq!(rtt.resumed().rto(), WIRE_RTO_INITIAL, "one of 420 ms is too short");
    }

    #[test]
    fn a_path_that_became_longer_is_believed_after_five_to_ten_minutes() {
        let mut rtt = RttEstimator::new();
        rtt.on_sample(Instant::from_secs(1000), ms(10));
        for minute in 1..=12 {
            rtt.on_sample(Instant::from_secs(1000 + 60 * minute), ms(50));
            // A window ends with the first sample after five minutes: in minutes 6 and 12.
            let expected = if minute < 12 { ms(10) } else { ms(50) };
            assert_eq!(rtt.min(), Some(expected), "after {minute} minutes");
        }
    }
}
