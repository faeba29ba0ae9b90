//! Payload between hosts by UCX (`fabric = "ucx"` in `[toe]`), beside the streams of TCP.
//!
//! # Rules
//!
//! 1. A stream of TCP stays behind each connection: it proves who the other host is, says all but
//!    payload, and its end is the connection's end. So whatever UCX does not tell of, TCP and the
//!    core do.
//! 2. Each host says in its hello where its worker is and a key that it has drawn for this stream
//!    ([`Introduction`]). A message shows that key, and so comes from who was told it in a stream
//!    that is proven.
//! 3. Messages may overtake each other and what is said in the stream: the core asks for no order
//!    (`Verdict::Hold`).
//! 4. Nothing waits: there is a descriptor for the worker's epoll, and [`Worker::arm`] before it
//!    sleeps.
//! 5. Payload is copied out of guest memory and into it, so UCX never has memory of a guest: what a
//!    VMM takes away, or a driver takes back, is not UCX's. A long message that has come stays in
//!    UCX's memory until then ([`Payload::Held`]); a short one is copied once more.
//!
//! - `ucp` is UCX itself; without the feature it is `absent`, of which there is none.
//! - `channel` is what a stream has of it.

#[cfg(not(feature = "ucx"))]
mod absent;
mod channel;
#[cfg(feature = "ucx")]
#[allow(unsafe_code)]
mod ucp;

use std::collections::BTreeMap;

use nightporter_core::toe::id::HostId;
#[cfg(feature = "ucx")]
use nightporter_core::toe::message::DATA_MAX;
use nightporter_core::toe::message::LEN;

#[cfg(not(feature = "ucx"))]
use absent::Held;
#[cfg(not(feature = "ucx"))]
pub(crate) use absent::Worker;
pub(super) use channel::{Channel, Next, Piece};
#[cfg(feature = "ucx")]
use ucp::Held;
#[cfg(feature = "ucx")]
pub(crate) use ucp::Worker;

/// Bytes of a worker's address, at most: those of a host with eight adapters have some hundred.
pub(super) const ADDRESS_MAX: usize = 4096;
/// Bytes of a stream's key.
const SECRET_LEN: usize = 32;
/// A stream's tag at the host that has said it, its key, and a message of the core.
const HEAD_LEN: usize = 8 + SECRET_LEN + LEN;
#[cfg(feature = "ucx")]
const PAYLOAD_MAX: usize = DATA_MAX as usize;
/// A message that is so long may stay in UCX's memory. A shorter one is copied: UCX's buffer for it
/// may be much larger, of 8 KiB on most adapters, and may be one that the adapter receives into.
const HELD_MIN: usize = 16 << 10;
/// Workers of another host at once: one, and those before it if its daemon was started anew.
const ENDS_OF_A_HOST: usize = 4;
/// Times that UCX is let do something in a turn.
const STEPS_PER_TURN: usize = 64;

/// Names an endpoint until it is closed.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct EndId(usize);

/// UCX's words.
#[derive(Debug)]
#[cfg_attr(not(feature = "ucx"), allow(dead_code))]
pub(super) enum Event {
    /// A message has come.
    Arrived(Head, Payload),
    /// So many bytes that were sent for this stream are on their way, or lost with their endpoint.
    Sent(u64, usize),
    /// The other host has gone.
    Failed(EndId),
}

/// Payload of a message that has come.
#[derive(Debug)]
#[cfg_attr(not(feature = "ucx"), allow(dead_code))]
pub(super) enum Payload {
    /// A copy.
    Own(Vec<u8>),
    /// In UCX's memory, which is UCX's again when this is dropped.
    Held(Held),
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Held(held) => held.bytes(),
        }
    }
}

/// The header before payload.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Head {
    /// Of the stream, at the host that it goes to.
    pub(super) tag: u64,
    pub(super) key: [u8; SECRET_LEN],
    /// Of the core, in its bytes.
    pub(super) message: [u8; LEN],
}

impl Head {
    fn emit(&self) -> [u8; HEAD_LEN] {
        let mut bytes = [0; HEAD_LEN];
        bytes[..8].copy_from_slice(&self.tag.to_le_bytes());
        bytes[8..8 + SECRET_LEN].copy_from_slice(&self.key);
        bytes[8 + SECRET_LEN..].copy_from_slice(&self.message);
        bytes
    }

    #[cfg_attr(not(feature = "ucx"), allow(dead_code))]
    fn parse(bytes: &[u8; HEAD_LEN]) -> Self {
        let part = |at: usize| &bytes[at..];
        Self {
            tag: u64::from_le_bytes(*part(0).first_chunk().expect("it is longer")),
            key: *part(8).first_chunk().expect("it is longer"),
            message: *part(8 + SECRET_LEN).first_chunk().expect("it is as long"),
        }
    }
}

/// Where a host is to send the payload of a stream to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Introduction {
    tag: u64,
    key: [u8; SECRET_LEN],
    address: Vec<u8>,
}

impl Introduction {
    /// Its bytes: how many follow (16 bits), tag, key, address.
    pub(super) fn emit(&self) -> Vec<u8> {
        let len = 8 + SECRET_LEN + self.address.len();
        let len = u16::try_from(len).expect("addresses are shorter");
        let head = [&len.to_le_bytes()[..], &self.tag.to_le_bytes(), &self.key].concat();
        [head, self.address.clone()].concat()
    }

    /// The part behind the first two bytes. `None`: no host says so.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (tag, rest) = bytes.split_first_chunk()?;
        let (key, address) = rest.split_first_chunk()?;
        let fits = (1..=ADDRESS_MAX).contains(&address.len());
        let tag = u64::from_le_bytes(*tag);
        fits.then(|| Self { tag, key: *key, address: address.to_vec() })
    }
}

/// This host's worker, and its endpoints.
#[derive(Debug)]
pub(super) struct Ucx {
    worker: Worker,
    /// By host and address: the endpoint, and how many streams use it.
    ends: BTreeMap<(HostId, Vec<u8>), (EndId, usize)>,
    /// There may be something to do without an event.
    is_ready: bool,
}

impl Ucx {
    pub(super) const fn new(worker: Worker) -> Self {
        Self { worker, ends: BTreeMap::new(), is_ready: true }
    }

    /// Readable when there is something to do.
    pub(super) fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.worker.fd()
    }

    /// Whether there is something to do that no event tells of.
    pub(super) const fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Endpoints that there are.
    pub(super) fn ends(&self) -> u64 {
        self.ends.len() as u64
    }

    /// This host's words about itself for a stream.
    ///
    /// # Errors
    /// The system has no chance to give.
    pub(super) fn introduce(&self, tag: u64) -> std::io::Result<Introduction> {
        let mut key = [0; SECRET_LEN];
        let mut got = 0;
        while got < SECRET_LEN {
            got += rustix::rand::getrandom(&mut key[got..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Introduction { tag, key, address: self.worker.address().to_vec() })
    }

    /// The other host has said where it is. `None`: payload goes there by the stream.
    pub(super) fn meet(&mut self, host: HostId, said: &Introduction) -> Option<EndId> {
        let name = (host, said.address.clone());
        if let Some((end, users)) = self.ends.get_mut(&name) {
            *users += 1;
            return Some(*end);
        }
        let of_host = (host, Vec::new())..(HostId(host.0.saturating_add(1)), Vec::new());
        if self.ends.range(of_host).count() >= ENDS_OF_A_HOST {
            return None;
        }
        match self.worker.connect(&said.address) {
            Ok(end) => {
                self.ends.insert(name, (end, 1));
                Some(end)
            }
            Err(error) => {
                tracing::warn!(?host, %error, "toe: UCX has no way to a host; TCP is used");
                None
            }
        }
    }

    /// A stream does not use it any more.
    pub(super) fn leave(&mut self, end: EndId) {
        let Some((_, users)) = self.ends.values_mut().find(|(it, _)| *it == end) else { return };
        *users -= 1;
        if *users == 0 {
            self.close(end);
        }
    }

    /// It is of no use any more.
    pub(super) fn close(&mut self, end: EndId) {
        self.ends.retain(|_, (it, _)| *it != end);
        self.worker.close(end);
    }

    /// Lets UCX do its work.
    pub(super) fn progress(&mut self) {
        for _ in 0..STEPS_PER_TURN {
            if !self.worker.progress() {
                return;
            }
        }
    }

    /// Its words.
    #[must_use]
    pub(super) fn poll_event(&mut self) -> Option<Event> {
        self.worker.poll_event()
    }

    /// A turn ends: the descriptor tells from now on, or there is more to do.
    pub(super) fn arm(&mut self) {
        self.is_ready = !self.worker.arm();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_says_of_itself_reads_back_and_nothing_else_does() {
        let said = Introduction { tag: 7 << 32 | 9, key: [5; SECRET_LEN], address: vec![1, 2, 3] };
        let bytes = said.emit();
        assert_eq!(usize::from(u16::from_le_bytes([bytes[0], bytes[1]])), bytes.len() - 2);
        assert_eq!(Introduction::parse(&bytes[2..]), Some(said));
        assert_eq!(Introduction::parse(&bytes[2..bytes.len() - 3]), None, "without an address");
        let long = [&bytes[2..], &[0; ADDRESS_MAX]].concat();
        assert_eq!(Introduction::parse(&long), None);
        let head = Head { tag: 3, key: [4; SECRET_LEN], message: [6; LEN] };
        assert_eq!(Head::parse(&head.emit()), head);
    }
}
