//! The way to guests of other hosts: what the core says and guests send goes into streams, and what
//! comes out of them goes to the core and into rings.
//!
//! # Rules
//!
//! 1. Payload is never copied here: it is written to a stream from its guest's memory, and read
//!    from a stream into its guest's memory. The exceptions are what a stream does not take at
//!    once, which is kept and counted as what rings have no room for, and encrypted streams.
//! 2. A message is read only when it has a place: if a ring has no buffers, or its socket has no
//!    room, payload stays in the kernel, and with it what is behind it in that stream.
//! 3. A stream that ends, fails or says what no honest host says is lost, and its connection with
//!    it: `ECONNRESET`, never a clean end. Only what has not been answered yet goes by guest TCP.
//! 4. A stream has one connection at a time, and speaks of no other.

use nightporter_api::FabricStatus;
use nightporter_core::engine::Direction;
use nightporter_core::time::Instant;
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::id::{HostId, Side};
use nightporter_core::toe::inbound::Verdict;
use nightporter_core::toe::message::{Kind, Message, Request};
use nightporter_core::toe::sockets::{SocketId, VmId};
use nightporter_core::toe::vsock::Ports;
use nightporter_core::wire::vsock::Header;
use nightporter_registry::{Mac, Station};
use nix::sys::epoll::Epoll;
use std::io::{self, ErrorKind};
use std::os::fd::BorrowedFd;

use super::device::Blocked;
use super::fabric::{Doors, Gone, Heard, Lost, Stream, StreamId, Waits};
use super::rules::Overlays;
use super::{Toe, len_of, vm};

/// Bytes of a stream that are read in a turn, about, and messages.
const BYTES_PER_STREAM: usize = 256 << 10;
const MESSAGES_PER_STREAM: usize = 64;
/// Streams that are served in a turn, and bytes of all of them, about. A message counts for some
/// bytes, and a request for many: it is looked at from all sides.
const STREAMS_PER_TURN: usize = 64;
const BYTES_PER_TURN: usize = 2 << 20;
const BYTES_OF_A_MESSAGE: usize = 1 << 10;
const BYTES_OF_A_REQUEST: usize = 64 << 10;
/// And a stream that is lost for what it may have cost before.
const BYTES_OF_A_LOSS: usize = 256 << 10;

/// The outcome of payload.
enum Filled {
    /// So much of it is with the guest.
    Some(usize),
    /// Nothing more for now.
    None,
    /// The stream is lost.
    Lost,
}

impl Toe {
    /// There is a way to other hosts from now on.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open_doors(&mut self, doors: Doors) -> io::Result<()> {
        self.streams.open_doors(doors)?;
        self.rules.is_open = self.streams.is_open();
        if self.streams.has_ucx() {
            self.begin_to_limit_arrivals();
        }
        if let Some(trust) = self.streams.trust_mut() {
            self.rules.peers.hosts().for_each(|host| trust.set_peer(host, true));
        }
        Ok(())
    }

    /// Sockets that listen for other hosts.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.streams.listeners()
    }

    /// Readable when a connection to another host has begun.
    pub(crate) fn dialer_fd(&self) -> Option<BorrowedFd<'_>> {
        self.streams.dialer_fd()
    }

    /// Readable when encrypted streams may have begun.
    pub(crate) fn trust_fd(&self) -> Option<BorrowedFd<'_>> {
        self.streams.trust_fd()
    }

    /// An operator's view of the way to other hosts, if there is one.
    pub(crate) fn fabric_status(&self) -> Option<FabricStatus> {
        self.streams.status()
    }

    /// Other overlays. Connections of VMs that are in another network by that end.
    pub(crate) fn set_overlays(&mut self, now: Instant, overlays: Overlays) {
        for VmId(at) in self.rules.set_overlays(overlays) {
            self.host.end_closed(VmId(at));
            self.lose_guest(now, at as usize);
            let port = u16::try_from(at).expect("a port's number");
            self.look_at_link(now, nightporter_core::port::PortId(port));
        }
        self.end_turn(now);
    }

    /// A station of another host, as it is now. Connections of one that is not there any more end
    /// in the next turn: that host may not speak for it.
    pub(crate) fn set_station(&mut self, (vni, mac): (u32, Mac), now: Option<&Station>) {
        let Self { rules, streams, gone, .. } = self;
        let (touched, left) = rules.peers.set(vni, mac, now);
        gone.extend(left.into_iter().filter(|it| !streams.of_guest(it.host, it.guest).is_empty()));
        if let Some(trust) = streams.trust_mut() {
            for host in touched.into_iter().flatten() {
                trust.set_peer(host, rules.peers.host_at(host).is_some());
            }
        }
    }

    /// A host that is there again meanwhile has lost them all the same.
    pub(super) fn end_streams_of_gone(&mut self, now: Instant) {
        for Gone { host, guest } in std::mem::take(&mut self.gone) {
            for id in self.streams.of_guest(host, guest) {
                self.lose_stream(now, id);
            }
            self.hear(now);
        }
    }

    /// Encrypted streams may have begun.
    pub(crate) fn hear_trust(&mut self, now: Instant, epoll: &Epoll) {
        let not_begun = self.streams.hear_openings(now, epoll, &self.rules.peers);
        self.rules.is_open = self.streams.is_open();
        for id in not_begun {
            self.lose_stream(now, id);
        }
        self.hear(now);
        self.end_turn(now);
    }

    /// Somebody has connected.
    ///
    /// # Errors
    /// There is no descriptor for another one.
    pub(crate) fn accept(&mut self, now: Instant, epoll: &Epoll, listener: u16) -> io::Result<()> {
        self.streams.accept(now, epoll, listener, &self.rules.peers)
    }

    /// Connections have begun. `false`: nobody makes any more.
    pub(crate) fn take_dialed(&mut self, now: Instant, epoll: &Epoll) -> bool {
        let dialed = self.streams.take_dialed(now, epoll);
        let is_there = dialed.is_ok();
        let failed = dialed.unwrap_or_else(|_| self.streams.lose_dialer(epoll));
        self.rules.is_open = self.streams.is_open();
        for id in failed {
            self.lose_stream(now, id);
        }
        self.hear(now);
        self.end_turn(now);
        is_there
    }

    /// Something has happened to the stream with this place.
    pub(crate) fn wake_stream(&mut self, place: u32) {
        self.streams.wake_place(place);
    }

    /// The core has something to say to another host.
    pub(super) fn say(
        &mut self,
        now: Instant,
        (socket, host): (SocketId, HostId),
        message: &Message,
        request: &Request,
    ) {
        let is_request = matches!(message.kind, Kind::Request { .. });
        let id = match self.streams.of(socket) {
            None if is_request => self.open_stream(now, (socket, host), message, request),
            known => known,
        };
        let Some(id) = id else {
            if is_request {
                self.refuse(now, host, message);
            }
            return; // its connection is over, and both ends know
        };
        let Some(stream) = self.streams.get_mut(id) else { return };
        let said = stream.say(now, message, is_request.then_some(request));
        self.said(now, id, said);
    }

    /// An answer to what is for nobody, behind what is heard now. A stream that has a connection
    /// says none: an honest host asks there only for what it hears in that stream next, and what a
    /// host asks for and does not read would be kept and charged to the connection's guest.
    pub(super) fn answer(&mut self, now: Instant, message: &Message) {
        if let Some(id) = self.heard
            && let Some(stream) = self.streams.get_mut(id)
            && stream.carried.is_none()
        {
            let said = stream.say(now, message, None);
            self.said(now, id, said);
        }
    }

    /// Bytes that a stream has taken are counted; a stream that took none is lost.
    pub(super) fn said(&mut self, now: Instant, id: StreamId, said: Result<(), Lost>) {
        if said.is_err() || self.streams.is_overfull(id) {
            return self.lose_stream(now, id);
        }
        self.streams.flush_again(id);
        let Some(stream) = self.streams.get_mut(id) else { return };
        let waiting = stream.waiting();
        if let Some(carried) = stream.carried {
            let before = std::mem::replace(&mut stream.charged, waiting);
            self.kept.charge(carried.device, before, waiting);
        }
        self.recycle(now, id);
    }

    /// A way for a new connection.
    fn open_stream(
        &mut self,
        now: Instant,
        (socket, host): (SocketId, HostId),
        message: &Message,
        request: &Request,
    ) -> Option<StreamId> {
        let from = self.rules.own_address(request.network)?;
        let to = (host, self.rules.peers.address_of(host)?);
        let VmId(at) = self.host.vm_of(socket)?;
        let id = self.streams.take(now, (at as usize, from), to)?;
        let guest = (request.network, request.to.ip());
        self.streams.give(id, message.id, (socket, at as usize), guest);
        self.show_first_room(now, socket, at as usize);
        self.promise(now, id);
        Some(id)
    }

    /// It is not said: guest TCP may find a way.
    fn refuse(&mut self, now: Instant, host: HostId, message: &Message) {
        let kind = Kind::Reset(Errno::NotByToe);
        let refusal = Message { id: message.id, to: Side::Opener, kind };
        let _ = self.host.handle_message(now, host, &refusal);
    }

    /// A connection that is over at both ends leaves its stream to the next.
    fn recycle(&mut self, now: Instant, id: StreamId) {
        if self.streams.get(id).is_some_and(Stream::is_over) {
            self.give_back(now, id);
        }
    }

    fn give_back(&mut self, now: Instant, id: StreamId) {
        self.uncharge(id);
        if !self.streams.give_back(now, id) {
            self.retire(now, id);
        }
    }

    fn retire(&mut self, now: Instant, id: StreamId) {
        self.uncharge(id);
        if self.streams.retire(now, id) {
            self.lose_stream(now, id);
        }
    }

    /// Bytes that wait in it are nobody's any more, and for nobody.
    fn uncharge(&mut self, id: StreamId) {
        self.forget_promise(id);
        let Some(stream) = self.streams.get_mut(id) else { return };
        let before = std::mem::take(&mut stream.charged);
        if let Some(carried) = stream.carried {
            self.kept.charge(carried.device, before, 0);
            if stream.waits == Some(Waits::Ring)
                && let Some(device) = self.devices[carried.device].as_mut()
            {
                device.streams.retain(|waiting| *waiting != id);
            }
        }
    }

    /// The core has forgotten a socket.
    pub(super) fn let_go(&mut self, now: Instant, socket: SocketId) {
        let Some(id) = self.streams.of(socket) else { return };
        if self.streams.get(id).is_some_and(Stream::is_settled) {
            self.give_back(now, id);
        } else {
            self.retire(now, id);
        }
    }

    /// A stream is no more, and neither is its connection.
    pub(super) fn lose_stream(&mut self, now: Instant, id: StreamId) {
        self.uncharge(id);
        let Some(stream) = self.streams.remove(id) else { return };
        let Some(carried) = stream.carried else { return };
        if stream.ours == Side::Opener && !stream.is_proven && !stream.has_failed_here {
            self.rules.peers.note_away(now, stream.host);
            self.streams.note_unproven(now, &stream, self.rules.peers.address_of(stream.host));
        }
        self.streams.stats.lost += 1;
        if stream.ours == Side::Opener {
            // If nobody has answered yet, the host is not there, or has just let go of an idle
            // stream, and guest TCP is to try. Else this is a reset for the core, as a loss is.
            let kind = Kind::Reset(Errno::NotByToe);
            let message = Message { id: carried.name, to: Side::Opener, kind };
            let _ = self.host.handle_message(now, stream.host, &message);
        } else {
            self.host.handle_loss(now, carried.socket);
        }
    }

    /// Streams that have waited long enough.
    pub(super) fn look_at_old_streams(&mut self, now: Instant) {
        self.rules.peers.forgive(now);
        if self.streams.poll_timeout().is_none_or(|at| at > now) {
            return;
        }
        while let Some(id) = self.streams.pop_due(now) {
            // One that has reached its host stays as long as its connection, if nothing is owed.
            let stays = |it: &Stream| it.is_proven && it.carried.is_some() && !it.is_owed();
            if !self.streams.get(id).is_some_and(stays) {
                self.lose_stream(now, id);
            }
        }
        self.hear(now);
    }

    /// A guest has said something about this socket: it may have room now.
    pub(super) fn look_for_room(&mut self, at: usize, header: &Header) {
        if self.kept.is_empty() && !self.streams.was_opened() {
            return;
        }
        let ports = Ports { guest: header.src_port, host: header.dst_port };
        let Some(socket) = self.host.socket_at(vm(at), ports) else { return };
        self.kept.try_again(socket);
        let Some(id) = self.streams.of(socket) else { return };
        if let Some(stream) = self.streams.get_mut(id)
            && stream.waits == Some(Waits::Credit)
        {
            stream.waits = None;
            self.streams.wake(id);
        }
    }

    /// Streams with payload that this device had no buffers for.
    pub(super) fn wake_waiting(&mut self, now: Instant, at: usize) {
        let Some(device) = self.devices[at].as_ref() else { return };
        if device.blocked.is_some()
            || device.streams.is_empty()
            || self.is_limited(now, at, Direction::ToGuest)
        {
            return;
        }
        let Some(device) = self.devices[at].as_mut() else { return };
        let many = device.streams.len().min(STREAMS_PER_TURN);
        for id in device.streams.drain(..many) {
            if let Some(stream) = self.streams.get_mut(id) {
                stream.waits = None;
                self.streams.wake(id);
            }
        }
        if !device.streams.is_empty() {
            device.blocked = Some(Blocked::Turn);
        }
    }

    /// Streams that have something, in turn.
    pub(super) fn serve_streams(&mut self, now: Instant) {
        let mut bytes = 0;
        for _ in 0..self.streams.ready().min(STREAMS_PER_TURN) {
            let Some(id) = self.streams.pop_ready() else { return };
            bytes += self.serve_stream(now, id);
            if bytes >= BYTES_PER_TURN {
                return;
            }
        }
    }

    /// How many bytes it moved, or as many as it cost to find few in many records.
    fn serve_stream(&mut self, now: Instant, id: StreamId) -> usize {
        let Some(stream) = self.streams.get_mut(id) else { return 0 };
        stream.begin_turn();
        let before = stream.waiting();
        let said = stream.flush(now);
        let written = before.saturating_sub(stream.waiting());
        self.said(now, id, said);
        if written > 0 {
            self.show_room(now, id);
        }
        self.hear(now);
        self.heard = Some(id);
        let (read, is_more) = self.read_stream(now, id);
        if is_more {
            self.streams.wake(id);
        }
        self.streams.note_owed(now, id);
        self.streams.flush_again(id); // an answer to hello
        self.heard = None;
        let cost = self.streams.get(id).map_or(BYTES_OF_A_LOSS, Stream::cost);
        written + read.max(cost)
    }

    /// How many bytes of payload there were, and whether there may be more at once.
    fn read_stream(&mut self, now: Instant, id: StreamId) -> (usize, bool) {
        let (mut messages, mut bytes) = (0, 0);
        while messages < MESSAGES_PER_STREAM && bytes < BYTES_PER_STREAM {
            let Some(stream) = self.streams.get_mut(id) else { break };
            if stream.closes {
                if stream.waiting() == 0 {
                    self.lose_stream(now, id);
                }
                return (bytes, false);
            }
            if stream.waits.is_some() {
                return (bytes, false);
            }
            messages += 1;
            bytes += BYTES_OF_A_MESSAGE;
            match self.streams.poll(id) {
                Heard::Nothing => return (bytes, false),
                // By now it is known whether payload comes by UCX.
                Heard::Hello => self.promise(now, id),
                Heard::Introduced => self.streams.meet_worker(id),
                Heard::Message(message) => self.handle_message(now, id, &message),
                Heard::Held(message) => self.handle_held(now, id, &message),
                Heard::Request(message, request) => {
                    bytes += BYTES_OF_A_REQUEST;
                    self.handle_request(now, id, &message, &request);
                }
                Heard::Payload(left) => match self.fill(now, id, left) {
                    Filled::Some(filled) => {
                        bytes += filled;
                        self.promise(now, id);
                    }
                    Filled::None => return (bytes, false),
                    Filled::Lost => self.lose_stream(now, id),
                },
                Heard::Lost => self.lose_stream(now, id),
                Heard::Nonsense => self.confuse(now, id),
            }
            self.hear(now);
            self.recycle(now, id);
        }
        (bytes, true)
    }

    /// Another host says what no honest one does.
    pub(super) fn confuse(&mut self, now: Instant, id: StreamId) {
        let host = self.streams.get(id).and_then(|it| self.rules.peers.address_of(it.host));
        tracing::debug!(?host, "a host says what none does");
        self.streams.stats.nonsense += 1;
        self.lose_stream(now, id);
    }

    fn handle_message(&mut self, now: Instant, id: StreamId, message: &Message) {
        let Some(stream) = self.streams.get(id) else { return };
        let host = stream.host;
        let is_its = stream.carried.is_some_and(|it| it.name == message.id);
        // A late message is for nobody, and has no payload; another stream's connection is not its.
        let is_data = matches!(message.kind, Kind::Data { .. });
        let is_late = !is_data && self.host.socket(host, message.id, message.to).is_none();
        if !is_its && !is_late {
            return self.confuse(now, id);
        }
        self.rules.peers.note_reached(host);
        self.note_refusal(now, host, message);
        let met = self.host.handle_message(now, host, message);
        self.hear(now);
        let goes_on = self.streams.get(id).is_some_and(|stream| !stream.closes);
        let is_held = met.verdict == Verdict::Hold && self.streams.hold(id);
        if is_data && met.verdict != Verdict::Deliver && goes_on && !is_held {
            self.confuse(now, id); // a stream has its order
        }
    }

    /// A message that has overtaken others is next.
    fn handle_held(&mut self, now: Instant, id: StreamId, message: &Message) {
        let Some(host) = self.streams.get(id).map(|stream| stream.host) else { return };
        match self.host.handle_held(now, host, message).verdict {
            Verdict::Deliver => {}
            Verdict::Hold | Verdict::Done => self.streams.drop_payload(id),
        }
        self.hear(now);
    }

    fn handle_request(&mut self, now: Instant, id: StreamId, message: &Message, request: &Request) {
        let Some(stream) = self.streams.get(id) else { return };
        let host = stream.host;
        if stream.carried.is_some() {
            return self.confuse(now, id);
        }
        if !self.rules.may_come(host, request) {
            let kind = Kind::Reset(Errno::NotByToe);
            self.answer(now, &Message { id: message.id, to: Side::Opener, kind });
            self.streams.give_back(now, id);
            return;
        }
        let before = self.host.socket(host, message.id, Side::Acceptor);
        let opener = self.rules.opener(host, request);
        self.host.handle_request(now, host, message, request, opener);
        let socket = self.host.socket(host, message.id, Side::Acceptor);
        if let Some(socket) = socket.filter(|_| before.is_none())
            && let Some(VmId(at)) = self.host.vm_of(socket)
        {
            let guest = (request.network, request.from.ip());
            self.streams.give(id, message.id, (socket, at as usize), guest);
            self.show_first_room(now, socket, at as usize);
            self.promise(now, id);
        } else {
            self.streams.give_back(now, id);
        }
    }

    /// A stream waits until its guest may be sent more.
    fn park(&mut self, id: StreamId, at: usize) -> Filled {
        let (Some(stream), Some(device)) = (self.streams.get_mut(id), self.devices[at].as_mut())
        else {
            return Filled::Lost;
        };
        stream.waits = Some(Waits::Ring);
        device.streams.push_back(id);
        Filled::None
    }

    /// Payload of a stream goes into its guest's ring.
    fn fill(&mut self, now: Instant, id: StreamId, left: u32) -> Filled {
        let carried = self.streams.get(id).and_then(|stream| stream.carried);
        let Some(carried) = carried else { return Filled::Lost };
        if self.is_limited(now, carried.device, Direction::ToGuest) {
            return self.park(id, carried.device);
        }
        // Behind what it is to hear before: until then it has no room either.
        let has_place = self.give_packets(carried.device);
        let Self { host, devices, streams, .. } = self;
        let Some(stream) = streams.get_mut(id) else { return Filled::Lost };
        let Some(device) = devices.get_mut(carried.device).and_then(Option::as_mut) else {
            return Filled::Lost;
        };
        if has_place && host.room_to_guest(carried.socket) == 0 {
            stream.waits = Some(Waits::Credit);
            return Filled::None;
        }
        let credit = |packets| host.room_in(carried.socket, packets);
        let most = (left as usize).min(device.limits.most_at_once(now));
        let room = if has_place { device.rooms(most, credit) } else { None };
        let Some(room) = room else {
            stream.waits = Some(Waits::Ring);
            device.streams.push_back(id);
            device.blocked = Some(Blocked::Ring);
            return Filled::None;
        };
        let filled = match streams.receive(id, &mut device.port, room) {
            Ok(filled) => filled,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Filled::None;
            }
            // Its memory is not there, or the stream has ended.
            Err(_) => return Filled::Lost,
        };
        let mut rest = filled;
        while rest > 0
            && let Some(room) = device.room(host.room_to_guest(carried.socket), rest)
            && let Some(header) = host.give(now, carried.socket, len_of(room))
        {
            device.give(now, &header);
            rest -= room;
        }
        // The message has its place: it was looked up before.
        if rest > 0 { Filled::Lost } else { Filled::Some(filled) }
    }
}
