//! INV-25, early acceptance is a subset: the host acknowledges only what a conforming G would have
//! accepted, given the same segments and, but for its size, the window the host showed.
//!
//! The model takes the segments that came in from R whole and in R's own name, refuses what
//! RFC 9293 section 3.10.7.4, RFC 5961 and RFC 7323 refuse, and joins the rest.

use super::Ensure;
use super::history::{BASE, History, Side};
use super::out::Out;
use super::ranges::Ranges;
use crate::wire::{Seq, Tcp};

/// Ranges of R's stream that a conforming G would have.
#[derive(Clone, Debug, Default)]
pub struct Acceptable {
    ranges: Ranges,
    /// TS.Recent of RFC 7323 section 4.3.
    pub(super) recent: Option<u32>,
}

impl Acceptable {
    /// It has the place `at`, which may be a FIN's.
    pub(super) fn has(&self, at: u64) -> bool {
        self.ranges.has(at)
    }

    /// How many pieces there are.
    pub(super) fn ranges_count(&self) -> usize {
        self.ranges.len()
    }

    /// End of what is there without a hole.
    pub(super) fn end(&self) -> u64 {
        self.ranges.end_of_run(BASE + 1)
    }
}

/// A segment of R as a conforming G sees it; `false`: it drops the segment.
pub(super) fn on_segment_from_net(h: &mut History, tcp: &Tcp, seq: u64, end: u64) -> bool {
    if !tcp.flags.ack() {
        return false;
    }
    let ack_to = h.end(Side::R).ack_to;
    if h.timestamps() {
        let Some(ts) = tcp.options.timestamps else { return false };
        // PAWS, as `tcp_paws_check` of Linux 6.18 has it: one tick back is none, 0 is void. R's own
        // clock never goes back, so only what was delayed fails here.
        let recent = h.acceptable.recent.filter(|recent| *recent != 0);
        let age = recent.map_or(0, |recent| Seq(recent).after(Seq(ts.tsval)));
        if age > 1 {
            return false;
        }
        // An old duplicate is dropped before its clock is read.
        let acceptable = end > ack_to || (end == seq && seq >= ack_to);
        if seq <= ack_to.max(BASE + 1) && acceptable {
            h.acceptable.recent = if age > 0 { recent } else { Some(ts.tsval) };
        }
    }
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    let ack = h.unwrap(Side::G, tcp.ack, r.acked);
    let (sent, edge) = (g.end, r.edge_to.max(g.edge_max));
    if ack > sent || seq > edge || (seq == edge && tcp.payload_len > 0) {
        return false;
    }
    let to = end.min(edge + u64::from(tcp.flags.fin()));
    if to > seq {
        h.acceptable.ranges.insert(seq.max(BASE + 1), to);
    }
    true
}

pub(super) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ack) = o.ack.filter(|_| o.to == Side::R && o.gated && h.is_open()) else {
        return Ok(());
    };
    // What G itself acknowledged it has accepted.
    let acceptable = h.acceptable.end().max(h.end(Side::G).acked);
    if ack > acceptable && !o.tcp.flags.rst() {
        return Err(format!("ACK {} bytes beyond what G would accept", ack - acceptable));
    }
    Ok(())
}
