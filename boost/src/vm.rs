//! A VM, as the booster sees it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::favour::{Mode, Vcpu, Weighed, weigh};
use crate::journal::{Journal, check_plain};
use crate::lag::{Lag, Share};
use crate::layout::{Hierarchy, Means};
use crate::policy::{Account, Allowance, Deferral, Ended, Row, SLEEP_MAX_NS, Wait};
use crate::process::{Process, Thread, Turns, holder};
use crate::protocol::{Budget, Claim};

/// A VM's wish for its core.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Wish {
    pub(crate) claim: Claim,
    pub(crate) until: u64,
    /// How often it has taken some of what it was owed.
    pub(crate) taken: u32,
}

/// A VM's wish for its core, while its neighbours have a turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) wish: Wish,
    pub(crate) since: u64,
    /// Its account says so.
    pub(crate) counted: bool,
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
    /// Its debt at the beginning.
    pub(crate) owed_ns: u64,
    /// CPU time of its threads at the beginning.
    used_before: u64,
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

/// A tap whose holder is the VMM.
#[derive(Debug)]
pub(crate) struct Held {
    tap: String,
    /// Then its holder may be looked for.
    look_at: u64,
    /// Why there is none.
    why: Option<String>,
}

impl Held {
    pub(crate) const fn new(tap: String) -> Self {
        Self { tap, look_at: 0, why: None }
    }
}

/// Between two searches of all processes, which take some 20 ms on a large host.
const SEARCH_NS: u64 = 5_000_000_000;

/// See the module doc.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) name: String,
    process: Option<Process>,
    /// Where the process is looked for, if no socket tells it.
    pub(crate) held: Option<Held>,
    cgroup: Option<PathBuf>,
    pub(crate) account: Option<Account>,
    vcpus: Vec<Vcpu>,
    pub(crate) comes_and_goes: bool,
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
    pub(crate) lag: Lag,
    /// That of the last sample.
    share: Share,
    pub(crate) mode: Mode,
    pub(crate) boost: Option<Boost>,
    pub(crate) waits: Option<Waiting>,
    /// Nobody else wanted its cores: until then its orders are void.
    pub(crate) later: u64,
    pub(crate) deferral: Deferral,
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
            held: None,
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
            lag: Lag::default(),
            share: Share::new(std::iter::empty(), 0),
            mode: Mode::Normal,
            boost: None,
            waits: None,
            later: 0,
            deferral: Deferral::default(),
        }
    }

    /// Of a VM that has a tap: finds its VMM, once, and again when that has ended. The tap is in
    /// the network namespace of the thread `worker`.
    pub(crate) fn find_holder(&mut self, now: u64, worker: i32) {
        let is_there = self.process.as_ref().is_some_and(Process::is_alive);
        let Some(held) = self.held.as_mut().filter(|it| !is_there && now >= it.look_at) else {
            return;
        };
        held.look_at = now + SEARCH_NS;
        let found = holder(&held.tap, worker);
        let found = found.and_then(|pid| Process::open(pid).map_err(|e| e.to_string()));
        held.why = found.as_ref().err().cloned();
        self.process = found.ok().or(self.process.take());
    }

    /// Finds its threads, and where they run.
    pub(crate) fn look(&mut self, hierarchy: Option<&Hierarchy>) {
        let alive = |process: &&Process| process.is_alive();
        let Some(process) = self.process.as_ref().filter(alive) else {
            // Before, the next change of mode forgets what the journal has of them.
            if self.mode == Mode::Normal {
                self.vcpus.clear();
            }
            let why = self.held.as_ref().and_then(|held| held.why.clone());
            self.missing = Some(why.unwrap_or_else(|| "no VMM is connected".into()));
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
        let (mut begun_ns, mut ended_ns) = (0, 0);
        // A thread that has ended is as before: the next change of mode forgets it.
        self.vcpus.retain(|vcpu| {
            let stays = ids.contains(&vcpu.thread.id) || self.mode != Mode::Normal;
            ended_ns += if stays { 0 } else { vcpu.had.ran_ns };
            stays
        });
        for id in ids {
            if !self.vcpus.iter().any(|vcpu| vcpu.thread.id == id)
                && let Ok(thread) = Thread::open(id)
            {
                let vcpu = Vcpu::new(thread);
                begun_ns += vcpu.had.ran_ns;
                self.vcpus.push(vcpu);
            }
        }
        self.lag.rebase(begun_ns, ended_ns);
        if let Some(boost) = &mut self.boost {
            boost.used_before += begun_ns;
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

    /// Turns of its threads together.
    fn turns(&mut self) -> Turns {
        self.vcpus.iter_mut().map(Vcpu::turns).fold(Turns::default(), |all, it| Turns {
            ran_ns: all.ran_ns + it.ran_ns,
            waited_ns: all.waited_ns + it.waited_ns,
            count: all.count + it.count,
        })
    }

    /// CPU time that its threads have used together.
    fn used(&mut self) -> u64 {
        self.turns().ran_ns
    }

    /// How many of its threads run or wait for a core.
    pub(crate) fn runnable(&self) -> usize {
        let is = |vcpu: &&Vcpu| vcpu.thread.stat().is_ok_and(|stat| stat.is_runnable());
        self.vcpus.iter().filter(is).count()
    }

    /// How many of its threads run or wait on each core, and a core on which one last ran.
    pub(crate) fn crowds(&self) -> (BTreeMap<usize, u32>, usize) {
        let (mut crowds, mut last) = (BTreeMap::new(), 0);
        for stat in self.vcpus.iter().filter_map(|vcpu| vcpu.thread.stat().ok()) {
            last = stat.cpu;
            if stat.is_runnable() {
                *crowds.entry(stat.cpu).or_default() += 1;
            }
        }
        (crowds, last)
    }

    /// Brings its lag up to this moment, at which that is its share; see [`Lag::note`].
    pub(crate) fn note(&mut self, now: u64, share: Share, busy: bool) {
        if self.account.is_some() {
            self.share = share;
            let turns = self.turns();
            self.lag.note(now, turns, share, self.mode, busy);
        }
    }

    /// At the last sample no other VM wanted its cores, and lately it hardly waited for them.
    pub(crate) fn is_alone(&self) -> bool {
        self.share.is_whole() && self.lag.hardly_waits()
    }

    /// Its debt to its neighbours.
    pub(crate) fn unpaid_ns(&self) -> u64 {
        let owes = self.mode != Mode::Normal || self.deferral.is_begun();
        if owes { self.lag.debt_ns() } else { 0 }
    }

    /// The part of the VM's allowance that a boost has to leave: also the turn that the kernel gave
    /// it after a payment, as long as its share is kept count of. Later that turn keeps no boost
    /// away.
    pub(crate) fn owed_ns(&self, now: u64) -> u64 {
        if self.mode == Mode::Normal && !self.lag.is_active(now) { 0 } else { self.lag.debt_ns() }
    }

    pub(crate) fn begin(
        &mut self,
        now: u64,
        journal: &mut Journal,
        wish: Wish,
        allowance: Allowance,
    ) -> Result<(), String> {
        let owed_ns = self.owed_ns(now);
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
        self.boost = Some(Boost {
            wish,
            allowance,
            taken_before: wish.taken,
            seen_ns: 0,
            looked_at: now,
            awake_at: now,
            owed_ns,
            used_before: self.used(),
        });
        Ok(())
    }

    /// Looks at a boost that lasts: why it should end.
    pub(crate) fn check_boost(&mut self, now: u64, journal: &mut Journal) -> Option<Ended> {
        let runnable = self.runnable();
        let by_weight = self.is_by_weight();
        let used = by_weight.then(|| {
            let pushed = self.push(journal, false);
            pushed.unwrap_or_else(|why| eprintln!("{}: {why}", self.name));
            self.used()
        });
        let boost = self.boost.as_mut()?;
        // A thread of a real-time class that is runnable runs. Others may wait.
        let span = now.saturating_sub(boost.looked_at) * u64::try_from(runnable).unwrap_or(1);
        boost.looked_at = now;
        boost.seen_ns = match used {
            Some(used) => used.saturating_sub(boost.used_before),
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
    ) -> Result<u64, String> {
        let Some(boost) = self.boost.take() else { return Ok(0) };
        if ended == Ended::Budget {
            self.deferral.on_empty(now);
        }
        let mode = |vm: &Self| if ended == Ended::TakenBack { Mode::Normal } else { vm.rest(now) };
        let mut result = self.set(journal, mode(self));
        // A change of class has brought its CPU time up to date.
        let turns = self.turns();
        self.lag.note(now, turns, self.share, Mode::Favoured, true);
        if mode(self) != self.mode {
            result = result.and(self.set(journal, mode(self)));
        }
        let used = turns.ran_ns.saturating_sub(boost.used_before);
        if let Some(account) = &mut self.account {
            account.spend(now, used);
            account.end(now, ended, boost.is_served());
        }
        result.map(|()| used)
    }

    /// How it runs while it is not favoured.
    fn rest(&self, now: u64) -> Mode {
        let pays = self.lag.debt_ns() > 0 && !self.deferral.lasts(now);
        if pays { Mode::Paying } else { Mode::Normal }
    }

    /// It pays, or is about to, and may be even.
    pub(crate) fn check_payment(&mut self, now: u64, journal: &mut Journal) -> Result<(), String> {
        if self.lag.debt_ns() == 0 {
            self.deferral.on_paid();
        }
        let rest = self.rest(now);
        if rest == self.mode { Ok(()) } else { self.set(journal, rest) }
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
            owed_ns: 0,
            used_before: 0,
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
        // The part for turns is used up.
        it.go_on(wish(Claim::Turn), Err(Wait::Empty));
        assert_eq!(it.allowance, budget(2 * MS));
    }
}
