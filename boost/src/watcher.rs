//! The watcher: takes back what the booster left when it dies or stands (BST-03).

use std::io::{stdin, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, Timespec, fcntl_setfl};
use rustix::io::{read, write};
use rustix::process::{Pid, PidfdFlags, Signal, getppid, pidfd_open, pidfd_send_signal};

use crate::sys::{Class, set_class};
use crate::{BEAT, BEATS_MISSED_MAX, PRIORITY, take_back};

/// Watches process `booster`, whose beats come at standard input, until it has ended.
///
/// # Errors
/// Something could not be taken back.
pub fn run(booster: i32, journal: &Path) -> Result<()> {
    // Without the right to it nothing is boosted, see the booster.
    let _ = set_class(0, Class::round_robin(PRIORITY));
    let pid = Pid::from_raw(booster).context("a process has a positive number")?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    if getppid() == Some(pid) {
        fcntl_setfl(stdin(), OFlags::NONBLOCK)?;
        fcntl_setfl(stdout(), OFlags::NONBLOCK)?;
        watch(pidfd.as_fd())?;
    } // else it has ended, and another may have its number
    let count = take_back(journal)?;
    eprintln!("the booster has ended; taken back: {count}");
    Ok(())
}

/// Until the booster is dead. If it stands, it is killed.
fn watch(booster: BorrowedFd<'_>) -> Result<()> {
    let (mut beat_at, mut missed) = (None::<Instant>, 0);
    let mut killed = false;
    loop {
        let now = Instant::now();
        if beat_at.is_none_or(|at| now - at >= BEAT) {
            beat_at = Some(now);
            beat(stdout().as_fd());
        }
        // Each look is a beat behind the last one.
        missed = if hears(stdin().as_fd()) { 0 } else { missed + 1 };
        if missed > BEATS_MISSED_MAX && !std::mem::replace(&mut killed, true) {
            eprintln!("the booster stands: it is killed");
            pidfd_send_signal(booster, Signal::KILL)?;
        }
        let mut fds = [PollFd::from_borrowed_fd(booster, PollFlags::IN)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: BEAT.as_nanos().try_into()? };
        match poll(&mut fds, Some(&timeout)) {
            Ok(1..) => return Ok(()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Shows the other process that this one runs. A full pipe says the same.
pub(crate) fn beat(pipe: BorrowedFd<'_>) {
    let _ = write(pipe, b".");
}

/// The other process has shown that it runs.
pub(crate) fn hears(pipe: BorrowedFd<'_>) -> bool {
    let mut buf = [0; 64];
    let mut any = false;
    while let Ok(1..) = read(pipe, &mut buf[..]) {
        any = true;
    }
    any
}
