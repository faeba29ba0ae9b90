//! One virtqueue as the messages describe it: addresses, sizes, descriptors, and the running queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, statx};
use rustix::io::Errno;

use super::device::DeviceQueue;
use super::protocol::Refusal;
use super::ring::{RingAddrs, RingFault};
use crate::closer::Foreign;
use crate::faults;

/// An eventfd (or pipe) shared with the front-end: eight bytes per notification.
#[derive(Debug)]
pub struct Notifier {
    fd: Foreign,
    /// One of the front-end's kept us waiting until we were interrupted: none is used any more.
    blocks: Arc<AtomicBool>,
}

/// Adds nothing to what an eventfd counts, so it never waits; whatever else has no type cannot be
/// written to.
const NOTHING: [u8; 8] = [0; 8];

impl Notifier {
    /// Takes a descriptor over and makes it non-blocking, also for the front-end, which has the
    /// same open file: front-ends we know wait for theirs with epoll or KVM.
    ///
    /// Refused: files and devices, which cannot be waited for, and which a write would change; and
    /// what has no type and is no eventfd, such as an epoll of a million descriptors, in which the
    /// kernel looks at all of them when it is to be waited for.
    pub fn new(fd: Foreign, blocks: &Arc<AtomicBool>) -> Result<Self, Refusal> {
        // What `fstat` asks, a file system of its own may never answer; it is not asked here.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = statx(&fd, c"", flags, StatxFlags::TYPE).map_err(io::Error::from)?;
        let kind = FileType::from_raw_mode(stat.stx_mode.into());
        // An eventfd is an anonymous inode and has no type.
        if !matches!(kind, FileType::Unknown | FileType::Fifo | FileType::Socket) {
            return Err(Refusal::BadDescriptor);
        }
        let flags = fcntl_getfl(&fd).map_err(io::Error::from)?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(io::Error::from)?;
        let must_count = kind == FileType::Unknown;
        if must_count && rustix::io::write(&fd, &NOTHING) != Ok(NOTHING.len()) {
            return Err(Refusal::BadDescriptor);
        }
        Ok(Self { fd, blocks: Arc::clone(blocks) })
    }

    /// The descriptor, to wait for.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Gives the descriptor back, to be taken out of an epoll set before it is closed.
    #[must_use]
    pub fn into_fd(self) -> Foreign {
        self.fd
    }

    /// The front-end took O_NONBLOCK away, and kept us waiting (`watchdog`).
    fn has_blocked(&self) {
        self.blocks.store(true, Ordering::Relaxed);
        faults::raise();
    }

    fn blocks(&self) -> bool {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Notifies. If the counter or pipe is full, a notification is pending anyway; if the other
    /// end is gone, the connection will say so.
    pub fn notify(&self) {
        if !self.blocks() && rustix::io::write(&self.fd, &1_u64.to_ne_bytes()) == Err(Errno::INTR) {
            self.has_blocked();
        }
    }

    /// Takes what is pending, so that a level-triggered wait goes quiet. `false`: it never will,
    /// because the other end is gone, or this is something else that cannot be read.
    #[must_use]
    pub fn clear(&self) -> bool {
        if self.blocks() {
            return true;
        }
        let mut count = [0; 512];
        match rustix::io::read(&self.fd, &mut count) {
            Ok(len) => len > 0,
            Err(Errno::INTR) => {
                self.has_blocked();
                true
            }
            Err(error) => error == Errno::AGAIN,
        }
    }
}

/// What SET_VRING_KICK left behind.
#[derive(Debug, Default)]
pub enum Kick {
    /// Not set, or taken away by GET_VRING_BASE: the ring is stopped.
    #[default]
    None,
    /// The ring is to be polled; there is nothing to wait for.
    Polled,
    /// The driver writes here when it offers buffers.
    Fd(Notifier),
}

/// One virtqueue, with a queue of some device on it.
#[derive(Debug)]
pub struct Vring<Q> {
    /// SET_VRING_NUM; 0 before it.
    pub size: u16,
    /// SET_VRING_ADDR.
    pub addrs: Option<RingAddrs>,
    /// What GET_VRING_BASE answers while the ring does not run.
    pub base: u16,
    /// SET_VRING_KICK.
    pub kick: Kick,
    /// SET_VRING_CALL: we write here when the driver wants to know. Kept until replaced: QEMU sets
    /// it long before the ring starts and does not repeat it.
    pub call: Option<Notifier>,
    /// SET_VRING_ERR.
    pub err: Option<Notifier>,
    /// SET_VRING_ENABLE.
    pub enabled: bool,
    /// Running: configured and enabled.
    pub queue: Option<Q>,
    /// The guest broke the rules; the queue stays out of use until it is started again.
    pub fault: Option<RingFault>,
    /// The driver's marks when they were last looked at.
    pub marks: (u16, u16),
}

impl<Q> Default for Vring<Q> {
    fn default() -> Self {
        Self {
            size: 0,
            addrs: None,
            base: 0,
            kick: Kick::None,
            call: None,
            err: None,
            enabled: false,
            queue: None,
            fault: None,
            marks: (0, 0),
        }
    }
}

impl<Q: DeviceQueue> Vring<Q> {
    /// Whether everything is there that a ring needs to run, but for being enabled.
    #[must_use]
    pub const fn is_configured(&self) -> bool {
        self.size > 0 && self.addrs.is_some() && !matches!(self.kick, Kick::None)
    }

    /// The running queue, if its guest kept the rules.
    #[inline]
    pub const fn usable(&mut self) -> Option<&mut Q> {
        if self.fault.is_some() {
            return None;
        }
        self.queue.as_mut()
    }

    /// The guest broke the rules: the front-end is told, if it wanted to be.
    pub fn fail(&mut self, fault: RingFault) {
        self.fault = Some(fault);
        if let Some(err) = &self.err {
            err.notify();
        }
    }

    /// Publishes, and signals if the driver wants it; whether it was signalled.
    pub fn flush(&mut self) -> bool {
        let Some(queue) = self.usable() else { return false };
        queue.begin_turn();
        queue.ring().publish();
        let wanted = queue.ring().wants_signal();
        match &self.call {
            Some(call) if wanted => call.notify(),
            _ => return false,
        }
        true
    }

    /// Stops: what was completed is shown. If it stops `in_order`, what was only taken is
    /// forgotten, otherwise it stays in the in-flight log. `false` if it did not run.
    pub fn stop(&mut self, in_order: bool) -> bool {
        let fault = self.fault.take();
        let Some(mut queue) = self.queue.take() else { return false };
        if fault.is_none() {
            queue.ring().publish();
        }
        if in_order {
            queue.ring().abandon();
        }
        self.base = queue.ring().base();
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn when_one_kept_us_waiting_none_of_its_front_end_is_written_or_read() {
        let mut fds: [OwnedFd; 3] =
            [0, 0, 5].map(|count| eventfd(count, EventfdFlags::NONBLOCK).unwrap());
        let blocks = Arc::new(AtomicBool::new(false));
        let notifiers = fds
            .each_mut()
            .map(|fd| Notifier::new(fd.try_clone().unwrap().into(), &blocks).unwrap());
        let count = |fd: &OwnedFd| {
            let mut count = [0; 8];
            rustix::io::read(fd, &mut count).map(|_| u64::from_ne_bytes(count))
        };
        assert_eq!(count(&fds[0]), Err(Errno::AGAIN), "to look whether it counts adds nothing");
        notifiers[0].notify();
        assert_eq!(count(&fds[0]), Ok(1));
        let seen = faults::count();
        notifiers[0].has_blocked();
        assert!(faults::count() > seen, "the worker looks");
        notifiers.iter().for_each(Notifier::notify);
        assert_eq!((count(&fds[0]), count(&fds[1])), (Err(Errno::AGAIN), Err(Errno::AGAIN)));
        assert!(notifiers[2].clear());
        assert_eq!(count(&fds[2]), Ok(5));
    }
}
