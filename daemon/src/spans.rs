//! How much of the daemon's address space the memory of front-ends takes.
//!
//! A file without content costs its owner nothing, whatever its size, and takes addresses where it
//! is mapped. A process has 128 TiB of them (47 bits; Linux, x86-64, `mm.rst`), and a process
//! without free ones cannot allocate, which ends it. So there is a bound for each port and one for
//! all together, far below that. A front-end that wants more is refused, and the daemon and other
//! VMs are not affected.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::closer::Owner;

const TIB: u64 = 1 << 40;
/// The most that one port may have mapped, in bytes. While its memory table is replaced it has both
/// tables, and memory that a closer has not unmapped yet counts too, so its guest may have half of
/// this.
pub const PORT_MAX: u64 = 2 * TIB;
/// Likewise of one whose guest has at most so much memory: both tables, and as much again that is
/// not unmapped yet.
#[must_use]
pub const fn port_max(memory_max: Option<u64>) -> u64 {
    match memory_max {
        Some(bytes) if 4 * bytes < PORT_MAX => 4 * bytes,
        _ => PORT_MAX,
    }
}

/// The most of all ports: half of the address space.
pub const ALL_MAX: u64 = 64 * TIB;

static ALL: AtomicU64 = AtomicU64::new(0);

/// So many bytes of addresses are taken, as long as this lives.
#[derive(Debug)]
pub(crate) struct Span {
    owner: Option<Owner>,
    len: u64,
}

impl Span {
    /// Takes `len` bytes for `owner`. `None`: it, or all together, would have too many.
    pub(crate) fn take(owner: Option<&Owner>, len: u64) -> Option<Self> {
        add(&ALL, len, ALL_MAX)?;
        if owner.is_some_and(|owner| add(owner.mapped(), len, owner.mapped_max()).is_none()) {
            ALL.fetch_sub(len, Ordering::Relaxed);
            return None;
        }
        Some(Self { owner: owner.cloned(), len })
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(owner) = &self.owner {
            owner.mapped().fetch_sub(self.len, Ordering::Relaxed);
        }
        ALL.fetch_sub(self.len, Ordering::Relaxed);
    }
}

fn add(sum: &AtomicU64, len: u64, max: u64) -> Option<u64> {
    let more = |sum: u64| sum.checked_add(len).filter(|sum| *sum <= max);
    sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_takes_nothing() {
        let sum = AtomicU64::new(0);
        assert_eq!(add(&sum, 60, 100), Some(0));
        assert_eq!(add(&sum, 41, 100), None);
        assert_eq!(add(&sum, u64::MAX, 100), None);
        assert_eq!(add(&sum, 40, 100), Some(60));
        let owner = Owner::new("vm");
        assert!(Span::take(Some(&owner), PORT_MAX + 1).is_none());
        let half = Span::take(Some(&owner), PORT_MAX / 2).unwrap();
        assert!(Span::take(Some(&owner), PORT_MAX / 2 + 1).is_none());
        assert!(Span::take(Some(&Owner::new("other")), PORT_MAX / 2 + 1).is_some());
        drop(half);
        assert!(Span::take(Some(&owner), PORT_MAX).is_some());
        assert_eq!(owner.mapped().load(Ordering::Relaxed), 0);
    }
}
