//! The ports of a worker, and everything that leaves by them.

use nightporter_core::drops::DropReason;
use nightporter_core::engine::Transmit;
use nightporter_core::port::{PortFeatures, PortId};
use nightporter_core::time::Instant;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::watch::{Direction, Watchers};
use crate::port::{Port, Sent};
use crate::stats::PortStats;
use nightporter_core::turn::adapt::{Adapter, fits};
use nightporter_core::turn::backlog::Backlog;

/// A place in the worker's list of ports; the number of its [`PortId`].
pub(crate) type SlotId = usize;

/// One port and what the worker keeps about it.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) name: String,
    pub(crate) port: Port,
    pub(crate) id: PortId,
    /// What its peer accepts; `None` while the link is down.
    pub(crate) features: Option<PortFeatures>,
    pub(crate) stats: PortStats,
    /// Frames for a guest that has no buffers; nothing newer may overtake them.
    pub(crate) backlog: Backlog,
    /// There may be frames to read.
    pub(crate) readable: bool,
}

impl Slot {
    pub(crate) fn drop_frames(&mut self, reason: DropReason, n: u64) {
        self.stats.count_drops(reason, n);
    }

    /// Frames dropped here for `reason`, by the worker or by the device.
    pub(crate) fn drops(&self, reason: DropReason) -> u64 {
        let device = match &self.port {
            Port::Guest(guest) => guest.drops(reason),
            Port::Uplink(_) | Port::Lost(_) => 0,
        };
        self.stats.drops(reason) + device
    }

    /// Something is there, or may be: look at the port in this turn.
    pub(crate) fn wake(&mut self) {
        self.readable = true;
    }

    /// Gives a frame to the port, or to the backlog, or drops and counts it.
    fn offer(
        &mut self,
        now: Instant,
        watchers: &mut Watchers,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
    ) {
        let sent = if self.backlog.is_empty() { self.port.send(hdr, parts) } else { Sent::Full };
        match sent {
            Sent::Done => self.count_sent(now, watchers, parts),
            Sent::Dropped(reason) => self.drop_frames(reason, 1),
            Sent::Gone => self.lose(),
            // An uplink has no queue here: the kernel's was full.
            Sent::Full if self.port.is_guest() && self.backlog.push(hdr, parts) => {}
            Sent::Full => self.drop_frames(DropReason::QueueFull, 1),
        }
    }

    /// Moves the oldest frame of the backlog. `false`: there is none, or no room for it.
    pub(crate) fn move_waiting(&mut self, now: Instant, watchers: &mut Watchers) -> bool {
        let Some((hdr, frame)) = self.backlog.pop() else { return false };
        match self.port.send(&hdr, &[&frame]) {
            Sent::Done => self.count_sent(now, watchers, &[&frame]),
            Sent::Dropped(reason) => self.drop_frames(reason, 1),
            Sent::Gone => self.lose(),
            Sent::Full => {
                self.backlog.put_back(hdr, frame);
                return false;
            }
        }
        true
    }

    fn count_sent(&mut self, now: Instant, watchers: &mut Watchers, parts: &[&[u8]]) {
        self.stats.count_to_port(parts.iter().map(|p| p.len()).sum());
        watchers.see(now, usize::from(self.id.0), Direction::ToPort, parts);
    }

    /// The interface behind the port is gone.
    pub(crate) fn lose(&mut self) {
        if let Port::Uplink(tap) = &self.port {
            tracing::error!(port = %self.name, "the interface is gone; its traffic is dropped");
            self.port = Port::Lost(tap.config().clone());
        }
        self.link_down();
        self.readable = false;
    }

    /// Nobody takes frames any more; those that wait are lost.
    pub(crate) fn link_down(&mut self) {
        self.features = None;
        let lost = self.backlog.clear();
        self.drop_frames(DropReason::PortDown, lost as u64);
    }
}

/// The kernel's half of a tap takes everything.
pub(crate) const UPLINK_FEATURES: PortFeatures =
    PortFeatures { csum: true, tso4: true, tso6: true, ecn: true };

/// All ports of a worker.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    pub(crate) list: Vec<Slot>,
    pub(crate) watchers: Watchers,
    adapter: Adapter,
}

impl Slots {
    /// Adds a port that the engine calls `id`; ports are never removed, so that is the next number.
    pub(crate) fn add(&mut self, id: PortId, name: String, port: Port) -> SlotId {
        let slot = self.list.len();
        assert_eq!(slot, usize::from(id.0), "the engine counts ports from 0 as we do");
        let features = if port.is_guest() { None } else { Some(UPLINK_FEATURES) };
        self.list.push(Slot {
            name,
            port,
            id,
            features,
            stats: PortStats::default(),
            backlog: Backlog::default(),
            readable: true,
        });
        slot
    }

    /// The slot with this name.
    pub(crate) fn find(&self, name: &str) -> Option<SlotId> {
        self.list.iter().position(|s| s.name == name)
    }

    /// Sends a frame out of one port.
    pub(crate) fn send(&mut self, now: Instant, to: PortId, hdr: &VirtioNetHdr, parts: &[&[u8]]) {
        self.send_to_slot(now, usize::from(to.0), hdr, parts);
    }

    /// Sends a frame out of every port that is up, but `from`.
    pub(crate) fn flood(
        &mut self,
        now: Instant,
        from: PortId,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
    ) {
        for slot in 0..self.list.len() {
            if self.list[slot].id != from && self.list[slot].features.is_some() {
                self.send_to_slot(now, slot, hdr, parts);
            }
        }
    }

    /// Sends a frame that the engine made.
    pub(crate) fn transmit(&mut self, now: Instant, t: &Transmit<'_>) {
        match t.port {
            Some(to) => self.send(now, to, &t.hdr, t.parts()),
            None => self.flood(now, t.ingress, &t.hdr, t.parts()),
        }
    }

    fn send_to_slot(&mut self, now: Instant, to: SlotId, hdr: &VirtioNetHdr, parts: &[&[u8]]) {
        let Self { list, watchers, adapter } = self;
        let slot = &mut list[to];
        let Some(features) = slot.features else {
            return slot.drop_frames(DropReason::PortDown, 1);
        };
        if fits(features, hdr) {
            return slot.offer(now, watchers, hdr, parts);
        }
        let offer = |hdr: &_, frame: &_| slot.offer(now, watchers, hdr, &[frame]);
        let result = adapter.adapt(hdr, parts, offer);
        if let Err(reason) = result {
            slot.drop_frames(reason, 1);
        }
    }
}
