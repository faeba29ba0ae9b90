//! The way of R's bytes inside and behind G, known from the first loss there on (FWD-04).
//!
//! In a guest that is the end of its connections nothing is lost, and there is no such state. A
//! loss shows a queue that overflows, in G or behind it. From then on bytes under way are limited
//! by a window (RFC 5681), bytes that have arrived are known by G's SACK blocks (RFC 6675), and the
//! timeout follows the round trip (RFC 6298). All of that is forgotten after
//! [`limits::GUEST_PATH_AGE`] without a loss.

use super::Recovery;
use crate::congestion::prr::{Progress, Prr};
use crate::limits;
use crate::store::ranges::{InsertOutcome, Ranges};
use crate::time::{Duration, Instant};
use crate::wire::saved::{NUMBER_MAX, saved};

/// A window that was reduced by a timeout, as it was before.
#[derive(Clone, Copy, Debug)]
struct Doubt {
    window: u64,
    threshold: u64,
    /// The timeout was the first that was known of this way.
    first: bool,
    /// Bytes that were repeated, and that G is not known to have got twice.
    copies: u64,
}

saved!(Doubt { window as OrNone, threshold as OrNone, first, copies });

/// The range that was sent, before an acknowledgement or timeout.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnderWay {
    /// Everything below is acknowledged.
    pub(super) una: u64,
    /// End of what is under way.
    pub(super) next: u64,
    /// End of what was ever sent.
    pub(super) sent: u64,
}

/// See the module doc.
#[derive(Debug)]
pub(crate) struct Path {
    /// Bytes that may be under way to G.
    window: u64,
    /// Slow start ends at this window.
    threshold: u64,
    /// Bytes acknowledged since the window last grew by a segment.
    grown: u64,
    /// The window was reduced for what is lost below this.
    reduced: u64,
    /// Running time of the newest loss; none if there was none after all.
    lost_at: Option<Instant>,
    /// Bytes that G has beyond its acknowledgement.
    arrived: Ranges,
    /// Bytes that it has got for the first time, by its present ACK.
    delivered: u64,
    /// While the window is being reduced, until everything below [`Self::reduced`] is acknowledged.
    reduction: Option<Prr>,
    /// The end of a segment whose answer is timed, and the running time at which it was sent. It
    /// was sent once (Karn's algorithm, RFC 6298 section 3).
    timed: Option<(u64, Instant)>,
    /// Smoothed round trip and its variation, in nanoseconds of running time.
    round_trip: Option<(u64, u64)>,
    /// A timeout may have been for nothing: G was slow.
    doubt: Option<Doubt>,
}

saved! {
    Path {
        window as OrNone, threshold as OrNone, grown, reduced, lost_at as Running, arrived,
        delivered, reduction, timed as Running, round_trip, doubt,
    }
    check |it| it.round_trip.is_none_or(|(mean, variation)| mean.max(variation) <= LONG)
}

/// Longer than any round trip, in nanoseconds: eight of these are still a number.
const LONG: u64 = NUMBER_MAX / 8;

impl Path {
    /// A way of which nothing is known (RFC 6928).
    pub(in crate::tcp) fn new(running: Instant, mss: u64) -> Self {
        Self {
            window: limits::RESTART_SEGMENTS * mss,
            threshold: u64::MAX,
            grown: 0,
            reduced: 0,
            lost_at: Some(running),
            arrived: Ranges::default(),
            delivered: 0,
            reduction: None,
            timed: None,
            round_trip: None,
            doubt: None,
        }
    }

    /// A way on which nothing was lost. Bytes under way are not limited, and their next answer is
    /// timed.
    pub(in crate::tcp) fn without_loss() -> Self {
        Self { window: u64::MAX, lost_at: None, ..Self::new(Instant::ZERO, 0) }
    }

    /// Nothing of it is beyond what was sent, or has arrived below `una`.
    pub(in crate::tcp) fn is_possible(&self, una: u64, sent: u64) -> bool {
        let first = self.arrived.iter().next().map_or(una, |(from, _)| from);
        let numbers = [self.reduced, self.arrived.max_end().unwrap_or(0)];
        let timed = self.timed.map_or(0, |(end, _)| end);
        first >= una && timed <= sent && numbers.iter().all(|number| *number <= sent)
    }

    /// Bytes that G has beyond its acknowledgement.
    pub(super) const fn arrived(&self) -> &Ranges {
        &self.arrived
    }

    /// A loss below is answered by one reduction of the window.
    pub(super) const fn reduced(&self) -> u64 {
        self.reduced
    }

    /// Bytes that may leave now.
    pub(super) fn room(&self, u: UnderWay, r: &Recovery) -> u64 {
        match &self.reduction {
            Some(reduction) => reduction.budget(),
            None => self.window.saturating_sub(self.in_flight(u, r)),
        }
    }

    /// RFC 6675 section 4, `pipe`.
    fn in_flight(&self, u: UnderWay, r: &Recovery) -> u64 {
        let within = |(from, to): (u64, u64)| to.min(u.next).saturating_sub(from.max(u.una));
        let arrived: u64 = self.arrived.iter().map(within).sum();
        let (from, to) = r.lost(&self.arrived);
        let lost: u64 = self.arrived.gaps(from.max(u.una), to).map(within).sum();
        (u.next - u.una).saturating_sub(arrived + lost)
    }

    /// G has these bytes. Returns where those begin that it did not have; what finds no place may
    /// be sent again.
    pub(super) fn on_arrived(&mut self, from: u64, to: u64) -> Option<u64> {
        let (new, _) = self.arrived.gaps(from, to).next()?;
        if let InsertOutcome::New(bytes) = self.arrived.insert(from, to) {
            self.delivered += bytes;
        }
        Some(new)
    }

    /// G had `bytes` of its present ACK before (DSACK, RFC 2883). If it had all that a timeout has
    /// repeated, the timeout was for nothing (RFC 3708).
    pub(super) fn on_twice(&mut self, bytes: u64) {
        let Some(doubt) = &mut self.doubt else { return };
        doubt.copies = doubt.copies.saturating_sub(bytes);
        if doubt.copies == 0 {
            self.undo();
        }
    }

    fn undo(&mut self) {
        let Some(doubt) = self.doubt.take() else { return };
        self.window = self.window.max(doubt.window);
        self.threshold = doubt.threshold;
        if doubt.first {
            self.lost_at = None;
        }
    }

    /// Something is lost. All that was under way with it counts once (RFC 6675 section 5).
    pub(super) fn on_loss(&mut self, running: Instant, u: UnderWay, mss: u64) {
        self.lost_at = Some(running);
        self.timed = None;
        self.doubt = None;
        if u.una >= self.reduced {
            self.reduce(u, mss);
            self.window = self.threshold;
            let by_sack = !self.arrived.is_empty(); // else it is not known what has arrived
            self.reduction = by_sack.then(|| Prr::new(u.next - u.una));
        }
    }

    /// An ACK of G was taken.
    pub(super) fn end_ack(&mut self, u: UnderWay, r: &Recovery, mss: u64) {
        let in_flight = self.in_flight(u, r);
        let delivered = core::mem::take(&mut self.delivered);
        if self.reduction.is_some() && u.una >= self.reduced {
            self.reduction = None;
            // As much as the way holds: what could not be sent meanwhile is no burst now.
            let holds = in_flight + delivered + mss;
            self.threshold = holds.clamp(self.threshold / 2, self.threshold);
            self.window = self.threshold;
        }
        match &mut self.reduction {
            None => self.grow(delivered, u.una, mss),
            Some(reduction) => {
                let (ssthresh, safe) = (self.threshold, false);
                reduction.on_ack(&Progress { delivered, in_flight, ssthresh, safe, mss });
            }
        }
    }

    /// Nothing was heard of what is under way. `first`: nor was anything lost here before.
    pub(super) fn on_timeout(&mut self, running: Instant, u: UnderWay, mss: u64, first: bool) {
        if u.una < self.reduced {
            self.arrived.clear(); // once more: perhaps it has thrown them away (RFC 2018 section 8)
        } else {
            let (window, threshold) = (self.window, self.threshold);
            let first = first || self.lost_at.is_none();
            self.doubt = Some(Doubt { window, threshold, first, copies: 0 });
            self.reduce(u, mss);
        }
        self.lost_at = Some(running);
        self.timed = None;
        self.reduction = None;
        self.grown = 0;
        self.window = mss;
    }

    /// Segments were too long for this way: they are lost, and say nothing of a queue.
    pub(super) fn on_too_long(&mut self, running: Instant) {
        self.lost_at = Some(running);
        self.timed = None;
        self.arrived.clear();
        self.reduction = None;
    }

    /// Half of what is under way. Before the first loss that is as much as there was to send, and
    /// says little of the way: then it is an initial window at least.
    fn reduce(&mut self, u: UnderWay, mss: u64) {
        let is_first = self.reduced == 0 && self.threshold == u64::MAX;
        let initial = limits::RESTART_SEGMENTS;
        let least = if is_first { initial } else { limits::GUEST_PATH_SEGMENTS_MIN };
        self.threshold = ((u.next - u.una) / 2).max(least * mss);
        self.reduced = u.sent;
        self.grown = 0;
    }

    /// G has acknowledged `acked` bytes more, up to `ack`; `u`: what was under way before. Returns
    /// a new timeout beyond [`limits::LOCAL_RTO_MIN`].
    pub(super) fn on_progress(
        &mut self,
        running: Instant,
        ack: u64,
        u: UnderWay,
        mss: u64,
    ) -> Option<Duration> {
        let before = self.arrived.bytes();
        self.arrived.remove_below(ack);
        self.delivered += ack - u.una - (before - self.arrived.bytes());
        if ack >= self.reduced && self.doubt.is_some_and(|doubt| doubt.copies <= mss) {
            self.undo(); // it had all, and was given one segment again
        }
        let (_, at) = self.timed.take_if(|(end, _)| *end <= ack)?;
        Some(self.on_round_trip(running.since(at)))
    }

    fn grow(&mut self, delivered: u64, una: u64, mss: u64) {
        if self.window < self.threshold {
            self.window = self.window.saturating_add(delivered).min(self.threshold);
        } else if una >= self.reduced {
            self.grown += delivered;
            if self.grown >= self.window {
                self.grown -= self.window;
                self.window += mss;
            }
        }
    }

    /// RFC 6298 section 2, with [`limits::LOCAL_RTO_MIN`] as the least that is added for variation.
    fn on_round_trip(&mut self, sample: Duration) -> Duration {
        let ns = sample.as_nanos();
        let (mean, variation) = match self.round_trip {
            None => (ns, ns / 2),
            Some((mean, variation)) => {
                ((mean * 7 + ns) / 8, (variation * 3 + ns.abs_diff(mean)) / 4)
            }
        };
        self.round_trip = Some((mean, variation));
        let more = (variation * 4).saturating_sub(limits::LOCAL_RTO_MIN.as_nanos());
        Duration::from_nanos(mean + more)
    }

    /// `bytes` up to `to` leave; `again`: not for the first time.
    pub(super) fn on_sent(&mut self, running: Instant, to: u64, bytes: u64, again: bool) {
        if !again {
            self.timed = self.timed.or(Some((to, running)));
        } else if let Some(doubt) = &mut self.doubt {
            doubt.copies += bytes;
        }
        if let Some(reduction) = &mut self.reduction {
            reduction.on_sent(bytes);
        }
    }

    /// Nothing was lost for long. `true`: nor does an answer take long, so nothing need be known.
    /// Else only the round trip counts from now on, or is being measured.
    pub(super) fn is_old(&mut self, running: Instant) -> bool {
        let is_old = self.lost_at.is_none_or(|at| running.since(at) >= limits::GUEST_PATH_AGE);
        if !is_old {
            return false;
        }
        (self.window, self.threshold, self.lost_at) = (u64::MAX, u64::MAX, None);
        let far = limits::GUEST_ROUND_TRIP_LONG.as_nanos();
        self.round_trip.map_or(self.timed.is_none(), |(mean, _)| mean < far)
    }
}
