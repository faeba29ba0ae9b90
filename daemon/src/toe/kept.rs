//! Payload that receivers' rings had no buffers for: in order for each socket, and counted for who
//! sent it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};

use nightporter_core::time::Instant;
use nightporter_core::toe::id::{ShadowId, Side};
use nightporter_core::toe::sockets::SocketId;

/// Bytes of different packets that are joined.
const PART_MAX: usize = 4096;

/// Whose bytes they are: devices by their places.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    /// The connection, and which of its ends they are for.
    pub(super) name: (ShadowId, Side),
    pub(super) from: usize,
    pub(super) to: usize,
}

#[derive(Debug)]
struct Waiting {
    of: Kept,
    parts: VecDeque<Vec<u8>>,
    /// Bytes of the first part that the guest has.
    given: usize,
    /// When it last got some, or began to wait.
    moved: Instant,
}

/// See the module's doc.
#[derive(Debug, Default)]
pub(super) struct KeptBytes {
    sockets: BTreeMap<SocketId, Waiting>,
    receivers: BTreeMap<usize, BTreeSet<SocketId>>,
    by_sender: BTreeMap<usize, usize>,
}

impl KeptBytes {
    /// Whether there is something for this socket.
    pub(super) fn has(&self, socket: SocketId) -> bool {
        !self.sockets.is_empty() && self.sockets.contains_key(&socket)
    }

    /// Bytes that this device has sent.
    pub(super) fn of_sender(&self, from: usize) -> usize {
        self.by_sender.get(&from).copied().unwrap_or(0)
    }

    /// Sockets of this device for which there is something.
    pub(super) fn sockets_of(&self, to: usize) -> usize {
        self.receivers.get(&to).map_or(0, BTreeSet::len)
    }

    /// One of them: the next behind `last`, the first behind the last.
    pub(super) fn after(&self, to: usize, last: Option<SocketId>) -> Option<SocketId> {
        let all = self.receivers.get(&to)?;
        let behind = last.and_then(|last| all.range((Excluded(last), Unbounded)).next());
        behind.or_else(|| all.first()).copied()
    }

    /// What the socket gets next.
    pub(super) fn front(&self, socket: SocketId) -> Option<&[u8]> {
        let waiting = self.sockets.get(&socket)?;
        Some(&waiting.parts.front()?[waiting.given..])
    }

    /// Connections that hold bytes of this sender, and have not moved since then.
    pub(super) fn stuck(&self, from: usize, since: Instant) -> Vec<(ShadowId, Side)> {
        let all = self.sockets.values();
        let stuck = all.filter(|waiting| waiting.of.from == from && waiting.moved <= since);
        stuck.map(|waiting| waiting.of.name).collect()
    }

    /// More for a socket.
    pub(super) fn add(&mut self, now: Instant, socket: SocketId, of: Kept, bytes: Vec<u8>) {
        *self.by_sender.entry(of.from).or_default() += bytes.len();
        self.receivers.entry(of.to).or_default().insert(socket);
        let new = || Waiting { of, parts: VecDeque::new(), given: 0, moved: now };
        let parts = &mut self.sockets.entry(socket).or_insert_with(new).parts;
        match parts.back_mut() {
            // Many small ones become few packets.
            Some(last) if last.len() + bytes.len() <= PART_MAX => last.extend(bytes),
            _ => parts.push_back(bytes),
        }
    }

    /// The guest has so many bytes more of it; who sent them.
    pub(super) fn taken(&mut self, now: Instant, socket: SocketId, len: usize) -> usize {
        let waiting = self.sockets.get_mut(&socket).expect("its front was given");
        (waiting.given, waiting.moved) = (waiting.given + len, now);
        let from = waiting.of.from;
        if waiting.parts.front().is_some_and(|part| part.len() == waiting.given) {
            waiting.parts.pop_front();
            waiting.given = 0;
        }
        let is_over = waiting.parts.is_empty();
        self.refund(from, len);
        if is_over {
            self.forget(socket);
        }
        from
    }

    /// The socket is no more; who had sent what was kept for it.
    pub(super) fn forget(&mut self, socket: SocketId) -> Option<usize> {
        let Waiting { of, parts, given, .. } = self.sockets.remove(&socket)?;
        if let Some(all) = self.receivers.get_mut(&of.to) {
            all.remove(&socket);
            if all.is_empty() {
                self.receivers.remove(&of.to);
            }
        }
        let len: usize = parts.iter().map(Vec::len).sum();
        self.refund(of.from, len - given);
        Some(of.from)
    }

    /// A device is no more, or its driver; who had sent what was kept for it.
    pub(super) fn forget_receiver(&mut self, to: usize) -> BTreeSet<usize> {
        let mut senders = BTreeSet::new();
        while let Some(socket) = self.after(to, None) {
            senders.extend(self.forget(socket));
        }
        senders
    }

    /// What waits for the network counts as well: so much of this device did, and does now.
    pub(super) fn charge(&mut self, from: usize, before: usize, now: usize) {
        if now > before {
            *self.by_sender.entry(from).or_default() += now - before;
        } else {
            self.refund(from, before - now);
        }
    }

    fn refund(&mut self, from: usize, len: usize) {
        if let Some(bytes) = self.by_sender.get_mut(&from) {
            *bytes -= len;
            if *bytes == 0 {
                self.by_sender.remove(&from);
            }
        }
    }
}
