//! The Internet checksum (RFC 1071): sums, pseudo-headers and incremental updates (RFC 1624).
//!
//! Sums are kept in 64 bits and folded to 16 late. A folded sum of 0xffff and one of 0 are the same
//! number in one's complement; only a sum over nothing but zeroes folds to 0.

/// Adds up a checksum over any number of pieces, of any length and alignment.
///
/// ```
/// use nightporter_core::wire::checksum::Checksum;
/// let mut c = Checksum::default();
/// c.add_bytes(&[0x00, 0x01, 0xf2]);
/// c.add_bytes(&[0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
/// assert_eq!(c.fold(), 0xddf2); // RFC 1071 section 3
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Checksum {
    sum: u64,
    /// An odd number of bytes came so far: the next one is the low half of a 16-bit word.
    odd: bool,
}

impl Checksum {
    /// Starts from a sum that was made before, such as a pseudo-header's.
    #[inline]
    #[must_use]
    pub const fn new(sum: u64) -> Self {
        Self { sum, odd: false }
    }

    /// Adds the next bytes of the checksummed range.
    #[inline]
    pub fn add_bytes(&mut self, bytes: &[u8]) {
        if self.odd {
            // Every byte sits in the other half of its word: RFC 1071 section 2 (B), byte order.
            self.sum += u64::from(fold(sum(bytes, 0)).swap_bytes());
        } else {
            self.sum = sum(bytes, self.sum);
        }
        self.odd ^= bytes.len() % 2 == 1;
    }

    /// The sum so far in 16 bits, not complemented (the value of a partial checksum field).
    #[inline]
    #[must_use]
    pub const fn fold(self) -> u16 {
        fold(self.sum)
    }

    /// The checksum: the value for a field that was zero; zero if the range is intact.
    #[inline]
    #[must_use]
    pub const fn finish(self) -> u16 {
        !self.fold()
    }
}

/// `acc` plus the big-endian 16-bit words of `bytes`; an odd last byte is a word's high half.
///
/// To sum several pieces of which some are odd use [`Checksum`]. `acc` may be any sum of fewer than
/// 2^32 words made by this module.
#[inline]
#[must_use]
pub fn sum(bytes: &[u8], acc: u64) -> u64 {
    // The sum of words is the same in either byte order but for a final swap, and words may be
    // added many at a time if carries come round (RFC 1071 section 2): so add machine words, in two
    // sums, because an addition has to wait for the carry of the one before.
    let (mut total, mut second) = (Sum::default(), Sum::default());
    let (blocks, rest) = bytes.as_chunks::<64>();
    for block in blocks {
        for [a, b] in block.as_chunks::<8>().0.as_chunks::<2>().0 {
            total.add(u64::from_ne_bytes(*a));
            second.add(u64::from_ne_bytes(*b));
        }
    }
    total.add(second.sum);
    total.carries += second.carries;
    let (words, mut rest) = rest.as_chunks::<8>();
    for word in words {
        total.add(u64::from_ne_bytes(*word));
    }
    if let Some((half, tail)) = rest.split_first_chunk() {
        total.add(u64::from(u32::from_ne_bytes(*half)));
        rest = tail;
    }
    total.add(u64::from(match *rest {
        [a, b, c] => u32::from_ne_bytes([a, b, c, 0]),
        [a, b] => u32::from_ne_bytes([a, b, 0, 0]),
        [a] => u32::from_ne_bytes([a, 0, 0, 0]),
        _ => 0,
    }));
    acc + u64::from(u16::from_be(total.fold()))
}

/// A 64-bit sum and how often it overflowed, which is an addition with carry in most machines.
#[derive(Default)]
struct Sum {
    sum: u64,
    carries: u64,
}

impl Sum {
    #[inline(always)]
    fn add(&mut self, word: u64) {
        let (sum, carry) = self.sum.overflowing_add(word);
        self.sum = sum;
        self.carries += u64::from(carry);
    }

    #[inline(always)]
    fn fold(&self) -> u16 {
        let (sum, carry) = self.sum.overflowing_add(self.carries);
        fold32(u32::from(fold(sum)) + u32::from(carry))
    }
}

/// A sum in 16 bits with the carries added back.
#[inline]
#[must_use]
pub const fn fold(sum: u64) -> u16 {
    // The upper half of `x + (x with its halves swapped)` is both halves and their carry.
    fold32((sum.wrapping_add(sum.rotate_left(32)) >> 32) as u32)
}

/// As [`fold`].
#[inline]
#[must_use]
pub const fn fold32(sum: u32) -> u16 {
    (sum.wrapping_add(sum.rotate_left(16)) >> 16) as u16
}

/// The sum of an IPv4 pseudo-header (RFC 9293 section 3.1); `len` is header and payload of layer 4.
#[inline]
#[must_use]
pub fn pseudo_header_v4(src: [u8; 4], dst: [u8; 4], protocol: u8, len: u32) -> u64 {
    u64::from(u32::from_be_bytes(src))
        + u64::from(u32::from_be_bytes(dst))
        + u64::from(protocol)
        + u64::from(len)
}

/// The sum of an IPv6 pseudo-header (RFC 8200 section 8.1); `len` is header and payload of layer 4.
#[inline]
#[must_use]
pub fn pseudo_header_v6(src: [u8; 16], dst: [u8; 16], protocol: u8, len: u32) -> u64 {
    let words = |a: [u8; 16]| {
        let a = u128::from_be_bytes(a);
        let half = |x: u128| (x & 0xffff_ffff) as u64;
        half(a) + half(a >> 32) + half(a >> 64) + half(a >> 96)
    };
    words(src) + words(dst) + u64::from(protocol) + u64::from(len)
}

/// The checksum field `check` after a 16-bit word at an even offset went from `old` to `new`:
/// `HC' = ~(~HC + ~m + m')` (RFC 1624 equation 3, never equation 2; COM-14).
#[inline]
#[must_use]
pub const fn update16(check: u16, old: u16, new: u16) -> u16 {
    !fold32(!check as u32 + !old as u32 + new as u32)
}

/// As [`update16`] for two neighbouring words.
#[inline]
#[must_use]
pub const fn update32(check: u16, old: u32, new: u32) -> u16 {
    !fold(!check as u64 + !old as u64 + new as u64)
}

#[cfg(test)]
mod tests;
