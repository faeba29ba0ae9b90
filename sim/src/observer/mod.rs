//! The rules of `nightporter-check`, with the plan's knowledge: the owner of a frame, the result of
//! applications at the end, and the faults that excuse it.

mod ends;
pub mod excuse;
mod flows;

use std::collections::BTreeSet;

use nightporter_check::event::Event;
use nightporter_check::frame::Frame;
use nightporter_check::history::{History, Side};
use nightporter_check::observer::HostView;
use nightporter_check::reach::Reach;
use nightporter_check::rule::{Rule, Violation};
use nightporter_check::tap::{Tap, Tapped};
use nightporter_check::weight::Weight;
use nightporter_core::time::Instant;

use crate::plan::{Machine, Plan};
use crate::stack::{Complaint, EndReport};
use excuse::{Excuses, MIGRATED, Moments};
pub use flows::flow_of;

/// Watches a run of a plan.
#[derive(Debug)]
pub struct Observer {
    watched: nightporter_check::observer::Observer<Plan>,
    moments: Moments,
    excuses: Excuses,
}

impl Observer {
    /// Watches a run of `plan` from its beginning.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        Self {
            watched: nightporter_check::observer::Observer::new(plan.clone()),
            moments: Moments::default(),
            excuses: Excuses::default(),
        }
    }

    /// A frame passed a tap.
    ///
    /// # Errors
    /// The first rule that does not hold.
    pub fn on_frame(&mut self, t: &Tapped<'_>) -> Result<(), Violation> {
        self.watched.on_frame(t)
    }

    /// A guest has taken `frames` from its ring.
    pub fn on_seen(&mut self, now: Instant, guest: u16, frames: usize) {
        self.watched.on_seen(now, guest, frames);
    }

    /// Guest `g` sent a frame past the host, or through it in fragments.
    pub fn on_past(&mut self, g: u16, bytes: &[u8]) {
        self.watched.on_past(g, bytes);
    }

    /// A frame on its way to `tap` is cut, because it is not taken there whole.
    pub fn on_cut(&mut self, tap: Tap, whole: &[u8], pieces: &[Frame]) {
        self.watched.on_cut(tap, whole, pieces);
    }

    /// The host has done one step: one frame with all that follows, a batch end, a timeout or a
    /// command.
    ///
    /// # Errors
    /// The first rule that does not hold.
    pub fn on_step(&mut self, now: Instant, view: &HostView<'_, '_>) -> Result<(), Violation> {
        self.watched.on_step(now, view)
    }

    /// Something else happened.
    pub fn on_event(&mut self, now: Instant, event: Event) {
        let moments = &mut self.moments;
        match event {
            Event::Crashed => {
                moments.all.push((now, None, "the daemon died"));
                moments.betrayed.extend(self.watched.flows().filter_map(betrayed));
            }
            Event::Restarted { arena } => moments.arena_lost |= !arena,
            Event::Killed(g, port, remote_port) => {
                let is_it = |h: &&History| {
                    (h.name.guest, h.name.guest_port, h.name.remote_port) == (g, port, remote_port)
                };
                moments.killed.extend(self.watched.flows().filter(is_it).filter_map(|h| h.conn));
            }
            Event::Rebooted(g) => moments.all.push((now, Some(g), "guest rebooted")),
            Event::Destroyed(g) => moments.all.push((now, Some(g), "guest destroyed")),
            Event::Migrated(g) => moments.all.push((now, Some(g), MIGRATED)),
            _ => {}
        }
        self.watched.on_event(now, event);
    }

    /// Which event met a flow in which state.
    #[must_use]
    pub fn reach(&self) -> &Reach {
        self.watched.reach()
    }

    /// The excuses.
    #[must_use]
    pub fn excuses(&self) -> &Excuses {
        &self.excuses
    }

    /// The amount that the run carried.
    #[must_use]
    pub fn weight(&self) -> &Weight {
        self.watched.weight()
    }

    /// The run is over: every connection has ended, or time is up (`ended` says which).
    ///
    /// # Errors
    /// The first rule that does not hold.
    pub fn on_end(
        &mut self,
        ended: bool,
        ends: &[EndReport],
        complaints: &[(Machine, Complaint)],
    ) -> Result<(), Violation> {
        self.watched.on_end();
        let plan = self.watched.setting();
        let flows = || self.watched.flows();
        let (moments, excuses) = (&mut self.moments, &mut self.excuses);
        let of_host = |rule| move |what| Violation { rule, what, flow: None };
        let arena_lost = moments.arena_lost;
        let lost = |h: &&History| (h.broken_by_crash || h.opaque) && arena_lost;
        let lost = flows().filter(lost).filter_map(|h| h.conn).collect();
        ends::bytes_to_guest(plan, ends, &lost).map_err(of_host(Rule::BytesToGuest))?;
        ends::bytes_to_net(plan, ends, &lost).map_err(of_host(Rule::BytesToNet))?;
        ends::one_endpoint(plan, ends, complaints, moments, excuses)
            .map_err(of_host(Rule::OneEndpoint))?;
        for h in flows() {
            ends::fail_stop(plan, h, ends, moments).map_err(|what| Violation {
                rule: Rule::FailStop,
                what,
                flow: Some(h.name),
            })?;
        }
        let answered = |h: &History| h.conn.filter(|_| h.is_answered());
        let earlier = flows().flat_map(|h| h.earlier.iter().copied());
        let answered: BTreeSet<usize> = flows().filter_map(answered).chain(earlier).collect();
        moments.unanswered = (0..plan.conns.len()).filter(|c| !answered.contains(c)).collect();
        moments.given_up = flows().filter(|h| h.was_given_up).filter_map(|h| h.conn).collect();
        ends::liveness(plan, ended, ends, moments, excuses).map_err(|(conn, what)| {
            let flow = flows().find(|h| h.conn == Some(conn)).map(|h| h.name);
            Violation { rule: Rule::Liveness, what, flow }
        })
    }
}

/// The verdict where frames can pass the host, so that only machines know: no byte is lost or
/// wrong, nothing hangs, and nothing is reset without a cause.
///
/// # Errors
/// The first rule that does not hold.
pub fn of_machines(plan: &Plan, ended: bool, ends: &[EndReport]) -> Result<(), Violation> {
    let of_host = |rule| move |what| Violation { rule, what, flow: None };
    let lost = BTreeSet::new();
    ends::bytes_to_guest(plan, ends, &lost).map_err(of_host(Rule::BytesToGuest))?;
    ends::bytes_to_net(plan, ends, &lost).map_err(of_host(Rule::BytesToNet))?;
    ends::unseen_liveness(plan, ended, ends).map_err(of_host(Rule::Liveness))
}

/// The connection of a flow with promised or stored bytes when the daemon died.
fn betrayed(h: &History) -> Option<usize> {
    // Bytes that were stored and not yet acknowledged are in the record, too.
    let stored = h.end(Side::R).end > h.end(Side::G).acked;
    let is_bound = h.is_of_host && h.state.is_some(); // both its ends are reset
    let stored = h.was_on && h.state.is_some() && stored;
    let betrayed = h.opaque || h.promised().is_some() || stored || is_bound;
    h.conn.filter(|_| betrayed)
}
