//! INV-05, the right edge shown to R never moves left.
//!
//! That also holds when a flow leaves the path and G shows its own edge again, unless G takes
//! window back, or already shows R its own edge past the host. With window scaling an edge that may
//! not grow cannot be written for every ACK; it may then show up to one unit less (ARCHITECTURE,
//! "Decisions"). Toward G the edge is R's own. With congestion offload the host may lend a mebibyte
//! more (FLOOD-14), and keeps its promise for the room that G has used.

use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::history::{BASE, End, History, Side};
use crate::out::Out;
use crate::wire::TcpFlags;

/// The host may show G so much more than R shows.
const AHEAD: u64 = 1 << 20;
/// A host that has asked an R without room, or repeated to one that is silent, five times at
/// intervals that double, may leave it to its guest (FLOOD-12, FLOOD-23, FLOOD-32).
const STOOD_LONG: Duration = Duration::from_secs(5);
/// So may one whose guest takes nothing (SNOOP-32).
const GUEST_REFUSES: Duration = Duration::from_secs(120);

/// Reasons why an edge may move left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edges {
    /// R's newest acknowledgement of G, since when it has acknowledged no more, and that it had
    /// acknowledged all that G had sent by then.
    stands: (u64, Instant, bool),
    /// The host has sent for G since G was last shown a window.
    lent_by_sender: bool,
    /// G's newest acknowledgement of R, and when it came, or R had nothing under way.
    taken: (u64, Instant),
    /// G was silent for so long that the host forgot the flow, and the edge it showed; or it took
    /// nothing for so long that a flow may have left which owed R nothing (SNOOP-42).
    forgotten: bool,
}

impl Default for Edges {
    fn default() -> Self {
        let (stands, taken) = ((BASE, Instant::ZERO, true), (BASE, Instant::ZERO));
        Self { stands, lent_by_sender: false, taken, forgotten: false }
    }
}

/// R may have acknowledged more, or G have sent the first that R has not.
pub(crate) fn on_in(h: &mut History, at: Instant) {
    let (acked, end) = (h.end(Side::R).acked, h.end(Side::G).end);
    let (before, since, had_all) = h.rules.right_edge.stands;
    let stands = acked == before && !had_all;
    h.rules.right_edge.stands = (acked, if stands { since } else { at }, end <= acked);
    let (taken, sent) = (h.end(Side::G).acked, h.end(Side::R).end);
    let edges = &mut h.rules.right_edge;
    edges.forgotten |= at.since(edges.taken.1) >= GUEST_REFUSES;
    if taken > edges.taken.0 || sent <= taken {
        edges.taken = (taken, at);
    }
}

/// The host has forgotten the flow.
pub(crate) const fn on_forgotten(h: &mut History) {
    h.rules.right_edge.forgotten = true;
}

/// G was shown a window.
pub(crate) const fn on_shown(h: &mut History) {
    h.rules.right_edge.lent_by_sender |= h.is_relayed;
}

/// Between two steps of the host.
pub(crate) const fn on_step(h: &mut History) {
    h.rules.right_edge.lent_by_sender &= h.is_relayed;
}

/// R has acknowledged none of G's bytes for so long.
pub(crate) fn has_stood_long(h: &History, at: Instant) -> bool {
    at.since(h.rules.right_edge.stands.1) >= STOOD_LONG
}

/// G keeps the room that it has used, even if R never showed it.
fn used(g: &End, r: &End) -> u64 {
    if g.edge_to > r.edge_max { g.end } else { BASE }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let ahead = if h.known.floods { AHEAD + (1 << h.shift(Side::R)) } else { 0 };
    let shown = h.end(Side::R).edge_max + ahead;
    if o.to == Side::G && o.gated && !o.tcp.flags.rst() && h.is_open() && o.edge > shown {
        return Err(format!("G is shown {} bytes more than it may be", o.edge - shown));
    }
    let unit = 1 << h.shift(Side::R);
    // A flow is handed back at once, whatever G has used, if R acknowledges nothing for long, and
    // if it claims again and again what it was not sent: G may have sent it past the host
    // (FLOOD-08).
    let at_once = h.known.floods && (has_stood_long(h, o.at) || h.end(Side::R).lied > BASE);
    let honest = h.known.net_keeps_window && !at_once;
    let honest = honest && h.known.hostile == [false; 2] && h.was_on && !h.interrupted && !h.past;
    let to_guest = o.to == Side::G && o.gated && !o.waited && o.ack.is_some() && h.is_open();
    // Of two of R's segments that say the same the later one counts, also if the path has swapped
    // them (seed 81296). Where what was lent has gone, R's edge counts as it was when G last saw
    // one (seeds 3074, 3430).
    let (g, r) = (h.end(Side::G), h.end(Side::R));
    // Lent room lasts as long as the host goes on to send for G.
    let kept = if h.rules.right_edge.lent_by_sender {
        u64::MAX
    } else {
        r.newest.1.min(g.told_of).max(used(g, r))
    };
    let before = g.edge_to.min(kept);
    if to_guest && honest && !o.tcp.flags.rst() && o.edge + unit <= before {
        let left = before - o.edge;
        return Err(format!("G is shown an edge {left} bytes to the left, and R did not move it"));
    }
    let handshake = o.tcp.flags.intersects(TcpFlags::SYN.union(TcpFlags::RST));
    let closed = h.ends.iter().all(|e| e.fin.is_some());
    let reset = h.ends.iter().any(|e| e.reset || e.reset_to);
    let left = !h.was_on
        || h.interrupted
        || h.broken
        || h.known.shrinks
        || h.rules.right_edge.forgotten
        || h.past;
    // A third lie in a row is believed: the flow leaves at once, whatever it has shown (SNOOP-42).
    let left = left || h.end(Side::R).lied > BASE;
    let left = !o.gated && (left || closed || reset);
    if o.to != Side::R || left || o.ack.is_none() || handshake || h.is_about_earlier(o) {
        return Ok(());
    }
    let before = h.end(Side::R).edge_to;
    let unit = 1 << h.shift(Side::G);
    if o.edge + unit - 1 < before {
        return Err(format!("right edge {} bytes to the left", before - o.edge));
    }
    Ok(())
}
