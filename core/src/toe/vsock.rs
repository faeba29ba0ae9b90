//! One vsock connection of a guest, seen from the host (virtio 1.2 section 5.10.6).
//!
//! It keeps the credit of both directions and interprets the packets of the guest. A packet that an
//! honest driver would not send is a [`Lie`], and ends this connection.
//!
//! Linux is why some things are as they are (`virtio_transport_common.c`):
//!
//! - It allows itself no more than its own buffer even if ours is larger. So `fwd_cnt` counts all
//!   received bytes, which is true, as nothing is kept here, and `buf_alloc` is the room beyond;
//!   and it gets `fwd_cnt` before it has sent a buffer of its own, however much room there is.
//! - It silently drops payload for which it has no buffer. So the present buffer bounds the bytes
//!   sent to the guest, and a buffer that becomes smaller than the bytes under way ends the
//!   connection: drops would remain unknown.
//! - Since 2026 it charges its buffer for each packet besides the payload, and resets the socket if
//!   that is too much. So each packet takes `TOE_PACKET_COST` of the room. It reports bytes that
//!   were read: all packets up to a *mark* are known to be read when their bytes are. A guest with
//!   packets outstanding for half of its buffer is asked (CREDIT_REQUEST), because before 6.7 it
//!   reports nothing until few *bytes* are left.
//! - A packet about a socket that is gone gets a reset that tells no credit.

use super::message::DATA_MAX;
use crate::limits::{TOE_CREDIT_STEP, TOE_PACKET_COST, TOE_PACKET_FULL};
use crate::wire::vsock::{HOST_CID, Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, STREAM};

/// Bytes of a buffer that a full packet takes.
const FULL_COST: u64 = TOE_PACKET_FULL + TOE_PACKET_COST;
/// Least room shown for a guest that has read everything, if its buffer has it: packets that are
/// not full, as the first of a small buffer, are few.
const LEAST: u64 = 3 * TOE_PACKET_COST;

/// The two ports of a connection: its name in the guest.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Ports {
    /// The guest's.
    pub guest: u32,
    /// The host's.
    pub host: u32,
}

/// The meaning of a guest's packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Meaning {
    /// No effect on the other end; the guest may have more room.
    Nothing,
    /// The guest has accepted the connection that the host asked for.
    Accepted,
    /// Payload: so many bytes behind the header.
    Data(u32),
    /// The guest has finished its stream.
    Finished,
    /// The guest has closed the socket. `unread`: before it had read everything.
    Closed {
        /// Whether bytes were not read.
        unread: bool,
    },
    /// The guest has no such connection.
    Reset,
}

/// A packet that no honest driver sends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lie {
    /// An operation that does not fit the connection's phase.
    Operation,
    /// A length that the packet, or any packet, does not have.
    Length,
    /// More payload than it was given room for.
    NoRoom,
    /// A report of more read bytes than it was given.
    Credit,
    /// A buffer smaller than the unread bytes.
    Shrunk,
}

/// The phase of the connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    /// The guest has asked for the connection and has no answer yet.
    Asked,
    /// The host has asked for the connection and has no answer yet.
    Calling,
    /// Both sides have it.
    Connected,
    /// One of them has ended it.
    Closed,
}

/// Packets that are due to the guest.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    request: bool,
    response: bool,
    shutdown: bool,
    credit: bool,
    ask: bool,
    reset: bool,
}

/// Packets with payload that the guest was given.
#[derive(Clone, Copy, Debug, Default)]
struct Packets {
    given: u64,
    /// Packets that its application has certainly read.
    read: u64,
    /// The mark: bytes and the packets up to them.
    mark: (u64, u64),
    /// A credit request was sent since the mark was set.
    asked: bool,
}

impl Packets {
    const fn outstanding(&self) -> u64 {
        self.given - self.read
    }
}

/// A connection. See the module's doc.
#[derive(Debug)]
pub struct Connection {
    guest_cid: u64,
    ports: Ports,
    phase: Phase,
    due: Due,
    /// Directions that the guest has shut.
    shut: u32,
    /// Bytes from the guest, and the number last reported to it.
    received: u64,
    received_told: u64,
    /// The edge of its room, and the edge that it knows.
    edge: u64,
    edge_told: u64,
    /// Bytes put into its memory.
    given: u64,
    /// Bytes that its application has read.
    read: u64,
    packets: Packets,
    /// A credit request was sent and has no answer yet.
    is_asked: bool,
    /// Bytes of its buffer.
    buf_alloc: u32,
}

impl Connection {
    /// A connection that the guest asks for by this header, whose operation is [`Op::Request`].
    #[must_use]
    pub fn asked(guest_cid: u64, header: &Header) -> Self {
        let ports = Ports { guest: header.src_port, host: header.dst_port };
        Self::new(guest_cid, ports, Phase::Asked, header.buf_alloc)
    }

    /// A connection that the host asks the guest for.
    #[must_use]
    pub fn call(guest_cid: u64, ports: Ports) -> Self {
        let mut call = Self::new(guest_cid, ports, Phase::Calling, 0);
        call.due.request = true;
        call
    }

    fn new(guest_cid: u64, ports: Ports, phase: Phase, buf_alloc: u32) -> Self {
        Self {
            guest_cid,
            ports,
            phase,
            due: Due::default(),
            shut: 0,
            received: 0,
            received_told: 0,
            edge: 0,
            edge_told: 0,
            given: 0,
            read: 0,
            packets: Packets::default(),
            is_asked: false,
            buf_alloc,
        }
    }

    /// Its name.
    #[must_use]
    pub const fn ports(&self) -> Ports {
        self.ports
    }

    /// The guest's socket has room up to here, counted from the beginning of the stream.
    #[must_use]
    pub const fn edge_to_guest(&self) -> u64 {
        self.read.saturating_add(self.buf_alloc as u64)
    }

    /// The other end may send up to here. The cost of packets is deducted, as if all but a few were
    /// full, so that everything that comes can be given.
    #[must_use]
    pub fn edge_to_promise(&self) -> u64 {
        let free = self.free().saturating_sub(self.spare());
        let (packets, rest) = (free / FULL_COST, free % FULL_COST);
        let fits = packets * TOE_PACKET_FULL + rest.saturating_sub(TOE_PACKET_COST);
        let least = u64::from(self.buf_alloc).min(LEAST);
        self.given + if self.has_unread() { fits } else { fits.max(least) }
    }

    /// Of the `waiting` bytes, the number for a packet now; `promised` counts them and those that
    /// may still come. Few bytes wait for more if the cost of their packet has no room beside the
    /// promised bytes; the guest has other data to read meanwhile.
    #[must_use]
    pub fn takes(&self, waiting: u64, promised: u64) -> u64 {
        let len = self.room_to_guest().min(waiting);
        if waiting >= TOE_PACKET_FULL || waiting >= promised || !self.has_unread() {
            return len;
        }
        let later = promised - waiting;
        let cost = later + later.div_ceil(TOE_PACKET_FULL) * TOE_PACKET_COST;
        if self.free() >= waiting + TOE_PACKET_COST + cost { len } else { 0 }
    }

    /// Bytes that the guest has reported as read.
    #[must_use]
    pub const fn read(&self) -> u64 {
        self.read
    }

    /// Whether it has not reported all bytes as read.
    #[must_use]
    pub const fn has_unread(&self) -> bool {
        self.read < self.given
    }

    /// The free part of the guest's buffer.
    const fn free(&self) -> u64 {
        let taken = self.given + self.packets.outstanding() * TOE_PACKET_COST;
        self.edge_to_guest().saturating_sub(taken)
    }

    /// Room for the cost of packets that are not full.
    fn spare(&self) -> u64 {
        (u64::from(self.buf_alloc) / 16).max(2 * TOE_PACKET_COST)
    }

    /// Bytes that the guest's socket has room for when it is empty.
    #[must_use]
    pub fn buffer(&self) -> u64 {
        self.buf_alloc.into()
    }

    /// Bytes that may be given to the guest now, in one packet. Zero before its answer was polled.
    #[must_use]
    pub fn room_to_guest(&self) -> u64 {
        self.room_in(1)
    }

    /// Bytes that may be given in `packets` packets together.
    #[must_use]
    pub fn room_in(&self, packets: u64) -> u64 {
        if self.phase != Phase::Connected || self.due.response {
            return 0;
        }
        let room = self.edge_to_guest().saturating_sub(self.given);
        let outstanding = self.packets.outstanding();
        // A buffer that is smaller than its first packet's cost takes one packet nevertheless.
        if outstanding == 0 && packets == 1 && u64::from(self.buf_alloc) < 2 * TOE_PACKET_COST {
            return room;
        }
        room.saturating_sub((outstanding + packets) * TOE_PACKET_COST)
    }

    /// Sends a credit request, unless one is open: a guest that does not run is not asked again.
    pub fn ask(&mut self) {
        self.due.ask |= self.phase == Phase::Connected && !self.is_asked;
    }

    /// Whether either side's answer is missing.
    #[must_use]
    pub const fn is_opening(&self) -> bool {
        matches!(self.phase, Phase::Asked | Phase::Calling)
    }

    /// Bytes received from the guest.
    #[must_use]
    pub const fn received(&self) -> u64 {
        self.received
    }

    /// Whether the connection is over.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Closed)
    }

    /// Whether the connection is over and the guest knows.
    #[must_use]
    pub const fn is_spent(&self) -> bool {
        matches!(self.phase, Phase::Closed) && !self.due.reset
    }

    /// A packet of the guest; `payload` bytes are behind its header.
    ///
    /// # Errors
    /// The packet is a lie. The connection is over; a reset is due.
    pub fn handle(&mut self, header: &Header, payload: usize) -> Result<Meaning, Lie> {
        let heard = self.obey(header, payload);
        if heard.is_err() {
            self.reset();
        }
        heard
    }

    fn obey(&mut self, header: &Header, payload: usize) -> Result<Meaning, Lie> {
        let op = header.op.ok_or(Lie::Operation)?;
        if header.kind != STREAM {
            return Err(Lie::Operation);
        }
        if op == Op::Reset {
            self.forget();
            return Ok(Meaning::Reset);
        }
        match (self.phase, op) {
            (Phase::Calling, Op::Response) | (Phase::Connected, _) => {}
            // A process may set the buffer's size, or shut the socket, before it has an answer.
            (Phase::Asked, Op::CreditUpdate | Op::CreditRequest | Op::Shutdown) => {}
            (Phase::Closed, _) => return Ok(Meaning::Nothing),
            _ => return Err(Lie::Operation),
        }
        let len = if op == Op::Data { header.len } else { 0 };
        if header.len != len || len > DATA_MAX || len as usize > payload {
            return Err(Lie::Length);
        }
        self.hear_credit(header)?;
        match op {
            Op::Response if self.phase == Phase::Calling => {
                self.phase = Phase::Connected;
                Ok(Meaning::Accepted)
            }
            Op::Data => self.take(len),
            Op::Shutdown => Ok(self.shut(header.flags)),
            Op::CreditRequest => {
                self.due.credit = self.phase == Phase::Connected;
                Ok(Meaning::Nothing)
            }
            Op::CreditUpdate => Ok(Meaning::Nothing),
            Op::Request | Op::Response | Op::Reset => Err(Lie::Operation),
        }
    }

    /// The guest may send up to `edge`. Shown room is not taken back.
    pub fn set_edge(&mut self, edge: u64) {
        self.edge = edge.max(self.edge_told);
    }

    /// The guest's connect() succeeds.
    pub fn respond(&mut self) {
        if self.phase == Phase::Asked {
            self.phase = Phase::Connected;
            self.due.response = true;
        }
    }

    /// The guest's application reads an end of file behind the bytes given so far.
    pub fn finish(&mut self) {
        self.due.shutdown = self.phase == Phase::Connected;
    }

    /// The connection is over.
    pub fn reset(&mut self) {
        if self.phase != Phase::Closed {
            // A guest that has not got the request needs no reset.
            let reset = !self.due.request;
            self.phase = Phase::Closed;
            self.due = Due { reset, ..Due::default() };
        }
    }

    /// Ends the connection without a packet.
    pub fn forget(&mut self) {
        self.phase = Phase::Closed;
        self.due = Due::default();
    }

    /// The header of `len` bytes of payload for the guest's memory. There must be room.
    #[must_use]
    pub fn give(&mut self, len: u32) -> Header {
        assert!(u64::from(len) <= self.room_to_guest(), "{len} bytes without room");
        self.given += u64::from(len);
        self.packets.given += 1;
        let (unread, cost) = (self.given - self.read, self.packets.outstanding() * TOE_PACKET_COST);
        let planned = unread.div_ceil(TOE_PACKET_FULL) * TOE_PACKET_COST;
        let is_half = 2 * (unread + cost) > u64::from(self.buf_alloc);
        if !self.packets.asked && (is_half || 2 * cost.saturating_sub(planned) > self.spare()) {
            self.packets.asked = true;
            self.ask();
        }
        Header { len, ..self.header(Op::Data) }
    }

    /// Whether [`Self::poll_packet`] has one.
    #[must_use]
    pub fn has_packet(&self) -> bool {
        let Due { request, response, shutdown, credit, ask, reset } = self.due;
        request || response || shutdown || credit || ask || reset || self.is_credit_due()
    }

    /// The next packet without payload for the guest, with its present content. It stays due until
    /// it is taken.
    #[must_use]
    pub fn poll_packet(&mut self) -> Option<Header> {
        let due = &mut self.due;
        let op = if std::mem::take(&mut due.reset) {
            Op::Reset
        } else if std::mem::take(&mut due.request) {
            Op::Request
        } else if std::mem::take(&mut due.response) {
            Op::Response
        } else if std::mem::take(&mut due.shutdown) {
            return Some(Header { flags: SHUTDOWN_SEND, ..self.header(Op::Shutdown) });
        } else if std::mem::take(&mut due.ask) {
            self.is_asked = true;
            Op::CreditRequest
        } else if std::mem::take(&mut due.credit) || self.is_credit_due() {
            Op::CreditUpdate
        } else {
            return None;
        };
        Some(self.header(op))
    }

    /// Takes the credit in a header.
    fn hear_credit(&mut self, header: &Header) -> Result<(), Lie> {
        let more = header.fwd_cnt.wrapping_sub(low(self.read));
        let read = self.read + u64::from(more);
        // A counter that went back looks like one far ahead.
        if read > self.given {
            return Err(Lie::Credit);
        }
        self.read = read;
        self.is_asked = false;
        self.hear_packets();
        let before = std::mem::replace(&mut self.buf_alloc, header.buf_alloc);
        let charged = self.packets.outstanding() * TOE_PACKET_COST;
        if header.buf_alloc < before && self.given + charged > self.edge_to_guest() {
            return Err(Lie::Shrunk);
        }
        Ok(())
    }

    /// Updates the packets that were read.
    fn hear_packets(&mut self) {
        let Packets { given, mark, .. } = self.packets;
        if self.read == self.given {
            self.packets = Packets { given, read: given, mark: (self.given, given), asked: false };
        } else if self.read >= mark.0 {
            self.packets = Packets { given, read: mark.1, mark: (self.given, given), asked: false };
        }
    }

    fn take(&mut self, len: u32) -> Result<Meaning, Lie> {
        if self.shut & SHUTDOWN_SEND != 0 {
            return Err(Lie::Operation);
        }
        if len == 0 {
            return Ok(Meaning::Nothing);
        }
        let received = self.received + u64::from(len);
        if received > self.edge_told {
            return Err(Lie::NoRoom);
        }
        self.received = received;
        Ok(Meaning::Data(len))
    }

    fn shut(&mut self, flags: u32) -> Meaning {
        if self.phase == Phase::Asked {
            // As in TCP, the guest gives up connecting.
            self.reset();
            return Meaning::Closed { unread: false };
        }
        let both = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
        let before = self.shut;
        self.shut |= flags & both;
        if self.shut == both {
            // Linux would wait for this for eight seconds.
            self.reset();
            return Meaning::Closed { unread: self.read < self.given };
        }
        let finished = before & SHUTDOWN_SEND == 0 && self.shut & SHUTDOWN_SEND != 0;
        if finished { Meaning::Finished } else { Meaning::Nothing }
    }

    fn is_credit_due(&self) -> bool {
        let news = self.edge - self.edge_told;
        let wanted = matches!(self.phase, Phase::Connected) && self.shut & SHUTDOWN_SEND == 0;
        let little = self.edge_told - self.received < TOE_CREDIT_STEP;
        // The guest may have sent half of its own limit.
        let half = u64::from(self.buf_alloc) / 2;
        let untold = self.received - self.received_told;
        let own = untold >= TOE_CREDIT_STEP || untold > 0 && untold >= half;
        wanted && (news >= TOE_CREDIT_STEP || news > 0 && little || own)
    }

    fn header(&mut self, op: Op) -> Header {
        let room = self.edge - self.received;
        let buf_alloc = u32::try_from(room).unwrap_or(u32::MAX);
        self.edge_told = self.edge_told.max(self.received + u64::from(buf_alloc));
        self.received_told = self.received;
        Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: self.ports.host,
            dst_port: self.ports.guest,
            len: 0,
            kind: STREAM,
            op: Some(op),
            flags: 0,
            buf_alloc,
            fwd_cnt: low(self.received),
        }
    }
}

/// A reset of this connection for the guest of this CID.
#[must_use]
pub const fn reset(guest_cid: u64, ports: Ports) -> Header {
    Header {
        src_cid: HOST_CID,
        dst_cid: guest_cid,
        src_port: ports.host,
        dst_port: ports.guest,
        len: 0,
        kind: STREAM,
        op: Some(Op::Reset),
        flags: 0,
        buf_alloc: 0,
        fwd_cnt: 0,
    }
}

/// The answer to a packet of no connection, if there is one. `cid` is the sender's, whatever the
/// packet has.
#[must_use]
pub fn for_nobody(guest_cid: u64, header: &Header) -> Option<Header> {
    // A reset is not answered by a reset.
    (header.op != Some(Op::Reset)).then_some(Header {
        src_cid: header.dst_cid,
        dst_cid: guest_cid,
        src_port: header.dst_port,
        dst_port: header.src_port,
        len: 0,
        kind: header.kind,
        op: Some(Op::Reset),
        flags: 0,
        buf_alloc: 0,
        fwd_cnt: 0,
    })
}

/// The low half, which is what a header carries.
const fn low(count: u64) -> u32 {
    (count & 0xffff_ffff) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTS: Ports = Ports { guest: 1025, host: 2 };

    fn packet(op: Op) -> Header {
        Header {
            src_cid: 9,
            dst_cid: HOST_CID,
            src_port: PORTS.guest,
            dst_port: PORTS.host,
            len: 0,
            kind: STREAM,
            op: Some(op),
            flags: 0,
            buf_alloc: 100_000,
            fwd_cnt: 0,
        }
    }

    /// A connection that the guest asked for, and may send 1000 bytes on.
    fn connected() -> Connection {
        let mut connection = Connection::asked(9, &packet(Op::Request));
        assert_eq!((connection.poll_packet(), connection.room_to_guest()), (None, 0));
        connection.set_edge(1000);
        connection.respond();
        let answer = connection.poll_packet().expect("an answer");
        assert_eq!((answer.op, answer.buf_alloc, answer.fwd_cnt), (Some(Op::Response), 1000, 0));
        assert_eq!((answer.dst_cid, answer.dst_port, answer.src_port), (9, 1025, 2));
        assert_eq!(connection.room_to_guest(), 100_000 - TOE_PACKET_COST);
        connection
    }

    #[test]
    fn a_guest_is_told_of_room_and_kept_to_it() {
        let mut c = connected();
        let data = |len| Header { len, ..packet(Op::Data) };
        assert_eq!(c.handle(&data(600), 600), Ok(Meaning::Data(600)));
        assert_eq!(c.poll_packet(), None, "there is no news");
        c.set_edge(5000);
        let told = c.poll_packet().expect("there is");
        assert_eq!((told.op, told.fwd_cnt, told.buf_alloc), (Some(Op::CreditUpdate), 600, 4400));
        c.set_edge(4000);
        assert_eq!(c.poll_packet(), None, "room is not taken back");
        assert_eq!(c.handle(&packet(Op::CreditRequest), 0), Ok(Meaning::Nothing));
        assert_eq!(c.poll_packet(), Some(told));
        assert_eq!(c.handle(&data(4401), 4401), Err(Lie::NoRoom));
        assert_eq!(c.poll_packet().and_then(|p| p.op), Some(Op::Reset));
        assert!(c.is_spent());
    }

    #[test]
    fn what_a_guest_is_given_fits_the_buffer_that_it_has_now() {
        let mut c = connected();
        let given = c.give(60_000);
        assert_eq!((given.op, given.len), (Some(Op::Data), 60_000));
        let smaller = Header { buf_alloc: 50_000, fwd_cnt: 20_000, ..packet(Op::CreditUpdate) };
        assert_eq!(c.handle(&smaller, 0), Ok(Meaning::Nothing));
        assert_eq!((c.edge_to_guest(), c.room_to_guest()), (70_000, 10_000 - 2 * TOE_PACKET_COST));
        assert_eq!(c.give(1000).len, 1000);
        let least = Header { buf_alloc: 41_000 + 2 * 768, ..smaller };
        assert_eq!(c.handle(&least, 0), Ok(Meaning::Nothing));
        assert_eq!(c.room_to_guest(), 0);
        // Linux drops bytes under way to a buffer that has become too small, some silently.
        let less = Header { buf_alloc: least.buf_alloc - 1, ..smaller };
        assert_eq!(c.handle(&less, 0), Err(Lie::Shrunk));
        let mut c = connected();
        let none = Header { buf_alloc: 0, ..packet(Op::CreditUpdate) };
        assert_eq!(c.handle(&none, 0), Ok(Meaning::Nothing), "it was given nothing");
        assert_eq!((c.edge_to_guest(), c.room_to_guest()), (0, 0));
    }

    #[test]
    fn vtoe_10_a_guest_hears_what_came_before_it_has_sent_a_buffer_of_its_own() {
        // Linux sends at most its own buffer beyond the reported bytes.
        for own in [1000, 20_000, 262_144] {
            let mut c = Connection::asked(9, &Header { buf_alloc: own, ..packet(Op::Request) });
            c.set_edge(1 << 20);
            c.respond();
            let mut told = c.poll_packet().expect("an answer").fwd_cnt;
            let mut sent = 0;
            while sent < 1 << 20 {
                let len = (own - (sent - told)).min((1 << 20) - sent).min(4096);
                assert!(len > 0, "it has sent {own} bytes and was told of nothing");
                let data = Header { buf_alloc: own, len, ..packet(Op::Data) };
                assert_eq!(c.handle(&data, len as usize), Ok(Meaning::Data(len)));
                sent += len;
                if let Some(packet) = c.poll_packet() {
                    assert_eq!((packet.op, packet.fwd_cnt), (Some(Op::CreditUpdate), sent));
                    told = sent;
                }
            }
        }
    }

    /// Linux's charge for an unread packet.
    const TRUESIZE: u32 = 576;

    #[test]
    fn vtoe_10_a_guest_has_place_for_so_many_packets_and_is_asked_what_it_has_read() {
        let mut c = connected();
        let mut asked = 0;
        let mut give_all = |c: &mut Connection| {
            let mut given = 0;
            while c.room_to_guest() > 0 {
                let _ = c.give(1);
                given += 1;
                while let Some(packet) = c.poll_packet() {
                    assert_eq!(packet.op, Some(Op::CreditRequest));
                    asked += 1;
                }
            }
            (given, std::mem::take(&mut asked))
        };
        let (first, asked) = give_all(&mut c);
        assert!(first * (TRUESIZE + 1) <= 100_000 && first > 100, "{first}");
        assert_eq!((asked, c.has_unread()), (1, true));
        c.ask();
        assert_eq!(c.poll_packet(), None, "it has not answered the last");
        let told = |fwd_cnt| Header { fwd_cnt, ..packet(Op::CreditUpdate) };
        assert_eq!(c.handle(&told(0), 0), Ok(Meaning::Nothing));
        assert_eq!(c.room_to_guest(), 0, "it has read nothing");
        c.ask();
        assert_eq!(c.poll_packet().and_then(|p| p.op), Some(Op::CreditRequest));
        // All bytes but one: the packets are known to be read with the last byte.
        assert_eq!(c.handle(&told(first - 1), 0), Ok(Meaning::Nothing));
        assert_eq!((c.room_to_guest(), c.has_unread()), (0, true));
        assert_eq!(c.handle(&told(first), 0), Ok(Meaning::Nothing));
        assert_eq!(c.room_to_guest(), 100_000 - TOE_PACKET_COST);
        assert_eq!(give_all(&mut c), (first, 1));
        // The mark is at `2 * first` now, and later packets stay counted.
        assert_eq!(c.handle(&told(first + 1), 0), Ok(Meaning::Nothing));
        assert_eq!(c.handle(&told(2 * first), 0), Ok(Meaning::Nothing));
        assert_eq!(give_all(&mut c), (first, 1));
    }

    #[test]
    fn vtoe_10_packets_up_to_the_mark_are_read_when_their_bytes_are() {
        let mut c = connected();
        let told = |fwd_cnt| Header { fwd_cnt, ..packet(Op::CreditUpdate) };
        (0..10).for_each(|_| assert_eq!(c.give(1).len, 1));
        // Sets the mark at 10 bytes.
        assert_eq!(c.handle(&told(1), 0), Ok(Meaning::Nothing));
        (0..5).for_each(|_| assert_eq!(c.give(1).len, 1));
        assert_eq!(c.room_to_guest(), 100_001 - 15 - 16 * TOE_PACKET_COST);
        assert_eq!(c.handle(&told(9), 0), Ok(Meaning::Nothing));
        assert_eq!(c.room_to_guest(), 100_009 - 15 - 16 * TOE_PACKET_COST);
        assert_eq!(c.handle(&told(10), 0), Ok(Meaning::Nothing));
        assert_eq!(c.room_to_guest(), 100_010 - 15 - 6 * TOE_PACKET_COST);
        assert_eq!(c.handle(&told(14), 0), Ok(Meaning::Nothing));
        assert_eq!(c.room_to_guest(), 100_014 - 15 - 6 * TOE_PACKET_COST, "the mark is at 15");
        assert_eq!(c.handle(&told(15), 0), Ok(Meaning::Nothing));
        assert_eq!(c.room_to_guest(), 100_000 - TOE_PACKET_COST);
    }

    #[test]
    fn a_buffer_that_is_smaller_than_a_packet_takes_one_at_a_time() {
        let mut c = connected();
        let told = |fwd_cnt| Header { buf_alloc: 100, fwd_cnt, ..packet(Op::CreditUpdate) };
        assert_eq!(c.handle(&told(0), 0), Ok(Meaning::Nothing));
        assert_eq!(c.room_to_guest(), 100);
        let _ = c.give(60);
        assert_eq!((c.room_to_guest(), c.has_unread()), (0, true));
        assert_eq!(c.handle(&told(60), 0), Ok(Meaning::Nothing));
        assert_eq!((c.room_to_guest(), c.has_unread()), (100, false));
    }

    #[test]
    fn a_process_sets_its_buffer_or_shuts_the_socket_while_it_connects() {
        for op in [Op::CreditUpdate, Op::CreditRequest] {
            let mut c = Connection::asked(9, &packet(Op::Request));
            let told = Header { buf_alloc: 7777, ..packet(op) };
            assert_eq!(c.handle(&told, 0), Ok(Meaning::Nothing));
            assert_eq!((c.edge_to_guest(), c.poll_packet()), (7777, None), "it has no answer yet");
            c.respond();
            assert_eq!(c.poll_packet().and_then(|p| p.op), Some(Op::Response));
            assert_eq!(c.poll_packet(), None);
        }
        for flags in [SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SHUTDOWN_RECEIVE | SHUTDOWN_SEND] {
            let mut c = Connection::asked(9, &packet(Op::Request));
            let shut = Header { flags, ..packet(Op::Shutdown) };
            assert_eq!(c.handle(&shut, 0), Ok(Meaning::Closed { unread: false }));
            assert_eq!(c.poll_packet().and_then(|p| p.op), Some(Op::Reset));
        }
        let mut c = Connection::call(9, PORTS);
        let _ = c.poll_packet();
        assert_eq!(c.handle(&packet(Op::CreditUpdate), 0), Err(Lie::Operation));
    }

    #[test]
    fn the_count_of_what_was_read_passes_4_gib() {
        let mut c = connected();
        let mut read = 0_u64;
        while read < 9 << 30 {
            let _ = c.give(50_000);
            read += 50_000;
            let fwd_cnt = u32::try_from(read & 0xffff_ffff).expect("low");
            let told = Header { fwd_cnt, ..packet(Op::CreditUpdate) };
            assert_eq!(c.handle(&told, 0), Ok(Meaning::Nothing));
            assert_eq!(c.edge_to_guest(), read + 100_000);
        }
    }

    #[test]
    fn each_lie_ends_the_connection_with_a_reset() {
        let data = packet(Op::Data);
        let lies = [
            (Header { op: None, ..data }, 0, Lie::Operation),
            (Header { kind: 2, ..data }, 0, Lie::Operation),
            (packet(Op::Request), 0, Lie::Operation),
            (packet(Op::Response), 0, Lie::Operation),
            (Header { len: 10, ..data }, 9, Lie::Length),
            (Header { len: DATA_MAX + 1, ..data }, DATA_MAX as usize + 1, Lie::Length),
            (Header { len: 1, ..packet(Op::CreditUpdate) }, 1, Lie::Length),
            (Header { len: 1001, ..data }, 1001, Lie::NoRoom),
            (Header { fwd_cnt: 51, ..packet(Op::CreditUpdate) }, 0, Lie::Credit),
            (Header { fwd_cnt: u32::MAX, ..data }, 0, Lie::Credit),
        ];
        for (lie, payload, what) in lies {
            let mut c = connected();
            let _ = c.give(50);
            assert_eq!(c.handle(&lie, payload), Err(what), "{lie:?}");
            let answer = c.poll_packet().expect("a reset");
            assert_eq!((answer.op, answer.dst_port), (Some(Op::Reset), PORTS.guest));
            assert!(c.is_spent() && c.poll_packet().is_none());
        }
        let mut c = connected();
        let shut = Header { flags: SHUTDOWN_SEND, ..packet(Op::Shutdown) };
        assert_eq!(c.handle(&shut, 0), Ok(Meaning::Finished));
        assert_eq!(c.handle(&Header { len: 1, ..data }, 1), Err(Lie::Operation));
        let mut early = Connection::asked(9, &packet(Op::Request));
        assert_eq!(early.handle(&data, 0), Err(Lie::Operation), "it has no answer yet");
    }

    #[test]
    fn a_guest_finishes_and_closes() {
        for (unread, fwd_cnt) in [(false, 50), (true, 49)] {
            let mut c = connected();
            let _ = c.give(50);
            let shut = |flags| Header { flags, fwd_cnt, ..packet(Op::Shutdown) };
            assert_eq!(c.handle(&shut(SHUTDOWN_RECEIVE), 0), Ok(Meaning::Nothing), "as in TCP");
            assert_eq!(c.handle(&shut(8), 0), Ok(Meaning::Nothing));
            assert_eq!(c.handle(&shut(SHUTDOWN_SEND), 0), Ok(Meaning::Closed { unread }));
            assert_eq!(c.poll_packet().and_then(|p| p.op), Some(Op::Reset));
        }
        let mut c = connected();
        c.finish();
        let end = c.poll_packet().expect("an end");
        assert_eq!((end.op, end.flags), (Some(Op::Shutdown), SHUTDOWN_SEND));
        assert_eq!(c.handle(&packet(Op::Reset), 0), Ok(Meaning::Reset));
        assert!(c.is_spent() && c.poll_packet().is_none(), "a reset has no answer");
    }

    #[test]
    fn the_host_calls() {
        let mut c = Connection::call(9, PORTS);
        c.set_edge(10);
        let request = c.poll_packet().expect("a request");
        assert_eq!((request.op, request.buf_alloc), (Some(Op::Request), 10));
        assert_eq!(c.handle(&packet(Op::Response), 0), Ok(Meaning::Accepted));
        assert_eq!(c.room_to_guest(), 100_000 - TOE_PACKET_COST);
        let mut untold = Connection::call(9, PORTS);
        untold.reset();
        assert_eq!(untold.poll_packet(), None, "it was never asked");
    }

    #[test]
    fn a_packet_for_nobody_is_reset_and_a_reset_is_not() {
        let stray = Header { src_cid: 77, dst_cid: 88, ..packet(Op::Data) };
        let answer = for_nobody(9, &stray).expect("an answer");
        assert_eq!((answer.op, answer.dst_cid, answer.src_cid), (Some(Op::Reset), 9, 88));
        assert_eq!((answer.dst_port, answer.src_port), (PORTS.guest, PORTS.host));
        assert_eq!(for_nobody(9, &packet(Op::Reset)), None);
    }
}
