//! Frames at the four taps, and the differences between the taps.

use nightporter_core::time::Instant;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::wire::{Ip, Packet};

/// Where a frame was seen, from the host's point of view.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Tap {
    /// Came in by the uplink.
    FromNet,
    /// Went out by the uplink.
    ToNet,
    /// Taken from the transmit ring of this guest, by its number.
    FromGuest(u16),
    /// Put into the receive ring of this guest.
    ToGuest(u16),
}

/// A frame at a tap. `packet` is its parsed form.
#[derive(Clone, Copy, Debug)]
pub struct Tapped<'a> {
    /// When.
    pub at: Instant,
    /// Which host: 0, or 1 after a migration.
    pub host: u8,
    /// Where.
    pub tap: Tap,
    /// Checksum and segmentation state.
    pub hdr: VirtioNetHdr,
    /// The frame.
    pub bytes: &'a [u8],
    /// The same, parsed; `None` if it cannot be.
    pub packet: Option<&'a Packet>,
    /// Sent in another machine's name, or broken on the way: it must count for nothing.
    pub forged: bool,
    /// It may have been made before, and have waited for the guest's ring.
    pub waited: bool,
}

/// A flow as the host sees it: one guest's side of one connection.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct FlowName {
    /// Number of the guest.
    pub guest: u16,
    /// Its TCP port.
    pub guest_port: u16,
    /// The remote's address; IPv4 is mapped into IPv6.
    pub remote: [u8; 16],
    /// The remote's TCP port.
    pub remote_port: u16,
}

/// A hash of a frame without its TCP checksum, which a driver may complete on the way.
pub(crate) fn fingerprint(all: &[u8], ip: &Ip) -> u64 {
    let from = usize::from(ip.header_offset);
    let checksum_at = usize::from(ip.payload_offset) + 16;
    let end = (ip.end as usize).min(all.len());
    let mut hash = 0x9e37_79b9_7f4a_7c15_u64;
    let mut feed = |bytes: &[u8]| {
        for word in bytes.chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            hash = (hash ^ u64::from_le_bytes(padded)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            hash ^= hash >> 29;
        }
    };
    feed(&all[from..checksum_at]);
    feed(&all[checksum_at + 2..end]);
    hash
}
