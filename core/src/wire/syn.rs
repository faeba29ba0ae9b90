//! Builds a SYN or SYN-ACK from nothing.

use super::checksum::update16;
use super::emit::{CsumMode, HEADER_MAX, TcpEmit};
use super::tcp::{
    CHECKSUM_AT, FLAGS_AT, HEADER, KIND_MSS, KIND_NOP, KIND_SACK_PERMITTED, KIND_TIMESTAMPS,
    KIND_WINDOW_SCALE,
};
use super::{be16, small};

/// Most bytes of the options that are offered.
const OPTIONS_MAX: usize = 20;

/// A segment that opens a connection, with the options that only such segments have.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SynEmit<'a> {
    /// The rest of it, timestamps included. It has no SACK blocks.
    pub segment: TcpEmit<'a>,
    /// The maximum segment size, if it is offered.
    pub mss: Option<u16>,
    /// The window scale, if it is offered.
    pub window_scale: Option<u8>,
    /// SACK is permitted.
    pub sack_permitted: bool,
}

impl SynEmit<'_> {
    /// Writes the frame to the start of `buf` and returns its length. It is no longer than any with
    /// the same options (ACC-15).
    pub fn emit(&self, buf: &mut [u8; HEADER_MAX]) -> usize {
        let mut space = [0; OPTIONS_MAX];
        let options = self.options(&mut space);
        // First as if the options were payload; then they become a part of the header.
        let bare = TcpEmit { timestamps: None, sack: &[], ..self.segment };
        let len = bare.emit(buf, options.len(), CsumMode::Full(&[options]));
        buf[len..len + options.len()].copy_from_slice(options);
        let tcp = &mut buf[len - HEADER..];
        let (old, check) = (be16(tcp, FLAGS_AT), be16(tcp, CHECKSUM_AT));
        let new = old + (small(options.len() / 4) << 12);
        tcp[FLAGS_AT..FLAGS_AT + 2].copy_from_slice(&new.to_be_bytes());
        let check = update16(check, old, new);
        tcp[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&check.to_be_bytes());
        len + options.len()
    }

    /// The options, in Linux's order (`tcp_options_write`, 6.18).
    fn options<'b>(&self, space: &'b mut [u8; OPTIONS_MAX]) -> &'b [u8] {
        let mut len = 0;
        let mut put = |bytes: &[u8]| {
            space[len..len + bytes.len()].copy_from_slice(bytes);
            len += bytes.len();
        };
        if let Some(mss) = self.mss {
            let [high, low] = mss.to_be_bytes();
            put(&[KIND_MSS, 4, high, low]);
        }
        let timestamps = self.segment.timestamps;
        match (self.sack_permitted, timestamps.is_some()) {
            (true, true) => put(&[KIND_SACK_PERMITTED, 2]),
            (true, false) => put(&[KIND_NOP, KIND_NOP, KIND_SACK_PERMITTED, 2]),
            (false, true) => put(&[KIND_NOP, KIND_NOP]),
            (false, false) => {}
        }
        if let Some(ts) = timestamps {
            put(&[KIND_TIMESTAMPS, 10]);
            put(&ts.tsval.to_be_bytes());
            put(&ts.tsecr.to_be_bytes());
        }
        if let Some(shift) = self.window_scale {
            put(&[KIND_NOP, KIND_WINDOW_SCALE, 3, shift]);
        }
        &space[..len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::packet::{Packet, Seq, TcpFlags, Timestamps, ipv4_header_ok, tcp_checksum_ok};
    use crate::wire::samples::{v4_segment, v6_segment};
    use etherparse::{TcpHeaderSlice, TcpOptionElement};

    /// All combinations of options, by IPv4 and IPv6.
    fn all() -> impl Iterator<Item = (usize, bool, Vec<u8>)> {
        (0..32_u8).map(|bits| {
            let has = |bit: u8| bits & bit != 0;
            let mut s = if has(16) { v4_segment(b"") } else { v6_segment(b"") };
            s.flags = TcpFlags::SYN | TcpFlags::ACK;
            s.timestamps = has(1).then_some(Timestamps { tsval: 7, tsecr: 9 });
            let syn = SynEmit {
                segment: s.emit(),
                mss: has(2).then_some(1460),
                window_scale: has(4).then_some(7),
                sack_permitted: has(8),
            };
            let mut buf = [0xee; HEADER_MAX];
            let len = syn.emit(&mut buf);
            let sizes = [(1, 10), (2, 4), (4, 3), (8, 2)];
            let least: usize = sizes.iter().filter(|(bit, _)| has(*bit)).map(|(_, n)| n).sum();
            (s.l4_at() + HEADER + least.next_multiple_of(4), has(8), buf[..len].to_vec())
        })
    }

    #[test]
    fn acc_15_no_frame_with_the_same_options_is_shorter() {
        for (least, _, frame) in all() {
            assert_eq!(frame.len(), least);
        }
    }

    #[test]
    fn other_parsers_read_what_was_offered() {
        for (_, sack_permitted, frame) in all() {
            let packet = Packet::parse(&frame).expect("a frame");
            let (ip, tcp) = packet.tcp().expect("a segment");
            assert!(ipv4_header_ok(&frame, ip) && tcp_checksum_ok(&frame, ip, tcp));
            assert_eq!((tcp.payload_len, ip.end as usize), (0, frame.len()));
            assert_eq!((tcp.seq, tcp.ack, tcp.window), (Seq(1), Seq(1), 512));
            assert_eq!(tcp.options.sack_permitted, sack_permitted);
            assert!(tcp.options.understood());
            let l4 = usize::from(ip.payload_offset);
            let read = TcpHeaderSlice::from_slice(&frame[l4..]).expect("a header");
            let options: Vec<_> = read.options_iterator().map(|o| o.expect("sane")).collect();
            let has = |option| options.contains(&option);
            assert_eq!(has(TcpOptionElement::MaximumSegmentSize(1460)), tcp.options.mss.is_some());
            let shift = tcp.options.window_scale;
            assert_eq!(has(TcpOptionElement::WindowScale(7)), shift.is_some());
            assert_eq!(has(TcpOptionElement::Timestamp(7, 9)), tcp.options.timestamps.is_some());
        }
    }
}
