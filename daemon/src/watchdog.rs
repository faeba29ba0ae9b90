//! Notices a turn that stands, and interrupts what it waits for.
//!
//! The worker calls nothing that waits but its own `epoll_wait`; a front-end can make other calls
//! wait all the same, as by taking O_NONBLOCK from an eventfd that it has filled. When a turn is
//! long the worker gets a signal that does nothing but end such a call with EINTR. Whoever made the
//! call knows whose descriptor it was, and takes that port down. A turn that is long for any other
//! reason does not notice: nothing else that the worker calls waits for a signal.
//!
//! Ten times a second is often enough as long as nobody means harm. Who does comes back, after the
//! time for which his port takes no connections, and others like him: so after the first one it is
//! looked at every few milliseconds for a day ([`beware`]).
//!
//! As long as no turn stands systemd is told so; when it hears nothing it restarts us.
//!
//! Cost: two stores a turn, and a thread that wakes ten times a second.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration as StdDuration;

use nightporter_core::time::{Duration, Instant};
use nix::sys::pthread::{pthread_kill, pthread_self};
use nix::sys::signal::Signal;

use crate::closer;
use crate::sandbox;
use crate::supervisor::Supervisor;
use crate::sys;
use crate::timer::monotonic_now;

/// Longer turns than this stand: work is bounded to a few milliseconds a turn.
const LIMIT: Duration = Duration::from_secs(1);
/// From turns that are longer than this on, calls are interrupted, and who writes to descriptors of
/// others measures it: 500 interrupts a turn take less.
const LONG: Duration = Duration::from_millis(5);
/// How often it looks.
const LOOK_INTERVAL: StdDuration = StdDuration::from_millis(100);
/// How often while a turn is long, and while somebody is about who made one so.
const CLOSE_LOOK_INTERVAL: StdDuration = StdDuration::from_millis(5);
/// How long somebody who made the worker wait is taken to be about.
const SUSPICION: Duration = Duration::from_secs(24 * 3600);
/// How often systemd is told that we live, or more often if it wants that.
const TELL_INTERVAL: StdDuration = StdDuration::from_millis(500);

/// When this turn began, in nanoseconds; 0 while the worker waits for events.
static TURN: AtomicU64 = AtomicU64::new(0);
/// The turn was long when it was last looked at.
static SUSPECTS: AtomicBool = AtomicBool::new(false);
/// Turns that stood.
static STALLS: AtomicU64 = AtomicU64::new(0);

/// Turns that took longer than a second.
pub(crate) fn stalls() -> u64 {
    STALLS.load(Ordering::Relaxed)
}

/// Whether to measure what a call takes that others can make long.
#[inline]
pub(crate) fn suspects() -> bool {
    SUSPECTS.load(Ordering::Relaxed)
}

/// The worker is about to wait for events.
#[inline]
pub(crate) fn handle_rest() {
    TURN.store(0, Ordering::Relaxed);
}

/// The worker begins a turn.
#[inline]
pub(crate) fn handle_turn(now: Instant) {
    TURN.store(now.as_nanos(), Ordering::Relaxed);
}

/// Until when somebody is about who makes the worker wait.
static BEWARE_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Somebody made the worker wait.
pub(crate) fn beware() {
    let until = monotonic_now() + SUSPICION;
    BEWARE_UNTIL.store(until.as_nanos(), Ordering::Relaxed);
}

/// What was seen of the worker.
#[derive(Debug, Eq, PartialEq)]
struct Look {
    /// It may wait for something: to be interrupted.
    is_long: bool,
    /// It has begun to stand since the last look.
    has_stalled: bool,
    /// It stands.
    stands: bool,
    /// Until the next look.
    wait: StdDuration,
}

/// Looks at a turn that began at `turn`; 0: there is none. `noticed`: the last one that stood.
fn look(now: Instant, turn: u64, beware_until: u64, noticed: &mut u64) -> Look {
    let lasts_for = |limit| turn != 0 && now.since(Instant::from_nanos(turn)) > limit;
    let (is_long, stands) = (lasts_for(LONG), lasts_for(LIMIT));
    let has_stalled = stands && std::mem::replace(noticed, turn) != turn;
    let close = is_long || now < Instant::from_nanos(beware_until);
    let wait = if close { CLOSE_LOOK_INTERVAL } else { LOOK_INTERVAL };
    Look { is_long, has_stalled, stands, wait }
}

/// From now on the calling thread is watched, and `supervisor` told about it. Errors: there can be
/// no more threads.
pub(crate) fn start(supervisor: Option<Arc<Supervisor>>) -> io::Result<()> {
    sys::let_interrupt(Signal::SIGURG)?;
    let worker = pthread_self();
    // Only who wants to know how we are.
    let supervisor = supervisor.filter(|supervisor| supervisor.period().is_some());
    let period = supervisor.as_ref().and_then(|supervisor| supervisor.period());
    let interval = period.map_or(TELL_INTERVAL, |period| TELL_INTERVAL.min(period / 3));
    thread::Builder::new().name("watchdog".into()).spawn(move || {
        let (mut noticed, mut refused, mut untold) = (0, 0, StdDuration::ZERO);
        loop {
            let now = monotonic_now();
            let turn = TURN.load(Ordering::Relaxed);
            let beware_until = BEWARE_UNTIL.load(Ordering::Relaxed);
            let seen = look(now, turn, beware_until, &mut noticed);
            SUSPECTS.store(seen.is_long, Ordering::Relaxed);
            if seen.has_stalled {
                STALLS.fetch_add(1, Ordering::Relaxed);
                tracing::error!("a turn takes longer than a second");
            }
            if seen.is_long && pthread_kill(worker, Signal::SIGURG).is_err() {
                return; // it is gone
            }
            if untold >= interval {
                untold = StdDuration::ZERO;
                closer::look();
                sandbox::report(&mut refused);
                if !seen.stands {
                    supervisor.iter().for_each(|supervisor| supervisor.lives());
                }
            }
            let wait = seen.wait.min(interval);
            thread::sleep(wait);
            untold += wait;
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_interrupted_soon_and_sooner_while_somebody_is_about_who_makes_us_wait() {
        let at = |ms: u64| Instant::from_nanos(1_000_000_000 + ms * 1_000_000);
        let (mut noticed, turn) = (0, at(0).as_nanos());
        let mut see = |now, turn, until: Instant| look(now, turn, until.as_nanos(), &mut noticed);
        let calm = Look { is_long: false, has_stalled: false, stands: false, wait: LOOK_INTERVAL };
        let close = Look { wait: CLOSE_LOOK_INTERVAL, ..calm };
        assert_eq!(see(at(5), turn, Instant::ZERO), calm);
        assert_eq!(see(at(9000), 0, Instant::ZERO), calm, "it waits for events");
        assert_eq!(see(at(5), turn, at(6)), close);
        assert_eq!(see(at(6), turn, at(6)), Look { is_long: true, ..close });
        assert_eq!(see(at(1000), turn, at(0)), Look { is_long: true, ..close });
        let stands = Look { is_long: true, stands: true, ..close };
        assert_eq!(see(at(1001), turn, at(0)), Look { has_stalled: true, ..stands });
        assert_eq!(see(at(1002), turn, at(0)), stands, "it is said once");
    }
}
