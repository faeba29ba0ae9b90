//! Our own TCP, for features that smoltcp lacks: SACK both ways, ECN, odd options, any initial
//! sequence number, super-segments, window taken back, path MTU discovery. It refuses segments that
//! Linux 6.18 would refuse (K-01 to K-06) and complains of those that no conforming peer would have
//! sent.
//!
//! Theory of operation: [`Strict`] is the machine; a [`Conn`] is a connection. A segment goes
//! through `accept` (may it be processed?), then to the [`send::StackSender`] (its ACK) and the
//! [`receive::Receiver`] (its data); [`Conn::poll`] runs timers and makes the segments that can be
//! sent. Sequence numbers inside are unwrapped places (`ranges::Place`): 0 is the SYN.
//!
//! Caveats: no simultaneous open, no urgent data, no tail loss probes, Reno instead of CUBIC.
//! Streams are compared on arrival and not stored.

mod accept;
mod complaints;
mod congestion;
mod conn;
mod handshake;
mod incoming;
mod linux;
mod ranges;
mod receive;
mod send;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use nightporter_core::time::{Duration, Instant};

use self::complaints::Complaints;
pub use self::complaints::MAYBE_NETWORK;
use self::conn::{Conn, Habits};
use super::Complaint;
use super::address::{Address, Key};
use super::app::KEEPALIVE;
use super::emit::{Look, Route, Segment};
use super::neighbor;
use super::shell::{Ends, Tcp};
use crate::plan::{Machine, Offloads, Quirks, StackPlan};
use crate::random::Random;
use nightporter_check::frame::Frame;
use nightporter_check::wire::{Ip, Net, Packet, Tcp as TcpHeader, TcpFlags};

/// How far apart the initial sequence numbers of connections with the same ports are.
const ISN_STEP: u32 = 0x1000_0000;
/// Less than the hour after which the host forgets who says nothing (LIFE-02).
const KEEPALIVE_IN_SLEEP: Duration = Duration::from_secs(1800);

/// A machine with our TCP.
pub(super) struct Strict {
    plan: StackPlan,
    address: Address,
    mtu: u16,
    random: Random,
    looks: Random,
    shared: Shared,
    shrinking: bool,
    /// Connections made with ports that others had before.
    reused: u32,
    /// Its timestamp clock at time zero, for those: it goes on from one to the next.
    clock_from: u32,
    /// It leaves the timestamps out of some segments.
    omits_clock: bool,
}

/// Shared state of a machine's connections.
pub(super) struct Shared {
    frames: VecDeque<Frame>,
    complaints: Complaints,
    offloads: Offloads,
    ip_id: u16,
}

impl Shared {
    /// The next frame to leave.
    fn send(&mut self, route: &Route, segment: &Segment<'_>) {
        self.ip_id = self.ip_id.wrapping_add(1);
        let segment = Segment { id: self.ip_id, ..*segment };
        self.frames.push_back(segment.frame(route));
    }
}

impl Strict {
    pub(super) fn new(plan: &StackPlan, machine: Machine, mtu: u16, seed: u64) -> Self {
        let shared = Shared {
            frames: VecDeque::new(),
            complaints: Complaints::default(),
            offloads: Offloads::NONE,
            ip_id: 0,
        };
        Self {
            plan: plan.clone(),
            address: machine.address(),
            mtu,
            random: Random::new(seed, "strict"),
            looks: Random::new(seed, "looks"),
            shared,
            shrinking: false,
            reused: 0,
            clock_from: u32::try_from(Random::new(seed, "clock").below(1 << 32)).unwrap_or(0),
            omits_clock: plan.quirks.omits_clock && matches!(machine, Machine::Remote(_)),
        }
    }

    fn conn(&mut self, now: Instant, ends: &Ends, isn: Option<u32>) -> Conn {
        let number = |random: &mut Random| u32::try_from(random.below(1 << 32)).unwrap_or(0);
        let any = number(&mut self.random);
        let reused = ends.reuse.is_some();
        self.reused += u32::from(reused);
        let step = if reused { self.reused.wrapping_mul(ISN_STEP) } else { 0 };
        let by_chance = number(&mut self.random);
        let habits = Habits {
            isn: isn.unwrap_or(self.plan.isn.map_or(any, |isn| isn.wrapping_add(step))),
            ts_from: match self.plan.quirks.clock_first {
                Some(first) if reused => first,
                Some(first) => first.wrapping_sub(ticks(now, self.plan.quirks.clock_us)),
                None if reused => self.clock_from,
                None => by_chance,
            },
            omits_clock: self.omits_clock,
            probes_with_byte: self.random.percent(50),
            conn: ends.conn,
            patient: ends.patient,
            asks_after: match ends.patient {
                false => Some(KEEPALIVE),
                true => self.plan.quirks.asks_in_sleep.then_some(KEEPALIVE_IN_SLEEP),
            },
            forgives: reused,
            expected: ends.expected,
        };
        let mut route = Route::new(&self.address, &ends.key(), ends.peer.address().mac);
        route.look = self.look();
        let Quirks { extension_header, ip_options, .. } = self.plan.quirks;
        route.extension = if ends.v6 { extension_header } else { ip_options };
        Conn::new(now, &self.plan, route, habits, self.mtu)
    }

    /// A third of all connections look as most do; the others differ.
    fn look(&mut self) -> Look {
        if self.looks.percent(33) {
            return Look::default();
        }
        Look {
            ttl: self.looks.pick(&[32, 64, 128, 255]),
            dscp: u8::try_from(self.looks.below(64)).unwrap_or(0),
            label: u32::try_from(self.looks.below(1 << 20)).unwrap_or(0),
        }
    }

    /// A segment for no connection is answered by an RST (RFC 9293 section 3.10.7.1).
    fn refuse(&mut self, packet: &Packet, ip: &Ip, tcp: &TcpHeader) {
        if tcp.flags.rst() {
            return;
        }
        let key = Key { peer: ip.src.0, own_port: tcp.dst_port, peer_port: tcp.src_port };
        let route = Route::new(&self.address, &key, packet.eth.src);
        let (seq, ack, flags) = if tcp.flags.ack() {
            (tcp.ack.0, 0, TcpFlags::RST)
        } else {
            (0, (tcp.seq + tcp.seq_len()).0, TcpFlags::RST | TcpFlags::ACK)
        };
        self.shared.send(&route, &Segment { seq, ack, flags, ..Segment::default() });
    }

    fn handle_stray(&mut self, frame: &Frame, packet: &Packet) {
        if let Some(reply) = neighbor::answer(&self.address, &frame.bytes, packet) {
            self.shared.frames.push_back(Frame::on_wire(reply));
        } else if let Some((ip, tcp)) = packet.tcp()
            && packet.eth.dst == self.address.mac
            && [self.address.ip(false), self.address.ip(true)].contains(&ip.dst)
            && incoming::checksum_fault(frame, ip, self.shared.offloads).is_ok()
        {
            self.refuse(packet, ip, tcp);
        }
    }
}

/// Milliseconds since the beginning of time, or microseconds, modulo 2^32.
#[expect(clippy::cast_possible_truncation, reason = "the clock wraps")]
fn ticks(now: Instant, us: bool) -> u32 {
    if us { (now.as_nanos() / 1000) as u32 } else { now.as_millis() as u32 }
}

impl Tcp for Strict {
    type Conn = Conn;

    fn connect(&mut self, now: Instant, ends: &Ends) -> Conn {
        let mut conn = self.conn(now, ends, ends.reuse.and_then(|reuse| reuse.isn));
        conn.connect();
        conn
    }

    fn listen(&mut self, now: Instant, ends: &Ends) -> Conn {
        self.conn(now, ends, None)
    }

    fn handle(&mut self, now: Instant, conn: Option<&mut Conn>, frame: Frame) {
        let Ok(packet) = Packet::parse(&frame.bytes) else { return };
        let Some(conn) = conn else { return self.handle_stray(&frame, &packet) };
        match (packet.tcp(), &packet.net) {
            (Some((ip, tcp)), _) => {
                match incoming::checksum_fault(&frame, ip, self.shared.offloads) {
                    Ok(()) => conn.handle(now, &mut self.shared, &frame, ip, tcp),
                    Err(cause) => conn.complain(&mut self.shared, cause),
                }
            }
            (None, Net::Ip(ip)) => {
                if let Some(too_big) = neighbor::too_big(&frame.bytes, ip) {
                    conn.on_too_big(&too_big);
                }
            }
            _ => {}
        }
    }

    fn poll(&mut self, now: Instant, conn: &mut Conn) -> Option<Instant> {
        conn.set_shrinking(self.shrinking);
        conn.poll(now, &mut self.shared)
    }

    fn next_frame(&mut self) -> Option<Frame> {
        self.shared.frames.pop_front()
    }

    fn is_listening(conn: &Conn) -> bool {
        conn.stage == conn::Stage::Listen
    }

    fn may_be_replaced(conn: &Conn) -> bool {
        conn.is_in_time_wait()
    }

    fn quoted(frame: &[u8], packet: &Packet) -> Option<Key> {
        let Net::Ip(ip) = &packet.net else { return None };
        neighbor::too_big(frame, ip).map(|too_big| too_big.key)
    }

    fn set_shrinking(&mut self, on: bool) {
        self.shrinking = on;
    }

    fn set_offloads(&mut self, offloads: Offloads) {
        self.shared.offloads = offloads;
    }

    fn complaints(&self) -> Vec<Complaint> {
        self.shared.complaints.list()
    }
}
