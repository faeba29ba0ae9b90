//! PROMPT-ACK (SNOOP-06, SNOOP-07): R never waits longer for an ACK than with G alone on a perfect
//! host, plus a bound.
//!
//! The twin acknowledges in-order data when G has run and seen it. A flow with offload is held to
//! more: whatever came in order and below the edge that R was shown is acknowledged within
//! [`WITHIN`] of its coming, whether G runs or not; and what G has acknowledged itself, its FIN
//! included, is within the same time. Of two captures this cannot be judged: they do not say
//! which flow is with offload while it is silent.

use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use super::history::{History, Side};

/// The longest an ACK may wait (SNOOP-07), and no more.
const WITHIN: Duration = Duration::from_millis(10);

/// What R is owed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Waiting {
    /// Since when, and what it had been told then.
    since: Option<(Instant, u64)>,
}

pub(super) fn on_step(h: &mut History, now: Instant) -> Ensure {
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
