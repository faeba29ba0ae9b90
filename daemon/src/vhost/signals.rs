//! Notifications: descriptors that a front-end passes to be told by, and to tell us by.
//!
//! All of them are shared with the front-end, which may have made them so that using them takes
//! long. Front-ends may pass eventfds, and pipes and sockets of a front-end that is trusted.
//!
//! **Writes.** A write to an eventfd calls everything that waits for it, and its owner can have
//! millions wait: 2.25 million take a third of a second, which no signal ends. A write can also
//! wait, if the eventfd is full and has no O_NONBLOCK. So a write that may take long is made by a
//! thread of the VM ([`Lane`]), and the worker writes itself only to an eventfd whose last write
//! was short and lies less than [`FRESH`] behind, for whoever waits comes one by one: 20,000 in
//! that time, for which a write takes some 2 ms. A VM whose writes are slow on its thread is found
//! out there ([`SlowCalls`]); the worker judges nobody by what its own calls take, for a softirq
//! for somebody else may run in the middle of them.
//!
//! **Reads.** An eventfd by which the driver kicks is never read. The worker waits for it
//! edge-triggered, so that each kick is reported once. To read it would call everything that waits
//! as well, and with EFD_SEMAPHORE each read takes away one of 2^64 kicks.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use nightporter_core::time::{Duration, Instant};
use nix::sys::pthread::{Pthread, pthread_kill, pthread_self};
use nix::sys::signal::Signal;
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, statx};
use rustix::io::Errno;

use super::protocol::Refusal;
use crate::closer::Foreign;
use crate::faults;
use crate::sys;
use crate::timer::{monotonic_now, time_on_core};
use crate::watchdog;

/// A write that takes longer is slow.
const SLOW: Duration = Duration::from_micros(500);
/// A slow write counts if those that are made to see whether it is the eventfd's own slowness take
/// longer than this. Their waiters are woken already and so take less.
const SLOW_AGAIN: Duration = Duration::from_micros(100);
/// So many are made.
const REPEATS: usize = 2;
/// So many slow writes are enough,
const SLOW_MAX: u32 = 4;
/// if so many times what they take has not passed: a hundredth of a core.
const SLOW_SHARE: u64 = 100;
/// The worker writes to an eventfd itself if its last write is not longer ago.
const FRESH: Duration = Duration::from_millis(20);
/// A thread whose write takes longer is interrupted.
const LANE_LIMIT: Duration = Duration::from_millis(100);

/// Slow writes to all descriptors of a VM, also of connections that are over, so that a VM that
/// comes back keeps its count; and the thread that makes those that may be slow.
#[derive(Debug, Default)]
pub struct SlowCalls {
    /// The worker makes no writes until then, because one was slow by the clock. Nanoseconds, as
    /// the next.
    watched_until: AtomicU64,
    /// When those that were found slow count no more.
    until: AtomicU64,
    /// How many those are.
    count: AtomicU32,
    lane: OnceLock<Lane>,
}

impl SlowCalls {
    /// Writes that may take long are made by a thread of the VM's own from now on. Without one, as
    /// in tests of rings, all are made at once. Nothing happens if there can be no more threads.
    pub(crate) fn go_aside(&self) {
        if self.lane.get().is_none()
            && let Ok(lane) = Lane::start()
        {
            let _ = self.lane.set(lane);
        }
    }

    fn is_watched(&self, now: Instant) -> bool {
        now.as_nanos() < self.watched_until.load(Ordering::Relaxed)
    }

    /// A write of the worker took so long by the clock.
    fn handle_call(&self, now: Instant, time: Duration) {
        if time > SLOW {
            let until = (now + time.saturating_mul(SLOW_SHARE)).as_nanos();
            self.watched_until.fetch_max(until, Ordering::Relaxed);
        }
    }

    /// A write took so long on the core, because of its eventfd. `true`: that is enough.
    fn judge(&self, now: Instant, time: Duration) -> bool {
        if time <= SLOW {
            return false;
        }
        let until = Instant::from_nanos(self.until.load(Ordering::Relaxed));
        let before = if now < until { self.count.load(Ordering::Relaxed) } else { 0 };
        self.count.store(before + 1, Ordering::Relaxed);
        let until = until.max(now) + time.saturating_mul(SLOW_SHARE);
        self.until.store(until.as_nanos(), Ordering::Relaxed);
        before + 1 >= SLOW_MAX
    }
}

/// Whether a write is slow by itself: it took `first`, and each of those after it takes long as
/// well. The time of softirqs that run in the middle of it falls on one of them at most.
fn is_slow(first: Duration, mut again: impl FnMut() -> Duration) -> bool {
    first > SLOW && (0..REPEATS).all(|_| again() > SLOW_AGAIN)
}

/// How the descriptors of a front-end behave, all of a connection together.
#[derive(Debug, Default)]
pub struct Conduct {
    /// They kept us waiting, or take long: none of them is used any more.
    blocks: AtomicBool,
    slow: Arc<SlowCalls>,
}

impl Conduct {
    /// For a front-end whose slow writes are added to the earlier ones.
    #[must_use]
    pub fn new(slow: &Arc<SlowCalls>) -> Self {
        Self { blocks: AtomicBool::new(false), slow: Arc::clone(slow) }
    }

    /// Whether one of them kept a thread of ours: waiting, or at work.
    #[must_use]
    pub fn blocks(&self) -> bool {
        self.blocks.load(Ordering::Relaxed)
    }

    fn has_blocked(&self) {
        self.blocks.store(true, Ordering::Relaxed);
        faults::raise();
    }

    /// A call ended like this; if it was interrupted, it had to wait.
    fn handle_result<T>(&self, result: rustix::io::Result<T>) -> rustix::io::Result<T> {
        if matches!(result, Err(Errno::INTR)) {
            self.has_blocked();
            watchdog::beware();
        }
        result
    }
}

/// Makes a descriptor non-blocking, also for the front-end, which has the same open file:
/// front-ends we know wait for theirs with epoll or KVM. Returns whether it is a pipe or a socket.
///
/// Refused: files and devices, which cannot be waited for, and which a write would change; and what
/// has no type and is no eventfd, such as an epoll of a million descriptors, in which the kernel
/// looks at all of them when it is to be waited for. So are pipes and sockets unless `takes_pipes`:
/// who reads at the other end holds their lock while the bytes are copied, into memory that is not
/// there for as long as he likes (userfaultfd(2), a file of FUSE), and whoever wants the lock
/// meanwhile waits, with O_NONBLOCK too, and no signal ends it.
fn take_over(fd: &Foreign, takes_pipes: bool) -> Result<bool, Refusal> {
    // A file system of the front-end's own may never answer `fstat`; this does not ask it.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(fd, c"", flags, StatxFlags::TYPE).map_err(io::Error::from)?;
    let kind = FileType::from_raw_mode(stat.stx_mode.into());
    // An eventfd is an anonymous inode and has no type.
    let is_pipe = matches!(kind, FileType::Fifo | FileType::Socket);
    let is_taken = if is_pipe {
        takes_pipes
    } else {
        kind == FileType::Unknown && sys::may_be_eventfd(fd.as_fd())
    };
    if !is_taken {
        return Err(Refusal::BadDescriptor);
    }
    let flags = fcntl_getfl(fd).map_err(io::Error::from)?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(io::Error::from)?;
    Ok(is_pipe)
}

/// Writes a notification.
fn add(fd: &Foreign, count: u64) -> rustix::io::Result<usize> {
    rustix::io::write(fd, &count.to_ne_bytes())
}

/// An eventfd by which a front-end is told, or its pipe.
#[derive(Debug)]
pub struct Notifier(Arc<Line>);

#[derive(Debug)]
struct Line {
    fd: Foreign,
    is_pipe: bool,
    conduct: Arc<Conduct>,
    /// When it was last written to, in nanoseconds; 0: never.
    written: AtomicU64,
    /// It is in a lane, and not yet taken up there.
    is_queued: AtomicBool,
}

impl Notifier {
    /// Takes a descriptor over. Errors: it is of another kind than is taken here.
    pub fn new(fd: Foreign, conduct: &Arc<Conduct>, takes_pipes: bool) -> Result<Self, Refusal> {
        let is_pipe = take_over(&fd, takes_pipes)?;
        let (conduct, written) = (Arc::clone(conduct), AtomicU64::new(0));
        let is_queued = AtomicBool::new(false);
        Ok(Self(Arc::new(Line { fd, is_pipe, conduct, written, is_queued })))
    }

    /// The descriptor, to pass it on.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }

    /// Notifies, perhaps a little later. If the counter or pipe is full, a notification is pending
    /// anyway; if the other end is gone, the connection will say so.
    pub fn notify(&self) {
        let Line { fd, is_pipe, conduct, written, .. } = &*self.0;
        if conduct.blocks() {
            return;
        }
        let begin = monotonic_now();
        if let Some(lane) = conduct.slow.lane.get()
            && !is_pipe
            && self.may_be_slow(begin, lane)
        {
            written.store(begin.as_nanos(), Ordering::Relaxed);
            return lane.write_later(&self.0);
        }
        let _ = conduct.handle_result(add(fd, 1));
        let now = monotonic_now();
        written.store(now.as_nanos(), Ordering::Relaxed);
        conduct.slow.handle_call(now, now.since(begin));
    }

    /// Whether to leave a write to the VM's thread.
    fn may_be_slow(&self, now: Instant, lane: &Lane) -> bool {
        let Line { conduct, written, .. } = &*self.0;
        let written = Instant::from_nanos(written.load(Ordering::Relaxed));
        // The lane's descriptor may be the same eventfd under another name, and locked.
        now.since(written) > FRESH
            || lane.is_busy()
            || watchdog::suspects()
            || conduct.slow.is_watched(now)
    }
}

impl Line {
    /// Writes on the VM's thread.
    fn write_aside(&self) {
        let timed = |count| {
            let begin = time_on_core();
            let result = self.conduct.handle_result(add(&self.fd, count));
            (result, time_on_core().since(begin))
        };
        let (_, took) = timed(1);
        // Adding nothing calls all that wait as well.
        if is_slow(took, || timed(0).1) && self.conduct.slow.judge(monotonic_now(), took) {
            self.conduct.has_blocked();
        }
    }
}

/// A descriptor by which the driver kicks.
#[derive(Debug)]
pub struct KickFd {
    fd: Foreign,
    is_pipe: bool,
}

impl KickFd {
    /// Takes a descriptor over. Errors: it is of another kind than is taken here.
    pub fn new(fd: Foreign, takes_pipes: bool) -> Result<Self, Refusal> {
        let is_pipe = take_over(&fd, takes_pipes)?;
        Ok(Self { fd, is_pipe })
    }

    /// The descriptor, to wait for edge-triggered.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Gives the descriptor back, to be taken out of an epoll set before it is closed.
    #[must_use]
    pub fn into_fd(self) -> Foreign {
        self.fd
    }

    /// Makes room for the next kick, in a pipe. `false`: there will be none, because the other end
    /// is gone, or this is another file that cannot be read.
    #[must_use]
    pub fn clear(&self, conduct: &Conduct) -> bool {
        if !self.is_pipe || conduct.blocks() {
            return true;
        }
        let mut bytes = [0; 512];
        // All of it, for otherwise there is no edge.
        loop {
            match conduct.handle_result(rustix::io::read(&self.fd, &mut bytes)) {
                Ok(0) => return false,
                Ok(len) if len < bytes.len() => return true,
                Ok(_) => {}
                Err(error) => return matches!(error, Errno::AGAIN | Errno::INTR),
            }
        }
    }
}

/// A thread of a VM that writes notifications. It ends when this is dropped.
#[derive(Debug)]
struct Lane(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    work: Condvar,
    /// A line was written to.
    rest: Condvar,
    /// Lines that wait or are written to.
    count: AtomicUsize,
    /// When the write began that is being made; 0: there is none.
    since: AtomicU64,
    /// The thread, as long as it lives.
    thread: Mutex<Option<Pthread>>,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: VecDeque<Arc<Line>>,
    is_over: bool,
}

/// All lanes, for the watchdog.
static LANES: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
/// Starts the threads: it has no core and no priority of its own, which they would have too.
static STARTER: OnceLock<Sender<Arc<Shared>>> = OnceLock::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spawn(shared: Arc<Shared>) -> io::Result<()> {
    thread::Builder::new().name("signals".into()).spawn(move || shared.run()).map(drop)
}

/// The threads of VMs are started from the calling thread's core and priority, whoever wants them.
/// Errors: there can be no more threads.
pub(crate) fn start() -> io::Result<()> {
    let (starter, wanted) = channel();
    let starts = move || {
        for shared in wanted {
            if let Err(error) = spawn(shared) {
                tracing::error!(%error, "a VM has no thread for its notifications");
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(starts)?;
    let _ = STARTER.set(starter);
    Ok(())
}

/// Waits for the writes that threads have yet to make, for [`LANE_LIMIT`] at most: the process is
/// about to end.
pub(crate) fn finish() {
    let lanes: Vec<_> = lock(&LANES).iter().filter_map(Weak::upgrade).collect();
    let until = monotonic_now() + LANE_LIMIT;
    for lane in lanes {
        let left = std::time::Duration::from_nanos(until.since(monotonic_now()).as_nanos());
        let busy = |_: &mut Waiting| lane.count.load(Ordering::Relaxed) > 0;
        drop(lane.rest.wait_timeout_while(lock(&lane.waiting), left, busy));
    }
}

/// Interrupts threads whose writes wait.
pub(crate) fn look(now: Instant) {
    lock(&LANES).retain(|lane| {
        let Some(shared) = lane.upgrade() else { return false };
        let since = shared.since.load(Ordering::Relaxed);
        if since != 0 && now.since(Instant::from_nanos(since)) > LANE_LIMIT {
            // It lives as long as this is locked.
            let _ = lock(&shared.thread).map(|thread| pthread_kill(thread, Signal::SIGURG));
        }
        true
    });
}

impl Lane {
    fn start() -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        match STARTER.get() {
            Some(starter) => starter.send(Arc::clone(&shared)).map_err(io::Error::other)?,
            None => spawn(Arc::clone(&shared))?,
        }
        lock(&LANES).push(Arc::downgrade(&shared));
        Ok(Self(shared))
    }

    fn is_busy(&self) -> bool {
        self.0.count.load(Ordering::Relaxed) > 0
    }

    fn write_later(&self, line: &Arc<Line>) {
        if !line.is_queued.swap(true, Ordering::AcqRel) {
            self.0.count.fetch_add(1, Ordering::Relaxed);
            lock(&self.0.waiting).lines.push_back(Arc::clone(line));
            self.0.work.notify_one();
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        lock(&self.0.waiting).is_over = true;
        self.0.work.notify_one();
    }
}

impl Shared {
    fn run(&self) {
        *lock(&self.thread) = Some(pthread_self());
        while let Some(line) = self.next() {
            self.since.store(monotonic_now().as_nanos(), Ordering::Relaxed);
            // A notification from here on takes another write.
            line.is_queued.store(false, Ordering::Release);
            if !line.conduct.blocks() {
                line.write_aside();
            }
            self.since.store(0, Ordering::Relaxed);
            let waiting = lock(&self.waiting);
            self.count.fetch_sub(1, Ordering::Relaxed);
            drop(waiting);
            self.rest.notify_all();
        }
        *lock(&self.thread) = None;
    }

    /// Waits for the next line. `None`: there will be none.
    fn next(&self) -> Option<Arc<Line>> {
        let waits = |waiting: &mut Waiting| waiting.lines.is_empty() && !waiting.is_over;
        let waiting = self.work.wait_while(lock(&self.waiting), waits);
        waiting.unwrap_or_else(PoisonError::into_inner).lines.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
    use rustix::io::dup;

    use super::*;

    fn new_eventfd(count: u32) -> OwnedFd {
        eventfd(count, EventfdFlags::NONBLOCK).unwrap()
    }

    fn count(fd: &OwnedFd) -> rustix::io::Result<u64> {
        let mut count = [0; 8];
        rustix::io::read(fd, &mut count).map(|_| u64::from_ne_bytes(count))
    }

    #[test]
    fn when_one_kept_us_waiting_none_of_its_front_end_is_written_or_read() {
        let fds = [0, 0].map(new_eventfd);
        let conduct = Arc::<Conduct>::default();
        let notifiers = [0, 1].map(|n: usize| {
            Notifier::new(fds[n].try_clone().unwrap().into(), &conduct, false).unwrap()
        });
        assert_eq!(count(&fds[0]), Err(Errno::AGAIN), "to look whether it counts adds nothing");
        notifiers[0].notify();
        assert_eq!(count(&fds[0]), Ok(1));
        let seen = faults::count();
        conduct.has_blocked();
        assert!(faults::count() > seen, "the worker looks");
        notifiers.iter().for_each(Notifier::notify);
        assert_eq!((count(&fds[0]), count(&fds[1])), (Err(Errno::AGAIN), Err(Errno::AGAIN)));
        let (read, write) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&write, &[0; 8]).unwrap();
        let kick = KickFd::new(read.try_clone().unwrap().into(), true).unwrap();
        assert!(kick.clear(&conduct));
        assert_eq!(rustix::io::read(&read, &mut [0; 16]), Ok(8), "it was left there");
    }

    #[test]
    fn kicks_of_an_eventfd_are_not_taken_away_one_by_one() {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let fd = eventfd(7, flags).unwrap();
        let kick = KickFd::new(fd.try_clone().unwrap().into(), false).unwrap();
        assert!(kick.clear(&Conduct::default()));
        assert_eq!((0..9).filter(|_| count(&fd) == Ok(1)).count(), 7);
    }

    #[test]
    fn who_was_interrupted_has_blocked_and_others_like_him_are_looked_for() {
        let conduct = Conduct::default();
        assert_eq!(conduct.handle_result::<()>(Err(Errno::INTR)), Err(Errno::INTR));
        assert!(conduct.blocks() && watchdog::bewares());
    }

    #[test]
    fn what_runs_in_the_middle_of_a_write_does_not_make_it_slow() {
        let us = Duration::from_micros;
        for (first, again, slow) in [
            (400, [400, 400], false),
            (9000, [5, 5], false),    // a softirq of 9 ms
            (9000, [9000, 5], false), // and another one
            (9000, [3000, 3000], true),
            (600, [101, 101], true),
        ] {
            let mut again = again.into_iter().map(us);
            assert_eq!(is_slow(us(first), || again.next().unwrap()), slow, "{first}");
        }
    }

    #[test]
    fn who_makes_writes_slow_again_and_again_is_found_out_and_who_does_so_once_is_not() {
        let (slow, ms, s) =
            (SlowCalls::default(), Duration::from_millis(1), Duration::from_secs(1));
        let mut now = Instant::from_secs(1000);
        for _ in 0..100 {
            assert!(!slow.judge(now, s) && !slow.judge(now, s), "a machine that stands");
            now = now + Duration::from_secs(200);
        }
        for n in 1..=8 {
            let quick = Duration::from_micros(20);
            assert!((0..1000).all(|_| !slow.judge(now, quick)), "these pardon nothing");
            assert_eq!(slow.judge(now, ms), n >= 4, "{n}");
            now = now + Duration::from_millis(99);
        }
    }

    /// An eventfd for which so many wait.
    fn crowded(waiters: usize) -> (OwnedFd, Vec<OwnedFd>) {
        let fd = new_eventfd(0);
        let names: Vec<_> = (0..400).map(|_| dup(&fd).unwrap()).collect();
        let crowd = (0..waiters / 400).map(|_| {
            let some = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let data = epoll::EventData::new_u64(0);
            for name in &names {
                epoll::add(&some, name, data, epoll::EventFlags::IN).unwrap();
            }
            some
        });
        (fd, crowd.collect())
    }

    /// Waits until it was written to, and takes that away.
    fn wait(fd: &OwnedFd) {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "no notification");
        count(fd).unwrap();
    }

    #[test]
    fn a_write_that_calls_very_many_is_made_by_another_thread_which_finds_that_out() {
        let (fd, _crowd) = crowded(100_000);
        let slow = Arc::<SlowCalls>::default();
        slow.go_aside();
        // A softirq may run in the middle of a call of this thread, so the shortest counts.
        let mut shortest = Duration::from_secs(60);
        // A front-end that connects again keeps its count.
        for _ in 0..SLOW_MAX {
            let conduct = Arc::new(Conduct::new(&slow));
            let notifier = Notifier::new(fd.try_clone().unwrap().into(), &conduct, false).unwrap();
            let begin = time_on_core();
            notifier.notify();
            shortest = shortest.min(time_on_core().since(begin));
            wait(&fd);
            let lane = slow.lane.get().unwrap();
            let start = monotonic_now();
            while lane.is_busy() {
                assert!(monotonic_now().since(start) < Duration::from_secs(60));
                thread::yield_now();
            }
            if conduct.blocks() {
                assert!(shortest < SLOW, "{shortest:?} on this thread");
                return;
            }
        }
        panic!("it was not found out");
    }

    #[test]
    fn a_write_that_waits_keeps_nobody_but_its_own_thread() {
        sys::let_interrupt(Signal::SIGURG).unwrap();
        let fd = new_eventfd(0);
        let slow = Arc::<SlowCalls>::default();
        slow.go_aside();
        let conduct = Arc::new(Conduct::new(&slow));
        let notifier = Notifier::new(fd.try_clone().unwrap().into(), &conduct, false).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        fcntl_setfl(&fd, OFlags::empty()).unwrap();
        notifier.notify();
        let start = monotonic_now();
        while !conduct.blocks() {
            assert!(monotonic_now().since(start) < Duration::from_secs(60));
            look(monotonic_now());
            thread::yield_now();
        }
    }

    #[test]
    fn an_eventfd_that_was_quick_just_now_is_written_to_at_once() {
        let fd = new_eventfd(0);
        let slow = Arc::<SlowCalls>::default();
        slow.go_aside();
        let conduct = Arc::new(Conduct::new(&slow));
        let notifier = Notifier::new(fd.try_clone().unwrap().into(), &conduct, false).unwrap();
        let lane = slow.lane.get().unwrap();
        let at = |now: Instant| notifier.may_be_slow(now, lane);
        notifier.notify();
        wait(&fd);
        let start = monotonic_now();
        while lane.is_busy() {
            assert!(monotonic_now().since(start) < Duration::from_secs(60));
            thread::yield_now();
        }
        let written = Instant::from_nanos(notifier.0.written.load(Ordering::Relaxed));
        assert!(!at(written + FRESH) && at(written + FRESH + Duration::from_nanos(1)));
        slow.handle_call(written, SLOW + Duration::from_nanos(1));
        assert!(at(written) && at(written + SLOW) && at(written + FRESH));
    }
}
