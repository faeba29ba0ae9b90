//! The world of a trace: virtual time, ports, and the two ends that a test plays by hand.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::rc::Rc;

use super::monitor::Monitor;
use super::segment::{Seen, pattern_bytes};
use super::setup::Setup;
use nightporter_check::event::Event;
use nightporter_check::frame::Frame;
use nightporter_check::rule::Violation;
use nightporter_check::tap::Tap;
use nightporter_check::wire::{Segment, TcpFlags};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::{Engine, Verdict};
use nightporter_core::flow::key::FlowKey;
use nightporter_core::port::{PortConfig, PortId};
use nightporter_core::tcp::flow::{Flow, State};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::trace::SegmentLine;
use nightporter_core::wire::packet::{IpAddr16, IpVersion, Packet, Seq};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_testkit::segment::Spec;

/// Who speaks.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Side {
    /// The remote.
    R = 0,
    /// The guest.
    G = 1,
}

impl Side {
    /// The other one.
    pub fn other(self) -> Self {
        if self == Self::R { Self::G } else { Self::R }
    }
}

/// What the monitor is to make of a segment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum How {
    /// All of it is true.
    Honest,
    /// All but its ACK.
    Lies,
    /// Somebody else sent it.
    Forged,
}

/// One connection, as the rules have to know it.
#[derive(Clone, Debug)]
pub struct Known {
    /// Address and TCP port of R and of G.
    pub ends: [(IpAddr16, u16); 2],
    pub setup: Setup,
    pub vlan: u64,
    /// Not judged; see `World::set_lenient`.
    pub lenient: bool,
}

/// A frame on its way, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub struct Passing<'a> {
    pub at: Instant,
    pub tap: Tap,
    pub hdr: VirtioNetHdr,
    pub bytes: &'a [u8],
    /// Somebody else sent it, or it is broken.
    pub forged: bool,
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub struct End {
    pub port: PortId,
    pub mac: [u8; 6],
    pub ip: IpAddr16,
    pub tcp_port: u16,
    pub isn: u32,
    /// In bytes; what its segments say unless a test says otherwise.
    pub window: u32,
    /// Shift in use after the handshake.
    pub shift: u8,
    /// TSval that `<ts 0>` stands for.
    pub clock: u32,
    /// Newest TSval received.
    pub ts_seen: u32,
    /// Relative: what it sends next and what it acknowledged last.
    pub next: i64,
    pub acked: i64,
    pub ttl: u8,
    pub inbox: VecDeque<Seen>,
}

/// One connection: R and G.
#[derive(Debug)]
pub struct Conn {
    pub ends: [End; 2],
    pub setup: Setup,
}

/// A guest port's ring.
#[derive(Debug)]
pub struct Ring {
    pub port: PortId,
    /// Frames it takes before the guest runs again; `None`: the guest is on its CPU.
    pub slots: Option<usize>,
    /// Bytes of its largest buffer.
    pub room: usize,
    /// When it is full, what is merely forwarded is lost; else there is a backlog without end.
    pub lossy: bool,
}

/// The engine and everything around it.
#[derive(Debug)]
pub struct Inner<'m> {
    pub engine: Engine<'m>,
    pub now: Instant,
    pub setup: Setup,
    pub uplink: PortId,
    pub rings: Vec<Ring>,
    pub conns: Vec<Conn>,
    pub monitor: Monitor,
    pub trace: Vec<String>,
    /// Told of each frame of a connection as it leaves the engine: connection, receiver, and where
    /// the frame's acknowledgement is on the receiver's stream.
    pub watcher: Option<fn(usize, Side, u32)>,
    /// Frames that belong to no connection.
    pub strays: Vec<(Option<PortId>, Vec<u8>)>,
}

/// Handle on the world; clones are the same world.
#[derive(Clone, Debug)]
pub struct World<'m>(pub Rc<RefCell<Inner<'m>>>);

/// Handle on one end of a connection.
#[derive(Clone, Debug)]
pub struct Peer<'m> {
    pub world: World<'m>,
    pub conn: usize,
    pub side: Side,
}

/// MAC address `n` of this world.
pub const fn mac(n: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, n]
}

impl<'m> World<'m> {
    /// A world around `engine`, with an uplink, a guest port and, if R is a VM, another.
    pub fn new(mut engine: Engine<'m>, setup: Setup) -> Self {
        let now = setup.start;
        let uplink = PortConfig::uplink("uplink");
        let uplink = engine.add_port(now, uplink).expect("an uplink");
        let inner = Inner {
            engine,
            now,
            setup: setup.clone(),
            uplink,
            rings: Vec::new(),
            conns: Vec::new(),
            monitor: Monitor::new(),
            trace: Vec::new(),
            watcher: None,
            strays: Vec::new(),
        };
        let world = Self(Rc::new(RefCell::new(inner)));
        world.add_guest("guest", mac(1));
        if setup.remote_is_vm {
            world.add_guest("remote", mac(2));
        }
        world
    }

    /// Another guest port.
    pub fn add_guest(&self, name: &str, mac: [u8; 6]) -> PortId {
        let inner = &mut *self.0.borrow_mut();
        let config = inner.setup.guest_config(mac);
        let port = inner
            .engine
            .add_port(inner.now, PortConfig::guest(name, config))
            .expect("a guest port");
        inner.engine.set_port_features(inner.now, port, Some(inner.setup.features));
        inner.rings.push(Ring { port, slots: None, room: 65_562, lossy: false });
        port
    }

    /// The guest port of G.
    pub fn guest_port(&self) -> PortId {
        self.0.borrow().rings[0].port
    }

    /// The ends of a connection that nobody has opened yet.
    pub fn pair(&self, setup: &Setup) -> (Peer<'m>, Peer<'m>) {
        let port = self.guest_port();
        self.pair_at(setup, port, 1)
    }

    /// As [`Self::pair`], with G behind `port`, whose MAC is number `guest`.
    pub fn pair_at(&self, setup: &Setup, port: PortId, guest: u8) -> (Peer<'m>, Peer<'m>) {
        let inner = &mut *self.0.borrow_mut();
        let n = u8::try_from(inner.conns.len()).expect("few connections");
        let ip = |host: u8| {
            let v6 = core::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, host.into());
            if setup.v6 { IpAddr16(v6.octets()) } else { IpAddr16::from_v4([10, 0, 0, host]) }
        };
        let both_scale = setup.scale[0].is_some() && setup.scale[1].is_some();
        let end = |side: Side, port, host: u8, tcp_port| End {
            port,
            mac: mac(host),
            ip: ip(host),
            tcp_port,
            isn: setup.isn[side as usize],
            window: setup.window[side as usize],
            shift: setup.scale[side as usize].filter(|_| both_scale).map_or(0, |s| s.min(14)),
            clock: setup.clock[side as usize],
            ts_seen: 0,
            next: 0,
            acked: 0,
            ttl: 64,
            inbox: VecDeque::new(),
        };
        let remote_port = if setup.remote_is_vm { inner.rings[1].port } else { inner.uplink };
        let r = end(Side::R, remote_port, 2, 40_000 + u16::from(n));
        let g = end(Side::G, port, guest, 80);
        let ends = [&r, &g].map(|end| (end.ip, end.tcp_port));
        inner.conns.push(Conn { ends: [r, g], setup: setup.clone() });
        let vlan = inner.key(inner.conns.len() - 1).vlan;
        inner.monitor.add(Known { ends, setup: setup.clone(), vlan, lenient: false });
        let conn = inner.conns.len() - 1;
        let peer = |side| Peer { world: self.clone(), conn, side };
        (peer(Side::R), peer(Side::G))
    }

    /// A connection by the world's own setup, after its handshake.
    pub fn connects(&self) -> (Peer<'m>, Peer<'m>) {
        let setup = self.0.borrow().setup.clone();
        let (r, g) = self.pair(&setup);
        self.handshake(&r, &g);
        (r, g)
    }

    /// SYN, SYN-ACK, ACK; leaves both inboxes empty.
    pub fn handshake(&self, r: &Peer<'m>, g: &Peer<'m>) {
        let guest_is_client = self.0.borrow().conns[r.conn].setup.guest_is_client;
        let (client, server) = if guest_is_client { (g, r) } else { (r, g) };
        client.sends_syn();
        server.gets_syn();
        server.sends_syn_ack();
        client.gets_syn();
        client.sends("1 ack 1");
        server.gets("1 ack 1");
        for peer in [r, g] {
            peer.end(|end| end.acked = 1);
            peer.gets_nothing();
        }
    }

    /// Lets time go by; timers run when they are due.
    pub fn after_ms(&self, ms: u64) {
        let target = self.0.borrow().now + Duration::from_millis(ms);
        self.until(target);
    }

    /// As [`Self::after_ms`], up to an instant.
    pub fn until(&self, target: Instant) {
        let mut wakes = 0;
        loop {
            let inner = &mut *self.0.borrow_mut();
            let next = inner.engine.poll_timeout().filter(|at| *at <= target);
            let Some(at) = next else {
                inner.now = target;
                inner.settle();
                return;
            };
            inner.now = inner.now.max(at);
            inner.guests_show_life();
            inner.engine.handle_timeout(inner.now);
            inner.settle();
            wakes += 1;
            assert!(wakes < 100_000, "timer storm:\n{}", inner.trace_text());
        }
    }

    /// The clock.
    pub fn now(&self) -> Instant {
        self.0.borrow().now
    }

    /// Something about the engine.
    pub fn engine<T>(&self, f: impl FnOnce(&mut Engine<'m>, Instant) -> T) -> T {
        let inner = &mut *self.0.borrow_mut();
        let result = f(&mut inner.engine, inner.now);
        inner.settle();
        result
    }

    /// The guest of ring `n` gets up to this many more frames before it runs again.
    pub fn ring_takes(&self, n: usize, slots: usize) {
        self.0.borrow_mut().rings[n].slots = Some(slots);
    }

    /// The guest of ring `n` runs and takes all there is.
    pub fn guest_runs(&self, n: usize) {
        let inner = &mut *self.0.borrow_mut();
        inner.rings[n].slots = None;
        inner.settle();
    }

    /// A raw frame comes in on a port.
    pub fn frame(&self, port: PortId, hdr: VirtioNetHdr, bytes: &[u8]) -> Verdict {
        let inner = &mut *self.0.borrow_mut();
        let verdict = inner.take_frame(port, hdr, bytes.to_vec());
        inner.settle();
        verdict
    }

    /// The rules learn of something that is no frame, before the engine does.
    pub fn happens(&self, event: Event) {
        let inner = &mut *self.0.borrow_mut();
        inner.monitor.on_event(inner.now, event);
    }

    /// A connection is not judged from here on (its streams end here, or what goes in is not worth
    /// checking what comes out), or it is again.
    pub fn set_lenient(&self, conn: usize, lenient: bool) {
        self.0.borrow().monitor.set_lenient(conn, lenient);
    }

    /// The flow of a connection.
    pub fn flow<T>(&self, conn: usize, f: impl FnOnce(&Flow) -> T) -> Option<T> {
        let inner = self.0.borrow();
        let key = inner.key(conn);
        inner.engine.find_flow(&key).map(f)
    }

    /// Where the first connection's flow stands.
    pub fn state(&self) -> Option<State> {
        self.flow(0, |flow| flow.state())
    }

    /// Everything that happened, a line per segment.
    pub fn trace(&self) -> String {
        self.0.borrow().trace_text()
    }
}

impl Inner<'_> {
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

    /// Guests on their CPU have seen everything delivered.
    fn guests_show_life(&mut self) {
        for (n, ring) in (0..).zip(&self.rings).filter(|(_, r)| r.slots.is_none()) {
            self.engine.handle_guest_progress(self.now, ring.port, true);
            self.monitor.on_seen(self.now, n);
        }
    }

    /// The drain order of the engine's module doc, until nothing is left to do.
    pub fn settle(&mut self) {
        self.engine.handle_batch_end(self.now);
        loop {
            let mut quiet = !self.made_leaves();
            for n in 0..self.rings.len() {
                while self.rings[n].slots != Some(0) {
                    let Ring { port, room, .. } = self.rings[n];
                    let Some(out) = self.engine.poll_delivery(self.now, port, room) else { break };
                    let (hdr, bytes) = (out.hdr, out.parts().concat());
                    assert!(bytes.len() <= room, "a frame of {} for {room}", bytes.len());
                    self.delivered(n, port, hdr, bytes);
                    quiet = false;
                }
            }
            if quiet {
                break;
            }
            self.guests_show_life();
        }
        let ports: Vec<_> = self.rings.iter().map(|ring| Some(ring.port)).collect();
        let verdict = self.monitor.on_settled(self.now, &self.engine, &ports);
        self.expect(verdict);
        for ring in &self.rings {
            // What is counted is what a walk finds.
            let of_port = self.engine.flows().filter(|(_, key, _)| key.port == ring.port.0);
            let owing = of_port.filter(|(_, _, flow)| !flow.owes_nothing()).count();
            let counted = self.engine.vm(ring.port).map_or(0, |vm| vm.owing_flows as usize);
            assert_eq!(counted, owing, "flows that owe\n{}", self.trace_text());
        }
    }

    /// What the engine made of the last event leaves. Whether there was something.
    fn made_leaves(&mut self) -> bool {
        let mut any = false;
        while let Some(out) = self.engine.poll_transmit(self.now) {
            let (port, hdr, bytes) = (out.port, out.hdr, out.parts().concat());
            self.emitted(port, hdr, bytes);
            any = true;
        }
        any
    }

    fn delivered(&mut self, ring: usize, port: PortId, hdr: VirtioNetHdr, bytes: Vec<u8>) {
        if let Some(slots) = &mut self.rings[ring].slots {
            *slots = slots.saturating_sub(1);
        }
        self.emitted(Some(port), hdr, bytes);
    }

    /// A frame goes in; what comes out of it directly is delivered.
    pub fn take_frame(&mut self, port: PortId, hdr: VirtioNetHdr, bytes: Vec<u8>) -> Verdict {
        self.take_frame_of(port, hdr, bytes, false)
    }

    /// As [`Self::take_frame`]; `forged`: of somebody who is not who the frame says.
    fn take_frame_of(
        &mut self,
        port: PortId,
        hdr: VirtioNetHdr,
        bytes: Vec<u8>,
        forged: bool,
    ) -> Verdict {
        let tap = self.ring_of(port).map_or(Tap::FromNet, Tap::FromGuest);
        self.passes(tap, hdr, &bytes, forged);
        let verdict = self.judge_frame(port, hdr, bytes);
        self.made_leaves();
        verdict
    }

    fn judge_frame(&mut self, port: PortId, hdr: VirtioNetHdr, bytes: Vec<u8>) -> Verdict {
        let (mut hdr, mut frame) = (hdr, bytes.clone());
        let verdict = self.engine.handle_frame(self.now, port, &mut hdr, &mut frame);
        assert_eq!(frame.len(), bytes.len(), "an edit changed the length (COM-15)");
        if let Verdict::Forward(out) = verdict {
            if let Some(ring) = self.rings.iter().position(|r| r.port == out) {
                if self.rings[ring].lossy && self.rings[ring].slots == Some(0) {
                    self.engine.count_drop(out, DropReason::QueueFull);
                    return verdict;
                }
                self.delivered(ring, out, hdr, frame);
            } else {
                self.emitted(Some(out), hdr, frame);
            }
        } else if verdict == Verdict::Flood {
            self.emitted(None, hdr, frame);
        }
        verdict
    }

    /// A frame of a TCP of its own, which picks its numbers and options itself.
    pub fn relay(&mut self, port: PortId, bytes: Vec<u8>) -> Verdict {
        if let Some((conn, side)) = self.conn_of(&bytes) {
            let packet = Packet::parse(&bytes).expect("it has a connection");
            let tcp = *packet.tcp().expect("it has a connection").1;
            let Conn { ends, .. } = &mut self.conns[conn];
            if tcp.flags.syn() {
                ends[side as usize].isn = tcp.seq.0;
            }
            let isn = [ends[side as usize].isn, ends[side.other() as usize].isn];
            let (hdr, shift) = (VirtioNetHdr::default(), ends[side as usize].shift);
            let seen = Seen { hdr, bytes: bytes.clone(), packet, isn, clock: [0; 2], shift };
            self.note(conn, if side == Side::R { "R>" } else { "G>" }, &seen);
        }
        self.take_frame(port, VirtioNetHdr::default(), bytes)
    }

    /// The guest behind a port.
    fn ring_of(&self, port: PortId) -> Option<u16> {
        (0..).zip(&self.rings).find(|(_, ring)| ring.port == port).map(|(n, _)| n)
    }

    /// Which connection a frame belongs to, and who sent it.
    fn conn_of(&self, bytes: &[u8]) -> Option<(usize, Side)> {
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

    /// A frame left the engine: checked, written down, put into its receiver's inbox.
    fn emitted(&mut self, port: Option<PortId>, hdr: VirtioNetHdr, bytes: Vec<u8>) {
        let Some((conn, from)) = self.conn_of(&bytes) else {
            self.strays.push((port, bytes));
            return;
        };
        let to = from.other();
        let packet = Packet::parse(&bytes).expect("it has a connection");
        let (sender, receiver) = {
            let ends = &self.conns[conn].ends;
            (&ends[from as usize], &ends[to as usize])
        };
        let seen = Seen {
            hdr,
            bytes,
            packet,
            isn: [sender.isn, receiver.isn],
            clock: [sender.clock, receiver.clock],
            shift: sender.shift,
        };
        let direction = if to == Side::R { ">R" } else { ">G" };
        self.note(conn, direction, &seen);
        let port_ok = port.is_none() || port == Some(receiver_port(&self.conns[conn], to));
        assert!(port_ok, "to port {port:?}\n{}", self.trace_text());
        let ring = self.ring_of(receiver_port(&self.conns[conn], to));
        let tap = ring.map_or(Tap::ToNet, Tap::ToGuest);
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

    fn passes(&mut self, tap: Tap, hdr: VirtioNetHdr, bytes: &[u8], forged: bool) {
        for (n, conn) in self.conns.iter().enumerate() {
            self.monitor.set_ends(n, conn.ends.each_ref().map(|end| (end.ip, end.tcp_port)));
        }
        let verdict = self.monitor.on_frame(Passing { at: self.now, tap, hdr, bytes, forged });
        self.expect(verdict);
    }

    fn expect(&self, verdict: Result<(), Violation>) {
        if let Err(broken) = verdict {
            panic!("{broken}\n{}", self.trace_text());
        }
    }
}

fn receiver_port(conn: &Conn, to: Side) -> PortId {
    conn.ends[to as usize].port
}

impl<'m> Peer<'m> {
    /// Something about this end.
    pub fn end<T>(&self, f: impl FnOnce(&mut End) -> T) -> T {
        f(&mut self.world.0.borrow_mut().conns[self.conn].ends[self.side as usize])
    }

    /// Sends one segment, alone in its batch.
    pub fn sends(&self, text: &str) -> Verdict {
        self.sends_spec(&Spec::parse(text))
    }

    /// As [`Self::sends`].
    pub fn sends_spec(&self, spec: &Spec) -> Verdict {
        let inner = &mut *self.world.0.borrow_mut();
        let verdict = inner.send(self.conn, self.side, spec, How::Honest);
        inner.settle();
        verdict
    }

    /// Sends several segments in one batch.
    pub fn sends_all(&self, texts: &[&str]) {
        let inner = &mut *self.world.0.borrow_mut();
        for text in texts {
            inner.send(self.conn, self.side, &Spec::parse(text), How::Honest);
        }
        inner.settle();
    }

    /// Somebody else sends a segment in this end's name: the monitor learns nothing from it.
    pub fn is_forged(&self, text: &str) -> Verdict {
        let inner = &mut *self.world.0.borrow_mut();
        let verdict = inner.send(self.conn, self.side, &Spec::parse(text), How::Forged);
        inner.settle();
        verdict
    }

    /// It acknowledges what it never got: the monitor does not believe that ACK.
    pub fn lies(&self, text: &str) -> Verdict {
        let inner = &mut *self.world.0.borrow_mut();
        let verdict = inner.send(self.conn, self.side, &Spec::parse(text), How::Lies);
        inner.settle();
        verdict
    }

    /// It sends a segment by another path: the engine does not see it, the other end gets it.
    pub fn sends_unseen(&self, text: &str) {
        let inner = &mut *self.world.0.borrow_mut();
        inner.send_unseen(self.conn, self.side, &Spec::parse(text));
    }

    /// The frame of a segment, not sent.
    pub fn frame_of(&self, text: &str) -> Vec<u8> {
        self.world.0.borrow().frame(self.conn, self.side, &Spec::parse(text)).1
    }

    /// Sends its SYN, by the setup.
    pub fn sends_syn(&self) {
        let setup = self.world.0.borrow().conns[self.conn].setup.clone();
        let flags = if setup.ecn { "SEW" } else { "S" };
        self.sends_syn_spec(flags, &setup);
    }

    /// Sends its SYN-ACK, by the setup.
    pub fn sends_syn_ack(&self) {
        let setup = self.world.0.borrow().conns[self.conn].setup.clone();
        let flags = if setup.ecn { "SE. ack 1" } else { "S. ack 1" };
        self.sends_syn_spec(flags, &setup);
    }

    /// Sends a SYN with these words and the options of `setup`.
    pub fn sends_syn_spec(&self, words: &str, setup: &Setup) -> Verdict {
        let mut spec = Spec::parse(words);
        spec.seq = spec.seq.or(Some((0, 0)));
        spec.raw_options = setup.options_of(self.side);
        spec.no_ts = !setup.ts[self.side as usize];
        self.sends_spec(&spec)
    }

    /// The next frame is a SYN or SYN-ACK of the other end.
    pub fn gets_syn(&self) -> Seen {
        let seen = self.next().unwrap_or_else(|| self.fail("no SYN came"));
        assert!(seen.tcp().flags.syn(), "no SYN\n{}", self.world.trace());
        seen
    }

    /// The next frame is this one.
    pub fn gets(&self, text: &str) -> Seen {
        let Some(seen) = self.next() else { self.fail(&format!("nothing came, not `{text}`")) };
        if let Err(what) = seen.matches(&Spec::parse(text)) {
            self.fail(&format!("wanted `{text}`, got {}: {what}", seen.tcp()));
        }
        seen
    }

    /// All frames that came, in order, are these.
    pub fn gets_all(&self, texts: &[&str]) {
        for text in texts {
            self.gets(text);
        }
        self.gets_nothing();
    }

    /// Nothing (more) came.
    pub fn gets_nothing(&self) {
        if let Some(seen) = self.next() {
            self.fail(&format!("wanted nothing, got {}", seen.tcp()));
        }
    }

    /// What came and was not looked at; the inbox is empty then.
    pub fn takes_all(&self) -> Vec<Seen> {
        self.end(|end| end.inbox.drain(..).collect())
    }

    /// The newest frame that came; the inbox is empty then.
    pub fn gets_last(&self, text: &str) -> Seen {
        let mut all = self.takes_all();
        let Some(seen) = all.pop() else { self.fail(&format!("nothing came, not `{text}`")) };
        if let Err(what) = seen.matches(&Spec::parse(text)) {
            self.fail(&format!("wanted `{text}` last, got {}: {what}", seen.tcp()));
        }
        seen
    }

    /// The newest frame that came, whatever it is; the inbox is empty then.
    pub fn gets_last_any(&self) -> Seen {
        self.takes_all().pop().unwrap_or_else(|| self.fail("nothing came"))
    }

    /// From now on its segments show this window, in bytes.
    pub fn shows_window(&self, bytes: u32) {
        self.end(|end| end.window = bytes);
    }

    /// The guest is off its CPU; its ring takes so many more frames.
    pub fn stops(&self, slots: usize) {
        let n = self.ring();
        self.world.ring_takes(n, slots);
    }

    /// The guest is on its CPU again and sees all there is.
    pub fn runs(&self) {
        let n = self.ring();
        self.world.guest_runs(n);
    }

    fn ring(&self) -> usize {
        let port = self.end(|end| end.port);
        let inner = self.world.0.borrow();
        inner.rings.iter().position(|r| r.port == port).expect("a guest")
    }

    fn next(&self) -> Option<Seen> {
        self.end(|end| end.inbox.pop_front())
    }

    fn fail(&self, what: &str) -> ! {
        panic!("{:?}: {what}\n{}", self.side, self.world.trace())
    }
}

impl Inner<'_> {
    /// See [`Peer::sends_unseen`].
    fn send_unseen(&mut self, conn: usize, side: Side, spec: &Spec) {
        let (hdr, bytes) = self.frame(conn, side, spec);
        let seen = self.seen(conn, side, hdr, &bytes).expect("TCP");
        self.note(conn, "G)", &seen);
        let port = self.conns[conn].ends[side as usize].port;
        let ring = self.ring_of(port).expect("a guest");
        self.monitor.on_unseen(ring, &seen.bytes);
        let end = &mut self.conns[conn].ends[side as usize];
        end.next = spec.seq.map_or(end.next, |(_, to)| end.next.max(to));
        end.acked = spec.ack.unwrap_or(end.acked);
    }

    /// What `side` sends, as the other end would see it.
    fn seen(&self, conn: usize, side: Side, hdr: VirtioNetHdr, bytes: &[u8]) -> Option<Seen> {
        let ends = &self.conns[conn].ends;
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

    /// Builds and sends a segment.
    pub fn send(&mut self, conn: usize, side: Side, spec: &Spec, how: How) -> Verdict {
        let (hdr, bytes) = self.frame(conn, side, spec);
        if let Some(seen) = self.seen(conn, side, hdr, &bytes) {
            let direction = if side == Side::R { "R>" } else { "G>" };
            self.note(conn, direction, &seen);
            if how != How::Forged {
                let lies = how == How::Lies;
                if lies || spec.fill.is_some() {
                    let port = self.conns[conn].ends[side as usize].port;
                    let tap = self.ring_of(port).map_or(Tap::FromNet, Tap::FromGuest);
                    self.monitor.distrust(&bytes, tap, side, lies);
                }
                let end = &mut self.conns[conn].ends[side as usize];
                let tcp = seen.tcp();
                let occupied = i64::from(tcp.flags.syn()) + i64::from(tcp.flags.fin());
                if let Some((_, to)) = spec.seq {
                    end.next = end.next.max(to + occupied);
                } else {
                    end.next += occupied;
                }
                end.acked = spec.ack.filter(|_| !lies).unwrap_or(end.acked);
            }
        }
        let port = self.conns[conn].ends[side as usize].port;
        self.take_frame_of(port, hdr, bytes, how == How::Forged)
    }

    /// The frame a spec stands for.
    pub fn frame(&self, conn: usize, side: Side, spec: &Spec) -> (VirtioNetHdr, Vec<u8>) {
        let Conn { ends, setup, .. } = &self.conns[conn];
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
