//! Errors of routers about packets that were too big (`core::wire::icmp`).
//!
//! Input: the length of the quotation and the MTU, then a frame. The frame is read unchanged; and
//! if it is a segment, an error about it is made and must be understood.

use nightporter_check::wire::Packet as Plain;
use nightporter_core::wire::icmp::TooBig;
use nightporter_core::wire::packet::{IpVersion, Net, Packet, Seq};

use crate::captures;

/// Bytes of a segment that an error has to quote behind the IP header.
const QUOTED_MIN: usize = 8;
/// The smallest MTU of a path, by IPv4 and by IPv6: lower numbers are forged or broken.
const MTU_MIN: [u32; 2] = [552, 1280];

/// Judges one input.
pub fn run(data: &[u8]) {
    let Some((cut, rest)) = data.split_first_chunk::<2>() else { return };
    let Some((mtu, frame)) = rest.split_first_chunk::<4>() else { return };
    let (cut, mtu) = (usize::from(u16::from_be_bytes(*cut)), u32::from_be_bytes(*mtu));
    if let Some((version, it)) = read(frame) {
        what_is_read_is_there(frame, &it, version == IpVersion::V4);
    }
    for v4 in [true, false] {
        an_error_is_read_as_it_was_meant(frame, cut, mtu, v4);
    }
}

/// Frames of a real capture, and errors about them.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let frames = captures::frames().into_iter().map(|(_, frame)| frame);
    let input = |mtu: u32, frame: &[u8]| {
        let cut = 64_u16.to_be_bytes();
        [&cut[..], &mtu.to_be_bytes(), frame].concat()
    };
    let seeds = frames.flat_map(|frame| {
        let errors = [true, false].into_iter().filter_map(|v4| error(&frame, 64, 1400, v4));
        let errors: Vec<_> = errors.map(|error| input(1400, &error)).collect();
        [vec![input(1300, &frame)], errors].concat()
    });
    seeds.collect()
}

/// As the engine does.
fn read(frame: &[u8]) -> Option<(IpVersion, TooBig)> {
    let Ok(Packet { net: Net::Ip(ip), .. }) = Packet::parse(frame) else { return None };
    Some((ip.version, TooBig::parse(frame, &ip)?))
}

/// All read values stand in the frame, and ask for no segments that no path needs.
fn what_is_read_is_there(frame: &[u8], it: &TooBig, v4: bool) {
    let is_there = |bytes: &[u8]| frame.windows(bytes.len()).any(|window| window == bytes);
    assert!(it.mtu >= MTU_MIN[usize::from(!v4)], "an MTU of {}", it.mtu);
    assert!(it.mtu <= u32::from(u16::MAX) || !v4, "IPv4 has 16 bits for {}", it.mtu);
    let ports = [it.segment.src_port.to_be_bytes(), it.segment.dst_port.to_be_bytes()].concat();
    assert!(is_there(&[&ports[..], &it.segment.seq.0.to_be_bytes()].concat()), "{it:?}");
    let addresses = if v4 {
        [it.segment.src.v4_bytes(), it.segment.dst.v4_bytes()].concat()
    } else {
        [it.segment.src.0, it.segment.dst.0].concat()
    };
    assert!(is_there(&addresses), "{it:?}");
}

fn an_error_is_read_as_it_was_meant(frame: &[u8], cut: usize, mtu: u32, v4: bool) {
    let Some(error) = error(frame, cut, mtu, v4) else { return };
    let Ok(packet) = Plain::parse(frame) else { return };
    let Some((ip, tcp)) = packet.tcp() else { return };
    if v4 != (ip.version == IpVersion::V4) {
        return;
    }
    let named = if v4 { mtu & 0xffff } else { mtu };
    let header = usize::from(ip.payload_offset - ip.header_offset);
    let is_understood = v4 || header == 40; // behind extension headers nobody looks for TCP
    let says = is_understood && named > 0 && cut >= header + QUOTED_MIN;
    let expected = says.then(|| {
        let mtu = named.max(MTU_MIN[usize::from(!v4)]);
        (ip.src, ip.dst, tcp.src_port, tcp.dst_port, Seq(tcp.seq.0), mtu)
    });
    let read = read(&error)
        .map(|(_, TooBig { segment: s, mtu })| (s.src, s.dst, s.src_port, s.dst_port, s.seq, mtu));
    assert_eq!(read, expected, "MTU {mtu}, {cut} bytes quoted");
}

/// A router's error about a frame: in IPv4 or IPv6, with `mtu` and a quotation of its IP packet up
/// to `cut` bytes.
pub(crate) fn error(frame: &[u8], cut: usize, mtu: u32, v4: bool) -> Option<Vec<u8>> {
    let Ok(packet) = Plain::parse(frame) else { return None };
    let (ip, _) = packet.tcp()?;
    let quoted = &frame[usize::from(ip.header_offset)..ip.end as usize];
    let quoted = &quoted[..quoted.len().min(cut)];
    let len = u16::try_from(8 + quoted.len()).ok()?;
    let mut bytes = frame[..12].to_vec();
    if v4 {
        let total = len.checked_add(20)?.to_be_bytes();
        bytes.extend([8, 0, 0x45, 0, total[0], total[1], 0, 0, 0, 0, 64, 1, 0, 0]);
        bytes.extend([10, 0, 0, 9, 10, 0, 0, 1]);
        bytes.extend([3, 4, 0, 0, 0, 0]);
        bytes.extend(&mtu.to_be_bytes()[2..]);
    } else {
        let len = len.to_be_bytes();
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, len[0], len[1], 58, 64]);
        bytes.extend([0xfd; 32]);
        bytes.extend([2, 0, 0, 0]);
        bytes.extend(mtu.to_be_bytes());
    }
    bytes.extend(quoted);
    Some(bytes)
}
