//! Mistakes that no test noticed when they were put into core on purpose (`make
//! mutants-independent`): each has its test here.

use crate::common::setup::ALL_FEATURES;
use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, sends_segments, warms_up};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::limits;
use nightporter_core::port::PortFeatures;
use nightporter_core::tcp::flow::State;
use nightporter_core::time::Instant;
use nightporter_core::wire::virtio_net::{GSO_NONE, GSO_TCPV4, GSO_TCPV6, VirtioNetHdr};
use nightporter_testkit::segment::Spec;
use zerocopy::IntoBytes;

#[test]
fn com_17_super_segments_to_the_guest_go_by_the_offload_of_their_own_family() {
    for (v6, tso4, tso6) in
        [(false, true, false), (false, false, true), (true, true, false), (true, false, true)]
    {
        let features = PortFeatures { tso4, tso6, ..ALL_FEATURES };
        let (_w, r, g) = Setup { v6, features, ..Setup::new() }.established();
        r.sends("1:4001 gso 1000");
        let first = g.takes_all().swap_remove(0);
        let (end, gso) = match (v6, tso4, tso6) {
            (false, true, _) => (4001, GSO_TCPV4),
            (true, _, true) => (4001, GSO_TCPV6),
            _ => (1001, GSO_NONE),
        };
        assert_eq!((first.range(), first.hdr.gso_type), ((1, end), gso));
    }
}

#[test]
fn com_17_a_change_of_features_in_mid_flow_repeats_nothing() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    g.gets("1:1001");
    let fewer = PortFeatures { tso4: false, ..ALL_FEATURES };
    w.set_features(GUEST, Some(fewer));
    g.gets_nothing();
    r.sends("1001:2001");
    g.gets("1001:2001");
}

#[test]
fn com_28_offload_turned_off_or_drained_during_the_handshake_is_off_for_that_connection() {
    for drained in [false, true] {
        let setup = Setup::new();
        let w = setup.opens();
        let (r, g) = w.pair(&setup);
        r.sends_syn();
        g.gets_syn();
        g.sends_syn_ack();
        r.gets_syn();
        w.engine(|engine, now| {
            if drained {
                engine.drain(now, GUEST);
            } else {
                engine.set_offload(now, GUEST, false);
            }
        });
        r.sends("1 ack 1");
        assert_eq!(w.state(), Some(State::Pass));
    }
}

#[test]
fn com_05_a_syn_with_an_option_nobody_understands_passes() {
    let unknown = "fd 04 12 34"; // RFC 3692: for experiments
    for syn_options in [[unknown, ""], ["", unknown]] {
        let (w, _r, _g) = Setup { syn_options, ..Setup::new() }.established();
        assert_eq!(w.state(), Some(State::Pass));
    }
}

#[test]
fn com_22_as_many_sack_blocks_as_there_is_room_for() {
    for (ts, blocks) in [([true; 2], 3), ([false; 2], 4)] {
        let (_w, r, _g) = Setup { ts, ..Setup::new() }.established();
        for at in [2001, 4001, 6001, 8001, 10_001] {
            r.sends(&format!("{at}:{}", at + 1000));
        }
        assert_eq!(r.gets_last_any().sack().len(), blocks);
    }
}

#[test]
fn snoop_07_each_segment_behind_a_hole_is_a_duplicate_ack_of_its_own() {
    let (_w, r, g) = Setup::new().established();
    sends_segments(&r, 1, 20); // the first ACKs are quick ones
    g.sends("ack 20001");
    r.takes_all();
    r.sends_all(&["21001:22001", "22001:23001", "23001:24001"]);
    let acks: Vec<u32> = r.takes_all().iter().map(|seen| seen.ack()).collect();
    assert_eq!(acks, [20_001; 3]);
}

#[test]
fn snoop_29_acks_that_move_the_window_are_no_duplicates() {
    let (_w, r, g) = Setup::new().established();
    r.sends("1:1001");
    r.sends("1001:2001");
    g.takes_all();
    for window in [59_904, 59_776, 59_648, 59_520] {
        g.sends(&format!("ack 1 win {window}"));
    }
    g.gets_nothing();
}

#[test]
fn com_30_the_window_of_a_segment_that_was_overtaken_is_not_believed() {
    let (_w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1001:2001 win 64000");
    r.sends("1:1001 win 32000");
    g.runs();
    let windows: Vec<u32> = g.takes_all().iter().map(|seen| seen.window()).collect();
    assert!(!windows.is_empty() && windows.iter().all(|&w| w == 64_000), "{windows:?}");
}

#[test]
fn inv_24_congestion_marks_are_none_of_ours_without_ecn() {
    let (_w, r, g) = Setup::new().established();
    r.sends("1 ack 1 ce");
    g.gets("1 ack 1 ce");
    r.sends("1:1001 ack 1 ce <opt 1e04aabb>"); // which H does not take over
    g.gets("1:1001 ack 1 ce <opt 1e04aabb>");
}

#[test]
fn inv_05_the_record_knows_the_edge_that_was_shown() {
    let (w, r, g) = Setup::new().established();
    for n in 0..30 {
        let at = 1 + 1000 * n;
        r.sends(&format!("{at}:{}", at + 1000));
        if n % 3 == 0 {
            g.sends(&format!("ack {at}"));
        }
        let recorded = w.engine(|e, _| e.arena().records().next().map(|(_, r)| r.edge_to_net));
        assert_eq!(recorded, Some(flow(&w, |f| f.stats().edge_to_net)));
    }
}

/// G's ring is full, so that nothing but the ACK at the end of the batch touches the flow.
#[test]
fn inv_05_the_record_knows_an_edge_that_only_the_end_of_a_batch_has_shown() {
    let (w, r, g) = Setup::new().established();
    sends_segments(&r, 1, 20); // the first ACKs are quick ones
    g.takes_all();
    g.stops(0);
    g.sends("ack 10001");
    let before = flow(&w, |f| f.stats().edge_to_net);
    r.sends("20001:21001");
    let shown = flow(&w, |f| f.stats().edge_to_net);
    assert!(shown > before);
    let recorded = w.engine(|e, _| e.arena().records().next().map(|(_, r)| r.edge_to_net));
    assert_eq!(recorded, Some(shown));
}

/// The process ends before R's reset has left: its successor sends it.
#[test]
fn life_09_a_reset_that_has_not_left_is_not_lost() {
    let setup = Setup::new();
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    {
        let w = setup.opens_in(memory.as_mut_bytes());
        let (r, g) = w.connects();
        g.stops(0);
        r.sends("1:1001");
        let mut reset = g.frame_of("R 1");
        let inner = &mut *w.0.borrow_mut();
        let (now, mut hdr) = (inner.outside.now, Default::default());
        let verdict = inner.engine.handle_frame(now, GUEST, &mut hdr, &mut reset);
        assert_eq!(verdict, Verdict::Absorbed);
    }
    let w = setup.reopens_in(memory.as_mut_bytes());
    assert_eq!(w.engine(|engine, now| engine.handle_restart(now)).reset, 1);
    let aborted = w.engine(|engine, _| engine.vm(GUEST).map(|vm| vm.counters.flows_aborted));
    assert_eq!(aborted, Some(1));
}

/// The bytes are held, but G is off its CPU and has none of them.
#[test]
fn snoop_24_g_cannot_acknowledge_what_it_was_not_given() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(0);
    r.sends("1001:2001");
    g.lies("1 ack 2001");
    assert_eq!(w.flow(0, |f| f.held_bytes()), Some(1000));
    g.runs();
    g.gets("1001:2001");
}

#[test]
fn com_17_every_field_of_the_virtio_header_has_its_two_bytes() {
    let bytes = [1, GSO_TCPV4, 0x42, 0x01, 0xb4, 0x05, 0x22, 0x03, 0x10, 0x04];
    let hdr = VirtioNetHdr {
        flags: 1,
        gso_type: GSO_TCPV4,
        hdr_len: 0x142,
        gso_size: 0x5b4,
        csum_start: 0x322,
        csum_offset: 0x410,
    };
    assert_eq!((VirtioNetHdr::parse(&bytes), hdr.emit()), (hdr, bytes));
}

/// G opens a connection; returns before it has answered R's SYN-ACK.
fn opened_by_guest(setup: &Setup) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let w = setup.opens();
    let (r, g) = w.pair(setup);
    g.sends_syn();
    r.gets_syn();
    r.sends_syn_ack();
    g.gets_syn();
    (w, r, g)
}

#[test]
fn com_28_a_reset_of_g_for_something_else_ends_no_handshake() {
    let setup = Setup { guest_is_client: true, ..Setup::new() };
    let (w, _r, g) = opened_by_guest(&setup);
    g.is_forged("R 5000");
    g.sends("1 ack 1");
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn com_26_data_on_the_third_ack_of_g_counts_as_sent() {
    let setup = Setup { guest_is_client: true, ..Setup::new() };
    let (w, r, g) = opened_by_guest(&setup);
    g.sends("1:101 ack 1");
    r.gets("1:101 ack 1");
    assert_eq!(flow(&w, |f| f.stats().net_nxt - f.stats().net_una), 100);
}

#[test]
fn com_25_a_simultaneous_open_passes_and_a_syn_in_mid_flow_does_not_make_it_pass() {
    let setup = Setup { guest_is_client: true, ..Setup::new() };
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    g.sends_syn();
    r.gets_syn();
    r.sends_syn();
    assert_eq!(w.state(), Some(State::Pass));
    let (w, r, _g) = setup.established();
    r.is_forged("S 0");
    assert_eq!(w.state(), Some(State::On));
}

#[test]
fn com_30_a_window_of_r_that_opens_by_itself_reaches_g() {
    let (_w, r, g) = Setup::new().established();
    r.sends("1 ack 1 win 65024");
    g.gets("1 ack 1 win 65024");
}

#[test]
fn snoop_04_old_data_is_always_answered_and_an_old_ack_twice_a_second_at_most() {
    let all =
        [("1001:2001 ack 1 <ts 10 0>", 3), ("1001 ack 1 <ts 10 0>", 1), ("1 ack 1 <ts 10>", 0)];
    for (old, answers) in all {
        let (w, r, _g) = Setup::new().established();
        r.sends("1:1001 ack 1 <ts 400 0>");
        w.after_ms(1000);
        r.takes_all();
        (0..3).for_each(|_| assert!(matches!(r.is_forged(old), Verdict::Drop(_))));
        assert_eq!(r.takes_all().len(), answers, "{old}");
    }
}

#[test]
fn com_28_a_syn_ack_of_r_that_is_repeated_is_known_and_another_is_not_understood() {
    for (words, on) in [("S. ack 1", true), ("S. 5000:5000 ack 1", false)] {
        let setup = Setup { guest_is_client: true, ..Setup::new() };
        let (w, r, g) = opened_by_guest(&setup);
        r.sends_syn_spec(words, &setup);
        g.gets_syn();
        g.sends("1 ack 1");
        assert_eq!(w.state() == Some(State::On), on, "{words}");
    }
}

#[test]
fn life_02_who_is_out_of_the_path_is_remembered_for_longer_than_who_has_closed() {
    let syn_options = ["fd 04 12 34", ""]; // nobody understands it: the connection passes
    let (w, _r, _g) = Setup { syn_options, ..Setup::new() }.established();
    w.after_ms(limits::T_IDLE.as_millis() - 10_000);
    assert_eq!(w.state(), Some(State::Pass));
    w.after_ms(30_000);
    assert_eq!(w.state(), None);
}

#[test]
fn snoop_04_the_clock_of_a_new_connection_is_not_outdated_however_long_the_daemon_has_run() {
    let start = Instant::from_secs(40 * 24 * 3600);
    let (_w, r, _g) = Setup { start, ..Setup::new() }.established();
    let old = format!("1:1001 ack 1 <ts {}>", 0_u32.wrapping_sub(1000));
    assert_eq!(r.is_forged(&old), Verdict::Drop(DropReason::Paws));
}

#[test]
fn snoop_15_a_reset_that_waits_shortens_no_timeout() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    g.gets("1:1001");
    r.sends("R 1001");
    w.after_ms(200);
    g.gets_nothing();
    w.after_ms(51);
    g.gets("1:1001");
}

#[test]
fn com_20_who_names_no_mss_takes_the_smallest_of_its_family() {
    for (v6, mss) in [(false, 536), (true, 1220)] {
        let setup = Setup { v6, ..Setup::new() };
        let w = setup.opens();
        let (r, g) = w.pair(&setup);
        r.sends_syn();
        g.gets_syn();
        g.sends_spec(&Spec { no_ts: true, ..Spec::parse("S. 0:0 ack 1") });
        r.gets_syn();
        r.sends("1 ack 1 <nots>");
        assert_eq!(flow(&w, |f| f.options().mss_to_guest), mss);
    }
}

#[test]
fn snoop_14_data_behind_the_fin_is_dropped_and_counted() {
    let (_w, r, _g) = Setup::new().established();
    r.sends("F. 1:1001");
    assert_eq!(r.is_forged("1002:2002"), Verdict::Drop(DropReason::OutOfWindow));
    assert_eq!(r.is_forged("501:2001"), Verdict::Absorbed, "what lies before it came twice");
    r.gets_last("ack 1001 <sack 501:1001>");
}

#[test]
fn snoop_35_a_guest_that_is_off_its_cpu_with_a_full_ring_does_not_count_as_alive() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001");
    w.after_ms(limits::T_ALIVE.as_millis() + 1000);
    r.takes_all();
    r.sends("1000"); // a keepalive
    r.gets_nothing();
}

#[test]
fn a_flow_is_found_by_the_number_that_the_operator_is_shown() {
    let (w, _r, _g) = Setup::new().established();
    w.engine(|engine, _| {
        let (id, ..) = engine.flows().next().expect("a flow");
        assert_eq!(engine.flow(id.index()).map(|(found, ..)| found), Some(id));
        assert!(engine.flow(id.index() + 1).is_none());
    });
}

#[test]
fn snoop_39_the_buffer_for_a_remote_that_sends_nothing_does_not_grow() {
    let (w, _r, g) = Setup::new().established();
    let reserved = || w.engine(|engine, _| engine.vm(GUEST).map(|vm| vm.reserved_pages));
    let before = reserved();
    g.sends("1:1001");
    assert_eq!(reserved(), before);
}

#[test]
fn snoop_39_a_flow_that_has_just_grown_to_what_g_shows_stays() {
    let (w, r, g) = Setup::new().established();
    let mut at = 1;
    for _ in 0..14 {
        sends_segments(&r, at, 50);
        at += 50_000;
        g.sends(&format!("ack {at}"));
    }
    g.sends(&format!("ack {at} win 300032"));
    assert_eq!(flow(&w, |f| (f.state(), f.stats().buffer_bytes)), (State::On, 300_032));
}

#[test]
fn snoop_16_a_reset_is_not_answered_with_a_reset() {
    let (w, r, g) = Setup::new().established();
    g.sends("R. 1 ack 1");
    r.gets("R. 1 ack 1");
    w.after_ms(10_000);
    for peer in [&r, &g] {
        peer.sends("R. 1 ack 1");
        r.gets_nothing();
        g.gets_nothing();
    }
}

#[test]
fn com_26_r_may_take_data_of_the_syn_of_g() {
    let setup = Setup { guest_is_client: true, ..Setup::new() };
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    w.set_lenient(0, true); // the SYN counts one before its data
    g.sends_syn_spec("S 0:500", &setup);
    r.gets_syn();
    r.sends_syn_spec("S. ack 501", &setup);
    g.gets_syn();
    g.sends("501 ack 1");
    assert_eq!(w.state(), Some(State::On));
}
