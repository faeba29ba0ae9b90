//! The connection of a port outlives this process: the supervisor keeps it for the next daemon
//! (docs/design/upgrade.md).

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tracing::{info, warn};

use super::VhostUserPort;
use crate::closer::{self, Owner};
use crate::supervisor::Supervisor;
use crate::vhost::device::Device;
use crate::vhost::locker::Locker;
use crate::vhost::session::record::{self, Record, RecordError};

/// Where the connection is kept.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    /// `None`: nobody keeps it.
    supervisor: Option<Arc<Supervisor>>,
    /// Since the first front-end.
    locker: Option<Locker>,
}

impl Keeping {
    /// There is no connection, or its state is about to change.
    pub(super) fn empty(&mut self, owner: &Owner) {
        let fds = self.locker.as_mut().map(Locker::empty).unwrap_or_default();
        if !fds.is_empty() {
            closer::later(Some(owner.clone()), fds); // one of them may be the last of its kind
        }
    }

    /// There is no port any more.
    pub(super) fn end(&mut self) {
        if let Some(locker) = self.locker.take() {
            drop(locker.discard()); // nothing, for the connection has ended
        }
    }
}

impl<D: Device> VhostUserPort<D> {
    /// The connections of its front-ends are kept for the next daemon from now on.
    pub(crate) fn keep_with(&mut self, supervisor: &Arc<Supervisor>) {
        self.keeping.supervisor = Some(Arc::clone(supervisor));
    }

    /// The next daemon would find the connection as it is now. It finds none in the middle of a
    /// message, nor one whose VM may migrate (`record`).
    pub(super) fn keep(&mut self) {
        let Some(supervisor) = &self.keeping.supervisor else { return };
        let Some((channel, session)) = &self.connection else { return };
        if channel.is_amid_message() || self.held.is_some() || session.logs() {
            return;
        }
        let locker = match self.keeping.locker.take() {
            Some(locker) => Ok(locker),
            None => Locker::new(supervisor, &self.name),
        };
        let kept = locker.map_err(RecordError::from).and_then(|mut locker| {
            let put = record::write(channel.fd(), self.access, session);
            let put = put.and_then(|(bytes, fds)| locker.put(&bytes, &fds));
            self.keeping.locker = Some(locker);
            put
        });
        if let Err(error) = kept
            && self.account.may_log()
        {
            warn!(port = self.name, %error, "the next daemon will not find the connection");
        }
    }

    /// Goes on with the connection that the last daemon has left, if it is all there. Otherwise the
    /// front-end sees its end, and connects again. Events follow.
    pub(crate) fn take_over(&mut self, mut locker: Locker) {
        let found = match locker.take() {
            Ok(found) => {
                self.keeping.locker = Some(locker);
                let Some((bytes, fds)) = found else { return }; // in the middle of a message
                record::read(&bytes, fds, self.access, &self.account.owner)
            }
            Err(error) => {
                drop(locker.discard()); // nothing: it is no locker
                Err(error.into())
            }
        };
        if let Err(error) = found.and_then(|record| self.go_on_with(record)) {
            warn!(port = self.name, %error, "the front-end has to connect again");
        }
    }

    fn go_on_with(&mut self, record: Record) -> Result<(), RecordError> {
        let (connection, _) = record.connection.into_inner();
        self.connect(UnixStream::from(connection))?;
        for message in record.messages {
            let Some((_, session)) = &mut self.connection else { break };
            let name = message.name();
            if let Err(refusal) = session.handle(message) {
                self.disconnect(&format!("after a restart {name} is refused: {refusal}"));
                return Ok(());
            }
            self.events.extend(std::iter::from_fn(|| session.poll_event()));
        }
        if let Some((_, session)) = &mut self.connection {
            let _ = session.take_work();
            session.notify_all();
            // It is the guest that the last daemon had, wherever its rings stand.
            if session.began_at() != [0; 2] {
                self.stopped_at = session.began_at();
            }
        }
        info!(port = self.name, peer = self.vmm, "the front-end is still connected");
        self.keep();
        Ok(())
    }
}
