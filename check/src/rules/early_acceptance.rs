//! INV-25, early acceptance is a subset: the host acknowledges only bytes that a conforming G would
//! have accepted, given the same segments and, except for its size, the window that the host
//! showed.
//!
//! The model takes the segments that came from R whole and in R's own name, refuses those that RFC
//! 9293 section 3.10.7.4, RFC 5961 and RFC 7323 refuse, and joins the rest. Of two ends of a stream
//! the first counts (SNOOP-14).

use super::Ensure;
use crate::history::{BASE, History, Side};
use crate::out::Out;
use crate::ranges::Ranges;
use crate::wire::{Seq, Tcp, TcpFlags};

/// A TSval may be as many ticks older than TS.Recent (`tcp_paws_check` of Linux 6.18). R's own
/// clock never goes back, so only delayed segments are older.
const AGE_MAX: i32 = 1;

/// Ranges of R's stream that a conforming G would have.
#[derive(Clone, Debug, Default)]
pub struct Acceptable {
    ranges: Ranges,
    /// TS.Recent of RFC 7323 section 4.3.
    pub(crate) recent: Option<u32>,
    /// The first end of R's stream that was certainly taken: nothing lies behind it.
    fin: Option<u64>,
}

/// With more ranges out of order than this the next may be refused (SNOOP-10 has 64).
const RANGES_MAX: usize = 32;

impl Acceptable {
    /// It has the place `at`, which may be a FIN's.
    pub(crate) fn has(&self, at: u64) -> bool {
        self.ranges.has(at)
    }

    /// By how many ticks a TSval of R is older than TS.Recent, which 0 leaves void.
    fn age(&self, tsval: u32) -> i32 {
        let recent = self.recent.filter(|recent| *recent != 0);
        recent.map_or(0, |recent| Seq(recent).after(Seq(tsval)))
    }

    /// PAWS refuses a segment with this clock.
    pub(crate) fn refuses_clock(&self, tcp: &Tcp) -> bool {
        tcp.options.timestamps.is_some_and(|ts| self.age(ts.tsval) > AGE_MAX)
    }

    /// How many pieces above `place` have something of `held`.
    pub(crate) fn runs_with(&self, held: &Ranges, place: u64) -> usize {
        self.ranges.runs_with(held, place)
    }

    /// It may have something beyond `place`.
    pub(crate) fn has_beyond(&self, place: u64) -> bool {
        self.ranges.above(place) > 0
    }

    /// How many pieces there are.
    pub(crate) fn ranges_count(&self) -> usize {
        self.ranges.len()
    }

    /// End of the bytes without a hole.
    pub(crate) fn end(&self) -> u64 {
        self.ranges.end_of_run(BASE + 1)
    }
}

/// A segment of R as a conforming G sees it; `false`: it drops the segment.
pub(crate) fn on_segment_from_net(h: &mut History, tcp: &Tcp, seq: u64, end: u64) -> bool {
    if !tcp.flags.ack() {
        return false;
    }
    let ack_to = h.end(Side::R).ack_to;
    // One without a timestamp is taken (`tcp_validate_incoming` of Linux 6.18).
    if let Some(ts) = tcp.options.timestamps.filter(|_| h.timestamps()) {
        let age = h.acceptable.age(ts.tsval);
        if age > AGE_MAX {
            return false;
        }
        // An old duplicate is dropped before its clock is read.
        let acceptable = end > ack_to || (end == seq && seq >= ack_to);
        if seq <= ack_to.max(BASE + 1) && acceptable && age <= 0 {
            h.acceptable.recent = Some(ts.tsval);
        }
    }
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    let ack = h.unwrap(Side::G, tcp.ack, r.acked);
    let (sent, edge) = (g.end, r.edge_to.max(g.edge_max));
    if ack > sent || seq > edge || (seq == edge && tcp.payload_len > 0) {
        return false;
    }
    // An ACK older than a window refuses its segment (RFC 5961 section 5.2). For data the host's
    // own ACK shows whether it did; a FIN has to wait for G's.
    let old_fin = tcp.flags.fin() && h.is_long_acked(ack);
    let to = (end - u64::from(old_fin)).min(edge + u64::from(tcp.flags.fin()));
    let to = to.min(h.acceptable.fin.map_or(u64::MAX, |fin| fin + 1));
    let plain = tcp.options.understood() && !tcp.flags.contains(TcpFlags::URG);
    let certain = plain && ack == r.acked && end <= r.edge_to && !r.reset && h.is_on();
    let last = end > seq && h.acceptable.ranges.above(end - 1) == 0;
    let room = h.acceptable.ranges.len() < RANGES_MAX && !h.acceptable.has(end - 1);
    if tcp.flags.fin() && certain && last && room {
        h.acceptable.fin.get_or_insert(end - 1);
    }
    let from = seq.max(BASE + 1);
    if to > from {
        h.acceptable.ranges.insert(from, to); // one of a connection before lies below
    }
    true
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ack) = o.ack.filter(|_| o.to == Side::R && o.gated && h.is_open()) else {
        return Ok(());
    };
    // G has accepted the bytes that it acknowledged itself.
    let acceptable = h.acceptable.end().max(h.end(Side::G).acked);
    if ack > acceptable && !o.tcp.flags.rst() {
        return Err(format!("ACK {} bytes beyond what G would accept", ack - acceptable));
    }
    Ok(())
}
