//! The ICMP errors that say that a packet was too big for its path (RFC 1191, RFC 8201).

use super::ip::{Ip, IpAddr16, IpVersion, PROTOCOL_TCP, V4_HEADER, V6_HEADER};
use super::seq::Seq;
use super::{array, be16, be32};

/// Destination unreachable: fragmentation needed and DF set (RFC 792).
const V4_FRAGMENTATION_NEEDED: [u8; 2] = [3, 4];
/// Packet too big (RFC 4443 section 3.2).
const V6_PACKET_TOO_BIG: [u8; 2] = [2, 0];
/// Bytes of an ICMP header of these kinds; the packet that was too big follows it.
const HEADER: usize = 8;
/// Bytes of a TCP header that every error quotes: ports and sequence number (RFC 792).
const QUOTED: usize = 8;
/// No path that carries IPv4 TCP has less; an error that asks for less is forged or broken (Linux
/// `min_pmtu`). For IPv6 it is 1280 (RFC 8200 section 5).
const V4_MTU_MIN: u32 = 552;
const V6_MTU_MIN: u32 = 1280;

/// A TCP segment was too big.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TooBig {
    /// The source of the segment.
    pub src: IpAddr16,
    /// Its destination.
    pub dst: IpAddr16,
    /// Its source port.
    pub src_port: u16,
    /// Its destination port.
    pub dst_port: u16,
    /// Its sequence number.
    pub seq: Seq,
    /// Bytes of the largest IP packet that the path takes; at least the protocol's minimum.
    pub mtu: u32,
}

impl TooBig {
    /// The error in the packet, if it is one and names an MTU. Its checksum is not verified: a
    /// forger who can guess the numbers of a segment that is under way can also compute a sum, and
    /// a broken error can only make segments smaller.
    #[must_use]
    pub fn parse(frame: &[u8], ip: &Ip) -> Option<Self> {
        let icmp = frame.get(usize::from(ip.payload_offset)..ip.end as usize)?;
        let quoted = icmp.get(HEADER..)?;
        let v4 = ip.version == IpVersion::V4;
        let (kind, mtu, least) = if v4 {
            (V4_FRAGMENTATION_NEEDED, be16(icmp, 6).into(), V4_MTU_MIN)
        } else {
            (V6_PACKET_TOO_BIG, be32(icmp, 4), V6_MTU_MIN)
        };
        let header_len = if v4 { usize::from(quoted.first()? & 0x0f) * 4 } else { V6_HEADER };
        let shortest = if v4 { V4_HEADER } else { V6_HEADER };
        if icmp[..2] != kind || mtu == 0 || header_len < shortest {
            return None; // routers that name no MTU are older than RFC 1191
        }
        let tcp = quoted.get(header_len..header_len + QUOTED)?;
        let (protocol, src, dst) = if v4 {
            let of = |at: usize| IpAddr16::from_v4(array(&quoted[at..at + 4]));
            (quoted[9], of(12), of(16))
        } else {
            let of = |at: usize| IpAddr16(array(&quoted[at..at + 16]));
            (quoted[6], of(8), of(24))
        };
        (protocol == PROTOCOL_TCP).then(|| Self {
            src,
            dst,
            src_port: be16(tcp, 0),
            dst_port: be16(tcp, 2),
            seq: Seq(be32(tcp, 4)),
            mtu: mtu.max(least),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::packet::{Net, Packet};

    /// An error in a frame of IPv6, about a segment from [..1] port 80 to [..2] port 40000.
    fn too_big_v6(mtu: u32) -> Vec<u8> {
        let address = |last| [&[0x20, 1, 0xd, 0xb8][..], &[0; 11], &[last]].concat();
        let header = |len: u16, next, from, to| {
            let len = len.to_be_bytes();
            [&[0x60, 0, 0, 0, len[0], len[1], next, 64][..], &address(from), &address(to)].concat()
        };
        let tcp = [&80_u16.to_be_bytes()[..], &40_000_u16.to_be_bytes(), &[1, 2, 3, 4]].concat();
        let icmp = [&[2, 0, 0, 0][..], &mtu.to_be_bytes()].concat();
        let quoted = header(1460, PROTOCOL_TCP, 1, 2);
        let len = u16::try_from(icmp.len() + quoted.len() + tcp.len()).unwrap();
        let ethernet = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 9, 0x86, 0xdd];
        [&ethernet[..], &header(len, 58, 9, 1), &icmp, &quoted, &tcp].concat()
    }

    fn parse(frame: &[u8]) -> Option<TooBig> {
        let Ok(Packet { net: Net::Ip(ip), .. }) = Packet::parse(frame) else { return None };
        TooBig::parse(frame, &ip)
    }

    #[test]
    fn an_error_names_the_segment_and_what_the_path_takes() {
        let it = parse(&too_big_v6(1400)).expect("an error");
        assert_eq!((it.src_port, it.dst_port, it.seq), (80, 40_000, Seq(0x0102_0304)));
        assert_eq!((it.src.0[15], it.dst.0[15], it.mtu), (1, 2, 1400));
        assert_eq!(parse(&too_big_v6(600)).expect("an error").mtu, 1280, "no IPv6 path has less");
        assert_eq!(parse(&too_big_v6(0)), None);
    }

    #[test]
    fn an_error_that_is_cut_off_says_nothing() {
        let whole = too_big_v6(1400);
        for len in 0..whole.len() {
            let mut frame = whole[..len].to_vec();
            if let Some(field) = frame.get_mut(18..20) {
                let left = u16::try_from(len.saturating_sub(54)).unwrap();
                field.copy_from_slice(&left.to_be_bytes());
            }
            assert_eq!(parse(&frame), None, "{len} bytes");
        }
    }
}
