//! The virtio-net header (virtio 1.2 section 5.1.6), without `num_buffers`, which is the ring's.

/// `flags`: the checksum from `csum_start` on is partial; finish it at `csum_start + csum_offset`.
pub const F_NEEDS_CSUM: u8 = 1;
/// `flags`: the sender of this header verified the checksum.
pub const F_DATA_VALID: u8 = 2;
/// `gso_type`: not a super-segment.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: UDP fragmentation offload (never negotiated here).
pub const GSO_UDP: u8 = 3;
/// `gso_type`: TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: UDP segmentation offload (never negotiated here).
pub const GSO_UDP_L4: u8 = 5;
/// `gso_type` bit: the super-segment carries CWR (RFC 3168) on its first segment only.
pub const GSO_ECN: u8 = 0x80;

/// The checksum and segmentation state of a frame. All sizes in bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct VirtioNetHdr {
    /// `F_*` bits.
    pub flags: u8,
    /// One `GSO_*` value, possibly with [`GSO_ECN`].
    pub gso_type: u8,
    /// Length of all headers; a hint that nothing here relies on (COM-16).
    pub hdr_len: u16,
    /// Payload bytes per segment when `gso_type` is not [`GSO_NONE`].
    pub gso_size: u16,
    /// Where the checksummed range starts, from the start of the frame.
    pub csum_start: u16,
    /// Where the checksum field is, from `csum_start`.
    pub csum_offset: u16,
}

impl VirtioNetHdr {
    /// Bytes of the header on a ring or tap without `num_buffers`.
    pub const LEN: usize = 10;
    /// Bytes of the header with `num_buffers` (virtio 1.0 and later, or MRG_RXBUF).
    pub const LEN_MRG: usize = 12;

    /// Reads the ten common bytes (little-endian, as VERSION_1 and little-endian taps have it).
    #[must_use]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        let le = |i: usize| u16::from_le_bytes([b[i], b[i + 1]]);
        Self {
            flags: b[0],
            gso_type: b[1],
            hdr_len: le(2),
            gso_size: le(4),
            csum_start: le(6),
            csum_offset: le(8),
        }
    }

    /// The ten common bytes.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0] = self.flags;
        b[1] = self.gso_type;
        b[2..4].copy_from_slice(&self.hdr_len.to_le_bytes());
        b[4..6].copy_from_slice(&self.gso_size.to_le_bytes());
        b[6..8].copy_from_slice(&self.csum_start.to_le_bytes());
        b[8..10].copy_from_slice(&self.csum_offset.to_le_bytes());
        b
    }

    /// The checksum field holds only the pseudo-header sum.
    #[must_use]
    pub const fn needs_csum(&self) -> bool {
        self.flags & F_NEEDS_CSUM != 0
    }

    /// The TCP checksum need not be verified: it is unfinished, or was verified (COM-13).
    #[inline]
    #[must_use]
    pub const fn is_vouched_for(&self) -> bool {
        self.flags & (F_NEEDS_CSUM | F_DATA_VALID) != 0
    }

    /// The frame is a super-segment.
    #[must_use]
    pub const fn is_gso(&self) -> bool {
        self.gso_type != GSO_NONE
    }
}
