//! PROMPT-ACK (SNOOP-06, SNOOP-07): R never waits longer for an ACK than with G alone on a perfect
//! host, plus a bound.
//!
//! The twin acknowledges in-order data when G has run and seen it. A flow with offload has stricter
//! bounds. Bytes that the host must hold are acknowledged within [`WITHIN`] of their arrival, or of
//! the arrival of the last byte before them, whether G runs or not. Bytes that G has acknowledged
//! itself, its FIN included, are acknowledged within the same time. An ACK covers two segments that
//! arrived in order at most (RFC 9293 section 3.8.6.3), and with SACK as many ranges behind the
//! hole as there is room for. Each segment behind a hole is answered by an ACK of its own within
//! that time, because R counts them (RFC 5681 section 4.2).
//!
//! The host must hold the bytes of a segment that G would take, with five exceptions. R repeats
//! these segments, or G acknowledges them itself:
//! - bytes beyond the edge that R had been shown when they came (SNOOP-02);
//! - a segment whose ACK is older than a whole window of R (SNOOP-03; RFC 5961 section 5.2);
//! - a segment that the host does not understand, which passes to G (SNOOP-13, COM-04);
//! - a segment that begins another range when there are [`RANGES_MAX`] out of order (SNOOP-10);
//! - the data of a flow that was idle for [`PARKED_AFTER`], and so has given its place back, while
//!   its VM's budget has none for it, or G has yet to acknowledge what passed to it (SNOOP-39).
//!
//! A flow that acknowledges late (LIFE-13) owes R only what G has acknowledged itself.
//!
//! And the host does not acknowledge for a G whose clock has gone half round since its last segment
//! (RFC 7323 section 5.5).
//!
//! With two captures this cannot be judged, because they do not show which flow is with offload
//! while it is silent.

use std::collections::{BTreeMap, VecDeque};

use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::history::{History, PAWS_AGE, Side};
use crate::out::{In, Out, is_foreign};
use crate::ranges::Ranges;

/// The longest an ACK may wait (SNOOP-07), and no more.
const WITHIN: Duration = Duration::from_millis(10);
/// Segments that one ACK may speak for (SNOOP-07).
const SEGMENTS_MAX: usize = 2;
/// SNOOP-10. Segments that the host need not take, and may have taken, count too, each as a range
/// of its own (seed 85347).
const RANGES_MAX: usize = 64;
/// An idle flow gives its place back (`T_PARK`).
const PARKED_AFTER: Duration = Duration::from_secs(1);

/// The acknowledgements that R is owed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Waiting {
    /// Since when, and the ACK that it had got then.
    since: Option<(Instant, u64)>,
    /// When each segment came behind a hole that has not been answered.
    behind_hole: VecDeque<Instant>,
    /// Ends of segments that came in order, with nothing behind a hole, and are not acknowledged.
    plain: VecDeque<u64>,
    /// R's bytes that the host must hold.
    held: Ranges,
    /// First place and end of segments of R beyond those that it may hold.
    maybe: BTreeMap<u64, u64>,
    /// When the flow last had a segment, of either end; `None` before the first.
    heard_at: Option<Instant>,
    /// It may have no place, for it was idle and has acknowledged nothing early since.
    parked: bool,
}

impl Waiting {
    /// The flow had time to give its place back by `at`, or did so earlier.
    fn may_be_parked(&self, at: Instant) -> bool {
        self.parked || self.heard_at.is_some_and(|heard| at.since(heard) >= PARKED_AFTER)
    }

    /// How long the flow had no segment.
    pub(super) fn idle_for(&self, now: Instant) -> Duration {
        self.heard_at.map_or(Duration::ZERO, |at| now.since(at))
    }

    /// Something may be held behind a hole at `next`.
    pub(super) fn has_beyond(&self, next: u64) -> bool {
        self.held.above(next) > 0 || self.maybe.values().any(|end| *end > next)
    }

    /// The host may hold a byte of `[from, to)`.
    pub(super) fn may_have_of(&self, from: u64, to: u64) -> bool {
        let may = self.maybe.iter().any(|(at, end)| *at < to && *end > from);
        may || self.must_have_of(from, to)
    }

    /// The host must hold a byte of `[from, to)`.
    pub(super) fn must_have_of(&self, from: u64, to: u64) -> bool {
        self.held.touches(from + 1, to.saturating_sub(1))
    }

    /// The host must hold `[from, to)`.
    pub(super) fn holds(&self, from: u64, to: u64) -> bool {
        self.held.end_of_run(from) >= to
    }
}

/// Any whole segment, also one in another's name.
pub(crate) fn on_any(h: &mut History, at: Instant) {
    let on = h.is_on(); // nobody parks during the handshake (seed 83219)
    let waiting = &mut h.quality.waiting;
    waiting.parked = on && waiting.may_be_parked(at);
    waiting.heard_at = Some(at);
}

/// A segment came in, and is in the history.
pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    if s.from == Side::G {
        return;
    }
    let r = h.end(Side::R);
    let behind = s.end > s.seq + 1 && s.seq > h.in_order() && s.end <= r.edge_to;
    let sure = s.counts && s.ack == r.acked && s.ack <= h.end(Side::G).end && r.fin.is_none();
    let early = !h.quality.late.is_late;
    if behind && sure && s.tcp.options.understood() && h.is_twinned() && early {
        h.quality.waiting.behind_hole.push_back(s.at);
    }
    hold(h, s);
}

/// Notes which bytes of R's segment the host must hold.
fn hold(h: &mut History, s: &In<'_>) {
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    let old = h.is_long_acked(s.ack);
    let idle = h.quality.waiting.may_be_parked(s.at);
    let no_place = !h.may_reserve(r.edge_to.saturating_sub(g.acked)) || g.end_to > g.acked;
    let refused = !s.counts || old || is_foreign(s.ip, s.tcp) || idle && no_place;
    if !h.is_on() {
        return; // data before the handshake is over lies in order
    }
    let next = r.ack_to.max(g.acked);
    let (edge, from) = (r.edge_to, s.seq.max(next));
    let to = s.end.min(edge);
    let Waiting { held, maybe, plain, .. } = &mut h.quality.waiting;
    held.forget_below(next);
    maybe.retain(|_, end| *end > next);
    let joins = from <= held.end_of_run(next) || held.touches(from, to);
    let has_room = joins || held.len() + maybe.len() < RANGES_MAX;
    if refused || from >= to || !has_room {
        if s.end > from && from < edge {
            let end = maybe.entry(from).or_default();
            *end = s.end.max(*end);
        }
        return;
    }
    let in_order = s.seq == held.end_of_run(next) && s.end == to && held.above(s.seq) == 0;
    held.insert(from, to);
    maybe.retain(|at, end| held.end_of_run(*at) < *end);
    if in_order {
        plain.push_back(s.end);
    }
}

/// An ACK covers what it should, and not more.
pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ack) = o.ack.filter(|_| o.to == Side::R && o.gated && h.is_twinned()) else {
        return Ok(());
    };
    if h.quality.late.was_or_is_late() {
        return Ok(());
    }
    let waiting = &h.quality.waiting;
    let count = waiting.plain.iter().filter(|end| **end <= ack).count();
    if count > SEGMENTS_MAX && h.state == Some(State::On) && ack > h.end(Side::G).acked {
        return Err(format!("one ACK for {count} segments"));
    }
    let room = if h.timestamps() { 3 } else { 4 };
    let ranges = h.acceptable.runs_with(&waiting.held, ack).min(room);
    let said = o.tcp.options.sack.as_slice().len();
    match o.is_pure() && h.sack() && said < ranges {
        true => Err(format!("{said} SACK blocks, and {ranges} ranges are there")),
        false => Ok(()),
    }
}

/// `o` has left, and is not yet in the history.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    let early = o.ack.is_some_and(|ack| ack > h.end(Side::G).acked);
    if o.to == Side::R {
        let waiting = &mut h.quality.waiting;
        waiting.behind_hole.pop_front();
        waiting.parked &= !early;
        waiting.plain.retain(|end| o.ack.is_none_or(|ack| *end > ack));
    }
}

pub(crate) fn on_step(h: &mut History, now: Instant) -> Ensure {
    let outdated = h.timestamps() && now.since(h.heard_from_guest) >= PAWS_AGE;
    let late = h.quality.late.is_late;
    if !h.is_twinned() || outdated || late {
        h.quality.waiting.behind_hole.clear();
        h.quality.waiting.plain.clear();
    }
    let oldest = h.quality.waiting.behind_hole.front();
    if oldest.is_some_and(|at| now.since(*at) > WITHIN) {
        return Err("a segment behind a hole was not answered".to_owned());
    }
    let (told, acked) = (h.end(Side::R).ack_to, h.end(Side::G).acked);
    let held = h.quality.waiting.held.end_of_run(told.max(acked));
    // Bytes that were SACKed to R are acknowledged at once.
    let ends_late = if h.quality.late.may_wait(acked) { told } else { acked };
    let taken = if late { ends_late } else { held };
    // A probe is not answered for a guest that is long silent, and its octet is not taken (INV-19).
    let probe = taken == told + 1 && taken > acked;
    if !h.is_twinned() || probe || taken <= told || outdated {
        h.quality.waiting.since = None;
        return Ok(());
    }
    let since = &mut h.quality.waiting.since;
    match *since {
        Some((at, before)) if before == told => {
            let waited = now.since(at);
            if waited > WITHIN {
                let ms = waited.as_millis();
                return Err(format!("{} bytes not acknowledged for {ms} ms", taken - told));
            }
        }
        _ => *since = Some((now, told)),
    }
    Ok(())
}
