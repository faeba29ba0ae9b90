//! Which copies of a repair were needed: if none was, the repair was for nothing, and the reduction
//! of the window is undone (FLOOD-44).
//!
//! The timestamps of an original and its copy are often the same, for they are G's (FLOOD-41). But
//! H's clock tells one from the other: a piece that R has sooner than a round trip after its first
//! copy left is the original. A DSACK tells the same later (RFC 3708; Linux: `tcp_check_dsack()`),
//! and so do timestamps between which G's clock has moved (RFC 3522), and a piece thought lost that
//! arrives before a copy of it has left.

use crate::congestion::scoreboard::Piece;
use crate::limits::REMEMBERED_COPIES_MAX;
use crate::time::{Duration, Instant};
use crate::wire::seq::Seq;

/// Bytes that left once more, and are not known to have been needless.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Copied {
    from: u64,
    to: u64,
    /// When the first of them left, and the timestamp that it carried.
    at: Instant,
    stamp: Option<u32>,
    /// They were found missing by what had arrived, not by a timer.
    missed: bool,
}

/// See the module doc.
#[derive(Clone, Debug, Default)]
pub struct Copies {
    /// In the order in which they left.
    list: Vec<Copied>,
    /// All copies since the repair began, and those that were under way then, are, or were, in the
    /// list, and the window was reduced for nothing else.
    complete: bool,
}

impl Copies {
    /// A repair begins, and is not to be undone if a mark or another reduction came with it. Bytes
    /// below `una` are no part of it (Linux: `tcp_init_undo()`).
    pub fn begin(&mut self, una: u64, may_undo: bool) {
        self.list.retain(|c| c.to > una);
        self.complete = may_undo;
    }

    /// The window was reduced for something else.
    pub const fn forbid(&mut self) {
        self.complete = false;
    }

    /// The reduction can be undone.
    #[must_use]
    pub const fn may_undo(&self) -> bool {
        self.complete
    }

    /// It is undone.
    pub fn clear(&mut self) {
        self.list.clear();
        self.complete = false;
    }

    /// A copy leaves, with this timestamp. `missed`: earlier arrivals called for it, not a timer.
    pub fn on_sent(
        &mut self,
        (from, to): (u64, u64),
        at: Instant,
        stamp: Option<u32>,
        missed: bool,
    ) {
        if let Some(last) = self.list.last_mut()
            && last.to == from
            && last.missed == missed
        {
            last.to = to;
        } else if self.list.len() < REMEMBERED_COPIES_MAX {
            self.list.push(Copied { from, to, at, stamp, missed });
        } else {
            self.clear();
        }
    }

    /// R has this piece, which left more than once, for the first time. `true`: it is the original,
    /// for no answer to the first copy can have come yet, which takes `soonest` at least, or R
    /// echoes a timestamp older than the first copy's. That tells nothing if G's clock stood still
    /// in between, and only what is acknowledged first has brought the `echo`.
    pub fn on_arrived(
        &mut self,
        now: Instant,
        p: &Piece,
        soonest: Option<Duration>,
        echo: Option<u32>,
    ) -> bool {
        let is_earlier = |c: &Copied| {
            let by_stamp = echo.zip(c.stamp).is_some_and(|(echo, own)| Seq(echo).lt(Seq(own)));
            by_stamp || soonest.is_some_and(|soonest| now < c.at + soonest)
        };
        let mut of_it = self.list.iter().filter(|c| c.from < p.to && p.from < c.to).peekable();
        let is_original = of_it.peek().is_some() && of_it.all(is_earlier);
        if is_original {
            self.remove(p.from, p.to, usize::MAX);
        }
        is_original
    }

    /// R has got these bytes twice (RFC 2883). `true`: earlier arrivals had called for a copy of
    /// them, so they had come late.
    pub fn on_dsack(&mut self, from: u64, to: u64) -> bool {
        let named = self.list.iter().find(|c| c.from < to && from < c.to).copied();
        self.remove(from, to, 1);
        named.is_some_and(|c| c.missed)
    }

    /// No copy of the repair was needed, as far as there were any.
    #[must_use]
    pub const fn are_needless(&self) -> bool {
        self.complete && self.list.is_empty()
    }

    /// Takes `[from, to)` out of the first `most` entries that have some of it.
    fn remove(&mut self, from: u64, to: u64, mut most: usize) {
        for c in core::mem::take(&mut self.list) {
            if c.to <= from || to <= c.from || most == 0 {
                self.list.push(c);
                continue;
            }
            most -= 1;
            let rests = [Copied { to: from, ..c }, Copied { from: to, ..c }];
            self.list.extend(rests.into_iter().filter(|c| c.from < c.to));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::scoreboard::State;

    fn at(ms: u64) -> Instant {
        Instant::from_secs(9) + Duration::from_millis(ms)
    }

    fn arrives(copies: &mut Copies, ms: u64, from: u64, to: u64) -> bool {
        let p = Piece { from, to, sent_at: at(0), again: true, state: State::Flying };
        copies.on_arrived(at(ms), &p, Some(Duration::from_millis(40)), None)
    }

    fn repair() -> Copies {
        let mut copies = Copies::default();
        copies.begin(0, true);
        copies.on_sent((0, 1000), at(0), Some(70), true);
        copies.on_sent((5000, 7000), at(10), Some(71), true);
        copies
    }

    #[test]
    fn flood_44_what_comes_within_a_round_trip_of_its_copy_is_the_original() {
        let mut copies = repair();
        assert!(!arrives(&mut copies, 40, 0, 1000), "the copy may have come");
        assert!(arrives(&mut copies, 39, 0, 1000) && !copies.are_needless());
        assert!(arrives(&mut copies, 49, 5000, 6000) && !copies.are_needless());
        assert!(arrives(&mut copies, 49, 6000, 7000) && copies.are_needless());
        assert!(!arrives(&mut copies, 49, 6000, 7000), "nothing is known of it");
    }

    #[test]
    fn flood_44_a_timestamp_older_than_the_copy_s_is_the_original_s() {
        let p = Piece { from: 0, to: 1000, sent_at: at(0), again: true, state: State::Flying };
        for (echo, is_original) in [(Some(69), true), (Some(70), false), (None, false)] {
            assert_eq!(repair().on_arrived(at(90), &p, None, echo), is_original, "{echo:?}");
        }
    }

    #[test]
    fn flood_44_the_first_of_two_copies_may_have_come_instead() {
        let mut copies = repair();
        copies.on_sent((0, 1000), at(60), Some(75), true);
        assert!(!arrives(&mut copies, 70, 0, 1000));
        assert!(copies.on_dsack(0, 1000), "one of them came twice");
        assert!(copies.on_dsack(5000, 7000) && !copies.are_needless());
        assert!(copies.on_dsack(0, 1000) && copies.are_needless());
    }

    #[test]
    fn flood_45_a_probe_that_was_not_needed_is_no_reordering() {
        let mut copies = Copies::default();
        copies.on_sent((0, 1000), at(0), None, false);
        copies.begin(0, true);
        assert!(!copies.on_dsack(0, 1000) && copies.are_needless());
    }

    #[test]
    fn a_repair_that_is_not_known_whole_is_not_undone() {
        let mut copies = repair();
        for i in 0..2 * u64::try_from(REMEMBERED_COPIES_MAX).unwrap() {
            copies.on_sent((10_000 * i, 10_000 * i + 1), at(20), None, true);
            assert!(copies.list.len() <= REMEMBERED_COPIES_MAX);
        }
        assert!(!copies.may_undo() && !copies.are_needless());
        copies.begin(u64::MAX, true);
        assert!(copies.are_needless(), "no copy has left since");
    }
}
