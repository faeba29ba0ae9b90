//! INV-01, stream integrity R to G: G gets R's bytes, unchanged.

use super::Ensure;
use crate::history::{History, Side, offset};
use crate::out::Out;

/// Every byte on its way to G is the one R wrote in that place.
pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to == Side::G { bytes_right(h, o) } else { Ok(()) }
}

/// The same for either direction.
pub(crate) fn bytes_right(h: &History, o: &Out<'_>) -> Ensure {
    let Some(streams) = h.streams else { return Ok(()) };
    if o.is_keepalive(h) {
        return Ok(());
    }
    let wrong = streams[o.to.other() as usize].first_difference(offset(o.seq), o.payload);
    match wrong.filter(|_| o.tcp.payload_len > 0 && h.is_open() && o.gated) {
        Some(at) => Err(format!("byte {at} of the stream was changed")),
        None => Ok(()),
    }
}
