//! ECONOMY (SNOOP-29): G is not given more again than its twin would be. A remote whose timer ran
//! out sends what is first, and the rest as G acknowledges (RFC 5681 section 3.1): what G never
//! asked for is not offered again by more than [`BYTES_MAX`] before G says anything. What G asks
//! for by duplicates or SACK may be as much as it lost, and a new ring has lost all of it.

use super::Ensure;
use super::history::{History, Side};
use super::out::{In, Out};

/// A super-segment.
const BYTES_MAX: u64 = 64 * 1024;

/// Bytes offered again since G said anything.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Again {
    bytes: u64,
}

pub(super) fn on_in(h: &mut History, s: &In<'_>) {
    if s.from == Side::G {
        h.quality.again.bytes = 0;
    }
}

pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let bytes = h.quality.again.bytes + repeated(h, o);
    match bytes > BYTES_MAX && repeated(h, o) > 0 {
        true => Err(format!("{bytes} bytes offered again to a G that asked for none")),
        false => Ok(()),
    }
}

/// `o` has left, and is not yet in the history.
pub(super) fn after_out(h: &mut History, o: &Out<'_>) {
    h.quality.again.bytes += repeated(h, o);
}

fn repeated(h: &History, o: &Out<'_>) -> u64 {
    let counts = o.is_stored() && h.is_twinned() && !h.is_asked_for();
    if counts { h.end(Side::G).end_to.min(o.end).saturating_sub(o.seq) } else { 0 }
}
