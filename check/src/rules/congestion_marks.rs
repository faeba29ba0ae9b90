//! INV-24, congestion marks are conserved: a CE mark on a segment that the host takes over shows
//! as ECE on every ACK to R until R answers with CWR, and not again as CE to G.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::TcpFlags;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if !o.gated || o.tcp.flags.rst() || !h.ecn {
        return Ok(());
    }
    let missing = h.ce_at.is_some_and(|end| o.ack.is_some_and(|ack| ack >= end));
    if o.to == Side::R && missing && !o.tcp.flags.contains(TcpFlags::ECE) {
        return Err("an ACK without the ECE that a CE mark asks for".to_owned());
    }
    if o.to == Side::R && !h.ce_seen && o.tcp.flags.contains(TcpFlags::ECE) && !h.interrupted {
        return Err("an ECE that no CE mark asks for".to_owned());
    }
    if o.to == Side::G && o.ip.tos & 3 == 3 && o.tcp.payload_len > 0 {
        return Err("a CE mark reached G a second time".to_owned());
    }
    Ok(())
}
