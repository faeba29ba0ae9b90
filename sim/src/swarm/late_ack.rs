//! Seeds whose flows acknowledge late for a while (LIFE-12): the mode begins and ends at any time,
//! also while a guest has lost its core, and up to the moment at which all heals. It draws from a
//! stream of its own, so the rest of a seed stays as it is.

use nightporter_core::time::{Duration, Instant};

use crate::plan::{Fault, FaultKind, Plan};
use crate::random::Random;

/// So many of a hundred seeds have it.
const PERCENT: u32 = 30;

impl Plan {
    /// See the module doc.
    #[must_use]
    pub(super) fn with_late_ack(mut self) -> Self {
        let mut random = Random::new(self.seed, "late");
        if !random.percent(PERCENT) {
            return self;
        }
        let heal_us = (self.heal_at.as_nanos() / 1000).max(2);
        for guest in 0..u16::try_from(self.guests.len()).unwrap_or(0) {
            let often = random.percent(50);
            let times = if often { random.within(1, 12) } else { random.within(0, 2) };
            for _ in 0..times {
                let from_us = self.moment_us(&mut random, heal_us);
                let most_us = if often { heal_us / 4 } else { heal_us };
                let lasts = Duration::from_micros(random.within(100, most_us.max(101)));
                let kind = FaultKind::Late { guest };
                self.faults.push(Fault { at: Instant::from_micros(from_us), lasts, kind });
            }
        }
        self.faults.sort_by_key(|fault| fault.at);
        self
    }

    /// A moment before all heals, mostly soon after a connection has begun.
    fn moment_us(&self, random: &mut Random, heal_us: u64) -> u64 {
        if self.conns.is_empty() || random.percent(40) {
            return random.below(heal_us);
        }
        let opens_us = random.pick(&self.conns).opens_at.as_nanos() / 1000;
        let within_us = random.pick(&[2_000, 20_000, 200_000]);
        (opens_us + random.below(within_us)).min(heal_us - 1)
    }
}
