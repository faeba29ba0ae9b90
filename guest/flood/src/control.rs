//! `flood on` and `flood off`: starting a watcher in the background, and ending it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

use crate::record::Place;
use crate::watch::{self, How};

/// The text that a watcher prints once it receives heartbeats.
pub const READY: &str = "watching";

/// Starts a watcher that outlives the caller; returns a line for the operator.
///
/// # Errors
/// It cannot be started.
pub fn on(place: &Place, how: How) -> Result<String> {
    as_root()?;
    if place.try_lock()?.is_none() {
        return Ok("It is on already.".to_owned());
    }
    let tool = std::env::current_exe().context("finding this program")?;
    let mut keeper = Command::new(tool)
        .args(["flood", "watch"])
        .args(how.arguments())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(place.log()).with_context(|| place.log().display().to_string())?)
        .process_group(0) // a terminal's ^C is not for it
        .spawn()
        .context("starting the watcher")?;
    let mut line = String::new();
    BufReader::new(keeper.stdout.take().context("it was piped")?).read_line(&mut line)?;
    if line.trim() != READY {
        keeper.wait()?;
        bail!("{}", fs::read_to_string(place.log())?.trim());
    }
    Ok("On: connections flood as soon as a host says that it controls congestion \
        (nightporter-guest flood status)."
        .to_owned())
}

/// Ends the watcher, if there is one, and undoes everything that is recorded.
///
/// # Errors
/// Something cannot be undone.
pub fn off(place: &Place) -> Result<String> {
    as_root()?;
    let was_on = place.try_lock()?.is_none();
    if was_on {
        let keeper = place.keeper()?.context("it has only just started: try again")?;
        // It may have ended since; the lock is held until its watcher has, too.
        match kill(Pid::from_raw(keeper), Signal::SIGTERM) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(errno) => return Err(errno).context("ending the watcher"),
        }
    }
    let _lock = place.wait_for_lock()?;
    watch::undo(place)?;
    Ok(if was_on { "Off, and everything is undone." } else { "It was off." }.to_owned())
}

fn as_root() -> Result<()> {
    ensure!(geteuid().is_root(), "only root may change routes: run this with sudo");
    Ok(())
}
