//! The lines as people read them.

use super::*;
use crate::wire::packet::{SackBlocks, TcpFlags, TcpOptions, Timestamps};
use crate::wire::samples::{Segment, v4_segment, v6_segment};

fn line(frame: &[u8]) -> String {
    Packet::parse(frame).unwrap().to_string()
}

#[test]
fn a_data_segment_reads_as_in_tcpdump() {
    let s = v4_segment(&[0; 1000]);
    assert_eq!(line(&s.frame()), "10.0.0.1:1000 > 10.0.0.2:80: P. 1:1001 ack 1 win 512 <ts 10 20>");
    let s = v6_segment(b"");
    assert_eq!(line(&s.frame()), "[fd00::1]:1000 > [fd00::2]:80: P. 1:1 ack 1 win 512 <ts 10 20>");
}

#[test]
fn tags_and_ecn_marks_show() {
    let mut l2 = v4_segment(b"").l2;
    l2.splice(12..12, [0x81, 0, 0xe0, 7]);
    for (tos, mark) in [(0, ""), (1, " [ect1]"), (2, " [ect0]"), (3, " [ce]")] {
        let s = Segment { l2: l2.clone(), tos, timestamps: None, ..v4_segment(b"") };
        let expected = format!("vlan 7 10.0.0.1:1000 > 10.0.0.2:80{mark}: P. 1:1 ack 1 win 512");
        assert_eq!(line(&s.frame()), expected);
    }
}

#[test]
fn a_scenario_line_counts_from_the_initial_numbers() {
    let s = Segment {
        seq: Seq(0xffff_ffff),
        ack: Seq(5001),
        flags: TcpFlags::ACK,
        timestamps: None,
        sack: vec![(Seq(7001), Seq(8001)), (Seq(9001), Seq(9501))],
        ..v4_segment(&[0; 1000])
    };
    let frame = s.frame();
    let packet = Packet::parse(&frame).unwrap();
    let (_, tcp) = packet.tcp().unwrap();
    let line =
        SegmentLine { direction: ">R", tcp, seq_base: Seq(0xffff_fffe), ack_base: Seq(5000) };
    assert_eq!(line.to_string(), ">R . 1:1001 ack 1 win 512 <sack 2001:3001,sack 4001:4501>");
}

#[test]
fn a_syn_shows_what_it_offers() {
    let tcp = Tcp {
        flags: TcpFlags::SYN | TcpFlags::ECE | TcpFlags::CWR,
        payload_len: 0,
        options: TcpOptions {
            mss: Some(1460),
            window_scale: Some(7),
            sack_permitted: true,
            timestamps: Some(Timestamps { tsval: 1, tsecr: 0 }),
            tfo: true,
            mptcp: true,
            unknown: true,
            malformed: true,
            sack: SackBlocks::default(),
            ..TcpOptions::NONE
        },
        ..*Packet::parse(&v4_segment(b"").frame()).unwrap().tcp().unwrap().1
    };
    assert_eq!(
        tcp.to_string(),
        "SEW 1:1 win 512 <mss 1460,ws 7,sackOK,ts 1 0,tfo,mptcp,unknown,bad>"
    );
    assert_eq!(TcpFlags::NONE.to_string(), "none");
    assert_eq!(TcpFlags::ALL.to_string(), "FSRP.UEWe");
    let urgent = Tcp { flags: TcpFlags::URG, urgent: 9, options: TcpOptions::NONE, ..tcp };
    assert_eq!(urgent.to_string(), "U 1:1 win 512 urg 9");
}

#[test]
fn what_is_not_tcp_has_a_line_too() {
    let mut frame = v4_segment(b"").frame();
    for (protocol, text) in [(17, "udp"), (1, "icmp"), (47, "proto 47"), (50, "proto 50")] {
        frame[23] = protocol;
        assert_eq!(line(&frame), format!("10.0.0.1 > 10.0.0.2 {text}"));
    }
    frame[23] = 6;
    frame[34 + 12] = 0;
    assert_eq!(line(&frame), "10.0.0.1 > 10.0.0.2 malformed tcp");
    frame[20] = 0x20;
    assert_eq!(line(&frame), "10.0.0.1 > 10.0.0.2 fragment proto 6");
    frame[12..14].copy_from_slice(&[0x88, 0xcc]);
    assert_eq!(line(&frame), "02:00:00:00:00:02 > 02:00:00:00:00:01 ethertype 0x88cc");
}

#[test]
fn arp_asks_and_answers() {
    let mut frame = v4_segment(b"").l2;
    frame[12..14].copy_from_slice(&[8, 6]);
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 9, 10, 0, 0, 1]);
    frame.extend([0, 0, 0, 0, 0, 0, 10, 0, 0, 2]);
    assert_eq!(line(&frame), "arp who-has 10.0.0.2 tell 10.0.0.1");
    frame[21] = 2;
    assert_eq!(line(&frame), "arp 10.0.0.1 is-at 02:00:00:00:00:09");
    frame[21] = 3;
    assert_eq!(line(&frame), "arp op 3 from 10.0.0.1");
}
