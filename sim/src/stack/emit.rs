//! Frames made from nothing.

use etherparse::checksum::Sum16BitWords;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::address::{Address, Key};
use nightporter_check::frame::Frame;
use nightporter_check::stream::Stream;
use nightporter_check::wire::{
    ETHERTYPE_IPV4, ETHERTYPE_IPV6, F_NEEDS_CSUM, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6,
    IpAddr16, IpVersion, PROTOCOL_TCP, TcpFlags, pseudo_header, unfinished, written,
};

/// Bytes of headers without options.
pub(super) const ETHERNET: usize = 14;
const TCP: usize = 20;
/// Where the checksum is in a TCP header.
pub(super) const TCP_CHECKSUM_AT: usize = 16;
/// ECN-capable transport, ECT(0).
const ECT: u8 = 2;
const TTL: u8 = 64;
/// Next header: destination options (RFC 8200 section 4.6); one that is padding, before TCP.
const DESTINATION_OPTIONS: u8 = 60;
const EXTENSION: [u8; 8] = [PROTOCOL_TCP, 0, 1, 4, 0, 0, 0, 0];
/// Options of IPv4: padding (RFC 791 section 3.1).
const V4_OPTIONS: [u8; 4] = [1, 1, 1, 0];

/// From where to where a connection's segments go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    l2: [u8; ETHERNET],
    version: IpVersion,
    src: IpAddr16,
    dst: IpAddr16,
    src_port: u16,
    dst_port: u16,
    /// With a destination options header, or options of IPv4.
    pub(super) extension: bool,
    pub(super) look: Look,
}

/// The fields of a connection's IP headers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) ttl: u8,
    /// Six bits.
    pub(super) dscp: u8,
    /// Flow label, of IPv6.
    pub(super) label: u32,
}

impl Default for Look {
    fn default() -> Self {
        Self { ttl: TTL, dscp: 0, label: 0 }
    }
}

impl Route {
    pub(super) fn new(own: &Address, key: &Key, peer_mac: [u8; 6]) -> Self {
        let dst = IpAddr16(key.peer);
        let v6 = dst.to_ip().is_ipv6();
        let (version, ethertype) =
            if v6 { (IpVersion::V6, ETHERTYPE_IPV6) } else { (IpVersion::V4, ETHERTYPE_IPV4) };
        let mut l2 = [0; ETHERNET];
        l2[..6].copy_from_slice(&peer_mac);
        l2[6..12].copy_from_slice(&own.mac);
        l2[12..].copy_from_slice(&ethertype.to_be_bytes());
        let src = own.ip(v6);
        Self {
            l2,
            version,
            src,
            dst,
            src_port: key.own_port,
            dst_port: key.peer_port,
            extension: false,
            look: Look::default(),
        }
    }

    /// The peer's MAC.
    pub(super) fn peer_mac(&self) -> [u8; 6] {
        [0, 1, 2, 3, 4, 5].map(|n| self.l2[n])
    }

    pub(super) const fn is_v6(&self) -> bool {
        matches!(self.version, IpVersion::V6)
    }

    /// Bytes of its IPv6 extension headers, or IPv4 options.
    pub(super) const fn extension_len(&self) -> i64 {
        match self.version {
            _ if !self.extension => 0,
            IpVersion::V4 => 4,
            IpVersion::V6 => 8,
        }
    }

    /// Bytes of IP and TCP headers without options.
    pub(super) const fn headers(&self) -> i64 {
        match self.version {
            IpVersion::V4 => 40 + self.extension_len(),
            IpVersion::V6 => 60 + self.extension_len(),
        }
    }

    const fn ip_len(&self) -> usize {
        match self.version {
            IpVersion::V4 if self.extension => 20 + V4_OPTIONS.len(),
            IpVersion::V4 => 20,
            IpVersion::V6 if self.extension => 40 + EXTENSION.len(),
            IpVersion::V6 => 40,
        }
    }
}

/// A segment to be made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Segment<'a> {
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) flags: TcpFlags,
    pub(super) window: u16,
    /// Urgent pointer.
    pub(super) urgent: u16,
    /// A multiple of four bytes, at most 40.
    pub(super) options: &'a [u8],
    /// Routers may mark it instead of dropping it.
    pub(super) ect: bool,
    /// Its bytes: of which stream, from which offset on, how many.
    pub(super) payload: Option<(Stream, u64, usize)>,
    /// The driver finishes checksums and cuts payload into pieces of so many bytes.
    pub(super) offload: Option<u16>,
    /// IPv4 identification.
    pub(super) id: u16,
}

impl Segment<'_> {
    /// The frame.
    pub(super) fn frame(&self, route: &Route) -> Frame {
        let payload_len = self.payload.map_or(0, |(_, _, len)| len);
        let tcp_len = TCP + self.options.len() + payload_len;
        let ip_at = ETHERNET;
        let tcp_at = ip_at + route.ip_len();
        let payload_at = tcp_at + TCP + self.options.len();
        let mut bytes = vec![0; payload_at + payload_len];
        bytes[..ETHERNET].copy_from_slice(&route.l2);
        self.put_ip(route, &mut bytes[ip_at..tcp_at], tcp_len);
        self.put_tcp(route, &mut bytes[tcp_at..payload_at]);
        if let Some((stream, at, _)) = self.payload {
            stream.fill(at, &mut bytes[payload_at..]);
        }
        let len = u32::try_from(tcp_len).expect("at most 64 KiB");
        let pseudo = pseudo_header(route.version, route.src, route.dst, PROTOCOL_TCP, len);
        let check = if self.offload.is_some() {
            unfinished(&pseudo)
        } else {
            written(&pseudo.add_slice(&bytes[tcp_at..]))
        };
        bytes[tcp_at + TCP_CHECKSUM_AT..][..2].copy_from_slice(&check);
        let hdr = self.offload.map_or_else(VirtioNetHdr::default, |mss| {
            self.hdr(route, mss, tcp_at, payload_at, payload_len)
        });
        Frame { hdr, bytes }
    }

    fn hdr(&self, route: &Route, mss: u16, tcp_at: usize, at: usize, len: usize) -> VirtioNetHdr {
        let small = |n: usize| u16::try_from(n).expect("a header");
        let cut = len > usize::from(mss);
        let family = if route.version == IpVersion::V4 { GSO_TCPV4 } else { GSO_TCPV6 };
        let ecn = if self.flags.cwr() { GSO_ECN } else { 0 };
        VirtioNetHdr {
            flags: F_NEEDS_CSUM,
            gso_type: if cut { family | ecn } else { GSO_NONE },
            hdr_len: if cut { small(at) } else { 0 },
            gso_size: if cut { mss } else { 0 },
            csum_start: small(tcp_at),
            csum_offset: small(TCP_CHECKSUM_AT),
        }
    }

    fn put_tcp(&self, route: &Route, h: &mut [u8]) {
        let words = u16::try_from(h.len() / 4).expect("at most 15");
        h[0..2].copy_from_slice(&route.src_port.to_be_bytes());
        h[2..4].copy_from_slice(&route.dst_port.to_be_bytes());
        h[4..8].copy_from_slice(&self.seq.to_be_bytes());
        h[8..12].copy_from_slice(&self.ack.to_be_bytes());
        h[12..14].copy_from_slice(&(words << 12 | self.flags.0).to_be_bytes());
        h[14..16].copy_from_slice(&self.window.to_be_bytes());
        h[18..20].copy_from_slice(&self.urgent.to_be_bytes());
        h[TCP..].copy_from_slice(self.options);
    }

    fn put_ip(&self, route: &Route, h: &mut [u8], tcp_len: usize) {
        let Look { ttl, dscp, label } = route.look;
        let tos = dscp << 2 | if self.ect { ECT } else { 0 };
        match route.version {
            IpVersion::V4 => {
                let len = u16::try_from(h.len() + tcp_len).expect("at most 64 KiB");
                h[..2].copy_from_slice(&[if route.extension { 0x46 } else { 0x45 }, tos]);
                h[2..4].copy_from_slice(&len.to_be_bytes());
                h[4..6].copy_from_slice(&self.id.to_be_bytes());
                h[6..10].copy_from_slice(&[0x40, 0, ttl, PROTOCOL_TCP]); // DF
                h[12..16].copy_from_slice(&route.src.v4_bytes());
                h[16..20].copy_from_slice(&route.dst.v4_bytes());
                if route.extension {
                    h[20..].copy_from_slice(&V4_OPTIONS);
                }
                let check = written(&Sum16BitWords::new().add_slice(h));
                h[10..12].copy_from_slice(&check);
            }
            IpVersion::V6 => {
                let len = u16::try_from(h.len() - 40 + tcp_len).expect("at most 64 KiB");
                let word = 6 << 28 | u32::from(tos) << 20 | label;
                h[..4].copy_from_slice(&word.to_be_bytes());
                h[4..6].copy_from_slice(&len.to_be_bytes());
                h[6..8].copy_from_slice(&[PROTOCOL_TCP, ttl]);
                h[8..24].copy_from_slice(&route.src.0);
                h[24..40].copy_from_slice(&route.dst.0);
                if route.extension {
                    h[6] = DESTINATION_OPTIONS;
                    h[40..].copy_from_slice(&EXTENSION);
                }
            }
        }
    }
}

/// The options of a segment, padded as they are added.
#[derive(Clone, Debug, Default)]
pub(super) struct Options(Vec<u8>);

impl Options {
    /// Most bytes of all options.
    const MAX: usize = 40;

    pub(super) fn mss(&mut self, mss: u16) {
        let [hi, lo] = mss.to_be_bytes();
        self.0.extend([2, 4, hi, lo]);
    }

    pub(super) fn window_scale(&mut self, shift: u8) {
        self.0.extend([1, 3, 3, shift]);
    }

    pub(super) fn sack_permitted(&mut self) {
        self.0.extend([1, 1, 4, 2]);
    }

    pub(super) fn timestamps(&mut self, tsval: u32, tsecr: u32) {
        self.0.extend([1, 1, 8, 10]);
        self.0.extend(tsval.to_be_bytes());
        self.0.extend(tsecr.to_be_bytes());
    }

    pub(super) fn sack(&mut self, blocks: impl ExactSizeIterator<Item = (u32, u32)>) {
        if blocks.len() == 0 {
            return;
        }
        self.0.extend([1, 1, 5, u8::try_from(2 + 8 * blocks.len()).expect("at most four")]);
        for (from, to) in blocks {
            self.0.extend(from.to_be_bytes());
            self.0.extend(to.to_be_bytes());
        }
    }

    /// Bytes as they are, as far as there is room.
    pub(super) fn raw(&mut self, bytes: &[u8]) {
        if bytes.len() <= Self::MAX - self.0.len() {
            self.0.extend(bytes);
        }
    }

    /// How many blocks [`Self::sack`] has room for.
    pub(super) fn sack_room(&self) -> usize {
        (Self::MAX - self.0.len() - 4) / 8
    }

    /// All of them, padded to whole words.
    pub(super) fn bytes(&mut self) -> &[u8] {
        while !self.0.len().is_multiple_of(4) {
            self.0.push(0);
        }
        &self.0
    }
}
