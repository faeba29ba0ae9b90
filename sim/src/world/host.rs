//! A host: ports, queues, and when the daemon's worker takes its turns.

use std::collections::VecDeque;

use nightporter_core::congestion::Algorithm;
use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::limits::T_OPENING;
use nightporter_core::port::Local;
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId, Vlans};
use nightporter_core::store::arena::Arena;
use nightporter_core::tcp::accept::AcceptConfig;
use nightporter_core::tcp::accept::learned::AcceptFrom;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::{Turn, TurnConfig};

use super::{Engines, Member, Stop, World, WorldEvent, merge};
use crate::plan::{Accepts, Fault, FaultKind, Machine, Offloads, Plan};
use crate::stack::address::machine_of;
use nightporter_check::frame::Frame;
use nightporter_check::observer::HostView;
use nightporter_check::wire::on_wire;

/// The uplink is always the first port.
pub(super) const UPLINK: PortId = PortId(0);
/// The network of a guest whose tap is attached.
const WIRE: &str = "wire";
/// Frames among which a segment is looked for that another continues (Linux: 8 flows a bucket).
const MERGED_FLOWS: usize = 8;
/// Between two hosts: through one switch.
const SWITCH: Duration = Duration::from_micros(20);

/// The state of a host that survives its daemon, and its worker's state besides the engine.
pub(super) struct Host {
    index: u8,
    /// Arrived and not yet read by the worker; `true`: forged.
    pub(super) uplink: VecDeque<(Frame, bool)>,
    /// Of the daemon that runs, with the frames that found a guest's ring full.
    pub(super) turn: Option<Turn>,
    /// Port of each guest, while it is on this host.
    pub(super) ports: Vec<Option<PortId>>,
    busy_until: Instant,
    turn_at: Instant,
    /// Its worker has work, and another machine has its processor.
    worker_waits: bool,
    /// When it last got the processor after it had waited.
    worker_runs_since: Instant,
}

impl Host {
    pub(super) fn new(index: u8) -> Self {
        Self {
            index,
            uplink: VecDeque::new(),
            turn: None,
            ports: Vec::new(),
            busy_until: Instant::ZERO,
            turn_at: Instant::MAX,
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
        let flows_per_step = plan.host.flows_per_step;
        let config =
            EngineConfig { flows_per_step, ..EngineConfig::new(plan.host.flows_max, seeds) };
        let mut engine = Engine::new(now, config, arena);
        let uplink = PortConfig::uplink("uplink");
        let uplink = if plan.host.wire { uplink.on_wire(WIRE) } else { uplink };
        let mut turn = Turn::new(TurnConfig {
            frames_per_port: plan.host.turn_frames,
            flows_in_cache: 0,
            backlog_frames_max: plan.host.backlog_frames,
        });
        let port = turn.add_port(now, &mut engine, uplink).expect("the first port");
        assert_eq!(port, UPLINK);
        turn.set_features(now, &mut engine, UPLINK, Some(PortFeatures::ALL));
        self.turn = Some(turn);
        self.ports = vec![None; plan.guests.len()];
        self.turn_at = Instant::MAX;
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
            isolated: false,
            trusted: false,
            vlans: Vlans::Any,
            ack_offload: guest.ack_offload,
            budget_bytes: guest.budget_bytes,
            flows_max: guest.flows_max,
            mtu: guest.mtu,
            local: Local::Auto,
            guest_ttl: Some(32), // one of its stacks'
            congestion_offload: guest.congestion_offload,
            congestion_control: if guest.new_reno { Algorithm::Reno } else { Algorithm::Cubic },
        };
        let config = PortConfig::guest(format!("guest{g}"), config);
        let config = if plan.host.wire { config.on_wire(WIRE) } else { config };
        let turn = self.turn.as_mut().expect("of a daemon that runs");
        let port = turn.add_port(now, engine, config).expect("budgets fit the arena");
        let from = match guest.accepts {
            Accepts::No => None,
            Accepts::BySource => Some(AcceptFrom::Itself),
            Accepts::ForAny => Some(AcceptFrom::Any),
        };
        if let Some(from) = from {
            // The first daemon is there before anybody has sent a SYN.
            let begins_at = if now == Instant::ZERO { now } else { now + T_OPENING };
            let config = AcceptConfig { ports: vec![1..=u16::MAX], from, begins_at };
            let keys = [1, 2, 3, 4, 5, 6].map(|n| plan.seed ^ n);
            engine.set_accept_offload(port, Some((config, keys)));
        }
        if plan.host.wire {
            turn.set_features(now, engine, port, Some(PortFeatures::ALL)); // as a tap
        }
        self.ports[g] = Some(port);
    }
}

impl World<'_> {
    /// A daemon was started: ports, the predecessor's debts, links.
    pub(super) fn begin_life(
        &mut self,
        engines: &mut Engines<'_>,
        survived: bool,
    ) -> Result<(), Stop> {
        let now = self.now;
        let again = now > Instant::ZERO;
        self.attach_anew();
        if again {
            self.event(nightporter_check::event::Event::Restarted { arena: survived });
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
            let begins_anew = std::mem::take(&mut self.nodes[g].begins_anew);
            if self.nodes[g].link_up {
                let host = &self.hosts[usize::from(self.nodes[g].host)];
                let port = host.ports.get(g).copied().flatten();
                let engine = engines.get_mut(usize::from(host.index));
                if let Some((engine, port)) =
                    engine.zip(port).filter(|_| !begins_anew && !self.plan.host.wire)
                {
                    engine.handle_guest_back(port);
                }
                self.set_features(engines, g, true);
            }
        }
        for h in 0..self.hosts.len() {
            let host = u8::try_from(h).unwrap_or(0);
            if let Some(engine) = engines.get_mut(h) {
                self.send_made(engine, host)?;
            }
            self.schedule(now, WorldEvent::Turn(host));
        }
        Ok(())
    }

    /// The driver of guest `g` is there, or gone, as its host's engine is told.
    pub(super) fn set_features(&mut self, engines: &mut Engines<'_>, g: usize, up: bool) {
        let host = &mut self.hosts[usize::from(self.nodes[g].host)];
        let Some(port) = host.ports.get(g).copied().flatten() else { return };
        let Offloads { csum, tso4, tso6, ecn } = self.plan.guests[g].offloads;
        let features = PortFeatures { csum, tso4, tso6, ecn, uso: false };
        let engine = engines.get_mut(usize::from(host.index));
        if let (Some(engine), Some(turn)) = (engine, &mut host.turn) {
            turn.set_features(self.now, engine, port, up.then_some(features));
        }
    }

    /// A frame came to a host's uplink.
    pub(super) fn arrive_at_host(&mut self, host: u8, frame: Frame, forged: bool) {
        let Some(mut frame) = self.pass_to_guest(frame) else { return };
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
        self.schedule(self.now + wait, WorldEvent::Turn(host));
    }

    /// One turn of the worker, if it has a processor and nothing is in its way.
    pub(super) fn turn(&mut self, engines: &mut Engines<'_>, h: u8) -> Result<(), Stop> {
        let now = self.now;
        let host = &mut self.hosts[usize::from(h)];
        if host.turn_at == now {
            host.turn_at = Instant::MAX;
        }
        if engines.is_empty() || self.attached.is_away() {
            return Ok(());
        }
        if now < host.busy_until {
            if host.turn_at > host.busy_until {
                host.turn_at = host.busy_until;
                let at = host.turn_at;
                self.schedule(at, WorldEvent::Turn(h));
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
        let frames = self.with_turn(h, |turn, ports| {
            ports.wake(now, engine, turn);
            turn.run(now, engine, ports)
        })?;
        let cost = self.plan.host.turn_ns + self.plan.host.frame_ns * frames;
        self.hosts[usize::from(h)].busy_until = now + Duration::from_nanos(cost);
        self.rest(engine, h)?;
        self.note_caught_up(engines);
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

    /// When the worker wants its next turn.
    fn rest(&mut self, engine: &Engine<'_>, h: u8) -> Result<(), Stop> {
        let now = self.now;
        let left = self.with_turn(h, |turn, ports| Ok(turn.rest(ports)))?;
        let host = &self.hosts[usize::from(h)];
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
            self.schedule(at, WorldEvent::Turn(h));
        }
        Ok(())
    }

    /// Sends the frames that the engine made.
    pub(super) fn send_made(&mut self, engine: &mut Engine<'_>, h: u8) -> Result<(), Stop> {
        let now = self.now;
        self.with_turn(h, |turn, ports| turn.transmit(now, engine, ports))
    }

    /// The engine has done one step: everybody looks, and the daemon may die here. `any_flow`: it
    /// was a timer or a command, which may have changed any flow.
    pub(super) fn after_step(
        &mut self,
        engine: &Engine<'_>,
        h: u8,
        any_flow: bool,
    ) -> Result<(), Stop> {
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
                self.event(nightporter_check::event::Event::Crashed);
                self.count("daemon crashes");
                self.lose_turned();
                let back_at = self.back_at;
                self.schedule(back_at, WorldEvent::Restart);
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
    pub(super) fn send_to_network(&mut self, h: u8, frame: &Frame) {
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
                    self.schedule(self.now + SWITCH, WorldEvent::ToHost(other, piece, false));
                }
            }
        }
    }

    /// A frame as the path to or from remote `r` carries it. A fault that flips bits finds no frame
    /// without a checksum.
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
            self.schedule(at, WorldEvent::ToNode(node, frame));
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
                self.schedule(at, WorldEvent::ToHost(host, frame.clone(), false));
            }
        }
    }
}
