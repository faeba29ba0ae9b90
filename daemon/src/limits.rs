//! Bounds of the daemon that more than one room needs, with their arithmetic.
//!
//! The bounds of flows, frames and sockets are in `nightporter_core::limits`.

use nightporter_core::limits::{FLOWS_MAX, TOE_SOCKETS_MAX, TOE_WINDOW_MAX};
use nightporter_core::store::arena::ArenaSize;

/// Regions of one guest at most: a PC with every DIMM slot hot-plugged has fewer.
pub const REGIONS_MAX: usize = 64;
/// Places in every arena: for a tebibyte of store, and as many records as there can be flows.
pub(crate) const PLACES: ArenaSize = ArenaSize { records: FLOWS_MAX as usize, pages: 1 << 26 };
/// Bytes that may wait in the kernel for the worker at an overlay's socket: 6 ms at 10 Gbit/s.
pub(crate) const RECEIVE_BYTES: usize = 8 << 20;
/// Bytes that may wait in the kernel to leave by one of an overlay's sending sockets: 3 ms at
/// 10 Gbit/s.
pub(crate) const SEND_BYTES: usize = 4 << 20;

/// Streams between hosts at most, and half as many as the process may have descriptors.
pub(crate) const STREAMS_MAX: usize = 32_768;
/// Certificates that a host shows, at most, and their bytes: they are kept as long as the
/// connection, which may be a stream.
pub(crate) const PROOF_CHAIN_MAX: usize = 8;
/// See [`PROOF_CHAIN_MAX`].
pub(crate) const PROOF_CHAIN_BYTES_MAX: usize = 16 << 10;
/// Bytes that a connection takes until the other host has proved who it is, at most: rustls has
/// what was sent, in a `Vec` of 32 KiB, and in a `Vec` of 56 bytes each the certificates in it,
/// which are 6 bytes long at least. Their number is known only when all else has been shown.
pub(crate) const HANDSHAKE_BYTES: usize = 704 << 10;
/// Handshakes of encrypted streams under way that were begun here.
pub(crate) const HANDSHAKES_BEGUN_MAX: usize = 256;
/// Handshakes of encrypted streams under way that other hosts have begun.
pub(crate) const HANDSHAKES_ACCEPTED_MAX: usize = 256;
/// Bytes of all handshakes, at most.
pub(crate) const HANDSHAKES_BYTES_MAX: usize =
    (HANDSHAKES_BEGUN_MAX + HANDSHAKES_ACCEPTED_MAX) * HANDSHAKE_BYTES;
/// Bytes that TLS takes for a stream at most, whatever the other host sends (rustls 0.23). The
/// bytes that wait to be sent are counted by the stream itself.
///
/// - 32 KiB of records: a read behind the last plaintext, and `NOTHING_MAX` of
///   `sockets::fabric::pipe` (rustls makes room for 4 KiB more, and a `Vec` grows to twice its
///   size).
/// - 40 KiB of plaintext: that of a record, and of a read of records of a byte, each of which is a
///   `Vec` of 32 bytes in a queue of 512 places of 24.
/// - 16 KiB of the other host's certificates ([`PROOF_CHAIN_BYTES_MAX`]).
/// - 8 KiB of the connection itself, with its keys.
const SEALED_BYTES: usize = (32 << 10) + (40 << 10) + PROOF_CHAIN_BYTES_MAX + (8 << 10);
/// Bytes of TLS for all streams, with those handshakes that are under way.
pub(crate) const SEALED_BYTES_MAX: usize = STREAMS_MAX * SEALED_BYTES + HANDSHAKES_BYTES_MAX;

/// Bytes by UCX that each socket may have under way, whatever is left: a page.
pub(crate) const ARRIVALS_LEAST: u64 = 4096;
/// A socket has at most this part of the bytes by UCX that are left for its guest.
pub(crate) const ARRIVALS_PART: u64 = 8;
/// Bytes by UCX beyond [`ARRIVALS_LEAST`] for the sockets of one guest together: a window for one
/// of them, and a sixteenth of [`ARRIVALS_MAX`].
pub(crate) const ARRIVALS_OF_GUEST_MAX: u64 = ARRIVALS_PART * TOE_WINDOW_MAX;
/// Bytes by UCX beyond [`ARRIVALS_LEAST`] for the sockets of all guests.
pub(crate) const ARRIVALS_MAX: u64 = 128 << 20;
const _: () = assert!(arrived_bytes_max(usize::MAX) == 256 << 20, "bytes in all");

/// Bytes that have come by UCX and that so many guests do not take, at most. Each socket has one
/// stream at most.
#[must_use]
pub(crate) const fn arrived_bytes_max(guests: usize) -> u64 {
    let beyond = (guests as u64).saturating_mul(ARRIVALS_OF_GUEST_MAX);
    let streams = guests.saturating_mul(TOE_SOCKETS_MAX);
    let streams = if streams < STREAMS_MAX { streams } else { STREAMS_MAX };
    (if beyond < ARRIVALS_MAX { beyond } else { ARRIVALS_MAX }) + streams as u64 * ARRIVALS_LEAST
}
