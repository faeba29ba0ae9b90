//! The state before flooding, so that the next process can undo everything exactly: a file per
//! network namespace, and a lock beside it that the watcher holds while it lives.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

/// All changes that are not undone yet, and the watcher's state.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Record {
    /// Process of the watcher.
    pub watcher: Option<i32>,
    /// The initial window that it gives routes.
    pub segments: Option<u32>,
    /// Connections flood by the congestion control `np_flood`, and routes are left alone.
    pub np_flood: bool,
    /// Names of the interfaces by which connections flood now.
    pub live: Vec<String>,
    /// Why none floods although a host allows it.
    #[serde(default)]
    pub held_back: Option<String>,
    /// Routes with an initial window of ours.
    pub routes: Vec<RouteRecord>,
    /// The earlier value of `tcp_slow_start_after_idle`, if it is ours now.
    pub slow_start: Option<String>,
    /// The earlier value of `tcp_min_tso_segs`, if it is ours now.
    pub pieces: Option<String>,
}

impl Record {
    /// The earlier values of those of [`crate::settings::ALL`] that are ours now.
    pub(crate) fn settings(&mut self) -> [&mut Option<String>; 2] {
        [&mut self.slow_start, &mut self.pieces]
    }
}

/// A route that was given an initial window.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RouteRecord {
    /// [`crate::route::Route::name`].
    pub name: String,
    /// The initial window it had, in segments.
    pub before: Option<u32>,
    /// The one it was given.
    pub ours: u32,
}

/// Where records of this network namespace are.
#[derive(Clone, Debug)]
pub struct Place(PathBuf);

/// Held by a watcher as long as it lives.
pub type Lock = Flock<File>;

impl Place {
    /// For the caller's network namespace: below `RUNTIME_DIRECTORY` (systemd sets it), or
    /// `/run/nightporter-guest`.
    ///
    /// # Errors
    /// No `/proc`.
    pub fn of_this_namespace() -> Result<Self> {
        let dir = std::env::var_os("RUNTIME_DIRECTORY")
            .map_or_else(|| PathBuf::from("/run/nightporter-guest"), PathBuf::from);
        Ok(Self(dir.join(format!("flood-{}.json", namespace()?))))
    }

    /// The record, which is empty if nothing was changed.
    ///
    /// # Errors
    /// The file cannot be read, or is not ours.
    pub fn read(&self) -> Result<Record> {
        match fs::read(&self.0) {
            Ok(text) => serde_json::from_slice(&text)
                .with_context(|| format!("{} is damaged: remove it", self.0.display())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Record::default()),
            Err(error) => Err(error).with_context(|| self.0.display().to_string()),
        }
    }

    /// Replaces the file in one step; removes it if there is nothing to record.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, record: &Record) -> Result<()> {
        let done = if *record == Record::default() {
            match fs::remove_file(&self.0) {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
                result => result,
            }
        } else {
            let part = self.0.with_extension("part");
            fs::write(&part, serde_json::to_vec_pretty(record)?)
                .and_then(|()| fs::rename(&part, &self.0))
        };
        done.with_context(|| format!("writing {}", self.0.display()))
    }

    /// The lock; `None` while a watcher has it. Makes the directory.
    ///
    /// # Errors
    /// The directory cannot be made or written, as without root.
    pub fn try_lock(&self) -> Result<Option<Lock>> {
        if let Some(dir) = self.0.parent() {
            fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        }
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).open(self.lock_path());
        let file = file.with_context(|| self.lock_path().display().to_string())?;
        lock(file, FlockArg::LockExclusiveNonblock)
    }

    /// Waits until no watcher has the lock.
    ///
    /// # Errors
    /// As [`Self::try_lock`].
    pub fn wait_for_lock(&self) -> Result<Lock> {
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).open(self.lock_path())?;
        lock(file, FlockArg::LockExclusive)?.context("a lock that waits is got")
    }

    /// Whether a watcher is running. Anybody may ask.
    ///
    /// # Errors
    /// The lock cannot be opened.
    pub fn is_watched(&self) -> Result<bool> {
        match File::open(self.lock_path()) {
            Ok(file) => Ok(lock(file, FlockArg::LockSharedNonblock)?.is_none()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).with_context(|| self.lock_path().display().to_string()),
        }
    }

    /// Says in the lock's file who holds it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn sign(lock: &Lock) -> Result<()> {
        let mut file: &File = lock;
        file.set_len(0)?;
        file.write_all(std::process::id().to_string().as_bytes()).context("signing the lock")
    }

    /// The process that signed the lock last.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn keeper(&self) -> Result<Option<i32>> {
        let text = fs::read_to_string(self.lock_path()).context("reading the lock")?;
        Ok(text.parse().ok())
    }

    /// The file for messages of a watcher in the background.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.0.with_extension("log")
    }

    fn lock_path(&self) -> PathBuf {
        self.0.with_extension("lock")
    }
}

/// The number of the caller's network namespace.
///
/// # Errors
/// No `/proc`.
pub fn namespace() -> Result<u64> {
    let path = "/proc/thread-self/ns/net";
    Ok(fs::metadata(path).context(path)?.ino())
}

fn lock(file: File, how: FlockArg) -> Result<Option<Lock>> {
    match Flock::lock(file, how) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno).context("locking"),
    }
}
