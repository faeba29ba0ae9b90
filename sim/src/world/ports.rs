//! The ports of a host as the turn of its worker sees them: the queue of the uplink, guests' rings.

use std::collections::VecDeque;

use nightporter_core::drops::DropReason;
use nightporter_core::engine::Engine;
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nightporter_core::turn::{Interrupted, Ports, Received, Sent, Step, Turn};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::host::UPLINK;
use super::{Stop, World};
use nightporter_check::frame::Frame;
use nightporter_check::rule::{Rule, Violation};
use nightporter_check::tap::Tap;
use nightporter_check::wire::{F_DATA_VALID, on_wire};

/// A view of the world.
pub(super) struct HostPorts<'w, 'r> {
    world: &'w mut World<'r>,
    host: u8,
    /// Of frames that were read and are not yet worked on: where they are seen to enter, and
    /// whether they are forged.
    read: VecDeque<(Tap, bool)>,
    /// The batch has ended: frames to guests are now deliveries and frames that have waited.
    feeds: bool,
    /// Why the turn does not go on.
    stop: Option<Stop>,
}

impl<'r> World<'r> {
    /// Runs a function with the turn of host `h`, whose ports are in this world.
    pub(super) fn with_turn<T>(
        &mut self,
        h: u8,
        act: impl FnOnce(&mut Turn, &mut HostPorts<'_, 'r>) -> Result<T, Interrupted>,
    ) -> Result<T, Stop> {
        let mut turn = self.hosts[usize::from(h)].turn.take().expect("of a daemon that runs");
        let mut ports =
            HostPorts { world: self, host: h, read: VecDeque::new(), feeds: false, stop: None };
        let result = act(&mut turn, &mut ports);
        let stop = ports.stop.take();
        self.hosts[usize::from(h)].turn = Some(turn);
        match stop {
            Some(stop) => Err(stop),
            None => Ok(result.expect("only a stop interrupts")),
        }
    }
}

impl HostPorts<'_, '_> {
    fn guest(&self, port: PortId) -> Option<usize> {
        let ports = &self.world.hosts[usize::from(self.host)].ports;
        ports.iter().position(|p| *p == Some(port))
    }

    /// The worker is told of the frames since its last turn.
    pub(super) fn wake(&mut self, now: Instant, engine: &mut Engine<'_>, turn: &mut Turn) {
        let host = &self.world.hosts[usize::from(self.host)];
        if !host.uplink.is_empty() {
            turn.wake(UPLINK);
        }
        let ports = host.ports.iter().zip(&mut self.world.nodes);
        for (port, node) in ports.filter(|(port, _)| port.is_some()) {
            if let Some(port) = port.filter(|_| std::mem::take(&mut node.kicked)) {
                turn.handle_kick(now, engine, port);
            }
        }
    }

    /// The turn ends with the next step if that was a stop.
    fn note(&mut self, result: Result<(), Stop>) {
        self.stop = self.stop.take().or(result.err());
    }

    fn tap(&mut self, tap: Tap, frame: &Frame, marked: bool) {
        let result = self.world.tap(self.host, tap, frame.hdr, &frame.bytes, marked);
        self.note(result);
    }
}

impl Ports for HostPorts<'_, '_> {
    fn receive(&mut self, port: PortId, buf: &mut [u8]) -> Received {
        let next = if port == UPLINK {
            let next = self.world.hosts[usize::from(self.host)].uplink.pop_front();
            next.map(|(frame, forged)| (Tap::FromNet, frame, forged))
        } else {
            self.guest(port).and_then(|g| {
                let node = &mut self.world.nodes[g];
                node.host_sleeps = false;
                let frame = node.tx.pop_front()?;
                Some((Tap::FromGuest(number(g)), frame, false))
            })
        };
        let Some((tap, frame, forged)) = next else { return Received::Empty };
        self.read.push_back((tap, forged));
        buf[..frame.bytes.len()].copy_from_slice(&frame.bytes);
        Received::Frame(frame.hdr, frame.bytes.len())
    }

    fn enters(&mut self, _: PortId, hdr: &VirtioNetHdr, frame: &[u8]) {
        // Others come in by commands, and are made of nothing that was read.
        let Some((tap, forged)) = self.read.pop_front() else { return };
        self.tap(tap, &Frame { hdr: *hdr, bytes: frame.to_vec() }, forged);
    }

    fn send(&mut self, port: PortId, hdr: &VirtioNetHdr, parts: &[&[u8]], waited: bool) -> Sent {
        let mut frame = Frame { hdr: *hdr, bytes: parts.concat() };
        let Some(g) = self.guest(port) else {
            frame.hdr.flags &= !F_DATA_VALID; // the network's next card looks for itself
            self.tap(Tap::ToNet, &frame, false);
            self.world.send_to_network(self.host, &frame);
            return Sent::Done;
        };
        if frame.bytes.len() > self.world.nodes[g].room_max() {
            return Sent::Dropped(DropReason::TooBig);
        }
        if frame.bytes.len() > self.world.nodes[g].room() {
            return Sent::Full;
        }
        self.tap(Tap::ToGuest(number(g)), &frame, waited);
        let node = &mut self.world.nodes[g];
        node.interrupt_due = node.push(frame);
        Sent::Done
    }

    fn room(&mut self, port: PortId, want: usize) -> usize {
        self.guest(port).map_or(0, |g| self.world.nodes[g].room().min(want))
    }

    fn progress(&mut self, port: PortId) -> Option<bool> {
        let g = self.guest(port)?;
        let node = &mut self.world.nodes[g];
        std::mem::take(&mut node.progress).then_some(node.rx.is_empty())
    }

    fn wait_for_frames(&mut self, port: PortId) -> bool {
        if port == UPLINK {
            return false; // whatever comes there wakes the worker
        }
        let Some(g) = self.guest(port) else { return false };
        let node = &mut self.world.nodes[g];
        node.host_sleeps = true;
        !node.tx.is_empty()
    }

    fn wait_for_room(&mut self, port: PortId, waits: bool) {
        if let Some(g) = self.guest(port) {
            self.world.nodes[g].host_waits = waits;
        }
    }

    fn flush(&mut self, port: PortId) {
        let Some(g) = self.guest(port) else { return };
        let node = &mut self.world.nodes[g];
        if std::mem::take(&mut node.interrupt_due) | std::mem::take(&mut node.waits_for_host) {
            self.world.wake_node(g);
        }
    }

    /// The judges' cut says what the core's should be.
    fn before_adapting(&mut self, port: PortId, hdr: &VirtioNetHdr, parts: &[&[u8]]) {
        let Some(g) = self.guest(port) else { return };
        if self.feeds {
            let what = "a delivery that the guest's driver does not take".to_owned();
            self.note(Err(Stop::Violated(Violation { rule: Rule::Checksums, what, flow: None })));
        }
        let whole = Frame { hdr: *hdr, bytes: parts.concat() };
        self.world.cut(g, &whole, &on_wire(whole.clone()));
    }

    fn after_step(&mut self, engine: &Engine<'_>, step: Step) -> Result<(), Interrupted> {
        self.feeds |= step == Step::BatchEnd;
        if self.stop.is_none() {
            let result = self.world.after_step(engine, self.host, step == Step::Timers);
            self.note(result);
        }
        self.stop.as_ref().map_or(Ok(()), |_| Err(Interrupted))
    }
}

fn number(g: usize) -> u16 {
    u16::try_from(g).unwrap_or(u16::MAX)
}
