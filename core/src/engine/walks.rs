//! Actions on every flow of a VM, or on all flows: on a few at once, on many in steps, so that no
//! other work waits for a million flows.
//!
//! Every call of [`Engine::handle_timeout`] takes a step until the walk is over; a step looks at
//! the next places of the table. The walk may meet flows that begin meanwhile or not, and has no
//! effect on those that begin after it has.

use std::collections::VecDeque;
use std::ops::Range;

use crate::engine::{Direction, Engine};
use crate::flow::table::{Class, FlowId};
use crate::limits::T_AWAITED;
use crate::port::PortId;
use crate::tcp::Passed;
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::vm::Presence;
use crate::time::Instant;

/// The action on each flow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Deed {
    /// Frames in the ring may be lost (LIFE-04). Nothing of the store goes into the new ring before
    /// all flows know that.
    RingReset,
    /// Out of the path, acknowledging late until then (LIFE-08).
    Drain,
    /// R's bytes are acknowledged late (LIFE-12).
    Late,
    /// Early again, unless for another reason; a drain of the operator may have been called off.
    Early,
    /// The guest speaks for the first time since its driver began anew (LIFE-04b).
    Spoke,
    /// Frames have passed the daemon by (LIFE-17).
    PassedPlain(Passed),
    /// Its wire is taken away.
    Detached,
    /// Nobody will translate any more: both sides are reset (ACC-08).
    EndTranslated,
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
#[derive(Debug)]
pub(super) struct Walks {
    list: VecDeque<Walk>,
    /// Flows that are no matter at once, and places of a step.
    flows_per_step: u32,
    /// Connections of a VM that has gone end.
    ends: bool,
    /// VMs that may come back, and since when they are waited for; the first is the earliest.
    awaited: VecDeque<(Instant, PortId)>,
}

impl Walks {
    pub(super) fn new(flows_per_step: u32) -> Self {
        Self {
            list: VecDeque::new(),
            flows_per_step: flows_per_step.max(1),
            ends: false,
            awaited: VecDeque::new(),
        }
    }

    /// Walks, or VMs that are waited for.
    #[inline]
    pub(super) fn any(&self) -> bool {
        !self.list.is_empty() || !self.awaited.is_empty()
    }

    /// When there is something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        let now = (!self.list.is_empty()).then_some(Instant::ZERO);
        now.or_else(|| Some(self.awaited.front()?.0 + T_AWAITED))
    }

    /// The VM behind `port` has gone, and may come back.
    pub(super) fn wait(&mut self, since: Instant, port: PortId) {
        self.stop_waiting(port);
        self.awaited.push_back((since, port));
    }

    /// It has come back, another has, or it has gone for good.
    pub(super) fn stop_waiting(&mut self, port: PortId) {
        self.awaited.retain(|(_, other)| *other != port);
    }

    /// A VM that did not come back.
    pub(super) fn poll_given_up(&mut self, now: Instant) -> Option<PortId> {
        self.awaited.pop_front_if(|(since, _)| *since + T_AWAITED <= now).map(|(_, port)| port)
    }

    /// Whether this is being done to flows of a VM, or of any.
    pub(super) fn any_of(&self, deed: Deed, port: Option<PortId>) -> bool {
        let meets = |of: Option<PortId>| of.is_none() || port.is_none() || of == port;
        self.list.iter().any(|walk| walk.deed == deed && meets(walk.port))
    }

    /// One that is under way begins again.
    fn begin(&mut self, deed: Deed, port: Option<PortId>) {
        self.forget(port, |it| it == deed);
        self.list.push_back(Walk { deed, port, at: 0 });
    }

    pub(super) fn forget(&mut self, port: Option<PortId>, what: impl Fn(Deed) -> bool) {
        self.list.retain(|walk| walk.port != port || !what(walk.deed));
    }

    /// The next step, in a table with so many places.
    fn step(&mut self, places: usize) -> Option<(Walk, Range<usize>)> {
        let walk = self.list.front_mut()?;
        let range = walk.at..places.min(walk.at + self.flows_per_step as usize);
        walk.at = range.end;
        let walk = *walk;
        if range.end == places {
            self.list.pop_front();
        }
        Some((walk, range))
    }
}

impl Engine<'_> {
    /// Does this to all flows of a VM that are in the path, or begins to.
    pub(super) fn walk(&mut self, now: Instant, deed: Deed, port: PortId) {
        if self.flows.len_of_class(port.0, Class::Live) > self.walks.flows_per_step {
            self.walks.begin(deed, Some(port));
            self.settle_prediction();
            self.settle_hold(port, Direction::ToGuest);
        } else {
            self.for_each(port, Class::Live, |engine, id| engine.does(now, deed, id));
        }
    }

    /// Makes no new promises for any VM; see [`Self::drain`]. Flows that owe nothing stay in the
    /// path, but for those on a wire: the next process goes on with them
    /// ([`Self::handle_restart`]).
    pub fn drain_all(&mut self, now: Instant) {
        for port in (0..).map(PortId).take(self.ports.len()) {
            if let Some(p) = self.port_mut(port).filter(|p| p.config.is_guest()) {
                p.vm.draining = true;
                p.vm.stops = p.wire.is_none(); // on a wire nobody follows their numbers meanwhile
            }
        }
        self.walk_all(now, Deed::Drain);
    }

    /// Nobody goes on with connections that H has accepted: both sides of each are reset (ACC-08).
    /// G is owed its RST as it is owed bytes.
    pub fn end_translated(&mut self, now: Instant) {
        self.walk_all(now, Deed::EndTranslated);
    }

    /// Does this to all flows of all VMs that are in the path, or begins to.
    fn walk_all(&mut self, now: Instant, deed: Deed) {
        if self.flows.len() > self.walks.flows_per_step {
            return self.walks.begin(deed, None);
        }
        for port in (0..).map(PortId).take(self.ports.len()) {
            if self.port(port).is_some_and(|p| p.config.is_guest()) {
                self.walk(now, deed, port);
            }
        }
    }

    /// The VM behind `port` is about to be removed: begins to end its connections, if they are
    /// many. [`Self::remove_port`] has less to do when none of them [is left](Self::is_ending).
    pub fn prepare_removal(&mut self, port: PortId) {
        self.walks.forget(Some(port), |_| true);
        self.set_presence(port, Presence::Gone);
        if self.flows.len_of_port(port.0) > self.walks.flows_per_step {
            self.walks.begin(Deed::Remove, Some(port));
        }
        self.settle_prediction();
    }

    /// The VM behind `port` is about to be in other VLANs: begins to end its connections, if they
    /// are many, and takes on no others meanwhile. [`Self::set_guest`] has less to do when none of
    /// them [is left](Self::is_ending).
    pub fn prepare_move(&mut self, now: Instant, port: PortId) {
        if self.flows.len_of_class(port.0, Class::Live) > self.walks.flows_per_step {
            self.set_presence(port, Presence::Gone);
            self.walk(now, Deed::End, port);
        }
    }

    /// While connections of a VM that has gone end in steps, no segment takes the predicted path:
    /// who meets one that has not heard of it yet tells it (INV-19).
    pub(super) fn settle_prediction(&mut self) {
        let mut deeds = self.walks.list.iter().map(|walk| walk.deed);
        let ends = deeds.any(|deed| matches!(deed, Deed::End | Deed::Remove));
        if ends != std::mem::replace(&mut self.walks.ends, ends) {
            self.common.predicts = !ends;
        }
    }

    /// Whether the VM behind `port` has gone, and not all its remotes know yet.
    #[must_use]
    pub fn is_ending(&self, port: PortId) -> bool {
        let of = |deed| self.walks.any_of(deed, Some(port));
        self.walks.any() && (of(Deed::End) || of(Deed::Remove))
    }

    /// Whether some VM is being drained, and not all of its flows know that yet; or not all of them
    /// are reset.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        [Deed::Drain, Deed::EndTranslated].into_iter().any(|deed| self.walks.any_of(deed, None))
    }

    #[cold]
    pub(super) fn go_on_walking(&mut self, now: Instant) {
        while let Some(port) = self.walks.poll_given_up(now) {
            self.give_up(now, port);
        }
        let Some((walk, places)) = self.walks.step(self.flows.slots()) else { return };
        for place in places {
            if let Some((id, key, flow)) = self.flows.at(place)
                && walk.port.is_none_or(|port| port.0 == key.port)
                && (goes_on(flow) || walk.deed == Deed::Remove)
            {
                self.does(now, walk.deed, id);
            }
        }
        self.settle_prediction();
        if let Some(port) = walk.port {
            self.settle_hold(port, Direction::ToGuest);
            self.welcome_next(port);
        }
    }

    pub(super) fn does(&mut self, now: Instant, deed: Deed, id: FlowId) {
        self.with_flow(now, id, |flow, cx| match deed {
            Deed::RingReset => flow.on_ring_reset(cx),
            Deed::Drain => {
                flow.drain(Why::Operator);
                flow.settle_drain(cx);
            }
            Deed::Late => flow.acknowledge_late(),
            Deed::Early => flow.acknowledge_early(cx),
            Deed::Spoke => flow.on_guest_spoke(cx),
            Deed::PassedPlain(passed) => flow.on_passed_plain(cx, passed),
            Deed::Detached => flow.on_detached(cx),
            Deed::EndTranslated => flow.end_translated_by_operator(cx),
            Deed::Remove if !goes_on(flow) => {}
            Deed::End | Deed::Remove => flow.on_guest_gone(cx),
        });
        if deed == Deed::Remove {
            self.remove_flow(id);
        }
    }
}

/// It is in the path, or H edits its last frames.
fn goes_on(flow: &Flow) -> bool {
    flow.is_live() || flow.state() == State::Translated
}
