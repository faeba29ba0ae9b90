//! INV-18, liveness: after all has healed everything comes to its end, what is held is offered
//! until it is taken, and the host makes no more than two packets for each it gets.

use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use super::excuse::{self, APPLICATION, Excuses, Moments};
use super::history::{History, Side};
use super::out::Out;
use crate::plan::Plan;
use crate::stack::{EndReport, Outcome};

/// Packets a flow may cause besides, for timers: probes, local retransmission, window updates.
const FOR_TIMERS: u64 = 400;

/// Bytes of the pieces that count (RFC 9293 section 3.7.1: nobody has to take more).
const PIECE: u64 = 536;

/// A window that G opened so long ago is known to R.
const UPDATE_WITHIN: Duration = Duration::from_millis(20);
/// R is waiting for a window that is smaller, and has one that is larger than three of these.
const SEGMENT: u64 = 1460;

/// What is on its way, or due, when a guest stops running (SNOOP-31: its time does not pass).
const REPEATS_IN_PAUSE: u32 = 3;

/// A guest that runs and has a window is offered what is held for it, again and again, within this.
const OFFERED_WITHIN: Duration = Duration::from_secs(30);

/// What R was promised is offered to G until G has it (SNOOP-29).
pub(super) fn on_step(h: &mut History, now: Instant) -> Ensure {
    let g = h.end(Side::G);
    let takes = g.edge > g.acked && h.paused_since.is_none() && !h.hostile[Side::G as usize];
    let on = matches!(h.state, Some(State::On | State::Drain)) && !h.opaque && !h.offline;
    if !(on && takes && h.promised().is_some()) {
        h.owed_since = None;
        return Ok(());
    }
    let since = *h.owed_since.get_or_insert(now);
    if now.since(since) > OFFERED_WITHIN {
        return Err("held bytes were not offered to a guest that takes them".to_owned());
    }
    Ok(())
}

/// No packet storm; and R need not ask for a window that G has opened (SNOOP-34).
pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    // A super-segment may leave in pieces.
    let in_pieces = |side: Side| h.end(side).frames + h.end(side).bytes / PIECE;
    let received = in_pieces(Side::R) + in_pieces(Side::G);
    let made = h.end(Side::R).frames_to + h.end(Side::G).frames_to;
    if made > 2 * received + FOR_TIMERS && !h.deaf {
        return Err(format!("{made} packets out for what {received} bring in"));
    }
    let r = h.end(Side::R);
    let stuck = r.edge_to.saturating_sub(r.ack_to) < SEGMENT && o.edge > r.edge_to + 3 * SEGMENT;
    let roomy = o.at.since(h.cramped_at) > UPDATE_WITHIN;
    let silent = o.at.since(h.heard_from_guest) > UPDATE_WITHIN && h.paused_since.is_none();
    if h.repeats_in_pause > REPEATS_IN_PAUSE {
        return Err("a paused guest was sent the same again and again".to_owned());
    }
    if o.to == Side::R
        && o.gated
        && h.asks
        && h.state == Some(State::On)
        && roomy
        && stuck
        && silent
    {
        return Err("R had to ask for a window that was open".to_owned());
    }
    Ok(())
}

/// Nothing hangs, and nothing is reset without a cause. What was excused is added to `excuses`.
pub(super) fn on_end(
    plan: &Plan,
    ended: bool,
    ends: &[EndReport],
    moments: &Moments,
    excuses: &mut Excuses,
) -> Result<(), (usize, String)> {
    for e in ends.iter().filter(|e| plan.expects_streams_of(e.conn)) {
        let span = excuse::span(ends, e);
        let excuse = plan.reset_excuse(e.conn, span, moments);
        // Without keepalives nobody notices that the other end is gone.
        let patient = plan.conns[e.conn].workload.is_patient() && excuse.is_some();
        let may_hang =
            patient || !plan.expects_end_of(e.conn, span[1], moments) || plan.may_deadlock(e.conn);
        let counts = u64::from(excuse != Some(APPLICATION));
        excuses.ends += counts;
        excuses.may_reset += counts * u64::from(excuse.is_some());
        if let Some(why) = excuse.filter(|_| counts > 0) {
            *excuses.reset_excuses.entry(why.to_owned()).or_default() += 1;
        }
        excuses.may_hang += counts * u64::from(may_hang);
        let hangs = e.outcome == Outcome::Open && !ended;
        if hangs && !may_hang {
            return Err((e.conn, format!("hangs: {}", progress(e))));
        }
        excuses.hangs += u64::from(hangs);
        if e.outcome != Outcome::Reset {
            continue;
        }
        let [up, down] = plan.conns[e.conn].workload.bytes();
        let expected = if plan.conns[e.conn].client == e.machine { down } else { up };
        // smoltcp may give up on a FIN whose ACK was lost; by then all is through.
        let through = e.read >= expected && e.written >= e.to_write && plan.has_smoltcp(e.conn);
        // The other end's last ACK was lost, and its next connection on these ports came.
        let is_other = |o: &&EndReport| o.conn == e.conn && o.machine != e.machine;
        let other = ends.iter().find(is_other).map(|o| o.outcome);
        let reused = plan.conns[e.conn].reuse.is_some() && other == Some(Outcome::Closed);
        let excuse = excuse
            .or(through.then_some("smoltcp's last FIN"))
            .or(reused.then_some("its ports were used again"));
        let Some(why) = excuse else {
            return Err((e.conn, format!("was reset without a cause: {}", progress(e))));
        };
        *excuses.resets.entry(why.to_owned()).or_default() += counts;
    }
    Ok(())
}

fn progress(e: &EndReport) -> String {
    let EndReport { conn, machine, written, to_write, read, .. } = e;
    format!("connection {conn} of {machine:?} wrote {written} of {to_write}, read {read}")
}
