//! The log of written pages, by which a VMM knows the pages to copy again while its VM migrates
//! (vhost-user specification, "Migration"; LIFE-15).
//!
//! The VMM passes the log's memory with SET_LOG_BASE: a bit for each page of 4 KiB, from guest
//! address 0 on. With VHOST_F_LOG_ALL among the features every write to guest memory is marked
//! there: payload and headers (`GuestMemory`), used elements, the used index and the notification
//! area of a used ring (`Ring`). The in-flight log is no guest memory.
//!
//! A mark follows its write, in program order: the VMM takes the bits first and reads the pages
//! then, so a mark before the write could be taken, and the page read, before it is written. Marks
//! are atomic, because several devices and the VMM share a byte.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::fstat;
use vhost::vhost_user::message::VhostUserLog;

use super::guest_mem::{MemError, Window, is_memory};
use crate::charges;
use crate::closer::Foreign;
use crate::faults;

/// Bytes of guest memory that a bit stands for (VHOST_LOG_PAGE).
const PAGE: u64 = 4096;

/// A mapped log.
#[derive(Debug)]
pub struct DirtyLog {
    bits: Window,
    /// Its file, and its bytes there.
    pub(crate) file: (charges::Id, u64),
    /// A page was written for which it has no bit.
    is_short: AtomicBool,
}

impl DirtyLog {
    /// Maps the log that SET_LOG_BASE hands over. It must be allocated if pages that we touch first
    /// count against a limit of ours, and if it has huge pages: the kernel would clear one for a
    /// bit. QEMU clears its log itself.
    pub fn open(file: Foreign, spec: &VhostUserLog) -> Result<Self, MemError> {
        if !is_memory(&file) {
            return Err(MemError::NotMemory);
        }
        let stat = fstat(&file).map_err(std::io::Error::from)?;
        let is_huge = u64::try_from(stat.st_blksize).unwrap_or(PAGE) > PAGE;
        let must_be_there = is_huge || charges::memory_is_limited();
        if must_be_there && stat.st_blocks.saturating_mul(512) < stat.st_size {
            return Err(MemError::NotThere);
        }
        let bits = Window::map(file, spec.mmap_offset, spec.mmap_size)?;
        let file = ((stat.st_dev, stat.st_ino), spec.mmap_size);
        Ok(Self { bits, file, is_short: AtomicBool::new(false) })
    }

    /// The payload and file with which SET_LOG_BASE would bring it.
    pub(crate) fn spec_and_file(&self) -> Option<(VhostUserLog, BorrowedFd<'_>)> {
        let (file, offset) = self.bits.file()?;
        Some((VhostUserLog::new(self.bits.len() as u64, offset), file))
    }

    /// `len` bytes at this guest address were written.
    #[cold]
    pub fn mark(&self, guest: u64, len: usize) {
        let Some(last) = (len as u64).checked_sub(1) else { return };
        for page in guest / PAGE..=guest.saturating_add(last) / PAGE {
            let byte = usize::try_from(page / 8).ok().and_then(|at| self.bits.u8_at(at));
            if let Some(byte) = byte {
                byte.fetch_or(1 << (page % 8), Ordering::SeqCst);
            } else {
                self.is_short.store(true, Ordering::Relaxed);
                return faults::raise(); // the worker looks after the turn
            }
        }
    }

    /// Whether some of it was not there when it was used.
    #[must_use]
    pub(crate) fn has_faulted(&self) -> bool {
        self.bits.has_faulted()
    }

    /// Whether a page was written for which it has no bit: the VMM would not copy it.
    #[must_use]
    pub(crate) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }
}
