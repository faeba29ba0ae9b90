//! ECONOMY (SNOOP-29): G is not given more bytes again than its twin would be. A remote whose timer
//! ran out sends the first segment, and the rest as G acknowledges, twice as much as each ACK
//! covers (RFC 5681 section 3.1). So besides that first segment, bytes that G never asked for are
//! not offered again by more than that, or [`BYTES_MAX`], before G answers. Bytes that an ACK
//! allows may be sent later, when the ring has room: in seed 3077 an ACK of 173,062 bytes allowed
//! 346,124, and its 318,560 came as 251,952 and 66,608, between which G repeated its ACK. The
//! account ends when G gets new bytes. RECOVERY judges how often a timer may run out: a silent G is
//! offered its segment for hours. G may ask by duplicates or SACK for as much as it lost, and a new
//! ring has lost all of it.
//!
//! Nor is G given smaller pieces: while more bytes are there, G gets a full segment, or half of its
//! window (SNOOP-27; RFC 9293 section 3.8.6.2.1), or as much as its ring has room for.

use super::Ensure;
use crate::history::{BASE, History, Side};
use crate::out::{In, Out};

/// A super-segment.
const BYTES_MAX: u64 = 64 * 1024;

/// Bytes of a frame that would just fit where room is made for a full frame.
const FRAME: u64 = 1400;

/// Bytes offered again since G's last segment, the segments of timers not counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Again {
    bytes: u64,
    /// G's newest ACK.
    acked: u64,
    /// Twice the bytes that G has acknowledged since it was offered anything new, minus the bytes
    /// offered again.
    allowed: u64,
}

pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    if s.from == Side::G {
        let (acked, before) = (h.end(Side::G).acked, h.quality.again);
        let moved = acked - before.acked.clamp(BASE, acked);
        let allowed = before.allowed.saturating_sub(before.bytes) + 2 * moved;
        h.quality.again = Again { bytes: 0, acked, allowed };
    }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let (g, r) = (h.end(Side::G), h.end(Side::R));
    let fresh = o.is_stored() && h.is_twinned() && !o.waited && o.seq >= g.end_to;
    let window = g.edge.saturating_sub(g.acked);
    let small =
        (o.end - o.seq) < h.segment_for_guest().1.min(FRAME) && 2 * (o.end - o.seq) < window;
    if fresh && small && o.end < h.in_order().min(r.ack_to) {
        let left = h.in_order().min(r.ack_to) - o.end;
        return Err(format!(
            "{} bytes in a segment for G, and {left} more are there",
            o.end - o.seq
        ));
    }
    let bytes = h.quality.again.bytes + repeated(h, o);
    match bytes > BYTES_MAX.max(h.quality.again.allowed) && repeated(h, o) > 0 {
        true => Err(format!("{bytes} bytes offered again to a G that asked for none")),
        false => Ok(()),
    }
}

/// `o` has left, and is not yet in the history.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    h.quality.again.bytes += repeated(h, o);
    if o.is_stored() && o.end > h.end(Side::G).end_to {
        h.quality.again.allowed = 0;
    }
}

/// Bytes of `o` that G was offered before and did not ask for, the segment of a timer not counted.
fn repeated(h: &History, o: &Out<'_>) -> u64 {
    if !o.is_stored() || !h.is_twinned() || h.is_asked_for() {
        return 0;
    }
    let g = h.end(Side::G);
    let is_first = (o.seq..o.end).contains(&g.acked);
    let of_timer = if is_first { h.segment_for_guest().0 } else { 0 };
    g.end_to.min(o.end).saturating_sub(o.seq + of_timer)
}
