//! In-place edits of a TCP segment's headers. Checksums follow by increments (RFC 1624), and the
//! header never changes its length (COM-14, COM-15).

use super::checksum::{update16, update32};
use super::ip::{Ip, IpVersion};
use super::seq::Seq;
use super::tcp::{self, KIND_NOP, Tcp, TcpFlags};
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
    ip: &'a mut [u8],
    tcp: &'a mut [u8],
    version: IpVersion,
    /// Where the timestamps and SACK options start in the TCP header; 0 if not there.
    ts_at: usize,
    sack_at: usize,
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
        let l4 = usize::from(ip.payload_offset);
        let (before, rest) = frame[..tcp.payload_offset as usize].split_at_mut(l4);
        assert!(rest.len() >= tcp::HEADER, "the offsets are not of this frame");
        Self {
            ip: &mut before[usize::from(ip.header_offset)..],
            tcp: rest,
            version: ip.version,
            ts_at: usize::from(tcp.options.ts_offset),
            sack_at: usize::from(tcp.options.sack_offset),
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
        self.put16(tcp::WINDOW_AT, window)
    }

    /// Sets all nine flags; header length and reserved bits stay.
    #[inline]
    pub fn set_flags(&mut self, flags: TcpFlags) -> &mut Self {
        let rest = be16(self.tcp, tcp::FLAGS_AT) & !TcpFlags::ALL.0;
        self.put16(tcp::FLAGS_AT, rest | (flags & TcpFlags::ALL).0)
    }

    /// Sets both timestamps; nothing happens if the segment has none, since options are not added.
    #[inline]
    pub fn set_timestamps(&mut self, tsval: u32, tsecr: u32) -> &mut Self {
        if self.ts_at != 0 {
            let at = self.ts_at + TSVAL_AT;
            self.put32(at, tsval).put32(at + 4, tsecr);
        }
        self
    }

    /// Overwrites the SACK option with NOPs.
    pub fn nop_out_sack(&mut self) -> &mut Self {
        if self.sack_at != 0 {
            let end = self.sack_at + usize::from(self.tcp[self.sack_at + 1]);
            for at in self.sack_at..end {
                self.put8(at, KIND_NOP);
            }
            self.sack_at = 0;
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

    #[inline]
    fn put8(&mut self, at: usize, new: u8) {
        let old = self.tcp[at];
        self.tcp[at] = new;
        // A byte at an odd offset is the low half of its word.
        let shift = if at.is_multiple_of(2) { 8 } else { 0 };
        self.fix_checksum(u32::from(old) << shift, u32::from(new) << shift);
    }

    #[inline]
    fn put16(&mut self, at: usize, new: u16) -> &mut Self {
        let old = be16(self.tcp, at);
        if old != new {
            self.tcp[at..at + 2].copy_from_slice(&new.to_be_bytes());
            self.fix_checksum(u32::from(old), u32::from(new));
        }
        self
    }

    #[inline]
    fn put32(&mut self, at: usize, new: u32) -> &mut Self {
        let old = be32(self.tcp, at);
        if old != new {
            self.tcp[at..at + 4].copy_from_slice(&new.to_be_bytes());
            // At an odd offset every byte is in the other half of its word. Turning the number by
            // eight bits puts it there: both have the same weight modulo 2^16 - 1.
            let turn = if at.is_multiple_of(2) { 0 } else { 8 };
            self.fix_checksum(old.rotate_left(turn), new.rotate_left(turn));
        }
        self
    }

    #[inline]
    fn fix_checksum(&mut self, old: u32, new: u32) {
        if self.full_checksum {
            let check = update32(be16(self.tcp, tcp::CHECKSUM_AT), old, new);
            self.tcp[tcp::CHECKSUM_AT..][..2].copy_from_slice(&check.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
