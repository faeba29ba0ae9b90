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
//!
//! Nor does a sleep count while the other worker was already asleep for another VM. A page fault of
//! some kernels sleeps with the lock of the address space held (Linux, `mmap_lock`; hugetlb), and
//! then the other worker's mapping waits for that lock, and its page faults behind it. So of two
//! sleeps the one counts that was seen first, or, of two seen by the same look, that of the turn
//! which began first. The other one counts from when it is alone.

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

/// Memory is unmapped meanwhile.
pub(crate) fn excuse(unmaps: impl FnOnce()) {
    UNMAPPING.fetch_add(1, Ordering::Relaxed);
    unmaps();
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
    /// The first look at it.
    since: Instant,
    /// The other worker was asleep before, for another VM.
    is_behind: bool,
    /// The look from which on it counts, and the last one at it.
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
    /// By the last look: the turn and the VM's part in which it sleeps, and its major faults.
    last: (Option<(u64, u64)>, u64),
}

impl Witness {
    /// Of this worker. Without an eye it sees nothing.
    pub(crate) const fn new(worker: Watched) -> Self {
        Self { worker, eye: None, sleep: None, last: (None, 0) }
    }

    /// It sees by this eye from now on.
    pub(crate) fn open(&mut self, eye: Eye) {
        self.eye = Some(eye);
    }

    /// Looks at the turn with this number, if there is one that may be long. `turn_now` gives the
    /// number of the present turn. When all witnesses have looked, [`judge`].
    pub(crate) fn look(&mut self, turn: Option<u64>, turn_now: impl Fn() -> u64) {
        let part = self.worker.of(&PARTS);
        let vm = part.load(Ordering::Relaxed);
        let turn = turn.filter(|_| vm != 0);
        self.last.0 = None;
        if turn.is_none() && self.sleep.is_none() {
            return;
        }
        let Some(state) = self.eye.as_ref().and_then(Eye::look) else { return };
        let is_same = |turn: &u64| turn_now() == *turn && part.load(Ordering::Relaxed) == vm;
        let is_ours = UNMAPPING.load(Ordering::Relaxed) > 0;
        let turn = turn.filter(|turn| state.sleeps && !is_ours && is_same(turn));
        self.last = (turn.map(|turn| (turn, vm)), state.major_faults);
    }

    /// Takes the last look into account. Returns the sleep that is over now, if it counts.
    fn go_on(&mut self, now: Instant) -> Option<Slept> {
        let (asleep, major_faults) = self.last;
        if let Some(sleep) = &mut self.sleep
            && Some((sleep.turn, sleep.vm)) == asleep
        {
            sleep.seen = if sleep.is_behind { [now; 2] } else { [sleep.seen[0], now] };
            return None;
        }
        let (since, is_behind, seen) = (now, false, [now; 2]);
        let next =
            asleep.map(|(turn, vm)| Sleep { turn, vm, since, is_behind, seen, major_faults });
        let Sleep { vm, seen: [first, last], major_faults: before, .. } =
            std::mem::replace(&mut self.sleep, next)?;
        (last > first && before == major_faults).then(|| Slept { vm, time: last.since(first) })
    }
}

/// Each witness has just looked: finds the VMs whose memory made their workers sleep.
pub(crate) fn judge(now: Instant, witnesses: &mut [&mut Witness; Watched::ALL.len()]) {
    for (worker, slept) in go_on(now, witnesses) {
        find(worker, slept);
    }
}

/// The sleeps that are over now and count.
fn go_on(
    now: Instant,
    witnesses: &mut [&mut Witness; Watched::ALL.len()],
) -> impl Iterator<Item = (Watched, Slept)> + use<> {
    let over = witnesses.each_mut().map(|it| (it.worker, it.go_on(now)));
    let [one, other] = witnesses.each_mut().map(|it| it.sleep.as_mut());
    let pair = one.zip(other).filter(|(one, other)| one.vm != other.vm);
    if let Some((one, other)) = pair {
        other.is_behind = (one.since, one.turn) <= (other.since, other.turn);
        one.is_behind = !other.is_behind;
    } else {
        let sleeps = witnesses.each_mut().into_iter().filter_map(|it| it.sleep.as_mut());
        sleeps.for_each(|sleep| sleep.is_behind = false);
    }
    over.into_iter().filter_map(|(worker, slept)| Some((worker, slept?)))
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
        let mut see = |ms, asleep, faults| {
            witness.last = (asleep, faults);
            witness.go_on(at(ms))
        };
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

    /// Milliseconds, and the turn and the VM's part in which each worker sleeps.
    type Seen = (u64, [Option<(u64, u64)>; 2]);

    /// The finding when both workers were seen like this, in order.
    fn found(looks: &[Seen]) -> Vec<(Watched, u64, u64)> {
        let [mut frames, mut sockets] = Watched::ALL.map(Witness::new);
        let mut found = Vec::new();
        for (ms, asleep) in looks {
            (frames.last, sockets.last) = ((asleep[0], 0), (asleep[1], 0));
            let over = go_on(at(*ms), &mut [&mut frames, &mut sockets]);
            let ms = |time: Duration| time.as_nanos() / 1_000_000;
            found.extend(over.map(|(worker, slept)| (worker, slept.vm, ms(slept.time))));
        }
        found
    }

    #[test]
    fn a_worker_that_sleeps_behind_the_other_blames_nobody() {
        let (cause, behind, again) = (Some((1, 7)), Some((2, 8)), Some((3, 8)));
        let whole = [(0, cause), (100, cause), (300, None), (305, None)];
        for at in [0, 1] {
            let both =
                |of_cause, other| if at == 0 { [of_cause, other] } else { [other, of_cause] };
            let cause_alone = vec![(Watched::ALL[at], 7, 100)];
            // Seen later, ...
            let mut looks = whole.map(|(ms, asleep)| (ms, both(asleep, None)));
            looks[1].1 = both(cause, behind);
            looks[2].1 = both(None, behind);
            assert_eq!(found(&looks), cause_alone, "it is over soon after the cause");
            // ... or by the same look, in a turn that began later.
            looks[0].1 = both(cause, behind);
            assert_eq!(found(&looks), cause_alone);
            looks[3].1 = both(None, again);
            assert_eq!(found(&looks), cause_alone, "another turn");
            // Of the time in which it sleeps alone it is the cause.
            let goes_on = [(310, both(None, behind)), (330, both(None, None))];
            let looks = [&looks[..3], &goes_on].concat();
            let mut both_causes = cause_alone;
            both_causes.push((Watched::ALL[1 - at], 8, 10));
            assert_eq!(found(&looks), both_causes);
            // Two devices of a VM have the same owner, who pays for each.
            let same = [(0, both(cause, Some((2, 7)))), (100, both(cause, Some((2, 7))))];
            let paid = found(&[same[0], same[1], (105, [None; 2])]);
            assert_eq!(paid, Watched::ALL.map(|worker| (worker, 7, 100)));
        }
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
