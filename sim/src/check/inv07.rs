//! INV-07, ACK numbers that the host emits never decrease, in either direction.

use super::Ensure;
use super::history::{History, Out};

pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ack) = o.ack.filter(|_| o.gated && !o.tcp.flags.rst()) else { return Ok(()) };
    let before = h.end(o.to).ack_to;
    if ack < before {
        return Err(format!("ACK {} bytes back, to {:?}", before - ack, o.to));
    }
    Ok(())
}
