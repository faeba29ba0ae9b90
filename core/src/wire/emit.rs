//! Builds the headers of a TCP segment from nothing.

use super::checksum::{Checksum, fold};
use super::ip::{IpAddr16, IpVersion, PROTOCOL_TCP, V4_HEADER, V6_HEADER, tcp_pseudo_header};
use super::seq::Seq;
use super::small;
use super::tcp;
use super::tcp::{
    CHECKSUM_AT, FLAGS_AT, HEADER, KIND_NOP, KIND_SACK, NOP_NOP_TIMESTAMPS, TcpFlags, Timestamps,
};
use super::virtio_net::{F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, VirtioNetHdr};

/// Bytes of an Ethernet header without tags, as nearly every segment has.
const ETHERNET: usize = 14;
/// Bytes of the timestamps option and the two NOPs before it.
const TIMESTAMPS_LEN: usize = 12;

/// Room for the longest headers: two tags (22), IPv6 (40), TCP with options (60), rounded up.
pub const HEADER_MAX: usize = 128;

/// The IPv4 DF flag, in the word it shares with the fragment offset.
const V4_DONT_FRAGMENT: u16 = 0x4000;

/// A TCP segment to be made: everything but its payload.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TcpEmit<'a> {
    /// The whole layer-2 header: MACs, at most two VLAN tags, EtherType of `version`.
    pub l2: &'a [u8],
    /// The family of `src` and `dst`.
    pub version: IpVersion,
    /// The source.
    pub src: IpAddr16,
    /// The destination.
    pub dst: IpAddr16,
    /// DSCP and ECN (IPv4 TOS, IPv6 traffic class).
    pub tos: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// IPv6 flow label, 20 bits; not used by IPv4.
    pub flow_label: u32,
    /// The sender's port.
    pub src_port: u16,
    /// The receiver's port.
    pub dst_port: u16,
    /// Sequence number of the first payload byte.
    pub seq: Seq,
    /// Acknowledgement number.
    pub ack: Seq,
    /// Flags.
    pub flags: TcpFlags,
    /// Window in wire units.
    pub window: u16,
    /// Timestamps option, or none.
    pub timestamps: Option<Timestamps>,
    /// SACK blocks; those that do not fit (after 3 with timestamps, 4 without) are left out.
    pub sack: &'a [(Seq, Seq)],
    /// IPv4 identification; not used by IPv6. DF is always set, so any will do (RFC 6864).
    pub ip_id: u16,
}

/// The content of the TCP checksum field.
#[derive(Clone, Copy, Debug)]
pub enum CsumMode<'a> {
    /// The checksum over header and these payload pieces, which are all of the payload.
    Full(&'a [&'a [u8]]),
    /// The pseudo-header's sum, for the receiver to finish ([`TcpEmit::partial_hdr`]).
    Partial,
}

impl TcpEmit<'_> {
    /// Size of the buffer to emit into.
    pub const MAX_LEN: usize = HEADER_MAX;

    /// Writes the headers of a segment with `payload_len` bytes of payload to the start of `buf`
    /// and returns their length.
    ///
    /// # Panics
    /// If `l2` is longer than 22 bytes, or header and payload exceed what an IP header can say.
    #[inline(always)]
    pub fn emit(
        &self,
        buf: &mut [u8; HEADER_MAX],
        payload_len: usize,
        csum: CsumMode<'_>,
    ) -> usize {
        match (self.version, self.l2.as_array::<ETHERNET>(), self.sack) {
            // Nearly every segment. Where everything is, is then known to the compiler.
            (IpVersion::V4, Some(l2), []) => {
                let usual = TcpEmit { version: IpVersion::V4, l2, sack: &[], ..*self };
                usual.put(buf, payload_len, csum)
            }
            _ => (*self).put_any(buf, payload_len, csum),
        }
    }

    /// By value, because the parts of the usual segment would otherwise have to be in memory as
    /// well.
    #[inline(never)]
    fn put_any(self, buf: &mut [u8; HEADER_MAX], payload_len: usize, csum: CsumMode<'_>) -> usize {
        self.put(buf, payload_len, csum)
    }

    #[inline(always)]
    fn put(&self, buf: &mut [u8; HEADER_MAX], payload_len: usize, csum: CsumMode<'_>) -> usize {
        let (l2, rest) = buf.split_at_mut(self.l2.len());
        match (self.l2.as_array::<ETHERNET>(), l2.as_mut_array::<ETHERNET>()) {
            (Some(from), Some(to)) => *to = *from, // two moves instead of a call
            _ => l2.copy_from_slice(self.l2),
        }
        // One check for everything below: the longest IP header and the longest TCP header.
        let Some(rest) = rest.first_chunk_mut::<{ V6_HEADER + tcp::HEADER_MAX }>() else {
            panic!("a layer-2 header of {} bytes", self.l2.len());
        };
        let (ip, tcp) = rest.split_at_mut(self.ip_len());
        let Some(tcp) = tcp.first_chunk_mut() else { unreachable!("the IP header is shorter") };
        let tcp_len = HEADER + if self.timestamps.is_some() { TIMESTAMPS_LEN } else { 0 };
        let tcp_len = tcp_len + self.sack_len(tcp_len);
        let Ok(segment_len) = u16::try_from(tcp_len + payload_len) else {
            panic!("a TCP segment of {tcp_len} + {payload_len} bytes");
        };
        match self.version {
            IpVersion::V4 => self.put_v4(&mut ip[..V4_HEADER], segment_len),
            IpVersion::V6 => self.put_v6(&mut ip[..V6_HEADER], segment_len),
        }
        let pseudo = tcp_pseudo_header(self.version, self.src, self.dst, segment_len.into());
        let header = self.put_tcp(tcp, tcp_len);
        let field = match csum {
            CsumMode::Partial => fold(pseudo),
            CsumMode::Full(pieces) => {
                debug_assert_eq!(payload_len, pieces.iter().map(|p| p.len()).sum::<usize>());
                let mut sum = Checksum::new(pseudo + header);
                for piece in pieces {
                    sum.add_bytes(piece);
                }
                sum.finish()
            }
        };
        tcp[CHECKSUM_AT..][..2].copy_from_slice(&field.to_be_bytes());
        self.l2.len() + self.ip_len() + tcp_len
    }

    /// The virtio-net header for a segment that [`Self::emit`] wrote with [`CsumMode::Partial`]:
    /// `header_len` is its result. More payload than `mss` bytes makes it a super-segment.
    #[must_use]
    pub fn partial_hdr(&self, header_len: usize, payload_len: usize, mss: u16) -> VirtioNetHdr {
        let mut hdr = VirtioNetHdr {
            flags: F_NEEDS_CSUM,
            csum_start: small(self.l2.len() + self.ip_len()),
            csum_offset: small(CHECKSUM_AT),
            ..VirtioNetHdr::default()
        };
        if payload_len > usize::from(mss) {
            hdr.gso_type = gso_type(self.version, self.flags);
            hdr.gso_size = mss;
            hdr.hdr_len = small(header_len);
        }
        hdr
    }

    #[inline(always)]
    const fn ip_len(&self) -> usize {
        match self.version {
            IpVersion::V4 => V4_HEADER,
            IpVersion::V6 => V6_HEADER,
        }
    }

    /// Bytes of the SACK option behind a header of `header_len`, a multiple of four.
    #[inline(always)]
    fn sack_len(&self, header_len: usize) -> usize {
        let fit = (tcp::HEADER_MAX - header_len - 4) / 8;
        match self.sack.len().min(fit) {
            0 => 0,
            blocks => 4 + 8 * blocks,
        }
    }

    /// Writes the TCP header with a zero checksum; returns its sum.
    ///
    /// The words are added up as they are made, which is cheaper than reading them again.
    #[inline(always)]
    fn put_tcp(&self, h: &mut [u8; tcp::HEADER_MAX], header_len: usize) -> u64 {
        let mut sum = 0;
        let mut put = |at: usize, word: u32| {
            h[at..at + 4].copy_from_slice(&word.to_be_bytes());
            sum += u64::from(word);
        };
        // The length in words is in the top four bits, so bytes / 4 << 12.
        let flags = small(header_len) << 10 | (self.flags & TcpFlags::ALL).0;
        put(0, u32::from(self.src_port) << 16 | u32::from(self.dst_port));
        put(4, self.seq.0);
        put(8, self.ack.0);
        put(FLAGS_AT, u32::from(flags) << 16 | u32::from(self.window));
        put(CHECKSUM_AT, 0);
        let mut at = HEADER;
        if let Some(ts) = self.timestamps {
            put(HEADER, u32::from_be_bytes(NOP_NOP_TIMESTAMPS));
            put(HEADER + 4, ts.tsval);
            put(HEADER + 8, ts.tsecr);
            at += TIMESTAMPS_LEN;
        }
        if at < header_len {
            #[expect(clippy::cast_possible_truncation, reason = "at most four blocks")]
            let len = (header_len - at - 2) as u8;
            put(at, u32::from_be_bytes([KIND_NOP, KIND_NOP, KIND_SACK, len]));
            for (at, (start, end)) in (at + 4..header_len).step_by(8).zip(self.sack) {
                put(at, start.0);
                put(at + 4, end.0);
            }
        }
        sum
    }

    #[inline(always)]
    fn put_v4(&self, ip: &mut [u8], segment_len: u16) {
        let Some(total_len) = segment_len.checked_add(small(V4_HEADER)) else {
            panic!("an IPv4 packet with a segment of {segment_len} bytes");
        };
        let version_tos = u16::from_be_bytes([0x45, self.tos]);
        let ttl_protocol = u16::from_be_bytes([self.ttl, PROTOCOL_TCP]);
        let (src, dst) = (self.src.v4_bytes(), self.dst.v4_bytes());
        let sum = [version_tos, total_len, self.ip_id, V4_DONT_FRAGMENT, ttl_protocol];
        let sum = sum.iter().map(|&word| u64::from(word)).sum::<u64>()
            + u64::from(u32::from_be_bytes(src))
            + u64::from(u32::from_be_bytes(dst));
        ip[0..2].copy_from_slice(&version_tos.to_be_bytes());
        ip[2..4].copy_from_slice(&total_len.to_be_bytes());
        ip[4..6].copy_from_slice(&self.ip_id.to_be_bytes());
        ip[6..8].copy_from_slice(&V4_DONT_FRAGMENT.to_be_bytes());
        ip[8..10].copy_from_slice(&ttl_protocol.to_be_bytes());
        ip[10..12].copy_from_slice(&(!fold(sum)).to_be_bytes());
        ip[12..16].copy_from_slice(&src);
        ip[16..20].copy_from_slice(&dst);
    }

    #[inline(always)]
    fn put_v6(&self, ip: &mut [u8], segment_len: u16) {
        let word = 6 << 28 | u32::from(self.tos) << 20 | (self.flow_label & 0x000f_ffff);
        ip[0..4].copy_from_slice(&word.to_be_bytes());
        ip[4..6].copy_from_slice(&segment_len.to_be_bytes());
        ip[6..8].copy_from_slice(&[PROTOCOL_TCP, self.ttl]);
        ip[8..24].copy_from_slice(&self.src.0);
        ip[24..40].copy_from_slice(&self.dst.0);
    }
}

/// The GSO type of a super-segment with these flags: CWR belongs on its first segment only, which
/// needs saying.
#[must_use]
pub(crate) const fn gso_type(version: IpVersion, flags: TcpFlags) -> u8 {
    let family = match version {
        IpVersion::V4 => GSO_TCPV4,
        IpVersion::V6 => GSO_TCPV6,
    };
    if flags.cwr() { family | GSO_ECN } else { family }
}

#[cfg(test)]
mod tests;
