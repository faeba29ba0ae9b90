//! Faults of hosts and machines, and their repair.

use nightporter_core::engine::Engine;
use nightporter_core::port::PortId;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::Turn;

use super::{Engines, Stop, World, WorldEvent, handover};
use crate::plan::{Fault, FaultKind, Machine, StackKind, flows_per_step};
use nightporter_check::event::Event as Seen;
use nightporter_check::frame::Frame;
use nightporter_check::wire::{Packet, TcpFlags};
use nightporter_check::wire::{Segment, build};

/// A clock that is so near to its wrap, in ticks, may be 0 when a forged segment comes.
const NEARLY_WRAPPED: u32 = 1 << 16;
/// In the window, and nowhere that counts.
const IN_WINDOW: u32 = 333;
/// When to look again whether a VM that has gone has ended.
const REMOVAL_LOOK: Duration = Duration::from_micros(20);
/// A migration waits so long for the guest to be drained (LIFE-06).
const MIGRATION_DEADLINE: Duration = Duration::from_secs(2);
/// How often it looks.
const MIGRATION_LOOK: Duration = Duration::from_millis(10);
/// How long a guest stands still while it moves, and a driver takes to come back.
const DOWNTIME: Duration = Duration::from_millis(20);

/// A listener's knowledge of a live connection: the newest segment of R.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) packet: Packet,
}

/// A forger who is in no hurry waits so long: no answer is limited (COM-31).
const SELDOM: Duration = Duration::from_millis(600);

/// Remembers the newest segment of each of a few connections.
pub(super) fn note_known(known: &mut Vec<Known>, packet: Option<&Packet>) {
    let Some(packet) = packet else { return };
    let Some((_, tcp)) = packet.tcp() else { return };
    if tcp.flags.intersects(TcpFlags::SYN | TcpFlags::RST) {
        return;
    }
    let same = |k: &&mut Known| {
        k.packet
            .tcp()
            .is_some_and(|(_, t)| (t.src_port, t.dst_port) == (tcp.src_port, tcp.dst_port))
    };
    match known.iter_mut().find(same) {
        Some(k) => k.packet = *packet,
        None => known.insert(0, Known { packet: *packet }),
    }
}

impl World<'_> {
    pub(super) fn start_fault(&mut self, engines: &mut Engines<'_>, i: usize) -> Result<(), Stop> {
        let fault = self.plan.faults[i].clone();
        self.count(fault.kind.name());
        let end = self.over_at(&fault);
        let mut lasts = true;
        match fault.kind {
            kind if kind.link().is_some() => {
                if let Some((remote, to_host)) = kind.link() {
                    self.links[usize::from(remote)][usize::from(!to_host)].start(kind);
                }
            }
            FaultKind::Pause { guest } => self.pause(guest, true),
            FaultKind::Reboot { guest } => {
                lasts = false;
                self.reboot(engines, guest)?;
            }
            FaultKind::Destroy { guest } => {
                lasts = false;
                self.destroy(engines, guest)?;
            }
            FaultKind::Migrate { guest } => {
                lasts = false;
                if self.nodes[usize::from(guest)].host == 0 {
                    self.command(engines, guest, |_, e, now, port| e.drain(now, port))?;
                    self.event(Seen::Draining(guest));
                    self.schedule(self.now + MIGRATION_LOOK, WorldEvent::Migration(guest));
                }
            }
            FaultKind::DriverReset { guest } => {
                lasts = false;
                self.driver_reset(engines, guest)?;
            }
            FaultKind::StopReading { machine } => self.set_reading(machine, false),
            FaultKind::ShrinkWindow { machine } => self.set_shrinking(machine, true),
            FaultKind::DropDelivered { guest, ppm } => {
                self.nodes[usize::from(guest)].drop_ppm = ppm;
            }
            FaultKind::OneWay { guest, fragments } => self.set_one_way(guest, fragments, true),
            FaultKind::Crash { arena, step } => {
                lasts = false;
                if !engines.is_empty() && self.dies_in.is_none() {
                    self.dies_in = Some((step, arena));
                    self.back_at = self.now + fault.lasts;
                }
            }
            FaultKind::Away { plain_after_us } => self.stand(engines, plain_after_us),
            FaultKind::OffloadOff { guest } => self.set_offload(engines, guest, false)?,
            FaultKind::FloodsOff { guest } => self.set_floods(engines, guest, false)?,
            FaultKind::Drain { guest } => {
                self.event(Seen::Draining(guest));
                self.command(engines, guest, |_, e, now, port| e.drain(now, port))?;
            }
            FaultKind::Late { guest } => self.set_late(engines, guest, true)?,
            FaultKind::Handover { guest, moves } => self.hand_over(engines, guest, moves)?,
            FaultKind::FlowFlood { .. } | FaultKind::Forge { .. } => {
                self.schedule(self.now, WorldEvent::FaultGoesOn(i));
            }
            FaultKind::ManyAddresses { guest, addresses } => self.show_addresses(guest, addresses),
            FaultKind::Kill { guest } => {
                lasts = false;
                self.kill(guest);
            }
            _ => {}
        }
        if lasts {
            self.schedule(end, WorldEvent::FaultEnds(i));
        }
        Ok(())
    }

    /// When a fault ends: at the healing, if it did not begin later.
    fn over_at(&self, fault: &Fault) -> Instant {
        let (at, heal_at) = (fault.at, self.plan.heal_at);
        if at < heal_at { (at + fault.lasts).min(heal_at) } else { at + fault.lasts }
    }

    pub(super) fn end_fault(&mut self, engines: &mut Engines<'_>, i: usize) -> Result<(), Stop> {
        match self.plan.faults[i].kind {
            kind if kind.link().is_some() => {
                if let Some((remote, to_host)) = kind.link() {
                    self.links[usize::from(remote)][usize::from(!to_host)].stop(kind);
                }
            }
            FaultKind::Pause { guest } => self.pause(guest, false),
            FaultKind::StopReading { machine } => self.set_reading(machine, true),
            FaultKind::ShrinkWindow { machine } => self.set_shrinking(machine, false),
            FaultKind::DropDelivered { guest, .. } => self.nodes[usize::from(guest)].drop_ppm = 0,
            FaultKind::OneWay { guest, fragments } => self.set_one_way(guest, fragments, false),
            FaultKind::FloodsOff { guest } => self.set_floods(engines, guest, true)?,
            FaultKind::OffloadOff { guest } | FaultKind::Drain { guest } => {
                self.set_offload(engines, guest, true)?;
            }
            FaultKind::Late { guest } => self.set_late(engines, guest, false)?,
            FaultKind::Away { .. } => self.go_on(engines)?,
            _ => {}
        }
        Ok(())
    }

    /// From here on nothing goes wrong, and everybody has a processor.
    pub(super) fn heal(&mut self, _engines: &mut Engines<'_>) {
        self.healed = true;
        self.event(Seen::Healed);
        for c in &mut self.cores {
            c.core.dedicate();
        }
        for i in 0..self.nodes.len() {
            self.wake_node(i);
        }
        for h in 0..self.hosts.len() {
            self.schedule(self.now, WorldEvent::Turn(u8::try_from(h).unwrap_or(0)));
        }
    }

    /// The host acknowledges early for a guest, or does so no longer.
    fn set_offload(&mut self, engines: &mut Engines<'_>, guest: u16, on: bool) -> Result<(), Stop> {
        self.event(Seen::Offload(guest, on));
        self.command(engines, guest, |_, e, now, port| e.set_offload(now, port, on))
    }

    /// The host acknowledges late for a guest, or does so no longer.
    fn set_late(&mut self, engines: &mut Engines<'_>, guest: u16, late: bool) -> Result<(), Stop> {
        self.command(engines, guest, |_, e, now, port| e.set_late(now, port, late))
    }

    /// The flows of a guest go on as those of an image.
    fn hand_over(
        &mut self,
        engines: &mut Engines<'_>,
        guest: u16,
        moves: bool,
    ) -> Result<(), Stop> {
        let host = self.plan.host.clone();
        self.command(engines, guest, |_, e, now, port| {
            handover::hand_over(e, &host, now, port, moves);
        })
    }

    /// The host sends for a guest, or does so no longer.
    fn set_floods(&mut self, engines: &mut Engines<'_>, guest: u16, on: bool) -> Result<(), Stop> {
        self.command(engines, guest, |_, e, _, port| e.set_congestion_offload(port, on))
    }

    /// An operator's command for a guest's port, and its consequences.
    fn command(
        &mut self,
        engines: &mut Engines<'_>,
        guest: u16,
        act: impl FnOnce(&mut Turn, &mut Engine<'_>, Instant, PortId),
    ) -> Result<(), Stop> {
        let host = self.nodes[usize::from(guest)].host;
        let port = self.hosts[usize::from(host)].ports.get(usize::from(guest)).copied().flatten();
        let turn = self.hosts[usize::from(host)].turn.as_mut();
        if let (Some(engine), Some(turn), Some(port)) =
            (engines.get_mut(usize::from(host)), turn, port)
        {
            act(turn, engine, self.now, port);
            self.send_made(engine, host)?;
            self.after_step(engine, host, true)?;
            self.schedule(self.now, WorldEvent::Turn(host));
        }
        Ok(())
    }

    fn pause(&mut self, guest: u16, on: bool) {
        let i = usize::from(guest);
        self.nodes[i].paused = on;
        let unseen = !self.nodes[i].rx.is_empty();
        self.event(if on { Seen::Paused { guest, unseen } } else { Seen::Resumed(guest) });
        if let Some((core, place)) = self.nodes[i].core {
            let before = self.cores[core].core.current();
            self.cores[core].core.set_paused(self.now, place, on);
            self.after_core(core, before);
        }
        if !on {
            self.wake_node(i);
        }
    }

    fn set_one_way(&mut self, guest: u16, fragments: bool, on: bool) {
        let node = &mut self.nodes[usize::from(guest)];
        *if fragments { &mut node.fragments } else { &mut node.one_way } = on;
    }

    fn set_reading(&mut self, machine: Machine, on: bool) {
        let i = self.node_of(machine);
        self.nodes[i].stack.set_reading(on);
        self.wake_node(i);
    }

    fn set_shrinking(&mut self, machine: Machine, on: bool) {
        let i = self.node_of(machine);
        self.nodes[i].stack.set_shrinking(on);
        self.wake_node(i);
    }

    fn reboot(&mut self, engines: &mut Engines<'_>, guest: u16) -> Result<(), Stop> {
        let i = usize::from(guest);
        if self.nodes[i].destroyed {
            return Ok(());
        }
        self.event(Seen::Rebooted(guest));
        self.nodes[i].reboot(&self.plan, self.now);
        if self.plan.host.wire {
            return Ok(()); // its tap stays
        }
        self.link_down(engines, guest, false)
    }

    fn driver_reset(&mut self, engines: &mut Engines<'_>, guest: u16) -> Result<(), Stop> {
        if self.nodes[usize::from(guest)].paused {
            return Ok(()); // it does nothing at all
        }
        self.event(Seen::DriverReset(guest));
        self.nodes[usize::from(guest)].clear_rings();
        self.link_down(engines, guest, true)
    }

    /// The driver goes, and in every other millisecond the VMM hangs up with it. `comes_back`: it
    /// is the same guest whose driver will be there.
    fn link_down(
        &mut self,
        engines: &mut Engines<'_>,
        guest: u16,
        comes_back: bool,
    ) -> Result<(), Stop> {
        let node = &mut self.nodes[usize::from(guest)];
        (node.link_up, node.comes_back) = (false, comes_back);
        self.set_features(engines, usize::from(guest), false);
        self.schedule(self.now + DOWNTIME, WorldEvent::DriverIsBack(guest));
        if self.now.since(Instant::ZERO).as_millis().is_multiple_of(2) {
            self.command(engines, guest, |_, e, now, port| e.handle_guest_gone(now, port))?;
            self.event(Seen::Awaited(guest));
            self.count("VMMs that hang up");
        }
        Ok(())
    }

    pub(super) fn driver_is_back(
        &mut self,
        engines: &mut Engines<'_>,
        guest: u16,
    ) -> Result<(), Stop> {
        let i = usize::from(guest);
        if self.nodes[i].destroyed {
            return Ok(());
        }
        self.nodes[i].link_up = true;
        let comes_back = std::mem::take(&mut self.nodes[i].comes_back);
        self.nodes[i].begins_anew |= engines.is_empty() && !comes_back;
        if comes_back {
            self.command(engines, guest, |_, e, _, port| e.handle_guest_back(port))?;
        }
        self.event(Seen::DriverBack(guest));
        self.set_features(engines, i, true);
        self.command(engines, guest, |_, _, _, _| {})?;
        self.wake_node(i);
        Ok(())
    }

    fn destroy(&mut self, engines: &mut Engines<'_>, guest: u16) -> Result<(), Stop> {
        let i = usize::from(guest);
        self.event(Seen::Destroyed(guest));
        self.nodes[i].destroyed = true;
        self.nodes[i].clear_rings();
        if self.plan.host.flows_per_step < flows_per_step() {
            self.nodes[i].link_up = false;
            self.set_features(engines, i, false);
            self.command(engines, guest, |_, e, now, port| {
                e.handle_guest_gone(now, port);
                e.prepare_removal(port);
            })?;
        }
        self.remove(engines, guest)
    }

    /// The port of a VM that has gone goes when all of its remotes have been told.
    pub(super) fn remove(&mut self, engines: &mut Engines<'_>, guest: u16) -> Result<(), Stop> {
        let host = self.nodes[usize::from(guest)].host;
        let port = self.hosts[usize::from(host)].ports.get(usize::from(guest)).copied().flatten();
        let engine = engines.get(usize::from(host));
        if engine.zip(port).is_some_and(|(engine, port)| engine.is_ending(port)) {
            self.count("looks at a VM that ends in steps");
            self.schedule(self.now + REMOVAL_LOOK, WorldEvent::Removal(guest));
            return Ok(());
        }
        self.remove_port(engines, guest)
    }

    fn remove_port(&mut self, engines: &mut Engines<'_>, guest: u16) -> Result<(), Stop> {
        let host = self.nodes[usize::from(guest)].host;
        self.command(engines, guest, |turn, e, now, port| turn.remove_port(now, e, port))?;
        if let Some(port) = self.hosts[usize::from(host)].ports.get_mut(usize::from(guest)) {
            *port = None;
        }
        Ok(())
    }

    /// The guest moves as soon as nothing is owed, or its time is up.
    pub(super) fn migrate(&mut self, engines: &mut Engines<'_>, guest: u16) -> Result<(), Stop> {
        let i = usize::from(guest);
        let Some(fault) = self.plan.faults.iter().find(|f| f.kind == FaultKind::Migrate { guest })
        else {
            return Ok(());
        };
        if self.nodes[i].host != 0 || self.nodes[i].destroyed {
            return Ok(());
        }
        let late = self.now >= fault.at + MIGRATION_DEADLINE;
        let port = self.hosts[0].ports.get(i).copied().flatten();
        let drained = match (engines.first(), port) {
            (Some(engine), Some(port)) => engine.is_drained(port),
            _ => false,
        };
        if !drained && !late || engines.is_empty() {
            self.schedule(self.now + MIGRATION_LOOK, WorldEvent::Migration(guest));
            return Ok(());
        }
        self.event(Seen::Migrated(guest));
        let removed = self.remove_port(engines, guest);
        // It has left, also if the daemon dies of that (seed 47701).
        self.nodes[i].host = 1;
        self.nodes[i].clear_rings();
        self.nodes[i].link_up = false;
        self.schedule(self.now + DOWNTIME, WorldEvent::DriverIsBack(guest));
        removed?;
        self.hosts[1].add_guest(&mut engines[1], &self.plan, self.now, i);
        Ok(())
    }

    /// Another frame of a stranger.
    pub(super) fn go_on_with_fault(&mut self, i: usize) {
        let fault = self.plan.faults[i].clone();
        if self.now >= self.over_at(&fault) {
            return;
        }
        let per_ms = match fault.kind {
            FaultKind::FlowFlood { guest, per_ms, .. } => {
                self.flood_flows(guest);
                per_ms
            }
            FaultKind::Forge { guest, per_ms } => {
                self.forge(guest, per_ms == 0);
                per_ms
            }
            _ => return,
        };
        let wait = match per_ms {
            0 => SELDOM,
            _ => Duration::from_nanos(1_000_000 / u64::from(per_ms)),
        };
        self.schedule(self.now + wait, WorldEvent::FaultGoesOn(i));
    }

    /// A stranger's SYN, and the guest's answer: an entry that is never used.
    fn flood_flows(&mut self, guest: u16) {
        let g = Machine::Guest(guest).address();
        let n = self.random.bits().to_be_bytes();
        let stranger = [10, 3, n[0], n[1]];
        let mut syn = Segment {
            src_mac: [2, 0, 0, 3, n[0], n[1]],
            dst_mac: g.mac,
            src: stranger.into(),
            dst: g.v4.into(),
            src_port: u16::from_be_bytes([n[2], n[3]]) | 1,
            dst_port: 80,
            seq: 1000,
            flags: TcpFlags::SYN,
            window: 65_000,
            ..Segment::default()
        };
        let frame = build(&syn, &[]);
        let host = self.nodes[usize::from(guest)].host;
        self.schedule(
            self.now,
            WorldEvent::ToHost(host, Frame::on_wire(frame).tagged(self.plan.vlan), true),
        );
        std::mem::swap(&mut syn.src_mac, &mut syn.dst_mac);
        std::mem::swap(&mut syn.src, &mut syn.dst);
        std::mem::swap(&mut syn.src_port, &mut syn.dst_port);
        (syn.seq, syn.ack, syn.flags) = (77_000, 1001, TcpFlags::SYN | TcpFlags::ACK);
        let node = &mut self.nodes[usize::from(guest)];
        if node.link_up && !node.destroyed && node.tx.len() < 128 {
            node.tx.push_back(Frame::on_wire(build(&syn, &[])).tagged(self.plan.vlan));
            self.schedule(self.now, WorldEvent::Turn(host));
        }
        *self.faults.entry("stray handshakes").or_default() += 1;
    }

    /// A frame of each of the machines that `guest` routes for: an RST without a connection.
    fn show_addresses(&mut self, guest: u16, addresses: u16) {
        let to = Machine::Remote(0).address();
        let frame = |n: u16| {
            let [hi, lo] = n.to_be_bytes();
            let rst = Segment {
                src_mac: Machine::Guest(guest).address().mac,
                dst_mac: to.mac,
                src: [10, 4, hi, lo].into(),
                dst: to.v4.into(),
                src_port: 9,
                dst_port: 9,
                flags: TcpFlags::RST,
                ..Segment::default()
            };
            Frame::on_wire(build(&rst, &[])).tagged(self.plan.vlan)
        };
        let frames: Vec<Frame> = (0..addresses).map(frame).collect();
        let node = &mut self.nodes[usize::from(guest)];
        if node.link_up && !node.paused && !node.destroyed {
            node.tx.extend(frames);
            node.kicked |= node.host_sleeps;
            let host = node.host;
            self.schedule(self.now, WorldEvent::Turn(host));
        }
    }

    /// An RST to either end of a connection of `guest`, exact as far as a listener can know.
    fn kill(&mut self, guest: u16) {
        let mac = Machine::Guest(guest).address().mac;
        let Some(packet) = self.known.iter().map(|k| k.packet).find(|p| p.eth.dst == mac) else {
            return;
        };
        let Some((ip, tcp)) = packet.tcp() else { return };
        let to_guest = Segment {
            src_mac: packet.eth.src,
            dst_mac: packet.eth.dst,
            src: ip.src.to_ip(),
            dst: ip.dst.to_ip(),
            src_port: tcp.src_port,
            dst_port: tcp.dst_port,
            seq: (tcp.seq + tcp.seq_len()).0,
            ack: tcp.ack.0,
            flags: TcpFlags::RST | TcpFlags::ACK,
            ..Segment::default()
        };
        let to_remote = Segment {
            src_mac: to_guest.dst_mac,
            dst_mac: to_guest.src_mac,
            src: to_guest.dst,
            dst: to_guest.src,
            src_port: to_guest.dst_port,
            dst_port: to_guest.src_port,
            seq: to_guest.ack,
            ack: to_guest.seq,
            ..to_guest.clone()
        };
        self.event(Seen::Killed(guest, tcp.dst_port, tcp.src_port));
        let host = self.nodes[usize::from(guest)].host;
        let frame = Frame::on_wire(build(&to_guest, &[])).tagged(self.plan.vlan);
        self.schedule(self.now, WorldEvent::ToHost(host, frame, false));
        if let Some(remote) = crate::stack::address::machine_of(to_remote.dst_mac) {
            let frame = Frame::on_wire(build(&to_remote, &[])).tagged(self.plan.vlan);
            self.schedule(self.now, WorldEvent::ToNode(self.node_of(remote), frame));
        }
    }

    /// A segment in R's name that a strict receiver must refuse (SEC-04).
    fn forge(&mut self, guest: u16, of_newest: bool) {
        let mac = Machine::Guest(guest).address().mac;
        let mut known = self.known.iter().map(|k| k.packet);
        let packet = if of_newest {
            known.find(|p| p.eth.dst == mac)
        } else if self.known.is_empty() {
            None
        } else {
            known.nth(usize::try_from(self.random.below(self.known.len() as u64)).unwrap_or(0))
        };
        let Some(packet) = packet.filter(|p| p.eth.dst == mac) else { return };
        let Some((ip, tcp)) = packet.tcp() else { return };
        let next = tcp.seq + tcp.seq_len();
        let mut forged = Segment {
            src_mac: packet.eth.src,
            dst_mac: packet.eth.dst,
            src: ip.src.to_ip(),
            dst: ip.dst.to_ip(),
            src_port: tcp.src_port,
            dst_port: tcp.dst_port,
            seq: next.0,
            ack: tcp.ack.0,
            flags: TcpFlags::ACK,
            window: tcp.window,
            timestamps: tcp.options.timestamps.map(|t| (t.tsval, t.tsecr)),
            ..Segment::default()
        };
        let far = u32::try_from(self.random.within(1 << 28, 1 << 30)).unwrap_or(1 << 29);
        let mut spoil = false;
        let payload = vec![0x5a; usize::try_from(self.random.below(1000)).unwrap_or(0)];
        // A stack without PAWS would take the segment with the old clock, offload or not; and while
        // the newest one is 0, which is void, every stack takes any. And not all know RFC 5961.
        let is_strict = self.plan.guests[usize::from(guest)].stack.kind == StackKind::Strict;
        match self.random.below(if is_strict { 11 } else { 7 }) {
            0 => spoil = true,
            6 => match &mut forged.timestamps {
                Some(ts) if is_strict && (1 << 20..u32::MAX - NEARLY_WRAPPED).contains(&ts.0) => {
                    ts.0 -= 1 << 20;
                }
                _ => spoil = true,
            },
            1 => forged.seq = (next + far).0,
            2 => forged.seq = (next - far).0,
            3 => (forged.seq, forged.flags) = ((next + far).0, TcpFlags::RST),
            4 => forged.ack = (tcp.ack + far).0,
            // In the window every stack takes it (SNOOP-04).
            7 => (forged.timestamps, forged.seq) = (None, (next + far).0),
            8 => forged.flags = TcpFlags::NONE,
            9 => (forged.seq, forged.flags) = ((next + IN_WINDOW).0, TcpFlags::RST),
            10 => (forged.seq, forged.flags) = ((next + IN_WINDOW).0, TcpFlags::SYN),
            _ => {
                // A SYN on a live connection: a challenge at most (RFC 5961).
                (forged.seq, forged.flags) = ((next + far).0, TcpFlags::SYN | TcpFlags::ACK);
            }
        }
        let is_data = matches!(forged.flags, TcpFlags::ACK | TcpFlags::NONE);
        let payload = if is_data { &payload[..] } else { &[] };
        let mut bytes = build(&forged, payload);
        if spoil && let Some(last) = bytes.last_mut() {
            *last ^= 0x55;
        }
        let host = self.nodes[usize::from(guest)].host;
        *self.faults.entry("forged segments").or_default() += 1;
        self.schedule(
            self.now,
            WorldEvent::ToHost(host, Frame::on_wire(bytes).tagged(self.plan.vlan), true),
        );
    }
}
