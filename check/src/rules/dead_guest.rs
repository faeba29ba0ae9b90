//! INV-19, no answer for the dead: only RSTs in the name of a guest that is destroyed or may be on
//! another host (LIFE-16), and no
//! answer to a question in the name of one that has been silent for longer than `T_paused`. Data
//! that R repeats is acknowledged again, because that was promised.

use nightporter_core::limits::{T_ALIVE, T_PAUSED};
use nightporter_core::time::Duration;

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;

/// A probe may be answered just in time, and leave a little later.
const GRACE: Duration = Duration::from_secs(2);

pub(crate) fn on_out(h: &History, o: &Out<'_>, destroyed: bool) -> Ensure {
    if o.to != Side::R || !o.gated || o.tcp.flags.rst() {
        return Ok(());
    }
    if destroyed {
        return Err("a segment in the name of a guest that is gone".to_owned());
    }
    if h.is_relayed && (o.tcp.payload_len > 0 || o.tcp.flags.fin()) {
        return Ok(()); // no answer: the host repeats the data that it sends for G by itself
    }
    let r = h.end(Side::R);
    let shut = r.edge_to <= r.ack_to + (1 << h.shift(Side::G));
    // A keepalive with an ACK for bytes that went past the host is an odd segment (seed 46875); and
    // after one a stranger's segment may be answered (105917).
    let idles = h.idles && !h.net_has_unseen() && h.heard_from_remote == o.at;
    let patience = if idles && !shut { T_ALIVE } else { T_PAUSED };
    // Bytes of G that the host sends by its own clock are no answer (FLOOD-23; seed 41164).
    let is_answer = !(h.known.floods && (o.tcp.payload_len > 0 || o.tcp.flags.fin()));
    match h.silent_since {
        Some(since) if h.asks && is_answer && o.at.since(since) > patience + GRACE => {
            let ms = o.at.since(since).as_millis();
            Err(format!("an answer for a guest that has been silent for {ms} ms"))
        }
        _ => Ok(()),
    }
}
