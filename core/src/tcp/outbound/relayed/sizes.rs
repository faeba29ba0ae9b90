//! How long the segments are that H sends for G (FLOOD-07, FLOOD-39, FLOOD-40).

use super::Relayed;
use crate::congestion::Segment;
use crate::limits::{PATH_MTU_AGE, PAYLOAD_MIN};
use crate::tcp::FlowContext;
use crate::tcp::flow::Flow;
use crate::tcp::losses::Narrow;
use crate::tcp::receiver::Range;
use crate::time::Instant;
use crate::wire::icmp::TooBig;
use crate::wire::saved::{BadImage, Reader, Saved, Writer};

/// The segment size that every path takes (RFC 9293 section 3.7.1).
pub(super) const V4_MSS_MIN: u64 = 536;
pub(super) const V6_MSS_MIN: u64 = 1220;

/// A segment that is longer than those that are known to get through. It leaves once in its full
/// length, and its copies do not. It may be a probe of G for the path's MTU (RFC 4821 section 7),
/// or one of H, because a path that was down looks like a black hole. G sees no loss, so to G all
/// of them get through; H cuts later segments of the length of one that was lost.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Trial {
    /// Of `mss` bytes; the next that is new when R has everything below `after`.
    Due { after: u64, mss: u64 },
    /// These bytes.
    Of { from: u64, to: u64 },
}

/// One that is under way is none of the next sender's.
impl Saved for Trial {
    fn saved(&self, image: &mut Writer) {
        let (after, mss) = match *self {
            Self::Due { after, mss } => (after, mss),
            Self::Of { from, to } => (from, to - from),
        };
        (after, mss).saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        let (after, mss) = <(u64, u64)>::of_saved(image)?;
        let fits = (PAYLOAD_MIN.into()..=u64::from(u16::MAX)).contains(&mss);
        if fits { Ok(Self::Due { after, mss }) } else { Err(BadImage::Impossible("Trial")) }
    }
}

impl Relayed {
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
        self.trial = None;
        self.ceiling = mss;
        self.set_mss(mss);
    }

    /// As [`Self::lower_mss`]: segments of `size` bytes are lost, and no router reports it. If they
    /// are the first of the flow, one more leaves in that length, because perhaps nothing got
    /// through.
    pub(super) fn lower_mss_for_hole(&mut self, mss: u64, size: u64) {
        let trial = Trial::Due { after: self.sender.next(), mss: size };
        let is_first = self.ceiling == u64::MAX;
        self.lower_mss(mss);
        self.trial = is_first.then_some(trial);
    }

    /// G hands over one segment, of `most` bytes or less, that is longer than those that R has: it
    /// may be a probe. `false`: it is none, and later segments may be as long.
    pub(super) fn is_trial(&mut self, range: Range, most: u64) -> bool {
        let (mss, len) = (self.wire_mss(), range.len());
        let is_longer = self.proven >= mss && len > self.proven && len <= most.min(self.ceiling);
        let is_trial = is_longer && range.seq == self.accepted() && self.trial.is_none();
        if is_trial {
            self.trial = Some(Trial::Of { from: range.seq, to: range.end });
        }
        is_trial
    }

    /// How far the next new segment may reach, which without a trial is `cut`.
    pub(super) fn cut_for_trial(&self, cut: u64) -> u64 {
        let next = self.sender.next();
        match self.trial {
            Some(Trial::Due { after, mss }) if self.sender.una() >= after => cut.min(next + mss),
            Some(Trial::Of { from, .. }) if next < from => cut.min(from),
            Some(Trial::Of { to, .. }) if next < to => cut.min(to),
            _ => cut,
        }
    }

    /// Payload bytes of a segment of the bytes that leave now.
    pub(super) fn note_size(&mut self, s: &Segment) -> u64 {
        let (len, una) = (s.to - s.from, self.sender.una());
        match self.trial {
            Some(Trial::Due { after, mss }) if una >= after && len == mss && !s.again => {
                self.trial = Some(Trial::Of { from: s.from, to: s.to });
                return len;
            }
            Some(Trial::Of { from, to }) if (from, to) == (s.from, s.to) && !s.again => return len,
            Some(Trial::Of { from, to }) if s.from < to && from < s.to => {
                self.trial = None; // there was no room for all of it
                if s.again {
                    self.lower_mss_for_hole(self.wire_mss(), to - from); // it is lost
                }
            }
            _ => {}
        }
        self.wire_mss()
    }

    /// R has everything below `una`, which may include the trial.
    pub(super) fn end_trial(&mut self, una: u64) {
        let tried = self.trial.take_if(|t| matches!(t, Trial::Of { to, .. } if *to <= una));
        let Some(Trial::Of { from, to }) = tried else { return };
        let size = to - from;
        (self.proven, self.longest) = (size, self.longest.max(size));
        if self.ceiling < size {
            self.ceiling = u64::MAX; // the path was down
            self.set_mss(size);
        }
    }

    /// Twice in a row R has not acknowledged segments that are longer than any that it ever did:
    /// perhaps they do not get through, and no router reports it (FLOOD-40, RFC 4821 section 7.7).
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
    /// The segment size by the MSS options of both ends: G's own MTU is likely that of its way out.
    pub(super) fn own_mss(&self) -> u64 {
        self.options.mss_to_net.min(self.options.mss_to_guest).into()
    }

    /// A router has dropped a segment of this flow (FLOOD-39). If the segment is under way, H sends
    /// smaller ones from here on, and repeats those that are too long. The path is not congested.
    pub(crate) fn on_too_big(&mut self, cx: &mut FlowContext<'_, '_>, it: &TooBig) {
        let una = self.outbound.una();
        let under_way = (una..self.outbound.sent()).contains(&it.segment.seq.unwrap(una));
        let mss = u64::from(it.mtu).saturating_sub(self.ip_tcp_len(cx));
        let Some(relayed) = self.losses.relayed_mut().filter(|f| under_way && mss < f.wire_mss())
        else {
            return;
        };
        relayed.lower_mss(mss);
        relayed.sender.on_too_long();
        relayed.arm(cx, true);
        let before = self.options.mss_to_net;
        let mss_before = self.losses.narrow_to_net().map_or(before, |narrow| narrow.mss_before);
        self.losses.set_narrow_to_net(Some(Narrow { mss_before, until: cx.now + PATH_MTU_AGE }));
        self.options.mss_to_net = u16::try_from(mss).unwrap_or(u16::MAX);
    }

    /// The way to R may be another one by now, as Linux takes its routes to be (`mtu_expires`).
    pub(in crate::tcp) fn try_longer_to_net(&mut self, now: Instant) {
        let Some(narrow) = self.losses.narrow_to_net().filter(|n| n.until <= now) else { return };
        let learned = u64::from(self.options.mss_to_net);
        self.options.mss_to_net = narrow.mss_before;
        self.losses.set_narrow_to_net(None);
        let own = self.own_mss();
        if let Some(relayed) = self.losses.relayed_mut() {
            if relayed.ceiling == learned {
                relayed.ceiling = u64::MAX;
                relayed.set_mss(own);
            }
        } else if let Some(mut before) = self.losses.take_before() {
            before.ceiling = if before.ceiling == learned { u64::MAX } else { before.ceiling };
            self.losses.note_before(Some(before));
        }
    }
}
