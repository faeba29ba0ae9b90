//! NEWS: an ACK that repeats the one before means a loss to its sender, for certain if it is the
//! third (RFC 5681 section 3.2). R gets one for each of its segments that asks for it, also by an
//! old clock (RFC 7323 section 5.3). An unsolicited ACK contains something new, except the repeated
//! window update (SNOOP-34).
//!
//! G gets an ACK of R for each that R sent, and not for one that another has overtaken (COM-30).
//! While the host keeps data for G, R's ACKs concern the host (FLOOD-09). Then an ACK without news
//! answers G, which repeats bytes that R has acknowledged, asks, or has sent more than it was shown
//! room for (FLOOD-04, FLOOD-15). Or it reports a hole in G's data, with SACK blocks where these
//! were negotiated (FLOOD-05).
//!
//! tshark found this, not a seed: "Duplicate ACK" and "Spurious Retransmission" at the uplink.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;
use crate::wire::{Tcp, TcpFlags};

/// So many in a row are no sign of a loss yet.
const MAX: u32 = 2;
/// ACKs by which G knows of a hole (FLOOD-05).
const DUPLICATES: u32 = 3;

/// The last ACK for R, and how often it was repeated.
#[derive(Clone, Debug, Default)]
pub(crate) struct News {
    last: Option<(u64, u64)>,
    /// Segments of R that may each be answered by the same again.
    asked: u32,
    again: u32,
    /// The last ACK and edge sent to G, and the number of segments since then that may each cause
    /// the same again: R's empty ones, which go on to G, and G's own.
    last_to_guest: Option<(u64, u64)>,
    from_net: u32,
    /// Duplicates that may still tell G of a hole, whatever it is told besides.
    of_hole: u32,
}

impl News {
    /// G may be sent the same ACK again.
    fn may_repeat(&self) -> bool {
        self.from_net + self.of_hole > 0
    }

    /// G asks for the last ACK.
    pub(crate) const fn on_question(&mut self) {
        self.from_net += 1;
    }

    /// R has sent a segment whose answer may repeat the last ACK.
    pub(super) fn is_asked(&self) -> bool {
        self.asked > 0
    }
}

/// Any whole segment, also one in another's name.
pub(crate) fn on_in(h: &mut History, from: Side, tcp: &Tcp) {
    let flags = TcpFlags::SYN | TcpFlags::FIN | TcpFlags::RST | TcpFlags::URG;
    let plain = tcp.payload_len == 0 && !tcp.flags.intersects(flags);
    // A segment beyond the window that R was shown, as R sends behind the octet of a window probe,
    // is to be answered (RFC 9293 section 3.10.7.4).
    let r = h.end(Side::R);
    let in_place = (r.end..=r.edge_to).contains(&h.unwrap(Side::R, tcp.seq, r.end));
    // Of what G sent past the host only G knows that it is no odd ACK (SNOOP-42).
    let heard = h.unwrap(Side::G, tcp.ack, r.acked) <= r.end_to;
    // An ACK that another has overtaken says nothing (COM-30), if nothing else is to be said of it.
    let old = plain && in_place && h.unwrap(Side::G, tcp.ack, r.acked) < r.acked;
    // Bytes that have left and that R does not have are certainly kept.
    let kept = h.is_relayed && r.acked < r.end_to;
    // One older than R's window is to be answered too (SNOOP-03; RFC 5961 section 5.2).
    let too_old = plain && h.is_long_acked(h.unwrap(Side::G, tcp.ack, r.acked));
    let refused = too_old || h.timestamps() && h.acceptable.refuses_clock(tcp);
    if from == Side::R && (refused || !(plain && in_place && heard)) {
        h.quality.news.asked += 1;
    }
    if from == Side::R && tcp.payload_len <= 1 && !old && !kept {
        h.quality.news.from_net += 1;
    }
    if from == Side::G && h.known.floods {
        note_from_guest(h, tcp);
    }
}

/// A segment of G may be answered by an ACK that it knows. The host may not take bytes in the last
/// unit of G's window: G was shown more than R had (FLOOD-14; seed 101824).
fn note_from_guest(h: &mut History, tcp: &Tcp) {
    let (r, shown) = (h.end(Side::R), h.end(Side::G).edge_to);
    let seq = h.unwrap(Side::G, tcp.seq, r.acked);
    let end = seq + u64::from(tcp.payload_len) + u64::from(tcp.flags.fin());
    let asks = seq < r.acked || end + (1 << h.shift(Side::R)) > shown;
    let may_have_hole = end > seq && !h.sack();
    let news = &mut h.quality.news;
    news.from_net += u32::from(asks);
    news.of_hole = if may_have_hole { DUPLICATES } else { news.of_hole };
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    if tells_guest_again(h, o) && h.is_twinned() && !o.waited && !h.quality.news.may_repeat() {
        return Err("an ACK to G that says nothing new, and that R did not send".to_owned());
    }
    let again = h.quality.news.again + 1;
    match is_old(h, o) && h.is_twinned() && h.quality.news.asked == 0 && again > MAX {
        true => Err(format!("{again} ACKs in a row that say nothing new and answer nothing")),
        false => Ok(()),
    }
}

/// `o` has left, and is not yet in the history.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    if o.to == Side::G {
        let again = tells_guest_again(h, o);
        let news = &mut h.quality.news;
        match (again, news.from_net) {
            (true, 0) => news.of_hole = news.of_hole.saturating_sub(1),
            (true, _) => news.from_net -= 1,
            (false, _) => news.from_net = 0,
        }
        news.last_to_guest = o.ack.map(|ack| (ack, o.edge));
        return;
    }
    let old = is_old(h, o);
    let news = &mut h.quality.news;
    let last = o.ack.map(|ack| (ack, o.edge));
    if news.last != last {
        (news.last, news.asked, news.again) = (last, 0, 0);
    } else if old && news.asked > 0 {
        news.asked -= 1;
    } else if old {
        news.again += 1;
    }
}

/// The same to G, without segments that G has to answer, whose number G has acknowledged.
pub(super) fn tells_guest_again(h: &History, o: &Out<'_>) -> bool {
    let same = o.ack.is_some() && h.quality.news.last_to_guest == o.ack.map(|ack| (ack, o.edge));
    let asks = o.seq < h.end(Side::G).acked;
    let blocks = !o.tcp.options.sack.as_slice().is_empty();
    o.to == Side::G && o.gated && o.is_pure() && same && !asks && !blocks
}

/// A pure ACK without anything new since the last frame to R.
fn is_old(h: &History, o: &Out<'_>) -> bool {
    let same = o.ack.is_some() && h.quality.news.last == o.ack.map(|ack| (ack, o.edge));
    let keepalive = o.seq < h.end(Side::R).acked; // R has to answer it
    o.to == Side::R && o.gated && o.is_pure() && same && !keepalive
}
