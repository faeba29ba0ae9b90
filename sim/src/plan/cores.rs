//! The plan of cores and how they are shared.

use serde::{Deserialize, Serialize};

/// One core and how it is shared.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct CorePlan {
    /// The scheduling policy.
    pub policy: Policy,
}

/// How a core is shared (times in microseconds).
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Policy {
    /// Everybody always runs: as many cores as guests.
    Dedicated,
    /// Xen's credit scheduler: slices of `slice_us`, credits by weight every 30 ms; with `boost`,
    /// one that wakes with credit left preempts.
    Credit {
        /// 30,000 in Xen.
        slice_us: u32,
        /// Wake-ups preempt.
        boost: bool,
    },
    /// As `Credit` with `boost`, but a preempted machine keeps its place and goes on with the rest
    /// of its slice, as on Linux.
    KeepsPlace {
        /// The papers' 30,000.
        slice_us: u32,
    },
    /// Plain round robin (SCHED_RR): no credits, no wake-up preemption.
    RoundRobin {
        /// Length of a turn.
        slice_us: u32,
    },
    /// Proportional share by virtual deadline, like Linux's EEVDF.
    Fair {
        /// Base slice; Linux: 3,000 on few cores.
        slice_us: u32,
    },
    /// Proportional share, with at most `quota_us` in `period_us` for each (cgroup `cpu.max`).
    Quota {
        /// Time per period.
        quota_us: u32,
        /// Length of the period.
        period_us: u32,
    },
}
