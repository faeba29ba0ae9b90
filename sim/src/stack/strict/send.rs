//! The sending half: which bytes may be sent next, which were lost, when to try again.
//!
//! Loss is noticed by three duplicate ACKs or by SACKs more than three segments ahead, and repaired
//! by RFC 6675 (by RFC 6582 without SACK), or by a timeout. Fast recovery does not notice the loss
//! of a retransmission; the timeout does. There are no tail loss probes.

use nightporter_core::time::{Duration, Instant};

use super::congestion::{Congestion, INITIAL_SEGMENTS, RoundTrip};
use super::ranges::{Place, Ranges};
use crate::plan::{Floods, StackPlan};

/// Duplicate ACKs, or segments beyond a hole, that mean a loss.
const DUPLICATES: i64 = 3;
/// Default MSS (RFC 9293 section 3.7.1), and below which Linux does not halve a window.
const MSS_DEFAULT: i64 = 536;
/// The first window of who floods (`guest/flood`: `initcwnd`).
const FLOOD_SEGMENTS: i64 = 1000;
/// Smallest piece Linux makes of a tiny window (68 bytes with headers of 40).
const PIECE_MIN: i64 = 28;

/// The state of loss recovery.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Recovery {
    /// Nothing.
    Open,
    /// Some of what was sent before `until` is lost; ends when that is acknowledged.
    Fast { until: Place },
    /// All of what was sent before `until` counts as lost.
    Loss { until: Place },
}

/// An ACK, as far as the sending half looks at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ack<'a> {
    pub(super) ack: Place,
    /// Where the segment is in the other stream, for the age of its window.
    pub(super) seq: Place,
    /// In bytes.
    pub(super) window: i64,
    /// It carries data, SYN or FIN.
    pub(super) with_data: bool,
    pub(super) sack: &'a [(Place, Place)],
    /// CE was seen on something we sent.
    pub(super) echo: bool,
    /// When what it acknowledges was sent, by our clock in milliseconds.
    pub(super) sent_ms: Option<u64>,
}

/// The next piece to send.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Piece {
    pub(super) from: Place,
    pub(super) to: Place,
    pub(super) fin: bool,
    /// It was sent before.
    pub(super) again: bool,
    /// It ends with the last byte written.
    pub(super) push: bool,
}

/// Place 0 is the SYN, byte n of the stream is n + 1, the FIN follows the last.
#[derive(Debug)]
pub(super) struct StackSender {
    /// Everything before is acknowledged.
    pub(super) una: Place,
    /// Everything before was sent.
    pub(super) nxt: Place,
    /// End of what the application wrote.
    written: Place,
    closing: bool,
    buffer: i64,
    mss: i64,
    /// Bytes of the SACK option that a segment has now.
    pub(super) options: i64,
    /// Lost bytes go out again in super-segments.
    resends_whole: bool,
    /// Right edge of the peer's window, and the widest it ever was.
    edge: Place,
    window_max: i64,
    window: i64,
    /// Place in the other stream of the segment the window came with (SND.WL1).
    window_from: Place,
    recovery: Recovery,
    sacked: Ranges,
    /// In recovery: lost bytes before this were sent again.
    resent_to: Place,
    duplicates: i64,
    /// Without SACK: bytes that have left the network, by duplicate ACKs.
    inflated: i64,
    /// The first segment of a recovery goes out whatever the window.
    must_resend: bool,
    pub(super) congestion: Congestion,
    was_limited: bool,
    round_trip: RoundTrip,
    /// A segment that was sent once, and when: for the next measurement.
    sample: Option<(Place, Instant)>,
    timer: Option<Instant>,
    /// The timer ran out with no window open.
    probe_due: bool,
    /// Something was sent beyond the window.
    probed: bool,
    pub(super) sent_at: Instant,
    /// CE was reported; not again before this is acknowledged.
    reduced_to: Place,
    /// The next new segment says that the window was reduced.
    pub(super) cwr_due: bool,
}

impl StackSender {
    pub(super) fn new(plan: &StackPlan) -> Self {
        let first_segments = match plan.quirks.floods {
            Floods::No => plan.first_segments.map_or(INITIAL_SEGMENTS, i64::from),
            Floods::Route | Floods::Always => FLOOD_SEGMENTS,
        };
        let steady = plan.quirks.floods == Floods::Always;
        Self {
            una: 0,
            nxt: 0,
            written: 1,
            closing: false,
            buffer: i64::try_from(plan.send_bytes).unwrap_or(i64::MAX).max(1),
            mss: MSS_DEFAULT,
            options: 0,
            resends_whole: plan.quirks.resends_whole,
            edge: 1,
            window_max: 0,
            window: 0,
            window_from: 0,
            recovery: Recovery::Open,
            sacked: Ranges::default(),
            resent_to: 0,
            duplicates: 0,
            inflated: 0,
            must_resend: false,
            congestion: Congestion::new(MSS_DEFAULT, first_segments, steady, plan.quirks.as_linux),
            was_limited: false,
            round_trip: RoundTrip::new(),
            sample: None,
            timer: None,
            probe_due: false,
            probed: false,
            sent_at: Instant::ZERO,
            reduced_to: 0,
            cwr_due: false,
        }
    }

    // --- Calls of the application --------------------------------------------------------------

    /// Takes over at most `len` bytes more.
    pub(super) fn write(&mut self, len: u64) -> u64 {
        let room = (self.buffer - (self.written - self.una.max(1))).max(0).unsigned_abs();
        let taken = if self.closing { 0 } else { len.min(room) };
        self.written += i64::try_from(taken).expect("less than the buffer");
        taken
    }

    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// The FIN was sent.
    pub(super) fn has_sent_fin(&self) -> bool {
        self.closing && self.nxt > self.written
    }

    /// Bytes written that are not acknowledged.
    pub(super) fn unacknowledged(&self) -> u64 {
        (self.written - self.una.max(1)).max(0).unsigned_abs()
    }

    /// The FIN and all before it was acknowledged.
    pub(super) fn is_done(&self) -> bool {
        self.closing && self.una > self.written
    }

    // --- The handshake -------------------------------------------------------------------------

    /// The SYN left.
    pub(super) fn on_syn_sent(&mut self, now: Instant) {
        self.nxt = 1;
        self.timer = Some(now + self.round_trip.timeout());
        self.sample = (self.round_trip.doublings() == 0).then_some((1, now));
    }

    /// The SYN was not answered in time.
    pub(super) fn on_syn_timeout(&mut self) {
        self.round_trip.on_timeout();
    }

    /// The SYN is acknowledged, by a segment at `seq`; `mss` is payload per segment from now on.
    pub(super) fn on_established(&mut self, now: Instant, seq: Place, window: i64, mss: i64) {
        self.una = 1;
        self.take_sample(now);
        self.round_trip.on_progress();
        (self.window, self.window_from, self.edge) = (window, seq, 1 + window);
        self.window_max = window;
        self.mss = mss;
        self.congestion = self.congestion.anew(mss);
        (self.timer, self.sent_at) = (None, now);
    }

    /// The path or the peer takes segments of `mss` bytes only.
    pub(super) fn lower_mss(&mut self, mss: i64) {
        if mss < self.mss {
            self.mss = mss.max(PIECE_MIN);
            self.congestion.set_mss(self.mss);
            // The segments under way were too long.
            self.recovery = Recovery::Loss { until: self.nxt };
            (self.resent_to, self.must_resend) = (self.una, true);
        }
    }

    // --- ACKs ----------------------------------------------------------------------------------

    /// The ACK is older than anything that could still be on its way (RFC 5961 section 5, K-04).
    pub(super) fn is_too_old(&self, ack: Place) -> bool {
        ack < self.una - self.window_max.min(self.una)
    }

    /// K-05: `tcp_may_update_window`.
    pub(super) fn may_update_window(&self, ack: Place, seq: Place, window: i64) -> bool {
        ack > self.una
            || seq > self.window_from
            || seq == self.window_from && (window > self.window || window == 0)
    }

    /// An ACK that is neither of the future nor too old.
    pub(super) fn on_ack(&mut self, now: Instant, ack: &Ack<'_>) {
        let new_window = self.take_window(ack);
        let flight = self.nxt - self.una;
        let newly = ack.ack - self.una;
        let mut news = 0;
        for &(from, to) in ack.sack.iter().filter(|b| b.0 >= self.una && b.1 <= self.nxt) {
            news += self.sacked.insert(from, to);
        }
        if newly > 0 {
            self.on_progress(now, ack, newly);
        } else if newly == 0 && flight > 0 && !ack.with_data && (!new_window || news > 0) {
            self.duplicates += 1;
            self.inflated += self.mss;
        }
        let much = self.sacked.end().is_some_and(|end| end - self.una > DUPLICATES * self.mss);
        let signs = self.duplicates >= DUPLICATES || news > 0 && much;
        if self.recovery == Recovery::Open && signs && flight > 0 {
            self.recovery = Recovery::Fast { until: self.nxt };
            (self.resent_to, self.must_resend) = (self.una, true);
            self.inflated = DUPLICATES * self.mss;
            self.congestion.on_loss(now, flight);
            self.sample = None;
        }
        if ack.echo && self.una > self.reduced_to && self.recovery == Recovery::Open {
            self.congestion.on_mark(flight);
            (self.reduced_to, self.cwr_due) = (self.nxt, true);
        }
        self.set_timer(now, newly > 0);
    }

    fn take_window(&mut self, ack: &Ack<'_>) -> bool {
        if ack.ack < self.una || !self.may_update_window(ack.ack, ack.seq, ack.window) {
            return false;
        }
        let changed = self.window != ack.window;
        let answers_probe = self.probed && ack.window > 0;
        self.probed &= !answers_probe;
        if answers_probe && ack.ack == self.una && self.nxt > self.una {
            // It opens, and the byte beyond it was not taken.
            self.recovery = Recovery::Loss { until: self.nxt };
            (self.resent_to, self.must_resend) = (self.una, true);
            self.round_trip.on_progress();
            self.timer = None;
        }
        self.window = ack.window;
        self.window_from = ack.seq;
        self.edge = ack.ack + ack.window;
        self.window_max = self.window_max.max(ack.window);
        changed
    }

    fn on_progress(&mut self, now: Instant, ack: &Ack<'_>, newly: i64) {
        self.una = ack.ack;
        self.sacked.remove_below(ack.ack);
        self.duplicates = 0;
        self.round_trip.on_progress();
        if self.sample.is_none() && matches!(self.recovery, Recovery::Loss { .. }) {
            self.take_clock(now, ack.sent_ms);
        }
        self.take_sample(now);
        self.congestion.hear(now, [self.una, self.nxt], ack.sent_ms);
        if ack.sent_ms.is_some_and(|sent| self.congestion.undoes(sent)) {
            self.recovery = Recovery::Open; // the original arrived: nothing was lost (RFC 3522)
        }
        let until = match self.recovery {
            Recovery::Open => {
                if self.was_limited {
                    self.congestion.on_ack(newly);
                }
                return;
            }
            Recovery::Loss { until } => {
                self.congestion.on_ack(newly);
                until
            }
            Recovery::Fast { until } => {
                // A partial ACK: the next hole is lost as well (RFC 6582 section 3.2).
                self.inflated = (self.inflated - newly + self.mss).max(0);
                until
            }
        };
        if ack.ack >= until {
            self.recovery = Recovery::Open;
            self.congestion.on_recovered();
        } else {
            let known = !self.sacked.is_empty() || self.resent_to > ack.ack;
            self.must_resend |= matches!(self.recovery, Recovery::Fast { .. }) && !known;
            self.resent_to = self.resent_to.max(ack.ack);
        }
    }

    /// The echo of a clock measures copies too (RFC 7323 section 4.1): or who was paused for a
    /// minute waits for as long each time (seed 59190).
    fn take_clock(&mut self, now: Instant, sent_ms: Option<u64>) {
        let took = sent_ms.and_then(|sent| now.as_millis().checked_sub(sent));
        if let Some(ms) = took {
            self.round_trip.measured(Duration::from_millis(ms));
        }
    }

    fn take_sample(&mut self, now: Instant) {
        if let Some((_, sent)) = self.sample.take_if(|(end, _)| self.una >= *end) {
            self.round_trip.measured(now.since(sent));
        }
    }

    // --- Timers --------------------------------------------------------------------------------

    /// When [`Self::on_timeout`] is due.
    pub(super) const fn timer(&self) -> Option<Instant> {
        self.timer
    }

    /// Runs while something is in flight, or waits for a window.
    fn set_timer(&mut self, now: Instant, again: bool) {
        let waits = self.nxt > self.una || self.next_new(self.mss).is_none() && self.has_new();
        if !waits {
            self.timer = None;
            self.round_trip.on_progress(); // undoes the doublings of a closed window
        } else if again || self.timer.is_none() {
            self.timer = Some(now + self.round_trip.timeout());
        }
    }

    /// Nothing was acknowledged, or no window opened, in time.
    pub(super) fn on_timeout(&mut self, now: Instant) {
        let again = self.round_trip.doublings() > 0;
        self.round_trip.on_timeout();
        self.timer = Some(now + self.round_trip.timeout());
        self.sample = None;
        if self.nxt == self.una || self.edge <= self.una {
            self.probe_due = self.has_new() || self.nxt > self.una;
            return;
        }
        self.congestion.on_timeout(now, self.nxt - self.una, again);
        self.recovery = Recovery::Loss { until: self.nxt };
        (self.resent_to, self.must_resend) = (self.una, true);
        (self.duplicates, self.inflated) = (0, 0);
        // The peer may have changed its mind, or has: it SACKed this (RFC 2018 section 8).
        if again || self.sacked.hole(self.una).0 != self.una {
            self.sacked.clear();
        }
    }

    // --- Next piece ----------------------------------------------------------------------------

    /// The window is closed and it is time to ask: a piece of at most one byte, which may be empty
    /// or lie beyond the window.
    pub(super) fn probe(&mut self, with_byte: bool) -> Option<Piece> {
        if !std::mem::take(&mut self.probe_due) {
            return None;
        }
        let again = self.nxt > self.una;
        let open = (self.edge - self.una).min(self.mss);
        let len = if open > 0 { open } else { i64::from(with_byte || again) };
        let to = (self.una + len).min(self.written);
        let fin = self.closing && to == self.written && to < self.una + len;
        if to == self.una && !fin {
            return Some(Piece { from: to - 1, to: to - 1, fin, again, push: false });
        }
        self.nxt = self.nxt.max(to + i64::from(fin));
        self.probed = true;
        Some(Piece { from: self.una, to, fin, again, push: false })
    }

    /// The next piece of at most `len` bytes (a multiple of the MSS, if it is not less).
    pub(super) fn next(&mut self, now: Instant, len: i64) -> Option<Piece> {
        if let Some(piece) = self.next_lost(if self.resends_whole { len } else { 1 }) {
            self.must_resend = false;
            self.resent_to = piece.to + i64::from(piece.fin);
            self.sample = None;
            self.on_sent(now);
            return Some(piece);
        }
        if self.nxt == self.una && now.since(self.sent_at) > self.round_trip.timeout() {
            self.congestion.on_idle();
        }
        let piece = self.next_new(len)?;
        self.nxt = piece.to + i64::from(piece.fin);
        if self.recovery == Recovery::Open {
            self.sample.get_or_insert((self.nxt, now));
        }
        self.was_limited = self.congestion.window - self.in_flight() < self.mss;
        self.on_sent(now);
        Some(piece)
    }

    fn on_sent(&mut self, now: Instant) {
        self.sent_at = now;
        if self.timer.is_none() {
            self.timer = Some(now + self.round_trip.timeout());
        }
    }

    /// Called when [`Self::next`] has no more to send: a closed window needs a timer.
    pub(super) fn on_drained(&mut self, now: Instant) {
        self.set_timer(now, false);
    }

    /// The end of the stream, with its FIN if it has one by now.
    fn end(&self) -> Place {
        self.written + i64::from(self.closing)
    }

    fn has_new(&self) -> bool {
        self.nxt < self.end()
    }

    /// Bytes in one segment: not more than half of the peer's largest window
    /// (`tcp_bound_to_half_wnd`).
    pub(super) fn segment(&self) -> i64 {
        let half =
            if self.window_max > MSS_DEFAULT { self.window_max / 2 } else { self.window_max };
        let mss = (self.mss - self.options).max(PIECE_MIN);
        if half > 0 { mss.min(half.max(PIECE_MIN)) } else { mss }
    }

    /// Bytes under way (`pipe` of RFC 6675).
    fn in_flight(&self) -> i64 {
        let lost_to = self.lost_to();
        let resent = self.sacked.missing(self.una, self.resent_to.min(lost_to));
        let flight = resent + self.sacked.missing(lost_to.max(self.una), self.nxt);
        match self.recovery {
            Recovery::Open => self.sacked.missing(self.una, self.nxt),
            Recovery::Loss { .. } => flight,
            Recovery::Fast { .. } if self.sacked.is_empty() => {
                self.nxt - self.una - self.inflated.min(self.nxt - self.una)
            }
            Recovery::Fast { .. } => flight,
        }
    }

    /// In recovery, bytes before this that were not SACKed count as lost.
    fn lost_to(&self) -> Place {
        match self.recovery {
            Recovery::Open => self.una,
            Recovery::Loss { until } => until,
            Recovery::Fast { until } => match self.sacked.end() {
                Some(end) => (end - DUPLICATES * self.mss).max(self.una + self.mss).min(until),
                None => (self.una + self.mss).min(until),
            },
        }
    }

    /// `len`: as for [`Self::next`].
    fn next_lost(&self, len: i64) -> Option<Piece> {
        let (from, sacked_from) = self.sacked.hole(self.una.max(self.resent_to));
        let lost_to = self.lost_to();
        let open = self.congestion.window - self.in_flight();
        if from >= lost_to || !(open > 0 || self.must_resend) {
            return None;
        }
        let segment = self.segment();
        let most = (len.min(open).min(lost_to - from) / segment).max(1) * segment;
        // The first goes out even if the window was taken back meanwhile.
        let edge = if from == self.una { self.edge.max(from + self.mss) } else { self.edge };
        let to = (from + most).min(self.written).min(self.nxt).min(edge);
        let to = to.min(sacked_from.unwrap_or(to));
        let fin = self.closing && to == self.written && self.nxt > to && to < edge;
        let push = to == self.written;
        (to > from || fin).then_some(Piece { from, to, fin, again: true, push })
    }

    fn next_new(&self, len: i64) -> Option<Piece> {
        let segment = self.segment();
        let left = self.written - self.nxt;
        let by_window = self.edge - self.nxt;
        let by_congestion = self.congestion.window - self.in_flight();
        let want = left.min(segment);
        // Whole segments, or all there is (Linux: `tcp_snd_wnd_test`, `tcp_cwnd_test`).
        if by_congestion <= 0 || by_window < want || !self.has_new() {
            return None;
        }
        let most = (len / segment).max(1) * segment;
        let mut take = left.min(most).min(by_window).min(by_congestion.max(want));
        if take < left && take > segment {
            take -= take % segment;
        }
        let to = self.nxt + take;
        let fin = self.closing && to == self.written && to < self.edge;
        let push = to == self.written;
        (take > 0 || fin).then_some(Piece { from: self.nxt, to, fin, again: false, push })
    }

    /// K-06, `tcp_acceptable_seq`: where an empty segment may be, with windows in units of `unit`.
    /// The octet of a probe does not count (`snd_nxt` of BSD, which is what probes so).
    pub(super) fn empty_at(&self, unit: i64) -> Place {
        if self.probed && self.edge <= self.una {
            return self.una;
        }
        if self.edge >= self.nxt || self.nxt - self.edge < unit { self.nxt } else { self.edge }
    }
}
