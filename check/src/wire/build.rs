//! Builds frames from nothing: our own second opinion on what `core` emits.

use std::net::IpAddr;

use etherparse::checksum::Sum16BitWords;

use super::{IpAddr16, IpVersion, PROTOCOL_TCP, TcpFlags, pseudo_header, written};

/// A TCP segment without its payload. The MSS to SACK options are written as they are given.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Ethernet source.
    pub src_mac: [u8; 6],
    /// Ethernet destination.
    pub dst_mac: [u8; 6],
    /// IP source; its family is the packet's.
    pub src: IpAddr,
    /// IP destination.
    pub dst: IpAddr,
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
    /// Bits of the IP header: 0 not ECN-capable, 1 and 2 ECN-capable, 3 congestion experienced.
    pub ecn: u8,
    /// TSval and TSecr.
    pub timestamps: Option<(u32, u32)>,
    /// SACK blocks, in order.
    pub sack: Vec<(u32, u32)>,
    /// Further options, as they are on the wire.
    pub options: Vec<u8>,
}

impl Default for Segment {
    fn default() -> Self {
        Self {
            src_mac: [0; 6],
            dst_mac: [0; 6],
            src: [0, 0, 0, 0].into(),
            dst: [0, 0, 0, 0].into(),
            src_port: 0,
            dst_port: 0,
            seq: 0,
            ack: 0,
            flags: TcpFlags::NONE,
            window: 0,
            urgent: 0,
            ecn: 0,
            timestamps: None,
            sack: Vec::new(),
            options: Vec::new(),
        }
    }
}

/// The whole frame, checksums included.
///
/// # Panics
/// If the options do not fit 40 bytes, or the addresses are of two families.
#[must_use]
pub fn build(s: &Segment, payload: &[u8]) -> Vec<u8> {
    let mut options = s.options.clone();
    if let Some((tsval, tsecr)) = s.timestamps {
        options.extend([1, 1, 8, 10]);
        options.extend(tsval.to_be_bytes());
        options.extend(tsecr.to_be_bytes());
    }
    if !s.sack.is_empty() {
        options.extend([1, 1, 5, u8::try_from(2 + 8 * s.sack.len()).expect("few blocks")]);
        options
            .extend(s.sack.iter().flat_map(|(a, b)| [a.to_be_bytes(), b.to_be_bytes()]).flatten());
    }
    options.resize(options.len().next_multiple_of(4), 1);
    assert!(options.len() <= 40, "{} bytes of options", options.len());
    let mut tcp = Vec::with_capacity(60 + payload.len());
    tcp.extend(s.src_port.to_be_bytes());
    tcp.extend(s.dst_port.to_be_bytes());
    tcp.extend(s.seq.to_be_bytes());
    tcp.extend(s.ack.to_be_bytes());
    let words = u16::try_from(5 + options.len() / 4).expect("at most 15");
    tcp.extend((words << 12 | s.flags.0).to_be_bytes());
    tcp.extend(s.window.to_be_bytes());
    tcp.extend([0, 0]);
    tcp.extend(s.urgent.to_be_bytes());
    tcp.extend(options);
    tcp.extend(payload);
    let len = u32::try_from(tcp.len()).expect("one packet");
    let mut frame = [s.dst_mac, s.src_mac].concat();
    let version = match (s.src, s.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            frame.extend([8, 0]);
            frame.extend(ipv4(s, src.octets(), dst.octets(), tcp.len()));
            IpVersion::V4
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            frame.extend([0x86, 0xdd, 0x60 | s.ecn >> 4, s.ecn << 4, 0, 0]);
            frame.extend(u16::try_from(len).expect("one packet").to_be_bytes());
            frame.extend([PROTOCOL_TCP, 64]);
            frame.extend(src.octets());
            frame.extend(dst.octets());
            IpVersion::V6
        }
        _ => panic!("from {} to {}", s.src, s.dst),
    };
    let [src, dst] = [s.src, s.dst].map(IpAddr16::from);
    let sum = pseudo_header(version, src, dst, PROTOCOL_TCP, len).add_slice(&tcp);
    tcp[16..18].copy_from_slice(&written(&sum));
    frame.extend(tcp);
    frame
}

fn ipv4(s: &Segment, src: [u8; 4], dst: [u8; 4], tcp_len: usize) -> Vec<u8> {
    let total = u16::try_from(20 + tcp_len).expect("one packet");
    let mut ip = vec![0x45, s.ecn];
    ip.extend(total.to_be_bytes());
    ip.extend([0, 0, 0x40, 0, 64, PROTOCOL_TCP, 0, 0]);
    ip.extend(src);
    ip.extend(dst);
    let sum = Sum16BitWords::new().add_slice(&ip);
    ip[10..12].copy_from_slice(&written(&sum));
    ip
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
}
