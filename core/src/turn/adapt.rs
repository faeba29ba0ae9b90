//! Does in software the work that the receiver of a frame did not negotiate: checksums and
//! segmentation.

use crate::drops::DropReason;
use crate::port::PortFeatures;
use crate::wire::packet::Packet;
use crate::wire::segment::{Segmenter, complete_checksum};
use crate::wire::virtio_net::{
    F_DATA_VALID, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, VirtioNetHdr,
};

/// Whether the receiver takes a frame with this header as it is (virtio 1.2, 5.1.6.4).
#[must_use]
pub fn fits(features: PortFeatures, hdr: &VirtioNetHdr) -> bool {
    let segmentation = match hdr.gso_type & !GSO_ECN {
        GSO_NONE => true,
        GSO_TCPV4 => features.tso4,
        GSO_TCPV6 => features.tso6,
        GSO_UDP_L4 => features.uso,
        _ => false,
    };
    let ecn = hdr.gso_type & GSO_ECN == 0 || features.ecn;
    segmentation && ecn && (hdr.flags == 0 || features.csum)
}

/// Scratch space for frames that have to be changed. 64 KiB each once used.
#[derive(Debug, Default)]
pub struct Adapter {
    whole: Vec<u8>,
    piece: Vec<u8>,
}

impl Adapter {
    /// Turns a frame into frames that need no offload, and gives each to `emit`, in order.
    ///
    /// # Errors
    /// Why the frame can be given to nobody: it is not what its header says.
    pub fn adapt(
        &mut self,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
        mut emit: impl FnMut(&VirtioNetHdr, &[u8]),
    ) -> Result<(), DropReason> {
        self.whole.clear();
        for part in parts {
            self.whole.extend_from_slice(part);
        }
        let mut hdr = *hdr;
        hdr.flags &= !F_DATA_VALID;
        if !hdr.is_gso() {
            complete_checksum(&mut hdr, &mut self.whole)?;
            emit(&hdr, &self.whole);
            return Ok(());
        }
        let packet = Packet::parse(&self.whole)?;
        let (ip, tcp) = packet.tcp().ok_or(DropReason::TooBig)?;
        let mut segments = Segmenter::new(&hdr, &self.whole, ip, tcp)?;
        self.piece.resize(segments.len_max(), 0);
        while let Some(len) = segments.next_into(&mut self.piece) {
            emit(&VirtioNetHdr::default(), &self.piece[..len]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::wire::virtio_net::F_NEEDS_CSUM;

    use super::*;

    const ALL: PortFeatures = PortFeatures::ALL;

    /// 3,000 bytes of TCP over IPv4, as a super-segment with a partial checksum of zero.
    fn super_segment() -> (VirtioNetHdr, Vec<u8>) {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        frame.extend([0x45, 0, 0x0b, 0xe0, 0, 7, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0x12, 0x34, 0, 80, 0, 0, 0, 9, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
        frame.extend((0..3000).map(|i| u8::try_from(i % 251).unwrap()));
        let hdr = VirtioNetHdr {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
        };
        (hdr, frame)
    }

    /// The Internet checksum over the pseudo-header and segment of an IPv4 TCP frame; 0 is right.
    fn tcp_check(frame: &[u8]) -> u16 {
        let segment = &frame[34..];
        let mut bytes = frame[26..34].to_vec();
        bytes.extend([0, 6]);
        bytes.extend(u16::try_from(segment.len()).unwrap().to_be_bytes());
        bytes.extend(segment);
        let words =
            bytes.chunks(2).map(|c| u32::from(c[0]) << 8 | c.get(1).map_or(0, |b| u32::from(*b)));
        let mut sum: u32 = words.sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !u16::try_from(sum).unwrap()
    }

    #[test]
    fn a_header_fits_only_what_was_negotiated() {
        let (hdr, _) = super_segment();
        assert!(fits(ALL, &hdr) && fits(PortFeatures::default(), &VirtioNetHdr::default()));
        for bad in [PortFeatures { csum: false, ..ALL }, PortFeatures { tso4: false, ..ALL }] {
            assert!(!fits(bad, &hdr), "{bad:?}");
        }
        let ecn = VirtioNetHdr { gso_type: GSO_TCPV4 | GSO_ECN, ..hdr };
        assert!(fits(ALL, &ecn) && !fits(PortFeatures { ecn: false, ..ALL }, &ecn));
        let udp = VirtioNetHdr { gso_type: 5, ..hdr };
        assert!(fits(ALL, &udp) && !fits(PortFeatures { uso: false, ..ALL }, &udp));
    }

    #[test]
    fn a_super_segment_becomes_segments_with_right_checksums_and_the_same_bytes() {
        let (hdr, frame) = super_segment();
        let mut out = Vec::new();
        let (head, tail) = frame.split_at(54);
        let emit = |h: &VirtioNetHdr, f: &[u8]| {
            assert_eq!(*h, VirtioNetHdr::default());
            assert_eq!(tcp_check(f), 0);
            out.push(f[54..].to_vec());
        };
        Adapter::default().adapt(&hdr, &[head, tail], emit).unwrap();
        assert_eq!(out.iter().map(Vec::len).collect::<Vec<_>>(), [1448, 1448, 104]);
        assert_eq!(out.concat(), tail);
    }

    #[test]
    fn a_frame_whose_checksum_was_found_right_leaves_as_it_is_and_without_that_word() {
        let (_, frame) = super_segment();
        let hdr = VirtioNetHdr { flags: F_DATA_VALID, ..VirtioNetHdr::default() };
        let mut out = Vec::new();
        let emit = |h: &VirtioNetHdr, f: &[u8]| out.push((*h, f.to_vec()));
        Adapter::default().adapt(&hdr, &[&frame], emit).unwrap();
        assert_eq!(out, [(VirtioNetHdr::default(), frame)]);
    }

    #[test]
    fn a_header_that_lies_about_its_frame_is_a_drop() {
        let (hdr, frame) = super_segment();
        let mut adapter = Adapter::default();
        let mut none = |_: &VirtioNetHdr, _: &[u8]| panic!("nothing comes out");
        let arp = [[0xff; 12].as_slice(), &[8, 6], &[0; 28]].concat();
        assert!(adapter.adapt(&hdr, &[&arp], &mut none).is_err());
        let outside = VirtioNetHdr { gso_type: GSO_NONE, csum_start: 60000, ..hdr };
        let result = adapter.adapt(&outside, &[&frame], &mut none);
        assert_eq!(result, Err(DropReason::MalformedVirtioHeader));
    }
}
