//! ODD-ACKS (COM-31, RFC 5961 section 7): answers to segments that no connection in order has are
//! limited, one in half a second; else two such ends, or a forger, could keep a storm going.
//!
//! PAWS comes before the ACK is looked at (SNOOP-01), and its answer to a segment with data is not
//! limited (SNOOP-04, COM-31): such a segment is not odd.

use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::Tcp;

/// A little less than the 500 ms of COM-31: the host counts in milliseconds.
const INTERVAL: Duration = Duration::from_millis(498);

/// The last such segment, and when the last was answered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Odd {
    pending: Option<Instant>,
    answered_at: Option<Instant>,
}

/// Any whole segment, also one in another's name.
pub(crate) fn on_in(h: &mut History, at: Instant, from: Side, tcp: &Tcp) {
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    let open = h.is_open() && h.was_on;
    let seq = h.unwrap(Side::R, tcp.seq, r.end);
    let begins = tcp.flags.syn();
    let future = tcp.flags.ack()
        && !tcp.flags.rst()
        && h.unwrap(Side::G, tcp.ack, r.acked) > g.end
        && seq >= h.in_order().max(r.ack_to)
        && seq < r.edge_to;
    let old = h.timestamps() && tcp.payload_len > 0 && h.acceptable.refuses_clock(tcp);
    let odd = from == Side::R && open && (begins || future) && !old;
    h.quality.odd.pending = odd.then_some(at);
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let answers = is_answer(h, o);
    match h.quality.odd.answered_at {
        Some(at) if answers && !h.interrupted && o.at.since(at) < INTERVAL => {
            let ms = o.at.since(at).as_millis();
            Err(format!("an odd segment answered {ms} ms after another"))
        }
        _ => Ok(()),
    }
}

/// See [`on_out`].
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    if o.to == Side::R {
        let answers = is_answer(h, o);
        h.quality.odd.pending = None;
        if answers {
            h.quality.odd.answered_at = Some(o.at);
        }
    }
}

/// It comes at once and says nothing new: what was due for another reason would.
fn is_answer(h: &History, o: &Out<'_>) -> bool {
    let old = o.ack == Some(h.end(Side::R).ack_to);
    o.to == Side::R && o.gated && h.quality.odd.pending == Some(o.at) && o.is_pure() && old
}
