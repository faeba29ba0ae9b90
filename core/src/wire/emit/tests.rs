//! Emitted headers read back as they were meant.

use super::*;
use crate::wire::packet::{Packet, SackBlocks, ipv4_header_ok, tcp_checksum_ok};
use crate::wire::samples::{L2_V4, L2_V6, arb_segment};
use proptest::prelude::*;

proptest! {
    #[test]
    fn what_was_emitted_is_what_is_parsed(s in arb_segment()) {
        let frame = s.frame();
        let packet = Packet::parse(&frame).unwrap();
        let (ip, tcp) = packet.tcp().unwrap();
        let e = s.emit();
        prop_assert_eq!(
            (ip.version, ip.src, ip.dst, ip.tos, ip.ttl),
            (e.version, e.src, e.dst, e.tos, e.ttl)
        );
        prop_assert_eq!(ip.flow_label, if e.version == IpVersion::V6 { e.flow_label } else { 0 });
        prop_assert_eq!(
            (tcp.src_port, tcp.dst_port, tcp.seq, tcp.ack, tcp.flags, tcp.window),
            (e.src_port, e.dst_port, e.seq, e.ack, e.flags, e.window)
        );
        prop_assert_eq!(tcp.options.timestamps, e.timestamps);
        let fit = if e.timestamps.is_some() { 3 } else { 4 };
        let sack = &e.sack[..e.sack.len().min(fit)];
        prop_assert_eq!(tcp.options.sack, SackBlocks::new(sack));
        prop_assert_eq!(&frame[..usize::from(packet.eth.len)], e.l2);
        prop_assert_eq!(&frame[tcp.payload_offset as usize..], &s.payload[..]);
        prop_assert!(ip.dont_fragment && !ip.options);
        prop_assert!(!tcp.options.malformed && !tcp.options.unknown);
        prop_assert!(ipv4_header_ok(&frame, ip) && tcp_checksum_ok(&frame, ip, tcp));
    }

    #[test]
    fn a_partial_checksum_completes_to_the_full_one(s in arb_segment()) {
        let full = s.frame();
        let (mut partial, mut hdr) = s.partial_frame(u16::MAX);
        crate::wire::segment::complete_checksum(&mut hdr, &mut partial).unwrap();
        let packet = Packet::parse(&partial).unwrap();
        let (ip, tcp) = packet.tcp().unwrap();
        prop_assert!(tcp_checksum_ok(&partial, ip, tcp));
        let field = usize::from(ip.payload_offset) + 16;
        prop_assert_eq!(&partial[..field], &full[..field]);
        prop_assert_eq!(&partial[field + 2..], &full[field + 2..]);
        prop_assert_eq!(hdr, VirtioNetHdr::default());
    }
}

#[test]
fn a_pure_ack_is_the_bytes_the_standards_say() {
    let e = TcpEmit {
        l2: &L2_V4,
        version: IpVersion::V4,
        src: IpAddr16::from_v4([10, 0, 0, 1]),
        dst: IpAddr16::from_v4([10, 0, 0, 2]),
        tos: 0,
        ttl: 64,
        flow_label: 0,
        src_port: 0x1234,
        dst_port: 80,
        seq: Seq(1),
        ack: Seq(0xffff_ffff),
        flags: TcpFlags::ACK,
        window: 0x0200,
        timestamps: Some(Timestamps { tsval: 10, tsecr: 20 }),
        sack: &[],
        ip_id: 7,
    };
    let mut buf = [0xee; TcpEmit::MAX_LEN];
    let len = e.emit(&mut buf, 0, CsumMode::Full(&[]));
    // The IP and TCP checksums were worked out apart from this code.
    #[rustfmt::skip]
    let expected = [
        2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00,
        0x45, 0, 0, 52, 0, 7, 0x40, 0, 64, 6, 0x26, 0xbb, 10, 0, 0, 1, 10, 0, 0, 2,
        0x12, 0x34, 0, 80, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0x80, 0x10, 2, 0, 0x4e, 0x18, 0, 0,
        1, 1, 8, 10, 0, 0, 0, 10, 0, 0, 0, 20,
    ];
    assert_eq!(buf[..len], expected);
    assert!(buf[len..].iter().all(|b| *b == 0xee), "nothing is written behind the header");
}

#[test]
fn only_more_payload_than_mss_makes_a_super_segment() {
    let s = crate::wire::samples::v6_segment(&[0; 3000]);
    let (frame, hdr) = s.partial_frame(1000);
    let tcp_at = u16::try_from(L2_V6.len() + V6_HEADER).unwrap();
    assert_eq!(
        hdr,
        VirtioNetHdr {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV6,
            hdr_len: u16::try_from(frame.len() - 3000).unwrap(),
            gso_size: 1000,
            csum_start: tcp_at,
            csum_offset: 16,
        }
    );
    let (_, hdr) = s.partial_frame(3000);
    assert_eq!((hdr.gso_type, hdr.gso_size), (0, 0));
}
