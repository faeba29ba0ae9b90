//! The vhost-user back-end: a virtio-net device per port, for QEMU, user-mode Linux and DPDK, and
//! beside it a socket device, if the VM has the virtual TOE.
//!
//! # Short primer
//!
//! A *front-end* (the VMM) connects to our UNIX socket and describes its guest's device: where
//! guest memory is (as file descriptors to map), where the rings are, and which eventfds to use.
//! From then on the guest's *driver* and we talk through the rings alone. A queue pair is a receive
//! queue (even index, frames to the guest) and a transmit queue (odd, frames from it).
//!
//! Read in this order: [`session`] (messages, and when a ring runs), [`ring`] (one split
//! virtqueue), [`queue`] (frames in and out of it; [`packets`] is that for sockets). Below them:
//! [`protocol`] (messages on a socket), [`guest_mem`] (mapped memory), [`vring`] (a queue's
//! descriptors), [`inflight`] (the log for a restart), [`dirty`] (that of written pages, for a
//! migration), [`device`] (the kinds of devices), [`features`] and [`vsock`] (their offers),
//! [`locker`] (the place of a connection for the next daemon). The port around it is
//! `port::vhost_user`.
//!
//! # Whom we trust
//!
//! 1. **The guest: not at all.** Every value from guest memory is copied once and then checked. A
//!    ring that lies is out of use until its driver resets it; nothing else suffers.
//! 2. **The front-end: not with our memory or our time.** Any bytes and descriptors in any order
//!    are refused or obeyed. If it takes memory away, its own port goes down (`faults`), and other
//!    threads close the descriptors and mappings that it has sent (`closer`). A file that is not
//!    memory, but of a file system that may never answer, is refused ([`guest_mem`]). One thing a
//!    hostile front-end process (not its guest) can still do is to clear O_NONBLOCK on an eventfd
//!    that it has filled. That stalls the worker for a tenth of a second (`watchdog`), and closes
//!    its port for a minute, the next time for two, and so on.
//! 3. **The operator** chose who may connect, by the socket's owner and mode.

pub mod device;
pub mod dirty;
pub mod features;
pub mod guest_mem;
pub mod inflight;
pub mod listener;
pub(crate) mod locker;
pub mod packets;
pub mod protocol;
pub mod queue;
pub mod ring;
pub mod session;
pub mod signals;
pub mod vring;
pub mod vsock;

use nightporter_core::port::PortFeatures;

use crate::closer::Foreign;

/// An event source of a port: the meaning of a wake-up.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Source {
    /// A front-end wants to connect.
    Listener,
    /// A message has arrived, or the front-end has gone.
    Connection,
    /// The driver kicked this queue (even: to the guest, odd: from the guest).
    Kick(u16),
}

/// The events of a port, in order.
#[derive(Debug)]
pub enum Event {
    /// A front-end has connected.
    Connected,
    /// It has gone, for this reason.
    Disconnected(String),
    /// Wait for this source from now on; `VhostUserPort::fd` has its descriptor.
    Watch(Source),
    /// Stop waiting for this source, and call `VhostUserPort::go_on` after a while: now it could
    /// only be tried again and again, or takes more than its share.
    Rest(Source),
    /// There is nothing to wait for at a queue: look at it now and then.
    Poll,
    /// Stop waiting for this descriptor, then drop it. It must leave the epoll set before it is
    /// closed: the front-end holds the same open file, so closing ours does not remove it.
    Unwatch(Foreign),
    /// The features that the driver accepts; `None` while the first queue pair does not run.
    Link(Option<PortFeatures>),
    /// A queue runs. Look at it now: there may be no kick for the buffers that are already there.
    RingStarted(u16),
    /// A queue has stopped.
    RingStopped(u16),
    /// A queue's guest broke the rules; it is out of use until the driver resets it.
    RingBroken {
        /// The queue.
        vring: u16,
        /// How.
        fault: ring::RingFault,
    },
    /// The front-end wants a log of written pages, as it does when its VM begins to migrate; or
    /// none any more, because the migration was called off.
    Logs(bool),
    /// The front-end is about to stop the rings of a VM that may migrate. The message waits until
    /// `VhostUserPort::handle_connection` is called again.
    Leaving,
    /// A migrated guest is here now: broadcast a RARP from its MAC.
    Rarp([u8; 6]),
}

#[cfg(test)]
#[path = "../../tests/hostile/huge_pages.rs"]
mod huge_pages;
