//! A window of a stream: which bytes were seen in which place, the first copy of each.

/// Bytes behind the newest acknowledgement that are kept: old copies may still be on their way.
const KEPT: u64 = 1 << 20;
/// A copy further ahead than any window is not remembered.
const AHEAD_MAX: u64 = 1 << 26;

/// See the module doc. Places are unwrapped sequence numbers.
#[derive(Clone, Debug)]
pub(super) struct Bytes {
    /// Place of the first byte kept.
    start: u64,
    bytes: Vec<u8>,
    known: Vec<bool>,
    /// Two copies of a byte differed, and the right one is not known.
    pub(super) contradicts: bool,
}

impl Bytes {
    /// An empty window of a stream whose first byte is number `start`.
    pub(super) const fn new(start: u64) -> Self {
        Self { start, bytes: Vec::new(), known: Vec::new(), contradicts: false }
    }

    /// Remembers `payload`, whose first byte is number `at`, where nothing is known yet.
    pub(super) fn put(&mut self, at: u64, payload: &[u8]) {
        // A keepalive brings an octet of rubbish in an old place.
        self.contradicts |= payload.len() > 1 && self.differs(at, payload).is_some();
        let skip = usize::try_from(self.start.saturating_sub(at)).unwrap_or(usize::MAX);
        let Some(payload) = payload.get(skip..).filter(|p| !p.is_empty()) else { return };
        let offset = at.max(self.start) - self.start;
        let Some(from) = usize::try_from(offset).ok().filter(|_| offset < AHEAD_MAX) else {
            return;
        };
        let end = from + payload.len();
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
            self.known.resize(end, false);
        }
        let places = self.bytes[from..end].iter_mut().zip(&mut self.known[from..end]);
        for ((place, known), byte) in places.zip(payload) {
            if !*known {
                (*place, *known) = (*byte, true);
            }
        }
    }

    /// The first byte of `payload` that is known to be another one.
    pub(super) fn differs(&self, at: u64, payload: &[u8]) -> Option<u64> {
        let skip = usize::try_from(self.start.saturating_sub(at)).unwrap_or(usize::MAX);
        let payload = payload.get(skip..)?;
        let from = usize::try_from(at.max(self.start) - self.start).ok()?;
        let (bytes, known) = (self.bytes.get(from..)?, self.known.get(from..)?);
        let mut all = bytes.iter().zip(known).zip(payload);
        let wrong = all.position(|((kept, known), byte)| *known && kept != byte)?;
        Some(at.max(self.start) + wrong as u64)
    }

    /// Bytes well before `acked` will not be asked for any more.
    pub(super) fn forget(&mut self, acked: u64) {
        let old = acked.saturating_sub(KEPT).saturating_sub(self.start);
        let old = usize::try_from(old).unwrap_or(0).min(self.bytes.len());
        if old as u64 >= KEPT {
            self.bytes.drain(..old);
            self.known.drain(..old);
            self.start += old as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_copy_of_a_byte_counts_and_another_is_noticed() {
        let mut b = Bytes::new(100);
        b.put(100, b"hello");
        b.put(107, b"world");
        assert_eq!(b.differs(98, b"--hello??world!"), None, "only known bytes are compared");
        assert_eq!(b.differs(100, b"hellO"), Some(104));
        b.put(103, b"lo, "); // fills the gap
        assert!(!b.contradicts);
        assert_eq!(b.differs(100, b"hello, world"), None);
        b.put(100, b"jello");
        assert!(b.contradicts);
        assert_eq!(b.differs(100, b"h"), None);
    }

    #[test]
    fn what_is_long_acknowledged_is_forgotten() {
        let mut b = Bytes::new(0);
        let block = vec![7; 1 << 16];
        for at in (0..8 << 20).step_by(1 << 16) {
            b.put(at, &block);
            b.forget(at);
        }
        assert!(b.bytes.len() < 3 << 20, "{} bytes kept", b.bytes.len());
        assert_eq!(b.differs((8 << 20) - 2, &[7, 8]), Some((8 << 20) - 1));
        assert_eq!(b.differs(5, &[1]), None);
    }
}
