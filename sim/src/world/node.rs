//! Machines: a stack that runs when its core lets it, behind a ring or a network card.

use std::collections::VecDeque;

use nightporter_core::time::{Duration, Instant};

use super::behind::Behind;
use super::fragments::{self, Fragments};
use super::{CoreOf, Member, World, WorldEvent};
use crate::plan::{Machine, Plan, Policy, StackKind, StackPlan};
use crate::random::Random;
use crate::sched::{Core, Entity};
use crate::stack::address::machine_of;
use crate::stack::{self, EndReport, Outcome, Stack};
use nightporter_check::frame::Frame;
use nightporter_check::wire::on_wire;

/// Frames a machine handles before others can have the core.
const FRAMES_PER_STEP: usize = 16;
/// Posted transmit buffers.
const TRANSMIT_SLOTS: usize = 256;
/// Frames a remote's network card holds.
const CARD_SLOTS: usize = 4096;
/// Bytes of one posted receive buffer; longer frames take several (MRG_RXBUF).
pub(super) const RING_BUFFER_BYTES: usize = 4096;
/// From an interrupt to its handler.
const INTERRUPT: Duration = Duration::from_micros(5);

/// A guest or a remote.
pub(super) struct Node {
    pub(super) machine: Machine,
    pub(super) stack: Box<dyn Stack>,
    stack_plan: StackPlan,
    mtu: u16,
    frame_ns: u64,
    /// Which core, and which place on it; `None`: always runs.
    pub(super) core: Option<(usize, usize)>,
    /// Delivered and not yet seen by the machine.
    pub(super) rx: VecDeque<Frame>,
    rx_buffers: usize,
    pub(super) rx_slots: usize,
    /// Put there by a guest's driver, not yet taken by the host.
    pub(super) tx: VecDeque<Frame>,
    pub(super) paused: bool,
    /// Its transmit ring is full.
    pub(super) waits_for_host: bool,
    /// The host has put frames into its ring, and has yet to tell it.
    pub(super) interrupt_due: bool,
    pub(super) destroyed: bool,
    /// Which host it is on.
    pub(super) host: u8,
    /// Its driver is there.
    pub(super) link_up: bool,
    /// Its driver, which is away, is that of the same guest when it comes back.
    pub(super) comes_back: bool,
    /// Its driver has begun anew since the daemon died.
    pub(super) begins_anew: bool,
    /// It moved its ring since the host last looked.
    pub(super) progress: bool,
    /// The host waits for room in the ring.
    pub(super) host_waits: bool,
    /// The host asked for a notification of its next frame.
    pub(super) host_sleeps: bool,
    /// It has told the host of a frame or of room.
    pub(super) kicked: bool,
    pub(super) drop_ppm: u32,
    /// Its frames go past the host; or through it in fragments.
    pub(super) one_way: bool,
    pub(super) fragments: bool,
    /// It forwards, and its stack is behind it.
    pub(super) behind: Option<Behind>,
    /// Packets that it got in part.
    incomplete: Fragments,
    random: Random,
    step_pending: bool,
    timer_at: Instant,
    /// Ends of connections that did not survive a reboot.
    forgotten: Vec<EndReport>,
}

/// All machines of a plan: guests, then remotes.
pub(super) fn make(plan: &Plan) -> Vec<Node> {
    let guests = plan.guests.iter().enumerate().map(|(i, g)| {
        let machine = Machine::Guest(u16::try_from(i).unwrap_or(u16::MAX));
        let core = Some((usize::from(g.core), 0));
        Node::new(plan, machine, &g.stack, g.mtu, g.frame_ns, g.ring_slots, core)
    });
    let mut shared = plan.cores.len();
    let remotes = plan.remotes.iter().enumerate().map(|(i, r)| {
        let machine = Machine::Remote(u16::try_from(i).unwrap_or(u16::MAX));
        let core = r.shares.map(|_| {
            shared += 1;
            (shared - 1, 0)
        });
        Node::new(plan, machine, &r.stack, r.to_host.mtu, 1_000, CARD_SLOTS, core)
    });
    let mut nodes: Vec<Node> = guests.chain(remotes).collect();
    let mut places = vec![0; shared];
    for node in &mut nodes {
        if let Some((core, place)) = &mut node.core {
            *place = places[*core];
            places[*core] += 1;
        }
    }
    nodes
}

/// All cores of a plan: the host's, then those that remotes share with others.
pub(super) fn cores(plan: &Plan) -> Vec<CoreOf> {
    let mut cores = Vec::new();
    for (i, core) in plan.cores.iter().enumerate() {
        let here = |c: u16| usize::from(c) == i;
        let mut members = Vec::new();
        let mut entities = Vec::new();
        for (g, guest) in plan.guests.iter().enumerate().filter(|(_, g)| here(g.core)) {
            members.push(Member::Node(g));
            entities.push(Entity { weight: guest.weight, load_percent: guest.load_percent });
        }
        if plan.host.core.is_some_and(here) {
            members.push(Member::Worker(0));
            entities.push(Entity { weight: 256, load_percent: 0 });
        }
        cores.push(CoreOf::new(core.policy, members, &entities));
    }
    for (i, remote) in plan.remotes.iter().enumerate() {
        if let Some((policy, load_percent, others)) = remote.shares {
            let mut members = vec![Member::Node(plan.guests.len() + i)];
            members.resize(1 + usize::from(others), Member::Other);
            let entities = vec![Entity { weight: 256, load_percent }; members.len()];
            cores.push(CoreOf::new(policy, members, &entities));
        }
    }
    cores
}

impl CoreOf {
    fn new(policy: Policy, members: Vec<Member>, entities: &[Entity]) -> Self {
        Self { core: Core::new(policy, entities), members, timer_at: Instant::MAX }
    }
}

impl Node {
    fn new(
        plan: &Plan,
        machine: Machine,
        stack_plan: &StackPlan,
        mtu: u16,
        frame_ns: u64,
        rx_slots: usize,
        core: Option<(usize, usize)>,
    ) -> Self {
        let mut node = Self {
            machine,
            stack: stack::build(stack_plan, machine, mtu, plan.seed),
            stack_plan: stack_plan.clone(),
            mtu,
            frame_ns,
            core,
            rx: VecDeque::new(),
            rx_buffers: 0,
            rx_slots,
            tx: VecDeque::new(),
            paused: false,
            waits_for_host: false,
            interrupt_due: false,
            destroyed: false,
            host: 0,
            link_up: true,
            begins_anew: false,
            comes_back: false,
            progress: false,
            host_waits: false,
            host_sleeps: false,
            kicked: false,
            drop_ppm: 0,
            one_way: false,
            fragments: false,
            behind: None,
            incomplete: Fragments::default(),
            random: Random::new(plan.seed, &format!("node {machine:?}")),
            step_pending: false,
            timer_at: Instant::ZERO,
            forgotten: Vec::new(),
        };
        if let Machine::Guest(g) = machine {
            let forwards = plan.guests[usize::from(g)].forwards;
            node.behind = forwards.map(|forwards| Behind::new(forwards, plan.seed, g));
        }
        node.set_up(plan);
        node
    }

    /// A new stack learns what its driver takes, and its part in the connections that have not
    /// begun.
    fn set_up(&mut self, plan: &Plan) {
        self.stack.set_offloads(match self.machine {
            Machine::Guest(g) => plan.guests[usize::from(g)].offloads,
            Machine::Remote(r) => plan.remotes[usize::from(r)].offloads,
        });
        for (id, conn) in plan.conns.iter().enumerate() {
            let begun = self.forgotten.iter().any(|end| end.conn == id);
            if !begun && [conn.client, conn.server].contains(&self.machine) {
                self.stack.add_conn(id, conn);
            }
        }
    }

    /// Nothing is expected of it any more, or never was.
    pub(super) fn is_excused(&self) -> bool {
        self.destroyed || self.stack_plan.kind == StackKind::Hostile
    }

    pub(super) fn ends(&self) -> Vec<EndReport> {
        self.forgotten.iter().cloned().chain(self.stack.ends()).collect()
    }

    /// Starts again: it has no connections, and the rings are empty.
    pub(super) fn reboot(&mut self, plan: &Plan, now: Instant) {
        for mut end in self.stack.ends() {
            let over = matches!(end.outcome, Outcome::Closed | Outcome::Reset);
            // A machine that does not know a connection listens for it again.
            let waits = end.outcome == Outcome::Waiting;
            if plan.conns[end.conn].opens_at < now && !waits {
                end.outcome = if over { end.outcome } else { Outcome::Reset };
                end.over_at = end.over_at.or(Some(now));
                self.forgotten.push(end);
            }
        }
        let seed = plan.seed ^ now.as_nanos();
        self.stack = stack::build(&self.stack_plan, self.machine, self.mtu, seed);
        self.set_up(plan);
        self.clear_rings();
    }

    /// The driver takes all buffers back.
    pub(super) fn clear_rings(&mut self) {
        self.rx.clear();
        self.rx_buffers = 0;
        self.tx.clear();
    }

    /// Bytes of the longest frame there is room for.
    pub(super) fn room(&self) -> usize {
        (self.rx_slots - self.rx_buffers.min(self.rx_slots)) * RING_BUFFER_BYTES
    }

    /// Bytes of the longest frame there ever is room for.
    pub(super) fn room_max(&self) -> usize {
        self.rx_slots.saturating_mul(RING_BUFFER_BYTES)
    }

    /// Puts a frame into the ring or card; `false` if it does not fit.
    pub(super) fn push(&mut self, frame: Frame) -> bool {
        if frame.bytes.len() > self.room() {
            return false;
        }
        self.rx_buffers += frame.bytes.len().div_ceil(RING_BUFFER_BYTES);
        self.rx.push_back(frame);
        true
    }

    /// The next frame that it has for its card.
    fn next_to_send(&mut self, now: Instant) -> Option<Frame> {
        match &mut self.behind {
            Some(behind) => behind.out.pop_front(),
            None => self.stack.poll_transmit(now),
        }
    }

    fn pop(&mut self) -> Option<Frame> {
        let frame = self.rx.pop_front()?;
        self.rx_buffers -= frame.bytes.len().div_ceil(RING_BUFFER_BYTES);
        Some(frame)
    }
}

impl World<'_> {
    /// A frame came off the wire at a remote.
    pub(super) fn arrive_at_node(&mut self, i: usize, frame: Frame) {
        if self.nodes[i].push(frame) {
            self.wake_node(i);
        }
    }

    /// The machine has something to do, once it has a processor.
    pub(super) fn wake_node(&mut self, i: usize) {
        if let Some((core, place)) = self.nodes[i].core {
            let before = self.cores[core].core.current();
            self.cores[core].core.wake(self.now, place);
            self.after_core(core, before);
        }
        if self.node_runs(i) && !self.nodes[i].step_pending {
            self.nodes[i].step_pending = true;
            self.schedule(self.now + INTERRUPT, WorldEvent::Step(i));
        }
    }

    fn node_runs(&self, i: usize) -> bool {
        let node = &self.nodes[i];
        let on_core = node.core.is_none_or(|(core, place)| self.cores[core].core.is_running(place));
        on_core && !node.paused && !node.destroyed
    }

    /// The machine handles some of what arrived, its timers and applications run, it sends.
    pub(super) fn step_node(&mut self, i: usize) {
        self.nodes[i].step_pending = false;
        if !self.node_runs(i) {
            return;
        }
        let (now, vlan) = (self.now, self.plan.vlan);
        let handled = self.take_frames(i);
        let node = &mut self.nodes[i];
        let is_end = node.behind.is_none();
        if is_end && node.stack.poll_timeout(now).is_some_and(|at| at <= now) {
            node.stack.handle_timeout(now);
        }
        let is_guest = matches!(node.machine, Machine::Guest(_));
        if let (Machine::Guest(guest), Some(observer)) = (node.machine, &mut self.observer) {
            observer.on_seen(now, guest, handled);
        }
        let room_at_host = is_guest && handled > 0 && node.host_waits;
        let mut sent = Vec::new();
        let free = if is_guest { TRANSMIT_SLOTS.saturating_sub(node.tx.len()) } else { usize::MAX };
        while sent.len() < free
            && let Some(frame) = node.next_to_send(now)
        {
            sent.push(frame.tagged(vlan));
        }
        let stuck = sent.len() == free;
        node.waits_for_host = stuck;
        let cost = node.frame_ns * (handled + sent.len()) as u64;
        let frames_for_host = is_guest && !sent.is_empty() && node.link_up && node.host_sleeps;
        let kicks = frames_for_host || room_at_host;
        node.kicked |= kicks;
        if is_guest {
            self.send_from_guest(i, sent);
            if kicks {
                self.schedule(now + INTERRUPT, WorldEvent::Turn(self.nodes[i].host));
            }
        } else {
            let remote = i - self.plan.guests.len();
            for frame in sent {
                self.send_from_remote(remote, frame);
            }
        }
        let node = &mut self.nodes[i];
        let due = node.stack.poll_timeout(now).filter(|_| !stuck && is_end);
        if !node.rx.is_empty() || due.is_some_and(|at| at <= now) {
            node.step_pending = true;
            let later = now + Duration::from_nanos(cost.max(1_000));
            self.schedule(later, WorldEvent::Step(i));
            return;
        }
        if let Some((core, place)) = node.core {
            let before = self.cores[core].core.current();
            self.cores[core].core.idle(now, place);
            self.after_core(core, before);
        }
        if let Some(at) = due {
            self.arm_node(i, at);
        }
    }

    /// The machine takes some of what arrived; how many frames that is.
    fn take_frames(&mut self, i: usize) -> usize {
        let (now, vlan) = (self.now, self.plan.vlan);
        let node = &mut self.nodes[i];
        let (mut handled, mut forwarded) = (0, Vec::new());
        while handled < FRAMES_PER_STEP
            && let Some(frame) = node.pop()
        {
            handled += 1;
            if node.drop_ppm > 0 && node.random.ppm(node.drop_ppm) {
                *self.faults.entry("frames dropped in the guest").or_default() += 1;
                continue;
            }
            match frame.untagged(vlan).and_then(|f| node.incomplete.take(f)) {
                Some(frame) if node.behind.is_some() => forwarded.push(frame),
                Some(frame) => node.stack.handle_frame(now, frame),
                None => {}
            }
        }
        node.progress |= handled > 0;
        forwarded.into_iter().for_each(|frame| self.forward(i, frame));
        handled
    }

    /// Into the ring of guest `i`, or by its present other way.
    fn send_from_guest(&mut self, i: usize, frames: Vec<Frame>) {
        if self.nodes[i].one_way || self.nodes[i].fragments {
            self.tell_past(i, &frames);
        }
        let frames = self.pass_from_guest(frames);
        let node = &mut self.nodes[i];
        if node.link_up && node.fragments {
            let plain = frames.into_iter().flat_map(on_wire);
            node.tx.extend(plain.flat_map(fragments::split));
        } else if node.one_way {
            self.send_past_host(i, frames);
        } else if node.link_up {
            node.tx.extend(frames);
        }
    }

    fn tell_past(&mut self, i: usize, frames: &[Frame]) {
        if let Some(observer) = &mut self.observer {
            let g = u16::try_from(i).unwrap_or(u16::MAX);
            frames.iter().for_each(|frame| observer.on_past(g, &frame.bytes));
        }
    }

    /// Frames of guest `i` that leave by another card: those for remotes; the rest as always.
    fn send_past_host(&mut self, i: usize, frames: Vec<Frame>) {
        for frame in frames {
            let dst = frame.bytes.first_chunk::<6>().copied().unwrap_or_default();
            match machine_of(dst) {
                Some(Machine::Remote(r)) => self.send_to_remote(r.into(), frame),
                _ => self.nodes[i].tx.push_back(frame),
            }
        }
    }

    pub(super) fn arm_node(&mut self, i: usize, at: Instant) {
        if at < self.nodes[i].timer_at {
            self.nodes[i].timer_at = at;
            self.schedule(at, WorldEvent::NodeTimer(i));
        }
    }

    pub(super) fn on_node_timer(&mut self, i: usize) {
        if self.nodes[i].timer_at != self.now {
            return; // an earlier one took its place
        }
        self.nodes[i].timer_at = Instant::MAX;
        if self.nodes[i].behind.is_some() {
            self.run_end(i);
        } else {
            self.wake_node(i);
        }
    }

    pub(super) fn on_core_timer(&mut self, c: usize) {
        if self.cores[c].timer_at != self.now {
            return; // an earlier one took its place
        }
        self.cores[c].timer_at = Instant::MAX;
        let before = self.cores[c].core.current();
        self.cores[c].core.handle_timeout(self.now);
        self.after_core(c, before);
    }

    /// The scheduler may have chosen another VM, which goes on.
    pub(super) fn after_core(&mut self, c: usize, before: Option<usize>) {
        let current = self.cores[c].core.current();
        if let Some(place) = current.filter(|_| current != before) {
            match self.cores[c].members[place] {
                Member::Node(i) if !self.nodes[i].step_pending => {
                    self.nodes[i].step_pending = true;
                    self.schedule(self.now + INTERRUPT, WorldEvent::Step(i));
                }
                Member::Worker(host) => self.schedule(self.now, WorldEvent::Turn(host)),
                Member::Node(_) | Member::Other => {}
            }
        }
        self.arm_core(c);
    }

    pub(super) fn arm_core(&mut self, c: usize) {
        if let Some(at) = self.cores[c].core.poll_timeout()
            && at < self.cores[c].timer_at
        {
            let at = at.max(self.now + Duration::from_nanos(1));
            self.cores[c].timer_at = at;
            self.schedule(at, WorldEvent::CoreTimer(c));
        }
    }
}
