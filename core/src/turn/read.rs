//! The beginning of a turn: frames of a port are read, looked through and processed.

use super::Turn;
use super::batch::Read;
use super::ports::{Interrupted, Ports, Received, Step};
use super::slots::Reading;
use crate::drops::DropReason;
use crate::engine::{Engine, FloodedFrame, Verdict};
use crate::limits::{BATCH_FRAMES, BYTES_PER_PORT, COPIES_PER_PORT, FRAME_BYTES_MAX};
use crate::port::PortId;
use crate::time::Instant;

impl Turn {
    /// Reads a bounded number of frames, and forwards those that the engine lets pass.
    pub(super) fn read<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        port: PortId,
    ) -> Result<u64, Interrupted> {
        if self.slots.of(port).debt > 0 {
            self.repay(port);
            return Ok(0);
        }
        // It is out of `self` meanwhile, which sends its frames.
        let mut batch = std::mem::take(&mut self.batch);
        let few = engine.flows_len() < self.config.flows_in_cache;
        let frames_max = if few { 1 } else { BATCH_FRAMES };
        let (mut frames, mut bytes) = (0, 0);
        let (mut result, mut reading) = (Ok(()), Reading::Awake);
        self.slots.copied = 0;
        while reading == Reading::Awake
            && frames < self.config.frames_per_port
            && bytes < BYTES_PER_PORT
            && self.slots.copied < COPIES_PER_PORT
            && result.is_ok()
        {
            batch.clear();
            while frames + batch.len() < self.config.frames_per_port
                && bytes < BYTES_PER_PORT
                && let Some(room) = batch.room(frames_max)
            {
                match ports.receive(port, room) {
                    Received::Frame(hdr, len) => {
                        bytes += len;
                        batch.push(hdr, len);
                    }
                    Received::Empty => reading = Reading::Watched,
                    Received::Gone => reading = Reading::Asleep,
                    Received::Spent => bytes = BYTES_PER_PORT, // the loops end
                }
                if reading != Reading::Awake {
                    break;
                }
            }
            frames += batch.len();
            batch.stage(now, engine, port);
            for i in 0..batch.len() {
                result = self.work(now, engine, ports, port, batch.read(i)).map(drop);
                if result.is_err() {
                    break;
                }
            }
        }
        self.batch = batch;
        self.slots.touch(port);
        if self.slots.copied > COPIES_PER_PORT {
            self.slots.of_mut(port).debt = self.slots.copied - COPIES_PER_PORT;
        }
        let slot = self.slots.of_mut(port);
        slot.idle_turns = if frames == 0 { slot.idle_turns.saturating_add(1) } else { 0 };
        slot.reading = reading;
        match reading {
            Reading::Awake => self.awake.push_back(port),
            Reading::Watched => self.watched.push(port),
            Reading::Asleep => self.slots.link_down(port),
        }
        result.map(|()| frames as u64)
    }

    /// A port whose frames became more copies than a turn should make is not read for as many turns
    /// as they would have taken.
    #[cold]
    fn repay(&mut self, port: PortId) {
        let slot = self.slots.of_mut(port);
        slot.debt = slot.debt.saturating_sub(COPIES_PER_PORT);
        self.awake.push_back(port);
    }

    /// Judges a frame that came in at `from`, and sends it and the frames that were made for it.
    pub(super) fn work<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        from: PortId,
        frame: Read<'_>,
    ) -> Result<Verdict, Interrupted> {
        let Read { mut hdr, bytes, staged } = frame;
        ports.enters(from, &hdr, bytes);
        let stats = &mut self.slots.of_mut(from).stats;
        if bytes.len() >= FRAME_BYTES_MAX {
            stats.count_drops(DropReason::TooBig, 1);
            return Ok(Verdict::Drop(DropReason::TooBig));
        }
        stats.count_from_port(bytes.len());
        let verdict = engine.handle_staged(now, from, &mut hdr, bytes, staged);
        let verdict = engine.limited(now, from, bytes.len(), verdict);
        self.slots.from = Some(from);
        match verdict {
            Verdict::Forward(to) => self.slots.send(ports, to, &hdr, &[bytes]),
            Verdict::Flood => {
                let frame = FloodedFrame::of(bytes);
                let gets = |port| engine.is_flooded(from, port, frame);
                self.slots.flood(ports, &hdr, &[bytes], gets);
            }
            // A drop is counted by the engine.
            Verdict::Absorbed | Verdict::Drop(_) => {}
        }
        ports.after_step(engine, Step::Frame)?;
        self.transmit(now, engine, ports)?;
        Ok(verdict)
    }
}
