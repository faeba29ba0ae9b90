//! Milliseconds in which more was sent than a rate allows.
//!
//! Source: "Virtual Machine Effects on Network Traffic Dynamics", section 4.1: with seven VMs a
//! Gigabit link "regularly delivered bursts of packets to the router at bit rates exceeding 200
//! Mbps when sampled at millisecond resolution".

use crate::time::{Duration, Instant};

/// The length of a sample.
const SAMPLE: Duration = Duration::from_millis(1);

/// Frames of one direction at one place, by milliseconds of the caller's clock. Bytes are those of
/// frames, without FCS; a super-segment counts where it is seen.
#[derive(Clone, Copy, Debug)]
pub struct Bursts {
    /// Bytes of a millisecond at the rate.
    allowed: u64,
    current: u64,
    bytes: u64,
    busy: u64,
    above: u64,
    most: u64,
}

impl Bursts {
    /// With a rate in Mbit/s (10^6 bits).
    pub(super) const fn new(rate_mbit_s: u32) -> Self {
        let allowed = rate_mbit_s as u64 * 1_000_000 / 8 / 1000;
        Self { allowed, current: 0, bytes: 0, busy: 0, above: 0, most: 0 }
    }

    /// Milliseconds with at least one frame.
    #[must_use]
    pub const fn busy(&self) -> u64 {
        self.busy
    }

    /// Milliseconds with more bytes than the rate allows.
    #[must_use]
    pub const fn above(&self) -> u64 {
        self.above
    }

    /// Most bytes of a millisecond.
    #[must_use]
    pub const fn most_bytes(&self) -> u64 {
        self.most
    }

    /// A frame of so many bytes.
    pub(super) fn add(&mut self, now: Instant, bytes: u32) {
        let sample = now.as_nanos() / SAMPLE.as_nanos();
        if sample != self.current || self.bytes == 0 {
            (self.current, self.bytes) = (sample, 0);
            self.busy += 1;
        }
        let before = self.bytes;
        self.bytes += u64::from(bytes);
        self.above += u64::from(before <= self.allowed && self.bytes > self.allowed);
        self.most = self.most.max(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_millisecond_counts_once_however_much_is_in_it() {
        let mut bursts = Bursts::new(200); // 25,000 bytes
        let mut at = |us: u64, bytes| bursts.add(Instant::from_micros(us), bytes);
        at(0, 25_000); // as much as is allowed
        at(1000, 25_000);
        at(1999, 1);
        at(1999, 60_000);
        at(2000, 60_000);
        at(5000, 60);
        assert_eq!((bursts.busy(), bursts.above(), bursts.most_bytes()), (4, 2, 85_001));
    }
}
