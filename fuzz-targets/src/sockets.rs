//! A host's sockets (`core::toe`) with a guest and another host that lie.
//!
//! Input: operations. A guest sends packets, well formed or not, with or without payload, and any
//! requests; another host sends messages and requests, as bytes or made of fields that nearly fit;
//! time passes. Meanwhile one honest guest sends to another, and every byte must reach it; its
//! connection must end clean, and no state of the others may be left when they are gone.

use std::collections::VecDeque;
use std::net::SocketAddr;

use arbitrary::{Arbitrary, Unstructured};
use nightporter_core::limits::TOE_SOCKETS_MAX;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::toe::control::{self, Ask, Asked, Program};
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::guest::{GuestConfig, Policy, Route};
use nightporter_core::toe::host::{Handled, Host, Met, Output};
use nightporter_core::toe::id::{HostId, ShadowId, Side};
use nightporter_core::toe::inbound::Verdict;
use nightporter_core::toe::message::{self, Kind, Message, Request};
use nightporter_core::toe::sockets::VmId;
use nightporter_core::toe::vsock::Ports;
use nightporter_core::wire::vsock::{
    HOST_CID, Header, Op as Vsock, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, STREAM,
};

use crate::noise;

const OPS_MAX: usize = 400;
const HERE: HostId = HostId(0);
/// The host that lies.
const THERE: HostId = HostId(1);
const A: VmId = VmId(0);
const B: VmId = VmId(1);
/// The guest that lies.
const C: VmId = VmId(2);
/// Vsock ports: of the honest guests' control connections, of B's listener, of A's socket.
const CONTROL: u32 = 900;
const LISTENS: u32 = 4000;
const SOCKET: u32 = 1025;
/// The lying host's incarnation; this one's.
const STRANGE: u64 = 88;
const OWN: u64 = 77;

#[derive(Arbitrary, Clone, Debug)]
enum Op {
    /// A packet of C, of fields that nearly fit.
    Packet(Fields),
    /// Any 44 bytes, and payload.
    Bytes(Box<[u8; 44]>, Vec<u8>),
    /// C asks.
    Ask(Wish),
    /// C sends these bytes to its control connection.
    Control(Vec<u8>),
    /// A message of the other host, of fields that nearly fit.
    Message(Said),
    /// Any 40 bytes.
    Header(Box<[u8; 40]>),
    /// A request of the other host, and any 40 bytes as one.
    Request {
        serial: u8,
        edge: u32,
        to: u8,
    },
    Addresses(u8, Box<[u8; 40]>),
    /// The fabric has lost one of its connections.
    Loss(u8),
    /// A sends so many bytes, B reads.
    Honest(u8),
    /// B answers waiting connections: it accepts, or refuses.
    Answers(bool),
    /// So many milliseconds pass.
    Wait(u16),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Fields {
    op: u8,
    src_port: u8,
    dst_port: u8,
    len: u16,
    more: u8,
    flags: u8,
    buf_alloc: u32,
    fwd_cnt: u16,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Wish {
    Connect { port: u8, from: u8, to: u8, native: bool },
    Listen { port: u8, at: u8, v4: bool },
    Unlisten(u8),
    Describe(u8, u8),
    Linger(u8, u8, bool),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Said {
    kind: u8,
    serial: u8,
    own: bool,
    to_opener: bool,
    a: u32,
    b: u32,
    again: bool,
}

/// All may connect, at guests of this host or of the other.
struct Doorkeeper;

impl Policy for Doorkeeper {
    fn connect(&self, _: VmId, _: Program, request: &Request) -> Route {
        match request.to.port() {
            9 => Route::Native,
            10 => Route::Failed(Errno::Access),
            11 => Route::To(THERE),
            _ => Route::To(HERE),
        }
    }
}

struct World {
    host: Host,
    now: Instant,
    /// Of this host for itself.
    messages: VecDeque<(Message, Option<Request>)>,
    /// Connections to B without an answer.
    calls: VecDeque<Header>,
    /// B's ports of the honest connection.
    honest: (u32, u32),
    /// Bytes that have reached it.
    sent: u32,
}

/// Judges one input.
pub fn run(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let mut world = World::new();
    for _ in 0..OPS_MAX {
        let Ok(op) = u.arbitrary::<Op>() else { break };
        world.does(op);
        if u.is_empty() {
            break;
        }
    }
    world.ends();
}

/// Operations without a pattern.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (1..9).map(|n| noise(n, 2500)).collect()
}

fn cid(vm: VmId) -> u64 {
    3 + u64::from(vm.0)
}

fn at(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// One of a few addresses, of all sorts.
fn address(n: u8) -> SocketAddr {
    let all = [
        "10.0.0.2:80",
        "10.0.0.3:80",
        "10.0.0.1:80",
        "0.0.0.0:80",
        "[::]:80",
        "10.0.0.3:5",
        "0.0.0.0:5",
        "[fd00::2]:80",
        "[fd00::3]:5",
        "10.0.0.2:11",
        "224.0.0.1:80",
        "10.0.0.3:0",
    ];
    at(all[usize::from(n) % all.len()])
}

/// One of C's ports.
fn port(n: u8) -> u32 {
    1024 + u32::from(n % 4)
}

/// One of the host's.
fn host_port(n: u8) -> u32 {
    [1, 2, 2, 65_536, 65_537, 65_538, 0, u32::MAX][usize::from(n % 8)]
}

impl World {
    fn new() -> Self {
        let mut host = Host::new(OWN);
        for (vm, ips) in [
            (A, ["10.0.0.1", "fd00::1"]),
            (B, ["10.0.0.2", "fd00::2"]),
            (C, ["10.0.0.3", "fd00::3"]),
        ] {
            let ips = ips.map(|ip| ip.parse().expect("an address")).to_vec();
            assert!(
                host.add_guest(vm, GuestConfig { cid: cid(vm), network: 5, ips }, false).is_empty()
            );
        }
        let mut world = Self {
            host,
            now: Instant::from_secs(1000),
            messages: VecDeque::new(),
            calls: VecDeque::new(),
            honest: (0, 0),
            sent: 0,
        };
        for (vm, port) in [(A, CONTROL), (B, CONTROL), (C, port(0))] {
            world.says(vm, Vsock::Request, (port, control::PORT), &[], |_| {});
        }
        let listen = Ask::Listen { guest: LISTENS, at: at("0.0.0.0:80"), v4: false };
        let connect = Ask::Connect {
            program: Program::NONE,
            guest: SOCKET,
            from: at("0.0.0.0:5"),
            to: at("10.0.0.2:80"),
        };
        for (vm, ask) in [(B, listen), (A, connect)] {
            let bytes = Asked { tag: 1, ask }.emit();
            world.says(vm, Vsock::Data, (CONTROL, control::PORT), &bytes, |_| {});
        }
        world.says(A, Vsock::Request, (SOCKET, control::SOCKETS), &[], |_| {});
        let call = world.calls.pop_front().expect("A's");
        world.honest = (call.dst_port, call.src_port);
        world.says(B, Vsock::Response, world.honest, &[], |_| {});
        world
    }

    /// A guest's packet. No packet may carry more than its bytes.
    fn says(
        &mut self,
        vm: VmId,
        op: Vsock,
        (src_port, dst_port): (u32, u32),
        payload: &[u8],
        more: impl FnOnce(&mut Header),
    ) {
        let mut header = Header {
            src_cid: cid(vm),
            dst_cid: HOST_CID,
            src_port,
            dst_port,
            len: u32::try_from(payload.len()).expect("small"),
            kind: STREAM,
            op: Some(op),
            flags: 0,
            buf_alloc: 262_144,
            fwd_cnt: 0,
        };
        more(&mut header);
        self.packet(vm, &header, payload);
    }

    fn packet(&mut self, vm: VmId, header: &Header, payload: &[u8]) {
        let mut read = |to: &mut [u8]| {
            to.copy_from_slice(&payload[..to.len()]);
            true
        };
        let len = payload.len();
        let handled = self.host.handle_packet(self.now, vm, header, len, &mut read, &Doorkeeper);
        if let Handled::Carry(_, message) = handled {
            let Kind::Data { len, .. } = message.kind else { panic!("{message:?}") };
            assert!(len as usize <= payload.len());
            self.messages.push_back((message, None));
        }
        self.carry();
    }

    /// Carries all messages of this host to its guests and to itself.
    fn carry(&mut self) {
        loop {
            while let Some(output) = self.host.poll_output(self.now) {
                match output {
                    Output::Message(_, HERE, message, request) => {
                        self.messages.push_back((message, Some(request)));
                    }
                    Output::Return(HERE, message) => self.messages.push_back((message, None)),
                    Output::Message(..) | Output::Return(..) => {}
                    Output::Gone(_) | Output::Listens(..) => {}
                    Output::Packets(vm) => {
                        while let Some((header, answer)) = self.host.poll_packet(vm) {
                            match answer {
                                None => self.hears(vm, &header),
                                Some(_) => assert_eq!(header.dst_cid, cid(vm)),
                            }
                        }
                    }
                }
            }
            let Some((message, request)) = self.messages.pop_front() else { return };
            if matches!(message.kind, Kind::Request { .. }) {
                let request = request.expect("behind it");
                assert_eq!(Request::parse(&request.emit()), Ok(request));
                self.host.handle_request(self.now, HERE, &message, &request, request.from.ip());
            } else {
                let met = self.host.handle_message(self.now, HERE, &message);
                assert_ne!(met.verdict, Verdict::Hold, "this fabric is orderly");
                self.gives(met, &message);
            }
        }
    }

    fn hears(&mut self, vm: VmId, header: &Header) {
        assert_eq!((header.dst_cid, header.len), (cid(vm), 0));
        if vm == A {
            assert_ne!(header.op, Some(Vsock::Reset), "the honest have no part in it");
        }
        if vm == B && header.op == Some(Vsock::Request) {
            self.calls.push_back(*header);
        }
    }

    /// Payload goes to its guest, as far as it has room; there is no more than a packet of it.
    fn gives(&mut self, met: Met, message: &Message) {
        let (Some(socket), Verdict::Deliver) = (met.socket, met.verdict) else { return };
        let Kind::Data { len, .. } = message.kind else { panic!("{message:?}") };
        let room = self.host.room_to_guest(socket).min(len.into());
        if room == 0 {
            return;
        }
        let header = self.host.give(self.now, socket, u32::try_from(room).expect("small"));
        let header = header.expect("it is there");
        if (header.dst_port, header.src_port) == self.honest {
            assert_eq!(room, u64::from(len), "B reads all");
            self.sent += len;
        }
    }

    fn does(&mut self, op: Op) {
        match op {
            Op::Packet(fields) => {
                let payload = vec![7; usize::from(fields.len) + usize::from(fields.more % 3)];
                let ports = (port(fields.src_port), host_port(fields.dst_port));
                let op = Vsock::ALL[usize::from(fields.op % 7)];
                self.says(C, op, ports, &payload, |header| {
                    header.len = if op == Vsock::Data { fields.len.into() } else { 0 };
                    header.flags = fields.flags.into();
                    header.buf_alloc = fields.buf_alloc;
                    header.fwd_cnt = fields.fwd_cnt.into();
                });
            }
            Op::Bytes(bytes, payload) => self.packet(C, &Header::parse(&bytes), &payload),
            Op::Ask(wish) => {
                let bytes = Asked { tag: 3, ask: wish.ask() }.emit();
                self.says(C, Vsock::Data, (port(0), control::PORT), &bytes, |_| {});
            }
            Op::Control(b) => self.says(C, Vsock::Data, (port(0), control::PORT), &b, |_| {}),
            Op::Message(said) => {
                let (message, again) = (said.message(), said.again);
                self.message(&message, again);
            }
            Op::Header(bytes) => {
                if let Ok(message) = Message::parse(&bytes) {
                    assert_eq!(message.emit(), *bytes);
                    self.message(&message, false);
                }
            }
            Op::Request { serial, edge, to } => {
                let request = Request { network: 5, from: at("10.0.0.9:7"), to: address(to) };
                self.request(serial, edge.into(), &request);
            }
            Op::Addresses(serial, bytes) => {
                if let Ok(request) = Request::parse(&bytes) {
                    self.request(serial, 1000, &request);
                }
            }
            Op::Loss(serial) => {
                let id = ShadowId { incarnation: STRANGE, serial: serial.into() };
                if let Some(socket) = self.host.socket(THERE, id, Side::Acceptor) {
                    self.host.handle_loss(self.now, socket);
                    self.carry();
                }
            }
            Op::Honest(len) => {
                let payload = vec![1; usize::from(len)];
                let expected = self.sent + u32::from(len);
                self.says(A, Vsock::Data, (SOCKET, control::SOCKETS), &payload, |_| {});
                assert_eq!(self.sent, expected, "what the honest send arrives");
                let read = self.sent;
                let ports = self.honest;
                self.says(B, Vsock::CreditUpdate, ports, &[], |header| header.fwd_cnt = read);
            }
            Op::Answers(accepts) => {
                for call in std::mem::take(&mut self.calls) {
                    let op = if accepts { Vsock::Response } else { Vsock::Reset };
                    self.says(B, op, (call.dst_port, call.src_port), &[], |_| {});
                }
            }
            Op::Wait(ms) => {
                self.now = self.now + Duration::from_millis(ms.into());
                self.host.handle_timeout(self.now);
                self.carry();
            }
        }
        assert!(self.host.sockets() <= 3 * TOE_SOCKETS_MAX);
        assert!(self.host.poll_timeout().is_none_or(|at| at > self.now), "a timer that is late");
    }

    /// The other host sends a message, and perhaps again as if it had been held.
    fn message(&mut self, message: &Message, again: bool) {
        let met = self.host.handle_message(self.now, THERE, message);
        self.gives(met, message);
        if again {
            let met = self.host.handle_held(self.now, THERE, message);
            self.gives(met, message);
        }
        self.carry();
    }

    fn request(&mut self, serial: u8, edge: u64, request: &Request) {
        let id = ShadowId { incarnation: STRANGE, serial: serial.into() };
        let message = Message { id, to: Side::Acceptor, kind: Kind::Request { edge } };
        self.host.handle_request(self.now, THERE, &message, request, request.from.ip());
        self.carry();
    }

    /// The honest close, and it is clean; the others go.
    fn ends(mut self) {
        assert_eq!(self.host.lies(A) + self.host.lies(B), 0);
        let (read, ports) = (self.sent, self.honest);
        for (vm, ports, fwd_cnt) in [(A, (SOCKET, control::SOCKETS), 0), (B, ports, read)] {
            let flags = SHUTDOWN_SEND;
            self.says(vm, Vsock::Shutdown, ports, &[], |header| {
                (header.flags, header.fwd_cnt) = (flags, fwd_cnt);
            });
        }
        let id = ShadowId { incarnation: OWN, serial: 0 };
        for side in [Side::Opener, Side::Acceptor] {
            assert!(self.host.socket(HERE, id, side).is_some(), "{side:?} has not closed it yet");
        }
        // No reset comes of it, so `hears` holds for A; B's is closed by itself.
        let both = SHUTDOWN_SEND | SHUTDOWN_RECEIVE;
        self.says(B, Vsock::Shutdown, ports, &[], |header| {
            (header.flags, header.fwd_cnt) = (both, read);
        });
        assert!(self.host.socket(HERE, id, Side::Acceptor).is_none());
        for vm in [A, B, C] {
            let _ = self.host.remove_guest(self.now, vm);
            self.carry();
        }
        // Sockets that they had closed before are given up when there is no answer.
        self.now = self.now + Duration::from_secs(2000);
        self.host.handle_timeout(self.now);
        self.carry();
        assert_eq!((self.host.sockets(), self.host.poll_timeout()), (0, None));
    }
}

impl Wish {
    fn ask(self) -> Ask {
        match self {
            Self::Connect { port: guest, from, to, native } => {
                let to = if native { at("10.0.0.2:9") } else { address(to) };
                let from = address(from);
                let from = if from.is_ipv4() == to.is_ipv4() { from } else { at("0.0.0.0:5") };
                Ask::Connect { program: Program::NONE, guest: port(guest), from, to }
            }
            Self::Listen { port: guest, at, v4 } => {
                Ask::Listen { guest: port(guest), at: address(at), v4 }
            }
            Self::Unlisten(guest) => Ask::Unlisten { guest: port(guest) },
            Self::Describe(guest, host) => {
                Ask::Describe(Ports { guest: port(guest), host: host_port(host) })
            }
            Self::Linger(guest, host, off) => {
                let ports = Ports { guest: port(guest), host: host_port(host) };
                if off { Ask::Unlinger(ports) } else { Ask::Linger(ports) }
            }
        }
    }
}

impl Said {
    /// Of a connection of its own, or with the name of one that is none of its business.
    fn message(self) -> Message {
        let (a, b) = (u64::from(self.a) % 300_000, u64::from(self.b));
        let kind = match self.kind % 9 {
            0 => Kind::Established { edge: a },
            1 | 2 => Kind::Data { offset: a, len: 1 + self.b % message::DATA_MAX },
            3 => Kind::Data { offset: 0, len: 1 + self.b % 1000 },
            4 => Kind::Credit { edge: a },
            5 => Kind::Fin { total: a % 4 * 100 },
            6 => Kind::Taken,
            7 => Kind::Probe { sent: a, finished: self.b & 1 == 0, edge: b },
            _ => Kind::Reset(Errno::ALL[self.a as usize % Errno::ALL.len()]),
        };
        let incarnation = if self.own { STRANGE } else { OWN };
        let to = if self.to_opener { Side::Opener } else { Side::Acceptor };
        Message { id: ShadowId { incarnation, serial: u64::from(self.serial % 16) }, to, kind }
    }
}
