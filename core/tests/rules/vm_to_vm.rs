//! COM-32: both ends are VMs of one engine; each has its inbound pipe, chained inside.

use crate::common::setup::ALL_FEATURES;
use crate::common::world::Peer;
use crate::common::{Setup, World};
use nightporter_core::port::PortFeatures;
use nightporter_core::tcp::flow::State;

fn pair() -> (World<'static>, Peer<'static>, Peer<'static>) {
    Setup { remote_is_vm: true, ..Setup::new() }.established()
}

/// The states of the two flows.
fn states(w: &World<'_>) -> Vec<State> {
    w.0.borrow().engine.flows().map(|(_, _, f)| f.state()).collect()
}

#[test]
fn com_32_both_flows_are_on() {
    let (w, _, _) = pair();
    assert_eq!(states(&w), [State::On, State::On]);
}

#[test]
fn com_32_early_ack_and_piggyback() {
    let (_, r, g) = pair();
    g.stops(0);
    r.sends("1:1001 ack 1 partial");
    r.gets("1 ack 1001");
    g.gets_nothing();
    g.runs();
    g.gets("1:1001 ack 1");
    g.sends("P. 1:101 ack 1001 partial");
    r.gets_last("1:101 ack 1001");
    g.gets_last("1001 ack 101"); // H's, before R has run
    r.sends("1001 ack 101");
    g.gets_nothing(); // G knows
}

#[test]
fn com_32_the_sender_is_stopped_instead() {
    // R, a VM too, sends and loses its CPU: G's answers are acknowledged and wait for it.
    let (_, r, g) = pair();
    r.sends("1:1001 ack 1");
    g.gets_last("1:1001");
    r.takes_all();
    r.stops(0);
    for n in 0..10_i64 {
        g.sends(&format!("{}:{} ack 1001", 1 + 1000 * n, 1001 + 1000 * n));
    }
    g.gets_last("1001 ack 10001");
    r.gets_nothing();
    r.runs();
    let bytes: usize = r.takes_all().iter().map(|s| s.payload().len()).sum();
    assert_eq!(bytes, 10_000);
}

#[test]
fn com_32_both_stop_in_turn_and_each_direction_is_whole() {
    let (w, r, g) = pair();
    let mut at = [1_i64, 1];
    let mut got = [1_i64, 1];
    for round in 0..40 {
        if round % 3 == 0 {
            g.stops(0);
        } else {
            g.runs();
        }
        if round % 4 == 0 {
            r.stops(0);
        } else {
            r.runs();
        }
        for _ in 0..4 {
            r.sends(&format!("{}:{} ack {}", at[0], at[0] + 1000, got[1]));
            g.sends(&format!("{}:{} ack {}", at[1], at[1] + 1000, got[0]));
            at = at.map(|n| n + 1000);
        }
        for (peer, i) in [(&g, 0), (&r, 1)] {
            for seen in peer.takes_all() {
                let (from, to) = seen.range();
                assert!(i64::from(from) <= got[i], "a hole\n{}", w.trace());
                got[i] = got[i].max(i64::from(to));
            }
        }
        w.after_ms(10);
    }
    r.runs();
    g.runs();
    for _ in 0..10 {
        for (peer, i) in [(&g, 0), (&r, 1)] {
            for seen in peer.takes_all() {
                got[i] = got[i].max(i64::from(seen.range().1));
            }
        }
        r.sends(&format!("{} ack {}", at[0], got[1]));
        g.sends(&format!("{} ack {}", at[1], got[0]));
    }
    assert_eq!(got, at, "{}", w.trace());
}

#[test]
fn com_32_loss_inside_one_of_them_is_repaired_there() {
    let (w, r, g) = pair();
    r.sends("1:1001 ack 1");
    g.gets_last("1:1001"); // and loses it
    r.takes_all();
    w.after_ms(260);
    g.gets_last("1:1001");
    r.gets_nothing();
    g.sends("ack 1001");
}

#[test]
fn com_32_closing_leaves_nothing_behind() {
    let (w, r, g) = pair();
    r.sends("F. 1:1001 ack 1");
    r.gets_last("1 ack 1001");
    g.gets_last("F. 1:1001");
    g.sends("1 ack 1002");
    r.gets_last("1 ack 1002");
    g.sends("F. 1:501 ack 1002");
    r.gets_last("F. 1:501 ack 1002");
    g.gets_last("1002 ack 501");
    r.sends("1002 ack 502");
    g.gets_last("1002 ack 502");
    assert_eq!(states(&w), [State::Pass, State::Pass]);
    let ports: Vec<_> = w.0.borrow().outside.rings.iter().map(|ring| ring.port).collect();
    for port in ports {
        assert_eq!(w.engine(|e, _| e.vm(port).map(|vm| vm.reserved_pages)), Some(0));
    }
}

#[test]
fn com_32_a_reset_ends_both() {
    let (w, r, g) = pair();
    g.stops(0);
    r.sends("1:1001 ack 1");
    r.takes_all();
    r.sends("R. 1001 ack 1");
    g.runs();
    g.gets("1:1001");
    g.sends("ack 1001");
    assert!(g.gets_last_any().tcp().flags.rst());
    assert_eq!(states(&w), [State::Abort, State::Abort]);
    r.takes_all();
    w.after_ms(62_000);
    assert!(states(&w).is_empty());
}

#[test]
fn com_32_a_vm_that_goes_away_resets_the_other() {
    let (w, r, g) = pair();
    g.stops(0);
    r.sends("1:1001 ack 1");
    r.takes_all();
    let port = w.guest_port();
    w.set_lenient(0, true);
    w.engine(|e, now| e.handle_guest_gone(now, port));
    w.after_ms(2000);
    assert!(r.gets_last_any().tcp().flags.rst());
    g.gets_nothing();
}

#[test]
fn com_32_super_segments_between_a_driver_with_and_one_without() {
    let (w, r, g) = pair();
    let port = w.guest_port();
    w.set_features(port, Some(PortFeatures::default()));
    r.sends("1:20001 ack 1 gso 1000");
    let seen = g.takes_all();
    assert!(seen.iter().all(|s| s.payload().len() <= 1000 && !s.hdr.needs_csum()));
    assert_eq!(seen.iter().map(|s| s.payload().len()).sum::<usize>(), 20_000);
    r.gets_last("1 ack 20001");
    w.set_features(port, Some(ALL_FEATURES));
}
