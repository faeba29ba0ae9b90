//! The segment that most traffic is made of: an acknowledgement, perhaps data, timestamps if both
//! ends have them, and nothing else.
//!
//! A [`Plain`] is a view of the frame, in which each field has a fixed place. A frame with such a
//! view need not be parsed.

use super::checksum::{Checksum, pseudo_header_v4, pseudo_header_v6};
use super::ip::{self, PROTOCOL_TCP, V4_HEADER, V6_HEADER};
use super::packet::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use super::seq::Seq;
use super::tcp::{FLAGS_AT, HEADER, NOP_NOP_TIMESTAMPS, TcpFlags, Timestamps, WINDOW_AT};
use super::{array, be16, be32};

/// Bytes of a TCP header with timestamps.
const WITH_TIMESTAMPS: usize = HEADER + 12;
/// The word of length and flags in a TCP header, without PSH: 20 bytes, ACK.
const BARE: u16 = 0x5010;
/// The same with the options that timestamps take.
const TIMESTAMPED: u16 = 0x8010;

/// See the module doc. It has no flag but ACK and perhaps PSH; its packet has no IP options.
#[derive(Clone, Copy, Debug)]
pub struct Plain<'a> {
    l2: &'a [u8],
    ip: Header<'a>,
    tcp: &'a [u8; HEADER],
    timestamps: Option<&'a [u8; 8]>,
    /// The TCP header and the payload.
    segment: &'a [u8],
    payload: &'a [u8],
}

/// The IP header.
#[derive(Clone, Copy, Debug)]
enum Header<'a> {
    V4(&'a [u8; V4_HEADER]),
    V6(&'a [u8; V6_HEADER]),
}

impl<'a> Plain<'a> {
    /// Of a frame that [`Packet::parse`](super::packet::Packet::parse) takes for such a segment,
    /// and whose layer-2 header has `l2_len` bytes. `None` for any other frame.
    #[inline(always)]
    #[must_use]
    pub fn read(frame: &'a [u8], l2_len: usize) -> Option<Self> {
        let (l2, _) = frame.split_at_checked(l2_len)?;
        let (ip, segment) = match u16::from_be_bytes(*l2.last_chunk()?) {
            ETHERTYPE_IPV4 => {
                let (h, segment) = ip::usual_header_v4(frame, l2_len)?;
                (Header::V4(h), segment)
            }
            ETHERTYPE_IPV6 => {
                let (h, segment) = ip::usual_header_v6(frame, l2_len)?;
                (Header::V6(h), segment)
            }
            _ => return None,
        };
        let tcp: &[u8; HEADER] = segment.first_chunk()?;
        let (timestamps, payload) = match be16(tcp, FLAGS_AT) & !TcpFlags::PSH.0 {
            TIMESTAMPED => {
                let (h, payload) = segment.split_first_chunk::<WITH_TIMESTAMPS>()?;
                if h[HEADER..HEADER + 4] != NOP_NOP_TIMESTAMPS {
                    return None;
                }
                (h.last_chunk(), payload)
            }
            BARE => (None, segment.get(HEADER..)?),
            _ => return None,
        };
        Some(Self { l2, ip, tcp, timestamps, segment, payload })
    }

    /// Everything before the IP header.
    #[inline(always)]
    #[must_use]
    pub const fn l2(&self) -> &'a [u8] {
        self.l2
    }

    /// DSCP and ECN.
    #[inline(always)]
    #[must_use]
    pub fn tos(&self) -> u8 {
        match self.ip {
            Header::V4(h) => h[1],
            Header::V6(h) => h[0] << 4 | h[1] >> 4,
        }
    }

    /// TTL or hop limit.
    #[inline(always)]
    #[must_use]
    pub const fn ttl(&self) -> u8 {
        match self.ip {
            Header::V4(h) => h[8],
            Header::V6(h) => h[7],
        }
    }

    /// IPv6 flow label; 0 in IPv4.
    #[inline(always)]
    #[must_use]
    pub fn flow_label(&self) -> u32 {
        match self.ip {
            Header::V4(_) => 0,
            Header::V6(h) => be32(h, 0) & 0x000f_ffff,
        }
    }

    /// Sequence number of the first byte.
    #[inline(always)]
    #[must_use]
    pub fn seq(&self) -> Seq {
        Seq(be32(self.tcp, 4))
    }

    /// Acknowledgement number.
    #[inline(always)]
    #[must_use]
    pub fn ack(&self) -> Seq {
        Seq(be32(self.tcp, 8))
    }

    /// Window as on the wire, not scaled.
    #[inline(always)]
    #[must_use]
    pub fn window(&self) -> u16 {
        be16(self.tcp, WINDOW_AT)
    }

    /// Timestamps.
    #[inline(always)]
    #[must_use]
    pub fn timestamps(&self) -> Option<Timestamps> {
        self.timestamps.map(|ts| Timestamps { tsval: be32(ts, 0), tsecr: be32(ts, 4) })
    }

    /// The payload.
    #[inline(always)]
    #[must_use]
    pub const fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// The IP header's checksum is right. True for IPv6, which has none.
    #[inline(always)]
    #[must_use]
    pub fn is_header_ok(&self) -> bool {
        match self.ip {
            Header::V4(h) => ip::is_intact(h),
            Header::V6(_) => true,
        }
    }

    /// The TCP checksum, pseudo-header included, is right (COM-13).
    #[inline(never)] // nearly always somebody vouches for it
    #[must_use]
    pub fn is_checksum_ok(self) -> bool {
        let len = u32::try_from(self.segment.len()).unwrap_or(u32::MAX);
        let pseudo = match self.ip {
            Header::V4(h) => {
                pseudo_header_v4(array(&h[12..16]), array(&h[16..20]), PROTOCOL_TCP, len)
            }
            Header::V6(h) => {
                pseudo_header_v6(array(&h[8..24]), array(&h[24..40]), PROTOCOL_TCP, len)
            }
        };
        let mut sum = Checksum::new(pseudo);
        sum.add_bytes(self.segment);
        sum.finish() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::packet::{Packet, ipv4_header_ok, tcp_checksum_ok};
    use crate::wire::samples::{v4_segment, v6_segment};
    use proptest::prelude::*;

    proptest! {
        /// Frames with tags, with wrong bytes in the headers, and cut short.
        #[test]
        fn what_is_plain_is_what_the_parser_sees(
            v6 in any::<bool>(),
            tagged in any::<bool>(),
            wrong in prop::collection::vec((12_usize..90, any::<u8>()), 0..3),
            cut in prop_oneof![3 => Just(usize::MAX), 1 => 0..120_usize],
        ) {
            let mut segment = if v6 { v6_segment(b"payload") } else { v4_segment(b"payload") };
            if tagged {
                segment.l2.splice(12..12, [0x81, 0x00, 0, 7]);
            }
            let mut frame = segment.frame();
            for (at, byte) in wrong {
                if let Some(b) = frame.get_mut(at) {
                    *b = byte;
                }
            }
            frame.truncate(cut);
            let Ok(packet) = Packet::parse(&frame) else {
                prop_assert!(Plain::read(&frame, 14).is_none());
                return Ok(());
            };
            let eth = packet.eth;
            prop_assert!(eth.vlan.is_empty() || Plain::read(&frame, 14).is_none());
            let Some(plain) = Plain::read(&frame, eth.len.into()) else { return Ok(()) };
            let (ip, tcp) = packet.tcp().unwrap();
            prop_assert_eq!(tcp.flags.without(TcpFlags::PSH), TcpFlags::ACK);
            prop_assert!(tcp.options.understood() && tcp.options.sack.is_empty() && !ip.options);
            let read = (plain.seq(), plain.ack(), plain.window(), plain.timestamps());
            prop_assert_eq!(read, (tcp.seq, tcp.ack, tcp.window, tcp.options.timestamps));
            let read = (plain.tos(), plain.ttl(), plain.flow_label());
            prop_assert_eq!(read, (ip.tos, ip.ttl, ip.flow_label));
            prop_assert_eq!(plain.l2(), &frame[..eth.len.into()]);
            let payload = &frame[tcp.payload_offset as usize..][..tcp.payload_len as usize];
            prop_assert_eq!(plain.payload(), payload);
            prop_assert_eq!(plain.is_header_ok(), ipv4_header_ok(&frame, ip));
            prop_assert_eq!(plain.is_checksum_ok(), tcp_checksum_ok(&frame, ip, tcp));
        }
    }

    #[test]
    fn usual_data_is_plain_and_more_is_not() {
        for (ip, segment) in [(20, v4_segment(b"payload")), (40, v6_segment(b"payload"))] {
            let mut frame = segment.frame();
            let plain = Plain::read(&frame, 14).expect("data with timestamps");
            assert_eq!(plain.payload(), b"payload");
            frame[14 + ip + 13] |= 1; // FIN
            assert!(Plain::read(&frame, 14).is_none());
        }
    }
}
