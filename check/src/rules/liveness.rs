//! INV-18, liveness: after all has healed everything ends, held bytes are offered until they are
//! taken, and the host makes no more than two packets for each that it gets.

use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;

/// Packets a flow may cause besides, for timers: probes, local retransmission, window updates.
const FOR_TIMERS: u64 = 400;

/// Bytes of the pieces that count (RFC 9293 section 3.7.1: no receiver has to take more).
const PIECE: u64 = 536;

/// R knows a window that G opened so long ago.
const UPDATE_WITHIN: Duration = Duration::from_millis(20);
/// R is waiting for a window that is smaller, and has one that is larger than three of these.
const SEGMENT: u64 = 1460;

/// Segments that are on their way, or due, when a guest stops running (SNOOP-31: its time does not
/// pass).
const REPEATS_IN_PAUSE: u32 = 3;

/// A guest that runs and has a window is offered the bytes held for it, again and again, within
/// this.
const OFFERED_WITHIN: Duration = Duration::from_secs(30);

/// Bytes promised to R are offered to G until G has them (SNOOP-29).
pub(crate) fn on_step(h: &mut History, now: Instant) -> Ensure {
    let g = h.end(Side::G);
    let takes = g.edge > g.acked && h.paused_since.is_none() && !h.hostile[Side::G as usize];
    let on = matches!(h.state, Some(State::On | State::Drain)) && !h.opaque && !h.offline;
    if !(on && takes && h.promised().is_some()) {
        h.owed_since = None;
        return Ok(());
    }
    let since = *h.owed_since.get_or_insert(now);
    if now.since(since) > OFFERED_WITHIN {
        return Err("held bytes were not offered to a guest that takes them".to_owned());
    }
    Ok(())
}

/// No packet storm; and R need not ask for a window that G has opened (SNOOP-34).
pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    // A super-segment may leave in pieces.
    let in_pieces = |side: Side| h.end(side).frames + h.end(side).bytes / PIECE;
    let received = in_pieces(Side::R) + in_pieces(Side::G);
    let made = h.end(Side::R).frames_to + h.end(Side::G).frames_to;
    if made > 2 * received + FOR_TIMERS && !h.deaf {
        return Err(format!("{made} packets out for what {received} bring in"));
    }
    let r = h.end(Side::R);
    let stuck = r.edge_to.saturating_sub(r.ack_to) < SEGMENT && o.edge > r.edge_to + 3 * SEGMENT;
    let roomy = o.at.since(h.cramped_at) > UPDATE_WITHIN;
    let silent = o.at.since(h.heard_from_guest) > UPDATE_WITHIN && h.paused_since.is_none();
    if h.repeats_in_pause > REPEATS_IN_PAUSE {
        return Err("a paused guest was sent the same again and again".to_owned());
    }
    // It may have grown by the budget that other flows gave back since then (INV-20).
    let freed = h.spare_when_heard.max(h.spare) > h.spare_told;
    if o.to == Side::R
        && o.gated
        && h.asks
        && !freed
        && h.state == Some(State::On)
        && roomy
        && stuck
        && silent
    {
        return Err("R had to ask for a window that was open".to_owned());
    }
    Ok(())
}
