//! INV-09, every emitted TSval was received from the end in whose name it is sent, in this
//! connection.
//!
//! And the clock echoed to R is not newer than RFC 7323 section 4.3 allows: the clock of a segment
//! behind a hole would make R's round trip look shorter than it is (SNOOP-05, S-15).

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::Seq;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ts) = o.tcp.options.timestamps.filter(|_| o.gated) else { return Ok(()) };
    let known = &h.end(o.to.other()).tsvals;
    if h.is_open() && !known.contains(&ts.tsval) {
        return Err(format!("TSval {} to {:?} that its owner never sent", ts.tsval, o.to));
    }
    if h.is_open() && !o.tcp.flags.rst() && !h.end(o.to).tsvals.contains(&ts.tsecr) {
        return Err(format!("echo of {} that {:?} never sent", ts.tsecr, o.to));
    }
    let recent = h.acceptable.recent.filter(|_| o.to == Side::R && h.was_on && !h.interrupted);
    // A SYN that R has repeated is in front of every hole (seed 145).
    let is_of_syn = h.is_clock_of_syn(ts.tsecr);
    let is_newer = recent.is_some_and(|recent| Seq(ts.tsecr).gt(Seq(recent)));
    if is_newer && !is_of_syn && !o.tcp.flags.rst() {
        return Err(format!("echo of {} although a hole is older", ts.tsecr));
    }
    Ok(())
}
