//! INV-09, every TSval emitted was received from the end it speaks for, in this connection.

use super::Ensure;
use super::history::{History, Out};

pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ts) = o.tcp.options.timestamps.filter(|_| o.gated) else { return Ok(()) };
    let known = &h.end(o.to.other()).tsvals;
    if h.is_open() && !known.contains(&ts.tsval) {
        return Err(format!("TSval {} to {:?} that its owner never sent", ts.tsval, o.to));
    }
    Ok(())
}
