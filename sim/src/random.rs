//! The only source of chance: the seed.

use rand_core::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// A stream of numbers that is the same on every machine for the same seed and name.
///
/// Every part of the world has a stream of its own, so that taking one fault out of a plan leaves
/// the chances of all others as they were; shrinking depends on it.
#[derive(Clone, Debug)]
pub struct Random(Xoshiro256PlusPlus);

impl Random {
    /// The stream called `name` of `seed`.
    #[must_use]
    pub fn new(seed: u64, name: &str) -> Self {
        // FNV-1a: the name must select a stream, not hide anything.
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325, step);
        Self(Xoshiro256PlusPlus::seed_from_u64(seed ^ name))
    }

    /// Any 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Below `n`, which is at least 1. The bias is below n / 2^64.
    pub fn below(&mut self, n: u64) -> u64 {
        let wide = u128::from(self.bits()) * u128::from(n);
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// From `from` up to and including `to`.
    pub fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True `ppm` times in a million.
    pub fn ppm(&mut self, ppm: u32) -> bool {
        self.below(1_000_000) < u64::from(ppm)
    }

    /// True `percent` times in a hundred.
    pub fn percent(&mut self, percent: u32) -> bool {
        self.ppm(percent.saturating_mul(10_000))
    }

    /// One of `choices`, which is not empty.
    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        let at = self.below(choices.len() as u64);
        choices[usize::try_from(at).unwrap_or(0)].clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_the_same_everywhere_and_another_name_is_another_stream() {
        let mut link = Random::new(7, "link");
        let first = [link.bits(), link.bits()];
        let mut again = Random::new(7, "link");
        assert_eq!(first, [again.bits(), again.bits()]);
        assert_ne!(first[0], Random::new(7, "guest").bits());
        assert_ne!(first[0], Random::new(8, "link").bits());
    }

    #[test]
    fn numbers_stay_in_their_range_and_reach_its_ends() {
        let mut random = Random::new(1, "range");
        let drawn: std::collections::BTreeSet<u64> =
            (0..200).map(|_| random.within(3, 6)).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [3, 4, 5, 6]);
        assert!(!random.ppm(0) && random.ppm(1_000_000));
    }
}
