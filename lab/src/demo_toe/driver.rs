//! An end of TOE connections without a guest: this program is the VMM and the driver of a socket
//! device. So the timed part is the way between two daemons, with the work that a driver cannot
//! leave out. It does the work of [`nightporter_guest::peer::Peer`], as far as transfers need it.
//!
//! Data to send lies in the shared memory before the timed part, and received data stays where the
//! device has put it until it is checked: nothing is copied here.

use std::collections::VecDeque;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_core::toe::control::{self, Asked, Code, Program, Reply};
use nightporter_core::toe::vsock::Ports;
use nightporter_core::wire::vsock::{
    HOST_CID, Header, LEN, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, STREAM,
};
use nightporter_guest::data::{READ_ALL, Source};
use nightporter_guest::peer::{Answer, Ask};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use super::BYTES;
use super::rings::{AREA, AVAILABLE, Memory, Ring, SIZE, USED};
use crate::front_end::{self, EVENT_IDX, FrontEnd, RingAt};

/// Its CID, as every guest's here.
const CID: u64 = 3;
/// Payload of a packet, either way.
const PACKET: usize = 64 << 10;
/// The smallest average payload of the packets of a transfer.
const PACKET_LEAST: usize = 4 << 10;
/// Chains to the device, of two buffers each, and from it, of one each.
const CHAINS_TO_DEVICE: u16 = SIZE / 2;
const CHAINS_FROM_DEVICE: u16 = SIZE / 2;
/// The room of its sockets, and after how much it reports reading.
const BUFFER: u32 = 4 << 20;
const TOLD_AFTER: u32 = 256 << 10;
/// The memory: both rings, headers with short payloads to the device, the bytes to send, and
/// buffers. A buffer holds one packet until it is checked, and packets may be short (21 KB and less
/// on average, when both sides send), so there are buffers for packets of 4 KiB. Only the pages
/// that the device writes take memory.
const HEADERS: usize = 2 * AREA;
const HEADER_SLOT: usize = 128;
const SENT: usize = HEADERS + HEADER_SLOT * CHAINS_TO_DEVICE as usize;
const BUFFERS: usize = SENT + BYTES.1.next_multiple_of(4096);
const BUFFER_LEN: usize = PACKET + HEADER_SLOT;
const BUFFER_COUNT: usize = BYTES.1 / PACKET_LEAST + CHAINS_FROM_DEVICE as usize;
const MEMORY: usize = BUFFERS + BUFFER_LEN * BUFFER_COUNT;
const _: () = assert!(LEN + control::LEN <= HEADER_SLOT);
/// Nothing takes so long.
const LIMIT: Duration = Duration::from_secs(20);
/// Of its control connection.
const CONTROL: Ports = Ports { guest: 1024, host: control::PORT };

/// A socket.
#[derive(Debug, Default)]
struct Socket {
    is_open: bool,
    is_reset: bool,
    sent: u32,
    /// Bytes that have come, those that somebody has waited for, and those told as read.
    got: u64,
    taken: u64,
    told: u32,
    /// The device's room.
    alloc: u32,
    read: u32,
}

impl Socket {
    const fn room(&self) -> usize {
        self.alloc.saturating_sub(self.sent.wrapping_sub(self.read)) as usize
    }

    /// Bytes that have left its buffer: it reads all at once.
    fn read(&self) -> u32 {
        u32::try_from(self.got & u64::from(u32::MAX)).expect("half of it")
    }
}

/// The payload of a packet.
#[derive(Debug, Clone, Copy)]
enum Payload<'a> {
    /// A few bytes, which are copied.
    Short(&'a [u8]),
    /// Bytes of the memory.
    At(usize, usize),
}

/// See the module's doc.
#[derive(Debug)]
pub(super) struct Driver {
    memory: Memory,
    to_driver: Ring,
    to_device: Ring,
    kicks: [EventFd; 2],
    calls: [EventFd; 2],
    /// Free buffers, and those that the device has, in its order.
    free: Vec<usize>,
    offered: VecDeque<usize>,
    /// Those with what has come for the connection, and how much of it.
    held: Vec<(usize, usize)>,
    /// Of the control connection.
    answer: Vec<u8>,
    control: Socket,
    socket: Option<(Ports, Socket)>,
    /// Where it listens.
    listens: Option<u32>,
    next_port: u32,
    tag: u16,
    source: Source,
    prepared: usize,
    _file: File,
    _front_end: FrontEnd,
}

impl Driver {
    /// Drives the socket device behind this socket.
    pub(super) fn start(socket: &Path) -> Result<Self> {
        let file = front_end::memory(MEMORY as u64)?;
        let memory = Memory::map(&file)?;
        let kicks = [front_end::notifier()?, front_end::notifier()?];
        let calls = [front_end::notifier()?, front_end::notifier()?];
        let ring = |index: usize| RingAt {
            size: SIZE,
            descriptors: (index * AREA) as u64,
            available: (index * AREA + AVAILABLE) as u64,
            used: (index * AREA + USED) as u64,
            kick: &kicks[index],
            call: &calls[index],
        };
        let rings = [ring(0), ring(1)];
        let front_end = FrontEnd::connect(socket, EVENT_IDX, &file, &rings)?;
        let mut driver = Self {
            memory,
            to_driver: Ring::new(0),
            to_device: Ring::new(AREA),
            kicks,
            calls,
            free: (0..BUFFER_COUNT).rev().collect(),
            offered: VecDeque::new(),
            held: Vec::new(),
            answer: Vec::new(),
            control: Socket::default(),
            socket: None,
            listens: None,
            next_port: 2000,
            tag: 0,
            source: Source::new(),
            prepared: 0,
            _file: file,
            _front_end: front_end,
        };
        driver.offer_buffers()?;
        driver.say(CONTROL, Op::Request, 0)?;
        driver.until("a control connection", |it| it.control.is_open)?;
        Ok(driver)
    }

    /// Executes a command, however long it takes.
    pub(super) fn obey(&mut self, ask: Ask) -> Answer {
        let told = self.work(ask).with_context(|| format!("a driver was to {ask:?}"));
        told.unwrap_or_else(|error| Answer::Failed { errno: 0, error: format!("{error:#}") })
    }

    fn work(&mut self, ask: Ask) -> Result<Answer> {
        match ask {
            Ask::Listen { at } => {
                let guest = self.take_port();
                self.ask(control::Ask::Listen { guest, at, v4: false })?;
                self.listens = Some(guest);
                Ok(Answer::At { address: at })
            }
            Ask::Connect { to } => {
                let guest = self.take_port();
                let from = SocketAddr::from((Ipv4Addr::UNSPECIFIED, u16::try_from(guest)?));
                let program = Program::NONE;
                self.ask(control::Ask::Connect { guest, from, to, program })?;
                let ports = Ports { guest, host: control::SOCKETS };
                self.keep(ports, false);
                self.say(ports, Op::Request, 0)?;
                self.until("a connection", |it| it.socket.as_ref().is_some_and(|s| s.1.is_open))?;
                Ok(Answer::At { address: from })
            }
            Ask::Accept => {
                self.until("somebody who connects", |it| it.socket.is_some())?;
                Ok(Answer::At { address: (Ipv4Addr::UNSPECIFIED, 0).into() })
            }
            Ask::Prepare { bytes, seed } => {
                ensure!(bytes <= BYTES.1, "no more than {} bytes", BYTES.1);
                self.source.reach(seed, bytes);
                self.memory.write(SENT, self.source.piece(seed, bytes));
                self.prepared = bytes;
                let held = self.held.drain(..).rev().map(|(buffer, _)| buffer);
                self.free.extend(held);
                Ok(Answer::Done { ns: 0 })
            }
            Ask::Send { bytes, answered, .. } => self.timed(|it| {
                it.send_all(bytes)?;
                if answered { it.take(1) } else { Ok(()) }
            }),
            Ask::Receive { bytes, answered } => self.timed(|it| {
                it.take(bytes)?;
                if answered { it.send_short(&[READ_ALL]) } else { Ok(()) }
            }),
            Ask::Exchange { bytes, second, .. } => self.exchange(bytes, second),
            Ask::Ping { count } => self.ping(count),
            Ask::Pong { count } => self.timed(|it| {
                (0..count).try_for_each(|_| {
                    it.take(1)?;
                    it.send_short(&[READ_ALL])
                })
            }),
            Ask::Check { seed } => Ok(Answer::Checked { whole: self.is_whole(seed) }),
            Ask::Close => self.close(),
            other => bail!("no driver does {other:?}"),
        }
    }

    fn exchange(&mut self, bytes: usize, second: bool) -> Result<Answer> {
        if second {
            self.until("the first byte", |it| it.has(1))?;
        }
        self.timed(|it| {
            it.send_all(bytes)?;
            it.take(bytes)?;
            it.send_short(&[READ_ALL])?;
            it.take(1)
        })
    }

    fn ping(&mut self, count: usize) -> Result<Answer> {
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let begun = Instant::now();
            self.send_short(&[READ_ALL])?;
            self.take(1)?;
            times.push(begun.elapsed());
        }
        times.sort_unstable();
        let median = times.get(count / 2).copied().unwrap_or_default();
        Ok(Answer::Done { ns: u64::try_from(median.as_nanos())? })
    }

    fn close(&mut self) -> Result<Answer> {
        let (ports, _) = self.socket.as_ref().context("no connection")?;
        self.say(*ports, Op::Shutdown, SHUTDOWN_SEND | SHUTDOWN_RECEIVE)?;
        self.until("its end", |it| it.socket.as_ref().is_none_or(|s| s.1.is_reset))?;
        self.socket = None;
        Ok(Answer::Done { ns: 0 })
    }

    fn take_port(&mut self) -> u32 {
        self.next_port += 1;
        self.next_port
    }

    fn keep(&mut self, ports: Ports, is_open: bool) {
        self.socket = Some((ports, Socket { is_open, ..Socket::default() }));
    }

    /// Whether so many more bytes have come.
    fn has(&self, bytes: u64) -> bool {
        self.socket.as_ref().is_some_and(|(_, it)| it.got >= it.taken + bytes)
    }

    fn timed(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Answer> {
        let begun = Instant::now();
        work(self)?;
        Ok(Answer::Done { ns: u64::try_from(begun.elapsed().as_nanos())? })
    }

    /// Sends so many of the prepared bytes.
    fn send_all(&mut self, bytes: usize) -> Result<()> {
        let mut sent = 0;
        while sent < bytes {
            let (ports, socket) = self.socket.as_ref().context("no connection")?;
            ensure!(!socket.is_reset, "it was reset");
            let len = (bytes - sent).min(PACKET).min(socket.room());
            if len > 0 && self.to_device.pending() < CHAINS_TO_DEVICE {
                let ports = *ports;
                self.send(ports, Op::Data, 0, Payload::At(SENT + sent, len));
                sent += len;
            } else {
                self.show()?;
                self.step_or_wait()?;
            }
        }
        self.show()
    }

    fn send_short(&mut self, bytes: &[u8]) -> Result<()> {
        let (ports, _) = self.socket.as_ref().context("no connection")?;
        let ports = *ports;
        self.until("a place and room", |it| {
            let has_room = |it: &(Ports, Socket)| it.1.room() >= bytes.len();
            it.to_device.pending() < CHAINS_TO_DEVICE && it.socket.as_ref().is_some_and(has_room)
        })?;
        self.send(ports, Op::Data, 0, Payload::Short(bytes));
        self.show()
    }

    /// Waits for so many more bytes.
    fn take(&mut self, bytes: usize) -> Result<()> {
        let bytes = bytes as u64;
        self.until("bytes", |it| it.has(bytes))?;
        if let Some((_, socket)) = &mut self.socket {
            socket.taken += bytes;
        }
        Ok(())
    }

    /// Whether the received bytes begin with those of this seed.
    fn is_whole(&mut self, seed: u64) -> bool {
        self.source.reach(seed, self.prepared);
        let mut rest = self.source.piece(seed, self.prepared);
        let mut piece = vec![0; PACKET];
        for &(buffer, len) in &self.held {
            let (now, later) = rest.split_at(len.min(rest.len()));
            let piece = &mut piece[..now.len()];
            self.memory.read(BUFFERS + buffer * BUFFER_LEN + LEN, piece);
            if now != piece {
                return false;
            }
            rest = later;
        }
        rest.is_empty()
    }

    /// Asks the host.
    fn ask(&mut self, ask: control::Ask) -> Result<()> {
        self.tag += 1;
        self.answer.clear();
        let asked = Asked { tag: self.tag, ask };
        self.send(CONTROL, Op::Data, 0, Payload::Short(&asked.emit()));
        self.show()?;
        self.until("an answer", |it| it.answer.len() >= control::LEN)?;
        let reply = self.answer.first_chunk().and_then(Reply::parse).context("no answer")?;
        ensure!(
            reply.tag == self.tag && reply.code == Code::Done,
            "{ask:?} was answered: {reply:?}"
        );
        Ok(())
    }

    /// Sends a packet without payload.
    fn say(&mut self, ports: Ports, op: Op, flags: u32) -> Result<()> {
        self.until("a place", |it| it.to_device.pending() < CHAINS_TO_DEVICE)?;
        self.send(ports, op, flags, Payload::Short(&[]));
        self.show()
    }

    /// Puts a packet into the ring, which has a place.
    fn send(&mut self, ports: Ports, op: Op, flags: u32, payload: Payload<'_>) {
        let len = match payload {
            Payload::Short(bytes) => bytes.len(),
            Payload::At(_, len) => len,
        };
        let len_of_payload = u32::try_from(len).expect("a packet");
        let Some(socket) = self.socket_at(ports) else { return };
        socket.sent = socket.sent.wrapping_add(len_of_payload);
        socket.told = socket.read();
        let header = Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: ports.guest,
            dst_port: ports.host,
            len: len_of_payload,
            kind: STREAM,
            op: Some(op),
            flags,
            buf_alloc: BUFFER,
            fwd_cnt: socket.told,
        };
        let at = HEADERS + HEADER_SLOT * usize::from(self.to_device.next() % CHAINS_TO_DEVICE);
        self.memory.write(at, &header.emit());
        let buffers = match payload {
            Payload::Short(bytes) => {
                self.memory.write(at + LEN, bytes);
                &[(at, LEN + len)][..]
            }
            Payload::At(place, len) => &[(at, LEN), (place, len)],
        };
        self.to_device.offer(&self.memory, buffers, false);
    }

    fn socket_at(&mut self, ports: Ports) -> Option<&mut Socket> {
        match &mut self.socket {
            _ if ports == CONTROL => Some(&mut self.control),
            Some((known, socket)) if *known == ports => Some(socket),
            _ => None,
        }
    }

    /// Shows the device the bytes that were sent.
    fn show(&mut self) -> Result<()> {
        if self.to_device.show(&self.memory) {
            self.kicks[1].write(1).context("kicking the daemon")?;
        }
        Ok(())
    }

    fn offer_buffers(&mut self) -> Result<()> {
        while self.to_driver.pending() < CHAINS_FROM_DEVICE {
            let buffer = self.free.pop().context("the daemon's packets are too short")?;
            let place = (BUFFERS + buffer * BUFFER_LEN, LEN + PACKET);
            self.to_driver.offer(&self.memory, &[place], true);
            self.offered.push_back(buffer);
        }
        if self.to_driver.show(&self.memory) {
            self.kicks[0].write(1).context("kicking the daemon")?;
        }
        Ok(())
    }

    /// Takes the device's completions; returns whether there were any.
    fn step(&mut self) -> Result<bool> {
        let mut has_moved = false;
        while self.to_device.poll(&self.memory).is_some() {
            has_moved = true;
        }
        let mut taken = 0;
        while let Some(written) = self.to_driver.poll(&self.memory) {
            let buffer = self.offered.pop_front().context("a buffer that was not offered")?;
            self.hear(buffer, written)?;
            taken += 1;
            // As long as there is more, the device does not run out.
            if taken % (CHAINS_FROM_DEVICE / 4) == 0 {
                self.offer_buffers()?;
            }
        }
        if taken > 0 {
            self.offer_buffers()?;
        }
        if let Some((ports, socket)) = &self.socket
            && socket.read().wrapping_sub(socket.told) >= TOLD_AFTER
            && self.to_device.pending() < CHAINS_TO_DEVICE
        {
            self.send(*ports, Op::CreditUpdate, 0, Payload::Short(&[]));
            self.show()?;
        }
        Ok(has_moved || taken > 0)
    }

    /// A packet of the host.
    fn hear(&mut self, buffer: usize, written: usize) -> Result<()> {
        let mut bytes = [0; LEN];
        let at = BUFFERS + buffer * BUFFER_LEN;
        self.memory.read(at, &mut bytes);
        let header = Header::parse(&bytes);
        let len = header.len as usize;
        ensure!(written == LEN + len, "{written} bytes for a packet of {len}");
        let ports = Ports { guest: header.dst_port, host: header.src_port };
        let is_new = header.op == Some(Op::Request) && self.listens == Some(ports.guest);
        if is_new {
            self.keep(ports, true);
        }
        let Some(socket) = self.socket_at(ports) else {
            self.free.push(buffer);
            return Ok(()); // what is late, of one that was closed
        };
        (socket.alloc, socket.read) = (header.buf_alloc, header.fwd_cnt);
        socket.got += len as u64;
        socket.is_open |= header.op == Some(Op::Response);
        socket.is_reset |= header.op == Some(Op::Reset);
        match header.op {
            Some(Op::Data) if ports != CONTROL => self.held.push((buffer, len)),
            Some(Op::Data) => {
                let mut answer = vec![0; len];
                self.memory.read(at + LEN, &mut answer);
                self.answer.extend(answer);
                self.free.push(buffer);
            }
            _ => self.free.push(buffer),
        }
        match header.op {
            _ if is_new => self.say(ports, Op::Response, 0),
            Some(Op::CreditRequest) => self.say(ports, Op::CreditUpdate, 0),
            _ => Ok(()),
        }
    }

    /// Goes on until something is so.
    fn until(&mut self, what: &str, is: impl Fn(&Self) -> bool) -> Result<()> {
        let begun = Instant::now();
        while !is(self) {
            ensure!(begun.elapsed() < LIMIT, "waiting for {what}");
            self.step_or_wait()?;
        }
        Ok(())
    }

    fn step_or_wait(&mut self) -> Result<()> {
        if self.step()? || !self.to_driver.ask(&self.memory) {
            return Ok(());
        }
        // Only who has no place left waits for one.
        if self.to_device.pending() >= CHAINS_TO_DEVICE && !self.to_device.ask(&self.memory) {
            return Ok(());
        }
        let mut fds = self.calls.each_ref().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN));
        let limit = PollTimeout::try_from(LIMIT).unwrap_or(PollTimeout::MAX);
        ensure!(poll(&mut fds, limit)? > 0, "the daemon has said nothing for {LIMIT:?}");
        let called = fds.map(|fd| fd.any().unwrap_or(true));
        for (call, _) in self.calls.iter().zip(called).filter(|(_, called)| *called) {
            call.read().context("a notification")?;
        }
        Ok(())
    }
}
