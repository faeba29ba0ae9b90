//! The two-sided packet scenarios of `docs/spec.md`, one test each, by its ID.
//!
//! Left out: those about congestion offload alone (S-16, S-18, S-19, S-35, S-36) and migration
//! (S-34). S-17, S-20 and S-21 are here in the form they take without it.

mod common;

use common::segment::{fix_ip_checksum, fragments, pattern_bytes};
use common::world::{Peer, mac};
use common::{Setup, Spec, World};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::limits;
use nightporter_core::tcp::flow::{State, Why};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use zerocopy::IntoBytes;

/// R sends so many segments of 1000 bytes from `from` on, each in its own batch.
fn sends_segments(r: &Peer<'_>, from: i64, count: i64) {
    for n in 0..count {
        let at = from + 1000 * n;
        r.sends(&format!("{at}:{}", at + 1000));
    }
}

/// R sends all that H's window takes, from `from` on; returns where it ends.
fn fills_window(r: &Peer<'_>, from: i64) -> i64 {
    let mut next = from;
    let mut room = 1000;
    while room > 0 {
        let end = next + i64::from(room.min(1000));
        r.sends(&format!("{next}:{end}"));
        next = end;
        room = r.gets_last(&format!("ack {end}")).window();
    }
    next
}

#[test]
fn s_01_early_ack() {
    let (_, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001 ack 1");
    // H's own window from the first byte on: 256 KiB, less rounding slack, less what it holds.
    r.gets("1 ack 1001 win 260992");
    g.gets_nothing();
    g.runs();
    g.gets("1:1001 ack 1");
    g.sends("ack 1001");
    r.gets_nothing();
    r.sends("1001:2001 ack 1");
    r.gets("1 ack 2001");
    g.gets("1001:2001 ack 1");
    g.sends("ack 2001");
    r.gets_nothing();
}

#[test]
fn s_02_guest_drops_a_frame() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    r.gets("1 ack 1001");
    g.gets("1:1001");
    w.after_ms(249);
    g.gets_nothing();
    w.after_ms(2);
    g.gets("1:1001");
    r.gets_nothing();
    g.sends("ack 1001");
    w.after_ms(10_000);
    g.gets_nothing();
}

#[test]
fn s_03_piggyback() {
    let (_, r, g) = Setup::new().established();
    r.sends("1:1001");
    r.gets("1 ack 1001 win 260992");
    g.gets("1:1001");
    g.sends("P. 1:101 ack 1");
    let seen = r.gets("1:101 ack 1001");
    assert!(seen.ack() + seen.window() >= 64_105, "H's edge, not G's: {}", seen.window());
    r.gets_nothing();
}

#[test]
fn s_04_fin() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("F. 1:1001");
    r.gets("1 ack 1001");
    w.after_ms(1000);
    r.gets_nothing();
    g.runs();
    g.gets("F. 1:1001");
    g.sends("ack 1002");
    r.gets_last("1 ack 1002");
}

#[test]
fn s_05_rst_behind_data() {
    let (_, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:5001 gso 1000");
    r.gets("1 ack 5001");
    r.sends("R 5001");
    g.gets_nothing();
    g.runs();
    g.gets("1:5001");
    g.gets_nothing();
    g.sends("ack 5001");
    g.gets("R. 5001");
    g.gets_nothing();
}

#[test]
fn s_06_rst_not_exact() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:5001 gso 1000");
    r.gets("1 ack 5001");
    g.gets("1:5001");
    r.sends("R 5002");
    r.gets("1 ack 5001");
    for _ in 0..100 {
        w.after_ms(4);
        r.sends("R 5002");
    }
    r.gets_nothing();
    assert_eq!(w.state(), Some(State::On));
    w.after_ms(1000);
    g.takes_all();
    r.sends("R 5000");
    r.gets_nothing();
    g.gets_nothing();
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn s_07_keepalive_from_guest() {
    let (w, r, g) = Setup::new().established();
    for _ in 0..3 {
        w.after_ms(5000);
        g.sends("0 ack 1");
        r.gets("0 ack 1");
        r.sends("1 ack 1");
        g.gets("1 ack 1");
        g.gets_nothing();
    }
}

#[test]
fn s_08_keepalive_from_remote() {
    let (w, r, g) = Setup::new().established();
    g.stops(1);
    r.sends("1:5001 gso 1000");
    r.gets("1 ack 5001");
    w.after_ms(9000);
    r.sends("5000");
    r.gets("1 ack 5001");
    w.after_ms(2000);
    for _ in 0..10 {
        r.sends("5000");
        w.after_ms(1000);
    }
    r.gets_nothing();
}

#[test]
fn s_08_keepalive_with_nothing_held_is_for_the_guest() {
    // With a garbage byte or without (RFC 9293 section 3.8.4).
    for probe in ["0", "0:1 fill x"] {
        let (_, r, g) = Setup::new().established();
        g.stops(10);
        r.sends(probe);
        r.gets_nothing();
        g.runs();
        let seen = g.gets("ack 1");
        assert_eq!(seen.range().0, 0, "a segment that G has to answer");
        g.sends("1 ack 1");
        r.gets("1 ack 1");
        g.gets_nothing();
        r.gets_nothing();
    }
}

#[test]
fn s_09_zero_window() {
    let (w, r, g) = Setup::new().established();
    g.stops(1);
    let end = fills_window(&r, 1);
    assert!((260_000..=262_144 + 1).contains(&end), "H's window, as far as is reserved: {end}");
    let edge = w.flow(0, |f| f.stats().edge_to_net - f.stats().guest_una).expect("a flow") + 1;
    let closed = format!("1 ack {end} win 0");
    r.sends(&format!("{}", end - 1));
    r.gets(&closed);
    r.sends(&format!("{edge}:{}", edge + 1));
    r.gets(&closed);
    r.gets_nothing();
    g.runs();
    g.takes_all();
    g.sends("ack 64001");
    let update = r.gets(&format!("1 ack {end}"));
    assert!(update.window() >= 1000, "a useful update");
}

#[test]
fn s_09_window_probes_of_a_silent_guest_end() {
    // INV-19: with a byte beyond the edge or without, T_paused after the guest last showed life.
    for with_data in [false, true] {
        let (w, r, g) = Setup::new().established();
        g.stops(1);
        let end = fills_window(&r, 1);
        let edge = w.flow(0, |f| f.stats().edge_to_net - f.stats().guest_una).expect("a flow") + 1;
        let data = format!("{edge}:{}", edge + 1);
        let probe = if with_data { data } else { format!("{}", end - 1) };
        w.after_ms(59_000);
        r.takes_all();
        r.sends(&probe);
        r.gets(&format!("1 ack {end} win 0"));
        w.after_ms(2000);
        r.sends(&probe);
        r.gets_nothing();
    }
}

#[test]
fn s_10_edge_is_never_left() {
    let setup = Setup { scale: [Some(7), Some(14)], window: [64_000, 20_000], ..Setup::new() };
    let (_, r, g) = setup.established();
    g.shows_window(32_768);
    g.stops(0);
    let mut edge = 0;
    for n in 0..20_i64 {
        r.sends(&format!("{}:{}", 1 + 1000 * n, 1001 + 1000 * n));
        let seen = r.gets(&format!("ack {}", 1001 + 1000 * n));
        assert!(seen.ack() + seen.window() >= edge.max(20_001), "not even by less than a unit");
        edge = seen.ack() + seen.window();
    }
    g.runs();
    for n in 0..20_i64 {
        g.sends(&format!("ack {}", 1001 + 1000 * n));
    }
    for seen in r.takes_all() {
        assert!(seen.ack() + seen.window() >= edge);
        edge = seen.ack() + seen.window();
    }
}

#[test]
fn s_11_out_of_order() {
    let (_, r, g) = Setup::new().established();
    r.sends("2001:3001");
    r.gets("1 ack 1 <sack 2001:3001>");
    g.gets_nothing();
    r.sends("1:2001 gso 1000");
    r.gets("1 ack 3001");
    g.gets("1:3001");
}

#[test]
fn s_12_dsack() {
    let (_, r, g) = Setup::new().established();
    r.sends("1:1001");
    r.gets("1 ack 1001");
    r.sends("1:1001");
    r.gets("1 ack 1001 <sack 1:1001>");
    g.gets("1:1001");
    g.gets_nothing();
}

#[test]
fn s_13_overlap_conflict() {
    let (_, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001 fill A");
    r.sends("501:1501 fill B");
    r.gets("ack 1001");
    r.gets("ack 1501 <sack 501:1001>");
    g.runs();
    let seen: Vec<u8> = g.takes_all().iter().flat_map(|s| s.payload().to_vec()).collect();
    assert_eq!(seen, [vec![b'A'; 1000], vec![b'B'; 500]].concat());
}

#[test]
fn s_14_paws_at_the_guest() {
    let (w, r, g) = Setup::new().established();
    g.sends("P. 1:101 ack 1 win 0");
    r.gets("1:101 ack 1");
    r.sends("1:1001 ack 1 <ts 10>");
    r.gets("101 ack 1001");
    g.gets_nothing();
    w.after_ms(99);
    r.sends("1001 ack 101 <ts 99>");
    g.gets("1 ack 101 <ts 99>");
    g.sends("101 ack 1 win 64000");
    g.gets("1:1001 ack 101 <ts 99>");
}

#[test]
fn s_15_tsecr_is_of_the_earliest_segment() {
    let (w, r, g) = Setup::new().established();
    sends_segments(&r, 1, 16); // the quick-ACKs
    g.takes_all();
    g.sends("ack 16001");
    r.takes_all();
    w.after_ms(30);
    r.sends_all(&["16001:17001 <ts 10>", "17001:18001 <ts 20>"]);
    r.gets("1 ack 18001 <ts - 10>");
    r.gets_nothing();
}

#[test]
fn s_15_tsecr_after_loss_is_that_of_the_fill() {
    let (w, r, _g) = Setup::new().established();
    w.after_ms(50);
    r.sends("1001:2001 <ts 20>");
    r.gets("1 ack 1 <sack 1001:2001> <ts - 0>");
    r.sends("1:1001 <ts 40>");
    r.gets("1 ack 2001 <ts - 40>");
}

#[test]
fn s_17_an_ack_has_the_newest_sequence_on_the_wire() {
    let (_, r, g) = Setup::new().established();
    for n in 0..10_i64 {
        g.sends(&format!("{}:{} ack 1", 1 + 1000 * n, 1001 + 1000 * n));
    }
    r.takes_all();
    r.sends("1:1001 ack 1");
    r.gets("10001 ack 1001");
}

#[test]
fn s_20_a_guest_retransmission_carries_fresh_numbers() {
    let (w, r, g) = Setup::new().established();
    g.sends("1:1001 ack 1 <ts 0>");
    r.gets("1:1001 ack 1");
    r.sends("1:1001 ack 1");
    r.gets("1001 ack 1001");
    w.after_ms(200);
    g.sends("1:1001 ack 1 <ts 200>");
    r.gets("1:1001 ack 1001 <ts 200>");
}

#[test]
fn s_21_icmp_goes_to_the_guest_as_it_is() {
    let (w, _r, g) = Setup::new().established();
    g.sends("1:1449 ack 1");
    // Fragmentation needed, MTU 1300, quoting the first bytes of that segment.
    let quoted = g.frame_of("1:1449 ack 1");
    let mut frame = [&mac(1)[..], &mac(2)[..], &[8, 0]].concat();
    frame.extend([0x45, 0, 0, 56, 0, 1, 0, 0, 64, 1, 0, 0, 10, 0, 0, 9, 10, 0, 0, 1]);
    frame.extend([3, 4, 0, 0, 0, 0, 0x05, 0x14]);
    frame.extend(&quoted[14..42]);
    fix_ip_checksum(&mut frame, 14);
    let uplink = w.0.borrow().outside.uplink;
    let verdict = w.frame(uplink, VirtioNetHdr::default(), &frame);
    assert_eq!(verdict, Verdict::Forward(w.guest_port()));
    assert_eq!(w.0.borrow().outside.strays, [(w.guest_port(), frame)]);
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn s_22_guest_abort() {
    let (w, r, g) = Setup::new().established();
    for n in 0..10_i64 {
        g.sends(&format!("{}:{} ack 1", 1 + 1000 * n, 1001 + 1000 * n));
    }
    r.takes_all();
    r.sends("1:1001 ack 8001");
    r.gets("10001 ack 1001");
    g.takes_all();
    g.sends("R. 10001 ack 1");
    r.gets("R. 10001 ack 1001");
    assert_eq!(w.state(), Some(State::Abort));
    w.after_ms(10);
    r.sends("1001 ack 8001"); // a challenge ACK
    r.gets("R. 8001");
    g.gets_nothing();
}

#[test]
fn s_23_syn_on_a_live_flow() {
    let (_, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001");
    r.gets("1 ack 1001");
    r.is_forged("S 777");
    r.gets("1 ack 1001");
    r.sends("R 1001"); // R has rebooted and does not know that ACK
    g.runs();
    g.gets("1:1001");
    g.sends("ack 1001");
    g.gets("R. 1001");
}

#[test]
fn s_23_the_syn_of_a_rebooted_remote_is_challenged_whatever_its_timestamp() {
    for text in ["S 777 <nots>", "S 777 <ts 4000000000>"] {
        let (_, r, _g) = Setup::new().established();
        r.sends("1:1001");
        r.gets("1 ack 1001");
        r.is_forged(text);
        r.gets("1 ack 1001");
    }
}

#[test]
fn s_24_mid_stream() {
    let w = Setup::new().opens();
    let (r, g) = w.pair(&Setup::new());
    r.sends("5001:6001 ack 700");
    g.gets("5001:6001 ack 700");
    g.sends("700:800 ack 6001");
    r.gets("700:800 ack 6001");
    r.gets_nothing();
    g.gets_nothing();
    assert_eq!(w.state(), None);
}

#[test]
fn s_25_md5_ao_mptcp() {
    let md5 = "1312000102030405060708090a0b0c0d0e0f";
    let ao = "1d10000102030405060708090a0b0c0d";
    let mptcp = "1e0c00810102030405060708";
    for option in [md5, ao, mptcp] {
        let setup = Setup {
            syn_options: [option; 2],
            ts: [false; 2],
            sack: [false; 2],
            scale: [Some(7); 2],
            ..Setup::new()
        };
        let w = setup.opens();
        let (r, g) = w.pair(&setup);
        w.handshake(&r, &g);
        assert_eq!(w.state(), Some(State::Pass), "{option}");
        r.sends(&format!("1:1001 ack 1 <opt {option}>"));
        g.gets("1:1001 ack 1");
        g.sends(&format!("1:11 ack 1001 <opt {option}>"));
        r.gets("1:11 ack 1001");
        r.gets_nothing();
        g.gets_nothing();
    }
}

#[test]
fn s_26_ecn() {
    let (_, r, g) = Setup { ecn: true, ..Setup::new() }.established();
    r.sends("1:1001 ce");
    r.gets("E. 1 ack 1001 notect");
    g.gets("1:1001 ect0");
    g.sends("1:101 ack 1001 ect0");
    r.gets("E. 1:101 ack 1001 ect0");
    r.sends("1001:2001 ack 101 ect0");
    r.gets_last("E. 101 ack 2001");
    g.gets("1001:2001 ect0");
    r.sends("W. 2001:3001 ack 101 ect0");
    r.gets("101 ack 3001");
    g.gets("2001:3001 ect0");
    g.sends("E. 101:201 ack 3001");
    r.gets("101:201 ack 3001"); // G saw no CE, so it is not G's to echo
    // CE on the segment that carries CWR sets the latch again.
    r.sends("W. 3001:4001 ce");
    r.gets("E. 201 ack 4001");
}

#[test]
fn s_26_congestion_that_the_remote_reports_reaches_the_guest() {
    let (_, r, g) = Setup { ecn: true, ..Setup::new() }.established();
    g.sends("1:1001 ack 1 ect0");
    r.gets("1:1001 ect0");
    r.sends("E. 1 ack 1001");
    g.gets("E. 1 ack 1001");
    g.sends("W. 1001:2001 ack 1 ect0");
    r.gets("W. 1001:2001 ect0");
    // On a data segment as well as on a pure ACK (INV-24).
    r.sends("E. 1:1001 ack 2001 ect0");
    g.gets("E. 1:1001 ack 2001");
    r.sends("1001:2001 ack 2001 ect0");
    g.gets("1001:2001 ack 2001");
}

#[test]
fn s_27_fragments() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    g.gets("1:1001");
    g.sends("ack 1001");
    r.takes_all();
    let uplink = w.0.borrow().outside.uplink;
    let whole = r.frame_of("1001:2001");
    for frame in fragments(&whole, 800) {
        let verdict = w.frame(uplink, VirtioNetHdr::default(), &frame);
        assert_eq!(verdict, Verdict::Forward(w.guest_port()));
    }
    // The monitor does not read fragments: tell it what they were.
    w.set_lenient(0, true);
    r.gets_nothing();
    r.sends("2001:3001");
    r.gets("1 ack 1001 <sack 2001:3001>");
    g.gets_nothing();
    g.sends("ack 2001");
    r.gets("1 ack 3001");
    g.gets("2001:3001");
    g.sends("ack 3001");
    w.after_ms(5000);
    r.gets_nothing();
    g.gets_nothing();
}

#[test]
fn s_28_padding() {
    let (w, r, _g) = Setup { ts: [false; 2], ..Setup::new() }.established();
    r.sends("1 ack 1 pad");
    r.gets_nothing();
    let (rcv_nxt, first) = w.flow(0, |f| (f.stats().rcv_nxt, f.stats().guest_una)).expect("a flow");
    assert_eq!(rcv_nxt, first, "padding is no payload");
}

#[test]
fn s_29_bad_checksum() {
    let (w, r, g) = Setup::new().established();
    let verdict = r.sends("1:1001 badsum");
    assert_eq!(verdict, Verdict::Drop(DropReason::BadChecksum));
    w.after_ms(1000);
    r.gets_nothing();
    g.gets_nothing();
    r.sends("1:1001");
    r.gets("1 ack 1001");
    g.gets("1:1001");
}

#[test]
fn s_30_cookies() {
    // G's accept queue is full: it drops the third ACK, and all data with it.
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001 ack 1 <ts 0 0>");
    r.gets("1 ack 1001");
    g.gets("1:1001 ack 1 <ts 0 0>");
    for _ in 0..3 {
        w.after_ms(2000);
        assert!(!g.takes_all().is_empty(), "tried again");
        g.sends_syn_ack();
        r.gets_syn();
        r.sends("1001 ack 1 <ts 0 0>");
    }
    for seen in g.takes_all() {
        assert_eq!((seen.ack(), seen.clock[1].wrapping_add(0)), (1, seen_tsecr(&seen)));
    }
    w.after_ms(2000);
    g.gets_last("1:1001 ack 1 <ts - 0>");
    g.sends("ack 1001");
    w.after_ms(5000);
    g.gets_nothing();
}

fn seen_tsecr(seen: &common::Seen) -> u32 {
    seen.tcp().options.timestamps.expect("timestamps").tsecr
}

#[test]
fn s_31_guest_acks_the_future() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    g.gets("1:1001");
    g.sends("ack 1001");
    w.after_ms(300);
    r.sends("1001:2001");
    r.takes_all();
    g.gets("1001:2001");
    g.lies("ack 9999999");
    r.gets_nothing();
    assert_eq!(w.flow(0, |f| f.held_bytes()), Some(1000), "nothing was let go");
    g.lies("1:11 ack 9999999");
    w.after_ms(300);
    g.gets("1001:2001");
}

#[test]
fn s_32_stored_data_carries_a_fresh_ack() {
    let (w, r, g) = Setup::new().established();
    g.sends("ack 1 win 0");
    sends_segments(&r, 1, 60);
    r.takes_all();
    for n in 0..100_i64 {
        let (from, to) = (1 + 1000 * n, 1001 + 1000 * n);
        g.sends(&format!("{from}:{to} ack 1 win 0"));
        r.gets(&format!("{from}:{to} ack 60001"));
        w.after_ms(100);
        r.sends(&format!("60001 ack {to}"));
        g.gets_last(&format!("1 ack {to}"));
    }
    g.sends("100001 ack 1");
    let seen = g.takes_all();
    assert_eq!(seen.iter().map(|s| s.payload().len()).sum::<usize>(), 60_000);
    assert!(seen.iter().all(|s| s.ack() == 100_001), "a stale ack is dropped with its data (K-04)");
}

#[test]
fn s_33_daemon_kill() {
    let setup = Setup::new();
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    {
        let w = setup.opens_in(memory.as_mut_bytes());
        let (r, g) = w.connects();
        g.sends("1:5001 ack 1 gso 1000");
        r.gets("1:5001");
        g.stops(0);
        r.sends("1:1001 ack 5001");
        r.gets("5001 ack 1001");
    }
    let w = setup.reopens_in(memory.as_mut_bytes());
    let (r, g) = w.pair(&setup);
    w.set_lenient(0, true);
    assert_eq!(w.engine(|engine, now| engine.handle_restart(now)).reset, 1);
    // Exact for R, which G has sent 5000 bytes; and exact for G after its challenge ACK.
    r.gets("R. 5001 ack 1001");
    g.gets("R.");
    g.sends("5001 ack 1");
    g.gets("R. 1");
    w.after_ms(5);
    r.sends("1001 ack 4001");
    r.gets("R. 4001");
    assert_eq!(w.flow(0, |f| (f.state(), f.why())), Some((State::Abort, Why::Restart)));
}

#[test]
fn s_33_a_restart_with_nothing_owed_passes() {
    let setup = Setup::new();
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    {
        let w = setup.opens_in(memory.as_mut_bytes());
        let (r, g) = w.connects();
        r.sends("1:1001 ack 1");
        g.sends("ack 1001");
    }
    let w = setup.reopens_in(memory.as_mut_bytes());
    let (r, g) = w.pair(&setup);
    assert_eq!(w.engine(|engine, now| engine.handle_restart(now)).reset, 0);
    r.sends("1001:2001 ack 1");
    g.gets("1001:2001 ack 1");
    g.sends("1 ack 2001");
    r.gets("1 ack 2001");
}

#[test]
fn s_37_no_duplicate_acks_from_data() {
    let (_, r, g) = Setup { sack: [false; 2], ..Setup::new() }.established();
    g.sends("1:1001 ack 1");
    g.stops(0);
    for n in 0..10_i64 {
        r.sends(&format!("{}:{} ack 1", 1 + 1000 * n, 1001 + 1000 * n));
    }
    g.runs();
    let seen = g.takes_all();
    assert!(seen.iter().all(|s| !s.payload().is_empty()), "a pure ACK would be a duplicate");
    assert_eq!(seen.iter().map(|s| s.payload().len()).sum::<usize>(), 10_000);
}

#[test]
fn s_37_news_in_a_data_segment_that_cannot_be_delivered_goes_ahead_of_it() {
    let (_, r, g) = Setup::new().established();
    g.sends("1:1001 ack 1 win 0");
    r.sends("1:1001 ack 1");
    g.gets_nothing();
    r.sends("1001:2001 ack 1001");
    g.gets("1 ack 1001");
    g.gets_nothing();
}

#[test]
fn s_38_the_guest_takes_its_window_back() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    g.gets("1:1001");
    g.sends("ack 1001 win 0");
    r.takes_all();
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    g.gets_nothing();
    w.after_ms(201);
    g.gets("1000 ack 1"); // a probe (SNOOP-31)
    g.sends("ack 1001 win 0");
    w.after_ms(1000);
    g.gets_last("1000 ack 1");
    g.sends("ack 1001 win 64000");
    g.gets("1001:2001");
}

#[test]
fn s_39_urgent_data() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001");
    r.gets("1 ack 1001");
    r.sends("PU. 1001:1006 urg 5");
    r.gets("1 ack 1001");
    g.runs();
    g.gets("1:1001");
    g.gets_nothing(); // it has to wait for what is held, so R sends it again
    g.sends("ack 1001");
    r.takes_all();
    w.after_ms(200);
    r.sends("PU. 1001:1006 urg 5");
    g.gets("U. 1001:1006 urg 5");
    r.gets_nothing();
    assert_eq!(w.state(), Some(State::Drain));
    g.sends("ack 1006");
    r.gets("1 ack 1006");
    assert_eq!(w.state(), Some(State::On));
    r.sends("1006:2006");
    r.gets("1 ack 2006");
    g.gets("1006:2006");
}

#[test]
fn s_40_four_tuple_reuse() {
    let (w, r, g) = Setup::new().established();
    r.sends("F. 1:1001 ack 1");
    g.gets("F. 1:1001");
    g.sends("F. 1 ack 1002");
    r.takes_all();
    r.sends("1002 ack 2");
    g.gets("1002 ack 2");
    assert_eq!(w.flow(0, |f| (f.state(), f.why())), Some((State::Pass, Why::Closed)));
    assert_eq!(w.engine(|e, _| e.vm(w_port()).map(|vm| vm.reserved_pages)), Some(0));
    for round in 1..100_u32 {
        w.after_ms(1);
        let setup = Setup { isn: [77_000 * round, 99_000 * round], ..Setup::new() };
        let again = reconnects(&w, &setup);
        again.0.sends("1:11 ack 1");
        again.0.gets("1 ack 11");
        let seen = again.1.gets("1:11 ack 1");
        assert_eq!(seen.payload(), pattern_bytes(0, 1, 10));
        again.1.sends("F. 1 ack 11");
        again.0.takes_all();
        again.0.sends("F. 11 ack 2");
        again.1.gets_last("F. 11");
        again.1.sends("2 ack 12");
        again.0.gets_last("2 ack 12");
    }
    assert_eq!(w.0.borrow().engine.flows().count(), 1);
}

/// The guest port of every world here.
fn w_port() -> nightporter_core::port::PortId {
    nightporter_core::port::PortId(1)
}

/// A new connection with the addresses and ports of the first.
fn reconnects<'m>(w: &World<'m>, setup: &Setup) -> (Peer<'m>, Peer<'m>) {
    let (r, g) = w.pair(setup);
    r.end(|end| end.tcp_port = 40_000);
    w.handshake(&r, &g);
    (r, g)
}

#[test]
fn the_limits_used_above_are_those_of_the_specification() {
    assert_eq!(limits::T_ALIVE.as_millis(), 10_000);
    assert_eq!(limits::T_PAUSED.as_millis(), 60_000);
    assert_eq!(limits::LOCAL_RTO_MIN.as_millis(), 250);
    assert_eq!(Spec::parse("1:2 ack 3").ack, Some(3));
}
