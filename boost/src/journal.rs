//! The journal: what is favoured, written before it is, so that others can take it back (BST-03).
//!
//! It is a file on tmpfs, with places of fixed length that have a line of JSON each: written and
//! read without a lock, because one process writes it, and others read it when that is dead. It
//! survives both processes.

use std::fs::{File, OpenOptions, read_to_string, write};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, setpriority_process};
use serde::{Deserialize, Serialize};

use crate::process::{Identity, Stat, Thread};
use crate::sys::{Class, set_class};

/// Bytes of a place.
const PLACE: usize = 512;
/// Nice of a thread that pays back.
pub(crate) const NICE_LOW: i32 = 19;
/// A thread of a cgroup that is favoured by weight has nice values from minus this one on.
pub(crate) const RAISED_MAX: i32 = 5;

/// Something that may be favoured, and what it was before.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Entry {
    /// A thread of the normal class and nice 0, which may have this class, or another nice value.
    Thread {
        /// Its process,
        pid: i32,
        /// its number,
        tid: i32,
        /// and when it began.
        start: u64,
        /// The class that it is given.
        policy: i32,
        /// Its priority.
        priority: u8,
    },
    /// The weight of a cgroup.
    Weight {
        /// `cpu.shares` or `cpu.weight`.
        file: PathBuf,
        /// Before.
        value: u32,
    },
}

impl Entry {
    pub(crate) const fn of_thread(id: Identity, class: Class) -> Self {
        let Identity { pid, tid, start } = id;
        Self::Thread { pid, tid, start, policy: class.policy, priority: class.priority }
    }

    /// As it was before. A thread that is gone is as it should be, and so is one that an operator
    /// has changed meanwhile.
    pub(crate) fn take_back(&self) -> io::Result<()> {
        match *self {
            Self::Thread { pid, tid, start, policy, priority } => {
                let Ok(thread) = Thread::open(Identity { pid, tid, start }) else { return Ok(()) };
                let stat = thread.stat()?;
                let class = unless_gone(if stat.class == (Class { policy, priority }) {
                    set_class(tid, Class::NORMAL)
                } else {
                    Ok(())
                });
                let ours = stat.nice == NICE_LOW || (-RAISED_MAX..0).contains(&stat.nice);
                let nice = if ours { unless_gone(set_nice(tid, 0)) } else { Ok(()) };
                class.and(nice)
            }
            Self::Weight { ref file, value } => match write(file, value.to_string()) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                result => result,
            },
        }
    }
}

/// The thread or process may end at any time.
pub(crate) fn unless_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        result => result,
    }
}

pub(crate) fn set_nice(tid: i32, nice: i32) -> io::Result<()> {
    let tid = Pid::from_raw(tid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(setpriority_process(Some(tid), nice)?)
}

/// A place in the journal.
#[derive(Debug)]
#[must_use]
pub(crate) struct Place(usize);

/// The writer's.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    taken: Vec<bool>,
}

impl Journal {
    /// Opens the journal, which must not say anything any more: see [`take_back`].
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        Ok(Self { file, taken: Vec::new() })
    }

    /// From now on `entry` may be favoured.
    pub(crate) fn put(&mut self, entry: &Entry) -> io::Result<Place> {
        let mut line = serde_json::to_string(entry)?.into_bytes();
        if line.len() >= PLACE {
            return Err(io::Error::other("the name of a cgroup is too long"));
        }
        line.resize(PLACE - 1, b' ');
        line.push(b'\n');
        let free = self.taken.iter().position(|taken| !taken);
        let place = free.unwrap_or_else(|| {
            self.taken.push(false);
            self.taken.len() - 1
        });
        self.file.write_all_at(&line, (place * PLACE) as u64)?;
        self.taken[place] = true;
        Ok(Place(place))
    }

    /// It is as it was before.
    pub(crate) fn clear(&mut self, place: Place) {
        let mut line = [b' '; PLACE];
        line[PLACE - 1] = b'\n';
        // If it fails, something is taken back once more, which changes nothing.
        let _ = self.file.write_all_at(&line, (place.0 * PLACE) as u64);
        self.taken[place.0] = false;
    }
}

/// Takes back everything that the journal at `path` names, whose writer is dead; how much that was.
///
/// # Errors
/// What could not be taken back; the rest is.
pub fn take_back(path: &Path) -> io::Result<usize> {
    let text = match read_to_string(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        text => text?,
    };
    let (mut count, mut failed) = (0, None);
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        // A place that was not written whole was not followed by anything.
        let Ok(entry) = serde_json::from_str::<Entry>(line) else { continue };
        count += 1;
        if let Err(e) = entry.take_back() {
            failed = Some(io::Error::new(e.kind(), format!("{line}: {e}")));
        }
    }
    match failed {
        Some(e) => Err(e),
        None => write(path, "").map(|()| count),
    }
}

/// The class and nice value of a thread are its own (BST-03). Errors: words for the operator.
pub(crate) fn check_plain(stat: &Stat, pays: bool) -> Result<(), String> {
    let Stat { tid, comm, nice, class, .. } = stat;
    if class.is_real_time() {
        return Err(format!("thread {tid} ({comm}) has a real-time class of its own"));
    }
    if *class != Class::NORMAL {
        return Err(format!("thread {tid} ({comm}) has a scheduling class of its own"));
    }
    if *nice != 0 && !(pays && *nice == NICE_LOW) {
        return Err(format!("thread {tid} ({comm}) has nice {nice} of its own"));
    }
    Ok(())
}
