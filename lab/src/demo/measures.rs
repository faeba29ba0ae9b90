//! The numbers of a transfer, and the names of the cases.

use std::time::Duration;

use serde::Serialize;
use serde_json::json;

use super::{Direction, NetPath};
use crate::experiment::{Better, Cell, Measure, Values, measure};
use crate::link::Link;
use crate::placement::Placement;
use crate::process::CpuUse;
use crate::sched::Scheduler;
use crate::transfer::Outcome;

pub(super) const CONNECT: &str = "connect";
pub(crate) const ACKED: &str = "acked";
pub(crate) const DELIVERED: Measure = measure("delivered", "ms", Better::Less).with_spread();
/// 1, or 0: of all transfers that came through, those whose hash was right.
pub(super) const WHOLE: &str = "arrived whole";
pub(crate) const ANSWER: &str = "answer to a request";
/// In a window of a second, against an equal share of the core.
pub(super) const LOSS: &str = "loss of another guest";
const READ: &str = "read by the guest";
pub(crate) const VMM_CPU: &str = "CPU of its VMM";
pub(crate) const BACK_END_CPU: &str = "CPU of the back-end";
const COSTS: [&str; 5] = [
    "interrupts of the guest",
    "CPU of the guest's core",
    "turns on that core",
    VMM_CPU,
    BACK_END_CPU,
];

pub(super) const MEASURES: [Measure; 14] = [
    measure(CONNECT, "ms", Better::Less),
    measure(ACKED, "ms", Better::Less),
    measure("both together", "ms", Better::Less),
    DELIVERED,
    measure(READ, "ms", Better::Neither),
    measure(COSTS[0], "", Better::Neither),
    measure(COSTS[1], "ms", Better::Neither),
    measure(COSTS[2], "", Better::Neither),
    measure(COSTS[3], "ms", Better::Neither),
    measure(COSTS[4], "ms", Better::Neither),
    measure("sent again", "", Better::Neither),
    measure(WHOLE, "", Better::Neither),
    measure(ANSWER, "ms", Better::Less).with_tail(),
    measure(LOSS, "%", Better::Neither).with_tail(),
];

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// The processor time of a transfer, from before it to after its verdict.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cost {
    /// Interrupts of the guest's NICs.
    pub(super) interrupts: u64,
    /// The receiver's vCPU on its core. Under load it is busy all the time: its share.
    pub(super) vcpu: CpuUse,
    /// All other threads of the receiver's VMM.
    pub(super) vmm: Duration,
    /// The process that carries its frames, if there is one.
    pub(super) back_end: Duration,
}

/// Of a transfer that began at this moment of the guests' cycle.
pub(super) fn values(phase: Duration, outcome: &Outcome, cost: &Cost) -> Values {
    let Outcome { connect, acked, delivered, guest_read, retransmits, hash_ok, .. } = *outcome;
    let times = [connect, acked, connect + acked, delivered, guest_read].map(ms);
    let costs = [
        cost.interrupts as f64,
        ms(cost.vcpu.time),
        cost.vcpu.switches as f64,
        ms(cost.vmm),
        ms(cost.back_end),
    ];
    let rest = [f64::from(retransmits), f64::from(u8::from(hash_ok))];
    let numbers = times.into_iter().chain(costs).chain(rest);
    let mut of: Vec<_> = MEASURES.iter().map(|measure| measure.name).zip(numbers).collect();
    if guest_read.is_zero() {
        of.retain(|(what, _)| ![READ, COSTS[0]].contains(what)); // it sends, and tells neither
    }
    Values { of, detail: json!({ "phase_ms": ms(phase) }) }
}

/// The world of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Terms {
    /// How the guests share their core.
    pub scheduler: Scheduler,
    /// The link to the remote.
    pub link: Link,
    /// How many guests there are, and what runs where.
    pub placement: Placement,
}

impl Terms {
    /// Three guests that want all of their core.
    #[must_use]
    pub const fn usual(scheduler: Scheduler, link: Link) -> Self {
        Self { scheduler, link, placement: Placement::USUAL }
    }

    /// For people, and for the result's file.
    pub(super) fn name(self) -> String {
        format!("{} over {}{}", self.scheduler, self.link, self.placement)
    }

    /// Transfers of one size in one direction.
    pub(crate) fn one_way(self, direction: Direction, bytes: usize) -> String {
        format!("{}: {} {direction}", self.name(), size(bytes))
    }

    /// The same both ways at once, of which this is one.
    pub(super) fn both_ways(self, direction: Direction, bytes: usize) -> String {
        format!("{}: {} both ways at once, {direction}", self.name(), size(bytes))
    }

    /// Requests of so many bytes.
    pub(crate) fn requests(self, bytes: usize) -> String {
        format!("{}: requests of {}", self.name(), size(bytes))
    }
}

/// A path in a case.
pub(super) fn cell(case: String, path: NetPath) -> Cell {
    Cell::new(case, path.name())
}

/// A size for people.
pub(crate) fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1_000_000 => format!("{} MB", b / 1_000_000),
        b => format!("{} KB", b / 1000),
    }
}
