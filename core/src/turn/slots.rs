//! The worker's state of each port besides the engine, and all sending by the ports.

use super::adapt::{Adapter, fits};
use super::backlog::Backlog;
use super::ports::{Ports, Sent};
use crate::drops::DropReason;
use crate::engine::{Engine, Transmit};
use crate::limits::{BACKLOGS_BYTES_MAX, COPY_COST};
use crate::port::{PortFeatures, PortId};
use crate::time::Instant;
use crate::wire::heartbeat::Heartbeat;
use crate::wire::virtio_net::VirtioNetHdr;

/// Traffic of a port. `from_port`: frames entered the switch there; `to_port`: they left there.
#[derive(Clone, Debug, Default)]
pub struct PortStats {
    /// Frames read from the port. A super-segment is one frame.
    pub frames_from_port: u64,
    /// Their bytes, from the Ethernet header on.
    pub bytes_from_port: u64,
    /// Frames handed to the port.
    pub frames_to_port: u64,
    /// Their bytes.
    pub bytes_to_port: u64,
    drops: [u64; DropReason::ALL.len()],
}

impl PortStats {
    /// Frames dropped in a turn for `reason`; the engine counts its own.
    #[must_use]
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }

    pub(super) fn count_from_port(&mut self, bytes: usize) {
        self.frames_from_port += 1;
        self.bytes_from_port += bytes as u64;
    }

    pub(super) fn count_drops(&mut self, reason: DropReason, n: usize) {
        self.drops[reason as usize] += n as u64;
    }
}

/// One port.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) id: PortId,
    pub(super) is_guest: bool,
    /// The features of its peer; `None` while the link is down.
    pub(super) features: Option<PortFeatures>,
    /// Frames for a guest that has no room; nothing newer may overtake them.
    pub(super) backlog: Backlog,
    pub(super) stats: PortStats,
    pub(super) reading: Reading,
    /// Turns in a row in which it was read and had no frame.
    pub(super) idle_turns: u8,
    /// It is in [`Slots::touched`].
    pub(super) touched: bool,
    /// A frame was meant for it since it was last fed.
    pub(super) meant: bool,
    /// Its guest has yet to see something, or to make room for it.
    pub(super) unseen: bool,
    /// It is in `Turn::unseen`.
    pub(super) listed: bool,
    /// Something waits for room in its ring.
    pub(super) waits: bool,
    /// Bytes of copies of its frames beyond the limit of a turn.
    pub(super) debt: usize,
    /// The last heartbeat, until its guest has shown life.
    pub(super) beat: Option<Heartbeat>,
}

/// Whether there may be frames to read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reading {
    /// No: the port wakes the worker by its next frame.
    Asleep,
    /// It had no frames a moment ago; the port has not been asked to wake the worker yet.
    Watched,
    /// Yes.
    Awake,
}

impl Slot {
    pub(super) fn new(id: PortId, is_guest: bool, backlog_frames_max: usize) -> Self {
        Self {
            id,
            is_guest,
            features: None,
            backlog: Backlog::new(backlog_frames_max),
            stats: PortStats::default(),
            reading: Reading::Asleep,
            idle_turns: 0,
            touched: false,
            meant: false,
            unseen: false,
            listed: false,
            waits: false,
            debt: 0,
            beat: None,
        }
    }

    /// Gives a frame that came from another one to the port, or to the backlog, or drops and counts
    /// it. All backlogs have `waiting` bytes. Returns the bytes of copies that the port made.
    fn offer<P: Ports>(
        &mut self,
        ports: &mut P,
        from: Option<PortId>,
        waiting: &mut usize,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
    ) -> usize {
        let sent = if self.backlog.is_empty() {
            ports.send(self.id, hdr, parts, false)
        } else {
            Sent::Full
        };
        match sent {
            Sent::Done => self.count_sent(parts.iter().map(|p| p.len()).sum()),
            Sent::Copied(bytes) => {
                self.count_sent(parts.iter().map(|p| p.len()).sum());
                return bytes as usize;
            }
            Sent::Dropped(reason) => self.stats.count_drops(reason, 1),
            Sent::Gone => self.link_down(waiting),
            // An uplink has no queue here: the kernel's was full.
            Sent::Full => self.wait(from, waiting, hdr, parts),
        }
        0
    }

    #[inline(never)] // few frames have to
    fn wait(
        &mut self,
        from: Option<PortId>,
        waiting: &mut usize,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
    ) {
        let (before, free) = (self.backlog.bytes(), BACKLOGS_BYTES_MAX - *waiting);
        let lost = if self.is_guest { self.backlog.push(from, hdr, parts, free) } else { 1 };
        *waiting = *waiting - before + self.backlog.bytes();
        self.stats.count_drops(DropReason::QueueFull, lost);
    }

    #[inline(never)]
    fn move_waiting<P: Ports>(&mut self, ports: &mut P, waiting: &mut usize) -> bool {
        let Some(first) = self.backlog.pop() else { return false };
        *waiting -= first.frame.len();
        match ports.send(self.id, &first.hdr, &[&first.frame], true) {
            Sent::Done | Sent::Copied(_) => self.count_sent(first.frame.len()),
            Sent::Dropped(reason) => self.stats.count_drops(reason, 1),
            Sent::Gone => self.link_down(waiting),
            Sent::Full => {
                *waiting += first.frame.len();
                self.backlog.put_back(first);
                return false;
            }
        }
        true
    }

    fn count_sent(&mut self, bytes: usize) {
        self.stats.frames_to_port += 1;
        self.stats.bytes_to_port += bytes as u64;
    }

    fn link_down(&mut self, waiting: &mut usize) {
        *waiting -= self.backlog.bytes();
        self.features = None;
        self.waits = false;
        self.meant = false;
        self.unseen = false;
        self.beat = None;
        let lost = self.backlog.clear();
        self.stats.count_drops(DropReason::PortDown, lost);
    }
}

/// A frame that the engine made for an unknown station.
pub(super) struct Unknown {
    pub(super) ingress: PortId,
    pub(super) hdr: VirtioNetHdr,
    pub(super) frame: Vec<u8>,
}

/// All ports of a worker, by their numbers.
#[derive(Debug)]
pub(super) struct Slots {
    pub(super) list: Vec<Slot>,
    /// Guests that the turn ends with: they were read, a frame was meant for them, or there may be
    /// something to give them.
    pub(super) touched: Vec<PortId>,
    /// The port that what is sent now came from; `None`: the store.
    pub(super) from: Option<PortId>,
    /// Bytes of copies that frames have become since it was set to 0 (`COPIES_PER_PORT`).
    pub(super) copied: usize,
    /// Bytes of all backlogs.
    waiting: usize,
    adapter: Adapter,
}

impl Slots {
    pub(super) fn new() -> Self {
        Self {
            list: Vec::new(),
            touched: Vec::new(),
            from: None,
            copied: 0,
            waiting: 0,
            adapter: Adapter::default(),
        }
    }

    pub(super) fn of(&self, port: PortId) -> &Slot {
        &self.list[usize::from(port.0)]
    }

    pub(super) fn of_mut(&mut self, port: PortId) -> &mut Slot {
        &mut self.list[usize::from(port.0)]
    }

    /// Frames of `port` are not taken any more; those that wait are lost.
    pub(super) fn link_down(&mut self, port: PortId) {
        self.list[usize::from(port.0)].link_down(&mut self.waiting);
    }

    /// Frames that wait for the guest of `port` and are not of its VLANs are dropped.
    pub(super) fn leave_vlans(&mut self, engine: &Engine<'_>, port: PortId) {
        let slot = &mut self.list[usize::from(port.0)];
        let before = slot.backlog.bytes();
        let lost = slot.backlog.retain(|frame| engine.is_in_vlan(port, frame));
        self.waiting -= before - slot.backlog.bytes();
        slot.stats.count_drops(DropReason::Vlan, lost);
        slot.beat = None; // it may have been among them
        self.touch(port); // nothing may wait for room any more
    }

    /// Tells the engine if the guest of `port` has yet to see something, and has shown life.
    pub(super) fn look_at_guest<P: Ports>(
        &mut self,
        now: Instant,
        engine: &mut Engine<'_>,
        ports: &mut P,
        port: PortId,
    ) {
        let slot = &mut self.list[usize::from(port.0)];
        if !slot.unseen {
            return;
        }
        let Some(drained) = ports.progress(port) else { return };
        slot.beat = None;
        // Frames that wait outside the ring are unseen too.
        let drained = drained && slot.backlog.is_empty();
        engine.handle_guest_progress(now, port, drained);
        slot.unseen = !drained || slot.waits;
        if slot.waits {
            self.touch(port);
        }
    }

    /// Of a guest in `Turn::unseen`: it stays there. Else it is out of it.
    pub(super) fn stays_listed(&mut self, port: PortId) -> bool {
        let slot = self.of_mut(port);
        slot.listed = slot.unseen;
        slot.listed
    }

    /// Moves the oldest frame of the backlog of `port`. `false`: there is none, or no room for it.
    #[inline]
    pub(super) fn move_waiting<P: Ports>(&mut self, ports: &mut P, port: PortId) -> bool {
        let slot = &mut self.list[usize::from(port.0)];
        !slot.backlog.is_empty() && slot.move_waiting(ports, &mut self.waiting)
    }

    /// This turn ends with feeding `port`, if it is a guest's, and showing it all.
    pub(super) fn touch(&mut self, port: PortId) {
        let slot = &mut self.list[usize::from(port.0)];
        if slot.is_guest && !std::mem::replace(&mut slot.touched, true) {
            self.touched.push(port);
        }
    }

    /// Sends a frame out of one port, as its peer takes it.
    pub(super) fn send<P: Ports>(
        &mut self,
        ports: &mut P,
        to: PortId,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
    ) {
        let Some(features) = self.of(to).features else {
            return self.of_mut(to).stats.count_drops(DropReason::PortDown, 1);
        };
        self.touch(to);
        let Self { list, adapter, copied, waiting, from, .. } = self;
        let from = *from;
        let slot = &mut list[usize::from(to.0)];
        slot.meant = true;
        if fits(features, hdr) {
            *copied += slot.offer(ports, from, waiting, hdr, parts);
            return;
        }
        ports.before_adapting(to, hdr, parts);
        let offer = |hdr: &_, frame: &[u8]| {
            *copied += frame.len() + COPY_COST + slot.offer(ports, from, waiting, hdr, &[frame]);
        };
        if let Err(reason) = adapter.adapt(hdr, parts, offer) {
            slot.stats.count_drops(reason, 1);
        }
    }

    /// Sends a frame out of every port that is up and `gets` it.
    #[inline(never)]
    pub(super) fn flood<P: Ports>(
        &mut self,
        ports: &mut P,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
        gets: impl Fn(PortId) -> bool,
    ) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        for slot in 0..self.list.len() {
            let Slot { id, features, .. } = self.list[slot];
            if features.is_some() && gets(id) {
                self.copied += len + COPY_COST;
                self.send(ports, id, hdr, parts);
            }
        }
    }

    /// Sends a frame that the engine made. `Some`: it is for an unknown station, and the engine has
    /// to choose the receivers.
    #[must_use]
    pub(super) fn transmit<P: Ports>(
        &mut self,
        ports: &mut P,
        made: &Transmit<'_>,
    ) -> Option<Unknown> {
        self.from = Some(made.ingress);
        let Some(to) = made.port else {
            return Some(Unknown {
                ingress: made.ingress,
                hdr: made.hdr,
                frame: made.parts().concat(),
            });
        };
        self.send(ports, to, &made.hdr, made.parts());
        None
    }
}
