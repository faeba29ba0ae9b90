//! The sockets of all guests, each at a place of its own, and their timers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::id::{HostId, Side};
use super::message::Request;
use super::vsock_end::VsockEnd;
use crate::time::Instant;

/// A guest's virtual machine, by a number of the caller's choice.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct VmId(pub u32);

/// A socket (the VTOE paper's socket ID). A place is used again; its generation is not.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct SocketId {
    place: u32,
    generation: u64,
}

/// The opener of a connection to a guest: a guest of that host, by one of its addresses.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Opener {
    pub(super) vm: VmId,
    pub(super) host: HostId,
    pub(super) ip: IpAddr,
}

/// A socket of a guest.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) vm: VmId,
    /// The host of the other end.
    pub(super) host: HostId,
    pub(super) vsock: VsockEnd,
    /// Source and destination.
    pub(super) request: Request,
    /// The address by which the opener is counted, whichever it connected from.
    opener: IpAddr,
    /// The guest's kernel has it, as far as the host knows.
    pub(super) is_listed: bool,
    /// Whether it is in the queue of sockets to poll.
    pub(super) is_ready: bool,
    /// Whether it is in its guest's queue of sockets with packets.
    pub(super) has_packet: bool,
    /// Time at which its timers are checked, not later than they are due.
    timer: Option<Instant>,
    /// Its guest has closed it, and it still has data to deliver.
    is_orphan: bool,
}

impl Socket {
    pub(super) const fn new(
        vm: VmId,
        host: HostId,
        vsock: VsockEnd,
        request: Request,
        opener: IpAddr,
    ) -> Self {
        Self {
            vm,
            host,
            vsock,
            request,
            opener,
            is_listed: true,
            is_ready: false,
            has_packet: false,
            timer: None,
            is_orphan: false,
        }
    }

    /// Its guest has closed it, and it still has data to deliver.
    pub(super) const fn is_orphan(&self) -> bool {
        self.is_orphan
    }

    /// `None`: its own guest has opened it.
    fn opener(&self) -> Option<Opener> {
        let is_called = self.vsock.end().side() == Side::Acceptor;
        let opener = Opener { vm: self.vm, host: self.host, ip: self.opener };
        is_called.then_some(opener)
    }
}

/// All sockets.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    places: Vec<(u64, Option<Socket>)>,
    free: Vec<u32>,
    /// Sockets of each guest.
    counts: BTreeMap<VmId, usize>,
    /// Sockets of each opener, also those that the guest's kernel has dropped.
    opened: BTreeMap<Opener, usize>,
    timers: BTreeSet<(Instant, SocketId)>,
    /// Orphans of each guest.
    orphans: BTreeSet<(VmId, SocketId)>,
}

impl Sockets {
    pub(super) fn insert(&mut self, socket: Socket) -> SocketId {
        *self.counts.entry(socket.vm).or_default() += 1;
        if let Some(opener) = socket.opener() {
            *self.opened.entry(opener).or_default() += 1;
        }
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            u32::try_from(self.places.len() - 1).expect("sockets are bounded per guest")
        });
        let (generation, there) = &mut self.places[place as usize];
        *generation += 1;
        *there = Some(socket);
        SocketId { place, generation: *generation }
    }

    pub(super) fn get(&self, id: SocketId) -> Option<&Socket> {
        let (generation, socket) = self.places.get(id.place as usize)?;
        socket.as_ref().filter(|_| *generation == id.generation)
    }

    pub(super) fn get_mut(&mut self, id: SocketId) -> Option<&mut Socket> {
        let (generation, socket) = self.places.get_mut(id.place as usize)?;
        socket.as_mut().filter(|_| *generation == id.generation)
    }

    pub(super) fn remove(&mut self, id: SocketId) -> Option<Socket> {
        let timer = self.get(id)?.timer;
        if let Some(at) = timer {
            self.timers.remove(&(at, id));
        }
        self.free.push(id.place);
        let socket = self.places[id.place as usize].1.take()?;
        if socket.is_orphan {
            self.orphans.remove(&(socket.vm, id));
        }
        let count = self.counts.get_mut(&socket.vm).expect("it was counted");
        *count -= 1;
        if *count == 0 {
            self.counts.remove(&socket.vm);
        }
        if let Some(opener) = socket.opener() {
            self.forget_opened(opener);
        }
        Some(socket)
    }

    /// The guest's kernel has dropped a socket; returns whether it had it.
    pub(super) fn unlist(&mut self, id: SocketId) -> bool {
        let Some(socket) = self.get_mut(id) else { return false };
        std::mem::replace(&mut socket.is_listed, false)
    }

    /// An opener's connection is gone.
    fn forget_opened(&mut self, opener: Opener) {
        let count = self.opened.get_mut(&opener).expect("it was counted");
        *count -= 1;
        if *count == 0 {
            self.opened.remove(&opener);
        }
    }

    /// Places of a guest that an opener's connections have.
    pub(super) fn opened_by(&self, opener: Opener) -> usize {
        self.opened.get(&opener).copied().unwrap_or(0)
    }

    /// Lists a closed socket that still has data to deliver.
    pub(super) fn list_orphan(&mut self, id: SocketId) {
        let Some(socket) = self.get_mut(id) else { return };
        socket.is_orphan = true;
        let vm = socket.vm;
        self.orphans.insert((vm, id));
    }

    /// All closed sockets of a guest.
    pub(super) fn orphans_of(&self, vm: VmId) -> Vec<SocketId> {
        let (first, last) = (
            SocketId { place: 0, generation: 0 },
            SocketId { place: u32::MAX, generation: u64::MAX },
        );
        self.orphans.range((vm, first)..=(vm, last)).map(|(_, id)| *id).collect()
    }

    /// Sockets of a guest, also those that its kernel has dropped.
    pub(super) fn count(&self, vm: VmId) -> usize {
        self.counts.get(&vm).copied().unwrap_or(0)
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Sets a socket's timer if it is earlier than the one that is set. A timer that has become
    /// later stays: it fires too early once, instead of being moved with every packet.
    pub(super) fn set_timer(&mut self, id: SocketId) {
        let Some(socket) = self.get_mut(id) else { return };
        let due = socket.vsock.poll_timeout();
        let before = socket.timer;
        if let Some(at) = due
            && before.is_none_or(|before| at < before)
        {
            socket.timer = due;
            if let Some(before) = before {
                self.timers.remove(&(before, id));
            }
            self.timers.insert((at, id));
        }
    }

    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// A socket whose timers are to be checked.
    pub(super) fn pop_timer(&mut self, now: Instant) -> Option<SocketId> {
        let (at, id) = *self.timers.first()?;
        if at > now {
            return None;
        }
        self.timers.pop_first();
        if let Some(socket) = self.get_mut(id) {
            socket.timer = None;
        }
        Some(id)
    }
}
