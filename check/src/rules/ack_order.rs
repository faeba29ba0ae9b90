//! INV-07, ACK numbers that the host emits never decrease, in either direction.
//!
//! G's SYN-ACK, which it repeats until it has seen R's answer, passes unchanged: R answers it with
//! an ACK that completes G's handshake. And R's own ACKs for bytes that G sends past the host are
//! forwarded to G before the host acknowledges as much.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::TcpFlags;

const SYN_OR_RST: TcpFlags = TcpFlags::SYN.union(TcpFlags::RST);

/// The newest ACK of R that was forwarded to G for bytes that went past the host.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckOrder {
    unseen_to_guest: u64,
}

/// A frame has left and was judged.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    let sent = h.end(Side::R).end_to;
    if let Some(ack) = o.ack.filter(|&ack| o.to == Side::G && h.past && ack > sent) {
        h.rules.ack_order.unseen_to_guest = ack;
    }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ack) = o.ack.filter(|_| o.gated && !o.tcp.flags.intersects(SYN_OR_RST)) else {
        return Ok(());
    };
    let before = h.end(o.to).ack_to;
    let unseen = o.to == Side::G && before == h.rules.ack_order.unseen_to_guest;
    if ack < before && !unseen && !h.is_about_earlier(o) {
        return Err(format!("ACK {} bytes back, to {:?}", before - ack, o.to));
    }
    Ok(())
}
