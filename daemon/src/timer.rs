//! The one timer of a worker.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration as StdDuration;

use nightporter_core::time::Instant;
use nix::Result;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::time::clock_gettime;

/// Nanoseconds of CLOCK_MONOTONIC.
#[must_use]
pub(crate) fn monotonic_now() -> Instant {
    let t = clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("every Linux has it");
    let (s, ns) = (u64::try_from(t.tv_sec()), u64::try_from(t.tv_nsec()));
    Instant::from_nanos(s.unwrap_or(0) * 1_000_000_000 + ns.unwrap_or(0))
}

/// A timerfd that is set only when the deadline changes.
#[derive(Debug)]
pub(crate) struct Timer {
    fd: TimerFd,
    set: Option<Instant>,
}

impl Timer {
    pub(crate) fn new() -> Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        Ok(Self { fd: TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?, set: None })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Fires at `deadline`, or never.
    pub(crate) fn set(&mut self, deadline: Option<Instant>) {
        if deadline == self.set {
            return;
        }
        self.set = deadline;
        let result = match deadline {
            None => self.fd.unset(),
            Some(at) => {
                // Zero would disarm it.
                let at = StdDuration::from_nanos(at.as_nanos().max(1));
                let at = Expiration::OneShot(at.into());
                self.fd.set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME)
            }
        };
        result.expect("a timerfd of ours takes any time");
    }

    /// It fired.
    pub(crate) fn handle_expiry(&mut self) {
        self.set = None;
        // Nothing to read if the deadline moved in between; harmless.
        let _ = self.fd.wait();
    }
}
