//! INV-24, congestion marks are conserved: a CE mark on a segment that the host takes over shows
//! as ECE on every ACK to R until R answers with CWR, and not again as CE to G.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::{Ip, Tcp, TcpFlags};

/// The marks of R's segments.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Marks {
    /// End of the newest segment that came with CE and was accepted.
    at: Option<u64>,
    /// R has sent CE since its last CWR.
    seen: bool,
}

/// A segment of R came in.
pub(crate) fn on_in(h: &mut History, ip: &Ip, tcp: &Tcp, (seq, end): (u64, u64), counts: bool) {
    let next = h.end(Side::R).ack_to;
    let mut marks = h.rules.congestion_marks;
    if tcp.flags.contains(TcpFlags::CWR) {
        // On what is dropped, or was there already, it may not be seen.
        marks.at = None;
        marks.seen &= !counts || end <= next;
    }
    marks.seen |= ip.tos & 3 == 3;
    // Ahead of a hole too: ECE does not wait for the missing bytes (SNOOP-19). Nothing beyond the
    // window is accepted, nor a probe of a closed one.
    let taken = counts && end > next && end <= h.end(Side::R).edge_to;
    if ip.tos & 3 == 3 && h.is_on() && taken && tcp.payload_len > 0 {
        marks.at = Some(if seq == next { end } else { next });
    }
    h.rules.congestion_marks = marks;
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if !o.gated || o.tcp.flags.rst() || !h.known.ecn {
        return Ok(());
    }
    let missing =
        h.rules.congestion_marks.at.is_some_and(|end| o.ack.is_some_and(|ack| ack >= end));
    if o.to == Side::R && missing && !o.tcp.flags.contains(TcpFlags::ECE) {
        return Err("an ACK without the ECE that a CE mark asks for".to_owned());
    }
    if o.to == Side::R
        && !h.rules.congestion_marks.seen
        && o.tcp.flags.contains(TcpFlags::ECE)
        && !h.interrupted
    {
        return Err("an ECE that no CE mark asks for".to_owned());
    }
    if o.to == Side::G && o.ip.tos & 3 == 3 && o.tcp.payload_len > 0 {
        return Err("a CE mark reached G a second time".to_owned());
    }
    Ok(())
}
