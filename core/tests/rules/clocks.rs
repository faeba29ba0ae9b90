//! SNOOP-04, SNOOP-05, SNOOP-30: timestamps that are void, old, outdated, or echoed.

use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{flow, warms_up};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::tcp::flow::State;

/// Clocks that stand in the upper half, seen from 0.
const UPPER: u32 = 0x9000_0000;

/// A flow whose R stands at 1001, G's stream at 1, clocks at 1 s.
fn warm() -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = Setup::new().small().established();
    w.after_ms(1000);
    warms_up(&r, &g);
    (w, r, g)
}

/// Found in review: Linux takes a `ts_recent` of 0 for void (`tcp_paws_check`); H dropped all that
/// R sent, for as long as its clock stood in the upper half.
#[test]
fn a_remote_with_a_tsval_of_0_in_its_syn_ack_is_heard() {
    for upper in [UPPER, 5] {
        let setup = Setup { guest_is_client: true, clock: [0, 5_000_000], ..Setup::new() };
        let (w, r, g) = setup.small().established();
        assert_eq!(flow(&w, |f| (f.state(), f.stats().ts_recent)), (State::On, 0));
        r.end(|end| end.clock = upper);
        r.sends("1:1001 ack 1 <ts 0 0>");
        r.gets("1 ack 1001 <ts 0 0>");
        // The same clock reaches G, which takes 0 for void as well, and is PAWS from then on.
        g.gets("1:1001 ack 1 <ts 0 0>");
        g.sends("ack 1001");
        w.after_ms(20);
        r.sends("1001:2001 ack 1 <ts 20 0>");
        g.gets("1001:2001 ack 1 <ts 20 0>");
        r.takes_all();
        assert_eq!(r.is_forged("2001:3001 ack 1 <ts 10 0>"), Verdict::Drop(DropReason::Paws));
    }
}

#[test]
fn a_remote_with_a_tsval_of_0_may_lose_its_first_segment() {
    let setup = Setup { guest_is_client: true, clock: [0, 5_000_000], ..Setup::new() };
    let (_, r, g) = setup.clone().small().established();
    r.end(|end| end.clock = UPPER);
    r.sends("1001:2001 ack 1 <ts 5>");
    r.gets("1 ack 1 <sack 1001:2001>");
    g.gets_nothing();
    r.sends("1:1001 ack 1 <ts 30>");
    r.gets("1 ack 2001 <ts - 30>");
    g.gets("1:2001 <ts 30>");
    // Nor is a pure ACK the worse for it.
    let (_, r, g) = setup.small().established();
    g.sends("1:1001 ack 1");
    r.takes_all();
    r.end(|end| end.clock = UPPER);
    r.sends("1 ack 1001 <ts 7>");
    g.gets("1 ack 1001 <ts 7>");
}

#[test]
fn a_remote_that_opens_with_a_tsval_of_0_is_heard() {
    let (w, r, g) = Setup { clock: [0, 5_000_000], ..Setup::new() }.small().established();
    r.end(|end| end.clock = UPPER);
    r.sends("1:1001 ack 1 <ts 0>");
    r.gets("1 ack 1001 <ts - 0>");
    g.gets("1:1001 <ts 0>");
    assert_eq!(w.state(), Some(State::On));
}

/// Its own clock went on; R was shown 0 for as long as that stood in the upper half.
#[test]
fn a_guest_with_a_tsval_of_0_in_its_syn_ack_keeps_its_clock() {
    let (_, r, g) = Setup { clock: [77, 0], ..Setup::new() }.small().established();
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.end(|end| end.clock = UPPER);
    g.sends("1:101 ack 1001 <ts 9>");
    r.gets("1:101 ack 1001 <ts 9>");
    r.sends("1001:2001 ack 101");
    r.gets("101 ack 2001 <ts 9>");
}

#[test]
fn one_tick_back_is_no_old_segment_and_two_are() {
    let (w, r, g) = warm();
    w.after_ms(100);
    r.sends("1001:2001 <ts 1100>");
    g.sends("ack 2001");
    r.takes_all();
    g.takes_all();
    for (seq, tsval, taken) in [("2001:2101", 1098, false), ("2001:2101", 1099, true)] {
        let verdict = r.sends(&format!("{seq} <ts {tsval}>"));
        assert_eq!(verdict == Verdict::Absorbed, taken, "{tsval}");
        r.takes_all();
    }
    // The echo and the clock shown to G do not move back.
    g.gets("2001:2101 <ts 1100>");
    r.sends("2101:2201 <ts 1099>");
    r.gets("1 ack 2201 <ts - 1100>");
    // Nor does a drop move the clock: the next one tick back is measured from the newest.
    assert_eq!(r.sends("2201:2301 <ts 1098>"), Verdict::Drop(DropReason::Paws));
}

/// Days of half-hourly signs of life, so that the flow is not forgotten.
fn days_pass(w: &World<'_>, days: u32, mut each: impl FnMut()) {
    for _ in 0..days * 48 {
        w.after_ms(1_800_000);
        each();
    }
}

/// Found in review: the old one was kept and echoed, a round trip of 25 days to R.
#[test]
fn an_outdated_clock_is_replaced_and_not_just_ignored() {
    let (w, r, g) = warm();
    r.sends("1001:2001 <ts 5000>");
    g.sends("ack 2001");
    r.takes_all();
    g.takes_all();
    // R's clock stands a little lower after that: half round, and less.
    w.set_lenient(0, true);
    days_pass(&w, 1, || {
        g.sends("1 ack 2001");
    });
    r.takes_all();
    g.takes_all();
    assert_eq!(r.sends("2001:3001 <ts 4000>"), Verdict::Absorbed);
    r.gets("1 ack 3001 <ts - 4000>");
    g.gets("2001:3001 <ts 4000>");
    g.sends("ack 3001");
    // And PAWS is on again.
    assert_eq!(r.sends("3001:4001 <ts 3000>"), Verdict::Drop(DropReason::Paws));
    r.sends("3001:4001 <ts 4100>");
    r.gets_last("1 ack 4001 <ts - 4100>");
    g.gets("3001:4001 <ts 4100>");
}

#[test]
fn a_clock_that_is_heard_of_does_not_become_outdated() {
    let (w, r, g) = warm();
    w.set_lenient(0, true); // which counts in halves of 2^32
    days_pass(&w, 26, || {
        r.sends("1001 ack 1");
        g.sends("1 ack 1001");
    });
    r.takes_all();
    g.takes_all();
    let old = r.end(|end| end.clock); // of the first second
    r.end(|end| end.clock = end.clock.wrapping_add(26 * 24 * 3_600_000 - 60_000));
    assert_eq!(r.is_forged("1001:2001 ack 1 <ts 0>"), Verdict::Drop(DropReason::Paws));
    r.end(|end| end.clock = old);
    assert_eq!(r.sends("1001:2001 ack 1"), Verdict::Absorbed);
}

/// Found by simulation (seed 621): R was shown the old one for as long as G's stood in the other
/// half, and echoed what G had not sent. Nor does H answer with it: R would take it for G's newest,
/// and drop what G says next.
#[test]
fn inv_08_an_outdated_clock_of_the_guest_is_replaced_too() {
    let (w, r, g) = warm();
    g.sends("1:101 ack 1001 <ts 5000>");
    r.takes_all();
    w.set_lenient(0, true); // the clock stands a little lower now
    days_pass(&w, 1, || {
        r.sends("1001 ack 101");
    });
    g.takes_all();
    assert_eq!(r.sends("1001:2001 ack 101"), Verdict::Absorbed);
    r.gets_nothing();
    g.gets("1001:2001 ack 101");
    g.sends("101 ack 2001 <ts 4000>");
    r.gets("101 ack 2001 <ts 4000>");
    r.sends("2001:3001 ack 101");
    r.gets("101 ack 3001 <ts 4000>");
    // Of what it says from then on the newest counts.
    g.sends("101:201 ack 3001 <ts 3900>");
    r.gets("101:201 ack 3001 <ts 4000>");
}

#[test]
fn snoop_05_every_segment_in_place_moves_the_echo() {
    let (w, r, g) = warm();
    // Data, a pure ACK, and a FIN.
    r.sends("1001:2001 <ts 1010>");
    r.gets("1 ack 2001 <ts - 1010>");
    r.sends("2001 ack 1 <ts 1020>");
    g.sends("1:101 ack 2001");
    r.gets("1:101 ack 2001 <ts - 1020>");
    r.sends("2001:2011 ack 101 <ts 1030>");
    r.gets("101 ack 2011 <ts - 1030>");
    w.after_ms(1000);
    r.sends("F. 2011 ack 101 <ts 2000>");
    g.gets_last("F. 2011");
    g.sends("101 ack 2012");
    r.gets_last("101 ack 2012 <ts - 2000>");
}

#[test]
fn snoop_05_so_does_an_ack_in_the_place_of_a_fin_that_is_not_acknowledged() {
    let (_w, r, g) = warm();
    g.stops(0);
    r.sends("F. 1001:1101 <ts 1010>");
    r.gets("1 ack 1101 <ts - 1010>");
    r.sends("1101 ack 1 <ts 1020>");
    r.gets("1 ack 1101 <ts - 1020>");
}

#[test]
fn what_g_is_echoed_is_of_the_newest_segment() {
    let (_, r, g) = warm();
    for n in 0..5_i64 {
        let (from, to) = (1 + 100 * n, 101 + 100 * n);
        g.sends(&format!("{from}:{to} ack 1001 <ts {}>", 2000 + n));
        r.takes_all();
        r.sends(&format!("1001 ack {to} <ts - {}>", 2000 + n));
        g.gets(&format!("1001 ack {to} <ts - {}>", 2000 + n));
    }
    // Also on bytes from the store, however old they are.
    g.sends("501 ack 1001 win 0 <ts 3000>");
    r.takes_all();
    r.sends("1001:2001 ack 501 <ts - 2004>");
    g.sends("501:601 ack 1001 win 0 <ts 3001>");
    r.takes_all();
    r.sends("2001 ack 601 <ts - 3001>");
    g.takes_all();
    g.sends("601 ack 1001 win 64000");
    g.gets("1001:2001 ack 601 <ts - 3001>");
}
