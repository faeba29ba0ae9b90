//! The sender toward the network: the next segment, new or repeated, and the sender's timers.
//!
//! It is a machine without I/O. The caller reports the data that G has handed over
//! ([`Sender::on_offered`]), R's ACKs ([`Sender::on_ack`]) and the expiry of [`Sender::timeout`]
//! ([`Sender::on_timeout`]). Then it asks [`Sender::poll`] for segments until there is none.
//!
//! **Segments leave in this order**: one that a timer owes (the first after a timeout, a loss
//! probe, a window probe), lost bytes, new bytes. The first ignores window and pace, one segment at
//! a time; the others keep within both. New data also ends at R's edge.
//!
//! **One timer at a time** (RFC 8985 section 8): the reordering timer, else the loss probe, else
//! the retransmission timeout; or the window probe while R shows no room and nothing is under way.

mod evidence;
mod send;
mod timer;

use crate::congestion::controller::{Ack, Algorithm, AnyController, Controller};
use crate::congestion::episode::{Episode, News, Phase};
use crate::congestion::pacer::Pacer;
use crate::congestion::rack::{DUP_THRESHOLD, LossProbe, ProbeAnswer, Rack};
use crate::congestion::rtt::RttEstimator;
use crate::congestion::scoreboard::Scoreboard;
use crate::time::{Duration, Instant};
use crate::wire::saved::saved;
pub use timer::Waits;

/// The initial state of a sender.
#[derive(Clone, Copy, Debug)]
pub struct SenderConfig {
    /// Which controller.
    pub algorithm: Algorithm,
    /// Bytes of a segment.
    pub mss: u64,
    /// Bytes that may leave before anything is known ([`super::controller::initial_window`]).
    pub initial_window: u64,
    /// R sends SACK blocks.
    pub sack: bool,
    /// R understands congestion marks, and so do the segments' headers.
    pub ecn: bool,
}

/// A segment to send: bytes `[from, to)`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Segment {
    /// First byte.
    pub from: u64,
    /// End; `from` for a window probe, which is empty and begins one below `una`.
    pub to: u64,
    /// It was sent before: not ECN-capable, and its time is not the first (RFC 3168 section 6.1.5).
    pub again: bool,
    /// It carries CWR.
    pub cwr: bool,
}

/// An acknowledgement of R that can be true: `ack` is at most what was sent.
#[derive(Clone, Copy, Debug)]
pub struct NetAck<'a> {
    /// Everything below has arrived.
    pub ack: u64,
    /// SACK blocks in the order in which they came, a DSACK among them.
    pub blocks: &'a [(u64, u64)],
    /// The right edge that R shows.
    pub edge: u64,
    /// R says that something was marked.
    pub ece: bool,
    /// The timestamp of G that R echoes, if timestamps were negotiated.
    pub echo: Option<u32>,
    /// It came alone, and shows the same edge: a duplicate, if it acknowledges nothing new (RFC
    /// 5681 section 2).
    pub bare: bool,
}

/// A segment that a timer owes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Due {
    Nothing,
    /// After a timeout: the first that is lost.
    First,
    /// So many new segments, to see whether a timeout was for nothing.
    Fresh(u8),
    /// A loss probe.
    Probe,
    /// A probe of R's closed window.
    WindowProbe,
}

/// Whether a timeout was for nothing (F-RTO, RFC 5682 section 3).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Doubt {
    /// It was not, or nobody knows.
    None,
    /// The first segment was sent again, and nothing was heard since.
    Begun,
    /// More was acknowledged, new segments were sent, and copies wait for the next ACK.
    Tested,
}

/// A sender's estimates of a path: the next sender for the same flow goes on from them, after a
/// pause or when G has sent by itself meanwhile.
#[derive(Clone, Debug)]
pub struct Learned {
    controller: AnyController,
    rtt: RttEstimator,
    rack: Rack,
    probe: LossProbe,
    /// R has yet to be told that the window was reduced.
    cwr_due: bool,
}

saved!(Learned { controller, rtt, rack, probe, cwr_due });

/// See the module doc.
#[derive(Debug)]
pub struct Sender {
    board: Scoreboard,
    rack: Rack,
    probe: LossProbe,
    rtt: RttEstimator,
    episode: Episode,
    pacer: Pacer,
    due: Due,
    doubt: Doubt,
    sack: bool,
    mss: u64,
    /// End of what G has handed over.
    end: u64,
    /// R's right edge.
    net_edge: u64,
    /// Of an R without SACK: duplicate ACKs that speak of segments beyond `una`...
    duplicates: u64,
    /// ...which were sent before this: when `una` moved last, or the recovery began...
    duplicates_end: u64,
    /// ...and do not mean a loss until more than this is acknowledged (RFC 6582 section 3.2: copies
    /// of what had arrived make duplicates too).
    recover: u64,
    /// ...and a partial acknowledgement within this recovery meant none (FLOOD-45).
    misled: bool,
    /// When something last left.
    sent_at: Instant,
    /// The timeout counts from here: the last ACK that moved, the last timeout or copy of the first
    /// segment, or the first segment that left when nothing was under way (RFC 6298 section 5).
    since: Instant,
    /// At this time overtaken segments that have not arrived are lost; never, while none is
    /// overtaken.
    reordering: Instant,
    /// The first segment under way has timed out already.
    timed_out: bool,
    /// Timeouts since R showed no room, which asked it for some: each doubles the time to the next.
    probes: u8,
    /// Segments that left more than once.
    retransmissions: u64,
    /// The timestamp of what leaves now, if timestamps were negotiated.
    stamp: Option<u32>,
}

impl Sender {
    /// Nothing was sent; G's next byte is `first`, and R takes bytes below `edge`.
    #[must_use]
    pub fn new(now: Instant, first: u64, edge: u64, config: &SenderConfig) -> Self {
        let SenderConfig { mss, sack, .. } = *config;
        Self {
            board: Scoreboard::new(first, mss),
            rack: Rack::default(),
            probe: LossProbe::default(),
            rtt: RttEstimator::new(),
            episode: Episode::new(now, config),
            pacer: Pacer::new(),
            due: Due::Nothing,
            doubt: Doubt::None,
            sack,
            mss,
            end: first,
            net_edge: edge,
            duplicates: 0,
            duplicates_end: first,
            recover: 0,
            misled: false,
            sent_at: now,
            since: now,
            reordering: Instant::MAX,
            timed_out: false,
            probes: 0,
            retransmissions: 0,
            stamp: None,
        }
    }

    /// Goes on with what an earlier sender of the flow has learned. The window is the initial one,
    /// or its last one; where slow start ends stays known (RFC 5681 section 4.1). The earlier round
    /// trips: [`RttEstimator::resumed`].
    pub fn resume(&mut self, learned: Learned) {
        let Learned { controller, rtt, rack, probe, cwr_due } = learned;
        self.episode.resume(controller);
        if rtt.backoffs() == 0 {
            self.probe = probe;
        }
        (self.rtt, self.rack) = (rtt.resumed(), rack);
        if cwr_due {
            self.owe_cwr();
        }
    }

    // --- State ----------------------------------------------------------------------------------

    /// Everything below is acknowledged.
    #[must_use]
    pub const fn una(&self) -> u64 {
        self.board.una()
    }

    /// Everything below was sent.
    #[must_use]
    pub const fn next(&self) -> u64 {
        self.board.next()
    }

    /// End of what G has handed over.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.end
    }

    /// Bytes that are under way, as far as is known. Without SACK each duplicate ACK speaks of a
    /// segment that has arrived.
    #[must_use]
    pub const fn in_flight(&self) -> u64 {
        self.board.pipe().saturating_sub(self.duplicates * self.mss)
    }

    /// Where every byte is that was sent and not acknowledged.
    #[must_use]
    pub const fn board(&self) -> &Scoreboard {
        &self.board
    }

    /// The controller.
    #[must_use]
    pub const fn controller(&self) -> &AnyController {
        self.episode.controller()
    }

    /// Where the window stands.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        self.episode.phase()
    }

    /// Round trips.
    #[must_use]
    pub const fn rtt(&self) -> &RttEstimator {
        &self.rtt
    }

    /// The estimates that the next sender goes on from.
    #[must_use]
    pub fn learned(&self) -> Learned {
        let Self { episode, rtt, rack, probe, .. } = self;
        Learned {
            controller: episode.controller().clone(),
            rtt: *rtt,
            rack: *rack,
            probe: *probe,
            cwr_due: episode.owes_cwr(),
        }
    }

    /// The round trip, but not that of an earlier sender: none before R has answered this one.
    #[must_use]
    pub fn own_srtt(&self) -> Option<Duration> {
        self.rtt.srtt().filter(|_| self.pacer.has_rate())
    }

    /// Segments that left more than once.
    #[must_use]
    pub const fn retransmissions(&self) -> u64 {
        self.retransmissions
    }

    /// How often R was asked for room since it showed none, by a probe or by a copy.
    #[must_use]
    pub const fn probes(&self) -> u8 {
        self.probes
    }

    /// When [`Self::on_timeout`] has something to do.
    #[must_use]
    pub fn timeout(&self) -> Instant {
        self.deadline().1
    }

    /// The reason of that timer.
    #[must_use]
    pub fn waits(&self) -> Waits {
        self.deadline().0
    }

    /// When [`Self::poll`] has something that the pace holds back now.
    #[must_use]
    pub fn paced_until(&self) -> Instant {
        self.pacer.next()
    }

    // --- Events
    // ------------------------------------------------------------------------------------

    /// G has handed over everything below `end`.
    pub fn on_offered(&mut self, now: Instant, end: u64) {
        if self.end == self.una() {
            self.since = now; // if R shows no room it is asked after a timeout from here
        }
        self.end = self.end.max(end);
    }

    /// Segments that leave from now on carry this timestamp.
    pub const fn set_stamp(&mut self, stamp: Option<u32>) {
        self.stamp = stamp;
    }

    /// An acknowledgement of R, at least `una`.
    pub fn on_ack(&mut self, now: Instant, a: &NetAck<'_>) {
        if a.ack < self.una() || a.ack > self.next() {
            return; // the caller judges these (INV-12)
        }
        let before = self.flight_now();
        let dsack = evidence::dsack(a).filter(|_| self.sack);
        let mut arrived = self.take(now, a);
        if let Some((from, to)) = dsack {
            self.rack.on_dsack(a.ack, self.next());
            arrived.late |= self.episode.copies().on_dsack(from, to);
        }
        self.net_edge = a.edge;
        if let Some(sample) = arrived.sample {
            self.rtt.on_sample(now, sample);
            self.probe.on_sample();
        }
        let moved = arrived.acked > 0;
        if moved {
            self.on_moved(now);
        }
        let duplicate = a.bare && !moved && a.blocks.is_empty() && before.flight > 0;
        let twice = dsack.map(|(_, to)| to);
        if self.probe.on_ack(a.ack, twice, duplicate) == ProbeAnswer::Repaired {
            self.episode.on_repaired_by_probe(now, before.flight, self.next());
        }
        self.judge_copies(dsack.is_some(), &arrived);
        if self.doubt != Doubt::None {
            // Data of R, or a window, that repeats an acknowledgement does not answer the copy: in
            // RFC 5682 section 3.1 only duplicates and ACKs of more do.
            let answers = moved || arrived.delivered > 0 || a.bare;
            if answers && self.is_timeout_spurious(now, arrived.originals, moved) {
                self.episode.on_spurious();
            }
        }
        if !self.sack {
            arrived.delivered = self.count_duplicates(now, duplicate, arrived.acked);
        }
        let others_are_out = self.episode.phase() == Phase::Recovery;
        let lost = if arrived.late && moved && others_are_out && self.episode.copies().may_undo() {
            self.board.unmark_lost();
            Lost::default() // more may only be late (Linux: `tcp_try_undo_partial()`)
        } else {
            self.find_losses(now, duplicate, moved, before.una)
        };
        self.tell(now, before, &arrived, lost);
        if self.probes > 0 && self.net_edge > self.una() {
            self.probes = 0;
            self.on_room(moved);
        }
    }

    /// R makes room, of which it had none when it was asked: it has thrown away what asked it, and
    /// is asked no more.
    fn on_room(&mut self, moved: bool) {
        if !moved && self.board.flight() > 0 {
            self.board.mark_lost(|_| true);
            self.due = Due::First;
        }
    }

    /// More is acknowledged.
    fn on_moved(&mut self, now: Instant) {
        self.since = now; // RFC 6298 section 5.3
        self.timed_out = false;
        self.duplicates_end = self.next();
    }

    /// [`Self::timeout`] has come.
    pub fn on_timeout(&mut self, now: Instant) {
        let (waits, at) = self.deadline();
        if at > now {
            return;
        }
        if waits == Waits::Reordering {
            let before = self.flight_now();
            let lost = self.detect(now);
            return self.tell(now, before, &Arrived::default(), lost);
        }
        self.since = now;
        match waits {
            Waits::Nothing | Waits::Reordering => {}
            Waits::Probe => self.due = Due::Probe,
            Waits::Retransmission => self.on_retransmission_timeout(now),
            Waits::Window => {
                self.probes = self.probes.saturating_add(1);
                self.due = Due::WindowProbe;
            }
        }
    }

    fn on_retransmission_timeout(&mut self, now: Instant) {
        let first = !core::mem::replace(&mut self.timed_out, true);
        let flight = self.board.flight();
        // Also if nothing was heard since the last one (Linux: `tcp_enter_loss()`).
        let doubtful = !self.episode.is_repairing() || (!first && self.doubt == Doubt::Begun);
        if self.episode.phase() == Phase::Open && self.duplicates >= DUP_THRESHOLD {
            self.rack.forget_overtaking();
        }
        self.doubt = if doubtful { Doubt::Begun } else { Doubt::None };
        self.give_up_what_is_late(now, self.next(), Instant::MAX);
        self.duplicates = 0;
        if self.net_edge > self.una() {
            self.rtt.on_timeout();
        } else {
            self.probes = self.probes.saturating_add(1); // R throws away what is under way
        }
        self.episode.on_timeout(now, flight, self.next(), first);
        self.probe.forget();
        self.due = Due::First;
        self.set_pace(now);
        self.reordering = Instant::MAX;
    }

    /// Segments longer than the newest size did not get through, which says nothing of congestion
    /// (RFC 1191 section 6.5): they are sent again.
    pub fn on_too_long(&mut self) {
        self.board.mark_longer_lost(self.mss);
    }

    /// The SYN or SYN-ACK was sent again: until a round trip is known the timeout is longer (RFC
    /// 6298 section 5.7).
    pub const fn on_syn_timeout(&mut self) {
        self.rtt.on_syn_timeout();
    }

    /// Somebody else has sent until now: duplicate ACKs may be about copies of that, and mean no
    /// loss before more is acknowledged (RFC 6582 section 3.2).
    pub const fn on_earlier_sender(&mut self) {
        self.recover = self.una();
    }

    /// Somebody else has reduced the window, and R has yet to be told.
    pub fn owe_cwr(&mut self) {
        self.episode.owe_cwr(self.board.next());
    }

    /// Segments are of `mss` bytes from now on (FLOOD-39, FLOOD-40). Pieces under way that are too
    /// long are cut when they are sent again.
    pub fn set_mss(&mut self, mss: u64) {
        self.mss = mss;
        self.board.set_mss(mss);
        self.episode.on_mss(mss);
    }

    // --- Inside --------------------------------------------------------------------------------

    fn flight_now(&self) -> Before {
        Before { una: self.una(), flight: self.board.flight(), sacked: self.board.sacked() }
    }

    /// Tells the congestion state the arrived bytes and those found lost.
    fn tell(&mut self, now: Instant, before: Before, arrived: &Arrived, lost: Lost) {
        let repaired_below = self.episode.repairs_below();
        let news = News {
            ack: Ack {
                now,
                delivered: arrived.acked,
                una: self.una(),
                next: self.next(),
                rtt: arrived.sample,
                srtt: self.rtt.srtt().unwrap_or_default(),
            },
            delivered: arrived.delivered,
            copies: arrived.copies,
            flight_before: before.flight,
            sacked_before: before.sacked,
            in_flight: self.in_flight(),
            lost: lost.some,
            lost_again: lost.again,
            lost_beyond: lost.beyond,
            marked: arrived.marked,
        };
        if self.episode.on_news(&news) {
            self.rack.on_recovered();
            self.duplicates = 0;
            self.recover = repaired_below;
        }
        self.set_pace(now);
    }

    fn set_pace(&mut self, now: Instant) {
        if let Some(srtt) = self.rtt.srtt() {
            let controller = self.episode.controller();
            let window = match self.episode.phase() {
                Phase::Recovery | Phase::Reduction => controller.ssthresh(),
                Phase::Open | Phase::Timeout => controller.cwnd(),
            };
            self.pacer.set_rate(now, window, srtt, controller.pacing_gain(), self.mss);
        }
    }
}

/// The state before an event.
#[derive(Clone, Copy, Debug)]
struct Before {
    una: u64,
    flight: u64,
    sacked: u64,
}

/// The effects of an ACK.
#[derive(Clone, Copy, Debug, Default)]
struct Arrived {
    /// Bytes that R has for the first time.
    delivered: u64,
    /// Of them those that were sent again.
    copies: u64,
    /// Something that a timeout thought lost, and that left once.
    originals: bool,
    /// Something for which what had arrived has called, or would have: it was only late.
    late: bool,
    /// By how many bytes the acknowledgement moved.
    acked: u64,
    /// A round trip.
    sample: Option<Duration>,
    /// R says that something was marked.
    marked: bool,
}

/// Bytes that were found lost just now.
#[derive(Clone, Copy, Debug, Default)]
struct Lost {
    /// Something.
    some: bool,
    /// And some of it had been sent again since the window was reduced.
    again: bool,
    /// And some of it lies beyond what is being repaired.
    beyond: bool,
}

#[cfg(test)]
mod tests;
