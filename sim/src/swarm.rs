//! From a seed to a plan: swarm testing.
//!
//! Every seed first switches whole classes of faults and features off or on, then draws from the
//! rest (Groce et al., "Swarm testing", ISSTA 2012). So two features that mask each other are
//! rarely both there, and rare combinations are.

mod accept;
mod behind;
mod floods;
mod late_ack;
mod later;
mod rare;
mod taps;

use nightporter_core::limits::PAGE;
use nightporter_core::time::{Duration, Instant};

use crate::plan::{
    ConnPlan, CorePlan, Fault, FaultKind, GuestPlan, HostPlan, LinkPlan, Machine, Offloads, Plan,
    Policy, Quirks, RemotePlan, StackKind, StackPlan, Workload,
};
use crate::random::Random;

/// From healing, and the longest silence, to the last look: a guest that refuses is given two
/// minutes (SNOOP-32), a dead end is noticed after two and a half.
const PATIENCE: Duration = Duration::from_secs(900);
/// With smoltcp: it backs off to a minute and repairs one hole in each; many of those may follow
/// each other. The more if each of its bursts, of 30 segments, meets an uplink's queue of 20: then
/// 6 MB take four hours (seed 26554).
const PATIENCE_SMOLTCP: Duration = Duration::from_secs(7200);
const PATIENCE_NARROW: Duration = Duration::from_secs(3 * 7200);

impl Plan {
    /// The plan of a seed. The same on every machine, for ever, as long as this file is.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut random = Random::new(seed, "swarm");
        let ecn_percent = random.pick(&[0, 30, 100, 100]);
        let v6_percent = random.pick(&[0, 0, 50, 100]);
        let mtu = random.pick(&[1500, 1500, 1500, 1500, 9000, 1280, 576]);
        // IPv6 asks for 1280 bytes at least (RFC 8200 section 5).
        let mtu = if v6_percent > 0 { mtu.max(1280) } else { mtu };
        let far = random.percent(15);
        Swarm { random, seed, ecn_percent, v6_percent, mtu, far }.plan()
    }

    /// The same world with the offload off in every guest: a product that does nothing.
    #[must_use]
    pub fn without_offload(seed: u64) -> Self {
        let mut plan = Self::from_seed(seed);
        for guest in &mut plan.guests {
            (guest.ack_offload, guest.congestion_offload) = (false, false);
        }
        // When these are over the offload is on.
        plan.faults.retain(|fault| !fault.kind.turns_off());
        plan
    }
}

struct Swarm {
    random: Random,
    seed: u64,
    /// How many of the machines speak ECN.
    ecn_percent: u32,
    /// How many of the connections use IPv6.
    v6_percent: u32,
    /// Of most machines.
    mtu: u16,
    /// Round trips are long.
    far: bool,
}

impl Swarm {
    fn plan(mut self) -> Plan {
        let kinds = self.stack_kinds();
        let guests_max = self.random.pick(&[1, 1, 2, 3, 4]);
        let mut guests = Vec::new();
        for _ in 0..guests_max {
            guests.push(self.guest(&kinds));
        }
        let mut remotes = Vec::new();
        for _ in 0..self.random.pick(&[1, 1, 1, 2, 3]) {
            remotes.push(self.remote(&kinds));
        }
        let policy = self.policy();
        let span_ms = self.random.pick(&[200, 800, 2_000, 5_000]);
        let mut conns = self.carriers(&mut guests, &mut remotes, span_ms);
        let pages = guests.iter().map(|g| g.budget_bytes / PAGE as u64).sum::<u64>();
        let host = HostPlan {
            arena_pages: usize::try_from(pages).unwrap_or(0) + 8,
            arena_records: if self.random.percent(6) { 4 } else { 256 },
            flows_max: 1024,
            turn_frames: self.random.pick(&[1, 8, 64, 64]),
            turn_ns: self.random.pick(&[500, 2_000, 100_000]),
            frame_ns: self.random.pick(&[200, 500, 5_000]),
            core: self.random.percent(15).then_some(0),
            uplink_queue_frames: self.random.pick(&[20, 1000, 1000]),
            uplink_wait_us: self.random.pick(&[0, 0, 20, 100]),
            merges: self.random.percent(60),
            backlog_frames: crate::plan::backlog_frames(),
            flows_per_step: crate::plan::flows_per_step(),
            wire: false,
        };
        let early = |c: &&ConnPlan| c.opens_at < Instant::from_millis(span_ms);
        let carriers: Vec<ConnPlan> = conns.iter().filter(early).cloned().collect();
        conns.extend(self.conns(&guests, &remotes, span_ms));
        conns.extend(self.background(&guests, &remotes, span_ms));
        let faults = self.faults(&guests, &remotes, &carriers, span_ms);
        let (seed, heal_at) = (self.seed, Instant::from_millis(span_ms));
        let idles_s = |c: &ConnPlan| match c.workload {
            Workload::Idle { idle_s } => idle_s,
            _ => 0,
        };
        let stacks = guests.iter().map(|g| &g.stack).chain(remotes.iter().map(|r| &r.stack));
        let smoltcp = stacks.into_iter().any(|s| s.kind == StackKind::Smoltcp);
        let patience = match smoltcp {
            true if host.uplink_queue_frames < 100 => PATIENCE_NARROW,
            true => PATIENCE_SMOLTCP,
            false => PATIENCE,
        };
        let longest = Duration::from_secs(conns.iter().map(idles_s).max().unwrap_or(0).into());
        let (cores, give_up_at) = (vec![CorePlan { policy }], heal_at + longest + patience);
        let vlan = self.random.percent(10).then(|| self.random.pick(&[1, 100, 4094]));
        let mut plan =
            Plan { seed, host, cores, guests, remotes, vlan, conns, faults, heal_at, give_up_at };
        if self.random.percent(8) {
            self.absence(&mut plan, span_ms);
        }
        plan.add_rare(&carriers, self.v6_percent, span_ms);
        plan.with_later().with_floods().with_late_ack().with_forwards()
    }

    /// Connections that carry weight, in nearly all seeds: where no megabytes of R's cross a flow
    /// with offload there is little to get wrong.
    fn carriers(
        &mut self,
        guests: &mut [GuestPlan],
        remotes: &mut [RemotePlan],
        span_ms: u64,
    ) -> Vec<ConnPlan> {
        if self.random.percent(1) {
            return Vec::new();
        }
        let (guest, remote) = (self.index(guests.len()), self.index(remotes.len()));
        let (g, r) = (&mut guests[usize::from(guest)], &mut remotes[usize::from(remote)]);
        for stack in [&mut g.stack, &mut r.stack] {
            stack.syn_options.clear();
            if stack.kind == StackKind::Hostile {
                stack.kind = StackKind::Strict;
            }
        }
        (g.ack_offload, g.flows_max) = (true, g.flows_max.max(16));
        if self.random.percent(98) {
            g.budget_bytes = g.budget_bytes.max(24 * PAGE as u64);
        }
        if g.stack.kind == StackKind::Smoltcp && r.stack.kind == StackKind::Smoltcp {
            r.stack.kind = StackKind::Strict; // two of them may deadlock
        }
        // It repeats a whole window after a timeout: a queue of ten frames loses most of it each
        // time, and the next timeout is a minute.
        for (stack, link) in [(&r.stack, &mut r.to_host), (&g.stack, &mut r.from_host)] {
            if stack.kind == StackKind::Smoltcp {
                link.queue_frames = link.queue_frames.max(100);
            }
        }
        let smoltcp = [&g.stack, &r.stack].iter().any(|s| s.kind == StackKind::Smoltcp);
        let asks = g.stack.kind == StackKind::Smoltcp;
        let (guest, remote) = (Machine::Guest(guest), Machine::Remote(remote));
        let late = u64::from(self.random.percent(60));
        (0..self.random.pick(&[1, 1, 2, 3]) + late)
            .map(|n| {
                let bytes = self.random.pick(&[1_200_000, 1_600_000, 2_500_000, 6_000_000]);
                let back = if smoltcp { 0 } else { self.random.pick(&[0, 0, 30_000, 1_000_000]) };
                let (client, server, workload) = if self.random.percent(30) {
                    let workload = if asks {
                        // With nothing to write its third ACK would be its FIN, and no offload.
                        Workload::RequestResponse { request: 100, response: bytes, count: 1 }
                    } else {
                        Workload::Bulk { up: back, down: bytes }
                    };
                    (guest, remote, workload)
                } else if self.random.percent(30) {
                    (remote, guest, Workload::HalfClose { up: bytes, down: back })
                } else {
                    (remote, guest, Workload::Bulk { up: bytes, down: back })
                };
                ConnPlan {
                    client,
                    server,
                    v6: self.random.percent(self.v6_percent),
                    opens_at: if n < late {
                        // All must be as before when the faults are over.
                        Instant::from_millis(span_ms + 100)
                    } else {
                        Instant::from_micros(self.random.below(span_ms * 400))
                    },
                    workload,
                    reuse: None,
                }
            })
            .collect()
    }

    /// A guest that is away for longer than `T_alive`, `T_paused` and what SNOOP-32 allows; or one
    /// that runs, and takes nothing.
    fn absence(&mut self, plan: &mut Plan, span_ms: u64) {
        let at = Instant::from_micros(self.random.below(span_ms * 500));
        let lasts = Duration::from_secs(self.random.pick(&[30, 80, 140, 300]));
        plan.heal_at = plan.heal_at.max(at + lasts);
        plan.give_up_at = plan.give_up_at + lasts;
        let guest = self.index(plan.guests.len());
        let kind = if self.random.percent(75) {
            FaultKind::Pause { guest }
        } else {
            FaultKind::DropDelivered { guest, ppm: 1_000_000 }
        };
        plan.faults.push(Fault { at, lasts, kind });
        if self.random.percent(30) {
            // Its remote has had enough of it (SNOOP-15, T_rst).
            let at = at + Duration::from_millis(self.random.within(1, 10_000));
            let kind = FaultKind::Kill { guest };
            plan.faults.push(Fault { at, lasts: Duration::ZERO, kind });
        }
        if self.random.percent(50) {
            // More than may be held for it: its remote meets a shut window, and probes it.
            let up = plan.guests[usize::from(guest)].budget_bytes.min(1 << 20) * 2;
            plan.conns.push(ConnPlan {
                client: Machine::Remote(self.index(plan.remotes.len())),
                server: Machine::Guest(guest),
                v6: false,
                opens_at: Instant::from_nanos(at.as_nanos() / 2),
                workload: Workload::Bulk { up, down: 0 },
                reuse: None,
            });
        }
    }

    fn stack_kinds(&mut self) -> Vec<StackKind> {
        use StackKind::{Hostile, Smoltcp, Strict};
        let choices: &[&[StackKind]] = &[
            &[Smoltcp, Smoltcp, Strict],
            &[Strict],
            &[Smoltcp, Strict],
            &[Strict, Strict, Strict, Hostile],
            &[Smoltcp, Strict, Strict, Hostile],
        ];
        self.random.pick(choices).to_vec()
    }

    fn policy(&mut self) -> Policy {
        let slice_us = self.random.pick(&[1_000, 10_000, 30_000, 30_000]);
        match self.random.below(6) {
            0 => Policy::Dedicated,
            1 => Policy::Credit { slice_us, boost: self.random.percent(50) },
            2 | 3 => Policy::RoundRobin { slice_us },
            4 => Policy::Fair { slice_us: 3_000 },
            _ => Policy::Quota {
                quota_us: self.random.pick(&[10_000, 30_000]),
                period_us: self.random.pick(&[50_000, 100_000, 300_000]),
            },
        }
    }

    fn guest(&mut self, kinds: &[StackKind]) -> GuestPlan {
        let budget_pages = self.random.pick(&[3, 8, 24, 128, 512, 2048]);
        let mtu = self.mtu();
        // A frame takes several buffers of a small ring.
        let slots_min = if mtu > 4000 { 16 } else { 2 };
        GuestPlan {
            core: 0,
            weight: self.random.pick(&[256, 256, 64, 512]),
            load_percent: self.random.pick(&[0, 0, 30, 60, 100]),
            ring_slots: self.random.pick(&[2, 16, 256, 256, 1024]).max(slots_min),
            offloads: self.offloads(),
            mtu,
            budget_bytes: budget_pages * PAGE as u64,
            flows_max: self.random.pick(&[3, 16, 256, 256]),
            ack_offload: self.random.percent(95),
            congestion_offload: false,
            new_reno: false,
            accepts: crate::plan::Accepts::No,
            frame_ns: self.random.pick(&[500, 2_000, 20_000]),
            forwards: None,
            stack: self.stack(kinds, mtu),
        }
    }

    fn remote(&mut self, kinds: &[StackKind]) -> RemotePlan {
        let shares = self.random.percent(10).then(|| (self.policy(), 60, 2));
        let mtu = self.mtu();
        let mut stack = self.stack(kinds, mtu);
        stack.quirks.syn_cookies = false; // only a guest's answers can be told apart
        RemotePlan {
            to_host: self.link(mtu),
            from_host: self.link(mtu),
            stack,
            offloads: if self.random.percent(30) { Offloads::ALL } else { Offloads::NONE },
            shares,
        }
    }

    fn mtu(&mut self) -> u16 {
        if self.random.percent(80) { self.mtu } else { self.random.pick(&[1500, 1500, 9000, 1280]) }
    }

    /// All, none, or the choice of some driver.
    fn offloads(&mut self) -> Offloads {
        match self.random.below(10) {
            0..5 => Offloads::ALL,
            5..7 => Offloads::NONE,
            _ => {
                let [tso4, tso6, ecn] = [60, 50, 50].map(|percent| self.random.percent(percent));
                Offloads { csum: true, tso4, tso6, ecn: ecn && (tso4 || tso6) }
            }
        }
    }

    fn link(&mut self, mtu: u16) -> LinkPlan {
        let delays: &[u32] =
            if self.far { &[20_000, 50_000, 100_000] } else { &[20, 50, 50, 1_000, 20_000] };
        LinkPlan {
            rate_bps: self.random.pick(&[1_000_000_000, 1_000_000_000, 10_000_000_000, 50_000_000]),
            delay_us: self.random.pick(delays),
            queue_frames: self.random.pick(&[10, 100, 1000]),
            mtu,
        }
    }

    fn stack(&mut self, kinds: &[StackKind], mtu: u16) -> StackPlan {
        let isns = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_0000, 0xffff_fff0, 0xffff_ffff];
        let odd: [&[u8]; 5] = [
            &[19, 18, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
            &[30, 12, 0, 0x81, 1, 2, 3, 4, 5, 6, 7, 8],
            &[29, 4, 1, 1],
            &[253, 4, 0x12, 0x34],
            &[34, 2],
        ];
        // The default of tcp_rmem, and values of operators of fast paths.
        let receive = [2_000, 16_000, 65_535, 65_535, 400_000, 6 << 20, 32 << 20];
        let mss = self.random.percent(20).then(|| self.random.pick(&[536, 900, 1400]));
        StackPlan {
            kind: self.random.pick(kinds),
            receive_bytes: self.random.pick(&receive),
            send_bytes: self.random.pick(&[16_000, 65_535, 300_000, 4 << 20]),
            window_scale: self.random.percent(85).then(|| self.random.pick(&[0, 2, 7, 7, 14])),
            timestamps: self.random.percent(75),
            sack: self.random.percent(75),
            ecn: self.random.percent(self.ecn_percent),
            mss: mss.map(|mss: u16| mss.min(mtu - 60)),
            isn: self.random.percent(60).then(|| self.random.pick(&isns)),
            syn_options: if self.random.percent(6) {
                self.random.pick(&odd).to_vec()
            } else {
                Vec::new()
            },
            first_segments: None,
            quirks: self.quirks(kinds),
        }
    }

    fn quirks(&mut self, kinds: &[StackKind]) -> Quirks {
        // In the middle of its range, about to wrap, and 0, which is no clock to some.
        let clocks = [0, 1, 0x7fff_ff00, 0x8000_0000, 0xffff_ff00, 0xffff_ffff];
        let all_strict = kinds.iter().all(|kind| *kind == StackKind::Strict);
        Quirks {
            clock_first: self.random.percent(30).then(|| self.random.pick(&clocks)),
            syn_cookies: self.random.percent(15),
            extension_header: all_strict && self.random.percent(10),
            ..Quirks::default()
        }
    }

    /// Background traffic: idle connections by the dozen, health checks by the hundred, a
    /// connection that sleeps for days.
    fn background(
        &mut self,
        guests: &[GuestPlan],
        remotes: &[RemotePlan],
        span_ms: u64,
    ) -> Vec<ConnPlan> {
        let (count, workload) = match self.random.below(100) {
            0..7 => (self.random.within(16, 40), Workload::Idle { idle_s: 400 }),
            7..14 => (self.random.within(50, 250), Workload::Reset { up: 100 }),
            14..18 => (1, Workload::Idle { idle_s: self.sleep_s() }),
            _ => return Vec::new(),
        };
        let guest = Machine::Guest(self.index(guests.len()));
        let remote = Machine::Remote(self.index(remotes.len()));
        let mut conn = |n: u64| ConnPlan {
            client: remote,
            server: guest,
            v6: self.v6_percent == 100,
            opens_at: Instant::from_micros(span_ms * 500 * n / count),
            workload,
            reuse: None,
        };
        (0..count).map(&mut conn).collect()
    }

    fn conns(
        &mut self,
        guests: &[GuestPlan],
        remotes: &[RemotePlan],
        span_ms: u64,
    ) -> Vec<ConnPlan> {
        let (count, many) = match self.random.below(200) {
            0 => (self.random.within(1000, 3000), true),
            1..8 => (self.random.within(60, 200), true),
            _ => (self.random.within(1, 6), false),
        };
        let vm_to_vm = guests.len() > 1 && self.random.percent(30);
        let guest_opens = self.random.pick(&[0, 30, 100]);
        let v6 = self.v6_percent;
        let sizes: &[u64] = match self.random.below(10) {
            0..4 => &[1, 100, 1_449, 10_000, 30_000],
            4..9 => &[1_000, 30_000, 100_000, 200_000],
            _ => &[100_000, 1_000_000],
        };
        let sizes = if many { &[1, 500, 4_000] } else { sizes };
        (0..count)
            .map(|_| {
                let a = Machine::Guest(self.index(guests.len()));
                let other = Machine::Guest(self.index(guests.len()));
                let b = if vm_to_vm && other != a && self.random.percent(50) {
                    other
                } else {
                    Machine::Remote(self.index(remotes.len()))
                };
                let (client, server) =
                    if self.random.percent(guest_opens) { (a, b) } else { (b, a) };
                let opens_at = Instant::from_micros(self.random.below(span_ms * 500));
                let workload = self.workload(sizes);
                ConnPlan {
                    client,
                    server,
                    v6: self.random.percent(v6),
                    opens_at,
                    workload,
                    reuse: None,
                }
            })
            .collect()
    }

    fn workload(&mut self, sizes: &[u64]) -> Workload {
        let up = self.random.pick(sizes);
        match self.random.below(10) {
            0..4 => Workload::Bulk { up, down: 0 },
            4 => Workload::Bulk { up: 0, down: up },
            5 => Workload::Bulk { up, down: self.random.pick(sizes) },
            6 | 7 => {
                let count = self.random.pick(&[1, 5, 30]);
                let response = self.random.pick(&[1, 200, 8_000]);
                Workload::RequestResponse { request: (up / 50).max(1), response, count }
            }
            8 => Workload::HalfClose { up, down: self.random.pick(sizes) },
            _ => Workload::Idle { idle_s: self.random.pick(&[1, 40, 400]) },
        }
    }

    fn index(&mut self, len: usize) -> u16 {
        u16::try_from(self.random.below(len as u64)).unwrap_or(0)
    }

    fn faults(
        &mut self,
        guests: &[GuestPlan],
        remotes: &[RemotePlan],
        carriers: &[ConnPlan],
        span_ms: u64,
    ) -> Vec<Fault> {
        let mut classes = Vec::new();
        for class in 0..CLASSES {
            // The rough ones end connections: they are rarer, or little would be tested besides.
            let chance = if class >= FIRST_ROUGH { 9 } else { 25 };
            if self.random.percent(chance) {
                classes.push(class);
            }
        }
        let mut faults = Vec::new();
        for &class in &classes {
            let once = class >= FIRST_ROUGH && class != KILL;
            let count = if once { 1 } else { self.random.within(1, 3) };
            for _ in 0..count {
                let mut from = self.random.below(span_ms * 900);
                // A flow that begins without offload stays so, and one that meets a flood may.
                let begins_without = matches!(class, OFFLOAD_OFF | DRAIN | FLOW_FLOOD);
                if !carriers.is_empty() && self.random.percent(60) && !begins_without {
                    // While there is something to spoil.
                    let opens_us = self.random.pick(carriers).opens_at.as_nanos() / 1000;
                    let within = self.random.pick(&[2_000, 20_000, 200_000]);
                    // Faults that end a connection come after one has begun.
                    let first = if class >= FIRST_ROUGH { 5_000 } else { 0 };
                    let at = first + self.random.below(within);
                    from = (opens_us + at).min(span_ms * 900);
                }
                let mut lasts = self.random.within(1_000, span_ms * 1000 - from);
                if begins_without && self.random.percent(75) {
                    lasts = lasts.min(100_000);
                }
                let kind = self.fault(class, guests, remotes);
                if matches!(kind, FaultKind::ManyAddresses { .. }) {
                    // A sender behind the addresses of others is never known for itself.
                    from = from.max(first_of(carriers, kind).min(span_ms * 900));
                }
                faults.push(Fault {
                    at: Instant::from_micros(from),
                    lasts: Duration::from_micros(lasts),
                    kind,
                });
            }
        }
        if self.ecn_percent == 100
            && let Some(carrier) = carriers.first()
        {
            // Marks without drops (RFC 3168): a queue that fills, in either direction.
            let ends = [carrier.client, carrier.server];
            let remote = ends.iter().find_map(|m| match m {
                Machine::Remote(r) => Some(*r),
                Machine::Guest(_) => None,
            });
            let (remote, to_host) = (remote.unwrap_or(0), self.random.percent(80));
            let ppm = self.random.pick(&[1_000, 10_000, 50_000]);
            let lasts = Duration::from_millis(span_ms / 2);
            let kind = FaultKind::Mark { remote, to_host, ppm };
            faults.push(Fault { at: carrier.opens_at, lasts, kind });
        }
        faults.sort_by_key(|f| f.at);
        faults
    }

    fn fault(&mut self, class: u64, guests: &[GuestPlan], remotes: &[RemotePlan]) -> FaultKind {
        let remote = self.index(remotes.len());
        let guest = self.index(guests.len());
        let to_host = self.random.percent(50);
        let ppm = self.random.pick(&[1_000, 10_000, 50_000, 200_000]);
        let machine =
            if self.random.percent(60) { Machine::Guest(guest) } else { Machine::Remote(remote) };
        match class {
            0 => FaultKind::Loss { remote, to_host, ppm },
            1 => {
                let burst_frames = self.random.pick(&[3, 10, 40]);
                FaultKind::BurstLoss { remote, to_host, ppm, burst_frames }
            }
            2 => {
                let delay_us = self.random.pick(&[100, 2_000, 30_000]);
                FaultKind::Reorder { remote, to_host, ppm, delay_us }
            }
            3 => FaultKind::Duplicate { remote, to_host, ppm, delay_us: 0 },
            4 => FaultKind::Corrupt { remote, to_host, ppm: ppm / 4 },
            5 => FaultKind::Mark { remote, to_host, ppm },
            6 => FaultKind::Mtu { remote, to_host, mtu: self.random.pick(&[600, 1000, 1400]) },
            7 => {
                let rate_bps = self.random.pick(&[500_000, 5_000_000]);
                FaultKind::Rate { remote, to_host, rate_bps }
            }
            8 => FaultKind::Cut { remote, to_host },
            9 => FaultKind::Pause { guest },
            10 => FaultKind::StopReading { machine },
            11 => FaultKind::DropDelivered { guest, ppm },
            12 => FaultKind::ShrinkWindow { machine },
            OFFLOAD_OFF => FaultKind::OffloadOff { guest },
            DRAIN => FaultKind::Drain { guest },
            15 => FaultKind::DriverReset { guest },
            FLOW_FLOOD if self.random.percent(40) => {
                FaultKind::ManyAddresses { guest, addresses: self.random.pick(&[5, 40, 200]) }
            }
            FLOW_FLOOD => FaultKind::FlowFlood { remote, guest, per_ms: self.random.pick(&[1, 5]) },
            17 => FaultKind::Forge { guest, per_ms: self.random.pick(&[1, 5]) },
            18 => FaultKind::OneWay { guest, fragments: self.random.percent(50) },
            19 => FaultKind::Reboot { guest },
            20 => FaultKind::Destroy { guest },
            KILL => FaultKind::Kill { guest },
            21 => FaultKind::Migrate { guest },
            _ => {
                let steps_max = self.random.pick(&[10, 100, 2_000]);
                let step = u32::try_from(self.random.below(steps_max)).unwrap_or(0);
                FaultKind::Crash { arena: self.random.percent(75), step }
            }
        }
    }
}

/// Classes of faults in [`Swarm::fault`], and the first of those that end connections.
const CLASSES: u64 = 24;
const FIRST_ROUGH: u64 = 18;
const KILL: u64 = 23;
const OFFLOAD_OFF: u64 = 13;
const DRAIN: u64 = 14;
const FLOW_FLOOD: u64 = 16;

/// When the first of `carriers` with a machine that the fault concerns has begun, µs.
fn first_of(carriers: &[ConnPlan], kind: FaultKind) -> u64 {
    let machines = kind.machines();
    let of = |c: &&ConnPlan| [c.client, c.server].iter().any(|m| machines.contains(&Some(*m)));
    let first = carriers.iter().filter(of).map(|c| c.opens_at).min();
    first.map_or(0, |at| at.as_nanos() / 1000 + 5_000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn two_hundred_seeds_have_every_kind_of_fault_stack_policy_and_workload() {
        let mut faults = BTreeSet::new();
        let mut others = BTreeSet::new();
        let name = |text: String| text.split([' ', '{']).next().unwrap_or_default().to_owned();
        for seed in 0..200 {
            let plan = Plan::from_seed(seed);
            assert_eq!(plan, Plan::from_seed(seed));
            faults.extend(plan.faults.iter().map(|f| f.kind.name()));
            others.extend(plan.conns.iter().map(|c| name(format!("{:?}", c.workload))));
            others.extend(plan.cores.iter().map(|c| name(format!("{:?}", c.policy))));
            others.extend(plan.guests.iter().map(|g| name(format!("{:?}", g.stack.kind))));
        }
        assert_eq!(faults.len(), 29, "{faults:?}");
        assert_eq!(others.len(), 5 + 5 + 3, "{others:?}");
    }
}
