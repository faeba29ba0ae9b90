//! In-place edits of a TCP segment's headers. Checksums follow by increments (RFC 1624), and the
//! header never changes its length (COM-14, COM-15).

use super::checksum::{fold, fold32, sum, update16};
use super::ip::{Ip, IpVersion, V4_HEADER};
use super::seq::Seq;
use super::tcp::{CHECKSUM_AT, FLAGS_AT, HEADER, KIND_NOP, Tcp, TcpFlags, WINDOW_AT};
use super::{be16, be32};

/// Bytes of the timestamps option before TSval.
const TSVAL_AT: usize = 2;

/// Edits one segment in its frame. Every setter takes effect at once; one that changes nothing
/// writes nothing.
///
/// ```
/// # use nightporter_core::wire::{edit::TcpEdit, packet::{Packet, Seq}};
/// # fn demo(frame: &mut [u8]) -> Option<()> {
/// let packet = Packet::parse(frame).ok()?;
/// let (ip, tcp) = packet.tcp()?;
/// TcpEdit::new(frame, ip, tcp, false).set_ack(Seq(1001)).set_window(512);
/// # Some(()) }
/// ```
#[derive(Debug)]
pub struct TcpEdit<'a> {
    /// The start of the IP header.
    ip: &'a mut [u8; V4_HEADER],
    tcp: &'a mut [u8; HEADER],
    options: &'a mut [u8],
    version: IpVersion,
    /// Where the timestamps and SACK options start in the TCP header; 0 if not there.
    ts_offset: u8,
    sack_offset: u8,
    /// The TCP checksum field covers the header, so edits must be reflected in it.
    full_checksum: bool,
}

impl<'a> TcpEdit<'a> {
    /// Opens the segment that `ip` and `tcp` were parsed from, in the same `frame`.
    ///
    /// `partial`: the checksum field holds only the pseudo-header's sum (NEEDS_CSUM), which no edit
    /// here touches.
    ///
    /// # Panics
    /// If the headers do not lie in `frame`: they were parsed from another one.
    #[inline]
    #[must_use]
    pub fn new(frame: &'a mut [u8], ip: &Ip, tcp: &Tcp, partial: bool) -> Self {
        let (l2_l3, l4) =
            frame[..tcp.payload_offset as usize].split_at_mut(usize::from(ip.payload_offset));
        let (Some(ip_header), Some((tcp_header, options))) =
            (l2_l3[usize::from(ip.header_offset)..].first_chunk_mut(), l4.split_first_chunk_mut())
        else {
            panic!("the offsets are not of this frame");
        };
        Self {
            ip: ip_header,
            tcp: tcp_header,
            options,
            version: ip.version,
            ts_offset: tcp.options.ts_offset,
            sack_offset: tcp.options.sack_offset,
            full_checksum: !partial,
        }
    }

    /// Sets the sequence number.
    #[inline]
    pub fn set_seq(&mut self, seq: Seq) -> &mut Self {
        self.put32(4, seq.0)
    }

    /// Sets the acknowledgement number.
    #[inline]
    pub fn set_ack(&mut self, ack: Seq) -> &mut Self {
        self.put32(8, ack.0)
    }

    /// Sets the window field, in wire units.
    #[inline]
    pub fn set_window(&mut self, window: u16) -> &mut Self {
        self.put16(WINDOW_AT, window)
    }

    /// Sets all nine flags; header length and reserved bits stay.
    #[inline]
    pub fn set_flags(&mut self, flags: TcpFlags) -> &mut Self {
        let rest = be16(self.tcp, FLAGS_AT) & !TcpFlags::ALL.0;
        self.put16(FLAGS_AT, rest | (flags & TcpFlags::ALL).0)
    }

    /// Sets both timestamps; nothing happens if the segment has none, since options are not added.
    #[inline]
    pub fn set_timestamps(&mut self, tsval: u32, tsecr: u32) -> &mut Self {
        if self.ts_offset != 0 {
            let at = usize::from(self.ts_offset) - HEADER + TSVAL_AT;
            let Some(ts) = self.options[at..].first_chunk_mut::<8>() else {
                panic!("the offsets are not of this frame");
            };
            let old = [be32(ts, 0), be32(ts, 4)];
            if old != [tsval, tsecr] {
                ts[..4].copy_from_slice(&tsval.to_be_bytes());
                ts[4..].copy_from_slice(&tsecr.to_be_bytes());
                let sum = |[a, b]: [u32; 2]| fold(u64::from(a) + u64::from(b));
                // At an odd offset every byte is in the other half of its word.
                let place = |sum: u16| if at.is_multiple_of(2) { sum } else { sum.swap_bytes() };
                self.fix_checksum(place(sum(old)), place(sum([tsval, tsecr])));
            }
        }
        self
    }

    /// Overwrites the SACK option with NOPs.
    pub fn nop_out_sack(&mut self) -> &mut Self {
        if self.sack_offset != 0 {
            let at = usize::from(self.sack_offset) - HEADER;
            let len = usize::from(self.options[at + 1]);
            let option = &mut self.options[at..at + len];
            // Summed as if at an even offset, then moved to where it is; its length is even.
            let place = |sum: u16| if at.is_multiple_of(2) { sum } else { sum.swap_bytes() };
            let old = place(fold(sum(option, 0)));
            option.fill(KIND_NOP);
            let new = place(fold(sum(option, 0)));
            self.fix_checksum(old, new);
            self.sack_offset = 0;
        }
        self
    }

    /// Sets the ECN codepoint of the IP header (RFC 3168): 0 Not-ECT, 1 ECT(1), 2 ECT(0), 3 CE.
    #[inline]
    pub fn set_ecn(&mut self, ecn: u8) -> &mut Self {
        let ecn = u16::from(ecn & 3);
        let old = be16(self.ip, 0);
        let new = match self.version {
            IpVersion::V4 => old & !3 | ecn,
            // The traffic class starts four bits into the header.
            IpVersion::V6 => old & !0x30 | ecn << 4,
        };
        if new != old {
            self.ip[..2].copy_from_slice(&new.to_be_bytes());
            if self.version == IpVersion::V4 {
                let check = update16(be16(self.ip, 10), old, new);
                self.ip[10..12].copy_from_slice(&check.to_be_bytes());
            }
        }
        self
    }

    /// Writes a field at an even offset of the fixed header.
    #[inline(always)]
    fn put16(&mut self, at: usize, new: u16) -> &mut Self {
        let old = be16(self.tcp, at);
        if old != new {
            self.tcp[at..at + 2].copy_from_slice(&new.to_be_bytes());
            self.fix_checksum(old, new);
        }
        self
    }

    /// Writes a field at an even offset of the fixed header.
    #[inline(always)]
    fn put32(&mut self, at: usize, new: u32) -> &mut Self {
        let old = be32(self.tcp, at);
        if old != new {
            self.tcp[at..at + 4].copy_from_slice(&new.to_be_bytes());
            self.fix_checksum(fold32(old), fold32(new));
        }
        self
    }

    #[inline(always)]
    fn fix_checksum(&mut self, old: u16, new: u16) {
        if self.full_checksum {
            let check = update16(be16(self.tcp, CHECKSUM_AT), old, new);
            self.tcp[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&check.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
