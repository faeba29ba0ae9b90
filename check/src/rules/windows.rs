//! WINDOW: the window that R is shown, besides that its edge never moves left (INV-05).
//!
//! - A flow with offload does not hold R back while G itself shows room (SNOOP-09, SNOOP-34): R has
//!   less than half of G's window left, while G shows two segments more, for no longer than
//!   [`WITHIN`], unless the VM has no budget to spare. If the VM has little, R is not without
//!   window. The twin would show it at once. A flow grows only while as much as it has itself stays
//!   spare for others (INV-20), and takes budget that others give back with G's next ACK. That ACK
//!   arrives, because the host holds bytes for G.
//! - The edge moves by a segment, or by the effect of rounding up to the field's unit, and not by
//!   small steps (RFC 9293 section 3.8.6.2.2; SNOOP-08).
//! - A window update, which acknowledges nothing new, is sent once more if R stays silent
//!   (SNOOP-34) and the worker has a processor, because it may have been lost. A window in a
//!   keepalive of G, or in data that R has, does not count: R answers it and does not look at its
//!   window (RFC 9293 section 3.10.7.4).
//!
//! With two captures the second is judged; the others need to know that a flow is with offload.

use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use super::{Ensure, PAGE_BYTES};
use crate::guest_clock::GuestClock;
use crate::history::{History, Side};
use crate::out::{In, Out};

/// R knows G's window by then.
const WITHIN: Duration = Duration::from_millis(50);
/// An update is repeated after 200 ms; a timer may be a little late.
const REPEATED_WITHIN: Duration = Duration::from_millis(250);
/// A segment, where a smaller one would do.
const SEGMENT: u64 = 1460;
/// The most a flow takes by itself (SNOOP-39), less a segment and rounding.
const HELD_MAX: u64 = 4 << 20;
/// A flow may follow G's window if its VM has several of it to spare.
const SPARE: u64 = 4;
/// See [`SPARE`], for small windows.
const SPARE_LEAST: u64 = 1 << 20;
/// Pages besides those that a flow's window fills: one, for it begins within a page, and two to
/// grow by, of which others keep one.
const PAGES_BESIDES: u64 = 3;

/// See the module doc.
#[derive(Clone, Debug, Default)]
pub(crate) struct Windows {
    /// Since when R has had no window although G shows one.
    shut_since: Option<Instant>,
    /// Since when it has had less than half of G's although the VM has budget to spare.
    small_since: Option<Instant>,
    /// When R sent the first segment with data since then.
    asked_at: Option<Instant>,
    /// A window update left and may have been lost.
    updated_at: Option<Instant>,
    /// The newest segment to R was one of the host's.
    gated: bool,
    /// When the flow last had no budget to grow.
    stunted_at: Instant,
}

impl History {
    /// The VM's budget has room for a window of so many bytes, and for one to grow by.
    pub(crate) fn may_reserve(&self, bytes: u64) -> bool {
        self.spare >= (bytes.div_ceil(PAGE_BYTES) + PAGES_BESIDES) * PAGE_BYTES
    }
}

pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    if s.from == Side::R && (s.tcp.payload_len > 0 || s.tcp.flags.fin()) {
        h.quality.windows.updated_at = None;
    }
    if s.from == Side::R && s.tcp.payload_len > 1 && s.counts {
        h.quality.windows.asked_at.get_or_insert(s.at);
    }
}

pub(crate) fn on_step(h: &mut History, now: Instant, clock: &GuestClock) -> Ensure {
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    // R repeats bytes that the host refused: urgent data behind others.
    let next = h.in_order().min(r.ack_to.max(g.acked));
    let on = h.is_twinned() && h.state == Some(State::On);
    let early = !h.quality.late.is_late; // else R is shown G's own edge, once each
    let window = g.edge.saturating_sub(g.acked);
    let roomy = now.since(h.cramped_at) > WITHIN && window <= HELD_MAX / 2;
    let stunted = !h.may_reserve(r.edge_to.saturating_sub(g.acked));
    let stunted_at = if stunted { now } else { h.quality.windows.stunted_at };
    let grows = h.heard_from_guest > stunted_at.max(h.cramped_at);
    let shut = r.edge_to < next + SEGMENT && roomy && grows;
    let small = r.edge_to < next + window / 2 && h.spare > SPARE * window + SPARE_LEAST;
    // G itself could not say less than a unit of its window field more.
    let unit = 1 << h.shift(Side::G);
    let more = g.edge > r.edge_to + unit.max(2 * h.segment_for_guest().0.max(SEGMENT));
    let may = on && more && r.fin.is_none();
    let windows = &mut h.quality.windows;
    windows.stunted_at = stunted_at;
    if !(on && early) {
        windows.updated_at = None;
    }
    let served = now.since(clock.worker_runs_since()) > WITHIN;
    if served && windows.updated_at.is_some_and(|at| now.since(at) > REPEATED_WITHIN) {
        return Err("a window update was not repeated to a silent R".to_owned());
    }
    let since = |what: &mut Option<Instant>, holds: bool| {
        *what = what.or(Some(now)).filter(|_| holds);
        *what
    };
    let shut_since = since(&mut windows.shut_since, may && shut);
    let small_since = since(&mut windows.small_since, may && small);
    if !(may && (shut || small)) {
        windows.asked_at = None;
    }
    // An R that sends nothing does not want more, as far as is known.
    let wanted_since = small_since.zip(windows.asked_at).map(|(since, asked)| since.max(asked));
    let late = |since: Option<Instant>| since.is_some_and(|at| now.since(at) > WITHIN);
    match late(shut_since) || late(wanted_since) {
        true => Err("R is held back although G shows a window".to_owned()),
        false => Ok(()),
    }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let unit = 1 << h.shift(Side::G);
    let before = h.end(Side::R).edge_to;
    let on = h.was_on && h.is_on() && !h.interrupted && h.quality.windows.gated;
    // A field that is full cannot say more; and a flow that leaves the path shows G's own edge.
    let full = o.tcp.window == u16::MAX || o.edge == h.end(Side::G).edge;
    let quiet = !on || o.tcp.flags.rst() || full || h.quality.late.is_late;
    if o.to != Side::R || !o.gated || quiet || o.edge <= before {
        return Ok(());
    }
    // G itself has acknowledged what lies beyond: it passed uncut (seed 80698), and no edge lies
    // below what is acknowledged.
    if o.ack == Some(o.edge) && o.edge <= h.end(Side::G).acked {
        return Ok(());
    }
    let grown = o.edge - before;
    let least = h.segment_for_guest().1.saturating_sub(unit);
    match (unit..least).contains(&grown) {
        true => Err(format!("the edge moved by {grown} bytes, in units of {unit}")),
        false => Ok(()),
    }
}

/// `o` has left, and is not yet in the history.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    if o.to != Side::R || o.tcp.flags.rst() {
        return;
    }
    let before = h.end(Side::R).edge_to;
    let was_stuck = before < h.in_order() + SEGMENT;
    // R causes a new acknowledgement again by itself: it repeats its bytes. An answer R would ask
    // for again.
    let asked = h.quality.news.is_asked();
    let only_opens = o.is_pure() && o.ack == Some(h.end(Side::R).ack_to) && !asked;
    let opens = only_opens && o.gated && was_stuck && o.edge >= before + SEGMENT;
    let acked = h.end(Side::R).acked;
    let is_read = o.seq >= acked || o.end + u64::from(o.tcp.flags.fin()) > acked;
    let on = h.is_twinned() && h.state == Some(State::On);
    let windows = &mut h.quality.windows;
    windows.gated = o.gated;
    let waits = windows.updated_at.filter(|_| on);
    windows.updated_at = match waits {
        Some(at) => (!is_read && o.gated).then_some(at),
        None => (opens && on).then_some(o.at),
    };
}
