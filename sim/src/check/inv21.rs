//! INV-21, fail-stop: when a promise can no longer be kept both sides are told; nobody is left to
//! believe in a stream with a hole.

use nightporter_core::limits::T_RST;
use nightporter_core::tcp::flow::State;

use super::Ensure;
use super::history::{History, Out, Side};
use crate::plan::Plan;
use crate::stack::{EndReport, Outcome};

/// No RST without a cause; and what R was promised comes before R's own RST (SNOOP-15), for as
/// long as T_rst.
pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    let cause = r.reset || g.reset || h.broken || h.interrupted || h.state == Some(State::Abort);
    if o.to == Side::R && o.gated && o.tcp.flags.rst() && !cause && h.streams.is_some() {
        return Err("an RST to R that nothing asked for".to_owned());
    }
    if o.to != Side::G || !o.gated || !o.tcp.flags.rst() || !r.reset || h.broken || !h.is_open() {
        return Ok(());
    }
    let soon = h.reset_at.is_some_and(|at| o.at.since(at) < T_RST);
    if soon && g.acked < r.ack_to.min(r.fin.unwrap_or(u64::MAX)) {
        return Err(format!("an RST before {} promised bytes", r.ack_to - g.acked));
    }
    Ok(())
}

/// A promise was broken: R has seen an RST by the end, or had all it wanted.
pub(super) fn on_end(plan: &Plan, h: &History, ends: &[EndReport]) -> Ensure {
    let must_reset = h.must_reset && !h.opaque;
    if must_reset && !(h.end(Side::R).reset_to || h.end(Side::R).reset) {
        return Err("after a restart R saw no RST".to_owned());
    }
    if must_reset && !(h.end(Side::G).reset_to || h.end(Side::G).reset) {
        return Err("after a restart G saw no RST".to_owned());
    }
    if h.must_tell_r && !h.opaque && !h.end(Side::R).reset_to {
        return Err("R saw no RST when the guest was gone".to_owned());
    }
    let Some(conn) = h.conn.filter(|c| h.broken && plan.expects_end_of(*c)) else {
        return Ok(());
    };
    let told = |side: Side| {
        let machine = h.machine(plan, side);
        let end = ends.iter().find(|e| e.conn == conn && Some(e.machine) == machine);
        end.is_none_or(|e| e.outcome != Outcome::Open)
    };
    if !told(Side::R) {
        return Err("R was not told that its bytes are gone".to_owned());
    }
    if !told(Side::G) {
        return Err("G was not told that bytes are missing".to_owned());
    }
    Ok(())
}
