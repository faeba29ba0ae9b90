//! Translation, read back by parsers and sums that are not ours (etherparse, smoltcp).

use super::*;
use crate::wire::ip::IpVersion;
use crate::wire::packet::{Net, Packet};
use crate::wire::samples::{Segment, arb_segment, arb_u32, v4_segment, v6_segment};
use crate::wire::segment::Segmenter;
use etherparse::{TcpHeaderSlice, TcpOptionElement};
use proptest::prelude::*;
use smoltcp::wire::{Icmpv4Packet, Icmpv6Packet, IpAddress, TcpPacket};

/// Numbers that wrap, and one shift of all windows.
const ONE: Translation = Translation {
    seq: 0xffff_ff00,
    clock: 0x8000_0001,
    shift_of_guest: 7,
    shift_to_net: 7,
    shift_unknown: 0,
    hides_sack: false,
};

/// A translation by which no window is rounded.
fn arb_translation() -> impl Strategy<Value = Translation> {
    (arb_u32(), arb_u32(), 0..=14_u8).prop_map(|(seq, clock, shift)| Translation {
        seq,
        clock,
        shift_of_guest: shift,
        shift_to_net: shift,
        ..Translation::default()
    })
}

impl Translation {
    /// The way back, of the numbers.
    const fn inverse(self) -> Self {
        let (seq, clock) = (self.seq.wrapping_neg(), self.clock.wrapping_neg());
        Self { seq, clock, ..self }
    }
}

fn ip_of(frame: &[u8]) -> Ip {
    match Packet::parse(frame).expect("a frame").net {
        Net::Ip(ip) => ip,
        other => panic!("{other:?}"),
    }
}

fn from_guest(t: Translation, frame: &[u8], partial: bool) -> Vec<u8> {
    let mut out = frame.to_vec();
    t.from_guest(&mut out, &ip_of(frame), partial).expect("translated");
    out
}

fn to_guest(t: Translation, frame: &[u8], partial: bool) -> Vec<u8> {
    let mut out = frame.to_vec();
    t.to_guest(&mut out, &ip_of(frame), partial).expect("translated");
    out
}

/// The numbers as etherparse reads them: SEQ, ACK, window, timestamps, edges of blocks.
type Read = (u32, u32, u16, Vec<(u32, u32)>, Vec<(u32, u32)>);

fn read(s: &Segment, frame: &[u8]) -> Read {
    let h = TcpHeaderSlice::from_slice(&frame[s.l4_at()..]).expect("a TCP header");
    let (mut clocks, mut blocks) = (vec![], vec![]);
    for option in h.options_iterator().flatten() {
        match option {
            TcpOptionElement::Timestamp(tsval, tsecr) => clocks.push((tsval, tsecr)),
            TcpOptionElement::SelectiveAcknowledgement(first, others) => {
                blocks.push(first);
                blocks.extend(others.into_iter().flatten());
            }
            _ => {}
        }
    }
    (h.sequence_number(), h.acknowledgment_number(), h.window_size(), clocks, blocks)
}

/// smoltcp's verdict on the checksum.
fn is_intact(s: &Segment, frame: &[u8]) -> bool {
    let address = |addr: crate::wire::ip::IpAddr16| match s.version {
        IpVersion::V4 => IpAddress::Ipv4(addr.v4_bytes().into()),
        IpVersion::V6 => IpAddress::Ipv6(addr.0.into()),
    };
    let tcp = TcpPacket::new_checked(&frame[s.l4_at()..]).expect("a segment");
    tcp.verify_checksum(&address(s.addresses.0), &address(s.addresses.1))
}

/// Nothing but the TCP header has changed.
fn is_rest_as_before(s: &Segment, before: &[u8], after: &[u8]) {
    let l4 = s.l4_at();
    let payload_at = before.len() - s.payload.len();
    assert_eq!(before.len(), after.len(), "COM-15");
    assert_eq!((&before[..l4], &before[payload_at..]), (&after[..l4], &after[payload_at..]));
    let fixed = |frame: &[u8]| [&frame[l4..l4 + 4], &frame[l4 + 12..l4 + 14]].concat();
    assert_eq!(fixed(before), fixed(after), "ports, length and flags");
    assert_eq!(before[l4 + 18..l4 + 20], after[l4 + 18..l4 + 20], "urgent pointer");
}

proptest! {
    #[test]
    fn acc_04_there_and_back_is_the_identity(
        s in arb_segment(), t in arb_translation(), mss in 1..2000_u16,
    ) {
        let (whole, (partial, _)) = (s.frame(), s.partial_frame(mss));
        for (frame, is_partial) in [(&whole, false), (&partial, true)] {
            let there = from_guest(t, frame, is_partial);
            prop_assert_eq!(&from_guest(t.inverse(), &there, is_partial), frame);
            let there = to_guest(t, frame, is_partial);
            prop_assert_eq!(&to_guest(t.inverse(), &there, is_partial), frame);
        }
    }

    #[test]
    fn acc_04_of_a_segment_of_g_its_number_and_its_clock_change(
        s in arb_segment(), t in arb_translation(),
    ) {
        let before = s.frame();
        let after = from_guest(t, &before, false);
        let (seq, ack, window, clocks, blocks) = read(&s, &before);
        let clocks = clocks.iter().map(|&(val, ecr)| (val.wrapping_add(t.clock), ecr)).collect();
        let seq = seq.wrapping_add(t.seq);
        prop_assert_eq!(read(&s, &after), (seq, ack, window, clocks, blocks));
        prop_assert!(is_intact(&s, &after));
        is_rest_as_before(&s, &before, &after);
    }

    #[test]
    fn acc_04_of_a_segment_of_r_all_that_is_about_bytes_and_clocks_of_g_changes(
        s in arb_segment(), t in arb_translation(),
    ) {
        let before = s.frame();
        let after = to_guest(t, &before, false);
        let (seq, mut ack, window, mut clocks, blocks) = read(&s, &before);
        let less = |number: u32| number.wrapping_sub(t.seq);
        if s.flags.ack() {
            ack = less(ack);
            clocks.iter_mut().for_each(|(_, ecr)| *ecr = ecr.wrapping_sub(t.clock));
        }
        let blocks = blocks.iter().map(|&(from, to)| (less(from), less(to))).collect();
        prop_assert_eq!(read(&s, &after), (seq, ack, window, clocks, blocks));
        prop_assert!(is_intact(&s, &after));
        is_rest_as_before(&s, &before, &after);
    }

    /// ACC-17: of anything else in the options no bit changes, and a damaged segment stays damaged.
    #[test]
    fn acc_17_options_of_any_kind_and_place_keep_the_checksum(
        options in proptest::collection::vec(any::<u8>(), 0..=10_usize),
        before in 0..4_usize, t in arb_translation(), tsval in arb_u32(), tsecr in arb_u32(),
        damage in any::<u16>(),
    ) {
        let ts = [&[8, 10][..], &tsval.to_be_bytes(), &tsecr.to_be_bytes()].concat();
        let len = u8::try_from(2 + options.len()).expect("an option's length");
        let unknown = [&[253, len][..], &options].concat();
        let mut bytes = [vec![1; before], unknown.clone(), ts.clone(), ts].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 1);
        let s = v6_segment(b"payload");
        let mut frame = s.frame_with_options(&bytes);
        frame[s.l4_at() + 16] ^= damage.to_be_bytes()[0];
        frame[s.l4_at() + 17] ^= damage.to_be_bytes()[1];
        let damaged = !is_intact(&s, &frame);
        for (after, tsval, tsecr) in [
            (from_guest(t, &frame, false), t.tsval_from_guest(tsval), tsecr),
            (to_guest(t, &frame, false), tsval, t.tsecr_to_guest(tsecr)),
        ] {
            prop_assert_eq!(is_intact(&s, &after), !damaged);
            let ts = [&[8, 10][..], &tsval.to_be_bytes(), &tsecr.to_be_bytes()].concat();
            let mut expected = [vec![1; before], unknown.clone(), ts.clone(), ts].concat();
            expected.resize(expected.len().next_multiple_of(4), 1);
            prop_assert_eq!(&after[s.l4_at() + 20..][..bytes.len()], &expected);
        }
    }

    #[test]
    fn acc_04_a_super_segment_is_translated_as_its_segments_are(
        s in arb_segment(), t in arb_translation(), mss in 8..700_u16, more in 1..700_usize,
    ) {
        let (len, flags) = (usize::from(mss) + more, TcpFlags(s.flags.0 & !0b110));
        let s = Segment { payload: vec![7; len], flags, ..s };
        let (frame, hdr) = s.partial_frame(mss);
        for translated in [from_guest as fn(_, &[u8], bool) -> _, to_guest] {
            let cut_last = cut(&translated(t, &frame, true), &hdr);
            let cut_first = cut(&frame, &hdr);
            let each: Vec<_> = cut_first.iter().map(|f| translated(t, f, false)).collect();
            prop_assert_eq!(&cut_last, &each);
            let sum = |frame: &[u8]| frame[s.l4_at() + 16..s.l4_at() + 18].to_vec();
            prop_assert_eq!(sum(&translated(t, &frame, true)), sum(&frame), "the pseudo-header's");
        }
    }
}

fn cut(frame: &[u8], hdr: &crate::wire::virtio_net::VirtioNetHdr) -> Vec<Vec<u8>> {
    let packet = Packet::parse(frame).expect("a frame");
    let (ip, tcp) = packet.tcp().expect("a segment");
    let mut segmenter = Segmenter::new(hdr, frame, ip, tcp).expect("a super-segment");
    let mut buf = vec![0; segmenter.len_max()];
    std::iter::from_fn(|| segmenter.next_into(&mut buf).map(|len| buf[..len].to_vec())).collect()
}

#[test]
fn acc_12_an_echo_of_h_s_clock_becomes_g_s_own() {
    // H has shown T0; the SYN-ACK of G that H acknowledges has this TSval.
    let (t0, tsval) = (5_u32, 0xffff_fff0_u32);
    let t = Translation { clock: t0.wrapping_sub(tsval), ..ONE };
    assert_eq!(t.tsecr_to_guest(t0), tsval);
    assert_eq!(t.tsval_from_guest(tsval), t0, "no TSval goes back");
    assert_eq!(t.tsval_from_guest(tsval.wrapping_add(40)), t0 + 40);
}

#[test]
fn acc_12_without_ack_nothing_is_acknowledged_or_echoed() {
    for flags in [TcpFlags::RST, TcpFlags::SYN] {
        let s = Segment { flags, ..v4_segment(b"") };
        assert_eq!(to_guest(ONE, &s.frame(), false), s.frame(), "{flags}");
    }
    let s = Segment { flags: TcpFlags::RST | TcpFlags::ACK, ..v4_segment(b"") };
    let (_, ack, _, clocks, _) = read(&s, &to_guest(ONE, &s.frame(), false));
    assert_eq!((ack, clocks), (1 + 0x100, vec![(10, 20 + 0x7fff_ffff)]));
}

#[test]
fn acc_05_windows_are_in_the_scale_that_their_reader_knows() {
    let t = |of_guest, to_net, unknown| Translation {
        shift_of_guest: of_guest,
        shift_to_net: to_net,
        shift_unknown: unknown,
        ..ONE
    };
    let from = |of_guest, to_net, window| t(of_guest, to_net, 0).window_from_guest(window);
    assert_eq!(from(7, 7, 501), 501);
    assert_eq!(from(0, 7, 300), 2, "256 of 300 bytes: never more than G shows");
    assert_eq!(from(0, 7, 127), 0);
    assert_eq!(from(9, 7, 100), 400);
    assert_eq!(from(14, 0, 100), u16::MAX, "as much as the field can say");
    assert_eq!(from(14, 14, u16::MAX), u16::MAX);
    assert_eq!(t(0, 7, 0).window_to_guest(501), 501);
    assert_eq!(t(0, 7, 7).window_to_guest(501), 501 << 7, "G has no scale");
    assert_eq!(t(0, 7, 7).window_to_guest(512), u16::MAX);
    // In frames, but for those of a handshake.
    let shrinks = t(0, 7, 7);
    for (flags, shown) in [(TcpFlags::ACK, (4, u16::MAX)), (TcpFlags::SYN, (512, 512))] {
        let s = Segment { flags: flags | TcpFlags::ACK, ..v4_segment(b"") };
        let window = |frame: Vec<u8>| read(&s, &frame).2;
        let both = (
            window(from_guest(shrinks, &s.frame(), false)),
            window(to_guest(shrinks, &s.frame(), false)),
        );
        assert_eq!(both, shown, "{flags}");
    }
}

#[test]
fn acc_05_a_guest_without_sack_gets_no_blocks() {
    let t = Translation { hides_sack: true, ..ONE };
    let block = |at: u32| (Seq(at), Seq(at + 10));
    let s = Segment { sack: vec![block(100), block(300)], ..v6_segment(b"data") };
    let after = to_guest(t, &s.frame(), false);
    assert_eq!(read(&s, &after).4, []);
    assert!(is_intact(&s, &after));
    let shown = Segment { sack: vec![], ..s.clone() };
    let plain = to_guest(t, &shown.frame(), false);
    assert_eq!(read(&s, &after).3, read(&shown, &plain).3, "timestamps are there");
    assert_eq!(read(&s, &from_guest(t, &s.frame(), false)).4.len(), 2, "G's own go to R");
}

#[test]
fn acc_17_a_signed_segment_is_refused_and_unchanged() {
    let ts = [8, 10, 0, 0, 0, 1, 0, 0, 0, 2, 1, 1];
    let md5 = [&[19, 18][..], &[7; 16], &[1, 1]].concat();
    let ao = [29, 4, 1, 2];
    for signature in [&md5[..], &ao] {
        let frame = v4_segment(b"x").frame_with_options(&[&ts, signature].concat());
        refuses(&frame, Untranslatable::Signed);
    }
    // Behind the end of the options nobody reads them.
    let frame = v4_segment(b"x").frame_with_options(&[&[0, 1, 1, 1][..], &ao].concat());
    assert_eq!(read(&v4_segment(b"x"), &from_guest(ONE, &frame, false)).0, 0xffff_ff01);
    // AH (51) in front of what would be a segment.
    let mut frame = v4_segment(b"x").frame();
    frame[14 + 9] = 51;
    refuses(&frame, Untranslatable::Signed);
}

fn refuses(frame: &[u8], why: Untranslatable) {
    let (ip, mut out) = (ip_of(frame), frame.to_vec());
    assert_eq!(ONE.from_guest(&mut out, &ip, false), Err(why));
    assert_eq!(ONE.to_guest(&mut out, &ip, false), Err(why));
    assert_eq!(out, frame);
}

/// Two fragments of the packet in a frame, of which the first has so many bytes of the segment.
fn fragments(s: &Segment, frame: &[u8], first: usize) -> [Vec<u8>; 2] {
    let (headers, segment) = frame.split_at(s.l4_at());
    let fragment = |from: usize, bytes: &[u8], more: u16| {
        let mut out = headers.to_vec();
        let at = u16::try_from(from).expect("an offset");
        match s.version {
            IpVersion::V4 => {
                let len = u16::try_from(20 + bytes.len()).expect("a length");
                out[16..18].copy_from_slice(&len.to_be_bytes());
                out[20..22].copy_from_slice(&((more << 13) | (at / 8)).to_be_bytes());
            }
            IpVersion::V6 => {
                let len = u16::try_from(8 + bytes.len()).expect("a length");
                out[18..20].copy_from_slice(&len.to_be_bytes());
                out[20] = 44;
                let word = (at | more).to_be_bytes();
                out.extend([6, 0, word[0], word[1], 0, 0, 0, 9]);
            }
        }
        out.extend(bytes);
        out
    };
    [fragment(0, &segment[..first], 1), fragment(first, &segment[first..], 0)]
}

#[test]
fn acc_17_of_fragments_only_the_first_changes_and_the_packet_is_whole_at_the_end() {
    for s in [v4_segment(&[0x5a; 200]), v6_segment(&[0xa5; 201])] {
        let whole = s.frame();
        for translated in [from_guest as fn(_, &[u8], bool) -> _, to_guest] {
            let [head, tail] = fragments(&s, &whole, 64);
            let expected = fragments(&s, &translated(ONE, &whole, false), 64);
            assert_eq!([translated(ONE, &head, false), translated(ONE, &tail, false)], expected);
        }
        // The header has 32 bytes. No honest path cuts it.
        let [head, tail] = fragments(&s, &whole, 24);
        refuses(&head, Untranslatable::CutHeader);
        refuses(&tail, Untranslatable::CutHeader);
        let [head, _] = fragments(&s, &whole, 16);
        refuses(&head, Untranslatable::CutHeader);
    }
}

#[test]
fn a_frame_without_a_segment_stays_as_it_is() {
    for protocol in [17, 1, 50, 99] {
        let mut frame = v4_segment(b"x").frame();
        frame[14 + 9] = protocol;
        assert_eq!(from_guest(ONE, &frame, false), frame);
        assert_eq!(to_guest(ONE, &frame, false), frame);
    }
    let mut frame = v4_segment(b"").frame();
    frame[14 + 20 + 12] = 4 << 4;
    refuses(&frame, Untranslatable::Malformed);
}

/// An error of a router about a segment, as it reaches G.
fn error_about(s: &Segment, kind: u8, quoted_len: usize) -> Vec<u8> {
    let quoted = &s.frame()[s.l2.len()..];
    let message = [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &quoted[..quoted_len]].concat();
    let mut error = Segment { payload: vec![], ..s.clone() }.frame()[..s.l4_at()].to_vec();
    let len = message.len();
    let put = |error: &mut [u8], at: usize, len: usize| {
        let len = u16::try_from(len).expect("a length");
        error[at..at + 2].copy_from_slice(&len.to_be_bytes());
    };
    match s.version {
        IpVersion::V4 => {
            put(&mut error, 16, 20 + len);
            error[23] = 1;
        }
        IpVersion::V6 => {
            put(&mut error, 18, len);
            error[20] = 58;
        }
    }
    error.extend(message);
    let at = s.l4_at();
    match s.version {
        IpVersion::V4 => Icmpv4Packet::new_unchecked(&mut error[at..]).fill_checksum(),
        IpVersion::V6 => {
            let (src, dst) = (s.addresses.0.0.into(), s.addresses.1.0.into());
            Icmpv6Packet::new_unchecked(&mut error[at..]).fill_checksum(&src, &dst);
        }
    }
    error
}

proptest! {
    #[test]
    fn acc_04_an_error_quotes_g_s_own_number(
        s in arb_segment(), t in arb_translation(), quoted in 8..40_usize,
    ) {
        let s = Segment { l2: s.l2[..12].to_vec(), payload: vec![7; 40], ..s };
        let ethertype: [u8; 2] = if s.version == IpVersion::V4 { [8, 0] } else { [0x86, 0xdd] };
        let s = Segment { l2: [&s.l2[..], &ethertype].concat(), ..s };
        let kind = if s.version == IpVersion::V4 { 11 } else { 3 };
        let header = s.l4_at() - s.l2.len();
        let before = error_about(&s, kind, header + quoted);
        let ip = ip_of(&before);
        prop_assume!(ip.l4 == L4::Icmp); // no address is a v4-mapped one
        let it = Quoted::parse(&before, &ip).expect("an error");
        prop_assert_eq!((it.seq, it.src, it.dst), (s.seq, s.addresses.0, s.addresses.1));
        prop_assert_eq!((it.src_port, it.dst_port), s.ports);
        let mut after = before.clone();
        t.error_to_guest(&mut after, &ip, &it);
        let own = s.seq.0.wrapping_sub(t.seq);
        prop_assert_eq!(Quoted::parse(&after, &ip).map(|it| it.seq), Some(Seq(own)));
        let intact = match s.version {
            IpVersion::V4 => Icmpv4Packet::new_unchecked(&after[s.l4_at()..]).verify_checksum(),
            IpVersion::V6 => Icmpv6Packet::new_unchecked(&after[s.l4_at()..])
                .verify_checksum(&s.addresses.0.0.into(), &s.addresses.1.0.into()),
        };
        prop_assert!(intact);
        let fields = [s.l4_at() + 2, s.l4_at() + 8 + header + 4];
        for at in (0..after.len()).filter(|&at| after[at] != before[at]) {
            let is_number = (fields[1]..fields[1] + 4).contains(&at);
            prop_assert!(is_number || (fields[0]..fields[0] + 2).contains(&at));
        }
        t.inverse().error_to_guest(&mut after, &ip, &Quoted { seq: Seq(own), ..it });
        prop_assert_eq!(after, before);
    }
}

#[test]
fn acc_04_no_error_is_about_a_later_fragment_or_is_an_answer() {
    let s = v4_segment(b"payload");
    let quoted = |error: &[u8]| Quoted::parse(error, &ip_of(error));
    let error = error_about(&s, 3, 28);
    assert!(quoted(&error).is_some());
    let mut fragment = error.clone();
    fragment[34 + 8 + 7] = 5; // of the quoted packet
    assert_eq!(quoted(&fragment), None);
    assert_eq!(quoted(&error_about(&s, 0, 28)), None, "an echo reply");
    assert_eq!(quoted(&error_about(&v6_segment(b""), 129, 48)), None, "an echo reply");
}
