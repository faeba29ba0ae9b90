//! All sockets of all guests of a host: packets of guests, messages of other hosts.
//!
//! # Use
//!
//! After every `handle_*` and command, and after each [`Host::give`] and [`Host::poll_packet`]:
//! [`Host::poll_output`] until `None`, then [`Host::poll_timeout`].
//!
//! After [`Output::Packets`] the guest is given the packets of [`Host::poll_packet`] as long as its
//! ring has room, and when it has room again; then payload that is due, as [`Host::room_to_guest`]
//! allows. Output that is not taken remains state of a socket: so output that others cause for a
//! guest that takes nothing is bounded by its sockets, and never delays its own packets. Only
//! answers to its own packets are in a queue ([`Host::owes_answers`]).
//!
//! Messages for a guest of this host come back by [`Host::handle_request`] and
//! [`Host::handle_message`], with the [`HostId`] that they were for. Timers are handled after all
//! messages: after a standstill of the daemon the messages of ends that were not silent still wait.
//!
//! Payload stays with the caller: it follows a packet of the guest that is [`Handled::Carry`], and
//! after [`Verdict::Deliver`] it is given when there is room. One packet may have the payload of
//! many messages, and should: a guest has room for a limited number of packets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::control::{self, Answer, Ask, Asked, Code};
use super::errno::Errno;
use super::guest::{Control, FIRST_HOST_PORT, Guest, Left, Policy, Route, Wanted, addresses};
use super::id::{HostId, ShadowId, ShadowIds, Side};
use super::inbound::Verdict;
use super::message::{Kind, Message, Request};
use super::replays::{Name, Over, Requests};
use super::sockets::{Opener, Socket, SocketId, Sockets, VmId};
use super::state::State;
use super::vsock::{Meaning, Ports, for_nobody};
use super::vsock_end::VsockEnd;
use crate::limits::{TOE_CONTROLS_MAX, TOE_SOCKETS_MAX};
use crate::time::Instant;
use crate::wire::vsock::{HOST_CID, Header, Op, STREAM};

/// The effect of a guest's packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub enum Handled {
    /// Its payload, if it has any, is not wanted.
    Done,
    /// This message is for the other end, and as much of the payload as it says.
    Carry(SocketId, Message),
}

/// Output that is due.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Output {
    /// A message for the other end of a socket's connection, at this host. Behind a
    /// [`Kind::Request`] goes the request.
    Message(SocketId, HostId, Message, Request),
    /// An answer to a message of no connection, for the host that sent it.
    Return(HostId, Message),
    /// Packets are due to a guest: [`Host::poll_packet`]. Not repeated until it had none.
    Packets(VmId),
    /// A socket is gone: its [`SocketId`] is invalid, and payload that is due to it is dropped.
    Gone(SocketId),
    /// A process of a guest has begun to listen there, perhaps beside others.
    Listens(VmId, SocketAddr),
}

/// The effect of another host's message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub struct Met {
    /// The socket of the message, if there is one.
    pub socket: Option<SocketId>,
    /// The treatment of its payload.
    pub verdict: Verdict,
}

/// The table. See the module's doc.
#[derive(Debug)]
pub struct Host {
    ids: ShadowIds,
    guests: BTreeMap<VmId, Guest>,
    sockets: Sockets,
    /// Names with the host of the other end, whose messages alone are accepted.
    names: BTreeMap<Name, SocketId>,
    /// Guests by network and address.
    addresses: BTreeMap<(u32, IpAddr), VmId>,
    requests: Requests,
    over: Over,
    /// Sockets that may have output.
    ready: VecDeque<SocketId>,
    /// Guests with packets that the caller was not told of.
    ready_guests: VecDeque<VmId>,
    returns: VecDeque<(HostId, Message)>,
    /// Listeners that the caller was not told of, from the requests in one packet.
    listens: VecDeque<(VmId, SocketAddr)>,
    /// State of guests that have gone and may come back.
    left: BTreeMap<VmId, Left>,
    /// Sockets of guests that have gone, and some that these had closed, which are still to be
    /// reset; no list is empty.
    ending: VecDeque<(VmId, Vec<SocketId>)>,
    /// Ports of connections that the host makes.
    next_port: u32,
    /// Guests whose listeners have changed, and the number of changes.
    listener_changes: BTreeMap<VmId, u64>,
    /// First share of room of new sockets whose other end is not at this host.
    first_share: Option<(HostId, u64)>,
}

impl Host {
    /// A host without guests. `incarnation` is a random number that no other daemon has.
    #[must_use]
    pub fn new(incarnation: u64) -> Self {
        Self {
            ids: ShadowIds::new(incarnation),
            guests: BTreeMap::new(),
            sockets: Sockets::default(),
            names: BTreeMap::new(),
            addresses: BTreeMap::new(),
            requests: Requests::default(),
            over: Over::default(),
            ready: VecDeque::new(),
            ready_guests: VecDeque::new(),
            returns: VecDeque::new(),
            listens: VecDeque::new(),
            left: BTreeMap::new(),
            ending: VecDeque::new(),
            // A guest may still have connections of an earlier daemon.
            next_port: FIRST_HOST_PORT + u32::try_from(incarnation >> 33).expect("31 bits"),
            listener_changes: BTreeMap::new(),
            first_share: None,
        }
    }

    /// Sockets of all guests, also those whose guest has closed them.
    #[must_use]
    pub fn sockets(&self) -> usize {
        self.sockets.len()
    }

    /// Sockets of one guest.
    #[must_use]
    pub fn sockets_of(&self, vm: VmId) -> usize {
        self.sockets.count(vm)
    }

    /// The socket with this name, whose other end is at `host`.
    #[must_use]
    pub fn socket(&self, host: HostId, id: ShadowId, side: Side) -> Option<SocketId> {
        self.names.get(&(host, id, side)).copied()
    }

    /// Packets of a guest that no honest driver sends.
    #[must_use]
    pub fn lies(&self, vm: VmId) -> u64 {
        self.guests.get(&vm).map_or(0, |guest| guest.lies)
    }

    /// The guest of a socket.
    #[must_use]
    pub fn vm_of(&self, socket: SocketId) -> Option<VmId> {
        self.sockets.get(socket).map(|socket| socket.vm)
    }

    /// The host of a socket's other end.
    #[must_use]
    pub fn host_of(&self, socket: SocketId) -> Option<HostId> {
        self.sockets.get(socket).map(|socket| socket.host)
    }

    /// The guest of this host that asks for the connection with this name, and its request, as long
    /// as the other end at `host` has not answered.
    #[must_use]
    pub fn asking(&self, host: HostId, id: ShadowId) -> Option<(VmId, Request)> {
        let socket = self.sockets.get(self.socket(host, id, Side::Opener)?)?;
        let asks = socket.vsock.end().state() == State::Asking;
        asks.then_some((socket.vm, socket.request))
    }

    /// A guest's socket with these ports.
    #[must_use]
    pub fn socket_at(&self, vm: VmId, ports: Ports) -> Option<SocketId> {
        self.guests.get(&vm)?.ports.get(&ports).copied()
    }

    /// Ports at which processes of a guest listen, at any of its addresses; `None`: there is no
    /// guest.
    #[must_use]
    pub fn listening_ports(&self, vm: VmId) -> Option<BTreeSet<u16>> {
        Some(self.guests.get(&vm)?.listening_ports())
    }

    /// Bytes that may be given to a guest at this socket.
    #[must_use]
    pub fn room_to_guest(&self, socket: SocketId) -> u64 {
        let socket = self.sockets.get(socket).filter(|socket| self.has_guest(socket));
        socket.map_or(0, |socket| socket.vsock.room_to_guest())
    }

    /// Bytes that may be given in `packets` packets together.
    #[must_use]
    pub fn room_in(&self, socket: SocketId, packets: u64) -> u64 {
        let socket = self.sockets.get(socket).filter(|socket| self.has_guest(socket));
        socket.map_or(0, |socket| socket.vsock.room_in(packets))
    }

    /// Of `waiting` bytes for a guest at this socket, the number to give in a packet now: as
    /// [`Self::room_to_guest`], except that fewer than `TOE_PACKET_FULL` bytes wait for more if
    /// those are about to come and the guest has others to read.
    #[must_use]
    pub fn takes(&self, socket: SocketId, waiting: u64) -> u64 {
        let socket = self.sockets.get(socket).filter(|socket| self.has_guest(socket));
        socket.map_or(0, |socket| socket.vsock.takes(waiting))
    }

    /// A packet of a guest, with `payload` bytes behind its header; `read` copies the first of them
    /// and is called only if they are for the host itself.
    pub fn handle_packet(
        &mut self,
        now: Instant,
        vm: VmId,
        header: &Header,
        payload: usize,
        read: &mut dyn FnMut(&mut [u8]) -> bool,
        policy: &dyn Policy,
    ) -> Handled {
        let Some(guest) = self.guests.get_mut(&vm) else { return Handled::Done };
        let ports = Ports { guest: header.src_port, host: header.dst_port };
        if header.src_cid != guest.config.cid || header.dst_cid != HOST_CID {
            self.stray(vm, header);
            return Handled::Done;
        }
        if ports.host == control::PORT {
            self.handle_control(vm, header, payload, read, policy);
            return Handled::Done;
        }
        let known = guest.ports.get(&ports).copied();
        let is_to_hear = known.is_none() && guest.is_to_hear(ports, header.op);
        if header.op == Some(Op::Request) && header.kind == STREAM {
            // A socket that gave up connecting sends no packet; its port may have another socket
            // now.
            let stale = known
                .filter(|id| self.sockets.get(*id).is_some_and(|socket| socket.vsock.is_opening()));
            if known.is_none() || stale.is_some() {
                if let Some(id) = stale {
                    self.lose(now, id);
                }
                self.connect(now, vm, header);
                return Handled::Done;
            }
        }
        let Some(id) = known else {
            if !is_to_hear {
                self.stray(vm, header);
            }
            return Handled::Done;
        };
        let socket = self.sockets.get_mut(id).expect("listed sockets are there");
        let lied = socket.vsock.lie().is_some();
        let message = socket.vsock.handle_packet(now, header, payload);
        if !lied && socket.vsock.lie().is_some() {
            self.guests.get_mut(&vm).expect("asked before").lies += 1;
        }
        self.look_again(id);
        message.map_or(Handled::Done, |message| Handled::Carry(id, message))
    }

    /// A message of an end at host `from`, except a request. After [`Verdict::Hold`] it comes
    /// again, by [`Self::handle_held`].
    pub fn handle_message(&mut self, now: Instant, from: HostId, message: &Message) -> Met {
        let Some(id) = self.socket(from, message.id, message.to) else {
            // The connection may have been over, and the other end does not know yet.
            let was_over = self.over.contains(now, (from, message.id, message.to));
            self.returns.extend(message.for_nobody(was_over).map(|answer| (from, answer)));
            return Met { socket: None, verdict: Verdict::Done };
        };
        self.end_if_its_guest_has_gone(now, id);
        let socket = self.sockets.get_mut(id).expect("named sockets are there");
        let verdict = socket.vsock.handle_message(now, message.kind);
        self.look_again(id);
        Met { socket: Some(id), verdict }
    }

    /// A message that is held is presented again, after others for the same end.
    pub fn handle_held(&mut self, now: Instant, from: HostId, message: &Message) -> Met {
        let Some(id) = self.socket(from, message.id, message.to) else {
            return Met { socket: None, verdict: Verdict::Done };
        };
        self.end_if_its_guest_has_gone(now, id);
        let socket = self.sockets.get_mut(id).expect("named sockets are there");
        let verdict = socket.vsock.handle_held(now, message.kind);
        self.look_again(id);
        Met { socket: Some(id), verdict }
    }

    /// A guest at host `from` wants to connect to a guest of this host. The caller has checked its
    /// permission, and chooses the address by which the opener is counted.
    pub fn handle_request(
        &mut self,
        now: Instant,
        from: HostId,
        message: &Message,
        request: &Request,
        opener: IpAddr,
    ) {
        let Kind::Request { edge } = message.kind else { return };
        // A copy opens no connection, also after the first has ended.
        if message.to != Side::Acceptor || !self.requests.is_new(from, message.id) {
            return;
        }
        if let Err(errno) = self.offer(now, (from, message.id), edge, (request, opener)) {
            let kind = Kind::Reset(errno);
            self.returns.push_back((from, Message { id: message.id, to: Side::Opener, kind }));
        }
    }

    /// Handles the timers that are due.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(id) = self.sockets.pop_timer(now) {
            self.end_if_its_guest_has_gone(now, id);
            if let Some(socket) = self.sockets.get_mut(id) {
                socket.vsock.handle_timeout(now);
                self.look_again(id);
            }
        }
    }

    /// The fabric has lost the other end of a socket.
    pub fn handle_loss(&mut self, now: Instant, socket: SocketId) {
        self.end_if_its_guest_has_gone(now, socket);
        if let Some(it) = self.sockets.get_mut(socket) {
            it.vsock.handle_loss(now);
            self.look_again(socket);
        }
    }

    /// Limits the room shown to a guest at this socket to `share` bytes beyond those sent so far,
    /// until the next call, however much room the other guest has.
    pub fn limit_room(&mut self, now: Instant, socket: SocketId, share: u64) {
        if let Some(it) = self.sockets.get_mut(socket) {
            it.vsock.limit_room(now, share);
            self.look_again(socket);
        }
    }

    /// The header of the next `len` bytes for the guest's memory. There must be room.
    #[must_use]
    pub fn give(&mut self, now: Instant, socket: SocketId, len: u32) -> Option<Header> {
        let header = self.sockets.get_mut(socket)?.vsock.give(now, len);
        self.look_again(socket);
        Some(header)
    }

    /// Output that is due.
    #[must_use]
    pub fn poll_output(&mut self, now: Instant) -> Option<Output> {
        if let Some((host, message)) = self.returns.pop_front() {
            return Some(Output::Return(host, message));
        }
        if let Some((vm, at)) = self.listens.pop_front() {
            return Some(Output::Listens(vm, at));
        }
        if let Some(vm) = self.ready_guests.pop_front() {
            return Some(Output::Packets(vm));
        }
        while let Some(id) = self.ready.front().copied() {
            if let Some(output) = self.poll_socket(now, id) {
                return Some(output);
            }
            self.ready.pop_front();
            if let Some(socket) = self.sockets.get_mut(id) {
                socket.is_ready = false;
                self.sockets.set_timer(id);
            }
        }
        None
    }

    /// Time at which [`Self::handle_timeout`] is to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.sockets.next_timer()
    }

    fn poll_socket(&mut self, now: Instant, id: SocketId) -> Option<Output> {
        let socket = self.sockets.get_mut(id)?;
        if let Some(message) = socket.vsock.poll_message(now) {
            return Some(Output::Message(id, socket.host, message, socket.request));
        }
        let vm = socket.vm;
        if socket.is_listed && socket.vsock.is_closed() {
            self.unlist(id);
        }
        let socket = self.sockets.get_mut(id)?;
        if socket.vsock.has_packet()
            && let Some(guest) = self.guests.get_mut(&vm)
            && !std::mem::replace(&mut socket.has_packet, true)
        {
            guest.ready.push_back(id);
            self.look_at(vm);
        }
        if !self.sockets.get(id)?.vsock.is_spent() {
            return self.ready_guests.pop_front().map(Output::Packets);
        }
        let Socket { host, vsock, .. } = self.sockets.remove(id)?;
        let (end, errno) = (vsock.end(), vsock.end().errno());
        let name = (host, end.id(), end.side());
        if errno.is_none() {
            self.over.add(now, name);
        }
        self.names.remove(&name);
        Some(Output::Gone(id))
    }

    /// A guest's socket connects.
    fn connect(&mut self, now: Instant, vm: VmId, header: &Header) {
        let guest = self.guests.get_mut(&vm).expect("asked before");
        let is_toe = header.dst_port == control::SOCKETS;
        let wanted = is_toe.then(|| guest.take_wanted(header.src_port)).flatten();
        let Some(Wanted { host, request, .. }) = wanted else { return self.stray(vm, header) };
        let cid = guest.config.cid;
        if self.free_places(vm) == 0 {
            let ports = Ports { guest: header.src_port, host: header.dst_port };
            let guest = self.guests.get_mut(&vm).expect("it is there");
            guest.forget(ports, Code::Native, request);
            return self.stray(vm, header);
        }
        let vsock = VsockEnd::connect(now, cid, header, self.ids.name());
        self.insert(now, (vm, host), vsock, request, request.from.ip());
    }

    /// Offers a connection to a guest. An opener has at most as many places of the guest's table as
    /// are free for others, so that a newcomer finds one.
    fn offer(
        &mut self,
        now: Instant,
        (from, name): (HostId, ShadowId),
        edge: u64,
        (request, opener): (&Request, IpAddr),
    ) -> Result<(), Errno> {
        let there = self.addresses.get(&(request.network, request.to.ip()));
        let vm = *there.ok_or(Errno::NotByToe)?;
        let free = self.free_places(vm);
        let guest = self.guests.get_mut(&vm).expect("whose address it is");
        let port = guest.listener(request.to).ok_or(Errno::NotByToe)?;
        let opener = Opener { vm, host: from, ip: opener };
        if self.sockets.opened_by(opener) >= free {
            return Err(Errno::NotByToe);
        }
        let (cid, ports) = (guest.config.cid, guest.host_port(port, &mut self.next_port));
        let vsock = VsockEnd::offer(now, cid, ports, name, edge);
        self.insert(now, (vm, from), vsock, *request, opener.ip);
        Ok(())
    }

    /// Sockets that a guest may still have. A closed socket keeps its place until its two streams
    /// are delivered or its time is over: lack of places does not end it.
    fn free_places(&self, vm: VmId) -> usize {
        let resets = self.guests.get(&vm).map_or(0, Guest::resets);
        TOE_SOCKETS_MAX.saturating_sub(self.sockets.count(vm) + resets)
    }

    fn insert(
        &mut self,
        now: Instant,
        (vm, host): (VmId, HostId),
        mut vsock: VsockEnd,
        request: Request,
        opener: IpAddr,
    ) {
        if let Some((_, share)) = self.first_share.filter(|(here, _)| *here != host) {
            vsock.limit_arrivals(now, share);
        }
        let (ports, name) = (vsock.ports(), (host, vsock.end().id(), vsock.end().side()));
        let id = self.sockets.insert(Socket::new(vm, host, vsock, request, opener));
        self.names.insert(name, id);
        self.guests.get_mut(&vm).expect("its guest is there").list(ports, id);
        self.look_again(id);
    }

    /// A packet about a control connection.
    fn handle_control(
        &mut self,
        vm: VmId,
        header: &Header,
        payload: usize,
        read: &mut dyn FnMut(&mut [u8]) -> bool,
        policy: &dyn Policy,
    ) {
        let Some(guest) = self.guests.get_mut(&vm) else { return };
        let port = header.src_port;
        let asks = header.op == Some(Op::Request) && header.kind == STREAM;
        // The port of a connection that is over has a new connection now.
        let known = guest.controls.get_mut(&port);
        let Some(control) = known.filter(|it| !asks || !it.connection.is_closed()) else {
            let _ = guest.is_to_hear(Ports { guest: port, host: control::PORT }, header.op);
            guest.controls.remove(&port);
            if !asks || guest.controls.len() >= TOE_CONTROLS_MAX {
                return self.stray(vm, header);
            }
            guest.controls.insert(port, Control::new(guest.config.cid, header));
            return self.look_at_control(vm, port);
        };
        match control.connection.handle(header, payload) {
            Ok(Meaning::Data(len)) => {
                // Its window allows a few requests ahead.
                let mut bytes = vec![0; len as usize];
                // Taken out, so that `answer` can borrow the rest.
                let mut control = guest.controls.remove(&port).expect("it is there");
                let understood = read(&mut bytes)
                    && control.take(&bytes, |asked| self.answer(vm, port, asked, policy));
                if !understood {
                    control.connection.reset();
                }
                let guest = self.guests.get_mut(&vm).expect("it is there");
                guest.controls.insert(port, control);
            }
            // A connection that is over is removed when its guest has got the reset.
            Ok(_) => {}
            Err(_) => guest.lies += 1,
        }
        self.look_at_control(vm, port);
    }

    /// Answers a request of a guest's process.
    fn answer(&mut self, vm: VmId, port: u32, asked: Asked, policy: &dyn Policy) -> Answer {
        let guest = self.guests.get_mut(&vm).expect("its packet is here");
        if let Some(ports) = asked.ask.socket()
            && let Some(&id) = guest.ports.get(&ports)
            && let Some(socket) = self.sockets.get_mut(id)
        {
            match asked.ask {
                Ask::Linger(_) => socket.vsock.reset_on_close(true),
                Ask::Unlinger(_) => socket.vsock.reset_on_close(false),
                Ask::Deafen(_) => socket.vsock.end_reads(),
                _ => {}
            }
            let (code, state) = (Code::of(socket.vsock.end().errno()), socket.vsock.end().state());
            let addresses = Some(addresses(ports, &socket.request));
            self.look_again(id);
            return Answer { addresses, state: Some(state), ..Answer::of(asked, code) };
        }
        let wanted = guest.wanted();
        let full = self.free_places(vm) <= wanted;
        let guest = self.guests.get_mut(&vm).expect("it is there");
        let answer = guest.answer(port, asked, |program, request| {
            if full { Route::Native } else { policy.connect(vm, program, request) }
        });
        if let (Ask::Listen { at, .. }, Code::Done) = (asked.ask, answer.code) {
            self.listens.push_back((vm, at));
        }
        answer
    }

    /// Answers a packet of no connection.
    fn stray(&mut self, vm: VmId, header: &Header) {
        if let Some(guest) = self.guests.get_mut(&vm) {
            let cid = guest.config.cid;
            guest.answer_stray(for_nobody(cid, header));
            self.look_at(vm);
        }
    }

    /// The guest has lost a socket and gets no reset for it.
    fn lose(&mut self, now: Instant, id: SocketId) {
        let Some(socket) = self.sockets.get_mut(id) else { return };
        socket.vsock.handle_guest_loss(now);
        let (vm, ports) = (socket.vm, socket.vsock.ports());
        if self.sockets.unlist(id)
            && let Some(guest) = self.guests.get_mut(&vm)
        {
            guest.ports.remove(&ports);
        }
        self.look_again(id);
    }

    /// Queues a socket that may have output.
    fn look_again(&mut self, id: SocketId) {
        if let Some(socket) = self.sockets.get_mut(id)
            && !std::mem::replace(&mut socket.is_ready, true)
        {
            self.ready.push_back(id);
        }
    }
}

mod arrivals;
mod guests;
mod to_guest;

pub use arrivals::Arrivals;

#[cfg(test)]
mod tests;
