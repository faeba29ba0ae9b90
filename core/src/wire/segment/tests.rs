//! Cutting, completing, and lying guests (COM-16 to COM-18).

use super::*;
use crate::wire::packet::{Seq, ipv4_header_ok, tcp_checksum_ok};
use crate::wire::samples::{Segment, arb_segment, plain_checksum, v4_segment, v6_segment};
use crate::wire::virtio_net::{GSO_TCPV4, GSO_UDP, GSO_UDP_L4};
use proptest::prelude::*;

fn split(hdr: &VirtioNetHdr, frame: &[u8]) -> Vec<Vec<u8>> {
    let packet = Packet::parse(frame).unwrap();
    let (ip, tcp) = packet.tcp().unwrap();
    let mut cutter = Segmenter::new(hdr, frame, ip, tcp).unwrap();
    let mut buf = vec![0; cutter.len_max()];
    let mut out = Vec::new();
    while let Some(len) = cutter.next_into(&mut buf) {
        out.push(buf[..len].to_vec());
    }
    out
}

/// The segment `s` as its sender would have sent it in pieces of `mss` bytes, each built anew.
fn sent_in_pieces(s: &Segment, mss: usize) -> Vec<Vec<u8>> {
    let pieces: Vec<&[u8]> = s.payload.chunks(mss).collect();
    let last = pieces.len() - 1;
    let piece = |(i, payload): (usize, &&[u8])| {
        let mut flags = s.flags;
        if i != last {
            flags = flags & !TcpFlags::PSH & !TcpFlags::FIN;
        }
        if i != 0 {
            flags = flags & !TcpFlags::CWR;
        }
        let n = u32::try_from(i).unwrap();
        Segment {
            seq: s.seq + n * u32::try_from(mss).unwrap(),
            ip_id: s.ip_id.wrapping_add(u16::try_from(i).unwrap()),
            flags,
            payload: payload.to_vec(),
            ..s.clone()
        }
        .frame()
    };
    pieces.iter().enumerate().map(piece).collect()
}

proptest! {
    #[test]
    fn com_18_cutting_a_super_segment_gives_the_segments_it_was_merged_from(
        s in arb_segment(), mss in 8..1500u16,
    ) {
        prop_assume!(s.payload.len() > usize::from(mss));
        // Urgent data is not merged.
        let s = Segment { flags: s.flags.without(TcpFlags::URG), ..s };
        let (frame, hdr) = s.partial_frame(mss);
        prop_assert_eq!(split(&hdr, &frame), sent_in_pieces(&s, mss.into()));
    }

    #[test]
    fn com_16_whatever_a_guest_says_is_refused_or_carried_out(
        s in arb_segment(),
        mss in 0..1500u16,
        flips in proptest::collection::vec((0..100usize, any::<u8>()), 0..3),
        lie in arb_lie(),
    ) {
        let (mut frame, mut hdr) = s.partial_frame(mss);
        for (at, with) in flips {
            let at = at % frame.len();
            frame[at] ^= with;
        }
        lie.apply(&mut hdr);
        let Ok(packet) = Packet::parse(&frame) else { return Ok(()) };
        let Ok(mut clean) = validate_hdr(&hdr, &frame, &packet) else { return Ok(()) };
        prop_assert_eq!(clean.flags & !F_NEEDS_CSUM, 0);
        if clean.is_gso() {
            let (_, tcp) = packet.tcp().unwrap();
            let mut seq = tcp.seq;
            for segment in split(&clean, &frame) {
                let packet = Packet::parse(&segment).unwrap();
                let (ip, tcp) = packet.tcp().unwrap();
                prop_assert_eq!(tcp.seq, seq);
                prop_assert!(ipv4_header_ok(&segment, ip) && tcp_checksum_ok(&segment, ip, tcp));
                seq = seq + tcp.payload_len;
            }
            prop_assert_eq!(seq, tcp.seq + tcp.payload_len);
        } else {
            let checked = match &packet.net {
                Net::Ip(ip) => usize::from(ip.payload_offset),
                _ => usize::from(packet.eth.len),
            };
            let before = frame[..checked].to_vec();
            prop_assert_eq!(complete_checksum(&mut clean, &mut frame), Ok(()));
            prop_assert_eq!(&frame[..checked], &before[..], "MACs and addresses stay");
        }
    }
}

/// One field of a virtio-net header with another value.
#[derive(Clone, Copy, Debug)]
enum Lie {
    None,
    Flags(u8),
    GsoType(u8),
    GsoSize(u16),
    CsumStart(u16),
    CsumOffset(u16),
    HdrLen(u16),
}

impl Lie {
    fn apply(self, hdr: &mut VirtioNetHdr) {
        match self {
            Self::None => {}
            Self::Flags(n) => hdr.flags = n,
            Self::GsoType(n) => hdr.gso_type = n,
            Self::GsoSize(n) => hdr.gso_size = n,
            Self::CsumStart(n) => hdr.csum_start = n,
            Self::CsumOffset(n) => hdr.csum_offset = n,
            Self::HdrLen(n) => hdr.hdr_len = n,
        }
    }
}

fn arb_lie() -> impl Strategy<Value = Lie> {
    let near = prop_oneof![0..100u16, Just(0xffff), any::<u16>()];
    prop_oneof![
        Just(Lie::None),
        any::<u8>().prop_map(Lie::Flags),
        any::<u8>().prop_map(Lie::GsoType),
        near.clone().prop_map(Lie::GsoSize),
        near.clone().prop_map(Lie::CsumStart),
        near.clone().prop_map(Lie::CsumOffset),
        near.prop_map(Lie::HdrLen),
    ]
}

fn validate(hdr: &VirtioNetHdr, frame: &[u8]) -> Result<VirtioNetHdr, DropReason> {
    validate_hdr(hdr, frame, &Packet::parse(frame).unwrap())
}

#[test]
fn an_honest_header_passes_as_it_is() {
    for s in [v4_segment(&[7; 3000]), v6_segment(&[7; 3000])] {
        for mss in [1000, 3000] {
            let (frame, hdr) = s.partial_frame(mss);
            assert_eq!(validate(&hdr, &frame), Ok(hdr));
        }
        assert_eq!(validate(&VirtioNetHdr::default(), &s.frame()), Ok(VirtioNetHdr::default()));
    }
}

#[test]
fn com_16_each_lie_about_a_tcp_super_segment_is_refused() {
    let (frame, honest) = v4_segment(&[7; 3000]).partial_frame(1000);
    let lies = [
        Lie::Flags(0),
        Lie::GsoType(GSO_TCPV6),
        Lie::GsoType(GSO_UDP),
        Lie::GsoType(GSO_UDP_L4),
        Lie::GsoType(GSO_ECN),
        Lie::GsoType(0x7f),
        Lie::GsoSize(0),
        Lie::GsoSize(GSO_SIZE_MIN - 1),
        Lie::CsumStart(0),
        Lie::CsumStart(26),
        Lie::CsumStart(33),
        Lie::CsumStart(35),
        Lie::CsumStart(0xffff),
        Lie::CsumOffset(0),
        Lie::CsumOffset(17),
        Lie::CsumOffset(0xffff),
    ];
    for lie in lies {
        let mut hdr = honest;
        lie.apply(&mut hdr);
        assert_eq!(validate(&hdr, &frame), Err(DropReason::MalformedVirtioHeader), "{lie:?}");
    }
}

#[test]
fn com_16_a_super_segment_is_for_one_receiver_and_of_so_many_segments() {
    let most = usize::try_from(SEGMENTS_MAX).unwrap() * usize::from(GSO_SIZE_MIN);
    let (frame, hdr) = v4_segment(&vec![7; most]).partial_frame(GSO_SIZE_MIN);
    assert_eq!(validate(&hdr, &frame), Ok(hdr));
    let (frame, hdr) = v4_segment(&vec![7; most + 1]).partial_frame(GSO_SIZE_MIN);
    assert_eq!(validate(&hdr, &frame), Err(DropReason::MalformedVirtioHeader));
    let (mut frame, hdr) = v4_segment(&[7; 3000]).partial_frame(1000);
    frame[..6].fill(0xff);
    assert_eq!(validate(&hdr, &frame), Err(DropReason::MalformedVirtioHeader));
}

#[test]
fn com_16_what_can_be_known_from_the_frame_is_not_taken_from_the_guest() {
    let s = v4_segment(&[7; 3000]);
    let (frame, honest) = s.partial_frame(1000);
    let with_cwr = Segment { flags: s.flags | TcpFlags::CWR, ..s };
    let (frame_with_cwr, honest_with_cwr) = with_cwr.partial_frame(1000);
    assert_eq!(honest_with_cwr.gso_type, GSO_TCPV4 | GSO_ECN);

    for (lie, says) in [
        (Lie::HdrLen(0), "hdr_len is recomputed"),
        (Lie::HdrLen(0xffff), "hdr_len is recomputed"),
        (Lie::GsoType(GSO_TCPV4 | GSO_ECN), "there is no CWR"),
        (Lie::Flags(0xff), "a guest vouches for no checksum"),
    ] {
        let mut hdr = honest;
        lie.apply(&mut hdr);
        assert_eq!(validate(&hdr, &frame), Ok(honest), "{says}");
    }
    let mut hdr = honest_with_cwr;
    hdr.gso_type = GSO_TCPV4;
    assert_eq!(validate(&hdr, &frame_with_cwr), Ok(honest_with_cwr), "CWR must not be repeated");

    let mut hdr = honest;
    hdr.gso_size = 3000;
    let not_gso = VirtioNetHdr { gso_type: 0, gso_size: 0, hdr_len: 0, ..honest };
    assert_eq!(validate(&hdr, &frame), Ok(not_gso), "it fits one segment");
}

/// A UDP datagram with a partial checksum over IPv4, from port 1 to port 2.
fn udp(payload: &[u8]) -> (Vec<u8>, VirtioNetHdr) {
    let s = v4_segment(b"");
    let mut frame = s.frame()[..34].to_vec();
    let len = u16::try_from(8 + payload.len()).unwrap();
    frame[14 + 9] = 17;
    frame[16..18].copy_from_slice(&(20 + len).to_be_bytes());
    let len = len.to_be_bytes();
    let pseudo = !plain_checksum(&[&frame[26..34], &[0, 17], &len]);
    frame.extend([&[0, 1, 0, 2][..], &len, &pseudo.to_be_bytes(), payload].concat());
    let hdr =
        VirtioNetHdr { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..Default::default() };
    (frame, hdr)
}

#[test]
fn a_udp_checksum_that_comes_out_as_zero_is_sent_as_ones() {
    let (mut frame, mut hdr) = udp(&[0, 0]);
    // Choose the payload so that the sum is all ones.
    let rest = plain_checksum(&[&frame[34..42], &[0, 0]]);
    frame[42..44].copy_from_slice(&rest.to_be_bytes());
    assert_eq!(validate(&hdr, &frame), Ok(hdr));
    complete_checksum(&mut hdr, &mut frame).unwrap();
    assert_eq!(frame[40..42], [0xff, 0xff]);
    assert_eq!(hdr, VirtioNetHdr::default());
}

#[test]
fn a_tcp_checksum_that_comes_out_as_zero_is_sent_as_zero() {
    for segment in [v4_segment(&[0, 0]), v6_segment(&[0, 0])] {
        let at = segment.l4_at() + 16;
        let rest = segment.frame()[at..at + 2].to_vec();
        let segment = Segment { payload: rest, ..segment };
        let (mut frame, mut hdr) = segment.partial_frame(1000);
        complete_checksum(&mut hdr, &mut frame).unwrap();
        assert_eq!(frame[at..at + 2], [0, 0], "all ones look wrong to some");
        assert_eq!(frame, segment.frame());
    }
}

#[test]
fn a_checksum_may_be_the_last_two_bytes_of_a_frame() {
    let (frame, hdr) = udp(&[]);
    assert_eq!(validate(&hdr, &frame), Ok(hdr));
}

#[test]
fn a_checksum_that_lies_outside_its_frame_is_not_completed() {
    for (csum_offset, fits) in [(6, true), (7, false), (8, false)] {
        let mut hdr =
            VirtioNetHdr { flags: F_NEEDS_CSUM, csum_start: 12, csum_offset, ..Default::default() };
        let done = complete_checksum(&mut hdr, &mut [0; 20]);
        assert_eq!(done.is_ok(), fits, "{csum_offset}: {done:?}");
    }
}

#[test]
fn com_12_the_inner_checksum_of_a_tunnel_may_be_completed_but_no_outer_header_touched() {
    let (mut frame, hdr) = udp(&[0; 60]);
    let inner = VirtioNetHdr { csum_start: 70, csum_offset: 16, ..hdr };
    let mut clean = validate(&inner, &frame).unwrap();
    let before = frame.clone();
    complete_checksum(&mut clean, &mut frame).unwrap();
    assert_eq!(frame[..86], before[..86]);
    assert_ne!(frame[86..88], before[86..88]);
    for (csum_start, csum_offset) in [(34, 4), (6, 6), (14, 10), (26, 0), (33, 7)] {
        let hdr = VirtioNetHdr { csum_start, csum_offset, ..hdr };
        assert_eq!(validate(&hdr, &frame), Err(DropReason::MalformedVirtioHeader));
    }
}

#[test]
fn padding_is_neither_cut_into_segments_nor_counted() {
    let s = v4_segment(&[9; 20]);
    let (mut frame, hdr) = s.partial_frame(8);
    let plain = split(&hdr, &frame);
    frame.extend([0xee; 6]);
    assert_eq!(split(&hdr, &frame), plain);
    assert_eq!(plain.len(), 3);
}

#[test]
fn what_has_no_payload_is_one_segment() {
    let s = v4_segment(b"");
    let (frame, hdr) = s.partial_frame(8);
    let hdr = VirtioNetHdr { gso_type: GSO_TCPV4, gso_size: 8, ..hdr };
    assert_eq!(split(&hdr, &frame), [s.frame()]);
}

#[test]
fn a_super_segment_of_64_kib_is_cut_and_numbered_across_the_wrap() {
    let payload: Vec<u8> = (0..65_483u32).map(|n| (n % 251) as u8).collect();
    let s = Segment { seq: Seq(0xffff_f000), ip_id: 0xfffe, ..v4_segment(&payload) };
    let (frame, hdr) = s.partial_frame(1448);
    assert_eq!(validate(&hdr, &frame), Ok(hdr));
    assert_eq!(split(&hdr, &frame), sent_in_pieces(&s, 1448));
}

#[test]
fn a_super_segment_is_not_completed_but_must_be_cut() {
    let (mut frame, mut hdr) = v4_segment(&[7; 3000]).partial_frame(1000);
    assert_eq!(complete_checksum(&mut hdr, &mut frame), Err(DropReason::TooBig));
    let packet = Packet::parse(&frame).unwrap();
    let (ip, tcp) = packet.tcp().unwrap();
    assert!(Segmenter::new(&VirtioNetHdr::default(), &frame, ip, tcp).is_err());
    assert!(Segmenter::new(&hdr, &frame[..100], ip, tcp).is_err());
}
