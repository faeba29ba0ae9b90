//! Which segments are processed, in the order of Linux 6.18 (`tcp_validate_incoming`, `tcp_ack`,
//! `tcp_data_queue`), and the faults of those that no conforming peer would have sent.

use nightporter_core::time::{Duration, Instant};

use super::super::app::Phase;
use super::Shared;
use super::complaints::maybe_network;
use super::conn::{Conn, Stage};
use super::incoming::Incoming;
use super::send::Ack;
use nightporter_check::wire::{Seq, TcpFlags};

/// Answers to what is not acceptable and carries no data: one in this time
/// (`tcp_invalid_ratelimit`).
const CHALLENGE_INTERVAL: Duration = Duration::from_millis(500);
/// Timestamps may be one tick older than the newest (`TCP_PAWS_WINDOW`).
const PAWS_WINDOW: i32 = 1;
/// `TCP_PAWS_WRAP`.
const PAWS_AGE: Duration = Duration::from_secs(2_147);

impl Conn {
    /// A segment of a connection whose SYNs are through.
    pub(super) fn on_synchronized(
        &mut self,
        now: Instant,
        shared: &mut Shared,
        segment: &Incoming<'_>,
    ) {
        self.check_manners(now, shared, segment);
        if !self.is_acceptable(now, shared, segment) {
            return;
        }
        self.heard_at = now;
        if segment.flags.rst() {
            if self.is_exact_reset(segment) {
                self.finish(Phase::Reset, Stage::Over);
            } else {
                self.challenge(now, segment);
            }
            return;
        }
        if segment.flags.syn() {
            return self.challenge(now, segment); // RFC 5961 section 4
        }
        if !segment.flags.ack() || !self.is_ack_acceptable(now, shared, segment) {
            return;
        }
        // K-03, `tcp_replace_ts_recent`.
        if let Some(ts) = segment.timestamps.filter(|_| segment.seq <= self.recv.acked)
            && (Seq(ts.tsval).ge(Seq(self.ts_recent))
                || self.ts_recent == 0
                || self.ts_recent_is_old(now))
        {
            (self.ts_recent, self.ts_recent_at) = (ts.tsval, now);
        }
        self.take_ack(now, segment);
        self.take_data(now, shared, segment);
        self.note_end(now);
    }

    /// PAWS, then the sequence number (K-01, K-02); a refused segment is answered.
    fn is_acceptable(&mut self, now: Instant, shared: &mut Shared, s: &Incoming<'_>) -> bool {
        if !s.flags.rst() && self.is_paws_reject(now, s) {
            let news = s.end > self.recv.nxt || s.ack > self.send.una;
            if news && !s.flags.syn() {
                self.complain(shared, maybe_network!("PAWS on something new"));
            }
            let old_ack = !s.has_content() && s.seq < self.recv.nxt;
            if !old_ack || s.flags.syn() {
                self.challenge(now, s);
            }
            return false;
        }
        // `tcp_sequence`.
        let edge = self.recv.edge();
        let end = s.end + i64::from(s.flags.fin());
        let old = end < self.recv.acked;
        let beyond = s.seq > edge || s.end > edge && self.recv.has_unread();
        if (old || beyond) && s.flags.rst() {
            return self.is_exact_reset(s);
        }
        if old || beyond {
            if old && s.has_content() {
                self.recv.on_data(now, s.seq, s.end);
            }
            self.challenge(now, s);
        }
        !(old || beyond)
    }

    /// `tcp_disordered_ack_check`: the timestamp is older than it may be.
    pub(super) fn is_paws_reject(&self, now: Instant, s: &Incoming<'_>) -> bool {
        let Some(ts) = s.timestamps.filter(|_| self.agreed.timestamps) else { return false };
        let age = Seq(self.ts_recent).after(Seq(ts.tsval));
        // `tcp_paws_check`: 0 was never a clock, and what is older than that says nothing.
        if age <= PAWS_WINDOW || self.ts_recent == 0 || self.ts_recent_is_old(now) {
            return false;
        }
        // An ACK that brings nothing may be late: it does no harm.
        let window = i64::from(s.window) << self.agreed.shift;
        let harmless = s.flags.ack()
            && !s.has_content()
            && s.seq == self.recv.nxt
            && s.ack == self.send.una
            && !self.send.may_update_window(s.ack, s.seq, window)
            && age <= 1000;
        !harmless
    }

    /// The clock it is compared with may have gone half way round (RFC 7323 section 5.5).
    fn ts_recent_is_old(&self, now: Instant) -> bool {
        now.since(self.ts_recent_at) > PAWS_AGE
    }

    /// It is where it has to be to count (RFC 5961 section 3.2; Linux also takes one at the end of
    /// the newest early data, and one before the FIN).
    fn is_exact_reset(&self, s: &Incoming<'_>) -> bool {
        let early_end = self.recv.early_end().filter(|_| self.agreed.sack);
        s.seq == self.recv.nxt
            || early_end == Some(s.seq)
            || self.recv.is_finished() && s.seq == self.recv.nxt - 1
    }

    /// K-04: an ACK of something not sent, or older than any that can be on its way.
    fn is_ack_acceptable(&mut self, now: Instant, shared: &mut Shared, s: &Incoming<'_>) -> bool {
        let future = s.ack > self.send.nxt;
        let old = self.send.is_too_old(s.ack);
        if future {
            self.complain(shared, "ACK of something not sent");
        } else if old {
            self.complain(shared, maybe_network!("ACK older than a window"));
        }
        if future || old {
            self.challenge(now, s);
        }
        !(future || old)
    }

    /// Says where it is, but not too often (RFC 5961 section 7; `tcp_oow_rate_limited`).
    fn challenge(&mut self, now: Instant, s: &Incoming<'_>) {
        let limited = !s.has_content() || s.flags.syn();
        if limited && self.challenged_at.is_some_and(|at| now < at + CHALLENGE_INTERVAL) {
            return;
        }
        if limited {
            self.challenged_at = Some(now);
        }
        self.recv.ack_now();
    }

    fn take_ack(&mut self, now: Instant, s: &Incoming<'_>) {
        let sack: &[_] = if self.agreed.sack { &s.sack } else { &[] };
        let sent_ms =
            s.timestamps.filter(|_| self.agreed.timestamps).map(|ts| self.sent_ms(now, ts.tsecr));
        let ack = Ack {
            ack: s.ack,
            seq: s.seq,
            window: i64::from(s.window) << self.agreed.shift,
            with_data: s.has_content(),
            sack,
            echo: s.flags.ece() && self.agreed.ecn,
            sent_ms,
        };
        self.send.on_ack(now, &ack);
    }

    fn take_data(&mut self, now: Instant, shared: &mut Shared, s: &Incoming<'_>) {
        if self.agreed.ecn && s.has_content() {
            if s.flags.cwr() {
                self.recv.echo = false;
            }
            if s.is_marked() {
                self.recv.echo = true;
                self.recv.ack_now();
            }
        }
        if s.end > s.seq {
            self.compare(shared, s);
            let sent = s.timestamps.filter(|_| self.agreed.timestamps).map(|ts| ts.tsecr);
            let sent_ms = sent.map(|tsecr| self.sent_ms(now, tsecr));
            self.recv.tune(now, sent_ms);
            self.recv.measure(s.segment.try_into().unwrap_or(0), s.flags.psh() || s.flags.fin());
            self.recv.on_data(now, s.seq, s.end);
        }
        if s.flags.fin() {
            if self.recv.fin.is_some_and(|fin| fin != s.end) {
                self.complain(shared, "FIN in another place");
            }
            self.recv.fin.get_or_insert(s.end);
        }
        if s.flags.fin() && self.recv.nxt > s.end {
            self.recv.ack_now(); // again
        }
        if self.recv.take_fin(now) {
            self.closed_first = self.send.has_sent_fin();
        }
    }

    /// New bytes are what they should be.
    fn compare(&mut self, shared: &mut Shared, s: &Incoming<'_>) {
        let from = s.seq.max(self.recv.nxt).max(1);
        let Some(new) = usize::try_from(from - s.seq).ok().and_then(|n| s.payload.get(n..)) else {
            return;
        };
        let at = (from - 1).unsigned_abs();
        if let Some(wrong) = self.habits.expected.first_difference(at, new) {
            self.recv.wrong_at.get_or_insert(wrong);
            self.complain(shared, "wrong bytes");
        }
    }

    /// Complains about segments that no conforming peer sends, whatever the network does.
    fn check_manners(&self, now: Instant, shared: &mut Shared, s: &Incoming<'_>) {
        if s.flags.syn() {
            return; // its options are those of an offer
        }
        let mut complain = |is_so: bool, cause| {
            if is_so {
                self.complain(shared, cause);
            }
        };
        let rst = s.flags.rst();
        let bears = rst || self.plan.quirks.omits_clock;
        complain(s.timestamps.is_none() && self.agreed.timestamps && !bears, "no timestamp");
        complain(s.timestamps.is_some() && !self.agreed.timestamps, "timestamp not agreed on");
        // 0 means that nothing was heard yet.
        if let Some(ts) = s.timestamps.filter(|ts| s.flags.ack() && ts.tsecr != 0) {
            // One of before a long sleep may look newer; keepalives do not change what is echoed.
            let newest = Seq(self.clock(now));
            complain(
                !self.habits.patient && Seq(ts.tsecr).gt(newest),
                "echo of a timestamp not sent",
            );
        }
        complain(!s.sack.is_empty() && !self.agreed.sack, "SACK not agreed on");
        complain(s.sack.iter().skip(1).any(|b| b.0 < s.ack), "SACK below the ACK");
        complain(s.sack.iter().any(|b| b.0 >= b.1 || b.1 > self.send.nxt), "SACK of nonsense");
        complain(s.flags.ece() && !self.agreed.ecn, "ECE not agreed on");
        complain(s.flags.cwr() && !self.agreed.ecn, "CWR not agreed on");
        let ect = s.ecn != 0 && !self.agreed.ecn; // IPv6 has no checksum over it
        complain(ect, maybe_network!("ECT not agreed on"));
        complain(!s.flags.ack() && !rst, "neither ACK nor RST");
        complain(s.flags.urg(), "URG");
        complain(s.segment + s.options_len > usize::from(self.own_mss), "more than the MSS");
        // A keepalive with a byte has it in the place of the FIN.
        let data_after_fin = self.recv.fin.is_some_and(|fin| s.end > fin + 1);
        let data_after_fin = data_after_fin && !s.payload.is_empty();
        complain(data_after_fin && !rst, "data after FIN");
        // A closed window is probed with one byte.
        let beyond = s.end > self.recv.edge_max + 1;
        complain(beyond && !s.payload.is_empty(), "data beyond the window");
        // A peer that has dropped the connection answers a stranger's ACK with an RST at its
        // number.
        let stray = beyond && rst;
        complain(stray, maybe_network!("RST beyond the window"));
        complain(beyond && s.payload.is_empty() && !rst, "segment beyond the window");
    }

    pub(super) fn complain(&self, shared: &mut Shared, cause: &'static str) {
        if !self.habits.forgives {
            shared.complaints.note(self.habits.conn, cause);
        }
    }

    /// An old connection answers for itself until nobody asks any more (RFC 9293 section 3.6.1).
    pub(super) fn on_time_wait(&mut self, now: Instant, s: &Incoming<'_>) {
        if s.flags.rst() {
            if self.is_exact_reset(s) {
                self.stage = Stage::Over;
            }
        } else if s.has_content() || s.flags.intersects(TcpFlags::SYN) {
            self.restart_time_wait(now);
            self.challenge(now, s);
        }
    }
}
