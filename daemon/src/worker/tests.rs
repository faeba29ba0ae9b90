//! A worker whose ports are socket pairs: one frame with its header per packet, as on a tap.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use nightporter_api::{PortStatus, Reply, Request, ToeStatus};
use nightporter_core::engine::{AddPortError, EngineConfig};
use nightporter_core::limits::{FRAME_BYTES_MAX, FRAMES_PER_PORT};
use nightporter_core::port::{GuestConfig, PortConfig, Vlans};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::census::FlowSums;
use super::guests::ANNOUNCEMENTS_PER_TURN;
use super::orders::{Order, Report, worker_mail};
use super::survey::{ASKING_MAX, PORTS_PER_TURN};
use super::*;
use crate::arena_file::{self, ArenaFile};
use crate::control::{Control, ControlServer, ControlThread, Endpoints, MetricsServer};
use crate::port::Port;
use crate::port::guest::GuestPort;
use crate::port::tap::TapPort;
use crate::port::vhost_user::{VhostUserConfig, VhostUserPort};
use crate::sockets::orders::{self, SocketsStatus, sockets_mail};
use crate::vhost::listener::Access;

const A: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
const B: [u8; 6] = [2, 0, 0, 0, 0, 0xb];

/// A worker with as many uplinks as it has peers.
struct World {
    worker: Worker,
    /// Once there are operators.
    control: Option<Control>,
    /// Or control on a thread of its own.
    thread: Option<ControlThread>,
    peers: Vec<File>,
    dir: PathBuf,
    _lock: ArenaFile,
}

impl World {
    fn new(name: &str, ports: usize) -> Self {
        let dir = std::env::temp_dir().join(format!("np-worker-{}-{name}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let size = arena_file::size_for(1, 1);
        let (arena, lock) = arena_file::open(&dir.join("arena"), size).unwrap();
        let config = EngineConfig::new(1, [1, 2, 3, 4]);
        let engine = Engine::new(monotonic_now(), config, arena);
        let config = WorkerConfig { busy_poll: Duration::ZERO, epoch: NonZeroU64::MIN };
        let mut worker = Worker::new(&config, engine).unwrap();
        let mut peers = Vec::new();
        for port in 0..ports {
            let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
            let (ours, theirs) =
                socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
            let config = PortConfig::uplink(format!("port{port}"));
            worker.add_port(Port::Uplink(TapPort::from_fd(ours)), config).unwrap();
            peers.push(File::from(theirs));
        }
        Self { worker, control: None, thread: None, peers, dir, _lock: lock }
    }

    fn send(&mut self, port: usize, frame: &[u8]) {
        let packet = [&VirtioNetHdr::default().emit(), frame].concat();
        assert_eq!(self.peers[port].write(&packet).unwrap(), packet.len());
    }

    /// All frames that have come out of a port.
    fn received(&mut self, port: usize) -> Vec<Vec<u8>> {
        let mut buf = vec![0; 70_000];
        let mut frames = Vec::new();
        while let Ok(n) = self.peers[port].read(&mut buf) {
            frames.push(buf[VirtioNetHdr::LEN..n].to_vec());
        }
        frames
    }

    fn turn(&mut self) {
        self.worker.turn().unwrap();
    }

    /// One turn of control, and of the worker.
    fn turn_of_both(&mut self) {
        self.control.iter_mut().for_each(|control| control.turn_at_once().unwrap());
        self.worker.turn_at_once().unwrap();
    }

    fn port(&self, port: usize) -> nightporter_api::PortStatus {
        let (path, id) = (&self.worker.path, PortId(u16::try_from(port).unwrap()));
        path.port_status(monotonic_now(), id, path.ports.of(id), &FlowSums::default())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A frame of 60 bytes that is nothing but Ethernet, with a number in it.
fn frame(dst: [u8; 6], src: [u8; 6], n: u16) -> Vec<u8> {
    let mut frame = [dst, src].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.extend(n.to_be_bytes());
    frame.resize(60, 0);
    frame
}

#[test]
fn an_unknown_station_is_looked_for_everywhere_and_its_answer_goes_to_one_port() {
    let mut w = World::new("learn", 3);
    w.send(0, &frame(B, A, 1));
    w.turn();
    assert_eq!(w.received(1), [frame(B, A, 1)]);
    assert_eq!(w.received(2), [frame(B, A, 1)]);
    w.send(1, &frame(A, B, 2));
    w.turn();
    assert_eq!(w.received(0), [frame(A, B, 2)]);
    assert!(w.received(2).is_empty());
    let status = w.port(0);
    assert_eq!((status.frames_from_port, status.bytes_from_port), (1, 60));
    assert_eq!((status.frames_to_port, status.bytes_to_port), (1, 60));
}

#[test]
fn a_busy_port_gets_64_frames_of_a_turn_and_keeps_its_order() {
    let mut w = World::new("bounded", 3);
    w.send(1, &frame(A, B, 0));
    w.turn();
    w.received(0);
    for n in 0..100 {
        w.send(0, &frame(B, A, n));
    }
    w.send(2, &frame(B, [2, 0, 0, 0, 0, 0xc], 999));
    w.turn();
    let first = w.received(1);
    assert_eq!(first.len(), FRAMES_PER_PORT + 1, "and the quiet port's frame");
    w.turn();
    let second = w.received(1);
    let all: Vec<_> = first[..FRAMES_PER_PORT].iter().chain(&second).cloned().collect();
    assert_eq!(all, (0..100).map(|n| frame(B, A, n)).collect::<Vec<_>>());
}

#[test]
fn long_frames_of_a_busy_port_end_its_turn_after_128_kib() {
    let mut w = World::new("bytes", 3);
    w.send(1, &frame(A, B, 0));
    w.turn();
    w.received(0);
    let long = |n| {
        let mut frame = frame(B, A, n);
        frame.resize(30_000, 0);
        frame
    };
    let numbers = |frames: &[Vec<u8>]| -> Vec<u8> { frames.iter().map(|f| f[15]).collect() };
    (0..6).for_each(|n| w.send(0, &long(n)));
    w.turn();
    assert_eq!(numbers(&w.received(1)), [0, 1, 2, 3, 4], "150,000 bytes");
    w.turn();
    assert_eq!(numbers(&w.received(1)), [5]);
}

#[test]
fn an_uplink_that_takes_nothing_costs_its_own_frames_only() {
    let mut w = World::new("full", 3);
    w.send(1, &frame(A, B, 0));
    w.turn();
    // Nobody reads port 1. Its socket buffer is full long before this ends.
    for n in 0..2000 {
        w.send(0, &frame(B, A, n));
        w.turn();
    }
    let dropped = w.port(1).drops["queue_full"];
    assert_eq!(dropped + w.port(1).frames_to_port, 2000);
    assert!(w.received(1).len() as u64 == 2000 - dropped && dropped > 0);
    w.send(0, &frame([0xff; 6], A, 1));
    w.turn();
    assert_eq!(w.received(2).pop().unwrap(), frame([0xff; 6], A, 1));
}

#[test]
fn an_uplink_that_disappears_is_down_and_the_others_go_on() {
    let mut w = World::new("gone", 3);
    let (null, peer) = (File::open("/dev/null").unwrap(), 1);
    w.peers[peer] = null;
    w.turn();
    assert!(!w.port(1).link);
    w.send(0, &frame(B, A, 1));
    w.turn();
    assert_eq!(w.received(2), [frame(B, A, 1)]);
}

#[test]
fn a_frame_longer_than_any_is_dropped_and_counted() {
    let mut w = World::new("long", 2);
    let mut long = frame(B, A, 1);
    long.resize(FRAME_BYTES_MAX + 500, 7);
    w.send(0, &long);
    w.turn();
    assert!(w.received(1).is_empty());
    assert_eq!(w.port(0).drops["too_big"], 1);
}

/// A client of the control socket who has asked for a status this many times.
fn asks_for_statuses(w: &mut World, times: usize) -> UnixStream {
    let path = w.dir.join("control");
    let operators = ControlServer::new(&path, Access::default()).unwrap();
    w.control = Some(Control::beside(&mut w.worker, operators).unwrap());
    let mut client = UnixStream::connect(&path).unwrap();
    let mut line = serde_json::to_vec(&Request::Status {}).unwrap();
    line.push(b'\n');
    client.write_all(&line.repeat(times)).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    client.set_nonblocking(true).unwrap();
    client
}

/// The names of the ports in each status that it got.
fn statuses(said: &[u8]) -> Vec<Vec<String>> {
    let lines = said.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    let names = |line| match serde_json::from_slice(line).unwrap() {
        Reply::Status(status) => status.ports.into_iter().map(|port| port.name).collect(),
        other => panic!("not a status: {other:?}"),
    };
    lines.map(names).collect()
}

#[test]
fn who_asks_for_a_status_when_another_has_begun_gets_one_as_well() {
    let mut w = World::new("census", 1);
    let mut client = asks_for_statuses(&mut w, 2);
    w.worker.executor.survey.begin();
    let mut said = Vec::new();
    while client.read_to_end(&mut said).is_err() {
        w.turn_of_both();
    }
    assert_eq!(statuses(&said), [["port0"], ["port0"]]);
}

#[test]
fn a_status_of_many_ports_takes_many_turns_and_is_formatted_by_control() {
    const PORTS: usize = 5 * PORTS_PER_TURN + 3;
    let mut w = World::new("survey", PORTS);
    let mut client = asks_for_statuses(&mut w, 2);
    let (mut said, mut seen, mut turns) = (Vec::new(), 0, 0);
    while client.read_to_end(&mut said).is_err() {
        let before = w.worker.executor.survey.looked_at();
        w.turn_of_both();
        let now = w.worker.executor.survey.looked_at();
        assert!(now <= before + PORTS_PER_TURN);
        (seen, turns) = (seen + now.saturating_sub(before), turns + 1);
    }
    let all: Vec<_> = (0..PORTS).map(|port| format!("port{port}")).collect();
    assert_eq!(statuses(&said), [all.clone(), all]);
    assert_eq!(seen, 2 * 5 * PORTS_PER_TURN, "and the last three in turns of their own");
    assert!(turns > 2 * (5 + 1), "the answers come in others still: {turns}");
}

#[test]
fn a_scrape_costs_the_worker_a_status_and_another_request_nothing() {
    let mut w = World::new("scrape", 1);
    let metrics = MetricsServer::new("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = metrics.address();
    let endpoints = Endpoints { metrics: Some(metrics), ..Endpoints::default() };
    let (control, mail) = Control::new(endpoints).unwrap();
    w.thread = Some(control.start(&mail).unwrap());
    w.worker.set_mail(mail).unwrap();
    let ask = |path: &str| {
        let mut client = TcpStream::connect(at).unwrap();
        write!(client, "GET {path} HTTP/1.1\r\n\r\n").unwrap();
        client
    };
    let mut said = String::new();
    ask("/nothing").read_to_string(&mut said).unwrap();
    assert!(said.starts_with("HTTP/1.1 404 "), "without a turn: {said}");
    let (mut scrape, mut said) = (ask("/metrics"), Vec::new());
    scrape.set_nonblocking(true).unwrap();
    while scrape.read_to_end(&mut said).is_err() {
        w.worker.turn_at_once().unwrap();
    }
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("nightporter_link_up{port=\"port0\",kind=\"tap\"} 1"), "{said}");
}

#[test]
fn a_daemon_that_has_lost_control_ends_with_an_error() {
    let mut w = World::new("lost", 1);
    let (mail, control) = worker_mail().unwrap();
    let bell = mail.bell();
    w.worker.set_mail(mail).unwrap();
    drop(control);
    bell.ring();
    assert!(w.worker.run().is_err());
}

#[test]
fn of_many_requests_one_is_executed_between_two_turns() {
    const CLIENTS: u64 = 5;
    let mut w = World::new("requests", 1);
    let (mail, mut control) = worker_mail().unwrap();
    w.worker.set_mail(mail).unwrap();
    for client in 0..CLIENTS {
        control.order(Order::Request(client, Request::Flows { vm: None, from: 0 }));
    }
    for client in 0..CLIENTS {
        w.worker.turn_at_once().unwrap();
        let of = |report: &Option<Report>| match report {
            Some(Report::Reply(client, Reply::Flows(_))) => Some(*client),
            _ => None,
        };
        assert_eq!(of(&control.take().unwrap()), Some(client));
        assert!(control.take().unwrap().is_none(), "one for a turn");
    }
}

#[test]
fn the_worker_hears_of_nobody_whose_request_it_never_had() {
    const MANY: u64 = 3000; // more than the mail has room for
    let (mut mail, mut control) = worker_mail().unwrap();
    for client in 0..MANY {
        control.order(Order::Request(client, Request::Status {}));
        control.forget(client);
    }
    let mut orders = Vec::new();
    while let Some(order) = mail.take().unwrap() {
        orders.push(order);
        control.take().unwrap(); // hands over what waited
    }
    let asked = orders.iter().filter(|it| matches!(it, Order::Request(..))).count();
    let gone = orders.iter().filter(|it| matches!(it, Order::Forget(_))).count();
    assert!(asked == gone && asked < 1024, "{asked} and {gone}");
}

fn device(w: &World, name: &str) -> VhostUserConfig {
    VhostUserConfig {
        name: name.into(),
        socket: w.dir.join(name),
        access: Access::default(),
        mac: None,
        mtu: None,
        queue_pairs: 1,
        allow_unsealed_memory: false,
        memory_max: None,
        memory_is_limited: false,
    }
}

/// The port of a VM whose front-end has just connected.
fn front_end(w: &mut World, name: &str) -> UnixStream {
    let device = device(w, name);
    let port = GuestPort::new(VhostUserPort::new(&device).unwrap(), None);
    let config = PortConfig::guest(name, GuestConfig::default());
    w.worker.add_port(Port::Guest(Box::new(port)), config).unwrap();
    let stream = UnixStream::connect(&device.socket).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

/// So many front-ends that have been let in.
fn front_ends(w: &mut World, count: usize) -> Vec<UnixStream> {
    let streams = (0..count).map(|n| front_end(w, &format!("vm{n}"))).collect();
    (0..count).for_each(|_| w.worker.turn_at_once().unwrap());
    streams
}

const GET_FEATURES: u32 = 1;
const SET_OWNER: u32 = 3;

/// A message without a body.
fn message(code: u32) -> Vec<u8> {
    [code, 1, 0].map(u32::to_ne_bytes).concat()
}

fn has_answer(mut stream: &UnixStream) -> bool {
    stream.read(&mut [0; 20]).is_ok()
}

#[test]
fn front_ends_of_many_vms_take_turns() {
    const VMS: usize = 40;
    let mut w = World::new("front-ends", 0);
    let mut streams = front_ends(&mut w, VMS);
    streams.iter_mut().for_each(|stream| stream.write_all(&message(GET_FEATURES)).unwrap());
    let mut answered = Vec::new();
    while answered.iter().sum::<usize>() < VMS {
        w.worker.turn_at_once().unwrap();
        answered.push(streams.iter().filter(|stream| has_answer(stream)).count());
        assert!(answered.len() < VMS, "{answered:?}");
    }
    assert_eq!(answered, [16, 16, 8], "nobody is passed over twice");
}

#[test]
fn front_ends_that_always_have_more_to_say_keep_nobody_from_being_heard() {
    const TALKERS: usize = 16;
    /// Of messages of which a front-end has 64 heard in a turn.
    const TURNS: usize = 40;
    let mut w = World::new("talkers", 0);
    let mut streams = front_ends(&mut w, TALKERS + 1);
    let mut quiet = streams.pop().unwrap();
    let all = message(SET_OWNER).repeat(64 * TURNS);
    streams.iter_mut().for_each(|stream| stream.write_all(&all).unwrap());
    quiet.write_all(&message(GET_FEATURES)).unwrap();
    let waited = (0..TURNS).find(|_| {
        w.worker.turn_at_once().unwrap();
        has_answer(&quiet)
    });
    assert_eq!(waited, Some(1), "in the second turn");
}

#[test]
fn a_port_that_cannot_be_waited_for_was_not_added() {
    let mut w = World::new("unwatched", 1);
    let add = |w: &mut World, fd: OwnedFd| {
        w.worker.add_port(Port::Uplink(TapPort::from_fd(fd)), PortConfig::uplink("late"))
    };
    let file = File::create(w.dir.join("file")).unwrap(); // epoll(7) takes none
    assert_eq!(add(&mut w, file.into()), Err(AddPortError::TooManyPorts));
    let (ours, _theirs) = UnixStream::pair().unwrap();
    assert_eq!(add(&mut w, ours.into()), Ok(PortId(1)), "its name and number are free");
}

#[test]
fn what_is_announced_for_a_trunk_is_told_in_each_of_its_vlans_some_after_each_turn() {
    let mut w = World::new("announced", 1);
    let vlans: Vec<u16> = (100..1_700).collect(); // more than a guest may send at once
    let device = device(&w, "vm");
    let port = GuestPort::new(VhostUserPort::new(&device).unwrap(), None);
    let policy = GuestConfig { vlans: Vlans::Trunk(vlans.clone()), ..GuestConfig::default() };
    let config = PortConfig::guest("vm", policy);
    let vm = w.worker.add_port(Port::Guest(Box::new(port)), config).unwrap();
    w.worker.path.announce(monotonic_now(), vm, B);
    let mut told = Vec::new();
    while told.len() < vlans.len() {
        w.turn();
        let frames = w.received(0);
        assert!(frames.len() <= ANNOUNCEMENTS_PER_TURN, "{}", frames.len());
        for frame in frames {
            assert_eq!((&frame[6..12], &frame[16..18]), (&B[..], &[0x80, 0x35][..]));
            told.push(u16::from_be_bytes([frame[14], frame[15]]));
        }
    }
    assert_eq!(told, vlans);
    while !w.worker.path.announcements.is_empty() {
        w.turn();
    }
    assert!(w.received(0).is_empty());
}

#[test]
fn a_worker_without_the_sockets_worker_that_it_had_ends() {
    let mut w = World::new("half", 0);
    let (frames, sockets) = sockets_mail().unwrap();
    let bell = frames.bell();
    w.worker.set_sockets(frames).unwrap();
    drop(sockets);
    bell.ring();
    let error = w.worker.run().unwrap_err();
    assert!(error.to_string().contains("sockets"), "{error}");
}

#[test]
fn a_status_does_not_wait_for_long_for_the_sockets_worker_and_says_what_is_missing() {
    let mut w = World::new("late", 1);
    let (frames, mut sockets) = sockets_mail().unwrap();
    w.worker.set_sockets(frames).unwrap();
    let (mail, mut control) = worker_mail().unwrap();
    w.worker.set_mail(mail).unwrap();
    let changes = |n| Box::new(SocketsStatus { listener_changes: n, ..SocketsStatus::default() });
    let mut asked = Vec::new();
    let mut begin = |w: &mut World| {
        w.worker.executor.survey.ask_for_scrapes();
        w.worker.turn_at_once().unwrap();
        while let Some(order) = sockets.take().unwrap() {
            let orders::Order::Survey(number) = order else { panic!("{order:?}") };
            asked.push(number);
        }
        asked.clone()
    };
    let mut answer = |w: &mut World| match control.take().unwrap() {
        Some(Report::Status { status, .. }) => Some((status.listener_changes, status.sockets_late)),
        None => None,
        other => panic!("{other:?} at {:?}", w.worker.now),
    };
    // In time.
    let numbers = begin(&mut w);
    w.worker.path.sockets.handle_status(numbers[0], changes(7));
    w.worker.turn_at_once().unwrap();
    assert_eq!(answer(&mut w), Some((7, false)));
    // Not in time: the worker wakes by itself, and counters stay.
    begin(&mut w);
    assert_eq!(answer(&mut w), None);
    let wakes = w.worker.executor.poll_timeout(&w.worker.path).unwrap();
    assert!(wakes > w.worker.now && wakes <= monotonic_now() + ASKING_MAX);
    let Worker { executor, path, .. } = &mut w.worker;
    executor.go_on_surveying(wakes, path);
    assert_eq!(answer(&mut w), Some((7, true)));
    // The late answer is no answer to the next question.
    let numbers = begin(&mut w);
    w.worker.path.sockets.handle_status(numbers[1], changes(8));
    w.worker.turn_at_once().unwrap();
    assert_eq!(answer(&mut w), None);
    w.worker.path.sockets.handle_status(numbers[2], changes(9));
    w.worker.turn_at_once().unwrap();
    assert_eq!(answer(&mut w), Some((9, false)));
}

#[test]
fn a_status_gives_nobody_the_sockets_of_the_vm_that_had_the_number_before() {
    let mut w = World::new("forgotten", 0);
    let _stream = front_end(&mut w, "vm0");
    let (frames, _sockets) = sockets_mail().unwrap();
    w.worker.set_sockets(frames).unwrap();
    let (mail, mut control) = worker_mail().unwrap();
    w.worker.set_mail(mail).unwrap();
    for (number, goes) in [(1, false), (2, true)] {
        w.worker.executor.survey.ask_for_scrapes();
        w.worker.turn_at_once().unwrap();
        if goes {
            w.worker.executor.survey.forget_port(PortId(0)); // and another comes at once
        }
        let devices = [(PortId(0), ToeStatus::default())].into();
        let status = SocketsStatus { devices, ..SocketsStatus::default() };
        w.worker.path.sockets.handle_status(number, Box::new(status));
        w.worker.turn_at_once().unwrap();
        let mut statuses = Vec::new();
        while let Some(report) = control.take().unwrap() {
            if let Report::Status { status, .. } = report {
                statuses.extend(status.ports);
            }
        }
        let [PortStatus { vm: Some(vm), .. }] = &statuses[..] else { panic!("{statuses:?}") };
        assert_eq!(vm.toe.is_none(), goes);
    }
}
