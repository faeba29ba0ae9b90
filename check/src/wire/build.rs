//! Builds frames from nothing: a second opinion on the frames that `core` emits.

use std::net::IpAddr;

use etherparse::checksum::Sum16BitWords;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::{
    F_NEEDS_CSUM, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, IpAddr16, IpVersion, PROTOCOL_TCP,
    TcpFlags, pseudo_header, unfinished, written,
};
use crate::frame::Frame;

/// Where the checksum is in a TCP header.
const CHECKSUM_AT: usize = 16;

/// A TCP segment without its payload, and the headers around it. The MSS to SACK options are
/// written as they are given.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Ethernet source.
    pub src_mac: [u8; 6],
    /// Ethernet destination.
    pub dst_mac: [u8; 6],
    /// VLAN tags, the outer first: type and number.
    pub tags: Vec<[u8; 4]>,
    /// IP source; its family is the packet's.
    pub src: IpAddr,
    /// IP destination.
    pub dst: IpAddr,
    /// Bits of the IP header: 0 not ECN-capable, 1 and 2 ECN-capable, 3 congestion experienced.
    pub ecn: u8,
    /// Time to live.
    pub ttl: u8,
    /// Flow label, of IPv6.
    pub flow_label: u32,
    /// Identification, of IPv4.
    pub id: u16,
    /// Options of an IPv4 header, whole words.
    pub ip_options: Vec<u8>,
    /// The sender's port.
    pub src_port: u16,
    /// The receiver's port.
    pub dst_port: u16,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags.
    pub flags: TcpFlags,
    /// Window in wire units.
    pub window: u16,
    /// Urgent pointer.
    pub urgent: u16,
    /// TSval and TSecr.
    pub timestamps: Option<(u32, u32)>,
    /// SACK blocks, in order.
    pub sack: Vec<(u32, u32)>,
    /// Options before these, as they are on the wire.
    pub options: Vec<u8>,
    /// Options behind them.
    pub last_options: Vec<u8>,
    /// The driver has to finish the checksum, and to cut payload longer than so many bytes.
    pub offload: Option<u16>,
}

impl Default for Segment {
    fn default() -> Self {
        Self {
            src_mac: [0; 6],
            dst_mac: [0; 6],
            tags: Vec::new(),
            src: [0, 0, 0, 0].into(),
            dst: [0, 0, 0, 0].into(),
            ecn: 0,
            ttl: 64,
            flow_label: 0,
            id: 0,
            ip_options: Vec::new(),
            src_port: 0,
            dst_port: 0,
            seq: 0,
            ack: 0,
            flags: TcpFlags::NONE,
            window: 0,
            urgent: 0,
            timestamps: None,
            sack: Vec::new(),
            options: Vec::new(),
            last_options: Vec::new(),
            offload: None,
        }
    }
}

/// The whole frame, checksums included.
///
/// # Panics
/// If the options do not fit 40 bytes, or the addresses are of two families.
#[must_use]
pub fn build(s: &Segment, payload: &[u8]) -> Vec<u8> {
    s.frame(payload).bytes
}

impl Segment {
    /// The frame and its driver's header.
    ///
    /// # Panics
    /// See [`build`].
    #[must_use]
    pub fn frame(&self, payload: &[u8]) -> Frame {
        let mut tcp = self.tcp();
        let header_len = tcp.len();
        tcp.extend(payload);
        let mut bytes = [self.dst_mac, self.src_mac].concat();
        bytes.extend(self.tags.iter().flatten());
        let version = match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                bytes.extend([8, 0]);
                bytes.extend(self.ipv4(src.octets(), dst.octets(), tcp.len()));
                IpVersion::V4
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                bytes.extend([0x86, 0xdd]);
                bytes.extend(self.ipv6(src.octets(), dst.octets(), tcp.len()));
                IpVersion::V6
            }
            _ => panic!("from {} to {}", self.src, self.dst),
        };
        let [src, dst] = [self.src, self.dst].map(IpAddr16::from);
        let len = u32::try_from(tcp.len()).expect("one packet");
        let pseudo = pseudo_header(version, src, dst, PROTOCOL_TCP, len);
        let check = match self.offload {
            Some(_) => unfinished(&pseudo),
            None => written(&pseudo.add_slice(&tcp)),
        };
        tcp[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&check);
        let tcp_at = bytes.len();
        bytes.extend(tcp);
        let hdr = self.offload.map_or_else(VirtioNetHdr::default, |mss| {
            let cut = payload.len() > usize::from(mss);
            let family = if version == IpVersion::V4 { GSO_TCPV4 } else { GSO_TCPV6 };
            let ecn = if self.flags.cwr() { GSO_ECN } else { 0 };
            VirtioNetHdr {
                flags: F_NEEDS_CSUM,
                gso_type: if cut { family | ecn } else { GSO_NONE },
                hdr_len: if cut { word(tcp_at + header_len) } else { 0 },
                gso_size: if cut { mss } else { 0 },
                csum_start: word(tcp_at),
                csum_offset: word(CHECKSUM_AT),
            }
        });
        Frame { hdr, bytes }
    }

    /// The TCP header without its checksum.
    fn tcp(&self) -> Vec<u8> {
        let mut options = self.options.clone();
        if let Some((tsval, tsecr)) = self.timestamps {
            options.extend([1, 1, 8, 10]);
            options.extend(tsval.to_be_bytes());
            options.extend(tsecr.to_be_bytes());
        }
        if !self.sack.is_empty() {
            options.extend([1, 1, 5, u8::try_from(2 + 8 * self.sack.len()).expect("few blocks")]);
            let numbers = self.sack.iter().flat_map(|(a, b)| [a.to_be_bytes(), b.to_be_bytes()]);
            options.extend(numbers.flatten());
        }
        options.extend(&self.last_options);
        options.resize(options.len().next_multiple_of(4), 1);
        assert!(options.len() <= 40, "{} bytes of options", options.len());
        let mut tcp = Vec::with_capacity(60);
        tcp.extend(self.src_port.to_be_bytes());
        tcp.extend(self.dst_port.to_be_bytes());
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        tcp.extend((word(5 + options.len() / 4) << 12 | self.flags.0).to_be_bytes());
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0, 0]);
        tcp.extend(self.urgent.to_be_bytes());
        tcp.extend(options);
        tcp
    }

    fn ipv4(&self, src: [u8; 4], dst: [u8; 4], tcp_len: usize) -> Vec<u8> {
        let header_len = 20 + self.ip_options.len();
        let words = u8::try_from(header_len / 4).expect("at most 15");
        let mut ip = vec![0x40 | words, self.ecn];
        ip.extend(word(header_len + tcp_len).to_be_bytes());
        ip.extend(self.id.to_be_bytes());
        ip.extend([0x40, 0, self.ttl, PROTOCOL_TCP, 0, 0]); // DF
        ip.extend(src);
        ip.extend(dst);
        ip.extend(&self.ip_options);
        let sum = Sum16BitWords::new().add_slice(&ip);
        ip[10..12].copy_from_slice(&written(&sum));
        ip
    }

    fn ipv6(&self, src: [u8; 16], dst: [u8; 16], tcp_len: usize) -> Vec<u8> {
        let first = 6 << 28 | u32::from(self.ecn) << 20 | self.flow_label;
        let mut ip = first.to_be_bytes().to_vec();
        ip.extend(word(tcp_len).to_be_bytes());
        ip.extend([PROTOCOL_TCP, self.ttl]);
        ip.extend(src);
        ip.extend(dst);
        ip
    }
}

fn word(n: usize) -> u16 {
    u16::try_from(n).expect("one packet")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Packet, ipv4_header_ok, tcp_checksum_ok};

    #[test]
    fn what_is_built_parses_to_itself_with_right_checksums() {
        for v6 in [false, true] {
            let [src, dst]: [IpAddr; 2] = if v6 {
                [[0xfd; 16].into(), [0xfe; 16].into()]
            } else {
                [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()]
            };
            let s = Segment {
                src,
                dst,
                seq: 7,
                ack: 9,
                flags: TcpFlags::ACK | TcpFlags::PSH,
                ecn: 2,
                timestamps: Some((1, 2)),
                sack: vec![(20, 30)],
                ..Segment::default()
            };
            let frame = build(&s, b"hello");
            let packet = Packet::parse(&frame).unwrap();
            let (ip, tcp) = packet.tcp().unwrap();
            assert!(ipv4_header_ok(&frame, ip) && tcp_checksum_ok(&frame, ip));
            assert_eq!((tcp.seq.0, tcp.ack.0, tcp.payload_len, ip.tos & 3), (7, 9, 5, 2));
            assert_eq!(tcp.options.timestamps.unwrap().tsecr, 2);
            assert_eq!(tcp.options.sack.as_slice().len(), 1);
        }
    }

    #[test]
    fn what_is_around_a_segment_is_where_it_belongs() {
        let plain = Segment { flags: TcpFlags::ACK, ..Segment::default() };
        let tagged = Segment {
            tags: vec![[0x81, 0, 0, 7]],
            ip_options: vec![7, 7, 4, 0, 0, 0, 0, 0],
            offload: Some(1000),
            ..plain.clone()
        };
        let frame = tagged.frame(&[7; 2500]);
        let packet = Packet::parse(&frame.bytes).unwrap();
        let (ip, tcp) = packet.tcp().unwrap();
        assert!(ipv4_header_ok(&frame.bytes, ip));
        assert_eq!((packet.eth.len, ip.payload_offset, tcp.payload_len), (18, 46, 2500));
        let VirtioNetHdr { gso_type, gso_size, hdr_len, csum_start, .. } = frame.hdr;
        assert_eq!((gso_type, gso_size, hdr_len, csum_start), (GSO_TCPV4, 1000, 66, 46));
        let pieces = crate::wire::on_wire(frame);
        assert_eq!(pieces.len(), 3);
        assert!(pieces.iter().all(|piece| {
            let packet = Packet::parse(&piece.bytes).unwrap();
            tcp_checksum_ok(&piece.bytes, packet.tcp().unwrap().0)
        }));
        let short = Segment { offload: Some(1000), ..plain }.frame(&[7; 1000]);
        assert_eq!((short.hdr.gso_type, short.hdr.flags), (GSO_NONE, F_NEEDS_CSUM));
    }
}
