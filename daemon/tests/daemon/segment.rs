//! Frames by hand: IPv4 and TCP as the standards have them, none of it from the code under test.

use nightporter_core::wire::virtio_net::{F_NEEDS_CSUM, GSO_TCPV4, VirtioNetHdr};

pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const PSH: u8 = 8;
pub(crate) const ACK: u8 = 16;

/// One end: MAC, address, port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End(pub(crate) u8, pub(crate) u16);

impl End {
    pub(crate) fn mac(self) -> [u8; 6] {
        [2, 0, 0, 0, 0, self.0]
    }

    pub(crate) fn ip(self) -> [u8; 4] {
        [10, 0, 0, self.0]
    }
}

/// A segment without a frame around it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Segment<'a> {
    pub(crate) flags: u8,
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) window: u16,
    pub(crate) options: &'a [u8],
    pub(crate) payload: &'a [u8],
}

impl Segment<'_> {
    /// The frame from one end to another, with all checksums.
    pub(crate) fn frame(&self, from: End, to: End) -> Vec<u8> {
        assert_eq!(self.options.len() % 4, 0);
        let header_len = u8::try_from(20 + self.options.len()).unwrap();
        let mut tcp = [from.1.to_be_bytes(), to.1.to_be_bytes()].concat();
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        tcp.extend([(header_len / 4) << 4, self.flags]);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0; 4]);
        tcp.extend(self.options);
        tcp.extend(self.payload);
        let check = !sum(&[&pseudo(from, to, tcp.len()), &tcp]);
        tcp[16..18].copy_from_slice(&check.to_be_bytes());

        let len = u16::try_from(20 + tcp.len()).unwrap();
        let mut ip = vec![0x45, 0];
        ip.extend(len.to_be_bytes());
        ip.extend([0, 1, 0x40, 0, 64, 6, 0, 0]);
        ip.extend(from.ip());
        ip.extend(to.ip());
        let check = !sum(&[&ip]);
        ip[10..12].copy_from_slice(&check.to_be_bytes());
        [&to.mac()[..], &from.mac(), &[8, 0], &ip, &tcp].concat()
    }

    /// The frame as a guest with checksum and segmentation offload hands it over.
    pub(crate) fn super_frame(&self, from: End, to: End, mss: u16) -> (VirtioNetHdr, Vec<u8>) {
        let mut frame = self.frame(from, to);
        let partial = sum(&[&pseudo(from, to, frame.len() - 34)]);
        frame[34 + 16..34 + 18].copy_from_slice(&partial.to_be_bytes());
        let hdr_len = u16::try_from(frame.len() - self.payload.len()).unwrap();
        let hdr = VirtioNetHdr {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            hdr_len,
            gso_size: mss,
            csum_start: 34,
            csum_offset: 16,
        };
        (hdr, frame)
    }
}

fn pseudo(from: End, to: End, len: usize) -> Vec<u8> {
    let mut bytes = [from.ip(), to.ip()].concat();
    bytes.extend([0, 6]);
    bytes.extend(u16::try_from(len).unwrap().to_be_bytes());
    bytes
}

/// The Internet checksum's sum (RFC 1071) of pieces of even length but for the last.
fn sum(pieces: &[&[u8]]) -> u16 {
    let bytes = pieces.concat();
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |b| u32::from(*b));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap()
}

/// A received segment; its checksums have been verified.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Seen {
    pub(crate) flags: u8,
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) window: u16,
    pub(crate) payload: Vec<u8>,
}

/// Reads an IPv4 TCP frame.
pub(crate) fn parse(frame: &[u8]) -> Seen {
    assert_eq!((&frame[12..14], frame[14], frame[23]), (&[8, 0][..], 0x45, 6), "{frame:x?}");
    let end = 14 + usize::from(u16::from_be_bytes([frame[16], frame[17]]));
    let tcp = &frame[34..end];
    assert_eq!(sum(&[&frame[14..34]]), 0xffff, "the IP checksum is right");
    let mut pseudo = frame[26..34].to_vec();
    pseudo.extend([0, 6]);
    pseudo.extend(u16::try_from(tcp.len()).unwrap().to_be_bytes());
    assert_eq!(sum(&[&pseudo, tcp]), 0xffff, "the TCP checksum is right");
    let word = |at: usize| u32::from_be_bytes(tcp[at..at + 4].try_into().unwrap());
    Seen {
        flags: tcp[13],
        seq: word(4),
        ack: word(8),
        window: u16::from_be_bytes([tcp[14], tcp[15]]),
        payload: tcp[usize::from(tcp[12] >> 4) * 4..].to_vec(),
    }
}
