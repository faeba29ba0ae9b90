//! fork(), which no safe code can offer, and calls that no safe crate has.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

/// Runs `child` in a child of this process, and says how that ended.
pub(crate) fn in_a_child(child: impl FnOnce()) -> WaitStatus {
    // SAFETY: this program has one thread when it forks.
    match unsafe { fork() }.expect("a child") {
        ForkResult::Child => {
            child();
            // SAFETY: nothing of the parent's is to be cleaned up.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => waitpid(child, None).expect("its end"),
    }
}

/// FIONREAD.
pub(crate) fn unread(fd: RawFd) -> i32 {
    let mut count = -1;
    // SAFETY: a number is there.
    unsafe { libc::ioctl(fd, libc::FIONREAD, &raw mut count) };
    count
}

/// A number of getsockopt(), or the errno.
pub(crate) fn option(fd: RawFd, level: i32, name: i32) -> Result<i32, i32> {
    let (mut value, mut len) = (0_i32, 4);
    // SAFETY: a number is there.
    let result =
        unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &raw mut len) };
    if result == 0 { Ok(value) } else { Err(nix::errno::Errno::last_raw()) }
}

/// setsockopt() of a number: 0, or the errno.
pub(crate) fn set_option(fd: RawFd, level: i32, name: i32, value: i32) -> i32 {
    // SAFETY: a number is there.
    let result = unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), 4) };
    if result == 0 { 0 } else { nix::errno::Errno::last_raw() }
}

/// connect() to no family: 0, or the errno.
pub(crate) fn disconnect(fd: RawFd) -> i32 {
    let nowhere = libc::sockaddr { sa_family: 0, sa_data: [0; 14] };
    // SAFETY: an address is there.
    let result = unsafe { libc::connect(fd, &raw const nowhere, 16) };
    if result == 0 { 0 } else { nix::errno::Errno::last_raw() }
}

/// A descriptor that was inherited.
pub(crate) fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the parent has left it for this, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

static SIGNALS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_: i32) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// From now on SIGUSR1 is counted.
pub(crate) fn handle_signals(restarts: bool) {
    let flags = if restarts { SaFlags::SA_RESTART } else { SaFlags::empty() };
    let action = SigAction::new(SigHandler::Handler(count), flags, SigSet::empty());
    // SAFETY: the handler adds to a number, and does nothing else.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.expect("handled");
}

/// How many have come.
pub(crate) fn signals_handled() -> usize {
    SIGNALS.load(Ordering::Relaxed)
}

/// SIGUSR1 for a thread of this process.
pub(crate) fn signal_thread(thread: libc::pid_t) {
    // SAFETY: no pointers. The thread may be gone.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGUSR1) };
}

/// SIGPIPE kills again.
pub(crate) fn default_sigpipe() {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// poll() of one descriptor.
pub(crate) fn polled(fd: RawFd, events: i16, timeout_ms: i32) -> i16 {
    let mut list = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one is there.
    unsafe { libc::poll(&raw mut list, 1, timeout_ms) };
    list.revents
}
