//! A congestion window with slow start (RFC 5681 section 3.1) and HyStart++ (RFC 9406), the common
//! part of [`super::reno`] and [`super::cubic`].
//!
//! HyStart++ in short: a round is the data that is sent while the round before is acknowledged. If
//! the shortest round trip of a round is clearly longer than that of the one before, a queue is
//! building up. Then the window grows at a quarter of the pace ("conservative slow start") for five
//! rounds, and slow start is over. If the round trip becomes shorter again meanwhile, slow start
//! goes on.

use crate::congestion::controller::Ack;
use crate::limits::PAYLOAD_MIN;
use crate::time::Duration;
use crate::wire::saved::{BadImage, Reader, Saved, Writer, saved};

/// An increase of the round trip below this is noise (RFC 9406 section 4.3).
const RTT_THRESHOLD_MIN: Duration = Duration::from_millis(4);
/// And above this it never is.
const RTT_THRESHOLD_MAX: Duration = Duration::from_millis(16);
/// In between the threshold is the last round's shortest round trip divided by this.
const RTT_DIVISOR: u64 = 8;
/// Round trips of a round that must be known before it says anything.
const SAMPLES_MIN: u8 = 8;
/// Conservative slow start grows so many times slower.
const CONSERVATIVE_DIVISOR: u64 = 4;
/// Rounds of conservative slow start before slow start is over.
const CONSERVATIVE_ROUNDS: u8 = 5;

/// A reduced window has room for two segments (RFC 5681 section 3.1).
const SSTHRESH_SEGMENTS_MIN: u64 = 2;

/// Longer than any round trip.
const NEVER: Duration = Duration::from_nanos(u64::MAX);

/// Bytes that may be under way, and how they become more until something is lost.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    cwnd: u64,
    ssthresh: u64,
    mss: u64,
    /// Rounds of the first slow start; later ones know where they end.
    rounds: Rounds,
    /// As it was before reductions that may have been for nothing.
    before: Kept,
}

/// A window that may come back.
#[derive(Clone, Copy, Debug)]
struct Kept {
    cwnd: u64,
    ssthresh: u64,
    rounds: Rounds,
}

saved!(Kept { cwnd, ssthresh as OrNone, rounds });

/// No window is larger: twice what a window field can show, and products with one fit 64 bits.
pub(super) const WINDOW_MAX: u64 = 1 << 31;

saved! {
    Window { cwnd, ssthresh as OrNone, mss, rounds, before }
    check |it| {
        let is_window = |cwnd: u64, ssthresh: u64| {
            cwnd <= WINDOW_MAX && (ssthresh <= WINDOW_MAX || ssthresh == u64::MAX)
        };
        let is_mss = (PAYLOAD_MIN.into()..=u64::from(u16::MAX)).contains(&it.mss);
        is_mss && it.cwnd > 0 && is_window(it.cwnd, it.ssthresh)
            && is_window(it.before.cwnd, it.before.ssthresh)
    }
}

impl Window {
    /// A window of `cwnd` bytes, in slow start.
    #[must_use]
    pub fn new(mss: u64, cwnd: u64) -> Self {
        let (ssthresh, rounds) = (u64::MAX, Rounds::new());
        Self { cwnd, ssthresh, mss, rounds, before: Kept { cwnd, ssthresh, rounds } }
    }

    /// A window of `cwnd` bytes of a path that is known: slow start ends at `ssthresh`.
    #[must_use]
    pub fn resumed(mss: u64, cwnd: u64, ssthresh: u64) -> Self {
        let mut window = Self { ssthresh, ..Self::new(mss, cwnd) };
        if ssthresh < u64::MAX {
            window.rounds.end();
        }
        window.keep();
        window
    }

    /// Bytes that may be under way.
    #[must_use]
    pub const fn cwnd(&self) -> u64 {
        self.cwnd
    }

    /// Where slow start ends.
    #[must_use]
    pub const fn ssthresh(&self) -> u64 {
        self.ssthresh
    }

    /// Bytes of a segment.
    #[must_use]
    pub const fn mss(&self) -> u64 {
        self.mss
    }

    /// Below `ssthresh`.
    #[must_use]
    pub const fn is_in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }

    /// Slow start takes of an ACK what it can use. Returns the delivered bytes that are left over
    /// for congestion avoidance.
    ///
    /// All delivered bytes count, however many one ACK covers (`L` is infinite): RFC 9406 section
    /// 4.2 says so for a paced sender, and an R that merges segments acknowledges 64 KiB at once.
    /// On a path too short to be paced it recommends 8 segments; Linux has no such limit, and nor
    /// has H: there an R that merges acknowledges a whole round trip by one ACK.
    #[must_use]
    pub fn slow_start(&mut self, ack: &Ack) -> u64 {
        if !self.is_in_slow_start() {
            return ack.delivered;
        }
        let slower = if self.rounds.on_ack(ack) { CONSERVATIVE_DIVISOR } else { 1 };
        let growth = (ack.delivered / slower).min(self.ssthresh - self.cwnd);
        self.cwnd += growth;
        if self.rounds.are_over() {
            self.ssthresh = self.cwnd;
            self.rounds.end();
        }
        if self.is_in_slow_start() { 0 } else { ack.delivered - growth * slower }
    }

    /// Congestion avoidance adds `bytes`.
    pub fn grow(&mut self, bytes: u64) {
        self.cwnd = self.cwnd.saturating_add(bytes);
    }

    /// A reduction to `ssthresh`, or two segments; never to more than there was.
    pub fn reduce(&mut self, ssthresh: u64) {
        self.ssthresh = ssthresh.max(SSTHRESH_SEGMENTS_MIN * self.mss);
        self.cwnd = self.cwnd.min(self.ssthresh);
        self.rounds.end();
    }

    /// A timeout: slow start from one segment to `ssthresh`. `None`: to where it was to end anyway.
    pub fn collapse(&mut self, ssthresh: Option<u64>) {
        if let Some(ssthresh) = ssthresh {
            self.reduce(ssthresh);
        }
        self.cwnd = self.mss;
        self.rounds.end();
    }

    /// A window of `cwnd`, or one segment, after a pause. Three quarters of what it was is where
    /// slow start ends, for that much the path once carried (RFC 7661 section 4.4.3).
    pub fn restart(&mut self, cwnd: u64) {
        let cwnd = cwnd.max(self.mss);
        if cwnd < self.cwnd {
            if !self.is_in_slow_start() {
                self.ssthresh = self.ssthresh.max(self.cwnd / 4 * 3);
            }
            self.cwnd = cwnd;
        }
    }

    /// Reductions may follow that are for nothing.
    pub const fn keep(&mut self) {
        let Self { cwnd, ssthresh, rounds, .. } = *self;
        self.before = Kept { cwnd, ssthresh, rounds };
    }

    /// All reductions since [`Self::keep`] are undone.
    pub fn undo(&mut self) {
        let Kept { cwnd, ssthresh, rounds } = self.before;
        self.cwnd = self.cwnd.max(cwnd);
        (self.ssthresh, self.rounds) = (ssthresh, rounds);
    }

    /// Segments are of this size from now on; the window stays what it is in bytes, but no less
    /// than one of them.
    pub fn set_mss(&mut self, mss: u64) {
        self.mss = mss;
        self.cwnd = self.cwnd.max(mss);
    }
}

/// The rounds of HyStart++.
#[derive(Clone, Copy, Debug)]
struct Rounds {
    /// The round ends when this is acknowledged.
    end: u64,
    /// Shortest round trip of the round before.
    before: Duration,
    /// Shortest of this round so far.
    shortest: Duration,
    /// Round trips measured in this round.
    samples: u8,
    phase: Phase,
}

saved!(Rounds { end, before as OrNone, shortest as OrNone, samples, phase });

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    Fast,
    /// So many rounds are left; `baseline`: below this round trip the increase was none.
    Conservative {
        left: u8,
        baseline: Duration,
    },
    /// Slow start has ended in some way: HyStart++ is for the first one.
    Over,
}

impl Saved for Phase {
    fn saved(&self, image: &mut Writer) {
        let left = match *self {
            Self::Fast => None,
            Self::Conservative { left, baseline } => Some(Some((left, baseline))),
            Self::Over => Some(None),
        };
        left.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        Ok(match Option::<Option<(u8, Duration)>>::of_saved(image)? {
            None => Self::Fast,
            Some(Some((left, baseline))) => Self::Conservative { left, baseline },
            Some(None) => Self::Over,
        })
    }
}

impl Rounds {
    const fn new() -> Self {
        Self { end: 0, before: NEVER, shortest: NEVER, samples: 0, phase: Phase::Fast }
    }

    const fn end(&mut self) {
        self.phase = Phase::Over;
    }

    /// Five conservative rounds are complete.
    const fn are_over(&self) -> bool {
        matches!(self.phase, Phase::Conservative { left: 0, .. })
    }

    /// An ACK in slow start. `true`: it counts as conservative.
    fn on_ack(&mut self, ack: &Ack) -> bool {
        if self.phase == Phase::Over {
            return false;
        }
        if self.end == 0 {
            self.end = ack.next; // the first round
        }
        if let Some(rtt) = ack.rtt {
            self.samples = self.samples.saturating_add(1);
            if rtt < self.shortest {
                self.shortest = rtt;
            }
        }
        if self.samples >= SAMPLES_MIN {
            self.judge();
        }
        let conservative = matches!(self.phase, Phase::Conservative { .. });
        if ack.una >= self.end {
            self.next_round(ack.next);
        }
        conservative
    }

    fn next_round(&mut self, end: u64) {
        self.end = end;
        self.before = self.shortest;
        self.shortest = NEVER;
        self.samples = 0;
        if let Phase::Conservative { left, .. } = &mut self.phase {
            *left = left.saturating_sub(1);
        }
    }

    /// Enough of this round is known.
    fn judge(&mut self) {
        match self.phase {
            Phase::Fast if self.before < NEVER && self.shortest >= self.limit() => {
                let baseline = self.shortest;
                self.phase = Phase::Conservative { left: CONSERVATIVE_ROUNDS, baseline };
            }
            Phase::Conservative { baseline, .. } if self.shortest < baseline => {
                self.phase = Phase::Fast;
            }
            _ => {}
        }
    }

    /// A round trip that is clearly longer than those of the last round.
    fn limit(&self) -> Duration {
        let share = Duration::from_nanos(self.before.as_nanos() / RTT_DIVISOR);
        self.before + share.clamp(RTT_THRESHOLD_MIN, RTT_THRESHOLD_MAX)
    }
}

#[cfg(test)]
mod tests;
