//! The sender of the inbound pipe: G's progress with R's bytes, and the next bytes for G (SNOOP-14,
//! SNOOP-27 to SNOOP-32).
//!
//! Before the first loss there is no congestion window ([`Path`]): the way to G is a ring. The
//! limits are G's own window, the ring's room and, per frame, the driver's features. The sender
//! knows neither frames nor the receiver; [`Stream`] describes the bytes in the store for it.
//!
//! Order: `una <= next <= sent <= stream.all()`, counting a delivered FIN as one.

mod opening;
mod path;
mod recovery;
mod resumed;

pub(crate) use path::Path;
use path::UnderWay;
pub(crate) use recovery::Recovery;

use crate::limits;
use crate::tcp::losses::Losses;
use crate::tcp::timers::{FromGuest, Timers};
use crate::time::{Duration, Instant};
use crate::wire::packet::SackBlocks;
use crate::wire::saved::saved;

/// The bytes in the store, as a sender sees them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Stream {
    /// End of the bytes that are there in order.
    pub(crate) end: u64,
    /// The stream ends there: a FIN follows.
    pub(crate) fin: bool,
}

impl Stream {
    /// End of all that G has to acknowledge, the FIN counted as one.
    pub(crate) fn all(self) -> u64 {
        self.end + u64::from(self.fin)
    }
}

/// Things that a sender needs besides its own numbers.
#[derive(Debug)]
pub(crate) struct Sending<'a> {
    /// The bytes to send.
    pub(crate) stream: Stream,
    /// Largest payload of a segment.
    pub(crate) mss: u64,
    /// G's running clock.
    pub(crate) running: Instant,
    /// R's RST waits behind the stream.
    pub(crate) reset_waits: bool,
    pub(crate) timers: &'a mut Timers,
    pub(crate) losses: &'a mut Losses,
}

/// A segment for G: the stored bytes `[from, to)`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Segment {
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// The stream's FIN follows.
    pub(crate) fin: bool,
    /// It ends with the last byte there is (SNOOP-12).
    pub(crate) push: bool,
}

/// An acknowledgement of G that can be true.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestAck<'a> {
    pub(crate) ack: u64,
    /// The right edge that it shows.
    pub(crate) edge: u64,
    /// It came without data and without a FIN.
    pub(crate) pure: bool,
    /// None if SACK was not negotiated, or there are no blocks.
    pub(crate) sack: Option<&'a SackBlocks>,
}

/// H as the sender to G.
#[derive(Debug)]
pub(crate) struct Sender {
    /// Highest valid ACK from G; everything below it is G's and has left the store.
    una: u64,
    /// Next byte to hand to G for the first time; falls back to `una` with a new ring.
    next: u64,
    /// End of the bytes given to G at least once, FIN included.
    sent: u64,
    /// Newest right edge G has shown; it may move left (SNOOP-27).
    edge: u64,
    /// Since when (running clock) G has acknowledged nothing although bytes wait (SNOOP-32).
    stuck_since: Instant,
    /// Local timeouts, and frames handed to G again.
    retransmissions: u32,
    /// Duplicate ACKs from G since `una` moved.
    dup_acks: u8,
    /// G has sent a non-SYN segment, so it is ESTABLISHED (COM-29).
    established: bool,
    /// A window probe is due (SNOOP-31).
    probe_due: bool,
    /// The flow stands in its port's delivery list.
    listed: bool,
}

saved! {
    Sender {
        una, next, sent, edge, stuck_since as Running, retransmissions, dup_acks, established,
        probe_due,
    }
    reset {
        listed = false, // import lists those that were
    }
}

impl Sender {
    /// A sender whose first byte is `first`, to a G that takes bytes below `edge`.
    pub(crate) fn new(first: u64, edge: u64) -> Self {
        Self {
            una: first,
            next: first,
            sent: first,
            edge,
            stuck_since: Instant::MAX,
            retransmissions: 0,
            dup_acks: 0,
            established: false,
            probe_due: false,
            listed: false,
        }
    }

    /// Highest valid ACK from G.
    #[inline]
    pub(crate) const fn una(&self) -> u64 {
        self.una
    }

    /// The next byte for G: those below are under way to it.
    pub(crate) const fn next(&self) -> u64 {
        self.next
    }

    /// End of the bytes given to G at least once.
    #[inline]
    pub(crate) const fn sent(&self) -> u64 {
        self.sent
    }

    /// Newest right edge of G.
    #[inline]
    pub(crate) const fn edge(&self) -> u64 {
        self.edge
    }

    /// G has sent a segment that is not a SYN.
    pub(crate) const fn is_established(&self) -> bool {
        self.established
    }

    /// Local timeouts, and frames handed to G again.
    pub(crate) const fn retransmissions(&self) -> u32 {
        self.retransmissions
    }

    /// The sequence number of a segment without data that G takes (K-01, K-06): behind all bytes
    /// that reach G before it, including those that passed the store, up to `passed`.
    #[inline]
    pub(crate) fn pure_ack_seq(&self, passed: u64) -> u64 {
        self.sent.max(passed).min(self.edge).max(self.una)
    }

    /// The sequence number of a keepalive or probe: G answers it.
    pub(crate) const fn probe_seq(&self) -> u64 {
        self.una - 1
    }

    /// The sequence number of an RST of ours that a G takes which did not read all.
    pub(crate) fn reset_seq(&self) -> u64 {
        self.sent.min(self.edge)
    }

    /// For how long G has acknowledged none of the bytes that wait for it, in running time.
    pub(crate) fn stuck_for(&self, running: Instant) -> Duration {
        running.since(self.stuck_since.min(running))
    }

    /// G has sent nothing since its last acknowledgement, not even a duplicate.
    pub(crate) const fn is_unheard(&self) -> bool {
        self.dup_acks == 0
    }

    /// There is something for G.
    #[inline]
    pub(crate) fn has_something(&self, stream: Stream, mss: u64, losses: &Losses) -> bool {
        self.probe_due
            || self.retransmission_due(mss, losses)
            || self.fresh_bytes(stream, mss, losses) > 0
            || self.fin_due(stream)
    }

    /// A range is due to be given to G again, and may be.
    #[inline]
    pub(crate) fn retransmission_due(&self, mss: u64, losses: &Losses) -> bool {
        losses.any() && self.repeatable(mss, losses) > 0
    }

    /// Bytes that are due to be given to G again, and may be. The first that it lacks are given
    /// whatever is under way.
    #[inline(never)]
    fn repeatable(&self, mss: u64, losses: &Losses) -> u64 {
        let Some((path, r)) = losses.path_and_guest() else { return 0 };
        let Some((from, to)) = r.due(self.una, path.arrived()) else { return 0 };
        let room = path.room(self.under_way(), r);
        (to - from).min((room - room % mss).max(if from == self.una { mss } else { 0 }))
    }

    /// Bytes under way.
    const fn under_way(&self) -> UnderWay {
        UnderWay { una: self.una, next: self.next, sent: self.sent }
    }

    /// Bytes not handed over yet that G's window takes, SWS avoidance applied (SNOOP-27).
    #[inline]
    fn fresh_bytes(&self, stream: Stream, mss: u64, losses: &Losses) -> u64 {
        let held = stream.end.saturating_sub(self.next);
        if held == 0 {
            return 0;
        }
        let mut room = self.edge.saturating_sub(self.next);
        if losses.any() {
            room = room.min(self.room_on_path(mss, losses));
        }
        if room >= held {
            return held;
        }
        // RFC 9293 section 3.8.6.2.1: a full segment, or half of G's window. With nothing in
        // flight `room` is the whole window, so this never waits for an ACK that will not come.
        let window = self.edge.saturating_sub(self.una);
        let useful = room >= mss || room * 2 >= window;
        if useful { room } else { 0 }
    }

    /// Room that the window of the way behind G leaves, in whole segments.
    #[inline(never)]
    fn room_on_path(&self, mss: u64, losses: &Losses) -> u64 {
        let Some((path, r)) = losses.path_and_guest() else { return u64::MAX };
        let room = path.room(self.under_way(), r);
        if room < mss { 0 } else { room - room % mss }
    }

    /// The end of a segment that was handed over and begins at `from`.
    fn segment_end(&self, from: u64, s: &Sending<'_>) -> u64 {
        (from + s.mss).min(self.next).min(s.stream.end)
    }

    fn fin_due(&self, stream: Stream) -> bool {
        self.fin_fits(stream) && stream.end == self.next && self.una <= self.next
    }

    /// R's FIN takes a sequence number of G's window like any byte: a segment that ends beyond the
    /// window may be dropped with its data (K-02).
    fn fin_fits(&self, stream: Stream) -> bool {
        stream.fin && stream.end < self.edge
    }

    /// The handshake sets where R's stream begins, and up to which edge G takes it.
    pub(crate) fn on_syn_ack(&mut self, first: u64, edge: u64) {
        let Self { retransmissions, listed, .. } = *self;
        *self = Self { retransmissions, listed, ..Self::new(first, edge) };
    }

    /// A segment of G that is not a SYN.
    pub(crate) fn on_established(&mut self) {
        self.established = true;
    }

    /// G's third ACK: the first edge it shows.
    pub(crate) fn on_third_ack(&mut self, edge: u64) {
        self.edge = edge;
        self.established = true;
    }

    /// G's acknowledgement and window, at least `una`.
    #[inline(always)]
    pub(crate) fn on_ack(&mut self, a: &GuestAck<'_>, s: &mut Sending<'_>) {
        let moved = a.edge != self.edge;
        self.edge = a.edge;
        if s.timers.is_probing() {
            // G answers: it is slow, not dead. Once it takes bytes again, all counts anew. R, which
            // has reset, waits for no slow G either (T_rst).
            if !s.reset_waits {
                self.stuck_since = Instant::MAX;
            }
            if a.edge > self.next {
                s.timers.on_guest_progress();
            }
        }
        if a.ack > self.una {
            self.on_progress(a.ack, s);
        } else if a.pure {
            self.on_duplicate_ack(moved, a, s);
        }
        if let Some(sack) = a.sack {
            self.on_sack(sack, s);
        }
        if s.losses.any() {
            self.end_ack(s);
        }
        self.wait(s, moved);
    }

    #[inline(always)]
    fn on_progress(&mut self, ack: u64, s: &mut Sending<'_>) {
        let before = self.under_way();
        self.una = ack;
        self.next = self.next.max(ack);
        self.sent = self.sent.max(ack);
        self.dup_acks = 0;
        if s.losses.any() {
            self.on_progress_of_recovery(before, s);
        } else {
            s.timers.on_guest_progress();
        }
        self.stuck_since = if ack < s.stream.all() { s.running } else { Instant::MAX };
        s.timers.stop_waiting_for_guest();
    }

    /// The same where something was lost. After a timeout G is given as long again until a round
    /// trip is measured (RFC 6298 section 5.5, Karn's algorithm).
    #[inline(never)]
    fn on_progress_of_recovery(&mut self, before: UnderWay, s: &mut Sending<'_>) {
        let una = self.una;
        let to = self.segment_end(una, s);
        let is_over = s.losses.of_guest_mut().is_none_or(|r| r.on_progress(una, to));
        if let Some(path) = s.losses.path_mut() {
            if let Some(beyond) = path.on_progress(s.running, una, before, s.mss) {
                s.timers.on_guest_progress();
                s.timers.set_rto_beyond(beyond);
            }
            if is_over && path.is_old(s.running) {
                s.losses.forget_path();
                s.timers.set_rto_beyond(Duration::ZERO);
            }
        }
        if s.losses.path().is_none() {
            s.timers.on_guest_progress();
        }
        s.losses.forget(una);
    }

    /// An ACK of G was taken.
    #[inline(never)]
    fn end_ack(&mut self, s: &mut Sending<'_>) {
        if let Some((path, r)) = s.losses.path_and_guest_mut() {
            r.end_ack(self.una);
            path.end_ack(self.under_way(), r, s.mss);
        }
    }

    /// Three duplicates mean a loss inside G (SNOOP-29). SACK blocks in one name the missing bytes.
    /// If none are missing, the ACK answers bytes that arrived twice (RFC 2883 section 4.1).
    fn on_duplicate_ack(&mut self, window_moved: bool, a: &GuestAck<'_>, s: &mut Sending<'_>) {
        let recovering = s.losses.of_guest().is_some_and(|r| r.explains_duplicates(self.una));
        if window_moved || self.sent <= self.una || recovering {
            return;
        }
        self.dup_acks = self.dup_acks.saturating_add(1);
        if self.dup_acks == 3 && a.sack.is_none() {
            let to = self.segment_end(a.ack, s);
            let under_way = self.under_way();
            s.losses.path_or_new(s.running, s.mss).0.on_loss(s.running, under_way, s.mss);
            s.losses.of_guest_or_new().on_duplicates(a.ack, to, self.next);
        }
    }

    /// A SACK block above `una` is a hole: H delivers in order, so nothing was merely late.
    #[inline]
    fn on_sack(&mut self, sack: &SackBlocks, s: &mut Sending<'_>) {
        for (from, to) in sack.as_slice() {
            let (from, to) = (from.unwrap(self.una), to.unwrap(self.una));
            if from > self.una && from < to && to <= self.sent {
                self.on_hole(from, to, s);
            } else if to <= self.una
                && let Some(path) = s.losses.path_mut()
            {
                path.on_twice(to - from.min(to));
            }
        }
    }

    /// G has these bytes, and lacks some below them.
    #[inline(never)]
    fn on_hole(&mut self, from: u64, to: u64, s: &mut Sending<'_>) {
        let (una, under_way) = (self.una, self.under_way());
        let begins = s.losses.of_guest().is_none_or(|r| !r.is_under_way(una));
        let path = s.losses.path_or_new(s.running, s.mss).0;
        let Some(new) = path.on_arrived(from, to) else { return };
        if begins {
            path.on_loss(s.running, under_way, s.mss);
        }
        let top = to.min(path.reduced());
        let r = s.losses.of_guest_or_new();
        r.on_arrived(new, to);
        r.on_hole(una, top);
    }

    /// G had its time and acknowledged nothing. All unacknowledged bytes count as lost, but the
    /// first segment is sent first: G may have been slow, and may have the rest. If it has taken
    /// its window back, it is asked for one.
    pub(crate) fn on_timeout(&mut self, s: &mut Sending<'_>) {
        let under_way = self.under_way();
        let (path, is_first) = s.losses.path_or_new(s.running, s.mss);
        path.on_timeout(s.running, under_way, s.mss, is_first);
        self.lose_all(s);
    }

    fn lose_all(&mut self, s: &mut Sending<'_>) {
        if self.edge <= self.una {
            self.next = self.una;
        }
        *s.losses.of_guest_or_new() = Recovery::of_all(self.una, self.next);
    }

    /// Segments of `s.mss` bytes or fewer get through, and longer ones do not (FWD-03): all that is
    /// under way is sent again.
    pub(crate) fn on_too_long(&mut self, s: &mut Sending<'_>) {
        s.losses.path_or_new(s.running, s.mss).0.on_too_long(s.running);
        self.lose_all(s);
        s.timers.stop_waiting_for_guest();
        self.wait(s, true);
    }

    /// G's window has stayed shut.
    pub(crate) fn on_window_shut(&mut self) {
        self.probe_due = true;
    }

    /// Frames in the ring are lost: their bytes count as not handed over (LIFE-04).
    pub(crate) fn on_ring_reset(&mut self, s: &mut Sending<'_>) {
        self.next = self.una;
        s.losses.forget_path(); // what is lost with a ring says nothing of G
        s.losses.forget(self.una);
        s.timers.stop_waiting_for_guest();
        self.wait(s, true);
    }

    /// Nobody knows what G has by now (LIFE-17): it is asked, and gets nothing before it has shown
    /// room anew.
    pub(crate) fn on_absence(&mut self, s: &mut Sending<'_>) {
        self.next = self.una;
        self.edge = self.una;
        self.probe_due = true;
        self.stuck_since = s.running;
        s.losses.forget_path();
        s.losses.forget(self.una);
        s.timers.on_guest_progress();
        s.timers.stop_waiting_for_guest();
        self.wait(s, true);
    }

    /// R's RST begins to wait behind the bytes held: T_rst counts from now on.
    pub(crate) fn on_reset_waits(&mut self, running: Instant) {
        self.stuck_since = running;
    }

    /// A segment of G meets a connection that no longer exists: an RST must carry its ACK.
    pub(crate) fn on_ack_in_abort(&mut self, ack: u64) {
        self.sent = ack;
        self.edge = ack;
    }

    /// The flow leaves the path.
    pub(crate) fn stop(&mut self) {
        self.probe_due = false;
    }

    /// The flow enters its VM's delivery list. `false`: it stands there.
    #[must_use]
    pub(crate) fn enter_list(&mut self) -> bool {
        !core::mem::replace(&mut self.listed, true)
    }

    /// The flow has left its VM's delivery list.
    pub(crate) fn on_left_list(&mut self) {
        self.listed = false;
    }

    /// The flow stands in its VM's delivery list.
    pub(crate) const fn is_listed(&self) -> bool {
        self.listed
    }

    /// [`Self::wait`] has nothing to do if no more happened than that bytes came for G: their like
    /// are under way to it, or wait although its window is open.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.next > self.una || (self.edge > self.next && self.stuck_since != Instant::MAX)
    }

    /// Waits for G: for an acknowledgement while bytes are under way, for room while its window is
    /// shut, but not for ever behind a waiting RST. `restart`: G has just moved.
    #[inline]
    pub(crate) fn wait(&mut self, s: &mut Sending<'_>, restart: bool) {
        let owed = self.una < s.stream.all();
        if !owed {
            self.stuck_since = Instant::MAX;
        } else if self.stuck_since == Instant::MAX {
            self.stuck_since = s.running;
        }
        let what = if self.next > self.una {
            FromGuest::Acknowledgement
        } else if owed && self.edge <= self.next {
            FromGuest::Window
        } else {
            FromGuest::Nothing
        };
        let behind_rst = s.reset_waits && owed;
        let latest = if behind_rst { self.stuck_since + limits::T_RST } else { Instant::MAX };
        s.timers.wait_for_guest(what, s.running, restart, latest);
    }

    /// The next piece of the bytes that G lost, of at most `payload_max` bytes.
    #[must_use]
    pub(crate) fn poll_retransmission(
        &mut self,
        payload_max: u64,
        s: &mut Sending<'_>,
    ) -> Option<Segment> {
        let most = self.repeatable(s.mss, s.losses).min(payload_max);
        let (path, r) = s.losses.path_and_guest_mut()?;
        let (from, end) = r.due(self.una, path.arrived()).filter(|_| most > 0)?;
        let mut to = end.min(from + most);
        if to == s.stream.end && to + 1 == end {
            to = end; // the FIN's number
        }
        r.on_sent(from, to, self.sent);
        self.retransmissions += 1;
        Some(self.segment(from, to, s))
    }

    /// The next bytes that G was not handed yet, at most `payload_max`, or the FIN alone.
    #[must_use]
    pub(crate) fn poll_fresh(&mut self, payload_max: u64, s: &mut Sending<'_>) -> Option<Segment> {
        let fresh = self.fresh_bytes(s.stream, s.mss, s.losses).min(payload_max);
        let some = fresh > 0 || self.fin_due(s.stream);
        some.then(|| self.segment(self.next, self.next + fresh, s))
    }

    /// The orders that always hold.
    pub(crate) fn assert_order(&self, stream: Stream) {
        debug_assert!(self.una <= self.next, "una {} > next {}", self.una, self.next);
        debug_assert!(self.next <= self.sent, "next {} > sent {}", self.next, self.sent);
        debug_assert!(self.sent <= stream.all(), "delivered beyond what is held");
    }

    /// A window probe, if one is due.
    #[must_use]
    pub(crate) fn poll_probe(&mut self) -> bool {
        core::mem::take(&mut self.probe_due)
    }

    fn segment(&mut self, from: u64, to: u64, s: &mut Sending<'_>) -> Segment {
        // A range that is repeated contains the FIN's number; new bytes end in front of it.
        let end = to;
        let to = to.min(s.stream.end);
        let fin = end > to || (self.fin_fits(s.stream) && s.stream.end == to && from >= self.next);
        let end = to + u64::from(fin);
        if s.losses.any()
            && let Some(path) = s.losses.path_mut()
        {
            path.on_sent(s.running, end, end - from, from < self.sent);
        }
        self.next = self.next.max(end);
        self.sent = self.sent.max(end);
        self.wait(s, false);
        Segment { from, to, fin, push: to == s.stream.end }
    }
}

#[cfg(test)]
mod tests;
