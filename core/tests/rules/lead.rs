//! The time by which H is ahead of G, as the samples of `tcp/lead.rs` show it.

use crate::common::{Setup, World};
use crate::flood::floods;
use crate::{GUEST, warms_up};
use nightporter_core::tcp::lead::{Histogram, Leads};

fn leads(w: &World<'_>) -> Leads {
    w.engine(|engine, _| engine.vm(GUEST).unwrap().leads)
}

/// The samples so far: how many, and the sum of their milliseconds.
fn samples(of: &Histogram) -> (u64, u64) {
    (of.counts().iter().sum(), (of.sum_ns() + 500_000) / 1_000_000)
}

/// Those that are new since `before`.
fn new(now: &Histogram, before: &Histogram) -> (u64, u64) {
    let ((n, sum), (n_before, sum_before)) = (samples(now), samples(before));
    (n - n_before, sum - sum_before)
}

#[test]
fn an_ack_of_the_guest_is_late_by_the_time_since_that_of_the_host() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    let before = *leads(&w).acks();
    g.stops(8);
    r.sends("1001:2001");
    w.after_ms(10);
    r.sends("2001:3001");
    r.gets_all(&["1 ack 2001", "1 ack 3001"]);
    w.after_ms(20);
    g.runs();
    g.sends("ack 1501");
    assert_eq!(new(leads(&w).acks(), &before), (1, 30), "a byte of the first ACK");
    g.sends("ack 2001");
    assert_eq!(new(leads(&w).acks(), &before), (2, 60), "the rest of it");
    g.sends("1:501 ack 3001");
    assert_eq!(new(leads(&w).acks(), &before), (3, 80), "data carries it");
    g.sends("ack 3001");
    assert_eq!(new(leads(&w).acks(), &before), (3, 80), "nothing new");
}

#[test]
fn an_ack_of_the_host_that_data_of_the_guest_carries_counts_from_there() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    let before = *leads(&w).acks();
    r.sends("1001:2001");
    g.sends("1:501 ack 1001");
    r.takes_all();
    w.after_ms(7);
    g.sends("ack 2001");
    assert_eq!(new(leads(&w).acks(), &before), (1, 7));
}

#[test]
fn a_host_that_acknowledges_late_is_never_ahead() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    w.engine(|engine, now| engine.set_late(now, GUEST, true));
    let before = *leads(&w).acks();
    g.stops(8);
    r.sends("1001:2001");
    w.after_ms(10);
    g.runs();
    g.sends("ack 2001");
    r.gets_last("ack 2001");
    assert_eq!(new(leads(&w).acks(), &before), (0, 0));
}

#[test]
fn a_send_is_early_by_the_time_until_the_guest_has_seen_the_ack_that_allowed_it() {
    let (w, r, g) = floods(&Setup::new());
    let texts: Vec<_> = (0..40).map(|n| format!("{}:{}", n * 1000 + 1, n * 1000 + 1001)).collect();
    g.sends_all(&texts.iter().map(String::as_str).collect::<Vec<_>>());
    r.gets_all(&["1:10001 ack 1"]);
    assert_eq!(samples(leads(&w).sends()), (0, 0), "no ACK allowed the first flight");
    g.stops(8);
    r.sends("ack 10001");
    r.gets_last("10001:30001");
    w.after_ms(25);
    assert_eq!(samples(leads(&w).sends()), (0, 0), "the guest is away");
    g.runs();
    w.after_ms(1);
    assert_eq!(samples(leads(&w).sends()), (1, 25));
}

#[test]
fn a_send_whose_ack_the_guest_has_seen_already_is_not_early() {
    let (w, r, g) = floods(&Setup::new());
    g.sends("1:1001");
    r.gets("1:1001");
    r.sends("ack 1001");
    g.gets("1 ack 1001");
    w.after_ms(5);
    g.sends("1001:2001");
    r.gets("1001:2001");
    w.after_ms(5);
    assert_eq!(samples(leads(&w).sends()), (0, 0));
}
