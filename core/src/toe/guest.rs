//! A host's state of one guest: the requests of its processes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::control::{Answer, Ask, Asked, Code, LEN, PORT, Program};
use super::errno::Errno;
use super::id::HostId;
use super::message::Request;
use super::sockets::{SocketId, VmId};
use super::state::State;
use super::vsock::{Connection, Ports, reset};
use crate::limits::{
    TOE_CONTROLS_MAX, TOE_LISTENERS_MAX, TOE_LISTENERS_PER_ADDRESS_MAX, TOE_PAST_MAX,
    TOE_SOCKETS_MAX, TOE_STRAYS_MAX, TOE_WANTED_MAX,
};
use crate::wire::vsock::{Header, Op};

/// Most connections whose end is reported to a guest that comes back.
const LEFT_MAX: usize = TOE_SOCKETS_MAX + TOE_CONTROLS_MAX + TOE_STRAYS_MAX;
/// Requests that a control connection may send ahead.
const AHEAD: u64 = 16 * LEN as u64;

/// Permissions of guests to connect.
pub trait Policy {
    /// Decides how a program of a guest connects.
    fn connect(&self, vm: VmId, program: Program, request: &Request) -> Route;
}

/// How a socket is to connect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Route {
    /// To a guest of this host.
    To(HostId),
    /// By guest TCP, for instance because no TOE is at the destination.
    Native,
    /// Forbidden.
    Failed(Errno),
}

/// Configuration of a guest.
#[derive(Clone, Debug)]
pub struct GuestConfig {
    /// Its CID, at least 3.
    pub cid: u64,
    /// The number of its network.
    pub network: u32,
    /// Its addresses: no socket has another (VTOE-09).
    pub ips: Vec<IpAddr>,
}

/// A packet for a guest: without payload, or with an answer behind its header.
pub type Packet = (Header, Option<[u8; LEN]>);

/// A vsock connection for requests of a process.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) connection: Connection,
    /// The beginning of a request.
    partial: Vec<u8>,
    answers: VecDeque<[u8; LEN]>,
    /// Whether it is in the queue of connections with output.
    is_ready: bool,
    /// Its process's wishes are dropped.
    is_over: bool,
}

/// A guest.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) config: GuestConfig,
    /// Its addresses, without those that another guest of its network had before.
    ips: Vec<IpAddr>,
    /// Sockets that its kernel knows.
    pub(super) ports: BTreeMap<Ports, SocketId>,
    /// Control connections by vsock port.
    pub(super) controls: BTreeMap<u32, Control>,
    /// Packets are due to it, and the caller has been told or is about to be.
    pub(super) is_ready: bool,
    /// Control connections with output, and sockets with output.
    ready_controls: VecDeque<u32>,
    pub(super) ready: VecDeque<SocketId>,
    /// The destination of the socket at a vsock port that is going to connect, and the connection
    /// that announced it.
    wanted: BTreeMap<u32, Wanted>,
    /// Listeners of an address take turns (SO_REUSEPORT). The guest's own stack, where each has
    /// taken the port, decides whether they may share it.
    listeners: BTreeMap<SocketAddr, VecDeque<Listener>>,
    /// Vsock port and address of each listener, so that a request does not search all.
    listening: BTreeSet<(u32, SocketAddr)>,
    /// Changes of the addresses in `listeners` since they were last taken.
    listener_changes: u64,
    past: Past,
    /// Packets that no honest driver sends.
    pub(super) lies: u64,
    /// Answers to packets of no connection; all other output is state of its connections.
    strays: VecDeque<Header>,
    /// Connections that are over, whose resets are due to it.
    resets: BTreeSet<Ports>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// The control connection that asked, by its vsock port.
    control: u32,
    pub(super) host: HostId,
    pub(super) request: Request,
}

#[derive(Debug)]
struct Listener {
    guest_port: u32,
    /// The control connection that asked, by its vsock port.
    control: u32,
    /// Whether a listener at an IPv6 address accepts IPv4 as well.
    v4: bool,
}

/// State that remains of a guest that has gone.
#[derive(Debug)]
pub(super) struct Left {
    /// Connections that its kernel may think it has.
    connections: BTreeSet<Ports>,
    past: Past,
}

/// Results of sockets whose connection the guest's kernel has dropped: a process that read an end
/// may still ask.
#[derive(Debug, Default)]
struct Past {
    by_ports: BTreeMap<Ports, (u64, Code, Request)>,
    order: VecDeque<(u64, Ports)>,
    count: u64,
}

impl Past {
    fn add(&mut self, ports: Ports, code: Code, request: Request) {
        self.count += 1;
        self.by_ports.insert(ports, (self.count, code, request));
        self.order.push_back((self.count, ports));
        if self.order.len() > TOE_PAST_MAX
            && let Some((count, ports)) = self.order.pop_front()
            && self.by_ports.get(&ports).is_some_and(|(known, ..)| *known == count)
        {
            self.by_ports.remove(&ports);
        }
    }
}

impl Control {
    pub(super) fn new(guest_cid: u64, header: &Header) -> Self {
        let mut connection = Connection::asked(guest_cid, header);
        connection.set_edge(AHEAD);
        connection.respond();
        let (partial, answers) = (Vec::new(), VecDeque::new());
        Self { connection, partial, answers, is_ready: false, is_over: false }
    }

    /// Takes bytes of requests; `answer` answers whole ones. `false`: a request is invalid.
    pub(super) fn take(
        &mut self,
        mut bytes: &[u8],
        mut answer: impl FnMut(Asked) -> Answer,
    ) -> bool {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(LEN - self.partial.len()));
            bytes = later;
            self.partial.extend_from_slice(now);
            if let Some(request) = self.partial.first_chunk::<LEN>() {
                let Some(asked) = Asked::parse(request) else { return false };
                self.answers.push_back(answer(asked).emit());
                self.partial.clear();
            }
        }
        true
    }

    /// The next packet, with or without an answer behind it.
    fn poll(&mut self) -> Option<Packet> {
        if let Some(header) = self.connection.poll_packet() {
            return Some((header, None));
        }
        if self.connection.room_to_guest() < LEN as u64 {
            return None;
        }
        let answer = self.answers.pop_front()?;
        // A process that does not read answers cannot send more requests.
        if self.answers.is_empty() {
            self.connection.set_edge(self.connection.received() + AHEAD);
        }
        let len = u32::try_from(LEN).expect("64");
        Some((self.connection.give(len), Some(answer)))
    }
}

impl Guest {
    /// A guest with the addresses `ips`.
    pub(super) fn new(config: GuestConfig, ips: Vec<IpAddr>) -> Self {
        Self {
            config,
            ips,
            ports: BTreeMap::new(),
            controls: BTreeMap::new(),
            is_ready: false,
            ready_controls: VecDeque::new(),
            ready: VecDeque::new(),
            wanted: BTreeMap::new(),
            listeners: BTreeMap::new(),
            listening: BTreeSet::new(),
            listener_changes: 0,
            past: Past::default(),
            lies: 0,
            strays: VecDeque::new(),
            resets: BTreeSet::new(),
        }
    }

    /// Whether so many answers are due that no more packets of it are taken.
    pub(super) fn owes_answers(&self) -> bool {
        self.strays.len() >= TOE_STRAYS_MAX
    }

    /// A control connection may have something to say.
    pub(super) fn look_at_control(&mut self, port: u32) {
        let Some(control) = self.controls.get_mut(&port) else { return };
        if !std::mem::replace(&mut control.is_ready, true) {
            self.ready_controls.push_back(port);
        }
        let is_closed = control.connection.is_closed();
        if is_closed && !std::mem::replace(&mut control.is_over, true) {
            self.forget_wishes(port);
        }
    }

    /// The next packet that precedes those of its sockets.
    pub(super) fn poll(&mut self) -> Option<Packet> {
        if let Some(header) = self.strays.pop_front() {
            return Some((header, None));
        }
        while let Some(port) = self.ready_controls.front().copied() {
            if let Some(control) = self.controls.get_mut(&port) {
                if let Some(packet) = control.poll() {
                    return Some(packet);
                }
                control.is_ready = false;
                if control.connection.is_spent() {
                    self.controls.remove(&port);
                }
            }
            self.ready_controls.pop_front();
        }
        Some((reset(self.config.cid, self.resets.pop_first()?), None))
    }

    /// Queues the reset of a connection.
    pub(super) fn reset(&mut self, ports: Ports) {
        self.resets.insert(ports);
    }

    /// Removes the guest: its sockets, and the resets that are due if its kernel comes back. Resets
    /// beyond the most connections of a guest are left out: a later packet of such a connection
    /// gets one.
    pub(super) fn leave(self) -> (Vec<SocketId>, Left) {
        let controls = self.controls.keys().map(|port| Ports { guest: *port, host: PORT });
        // Resets and answers that the guest has not got yet.
        let strays = self.strays.iter().map(|it| Ports { guest: it.dst_port, host: it.src_port });
        let untold = strays.chain(self.resets.iter().copied());
        let all = self.ports.keys().copied().chain(controls).chain(untold);
        let connections = all.take(LEFT_MAX).collect();
        (self.ports.into_values().collect(), Left { connections, past: self.past })
    }

    /// Takes over the state left by the same kernel.
    pub(super) fn take_up(&mut self, left: Left) {
        (self.resets, self.past) = (left.connections, left.past);
    }

    /// Whether a reset at these ports is due. A packet that opens or resets a connection there
    /// cancels it.
    pub(super) fn is_to_hear(&mut self, ports: Ports, op: Option<Op>) -> bool {
        if matches!(op, Some(Op::Request | Op::Reset)) {
            self.resets.remove(&ports);
        }
        self.resets.contains(&ports)
    }

    /// Connections that are over, whose resets are due to it.
    pub(super) fn resets(&self) -> usize {
        self.resets.len()
    }

    /// Answers a packet of no connection. Answers that the guest does not take are bounded.
    pub(super) fn answer_stray(&mut self, header: Option<Header>) {
        if self.strays.len() < TOE_STRAYS_MAX {
            self.strays.extend(header);
        }
    }

    /// The vsock port of the next listener there.
    pub(super) fn listener(&mut self, to: SocketAddr) -> Option<u32> {
        let any_v6 = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        let any = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { any_v6 };
        let places = [(to.ip(), false), (any, false), (any_v6, to.is_ipv4())];
        places.into_iter().find_map(|(ip, as_v4)| {
            let there = self.listeners.get_mut(&SocketAddr::new(ip, to.port()))?;
            let at = there.iter().position(|listener| listener.v4 || !as_v4)?;
            let listener = there.remove(at)?;
            let port = listener.guest_port;
            there.push_back(listener);
            Some(port)
        })
    }

    /// Ports of all listeners.
    pub(super) fn listening_ports(&self) -> BTreeSet<u16> {
        self.listeners.keys().map(SocketAddr::port).collect()
    }

    /// Changes of these addresses since the last call.
    pub(super) fn take_listener_changes(&mut self) -> u64 {
        std::mem::take(&mut self.listener_changes)
    }

    /// The next port of the host for a connection to this port of the guest, one that was not used
    /// lately.
    pub(super) fn host_port(&self, guest: u32, next: &mut u32) -> Ports {
        loop {
            let host = *next;
            *next = host.checked_add(1).unwrap_or(FIRST_HOST_PORT);
            let ports = Ports { guest, host };
            if !self.ports.contains_key(&ports) && !self.resets.contains(&ports) {
                return ports;
            }
        }
    }

    /// The guest's kernel has dropped the connection of a socket.
    pub(super) fn forget(&mut self, ports: Ports, code: Code, request: Request) {
        self.ports.remove(&ports);
        self.past.add(ports, code, request);
    }

    /// A socket is new at these ports.
    pub(super) fn list(&mut self, ports: Ports, id: SocketId) {
        self.past.by_ports.remove(&ports);
        self.ports.insert(ports, id);
    }

    /// The announced destination of the socket at this vsock port.
    pub(super) fn take_wanted(&mut self, port: u32) -> Option<Wanted> {
        self.wanted.remove(&port)
    }

    /// Sockets that are going to connect.
    pub(super) fn wanted(&self) -> usize {
        self.wanted.len()
    }

    /// Drops the wishes of a control connection that is over.
    fn forget_wishes(&mut self, port: u32) {
        let before = self.listeners.len();
        let Self { listeners, listening, .. } = self;
        listeners.retain(|at, there| {
            there.retain(|listener| {
                let stays = listener.control != port;
                if !stays {
                    listening.remove(&(listener.guest_port, *at));
                }
                stays
            });
            !there.is_empty()
        });
        self.listener_changes += u64::from(self.listeners.len() != before);
        self.wanted.retain(|_, wanted| wanted.control != port);
    }

    /// The socket at this vsock port listens nowhere any more.
    fn unlisten(&mut self, guest_port: u32) {
        let first = (guest_port, SocketAddr::from(([0; 4], 0)));
        while let Some(&(port, at)) = self.listening.range(first..).next()
            && port == guest_port
        {
            self.listening.remove(&(port, at));
            let Some(there) = self.listeners.get_mut(&at) else { continue };
            there.retain(|listener| listener.guest_port != guest_port);
            if there.is_empty() {
                self.listeners.remove(&at);
                self.listener_changes += 1;
            }
        }
    }

    /// The result of a past socket.
    pub(super) fn describe_past(&self, asked: Asked, ports: Ports) -> Answer {
        match self.past.by_ports.get(&ports) {
            Some((_, code, request)) => {
                let addresses = Some(addresses(ports, request));
                let state = Some(if *code == Code::Done { State::Over } else { State::Failed });
                Answer { addresses, state, ..Answer::of(asked, *code) }
            }
            // An unknown socket counts as no clean end.
            None => Answer::of(asked, Code::Failed(Errno::Reset)),
        }
    }

    /// Answers a request that names no existing socket; `way` decides how a socket connects.
    pub(super) fn answer(
        &mut self,
        control: u32,
        asked: Asked,
        way: impl FnOnce(Program, &Request) -> Route,
    ) -> Answer {
        let code = match asked.ask {
            Ask::Connect { guest, from, to, program } => {
                let way = |request: &Request| way(program, request);
                let (code, addresses) = self.want((control, guest), from, to, way);
                return Answer { addresses, ..Answer::of(asked, code) };
            }
            Ask::Listen { guest, at, v4 } => {
                self.listen(at, Listener { guest_port: guest, control, v4: v4 && at.is_ipv6() })
            }
            Ask::Unlisten { guest } => {
                self.unlisten(guest);
                Code::Done
            }
            Ask::Describe(ports) => return self.describe_past(asked, ports),
            Ask::Linger(_) | Ask::Unlinger(_) | Ask::Deafen(_) => Code::Failed(Errno::Reset),
        };
        Answer::of(asked, code)
    }

    fn want(
        &mut self,
        (control, guest): (u32, u32),
        from: SocketAddr,
        to: SocketAddr,
        way: impl FnOnce(&Request) -> Route,
    ) -> (Code, Option<(SocketAddr, SocketAddr)>) {
        let any = from.ip().is_unspecified();
        let mut own = self.ips.iter().filter(|ip| ip.is_ipv4() == to.is_ipv4());
        let Some(ip) = own.find(|ip| any || **ip == from.ip()).filter(|_| from.port() > 0) else {
            return (Code::Failed(Errno::AddressNotAvailable), None);
        };
        let from = SocketAddr::new(*ip, from.port());
        let request = Request { network: self.config.network, from, to };
        let full = self.wanted.len() >= TOE_WANTED_MAX && !self.wanted.contains_key(&guest);
        let way = if full || !request.is_sound() { Route::Native } else { way(&request) };
        let code = match way {
            Route::To(host) => {
                self.wanted.insert(guest, Wanted { control, host, request });
                Code::Done
            }
            Route::Native => Code::Native,
            Route::Failed(errno) => Code::of(Some(errno)),
        };
        (code, Some((from, to)))
    }

    fn listen(&mut self, at: SocketAddr, listener: Listener) -> Code {
        let own = at.ip().is_unspecified() || self.ips.contains(&at.ip());
        if !own || at.port() == 0 {
            return Code::Failed(Errno::AddressNotAvailable);
        }
        let there = self.listeners.get(&at).map_or(0, VecDeque::len);
        let is_known = self.listening.contains(&(listener.guest_port, at));
        let is_full = self.listening.len() >= TOE_LISTENERS_MAX;
        if !is_known && (is_full || there >= TOE_LISTENERS_PER_ADDRESS_MAX) {
            return Code::Native;
        }
        self.listener_changes += u64::from(there == 0);
        self.listening.insert((listener.guest_port, at));
        let there = self.listeners.entry(at).or_default();
        if is_known {
            there.retain(|known| known.guest_port != listener.guest_port);
        }
        there.push_back(listener);
        Code::Done
    }
}

/// The host's ports for connections that it makes itself begin here.
pub(super) const FIRST_HOST_PORT: u32 = 1 << 16;

/// A socket's own address and the other side's; connections to listeners have ports of the host.
pub(super) const fn addresses(ports: Ports, request: &Request) -> (SocketAddr, SocketAddr) {
    if ports.host >= FIRST_HOST_PORT {
        (request.to, request.from)
    } else {
        (request.from, request.to)
    }
}
