//! Frames that the host makes for R: its own ACKs (EMIT-R), and with congestion offload the
//! segments with G's bytes (FLOOD-24, FLOOD-35, COM-20, COM-21).
//!
//! All fields are the host's own: nothing urgent, no options except the negotiated timestamps and,
//! on a bare ACK, SACK; no fragments. TTL, DSCP and flow label, which are G's, are judged with
//! those of all frames. A segment is no longer than R takes. New bytes are ECN-capable if that was
//! negotiated, and nothing else is. CWR comes in a segment of its own. The last byte that there is
//! is pushed.

use super::{Ensure, options_len, sizes};
use crate::history::{History, Side};
use crate::out::{Out, is_foreign};
use crate::wire::{IpVersion, TcpFlags};

/// Bytes of the timestamps option, aligned.
const TIMESTAMPS: u32 = 12;
/// The ECN bits of a packet that is capable, as hosts send it (RFC 3168 section 5).
const ECT0: u8 = 2;
/// The flags that a segment with bytes of G may have.
const OF_DATA: TcpFlags = TcpFlags(
    TcpFlags::ACK.0 | TcpFlags::PSH.0 | TcpFlags::FIN.0 | TcpFlags::CWR.0 | TcpFlags::ECE.0,
);

/// An ACK, or a probe without its octet.
pub(super) fn bare(h: &History, o: &Out<'_>) -> Ensure {
    plain(o, TcpFlags::ACK | TcpFlags::ECE)?;
    let sack = u32::try_from(o.tcp.options.sack.as_slice().len()).unwrap_or(0);
    let blocks = if sack > 0 { 4 + 8 * sack } else { 0 };
    options(h, o, blocks)?;
    match o.ip.tos & 3 {
        0 => Ok(()),
        _ => Err("an ACK to R that is ECN-capable".to_owned()),
    }
}

/// Bytes of G that the host sends for it.
pub(super) fn data(h: &History, o: &Out<'_>) -> Ensure {
    plain(o, OF_DATA)?;
    options(h, o, 0)?;
    let new = o.seq >= h.end(Side::R).end_to;
    let capable = if h.marks() && new && o.tcp.payload_len > 0 { ECT0 } else { 0 };
    if o.ip.tos & 3 != capable {
        return Err(format!("a segment to R with ECN bits {}, not {capable}", o.ip.tos & 3));
    }
    if h.offline {
        return Ok(()); // of a capture nobody knows how it was cut
    }
    // A segment that ends with all that G has sent has nothing to wait for (RFC 9293 section
    // 3.9.1).
    let g = h.end(Side::G);
    let last = o.tcp.payload_len > 0 && o.end == g.fin.unwrap_or(g.end);
    if last && !o.tcp.flags.contains(TcpFlags::PSH) {
        return Err("the last byte of G there is was not pushed".to_owned());
    }
    if o.hdr.is_gso() && o.tcp.flags.contains(TcpFlags::CWR) {
        return Err("CWR to R on more than a segment".to_owned());
    }
    sizes(h, o)
}

/// Nothing but these flags, nothing that a host does not know, and not to be cut on its way.
fn plain(o: &Out<'_>, flags: TcpFlags) -> Ensure {
    let tcp = usize::from(o.ip.payload_offset);
    let whole = match o.ip.version {
        IpVersion::V4 => o.bytes[usize::from(o.ip.header_offset) + 6] & 0x40 != 0,
        IpVersion::V6 => true,
    };
    match () {
        () if is_foreign(o.ip, o.tcp) => Err("odd options to R that G did not write".to_owned()),
        () if o.tcp.flags.without(flags) != TcpFlags::NONE => {
            Err(format!("flags {} to R that G did not write", o.tcp.flags))
        }
        () if o.bytes[tcp + 18..tcp + 20] != [0, 0] => Err("an urgent pointer to R".to_owned()),
        () if !whole => Err("a segment to R that may be cut into fragments".to_owned()),
        () => Ok(()),
    }
}

/// The negotiated timestamps, and so many bytes more.
fn options(h: &History, o: &Out<'_>, more: u32) -> Ensure {
    let clocks = o.tcp.options.timestamps.is_some();
    let most = more + if h.timestamps() { TIMESTAMPS } else { 0 };
    match clocks == h.timestamps() && options_len(o) <= most {
        true => Ok(()),
        false => Err(format!("{} bytes of options to R", options_len(o))),
    }
}
