//! Seeds with a guest behind a tap of its own, whose daemon is away now and then, or dies
//! (LIFE-17). Machines alone judge them: frames that pass the daemon pass the rules as well.

use nightporter_core::time::{Duration, Instant};

use crate::plan::{
    ConnPlan, Fault, FaultKind, Floods, Machine, Offloads, Plan, Quirks, StackKind, Workload,
};
use crate::random::Random;

/// The longest fault besides absences.
const FAULT_MAX: Duration = Duration::from_secs(5);
/// Connections of a seed.
const CONNS_MAX: usize = 12;

impl Plan {
    /// The world of a seed, with one guest, one remote, and a wire between them.
    #[must_use]
    pub fn with_tap(seed: u64) -> Self {
        let mut plan = Self::from_seed(seed);
        let mut random = Random::new(seed, "tap");
        plan.guests.truncate(1);
        plan.remotes.truncate(1);
        plan.vlan = None;
        (plan.host.wire, plan.host.core) = (true, None);
        let (guest, remote) = (&mut plan.guests[0], &mut plan.remotes[0]);
        (guest.ack_offload, guest.congestion_offload, guest.forwards) = (true, false, None);
        (guest.offloads, guest.core) = (Offloads::ALL, 0);
        guest.ring_slots = guest.ring_slots.max(16);
        for stack in [&mut guest.stack, &mut remote.stack] {
            let clock_first = stack.quirks.clock_first;
            stack.quirks = Quirks { clock_first, floods: Floods::No, ..Quirks::default() };
            stack.syn_options.clear();
            if stack.kind == StackKind::Hostile {
                stack.kind = StackKind::Strict;
            }
        }
        if guest.stack.kind == StackKind::Smoltcp {
            remote.stack.kind = StackKind::Strict; // two of them may deadlock
        }
        // smoltcp repeats a whole window at once, and backs off to a minute if that is lost.
        for link in [&mut remote.to_host, &mut remote.from_host] {
            link.queue_frames = link.queue_frames.max(100);
        }
        plan.host.uplink_queue_frames = plan.host.uplink_queue_frames.max(1000);
        plan.conns.retain(|conn| !matches!(conn.workload, Workload::Idle { .. }));
        plan.conns.truncate(CONNS_MAX);
        plan.conns.iter_mut().for_each(between);
        plan.faults.retain(|fault| is_usable(fault.kind));
        plan.faults.truncate(4);
        // No end is to give the other up.
        plan.faults.iter_mut().for_each(|fault| fault.lasts = fault.lasts.min(FAULT_MAX));
        plan.add_absences(&mut random);
        plan
    }

    fn add_absences(&mut self, random: &mut Random) {
        let heal_us = (self.heal_at.as_nanos() / 1000).max(2);
        let dies = random.percent(30);
        for _ in 0..random.within(1, 6) {
            let at_us = if self.conns.is_empty() || random.percent(40) {
                random.below(heal_us)
            } else {
                let opens_us = random.pick(&self.conns).opens_at.as_nanos() / 1000;
                let within_us = random.pick(&[2_000, 20_000, 200_000]);
                (opens_us + random.below(within_us)).min(heal_us - 1)
            };
            let lasts = random.pick(&[1_000, 5_000, 50_000, 500_000]);
            let lasts = Duration::from_micros(random.within(lasts / 2, lasts));
            let kind = if dies && random.percent(50) {
                let step = u32::try_from(random.below(50)).unwrap_or(0);
                FaultKind::Crash { arena: true, step }
            } else {
                FaultKind::Away { plain_after_us: random.pick(&[200, 3_000, 100_000]) }
            };
            self.faults.push(Fault { at: Instant::from_micros(at_us), lasts, kind });
        }
        if random.percent(15) {
            let at = Instant::from_micros(random.below(heal_us));
            let kind = FaultKind::Reboot { guest: 0 };
            self.faults.push(Fault { at, lasts: Duration::ZERO, kind });
        }
        self.faults.sort_by_key(|fault| fault.at);
    }
}

/// Of the guest and the remote, as near to what it was as can be.
fn between(conn: &mut ConnPlan) {
    let is_guest = matches!(conn.client, Machine::Guest(_));
    let ends = [Machine::Guest(0), Machine::Remote(0)];
    let [client, server] = if is_guest { ends } else { [ends[1], ends[0]] };
    (conn.client, conn.server) = (client, server);
}

/// Of the two, and nothing for which a tap has no counterpart.
fn is_usable(kind: FaultKind) -> bool {
    let [first, _] = kind.machines();
    let here = [Machine::Guest(0), Machine::Remote(0)];
    let is_here = first.is_some_and(|machine| here.contains(&machine));
    let usable = matches!(
        kind,
        FaultKind::Pause { .. } | FaultKind::StopReading { .. } | FaultKind::DropDelivered { .. }
    );
    is_here && (usable || kind.link().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::run_seeds;

    #[test]
    fn life_17_no_byte_is_lost_or_wrong_and_nothing_hangs_while_the_daemon_is_away() {
        let totals = run_seeds(0..25, Plan::with_tap, 2, false);
        println!("{totals:#?}");
        assert!(totals.failures.is_empty(), "{:#?}", totals.failures);
        let of = |kind: &str| totals.faults.get(kind).copied().unwrap_or(0);
        assert!(of("frames that passed plain") > 500 && of("daemon crashes") > 3);
        assert!(totals.closed > 5 * totals.reset, "{} {}", totals.closed, totals.reset);
    }
}
