//! The world of a trace: virtual time, ports, and the two ends that a test plays by hand.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use super::monitor::Monitor;
use super::outside::{Outside, Ring};
use super::segment::Seen;
use super::setup::Setup;
use nightporter_check::event::Event;
use nightporter_check::tap::Tap;
use nightporter_core::engine::{Engine, Verdict};
use nightporter_core::port::{PortConfig, PortFeatures, PortId};
use nightporter_core::tcp::flow::{Flow, State};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::{Turn, TurnConfig};
use nightporter_core::wire::packet::{IpAddr16, Packet};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_testkit::segment::Spec;

/// The name of the wire, if there is one.
const WIRE: &str = "wire";

/// The two ends.
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

/// The monitor's view of a segment.
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
    /// The initial sequence number and the clock that R was shown in its place, by H.
    pub shown: Option<(u32, u32)>,
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

impl End {
    /// With the numbers that `side` knows of it.
    pub fn known_to(self, side: Side) -> Self {
        match self.shown.filter(|_| side == Side::R) {
            Some((isn, clock)) => Self { isn, clock, ..self },
            None => self,
        }
    }
}

/// One connection: R and G.
#[derive(Debug)]
pub struct Conn {
    pub ends: [End; 2],
    pub setup: Setup,
}

/// The engine, its turn and everything around them.
#[derive(Debug)]
pub struct Inner<'m> {
    pub engine: Engine<'m>,
    pub turn: Turn,
    pub outside: Outside,
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

/// The host's own, behind the uplink.
pub const HOST_MAC: [u8; 6] = mac(99);

impl<'m> World<'m> {
    /// A world around `engine`, with an uplink, a guest port and, if R is a VM, another.
    pub fn new(engine: Engine<'m>, setup: Setup) -> Self {
        let outside = Outside {
            now: setup.start,
            setup: setup.clone(),
            uplink: PortId(0),
            rings: Vec::new(),
            conns: Vec::new(),
            monitor: Monitor::new(),
            trace: Vec::new(),
            host_answers: false,
            watcher: None,
            strays: Vec::new(),
        };
        let turn = Turn::new(TurnConfig::default());
        let world = Self(Rc::new(RefCell::new(Inner { engine, turn, outside })));
        let uplink = PortConfig::uplink("uplink").with_mac(HOST_MAC);
        let uplink = if setup.wire { uplink.on_wire(WIRE) } else { uplink };
        let uplink = world.add_port(uplink, PortFeatures::ALL);
        world.0.borrow_mut().outside.uplink = uplink;
        world.add_guest("guest", mac(1));
        if setup.remote_is_vm {
            world.add_guest("remote", mac(2));
        }
        world
    }

    /// Another guest port.
    pub fn add_guest(&self, name: &str, mac: [u8; 6]) -> PortId {
        let setup = self.0.borrow().outside.setup.clone();
        let config = PortConfig::guest(name, setup.guest_config(mac));
        let config = if setup.wire { config.on_wire(WIRE) } else { config };
        let port = self.add_port(config, setup.features);
        let ring = Ring { port, slots: None, lossy: false, given: false };
        self.0.borrow_mut().outside.rings.push(ring);
        port
    }

    /// A port whose guest is on its CPU all the time, or an uplink.
    pub fn add_port(&self, config: PortConfig, features: PortFeatures) -> PortId {
        let Inner { engine, turn, outside } = &mut *self.0.borrow_mut();
        let port = turn.add_port(outside.now, engine, config).expect("a port");
        turn.set_features(outside.now, engine, port, Some(features));
        port
    }

    /// The driver of a guest takes this from now on; `None`: it is gone.
    pub fn set_features(&self, port: PortId, features: Option<PortFeatures>) {
        let inner = &mut *self.0.borrow_mut();
        let Inner { engine, turn, outside } = inner;
        turn.set_features(outside.now, engine, port, features);
        inner.settle();
    }

    /// The VM behind the first guest port is destroyed, and the port goes with it.
    pub fn guest_is_destroyed(&self) {
        let inner = &mut *self.0.borrow_mut();
        let Inner { engine, turn, outside } = inner;
        outside.monitor.on_event(outside.now, Event::Destroyed(0));
        let ring = outside.rings.remove(0);
        turn.remove_port(outside.now, engine, ring.port);
        inner.settle();
    }

    /// The guest port of G.
    pub fn guest_port(&self) -> PortId {
        self.0.borrow().outside.rings[0].port
    }

    /// The ends of a connection that nobody has opened yet.
    pub fn pair(&self, setup: &Setup) -> (Peer<'m>, Peer<'m>) {
        let port = self.guest_port();
        self.pair_at(setup, port, 1)
    }

    /// As [`Self::pair`], with G behind `port`, whose MAC is number `guest`.
    pub fn pair_at(&self, setup: &Setup, port: PortId, guest: u8) -> (Peer<'m>, Peer<'m>) {
        let outside = &mut self.0.borrow_mut().outside;
        let n = u8::try_from(outside.conns.len()).expect("few connections");
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
            shown: None,
            window: setup.window[side as usize],
            shift: setup.scale[side as usize].filter(|_| both_scale).map_or(0, |s| s.min(14)),
            clock: setup.clock[side as usize],
            ts_seen: 0,
            next: 0,
            acked: 0,
            ttl: 64,
            inbox: VecDeque::new(),
        };
        let remote_port = if setup.remote_is_vm { outside.rings[1].port } else { outside.uplink };
        let r = end(Side::R, remote_port, 2, 40_000 + u16::from(n));
        let g = end(Side::G, port, guest, 80);
        let ends = [&r, &g].map(|end| (end.ip, end.tcp_port));
        outside.conns.push(Conn { ends: [r, g], setup: setup.clone() });
        let conn = outside.conns.len() - 1;
        let vlan = outside.key(conn).vlan;
        outside.monitor.add(Known { ends, setup: setup.clone(), vlan, lenient: false });
        let peer = |side| Peer { world: self.clone(), conn, side };
        (peer(Side::R), peer(Side::G))
    }

    /// A connection by the world's own setup, after its handshake.
    pub fn connects(&self) -> (Peer<'m>, Peer<'m>) {
        let setup = self.0.borrow().outside.setup.clone();
        let (r, g) = self.pair(&setup);
        self.handshake(&r, &g);
        (r, g)
    }

    /// SYN, SYN-ACK, ACK; leaves both inboxes empty.
    pub fn handshake(&self, r: &Peer<'m>, g: &Peer<'m>) {
        let guest_is_client = self.0.borrow().outside.conns[r.conn].setup.guest_is_client;
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
        let target = self.now() + Duration::from_millis(ms);
        self.until(target);
    }

    /// As [`Self::after_ms`], up to an instant.
    pub fn until(&self, target: Instant) {
        let mut wakes = 0;
        loop {
            let inner = &mut *self.0.borrow_mut();
            let next = inner.engine.poll_timeout().filter(|at| *at <= target);
            inner.outside.now = next.map_or(target, |at| at.max(inner.outside.now));
            inner.settle();
            if next.is_none() {
                return;
            }
            wakes += 1;
            assert!(wakes < 100_000, "timer storm:\n{}", inner.outside.trace_text());
        }
    }

    /// The clock.
    pub fn now(&self) -> Instant {
        self.0.borrow().outside.now
    }

    /// Something about the engine.
    pub fn engine<T>(&self, f: impl FnOnce(&mut Engine<'m>, Instant) -> T) -> T {
        let inner = &mut *self.0.borrow_mut();
        let result = f(&mut inner.engine, inner.outside.now);
        inner.settle();
        result
    }

    /// The guest of ring `n` gets up to this many more frames before it runs again.
    pub fn ring_takes(&self, n: usize, slots: usize) {
        let Inner { turn, outside, .. } = &mut *self.0.borrow_mut();
        outside.rings[n].slots = Some(slots);
        turn.wake(outside.rings[n].port);
    }

    /// The guest of ring `n` runs and takes all there is.
    pub fn guest_runs(&self, n: usize) {
        let inner = &mut *self.0.borrow_mut();
        inner.outside.rings[n].slots = None;
        inner.turn.wake(inner.outside.rings[n].port);
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
        let outside = &mut self.0.borrow_mut().outside;
        outside.monitor.on_event(outside.now, event);
    }

    /// A connection is not judged from here on (its streams end here, or what goes in is not worth
    /// checking what comes out), or it is again.
    pub fn set_lenient(&self, conn: usize, lenient: bool) {
        self.0.borrow().outside.monitor.set_lenient(conn, lenient);
    }

    /// The flow of a connection.
    pub fn flow<T>(&self, conn: usize, f: impl FnOnce(&Flow) -> T) -> Option<T> {
        let inner = self.0.borrow();
        let key = inner.outside.key(conn);
        inner.engine.find_flow(&key).map(f)
    }

    /// Where the first connection's flow stands.
    pub fn state(&self) -> Option<State> {
        self.flow(0, |flow| flow.state())
    }

    /// Everything that happened, a line per segment.
    pub fn trace(&self) -> String {
        self.0.borrow().outside.trace_text()
    }
}

impl Inner<'_> {
    /// Turns of the worker, until nothing is left to do.
    pub fn settle(&mut self) {
        let Self { engine, turn, outside } = self;
        loop {
            turn.run(outside.now, engine, outside).expect("nothing interrupts it");
            for ring in outside.rings.iter_mut().filter(|ring| ring.given) {
                ring.given = false; // it looks at once
                turn.wake(ring.port);
            }
            if !turn.rest(outside) {
                break;
            }
        }
        let ports: Vec<_> = outside.rings.iter().map(|ring| Some(ring.port)).collect();
        let verdict = outside.monitor.on_settled(outside.now, engine, &ports);
        outside.expect(verdict);
        for ring in &outside.rings {
            // The counter agrees with a walk.
            let of_port = engine.flows().filter(|(_, key, _)| key.port == ring.port.0);
            let owing = of_port.filter(|(_, _, flow)| !flow.owes_nothing()).count();
            let counted = engine.vm(ring.port).map_or(0, |vm| vm.owing_flows as usize);
            assert_eq!(counted, owing, "flows that owe\n{}", outside.trace_text());
        }
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
        mut bytes: Vec<u8>,
        forged: bool,
    ) -> Verdict {
        let Self { engine, turn, outside } = self;
        let tap = outside.ring_of(port).map_or(Tap::FromNet, Tap::FromGuest);
        outside.passes(tap, hdr, &bytes, forged);
        let verdict = turn.handle_frame(outside.now, engine, outside, port, hdr, &mut bytes);
        verdict.expect("nothing interrupts it")
    }

    /// A frame of a TCP of its own, which picks its numbers and options itself.
    pub fn relay(&mut self, port: PortId, bytes: Vec<u8>) -> Verdict {
        let outside = &mut self.outside;
        if let Some((conn, side)) = outside.conn_of(&bytes) {
            let packet = Packet::parse(&bytes).expect("it has a connection");
            let tcp = *packet.tcp().expect("it has a connection").1;
            let Conn { ends, .. } = &mut outside.conns[conn];
            if tcp.flags.syn() {
                ends[side as usize].isn = tcp.seq.0;
            }
            let isn = [ends[side as usize].isn, ends[side.other() as usize].isn];
            let (hdr, shift) = (VirtioNetHdr::default(), ends[side as usize].shift);
            let seen = Seen { hdr, bytes: bytes.clone(), packet, isn, clock: [0; 2], shift };
            outside.note(conn, if side == Side::R { "R>" } else { "G>" }, &seen);
        }
        self.take_frame(port, VirtioNetHdr::default(), bytes)
    }
}

impl<'m> Peer<'m> {
    /// Something about this end.
    pub fn end<T>(&self, f: impl FnOnce(&mut End) -> T) -> T {
        f(&mut self.world.0.borrow_mut().outside.conns[self.conn].ends[self.side as usize])
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
        let outside = &mut self.world.0.borrow_mut().outside;
        outside.send_unseen(self.conn, self.side, &Spec::parse(text));
    }

    /// The frame of a segment, not sent.
    pub fn frame_of(&self, text: &str) -> Vec<u8> {
        self.world.0.borrow().outside.frame(self.conn, self.side, &Spec::parse(text)).1
    }

    /// Sends its SYN, by the setup.
    pub fn sends_syn(&self) {
        let setup = self.world.0.borrow().outside.conns[self.conn].setup.clone();
        let flags = if setup.ecn { "SEW" } else { "S" };
        self.sends_syn_spec(flags, &setup);
    }

    /// Sends its SYN-ACK, by the setup.
    pub fn sends_syn_ack(&self) {
        let mut setup = self.world.0.borrow().outside.conns[self.conn].setup.clone();
        let (own, asked) = (self.side as usize, 1 - self.side as usize);
        setup.scale[own] = setup.scale[own].filter(|_| setup.scale[asked].is_some());
        setup.sack[own] &= setup.sack[asked];
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

    /// Takes all frames that came and were not looked at.
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
        inner.outside.rings.iter().position(|r| r.port == port).expect("a guest")
    }

    fn next(&self) -> Option<Seen> {
        self.end(|end| end.inbox.pop_front())
    }

    fn fail(&self, what: &str) -> ! {
        panic!("{:?}: {what}\n{}", self.side, self.world.trace())
    }
}

impl Inner<'_> {
    /// Builds and sends a segment.
    pub fn send(&mut self, conn: usize, side: Side, spec: &Spec, how: How) -> Verdict {
        let outside = &mut self.outside;
        let (hdr, bytes) = outside.frame(conn, side, spec);
        if let Some(seen) = outside.seen(conn, side, side, hdr, &bytes) {
            let direction = if side == Side::R { "R>" } else { "G>" };
            outside.note(conn, direction, &seen);
            if how != How::Forged {
                let lies = how == How::Lies;
                if lies || spec.fill.is_some() {
                    let port = outside.conns[conn].ends[side as usize].port;
                    let tap = outside.ring_of(port).map_or(Tap::FromNet, Tap::FromGuest);
                    outside.monitor.distrust(&bytes, tap, side, lies);
                }
                let end = &mut outside.conns[conn].ends[side as usize];
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
        let port = outside.conns[conn].ends[side as usize].port;
        self.take_frame_of(port, hdr, bytes, how == How::Forged)
    }
}
