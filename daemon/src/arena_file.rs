//! The file that holds the store, so that promises survive the process that made them (LIFE-09).
//!
//! It is sparse: it has places for the largest possible arena ([`PLACES`]), and memory for the sum
//! of budgets and flow limits. So it grows and shrinks where it is, and is mapped once.
//!
//! The file at `daemon.arena` is always a whole arena or empty: a new one is made beside it and
//! renamed over it. Its flock is held for as long as the daemon runs, so two daemons never share
//! one.
//!
//! The kernel clears the memory of a new file, half a second a GB, and VMs wait. So a daemon that
//! owes nothing and is likely to have a successor leaves its file under another name. Its memory
//! is the next one's, and so are its connections, if they are of the same version and not old.
//!
//! A process that waits for the flock says so by a lock of the file's first byte, which has nothing
//! to do with the flock: one that can do without the arena (`settle`) gives it up then. That one
//! has locked the second byte, so that others know that it will.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use nightporter_core::limits::{PAGE, T_IDLE};
use nightporter_core::store::arena::{Arena, ArenaError, ArenaSize};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, Flock, FlockArg, fallocate, fcntl};
use nix::libc;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::unistd::geteuid;

use crate::config::reader::human_bytes;
use crate::limits::PLACES;
use crate::sys;

/// The file, which keeps other daemons away from the arena as long as the process lives.
#[derive(Debug)]
pub struct ArenaFile {
    path: PathBuf,
    /// Locked until the process ends.
    file: &'static File,
    /// A predecessor has left nothing in it.
    pub is_new: bool,
    /// The size for which it had memory when it was opened.
    pub size: ArenaSize,
}

impl ArenaFile {
    /// Takes memory for so much, if it has less. The arena uses no more than `now`.
    ///
    /// # Errors
    /// See [`ArenaFileError`]; then it has memory for `now`, as before.
    pub fn grow(&self, now: ArenaSize, size: ArenaSize) -> Result<(), ArenaFileError> {
        let result = allocate(&self.path, self.file, Some(now), size);
        result.inspect_err(|_| give_back_beyond(self.file, now))
    }

    /// Leaves the file to the next daemon: nobody is owed anything. One of another version starts
    /// with nothing.
    ///
    /// # Errors
    /// Those of rename(2).
    pub fn leave(&self) -> io::Result<()> {
        if is_named(self.file, &self.path)? {
            std::fs::rename(&self.path, beside(&self.path, LEFT))?;
        }
        Ok(())
    }

    /// Whether a daemon waits for it.
    pub fn is_wanted(&self) -> bool {
        let mut found = FIRST_BYTE;
        let asked = fcntl(self.file, FcntlArg::F_OFD_GETLK(&mut found));
        asked.is_ok() && i32::from(found.l_type) != libc::F_UNLCK
    }

    /// Another process may have it from now on, and this one must not touch it any more.
    ///
    /// # Errors
    /// Those of flock(2).
    pub fn give_up(&self) -> io::Result<()> {
        Ok(rustix::fs::flock(self.file, rustix::fs::FlockOperation::Unlock)?)
    }

    /// Removes the file: nobody is owed anything, so the next daemon, of whatever version, starts
    /// with nothing. A file that somebody put in its place stays.
    ///
    /// # Errors
    /// Those of unlink(2).
    pub fn remove(&self) -> io::Result<()> {
        if is_named(self.file, &self.path)? {
            std::fs::remove_file(&self.path)?;
        }
        Ok(())
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
    /// Another user may have made it, or can put another file in its place.
    #[error(
        "arena {0}: {1}\n    \
         fix: remove it, and let nobody but this user and root own and write its directory"
    )]
    NotOurs(PathBuf, &'static str),
    /// The operating system refuses.
    #[error("arena {0}: {1}\n    fix: choose another daemon.arena, or correct its permissions")]
    Io(PathBuf, io::Error),
}

/// The arena for so many bytes of store and so many connections.
#[must_use]
pub fn size_for(budget_bytes: u64, flows: u32) -> ArenaSize {
    let pages = usize::try_from(budget_bytes.div_ceil(PAGE as u64));
    ArenaSize { records: flows as usize, pages: pages.expect("64-bit Linux") }
}

fn file_len() -> usize {
    Arena::layout_len(PLACES.records, PLACES.pages)
}

/// An arena without a daemon. As long as this is held, a daemon that starts waits for whoever has
/// the arena.
#[derive(Debug)]
pub struct Left {
    /// Its size.
    pub size: ArenaSize,
    _second_byte: File,
}

/// The arena that a daemon has left at `path`. `None`: there is none of this version, or a daemon
/// has it.
#[must_use]
pub fn left_at(path: &Path) -> Option<Left> {
    let file = Flock::lock(File::open(path).ok()?, FlockArg::LockSharedNonblock).ok()?;
    let Some(size) = size_left(&file) else {
        let path = path.display();
        tracing::warn!("{path} is no arena of this version: its promises wait for its daemon");
        return None;
    };
    let file = file.unlock().ok()?;
    fcntl(&file, FcntlArg::F_OFD_SETLK(&SETTLES)).ok()?;
    Some(Left { size, _second_byte: file })
}

/// Opens the arena at `path`, or makes one of `size`. The records of a predecessor are kept, and
/// the bytes that it promised: the store gets smaller only if there are none.
///
/// # Errors
/// See [`ArenaFileError`]; then nothing was changed.
pub fn open(path: &Path, size: ArenaSize) -> Result<(Arena<'static>, ArenaFile), ArenaFileError> {
    let io = |e| ArenaFileError::Io(path.into(), e);
    let file = lock(path, false)?;
    warn_unless_tmpfs(path, &file);
    let is_there = file.metadata().map_err(io)?.len() > 0;
    if is_there {
        let _ = std::fs::remove_file(beside(path, LEFT)); // of one before
    }
    let found = if is_there { Some(file) } else { take_left(path) };
    let Some(file) = found else { return make(path, size) };
    let len = file.metadata().map_err(io)?.len();
    let mut head = vec![0; usize::try_from(len).unwrap_or(usize::MAX).min(HEAD_BYTES)];
    file.read_exact_at(&mut head, 0).map_err(io)?;
    let explain = |e| match e {
        ArenaError::OtherLayout => ArenaFileError::OtherVersion(path.into()),
        ArenaError::NotAnArena | ArenaError::Misaligned | ArenaError::WrongLength => {
            ArenaFileError::NotAnArena(path.into())
        }
    };
    let (places, before) = Arena::sizes_of(&head).map_err(explain)?;
    if places != PLACES || len != file_len() as u64 {
        return Err(explain(ArenaError::OtherLayout));
    }
    let size = ArenaSize { records: size.records.max(before.records), ..size };
    let both = ArenaSize { pages: size.pages.max(before.pages), ..size };
    let allocated = allocate(path, &file, has_memory(&file, before).then_some(before), both);
    if allocated.is_err() && !is_there {
        let _ = std::fs::rename(path, beside(path, LEFT)); // as it was
    }
    allocated?;
    let (memory, file) = sys::map_forever(file, file_len()).map_err(io)?;
    let mut arena = Arena::open(memory).map_err(explain)?;
    let is_new = arena.records().next().is_none();
    let owes = arena.records().any(|(_, it)| it.rcv_nxt > it.guest_una);
    let size = if owes { both } else { size };
    if !owes {
        arena.forget_pages(); // nobody's
    }
    arena.resize(size);
    // This includes memory that was taken for a change which its daemon did not finish.
    give_back_beyond(file, size);
    Ok((arena, ArenaFile { path: path.into(), file, is_new, size }))
}

/// The beginning of an arena, with its kind and size.
const HEAD_BYTES: usize = 4096;

/// Opens and locks the file, which is empty if it did not exist. Its content is believed, so it
/// must be the daemon's own: made by this user for nobody else, under this name alone, in a
/// directory where nobody else can put another file.
fn lock(path: &Path, new: bool) -> Result<Flock<File>, ArenaFileError> {
    for _ in 0..TRIES {
        let file = lock_once(path, new)?;
        // While this process waited for the lock, the other daemon may have removed the file, or
        // replaced it: the lock of a file without a name keeps nobody away.
        match is_named(&file, path) {
            Ok(true) => return Ok(file),
            Ok(false) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(ArenaFileError::Io(path.into(), e)),
        }
    }
    Err(ArenaFileError::InUse(path.into()))
}

/// `path` is this very file's.
fn is_named(file: &File, path: &Path) -> io::Result<bool> {
    let (own, there) = (file.metadata()?, path.symlink_metadata()?);
    Ok((own.dev(), own.ino(), own.nlink()) == (there.dev(), there.ino(), 1))
}

fn lock_once(path: &Path, new: bool) -> Result<Flock<File>, ArenaFileError> {
    let io = |e: io::Error| ArenaFileError::Io(path.into(), e);
    let not_ours = |why| Err(ArenaFileError::NotOurs(path.into(), why));
    let own = geteuid().as_raw();
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("/"));
    let dir = dir.metadata().map_err(io)?;
    if ![0, own].contains(&dir.uid()) {
        return not_ours("its directory belongs to somebody else");
    }
    // Others may write to a sticky directory: they cannot replace our file there.
    if dir.mode() & 0o022 != 0 && dir.mode() & STICKY == 0 {
        return not_ours("others can write to its directory");
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options.create(!new).create_new(new).truncate(false);
    let file = match options.open(path) {
        Err(e) if e.raw_os_error() == Some(libc::ELOOP) => return not_ours("it is a link"),
        result => result.map_err(io)?,
    };
    let meta = file.metadata().map_err(io)?;
    if !meta.is_file() {
        return Err(ArenaFileError::NotAnArena(path.into()));
    }
    if meta.uid() != own {
        return not_ours("it belongs to somebody else");
    }
    if meta.mode() & 0o077 != 0 {
        return not_ours("others can read or write it");
    }
    if meta.nlink() != 1 {
        return not_ours("it has more than one hard link");
    }
    let mut file = file;
    for tries in 0..TRIES_WHILE_SETTLING {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => {
                // It waits no longer, and others may.
                let _ = fcntl(&*lock, FcntlArg::F_OFD_SETLK(&NOT_WAITING));
                return Ok(lock);
            }
            // A daemon that was just killed has it until the kernel has taken its memory apart.
            Err((unlocked, Errno::EWOULDBLOCK)) => {
                // Errors: another one waits, too.
                let _ = fcntl(&unlocked, FcntlArg::F_OFD_SETLK(&FIRST_BYTE));
                if tries >= TRIES && !is_settled(&unlocked) {
                    break;
                }
                file = unlocked;
            }
            Err((_, e)) => return Err(ArenaFileError::Io(path.into(), e.into())),
        }
        std::thread::sleep(BETWEEN_TRIES);
    }
    Err(ArenaFileError::InUse(path.into()))
}

/// A run that settles has the arena, and makes way once it has attached its taps.
fn is_settled(file: &File) -> bool {
    let mut found = libc::flock { l_start: SETTLES.l_start, ..FIRST_BYTE };
    let asked = fcntl(file, FcntlArg::F_OFD_GETLK(&mut found));
    asked.is_ok() && i32::from(found.l_type) != libc::F_UNLCK
}

/// For the lock, two seconds.
const TRIES: usize = 40;
/// For that of a run that settles, a minute: 250 taps take their time.
const TRIES_WHILE_SETTLING: usize = 1200;
const BETWEEN_TRIES: Duration = Duration::from_millis(50);

/// The lock of a process that waits for the flock (fcntl_locking(2)), until it has that or closes
/// the file.
const FIRST_BYTE: libc::flock = libc::flock {
    l_type: 1,   // F_WRLCK
    l_whence: 0, // SEEK_SET
    l_start: 0,
    l_len: 1,
    l_pid: 0,
};

const NOT_WAITING: libc::flock = libc::flock { l_type: 2, ..FIRST_BYTE }; // F_UNLCK
/// The lock of a run that settles, which has opened the file to read (F_RDLCK).
const SETTLES: libc::flock = libc::flock { l_type: 0, l_start: 1, ..FIRST_BYTE };

/// Only the owner of a file in such a directory may rename or remove it (inode(7), `S_ISVTX`).
const STICKY: u32 = 0o1000;

/// A file that was left is whole, so all that it says to have is there, unless somebody has punched
/// holes into it.
fn has_memory(file: &File, size: ArenaSize) -> bool {
    let needed = Arena::ranges(PLACES, size).iter().map(Range::len).sum::<usize>();
    file.metadata().is_ok_and(|meta| meta.blocks() * 512 >= needed as u64)
}

/// The size for which a file that was left as memory has some; `None`: that cannot be told.
fn size_left(file: &File) -> Option<ArenaSize> {
    let mut head = vec![0; HEAD_BYTES];
    file.read_exact_at(&mut head, 0).ok()?;
    let (places, size) = Arena::sizes_of(&head).ok()?;
    let is_ours = places == PLACES && file.metadata().ok()?.len() == file_len() as u64;
    (is_ours && has_memory(file, size)).then_some(size)
}

/// The name of a file that is to become an arena,
const NEW: &str = ".new";
/// and of an arena whose daemon has stopped and owes nobody anything.
const LEFT: &str = ".empty";

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The arena of a daemon that owes nobody anything, in the place of the empty file at `path`: its
/// memory is there, and its connections go on. `None`: there is none of this version, or its
/// connections may have gone on elsewhere long since.
fn take_left(path: &Path) -> Option<Flock<File>> {
    let left = beside(path, LEFT);
    let at_s = u64::try_from(left.symlink_metadata().ok()?.ctime()).ok()?;
    let age = (UNIX_EPOCH + Duration::from_secs(at_s)).elapsed().unwrap_or_default();
    if age > Duration::from_nanos(T_IDLE.as_nanos()) {
        return None;
    }
    let file = lock(&left, false).ok()?;
    size_left(&file)?;
    std::fs::rename(&left, path).ok()?;
    Some(file)
}

/// Makes a fresh arena, and puts it in the place of the file at `path`.
fn make(path: &Path, size: ArenaSize) -> Result<(Arena<'static>, ArenaFile), ArenaFileError> {
    let new = &beside(path, NEW);
    // A daemon that was killed here left it; the holder of the lock of `path` may remove it.
    let _ = std::fs::remove_file(new);
    let _ = std::fs::remove_file(beside(path, LEFT)); // of another version
    let error = |e: io::Error| ArenaFileError::Io(path.into(), e);
    let result = (|| {
        let file = lock(new, true)?;
        allocate(path, &file, None, size)?;
        file.set_len(file_len() as u64).map_err(error)?;
        let (memory, file) = sys::map_forever(file, file_len()).map_err(error)?;
        let instance = u64::from(std::process::id());
        let mut arena = Arena::format(memory, PLACES.records, PLACES.pages, instance)
            .expect("the mapping has just this length");
        arena.resize(size);
        give_back_beyond(file, size);
        std::fs::rename(new, path).map_err(error)?;
        Ok((arena, ArenaFile { path: path.into(), file, is_new: true, size }))
    })();
    if result.is_err() {
        let _ = std::fs::remove_file(new);
    }
    result
}

/// Takes memory for `size` now, so that a write to the mapping always finds some. Memory that is
/// there for `now` is not asked for again, because the kernel looks at each page of a range, 0.1 s
/// a GB.
fn allocate(
    path: &Path,
    file: &File,
    now: Option<ArenaSize>,
    size: ArenaSize,
) -> Result<(), ArenaFileError> {
    let no_room = |bytes: usize| ArenaFileError::NoRoom { path: path.into(), bytes: bytes as u64 };
    if size.records > PLACES.records || size.pages > PLACES.pages {
        return Err(no_room(size.pages.saturating_mul(PAGE)));
    }
    let mut ranges = Arena::ranges(PLACES, size);
    if let Some(now) = now {
        for (range, has) in ranges.iter_mut().zip(Arena::ranges(PLACES, now)) {
            range.start = has.end;
        }
    }
    let sum = ranges.iter().map(Range::len).sum();
    let begun = Instant::now();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        fallocate(file, FallocateFlags::empty(), bytes(range.start), bytes(range.len())).map_err(
            |e| match e {
                Errno::ENOSPC | Errno::ENOMEM => no_room(sum),
                e => ArenaFileError::Io(path.into(), e.into()),
            },
        )?;
    }
    if let Some(words) = slow(sum, begun.elapsed()) {
        tracing::info!(arena = %path.display(), "{words}");
    }
    Ok(())
}

/// The log's words for so many bytes whose allocation took so long. `None`: nothing.
fn slow(bytes: usize, took: Duration) -> Option<String> {
    let size = human_bytes((bytes as u64).next_multiple_of(1 << 20));
    (took > QUICK)
        .then(|| format!("the allocation of {size} for the store took {:.1} s", took.as_secs_f64()))
}

/// The log says nothing of an allocation that takes no longer.
const QUICK: Duration = Duration::from_secs(1);

/// Gives back the file's memory beyond an arena of this size.
fn give_back_beyond(file: &File, size: ArenaSize) {
    for (used, all) in Arena::ranges(PLACES, size).into_iter().zip(Arena::ranges(PLACES, PLACES)) {
        give_back(file, used.end.next_multiple_of(HEAD_BYTES)..all.end);
    }
}

/// The kernel may have the memory of this range.
fn give_back(file: &File, range: Range<usize>) {
    if range.start < range.end {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        // Where that does not work nothing is lost but memory.
        let _ = fallocate(file, flags, bytes(range.start), bytes(range.len()));
    }
}

fn bytes(n: usize) -> i64 {
    i64::try_from(n).expect("places are bounded")
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
