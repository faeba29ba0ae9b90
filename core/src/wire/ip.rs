//! IPv4 and IPv6 headers: checked, summarised, and walked as far as the transport header.

use super::checksum::{self, Checksum};
use super::tcp::{self, Tcp};
use super::{array, be16, be32, small};
use crate::drops::DropReason;
use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::ops::Range;

/// IP protocol number of TCP.
pub const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_UDP: u8 = 17;
const PROTOCOL_ESP: u8 = 50;
/// IP protocol number of the authentication header.
pub(super) const PROTOCOL_AH: u8 = 51;
const PROTOCOL_ICMP_V6: u8 = 58;
const V6_HOP_BY_HOP: u8 = 0;
const V6_ROUTING: u8 = 43;
const V6_FRAGMENT: u8 = 44;
const V6_NO_NEXT: u8 = 59;
const V6_DESTINATION: u8 = 60;

/// Bytes of an IPv4 header without options.
pub const V4_HEADER: usize = 20;
/// Bytes of an IPv6 header without extension headers.
pub const V6_HEADER: usize = 40;
/// Bytes of an IPv6 fragment header (RFC 8200 section 4.5).
const V6_FRAGMENT_HEADER: usize = 8;
/// Extension headers we walk before we call a packet opaque (COM-09).
const V6_EXTENSIONS_MAX: usize = 8;
/// Bytes of extension headers we walk before we call a packet opaque (COM-09).
const V6_EXTENSION_BYTES_MAX: usize = 256;

/// The IP protocol family.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum IpVersion {
    /// IPv4 (RFC 791).
    V4,
    /// IPv6 (RFC 8200).
    V6,
}

/// An IPv4 or IPv6 address in 16 bytes; IPv4 is v4-mapped (`::ffff:a.b.c.d`).
#[derive(Clone, Copy, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct IpAddr16(pub [u8; 16]);

impl IpAddr16 {
    /// An IPv4 address, v4-mapped.
    #[inline]
    #[must_use]
    pub const fn from_v4(a: [u8; 4]) -> Self {
        // As a number, because the compiler moves an array that is spelt out byte by byte.
        Self((0xffff << 80 | (u32::from_le_bytes(a) as u128) << 96).to_le_bytes())
    }

    /// The last four bytes: the IPv4 address if this is one.
    #[inline]
    #[must_use]
    pub const fn v4_bytes(self) -> [u8; 4] {
        let [.., a, b, c, d] = self.0;
        [a, b, c, d]
    }

    /// The standard library's form: v4-mapped addresses become IPv4.
    #[must_use]
    pub const fn to_ip(self) -> IpAddr {
        Ipv6Addr::from_octets(self.0).to_canonical()
    }

    /// A group address of either family.
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.to_ip().is_multicast()
    }

    /// IPv4's 255.255.255.255.
    #[must_use]
    pub const fn is_broadcast(self) -> bool {
        matches!(self.to_ip(), IpAddr::V4(Ipv4Addr::BROADCAST))
    }

    /// `0.0.0.0` or `::`.
    #[must_use]
    pub const fn is_unspecified(self) -> bool {
        self.to_ip().is_unspecified()
    }
}

impl From<IpAddr> for IpAddr16 {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(a) => Self::from_v4(a.octets()),
            IpAddr::V6(a) => Self(a.octets()),
        }
    }
}

impl From<Ipv4Addr> for IpAddr16 {
    fn from(ip: Ipv4Addr) -> Self {
        Self::from_v4(ip.octets())
    }
}

impl From<IpAddr16> for IpAddr {
    fn from(ip: IpAddr16) -> Self {
        ip.to_ip()
    }
}

impl fmt::Display for IpAddr16 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_ip().fmt(f)
    }
}

impl fmt::Debug for IpAddr16 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_ip().fmt(f)
    }
}

/// An IP packet inside a frame. Offsets count from the start of the frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ip {
    /// The family of `src` and `dst`.
    pub version: IpVersion,
    /// The source.
    pub src: IpAddr16,
    /// The destination.
    pub dst: IpAddr16,
    /// DSCP and, in the low two bits, ECN (IPv4 TOS, IPv6 traffic class).
    pub tos: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// The number of the protocol above, after any extension headers we walked.
    pub protocol: u8,
    /// IPv6 flow label; 0 in IPv4.
    pub flow_label: u32,
    /// Where the IP header starts.
    pub header_offset: u16,
    /// Where layer 4 starts.
    pub payload_offset: u16,
    /// Where the packet ends by its own length field; the frame may go on with padding (COM-02).
    pub end: u32,
    /// IPv4 options or IPv6 extension headers are there (COM-07, COM-09).
    pub options: bool,
    /// IPv4 DF; always set for IPv6, which routers never fragment.
    pub dont_fragment: bool,
    /// The payload.
    pub l4: L4,
}

/// The payload of an IP packet, as far as we understand it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum L4 {
    /// A whole TCP segment with a sane header.
    Tcp(Tcp),
    /// A fragment of anything: never parsed further (COM-08).
    Fragment,
    /// UDP, unchecked.
    Udp,
    /// ICMP or ICMPv6, unchecked.
    Icmp,
    /// Another protocol.
    Other,
    /// The content is unknown: AH, ESP, an unknown IPv6 next header, an unfinished routing header,
    /// a jumbogram, too many extension headers (COM-09).
    Opaque,
    /// TCP whose header does not fit the packet or is shorter than 20 bytes: the guest would drop
    /// it (COM-03).
    MalformedTcp,
}

/// Reads the IPv4 packet that starts `start` bytes into `frame`.
pub(super) fn parse_v4(frame: &[u8], start: usize) -> Result<Ip, DropReason> {
    let h: &[u8; V4_HEADER] =
        frame.get(start..).and_then(|b| b.first_chunk()).ok_or(DropReason::Truncated)?;
    let header_len = usize::from(h[0] & 0x0f) * 4;
    let total_len = usize::from(be16(h, 2));
    if h[0] >> 4 != 4 || header_len < V4_HEADER || total_len < header_len {
        return Err(DropReason::MalformedHeader);
    }
    let (l4_start, end) = (start + header_len, start + total_len);
    let payload = frame.get(l4_start..end).ok_or(DropReason::Truncated)?;
    let l4 = match h[9] {
        _ if is_fragment(h) => L4::Fragment,
        PROTOCOL_TCP => tcp::parse(payload, l4_start).map_or(L4::MalformedTcp, L4::Tcp),
        PROTOCOL_UDP => L4::Udp,
        PROTOCOL_ICMP => L4::Icmp,
        PROTOCOL_AH | PROTOCOL_ESP => L4::Opaque,
        _ => L4::Other,
    };
    Ok(assemble_v4(h, start..l4_start, end, l4))
}

/// As [`parse_v4`] for TCP in the layout nearly all packets have, and `None` for any other.
#[inline(always)]
pub(super) fn usual_v4(frame: &[u8], start: usize) -> Option<Ip> {
    let (h, segment) = usual_header_v4(frame, start)?;
    let l4_start = start + V4_HEADER;
    let tcp = tcp::parse_usual(segment, l4_start)?;
    Some(assemble_v4(h, start..l4_start, l4_start + segment.len(), L4::Tcp(tcp)))
}

/// The header of an IPv4 packet that has no options and is no fragment, and the TCP segment that it
/// carries. `None` for any other packet.
#[inline(always)]
pub(super) fn usual_header_v4(frame: &[u8], start: usize) -> Option<(&[u8; V4_HEADER], &[u8])> {
    let h: &[u8; V4_HEADER] = frame.get(start..)?.first_chunk()?;
    if h[0] != 0x45 || is_fragment(h) || h[9] != PROTOCOL_TCP {
        return None;
    }
    let segment = frame.get(start + V4_HEADER..start + usize::from(be16(h, 2)))?;
    Some((h, segment))
}

/// The addresses and the segment that [`usual_v4`] reads, whatever the TCP options are.
#[inline(always)]
pub(super) fn glance_v4(frame: &[u8], start: usize) -> Option<(IpAddr16, IpAddr16, &[u8])> {
    let (h, segment) = usual_header_v4(frame, start)?;
    Some((IpAddr16::from_v4(array(&h[12..16])), IpAddr16::from_v4(array(&h[16..20])), segment))
}

/// More fragments follow, or this is not the first.
#[inline(always)]
fn is_fragment(h: &[u8; V4_HEADER]) -> bool {
    be16(h, 6) & 0x3fff != 0
}

/// Of a fragment of a TCP segment, the segment's bytes before it, and where its own bytes start in
/// the frame. `None`: it is of something else, or of a segment behind more extension headers.
pub(super) fn tcp_fragment(frame: &[u8], ip: &Ip) -> Option<(usize, usize)> {
    let start = usize::from(ip.payload_offset);
    let (protocol, before, start) = match ip.version {
        IpVersion::V4 => {
            let word = be16(frame.get(usize::from(ip.header_offset)..start)?, 6);
            (ip.protocol, usize::from(word & 0x1fff) * 8, start)
        }
        IpVersion::V6 => {
            let h: &[u8; V6_FRAGMENT_HEADER] = frame.get(start..)?.first_chunk()?;
            (h[0], usize::from(be16(h, 2) & !7), start + V6_FRAGMENT_HEADER)
        }
    };
    (ip.l4 == L4::Fragment && protocol == PROTOCOL_TCP).then_some((before, start))
}

#[inline(always)]
fn assemble_v4(h: &[u8; V4_HEADER], header: Range<usize>, end: usize, l4: L4) -> Ip {
    Ip {
        version: IpVersion::V4,
        src: IpAddr16::from_v4(array(&h[12..16])),
        dst: IpAddr16::from_v4(array(&h[16..20])),
        tos: h[1],
        ttl: h[8],
        protocol: h[9],
        flow_label: 0,
        header_offset: small(header.start),
        payload_offset: small(header.end),
        end: offset(end),
        options: header.len() > V4_HEADER,
        dont_fragment: h[6] & 0x40 != 0,
        l4,
    }
}

/// Reads the IPv6 packet that starts `start` bytes into `frame`.
pub(super) fn parse_v6(frame: &[u8], start: usize) -> Result<Ip, DropReason> {
    let h: &[u8; V6_HEADER] =
        frame.get(start..).and_then(|b| b.first_chunk()).ok_or(DropReason::Truncated)?;
    if h[0] >> 4 != 6 {
        return Err(DropReason::MalformedHeader);
    }
    let end = start + V6_HEADER + usize::from(be16(h, 4));
    let payload = frame.get(start + V6_HEADER..end).ok_or(DropReason::Truncated)?;
    let chain = if payload.is_empty() && h[6] != V6_NO_NEXT {
        // A jumbogram (RFC 2675), or a packet cut down to its header; nothing to read either way.
        Chain { protocol: h[6], len: 0, stop: Some(L4::Opaque) }
    } else {
        walk_extensions(h[6], payload)?
    };
    let l4_start = start + V6_HEADER + chain.len;
    let l4 = match chain.protocol {
        _ if let Some(stop) = chain.stop => stop,
        _ if mapped_v4(h) => L4::Opaque,
        PROTOCOL_TCP => {
            tcp::parse(&payload[chain.len..], l4_start).map_or(L4::MalformedTcp, L4::Tcp)
        }
        PROTOCOL_UDP => L4::Udp,
        PROTOCOL_ICMP_V6 => L4::Icmp,
        V6_NO_NEXT => L4::Other,
        _ => L4::Opaque,
    };
    let mut ip = assemble_v6(h, start..l4_start, end, l4);
    ip.protocol = chain.protocol;
    ip.options |= chain.stop.is_some();
    Ok(ip)
}

/// As [`parse_v6`] for TCP in the layout nearly all packets have, and `None` for any other.
#[inline(always)]
pub(super) fn usual_v6(frame: &[u8], start: usize) -> Option<Ip> {
    let (h, segment) = usual_header_v6(frame, start)?;
    let l4_start = start + V6_HEADER;
    let tcp = tcp::parse_usual(segment, l4_start)?;
    Some(assemble_v6(h, start..l4_start, l4_start + segment.len(), L4::Tcp(tcp)))
}

/// The header of an IPv6 packet without extension headers, and the TCP segment that it carries.
/// `None` for any other packet.
#[inline(always)]
pub(super) fn usual_header_v6(frame: &[u8], start: usize) -> Option<(&[u8; V6_HEADER], &[u8])> {
    let h: &[u8; V6_HEADER] = frame.get(start..)?.first_chunk()?;
    if h[0] >> 4 != 6 || h[6] != PROTOCOL_TCP || mapped_v4(h) {
        return None;
    }
    let l4_start = start + V6_HEADER;
    let segment = frame.get(l4_start..l4_start + usize::from(be16(h, 4)))?;
    Some((h, segment))
}

/// The addresses and the segment that [`usual_v6`] reads, whatever the TCP options are.
#[inline(always)]
pub(super) fn glance_v6(frame: &[u8], start: usize) -> Option<(IpAddr16, IpAddr16, &[u8])> {
    let (h, segment) = usual_header_v6(frame, start)?;
    Some((IpAddr16(array(&h[8..24])), IpAddr16(array(&h[24..40])), segment))
}

/// An address is v4-mapped, which never belongs on a wire (RFC 4942 section 2.2) and would look
/// like the IPv4 address in an [`IpAddr16`].
#[inline(always)]
fn mapped_v4(h: &[u8; V6_HEADER]) -> bool {
    const PREFIX: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    h[8..20] == PREFIX || h[24..36] == PREFIX
}

#[inline(always)]
fn assemble_v6(h: &[u8; V6_HEADER], header: Range<usize>, end: usize, l4: L4) -> Ip {
    let word = be32(h, 0);
    Ip {
        version: IpVersion::V6,
        src: IpAddr16(array(&h[8..24])),
        dst: IpAddr16(array(&h[24..40])),
        tos: (word >> 20 & 0xff) as u8,
        ttl: h[7],
        protocol: h[6],
        flow_label: word & 0x000f_ffff,
        header_offset: small(header.start),
        payload_offset: small(header.end),
        end: offset(end),
        options: header.len() > V6_HEADER,
        dont_fragment: true,
        l4,
    }
}

/// Where a walk over IPv6 extension headers ended.
struct Chain {
    /// The next-header number there.
    protocol: u8,
    /// Bytes walked.
    len: usize,
    /// Why layer 4 may not be read, if so.
    stop: Option<L4>,
}

/// Walks hop-by-hop, routing and destination options (RFC 8200 section 4; COM-09).
#[inline]
fn walk_extensions(first: u8, payload: &[u8]) -> Result<Chain, DropReason> {
    let mut chain = Chain { protocol: first, len: 0, stop: None };
    for n in 0.. {
        let stop = match chain.protocol {
            V6_FRAGMENT => Some(L4::Fragment),
            // Hop-by-hop options may only come first.
            V6_HOP_BY_HOP if n > 0 => Some(L4::Opaque),
            V6_HOP_BY_HOP | V6_ROUTING | V6_DESTINATION if n == V6_EXTENSIONS_MAX => {
                Some(L4::Opaque)
            }
            V6_HOP_BY_HOP | V6_ROUTING | V6_DESTINATION => None,
            _ => return Ok(chain),
        };
        let Some(&[next, len8, _, segments_left]) = payload[chain.len..].first_chunk() else {
            return Err(DropReason::MalformedHeader);
        };
        // With segments left the destination is not the one the TCP checksum covers.
        let unfinished = chain.protocol == V6_ROUTING && segments_left != 0;
        let len = chain.len + 8 * (usize::from(len8) + 1);
        chain.stop = stop.or((unfinished || len > V6_EXTENSION_BYTES_MAX).then_some(L4::Opaque));
        if chain.stop.is_some() {
            return Ok(chain);
        }
        if len > payload.len() {
            return Err(DropReason::MalformedHeader);
        }
        (chain.protocol, chain.len) = (next, len);
    }
    Ok(chain)
}

/// An offset that is the sum of a few 16-bit lengths, as a `u32`.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the sum of a few 16-bit lengths")]
pub(super) fn offset(value: usize) -> u32 {
    debug_assert!(value <= 0x000f_ffff);
    value as u32
}

/// The sum of the pseudo-header for `len` bytes of TCP between these addresses.
#[inline]
#[must_use]
pub fn tcp_pseudo_header(version: IpVersion, src: IpAddr16, dst: IpAddr16, len: u32) -> u64 {
    match version {
        IpVersion::V4 => {
            checksum::pseudo_header_v4(src.v4_bytes(), dst.v4_bytes(), PROTOCOL_TCP, len)
        }
        IpVersion::V6 => checksum::pseudo_header_v6(src.0, dst.0, PROTOCOL_TCP, len),
    }
}

/// The IPv4 header checksum is right. True for IPv6, which has none.
#[inline(always)]
#[must_use]
pub fn ipv4_header_ok(frame: &[u8], ip: &Ip) -> bool {
    let header = usize::from(ip.header_offset)..usize::from(ip.payload_offset);
    ip.version == IpVersion::V6
        || frame.get(header).is_some_and(|h| match h.as_array::<V4_HEADER>() {
            Some(fixed) => is_intact(fixed), // nearly always: so many bytes, known to the compiler
            None => is_intact(h),
        })
}

/// The words of an IPv4 header add up to all ones, which looks the same in either byte order.
#[inline(always)]
pub(super) fn is_intact(header: &[u8]) -> bool {
    let words = header.as_chunks().0.iter().map(|&word| u64::from(u32::from_ne_bytes(word)));
    checksum::fold(words.sum()) == 0xffff
}

/// The TCP checksum, pseudo-header included, is right (COM-13).
#[must_use]
pub fn tcp_checksum_ok(frame: &[u8], ip: &Ip, _tcp: &Tcp) -> bool {
    let start = u32::from(ip.payload_offset);
    let pseudo = tcp_pseudo_header(ip.version, ip.src, ip.dst, ip.end.saturating_sub(start));
    frame.get(start as usize..ip.end as usize).is_some_and(|segment| {
        let mut sum = Checksum::new(pseudo);
        sum.add_bytes(segment);
        sum.finish() == 0
    })
}
