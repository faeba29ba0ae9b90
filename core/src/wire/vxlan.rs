//! The VXLAN header (RFC 7348 section 5): eight bytes between UDP and the inner frame.

use super::be32;
use crate::drops::DropReason;

/// Bytes of the header.
pub const LEN: usize = 8;
/// The UDP port that tunnel endpoints listen at (IANA).
pub const PORT: u16 = 4789;
/// The highest network identifier: it has 24 bits.
pub const VNI_MAX: u32 = (1 << 24) - 1;

/// The first byte says that there is a network identifier; the other bits are reserved.
const F_VNI: u8 = 0x08;

/// The header of a frame of the network `vni`.
#[must_use]
pub const fn emit(vni: u32) -> [u8; LEN] {
    let [_, a, b, c] = vni.to_be_bytes();
    [F_VNI, 0, 0, 0, a, b, c, 0]
}

/// The network that a datagram is of. Behind the header is the frame; reserved bits are ignored.
///
/// # Errors
/// [`DropReason::NotVxlan`].
pub fn parse(datagram: &[u8]) -> Result<u32, DropReason> {
    match datagram.first_chunk::<LEN>() {
        Some(h) if h[0] & F_VNI != 0 => Ok(be32(h, 4) >> 8),
        _ => Err(DropReason::NotVxlan),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_that_of_rfc_7348_and_reads_back() {
        assert_eq!(emit(0x12_3456), [8, 0, 0, 0, 0x12, 0x34, 0x56, 0]);
        for vni in [0, 1, 0x12_3456, VNI_MAX] {
            assert_eq!(parse(&emit(vni)), Ok(vni));
        }
        assert_eq!(parse(&[0xff; LEN]), Ok(VNI_MAX), "reserved bits are ignored");
    }

    #[test]
    fn without_the_flag_or_cut_short_it_is_no_header() {
        assert_eq!(parse(&[0xf7, 0, 0, 0, 0, 0, 5, 0]), Err(DropReason::NotVxlan));
        assert_eq!(parse(&emit(5)[..LEN - 1]), Err(DropReason::NotVxlan));
        assert_eq!(parse(&[]), Err(DropReason::NotVxlan));
    }
}
