//! A host: ports, queues, and the daemon's worker turn by turn, in the engine's drain order.

use std::collections::VecDeque;

use nightporter_core::drops::DropReason;
use nightporter_core::engine::{Engine, EngineConfig, Transmit, Verdict};
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use nightporter_core::store::arena::Arena;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::adapt::{Adapter, fits};
use nightporter_core::turn::backlog::BYTES_MAX;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::{Engines, Event, Member, Stop, World, merge};
use crate::check::{HostView, Tap, Violation};
use crate::frame::Frame;
use crate::plan::{Fault, FaultKind, Machine, Offloads, Plan};
use crate::stack::address::machine_of;
use crate::wire::{F_DATA_VALID, on_wire};

/// The uplink is always the first port.
const UPLINK: PortId = PortId(0);
/// The most a delivery may be long: what the daemon asks room for.
const FRAME_BYTES_MAX: usize = 68 * 1024;
/// Bytes after which no more is read from a port in a turn.
const BYTES_PER_PORT: usize = 128 * 1024;
/// What one gets that goes behind others.
const FULL_FRAME: usize = 1514;
/// Frames among which a segment is looked for that another continues (Linux: 8 flows a bucket).
const MERGED_FLOWS: usize = 8;
/// Between two hosts: through one switch.
const SWITCH: Duration = Duration::from_micros(20);

/// What belongs to a host and survives its daemon, and what its worker keeps besides the engine.
pub(super) struct Host {
    index: u8,
    /// Arrived and not yet read by the worker; `true`: forged.
    pub(super) uplink: VecDeque<(Frame, bool)>,
    /// Frames that found a guest's ring full; lost with the daemon.
    backlogs: Vec<VecDeque<Frame>>,
    /// Port of each guest, while it is on this host.
    pub(super) ports: Vec<Option<PortId>>,
    busy_until: Instant,
    turn_at: Instant,
    timer_at: Instant,
    /// Its worker has something to do, and somebody else its processor.
    worker_waits: bool,
    /// When it last got the processor after it had waited.
    worker_runs_since: Instant,
}

impl Host {
    pub(super) fn new(index: u8) -> Self {
        Self {
            index,
            uplink: VecDeque::new(),
            backlogs: Vec::new(),
            ports: Vec::new(),
            busy_until: Instant::ZERO,
            turn_at: Instant::MAX,
            timer_at: Instant::MAX,
            worker_waits: false,
            worker_runs_since: Instant::ZERO,
        }
    }

    /// A daemon starts: an engine over `memory`, which a predecessor left if `survived`.
    pub(super) fn start<'m>(
        &mut self,
        plan: &Plan,
        now: Instant,
        memory: &'m mut [u8],
        records: usize,
        survived: bool,
    ) -> Engine<'m> {
        let arena = if survived {
            Arena::open(memory).expect("an arena that a daemon left")
        } else {
            Arena::format(memory, records, plan.host.arena_pages, 1).expect("the length fits")
        };
        let seeds = [plan.seed, 2, 3, 4 + u64::from(self.index)];
        let config = EngineConfig { flows_max: plan.host.flows_max, hash_seeds: seeds };
        let mut engine = Engine::new(now, config, arena);
        let uplink = PortConfig::uplink("uplink");
        let port = engine.add_port(now, uplink).expect("the first port");
        assert_eq!(port, UPLINK);
        engine.set_port_features(now, UPLINK, Some(PortFeatures::ALL));
        self.ports = vec![None; plan.guests.len()];
        self.backlogs = vec![VecDeque::new(); plan.guests.len()];
        self.turn_at = Instant::MAX;
        self.timer_at = Instant::MAX;
        self.busy_until = now;
        engine
    }

    /// Adds the port of a guest.
    pub(super) fn add_guest(
        &mut self,
        engine: &mut Engine<'_>,
        plan: &Plan,
        now: Instant,
        g: usize,
    ) {
        let guest = &plan.guests[g];
        let machine = Machine::Guest(u16::try_from(g).unwrap_or(u16::MAX));
        let config = GuestConfig {
            mac: Some(machine.address().mac),
            ips: None,
            ack_offload: guest.ack_offload,
            budget_bytes: guest.budget_bytes,
            flows_max: guest.flows_max,
            mtu: guest.mtu,
        };
        let config = PortConfig::guest(format!("guest{g}"), config);
        let port = engine.add_port(now, config).expect("budgets fit the arena");
        self.ports[g] = Some(port);
    }
}

impl World<'_> {
    /// A daemon was started: ports, what the predecessor owed, links.
    pub(super) fn begin_life(
        &mut self,
        engines: &mut Engines<'_>,
        survived: bool,
    ) -> Result<(), Stop> {
        let now = self.now;
        let again = now > Instant::ZERO;
        if again {
            self.event(crate::check::Event::Restarted { arena: survived });
        }
        for (h, engine) in engines.iter_mut().enumerate() {
            for g in 0..self.plan.guests.len() {
                let node = &self.nodes[g];
                if usize::from(node.host) == h && !node.destroyed {
                    self.hosts[h].add_guest(engine, &self.plan, now, g);
                }
            }
            if survived {
                engine.handle_restart(now);
            }
        }
        for g in 0..self.plan.guests.len() {
            if self.nodes[g].link_up {
                self.set_features(engines, g, true);
            }
        }
        for h in 0..self.hosts.len() {
            let host = u8::try_from(h).unwrap_or(0);
            if let Some(engine) = engines.get_mut(h) {
                self.send_made(engine, host)?;
            }
            self.schedule(now, Event::Turn(host));
        }
        Ok(())
    }

    /// The driver of guest `g` is there, or gone, as its host's engine is told.
    pub(super) fn set_features(&mut self, engines: &mut Engines<'_>, g: usize, up: bool) {
        let host = &mut self.hosts[usize::from(self.nodes[g].host)];
        let Some(port) = host.ports.get(g).copied().flatten() else { return };
        if !up {
            host.backlogs[g].clear();
        }
        let features = features_of(&self.plan, g);
        if let Some(engine) = engines.get_mut(usize::from(host.index)) {
            engine.set_port_features(self.now, port, up.then_some(features));
        }
    }

    /// A frame came to a host's uplink.
    pub(super) fn arrive_at_host(&mut self, host: u8, mut frame: Frame, forged: bool) {
        let queue = &mut self.hosts[usize::from(host)].uplink;
        if self.plan.host.merges && !forged {
            merge::verify(&mut frame);
            let lately = queue.iter_mut().rev().take(MERGED_FLOWS);
            let same = lately.into_iter().find(|(f, _)| merge::same_flow(f, &frame));
            if let Some((last, false)) = same
                && merge::merge(last, &frame)
            {
                return self.count("segments merged before the host");
            }
        }
        if queue.len() >= self.plan.host.uplink_queue_frames {
            self.count("frames lost at the uplink");
            return;
        }
        queue.push_back((frame, forged));
        let wait = Duration::from_micros(self.plan.host.uplink_wait_us.into());
        self.schedule(self.now + wait, Event::Turn(host));
    }

    /// One turn of the worker, if it has a processor and nothing is in its way.
    pub(super) fn turn(&mut self, engines: &mut Engines<'_>, h: u8) -> Result<(), Stop> {
        let now = self.now;
        let host = &mut self.hosts[usize::from(h)];
        if host.turn_at == now {
            host.turn_at = Instant::MAX;
        }
        if engines.is_empty() {
            return Ok(());
        }
        if now < host.busy_until {
            if host.turn_at > host.busy_until {
                host.turn_at = host.busy_until;
                let at = host.turn_at;
                self.schedule(at, Event::Turn(h));
            }
            return Ok(());
        }
        let runs = self.worker_runs(h);
        let host = &mut self.hosts[usize::from(h)];
        if std::mem::replace(&mut host.worker_waits, !runs) {
            host.worker_runs_since = now;
        }
        if !runs {
            return Ok(()); // `after_core` calls again
        }
        let Some(engine) = engines.get_mut(usize::from(h)) else { return Ok(()) };
        let frames = self.service(engine, h)?;
        let cost = self.plan.host.turn_ns + self.plan.host.frame_ns * frames;
        self.hosts[usize::from(h)].busy_until = now + Duration::from_nanos(cost);
        self.rest(engine, h);
        Ok(())
    }

    fn worker_place(&self, h: u8) -> Option<(usize, usize)> {
        let core = usize::from(self.plan.host.core?);
        let place = self.cores[core].members.iter().position(|m| *m == Member::Worker(h))?;
        Some((core, place))
    }

    fn worker_runs(&mut self, h: u8) -> bool {
        let Some((core, place)) = self.worker_place(h) else { return true };
        let before = self.cores[core].core.current();
        self.cores[core].core.wake(self.now, place);
        let runs = self.cores[core].core.is_running(place);
        if before != self.cores[core].core.current() && !runs {
            self.after_core(core, before);
        }
        self.arm_core(core);
        runs
    }

    /// Everything that is due. Returns how many frames were handled.
    fn service(&mut self, engine: &mut Engine<'_>, h: u8) -> Result<u64, Stop> {
        let now = self.now;
        self.note_progress(engine, h);
        if engine.poll_timeout().is_some_and(|at| at <= now) {
            engine.handle_timeout(now);
            self.after_command(engine, h)?;
            self.send_made(engine, h)?;
        }
        let mut frames = 0;
        let mut bytes = 0;
        for _ in 0..self.plan.host.turn_frames {
            if bytes >= BYTES_PER_PORT {
                break;
            }
            let Some((frame, forged)) = self.hosts[usize::from(h)].uplink.pop_front() else {
                break;
            };
            frames += 1;
            bytes += frame.bytes.len();
            self.forward(engine, h, None, frame, forged)?;
        }
        for g in self.guests_by_port(h) {
            let mut bytes = 0;
            for _ in 0..self.plan.host.turn_frames {
                if bytes >= BYTES_PER_PORT {
                    break;
                }
                let Some(frame) = self.nodes[g].tx.pop_front() else { break };
                frames += 1;
                bytes += frame.bytes.len();
                self.forward(engine, h, Some(g), frame, false)?;
            }
        }
        engine.handle_batch_end(now);
        self.after_step(engine, h)?;
        self.send_made(engine, h)?;
        for g in self.guests_by_port(h) {
            if self.nodes[g].link_up {
                frames += self.feed_guest(engine, h, g)?;
            }
            // Shown all at once: what was put into its ring, and what was taken from it.
            let node = &mut self.nodes[g];
            if std::mem::take(&mut node.interrupt_due) | std::mem::take(&mut node.waits_for_host) {
                self.wake_node(g);
            }
        }
        Ok(frames)
    }

    /// Guests with a port on host `h`, as the worker goes through its ports.
    fn guests_by_port(&self, h: u8) -> Vec<usize> {
        let ports = self.hosts[usize::from(h)].ports.iter().enumerate();
        let mut guests: Vec<_> = ports.filter_map(|(g, port)| port.map(|p| (p, g))).collect();
        guests.sort_unstable();
        guests.into_iter().map(|(_, g)| g).collect()
    }

    /// When the worker wants its next turn.
    fn rest(&mut self, engine: &Engine<'_>, h: u8) {
        let now = self.now;
        let host = &self.hosts[usize::from(h)];
        let on_host = |n: &&super::node::Node| n.host == h;
        let left = !host.uplink.is_empty()
            || self.nodes[..self.plan.guests.len()]
                .iter()
                .filter(on_host)
                .any(|n| !n.tx.is_empty());
        let due = engine.poll_timeout().map(|at| at.max(host.busy_until));
        let next = if left { Some(host.busy_until) } else { due };
        if !left && let Some((core, place)) = self.worker_place(h) {
            let before = self.cores[core].core.current();
            self.cores[core].core.idle(now, place);
            self.after_core(core, before);
        }
        let host = &mut self.hosts[usize::from(h)];
        if let Some(at) = next.map(|at| at.max(now + Duration::from_nanos(1)))
            && (at < host.turn_at || host.turn_at <= now)
        {
            host.turn_at = at;
            self.schedule(at, Event::Turn(h));
        }
    }

    fn note_progress(&mut self, engine: &mut Engine<'_>, h: u8) {
        let now = self.now;
        for (g, node) in self.nodes[..self.plan.guests.len()].iter_mut().enumerate() {
            if node.host == h
                && std::mem::take(&mut node.progress)
                && let Some(port) = self.hosts[usize::from(h)].ports[g]
            {
                let drained =
                    node.rx.is_empty() && self.hosts[usize::from(h)].backlogs[g].is_empty();
                engine.handle_guest_progress(now, port, drained);
            }
        }
    }

    /// One frame came in: by the uplink, or from guest `from`.
    fn forward(
        &mut self,
        engine: &mut Engine<'_>,
        h: u8,
        from: Option<usize>,
        mut frame: Frame,
        forged: bool,
    ) -> Result<(), Stop> {
        let (tap, port) = match from {
            None => (Tap::FromNet, UPLINK),
            Some(g) => {
                let Some(port) = self.hosts[usize::from(h)].ports[g] else { return Ok(()) };
                (Tap::FromGuest(u16::try_from(g).unwrap_or(u16::MAX)), port)
            }
        };
        self.tap(h, tap, frame.hdr, &frame.bytes, forged)?;
        let verdict = engine.handle_frame(self.now, port, &mut frame.hdr, &mut frame.bytes);
        match verdict {
            Verdict::Forward(to) => self.emit(engine, h, to, &frame.hdr, &[&frame.bytes])?,
            Verdict::Flood => self.flood(engine, h, port, &frame.hdr, &[&frame.bytes])?,
            Verdict::Absorbed | Verdict::Drop(_) => {}
        }
        self.after_step(engine, h)?;
        self.send_made(engine, h)
    }

    /// Sends what the engine made.
    pub(super) fn send_made(&mut self, engine: &mut Engine<'_>, h: u8) -> Result<(), Stop> {
        while let Some(made) = engine.poll_transmit(self.now) {
            let (port, ingress, hdr) = (made.port, made.ingress, made.hdr);
            let bytes = made.parts().concat();
            match port {
                Some(to) => self.emit(engine, h, to, &hdr, &[&bytes])?,
                None => self.flood(engine, h, ingress, &hdr, &[&bytes])?,
            }
            self.after_step(engine, h)?;
        }
        Ok(())
    }

    fn flood(
        &mut self,
        engine: &mut Engine<'_>,
        h: u8,
        ingress: PortId,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
    ) -> Result<(), Stop> {
        if ingress != UPLINK {
            self.emit(engine, h, UPLINK, hdr, parts)?;
        }
        for g in self.guests_by_port(h) {
            let port = self.hosts[usize::from(h)].ports[g].filter(|p| *p != ingress);
            if let Some(port) = port.filter(|_| self.nodes[g].link_up) {
                self.emit(engine, h, port, hdr, parts)?;
            }
        }
        Ok(())
    }

    /// A frame leaves by a port: cut and finished if the other side does not take it as it is.
    fn emit(
        &mut self,
        engine: &mut Engine<'_>,
        h: u8,
        port: PortId,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
    ) -> Result<(), Stop> {
        let whole = Frame { hdr: *hdr, bytes: parts.concat() };
        let guest = self.hosts[usize::from(h)].ports.iter().position(|p| *p == Some(port));
        let Some(g) = guest.filter(|g| !fits(features_of(&self.plan, *g), hdr)) else {
            return self.emit_one(engine, h, port, guest, whole);
        };
        // The judges' cut says what the core's should be.
        self.cut(g, &whole, &on_wire(whole.clone()));
        let mut pieces = Vec::new();
        let take = |hdr: &VirtioNetHdr, bytes: &[u8]| {
            pieces.push(Frame { hdr: *hdr, bytes: bytes.to_vec() });
        };
        if let Err(reason) = Adapter::default().adapt(hdr, parts, take) {
            engine.count_drop(port, reason);
        }
        for piece in pieces {
            self.emit_one(engine, h, port, guest, piece)?;
        }
        Ok(())
    }

    fn emit_one(
        &mut self,
        engine: &mut Engine<'_>,
        h: u8,
        port: PortId,
        guest: Option<usize>,
        mut frame: Frame,
    ) -> Result<(), Stop> {
        let Some(g) = guest else {
            frame.hdr.flags &= !F_DATA_VALID; // the network's next card looks for itself
            self.tap(h, Tap::ToNet, frame.hdr, &frame.bytes, false)?;
            self.send_to_network(h, &frame);
            return Ok(());
        };
        if !self.nodes[g].link_up {
            engine.count_drop(port, DropReason::PortDown);
            return Ok(());
        }
        let backlog = &mut self.hosts[usize::from(h)].backlogs[g];
        if backlog.is_empty() && frame.bytes.len() > self.nodes[g].room_max() {
            engine.count_drop(port, DropReason::TooBig);
            return Ok(());
        }
        if !backlog.is_empty() || frame.bytes.len() > self.nodes[g].room() {
            let bytes: usize = backlog.iter().map(|f| f.bytes.len()).sum();
            if backlog.len() < self.plan.host.backlog_frames
                && bytes + frame.bytes.len() <= BYTES_MAX
            {
                backlog.push_back(frame);
            } else {
                engine.count_drop(port, DropReason::QueueFull);
            }
            self.nodes[g].host_waits = true;
            return Ok(());
        }
        self.put_into_ring(h, g, frame, false)
    }

    fn put_into_ring(&mut self, h: u8, g: usize, frame: Frame, waited: bool) -> Result<(), Stop> {
        let tap = Tap::ToGuest(u16::try_from(g).unwrap_or(u16::MAX));
        self.tap(h, tap, frame.hdr, &frame.bytes, waited)?;
        let (len, room) = (frame.bytes.len(), self.nodes[g].room());
        let fits = self.nodes[g].push(frame);
        assert!(fits, "a frame of {len} bytes for a ring with room for {room}");
        self.nodes[g].interrupt_due = true;
        Ok(())
    }

    /// Moves the backlog, then deliveries.
    fn feed_guest(&mut self, engine: &mut Engine<'_>, h: u8, g: usize) -> Result<u64, Stop> {
        let Some(port) = self.hosts[usize::from(h)].ports[g] else { return Ok(0) };
        let mut frames = 0;
        loop {
            let backlog = &mut self.hosts[usize::from(h)].backlogs[g];
            let moved = !backlog.is_empty();
            if let Some(next) = backlog.front() {
                let (len, node) = (next.bytes.len(), &mut self.nodes[g]);
                if len > node.room() && len <= node.room_max() {
                    node.host_waits = true;
                    engine.handle_no_room(self.now, port);
                    return Ok(frames);
                }
                let fits = len <= node.room_max();
                let frame = backlog.pop_front().unwrap_or_default();
                frames += 1;
                if fits {
                    self.put_into_ring(h, g, frame, true)?;
                } else {
                    engine.count_drop(port, DropReason::TooBig);
                }
            }
            let behind = !self.hosts[usize::from(h)].backlogs[g].is_empty();
            let room = if behind { FULL_FRAME } else { self.nodes[g].room().min(FRAME_BYTES_MAX) };
            let Some(made) = engine.poll_delivery(self.now, port, room) else {
                if moved {
                    continue;
                }
                let waits = engine.vm(port).is_some_and(|vm| !vm.ready.is_empty());
                self.nodes[g].host_waits = waits;
                return Ok(frames);
            };
            let frame = owned(&made);
            frames += 1;
            if !self.plan.guests[g].offloads.takes(&frame.hdr) {
                let what = "a delivery that the guest's driver does not take".to_owned();
                return Err(Stop::Violated(Violation { invariant: 22, what, flow: None }));
            }
            // One without data comes whatever the room: it waits in the backlog then.
            self.emit_one(engine, h, port, Some(g), frame)?;
            self.after_step(engine, h)?;
        }
    }

    /// The engine has done one step: everybody looks, and the daemon may die here.
    pub(super) fn after_step(&mut self, engine: &Engine<'_>, h: u8) -> Result<(), Stop> {
        self.after(engine, h, false)
    }

    /// The same after a timer or a command, which may have changed any flow.
    pub(super) fn after_command(&mut self, engine: &Engine<'_>, h: u8) -> Result<(), Stop> {
        self.after(engine, h, true)
    }

    fn after(&mut self, engine: &Engine<'_>, h: u8, any_flow: bool) -> Result<(), Stop> {
        self.steps += 1;
        if let Some(observer) = &mut self.observer {
            let Host { ports, worker_waits, worker_runs_since, .. } = &self.hosts[usize::from(h)];
            let worker_runs_since = if *worker_waits { self.now } else { *worker_runs_since };
            let view = HostView { host: h, engine, ports, worker_runs_since, any_flow };
            observer.on_step(self.now, &view).map_err(Stop::Violated)?;
        }
        match &mut self.dies_in {
            Some((0, arena)) => {
                let arena = *arena;
                self.dies_in = None;
                self.event(crate::check::Event::Crashed);
                self.count("daemon crashes");
                let back_at = self.back_at;
                self.schedule(back_at, Event::Restart);
                Err(Stop::Crashed { arena })
            }
            Some((steps, _)) => {
                *steps -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// A frame leaves host `h` for the network.
    fn send_to_network(&mut self, h: u8, frame: &Frame) {
        let Some(dst) = frame.bytes.first_chunk::<6>().copied() else { return };
        let group = dst[0] & 1 == 1;
        let target = machine_of(dst);
        for r in 0..self.plan.remotes.len() {
            let is_it = target == Some(Machine::Remote(u16::try_from(r).unwrap_or(u16::MAX)));
            if group || is_it {
                self.send_to_remote(r, frame.clone());
            }
        }
        if self.hosts.len() > 1 && (group || matches!(target, Some(Machine::Guest(_)))) {
            let other = 1 - h;
            let is_there = |g: u16| self.nodes.get(usize::from(g)).is_some_and(|n| n.host == other);
            if group || matches!(target, Some(Machine::Guest(g)) if is_there(g)) {
                for piece in on_wire(frame.clone()) {
                    self.schedule(self.now + SWITCH, Event::ToHost(other, piece, false));
                }
            }
        }
    }

    /// A frame as the path to or from remote `r` carries it. What breaks bits finds none without
    /// a checksum.
    fn on_path(&self, r: usize, frame: Frame) -> Vec<Frame> {
        let breaks = |f: &Fault| match f.kind {
            FaultKind::Corrupt { remote, .. } => usize::from(remote) == r,
            _ => false,
        };
        let whole = self.plan.remotes[r].offloads.takes(&frame.hdr);
        if whole && !self.plan.faults.iter().any(breaks) { vec![frame] } else { on_wire(frame) }
    }

    pub(super) fn send_to_remote(&mut self, r: usize, frame: Frame) {
        let mut out = Vec::new();
        for piece in self.on_path(r, frame) {
            self.links[r][1].send(self.now, piece, &mut out);
        }
        let node = self.plan.guests.len() + r;
        for (at, frame) in out {
            self.schedule(at, Event::ToNode(node, frame));
        }
    }

    /// A frame leaves remote `r`: to the host where its destination lives.
    pub(super) fn send_from_remote(&mut self, r: usize, frame: Frame) {
        let Some(dst) = frame.bytes.first_chunk::<6>().copied() else { return };
        let mut out = Vec::new();
        for piece in self.on_path(r, frame) {
            self.links[r][0].send(self.now, piece, &mut out);
        }
        let group = dst[0] & 1 == 1;
        for (at, frame) in out {
            let hosts: Vec<u8> = match machine_of(dst) {
                _ if group => (0..self.hosts.len()).filter_map(|h| u8::try_from(h).ok()).collect(),
                Some(Machine::Guest(g)) => {
                    self.nodes.get(usize::from(g)).map(|n| n.host).into_iter().collect()
                }
                _ => Vec::new(),
            };
            for host in hosts {
                self.schedule(at, Event::ToHost(host, frame.clone(), false));
            }
        }
    }
}

/// What the driver of guest `g` takes.
fn features_of(plan: &Plan, g: usize) -> PortFeatures {
    let Offloads { csum, tso4, tso6, ecn } = plan.guests[g].offloads;
    PortFeatures { csum, tso4, tso6, ecn }
}

fn owned(made: &Transmit<'_>) -> Frame {
    Frame { hdr: made.hdr, bytes: made.parts().concat() }
}
