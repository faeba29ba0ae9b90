//! INV-11, acceptable ACK numbers: none of what its receiver has not sent.

use super::Ensure;
use super::history::History;
use super::out::Out;

pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ack) = o.ack.filter(|_| o.gated && h.is_open()) else { return Ok(()) };
    let sent = h.end(o.to).end;
    if ack > sent && !o.tcp.flags.rst() {
        return Err(format!("ACK of {} bytes that {:?} never sent", ack - sent, o.to));
    }
    Ok(())
}
