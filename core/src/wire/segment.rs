//! Work that a port's peer cannot do itself: completing checksums and cutting super-segments
//! (COM-17, COM-18). Also checks a guest's description of its frames (COM-16).

use super::checksum::{Checksum, fold, sum};
use super::emit::gso_type;
use super::ip::{Ip, IpVersion, L4, V6_HEADER, offset, tcp_pseudo_header};
use super::packet::{Net, Packet};
use super::tcp::{self, Tcp, TcpFlags};
use super::virtio_net::{F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, VirtioNetHdr};
use super::{be16, be32, small};
use crate::drops::DropReason;
use core::cmp::Ordering;

/// Smallest `gso_size` taken from a guest: the smallest MSS Linux sends with (48,
/// `TCP_MIN_SND_MSS`) less a full set of options.
pub const GSO_SIZE_MIN: u16 = 8;

/// Segments of one super-segment from a guest: 64 KiB in segments of 128 bytes. With the smallest
/// MTU that Linux learns from the path (552, `net.ipv4.route.min_pmtu`) there are 128.
pub const SEGMENTS_MAX: u32 = 512;

/// Where the urgent pointer is in a TCP header (RFC 9293 section 3.1).
const URGENT_AT: usize = 18;

/// Where the checksum is in a UDP header.
const UDP_CHECKSUM_AT: u16 = 6;

/// Checks what a guest says about its frame, and returns what may be believed (COM-16).
///
/// The result has only NEEDS_CSUM of the flags (a guest vouches for nothing), its checksum field
/// lies behind the IP header, and it is a super-segment only if the frame is TCP to one receiver
/// with more payload than `gso_size`, and no more than [`SEGMENTS_MAX`] times as much. `hdr_len`
/// and [`GSO_ECN`] are made from the frame.
///
/// # Errors
/// [`DropReason::MalformedVirtioHeader`].
pub fn validate_hdr(
    hdr: &VirtioNetHdr,
    frame: &[u8],
    packet: &Packet,
) -> Result<VirtioNetHdr, DropReason> {
    const BAD: DropReason = DropReason::MalformedVirtioHeader;
    let mut clean = VirtioNetHdr::default();
    if hdr.needs_csum() {
        // The guest must not write checksums into addresses that were checked before. Behind the IP
        // header a tunnel may have its inner checksum anywhere (Linux does that for VXLAN); a
        // checksum of the outer TCP or UDP header must be in that header's own field.
        let (l4_start, field, tunnel) = match &packet.net {
            Net::Arp(_) => return Err(BAD),
            Net::Other => (u16::from(packet.eth.len), None, true),
            Net::Ip(ip) => match ip.l4 {
                L4::Tcp(_) => (ip.payload_offset, Some(small(tcp::CHECKSUM_AT)), false),
                L4::Udp => (ip.payload_offset, Some(UDP_CHECKSUM_AT), true),
                _ => (ip.payload_offset, None, true),
            },
        };
        let placed = match hdr.csum_start.cmp(&l4_start) {
            Ordering::Less => false,
            Ordering::Equal => field.is_none_or(|field| hdr.csum_offset == field),
            Ordering::Greater => tunnel,
        };
        let end = usize::from(hdr.csum_start) + usize::from(hdr.csum_offset) + 2;
        if !placed || end > frame.len() {
            return Err(BAD);
        }
        clean.flags = F_NEEDS_CSUM;
        clean.csum_start = hdr.csum_start;
        clean.csum_offset = hdr.csum_offset;
    }
    if hdr.is_gso() {
        let (Some((ip, tcp)), true) = (packet.tcp(), hdr.needs_csum()) else { return Err(BAD) };
        let family = match ip.version {
            IpVersion::V4 => GSO_TCPV4,
            IpVersion::V6 => GSO_TCPV6,
        };
        let segments = tcp.payload_len.div_ceil(u32::from(hdr.gso_size).max(1));
        // TCP has nothing to send to a group either (RFC 9293 section 3.9.2.3).
        let is_group = packet.eth.dst[0] & 1 != 0;
        if hdr.gso_type & !GSO_ECN != family
            || hdr.gso_size < GSO_SIZE_MIN
            || segments > SEGMENTS_MAX
            || is_group
        {
            return Err(BAD);
        }
        if tcp.payload_len > u32::from(hdr.gso_size) {
            clean.gso_type = gso_type(ip.version, tcp.flags);
            clean.gso_size = hdr.gso_size;
            clean.hdr_len = small(tcp.payload_offset as usize);
        }
    }
    Ok(clean)
}

/// Finishes a partial checksum in place, if `hdr` says there is one, and says so in `hdr`.
///
/// # Errors
/// [`DropReason::MalformedVirtioHeader`] if the field lies outside the frame,
/// [`DropReason::TooBig`] for a super-segment: a [`Segmenter`] must cut it.
pub fn complete_checksum(hdr: &mut VirtioNetHdr, frame: &mut [u8]) -> Result<(), DropReason> {
    if hdr.is_gso() {
        return Err(DropReason::TooBig);
    }
    if !hdr.needs_csum() {
        return Ok(());
    }
    let range = frame
        .get_mut(usize::from(hdr.csum_start)..)
        .filter(|range| usize::from(hdr.csum_offset) + 2 <= range.len())
        .ok_or(DropReason::MalformedVirtioHeader)?;
    // Zero means "no checksum" in UDP (RFC 768). Elsewhere its other form, all ones, is taken too,
    // but by some for a mistake.
    let check = match !fold(sum(range, 0)) {
        0 if hdr.csum_offset == UDP_CHECKSUM_AT => 0xffff,
        check => check,
    };
    range[usize::from(hdr.csum_offset)..][..2].copy_from_slice(&check.to_be_bytes());
    *hdr = VirtioNetHdr { flags: hdr.flags & !F_NEEDS_CSUM, ..VirtioNetHdr::default() };
    Ok(())
}

/// Cuts a super-segment into frames that any peer takes, each with full checksums (COM-18).
#[derive(Clone, Debug)]
pub struct Segmenter<'a> {
    header: &'a [u8],
    payload: &'a [u8],
    ip_at: usize,
    tcp_at: usize,
    version: IpVersion,
    mss: usize,
    flags: TcpFlags,
    /// Sum of the addresses and protocol; a segment adds its length.
    pseudo: u64,
    /// Payload bytes that segments were made of so far.
    done: usize,
    /// Segments made so far.
    count: u16,
}

impl<'a> Segmenter<'a> {
    /// Prepares to cut the frame that `ip` and `tcp` were parsed from into `hdr.gso_size` pieces.
    ///
    /// # Errors
    /// [`DropReason::MalformedVirtioHeader`] if `hdr` is not that of a super-segment or the offsets
    /// are not of this frame.
    pub fn new(
        hdr: &VirtioNetHdr,
        frame: &'a [u8],
        ip: &Ip,
        tcp: &Tcp,
    ) -> Result<Self, DropReason> {
        let at = tcp.payload_offset as usize;
        let (true, Some(header), Some(payload)) =
            (hdr.is_gso() && hdr.gso_size > 0, frame.get(..at), frame.get(at..ip.end as usize))
        else {
            return Err(DropReason::MalformedVirtioHeader);
        };
        Ok(Self {
            header,
            payload,
            ip_at: usize::from(ip.header_offset),
            tcp_at: usize::from(ip.payload_offset),
            version: ip.version,
            mss: usize::from(hdr.gso_size),
            flags: tcp.flags,
            pseudo: tcp_pseudo_header(ip.version, ip.src, ip.dst, 0),
            done: 0,
            count: 0,
        })
    }

    /// Bytes of the longest segment: the room that `next_into` needs.
    #[must_use]
    pub fn len_max(&self) -> usize {
        self.header.len() + self.mss.min(self.payload.len())
    }

    /// Writes the next segment to the start of `buf` and returns its length; `None` after the last.
    ///
    /// # Panics
    /// If `buf` is shorter than [`Self::len_max`].
    pub fn next_into(&mut self, buf: &mut [u8]) -> Option<usize> {
        if self.done >= self.payload.len() && self.count > 0 {
            return None;
        }
        let header_len = self.header.len();
        let len = self.mss.min(self.payload.len() - self.done);
        let last = self.done + len == self.payload.len();
        let segment = &mut buf[..header_len + len];
        segment[..header_len].copy_from_slice(self.header);
        segment[header_len..].copy_from_slice(&self.payload[self.done..self.done + len]);

        let (ip, tcp) = segment[self.ip_at..].split_at_mut(self.tcp_at - self.ip_at);
        self.put_ip(ip, tcp.len());
        let mut flags = self.flags;
        if !last {
            flags = flags.without(TcpFlags::PSH | TcpFlags::FIN);
        }
        if self.count > 0 {
            flags = flags.without(TcpFlags::CWR);
        }
        self.put_tcp(tcp, flags);
        self.done += len;
        self.count = self.count.wrapping_add(1);
        Some(segment.len())
    }

    fn put_ip(&self, ip: &mut [u8], tcp_len: usize) {
        match self.version {
            IpVersion::V4 => {
                let id = be16(ip, 4).wrapping_add(self.count);
                let len = small(ip.len() + tcp_len);
                ip[2..4].copy_from_slice(&len.to_be_bytes());
                ip[4..6].copy_from_slice(&id.to_be_bytes());
                ip[10..12].fill(0);
                let check = !fold(sum(ip, 0));
                ip[10..12].copy_from_slice(&check.to_be_bytes());
            }
            IpVersion::V6 => {
                let len = small(ip.len() - V6_HEADER + tcp_len);
                ip[4..6].copy_from_slice(&len.to_be_bytes());
            }
        }
    }

    fn put_tcp(&self, tcp: &mut [u8], flags: TcpFlags) {
        let seq = be32(tcp, 4).wrapping_add(offset(self.done));
        tcp[4..8].copy_from_slice(&seq.to_be_bytes());
        let mut flags = flags;
        if self.done > 0 && flags.contains(TcpFlags::URG) {
            // Urgent data ends so many bytes behind the first of the segment.
            let left = usize::from(be16(tcp, URGENT_AT)).saturating_sub(self.done);
            tcp[URGENT_AT..][..2].copy_from_slice(&small(left).to_be_bytes());
            flags = if left > 0 { flags } else { flags.without(TcpFlags::URG) };
        }
        let word = be16(tcp, tcp::FLAGS_AT) & !TcpFlags::ALL.0 | flags.0;
        tcp[tcp::FLAGS_AT..][..2].copy_from_slice(&word.to_be_bytes());
        tcp[tcp::CHECKSUM_AT..][..2].fill(0);
        let mut sum = Checksum::new(self.pseudo + tcp.len() as u64);
        sum.add_bytes(tcp);
        tcp[tcp::CHECKSUM_AT..][..2].copy_from_slice(&sum.finish().to_be_bytes());
    }
}

#[cfg(test)]
mod tests;
