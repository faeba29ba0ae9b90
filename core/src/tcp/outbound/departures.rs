//! Whose turn it is to send to R, and who waits for a time: what the senders of all flows share.

use std::collections::VecDeque;

use crate::flow::table::FlowId;
use crate::flow::timer::PaceWheel;
use crate::time::Instant;

/// Flows with a sender toward R, in the order of their turns.
#[derive(Debug)]
pub(crate) struct Departures {
    /// They may have something to send, each once.
    due: VecDeque<FlowId>,
    /// When others may: after a timeout, or when the pace lets more go.
    wheel: PaceWheel,
}

impl Departures {
    /// Nobody sends.
    pub(crate) fn new(now: Instant) -> Self {
        Self { due: VecDeque::new(), wheel: PaceWheel::new(now) }
    }

    /// Somebody may have something to send.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        !self.due.is_empty()
    }

    /// Whose turn it is.
    pub(crate) fn pop(&mut self) -> Option<FlowId> {
        self.due.pop_front()
    }

    /// It is this flow's turn behind all others'.
    pub(super) fn push(&mut self, id: FlowId) {
        self.due.push_back(id);
    }

    /// The flow is to be woken at `at`, or earlier.
    pub(super) fn wake(&mut self, id: FlowId, at: Instant) {
        self.wheel.schedule(id, at);
    }

    /// The next flow that was to be woken by `now`.
    pub(crate) fn expired(&mut self, now: Instant) -> Option<FlowId> {
        self.wheel.expired(now)
    }

    /// Nobody is to be woken.
    #[inline]
    pub(crate) fn is_asleep(&self) -> bool {
        self.wheel.is_empty()
    }

    /// When one is to be woken.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.wheel.next()
    }

    /// The entry goes. Its turn is skipped when it comes.
    pub(crate) fn cancel(&mut self, id: FlowId) {
        self.wheel.cancel(id);
    }
}
