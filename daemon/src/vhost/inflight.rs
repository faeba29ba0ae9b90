//! The in-flight log: which chains are taken and not completed, kept in memory that outlives us
//! (vhost-user specification, "Inflight I/O tracking", split virtqueues).
//!
//! The front-end holds the file. A restarted daemon gets it back, finishes a publication that was
//! cut short, and takes the listed chains again before any new one, in the order in which they were
//! first taken, so that every chain is completed exactly once. (A frame that left just before a
//! crash and was not yet published leaves twice, as a network may do.)
//!
//! Queue region, in host byte order: `features` u64, `version` u16, `desc_num` u16,
//! `last_batch_head` u16, `used_idx` u16, then one 16-byte entry per descriptor: `inflight` u8,
//! padding, `next` u16 at 6, `counter` u64 at 8.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;

use super::guest_mem::{MemError, Window};
use crate::closer::Foreign;

const VERSION: u16 = 1;
const HEADER_LEN: usize = 16;
const ENTRY_LEN: usize = 16;
/// Each queue's region starts on a cache line of its own.
const REGION_ALIGN: usize = 64;

/// Bytes of one queue's region.
const fn region_len(queue_size: u16) -> usize {
    (HEADER_LEN + ENTRY_LEN * queue_size as usize).next_multiple_of(REGION_ALIGN)
}

/// The whole log of one device.
#[derive(Debug)]
pub struct InflightLog {
    file: Window,
    queues: u16,
    queue_size: u16,
}

impl InflightLog {
    /// Makes an empty log file for GET_INFLIGHT_FD: the file and its size in bytes.
    pub fn create(queues: u16, queue_size: u16) -> std::io::Result<(OwnedFd, u64)> {
        let len = (region_len(queue_size) * usize::from(queues)) as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("vhost-inflight", flags)?;
        ftruncate(&file, len)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((file, len))
    }

    /// Maps the log that SET_INFLIGHT_FD hands over.
    pub fn open(file: impl Into<Foreign>, spec: &VhostUserInflight) -> Result<Self, MemError> {
        let need = (region_len(spec.queue_size) * usize::from(spec.num_queues)) as u64;
        if need == 0 || spec.mmap_size < need {
            return Err(MemError::BadRange);
        }
        let file = Window::map(file, spec.mmap_offset, need)?;
        Ok(Self { file, queues: spec.num_queues, queue_size: spec.queue_size })
    }

    /// The payload and file with which SET_INFLIGHT_FD would bring it.
    pub(crate) fn spec_and_file(&self) -> Option<(VhostUserInflight, BorrowedFd<'_>)> {
        let (file, offset) = self.file.file()?;
        let (len, queues) = (self.file.len() as u64, self.queues);
        Some((VhostUserInflight::new(len, offset, queues, self.queue_size), file))
    }

    /// Whether some of it was not there when it was used.
    #[must_use]
    pub(crate) fn has_faulted(&self) -> bool {
        self.file.has_faulted()
    }

    /// The log of queue `index` with `size` descriptors; `None` if it has no place for them.
    #[must_use]
    pub fn queue(&self, index: u16, size: u16) -> Option<InflightQueue> {
        if index >= self.queues || size > self.queue_size {
            return None;
        }
        let len = region_len(self.queue_size);
        let region = self.file.part((len * usize::from(index)) as u64, len, 8)?;
        Some(InflightQueue { region, size, counter: 0 })
    }
}

/// The log of one running queue.
#[derive(Debug)]
pub struct InflightQueue {
    region: Window,
    size: u16,
    /// The order number of the next chain taken.
    counter: u64,
}

impl InflightQueue {
    /// Finishes a predecessor's publication. Returns the chains that it had taken, oldest first.
    /// `used_idx` is the used index in the ring.
    pub fn recover(&mut self, used_idx: u16) -> VecDeque<u16> {
        let fresh = self.word(8).load(Ordering::Acquire) != VERSION;
        if fresh || self.word(10).load(Ordering::Relaxed) != self.size {
            self.clear();
            self.word(10).store(self.size, Ordering::Relaxed);
            self.word(14).store(used_idx, Ordering::Relaxed);
            self.word(8).store(VERSION, Ordering::Release);
            return VecDeque::new();
        }
        self.publish(used_idx);
        let mut taken: Vec<(u64, u16)> =
            (0..self.size).filter_map(|head| Some((self.order_of(head)?, head))).collect();
        taken.sort_unstable();
        self.counter = taken.last().map_or(0, |(order, _)| order.wrapping_add(1));
        taken.into_iter().map(|(_, head)| head).collect()
    }

    /// The chain at `head` was taken.
    pub fn take(&mut self, head: u16) {
        let at = entry_at(head);
        if let (Some(order), Some(flag)) = (self.region.u64_at(at + 8), self.region.u8_at(at)) {
            order.store(self.counter, Ordering::Relaxed);
            flag.store(1, Ordering::Release);
            self.counter = self.counter.wrapping_add(1);
        }
    }

    /// The chain at `head` has its used element; it joins the batch to be published.
    pub fn complete(&mut self, head: u16) {
        if let Some(next) = self.region.u16_at(entry_at(head) + 6) {
            next.store(self.word(12).load(Ordering::Relaxed), Ordering::Relaxed);
            self.word(12).store(head, Ordering::Release);
        }
    }

    /// The ring's used index is `used_idx` now: the batch that it covers is no longer in flight.
    pub fn publish(&mut self, used_idx: u16) {
        let batch = used_idx.wrapping_sub(self.word(14).load(Ordering::Relaxed));
        let mut head = self.word(12).load(Ordering::Relaxed);
        for _ in 0..batch.min(self.size) {
            let at = entry_at(head);
            let (Some(flag), Some(next)) = (self.region.u8_at(at), self.region.u16_at(at + 6))
            else {
                break;
            };
            flag.store(0, Ordering::Relaxed);
            head = next.load(Ordering::Relaxed);
        }
        self.word(14).store(used_idx, Ordering::Release);
    }

    /// Nothing is in flight any more: the ring was stopped in good order.
    pub fn clear(&mut self) {
        for head in 0..self.size {
            if let Some(flag) = self.region.u8_at(entry_at(head)) {
                flag.store(0, Ordering::Relaxed);
            }
        }
    }

    fn order_of(&self, head: u16) -> Option<u64> {
        let at = entry_at(head);
        let taken = self.region.u8_at(at)?.load(Ordering::Relaxed) == 1;
        taken.then(|| self.region.u64_at(at + 8).map(|order| order.load(Ordering::Relaxed)))?
    }

    fn word(&self, at: usize) -> &AtomicU16 {
        self.region.u16_at(at).expect("a region holds its header")
    }
}

const fn entry_at(head: u16) -> usize {
    HEADER_LEN + ENTRY_LEN * head as usize
}
