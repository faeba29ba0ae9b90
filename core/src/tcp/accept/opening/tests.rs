//! G's answers, silences and surprises, as H's handshake meets them.

use super::*;
use crate::tcp::accept::grant::tests::{ALL, BEGINNING, NOW, frame, grant, offered, read};
use crate::time::Duration;
use crate::wire::samples::{Segment, v4_segment};

/// R's ISN is that of the samples: 1. So the SYN acknowledges up to 2.
const FIRST: Seq = Seq(2);
const ACK: TcpFlags = TcpFlags::ACK;
const RST: TcpFlags = TcpFlags::RST;
const SYN: TcpFlags = TcpFlags::SYN;

fn opening() -> Opening {
    Opening::new(grant(ALL - 1, &offered(ALL - 1)))
}

fn given() -> Opening {
    let mut opening = opening();
    opening.on_given(NOW);
    opening
}

/// G sends a segment without options.
fn says(opening: &Opening, flags: TcpFlags, ack: Seq) -> Word {
    let s = Segment { flags, ack, timestamps: None, ..v4_segment(b"") };
    let (ip, tcp) = read(&s.frame());
    opening.on_segment_from_guest(NOW, &tcp, ip.version)
}

/// G's SYN-ACK has these options.
fn accepts(opening: &Opening, choice: u8) -> Word {
    let s = Segment { seq: Seq(0x5000), ack: FIRST, ..v4_segment(b"") };
    let (ip, tcp) = read(&frame(&s, choice, true));
    opening.on_segment_from_guest(NOW, &tcp, ip.version)
}

fn after_ms(ms: u64) -> Instant {
    NOW + Duration::from_millis(ms)
}

#[test]
fn acc_14_g_s_syn_ack_settles_the_grant() {
    let Word::Accepted(settled) = accepts(&given(), ALL - 1) else { panic!("not accepted") };
    assert_eq!(settled.translation.seq_from_guest(Seq(0x5000)), BEGINNING.isn);
    let Word::Accepted(less) = accepts(&given(), 1) else { panic!("not accepted") };
    assert!(less.translation.hides_sack);
    assert_eq!(accepts(&given(), 2), Word::Unfit(Unfit::NoTimestamps, FIRST));
    let mut little = Opening::new(grant(1, &offered(ALL - 1)));
    little.on_given(NOW);
    assert_eq!(accepts(&little, ALL - 1), Word::Unfit(Unfit::More, FIRST));
}

#[test]
fn acc_09_the_syn_is_in_the_next_two_runs_then_the_clock_repeats_it() {
    let mut opening = opening();
    assert_eq!(opening.wakes_at(), Instant::MAX, "G has not got it: no clock runs");
    assert_eq!(opening.on_unanswered_run(NOW), Step::Wait);
    opening.on_given(NOW);
    assert_eq!(opening.on_unanswered_run(after_ms(10)), Step::RepeatFirst);
    opening.on_given(after_ms(10));
    assert_eq!(opening.on_unanswered_run(after_ms(20)), Step::Repeat);
    opening.on_given(after_ms(20));
    assert_eq!(opening.on_unanswered_run(after_ms(30)), Step::Wait, "no third");
    let mut at_s = vec![];
    while opening.wakes_at() < after_ms(63_000) {
        let at = opening.wakes_at();
        assert_eq!(opening.on_time(at), Step::Repeat);
        at_s.push(at.since(after_ms(20)).as_nanos() / 1_000_000_000);
        opening.on_given(at);
    }
    assert_eq!(at_s, [1, 3, 7, 15, 31]);
    assert_eq!(opening.wakes_at(), after_ms(63_000));
    assert_eq!(opening.on_time(after_ms(63_000)), Step::GiveUp);
}

#[test]
fn acc_09_it_is_not_given_up_before_g_has_run_three_times() {
    let mut opening = given();
    for runs in 0..2 {
        let at = opening.wakes_at();
        assert_eq!(opening.on_time(at), Step::Repeat, "after {runs} runs");
        opening.on_given(at);
        assert_ne!(opening.on_unanswered_run(at), Step::GiveUp);
    }
    while opening.wakes_at() < after_ms(63_000) {
        let at = opening.wakes_at();
        assert_eq!(opening.on_time(at), Step::Repeat);
        opening.on_given(at);
    }
    assert_eq!(opening.on_time(after_ms(63_000)), Step::Wait);
    assert_eq!(opening.wakes_at(), Instant::MAX, "nothing but a run of G ends it");
    assert_eq!(opening.on_time(after_ms(500_000)), Step::Wait);
    assert_eq!(opening.on_unanswered_run(after_ms(500_000)), Step::GiveUp);
}

#[test]
fn acc_09_a_refusal_is_one_that_acknowledges_the_syn() {
    assert_eq!(says(&given(), RST | ACK, FIRST), Word::Refused);
    assert_eq!(says(&given(), RST | ACK, FIRST + 1), Word::Nothing, "of another connection");
    assert_eq!(says(&given(), RST, FIRST), Word::Nothing, "anybody can make one");
    assert_eq!(says(&opening(), RST | ACK, FIRST), Word::Nothing, "G has not got a SYN");
}

#[test]
fn acc_11_an_ack_of_another_connection_is_reset_where_it_stands() {
    // TIME_WAIT and forgotten connections answer a SYN with an ACK of their own.
    for ack in [Seq(77), FIRST + 1, FIRST - 1] {
        assert_eq!(says(&given(), ACK, ack), Word::Another(ack));
        assert_eq!(says(&given(), SYN | ACK, ack), Word::Another(ack));
    }
    assert_eq!(says(&opening(), ACK, Seq(77)), Word::Nothing, "it is no answer");
    assert_eq!(says(&given(), ACK, FIRST), Word::Nothing);
    assert_eq!(says(&given(), TcpFlags::NONE, FIRST), Word::Nothing);
}

#[test]
fn acc_11_g_opens_a_connection_of_that_name_itself() {
    assert_eq!(says(&given(), SYN, Seq(0)), Word::Opens);
    assert_eq!(says(&opening(), SYN, Seq(0)), Word::Opens, "whatever it has got");
}

#[test]
fn acc_11_r_resets_it_before_g_knows_of_it_or_after() {
    assert!(opening().on_reset_from_net(), "the SYN is not sent");
    let mut late = given();
    assert!(!late.on_reset_from_net());
    assert_eq!(accepts(&late, ALL - 1), Word::TooLate(FIRST));
    assert_eq!(says(&late, RST | ACK, FIRST), Word::Refused);
    // It is not repeated for an R that has gone, and ends without three runs.
    assert_eq!(late.on_unanswered_run(after_ms(5)), Step::Wait);
    assert_eq!(late.on_time(late.wakes_at()), Step::Wait);
    assert_eq!(late.wakes_at(), after_ms(63_000));
    assert_eq!(late.on_time(after_ms(63_000)), Step::GiveUp);
}
