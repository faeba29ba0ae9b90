//! BST-01: when a VM that has boost wants its core, and until when.

use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, from_uplink, warms_up};
use nightporter_core::limits::{T_ACCEPTED, T_READING, T_WANTING};
use nightporter_core::port::Local;
use nightporter_core::tcp::wanting::Claim;

/// A connection of a VM that has boost, which has nothing to see and is owed nothing.
fn begins(setup: &Setup) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let w = setup.clone().small().opens();
    w.engine(|engine, _| engine.set_boost(GUEST, true));
    let (r, g) = w.connects();
    warms_up(&r, &g);
    w.after_ms(1000);
    assert_eq!(wants(&w), None);
    (w, r, g)
}

/// The VM's claim, and its milliseconds.
fn wants(w: &World<'_>) -> Option<(Claim, u64)> {
    w.engine(|engine, now| {
        let want = engine.poll_want(now, GUEST)?;
        Some((want.claim, want.until.since(now).as_nanos().div_ceil(1_000_000)))
    })
}

const LATEST: u64 = T_WANTING.as_nanos() / 1_000_000;
/// Rounded up.
const READING: u64 = T_READING.as_nanos().div_ceil(1_000_000);

#[test]
fn bst_01_bytes_acknowledged_early_are_owed_until_the_guest_has_acknowledged_the_last() {
    let (w, r, g) = begins(&Setup::new());
    g.stops(8);
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    assert_eq!(wants(&w), Some((Claim::Bytes, LATEST)));
    w.after_ms(10);
    r.sends("2001:3001");
    g.runs(); // it has seen both, and acknowledges one
    g.sends("ack 2001");
    assert_eq!(wants(&w), Some((Claim::Bytes, LATEST)));
    w.after_ms(7);
    g.sends("ack 3001");
    assert_eq!(wants(&w), Some((Claim::Reading, READING)), "its application reads");
    w.after_ms(READING);
    assert_eq!(wants(&w), None);
}

/// How often the VM has taken some of what it was owed.
fn taken(w: &World<'_>) -> u32 {
    w.engine(|engine, now| engine.poll_want(now, GUEST)).unwrap().taken
}

#[test]
fn bst_01_what_the_guest_takes_of_what_it_is_owed_is_told() {
    let (w, r, g) = begins(&Setup::new());
    g.stops(8);
    r.sends("1001:2001");
    let before = taken(&w);
    r.sends("2001:3001");
    w.after_ms(10);
    assert_eq!(taken(&w), before, "it took nothing");
    g.runs();
    assert_eq!(taken(&w), before, "nor did it by seeing frames");
    g.sends("ack 2001");
    assert_eq!(taken(&w), before + 1, "a part");
    g.sends("ack 3001");
    assert_eq!(taken(&w), before + 2, "the rest");
    assert_eq!(taken(&w), before + 2);
}

#[test]
fn bst_01_a_guest_that_is_owed_no_bytes_takes_what_it_sees() {
    let (w, r, g) = begins(&Setup::new());
    g.sends("1:1001 ack 1001");
    g.stops(8);
    r.sends("1001 ack 1001");
    let before = taken(&w);
    w.after_ms(10);
    assert_eq!(taken(&w), before);
    g.runs();
    assert_eq!(taken(&w), before + 1);
    assert_eq!(taken(&w), before + 1);
}

#[test]
fn bst_01_a_guest_that_does_not_acknowledge_wants_its_core_for_50_ms() {
    let (w, r, g) = begins(&Setup::new());
    g.stops(8);
    r.sends("1001:2001");
    w.after_ms(LATEST - 1);
    assert_eq!(wants(&w), Some((Claim::Bytes, 1)));
    w.after_ms(1);
    assert_eq!(wants(&w), None);
    g.runs();
    g.sends("ack 2001");
    assert_eq!(wants(&w), None, "it read long ago, or nobody waits for it");
}

#[test]
fn bst_01_bytes_without_room_in_the_guest_are_not_owed() {
    let (w, r, g) = begins(&Setup::new());
    g.shows_window(0);
    g.sends("ack 1001");
    r.takes_all();
    r.sends("1001:2001");
    assert_eq!(wants(&w).filter(|(claim, _)| *claim == Claim::Bytes), None);
    g.shows_window(64_000);
    g.sends("ack 1001");
    assert_eq!(wants(&w), Some((Claim::Bytes, LATEST)), "now they are");
}

#[test]
fn bst_01_a_flow_that_goes_is_owed_nothing() {
    let (w, r, g) = begins(&Setup::new());
    g.stops(8);
    r.sends("1001:2001");
    assert_eq!(wants(&w), Some((Claim::Bytes, LATEST)));
    g.sends("ack 1001 R");
    g.runs();
    assert_eq!(wants(&w), Some((Claim::Reading, READING)));
    w.after_ms(READING);
    assert_eq!(wants(&w), None);
    w.engine(|engine, _| engine.set_boost(GUEST, false));
    w.engine(|engine, _| engine.set_boost(GUEST, true));
    let (r, g) = w.pair(&Setup::new().small());
    w.handshake(&r, &g);
    warms_up(&r, &g);
    assert_eq!(wants(&w), Some((Claim::Reading, READING)));
    w.after_ms(READING);
    assert_eq!(wants(&w), None);
}

#[test]
fn bst_01_an_ack_that_lets_data_go_is_a_turn_until_the_guest_has_seen_it() {
    let (w, r, g) = begins(&Setup::new());
    g.sends("1:1001 ack 1001");
    g.stops(8);
    r.sends("1001 ack 1001");
    assert_eq!(wants(&w), Some((Claim::Turn, LATEST)));
    w.after_ms(LATEST - 10);
    assert_eq!(wants(&w), Some((Claim::Turn, 10)));
    g.runs();
    assert_eq!(wants(&w), Some((Claim::Turn, 10)), "it has seen it, and answers");
    w.after_ms(READING - 1);
    assert_eq!(wants(&w), Some((Claim::Turn, 10 - READING + 1)));
    w.after_ms(1);
    assert_eq!(wants(&w), None);
    r.sends("1001 ack 1001"); // no news
    assert_eq!(wants(&w), None);
}

#[test]
fn bst_01_a_syn_is_a_turn_only_where_the_guest_has_lately_accepted() {
    let (w, _, g) = begins(&Setup::new());
    let (r, h) = w.pair(&Setup::new().small());
    g.stops(8);
    r.sends_syn();
    assert_eq!(wants(&w), Some((Claim::Turn, LATEST)));
    g.runs();
    h.takes_all();
    assert_eq!(wants(&w), Some((Claim::Turn, LATEST)));
    w.after_ms(READING);
    assert_eq!(wants(&w), None);
    w.after_ms(T_ACCEPTED.as_millis());
    g.stops(8);
    let (r, _) = w.pair(&Setup::new().small());
    r.sends_syn();
    assert_eq!(wants(&w), None, "it accepted more than a minute ago");
}

#[test]
fn bst_01_frames_to_groups_udp_and_icmp_begin_nothing() {
    let (w, r, g) = begins(&Setup::new());
    let data = r.frame_of("1001:2001");
    g.stops(8);
    for (at, byte, what) in [(23, 17, "UDP"), (23, 1, "ICMP"), (0, 0xff, "a group")] {
        let mut frame = data.clone();
        frame[at] = byte;
        let _ = from_uplink(&w, &frame);
        assert_eq!(wants(&w), None, "{what}");
    }
}

#[test]
fn bst_01_without_boost_nobody_wants_anything() {
    let (w, r, g) = Setup::new().established();
    g.stops(8);
    r.sends("1:1001");
    assert_eq!(wants(&w), None);
}

#[test]
fn bst_01_a_syn_to_a_station_that_nobody_has_begins_nothing() {
    let (w, _, g) = begins(&Setup { is_station: true, local: Local::Always, ..Setup::new() });
    g.stops(8);
    let (r, _) = w.pair_at(&Setup::new().small(), GUEST, 9);
    r.sends_syn();
    assert_eq!(wants(&w), None);
    g.runs();
    let (r, _) = w.pair(&Setup::new().small());
    r.sends_syn();
    assert_eq!(wants(&w), Some((Claim::Turn, LATEST)), "this one is the guest's");
}
