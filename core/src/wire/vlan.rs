//! A guest without knowledge of its VLAN: the tag (IEEE 802.1Q) is inserted into its frames and
//! removed from frames for it, at its port. Everything behind the port sees the tag. A priority tag
//! (VID 0) is no VLAN (IEEE 802.1Q section 9.6): one of the guest becomes its VLAN's tag, and one
//! in front of that tag goes with it.

use super::be16;
use super::packet::TPID_8021Q;
use super::virtio_net::VirtioNetHdr;
use crate::limits::TRANSMIT_PARTS_MAX;

/// Bytes of a tag.
pub const TAG: usize = TAG_U16 as usize;
const TAG_U16: u16 = 4;
/// Bytes of the addresses in front of it.
const ADDRESSES: usize = 12;
/// The VLAN in the tag's second half; the rest is priority.
const VID: u16 = 0xfff;

/// Puts a tag into a frame that was read behind [`TAG`] free bytes; priority 0, or that of the
/// frame's own priority tag, which it replaces. Bytes that are too few for a frame stay as they
/// are. Returns how many bytes there are then, from the first on.
#[must_use]
pub fn put(vlan: u16, hdr: &mut VirtioNetHdr, frame: &mut [u8]) -> usize {
    let len = frame.len();
    if frame.get(TAG..).and_then(|frame| tag_at(frame, 0)).is_some_and(|tag| tag & VID == 0) {
        frame.copy_within(TAG.., 0); // rare, so it may move
        let priority = be16(frame, ADDRESSES + 2) & !VID;
        frame[ADDRESSES + 2..ADDRESSES + TAG].copy_from_slice(&(priority | vlan).to_be_bytes());
        return len - TAG;
    }
    frame.copy_within(TAG.min(len)..len.min(TAG + ADDRESSES), 0);
    if let Some(tag) = frame.get_mut(ADDRESSES..ADDRESSES + TAG) {
        tag[..2].copy_from_slice(&TPID_8021Q.to_be_bytes());
        tag[2..].copy_from_slice(&vlan.to_be_bytes());
    }
    move_offsets(hdr, |offset| offset.saturating_add(TAG_U16));
    len
}

/// The VLAN of a frame in pieces, if its outer tag is one of 802.1Q. A priority tag counts only if
/// no other one is behind it.
#[must_use]
pub fn id_of(parts: &[&[u8]]) -> Option<u16> {
    let head = parts.first()?;
    tag_at(head, tags_before(head)).map(|tag| tag & VID)
}

/// Priority tags in front of another tag: 1, or none.
fn tags_before(head: &[u8]) -> usize {
    let is_before = tag_at(head, 0).is_some_and(|tag| tag & VID == 0) && tag_at(head, 1).is_some();
    usize::from(is_before)
}

/// Priority and VLAN of the tag behind so many others, if it is one of 802.1Q.
fn tag_at(head: &[u8], before: usize) -> Option<u16> {
    let at = ADDRESSES + before * TAG;
    let is_tagged = head.len() >= at + TAG && be16(head, at) == TPID_8021Q;
    is_tagged.then(|| be16(head, at + 2))
}

/// A frame without its VLAN's tag, in pieces.
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
        let (tags, moved) = if tags_before(head) > 0 { (2, 2 * TAG_U16) } else { (1, TAG_U16) };
        move_offsets(&mut it.hdr, |offset| offset.saturating_sub(moved));
        it.parts[0] = &head[..ADDRESSES];
        it.parts[1] = &head[ADDRESSES + tags * TAG..];
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
        let len = put(7, hdr, &mut bytes);
        bytes.truncate(len);
        bytes
    }

    /// With this tag before the EtherType.
    fn with_tag(frame: &[u8], tag: u16) -> Vec<u8> {
        let [high, low] = tag.to_be_bytes();
        [&frame[..ADDRESSES], &[0x81, 0, high, low], &frame[ADDRESSES..]].concat()
    }

    #[test]
    fn com_10_a_priority_tag_of_the_guest_becomes_its_vlans() {
        let (frame, mut hdr) = (v4_segment(&[7; 700]).frame(), HDR);
        move_offsets(&mut hdr, |offset| offset + TAG_U16);
        let sent = hdr;
        let bytes = tagged(&mut hdr, &with_tag(&frame, 0xa000));
        assert_eq!((bytes.clone(), hdr), (with_tag(&frame, 0xa007), sent));
        let back = Untagged::of(&hdr, &[&bytes]).unwrap();
        assert_eq!((back.hdr, back.parts().concat()), (HDR, frame.clone()));
        // A tag of a VLAN is not the guest's to use: its port drops the two.
        let two = tagged(&mut HDR.clone(), &with_tag(&frame, 0xa008));
        assert_eq!(two, with_tag(&with_tag(&frame, 0xa008), 7));
    }

    #[test]
    fn com_10_a_priority_tag_before_the_vlans_goes_with_it() {
        let frame = v4_segment(&[7; 700]).frame();
        let bytes = with_tag(&with_tag(&frame, 7), 0x6000);
        let mut hdr = HDR;
        move_offsets(&mut hdr, |offset| offset + 2 * TAG_U16);
        assert_eq!(id_of(&[&bytes]), Some(7));
        for cut in [20, 40, bytes.len()] {
            let (head, rest) = bytes.split_at(cut);
            let back = Untagged::of(&hdr, &[head, rest]).unwrap();
            assert_eq!((back.hdr, back.parts().concat()), (HDR, frame.clone()));
        }
        // Alone it is one, and behind the VLAN's the guest's affair.
        let alone = with_tag(&frame, 0x6000);
        assert_eq!(id_of(&[&alone]), Some(0));
        let behind = with_tag(&alone, 7);
        let back = Untagged::of(&VirtioNetHdr::default(), &[&behind]).unwrap();
        assert_eq!((id_of(&[&behind]), back.parts().concat()), (Some(7), alone));
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
