//! Seeds whose guests have accept offload: the world of a seed, and many short connections of its
//! remotes, since the host answers only for sources that the guest has accepted lately. They draw
//! from a stream of their own, so all other seeds stay as they are.

use nightporter_core::time::{Duration, Instant};

use crate::plan::{Accepts, ConnPlan, Machine, Plan, StackKind, Workload};
use crate::random::Random;

/// Short connections of a seed, at most.
const CONNS_MAX: u64 = 60;

impl Plan {
    /// See the module doc.
    #[must_use]
    pub fn with_accept(seed: u64) -> Self {
        let mut plan = Self::from_seed(seed);
        let mut random = Random::new(seed, "accept");
        for guest in &mut plan.guests {
            let some = [Accepts::BySource, Accepts::BySource, Accepts::ForAny];
            guest.accepts = random.pick(&some);
        }
        let heal_us = plan.heal_at.as_nanos() / 1000;
        let (guests, remotes) = (plan.guests.len(), plan.remotes.len());
        for _ in 0..random.within(5, CONNS_MAX) {
            let pick = |random: &mut Random, of: usize| {
                u16::try_from(random.below(of as u64)).unwrap_or(0)
            };
            let (guest, remote) = (pick(&mut random, guests), pick(&mut random, remotes));
            let kinds = [
                plan.guests[usize::from(guest)].stack.kind,
                plan.remotes[usize::from(remote)].stack.kind,
            ];
            // Two of these may deadlock, and what a liar acknowledges is judged for its own
            // connections.
            let lies = plan.remotes[usize::from(remote)].stack.quirks.acks_ahead;
            if kinds == [StackKind::Smoltcp; 2] || lies {
                continue;
            }
            let bytes = |random: &mut Random| random.pick(&[0, 1, 100, 1000, 20_000, 100_000]);
            let (up, down) = (bytes(&mut random), bytes(&mut random));
            let is_asked = kinds.contains(&StackKind::Smoltcp) || random.percent(40);
            let workload = if is_asked {
                let (request, response) = (up.max(1), down.max(1));
                Workload::RequestResponse { request, response, count: 1 }
            } else {
                Workload::Bulk { up, down }
            };
            // Some when all is over.
            let opens_at = Instant::from_micros(random.below(heal_us + heal_us / 2));
            let (client, server) = (Machine::Remote(remote), Machine::Guest(guest));
            let conn = ConnPlan { client, server, v6: false, opens_at, workload, reuse: None };
            plan.conns.push(conn);
        }
        plan.give_up_at = plan.give_up_at + Duration::from_secs(120);
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::run_seeds;

    #[test]
    fn acc_06_connections_that_the_host_accepts_are_like_others() {
        let totals = run_seeds(0..12, Plan::with_accept, 2, false);
        println!("{totals:#?}");
        assert!(totals.failures.is_empty(), "{:#?}", totals.failures);
        let (answered, accepted) = (totals.weight.answered, totals.weight.accepted);
        assert!(answered > 50 && accepted > answered * 8 / 10, "{accepted} of {answered}");
    }
}
