//! The daemon was away, and frames of the connection have passed it by (LIFE-17).
//!
//! H has bytes that R believes delivered, and does not know what G and R have said since. G may
//! lack them, have them, have opened another connection, or know none any more.
//!
//! 1. **G is asked.** Its window counts as shut, so it gets a probe and no byte, as often as any
//!    such G. A probe lies below its window: it takes nothing from it but the question.
//! 2. **G's answer** says what it has, and the next number that it sends. If it has all that R was
//!    promised the flow leaves the path: R and G have gone on without H.
//! 3. **R is asked**, if G may have sent much: G discards segments whose acknowledgement lies far
//!    behind (RFC 5961 section 5.2), and H knows only an old one. R's answer brings a new one.
//! 4. Then the flow goes on: G gets the bytes that it lacks, and each side is believed numbers that
//!    H did not see ([`Losses::past`]).
//!
//! Meanwhile R's segments are dropped, and H says nothing to R: R repeats them.
//!
//! *While G lacks a promised byte*, R, which repeats none of them, cannot have moved the clock that
//! G echoes. So G's answer shows whether it is about the numbers that H means, also if billions of
//! bytes have passed or another connection has taken the addresses, of which H knows nothing after
//! a kill.
//!
//! [`Losses::past`]: crate::tcp::losses::Losses::past

use crate::drops::DropReason;
use crate::limits;
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::receiver::Range;
use crate::tcp::state::Heard;
use crate::tcp::{Fate, FlowContext, Frame};
use crate::time::Instant;
use crate::wire::packet::{SackBlocks, TcpFlags, Timestamps};
use crate::wire::seq::Seq;

/// The part of a connection that may have passed the daemon by.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Passed {
    /// None of its segments.
    Nothing,
    /// Segments: less than [`PASSED_MAX`] bytes, and none with SYN.
    Segments,
    /// Perhaps so many that numbers alone tell nothing, or another connection.
    Anything,
}

/// Numbers are unambiguous if no more bytes than this have passed by.
pub const PASSED_MAX: u64 = 1 << 30;

/// The answer in a segment of G to the question of what it has.
enum Answer {
    /// Nothing yet.
    Waits,
    /// It lacks bytes, and nobody knows which of its own R has.
    LeavesNetOpen,
    /// All that R was promised.
    HasAll,
    /// It lacks bytes that R was promised, from its acknowledgement on.
    Lacks,
    /// The connection is another, or its numbers make no sense.
    Broken,
}

impl Flow {
    /// Frames passed the daemon by, and H does not know what they said. A flow that owes R nothing
    /// that R was told leaves the path.
    pub(crate) fn on_passed_plain(&mut self, cx: &mut FlowContext<'_, '_>, passed: Passed) {
        match self.state() {
            State::Handshake => self.pass(cx.now, Why::PassedPlain),
            State::On | State::Drain if passed == Passed::Nothing => {}
            State::On | State::Drain if self.receiver.is_translated() => {
                self.abort_both(cx, Why::PassedPlain); // what has passed was not translated
            }
            State::On | State::Drain => {
                // Absences add up while nobody has answered.
                let by_clock = passed == Passed::Anything || self.receiver.is_asking();
                self.note_past();
                if self.receiver.reset_waits() {
                    self.abort_both(cx, Why::PassedPlain); // nobody would answer
                } else if self.sender.una() >= self.told() {
                    self.leave_unheard(cx, passed == Passed::Segments);
                } else if by_clock && !self.has_current_clock(cx.now) {
                    self.abort_both(cx, Why::PassedPlain);
                } else {
                    self.ask_guest(cx, by_clock);
                }
            }
            State::Pass => self.stay_away(passed),
            State::Opening => self.abort_both(cx, Why::PassedPlain),
            State::Translated | State::Abort => {}
        }
    }

    /// R's clock can prove something: it has one, which cannot have gone half way round.
    pub(crate) fn has_current_clock(&self, now: Instant) -> bool {
        self.options.timestamps && !self.timestamps.is_outdated(now)
    }

    /// The wire is about to be taken away: H can deliver nothing any more.
    pub(crate) fn on_detached(&mut self, cx: &mut FlowContext<'_, '_>) {
        match self.state() {
            State::Handshake => self.pass(cx.now, Why::PassedPlain),
            State::On | State::Drain if self.owes_nothing() && !self.receiver.is_translated() => {
                self.step_aside(cx, Why::PassedPlain);
            }
            State::On | State::Drain => self.abort_both(cx, Why::PassedPlain),
            State::Opening => self.abort_both(cx, Why::PassedPlain),
            State::Pass | State::Translated | State::Abort => {}
        }
    }

    /// End of the bytes that R believes delivered: all others it repeats.
    fn told(&self) -> u64 {
        self.receiver.acks.sent().min(self.receiver.next())
    }

    /// Out of the path, and back later if it `may_return`. R repeats what it was not told of, and
    /// has G's own acknowledgements.
    fn leave_unheard(&mut self, cx: &mut FlowContext<'_, '_>, may_return: bool) {
        let is_usual = self.standing.is_on() || self.standing.may_resume();
        let is_open = !self.receiver.has_fin() && !self.outbound.fin_sent();
        self.acknowledge_late();
        self.outbound.stop();
        self.losses.forget_sacked(); // G's ACK passes, be it inside a block or not
        let ack = self.ack_to_net();
        self.receiver.acks.on_sent(ack);
        self.step_aside(cx, Why::PassedPlain);
        if may_return && is_usual && is_open {
            self.standing.set_heard(Some(Heard::default()));
        }
    }

    /// Asks G what it has: until it says that, it gets no byte. `by_clock`: the clock that it
    /// echoes has to prove that it speaks of the same numbers.
    pub(crate) fn ask_guest(&mut self, cx: &mut FlowContext<'_, '_>, by_clock: bool) {
        self.acknowledge_late();
        self.receiver.ask(by_clock);
        if by_clock {
            self.receiver.set_anew();
        }
        let (sender, mut sending) = self.sending(cx);
        sender.on_absence(&mut sending);
        self.note_past();
    }

    /// Either end may have sent bytes that H did not see. R had no room beyond its edge, and its
    /// FIN takes a number.
    pub(super) fn note_past(&mut self) {
        self.losses.note_past(self.receiver.edge() + 1);
    }

    /// A segment of G while it is asked. `None`: that was the answer, and the flow goes on with it.
    pub(super) fn on_guest_asked(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &mut Frame<'_>,
    ) -> Option<Fate> {
        let tcp = f.tcp;
        let seq = tcp.seq.unwrap(self.outbound.sent());
        let fin = tcp.flags.contains(TcpFlags::FIN);
        let range = Range { seq, end: seq + u64::from(tcp.payload_len), fin };
        let end = range.end + u64::from(fin);
        let answer = if cx.vm.catches_up { Answer::Waits } else { self.judge_answer(f, end) };
        match answer {
            Answer::Broken => {
                self.abort_both(cx, Why::PassedPlain);
                return Some(Fate::Drop(DropReason::FlowAborted));
            }
            Answer::HasAll => {
                let may_return = !self.receiver.asks_by_clock() && !fin;
                self.receiver.on_told();
                let ack = tcp.ack.unwrap(self.sender.una());
                self.take_ack_from_guest(cx, ack, tcp.window, false, None);
                self.leave_unheard(cx, may_return);
                return Some(Fate::Pass);
            }
            Answer::Lacks => {
                self.receiver.on_told();
                self.outbound.on_past(end);
                if let Some(ts) = tcp.options.timestamps.filter(|_| self.options.timestamps) {
                    self.timestamps.on_tsval_from_net(ts.tsecr); // G takes no older one
                }
                return None;
            }
            Answer::LeavesNetOpen => {
                self.ask_net(cx);
                return Some(Fate::Drop(DropReason::Draining)); // G repeats it
            }
            Answer::Waits => {}
        }
        let has_content = range.len() > 0 || fin;
        Some(if has_content { self.pass_on(f, range) } else { Fate::Absorbed })
    }

    /// Judges a segment of G whose last number is before `end`.
    fn judge_answer(&self, f: &Frame<'_>, end: u64) -> Answer {
        let (una, told, all) = (self.sender.una(), self.told(), self.delivery_end());
        let ack = f.tcp.ack.unwrap(una);
        let echo = match f.tcp.options.timestamps {
            Some(ts) if self.options.timestamps => Some(Seq(ts.tsecr)),
            None if self.options.timestamps => return Answer::Waits,
            _ => None,
        };
        let shown = Seq(self.timestamps.to_guest().tsval);
        let has_heard_net = echo.is_some_and(|echo| shown.lt(echo));
        if ack < una {
            // Sent before the absence, or by another connection.
            return if has_heard_net { Answer::Broken } else { Answer::Waits };
        }
        let most = match echo {
            Some(echo) if !echo.lt(shown) => una + PASSED_MAX - 1,
            Some(_) => all,
            None => una + PASSED_MAX - 1, // of which no more have passed
        };
        if ack > most.max(all) {
            return Answer::Broken;
        }
        if ack >= told {
            return Answer::HasAll;
        }
        if self.receiver.asks_by_clock() && (has_heard_net || echo.is_none()) {
            return Answer::Broken;
        }
        let under_way = end.checked_sub(self.outbound.una());
        let is_near = under_way.is_some_and(|it| it <= self.outbound.window_max().into());
        let is_known = end == self.outbound.sent() || (is_near && !self.receiver.is_anew());
        if is_known { Answer::Lacks } else { Answer::LeavesNetOpen }
    }

    /// Asks R what it has of G's bytes.
    fn ask_net(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.receiver.acks.may_answer_odd(cx.now, limits::ODD_ACK_INTERVAL) {
            let probe = self.outbound.una() - 1;
            self.emit_to_net(cx, probe, TcpFlags::ACK, None);
        }
    }

    /// A segment of R while G is asked: its acknowledgement counts, and nothing else.
    pub(super) fn on_net_while_asking(
        &mut self,
        cx: &FlowContext<'_, '_>,
        f: &Frame<'_>,
    ) -> DropReason {
        if cx.vm.catches_up {
            return DropReason::Draining; // nobody has asked for this
        }
        let tcp = f.tcp;
        let odd = TcpFlags::RST.union(TcpFlags::SYN);
        // R cannot have gone beyond the edge as long as G lacks something.
        let seq = tcp.seq.unwrap(self.receiver.next());
        let is_within = (self.told() - 1..=self.receiver.edge() + 1).contains(&seq);
        if tcp.flags.intersects(odd) || !tcp.flags.contains(TcpFlags::ACK) || !is_within {
            return DropReason::Draining;
        }
        let timestamps = tcp.options.timestamps;
        let is_current = |ts: Timestamps| self.timestamps.is_current(cx.now, ts.tsval, 0);
        if self.options.timestamps && !timestamps.is_some_and(is_current) {
            return DropReason::Paws;
        }
        let before = self.outbound.una();
        let ack = tcp.ack.unwrap(before);
        if !(before..before + PASSED_MAX).contains(&ack) {
            return DropReason::BadAck;
        }
        self.outbound.on_past(ack);
        let new =
            self.on_ack_from_net(seq, tcp.ack, tcp.window, timestamps, &SackBlocks::default());
        self.outbound.note_ack_to_guest(new);
        if self.receiver.take_anew() || ack > before {
            self.sender.on_window_shut(); // G's answer is understood by now
        }
        DropReason::Draining
    }

    /// After an absence each side's word counts for what it has sent (`number` of G) and got.
    #[cold]
    pub(super) fn believe(&mut self, number: Seq) {
        let (sent, una) = (self.outbound.sent(), self.outbound.una());
        let number = number.unwrap(sent);
        if (una..una + PASSED_MAX).contains(&number) {
            self.outbound.on_past(number);
        }
    }
}
