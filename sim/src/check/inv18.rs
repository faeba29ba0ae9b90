//! INV-18, liveness: after all has healed everything comes to its end, and the host makes no more
//! than two packets for each it gets.

use super::Ensure;
use super::history::{History, Side};
use crate::plan::Plan;
use crate::stack::{EndReport, Outcome};

/// Packets a flow may cause besides, for timers: probes, local retransmission, window updates.
const FOR_TIMERS: u64 = 400;

/// No packet storm.
pub(super) fn on_out(h: &History) -> Ensure {
    let received = h.end(Side::R).frames + h.end(Side::G).frames;
    let made = h.end(Side::R).frames_to + h.end(Side::G).frames_to;
    if made > 2 * received + FOR_TIMERS {
        return Err(format!("{made} packets out for {received} in"));
    }
    Ok(())
}

/// Nothing hangs.
pub(super) fn on_end(plan: &Plan, ended: bool, ends: &[EndReport]) -> Ensure {
    if ended {
        return Ok(());
    }
    let open = ends.iter().find(|e| e.outcome == Outcome::Open && plan.expects_end_of(e.conn));
    match open {
        Some(e) => Err(format!(
            "connection {} of {:?} hangs: wrote {} of {}, read {}",
            e.conn, e.machine, e.written, e.to_write, e.read
        )),
        None => Ok(()),
    }
}
