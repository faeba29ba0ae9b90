//! The booster: orders in, favoured threads out.

mod daemon;
mod watched;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};

use self::daemon::Daemon;
use self::watched::Watched;
use crate::favour::Mode;
use crate::journal::{Entry, Journal, Place, check_plain, take_back};
use crate::lag::Share;
use crate::layout::Hierarchy;
use crate::policy::{Allowance, Deferral, Ended, Wait};
use crate::process::{Identity, Stat, Thread};
use crate::protocol::{Order, Report, VERSION};
use crate::sys::{Class, set_class};
use crate::vm::{Held, Vm, Waiting, Wish};
use crate::{BEAT, PRIORITY, SILENCE_MAX, WORKER_PRIORITY};

/// How often boosts are looked at.
const LOOK: Duration = Duration::from_millis(1);
/// How often accounts are brought up to date, and payments looked at.
const ACCOUNT: Duration = Duration::from_millis(2);
/// A daemon asks so much later again for a VM whose cores nobody else wants.
const LATER: Duration = Duration::from_millis(10);
/// Of the booster's time at most one part in so many goes into samples.
const SAMPLES_PART: u64 = 20;
/// Orders that are heard before boosts are looked at again.
const ORDERS_AT_ONCE: u32 = 64;
/// How often threads, cgroups and cores are looked up.
const JUDGE: Duration = Duration::from_secs(1);
/// A boost that failed is not tried again for so long.
const FAILED: Duration = Duration::from_secs(60);
/// How often accounts are told.
const TELL: Duration = Duration::from_millis(100);

/// Runs until something fails, with the socket of the daemon and the journal at these paths.
///
/// # Errors
/// The watcher has ended or stands, or the system refuses something. Everything is taken back then.
pub fn run(socket: &Path, journal: &Path) -> Result<()> {
    let class = set_class(0, Class::round_robin(PRIORITY));
    let back = take_back(journal).context("what a predecessor left cannot be taken back")?;
    if back > 0 {
        eprintln!("took back what a predecessor left: {back}");
    }
    let own = match class {
        Ok(()) => None,
        Err(e) => Some(format!("the booster has no real-time class above a boost's: {e}")),
    };
    if let Some(why) = &own {
        eprintln!("{why}");
    }
    let mut booster = Booster {
        began: Instant::now(),
        socket: socket.into(),
        hierarchy: Hierarchy::find(),
        refused: own,
        watched: Watched::start(journal)?,
        journal: Journal::open(journal)?,
        daemon: None,
        connect_at: 0,
        worker: None,
        vms: BTreeMap::new(),
        judged_at: None,
        sample_at: 0,
        told_at: 0,
    };
    let result = booster.run();
    booster.lose_daemon();
    result
}

/// Why the booster is awake, beside the time.
#[derive(Clone, Copy, Debug, Default)]
struct Woken {
    watcher_ended: bool,
    orders: bool,
}

/// The daemon's worker.
#[derive(Debug)]
struct Worker {
    tid: i32,
    /// Its class is one that it was given here.
    given: Option<Place>,
    thread: Thread,
}

/// Of the other VMs on a VM's cores.
#[derive(Debug)]
struct Neighbours {
    /// Their debts, and those that boosts which last may add.
    unpaid_ns: u64,
    none_has_boost: bool,
    /// Some are favoured now, and have been for so long.
    favoured: bool,
    seen_ns: u64,
}

#[derive(Debug)]
struct Booster {
    began: Instant,
    socket: PathBuf,
    hierarchy: Option<Hierarchy>,
    /// Why nobody can be boosted.
    refused: Option<String>,
    watched: Watched,
    journal: Journal,
    daemon: Option<Daemon>,
    connect_at: u64,
    worker: Option<Worker>,
    vms: BTreeMap<u16, Vm>,
    judged_at: Option<u64>,
    /// The next sample.
    sample_at: u64,
    told_at: u64,
}

impl Booster {
    fn now(&self) -> u64 {
        nanos(self.began.elapsed())
    }

    fn run(&mut self) -> Result<()> {
        loop {
            let woken = self.wait()?;
            let now = self.now();
            self.watched.check(now, woken.watcher_ended)?;
            self.hear(now, woken.orders)?;
            self.look(now)?;
            self.tell(now);
        }
    }

    /// Sleeps until something has to be done.
    fn wait(&self) -> Result<Woken> {
        let mut most = BEAT;
        let now = self.now();
        for vm in self.vms.values() {
            if vm.mode == Mode::Favoured {
                most = most.min(LOOK);
            } else if vm.waits.is_some() || vm.mode == Mode::Paying {
                most = most.min(ACCOUNT);
            }
            if let Some(boost) = vm.boost {
                let left = Duration::from_nanos(boost.wish.until.saturating_sub(now));
                most = most.min(left);
            }
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: most.as_nanos().try_into()? };
        let mut fds = vec![self.watched.poll_fd()];
        fds.extend(
            self.daemon.as_ref().map(|it| PollFd::from_borrowed_fd(it.socket(), PollFlags::IN)),
        );
        match poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => return Ok(Woken::default()),
            result => result.context("poll")?,
        };
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        Ok(Woken { watcher_ended: is_ready(0), orders: is_ready(1) })
    }

    /// Takes the daemon's orders, if there are some; what it was told is void when it is gone or
    /// stands.
    fn hear(&mut self, now: u64, orders: bool) -> Result<()> {
        if self.daemon.is_none() && now >= self.connect_at {
            self.connect_at = now + nanos(TELL);
            self.daemon = Daemon::connect(&self.socket, now)?;
        }
        // The rest is there for the next poll: boosts that last are looked at between.
        let most = if orders { ORDERS_AT_ONCE } else { 0 };
        for _ in 0..most {
            let Some(daemon) = &mut self.daemon else { return Ok(()) };
            match daemon.receive(now) {
                Ok(None) => break,
                Ok(Some(order)) => self.handle_order(now, order)?,
                Err(e) => {
                    eprintln!("the daemon is gone: {e}");
                    self.lose_daemon();
                    return Ok(());
                }
            }
        }
        let favours = self.vms.values().any(|vm| vm.mode != Mode::Normal);
        if let Some(daemon) = &mut self.daemon
            && daemon.stands(now, favours)
        {
            eprintln!("the daemon has not answered for {SILENCE_MAX:?}: nobody is favoured");
            self.take_back();
        }
        Ok(())
    }

    fn handle_order(&mut self, now: u64, order: Order) -> Result<()> {
        match order {
            Order::Hello { version, worker, rt_priority } => {
                if version != VERSION {
                    bail!("the daemon speaks version {version} of the protocol, not {VERSION}");
                }
                self.meet_worker(worker, rt_priority);
            }
            Order::Vm { vm, name, pid, tap, boost, vcpu_cgroup } => {
                self.forget(vm);
                let cgroup =
                    vcpu_cgroup.and_then(|name| self.hierarchy.as_ref().map(|it| it.dir(&name)));
                let mut it = Vm::new(now, name, pid, boost, cgroup);
                it.held = tap.map(Held::new);
                self.vms.insert(vm, it);
                self.judged_at = None;
            }
            Order::Gone { vm } => self.forget(vm),
            // An order that the daemon sent before it heard that it has to ask again.
            Order::Boost { vm, .. } if self.vms.get(&vm).is_some_and(|vm| now < vm.later) => {}
            Order::Boost { vm, claim, for_us, taken } => {
                let until = now.saturating_add(for_us.min(1_000_000) * 1000);
                self.vms.get_mut(&vm).into_iter().for_each(|vm| vm.deferral.wants(until));
                self.ask(now, vm, Wish { claim, until, taken });
            }
            Order::End { vm } => {
                if let Some(vm) = self.vms.get_mut(&vm) {
                    vm.waits = None;
                    vm.deferral.wants(0);
                }
                self.end(now, vm, Ended::Served);
            }
            Order::Pong {} => {}
        }
        Ok(())
    }

    /// Gives the daemon's worker its class from outside: its unit forbids it to take one.
    fn meet_worker(&mut self, tid: i32, rt_priority: u8) {
        self.worker = None;
        let Ok(stat) = Stat::of(tid) else { return };
        let id = Identity { pid: tid, tid, start: stat.start };
        let Ok(thread) = Thread::open(id) else { return };
        let mut worker = Worker { tid, given: None, thread };
        if rt_priority >= WORKER_PRIORITY && check_plain(&stat, false).is_ok() {
            let class = Class::fifo(rt_priority);
            if let Ok(place) = self.journal.put(&Entry::of_thread(id, class)) {
                match set_class(tid, class) {
                    Ok(()) => worker.given = Some(place),
                    Err(e) => {
                        eprintln!("the worker cannot have priority {rt_priority}: {e}");
                        self.journal.clear(place);
                    }
                }
            }
        }
        self.worker = Some(worker);
    }

    /// A VM wants its core, or still does.
    fn ask(&mut self, now: u64, number: u16, wish: Wish) {
        let Some(vm) = self.vms.get_mut(&number) else { return };
        if vm.boost.is_none() {
            let waiting = vm.waits.get_or_insert(Waiting { wish, since: now, counted: false });
            waiting.wish = wish;
            self.serve(now);
            return;
        }
        let allowance = self.allowance(now, number, wish);
        let boost = self.vms.get_mut(&number).and_then(|vm| vm.boost.as_mut());
        if let Some((boost, allowance)) = boost.zip(allowance) {
            boost.go_on(wish, allowance);
        }
    }

    /// VMs that want a core may have it, first the one that has had least of its share.
    fn serve(&mut self, now: u64) {
        self.vms.values_mut().for_each(|vm| vm.waits = vm.waits.filter(|it| now < it.wish.until));
        let waits = self.vms.iter().filter_map(|(&number, vm)| Some((number, vm, vm.waits?)));
        let mut waits: Vec<_> =
            waits.map(|(number, vm, it)| (vm.lag.excess_ns(), it.since, number, it)).collect();
        waits.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for (_, _, number, it) in waits {
            let allowance = self.allowance(now, number, it.wish);
            let Some(vm) = self.vms.get_mut(&number) else { continue };
            vm.waits = None;
            match allowance {
                None => {}
                Some(Ok(allowed)) => self.begin(now, number, it, allowed),
                Some(Err(wait)) => {
                    match wait {
                        Wait::Neighbours => vm.waits = Some(Waiting { counted: true, ..it }),
                        Wait::Empty if vm.mode == Mode::Paying => vm.deferral.on_empty(now),
                        Wait::Empty | Wait::Rests => {}
                    }
                    if let Some(account) = vm.account.as_mut().filter(|_| !it.counted) {
                        account.wait(wait);
                    }
                }
            }
        }
    }

    /// CPU time that a boost may take from its beginning on. `None`: the VM is not boosted at all.
    fn allowance(&mut self, now: u64, number: u16, wish: Wish) -> Option<Result<Allowance, Wait>> {
        let around = self.neighbours_of(number);
        let vm = self.vms.get_mut(&number)?;
        let own = vm.boost.map_or_else(|| vm.owed_ns(now), |boost| boost.owed_ns);
        let account = vm.account.as_mut().filter(|it| it.numbers.refused.is_empty())?;
        if vm.boost.is_none() && !around.favoured {
            vm.row.pause(now);
        }
        // Also where nobody competes now: a neighbour may wake.
        let row = vm.row.room(now, around.seen_ns);
        let terms = (around.unpaid_ns + own, around.none_has_boost);
        Some(account.allowance(now, wish.claim, terms, row))
    }

    /// A boost begins, unless nobody else wants the VM's cores: then the daemon asks again later,
    /// because each order takes some of the core that daemon and remote have.
    fn begin(&mut self, now: u64, number: u16, it: Waiting, allowed: Allowance) {
        let Some(vm) = self.vms.get_mut(&number) else { return };
        vm.look_anew(self.hierarchy.as_ref());
        self.sample(Some(number));
        if self.is_alone(number) {
            // Half of it: the daemon's next order may be a moment early by the clock here.
            let later = self.now() + nanos(LATER / 2);
            if let (Some(daemon), Some(vm)) = (&self.daemon, self.vms.get_mut(&number)) {
                vm.deferral.wants(0);
                vm.later = later;
                daemon.defer(number, LATER);
            }
            return;
        }
        let Some(vm) = self.vms.get_mut(&number) else { return };
        match vm.begin(now, &mut self.journal, it.wish, allowed) {
            Ok(()) => {
                if let Some(account) = &mut vm.account {
                    account.numbers.boosts += 1;
                }
            }
            Err(why) => {
                vm.failed = Some((now + nanos(FAILED), why.clone()));
                refuse(vm, why);
            }
        }
    }

    /// Nobody else wants its cores, at the last sample and lately: a boost would only cost it two
    /// changes of class. Of VMs whose threads come and go nobody knows.
    fn is_alone(&self, number: u16) -> bool {
        let Some(vm) = self.vms.get(&number) else { return false };
        let mut near = self.vms.values().filter(|it| meet(&vm.cpus, &it.cpus));
        vm.is_alone() && !near.any(|it| it.comes_and_goes)
    }

    /// Looks who wants which core, and brings the lags of all VMs up to this moment, or that of
    /// `only` one, whose mode changes: then those alone are looked at that may have its cores.
    fn sample(&mut self, only: Option<u16>) {
        let now = self.now();
        let near = only.and_then(|number| self.vms.get(&number)).map(|vm| vm.cpus.clone());
        let is_near = |vm: &Vm| near.as_ref().is_none_or(|cpus| meet(cpus, &vm.cpus));
        let near = self.vms.iter().filter(|(_, vm)| is_near(vm));
        let crowds: Vec<_> = near.map(|(&number, vm)| (number, vm.crowds())).collect();
        let mut all = BTreeMap::<usize, u32>::new();
        for (&core, &own) in crowds.iter().flat_map(|(_, (own, _))| own) {
            *all.entry(core).or_default() += own;
        }
        let on = |core: &usize| all.get(core).copied().unwrap_or_default();
        let busy = self.vms.values().filter(|vm| vm.mode != Mode::Normal);
        let busy: Vec<usize> = busy.flat_map(|vm| vm.cpus.clone()).collect();
        for (number, (own, last)) in &crowds {
            let Some(vm) = self.vms.get_mut(number) else { continue };
            let busy = meet(&busy, &vm.cpus);
            if only.is_none_or(|only| only == *number) {
                let crowds = own.iter().map(|(core, &own)| (own, on(core)));
                vm.note(now, Share::new(crowds, on(last)), busy);
            } else if busy {
                vm.lag.see_busy(now);
            }
        }
        if only.is_none() {
            let cost = self.now().saturating_sub(now);
            self.sample_at = now + nanos(ACCOUNT).max(cost * SAMPLES_PART);
        }
    }

    /// Looks at boosts and payments, and now and then at everything else.
    fn look(&mut self, now: u64) -> Result<()> {
        let is_active = |vm: &Vm| vm.mode != Mode::Normal || vm.lag.is_active(now);
        if now >= self.sample_at && self.vms.values().any(is_active) {
            self.sample(None);
        }
        let numbers: Vec<u16> = self.vms.keys().copied().collect();
        for number in numbers {
            let Some(vm) = self.vms.get_mut(&number) else { continue };
            match vm.mode {
                Mode::Favoured => {
                    if let Some(ended) = vm.check_boost(now, &mut self.journal) {
                        self.end(now, number, ended);
                    }
                }
                Mode::Normal if !vm.deferral.is_begun() => {}
                Mode::Paying | Mode::Normal => {
                    if let Err(why) = vm.check_payment(now, &mut self.journal) {
                        refuse(vm, why);
                    }
                }
            }
        }
        self.serve(now);
        let due = self.judged_at.is_none_or(|at| now >= at + nanos(JUDGE));
        if due && self.daemon.is_some() {
            self.judged_at = Some(now);
            self.judge();
        }
        Ok(())
    }

    fn end(&mut self, now: u64, number: u16, ended: Ended) {
        if self.vms.get(&number).is_none_or(|vm| vm.boost.is_none()) {
            return;
        }
        self.sample(Some(number));
        let Some(vm) = self.vms.get_mut(&number) else { return };
        if let Some(boost) = vm.boost.filter(|_| ended == Ended::Neighbours) {
            vm.waits = Some(Waiting { wish: boost.wish, since: now, counted: true });
        }
        let used = match vm.end(now, &mut self.journal, ended) {
            Ok(used) => used,
            Err(why) => return refuse(vm, why),
        };
        let (cpus, n) = (vm.cpus.clone(), vm.lag.competitors());
        for other in self.vms.values_mut().filter(|other| meet(&cpus, &other.cpus)) {
            other.row.note(now, used, n);
        }
    }

    /// The other VMs on its cores.
    fn neighbours_of(&self, number: u16) -> Neighbours {
        let mut all =
            Neighbours { unpaid_ns: 0, none_has_boost: true, favoured: false, seen_ns: 0 };
        let Some(vm) = self.vms.get(&number) else { return all };
        let others = self.vms.iter().filter(|(other, _)| **other != number);
        let others = others.map(|(_, it)| it).filter(|it| meet(&vm.cpus, &it.cpus));
        for other in others.filter(|it| it.account.is_some()) {
            all.none_has_boost = false;
            all.unpaid_ns += other.unpaid_ns();
            if let Some(boost) = &other.boost {
                all.favoured = true;
                all.unpaid_ns += boost.allowance.cpu_ns.saturating_sub(boost.seen_ns);
                all.seen_ns += boost.seen_ns;
            }
        }
        all
    }

    /// Judges which VMs may be boosted, and by which means.
    fn judge(&mut self) {
        let (now, worker) = (self.now(), self.worker.as_ref().map_or(0, |it| it.tid));
        for vm in self.vms.values_mut() {
            vm.find_holder(now, worker);
            vm.look(self.hierarchy.as_ref());
        }
        self.sample(None);
        let dirs: Vec<(u16, Option<PathBuf>)> =
            self.vms.iter().map(|(number, vm)| (*number, vm.dir.clone())).collect();
        let (worker_cpus, worker_class) = self.worker_terms();
        for (number, vm) in self.vms.iter_mut().filter(|(_, vm)| vm.account.is_some()) {
            let others = dirs.iter().filter(|(other, _)| other != number);
            let others = others.filter_map(|(_, dir)| dir.as_deref());
            let mut judged = vm.judge(self.hierarchy.as_ref(), others);
            let above =
                worker_class.is_some_and(|it| it.is_real_time() && it.priority >= WORKER_PRIORITY);
            if !above && meet(&worker_cpus, &vm.cpus) {
                judged =
                    Err("the daemon's worker may run on its cores: pin them apart (daemon.cpu), \
                              or set daemon.rt_priority = 2"
                        .into());
            }
            if let Some(why) = &self.refused {
                judged = Err(why.clone());
            }
            match judged {
                Ok(means) => {
                    if vm.mode == Mode::Normal {
                        vm.means = Some(means);
                    }
                    if let (Some(account), Some(means)) = (&mut vm.account, &vm.means) {
                        account.numbers.means = means.label().into();
                        account.numbers.refused.clear();
                    }
                }
                Err(why) => {
                    if let Err(e) = vm.set(&mut self.journal, Mode::Normal) {
                        eprintln!("{}: {e}", vm.name);
                    }
                    vm.boost = None;
                    refuse(vm, why);
                }
            }
        }
    }

    /// The worker's cores and class.
    fn worker_terms(&self) -> (Vec<usize>, Option<Class>) {
        let Some(worker) = &self.worker else { return (Vec::new(), None) };
        let set = Pid::from_raw(worker.tid).map(|tid| sched_getaffinity(Some(tid)));
        let Some(Ok(set)) = set else { return (Vec::new(), None) };
        let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
        (cpus, worker.thread.stat().ok().map(|stat| stat.class))
    }

    /// Tells the daemon the accounts that have changed.
    fn tell(&mut self, now: u64) {
        if now < self.told_at + nanos(TELL) {
            return;
        }
        self.told_at = now;
        let Some(daemon) = &mut self.daemon else { return };
        for (&vm, it) in &mut self.vms {
            let (n, unpaid_ns) = (it.lag.competitors(), it.unpaid_ns());
            let Some(account) = &mut it.account else { continue };
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "few")]
            let percent = (n * 10.0).round() as u64 * 10; // so that it does not change all the time
            account.numbers.competitors_percent = percent;
            account.numbers.unpaid_us = unpaid_ns / 1000;
            daemon.tell(vm, &account.numbers);
        }
    }

    fn forget(&mut self, number: u16) {
        if let Some(mut vm) = self.vms.remove(&number)
            && let Err(e) = vm.set(&mut self.journal, Mode::Normal)
        {
            eprintln!("{}: {e}", vm.name);
        }
    }

    /// Nobody is favoured, and nobody pays.
    fn take_back(&mut self) {
        let now = self.now();
        for vm in self.vms.values_mut() {
            vm.waits = None;
            vm.deferral = Deferral::default();
            if let Err(e) = vm.end(now, &mut self.journal, Ended::TakenBack) {
                eprintln!("{}: {e}", vm.name);
            }
            if let Err(e) = vm.set(&mut self.journal, Mode::Normal) {
                eprintln!("{}: {e}", vm.name);
            }
        }
    }

    /// Nothing of the daemon's orders holds any more.
    fn lose_daemon(&mut self) {
        self.take_back();
        self.vms.clear();
        self.daemon = None;
        if let Some(Worker { given: Some(place), thread, .. }) = self.worker.take() {
            if let Ok(stat) = thread.stat()
                && let Err(e) = Entry::of_thread(thread.id, stat.class).take_back()
            {
                eprintln!("the worker: {e}");
            }
            self.journal.clear(place);
        }
    }
}

/// It is not boosted, for this reason.
fn refuse(vm: &mut Vm, why: String) {
    vm.deferral = Deferral::default(); // a VM that is not boosted does not begin to pay
    if let Some(account) = &mut vm.account
        && account.numbers.refused != why
    {
        eprintln!("{} is not boosted: {why}", vm.name);
        account.numbers.refused = why;
    }
}

fn meet(a: &[usize], b: &[usize]) -> bool {
    a.iter().any(|cpu| b.contains(cpu))
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Report {
    /// As it is sent.
    fn packet(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Budget;

    #[test]
    fn bst_03_a_vm_that_is_refused_does_not_begin_to_pay() {
        let budget = Budget { cpu_us: 15_000, window_us: 90_000 };
        let pid = std::process::id().cast_signed();
        let mut vm = Vm::new(0, "vm".into(), pid, Some(budget), None);
        vm.deferral.wants(1_000_000);
        vm.deferral.on_empty(0);
        assert!(vm.deferral.lasts(0));
        refuse(&mut vm, "it has a quota".into());
        assert!(!vm.deferral.is_begun());
    }
}
