//! How much may be in flight, and how long to wait for its acknowledgement: slow start and
//! congestion avoidance (RFC 5681) from ten segments (RFC 6928), timeouts (RFC 6298) with Linux's
//! bounds, and the undoing of a spurious reaction (RFC 3522).

use nightporter_core::time::{Duration, Instant};

use super::linux::Cubic;
use super::ranges::Place;

/// Segments sent before the first acknowledgement (RFC 6928).
pub(super) const INITIAL_SEGMENTS: i64 = 10;
/// Before anything was measured (RFC 6298 section 2.1).
const RTO_INITIAL: Duration = Duration::from_secs(1);
/// Linux's least addition to the smoothed round trip (`TCP_RTO_MIN`).
const MARGIN_MIN: Duration = Duration::from_millis(200);
/// The longest, also after many doublings (RFC 6298 section 2.5).
const RTO_MAX: Duration = Duration::from_secs(60);

/// The congestion window. Sizes are in bytes.
#[derive(Debug)]
pub(super) struct Congestion {
    pub(super) window: i64,
    threshold: i64,
    mss: i64,
    /// Sent before the first acknowledgement, and after a long silence.
    pub(super) first_segments: i64,
    /// Nothing reduces it.
    pub(super) steady: bool,
    /// Window and threshold before the newest reaction, and the millisecond of it.
    undo: Option<(i64, i64, u64)>,
    /// It grows as Linux's, by its default; `None`: as NewReno.
    cubic: Option<Cubic>,
}

impl Congestion {
    pub(super) fn new(mss: i64, first_segments: i64, steady: bool, as_linux: bool) -> Self {
        let window = first_segments * mss;
        let cubic = as_linux.then(Cubic::default);
        Self { window, threshold: i64::MAX, mss, first_segments, steady, undo: None, cubic }
    }

    /// The same at its beginning, for segments of `mss` bytes.
    pub(super) fn anew(&self, mss: i64) -> Self {
        Self::new(mss, self.first_segments, self.steady, self.cubic.is_some())
    }

    /// Something new is acknowledged: everything before `una`, of what was sent before `nxt`. The
    /// segment that asked for it left at `sent_ms`.
    pub(super) fn hear(&mut self, now: Instant, sent: [Place; 2], sent_ms: Option<u64>) {
        let Some(cubic) = &mut self.cubic else { return };
        if cubic.hear(now, sent, sent_ms, [self.window, self.mss]) && self.window < self.threshold {
            self.threshold = self.window;
        }
    }

    /// `bytes` were acknowledged while the window was the limit.
    pub(super) fn on_ack(&mut self, bytes: i64) {
        if self.window < self.threshold {
            self.window = (self.window + bytes).min(self.threshold.max(self.window));
        } else if let Some(cubic) = &mut self.cubic {
            self.window += cubic.growth(bytes, self.window, self.mss);
        } else {
            self.window += (self.mss * bytes / self.window).max(1);
        }
    }

    /// `in_flight` was too much, says a CE mark.
    pub(super) fn on_mark(&mut self, in_flight: i64) {
        self.undo = None;
        if self.steady {
            return;
        }
        let reduced = match &mut self.cubic {
            None => in_flight / 2,
            Some(cubic) => {
                cubic.on_loss(self.window);
                self.window * 7 / 10
            }
        };
        self.threshold = reduced.max(2 * self.mss);
        self.window = self.threshold;
    }

    /// `in_flight` was too much, says a loss; it is repaired from now on.
    pub(super) fn on_loss(&mut self, now: Instant, in_flight: i64) {
        let before = (self.window, self.threshold, now.as_millis());
        self.on_mark(in_flight);
        self.undo = Some(before);
    }

    /// Nothing came for a whole timeout.
    pub(super) fn on_timeout(&mut self, now: Instant, in_flight: i64, again: bool) {
        if !again {
            self.on_loss(now, in_flight);
        }
        if !self.steady {
            self.window = self.mss;
        }
    }

    /// Nothing was sent for more than a timeout: the estimates of the path are old.
    pub(super) fn on_idle(&mut self) {
        self.window = self.window.min(self.first_segments * self.mss);
    }

    /// All that was lost is repaired.
    pub(super) fn on_recovered(&mut self) {
        self.undo = None;
    }

    /// The acknowledged bytes were sent at `sent_ms`; if that was before the newest reaction, the
    /// reaction was for nothing and is undone.
    pub(super) fn undoes(&mut self, sent_ms: u64) -> bool {
        let Some((window, threshold, at)) = self.undo.filter(|&(.., at)| sent_ms < at) else {
            return false;
        };
        debug_assert!(sent_ms < at);
        self.window = self.window.max(window);
        self.threshold = threshold;
        self.undo = None;
        true
    }

    pub(super) fn set_mss(&mut self, mss: i64) {
        self.mss = mss;
    }
}

/// The round-trip time and the timeout.
#[derive(Debug)]
pub(super) struct RoundTrip {
    smoothed: Option<Duration>,
    variation: Duration,
    doublings: u32,
}

impl RoundTrip {
    pub(super) const fn new() -> Self {
        Self { smoothed: None, variation: Duration::ZERO, doublings: 0 }
    }

    /// A segment that was sent once was acknowledged after `sample`.
    pub(super) fn measured(&mut self, sample: Duration) {
        let sample = sample.as_nanos();
        let (smoothed, variation) = match self.smoothed {
            None => (sample, sample / 2),
            Some(smoothed) => {
                let smoothed = smoothed.as_nanos();
                let off = smoothed.abs_diff(sample);
                let variation = self.variation.as_nanos();
                (smoothed - smoothed / 8 + sample / 8, variation - variation / 4 + off / 4)
            }
        };
        self.smoothed = Some(Duration::from_nanos(smoothed));
        self.variation = Duration::from_nanos(variation);
    }

    /// Something new was acknowledged.
    pub(super) fn on_progress(&mut self) {
        self.doublings = 0;
    }

    /// Nothing was: the next wait is twice as long.
    pub(super) fn on_timeout(&mut self) {
        self.doublings += 1;
    }

    /// Timeouts since the last progress.
    pub(super) const fn doublings(&self) -> u32 {
        self.doublings
    }

    /// How long to wait.
    pub(super) fn timeout(&self) -> Duration {
        let first = self.smoothed.map_or(RTO_INITIAL, |smoothed| {
            smoothed + self.variation.saturating_mul(4).max(MARGIN_MIN)
        });
        first.saturating_mul(1 << self.doublings.min(16)).min(RTO_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_doubles_in_slow_start_and_then_grows_by_a_segment_per_round_trip() {
        let mut cc = Congestion::new(1000, INITIAL_SEGMENTS, false, false);
        assert_eq!(cc.window, 10_000);
        (0..10).for_each(|_| cc.on_ack(1000));
        assert_eq!(cc.window, 20_000);
        cc.on_loss(Instant::ZERO, 20_000);
        assert_eq!(cc.window, 10_000);
        (0..10).for_each(|_| cc.on_ack(1000));
        assert!((10_900..=11_000).contains(&cc.window), "{}", cc.window);
    }

    #[test]
    fn a_reaction_to_nothing_is_taken_back_once() {
        let mut cc = Congestion::new(1000, INITIAL_SEGMENTS, false, false);
        cc.on_timeout(Instant::from_secs(2), 10_000, false);
        assert_eq!(cc.window, 1000);
        assert!(!cc.undoes(2000));
        assert!(cc.undoes(1999));
        assert_eq!(cc.window, 10_000);
        assert!(!cc.undoes(1999));
    }

    #[test]
    fn a_timeout_follows_the_round_trip_and_doubles_up_to_a_minute() {
        let mut rt = RoundTrip::new();
        assert_eq!(rt.timeout(), Duration::from_secs(1));
        (0..50).for_each(|_| rt.measured(Duration::from_millis(100)));
        let first = rt.timeout().as_millis();
        assert!((290..=301).contains(&first), "{first}");
        rt.on_timeout();
        assert!(rt.timeout().as_millis() >= 2 * first);
        (0..20).for_each(|_| rt.on_timeout());
        assert_eq!(rt.timeout(), Duration::from_secs(60));
        rt.on_progress();
        assert_eq!(rt.timeout().as_millis(), first);
    }
}
