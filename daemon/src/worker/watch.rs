//! Watchers of frames as they cross ports: captures of a port, traces of one flow, and monitors of
//! a VM (`core::monitor::log`).
//!
//! A watcher gets each frame as a [`Crossing`], which is read once for all of them. Without
//! watchers, a frame costs one comparison. All write into bounded buffers, of which control gets a
//! piece when it has room; a slow reader misses frames and delays nothing.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt::Write as _;

use nightporter_core::engine::Engine;
use nightporter_core::flow::key::FlowKey;
use nightporter_core::flow::table::FlowId;
use nightporter_core::monitor::log::Log;
use nightporter_core::monitor::{Side, Way};
use nightporter_core::port::PortId;
use nightporter_core::tcp::flow::{Flow, State, Why};
use nightporter_core::time::Instant;
use nightporter_core::trace::SegmentLine;
use nightporter_core::wire::packet::Packet;
use nightporter_core::wire::seq::Seq;

use super::capture::{Capture, Taking, epoch_ns};
use super::orders::Client;

/// Bytes of trace that may wait for a slow reader; then lines are missed, and counted.
const TRACE_BYTES_MAX: usize = 1 << 20;

/// Which way a frame crosses a port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Direction {
    /// Into the switch.
    FromPort,
    /// Out of it.
    ToPort,
}

/// A frame crosses a port.
#[derive(Debug)]
pub(super) struct Crossing<'a> {
    pub(super) now: Instant,
    at: PortId,
    way: Direction,
    /// The frame, in pieces.
    pub(super) parts: &'a [&'a [u8]],
    /// The frame in one piece, and what it says, once a watcher wants to know.
    read: OnceCell<(Cow<'a, [u8]>, Option<Packet>)>,
}

impl<'a> Crossing<'a> {
    pub(super) const fn new(
        now: Instant,
        at: PortId,
        way: Direction,
        parts: &'a [&'a [u8]],
    ) -> Self {
        Self { now, at, way, parts, read: OnceCell::new() }
    }

    /// The frame, read and in one piece. `None`: it cannot be read.
    pub(super) fn packet(&self) -> Option<(&Packet, &[u8])> {
        let (frame, packet) = self.read.get_or_init(|| {
            let frame = match self.parts {
                [one] => Cow::Borrowed(*one),
                parts => Cow::Owned(parts.concat()),
            };
            let packet = Packet::parse(&frame).ok();
            (frame, packet)
        });
        Some((packet.as_ref()?, frame))
    }
}

/// A watcher, for a client of control.
#[derive(Debug)]
struct Watcher {
    client: Client,
    /// The client has room for a piece.
    has_room: bool,
    what: What,
}

#[derive(Debug)]
enum What {
    Port(PortId, Capture),
    Flow(Box<Trace>),
    Vm(Monitored),
}

/// All watchers.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    list: Vec<Watcher>,
}

impl Watchers {
    /// How many capture or monitor port `at`, and how many frames they missed.
    pub(super) fn captures(&self, at: PortId) -> (u32, u64) {
        let missed = self.list.iter().filter_map(|watcher| match &watcher.what {
            What::Port(port, capture) if *port == at => Some(capture.missed),
            What::Vm(vm) if vm.port == at => Some(vm.log.missed()),
            _ => None,
        });
        missed.fold((0, 0), |(n, sum), missed| (n + 1, sum + missed))
    }

    /// A frame, given in pieces, crosses port `at`.
    #[inline]
    pub(super) fn see(&mut self, now: Instant, at: PortId, way: Direction, parts: &[&[u8]]) {
        if !self.list.is_empty() {
            self.show(&Crossing::new(now, at, way, parts));
        }
    }

    #[cold]
    fn show(&mut self, crossing: &Crossing<'_>) {
        for watcher in &mut self.list {
            match &mut watcher.what {
                What::Port(at, capture) if *at == crossing.at => capture.record(crossing),
                What::Port(..) => {}
                What::Flow(trace) => trace.see(crossing),
                What::Vm(vm) => vm.see(crossing),
            }
        }
    }

    /// Writes down how the traced flows changed in this turn.
    pub(super) fn note_states(&mut self, engine: &Engine<'_>) {
        for watcher in &mut self.list {
            if let What::Flow(trace) = &mut watcher.what
                && std::mem::take(&mut trace.touched)
            {
                trace.note_state(engine);
            }
        }
    }

    pub(super) fn add_capture(&mut self, now: Instant, client: Client, at: PortId, taking: Taking) {
        let running = self.list.iter().find_map(|watcher| match &watcher.what {
            What::Port(_, capture) => Some(capture),
            What::Flow(_) | What::Vm(_) => None,
        });
        let capture = match running {
            Some(running) => Capture::beside(running, taking),
            None => Capture::new(now, taking),
        };
        self.list.push(Watcher { client, has_room: false, what: What::Port(at, capture) });
    }

    pub(super) fn add_trace(
        &mut self,
        now: Instant,
        client: Client,
        (id, key, flow): (FlowId, &FlowKey, &Flow),
    ) {
        let trace = Trace::new(now, id, *key, flow);
        self.list.push(Watcher { client, has_room: false, what: What::Flow(Box::new(trace)) });
    }

    pub(super) fn add_monitor(&mut self, now: Instant, client: Client, port: PortId) {
        let vm = Monitored { port, mac: None, log: Log::new(epoch_ns(now)) };
        self.list.push(Watcher { client, has_room: false, what: What::Vm(vm) });
    }

    /// The client has room for a piece.
    pub(super) fn give_room(&mut self, client: Client) {
        let watchers = self.list.iter_mut().filter(|watcher| watcher.client == client);
        watchers.for_each(|watcher| watcher.has_room = true);
    }

    /// The client is gone.
    pub(super) fn remove(&mut self, client: Client) {
        self.list.retain(|watcher| watcher.client != client);
    }

    /// The port is gone: returns the clients that captured it, or traced a connection of it.
    pub(super) fn remove_port(&mut self, at: PortId) -> Vec<Client> {
        let is_of = |what: &What| match what {
            What::Port(port, _) => *port == at,
            What::Flow(trace) => trace.key.port == at.0,
            What::Vm(vm) => vm.port == at,
        };
        let gone = self.list.extract_if(.., |watcher| is_of(&watcher.what));
        gone.map(|watcher| watcher.client).collect()
    }

    /// Passes the output of watchers to `sink` whose clients have room for it.
    pub(super) fn drain(&mut self, mut sink: impl FnMut(Client, Vec<u8>)) {
        for watcher in self.list.iter_mut().filter(|watcher| watcher.has_room) {
            let bytes = match &mut watcher.what {
                What::Port(_, capture) => capture.take(),
                What::Flow(trace) => trace.take(),
                What::Vm(vm) => vm.log.take(),
            };
            if !bytes.is_empty() {
                watcher.has_room = false;
                sink(watcher.client, bytes);
            }
        }
    }
}

/// A VM whose frames are monitored at its port, and at all others.
#[derive(Debug)]
struct Monitored {
    port: PortId,
    /// The source of its last frame: elsewhere its frames are told by it. The host's own for it
    /// have it, too.
    mac: Option<[u8; 6]>,
    log: Log,
}

impl Monitored {
    fn see(&mut self, crossing: &Crossing<'_>) {
        // Headers are in the first piece.
        let macs = crossing.parts.first().and_then(|part| part.first_chunk::<12>());
        let Some(([to, from], _)) = macs.map(|macs| macs.as_chunks()) else { return };
        let (to, from) = (Some(*to), Some(*from));
        let place = match (crossing.at == self.port, crossing.way) {
            (true, Direction::FromPort) => {
                self.mac = from;
                (Side::Guest, Way::FromGuest)
            }
            (true, Direction::ToPort) => (Side::Guest, Way::ToGuest),
            (false, Direction::FromPort) if to == self.mac => (Side::Net, Way::ToGuest),
            (false, Direction::ToPort) if from == self.mac => (Side::Net, Way::FromGuest),
            (false, _) => return,
        };
        self.log.push(crossing.now, place, crossing.parts);
    }
}

/// The segments of one flow as text, one line each, in the order they cross H.
#[derive(Debug)]
struct Trace {
    start: Instant,
    id: FlowId,
    key: FlowKey,
    /// The numbers that are subtracted from the sequence numbers of R and of G: the first that were
    /// seen.
    base: Option<(Seq, Seq)>,
    state: (State, Why),
    /// A segment passed since `state` was last compared.
    touched: bool,
    text: String,
    missed: u64,
}

impl Trace {
    fn new(now: Instant, id: FlowId, key: FlowKey, flow: &Flow) -> Self {
        let state = (flow.state(), flow.why());
        let text = format!("{key}: {} ({})\n", flow.state().label(), flow.why().label());
        Self { start: now, id, key, base: None, state, touched: false, text, missed: 0 }
    }

    fn see(&mut self, crossing: &Crossing<'_>) {
        let Some((packet, _)) = crossing.packet() else { return };
        let Some((ip, tcp)) = packet.tcp() else { return };
        let port = self.key.port;
        let at_guest = crossing.at == PortId(port);
        let (from_guest, direction) = match (at_guest, crossing.way) {
            (true, Direction::FromPort) => (true, "G>"),
            (true, Direction::ToPort) => (false, ">G"),
            (false, Direction::FromPort) => (false, "R>"),
            (false, Direction::ToPort) => (true, ">R"),
        };
        let key = if from_guest {
            FlowKey::from_guest(port, &packet.eth, ip, tcp)
        } else {
            FlowKey::from_net(port, &packet.eth, ip, tcp)
        };
        if key == self.key {
            let seen = if from_guest { (tcp.ack, tcp.seq) } else { (tcp.seq, tcp.ack) };
            let (r, g) = *self.base.get_or_insert(seen);
            let (seq_base, ack_base) = if from_guest { (g, r) } else { (r, g) };
            let line = SegmentLine { direction, tcp, seq_base, ack_base }.to_string();
            self.touched = true;
            self.write(crossing.now, &line);
        }
    }

    fn note_state(&mut self, engine: &Engine<'_>) {
        let found = engine.flow(self.id.index()).filter(|(id, _, _)| *id == self.id);
        let state = found.map_or(self.state, |(_, _, flow)| (flow.state(), flow.why()));
        if state != self.state {
            let (was, is) = (self.state.0.label(), state.0.label());
            let _ = writeln!(self.text, "           -- {was} -> {is} ({})", state.1.label());
            self.state = state;
        }
    }

    fn write(&mut self, now: Instant, line: &str) {
        if self.text.len() + line.len() > TRACE_BYTES_MAX {
            self.missed += 1;
            return;
        }
        let us = now.since(self.start).as_nanos() / 1000;
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "{:3}.{:06} {line}", us / 1_000_000, us % 1_000_000);
    }

    fn take(&mut self) -> Vec<u8> {
        let mut text = std::mem::take(&mut self.text);
        if self.missed > 0 {
            let _ = writeln!(text, "           -- {} segments not shown", self.missed);
            self.missed = 0;
        }
        text.into_bytes()
    }
}
