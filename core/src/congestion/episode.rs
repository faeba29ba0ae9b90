//! When a window is reduced, and when that is over: once for all losses and marks of a round trip
//! (RFC 5681 section 3.2, RFC 6582, RFC 3168 section 6.1.2).
//!
//! ```text
//!            lost                    all sent before it is acknowledged
//!   Open ----------> Recovery -----------------------------------------> Open
//!     |  marked                        the same
//!     +------------> Reduction ----------------------------------------> Open
//!     |                  | lost: Recovery, not reduced again
//!     |  timeout (from any)            the same
//!     +------------> Timeout ------------------------------------------> Open
//! ```
//!
//! Segments that were thought lost may only have been late ([`copies`](super::copies)): then the
//! phase is `Open` at once, and the window is as before (FLOOD-44).
//!
//! In `Recovery` and `Reduction` [`Prr`] bounds sending, otherwise the controller's window does. If
//! a retransmission is lost, a new recovery begins (RFC 5681 section 4.3).

use crate::congestion::controller::{Ack, AnyController, Controller, initial_window};
use crate::congestion::copies::Copies;
use crate::congestion::prr::{Progress, Prr};
use crate::congestion::sender::SenderConfig;
use crate::congestion::validation::Validation;
use crate::time::{Duration, Instant};

/// Where the window stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Phase {
    /// It grows with what is acknowledged.
    Open,
    /// Something was marked; the window arrives at `ssthresh` within a round trip.
    Reduction,
    /// Something was lost, and is sent again.
    Recovery,
    /// The retransmission timeout has passed: slow start from one segment.
    Timeout,
}

/// The effects of an ACK or of the reordering timer.
#[derive(Clone, Copy, Debug)]
pub struct News {
    /// For the controller; `delivered` is by how many bytes the acknowledgement moved.
    pub ack: Ack,
    /// Bytes that R has for the first time, acknowledged or SACKed.
    pub delivered: u64,
    /// Of them those that were sent more than once.
    pub copies: u64,
    /// Bytes from the oldest unacknowledged to the newest sent, before this.
    pub flight_before: u64,
    /// Bytes SACKed before this.
    pub sacked_before: u64,
    /// Bytes under way, after this.
    pub in_flight: u64,
    /// Something was found lost just now.
    pub lost: bool,
    /// Some lost bytes had been sent again since the last reduction.
    pub lost_again: bool,
    /// Some lost bytes lie beyond those that are being repaired.
    pub lost_beyond: bool,
    /// R says that something was marked (ECE).
    pub marked: bool,
}

/// The congestion state of one sender.
#[derive(Debug)]
pub struct Episode {
    controller: AnyController,
    validation: Validation,
    phase: Phase,
    /// End of the bytes sent when the phase began: their acknowledgement ends it.
    until: u64,
    /// Bytes beyond `until` were lost: they were sent after the reduction and are a congestion of
    /// their own.
    lost_beyond: bool,
    prr: Prr,
    /// Copies of this repair or the last one: whether they were needed.
    copies: Copies,
    mss: u64,
    initial_window: u64,
    /// The last ACK: time since then in which the window was not used does not count.
    judged_at: Instant,
    /// The last reduction.
    reduced_at: Instant,
    /// R and H understand congestion marks.
    ecn: bool,
    /// R is to be told that the window was reduced, for whatever reason (CWR, RFC 3168 section
    /// 6.1.2).
    cwr_due: bool,
    /// The value of `cwr_due` before the repair began.
    cwr_was_due: bool,
    /// Marks count again once more than this is acknowledged: R has got CWR then.
    marks_count_from: u64,
}

impl Episode {
    /// The initial window.
    #[must_use]
    pub fn new(now: Instant, config: &SenderConfig) -> Self {
        let SenderConfig { algorithm, mss, initial_window, ecn, .. } = *config;
        Self {
            controller: algorithm.controller(mss, initial_window),
            validation: Validation::new(now),
            phase: Phase::Open,
            until: 0,
            lost_beyond: false,
            prr: Prr::default(),
            copies: Copies::default(),
            mss,
            initial_window,
            judged_at: now,
            reduced_at: Instant::ZERO,
            ecn,
            cwr_due: false,
            cwr_was_due: false,
            marks_count_from: 0,
        }
    }

    /// The controller: its window, and how fast it may leave.
    #[must_use]
    pub const fn controller(&self) -> &AnyController {
        &self.controller
    }

    /// Where the window stands.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// Something lost is being repaired.
    #[must_use]
    pub const fn is_repairing(&self) -> bool {
        matches!(self.phase, Phase::Recovery | Phase::Timeout)
    }

    /// Losses below this belong to the repair that is under way.
    #[must_use]
    pub fn repairs_below(&self) -> u64 {
        if self.is_repairing() { self.until } else { 0 }
    }

    /// End of what was sent when the phase began.
    #[must_use]
    pub const fn until(&self) -> u64 {
        self.until
    }

    /// When the window was last reduced.
    #[must_use]
    pub const fn reduced_at(&self) -> Instant {
        self.reduced_at
    }

    /// The copies of the repair.
    #[must_use]
    pub const fn copies(&mut self) -> &mut Copies {
        &mut self.copies
    }

    /// Bytes that may be sent while `in_flight` are under way.
    #[must_use]
    pub fn allowance(&self, in_flight: u64) -> u64 {
        match self.phase {
            Phase::Recovery | Phase::Reduction => self.prr.budget(),
            Phase::Open | Phase::Timeout => self.controller.cwnd().saturating_sub(in_flight),
        }
    }

    /// Goes on with an earlier controller of the flow: from the initial window, or from that one's
    /// if it was less. If the operator has chosen another algorithm since, it goes on from there.
    pub fn resume(&mut self, before: AnyController) {
        let algorithm = self.controller.algorithm();
        self.controller = if before.algorithm() == algorithm {
            before
        } else {
            algorithm.resumed(self.mss, before.cwnd(), before.ssthresh())
        };
        self.controller.on_mss(self.mss);
        self.controller.on_idle(self.initial_window);
    }

    /// The next new data will carry CWR.
    #[must_use]
    pub const fn owes_cwr(&self) -> bool {
        self.cwr_due
    }

    /// The next new data, from `next` on, carries CWR, if marks were negotiated. Until R has that
    /// it repeats a mark for which the window was reduced (RFC 3168 section 6.1.3).
    pub fn owe_cwr(&mut self, next: u64) {
        self.cwr_due = self.ecn;
        self.marks_count_from = next;
    }

    /// The next new data carries CWR; asking for it answers it.
    #[must_use]
    pub const fn take_cwr(&mut self) -> bool {
        core::mem::replace(&mut self.cwr_due, false)
    }

    /// An ACK, or the reordering timer. `true`: a repair is complete.
    pub fn on_news(&mut self, n: &News) -> bool {
        let Ack { now, una, next, delivered: acked, srtt, .. } = n.ack;
        let over = self.phase != Phase::Open && una >= self.until;
        let repaired = over && self.is_repairing();
        if over {
            self.phase = Phase::Open;
        }
        self.validation.on_ack(now, n.delivered, una, next, srtt);
        if n.marked && self.ecn {
            self.copies.forbid(); // Linux: `tcp_fastretrans_alert()`, step A
        }
        if n.lost || (over && self.lost_beyond) {
            self.on_loss(n);
        } else if n.marked && self.ecn && una > self.marks_count_from && self.phase == Phase::Open {
            self.begin(Phase::Reduction, n);
        }
        match self.phase {
            // An ACK that moves nothing, SACK or not, widens no window (RFC 5681 section 3.2).
            // Nor does one that completes a repair (RFC 6582 section 3.2), or reduces the window.
            Phase::Open if !repaired && self.reduced_at < now => self.grow(n),
            // Bytes that had arrived before the timeout are not counted (RFC 3465 section 2.3).
            Phase::Timeout if acked > 0 => {
                self.controller.on_ack(&Ack { delivered: n.copies, ..n.ack });
            }
            Phase::Open | Phase::Timeout => {}
            Phase::Recovery | Phase::Reduction => self.prr.on_ack(&Progress {
                delivered: n.delivered,
                in_flight: n.in_flight,
                ssthresh: self.controller.ssthresh(),
                safe: acked > 0 && !n.lost,
                mss: self.mss,
            }),
        }
        self.judged_at = now;
        repaired
    }

    fn on_loss(&mut self, n: &News) {
        match self.phase {
            Phase::Open => self.begin(Phase::Recovery, n),
            Phase::Recovery | Phase::Timeout if n.lost_again => self.begin(Phase::Recovery, n),
            Phase::Recovery | Phase::Timeout => self.lost_beyond |= n.lost_beyond,
            Phase::Reduction => {
                self.phase = Phase::Recovery; // reduced already for this round trip
                self.lost_beyond |= n.lost_beyond;
            }
        }
    }

    fn begin(&mut self, phase: Phase, n: &News) {
        let Ack { now, una, next, .. } = n.ack;
        if self.phase != Phase::Open {
            // A reduction within one: the kept window stays, if the reduction can be undone at all.
        } else if phase == Phase::Recovery {
            self.keep(una, !n.marked);
        } else {
            self.copies.forbid();
        }
        self.reduce(now, n.flight_before, next);
        self.phase = if una < next { phase } else { Phase::Open }; // over already
        self.until = next;
        self.prr = Prr::new(n.flight_before - n.sacked_before);
    }

    /// A repair begins of which it is not known whether it is needed.
    fn keep(&mut self, una: u64, may_undo: bool) {
        self.controller.keep();
        self.copies.begin(una, may_undo);
        self.cwr_was_due = self.cwr_due;
    }

    fn reduce(&mut self, now: Instant, flight: u64, next: u64) {
        let in_use = self.validation.in_use(flight, self.controller.cwnd());
        self.controller.on_congestion(now, in_use);
        self.note_reduction(now, next);
    }

    fn note_reduction(&mut self, now: Instant, next: u64) {
        self.reduced_at = now;
        self.lost_beyond = false;
        self.validation.on_reduction(next);
        self.owe_cwr(next);
    }

    fn grow(&mut self, n: &News) {
        let ack = &n.ack;
        let used = self.validation.is_used(n.flight_before, self.controller.cwnd());
        if self.validation.on_judged(ack.now, used) {
            let half = self.controller.cwnd() / 2;
            self.controller.on_idle(half.max(self.initial_window));
        }
        if used {
            self.controller.on_ack(ack);
        } else {
            self.controller.on_unused(ack.now.since(self.judged_at));
        }
    }

    /// A probe has repaired a loss that nothing else showed (RFC 8985 section 7.4.2).
    pub fn on_repaired_by_probe(&mut self, now: Instant, flight: u64, next: u64) {
        if self.phase == Phase::Open {
            self.copies.forbid();
            self.reduce(now, flight, next);
        }
    }

    /// The retransmission timeout. `flight`: bytes sent and not acknowledged; `next`: end of what
    /// was sent; `first`: these bytes have not timed out before.
    pub fn on_timeout(&mut self, now: Instant, flight: u64, next: u64, first: bool) {
        match self.phase {
            Phase::Open | Phase::Reduction => self.keep(next - flight, true),
            Phase::Timeout if first => self.keep(next - flight, true),
            Phase::Timeout | Phase::Recovery => {} // the window was kept already
        }
        let in_use = self.validation.in_use(flight, self.controller.cwnd());
        self.controller.on_timeout(now, in_use, first);
        self.note_reduction(now, next);
        self.phase = Phase::Timeout;
        self.until = next;
    }

    /// The repair was for nothing.
    pub fn on_spurious(&mut self) {
        self.controller.on_spurious();
        self.copies.clear();
        self.phase = Phase::Open;
        self.cwr_due &= self.cwr_was_due; // Linux: `tcp_ecn_withdraw_cwr()`
    }

    /// So much was sent, new or again.
    pub fn on_sent(&mut self, bytes: u64) {
        if matches!(self.phase, Phase::Recovery | Phase::Reduction) {
            self.prr.on_sent(bytes);
        }
    }

    /// Data waits for the window, or for its pace.
    pub const fn on_pressed(&mut self) {
        self.validation.on_pressed();
    }

    /// Nothing is under way, and the last segment left at `sent_at`: the window halves with each
    /// timeout since, down to the initial one (RFC 5681 section 4.1; halving is RFC 2861's, and
    /// Linux's).
    pub fn on_idle(&mut self, now: Instant, sent_at: Instant, rto: Duration) {
        self.controller.on_unused(now.since(self.judged_at));
        self.judged_at = now;
        let idle = now.since(sent_at);
        let timeouts = (idle.as_nanos() / rto.as_nanos().max(1)).min(63);
        if timeouts > 0 {
            let cwnd = self.controller.cwnd();
            let restart = self.initial_window.min(cwnd);
            self.controller.on_idle((cwnd >> timeouts).max(restart));
        }
    }

    /// Segments are of this size from now on. A window that is no wider than the initial one is
    /// what that would have been for them: bytes of longer ones would be a burst of more segments
    /// than it has (RFC 5681 section 3.1, RFC 6928 section 2). Behind a timeout the window is one
    /// segment, of whatever size (RFC 5681 section 3.1).
    pub fn on_mss(&mut self, mss: u64) {
        let is_one = self.phase == Phase::Timeout && self.controller.cwnd() <= self.mss;
        let is_initial = self.controller.cwnd() <= self.initial_window;
        let one = self.initial_window <= self.mss;
        self.initial_window = initial_window(mss, one);
        self.copies.forbid(); // a window of longer segments would come back
        self.mss = mss;
        self.controller.on_mss(mss);
        if is_one {
            self.controller.on_idle(mss);
        } else if is_initial {
            self.controller.on_idle(self.initial_window);
        }
    }
}
