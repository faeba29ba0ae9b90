//! The host takes or answers all segments that a current Linux does: SNOOP-04, and the table "Where
//! Linux takes more" of the specification.

use crate::common::Setup;
use crate::common::world::Peer;
use crate::{flow, warms_up};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::tcp::flow::State;

/// Timestamps were agreed on; R's last one is 1000 of its clock, and G's stream stands at 1.
fn warm(setup: &Setup) -> (crate::World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = setup.clone().small().established();
    w.after_ms(1000);
    warms_up(&r, &g);
    (w, r, g)
}

#[test]
fn snoop_04_a_keepalive_without_a_timestamp_is_answered() {
    for keepalive in ["1000 ack 1 <nots>", "1000:1001 ack 1 <nots>"] {
        // G owes nothing, so it is asked itself.
        let (w, r, g) = warm(&Setup::new());
        w.after_ms(10_000);
        assert!(matches!(r.sends(keepalive), Verdict::Forward(_)), "{keepalive}");
        g.gets_last(keepalive);
        g.sends("1 ack 1001");
        r.gets("1 ack 1001 <ts - 1000>");
        // It is off its core and is owed bytes: H answers.
        let (_w, r, g) = warm(&Setup::new());
        g.stops(0);
        r.sends("1001:2001");
        r.takes_all();
        r.sends(&keepalive.replace("1000:1001", "2000:2001").replace("1000 ", "2000 "));
        r.gets_last("1 ack 2001");
    }
}

#[test]
fn snoop_04_data_without_a_timestamp_is_taken_and_the_echo_stays() {
    let (_w, r, g) = warm(&Setup::new());
    r.sends("1001:2001 ack 1 <ts 1100>");
    r.gets("1 ack 2001 <ts - 1100>");
    assert_eq!(r.sends("2001:3001 ack 1 <nots>"), Verdict::Absorbed);
    r.gets("1 ack 3001 <ts - 1100>");
    // In front of it something is missing.
    assert_eq!(r.sends("4001:5001 ack 1 <nots>"), Verdict::Absorbed);
    r.gets("1 ack 3001 <sack 4001:5001>");
    r.sends("3001:4001 ack 1 <nots>");
    r.gets("1 ack 5001 <ts - 1100>");
    // G gets the bytes with R's newest clock.
    let seen = g.takes_all();
    assert!(seen.iter().all(|s| s.tcp().options.timestamps.is_some()));
    assert_eq!(seen.iter().map(|s| s.payload().len()).sum::<usize>(), 4000);
    // PAWS stands for those that have one.
    assert_eq!(r.is_forged("5001:6001 ack 1 <ts 1098>"), Verdict::Drop(DropReason::Paws));
}

/// Found by simulation (seed 52): H echoed a clock of G that was never there.
#[test]
fn snoop_04_a_third_ack_without_a_timestamp_echoes_the_syn_ack() {
    let setup = Setup::new().small();
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    r.sends_syn();
    g.gets_syn();
    g.sends_syn_ack();
    r.gets_syn();
    r.sends("1 ack 1 <nots>");
    g.gets("1 ack 1 <nots>");
    [&r, &g].iter().for_each(|peer| peer.end(|end| end.acked = 1));
    r.sends("1:1001 ack 1 <nots>");
    g.gets("1:1001 ack 1 <ts - 0>");
}

#[test]
fn snoop_04_an_ack_and_a_fin_without_a_timestamp_are_taken() {
    let (w, r, g) = warm(&Setup::new());
    g.sends("1:1001 ack 1001");
    r.takes_all();
    r.sends("1001 ack 1001 <nots>");
    g.gets("1001 ack 1001 <nots>");
    g.stops(0);
    r.sends("F. 1001:1101 ack 1001 <nots>");
    r.gets("1001 ack 1101");
    g.runs();
    g.gets("F. 1001:1101 ack 1001");
    g.sends("1001 ack 1102");
    r.gets("1001 ack 1102");
    assert_eq!(flow(&w, nightporter_core::tcp::flow::Flow::state), State::On);
}

#[test]
fn snoop_04_an_ack_without_a_timestamp_frees_what_h_sends_for_the_guest() {
    let (w, r, g) = warm(&Setup { floods: true, ..Setup::new() });
    for n in 0..5_i64 {
        g.sends(&format!("{}:{} ack 1001", 1 + 1000 * n, 1001 + 1000 * n));
    }
    r.takes_all();
    r.sends("1001 ack 5001 <nots>");
    g.gets_last("ack 5001");
    assert_eq!(flow(&w, |f| f.stats().net_una - f.stats().net_nxt), 0);
}

/// A clock of microseconds has gone half way round in 36 minutes.
#[test]
fn snoop_04_a_clock_of_microseconds_may_be_silent_for_40_minutes() {
    const HALF: u32 = 2_400_000_000;
    let (w, r, g) = warm(&Setup::new());
    w.after_ms(2_400_000);
    r.end(|end| end.clock = end.clock.wrapping_add(HALF));
    assert_eq!(r.sends("1001:2001 ack 1"), Verdict::Absorbed);
    g.gets("1001:2001");
    // R has let go of G's clock as well. It hears of it from G.
    r.gets_nothing();
    g.end(|end| end.clock = end.clock.wrapping_add(HALF));
    g.sends("1 ack 2001");
    r.gets("1 ack 2001");
    g.sends("1:101 ack 2001");
    r.gets("1:101 ack 2001");
    assert_eq!(r.is_forged("2001:3001 ack 101 <ts 0>"), Verdict::Drop(DropReason::Paws));
}

#[test]
fn snoop_04_a_duplicate_ack_that_was_overtaken_goes_on_and_an_older_one_is_silent() {
    let (w, r, g) = warm(&Setup::new());
    r.sends("1001:2001 ack 1 <ts 1300>");
    g.sends("1:101 ack 2001");
    w.after_ms(1000);
    r.takes_all();
    g.takes_all();
    assert_eq!(r.sends("1001 ack 1 <ts 1200>"), Verdict::Drop(DropReason::Paws));
    assert_eq!(r.sends("2001 ack 101 <ts 1298>"), Verdict::Drop(DropReason::Paws), "news");
    r.gets_last("ack 2001");
    w.after_ms(1000);
    assert!(matches!(r.sends("2001 ack 1 <ts 1200>"), Verdict::Forward(_)));
    g.gets("2001 ack 1 <ts 1300>");
    assert_eq!(r.sends("2001 ack 1 <ts 1000>"), Verdict::Drop(DropReason::Paws), "too old");
    r.gets("101 ack 2001");
}

#[test]
fn com_20_a_small_mss_is_kept_to_down_to_48_bytes_with_options() {
    for (mss, payload) in [(48, 48), (36, 36), (20, 36)] {
        let (_w, r, g) = Setup { guest_mss: Some(mss), ..Setup::new() }.small().established();
        r.sends("1:1001");
        let seen = g.gets("1:1001");
        assert_eq!(seen.hdr.gso_size, payload, "an MSS option of {} bytes", mss + 12);
    }
}

#[test]
fn snoop_19_a_mark_on_an_ack_reaches_the_guest() {
    let (_w, r, g) = warm(&Setup { ecn: true, ..Setup::new() });
    g.sends("1:1001 ack 1001");
    r.takes_all();
    r.sends("1001 ack 1001 ce");
    g.gets("1001 ack 1001 ce");
}

#[test]
fn com_28_a_forged_segment_in_the_handshake_changes_nothing() {
    for forged in ["1 ack 70000", "1:501 ack 70000", "F. 1 ack 70000", "P 1:501", "S. 9000 ack 9"] {
        let setup = Setup::new();
        let w = setup.opens();
        let (r, g) = w.pair(&setup);
        r.sends_syn();
        g.gets_syn();
        g.sends_syn_ack();
        r.gets_syn();
        r.is_forged(forged);
        g.takes_all();
        r.sends("1 ack 1");
        assert_eq!(w.state(), Some(State::On), "{forged}");
        r.sends("1:1001");
        r.gets("1 ack 1001");
    }
}

#[test]
fn com_28_a_forged_syn_in_the_handshake_and_its_answer_change_nothing() {
    let setup = Setup::new();
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    r.sends_syn();
    g.gets_syn();
    g.sends_syn_ack();
    r.gets_syn();
    r.is_forged("S 90000");
    g.takes_all();
    g.sends("1 ack 1"); // `tcp_check_req`: it is out of the window
    r.takes_all();
    r.sends("1 ack 1");
    assert_eq!(w.state(), Some(State::On));
    r.sends("1:1001");
    r.gets("1 ack 1001");
}

/// G's SYN-ACK says by its number which SYN it answers: the first that it got, whatever came since
/// (`tcp_check_req`), or the newest if it knew none.
#[test]
fn com_28_forged_syns_before_the_answer_do_not_take_the_place_of_rs() {
    for forged in [[&[][..], &["S 90000", "S 80000"]], [&["S 90000"], &[]]] {
        let setup = Setup::new();
        let w = setup.opens();
        let (r, g) = w.pair(&setup);
        for syn in forged[0] {
            r.is_forged(syn);
        }
        r.sends_syn();
        for syn in forged[1] {
            r.is_forged(syn);
        }
        g.takes_all();
        g.sends_syn_ack();
        r.gets_syn();
        r.sends("1 ack 1");
        g.takes_all();
        assert_eq!(w.state(), Some(State::On), "{forged:?}");
        r.sends("1:1001");
        r.gets("1 ack 1001");
        g.gets_all(&["1:1001"]);
    }
}

#[test]
fn com_28_a_forged_answer_to_a_guest_that_opens_changes_nothing() {
    for forged in ["S. 9000 ack 70000", "1 ack 70000", "S. 9000 ack -5"] {
        for is_answered in [false, true] {
            let setup = Setup { guest_is_client: true, ..Setup::new() };
            let w = setup.opens();
            let (r, g) = w.pair(&setup);
            g.sends_syn();
            r.gets_syn();
            if is_answered {
                r.sends_syn_ack();
            }
            r.is_forged(forged);
            r.sends_syn_ack();
            g.takes_all();
            g.sends("1 ack 1");
            assert_eq!(w.state(), Some(State::On), "{forged}, answered: {is_answered}");
        }
    }
}

/// A fabric may tag what it carries with a priority, from the first frame on or later.
#[test]
fn com_10_a_priority_tag_is_no_vlan_to_a_flow() {
    for from_the_first in [true, false] {
        let vlan = if from_the_first { vec![[0x81, 0, 0x60, 0]] } else { vec![] };
        let (w, r, g) = Setup { vlan, ..Setup::new() }.small().established();
        warms_up(&r, &g);
        let mut frame = r.frame_of("1001:2001 ack 1");
        if from_the_first {
            frame.drain(12..16);
        } else {
            frame.splice(12..12, [0x81, 0, 0xa0, 0]);
        }
        assert_eq!(crate::from_uplink(&w, &frame), Verdict::Absorbed);
        r.gets("1 ack 2001");
        g.gets("1001:2001");
    }
}
