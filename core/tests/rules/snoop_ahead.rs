//! SNOOP-39: room ahead of a guest that is off its core, and what becomes of it.

use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, warms_up};
use nightporter_core::limits::{FLOW_BUFFER_DOUBLED_MAX, PAGE};

/// Bytes of R in a millisecond, about half of a gigabit per second.
const BURST: i64 = 60_000;

/// A VM with the default budget, whose guest can show windows of 8 MiB.
fn setup() -> Setup {
    Setup { budget_bytes: 64 << 20, arena: (4096, 128), ..Setup::new() }
}

/// A connection of a guest that has answered and leaves its core, with R's next byte.
fn away(setup: &Setup) -> (World<'static>, Peer<'static>, Peer<'static>, i64) {
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    g.stops(0);
    (w, r, g, 1001)
}

/// R sends a burst in each of so many milliseconds, as far as its window lets it. Returns where its
/// bytes end.
fn sends_on(w: &World<'_>, r: &Peer<'_>, from: i64, ms: u64) -> i64 {
    let mut next = from;
    for _ in 0..ms {
        let end = next + BURST.min(room(w, r));
        if end > next {
            r.sends(&format!("{next}:{end} gso 1000"));
            next = end;
        }
        w.after_ms(1);
    }
    r.takes_all();
    next
}

/// The bytes that R may send.
fn room(w: &World<'_>, r: &Peer<'_>) -> i64 {
    let room = w.flow(r.conn, |f| f.stats().edge_to_net - f.stats().rcv_nxt);
    room.expect("a flow").cast_signed()
}

fn reserved_bytes(w: &World<'_>) -> u64 {
    w.engine(|e, _| e.vm(GUEST).expect("a VM").reserved_pages) * PAGE as u64
}

/// G is back, and acknowledges what it gets until so much is held.
fn takes(w: &World<'_>, g: &Peer<'_>, held_most: u64) {
    g.runs();
    while flow(w, |f| f.held_bytes()) > held_most {
        let acked = g.gets_last_any().range().1;
        g.sends(&format!("ack {acked}"));
    }
}

#[test]
fn snoop_39_r_need_not_stop_while_a_guest_waits_for_its_core() {
    let (w, r, _g, first) = away(&setup());
    assert_eq!(sends_on(&w, &r, first, 60) - first, 60 * BURST);
    // All that is shown has its place, of which R has used at least a quarter.
    assert!(reserved_bytes(&w) < 8 * 1_048_576 + 2 * PAGE as u64, "{}", reserved_bytes(&w));
}

#[test]
fn snoop_39_what_was_lent_goes_back_as_the_guest_takes_it() {
    let (w, r, g, first) = away(&setup());
    let end = sends_on(&w, &r, first, 60);
    let edge = end + room(&w, &r);
    let lent = reserved_bytes(&w);
    // G is on its core, and takes it: R keeps what it was shown, and is shown no more.
    takes(&w, &g, 0);
    assert_eq!(end + room(&w, &r), edge);
    assert!(reserved_bytes(&w) < lent - 3_000_000, "{} of {lent}", reserved_bytes(&w));
    let end = sends_on(&w, &r, end, 20);
    takes(&w, &g, 0);
    let end = sends_on(&w, &r, end, 1);
    let kept = FLOW_BUFFER_DOUBLED_MAX.cast_signed() - BURST;
    assert!((kept - 2000..kept + 1000).contains(&room(&w, &r)), "{}", room(&w, &r));
    assert!(reserved_bytes(&w) <= FLOW_BUFFER_DOUBLED_MAX + 2 * PAGE as u64);
    // When it has left again, R need not stop either.
    g.stops(0);
    assert_eq!(sends_on(&w, &r, end, 90) - end, 90 * BURST);
}

#[test]
fn snoop_39_a_guest_that_has_stood_for_long_gets_no_more() {
    let (w, r, _g, first) = away(&setup());
    r.sends(&format!("{first}:{}", first + 1000));
    w.after_ms(100);
    let sent = sends_on(&w, &r, first + 1000, 100);
    assert!((1_000_000..1_100_000).contains(&sent), "{sent}");
}

#[test]
fn inv_20_half_of_a_budget_is_not_lent() {
    let small = Setup { budget_bytes: 8 << 20, ..setup() };
    let (w, r, g, first) = away(&small);
    let (r2, g2) = w.connects();
    g.runs();
    warms_up(&r2, &g2);
    g.stops(0);
    let sent = sends_on(&w, &r, first, 60) - first;
    assert!((2_900_000..=3 << 20).contains(&sent), "three eighths: {sent}");
    // The next one gets what is left of half.
    let sent = sends_on(&w, &r2, 1001, 39) - 1001;
    assert!((900_000..1_200_000).contains(&sent), "{sent}");
    assert!(reserved_bytes(&w) <= 4 << 20, "{}", reserved_bytes(&w));
    let third = w.connects();
    third.0.sends("1:1001");
    third.0.gets("1 ack 1001");
}

#[test]
fn life_12_a_late_flow_gets_no_room_ahead() {
    let (w, r, _g, first) = away(&setup());
    w.engine(|e, now| e.set_late(now, GUEST, true));
    let sent = sends_on(&w, &r, first, 60) - first;
    assert!(sent <= 256 * 1024, "{sent}");
    assert!(reserved_bytes(&w) <= 256 * 1024 + 2 * PAGE as u64, "{}", reserved_bytes(&w));
}
