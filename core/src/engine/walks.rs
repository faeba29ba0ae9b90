//! What is done to each flow of a VM, or of all: to a few at once, to many in steps, so that nobody
//! waits for a million.
//!
//! A step is taken by every call of [`Engine::handle_timeout`] until the walk is over, and looks at
//! the next places of the table. Flows that come meanwhile may be met or not: what a walk does is
//! nothing to those that begin after it has.

use std::collections::VecDeque;
use std::ops::Range;

use crate::engine::Engine;
use crate::flow::table::{Class, FlowId};
use crate::limits::FLOWS_PER_STEP;
use crate::port::PortId;
use crate::tcp::flow::Why;
use crate::time::Instant;

/// What is done to each flow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Deed {
    /// What the ring held may be lost (LIFE-04).
    RingReset,
    /// No new promises.
    Drain,
    /// Its guest is gone: the remote is told (LIFE-05).
    End,
    /// And the flow goes, too.
    Remove,
}

#[derive(Clone, Copy, Debug)]
struct Walk {
    deed: Deed,
    /// Of all VMs, or of this one.
    port: Option<PortId>,
    /// The next place.
    at: usize,
}

/// Walks that are not over; the first goes on.
#[derive(Debug, Default)]
pub(super) struct Walks(VecDeque<Walk>);

impl Walks {
    #[inline]
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Whether this is being done to flows of a VM, or of any.
    pub(super) fn any_of(&self, deed: Deed, port: Option<PortId>) -> bool {
        let meets = |of: Option<PortId>| of.is_none() || port.is_none() || of == port;
        self.0.iter().any(|walk| walk.deed == deed && meets(walk.port))
    }

    /// One that is under way begins again.
    fn begin(&mut self, deed: Deed, port: Option<PortId>) {
        self.forget(port, |it| it == deed);
        self.0.push_back(Walk { deed, port, at: 0 });
    }

    pub(super) fn forget(&mut self, port: Option<PortId>, what: impl Fn(Deed) -> bool) {
        self.0.retain(|walk| walk.port != port || !what(walk.deed));
    }

    /// The next step, in a table with so many places.
    fn step(&mut self, places: usize) -> Option<(Walk, Range<usize>)> {
        let walk = self.0.front_mut()?;
        let range = walk.at..places.min(walk.at + FLOWS_PER_STEP as usize);
        walk.at = range.end;
        let walk = *walk;
        if range.end == places {
            self.0.pop_front();
        }
        Some((walk, range))
    }
}

impl Engine<'_> {
    /// Does this to all flows of a VM that are in the path, or begins to.
    pub(super) fn walk(&mut self, now: Instant, deed: Deed, port: PortId) {
        if self.flows.len_of_class(port.0, Class::Live) > FLOWS_PER_STEP {
            self.walks.begin(deed, Some(port));
        } else {
            self.for_each(port, Class::Live, |engine, id| engine.does(now, deed, id));
        }
    }

    /// Makes no new promises for any VM; see [`Self::drain`].
    pub fn drain_all(&mut self, now: Instant) {
        let in_steps = self.flows.len() > FLOWS_PER_STEP;
        for port in (0..).map(PortId).take(self.ports.len()) {
            let Some(p) = self.port_mut(port).filter(|p| p.config.is_guest()) else { continue };
            p.vm.draining = true;
            if !in_steps {
                self.walk(now, Deed::Drain, port);
            }
        }
        if in_steps {
            self.walks.begin(Deed::Drain, None);
        }
    }

    /// The VM behind `port` is about to be removed: begins to end its connections, if they are
    /// many. [`Self::remove_port`] has less to do when none of them [is left](Self::is_ending).
    pub fn prepare_removal(&mut self, port: PortId) {
        self.walks.forget(Some(port), |_| true);
        if self.flows.len_of_port(port.0) > FLOWS_PER_STEP {
            self.walks.begin(Deed::Remove, Some(port));
        }
    }

    /// Whether the VM behind `port` has gone, and not all its remotes know yet.
    #[must_use]
    pub fn is_ending(&self, port: PortId) -> bool {
        let of = |deed| self.walks.any_of(deed, Some(port));
        self.walks.any() && (of(Deed::End) || of(Deed::Remove))
    }

    /// Whether some VM is being drained, and not all of its flows know that yet.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.walks.any_of(Deed::Drain, None)
    }

    #[cold]
    pub(super) fn go_on_walking(&mut self, now: Instant) {
        let Some((walk, places)) = self.walks.step(self.flows.slots()) else { return };
        for place in places {
            if let Some((id, key, flow)) = self.flows.at(place)
                && walk.port.is_none_or(|port| port.0 == key.port)
                && (flow.is_live() || walk.deed == Deed::Remove)
            {
                self.does(now, walk.deed, id);
            }
        }
    }

    pub(super) fn does(&mut self, now: Instant, deed: Deed, id: FlowId) {
        self.with_flow(now, id, |flow, cx| match deed {
            Deed::RingReset => flow.on_ring_reset(cx),
            Deed::Drain => {
                flow.drain(Why::Operator);
                flow.settle_drain(cx);
            }
            Deed::Remove if !flow.is_live() => {}
            Deed::End | Deed::Remove => flow.on_guest_gone(cx),
        });
        if deed == Deed::Remove {
            self.remove_flow(id);
        }
    }
}
