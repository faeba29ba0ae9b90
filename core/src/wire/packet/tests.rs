//! COM-01 to COM-10 on frames written out by hand, and no frame that panics.

use super::*;
use crate::wire::samples::{L2_V4, L2_V6, Segment, arb_segment, v4_segment, v6_segment};
use proptest::prelude::*;

fn ip_of(frame: &[u8]) -> Ip {
    match Packet::parse(frame).unwrap().net {
        Net::Ip(ip) => ip,
        other => panic!("{other:?}"),
    }
}

fn tcp_of(frame: &[u8]) -> Tcp {
    match ip_of(frame).l4 {
        L4::Tcp(tcp) => tcp,
        other => panic!("{other:?}"),
    }
}

/// An IPv4 frame with this IP header length, in bytes, and these bytes behind it.
fn v4_frame(header_len: usize, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let words = u8::try_from(header_len / 4).unwrap();
    let total = u16::try_from(header_len + payload.len()).unwrap().to_be_bytes();
    let mut ip = vec![0x40 | words, 0, total[0], total[1], 0, 7, 0x40, 0, 64, protocol, 0, 0];
    ip.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    ip.resize(header_len, 1); // options: NOPs
    [&L2_V4[..], &ip, payload].concat()
}

/// An IPv6 frame whose first next-header is `next`.
fn v6_frame(next: u8, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = [&L2_V6[..], &[0x60, 0, 0, 0, len[0], len[1], next, 64]].concat();
    for last in [1, 2] {
        frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
    }
    frame.extend(payload);
    frame
}

/// A TCP segment with these option bytes: port 1 to 2, seq 3, ack 4, window 5.
fn tcp_bytes(flags: u16, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let words = u16::try_from(5 + options.len() / 4).unwrap();
    let mut b = vec![0, 1, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4];
    b.extend((words << 12 | flags).to_be_bytes());
    b.extend([0, 5, 0, 0, 0, 6]);
    b.extend(options);
    b.extend(payload);
    b
}

const ACK: u16 = 0x010;
const SYN: u16 = 0x002;

#[test]
fn every_field_is_where_the_standards_put_it() {
    let mut frame = v4_frame(20, 6, &tcp_bytes(0x1ff & !SYN, &[], b"hello"));
    frame[15] = 0xb9; // DSCP 46, ECT(1)
    let ip = ip_of(&frame);
    let tcp = tcp_of(&frame);
    assert_eq!((ip.version, ip.tos, ip.ttl, ip.protocol), (IpVersion::V4, 0xb9, 64, 6));
    assert_eq!(ip.src.to_ip(), Ipv4Addr::new(10, 0, 0, 1));
    assert_eq!(ip.dst.to_ip(), Ipv4Addr::new(10, 0, 0, 2));
    assert_eq!((ip.header_offset, ip.payload_offset, ip.end), (14, 34, 59));
    assert!(ip.dont_fragment && !ip.options);
    assert_eq!((tcp.src_port, tcp.dst_port, tcp.seq, tcp.ack), (1, 2, Seq(3), Seq(4)));
    assert_eq!((tcp.window, tcp.urgent, tcp.flags), (5, 6, TcpFlags(0x1fd)));
    assert_eq!((tcp.payload_offset, tcp.payload_len, tcp.seq_len()), (54, 5, 6));
    assert_eq!(tcp.options, TcpOptions::NONE);

    let mut frame = v6_frame(6, &tcp_bytes(SYN, &[], b""));
    frame[14..18].copy_from_slice(&[0x6b, 0x9a, 0xbc, 0xde]);
    let ip = ip_of(&frame);
    assert_eq!((ip.version, ip.tos, ip.flow_label), (IpVersion::V6, 0xb9, 0xabcde));
    assert_eq!((ip.header_offset, ip.payload_offset, ip.end), (14, 54, 74));
    assert_eq!(ip.dst.to_string(), "fd00::2");
    assert_eq!(tcp_of(&frame).seq_len(), 1);
}

#[test]
fn com_02_the_padding_of_a_short_frame_is_no_payload() {
    let mut frame = v4_frame(20, 6, &tcp_bytes(ACK, &[], b""));
    frame.resize(60, 0);
    let tcp = tcp_of(&frame);
    assert_eq!((tcp.payload_len, ip_of(&frame).end), (0, 54));
}

#[test]
fn com_02_a_super_frame_of_64_kib_is_read_whole() {
    let payload = vec![1; 65_535 - 20 - 20];
    let tcp = tcp_of(&v4_frame(20, 6, &tcp_bytes(ACK, &[], &payload)));
    assert_eq!(tcp.payload_len as usize, payload.len());
    let payload = vec![1; 65_535 - 20];
    let tcp = tcp_of(&v6_frame(6, &tcp_bytes(ACK, &[], &payload)));
    assert_eq!(tcp.payload_len as usize, payload.len());
}

#[test]
fn com_03_an_ip_header_that_contradicts_itself_is_refused() {
    let good = v4_frame(20, 6, &tcp_bytes(ACK, &[], b"x"));
    let with = |at: usize, value: u8| {
        let mut frame = good.clone();
        frame[at] = value;
        Packet::parse(&frame).map(|_| ())
    };
    assert_eq!(with(14, 0x44), Err(DropReason::MalformedHeader), "IHL 4");
    assert_eq!(with(14, 0x65), Err(DropReason::MalformedHeader), "version 6 as IPv4");
    assert_eq!(with(17, 19), Err(DropReason::MalformedHeader), "total length below IHL");
    assert_eq!(with(17, 42), Err(DropReason::Truncated), "total length past the frame");
    assert_eq!(with(17, 41), Ok(()));
    let v6 = v6_frame(6, &tcp_bytes(ACK, &[], b""));
    let with = |at: usize, value: u8| {
        let mut frame = v6.clone();
        frame[at] = value;
        Packet::parse(&frame).map(|_| ())
    };
    assert_eq!(with(14, 0x45), Err(DropReason::MalformedHeader), "version 4 as IPv6");
    assert_eq!(with(19, 21), Err(DropReason::Truncated), "payload length past the frame");
}

#[test]
fn com_03_a_tcp_header_that_does_not_fit_is_malformed_tcp() {
    let bytes = tcp_bytes(ACK, &[1; 4], b"");
    for (doff, good) in [(0, false), (4, false), (5, true), (6, true), (7, false), (15, false)] {
        let mut bytes = bytes.clone();
        bytes[12] = doff << 4;
        for ip in [ip_of(&v4_frame(20, 6, &bytes)), ip_of(&v6_frame(6, &bytes))] {
            assert_eq!(matches!(ip.l4, L4::Tcp(_)), good, "data offset {doff}");
            assert_eq!(ip.l4 == L4::MalformedTcp, !good, "data offset {doff}");
        }
    }
    assert_eq!(ip_of(&v4_frame(20, 6, &bytes[..19])).l4, L4::MalformedTcp);
    assert_eq!(ip_of(&v4_frame(20, 6, &[])).l4, L4::MalformedTcp);
}

#[test]
fn com_03_a_frame_cut_anywhere_is_refused() {
    for frame in [
        v4_segment(b"x").frame(),
        v6_segment(b"x").frame(),
        v6_frame(0, &[&[6, 0, 1, 4, 0, 0, 0, 0][..], &tcp_bytes(ACK, &[], b"")].concat()),
    ] {
        for len in 0..frame.len() {
            assert_eq!(Packet::parse(&frame[..len]), Err(DropReason::Truncated), "{len} bytes");
        }
        assert!(Packet::parse(&frame).is_ok());
    }
}

#[test]
fn com_04_a_walk_over_broken_options_stops_and_says_so() {
    let malformed = |options: &[u8]| tcp_of(&v4_frame(20, 6, &tcp_bytes(ACK, options, b"x")));
    for (options, bad) in [
        ([8, 0, 1, 1], true),   // length 0
        ([8, 1, 1, 1], true),   // length 1
        ([8, 255, 1, 1], true), // past the end
        ([1, 1, 8, 3], true),   // past the end by one
        ([1, 1, 1, 8], true),   // no length at all
        ([1, 1, 8, 2], false),  // short for timestamps, but walkable
        ([0, 8, 0, 1], false),  // behind the end of options nothing counts
        ([1, 1, 1, 0], false),
    ] {
        let tcp = malformed(&options);
        assert_eq!(tcp.options.malformed, bad, "{options:?}");
        assert_eq!(tcp.payload_len, 1);
    }
    assert_eq!(malformed(&[0, 30, 2, 0]).options, TcpOptions::NONE);
    assert!(malformed(&[1, 1, 8, 2]).options.unknown);
}

#[test]
fn com_05_the_whitelist_of_a_syn_and_of_other_segments() {
    let options = |flags: u16, option: &[u8]| {
        let mut bytes = option.to_vec();
        bytes.resize(bytes.len().next_multiple_of(4), 1);
        tcp_of(&v4_frame(20, 6, &tcp_bytes(flags, &bytes, b""))).options
    };
    let ts = [8, 10, 0, 0, 0, 9, 0, 0, 0, 8];
    let sack = [5, 10, 0, 0, 0, 1, 0, 0, 0, 2];
    // The option, and whether it is fine on a SYN and on any other segment.
    let table: [(&str, &[u8], bool, bool); 22] = [
        ("none", &[], true, true),
        ("MSS", &[2, 4, 5, 0xb4], true, false),
        ("MSS of odd size", &[2, 3, 5], false, false),
        ("window scale", &[3, 3, 7], true, false),
        ("SACK permitted", &[4, 2], true, false),
        ("SACK", &sack, false, true),
        ("SACK without a block", &[5, 2], false, false),
        ("SACK of odd size", &[5, 9, 0, 0, 0, 1, 0, 0, 0], false, false),
        ("timestamps", &ts, true, true),
        ("timestamps of odd size", &[8, 9, 0, 0, 0, 9, 0, 0, 0], false, false),
        ("timestamps twice", &[ts, ts].concat(), false, false),
        ("SACK twice", &[sack, sack].concat(), false, false),
        ("MD5", &[19, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], false, false),
        ("user timeout", &[28, 4, 0, 1], false, false),
        ("AO", &[29, 4, 1, 1], false, false),
        ("MPTCP", &[30, 4, 0, 0], false, false),
        ("TFO cookie request", &[34, 2], true, false),
        ("TFO cookie", &[34, 6, 1, 2, 3, 4], true, false),
        ("experimental TFO", &[254, 4, 0xf9, 0x89], true, false),
        ("SMC", &[254, 6, 0xe2, 0xd4, 0xc3, 0xd9], false, false),
        ("TCP-ENO", &[69, 2], false, false),
        ("AccECN", &[172, 2], false, false),
    ];
    for (name, bytes, on_syn, elsewhere) in table {
        for (flags, fine) in [(SYN, on_syn), (SYN | ACK, on_syn), (ACK, elsewhere)] {
            let o = options(flags, bytes);
            assert_eq!(o.understood(), fine, "{name}, flags {flags:#x}");
            assert!(!o.malformed, "{name}");
            assert_eq!(o.mptcp, bytes.first() == Some(&30), "{name}");
        }
        let tfo = matches!(bytes, [34, ..] | [254, _, 0xf9, ..]);
        assert_eq!(options(SYN, bytes).tfo, tfo, "{name}");
    }
}

#[test]
fn the_options_of_a_linux_syn_are_all_read() {
    // MSS 1460, SACK permitted, timestamps 100 0, NOP, window scale 7.
    let options = [2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 100, 0, 0, 0, 0, 1, 3, 3, 7];
    let o = tcp_of(&v4_frame(20, 6, &tcp_bytes(SYN, &options, b""))).options;
    assert_eq!(
        o,
        TcpOptions {
            mss: Some(1460),
            window_scale: Some(7),
            sack_permitted: true,
            timestamps: Some(Timestamps { tsval: 100, tsecr: 0 }),
            ts_offset: 26,
            ..TcpOptions::NONE
        }
    );
}

#[test]
fn sack_blocks_come_in_order_with_the_place_of_the_option() {
    let block = |n: u8| [0, 0, 0, n, 0, 0, 0, n + 1];
    let four = [&[1, 1, 5, 34][..], &block(1), &block(3), &block(5), &block(7)].concat();
    let o = tcp_of(&v4_frame(20, 6, &tcp_bytes(ACK, &four, b""))).options;
    let expected = [1, 3, 5, 7].map(|n| (Seq(n), Seq(n + 1)));
    assert_eq!((o.sack.as_slice(), o.sack_offset, o.ts_offset), (&expected[..], 22, 0));
    assert!(!o.sack.is_empty() && SackBlocks::default().is_empty());
    assert_eq!(SackBlocks::new(&[expected, expected].concat()), o.sack);
}

#[test]
fn com_07_ipv4_options_are_noted_and_stepped_over() {
    let ip = ip_of(&v4_frame(28, 6, &tcp_bytes(ACK, &[], b"abc")));
    assert!(ip.options);
    assert_eq!(ip.payload_offset, 42);
    let L4::Tcp(tcp) = ip.l4 else { panic!("{ip:?}") };
    assert_eq!((tcp.payload_offset, tcp.payload_len), (62, 3));
}

#[test]
fn com_08_no_fragment_is_read_as_tcp() {
    for (name, flags) in [("first", 0x2000u16), ("middle", 0x20b9), ("last", 0x00b9)] {
        let mut frame = v4_frame(20, 6, &tcp_bytes(ACK, &[], b"x"));
        frame[20..22].copy_from_slice(&flags.to_be_bytes());
        assert_eq!(ip_of(&frame).l4, L4::Fragment, "{name}");
        // IPv6: offset in 8-byte units times 8, then the M bit.
        let field = (flags & 0x1fff) << 3 | flags >> 13;
        let header = [&[6, 0][..], &field.to_be_bytes(), &[0, 0, 0, 1]].concat();
        let frame = v6_frame(44, &[header, tcp_bytes(ACK, &[], b"x")].concat());
        assert_eq!(ip_of(&frame).l4, L4::Fragment, "{name}, IPv6");
    }
    for flags in [0x4000u16, 0x8000, 0x0000] {
        let mut frame = v4_frame(20, 6, &tcp_bytes(ACK, &[], b"x"));
        frame[20..22].copy_from_slice(&flags.to_be_bytes());
        assert!(matches!(ip_of(&frame).l4, L4::Tcp(_)), "{flags:#x} is a whole packet");
        assert_eq!(ip_of(&frame).dont_fragment, flags == 0x4000);
    }
}

/// An extension header of `len` bytes whose fourth byte is `fourth`.
fn extension(next: u8, len: usize, fourth: u8) -> Vec<u8> {
    let mut b = vec![next, u8::try_from(len / 8 - 1).unwrap(), 0, fourth];
    b.resize(len, 0);
    b
}

#[test]
fn com_09_chains_of_ipv6_extension_headers() {
    const HBH: u8 = 0;
    const ROUTING: u8 = 43;
    const DEST: u8 = 60;
    let tcp = tcp_bytes(ACK, &[], b"abc");
    let chain = |headers: &[(u8, usize, u8)]| {
        let mut kinds: Vec<u8> = headers.iter().map(|h| h.0).collect();
        kinds.push(6);
        let mut bytes = Vec::new();
        for (i, (_, len, fourth)) in headers.iter().enumerate() {
            bytes.extend(extension(kinds[i + 1], *len, *fourth));
        }
        ip_of(&v6_frame(kinds[0], &[bytes, tcp.clone()].concat()))
    };
    // The chain as (kind, bytes, fourth byte), and how many bytes are stepped over to reach TCP.
    type Case<'a> = (&'a str, &'a [(u8, usize, u8)], Option<u16>);
    let cases: [Case<'_>; 12] = [
        ("none", &[], Some(0)),
        ("destination options", &[(DEST, 8, 0)], Some(8)),
        ("hop-by-hop, destination", &[(HBH, 8, 0), (DEST, 24, 0)], Some(32)),
        ("finished routing", &[(HBH, 8, 0), (ROUTING, 24, 0), (DEST, 8, 0)], Some(40)),
        ("routing under way", &[(ROUTING, 24, 1)], None),
        ("hop-by-hop not first", &[(DEST, 8, 0), (HBH, 8, 0)], None),
        ("8 headers", &[(DEST, 8, 0); 8], Some(64)),
        ("9 headers", &[(DEST, 8, 0); 9], None),
        ("256 bytes", &[(DEST, 256, 0)], Some(256)),
        ("264 bytes", &[(DEST, 264, 0)], None),
        ("AH", &[(51, 8, 0)], None),
        ("mobility", &[(135, 8, 0)], None),
    ];
    for (name, headers, tcp_after) in cases {
        let ip = chain(headers);
        assert_eq!(
            ip.options,
            !headers.is_empty() && headers[0].0 < 61 && headers[0].0 != 51,
            "{name}"
        );
        match (tcp_after, ip.l4) {
            (Some(skipped), L4::Tcp(tcp)) => {
                assert_eq!(ip.payload_offset, 54 + skipped, "{name}");
                assert_eq!((tcp.src_port, tcp.payload_len), (1, 3), "{name}");
            }
            (None, L4::Opaque) => {}
            (_, l4) => panic!("{name}: {l4:?}"),
        }
    }
}

#[test]
fn com_09_what_else_ipv6_may_carry() {
    let l4 = |next: u8, payload: &[u8]| ip_of(&v6_frame(next, payload)).l4;
    assert_eq!(l4(17, &[0; 8]), L4::Udp);
    assert_eq!(l4(58, &[0; 8]), L4::Icmp);
    assert_eq!(l4(59, &[]), L4::Other);
    assert_eq!(l4(60, &extension(59, 8, 0)), L4::Other, "nothing behind the chain");
    assert_eq!(l4(50, &[0; 8]), L4::Opaque);
    assert_eq!(l4(6, &[]), L4::Opaque, "payload length 0: a jumbogram");
    assert_eq!(l4(0, &[]), L4::Opaque, "payload length 0: a jumbogram");
    let short = v6_frame(60, &[6, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Packet::parse(&short), Err(DropReason::MalformedHeader), "chain past the packet");
    assert_eq!(Packet::parse(&v6_frame(60, &[6, 1])), Err(DropReason::MalformedHeader));
}

#[test]
fn an_ipv6_packet_cannot_pose_as_an_ipv4_flow() {
    for at in [14 + 8, 14 + 24] {
        let mut frame = v6_segment(b"x").frame();
        frame[at..at + 16].copy_from_slice(&IpAddr16::from_v4([10, 0, 0, 1]).0);
        assert_eq!(ip_of(&frame).l4, L4::Opaque);
    }
}

#[test]
fn com_12_other_protocols_are_told_apart() {
    for (protocol, l4) in
        [(17, L4::Udp), (1, L4::Icmp), (50, L4::Opaque), (51, L4::Opaque), (47, L4::Other)]
    {
        assert_eq!(ip_of(&v4_frame(20, protocol, &[0; 8])).l4, l4);
    }
    let mut frame = v4_frame(20, 6, &[0; 8]);
    frame[12..14].copy_from_slice(&[0x88, 0xcc]);
    let packet = Packet::parse(&frame).unwrap();
    assert_eq!((packet.net, packet.eth.ethertype), (Net::Other, 0x88cc));
    assert_eq!(packet.tcp(), None);
}

#[test]
fn com_10_up_to_two_vlan_tags_are_looked_behind() {
    let plain = v4_segment(b"x");
    let tags = [[0x88, 0xa8, 0x20, 0x07], [0x81, 0x00, 0xe0, 0x64], [0x81, 0x00, 0x00, 0x01]];
    for n in 0..=3 {
        let l2 = [&L2_V4[..12], tags[..n].as_flattened(), &L2_V4[12..]].concat();
        let packet = Packet::parse(&Segment { l2, ..plain.clone() }.frame()).unwrap();
        if n == 3 {
            assert_eq!((packet.net, packet.eth.ethertype), (Net::Other, TPID_8021Q));
            continue;
        }
        assert_eq!(packet.eth.vlan.tags(), &tags[..n]);
        assert_eq!(usize::from(packet.eth.len), 14 + 4 * n);
        assert_eq!(packet.eth.ethertype, ETHERTYPE_IPV4);
        let (ip, tcp) = packet.tcp().unwrap();
        assert_eq!(usize::from(ip.header_offset), 14 + 4 * n);
        assert_eq!(tcp.payload_len, 1);
    }
    let cut = [&L2_V4[..12], &[0x81, 0, 0, 1]].concat();
    assert_eq!(Packet::parse(&cut), Err(DropReason::Truncated), "no EtherType behind the tag");
    let bare = [&cut[..], &[0x88, 0xcc]].concat();
    assert_eq!(Packet::parse(&bare).map(|packet| packet.eth.ethertype), Ok(0x88cc));
}

#[test]
fn com_10_vlans_are_equal_by_tag_kind_and_id_whatever_the_priority() {
    let stack = |tags: &[[u8; 4]]| {
        let l2 = [&L2_V4[..12], tags.as_flattened(), &L2_V4[12..]].concat();
        Packet::parse(&Segment { l2, ..v4_segment(b"") }.frame()).unwrap().eth.vlan
    };
    let seven = stack(&[[0x81, 0, 0, 7]]);
    assert_eq!(seven, stack(&[[0x81, 0, 0xf0, 7]]));
    assert_eq!(seven.key(), stack(&[[0x81, 0, 0xf0, 7]]).key());
    for other in [
        stack(&[]),
        stack(&[[0x81, 0, 0, 8]]),
        stack(&[[0x81, 0, 1, 7]]),
        stack(&[[0x88, 0xa8, 0, 7]]),
        stack(&[[0x81, 0, 0, 7], [0x81, 0, 0, 7]]),
    ] {
        assert_ne!(seven, other);
    }
    // A priority tag (VLAN 0) is none, wherever it stands.
    let priority = [0x81, 0, 0xe0, 0];
    assert_eq!(stack(&[priority, [0x81, 0, 0, 7]]), seven);
    assert_eq!(stack(&[[0x81, 0, 0, 7], priority]), seven);
    for none in [stack(&[]), stack(&[priority]), stack(&[priority, priority])] {
        assert_eq!(none.key(), 0);
    }
}

#[test]
fn arp_is_read_if_it_is_for_ipv4() {
    let mut frame = L2_V4.to_vec();
    frame[12..14].copy_from_slice(&[8, 6]);
    frame.extend([0, 1, 8, 0, 6, 4, 0, 2, 2, 0, 0, 0, 0, 9, 10, 0, 0, 1]);
    frame.extend([2, 0, 0, 0, 0, 8, 10, 0, 0, 2]);
    let arp = Arp {
        sender_mac: [2, 0, 0, 0, 0, 9],
        sender_ip: Ipv4Addr::new(10, 0, 0, 1),
        target_ip: Ipv4Addr::new(10, 0, 0, 2),
        op: 2,
    };
    assert_eq!(Packet::parse(&frame).unwrap().net, Net::Arp(arp));
    assert_eq!(Packet::parse(&frame[..41]), Err(DropReason::Truncated));
    frame[14 + 3] = 1;
    assert_eq!(Packet::parse(&frame).unwrap().net, Net::Other);
}

#[test]
fn addresses_know_what_they_are() {
    let of = |text: &str| IpAddr16::from(text.parse::<core::net::IpAddr>().unwrap());
    assert!(of("224.0.0.1").is_multicast() && of("ff02::1").is_multicast());
    assert!(!of("10.0.0.1").is_multicast() && !of("fd00::1").is_multicast());
    assert!(of("255.255.255.255").is_broadcast() && !of("10.0.0.255").is_broadcast());
    assert!(of("0.0.0.0").is_unspecified() && of("::").is_unspecified());
    assert!(!of("::1").is_unspecified());
    for text in ["10.0.0.1", "fd00::1", "0.0.0.0", "::", "::1"] {
        assert_eq!(of(text).to_string(), text);
        assert_eq!(IpAddr16::from(of(text).to_ip()), of(text));
    }
}

#[test]
fn checksums_are_right_or_not() {
    for s in [v4_segment(b"odd"), v6_segment(b"odd"), v4_segment(b"")] {
        let good = s.frame();
        let packet = Packet::parse(&good).unwrap();
        let (ip, tcp) = packet.tcp().unwrap();
        assert!(ipv4_header_ok(&good, ip) && tcp_checksum_ok(&good, ip, tcp));
        let mut padded = good.clone();
        padded.extend([0xff; 7]);
        assert!(tcp_checksum_ok(&padded, ip, tcp), "padding does not count");
        for at in s.l4_at()..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(!tcp_checksum_ok(&bad, ip, tcp), "byte {at}");
        }
        let mut bad = good.clone();
        bad[15] ^= 1;
        assert_eq!(ipv4_header_ok(&bad, ip), ip.version == IpVersion::V6);
        assert!(!tcp_checksum_ok(&good[..20], ip, tcp), "another frame");
    }
}

#[test]
fn the_size_of_a_parsed_frame_is_known() {
    assert_eq!(size_of::<Tcp>(), 104);
    assert_eq!(size_of::<Packet>(), 184);
    assert_eq!(size_of::<Result<Packet, DropReason>>(), 184);
}

/// All ranges of a summary lie in the frame.
fn check_bounds(frame: &[u8], packet: &Packet) {
    assert!(usize::from(packet.eth.len) <= frame.len());
    let Net::Ip(ip) = &packet.net else { return };
    assert!(ip.header_offset < ip.payload_offset && u32::from(ip.payload_offset) <= ip.end);
    assert!(ip.end as usize <= frame.len());
    let L4::Tcp(tcp) = &ip.l4 else { return };
    assert!(tcp.payload_offset >= u32::from(ip.payload_offset) + 20);
    assert_eq!(tcp.payload_offset + tcp.payload_len, ip.end);
    let header = &frame[usize::from(ip.payload_offset)..tcp.payload_offset as usize];
    let o = &tcp.options;
    assert_eq!(o.ts_offset != 0, o.timestamps.is_some());
    if o.ts_offset != 0 {
        assert_eq!(header[usize::from(o.ts_offset)..][..2], [8, 10]);
    }
    assert_eq!(o.sack_offset != 0, !o.sack.is_empty());
    if o.sack_offset != 0 {
        let len = 2 + 8 * o.sack.as_slice().len();
        let at = usize::from(o.sack_offset);
        assert_eq!([5, u8::try_from(len).unwrap()], header[at..at + len][..2]);
    }
}

proptest! {
    #[test]
    fn no_frame_panics_and_the_straight_path_reads_as_the_long_one(
        s in arb_segment(),
        flips in proptest::collection::vec((0..90usize, any::<u8>()), 0..4),
        cut in 0..8usize,
    ) {
        let mut frame = s.frame();
        for (at, with) in flips {
            let at = at % frame.len();
            frame[at] ^= with;
        }
        if cut < 3 {
            frame.truncate(frame.len() - cut);
        }
        let parsed = Packet::parse(&frame);
        prop_assert_eq!(parsed, frame.first_chunk().map_or(
            Err(DropReason::Truncated), |h| Packet::parse_any(&frame, h)));
        if let Ok(packet) = parsed {
            check_bounds(&frame, &packet);
        }
    }

    #[test]
    fn noise_behind_an_ethernet_header_panics_nobody(
        ethertype in prop_oneof![
            Just(0x0800u16), Just(0x86dd), Just(0x0806), Just(0x8100), Just(0x88a8)
        ],
        first in prop_oneof![Just(0x45u8), Just(0x4f), Just(0x60), any::<u8>()],
        tcp in any::<bool>(),
        mut noise in proptest::collection::vec(any::<u8>(), 1..200),
    ) {
        noise[0] = first;
        // Small lengths, so that packets fit, and TCP.
        let len = u8::try_from(noise.len()).unwrap();
        for (at, value) in [(2, 0), (3, len), (9, 6)] {
            if first >> 4 == 4 && tcp && at < noise.len() {
                noise[at] = value;
            }
        }
        let frame = [&[2; 12][..], &ethertype.to_be_bytes(), &noise].concat();
        if let Ok(packet) = Packet::parse(&frame) {
            check_bounds(&frame, &packet);
        }
    }

    #[test]
    fn noise_for_options_panics_nobody(
        words in 0..=10usize, noise in any::<[u8; 40]>(), syn in any::<bool>(),
        kinds in proptest::collection::vec((0..40usize, 0..9u8), 0..6),
    ) {
        let mut options = noise[..words * 4].to_vec();
        for (at, value) in kinds {
            if let Some(byte) = options.get_mut(at) {
                *byte = value;
            }
        }
        let flags = if syn { SYN } else { ACK };
        let frame = v4_frame(20, 6, &tcp_bytes(flags, &options, b"x"));
        check_bounds(&frame, &Packet::parse(&frame).unwrap());
    }
}
