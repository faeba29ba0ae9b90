//! INV-13, delivery fits: new bytes for G end at or before G's newest right edge.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to != Side::G || !o.gated || o.tcp.flags.rst() || o.is_verbatim() || !h.is_open() {
        return Ok(());
    }
    let g = h.end(Side::G);
    let fin = o.tcp.flags.fin();
    let end = o.end + u64::from(fin);
    // While they wait for the ring a G that does so may take window back.
    let edge = if h.known.shrinks { g.edge_max } else { g.edge };
    if (o.tcp.payload_len > 0 || fin) && end > g.end_to && end > edge {
        return Err(format!("new bytes {} beyond G's edge", end - edge));
    }
    Ok(())
}
