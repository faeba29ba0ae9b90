//! A session as messages that set it up again, for the next daemon.
//!
//! A record is the session's state as a front-end would set it up: the next daemon obeys these
//! messages as it obeys any, with all checks. So it needs no second way to start a ring, and what
//! it does not offer any more is refused. Values are in the host's byte order, as in messages.
//!
//! Of a session that marks the pages it writes there is no record: a daemon that is killed between
//! a write and its mark would leave the VMM with memory that is not the VM's.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use vhost::vhost_user::message::{
    FrontendReq as Req, VhostUserVringAddr, VhostUserVringAddrFlags, VhostUserVringState,
};
use vm_memory::ByteValued;

use super::{Session, VRING_NO_FD};
use crate::closer::{Foreign, Owner};
use crate::owners::Access;
use crate::vhost::device::Device;
use crate::vhost::protocol::{Message, PAYLOAD_MAX};
use crate::vhost::signals::Notifier;
use crate::vhost::vring::{Kick, Vring};

/// The first bytes of each record: whose it is, and its version.
const MAGIC: [u8; 8] = *b"npvhost\x01";
/// Descriptors of one UNIX message (`SCM_MAX_FD`, net/scm.h).
pub(crate) const FDS_MAX: usize = 253;
/// A record of 256 rings and 64 regions is shorter.
pub(crate) const LEN_MAX: usize = 64 << 10;

/// Why there is no record, or why one cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// See [`FDS_MAX`].
    #[error("it has passed {0} descriptors, of which {FDS_MAX} can be kept")]
    TooMany(usize),
    /// By another version, or no record at all.
    #[error("its record is of another version")]
    OtherVersion,
    /// Shorter than it says, or with another number of descriptors.
    #[error("its record is damaged")]
    Damaged,
    /// Others may connect to its socket than when it did.
    #[error("the socket is another owner's than when it connected")]
    OtherOwner,
    /// The system's.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// A record that is being written.
struct Writer<'a> {
    bytes: Vec<u8>,
    fds: Vec<BorrowedFd<'a>>,
}

impl<'a> Writer<'a> {
    fn say(&mut self, request: Req, payload: &[u8], fd: Option<BorrowedFd<'a>>) {
        let len = u32::try_from(payload.len()).expect("payloads are small");
        for word in [u32::from(request), len, u32::from(fd.is_some())] {
            self.bytes.extend(word.to_ne_bytes());
        }
        self.bytes.extend(payload);
        self.fds.extend(fd);
    }

    fn say_number(&mut self, request: Req, number: u64) {
        self.say(request, &number.to_ne_bytes(), None);
    }
}

/// The record of a session at this connection, to a socket that is open to these.
pub(crate) fn write<'a, D: Device>(
    connection: BorrowedFd<'a>,
    access: Access,
    session: &'a Session<D>,
) -> Result<(Vec<u8>, Vec<BorrowedFd<'a>>), RecordError> {
    let bytes = [&MAGIC[..], &bytes_of(access)].concat();
    let mut to = Writer { bytes, fds: vec![connection] };
    to.say_number(Req::SET_PROTOCOL_FEATURES, session.protocol.bits());
    if let Some(features) = session.features {
        to.say_number(Req::SET_FEATURES, features);
    }
    for (region, file) in session.memory.regions_and_files() {
        to.say(Req::ADD_MEM_REG, region.as_slice(), Some(file));
    }
    if let Some((spec, file)) = session.inflight.as_ref().and_then(|log| log.spec_and_file()) {
        to.say(Req::SET_INFLIGHT_FD, spec.as_slice(), Some(file));
    }
    // It may want marks there with its next message.
    if let Some((spec, file)) = session.log.as_ref().and_then(|log| log.spec_and_file()) {
        to.say(Req::SET_LOG_BASE, spec.as_slice(), Some(file));
    }
    if let Some(channel) = &session.backend_req {
        to.say(Req::SET_BACKEND_REQ_FD, &[], Some(channel.as_fd()));
    }
    if let Some(mtu) = session.mtu() {
        to.say_number(Req::NET_SET_MTU, mtu.into());
    }
    if session.status != 0 {
        to.say_number(Req::SET_STATUS, session.status.into());
    }
    for (index, vring) in (0..).zip(&session.vrings) {
        write_vring(&mut to, index, vring);
    }
    let Writer { bytes, fds } = to;
    if fds.len() > FDS_MAX { Err(RecordError::TooMany(fds.len())) } else { Ok((bytes, fds)) }
}

/// The descriptor for kicks comes last: with it the ring starts.
fn write_vring<'a, Q>(to: &mut Writer<'a>, index: u32, vring: &'a Vring<Q>) {
    let state = |num: u32| VhostUserVringState::new(index, num);
    let number = u64::from(index);
    if vring.size > 0 {
        to.say(Req::SET_VRING_NUM, state(vring.size.into()).as_slice(), None);
    }
    to.say(Req::SET_VRING_BASE, state(vring.base.into()).as_slice(), None);
    to.say(Req::SET_VRING_ENABLE, state(vring.enabled.into()).as_slice(), None);
    if let Some(at) = vring.addrs {
        let flags = VhostUserVringAddrFlags::empty();
        let addr = VhostUserVringAddr::new(index, flags, at.desc, at.used, at.avail, 0);
        to.say(Req::SET_VRING_ADDR, addr.as_slice(), None);
    }
    for (request, notifier) in
        [(Req::SET_VRING_CALL, &vring.call), (Req::SET_VRING_ERR, &vring.err)]
    {
        if let Some(notifier) = notifier {
            to.say(request, &number.to_ne_bytes(), Some(notifier.fd()));
        }
    }
    match &vring.kick {
        Kick::None => {}
        Kick::Polled => to.say_number(Req::SET_VRING_KICK, number | VRING_NO_FD),
        Kick::Fd(kick) => to.say(Req::SET_VRING_KICK, &number.to_ne_bytes(), Some(kick.fd())),
    }
}

impl<D: Device> Session<D> {
    /// Signals all drivers: the daemon that has set their rings going may have been killed before
    /// it did.
    pub(crate) fn notify_all(&self) {
        let running = self.vrings.iter().filter(|vring| vring.queue.is_some());
        running.filter_map(|vring| vring.call.as_ref()).for_each(Notifier::notify);
    }
}

/// A record as it was found.
#[derive(Debug)]
pub(crate) struct Record {
    /// The connection.
    pub(crate) connection: Foreign,
    /// Set up as it was, a session has obeyed these.
    pub(crate) messages: Vec<Message>,
}

/// The users who may connect, as a record has them.
fn bytes_of(access: Access) -> [u8; 12] {
    let words = [access.mode, access.uid, access.gid].map(|word| word.unwrap_or(u32::MAX));
    std::array::from_fn(|at| words[at / 4].to_ne_bytes()[at % 4])
}

/// Reads a record of a front-end of `owner`, whose socket is open to these. The process that wrote
/// it may have been of another version, so no length is believed.
pub(crate) fn read(
    bytes: &[u8],
    fds: Vec<OwnedFd>,
    access: Access,
    owner: &Owner,
) -> Result<Record, RecordError> {
    // From here on they are closed where that blocks nobody.
    let mut fds = fds.into_iter().map(|fd| Foreign::of(owner, fd)).collect::<Vec<_>>().into_iter();
    let bytes = bytes.strip_prefix(&MAGIC).ok_or(RecordError::OtherVersion)?;
    let mut bytes = bytes.strip_prefix(&bytes_of(access)).ok_or(RecordError::OtherOwner)?;
    let connection = fds.next().ok_or(RecordError::Damaged)?;
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let (words, rest) = bytes.split_at_checked(12).ok_or(RecordError::Damaged)?;
        let (words, _) = words.as_chunks();
        let [code, len, fd] = [0, 1, 2].map(|at| u32::from_ne_bytes(words[at]));
        let (payload, rest) = rest.split_at_checked(len as usize).ok_or(RecordError::Damaged)?;
        if payload.len() > PAYLOAD_MAX || fd > 1 {
            return Err(RecordError::Damaged);
        }
        let its = fds.by_ref().take(fd as usize).collect();
        let message = Message { code, need_reply: false, payload: payload.to_vec(), fds: its };
        if message.fds.len() != fd as usize {
            return Err(RecordError::Damaged);
        }
        messages.push(message);
        bytes = rest;
    }
    if fds.next().is_some() {
        Err(RecordError::Damaged)
    } else {
        Ok(Record { connection, messages })
    }
}
