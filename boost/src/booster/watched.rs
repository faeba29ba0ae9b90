//! The watcher, as the booster sees it: a child that gets a beat, and has to send one.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::nanos;
use crate::watcher::{beat, hears};
use crate::{BEAT, BEATS_MISSED_MAX};

#[derive(Debug)]
pub(super) struct Watched {
    child: Child,
    pidfd: OwnedFd,
    to: OwnedFd,
    from: OwnedFd,
    beat_at: u64,
    /// Looks since its last beat.
    missed: u32,
}

impl Watched {
    /// Starts the watcher of this process.
    pub(super) fn start(journal: &Path) -> Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("--watch").arg(std::process::id().to_string()).arg("--journal").arg(journal);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("the watcher cannot be started")?;
        let to: OwnedFd = child.stdin.take().context("its input")?.into();
        let from: OwnedFd = child.stdout.take().context("its output")?.into();
        fcntl_setfl(&to, OFlags::NONBLOCK)?;
        fcntl_setfl(&from, OFlags::NONBLOCK)?;
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        // It has to be there before anything is favoured.
        let mut fds = [PollFd::new(&from, PollFlags::IN)];
        rustix::event::poll(&mut fds, None)?;
        Ok(Self { child, pidfd, to, from, beat_at: 0, missed: 0 })
    }

    /// It is readable when the watcher has ended.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.pidfd, PollFlags::IN)
    }

    /// Once a beat, or if it is said to have `ended`: sends one, and listens. Errors: the watcher
    /// has ended, or stands; it is dead then.
    pub(super) fn check(&mut self, now: u64, ended: bool) -> Result<()> {
        if now < self.beat_at + nanos(BEAT) && !ended {
            return Ok(());
        }
        self.beat_at = now;
        beat(self.to.as_fd());
        self.missed = if hears(self.from.as_fd()) { 0 } else { self.missed + 1 };
        if let Some(status) = self.child.try_wait()? {
            bail!("the watcher has ended: {status}");
        }
        if self.missed > BEATS_MISSED_MAX {
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
            bail!("the watcher stands");
        }
        Ok(())
    }
}
