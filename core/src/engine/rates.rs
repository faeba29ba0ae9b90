//! Rate limits: how fast a VM sends to others, and others to it.
//!
//! Frames that H sends by itself wait for their turn: data that a guest has handed over, and bytes
//! in the store for a guest. Then the store fills, and the window that the sender is shown closes.
//! Frames that only pass are counted, and dropped while the VM is more than [`LIMIT_DEBT_MAX`]
//! ahead of its rate, because H has no queue for them. ACKs that H makes cost nothing.
//!
//! The VM's sockets over the host (virtual TOE) are counted in the same bucket, by another thread:
//! [`Engine::shared_rate`].
//!
//! A VM without a limit does not run this code.

use std::sync::Arc;

use crate::bucket::SharedRate;
use crate::drops::DropReason;
use crate::engine::walks::Deed;
use crate::engine::{Engine, Verdict};
use crate::limits::LIMIT_DEBT_MAX;
use crate::port::PortId;
use crate::tcp::vm::Presence;
use crate::time::Instant;

/// Which of a VM's two directions.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// Frames that it sends.
    FromGuest,
    /// Frames for it.
    ToGuest,
}

/// The limits of all VMs.
#[derive(Debug, Default)]
pub(super) struct Rates {
    /// There is any.
    any: bool,
    /// By the number of the VM's port.
    of_ports: Vec<[Option<Arc<SharedRate>>; 2]>,
    /// The waiting VMs, and the times until which they wait.
    waiting: Vec<(Instant, PortId, Direction)>,
}

impl Rates {
    /// Some VM has a limit.
    #[inline]
    pub(super) const fn any(&self) -> bool {
        self.any
    }

    /// When the first that waits may go on.
    pub(super) fn next(&self) -> Option<Instant> {
        self.waiting.iter().map(|(at, ..)| *at).min()
    }

    fn of(&self, port: PortId, direction: Direction) -> Option<&Arc<SharedRate>> {
        self.of_ports.get(usize::from(port.0))?[direction as usize].as_ref()
    }

    fn set(&mut self, port: PortId, direction: Direction, limit: Option<Arc<SharedRate>>) {
        let place = usize::from(port.0);
        if place >= self.of_ports.len() {
            self.of_ports.resize_with(place + 1, Default::default);
        }
        self.of_ports[place][direction as usize] = limit;
        self.any = self.of_ports.iter().flatten().any(Option::is_some);
    }

    /// Charges so many bytes. Returns when the next may go, if that is later.
    fn charge(
        &self,
        now: Instant,
        port: PortId,
        direction: Direction,
        bytes: usize,
    ) -> Option<Instant> {
        let rate = self.of(port, direction)?;
        rate.charge(now, bytes as u64);
        Some(rate.next()).filter(|at| *at > now)
    }
}

impl Engine<'_> {
    /// The limit of [`Self::set_rate_limit`].
    #[must_use]
    pub fn rate_limit(&self, port: PortId, direction: Direction) -> Option<u64> {
        self.rates.of(port, direction).map(|rate| rate.bytes_per_s())
    }

    /// Likewise, for who counts bytes in the same bucket.
    #[must_use]
    pub fn shared_rate(&self, port: PortId, direction: Direction) -> Option<Arc<SharedRate>> {
        self.rates.of(port, direction).cloned()
    }

    /// Sets the rate of the VM of `port` in this direction, in bytes of frames per second; without
    /// a number there is no limit. A burst may be a millisecond's worth, or a frame. A rate in the
    /// place of another begins with what that one has counted.
    pub fn set_rate_limit(&mut self, port: PortId, direction: Direction, bytes_per_s: Option<u64>) {
        let before = self.rates.of(port, direction);
        let limit = bytes_per_s.filter(|_| self.vm(port).is_some());
        if limit.is_some() && limit == before.map(|rate| rate.bytes_per_s()) {
            return; // others count in it, too
        }
        let limit = limit.map(|bytes_per_s| match before {
            Some(before) => Arc::new(before.with_rate(bytes_per_s)),
            None => Arc::new(SharedRate::new(bytes_per_s)),
        });
        self.rates.set(port, direction, limit);
        self.rates.waiting.retain(|(_, other, way)| (*other, *way) != (port, direction));
        self.hold(port, direction, false);
    }

    /// A frame of H's own leaves for the VM of `port`, or from it. The next ones may have to wait.
    #[cold]
    pub(super) fn charge(&mut self, now: Instant, port: PortId, way: Direction, bytes: usize) {
        if let Some(until) = self.rates.charge(now, port, way, bytes) {
            self.hold(port, way, true);
            self.rates.waiting.push((until, port, way));
        }
    }

    /// Those that may go on do.
    #[cold]
    pub(super) fn lift_limits(&mut self, now: Instant) {
        while let Some(n) = self.rates.waiting.iter().position(|(at, ..)| *at <= now) {
            let (_, port, way) = self.rates.waiting.swap_remove(n);
            self.hold(port, way, false);
        }
    }

    /// The VM of `port` has gone, or one is there again: H sends nothing that it has handed over.
    pub(super) fn set_presence(&mut self, port: PortId, presence: Presence) {
        if presence != Presence::Awaited {
            self.walks.stop_waiting(port);
        }
        let Some(p) = self.port_mut(port) else { return };
        if std::mem::replace(&mut p.vm.presence, presence) != presence {
            self.settle_hold(port, Direction::FromGuest);
        }
    }

    /// Another reason that keeps the VM of `port` from sending, or from being sent to, has changed.
    pub(super) fn settle_hold(&mut self, port: PortId, way: Direction) {
        let waits = |(_, other, of): &(Instant, PortId, Direction)| (*other, *of) == (port, way);
        let is_limited = self.rates.waiting.iter().any(waits);
        self.hold(port, way, is_limited);
    }

    /// Holds this direction for a limit, or lifts only that hold.
    fn hold(&mut self, port: PortId, way: Direction, held: bool) {
        let has_old_ring = self.walks.any_of(Deed::RingReset, Some(port));
        let Some(p) = self.port_mut(port) else { return };
        if way == Direction::FromGuest {
            let held = held || p.vm.presence != Presence::Here;
            return self.common.out.departures.hold(port, held);
        }
        let held = held || has_old_ring;
        let lifted = std::mem::replace(&mut p.vm.deliveries_held, held) && !held;
        if lifted && !p.vm.ready.is_empty() && !std::mem::replace(&mut p.vm.announced, true) {
            self.common.ready_ports.push_back(port);
        }
    }

    /// The verdict on a frame of `len` bytes with this verdict under the limits; call it for each
    /// frame that passes.
    #[inline]
    pub fn limited(&mut self, now: Instant, from: PortId, len: usize, verdict: Verdict) -> Verdict {
        if self.rates.any() { self.police(now, from, len, verdict) } else { verdict }
    }

    #[cold]
    fn police(&mut self, now: Instant, from: PortId, len: usize, verdict: Verdict) -> Verdict {
        let to = match verdict {
            Verdict::Forward(out) => Some(out),
            Verdict::Flood => None, // of broadcasts only who sends them pays
            Verdict::Absorbed | Verdict::Drop(_) => return verdict,
        };
        let ends = [(Some(from), Direction::FromGuest), (to, Direction::ToGuest)];
        for (port, way) in ends.into_iter().filter_map(|(port, way)| Some((port?, way))) {
            if self.rates.of(port, way).is_some_and(|p| p.next() > now + LIMIT_DEBT_MAX) {
                self.count_drop(port, DropReason::RateLimit);
                return Verdict::Drop(DropReason::RateLimit);
            }
            let _ = self.rates.charge(now, port, way, len);
        }
        verdict
    }
}
