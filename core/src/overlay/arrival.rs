//! How far the checksum and size of a frame from the tunnel can be trusted.
//!
//! A network card finishes checksums and cuts super-segments before they are on the wire. A virtual
//! link between two hosts that are namespaces of one machine does neither (Linux `veth`, 6.18): a
//! frame of the kernel's own `vxlan` device arrives with a partial checksum, and a super-segment as
//! one datagram. Only the bytes show it. So this code examines the bytes, and marks the frame as a
//! tap would.

use crate::wire::checksum::{Checksum, fold, pseudo_header_v4, pseudo_header_v6};
use crate::wire::emit::gso_type;
use crate::wire::ip::PROTOCOL_TCP;
use crate::wire::packet::{Ip, IpVersion, L4, Net, Packet};
use crate::wire::virtio_net::{F_NEEDS_CSUM, VirtioNetHdr};

/// Of UDP: number of the protocol (IANA), and where its checksum is.
const PROTOCOL_UDP: u8 = 17;
const UDP_CHECKSUM_AT: u16 = 6;
/// Of TCP.
const TCP_CHECKSUM_AT: u16 = 16;

/// The header that says of the frame, from which `packet` was parsed, what it is: one whose
/// checksum is partial, and then perhaps a super-segment, if it is longer than the overlay's `mtu`.
/// A frame that says nothing special is checked by who receives it.
pub(super) fn marks(frame: &[u8], packet: &Packet, mtu: u16) -> VirtioNetHdr {
    let plain = VirtioNetHdr::default();
    let Net::Ip(ip) = &packet.net else { return plain };
    let (protocol, csum_offset) = match ip.l4 {
        L4::Tcp(_) => (PROTOCOL_TCP, TCP_CHECKSUM_AT),
        L4::Udp => (PROTOCOL_UDP, UDP_CHECKSUM_AT),
        _ => return plain,
    };
    if !is_partial(frame, ip, protocol, csum_offset) {
        return plain;
    }
    let mut hdr =
        VirtioNetHdr { flags: F_NEEDS_CSUM, csum_start: ip.payload_offset, csum_offset, ..plain };
    if let Some((ip, tcp)) = packet.tcp() {
        let l2_len = u32::from(packet.eth.len);
        let headers = tcp.payload_offset - l2_len;
        let gso_size = u32::from(mtu).saturating_sub(headers);
        let is_group = packet.eth.dst[0] & 1 != 0; // TCP has nothing to say to one
        if tcp.payload_len > gso_size && gso_size > 0 && !is_group {
            hdr.gso_type = gso_type(ip.version, tcp.flags);
            hdr.gso_size = u16::try_from(gso_size).unwrap_or(u16::MAX);
            hdr.hdr_len = u16::try_from(tcp.payload_offset).unwrap_or(u16::MAX);
        }
    }
    hdr
}

/// Whether the checksum field holds the sum of the pseudo-header and no more. One in 65,536 right
/// checksums looks the same, so that is asked too.
fn is_partial(frame: &[u8], ip: &Ip, protocol: u8, csum_offset: u16) -> bool {
    let range = usize::from(ip.payload_offset)..ip.end as usize;
    let Some(segment) = frame.get(range) else { return false };
    let at = usize::from(csum_offset);
    let Some(&[high, low]) = segment.get(at..).and_then(|field| field.first_chunk()) else {
        return false;
    };
    let len = ip.end.saturating_sub(u32::from(ip.payload_offset));
    let pseudo = match ip.version {
        IpVersion::V4 => pseudo_header_v4(ip.src.v4_bytes(), ip.dst.v4_bytes(), protocol, len),
        IpVersion::V6 => pseudo_header_v6(ip.src.0, ip.dst.0, protocol, len),
    };
    if fold(pseudo) != u16::from_be_bytes([high, low]) {
        return false;
    }
    let mut whole = Checksum::new(pseudo);
    whole.add_bytes(segment);
    whole.finish() != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::samples::{v4_segment, v6_segment};

    fn marks_of(frame: &[u8]) -> VirtioNetHdr {
        marks(frame, &Packet::parse(frame).unwrap(), 1450)
    }

    #[test]
    fn a_frame_with_a_whole_checksum_or_a_wrong_one_is_not_marked() {
        for segment in [v4_segment(b"payload"), v6_segment(b"payload")] {
            let mut frame = segment.frame();
            assert_eq!(marks_of(&frame), VirtioNetHdr::default());
            *frame.last_mut().unwrap() ^= 1;
            assert_eq!(marks_of(&frame), VirtioNetHdr::default(), "the receiver finds out");
        }
    }

    #[test]
    fn a_partial_checksum_is_marked_as_a_tap_would_mark_it() {
        for segment in [v4_segment(b"payload"), v6_segment(b"payload")] {
            let (frame, hdr) = segment.partial_frame(1000);
            let marked = marks_of(&frame);
            let VirtioNetHdr { flags, csum_start, csum_offset, .. } = hdr;
            assert_eq!(marked, VirtioNetHdr { flags, csum_start, csum_offset, ..marked });
            assert!(!marked.is_gso());
        }
    }

    #[test]
    fn a_super_segment_that_came_whole_is_one_of_the_overlays_mtu() {
        for (segment, headers) in [(v4_segment(&[7; 4000]), 52), (v6_segment(&[7; 4000]), 72)] {
            let (frame, hdr) = segment.partial_frame(1000);
            let headers_here = u16::try_from(frame.len() - 4000 - 14).unwrap();
            assert!(headers_here <= headers, "{headers_here}");
            let expected = VirtioNetHdr { gso_size: 1450 - headers_here, ..hdr };
            assert_eq!(marks_of(&frame), expected);
        }
    }
}
