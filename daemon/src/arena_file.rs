//! The file that holds the store, so that promises survive the process that made them (LIFE-09).
//!
//! The file at `daemon.arena` is always a whole arena or empty: another layout, as after a change
//! of budgets, is made beside it and renamed over it. Its flock is held for as long as the daemon
//! runs, so two daemons never share one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nightporter_core::limits::PAGE;
use nightporter_core::store::arena::{Arena, ArenaError};
use nightporter_core::store::record::Record;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, FlockArg, fallocate};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use crate::config::reader::human_bytes;
use crate::sys;

/// Keeps other daemons away from the arena while it lives.
#[derive(Debug)]
pub struct ArenaLock {
    path: PathBuf,
    _file: Flock<File>,
}

impl ArenaLock {
    /// Removes the file: nobody is owed anything, so the next daemon, of whatever version, starts
    /// with nothing.
    ///
    /// # Errors
    /// Those of unlink(2).
    pub fn remove(self) -> io::Result<()> {
        std::fs::remove_file(&self.path)
    }
}

/// Why there is no arena. The text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ArenaFileError {
    /// Another daemon has it.
    #[error(
        "arena {0} is in use by another nightporterd\n    \
         fix: stop that one, or give each daemon its own daemon.arena"
    )]
    InUse(PathBuf),
    /// There is something else at that path, and it is left alone.
    #[error("{0} exists and is not an arena\n    fix: remove it, or choose another daemon.arena")]
    NotAnArena(PathBuf),
    /// It may hold promises that this version cannot read.
    #[error(
        "arena {0} was made by another version of nightporterd\n    \
         fix: let that version drain and stop first; or remove the file, and remotes of \
         connections that were being acknowledged will not be told of lost bytes"
    )]
    OtherVersion(PathBuf),
    /// The file system is too small.
    #[error(
        "there is no room for an arena of {size} at {path}\n    \
         fix: lower vm.budget, choose another daemon.arena such as /dev/shm/nightporter/arena, or \
         enlarge its tmpfs (mount -o remount,size=...)",
        size = human_bytes(bytes.next_multiple_of(1 << 20)), path = path.display()
    )]
    NoRoom {
        /// The arena's path.
        path: PathBuf,
        /// Bytes needed.
        bytes: u64,
    },
    /// The operating system refuses.
    #[error("arena {0}: {1}\n    fix: choose another daemon.arena, or correct its permissions")]
    Io(PathBuf, io::Error),
}

/// Records and pages that budgets and flow limits add up to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ArenaSize {
    /// Connections that can be promised something at a time.
    pub records: usize,
    /// Pages of the store.
    pub pages: usize,
}

impl ArenaSize {
    /// For so many bytes of store and so many connections.
    #[must_use]
    pub fn new(budget_bytes: u64, flows: u32) -> Self {
        let pages = usize::try_from(budget_bytes.div_ceil(PAGE as u64));
        Self { records: flows as usize, pages: pages.expect("64-bit Linux") }
    }

    fn len(self) -> usize {
        Arena::layout_len(self.records, self.pages)
    }
}

/// Opens the arena at `path`, or makes one of `size`. What a predecessor promised there is kept.
///
/// # Errors
/// See [`ArenaFileError`]; then nothing was changed.
pub fn open(path: &Path, size: ArenaSize) -> Result<(Arena<'static>, ArenaLock), ArenaFileError> {
    let lock = lock(path)?;
    warn_unless_tmpfs(path, &lock);
    let old_len = lock.metadata().map_err(|e| ArenaFileError::Io(path.into(), e))?.len();
    if old_len == 0 {
        return make(path, size, &[]);
    }
    let old_len = usize::try_from(old_len).expect("64-bit Linux");
    allocate(path, &lock, old_len)?;
    let memory =
        sys::map_forever(lock.as_fd(), old_len).map_err(|e| ArenaFileError::Io(path.into(), e))?;
    let old = Arena::open(memory).map_err(|e| match e {
        ArenaError::OtherLayout => ArenaFileError::OtherVersion(path.into()),
        ArenaError::NotAnArena | ArenaError::Misaligned | ArenaError::WrongLength => {
            ArenaFileError::NotAnArena(path.into())
        }
    })?;
    if old_len == size.len() && old.pages_total() == size.pages {
        return Ok((old, ArenaLock { path: path.into(), _file: lock }));
    }
    // Bytes are not carried over: a restart resets the flows that were owed some (LIFE-09), and for
    // that their records are enough.
    let owed: Vec<Record> =
        old.records().map(|(_, record)| record).filter(|r| r.rcv_nxt > r.guest_una).collect();
    tracing::info!(owed = owed.len(), "the arena gets another size");
    // Lower limits hide no promise: this arena has room for all, the one after it is as asked.
    let size = ArenaSize { records: size.records.max(owed.len()), ..size };
    make(path, size, &owed)
}

/// Opens and locks the file, which is empty if it did not exist.
fn lock(path: &Path) -> Result<Flock<File>, ArenaFileError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|e| ArenaFileError::Io(path.into(), e))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| match e {
        Errno::EWOULDBLOCK => ArenaFileError::InUse(path.into()),
        e => ArenaFileError::Io(path.into(), e.into()),
    })
}

/// Makes a fresh arena that holds `owed`, for which it has room, and puts it in the place of what
/// is at `path`.
fn make(
    path: &Path,
    size: ArenaSize,
    owed: &[Record],
) -> Result<(Arena<'static>, ArenaLock), ArenaFileError> {
    let error = |e: io::Error| ArenaFileError::Io(path.into(), e);
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    // Left by a daemon that was killed here; whoever holds the lock of `path` may remove it.
    let _ = std::fs::remove_file(&new);
    let result = (|| {
        let lock = lock(&new)?;
        allocate(path, &lock, size.len())?;
        let memory = sys::map_forever(lock.as_fd(), size.len()).map_err(error)?;
        let instance = u64::from(std::process::id());
        let mut arena = Arena::format(memory, size.records, size.pages, instance)
            .expect("the mapping has just this length");
        for record in owed {
            arena.alloc_record(record).expect("the caller made room");
        }
        std::fs::rename(&new, path).map_err(error)?;
        Ok((arena, ArenaLock { path: path.into(), _file: lock }))
    })();
    if result.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    result
}

/// Takes the file's memory now, so that a write to the mapping can never find none.
fn allocate(path: &Path, file: &File, len: usize) -> Result<(), ArenaFileError> {
    let bytes = i64::try_from(len).expect("budgets are bounded");
    fallocate(file, FallocateFlags::empty(), 0, bytes).map_err(|e| match e {
        Errno::ENOSPC | Errno::ENOMEM => {
            ArenaFileError::NoRoom { path: path.into(), bytes: len as u64 }
        }
        e => ArenaFileError::Io(path.into(), e.into()),
    })
}

fn warn_unless_tmpfs(path: &Path, file: &File) {
    if fstatfs(file).is_ok_and(|fs| fs.filesystem_type() != TMPFS_MAGIC) {
        tracing::warn!(
            arena = %path.display(),
            "the arena is not on a tmpfs: the kernel's write-back can stall the data path"
        );
    }
}

#[cfg(test)]
mod tests;
