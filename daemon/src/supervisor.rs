//! Notifications for systemd (sd_notify(3), sd_watchdog_enabled(3)): that the daemon is ready, that
//! it is stopping, and, if the unit has `WatchdogSec=`, that the worker makes progress; and
//! descriptors, which systemd keeps for the next daemon (`FileDescriptorStoreMax=`), and which that
//! one is passed like sockets (sd_listen_fds(3)). Without systemd nothing is sent.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};

use crate::sys;

/// How long a one-time message waits if the supervisor's socket is full.
const PATIENCE: Duration = Duration::from_secs(1);
/// For the end itself: memory is given back.
const AFTER_DRAIN: Duration = Duration::from_secs(10);

/// The supervisor that started us and wants messages.
#[derive(Debug)]
pub(crate) struct Supervisor {
    socket: UnixDatagram,
    /// How often it wants to know that the daemon lives.
    period: Option<Duration>,
    store_max: Option<u32>,
}

impl Supervisor {
    /// The supervisor in our environment; `None`: there is none. Errors: it does not listen.
    pub(crate) fn from_env() -> io::Result<Option<Self>> {
        let Some(address) = env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
        let of = |name: &str| env::var(name).ok();
        let period = period(of("WATCHDOG_USEC"), of("WATCHDOG_PID"), std::process::id());
        let supervisor = Self::connect(&address, period)?;
        let store_max = of("FDSTORE").and_then(|max| max.parse().ok());
        Ok(Some(Self { store_max, ..supervisor }))
    }

    fn connect(address: &OsStr, period: Option<Duration>) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(PATIENCE))?;
        let address = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(address)?,
        };
        socket.connect_addr(&address)?;
        Ok(Self { socket, period, store_max: None })
    }

    /// It is told that the daemon lives at least this often, if it wants that.
    pub(crate) const fn period(&self) -> Option<Duration> {
        self.period
    }

    /// The worker makes progress. A supervisor that has not read the last message needs no other.
    pub(crate) fn lives(&self) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = send(&self.socket, b"WATCHDOG=1", flags);
    }

    /// Descriptors that it may keep, if it says so (it does since systemd 254).
    pub(crate) const fn store_max(&self) -> Option<u32> {
        self.store_max
    }

    /// It keeps copies of these, for the next daemon, until it is told otherwise: under a name of
    /// printable ASCII without a colon. They stay there whatever happens at their other ends.
    /// Errors: it does not read its messages. Whether it has room it does not say.
    pub(crate) fn keep(&self, name: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let what = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "room for two");
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg(&self.socket, &[IoSlice::new(what.as_bytes())], &mut control, flags)?;
        Ok(())
    }

    /// It keeps those under this name no longer.
    pub(crate) fn forget(&self, name: &str) {
        let what = format!("FDSTOREREMOVE=1\nFDNAME={name}");
        // If that is lost the next daemon says it again.
        let _ = send(&self.socket, what.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Everything has started.
    pub(crate) fn is_ready(&self) {
        self.say("READY=1");
    }

    /// Guests get the bytes that they are owed for at most `drain`, then the daemon ends. The
    /// supervisor should wait for that, even if its own limit (`TimeoutStopSec=`) is shorter.
    pub(crate) fn is_stopping(&self, drain: Duration) {
        let most = drain + AFTER_DRAIN;
        self.say(&format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={}", most.as_micros()));
    }

    /// Sends a message, if the supervisor listens.
    fn say(&self, what: &str) {
        let _ = self.socket.send(what.as_bytes());
    }
}

/// The descriptors that the supervisor has kept, until somebody takes them.
static STORED: Mutex<BTreeMap<String, Vec<OwnedFd>>> = Mutex::new(BTreeMap::new());

/// Finds the descriptors that a supervisor has passed to this process. To be called once, before
/// others are opened.
pub fn find_stored() {
    let of = |name: &str| env::var(name).ok();
    let names = names_of(of("LISTEN_PID"), of("LISTEN_FDS"), of("LISTEN_FDNAMES"));
    let mut stored = STORED.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, fd) in names.into_iter().zip(sys::passed_fds()) {
        stored.entry(name).or_default().extend(fd);
    }
}

/// The descriptors that the supervisor has kept, by the names under which they were; only once.
pub(crate) fn take_stored() -> BTreeMap<String, Vec<OwnedFd>> {
    std::mem::take(&mut STORED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The names of the descriptors that were passed to us, in their order.
fn names_of(pid: Option<String>, count: Option<String>, names: Option<String>) -> Vec<String> {
    let count = count.and_then(|count| count.parse().ok());
    let Some(count) =
        count.filter(|_| pid.and_then(|pid| pid.parse().ok()) == Some(std::process::id()))
    else {
        return Vec::new();
    };
    let names = names.unwrap_or_default();
    let names = names.split(':').map(str::to_owned).chain(std::iter::repeat(String::new()));
    names.take(count).collect()
}

/// The meaning of the watchdog's variables for the process `own`.
fn period(usec: Option<String>, pid: Option<String>, own: u32) -> Option<Duration> {
    if pid.is_some_and(|pid| pid.parse() != Ok(own)) {
        return None; // they are for somebody else
    }
    let usec = usec?.parse().ok().filter(|usec| *usec > 0)?;
    Some(Duration::from_micros(usec))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_is_for_the_process_that_it_names() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(period(some("3000"), None, 7), Some(Duration::from_millis(3)));
        assert_eq!(period(some("3000"), some("7"), 7), Some(Duration::from_millis(3)));
        assert_eq!(period(some("3000"), some("8"), 7), None);
        assert_eq!(period(some("0"), None, 7), None);
        assert_eq!(period(some("soon"), None, 7), None);
        assert_eq!(period(None, None, 7), None);
    }

    #[test]
    fn descriptors_are_for_the_process_that_was_meant_and_those_without_a_name_have_an_empty_one() {
        let some = |text: &str| Some(text.to_owned());
        let own = some(&std::process::id().to_string());
        assert_eq!(names_of(own.clone(), some("2"), some("a:b")), ["a", "b"]);
        assert_eq!(names_of(own.clone(), some("3"), some("a")), ["a", "", ""]);
        assert_eq!(names_of(own.clone(), some("1"), some("a:b")), ["a"]);
        let none = [(own, None), (some("1"), some("2")), (None, some("2"))];
        assert!(none.into_iter().all(|(pid, count)| names_of(pid, count, some("a:b")).is_empty()));
    }

    #[test]
    fn what_is_said_once_is_heard_by_who_reads_late() {
        let (systemd, socket) = UnixDatagram::pair().unwrap();
        systemd.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
        let ours = Supervisor { socket, period: None, store_max: None };
        let full = "/proc/sys/net/unix/max_dgram_qlen";
        let full: usize = std::fs::read_to_string(full).unwrap().trim().parse().unwrap();
        (0..full + 2).for_each(|_| ours.lives());
        let teller = std::thread::spawn(move || ours.is_ready());
        let mut said = [0; 60];
        while systemd.recv(&mut said).map(|n| &said[..n]).unwrap() != b"READY=1" {}
        teller.join().unwrap();
    }

    #[test]
    fn an_address_may_be_a_path_or_a_name_without_a_file() {
        let name = format!("nightporter-test-{}", std::process::id());
        let at = SocketAddr::from_abstract_name(&name).unwrap();
        let systemd = UnixDatagram::bind_addr(&at).unwrap();
        let ours = Supervisor::connect(OsStr::new(&format!("@{name}")), None).unwrap();
        ours.is_ready();
        ours.is_stopping(Duration::from_secs(120));
        let mut said = [0; 60];
        assert_eq!(systemd.recv(&mut said).map(|n| &said[..n]).unwrap(), b"READY=1");
        let stopping = b"STOPPING=1\nEXTEND_TIMEOUT_USEC=130000000";
        assert_eq!(systemd.recv(&mut said).map(|n| &said[..n]).unwrap(), stopping);
        assert!(Supervisor::connect(OsStr::new("/nowhere/notify"), None).is_err());
    }
}
