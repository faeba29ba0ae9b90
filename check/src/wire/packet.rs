//! A frame, read from the outside in.

use std::net::Ipv4Addr;

use etherparse::{
    ArpPacketSlice, EtherType, IpNumber, Ipv4HeaderSlice, Ipv6ExtensionsSlice, Ipv6HeaderSlice,
    SingleVlanSlice, ip_number,
};

use super::{IpAddr16, IpVersion, Tcp};

/// Bytes of an Ethernet header without tags.
const ETHERNET: usize = 14;

/// A frame that ends before its headers do, or that contradicts itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Unreadable;

/// A frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Packet {
    /// Layer 2.
    pub eth: Eth,
    /// Layer 3.
    pub net: Net,
}

/// The Ethernet header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Eth {
    /// Destination.
    pub dst: [u8; 6],
    /// Source.
    pub src: [u8; 6],
    /// Bytes with its VLAN tags: layer 3 starts here.
    pub len: usize,
    /// Types and numbers of these, without priorities; of two the outer is in the upper half.
    pub vlan: u64,
}

/// Layer 3.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Net {
    /// ARP.
    Arp(Arp),
    /// IPv4 or IPv6.
    Ip(Ip),
    /// Anything else.
    Other,
}

/// The owner of an IPv4 address (RFC 826).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Arp {
    /// 1 asks, 2 answers.
    pub op: u16,
    /// The sender's MAC.
    pub sender_mac: [u8; 6],
    /// See `sender_mac`.
    pub sender_ip: Ipv4Addr,
    /// The address in question.
    pub target_ip: Ipv4Addr,
}

/// An IP packet. Offsets count from the start of the frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ip {
    /// Family.
    pub version: IpVersion,
    /// Source.
    pub src: IpAddr16,
    /// Destination.
    pub dst: IpAddr16,
    /// DSCP and ECN.
    pub tos: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Flow label of IPv6.
    pub flow_label: u32,
    /// Where it starts.
    pub header_offset: u16,
    /// Where layer 4 starts.
    pub payload_offset: u16,
    /// Where it ends by its own length.
    pub end: u32,
    /// The payload.
    pub l4: L4,
}

/// The payload of an IP packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum L4 {
    /// A TCP segment with a whole header.
    Tcp(Tcp),
    /// A piece of a packet.
    Fragment,
    /// ICMP of its family.
    Icmp,
    /// Anything else.
    Other,
}

impl Packet {
    /// Reads a frame without its check sequence.
    ///
    /// # Errors
    /// See [`Unreadable`].
    pub fn parse(frame: &[u8]) -> Result<Self, Unreadable> {
        let (dst, rest) = frame.split_first_chunk().ok_or(Unreadable)?;
        let (src, rest) = rest.split_first_chunk().ok_or(Unreadable)?;
        let mut ether_type = EtherType(u16::from_be_bytes(*rest.first_chunk().ok_or(Unreadable)?));
        let (mut len, mut vlan) = (ETHERNET, 0);
        while matches!(ether_type, EtherType::VLAN_TAGGED_FRAME | EtherType::PROVIDER_BRIDGING) {
            let tag = SingleVlanSlice::from_slice(&frame[len..]).map_err(|_| Unreadable)?;
            let number = u64::from(tag.vlan_identifier().value());
            if number != 0 {
                vlan = vlan << 32 | u64::from(ether_type.0) << 16 | number; // else only a priority
            }
            ether_type = tag.ether_type();
            len += tag.header_slice().len();
        }
        let net = match ether_type {
            EtherType::IPV4 => Net::Ip(Ip::read_v4(frame, len)?),
            EtherType::IPV6 => Net::Ip(Ip::read_v6(frame, len)?),
            EtherType::ARP => Arp::read(&frame[len..])?,
            _ => Net::Other,
        };
        Ok(Self { eth: Eth { dst: *dst, src: *src, len, vlan }, net })
    }

    /// The segment and the packet it came in.
    #[must_use]
    pub const fn tcp(&self) -> Option<(&Ip, &Tcp)> {
        match &self.net {
            Net::Ip(ip) => match &ip.l4 {
                L4::Tcp(tcp) => Some((ip, tcp)),
                _ => None,
            },
            _ => None,
        }
    }
}

impl Arp {
    fn read(bytes: &[u8]) -> Result<Net, Unreadable> {
        let arp = ArpPacketSlice::from_slice(bytes).map_err(|_| Unreadable)?;
        let ip = |b: &[u8]| b.first_chunk().copied().map(Ipv4Addr::from);
        let (Some(&sender_mac), Some(sender_ip), Some(target_ip)) = (
            arp.sender_hw_addr().first_chunk(),
            ip(arp.sender_protocol_addr()),
            ip(arp.target_protocol_addr()),
        ) else {
            return Ok(Net::Other);
        };
        Ok(Net::Arp(Self { op: arp.operation().0, sender_mac, sender_ip, target_ip }))
    }
}

impl Ip {
    fn read_v4(frame: &[u8], at: usize) -> Result<Self, Unreadable> {
        let h = Ipv4HeaderSlice::from_slice(&frame[at..]).map_err(|_| Unreadable)?;
        let payload_at = at + h.slice().len();
        let end = at + usize::from(h.total_len());
        let payload = frame.get(payload_at..end).ok_or(Unreadable)?;
        let l4 = if h.is_fragmenting_payload() {
            L4::Fragment
        } else {
            L4::read(h.protocol(), ip_number::ICMP, payload, payload_at)
        };
        let mapped = |[a, b, c, d]: [u8; 4]| {
            IpAddr16([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d])
        };
        Ok(Self {
            version: IpVersion::V4,
            src: mapped(h.source()),
            dst: mapped(h.destination()),
            tos: h.dcp().value() << 2 | h.ecn().value(),
            ttl: h.ttl(),
            flow_label: 0,
            header_offset: offset(at)?,
            payload_offset: offset(payload_at)?,
            end: u32::try_from(end).map_err(|_| Unreadable)?,
            l4,
        })
    }

    fn read_v6(frame: &[u8], at: usize) -> Result<Self, Unreadable> {
        let h = Ipv6HeaderSlice::from_slice(&frame[at..]).map_err(|_| Unreadable)?;
        let body_at = at + h.slice().len();
        let end = body_at + usize::from(h.payload_length());
        let body = frame.get(body_at..end).ok_or(Unreadable)?;
        let (extensions, protocol, payload) =
            Ipv6ExtensionsSlice::from_slice(h.next_header(), body).map_err(|_| Unreadable)?;
        let payload_at = end - payload.len();
        let l4 = if extensions.is_fragmenting_payload() {
            L4::Fragment
        } else {
            L4::read(protocol, ip_number::IPV6_ICMP, payload, payload_at)
        };
        Ok(Self {
            version: IpVersion::V6,
            src: IpAddr16(h.source()),
            dst: IpAddr16(h.destination()),
            tos: h.traffic_class(),
            ttl: h.hop_limit(),
            flow_label: h.flow_label().value(),
            header_offset: offset(at)?,
            payload_offset: offset(payload_at)?,
            end: u32::try_from(end).map_err(|_| Unreadable)?,
            l4,
        })
    }
}

impl L4 {
    fn read(protocol: IpNumber, icmp: IpNumber, payload: &[u8], at: usize) -> Self {
        match protocol {
            ip_number::TCP => Tcp::read(payload, at).map_or(Self::Other, Self::Tcp),
            _ if protocol == icmp => Self::Icmp,
            _ => Self::Other,
        }
    }
}

fn offset(at: usize) -> Result<u16, Unreadable> {
    u16::try_from(at).map_err(|_| Unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::TcpFlags;
    use crate::wire::{Segment, build};

    /// One of IPv4, one of IPv6, five bytes of payload each.
    fn frames() -> [Vec<u8>; 2] {
        let v4 = Segment { seq: 77, flags: TcpFlags::ACK, ecn: 2, ..Segment::default() };
        let (src, dst) = ([0xfd; 16].into(), [0xfe; 16].into());
        [build(&v4, b"hello"), build(&Segment { src, dst, ..v4 }, b"hello")]
    }

    #[test]
    fn what_the_core_reads_of_a_frame_is_what_is_read_here() {
        for mut frame in frames() {
            for padded in [0, 9] {
                frame.resize(frame.len() + padded, 0);
                let here = Packet::parse(&frame).expect("whole");
                let core = nightporter_core::wire::packet::Packet::parse(&frame).expect("whole");
                let ((ip, tcp), (core_ip, core_tcp)) =
                    (here.tcp().expect("TCP"), core.tcp().expect("TCP"));
                assert_eq!((ip.src, ip.dst, ip.tos), (core_ip.src, core_ip.dst, core_ip.tos));
                assert_eq!((ip.end, ip.payload_offset), (core_ip.end, core_ip.payload_offset));
                assert_eq!((tcp.seq.0, tcp.flags.0), (core_tcp.seq.0, core_tcp.flags.0));
                assert_eq!((tcp.payload_len, tcp.payload_offset), (5, core_tcp.payload_offset));
            }
        }
    }

    #[test]
    fn tags_and_extension_headers_are_looked_behind_and_fragments_are_not() {
        let [v4, v6] = frames();
        let mut tagged = v4.clone();
        tagged.splice(12..12, [0x88, 0xa8, 0, 5, 0x81, 0, 0, 6]);
        let packet = Packet::parse(&tagged).expect("whole");
        assert_eq!((packet.eth.len, packet.tcp().expect("TCP").1.seq.0), (22, 77));

        let mut behind = v6.clone();
        behind.splice(54..54, [6, 0, 1, 4, 0, 0, 0, 0]);
        (behind[20], behind[19]) = (60, v6[19] + 8);
        let packet = Packet::parse(&behind).expect("whole");
        assert_eq!(packet.tcp().expect("TCP").0.payload_offset, 62);

        let mut piece = v4;
        piece[20] = 0x20;
        let Net::Ip(ip) = Packet::parse(&piece).expect("whole").net else { panic!("IPv4") };
        assert_eq!(ip.l4, L4::Fragment);
    }

    #[test]
    fn no_beginning_of_a_frame_is_a_frame() {
        for frame in frames() {
            for len in 0..frame.len() {
                assert_eq!(Packet::parse(&frame[..len]), Err(Unreadable), "{len} bytes");
            }
        }
    }
}
