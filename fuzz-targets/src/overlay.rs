//! Both ways through a tunnel (`core::overlay`).
//!
//! Input: the outer header's ECN field, the inner MTU, the size of segments, then bytes. The bytes
//! are used as a datagram of a peer, unchanged and behind a VXLAN header, and as a frame of a
//! guest.

use nightporter_core::limits::OVERLAY_DATAGRAM_BYTES_MAX;
use nightporter_core::overlay::ecn::Ecn;
use nightporter_core::overlay::{Overlay, OverlayConfig, PeerId};
use nightporter_core::time::Instant;
use nightporter_core::turn::adapt::Adapter;
use nightporter_core::wire::packet::{IpVersion, Packet};
use nightporter_core::wire::segment::validate_hdr;
use nightporter_core::wire::virtio_net::{
    F_NEEDS_CSUM, GSO_NONE, GSO_TCPV4, GSO_TCPV6, VirtioNetHdr,
};
use nightporter_core::wire::vxlan;

use crate::captures;

const NOW: Instant = Instant::from_secs(1);
const VNI: u32 = 7;

/// Judges one input.
pub fn run(data: &[u8]) {
    let Some(([ecn, a, b, c, d], bytes)) = data.split_first_chunk() else { return };
    // The values of a configuration, and of a path.
    let mtu = 1280 + u16::from_be_bytes([*a, *b]) % 8000;
    let gso_size = u16::from_be_bytes([*c, *d]);
    comes_out(Ecn::of_tos(*ecn), mtu, bytes.to_vec());
    comes_out(Ecn::of_tos(*ecn), mtu, [&vxlan::emit(VNI)[..], bytes].concat());
    goes_in(mtu, gso_size, bytes);
}

/// Frames of a real capture.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let frames = captures::frames().into_iter();
    frames
        .map(|(hdr, frame)| [&[2, 0, 170][..], &hdr.gso_size.to_be_bytes(), &frame].concat())
        .collect()
}

fn overlay(mtu: u16) -> Overlay {
    let peers = vec!["192.0.2.2".parse().expect("an address")];
    Overlay::new(&OverlayConfig { vni: VNI, peers, mtu, hash_seeds: [1, 2, 3, 4] })
}

/// A datagram becomes a frame that any guest can be given, with the header that it has.
fn comes_out(outer: Ecn, mtu: u16, mut datagram: Vec<u8>) {
    let mut overlay = overlay(mtu);
    let Ok((hdr, frame)) = overlay.handle_datagram(NOW, PeerId(0), outer, &mut datagram) else {
        return;
    };
    let packet = Packet::parse(frame).expect("it was parsed");
    assert_eq!(Ecn::of(&packet).decapsulated(outer), Some(Ecn::of(&packet)), "marks are settled");
    if hdr != VirtioNetHdr::default() {
        let clean = validate_hdr(&hdr, frame, &packet).expect("a tap would say no other");
        assert_eq!(clean, hdr);
        let adapted = Adapter::default().adapt(&hdr, &[frame], |_, piece| {
            assert!(piece.len() - usize::from(packet.eth.len) <= usize::from(mtu) || !hdr.is_gso());
        });
        adapted.expect("it can be cut and summed");
    }
}

/// A frame becomes datagrams that the path takes, at most as many as one call takes.
fn goes_in(mtu: u16, gso_size: u16, frame: &[u8]) {
    let mut overlay = overlay(mtu);
    let Ok(packet) = Packet::parse(frame) else { return };
    let plain = VirtioNetHdr::default();
    let gso_type = match packet.tcp().map(|(ip, _)| ip.version) {
        Some(IpVersion::V4) => GSO_TCPV4,
        Some(IpVersion::V6) => GSO_TCPV6,
        None => GSO_NONE,
    };
    let wished = VirtioNetHdr {
        flags: F_NEEDS_CSUM,
        gso_type,
        gso_size,
        csum_start: packet.tcp().map_or(0, |(ip, _)| ip.payload_offset),
        csum_offset: 16,
        ..plain
    };
    // The sender of a too long packet to a known station gets an error frame.
    overlay.tell_station(packet.eth.dst, PeerId(0), &[]);
    if let Some(error) = overlay.complain(NOW, frame) {
        assert!(frame.len() > usize::from(mtu) && error.len() < frame.len());
        let error = Packet::parse(&error).expect("it is a frame");
        assert_eq!((error.eth.dst, error.eth.src), (packet.eth.src, packet.eth.dst));
    }
    for hdr in [plain, validate_hdr(&wished, frame, &packet).unwrap_or(plain)] {
        let Ok((_, mut datagrams)) = overlay.handle_frame(NOW, &hdr, frame) else { continue };
        let mut buf = vec![0; OVERLAY_DATAGRAM_BYTES_MAX];
        while let Some(batch) = datagrams.next_into(&mut buf) {
            assert!(batch.len.div_ceil(usize::from(batch.datagram)) <= 64);
            for datagram in buf[..batch.len].chunks(usize::from(batch.datagram)) {
                assert_eq!(vxlan::parse(datagram), Ok(VNI));
                let len = datagram.len() - vxlan::LEN - 14;
                assert!(len <= usize::from(mtu), "{len} bytes on a path of {mtu}");
            }
        }
    }
}
