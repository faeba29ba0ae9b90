//! The offers of R's SYN, until G's SYN-ACK makes a flow of them (LIFE-01).
//!
//! A SYN-ACK does not repeat R's options, so they are remembered, in 32 bytes, before there is a
//! flow. Anybody can send SYNs, so the memory is fixed: each guest port has its own small table
//! (one VM cannot push another's records out, INV-20), taken at its first SYN, and a new record
//! replaces a random one when its set is full. A lost record makes that connection PASS for life.
//!
//! A key has two records at most, of its first SYN and of its newest with another number: a forged
//! SYN does not push out R's, and G's SYN-ACK acknowledges the one that it answers.
//!
//! A record is found by a 64-bit keyed hash of the flow key. Two keys collide with probability
//! 2^-64; the payload should hold R's ISN, which the SYN-ACK must match, so that even then nothing
//! wrong is learned.

use ahash::RandomState;

use super::key::FlowKey;
use crate::limits::SYN_RECORDS_PER_PORT;

/// Records that share a place: a new one replaces one of these.
const WAYS: usize = 4;
const SETS: usize = SYN_RECORDS_PER_PORT / WAYS;
const _: () = assert!(SETS.is_power_of_two() && SYN_RECORDS_PER_PORT == SETS * WAYS);

#[derive(Clone, Copy, Debug)]
struct SynRecord<P> {
    /// Hash of the key; 0 is empty.
    tag: u64,
    payload: P,
    /// The key had another when this one came.
    second: bool,
}

type Sets<P> = Box<[[SynRecord<P>; WAYS]]>;

/// SYN records of all guest ports. `P` is the content of a record, at most 16 bytes.
#[derive(Debug)]
pub struct SynCache<P> {
    ports: Vec<Option<Sets<P>>>,
    hasher: RandomState,
    random: u64,
}

impl<P: Copy + Default> SynCache<P> {
    const RECORD_FITS: () = assert!(size_of::<SynRecord<P>>() <= 32);

    /// An empty cache. `seeds` must be unpredictable for remotes.
    #[must_use]
    pub fn new(seeds: [u64; 4]) -> Self {
        const { Self::RECORD_FITS };
        Self {
            ports: Vec::new(),
            hasher: RandomState::with_seeds(seeds[0], seeds[1], seeds[2], seeds[3]),
            random: seeds.iter().fold(1, |x, s| x ^ s).max(1),
        }
    }

    /// Remembers a SYN, in place of an earlier one with the same key that `is_copy` of it, or that
    /// is the newer one of two.
    pub fn insert(&mut self, key: &FlowKey, payload: P, is_copy: impl Fn(&P) -> bool) {
        let tag = self.tag(key);
        let random = self.next_random();
        let port = usize::from(key.port);
        if self.ports.len() <= port {
            self.ports.resize_with(port + 1, || None);
        }
        let empty = [SynRecord { tag: 0, payload: P::default(), second: false }; WAYS];
        let sets = self.ports[port].get_or_insert_with(|| vec![empty; SETS].into_boxed_slice());
        let set = &mut sets[set_of(tag)];
        if let Some(copy) = set.iter_mut().find(|r| r.tag == tag && is_copy(&r.payload)) {
            copy.payload = payload;
            return;
        }
        let first = set.iter().position(|r| r.tag == tag && !r.second);
        let way = set
            .iter()
            .position(|r| r.tag == tag && r.second)
            .or_else(|| set.iter().position(|r| r.tag == 0))
            .or(first.filter(|way| *way == random % WAYS).map(|way| (way + 1) % WAYS))
            .unwrap_or(random % WAYS);
        set[way] = SynRecord { tag, payload, second: first.is_some() };
    }

    /// There is a SYN with this key.
    #[must_use]
    pub fn has(&self, key: &FlowKey) -> bool {
        self.records(key).next().is_some()
    }

    /// The one SYN with this key that `is` it. `None`: none is, or both are.
    #[must_use]
    pub fn only(&self, key: &FlowKey, is: impl Fn(&P) -> bool) -> Option<P> {
        let mut those = self.records(key).filter(is);
        those.next().filter(|_| those.next().is_none())
    }

    /// Forgets all SYNs with this key.
    pub fn forget(&mut self, key: &FlowKey) {
        let tag = self.tag(key);
        let sets = self.ports.get_mut(usize::from(key.port)).and_then(Option::as_mut);
        let set = sets.map(|sets| &mut sets[set_of(tag)]);
        set.into_iter().flatten().filter(|r| r.tag == tag).for_each(|r| r.tag = 0);
    }

    fn records(&self, key: &FlowKey) -> impl Iterator<Item = P> {
        let tag = self.tag(key);
        let sets = self.ports.get(usize::from(key.port)).and_then(Option::as_ref);
        let set = sets.map(|sets| &sets[set_of(tag)]);
        set.into_iter().flatten().filter(move |r| r.tag == tag).map(|r| r.payload)
    }

    /// The port is gone: its records go too.
    pub fn remove_port(&mut self, port: u16) {
        if let Some(sets) = self.ports.get_mut(usize::from(port)) {
            *sets = None;
        }
    }

    fn tag(&self, key: &FlowKey) -> u64 {
        self.hasher.hash_one(key).max(1)
    }

    /// xorshift64 (Marsaglia 2003): the state is never 0.
    fn next_random(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 33) as u32 as usize
    }
}

/// The set bits are not those that tell the records of a set apart: the whole tag is compared.
fn set_of(tag: u64) -> usize {
    (tag >> 32) as u32 as usize % SETS
}

#[cfg(test)]
mod tests;
