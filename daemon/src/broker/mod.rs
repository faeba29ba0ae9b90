//! The broker: a small process that keeps CAP_NET_ADMIN, so that the daemon needs none.
//!
//! It is a copy of the daemon from before its first thread (`process`), and does this for it: it
//! opens uplinks, puts them into their bridges, and gives sockets of overlays larger buffers than
//! the host's settings allow. It does not believe the daemon, which an intruder may have taken
//! over, but the configuration file (`rules`), and has given away the rights that it does not need
//! (`shut`). They talk over a pair of sockets (`words`). The caller waits for the answer, so the
//! worker never calls it.
//!
//! It ends with the daemon. If it ends before, the daemon goes on, and opens no more uplinks. If it
//! does not answer, because it was stopped or its configuration is on a file system that does not
//! answer, the daemon regards it as ended, and it ends when it goes on.
//!
//! [`connector`] is a smaller process of the same kind, for connections to a registry, and `dialer`
//! another, for connections to other hosts.

pub mod connector;
pub(crate) mod dialer;
mod process;
mod rehearsal;
mod rules;
mod shut;
pub(crate) mod uplink;
mod words;

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::Duration;

use crate::config::{Config, Source, UplinkConfig, UplinkKind};
use crate::errors::{StartError, error};
use crate::sys;
pub use rehearsal::{Dialed, Rehearsal, Understood};
use rules::Rules;
pub use shut::{shut, shut_connector, shut_dialer};
use uplink::OpenError;
use words::{Answer, Channel, Given, Refusal, TO_ENLARGE, to_attach, to_detach, to_join, to_open};

/// The uplink that a request to the broker is about. `None`: it asks for none.
#[must_use]
pub fn asked_uplink(request: &[u8]) -> Option<UplinkConfig> {
    words::read(request.try_into().ok()?)
}

/// How long an answer may take. To make an interface waits for the kernel's lock of the network
/// configuration, which others have for seconds.
pub(crate) const ANSWER_MAX: Duration = Duration::from_secs(30);

/// The daemon's side.
#[derive(Debug)]
pub struct Broker {
    channel: Channel,
    /// One question and its answer at a time.
    turn: Mutex<()>,
}

impl Broker {
    /// Starts the process, for a daemon with this configuration. Call it while there is one thread,
    /// which has the capability.
    pub(crate) fn start(source: &Source, config: &Config) -> Result<Self, StartError> {
        let failed = |e: io::Error| {
            let what = format!("cannot start the process that opens uplinks: {e}");
            error(what, "report this")
        };
        let (ours, theirs) = Channel::pair(ANSWER_MAX).map_err(failed)?;
        let has_macvtap = config.uplinks.iter().any(|it| it.kind == UplinkKind::Macvtap);
        if sys::split().map_err(failed)? {
            drop(ours);
            let rules = Rules::new(source.clone(), config);
            process::run(rules, has_macvtap, &theirs);
        }
        drop(theirs);
        match ours.hear().map_err(failed)? {
            Ok(_) => {}
            Err(no) => return Err(error(no.what, &no.fix)),
        }
        Ok(Self { channel: ours, turn: Mutex::default() })
    }

    /// Opens an uplink, and waits for it: its interface, and the interface's number.
    ///
    /// # Errors
    /// As of [`uplink::open_file`]; it is not one that it opens; it has ended.
    pub fn open(&self, uplink: &UplinkConfig) -> Result<(File, u32), OpenError> {
        let given = self.ask(&to_open(uplink), &[]).and_then(|it| it.ok_or_else(gone));
        let no = |Refusal { what, fix, is_busy, is_final }| {
            let port = format!("uplink {}", uplink.name);
            OpenError { port, what, fix, is_busy, is_final }
        };
        given.map(|Given { fd, index, .. }| (fd.into(), index)).map_err(no)
    }

    /// Attaches the tap of a VM, with this slot of the area, and waits for it: its number, the
    /// area's descriptor, and those of the daemon's taps and of the links.
    ///
    /// # Errors
    /// The file does not allow it; the kernel's; it has ended.
    pub(crate) fn attach(
        &self,
        vm: &str,
        tap: &str,
        slot: u8,
    ) -> Result<(u32, OwnedFd, Vec<OwnedFd>), OpenError> {
        let given = self.ask(&to_attach(tap, slot), &[]).and_then(|it| it.ok_or_else(gone));
        let no = |Refusal { what, fix, is_busy, is_final }| OpenError {
            port: format!("vm {vm}"),
            what,
            fix,
            is_busy,
            is_final,
        };
        given.map(|Given { fd, more, index }| (index, fd, more)).map_err(no)
    }

    /// Takes the programs off the tap with this number, of which no frames are turned any more; 0:
    /// off all taps. It has nothing to do for links, which go by themselves.
    pub(crate) fn detach(&self, index: u32) {
        if let Err(Refusal { what, .. }) = self.ask(&to_detach(index), &[]) {
            tracing::debug!("filters may be left at taps until the next start: {what}");
        }
    }

    /// Puts an uplink back into its bridge.
    ///
    /// # Errors
    /// It is in some bridge; others as of [`Self::open`].
    pub fn join(&self, uplink: &UplinkConfig) -> io::Result<()> {
        let joined = self.ask(&to_join(uplink), &[]);
        joined.map(drop).map_err(|no| io::Error::other(no.what))
    }

    /// The sockets of an overlay, of which the first receives, get the buffers that they want.
    /// `again`: this failed before, which the log has said. `true`: it failed, and another attempt
    /// may succeed.
    pub(crate) fn enlarge(&self, port: &str, sockets: &[BorrowedFd<'_>], again: bool) -> bool {
        match self.ask(&TO_ENLARGE, sockets) {
            Ok(_) if again => tracing::info!(%port, "the overlay has its large buffers now"),
            Ok(_) => {}
            Err(Refusal { what, fix, is_final: true, .. }) => {
                tracing::warn!(%port, "the overlay has small buffers: {what}\n    fix: {fix}");
            }
            Err(Refusal { what, .. }) => {
                if again {
                    tracing::debug!(%port, "the overlay still has small buffers: {what}");
                } else {
                    tracing::warn!(
                        %port,
                        "the overlay has small buffers: {what}\n    the daemon tries again every \
                         second"
                    );
                }
                return true;
            }
        }
        false
    }

    /// It hangs up when the process has ended.
    pub(crate) fn end(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    fn ask(&self, request: &[u8], fds: &[BorrowedFd<'_>]) -> Answer {
        let Ok(_turn) = self.turn.lock() else {
            // A mistake of ours between a request and its answer, which was not read.
            self.channel.end();
            return Err(gone());
        };
        self.channel.send(request, fds).and_then(|()| self.channel.hear()).unwrap_or_else(|e| {
            Err(match e.kind() {
                ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                    gone()
                }
                ErrorKind::TimedOut => lost("does not answer and is given up"),
                _ => Refusal { is_final: false, ..lost(&format!("cannot be asked: {e}")) },
            })
        })
    }
}

fn gone() -> Refusal {
    lost("has ended")
}

fn lost(how: &str) -> Refusal {
    Refusal {
        what: format!("the process that opens uplinks {how}"),
        fix: "restart nightporterd".into(),
        is_busy: false,
        is_final: true,
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::process::{Child, Command, Stdio};

    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::{WaitPidFlag, waitpid};
    use nix::unistd::Pid;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::sockopt::{Timeout, set_socket_timeout};

    use super::*;

    /// A process that returns every request unchanged, which is no valid answer.
    fn echo(answer_max: Duration) -> (Broker, Child) {
        let (channel, theirs) = Channel::pair(answer_max).unwrap();
        let theirs = || theirs.fd().try_clone_to_owned().unwrap();
        let mut cat = Command::new("cat");
        let process = cat.stdin(theirs()).stdout(theirs()).stderr(Stdio::null()).spawn();
        (Broker { channel, turn: Mutex::default() }, process.unwrap())
    }

    /// A request that is an answer.
    const NO: &[u8] = b"\x01no\0wait";

    fn asks(broker: &Broker) -> Refusal {
        broker.ask(NO, &[]).unwrap_err()
    }

    fn has_hung_up(broker: &Broker) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(broker.end(), PollFlags::empty())];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        fds[0].revents().contains(PollFlags::HUP)
    }

    #[test]
    fn a_broker_that_stands_is_given_up_and_ends_when_it_goes_on() {
        let (broker, mut process) = echo(Duration::from_secs(20));
        assert_eq!(asks(&broker).what, "no", "it answers");
        let pid = Pid::from_raw(process.id().try_into().unwrap());
        kill(pid, Signal::SIGSTOP).unwrap();
        waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap(); // until it stands
        let soon = Some(Duration::from_millis(50));
        set_socket_timeout(broker.channel.fd(), Timeout::Recv, soon).unwrap();
        assert!(!has_hung_up(&broker));
        let no = asks(&broker);
        assert!(no.what.ends_with("does not answer and is given up") && no.is_final, "{no:?}");
        // Status and log show it, and no caller waits again.
        assert!(has_hung_up(&broker));
        assert_eq!(asks(&broker), gone());
        kill(pid, Signal::SIGCONT).unwrap();
        assert!(!process.wait().unwrap().success(), "its answer goes nowhere");
    }

    #[test]
    fn nobody_hears_an_answer_that_was_for_somebody_else() {
        let (broker, mut process) = echo(Duration::from_secs(20));
        let mistake = catch_unwind(AssertUnwindSafe(|| {
            let _turn = broker.turn.lock().unwrap();
            broker.channel.send(NO, &[]).unwrap();
            panic!("a mistake of ours");
        }));
        assert!(mistake.is_err());
        assert_eq!(asks(&broker), gone());
        assert!(has_hung_up(&broker));
        process.wait().unwrap();
    }
}
