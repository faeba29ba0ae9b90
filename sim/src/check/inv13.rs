//! INV-13, delivery fits: new bytes for G end at or before G's newest right edge.

use super::Ensure;
use super::history::{History, Out, Side};

pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to != Side::G || !o.gated || o.tcp.payload_len == 0 || !h.is_open() {
        return Ok(());
    }
    let g = h.end(Side::G);
    if o.end > g.end_to && o.end > g.edge {
        return Err(format!("new bytes {} beyond G's edge", o.end - g.edge));
    }
    Ok(())
}
