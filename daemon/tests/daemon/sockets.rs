//! A guest with a socket device: a driver of ours that speaks vsock as Linux does, and processes
//! in it that read, write, shut down and close.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use nightporter_core::toe::control::{self, Ask, Asked, Program};
use nightporter_core::toe::vsock::Ports;
use nightporter_core::wire::vsock::{
    HOST_CID, Header, LEN, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, STREAM,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vhost::vhost_user::message::FrontendReq as Req;

use crate::driver::{Driver, GUEST_BASE, Ram, WRITE};
use crate::guest::{EVENTS, RAM_LEN, serve, set_up, stop_and_go_on, stuff, tell};
use crate::host::LIMIT;

/// As Linux has them: a page for a packet to the guest, 64 KiB of payload from it at most.
const RX_LEN: u64 = 4096;
const TX_LEN: u64 = 65536 + LEN as u64;
const RX_BUFFERS: u64 = GUEST_BASE + (1 << 20);
const TX_BUFFERS: u64 = GUEST_BASE + (3 << 20);
const TX_COUNT: u64 = 64;
pub(crate) const QUEUE_SIZE: u16 = 128;
/// Linux's default.
const BUF_ALLOC: u32 = 256 << 10;
/// The process that asks has this port, and the next one the next.
const CONTROL: u32 = 1024;

/// A socket in the guest.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) is_open: bool,
    /// The host has reset it.
    pub(crate) is_reset: bool,
    /// The other stream has ended.
    pub(crate) has_ended: bool,
    /// Bytes that came and were not read.
    pub(crate) unread: Vec<u8>,
    /// All that was read.
    pub(crate) got: Vec<u8>,
    /// Its process reads all that comes.
    pub(crate) reads: bool,
    to_send: VecDeque<u8>,
    sent: u32,
    given: u32,
    host_alloc: u32,
    host_fwd: u32,
    told: u32,
    buf_alloc: u32,
}

impl Socket {
    fn new(buf_alloc: u32) -> Self {
        Self {
            is_open: false,
            is_reset: false,
            has_ended: false,
            unread: Vec::new(),
            got: Vec::new(),
            reads: true,
            to_send: VecDeque::new(),
            sent: 0,
            given: 0,
            host_alloc: 0,
            host_fwd: 0,
            told: 0,
            buf_alloc,
        }
    }

    fn read(&mut self) {
        self.got.append(&mut self.unread);
    }

    fn fwd_cnt(&self) -> u32 {
        u32::try_from(self.got.len()).unwrap()
    }

    fn room(&self) -> usize {
        (self.host_alloc - self.sent.wrapping_sub(self.host_fwd)) as usize
    }

    /// It has read so much that it says so.
    fn tells(&self) -> bool {
        self.fwd_cnt() - self.told >= BUF_ALLOC / 4
    }

    /// Its process reads. Whether there is something that it may say or send.
    fn moves(&mut self) -> bool {
        if self.reads {
            self.read();
        }
        let sends = || !self.to_send.is_empty() && self.room() > 0;
        self.is_open && !self.is_reset && (self.tells() || sends())
    }

    /// Whether all that was written is with the host.
    pub(crate) fn is_written(&self) -> bool {
        self.to_send.is_empty()
    }
}

/// A guest whose driver runs.
#[derive(Debug)]
pub(crate) struct SocketGuest {
    stream: UnixStream,
    pub(crate) ram: Rc<Ram>,
    rings: [Driver; 3],
    kick: [OwnedFd; 3],
    call: [OwnedFd; 3],
    offered: VecDeque<u64>,
    sent: u64,
    /// Packets that came and were not looked at: their lengths.
    came: VecDeque<u32>,
    /// Packets of its driver that have no place yet.
    replies: VecDeque<Header>,
    /// Buffers that were taken are offered again.
    pub(crate) refills: bool,
    /// Bytes of its sockets' buffers.
    pub(crate) buffer: u32,
    /// Bytes that its processes write at a time.
    pub(crate) most: usize,
    pub(crate) sockets: BTreeMap<Ports, Socket>,
    /// The program that its sockets name.
    pub(crate) program: Program,
    /// The address that they connect from; unspecified: the first that there is.
    pub(crate) from: IpAddr,
    /// Listens at these vsock ports.
    listens: Vec<u32>,
    /// No listener has a place for another client.
    pub(crate) is_full: bool,
    /// Signals that packets of it were taken, and those after which it looked for these packets.
    signals: Cell<u64>,
    signals_seen: u64,
    /// It looks for packets that were taken after a signal only.
    pub(crate) waits_for_signals: bool,
    next_port: u32,
    control: u32,
    tag: u16,
}

impl SocketGuest {
    /// Boots with buffers for packets.
    pub(crate) fn boot(socket: &Path) -> Self {
        Self::boot_in(socket, Ram::new(usize::try_from(RAM_LEN).unwrap()))
    }

    /// Likewise, in memory that may go.
    pub(crate) fn boot_unsealed(socket: &Path) -> Self {
        Self::boot_in(socket, Ram::unsealed(usize::try_from(RAM_LEN).unwrap()))
    }

    fn boot_in(socket: &Path, ram: Rc<Ram>) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let ring = |at| Driver::new(&ram, GUEST_BASE + at, QUEUE_SIZE);
        let rings = [ring(0x1_0000), ring(0x2_0000), ring(0x3_0000)];
        let fd = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let (kick, call) = ([fd(), fd(), fd()], [fd(), fd(), fd()]);
        let all: Vec<_> = (0..3).map(|i| (&rings[i], &kick[i], &call[i])).collect();
        set_up(&stream, EVENTS, &ram, &all);
        let mut guest = Self {
            stream,
            ram,
            rings,
            kick,
            call,
            offered: VecDeque::new(),
            sent: 0,
            came: VecDeque::new(),
            replies: VecDeque::new(),
            refills: true,
            buffer: BUF_ALLOC,
            most: 65536,
            sockets: BTreeMap::new(),
            program: Program::NONE,
            from: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            listens: Vec::new(),
            is_full: false,
            signals: Cell::new(0),
            signals_seen: 0,
            waits_for_signals: false,
            next_port: 2000,
            control: CONTROL,
            tag: 0,
        };
        guest.offer(QUEUE_SIZE.into());
        guest
    }

    /// Buffers for packets to it.
    pub(crate) fn offer(&mut self, n: u64) {
        let old = self.rings[0].avail_idx;
        for _ in 0..n {
            let at = RX_BUFFERS + u64::from(self.rings[0].avail_idx % QUEUE_SIZE) * RX_LEN;
            self.rings[0].offer(&[(at, u32::try_from(RX_LEN).unwrap())], WRITE);
            self.offered.push_back(at);
        }
        self.kick(0, old);
    }

    /// It has no buffers left: others have filled them all, with what is for nobody.
    pub(crate) fn give_up_buffers(&mut self) {
        while !self.offered.is_empty() {
            let nobody = self.header(Ports { guest: 7, host: 7 }, Op::Data);
            let sent = self.send(&nobody, &[]);
            if !self.step() && !sent {
                wait(&[self]);
            }
        }
    }

    /// Whether it has buffers that others have not filled.
    pub(crate) fn has_buffers(&self) -> bool {
        !self.offered.is_empty()
    }

    /// Another buffer for each that was taken, from now on too.
    pub(crate) fn refill(&mut self) {
        self.refills = true;
        self.offer(u64::from(QUEUE_SIZE) - self.offered.len() as u64);
    }

    /// Signals that packets of it were taken, until now.
    pub(crate) fn signals_of_taken(&self) -> u64 {
        let mut count = [0; 8];
        if rustix::io::read(&self.call[1], &mut count).is_ok() {
            self.signals.set(self.signals.get() + u64::from_ne_bytes(count));
        }
        self.signals.get()
    }

    /// Whether there is a place for a packet that it sends.
    fn has_place(&mut self) -> bool {
        let signals = self.signals_of_taken();
        let was_signalled = std::mem::replace(&mut self.signals_seen, signals) < signals;
        let ring = &mut self.rings[1];
        // As a driver looks again after it has said what it has seen.
        while (was_signalled || !self.waits_for_signals) && !ring.used().is_empty() {
            ring.set_used_event(ring.used_idx);
            fence(Ordering::SeqCst);
        }
        ring.avail_idx.wrapping_sub(ring.used_idx) < u16::try_from(TX_COUNT).unwrap()
    }

    /// Sends a packet. `false`: all places are taken.
    pub(crate) fn send(&mut self, header: &Header, payload: &[u8]) -> bool {
        if !self.has_place() {
            return false;
        }
        let ring = &mut self.rings[1];
        let at = TX_BUFFERS + self.sent % TX_COUNT * TX_LEN;
        self.sent += 1;
        self.ram.write(at, &[&header.emit()[..], payload].concat());
        let old = ring.avail_idx;
        let len = u32::try_from(payload.len()).unwrap();
        let head = (at, u32::try_from(LEN).unwrap());
        match len {
            0 => ring.offer(&[head], 0),
            _ => ring.offer(&[head, (at + LEN as u64, len)], 0),
        };
        self.kick(1, old);
        true
    }

    /// A header of a socket.
    pub(crate) fn header(&self, ports: Ports, op: Op) -> Header {
        let socket = self.sockets.get(&ports);
        Header {
            src_cid: 3,
            dst_cid: HOST_CID,
            src_port: ports.guest,
            dst_port: ports.host,
            len: 0,
            kind: STREAM,
            op: Some(op),
            flags: 0,
            buf_alloc: socket.map_or(0, |socket| socket.buf_alloc),
            fwd_cnt: socket.map_or(0, Socket::fwd_cnt),
        }
    }

    /// Sends a packet of a socket, when there is a place for it.
    fn say(&mut self, ports: Ports, op: Op, flags: u32) {
        let header = Header { flags, ..self.header(ports, op) };
        if let Some(socket) = self.sockets.get_mut(&ports) {
            socket.told = header.fwd_cnt;
        }
        self.replies.push_back(header);
        self.say_more();
    }

    /// Sends what there is a place for.
    fn say_more(&mut self) {
        while let Some(header) = self.replies.pop_front() {
            if !self.send(&header, &[]) {
                return self.replies.push_front(header);
            }
        }
    }

    /// Runs its driver and its processes; returns whether they did anything.
    pub(crate) fn step(&mut self) -> bool {
        self.rings[0].set_used_event(self.rings[0].used_idx);
        fence(Ordering::SeqCst);
        self.say_more();
        self.came.extend(self.rings[0].used().into_iter().map(|(_, len)| len));
        let mut taken = 0;
        // As Linux does (`virtio_transport_more_replies`), it looks at nothing before the host has
        // read what it has said.
        while self.replies.len() < usize::from(QUEUE_SIZE)
            && let Some(len) = self.came.pop_front()
        {
            taken += 1;
            let at = self.offered.pop_front().expect("it was offered");
            let bytes = self.ram.read(at, len as usize);
            let (header, payload) = bytes.split_first_chunk().expect("a header at least");
            self.hear(&Header::parse(header), payload);
        }
        if self.refills && taken > 0 {
            self.offer(taken);
        }
        let all = self.sockets.iter_mut().filter_map(|(ports, it)| it.moves().then_some(*ports));
        let all: Vec<Ports> = all.collect();
        let moved = all.into_iter().fold(false, |any, ports| self.move_on(ports) | any);
        taken > 0 || moved
    }

    /// A packet of the host.
    fn hear(&mut self, header: &Header, payload: &[u8]) {
        assert_eq!((header.src_cid, header.dst_cid, header.kind), (HOST_CID, 3, STREAM));
        assert_eq!(header.len as usize, payload.len());
        let ports = Ports { guest: header.dst_port, host: header.src_port };
        if header.op == Some(Op::Request) {
            assert!(!self.sockets.contains_key(&ports), "{ports:?} is there already");
            let listens = self.listens.contains(&ports.guest) && !self.is_full;
            if listens {
                let socket = Socket { is_open: true, ..Socket::new(self.buffer) };
                self.sockets.insert(ports, socket);
            }
            self.note_room(ports, header);
            return self.say(ports, if listens { Op::Response } else { Op::Reset }, 0);
        }
        self.note_room(ports, header);
        let Some(socket) = self.sockets.get_mut(&ports) else { return };
        match header.op.expect("the host says only what there is") {
            Op::Response => socket.is_open = true,
            Op::Reset => socket.is_reset = true,
            Op::Data => {
                socket.given += header.len;
                assert!(socket.given - socket.fwd_cnt() <= socket.buf_alloc, "no room for it");
                assert!(!socket.has_ended, "behind the end");
                socket.unread.extend(payload);
            }
            Op::Shutdown => {
                assert_eq!(header.flags, SHUTDOWN_SEND);
                socket.has_ended = true;
            }
            Op::CreditUpdate => {}
            Op::CreditRequest => self.say(ports, Op::CreditUpdate, 0),
            Op::Request => unreachable!("heard before"),
        }
    }

    fn note_room(&mut self, ports: Ports, header: &Header) {
        if let Some(socket) = self.sockets.get_mut(&ports) {
            (socket.host_alloc, socket.host_fwd) = (header.buf_alloc, header.fwd_cnt);
        }
    }

    /// A socket says what its process has read, and sends what there is room for.
    fn move_on(&mut self, ports: Ports) -> bool {
        let tells = self.sockets[&ports].tells();
        if tells {
            self.say(ports, Op::CreditUpdate, 0);
        }
        let socket = &self.sockets[&ports];
        let len = socket.to_send.len().min(self.most).min(socket.room());
        if len == 0 || !self.replies.is_empty() || !self.has_place() {
            return tells;
        }
        let header = self.header(ports, Op::Data);
        let header = Header { len: u32::try_from(len).unwrap(), ..header };
        let socket = &self.sockets[&ports];
        let (front, back) = socket.to_send.as_slices();
        let of_front = len.min(front.len());
        let payload = [&front[..of_front], &back[..len - of_front]].concat();
        assert!(self.send(&header, &payload), "there was a place");
        let socket = self.sockets.get_mut(&ports).expect("it is there");
        socket.to_send.drain(..len);
        socket.sent = socket.sent.wrapping_add(header.len);
        socket.told = header.fwd_cnt;
        true
    }

    /// Memory of a packet that it sends is not there any more, but for the header.
    pub(crate) fn sends_without_memory(&mut self, ports: Ports, len: u32) {
        let header = Header { len, ..self.header(ports, Op::Data) };
        let at = TX_BUFFERS - 4096;
        self.ram.write(at, &header.emit());
        self.ram.cut_from(TX_BUFFERS - GUEST_BASE);
        let old = self.rings[1].avail_idx;
        self.rings[1].offer(&[(at, u32::try_from(LEN).unwrap()), (TX_BUFFERS, len)], 0);
        self.kick(1, old);
    }

    /// Its buffers for packets are not there any more.
    pub(crate) fn has_no_buffers(&self) {
        self.ram.cut_from(RX_BUFFERS - GUEST_BASE);
    }

    /// Its VMM stops it, and lets it go on.
    pub(crate) fn stops_and_goes_on(&self) {
        let ring = |i: usize| (&self.rings[i], &self.kick[i], &self.call[i]);
        stop_and_go_on(&self.stream, &[ring(0), ring(1)]);
    }

    /// Its VMM has no descriptors for kicks, and wants the queues to be polled.
    pub(crate) fn is_polled(&self) {
        for queue in 0..2_u64 {
            tell(&self.stream, Req::SET_VRING_KICK, &(queue | 1 << 8).to_ne_bytes(), &[]);
        }
    }

    /// Takes what came, looks at nothing of it, and offers the buffers again.
    pub(crate) fn throws_away(&mut self) {
        let taken = self.rings[0].used().len();
        self.offered.drain(..taken);
        self.offer(taken as u64);
    }

    /// A writer of its signals for packets blocks from now on.
    pub(crate) fn stuffs_its_signals(&self) {
        self.call[..2].iter().for_each(stuff);
    }

    /// A packet that is shorter than a header.
    pub(crate) fn offers_nonsense(&mut self) {
        let old = self.rings[1].avail_idx;
        self.rings[1].offer(&[(TX_BUFFERS, 10)], 0);
        self.kick(1, old);
    }

    fn kick(&self, queue: usize, old: u16) {
        fence(Ordering::SeqCst);
        let driver = &self.rings[queue];
        let new = driver.avail_idx;
        if new.wrapping_sub(driver.avail_event()).wrapping_sub(1) < new.wrapping_sub(old) {
            rustix::io::write(&self.kick[queue], &1_u64.to_ne_bytes()).unwrap();
        }
    }

    /// The socket at these ports.
    pub(crate) fn socket(&self, ports: Ports) -> &Socket {
        &self.sockets[&ports]
    }

    /// Its process writes.
    pub(crate) fn write(&mut self, ports: Ports, bytes: &[u8]) {
        self.sockets.get_mut(&ports).expect("it is there").to_send.extend(bytes);
    }

    /// Bytes that its process may write.
    pub(crate) fn room(&self, ports: Ports) -> usize {
        self.sockets[&ports].room()
    }

    /// Whether its process may write.
    pub(crate) fn has_room(&self, ports: Ports) -> bool {
        self.room(ports) > 0
    }

    /// Its process reads from now on, or does not.
    pub(crate) fn reads(&mut self, ports: Ports, reads: bool) {
        self.sockets.get_mut(&ports).expect("it is there").reads = reads;
    }

    /// shutdown(SHUT_WR); all has been written.
    pub(crate) fn shut_down(&mut self, ports: Ports) {
        assert!(self.sockets[&ports].is_written());
        self.say(ports, Op::Shutdown, SHUTDOWN_SEND);
    }

    /// close(); all has been written.
    pub(crate) fn close(&mut self, ports: Ports) {
        self.say(ports, Op::Shutdown, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    }

    /// connect() to a port of the host; it is not answered yet.
    pub(crate) fn begin(&mut self, ports: Ports) {
        self.sockets.insert(ports, Socket::new(self.buffer));
        self.say(ports, Op::Request, 0);
    }
}

/// Lets all of them go on until something is so.
pub(crate) fn until(
    guests: &mut [&mut SocketGuest],
    what: &str,
    mut is: impl FnMut(&mut [&mut SocketGuest]) -> bool,
) {
    let start = Instant::now();
    loop {
        let moved = guests.iter_mut().fold(false, |any, guest| guest.step() | any);
        if is(guests) {
            return;
        }
        // Some of it takes the daemon 20 s: see `sockets/stalls.rs`.
        assert!(start.elapsed() < 3 * LIMIT, "not so: {what}");
        if !moved {
            wait(guests);
        }
    }
}

/// Waits until the host has something for one of them, or for a moment: it may be a status that
/// changes.
fn wait(guests: &[&mut SocketGuest]) {
    if serve() {
        return;
    }
    let calls: Vec<&OwnedFd> = guests.iter().flat_map(|guest| &guest.call[..2]).collect();
    let mut fds: Vec<_> = calls.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
    let limit = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    let _ = poll(&mut fds, Some(&limit));
    for guest in guests {
        let _ = rustix::io::read(&guest.call[0], &mut [0; 8]);
        guest.signals_of_taken();
    }
}

/// Asks the host; the code of its answer.
pub(crate) fn ask(guest: &mut SocketGuest, ask: Ask) -> u32 {
    let now = Ports { guest: guest.control, host: control::PORT };
    if guest.sockets.get(&now).is_some_and(|socket| socket.is_reset) {
        (guest.control, guest.tag) = (guest.control + 1, 0);
    }
    let ports = Ports { guest: guest.control, host: control::PORT };
    if !guest.sockets.contains_key(&ports) {
        guest.begin(ports);
        until(&mut [guest], "a control connection", |g| g[0].socket(ports).is_open);
    }
    guest.tag += 1;
    let asked = Asked { tag: guest.tag, ask };
    guest.write(ports, &asked.emit());
    let all = control::LEN * usize::from(guest.tag);
    until(&mut [guest], "an answer", |g| g[0].socket(ports).got.len() == all);
    let answer = &guest.socket(ports).got[all - control::LEN..];
    assert_eq!(answer[2..4], guest.tag.to_le_bytes());
    u32::from_le_bytes(answer[48..52].try_into().unwrap())
}

/// Listens.
pub(crate) fn listen(guest: &mut SocketGuest, at: &str) {
    let port = guest.next_port;
    guest.next_port += 1;
    guest.listens.push(port);
    let at = at.parse().unwrap();
    assert_eq!(ask(guest, Ask::Listen { guest: port, at, v4: false }), 0);
}

/// Asks for a connection and begins it: its ports, or what the host said.
pub(crate) fn try_connect(guest: &mut SocketGuest, to: &str) -> Result<Ports, u32> {
    let port = guest.next_port;
    guest.next_port += 1;
    let from = SocketAddr::new(guest.from, u16::try_from(port).unwrap());
    let (to, program) = (to.parse().unwrap(), guest.program);
    match ask(guest, Ask::Connect { guest: port, from, to, program }) {
        0 => {
            let ports = Ports { guest: port, host: control::SOCKETS };
            guest.begin(ports);
            Ok(ports)
        }
        code => Err(code),
    }
}

/// Connects one to the other: the ports in both. For a moment after its start a daemon knows no
/// other host, and hangs up on it: a guest would use its own TCP, this one tries again.
pub(crate) fn connect(a: &mut SocketGuest, b: &mut SocketGuest, to: &str) -> (Ports, Ports) {
    let before: Vec<Ports> = b.sockets.keys().copied().collect();
    let begun = Instant::now();
    let own = loop {
        let own = try_connect(a, to).unwrap();
        until(&mut [a, b], "a connection, or none", |g| {
            let socket = g[0].socket(own);
            socket.is_open || socket.is_reset
        });
        if a.socket(own).is_open {
            break own;
        }
        assert!(begun.elapsed() < LIMIT, "{to} refuses");
    };
    let new = b.sockets.keys().find(|ports| !before.contains(ports));
    (own, *new.expect("somebody has accepted"))
}
