//! A frame on its way into the tunnel: cut to the inner MTU, each piece behind a VXLAN header.

use crate::drops::DropReason;
use crate::limits::{OVERLAY_DATAGRAM_BYTES_MAX, OVERLAY_DATAGRAMS_MAX};
use crate::wire::emit::gso_type;
use crate::wire::packet::{Packet, tcp_checksum_ok};
use crate::wire::segment::{Segmenter, complete_checksum};
use crate::wire::virtio_net::VirtioNetHdr;
use crate::wire::vxlan;

/// Bytes of an Ethernet header without tags.
const ETHERNET: usize = 14;

/// Datagrams that leave by one call: all but the last are as long as the first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Batch {
    /// Bytes of all of them.
    pub len: usize,
    /// Bytes of the first.
    pub datagram: u16,
}

/// The payloads of the UDP datagrams for a frame, in order, in batches.
#[derive(Debug)]
pub struct Datagrams<'a> {
    header: [u8; vxlan::LEN],
    rest: Rest<'a>,
}

#[derive(Debug)]
enum Rest<'a> {
    Segments(Segmenter<'a>),
    Whole(VirtioNetHdr, &'a [u8]),
    Nothing,
}

impl<'a> Datagrams<'a> {
    /// Of a frame that `packet` was parsed from, on an overlay whose IP packets have at most `mtu`
    /// bytes, VLAN tags before them included: the path knows no inner header. TCP is cut to it,
    /// whoever made the segments so long; nothing else can be.
    ///
    /// # Errors
    /// Why the frame cannot go: [`DropReason::TooBig`], or what it says of itself is wrong.
    pub(super) fn new(
        header: [u8; vxlan::LEN],
        hdr: &VirtioNetHdr,
        frame: &'a [u8],
        packet: &Packet,
        mtu: u16,
    ) -> Result<Self, DropReason> {
        let l2_len = usize::from(packet.eth.len);
        let mtu = usize::from(mtu).saturating_sub(l2_len - ETHERNET);
        let fits = frame.len() - l2_len <= mtu;
        if fits && !hdr.is_gso() {
            let field_end = usize::from(hdr.csum_start) + usize::from(hdr.csum_offset) + 2;
            if hdr.needs_csum() && field_end > frame.len() {
                return Err(DropReason::MalformedVirtioHeader);
            }
            return Ok(Self { header, rest: Rest::Whole(*hdr, frame) });
        }
        let (ip, tcp) = packet.tcp().ok_or(DropReason::TooBig)?;
        let headers_len = tcp.payload_offset as usize - l2_len;
        if headers_len >= mtu {
            return Err(DropReason::TooBig);
        }
        // The pieces get new checksums, which must not cover up what was broken before.
        if !hdr.is_vouched_for() && !tcp_checksum_ok(frame, ip, tcp) {
            return Err(DropReason::BadChecksum);
        }
        let room = u16::try_from(mtu - headers_len).unwrap_or(u16::MAX);
        let gso_size = if hdr.is_gso() { hdr.gso_size.min(room) } else { room };
        let gso_type = gso_type(ip.version, tcp.flags);
        let hdr = VirtioNetHdr { gso_type, gso_size, ..VirtioNetHdr::default() };
        Segmenter::new(&hdr, frame, ip, tcp)
            .map(|segments| Self { header, rest: Rest::Segments(segments) })
    }

    /// Writes the next datagrams one behind the other to the start of `buf`, which has
    /// [`OVERLAY_DATAGRAM_BYTES_MAX`] bytes; `None` after the last.
    #[must_use]
    pub fn next_into(&mut self, buf: &mut [u8]) -> Option<Batch> {
        debug_assert!(buf.len() >= OVERLAY_DATAGRAM_BYTES_MAX, "room for any datagram");
        let header = self.header;
        match &mut self.rest {
            Rest::Segments(segments) => {
                let (mut len, mut first) = (0, 0);
                for _ in 0..OVERLAY_DATAGRAMS_MAX {
                    let at = len + vxlan::LEN;
                    let Some(room) = buf.get_mut(at..).filter(|r| r.len() >= segments.len_max())
                    else {
                        break;
                    };
                    let Some(segment) = segments.next_into(room) else { break };
                    buf[len..at].copy_from_slice(&header);
                    len = at + segment;
                    first = if first == 0 { len } else { first };
                }
                let datagram = u16::try_from(first).unwrap_or(u16::MAX);
                (len > 0).then_some(Batch { len, datagram })
            }
            Rest::Whole(hdr, frame) => {
                let len = vxlan::LEN + frame.len();
                let (front, back) = buf.get_mut(..len)?.split_at_mut(vxlan::LEN);
                front.copy_from_slice(&header);
                back.copy_from_slice(frame);
                let completed = complete_checksum(hdr, back);
                self.rest = Rest::Nothing;
                let datagram = u16::try_from(len).unwrap_or(u16::MAX);
                completed.is_ok().then_some(Batch { len, datagram })
            }
            Rest::Nothing => None,
        }
    }
}
