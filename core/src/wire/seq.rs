//! TCP sequence numbers: 32 bits on the wire, compared serially (RFC 9293 section 3.4), and
//! unwrapped to 64 bits everywhere else (COM-01).

use core::fmt;
use core::ops::{Add, Sub};

/// A sequence or acknowledgement number as the wire has it, modulo 2^32.
///
/// It has no `Ord`: serial order is not transitive, so say [`Seq::lt`] and its siblings.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, Default)]
pub struct Seq(pub u32);

impl Seq {
    /// The wire form of an unwrapped number.
    #[inline]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "modulo 2^32 is the point")]
    pub const fn wrap(unwrapped: u64) -> Self {
        Self(unwrapped as u32)
    }

    /// The number nearest to `near` whose wire form is `self`: within -2^31 .. 2^31 of it.
    ///
    /// Start unwrapped numbers at 2^32 or more, so that what lies before the first of them is
    /// positive too (below zero the result wraps round 2^64, and still wraps back to `self`).
    #[inline]
    #[must_use]
    pub const fn unwrap(self, near: u64) -> u64 {
        near.wrapping_add_signed(self.after(Self::wrap(near)) as i64)
    }

    /// How far `self` lies after `other`; negative if before.
    #[inline]
    #[must_use]
    pub const fn after(self, other: Self) -> i32 {
        self.0.wrapping_sub(other.0).cast_signed()
    }

    /// `self` comes before `other`.
    #[inline]
    #[must_use]
    pub const fn lt(self, other: Self) -> bool {
        self.after(other) < 0
    }

    /// `self` is `other` or comes before it.
    #[inline]
    #[must_use]
    pub const fn le(self, other: Self) -> bool {
        self.after(other) <= 0
    }

    /// `self` comes after `other`.
    #[inline]
    #[must_use]
    pub const fn gt(self, other: Self) -> bool {
        self.after(other) > 0
    }

    /// `self` is `other` or comes after it.
    #[inline]
    #[must_use]
    pub const fn ge(self, other: Self) -> bool {
        self.after(other) >= 0
    }
}

impl Add<u32> for Seq {
    type Output = Self;
    #[inline]
    fn add(self, bytes: u32) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

impl Sub<u32> for Seq {
    type Output = Self;
    #[inline]
    fn sub(self, bytes: u32) -> Self {
        Self(self.0.wrapping_sub(bytes))
    }
}

impl Sub for Seq {
    type Output = u32;
    /// Bytes from `earlier` up to `self`, modulo 2^32.
    #[inline]
    fn sub(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }
}

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests;
