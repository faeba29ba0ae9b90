//! FLOODING (FLOOD-28): a guest floods only connections for which the host sends. If it begins to
//! send on another one that began while the heartbeat said go, the heartbeat says go no longer.
//!
//! A guest can flood when it sends with nothing under way. A connection that began before the
//! heartbeat last said stop does not flood: it is of another epoch. Connections that a guest
//! forwards are not its own: they pass as far, and end nothing (FWD-05).

use nightporter_core::time::Instant;

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;

/// The first window of any sender, about. R may show so much in its SYN-ACK, below a unit of its
/// window field, and the host takes that for none.
const FIRST_WINDOW: u64 = 1 << 14;

/// The memory of this rule.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flooding {
    /// When the connection's SYN was seen last.
    began_at: Option<Instant>,
    /// In this step a segment of G has left as it came, with nothing under way before it.
    passed: bool,
}

impl Flooding {
    /// A SYN that is no SYN-ACK passes.
    pub(crate) const fn on_syn(&mut self, at: Instant) {
        self.began_at = Some(at);
    }
}

/// Something leaves; it is not yet in the history.
pub(crate) fn on_out(h: &mut History, o: &Out<'_>) {
    let r = h.end(Side::R);
    let is_new = o.to == Side::R && o.tcp.payload_len > 0 && o.end > r.end_to;
    let begins = r.acked == r.end_to && r.edge > r.end_to + FIRST_WINDOW;
    h.quality.flooding.passed |= is_new && begins && h.quality.sending.is_handed(o);
}

/// Between two steps of the host; `go_since`: since when the heartbeat has said go.
pub(crate) fn on_step(h: &mut History, go_since: Option<Instant>) -> Ensure {
    let passed = std::mem::take(&mut h.quality.flooding.passed) && !h.is_relayed;
    let is_judged =
        h.known.floods && !h.known.forwards && h.conn.is_some() && h.is_judged() && !h.past;
    let since = go_since.zip(h.quality.flooding.began_at);
    let is_of_epoch = since.is_some_and(|(go, began)| go <= began);
    match passed && is_judged && is_of_epoch {
        true => Err("a guest that may flood sends past the host, and is not stopped".to_owned()),
        false => Ok(()),
    }
}
