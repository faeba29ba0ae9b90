//! The surroundings of the engine and its turn in a trace: the ports, and the two ends behind them.

use std::fmt::Write as _;

use super::monitor::Monitor;
use super::segment::{Seen, pattern_bytes};
use super::setup::Setup;
use super::world::{Conn, End, Passing, Side};
use nightporter_check::frame::Frame;
use nightporter_check::rule::Violation;
use nightporter_check::tap::Tap;
use nightporter_check::wire::{Segment, TcpFlags};
use nightporter_core::drops::DropReason;
use nightporter_core::flow::key::FlowKey;
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nightporter_core::trace::SegmentLine;
use nightporter_core::turn::{Ports, Received, Sent};
use nightporter_core::wire::packet::{IpVersion, Packet, Seq};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_testkit::segment::Spec;

/// Bytes of the largest buffer of a ring.
const ROOM: usize = 65_562;

/// A guest port's ring.
#[derive(Debug)]
pub struct Ring {
    pub port: PortId,
    /// Frames it takes before the guest runs again; `None`: the guest is on its CPU.
    pub slots: Option<usize>,
    /// When it is full, what is merely forwarded is lost; else there is a backlog without end.
    pub lossy: bool,
    /// It was given something that a guest on its CPU has yet to look at.
    pub given: bool,
}

/// See the module doc.
#[derive(Debug)]
pub struct Outside {
    pub now: Instant,
    pub setup: Setup,
    pub uplink: PortId,
    pub rings: Vec<Ring>,
    pub conns: Vec<Conn>,
    pub monitor: Monitor,
    pub trace: Vec<String>,
    /// The host has accept offload: a SYN-ACK with another number than G's is of H.
    pub host_answers: bool,
    /// Told of each frame of a connection as it leaves the engine: connection, receiver, and where
    /// the frame's acknowledgement is on the receiver's stream.
    pub watcher: Option<fn(usize, Side, u32)>,
    /// Frames that belong to no connection, and floods at ports where the receiver is not.
    pub strays: Vec<(PortId, Vec<u8>)>,
}

/// The trace hands in frames one by one, so there is nothing to read.
impl Ports for Outside {
    fn receive(&mut self, _: PortId, _: &mut [u8]) -> Received {
        Received::Empty
    }

    fn send(&mut self, port: PortId, hdr: &VirtioNetHdr, parts: &[&[u8]], _waited: bool) -> Sent {
        if let Some(ring) = self.rings.iter_mut().find(|ring| ring.port == port) {
            if ring.slots == Some(0) && ring.lossy {
                return Sent::Dropped(DropReason::QueueFull);
            }
            ring.slots = ring.slots.map(|n| n.saturating_sub(1));
            ring.given = true;
        }
        let bytes = parts.concat();
        assert!(bytes.len() <= ROOM, "a frame of {}\n{}", bytes.len(), self.trace_text());
        self.leaves(port, *hdr, bytes);
        Sent::Done
    }

    fn room(&mut self, port: PortId, want: usize) -> usize {
        let ring = self.rings.iter().find(|ring| ring.port == port);
        ring.filter(|ring| ring.slots != Some(0)).map_or(0, |_| want.min(ROOM))
    }

    /// A guest on its CPU has seen everything.
    fn progress(&mut self, port: PortId) -> Option<bool> {
        let n = self.ring_of(port)?;
        self.rings[usize::from(n)].slots.is_none().then(|| {
            self.monitor.on_seen(self.now, n);
            true
        })
    }
}

impl Outside {
    /// The flow key of a connection, seen from G.
    pub fn key(&self, conn: usize) -> FlowKey {
        let [r, g] = &self.conns[conn].ends;
        let mut tags = [0; 8];
        for (slot, tag) in tags.chunks_mut(4).zip(&self.conns[conn].setup.vlan) {
            slot.copy_from_slice(tag);
        }
        FlowKey {
            g_addr: g.ip,
            r_addr: r.ip,
            vlan: u64::from_be_bytes(tags) & 0xffff_0fff_ffff_0fff,
            g_port: g.tcp_port,
            r_port: r.tcp_port,
            port: g.port.0,
            version: if self.conns[conn].setup.v6 { IpVersion::V6 } else { IpVersion::V4 },
        }
    }

    /// All lines so far, for the message of a failure.
    pub fn trace_text(&self) -> String {
        let skipped = self.trace.len().saturating_sub(100);
        let lines = self.trace[skipped..].join("\n");
        if skipped == 0 { lines } else { format!("... {skipped} lines before\n{lines}") }
    }

    /// The guest behind a port.
    pub fn ring_of(&self, port: PortId) -> Option<u16> {
        (0..).zip(&self.rings).find(|(_, ring)| ring.port == port).map(|(n, _)| n)
    }

    /// Which connection a frame belongs to, and who sent it.
    pub fn conn_of(&self, bytes: &[u8]) -> Option<(usize, Side)> {
        let packet = Packet::parse(bytes).ok()?;
        let (ip, tcp) = packet.tcp()?;
        let is = |end: &End, ip, port| end.ip == ip && end.tcp_port == port;
        self.conns.iter().enumerate().rev().find_map(|(n, conn)| {
            let [r, g] = &conn.ends;
            let tags = packet.eth.vlan.tags().iter().zip(&conn.setup.vlan);
            let vlan = packet.eth.vlan.tags().len() == conn.setup.vlan.len()
                && tags.clone().all(|(a, b)| a[3] == b[3]);
            let from = |s: &End, d: &End| {
                is(s, ip.src, tcp.src_port) && is(d, ip.dst, tcp.dst_port) && vlan
            };
            if from(r, g) { Some((n, Side::R)) } else { from(g, r).then_some((n, Side::G)) }
        })
    }

    /// A frame leaves by `port`: checked, written down, put into its receiver's inbox. A flood also
    /// brings it to others, who leave it alone.
    fn leaves(&mut self, port: PortId, hdr: VirtioNetHdr, bytes: Vec<u8>) {
        let is_there = |&(conn, from): &(usize, Side)| {
            self.conns[conn].ends[from.other() as usize].port == port
        };
        let Some((conn, from)) = self.conn_of(&bytes).filter(is_there) else {
            self.strays.push((port, bytes));
            return;
        };
        let to = from.other();
        self.note_answer(conn, to, &bytes);
        let seen = self.seen(conn, from, to, hdr, &bytes).expect("it has a connection");
        let direction = if to == Side::R { ">R" } else { ">G" };
        self.note(conn, direction, &seen);
        let tap = self.ring_of(port).map_or(Tap::ToNet, Tap::ToGuest);
        self.passes(tap, hdr, &seen.bytes, false);
        if let Some(watcher) = self.watcher {
            watcher(conn, to, seen.ack());
        }
        let end = &mut self.conns[conn].ends[to as usize];
        if let Some(ts) = seen.tcp().options.timestamps
            && (end.ts_seen == 0 || Seq(ts.tsval).gt(Seq(end.ts_seen)))
        {
            end.ts_seen = ts.tsval;
        }
        end.inbox.push_back(seen);
    }

    pub fn note(&mut self, conn: usize, direction: &str, seen: &Seen) {
        let line = SegmentLine {
            direction,
            tcp: seen.tcp(),
            seq_base: Seq(seen.isn[0]),
            ack_base: Seq(seen.isn[1]),
        };
        let ms = self.now.since(self.setup.start).as_nanos() / 1000;
        let mut text = format!("{:6}.{:03} ", ms / 1000, ms % 1000);
        if self.conns.len() > 1 {
            let _ = write!(text, "#{conn} ");
        }
        let _ = write!(text, "{line}");
        self.trace.push(text);
    }

    pub fn passes(&mut self, tap: Tap, hdr: VirtioNetHdr, bytes: &[u8], forged: bool) {
        for (n, conn) in self.conns.iter().enumerate() {
            self.monitor.set_ends(n, conn.ends.each_ref().map(|end| (end.ip, end.tcp_port)));
        }
        let verdict = self.monitor.on_frame(Passing { at: self.now, tap, hdr, bytes, forged });
        self.expect(verdict);
    }

    pub fn expect(&self, verdict: Result<(), Violation>) {
        if let Err(broken) = verdict {
            panic!("{broken}\n{}", self.trace_text());
        }
    }

    /// See `Peer::sends_unseen`.
    pub fn send_unseen(&mut self, conn: usize, side: Side, spec: &Spec) {
        let (hdr, bytes) = self.frame(conn, side, spec);
        let seen = self.seen(conn, side, side, hdr, &bytes).expect("TCP");
        self.note(conn, "G)", &seen);
        let port = self.conns[conn].ends[side as usize].port;
        let ring = self.ring_of(port).expect("a guest");
        self.monitor.on_unseen(ring, &seen.bytes);
        let end = &mut self.conns[conn].ends[side as usize];
        end.next = spec.seq.map_or(end.next, |(_, to)| end.next.max(to));
        end.acked = spec.ack.unwrap_or(end.acked);
    }

    /// R gets a SYN-ACK with another number than G's: H has made it.
    fn note_answer(&mut self, conn: usize, to: Side, bytes: &[u8]) {
        let packet = Packet::parse(bytes).expect("it has a connection");
        let tcp = packet.tcp().expect("it has a connection").1;
        let g = &mut self.conns[conn].ends[Side::G as usize];
        let is_answer = tcp.flags.syn() && tcp.flags.ack();
        if self.host_answers && to == Side::R && is_answer && tcp.seq.0 != g.isn {
            let clock = tcp.options.timestamps.map_or(0, |ts| ts.tsval);
            g.shown = Some((tcp.seq.0, clock));
        }
    }

    /// A frame of `side`, as the end at the tap `at` sees it.
    pub fn seen(
        &self,
        conn: usize,
        side: Side,
        at: Side,
        hdr: VirtioNetHdr,
        bytes: &[u8],
    ) -> Option<Seen> {
        let ends = &self.conns[conn].ends.clone().map(|end| end.known_to(at));
        let (sender, receiver) = (&ends[side as usize], &ends[side.other() as usize]);
        let packet = Packet::parse(bytes).ok().filter(|p| p.tcp().is_some())?;
        Some(Seen {
            hdr,
            bytes: bytes.to_vec(),
            packet,
            isn: [sender.isn, receiver.isn],
            clock: [sender.clock, receiver.clock],
            shift: sender.shift,
        })
    }

    /// The frame a spec stands for.
    pub fn frame(&self, conn: usize, side: Side, spec: &Spec) -> (VirtioNetHdr, Vec<u8>) {
        let Conn { ends, setup, .. } = &self.conns[conn];
        let ends = ends.clone().map(|end| end.known_to(side));
        let (from, to) = (&ends[side as usize], &ends[side.other() as usize]);
        let low = |n: i64| u32::try_from(n & 0xffff_ffff).expect("masked");
        let (first, end) = spec.seq.unwrap_or((from.next, from.next));
        let len = usize::try_from(end - first).expect("a range");
        let syn = spec.flags.is_some_and(TcpFlags::syn);
        let mut flags = spec.flags.unwrap_or(TcpFlags::ACK);
        if spec.urgent.is_some() {
            flags = flags | TcpFlags::URG;
        }
        let shift = if syn { 0 } else { from.shift };
        let ack = spec.ack.unwrap_or(from.acked);
        let window = spec.window.unwrap_or_else(|| match spec.edge {
            Some(edge) => u32::try_from(edge - ack).expect("an edge right of the ack"),
            None => from.window,
        });
        let both_ts = Setup::both(setup.ts);
        let ts_on = !spec.no_ts && (syn || both_ts);
        let ms = self.now.since(self.setup.start).as_millis();
        let elapsed = u32::try_from(ms & 0xffff_ffff).expect("masked");
        let timestamps = ts_on.then(|| {
            let tsval = from.clock.wrapping_add(spec.tsval.unwrap_or(elapsed));
            (tsval, spec.tsecr.map_or(from.ts_seen, |e| to.clock.wrapping_add(e)))
        });
        let seq_of =
            |&(a, b): &(i64, i64)| (to.isn.wrapping_add(low(a)), to.isn.wrapping_add(low(b)));
        let offload = spec.gso.or(spec.partial.then_some(u16::MAX));
        let segment = Segment {
            src_mac: from.mac,
            dst_mac: to.mac,
            tags: setup.vlan.clone(),
            src: from.ip.to_ip(),
            dst: to.ip.to_ip(),
            ecn: spec.ecn.unwrap_or(0),
            ttl: from.ttl,
            flow_label: 0x1234,
            id: 7,
            ip_options: if spec.ip_options { vec![7, 7, 4, 0, 0, 0, 0, 0] } else { Vec::new() },
            src_port: from.tcp_port,
            dst_port: to.tcp_port,
            seq: from.isn.wrapping_add(low(first)),
            ack: if flags.ack() { to.isn.wrapping_add(low(ack)) } else { 0 },
            flags,
            window: u16::try_from(window >> shift).expect("the shift can say this window"),
            urgent: spec.urgent.unwrap_or(0),
            timestamps,
            sack: spec.sack.iter().map(seq_of).take(if ts_on { 3 } else { 4 }).collect(),
            last_options: spec.raw_options.clone(),
            offload,
            ..Segment::default()
        };
        let payload = match spec.fill {
            Some(byte) => vec![byte; len],
            None => pattern_bytes(side as u32, first, len),
        };
        let Frame { hdr, mut bytes } = segment.frame(&payload);
        // Tests inside the core have a header type of their own.
        let hdr = VirtioNetHdr {
            flags: hdr.flags,
            gso_type: hdr.gso_type,
            hdr_len: hdr.hdr_len,
            gso_size: hdr.gso_size,
            csum_start: hdr.csum_start,
            csum_offset: hdr.csum_offset,
        };
        if spec.bad_checksum {
            *bytes.last_mut().expect("not empty") ^= 0x40;
        }
        if spec.padded {
            bytes.resize(bytes.len().max(60), 0xee);
        }
        (hdr, bytes)
    }
}
