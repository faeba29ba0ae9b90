//! Builds the headers of a TCP segment from nothing.

use super::checksum::{Checksum, fold};
use super::ip::{IpAddr16, IpVersion, PROTOCOL_TCP, V4_HEADER, V6_HEADER, tcp_pseudo_header};
use super::seq::Seq;
use super::small;
use super::tcp::{
    CHECKSUM_AT, HEADER, KIND_NOP, KIND_SACK, NOP_NOP_TIMESTAMPS, TcpFlags, Timestamps,
};
use super::virtio_net::{F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, VirtioNetHdr};

/// Most bytes of options in a TCP header: 15 words less the fixed part.
const OPTIONS_MAX: usize = 40;

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
    /// Who it comes from.
    pub src: IpAddr16,
    /// Whom it is for.
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

/// What to put into the TCP checksum field.
#[derive(Clone, Copy, Debug)]
pub enum CsumMode<'a> {
    /// The checksum over header and these payload pieces, which are all of the payload.
    Full(&'a [&'a [u8]]),
    /// The pseudo-header's sum, for whoever finishes it ([`TcpEmit::partial_hdr`]).
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
    #[inline]
    pub fn emit(
        &self,
        buf: &mut [u8; HEADER_MAX],
        payload_len: usize,
        csum: CsumMode<'_>,
    ) -> usize {
        let (l2, rest) = buf.split_at_mut(self.l2.len());
        l2.copy_from_slice(self.l2);
        let (ip, tcp) = rest.split_at_mut(self.ip_len());
        let Some((header, options)) = tcp.split_first_chunk_mut() else {
            panic!("a layer-2 header of {} bytes", self.l2.len());
        };
        let tcp_len = HEADER + self.put_options(options);
        let Ok(segment_len) = u16::try_from(tcp_len + payload_len) else {
            panic!("a TCP segment of {tcp_len} + {payload_len} bytes");
        };
        self.put_tcp(header, tcp_len);
        self.put_ip(ip, segment_len);
        let mut sum =
            Checksum::new(tcp_pseudo_header(self.version, self.src, self.dst, segment_len.into()));
        let field = match csum {
            CsumMode::Partial => sum.fold(),
            CsumMode::Full(pieces) => {
                debug_assert_eq!(payload_len, pieces.iter().map(|p| p.len()).sum::<usize>());
                sum.add_bytes(&tcp[..tcp_len]);
                for piece in pieces {
                    sum.add_bytes(piece);
                }
                sum.finish()
            }
        };
        tcp[CHECKSUM_AT..][..2].copy_from_slice(&field.to_be_bytes());
        self.l2.len() + self.ip_len() + tcp_len
    }

    /// The virtio-net header for what [`Self::emit`] wrote with [`CsumMode::Partial`]:
    /// `header_len` is what it returned. More payload than `mss` bytes makes it a super-segment.
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

    /// Writes the options and returns their length, a multiple of four.
    #[inline(always)]
    fn put_options(&self, options: &mut [u8]) -> usize {
        let mut len = 0;
        if let Some(ts) = self.timestamps {
            let option = &mut options[..12];
            option[..4].copy_from_slice(&NOP_NOP_TIMESTAMPS);
            option[4..8].copy_from_slice(&ts.tsval.to_be_bytes());
            option[8..].copy_from_slice(&ts.tsecr.to_be_bytes());
            len = 12;
        }
        let fit = (OPTIONS_MAX - len - 4) / 8;
        let sack = &self.sack[..self.sack.len().min(fit)];
        if !sack.is_empty() {
            let (head, blocks) = options[len..].split_at_mut(4);
            #[expect(clippy::cast_possible_truncation, reason = "at most four blocks")]
            head.copy_from_slice(&[KIND_NOP, KIND_NOP, KIND_SACK, 2 + 8 * sack.len() as u8]);
            for (option, (start, end)) in blocks.as_chunks_mut::<8>().0.iter_mut().zip(sack) {
                option[..4].copy_from_slice(&start.0.to_be_bytes());
                option[4..].copy_from_slice(&end.0.to_be_bytes());
            }
            len += 4 + 8 * sack.len();
        }
        len
    }

    /// Writes the TCP header with a zero checksum.
    #[inline(always)]
    fn put_tcp(&self, h: &mut [u8; HEADER], header_len: usize) {
        // The length in words is in the top four bits, so bytes / 4 << 12.
        let flags = small(header_len) << 10 | (self.flags & TcpFlags::ALL).0;
        h[0..2].copy_from_slice(&self.src_port.to_be_bytes());
        h[2..4].copy_from_slice(&self.dst_port.to_be_bytes());
        h[4..8].copy_from_slice(&self.seq.0.to_be_bytes());
        h[8..12].copy_from_slice(&self.ack.0.to_be_bytes());
        h[12..14].copy_from_slice(&flags.to_be_bytes());
        h[14..16].copy_from_slice(&self.window.to_be_bytes());
        h[16..20].fill(0);
    }

    /// Writes the IP header.
    #[inline(always)]
    fn put_ip(&self, ip: &mut [u8], segment_len: u16) {
        match self.version {
            IpVersion::V4 => self.put_v4(&mut ip[..V4_HEADER], segment_len),
            IpVersion::V6 => self.put_v6(&mut ip[..V6_HEADER], segment_len),
        }
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
pub(super) const fn gso_type(version: IpVersion, flags: TcpFlags) -> u8 {
    let family = match version {
        IpVersion::V4 => GSO_TCPV4,
        IpVersion::V6 => GSO_TCPV6,
    };
    if flags.cwr() { family | GSO_ECN } else { family }
}

#[cfg(test)]
mod tests;
