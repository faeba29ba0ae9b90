//! Notices a turn that blocks, and interrupts the call that it waits for.
//!
//! A worker calls nothing that waits except its own `epoll_wait`. A front-end can make other
//! calls wait, for example by clearing O_NONBLOCK on an eventfd that it has filled. When a turn is
//! long its worker gets a signal, whose only effect is to end such a call with EINTR. The caller
//! knows whose descriptor it was, and takes that port down. A turn that is long for another reason
//! does not notice the signal, because no other call of the worker can be interrupted.
//!
//! Ten looks a second are enough as long as no front-end is hostile. A hostile one comes back after
//! the time for which its port takes no connections, and so do others like it. So after the first
//! one the turn is looked at every few milliseconds for a day ([`beware`]).
//!
//! No signal ends a sleep of the kernel for memory of a guest: [`crate::sleeps`] finds out whose
//! memory that is. After a turn of more than [`SHORT`] it looks every other millisecond, for a
//! hundred times as long as that turn took.
//!
//! Each worker has a place of its own here ([`Watched`]): a long turn of one does not have the
//! other interrupted, suspected or searched.
//!
//! As long as no turn blocks, of a worker or of control, systemd is told so; without these
//! messages it restarts the daemon.
//!
//! Cost: two stores and a look at the clock a turn, and a thread that wakes ten times a second.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration as StdDuration;

use nightporter_core::time::{Duration, Instant};
use nix::sys::pthread::{Pthread, pthread_kill, pthread_self};
use nix::sys::signal::Signal;

use crate::closer;
use crate::refused;
use crate::sleeps::{self, Eye, Witness};
use crate::supervisor::Supervisor;
use crate::sys;
use crate::timer::{monotonic_now, thread_time};
use crate::watched::{Apart, Watched};

/// Longer turns than this stand: work is bounded to a few milliseconds a turn.
const LIMIT: Duration = Duration::from_secs(1);
/// If turns are longer than this, calls are interrupted, and writes to descriptors of others are
/// measured. 500 interrupts take less than a turn of this length.
const LONG: Duration = Duration::from_millis(5);
/// A turn of control stands if it does not go on for so long. It may wait for the configuration
/// file (3 s, twice), for the broker (30 s), and for an arena's memory (a gigabyte takes 0.3 s).
const CONTROL_LIMIT: Duration = Duration::from_secs(120);
/// How often it looks.
const LOOK_INTERVAL: StdDuration = StdDuration::from_millis(100);
/// How often a long turn is looked at, and every turn while a culprit is about.
const CLOSE_LOOK_INTERVAL: StdDuration = StdDuration::from_millis(5);
/// A turn that takes longer than this may have waited for a VM; an echo may take so long.
const SHORT: Duration = Duration::from_millis(2);
/// The search for that VM goes on for so many times the length of the turn.
const SEARCH_SHARE: u64 = 100;
/// How often, then, and at turns that take longer than half of it.
const SEARCH_INTERVAL: StdDuration = StdDuration::from_millis(2);
const SEARCHED: Duration = Duration::from_millis(1);
/// How long a VM that made the worker wait is assumed to be about.
const SUSPICION: Duration = Duration::from_secs(24 * 3600);
/// How often systemd is told that the daemon lives, or more often if it wants that.
const TELL_INTERVAL: StdDuration = StdDuration::from_millis(500);

/// The watchdog's place for a worker.
struct Place {
    /// When this turn began, in nanoseconds; 0 while the worker waits for events.
    turn: AtomicU64,
    /// The turn was long when it was last looked at.
    suspects: AtomicBool,
    /// The VM that makes turns long is searched,
    searches: AtomicBool,
    /// until then, in nanoseconds.
    search_until: AtomicU64,
    /// The thread, as long as it lives.
    thread: Mutex<Option<Pthread>>,
    /// Its number in the kernel.
    tid: AtomicI32,
    /// Turns that stood.
    stalls: AtomicU64,
    /// The kernel's view of it, until the watchdog has taken it.
    eye: Mutex<Option<Eye>>,
}

impl Place {
    const fn new() -> Self {
        Self {
            turn: AtomicU64::new(0),
            suspects: AtomicBool::new(false),
            searches: AtomicBool::new(false),
            search_until: AtomicU64::new(0),
            thread: Mutex::new(None),
            tid: AtomicI32::new(0),
            stalls: AtomicU64::new(0),
            eye: Mutex::new(None),
        }
    }
}

static PLACES: [Apart<Place>; Watched::ALL.len()] =
    [const { Apart(Place::new()) }; Watched::ALL.len()];
/// When control's turn began or last went on, in nanoseconds; 0 while it waits for events.
static CONTROL: AtomicU64 = AtomicU64::new(0);

/// Control begins a turn, or goes on with it. `None`: it is about to wait for events.
pub(crate) fn handle_control(now: Option<Instant>) {
    CONTROL.store(now.map_or(0, Instant::as_nanos), Ordering::Relaxed);
}

/// Whether a turn that began at `turn` takes longer than `limit`; 0: there is none.
fn lasts_for(now: Instant, turn: u64, limit: Duration) -> bool {
    turn != 0 && now.since(Instant::from_nanos(turn)) > limit
}

/// Turns of this worker that took longer than a second.
pub(crate) fn stalls(of: Watched) -> u64 {
    of.of(&PLACES).stalls.load(Ordering::Relaxed)
}

/// How long this worker has had a core so far; zero if it has not begun, or has ended.
pub(crate) fn cpu_time(of: Watched) -> Instant {
    let tid = of.of(&PLACES).tid.load(Ordering::Relaxed);
    // The clock of thread 0 is the caller's own.
    let time = (tid != 0).then(|| thread_time(tid).ok()).flatten();
    time.unwrap_or(Instant::ZERO)
}

/// Whether the calling worker is to measure calls that others can make long.
#[inline]
pub(crate) fn suspects() -> bool {
    Watched::own(&PLACES).suspects.load(Ordering::Relaxed)
}

/// The calling worker is about to wait for events.
#[inline]
pub(crate) fn handle_rest() {
    Watched::own(&PLACES).turn.store(0, Ordering::Relaxed);
}

/// The calling worker begins a turn.
#[inline]
pub(crate) fn handle_turn(now: Instant) {
    Watched::own(&PLACES).turn.store(now.as_nanos(), Ordering::Relaxed);
}

/// The thread that looks.
static WATCHDOG: OnceLock<thread::Thread> = OnceLock::new();

/// The calling worker's turn that began at `begin` is over.
#[inline]
pub(crate) fn handle_end(begin: Instant) {
    let now = monotonic_now();
    let took = now.since(begin);
    if took > SHORT {
        search(now, took);
    }
}

#[cold]
fn search(now: Instant, took: Duration) {
    let (until, place) = (now + took.saturating_mul(SEARCH_SHARE), Watched::own(&PLACES));
    let before = place.search_until.fetch_max(until.as_nanos(), Ordering::Relaxed);
    place.searches.store(true, Ordering::Relaxed);
    if Instant::from_nanos(before) <= now
        && let Some(thread) = WATCHDOG.get()
    {
        thread.unpark();
    }
}

/// Whether the VM that makes the calling worker's turns long is searched.
#[inline]
pub(crate) fn searches() -> bool {
    Watched::own(&PLACES).searches.load(Ordering::Relaxed)
}

/// Until when a VM that makes the worker wait is assumed to be about.
static BEWARE_UNTIL: AtomicU64 = AtomicU64::new(0);

/// A VM made the worker wait.
pub(crate) fn beware() {
    let until = monotonic_now() + SUSPICION;
    BEWARE_UNTIL.store(until.as_nanos(), Ordering::Relaxed);
}

/// Whether a VM that makes the worker wait is assumed to be about.
#[cfg(test)]
pub(crate) fn bewares() -> bool {
    monotonic_now() < Instant::from_nanos(BEWARE_UNTIL.load(Ordering::Relaxed))
}

/// The observed state of a worker.
#[derive(Debug, Eq, PartialEq)]
struct Look {
    /// It may wait for something: to be interrupted.
    is_long: bool,
    /// It has begun to stand since the last look.
    has_stalled: bool,
    /// It stands.
    stands: bool,
    /// It may sleep where no signal wakes it.
    may_sleep: bool,
    /// Until the next look.
    wait: StdDuration,
}

/// Until when to look more often: while turns are searched, and while a culprit is about.
#[derive(Clone, Copy)]
struct Until {
    search: Instant,
    beware: Instant,
}

/// Looks at a turn that began at `turn`; 0: there is none. `noticed`: the last one that stood.
fn look(now: Instant, turn: u64, until: Until, noticed: &mut u64) -> Look {
    let lasts_for = |limit| lasts_for(now, turn, limit);
    let (is_long, stands) = (lasts_for(LONG), lasts_for(LIMIT));
    let has_stalled = stands && std::mem::replace(noticed, turn) != turn;
    let close = is_long || now < until.beware;
    let wait = match (now < until.search, close) {
        (true, _) => SEARCH_INTERVAL,
        (false, true) => CLOSE_LOOK_INTERVAL,
        (false, false) => LOOK_INTERVAL,
    };
    let may_sleep = lasts_for(SEARCHED);
    Look { is_long, has_stalled, stands, may_sleep, wait }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The calling thread is watched as long as this lives.
#[derive(Debug)]
pub(crate) struct Watch(Watched);

/// The calling thread is this worker from now on, and is watched through that eye.
#[must_use]
pub(crate) fn watch(worker: Watched, eye: Option<Eye>) -> Watch {
    worker.begin();
    let place = worker.of(&PLACES);
    *lock(&place.eye) = eye;
    place.tid.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Relaxed);
    *lock(&place.thread) = Some(pthread_self());
    Watch(worker)
}

impl Drop for Watch {
    fn drop(&mut self) {
        let place = self.0.of(&PLACES);
        place.turn.store(0, Ordering::Relaxed);
        // Its clock ends with it, and another thread may get the number.
        place.tid.store(0, Ordering::Relaxed);
        *lock(&place.thread) = None;
    }
}

/// The watchdog's knowledge of a worker.
struct Observed {
    worker: Watched,
    witness: Witness,
    /// The last turn that stood.
    noticed: u64,
}

impl Observed {
    const fn new(worker: Watched) -> Self {
        Self { worker, witness: Witness::new(worker), noticed: 0 }
    }

    /// Looks at the worker's turn, and interrupts its call if that may wait.
    fn look(&mut self, now: Instant, beware: Instant) -> Look {
        let place = self.worker.of(&PLACES);
        if let Some(eye) = lock(&place.eye).take() {
            self.witness.open(eye);
        }
        let turn = place.turn.load(Ordering::Relaxed);
        let search = Instant::from_nanos(place.search_until.load(Ordering::Relaxed));
        let seen = look(now, turn, Until { search, beware }, &mut self.noticed);
        let turn_now = || place.turn.load(Ordering::Relaxed);
        self.witness.look(seen.may_sleep.then_some(turn), turn_now);
        place.suspects.store(seen.is_long, Ordering::Relaxed);
        if search <= now && place.searches.load(Ordering::Relaxed) {
            place.searches.store(false, Ordering::Relaxed);
        }
        if seen.has_stalled {
            place.stalls.fetch_add(1, Ordering::Relaxed);
            tracing::error!(worker = self.worker.name(), "a turn takes longer than a second");
        }
        if seen.is_long {
            // It lives as long as this is locked.
            let _ = lock(&place.thread).map(|thread| pthread_kill(thread, Signal::SIGURG));
        }
        seen
    }
}

/// From now on workers are watched, and `supervisor` told about them. `interrupt` interrupts other
/// calls that wait for too long. Errors: there can be no more threads.
pub(crate) fn start(supervisor: Option<Arc<Supervisor>>, interrupt: fn(Instant)) -> io::Result<()> {
    sys::let_interrupt(Signal::SIGURG)?;
    // Only if it wants messages.
    let supervisor = supervisor.filter(|supervisor| supervisor.period().is_some());
    let period = supervisor.as_ref().and_then(|supervisor| supervisor.period());
    let interval = period.map_or(TELL_INTERVAL, |period| TELL_INTERVAL.min(period / 3));
    let watchdog = thread::Builder::new().name("watchdog".into()).spawn(move || {
        let mut workers = Watched::ALL.map(Observed::new);
        let (mut known, mut told, mut control_stands) = (0, std::time::Instant::now(), false);
        loop {
            let now = monotonic_now();
            let beware = Instant::from_nanos(BEWARE_UNTIL.load(Ordering::Relaxed));
            let seen = workers.each_mut().map(|worker| worker.look(now, beware));
            sleeps::judge(now, &mut workers.each_mut().map(|worker| &mut worker.witness));
            interrupt(now);
            if told.elapsed() >= interval {
                told = std::time::Instant::now();
                closer::look();
                refused::report(&mut known);
                let control = lasts_for(now, CONTROL.load(Ordering::Relaxed), CONTROL_LIMIT);
                if control && !std::mem::replace(&mut control_stands, control) {
                    tracing::error!("control has stood for {} s", CONTROL_LIMIT.as_millis() / 1000);
                }
                control_stands &= control;
                if !control && seen.iter().all(|seen| !seen.stands) {
                    supervisor.iter().for_each(|supervisor| supervisor.lives());
                }
            }
            let wait = seen.iter().map(|seen| seen.wait).min().expect("there are workers");
            thread::park_timeout(wait.min(interval));
        }
    })?;
    let _ = WATCHDOG.set(watchdog.thread().clone());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_stands_when_it_has_not_gone_on_for_two_minutes_and_not_while_it_waits() {
        let begin = Instant::from_secs(1000);
        let stands = |now, turn| lasts_for(now, turn, CONTROL_LIMIT);
        let late = begin + Duration::from_secs(121);
        assert!(!stands(begin + CONTROL_LIMIT, begin.as_nanos()));
        assert!(stands(late, begin.as_nanos()));
        assert!(!stands(late, late.as_nanos()), "it has gone on");
        assert!(!stands(late, 0));
    }

    #[test]
    fn a_long_turn_of_one_worker_changes_nothing_for_the_other() {
        sys::let_interrupt(Signal::SIGURG).unwrap();
        let long_ago = monotonic_now();
        let beware = Instant::ZERO;
        let of_sockets = thread::spawn(move || {
            let _watch = watch(Watched::Sockets, None);
            handle_turn(long_ago);
            while monotonic_now().since(long_ago) <= LONG {
                thread::yield_now();
            }
            let seen = Observed::new(Watched::Sockets).look(monotonic_now(), beware);
            handle_end(long_ago);
            assert!(cpu_time(Watched::Sockets) > Instant::ZERO);
            let seen = (seen.is_long, suspects(), searches());
            let later = monotonic_now() + LIMIT;
            assert!(Observed::new(Watched::Sockets).look(later, beware).has_stalled);
            seen
        });
        assert_eq!(of_sockets.join().unwrap(), (true, true, true));
        assert_eq!((stalls(Watched::Frames), stalls(Watched::Sockets)), (0, 1));
        assert_eq!(cpu_time(Watched::Sockets), Instant::ZERO, "it has ended");
        assert_eq!((suspects(), Watched::here()), (false, Watched::Frames));
        // It has ended: there is no turn, and nobody to interrupt.
        let place = Watched::Sockets.of(&PLACES);
        assert_eq!(place.turn.load(Ordering::Relaxed), 0);
        assert!(lock(&place.thread).is_none());
    }

    #[test]
    fn a_call_is_interrupted_soon_and_sooner_while_somebody_is_about_who_makes_us_wait() {
        let at = |ms: u64| Instant::from_nanos(1_000_000_000 + ms * 1_000_000);
        let (mut noticed, turn) = (0, at(0).as_nanos());
        let mut see = |now, turn, beware: Instant| {
            look(now, turn, Until { beware, search: at(2) }, &mut noticed)
        };
        let calm = Look {
            is_long: false,
            has_stalled: false,
            stands: false,
            may_sleep: false,
            wait: LOOK_INTERVAL,
        };
        let (asleep, close) = (Look { may_sleep: true, ..calm }, CLOSE_LOOK_INTERVAL);
        assert_eq!(see(at(1), turn, Instant::ZERO), Look { wait: SEARCH_INTERVAL, ..calm });
        assert_eq!(see(at(5), turn, Instant::ZERO), asleep);
        assert_eq!(see(at(9000), 0, Instant::ZERO), calm, "it waits for events");
        assert_eq!(see(at(5), turn, at(6)), Look { wait: close, ..asleep });
        let long = Look { is_long: true, wait: close, ..asleep };
        assert_eq!(see(at(6), turn, at(6)), long);
        assert_eq!(see(at(1000), turn, at(0)), long);
        let stands = Look { stands: true, ..long };
        assert_eq!(see(at(1001), turn, at(0)), Look { has_stalled: true, ..stands });
        assert_eq!(see(at(1002), turn, at(0)), stands, "it is said once");
    }
}
