//! SipHash-2-4 (Aumasson and Bernstein, 2012): a keyed function of bytes. Without the key nobody
//! can predict it.

/// The function of `bytes` with this key.
#[must_use]
pub(super) fn hash(key: [u64; 2], bytes: &[u8]) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        compress(&mut v, u64::from_le_bytes(*word));
    }
    // The last word: the bytes that are left, and how many there were, modulo 256.
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    last[7] = bytes.len().to_le_bytes()[0];
    compress(&mut v, u64::from_le_bytes(last));
    v[2] ^= 0xff;
    (0..4).for_each(|_| round(&mut v));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn compress(v: &mut [u64; 4], word: u64) {
    v[3] ^= word;
    (0..2).for_each(|_| round(v));
    v[0] ^= word;
}

fn round([a, b, c, d]: &mut [u64; 4]) {
    let half = |x: &mut u64, y: &mut u64, left| {
        *x = x.wrapping_add(*y);
        *y = y.rotate_left(left) ^ *x;
    };
    half(a, b, 13);
    half(c, d, 16);
    *a = a.rotate_left(32);
    half(a, d, 21);
    half(c, b, 17);
    *c = c.rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::hash::Hasher as _;

    #[test]
    fn it_is_the_standard_library_s_function() {
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        let bytes: Vec<u8> = (0..64).collect();
        for len in 0..=bytes.len() {
            #[expect(deprecated, reason = "it is SipHash-2-4, which its successor is not")]
            let mut theirs = core::hash::SipHasher::new_with_keys(key[0], key[1]);
            theirs.write(&bytes[..len]);
            assert_eq!(hash(key, &bytes[..len]), theirs.finish(), "{len} bytes");
        }
        // The paper's appendix A.
        assert_eq!(hash(key, &bytes[..15]), 0xa129_ca61_49be_45e5);
    }
}
