//! The socket device of one guest.

use std::collections::VecDeque;

use nightporter_api::ToeStatus;
use nightporter_core::engine::Direction;
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nightporter_core::toe::control::LEN;
use nightporter_core::toe::guest::Packet;
use nightporter_core::toe::sockets::SocketId;
use nightporter_core::wire::vsock::Header;

use crate::port::vhost_user::VhostUserPort;
use crate::vhost::vsock::Vsock;

use super::fabric::StreamId;
use super::limits::Limits;
use super::shares::Shares;
use super::{Toe, vm};

/// Packets to a guest that are filled at once: more than the longest message takes of buffers of a
/// page.
const PACKETS_AT_ONCE: usize = 32;

/// Why something waits for a guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Blocked {
    /// Its ring has no buffers.
    Ring,
    /// It has had its share of this turn.
    Turn,
}

/// Counters since the device was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stats {
    /// Packets of the guest.
    pub(crate) packets_from_guest: u64,
    /// Packets that were put into its ring.
    pub(crate) packets_to_guest: u64,
    /// Bytes of other guests' streams in them.
    pub(crate) bytes_to_guest: u64,
}

/// See the module's doc.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) port: VhostUserPort<Vsock>,
    /// The core knows of the guest.
    pub(super) is_up: bool,
    /// It is to be served in the next turn.
    pub(super) is_awake: bool,
    /// Its rings were used in this turn.
    pub(super) is_touched: bool,
    /// It is in the list of those that are signalled later.
    pub(super) is_signalled_later: bool,
    /// Something waits for it that its sockets have room for.
    pub(super) blocked: Option<Blocked>,
    /// Streams of other hosts with payload that its ring had no buffers for, or its rate does not
    /// allow yet.
    pub(super) streams: VecDeque<StreamId>,
    /// How fast its sockets may send, and be sent to.
    pub(super) limits: Limits,
    /// The room that each of its sockets to other hosts is shown, and to guests with a limit.
    pub(super) shares: Shares,
    /// Of those for which bytes are kept, the one that had its turn.
    pub(super) served_last: Option<SocketId>,
    pub(super) stats: Stats,
}

impl Device {
    pub(super) fn new(port: VhostUserPort<Vsock>) -> Self {
        Self {
            port,
            is_up: false,
            is_awake: false,
            is_touched: false,
            is_signalled_later: false,
            blocked: None,
            streams: VecDeque::new(),
            limits: Limits::default(),
            shares: Shares::default(),
            served_last: None,
            stats: Stats::default(),
        }
    }

    /// Bytes of payload that the next packet to a socket with this room can have: at most `len`.
    /// `None`: there can be none now.
    pub(super) fn room(&mut self, credit: u64, len: usize) -> Option<usize> {
        let most = usize::try_from(credit).unwrap_or(usize::MAX).min(len);
        if most == 0 {
            return None;
        }
        let room = self.port.room_to_guest()?;
        if room == 0 {
            self.port.refuse_buffers(); // a header fits, and no payload ever would
            return None;
        }
        Some(room.min(most))
    }

    /// Bytes of payload that the next packets to a socket can have, filled one after the other: at
    /// most `len`, and in the first `n` of them what `credit` says. `None`: there can be none now.
    pub(super) fn rooms(&mut self, len: usize, credit: impl Fn(u64) -> u64) -> Option<usize> {
        self.room(credit(1), len)?;
        self.port.rooms_to_guest(len, PACKETS_AT_ONCE, credit)
    }

    /// Gives the guest a packet whose payload is written.
    pub(super) fn give(&mut self, now: Instant, header: &Header) {
        self.limits.charge(now, Direction::ToGuest, header.len as usize);
        self.stats.packets_to_guest += 1;
        self.stats.bytes_to_guest += u64::from(header.len);
        self.port.give_packet(header);
    }

    /// Whether the guest has a place for a packet without payload of others.
    pub(super) fn has_place(&mut self) -> bool {
        let room = self.port.room_to_guest();
        if room.is_some_and(|room| room < LEN) {
            self.port.refuse_buffers(); // drivers offer pages
            return false;
        }
        room.is_some()
    }

    /// Gives the guest such a packet, which it has a place for.
    pub(super) fn put(&mut self, (header, answer): &Packet) {
        if answer.is_none_or(|answer| self.port.write_payload(&answer)) {
            self.stats.packets_to_guest += 1;
            self.port.give_packet(header);
        }
    }

    /// Shows the guest what was taken and given. Whether there is more to do at once (else the
    /// worker is woken when there is), and whether it is to be signalled later what was taken.
    pub(super) fn flush(&mut self) -> (bool, bool) {
        let spent = self.port.has_spent_packets();
        let owes_signal = self.port.flush_packets();
        let waits = match self.blocked {
            Some(Blocked::Turn) => !self.limits.is_spent(Direction::ToGuest),
            Some(Blocked::Ring) if !spent => self.port.enable_room_kicks(),
            Some(Blocked::Ring) | None => {
                self.port.disable_room_kicks();
                false
            }
        };
        (spent || waits, owes_signal)
    }

    /// Its driver has gone.
    pub(super) fn forget(&mut self) {
        self.is_up = false;
        self.blocked = None;
        self.streams.clear();
        self.served_last = None;
    }
}

impl Toe {
    /// An operator's view of the device of the VM behind this port, if it has one.
    pub fn status(&self, port: PortId) -> Option<ToeStatus> {
        let at = usize::from(port.0);
        let device = self.devices.get(at)?.as_deref()?;
        let of_port = device.port.stats();
        Some(ToeStatus {
            listens: device.port.listens(),
            running: device.is_up,
            sockets: self.host.sockets_of(vm(at)) as u64,
            kept_bytes: self.kept.of_sender(at) as u64,
            packets_from_guest: device.stats.packets_from_guest,
            packets_to_guest: device.stats.packets_to_guest,
            bytes_to_guest: device.stats.bytes_to_guest,
            ring_faults: of_port.ring_faults,
            memory_faults: of_port.memory_faults,
            blocked: of_port.blocked,
        })
    }
}
