//! INV-05, the right edge shown to R never moves left.
//!
//! That holds too when a flow leaves the path and G shows its own edge again, unless G is one that
//! takes window back, or shows R its own past the host already. With window scaling an edge that
//! may not grow cannot be written for every ACK; it may then show up to one unit less
//! (ARCHITECTURE, "Decisions"). Toward G the edge is R's own.

use super::Ensure;
use crate::history::{BASE, History, Side};
use crate::out::Out;
use crate::wire::TcpFlags;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let shown = h.end(Side::R).edge_max;
    if o.to == Side::G && o.gated && !o.tcp.flags.rst() && h.is_open() && o.edge > shown {
        return Err(format!("G is shown {} bytes more than R has", o.edge - shown));
    }
    let unit = 1 << h.shift(Side::R);
    let honest =
        h.net_keeps_window && h.hostile == [false; 2] && h.was_on && !h.interrupted && !h.past;
    let to_guest = o.to == Side::G && o.gated && !o.waited && o.ack.is_some() && h.is_open();
    // Of two of R's segments that say the same the later one counts, also if the path has swapped
    // them (seed 81296).
    let before = h.end(Side::G).edge_to.min(h.end(Side::R).newest.1);
    if to_guest && honest && !o.tcp.flags.rst() && o.edge + unit <= before {
        let left = before - o.edge;
        return Err(format!("G is shown an edge {left} bytes to the left, and R did not move it"));
    }
    let handshake = o.tcp.flags.intersects(TcpFlags::SYN.union(TcpFlags::RST));
    let closed = h.ends.iter().all(|e| e.fin.is_some());
    let reset = h.ends.iter().any(|e| e.reset || e.reset_to);
    let left = !h.was_on || h.interrupted || h.broken || h.shrinks || h.forgotten || h.past;
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
