//! What a flood of SYNs can and cannot do.

use super::*;
use crate::flow::key::tests::key;

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Offer {
    isn: u32,
    mss: u16,
    shift: u8,
    flags: u8,
}

fn offer(isn: u32) -> Offer {
    Offer { isn, mss: 1460, shift: 7, flags: 3 }
}

fn on_port(port: u16, n: u32) -> FlowKey {
    FlowKey { port, ..key(n) }
}

#[test]
fn a_syn_ack_finds_what_the_newest_syn_offered_once() {
    let mut cache = SynCache::new([1, 2, 3, 4]);
    cache.insert(&key(1), offer(10));
    cache.insert(&key(1), offer(11));
    assert_eq!(cache.lookup(&key(2)), None);
    assert_eq!(cache.lookup(&key(1)), Some(offer(11)));
    assert_eq!(cache.take(&key(1)), Some(offer(11)));
    assert_eq!(cache.take(&key(1)), None);
}

#[test]
fn life_01_a_million_syns_to_one_vm_leave_the_records_of_another_alone() {
    let mut cache = SynCache::new([1, 2, 3, 4]);
    for n in 0..100 {
        cache.insert(&on_port(1, n), offer(n));
    }
    for n in 0..1_000_000 {
        cache.insert(&on_port(2, n), offer(n));
    }
    let kept = (0..100).filter(|&n| cache.lookup(&on_port(1, n)) == Some(offer(n))).count();
    assert_eq!(kept, 100);
    let bytes: usize = cache.ports.iter().flatten().map(|sets| size_of_val(&**sets)).sum();
    assert_eq!(bytes, 2 * SYN_RECORDS_PER_PORT * size_of::<SynRecord<Offer>>());
}

#[test]
fn life_01_under_a_flood_most_honest_handshakes_are_still_learned() {
    let mut cache = SynCache::new([1, 2, 3, 4]);
    let mut learned = 0;
    for round in 0..1000 {
        cache.insert(&key(u32::MAX - round), offer(round));
        // An eighth of the table's worth of SYNs arrives before G answers.
        for n in 0..128 {
            cache.insert(&key(round * 128 + n), offer(n));
        }
        learned += u32::from(cache.take(&key(u32::MAX - round)) == Some(offer(round)));
    }
    // Each of 128 hits the set with 1/256 and the way with 1/4: (1 - 1/1024)^128 = 88 %.
    assert!((840..=920).contains(&learned), "{learned} of 1000");
}

#[test]
fn which_record_goes_depends_on_the_seeds() {
    let survivors = |seed| {
        let mut cache = SynCache::new([seed, 2, 3, 4]);
        for n in 0..4096 {
            cache.insert(&key(n), offer(n));
        }
        (0..4096).filter(|&n| cache.lookup(&key(n)).is_some()).collect::<Vec<_>>()
    };
    assert_eq!(survivors(1), survivors(1));
    assert_ne!(survivors(1), survivors(9));
    assert!(survivors(1).len() <= SYN_RECORDS_PER_PORT);
}

#[test]
fn a_removed_port_takes_its_records_along() {
    let mut cache = SynCache::new([1, 2, 3, 4]);
    cache.insert(&on_port(5, 1), offer(1));
    cache.remove_port(5);
    cache.remove_port(77);
    assert_eq!(cache.lookup(&on_port(5, 1)), None);
}

#[test]
fn a_record_with_the_largest_payload_costs_32_bytes() {
    assert_eq!(size_of::<SynRecord<[u8; 24]>>(), 32);
}
