//! The one timer of a worker.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration as StdDuration;

use nightporter_core::time::Instant;
use nix::Result;
use nix::sys::timerfd::{self, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of CLOCK_MONOTONIC.
#[must_use]
pub(crate) fn monotonic_now() -> Instant {
    read(ClockId::CLOCK_MONOTONIC)
}

/// How long the calling thread has had a core, so far; a system call.
#[must_use]
pub(crate) fn time_on_core() -> Instant {
    read(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

/// How long this thread of the process has had a core so far. Errors: it has ended.
pub(crate) fn thread_time(tid: i32) -> Result<Instant> {
    // The kernel's number for the CPU clock of a thread (clock_getcpuclockid(3) for a process;
    // include/linux/posix-timers_types.h, `CPUCLOCK_PERTHREAD_MASK` and `CPUCLOCK_SCHED`).
    try_read(ClockId::from_raw((!tid << 3) | 4 | 2))
}

fn read(clock: ClockId) -> Instant {
    try_read(clock).expect("every Linux has it")
}

fn try_read(clock: ClockId) -> Result<Instant> {
    let t = clock_gettime(clock)?;
    let (s, ns) = (u64::try_from(t.tv_sec()), u64::try_from(t.tv_nsec()));
    Ok(Instant::from_nanos(s.unwrap_or(0) * 1_000_000_000 + ns.unwrap_or(0)))
}

/// A timerfd that is set only when the deadline comes nearer.
///
/// Deadlines move with every packet, most of them away: each acknowledgement puts a retransmission
/// off. To set the timer costs more than the packet (40 us on a virtual machine, which has to ask
/// its host), so it stays as it is, fires too early once, and is set anew then.
#[derive(Debug)]
pub(crate) struct Timer {
    fd: TimerFd,
    /// When it fires. Not later than the deadline.
    set: Option<Instant>,
}

impl Timer {
    pub(crate) fn new() -> Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        Ok(Self { fd: TimerFd::new(timerfd::ClockId::CLOCK_MONOTONIC, flags)?, set: None })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Fires at `deadline`, and maybe once before.
    pub(crate) fn set(&mut self, deadline: Option<Instant>) {
        let Some(at) = deadline else { return };
        if self.set.is_some_and(|set| set <= at) {
            return;
        }
        self.set = deadline;
        // Zero would disarm it.
        let expiration = Expiration::OneShot(StdDuration::from_nanos(at.as_nanos().max(1)).into());
        let result = self.fd.set(expiration, TimerSetTimeFlags::TFD_TIMER_ABSTIME);
        result.expect("a timerfd of ours takes any time");
    }

    /// It fired.
    pub(crate) fn handle_expiry(&mut self) {
        self.set = None;
        // Nothing to read if the deadline moved in between; harmless.
        let _ = self.fd.wait();
    }
}

#[cfg(test)]
mod tests {
    use nightporter_core::time::Duration;

    use super::*;

    /// Minutes until it fires.
    fn left(timer: &Timer) -> i64 {
        let Some(Expiration::OneShot(left)) = timer.fd.get().unwrap() else { return 0 };
        (left.tv_sec() + 59) / 60
    }

    #[test]
    fn each_thread_has_a_clock_of_its_own() {
        let main = std::process::id().cast_signed();
        let before = thread_time(main).unwrap();
        let burns = || {
            let begun = time_on_core();
            while time_on_core() < begun + Duration::from_millis(100) {}
            let own = rustix::thread::gettid().as_raw_nonzero().get();
            (own, thread_time(own).unwrap())
        };
        let (other, burnt) = std::thread::spawn(burns).join().unwrap();
        let passed = thread_time(main).unwrap().since(before);
        assert!(before > Instant::ZERO && passed < Duration::from_millis(50), "{passed:?}");
        assert!(burnt >= Instant::ZERO + Duration::from_millis(100), "{burnt:?}");
        // Its number is free as soon as the kernel has let it go.
        while thread_time(other).is_ok() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn it_is_set_when_the_deadline_comes_nearer_and_after_it_has_fired() {
        let (mut timer, now) = (Timer::new().unwrap(), monotonic_now());
        let minutes = |n: u64| Some(now + Duration::from_secs(60 * n));
        timer.set(minutes(30));
        timer.set(minutes(60));
        timer.set(None);
        assert_eq!(left(&timer), 30, "fires early rather than being set again");
        timer.set(minutes(10));
        assert_eq!(left(&timer), 10);
        timer.handle_expiry();
        timer.set(minutes(60));
        assert_eq!(left(&timer), 60, "as the deadline is now");
    }
}
