//! LIFE-08, LIFE-12, LIFE-13: late acknowledgements, and a drain on top of them.

use crate::common::world::Peer;
use crate::common::{Seen, Setup, World};
use crate::{GUEST, flow, sends_segments, warms_up};
use nightporter_core::tcp::flow::{State, Why};

type Ends = (World<'static>, Peer<'static>, Peer<'static>);

/// A connection with 1000 bytes of R behind it, whose VM wants late acknowledgements.
fn late(setup: &Setup) -> Ends {
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    w.engine(|e, now| e.set_late(now, GUEST, true));
    assert_eq!(flow(&w, |f| (f.state(), f.acknowledges_late())), (State::On, true));
    (w, r, g)
}

/// The right edge that R was shown last, from its segments so far; a scale of 7.
fn edge_of(seen: &Seen) -> i64 {
    i64::from(seen.ack()) + i64::from(seen.window())
}

#[test]
fn life_12_bytes_are_acknowledged_when_g_has_and_not_before() {
    let (w, r, g) = late(&Setup::new());
    sends_segments(&r, 1001, 3);
    w.after_ms(50);
    r.gets_nothing();
    g.gets_all(&["1001:2001", "2001:3001", "3001:4001"]);
    assert_eq!(flow(&w, |f| (f.held_bytes(), f.owes_nothing())), (3000, true));
    g.sends("ack 2001");
    r.gets("1 ack 2001");
    g.sends("1:101 ack 4001"); // with its data
    r.gets("1:101 ack 4001");
    r.gets_nothing();
    assert_eq!(flow(&w, |f| f.held_bytes()), 0);
}

#[test]
fn life_13_early_again_shows_all_that_is_held_at_once() {
    let (w, r, g) = late(&Setup::new());
    sends_segments(&r, 1001, 3);
    r.gets_nothing();
    w.engine(|e, now| e.set_late(now, GUEST, false));
    r.gets("1 ack 4001");
    r.sends("4001:5001");
    r.gets("1 ack 5001");
    g.takes_all();
    g.sends("ack 5001");
    assert_eq!(flow(&w, |f| f.held_bytes()), 0);
}

/// Promised bytes stay promised, and no edge moves left (INV-05).
#[test]
fn life_12_what_was_acknowledged_early_stays_so_and_the_edge_is_the_larger_of_the_two() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    r.sends("1001:2001");
    let shown = edge_of(&r.gets("1 ack 2001"));
    w.engine(|e, now| e.set_late(now, GUEST, true));
    assert!(flow(&w, |f| !f.owes_nothing()), "it has promised these bytes");
    r.sends("2001:3001");
    r.gets_nothing();
    g.takes_all();
    g.shows_window(64_000);
    g.sends("ack 2001");
    r.gets_nothing(); // R knows that, and more room than G shows
    g.sends("ack 3001");
    let seen = r.gets("1 ack 3001");
    assert!((shown..shown + 128).contains(&edge_of(&seen)), "{shown}, {}", edge_of(&seen));
    // G overtakes the edge that H had shown: R is shown the edge of G.
    g.shows_window(400_000);
    g.sends("ack 3001");
    assert_eq!(edge_of(&r.gets("1 ack 3001")), 3001 + 400_000 / 128 * 128);
    g.sends("ack 3001"); // nothing new
    r.gets_nothing();
}

#[test]
fn life_13_what_r_repeats_gets_a_bare_ack() {
    let (w, r, g) = late(&Setup::new());
    sends_segments(&r, 1001, 2);
    r.gets_nothing();
    r.sends("1001:2001");
    let seen = r.gets("1 ack 1001");
    assert!(seen.tcp().options.sack.is_empty(), "a DSACK above the ACK looks like a SACK");
    r.sends("2001:3001");
    r.gets("1 ack 1001");
    g.takes_all();
    g.sends("ack 3001");
    r.gets("1 ack 3001");
    // Nothing waits: as early.
    r.sends("2001:3001");
    r.gets("1 ack 3001 <sack 2001:3001>");
    assert_eq!(w.state(), Some(State::On));
}

/// Found by simulation: old bytes, forged or late, made H send an ACK that ends in a block.
#[test]
fn life_13_a_copy_of_acknowledged_bytes_allows_no_ack_inside_a_block() {
    let (_w, r, g) = late(&Setup::new());
    r.sends("2001:3001");
    r.gets("1 ack 1001 <sack 2001:3001>");
    r.sends("1001:2001");
    g.takes_all();
    g.sends("ack 2501");
    r.sends("1:1001");
    let acks: Vec<_> = r.takes_all().iter().map(Seen::ack).collect();
    assert!(!acks.is_empty() && acks.iter().all(|ack| *ack == 1001), "{acks:?}");
    r.sends("1001:2001");
    r.gets_last("1 ack 2501");
}

/// Found by simulation, with a guest that forwards: the first copy's clock was echoed for 12 s.
#[test]
fn snoop_05_what_r_repeats_above_a_late_ack_is_echoed() {
    let (_w, r, _g) = late(&Setup::new());
    r.sends("1001:2001 <ts 10>");
    r.gets_nothing();
    r.sends("1001:2001 <ts 20>");
    r.gets("1 ack 1001 <ts - 20>");
}

/// Found by simulation (seed 358): G's ACK in the hole that R had filled was withheld.
#[test]
fn life_13_an_ack_below_the_blocks_leaves_at_once() {
    let (_w, r, g) = late(&Setup::new());
    for at in [1001, 4001] {
        r.sends(&format!("{}:{}", at + 1000, at + 2000));
        r.gets(&format!("1 ack {at} <sack {}:{}>", at + 1000, at + 2000));
        r.sends(&format!("{at}:{}", at + 1000));
        g.takes_all();
        g.sends(&format!("ack {}", at + 500));
        r.gets_last(&format!("1 ack {}", at + 500));
        r.sends(&format!("{}:{}", at + 2000, at + 3000));
        g.takes_all();
        g.sends(&format!("ack {}", at + 3000));
        r.gets_last(&format!("1 ack {}", at + 3000));
    }
}

/// SACK blocks above an ACK that stands still are a loss of everything below them to RACK.
#[test]
fn life_13_blocks_leave_only_when_nothing_in_order_waits() {
    let (_, r, g) = late(&Setup::new());
    r.sends("1001:2001");
    r.sends("3001:4001");
    r.gets_nothing();
    g.gets("1001:2001");
    g.sends("ack 2001");
    r.gets("1 ack 2001 <sack 3001:4001>");
    r.sends("4001:5001");
    r.gets("1 ack 2001 <sack 3001:5001>");
    r.sends("2001:3001");
    r.gets_nothing(); // the hole is filled, and G has to acknowledge it
    g.gets_all(&["2001:5001"]);
    g.sends("ack 5001");
    r.gets("1 ack 5001");
}

/// An ACK that ends in a block that R was sent looks as if the block had been dropped.
#[test]
fn life_13_the_ack_moves_over_a_block_at_once() {
    let (w, r, g) = late(&Setup::new());
    r.sends("2001:5001");
    r.gets("1 ack 1001 <sack 2001:5001>");
    r.sends("1001:2001");
    g.gets("1001:5001");
    g.sends("ack 3001");
    r.gets_nothing();
    assert_eq!(flow(&w, |f| (f.held_bytes(), f.owes_nothing())), (2000, true));
    g.sends("ack 5001");
    r.gets("1 ack 5001");
    // Unless R does not wait for it any longer.
    r.sends("6001:9001");
    r.gets("1 ack 5001 <sack 6001:9001>");
    r.sends("5001:6001");
    g.gets("5001:9001");
    g.sends("ack 7001");
    r.gets_nothing();
    r.sends("5001:6001");
    r.gets("1 ack 7001");
}

/// Between two blocks there is a place for an ACK.
#[test]
fn life_13_an_ack_between_two_blocks_leaves_at_once() {
    let (_w, r, g) = late(&Setup::new());
    for at in [2001, 4001, 6001] {
        r.sends(&format!("{at}:{}", at + 1000));
        r.gets_last_any();
    }
    for at in [1001, 3001, 5001] {
        r.sends(&format!("{at}:{}", at + 1000));
    }
    r.gets_nothing();
    g.takes_all();
    for (at, acknowledged) in [(1501, 1501), (2501, 1501), (3001, 3001), (3501, 3501)] {
        g.sends(&format!("ack {at}"));
        if at == acknowledged {
            r.gets(&format!("1 ack {at}"));
        }
        r.gets_nothing();
    }
    g.sends("ack 4001");
    r.gets_nothing();
    g.sends("ack 6501"); // over the second block into the third
    r.gets_nothing();
    g.sends("ack 7001");
    r.gets("1 ack 7001");
}

/// Found by simulation (seed 5204): each ACK of G in a block made the edge a little larger.
#[test]
fn life_13_an_ack_that_waits_behind_a_block_shows_no_crumbs_of_window() {
    let (_w, r, g) = late(&Setup::new());
    g.shows_window(400_000);
    g.sends("ack 1001");
    let shown = edge_of(&r.gets("1 ack 1001"));
    r.sends("2001:5001");
    r.gets("1 ack 1001 <sack 2001:5001>");
    r.sends("1001:2001");
    g.takes_all();
    g.sends("ack 2501"); // its edge is 1500 bytes larger
    assert!(edge_of(&r.gets("1 ack 1001")) >= shown + 1000);
    for at in [2801, 3101, 3301] {
        g.sends(&format!("ack {at}"));
        r.gets_nothing();
    }
    g.sends("ack 3601");
    assert!(edge_of(&r.gets("1 ack 1001")) >= shown + 2000);
    g.sends("ack 5001");
    r.gets("1 ack 5001");
}

/// R goes back to what is not acknowledged, and sends its ACKs from there (BSD, smoltcp).
/// Found by simulation (seed 5400): bytes that lay behind a hole when the mode began were taken for
/// those of blocks, which such an R is never sent.
#[test]
fn life_12_an_r_without_sack_is_acknowledged_each_byte_that_was_behind_a_hole() {
    let (w, r, g) = Setup { sack: [false, true], ..Setup::new() }.established();
    warms_up(&r, &g);
    r.sends("2001:4001");
    r.takes_all();
    w.engine(|e, now| e.set_late(now, GUEST, true));
    r.sends("1001:2001");
    r.takes_all();
    g.gets("1001:4001");
    for ack in [2001, 3001, 4001] {
        g.sends(&format!("ack {ack}"));
        r.gets(&format!("1 ack {ack}"));
    }
}

#[test]
fn life_12_an_ack_of_r_from_the_end_of_the_acknowledged_bytes_counts() {
    let (w, r, g) = late(&Setup::new());
    g.sends("1:1001 ack 1001");
    r.gets("1:1001 ack 1001");
    sends_segments(&r, 1001, 2);
    g.takes_all();
    r.sends("1001 ack 1001");
    assert_eq!(flow(&w, |f| f.stats().net_una - f.stats().net_nxt), 0);
    g.gets("3001 ack 1001");
}

/// An R that has forgotten the connection answers an ACK of H by the number in it.
#[test]
fn life_12_an_rst_at_the_acknowledged_number_counts() {
    let (w, r, g) = late(&Setup::new());
    sends_segments(&r, 1001, 2);
    r.sends("1001:2001");
    r.gets("1 ack 1001");
    r.sends("R 1001");
    assert_eq!(flow(&w, |f| f.why()), Why::Reset);
    g.takes_all();
    g.sends("ack 3001");
    g.gets("R. 3001");
}

#[test]
fn life_08_a_flow_of_a_byte_a_second_owes_nothing_after_one_turn_of_g() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(8);
    r.sends("1001:1002");
    r.gets("1 ack 1002");
    w.engine(|e, now| e.drain(now, GUEST));
    assert!(!w.engine(|e, _| e.is_drained(GUEST)), "that byte was acknowledged");
    w.after_ms(1000);
    r.sends("1002:1003");
    g.runs();
    g.takes_all();
    g.sends("ack 1003");
    r.gets_last("1 ack 1003");
    assert!(w.engine(|e, _| e.is_drained(GUEST)));
    for at in 1003..1013 {
        r.sends(&format!("{at}:{}", at + 1));
        assert!(w.engine(|e, _| e.is_drained(GUEST)), "at {at}");
        w.after_ms(1000);
    }
}

/// A transfer without a pause leaves too: R repeats what G lacks of what it was given.
#[test]
fn life_08_a_transfer_leaves_in_its_middle() {
    let (w, r, g) = late(&Setup::new());
    g.shows_window(1 << 20);
    w.engine(|e, now| e.drain(now, GUEST));
    let mut at = 1001;
    while w.state() == Some(State::Drain) {
        assert!(at < 1_000_001, "it never leaves");
        sends_segments(&r, at, 2);
        g.takes_all();
        g.sends(&format!("ack {}", at + 1000)); // always one behind
        at += 2000;
        g.takes_all();
    }
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Operator));
    let last = r.gets_last_any();
    assert_eq!(i64::from(last.ack()), at - 1000);
}

#[test]
fn life_08_a_drain_that_is_called_off_leaves_the_flow_where_it_was() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    for reason in 0..2 {
        let at = 1001 + 2000 * reason;
        match reason {
            0 => w.engine(|e, now| e.drain(now, GUEST)),
            _ => w.engine(|e, now| e.set_offload(now, GUEST, false)),
        }
        r.sends(&format!("{at}:{}", at + 1000));
        r.gets_nothing();
        assert_eq!(w.state(), Some(State::Drain));
        w.engine(|e, now| e.set_offload(now, GUEST, true));
        assert_eq!(flow(&w, |f| (f.state(), f.acknowledges_late())), (State::On, false));
        r.gets(&format!("1 ack {}", at + 1000));
        r.sends(&format!("{}:{}", at + 1000, at + 2000));
        r.gets(&format!("1 ack {}", at + 2000));
        g.takes_all();
        g.sends(&format!("ack {}", at + 2000));
    }
}

/// A reader that stands: H owes the bytes that it has acknowledged, for as long as it takes.
#[test]
fn life_12_a_flow_whose_reader_stands_owes_until_it_reads() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    g.takes_all();
    g.shows_window(0);
    g.sends("ack 1001");
    w.engine(|e, now| e.drain(now, GUEST));
    for _ in 0..300 {
        w.after_ms(1000);
        if !g.takes_all().is_empty() {
            g.sends("ack 1001");
        }
    }
    assert_eq!(w.state(), Some(State::Drain));
    assert!(!w.engine(|e, _| e.is_drained(GUEST)));
    g.shows_window(64_000);
    g.sends("ack 1001");
    g.gets_last("1001:2001");
    g.sends("ack 2001");
    assert!(w.engine(|e, _| e.is_drained(GUEST)));
}
