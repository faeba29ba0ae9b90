//! INV-16, the trace looks like one endpoint of RFC 9293: the other checkers judge single numbers,
//! this one the order of events. Also: strict stacks have nothing to complain of.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::Tcp;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if !o.gated || o.tcp.flags.rst() {
        return Ok(());
    }
    let (tcp, receiver, source) = (o.tcp, h.end(o.to), h.end(o.to.other()));
    let wrong = |what: &str| Err(format!("to {:?}: {what}", o.to));
    if tcp.flags.syn() {
        return wrong("a SYN that the host made");
    }
    if !h.is_open() {
        return wrong("a segment before the handshake");
    }
    if !tcp.flags.ack() {
        return wrong("a segment without ACK");
    }
    // Linux takes a segment without a timestamp, so the host forwards one. The host's own segments
    // have one.
    let forwards = tcp.options.timestamps.is_none() && source.lacks_clock && !o.is_stored();
    if tcp.options.timestamps.is_some() != h.timestamps() && !forwards {
        return wrong("timestamps must be on every segment or on none");
    }
    if tcp.flags.fin() && source.fin != Some(o.end) {
        return wrong("a FIN that its owner did not send there");
    }
    if o.to == Side::R && h.ttl.is_some_and(|ttl| ttl != o.ip.ttl) {
        return wrong("another time to live than G's");
    }
    if tcp.payload_len > 0 && !o.is_keepalive(h) && source.fin.is_some_and(|fin| o.end > fin) {
        return wrong("data after the FIN");
    }
    if receiver.reset_to {
        return wrong("a segment after an RST");
    }
    let blocks = tcp.options.sack.as_slice();
    if !blocks.is_empty() && !h.sack() {
        return wrong("SACK that was not agreed on");
    }
    // R's own blocks go on to G: those of an R that acknowledges ahead lie below its ACK.
    let said = o.to == Side::G && h.end(Side::R).odd_sack;
    match o.ack.is_some_and(|ack| has_odd_block(h, o.to, tcp, ack)) && !said {
        true => wrong("a SACK block of what was not received out of order"),
        false => Ok(()),
    }
}

/// A SACK block for `to` names what a receiver that acknowledges `ack` cannot hold out of order.
pub(crate) fn has_odd_block(h: &History, to: Side, tcp: &Tcp, ack: u64) -> bool {
    let (blocks, sent) = (tcp.options.sack.as_slice(), h.end(to).end);
    blocks.iter().enumerate().any(|(n, &(from, end))| {
        let (from, end) = (h.unwrap(to, from, sent), h.unwrap(to, end, sent));
        let duplicate = n == 0 && end <= ack; // RFC 2883
        let within = blocks.len() > 1 && n == 0; // a duplicate inside the second block
        from >= end || end > sent || !(duplicate || from > ack || within)
    })
}
