//! A VM's tap that is attached: its frames pass a daemon that is away (LIFE-17).
//!
//! Such a world has one guest and one remote. The rings of its guest are the queues of its tap and
//! of the daemon's. Frames that come while the daemon is away wait for it at first, and then pass
//! plain. A daemon that dies takes those that wait with it.

use std::collections::BTreeMap;

use nightporter_core::flow::key::FlowKey;
use nightporter_core::tcp::Passed;
use nightporter_core::time::{Duration, Instant};

use super::host::UPLINK;
use super::{Engines, Stop, World, WorldEvent};
use nightporter_check::frame::Frame;
use nightporter_check::wire::{Packet, TcpFlags};

/// The guest, and its host.
const GUEST: usize = 0;
const HOST: u8 = 0;

/// The tap's programs.
#[derive(Debug, Default)]
pub(super) struct Attached {
    /// The daemon is away, or dead; from then on frames pass plain.
    plain_from: Option<Instant>,
    /// Ports of guest and remote in segments that have passed; `true`: a SYN was among them.
    passed: BTreeMap<(u16, u16), bool>,
    /// The daemon reads frames that may be older than those.
    catches_up: bool,
}

impl Attached {
    /// The daemon has no turns.
    pub(super) fn is_away(&self) -> bool {
        self.plain_from.is_some()
    }

    fn passes(&self, now: Instant) -> bool {
        self.plain_from.is_some_and(|from| from <= now)
    }

    fn note(&mut self, frame: &Frame, from_guest: bool) {
        let packet = Packet::parse(&frame.bytes).ok();
        let Some((_, tcp)) = packet.as_ref().and_then(Packet::tcp) else { return };
        let (src, dst) = (tcp.src_port, tcp.dst_port);
        let ports = if from_guest { (src, dst) } else { (dst, src) };
        *self.passed.entry(ports).or_default() |= tcp.flags.contains(TcpFlags::SYN);
    }

    fn of(&self, key: &FlowKey) -> Passed {
        match self.passed.get(&(key.g_port, key.r_port)) {
            None => Passed::Nothing,
            Some(false) => Passed::Segments,
            Some(true) => Passed::Anything,
        }
    }
}

impl World<'_> {
    /// The daemon stands; frames pass it by after so long.
    pub(super) fn stand(&mut self, engines: &Engines<'_>, plain_after_us: u32) {
        if !engines.is_empty() && !self.attached.is_away() {
            let plain_after = Duration::from_micros(plain_after_us.into());
            self.attached.plain_from = Some(self.now + plain_after);
        }
    }

    /// It goes on.
    pub(super) fn go_on(&mut self, engines: &mut Engines<'_>) -> Result<(), Stop> {
        let Some(engine) = engines.first_mut() else { return Ok(()) };
        let passed = std::mem::take(&mut self.attached);
        self.attached.catches_up = passed.catches_up; // perhaps since the absence before
        if let Some(port) = self.hosts[usize::from(HOST)].ports[GUEST]
            && !passed.passed.is_empty()
        {
            engine.handle_passed_plain(self.now, port, |key| passed.of(key));
            self.attached.catches_up = true;
        }
        self.send_made(engine, HOST)?;
        self.wake_after_absence();
        Ok(())
    }

    /// All frames may be news.
    fn wake_after_absence(&mut self) {
        self.nodes[GUEST].kicked = true;
        self.schedule(self.now, WorldEvent::Turn(HOST));
    }

    /// The daemon has died.
    pub(super) fn lose_turned(&mut self) {
        if self.plan.host.wire {
            self.attached = Attached { plain_from: Some(self.now), ..Attached::default() };
            self.hosts[usize::from(HOST)].uplink.clear();
            self.nodes[GUEST].tx.clear();
            self.wake_node(GUEST);
        }
    }

    /// Another one has begun, and has no frame that is old.
    pub(super) fn attach_anew(&mut self) {
        self.attached = Attached::default();
    }

    /// After a turn: whether all that waited was read.
    pub(super) fn note_caught_up(&mut self, engines: &mut Engines<'_>) {
        let (host, node) = (&self.hosts[usize::from(HOST)], &self.nodes[GUEST]);
        if self.attached.catches_up && host.uplink.is_empty() && node.tx.is_empty() {
            self.attached.catches_up = false;
            if let (Some(engine), Some(port)) = (engines.first_mut(), host.ports[GUEST]) {
                debug_assert_ne!(port, UPLINK);
                engine.handle_caught_up(port);
            }
        }
    }

    /// A frame for the guest, if it passes the daemon by.
    pub(super) fn pass_to_guest(&mut self, frame: Frame) -> Option<Frame> {
        if !self.attached.passes(self.now) {
            return Some(frame);
        }
        self.attached.note(&frame, false);
        self.count("frames that passed plain");
        if self.nodes[GUEST].push(frame) {
            self.wake_node(GUEST);
        }
        None
    }

    /// Those of the guest, if they do.
    pub(super) fn pass_from_guest(&mut self, frames: Vec<Frame>) -> Vec<Frame> {
        if !self.attached.passes(self.now) {
            return frames;
        }
        for frame in frames {
            self.attached.note(&frame, true);
            self.count("frames that passed plain");
            self.send_to_network(HOST, &frame);
        }
        vec![]
    }
}
