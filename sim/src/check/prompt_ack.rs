//! PROMPT-ACK (SNOOP-06, SNOOP-07): R never waits longer for an ACK than with G alone on a perfect
//! host, plus a bound.
//!
//! The twin acknowledges in-order data when G has run and seen it. A flow with offload is held to
//! more: whatever came in order and below the edge that R was shown is acknowledged within
//! [`WITHIN`] of its coming, whether G runs or not; and what G has acknowledged itself, its FIN
//! included, is within the same time. Each segment that lies behind a hole is answered by an ACK
//! of its own within that time, for R counts them (RFC 5681 section 4.2). Of two captures this
//! cannot be judged: they do not say which flow is with offload while it is silent.

use std::collections::VecDeque;

use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use super::history::{History, Side};
use super::out::{In, Out};

/// The longest an ACK may wait (SNOOP-07), and no more.
const WITHIN: Duration = Duration::from_millis(10);

/// What R is owed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Waiting {
    /// Since when, and what it had been told then.
    since: Option<(Instant, u64)>,
    /// When each segment came behind a hole that has not been answered.
    behind_hole: VecDeque<Instant>,
}

/// A segment came in, and is in the history.
pub(super) fn on_in(h: &mut History, s: &In<'_>) {
    let r = h.end(Side::R);
    let behind = s.end > s.seq + 1 && s.seq > h.in_order() && s.end <= r.edge_to;
    let sure = s.counts && s.ack == r.acked && s.ack <= h.end(Side::G).end && r.fin.is_none();
    if s.from == Side::R && behind && sure && s.tcp.options.understood() && h.is_twinned() {
        h.quality.waiting.behind_hole.push_back(s.at);
    }
}

/// `o` has left, and is not yet in the history.
pub(super) fn after_out(h: &mut History, o: &Out<'_>) {
    if o.to == Side::R {
        h.quality.waiting.behind_hole.pop_front();
    }
}

pub(super) fn on_step(h: &mut History, now: Instant) -> Ensure {
    if !h.is_twinned() {
        h.quality.waiting.behind_hole.clear();
    }
    let oldest = h.quality.waiting.behind_hole.front();
    if oldest.is_some_and(|at| now.since(*at) > WITHIN) {
        return Err("a segment behind a hole was not answered".to_owned());
    }
    let r = h.end(Side::R);
    let taken = h.in_order().min(r.edge_to).max(h.end(Side::G).acked);
    // Nobody answers a probe for a guest that is long silent, nor takes its octet (INV-19).
    let probe = taken == r.ack_to + 1 && taken > h.end(Side::G).acked;
    if !h.is_twinned() || probe || taken <= r.ack_to {
        h.quality.waiting.since = None;
        return Ok(());
    }
    let told = r.ack_to;
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
