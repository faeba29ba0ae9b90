//! A frame on its way through the world.

use nightporter_core::wire::virtio_net::VirtioNetHdr;

/// Bytes before an Ethernet frame's type.
const MACS: usize = 12;
/// The EtherType of a VLAN tag.
const TAG: [u8; 2] = [0x81, 0];

/// An Ethernet frame, with a driver's description of its checksum and segmentation.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Frame {
    /// Default on a physical wire; on a ring, the virtio-net header.
    pub hdr: VirtioNetHdr,
    /// From the destination MAC on, without frame check sequence.
    pub bytes: Vec<u8>,
}

impl Frame {
    /// A frame as it is on a physical wire.
    #[must_use]
    pub fn on_wire(bytes: Vec<u8>) -> Self {
        Self { hdr: VirtioNetHdr::default(), bytes }
    }

    /// The same frame in a VLAN: a tag behind the MACs (IEEE 802.1Q).
    #[must_use]
    pub fn tagged(mut self, vlan: Option<u16>) -> Self {
        if let Some(vlan) = vlan.filter(|_| self.bytes.len() >= MACS) {
            let [hi, lo] = vlan.to_be_bytes();
            self.bytes.splice(MACS..MACS, [TAG[0], TAG[1], hi, lo]);
            self.move_headers(|n| n.saturating_add(4));
        }
        self
    }

    /// Without its tag for a machine in `vlan`, whatever its priority; `None`: another VLAN's,
    /// perhaps by a bit that flipped (seed 58216).
    #[must_use]
    pub fn untagged(mut self, vlan: Option<u16>) -> Option<Self> {
        let tag = self.bytes.get(MACS..MACS + 4).filter(|tag| tag[..2] == TAG);
        let Some((own, tag)) = vlan.zip(tag) else { return Some(self) };
        if u16::from_be_bytes([tag[2] & 0xf, tag[3]]) != own {
            return None;
        }
        self.bytes.drain(MACS..MACS + 4);
        self.move_headers(|n| n.saturating_sub(4));
        Some(self)
    }

    fn move_headers(&mut self, by: impl Fn(u16) -> u16) {
        if self.hdr.needs_csum() {
            self.hdr.csum_start = by(self.hdr.csum_start);
        }
        if self.hdr.hdr_len > 0 {
            self.hdr.hdr_len = by(self.hdr.hdr_len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_comes_and_goes_and_the_driver_still_finds_the_headers() {
        let hdr = VirtioNetHdr { flags: 1, csum_start: 34, hdr_len: 54, ..VirtioNetHdr::default() };
        let frame = Frame { hdr, bytes: (0..60).collect() };
        let tagged = frame.clone().tagged(Some(0x123));
        assert_eq!(
            tagged.bytes[..17],
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0x81, 0, 1, 0x23, 12]
        );
        assert_eq!((tagged.hdr.csum_start, tagged.hdr.hdr_len), (38, 58));
        assert_eq!(tagged.clone().untagged(Some(0x124)), None, "another VLAN's");
        let urgent = frame.clone().tagged(Some(0xe123));
        assert_eq!(urgent.untagged(Some(0x123)), Some(frame.clone()));
        assert_eq!(tagged.untagged(Some(0x123)), Some(frame));
    }
}
