//! Frames of real kernels, from which the corpora of frames start.
//!
//! `captures/lab.pcap` is from `nightporter capture` of both ports while `nightporter-lab test`
//! moved 10 MB each way between two Linux kernels: of every kind of segment the first and the
//! longest. Super-segments are cut to 266 bytes and their IP length with them.

use nightporter_check::frame::Frame;
use nightporter_check::wire::{IpAddr16, Packet, Segment};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

const LAB: &[u8] = include_bytes!("../captures/lab.pcap");
const FILE_HEADER: usize = 24;
const RECORD_HEADER: usize = 16;
/// Segment size that makes of the longer frames super-segments.
const GSO_SIZE: u16 = 48;

/// Each captured frame as it is, and each TCP segment over IPv6 with two VLAN tags and a partial
/// checksum.
#[must_use]
pub fn frames() -> Vec<(VirtioNetHdr, Vec<u8>)> {
    let mut frames: Vec<_> = lab().map(|f| (VirtioNetHdr::default(), f.to_vec())).collect();
    frames.extend(lab().filter_map(dressed_up));
    frames
}

/// The frames of the capture, in order. The file is ours: little-endian, and whole.
fn lab() -> impl Iterator<Item = &'static [u8]> {
    let mut rest = &LAB[FILE_HEADER..];
    std::iter::from_fn(move || {
        let (header, tail) = rest.split_at_checked(RECORD_HEADER)?;
        let len = u32::from_le_bytes(header[8..12].try_into().expect("four bytes")) as usize;
        let (frame, tail) = tail.split_at(len);
        rest = tail;
        Some(frame)
    })
}

fn dressed_up(frame: &'static [u8]) -> Option<(VirtioNetHdr, Vec<u8>)> {
    let packet = Packet::parse(frame).ok()?;
    let (ip, tcp) = packet.tcp()?;
    let v6 = |addr: IpAddr16| {
        let bytes: [u8; 16] = [&[0xfd; 12][..], &addr.v4_bytes()].concat().try_into().ok()?;
        Some(bytes.into())
    };
    let mac = |at: usize| frame[at..].first_chunk().copied();
    let segment = Segment {
        dst_mac: mac(0)?,
        src_mac: mac(6)?,
        tags: vec![[0x88, 0xa8, 0, 5], [0x81, 0, 0x20, 7]],
        src: v6(ip.src)?,
        dst: v6(ip.dst)?,
        ecn: ip.tos | 2,
        ttl: ip.ttl,
        flow_label: 0xabcde,
        src_port: tcp.src_port,
        dst_port: tcp.dst_port,
        seq: tcp.seq.0,
        ack: tcp.ack.0,
        flags: tcp.flags,
        window: tcp.window,
        timestamps: tcp.options.timestamps.map(|ts| (ts.tsval, ts.tsecr)),
        sack: vec![(tcp.seq.0.wrapping_add(1), tcp.seq.0.wrapping_add(9))],
        offload: Some(GSO_SIZE),
        ..Segment::default()
    };
    let Frame { hdr, bytes } = segment.frame(&frame[tcp.payload_offset as usize..ip.end as usize]);
    Some((hdr, bytes))
}
