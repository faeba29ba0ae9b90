//! INV-16, the trace looks like one endpoint of RFC 9293: what the other checkers say about single
//! numbers, and the order of things. Also: strict stacks have nothing to complain of.

use super::Ensure;
use super::excuse::{self, Excuses, Judged, Moments};
use super::history::{History, Side};
use super::out::Out;
use crate::plan::{Machine, Plan, StackKind};
use crate::stack::{Complaint, EndReport, MAYBE_NETWORK};

pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
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

/// What a stranger's segments cause, besides what a network may.
const FORGED: [&str; 3] = ["ACK of something not sent", "data after FIN", "more than the MSS"];

/// Strict stacks refuse what Linux refuses, and count it.
pub(super) fn on_end(
    plan: &Plan,
    ends: &[EndReport],
    complaints: &[(Machine, Complaint)],
    moments: &Moments,
    excuses: &mut Excuses,
) -> Ensure {
    let judged_before = excuses.critics_judged + excuses.critics_judged_in_part;
    let is_network = |c: &Complaint| c.cause.starts_with(MAYBE_NETWORK);
    let is_window = |c: &Complaint| c.cause.ends_with("beyond the window");
    for e in ends.iter().filter(|e| plan.expects_streams_of(e.conn)) {
        if plan.stack_of(e.machine).kind != StackKind::Strict || e.opened_at.is_none() {
            continue;
        }
        let judged = plan.judges(e.machine, e.conn, excuse::span(ends, e), moments);
        excuses.critics += 1;
        excuses.critics_judged += u64::from(judged == Judged::All);
        excuses.critics_judged_in_part += u64::from(!matches!(judged, Judged::All | Judged::No));
        // smoltcp scales the window of a repeated SYN-ACK, and sends too much.
        let too_much = plan.has_smoltcp(e.conn) || plan.passes_uncut(e.conn, e.machine);
        let counts = |c: &Complaint| match judged {
            Judged::All => true,
            Judged::NotNetwork => !is_network(c),
            Judged::NotForged => {
                !is_network(c) && !is_window(c) && !FORGED.contains(&c.cause)
            }
            Judged::NotWindow => !is_network(c) && !is_window(c),
            Judged::No => false,
        } && !(too_much && is_window(c));
        let its = |m: Machine, c: &Complaint| m == e.machine && c.conn == e.conn;
        if let Some((machine, c)) = complaints.iter().find(|(m, c)| its(*m, c) && counts(c)) {
            let Complaint { conn, cause, count } = c;
            return Err(format!(
                "{machine:?} complains of connection {conn}: {cause}, {count} times"
            ));
        }
    }
    excuses.seeds += 1;
    excuses.seeds_judged +=
        u64::from(excuses.critics_judged + excuses.critics_judged_in_part > judged_before);
    Ok(())
}
