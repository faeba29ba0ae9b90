//! INV-14, wire conformance. Without congestion offload G's own congestion control is the wire's,
//! and the host must not add to it: it emits only data toward R that G has just sent, once each.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to != Side::R || o.tcp.payload_len == 0 || h.known.floods {
        return Ok(());
    }
    let (sent, emitted) = (h.end(Side::G).bytes, h.end(Side::R).bytes_to);
    let after = emitted + u64::from(o.tcp.payload_len);
    if after > sent {
        return Err(format!("{after} bytes on the wire, G has sent {sent}"));
    }
    Ok(())
}
