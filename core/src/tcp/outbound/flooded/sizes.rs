//! How long the segments are that H sends for G (FLOOD-07, FLOOD-39, FLOOD-40).

use super::Flooded;
use crate::congestion::Segment;
use crate::tcp::FlowContext;
use crate::tcp::flow::Flow;
use crate::wire::icmp::TooBig;

/// What every path takes in a segment (RFC 9293 section 3.7.1).
pub(super) const V4_MSS_MIN: u64 = 536;
pub(super) const V6_MSS_MIN: u64 = 1220;

impl Flooded {
    /// Payload bytes of a segment on the wire.
    pub(in crate::tcp) fn wire_mss(&self) -> u64 {
        self.mss.min(self.longest.max(V4_MSS_MIN)) // small ones say nothing of the MTU
    }

    /// Segments are of `mss` bytes from now on.
    pub(super) fn set_mss(&mut self, mss: u64) {
        let mss = mss.min(self.ceiling);
        if mss != self.mss {
            self.proof = self.proof.filter(|_| mss > self.mss); // copies are shorter from here on
            self.mss = mss;
            self.sender.set_mss(mss);
        }
    }

    /// However long those of G are.
    pub(super) fn lower_mss(&mut self, mss: u64) {
        self.ceiling = mss;
        self.set_mss(mss);
    }

    /// R has twice in a row not acknowledged segments that are longer than any it ever did: perhaps
    /// they do not get through, and no router says so (FLOOD-40, RFC 4821 section 7.7).
    pub(super) fn mss_of_black_hole(&self, least: u64) -> Option<u64> {
        let mss = self.proven.max(least);
        let under_way = self.sender.una() < self.sender.next();
        (under_way && self.sender.rtt().backoffs() >= 2 && mss < self.wire_mss()).then_some(mss)
    }

    /// Notes the first of the longest segments that is on its way: its acknowledgement proves that
    /// such segments get through.
    pub(super) fn note_longest(&mut self, s: &Segment) {
        let mss = self.wire_mss();
        if mss > self.proven && self.proof.is_none() && s.to - s.from >= mss {
            self.proof = Some((s.from + mss, mss));
        }
    }
}

impl Flow {
    /// What both ends said that they take: G's own MTU is likely that of its way out.
    pub(super) fn own_mss(&self) -> u64 {
        self.options.mss_to_net.min(self.options.mss_to_guest).into()
    }

    /// A router has dropped a segment of this flow (FLOOD-39): if it is one that is under way, H
    /// sends smaller ones from here on, and what is too long again. The path is not congested.
    pub(crate) fn on_too_big(&mut self, cx: &mut FlowContext<'_, '_>, it: &TooBig) {
        let una = self.outbound.una();
        let under_way = (una..self.outbound.sent()).contains(&it.seq.unwrap(una));
        let mss = u64::from(it.mtu).saturating_sub(self.ip_tcp_len(cx));
        let Some(flooded) = self.losses.flooded_mut().filter(|f| under_way && mss < f.wire_mss())
        else {
            return;
        };
        flooded.lower_mss(mss);
        flooded.sender.on_too_long();
        flooded.arm(cx, true);
        self.options.mss_to_net = u16::try_from(mss).unwrap_or(u16::MAX); // for good
    }
}
