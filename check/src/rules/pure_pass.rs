//! INV-17, PASS is pure: a flow without offload passes bit by bit and in order.
//!
//! Frames that came in while the engine did not have the flow in ON or DRAIN may come out unchanged
//! later (they may have waited in a backlog). Frames that come out while the engine has it in HS or
//! PASS must be unchanged.

use nightporter_core::tcp::flow::State;

use super::Ensure;
use crate::history::History;
use crate::out::Out;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let passes = matches!(h.state, Some(State::Handshake | State::Pass));
    // The first segment of G after the handshake may turn the flow ON and be edited at once.
    let may_turn_on = h.state == Some(State::Handshake) && h.is_open();
    if o.gated && passes && !may_turn_on && !o.tcp.flags.rst() && !h.was_on {
        return Err(format!("a segment to {:?} that did not come in like this", o.to));
    }
    Ok(())
}
