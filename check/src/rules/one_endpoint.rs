//! INV-16, the trace looks like one endpoint of RFC 9293: what the other checkers say about single
//! numbers, and the order of things. Also: strict stacks have nothing to complain of.

use super::Ensure;
use crate::history::{BASE, History, Side};
use crate::out::Out;

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
    if tcp.options.timestamps.is_some() != h.timestamps() {
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
    if h.floods && o.to == Side::G && (h.end(Side::R).lied > BASE || h.past) {
        return Ok(()); // of an R that acknowledges ahead they lie below the ACK that they come with
    }
    for (n, &(from, to)) in blocks.iter().enumerate() {
        let from = h.unwrap(o.to, from, receiver.end);
        let to = h.unwrap(o.to, to, receiver.end);
        let duplicate = n == 0 && o.ack.is_some_and(|ack| to <= ack); // RFC 2883
        let new = o.ack.is_some_and(|ack| from > ack);
        let within = blocks.len() > 1 && n == 0; // a duplicate inside the second block
        if from >= to || to > receiver.end || !(duplicate || new || within) {
            return wrong("a SACK block of what was not received out of order");
        }
    }
    Ok(())
}
