//! A place of the map: a host of today, the VMs on one of its cores, a path, and one transfer.

use nightporter_core::limits::PAGE;
use nightporter_core::time::{Duration, Instant};
use serde::Serialize;

use crate::plan::{
    ConnPlan, CorePlan, Floods, GuestPlan, HostPlan, LinkPlan, Machine, Offloads, Plan, Policy,
    Quirks, RemotePlan, StackKind, StackPlan, Workload,
};
use crate::random::Random;

/// Loads run for so long before the transfer begins, and it begins by chance within so long then.
const WARM_UP: Duration = Duration::from_millis(500);
const PHASE_US: u64 = 1_000_000;
/// A turn of the worker, which has a core of its own, and each frame of it, in nanoseconds.
const TURN_NS: [u64; 2] = [20_000, 60_000];
const FRAME_NS: [u64; 2] = [500, 1_500];
/// Receive buffers of a VM, as QEMU makes them, and frames that its tap's queue holds besides.
const RING_SLOTS: usize = 256;
const QUEUE_FRAMES: usize = 4_000;
/// The most that Linux gives a connection by default (`tcp_rmem`, `tcp_wmem`), half of the former
/// for overhead.
const RECEIVE_BYTES: usize = 3 << 20;
const SEND_BYTES: usize = 4 << 20;
/// The daemon's default budget of a VM.
const BUDGET_BYTES: u64 = 64 << 20;
/// A slice of EEVDF is 3 ms, and ends at a tick (250 a second, as Debian's kernel has).
const FAIR_SLICE_US: u32 = 4_000;
/// The path's queue: nothing is lost there.
const PATH_QUEUE_FRAMES: usize = 100_000;
/// Bytes that ask for a download.
const REQUEST_BYTES: u64 = 40;

/// How VMs share their core.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// Whole slices in turn.
    Slices {
        /// Their length.
        ms: u32,
    },
    /// Linux's default class (EEVDF).
    Fair,
    /// At most a part of each 100 ms (cgroup's `cpu.max`).
    Quota {
        /// Its length.
        ms: u32,
    },
}

/// The direction of the bytes, as the VM sees it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// To the VM.
    Up,
    /// From the VM.
    Down,
}

/// One transfer and all around it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Place {
    /// How the core is shared.
    pub sharing: Sharing,
    /// VMs on the core. Each wants all of it, always; without a quota it gets an equal share.
    pub vms: u16,
    /// Round trip of the path.
    pub round_trip_us: u32,
    /// Rate of the path.
    pub rate_bps: u64,
    /// Processor time of the VM for a frame that it receives.
    pub frame_ns: u64,
    /// Bytes of the transfer.
    pub bytes: u64,
    /// Their direction.
    pub direction: Direction,
}

impl Place {
    /// The world in which it happens, with Nightporter's offload of its direction or without;
    /// `seed` decides on the moment. The same seed begins both at the same moment.
    #[must_use]
    pub fn plan(&self, seed: u64, offload: bool) -> Plan {
        let mut random = Random::new(seed, "map");
        let opens_at = Instant::ZERO + WARM_UP + Duration::from_micros(random.below(PHASE_US));
        let (client, server) = (Machine::Remote(0), Machine::Guest(0));
        let workload = match self.direction {
            Direction::Up => Workload::HalfClose { up: self.bytes, down: 0 },
            Direction::Down => Workload::HalfClose { up: REQUEST_BYTES, down: self.bytes },
        };
        let policy = self.policy();
        Plan {
            seed,
            host: self.host(&mut random),
            cores: vec![CorePlan { policy }],
            guests: (0..self.vms).map(|guest| self.guest(offload && guest == 0)).collect(),
            remotes: vec![RemotePlan {
                to_host: self.link(),
                from_host: self.link(),
                stack: stack(Floods::No),
                offloads: Offloads::NONE,
                shares: None,
            }],
            vlan: None,
            conns: vec![ConnPlan { client, server, v6: false, opens_at, workload, reuse: None }],
            faults: Vec::new(),
            heal_at: Instant::from_secs(3600),
            give_up_at: Instant::from_secs(3600),
        }
    }

    fn policy(&self) -> Policy {
        match self.sharing {
            Sharing::Slices { ms } => Policy::RoundRobin { slice_us: ms * 1000 },
            Sharing::Fair => Policy::Fair { slice_us: FAIR_SLICE_US },
            Sharing::Quota { ms } => Policy::Quota { quota_us: ms * 1000, period_us: 100_000 },
        }
    }

    fn guest(&self, offload: bool) -> GuestPlan {
        let sends = offload && self.direction == Direction::Down;
        GuestPlan {
            core: 0,
            weight: 256,
            load_percent: 100,
            ring_slots: RING_SLOTS,
            offloads: Offloads::NONE,
            mtu: 1500,
            budget_bytes: BUDGET_BYTES,
            flows_max: 4096,
            ack_offload: offload,
            congestion_offload: sends,
            new_reno: false,
            accepts: crate::plan::Accepts::No,
            frame_ns: self.frame_ns,
            forwards: None,
            stack: stack(if sends { Floods::Route } else { Floods::No }),
        }
    }

    fn host(&self, random: &mut Random) -> HostPlan {
        let pages = u64::from(self.vms) * BUDGET_BYTES / PAGE as u64;
        HostPlan {
            arena_pages: usize::try_from(pages).unwrap_or(0) + 8,
            arena_records: 8192,
            flows_max: 8192,
            turn_frames: 64,
            turn_ns: random.within(TURN_NS[0], TURN_NS[1]),
            frame_ns: random.within(FRAME_NS[0], FRAME_NS[1]),
            core: None,
            uplink_queue_frames: PATH_QUEUE_FRAMES,
            uplink_wait_us: 0,
            merges: false,
            backlog_frames: QUEUE_FRAMES,
            flows_per_step: crate::plan::flows_per_step(),
            wire: false,
        }
    }

    fn link(&self) -> LinkPlan {
        LinkPlan {
            rate_bps: self.rate_bps,
            delay_us: self.round_trip_us / 2,
            queue_frames: PATH_QUEUE_FRAMES,
            mtu: 1500,
        }
    }
}

/// A Linux of today, as far as our TCP can be it.
fn stack(floods: Floods) -> StackPlan {
    StackPlan {
        kind: StackKind::Strict,
        receive_bytes: RECEIVE_BYTES,
        send_bytes: SEND_BYTES,
        window_scale: Some(7),
        timestamps: true,
        sack: true,
        ecn: false,
        mss: None,
        isn: None,
        syn_options: Vec::new(),
        first_segments: None,
        quirks: Quirks { floods, as_linux: true, ..Quirks::default() },
    }
}
