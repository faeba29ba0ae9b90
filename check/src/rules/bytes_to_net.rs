//! INV-02, stream integrity G to R: R gets G's bytes, unchanged.

use super::{Ensure, bytes_to_guest};
use crate::history::{History, Side};
use crate::out::Out;

/// Every byte on its way to R is the one G wrote in that place.
pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to == Side::R { bytes_to_guest::bytes_right(h, o) } else { Ok(()) }
}
