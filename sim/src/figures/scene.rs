//! The testbed of the vSnoop paper as a [`Plan`]: its section V-A, and our choices where the paper
//! is silent.

use nightporter_core::limits::PAGE;
use nightporter_core::time::{Duration, Instant};

use crate::plan::{
    ConnPlan, CorePlan, GuestPlan, HostPlan, LinkPlan, Machine, Offloads, Plan, Policy, Quirks,
    RemotePlan, StackKind, StackPlan, Workload,
};
use crate::random::Random;

/// Xen's credit scheduler, unchanged: slices of 30 ms; a VM that wakes with credit left preempts.
pub const POLICY: Policy = Policy::Credit { slice_us: 30_000, boost: true };
/// A host of today: a preempted VM keeps its place. The host's own work has a core for itself.
pub const POLICY_TODAY: Policy = Policy::KeepsPlace { slice_us: 30_000 };
/// "All references to non-idle VMs entail 60% CPU load" (footnote 4).
pub const LOAD_PERCENT: u32 = 60;
/// Receive buffers posted: "relatively few" (section IV-A), the paper does not say how many. With
/// the 64 that netfront means to keep (`RX_DFL_MIN_TARGET`) a deeper ring is no better below 10 MB.
pub const RING_PLAIN: usize = 16;
/// "At least up to 75% of the 256 slots" (section IV-A).
pub const RING_DEEP: usize = 192;
/// Frames that wait in front of a full ring (netback's `queue_length`).
pub const BACKLOG_FRAMES: usize = 32;
/// Linux before 2.6.39 began with three segments (RFC 3390).
pub const FIRST_SEGMENTS: u16 = 3;
/// The most Linux gives a connection with 256 MB of memory (`tcp_rmem`), half of it for overhead.
pub const RECEIVE_BYTES: usize = 1 << 20;
/// Budget of a VM for bytes acknowledged early: the daemon's default.
pub const BUDGET_BYTES: u64 = 64 << 20;
/// Distance of the client in microseconds: with both ways and the driver domain's turn, about the
/// 0.1 ms of a LAN (footnote 2). Drawn for each run, as the next two are: with the same in all
/// runs, the driver domain would wake as often in each, and the VM whose turn it is afterwards
/// would be the same.
pub const DELAY_US: [u64; 2] = [20, 50];
/// The driver domain handles what has come and is not interrupted again for so long, in
/// nanoseconds; for every frame it handled so much longer.
pub const TURN_NS: [u64; 2] = [60_000, 140_000];
/// See [`TURN_NS`].
pub const FRAME_NS: [u64; 2] = [2_000, 5_000];
/// Processor time of a VM for a frame, in nanoseconds.
pub const GUEST_FRAME_NS: u64 = 3_000;
/// Nothing is opened before: by then loads of more than a core have become a queue.
const WARM_UP: Duration = Duration::from_millis(1_000);
/// The transfer begins by chance within so long after that: ten turns of three VMs.
const PHASE_US: u64 = 900_000;

/// How the host forwards to the VM that receives.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Mode {
    /// Forwarding alone, with few posted buffers: the paper's "vanilla Xen".
    Plain,
    /// Forwarding alone, with many: "Xen+tuning".
    DeepRing,
    /// As many buffers, and ack offload: "Xen+tuning+vSnoop".
    Offload,
}

impl Mode {
    /// In the order of the paper.
    pub const ALL: [Self; 3] = [Self::Plain, Self::DeepRing, Self::Offload];

    /// Its name in figures.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::DeepRing => "plain, deeper ring",
            Self::Offload => "ack offload",
        }
    }
}

/// One arrangement: the sharing of cores, and the traffic to guest 0.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// VMs on the core, the one that receives among them.
    pub vms: u16,
    /// Load of each.
    pub load_percent: u32,
    /// Load of guest 0, if it is another: without any it is as quick as a driver domain.
    pub own_load_percent: Option<u32>,
    /// The sender shares a core with two other VMs of the same load.
    pub sender_shares: bool,
    /// The driver domain has a core of its own.
    pub own_core: bool,
    /// How VMs share theirs.
    pub policy: Policy,
    /// How the host forwards.
    pub mode: Mode,
    /// Connections opened at the same time.
    pub conns: u16,
    /// Bytes that the client writes on each; then it closes.
    pub bytes: u64,
}

impl Scene {
    /// One connection, and the common settings of most of the paper's experiments.
    #[must_use]
    pub const fn new(vms: u16, mode: Mode, bytes: u64) -> Self {
        Self {
            vms,
            load_percent: LOAD_PERCENT,
            own_load_percent: None,
            sender_shares: false,
            own_core: false,
            policy: POLICY,
            mode,
            conns: 1,
            bytes,
        }
    }

    /// The same on a host of today.
    #[must_use]
    pub const fn today(self) -> Self {
        Self { own_core: true, policy: POLICY_TODAY, ..self }
    }

    /// The world in which it happens; `seed` sets the exact time, and draws the costs.
    #[must_use]
    pub fn plan(&self, seed: u64) -> Plan {
        let mut random = Random::new(seed, "figures");
        let opens_at = Instant::ZERO + WARM_UP + Duration::from_micros(random.below(PHASE_US));
        let workload = Workload::HalfClose { up: self.bytes, down: 0 };
        let link = link(&mut random);
        let shares = self.sender_shares.then_some((self.policy, self.load_percent, 2));
        let mut guests = vec![self.guest(); self.vms.into()];
        guests[0].load_percent = self.own_load_percent.unwrap_or(self.load_percent);
        Plan {
            seed,
            host: self.host(&mut random),
            cores: vec![CorePlan { policy: self.policy }],
            guests,
            remotes: vec![RemotePlan {
                to_host: link,
                from_host: link,
                stack: stack(),
                offloads: Offloads::NONE,
                shares,
            }],
            vlan: None,
            conns: vec![upload(opens_at, workload); self.conns.into()],
            faults: Vec::new(),
            heal_at: Instant::from_secs(600),
            give_up_at: Instant::from_secs(600),
        }
    }

    fn guest(&self) -> GuestPlan {
        GuestPlan {
            core: 0,
            weight: 256,
            load_percent: self.load_percent,
            ring_slots: if self.mode == Mode::Plain { RING_PLAIN } else { RING_DEEP },
            offloads: Offloads::NONE,
            mtu: 1500,
            budget_bytes: BUDGET_BYTES,
            flows_max: 4096,
            ack_offload: self.mode == Mode::Offload,
            congestion_offload: false,
            new_reno: false,
            accepts: crate::plan::Accepts::No,
            frame_ns: GUEST_FRAME_NS,
            forwards: None,
            stack: stack(),
        }
    }

    fn host(&self, random: &mut Random) -> HostPlan {
        let pages = u64::from(self.vms) * BUDGET_BYTES / PAGE as u64;
        HostPlan {
            arena_pages: usize::try_from(pages).unwrap_or(0) + 8,
            arena_records: 8192,
            flows_max: 8192,
            turn_frames: 64,
            turn_ns: drawn(random, TURN_NS),
            frame_ns: drawn(random, FRAME_NS),
            core: (!self.own_core).then_some(0),
            uplink_queue_frames: 1000,
            uplink_wait_us: 0,
            merges: false,
            backlog_frames: BACKLOG_FRAMES,
            flows_per_step: crate::plan::flows_per_step(),
            wire: false,
        }
    }
}

/// From the client machine to guest 0.
#[must_use]
pub fn upload(opens_at: Instant, workload: Workload) -> ConnPlan {
    let (client, server) = (Machine::Remote(0), Machine::Guest(0));
    ConnPlan { client, server, v6: false, opens_at, workload, reuse: None }
}

fn drawn(random: &mut Random, [from, to]: [u64; 2]) -> u64 {
    random.within(from, to)
}

/// Gigabit Ethernet through one switch.
fn link(random: &mut Random) -> LinkPlan {
    let delay_us = u32::try_from(drawn(random, DELAY_US)).unwrap_or(u32::MAX);
    LinkPlan { rate_bps: 1_000_000_000, delay_us, queue_frames: 1000, mtu: 1500 }
}

/// Linux 2.6.18, as far as our TCP can be it: Reno, three segments at first.
fn stack() -> StackPlan {
    StackPlan {
        kind: StackKind::Strict,
        receive_bytes: RECEIVE_BYTES,
        send_bytes: RECEIVE_BYTES,
        window_scale: Some(5),
        timestamps: true,
        sack: true,
        ecn: false,
        mss: None,
        isn: None,
        syn_options: Vec::new(),
        first_segments: Some(FIRST_SEGMENTS),
        quirks: Quirks::default(),
    }
}
