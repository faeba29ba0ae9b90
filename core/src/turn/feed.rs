//! The end of a turn: a guest gets the frames that wait for it, and is shown all of the turn
//! together.

use super::Turn;
use super::ports::{Interrupted, Ports, Step};
use crate::engine::Engine;
use crate::limits::{BYTES_PER_GUEST, FRAME_BYTES_MAX};
use crate::port::PortId;
use crate::time::Instant;

/// The share of the ring for a delivery that goes behind other frames: a full frame of Ethernet.
const FULL_FRAME: usize = 1514;

/// The rest after a guest was fed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Left {
    /// Nothing.
    Nothing,
    /// A frame that needs more room than the ring has, which is so many bytes.
    Waits(usize),
    /// Something for the next turn: this one has brought enough.
    More,
}

impl Turn {
    /// Gives a guest the frames that wait for it, as far as it has room, and shows it all of this
    /// turn.
    pub(super) fn feed<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        port: PortId,
    ) -> Result<u64, Interrupted> {
        let (mut frames, mut left) = (0, Left::Nothing);
        if !self.slots.of(port).unseen {
            // Earlier progress of its ring is no sign of life: it had nothing to see.
            let _ = ports.progress(port);
        }
        if self.slots.of(port).features.is_some() {
            let enough = self.slots.of(port).stats.bytes_to_port + BYTES_PER_GUEST;
            left = self.fill_receive_ring(now, engine, ports, port, enough, &mut frames)?;
            // Ask for a wake-up, then look once more: only if that finds nothing new was the
            // question asked in time. Looking takes buffers, so finding them asks again.
            while let Left::Waits(_) = left {
                if ports.has_spent(port) {
                    left = Left::More;
                    break;
                }
                ports.wait_for_room(port, true);
                let (before, sent) = (left, self.slots.of(port).stats.frames_to_port);
                left = self.fill_receive_ring(now, engine, ports, port, enough, &mut frames)?;
                if left == before && self.slots.of(port).stats.frames_to_port == sent {
                    break;
                }
            }
        }
        ports.flush(port);
        let slot = self.slots.of_mut(port);
        slot.touched = false;
        slot.waits = matches!(left, Left::Waits(_));
        let meant = std::mem::take(&mut slot.meant);
        if meant || slot.waits {
            slot.unseen = true;
            if !std::mem::replace(&mut slot.listed, true) {
                self.unseen.push(port);
            }
        }
        if left == Left::More {
            self.slots.touch(port);
        }
        Ok(frames)
    }

    /// Moves waiting frames and deliveries into the ring, in turn. A delivery goes behind the
    /// waiting frames. Ends when `enough` bytes have ever gone to the port.
    fn fill_receive_ring<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        port: PortId,
        enough: u64,
        frames: &mut u64,
    ) -> Result<Left, Interrupted> {
        loop {
            let moved = self.slots.move_waiting(ports, port);
            let slot = self.slots.of_mut(port);
            let behind = !slot.backlog.is_empty();
            let is_enough = slot.stats.bytes_to_port >= enough;
            *frames += u64::from(moved);
            if behind && !moved {
                engine.handle_no_room(now, port);
                return Ok(Left::Waits(ports.room(port, FRAME_BYTES_MAX)));
            }
            if !behind && !wants_delivery(engine, port) {
                ports.wait_for_room(port, false);
                return Ok(Left::Nothing);
            }
            if is_enough {
                return Ok(Left::More);
            }
            let room = if behind { FULL_FRAME } else { ports.room(port, FRAME_BYTES_MAX) };
            if let Some(made) = engine.poll_delivery(now, port, room) {
                self.slots.from = None;
                self.slots.send(ports, port, &made.hdr, made.parts());
                *frames += 1;
                ports.after_step(engine, Step::Delivery)?;
            } else if !behind {
                // A flow that was ready may have had nothing to send after all.
                let waits = wants_delivery(engine, port);
                return Ok(if waits { Left::Waits(room) } else { Left::Nothing });
            }
        }
    }
}

/// Whether the engine has, or may have, something for the guest of `port`.
fn wants_delivery(engine: &Engine<'_>, port: PortId) -> bool {
    engine.vm(port).is_some_and(|vm| !vm.ready.is_empty() && !vm.deliveries_held)
}
