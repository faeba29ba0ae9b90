//! ICMP errors about TCP segments (RFC 792, RFC 4443), and of these the ones that say that a packet
//! was too big for its path (RFC 1191, RFC 8201).

use super::ip::{Ip, IpAddr16, IpVersion, PROTOCOL_TCP, V4_HEADER, V6_HEADER};
use super::seq::Seq;
use super::{array, be16, be32};

/// Destination unreachable: fragmentation needed and DF set (RFC 792).
const V4_FRAGMENTATION_NEEDED: [u8; 2] = [3, 4];
/// Packet too big (RFC 4443 section 3.2).
const V6_PACKET_TOO_BIG: [u8; 2] = [2, 0];
/// Types that quote a packet: destination unreachable, source quench, redirect, time exceeded,
/// parameter problem (RFC 792).
const V4_ERRORS: [u8; 5] = [3, 4, 5, 11, 12];
/// The same (RFC 4443 section 2.1): destination unreachable, too big, time exceeded, parameter
/// problem.
const V6_ERRORS: [u8; 4] = [1, 2, 3, 4];
/// Bytes of an ICMP header of these kinds; the packet that it is about follows it.
const HEADER: usize = 8;
/// Bytes of a TCP header that every error quotes: ports and sequence number (RFC 792).
const QUOTED: usize = 8;
/// Where the sequence number is in them.
const SEQ_AT: usize = 4;
/// No path that carries IPv4 TCP has less; an error that asks for less is forged or broken (Linux
/// `min_pmtu`). For IPv6 it is 1280 (RFC 8200 section 5).
const V4_MTU_MIN: u32 = 552;
const V6_MTU_MIN: u32 = 1280;

/// A TCP segment that an error quotes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Quoted {
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
    /// Where that is in the ICMP message.
    pub(super) seq_at: usize,
}

impl Quoted {
    /// Where the checksum is in an ICMP message.
    pub(super) const CHECKSUM_AT: usize = 2;

    /// The segment in the packet, if this is an error about one. Its checksum is not verified.
    #[must_use]
    pub fn parse(frame: &[u8], ip: &Ip) -> Option<Self> {
        let icmp = frame.get(usize::from(ip.payload_offset)..ip.end as usize)?;
        let quoted = icmp.get(HEADER..)?;
        let v4 = ip.version == IpVersion::V4;
        let is_error = if v4 { V4_ERRORS.contains(&icmp[0]) } else { V6_ERRORS.contains(&icmp[0]) };
        let header_len = if v4 { usize::from(quoted.first()? & 0x0f) * 4 } else { V6_HEADER };
        let shortest = if v4 { V4_HEADER } else { V6_HEADER };
        if !is_error || header_len < shortest {
            return None;
        }
        let tcp = quoted.get(header_len..header_len + QUOTED)?;
        let (protocol, src, dst) = if v4 {
            let of = |at: usize| IpAddr16::from_v4(array(&quoted[at..at + 4]));
            (quoted[9], of(12), of(16))
        } else {
            let of = |at: usize| IpAddr16(array(&quoted[at..at + 16]));
            (quoted[6], of(8), of(24))
        };
        let is_later_fragment = v4 && be16(quoted, 6) & 0x1fff != 0;
        (protocol == PROTOCOL_TCP && !is_later_fragment).then(|| Self {
            src,
            dst,
            src_port: be16(tcp, 0),
            dst_port: be16(tcp, 2),
            seq: Seq(be32(tcp, SEQ_AT)),
            seq_at: HEADER + header_len + SEQ_AT,
        })
    }
}

/// A TCP segment was too big.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TooBig {
    /// That segment.
    pub segment: Quoted,
    /// Bytes of the largest IP packet that the path takes; at least the protocol's minimum.
    pub mtu: u32,
}

impl TooBig {
    /// The error in the packet, if it is one and names an MTU. Its checksum is not verified: a
    /// forger who can guess the numbers of a segment that is under way can also compute a sum, and
    /// a broken error can only make segments smaller.
    #[must_use]
    pub fn parse(frame: &[u8], ip: &Ip) -> Option<Self> {
        let icmp: &[u8; HEADER] = frame.get(usize::from(ip.payload_offset)..)?.first_chunk()?;
        let (kind, mtu, least) = if ip.version == IpVersion::V4 {
            (V4_FRAGMENTATION_NEEDED, be16(icmp, 6).into(), V4_MTU_MIN)
        } else {
            (V6_PACKET_TOO_BIG, be32(icmp, 4), V6_MTU_MIN)
        };
        if icmp[..2] != kind || mtu == 0 {
            return None; // routers that name no MTU are older than RFC 1191
        }
        Some(Self { segment: Quoted::parse(frame, ip)?, mtu: mtu.max(least) })
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
        let quoted = it.segment;
        assert_eq!((quoted.src_port, quoted.dst_port), (80, 40_000));
        assert_eq!((quoted.seq, it.mtu), (Seq(0x0102_0304), 1400));
        assert_eq!((quoted.src.0[15], quoted.dst.0[15]), (1, 2));
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
