//! One virtqueue as the messages describe it: addresses, sizes, descriptors, and the running queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use nightporter_core::time::{Duration, Instant};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, statx};
use rustix::io::Errno;

use super::device::DeviceQueue;
use super::protocol::Refusal;
use super::ring::{RingAddrs, RingFault};
use crate::closer::Foreign;
use crate::faults;
use crate::timer::{monotonic_now, time_on_core};
use crate::watchdog;

/// A write or read that takes longer is slow: the kernel notifies all waiters of an eventfd, and
/// its maker can have a million epolls wait. No signal ends it.
const SLOW: Duration = Duration::from_micros(500);
/// So many slow calls are enough,
const SLOW_MAX: u32 = 4;
/// if so many times what they take has not passed: a hundredth of the worker's time.
const SLOW_SHARE: u64 = 100;

/// Slow calls of all descriptors of a VM, also of connections that are over, so that a VM that
/// comes back keeps its count.
#[derive(Debug, Default)]
pub struct SlowCalls {
    /// Calls are measured until then, because one was slow by the clock. Perhaps it only lost its
    /// core meanwhile. Nanoseconds, as the next.
    watched_until: AtomicU64,
    /// When those that were found slow count no more.
    until: AtomicU64,
    /// How many those are.
    count: AtomicU32,
}

impl SlowCalls {
    fn is_watched(&self, now: Instant) -> bool {
        now.as_nanos() < self.watched_until.load(Ordering::Relaxed)
    }

    /// A call took so long by the clock.
    fn handle_call(&self, now: Instant, time: Duration) {
        if time > SLOW {
            let until = (now + time.saturating_mul(SLOW_SHARE)).as_nanos();
            self.watched_until.fetch_max(until, Ordering::Relaxed);
        }
    }

    /// The same for time on the core. `true`: that is enough.
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

/// How the descriptors of a front-end behave, all of a connection together.
#[derive(Debug, Default)]
pub struct Conduct {
    /// They kept us waiting, or take long: none of them is used any more.
    blocks: AtomicBool,
    slow: Arc<SlowCalls>,
}

impl Conduct {
    /// For a front-end whose slow calls are added to the earlier ones.
    #[must_use]
    pub fn new(slow: &Arc<SlowCalls>) -> Self {
        Self { blocks: AtomicBool::new(false), slow: Arc::clone(slow) }
    }

    /// Whether the worker was kept by one of them: waiting, or at work.
    #[must_use]
    pub fn blocks(&self) -> bool {
        self.blocks.load(Ordering::Relaxed)
    }

    fn has_blocked(&self) {
        self.blocks.store(true, Ordering::Relaxed);
        faults::raise();
    }

    /// Adds `count` to an eventfd.
    fn write(&self, fd: &Foreign, count: u64) -> rustix::io::Result<usize> {
        self.watch(|| rustix::io::write(fd, &count.to_ne_bytes()))
    }

    /// Reads or writes. By the clock each call is measured, which costs two looks at it; by the
    /// time on the core, which others' load does not change and which costs two system calls, those
    /// after a slow one and those while turns are long.
    fn watch(&self, call: impl FnOnce() -> rustix::io::Result<usize>) -> rustix::io::Result<usize> {
        let begin = monotonic_now();
        let is_watched = watchdog::suspects() || self.slow.is_watched(begin);
        let start = is_watched.then(time_on_core);
        let result = call();
        if result == Err(Errno::INTR) {
            self.has_blocked();
            watchdog::beware();
        }
        let now = monotonic_now();
        self.slow.handle_call(now, now.since(begin));
        let is_enough = |start| self.slow.judge(now, time_on_core().since(start));
        if start.is_some_and(is_enough) && !self.blocks() {
            self.has_blocked();
        }
        result
    }
}

/// An eventfd shared with the front-end: eight bytes per notification. For a front-end that is
/// trusted not to stop us it may be a pipe or a socket.
#[derive(Debug)]
pub struct Notifier {
    fd: Foreign,
    conduct: Arc<Conduct>,
}

impl Notifier {
    /// Takes a descriptor over and makes it non-blocking, also for the front-end, which has the
    /// same open file: front-ends we know wait for theirs with epoll or KVM.
    ///
    /// Refused: files and devices, which cannot be waited for, and which a write would change; and
    /// what has no type and is no eventfd, such as an epoll of a million descriptors, in which the
    /// kernel looks at all of them when it is to be waited for. So are pipes and sockets unless
    /// `takes_pipes`: who reads at the other end holds their lock while the bytes are copied, into
    /// memory that is not there for as long as he likes (userfaultfd(2), a file of FUSE), and
    /// whoever wants the lock meanwhile waits, with O_NONBLOCK too, and no signal ends it.
    pub fn new(fd: Foreign, conduct: &Arc<Conduct>, takes_pipes: bool) -> Result<Self, Refusal> {
        // A file system of the front-end's own may never answer `fstat`; this does not ask it.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = statx(&fd, c"", flags, StatxFlags::TYPE).map_err(io::Error::from)?;
        let kind = FileType::from_raw_mode(stat.stx_mode.into());
        // An eventfd is an anonymous inode and has no type.
        let is_pipe = matches!(kind, FileType::Fifo | FileType::Socket);
        if kind != FileType::Unknown && !(takes_pipes && is_pipe) {
            return Err(Refusal::BadDescriptor);
        }
        let flags = fcntl_getfl(&fd).map_err(io::Error::from)?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(io::Error::from)?;
        // Adding 0 to an eventfd never waits; other files without a type cannot be written to.
        if kind == FileType::Unknown && conduct.write(&fd, 0) != Ok(size_of::<u64>()) {
            return Err(Refusal::BadDescriptor);
        }
        Ok(Self { fd, conduct: Arc::clone(conduct) })
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

    /// Notifies. If the counter or pipe is full, a notification is pending anyway; if the other
    /// end is gone, the connection will say so.
    pub fn notify(&self) {
        if !self.conduct.blocks() {
            let _ = self.conduct.write(&self.fd, 1);
        }
    }

    /// Clears a pending notification, so that a level-triggered wait goes quiet. `false`: it never
    /// will, because the other end is gone, or this is another file that cannot be read.
    #[must_use]
    pub fn clear(&self) -> bool {
        if self.conduct.blocks() {
            return true;
        }
        let mut count = [0; 512];
        match self.conduct.watch(|| rustix::io::read(&self.fd, &mut count)) {
            Ok(len) => len > 0,
            Err(error) => matches!(error, Errno::AGAIN | Errno::INTR),
        }
    }
}

/// The result of SET_VRING_KICK.
#[derive(Debug, Default)]
pub enum Kick {
    /// Not set, or taken away by GET_VRING_BASE: the ring is stopped.
    #[default]
    None,
    /// The ring must be polled; there is no event to wait for.
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
    /// The answer to GET_VRING_BASE while the ring does not run.
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
    /// Whether everything that a ring needs to run is there, except that it may be disabled.
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

    /// The guest broke the rules: the front-end is told, if it wanted that.
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

    /// Stops: completed chains are shown. If it stops `in_order`, chains that were only taken are
    /// forgotten, otherwise they stay in the in-flight log. `false` if it did not run.
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

    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::io::dup;

    use super::*;

    #[test]
    fn when_one_kept_us_waiting_none_of_its_front_end_is_written_or_read() {
        let mut fds: [OwnedFd; 3] =
            [0, 0, 5].map(|count| eventfd(count, EventfdFlags::NONBLOCK).unwrap());
        let conduct = Arc::<Conduct>::default();
        let notifiers = fds
            .each_mut()
            .map(|fd| Notifier::new(fd.try_clone().unwrap().into(), &conduct, false).unwrap());
        let count = |fd: &OwnedFd| {
            let mut count = [0; 8];
            rustix::io::read(fd, &mut count).map(|_| u64::from_ne_bytes(count))
        };
        assert_eq!(count(&fds[0]), Err(Errno::AGAIN), "to look whether it counts adds nothing");
        notifiers[0].notify();
        assert_eq!(count(&fds[0]), Ok(1));
        let seen = faults::count();
        conduct.has_blocked();
        assert!(faults::count() > seen, "the worker looks");
        notifiers.iter().for_each(Notifier::notify);
        assert_eq!((count(&fds[0]), count(&fds[1])), (Err(Errno::AGAIN), Err(Errno::AGAIN)));
        assert!(notifiers[2].clear());
        assert_eq!(count(&fds[2]), Ok(5));
    }

    #[test]
    fn who_was_interrupted_has_blocked_and_others_like_him_are_looked_for() {
        let conduct = Conduct::default();
        assert!(!watchdog::bewares());
        let interrupted = conduct.watch(|| Err(Errno::INTR));
        assert_eq!(interrupted, Err(Errno::INTR));
        assert!(conduct.blocks() && watchdog::bewares());
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
        // Its cost grows with the waiters: an epoll, of many names for the same. No turn is long
        // here.
        let fd: Foreign = eventfd(0, EventfdFlags::NONBLOCK).unwrap().into();
        let names: Vec<_> = (0..400).map(|_| dup(&fd).unwrap()).collect();
        let slow = Arc::default();
        let (conduct, mut crowd) = (Conduct::new(&slow), Vec::new());
        let mut grow = || {
            let some = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let data = epoll::EventData::new_u64(0);
            for name in &names {
                epoll::add(&some, name, data, epoll::EventFlags::IN).unwrap();
            }
            crowd.push(some);
            assert!(crowd.len() < 400, "160,000 are waiting");
        };
        while !conduct.blocks() {
            grow();
            assert_eq!(conduct.write(&fd, 1), Ok(8));
        }
        // A front-end that connects again keeps its count. The first call of all is not measured.
        (0..40).for_each(|_| grow());
        (0..4).for_each(|_| assert_eq!(conduct.write(&fd, 1), Ok(8)));
        let again = Conduct::new(&slow);
        let calls = (1..).find(|_| blocks_after_a_write(&again, &fd));
        assert!(calls < Some(1 + SLOW_MAX), "{calls:?}");
    }

    fn blocks_after_a_write(conduct: &Conduct, fd: &Foreign) -> bool {
        assert_eq!(conduct.write(fd, 1), Ok(8));
        conduct.blocks()
    }
}
