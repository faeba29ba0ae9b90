//! ODD-ACKS (COM-31, RFC 5961 section 7): answers to segments that fit no connection in order are
//! limited to one in half a second. Otherwise two such ends, or a forger, could keep a storm going.
//!
//! But the first is answered, because an honest R learns from it where it is: an RST in the window
//! that is not exact (RFC 5961 section 3.2; SNOOP-15), and a SYN while the host owes G bytes
//! (section 4; SNOOP-17; otherwise G answers it). The rule does not judge one that another ACK may
//! have limited.
//!
//! For a guest that has been silent for longer than `T_paused` the host does not answer them
//! (INV-19), except a SYN, because R must learn that it began anew.
//!
//! PAWS comes before the ACK is looked at (SNOOP-01), and its answer to a segment with data is not
//! limited (SNOOP-04, COM-31): such a segment is not odd.

use nightporter_core::limits::T_PAUSED;
use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::Tcp;

/// A little less than the 500 ms of COM-31: the host counts in milliseconds.
const INTERVAL: Duration = Duration::from_millis(498);
/// And a little more.
const LIMITED: Duration = Duration::from_millis(502);

/// A challenge ACK leaves with the batch.
const WITHIN: Duration = Duration::from_millis(10);

/// An answer that is just in time leaves a little later.
const GRACE: Duration = Duration::from_secs(2);

/// The last such segment, and when the last was answered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Odd {
    pending: Option<Instant>,
    answered_at: Option<Instant>,
    /// When R was last sent an ACK by itself: it may have answered something odd.
    acked_at: Option<Instant>,
    /// Since when R is owed an answer.
    owed_since: Option<Instant>,
    /// The last segment that only a guest which shows life has answered.
    for_living: Option<Instant>,
    /// R's last segment with data, which is acknowledged again in any case.
    data_at: Option<Instant>,
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
    let next = h.in_order().max(r.ack_to);
    let inside = seq > next && seq < r.edge_to && !h.acceptable.has_beyond(next);
    let reset = tcp.flags.rst() && !begins && inside && r.fin.is_none();
    let syn = begins && !tcp.flags.ack() && h.promised().is_some() && !r.reset;
    let limited = h.quality.odd.acked_at.is_some_and(|before| at.since(before) < LIMITED);
    let owed = from == Side::R && h.is_twinned() && h.state == Some(State::On) && !limited;
    let owed = owed && (reset || syn) && h.silent_since.is_none();
    if from == Side::R {
        h.asks &= tcp.payload_len <= 1 && !begins; // R is answered as if it had sent that itself
    }
    let for_living = odd && (!begins || tcp.flags.ack()) || reset;
    let odd_acks = &mut h.quality.odd;
    odd_acks.pending = odd.then_some(at);
    odd_acks.for_living = for_living.then_some(at);
    if from == Side::R && tcp.payload_len > 0 && !odd {
        odd_acks.data_at = Some(at);
    }
    if owed {
        odd_acks.owed_since.get_or_insert(at);
    }
}

/// Between two steps of the host.
pub(crate) fn on_step(h: &mut History, now: Instant) -> Ensure {
    if !h.is_twinned() {
        h.quality.odd.owed_since = None;
    }
    match h.quality.odd.owed_since {
        Some(at) if now.since(at) > WITHIN => {
            Err("an RST or SYN of R in the window was not challenged".to_owned())
        }
        _ => Ok(()),
    }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let answers = is_answer(h, o);
    let odd = &h.quality.odd;
    let for_living = odd.for_living == Some(o.at) && odd.data_at != Some(o.at) && is_old(h, o);
    let silent = h.silent_since.map_or(Duration::ZERO, |since| o.at.since(since));
    if for_living && silent > T_PAUSED + GRACE {
        let s = silent.as_millis() / 1000;
        return Err(format!("an odd segment answered for a guest that is silent for {s} s"));
    }
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
        let odd = &mut h.quality.odd;
        (odd.pending, odd.owed_since) = (None, None);
        odd.acked_at = if o.is_pure() { Some(o.at) } else { odd.acked_at };
        odd.answered_at = if answers { Some(o.at) } else { odd.answered_at };
    }
}

/// An answer comes at once and has no new content; an ACK that was due for another reason would. An
/// ACK whose number is beyond G's bytes is no answer: the host believes that G sends past it, and
/// leaves (SNOOP-42); nor is the last one of a flow that leaves.
fn is_answer(h: &History, o: &Out<'_>) -> bool {
    let leaves = h.state == Some(State::Pass) || o.seq > h.end(Side::G).end;
    h.quality.odd.pending == Some(o.at) && is_old(h, o) && !leaves
}

fn is_old(h: &History, o: &Out<'_>) -> bool {
    o.to == Side::R && o.gated && o.is_pure() && o.ack == Some(h.end(Side::R).ack_to)
}
