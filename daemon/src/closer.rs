//! Threads that close front-ends' descriptors and mappings.
//!
//! A `close()` may wait for the peer or file system behind the descriptor, which may never answer,
//! and an `munmap()` of gigabytes takes time. The worker waits for neither. A descriptor or mapping
//! of a front-end is a [`Foreign`] from the moment at which it arrives, and belongs to an
//! [`Owner`], the VM that it came to.
//!
//! One thread closes everything, as long as no call blocks it. When it blocks, another thread goes
//! on with the items of other owners. No two threads close items of one owner, so an owner can
//! block one of them at most. An owner with too many waiting items gets no more: its ports take no
//! connections and no descriptors until some are closed ([`Owner::is_behind`]).

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration as StdDuration;

use nightporter_core::time::{Duration, Instant};
use rustix::net::sockopt::set_socket_linger;

use crate::spans;
use crate::timer::monotonic_now;

/// Things of one owner that may wait. A front-end that goes leaves some 200 behind: 64 regions and
/// four descriptors for each of 16 queues. A thread that does not stand takes microseconds for
/// each.
const THINGS_MAX: usize = 512;
/// Threads at most, and so owners that may make one stand without hurting others.
const THREADS_MAX: usize = 64;
/// A thread that takes longer than this for one thing stands.
const LIMIT: Duration = Duration::from_millis(200);
/// How long [`flush`] waits.
const FLUSH_LIMIT: StdDuration = StdDuration::from_secs(20);

/// The owner of descriptors and mappings: a VM.
#[derive(Clone, Debug)]
pub struct Owner {
    account: Arc<Account>,
    /// Bytes of files of this device's front-ends that are mapped ([`crate::spans`]).
    mapped: Arc<AtomicU64>,
    /// How many there may be.
    mapped_max: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Account {
    name: String,
    /// Its descriptors and mappings that are not closed yet.
    things: AtomicUsize,
}

impl Owner {
    /// The owner of descriptors and mappings for the VM `name`.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let account = Account { name: name.into(), things: AtomicUsize::new(0) };
        Self::of(Arc::new(account))
    }

    /// The same VM, for another of its ports.
    #[must_use]
    pub(crate) fn beside(&self) -> Self {
        Self::of(Arc::clone(&self.account))
    }

    fn of(account: Arc<Account>) -> Self {
        let mapped_max = Arc::new(AtomicU64::new(spans::PORT_MAX));
        Self { account, mapped: Arc::default(), mapped_max }
    }

    /// The most bytes of its files that may be mapped.
    pub(crate) fn mapped_max(&self) -> u64 {
        self.mapped_max.load(Ordering::Relaxed)
    }

    /// Another such bound from now on.
    pub(crate) fn set_mapped_max(&self, bytes: u64) {
        self.mapped_max.store(bytes, Ordering::Relaxed);
    }

    /// Too many of its items wait to be closed, so there must be no more.
    pub(crate) fn is_behind(&self) -> bool {
        self.account.things.load(Ordering::Relaxed) >= THINGS_MAX
    }

    /// Bytes of its files that are mapped; see [`crate::spans`].
    pub(crate) fn mapped(&self) -> &AtomicU64 {
        &self.mapped
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.account, &other.account)
    }
}

enum What {
    Fd(OwnedFd),
    Other(Box<dyn Any + Send>),
}

struct Thing {
    /// Items without an owner are closed one by one too.
    owner: Option<Owner>,
    what: What,
}

impl Thing {
    fn is_of(&self, owner: Option<&Owner>) -> bool {
        match (&self.owner, owner) {
            (Some(a), Some(b)) => a.is(b),
            (a, b) => a.is_none() && b.is_none(),
        }
    }

    fn close(self) {
        match self.what {
            What::Fd(fd) => {
                // Otherwise a TCP socket with unsent data blocks this thread for as long as its
                // owner wants. ENOTSOCK for everything else.
                let _ = set_socket_linger(&fd, None);
            }
            What::Other(thing) => drop(thing),
        }
    }
}

/// A thread that closes an item: its owner, and since when.
struct Busy {
    thread: usize,
    owner: Option<Owner>,
    since: Instant,
    /// It was reported that it blocks.
    noticed: bool,
}

struct State {
    waiting: VecDeque<Thing>,
    busy: Vec<Busy>,
    /// Threads, busy ones and those that wait for something to close.
    threads: usize,
    idle: usize,
    /// Numbers of threads so far.
    numbers: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    waiting: VecDeque::new(),
    busy: Vec::new(),
    threads: 0,
    idle: 0,
    numbers: 0,
});
static WORK: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// The place of the oldest item that a thread may close: no other thread closes an item of its
    /// owner.
    fn next(&self) -> Option<usize> {
        let taken = |thing: &Thing| self.busy.iter().any(|busy| thing.is_of(busy.owner.as_ref()));
        self.waiting.iter().position(|thing| !taken(thing))
    }

    /// Whether something waits that only another thread can close.
    fn needs_help(&self, now: Instant) -> bool {
        // A thread that has just started, or was just woken, is neither busy nor idle.
        self.busy.len() == self.threads
            && self.threads < THREADS_MAX
            && self.busy.iter().all(|busy| now.since(busy.since) > LIMIT)
            && self.next().is_some()
    }

    /// Starts another thread, if one is needed. Without any, as when it was refused, the caller has
    /// to do it.
    fn help(&mut self, now: Instant) -> Option<VecDeque<Thing>> {
        if !self.needs_help(now) {
            return None;
        }
        self.numbers += 1;
        let (number, closer) = (self.numbers, thread::Builder::new().name("closer".into()));
        if closer.spawn(move || run(number)).is_ok() {
            self.threads += 1;
        }
        (self.threads == 0).then(|| std::mem::take(&mut self.waiting))
    }
}

/// Closes or unmaps `thing` of `owner`, on another thread.
pub(crate) fn later(owner: Option<Owner>, thing: impl Any + Send) {
    send(owner, What::Other(Box::new(thing)));
}

/// Waits until everything so far is closed: for tests, which look whether it is.
pub fn flush() {
    let (done, wait) = sync_channel::<()>(0);
    later(None, done);
    let _ = wait.recv_timeout(FLUSH_LIMIT);
}

/// Now and then: looks whether threads stand, and others are needed.
pub(crate) fn look() {
    let now = monotonic_now();
    let mut state = lock();
    for busy in &mut state.busy {
        if now.since(busy.since) > LIMIT && !std::mem::replace(&mut busy.noticed, true) {
            let port = busy.owner.as_ref().map_or("", |owner| &owner.account.name);
            tracing::error!(port, "a descriptor or memory of the front-end does not close");
        }
    }
    let left = state.help(now);
    drop(state);
    left.into_iter().flatten().for_each(Thing::close);
}

fn send(owner: Option<Owner>, what: What) {
    if let Some(Owner { account, .. }) = &owner {
        account.things.fetch_add(1, Ordering::Relaxed);
    }
    let mut state = lock();
    state.waiting.push_back(Thing { owner, what });
    let left = state.help(monotonic_now());
    drop(state);
    WORK.notify_one();
    left.into_iter().flatten().for_each(Thing::close);
}

fn run(thread: usize) {
    let mut state = lock();
    loop {
        if let Some(thing) = state.next().and_then(|at| state.waiting.remove(at)) {
            let owner = thing.owner.clone();
            let busy = Busy { thread, owner, since: monotonic_now(), noticed: false };
            state.busy.push(busy);
            drop(state);
            thing.close();
            state = lock();
            let at = state.busy.iter().position(|busy| busy.thread == thread);
            let busy = state.busy.swap_remove(at.expect("it was put there"));
            if let Some(Owner { account, .. }) = busy.owner {
                account.things.fetch_sub(1, Ordering::Relaxed);
            }
        } else if state.idle > 0 {
            state.threads -= 1; // one that waits is enough
            return;
        } else {
            state.idle += 1;
            state = WORK.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// A descriptor of a front-end, or one whose closing closes some.
#[derive(Debug)]
pub struct Foreign {
    fd: Option<OwnedFd>,
    owner: Option<Owner>,
}

impl Foreign {
    /// A descriptor that came to a port.
    #[must_use]
    pub(crate) fn of(owner: &Owner, fd: OwnedFd) -> Self {
        Self { fd: Some(fd), owner: Some(owner.clone()) }
    }

    /// Its owner.
    pub(crate) fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// The descriptor, for a caller that closes it elsewhere than on the worker; and its owner.
    #[must_use]
    pub(crate) fn into_inner(mut self) -> (OwnedFd, Option<Owner>) {
        (self.fd.take().expect("it is taken once"), self.owner.take())
    }
}

impl From<OwnedFd> for Foreign {
    fn from(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), owner: None }
    }
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("it is taken at its end").as_fd()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            send(self.owner.take(), What::Fd(fd));
        }
    }
}
