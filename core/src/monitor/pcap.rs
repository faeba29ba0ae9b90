//! The headers of a capture file of Ethernet frames, pcap with nanoseconds
//! (draft-ietf-opsawg-pcap, section 4).

/// By its first four bytes the file has nanoseconds, in host order.
const MAGIC_NS: u32 = 0xa1b2_3c4d;
/// Version 2.4.
const VERSION: [u16; 2] = [2, 4];
/// Larger than any super-segment.
const SNAPLEN: u32 = 262_144;
/// LINKTYPE_ETHERNET.
const LINKTYPE: u32 = 1;

/// The bytes that a file begins with.
#[must_use]
pub fn file_header() -> [u8; 24] {
    let mut header = [0; 24];
    header[..4].copy_from_slice(&MAGIC_NS.to_le_bytes());
    header[4..6].copy_from_slice(&VERSION[0].to_le_bytes());
    header[6..8].copy_from_slice(&VERSION[1].to_le_bytes());
    header[16..20].copy_from_slice(&SNAPLEN.to_le_bytes());
    header[20..].copy_from_slice(&LINKTYPE.to_le_bytes());
    header
}

/// The bytes in front of a frame of `len` bytes, of which `kept` follow: its time is so many
/// nanoseconds since 1970.
#[must_use]
pub fn record_header(ns: u64, kept: usize, len: usize) -> [u8; 16] {
    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
    let mut header = [0; 16];
    header[..4].copy_from_slice(&small(ns / 1_000_000_000));
    header[4..8].copy_from_slice(&small(ns % 1_000_000_000));
    header[8..12].copy_from_slice(&small(kept as u64));
    header[12..].copy_from_slice(&small(len as u64));
    header
}
