//! A network card behind the port: frames in and out of its queue pairs.

use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::{PortError, QUEUE_PAIRS_MAX, VhostUserConfig, VhostUserPort};
use crate::faults;
use crate::vhost::features::{MTU_MIN, Offer};
use crate::vhost::queue::{Polled, PushError, WORK_PER_TURN};
use crate::vhost::ring::RingFault;
use crate::vhost::vring::Vring;

impl VhostUserPort {
    /// Listens. Errors: see [`PortError`].
    pub fn new(config: &VhostUserConfig) -> Result<Self, PortError> {
        let mut port = Self::without_socket(config)?;
        port.listen()?;
        Ok(port)
    }

    /// Does not listen yet. Errors: see [`PortError`].
    pub fn without_socket(config: &VhostUserConfig) -> Result<Self, PortError> {
        let (mac, mtu, queue_pairs) = (config.mac, config.mtu, config.queue_pairs);
        if queue_pairs == 0 || queue_pairs > QUEUE_PAIRS_MAX {
            return Err(PortError::QueuePairs(queue_pairs));
        }
        if let Some(small) = mtu.filter(|m| *m < MTU_MIN) {
            return Err(PortError::Mtu(small));
        }
        Ok(Self::with(config, Offer { mac, mtu, queue_pairs }))
    }

    /// Queue pairs that are offered. Frames may go to any pair whose receive queue runs.
    #[must_use]
    pub const fn queue_pairs(&self) -> u16 {
        self.offer.queue_pairs
    }

    /// The MTU that the front-end has set, else the configured one.
    #[must_use]
    pub fn mtu(&self) -> Option<u16> {
        self.connection.as_ref().and_then(|(_, session)| session.mtu()).or(self.offer.mtu)
    }

    /// Whether frames can be given to this pair.
    #[must_use]
    pub fn is_running_to_guest(&self, pair: usize) -> bool {
        let session = self.connection.as_ref().map(|(_, session)| session);
        let vring = session.and_then(|s| s.vrings.get(2 * pair));
        vring.is_some_and(|v| v.queue.is_some() && v.fault.is_none())
    }

    /// Places of the receive and transmit ring of the first pair; `None`: they do not run.
    pub(crate) fn ring_sizes(&self) -> Option<[u16; 2]> {
        let (_, session) = self.connection.as_ref().filter(|_| self.link().is_some())?;
        Some([session.vrings.first()?.size, session.vrings.get(1)?.size])
    }

    /// The driver of the first pair has posted a receive buffer, or posted some for a predecessor.
    pub(crate) fn has_seen_buffers(&self) -> bool {
        let session = self.connection.as_ref().map(|(_, session)| session);
        let queue = session.and_then(|it| it.vrings.first()?.queue.as_ref());
        queue.is_some_and(|queue| queue.ring.driver_marks().0 != 0 || queue.ring.base() != 0)
    }

    /// One of its rings lies outside the memory that the front-end shares.
    pub(crate) fn is_outside_memory(&self) -> bool {
        let session = self.connection.as_ref().map(|(_, session)| session);
        let is_outside = |vring: &Vring<_>| vring.fault == Some(RingFault::OutsideMemory);
        session.is_some_and(|session| session.vrings.iter().any(is_outside))
    }

    /// Shows the guest that its frames were taken, and signals if it wants to know.
    pub fn flush_from_guest(&mut self, pair: usize) {
        self.work_from_guest = 0;
        self.flush(2 * pair + 1);
    }

    /// Shows the guest its new frames, and signals if it wants to know.
    pub fn flush_to_guest(&mut self, pair: usize) {
        self.flush(2 * pair);
    }

    /// Asks for a kick when the guest sends. `true`: it just has; poll again.
    #[must_use]
    pub fn enable_kicks_from_guest(&mut self, pair: usize) -> bool {
        self.enable_kicks(2 * pair + 1)
    }

    /// Asks for a kick when the guest offers buffers. `true`: it just has. Look for room once more
    /// in either case: buffers that an earlier look took, without being enough, bring no kick.
    #[must_use]
    pub fn enable_kicks_to_guest(&mut self, pair: usize) -> bool {
        self.enable_kicks(2 * pair)
    }

    /// No kicks for frames from the guest: they are polled for.
    pub fn disable_kicks_from_guest(&mut self, pair: usize) {
        self.disable_kicks(2 * pair + 1);
    }

    /// No kicks for buffers.
    pub fn disable_kicks_to_guest(&mut self, pair: usize) {
        self.disable_kicks(2 * pair);
    }

    /// Gives the guest one frame: `hdr`, then the bytes of `parts`. It sees it at
    /// [`Self::flush_to_guest`].
    #[inline]
    pub fn push_to_guest(
        &mut self,
        pair: usize,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
    ) -> Result<(), PushError> {
        let _part = self.account.part();
        let Some((_, session)) = &mut self.connection else { return Err(PushError::Full) };
        let layout = session.layout;
        let Some(queue) = session.vrings.get_mut(2 * pair).and_then(Vring::usable) else {
            return Err(PushError::Full);
        };
        match queue.push_frame(&session.memory, layout, hdr, parts) {
            Ok(result) => result,
            Err(fault) => {
                self.fail(2 * pair, fault);
                Err(PushError::Full)
            }
        }
    }

    /// The longest frame, without virtio-net header, that [`Self::push_to_guest`] would take now.
    /// Looks no further than `want`: the answer may be smaller than the truth only above it.
    #[inline]
    #[must_use]
    pub fn room_to_guest(&mut self, pair: usize, want: usize) -> usize {
        let _part = self.account.part();
        let Some((_, session)) = &mut self.connection else { return 0 };
        let layout = session.layout;
        let Some(queue) = session.vrings.get_mut(2 * pair).and_then(Vring::usable) else {
            return 0;
        };
        match queue.room(&session.memory, layout, want) {
            Ok(room) => room,
            Err(fault) => {
                self.fail(2 * pair, fault);
                0
            }
        }
    }

    /// The next frame from the guest, copied into `buf`: its header and length. `None`: no more.
    #[inline]
    #[must_use]
    pub fn poll_from_guest(
        &mut self,
        pair: usize,
        buf: &mut [u8],
    ) -> Option<(VirtioNetHdr, usize)> {
        let _part = self.account.part();
        let (_, session) = self.connection.as_mut()?;
        let hdr_len = session.layout.hdr_len;
        loop {
            // A guest could offer chains without a frame for ever, or frames in a thousand crumbs.
            if self.work_from_guest >= WORK_PER_TURN {
                return None;
            }
            let queue = session.vrings.get_mut(2 * pair + 1)?.usable()?;
            let before = queue.work;
            let polled = queue.poll_frame(&session.memory, hdr_len, buf);
            self.work_from_guest += queue.work - before;
            match polled {
                // Zeros instead of the guest's bytes must not leave as if they were these.
                Ok(Polled::Frame(..))
                    if faults::count() != self.faults_seen && session.has_faulted() =>
                {
                    return None;
                }
                Ok(Polled::Frame(hdr, len)) => return Some((hdr, len)),
                Ok(Polled::Empty) => return None,
                Ok(Polled::Truncated) => self.stats.truncated += 1,
                Ok(Polled::TooBig) => self.stats.too_big += 1,
                Err(fault) => {
                    self.fail(2 * pair + 1, fault);
                    return None;
                }
            }
        }
    }

    /// Whether [`Self::poll_from_guest`] would say that there is nothing although there may be: the
    /// share of this turn, of all pairs together, is used up. A flush begins the next.
    #[must_use]
    pub const fn has_spent_from_guest(&self) -> bool {
        self.work_from_guest >= WORK_PER_TURN
    }

    /// Whether [`Self::push_to_guest`] would say that there is no room although there may be: this
    /// pair's share of this turn is used up.
    #[must_use]
    pub fn has_spent_to_guest(&mut self, pair: usize) -> bool {
        let Some((_, session)) = &mut self.connection else { return false };
        let queue = session.vrings.get_mut(2 * pair).and_then(Vring::usable);
        queue.is_some_and(|queue| queue.has_spent())
    }

    /// Whether the driver of this pair's receive queue has moved since the last call: evidence that
    /// the guest runs. `Some(true)`: and it has seen everything delivered so far.
    #[must_use]
    pub fn guest_progress(&mut self, pair: usize) -> Option<bool> {
        let _part = self.account.part();
        let (_, session) = self.connection.as_mut()?;
        let vring = session.vrings.get_mut(2 * pair)?;
        let ring = &vring.usable()?.ring;
        let (marks, drained) = (ring.driver_marks(), ring.is_drained());
        let moved = std::mem::replace(&mut vring.marks, marks) != marks;
        moved.then_some(drained)
    }
}
