//! All sockets of all guests of a host: packets of guests, messages of other hosts.
//!
//! # Use
//!
//! After every `handle_*` and command, and after each [`Host::give`] and [`Host::poll_packet`]:
//! [`Host::poll_output`] until `None`, then [`Host::poll_timeout`].
//!
//! A guest of whom [`Output::Packets`] was said is given what [`Host::poll_packet`] has, as long as
//! its ring has room, and when it has room again; only then payload that is due, as
//! [`Host::room_to_guest`] allows. What is not taken stays what it is, state of a socket: so what
//! others cause for a guest that takes nothing is bounded by its sockets, and never in the way of
//! what it sends itself. Answers to its own packets alone are in a queue ([`Host::owes_answers`]).
//!
//! Messages for a guest of this very host come back by
//! [`Host::handle_request`] and [`Host::handle_message`], with the [`HostId`] that they were for.
//! Timers are for after all that has come was handled: a daemon that stood still has not heard of
//! others that were not silent.
//!
//! Payload stays with the caller: a packet of the guest that is [`Handled::Carry`] is followed by
//! it, and what [`Verdict::Deliver`] was said of is given when there is room. What is given at once
//! may be of many messages, and should be: a guest has place for so many packets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::control::{self, Answer, Ask, Asked, Code};
use super::errno::Errno;
use super::guest::{Control, FIRST_HOST_PORT, Guest, Left, Policy, Wanted, Way, addresses};
use super::id::{HostId, ShadowId, ShadowIds, Side};
use super::inbound::Verdict;
use super::joint::Joint;
use super::late::{Name, Over, Requests};
use super::message::{Kind, Message, Request};
use super::sockets::{Opener, Socket, SocketId, Sockets, VmId};
use super::state::State;
use super::vsock::{Heard, Ports, for_nobody};
use crate::limits::{TOE_CONTROLS_MAX, TOE_SOCKETS_MAX};
use crate::time::Instant;
use crate::wire::vsock::{HOST_CID, Header, Op, STREAM};

/// What became of a packet of a guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub enum Handled {
    /// Its payload, if it has any, is not wanted.
    Done,
    /// This message is for the other end, and as much of the payload as it says.
    Carry(SocketId, Message),
}

/// What is due.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Output {
    /// A message for the other end of a socket's connection, at this host. Behind a
    /// [`Kind::Request`] goes the request.
    Message(SocketId, HostId, Message, Request),
    /// An answer to a message of this host that was for nobody; it goes back to where that one came
    /// from.
    Return(HostId, Message),
    /// There are packets for a guest: [`Host::poll_packet`]. Not said again until it had none.
    Packets(VmId),
    /// A socket is gone: its [`SocketId`] means nothing any more, and payload that is due to it is
    /// not wanted.
    Gone(SocketId),
    /// A process of a guest listens there from now on, beside others or as the only one.
    Listens(VmId, SocketAddr),
}

/// What came from another host and was for no end of this one, or for one that is named here.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub struct Met {
    /// Whose.
    pub socket: Option<SocketId>,
    /// What becomes of its payload.
    pub verdict: Verdict,
}

/// The table. See the module's doc.
#[derive(Debug)]
pub struct Host {
    ids: ShadowIds,
    guests: BTreeMap<VmId, Guest>,
    sockets: Sockets,
    /// By the host of the other end: only that one may speak of a connection.
    names: BTreeMap<Name, SocketId>,
    /// By network and address.
    addresses: BTreeMap<(u32, IpAddr), VmId>,
    requests: Requests,
    over: Over,
    /// Sockets that may have something to say.
    ready: VecDeque<SocketId>,
    /// Guests that have packets, of which the caller has not been told.
    ready_guests: VecDeque<VmId>,
    returns: VecDeque<(HostId, Message)>,
    /// Listeners of which the caller has not been told: of one packet's requests.
    listens: VecDeque<(VmId, SocketAddr)>,
    /// What guests that have gone may come back for.
    left: BTreeMap<VmId, Left>,
    /// Sockets of guests that have gone, and some that these had closed, which have not been told;
    /// none of them is without.
    ending: VecDeque<(VmId, Vec<SocketId>)>,
    /// Ports of connections that the host makes.
    next_port: u32,
    /// Guests whose listeners have changed, and how often.
    listener_changes: BTreeMap<VmId, u64>,
    /// New sockets whose other end is not at this host begin with this share of room.
    first_share: Option<(HostId, u64)>,
}

impl Host {
    /// Without guests. `incarnation` is a random number that no other daemon has.
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
            // A guest may have connections of the daemon before this one.
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

    /// Those of one guest.
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

    /// Whose socket it is.
    #[must_use]
    pub fn vm_of(&self, socket: SocketId) -> Option<VmId> {
        self.sockets.get(socket).map(|socket| socket.vm)
    }

    /// Where the other end of a socket is.
    #[must_use]
    pub fn host_of(&self, socket: SocketId) -> Option<HostId> {
        self.sockets.get(socket).map(|socket| socket.host)
    }

    /// The guest of this host that asks for the connection with this name, and its request, as long
    /// as the other end at `host` has not answered.
    #[must_use]
    pub fn asking(&self, host: HostId, id: ShadowId) -> Option<(VmId, Request)> {
        let socket = self.sockets.get(self.socket(host, id, Side::Opener)?)?;
        let asks = socket.joint.end().state() == State::Asking;
        asks.then_some((socket.vm, socket.request))
    }

    /// The socket that a guest's kernel knows by these ports.
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
        socket.map_or(0, |socket| socket.joint.room_to_guest())
    }

    /// Likewise in so many packets together.
    #[must_use]
    pub fn room_in(&self, socket: SocketId, packets: u64) -> u64 {
        let socket = self.sockets.get(socket).filter(|socket| self.has_guest(socket));
        socket.map_or(0, |socket| socket.joint.room_in(packets))
    }

    /// Of so many bytes that wait for a guest at this socket, these may be given in a packet now:
    /// as [`Self::room_to_guest`], but that few of them wait for more if those are about to come
    /// and the guest has others to read. They are less than `TOE_PACKET_FULL` then, as long as its
    /// buffers have so much room.
    #[must_use]
    pub fn takes(&self, socket: SocketId, waiting: u64) -> u64 {
        let socket = self.sockets.get(socket).filter(|socket| self.has_guest(socket));
        socket.map_or(0, |socket| socket.joint.takes(waiting))
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
            // A socket that gave up connecting says nothing; its port may be another's now.
            let stale = known
                .filter(|id| self.sockets.get(*id).is_some_and(|socket| socket.joint.is_opening()));
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
        let lied = socket.joint.lie().is_some();
        let message = socket.joint.handle_packet(now, header, payload);
        if !lied && socket.joint.lie().is_some() {
            self.guests.get_mut(&vm).expect("asked before").lies += 1;
        }
        self.look_again(id);
        message.map_or(Handled::Done, |message| Handled::Carry(id, message))
    }

    /// A message of an end at host `from` came, but for a request. If its verdict is
    /// [`Verdict::Hold`], it comes again, by [`Self::handle_held`].
    pub fn handle_message(&mut self, now: Instant, from: HostId, message: &Message) -> Met {
        let Some(id) = self.socket(from, message.id, message.to) else {
            // It may have been over, and the other end has not heard so yet.
            let was_over = self.over.contains(now, (from, message.id, message.to));
            self.returns.extend(message.for_nobody(was_over).map(|answer| (from, answer)));
            return Met { socket: None, verdict: Verdict::Done };
        };
        self.end_if_its_guest_has_gone(now, id);
        let socket = self.sockets.get_mut(id).expect("named sockets are there");
        let verdict = socket.joint.handle_message(now, message.kind);
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
        let verdict = socket.joint.handle_held(now, message.kind);
        self.look_again(id);
        Met { socket: Some(id), verdict }
    }

    /// Somebody at host `from` wants to connect to a guest of this host. Whether he may is for the
    /// caller to know, and by which of its addresses the guest that connects is counted.
    pub fn handle_request(
        &mut self,
        now: Instant,
        from: HostId,
        message: &Message,
        request: &Request,
        opener: IpAddr,
    ) {
        let Kind::Request { edge } = message.kind else { return };
        // A copy opens nothing, be the connection over or not.
        if message.to != Side::Acceptor || !self.requests.is_new(from, message.id) {
            return;
        }
        if let Err(errno) = self.offer(now, (from, message.id), edge, (request, opener)) {
            let kind = Kind::Reset(errno);
            self.returns.push_back((from, Message { id: message.id, to: Side::Opener, kind }));
        }
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(id) = self.sockets.pop_timer(now) {
            self.end_if_its_guest_has_gone(now, id);
            if let Some(socket) = self.sockets.get_mut(id) {
                socket.joint.handle_timeout(now);
                self.look_again(id);
            }
        }
    }

    /// The fabric has lost the other end of a socket.
    pub fn handle_loss(&mut self, now: Instant, socket: SocketId) {
        self.end_if_its_guest_has_gone(now, socket);
        if let Some(it) = self.sockets.get_mut(socket) {
            it.joint.handle_loss(now);
            self.look_again(socket);
        }
    }

    /// A guest is shown room at this socket for `share` bytes beyond what it has sent so far, and
    /// no more until this is said again, whatever the other guest has room for.
    pub fn limit_room(&mut self, now: Instant, socket: SocketId, share: u64) {
        if let Some(it) = self.sockets.get_mut(socket) {
            it.joint.limit_room(now, share);
            self.look_again(socket);
        }
    }

    /// The next `len` bytes that are due go into the guest's memory, behind this header. There must
    /// be room.
    #[must_use]
    pub fn give(&mut self, now: Instant, socket: SocketId, len: u32) -> Option<Header> {
        let header = self.sockets.get_mut(socket)?.joint.give(now, len);
        self.look_again(socket);
        Some(header)
    }

    /// What is due.
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

    /// When [`Self::handle_timeout`] is to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.sockets.next_timer()
    }

    fn poll_socket(&mut self, now: Instant, id: SocketId) -> Option<Output> {
        let socket = self.sockets.get_mut(id)?;
        if let Some(message) = socket.joint.poll_message(now) {
            return Some(Output::Message(id, socket.host, message, socket.request));
        }
        let vm = socket.vm;
        if socket.is_listed && socket.joint.is_closed() {
            self.unlist(id);
        }
        let socket = self.sockets.get_mut(id)?;
        if socket.joint.has_packet()
            && let Some(guest) = self.guests.get_mut(&vm)
            && !std::mem::replace(&mut socket.has_packet, true)
        {
            guest.ready.push_back(id);
            self.look_at(vm);
        }
        if !self.sockets.get(id)?.joint.is_spent() {
            return self.ready_guests.pop_front().map(Output::Packets);
        }
        let Socket { host, joint, .. } = self.sockets.remove(id)?;
        let (end, errno) = (joint.end(), joint.end().errno());
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
        let joint = Joint::connect(now, cid, header, self.ids.name());
        self.insert(now, (vm, host), joint, request, request.from.ip());
    }

    /// A guest is offered a connection. An opener has no more places of the guest's table than are
    /// free for others, so that a newcomer finds one.
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
        let joint = Joint::offer(now, cid, ports, name, edge);
        self.insert(now, (vm, from), joint, *request, opener.ip);
        Ok(())
    }

    /// Sockets that a guest may still have. One that the guest has closed keeps its place until its
    /// two streams are delivered or its time is over: whoever needs a place does not end it.
    fn free_places(&self, vm: VmId) -> usize {
        let resets = self.guests.get(&vm).map_or(0, Guest::resets);
        TOE_SOCKETS_MAX.saturating_sub(self.sockets.count(vm) + resets)
    }

    fn insert(
        &mut self,
        now: Instant,
        (vm, host): (VmId, HostId),
        mut joint: Joint,
        request: Request,
        opener: IpAddr,
    ) {
        if let Some((_, share)) = self.first_share.filter(|(here, _)| *here != host) {
            joint.limit_arrivals(now, share);
        }
        let (ports, name) = (joint.ports(), (host, joint.end().id(), joint.end().side()));
        let id = self.sockets.insert(Socket::new(vm, host, joint, request, opener));
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
        // One that is over, as its guest was about to hear, is another's now.
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
            Ok(Heard::Data(len)) => {
                // It was let send no more than a few requests ahead.
                let mut bytes = vec![0; len as usize];
                // Taken out, so that answers may look at everything else.
                let mut control = guest.controls.remove(&port).expect("it is there");
                let understood = read(&mut bytes)
                    && control.take(&bytes, |asked| self.answer(vm, port, asked, policy));
                if !understood {
                    control.connection.reset();
                }
                let guest = self.guests.get_mut(&vm).expect("it is there");
                guest.controls.insert(port, control);
            }
            // One that is over is forgotten when its guest has heard so.
            Ok(_) => {}
            Err(_) => guest.lies += 1,
        }
        self.look_at_control(vm, port);
    }

    /// Answers what a process of a guest asks.
    fn answer(&mut self, vm: VmId, port: u32, asked: Asked, policy: &dyn Policy) -> Answer {
        let guest = self.guests.get_mut(&vm).expect("its packet is here");
        if let Some(ports) = asked.ask.socket()
            && let Some(&id) = guest.ports.get(&ports)
            && let Some(socket) = self.sockets.get_mut(id)
        {
            match asked.ask {
                Ask::Linger(_) => socket.joint.reset_on_close(true),
                Ask::Unlinger(_) => socket.joint.reset_on_close(false),
                Ask::Deafen(_) => socket.joint.end_reads(),
                _ => {}
            }
            let (code, state) = (Code::of(socket.joint.end().errno()), socket.joint.end().state());
            let addresses = Some(addresses(ports, &socket.request));
            self.look_again(id);
            return Answer { addresses, state: Some(state), ..Answer::of(asked, code) };
        }
        let wanted = guest.wanted();
        let full = self.free_places(vm) <= wanted;
        let guest = self.guests.get_mut(&vm).expect("it is there");
        let answer = guest.answer(port, asked, |program, request| {
            if full { Way::Native } else { policy.connect(vm, program, request) }
        });
        if let (Ask::Listen { at, .. }, Code::Done) = (asked.ask, answer.code) {
            self.listens.push_back((vm, at));
        }
        answer
    }

    /// A packet is for no connection.
    fn stray(&mut self, vm: VmId, header: &Header) {
        if let Some(guest) = self.guests.get_mut(&vm) {
            let cid = guest.config.cid;
            guest.answer_stray(for_nobody(cid, header));
            self.look_at(vm);
        }
    }

    /// The guest knows nothing of a socket any more, and is not told.
    fn lose(&mut self, now: Instant, id: SocketId) {
        let Some(socket) = self.sockets.get_mut(id) else { return };
        socket.joint.handle_guest_loss(now);
        let (vm, ports) = (socket.vm, socket.joint.ports());
        if self.sockets.unlist(id)
            && let Some(guest) = self.guests.get_mut(&vm)
        {
            guest.ports.remove(&ports);
        }
        self.look_again(id);
    }

    /// A socket may have something to say.
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
