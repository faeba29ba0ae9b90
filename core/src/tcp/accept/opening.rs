//! H's handshake with G, in R's place, once R believes the connection open (ACC-09, ACC-11,
//! ACC-14): the client's half of RFC 9293's SYN-SENT.
//!
//! G may be off its core for long, and gains nothing by copies of a SYN that it has not seen. So
//! the first repetitions follow G's runs: after one that has seen the SYN and brought no answer
//! there is another in its ring. Then the wall clock counts, as for any client. Linux drops SYNs in
//! silence while its accept queue is full, so silence is no refusal; giving up is.

use crate::limits::{OPENING_INTERVAL, OPENING_RUNS_MIN, OPENING_WALL_REPEATS, T_OPENING};
use crate::tcp::accept::grant::{Grant, Settled, Unfit};
use crate::tcp::options::SynInfo;
use crate::time::Instant;
use crate::wire::packet::{IpVersion, Seq, Tcp, TcpFlags};
use crate::wire::saved::saved;

/// A connection that R believes open, and of which G does not know yet.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    grant: Grant,
    /// G was first given the SYN; `None`: it is still in H.
    began: Option<Instant>,
    /// Runs of G that have seen a SYN and brought no answer.
    runs: u32,
    /// SYNs that were repeated by the wall clock.
    repeats: u32,
    /// When the next of these is due.
    repeat_at: Instant,
    /// R has reset the connection meanwhile.
    is_abandoned: bool,
    /// G is first sent an RST with this number ([`Word::Another`]).
    reset: Option<Seq>,
}

saved!(Opening { grant, began as Wall, runs, repeats, repeat_at as Wall, is_abandoned, reset });

/// A step that H has to take.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Step {
    /// None.
    Wait,
    /// G is given the SYN once more.
    Repeat,
    /// The same; and the port is silent, for the first time.
    RepeatFirst,
    /// G will not answer. Unless R has reset the connection, it is reset, and its network
    /// condemned.
    GiveUp,
}

/// The meaning of a segment of G for the connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Word {
    /// Nothing.
    Nothing,
    /// G has accepted it. Its SYN-ACK is acknowledged, with R's bytes behind.
    Accepted(Settled),
    /// It refuses. Unless R has reset the connection, it is reset.
    Refused,
    /// It has accepted what R was not granted: both are reset, G from this number.
    Unfit(Unfit, Seq),
    /// It remembers another connection of that name (TIME_WAIT, or one that R has forgotten): it is
    /// sent an RST with this number, then the SYN at once.
    Another(Seq),
    /// It opens a connection of that name itself: R is reset, and G's SYN passes.
    Opens,
    /// It has accepted what R has reset: it is sent an RST with this number, and all is over.
    TooLate(Seq),
}

impl Opening {
    /// R has completed the handshake of this grant.
    #[must_use]
    pub const fn new(grant: Grant) -> Self {
        let (began, runs, repeats, repeat_at) = (None, 0, 0, Instant::MAX);
        Self { grant, began, runs, repeats, repeat_at, is_abandoned: false, reset: None }
    }

    /// The grant, of which the SYN is made.
    #[must_use]
    pub const fn grant(&self) -> &Grant {
        &self.grant
    }

    /// R has reset the connection, and G may yet accept it.
    #[must_use]
    pub const fn is_abandoned(&self) -> bool {
        self.is_abandoned
    }

    /// G remembers another connection, and is sent an RST with this number first.
    pub const fn reset_first(&mut self, seq: Seq) {
        self.reset = Some(seq);
    }

    /// The number of that RST, which is sent now.
    pub const fn take_reset(&mut self) -> Option<Seq> {
        self.reset.take()
    }

    /// When [`Self::on_time`] has something to do next.
    #[must_use]
    pub const fn wakes_at(&self) -> Instant {
        self.repeat_at
    }

    /// The SYN is in G's ring.
    pub fn on_given(&mut self, now: Instant) {
        self.began.get_or_insert(now);
        self.repeat_at = self.next_repeat(now);
    }

    /// A run of G that has seen the SYN is over, or goes on without an answer.
    pub fn on_unanswered_run(&mut self, now: Instant) -> Step {
        if self.began.is_none() || self.is_abandoned {
            return Step::Wait;
        }
        self.runs = self.runs.saturating_add(1);
        match self.runs {
            1 => Step::RepeatFirst,
            2 => Step::Repeat,
            _ if self.is_over(now) => Step::GiveUp,
            _ => Step::Wait,
        }
    }

    /// Time has passed.
    pub fn on_time(&mut self, now: Instant) -> Step {
        if now < self.repeat_at {
            return Step::Wait;
        }
        if self.is_over(now) {
            return Step::GiveUp;
        }
        if self.is_abandoned || self.repeats == OPENING_WALL_REPEATS {
            // Only its end is waited for, or a run of G.
            let end = self.end();
            self.repeat_at = if now < end { end } else { Instant::MAX };
            return Step::Wait;
        }
        self.repeats += 1;
        self.repeat_at = self.next_repeat(now);
        Step::Repeat
    }

    /// R has reset the connection. `true`: G never gets to know of it, and all is over.
    pub fn on_reset_from_net(&mut self) -> bool {
        self.is_abandoned = true;
        self.began.is_none()
    }

    /// A segment of G under the connection's key (RFC 9293 section 3.10.7.3).
    #[must_use]
    pub fn on_segment_from_guest(&self, now: Instant, tcp: &Tcp, version: IpVersion) -> Word {
        let flags = tcp.flags;
        let first = self.grant.of_net().isn + 1; // R's first byte: all that the SYN acknowledges
        if self.began.is_none() && (!flags.syn() || flags.ack()) {
            return Word::Nothing; // it cannot be about a SYN that G has not got
        }
        if flags.ack() && tcp.ack != first {
            let is_reset = flags.contains(TcpFlags::RST);
            return if is_reset { Word::Nothing } else { Word::Another(tcp.ack) };
        }
        match (flags.rst(), flags.syn(), flags.ack()) {
            (true, _, true) => Word::Refused,
            (false, true, true) if self.is_abandoned => Word::TooLate(first),
            (false, true, true) => match self.grant.settle(&SynInfo::learn(now, tcp, version)) {
                Ok(settled) => Word::Accepted(settled),
                Err(why) => Word::Unfit(why, first),
            },
            (false, true, false) => Word::Opens,
            _ => Word::Nothing,
        }
    }

    /// The wall clock's next repetition, if one is left; else the end.
    fn next_repeat(&self, now: Instant) -> Instant {
        if self.repeats == OPENING_WALL_REPEATS {
            return self.end();
        }
        now + OPENING_INTERVAL.saturating_mul(1 << self.repeats)
    }

    /// No earlier than this is it over.
    fn end(&self) -> Instant {
        self.began.map_or(Instant::MAX, |began| began + T_OPENING)
    }

    /// It has lasted long enough, and G has had its chances.
    fn is_over(&self, now: Instant) -> bool {
        now >= self.end() && (self.runs >= OPENING_RUNS_MIN || self.is_abandoned)
    }
}

#[cfg(test)]
mod tests;
