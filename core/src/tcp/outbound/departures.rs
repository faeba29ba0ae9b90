//! The common state of all flows' senders toward R: whose turn it is, and the senders that wait for
//! a time.
//!
//! **Turns** (FLOOD-16). VMs take turns by deficit: each sends about [`TURN_BYTES`], whatever its
//! frames are. If a frame was too long for a turn, the excess is taken off the next turn (Shreedhar
//! and Varghese, "Efficient fair queuing using deficit round-robin", 1996). So a VM with a thousand
//! flows gets no more than one with a single flow. The flows of a VM take turns in the same way, so
//! a flow of short segments gets as much as one of super-segments. The turn of a flow is over when
//! it has nothing to send while another flow sends. The rest of that turn, or a debt beyond it, is
//! forgotten then.

use std::collections::VecDeque;

use crate::flow::table::FlowId;
use crate::flow::timer::PaceWheel;
use crate::limits::TURN_BYTES;
use crate::port::PortId;
use crate::time::Instant;

/// The flows of one VM that may have something to send, in the order of their turns.
#[derive(Debug, Default)]
struct Line {
    /// Each once, with the bytes that it may send before the next one does.
    due: VecDeque<(FlowId, i64)>,
    /// The flow that sent last, and the bytes that it may still send: it goes on.
    turn: Option<(FlowId, i64)>,
    /// Bytes that the VM may send before the next one does.
    credit: i64,
    /// It is in `turns`.
    listed: bool,
    /// It has no turns for now.
    held: bool,
}

impl Line {
    /// The flow whose turn it is.
    fn pop(&mut self) -> Option<FlowId> {
        loop {
            let (id, credit) = self.due.pop_front()?;
            if credit > 0 {
                self.turn = Some((id, credit));
                return Some(id);
            }
            self.due.push_back((id, credit + TURN_BYTES));
        }
    }

    /// It is this flow's turn still, or behind those of all others.
    fn push(&mut self, id: FlowId) {
        let of_turn = self.turn.filter(|(of, _)| *of == id);
        match of_turn.map_or(0, |(_, credit)| credit) {
            credit @ 1.. => self.due.push_front((id, credit)),
            debt => self.due.push_back((id, debt + TURN_BYTES)),
        }
    }

    fn charge(&mut self, bytes: i64) {
        self.credit -= bytes;
        if let Some((_, credit)) = &mut self.turn {
            *credit -= bytes;
        }
    }
}

/// Flows with a sender toward R.
#[derive(Debug)]
pub(crate) struct Departures {
    /// By the number of the VM's port.
    lines: Vec<Line>,
    /// VMs in the order of their turns.
    turns: VecDeque<u16>,
    /// When others may send: after a timeout, or when the pace lets more go.
    wheel: PaceWheel,
}

impl Departures {
    /// No flow sends.
    pub(crate) fn new(now: Instant) -> Self {
        Self { lines: vec![], turns: VecDeque::new(), wheel: PaceWheel::new(now) }
    }

    /// Whether a flow may have something to send.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        !self.turns.is_empty()
    }

    /// The flow whose turn it is.
    pub(crate) fn pop(&mut self) -> Option<FlowId> {
        loop {
            let port = *self.turns.front()?;
            let line = &mut self.lines[usize::from(port)];
            if line.due.is_empty() || line.held {
                line.listed = false;
                line.credit = line.credit.min(0); // who pauses saves nothing up
                self.turns.pop_front();
            } else if line.credit > 0 {
                return line.pop();
            } else {
                line.credit += TURN_BYTES;
                self.turns.rotate_left(1);
            }
        }
    }

    /// A frame of `bytes` bytes leaves for the flow whose turn it is. Call before the flow asks for
    /// more.
    pub(in crate::tcp) fn on_sent(&mut self, port: u16, bytes: usize) {
        if let Some(line) = self.lines.get_mut(usize::from(port)) {
            line.charge(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    /// The flow may have something to send.
    pub(super) fn push(&mut self, port: u16, id: FlowId) {
        let place = usize::from(port);
        if place >= self.lines.len() {
            self.lines.resize_with(place + 1, Line::default);
        }
        let line = &mut self.lines[place];
        line.push(id);
        if !line.held && !core::mem::replace(&mut line.listed, true) {
            self.turns.push_back(port);
        }
    }

    /// The VM sends nothing from now on, or again: its rate is limited.
    pub(crate) fn hold(&mut self, port: PortId, held: bool) {
        let Some(line) = self.lines.get_mut(usize::from(port.0)) else { return };
        line.held = held;
        if !held && !line.due.is_empty() && !core::mem::replace(&mut line.listed, true) {
            self.turns.push_back(port.0);
        }
    }

    /// The flow is to be woken at `at`, or earlier.
    pub(super) fn wake(&mut self, id: FlowId, at: Instant) {
        self.wheel.schedule(id, at);
    }

    /// The next flow that was to be woken by `now`.
    pub(crate) fn expired(&mut self, now: Instant) -> Option<FlowId> {
        self.wheel.expired(now)
    }

    /// Whether no flow waits for a time.
    #[inline]
    pub(crate) fn is_asleep(&self) -> bool {
        self.wheel.is_empty()
    }

    /// The time of the next wake-up.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.wheel.next()
    }

    /// H does not send for the flow any more: nothing wakes it, and it has no turn.
    pub(crate) fn leave(&mut self, port: PortId, id: FlowId) {
        self.wheel.cancel(id);
        let Some(line) = self.lines.get_mut(usize::from(port.0)) else { return };
        line.due.retain(|(other, _)| *other != id);
        line.turn = line.turn.filter(|(other, _)| *other != id);
    }

    /// The entry goes. Its turn is skipped when it comes.
    pub(crate) fn cancel(&mut self, id: FlowId) {
        self.wheel.cancel(id);
    }
}
