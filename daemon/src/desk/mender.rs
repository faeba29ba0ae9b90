//! Tries again to open uplinks and overlays that could not be opened, or have gone, and to get
//! large buffers for overlays; puts uplinks back into bridges from which they were taken. It tries
//! at once when an interface changes, and then once a second. An uplink is put back into its bridge
//! less often, so that two programs that both put it somewhere do not fight all the time. To keep
//! an uplink out of its bridge, an operator removes `bridge` from the configuration.

use std::collections::BTreeMap;
use std::io;

use nightporter_core::time::{Duration, Instant};
use nix::sys::epoll::Epoll;

use super::Desk;
use crate::closer;
use crate::opener::{Done, Opener, Task};
use crate::port::Port;
use crate::token::{Token, watch_for};
use crate::worker::data_path::DataPath;

/// Between two tries.
const RETRY: Duration = Duration::from_secs(1);
/// Between the times that an uplink is put back into its bridge.
const JOIN_INTERVAL: Duration = Duration::from_secs(10);

/// See the module doc.
#[derive(Debug, Default)]
pub(super) struct Mender {
    /// `None`: nothing is tried.
    opener: Option<Opener>,
    /// It has something to do.
    is_busy: bool,
    /// Ports that were tried lately, and when they may be tried again.
    not_before: BTreeMap<String, Instant>,
    /// When to look again.
    due: Option<Instant>,
}

impl Mender {
    /// When to [`Desk::mend`].
    pub(super) const fn poll_timeout(&self) -> Option<Instant> {
        self.due
    }
}

impl Desk {
    /// Missing uplinks and overlays are tried again from now on.
    pub(crate) fn set_opener(&mut self, epoll: &Epoll, opener: Opener) -> io::Result<()> {
        watch_for(epoll, &opener.fd(), Token::Opener)?;
        self.mender.opener = Some(opener);
        Ok(())
    }

    /// Begins to try missing uplinks and overlays that may be tried by now.
    pub(super) fn mend(&mut self, now: Instant, path: &DataPath) {
        let Mender { opener, is_busy, not_before, due } = &mut self.mender;
        let Some(opener) = opener.as_ref().filter(|_| !*is_busy) else { return };
        *due = None;
        not_before.retain(|_, at| *at > now);
        let mut tasks = Vec::new();
        for (_, at) in path.ports.iter() {
            let task = match &at.port {
                Port::Lost(lost) => Task::Open(lost.wanted.clone()),
                Port::Uplink(tap) => {
                    let links = self.links.as_ref();
                    if !links.is_some_and(|links| links.is_outside(tap.config(), tap.index())) {
                        continue;
                    }
                    Task::Join(tap.config().clone())
                }
                Port::Overlay(overlay) if overlay.has_small_buffers => {
                    Task::Enlarge(at.name.clone(), overlay.sockets())
                }
                Port::Overlay(_) | Port::Guest(_) | Port::Vacant => continue,
            };
            match not_before.get(&at.name) {
                Some(later) => *due = Some(due.unwrap_or(Instant::MAX).min(*later)),
                None => {
                    not_before.insert(at.name.clone(), now + RETRY);
                    tasks.push(task);
                }
            }
        }
        if !tasks.is_empty() {
            *is_busy = true;
            *due = None; // when they are done
            opener.begin(tasks);
        }
    }

    /// Missing uplinks and overlays were tried.
    pub(super) fn handle_opened(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        let Some(all) = self.mender.opener.as_ref().and_then(Opener::poll) else { return };
        self.mender.is_busy = false;
        if let Some(links) = &mut self.links {
            links.read(); // what that has changed
        }
        for done in all {
            match done {
                Done::Opened(wanted, result) => {
                    // It may have been removed or changed meanwhile.
                    let is_it = |port: &Port| match port {
                        Port::Lost(lost) => lost.wanted == wanted,
                        _ => false,
                    };
                    let id = path.ports.find(wanted.name());
                    let id = id.filter(|id| is_it(&path.ports.of(*id).port));
                    match (id, result) {
                        (Some(id), Ok(port)) => path.regain(now, epoll, id, *port),
                        (None, Ok(port)) => closer::later(None, port),
                        (Some(id), Err(failure)) => {
                            if let Port::Lost(lost) = &mut path.ports.of_mut(id).port {
                                lost.why = failure.what;
                            }
                        }
                        (None, Err(_)) => {}
                    }
                }
                Done::Enlarged(name, sockets, small) => {
                    // Another overlay may have its name meanwhile.
                    if let Some(id) = path.ports.find(&name)
                        && let Port::Overlay(overlay) = &mut path.ports.of_mut(id).port
                        && sockets.are_of(overlay)
                    {
                        overlay.has_small_buffers = small;
                    }
                }
                Done::Joined(config, Ok(())) => {
                    let (bridge, ifname) = (config.bridge.unwrap_or_default(), config.ifname);
                    tracing::warn!(uplink = %config.name, "{ifname} was put back into {bridge}");
                    self.mender.not_before.insert(config.name, now + JOIN_INTERVAL);
                }
                Done::Joined(config, Err(error)) => {
                    tracing::debug!(uplink = %config.name, %error, "not put into its bridge");
                }
            }
        }
        self.judge_uplinks(path);
        self.mend(now, path);
    }
}
