//! Storm control: everybody gets the frames that a guest sends to groups, so it may send only so
//! many.

use crate::limits::{GROUP_FRAMES_BURST, GROUP_FRAMES_INTERVAL};
use crate::time::Instant;

/// What a guest may still send to groups.
#[derive(Clone, Copy, Debug)]
pub struct Storm {
    left: u64,
    /// Until when that was counted.
    at: Instant,
}

impl Storm {
    /// Nothing was sent yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { left: GROUP_FRAMES_BURST, at: Instant::ZERO }
    }

    /// Whether one more frame may be sent now; if so it counts.
    #[must_use]
    pub fn allows(&mut self, now: Instant) -> bool {
        let earned = now.since(self.at).as_nanos() / GROUP_FRAMES_INTERVAL.as_nanos();
        if earned > 0 {
            self.left = GROUP_FRAMES_BURST.min(self.left + earned);
            self.at = now;
        }
        let allows = self.left > 0;
        self.left -= u64::from(allows);
        allows
    }
}

impl Default for Storm {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    #[test]
    fn a_thousand_at_once_and_then_ten_in_a_millisecond() {
        let (mut storm, start) = (Storm::new(), Instant::from_secs(1000));
        let mut sends = |now, tries| (0..tries).filter(|_| storm.allows(now)).count();
        assert_eq!(sends(start, 5000), 1000);
        assert_eq!(sends(start + Duration::from_micros(99), 10), 0);
        assert_eq!(sends(start + Duration::from_millis(1), 100), 10);
        assert_eq!(sends(start + Duration::from_secs(60), 5000), 1000, "no more than a burst");
    }
}
