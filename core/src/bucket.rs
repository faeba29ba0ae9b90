//! Token buckets: so many at once, and then one more every so often; and a rate of bytes that
//! several threads share.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::limits::{MTU_DEFAULT, PACED_BURST_MAX};
use crate::time::{Duration, Instant};

/// The remaining permits.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    burst: u64,
    interval: Duration,
    left: u64,
    /// Until when that was counted.
    at: Instant,
}

impl Bucket {
    /// Full: `burst` at once, then one per `interval`.
    #[must_use]
    pub const fn new(burst: u64, interval: Duration) -> Self {
        Self { burst, interval, left: burst, at: Instant::ZERO }
    }

    /// Whether one more is allowed now; if so it counts.
    #[must_use]
    pub fn allows(&mut self, now: Instant) -> bool {
        let earned = now.since(self.at).as_nanos() / self.interval.as_nanos();
        if earned > 0 {
            self.left = self.burst.min(self.left + earned);
            self.at = now;
        }
        let allows = self.left > 0;
        self.left -= u64::from(allows);
        allows
    }
}

/// So many bytes in a second for several threads, none of which waits for another. It is one atomic
/// number: the time at which all bytes that were counted are paid (the "theoretical arrival time"
/// of the generic cell rate algorithm, ITU-T I.371).
///
/// The bytes of a millisecond may be unpaid at any time, or two packets, and 64 KiB at most.
#[derive(Debug)]
pub struct SharedRate {
    bytes_per_s: u64,
    /// Bytes that may go at once.
    burst: u64,
    /// Ticks that may be unpaid while another packet may go.
    ahead: u64,
    /// In ticks.
    paid_at: AtomicU64,
}

/// Ticks of a nanosecond: a byte takes 1.28 of them at 100 Gbit/s, and 36 years fit 64 bits.
const TICKS: u64 = 16;
const SECOND: u64 = 1_000_000_000;

fn ticks(at: Instant) -> u64 {
    at.as_nanos().saturating_mul(TICKS)
}

impl SharedRate {
    /// Nothing was counted yet. `bytes_per_s`: at least 1.
    #[must_use]
    pub fn new(bytes_per_s: u64) -> Self {
        let (bytes_per_s, packet) = (bytes_per_s.max(1), u64::from(MTU_DEFAULT));
        let burst = (bytes_per_s / 1000).clamp(2 * packet, PACED_BURST_MAX);
        let mut new = Self { bytes_per_s, burst, ahead: 0, paid_at: AtomicU64::new(0) };
        new.ahead = new.ticks_of(burst - packet);
        new
    }

    /// Another rate, in the place of this one: what was counted here is paid at the same time.
    /// So a rate that is set anew gives no burst, and nobody waits for longer because of it.
    #[must_use]
    pub fn with_rate(&self, bytes_per_s: u64) -> Self {
        let paid_at = AtomicU64::new(self.paid_at.load(Ordering::Relaxed));
        Self { paid_at, ..Self::new(bytes_per_s) }
    }

    /// The rate.
    #[must_use]
    pub const fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s
    }

    /// Bytes that may go at once.
    #[must_use]
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    /// The time that so many bytes take.
    #[must_use]
    pub fn time_of(&self, bytes: u64) -> Duration {
        Duration::from_nanos(self.ticks_of(bytes).div_ceil(TICKS))
    }

    /// When the next packet may go; in the past if nothing waits.
    #[must_use]
    pub fn next(&self) -> Instant {
        let paid_at = self.paid_at.load(Ordering::Relaxed);
        Instant::from_nanos(paid_at.saturating_sub(self.ahead).div_ceil(TICKS))
    }

    /// Bytes that may go now: a burst, less what has gone lately.
    #[must_use]
    pub fn available(&self, now: Instant) -> u64 {
        let unpaid = self.paid_at.load(Ordering::Relaxed).saturating_sub(ticks(now));
        let bytes = u128::from(unpaid) * u128::from(self.bytes_per_s);
        let bytes = bytes.div_ceil(u128::from(TICKS * SECOND));
        self.burst.saturating_sub(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// So many bytes have gone.
    pub fn charge(&self, now: Instant, bytes: u64) {
        let (now, cost) = (ticks(now), self.ticks_of(bytes));
        let later = |paid_at: u64| Some(paid_at.max(now).saturating_add(cost));
        let _ = self.paid_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    }

    fn ticks_of(&self, bytes: u64) -> u64 {
        let ticks = u128::from(bytes) * u128::from(TICKS * SECOND);
        u64::try_from(ticks.div_ceil(u128::from(self.bytes_per_s))).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_shared_rate_lets_a_burst_go_and_then_as_many_bytes_as_time_has_passed() {
        let (rate, start) = (SharedRate::new(10_000_000), Instant::from_secs(1000));
        assert_eq!((rate.burst(), rate.available(start)), (10_000, 10_000));
        let mut now = start;
        let mut sent = 0;
        while now.since(start) < Duration::from_secs(1) {
            now = now.max(rate.next());
            rate.charge(now, 1000);
            sent += 1000;
        }
        assert!((10_008_000..=10_010_000).contains(&sent), "{sent}");
        rate.charge(now, 1_000_000);
        let waits = rate.next().since(now);
        assert!(waits >= Duration::from_millis(99) && waits <= Duration::from_millis(101));
        assert_eq!(rate.available(now), 0);
        assert_eq!(rate.available(now + Duration::from_secs(1)), 10_000, "no more than a burst");
        assert_eq!(rate.time_of(10_000), Duration::from_millis(1));
    }

    #[test]
    fn a_rate_is_a_millisecond_ahead_at_most_or_two_packets_or_64_kib() {
        for (bytes_per_s, burst) in [(125_000, 3000), (10_000_000, 10_000), (1 << 40, 65_536)] {
            assert_eq!(SharedRate::new(bytes_per_s).burst(), burst);
        }
        let fast = SharedRate::new(12_500_000_000);
        fast.charge(Instant::from_secs(1), 1 << 30);
        let takes = fast.next().since(Instant::from_secs(1)).as_nanos();
        assert!((85_890_000..85_900_000).contains(&takes), "{takes} ns at 100 Gbit/s");
    }

    #[test]
    fn another_rate_has_the_debt_of_the_one_before_in_time() {
        let (rate, now) = (SharedRate::new(10_000_000), Instant::from_secs(1000));
        rate.charge(now, 1_000_000);
        for bytes_per_s in [1_000_000, 100_000_000] {
            let other = rate.with_rate(bytes_per_s);
            assert_eq!((other.bytes_per_s(), other.available(now)), (bytes_per_s, 0));
            let paid = now + Duration::from_millis(100);
            assert_eq!(other.available(paid), other.burst(), "as here");
            assert!(other.next() < paid && other.next() > now);
        }
    }

    #[test]
    fn no_byte_that_several_threads_count_is_lost() {
        let (rate, now) = (SharedRate::new(1_000_000), Instant::from_secs(1000));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| rate.charge(now, 100)));
            }
        });
        // 4 MB, less what may be ahead.
        assert_eq!(rate.next().since(now), Duration::from_nanos(4_000_000_000 - 1_500_000));
    }

    #[test]
    fn a_thousand_at_once_and_then_ten_in_a_millisecond() {
        let mut bucket = Bucket::new(1000, Duration::from_micros(100));
        let start = Instant::from_secs(1000);
        let mut allowed = |now, tries| (0..tries).filter(|_| bucket.allows(now)).count();
        assert_eq!(allowed(start, 5000), 1000);
        assert_eq!(allowed(start + Duration::from_micros(99), 10), 0);
        assert_eq!(allowed(start + Duration::from_millis(1), 100), 10);
        assert_eq!(allowed(start + Duration::from_secs(60), 5000), 1000, "no more than a burst");
    }
}
