//! INV-15, content is immutable: every copy of a byte that is emitted is the same.
//!
//! For streams of known content INV-01 and INV-02 are stricter. This rule is for ends that send
//! different bytes in the same place.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    // G's segments leave unchanged: two copies that differ are its own doing.
    let stored = o.gated && o.to == Side::G && !o.is_verbatim() && !o.is_keepalive(h);
    if h.streams.is_some() || !stored || !h.is_open() {
        return Ok(());
    }
    // Bytes that G has acknowledged may be repeated unchanged, and be dropped by G.
    let unacked = (o.seq..).zip(o.payload).filter(|(at, _)| *at >= h.end(Side::G).acked);
    for (at, byte) in unacked {
        if h.copy_of(o.to, at).is_some_and(|first| first != *byte) {
            return Err("two copies of a byte differ".to_owned());
        }
    }
    Ok(())
}
