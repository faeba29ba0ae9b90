//! SYNs that went on to G, of which H must not answer the copies: R would get two SYN-ACKs with
//! different numbers, and G's may not fit what H grants (ACC-13).
//!
//! Anybody can send SYNs, so the place does not grow with them: a few bits of a table for each. A
//! connection of which all bits were set by others is taken for one of them, and is for G. A flood
//! ends the offload for two minutes, and nothing else.

use ahash::RandomState;

use crate::flow::key::FlowKey;
use crate::limits::T_OPENING;
use crate::time::Instant;

/// Bits of a table, of which each SYN has four: after 4,000 SYNs in a minute, they say of one other
/// in 400 that it was there.
const BITS: usize = 1 << u16::BITS;

/// The SYNs of one or two minutes.
#[derive(Debug)]
pub(crate) struct Passed {
    hasher: RandomState,
    /// Those since `turned_at`, and those of the minute before.
    tables: [Vec<u64>; 2],
    turned_at: Instant,
}

impl Passed {
    /// None. `seeds` must be unpredictable for remotes.
    pub(crate) fn new(seeds: [u64; 4]) -> Self {
        let [a, b, c, d] = seeds;
        let hasher = RandomState::with_seeds(a, b, c, d);
        Self { hasher, tables: [vec![], vec![]], turned_at: Instant::ZERO }
    }

    /// R's SYN goes on to G.
    pub(crate) fn on_passed(&mut self, now: Instant, key: &FlowKey) {
        self.turn(now);
        let hash = self.hasher.hash_one(key);
        let table = &mut self.tables[0];
        table.resize(BITS / 64, 0);
        for (word, bit) in places(hash) {
            table[word] |= bit;
        }
    }

    /// A SYN of this connection has gone on to G within a minute, or it looks so.
    pub(crate) fn has(&mut self, now: Instant, key: &FlowKey) -> bool {
        self.turn(now);
        let hash = self.hasher.hash_one(key);
        let has_all = |table: &Vec<u64>| {
            !table.is_empty() && places(hash).all(|(word, bit)| table[word] & bit != 0)
        };
        self.tables.iter().any(has_all)
    }

    /// A table is used for a minute, and read for one more.
    fn turn(&mut self, now: Instant) {
        if now.since(self.turned_at) <= T_OPENING {
            return;
        }
        if now.since(self.turned_at) > T_OPENING.saturating_mul(2) {
            self.tables[0].clear();
        }
        self.tables.swap(0, 1);
        self.tables[0].clear();
        self.turned_at = now;
    }
}

/// The places of a SYN in a table: a word, and its bit.
fn places(hash: u64) -> impl Iterator<Item = (usize, u64)> {
    let [a, b, c, d, e, f, g, h] = hash.to_le_bytes();
    let places = [[a, b], [c, d], [e, f], [g, h]].map(u16::from_le_bytes);
    places.into_iter().map(|place| (usize::from(place / 64), 1 << (place % 64)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;
    use crate::wire::packet::{IpAddr16, IpVersion};

    fn key(n: u32) -> FlowKey {
        let [a, b, c, d] = n.to_be_bytes();
        FlowKey {
            g_addr: IpAddr16::from_v4([10, 0, 0, 1]),
            r_addr: IpAddr16::from_v4([a, b, c, d]),
            vlan: 0,
            g_port: 80,
            r_port: 1,
            port: 1,
            version: IpVersion::V4,
        }
    }

    #[test]
    fn a_syn_is_known_for_a_minute_and_few_others_are_taken_for_one() {
        let mut passed = Passed::new([1, 2, 3, 4]);
        let at = Instant::from_secs;
        assert!(!passed.has(at(1), &key(0)));
        (0..4000).for_each(|n| passed.on_passed(at(100), &key(n)));
        let known = |passed: &mut Passed, at, keys: std::ops::Range<u32>| {
            keys.filter(|n| passed.has(at, &key(*n))).count()
        };
        let last = at(100) + T_OPENING;
        assert_eq!(known(&mut passed, last, 0..4000), 4000);
        assert!(known(&mut passed, last, 10_000..20_000) < 100);
        // And a copy is known for as long, again.
        passed.on_passed(last, &key(0));
        assert!(passed.has(last + T_OPENING, &key(0)));
        let later = last + T_OPENING.saturating_mul(2) + Duration::from_secs(2);
        assert_eq!(known(&mut passed, later, 0..4000), 0);
    }
}
