//! INV-18, liveness: after all has healed everything ends, held bytes are offered until they are
//! taken, and the host makes no more than two packets for each that it gets.

use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::Tcp;

/// Packets a flow may cause besides, for timers: probes, local retransmission, window updates.
const FOR_TIMERS: u64 = 400;

/// Bytes of the pieces that count (RFC 9293 section 3.7.1: no receiver has to take more).
const PIECE: u64 = 536;

/// R knows a window that G opened so long ago.
const UPDATE_WITHIN: Duration = Duration::from_millis(20);
/// R is waiting for a window that is smaller, and has one that is larger than three of these.
const SEGMENT: u64 = 1460;

/// Segments that are on their way, or due, when a guest stops running (SNOOP-31: its time does not
/// pass).
const REPEATS_IN_PAUSE: u32 = 3;

/// A guest that runs and has a window is offered the bytes held for it, again and again, within
/// this.
const OFFERED_WITHIN: Duration = Duration::from_secs(30);

/// Repetitions further apart than this are not of one retransmission.
const ROUND: Duration = Duration::from_millis(50);

/// The bytes that G is owed, and the room that R may want.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Liveness {
    /// Since when G has been owed bytes and offered none.
    owed_since: Option<Instant>,
    /// How many times G was sent something again since it was paused, and when last.
    repeats_in_pause: u32,
    repeated_at: Instant,
    /// Bytes of the VM's budget that were free for more than first windows when R was last told
    /// anything.
    spare_told: u64,
    /// The same at R's last segment, before the host has looked at that.
    spare_when_heard: u64,
    /// When the host last had a segment that makes it look for more room: not a stranger's, nor a
    /// SYN-ACK that passes (seeds 45250, 82828).
    looked_at: Instant,
    /// The host has gone on with the flow after a kill, and G has not spoken since.
    is_anew: bool,
}

/// A segment came in.
pub(crate) fn on_any(h: &mut History, from: Side) {
    match from {
        Side::R => h.rules.liveness.spare_when_heard = h.spare,
        Side::G => h.rules.liveness.is_anew = false,
    }
}

/// The host goes on with the flow after a kill: R's place is reserved anew, which R learns when G
/// speaks, or when R asks.
pub(crate) const fn on_resumed(h: &mut History) {
    h.rules.liveness.is_anew = true;
}

/// A segment came in that makes the host look for more room, unless it is an acknowledgement of R
/// without bytes (seed 75).
pub(crate) fn on_look(h: &mut History, at: Instant, from: Side, tcp: &Tcp) {
    if from == Side::G || tcp.payload_len > 0 || tcp.flags.fin() {
        h.rules.liveness.looked_at = at;
    }
}

/// Something else happened.
pub(crate) const fn on_event(h: &mut History) {
    h.rules.liveness.owed_since = None;
}

/// G is paused, or goes on.
pub(crate) const fn on_pause(h: &mut History) {
    h.rules.liveness.repeats_in_pause = 0;
}

/// A frame has left and was judged; the history does not know of it yet.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    let mut liveness = h.rules.liveness;
    if o.to == Side::G && o.is_repeat(h) && h.paused_since.is_some() {
        liveness.repeats_in_pause += u32::from(o.at.since(liveness.repeated_at) > ROUND);
        liveness.repeated_at = o.at;
    }
    // A host that goes on after a kill knows no window of G, and asks for it.
    let offers = o.tcp.payload_len > 0 || o.tcp.flags.fin() || liveness.is_anew;
    if o.to == Side::G && offers {
        liveness.owed_since = None;
    }
    if o.to == Side::R && liveness.looked_at == o.at {
        liveness.spare_told = h.spare;
    }
    h.rules.liveness = liveness;
}

/// Bytes promised to R are offered to G until G has them (SNOOP-29).
pub(crate) fn on_step(h: &mut History, now: Instant) -> Ensure {
    let g = h.end(Side::G);
    let takes = g.edge > g.acked && h.paused_since.is_none() && !h.known.hostile[Side::G as usize];
    let on = matches!(h.state, Some(State::On | State::Drain)) && !h.opaque && !h.offline;
    if !(on && takes && h.promised().is_some()) {
        h.rules.liveness.owed_since = None;
        return Ok(());
    }
    let since = *h.rules.liveness.owed_since.get_or_insert(now);
    if now.since(since) > OFFERED_WITHIN {
        return Err("held bytes were not offered to a guest that takes them".to_owned());
    }
    Ok(())
}

/// No packet storm; and R need not ask for a window that G has opened (SNOOP-34).
pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    // A super-segment may leave in pieces.
    let in_pieces = |side: Side| h.end(side).frames + h.end(side).bytes / PIECE;
    let received = in_pieces(Side::R) + in_pieces(Side::G);
    let made = h.end(Side::R).frames_to + h.end(Side::G).frames_to;
    if made > 2 * received + FOR_TIMERS && !h.known.deaf {
        return Err(format!("{made} packets out for what {received} bring in"));
    }
    let r = h.end(Side::R);
    let stuck = r.edge_to.saturating_sub(r.ack_to) < SEGMENT && o.edge > r.edge_to + 3 * SEGMENT;
    let roomy = o.at.since(h.cramped_at) > UPDATE_WITHIN;
    let silent = o.at.since(h.heard_from_guest) > UPDATE_WITHIN && h.paused_since.is_none();
    let liveness = &h.rules.liveness;
    if liveness.repeats_in_pause > REPEATS_IN_PAUSE {
        return Err("a paused guest was sent the same again and again".to_owned());
    }
    // It may have grown by the budget that other flows gave back since then (INV-20).
    let freed = liveness.spare_when_heard.max(h.spare) > liveness.spare_told;
    if o.to == Side::R
        && o.gated
        && h.asks
        && !freed
        && !liveness.is_anew
        && h.state == Some(State::On)
        && roomy
        && stuck
        && silent
    {
        return Err("R had to ask for a window that was open".to_owned());
    }
    Ok(())
}
