//! Seeds with a guest that forwards: its TCP runs on a machine behind it, which has a path of its
//! own (FWD-01 to FWD-06). All rules of safety hold for it; those of quality do not
//! (`History::is_twinned`), because the part behind a router is not seen. It draws from a stream of
//! its own, so seeds without one stay as they are.

use nightporter_core::time::Duration;

use crate::plan::{Floods, ForwardPlan, GuestPlan, LinkPlan, Plan, StackKind, StackPlan};
use crate::random::Random;

/// So many of a hundred seeds have one, if a guest of theirs fits.
const PERCENT: u32 = 12;

/// A guest that forwards may refuse for so long (FWD-06).
const PATIENCE: Duration = Duration::from_secs(1_000);

impl Plan {
    /// See the module doc.
    #[must_use]
    pub(super) fn with_forwards(mut self) -> Self {
        let mut random = Random::new(self.seed, "forwards");
        let fits = |g: &GuestPlan| {
            g.stack.kind == StackKind::Strict && g.stack.syn_options.is_empty() && g.ack_offload
        };
        let Some(guest) = self.guests.iter().position(fits).filter(|_| random.percent(PERCENT))
        else {
            return self;
        };
        let mtu = self.guests[guest].mtu;
        let from_end = LinkPlan {
            rate_bps: random.pick(&[10_000_000, 100_000_000, 1_000_000_000, 10_000_000_000]),
            delay_us: random.pick(&[20, 20, 200, 5_000, 40_000, 200_000]),
            queue_frames: random.pick(&[66, 500, 2_000]),
            mtu,
        };
        let narrow = random.percent(40) && self.all_heed_errors();
        // An MTU that IPv6 allows, and the least of IPv4.
        let least = if self.conns.iter().any(|conn| conn.v6) { 1280 } else { 576 };
        let narrower = random.pick(&[1400, 1280, 600]).clamp(least.min(mtu), mtu);
        let to_end = LinkPlan { mtu: if narrow { narrower } else { mtu }, ..from_end };
        let heal_ms = self.heal_at.as_millis();
        let sleeps = random.percent(20).then(|| {
            let from = random.below(heal_ms.max(1));
            (from, from + random.pick(&[100, 3_000, 40_000]))
        });
        let hides_ttl = random.percent(40);
        self.guests[guest].forwards = Some(ForwardPlan { to_end, from_end, hides_ttl, sleeps });
        // A machine behind the guest does not get the messages to the guest's own TCP.
        self.guests[guest].stack.quirks.floods = Floods::No;
        self.give_up_at = self.give_up_at + PATIENCE;
        self
    }

    /// All others send shorter segments when a router says so, and its error quotes what they look
    /// for.
    fn all_heed_errors(&self) -> bool {
        let guests = self.guests.iter().map(|g| &g.stack);
        let heeds = |stack: &StackPlan| {
            let quirks = &stack.quirks;
            stack.kind == StackKind::Strict && !quirks.extension_header && !quirks.ip_options
        };
        guests.chain(self.remotes.iter().map(|r| &r.stack)).all(heeds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_hundred_seeds_have_every_kind_of_router_a_few_times() {
        let plans: Vec<_> = (0..500).map(Plan::from_seed).collect();
        let seeds_with = |is_it: fn(&GuestPlan, &ForwardPlan) -> bool| {
            let of = |g: &GuestPlan| g.forwards.is_some_and(|forwards| is_it(g, &forwards));
            plans.iter().filter(|plan| plan.guests.iter().any(of)).count()
        };
        let worlds = [
            seeds_with(|_, forwards| forwards.hides_ttl),
            seeds_with(|_, forwards| !forwards.hides_ttl && forwards.to_end.delay_us <= 200),
            seeds_with(|_, forwards| forwards.to_end.delay_us > 50_000),
            seeds_with(|_, forwards| forwards.sleeps.is_some()),
            seeds_with(|g, forwards| forwards.to_end.mtu < g.mtu),
        ];
        assert!(worlds.iter().all(|seeds| *seeds >= 3), "{worlds:?}");
    }
}
