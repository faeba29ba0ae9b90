//! INV-02, stream integrity G to R: what R gets is what G wrote, byte by byte, and at the end all.

use std::collections::BTreeSet;

use super::history::{History, Side};
use super::out::Out;
use super::{Ensure, inv01};
use crate::plan::{Machine, Plan};
use crate::stack::EndReport;

/// Every byte on its way to R is the one G wrote in that place.
pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to == Side::R { inv01::bytes_right(h, o) } else { Ok(()) }
}

/// What a remote's application read.
pub(super) fn on_end(plan: &Plan, ends: &[EndReport], lost: &BTreeSet<usize>) -> Ensure {
    inv01::applications(plan, ends, lost, |machine| matches!(machine, Machine::Remote(_)))
}
