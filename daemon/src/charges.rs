//! Pages of guest memory that are charged to this process.
//!
//! A page of a shared file is charged to the control group of whoever touches it first, and stays
//! so as long as the file has it. So a front-end that shares a file without content has the daemon
//! pay for what it makes the daemon touch, and goes on to do so after the daemon has unmapped the
//! file, as long as somebody has it open; nothing tells whether anybody has. `vm.memory_max` bounds
//! both: no more may be shared at a time, and files that are shared no longer ([`Left`]) count
//! until the daemon's control group shows that there is room for all that the VMs may have.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use crate::vhost::guest_mem::{GuestMemory, MemError};

/// Files that a VM's front-ends have left behind are remembered one by one up to this many.
const LEFT_MAX: usize = 256;

/// The kernel's statistics that count: memory that it cannot have back (cgroup-v2.rst, and
/// cgroup-v1/memory.rst, whose totals are those of the group with the groups below it).
const KEYS: [&str; 3] = ["anon", "shmem", "pagetables"];
const KEYS_OF_V1: [&str; 2] = ["total_rss", "total_shmem"];
/// The statistics of what is charged to this process' control group.
static USAGE: OnceLock<File> = OnceLock::new();
/// The most that this process takes, with all that its VMs may share; 0: that has no bound.
static ALL_MAX: AtomicU64 = AtomicU64::new(0);

/// Opens the file with them, of either version of control groups. Nothing happens if
/// there is none.
pub(crate) fn open() {
    let Ok(own) = std::fs::read_to_string("/proc/self/cgroup") else { return };
    let of_line = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(":/")?;
        let mount = match controllers {
            "" => "/sys/fs/cgroup",
            _ if controllers.split(',').any(|it| it == "memory") => "/sys/fs/cgroup/memory",
            _ => return None,
        };
        File::open(Path::new(mount).join(group).join("memory.stat")).ok()
    };
    if let Some(file) = own.lines().find_map(of_line) {
        let _ = USAGE.set(file);
    }
}

/// This process takes no more than this, with what its VMs may share; `None`: that has no bound.
pub(crate) fn set_max(bytes: Option<u64>) {
    ALL_MAX.store(bytes.unwrap_or(0), Ordering::Relaxed);
}

/// Whether so much more may be charged.
fn has_room(bytes: u64) -> bool {
    let most = ALL_MAX.load(Ordering::Relaxed);
    let Some(mut usage) = USAGE.get().filter(|_| most > 0) else { return true };
    let mut text = String::new();
    let read = usage.rewind().and_then(|()| usage.read_to_string(&mut text));
    read.is_err() || sum(&text).saturating_add(bytes) <= most
}

fn sum(statistics: &str) -> u64 {
    let is_v1 = statistics.lines().any(|line| line.starts_with(KEYS_OF_V1[0]));
    let keys = if is_v1 { &KEYS_OF_V1[..] } else { &KEYS };
    let counts = |line: &str| {
        let (key, bytes) = line.split_once(' ')?;
        if keys.contains(&key) { bytes.parse::<u64>().ok() } else { None }
    };
    statistics.lines().filter_map(counts).sum()
}

/// Whether the control group of this process, or one above it, had a limit of memory at the start
/// (Documentation/admin-guide/cgroup-v2.rst, `memory.max`).
pub(crate) fn memory_is_limited() -> bool {
    static IS_LIMITED: LazyLock<bool> = LazyLock::new(find_memory_limit);
    *IS_LIMITED
}

fn find_memory_limit() -> bool {
    let Ok(own) = std::fs::read_to_string("/proc/self/cgroup") else { return false };
    let Some(own) = own.lines().find_map(|line| line.strip_prefix("0::/")) else { return false };
    Path::new("/sys/fs/cgroup").join(own).ancestors().any(|group| {
        let limit = std::fs::read_to_string(group.join("memory.max"));
        limit.is_ok_and(|limit| limit.trim() != "max")
    })
}

/// A file: its device and inode.
pub(crate) type Id = (u64, u64);

/// Files that front-ends of a VM have shared and share no longer, and how much of each.
#[derive(Debug, Default)]
pub(crate) struct Left(Mutex<Vec<(Id, u64)>>);

impl Left {
    /// They share it no longer.
    pub(crate) fn add(&self, file: Id, bytes: u64) {
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // When they are too many it counts under another name.
        let is_full = files.len() >= LEFT_MAX;
        let known = files.iter_mut().find(|(known, _)| *known == file);
        match known {
            Some((_, known)) => *known = bytes.max(*known),
            None if is_full => files[0].1 = files[0].1.saturating_add(bytes),
            None => files.push((file, bytes)),
        }
    }

    /// Whether they may have shared `bytes` in all from now on, in these files, of which `more` are
    /// new. If so, what they left before either leaves room for it, or is not there any more.
    pub(crate) fn allows(&self, files: &[Id], (bytes, more): (u64, u64), most: u64) -> bool {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let others = left.iter().filter(|(file, _)| !files.contains(file));
        let sum = others.fold(bytes, |sum, (_, len)| sum.saturating_add(*len));
        let is_known = left.iter().any(|(file, _)| files.contains(file));
        if sum > most {
            // Pages of a file that comes back are charged already.
            if !has_room(if is_known { 0 } else { more }) {
                return false;
            }
            left.clear();
        }
        left.retain(|(file, _)| !files.contains(file));
        true
    }
}

/// How much a front-end may share.
#[derive(Debug, Default)]
pub(crate) struct Share {
    most: Option<u64>,
    left: Arc<Left>,
}

impl Share {
    /// So much, beside what the earlier ones of this device have left.
    pub(crate) fn new(most: Option<u64>, left: &Arc<Left>) -> Self {
        Self { most, left: Arc::clone(left) }
    }

    /// Whether all of this may be shared, of which `more` bytes were not before.
    pub(crate) fn check(&self, memory: &GuestMemory, more: u64) -> Result<(), MemError> {
        let Some(most) = self.most else { return Ok(()) };
        if memory.len() > most {
            return Err(MemError::TooMuch { len: memory.len(), most });
        }
        let files: Vec<_> = memory.files().map(|(file, _)| file).collect();
        let is_fine = self.left.allows(&files, (memory.len(), more), most);
        if is_fine { Ok(()) } else { Err(MemError::Charged { most }) }
    }

    /// Files that are not in `next` are shared no longer.
    pub(crate) fn note(&self, before: &GuestMemory, next: &GuestMemory) {
        before.files().for_each(|(file, len)| self.note_file(file, len, next));
    }

    /// Likewise of one of them.
    pub(crate) fn note_file(&self, file: Id, len: u64, next: &GuestMemory) {
        if self.most.is_some() && next.files().all(|(other, _)| other != file) {
            self.left.add(file, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_the_kernel_can_have_back_does_not_count() {
        let v2 = "anon 5\nfile 1000\nkernel 100\npagetables 7\nshmem 11\nfile_mapped 1000\n";
        let v1 = "cache 1000\nrss 5\nshmem 6\ntotal_cache 1000\ntotal_rss 3\ntotal_shmem 4\n";
        assert_eq!((sum(v2), sum(v1)), (23, 7));
    }

    #[test]
    fn a_file_that_comes_back_counts_once() {
        let left = Left::default();
        let (a, b) = ((1, 1), (1, 2));
        assert!(left.allows(&[a], (60, 60), 100));
        left.add(a, 60);
        left.add(a, 50);
        assert!(left.allows(&[a], (60, 60), 100), "the same one");
        left.add(a, 60);
        assert!(left.allows(&[b], (40, 40), 100));
        assert_eq!(left.0.lock().unwrap()[..], [(a, 60)]);
        // More than there may be; no control group says that it is not there any more.
        assert!(left.allows(&[b], (41, 41), 100));
        assert!(left.0.lock().unwrap().is_empty());
        (0..1000).for_each(|n| left.add((7, n), 1));
        let files = left.0.lock().unwrap();
        assert_eq!((files.len(), files.iter().map(|(_, len)| len).sum::<u64>()), (LEFT_MAX, 1000));
    }
}
