//! The lease of a listener: the control connection that has asked for it. The host keeps the
//! listener as long as any process has the lease.
//!
//! All processes that have a listener have one lease, however they got it. A process that finds it
//! dead, because the daemon was restarted, replaces it for all of them. So it is no descriptor of
//! theirs, but lies in the queue of a socket that they inherit with the listener, the *box*, and is
//! gone when the last of them has closed the box.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use libc::{EPOLL_CTL_ADD, c_int};
use nightporter_core::toe::control::{Ask, Asked, Code};

use crate::connect::Temporary;
use crate::listen::{self, LEASE};
use crate::sys::{self, Fd, Res, Undisturbed};
use crate::table::{self, Hidden};
use crate::transport::Patience;
use crate::{control, pause};

/// See the module doc.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) held_in: Hidden,
    /// While there is none a process does not ask again before this: another may be at it, or the
    /// host away. 0 as long as there was one.
    not_before_ms: AtomicI64,
    /// How often it was found since then that there is none.
    absences: AtomicU32,
}

impl Lease {
    /// The lease with this box.
    pub(crate) const fn of(held_in: Hidden) -> Self {
        Self { held_in, not_before_ms: AtomicI64::new(0), absences: AtomicU32::new(0) }
    }

    /// None yet, but a place for it.
    pub(crate) fn new(closes_on_exec: bool) -> Res<Self> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
        let fd = Temporary(sys::new_socket(libc::AF_UNIX, kind, 0)?);
        // Its messages come to itself, so it needs a name, which the kernel chooses.
        let family = u16::try_from(libc::AF_UNIX).expect("1").to_ne_bytes();
        sys::bind_to(fd.0, &sys::Name::of(&family))?;
        sys::connect_to(fd.0, &sys::name_of(fd.0)?)?;
        Ok(Self::of(Hidden::of(fd.0, closes_on_exec)?))
    }

    /// Asks for a listener, and wakes `epoll` when the lease has ended.
    pub(crate) fn take(&self, ask: Ask, epoll: Fd, patience: Patience) -> Res {
        // A signal would interrupt the answer, whatever its handler does: there is a limit of time.
        let _undisturbed = Undisturbed::begin();
        let line = Temporary(control::connect(patience)?);
        if control::exchange(line.0, Asked { tag: 0, ask })?.code != Code::Done {
            return Err(libc::EOPNOTSUPP);
        }
        sys::set_epoll(epoll, EPOLL_CTL_ADD, line.0, listen::interest(LEASE))?;
        sys::send_descriptor(self.held_in.0, line.0)
    }

    /// A daemon that was started anew knows of no listener: one that is dead goes, and another is
    /// asked for.
    pub(crate) fn renew(&self, ask: impl FnOnce() -> Res<Ask>, epoll: Fd) {
        if table::is_confined() {
            return;
        }
        if self.is_alive() {
            self.not_before_ms.store(0, Ordering::Relaxed);
            self.absences.store(0, Ordering::Relaxed);
            return;
        }
        // This is the last descriptor of a dead lease: the epoll forgets it with that. Of all
        // processes that find it dead at once, the one that has taken it out asks.
        let mut at_once = false;
        while let Ok(dead) = self.look(0) {
            drop(dead);
            at_once = true;
        }
        let now_ms = sys::now_ms();
        let not_before_ms = self.not_before_ms.load(Ordering::Relaxed);
        if !at_once && now_ms < not_before_ms {
            return;
        }
        let pause_ms = pause::after(self.absences.fetch_add(1, Ordering::Relaxed));
        self.not_before_ms.store(now_ms + pause_ms, Ordering::Relaxed);
        if at_once || not_before_ms != 0 {
            let _ = ask().and_then(|ask| self.take(ask, epoll, Patience::Brief));
        }
    }

    fn is_alive(&self) -> bool {
        match self.look(libc::MSG_PEEK) {
            Ok(line) => {
                let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
                sys::receive(line.0, &mut [0], flags) == Err(libc::EAGAIN)
            }
            // Without a spare descriptor it cannot be found out.
            Err(errno) => errno != libc::EAGAIN,
        }
    }

    fn look(&self, flags: c_int) -> Res<Temporary> {
        sys::receive_descriptor(self.held_in.0, flags | libc::MSG_DONTWAIT).map(Temporary)
    }
}
