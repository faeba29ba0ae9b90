//! One virtqueue as the messages describe it: addresses, sizes, descriptors, and the running queue.

use super::device::DeviceQueue;
use super::ring::{RingAddrs, RingFault};
use super::signals::{KickFd, Notifier};

/// The result of SET_VRING_KICK.
#[derive(Debug, Default)]
pub enum Kick {
    /// Not set, or taken away by GET_VRING_BASE: the ring is stopped.
    #[default]
    None,
    /// The ring must be polled; there is no event to wait for.
    Polled,
    /// The driver writes here when it offers buffers.
    Fd(KickFd),
}

/// One virtqueue, with a queue of some device on it.
#[derive(Debug)]
pub struct Vring<Q> {
    /// SET_VRING_NUM; 0 before it.
    pub size: u16,
    /// SET_VRING_ADDR.
    pub addrs: Option<RingAddrs>,
    /// The answer to GET_VRING_BASE while the ring does not run.
    pub base: u16,
    /// Where the queue began when it last started.
    pub began_at: u16,
    /// SET_VRING_KICK.
    pub kick: Kick,
    /// SET_VRING_CALL: we write here when the driver wants to know. Kept until replaced: QEMU sets
    /// it long before the ring starts and does not repeat it.
    pub call: Option<Notifier>,
    /// SET_VRING_ERR.
    pub err: Option<Notifier>,
    /// SET_VRING_ENABLE.
    pub enabled: bool,
    /// Running: configured and enabled.
    pub queue: Option<Q>,
    /// The guest broke the rules; the queue stays out of use until it is started again.
    pub fault: Option<RingFault>,
    /// The driver's marks when they were last looked at.
    pub marks: (u16, u16),
}

impl<Q> Default for Vring<Q> {
    fn default() -> Self {
        Self {
            size: 0,
            addrs: None,
            base: 0,
            began_at: 0,
            kick: Kick::None,
            call: None,
            err: None,
            enabled: false,
            queue: None,
            fault: None,
            marks: (0, 0),
        }
    }
}

impl<Q: DeviceQueue> Vring<Q> {
    /// Whether everything that a ring needs to run is there, except that it may be disabled.
    #[must_use]
    pub const fn is_configured(&self) -> bool {
        self.size > 0 && self.addrs.is_some() && !matches!(self.kick, Kick::None)
    }

    /// The running queue, if its guest kept the rules.
    #[inline]
    pub const fn usable(&mut self) -> Option<&mut Q> {
        if self.fault.is_some() {
            return None;
        }
        self.queue.as_mut()
    }

    /// The guest broke the rules: the front-end is told, if it wanted that.
    pub fn fail(&mut self, fault: RingFault) {
        self.fault = Some(fault);
        if let Some(err) = &self.err {
            err.notify();
        }
    }

    /// Publishes, and signals if the driver wants it; whether it was signalled.
    pub fn flush(&mut self) -> bool {
        let Some(queue) = self.usable() else { return false };
        queue.begin_turn();
        queue.ring().publish();
        let wanted = queue.ring().wants_signal();
        match &self.call {
            Some(call) if wanted => call.notify(),
            _ => return false,
        }
        true
    }

    /// Stops: completed chains are shown. If it stops `in_order`, chains that were only taken are
    /// forgotten, otherwise they stay in the in-flight log. `false` if it did not run.
    pub fn stop(&mut self, in_order: bool) -> bool {
        let fault = self.fault.take();
        let Some(mut queue) = self.queue.take() else { return false };
        if fault.is_none() {
            queue.ring().publish();
        }
        if in_order {
            queue.ring().abandon();
        }
        self.base = queue.ring().base();
        true
    }
}
