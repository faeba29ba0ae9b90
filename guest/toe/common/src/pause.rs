//! When a host that was away is tried again. Each attempt holds up a program, so while attempts
//! fail they become rarer.

/// After the first failure the host is not tried for so long.
const FIRST_MS: i64 = 1_000;
/// The pause doubles with each failure, up to this. A host that has come back is noticed within it.
const LONGEST_MS: i64 = 30_000;

/// The pause after so many failures in a row before the latest.
pub fn after(failures: u32) -> i64 {
    (FIRST_MS << failures.min(5)).min(LONGEST_MS)
}

/// The failures since the host has last answered.
#[derive(Clone, Debug, Default)]
pub struct Pause {
    failures: u32,
    until_ms: i64,
}

impl Pause {
    /// Whether the host may be tried.
    pub fn is_over(&self, now_ms: i64) -> bool {
        now_ms >= self.until_ms
    }

    /// The host has answered.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// It has not.
    pub fn failed(&mut self, now_ms: i64) {
        self.until_ms = now_ms + after(self.failures);
        self.failures = self.failures.saturating_add(1);
    }

    /// It cannot before something is installed.
    pub fn is_absent(&mut self, now_ms: i64) {
        self.until_ms = now_ms + LONGEST_MS;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails at once whenever it may try, and says how long it had to wait each time.
    fn pauses(pause: &mut Pause, now_ms: &mut i64, count: usize) -> Vec<i64> {
        let mut pauses = Vec::new();
        for _ in 0..count {
            pause.failed(*now_ms);
            let began_ms = *now_ms;
            while !pause.is_over(*now_ms) {
                *now_ms += 1;
            }
            pauses.push(*now_ms - began_ms);
        }
        pauses
    }

    #[test]
    fn it_doubles_with_each_failure_until_one_succeeds() {
        let (mut pause, mut now_ms) = (Pause::default(), 70_001);
        assert!(pause.is_over(now_ms));
        let all = pauses(&mut pause, &mut now_ms, 8);
        assert_eq!(all, [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000]);
        pause.succeeded();
        assert!(pause.is_over(now_ms));
        assert_eq!(pauses(&mut pause, &mut now_ms, 2), [1_000, 2_000]);
    }
}
