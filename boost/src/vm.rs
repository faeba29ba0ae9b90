//! A VM, as the booster sees it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::favour::{Mode, Vcpu, Weighed, weigh};
use crate::journal::{Journal, check_plain};
use crate::layout::{Hierarchy, Means};
use crate::policy::{
    Account, Allowance, Demand, Ended, Row, SLEEP_MAX_NS, Step, Wait, favoured_ns,
};
use crate::process::{Process, Stat, Thread};
use crate::protocol::{Budget, Claim};

/// How often a payment is looked at, at least and at most.
const PAYMENT: Duration = Duration::from_millis(2);
const PAYMENT_LEAST: Duration = Duration::from_micros(100);

/// What a VM wants its core for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Wish {
    pub(crate) claim: Claim,
    pub(crate) until: u64,
    /// How often it has taken some of what it was owed.
    pub(crate) taken: u32,
}

/// A boost that lasts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Boost {
    pub(crate) wish: Wish,
    /// CPU time that it may take.
    pub(crate) allowance: Allowance,
    /// [`Wish::taken`] at its beginning.
    taken_before: u32,
    /// That it has taken, as far as its threads' states tell: accounts have the exact time.
    pub(crate) seen_ns: u64,
    pub(crate) looked_at: u64,
    pub(crate) awake_at: u64,
    /// Time for which its threads ran or waited for a core, as far as their states tell.
    /// `schedstat` counts a wait when it is over, also one that began before.
    runnable_ns: u64,
    began_at: u64,
    /// CPU time of its threads at the beginning, and for how long they had waited.
    before: (u64, u64),
}

impl Boost {
    /// It lasts, for another wish perhaps. `allowance`: what a boost for it may take now, from the
    /// beginning of this one on.
    pub(crate) fn go_on(&mut self, wish: Wish, allowance: Result<Allowance, Wait>) {
        // Of the half for bytes a turn has nothing, also where it follows them.
        let is_less = wish.claim == Claim::Turn && self.wish.claim != Claim::Turn;
        self.wish = wish;
        match allowance {
            Ok(it) if is_less || it.cpu_ns > self.allowance.cpu_ns => self.allowance = it,
            Err(Wait::Empty) if is_less => {
                self.allowance = Allowance { cpu_ns: self.seen_ns, limit: Ended::Budget };
            }
            _ => {}
        }
    }

    /// The VM took some of what it was owed. While its application reads it has taken all of it.
    fn is_served(&self) -> bool {
        self.wish.claim == Claim::Reading || self.wish.taken != self.taken_before
    }
}

/// See the module doc.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) name: String,
    process: Option<Process>,
    cgroup: Option<PathBuf>,
    pub(crate) account: Option<Account>,
    vcpus: Vec<Vcpu>,
    comes_and_goes: bool,
    /// Cores on which its threads may run.
    pub(crate) cpus: Vec<usize>,
    /// The cgroup in which its threads compete.
    pub(crate) dir: Option<PathBuf>,
    /// Until when it is refused, because a boost failed for this reason.
    pub(crate) failed: Option<(u64, String)>,
    /// Why its threads are not known.
    missing: Option<String>,
    pub(crate) means: Option<Means>,
    weighed: Option<Weighed>,
    pub(crate) row: Row,
    pub(crate) demand: Demand,
    pub(crate) mode: Mode,
    pub(crate) boost: Option<Boost>,
    /// What it wants, while its neighbours have a turn.
    pub(crate) waits: Option<Wish>,
    /// Since when it pays, and the CPU time of its threads then.
    paying: (u64, u64),
    /// Its debt was no smaller when that was last looked at.
    pays_nothing: bool,
}

impl Vm {
    pub(crate) fn new(
        now: u64,
        name: String,
        pid: i32,
        budget: Option<Budget>,
        cgroup: Option<PathBuf>,
    ) -> Self {
        Self {
            name,
            process: Process::open(pid).ok(),
            cgroup,
            account: budget.map(|budget| Account::new(now, budget)),
            vcpus: Vec::new(),
            comes_and_goes: false,
            cpus: Vec::new(),
            dir: None,
            failed: None,
            missing: None,
            means: None,
            weighed: None,
            row: Row::default(),
            demand: Demand::default(),
            mode: Mode::Normal,
            boost: None,
            waits: None,
            paying: (now, 0),
            pays_nothing: false,
        }
    }

    /// Finds its threads, and where they run.
    pub(crate) fn look(&mut self, hierarchy: Option<&Hierarchy>) {
        let alive = |process: &&Process| process.is_alive();
        let Some(process) = self.process.as_ref().filter(alive) else {
            self.vcpus.clear();
            self.missing = Some("no VMM is connected".into());
            return;
        };
        let (ids, comes_and_goes) = match process.vcpus(self.cgroup.as_deref()) {
            Ok(found) => found,
            Err(why) => {
                self.missing = Some(why);
                return;
            }
        };
        self.missing = None;
        self.comes_and_goes = comes_and_goes;
        // A thread that has ended is as before: the next change of mode forgets it.
        self.vcpus.retain(|vcpu| ids.contains(&vcpu.thread.id) || self.mode != Mode::Normal);
        for id in ids {
            if !self.vcpus.iter().any(|vcpu| vcpu.thread.id == id)
                && let Ok(thread) = Thread::open(id)
            {
                self.vcpus.push(Vcpu::new(thread));
            }
        }
        self.cpus.clear();
        for vcpu in &self.vcpus {
            let set = Pid::from_raw(vcpu.thread.id.tid).map(|tid| sched_getaffinity(Some(tid)));
            if let Some(Ok(set)) = set {
                self.cpus.extend((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)));
            }
        }
        self.cpus.sort_unstable();
        self.cpus.dedup();
        self.dir = self
            .vcpus
            .first()
            .and_then(|vcpu| hierarchy?.dir_of_thread(vcpu.thread.id.pid, vcpu.thread.id.tid));
    }

    /// Before a boost: of a user-mode Linux, the processes that there are now.
    pub(crate) fn look_anew(&mut self, hierarchy: Option<&Hierarchy>) {
        if self.comes_and_goes && self.mode == Mode::Normal {
            self.look(hierarchy);
        }
    }

    /// It and its threads may be favoured, by the means that are returned. Errors: words for the
    /// operator. `others`: where the threads of other VMs compete.
    pub(crate) fn judge<'a>(
        &self,
        hierarchy: Option<&Hierarchy>,
        others: impl Iterator<Item = &'a Path>,
    ) -> Result<Means, String> {
        if let Some(why) = &self.missing {
            return Err(why.clone());
        }
        let (Some(hierarchy), Some(dir)) = (hierarchy, &self.dir) else {
            return Err("there is no cgroup hierarchy with the cpu controller".into());
        };
        let pids: Vec<i32> = self.vcpus.iter().map(|vcpu| vcpu.thread.id.pid).collect();
        for vcpu in &self.vcpus {
            let id = vcpu.thread.id;
            let own = hierarchy.dir_of_thread(id.pid, id.tid);
            if let Some(dir) = own.and_then(|dir| hierarchy.quota(&dir)) {
                return Err(format!("{} has a CPU quota", dir.display()));
            }
            if self.mode == Mode::Normal
                && let Ok(stat) = vcpu.thread.stat()
            {
                check_plain(&stat, false)?;
            }
        }
        hierarchy.means(dir, &|pid| pids.contains(&pid), others)
    }

    /// CPU time that its threads have used, and that they have waited, together.
    fn used_and_waited(&self) -> (u64, u64) {
        let of = |vcpu: &Vcpu| vcpu.thread.used_and_waited().unwrap_or_default();
        let sums = self.vcpus.iter().map(of);
        sums.fold((0, 0), |(used, waited), it| (used + it.0, waited + it.1))
    }

    /// Its part in the competition for cores.
    pub(crate) fn note_demand(&mut self, now: u64) {
        let (used, waited) = self.used_and_waited();
        self.demand.note(now, [used, waited], [self.vcpus.len(), self.runnable()]);
    }

    /// How many of its threads run or wait for a core.
    pub(crate) fn runnable(&self) -> usize {
        let is = |vcpu: &&Vcpu| vcpu.thread.stat().is_ok_and(|stat| stat.is_runnable());
        self.vcpus.iter().filter(is).count()
    }

    /// How many of its threads run or wait on these cores.
    pub(crate) fn runnable_on(&self, cpus: &[usize]) -> usize {
        let is = |stat: &Stat| stat.is_runnable() && cpus.contains(&stat.cpu);
        self.vcpus.iter().filter(|vcpu| vcpu.thread.stat().is_ok_and(|stat| is(&stat))).count()
    }

    /// Cores that it wants, at most all of its own.
    fn wanted(&self) -> f64 {
        self.demand.wanted_of(self.cpus.len())
    }

    pub(crate) fn begin(
        &mut self,
        now: u64,
        journal: &mut Journal,
        wish: Wish,
        allowance: Allowance,
    ) -> Result<(), String> {
        // Of several vCPUs those that could run; if all sleep, whichever is woken.
        let runnable = if self.vcpus.len() > 1 { self.runnable() } else { 0 };
        for vcpu in &mut self.vcpus {
            if runnable == 0 || vcpu.thread.stat().is_ok_and(|stat| stat.is_runnable()) {
                let favours = matches!(self.means, Some(Means::Nice));
                if favours && let Err(why) = vcpu.set(journal, Mode::Favoured) {
                    self.mode = Mode::Favoured; // others may be
                    let back = self.set(journal, Mode::Normal);
                    return back.and(Err(why));
                }
            }
        }
        if let Some(means) = &self.means {
            weigh(journal, means, &mut self.weighed, Mode::Favoured)?;
        }
        self.mode = Mode::Favoured;
        if let Err(why) = self.push(journal, true) {
            let back = self.set(journal, Mode::Normal);
            return back.and(Err(why));
        }
        self.refresh();
        self.boost = Some(Boost {
            wish,
            allowance,
            taken_before: wish.taken,
            seen_ns: 0,
            looked_at: now,
            awake_at: now,
            runnable_ns: 0,
            began_at: now,
            before: self.used_and_waited(),
        });
        Ok(())
    }

    /// Looks at a boost that lasts: why it should end.
    pub(crate) fn check_boost(&mut self, now: u64, journal: &mut Journal) -> Option<Ended> {
        let runnable = self.runnable();
        let by_weight = self.is_by_weight();
        let used = by_weight.then(|| {
            self.refresh();
            let pushed = self.push(journal, false);
            pushed.unwrap_or_else(|why| eprintln!("{}: {why}", self.name));
            self.used_and_waited().0
        });
        let boost = self.boost.as_mut()?;
        // A thread of a real-time class that is runnable runs. Others may wait.
        let span = now.saturating_sub(boost.looked_at) * u64::try_from(runnable).unwrap_or(1);
        boost.looked_at = now;
        boost.runnable_ns += span;
        boost.seen_ns = match used {
            Some(used) => used.saturating_sub(boost.before.0),
            None => boost.seen_ns + span,
        };
        if runnable > 0 {
            boost.awake_at = now;
        }
        if now >= boost.wish.until {
            let served = boost.wish.claim == Claim::Reading;
            return Some(if served { Ended::Served } else { Ended::Time });
        }
        if boost.seen_ns >= boost.allowance.cpu_ns {
            return Some(boost.allowance.limit);
        }
        (now.saturating_sub(boost.awake_at) > SLEEP_MAX_NS).then_some(Ended::Slept)
    }

    /// A boost ends; the CPU time that it took.
    pub(crate) fn end(
        &mut self,
        now: u64,
        journal: &mut Journal,
        ended: Ended,
        n: f64,
    ) -> Result<u64, String> {
        let Some(boost) = self.boost.take() else { return Ok(0) };
        let runnable = u64::try_from(self.runnable()).unwrap_or(1);
        let runnable_ns = boost.runnable_ns + now.saturating_sub(boost.looked_at) * runnable;
        let owes = |vm: &Self| vm.account.as_ref().is_some_and(|it| it.debt_ns() > 0);
        let owed = owes(self);
        let mut result = self.set(journal, if owed { Mode::Paying } else { Mode::Normal });
        self.refresh();
        let (used, waited) = self.used_and_waited();
        self.paying = (now, used);
        self.pays_nothing = false;
        let used = used.saturating_sub(boost.before.0);
        // A thread of a real-time class does not wait for a neighbour.
        let by_weight = self.is_by_weight();
        let waited = if by_weight { waited.saturating_sub(boost.before.1) } else { 0 };
        let lasted = now.saturating_sub(boost.began_at);
        let wall_ns = favoured_ns((used, waited), runnable_ns, self.cpus.len(), lasted);
        if let Some(account) = &mut self.account {
            account.spend(now, Step { wall_ns, cpu_ns: used, n, own: 1.0 });
            account.end(now, ended, boost.is_served());
        }
        if !owed && owes(self) && ended != Ended::TakenBack {
            result = result.and(self.set(journal, Mode::Paying));
        }
        result.map(|()| used)
    }

    /// What it has paid since it was last asked. The payment stands still while it is favoured.
    pub(crate) fn step(&self, now: u64, n: f64) -> Step {
        let (since, before) = self.paying;
        let (wall_ns, cpu_ns) =
            (now.saturating_sub(since), self.used_and_waited().0.saturating_sub(before));
        Step { wall_ns, cpu_ns, n, own: self.wanted() }
    }

    /// How soon its payment is to be looked at: when it will be even, with `n` competitors. What it
    /// pays beyond its debt is lost to it. A VM that pays nothing has the core, and is not even
    /// soon.
    pub(crate) fn next_payment(&self, now: u64, n: f64) -> Duration {
        let account = self.account.as_ref();
        let even_at = self.paying.0 + account.map_or(0, |it| it.payment_ns(n, self.wanted()));
        let least = if self.pays_nothing { PAYMENT } else { PAYMENT_LEAST };
        Duration::from_nanos(even_at.saturating_sub(now)).clamp(least, PAYMENT)
    }

    /// It has paid that, and may be even.
    pub(crate) fn pay(
        &mut self,
        journal: &mut Journal,
        step: Step,
        contested: bool,
    ) -> Result<(), String> {
        self.paying = (self.paying.0 + step.wall_ns, self.paying.1 + step.cpu_ns);
        let Some(account) = &mut self.account else { return self.set(journal, Mode::Normal) };
        let before = account.debt_ns();
        let even = account.pay(step, contested);
        self.pays_nothing = account.debt_ns() >= before;
        if even { self.set(journal, Mode::Normal) } else { Ok(()) }
    }

    /// Brings the CPU times of its threads up to date, where the kernel does so: since Linux 6.12 a
    /// thread is given its class anew also if it has it (`__sched_setscheduler` in
    /// kernel/sched/syscalls.c compares no slice with the default one). Elsewhere they are as old
    /// as the last tick, as all other readings are: the clock of another process's thread is
    /// refused, and that of a process adds up what `schedstat` shows (`pid_for_clock`,
    /// kernel/time/posix-cpu-timers.c; `thread_group_cputime`, kernel/sched/cputime.c).
    pub(crate) fn refresh(&self) {
        for vcpu in &self.vcpus {
            vcpu.refresh();
        }
    }

    /// Brings all that it has into `mode`.
    pub(crate) fn set(&mut self, journal: &mut Journal, mode: Mode) -> Result<(), String> {
        let mut result = Ok(());
        if let Some(means) = &self.means {
            result = result.and(weigh(journal, means, &mut self.weighed, mode));
        }
        let by_weight = self.is_by_weight();
        for vcpu in &mut self.vcpus {
            result = result.and(if !by_weight || mode == Mode::Normal {
                vcpu.set(journal, mode)
            } else if mode == Mode::Paying {
                vcpu.calm(journal).map_err(|e| e.to_string())
            } else {
                Ok(())
            });
        }
        self.mode = mode;
        result
    }

    const fn is_by_weight(&self) -> bool {
        matches!(self.means, Some(Means::Weight { .. }))
    }

    /// By weight: its threads that wait are to run now; see there.
    fn push(&mut self, journal: &mut Journal, first: bool) -> Result<(), String> {
        if !self.is_by_weight() {
            return Ok(());
        }
        self.vcpus.iter_mut().try_for_each(|vcpu| vcpu.push(journal, first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bst_04_a_payment_that_pays_nothing_is_not_looked_at_ten_thousand_times_a_second() {
        const MS: u64 = 1_000_000;
        let dir = std::env::temp_dir().join(format!("nightporter-vm-{}", std::process::id()));
        let mut journal = Journal::open(&dir).unwrap();
        let pid = std::process::id().cast_signed();
        let budget = Budget { cpu_us: 15_000, window_us: 90_000 };
        let mut vm = Vm::new(0, "vm".into(), pid, Some(budget), None);
        let step = |wall_ns, cpu_ns| Step { wall_ns, cpu_ns, n: 2.0, own: 1.0 };
        vm.account.as_mut().unwrap().spend(0, step(MS, MS));
        assert_eq!(vm.next_payment(0, 2.0), Duration::from_millis(1));
        vm.pay(&mut journal, step(MS - 1000, 0), true).unwrap();
        assert_eq!(vm.next_payment(MS - 1000, 2.0), PAYMENT_LEAST, "a microsecond is left");
        vm.pay(&mut journal, step(MS, MS), false).unwrap();
        assert_eq!(vm.next_payment(2 * MS - 1000, 2.0), PAYMENT, "nobody wanted the core");
        std::fs::remove_file(dir).unwrap();
    }

    #[test]
    fn bst_01_a_boost_for_bytes_that_goes_on_for_a_turn_has_no_more_than_a_turn_may_have() {
        const MS: u64 = 1_000_000;
        let wish = |claim| Wish { claim, until: 50 * MS, taken: 0 };
        let budget = |cpu_ns| Allowance { cpu_ns, limit: Ended::Budget };
        let boost = |claim, seen_ns| Boost {
            wish: wish(claim),
            allowance: budget(15 * MS),
            taken_before: 0,
            seen_ns,
            looked_at: 0,
            awake_at: 0,
            runnable_ns: 0,
            began_at: 0,
            before: (0, 0),
        };
        let mut it = boost(Claim::Bytes, 2 * MS);
        it.go_on(wish(Claim::Turn), Ok(budget(7 * MS)));
        assert_eq!(it.allowance, budget(7 * MS));
        // It is told once more; nothing has come in, and the neighbours are owed more.
        it.go_on(wish(Claim::Turn), Ok(budget(6 * MS)));
        it.go_on(wish(Claim::Turn), Err(Wait::Neighbours));
        assert_eq!(it.allowance, budget(7 * MS));
        it.go_on(wish(Claim::Bytes), Ok(budget(14 * MS)));
        assert_eq!(it.allowance, budget(14 * MS), "bytes may have more");
        it.go_on(wish(Claim::Reading), Ok(budget(14 * MS)));
        assert_eq!(it.allowance, budget(14 * MS));
        // What a turn may have is used up.
        it.go_on(wish(Claim::Turn), Err(Wait::Empty));
        assert_eq!(it.allowance, budget(2 * MS));
    }
}
