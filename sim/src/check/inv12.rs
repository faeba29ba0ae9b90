//! INV-12, no unsent ACK leaks: an ACK for what was not yet emitted to R never reaches G.

use super::Ensure;
use super::history::{History, Side};
use super::out::Out;

pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to != Side::G || !o.gated || o.tcp.flags.rst() || !h.is_open() || !h.was_on {
        return Ok(());
    }
    let on_wire = h.end(Side::R).end_to;
    match o.ack {
        Some(ack) if ack > on_wire => {
            Err(format!("ACK of {} bytes that were not on the wire", ack - on_wire))
        }
        _ => Ok(()),
    }
}
