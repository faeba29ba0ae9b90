//! The world: machines, paths, hosts and their faults, in virtual time.
//!
//! # Primer
//!
//! There is one queue of events, ordered by time and then by their creation; nothing else moves
//! time. A daemon's life is one call of [`World::live`], which borrows the engines. So a crash
//! (drop the engines, keep the arena's memory) is the same here as in the daemon. State that
//! survives a crash (rings, the uplink's queue) belongs to the world, not to the engine.

mod behind;
mod faults;
mod fragments;
mod handover;
mod host;
mod merge;
mod node;
mod ports;
mod tap;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use nightporter_core::engine::Engine;
use nightporter_core::store::arena::Arena;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::link::Link;
use crate::observer::excuse::Excuses;
use crate::observer::{self, Observer};
use crate::plan::{FaultKind, Machine, Plan};
use crate::random::Random;
use crate::sched::Core;
use crate::stack::{Complaint, EndReport, Outcome};
use host::Host;
use nightporter_check::frame::Frame;
use nightporter_check::reach::Reach;
use nightporter_check::rule::Violation;
use nightporter_check::tap::{Tap, Tapped};
use nightporter_check::weight::Weight;
use nightporter_check::wire::{Ip, Packet, Tcp, ipv4_header_ok, tcp_checksum_ok};
use node::Node;

/// An observer of a run that decides nothing.
pub trait Recorder {
    /// A frame passed a tap.
    fn frame(&mut self, tapped: &Tapped<'_>);
}

/// How a run ended.
#[derive(Debug)]
pub struct RunEnd {
    /// The first invariant that did not hold.
    pub violation: Option<Violation>,
    /// Both ends of every connection, as far as their machines still know them.
    pub ends: Vec<EndReport>,
    /// Deliberate faults: kind and number.
    pub faults: BTreeMap<&'static str, u64>,
    /// Application bytes that were read.
    pub bytes: u64,
    /// Frames that passed a tap.
    pub frames: u64,
    /// Steps of the engines.
    pub steps: u64,
    /// Which event met a flow in which state.
    pub reach: Reach,
    /// The amount that it carried.
    pub weight: Weight,
    /// The excuses.
    pub excuses: Excuses,
    /// When it ended.
    pub at: Instant,
    /// Of time, place and beginning of every frame: the same plan gives the same.
    pub trace_hash: u64,
}

/// Why [`World::live`] came back.
#[derive(Debug)]
enum Stop {
    Ended,
    /// The daemons died; their arenas survive if `arena`.
    Crashed {
        arena: bool,
    },
    /// Time to start them again.
    Restart,
    Violated(Violation),
}

/// The hosts' engines; none while the daemons are dead.
type Engines<'m> = [Engine<'m>];

#[derive(Debug)]
enum WorldEvent {
    ToHost(u8, Frame, bool),
    ToNode(usize, Frame),
    /// To the machine behind a guest, or from it.
    Behind(usize, Frame, bool),
    Turn(u8),
    Step(usize),
    NodeTimer(usize),
    CoreTimer(usize),
    FaultStarts(usize),
    FaultEnds(usize),
    /// Another frame of a [`FaultKind::Forge`] or `FlowFlood`.
    FaultGoesOn(usize),
    Migration(u16),
    /// Look whether all remotes of a VM that has gone were told.
    Removal(u16),
    DriverIsBack(u16),
    Healed,
    Restart,
    /// See whether all is over.
    Look,
}

struct Scheduled {
    at: Instant,
    order: u64,
    event: WorldEvent,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// See the module doc.
pub struct World<'r> {
    plan: Plan,
    now: Instant,
    queue: BinaryHeap<Reverse<Scheduled>>,
    order: u64,
    hosts: Vec<Host>,
    /// Guests first, then remotes.
    nodes: Vec<Node>,
    /// Remotes' paths: to the host, and from it.
    links: Vec<[Link; 2]>,
    cores: Vec<CoreOf>,
    random: Random,
    observer: Option<Observer>,
    recorder: Option<&'r mut dyn Recorder>,
    faults: BTreeMap<&'static str, u64>,
    frames: u64,
    steps: u64,
    trace_hash: u64,
    healed: bool,
    last_frame_at: Instant,
    /// Steps until the daemons die, and whether their arenas survive that; when they are back.
    dies_in: Option<(u32, bool)>,
    back_at: Instant,
    /// The programs of the guest's tap, in a world with one.
    attached: tap::Attached,
    /// Newest addresses and numbers of live connections, which forgers know.
    known: Vec<faults::Known>,
    forges: bool,
}

/// A core and its machines.
struct CoreOf {
    core: Core,
    members: Vec<Member>,
    timer_at: Instant,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Member {
    Node(usize),
    Worker(u8),
    /// Only its load counts.
    Other,
}

impl<'r> World<'r> {
    /// The world of `plan` before anything has happened; `check` with all invariants watched,
    /// unless frames can pass the daemon.
    #[must_use]
    pub fn new(plan: &Plan, check: bool, recorder: Option<&'r mut dyn Recorder>) -> Self {
        let migrates = plan.faults.iter().any(|f| matches!(f.kind, FaultKind::Migrate { .. }));
        let mut world = Self {
            plan: plan.clone(),
            now: Instant::ZERO,
            queue: BinaryHeap::new(),
            order: 0,
            hosts: (0..1 + u8::from(migrates)).map(Host::new).collect(),
            nodes: node::make(plan),
            links: Vec::new(),
            cores: node::cores(plan),
            random: Random::new(plan.seed, "world"),
            observer: (check && !plan.host.wire).then(|| Observer::new(plan)),
            recorder,
            faults: BTreeMap::new(),
            frames: 0,
            steps: 0,
            trace_hash: 0xcbf2_9ce4_8422_2325,
            healed: false,
            last_frame_at: Instant::ZERO,
            dies_in: None,
            back_at: Instant::MAX,
            attached: tap::Attached::default(),
            known: Vec::new(),
            forges: plan
                .faults
                .iter()
                .any(|f| matches!(f.kind, FaultKind::Forge { .. } | FaultKind::Kill { .. })),
        };
        for (i, remote) in plan.remotes.iter().enumerate() {
            let name = |way: &str| format!("link {i} {way}");
            world.links.push([
                Link::new(remote.to_host, plan.seed, &name("to host")),
                Link::new(remote.from_host, plan.seed, &name("from host")),
            ]);
        }
        for i in 0..plan.faults.len() {
            world.schedule(plan.faults[i].at, WorldEvent::FaultStarts(i));
        }
        for i in 0..world.nodes.len() {
            world.schedule(Instant::ZERO, WorldEvent::NodeTimer(i));
        }
        for i in 0..world.cores.len() {
            world.arm_core(i);
        }
        world.schedule(plan.heal_at, WorldEvent::Healed);
        // With nothing to heal from, it may be over before.
        let look_at = if plan.faults.is_empty() { Instant::ZERO } else { plan.heal_at };
        world.schedule(look_at, WorldEvent::Look);
        world
    }

    /// A frame of a machine outside the plan will come to the first host's uplink at `at`.
    pub fn add_frame(&mut self, at: Instant, frame: Frame) {
        self.schedule(at, WorldEvent::ToHost(0, frame, false));
    }

    /// Runs to the end.
    #[must_use]
    pub fn run(mut self) -> RunEnd {
        let (pages, records) = (self.plan.host.arena_pages, self.plan.host.arena_records);
        let words = Arena::layout_len(records, pages).div_ceil(8);
        let mut memories: Vec<Vec<u64>> =
            (0..self.hosts.len()).map(|_| vec![0_u64; words]).collect();
        let mut survived = false;
        let violation = loop {
            let mut engines = Vec::new();
            for (memory, host) in memories.iter_mut().zip(&mut self.hosts) {
                let bytes = zerocopy::IntoBytes::as_mut_bytes(memory.as_mut_slice());
                engines.push(host.start(&self.plan, self.now, bytes, records, survived));
            }
            let stop = self.begin_life(&mut engines, survived).err();
            let stop = stop.unwrap_or_else(|| self.live(&mut engines));
            let Stop::Crashed { arena } = stop else {
                break self.finish(stop);
            };
            drop(engines);
            survived = arena;
            if !arena {
                memories.iter_mut().for_each(|m| *m = vec![0; words]);
            }
            match self.live(&mut []) {
                Stop::Restart => {}
                stop => break self.finish(stop),
            }
        };
        let ends = self.ends();
        for [to_host, from_host] in &self.links {
            for c in [to_host.counters(), from_host.counters()] {
                let of_links = [
                    ("frames lost", c.lost + c.overflowed),
                    ("frames reordered", c.reordered),
                    ("frames duplicated", c.duplicated),
                    ("frames corrupted", c.corrupted),
                    ("frames marked CE", c.marked),
                    ("frames too long", c.too_long),
                ];
                for (kind, count) in of_links {
                    *self.faults.entry(kind).or_default() += count;
                }
            }
        }
        RunEnd {
            violation,
            bytes: ends.iter().map(|e| e.read).sum(),
            ends,
            faults: self.faults,
            frames: self.frames,
            steps: self.steps,
            at: self.now,
            reach: self.observer.as_ref().map(|o| o.reach().clone()).unwrap_or_default(),
            excuses: self.observer.as_ref().map(|o| o.excuses().clone()).unwrap_or_default(),
            weight: self.observer.as_ref().map(|o| o.weight().clone()).unwrap_or_default(),
            trace_hash: self.trace_hash,
        }
    }

    /// The last questions.
    fn finish(&mut self, stop: Stop) -> Option<Violation> {
        let ended = match stop {
            Stop::Violated(violation) => return Some(violation),
            _ => self.all_ended(),
        };
        let of = |n: &Node| n.stack.complaints().into_iter().map(|c| (n.machine, c)).collect();
        let complaints: Vec<(Machine, Complaint)> =
            self.nodes.iter().flat_map(|n| -> Vec<_> { of(n) }).collect();
        let ends = self.ends();
        if self.plan.host.wire {
            return observer::of_machines(&self.plan, ended, &ends).err();
        }
        let observer = self.observer.as_mut()?;
        observer.on_end(ended, &ends, &complaints).err()
    }

    fn live(&mut self, engines: &mut Engines<'_>) -> Stop {
        while let Some(Reverse(next)) = self.queue.pop() {
            if next.at > self.plan.give_up_at {
                break;
            }
            self.now = self.now.max(next.at);
            if let Err(stop) = self.handle(engines, next.event) {
                return stop;
            }
        }
        Stop::Ended
    }

    fn handle(&mut self, engines: &mut Engines<'_>, event: WorldEvent) -> Result<(), Stop> {
        match event {
            WorldEvent::ToHost(host, frame, forged) => self.arrive_at_host(host, frame, forged),
            WorldEvent::ToNode(node, frame) => self.arrive_at_node(node, frame),
            WorldEvent::Behind(node, frame, to_end) => self.arrive_behind(node, frame, to_end),
            WorldEvent::Turn(host) => return self.turn(engines, host),
            WorldEvent::Step(node) => self.step_node(node),
            WorldEvent::NodeTimer(node) => self.on_node_timer(node),
            WorldEvent::CoreTimer(core) => self.on_core_timer(core),
            WorldEvent::FaultStarts(i) => return self.start_fault(engines, i),
            WorldEvent::FaultEnds(i) => return self.end_fault(engines, i),
            WorldEvent::FaultGoesOn(i) => self.go_on_with_fault(i),
            WorldEvent::Migration(guest) => return self.migrate(engines, guest),
            WorldEvent::Removal(guest) => return self.remove(engines, guest),
            WorldEvent::DriverIsBack(guest) => return self.driver_is_back(engines, guest),
            WorldEvent::Healed => self.heal(engines),
            WorldEvent::Restart => return Err(Stop::Restart),
            WorldEvent::Look => {
                if self.all_ended() {
                    return Err(Stop::Ended);
                }
                // While nothing happens, look less and less often.
                let quiet = self.now.since(self.last_frame_at).as_nanos() / 8;
                let wait = Duration::from_nanos(quiet.clamp(20_000_000, 600_000_000_000));
                self.schedule(self.now + wait, WorldEvent::Look);
            }
        }
        Ok(())
    }

    fn schedule(&mut self, at: Instant, event: WorldEvent) {
        self.order += 1;
        self.queue.push(Reverse(Scheduled { at: at.max(self.now), order: self.order, event }));
    }

    /// Every connection is over, except those of hostile machines.
    fn all_ended(&self) -> bool {
        let open = |n: &Node| !n.is_excused() && n.stack.ends_open() > 0;
        if !self.nodes.iter().any(open) {
            return true;
        }
        let mut over = vec![(0, 0); self.plan.conns.len()];
        for node in &self.nodes {
            for end in node.ends() {
                match end.outcome {
                    Outcome::Closed | Outcome::Reset => over[end.conn].0 += 1,
                    Outcome::Waiting => over[end.conn].1 += 1,
                    Outcome::Open => over[end.conn].1 += 2,
                }
            }
        }
        // A server whose client never came waits for ever.
        let is_open = |(conn, &(over, waits)): (usize, &(u32, u32))| {
            !(self.is_excused(conn) || waits == 0 || over == 1 && waits == 1)
        };
        !over.iter().enumerate().any(is_open)
    }

    /// Nothing is expected of a connection with a machine that means harm or is gone.
    fn is_excused(&self, conn: usize) -> bool {
        let plan = &self.plan.conns[conn];
        [plan.client, plan.server].iter().any(|&m| self.nodes[self.node_of(m)].is_excused())
    }

    fn ends(&self) -> Vec<EndReport> {
        let mut ends: Vec<EndReport> = self.nodes.iter().flat_map(Node::ends).collect();
        ends.sort_by_key(|e| (e.conn, e.machine));
        ends
    }

    fn node_of(&self, machine: Machine) -> usize {
        match machine {
            Machine::Guest(i) => i.into(),
            Machine::Remote(i) => self.plan.guests.len() + usize::from(i),
        }
    }

    /// A frame passes a tap: everybody who watches is told. `marked`: it was forged, or, for a
    /// guest, waited for its ring.
    fn tap(
        &mut self,
        host: u8,
        tap: Tap,
        hdr: VirtioNetHdr,
        bytes: &[u8],
        marked: bool,
    ) -> Result<(), Stop> {
        self.frames += 1;
        self.last_frame_at = self.now;
        let place = match tap {
            Tap::FromNet => 1,
            Tap::ToNet => 2,
            Tap::FromGuest(g) => 3 + u64::from(g) * 2,
            Tap::ToGuest(g) => 4 + u64::from(g) * 2,
        };
        let mut hash = self.trace_hash ^ self.now.as_nanos() ^ place << 56;
        for word in bytes[..bytes.len().min(96)].chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            hash = (hash ^ u64::from_le_bytes(padded)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^= hash >> 32;
        }
        self.trace_hash = hash ^ bytes.len() as u64;
        if self.observer.is_none() && self.recorder.is_none() && !self.forges {
            return Ok(());
        }
        let packet = Packet::parse(bytes).ok();
        let to_guest = matches!(tap, Tap::ToGuest(_));
        let (forged, waited) = (marked && !to_guest, marked && to_guest);
        let (at, parsed) = (self.now, packet.as_ref());
        let tapped = Tapped { at, host, tap, hdr, bytes, packet: parsed, forged, waited };
        if let Some(recorder) = &mut self.recorder {
            recorder.frame(&tapped);
        }
        if self.forges && !forged && tap == Tap::FromNet && is_whole(bytes, packet.as_ref()) {
            self.known.truncate(16);
            faults::note_known(&mut self.known, packet.as_ref());
        }
        match &mut self.observer {
            Some(observer) => observer.on_frame(&tapped).map_err(Stop::Violated),
            None => Ok(()),
        }
    }

    /// A frame for guest `g` goes there in pieces.
    fn cut(&mut self, g: usize, whole: &Frame, pieces: &[Frame]) {
        if let Some(observer) = &mut self.observer {
            let tap = Tap::ToGuest(u16::try_from(g).unwrap_or(u16::MAX));
            observer.on_cut(tap, &whole.bytes, pieces);
        }
    }

    fn event(&mut self, event: nightporter_check::event::Event) {
        if let Some(observer) = &mut self.observer {
            observer.on_event(self.now, event);
        }
    }

    fn count(&mut self, kind: &'static str) {
        *self.faults.entry(kind).or_default() += 1;
    }
}

#[cfg(test)]
pub(crate) mod tests;

/// Its checksums are right: nothing changed it on the way.
fn is_whole(bytes: &[u8], packet: Option<&Packet>) -> bool {
    let whole = |(ip, _): (&Ip, &Tcp)| ipv4_header_ok(bytes, ip) && tcp_checksum_ok(bytes, ip);
    packet.and_then(Packet::tcp).is_some_and(whole)
}
