//! Extras of few seeds. They draw from streams of their own, so the rest of a seed stays as it is.

use nightporter_core::time::{Duration, Instant};

use crate::plan::{ConnPlan, Machine, Plan, Reuse, StackKind, StackPlan, Workload};
use crate::random::Random;

impl Plan {
    /// See the module doc.
    pub(super) fn add_rare(&mut self, carriers: &[ConnPlan], v6_percent: u32, span_ms: u64) {
        self.add_late_carrier(carriers, span_ms);
        self.add_extension_headers(v6_percent);
        self.add_successors(v6_percent, span_ms);
        self.draw_steps();
        self.draw_clocks();
    }

    /// Clocks of microseconds, and remotes that leave their timestamps out at times.
    fn draw_clocks(&mut self) {
        let mut random = Random::new(self.seed, "clocks");
        let omits = random.percent(6);
        let guests = self.guests.iter_mut().map(|g| &mut g.stack);
        for stack in guests.chain(self.remotes.iter_mut().map(|r| &mut r.stack)) {
            if stack.kind == StackKind::Strict {
                stack.quirks.clock_us = random.percent(8);
                stack.quirks.omits_clock = omits;
            }
        }
    }

    /// Commands for all connections of a guest take one or a few at once: frames of others come
    /// between, and promises are made.
    fn draw_steps(&mut self) {
        let mut random = Random::new(self.seed, "steps");
        if random.percent(40) {
            self.host.flows_per_step = random.pick(&[1, 1, 2, 5]);
        }
    }

    /// One more connection that carries weight, after all faults are over, where there is none.
    fn add_late_carrier(&mut self, carriers: &[ConnPlan], span_ms: u64) {
        let mut random = Random::new(self.seed, "late carrier");
        let has_one = self.conns.iter().any(|c| c.opens_at > Instant::from_millis(span_ms));
        let Some(carrier) = carriers.first().filter(|_| !has_one && random.percent(75)) else {
            return;
        };
        let opens_at = self.heal_at + Duration::from_millis(100);
        self.conns.push(ConnPlan { opens_at, ..carrier.clone() });
    }

    /// Machines that put a header of IPv6 before TCP's; smoltcp knows none.
    fn add_extension_headers(&mut self, v6_percent: u32) {
        let mut random = Random::new(self.seed, "extension headers");
        let guests = self.guests.iter_mut().map(|g| &mut g.stack);
        let all = guests.chain(self.remotes.iter_mut().map(|r| &mut r.stack));
        let mut stacks: Vec<&mut StackPlan> = all.collect();
        let all_strict = stacks.iter().all(|stack| stack.kind == StackKind::Strict);
        if all_strict && v6_percent > 0 && random.percent(25) {
            for stack in &mut stacks {
                stack.quirks.extension_header |= random.percent(50);
            }
        }
    }

    /// Connections that follow each other on the same ports: after a close, of whichever end first,
    /// after a reset, and after a reboot of which the other end knows nothing.
    fn add_successors(&mut self, v6_percent: u32, span_ms: u64) {
        /// More than any of them writes: each begins above the one before (RFC 6191).
        const STEP: u32 = 0x1357_9bdf;
        let mut random = Random::new(self.seed, "successors");
        if !random.percent(12) {
            return;
        }
        let mut index = |len: usize| u16::try_from(random.below(len as u64)).unwrap_or(0);
        let (guest, remote) = (index(self.guests.len()), index(self.remotes.len()));
        let kinds = [
            self.guests[usize::from(guest)].stack.kind,
            self.remotes[usize::from(remote)].stack.kind,
        ];
        let machines = [Machine::Guest(guest), Machine::Remote(remote)];
        let first = usize::from(random.percent(70));
        if kinds[first] != StackKind::Strict || kinds[1 - first] == StackKind::Hostile {
            return;
        }
        let workloads = [
            Workload::Bulk { up: 100_000, down: 0 },
            Workload::Bulk { up: 0, down: 100_000 },
            Workload::HalfClose { up: 30_000, down: 30_000 },
            Workload::RequestResponse { request: 10_000, response: 10_000, count: 5 },
            Workload::Reset { up: 30_000 },
        ];
        let isn: u32 = random.pick(&[0, 0x6fff_fff0, 0xefff_fff0]);
        let v6 = random.percent(v6_percent);
        let opens_at = Instant::from_micros(random.below(span_ms * 500));
        for n in 0..u32::try_from(random.within(2, 6)).unwrap_or(2) {
            let isn = Some(isn.wrapping_add(STEP.wrapping_mul(n)));
            self.conns.push(ConnPlan {
                client: machines[first],
                server: machines[1 - first],
                v6,
                opens_at,
                workload: random.pick(&workloads),
                reuse: Some(Reuse { port: 7, isn }),
            });
        }
    }
}

impl super::Swarm {
    /// Milliseconds have gone half way round 2^32 after 24.9 days.
    pub(super) fn sleep_s(&self) -> u32 {
        Random::new(self.seed, "sleep").pick(&[1_000_000, 2_200_000, 3_000_000])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::FaultKind;
    use crate::swarm::floods::DAY_S;

    fn seeds_with(world: impl Fn(&Plan) -> bool) -> usize {
        (0..500).filter(|&seed| world(&Plan::from_seed(seed))).count()
    }

    #[test]
    fn five_hundred_seeds_have_every_world_a_few_times() {
        let sleeps =
            |c: &ConnPlan| matches!(c.workload, Workload::Idle { idle_s } if idle_s > 24 * DAY_S);
        let far = |plan: &Plan| {
            let rtt_us = |r: &crate::plan::RemotePlan| r.to_host.delay_us + r.from_host.delay_us;
            plan.remotes.iter().any(|r| rtt_us(r) >= 200_000)
        };
        let extended = |plan: &Plan| {
            let has_it = |stack: &StackPlan| stack.quirks.extension_header;
            let remote = plan.remotes.iter().any(|r| has_it(&r.stack));
            remote && plan.conns.iter().any(|c| c.v6)
        };
        let mixed = |plan: &Plan| {
            let some =
                |g: &crate::plan::GuestPlan| g.offloads.csum && g.offloads.tso4 != g.offloads.tso6;
            plan.guests.iter().any(some)
        };
        let told = |kind: FaultKind| {
            use FaultKind::{Destroy, Drain, DriverReset, Migrate, OffloadOff, Reboot};
            let (Destroy { guest }
            | Drain { guest }
            | DriverReset { guest }
            | Migrate { guest }
            | OffloadOff { guest }
            | Reboot { guest }) = kind
            else {
                return None;
            };
            Some(Machine::Guest(guest))
        };
        let in_steps = |p: &Plan| {
            let of = |guest| p.conns.iter().filter(move |c| [c.client, c.server].contains(&guest));
            let many = |guest| of(guest).count() > 2 * p.host.flows_per_step as usize;
            p.faults.iter().any(|f| told(f.kind).is_some_and(many))
        };
        let of_remote = |is: fn(&StackPlan) -> bool| {
            move |p: &Plan| p.remotes.iter().any(|r| r.stack.timestamps && is(&r.stack))
        };
        let worlds: [(&str, usize); 10] = [
            ("clocks of microseconds", seeds_with(of_remote(|s| s.quirks.clock_us))),
            ("timestamps left out", seeds_with(of_remote(|s| s.quirks.omits_clock))),
            ("what happens to many connections in steps", seeds_with(in_steps)),
            ("ports used again", seeds_with(|p| p.conns.iter().any(|c| c.reuse.is_some()))),
            ("a sleep of more than 24 days", seeds_with(|p| p.conns.iter().any(sleeps))),
            ("a round trip of 200 ms", seeds_with(far)),
            ("an extension header", seeds_with(extended)),
            ("mixed offloads", seeds_with(mixed)),
            ("a VLAN", seeds_with(|p| p.vlan.is_some())),
            ("GRO", seeds_with(|p| p.host.merges)),
        ];
        let rare: Vec<_> = worlds.iter().filter(|(_, seeds)| *seeds < 5).collect();
        assert!(rare.is_empty(), "{rare:?}");
    }
}
