//! PARKED (SNOOP-39, INV-05): an idle flow that owes nothing gives its place back, if G itself has
//! room for the bytes that R may send after a pause. No other flow does.

use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::history::{History, Side};

/// After a second (`T_PARK`), counted from the end of the one in which it was last heard of; and a
/// timer may be late.
const WITHIN: Duration = Duration::from_secs(4);
/// Segments that R may send after a pause (RFC 5681 section 4.1, RFC 6928).
const RESTART_SEGMENTS: u64 = 10;
/// A first window, into which jumbo segments fit except for one.
const FIRST_WINDOW: u64 = 1 << 16;

/// Between two steps of the host; `is_parked`: the flow has no place in the store.
pub(crate) fn on_step(h: &mut History, now: Instant, is_parked: bool) -> Ensure {
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    let (least, most) = h.segment_for_guest();
    let (least, most) = (least.min(most), least.max(most));
    let next = h.in_order();
    let restart =
        |segment: u64| (RESTART_SEGMENTS * segment).min(FIRST_WINDOW.saturating_sub(segment));
    let room = |segment: u64| g.edge >= r.edge_to.min(next + restart(segment));
    let known = h.is_twinned() && h.state == Some(State::On);
    // G gets R's acknowledgement when its ring has room (seed 42934).
    let owes_guest = g.acked < next || g.ack_to < r.acked;
    let owes = r.ack_to < next || owes_guest || h.quality.waiting.has_beyond(next);
    let gives = is_parked && !h.quality.parked && !room(least);
    let may_park = room(most);
    if known && gives {
        return Err("a flow gave its place back although G has no room".to_owned());
    }
    let idle = h.quality.waiting.idle_for(now) > WITHIN;
    let ends = h.ends.iter().any(|e| e.fin.is_some());
    h.quality.parked = is_parked;
    match known && !is_parked && idle && !owes && !ends && may_park {
        true => Err("an idle flow keeps its place".to_owned()),
        false => Ok(()),
    }
}
