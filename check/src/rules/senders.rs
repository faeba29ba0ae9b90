//! INV-14 for flows with congestion offload: the host's segments for a guest are those of one
//! conforming sender. This is judged from the frames at the wire alone, with arithmetic of its own
//! (FLOOD-12, FLOOD-19, FLOOD-21 and FLOOD-23 to FLOOD-26).
//!
//! **Window.** The widest that a conforming sender may have: ten segments at first (RFC 6928), then
//! as much more as R acknowledges while slow start may last. After a reduction it follows CUBIC's
//! curve (RFC 9438), or grows by a segment in a round trip if that is more. Only a window that is
//! used grows (RFC 7661). The first copy of a round trip, or the first mark, leaves seven tenths of
//! the window that was used.
//!
//! **Under way** are the bytes that have left and that R does not have; new data keeps them within
//! the window. When the window is reduced, all bytes that left before may be lost, so the count
//! begins at nothing, and grows again with each departure. Until R has acknowledged the bytes that
//! had left, departures follow arrivals: a segment for each, and one more for each ACK that moves
//! (RFC 9937), or twice as much after a timeout.
//!
//! **For nothing.** If R has a copied segment sooner than any round trip after its copy, echoes an
//! older timestamp than the copy's, or says that something came twice, the window may be what it
//! was before the reduction for losses, not for marks (FLOOD-44). The next reduction has a CWR of
//! its own. Or the repair goes on, for other copies were needed: departures follow arrivals as
//! before.
//!
//! **Also**: no new byte beyond R's window; no copy before an answer to the first can have arrived;
//! no copy that is ECN-capable or carries CWR, and CWR on new data after a mark, once for all of a
//! window (RFC 3168); timeouts back off (RFC 6298); a burst is no longer than 64 KiB, unless a
//! round trip is shorter than a millisecond and a segment left in the last one (FLOOD-26); a flow
//! is let go when nothing is under way (FLOOD-32).

mod spurious;
mod when;
mod window;

use std::collections::BTreeMap;

use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use self::window::Window;
use super::Ensure;
use crate::history::{BASE, History, Side};
use crate::out::{In, Out};
use crate::wire::TcpFlags;

/// Segments of a first window (RFC 6928 section 2; jumbo frames too, FLOOD-19).
const FIRST_SEGMENTS: u64 = 10;
/// Segments that may leave beyond a window: two to see whether a timeout was for nothing (RFC
/// 5682), a loss probe (RFC 8985), the first of a repair.
const BESIDES: u64 = 4;
/// The shortest retransmission timeout, nearly.
const TIMEOUT_MIN: Duration = Duration::from_millis(190);
/// Timeouts of so much need not double any more (RFC 6298 section 2.5).
const TIMEOUT_LONG: Duration = Duration::from_secs(55);
/// So late may a worker be that shares its processor.
const LATE: Duration = Duration::from_millis(100);
/// For so long, and three round trips, a window counts as used that was (RFC 7661 section 4.2).
const USED_FOR: Duration = Duration::from_secs(1);
/// The longest burst, on a path with no shorter round trip than this.
const BURST: u64 = 1 << 16;
const SHORT: Duration = Duration::from_millis(1);

/// Bytes that left together.
#[derive(Clone, Copy, Debug)]
struct Piece {
    end: u64,
    /// When they left last.
    at: Instant,
    /// The timestamp that they carried then.
    stamp: Option<u32>,
    /// They left more than once.
    copied: bool,
    /// They have left since the window was last reduced.
    counts: bool,
    sacked: bool,
}

/// A repair, or the round trip of a mark: since the window was last reduced.
#[derive(Clone, Copy, Debug)]
struct Repair {
    /// Until this is acknowledged.
    until: u64,
    /// Bytes that left, that arrived, and ACKs that moved.
    sent: u64,
    arrived: u64,
    moves: u64,
    /// The window to restore if the timeout that began the repair was for nothing.
    undo: Option<Window>,
}

/// Copies of the first byte without an answer in between.
#[derive(Clone, Copy, Debug)]
struct Silence {
    first: u64,
    last: Instant,
    gap: Option<Duration>,
}

/// An ACK of R.
#[derive(Clone, Copy, Debug)]
struct RemoteAck<'a> {
    at: Instant,
    ack: u64,
    blocks: &'a [(u64, u64)],
    /// The timestamp that it echoes.
    echo: Option<u32>,
    /// It came without data.
    alone: bool,
    /// It speaks of a mark, and whether that is certainly believed.
    marked: bool,
    sure: bool,
}

/// A segment, or super-segment, for R.
#[derive(Clone, Copy, Debug)]
struct Left {
    at: Instant,
    from: u64,
    to: u64,
    /// Bytes of its segments.
    size: u64,
    /// The highest edge that R has shown.
    edge: u64,
    stamp: Option<u32>,
    /// It is ECN-capable, or carries CWR.
    capable: bool,
    cwr: bool,
}

/// The state of a sender, since it took over from its guest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sending {
    /// There is one.
    on: bool,
    /// Bytes of a full segment.
    mss: u64,
    /// R answers with SACK; else duplicate ACKs since `una` moved count.
    sack: bool,
    duplicates: u64,
    /// End of what had left when there were three: from `una` to here a loss was heard of.
    alarmed: u64,
    /// Marks were agreed on.
    ecn: bool,
    una: u64,
    next: u64,
    /// By first byte, from `una` to `next`.
    pieces: BTreeMap<u64, Piece>,
    /// Bytes under way, of pieces that count.
    under_way: u64,
    window: Window,
    repair: Option<Repair>,
    /// The window before the last reduction for losses.
    kept: Option<Window>,
    /// A repair that a timeout for nothing would end, if the host thinks so too.
    doubted: Option<Repair>,
    /// Bytes that the newest acknowledgement was the first to speak of.
    newest: u64,
    /// The first byte, when it last timed out.
    timed_out: Option<u64>,
    /// A mark waits for its CWR; marks count again when this is acknowledged.
    cwr_due: bool,
    marks_from: u64,
    /// Where the newest CWR is: the window was reduced for the bytes that left before it.
    reduced_for: Option<u64>,
    /// ECN-capable segments have left.
    capable: bool,
    moved_at: Option<Instant>,
    sent_at: Option<Instant>,
    shortest: Option<Duration>,
    longest: Duration,
    /// A round trip was measured since the last timeout.
    measured: bool,
    silence: Option<Silence>,
    burst: u64,
    /// Of what leaves in this instant no more than a burst may leave.
    is_paced: bool,
    /// Time and range of G's last segment, which passes unchanged if the host drops the flow just
    /// then.
    handed: Option<(Instant, u64, u64)>,
    /// Whether that segment has left in this step, passed or sent.
    handed_left: bool,
    /// The finding about that segment, if the host keeps the flow.
    doubtful: Option<String>,
    /// Most that was between `una` and `next` since `most_since`, and in the time before.
    most: [u64; 2],
    most_since: Option<Instant>,
}

fn first_window(mss: u64) -> u64 {
    FIRST_SEGMENTS * mss
}

impl Sending {
    /// The host is another from now on, and begins as one that knows nothing of the path.
    pub(crate) fn forget_host(&mut self) {
        (self.on, self.sent_at) = (false, None);
    }

    /// Just now G has sent exactly this.
    pub(crate) fn is_handed(&self, o: &Out<'_>) -> bool {
        self.handed == Some((o.at, o.seq, o.end + u64::from(o.tcp.flags.fin())))
    }

    fn begin(una: u64, mss: u64, sack: bool, ecn: bool) -> Self {
        let window = Window::first(first_window(mss));
        Self { on: true, mss, sack, ecn, una, next: una, window, ..Self::default() }
    }

    // --- Pieces under way ----------------------------------------------------------------------

    /// Makes a piece begin at `at`.
    fn cut(&mut self, at: u64) {
        if let Some((_, piece)) = self.pieces.range_mut(..at).next_back()
            && piece.end > at
        {
            let rest = *piece;
            piece.end = at;
            self.pieces.insert(at, rest);
        }
    }

    /// Changes the pieces of `[from, to)`, each with its length.
    fn change(&mut self, from: u64, to: u64, mut f: impl FnMut(&mut Piece, u64)) {
        self.cut(from);
        self.cut(to);
        for (start, piece) in self.pieces.range_mut(from..to) {
            let len = piece.end - start;
            self.under_way -= if piece.counts && !piece.sacked { len } else { 0 };
            f(piece, len);
            self.under_way += if piece.counts && !piece.sacked { len } else { 0 };
        }
    }

    fn sacked(&self) -> u64 {
        self.pieces.iter().filter(|(_, p)| p.sacked).map(|(from, p)| p.end - from).sum()
    }

    fn note_flight(&mut self, at: Instant) {
        let period = USED_FOR.max(self.longest.saturating_mul(3));
        if at.since(*self.most_since.get_or_insert(at)) > period {
            (self.most, self.most_since) = ([0, self.most[0]], Some(at));
        }
        self.most[0] = self.most[0].max(self.next - self.una);
    }

    fn used(&self) -> u64 {
        self.most[0].max(self.most[1])
    }

    // --- R's ACKs ------------------------------------------------------------------------------

    /// Bytes that R has for the first time, and whether some of them had left once, before the
    /// repair.
    fn take(&mut self, at: Instant, ack: u64, blocks: &[(u64, u64)]) -> (u64, bool) {
        let (mut new, mut original, mut sent_at) = (0, false, None);
        let mut take = |p: &mut Piece, len| {
            sent_at = sent_at.max((!p.sacked && !p.copied).then_some(p.at));
            new += if p.sacked { 0 } else { len };
            original |= !p.sacked && !p.copied && !p.counts;
            p.sacked = true;
        };
        let mut measures = true;
        self.change(self.una, ack, |p, len| {
            measures &= !p.copied;
            take(p, len);
        });
        self.pieces = self.pieces.split_off(&ack);
        for &(left, right) in blocks {
            self.change(left, right, &mut take);
        }
        // A path is no longer than the bytes that R had by now, even if a copy made it say so.
        if let Some(took) = sent_at.map(|sent_at| at.since(sent_at)) {
            self.shortest = Some(self.shortest.map_or(took, |before| before.min(took)));
            self.longest = if measures { self.longest.max(took) } else { self.longest };
            self.measured |= measures;
        }
        (new, original)
    }

    fn on_ack(&mut self, heard: &RemoteAck<'_>) {
        let RemoteAck { at, ack, marked, .. } = *heard;
        if ack > self.next || ack < self.una {
            return;
        }
        let true_blocks = heard.blocks.iter().filter(|_| self.sack);
        let blocks: Vec<(u64, u64)> = true_blocks
            .copied()
            .filter(|(from, to)| ack <= *from && from < to && *to <= self.next)
            .collect();
        self.note_flight(at);
        let used = 2 * self.used() + 2 * BESIDES * self.mss >= self.window.size;
        let (moved, is_alone) = (ack - self.una, heard.alone && self.una < self.next);
        let (sacked, late) = (self.sacked(), self.is_late(heard));
        let (mut new, original) = self.take(at, ack, &blocks);
        self.newest = (new + sacked).saturating_sub(self.sacked());
        (self.una, self.silence) = (ack, None);
        self.is_paced &= !self.is_short(); // the next ACKs are on their way
        if moved > 0 {
            (self.moved_at, self.duplicates, self.timed_out) = (Some(at), 0, None);
        } else if is_alone && !self.sack {
            (self.duplicates, new) = (self.duplicates + 1, self.mss);
            self.alarmed = if self.duplicates == 3 { self.next } else { self.alarmed };
        }
        for repair in self.repair.iter_mut().chain(&mut self.doubted) {
            repair.arrived += new;
            repair.moves += u64::from(moved > 0);
        }
        if let Some(repair) = self.repair {
            let undo = repair.undo.filter(|_| original);
            if undo.is_some() || repair.until <= ack {
                self.window = undo.unwrap_or(self.window);
                (self.repair, self.doubted) = (None, Some(repair));
                self.change(ack, self.next, |p, _| p.counts = true);
            }
        }
        if let Some(kept) = self.kept.take_if(|_| late) {
            self.window = kept.at_least(self.window.size);
            self.reduced_for = None; // the next loss reduces the same window again
            self.doubted = self.repair.take().or(self.doubted);
            self.change(ack, self.next, |p, _| p.counts = true);
        }
        self.doubted = self.doubted.filter(|repair| ack < repair.until);
        if used {
            self.window.grow(at, moved, self.mss);
        }
        let marked = marked && self.ecn && self.capable;
        if marked && ack > self.marks_from && self.repair.is_none() {
            self.reduce(at, new, None);
            self.kept = None;
            self.cwr_due = heard.sure;
            self.repair = self.repair.filter(|_| ack < self.next);
        }
    }

    // --- Reductions ----------------------------------------------------------------------------

    /// Once for all that is lost or marked in a round trip; `arrived` since it was noticed.
    fn reduce(&mut self, at: Instant, arrived: u64, undo: Option<Window>) {
        if self.repair.is_none() {
            self.kept = Some(self.window);
        }
        self.window.reduce(at, self.used(), self.mss);
        self.marks_from = self.next;
        self.begin_repair(arrived, undo);
    }

    fn begin_repair(&mut self, arrived: u64, undo: Option<Window>) {
        self.change(self.una, self.next, |p, _| p.counts = false);
        self.repair = Some(Repair { until: self.next, sent: 0, arrived, moves: 0, undo });
    }

    /// A copy of `[from, to)` leaves: finds its cause.
    fn note_copy(&mut self, at: Instant, from: u64, to: u64) {
        let copied = || self.pieces.range(from..to);
        let again = copied().any(|(_, p)| p.copied && p.counts);
        let left_at = copied().next().map(|(_, p)| p.at);
        let heard_at = self.moved_at.max(left_at);
        let quiet = heard_at.is_none_or(|heard_at| at.since(heard_at) >= TIMEOUT_MIN);
        let (is_timeout, sacked) = (from == self.una && quiet, self.sacked());
        let is_probe = to == self.next && sacked == 0 && self.duplicates == 0;
        self.measured &= !is_timeout;
        let timed_out = self.timed_out == Some(from);
        if is_timeout || again {
            self.reduced_for = None; // a congestion of its own (RFC 5681 sections 3.1 and 4.3)
        }
        match self.repair {
            None if is_probe => return,
            Some(_) if !again => return,
            // Another timeout of the same bytes.
            _ if is_timeout && timed_out => self.begin_repair(0, None),
            // Nothing was heard: it may only be late.
            None if is_timeout && sacked == 0 => self.reduce(at, 0, Some(self.window)),
            // The bytes that have arrived so far already allow sending, those of the newest ACK too
            // (RFC 9937: `DeliveredData`).
            _ => self.reduce(at, sacked + self.newest + self.duplicates * self.mss, None),
        }
        // A repair that the host does not undo goes on.
        let goes_on = self.doubted.take_if(|doubted| from < doubted.until);
        if let (Some(repair), Some(before)) = (&mut self.repair, goes_on) {
            let Repair { sent, arrived, moves, .. } = before;
            *repair = Repair { sent, arrived, moves, ..*repair };
        }
        if is_timeout {
            self.timed_out = Some(from);
        }
    }

    // --- Departures ----------------------------------------------------------------------------

    fn on_sent(&mut self, left: &Left) -> Ensure {
        let Left { at, from, to, capable, cwr, .. } = *left;
        let beyond = to.saturating_sub(self.next.max(left.edge));
        if beyond > 0 {
            return Err(format!("{beyond} bytes to R beyond its window"));
        }
        self.after_a_pause(at);
        let is_copy = from < self.next;
        let pauses = self.sent_at.is_some_and(|last| at.since(last) > SHORT);
        if is_copy {
            if capable || cwr {
                return Err("a copy to R that is ECN-capable, or carries CWR".to_owned());
            }
            self.cut(from);
            self.cut(to);
            self.not_too_early(at, from, to)?;
            self.note_copy(at, from, to);
            self.backs_off(at, from)?;
            self.change(from, to, |p, _| {
                (p.at, p.stamp) = (at, left.stamp);
                (p.copied, p.counts, p.sacked) = (true, true, false);
            });
        } else {
            if capable && !self.ecn {
                return Err("an ECN-capable segment to R that was not agreed on".to_owned());
            }
            if std::mem::replace(&mut self.cwr_due, false) && !cwr {
                return Err("new data without CWR after R spoke of a mark".to_owned());
            }
            self.capable |= capable;
            if cwr {
                self.note_reduced(from)?;
            }
            self.add(left);
        }
        // On a path that is known from before (RFC 8985 section 7.3).
        let probes = self.sent_at.zip(self.shortest).is_some_and(|(last, t)| at.since(last) > t);
        let len = to - from;
        self.note_burst(at, len, pauses);
        self.note_flight(at);
        if self.is_paced && self.burst > BURST.max(2 * self.mss) + 2 * self.mss {
            return Err(format!("{} bytes to R at once", self.burst));
        }
        self.follows_arrivals(len)?;
        if is_copy { Ok(()) } else { self.is_within_window(probes) }
    }

    /// CWR leaves at `from`: the window is reduced once for all that is lost or marked of what was
    /// under way (RFC 3168 section 6.1.2). The first segment may say it of G's own window.
    fn note_reduced(&mut self, from: u64) -> Ensure {
        self.marks_from = self.marks_from.max(from);
        if self.reduced_for.is_some_and(|before| self.una < before) {
            return Err("CWR to R twice for one window".to_owned());
        }
        self.reduced_for = self.sent_at.map(|_| from);
        Ok(())
    }

    /// After a pause of more than any timeout the window is half of what it was, or that of the
    /// beginning (RFC 5681 section 4.1).
    fn after_a_pause(&mut self, at: Instant) {
        let idle = self.sent_at.map_or(Duration::ZERO, |sent_at| at.since(sent_at));
        let long = self.longest.saturating_mul(6) + Duration::from_millis(500);
        if self.una == self.next && self.measured && idle > long {
            let w = &mut self.window;
            w.slow_to = w.slow_to.max(w.size);
            w.size = w.size.min((w.size / 2).max(first_window(self.mss)));
        }
    }

    /// New bytes: the segments of a frame.
    fn add(&mut self, left: &Left) {
        let mut from = self.next;
        while from < left.to {
            let end = (from + left.size).min(left.to);
            let (copied, counts, sacked) = (false, true, false);
            let piece = Piece { end, at: left.at, stamp: left.stamp, copied, counts, sacked };
            self.pieces.insert(from, piece);
            from = end;
        }
        self.under_way += left.to - self.next;
        self.next = left.to;
    }

    fn is_within_window(&self, probes: bool) -> Ensure {
        if !self.sack && self.repair.is_some() {
            return Ok(()); // the bytes under way are a guess
        }
        // Another copy may have been needed: then a repair of losses goes on (FLOOD-44). Without
        // SACK one of a timeout may as well: the sooner answer may be that of a shorter queue.
        let goes_on = |repair: &Repair| repair.undo.is_none() || !self.sack;
        if self.doubted.filter(goes_on).is_some_and(|repair| repair.sent <= repair.most(self.mss)) {
            return Ok(());
        }
        // Duplicate ACKs let new segments out before anything is acknowledged (RFC 3042). Without
        // SACK each speaks of one that has arrived, however many do (FLOOD-45).
        let heard = self.moved_at.is_some() || self.duplicates > 0;
        let besides = if heard { BESIDES } else { u64::from(probes) };
        let besides = besides + if self.sack { 0 } else { self.duplicates };
        let (have, most) = (self.under_way, self.window.size);
        match have <= most + besides * self.mss {
            true => Ok(()),
            false => Err(format!("{have} bytes under way to R in a window of {most}")),
        }
    }
}

/// The largest payload of a segment to R.
fn mss(h: &History) -> u64 {
    let default = if h.name.remote[..10] == [0; 10] { 536 } else { 1220 };
    let mss = h.end(Side::R).offer.mss.map_or(default, u64::from).max(88);
    mss - if h.timestamps() { 12 } else { 0 }
}

fn is_judged(h: &History) -> bool {
    h.conn.is_some() && h.is_relayed && h.is_judged() && !h.past
}

/// A segment of R arrives.
pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    if s.from == Side::G {
        let to = s.end + u64::from(s.tcp.flags.fin());
        h.quality.sending.handed = Some((s.at, s.seq, to));
    }
    if !h.quality.sending.on || s.from != Side::R || !s.tcp.flags.ack() {
        return;
    }
    let near = |seq| h.unwrap(Side::G, seq, s.ack);
    let blocks = s.tcp.options.sack.as_slice().iter();
    let blocks: Vec<(u64, u64)> = blocks.map(|&(from, to)| (near(from), near(to))).collect();
    let (alone, marked) = (s.end == s.seq, s.tcp.flags.contains(TcpFlags::ECE));
    let (at, ack, sure) = (s.at, s.ack, s.counts);
    let echo = s.tcp.options.timestamps.map(|ts| ts.tsecr);
    h.quality.sending.on_ack(&RemoteAck { at, ack, blocks: &blocks, echo, alone, marked, sure });
}

/// Between two steps of the host.
pub(crate) fn on_step(h: &mut History) -> Ensure {
    if is_let_go(h) {
        let under_way = h.quality.sending.next - h.quality.sending.una;
        return Err(format!("let go of a flow with {under_way} bytes under way to R"));
    }
    h.quality.sending.handed_left = false;
    h.quality.sending.on &= is_judged(h); // one that takes over again begins anew
    match h.quality.sending.doubtful.take() {
        Some(what) if h.quality.sending.on => Err(what),
        _ => Ok(()), // it was G's own, sent by its own window (seeds 54825, 59016)
    }
}

/// The host sends for G no longer, although R has yet to acknowledge what has left (FLOOD-32), and
/// is neither silent nor shut, and has acknowledged nothing that G sent past the host (FLOOD-08,
/// FLOOD-12, FLOOD-23).
fn is_let_go(h: &History) -> bool {
    let (sending, r) = (&h.quality.sending, h.end(Side::R));
    let in_path = matches!(h.state, Some(State::On | State::Drain)) && h.is_twinned();
    let gone = in_path && sending.on && !h.is_relayed && sending.una < sending.next;
    // R's segments may go on to acknowledge nothing new (seed 95212).
    let silent = sending.silence.is_some() || sending.timed_out.is_some();
    let moved = r.edge < sending.next || r.lied > BASE;
    gone && !silent && !moved && !sending.handed_left
}

/// Something leaves; it is not yet in the history.
pub(crate) fn on_out(h: &mut History, o: &Out<'_>) -> Ensure {
    if o.to != Side::R {
        return Ok(());
    }
    h.quality.sending.on &= is_judged(h);
    // Not only what the host certainly made: it may look as G's own segment did.
    let plain = !o.tcp.flags.intersects(TcpFlags::SYN | TcpFlags::RST);
    let (from, to) = (o.seq, o.end + u64::from(o.tcp.flags.fin()));
    if !plain || from == to || !is_judged(h) {
        return Ok(());
    }
    let (mss, edge) = (mss(h), h.end(Side::R).edge_max);
    if !h.quality.sending.on && from >= h.end(Side::R).end_to {
        let mut next = Sending::begin(from, mss, h.sack(), h.known.ecn);
        // A host that sent before knows the path, and begins no wider than it ended (RFC 5681
        // section 4.1).
        let before = &h.quality.sending;
        next.shortest = before.shortest;
        if before.sent_at.is_some() {
            next.window = Window::first(next.window.size.min(before.window.size.max(mss)));
        }
        h.quality.sending = next;
    }
    let sending = &mut h.quality.sending;
    // A segment that passes unchanged behind a hole is G's own: the host has just dropped the flow.
    sending.on &= o.gated || from <= sending.next;
    if !sending.on || to <= sending.una {
        return Ok(()); // no data: a keepalive
    }
    let size = if o.hdr.is_gso() { o.hdr.gso_size.into() } else { mss };
    let (capable, cwr) = (matches!(o.ip.tos & 3, 1 | 2), o.tcp.flags.contains(TcpFlags::CWR));
    let handed = sending.is_handed(o);
    sending.handed_left |= handed;
    let stamp = o.tcp.options.timestamps.map(|ts| ts.tsval);
    let sent = sending.on_sent(&Left { at: o.at, from, to, size, edge, stamp, capable, cwr });
    if handed && sent.is_err() {
        sending.doubtful = sent.err(); // the end of the step says whose it was
        return Ok(());
    }
    sent
}

#[cfg(test)]
mod tests;
