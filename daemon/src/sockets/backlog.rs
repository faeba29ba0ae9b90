//! Payload that is not in its receiver's ring yet: in order for each socket, and counted for who
//! sent it.
//!
//! *Bulk* is what rings had no buffers for: a packet's worth of a socket and more. A peer that has
//! sent too much of it is not read until half of it has gone. *Held* is less than that of a socket:
//! it waits for more of its stream, because its socket has no room for the cost of many small
//! packets ([`Host::takes`]), and harms nobody.
//!
//! [`Host::takes`]: nightporter_core::toe::host::Host::takes

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};

use nightporter_core::limits::{
    TOE_KEPT_ALL_MAX, TOE_KEPT_MAX, TOE_PACKET_FULL, TOE_PARTIAL_ALL_MAX, TOE_PARTIAL_MAX,
};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::toe::id::{ShadowId, Side};
use nightporter_core::toe::sockets::SocketId;

/// Bytes of different packets that are joined.
const PART_MAX: usize = 4096;

/// The owner of the bytes: devices by their places.
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
    /// And when the first byte of each came.
    parts: VecDeque<(Instant, Vec<u8>)>,
    /// Bytes of the first part that the guest has.
    given: usize,
    /// Bytes that it does not have.
    len: usize,
}

/// See the module's doc.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    bulk: usize,
    held: usize,
}

impl Sum {
    /// Of this sum, what a socket with so many bytes counts in.
    fn of(&mut self, len: usize) -> &mut usize {
        if is_bulk(len) { &mut self.bulk } else { &mut self.held }
    }

    fn count(&mut self, before: usize, now: usize) {
        *self.of(before) -= before;
        *self.of(now) += now;
    }
}

/// See the module's doc.
#[derive(Debug, Default)]
pub(super) struct KeptBytes {
    sockets: BTreeMap<SocketId, Waiting>,
    /// Sockets of each device that may take some.
    ready: BTreeMap<usize, BTreeSet<SocketId>>,
    by_sender: BTreeMap<usize, Sum>,
    all: Sum,
}

impl KeptBytes {
    /// Whether there is something for this socket.
    pub(super) fn has(&self, socket: SocketId) -> bool {
        !self.sockets.is_empty() && self.sockets.contains_key(&socket)
    }

    /// Whether there is nothing for anybody.
    pub(super) fn is_empty(&self) -> bool {
        self.sockets.is_empty()
    }

    /// Bytes for this socket.
    pub(super) fn len(&self, socket: SocketId) -> usize {
        self.sockets.get(&socket).map_or(0, |waiting| waiting.len)
    }

    /// Bytes that this device has sent.
    pub(super) fn of_sender(&self, from: usize) -> usize {
        self.by_sender.get(&from).map_or(0, |sum| sum.bulk + sum.held)
    }

    /// Whether no more is to be kept of what this device sends. The less place there is for all,
    /// the less each may have, so that there is always some for who has little. `stalls`: it is so
    /// already, and not over before half has gone.
    pub(super) fn is_full(&self, from: usize, stalls: bool) -> bool {
        let bulk = self.by_sender.get(&from).map_or(0, |sum| sum.bulk);
        let most = TOE_KEPT_MAX.min(TOE_KEPT_ALL_MAX.saturating_sub(self.all.bulk));
        bulk > if stalls { most / 2 } else { most }
    }

    /// Whether less than a packet of what this device sends may wait for more.
    pub(super) fn may_hold(&self, from: usize) -> bool {
        let held = self.by_sender.get(&from).map_or(0, |sum| sum.held);
        held < TOE_PARTIAL_MAX && self.all.held < TOE_PARTIAL_ALL_MAX
    }

    /// Whether there is something that may go to this device.
    pub(super) fn is_ready(&self, to: usize) -> bool {
        self.ready.contains_key(&to)
    }

    /// A socket of this device that may take some: the next behind `last`, the first behind the
    /// last.
    pub(super) fn after(&self, to: usize, last: Option<SocketId>) -> Option<SocketId> {
        let all = self.ready.get(&to)?;
        let behind = last.and_then(|last| all.range((Excluded(last), Unbounded)).next());
        behind.or_else(|| all.first()).copied()
    }

    /// It takes nothing now.
    pub(super) fn rest(&mut self, to: usize, socket: SocketId) {
        if let Some(all) = self.ready.get_mut(&to) {
            all.remove(&socket);
            if all.is_empty() {
                self.ready.remove(&to);
            }
        }
    }

    /// It may take some now; its device, if there is something for it.
    pub(super) fn try_again(&mut self, socket: SocketId) -> Option<usize> {
        let to = self.sockets.get(&socket)?.of.to;
        self.ready.entry(to).or_default().insert(socket);
        Some(to)
    }

    /// The owner of the bytes for this socket.
    pub(super) fn of(&self, socket: SocketId) -> Option<Kept> {
        Some(self.sockets.get(&socket)?.of)
    }

    /// The socket's next bytes, `len` bytes at most.
    pub(super) fn front(&self, socket: SocketId, len: usize) -> Vec<u8> {
        let Some(waiting) = self.sockets.get(&socket) else { return Vec::new() };
        let (mut front, mut skip) = (Vec::with_capacity(len), waiting.given);
        for (_, part) in &waiting.parts {
            let more = (len - front.len()).min(part.len() - skip);
            front.extend_from_slice(&part[skip..skip + more]);
            skip = 0;
            if front.len() == len {
                break;
            }
        }
        front
    }

    /// Connections that rings have had no buffers for, for so long, with bytes of this sender.
    /// `is_delayed`: whatever a device could take waits for its rate.
    pub(super) fn stuck(
        &self,
        from: usize,
        before: Instant,
        is_delayed: impl Fn(usize) -> bool,
    ) -> Vec<(ShadowId, Side)> {
        let is_old = |it: &Waiting| it.parts.front().is_some_and(|(since, _)| *since <= before);
        let may = |socket, to| self.ready.get(&to).is_some_and(|all| all.contains(socket));
        let all = self.sockets.iter();
        let old = all.filter(|(_, it)| it.of.from == from && is_bulk(it.len) && is_old(it));
        let stuck = old.filter(|(socket, it)| !(may(*socket, it.of.to) && is_delayed(it.of.to)));
        stuck.map(|(_, waiting)| waiting.of.name).collect()
    }

    /// For so long nobody was served, and so nobody can have taken anything.
    pub(super) fn forgive(&mut self, pause: Duration) {
        let parts = self.sockets.values_mut().flat_map(|waiting| &mut waiting.parts);
        parts.for_each(|(since, _)| *since = *since + pause);
    }

    /// More for a socket.
    pub(super) fn add(&mut self, now: Instant, socket: SocketId, of: Kept, bytes: Vec<u8>) {
        let new = || Waiting { of, parts: VecDeque::new(), given: 0, len: 0 };
        let waiting = self.sockets.entry(socket).or_insert_with(new);
        let before = waiting.len;
        waiting.len += bytes.len();
        let len = waiting.len;
        match waiting.parts.back_mut() {
            // Many small ones become few packets.
            Some((_, last)) if last.len() + bytes.len() <= PART_MAX => last.extend(bytes),
            _ => waiting.parts.push_back((now, bytes)),
        }
        self.count(of.from, before, len);
        self.ready.entry(of.to).or_default().insert(socket);
    }

    /// The guest has so many bytes more of it.
    pub(super) fn taken(&mut self, socket: SocketId, len: usize) {
        let waiting = self.sockets.get_mut(&socket).expect("its front was given");
        waiting.given += len;
        while let Some((_, part)) = waiting.parts.front()
            && part.len() <= waiting.given
        {
            waiting.given -= part.len();
            waiting.parts.pop_front();
        }
        let (from, before) = (waiting.of.from, waiting.len);
        waiting.len -= len;
        let now = waiting.len;
        self.count(from, before, now);
        if now == 0 {
            self.forget(socket);
        }
    }

    /// The socket is no more.
    pub(super) fn forget(&mut self, socket: SocketId) {
        let Some(Waiting { of, len, .. }) = self.sockets.remove(&socket) else { return };
        self.rest(of.to, socket);
        self.count(of.from, len, 0);
    }

    /// A device is no more, or its driver.
    pub(super) fn forget_receiver(&mut self, to: usize) {
        let all = self.sockets.iter().filter(|(_, waiting)| waiting.of.to == to);
        let all: Vec<SocketId> = all.map(|(socket, _)| *socket).collect();
        all.into_iter().for_each(|socket| self.forget(socket));
    }

    /// Bytes that wait for the network count as bulk: so much of this device did, and does now.
    pub(super) fn charge(&mut self, from: usize, before: usize, now: usize) {
        let own = self.by_sender.entry(from).or_default();
        own.bulk = own.bulk - before + now;
        self.all.bulk = self.all.bulk - before + now;
        if own.bulk + own.held == 0 {
            self.by_sender.remove(&from);
        }
    }

    fn count(&mut self, from: usize, before: usize, now: usize) {
        let own = self.by_sender.entry(from).or_default();
        own.count(before, now);
        self.all.count(before, now);
        if own.bulk + own.held == 0 {
            self.by_sender.remove(&from);
        }
    }
}

fn is_bulk(len: usize) -> bool {
    len as u64 >= TOE_PACKET_FULL
}

#[cfg(test)]
mod tests {
    use super::*;
    use nightporter_core::toe::control::{self, Ask, Asked, Program};
    use nightporter_core::toe::guest::{GuestConfig, Policy, Route};
    use nightporter_core::toe::host::{Host, Output};
    use nightporter_core::toe::id::HostId;
    use nightporter_core::toe::message::Request;
    use nightporter_core::toe::sockets::VmId;
    use nightporter_core::wire::vsock::{HOST_CID, Header, Op, STREAM};

    const NOW: Instant = Instant::from_secs(1000);

    fn kept(from: usize) -> Kept {
        let id = ShadowId { incarnation: 1, serial: 1 };
        Kept { name: (id, Side::Acceptor), from, to: 1000 }
    }

    struct All;

    impl Policy for All {
        fn connect(&self, _: VmId, _: Program, _: &Request) -> Route {
            Route::To(HostId(1))
        }
    }

    /// Names of sockets.
    fn sockets(n: u32) -> Vec<SocketId> {
        let (mut host, vm) = (Host::new(1), VmId(0));
        let ips = vec!["10.0.0.1".parse().unwrap()];
        let config = GuestConfig { cid: 3, network: 0, ips };
        assert!(host.add_guest(vm, config, false).is_empty());
        let mut named = Vec::new();
        for guest in 0..n {
            let (from, to) = ("10.0.0.1:5".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
            let ask =
                Asked { tag: 0, ask: Ask::Connect { program: Program::NONE, guest, from, to } }
                    .emit();
            let says = |src_port, dst_port, op, len| Header {
                src_cid: 3,
                dst_cid: HOST_CID,
                src_port,
                dst_port,
                len,
                kind: STREAM,
                op: Some(op),
                flags: 0,
                buf_alloc: 65_536,
                fwd_cnt: 0,
            };
            let asker = n + guest;
            for header in [
                says(asker, control::PORT, Op::Request, 0),
                says(asker, control::PORT, Op::Data, 64),
                says(guest, control::SOCKETS, Op::Request, 0),
                says(asker, control::PORT, Op::Reset, 0),
            ] {
                let mut read = |out: &mut [u8]| {
                    out.copy_from_slice(&ask);
                    true
                };
                let _ = host.handle_packet(NOW, vm, &header, 64, &mut read, &All);
                while host.poll_packet(vm).is_some() {}
                while let Some(output) = host.poll_output(NOW) {
                    if let Output::Message(socket, ..) = output {
                        named.push(socket);
                    }
                }
            }
        }
        assert_eq!(named.len(), n as usize);
        named
    }

    #[test]
    fn all_together_is_bounded_and_who_has_little_finds_a_place() {
        let sockets = sockets(256);
        for senders in [1, 3, 10, 256] {
            let mut all = KeptBytes::default();
            let mut moved = true;
            while std::mem::take(&mut moved) {
                for (from, socket) in sockets.iter().enumerate().take(senders) {
                    if !all.is_full(from, false) {
                        all.add(NOW, *socket, kept(from), vec![0; 65_536]);
                        moved = true;
                    }
                }
            }
            let sum: usize = (0..senders).map(|from| all.of_sender(from)).sum();
            assert!(sum <= TOE_KEPT_ALL_MAX + senders * 65_536, "{sum} of {senders}");
            assert!(all.of_sender(0) <= TOE_KEPT_MAX + 65_536);
            let newcomer = senders + 1;
            assert!(!all.is_full(newcomer, false));
            let before = NOW - Duration::from_secs(1);
            assert_eq!(all.stuck(0, NOW, |_| false).len(), 1);
            assert!(all.stuck(0, before, |_| false).is_empty());
            assert!(all.stuck(0, NOW, |to| to == 1000).is_empty(), "its rate is waited for");
            all.rest(1000, sockets[0]);
            assert_eq!(all.stuck(0, NOW, |to| to == 1000).len(), 1, "it takes nothing");
            all.forget(sockets[0]);
            assert_eq!((all.of_sender(0), all.is_full(0, true)), (0, false));
        }
    }

    #[test]
    fn less_than_a_packet_stops_nobody_and_is_bounded() {
        let mut all = KeptBytes::default();
        let (part, mut n) = (usize::try_from(TOE_PACKET_FULL).unwrap() - 1, 0);
        let sockets = sockets(600);
        while all.may_hold(7) {
            all.add(NOW, sockets[n], kept(7), vec![0; part]);
            n += 1;
        }
        assert!(all.of_sender(7) < TOE_PARTIAL_MAX + part);
        assert!(!all.is_full(7, true) && all.stuck(7, NOW, |_| false).is_empty());
        // Two parts are one packet.
        all.add(NOW, sockets[0], kept(7), vec![1; 4096]);
        assert_eq!(all.front(sockets[0], part + 1)[part], 1);
        all.taken(sockets[0], part + 1);
        assert_eq!((all.len(sockets[0]), all.front(sockets[0], 9000).len()), (4095, 4095));
    }
}
