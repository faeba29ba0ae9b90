//! The rules of `nightporter-check`, asked about every frame and every step of a trace.
//!
//! They judge by what each end sent and was sent, never by what the engine thinks, but for one
//! question: are the bytes below an ACK to R held?

use std::cell::RefCell;
use std::rc::Rc;

use super::world::{Known, Passing, Side};
use nightporter_check::event::Event;
use nightporter_check::history::{self, History};
use nightporter_check::observer::{HostView, Observer, Setting};
use nightporter_check::rule::{Rule, Violation};
use nightporter_check::stream::streams_of;
use nightporter_check::tap::{FlowName, Tap, Tapped};
use nightporter_check::wire::{Packet, Tcp};
use nightporter_core::engine::Engine;
use nightporter_core::flow::key::FlowKey;
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nightporter_core::wire::ip::{IpAddr16, IpVersion};

/// These ask how long a guest has run, which a trace does not play to the end.
const OF_TIME: [Rule; 2] = [Rule::Recovery, Rule::Liveness];

/// Guest ports of a world at most.
const GUESTS_MAX: usize = 8;

/// All connections of a world, shared with it.
#[derive(Clone, Debug, Default)]
pub struct Connections(Rc<RefCell<Vec<Known>>>);

impl Connections {
    /// The one with these ends, and whether `own` is G.
    fn find(&self, own: (IpAddr16, u16), other: (IpAddr16, u16)) -> Option<(usize, bool)> {
        let conns = self.0.borrow();
        let is = |c: &Known| c.ends == [other, own] || c.ends == [own, other];
        let n = conns.iter().rposition(is)?;
        Some((n, conns[n].ends[Side::G as usize] == own))
    }

    fn of(&self, name: FlowName) -> Option<(usize, bool)> {
        let remote = (IpAddr16(name.remote), name.remote_port);
        let conns = self.0.borrow();
        let at = |c: &Known| {
            let [r, g] = c.ends;
            (g.1 == name.guest_port && r == remote) || (r.1 == name.guest_port && g == remote)
        };
        let n = conns.iter().rposition(at)?;
        Some((n, conns[n].ends[Side::R as usize] == remote))
    }
}

impl Setting for Connections {
    fn flow_of(&self, packet: &Packet, tap: Tap) -> Option<(FlowName, bool)> {
        let (ip, tcp) = packet.tcp()?;
        let (src, dst) = ((ip.src, tcp.src_port), (ip.dst, tcp.dst_port));
        let from_guest = matches!(tap, Tap::ToNet | Tap::FromGuest(_));
        let (own, remote) = if from_guest { (src, dst) } else { (dst, src) };
        let (_, is_g) = self.find(own, remote)?;
        let guest = match tap {
            Tap::FromGuest(g) | Tap::ToGuest(g) => g,
            Tap::FromNet | Tap::ToNet if is_g => 0,
            Tap::FromNet | Tap::ToNet => return None,
        };
        let name = FlowName { guest, guest_port: own.1, remote: remote.0.0, remote_port: remote.1 };
        Some((name, from_guest))
    }

    fn begins(&self, name: FlowName, _: &Tcp) -> Option<History> {
        let (n, is_g) = self.of(name)?;
        let setup = &self.0.borrow()[n].setup;
        let mut h = History::new(name, None, setup.remote_is_vm, Some(streams_of(0, is_g)));
        h.known.mtu = Some(setup.mtu);
        h.known.ecn = setup.ecn;
        h.known.floods = setup.floods;
        Some(h)
    }

    fn key_of(&self, name: FlowName, port: PortId) -> FlowKey {
        let (n, is_g) = self.of(name).expect("it has a name");
        let known = &self.0.borrow()[n];
        FlowKey {
            g_addr: known.ends[usize::from(is_g)].0,
            r_addr: IpAddr16(name.remote),
            vlan: known.vlan,
            g_port: name.guest_port,
            r_port: name.remote_port,
            port: port.0,
            version: if known.setup.v6 { IpVersion::V6 } else { IpVersion::V4 },
        }
    }

    fn flows_max(&self, _: usize) -> u32 {
        u32::MAX
    }

    fn guests(&self) -> usize {
        GUESTS_MAX
    }
}

/// See the module doc.
#[derive(Debug)]
pub struct Monitor {
    connections: Connections,
    observer: Observer<Connections>,
}

impl Monitor {
    pub fn new() -> Self {
        let connections = Connections::default();
        Self { observer: Observer::new(connections.clone()), connections }
    }

    pub fn add(&self, known: Known) {
        self.connections.0.borrow_mut().push(known);
    }

    /// A test may have given the ends of a connection other addresses.
    pub fn set_ends(&self, conn: usize, ends: [(IpAddr16, u16); 2]) {
        self.connections.0.borrow_mut()[conn].ends = ends;
    }

    /// Something happens that is no frame.
    pub fn on_event(&mut self, at: Instant, event: Event) {
        self.observer.on_event(at, event);
    }

    /// See `World::set_lenient`.
    pub fn set_lenient(&self, conn: usize, lenient: bool) {
        self.connections.0.borrow_mut()[conn].lenient = lenient;
    }

    /// A frame goes into the engine, or out of it.
    pub fn on_frame(&mut self, p: Passing<'_>) -> Result<(), Violation> {
        let packet = Packet::parse(p.bytes).ok();
        let Passing { at, tap, hdr, bytes, forged } = p;
        let packet = packet.as_ref();
        let t = Tapped { at, host: 0, tap, hdr, bytes, packet, forged, waited: false };
        let result = self.observer.on_frame(&t);
        let name = packet.and_then(|packet| self.connections.flow_of(packet, tap));
        if let Some(h) = name.and_then(|(name, _)| self.observer.flow_mut(name)) {
            let g = h.end(history::Side::G);
            h.known.shrinks |=
                h.is_open() && g.edge + (1 << h.shift(history::Side::G)) <= g.edge_max;
        }
        self.unless_lenient(result)
    }

    /// `guest` sent a frame that the engine does not see.
    pub fn on_unseen(&mut self, guest: u16, bytes: &[u8]) {
        self.observer.on_past(guest, bytes);
    }

    /// `guest` runs: it has seen all there is.
    pub fn on_seen(&mut self, at: Instant, guest: u16) {
        self.observer.on_seen(at, guest, usize::MAX);
    }

    /// The engine has done all there is to do.
    pub fn on_settled(
        &mut self,
        at: Instant,
        engine: &Engine<'_>,
        ports: &[Option<PortId>],
    ) -> Result<(), Violation> {
        let view = HostView { host: 0, engine, ports, worker_runs_since: at, any_flow: true };
        let result = self.observer.on_step(at, &view);
        self.unless_lenient(result)
    }

    /// `side` of a connection tells lies, or writes other bytes than the pattern: nothing is
    /// expected for a liar, and a stream of other bytes must only not contradict itself.
    pub fn distrust(&mut self, bytes: &[u8], tap: Tap, side: Side, lies: bool) {
        let name = Packet::parse(bytes).ok().and_then(|p| self.connections.flow_of(&p, tap));
        let Some(h) = name.and_then(|(name, _)| self.observer.flow_mut(name)) else { return };
        if lies {
            h.known.hostile[side as usize] = true;
        } else {
            h.streams = None;
        }
    }

    fn unless_lenient(&self, result: Result<(), Violation>) -> Result<(), Violation> {
        result.or_else(|v| {
            let conn = v.flow.and_then(|name| self.connections.of(name));
            let lenient = conn.is_some_and(|(n, _)| self.connections.0.borrow()[n].lenient);
            if lenient || OF_TIME.contains(&v.rule) { Ok(()) } else { Err(v) }
        })
    }
}
