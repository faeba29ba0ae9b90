//! A failing plan made smaller: fewer faults, connections and machines, shorter streams, plainer
//! stacks, as long as it fails in the same way.

use crate::plan::{Machine, Offloads, Plan, Policy, Quirks, Workload};
use crate::run::{Failure, run_plan};
use nightporter_core::time::{Duration, Instant};

/// The rest of a plan, and its failure.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// The smaller plan.
    pub plan: Plan,
    /// The same kind of failure as at first; the message may differ.
    pub failure: Failure,
    /// Runs that were needed.
    pub runs: u32,
}

/// Makes `plan` smaller until nothing more can go, or `runs_max` plans have been tried. The smaller
/// plan fails with the same [`Failure::kind`].
#[must_use]
pub fn shrink(plan: &Plan, failure: Failure, runs_max: u32) -> Shrunk {
    let mut s = Shrinker { best: plan.clone(), kind: failure.kind(), failure, runs: 0, runs_max };
    while s.round() && s.runs < s.runs_max {}
    Shrunk { plan: s.best, failure: s.failure, runs: s.runs }
}

struct Shrinker {
    best: Plan,
    kind: String,
    failure: Failure,
    runs: u32,
    runs_max: u32,
}

impl Shrinker {
    /// Tries everything once; true if anything went.
    fn round(&mut self) -> bool {
        let mut gone = self.drop_some(|plan| &mut plan.faults);
        gone |= self.drop_some(|plan| &mut plan.conns);
        gone |= self.drop_machines();
        for n in 0..self.best.conns.len() {
            while self.try_edit(|plan| halve(&mut plan.conns[n].workload)) {
                gone = true;
            }
        }
        for n in 0..self.best.faults.len() {
            while self.try_edit(|plan| halve_duration(&mut plan.faults[n].lasts)) {
                gone = true;
            }
        }
        for edit in PLAINER {
            gone |= self.try_edit(edit);
        }
        gone
    }

    /// Takes away halves, quarters and so on down to single elements of a list.
    fn drop_some<T>(&mut self, list: fn(&mut Plan) -> &mut Vec<T>) -> bool {
        let mut gone = false;
        let mut size = list(&mut self.best).len().div_ceil(2);
        while size > 0 {
            let mut at = 0;
            while at < list(&mut self.best).len() {
                let dropped = self.try_edit(|plan| {
                    let list = list(plan);
                    list.drain(at..(at + size).min(list.len()));
                    true
                });
                gone |= dropped;
                at += if dropped { 0 } else { size };
            }
            size /= 2;
        }
        gone
    }

    /// Removes machines without connections, the last first: numbers stay as they are.
    fn drop_machines(&mut self) -> bool {
        let mut gone = false;
        let used = |plan: &Plan, m: Machine| {
            plan.conns.iter().any(|c| c.client == m || c.server == m)
                || plan.faults.iter().any(|f| f.kind.machines().contains(&Some(m)))
        };
        while self.try_edit(|plan| {
            let n = u16::try_from(plan.guests.len() - 1).unwrap_or(0);
            let goes = n > 0 && !used(plan, Machine::Guest(n));
            goes.then(|| plan.guests.pop()).is_some()
        }) {
            gone = true;
        }
        while self.try_edit(|plan| {
            let n = u16::try_from(plan.remotes.len() - 1).unwrap_or(0);
            let goes = n > 0 && !used(plan, Machine::Remote(n));
            goes.then(|| plan.remotes.pop()).is_some()
        }) {
            gone = true;
        }
        gone
    }

    /// Keeps an edit after which the plan still fails like before. `edit` says whether it changed
    /// anything.
    fn try_edit(&mut self, edit: impl FnOnce(&mut Plan) -> bool) -> bool {
        let mut plan = self.best.clone();
        if self.runs >= self.runs_max || !edit(&mut plan) || plan == self.best {
            return false;
        }
        self.runs += 1;
        match run_plan(&plan) {
            Err(failure) if failure.kind() == self.kind => {
                (self.best, self.failure) = (plan, failure);
                true
            }
            _ => false,
        }
    }
}

/// Half as much; false if there was nothing to halve.
fn halve(workload: &mut Workload) -> bool {
    let before = *workload;
    let half = |bytes: &mut u64| *bytes = bytes.div_ceil(2);
    match workload {
        Workload::Bulk { up, down } | Workload::HalfClose { up, down } => {
            [up, down].into_iter().for_each(half);
        }
        Workload::RequestResponse { request, response, count } => {
            [request, response].into_iter().for_each(half);
            *count = count.div_ceil(2);
        }
        Workload::Reset { up } => half(up),
        Workload::Idle { idle_s } => *idle_s = idle_s.div_ceil(2),
    }
    *workload != before
}

fn halve_duration(lasts: &mut Duration) -> bool {
    *lasts = Duration::from_nanos(lasts.as_nanos() / 2);
    lasts.as_millis() > 0
}

/// Plainer machines and paths; each is tried alone.
const PLAINER: [fn(&mut Plan) -> bool; 9] = [
    |plan| {
        plan.cores.iter_mut().for_each(|core| core.policy = Policy::Dedicated);
        true
    },
    |plan| {
        plan.guests.iter_mut().for_each(|guest| guest.load_percent = 0);
        (plan.host.core, plan.vlan) = (None, None);
        true
    },
    |plan| {
        plan.guests.iter_mut().for_each(|guest| guest.ring_slots = 256);
        true
    },
    |plan| {
        plan.guests.iter_mut().for_each(|guest| guest.offloads = Offloads::NONE);
        true
    },
    |plan| {
        plan.remotes.iter_mut().for_each(|remote| remote.shares = None);
        plan.remotes.iter_mut().for_each(|remote| remote.offloads = Offloads::NONE);
        (plan.host.merges, plan.host.uplink_wait_us) = (false, 0);
        true
    },
    |plan| {
        for stack in stacks(plan) {
            (stack.ecn, stack.mss, stack.isn) = (false, None, None);
            stack.syn_options.clear();
            stack.quirks = Quirks::default();
        }
        true
    },
    |plan| {
        stacks(plan).for_each(|stack| stack.timestamps = false);
        true
    },
    |plan| {
        stacks(plan).for_each(|stack| stack.sack = false);
        true
    },
    |plan| {
        plan.conns.iter_mut().for_each(|conn| conn.opens_at = Instant::ZERO);
        true
    },
];

fn stacks(plan: &mut Plan) -> impl Iterator<Item = &mut crate::plan::StackPlan> {
    let guests = plan.guests.iter_mut().map(|g| &mut g.stack);
    guests.chain(plan.remotes.iter_mut().map(|r| &mut r.stack))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connections that are idle for longer than anybody waits.
    fn hopeless() -> (Plan, Failure) {
        let impatient = |seed| {
            let mut plan = Plan::from_seed(seed);
            plan.give_up_at = plan.heal_at;
            for conn in &mut plan.conns {
                (conn.workload, conn.opens_at) = (Workload::Idle { idle_s: 400 }, Instant::ZERO);
            }
            (plan.faults.len() > 3 && plan.conns.len() > 3).then_some(plan)
        };
        let fails = |plan: Plan| run_plan(&plan).err().map(|failure| (plan, failure));
        (0..100).filter_map(impatient).find_map(fails).expect("one of them hangs")
    }

    #[test]
    fn what_remains_fails_in_the_same_way_and_is_as_small_as_it_gets() {
        let (plan, failure) = hopeless();
        let kind = failure.kind();
        let small = shrink(&plan, failure, 500);
        assert_eq!(small.failure.kind(), kind);
        let again = run_plan(&small.plan).expect_err("it still fails");
        assert_eq!(again, small.failure);
        let left = (small.plan.faults.len(), small.plan.conns.len(), small.plan.remotes.len());
        // Machines keep their numbers: none is left behind the one that is needed.
        let remote = |m: &Machine| match m {
            Machine::Remote(n) => usize::from(*n) + 1,
            Machine::Guest(_) => 1,
        };
        let needed = small.plan.conns.iter().map(|c| remote(&c.client).max(remote(&c.server)));
        assert_eq!(left, (0, 1, needed.max().unwrap_or(1)), "{:?}", small.plan);
    }

    #[test]
    fn it_stops_when_it_has_run_often_enough() {
        let (plan, failure) = hopeless();
        assert_eq!(shrink(&plan, failure, 3).runs, 3);
    }
}
