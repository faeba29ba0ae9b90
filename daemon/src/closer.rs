//! Where a front-end's descriptors and mappings go: to a thread that closes them.
//!
//! A `close()` may wait for what is behind the descriptor, for a peer that never reads or a file
//! system that never answers, and an `munmap()` of gigabytes takes its time. The worker waits for
//! neither. What comes from a front-end is a [`Foreign`] from the moment it arrives.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// Things that may wait to be closed. A front-end that connects again and again makes a dozen a
/// time; a closer that does not stand takes microseconds for each.
const WAITING_MAX: usize = 4096;

/// How long [`flush`] waits.
const FLUSH_LIMIT: Duration = Duration::from_secs(20);

enum Thing {
    Fd(OwnedFd),
    Other(Box<dyn Any + Send>),
}

/// Things that were left open for ever, because the closer stands and too many wait for it.
static LEFT_OPEN: AtomicU64 = AtomicU64::new(0);

/// Closes or unmaps `thing`, on another thread.
pub(crate) fn later(thing: impl Any + Send) {
    send(Thing::Other(Box::new(thing)));
}

/// Waits until everything so far is closed: for tests, which look whether it is.
pub fn flush() {
    let (done, wait) = sync_channel::<()>(0);
    later(done);
    let _ = wait.recv_timeout(FLUSH_LIMIT);
}

fn send(thing: Thing) {
    static CLOSER: OnceLock<Option<SyncSender<Thing>>> = OnceLock::new();
    let closer = CLOSER.get_or_init(|| {
        let (to, from) = sync_channel(WAITING_MAX);
        let closer = thread::Builder::new().name("closer".into());
        closer.spawn(move || run(&from)).ok().map(|_| to)
    });
    // Without a thread, as when it was refused, the caller has to do it.
    let Some(closer) = closer else { return };
    if let Err(TrySendError::Full(thing)) = closer.try_send(thing) {
        std::mem::forget(thing);
        let count = LEFT_OPEN.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            tracing::error!(count, "a descriptor of a front-end does not close; others wait");
        }
    }
}

fn run(things: &Receiver<Thing>) {
    for thing in things {
        match thing {
            Thing::Fd(fd) => {
                // Or a TCP socket with unsent data keeps us here for as long as its owner says.
                // ENOTSOCK for everything else.
                let _ = set_socket_linger(&fd, None);
            }
            Thing::Other(thing) => drop(thing),
        }
    }
}

/// A descriptor of a front-end, or one whose closing closes some.
#[derive(Debug)]
pub struct Foreign(Option<OwnedFd>);

impl Foreign {
    /// The descriptor, for somebody who closes it elsewhere than on the worker.
    #[must_use]
    pub(crate) fn into_inner(mut self) -> OwnedFd {
        self.0.take().expect("it is taken once")
    }
}

impl From<OwnedFd> for Foreign {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("it is taken at its end").as_fd()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(fd) = self.0.take() {
            send(Thing::Fd(fd));
        }
    }
}
