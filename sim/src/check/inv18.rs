//! INV-18, liveness: after all has healed everything comes to its end, and the host makes no more
//! than two packets for each it gets.

use std::collections::BTreeSet;

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

/// Nothing hangs, and nothing is reset without a cause. Of a connection that is not in `seen` no
/// SYN ever came as far as the host; those in `killed` were reset by a middlebox.
pub(super) fn on_end(
    plan: &Plan,
    ended: bool,
    ends: &[EndReport],
    killed: &BTreeSet<usize>,
    seen: &BTreeSet<usize>,
) -> Result<(), (usize, String)> {
    for e in ends.iter().filter(|e| e.outcome == Outcome::Reset) {
        let excused = killed.contains(&e.conn)
            || !seen.contains(&e.conn)
            || plan.may_be_reset(e.conn)
            || plan.is_long_paused(e.conn)
            || plan.may_miss_neighbor(e.conn)
            || !plan.expects_end_of(e.conn);
        let [up, down] = plan.conns[e.conn].workload.bytes();
        let expected = if plan.conns[e.conn].client == e.machine { down } else { up };
        // smoltcp may give up on a FIN whose ACK was lost; by then all is through.
        if !excused && (e.read < expected || e.written < e.to_write) {
            return Err((e.conn, format!("was reset without a cause: {}", progress(e))));
        }
    }
    if ended {
        return Ok(());
    }
    let open = ends.iter().find(|e| e.outcome == Outcome::Open && plan.expects_end_of(e.conn));
    match open {
        Some(e) => Err((e.conn, format!("hangs: {}", progress(e)))),
        None => Ok(()),
    }
}

fn progress(e: &EndReport) -> String {
    let EndReport { conn, machine, written, to_write, read, .. } = e;
    format!("connection {conn} of {machine:?} wrote {written} of {to_write}, read {read}")
}
