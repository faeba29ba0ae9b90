//! INV-08, TSvals that the host emits never decrease (mod 2^32), in either direction. A 0, as some
//! stacks put into a SYN, counts for nothing (`tcp_paws_check`).

use super::Ensure;
use crate::history::History;
use crate::out::Out;
use crate::wire::Seq;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let counts = o.gated && h.timestamps();
    let Some(ts) = o.tcp.options.timestamps.filter(|_| counts) else { return Ok(()) };
    match h.end(o.to).tsval_to {
        Some(before) if before != 0 && Seq(ts.tsval).lt(Seq(before)) => {
            Err(format!("TSval {} after {before}, to {:?}", ts.tsval, o.to))
        }
        _ => Ok(()),
    }
}
