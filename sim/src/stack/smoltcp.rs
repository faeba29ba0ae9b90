//! smoltcp 0.14 as a machine's TCP: an independent stack, with its own behaviour.
//!
//! Every connection has a socket set of its own, so that a frame or a timer costs the same however
//! many connections there are. Known faults of smoltcp are worked around here, never in the host's
//! limits:
//!
//! - After TIME-WAIT it forgets unread bytes. From the other's FIN on all is read at once.
//! - It can stop repeating its FIN once the data before it is acknowledged. A connection that has
//!   only its FIN outstanding for [`USER_TIMEOUT`] is reset.
//! - A listening socket that gets an RST after its SYN-ACK listens again. Here it is over.
//! - It takes the window of its SYN-ACK for a scaled one, and so takes bytes behind its buffer,
//!   which ends in an assertion (seed 45220). And if it has no room for all bytes of a segment, it
//!   takes the segment's FIN nevertheless (40908). Here bytes behind its buffer are cut off before
//!   they arrive.

use etherparse::checksum::Sum16BitWords;
use nightporter_core::time::Instant;
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_testkit::device::{Wire, clock_ms, set_clock_ms};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet, SocketStorage};
use smoltcp::socket::tcp::{self, State};
use smoltcp::time::{Duration, Instant as Micros};
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr, IpEndpoint};

use super::address::{Address, PREFIX};
use super::app::{KEEPALIVE, Phase, Received, Socket, USER_TIMEOUT};
use super::shell::{Ends, Tcp};
use crate::plan::{Machine, StackPlan};
use crate::random::Random;
use nightporter_check::frame::Frame;
use nightporter_check::stream::Stream;
use nightporter_check::wire::{
    F_DATA_VALID, GSO_TCPV4, GSO_TCPV6, IpVersion, PROTOCOL_TCP, Packet, Seq, on_wire,
    pseudo_header, tcp_checksum_ok, written,
};

/// Bytes of an IPv4 and a TCP header: an MSS of n is an MTU of n + 40 to smoltcp.
const HEADERS: u16 = 40;
/// Its buffers are memory, not numbers.
const BUFFER_MAX: usize = 1 << 20;
/// Where the checksum is in a TCP header.
const TCP_CHECKSUM_AT: usize = 16;

/// A machine with smoltcp.
pub(super) struct Smoltcp {
    plan: StackPlan,
    address: Address,
    iface: Interface,
    wire: Wire,
    /// An empty set, for segments of no connection.
    nobody: SocketSet<'static>,
    /// Its timestamp clock at time zero.
    clock_from: u32,
}

/// One connection.
pub(super) struct Conn {
    set: SocketSet<'static>,
    handle: SocketHandle,
    /// How it ended.
    end: Option<Phase>,
    /// It asked for, or answered, a SYN.
    begun: bool,
    /// The peer's FIN came.
    fin_came: bool,
    /// The peer's first byte, and how many the application has read.
    first: Option<Seq>,
    read: u64,
    /// Since when only its FIN, or its RST, is outstanding.
    closing_since: Option<Instant>,
}

impl Smoltcp {
    pub(super) fn new(plan: &StackPlan, machine: Machine, mtu: u16, seed: u64) -> Self {
        let mut random = Random::new(seed, "smoltcp");
        let address = machine.address();
        let mtu = plan.mss.map_or(mtu, |mss| mtu.min(mss.saturating_add(HEADERS)));
        let mut wire = Wire::new(mtu, true);
        let mut config = Config::new(EthernetAddress(address.mac).into());
        config.random_seed = random.bits();
        let mut iface = Interface::new(config, &mut wire, Micros::ZERO);
        iface.update_ip_addrs(|addrs| {
            for (v6, prefix) in [false, true].into_iter().zip(PREFIX) {
                addrs.push(IpCidr::new(ip(&address, v6), prefix)).expect("room for two");
            }
        });
        Self {
            plan: plan.clone(),
            address,
            iface,
            wire,
            nobody: SocketSet::new([SocketStorage::EMPTY; 0]),
            clock_from: u32::try_from(random.below(1 << 32)).unwrap_or(0),
        }
    }

    fn socket(&self, patient: bool) -> tcp::Socket<'static> {
        let buffer = |len: usize| tcp::SocketBuffer::new(vec![0; len.max(1)]);
        // It always offers window scaling, by what a buffer needs; without, one that needs none.
        let window_max = if self.plan.window_scale.is_some() { usize::MAX } else { 65_535 };
        let receive = buffer(self.plan.receive_bytes.min(window_max).min(BUFFER_MAX));
        let mut socket = tcp::Socket::new(receive, buffer(self.plan.send_bytes.min(BUFFER_MAX)));
        socket.set_tsval_generator(self.plan.timestamps.then_some(clock_ms));
        let waits = |span: nightporter_core::time::Duration| {
            (!patient).then(|| Duration::from_micros(span.as_nanos() / 1000))
        };
        socket.set_keep_alive(waits(KEEPALIVE));
        socket.set_congestion_control(tcp::CongestionControl::Reno);
        socket.set_timeout(waits(USER_TIMEOUT));
        socket
    }

    #[expect(clippy::cast_possible_truncation, reason = "the clock wraps")]
    fn set_clock(&self, now: Instant) {
        set_clock_ms(self.clock_from.wrapping_add(now.as_millis() as u32));
    }
}

impl Tcp for Smoltcp {
    type Conn = Conn;

    fn connect(&mut self, now: Instant, ends: &Ends) -> Conn {
        self.set_clock(now);
        let mut conn = Conn::new(self.socket(ends.patient));
        let at = IpEndpoint::new(ip(&ends.peer.address(), ends.v6), ends.peer_port);
        let from = IpEndpoint::new(ip(&self.address, ends.v6), ends.own_port);
        conn.socket().connect(self.iface.context(), at, from).expect("a new socket");
        conn.begun = true;
        conn
    }

    fn listen(&mut self, _now: Instant, ends: &Ends) -> Conn {
        let mut conn = Conn::new(self.socket(ends.patient));
        let at = IpEndpoint::new(ip(&self.address, ends.v6), ends.own_port);
        conn.socket().listen(at).expect("a new socket");
        conn
    }

    fn handle(&mut self, now: Instant, conn: Option<&mut Conn>, mut frame: Frame) {
        self.set_clock(now);
        settle_checksum(&mut frame);
        let Some(conn) = conn else {
            self.wire.arrived.push_back(frame.bytes);
            self.iface.poll_ingress_single(micros(now), &mut self.wire, &mut self.nobody);
            return;
        };
        let Some(frame) = conn.fit(frame) else { return };
        let was_closing = conn.state() == State::LastAck;
        let is_reset = was_closing && is_reset(&frame.bytes);
        self.wire.arrived.push_back(frame.bytes);
        self.iface.poll_ingress_single(micros(now), &mut self.wire, &mut conn.set);
        if was_closing && conn.state() == State::Closed {
            conn.end = Some(if is_reset { Phase::Reset } else { Phase::Closed });
        }
        conn.note_end();
    }

    fn poll(&mut self, now: Instant, conn: &mut Conn) -> Option<Instant> {
        self.set_clock(now);
        let at = micros(now);
        conn.note_end();
        conn.give_up(now);
        while self.iface.poll_egress(at, &mut self.wire, &mut conn.set)
            != smoltcp::iface::PollResult::None
        {}
        conn.note_end();
        // At once means: not before something else happens, or it would have happened above.
        let soon = now + nightporter_core::time::Duration::from_millis(1);
        let next = self.iface.poll_at(at, &conn.set);
        let next = next.map(|at| Instant::from_micros(at.total_micros().unsigned_abs()).max(soon));
        let linger = conn.closing_since.map(|since| since + USER_TIMEOUT);
        next.into_iter().chain(linger).min().map(|at| at.max(soon))
    }

    fn next_frame(&mut self) -> Option<Frame> {
        self.wire.sent.pop_front().map(Frame::on_wire)
    }

    fn is_listening(conn: &Conn) -> bool {
        !conn.begun
    }

    fn may_be_replaced(conn: &Conn) -> bool {
        conn.state() == State::TimeWait
    }
}

impl Conn {
    fn new(socket: tcp::Socket<'static>) -> Self {
        let mut set = SocketSet::new(Vec::with_capacity(1));
        let handle = set.add(socket);
        let (begun, fin_came) = (false, false);
        Self { set, handle, end: None, begun, fin_came, first: None, read: 0, closing_since: None }
    }

    fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.set.get_mut(self.handle)
    }

    fn state(&self) -> State {
        self.set.get::<tcp::Socket<'_>>(self.handle).state()
    }

    /// Cuts off what lies behind its buffer, and the FIN behind that; none is left of what begins
    /// there. A probe of a full buffer begins there too.
    fn fit(&mut self, frame: Frame) -> Option<Frame> {
        let Ok(packet) = Packet::parse(&frame.bytes) else { return Some(frame) };
        let Some((ip, tcp)) = packet.tcp() else { return Some(frame) };
        if tcp.flags.syn() {
            let opens = matches!(self.state(), State::Listen | State::SynSent);
            self.first = if opens { Some(tcp.seq + 1) } else { self.first };
            return Some(frame);
        }
        let socket = self.set.get::<tcp::Socket<'_>>(self.handle);
        let (capacity, is_full) = (socket.recv_capacity(), !can_hold_more(socket));
        let Some(first) = self.first else { return Some(frame) };
        let behind = first.unwrap(1 << 32) + self.read + capacity as u64;
        let room = behind.saturating_sub(tcp.seq.unwrap(behind));
        let fits = u64::from(tcp.payload_len) <= room || room == 0 && is_full;
        if fits || !tcp_checksum_ok(&frame.bytes, ip) {
            return Some(frame);
        }
        // As a network card cuts: the rest is dropped.
        let gso_type = if ip.version == IpVersion::V4 { GSO_TCPV4 } else { GSO_TCPV6 };
        let gso_size = u16::try_from(room).unwrap_or(u16::MAX);
        let hdr = VirtioNetHdr { gso_type, gso_size, ..VirtioNetHdr::default() };
        on_wire(Frame { hdr, bytes: frame.bytes }).into_iter().next()
    }

    /// Looks whether it has ended, and how: by an ACK of its FIN, or by something else.
    fn note_end(&mut self) {
        let state = self.state();
        self.begun |= state != State::Listen;
        self.fin_came |= matches!(state, State::CloseWait | State::Closing | State::LastAck)
            || state == State::TimeWait;
        let end = match state {
            State::TimeWait => Phase::Closed,
            State::Closed if self.end.is_none() => Phase::Reset,
            State::Listen if self.begun => Phase::Reset,
            _ => return,
        };
        self.end.get_or_insert(end);
    }

    /// Resets a connection whose FIN nobody acknowledges. One whose RST waits for a neighbour that
    /// does not answer is forgotten: smoltcp would ask for the neighbour twice a second, for ever.
    fn give_up(&mut self, now: Instant) {
        let closing = match self.state() {
            State::FinWait1 | State::Closing | State::LastAck => self.socket().send_queue() == 0,
            State::Closed => self.socket().remote_endpoint().is_some(),
            _ => false,
        };
        if !closing {
            self.closing_since = None;
        } else if now >= *self.closing_since.get_or_insert(now) + USER_TIMEOUT {
            self.closing_since = None;
            if self.state() == State::Closed {
                self.set.remove(self.handle);
                let nothing = || tcp::SocketBuffer::new(vec![]);
                self.handle = self.set.add(tcp::Socket::new(nothing(), nothing()));
            } else {
                self.socket().abort();
            }
        }
    }
}

impl Socket for Conn {
    fn phase(&self) -> Phase {
        self.end.unwrap_or(match self.state() {
            State::Listen | State::SynSent | State::SynReceived => Phase::Opening,
            _ => Phase::Open,
        })
    }

    fn send(&mut self, stream: Stream, at: u64, len: u64) -> u64 {
        let mut sent = 0;
        while sent < len && self.socket().can_send() {
            let piece = self.socket().send(|room| {
                let n = room.len().min(usize::try_from(len - sent).unwrap_or(usize::MAX));
                stream.fill(at + sent, &mut room[..n]);
                (n, n as u64)
            });
            sent += piece.expect("can send");
        }
        sent
    }

    fn recv(&mut self, expected: Stream, at: u64, reading: bool) -> Received {
        let mut got = Received::default();
        let all_is_here = self.fin_came || self.end.is_some();
        while (reading || all_is_here) && self.socket().can_recv() {
            let piece = self.socket().recv(|bytes| {
                let wrong_at = expected.first_difference(at + got.bytes, bytes);
                (bytes.len(), Received { bytes: bytes.len() as u64, wrong_at })
            });
            let piece = piece.expect("can receive");
            got.bytes += piece.bytes;
            self.read += piece.bytes;
            got.wrong_at = got.wrong_at.or(piece.wrong_at);
        }
        got
    }

    fn finished(&self) -> bool {
        self.fin_came && !self.set.get::<tcp::Socket<'_>>(self.handle).can_recv()
    }

    fn unacknowledged(&self) -> u64 {
        self.set.get::<tcp::Socket<'_>>(self.handle).send_queue() as u64
    }

    fn close(&mut self) {
        self.socket().close();
    }

    fn abort(&mut self) {
        self.socket().abort();
    }
}

/// smoltcp verifies every checksum. One that is unfinished is finished; one that the driver says is
/// valid is made so, because a guest would not look.
fn settle_checksum(Frame { hdr, bytes }: &mut Frame) {
    if hdr.needs_csum() {
        let start = usize::from(hdr.csum_start);
        let field = start + usize::from(hdr.csum_offset);
        if bytes.len() >= field + 2 {
            let check = written(&Sum16BitWords::new().add_slice(&bytes[start..]));
            bytes[field..field + 2].copy_from_slice(&check);
        }
    } else if hdr.flags & F_DATA_VALID != 0
        && let Ok(packet) = Packet::parse(bytes)
        && let Some((ip, _)) = packet.tcp()
    {
        let (start, end) = (usize::from(ip.payload_offset), ip.end as usize);
        let field = start + TCP_CHECKSUM_AT;
        bytes[field..field + 2].fill(0);
        let len = u32::try_from(end - start).expect("at most 64 KiB");
        let pseudo = pseudo_header(ip.version, ip.src, ip.dst, PROTOCOL_TCP, len);
        let check = written(&pseudo.add_slice(&bytes[start..end]));
        bytes[field..field + 2].copy_from_slice(&check);
    }
    *hdr = VirtioNetHdr::default();
}

fn can_hold_more(socket: &tcp::Socket<'_>) -> bool {
    socket.recv_queue() < socket.recv_capacity()
}

fn is_reset(frame: &[u8]) -> bool {
    Packet::parse(frame).is_ok_and(|packet| packet.tcp().is_some_and(|(_, tcp)| tcp.flags.rst()))
}

fn ip(address: &Address, v6: bool) -> IpAddress {
    if v6 { IpAddress::Ipv6(address.v6.into()) } else { IpAddress::Ipv4(address.v4.into()) }
}

fn micros(now: Instant) -> Micros {
    Micros::from_micros(i64::try_from(now.as_nanos() / 1000).expect("292,000 years"))
}
