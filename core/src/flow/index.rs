//! Slot numbers by hash: open addressing with linear probing.
//!
//! A word is the upper half of a hash and a slot number plus one; an empty place is 0. So a look-up
//! that hits reads one cache line, and compares the key of a slot that is almost surely the right
//! one. With a million flows in memory, every further line that has to be read adds to the time.
//!
//! The lower half of the hash chooses a shard. Each shard grows on its own, so one growth moves one
//! shard at most: about a thousand entries of a million.

/// Entries per shard when the index is full.
const SHARD_ENTRIES: usize = 1024;
/// The upper half of a hash.
const TAG: u64 = !0 << 32;

/// See the module doc.
#[derive(Debug)]
pub(super) struct Index(Box<[Shard]>);

#[derive(Debug, Default)]
struct Shard {
    /// A power of two long and at most 3/4 full.
    words: Box<[u64]>,
    len: usize,
}

impl Index {
    /// Made for about `capacity` entries. Takes no memory for them yet.
    pub(super) fn new(capacity: u32) -> Self {
        let shards = (capacity as usize).div_ceil(SHARD_ENTRIES).next_power_of_two();
        Self((0..shards).map(|_| Shard::default()).collect())
    }

    /// The slot with this hash that `is_it`.
    #[inline(always)]
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        self.0[self.shard(hash)].find(hash, is_it)
    }

    /// The word that a look-up of this hash reads first.
    pub(super) fn first_word(&self, hash: u64) -> u64 {
        let shard = &self.0[self.shard(hash)];
        shard.words.get(shard.home(hash)).copied().unwrap_or(0)
    }

    /// Adds a slot whose key is not there yet.
    pub(super) fn insert(&mut self, hash: u64, slot: u32) {
        self.0[self.shard(hash)].insert(hash, slot);
    }

    /// Takes a slot out that was added with this hash.
    pub(super) fn remove(&mut self, hash: u64, slot: u32) {
        self.0[self.shard(hash)].remove(hash, slot);
    }

    /// Bytes of all shards, and the entries of the largest.
    #[cfg(test)]
    pub(super) fn bytes_and_largest(&self) -> (usize, usize) {
        let bytes = self.0.iter().map(|s| size_of::<Shard>() + size_of_val(&*s.words)).sum();
        (bytes, self.0.iter().map(|s| s.len).max().unwrap_or(0))
    }

    fn shard(&self, hash: u64) -> usize {
        (hash & !TAG) as usize & (self.0.len() - 1)
    }
}

impl Shard {
    #[inline(always)]
    fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mut at = self.home(hash);
        loop {
            let word = *self.words.get(at).filter(|&&word| word != 0)?;
            if (word ^ hash) & TAG == 0 && is_it(slot_of(word)) {
                return Some(slot_of(word));
            }
            at = self.after(at);
        }
    }

    fn insert(&mut self, hash: u64, slot: u32) {
        self.len += 1;
        if self.len * 4 > self.words.len() * 3 {
            let longer = vec![0; (self.words.len() * 2).max(4)].into_boxed_slice();
            for word in core::mem::replace(&mut self.words, longer) {
                if word != 0 {
                    self.put(word);
                }
            }
        }
        self.put(hash & TAG | (u64::from(slot) + 1));
    }

    fn put(&mut self, word: u64) {
        let mut at = self.home(word);
        while self.words[at] != 0 {
            at = self.after(at);
        }
        self.words[at] = word;
    }

    fn remove(&mut self, hash: u64, slot: u32) {
        let word = hash & TAG | (u64::from(slot) + 1);
        let mut gap = self.home(hash);
        while self.words[gap] != word {
            debug_assert_ne!(self.words[gap], 0, "removed what is not there");
            if self.words[gap] == 0 {
                return;
            }
            gap = self.after(gap);
        }
        // Later entries move up, unless that would put one before its home.
        let mut at = self.after(gap);
        while self.words[at] != 0 {
            let from_home = self.distance(self.home(self.words[at]), at);
            if from_home >= self.distance(gap, at) {
                self.words[gap] = self.words[at];
                gap = at;
            }
            at = self.after(at);
        }
        self.words[gap] = 0;
        self.len -= 1;
    }

    /// Where an entry would be if no other were in its way, by the part of the hash in its word.
    fn home(&self, hash_or_word: u64) -> usize {
        (hash_or_word >> 32) as usize & self.mask()
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & self.mask()
    }

    fn distance(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & self.mask()
    }

    fn mask(&self) -> usize {
        self.words.len().wrapping_sub(1)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is a slot number plus one")]
fn slot_of(word: u64) -> u32 {
    word as u32 - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_look_up_seldom_goes_far() {
        let mut index = Index::new(1000);
        for slot in 0..1000 {
            // By 2^64 over the golden ratio, which spreads them evenly.
            index.insert(u64::from(slot + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15), slot);
        }
        let shard = &index.0[0];
        let held = (0..shard.words.len()).filter(|&at| shard.words[at] != 0);
        let far: usize = held.map(|at| shard.distance(shard.home(shard.words[at]), at)).sum();
        assert!(far < 4 * 1000, "{far} words of 1,000 entries are read in vain");
    }

    proptest! {
        /// Hashes of few values, so that runs of full places are long, collide, and go round.
        #[test]
        fn what_was_added_is_found_until_it_is_removed(
            ops in prop::collection::vec((0_u32..24, 0_u64..5), 1..300),
        ) {
            let mut index = Index::new(24);
            let mut model = BTreeMap::new();
            for (slot, home) in ops {
                let hash = (30 + home) << 32 | 7;
                if let Some(hash) = model.remove(&slot) {
                    index.remove(hash, slot);
                } else {
                    index.insert(hash, slot);
                    model.insert(slot, hash);
                }
                for n in 0..24 {
                    let found = (30..35).find(|h| index.find(h << 32 | 7, |s| s == n).is_some());
                    prop_assert_eq!(found, model.get(&n).map(|hash| hash >> 32));
                }
                let words = &index.0[0].words;
                prop_assert_eq!(words.iter().filter(|&&w| w != 0).count(), model.len());
                prop_assert_eq!(index.bytes_and_largest().1, model.len());
            }
        }
    }
}
