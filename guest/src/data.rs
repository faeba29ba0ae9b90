//! The data channel: the purpose of each TCP connection to a guest.
//!
//! ```text
//! SINK    host: header, payload            guest: READ_ALL, verdict
//! SOURCE  host: header                     guest: payload, FIN
//! ECHO    host: header, payload            guest: the same payload, FIN
//! POUR    host: header                     guest: payload, until the host ends the connection
//! BOTH    host: header, payload            guest: payload at the same time, verdict, FIN
//! WATCHED host: header                     guest: the capture at WATCHED_FILE, FIN
//! ```
//!
//! SINK times a transfer on the sender's clock: the guest's application writes the one byte
//! [`READ_ALL`] the moment it has read everything, *then* hashes the bytes and writes its
//! [`Verdict`]. So the hash never inflates the delivered time. The reply leaves in the time slice
//! in which the last byte was read and costs one trip back, the same on every path. BOTH sends
//! [`READ_ALL`] in a UDP datagram to the host's address and port of the connection, because in the
//! connection it would wait behind the guest's own payload.

use std::hash::Hasher;
use std::io::{self, Read, Write};
use std::ops::Range;

/// TCP port every lab guest listens on.
pub const PORT: u16 = 5001;

/// TCP port on which a lab guest takes HTTP uploads, from any client.
pub const HTTP_PORT: u16 = 5080;

/// The byte a sink writes when its application has read everything.
pub const READ_ALL: u8 = b'R';

/// Where a guest has the capture that it sends.
pub const WATCHED_FILE: &str = "/watched.pcap";

const MAGIC: u32 = 0x4e50_5831; // "NPX1"

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// The guest reads, answers, hashes, answers.
    Sink,
    /// The guest sends `bytes` bytes of a [`Source`] with the header's `hash` as seed, then closes.
    Source,
    /// The guest sends back the bytes that it reads.
    Echo,
    /// The guest sends until the connection is ended.
    Pour,
    /// Both send `bytes` bytes at the same time: the guest those of a [`Source`] with the header's
    /// `hash` as seed, the host those of [`the next seed`](Header::seed_of_host).
    Both,
    /// The guest sends the capture at [`WATCHED_FILE`], then closes.
    Watched,
}

/// First bytes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The purpose of the connection.
    pub service: Service,
    /// Payload bytes that follow the header (SINK, ECHO, BOTH) or that the guest shall send
    /// (SOURCE, BOTH); POUR, WATCHED: unused.
    pub bytes: u64,
    /// SINK: [`hash`] of the payload. SOURCE, BOTH: seed of the guest's payload. Else unused.
    pub hash: u64,
}

impl Header {
    /// Size on the wire, bytes.
    pub const LEN: usize = 24;

    /// The header as it goes on the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0..4].copy_from_slice(&MAGIC.to_be_bytes());
        out[4] = match self.service {
            Service::Sink => 0,
            Service::Source => 1,
            Service::Echo => 2,
            Service::Pour => 3,
            Service::Both => 4,
            Service::Watched => 5,
        };
        out[8..16].copy_from_slice(&self.bytes.to_be_bytes());
        out[16..24].copy_from_slice(&self.hash.to_be_bytes());
        out
    }

    /// BOTH: seed of the host's data.
    #[must_use]
    pub const fn seed_of_host(&self) -> u64 {
        self.hash.wrapping_add(1)
    }

    /// Reads one header.
    ///
    /// # Errors
    /// Those of the stream, and `InvalidData` for a wrong magic or an unknown service.
    pub fn read_from(stream: &mut impl Read) -> io::Result<Self> {
        let mut raw = [0; Self::LEN];
        stream.read_exact(&mut raw)?;
        let service = match (be_u32(&raw[0..4]), raw[4]) {
            (MAGIC, 0) => Service::Sink,
            (MAGIC, 1) => Service::Source,
            (MAGIC, 2) => Service::Echo,
            (MAGIC, 3) => Service::Pour,
            (MAGIC, 4) => Service::Both,
            (MAGIC, 5) => Service::Watched,
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "not a lab header")),
        };
        Ok(Self { service, bytes: be_u64(&raw[8..16]), hash: be_u64(&raw[16..24]) })
    }
}

/// A sink's result, sent after [`READ_ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Whether `hash` equals the header's.
    pub hash_ok: bool,
    /// [`hash`] of the payload as read.
    pub hash: u64,
    /// Nanoseconds from accept() to the last byte read, by the guest's clock.
    pub read_ns: u64,
    /// Interrupts that the guest's NICs have raised since it booted.
    pub interrupts: u64,
}

impl Verdict {
    const LEN: usize = 25;

    /// Writes the verdict.
    ///
    /// # Errors
    /// Those of the stream.
    pub fn write_to(self, stream: &mut impl Write) -> io::Result<()> {
        let mut raw = [0; Self::LEN];
        raw[0] = u8::from(self.hash_ok);
        raw[1..9].copy_from_slice(&self.hash.to_be_bytes());
        raw[9..17].copy_from_slice(&self.read_ns.to_be_bytes());
        raw[17..25].copy_from_slice(&self.interrupts.to_be_bytes());
        stream.write_all(&raw)
    }

    /// Reads one verdict.
    ///
    /// # Errors
    /// Those of the stream.
    pub fn read_from(stream: &mut impl Read) -> io::Result<Self> {
        let mut raw = [0; Self::LEN];
        stream.read_exact(&mut raw)?;
        let [hash, read_ns, interrupts] = [1, 9, 17].map(|at| be_u64(&raw[at..at + 8]));
        Ok(Self { hash_ok: raw[0] == 1, hash, read_ns, interrupts })
    }
}

/// Bytes that are poured before the same come again.
pub const POURED: usize = 64 << 10;

/// They.
#[must_use]
pub fn poured() -> Vec<u8> {
    let mut chunk = vec![0; POURED];
    fill(0, &mut chunk);
    chunk
}

/// The same bytes again and again until the other side ends the connection.
pub fn pour(stream: &mut impl Write) {
    let chunk = poured();
    while stream.write_all(&chunk).is_ok() {}
}

/// The 64-bit xxHash of a payload: cheap without SIMD, so that it is cheap under TCG too.
#[must_use]
pub fn hash(payload: &[u8]) -> u64 {
    let mut hasher = twox_hash::XxHash64::with_seed(0);
    hasher.write(payload);
    hasher.finish()
}

/// Fills `out` with bytes that depend on `seed` only, so that bytes of one transfer that turn up
/// in another are found out. (splitmix64: Steele, Lea, Flood, OOPSLA 2014, figure 16.)
pub fn fill(seed: u64, out: &mut [u8]) {
    let mut state = seed;
    for chunk in out.chunks_mut(8) {
        chunk.copy_from_slice(&splitmix64(&mut state).to_le_bytes()[..chunk.len()]);
    }
}

/// The data that guests send: a piece of one stream of [`fill`], which the seed chooses. So a guest
/// makes the stream once, and that is no part of a transfer.
#[derive(Debug, Default)]
pub struct Source(Vec<u8>);

impl Source {
    /// Pieces begin at one of so many words of the stream.
    const STARTS: u64 = 1 << 16;

    /// Nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Makes enough for a [`Self::piece`].
    pub fn reach(&mut self, seed: u64, bytes: usize) {
        if !self.reaches(seed, bytes) {
            let end = Self::range(seed, bytes).end;
            self.0.resize(end.next_multiple_of(1 << 20), 0);
            fill(0, &mut self.0);
        }
    }

    /// Whether it has the bytes that a [`Self::piece`] needs.
    #[must_use]
    pub fn reaches(&self, seed: u64, bytes: usize) -> bool {
        Self::range(seed, bytes).end <= self.0.len()
    }

    /// The `bytes` bytes of this seed.
    ///
    /// # Panics
    /// Before [`Self::reach`].
    #[must_use]
    pub fn piece(&self, seed: u64, bytes: usize) -> &[u8] {
        &self.0[Self::range(seed, bytes)]
    }

    fn range(seed: u64, bytes: usize) -> Range<usize> {
        let start = 8 * usize::try_from(seed % Self::STARTS).expect("below STARTS");
        start..start + bytes
    }
}

/// One step of splitmix64.
pub fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn be_u32(raw: &[u8]) -> u32 {
    u32::from_be_bytes(raw.try_into().expect("4 bytes"))
}

fn be_u64(raw: &[u8]) -> u64 {
    u64::from_be_bytes(raw.try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_back_as_written() {
        let all = [
            Service::Sink,
            Service::Source,
            Service::Echo,
            Service::Pour,
            Service::Both,
            Service::Watched,
        ];
        for service in all {
            let header = Header { service, bytes: 0x0102_0304_0506, hash: 0xdead_beef_0bad_cafe };
            let read = Header::read_from(&mut header.to_bytes().as_slice()).expect("reads");
            assert_eq!(read, header);
        }
    }

    #[test]
    fn a_stranger_on_the_data_port_is_refused() {
        let mut raw = [b'G'; Header::LEN].as_slice();
        let error = Header::read_from(&mut raw).expect_err("not a header");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_verdict_reads_back_as_written() {
        let verdict = Verdict { hash_ok: true, hash: 7, read_ns: 1 << 40, interrupts: 9 };
        let mut raw = Vec::new();
        verdict.write_to(&mut raw).expect("writes");
        assert_eq!(Verdict::read_from(&mut raw.as_slice()).expect("reads"), verdict);
    }

    #[test]
    fn a_piece_is_the_same_whatever_was_sent_before_and_another_for_another_seed() {
        let (mut short, mut long) = (Source::new(), Source::new());
        short.reach(7, 100);
        long.reach(65_535, 3_000_000);
        let piece = short.piece(7, 100);
        assert_eq!(long.piece(7, 100), piece);
        assert_ne!(long.piece(8, 100), piece);
    }

    #[test]
    fn one_wrong_byte_or_two_swapped_blocks_change_the_hash() {
        let mut payload = vec![0; 10_000];
        fill(3, &mut payload);
        let good = hash(&payload);
        payload[9_999] ^= 1;
        assert_ne!(hash(&payload), good);
        payload[9_999] ^= 1;
        let (first, second) = payload.split_at_mut(5_000);
        first.swap_with_slice(second);
        assert_ne!(hash(&payload), good);
    }
}
