//! So many at once, and then one more every so often: a token bucket.

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

#[cfg(test)]
mod tests {
    use super::*;

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
