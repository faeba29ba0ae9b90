//! A physical network card's work for its driver: finishes checksums, cuts super-segments (COM-18).

use etherparse::checksum::Sum16BitWords;

use super::{IpVersion, PROTOCOL_TCP, Packet, TcpFlags, pseudo_header, written};
use crate::frame::Frame;

/// Where the total length, identification and checksum are in an IPv4 header.
const V4_LENGTH: usize = 2;
const V4_ID: usize = 4;
const V4_CHECKSUM: usize = 10;
/// Where the payload length is in an IPv6 header, and how long that is.
const V6_LENGTH: usize = 4;
const V6_HEADER: usize = 40;
/// Where the number, flags and checksum are in a TCP header.
const SEQ: usize = 4;
const FLAGS: usize = 12;
const CHECKSUM: usize = 16;

/// The frames on the wire for one that a driver gave away; none if its description of the frame is
/// impossible.
#[must_use]
pub fn on_wire(mut frame: Frame) -> Vec<Frame> {
    let hdr = frame.hdr;
    if hdr.gso_type != super::GSO_NONE {
        return cut(&frame).unwrap_or_default();
    }
    if hdr.flags & super::F_NEEDS_CSUM != 0 {
        let from = usize::from(hdr.csum_start);
        let Some(covered) = frame.bytes.get_mut(from..) else { return Vec::new() };
        let check = written(&Sum16BitWords::new().add_slice(covered));
        let field = usize::from(hdr.csum_offset);
        let Some(field) = covered.get_mut(field..field + 2) else { return Vec::new() };
        // 0 means in UDP that there is none; all ones is the same number.
        field.copy_from_slice(&if check == [0, 0] { [0xff, 0xff] } else { check });
    }
    vec![Frame::on_wire(frame.bytes)]
}

/// Numbers go on, PSH and FIN are on the last only, CWR on the first only.
fn cut(frame: &Frame) -> Option<Vec<Frame>> {
    let packet = Packet::parse(&frame.bytes).ok()?;
    let (ip, tcp) = packet.tcp()?;
    let size = usize::from(frame.hdr.gso_size);
    let (ip_at, tcp_at) = (usize::from(ip.header_offset), usize::from(ip.payload_offset));
    let header = frame.bytes.get(..tcp.payload_offset as usize)?;
    let payload = frame.bytes.get(header.len()..ip.end as usize)?;
    if size == 0 {
        return None;
    }
    let pieces = payload.len().div_ceil(size).max(1);
    let mut frames = Vec::with_capacity(pieces);
    for n in 0..pieces {
        let from = n * size;
        let mine = &payload[from..payload.len().min(from + size)];
        let mut bytes = [header, mine].concat();
        let (is_first, is_last) = (n == 0, n + 1 == pieces);
        let tcp_len = u16::try_from(bytes.len() - tcp_at).ok()?;
        let place = tcp.seq + u32::try_from(from).ok()?;
        put(&mut bytes, tcp_at + SEQ, &place.0.to_be_bytes());
        let drop = |flags: TcpFlags, now: bool| if now { flags.0 } else { 0 };
        let off = drop(TcpFlags::PSH | TcpFlags::FIN, !is_last) | drop(TcpFlags::CWR, !is_first);
        let [high, low] = off.to_be_bytes();
        bytes[tcp_at + FLAGS] &= !high;
        bytes[tcp_at + FLAGS + 1] &= !low;
        put(&mut bytes, tcp_at + CHECKSUM, &[0, 0]);
        match ip.version {
            IpVersion::V4 => {
                let len = u16::try_from(bytes.len() - ip_at).ok()?;
                let id = u16::from_be_bytes([bytes[ip_at + V4_ID], bytes[ip_at + V4_ID + 1]]);
                let id = id.wrapping_add(u16::try_from(n).ok()?);
                put(&mut bytes, ip_at + V4_LENGTH, &len.to_be_bytes());
                put(&mut bytes, ip_at + V4_ID, &id.to_be_bytes());
                put(&mut bytes, ip_at + V4_CHECKSUM, &[0, 0]);
                let check = written(&Sum16BitWords::new().add_slice(&bytes[ip_at..tcp_at]));
                put(&mut bytes, ip_at + V4_CHECKSUM, &check);
            }
            IpVersion::V6 => {
                let len = u16::try_from(bytes.len() - ip_at - V6_HEADER).ok()?;
                put(&mut bytes, ip_at + V6_LENGTH, &len.to_be_bytes());
            }
        }
        let pseudo = pseudo_header(ip.version, ip.src, ip.dst, PROTOCOL_TCP, tcp_len.into());
        let check = written(&pseudo.add_slice(&bytes[tcp_at..]));
        put(&mut bytes, tcp_at + CHECKSUM, &check);
        frames.push(Frame::on_wire(bytes));
    }
    Some(frames)
}

fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes[at..at + what.len()].copy_from_slice(what);
}

#[cfg(test)]
mod tests {
    use nightporter_core::wire::virtio_net::VirtioNetHdr;

    use super::*;
    use crate::wire::{F_NEEDS_CSUM, GSO_TCPV4, ipv4_header_ok, tcp_checksum_ok, unfinished};
    use crate::wire::{Segment, build};

    #[test]
    fn pieces_have_their_own_numbers_flags_and_checksums() {
        let all = TcpFlags::ACK | TcpFlags::PSH | TcpFlags::CWR | TcpFlags::FIN;
        let segment = Segment { seq: u32::MAX - 3, flags: all, ..Segment::default() };
        let hdr = VirtioNetHdr {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            gso_size: 4,
            ..VirtioNetHdr::default()
        };
        let pieces = on_wire(Frame { hdr, bytes: build(&segment, b"nine byte") });
        let mut seen = Vec::new();
        for piece in &pieces {
            let packet = Packet::parse(&piece.bytes).expect("whole");
            let (ip, tcp) = packet.tcp().expect("TCP");
            assert!(ipv4_header_ok(&piece.bytes, ip) && tcp_checksum_ok(&piece.bytes, ip));
            let id = u16::from_be_bytes([piece.bytes[18], piece.bytes[19]]);
            seen.push((tcp.seq.0, tcp.payload_len, tcp.flags, id));
        }
        let ack = TcpFlags::ACK;
        let first = (u32::MAX - 3, 4, ack | TcpFlags::CWR, 0);
        let last = (4, 1, ack | TcpFlags::PSH | TcpFlags::FIN, 2);
        assert_eq!(seen, [first, (0, 4, ack, 1), last]);
    }

    #[test]
    fn an_unfinished_checksum_is_finished_and_one_outside_the_frame_is_nobodys() {
        let mut bytes = build(&Segment::default(), b"odd");
        let packet = Packet::parse(&bytes).expect("whole");
        let (ip, _) = packet.tcp().expect("TCP");
        let len = ip.end - u32::from(ip.payload_offset);
        let pseudo = pseudo_header(ip.version, ip.src, ip.dst, PROTOCOL_TCP, len);
        let right = [bytes[50], bytes[51]];
        bytes[50..52].copy_from_slice(&unfinished(&pseudo));
        let hdr = VirtioNetHdr {
            flags: F_NEEDS_CSUM,
            csum_start: ip.payload_offset,
            csum_offset: 16,
            ..VirtioNetHdr::default()
        };
        let outside = VirtioNetHdr { csum_offset: 400, ..hdr };
        assert!(on_wire(Frame { hdr: outside, bytes: bytes.clone() }).is_empty());
        let finished = on_wire(Frame { hdr, bytes });
        assert_eq!(finished[0].bytes[50..52], right);
        assert!(tcp_checksum_ok(&finished[0].bytes, ip));
        assert_eq!(finished[0].hdr, VirtioNetHdr::default());
    }
}
