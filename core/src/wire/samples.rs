//! Segments for tests: a few fixed ones and a proptest strategy over all that can be emitted.

use super::emit::{CsumMode, TcpEmit};
use super::packet::{IpAddr16, IpVersion, Seq, TcpFlags, Timestamps};
use super::virtio_net::VirtioNetHdr;
use proptest::prelude::*;

/// MACs 02:…:01 and 02:…:02, IPv4.
pub(crate) const L2_V4: [u8; 14] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00];
/// The same, IPv6.
pub(crate) const L2_V6: [u8; 14] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd];

/// [`TcpEmit`] that owns its parts, and a payload.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) l2: Vec<u8>,
    pub(crate) version: IpVersion,
    pub(crate) addresses: (IpAddr16, IpAddr16),
    pub(crate) tos: u8,
    pub(crate) ttl: u8,
    pub(crate) flow_label: u32,
    pub(crate) ports: (u16, u16),
    pub(crate) seq: Seq,
    pub(crate) ack: Seq,
    pub(crate) flags: TcpFlags,
    pub(crate) window: u16,
    pub(crate) timestamps: Option<Timestamps>,
    pub(crate) sack: Vec<(Seq, Seq)>,
    pub(crate) ip_id: u16,
    pub(crate) payload: Vec<u8>,
}

impl Segment {
    pub(crate) fn emit(&self) -> TcpEmit<'_> {
        TcpEmit {
            l2: &self.l2,
            version: self.version,
            src: self.addresses.0,
            dst: self.addresses.1,
            tos: self.tos,
            ttl: self.ttl,
            flow_label: self.flow_label,
            src_port: self.ports.0,
            dst_port: self.ports.1,
            seq: self.seq,
            ack: self.ack,
            flags: self.flags,
            window: self.window,
            timestamps: self.timestamps,
            sack: &self.sack,
            ip_id: self.ip_id,
        }
    }

    /// The whole frame, checksums complete.
    pub(crate) fn frame(&self) -> Vec<u8> {
        // In two pieces, so that an odd first one is tried too.
        let (a, b) = self.payload.split_at(self.payload.len() / 3);
        self.build(CsumMode::Full(&[a, b]))
    }

    /// The whole frame with a partial checksum, a super-segment if there is more than `mss`.
    pub(crate) fn partial_frame(&self, mss: u16) -> (Vec<u8>, VirtioNetHdr) {
        let frame = self.build(CsumMode::Partial);
        let len = self.payload.len();
        let hdr = self.emit().partial_hdr(frame.len() - len, len, mss);
        (frame, hdr)
    }

    /// The whole frame with these option bytes, a multiple of four, in place of the usual ones.
    pub(crate) fn frame_with_options(&self, options: &[u8]) -> Vec<u8> {
        let bare = Self { timestamps: None, sack: Vec::new(), ..self.clone() }.frame();
        let (l3, l4) = (self.l2.len(), self.l4_at());
        let (headers, payload) = bare.split_at(l4 + 20);
        let mut frame = [headers, options, payload].concat();
        let words = u8::try_from(5 + options.len() / 4).expect("a header's length");
        frame[l4 + 12] = words << 4 | (frame[l4 + 12] & 0x0f);
        let (field, from) = match self.version {
            IpVersion::V4 => (l3 + 2, l3),
            IpVersion::V6 => (l3 + 4, l4),
        };
        let len = u16::try_from(frame.len() - from).expect("a packet's length");
        frame[field..field + 2].copy_from_slice(&len.to_be_bytes());
        self.put_checksums(&mut frame);
        frame
    }

    /// Writes the IPv4 header and TCP checksums into a frame of this segment, the plain way.
    pub(crate) fn put_checksums(&self, frame: &mut [u8]) {
        let (l3, l4) = (self.l2.len(), self.l4_at());
        let len = u32::try_from(frame.len() - l4).expect("a segment's length").to_be_bytes();
        frame[l4 + 16..l4 + 18].fill(0);
        let addresses = match self.version {
            IpVersion::V4 => l3 + 12..l3 + 20,
            IpVersion::V6 => l3 + 8..l3 + 40,
        };
        let check = plain_checksum(&[&frame[addresses], &[0, 6], &len, &frame[l4..]]);
        frame[l4 + 16..l4 + 18].copy_from_slice(&check.to_be_bytes());
        if self.version == IpVersion::V4 {
            frame[l3 + 10..l3 + 12].fill(0);
            let check = plain_checksum(&[&frame[l3..l4]]);
            frame[l3 + 10..l3 + 12].copy_from_slice(&check.to_be_bytes());
        }
    }

    /// Where the TCP header starts.
    pub(crate) fn l4_at(&self) -> usize {
        self.l2.len()
            + match self.version {
                IpVersion::V4 => 20,
                IpVersion::V6 => 40,
            }
    }

    fn build(&self, csum: CsumMode<'_>) -> Vec<u8> {
        let mut buf = [0; TcpEmit::MAX_LEN];
        let len = self.emit().emit(&mut buf, self.payload.len(), csum);
        [&buf[..len], &self.payload].concat()
    }
}

/// A data segment as Linux sends it, 10.0.0.1:1000 to 10.0.0.2:80.
pub(crate) fn v4_segment(payload: &[u8]) -> Segment {
    Segment {
        l2: L2_V4.to_vec(),
        version: IpVersion::V4,
        addresses: (IpAddr16::from_v4([10, 0, 0, 1]), IpAddr16::from_v4([10, 0, 0, 2])),
        tos: 0,
        ttl: 64,
        flow_label: 0,
        ports: (1000, 80),
        seq: Seq(1),
        ack: Seq(1),
        flags: TcpFlags::ACK | TcpFlags::PSH,
        window: 512,
        timestamps: Some(Timestamps { tsval: 10, tsecr: 20 }),
        sack: Vec::new(),
        ip_id: 0xffff,
        payload: payload.to_vec(),
    }
}

/// The same over IPv6, fd00::1 to fd00::2.
pub(crate) fn v6_segment(payload: &[u8]) -> Segment {
    let ip = |last| IpAddr16([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
    Segment {
        l2: L2_V6.to_vec(),
        version: IpVersion::V6,
        addresses: (ip(1), ip(2)),
        flow_label: 0x000a_bcde,
        ..v4_segment(payload)
    }
}

prop_compose! {
    /// Numbers at the edges of 32 bits, or any (P-10).
    pub(crate) fn arb_u32()(pick in 0..8usize, any in any::<u32>()) -> u32 {
        [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0xffff, 0xffff_0000, any][pick]
    }
}

prop_compose! {
    fn arb_block()(start in arb_u32(), end in arb_u32()) -> (Seq, Seq) {
        (Seq(start), Seq(end))
    }
}

prop_compose! {
    fn arb_l2()(
        macs in any::<[u8; 12]>(), tags in 0..3usize, tci in any::<[u8; 4]>(), v4 in any::<bool>(),
    ) -> (Vec<u8>, IpVersion) {
        let tag = |t: &[u8]| [0x81, 0x00, t[0], t[1]];
        let tags: Vec<u8> = tci.chunks(2).take(tags).flat_map(tag).collect();
        let (version, ethertype) =
            if v4 { (IpVersion::V4, [8, 0]) } else { (IpVersion::V6, [0x86, 0xdd]) };
        ([&macs[..], &tags, &ethertype].concat(), version)
    }
}

prop_compose! {
    /// Any segment [`TcpEmit`] can make and that is within COM-05, of up to a few KiB.
    pub(crate) fn arb_segment()(
        (l2, version) in arb_l2(),
        src in any::<[u8; 16]>(), dst in any::<[u8; 16]>(),
        (tos, ttl, flow_label, ip_id) in (any::<u8>(), any::<u8>(), 0..1u32 << 20, any::<u16>()),
        ports in any::<(u16, u16)>(),
        (seq, ack) in (arb_u32(), arb_u32()),
        (flags, window) in (0..0x200u16, any::<u16>()),
        ts in any::<bool>(), tsval in arb_u32(), tsecr in arb_u32(),
        sack in proptest::collection::vec(arb_block(), 0..6),
        payload in proptest::collection::vec(any::<u8>(), 0..3000),
    ) -> Segment {
        let address = |a: [u8; 16]| match version {
            IpVersion::V4 => IpAddr16::from_v4([a[0], a[1], a[2], a[3]]),
            IpVersion::V6 => IpAddr16(a),
        };
        let flags = TcpFlags(flags);
        Segment {
            l2,
            version,
            addresses: (address(src), address(dst)),
            tos, ttl, flow_label, ports,
            seq: Seq(seq),
            ack: Seq(ack),
            flags,
            window,
            timestamps: ts.then_some(Timestamps { tsval, tsecr }),
            // A SYN may not carry SACK blocks.
            sack: if flags.syn() { Vec::new() } else { sack },
            ip_id,
            payload,
        }
    }
}

/// The Internet checksum over pieces (all but the last of even length), the slow and plain way.
pub(crate) fn plain_checksum(pieces: &[&[u8]]) -> u16 {
    let mut sum = 0u64;
    for word in pieces.iter().flat_map(|piece| piece.chunks(2)) {
        sum += u64::from(word[0]) << 8 | word.get(1).map_or(0, |b| u64::from(*b));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded")
}
