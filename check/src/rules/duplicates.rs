//! DUPLICATES: bytes that R sends a second time are answered by a DSACK (RFC 2883 section 4;
//! SNOOP-11), whether they were acknowledged or are held behind a hole. Of two copies of a byte
//! that differ, G gets the first (INV-15).
//!
//! The second part is for hostile remotes; a segment that may be refused for another reason leaves
//! its bytes undecided.

use std::collections::BTreeMap;

use super::Ensure;
use crate::history::{BASE, History, Side};
use crate::out::{In, Out};
use crate::wire::TcpFlags;

/// With more ranges out of order than this the next may be refused (SNOOP-10 has 64).
const RANGES_MAX: usize = 32;
/// Bytes of which copies are remembered.
const BYTES_MAX: usize = 1 << 16;

/// See the module doc.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies {
    /// A segment all of which is there: a DSACK for R is due.
    again: Option<(u64, u64)>,
    /// First copy of each byte in the window; `None` where it may not have been taken.
    first: BTreeMap<u64, Option<u8>>,
}

pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    if s.from == Side::G {
        let acked = h.end(Side::G).acked;
        let first = &mut h.quality.copies.first;
        if first.first_key_value().is_some_and(|(at, _)| *at < acked) {
            *first = first.split_off(&acked);
        }
        return;
    }
    let r = h.end(Side::R);
    let all_there = s.tcp.payload_len > 1 && s.end <= r.ack_to && s.seq > BASE;
    let plain = s.tcp.flags.0 & !(TcpFlags::PSH | TcpFlags::ECE | TcpFlags::CWR).0;
    let plain = plain == TcpFlags::ACK.0 && s.tcp.options.understood();
    let due = all_there || is_held(h, s);
    let due = due && plain && s.counts && h.sack() && !r.reset && !h.quality.late.is_late;
    h.quality.copies.again = due.then_some((s.seq, s.end));
    if h.known.hostile[Side::R as usize] {
        note_copies(h, s, plain);
    }
}

/// The host must hold all of it, behind a hole, since before it came.
fn is_held(h: &History, s: &In<'_>) -> bool {
    let r = h.end(Side::R);
    let sure = s.ack == r.acked && s.end <= r.edge_to && r.fin.is_none() && h.is_twinned();
    let behind = s.tcp.payload_len > 1 && s.seq > h.in_order().max(r.ack_to);
    sure && behind && h.quality.waiting.holds(s.seq, s.end)
}

fn note_copies(h: &mut History, s: &In<'_>, plain: bool) {
    let r = h.end(Side::R);
    let certain = plain
        && s.counts
        && s.ack == r.acked
        && r.fin.is_none()
        && !r.reset
        && s.end <= r.edge_to
        && h.acceptable.ranges_count() < RANGES_MAX;
    let window = r.ack_to.max(BASE + 1)..r.edge_to.max(r.ack_to);
    let at = s.tcp.payload_offset as usize;
    let payload = &s.bytes[at..at + s.tcp.payload_len as usize];
    let first = &mut h.quality.copies.first;
    for (place, byte) in (s.seq..).zip(payload).filter(|(place, _)| window.contains(place)) {
        if first.len() < BYTES_MAX {
            first.entry(place).or_insert(certain.then_some(*byte));
        }
    }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if !o.gated || o.tcp.flags.intersects(TcpFlags::SYN | TcpFlags::RST) || !h.is_on() {
        return Ok(());
    }
    let copies = &h.quality.copies;
    if o.to == Side::G {
        let differs = |(place, byte): (u64, &u8)| {
            copies.first.get(&place).is_some_and(|first| first.is_some_and(|first| first != *byte))
        };
        let stored = o.is_stored() && !h.interrupted && !copies.first.is_empty();
        return match stored && (o.seq..).zip(o.payload).any(differs) {
            true => Err("G gets another copy of a byte than the first".to_owned()),
            false => Ok(()),
        };
    }
    let Some((from, to)) = copies.again.filter(|_| !h.interrupted && h.was_on) else {
        return Ok(());
    };
    let told = o
        .tcp
        .options
        .sack
        .as_slice()
        .first()
        .map(|block| (h.unwrap(Side::R, block.0, from), h.unwrap(Side::R, block.1, to)));
    if o.is_pure() && told != Some((from, to)) && !h.quality.late.is_late {
        return Err(format!("a duplicate of {} bytes without a DSACK", to - from));
    }
    Ok(())
}

/// The next segment to R has reported it.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    if o.to == Side::R {
        h.quality.copies.again = None;
    }
}
