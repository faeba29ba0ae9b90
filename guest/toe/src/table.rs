//! The library's knowledge of this process's descriptors.
//!
//! A *hint* is a byte per number. Reading and writing look at it and nothing else. It may be stale,
//! because a descriptor can be closed behind the provider's back (fclose(), io_uring), so where an
//! error would matter the kernel is asked again. Behind the lock is the state that the kernel does
//! not know: the native socket that a TOE socket has replaced, a listener's two halves, the epolls
//! of a socket that is not connected yet.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use libc::{c_int, epoll_event};
use nightporter_core::toe::vsock::Ports;

use crate::control::{self, Shared};
use crate::listen::Listener;
use crate::options::Options;
use crate::sys::{self, Fd, Undisturbed};

/// The kind of a descriptor.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// It was not examined yet: it was there before this program, or came from another process.
    Unknown,
    /// Nothing of ours.
    Other,
    /// A TCP socket of this process that is not connected and does not listen.
    Candidate,
    /// A TOE socket whose connect() has not ended.
    Connecting,
    /// A TOE socket.
    Toe,
    /// A listener for TOE and TCP.
    Listener,
    /// The provider's own.
    Hidden,
}

/// Numbers from here on are none of ours: Linux gives no process so many unless its limit
/// (`fs.nr_open`) is raised. Untouched pages of hints cost nothing.
const HINTS: usize = 1 << 20;
const KIND: u8 = 7;
/// An error that ended it was reported: later reads get an end of file.
const TOLD: u8 = 8;
/// shutdown(SHUT_RD): nothing is waited for any more.
const DEAF: u8 = 16;

static HINT: [AtomicU8; HINTS] = [const { AtomicU8::new(0) }; HINTS];
/// The largest number that ever had one.
static HIGHEST: AtomicI32 = AtomicI32::new(-1);
static ENABLED: AtomicBool = AtomicBool::new(false);
/// The process that the table is about: a child of vfork() has this memory, and other descriptors.
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// The process has confined itself (seccomp): it may not be allowed calls that it does not make
/// itself.
static CONFINED: AtomicBool = AtomicBool::new(false);
static STATE: Mutex<State> = Mutex::new(State {
    sockets: BTreeMap::new(),
    listeners: BTreeMap::new(),
    watchers: BTreeMap::new(),
    line: None,
});

/// A descriptor that the application does not know of.
#[derive(Debug)]
pub(crate) struct Hidden(pub(crate) Fd);

impl Hidden {
    /// A second number for the same file, out of the way of the application's.
    pub(crate) fn of(fd: Fd, closes_on_exec: bool) -> sys::Res<Self> {
        // Above the numbers that select() takes, if there is room.
        let max = sys::descriptors_max();
        let from = if max > 2048 { 1024 } else { max - max / 8 };
        let what = if closes_on_exec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
        let hidden = sys::control(fd, what, c_int::try_from(from).unwrap_or(1024))?;
        set_kind(hidden, Kind::Hidden);
        Ok(Self(hidden))
    }

    /// The same, of a number that is not needed any more.
    pub(crate) fn instead_of(fd: Fd, closes_on_exec: bool) -> sys::Res<Self> {
        let hidden = Self::of(fd, closes_on_exec);
        sys::close_fd(fd);
        hidden
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // If it was closed behind our back, the number is another file's by now.
        if kind(self.0) == Kind::Hidden {
            set_kind(self.0, Kind::Unknown);
            sys::close_fd(self.0);
        }
    }
}

/// A TOE socket, with all descriptors of this process for it.
#[derive(Debug)]
pub(crate) struct Socket {
    /// AF_INET or AF_INET6: the application's view of it.
    pub(crate) family: c_int,
    /// The host's name of it. The kernel knows it too, but not after shutdown().
    pub(crate) ports: Ports,
    /// Where its connect() went. `None` if it was accepted.
    pub(crate) to: Option<SocketAddr>,
    /// Its own address and the other side's, once the host has told them.
    pub(crate) addresses: OnceLock<(SocketAddr, SocketAddr)>,
    /// The native socket that it took the place of. It has the port in the guest's own stack and
    /// keeps all options that mean nothing to vsock.
    pub(crate) native: Option<Hidden>,
    /// Those options of a socket that has no native one.
    pub(crate) options: Mutex<Options>,
}

impl Socket {
    /// One that is not known to have options.
    pub(crate) fn new(family: c_int, ports: Ports) -> Self {
        let (to, native) = (None, None);
        let (addresses, options) = (OnceLock::new(), Mutex::default());
        Self { family, ports, to, addresses, native, options }
    }
}

/// See the module doc.
pub(crate) struct State {
    pub(crate) sockets: BTreeMap<Fd, Arc<Socket>>,
    pub(crate) listeners: BTreeMap<Fd, Arc<Listener>>,
    /// The epolls with a socket that may be replaced: epoll's descriptor and its event.
    pub(crate) watchers: BTreeMap<Fd, BTreeMap<Fd, epoll_event>>,
    /// The control connection, behind a lock of its own: a thread that asks the host waits for its
    /// answer, and delays only others that ask, too.
    pub(crate) line: Option<Shared>,
}

/// [`State`], whose holder is not disturbed.
pub(crate) struct Locked {
    state: MutexGuard<'static, State>,
    _undisturbed: Undisturbed,
}

impl std::ops::Deref for Locked {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

/// The state of this process.
pub(crate) fn lock() -> Locked {
    let undisturbed = Undisturbed::begin();
    let state = STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    Locked { state, _undisturbed: undisturbed }
}

/// The provider works in this process.
pub(crate) fn enable() {
    PROCESS.store(sys::pid(), Ordering::Relaxed);
    ENABLED.store(true, Ordering::Relaxed);
    sys::at_fork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/// Whether the table is this process's. A child of vfork() has descriptors of its own.
pub(crate) fn is_ours() -> bool {
    ENABLED.load(Ordering::Relaxed) && PROCESS.load(Ordering::Relaxed) == sys::pid()
}

/// This process confines itself to few system calls.
pub(crate) fn confine() {
    CONFINED.store(true, Ordering::Relaxed);
}

/// Whether it has. Then only calls are made that it makes itself, on open descriptors.
pub(crate) fn is_confined() -> bool {
    CONFINED.load(Ordering::Relaxed)
}

fn hint(fd: Fd) -> Option<&'static AtomicU8> {
    usize::try_from(fd).ok().and_then(|fd| HINT.get(fd))
}

/// The kind of a descriptor, as far as is known.
#[inline]
pub(crate) fn kind(fd: Fd) -> Kind {
    if !ENABLED.load(Ordering::Relaxed) {
        return Kind::Other;
    }
    match hint(fd).map_or(1, |hint| hint.load(Ordering::Relaxed)) & KIND {
        0 => Kind::Unknown,
        2 => Kind::Candidate,
        3 => Kind::Connecting,
        4 => Kind::Toe,
        5 => Kind::Listener,
        6 => Kind::Hidden,
        _ => Kind::Other,
    }
}

/// It is this now.
pub(crate) fn set_kind(fd: Fd, kind: Kind) {
    if let Some(hint) = hint(fd) {
        hint.store(kind as u8, Ordering::Relaxed);
        HIGHEST.fetch_max(fd, Ordering::Relaxed);
    }
}

/// Whether the number can be one of ours.
pub(crate) fn has_room_for(fd: Fd) -> bool {
    hint(fd).is_some()
}

fn has(fd: Fd, bit: u8) -> bool {
    hint(fd).is_some_and(|hint| hint.load(Ordering::Relaxed) & bit != 0)
}

fn mark(fd: Fd, bit: u8) {
    if let Some(hint) = hint(fd) {
        hint.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Whether the error that ended it was shown before, and from now on it was.
pub(crate) fn tell(fd: Fd) -> bool {
    let told = has(fd, TOLD);
    mark(fd, TOLD);
    told
}

/// Whether its error was shown.
pub(crate) fn was_told(fd: Fd) -> bool {
    has(fd, TOLD)
}

/// Whether shutdown(SHUT_RD) was called.
#[inline]
pub(crate) fn is_deaf(fd: Fd) -> bool {
    has(fd, DEAF)
}

/// shutdown(SHUT_RD) was called.
pub(crate) fn deafen(fd: Fd) {
    mark(fd, DEAF);
}

/// The number is free, or another file's: forgets its state. Cheap for other descriptors.
pub(crate) fn forget(fd: Fd) {
    match kind(fd) {
        Kind::Unknown => {}
        Kind::Other => set_kind(fd, Kind::Unknown),
        _ if !is_ours() => {}
        _ => forget_locked(&mut lock(), fd),
    }
}

fn forget_locked(state: &mut State, fd: Fd) {
    set_kind(fd, Kind::Unknown);
    state.watchers.remove(&fd);
    state.sockets.remove(&fd);
    state.listeners.remove(&fd);
}

/// It is a new descriptor of something that the provider has no part in.
pub(crate) fn is_foreign(fd: Fd) {
    forget(fd);
    set_kind(fd, Kind::Other);
}

/// A descriptor has a second number.
pub(crate) fn copied(from: Fd, to: Fd) {
    if from == to {
        return;
    }
    forget(to);
    match kind(from) {
        Kind::Unknown | Kind::Other | Kind::Hidden => return,
        _ if !is_ours() => return,
        // One of two descriptors cannot be replaced for the other: both stay native.
        Kind::Candidate => {
            set_kind(from, Kind::Other);
            set_kind(to, Kind::Other);
            return;
        }
        Kind::Connecting | Kind::Toe | Kind::Listener => {}
    }
    let mut state = lock();
    if let Some(socket) = state.sockets.get(&from).cloned() {
        state.sockets.insert(to, socket);
    }
    if let Some(listener) = state.listeners.get(&from).cloned() {
        state.listeners.insert(to, listener);
    }
    if let Some((from, to)) = hint(from).zip(hint(to)) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    HIGHEST.fetch_max(to, Ordering::Relaxed);
}

/// The application closes all of these. Returns those in that range, in order, that are the
/// provider's own.
pub(crate) fn forget_range(first: Fd, last: Fd) -> Vec<Fd> {
    let last = last.min(HIGHEST.load(Ordering::Relaxed));
    let mut state = lock();
    let is_hidden = |fd: &Fd| kind(*fd) == Kind::Hidden;
    (first..=last).filter(|fd| !is_hidden(fd)).for_each(|fd| forget_locked(&mut state, fd));
    (first..=last).filter(is_hidden).collect()
}

thread_local! {
    static HELD: RefCell<Option<Locked>> = const { RefCell::new(None) };
}

extern "C" fn before_fork() {
    if is_ours() {
        let locked = lock();
        HELD.with_borrow_mut(|held| *held = Some(locked));
    }
}

/// A socket that two processes have can be replaced in neither.
fn share_candidates() {
    let last = HIGHEST.load(Ordering::Relaxed);
    (0..=last).filter(|fd| kind(*fd) == Kind::Candidate).for_each(|fd| set_kind(fd, Kind::Other));
}

extern "C" fn after_fork_in_parent() {
    HELD.with_borrow_mut(|held| {
        if held.take().is_some() {
            share_candidates();
        }
    });
}

extern "C" fn after_fork_in_child() {
    HELD.with_borrow_mut(|held| {
        if let Some(mut state) = held.take() {
            PROCESS.store(sys::pid(), Ordering::Relaxed);
            share_candidates();
            // The parent's answers would come to us. If a thread of the parent was asking, its lock
            // is never given back here.
            if let Some(line) = state.line.take() {
                state.line = control::leave_behind(line);
            }
        }
    });
}
