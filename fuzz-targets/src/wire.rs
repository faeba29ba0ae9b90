//! Frames of any content through everything in `core::wire`: parsers, edits in place, emission,
//! the virtio-net header, segmentation.
//!
//! Input: a mode byte, [`EDIT_LEN`] bytes that choose the edits, a virtio-net header, a frame.

use std::num::NonZeroU64;

use nightporter_core::wire::checksum::{Checksum, update16, update32};
use nightporter_core::wire::edit::TcpEdit;
use nightporter_core::wire::emit::{CsumMode, TcpEmit};
use nightporter_core::wire::heartbeat::Heartbeat;
use nightporter_core::wire::packet::{
    Eth, Ip, IpVersion, Net, Packet, Seq, Tcp, TcpFlags, TcpOptions, ipv4_header_ok,
    tcp_checksum_ok, tcp_pseudo_header,
};
use nightporter_core::wire::segment::{Segmenter, complete_checksum, validate_hdr};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::captures;

/// Mode bit: the frame's checksums are made right first, or mutations would never see them so.
const REPAIR: u8 = 1;
/// The content of an edit: seq, ack, two timestamps, window, flags, ECN codepoint.
const EDIT_LEN: usize = 4 * 4 + 2 + 2 + 1;
/// Most option bytes of a TCP header.
const OPTIONS_MAX: usize = 40;
/// One line of text per packet stays one line.
const LINE_MAX: usize = 600;
/// Longest payload that is emitted again: the headers may become longer than they were.
const PAYLOAD_MAX: u32 = 60_000;

/// Judges one input.
pub fn run(data: &[u8]) {
    let Some((&mode, rest)) = data.split_first() else { return };
    let Some((edit, rest)) = rest.split_first_chunk::<EDIT_LEN>() else { return };
    let Some((hdr, frame)) = rest.split_first_chunk::<{ VirtioNetHdr::LEN }>() else { return };
    assert_eq!(VirtioNetHdr::parse(hdr).emit(), *hdr, "parse and emit are inverse");
    let hdr = VirtioNetHdr::parse(hdr);
    checksums_agree(frame, usize::from(edit[0]));
    for syn in [false, true] {
        let options = &frame[..frame.len().min(OPTIONS_MAX)];
        options_are_bounded(&TcpOptions::parse(options, syn), options);
    }
    heartbeat_says_the_same(frame);
    let mut frame = frame.to_vec();
    if mode & REPAIR != 0 {
        repair(&mut frame);
    }
    let Ok(packet) = Packet::parse(&frame) else { return };
    packet_is_within(&packet, &frame);
    padding_does_not_matter(&packet, &frame);
    what_a_guest_says_is_checked(&hdr, &frame, &packet);
    if let Some((ip, tcp)) = packet.tcp() {
        edits_keep_checksums(&frame, ip, tcp, edit);
        emission_says_the_same(&frame, &packet, ip, tcp);
    }
}

/// Frames of a real capture, each with right checksums and as a super-segment; and a heartbeat.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let edit: [u8; EDIT_LEN] = std::array::from_fn(|i| u8::try_from(7 * i).unwrap_or(0));
    let mut frames = captures::frames();
    let beat = Heartbeat { controls: true, epoch: NonZeroU64::MIN };
    frames.push((VirtioNetHdr::default(), beat.emit().to_vec()));
    let input = |mode: u8, frame: &(VirtioNetHdr, Vec<u8>)| {
        [&[mode][..], &edit, &frame.0.emit(), &frame.1].concat()
    };
    frames.iter().flat_map(|f| [input(0, f), input(REPAIR, f)]).collect()
}

/// A heartbeat that is understood equals the host's, except for its source and its end.
fn heartbeat_says_the_same(frame: &[u8]) {
    if let Some(beat) = Heartbeat::parse(frame) {
        let sent = beat.emit();
        assert_eq!((&frame[..6], &frame[12..28]), (&sent[..6], &sent[12..28]));
    }
}

/// Every way to a checksum gives the same, also in pieces and by increments.
fn checksums_agree(bytes: &[u8], cut: usize) {
    let expected = plain_sum(bytes);
    let mut whole = Checksum::default();
    whole.add_bytes(bytes);
    assert_eq!(whole.fold(), expected, "checksum of {} bytes", bytes.len());
    let (a, b) = bytes.split_at(cut.min(bytes.len()));
    let mut pieces = Checksum::default();
    pieces.add_bytes(a);
    pieces.add_bytes(b);
    assert_eq!(pieces.fold(), expected, "checksum in two pieces, cut at {cut}");
    if let Some((&[c0, c1, o0, o1, o2, o3, n0, n1, n2, n3], _)) = bytes.split_first_chunk() {
        let check = u16::from_be_bytes([c0, c1]);
        let (old, new) = ([o0, o1, o2, o3], [n0, n1, n2, n3]);
        let rest = congruent(check, &old);
        let long = update32(check, u32::from_be_bytes(old), u32::from_be_bytes(new));
        assert_eq!(congruent(long, &new), rest, "RFC 1624 for four bytes");
        let short = update16(check, u16::from_be_bytes([o0, o1]), u16::from_be_bytes([n0, n1]));
        let rest = congruent(check, &old[..2]);
        assert_eq!(congruent(short, &new[..2]), rest, "RFC 1624 for two bytes");
    }
}

/// The sum of a checksum field and the bytes that it covers, modulo 65535: an update must keep it.
fn congruent(check: u16, covered: &[u8]) -> u32 {
    (u32::from(check) + u32::from(plain_sum(covered))) % 0xffff
}

/// The sum of big-endian words in one's complement, as RFC 1071 has it.
pub(crate) fn plain_sum(bytes: &[u8]) -> u16 {
    let word = |w: &[u8]| u32::from(w[0]) << 8 | u32::from(w.get(1).copied().unwrap_or(0));
    let sum = bytes.chunks(2).map(word).fold(0, |sum, word| {
        let sum: u32 = sum + word;
        (sum & 0xffff) + (sum >> 16)
    });
    u16::try_from(sum).expect("folded")
}

fn options_are_bounded(options: &TcpOptions, bytes: &[u8]) {
    assert!(options.sack.as_slice().len() <= 4);
    for at in [options.ts_offset, options.sack_offset] {
        let end = usize::from(at) + 10;
        assert!(at == 0 || at >= 20 && end <= 20 + bytes.len(), "an option at {at}");
    }
    assert_eq!(options.timestamps.is_some(), options.ts_offset != 0);
}

/// Offsets are in order and inside, and the shorter readings agree with the whole one.
fn packet_is_within(packet: &Packet, frame: &[u8]) {
    let eth = Eth::parse(frame).expect("the whole packet was read");
    assert_eq!(eth, packet.eth);
    assert_eq!(eth.vlan.tags(), packet.eth.vlan.tags());
    assert_eq!(usize::from(eth.len), 14 + 4 * eth.vlan.tags().len());
    assert!(packet.to_string().len() < LINE_MAX, "{packet}");
    let Net::Ip(ip) = &packet.net else { return };
    assert_eq!(ip.header_offset, u16::from(eth.len));
    let header = ip.payload_offset - ip.header_offset;
    let least = if ip.version == IpVersion::V4 { 20 } else { 40 };
    assert!(header >= least && u32::from(ip.payload_offset) <= ip.end);
    assert!(ip.end as usize <= frame.len(), "{} of {}", ip.end, frame.len());
    assert!(ip.options || header == least);
    if let Some((_, tcp)) = packet.tcp() {
        let header = tcp.payload_offset - u32::from(ip.payload_offset);
        assert!((20..=60).contains(&header), "a TCP header of {header}");
        assert_eq!(tcp.payload_offset + tcp.payload_len, ip.end);
        let options = &frame[usize::from(ip.payload_offset) + 20..tcp.payload_offset as usize];
        assert_eq!(TcpOptions::parse(options, tcp.flags.syn()), tcp.options, "the quick way");
    }
}

/// Bytes behind the IP packet do not matter (COM-02).
fn padding_does_not_matter(packet: &Packet, frame: &[u8]) {
    if let Net::Ip(ip) = &packet.net {
        assert_eq!(Packet::parse(&frame[..ip.end as usize]).as_ref(), Ok(packet));
        assert_eq!(Packet::parse(&[frame, &[0xaa; 7]].concat()).as_ref(), Ok(packet));
    }
}

/// COM-16 to COM-18: a frame that passes the check can be finished or cut, into right frames only.
fn what_a_guest_says_is_checked(hdr: &VirtioNetHdr, frame: &[u8], packet: &Packet) {
    let Ok(clean) = validate_hdr(hdr, frame, packet) else { return };
    assert_eq!(validate_hdr(&clean, frame, packet), Ok(clean), "checked twice is checked once");
    if let (true, Some((ip, tcp))) = (clean.is_gso(), packet.tcp()) {
        return super_segment_is_cut(&clean, frame, ip, tcp);
    }
    assert!(!clean.is_gso(), "only TCP is cut");
    let (mut done, mut finished) = (clean, frame.to_vec());
    complete_checksum(&mut done, &mut finished).expect("the field was checked");
    assert!(!done.needs_csum());
    if clean.needs_csum() {
        let start = usize::from(clean.csum_start);
        let field = start + usize::from(clean.csum_offset);
        // The field held a sum that the rest completes; now it holds what cancels both. (One at an
        // odd offset is written as it is, over two words, as Linux does.)
        let before = plain_sum(&frame[field..field + 2]);
        let all = u32::from(plain_sum(&finished[start..])) + u32::from(before);
        assert!(clean.csum_offset % 2 == 1 || all % 0xffff == 0, "not completed");
        finished[field..field + 2].copy_from_slice(&frame[field..field + 2]);
    }
    assert_eq!(finished, frame, "more than the checksum was changed");
}

fn super_segment_is_cut(hdr: &VirtioNetHdr, frame: &[u8], ip: &Ip, tcp: &Tcp) {
    let mut cutter = Segmenter::new(hdr, frame, ip, tcp).expect("checked");
    let expected = tcp.payload_len.div_ceil(u32::from(hdr.gso_size));
    let mut buf = vec![0; cutter.len_max()];
    let mut payload = Vec::new();
    for n in 0..expected {
        let len = cutter.next_into(&mut buf).expect("as many as it takes");
        let packet = Packet::parse(&buf[..len]).expect("a frame of ours");
        let (part_ip, part) = packet.tcp().expect("a segment of ours");
        assert!(
            ipv4_header_ok(&buf[..len], part_ip) && tcp_checksum_ok(&buf[..len], part_ip, part)
        );
        assert_eq!(part.seq, tcp.seq + u32::try_from(payload.len()).expect("one frame's"));
        assert_eq!((part.ack, part.window, part.options), (tcp.ack, tcp.window, tcp.options));
        let last = n + 1 == expected;
        let gone = if last { TcpFlags::NONE } else { TcpFlags::FIN | TcpFlags::PSH };
        let gone = gone | if n == 0 { TcpFlags::NONE } else { TcpFlags::CWR };
        assert_eq!(part.flags, tcp.flags.without(gone), "segment {n} of {expected}");
        payload.extend_from_slice(&buf[part.payload_offset as usize..len]);
    }
    assert_eq!(cutter.next_into(&mut buf), None);
    assert_eq!(payload, frame[tcp.payload_offset as usize..ip.end as usize]);
}

/// COM-14, COM-15: an edit changes only its own fields, and a checksum is as right after it as
/// before.
fn edits_keep_checksums(frame: &[u8], ip: &Ip, tcp: &Tcp, edit: &[u8; EDIT_LEN]) {
    let be32 = |at: usize| u32::from_be_bytes(std::array::from_fn(|i| edit[at + i]));
    let be16 = |at: usize| u16::from_be_bytes([edit[at], edit[at + 1]]);
    let flags = TcpFlags(be16(18)) & TcpFlags::ALL;
    let drop_sack = edit[20] & 4 != 0;
    for partial in [false, true] {
        let mut edited = frame.to_vec();
        let mut e = TcpEdit::new(&mut edited, ip, tcp, partial);
        e.set_seq(Seq(be32(0))).set_ack(Seq(be32(4))).set_window(be16(16)).set_flags(flags);
        e.set_timestamps(be32(8), be32(12)).set_ecn(edit[20]);
        if drop_sack {
            e.nop_out_sack();
        }
        let packet = Packet::parse(&edited).expect("still a packet");
        let (ip2, tcp2) = packet.tcp().expect("still a segment");
        assert_eq!((tcp2.seq, tcp2.ack), (Seq(be32(0)), Seq(be32(4))));
        assert_eq!((tcp2.window, tcp2.flags), (be16(16), flags));
        assert_eq!(ip2.tos, ip.tos & !3 | edit[20] & 3);
        // Without SYN the other whitelist applies: then only parts that do not depend on it are
        // compared.
        if tcp.flags.syn() == flags.syn() {
            let ts = tcp2.options.timestamps;
            assert_eq!(ts.is_some(), tcp.options.timestamps.is_some());
            assert!(ts.is_none_or(|ts| (ts.tsval, ts.tsecr) == (be32(8), be32(12))));
            let sack = if drop_sack { Default::default() } else { tcp.options.sack };
            let ambiguous = tcp.options.unknown; // a second SACK option comes to light
            assert!(ambiguous || tcp2.options.sack == sack);
        }
        assert_eq!(ipv4_header_ok(&edited, ip2), ipv4_header_ok(frame, ip), "IPv4 header");
        let check = |bytes: &[u8]| {
            let at = usize::from(ip.payload_offset) + 16;
            [bytes[at], bytes[at + 1]]
        };
        if partial {
            assert_eq!(check(&edited), check(frame), "a partial checksum covers no field");
        } else {
            let right = tcp_checksum_ok(frame, ip, tcp);
            assert_eq!(right, plain_tcp_ok(frame, ip), "two ways to check");
            assert_eq!(tcp_checksum_ok(&edited, ip2, tcp2), right, "full checksum");
        }
    }
}

/// The TCP checksum the plain way.
fn plain_tcp_ok(frame: &[u8], ip: &Ip) -> bool {
    let segment = &frame[usize::from(ip.payload_offset)..ip.end as usize];
    let len = u32::try_from(segment.len()).expect("a segment's length").to_be_bytes();
    let (src, dst) = (ip.src.0, ip.dst.0);
    let skip = if ip.version == IpVersion::V4 { 12 } else { 0 };
    plain_sum(&[&src[skip..], &dst[skip..], &len, &[0, 6], segment].concat()) == 0xffff
}

/// Emitted frames read back unchanged (`parse(emit(x)) == x`).
fn emission_says_the_same(frame: &[u8], packet: &Packet, ip: &Ip, tcp: &Tcp) {
    let o = &tcp.options;
    let sayable = o.understood()
        && [o.mss.is_some(), o.window_scale.is_some(), o.sack_permitted, o.tfo] == [false; 4]
        && tcp.payload_len <= PAYLOAD_MAX;
    if !sayable {
        return;
    }
    let emit = TcpEmit {
        l2: &frame[..usize::from(packet.eth.len)],
        version: ip.version,
        src: ip.src,
        dst: ip.dst,
        tos: ip.tos,
        ttl: ip.ttl,
        flow_label: ip.flow_label,
        src_port: tcp.src_port,
        dst_port: tcp.dst_port,
        seq: tcp.seq,
        ack: tcp.ack,
        flags: tcp.flags,
        window: tcp.window,
        timestamps: o.timestamps,
        sack: o.sack.as_slice(),
        ip_id: 0,
    };
    let payload = &frame[tcp.payload_offset as usize..ip.end as usize];
    let mut header = [0; TcpEmit::MAX_LEN];
    let len = emit.emit(&mut header, payload.len(), CsumMode::Full(&[payload]));
    let again = [&header[..len], payload].concat();
    let packet2 = Packet::parse(&again).expect("our own frame");
    let (ip2, tcp2) = packet2.tcp().expect("our own segment");
    assert_eq!(packet2.eth, packet.eth);
    assert!(ipv4_header_ok(&again, ip2) && tcp_checksum_ok(&again, ip2, tcp2));
    assert_eq!((ip2.src, ip2.dst, ip2.tos, ip2.ttl), (ip.src, ip.dst, ip.tos, ip.ttl));
    let fields = |t: &Tcp| (t.src_port, t.dst_port, t.seq, t.ack, t.flags, t.window, t.payload_len);
    assert_eq!(fields(tcp2), fields(tcp));
    assert_eq!(tcp2.options.timestamps, o.timestamps);
    let fit = if o.timestamps.is_some() { 3 } else { 4 };
    let blocks = o.sack.as_slice();
    assert_eq!(tcp2.options.sack.as_slice(), &blocks[..blocks.len().min(fit)]);
}

/// Makes the checksums of an IP and TCP packet right.
fn repair(frame: &mut [u8]) {
    let Ok(Packet { net: Net::Ip(ip), .. }) = Packet::parse(frame) else { return };
    let (l3, l4) = (usize::from(ip.header_offset), usize::from(ip.payload_offset));
    if ip.version == IpVersion::V4 {
        frame[l3 + 10..l3 + 12].fill(0);
        let check = !plain_sum(&frame[l3..l4]);
        frame[l3 + 10..l3 + 12].copy_from_slice(&check.to_be_bytes());
    }
    let segment = l4..ip.end as usize;
    if ip.protocol == 6 && segment.len() >= 20 {
        frame[l4 + 16..l4 + 18].fill(0);
        let len = u32::try_from(segment.len()).expect("a segment's length");
        let mut sum = Checksum::new(tcp_pseudo_header(ip.version, ip.src, ip.dst, len));
        sum.add_bytes(&frame[segment]);
        frame[l4 + 16..l4 + 18].copy_from_slice(&sum.finish().to_be_bytes());
    }
}
