//! The broker: a small process that keeps CAP_NET_ADMIN, so that the daemon needs none.
//!
//! It is a copy of the daemon from before its first thread (`process`), and does this for it: it
//! opens uplinks, puts them into their bridges, and lets sockets of overlays have larger buffers
//! than the host's settings allow. It does not believe the daemon, which somebody may have taken
//! over, but the configuration file (`rules`), and has given away what it does not need (`shut`).
//! Between the two is a pair of sockets (`words`). Who asks waits for the answer, so the worker
//! never does.
//!
//! It ends with the daemon. If it ends before, the daemon goes on, and opens no more uplinks.
//!
//! [`connector`] is its smaller brother, for connections to a registry.

pub mod connector;
mod process;
mod rules;
mod shut;
mod words;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use crate::config::{Config, Source, UplinkConfig, UplinkKind};
use crate::port::overlay::OverlayPort;
use crate::port::tap::{OpenError, TapPort};
use crate::start::{StartError, error};
use crate::sys;
use rules::Rules;
pub use shut::{shut, shut_connector};
use words::{Answer, Channel, Refusal, TO_ENLARGE, to_join, to_open};

/// The daemon's side.
#[derive(Debug)]
pub struct Broker {
    /// One question and its answer at a time.
    channel: Mutex<Channel>,
    /// The same, to be told when the process ends.
    end: OwnedFd,
}

impl Broker {
    /// Starts the process, for a daemon with this configuration. To be called while there is one
    /// thread, which has the capability.
    pub(crate) fn start(source: &Source, config: &Config) -> Result<Self, StartError> {
        let failed = |e: io::Error| {
            let what = format!("cannot start the process that opens uplinks: {e}");
            error(what, "report this")
        };
        let (ours, theirs) = Channel::pair().map_err(failed)?;
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
        let end = ours.fd().try_clone_to_owned().map_err(failed)?;
        Ok(Self { channel: Mutex::new(ours), end })
    }

    /// Opens an uplink, and waits for it.
    ///
    /// # Errors
    /// As of [`TapPort::open`]; it is not one that it opens; it has ended.
    pub fn open(&self, uplink: &UplinkConfig) -> Result<TapPort, OpenError> {
        let file = self.ask(&to_open(uplink), &[]).and_then(|fd| fd.ok_or_else(gone));
        let no = |Refusal { what, fix, is_busy, is_final }| {
            let name = uplink.name.clone();
            OpenError { name, what, fix, is_busy, is_final }
        };
        file.map(|fd| TapPort::of(fd.into(), uplink)).map_err(no)
    }

    /// Puts an uplink back into its bridge.
    ///
    /// # Errors
    /// It is in some bridge; others as of [`Self::open`].
    pub fn join(&self, uplink: &UplinkConfig) -> io::Result<()> {
        let joined = self.ask(&to_join(uplink), &[]);
        joined.map(drop).map_err(|no| io::Error::other(no.what))
    }

    /// The sockets of an overlay get the buffers that they want.
    pub(crate) fn enlarge(&self, overlay: &OverlayPort) {
        let sockets: Vec<_> = overlay.sockets().collect();
        if let Err(Refusal { what, fix, .. }) = self.ask(&TO_ENLARGE, &sockets) {
            let port = &overlay.config().name;
            tracing::warn!(%port, "it has small buffers: {what}\n    fix: {fix}");
        }
    }

    /// It hangs up when the process has ended.
    pub(crate) fn end(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    fn ask(&self, request: &[u8], fds: &[BorrowedFd<'_>]) -> Answer {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        let said = channel.send(request, fds).and_then(|()| channel.hear());
        said.unwrap_or_else(|_| Err(gone()))
    }
}

fn gone() -> Refusal {
    Refusal {
        what: "the process that opens uplinks has ended".into(),
        fix: "restart nightporterd".into(),
        is_busy: false,
        is_final: true,
    }
}
