//! `nightporter advise`: how long the vCPUs of this host's VMs wait for a core, from `/proc` alone,
//! and what ack offload would gain by that. docs/advise.md has the arithmetic.

mod find;
mod report;

use std::fs::read_to_string;
use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use find::{Found, Vmm, Why};
use nightporter_boost::process::{Process, Thread, Turns};
use report::{Report, VcpuReport, VmReport};

use crate::print;

/// Time between two looks at all threads: a wait that spans looks is still counted as one, because
/// the kernel adds it when it ends. For each hundred threads it is as much longer.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Processes of a user-mode Linux come and go: they are looked for so often.
const SEARCH_EVERY: Duration = Duration::from_millis(200);

/// For how long to look.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How long to look: 5s, 500ms, 2min.
    #[arg(long = "for", value_name = "TIME", default_value = "5s", value_parser = span)]
    span: Duration,
}

/// A time as people write it: a whole number and `ms`, `s` or `min`.
pub(crate) fn span(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1_000,
        "min" => 60_000,
        _ => 0,
    };
    let ms = number.parse().ok().and_then(|n: u64| n.checked_mul(unit_ms));
    ms.filter(|ms| (1..=86_400_000).contains(ms))
        .map(Duration::from_millis)
        .ok_or_else(|| "write 5s, 500ms or 2min; one day at most".into())
}

/// Looks for a while, and shows what was seen.
pub(crate) fn advise(json: bool, options: &Options) -> Result<()> {
    check_kernel(&read_to_string("/proc/self/schedstat").unwrap_or_default())?;
    let mut survey = Survey::begin(find::all());
    let (begun, mut searched) = (Instant::now(), Instant::now());
    let threads: usize = survey.vms.iter().map(|vm| vm.threads.len()).sum();
    let interval = LOOK_EVERY * u32::try_from(1 + threads / 100).unwrap_or(u32::MAX);
    while let Some(left) = options.span.checked_sub(begun.elapsed()).filter(|_| threads > 0) {
        thread::sleep(interval.min(left));
        if searched.elapsed() >= SEARCH_EVERY {
            searched = Instant::now();
            survey.search();
        }
        survey.look();
    }
    let report = survey.end(begun.elapsed());
    print(json, &report, |out| report::show(out, &report))
}

/// The kernel must count waits: this process has had turns.
fn check_kernel(schedstat: &str) -> Result<()> {
    if Turns::parse(schedstat).is_none_or(|turns| turns.count == 0) {
        bail!(
            "this kernel does not count how long threads wait for a core\n    \
             fix: use one with CONFIG_SCHEDSTATS, or boot it with delayacct"
        );
    }
    Ok(())
}

/// A thread that counts for a vCPU.
#[derive(Debug)]
struct Watched {
    thread: Thread,
    /// Its vCPU, by place in [`Vm::vcpus`].
    vcpu: usize,
    last: Turns,
    /// It was runnable at the first look and has had no turn since: it waits all the time.
    starves: bool,
}

/// Sums over the turns of a vCPU.
#[derive(Clone, Debug, Default)]
struct Vcpu {
    tid: i32,
    name: String,
    sums: Turns,
    /// Of the waits w the sum of w², in ns²: of those between two looks as if they were equal.
    squares: f64,
}

/// One VM while it is looked at.
#[derive(Debug)]
struct Vm {
    vmm: Vmm,
    process: Option<Process>,
    threads: Vec<Watched>,
    vcpus: Vec<Vcpu>,
    /// One vCPU is several processes, which come and go: a user-mode Linux.
    comes_and_goes: bool,
    why_not: Option<Why>,
}

/// All VMs while they are looked at: begin, then look and search at any times, then end.
#[derive(Debug)]
struct Survey {
    vms: Vec<Vm>,
    hidden: bool,
}

impl Survey {
    fn begin(found: Found) -> Self {
        let vms = found.vmms.into_iter().filter_map(Vm::begin).collect();
        Self { vms, hidden: found.hidden }
    }

    /// Reads the counts of all threads.
    fn look(&mut self) {
        for vm in &mut self.vms {
            vm.look();
        }
    }

    /// Looks for processes that have begun meanwhile.
    fn search(&mut self) {
        for vm in self.vms.iter_mut().filter(|vm| vm.comes_and_goes) {
            vm.search(false);
        }
    }

    /// The report of so much time.
    fn end(mut self, time: Duration) -> Report {
        self.look();
        let vms = self.vms.into_iter().map(|vm| vm.end(time)).collect();
        Report { seconds: time.as_secs_f64(), hidden: self.hidden, vms }
    }
}

impl Vm {
    /// `None`: the process is no VM, or has ended.
    fn begin(vmm: Vmm) -> Option<Self> {
        let opened = Process::open(vmm.pid);
        let mut vm = Self {
            vmm,
            process: None,
            threads: Vec::new(),
            vcpus: Vec::new(),
            comes_and_goes: false,
            why_not: None,
        };
        match opened {
            Ok(process) => vm.process = Some(process),
            Err(e) if e.kind() == ErrorKind::PermissionDenied => vm.why_not = Some(Why::Rights),
            Err(_) => return None,
        }
        vm.search(true);
        let is_vm = !vm.threads.is_empty() || vm.why_not.is_some();
        is_vm.then_some(vm)
    }

    /// Opens the threads of its vCPUs that are not open yet. `first`: they count from now on; those
    /// that are found later have begun meanwhile.
    fn search(&mut self, first: bool) {
        let Some(process) = &self.process else { return };
        let (ids, comes_and_goes) = match process.vcpus(None) {
            Ok(found) => found,
            Err(_) if first => {
                let readable = std::fs::read_dir(format!("/proc/{}/task", self.vmm.pid));
                self.why_not = match readable {
                    Err(e) if e.kind() == ErrorKind::PermissionDenied => Some(Why::Rights),
                    Ok(_) if self.vmm.kind.is_qemu() && process.is_alive() => Some(Why::Names),
                    _ => None,
                };
                return;
            }
            Err(_) => return,
        };
        if comes_and_goes != self.vmm.kind.is_user_mode() {
            return; // a program that only has such a name
        }
        self.comes_and_goes = comes_and_goes;
        for id in ids {
            if self.threads.iter().any(|it| it.thread.id == id) {
                continue;
            }
            let Ok(thread) = Thread::open(id) else { continue };
            let (Ok(turns), Ok(stat)) = (thread.turns(), thread.stat()) else { continue };
            if !self.comes_and_goes || self.vcpus.is_empty() {
                let name = stat.comm.clone();
                self.vcpus.push(Vcpu { tid: id.tid, name, ..Vcpu::default() });
            }
            let last = if first { turns } else { Turns::default() };
            let vcpu = self.vcpus.len() - 1;
            let starves = first && stat.is_runnable();
            self.threads.push(Watched { thread, vcpu, last, starves });
        }
    }

    fn look(&mut self) {
        for it in &mut self.threads {
            // Of a thread that has ended the counts so far stay.
            let Ok(now) = it.thread.turns() else {
                it.starves = false;
                continue;
            };
            let vcpu = &mut self.vcpus[it.vcpu];
            vcpu.add(it.last, now);
            it.starves &= now.count == it.last.count && now.ran_ns == it.last.ran_ns;
            it.last = now;
        }
        if self.comes_and_goes {
            self.threads.retain(|it| it.thread.turns().is_ok());
        }
    }

    fn end(mut self, time: Duration) -> VmReport {
        let time_ns = time.as_nanos() as f64;
        for it in &self.threads {
            let waits = it.starves && it.thread.stat().is_ok_and(|stat| stat.is_runnable());
            if waits {
                let vcpu = &mut self.vcpus[it.vcpu];
                vcpu.sums.waited_ns += u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
                vcpu.squares += time_ns * time_ns;
            }
        }
        let ended = self.process.as_ref().is_some_and(|process| !process.is_alive());
        let vcpus = self.vcpus.iter().map(|vcpu| vcpu.report(time)).collect();
        VmReport::new(self.vmm, vcpus, if ended { Some(Why::Ended) } else { self.why_not })
    }
}

impl Vcpu {
    /// A thread's counts were `last`, and are `now`.
    fn add(&mut self, last: Turns, now: Turns) {
        let turns = now.count.saturating_sub(last.count);
        let waited = now.waited_ns.saturating_sub(last.waited_ns);
        self.sums.ran_ns += now.ran_ns.saturating_sub(last.ran_ns);
        self.sums.waited_ns += waited;
        self.sums.count += turns;
        if turns > 0 {
            self.squares += (waited as f64).powi(2) / turns as f64;
        }
    }

    fn report(&self, time: Duration) -> VcpuReport {
        let (time_ns, waited) = (time.as_nanos() as f64, self.sums.waited_ns as f64);
        let over = |sum: f64, by: f64| if by > 0.0 { sum / by } else { 0.0 };
        // A user-mode Linux' processes may wait at the same time.
        let share = |sum: f64| over(sum, time_ns).min(1.0);
        VcpuReport {
            tid: self.tid,
            name: self.name.clone(),
            ran_share: share(self.sums.ran_ns as f64),
            waited_share: share(waited),
            turns_per_s: over(self.sums.count as f64, time_ns / 1e9),
            mean_wait_ms: over(waited, (self.sums.count as f64).max(1.0)) / 1e6,
            typical_wait_ms: over(self.squares, waited) / 1e6,
            late_ms: over(self.squares, 2.0 * time_ns) / 1e6,
        }
    }
}

#[cfg(test)]
mod tests;
