//! Notices a turn that stands, and interrupts what it waits for.
//!
//! The worker calls nothing that waits but its own `epoll_wait`; a front-end can make other calls
//! wait all the same, as by taking O_NONBLOCK from an eventfd that it has filled. When a turn is
//! longer than [`LIMIT`] the worker gets a signal that does nothing but end such a call with EINTR.
//! Whoever made the call knows whose descriptor it was, and takes that port down. As long as no
//! turn stands systemd is told so; when it hears nothing it restarts us.
//!
//! Cost: two stores a turn, and a thread that wakes twice a second.

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
/// From turns that are longer than this on, who writes to descriptors of others measures it: 500
/// interrupts a turn take less.
const LONG: Duration = Duration::from_millis(5);
/// How often it looks.
const LOOK_INTERVAL: StdDuration = StdDuration::from_millis(500);

/// How soon it interrupts the next wait of a turn that stands: by then others have written what
/// stands too, and all of them together must not take as long as systemd waits.
const AGAIN: StdDuration = StdDuration::from_millis(20);

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

/// From now on the calling thread is watched, and `supervisor` told about it. Errors: there can be
/// no more threads.
pub(crate) fn start(supervisor: Option<Arc<Supervisor>>) -> io::Result<()> {
    sys::let_interrupt(Signal::SIGURG)?;
    let worker = pthread_self();
    // Only who wants to know how we are.
    let supervisor = supervisor.filter(|supervisor| supervisor.period().is_some());
    let period = supervisor.as_ref().and_then(|supervisor| supervisor.period());
    let interval = period.map_or(LOOK_INTERVAL, |period| LOOK_INTERVAL.min(period / 3));
    thread::Builder::new().name("watchdog".into()).spawn(move || {
        let (mut noticed, mut refused, mut wait) = (0, 0, interval);
        loop {
            thread::sleep(wait);
            closer::look();
            sandbox::report(&mut refused);
            let turn = TURN.load(Ordering::Relaxed);
            let lasts_for =
                |limit| turn != 0 && monotonic_now().since(Instant::from_nanos(turn)) > limit;
            SUSPECTS.store(lasts_for(LONG), Ordering::Relaxed);
            let stands = lasts_for(LIMIT);
            wait = if stands { AGAIN.min(interval) } else { interval };
            if !stands {
                supervisor.iter().for_each(|supervisor| supervisor.lives());
                continue;
            }
            if std::mem::replace(&mut noticed, turn) != turn {
                STALLS.fetch_add(1, Ordering::Relaxed);
                tracing::error!("a turn takes longer than a second");
            }
            if pthread_kill(worker, Signal::SIGURG).is_err() {
                return; // it is gone
            }
        }
    })?;
    Ok(())
}
