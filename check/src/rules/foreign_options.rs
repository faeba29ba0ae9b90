//! INV-23, connections that the host does not understand (MD5, AO, MPTCP, unknown options in the
//! handshake) pass bit by bit, whatever state the engine has for them.

use super::Ensure;
use crate::history::History;
use crate::out::Out;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if h.odd() && o.gated && !o.tcp.flags.rst() {
        return Err(format!("a segment to {:?} was changed", o.to));
    }
    Ok(())
}
