//! Which segment leaves next.

use super::{Due, Segment, Sender};
use crate::congestion::episode::Phase;
use crate::time::Instant;

impl Sender {
    /// The next segment, of at most `room` bytes; new data not beyond `cut`, where a segment of G
    /// ends (FLOOD-07).
    #[must_use]
    pub fn poll(&mut self, now: Instant, room: u64, cut: u64) -> Option<Segment> {
        let due = if self.due == Due::Nothing { None } else { self.poll_due(room, cut) };
        let segment = match due {
            Some(segment) => segment,
            None => self.poll_allowed(now, room, cut)?,
        };
        let bytes = segment.to - segment.from;
        if segment.from == self.una() || bytes == 0 {
            self.since = now; // its answer takes a round trip from here
        }
        if bytes == 0 {
            return Some(segment); // a window probe
        }
        if segment.again {
            self.retransmissions += 1;
            let missed = self.episode.phase() == Phase::Recovery;
            let range = (segment.from, segment.to);
            self.episode.copies().on_sent(range, now, self.stamp, missed);
            self.board.on_sent_again(segment.from, segment.to, now);
        } else {
            self.board.on_sent(segment.to, now);
        }
        self.episode.on_sent(bytes);
        self.pacer.on_sent(now, bytes);
        self.sent_at = now;
        Some(segment)
    }

    /// The segment that a timer owes, if it is still wanted.
    fn poll_due(&mut self, room: u64, cut: u64) -> Option<Segment> {
        let whole = self.mss.min(room);
        match core::mem::replace(&mut self.due, Due::Nothing) {
            Due::Nothing => None,
            Due::First => {
                let (from, to) = self.board.first_lost()?;
                Some(self.copy(from, to.min(from + whole)))
            }
            Due::Fresh(left) => {
                self.due = if left > 1 { Due::Fresh(left - 1) } else { Due::Nothing };
                self.fresh(whole, cut)
            }
            Due::Probe if self.board.flight() > 0 => {
                let segment = self.fresh(whole, cut).unwrap_or_else(|| {
                    let from = self.next().saturating_sub(whole).max(self.una());
                    self.copy(from, self.next())
                });
                self.probe.on_sent(segment.to, segment.again);
                Some(segment)
            }
            Due::WindowProbe if self.is_shut() => {
                let at = self.una() - 1;
                Some(Segment { from: at, to: at, again: true, cwr: false })
            }
            Due::Probe | Due::WindowProbe => None, // an ACK came in between
        }
    }

    /// [`Self::poll`] may have something; it has not if there is nothing to send, or window or pace
    /// hold it back.
    #[must_use]
    pub fn may_send(&mut self, now: Instant) -> bool {
        let lost = self.board.first_lost();
        self.due != Due::Nothing
            || (self.has_work(lost)
                && (self.board.flight() == 0 || self.permitted(now, lost).is_some()))
    }

    fn copy(&self, from: u64, to: u64) -> Segment {
        Segment { from, to, again: true, cwr: false }
    }

    /// There is something to send again, or something new that R has room for.
    const fn has_work(&self, lost: Option<(u64, u64)>) -> bool {
        let next = self.next();
        lost.is_some() || (self.end > next && self.net_edge > next)
    }

    /// Bytes that window and pace allow. None: they hold back a segment.
    fn permitted(&mut self, now: Instant, lost: Option<(u64, u64)>) -> Option<u64> {
        let allowance = self.episode.allowance(self.in_flight());
        if allowance < self.mss.min(self.wanted(lost)) {
            self.episode.on_pressed();
            return None;
        }
        let paced = self.pacer.available(now);
        if paced < self.mss {
            self.episode.on_pressed();
            return None;
        }
        Some(allowance.min(paced))
    }

    /// The bytes that window and pace allow.
    fn poll_allowed(&mut self, now: Instant, room: u64, cut: u64) -> Option<Segment> {
        let lost = self.board.first_lost();
        if !self.has_work(lost) {
            return None;
        }
        if self.board.flight() == 0 {
            self.episode.on_idle(now, self.sent_at, self.rtt.rto());
            if self.pacer.has_rate() {
                self.set_pace(now);
            } // else this is a sender's first window, which leaves at once
        }
        self.pacer.on_idle(now, self.sent_at);
        let most = self.permitted(now, lost)?.min(room);
        let whole = (most / self.mss * self.mss).max(self.mss.min(room));
        if let Some((from, to)) = lost {
            return Some(self.copy(from, to.min(from + whole)));
        }
        self.fresh(whole, cut)
    }

    /// Bytes of the segment that would be next.
    fn wanted(&self, lost: Option<(u64, u64)>) -> u64 {
        lost.map_or(self.end - self.next(), |(from, to)| to - from)
    }

    /// New data, of `whole` bytes at most. The part of R's window that is less than a segment waits
    /// while something is under way (RFC 9293 section 3.8.6.2.1).
    fn fresh(&mut self, whole: u64, cut: u64) -> Option<Segment> {
        let from = self.next();
        let handed_over = self.end.min(cut.max(from));
        let mut to = handed_over.min(from + whole);
        if to > self.net_edge {
            let room = self.net_edge.saturating_sub(from);
            let full = room / self.mss * self.mss;
            to = from + if full == 0 && self.board.flight() == 0 { room } else { full };
        }
        if to <= from {
            return None;
        }
        let cwr = self.episode.take_cwr();
        if cwr {
            to = to.min(from + self.mss); // in no super-segment, whose parts would all carry it
        }
        Some(Segment { from, to, again: false, cwr })
    }
}
