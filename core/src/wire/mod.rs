//! Wire formats: views that are checked once, representations that emit, checksums, segmentation.
//!
//! A frame is read by [`packet::Packet::parse`], which checks every offset once and copies the few
//! fields that are used. [`plain::Plain`] reads a frame with an acknowledgement and data, and
//! nothing else, directly. Frames are then changed in place by [`edit::TcpEdit`], made afresh by
//! [`emit::TcpEmit`], cut up by [`segment::Segmenter`], or given other numbers by
//! [`translate::Translation`]. This code neither allocates nor panics, whatever a guest or the
//! network sends.

pub mod checksum;
pub mod edit;
pub mod emit;
pub mod glance;
pub mod heartbeat;
pub mod icmp;
pub mod ip;
pub mod packet;
pub mod plain;
#[cfg(test)]
pub(crate) mod samples;
pub mod saved;
pub mod segment;
pub mod seq;
pub mod syn;
pub mod tcp;
pub mod translate;
pub mod virtio_net;
pub mod vlan;
pub mod vsock;
pub mod vxlan;

/// The big-endian `u16` at `b[at..]`.
#[inline]
fn be16(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([b[at], b[at + 1]])
}

/// The big-endian `u32` at `b[at..]`.
#[inline]
fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// The bytes of `b`, which has exactly `N` (the compiler makes this one load).
#[inline(always)]
fn array<const N: usize>(b: &[u8]) -> [u8; N] {
    b.try_into().unwrap_or([0; N])
}

/// An offset or length that is at most 65,535 by construction, as a `u16`.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the callers' sums of header fields fit")]
fn small(value: usize) -> u16 {
    debug_assert!(value <= 0xffff, "offset or length {value} does not fit 16 bits");
    value as u16
}
