//! A guest without knowledge of its VLAN: the tag (IEEE 802.1Q) is inserted into its frames and
//! removed from frames for it, at its port. Everything behind the port sees the tag.

use super::be16;
use super::packet::TPID_8021Q;
use super::virtio_net::VirtioNetHdr;
use crate::limits::TRANSMIT_PARTS_MAX;

/// Bytes of a tag.
pub const TAG: usize = TAG_U16 as usize;
const TAG_U16: u16 = 4;
/// Bytes of the addresses in front of it.
const ADDRESSES: usize = 12;

/// Puts a tag into a frame that was read behind [`TAG`] free bytes; priority 0. Bytes that are too
/// few for a frame stay as they are.
pub fn put(vlan: u16, hdr: &mut VirtioNetHdr, frame: &mut [u8]) {
    let len = frame.len();
    frame.copy_within(TAG.min(len)..len.min(TAG + ADDRESSES), 0);
    if let Some(tag) = frame.get_mut(ADDRESSES..ADDRESSES + TAG) {
        tag[..2].copy_from_slice(&TPID_8021Q.to_be_bytes());
        tag[2..].copy_from_slice(&vlan.to_be_bytes());
    }
    move_offsets(hdr, |offset| offset.saturating_add(TAG_U16));
}

/// The VLAN of a frame in pieces, if its outer tag is one of 802.1Q.
#[must_use]
pub fn id_of(parts: &[&[u8]]) -> Option<u16> {
    let head = parts.first()?;
    let is_tagged = head.len() >= ADDRESSES + TAG && be16(head, ADDRESSES) == TPID_8021Q;
    is_tagged.then(|| be16(head, ADDRESSES + 2) & 0xfff)
}

/// A frame without its outer tag, in pieces.
#[derive(Clone, Copy, Debug)]
pub struct Untagged<'a> {
    /// Its header.
    pub hdr: VirtioNetHdr,
    parts: [&'a [u8]; TRANSMIT_PARTS_MAX + 1],
    len: usize,
}

impl<'a> Untagged<'a> {
    /// A tag to remove from a frame in pieces, the first of which has the addresses and the tag.
    /// `None`: there is no tag, as in a heartbeat.
    #[must_use]
    pub fn of(hdr: &VirtioNetHdr, parts: &[&'a [u8]]) -> Option<Self> {
        let (head, rest) = parts.split_first()?;
        if id_of(parts).is_none() || parts.len() > TRANSMIT_PARTS_MAX {
            return None;
        }
        let mut it = Self { hdr: *hdr, parts: [&[]; TRANSMIT_PARTS_MAX + 1], len: parts.len() + 1 };
        move_offsets(&mut it.hdr, |offset| offset.saturating_sub(TAG_U16));
        it.parts[0] = &head[..ADDRESSES];
        it.parts[1] = &head[ADDRESSES + TAG..];
        it.parts[2..it.len].copy_from_slice(rest);
        Some(it)
    }

    /// Its pieces, in order.
    #[must_use]
    pub fn parts(&self) -> &[&'a [u8]] {
        &self.parts[..self.len]
    }
}

/// Shifts the header's `csum_start` and `hdr_len`, which count from the start of the frame, by the
/// tag. `csum_offset` counts from `csum_start` and stays.
fn move_offsets(hdr: &mut VirtioNetHdr, moved: impl Fn(u16) -> u16) {
    if hdr.needs_csum() {
        hdr.csum_start = moved(hdr.csum_start);
    }
    if hdr.is_gso() {
        hdr.hdr_len = moved(hdr.hdr_len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::packet::Packet;
    use crate::wire::samples::v4_segment;
    use crate::wire::segment::validate_hdr;
    use crate::wire::virtio_net::{F_NEEDS_CSUM, GSO_TCPV4};

    const HDR: VirtioNetHdr = VirtioNetHdr {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 66,
        gso_size: 256,
        csum_start: 34,
        csum_offset: 16,
    };

    /// The frame behind [`TAG`] bytes of something else, with a tag in it.
    fn tagged(hdr: &mut VirtioNetHdr, frame: &[u8]) -> Vec<u8> {
        let mut bytes = [&[0xaa; TAG], frame].concat();
        put(7, hdr, &mut bytes);
        bytes
    }

    #[test]
    fn a_super_segment_is_the_same_behind_its_tag() {
        let (frame, mut hdr) = (v4_segment(&[7; 700]).frame(), HDR);
        let bytes = tagged(&mut hdr, &frame);
        let packet = Packet::parse(&bytes).unwrap();
        assert_eq!(packet.eth.vlan.tags(), [[0x81, 0, 0, 7]]);
        assert_eq!((id_of(&[&bytes]), id_of(&[&frame]), id_of(&[])), (Some(7), None, None));
        assert_eq!(
            (packet.eth.dst, packet.eth.src),
            Packet::parse(&frame).map(|p| (p.eth.dst, p.eth.src)).unwrap()
        );
        assert_eq!(validate_hdr(&hdr, &bytes, &packet).map(|hdr| hdr.csum_start), Ok(38));
        for cut in [16, 40, bytes.len()] {
            let (head, rest) = bytes.split_at(cut);
            let back = Untagged::of(&hdr, &[head, rest]).unwrap();
            assert_eq!((back.hdr, back.parts().concat()), (HDR, frame.clone()));
        }
    }

    #[test]
    fn what_has_no_tag_keeps_all_it_has() {
        let frame = v4_segment(b"x").frame();
        assert!(Untagged::of(&HDR, &[&frame]).is_none());
        assert!(Untagged::of(&HDR, &[]).is_none());
        assert!(Untagged::of(&HDR, &[&[0x81; 15]]).is_none(), "cut inside its tag");
    }

    #[test]
    fn what_is_too_short_for_a_frame_gets_no_tag_and_so_goes_nowhere() {
        for len in 0..14 {
            let bytes = tagged(&mut VirtioNetHdr::default(), &vec![0x55; len]);
            let packet = Packet::parse(&bytes);
            assert!(!packet.is_ok_and(|packet| !packet.eth.vlan.is_empty()), "of {len} bytes");
        }
        let bytes = tagged(&mut VirtioNetHdr::default(), &[0x55; 14]);
        assert!(Packet::parse(&bytes).is_ok_and(|packet| !packet.eth.vlan.is_empty()));
    }
}
