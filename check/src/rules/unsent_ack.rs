//! INV-12, no unsent ACK leaks: an ACK for bytes that were not yet emitted to R never reaches G.

use super::Ensure;
use super::ack_numbers::is_for_g_to_judge;
use crate::history::{History, Side};
use crate::out::Out;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to != Side::G || !o.gated || o.tcp.flags.rst() || !h.is_open() || !h.was_on {
        return Ok(());
    }
    // Bytes that went past the host were on some wire.
    let past = if h.past { h.end(Side::G).end } else { 0 };
    let on_wire = h.end(Side::R).end_to.max(past);
    let r = h.end(Side::R);
    if h.known.floods
        && h.is_judged()
        && !h.past
        && o.ack.is_some_and(|ack| ack > r.acked.max(r.lied))
    {
        return Err("an ACK to G of what R has not acknowledged".to_owned()); // end to end
    }
    match o.ack {
        Some(ack) if ack > on_wire && !is_for_g_to_judge(h, o, ack) => {
            Err(format!("ACK of {} bytes that were not on the wire", ack - on_wire))
        }
        _ => Ok(()),
    }
}
