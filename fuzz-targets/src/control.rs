//! Operators' connections: any bytes to the control socket of a real worker, in any pieces, by
//! several clients at once, while traffic passes that they may watch.
//!
//! Input: operations. Conditions: every line is answered once, in turn, by its own answer; a
//! command has its effect; a line that is too long ends its own connection; the state of a client
//! is gone when the client is.

use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use crate::noise;
use arbitrary::{Arbitrary, Unstructured};
use nightporter_api::{
    Direction, Only, RATE_LIMIT_MBIT_S_MAX, REQUEST_BYTES_MAX, Reply, Request, Status,
};
use nightporter_check::wire::{Segment, TcpFlags};
use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::port::{GuestConfig, PortConfig};
use nightporter_core::store::arena::Arena;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::control::{Control, ControlServer};
use nightporterd::port::Port;
use nightporterd::port::guest::GuestPort;
use nightporterd::port::tap::TapPort;
use nightporterd::port::vhost_user::{VhostUserConfig, VhostUserPort};
use nightporterd::vhost::listener::Access;
use nightporterd::worker::{Worker, WorkerConfig};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use zerocopy::IntoBytes;

const CLIENTS: usize = 4;
const OPS_MAX: usize = 150;
/// While it polls, a worker looks at its sockets once in so many turns.
const TURNS: usize = 16;
/// Looks after which everything that was sent has been read and answered.
const LOOKS: usize = 4;
const FLOWS: u16 = 3;
/// No machine is as slow as that.
const ANSWER_MAX: std::time::Duration = std::time::Duration::from_secs(30);
const VM: &str = "vm";
/// In this order.
const PORTS: [&str; 3] = ["uplink", "wire", VM];
const R: [u8; 6] = [2, 0, 0, 0, 0, 2];
const G: [u8; 6] = [2, 0, 0, 0, 0, 1];

#[derive(Arbitrary, Clone, Debug)]
enum Op {
    Says(u8, Line),
    /// Without its end, which the next line may be.
    SaysHalf(u8, Line, u8),
    SaysAll(u8, [Line; 3]),
    SaysNoMore(u8),
    Goes(u8),
    Traffic(u8, u16),
    Nothing,
}

#[derive(Arbitrary, Clone, Debug)]
enum Line {
    Status,
    Flows(Option<Name>, u64),
    Macs(Option<Name>, u16, Option<u64>),
    Flow(u8),
    Trace(u8),
    Capture(Name),
    Monitor(Name),
    Offload(Name, bool),
    CongestionOffload(Name, bool),
    RateLimit(Name, bool, Option<u32>),
    Drain(Name),
    /// One of the above with a byte of it changed.
    Changed(Plain, u8, u8),
    Text(String),
    Bytes(Vec<u8>),
    Long(u16),
    Nested(u8),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Plain {
    Status,
    Flow,
    Offload,
}

#[derive(Arbitrary, Clone, Debug)]
enum Name {
    Vm,
    Uplink,
    Any(String),
}

impl Name {
    fn text(&self) -> String {
        match self {
            Self::Vm => VM.to_owned(),
            Self::Uplink => PORTS[0].to_owned(),
            Self::Any(text) => text.clone(),
        }
    }
}

impl Line {
    /// As it goes over the socket, with its end.
    fn bytes(&self) -> Vec<u8> {
        let request = match self {
            Self::Status => Request::Status {},
            Self::Flows(vm, from) => {
                Request::Flows { vm: vm.as_ref().map(Name::text), from: *from }
            }
            Self::Macs(port, network, after) => {
                Request::Macs { port: port.as_ref().map(Name::text), from: (*network, *after) }
            }
            Self::Flow(id) => Request::Flow { id: (*id).into() },
            Self::Trace(id) => Request::Trace { id: (*id).into() },
            Self::Capture(port) => {
                Request::Capture { port: port.text(), snap_bytes: None, only: Only::default() }
            }
            Self::Monitor(vm) => Request::Monitor { vm: vm.text() },
            Self::Offload(vm, on) => Request::Offload { vm: vm.text(), on: *on },
            Self::CongestionOffload(vm, on) => {
                Request::CongestionOffload { vm: vm.text(), on: *on }
            }
            Self::RateLimit(vm, from_guest, mbit_s) => {
                let direction = if *from_guest { Direction::FromGuest } else { Direction::ToGuest };
                Request::RateLimit { vm: vm.text(), direction, mbit_s: *mbit_s }
            }
            Self::Drain(vm) => Request::Drain { vm: vm.text() },
            Self::Changed(plain, at, byte) => {
                let plain = match plain {
                    Plain::Status => Self::Status,
                    Plain::Flow => Self::Flow(1),
                    Plain::Offload => Self::Offload(Name::Vm, true),
                };
                let mut bytes = plain.bytes();
                let at = usize::from(*at) % bytes.len();
                bytes[at] = *byte;
                return bytes;
            }
            Self::Text(text) => return [text.as_bytes(), b"\n"].concat(),
            Self::Bytes(bytes) => return [bytes, &b"\n"[..]].concat(),
            Self::Long(n) => return [vec![b' '; usize::from(n % 9000)], vec![b'\n']].concat(),
            Self::Nested(n) => return [vec![b'['; 16 * usize::from(*n)], vec![b'\n']].concat(),
        };
        let bytes = serde_json::to_vec(&request).expect("plain data");
        assert_eq!(serde_json::from_slice::<Request>(&bytes).ok(), Some(request), "read back");
        [bytes, b"\n".to_vec()].concat()
    }
}

/// Judges one input.
pub fn run(data: &[u8]) {
    thread_local! {
        static HOST: RefCell<Host> = RefCell::new(Host::new());
    }
    HOST.with_borrow_mut(|host| {
        let mut u = Unstructured::new(data);
        host.resets();
        let mut clients: [Client; CLIENTS] = std::array::from_fn(|_| Client::new(host));
        for _ in 0..OPS_MAX {
            let Some(op) = (!u.is_empty()).then(|| Op::arbitrary(&mut u)) else { break };
            let Ok(op) = op else { break };
            host.obeys(&op, &mut clients);
            host.looks();
            for client in &mut clients {
                client.listens(host);
            }
        }
        drop(clients);
        host.looks();
        let status = Client::new(host).asks_status(host);
        assert!(status.ports.iter().all(|p| p.captures == 0), "somebody who is gone still watches");
    });
}

/// Operators at work.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<_> = (1..9).map(|n| noise(0x200 + n, 100 * n as usize)).collect();
    seeds.push(br#"{"cmd":"flows","vm":"vm","from":0}"#.to_vec());
    seeds
}

/// A daemon that never sleeps, with its control in the same thread, and the other ends of its
/// ports.
struct Host {
    worker: Worker,
    control: Control,
    /// The control socket's file, which has no name any more.
    socket: OwnedFd,
    wires: [File; 2],
    /// The last request about the VM.
    offload: bool,
    congestion_offload: bool,
    draining: bool,
}

impl Host {
    fn new() -> Self {
        let (records, pages) = (4, 16);
        // Once per thread: a worker's arena lives as long as the process.
        let memory: &'static mut [u64] = vec![0; Arena::layout_len(records, pages) / 8].leak();
        let arena = Arena::format(memory.as_mut_bytes(), records, pages, 1).expect("it fits");
        let config = EngineConfig::new(16, [1, 2, 3, 4]);
        let engine = Engine::new(Instant::ZERO, config, arena);
        let busy_poll = Duration::from_secs(1 << 30);
        let config = WorkerConfig { busy_poll, epoch: NonZeroU64::MIN };
        let mut worker = Worker::new(&config, engine).expect("a worker");
        let path = temporary("control");
        let operators = ControlServer::new(&path, Access::default()).expect("a socket");
        let control = Control::beside(&mut worker, operators).expect("epoll");
        let socket = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        std::fs::remove_file(&path).expect("the socket");
        let wires = [PORTS[0], PORTS[1]].map(|name| {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let (ours, theirs) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("two");
            let config = GuestConfig {
                mac: Some(G),
                ack_offload: true,
                budget_bytes: 16 << 14,
                flows_max: 8,
                ..GuestConfig::default()
            };
            let config = match name {
                name if name == PORTS[1] => PortConfig::guest(name, config),
                name => PortConfig::uplink(name),
            };
            worker.add_port(Port::Uplink(TapPort::from_fd(ours)), config).expect("a port");
            File::from(theirs)
        });
        worker.add_port(vm(), PortConfig::guest(VM, GuestConfig::default())).expect("a port");
        let socket = socket.expect("it is there");
        let mut host = Self {
            worker,
            control,
            socket,
            wires,
            offload: true,
            congestion_offload: false,
            draining: false,
        };
        host.looks();
        (0..FLOWS).for_each(|n| host.connects(n));
        let status = Client::new(&mut host).asks_status(&mut host);
        let flows = status.ports[1].vm.as_ref().map(|vm| vm.flows["on"]);
        assert_eq!(flows, Some(FLOWS.into()), "there is something to look at");
        host
    }

    /// As an input expects it.
    fn resets(&mut self) {
        let mut client = Client::new(self);
        client.sends(&Line::Offload(Name::Vm, true).bytes());
        client.sends(&Line::CongestionOffload(Name::Vm, false).bytes());
        client.sends(&Line::RateLimit(Name::Vm, false, None).bytes());
        client.sends(&Line::RateLimit(Name::Vm, true, None).bytes());
        self.looks();
        client.listens(self);
        assert!(self.offload && !self.draining, "the offload is not on");
    }

    fn looks(&mut self) {
        for _ in 0..LOOKS * TURNS {
            self.control.turn_at_once().expect("the event loop");
            self.worker.turn_at_once().expect("the event loop");
        }
        for wire in &mut self.wires {
            while wire.read(&mut [0; 4096]).is_ok_and(|n| n > 0) {}
        }
    }

    fn obeys(&mut self, op: &Op, clients: &mut [Client; CLIENTS]) {
        let place = |n: u8| usize::from(n) % CLIENTS;
        match op {
            Op::Says(n, line) => clients[place(*n)].sends(&line.bytes()),
            Op::SaysHalf(n, line, cut) => {
                let bytes = line.bytes();
                clients[place(*n)].sends(&bytes[..usize::from(*cut).min(bytes.len() - 1)]);
            }
            Op::SaysAll(n, lines) => {
                let bytes: Vec<u8> = lines.iter().flat_map(Line::bytes).collect();
                clients[place(*n)].sends(&bytes);
            }
            Op::SaysNoMore(n) => clients[place(*n)].says_no_more(),
            Op::Goes(n) => clients[place(*n)] = Client::new(self),
            Op::Traffic(n, len) => {
                let data = segment(R, u16::from(*n) % FLOWS, TcpFlags::ACK, 1, 1, len % 1000);
                self.puts(0, &data);
            }
            Op::Nothing => {}
        }
    }

    fn puts(&mut self, wire: usize, frame: &[u8]) {
        let packet = [&VirtioNetHdr::default().emit(), frame].concat();
        // A full socket is a full wire.
        let _ = self.wires[wire].write(&packet);
    }

    /// A handshake between the two wires.
    fn connects(&mut self, n: u16) {
        self.puts(0, &segment(R, n, TcpFlags::SYN, 0, 0, 0));
        self.looks();
        self.puts(1, &segment(G, n, TcpFlags::SYN | TcpFlags::ACK, 0, 1, 0));
        self.looks();
        self.puts(0, &segment(R, n, TcpFlags::ACK, 1, 1, 0));
        self.looks();
    }

    /// The expected answer to a request; commands are remembered.
    fn expects(&mut self, line: &[u8], reply: &Reply) {
        if let Reply::Error { what, fix } = reply {
            assert!(!what.is_empty() && !fix.is_empty(), "an error without words");
        }
        let Ok(request) = serde_json::from_slice::<Request>(line) else {
            let refused = matches!(reply, Reply::Error { what, .. } if what.contains("request"));
            assert!(refused, "{reply:?} to what is no request");
            return;
        };
        let is_error = matches!(reply, Reply::Error { .. });
        let fits = match &request {
            Request::Status {} => matches!(reply, Reply::Status(s) if self.is_right(s)),
            Request::Flows { vm, from } => match reply {
                Reply::Flows(page) => page.flows.iter().all(|f| f.id >= *from),
                _ => is_error && vm.as_ref().is_some_and(|vm| vm != VM),
            },
            Request::Macs { port, .. } => match reply {
                Reply::Macs(page) => page.macs.iter().all(|found| {
                    let name = found.port.as_str();
                    PORTS.contains(&name) && port.as_ref().is_none_or(|port| port == name)
                }),
                _ => is_error && port.as_ref().is_some_and(|port| !PORTS.contains(&port.as_str())),
            },
            Request::Flow { id } => match reply {
                Reply::Flow(flow) => flow.id == *id,
                _ => is_error, // in time they go
            },
            // This worker has no registry.
            Request::Stations { .. } => {
                matches!(reply, Reply::Stations(page) if page.stations.is_empty())
            }
            Request::Trace { id } => match reply {
                Reply::Stream {} => *id < FLOWS.into(),
                _ => is_error,
            },
            Request::Capture { port, .. } => match reply {
                Reply::Stream {} => PORTS.contains(&port.as_str()),
                _ => is_error && !PORTS.contains(&port.as_str()),
            },
            Request::Monitor { vm } => match reply {
                Reply::Stream {} => vm == VM,
                _ => is_error && vm != VM,
            },
            Request::Change { .. } => is_error, // this worker has no file to go by
            Request::RateLimit { vm, mbit_s, .. } => {
                let good = mbit_s.is_none_or(|rate| (1..=RATE_LIMIT_MBIT_S_MAX).contains(&rate));
                match reply {
                    Reply::Done {} => vm == VM && good,
                    _ => is_error && (vm != VM || !good),
                }
            }
            Request::Offload { vm, .. }
            | Request::CongestionOffload { vm, .. }
            | Request::Drain { vm } => match reply {
                Reply::Done {} => vm == VM,
                _ => is_error && vm != VM,
            },
        };
        assert!(fits, "{reply:?} to {request:?}");
        match request {
            Request::Offload { vm, on } if vm == VM => {
                self.offload = on;
                self.draining &= !on;
            }
            Request::CongestionOffload { vm, on } if vm == VM => self.congestion_offload = on,
            Request::Drain { vm } if vm == VM => self.draining = true,
            _ => {}
        }
    }

    fn is_right(&self, status: &Status) -> bool {
        let names = status.ports.iter().map(|p| p.name.as_str()).eq(PORTS);
        let vm = status.ports[2].vm.as_ref();
        names
            && vm.is_some_and(|vm| {
                let controls = self.offload && self.congestion_offload && !self.draining;
                (vm.offload, vm.draining) == (self.offload, self.draining)
                    && (vm.congestion_offload, vm.controls_congestion)
                        == (self.congestion_offload, controls)
            })
    }
}

fn temporary(what: &str) -> PathBuf {
    let thread = std::thread::current().id();
    let name = format!("nightporter-fuzz-{what}-{}-{thread:?}", std::process::id());
    std::env::temp_dir().join(name)
}

/// A VM that was not started.
fn vm() -> Port {
    let socket = temporary("vm");
    let config = VhostUserConfig {
        name: VM.to_owned(),
        socket: socket.clone(),
        access: Access::default(),
        mac: None,
        mtu: None,
        queue_pairs: 1,
        allow_unsealed_memory: true,
        memory_max: None,
        memory_is_limited: false,
    };
    let port = VhostUserPort::new(&config).expect("a port");
    std::fs::remove_file(&socket).expect("the socket");
    Port::Guest(Box::new(GuestPort::new(port, None)))
}

/// A segment of connection `n`, of R or of G; numbers are relative to zero.
fn segment(from: [u8; 6], n: u16, flags: TcpFlags, seq: u32, ack: u32, len: u16) -> Vec<u8> {
    let port = |mac| if mac == R { 40_000 + n } else { 80 };
    let to = if from == R { G } else { R };
    let segment = Segment {
        src_mac: from,
        dst_mac: to,
        src: [10, 0, 0, from[5]].into(),
        dst: [10, 0, 0, to[5]].into(),
        src_port: port(from),
        dst_port: port(to),
        seq,
        ack,
        flags,
        window: 20_000,
        ..Segment::default()
    };
    segment.frame(&vec![7; len.into()]).bytes
}

/// One connection to the control socket.
struct Client {
    stream: UnixStream,
    /// Requests without an answer.
    said: Vec<u8>,
    heard: Vec<u8>,
    /// From here on output is a stream, and requests do not count.
    streaming: bool,
    /// The worker has closed it, or is about to; or this end did.
    over: bool,
}

impl Client {
    fn new(host: &mut Host) -> Self {
        let path = format!("/proc/self/fd/{}", host.socket.as_raw_fd());
        let stream = UnixStream::connect(path).expect("it listens");
        stream.set_nonblocking(true).expect("a socket");
        host.looks();
        Self { stream, said: Vec::new(), heard: Vec::new(), streaming: false, over: false }
    }

    fn sends(&mut self, bytes: &[u8]) {
        if self.over || self.streaming {
            // It may have been closed, and need not be.
            let _ = self.stream.write(bytes);
            return;
        }
        self.stream.write_all(bytes).expect("the worker listens");
        self.said.extend(bytes);
    }

    fn says_no_more(&mut self) {
        // It may have been closed before.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        self.over = true;
    }

    /// Reads all that there is; whether nothing more can come.
    fn hears(&mut self) -> bool {
        let mut chunk = [0; 1 << 16];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return true,
                Ok(n) => self.heard.extend(&chunk[..n]),
                Err(_) => return false,
            }
        }
    }

    /// The end of the next answer. A status waits for the sockets' worker, a thread of its own, and
    /// other requests wait behind it.
    fn next_answer(&mut self, host: &mut Host) -> usize {
        let begun = std::time::Instant::now();
        loop {
            if let Some(end) = self.heard.iter().position(|b| *b == b'\n') {
                return end;
            }
            assert!(begun.elapsed() < ANSWER_MAX, "no answer within {ANSWER_MAX:?}");
            host.looks();
            self.hears();
        }
    }

    /// Every request has its answer by now.
    fn listens(&mut self, host: &mut Host) {
        let at_end = self.hears();
        let wants_more = !self.over;
        while !self.streaming && !self.said.is_empty() {
            let whole = self.said.iter().position(|b| *b == b'\n').map(|at| at + 1);
            let len = whole.filter(|len| *len <= REQUEST_BYTES_MAX);
            let too_long = len.is_none() && self.said.len() >= REQUEST_BYTES_MAX;
            if len.is_none() && !too_long {
                break;
            }
            let end = self.next_answer(host);
            let line: Vec<u8> = self.heard.drain(..=end).collect();
            let reply: Reply = serde_json::from_slice(&line).expect("an answer that can be read");
            if let Some(len) = len {
                let request: Vec<u8> = self.said.drain(..len).collect();
                host.expects(&request, &reply);
                self.streaming = matches!(reply, Reply::Stream {});
            } else {
                assert!(matches!(reply, Reply::Error { .. }), "{reply:?} to a line without end");
                self.said.clear();
                self.over = true;
            }
        }
        assert!(self.streaming || self.heard.is_empty(), "an answer to nothing");
        assert!(!at_end || self.over || !wants_more, "the worker hung up");
        assert!(at_end || !self.over || self.streaming || wants_more, "the worker hangs on");
        if self.streaming {
            self.heard.clear();
        }
    }

    fn asks_status(&mut self, host: &mut Host) -> Status {
        self.sends(&Line::Status.bytes());
        let end = self.next_answer(host);
        match serde_json::from_slice(&self.heard.drain(..=end).collect::<Vec<u8>>()) {
            Ok(Reply::Status(status)) => *status,
            other => panic!("{other:?} to a question for the status"),
        }
    }
}
