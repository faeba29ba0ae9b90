//! Seeds with congestion offload: VMs for which the host sends, guests that hand over all their
//! data at once, paths with a bottleneck, and remotes that try to make the host send too fast. It
//! draws from streams of its own, so seeds without congestion offload stay as they are.

use nightporter_core::limits::PAGE;
use nightporter_core::time::{Duration, Instant};

use crate::plan::{
    ConnPlan, Fault, FaultKind, Floods, LinkPlan, Machine, Offloads, Plan, Quirks, RemotePlan,
    StackKind, StackPlan, Workload,
};
use crate::random::Random;
use crate::swarm::PATIENCE;

pub(super) const DAY_S: u32 = 24 * 3600;

/// So many of a hundred seeds have it.
const PERCENT: u32 = 30;

/// A path is not cut for longer, or who opens a connection meanwhile gives up (seeds 56578, 82619).
const CUT_MAX: Duration = Duration::from_secs(10);

impl Plan {
    /// See the module doc.
    #[must_use]
    pub(super) fn with_floods(mut self) -> Self {
        let mut random = Random::new(self.seed, "floods");
        if !random.percent(PERCENT) {
            return self;
        }
        let fits = |g: &crate::plan::GuestPlan| {
            g.stack.kind == StackKind::Strict && g.stack.syn_options.is_empty() && g.ack_offload
        };
        let chosen = self.guests.iter().position(fits);
        for g in &mut self.guests {
            g.congestion_offload = random.percent(60);
        }
        if let Some(chosen) = chosen.and_then(|g| u16::try_from(g).ok()) {
            self.let_flood(&mut random, chosen);
            let remote = self.behind_a_bottleneck(&mut random);
            self.downloads(&mut random, chosen, remote);
            self.spoil(&mut random, chosen, remote);
        }
        let pages = self.guests.iter().map(|g| g.budget_bytes / PAGE as u64).sum::<u64>();
        self.host.arena_pages = usize::try_from(pages).unwrap_or(0) + 8;
        self
    }

    /// The guest hands over what it has.
    fn let_flood(&mut self, random: &mut Random, guest: u16) {
        let g = &mut self.guests[usize::from(guest)];
        (g.congestion_offload, g.new_reno) = (true, random.percent(30));
        g.flows_max = g.flows_max.max(16);
        g.budget_bytes = g.budget_bytes.max(random.pick(&[24, 64, 512]) * PAGE as u64);
        g.stack.quirks.floods =
            random.pick(&[Floods::No, Floods::Route, Floods::Route, Floods::Always]);
        g.stack.send_bytes = g.stack.send_bytes.max(random.pick(&[300_000, 1 << 20, 4 << 20]));
    }

    /// A remote whose path is narrow in one place, with a queue before it.
    fn behind_a_bottleneck(&mut self, random: &mut Random) -> u16 {
        let delay_us = random.pick(&[50, 1_000, 5_000, 30_000]);
        let link = LinkPlan { rate_bps: 1_000_000_000, delay_us, queue_frames: 1000, mtu: 1500 };
        let from_host = LinkPlan {
            rate_bps: random.pick(&[5_000_000, 20_000_000, 100_000_000, 1_000_000_000]),
            queue_frames: random.pick(&[10, 30, 100, 400]),
            ..link
        };
        // A remote that has acknowledged lost bytes may get the same again as long as the world
        // lasts.
        let lasts =
            |c: &ConnPlan| matches!(c.workload, Workload::Idle { idle_s } if idle_s > DAY_S);
        let days = self.conns.iter().any(lasts);
        let quirks = Quirks {
            splits_acks: random.percent(15),
            acks_ahead: random.percent(15) && !days,
            reneges: random.percent(15),
            ..Quirks::default()
        };
        let stack = StackPlan {
            kind: StackKind::Strict,
            receive_bytes: random.pick(&[65_535, 400_000, 6 << 20, 6 << 20]),
            send_bytes: 300_000,
            window_scale: random.percent(90).then_some(7),
            timestamps: random.percent(80),
            sack: random.percent(80),
            ecn: random.percent(40),
            mss: None,
            isn: None,
            syn_options: Vec::new(),
            first_segments: None,
            quirks,
        };
        if quirks.reneges && from_host.queue_frames == 10 {
            // It has thrown away what it held when the guest comes to its timeout, which is a
            // minute behind a pause; and a burst leaves ten frames (seed 59190).
            self.give_up_at = self.give_up_at + PATIENCE;
        }
        let offloads = if random.percent(20) { Offloads::ALL } else { Offloads::NONE };
        self.remotes.push(RemotePlan { to_host: link, from_host, stack, offloads, shares: None });
        u16::try_from(self.remotes.len() - 1).unwrap_or(0)
    }

    /// The guest's downloads: alone, both ways at once, in answers, and with a FIN far ahead of the
    /// bytes that have left; some after all faults.
    fn downloads(&mut self, random: &mut Random, guest: u16, remote: u16) {
        let (g, r) = (Machine::Guest(guest), Machine::Remote(remote));
        let healed = self.heal_at + Duration::from_millis(100);
        let early_us = self.heal_at.as_nanos() / 1000;
        for n in 0..random.pick(&[2, 2, 3, 5]) {
            let bytes = random.pick(&[100_000, 400_000, 1_500_000, 1_500_000]);
            let workloads = [
                (r, g, Workload::Bulk { up: 0, down: bytes }),
                (r, g, Workload::Bulk { up: 1_000_000, down: bytes }),
                (g, r, Workload::Bulk { up: bytes, down: 0 }),
                (g, r, Workload::HalfClose { up: bytes, down: 200_000 }),
                (r, g, Workload::RequestResponse { request: 100, response: bytes / 8, count: 8 }),
            ];
            let (client, server, workload) = random.pick(&workloads);
            let opens_at =
                if n == 0 { healed } else { Instant::from_micros(random.below(early_us / 2)) };
            let v6 = random.percent(30);
            self.conns.push(ConnPlan { client, server, v6, opens_at, workload, reuse: None });
        }
    }

    /// Losses, marks and the like on the way to the remote and of its ACKs, and an operator who
    /// turns it off and on, as long as things go wrong.
    fn spoil(&mut self, random: &mut Random, guest: u16, remote: u16) {
        let ppm = random.pick(&[1_000, 10_000, 50_000]);
        let few = random.pick(&[1_000, 10_000]);
        let machine = Machine::Remote(remote);
        let kinds = [
            (30, FaultKind::Loss { remote, to_host: false, ppm }),
            (15, FaultKind::BurstLoss { remote, to_host: false, ppm: few, burst_frames: 8 }),
            (15, FaultKind::Loss { remote, to_host: true, ppm }),
            (15, FaultKind::Reorder { remote, to_host: false, ppm, delay_us: 2_000 }),
            (10, FaultKind::Duplicate { remote, to_host: false, ppm, delay_us: 500 }),
            (30, FaultKind::Mark { remote, to_host: false, ppm: few }),
            (10, FaultKind::Rate { remote, to_host: false, rate_bps: 2_000_000 }),
            (10, FaultKind::Cut { remote, to_host: false }),
            (10, FaultKind::ShrinkWindow { machine }),
            (15, FaultKind::FloodsOff { guest }),
        ];
        let span_us = self.heal_at.as_nanos() / 1000;
        for (percent, kind) in kinds {
            if random.percent(percent) {
                let at_us = random.below(span_us / 2);
                let lasts = Duration::from_micros(random.within(1_000, span_us - at_us));
                let cut = matches!(kind, FaultKind::Cut { .. });
                let lasts = if cut { lasts.min(CUT_MAX) } else { lasts };
                self.faults.push(Fault { at: Instant::from_micros(at_us), lasts, kind });
            }
        }
        self.faults.sort_by_key(|f| f.at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seeds_with(world: impl Fn(&Plan) -> bool) -> usize {
        (0..500).filter(|&seed| world(&Plan::from_seed(seed))).count()
    }

    #[test]
    fn a_quarter_to_a_third_of_five_hundred_seeds_have_congestion_offload() {
        let seeds = seeds_with(|p| p.guests.iter().any(|g| g.congestion_offload));
        assert!((125..=167).contains(&seeds), "{seeds}");
    }

    #[test]
    fn five_hundred_seeds_have_every_kind_of_flood_and_of_remote_a_few_times() {
        let guest = |is_it: fn(Floods) -> bool| {
            move |p: &Plan| {
                p.guests.iter().any(|g| g.congestion_offload && is_it(g.stack.quirks.floods))
            }
        };
        let remote = |is_it: fn(&Quirks) -> bool| {
            move |p: &Plan| p.remotes.iter().any(|r| is_it(&r.stack.quirks))
        };
        let worlds = [
            seeds_with(guest(|floods| floods == Floods::No)),
            seeds_with(guest(|floods| floods == Floods::Route)),
            seeds_with(guest(|floods| floods == Floods::Always)),
            seeds_with(remote(|quirks| quirks.splits_acks)),
            seeds_with(remote(|quirks| quirks.acks_ahead)),
            seeds_with(remote(|quirks| quirks.reneges)),
            seeds_with(|p| p.guests.iter().any(|g| g.new_reno)),
        ];
        assert!(worlds.iter().all(|seeds| *seeds >= 5), "{worlds:?}");
    }
}
