//! A place with the supervisor for one connection, from which the next daemon takes it.
//!
//! It is a pair of connected sockets, of which systemd has copies ([`Supervisor::keep`]). The
//! record of the connection ([`record`](super::session::record)) is one message that waits at one
//! end, with all descriptors; this daemon receives it only to put another one in its place. So a
//! record is there as a whole or not at all, whenever this process is killed, and a new record
//! concerns nobody but us and the kernel.
//!
//! While messages of the front-end are read, the locker is empty: the next daemon must not find a
//! state before a message that was taken from the connection.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use super::session::record::{FDS_MAX, LEN_MAX, RecordError};
use crate::closer;
use crate::supervisor::{Supervisor, take_stored};

/// Descriptors that the supervisor keeps for each VM.
pub(crate) const FDS: usize = 2;
/// The names of lockers in the supervisor's store begin so; the VM's follows.
const PREFIX: &str = "vm-";

/// A record, not yet understood.
pub(crate) type Parcel = (Vec<u8>, Vec<OwnedFd>);

/// See the module doc.
#[derive(Debug)]
pub(crate) struct Locker {
    supervisor: Arc<Supervisor>,
    vm: String,
    /// Where records are sent to.
    front: OwnedFd,
    /// Where they wait.
    back: OwnedFd,
    is_empty: bool,
}

impl Locker {
    /// An empty one for this VM. Errors: the supervisor does not take it.
    pub(crate) fn new(supervisor: &Arc<Supervisor>, vm: &str) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (front, back) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        supervisor.keep(&format!("{PREFIX}{vm}"), &[front.as_fd(), back.as_fd()])?;
        let (supervisor, vm) = (Arc::clone(supervisor), vm.to_owned());
        Ok(Self { supervisor, vm, front, back, is_empty: true })
    }

    /// Those that the supervisor has kept for us. Others' descriptors are of another version: they
    /// are kept no longer.
    pub(crate) fn all_of(supervisor: &Arc<Supervisor>) -> Vec<Self> {
        let mut stored = take_stored();
        let mut lockers = Vec::new();
        while let Some((name, ends)) = stored.pop_first() {
            let vm = name.strip_prefix(PREFIX).map(str::to_owned);
            match (vm, <[OwnedFd; 2]>::try_from(ends)) {
                (Some(vm), Ok([front, back])) => {
                    let supervisor = Arc::clone(supervisor);
                    lockers.push(Self { supervisor, vm, front, back, is_empty: false });
                }
                _ => {
                    tracing::warn!(name, "a descriptor of another version is not taken over");
                    supervisor.forget(&name);
                }
            }
        }
        lockers
    }

    /// The VM for which it is.
    pub(crate) fn vm(&self) -> &str {
        &self.vm
    }

    /// Takes the record out, if there is one. Of a locker that was kept either end may be the one
    /// where it waits. It may be short of descriptors for which there was no room. Errors: the
    /// system's.
    pub(crate) fn take(&mut self) -> io::Result<Option<Parcel>> {
        if std::mem::replace(&mut self.is_empty, true) {
            return Ok(None);
        }
        let mut found = None;
        for _ in 0..2 {
            while let Some(later) = receive(&self.back)? {
                found = Some(later);
            }
            if found.is_some() {
                break;
            }
            std::mem::swap(&mut self.front, &mut self.back);
        }
        Ok(found)
    }

    /// The record is outdated; its descriptors.
    pub(crate) fn empty(&mut self) -> Vec<OwnedFd> {
        let found = self.take().ok().flatten(); // errors: there is nothing
        found.map_or_else(Vec::new, |(_, fds)| fds)
    }

    /// Puts a record in; there is none. Errors: the system's; then there is none still.
    pub(crate) fn put(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), RecordError> {
        assert!(self.is_empty, "two records");
        if bytes.len() > LEN_MAX {
            return Err(RecordError::Damaged);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "room for all");
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.front, &[IoSlice::new(bytes)], &mut control, flags)
            .map_err(io::Error::from)?;
        self.is_empty = false;
        Ok(())
    }

    /// The VM is no more: the supervisor keeps it no longer. Returns what was in it.
    pub(crate) fn discard(mut self) -> Vec<OwnedFd> {
        self.supervisor.forget(&format!("{PREFIX}{}", self.vm));
        self.empty()
    }
}

/// There is no daemon to take what is kept: VMMs see the end of their connections, as they would
/// wait for answers until one starts.
pub fn let_go() {
    for end in take_stored().into_values().flatten() {
        while let Ok(Some((_, fds))) = receive(&end) {
            closer::later(None, fds);
        }
    }
}

/// The first message that waits there. Errors: the system's; the other end is not kept.
fn receive(end: &OwnedFd) -> io::Result<Option<Parcel>> {
    let mut bytes = vec![0; LEN_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = match recvmsg(end, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
        Err(rustix::io::Errno::AGAIN) => return Ok(None),
        got => got?,
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if got.bytes == 0 && fds.is_empty() {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    bytes.truncate(got.bytes);
    Ok(Some((bytes, fds)))
}
