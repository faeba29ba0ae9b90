//! INV-01, stream integrity R to G: what G gets is what R wrote, byte by byte, and at the end all.

use std::collections::BTreeSet;

use super::Ensure;
use super::history::{History, Side, offset};
use super::out::Out;
use crate::plan::{Machine, Plan};
use crate::stack::{EndReport, Outcome};

/// Every byte on its way to G is the one R wrote in that place.
pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if o.to == Side::G { bytes_right(h, o) } else { Ok(()) }
}

/// The same for either direction.
pub(super) fn bytes_right(h: &History, o: &Out<'_>) -> Ensure {
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

/// What a guest's application read: a beginning of what the other wrote, all of it at a close.
pub(super) fn on_end(plan: &Plan, ends: &[EndReport], lost: &BTreeSet<usize>) -> Ensure {
    applications(plan, ends, lost, |machine| matches!(machine, Machine::Guest(_)))
}

/// The same for the ends that `is_it` selects. Of connections in `lost` a promise was lost with the
/// arena: the octet of a keepalive may take the place of a byte.
pub(super) fn applications(
    plan: &Plan,
    ends: &[EndReport],
    lost: &BTreeSet<usize>,
    is_it: impl Fn(Machine) -> bool,
) -> Ensure {
    let known = |e: &&EndReport| {
        is_it(e.machine) && plan.expects_streams_of(e.conn) && !lost.contains(&e.conn)
    };
    for reader in ends.iter().filter(known) {
        let who = format!("connection {}, read by {:?}", reader.conn, reader.machine);
        let conn = &plan.conns[reader.conn];
        let [up, down] = conn.workload.bytes();
        let written = if conn.client == reader.machine { down } else { up };
        // smoltcp's keepalive has its octet in the place of a FIN that is not there yet.
        let octet = u64::from(plan.has_smoltcp(reader.conn));
        if let Some(at) = reader.wrong_at.filter(|at| *at < written || octet == 0) {
            return Err(format!("{who}: byte {at} is wrong"));
        }
        if reader.read > written + octet {
            return Err(format!("{who}: {} of {written} bytes", reader.read));
        }
        let hole = reader.outcome == Outcome::Closed && reader.read < written;
        if hole {
            return Err(format!("{who}: closed after {} of {written} bytes", reader.read));
        }
    }
    Ok(())
}
