//! SNOOP-42: G sends past H, as IP fragments or by another NIC, and R acknowledges it.

use crate::common::segment::fragments;
use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, sends_segments, warms_up};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::limits;
use nightporter_core::tcp::flow::{State, Why};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

/// A flow whose R stands at 1001, G's stream at 1.
fn warm() -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    w.after_ms(1000);
    r.takes_all();
    g.takes_all();
    (w, r, g)
}

/// R's next bytes and its ACK, as often as R would repeat them, until G has got them. How often.
fn insists(w: &World<'_>, r: &Peer<'_>, g: &Peer<'_>, text: &str) -> u32 {
    let (range, ack) = text.split_once(" ack ").expect("an ACK");
    let (from, to) = range.split_once(':').expect("a range");
    let mut timeout = 200;
    for n in 1..20 {
        r.sends(text);
        if g.takes_all().iter().any(|s| s.range().1.to_string() == to) {
            return n;
        }
        // To an ACK that cannot be for it R says where it stands (RFC 9293 section 3.10.7.4), and
        // so it does whenever G repeats what nobody seems to acknowledge.
        for _ in r.takes_all() {
            r.sends(&format!("{from} ack {ack}"));
        }
        w.after_ms(timeout);
        r.sends(&format!("{from} ack {ack}"));
        timeout *= 2;
    }
    panic!("nothing got through\n{}", w.trace());
}

/// Found in review: everything R sent from then on was dropped, for ever, in silence.
#[test]
fn a_response_by_another_path_does_not_end_the_conversation() {
    let (w, r, g) = warm();
    g.sends_unseen("1:1001 ack 1001");
    assert!(insists(&w, &r, &g, "1001:1101 ack 1001") <= 4);
    // It is G's alone from now on.
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Unseen));
    assert_eq!(flow(&w, |f| (!f.stats().has_record, f.stats().reserved_pages)), (true, 0));
    r.takes_all();
    for n in 1..50_i64 {
        g.sends_unseen(&format!("{}:{} ack {}", 1000 * n + 1, 1000 * n + 1001, 100 * n + 1001));
        let text = format!("{}:{} ack {}", 100 * n + 1001, 100 * n + 1101, 1000 * n + 1001);
        let frame = r.frame_of(&text);
        r.sends(&text);
        assert_eq!(g.gets(&text).bytes, frame);
        r.gets_nothing();
    }
}

#[test]
fn what_g_sends_by_another_path_does_not_stall() {
    let (w, r, g) = warm();
    // Each ACK of R reaches G at once, with its window and echo; no data comes from R.
    for n in 1..=20_i64 {
        g.sends_unseen(&format!("{}:{} ack 1001 <ts 77 ->", 1000 * n - 999, 1000 * n + 1));
        r.sends(&format!("1001 ack {} win {} <ts - 77>", 1000 * n + 1, 6400 * n));
        g.gets(&format!("1001 ack {} win {} <ts - 77>", 1000 * n + 1, 6400 * n));
    }
    r.takes_all();
    assert_eq!(w.state(), Some(State::Pass));
    r.sends("1001:2001 ack 20001");
    g.gets("1001:2001 ack 20001");
}

/// G may fill R's window by the other path before R's first ACK of it, and the next, larger one.
#[test]
fn a_window_that_grows_is_no_reason_to_doubt() {
    let (w, r, g) = warm();
    let mut at = 1_i64;
    for window in [64_000_i64, 128_000, 256_000] {
        let end = at + window;
        for from in (at..end).step_by(1000) {
            g.sends_unseen(&format!("{from}:{} ack 1001", from + 1000));
        }
        r.sends(&format!("1001 ack {end} win {}", 2 * window));
        g.gets(&format!("1001 ack {end}"));
        at = end;
    }
    assert_eq!(w.state(), Some(State::Pass));
}

#[test]
fn a_fragment_of_the_guest_explains_the_first_ack() {
    let (w, r, g) = warm();
    let whole = g.frame_of("1:1001 ack 1001");
    for frame in fragments(&whole, 800) {
        assert!(matches!(w.frame(GUEST, VirtioNetHdr::default(), &frame), Verdict::Forward(_)));
    }
    g.sends_unseen("1:1001 ack 1001");
    let frame = r.frame_of("1001:2001 ack 1001");
    r.sends("1001:2001 ack 1001");
    assert_eq!(g.gets("1001:2001 ack 1001").bytes, frame);
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Unseen));
}

#[test]
fn com_23_a_mark_on_an_ack_that_g_judges_reaches_it() {
    for ecn in [true, false] {
        for mark in ["ce", "ect0", "notect"] {
            let (_, r, g) = Setup { ecn, ..Setup::new() }.established();
            warms_up(&r, &g);
            g.sends_unseen("1:1001 ack 1001");
            r.sends(&format!("1001 ack 1001 {mark}"));
            g.gets(&format!("1001 ack 1001 {mark}"));
        }
    }
}

#[test]
fn a_fragment_explains_nothing_to_another_remote_nor_later() {
    for late in [false, true] {
        let setup = Setup::new();
        let w = setup.opens();
        let (r, g) = w.connects();
        let whole = g.frame_of("1:1001 ack 1");
        if late {
            w.frame(GUEST, VirtioNetHdr::default(), &fragments(&whole, 800)[0]);
            w.after_ms(limits::T_FRAGMENT.as_millis() + 1);
        } else {
            let mut other = fragments(&whole, 800)[0].clone();
            other[33] = 77; // the last byte of the destination
            crate::common::segment::fix_ip_checksum(&mut other, 14);
            w.frame(GUEST, VirtioNetHdr::default(), &other);
        }
        assert_eq!(r.is_forged("1:1001 ack 1001"), Verdict::Drop(DropReason::BadAck));
        assert_eq!(w.state(), Some(State::On));
    }
}

/// With bytes held the flow drains: what G acknowledges here is let go, and then it passes.
#[test]
fn what_is_held_is_held_until_g_acknowledges_it_here() {
    let (w, r, g) = warm();
    r.sends("1001:2001 ack 1");
    r.gets("1 ack 2001");
    g.gets("1001:2001");
    let whole = g.frame_of("1:1001 ack 2001");
    w.frame(GUEST, VirtioNetHdr::default(), &fragments(&whole, 800)[0]);
    w.frame(GUEST, VirtioNetHdr::default(), &fragments(&whole, 800)[1]);
    g.sends_unseen("1:1001 ack 2001");
    r.sends("2001:3001 ack 1001");
    r.gets_nothing(); // the flow drains
    g.gets("2001:3001 ack 1001");
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes())), (State::Drain, 2000));
    w.after_ms(300);
    g.gets("1001:2001 ack 1001");
    // Less than H has shown; R hears of it with a fresh clock. Its sequence space is right again:
    // what H sends is acceptable to R.
    g.sends("1001 ack 3001 win 1024");
    assert_eq!(w.state(), Some(State::Pass));
    let last = r.gets("1001 ack 3001");
    let clock = last.tcp().options.timestamps.expect("timestamps").tsval;
    assert_eq!(clock.wrapping_sub(Setup::new().clock[1]), 1300);
}

/// Nothing can show H that G has bytes it never acknowledges here: fail-stop, not silence.
#[test]
fn bytes_that_g_acknowledges_elsewhere_end_in_a_reset_of_both() {
    let (w, r, g) = warm();
    r.sends("1001:2001 ack 1");
    g.gets("1001:2001");
    g.sends_unseen("1:1001 ack 2001");
    insists(&w, &r, &g, "2001:3001 ack 1001");
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Drain, Why::Unseen));
    let edge = flow(&w, |f| f.stats().edge_to_net);
    w.set_lenient(0, true); // the promise is about to be broken
    w.after_ms(limits::REFUSED_RUNNING.as_millis() + 5000);
    assert_eq!(flow(&w, |f| (f.state(), f.stats().edge_to_net)), (State::Abort, edge));
    assert!(r.gets_last_any().tcp().flags.rst());
    assert!(g.gets_last_any().tcp().flags.rst());
}

/// Found by simulation (seed 21542): none of R's ACKs counted, and G gave up after 150 seconds.
#[test]
fn an_ack_with_ip_options_tells_of_another_path_too() {
    let (w, r, g) = warm();
    g.sends_unseen("1:1001 ack 1001");
    for _ in 0..3 {
        r.sends("1001 ack 1001 ipopt");
        g.gets("1001 ack 1001");
    }
    assert_eq!(flow(&w, |f| f.why()), Why::Unseen);
}

/// Found by simulation (seed 21542): G's FIN goes another way. The clock of H's answers is older
/// than the FIN's, so that R drops them in silence, and its next ACK comes only when G asks for it
/// by a keepalive, which looks as if G had not sent the FIN.
#[test]
fn data_with_such_an_ack_counts_once_the_guest_has_seen_one() {
    let (w, r, g) = warm();
    g.sends_unseen("F. 1 ack 1001");
    r.sends("1101 ack 2");
    g.gets("1001 ack 2");
    for _ in 0..2 {
        w.after_ms(600);
        assert_eq!(w.state(), Some(State::On));
        r.sends("1001:1101 ack 2");
    }
    g.gets("1001:1101 ack 2");
    assert_eq!(flow(&w, |f| f.why()), Why::Unseen);
    // Before that it says nothing: G has had no word in it.
    let (w, r, g) = warm();
    for _ in 0..4 {
        w.after_ms(600);
        r.is_forged("1001:1101 ack 2");
    }
    g.gets_nothing();
    assert_eq!(w.state(), Some(State::On));
}

/// Found by simulation (seed 28267): H's last ACK echoed the mark once more.
#[test]
fn snoop_19_the_answer_to_a_mark_counts_also_on_the_segment_with_which_the_flow_leaves() {
    let (w, r, g) = Setup { ecn: true, ..Setup::new() }.established();
    r.sends("1:1001 ce");
    r.gets("E. 1 ack 1001");
    g.gets("1:1001");
    g.sends("1 ack 1001");
    g.sends_unseen("1:1001 ack 1001");
    for _ in 0..2 {
        r.sends("1001 ack 1001");
        g.gets("1001 ack 1001");
    }
    r.sends("W. 1001:1101 ack 1001");
    g.gets("W. 1001:1101 ack 1001");
    r.gets(". 1001 ack 1001");
    assert_eq!(w.state(), Some(State::Pass));
}

#[test]
fn snoop_42_also_after_the_guest_was_proven() {
    // It acknowledged here, and does so no more: drained after five seconds of running time.
    let (w, r, g) = warm();
    assert!(flow(&w, |f| f.stats().guest_is_established));
    r.sends("1001:2001 ack 1");
    w.after_ms(4900);
    assert_eq!(w.state(), Some(State::On));
    w.after_ms(1100);
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Drain, Why::Asymmetric));
    g.takes_all();
    // Its path comes back: nothing is lost.
    g.sends("1 ack 2001 win 512000");
    assert_eq!(w.state(), Some(State::Pass));
    // A guest that says it has nothing, again and again, is on this path.
    let (w, r, g) = warm();
    r.sends("1001:2001 ack 1");
    w.after_ms(300);
    g.sends("1 ack 1001");
    w.after_ms(8000);
    assert_eq!(w.state(), Some(State::On));
    // And one that is off its CPU is not asked.
    let (w, r, g) = warm();
    g.stops(1);
    r.sends("1001:2001 ack 1");
    w.after_ms(60_000);
    assert_eq!(w.state(), Some(State::On));
}

/// R's keepalives, window probes and repetitions say what its ACKs say.
#[test]
fn nothing_that_r_asks_goes_unanswered_for_ever() {
    for (held, text) in [
        (false, "1000 ack 1001"),
        (false, "1000:1001 ack 1001"),
        (true, "1001:2001 ack 1001"),
        (true, "2000 ack 1001"),
    ] {
        let (w, r, g) = warm();
        if held {
            r.sends("1001:2001 ack 1");
            r.takes_all();
            g.takes_all();
        }
        g.sends_unseen("1:1001 ack 1001");
        let at = if held { 2001 } else { 1001 };
        let mut tries = 0;
        while w.state() == Some(State::On) {
            r.sends(text);
            for _ in r.takes_all() {
                r.sends(&format!("{at} ack 1001"));
            }
            w.after_ms(1000);
            tries += 1;
            assert!(tries < 8, "{text}\n{}", w.trace());
        }
        assert_eq!(flow(&w, |f| f.why()), Why::Unseen, "{text}");
    }
}

/// An R that goes back to what it repeats sends its ACKs from there (seeds 92293, 107184). Nobody
/// takes what the other says then: R's numbers are below H's next, H's below what R has of G.
#[test]
fn the_acks_of_an_r_that_went_back_count_too() {
    let (w, r, g) = warm();
    r.sends("1001:2001 ack 1");
    r.takes_all();
    g.takes_all();
    g.sends_unseen("1:1001 ack 2001");
    for _ in 0..3 {
        r.sends("1001:1501 ack 1001");
        r.sends("1501 ack 1001");
        w.after_ms(1000);
    }
    assert_eq!(flow(&w, |f| f.why()), Why::Unseen, "{}", w.trace());
    r.sends("1001:1501 ack 1001");
    r.gets_last("1001 ack 2001 <sack 1001:1501>");
}

#[test]
fn an_ack_beyond_all_windows_is_no_path_but_a_lie() {
    let (w, r, g) = warm();
    for _ in 0..20 {
        w.after_ms(600);
        r.is_forged("1001 ack 64002");
        r.gets("1 ack 1001");
        g.gets_nothing();
    }
    // Nor is one behind G's FIN.
    g.sends("F. 1:101 ack 1001");
    r.takes_all();
    for _ in 0..20 {
        w.after_ms(600);
        r.is_forged("1001 ack 103");
        r.gets_last("102 ack 1001");
        g.gets_nothing();
    }
    assert_eq!(w.state(), Some(State::On));
}

/// RFC 5961: who hits the windows by chance drains nothing, for G denies it.
#[test]
fn a_guess_that_hits_is_denied_by_the_guest() {
    let (w, r, g) = warm();
    for _ in 0..200 {
        r.lies("1001 ack 5001 <ts 90000 3>");
        // The clock of whoever it is does not become G's.
        let seen = g.gets("1001 ack 5001");
        let tsval = seen.tcp().options.timestamps.expect("timestamps").tsval;
        assert!(tsval.wrapping_sub(Setup::new().clock[0]) < 90_000);
        g.sends("1 ack 1001"); // a challenge ACK
    }
    assert_eq!(flow(&w, |f| (f.state(), f.stats().net_nxt - f.stats().net_una)), (State::On, 0));
    r.gets_nothing();
    // Its data is not taken, by however much it hits.
    for _ in 0..200 {
        assert_eq!(r.is_forged("1001:2001 ack 5001"), Verdict::Drop(DropReason::BadAck));
    }
    g.gets_nothing();
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes(), f.stats().unseen_acks)), (State::On, 0, 0));
    // The connection goes on as if nothing had been.
    r.takes_all();
    r.sends("1001:2001 ack 1");
    r.gets("1 ack 2001");
    g.gets("1001:2001 ack 1");
}

#[test]
fn a_word_of_r_itself_starts_the_count_anew() {
    let (w, r, g) = warm();
    for _ in 0..100 {
        for _ in 1..limits::AHEAD_ACKS {
            r.lies("1001 ack 5001");
            g.gets("1001 ack 5001");
        }
        r.sends("1001 ack 1");
        g.gets("1001 ack 1");
    }
    assert_eq!(w.state(), Some(State::On));
    // Segments out of window, or older than PAWS allows, have no effect.
    r.takes_all();
    for text in ["900001 ack 5001", "-900001 ack 5001", "1001 ack 5001 <ts 4294000000>"] {
        for _ in 0..10 {
            r.is_forged(text);
        }
        assert_eq!(flow(&w, |f| f.stats().unseen_acks), 0, "{text}");
    }
    g.gets_nothing();
}

/// Before it is known how far G is, H's own frames to G say what H knows, and G takes them.
#[test]
fn what_is_delivered_meanwhile_carries_an_ack_that_g_accepts() {
    let (w, r, g) = warm();
    g.sends("1 ack 1001 win 0");
    sends_segments(&r, 1001, 5);
    r.takes_all();
    g.takes_all();
    g.sends_unseen("1:1001 ack 1001 win 0");
    r.sends("6001 ack 1001");
    g.gets("1001 ack 1001");
    g.sends("1001 ack 1001 win 64000"); // its SND.NXT is beyond what H saw: it denies nothing
    g.gets("1001:6001 ack 1");
    r.sends("6001 ack 1001");
    r.sends("6001 ack 1001");
    g.takes_all();
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes())), (State::Drain, 5000));
    g.sends("1001 ack 6001 win 1024000");
    assert_eq!(w.state(), Some(State::Pass));
}

/// R, which was acknowledged none of the bytes that G has not acknowledged here, does not need H.
#[test]
fn snoop_42_a_guest_that_is_silent_and_owes_nothing_is_let_go_after_two_minutes() {
    let (w, r, g) = warm();
    w.engine(|e, now| e.set_late(now, GUEST, true));
    r.sends("1001:2001 ack 1");
    r.gets_nothing();
    w.set_lenient(0, true); // G's answers are unseen
    w.after_ms(limits::T_ASYMMETRIC.as_millis() + 2000);
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Drain, Why::Asymmetric));
    w.after_ms(limits::REFUSED_RUNNING.as_millis());
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Asymmetric));
    r.gets_nothing();
    g.takes_all();
    r.sends("2001:3001 ack 1");
    g.gets("2001:3001 ack 1");
}
