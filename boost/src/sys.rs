//! The one system call here that no crate wraps: the scheduling class of a thread.

use std::io;

/// A scheduling class, as `/proc/TID/stat` has it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Class {
    /// `SCHED_OTHER`, `SCHED_FIFO`, ...
    pub(crate) policy: i32,
    /// 0 unless it is real-time.
    pub(crate) priority: u8,
}

impl Class {
    /// The default.
    pub(crate) const NORMAL: Self = Self { policy: libc::SCHED_OTHER, priority: 0 };

    /// `SCHED_RR` at `priority`.
    pub(crate) const fn round_robin(priority: u8) -> Self {
        Self { policy: libc::SCHED_RR, priority }
    }

    /// `SCHED_FIFO` at `priority`.
    pub(crate) const fn fifo(priority: u8) -> Self {
        Self { policy: libc::SCHED_FIFO, priority }
    }

    /// It is served before all others.
    pub(crate) const fn is_real_time(self) -> bool {
        matches!(self.policy, libc::SCHED_FIFO | libc::SCHED_RR | libc::SCHED_DEADLINE)
    }
}

/// Gives thread `tid` a class; 0 is the caller. Its children have the default class. The nice value
/// stays, also that of a thread which is real-time for a while, and so does a slice of its own
/// (`_sched_setscheduler`, kernel/sched/syscalls.c, 6.12).
pub(crate) fn set_class(tid: i32, class: Class) -> io::Result<()> {
    let flag = if class.is_real_time() { libc::SCHED_RESET_ON_FORK } else { 0 };
    let param = libc::sched_param { sched_priority: class.priority.into() };
    // SAFETY: the kernel only reads `param`, which lives until the call returns.
    // JUSTIFICATION: neither nix nor rustix has the call.
    if unsafe { libc::sched_setscheduler(tid, class.policy | flag, &raw const param) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
