//! Which of the bytes that were sent are under way, SACKed, or lost (RFC 2018, RFC 6675).
//!
//! All bytes from the oldest unacknowledged (`una`) to the newest that was sent (`next`) are in one
//! queue of runs, in their order in the stream. The bytes of a run are alike: they left at the same
//! instant, and had the same fate since. An ACK cuts runs at exactly the bytes that it names, and
//! neighbours that have become alike are joined again. So a path without losses has one run for
//! each burst.
//!
//! ```text
//!   una                                                    next
//!    | lost   | SACKed      | flying, again | SACKed | flying |
//! ```
//!
//! It decides nothing: [`super::rack`] decides which bytes are lost.

use std::collections::VecDeque;

use crate::limits::{SENT_RUNS_MAX, SENT_RUNS_MIN, SENT_RUNS_PER_SEGMENT};
use crate::time::Instant;

/// Where the bytes of a run are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum State {
    /// On their way, for all we know.
    Flying,
    /// R has them, and has said so without acknowledging all below.
    Sacked,
    /// Not on their way any more: to be sent again.
    Lost,
}

/// Bytes that are alike; they begin where the run before ends.
#[derive(Clone, Copy, Debug)]
struct Run {
    end: u64,
    /// When they last left.
    sent_at: Instant,
    /// Bytes of the longest segment in which they left, at most.
    longest: u32,
    state: State,
    /// They were sent more than once.
    again: bool,
}

impl Run {
    /// The run that follows is alike, and becomes a part of this one.
    fn join(&mut self, next: &Self) {
        (self.end, self.longest) = (next.end, self.longest.max(next.longest));
    }

    /// The same could be said of both; when SACKed bytes left no longer matters.
    fn is_like(&self, other: &Self) -> bool {
        let same_time = self.sent_at == other.sent_at && self.again == other.again;
        self.state == other.state && (same_time || self.state == State::Sacked)
    }
}

/// A run with both its ends, for those who judge it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Piece {
    /// First byte.
    pub from: u64,
    /// End: the byte behind the last.
    pub to: u64,
    /// When it last left.
    pub sent_at: Instant,
    /// It was sent more than once.
    pub again: bool,
    /// Where it is, or was until now.
    pub state: State,
}

/// The effects of an ACK on the scoreboard.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Delivered {
    /// By how much `una` moved.
    pub acked: u64,
    /// Bytes that R has for the first time, acknowledged or SACKed.
    pub bytes: u64,
}

/// See the module doc.
#[derive(Clone, Debug)]
pub struct Scoreboard {
    runs: VecDeque<Run>,
    una: u64,
    next: u64,
    /// Bytes of runs that are SACKed.
    sacked: u64,
    /// Bytes of runs that are lost.
    lost: u64,
    /// End of the highest byte that was sent again.
    copies_end: u64,
    mss: u64,
}

impl Scoreboard {
    /// Nothing was sent; the first byte will be `first`.
    #[must_use]
    pub const fn new(first: u64, mss: u64) -> Self {
        Self {
            runs: VecDeque::new(),
            una: first,
            next: first,
            sacked: 0,
            lost: 0,
            copies_end: first,
            mss,
        }
    }

    /// Everything below is acknowledged.
    #[must_use]
    pub const fn una(&self) -> u64 {
        self.una
    }

    /// Everything below was sent.
    #[must_use]
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Bytes that are sent and not acknowledged (`FlightSize` of RFC 5681).
    #[must_use]
    pub const fn flight(&self) -> u64 {
        self.next - self.una
    }

    /// Bytes that R has beyond `una`.
    #[must_use]
    pub const fn sacked(&self) -> u64 {
        self.sacked
    }

    /// Bytes to be sent again.
    #[must_use]
    pub const fn lost(&self) -> u64 {
        self.lost
    }

    /// Bytes that are on their way (`pipe` of RFC 6675, each byte counted once).
    #[must_use]
    pub const fn pipe(&self) -> u64 {
        self.flight() - self.sacked - self.lost
    }

    /// Something that was sent earlier than an arrival may be missing, now that the acknowledgement
    /// has moved from `una_before`. Without SACKed bytes and copies all is in order.
    #[must_use]
    pub const fn may_have_gaps(&self, una_before: u64) -> bool {
        self.sacked > 0 || una_before < self.copies_end
    }

    /// Runs kept.
    #[must_use]
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// All bytes from `una` to `next`, in order.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        let mut from = self.una;
        self.runs.iter().map(move |run| {
            let piece = piece(from, run);
            from = run.end;
            piece
        })
    }

    /// The first bytes to be sent again.
    #[must_use]
    pub fn first_lost(&self) -> Option<(u64, u64)> {
        if self.lost == 0 {
            return None;
        }
        self.pieces().find(|p| p.state == State::Lost).map(|p| (p.from, p.to))
    }

    /// New bytes `[next, to)` leave.
    pub fn on_sent(&mut self, to: u64, now: Instant) {
        debug_assert!(to > self.next, "nothing sent");
        let longest = self.segment_len(to - self.next);
        let run = Run { end: to, sent_at: now, longest, state: State::Flying, again: false };
        match self.runs.back_mut() {
            Some(last) if last.is_like(&run) => last.join(&run),
            _ => self.runs.push_back(run),
        }
        self.next = to;
    }

    /// Bytes `[from, to)` leave once more. Those that are SACKed meanwhile stay so.
    pub fn on_sent_again(&mut self, from: u64, to: u64, now: Instant) {
        self.copies_end = self.copies_end.max(to);
        let longest = self.segment_len(to - from);
        self.change(from, to, |run| {
            if run.state != State::Sacked {
                let end = run.end;
                *run = Run { end, sent_at: now, longest, state: State::Flying, again: true };
            }
        });
    }

    /// An acknowledgement of all below `ack` and of `blocks`. `delivered` is told every piece that
    /// R has for the first time, in their order in the stream: in that of the blocks, of which the
    /// newest comes first, an ACK that was lost would look as if R had got later bytes earlier.
    pub fn on_ack(
        &mut self,
        ack: u64,
        blocks: &[(u64, u64)],
        mut delivered: impl FnMut(&Piece),
    ) -> Delivered {
        let before = self.una;
        let mut news = 0;
        while let Some(run) = self.runs.front().copied().filter(|_| self.una < ack) {
            let to = run.end.min(ack);
            let p = Piece { to, ..piece(self.una, &run) };
            self.count(run.state, to - self.una, false);
            self.una = to;
            if to == run.end {
                self.runs.pop_front();
            }
            if run.state != State::Sacked {
                news += p.to - p.from;
                delivered(&p);
            }
        }
        let mut last = (0, 0);
        while let Some(&(from, to)) = blocks.iter().filter(|block| **block > last).min() {
            last = (from, to);
            if from < to && from >= self.una && to <= self.next && self.may_cut() {
                news += self.on_block(from, to, &mut delivered);
            }
        }
        debug_assert!(self.is_consistent(), "{self:?}");
        Delivered { acked: self.una - before, bytes: news }
    }

    /// Marks every flying piece that `is_lost` says is; how many bytes that are.
    pub fn mark_lost(&mut self, mut is_lost: impl FnMut(&Piece) -> bool) -> u64 {
        self.mark(|_, p| is_lost(p))
    }

    /// The same of all that may have left in segments of more than `mss` bytes.
    pub fn mark_longer_lost(&mut self, mss: u64) {
        self.mark(|run, _| u64::from(run.longest) > mss);
    }

    fn mark(&mut self, mut is_lost: impl FnMut(&Run, &Piece) -> bool) -> u64 {
        let before = self.lost;
        let mut from = self.una;
        for run in &mut self.runs {
            let p = piece(from, run);
            if run.state == State::Flying && is_lost(run, &p) {
                run.state = State::Lost;
                self.lost += p.to - p.from;
            }
            from = run.end;
        }
        self.join_all();
        self.lost - before
    }

    /// Marks the first segment that R does not have, if it is flying: for an R without SACK. How
    /// many bytes that are.
    pub fn mark_first_lost(&mut self) -> u64 {
        let before = self.lost;
        let Some(head) = self.pieces().next().filter(|p| p.state == State::Flying) else {
            return 0;
        };
        let to = head.to.min(head.from + self.mss);
        self.change(head.from, to, |run| run.state = State::Lost);
        self.lost - before
    }

    /// R may have thrown away what it SACKed (RFC 2018 section 8): none of it counts any more.
    pub fn forget_sacks(&mut self) {
        for run in self.runs.iter_mut().filter(|run| run.state == State::Sacked) {
            // When its bytes left is no longer known; nothing is to be learned from their arrival.
            (run.state, run.again) = (State::Lost, true);
        }
        self.lost += core::mem::take(&mut self.sacked);
        self.join_all();
    }

    /// The lost pieces were not lost after all: they are on their way, or R has them.
    pub fn unmark_lost(&mut self) {
        for run in self.runs.iter_mut().filter(|run| run.state == State::Lost) {
            run.state = State::Flying;
        }
        self.lost = 0;
        self.join_all();
    }

    /// Segments are of this size from now on.
    pub const fn set_mss(&mut self, mss: u64) {
        self.mss = mss;
    }

    // --- Runs ----------------------------------------------------------------------------------

    /// SACK is advice (RFC 2018 section 8), so ignored blocks do no harm.
    fn may_cut(&self) -> bool {
        let segments = self.flight() / self.mss.max(1);
        let most = (segments * SENT_RUNS_PER_SEGMENT).clamp(SENT_RUNS_MIN, SENT_RUNS_MAX);
        (self.runs.len() as u64) < most
    }

    /// R has `[from, to)`. How many bytes of it are news.
    fn on_block(&mut self, from: u64, to: u64, delivered: &mut impl FnMut(&Piece)) -> u64 {
        let before = self.sacked;
        self.change_each(from, to, |run, p| {
            if run.state != State::Sacked {
                delivered(p);
                run.state = State::Sacked;
            }
        });
        self.sacked - before
    }

    fn change(&mut self, from: u64, to: u64, mut f: impl FnMut(&mut Run)) {
        self.change_each(from, to, |run, _| f(run));
    }

    /// Cuts runs at both ends, lets `f` change those in between, and joins what is alike then.
    fn change_each(&mut self, from: u64, to: u64, mut f: impl FnMut(&mut Run, &Piece)) {
        let first = self.cut(from);
        let last = self.cut(to);
        let mut at = from;
        for i in first..last {
            let run = &mut self.runs[i];
            let p = piece(at, run);
            f(run, &p);
            let (was, is) = (p.state, run.state);
            at = run.end;
            self.count(was, p.to - p.from, false);
            self.count(is, p.to - p.from, true);
        }
        self.join(first.saturating_sub(1), last);
    }

    /// Makes a run begin at `at`, which is from `una` to `next`; its index.
    fn cut(&mut self, at: u64) -> usize {
        let i = self.runs.partition_point(|run| run.end <= at);
        let from = if i == 0 { self.una } else { self.runs[i - 1].end };
        let Some(run) = self.runs.get(i).copied().filter(|_| from < at) else { return i };
        self.runs.insert(i, Run { end: at, ..run });
        i + 1
    }

    /// Joins runs `first..=last` with their successors where they are alike.
    fn join(&mut self, first: usize, last: usize) {
        let last = last.min(self.runs.len().saturating_sub(1));
        for i in (first..last).rev() {
            if self.runs[i].is_like(&self.runs[i + 1]) {
                let next = self.runs.remove(i + 1);
                next.into_iter().for_each(|next| self.runs[i].join(&next));
            }
        }
    }

    fn join_all(&mut self) {
        self.join(0, self.runs.len());
    }

    /// Bytes of the longest segment of `bytes` that leave now.
    fn segment_len(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.min(self.mss)).unwrap_or(u32::MAX)
    }

    fn count(&mut self, state: State, bytes: u64, more: bool) {
        let counter = match state {
            State::Flying => return,
            State::Sacked => &mut self.sacked,
            State::Lost => &mut self.lost,
        };
        if more {
            *counter += bytes;
        } else {
            *counter -= bytes;
        }
    }

    fn is_consistent(&self) -> bool {
        let of = |state| {
            let of_state = self.pieces().filter(move |p| p.state == state);
            of_state.map(|p| p.to - p.from).sum::<u64>()
        };
        let end = self.runs.back().map_or(self.una, |run| run.end);
        end == self.next && of(State::Sacked) == self.sacked && of(State::Lost) == self.lost
    }
}

fn piece(from: u64, run: &Run) -> Piece {
    Piece { from, to: run.end, sent_at: run.sent_at, again: run.again, state: run.state }
}

#[cfg(test)]
mod tests;
