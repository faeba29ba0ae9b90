//! One run's directory: its sockets, and the journal of what has to be undone.
//!
//! Everything the lab changes outside its own processes and namespaces goes through here: a line
//! in the journal first, then the change. The journal is undone, last line first, when the run
//! ends; when it was killed instead, the next run finds the directory unlocked and undoes it then.
//!
//! ```text
//! /run/nightporter-lab/<pid>.<n>/lock      held with flock while the run lives
//! /run/nightporter-lab/<pid>.<n>/undo      "write PATH VALUE" or "rmdir PATH", one per line
//! /run/nightporter-lab/<pid>.<n>/*.sock
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const BASE: &str = "/run/nightporter-lab";

/// How long a cgroup may stay busy after its last process was killed.
const RMDIR_LIMIT: Duration = Duration::from_secs(3);

/// A live run's directory. Dropping it undoes the journal and removes the directory.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: Flock<File>,
}

impl RunDir {
    /// Undoes what killed runs left, then makes a directory for this one.
    ///
    /// # Errors
    /// Not root, or no writable /run.
    pub fn create() -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "the lab makes namespaces and taps: run as root");
        undo_stale()?;
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(BASE).join(format!("{}.{count}", std::process::id()));
        // A directory appears with its lock held, so that no other run takes it for stale.
        let hidden = Path::new(BASE).join(format!(".{}.{count}", std::process::id()));
        let _ = fs::remove_dir_all(&hidden);
        fs::create_dir_all(&hidden).with_context(|| format!("creating {}", hidden.display()))?;
        let lock = lock(&hidden)?.context("a new directory is already locked")?;
        fs::rename(&hidden, &path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self { path, _lock: lock })
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `value` to a sysctl or cgroup file after noting what it says now.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn write(&self, file: &Path, value: &str) -> Result<()> {
        let old =
            fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        self.write_with_undo(file, value, old.trim())
    }

    /// Writes `value`; the undo writes `undo`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_with_undo(&self, file: &Path, value: &str, undo: &str) -> Result<()> {
        self.note(&format!("write {} {undo}", file.display()))?;
        fs::write(file, value).with_context(|| format!("writing {value} to {}", file.display()))
    }

    /// Makes a (cgroup) directory that disappears with the run.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn make_dir(&self, dir: &Path) -> Result<()> {
        self.note(&format!("rmdir {}", dir.display()))?;
        fs::create_dir(dir).with_context(|| format!("creating {}", dir.display()))
    }

    /// Locks the contended core: one run at a time may make guests compete, and change the
    /// scheduler's settings to do so.
    ///
    /// # Errors
    /// Another run holds it.
    pub fn lock_contended_core(&self) -> Result<Flock<File>> {
        let base = File::open(BASE).with_context(|| format!("opening {BASE}"))?;
        Flock::lock(base, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno).context(
            "another lab run is making guests compete on this machine: wait until it has ended",
        )
    }

    fn note(&self, line: &str) -> Result<()> {
        let mut file = OpenOptions::new().append(true).create(true).open(self.path.join("undo"))?;
        writeln!(file, "{line}").context("writing the undo journal")
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        undo(&self.path);
    }
}

/// Undoes every run directory nobody holds.
///
/// # Errors
/// The base directory cannot be listed.
pub fn undo_stale() -> Result<()> {
    let entries = match fs::read_dir(BASE) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()), // no run has been here
        other => other.with_context(|| format!("listing {BASE}"))?,
    };
    for entry in entries {
        let path = entry?.path();
        if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.')) {
            continue; // being made by another run this very moment
        }
        if let Ok(Some(_lock)) = lock(&path) {
            eprintln!("cleaning up after a run that was killed ({})", path.display());
            undo(&path);
        }
    }
    Ok(())
}

/// The lock of a run directory, or `None` if a live run holds it.
fn lock(dir: &Path) -> Result<Option<Flock<File>>> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(dir.join("lock"))
        .with_context(|| format!("opening the lock in {}", dir.display()))?;
    Ok(Flock::lock(file, FlockArg::LockExclusiveNonblock).ok())
}

/// Undoes all run directories of this process.
pub(crate) fn undo_mine() {
    let mine = format!("{}.", std::process::id());
    for entry in fs::read_dir(BASE).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&mine) {
            undo(&entry.path());
        }
    }
}

/// Undoes a journal, last line first, and removes its directory. Safe to repeat. A line that cannot
/// be undone is reported and left, because nothing better can be done at this point.
pub(crate) fn undo(dir: &Path) {
    kill_users(dir);
    let journal = fs::read_to_string(dir.join("undo")).unwrap_or_default();
    for line in journal.lines().rev() {
        let result = match line.split_once(' ') {
            Some(("write", rest)) => {
                let (file, value) = rest.split_once(' ').unwrap_or((rest, ""));
                fs::write(file, value)
            }
            Some(("rmdir", path)) => remove_dir_when_empty(Path::new(path)),
            _ => Err(std::io::Error::new(ErrorKind::InvalidData, "unknown word")),
        };
        if let Err(error) = result {
            eprintln!("could not undo {line:?}: {error}");
        }
    }
    let _ = fs::remove_dir_all(dir); // another undo of the same directory may have been faster
    let _ = fs::remove_dir(BASE); // fails, as it should, while other runs live
}

/// Kills every process that was started with this run's directory on its command line: children
/// of a child (user-mode Linux has some) that outlived it.
fn kill_users(dir: &Path) {
    let mine = dir.as_os_str().as_encoded_bytes();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let Some(Ok(pid)) = entry.file_name().to_str().map(str::parse) else { continue };
        if command.windows(mine.len()).any(|part| part == mine) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

fn remove_dir_when_empty(dir: &Path) -> std::io::Result<()> {
    let deadline = Instant::now() + RMDIR_LIMIT;
    loop {
        match fs::remove_dir(dir) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            // The kernel empties a cgroup a moment after its last process was reaped.
            Err(e) if e.kind() == ErrorKind::ResourceBusy && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return other,
        }
    }
}
