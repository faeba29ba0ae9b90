//! The bytes of a stream: each follows from its connection, its direction and its place, so that a
//! byte in the wrong place, or of another stream, is noticed.

/// Bytes made and compared at a time.
const WORD: u64 = 8;

/// One direction of one connection, as the bytes that are written to it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stream {
    key: u64,
}

impl Stream {
    /// The stream that the client or the server of connection number `conn` writes.
    #[must_use]
    pub fn of(conn: usize, from_client: bool) -> Self {
        let n = (conn as u64) << 1 | u64::from(from_client);
        Self { key: mix(n + 1) }
    }

    /// Writes the bytes from offset `at` on into `buf`.
    pub fn fill(self, at: u64, buf: &mut [u8]) {
        let (head, buf) = buf.split_at_mut(buf.len().min(self.until_aligned(at)));
        let within = index(at % WORD);
        head.copy_from_slice(&self.word(at / WORD)[within..within + head.len()]);
        let mut n = at.div_ceil(WORD);
        let (words, tail) = buf.as_chunks_mut();
        for word in words {
            *word = self.word(n);
            n += 1;
        }
        tail.copy_from_slice(&self.word(n)[..tail.len()]);
    }

    /// The offset of the first of `bytes`, found from offset `at` on, that is not what
    /// [`Self::fill`] writes there.
    #[must_use]
    pub fn first_difference(self, at: u64, bytes: &[u8]) -> Option<u64> {
        let (head, rest) = bytes.split_at(bytes.len().min(self.until_aligned(at)));
        let mut n = at.div_ceil(WORD);
        let (words, tail) = rest.as_chunks();
        let mut same = self.same(at, head);
        for word in words {
            same &= *word == self.word(n);
            n += 1;
        }
        if same && self.same(n * WORD, tail) {
            return None;
        }
        let wrong = (at..).zip(bytes).find(|&(at, byte)| self.byte(at) != *byte);
        wrong.map(|(at, _)| at)
    }

    /// Bytes before the next word.
    fn until_aligned(self, at: u64) -> usize {
        index((WORD - at % WORD) % WORD)
    }

    /// Whether `part`, which lies within one word, is right at `at`.
    fn same(self, at: u64, part: &[u8]) -> bool {
        let within = index(at % WORD);
        part == &self.word(at / WORD)[within..within + part.len()]
    }

    fn byte(self, at: u64) -> u8 {
        self.word(at / WORD)[index(at % WORD)]
    }

    /// Word number `n` of the stream.
    #[inline(always)]
    fn word(self, n: u64) -> [u8; 8] {
        mix(self.key.wrapping_add(n)).to_le_bytes()
    }
}

/// The streams that R and G write on connection number `conn`.
#[must_use]
pub fn streams_of(conn: usize, guest_is_client: bool) -> [Stream; 2] {
    [Stream::of(conn, !guest_is_client), Stream::of(conn, guest_is_client)]
}

/// A bijection that changes every byte (the multiplier of Knuth's MMIX generator).
#[inline(always)]
fn mix(n: u64) -> u64 {
    let n = n.wrapping_mul(6_364_136_223_846_793_005);
    n ^ n >> 32
}

/// A number below eight.
fn index(n: u64) -> usize {
    (n % WORD) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_size_at_any_place_are_the_same_stream() {
        let stream = Stream::of(3, true);
        let mut whole = [0; 100];
        stream.fill(1000, &mut whole);
        for from in 0..20 {
            for to in from..100 {
                let mut piece = vec![0; to - from];
                stream.fill(1000 + from as u64, &mut piece);
                assert_eq!(piece, whole[from..to]);
                assert_eq!(stream.first_difference(1000 + from as u64, &piece), None);
            }
        }
    }

    #[test]
    fn one_wrong_byte_is_found_where_it_is() {
        let stream = Stream::of(3, true);
        for wrong in 0..64 {
            let mut bytes = [0; 64];
            stream.fill(5, &mut bytes);
            bytes[wrong] ^= 1;
            assert_eq!(stream.first_difference(5, &bytes), Some(5 + wrong as u64));
        }
    }

    #[test]
    fn misplaced_bytes_and_those_of_other_streams_differ() {
        let stream = Stream::of(3, true);
        let mut bytes = [0; 1448];
        stream.fill(0, &mut bytes);
        for off in [1, 8, 256, 1448, 2048, 65_536, 1 << 20, 1 << 32] {
            assert!(stream.first_difference(off, &bytes).is_some(), "shifted by {off}");
        }
        assert!(Stream::of(3, false).first_difference(0, &bytes).is_some());
        assert!(Stream::of(4, true).first_difference(0, &bytes).is_some());
    }
}
