//! A vhost-user port as the worker sees it: all its queue pairs as one source and one sink.

use nightporter_core::drops::DropReason;
use nightporter_core::turn::{Received, Sent};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_core::wire::vlan::{self, Untagged};

use super::vhost_user::VhostUserPort;
use crate::vhost::queue::PushError;

/// Every frame goes to the first pair's receive queue: it keeps them in order, and a guest that
/// uses more queues gains nothing from one worker (see `vm.queue_pairs`).
const PAIR_TO_GUEST: usize = 0;

/// A vhost-user port and which of its queues is next.
#[derive(Debug)]
pub struct GuestPort {
    /// The device.
    pub port: VhostUserPort,
    /// A VLAN of which the guest knows nothing: everything behind this port sees its frames with
    /// this tag.
    vlan: Option<u16>,
    /// The pair to be asked first, so that all have their turn.
    next: usize,
    /// Kicks for frames are asked for, as before a sleep.
    armed: bool,
    /// Kicks for receive buffers are asked for.
    waits_for_room: bool,
}

impl GuestPort {
    /// Over a port that has just been made, of a guest in a VLAN of which it knows nothing.
    #[must_use]
    pub fn new(port: VhostUserPort, vlan: Option<u16>) -> Self {
        Self { port, vlan, next: 0, armed: false, waits_for_room: false }
    }

    /// The VLAN of which the guest knows nothing.
    #[must_use]
    pub fn vlan(&self) -> Option<u16> {
        self.vlan
    }

    /// From now on it is this one.
    pub fn set_vlan(&mut self, vlan: Option<u16>) {
        self.vlan = vlan;
    }

    /// Frames of the guest that the device dropped for `reason`.
    #[must_use]
    pub fn drops(&self, reason: DropReason) -> u64 {
        match reason {
            DropReason::Truncated => self.port.stats().truncated,
            DropReason::TooBig => self.port.stats().too_big,
            _ => 0,
        }
    }

    fn pairs(&self) -> usize {
        usize::from(self.port.queue_pairs())
    }

    /// Reads one frame from whichever transmit queue has one.
    pub fn receive(&mut self, buf: &mut [u8]) -> Received {
        self.disarm();
        let pairs = self.pairs();
        let front = if self.vlan.is_some() { vlan::TAG } else { 0 };
        for _ in 0..pairs {
            let pair = self.next;
            self.next = if pair + 1 < pairs { pair + 1 } else { 0 }; // `%` would divide
            if let Some((mut hdr, len)) = self.port.poll_from_guest(pair, &mut buf[front..]) {
                let mut len = front + len;
                if let Some(vlan) = self.vlan {
                    len = vlan::put(vlan, &mut hdr, &mut buf[..len]);
                }
                return Received::Frame(hdr, len);
            }
            if self.port.has_spent_from_guest() {
                return Received::Spent;
            }
        }
        Received::Empty
    }

    /// Whether the guest may have more room than it seems.
    pub fn has_spent(&mut self) -> bool {
        self.port.has_spent_to_guest(PAIR_TO_GUEST)
    }

    /// Puts one frame into the receive queue.
    pub fn send(&mut self, hdr: &VirtioNetHdr, parts: &[&[u8]]) -> Sent {
        if let Some(vlan) = self.vlan
            && vlan::id_of(parts).is_some_and(|id| id != vlan)
        {
            // It was made before the guest came into its VLAN.
            return Sent::Dropped(DropReason::Vlan);
        }
        let untagged = self.vlan.and_then(|_| Untagged::of(hdr, parts));
        let (hdr, parts) = untagged.as_ref().map_or((hdr, parts), |it| (&it.hdr, it.parts()));
        match self.port.push_to_guest(PAIR_TO_GUEST, hdr, parts) {
            Ok(()) => Sent::Done,
            Err(PushError::Full) => Sent::Full,
            Err(PushError::TooBig) => Sent::Dropped(DropReason::TooBig),
        }
    }

    /// Bytes of the largest frame up to `want` that the guest has room for.
    pub fn room(&mut self, want: usize) -> usize {
        self.port.room_to_guest(PAIR_TO_GUEST, want)
    }

    /// Asks to be woken when there is more room. It may just have appeared: look again.
    pub fn wait_for_room(&mut self) {
        self.waits_for_room = true;
        // The answer is about buffers not taken yet; `room` and `send` take them.
        let _ = self.port.enable_kicks_to_guest(PAIR_TO_GUEST);
    }

    /// No wake-ups for room: nothing waits for it.
    pub fn ignore_room(&mut self) {
        if std::mem::take(&mut self.waits_for_room) {
            self.port.disable_kicks_to_guest(PAIR_TO_GUEST);
        }
    }

    /// Asks to be woken by the next frame. `true`: there is one, now.
    pub fn arm(&mut self) -> bool {
        if self.armed {
            return false;
        }
        self.armed = true;
        (0..self.pairs()).fold(false, |any, pair| self.port.enable_kicks_from_guest(pair) | any)
    }

    /// No wake-ups for frames while they are polled for.
    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            (0..self.pairs()).for_each(|pair| self.port.disable_kicks_from_guest(pair));
        }
    }

    /// Shows the guest all that was taken from it and given to it.
    pub fn flush(&mut self) {
        self.port.flush_to_guest(PAIR_TO_GUEST);
        (0..self.pairs()).for_each(|pair| self.port.flush_from_guest(pair));
    }

    /// Evidence that the guest runs; see [`VhostUserPort::guest_progress`].
    pub fn progress(&mut self) -> Option<bool> {
        self.port.guest_progress(PAIR_TO_GUEST)
    }
}
