//! The evidence that an ACK, or silence, gives about each segment.

use super::{Arrived, Doubt, Due, Lost, NetAck, Sender};
use crate::congestion::episode::Phase;
use crate::congestion::rack::DUP_THRESHOLD;
use crate::congestion::scoreboard::{Piece, State};
use crate::time::{Duration, Instant};

impl Sender {
    /// Updates each byte by the ACK, and takes the round trip of the newest one that it reports
    /// first.
    pub(super) fn take(&mut self, now: Instant, a: &NetAck<'_>) -> Arrived {
        let timed_out = self.episode.repairs_below();
        let (mut originals, mut copies, mut late, mut copied) = (false, 0, false, false);
        // While a timeout may have been for nothing, so may the copy: then its ACK is that of the
        // original, and does not tell when the bytes that arrive now have left.
        let doubtful = self.doubt != Doubt::None;
        let (una, is_timeout) = (self.una(), self.episode.phase() == Phase::Timeout);
        let Self { board, rack, rtt, episode, .. } = self;
        let soonest = rtt.soonest();
        let mut sample = Some(Duration::from_nanos(u64::MAX));
        let blocks = if self.sack { a.blocks } else { &[] };
        let news = board.on_ack(a.ack, blocks, |p| {
            let is_late = if p.again {
                let echo = a.echo.filter(|_| p.from == una);
                episode.copies().on_arrived(now, p, soonest, echo)
            } else {
                p.state == State::Lost && !is_timeout // of which no copy has left
            };
            late |= is_late;
            if !(p.again && (doubtful || is_late)) {
                rack.on_delivered(now, p, rtt);
            }
            if p.again {
                copied = true;
                // Bytes that R may have discarded and that were not sent since are no copies that
                // arrive.
                copies += if p.state == State::Flying { p.to - p.from } else { 0 };
                // Karn: an ACK that a copy may have brought says nothing of what it also covers.
                if p.to <= a.ack {
                    sample = None;
                }
            } else if let Some(shortest) = &mut sample {
                *shortest = (*shortest).min(now.since(p.sent_at));
            }
            originals |= !p.again && p.to <= timed_out;
        });
        // Without SACK what a copy has brought may hide that other bytes which it covers had come
        // before.
        originals &= self.sack || !copied;
        let sample = sample.filter(|rtt| *rtt < Duration::from_nanos(u64::MAX));
        let (delivered, acked) = (news.bytes, news.acked);
        Arrived { delivered, copies, originals, late, acked, sample, marked: a.ece }
    }

    /// Whether a copy was needed, or came where the original was only late. If none was needed the
    /// repair was for nothing (FLOOD-44); `dsack`: R says that something came twice.
    pub(super) fn judge_copies(&mut self, dsack: bool, arrived: &Arrived) {
        if arrived.late && self.episode.phase() != Phase::Timeout {
            self.rack.on_late();
            if !self.sack {
                // Each duplicate spoke of a segment, many of which may be short; or was lost.
                let overtook = (arrived.acked / self.mss).max(self.duplicates + 1);
                self.rack.on_overtaken(overtook);
                self.misled = self.episode.phase() == Phase::Recovery;
            }
        }
        if (arrived.late || dsack) && self.episode.copies().are_needless() {
            self.episode.on_spurious();
            self.board.unmark_lost();
            self.doubt = Doubt::None;
            if matches!(self.due, Due::First | Due::Fresh(_)) {
                self.due = Due::Nothing;
            }
        }
    }

    /// After a timeout: whether it came too early, because bytes thought lost arrive although they
    /// were not sent again (F-RTO, RFC 5682 section 3). The first ACK that moves lets two new
    /// segments out instead of copies; the second tells.
    pub(super) fn is_timeout_spurious(
        &mut self,
        now: Instant,
        originals: bool,
        moved: bool,
    ) -> bool {
        if matches!(self.due, Due::Fresh(_)) {
            self.due = Due::Nothing;
        }
        let more = self.end.min(self.net_edge) > self.next();
        let over = self.una() >= self.episode.repairs_below();
        match core::mem::replace(&mut self.doubt, Doubt::None) {
            Doubt::Begun if moved && more && !over => {
                self.doubt = Doubt::Tested;
                self.board.unmark_lost();
                self.due = Due::Fresh(2);
                false
            }
            Doubt::Tested if originals => true,
            Doubt::Tested => {
                // Except bytes that have left again since then.
                let spared = self.episode.reduced_at();
                self.give_up_what_is_late(now, self.episode.repairs_below(), spared);
                false
            }
            Doubt::Begun | Doubt::None => false,
        }
    }

    /// Finds losses by an ACK. `una_before`: before the ACK.
    pub(super) fn find_losses(
        &mut self,
        now: Instant,
        duplicate: bool,
        moved: bool,
        una_before: u64,
    ) -> Lost {
        if !self.sack {
            return Lost { some: self.is_lost_by_duplicates(duplicate, moved), ..Lost::default() };
        }
        if self.board.may_have_gaps(una_before) { self.detect(now) } else { Lost::default() }
    }

    /// RACK's judgement of what is under way (RFC 8985 section 6.2, step 5).
    pub(super) fn detect(&mut self, now: Instant) -> Lost {
        let at_once =
            self.episode.is_repairing() || self.board.sacked() >= DUP_THRESHOLD * self.mss;
        let window = self.rack.reordering_window(&self.rtt, at_once);
        let (reduced_at, until) = (self.episode.reduced_at(), self.episode.until());
        let Self { board, rack, .. } = self;
        let (mut again, mut beyond, mut late) = (false, false, None);
        let lost = board.mark_lost(|p| match rack.lost_at(p, window) {
            Some(at) if at <= now => {
                again |= p.again && p.sent_at >= reduced_at;
                beyond |= p.from >= until;
                true
            }
            at => {
                late = late.max(at);
                false
            }
        });
        self.reordering = late.unwrap_or(Instant::MAX); // the last of them counts
        if lost > 0 {
            self.probe.forget(); // a recovery begins, or is under way
        }
        Lost { some: lost > 0, again, beyond }
    }

    /// Duplicate ACKs of an R without SACK: each speaks of a segment that has arrived (RFC 5681
    /// section 3.2). How many bytes have arrived by this ACK, those that duplicates spoke of not
    /// counted twice (RFC 9937 section 5). An R that makes them up gains at most the bytes under
    /// way (RFC 5681 section 3.2, step 4; SEC-03).
    pub(super) fn count_duplicates(&mut self, now: Instant, duplicate: bool, acked: u64) -> u64 {
        if acked > 0 {
            let counted = self.duplicates.min((acked / self.mss).saturating_sub(1));
            let over = self.una() >= self.episode.repairs_below();
            let over = over || self.episode.phase() == Phase::Timeout;
            self.duplicates = if over { 0 } else { self.duplicates - counted };
            return acked - counted * self.mss;
        }
        let threshold = self.rack.duplicates_of_loss();
        let most = match self.episode.phase() {
            // Each may let a new segment out (RFC 3042 section 2), the last one means a loss.
            Phase::Open | Phase::Reduction if self.may_miss_first(now) => threshold,
            Phase::Open | Phase::Reduction => threshold - 1,
            Phase::Recovery => (self.duplicates_end - self.una()) / self.mss,
            // Copies of what had arrived make them too. Linux: `tcp_process_loss()`.
            Phase::Timeout => (self.next() - self.episode.until()) / self.mss,
        };
        if !duplicate || self.duplicates >= most {
            return 0;
        }
        // Where more than the least number is waited for: one segment at least is missing, so that
        // as many as are out are of copies (Linux: `tcp_limit_reno_sacked()`).
        let segments = self.board.flight() / self.mss;
        let waits = most == threshold && self.duplicates >= DUP_THRESHOLD;
        if waits && self.duplicates + 1 >= segments {
            self.rack.on_overtaken(segments);
            return 0;
        }
        self.duplicates += 1;
        self.mss
    }

    /// Duplicate ACKs may speak of the first segment under way: it left at least a round trip ago,
    /// and they are not about what was sent again before it (RFC 6582 section 3.2).
    fn may_miss_first(&self, now: Instant) -> bool {
        let shortest = self.rtt.min().unwrap_or_default();
        let first = self.board.pieces().next();
        self.una() > self.recover && first.is_none_or(|p| p.sent_at + shortest <= now)
    }

    /// The third duplicate ACK, or a later one where so many have overtaken one before, means a
    /// loss, and while that is repaired each partial acknowledgement another (RFC 6582 section
    /// 3.2), but not of what has left again for this repair: R may acknowledge a copy in parts.
    /// Where that has called for copies of what was under way, duplicates alone mean a loss again.
    fn is_lost_by_duplicates(&mut self, duplicate: bool, moved: bool) -> bool {
        let is_recovery = self.episode.phase() == Phase::Recovery;
        self.misled &= is_recovery;
        let enough = self.duplicates >= self.rack.duplicates_of_loss();
        let is_news = !self.episode.is_repairing() || (self.misled && !self.is_first_repaired());
        let third = duplicate && enough && is_news;
        if third {
            self.duplicates_end = self.next();
        }
        let partial = moved
            && is_recovery
            && !self.misled
            && self.una() < self.episode.repairs_below()
            && !self.is_first_repaired();
        (third || partial) && self.board.mark_first_lost() > 0
    }

    /// The first bytes under way have left again since the window was reduced.
    fn is_first_repaired(&self) -> bool {
        let reduced_at = self.episode.reduced_at();
        self.board.pieces().next().is_some_and(|p| p.again && p.sent_at >= reduced_at)
    }

    /// The retransmission timeout: of what lies below `end`, all that left more than a round trip
    /// ago is lost (RFC 8985 section 6.3); without SACK everything is. An R that has SACKed the
    /// first byte and does not acknowledge it has thrown it away (RFC 2018 section 8).
    /// Copies that left at `spared` or later are on their way.
    pub(super) fn give_up_what_is_late(&mut self, now: Instant, end: u64, spared: Instant) {
        if self.board.pieces().next().is_some_and(|p| p.state == State::Sacked) {
            self.board.forget_sacks();
        }
        let window = self.rack.reordering_window(&self.rtt, true);
        let (una, rack, sack) = (self.una(), self.rack, self.sack);
        let is_lost = |p: &Piece| {
            let is_new = p.again && p.sent_at >= spared;
            !sack || !is_new && rack.is_lost_at_timeout(p, una, now, window)
        };
        self.board.mark_lost(|p| p.to <= end && is_lost(p));
    }
}

/// The bytes that a DSACK reports: the first block, if it lies below the acknowledgement or within
/// the second block (RFC 2883 section 4).
pub(super) fn dsack(a: &NetAck<'_>) -> Option<(u64, u64)> {
    let twice = match a.blocks {
        [(_, to), ..] if *to <= a.ack => true,
        [(from, to), (outer_from, outer_to), ..] => outer_from <= from && to <= outer_to,
        _ => false,
    };
    twice.then(|| a.blocks[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_below_the_acknowledgement_or_within_the_second_is_a_dsack() {
        let dsack = |ack, blocks: &[(u64, u64)]| {
            dsack(&NetAck { ack, blocks, edge: 9000, ece: false, echo: None, bare: true }).is_some()
        };
        assert!(dsack(2000, &[(1000, 2000)]));
        assert!(dsack(2000, &[(4000, 5000), (3000, 6000)]));
        assert!(!dsack(2000, &[]) && !dsack(2000, &[(3000, 4000)]));
        assert!(!dsack(2000, &[(3000, 4000), (5000, 6000)]));
        assert!(!dsack(2000, &[(3000, 5000), (4000, 6000)]));
    }
}
