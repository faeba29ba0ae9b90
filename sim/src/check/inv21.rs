//! INV-21, fail-stop: when a promise can no longer be kept both sides are told; nobody is left to
//! believe in a stream with a hole.

use super::Ensure;
use super::history::{History, Side};
use crate::plan::Plan;
use crate::stack::{EndReport, Outcome};

/// A promise was broken: R has seen an RST by the end, or had all it wanted.
pub(super) fn on_end(plan: &Plan, h: &History, ends: &[EndReport]) -> Ensure {
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
