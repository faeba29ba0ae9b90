//! The effects of a flood of SYNs.

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

/// A SYN, in place of a copy of it.
fn put(cache: &mut SynCache<Offer>, key: &FlowKey, offer: Offer) {
    cache.insert(key, offer, |earlier| earlier.isn == offer.isn);
}

/// The only SYN.
fn found(cache: &SynCache<Offer>, key: &FlowKey) -> Option<Offer> {
    cache.only(key, |_| true)
}

#[test]
fn a_syn_ack_finds_the_first_syn_and_the_newest_by_its_number() {
    let mut cache = SynCache::new([1, 2, 3, 4]);
    put(&mut cache, &key(1), offer(10));
    put(&mut cache, &key(1), Offer { mss: 536, ..offer(10) });
    assert_eq!(found(&cache, &key(1)), Some(Offer { mss: 536, ..offer(10) }), "its newest copy");
    for isn in 11..20 {
        put(&mut cache, &key(1), offer(isn));
    }
    let of = |cache: &SynCache<Offer>, isn| cache.only(&key(1), |o| o.isn == isn).is_some();
    let known: Vec<u32> = (10..20).filter(|isn| of(&cache, *isn)).collect();
    assert_eq!(known, [10, 19]);
    assert_eq!(found(&cache, &key(1)), None, "which of the two?");
    assert!(cache.has(&key(1)) && !cache.has(&key(2)));
    put(&mut cache, &key(1), Offer { mss: 536, ..offer(10) });
    put(&mut cache, &key(1), offer(20));
    assert!(of(&cache, 10) && of(&cache, 20), "a copy of the first does not make it the newest");
    cache.forget(&key(1));
    assert!(!cache.has(&key(1)));
}

/// Also where no place is free: it takes another one's, not its own first one's.
#[test]
fn com_28_a_second_syn_never_pushes_out_the_first() {
    let mut cache = SynCache::new([1, 2, 3, 4]);
    for n in 0..100_000 {
        put(&mut cache, &key(n), offer(n));
    }
    for n in 200_000..200_500 {
        put(&mut cache, &key(n), offer(1));
        put(&mut cache, &key(n), offer(2));
        assert!(cache.only(&key(n), |o| o.isn == 1).is_some(), "{n}");
        assert!(cache.only(&key(n), |o| o.isn == 2).is_some(), "{n}");
    }
}

#[test]
fn life_01_a_million_syns_to_one_vm_leave_the_records_of_another_alone() {
    let mut cache = SynCache::new([1, 2, 3, 4]);
    for n in 0..100 {
        put(&mut cache, &on_port(1, n), offer(n));
    }
    for n in 0..1_000_000 {
        put(&mut cache, &on_port(2, n), offer(n));
    }
    let kept = (0..100).filter(|&n| found(&cache, &on_port(1, n)) == Some(offer(n))).count();
    assert_eq!(kept, 100);
    let bytes: usize = cache.ports.iter().flatten().map(|sets| size_of_val(&**sets)).sum();
    assert_eq!(bytes, 2 * SYN_RECORDS_PER_PORT * size_of::<SynRecord<Offer>>());
}

#[test]
fn life_01_under_a_flood_most_honest_handshakes_are_still_learned() {
    let mut cache = SynCache::new([1, 2, 3, 4]);
    let mut learned = 0;
    for round in 0..1000 {
        put(&mut cache, &key(u32::MAX - round), offer(round));
        // An eighth of the table's worth of SYNs arrives before G answers.
        for n in 0..128 {
            put(&mut cache, &key(round * 128 + n), offer(n));
        }
        learned += u32::from(found(&cache, &key(u32::MAX - round)) == Some(offer(round)));
        cache.forget(&key(u32::MAX - round));
    }
    // Each of 128 hits the set with 1/256 and the way with 1/4: (1 - 1/1024)^128 = 88 %.
    assert!((840..=920).contains(&learned), "{learned} of 1000");
}

#[test]
fn which_record_goes_depends_on_the_seeds() {
    let survivors = |seed| {
        let mut cache = SynCache::new([seed, 2, 3, 4]);
        for n in 0..4096 {
            put(&mut cache, &key(n), offer(n));
        }
        (0..4096).filter(|&n| cache.has(&key(n))).collect::<Vec<_>>()
    };
    assert_eq!(survivors(1), survivors(1));
    assert_ne!(survivors(1), survivors(9));
    assert!(survivors(1).len() <= SYN_RECORDS_PER_PORT);
}

#[test]
fn a_removed_port_takes_its_records_along() {
    let mut cache = SynCache::new([1, 2, 3, 4]);
    put(&mut cache, &on_port(5, 1), offer(1));
    cache.remove_port(5);
    cache.remove_port(77);
    assert!(!cache.has(&on_port(5, 1)));
}

#[test]
fn a_record_with_the_largest_payload_costs_32_bytes() {
    assert_eq!(size_of::<SynRecord<[u64; 2]>>(), 32);
}
