//! The work of the uplink's network card and kernel before the daemon reads: checksums are
//! verified, and segments that follow each other become one (GRO, `tcp_gro_receive`).
//!
//! Written from the rules, without the parser of `core`: a mistake there cannot hide here.

use nightporter_core::wire::virtio_net::VirtioNetHdr;

use nightporter_check::frame::Frame;
use nightporter_check::wire::{F_DATA_VALID, F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6};

/// TCP flags that may differ between two segments that are merged; the rest is plain ACKs.
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
const ECE: u8 = 0x40;
/// Longest IP packet.
const PACKET_MAX: usize = 65_535;

/// Where things are in a TCP frame without IP options and extension headers.
#[derive(Clone, Copy)]
struct Layout {
    v6: bool,
    ip: usize,
    tcp: usize,
    payload: usize,
    end: usize,
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The sum of 16-bit words, folded (RFC 1071).
fn sum(bytes: &[u8], first: u32) -> u16 {
    let mut sum = u64::from(first);
    let (words, tail) = bytes.as_chunks::<2>();
    sum += words.iter().map(|w| u64::from(u16::from_be_bytes(*w))).sum::<u64>();
    sum += tail.first().map_or(0, |last| u64::from(*last) << 8);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(0)
}

fn layout(b: &[u8]) -> Option<Layout> {
    if b.len() < 54 {
        return None;
    }
    let ip = if be16(b, 12) == 0x8100 { 18 } else { 14 };
    let (v6, tcp, end) = match be16(b, ip - 2) {
        0x0800 if b[ip] == 0x45 && b[ip + 9] == 6 && be16(b, ip + 6) & 0x3fff == 0 => {
            (false, ip + 20, ip + usize::from(be16(b, ip + 2)))
        }
        0x86dd if b.len() >= ip + 60 && b[ip] >> 4 == 6 && b[ip + 6] == 6 => {
            (true, ip + 40, ip + 40 + usize::from(be16(b, ip + 4)))
        }
        _ => return None,
    };
    let payload = tcp + usize::from(*b.get(tcp + 12)? >> 4) * 4;
    (end <= b.len() && payload >= tcp + 20 && payload <= end).then_some(Layout {
        v6,
        ip,
        tcp,
        payload,
        end,
    })
}

fn pseudo(b: &[u8], l: Layout) -> u16 {
    let addresses = if l.v6 { &b[l.ip + 8..l.ip + 40] } else { &b[l.ip + 12..l.ip + 20] };
    let len = u32::try_from(l.end - l.tcp).unwrap_or(0);
    sum(addresses, 6 + (len >> 16) + (len & 0xffff))
}

/// The card says that a frame's checksums are right, if they are.
pub(super) fn verify(frame: &mut Frame) {
    let b = &frame.bytes;
    if frame.hdr != VirtioNetHdr::default() {
        return;
    }
    let Some(l) = layout(b) else { return };
    let ip_right = l.v6 || sum(&b[l.ip..l.tcp], 0) == 0xffff;
    if ip_right && sum(&b[l.tcp..l.end], pseudo(b, l).into()) == 0xffff {
        frame.hdr.flags = F_DATA_VALID;
    }
}

/// Whether the two are of one connection and direction.
pub(super) fn same_flow(a: &Frame, b: &Frame) -> bool {
    let (Some(x), Some(y)) = (layout(&a.bytes), layout(&b.bytes)) else { return false };
    let from = |l: Layout| if l.v6 { l.ip + 8 } else { l.ip + 12 };
    x.v6 == y.v6 && x.tcp == y.tcp && a.bytes[from(x)..x.tcp + 4] == b.bytes[from(y)..y.tcp + 4]
}

/// Appends `next` to `last`, which came before it, if a kernel would; both were verified.
pub(super) fn merge(last: &mut Frame, next: &Frame) -> bool {
    let (Some(x), Some(y)) = (layout(&last.bytes), layout(&next.bytes)) else { return false };
    let (a, b) = (&last.bytes, &next.bytes);
    let verified = |f: &Frame| f.hdr.flags & (F_DATA_VALID | F_NEEDS_CSUM) != 0;
    let (more, len) = (y.end - y.payload, x.end - x.payload);
    let gso = if last.hdr.is_gso() { usize::from(last.hdr.gso_size) } else { len };
    let flags = [a[x.tcp + 13], b[y.tcp + 13]];
    let fits = verified(last)
        && verified(next)
        && !next.hdr.is_gso()
        && (1..=gso).contains(&more)
        && len.is_multiple_of(gso.max(1))
        && len > 0
        && x.end + more - x.ip <= PACKET_MAX;
    // Time to live, traffic class and all options are the same; only the last may push or end.
    let plain = flags[0] & !ECE == ACK && flags[1] & !(ECE | PSH | FIN) == ACK;
    let alike = x.payload - x.ip == y.payload - y.ip
        && plain
        && flags[0] & ECE == flags[1] & ECE
        && a[..x.ip] == b[..y.ip]
        && a[x.ip + 1] == b[y.ip + 1]
        && if x.v6 { a[x.ip + 7] == b[y.ip + 7] } else { a[x.ip + 8] == b[y.ip + 8] }
        && be32(a, x.tcp + 8) == be32(b, y.tcp + 8)
        && a[x.tcp + 14..x.tcp + 16] == b[y.tcp + 14..y.tcp + 16]
        && a[x.tcp + 20..x.payload] == b[y.tcp + 20..y.payload];
    let follows = u32::try_from(len).map(|n| be32(a, x.tcp + 4).wrapping_add(n));
    if !fits || !alike || follows != Ok(be32(b, y.tcp + 4)) {
        return false;
    }
    let piece = b[y.payload..y.end].to_vec();
    let a = &mut last.bytes;
    a.truncate(x.end);
    a.extend(piece);
    a[x.tcp + 13] |= flags[1] & (PSH | FIN);
    let end = a.len();
    finish(last, Layout { end, ..x }, gso);
    true
}

/// Lengths and checksums of a merged frame: its TCP checksum is left to be finished.
fn finish(frame: &mut Frame, l: Layout, gso: usize) {
    let small = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
    let b = &mut frame.bytes;
    if l.v6 {
        b[l.ip + 4..l.ip + 6].copy_from_slice(&small(l.end - l.tcp).to_be_bytes());
    } else {
        b[l.ip + 2..l.ip + 4].copy_from_slice(&small(l.end - l.ip).to_be_bytes());
        b[l.ip + 10..l.ip + 12].fill(0);
        let check = !sum(&b[l.ip..l.tcp], 0);
        b[l.ip + 10..l.ip + 12].copy_from_slice(&check.to_be_bytes());
    }
    let check = pseudo(b, l);
    b[l.tcp + 16..l.tcp + 18].copy_from_slice(&check.to_be_bytes());
    frame.hdr = VirtioNetHdr {
        flags: F_NEEDS_CSUM,
        gso_type: if l.v6 { GSO_TCPV6 } else { GSO_TCPV4 },
        hdr_len: small(l.payload),
        gso_size: small(gso),
        csum_start: small(l.tcp),
        csum_offset: 16,
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use nightporter_check::wire::{Packet, TcpFlags, ipv4_header_ok, on_wire};
    use nightporter_check::wire::{Segment, build};

    fn segment(v6: bool, seq: u32, flags: TcpFlags, payload: &[u8]) -> Frame {
        let s = Segment {
            src: if v6 { [0xfd; 16].into() } else { [10, 0, 0, 1].into() },
            dst: if v6 { [0xfe; 16].into() } else { [10, 0, 0, 2].into() },
            seq,
            ack: 7,
            flags,
            window: 100,
            timestamps: Some((5, 6)),
            ..Segment::default()
        };
        let mut frame = Frame::on_wire(build(&s, payload));
        verify(&mut frame);
        frame
    }

    #[test]
    fn segments_in_a_row_become_one_that_falls_into_the_same_pieces() {
        for v6 in [false, true] {
            let bytes: Vec<u8> = (0..=250).cycle().take(2500).collect();
            let seq = 0xffff_ff00_u32;
            let piece = |n: u32, to: usize, flags| {
                segment(v6, seq.wrapping_add(n), flags, &bytes[n as usize..to])
            };
            let mut all = piece(0, 1000, TcpFlags::ACK);
            assert!(merge(&mut all, &piece(1000, 2000, TcpFlags::ACK)));
            assert!(merge(&mut all, &piece(2000, 2500, TcpFlags::ACK | TcpFlags::PSH)));
            assert!(!merge(&mut all, &piece(2500, 2500, TcpFlags::ACK)), "a pure ACK");
            let packet = Packet::parse(&all.bytes).expect("a packet");
            let (ip, tcp) = packet.tcp().expect("TCP");
            assert!(ipv4_header_ok(&all.bytes, ip) && tcp.payload_len == 2500);
            let mut cut = Vec::new();
            for piece in on_wire(all) {
                let packet = Packet::parse(&piece.bytes).expect("a packet");
                let (_, tcp) = packet.tcp().expect("TCP");
                cut.extend_from_slice(&piece.bytes[tcp.payload_offset as usize..]);
            }
            assert_eq!(cut, bytes);
        }
    }

    #[test]
    fn a_gap_another_ack_or_a_wrong_checksum_keeps_segments_apart() {
        let first = || segment(false, 100, TcpFlags::ACK, &[1; 50]);
        let mut wrong = segment(false, 150, TcpFlags::ACK, &[2; 50]);
        assert!(merge(&mut first(), &wrong));
        wrong.hdr = VirtioNetHdr::default();
        wrong.bytes[80] ^= 1;
        verify(&mut wrong);
        assert!(!merge(&mut first(), &wrong), "it is broken");
        assert!(!merge(&mut first(), &segment(false, 151, TcpFlags::ACK, &[2; 50])), "a gap");
        assert!(!merge(&mut first(), &segment(false, 150, TcpFlags::ACK, &[2; 51])), "longer");
        let fin = segment(false, 100, TcpFlags::ACK | TcpFlags::FIN, &[1; 50]);
        assert!(
            !merge(&mut { fin }, &segment(false, 150, TcpFlags::ACK, &[2; 50])),
            "behind a FIN"
        );
    }
}
