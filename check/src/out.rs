//! A frame on its way in or out, in the terms of its flow, as the checkers judge it.

use nightporter_core::time::Instant;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::history::{History, Side};
use crate::wire::{Ip, IpVersion, Tcp, TcpFlags};

/// Bytes of an IP header without options or extension headers.
const V4_HEADER: u16 = 20;
/// See [`V4_HEADER`].
const V6_HEADER: u16 = 40;

/// Urgent, or with options or extension headers that are not the host's to understand.
pub(crate) fn is_foreign(ip: &Ip, tcp: &Tcp) -> bool {
    let plain = if ip.version == IpVersion::V4 { V4_HEADER } else { V6_HEADER };
    ip.payload_offset - ip.header_offset > plain
        || !tcp.options.understood()
        || tcp.flags.contains(TcpFlags::URG)
}

/// A segment that came in whole from its sender, in the flow's terms; no SYN, no RST.
#[derive(Clone, Copy, Debug)]
pub(crate) struct In<'a> {
    /// When.
    pub(crate) at: Instant,
    /// The sender.
    pub(crate) from: Side,
    /// The frame.
    pub(crate) bytes: &'a [u8],
    /// Its IP header.
    pub(crate) ip: &'a Ip,
    /// Its TCP header.
    pub(crate) tcp: &'a Tcp,
    /// First sequence number and end of the payload, FIN not counted.
    pub(crate) seq: u64,
    /// See `seq`.
    pub(crate) end: u64,
    /// Its ACK.
    pub(crate) ack: u64,
    /// A conforming receiver takes notice of it (INV-25); of G's segments that is not asked.
    pub(crate) counts: bool,
}

/// A frame on its way out, in the flow's terms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out<'a> {
    /// When.
    pub(crate) at: Instant,
    /// The receiver.
    pub(crate) to: Side,
    /// The host made or edited it; else it came out as it went in.
    pub(crate) gated: bool,
    /// It may have been made before, and have waited for the guest's ring.
    pub(crate) waited: bool,
    /// Checksum and segmentation state; of captures it is made up.
    pub(crate) hdr: VirtioNetHdr,
    /// The frame.
    pub(crate) bytes: &'a [u8],
    /// Its IP header.
    pub(crate) ip: &'a Ip,
    /// Its TCP header.
    pub(crate) tcp: &'a Tcp,
    /// Its payload.
    pub(crate) payload: &'a [u8],
    /// First sequence number and end of the payload, FIN not counted.
    pub(crate) seq: u64,
    /// See `seq`.
    pub(crate) end: u64,
    /// Its ACK, and the right edge it shows.
    pub(crate) ack: Option<u64>,
    /// See `ack`.
    pub(crate) edge: u64,
}

impl Out<'_> {
    /// A keepalive with its octet of rubbish (RFC 9293 section 3.8.4): G's and R's own pass on.
    /// smoltcp sends its own where its FIN is, acknowledged or not.
    #[must_use]
    pub(crate) fn is_keepalive(&self, h: &History) -> bool {
        let in_place_of_fin = self.to == Side::R && h.end(Side::G).fin == Some(self.seq);
        self.tcp.payload_len == 1 && (self.end == h.end(self.to).acked || in_place_of_fin)
    }

    /// Not from the store: a segment that the host does not understand passes at once, wherever it
    /// lies (SNOOP-13). A bare ACK is an ACK, whatever is in its IP header.
    #[must_use]
    pub(crate) fn is_verbatim(&self) -> bool {
        let urgent = self.tcp.flags.contains(TcpFlags::URG);
        let bare = self.is_pure() && self.tcp.options.understood() && !urgent;
        is_foreign(self.ip, self.tcp) && !bare
    }

    /// Bytes for G that the host held, and not an octet that only asks for an answer.
    #[must_use]
    pub(crate) fn is_stored(&self) -> bool {
        self.gated && self.to == Side::G && self.tcp.payload_len > 1 && !self.is_verbatim()
    }

    /// An ACK and nothing else.
    #[must_use]
    pub(crate) fn is_pure(&self) -> bool {
        let flags = TcpFlags::FIN | TcpFlags::RST | TcpFlags::SYN;
        self.tcp.payload_len == 0 && self.tcp.flags.ack() && !self.tcp.flags.intersects(flags)
    }

    /// Data from the store that was sent before; R itself repeats bytes that were not acknowledged
    /// to it.
    #[must_use]
    pub(crate) fn is_repeat(&self, h: &History) -> bool {
        self.gated
            && (self.to == Side::R || self.end <= h.end(Side::R).ack_to)
            && !self.is_verbatim()
            && self.tcp.payload_len > 1
            && self.end <= h.end(self.to).end_to
    }
}
