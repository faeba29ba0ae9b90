//! The acts: a VM's threads, or its cgroup, are favoured, pay back, or are as before.

use std::fs::{read_to_string, write};
use std::io;

use crate::BOOST_PRIORITY;
use crate::journal::{
    Entry, Journal, NICE_LOW, Place, RAISED_MAX, check_plain, set_nice, unless_gone,
};
use crate::layout::Means;
use crate::process::{Thread, Turns};
use crate::sys::{Class, set_class};

/// How a VM runs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Mode {
    /// As it would without boost.
    #[default]
    Normal,
    /// Before its neighbours.
    Favoured,
    /// After its neighbours.
    Paying,
}

/// A vCPU's thread, and how it runs.
#[derive(Debug)]
pub(crate) struct Vcpu {
    pub(crate) thread: Thread,
    place: Option<Place>,
    is_low: bool,
    /// By so much its nice value is lower than before; see [`Self::push`].
    raised: i32,
    /// CPU time that it had when it was last looked at whether it runs.
    used_ns: u64,
    /// Its turns when they were last asked for.
    pub(crate) had: Turns,
}

impl Vcpu {
    pub(crate) fn new(thread: Thread) -> Self {
        let mut new = Self {
            thread,
            place: None,
            is_low: false,
            raised: 0,
            used_ns: 0,
            had: Turns::default(),
        };
        new.turns();
        new
    }

    /// Its turns on its core; of a thread that has ended, the last that was seen.
    pub(crate) fn turns(&mut self) -> Turns {
        self.had = self.thread.turns().unwrap_or(self.had);
        self.had
    }

    /// Brings it into `mode`. Errors: words for the operator; it is as it was, or gone.
    pub(crate) fn set(&mut self, journal: &mut Journal, mode: Mode) -> Result<(), String> {
        let Ok(stat) = self.thread.stat() else {
            self.forget(journal);
            return Ok(());
        };
        let favoured = Class::round_robin(BOOST_PRIORITY);
        let is_favoured = self.place.is_some() && stat.class == favoured;
        if !is_favoured && mode != Mode::Normal {
            check_plain(&stat, self.is_low)?;
        }
        if mode != Mode::Normal && self.place.is_none() {
            let put = journal.put(&Entry::of_thread(self.thread.id, favoured));
            self.place = Some(put.map_err(|e| format!("the journal cannot be written: {e}"))?);
        }
        let tid = self.thread.id.tid;
        let explain = |e: io::Error| match e.raw_os_error() {
            Some(libc::EPERM) => {
                "the kernel refuses a real-time class here (RT_GROUP_SCHED, or no CAP_SYS_NICE)"
                    .into()
            }
            _ => format!("thread {tid} cannot be favoured: {e}"),
        };
        let class = match (mode, is_favoured) {
            (Mode::Favoured, false) => unless_gone(set_class(tid, favoured)),
            (Mode::Normal | Mode::Paying, true) => unless_gone(set_class(tid, Class::NORMAL)),
            _ => Ok(()),
        };
        class.map_err(explain)?;
        // While it is favoured, nice has no effect: it stays, for what is still to be paid.
        let low = mode == Mode::Paying || mode == Mode::Favoured && self.is_low;
        if low != self.is_low {
            unless_gone(set_nice(tid, if low { NICE_LOW } else { 0 })).map_err(explain)?;
            self.is_low = low;
        }
        if mode == Mode::Normal {
            self.calm(journal).map_err(explain)?;
            self.forget(journal);
        }
        Ok(())
    }

    /// Where its cgroup's weight is raised, the kernel does not look whether it should run now
    /// until the next tick, which has up to 10 ms. It does so when a waiting thread's nice value is
    /// lowered (`prio_changed_fair`, kernel/sched/fair.c). At that moment the thread may have had
    /// more than its share lately, so this is done again and again until it has run. The nice value
    /// stays until the boost ends: for a running thread whose nice value is raised the kernel looks
    /// at once, too, and another cgroup might get the core. Inside its own cgroup the thread
    /// competes with the VMM's other threads at most. `first`: now it is favoured.
    /// Errors: words for the operator.
    pub(crate) fn push(&mut self, journal: &mut Journal, first: bool) -> Result<(), String> {
        let Ok(stat) = self.thread.stat() else { return Ok(()) };
        let used_ns = self.thread.used().unwrap_or_default();
        let has_run = std::mem::replace(&mut self.used_ns, used_ns) != used_ns && !first;
        if has_run || !stat.is_runnable() || self.raised >= RAISED_MAX {
            return Ok(());
        }
        if self.place.is_none() {
            check_plain(&stat, false)?;
            let put = journal.put(&Entry::of_thread(self.thread.id, Class::NORMAL));
            self.place = Some(put.map_err(|e| format!("the journal cannot be written: {e}"))?);
        }
        self.raised += 1;
        let tid = self.thread.id.tid;
        let raised = unless_gone(set_nice(tid, -self.raised));
        raised.map_err(|e| format!("thread {tid} cannot be favoured: {e}"))
    }

    /// It is not pushed any more. The kernel looks at once whether another one should run.
    pub(crate) fn calm(&mut self, journal: &mut Journal) -> io::Result<()> {
        if self.raised > 0 {
            unless_gone(set_nice(self.thread.id.tid, 0))?;
            self.forget(journal);
        }
        Ok(())
    }

    fn forget(&mut self, journal: &mut Journal) {
        (self.is_low, self.raised) = (false, 0);
        if let Some(place) = self.place.take() {
            journal.clear(place);
        }
    }
}

/// A cgroup's weight, while it is not as before.
#[derive(Debug)]
pub(crate) struct Weighed {
    before: u32,
    place: Place,
}

/// A VM that pays by weight has one part in so many of its own. With the lowest weight that there
/// is (2 of 1,024) the kernel gave it hardly a turn for long after the payment: 16 to 25 % of a
/// core instead of 33 (Linux 6.18).
const PAYING_PART: u32 = 10;

/// Brings the cgroup of `means` into `mode`. Errors: words for the operator.
pub(crate) fn weigh(
    journal: &mut Journal,
    means: &Means,
    state: &mut Option<Weighed>,
    mode: Mode,
) -> Result<(), String> {
    let Means::Weight { file, high, low } = means else { return Ok(()) };
    let explain = |e: io::Error| format!("{}: {e}", file.display());
    if mode == Mode::Normal {
        let Some(weighed) = state.take() else { return Ok(()) };
        match write(file, weighed.before.to_string()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                *state = Some(weighed);
                return Err(explain(e));
            }
            _ => {
                journal.clear(weighed.place);
                return Ok(());
            }
        }
    }
    let before = if let Some(weighed) = state {
        weighed.before
    } else {
        let text = read_to_string(file).map_err(explain)?;
        let before = text.trim().parse().map_err(|_| format!("{}: {text}", file.display()))?;
        let put = journal.put(&Entry::Weight { file: file.clone(), value: before });
        let place = put.map_err(|e| format!("the journal cannot be written: {e}"))?;
        *state = Some(Weighed { before, place });
        before
    };
    let weight = if mode == Mode::Favoured { *high } else { (before / PAYING_PART).max(*low) };
    write(file, weight.to_string()).map_err(explain)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::process::{Identity, Stat};

    /// Linux is at least this one.
    fn is_since(major: u32, minor: u32) -> bool {
        let release = read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut parts = release.split(['.', '-']).map_while(|part| part.parse().ok());
        parts.next().zip(parts.next()) >= Some((major, minor))
    }

    #[test]
    fn bst_02_a_vm_that_pays_by_weight_has_a_tenth_of_its_own() {
        let dir = std::env::temp_dir().join(format!("np-boost-weigh-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("cpu.shares");
        let mut journal = Journal::open(&dir.join("journal")).unwrap();
        let means = Means::Weight { file: file.clone(), high: 262_144, low: 2 };
        for (own, pays) in [("1024", "102"), ("15", "2")] {
            std::fs::write(&file, own).unwrap();
            let mut state = None;
            let modes = [Mode::Favoured, Mode::Paying, Mode::Favoured, Mode::Normal];
            let weights = modes.map(|mode| {
                weigh(&mut journal, &means, &mut state, mode).unwrap();
                read_to_string(&file).unwrap()
            });
            assert_eq!(weights, ["262144", pays, "262144", own]);
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn bst_02_a_change_of_class_brings_the_cpu_time_of_a_running_thread_up_to_date() {
        if !is_since(6, 12) {
            eprintln!("SKIPPED: exact CPU times of running threads need Linux 6.12");
            return; // before, they are as old as the tick
        }
        let (tid, stops) = (AtomicI32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                tid.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Release);
                while !stops.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let tid = loop {
                match tid.load(Ordering::Acquire) {
                    0 => std::thread::yield_now(),
                    tid => break tid,
                }
            };
            let pid = std::process::id().cast_signed();
            let id = Identity { pid, tid, start: Stat::of(tid).unwrap().start };
            let vcpu = Vcpu::new(Thread::open(id).unwrap());
            let used = || vcpu.thread.used().unwrap();
            // A tick has 1 to 10 ms, so it comes in few rounds; and on a busy machine the thread
            // runs in few. Without new times one in 150 would be newer.
            let newer = (0..2000).filter(|_| {
                set_class(tid, Class::NORMAL).unwrap();
                let begin = Instant::now();
                while begin.elapsed() < Duration::from_micros(200) {}
                let before = used();
                set_class(tid, Class::NORMAL).unwrap();
                used() > before
            });
            let newer = newer.take(60).count();
            stops.store(true, Ordering::Relaxed);
            assert_eq!(newer, 60);
        });
    }
}
