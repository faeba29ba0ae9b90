//! The turn of a worker: the one piece of code between the engine and its ports.
//!
//! The daemon calls it with taps and the rings of VMs, the simulator and tests with queues of their
//! own; all of them are behind [`Ports`]. For each port a [`Turn`] keeps the features of its peer,
//! the frames that wait for a full ring, and counters.
//!
//! # The order of a turn
//!
//! It is the engine's drain order, for all ports that have work; the others are not looked at:
//!
//! 1. frames that a command has made are sent;
//! 2. the engine learns which of the guests that have yet to see something have shown life. It
//!    looks at them once in [`PROGRESS_INTERVAL`] and before timers run; it looks at guests that
//!    are awake or wait for room each time. If there are more than [`LOOKS_PER_INTERVAL`], it looks
//!    at so many in each interval, in turn, and at those that are awake: so guests off their cores
//!    do not delay one that runs;
//! 3. timers that are due run, and the frames that they made are sent;
//! 4. every port that is awake is read, in the order of their numbers, at most
//!    [`TurnConfig::frames_per_port`] frames and about `BYTES_PER_PORT`. So no port makes the
//!    others wait, and no guest waits for the frames that were read. The results count too: the
//!    copies of a broadcast, the pieces of a super-segment (`COPIES_PER_PORT`), and the port's own
//!    limit ([`Received::Spent`]). If there are many flows, ports are read in batches, which the
//!    engine looks through before the first frame is processed ([`Engine::stage`]). Then each frame
//!    goes where its verdict says, and the frames that the engine made for it are sent before the
//!    next frame can overtake them;
//! 5. data that guests have handed over is sent as far as their senders allow, and carries ACKs of
//!    the batch. The batch ends, and the frames that the engine made then are sent;
//! 6. every guest that was read, that a frame was meant for or that has deliveries gets the frames
//!    that wait for it, as far as its ring has room and about `BYTES_PER_GUEST`: a frame of the
//!    backlog and a delivery from the store in turn, so that a flood of the one does not starve the
//!    other;
//! 7. and is shown all of it together.
//!
//! A frame that its receiver does not take unchanged (a partial checksum, a super-segment) is
//! changed on the way out ([`adapt`]).
//!
//! # Waking up
//!
//! A port is asleep until the caller names it ([`Turn::wake`], [`Turn::handle_kick`]), and awake
//! while it has frames. A port that has none any more is watched until the next turn. If the caller
//! polls, it is read again then ([`Turn::look_again`]), but not for ever ([`IDLE_TURNS_MAX`]). If
//! the caller is going to wait for events, the port is asked to wake it by its next frame
//! ([`Turn::rest`]).
//!
//! A guest that has no room for waiting frames is asked to wake the worker when it makes some. Then
//! its ring is looked at once more, because it may have made room meanwhile. A guest is also fed
//! when its ring is seen to have moved.

pub mod adapt;
pub mod backlog;
mod batch;
mod feed;
mod ports;
mod read;
mod slots;

pub use ports::{Interrupted, Ports, Received, Sent, Step};
pub use slots::PortStats;

use crate::engine::{AddPortError, Departure, Engine, FloodedFrame, Verdict};
use crate::limits::{
    BACKLOG_FRAMES_MAX, BYTES_OF_DEPARTURES, COPIES_PER_PORT, FLOWS_IN_CACHE, FRAMES_OF_DEPARTURES,
    FRAMES_PER_PORT, IDLE_TURNS_MAX, LOOKS_PER_INTERVAL, PROGRESS_INTERVAL,
};
use crate::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use crate::time::Instant;
use crate::wire::heartbeat::Heartbeat;
use crate::wire::virtio_net::VirtioNetHdr;
use batch::{Batch, Read};
use slots::{Reading, Slot, Slots, Unknown};
use std::collections::VecDeque;

/// Limits of the work in a turn.
#[derive(Clone, Copy, Debug)]
pub struct TurnConfig {
    /// Frames read from one port before the others have their turn.
    pub frames_per_port: usize,
    /// Frames that may wait for the ring of one guest; the next is dropped.
    pub backlog_frames_max: usize,
    /// With fewer flows each frame is a batch of its own.
    pub flows_in_cache: u32,
}

impl Default for TurnConfig {
    fn default() -> Self {
        Self {
            frames_per_port: FRAMES_PER_PORT,
            backlog_frames_max: BACKLOG_FRAMES_MAX,
            flows_in_cache: FLOWS_IN_CACHE,
        }
    }
}

/// See the module doc.
#[derive(Debug)]
pub struct Turn {
    config: TurnConfig,
    slots: Slots,
    /// Ports to read.
    awake: VecDeque<PortId>,
    /// Ports without frames in the last turn, not yet asked to wake the worker.
    watched: Vec<PortId>,
    /// Guests that have yet to see something, or to make room for it; the next to be looked at
    /// first. Some have seen it since.
    unseen: Vec<PortId>,
    /// When they are next looked at: all of them, or as many as there are looks for.
    look_at: Instant,
    /// The frames that are being read.
    batch: Batch,
    /// The last turn has left something to send.
    departures_left: bool,
}

impl Turn {
    /// Without ports.
    #[must_use]
    pub fn new(config: TurnConfig) -> Self {
        Self {
            config,
            slots: Slots::new(),
            awake: VecDeque::new(),
            watched: vec![],
            unseen: vec![],
            look_at: Instant::ZERO,
            batch: Batch::new(),
            departures_left: false,
        }
    }

    /// The features of the peer of `port`; `None` while the link is down.
    #[must_use]
    pub fn features(&self, port: PortId) -> Option<PortFeatures> {
        self.slots.of(port).features
    }

    /// Traffic and drops of `port`.
    #[must_use]
    pub fn stats(&self, port: PortId) -> &PortStats {
        &self.slots.of(port).stats
    }

    /// Bytes that wait for the ring of `port`.
    #[must_use]
    pub fn backlog_bytes(&self, port: PortId) -> usize {
        self.slots.of(port).backlog.bytes()
    }

    /// Adds a port to the engine and here. Its link is down at first, and it is awake.
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
            // It has the place of one that was removed, and may still be in a list.
            Some(old) => old.is_guest = is_guest,
            None => self.slots.list.push(slot),
        }
        self.wake(port);
        Ok(port)
    }

    /// The port is gone for good, with its VM.
    pub fn remove_port(&mut self, now: Instant, engine: &mut Engine<'_>, port: PortId) {
        engine.remove_port(now, port);
        self.slots.link_down(port);
        let slot = self.slots.of_mut(port);
        slot.stats = PortStats::default();
        slot.debt = 0;
    }

    /// Another policy for the VM behind `port`. Frames that wait for its ring in VLANs that it has
    /// left are dropped.
    ///
    /// # Errors
    /// See [`Engine::set_guest`].
    pub fn set_guest(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        port: PortId,
        guest: GuestConfig,
    ) -> Result<(), AddPortError> {
        let before = engine.port_config(port).and_then(PortConfig::as_guest);
        let moves = before.is_some_and(|before| before.vlans != guest.vlans);
        engine.set_guest(now, port, guest)?;
        if moves {
            self.slots.leave_vlans(engine, port);
        }
        Ok(())
    }

    /// The peer of `port` takes this from now on; `None`: its link is down.
    pub fn set_features(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        port: PortId,
        features: Option<PortFeatures>,
    ) {
        if features.is_none() {
            self.slots.link_down(port);
        }
        self.slots.of_mut(port).features = features;
        engine.set_port_features(now, port, features);
        self.wake(port); // something may have waited for the link
    }

    /// There may be frames at `port`, or room.
    pub fn wake(&mut self, port: PortId) {
        let slot = self.slots.of_mut(port);
        if slot.reading != Reading::Awake {
            slot.reading = Reading::Awake;
            self.awake.push_back(port);
        }
    }

    /// There may be frames at `port` that were not read yet.
    #[must_use]
    pub fn is_awake(&self, port: PortId) -> bool {
        self.slots.of(port).reading == Reading::Awake
    }

    /// The guest of `port` reports that it sent frames or made room, which shows that it runs.
    pub fn handle_kick(&mut self, now: Instant, engine: &mut Engine<'_>, port: PortId) {
        self.wake(port);
        self.slots.of_mut(port).beat = None;
        engine.handle_guest_progress(now, port, false);
    }

    /// Tells guests who controls their congestion (FLOOD-28), past the switch; the next turn shows
    /// it to them. A heartbeat waits for a guest off its core, never two alike: one is given again
    /// only after the guest has shown life.
    pub fn send_heartbeats<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        beats: &[(PortId, Heartbeat)],
    ) {
        for &(port, beat) in beats {
            self.slots.look_at_guest(now, engine, ports, port);
            let slot = self.slots.of_mut(port);
            if slot.features.is_some() && slot.beat.replace(beat) != Some(beat) {
                self.slots.from = None;
                self.slots.send(ports, port, &VirtioNetHdr::default(), &[&beat.emit()]);
            }
        }
    }

    /// Before a turn of a worker that polls: ports that had frames lately are awake again.
    pub fn look_again<P: Ports>(&mut self, ports: &mut P) {
        self.settle_watched(ports, IDLE_TURNS_MAX);
    }

    /// Before the worker waits. `true`: it must not, there is something left to do.
    #[must_use]
    pub fn rest<P: Ports>(&mut self, ports: &mut P) -> bool {
        self.settle_watched(ports, 0);
        !self.awake.is_empty() || !self.slots.touched.is_empty() || self.departures_left
    }

    /// Watched ports with fewer idle turns are awake again, others asleep.
    fn settle_watched<P: Ports>(&mut self, ports: &mut P, idle_turns_max: u8) {
        for port in self.watched.drain(..) {
            let slot = self.slots.of_mut(port);
            if slot.reading != Reading::Watched {
                continue; // an event has woken it
            }
            if slot.idle_turns < idle_turns_max || ports.wait_for_frames(port) {
                slot.reading = Reading::Awake;
                self.awake.push_back(port);
            } else {
                slot.reading = Reading::Asleep;
            }
        }
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
        let timers_due = engine.poll_timeout().is_some_and(|at| at <= now);
        self.note_progress(now, engine, ports, timers_due);
        if timers_due {
            engine.handle_timeout(now);
            ports.after_step(engine, Step::Timers)?;
            self.transmit(now, engine, ports)?;
        }
        let mut frames = 0;
        // In order of their numbers, not of their waking, so that captures show a fixed order.
        self.awake.make_contiguous().sort_unstable_by_key(|port| port.0);
        for _ in 0..self.awake.len() {
            let Some(port) = self.awake.pop_front() else { break };
            frames += self.read(now, engine, ports, port)?;
        }
        if engine.wants_departure() {
            frames += self.depart(now, engine, ports)?;
        }
        engine.handle_batch_end(now);
        ports.after_step(engine, Step::BatchEnd)?;
        self.transmit(now, engine, ports)?;
        self.departures_left = engine.wants_departure();
        while let Some(port) = engine.poll_ready() {
            self.slots.touch(port);
        }
        // To feed one touches no other, but perhaps itself again.
        let touched = self.slots.touched.len();
        for i in 0..touched {
            frames += self.feed(now, engine, ports, self.slots.touched[i])?;
        }
        self.slots.touched.drain(..touched);
        Ok(frames)
    }

    /// One frame comes in at `from`, by whatever way. Carries out the engine's decisions.
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
    ) -> Result<Verdict, Interrupted> {
        let staged = engine.stage(now, from, frame);
        self.work(now, engine, ports, from, Read { hdr, bytes: frame, staged: &staged })
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
            if let Some(unknown) = self.slots.transmit(ports, &made) {
                self.flood_made(engine, ports, &unknown);
            }
            ports.after_step(engine, Step::Made)?;
        }
        Ok(())
    }

    /// Sends a frame that the engine made to all ports to which the switch would flood it.
    #[cold]
    fn flood_made<P: Ports>(&mut self, engine: &Engine<'_>, ports: &mut P, made: &Unknown) {
        let frame = FloodedFrame::of(&made.frame);
        let gets = |port| engine.is_flooded(made.ingress, port, frame);
        self.slots.flood(ports, &made.hdr, &[&made.frame], gets);
    }

    /// Sends data that guests have handed over, as much as one turn takes; returns how many frames
    /// that are.
    #[inline(never)] // few turns have any
    fn depart<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
    ) -> Result<u64, Interrupted> {
        let (mut frames, mut bytes) = (0, 0);
        self.slots.copied = 0;
        while bytes < BYTES_OF_DEPARTURES
            && frames < FRAMES_OF_DEPARTURES
            && self.slots.copied < COPIES_PER_PORT
            && let Some(departure) = engine.poll_departure(now)
        {
            bytes += match departure {
                Departure::Given(made) => {
                    let len = made.parts().iter().map(|part| part.len()).sum();
                    if let Some(unknown) = self.slots.transmit(ports, &made) {
                        self.flood_made(engine, ports, &unknown);
                    }
                    len
                }
                Departure::Taken(bytes) => bytes,
            };
            frames += 1;
            ports.after_step(engine, Step::Departure)?;
        }
        Ok(frames)
    }

    /// Tells the engine which guests have shown that they run. Guests that have seen everything are
    /// not looked at again; those that may have made room for waiting frames are fed.
    fn note_progress<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        timers_due: bool,
    ) {
        if self.unseen.len() > LOOKS_PER_INTERVAL {
            return self.note_progress_of_many(now, engine, ports);
        }
        let Self { slots, unseen, look_at, .. } = self;
        let all = timers_due || now >= *look_at;
        if all {
            *look_at = now + PROGRESS_INTERVAL;
        }
        unseen.retain(|&port| {
            let slot = slots.of(port);
            if !all && !slot.waits && slot.reading != Reading::Awake {
                return true; // passed over
            }
            slots.look_at_guest(now, engine, ports, port);
            slots.stays_listed(port)
        });
    }

    /// The same for more guests than are looked at in one interval. Each interval since the last
    /// look adds so many: after a long wait all are looked at.
    #[inline(never)]
    fn note_progress_of_many<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
    ) {
        let Self { slots, unseen, awake, look_at, .. } = self;
        for &port in &*awake {
            slots.look_at_guest(now, engine, ports, port);
        }
        if now < *look_at {
            return;
        }
        let intervals = now.since(*look_at).as_nanos() / PROGRESS_INTERVAL.as_nanos() + 1;
        *look_at = now + PROGRESS_INTERVAL;
        let looks =
            usize::try_from(intervals).unwrap_or(usize::MAX).saturating_mul(LOOKS_PER_INTERVAL);
        let (mut looked_at, mut stay) = (0, 0);
        unseen.retain(|&port| {
            if looked_at == looks {
                return true;
            }
            looked_at += 1;
            slots.look_at_guest(now, engine, ports, port);
            let stays = slots.stays_listed(port);
            stay += usize::from(stays);
            stays
        });
        unseen.rotate_left(stay);
    }
}

#[cfg(test)]
mod tests;
