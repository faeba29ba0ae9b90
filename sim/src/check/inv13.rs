//! INV-13, delivery fits: new bytes for G end at or before G's newest right edge.

use super::Ensure;
use super::history::{History, Out, Side};

pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to != Side::G || !o.gated || o.tcp.flags.rst() || !h.is_open() {
        return Ok(());
    }
    let g = h.end(Side::G);
    let fin = o.tcp.flags.fin();
    let mut end = o.end + u64::from(fin);
    if h.hostile[Side::R as usize] {
        // What it sends with options that nobody understands passes, wherever it lies.
        end = end.min(h.end(Side::R).ack_to);
    }
    if (o.tcp.payload_len > 0 || fin) && end > g.end_to && end > g.edge {
        return Err(format!("new bytes {} beyond G's edge", end - g.edge));
    }
    Ok(())
}
