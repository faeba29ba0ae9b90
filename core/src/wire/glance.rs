//! The fields that name the flow of a TCP segment, read at fixed places of the frame.
//!
//! A frame that is forwarded unchanged needs no more than these. With them the flow can be fetched
//! from memory before the segment is parsed.

use super::packet::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, IpAddr16, IpVersion, TcpFlags};
use super::{array, be16, ip, tcp};

/// Bytes of an Ethernet header without tags.
const ETHERNET: usize = 14;

/// The ends of a TCP segment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Glance {
    /// The family of both addresses.
    pub version: IpVersion,
    /// The source.
    pub src: IpAddr16,
    /// The destination.
    pub dst: IpAddr16,
    /// The sender's port.
    pub src_port: u16,
    /// The receiver's port.
    pub dst_port: u16,
}

impl Glance {
    /// Of a segment that [`Packet::parse`](super::packet::Packet::parse) takes for TCP over IPv4,
    /// in a frame without tags and IP options, and that is no SYN. `None` for any other frame, also
    /// for a malformed one.
    #[inline]
    #[must_use]
    pub fn v4(frame: &[u8]) -> Option<Self> {
        let (src, dst, segment) = ip::glance_v4(frame, after(frame, ETHERTYPE_IPV4)?)?;
        let (src_port, dst_port) = ports(segment)?;
        Some(Self { version: IpVersion::V4, src, dst, src_port, dst_port })
    }

    /// The same for IPv6 without extension headers.
    #[must_use]
    pub fn v6(frame: &[u8]) -> Option<Self> {
        let (src, dst, segment) = ip::glance_v6(frame, after(frame, ETHERTYPE_IPV6)?)?;
        let (src_port, dst_port) = ports(segment)?;
        Some(Self { version: IpVersion::V6, src, dst, src_port, dst_port })
    }
}

/// Destination and source MAC of a frame; zeros if there is none.
#[inline]
#[must_use]
pub fn macs(frame: &[u8]) -> ([u8; 6], [u8; 6]) {
    frame.first_chunk::<12>().map_or_else(Default::default, |h| (array(&h[..6]), array(&h[6..])))
}

/// The destination MAC of an IP packet without tags.
#[inline]
#[must_use]
pub fn untagged_dst(frame: &[u8]) -> Option<[u8; 6]> {
    let h: &[u8; ETHERNET] = frame.first_chunk()?;
    matches!(be16(h, 12), ETHERTYPE_IPV4 | ETHERTYPE_IPV6).then(|| array(&h[..6]))
}

/// Where layer 3 starts in a frame of this type, without tags.
#[inline]
fn after(frame: &[u8], ethertype: u16) -> Option<usize> {
    let h: &[u8; ETHERNET] = frame.first_chunk()?;
    (be16(h, 12) == ethertype).then_some(ETHERNET)
}

/// Both ports of a segment that is no SYN.
#[inline]
fn ports(segment: &[u8]) -> Option<(u16, u16)> {
    let (src, dst, flags) = tcp::glance(segment)?;
    (!flags.contains(TcpFlags::SYN)).then_some((src, dst))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::packet::Packet;
    use crate::wire::samples::{v4_segment, v6_segment};
    use proptest::prelude::*;

    proptest! {
        /// Frames with wrong bytes in the headers, and cut short.
        #[test]
        fn whatever_a_glance_sees_the_parser_sees_too(
            v6 in any::<bool>(),
            wrong in prop::collection::vec((12_usize..80, any::<u8>()), 0..3),
            cut in prop_oneof![3 => Just(usize::MAX), 1 => 0..120_usize],
        ) {
            let segment = if v6 { v6_segment(b"payload") } else { v4_segment(b"payload") };
            let mut frame = segment.frame();
            for (at, byte) in wrong {
                if let Some(b) = frame.get_mut(at) {
                    *b = byte;
                }
            }
            frame.truncate(cut);
            let glance = Glance::v4(&frame).or_else(|| Glance::v6(&frame));
            let Some(glance) = glance else { return Ok(()) };
            let packet = Packet::parse(&frame).unwrap();
            let (ip, tcp) = packet.tcp().unwrap();
            let Glance { version, src, dst, src_port, dst_port } = glance;
            prop_assert_eq!((version, src, dst), (ip.version, ip.src, ip.dst));
            prop_assert_eq!((src_port, dst_port), (tcp.src_port, tcp.dst_port));
            prop_assert!(packet.eth.vlan.is_empty() && !ip.options);
            prop_assert!(!tcp.flags.contains(TcpFlags::SYN));
        }
    }

    #[test]
    fn a_glance_sees_usual_segments() {
        assert!(Glance::v4(&v4_segment(b"x").frame()).is_some());
        assert!(Glance::v6(&v6_segment(b"x").frame()).is_some());
    }
}
