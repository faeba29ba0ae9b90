//! INV-11, acceptable ACK numbers: none for bytes that its receiver has not sent.
//!
//! G judges its own ACKs: those of a hostile R may be forwarded to it unchanged.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ack) = o.ack.filter(|_| o.gated && h.is_open()) else { return Ok(()) };
    let sent = h.end(o.to).end;
    if ack > sent && !o.tcp.flags.rst() && !is_for_g_to_judge(h, o, ack) {
        return Err(format!("ACK of {} bytes that {:?} never sent", ack - sent, o.to));
    }
    Ok(())
}

/// R itself says so, and lies.
pub(crate) fn is_for_g_to_judge(h: &History, o: &Out<'_>, ack: u64) -> bool {
    let r = h.end(Side::R);
    // Not even G has sent it, or had when the frame was made.
    let lie = ack <= r.lied && (ack > h.end(Side::G).end || o.waited);
    o.to == Side::G && (lie || h.known.hostile[Side::R as usize] && ack <= r.acked)
}
