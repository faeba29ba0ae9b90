//! NEWS: an ACK that says what the one before said means a loss to its sender, the third of them
//! for certain (RFC 5681 section 3.2). R gets one for each of its segments that asks for it; one
//! that nobody asked for says something new, but for the repeated window update (SNOOP-34).
//!
//! Found by tshark, not by a seed: "Duplicate ACK" and "Spurious Retransmission" at the uplink.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::{Tcp, TcpFlags};

/// So many in a row are no sign of a loss yet.
const MAX: u32 = 2;

/// What R was told last, and how often it was told again.
#[derive(Clone, Debug, Default)]
pub(crate) struct News {
    last: Option<(u64, u64)>,
    /// Segments of R that may each be answered by the same again.
    asked: u32,
    again: u32,
}

/// Any whole segment, also one in another's name.
pub(crate) fn on_in(h: &mut History, from: Side, tcp: &Tcp) {
    let flags = TcpFlags::SYN | TcpFlags::FIN | TcpFlags::RST | TcpFlags::URG;
    let plain = tcp.payload_len == 0 && !tcp.flags.intersects(flags);
    // One beyond the window that R was shown is to be answered (RFC 9293 section 3.10.7.4): what R
    // sends behind the octet of a window probe.
    let r = h.end(Side::R);
    let in_place = (r.end..=r.edge_to).contains(&h.unwrap(Side::R, tcp.seq, r.end));
    // Of what G sent past the host only G knows that it is no odd ACK (SNOOP-42).
    let heard = h.unwrap(Side::G, tcp.ack, r.acked) <= r.end_to;
    if from == Side::R && !(plain && in_place && heard) {
        h.quality.news.asked += 1;
    }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let again = h.quality.news.again + 1;
    match is_old(h, o) && h.is_twinned() && h.quality.news.asked == 0 && again > MAX {
        true => Err(format!("{again} ACKs in a row that say nothing new and answer nothing")),
        false => Ok(()),
    }
}

/// `o` has left, and is not yet in the history.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    if o.to == Side::G {
        return;
    }
    let old = is_old(h, o);
    let news = &mut h.quality.news;
    let last = o.ack.map(|ack| (ack, o.edge));
    if news.last != last {
        *news = News { last, ..News::default() };
    } else if old && news.asked > 0 {
        news.asked -= 1;
    } else if old {
        news.again += 1;
    }
}

/// A pure ACK with nothing in it that the last frame to R did not say.
fn is_old(h: &History, o: &Out<'_>) -> bool {
    let same = o.ack.is_some() && h.quality.news.last == o.ack.map(|ack| (ack, o.edge));
    let keepalive = o.seq < h.end(Side::R).acked; // R has to answer it
    o.to == Side::R && o.gated && o.is_pure() && same && !keepalive
}
