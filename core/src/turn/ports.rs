//! The interface of a turn to the ports around it.

use crate::drops::DropReason;
use crate::engine::Engine;
use crate::port::PortId;
use crate::wire::virtio_net::VirtioNetHdr;

/// The result of reading one frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Received {
    /// A frame of this many bytes is in the buffer; if that is full, it may have been longer.
    Frame(VirtioNetHdr, usize),
    /// Nothing there now.
    Empty,
    /// There may be more, in the next turn: the frames so far were enough work for this one.
    Spent,
    /// The port no longer exists.
    Gone,
}

/// The result of sending one frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sent {
    /// The port has it.
    Done,
    /// The port has it, and made copies of so many bytes of it; each counts for its bytes and
    /// [`COPY_COST`](crate::limits::COPY_COST).
    Copied(u32),
    /// No room now.
    Full,
    /// This frame cannot be sent.
    Dropped(DropReason),
    /// The port no longer exists.
    Gone,
}

/// The engine's last step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Step {
    /// Timers ran, of any flow.
    Timers,
    /// A frame was judged, and has gone where the verdict says.
    Frame,
    /// A batch of frames has ended.
    BatchEnd,
    /// A frame that the engine made has gone out.
    Made,
    /// Bytes that a guest has handed over have gone to their remote.
    Departure,
    /// Stored bytes have gone to a guest.
    Delivery,
}

/// [`Ports::after_step`] ended the turn before its time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Interrupted;

/// The ports of a worker: taps and rings in the daemon, queues in the simulator.
///
/// `room`, `progress`, `wait_for_room` and `flush` are asked of guests' ports only. Their defaults
/// here, and that of `wait_for_frames`, are for a peer that takes every frame at once and needs no
/// waking: benches and tests have such.
pub trait Ports {
    /// Reads the next frame of `port` into `buf`.
    fn receive(&mut self, port: PortId, buf: &mut [u8]) -> Received;

    /// A frame that was read from `port` is about to be worked on: behind everything that came of
    /// the frames before it, although [`Self::receive`] may have returned it long before.
    fn enters(&mut self, _port: PortId, _hdr: &VirtioNetHdr, _frame: &[u8]) {}

    /// Sends one frame, given in pieces, whose header the peer of `port` takes. `waited`: it was in
    /// the backlog before.
    fn send(&mut self, port: PortId, hdr: &VirtioNetHdr, parts: &[&[u8]], waited: bool) -> Sent;

    /// Bytes of the longest frame up to `want` that the guest has room for.
    fn room(&mut self, _port: PortId, want: usize) -> usize {
        want
    }

    /// Whether it is not the guest that keeps it from getting more, but the work that its ring has
    /// made in this turn.
    fn has_spent(&mut self, _port: PortId) -> bool {
        false
    }

    /// Whether the guest has shown life since the last call. `Some(true)`: and it has seen all that
    /// was sent to it.
    fn progress(&mut self, _port: PortId) -> Option<bool> {
        Some(true)
    }

    /// Asks to be woken by the next frame of `port`. `true`: there may be one, now.
    fn wait_for_frames(&mut self, _port: PortId) -> bool {
        false
    }

    /// Asks to be woken by more room, or no longer. There may be some, now: look again.
    fn wait_for_room(&mut self, _port: PortId, _waits: bool) {}

    /// Shows the guest what was taken from it and given to it.
    fn flush(&mut self, _port: PortId) {}

    /// A frame on its way to `port` is about to be changed, because the peer does not take it as it
    /// is: its checksum will be finished, or it will be cut.
    fn before_adapting(&mut self, _port: PortId, _hdr: &VirtioNetHdr, _parts: &[&[u8]]) {}

    /// The engine has done a step.
    ///
    /// # Errors
    /// The turn is not to go on; the simulator's daemons die so.
    fn after_step(&mut self, _engine: &Engine<'_>, _step: Step) -> Result<(), Interrupted> {
        Ok(())
    }
}
