//! ENDINGS: a connection that ends for one end also ends for the other, and for the host.
//!
//! - An RST of G leaves for R at once (SNOOP-16). An RST of R that waits behind bytes reaches G
//!   when G has run for [`WAITS_MAX`] at the latest (SNOOP-15).
//! - A flow whose two FINs are acknowledged, as both ends know, is out of the path (LIFE-03).

use nightporter_core::limits::T_RST;
use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::guest_clock::GuestClock;
use crate::history::{History, Side};

/// A turn of the worker.
const WITHIN: Duration = Duration::from_millis(10);
/// T_rst, and the lag of the host's clock of a guest behind ours: of the time until it next looks
/// whether the guest took a frame, up to a tenth of a second or as long as the guest has shown no
/// life, it counts no more than `RUNNING_CREDIT_MAX`.
const WAITS_MAX: Duration = Duration::from_nanos(T_RST.as_nanos() + 5_000_000_000);

/// The end that was seen, and when.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Endings {
    /// G has reset it.
    reset_since: Option<Instant>,
    /// How long G had run when R reset it.
    net_reset: Option<Duration>,
    /// Both FINs are acknowledged.
    closed_since: Option<Instant>,
    /// R's RST lay where the host must believe it.
    is_exact: bool,
}

/// R has reset the connection, with this number.
pub(crate) fn on_reset(h: &mut History, seq: u64) {
    h.quality.endings.is_exact |= seq == h.acceptable.end() && seq == h.end(Side::R).ack_to;
}

/// Between two steps of the host.
pub(crate) fn on_step(h: &mut History, now: Instant, clock: &GuestClock) -> Ensure {
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    let known =
        h.known.hostile == [false; 2] && !h.opaque && !h.past && !h.interrupted && !h.broken;
    let known = known && h.was_on && h.is_open() && !h.killed;
    let e = h.quality.endings;
    let since = |is_so: bool, before: Option<Instant>| {
        if known && is_so { before.or(Some(now)) } else { None }
    };
    let first = e.reset_since.is_some() || h.state == Some(State::Abort);
    let untold = g.reset && first && !r.reset && !r.reset_to;
    let reset_since = since(untold, e.reset_since);
    let fins = r.fin.is_some_and(|fin| g.acked > fin && r.ack_to > fin)
        && g.fin.is_some_and(|fin| r.acked > fin && g.ack_to > fin);
    let closed = fins && !r.reset && !g.reset && matches!(h.state, Some(State::On | State::Drain));
    let closed_since = since(closed, e.closed_since);
    let live = matches!(h.state, Some(State::On | State::Drain));
    let waits = known && live && r.reset && e.is_exact && !g.reset && !g.reset_to;
    let waits = waits && h.paused_since.is_none(); // a pause counts for nothing
    let net_reset = waits.then(|| e.net_reset.unwrap_or(clock.ran(now)));
    h.quality.endings = Endings { reset_since, net_reset, closed_since, ..e };
    if reset_since.is_some_and(|at| now.since(at) > WITHIN) {
        return Err("R was not told that G has reset".to_owned());
    }
    if closed_since.is_some_and(|at| now.since(at) > WITHIN) {
        return Err("a connection that both ends have closed is still in the path".to_owned());
    }
    let ran = |then: Duration| clock.ran(now).as_nanos().saturating_sub(then.as_nanos());
    match net_reset.is_some_and(|then| ran(then) > WAITS_MAX.as_nanos()) {
        true => Err("R's RST did not reach G".to_owned()),
        false => Ok(()),
    }
}
