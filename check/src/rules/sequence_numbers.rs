//! INV-10, acceptable sequence numbers: every emitted segment lies in its receiver's window as the
//! receiver would compute it, except probes one below it and copies of bytes that are not
//! acknowledged.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.gated && o.tcp.flags.rst() && o.to == Side::R && h.is_open() {
        // RFC 5961: exact, or R only asks again. Later ones answer whatever place R then names.
        let r = h.end(Side::R);
        let exact = r.reset_to || r.reset || o.seq >= r.acked && o.seq <= r.end_to;
        let exact = exact || h.net_has_unseen(); // only R knows the end of that
        return if exact { Ok(()) } else { Err("an RST that R will not believe".to_owned()) };
    }
    if !o.gated || o.tcp.flags.rst() || o.tcp.flags.syn() || !h.is_open() {
        return Ok(());
    }
    let (receiver, source) = (h.end(o.to), h.end(o.to.other()));
    let end = o.end + u64::from(o.tcp.flags.fin());
    // The third lie in a row is believed: G may send past the host (SNOOP-42).
    if end > source.end.max(receiver.acked).max(receiver.lied) {
        return Err(format!("{} bytes to {:?} that nobody sent", end - source.end, o.to));
    }
    // R's segments with odd options pass, and G takes them before the host does; and while an ACK
    // waits for the ring G may take window back, and give it again. Only R knows the end of the
    // bytes that go past the host.
    let unseen = o.to == Side::R && h.net_has_unseen();
    if h.known.hostile[Side::R as usize] || h.known.shrinks || unseen {
        return Ok(());
    }
    let pure = o.tcp.payload_len == 0 && !o.tcp.flags.fin();
    let probe = o.seq + 1 == receiver.acked || receiver.acked_before.contains(&(o.seq + 1));
    // One that waited for the ring was made for a window that G has moved since.
    // Nor does the host know of an ACK that came beyond its window (seed 47690).
    let knows = if o.to == Side::R { receiver.acked.min(receiver.heard) } else { receiver.acked };
    if pure && o.seq < knows && !probe && !o.waited {
        return Err(format!("a pure ACK {} below its window", receiver.acked - o.seq));
    }
    Ok(())
}
