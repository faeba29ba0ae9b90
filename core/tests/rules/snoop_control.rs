//! SNOOP-14 to SNOOP-19: FIN, RST, SYN and ECN of a live flow.

use crate::common::Setup;
use crate::{flow, sends_segments, warms_up};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::limits;
use nightporter_core::tcp::flow::{State, Why};

#[test]
fn snoop_14_a_fin_by_itself() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    r.sends("F. 1001");
    r.gets_last("1 ack 1001");
    g.gets("1:1001");
    g.gets("F. 1001");
    g.sends("ack 1001");
    r.takes_all();
    w.after_ms(260);
    g.gets_last("F. 1001"); // lost inside G: it is H's to repeat
    g.sends("ack 1002");
    r.gets_last("1 ack 1002");
    // Half-closed: G goes on sending.
    g.sends("1:1001 ack 1002");
    r.gets("1:1001 ack 1002");
    r.sends("1002 ack 1001");
    g.gets_last("1002 ack 1001");
}

#[test]
fn snoop_14_a_fin_out_of_order() {
    let (_, r, g) = Setup::new().established();
    r.sends("F. 1001:2001");
    r.gets("1 ack 1 <sack 1001:2001>");
    g.gets_nothing();
    r.sends("1:1001");
    r.gets("1 ack 2001");
    g.gets("F. 1:2001");
    g.sends("ack 2002");
    r.gets_last("1 ack 2002");
}

/// G has bytes behind such a FIN and says so; its ACKs would be taken for optimistic ones, and what
/// was promised would be repeated until both are reset.
#[test]
fn a_fin_before_bytes_that_were_passed_to_g_is_none() {
    let (w, r, g) = Setup::new().established();
    r.sends("U. 1:2001 urg 5");
    g.gets("U. 1:2001 urg 5");
    r.sends("F. 501:1001");
    r.takes_all();
    r.sends("1:501");
    r.gets_nothing(); // the flow drains
    g.gets("1:1001");
    g.sends("ack 2001");
    r.gets_last("1 ack 2001");
    let port = w.guest_port();
    assert!(w.engine(|engine, _| engine.is_drained(port)));
    assert_eq!(w.state(), Some(State::On));
}

/// Segments that the host does not judge go to G unchanged, except a FIN that cannot be true: G
/// would believe it, and R's later bytes would never be acknowledged.
#[test]
fn a_second_fin_or_bytes_behind_one_do_not_reach_g_either() {
    for text in
        ["UF. 501:701 urg 5", "UF. 501:501 urg 5", "UF. 501:1501 urg 5", "U. 901:1101 urg 5"]
    {
        let (w, r, g) = Setup::new().established();
        r.sends("UF. 1:1001 urg 5");
        g.gets("UF. 1:1001 urg 5");
        assert_eq!(r.sends(text), Verdict::Drop(DropReason::OutOfWindow), "{text}");
        g.gets_nothing();
        r.sends("UF. 1:1001 urg 5");
        g.gets("UF. 1:1001 urg 5");
        g.sends("ack 1002");
        r.gets_last("1 ack 1002");
        assert_eq!(w.flow(0, |f| f.fin_acked_by_guest()), Some(true));
    }
    let (_, r, g) = Setup::new().established();
    r.sends("U. 1:1001 urg 5");
    g.gets("U. 1:1001 urg 5");
    r.sends("UF. 501:701 urg 5");
    g.gets_nothing();
}

#[test]
fn snoop_14_repeats_of_a_fin_are_answered_but_not_without_limit() {
    let (w, r, g) = Setup::new().established();
    g.stops(2);
    r.sends("F. 1:1001");
    r.gets("1 ack 1001");
    for _ in 0..20 {
        r.sends("F. 1001");
        w.after_ms(10);
    }
    assert_eq!(r.takes_all().len(), 1);
    // After G took it, a lost ACK of it is made good.
    g.runs();
    g.sends("ack 1002");
    r.gets_last("1 ack 1002");
    w.after_ms(1000);
    r.takes_all();
    r.sends("F. 1001");
    r.gets("1 ack 1002");
}

#[test]
fn snoop_14_data_behind_a_fin_is_nobodys() {
    let (w, r, g) = Setup::new().established();
    r.sends("F. 1:1001");
    r.takes_all();
    for text in ["1001:1011", "1002:1012", "901:1101", "F. 1001:1011"] {
        r.is_forged(text);
        assert!(r.takes_all().iter().all(|a| a.ack() == 1001), "{text}");
    }
    assert_eq!(flow(&w, |f| f.stats().rcv_nxt - f.stats().guest_una), 1000);
    g.gets("F. 1:1001");
    g.gets_nothing();
    g.sends("ack 1002");
    assert!(flow(&w, |f| f.fin_acked_by_guest()));
    for text in ["1001:1011", "1002:1012", "901:1101"] {
        r.is_forged(text);
    }
    assert!(r.takes_all().iter().all(|a| a.ack() == 1002));
}

#[test]
fn snoop_14_a_fin_does_not_fit_a_window_that_its_data_fills() {
    let (w, r, g) = Setup::new().established();
    g.sends("ack 1 win 1024");
    r.takes_all();
    r.sends("F. 1:1025");
    g.gets(". 1:1025"); // K-02: one beyond the window, and G might drop all of it
    g.gets_nothing();
    g.sends("ack 1025 win 0");
    g.gets_nothing();
    w.after_ms(250);
    g.gets_last("1024 ack 1");
    g.sends("ack 1025 win 1024");
    g.gets("F. 1025");
}

#[test]
fn snoop_15_where_an_rst_is_valid() {
    // Sequence number relative to what H expects; whether it is taken; whether it is challenged.
    let cases = [(0, true, false), (1, false, true), (-1, false, false), (200_000, false, true)];
    for (offset, taken, challenged) in cases {
        let (w, r, g) = Setup::new().small().established();
        warms_up(&r, &g);
        w.set_lenient(0, taken); // a forger's RST that H must believe
        r.is_forged(&format!("R {}", 1001 + offset));
        assert_eq!(flow(&w, |f| f.state() == State::Abort), taken, "{offset}");
        assert_eq!(r.takes_all().len(), usize::from(challenged), "{offset}");
        assert_eq!(g.takes_all().len(), usize::from(taken), "{offset}");
    }
    // The right end of the highest block H has SACKed.
    for (seq, taken) in [(6001, true), (4001, false), (5001, false)] {
        let (w, r, g) = Setup::new().small().established();
        warms_up(&r, &g);
        r.sends("3001:4001");
        r.sends("5001:6001");
        r.sends(&format!("R {seq}"));
        assert_eq!(flow(&w, |f| f.state() == State::Abort), taken, "{seq}");
    }
    // Behind a FIN: at it and behind it.
    for (seq, taken) in [(1001, true), (1002, true), (1003, false), (1000, false)] {
        let (w, r, g) = Setup::new().small().established();
        r.sends("F. 1:1001");
        g.sends("ack 1002");
        r.takes_all();
        g.takes_all();
        w.set_lenient(0, taken);
        r.is_forged(&format!("R {seq}"));
        assert_eq!(flow(&w, |f| f.state() == State::Abort), taken, "{seq}");
    }
}

#[test]
fn snoop_17_a_remote_that_has_reset_opens_anew_though_the_answer_takes_another_path() {
    let (w, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    r.sends("R 1001");
    g.gets("R. 1001");
    r.is_forged("S 500000");
    assert_eq!(g.takes_all().len(), 1);
    // The guest's SYN-ACK is not seen here.
    r.is_forged("500001 ack 700001");
    r.is_forged("500001:500101 ack 700001");
    assert_eq!(g.takes_all().len(), 2);
    r.gets_nothing();
    assert_eq!(w.state(), None);
}

#[test]
fn snoop_15_a_megabyte_is_read_before_the_reset() {
    let (w, r, g) = Setup { budget_bytes: 8 << 20, ..Setup::new() }.established();
    warms_up(&r, &g);
    g.stops(0);
    let mut next = 1001_i64;
    for _ in 0..3 {
        r.sends(&format!("{next}:{} gso 1000", next + 60_000));
        next += 60_000;
    }
    r.sends(&format!("R {next}"));
    r.takes_all();
    // New data of R is nobody's now, and its new SYN waits its turn.
    r.is_forged(&format!("{next}:{}", next + 10));
    r.takes_all();
    assert_eq!(r.is_forged("S 777"), Verdict::Drop(DropReason::SynOnLiveFlow));
    g.runs();
    let mut acked = 1001_i64;
    while acked < next {
        let seen = g.takes_all();
        assert!(!seen.is_empty(), "stuck at {acked}");
        assert!(seen.iter().all(|s| !s.tcp().flags.rst()), "the reset overtook data");
        acked = i64::from(seen.last().expect("some").range().1);
        g.sends(&format!("ack {acked}"));
    }
    g.gets_last(&format!("R. {next}"));
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Abort, Why::Reset));
    // G's segments under way find no flow.
    w.after_ms(5);
    g.sends(&format!("1:11 ack {next}"));
    g.gets(&format!("R. {next}"));
    r.gets_nothing();
}

#[test]
fn snoop_15_the_reset_follows_the_fin() {
    let (_, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("F. 1:1001");
    r.sends("R 1002");
    g.runs();
    g.gets("F. 1:1001");
    g.gets_nothing();
    g.sends("ack 1002");
    g.gets_last("R. 1002");
}

#[test]
fn snoop_15_bytes_that_were_lost_before_a_waiting_reset_are_repeated() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001");
    r.sends("R 1001");
    g.runs();
    g.gets("1:1001"); // and its kernel dropped it
    w.after_ms(limits::LOCAL_RTO_MIN.as_millis() + 10);
    g.gets("1:1001");
    g.sends("ack 1001");
    g.gets_last("R. 1001");
}

#[test]
fn snoop_15_a_guest_that_takes_nothing_is_reset_all_the_same() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    r.sends("R 1001");
    g.takes_all();
    w.after_ms(limits::T_RST.as_millis() + 3000);
    let last = g.gets_last_any();
    assert!(last.tcp().flags.rst(), "after T_rst of running time");
    // Not exact for a G that had nothing: its challenge ACK makes it so.
    g.sends("1 ack 1");
    g.gets_last("R. 1");
}

#[test]
fn snoop_15_a_guest_that_was_slow_before_the_reset_has_its_time_from_then_on() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    w.after_ms(limits::T_RST.as_millis() - 5000);
    r.sends("R 1001");
    let resets = || g.takes_all().iter().filter(|s| s.tcp().flags.rst()).count();
    w.after_ms(limits::T_RST.as_millis() - 5000);
    assert_eq!(resets(), 0, "what was promised comes first");
    w.after_ms(8000);
    assert_eq!(resets(), 1);
}

/// Found by simulation: a guest whose application did not read answered each probe, and each answer
/// gave it another half minute.
#[test]
fn snoop_15_a_guest_whose_window_stays_shut_is_reset_all_the_same() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    g.takes_all();
    g.sends("ack 1001 win 0");
    r.sends("1001:2001");
    r.sends("R 2001");
    let mut resets = 0;
    for _ in 0..(limits::T_RST.as_millis() + 8000) / 500 {
        w.after_ms(500);
        let seen = g.takes_all();
        resets += seen.iter().filter(|s| s.tcp().flags.rst()).count();
        if resets == 0 && !seen.is_empty() {
            g.sends("ack 1001 win 0"); // it is alive
        }
    }
    assert_eq!(resets, 1);
}

#[test]
fn snoop_16_what_a_guest_acknowledges_behind_its_reset_takes_nothing_back() {
    let (w, r, g) = Setup::new().established();
    r.sends("F. 1:1001");
    r.takes_all();
    g.takes_all();
    g.sends("1 ack 1002");
    r.takes_all();
    g.sends("R 1");
    r.gets("R. 1 ack 1002");
    g.sends("1 ack 1001");
    w.after_ms(2);
    r.sends("1002 ack 1");
    r.gets("R. 1 ack 1002");
}

/// The window of a SYN-ACK has no unit: G uses what is left of one, and R takes it.
#[test]
fn snoop_16_a_guests_reset_is_exact_for_an_r_that_has_shown_a_part_of_a_unit() {
    let setup = Setup { guest_is_client: true, ..Setup::new() };
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    g.sends_syn();
    r.gets_syn();
    r.sends_syn_spec("S. ack 1 win 10100", &setup);
    g.gets_syn();
    g.sends("1 ack 1");
    r.gets("1 ack 1");
    g.sends("1:10101 gso 1000");
    r.gets_all(&["1:10101"]);
    g.sends("R. 10101");
    r.gets_all(&["R. 10101"]);
}

#[test]
fn snoop_16_a_guests_reset_is_exact_for_r_and_repeated() {
    let (w, r, g) = Setup::new().established();
    g.sends("1:5001 ack 1 gso 1000");
    r.sends("1:3001 ack 1 gso 1000");
    r.takes_all();
    g.sends("R 900001"); // somewhere far ahead, and without ACK
    r.gets("R. 5001 ack 3001");
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes(), f.stats().reserved_pages)).2, 0);
    for _ in 0..3 {
        w.after_ms(2);
        r.sends("3001 ack 2001");
        r.gets("R. 2001");
    }
    g.takes_all();
    g.gets_nothing();
    w.after_ms(62_000);
    assert_eq!(w.state(), None, "forgotten after T_abort");
}

#[test]
fn snoop_17_a_guest_that_has_forgotten_opens_again() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001");
    r.takes_all();
    let setup = Setup { isn: [5, 777_000], guest_is_client: true, ..Setup::new() };
    let (r2, g2) = w.pair(&setup);
    r2.end(|end| end.tcp_port = 40_000);
    (0..2).for_each(|conn| w.set_lenient(conn, true)); // they have the same ports
    g2.sends_syn();
    r2.gets_syn();
    assert_eq!(w.flow(1, |f| (f.state(), f.stats().reserved_pages)), Some((State::Handshake, 0)));
    // R, which believes 1000 bytes delivered, hears that they are gone.
    let reset = r2.gets_last_any();
    let (seq, ack) = (reset.tcp().seq.0, reset.tcp().ack.0);
    assert!(reset.tcp().flags.rst());
    assert_eq!((seq, ack), (Setup::new().isn[1] + 1, Setup::new().isn[0].wrapping_add(1001)));
    // If it does not get there: its challenge ACK goes to G, G resets it, and opens again.
    r2.is_forged("900 ack 5");
    g.runs();
    assert_eq!(g2.takes_all().len(), 1);
    g2.is_forged("R 5");
    assert_eq!(r2.takes_all().len(), 1);
    g2.sends_syn();
    r2.gets_syn();
    r2.sends_syn_ack();
    g2.gets_syn();
    g2.sends("1 ack 1");
    r2.gets("1 ack 1");
    r2.sends("1:1001 ack 1");
    let seen = g2.gets("1:1001 ack 1");
    assert_eq!(seen.payload(), crate::common::segment::pattern_bytes(0, 1, 1000));
}

#[test]
fn snoop_18_both_ways_of_closing_end_in_pass_with_nothing_kept() {
    for guest_first in [false, true] {
        let (w, r, g) = Setup::new().small().established();
        warms_up(&r, &g);
        if guest_first {
            g.sends("F. 1 ack 1001");
            r.gets("F. 1 ack 1001");
            r.sends("F. 1001 ack 2");
            g.gets_last("F. 1001 ack 2");
            g.sends("2 ack 1002");
            r.gets_last("2 ack 1002");
        } else {
            r.sends("F. 1001 ack 1");
            g.gets("F. 1001");
            g.sends("F. 1 ack 1002");
            r.gets("F. 1 ack 1002");
            r.sends("1002 ack 2");
            g.gets("1002 ack 2");
        }
        assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Closed));
        assert_eq!(flow(&w, |f| (f.stats().reserved_pages, !f.stats().has_record)), (0, true));
        // TIME-WAIT is G's own: a repeated FIN passes, and so does the answer.
        r.takes_all();
        let fin = if guest_first { "F. 1001 ack 2" } else { "1002 ack 2" };
        r.sends(fin);
        assert_eq!(g.takes_all().len(), 1);
        g.sends("2 ack 1002");
        r.gets("2 ack 1002");
        w.after_ms(63_000);
        assert_eq!(w.state(), None, "forgotten after T_linger");
    }
}

#[test]
fn snoop_19_one_mark_one_reaction() {
    let (w, r, g) = Setup { ecn: true, ..Setup::new() }.established();
    warms_up(&r, &g);
    sends_segments(&r, 1001, 2);
    r.takes_all();
    r.sends("3001:4001 ce");
    r.gets("E. ack 4001");
    r.sends("4001:5001 ect0");
    r.gets("E. ack 5001");
    r.sends("W. 5001:6001 ect0");
    r.gets(". ack 6001");
    r.sends("6001:7001 ect0");
    r.gets(". ack 7001");
    assert!(g.takes_all().iter().all(|s| s.packet.tcp().expect("TCP").0.tos & 3 != 3));
    // A mark on something without data is no congestion of R's data, and G's kernel sees it.
    r.sends("7001 ce");
    g.gets_last("7001:7001 ce");
    r.sends("7001:8001");
    r.gets(". ack 8001");
    // Without ECN on the connection the mark is not touched.
    let (_, r, g) = Setup::new().established();
    r.sends("1:1001 ce");
    r.gets(". ack 1001");
    g.gets("1:1001 ce");
    drop(w);
}

#[test]
fn snoop_16_a_forged_syn_does_not_end_the_answers_to_a_remote_that_the_guest_has_reset() {
    let (w, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    r.sends("1001:2001");
    r.takes_all(); // it was told of 1000 bytes that the guest does not acknowledge
    g.takes_all();
    g.sends("R. 1 ack 1001");
    r.takes_all(); // the RST, which the network loses
    r.is_forged("S 500000"); // by anybody who knows the addresses
    g.takes_all();
    r.is_forged("2001:3001 ack 1");
    g.gets_nothing();
    r.gets("R. 1");
    assert_eq!(w.state(), Some(State::Abort));
}
