//! Numbers modulo 2^32 (RFC 9293 section 3.4): sequence numbers and timestamps.

use core::ops::{Add, Sub};

/// All numbers there are.
const CIRCLE: i64 = 1 << 32;

/// A number on a circle of 2^32.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Seq(pub u32);

impl Seq {
    /// The number of a place that is counted in 64 bits.
    #[must_use]
    pub const fn wrap(place: u64) -> Self {
        let [.., a, b, c, d] = place.to_be_bytes();
        Self(u32::from_be_bytes([a, b, c, d]))
    }

    /// The place with this number that is nearest to `near`, and none below 0.
    #[must_use]
    pub fn unwrap(self, near: u64) -> u64 {
        near.saturating_add_signed(self.after(Self::wrap(near)).into())
    }

    /// Steps from `other` to `self` by the shorter way: negative if `self` comes first.
    #[must_use]
    pub fn after(self, other: Self) -> i32 {
        let ahead = (i64::from(self.0) - i64::from(other.0)).rem_euclid(CIRCLE);
        let shorter = if ahead >= CIRCLE / 2 { ahead - CIRCLE } else { ahead };
        i32::try_from(shorter).unwrap_or(i32::MIN)
    }

    /// `self` comes before `other`.
    #[must_use]
    pub fn lt(self, other: Self) -> bool {
        self.after(other) < 0
    }

    /// `self` comes after `other`.
    #[must_use]
    pub fn gt(self, other: Self) -> bool {
        self.after(other) > 0
    }

    /// `self` comes after `other`, or is it.
    #[must_use]
    pub fn ge(self, other: Self) -> bool {
        self.after(other) >= 0
    }
}

impl Add<u32> for Seq {
    type Output = Self;

    fn add(self, steps: u32) -> Self {
        Self(self.0.wrapping_add(steps))
    }
}

impl Sub<u32> for Seq {
    type Output = Self;

    fn sub(self, steps: u32) -> Self {
        Self(self.0.wrapping_sub(steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_place_is_taken_on_either_side_of_a_wrap() {
        let far = 7 << 32;
        assert_eq!(Seq(5).unwrap(far - 3), far + 5);
        assert_eq!(Seq(0xffff_fffe).unwrap(far + 9), far - 2);
        assert_eq!(Seq(0xffff_fffe).unwrap(0), 0, "there is none below 0");
        for place in [0, 1, far - 1, far, far + 0x7fff_ffff] {
            assert_eq!(Seq::wrap(place).unwrap(place), place);
        }
    }

    #[test]
    fn order_is_that_of_the_shorter_way() {
        let last = Seq(u32::MAX);
        assert!(last.lt(last + 1) && (last + 1).gt(last) && last.ge(last));
        assert_eq!((last + 6).after(last), 6);
        assert_eq!((Seq(3) - 6).after(Seq(3)), -6);
        assert_eq!(Seq(0x8000_0000).after(Seq(0)), i32::MIN);
    }
}
