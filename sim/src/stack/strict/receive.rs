//! The receiving half: which bytes are taken, which window is shown, when an ACK is due; as in
//! Linux 6.18 (`tcp_data_queue`, `__tcp_select_window`, `__tcp_ack_snd_check`).
//!
//! Bytes are compared with the expected ones when they arrive, and then only counted.

use nightporter_core::time::{Duration, Instant};

use super::linux::Tuned;
use super::ranges::{Place, Ranges};
use crate::plan::StackPlan;

/// How long an ACK waits for company (`TCP_DELACK_MIN`).
const ACK_DELAY: Duration = Duration::from_millis(40);
/// Segments acknowledged at once when a connection is new (`TCP_MAX_QUICKACKS`).
const QUICK_ACKS: i64 = 16;
/// The window shown at first, whatever the buffer (65,535 less the rest that does not fit whole
/// segments).
const WINDOW_FIRST: i64 = 65_535;
/// Payload of a full segment while nothing is known, and the least (`TCP_MSS_DEFAULT`,
/// `TCP_MIN_MSS`).
const MSS_DEFAULT: i64 = 536;
/// See [`MSS_DEFAULT`].
const MSS_MIN: i64 = 88;

/// A reneging receiver keeps so many early segments.
const RENEGES_AFTER: u32 = 60;
/// ACKs that a splitting receiver makes of one.
const PARTS: i64 = 100;
/// Segments that a sender may have on its way besides what was acknowledged: the first window
/// (RFC 6928), limited transmit, a loss probe.
const FLIGHT_BESIDES: i64 = 14;

/// Bytes after which who acknowledges ahead begins to.
const LIES_AFTER: Place = 20_000;

/// Whether an ACK is owed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum AckDue {
    No,
    At(Instant),
    Now,
}

/// Place 0 is the peer's SYN, byte n of its stream is n + 1.
#[derive(Debug)]
pub(super) struct Receiver {
    /// Next byte in order (RCV.NXT).
    pub(super) nxt: Place,
    /// RCV.NXT when the last segment left (`rcv_wup`), and the window it showed.
    pub(super) acked: Place,
    window: i64,
    /// Furthest right edge ever shown.
    pub(super) edge_max: Place,
    early: Ranges,
    /// Where segments that came early started, the newest first.
    recent: Vec<Place>,
    /// A range that came twice, to be reported once (RFC 2883).
    twice: Option<(Place, Place)>,
    /// Everything before was read by the application.
    read: Place,
    buffer: i64,
    /// It is tuned, up to so many bytes.
    tuned: Option<(Tuned, i64)>,
    /// How far the window may grow by now (`rcv_ssthresh`).
    grown: i64,
    shift: u8,
    /// The peer's MSS as seen (`rcv_mss`), and our own as offered.
    mss_seen: i64,
    mss: i64,
    /// The last segment's bytes, if it was smaller and may have been a full one all the same.
    smaller: i64,
    /// Where the peer's FIN is.
    pub(super) fin: Option<Place>,
    /// Offset in the stream of the first byte that was wrong.
    pub(super) wrong_at: Option<u64>,
    ack_due: AckDue,
    quick: i64,
    /// It takes window back.
    shrinking: bool,
    /// CE was seen and not yet answered by CWR.
    pub(super) echo: bool,
    /// See [`crate::plan::Quirks`].
    reneges: bool,
    /// Segments that came early.
    came_early: u32,
}

impl Receiver {
    pub(super) fn new(plan: &StackPlan, mss: i64) -> Self {
        let most = i64::try_from(plan.receive_bytes).unwrap_or(i64::MAX).clamp(1, 1 << 30);
        let tuned = plan.quirks.as_linux.then(|| (Tuned::default(), most));
        let buffer = if tuned.is_some() { most.min(WINDOW_FIRST) } else { most };
        let first = plan.first_segments.map_or(WINDOW_FIRST, |n| i64::from(n) * mss);
        let window = buffer.min(first);
        Self {
            nxt: 1,
            acked: 1,
            window,
            edge_max: 1 + window,
            early: Ranges::default(),
            recent: Vec::new(),
            twice: None,
            read: 1,
            buffer,
            tuned,
            grown: window,
            shift: 0,
            mss_seen: mss.min(window / 2).clamp(MSS_MIN, MSS_DEFAULT),
            mss: mss.min(buffer),
            smaller: 0,
            fin: None,
            wrong_at: None,
            ack_due: AckDue::No,
            quick: (window / (2 * mss.max(1))).clamp(2, QUICK_ACKS),
            shrinking: false,
            echo: false,
            reneges: plan.quirks.reneges,
            came_early: 0,
        }
    }

    /// The shift agreed on.
    pub(super) fn set_shift(&mut self, shift: u8) {
        self.shift = shift;
        if shift == 0 {
            self.buffer = self.buffer.min(WINDOW_FIRST);
        }
    }

    /// The unit of its window.
    pub(super) const fn unit(&self) -> i64 {
        1 << self.shift
    }

    pub(super) fn set_shrinking(&mut self, on: bool) {
        self.shrinking = on && self.shift > 0; // Linux: only with window scaling
    }

    /// The right edge as last shown.
    pub(super) fn edge(&self) -> Place {
        (self.acked + self.window).max(self.nxt)
    }

    /// The application has not read everything.
    pub(super) fn has_unread(&self) -> bool {
        self.unread() > 0
    }

    fn unread(&self) -> i64 {
        self.in_order() - self.read
    }

    /// End of what is in order, without the FIN.
    fn in_order(&self) -> Place {
        self.nxt - i64::from(self.is_finished())
    }

    /// The peer's FIN is taken.
    pub(super) fn is_finished(&self) -> bool {
        self.fin.is_some_and(|fin| self.nxt > fin)
    }

    // --- Segments ------------------------------------------------------------------------------

    /// `tcp_measure_rcv_mss`: data came that on a wire is in pieces of `segment` bytes. A full
    /// segment is as long as the longest, or as two in a row that are smaller; one that is
    /// `pushed` may just be the end of what there was.
    pub(super) fn measure(&mut self, segment: i64, pushed: bool) {
        let before = std::mem::take(&mut self.smaller);
        if segment >= self.mss_seen {
            self.mss_seen = segment.min(self.mss);
        } else if segment >= MSS_DEFAULT || segment >= MSS_MIN && !pushed {
            self.smaller = segment;
            self.mss_seen = if segment == before { segment } else { self.mss_seen };
        }
    }

    /// The peer has answered what left at `sent_ms`, by data.
    pub(super) fn tune(&mut self, now: Instant, sent_ms: Option<u64>) {
        let Some((tuned, most)) = self.tuned.as_mut().filter(|_| self.shift > 0) else { return };
        tuned.hear(now, sent_ms);
        if let Some(buffer) = tuned.buffer(now, self.read, self.mss) {
            self.buffer = self.buffer.max(buffer.min(*most));
        }
    }

    /// Takes the data of an acceptable segment.
    pub(super) fn on_data(&mut self, now: Instant, from: Place, to: Place) {
        if to <= self.nxt {
            self.on_twice(from, to);
            return;
        }
        if self.window_left() == 0 && from <= self.nxt {
            self.ack_now(); // a probe of a closed window
            return;
        }
        if from > self.nxt {
            if self.early.insert(from, to) == 0 {
                self.twice = Some((from, to));
            }
            self.recent.retain(|&at| at != from);
            self.recent.insert(0, from);
            self.recent.truncate(4);
            self.ack_now();
            self.came_early += 1;
            if self.reneges && self.came_early.is_multiple_of(RENEGES_AFTER) {
                self.early.clear();
            }
            return;
        }
        if from < self.nxt {
            self.on_twice(from, self.nxt);
        }
        self.grow(to - self.nxt);
        let had_holes = !self.early.is_empty();
        self.nxt = to;
        while let Some(end) = self.early.take_at(self.nxt) {
            self.nxt = self.nxt.max(end);
        }
        if had_holes {
            self.ack_now();
        } else {
            self.ack_soon(now);
        }
    }

    /// Takes the FIN if it is where the data in order ends; says whether it did.
    pub(super) fn take_fin(&mut self, now: Instant) -> bool {
        let is_next = self.fin == Some(self.nxt);
        if is_next {
            self.nxt += 1;
            self.ack_soon(now);
        }
        is_next
    }

    /// Something came again.
    fn on_twice(&mut self, from: Place, to: Place) {
        self.twice = Some((from, to));
        self.quick = self.quick.max(2);
        self.ack_now();
    }

    /// `tcp_grow_window`: two segments for every one that arrives.
    fn grow(&mut self, bytes: i64) {
        let segments = (bytes + self.mss - 1) / self.mss;
        self.grown = (self.grown + 2 * self.mss * segments).min(self.buffer);
    }

    // --- Reading -------------------------------------------------------------------------------

    /// The application reads all there is.
    pub(super) fn take(&mut self) -> u64 {
        let bytes = self.unread();
        self.read += bytes;
        // `tcp_cleanup_rbuf`: say so if the window has at least doubled.
        let (now, then) = (self.window_wanted(), self.window_left());
        if bytes > 0 && !self.is_finished() && now > 0 && now >= 2 * then {
            self.ack_now();
        }
        bytes.unsigned_abs()
    }

    // --- ACKs ----------------------------------------------------------------------------------

    pub(super) fn ack_now(&mut self) {
        self.ack_due = AckDue::Now;
    }

    /// The earlier acknowledgements of a receiver that splits ACKs.
    pub(super) fn parts(&self) -> impl Iterator<Item = Place> + use<> {
        let (from, new) = (self.acked, self.nxt - self.acked);
        (1..PARTS.min(new)).map(move |n| from + new * n / PARTS.min(new))
    }

    /// Inside the window, and beyond what a sender can have sent that doubles what is on its way in
    /// a round trip.
    pub(super) fn ahead(&self, mss: i64) -> Option<Place> {
        let ahead = self.nxt + self.nxt + FLIGHT_BESIDES * mss;
        (self.nxt > LIES_AFTER && ahead < self.edge()).then_some(ahead)
    }

    /// Now if more than one segment is not acknowledged or the connection is young; else soon.
    pub(super) fn ack_soon(&mut self, now: Instant) {
        if self.nxt - self.acked > self.mss_seen || self.quick > 0 {
            self.ack_due = AckDue::Now;
        } else if self.ack_due == AckDue::No {
            self.ack_due = AckDue::At(now + ACK_DELAY);
        }
    }

    pub(super) fn ack_is_due(&self, now: Instant) -> bool {
        match self.ack_due {
            AckDue::No => false,
            AckDue::At(at) => at <= now,
            AckDue::Now => true,
        }
    }

    /// When an ACK is due although nothing happens.
    pub(super) const fn timer(&self) -> Option<Instant> {
        match self.ack_due {
            AckDue::At(at) => Some(at),
            AckDue::No | AckDue::Now => None,
        }
    }

    /// The application answers at once: it is a conversation, and ACKs ride on answers.
    pub(super) fn on_answer(&mut self) {
        if self.ack_due != AckDue::No && self.quick > 0 {
            self.quick = 0;
        }
    }

    // --- Fields of a segment -------------------------------------------------------------------

    /// The window field of the segment that leaves now. It acknowledges `nxt`.
    pub(super) fn show_window(&mut self) -> u16 {
        let left = self.window_left();
        let mut window = self.window_wanted();
        if window < left && !self.shrinking {
            window = (left + self.unit() - 1) / self.unit() * self.unit(); // never to the left
        }
        window = window.min(65_535 << self.shift);
        if self.nxt > self.acked {
            self.quick = (self.quick - 1).max(0);
        }
        (self.acked, self.window, self.ack_due) = (self.nxt, window, AckDue::No);
        self.edge_max = self.edge_max.max(self.nxt + window);
        u16::try_from(window >> self.shift).unwrap_or(u16::MAX)
    }

    /// The window of a SYN, which is not scaled.
    pub(super) fn syn_window(&self) -> u16 {
        u16::try_from(self.window).unwrap_or(u16::MAX)
    }

    fn window_left(&self) -> i64 {
        (self.acked + self.window - self.nxt).max(0)
    }

    /// `__tcp_select_window`.
    fn window_wanted(&self) -> i64 {
        let full = if self.shrinking { self.buffer / 4 } else { self.buffer };
        let mss = self.mss_seen.min(full);
        let mut free = full - self.unread();
        if free < full / 2 {
            free = free / self.unit() * self.unit();
            if free < full / 16 || free < mss {
                return 0;
            }
        }
        let free = free.min(self.grown);
        if self.shift > 0 {
            return (free + self.unit() - 1) / self.unit() * self.unit();
        }
        let stays = self.window > free - mss && self.window <= free;
        if stays { self.window } else { free / mss * mss }
    }

    /// The SACK option: duplicate bytes, then early ones, the newest first (RFC 2018, 2883).
    pub(super) fn sack(&mut self, blocks_max: usize) -> Vec<(Place, Place)> {
        let mut blocks: Vec<_> = self.twice.take().into_iter().collect();
        let fresh = blocks.len();
        for &at in &self.recent {
            if let Some(range) = self.early.containing(at).filter(|r| !blocks[fresh..].contains(r))
            {
                blocks.push(range);
            }
        }
        blocks.truncate(blocks_max);
        blocks
    }

    /// [`Self::sack`] has something to say.
    pub(super) fn has_blocks(&self) -> bool {
        self.twice.is_some() || !self.early.is_empty()
    }

    /// How far right the newest early data reaches, for an RST (RFC 5961 section 3.2 as in Linux).
    pub(super) fn early_end(&self) -> Option<Place> {
        self.early.end()
    }
}
