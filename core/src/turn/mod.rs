//! The turn of a worker: the one piece of code between the engine and its ports.
//!
//! The daemon calls it with taps and the rings of VMs, the simulator and tests with queues of their
//! own; all of them are behind [`Ports`]. A [`Turn`] keeps of each port what its peer takes, the
//! frames that wait for a full ring, and counters.
//!
//! # The order of a turn
//!
//! It is the engine's drain order, for all ports:
//!
//! 1. what a command has made is sent;
//! 2. the engine learns which guests have shown life;
//! 3. timers that are due run, and what they made is sent;
//! 4. every port that may have frames is read, at most [`TurnConfig::frames_per_port`] of them and
//!    about [`BYTES_PER_PORT`], so that no port keeps the others waiting, nor a guest for what was
//!    read; each frame goes where its verdict says, and what the engine made of it is sent before
//!    the next frame can overtake it;
//! 5. the batch ends, and what the engine made then is sent;
//! 6. every guest gets what waits for it, as far as its ring has room: a frame of the backlog and a
//!    delivery from the store in turn, for a flood of the one must not starve the other;
//! 7. and is shown all of it together.
//!
//! A frame that its receiver does not take as it is (a partial checksum, a super-segment) is
//! changed on the way out ([`adapt`]).
//!
//! # Waking up
//!
//! The caller names the ports that have something for it ([`Turn::wake`], [`Turn::handle_kick`]).
//! What a turn did not finish stays marked, and the next must not be waited for ([`Turn::rest`]).
//! Before it waits, every port is asked to wake it by its next frame; a guest without room for what
//! waits is asked to wake it by more room, and then looked at once more, because it may have made
//! some while it was being asked.

pub mod adapt;
pub mod backlog;
mod ports;
mod slots;

pub use ports::{Interrupted, Ports, Received, Sent, Step};
pub use slots::PortStats;

use crate::drops::DropReason;
use crate::engine::{AddPortError, Engine, Verdict};
use crate::limits::{BACKLOG_FRAMES_MAX, BYTES_PER_PORT, FRAME_BYTES_MAX, FRAMES_PER_PORT};
use crate::port::{PortConfig, PortFeatures, PortId};
use crate::time::Instant;
use crate::wire::virtio_net::VirtioNetHdr;
use slots::{Slot, Slots};

/// What a delivery gets of the ring that goes behind other frames: a full frame of Ethernet.
const FULL_FRAME: usize = 1514;

/// How much of what a turn does.
#[derive(Clone, Copy, Debug)]
pub struct TurnConfig {
    /// Frames read from one port before the others have their turn.
    pub frames_per_port: usize,
    /// Frames that may wait for the ring of one guest; the next is dropped.
    pub backlog_frames_max: usize,
}

impl Default for TurnConfig {
    fn default() -> Self {
        Self { frames_per_port: FRAMES_PER_PORT, backlog_frames_max: BACKLOG_FRAMES_MAX }
    }
}

/// See the module doc.
#[derive(Debug)]
pub struct Turn {
    config: TurnConfig,
    slots: Slots,
    /// The frame that is being read.
    frame: Box<[u8]>,
}

impl Turn {
    /// Without ports.
    #[must_use]
    pub fn new(config: TurnConfig) -> Self {
        let frame = vec![0; FRAME_BYTES_MAX].into_boxed_slice();
        Self { config, slots: Slots::default(), frame }
    }

    /// What the peer of `port` takes; `None` while the link is down.
    #[must_use]
    pub fn features(&self, port: PortId) -> Option<PortFeatures> {
        self.slots.of(port).features
    }

    /// What went through `port`, and what was dropped at it.
    #[must_use]
    pub fn stats(&self, port: PortId) -> &PortStats {
        &self.slots.of(port).stats
    }

    /// Bytes that wait for the ring of `port`.
    #[must_use]
    pub fn backlog_bytes(&self, port: PortId) -> usize {
        self.slots.of(port).backlog.bytes()
    }

    /// Adds a port to the engine and here; its link is down at first.
    ///
    /// # Errors
    /// See [`AddPortError`].
    pub fn add_port(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        config: PortConfig,
    ) -> Result<PortId, AddPortError> {
        let is_guest = config.is_guest();
        let port = engine.add_port(now, config)?;
        let slot = Slot::new(port, is_guest, self.config.backlog_frames_max);
        match self.slots.list.get_mut(usize::from(port.0)) {
            Some(old) => *old = slot,
            None => self.slots.list.push(slot),
        }
        Ok(port)
    }

    /// The port is gone for good, with its VM.
    pub fn remove_port(&mut self, now: Instant, engine: &mut Engine<'_>, port: PortId) {
        engine.remove_port(now, port);
        let slot = self.slots.of_mut(port);
        slot.link_down();
        slot.readable = false;
    }

    /// The peer of `port` takes this from now on; `None`: its link is down.
    pub fn set_features(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        port: PortId,
        features: Option<PortFeatures>,
    ) {
        let slot = self.slots.of_mut(port);
        if features.is_none() {
            slot.link_down();
        }
        slot.features = features;
        engine.set_port_features(now, port, features);
    }

    /// There may be frames at `port`, or room.
    pub fn wake(&mut self, port: PortId) {
        self.slots.of_mut(port).readable = true;
    }

    /// There may be some anywhere: the worker looks for itself.
    pub fn wake_all(&mut self) {
        self.slots.list.iter_mut().for_each(|slot| slot.readable = true);
    }

    /// The guest of `port` says that it sent frames or made room, which shows that it runs.
    pub fn handle_kick(&mut self, now: Instant, engine: &mut Engine<'_>, port: PortId) {
        self.wake(port);
        engine.handle_guest_progress(now, port, false);
    }

    /// Before the worker waits. `true`: it must not, there is something left to do.
    #[must_use]
    pub fn rest<P: Ports>(&mut self, ports: &mut P) -> bool {
        let mut left = false;
        for slot in &mut self.slots.list {
            slot.readable |= ports.wait_for_frames(slot.id);
            left |= slot.readable;
        }
        left
    }

    /// One turn; how many frames were read, or given to guests from backlog and store.
    ///
    /// # Errors
    /// A step was the last, says [`Ports::after_step`].
    pub fn run<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
    ) -> Result<u64, Interrupted> {
        self.transmit(now, engine, ports)?;
        self.note_progress(now, engine, ports);
        if engine.poll_timeout().is_some_and(|at| at <= now) {
            engine.handle_timeout(now);
            ports.after_step(engine, Step::Timers)?;
            self.transmit(now, engine, ports)?;
        }
        let mut frames = 0;
        for slot in 0..self.slots.list.len() {
            if self.slots.list[slot].readable {
                frames += self.read(now, engine, ports, self.slots.list[slot].id)?;
            }
        }
        engine.handle_batch_end(now);
        ports.after_step(engine, Step::BatchEnd)?;
        self.transmit(now, engine, ports)?;
        for slot in 0..self.slots.list.len() {
            if self.slots.list[slot].is_guest {
                frames += self.feed(now, engine, ports, self.slots.list[slot].id)?;
            }
        }
        Ok(frames)
    }

    /// One frame comes in at `from`, by whatever way.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn handle_frame<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        from: PortId,
        hdr: VirtioNetHdr,
        frame: &mut [u8],
    ) -> Result<(), Interrupted> {
        let mut hdr = hdr;
        self.slots.of_mut(from).stats.count_from_port(frame.len());
        match engine.handle_frame(now, from, &mut hdr, frame) {
            Verdict::Forward(to) => self.slots.send(ports, to, &hdr, &[frame]),
            Verdict::Flood => self.slots.flood(ports, from, &hdr, &[frame]),
            // A drop is counted by the engine.
            Verdict::Absorbed | Verdict::Drop(_) => {}
        }
        ports.after_step(engine, Step::Frame)?;
        self.transmit(now, engine, ports)
    }

    /// Sends what the engine made of the last event, before the next one overtakes it. To be called
    /// after a command that cannot wait for the next turn.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn transmit<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
    ) -> Result<(), Interrupted> {
        while let Some(made) = engine.poll_transmit(now) {
            self.slots.transmit(ports, &made);
            ports.after_step(engine, Step::Made)?;
        }
        Ok(())
    }

    /// Tells the engine which guests have shown that they run.
    fn note_progress<P: Ports>(&mut self, now: Instant, engine: &mut Engine<'_>, ports: &mut P) {
        for slot in self.slots.list.iter().filter(|slot| slot.is_guest) {
            if let Some(drained) = ports.progress(slot.id) {
                // What waits outside the ring is unseen too.
                let drained = drained && slot.backlog.is_empty();
                engine.handle_guest_progress(now, slot.id, drained);
            }
        }
    }

    /// Reads a bounded number of frames, and sends on what the engine lets pass.
    fn read<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        port: PortId,
    ) -> Result<u64, Interrupted> {
        // Out of `self` meanwhile, which sends what is in it.
        let mut frame = std::mem::take(&mut self.frame);
        let (mut frames, mut bytes) = (0, 0);
        let mut result = Ok(());
        while frames < self.config.frames_per_port && bytes < BYTES_PER_PORT && result.is_ok() {
            match ports.receive(port, &mut frame) {
                Received::Frame(_, FRAME_BYTES_MAX..) => {
                    self.slots.of_mut(port).stats.count_drops(DropReason::TooBig, 1);
                }
                Received::Frame(hdr, len) => {
                    bytes += len;
                    result = self.handle_frame(now, engine, ports, port, hdr, &mut frame[..len]);
                }
                Received::Empty => {
                    self.slots.of_mut(port).readable = false;
                    break;
                }
                Received::Gone => {
                    self.slots.of_mut(port).link_down();
                    self.slots.of_mut(port).readable = false;
                    break;
                }
            }
            frames += 1;
        }
        self.frame = frame;
        result.map(|()| frames as u64)
    }

    /// Gives a guest what waits for it, as far as it has room, and shows it all of this turn.
    fn feed<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        port: PortId,
    ) -> Result<u64, Interrupted> {
        let mut frames = 0;
        if self.slots.of(port).features.is_some() {
            let mut waits = self.give(now, engine, ports, port, &mut frames)?;
            // Ask for a wake-up, then look once more: only if that finds nothing new was the
            // question asked in time. Looking takes buffers, so finding them asks again.
            while let Some(room) = waits {
                ports.wait_for_room(port, true);
                let sent = self.slots.of(port).stats.frames_to_port;
                waits = self.give(now, engine, ports, port, &mut frames)?;
                if waits == Some(room) && self.slots.of(port).stats.frames_to_port == sent {
                    break;
                }
            }
        }
        ports.flush(port);
        Ok(frames)
    }

    /// Moves what waits for the ring and deliveries, in turn. A delivery goes behind what waits.
    /// `Some`: something waits for more than this much room.
    fn give<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        port: PortId,
        frames: &mut u64,
    ) -> Result<Option<usize>, Interrupted> {
        loop {
            let slot = self.slots.of_mut(port);
            let moved = slot.move_waiting(ports);
            let behind = !slot.backlog.is_empty();
            *frames += u64::from(moved);
            if behind && !moved {
                engine.handle_no_room(now, port);
                return Ok(Some(ports.room(port, FRAME_BYTES_MAX)));
            }
            if !behind && !wants_delivery(engine, port) {
                ports.wait_for_room(port, false);
                return Ok(None);
            }
            let room = if behind { FULL_FRAME } else { ports.room(port, FRAME_BYTES_MAX) };
            if let Some(made) = engine.poll_delivery(now, port, room) {
                self.slots.transmit(ports, &made);
                *frames += 1;
                ports.after_step(engine, Step::Delivery)?;
            } else if !behind {
                // What was ready may have found nothing to say after all.
                return Ok(wants_delivery(engine, port).then_some(room));
            }
        }
    }
}

/// Whether the engine has, or may have, something for the guest of `port`.
fn wants_delivery(engine: &Engine<'_>, port: PortId) -> bool {
    engine.vm(port).is_some_and(|vm| !vm.ready.is_empty())
}

#[cfg(test)]
mod tests;
