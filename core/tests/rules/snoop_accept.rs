//! SNOOP-01 to SNOOP-13: what of R's segments is taken, and how it is acknowledged.

use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{flow, sends_segments, warms_up};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::limits;
use nightporter_core::tcp::flow::{State, Why};
use nightporter_core::time::Duration;

/// A flow whose R stands at 1001, G's stream at 1, clocks at 100 ms.
fn warm() -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    w.after_ms(1000);
    r.takes_all();
    (w, r, g)
}

#[test]
fn snoop_01_one_violation_at_a_time() {
    // Segment, why it is dropped, ACKs it provokes.
    let cases = [
        ("1001:2001 badsum", DropReason::BadChecksum, 0),
        ("1001:2001 <ts 4294967000>", DropReason::Paws, 1),
        ("1001 <ts 4294967000>", DropReason::Paws, 1),
        ("1:1001", DropReason::Duplicate, 1),
        ("501:601", DropReason::Duplicate, 1),
        ("R 1002", DropReason::BadRst, 1),
        ("R 900", DropReason::BadRst, 0),
        ("S. 1001", DropReason::SynOnLiveFlow, 1),
        ("1001:2001 ack 2", DropReason::BadAck, 1),
        ("1001:2001 ack 4294900000", DropReason::BadAck, 1),
        ("P 1001:2001", DropReason::BadFlags, 0),
        ("900", DropReason::OutOfWindow, 1),
    ];
    for (text, reason, acks) in cases {
        let (w, r, g) = warm();
        let verdict = r.is_forged(text);
        assert_eq!(verdict, Verdict::Drop(reason), "{text}");
        let answers = r.takes_all();
        assert_eq!(answers.len(), acks, "{text}");
        assert!(answers.iter().all(|a| a.ack() == 1001), "{text}");
        g.gets_nothing();
        assert_eq!(flow(&w, |f| (f.held_bytes(), f.state())), (0, State::On), "{text}");
    }
}

#[test]
fn snoop_02_the_edge_and_one_beyond() {
    let (w, r, g) = warm();
    let edge = || flow(&w, |f| f.stats().edge_to_net - f.stats().rcv_nxt) as i64 + 1001;
    let verdict = |from: i64, to: i64| r.sends(&format!("{from}:{to}"));
    let edge = {
        // A first duplicate ACK shows the edge that stays.
        verdict(2001, 2002);
        r.takes_all();
        edge()
    };
    assert_eq!(verdict(edge - 10, edge), Verdict::Absorbed);
    r.gets_last(&format!("ack 1001 <sack {}:{edge} 2001:2002>", edge - 10));
    assert_eq!(verdict(edge, edge + 1), Verdict::Drop(DropReason::OutOfWindow));
    r.gets_last(&format!("ack 1001 <sack {}:{edge} 2001:2002>", edge - 10));
    // Across the edge: what is inside counts.
    assert_eq!(verdict(edge - 20, edge + 10), Verdict::Absorbed);
    let blocks = format!("{}:{edge} {}:{edge} 2001:2002", edge - 10, edge - 20);
    r.gets_last(&format!("ack 1001 <sack {blocks}>"));
    assert_eq!(verdict(edge + 1, edge + 2), Verdict::Drop(DropReason::OutOfWindow));
    g.gets_nothing();
    // Empty segments: up to the edge.
    r.takes_all();
    assert!(matches!(r.sends(&format!("{edge}")), Verdict::Forward(_)));
    w.after_ms(600);
    assert_eq!(r.sends(&format!("{}", edge + 1)), Verdict::Drop(DropReason::OutOfWindow));
    assert_eq!(flow(&w, |f| f.held_bytes()), 0);
}

#[test]
fn snoop_02_pure_acks_pass_at_a_full_window_and_behind_a_fin() {
    let (_, r, g) = Setup::new().established();
    g.sends("ack 1 win 0");
    let mut next = 1;
    let mut room = 1000;
    while room > 0 {
        let end = next + i64::from(room.min(1000));
        r.sends(&format!("{next}:{end}"));
        room = r.gets_last_any().window();
        next = end;
    }
    g.sends("1:1001 win 0");
    r.takes_all();
    assert!(matches!(r.sends(&format!("{next} ack 1001")), Verdict::Forward(_)));
    g.gets("1 ack 1001");
    let (_, r, g) = Setup::new().established();
    g.sends("1:1001 ack 1 win 0");
    r.sends("F. 1:1001 ack 1");
    r.takes_all();
    assert!(matches!(r.sends("1002 ack 1001"), Verdict::Forward(_)));
    g.gets("1 ack 1001");
}

#[test]
fn snoop_03_ack_validity() {
    let (w, r, g) = warm();
    for n in 0..5_i64 {
        g.sends(&format!("{}:{} ack 1001", 1 + 1000 * n, 1001 + 1000 * n));
    }
    r.takes_all();
    r.sends("1001 ack 5001");
    g.takes_all();
    for (ack, taken) in [(5002, false), (5001, true), (1, true), (-70_000, false)] {
        w.after_ms(600);
        r.takes_all();
        let held = flow(&w, |f| f.stats().rcv_nxt);
        let from = i64::try_from(held - flow(&w, |f| f.stats().guest_una)).expect("small") + 1001;
        let text = format!("{from}:{} ack {ack}", from + 10);
        let verdict = if taken { r.sends(&text) } else { r.is_forged(&text) };
        assert_eq!(verdict == Verdict::Absorbed, taken, "{ack}");
        if !taken {
            assert_eq!(verdict, Verdict::Drop(DropReason::BadAck), "{ack}");
            r.gets(&format!("5001 ack {from}"));
        }
    }
}

#[test]
fn snoop_04_paws_lets_go_after_2147_seconds() {
    let (w, r, g) = warm();
    r.sends("1001:2001 <ts 5000>");
    g.sends("ack 2001");
    r.takes_all();
    w.after_ms(2_130_000);
    assert_eq!(r.sends("2001:3001 <ts 4000>"), Verdict::Drop(DropReason::Paws));
    // R's clock stood still: the monitor, which counts in halves of 2^32, cannot follow.
    w.set_lenient(0, true);
    w.after_ms(17_000);
    g.sends("1 ack 2001");
    r.takes_all();
    assert_eq!(r.sends("2001:3001 <ts 4000>"), Verdict::Absorbed);
    r.gets("1 ack 3001");
}

#[test]
fn snoop_04_a_jump_of_the_clock_is_no_storm() {
    let (w, r, g) = warm();
    sends_segments(&r, 1001, 5);
    r.takes_all();
    g.takes_all();
    // LIFE-11: an hour at once, and the guest had no chance to run.
    let target = w.now() + Duration::from_secs(3600);
    w.0.borrow_mut().outside.now = target;
    w.engine(|engine, now| {
        let mut calls = 0;
        while engine.poll_timeout().is_some_and(|at| at <= now) {
            engine.handle_timeout(now);
            calls += 1;
            assert!(calls < 10, "the wheel asks for ever");
        }
    });
    assert!(g.takes_all().len() <= 5);
    assert!(r.takes_all().len() <= 2);
}

#[test]
fn snoop_07_how_many_acks() {
    let (_, r, g) = warm();
    g.end(|end| end.window = 64_000);
    // The first sixteen are acknowledged one by one; warming up took one.
    for n in 1..16_i64 {
        r.sends_all(&[&format!("{}:{}", 1 + 1000 * n, 1001 + 1000 * n)]);
        assert_eq!(r.takes_all().len(), 1, "segment {n}");
    }
    g.sends("ack 16001");
    r.takes_all();
    // Then one for two at least, and never more than one each.
    let texts: Vec<String> =
        (16..36_i64).map(|n| format!("{}:{}", 1 + 1000 * n, 1001 + 1000 * n)).collect();
    r.sends_all(&texts.iter().map(String::as_str).collect::<Vec<_>>());
    let acks = r.takes_all().len();
    assert_eq!(acks, 10);
    // One per super-segment; a lone small one at the end of its batch.
    r.sends("36001:46001 gso 1000");
    r.gets("1 ack 46001");
    r.sends("P. 46001:46011");
    r.gets("1 ack 46011");
    r.gets_nothing();
}

#[test]
fn snoop_07_data_of_the_guest_carries_the_ack() {
    let (_, r, g) = warm();
    sends_segments(&r, 1001, 15);
    g.sends("ack 16001");
    r.takes_all();
    let inner = &mut *r.world.0.borrow_mut();
    let send = |inner: &mut crate::common::world::Inner<'_>, side, text: &str| {
        let spec = crate::common::Spec::parse(text);
        inner.send(0, side, &spec, crate::common::world::How::Honest);
    };
    use crate::common::Side::{G, R};
    send(inner, R, "16001:17001");
    send(inner, G, "1:101 ack 16001");
    inner.settle();
    let all: Vec<_> = inner.outside.conns[0].ends[0].inbox.drain(..).collect();
    assert_eq!(all.len(), 1);
    assert_eq!((all[0].range(), all[0].ack()), ((1, 101), 17_001));
}

#[test]
fn snoop_09_a_budget_too_small_passes() {
    for (budget, on) in [(10_000, false), (64 * 1024, false), (512 * 1024, true)] {
        let setup = Setup { budget_bytes: budget, ..Setup::new() };
        let (w, r, g) = setup.established();
        let state = if on { (State::On, Why::Nothing) } else { (State::Pass, Why::NoBudget) };
        assert_eq!(flow(&w, |f| (f.state(), f.why())), state, "{budget}");
        r.sends("1:1001 ack 1");
        g.gets("1:1001 ack 1");
        if !on {
            r.gets_nothing();
        }
    }
}

#[test]
fn snoop_10_three_segments_in_the_wrong_order() {
    let (_, r, g) = warm();
    // As a plain receiver would answer, newest block first.
    r.sends("3001:4001");
    r.gets("ack 1001 <sack 3001:4001>");
    r.sends("5001:6001");
    r.gets("ack 1001 <sack 5001:6001 3001:4001>");
    r.sends("7001:8001");
    r.gets("ack 1001 <sack 7001:8001 5001:6001 3001:4001>");
    r.sends("9001:10001");
    r.gets("ack 1001 <sack 9001:10001 7001:8001 5001:6001>"); // three fit beside timestamps
    r.sends("4001:5001");
    r.gets("ack 1001 <sack 3001:6001 9001:10001 7001:8001>");
    g.gets_nothing();
    r.sends("1001:2001");
    r.gets("ack 2001 <sack 3001:6001 9001:10001 7001:8001>");
    g.gets("1001:2001");
    r.sends("2001:3001");
    r.gets("ack 6001 <sack 9001:10001 7001:8001>");
    g.gets("2001:6001");
    g.gets_nothing();
}

#[test]
fn snoop_10_four_blocks_without_timestamps() {
    let (_, r, _) = Setup { ts: [false; 2], ..Setup::new() }.established();
    for n in [2, 4, 6, 8, 10_i64] {
        r.sends(&format!("{n}001:{}001", n + 1));
    }
    r.gets_last("ack 1 <sack 10001:11001 8001:9001 6001:7001 4001:5001>");
}

#[test]
fn snoop_10_the_limit_of_ranges_never_blocks_the_stream() {
    let (w, r, g) = warm();
    let ranges = limits::OOO_RANGES_MAX as i64;
    for n in 0..ranges {
        let at = 10_001 + 2000 * n;
        r.sends(&format!("{at}:{}", at + 100));
    }
    r.takes_all();
    let beyond = 10_001 + 2000 * ranges;
    let verdict = r.sends(&format!("{beyond}:{}", beyond + 100));
    assert_eq!(verdict, Verdict::Drop(DropReason::OutOfOrderLimit));
    let ack = r.gets_last_any();
    assert!(ack.sack().iter().all(|&(_, end)| i64::from(end) <= beyond), "a block it has not");
    // In order it is taken, though it touches no range.
    assert_eq!(r.sends("1001:2001"), Verdict::Absorbed);
    assert_eq!(r.gets_last_any().ack(), 2001);
    g.gets("1001:2001");
    assert_eq!(flow(&w, |f| f.out_of_order().len()), limits::OOO_RANGES_MAX);
}

/// Found by simulation (seeds 1342, 1382, 2681): those of one batch got one ACK together, so that R
/// counted fewer than it had sent behind the hole (RFC 5681 section 4.2).
#[test]
fn snoop_10_each_segment_beyond_the_limit_of_ranges_is_answered() {
    let (_, r, _) = warm();
    for n in 0..limits::OOO_RANGES_MAX as i64 {
        let at = 10_001 + 200 * n;
        r.sends(&format!("{at}:{}", at + 100));
    }
    r.takes_all();
    r.sends_all(&["40001:40101", "40201:40301", "40401:40501"]);
    let acks: Vec<u32> = r.takes_all().iter().map(|seen| seen.ack()).collect();
    assert_eq!(acks, [1001; 3]);
}

#[test]
fn snoop_11_old_and_overlapping() {
    let (_, r, g) = warm();
    r.sends("1001:3001 gso 1000");
    r.gets("ack 3001");
    g.gets("1001:3001");
    r.sends("1501:2501");
    r.gets("ack 3001 <sack 1501:2501>");
    r.sends("2501:3501");
    r.gets("ack 3501 <sack 2501:3001>");
    g.gets("3001:3501");
    g.gets_nothing();
}

/// Found by simulation: the block ended behind the acknowledgement, a FIN's place too far.
#[test]
fn snoop_11_a_duplicate_block_ends_at_the_acknowledgement() {
    let (_, r, g) = warm();
    r.sends("F. 1001:2001");
    r.gets_last("ack 2001");
    g.takes_all();
    r.is_forged("1501:2002");
    r.gets("ack 2001 <sack 1501:2001>");
    r.is_forged("F. 2001:2002");
    assert!(r.gets("ack 2001").sack().is_empty());
}

#[test]
fn snoop_11_the_first_copy_wins_out_of_order_as_well() {
    let (_, r, g) = warm();
    r.sends("2001:3001 fill A");
    r.sends("1501:3501 fill B");
    r.sends("1001:2501 fill C");
    r.gets_last("ack 3501 <sack 1501:2501>");
    let stream: Vec<u8> = g.takes_all().iter().flat_map(|s| s.payload().to_vec()).collect();
    let expected = [vec![b'C'; 500], vec![b'B'; 500], vec![b'A'; 1000], vec![b'B'; 500]].concat();
    assert!(stream == expected);
}

#[test]
fn snoop_12_the_last_byte_there_is_is_pushed() {
    let (_, r, g) = warm();
    r.sends("P. 1001:1002");
    let seen = g.gets("1001:1002");
    assert!(seen.tcp().flags.psh(), "a byte of an echo waits for nothing");
}

#[test]
fn snoop_13_urgent_data_inside_bulk_keeps_its_place() {
    let (w, r, g) = warm();
    sends_segments(&r, 1001, 3);
    r.takes_all();
    g.takes_all();
    // Not acknowledged, and not delivered behind what G has not taken yet.
    assert_eq!(r.sends("PU. 4001:4002 urg 1"), Verdict::Drop(DropReason::Draining));
    r.gets("ack 4001");
    // Bytes behind it are taken, but nobody acknowledges across the gap.
    r.sends("4002:5002");
    r.gets("ack 4001 <sack 4002:5002>");
    g.sends("ack 4001");
    r.takes_all();
    let sent = r.frame_of("PU. 4001:4002 urg 1");
    r.sends("PU. 4001:4002 urg 1");
    assert_eq!(g.gets("U. 4001:4002 urg 1").bytes, sent, "never cut, pointer and all as sent");
    g.sends("ack 4002");
    r.gets_last("ack 5002");
    g.gets("4002:5002");
    g.sends("ack 5002");
    assert_eq!(w.state(), Some(State::On));
}

/// In front of what is in the ring already G would take it for an old one (K-01).
#[test]
fn com_30_an_ack_of_r_comes_behind_the_urgent_data_that_passed() {
    let (_, r, g) = warm();
    g.sends("1:101 ack 1001");
    r.takes_all();
    r.sends("U. 1001:1011 ack 1 urg 10");
    r.sends("1011 ack 101");
    g.gets("U. 1001:1011 urg 10");
    g.gets("1011 ack 101");
}

/// Found by simulation (seed 9571): it counted as data behind the FIN, and R was answered.
#[test]
fn snoop_13_an_ack_with_urg_behind_the_fin_passes_and_asks_for_nothing() {
    let (_, r, g) = warm();
    g.sends("1:101 ack 1001");
    r.takes_all();
    r.sends("F. 1001:1001 ack 1");
    g.gets("F. 1001:1001");
    g.sends("101 ack 1002");
    r.takes_all();
    r.sends("U. 1002 ack 101 urg 1");
    g.gets("U. 1002 ack 101 urg 1");
    r.gets_nothing();
}

#[test]
fn snoop_13_urgent_data_that_the_guest_loses_is_repeated_by_r() {
    let (_, r, g) = warm();
    for _ in 0..2 {
        r.sends("U. 1001:1011 urg 10");
        g.gets("U. 1001:1011 urg 10");
        r.gets_nothing();
    }
    g.sends("ack 1011");
    r.gets("ack 1011");
}
