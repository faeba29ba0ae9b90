//! The invariants of the specification (section 2), one file each, watching both sides of the port.

mod end;
mod event;
pub mod excuse;
mod flows;
pub mod history;
mod inv01;
mod inv02;
mod inv03;
mod inv04;
mod inv05;
mod inv06;
mod inv07;
mod inv08;
mod inv09;
mod inv10;
mod inv11;
mod inv12;
mod inv13;
mod inv14;
mod inv15;
mod inv16;
mod inv17;
mod inv18;
mod inv19;
mod inv20;
mod inv21;
pub(crate) mod inv22;
mod inv23;
mod inv24;
pub mod inv25;
pub mod out;
pub mod reach;
pub mod weight;

use core::fmt;
use std::collections::{BTreeMap, BTreeSet};

use nightporter_core::engine::{Engine, PortId};
use nightporter_core::tcp::flow::State;
use nightporter_core::time::Instant;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

pub use event::Event;
pub(crate) use flows::fingerprint;
use flows::{fingerprint_of, history_of, key_of};

use crate::frame::Frame;
use crate::plan::{Machine, Plan};
use crate::stack::address::machine_of;
use crate::stack::{Complaint, EndReport};
use crate::wire::{Packet, ipv4_header_ok, tcp_checksum_ok};
use excuse::{Excuses, Moments};
use history::{History, Side};
use out::Out;
use reach::{Happening, Reach};
use weight::Weight;

/// Where a frame was seen, from the host's point of view.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Tap {
    /// Came in by the uplink.
    FromNet,
    /// Went out by the uplink.
    ToNet,
    /// Taken from the transmit ring of this guest (index into `Plan::guests`).
    FromGuest(u16),
    /// Put into the receive ring of this guest.
    ToGuest(u16),
}

/// A frame at a tap. `packet` is what its bytes say.
#[derive(Clone, Copy, Debug)]
pub struct Tapped<'a> {
    /// When.
    pub at: Instant,
    /// Which host: 0, or 1 after a migration.
    pub host: u8,
    /// Where.
    pub tap: Tap,
    /// Checksum and segmentation state.
    pub hdr: VirtioNetHdr,
    /// The frame.
    pub bytes: &'a [u8],
    /// The same, parsed; `None` if it cannot be.
    pub packet: Option<&'a Packet>,
    /// Sent by somebody in another's name, or broken on the way: it must count for nothing.
    pub forged: bool,
}

/// An invariant that does not hold.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Violation {
    /// 1 to 25: INV-01 to INV-25.
    pub invariant: u8,
    /// What was seen, in one line.
    pub what: String,
    /// The flow it concerns, if it concerns one.
    pub flow: Option<FlowName>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "INV-{:02}: {}", self.invariant, self.what)
    }
}

/// A flow as the host sees it: one guest's side of one connection.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct FlowName {
    /// The guest: index into `Plan::guests`.
    pub guest: u16,
    /// Its TCP port.
    pub guest_port: u16,
    /// The remote's address; IPv4 is mapped into IPv6.
    pub remote: [u8; 16],
    /// The remote's TCP port.
    pub remote_port: u16,
}

/// The flow a segment belongs to, and whether the guest sent it. At the uplink the guest is the
/// end whose MAC is a guest's; between two guests of one host each has a flow of its own, and the
/// tap says whose side this is.
#[must_use]
pub fn flow_of(packet: &Packet, tap: Tap) -> Option<(FlowName, bool)> {
    let (ip, tcp) = packet.tcp()?;
    let from_guest = match tap {
        Tap::FromNet | Tap::ToGuest(_) => false,
        Tap::ToNet | Tap::FromGuest(_) => true,
    };
    let mac = if from_guest { packet.eth.src } else { packet.eth.dst };
    let Some(Machine::Guest(guest)) = machine_of(mac) else { return None };
    // A frame that is flooded, or broken on the way, is nobody's.
    let there = match tap {
        Tap::FromNet | Tap::ToNet => true,
        Tap::FromGuest(g) | Tap::ToGuest(g) => g == guest,
    };
    let own = if from_guest { ip.src } else { ip.dst };
    let address = Machine::Guest(guest).address();
    if !there || ![address.ip(false), address.ip(true)].contains(&own) {
        return None;
    }
    let (guest_port, remote, remote_port) = if from_guest {
        (tcp.src_port, ip.dst.0, tcp.dst_port)
    } else {
        (tcp.dst_port, ip.src.0, tcp.src_port)
    };
    Some((FlowName { guest, guest_port, remote, remote_port }, from_guest))
}

/// What a checker may look at between two steps of the host.
#[derive(Clone, Copy, Debug)]
pub struct HostView<'a, 'm> {
    /// Which host.
    pub host: u8,
    /// The engine, with its flows and its store.
    pub engine: &'a Engine<'m>,
    /// The port of each guest, while it is on this host.
    pub ports: &'a [Option<PortId>],
    /// A timer or a command: any flow may have changed, not only those that had a frame.
    pub any_flow: bool,
}

/// What a checker says: nothing, or what it saw.
type Ensure = Result<(), String>;

/// Steps between two looks at everything, and two counts of all flows.
const LOOK_AT_ALL: u64 = 512;

/// With fewer pages left of its budget a VM is cramped.
const CRAMPED_PAGES: u64 = 16;

/// Keeps the history of every flow and asks every checker.
#[derive(Debug)]
pub struct Observer {
    plan: Plan,
    flows: BTreeMap<FlowName, History>,
    /// Flows with a frame since the last step.
    touched: Vec<FlowName>,
    /// Flows that the engine has an entry for, as far as is known.
    tracked: BTreeSet<FlowName>,
    destroyed: Vec<bool>,
    /// See [`Plan::is_crowd`].
    is_crowd: bool,
    /// Guests that do not run.
    paused: Vec<bool>,
    /// Since when each of them has had a frame to look at.
    silent_since: Vec<Option<Instant>>,
    /// Of [`Plan::vlan`], what names it in the engine's keys: type and number of the outer tag.
    vlan: u64,
    moments: Moments,
    excuses: Excuses,
    /// Of each guest, when it was last cramped.
    cramped_at: Vec<Instant>,
    steps: u64,
    any_flow: bool,
    reach: Reach,
    weight: Weight,
}

impl Observer {
    /// Watches a run of `plan` from its beginning.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        Self {
            plan: plan.clone(),
            flows: BTreeMap::new(),
            touched: Vec::new(),
            tracked: BTreeSet::new(),
            destroyed: vec![false; plan.guests.len()],
            is_crowd: plan.is_crowd(),
            paused: vec![false; plan.guests.len()],
            silent_since: vec![None; plan.guests.len()],
            vlan: plan.vlan.map_or(0, |id| (0x8100_0000 | u64::from(id)) << 32),
            moments: Moments::default(),
            excuses: Excuses::default(),
            cramped_at: vec![Instant::ZERO; plan.guests.len()],
            steps: 0,
            any_flow: false,
            reach: Reach::default(),
            weight: Weight::default(),
        }
    }

    /// A frame passed a tap.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn on_frame(&mut self, t: &Tapped<'_>) -> Result<(), Violation> {
        if let Tap::ToGuest(g) = t.tap
            && self.paused[usize::from(g)]
        {
            self.silent_since[usize::from(g)].get_or_insert(t.at);
        }
        let Some((ip, tcp)) = t.packet.and_then(Packet::tcp) else { return Ok(()) };
        let Some((name, from_guest)) = t.packet.and_then(|p| flow_of(p, t.tap)) else {
            return Ok(());
        };
        self.any_flow |= tcp.flags.syn(); // a new entry may take the place of an old one
        let Some(h) = history_of(&mut self.flows, &self.plan, name, tcp) else {
            return Ok(());
        };
        self.touched.push(name);
        let fingerprint = fingerprint(t, ip);
        match t.tap {
            Tap::FromNet | Tap::FromGuest(_) => {
                let from = if from_guest { Side::G } else { Side::R };
                let whole = t.hdr.needs_csum()
                    || ipv4_header_ok(t.bytes, ip) && tcp_checksum_ok(t.bytes, ip);
                let what = match t.forged || !whole {
                    true => Happening::broken(from),
                    false => Happening::segment(h, from, tcp),
                };
                self.reach.note(h.state, what);
                // Who means harm may have told the forger what to forge.
                let forged = t.forged && !h.hostile[Side::R as usize];
                if forged || !whole {
                    h.on_in_forged(from, fingerprint, whole);
                } else {
                    h.on_in(t.at, from, ip, tcp, fingerprint);
                }
                self.weight.on_in(h, from, &t.hdr, ip.tos & 3 == 3);
                let told = inv21::on_in(t.at, h, from);
                told.map_err(|what| Violation { invariant: 21, what, flow: Some(name) })
            }
            Tap::ToNet | Tap::ToGuest(_) => {
                let to = if from_guest { Side::R } else { Side::G };
                let unchanged = h.was_unchanged(to, fingerprint);
                if unchanged == Some(false) {
                    return Ok(()); // its receiver will refuse it
                }
                let gated = unchanged.is_none();
                let from = tcp.payload_offset as usize;
                let payload = &t.bytes[from..from + tcp.payload_len as usize];
                let o = h.out(t.at, to, gated, ip, tcp, payload);
                let gone = self.destroyed[usize::from(name.guest)];
                let whole = if gated { inv22::on_out(&t.hdr, t.bytes, ip) } else { Ok(()) };
                let from_guest =
                    matches!(h.machine(&self.plan, to.other()), Some(Machine::Guest(_)));
                if whole.is_err() && (from_guest && h.streams.is_none() || !h.was_on) {
                    // What a hostile guest writes into its virtio headers its peer refuses, as G
                    // does a broken frame that waited for the ring since before there was a flow.
                    return Ok(());
                }
                let guest = usize::from(name.guest);
                (h.cramped_at, h.silent_since) = (self.cramped_at[guest], self.silent_since[guest]);
                let wrong = whole.map_err(|what| (22, what));
                let wrong = wrong.and_then(|()| check_out(h, &o, gone));
                self.weight.on_out(h, &o, &t.hdr);
                h.on_out(&o);
                wrong.map_err(|(invariant, what)| Violation { invariant, what, flow: Some(name) })
            }
        }
    }

    /// Guest `g` sent a frame past the host, or through it in fragments.
    pub fn on_past(&mut self, g: u16, bytes: &[u8]) {
        let Ok(packet) = Packet::parse(bytes) else { return };
        let Some((name, _)) = flow_of(&packet, Tap::FromGuest(g)) else { return };
        if let (Some(h), Some((_, tcp))) = (self.flows.get_mut(&name), packet.tcp()) {
            h.on_past(tcp);
        }
    }

    /// A frame on its way to `tap` is cut, because it is not taken there whole.
    pub fn on_cut(&mut self, tap: Tap, whole: &[u8], pieces: &[Frame]) {
        let Ok(packet) = Packet::parse(whole) else { return };
        let (Some((ip, _)), Some((name, _))) = (packet.tcp(), flow_of(&packet, tap)) else {
            return;
        };
        let Some(h) = self.flows.get_mut(&name) else { return };
        let of_piece = |piece: &Frame| {
            let packet = Packet::parse(&piece.bytes).ok()?;
            packet.tcp().map(|(ip, _)| fingerprint_of(&piece.bytes, ip))
        };
        let of_pieces = pieces.iter().filter_map(of_piece).collect();
        h.on_cut(Side::G, fingerprint_of(whole, ip), of_pieces);
    }

    /// The host has done one step: one frame with all that follows, a batch end, a timeout or a
    /// command.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn on_step(&mut self, now: Instant, view: &HostView<'_, '_>) -> Result<(), Violation> {
        self.steps += 1;
        let all = self.steps.is_multiple_of(LOOK_AT_ALL);
        let of_host = |invariant| move |what| Violation { invariant, what, flow: None };
        inv06::on_step(view.engine, view.ports, all).map_err(of_host(6))?;
        for (port, at) in view.ports.iter().zip(&mut self.cramped_at) {
            let vm = port.and_then(|p| view.engine.vm(p));
            if vm.is_some_and(|vm| vm.budget_pages < vm.reserved_pages + CRAMPED_PAGES) {
                *at = now;
            }
        }
        if all {
            inv20::on_step(&self.plan, view.engine, view.ports).map_err(of_host(20))?;
        }
        if all {
            self.touched.clear();
            self.touched.extend(self.flows.keys());
        } else if view.any_flow || std::mem::take(&mut self.any_flow) {
            self.touched.extend(&self.tracked);
        }
        while let Some(name) = self.touched.pop() {
            let port = view.ports.get(usize::from(name.guest)).copied().flatten();
            let (Some(h), Some(port)) = (self.flows.get_mut(&name), port) else { continue };
            let flow = view.engine.find_flow(&key_of(name, port, self.vlan));
            h.state = flow.map(|f| f.state);
            match h.state {
                Some(_) => self.tracked.insert(name),
                None => self.tracked.remove(&name),
            };
            let on = matches!(h.state, Some(State::On | State::Drain));
            self.weight.flows_on += u64::from(on && !h.was_on);
            h.was_on |= on;
            let wrong = |invariant| move |what| Violation { invariant, what, flow: Some(name) };
            inv03::on_step(h, view.engine, flow, all).map_err(wrong(3))?;
            if !self.is_crowd {
                inv18::on_step(h, now).map_err(wrong(18))?;
            }
        }
        Ok(())
    }

    /// Something else happened.
    pub fn on_event(&mut self, now: Instant, event: Event) {
        let of = |g: u16| move |(name, _): &(&FlowName, &mut History)| name.guest == g;
        let about = |name: &FlowName| event.guest().is_none_or(|g| g == name.guest);
        // What was in a ring is gone when its driver, its guest or the daemon begins anew.
        for (g, since) in self.silent_since.iter_mut().enumerate() {
            if event.guest().is_none_or(|of| usize::from(of) == g) {
                *since = None;
            }
        }
        let what = Happening::event(event);
        for (_, h) in self.flows.iter_mut().filter(|(name, _)| about(name)) {
            h.owed_since = None;
            what.into_iter().for_each(|what| self.reach.note(h.state, what));
        }
        match event {
            Event::Crashed => {
                self.moments.all.push((now, None, "the daemon died"));
                self.on_crash();
            }
            Event::Restarted { arena } => {
                self.moments.arena_lost |= !arena;
                self.on_restart(now, arena);
            }
            Event::Draining(_) | Event::Offload(..) => {}
            Event::Killed(g, port, remote_port) => {
                for (name, h) in self.flows.iter_mut().filter(of(g)) {
                    if (name.guest_port, name.remote_port) == (port, remote_port) {
                        h.killed = true;
                        self.moments.killed.extend(h.conn);
                    }
                }
            }
            Event::DriverReset(g) => {
                for (_, h) in self.flows.iter_mut().filter(of(g)) {
                    h.tell_by[1] = None;
                }
            }
            Event::Healed => {}
            Event::Rebooted(g) => {
                self.moments.all.push((now, Some(g), "guest rebooted"));
                for (_, h) in self.flows.iter_mut().filter(of(g)) {
                    h.tell_by = [None; 2];
                    h.broken |= h.promised().is_some();
                    h.interrupted = true;
                    h.must_reset = false;
                }
            }
            Event::Destroyed(g) | Event::Migrated(g) => {
                self.on_gone(now, g, matches!(event, Event::Destroyed(_)));
            }
            Event::Paused { guest: g, .. } | Event::Resumed(g) => {
                let paused = matches!(event, Event::Paused { .. });
                for (_, h) in self.flows.iter_mut().filter(of(g)) {
                    h.paused_since = paused.then_some(now);
                    h.repeats_in_pause = 0;
                    h.tell_by[1] = None;
                }
                let unseen = matches!(event, Event::Paused { unseen: true, .. });
                self.paused[usize::from(g)] = paused;
                self.silent_since[usize::from(g)] = unseen.then_some(now);
            }
        }
    }

    fn on_gone(&mut self, now: Instant, g: u16, destroyed: bool) {
        self.destroyed[usize::from(g)] |= destroyed;
        let why = if destroyed { "guest destroyed" } else { "guest migrated" };
        self.moments.all.push((now, Some(g), why));
        for (_, h) in self.flows.iter_mut().filter(|(name, _)| name.guest == g) {
            h.tell_by = [None; 2];
            // Whoever owes R anything tells it now; who was drained may go on (LIFE-06).
            let drained = h.state == Some(State::Drain) && h.promised().is_none();
            let on = matches!(h.state, Some(State::On | State::Drain)) && !drained;
            h.must_tell_r |= on && !h.end(Side::R).reset;
            h.must_reset = false;
            h.broken |= h.promised().is_some();
            h.interrupted = true;
            h.state = None;
        }
    }

    fn on_crash(&mut self) {
        for h in self.flows.values_mut() {
            let promises = h.promised().is_some() && h.was_on && h.state.is_some();
            h.broken_by_crash |= promises && !h.broken && !h.end(Side::G).reset;
            // What was stored and not yet acknowledged is in the record, too.
            let stored = h.end(Side::R).end > h.end(Side::G).acked;
            if h.opaque || h.promised().is_some() || h.was_on && h.state.is_some() && stored {
                self.moments.betrayed.extend(h.conn);
            }
            h.broken |= h.promised().is_some();
            h.interrupted = true;
            h.state = None;
        }
    }

    fn on_restart(&mut self, now: Instant, arena: bool) {
        let there = |h: &&mut History| !self.destroyed[usize::from(h.name.guest)];
        let betrayed = self.flows.values_mut().filter(|h| h.broken_by_crash && arena);
        for h in betrayed.filter(there) {
            h.must_reset = true;
            h.tell_by = [now + inv21::TELL_R, now + inv21::TELL_G].map(Some);
        }
    }

    /// Which event met a flow in which state.
    #[must_use]
    pub fn reach(&self) -> &Reach {
        &self.reach
    }

    /// What was excused.
    #[must_use]
    pub fn excuses(&self) -> &Excuses {
        &self.excuses
    }

    /// What the run carried.
    #[must_use]
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// The run is over: every connection has ended, or time is up (`ended` says which).
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn on_end(
        &mut self,
        _now: Instant,
        ended: bool,
        ends: &[EndReport],
        complaints: &[(Machine, Complaint)],
    ) -> Result<(), Violation> {
        self.weight.on_end();
        let of_host = |invariant| move |what| Violation { invariant, what, flow: None };
        let arena_lost = self.moments.arena_lost;
        let lost = |h: &&History| (h.broken_by_crash || h.opaque) && arena_lost;
        let lost = self.flows.values().filter(lost).filter_map(|h| h.conn).collect();
        inv01::on_end(&self.plan, ends, &lost).map_err(of_host(1))?;
        inv02::on_end(&self.plan, ends, &lost).map_err(of_host(2))?;
        let (moments, excuses) = (&mut self.moments, &mut self.excuses);
        inv16::on_end(&self.plan, ends, complaints, moments, excuses).map_err(of_host(16))?;
        for (name, h) in &self.flows {
            inv21::on_end(&self.plan, h, ends, moments).map_err(|what| Violation {
                invariant: 21,
                what,
                flow: Some(*name),
            })?;
        }
        let answered = |h: &History| h.is_open() || h.ends.iter().all(|e| e.frames_to == 0);
        let answered: BTreeSet<usize> =
            self.flows.values().filter(|h| answered(h)).filter_map(|h| h.conn).collect();
        moments.unanswered = (0..self.plan.conns.len()).filter(|c| !answered.contains(c)).collect();
        inv18::on_end(&self.plan, ended, ends, moments, excuses).map_err(|(conn, what)| {
            let flow = self.flows.values().find(|h| h.conn == Some(conn)).map(|h| h.name);
            Violation { invariant: 18, what, flow }
        })
    }
}

/// Asks every checker that looks at frames on their way out.
pub(crate) fn check_out(h: &History, o: &Out<'_>, gone: bool) -> Result<(), (u8, String)> {
    inv19::on_out(h, o, gone).map_err(|what| (19, what))?;
    // Nobody speaks for a guest that means harm, and to a remote that does anything may be said.
    if h.opaque || h.hostile[Side::G as usize] || h.hostile[o.to as usize] {
        return Ok(());
    }
    let for_all: [(u8, Ensure); 8] = [
        (11, inv11::on_out(h, o)),
        (4, inv04::on_out(h, o)),
        (25, inv25::on_out(h, o)),
        (12, inv12::on_out(h, o)),
        (7, inv07::on_out(h, o)),
        (10, inv10::on_out(h, o)),
        (13, inv13::on_out(h, o)),
        (15, inv15::on_out(h, o)),
    ];
    first_wrong(&for_all)?;
    if h.hostile[Side::R as usize] {
        return Ok(());
    }
    let between_honest: [(u8, Ensure); 11] = [
        (24, inv24::on_out(h, o)),
        (8, inv08::on_out(h, o)),
        (17, inv17::on_out(h, o)),
        (23, inv23::on_out(h, o)),
        (5, inv05::on_out(h, o)),
        (1, inv01::on_out(h, o)),
        (2, inv02::on_out(h, o)),
        (9, inv09::on_out(h, o)),
        (14, inv14::on_out(h, o)),
        (16, inv16::on_out(h, o)),
        (21, inv21::on_out(h, o)),
    ];
    first_wrong(&between_honest)?;
    inv18::on_out(h, o).map_err(|what| (18, what))
}

fn first_wrong(checks: &[(u8, Ensure)]) -> Result<(), (u8, String)> {
    let wrong = checks.iter().find_map(|(n, check)| check.clone().err().map(|what| (*n, what)));
    wrong.map_or(Ok(()), Err)
}
