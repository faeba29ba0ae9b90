//! RECOVERY (SNOOP-14, SNOOP-27 to SNOOP-29, LIFE-04): bytes that G lost are offered to it again,
//! in time and not before.
//!
//! The host stands where a remote without loss or distance would: it has all bytes for which G
//! asks. If G's ring is empty, so that there is room, G's window takes the bytes, and the worker
//! has a processor, then
//! - new bytes, and R's FIN behind the last, are offered within [`AT_ONCE`];
//! - a byte that G asks for (three duplicate ACKs, a SACK block, the first ACK within a recovery;
//!   RFC 6582, RFC 6675), or that lay in a ring when the driver was reset, is offered within the
//!   same time. A duplicate with SACK blocks asks by these; one for bytes that came twice asks for
//!   nothing (RFC 2883);
//! - a byte that G does not mention is offered within twice the timeout of SNOOP-29, which starts
//!   at 250 ms of G's running time, doubles to 2 s, and starts again when G has moved. The first is
//!   three times what G took to answer in the handshake, if that is more (FWD-04).
//!
//! From a loss on, and for [`ON_PATH`] after the last, the host takes what is behind G for a path
//! (FWD-04): new bytes wait while anything is under way, for after a timeout the window is one
//! segment, and a short one may be under way; and a timeout that was doubled stays so when G moves.
//! A G whose own frames came a hop is taken for one from the first byte on.
//!
//! A G whose window is shut is probed within twice the interval of SNOOP-31, which starts at 200 ms
//! and doubles to a minute. A G that takes nothing for [`REFUSES`] of its running time is given up
//! (SNOOP-32). After a timeout the bytes that were under way follow as fast as G acknowledges,
//! twice as much each time.
//!
//! And a byte is not offered again for lack of an ACK before G has run for [`NOT_BEFORE`], nor then
//! before twice that, and so on: a paused guest has lost nothing. With captures this cannot be
//! judged, because they do not show rings.

use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::guest_clock::GuestClock;
use crate::history::{BASE, History, Side};
use crate::out::{In, Out};

/// The length of a turn of the worker, and of its delays.
const AT_ONCE: Duration = Duration::from_millis(20);
/// A little less than the 250 ms of SNOOP-29: running time is measured from two places.
const NOT_BEFORE: Duration = Duration::from_millis(200);
/// The first timeout, and the longest.
const TIMEOUT_MS: (u64, u64) = (250, 2_000);
/// The interval between two probes, at first and at most.
const PERSIST_MS: (u64, u64) = (200, 60_000);
/// Two minutes of running time and fifteen timeouts (SNOOP-32). The host counts a timeout from its
/// next look at the ring. A guest that takes a frame within 300 ms is looked at after 100, 200 and
/// 400 ms: two seconds become 2.4 at most (2.33 to 2.36 in seed 1102), two minutes 144 s.
const REFUSES: Duration = Duration::from_secs(150);
/// A path is forgotten after 10 s of running time (FWD-04), which is measured from two places.
const ON_PATH: Duration = Duration::from_secs(12);
/// TTLs of frames that came no hop; 32 is one of the simulated guests.
const OWN_TTLS: [u8; 4] = [32, 64, 128, 255];
/// Most delay of a timer: a ring that sends no notification is polled every 100 ms.
const LATE: Duration = Duration::from_millis(300);

/// The offers to G, and G's answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recovery {
    /// G's newest ACK and edge.
    una: u64,
    edge: u64,
    /// End of the bytes offered to G. An empty segment may lie beyond: bytes that waited for a ring
    /// that was set up again count for the host (K-01).
    out_to: u64,
    /// When the byte `una` was offered last, or became the first; and the most that G had run
    /// then.
    offered: Option<(Instant, Duration)>,
    /// That frame waited outside the ring: it was made earlier.
    waited: bool,
    /// How often it was offered again.
    timeouts: u32,
    /// ACKs that repeat `una`.
    duplicates: u32,
    /// G misses the byte `una`, and has not been offered it since then.
    missed_at: Option<Instant>,
    /// End of the bytes under way when a recovery began; it is over when G has them.
    end: u64,
    /// The host may begin one later than it must, and so end it later: below this at the latest.
    may_end: u64,
    /// The ranges that were offered again in it.
    again: Vec<(u64, u64)>,
    /// Of those that `timeouts` counts, those for want of an ACK.
    by_timer: u32,
    /// G's window was shut and is open again: bytes are offered again for that reason (seed 86685).
    reopened: bool,
    /// How often G's shut window was probed, and when last; or since when it is shut.
    probes: Option<(u32, Instant)>,
    /// How long G had run when the byte `una` was offered first, or became the first.
    stuck: Option<Duration>,
    /// Bytes by which G has moved since a timeout, and when it did last; it named no loss since.
    slow_moved: (u64, Instant),
    slow: bool,
    /// The range that a timeout offers again: from the next byte on.
    burst: (u64, u64),
    /// Up to here a timeout sends by slow start: new bytes may wait.
    slow_to: u64,
    /// Since when there are new bytes that were not offered.
    fresh_since: Option<Instant>,
    /// G sent something: timers may start anew.
    heard_at: Instant,
    /// How long G had run when something was last found lost, while that counts.
    lost: Option<Duration>,
    /// Timeouts since then, whether G has moved after them or not.
    doubled: u32,
    /// Frames of G came a hop.
    behind: bool,
    /// When R's first SYN or SYN-ACK came that G had to answer.
    asked_at: Option<Instant>,
    /// How long G took to answer it.
    answer: Option<Duration>,
    /// End of the bytes under way when G first acknowledged some.
    first_to: u64,
}

impl Recovery {
    fn has_been_offered(&self, at: u64) -> bool {
        self.again.iter().any(|(from, to)| (*from..*to).contains(&at))
    }

    /// The byte before `una` may have timed out, and its copy have met a ring without room (seeds
    /// 1129, 57806: the copies of other flows fill one of two frames): it was due, and the ring
    /// has not been empty since.
    fn has_waited_for_room(&self, now: Instant, clock: &GuestClock) -> bool {
        let Some((at, ran)) = self.offered else { return false };
        let due = since(clock.may_have_run(now), ran) >= not_before(self.by_timer);
        due && clock.idle_since().is_none_or(|idle| idle > at)
    }

    /// The host may take what is behind G for a path.
    fn is_on_path(&self) -> bool {
        self.behind || self.lost.is_some()
    }

    /// R's SYN, or SYN-ACK, came. The first copy counts.
    pub(crate) fn on_asked(&mut self, at: Instant) {
        self.asked_at.get_or_insert(at);
    }

    /// G's SYN-ACK, or its first segment after R's, came.
    pub(crate) fn on_answered(&mut self, at: Instant) {
        self.answer = self.answer.or(self.asked_at.map(|asked_at| at.since(asked_at)));
    }

    /// The first timeout in milliseconds (FWD-04). It is that of the handshake until an answer to
    /// data was timed.
    fn first_timeout_ms(&self) -> u64 {
        let is_timed = self.first_to > 0 && self.una >= self.first_to && self.lost.is_none();
        let answer_ms = self.answer.filter(|_| !is_timed).map_or(0, Duration::as_millis);
        (3 * answer_ms).clamp(TIMEOUT_MS.0, TIMEOUT_MS.1)
    }

    /// While it repeats, and in the slow start after a timeout, new bytes may wait.
    fn is_calm(&self, una: u64) -> bool {
        self.timeouts == 0 && una >= self.end && una >= self.slow_to
    }

    /// After a timeout duplicate ACKs may be those of what was under way before it, and name no
    /// loss (RFC 6582 section 3.2); `sure`: these do.
    fn begin(&mut self, now: Instant, out_to: u64, sure: bool) {
        self.slow = false;
        let before = self.may_end;
        self.may_end = before.max(out_to);
        if self.una >= self.end {
            self.end = out_to;
            // The host may be in the one before, and repeats nothing twice in it.
            if self.una >= before {
                self.again.clear();
            }
            let missed = sure && !self.has_been_offered(self.una);
            self.missed_at = missed.then_some(now);
        }
    }
}

impl History {
    /// G asks for something, or its rings are new.
    pub(crate) fn is_asked_for(&self) -> bool {
        self.end(Side::G).acked < self.quality.recovery.end
    }
}

/// The rings of G were set up again: the frames in them are gone.
pub(crate) fn on_driver_back(h: &mut History, now: Instant) {
    let una = h.end(Side::G).acked;
    let q = &mut h.quality.recovery;
    let out_to = q.out_to;
    q.again.clear();
    q.una = una;
    if out_to > una {
        (q.end, q.may_end) = (out_to, out_to);
        (q.missed_at, q.burst) = (Some(now), (una, out_to));
    }
}

pub(crate) fn on_in(h: &mut History, s: &In<'_>, clock: &GuestClock) {
    if s.from == Side::R {
        return;
    }
    let (una, edge, out_to) =
        (h.end(Side::G).acked, h.end(Side::G).edge, h.quality.recovery.out_to);
    // With SACK a recovery is over when all is there that was below the highest block.
    let blocks = s.tcp.options.sack.as_slice().iter().filter_map(|(from, to)| {
        let (from, to) = (h.unwrap(Side::R, *from, una), h.unwrap(Side::R, *to, una));
        (from > una && to > from && to <= out_to).then_some(to)
    });
    let top = blocks.max().filter(|_| h.sack());
    let says_more = h.sack() && !s.tcp.options.sack.as_slice().is_empty();
    let q = &mut h.quality.recovery;
    let before = std::mem::replace(&mut q.edge, edge);
    let moved = before != edge;
    q.reopened |= before > 0 && before <= una && edge > una;
    q.on_answered(s.at);
    q.heard_at = s.at;
    q.behind |= !OWN_TTLS.contains(&s.ip.ttl);
    if una > q.una && q.lost.is_some_and(|then| since(clock.ran(s.at), then) > ON_PATH) {
        (q.lost, q.doubled) = (None, 0);
    }
    if moved {
        q.by_timer = 0; // a window that opens again: the host begins anew
    }
    q.una = q.una.max(BASE + 1); // its SYN-ACK, which is no answer to data
    if una > q.una {
        (q.by_timer, q.reopened) = (0, false);
        q.stuck = (out_to > una).then(|| clock.ran(s.at));
        let more = una - q.una;
        q.slow_moved = if una < q.slow_to { (q.slow_moved.0 + more, s.at) } else { (0, s.at) };
        q.una = una;
        q.first_to = if q.first_to == 0 { out_to } else { q.first_to };
        if q.has_waited_for_room(s.at, clock) {
            (q.burst, q.slow_to) = ((una, out_to), out_to);
        }
        (q.duplicates, q.timeouts, q.missed_at) = (0, 0, None);
        q.offered = (out_to > una).then(|| (s.at, clock.may_have_run(s.at)));
        if una < q.end && out_to > una {
            q.missed_at = (!q.has_been_offered(una)).then_some(s.at);
        }
    } else if s.ack == una && s.tcp.payload_len == 0 && !s.tcp.flags.fin() && !moved && out_to > una
    {
        q.duplicates += 1;
        if q.duplicates == 3 && !says_more {
            q.lost = Some(clock.may_have_run(s.at));
            // Bytes that a timeout has yet to repeat are no part of it.
            let end = if una < q.slow_to { q.burst.0.clamp(una, out_to) } else { out_to };
            q.begin(s.at, end, una >= q.slow_to);
            q.may_end = q.may_end.max(out_to);
        }
    }
    if let Some(top) = top {
        q.lost = Some(clock.may_have_run(s.at));
        q.begin(s.at, top, true);
    }
}

/// End of the bytes that were acknowledged to R and are owed to G, and the FIN behind the last.
fn owed_to(h: &History) -> u64 {
    let r = h.end(Side::R);
    let in_order = h.in_order().min(r.ack_to);
    let is_owed = |fin: &u64| *fin == in_order && h.acceptable.has(*fin) && !h.fin_may_be_lost;
    let fin = r.fin.filter(is_owed);
    in_order + u64::from(fin.is_some())
}

/// New bytes, and R's FIN, that G's window takes and that nothing keeps from being offered.
pub(crate) fn fresh_bytes(h: &History) -> Option<u64> {
    let g = h.end(Side::G);
    let (una, end) = (g.acked, owed_to(h));
    let out_to = h.quality.recovery.out_to.max(una);
    let room = g.edge.min(end).saturating_sub(out_to);
    let fits =
        room >= h.segment_for_guest().0 || room > 0 && (out_to <= una || out_to + room == end);
    let q = &h.quality.recovery;
    let waits = q.is_on_path() && out_to > una;
    (fits && q.is_calm(una) && !waits && !h.waits_for_guest).then_some(room)
}

pub(crate) fn on_step(h: &mut History, now: Instant, clock: &GuestClock) -> Ensure {
    let times = clock.idle_since().zip(clock.served_since());
    let Some((idle, served)) = times.filter(|_| h.is_twinned() && h.paused_since.is_none()) else {
        h.quality.recovery.fresh_since = None;
        return Ok(());
    };
    // The host's segments are between the two: with an MSS of 2000 behind an MTU of 1500 (seed
    // 6579) of 1448 bytes.
    let (fresh, (most, least)) = (fresh_bytes(h), h.segment_for_guest());
    let g = h.end(Side::G);
    let (una, edge, end) = (g.acked, g.edge, owed_to(h));
    let out_to = h.quality.recovery.out_to.max(una);
    let in_order = h.in_order().min(h.end(Side::R).ack_to);
    let q = &mut h.quality.recovery;
    match fresh {
        None => q.fresh_since = None,
        Some(room) if now.since((*q.fresh_since.get_or_insert(now)).max(served)) > AT_ONCE => {
            return Err(format!("{room} new bytes that G's window takes were not offered"));
        }
        Some(_) => {}
    }
    is_probed(q, now, edge <= una && out_to <= una && una < end, idle)?;
    let takes = edge > una && una < end && out_to > una;
    if !takes {
        q.stuck = None;
        q.missed_at = q.missed_at.map(|_| now); // due from when there is a window (seed 3374)
        return Ok(());
    }
    let ran = |then: Duration| since(clock.ran(now), then);
    if q.stuck.is_some_and(|then| ran(then) > REFUSES) {
        return Err(format!("a guest that does not take byte {} was not given up", una - BASE));
    }
    let slow = (una + 2 * least).min(q.slow_to).min(edge.saturating_sub(most));
    let doubles = q.slow && q.slow_moved.0 >= most && una < q.slow_to && q.burst.0 > una;
    if doubles && q.burst.0 < slow && now.since(q.slow_moved.1.max(served)) > AT_ONCE {
        let next = q.burst.0 - BASE;
        return Err(format!("byte {next} waits behind a timeout although G has moved"));
    }
    // A FIN is not asked for: R's own would wait for a timer too.
    let missed = q.missed_at.filter(|_| una < in_order);
    if missed.is_some_and(|at| now.since(at.max(served)) > AT_ONCE) {
        return Err(format!("byte {} that G lost was not offered again", una - BASE));
    }
    let (first, longest) = (q.first_timeout_ms(), TIMEOUT_MS.1);
    let timeout = (first << q.timeouts.max(q.doubled).min(8)).min(longest);
    // How long the path behind G is, nobody here knows.
    let timeout = if q.behind { longest } else { timeout };
    let bound = Duration::from_nanos(2 * timeout * 1_000_000 + LATE.as_nanos());
    match q.offered {
        Some((at, _)) if now.since(at.max(idle).max(q.heard_at)) > bound => {
            let ms = now.since(at).as_millis();
            Err(format!("byte {} was not offered again for {ms} ms", una - BASE))
        }
        _ => Ok(()),
    }
}

/// A shut window with bytes behind it is probed, less and less often.
fn is_probed(q: &mut Recovery, now: Instant, shut: bool, idle: Instant) -> Ensure {
    if !shut {
        q.probes = None;
        return Ok(());
    }
    let (probes, at) = *q.probes.get_or_insert((0, now));
    let interval = (PERSIST_MS.0 << probes.min(20)).min(PERSIST_MS.1);
    let bound = Duration::from_nanos(2 * interval * 1_000_000 + LATE.as_nanos());
    match now.since(at.max(idle).max(q.heard_at)) > bound {
        true => Err(format!("a shut window was not probed for {} ms", now.since(at).as_millis())),
        false => Ok(()),
    }
}

/// Nothing is offered again too soon.
pub(crate) fn on_out(h: &History, o: &Out<'_>, clock: &GuestClock) -> Ensure {
    let q = &h.quality.recovery;
    if o.to != Side::G || !o.is_stored() || !h.is_twinned() || o.end > q.out_to {
        return Ok(());
    }
    // The host does not hold bytes that it has not acknowledged: R itself offers them again.
    let una = h.end(Side::G).acked;
    let in_burst = (q.burst.0..q.burst.1).contains(&o.seq);
    let asked = una < q.end.max(q.may_end);
    if in_burst || asked || q.waited || o.seq > una || o.end <= una || o.end > h.end(Side::R).ack_to
    {
        return Ok(());
    }
    match q.offered {
        Some((_, ran)) if since(clock.may_have_run(o.at), ran) < not_before(q.by_timer) => {
            let ms = since(clock.may_have_run(o.at), ran).as_millis();
            Err(format!("byte {} was offered again when G had run for {ms} ms", una - BASE))
        }
        _ => Ok(()),
    }
}

/// `o` has left, and is not yet in the history.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>, clock: &GuestClock) {
    // A frame that looks like a received one is offered too.
    let end = o.end + u64::from(o.tcp.flags.fin());
    let acked = h.end(Side::G).acked;
    if o.to == Side::G && o.gated && o.is_pure() && o.seq + 1 == acked {
        let probes = &mut h.quality.recovery.probes;
        *probes = probes.map(|(count, _)| (count + 1, o.at));
    }
    // One that waited for the ring may be of the connection before on these ports (seed 14333).
    let earlier = h.end(Side::R).isn.is_none();
    if o.to != Side::G || end == o.seq || o.tcp.flags.rst() || earlier {
        return;
    }
    let (una, edge) = (h.end(Side::G).acked, h.end(Side::G).edge);
    let q = &mut h.quality.recovery;
    let out_to = q.out_to;
    if out_to == 0 {
        q.edge = edge; // as its SYN-ACK showed it: its first ACK may be a duplicate
    }
    q.out_to = q.out_to.max(end);
    if o.seq >= out_to {
        q.fresh_since = None;
    }
    if o.seq < out_to {
        q.again.push((o.seq, end));
    }
    if (o.seq..end).contains(&una) {
        q.stuck = q.stuck.or(Some(clock.ran(o.at)));
        if o.seq < out_to {
            let in_burst = (q.burst.0..q.burst.1).contains(&o.seq);
            let reopened = std::mem::take(&mut q.reopened);
            if !in_burst && una >= q.end.max(q.may_end) && !reopened {
                (q.by_timer, q.slow_moved.0, q.slow) = (q.by_timer + 1, 0, true);
            }
            (q.timeouts, q.doubled) = (q.timeouts + 1, q.doubled + 1);
            q.lost = Some(clock.may_have_run(o.at));
            (q.burst, q.slow_to) = ((end, out_to), out_to);
        }
        q.offered = Some((o.at, clock.may_have_run(o.at)));
        (q.missed_at, q.waited) = (None, o.waited);
    } else if (q.burst.0..q.burst.1).contains(&o.seq) {
        q.burst.0 = end;
    }
}

/// A little less than the timeout after so many in a row.
fn not_before(by_timer: u32) -> Duration {
    Duration::from_nanos(NOT_BEFORE.as_nanos() << by_timer.min(3))
}

fn since(now: Duration, then: Duration) -> Duration {
    Duration::from_nanos(now.as_nanos().saturating_sub(then.as_nanos()))
}
