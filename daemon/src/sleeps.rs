//! Finds the VM for whose memory a worker waits.
//!
//! An access to guest memory is no system call, and still it can wait inside the kernel. While a
//! VMM punches a hole over its memory, an access to a page of that hole waits, and no signal ends
//! the wait (Linux, `mm/shmem.c`, `shmem_falloc_wait`; 0.2 s for 256 MiB). Nothing can be done
//! against the first time. To keep such waits few, the watchdog finds out whose memory it was.
//!
//! Each worker marks its accesses with the VM ([`part`]). When a turn takes long, the watchdog asks
//! the kernel for the worker's state. If it is in an uninterruptible sleep at two looks in a row,
//! in the same turn and the same VM's part, that VM has made it wait for the time between the two.
//! A worker that has lost its core, is stopped by a signal or traced is in another state, however
//! long that lasts. So no VM is blamed for the load of a host.
//!
//! Clearing a page of 1 GiB that is touched for the first time counts too ([`note_clearing`]), and
//! so do hundreds of small ones for a single frame ([`note_fresh_pages`]).
//!
//! Three sleeps do not count: one with a major fault (the host has swapped the memory out), one
//! while a thread of the daemon unmaps memory (page faults of older kernels wait for that), and one
//! that is over before the second look.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use nightporter_core::time::{Duration, Instant};

use crate::faults;
use crate::watched::{Apart, Watched};

/// For each worker the VM of the current part; 0: none.
static PARTS: [Apart<AtomicU64>; Watched::ALL.len()] =
    [const { Apart(AtomicU64::new(0)) }; Watched::ALL.len()];
/// Threads that unmap memory.
static UNMAPPING: AtomicUsize = AtomicUsize::new(0);
/// For each worker the findings that it has not read yet.
static FOUND: [Apart<Mutex<Vec<Slept>>>; Watched::ALL.len()] =
    [const { Apart(Mutex::new(Vec::new())) }; Watched::ALL.len()];

/// The calling worker may touch memory of a VM as long as this lives.
#[derive(Debug)]
pub(crate) struct Part(());

/// The calling worker is about to touch memory of the VM whose account has this number.
#[inline]
pub(crate) fn part(vm: u64) -> Part {
    Watched::own(&PARTS).store(vm, Ordering::Relaxed);
    Part(())
}

impl Drop for Part {
    #[inline]
    fn drop(&mut self) {
        Watched::own(&PARTS).store(0, Ordering::Relaxed);
    }
}

/// Drops a value whose end unmaps memory.
pub(crate) fn unmap<T>(thing: T) {
    UNMAPPING.fetch_add(1, Ordering::Relaxed);
    drop(thing);
    UNMAPPING.fetch_sub(1, Ordering::Relaxed);
}

/// The memory of a VM made the worker sleep.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Slept {
    /// The number of its account.
    pub(crate) vm: u64,
    /// At least so long.
    pub(crate) time: Duration,
}

/// Less than this is spent on a page that was there.
const CLEARING: Duration = Duration::from_millis(1);

/// It took so long until a page of gigabytes of the VM of the current part could be touched.
pub(crate) fn note_clearing(time: Duration) {
    if time > CLEARING {
        note(time);
    }
}

/// A frame of the VM of the current part lay in more pages that nobody had touched than that of an
/// honest one can, and it took so long until they were there.
pub(crate) fn note_fresh_pages(time: Duration) {
    note(time);
}

/// The VM of the calling worker's current part made it sleep for so long.
fn note(time: Duration) {
    let vm = Watched::own(&PARTS).load(Ordering::Relaxed);
    find(Watched::here(), Slept { vm, time });
}

fn find(worker: Watched, slept: Slept) {
    worker.of(&FOUND).lock().unwrap_or_else(PoisonError::into_inner).push(slept);
    faults::raise();
}

/// The findings about the calling worker since its last call.
pub(crate) fn take() -> Vec<Slept> {
    std::mem::take(&mut *Watched::own(&FOUND).lock().unwrap_or_else(PoisonError::into_inner))
}

/// A worker's state by the kernel (proc(5), `/proc/pid/stat`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct State {
    /// It is in an uninterruptible sleep.
    sleeps: bool,
    /// Pages that had to be read from somewhere, so far.
    major_faults: u64,
}

fn parse(stat: &str) -> Option<State> {
    // The name before it may hold anything, also parentheses.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let sleeps = fields.next()? == "D";
    Some(State { sleeps, major_faults: fields.nth(8)?.parse().ok()? })
}

/// The file with the kernel's view of a worker.
#[derive(Debug)]
pub(crate) struct Eye(File);

impl Eye {
    /// On the calling thread. Errors: there is no `/proc`.
    pub(crate) fn open() -> io::Result<Self> {
        let id = rustix::thread::gettid().as_raw_nonzero();
        File::open(format!("/proc/self/task/{id}/stat")).map(Self)
    }

    fn look(&self) -> Option<State> {
        let (mut bytes, mut file) = ([0; 1024], &self.0);
        file.rewind().ok()?;
        let len = file.read(&mut bytes).ok()?;
        parse(str::from_utf8(&bytes[..len]).ok()?)
    }
}

/// A sleep that is being watched.
#[derive(Clone, Copy, Debug)]
struct Sleep {
    turn: u64,
    vm: u64,
    /// The first and the last look at it.
    seen: [Instant; 2],
    /// Before it.
    major_faults: u64,
}

/// See the module's doc.
#[derive(Debug)]
pub(crate) struct Witness {
    worker: Watched,
    eye: Option<Eye>,
    sleep: Option<Sleep>,
}

impl Witness {
    /// Of this worker. Without an eye it sees nothing.
    pub(crate) const fn new(worker: Watched) -> Self {
        Self { worker, eye: None, sleep: None }
    }

    /// It sees by this eye from now on.
    pub(crate) fn open(&mut self, eye: Eye) {
        self.eye = Some(eye);
    }

    /// Looks at the turn with this number, if there is one that may be long. `turn_now` gives the
    /// number of the present turn.
    pub(crate) fn look(&mut self, now: Instant, turn: Option<u64>, turn_now: impl Fn() -> u64) {
        let part = self.worker.of(&PARTS);
        let vm = part.load(Ordering::Relaxed);
        let turn = turn.filter(|_| vm != 0);
        if turn.is_none() && self.sleep.is_none() {
            return;
        }
        let Some(state) = self.eye.as_ref().and_then(Eye::look) else { return };
        let is_same = |turn: &u64| turn_now() == *turn && part.load(Ordering::Relaxed) == vm;
        let is_ours = UNMAPPING.load(Ordering::Relaxed) > 0;
        let turn = turn.filter(|turn| state.sleeps && !is_ours && is_same(turn));
        if let Some(slept) = self.judge(now, turn.map(|turn| (turn, vm)), state.major_faults) {
            find(self.worker, slept);
        }
    }

    /// The worker sleeps in this turn and VM's part, or in none. Returns the sleep that is over
    /// now, if it counts.
    fn judge(
        &mut self,
        now: Instant,
        asleep: Option<(u64, u64)>,
        major_faults: u64,
    ) -> Option<Slept> {
        if let Some(sleep) = &mut self.sleep
            && Some((sleep.turn, sleep.vm)) == asleep
        {
            sleep.seen[1] = now;
            return None;
        }
        let seen = [now; 2];
        let next = asleep.map(|(turn, vm)| Sleep { turn, vm, seen, major_faults });
        let Sleep { vm, seen: [first, last], major_faults: before, .. } =
            std::mem::replace(&mut self.sleep, next)?;
        (last > first && before == major_faults).then(|| Slept { vm, time: last.since(first) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_secs(1000) + Duration::from_millis(ms)
    }

    #[test]
    fn a_sleep_counts_if_it_is_seen_twice_in_the_same_part_of_the_same_turn() {
        let mut witness = Witness::new(Watched::Frames);
        let mut see = |ms, asleep, faults| witness.judge(at(ms), asleep, faults);
        let (mine, next_turn, other) = (Some((1, 7)), Some((2, 7)), Some((2, 8)));
        assert_eq!(see(0, mine, 3), None);
        assert_eq!(see(2, None, 3), None, "seen once");
        for (ms, asleep) in [(10, mine), (15, mine), (20, next_turn), (21, other)] {
            let slept = (ms == 20).then(|| Slept { vm: 7, time: Duration::from_millis(5) });
            assert_eq!(see(ms, asleep, 3), slept);
        }
        assert_eq!(see(30, other, 3), None, "it is not over");
        assert_eq!(see(31, None, 4), None, "the host had swapped it out");
    }

    #[test]
    fn the_kernel_is_understood() {
        let line = "4711 (np) D (x)) D 1 4711 4711 0 -1 4194304 1234 5 17 6 0 0";
        assert_eq!(parse(line), Some(State { sleeps: true, major_faults: 17 }));
        let line = "4711 (nightporterd) R 1 4711 4711 0 -1 4194304 1234 5 17 6 0 0";
        assert_eq!(parse(line), Some(State { sleeps: false, major_faults: 17 }));
        assert_eq!(parse("4711 (nightporterd) R 1"), None);
        let eye = Eye::open().unwrap();
        assert!(eye.look().is_some_and(|state| !state.sleeps), "whoever looks is awake");
    }
}
