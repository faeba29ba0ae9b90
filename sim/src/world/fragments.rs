//! IP fragments: a guest sends them past a parser that wants whole segments, and its peer
//! reassembles them (RFC 791 section 3.2, without overlapping holes, which no machine here sends).

use std::collections::BTreeMap;

use nightporter_check::frame::Frame;

/// Bytes before an IPv4 packet.
const ETHERNET: usize = 14;
/// More fragments follow; must not be fragmented.
const MORE: u16 = 0x2000;
const WHOLE: u16 = 0x4000;
/// Fragments of so many packets are kept.
const PACKETS_MAX: usize = 64;

/// Packets that are not complete, by source and identification.
#[derive(Debug, Default)]
pub(super) struct Fragments(BTreeMap<([u8; 4], u16), Vec<Frame>>);

fn is_v4(bytes: &[u8]) -> bool {
    bytes.len() >= ETHERNET + 20 && bytes[12..15] == [8, 0, 0x45]
}

fn field(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[ETHERNET + at], bytes[ETHERNET + at + 1]])
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[ETHERNET + at..ETHERNET + at + 2].copy_from_slice(&value.to_be_bytes());
}

/// Sets length and fragment field, and the header checksum that goes with them.
fn finish(bytes: &mut [u8], fragment: u16) {
    let len = u16::try_from(bytes.len() - ETHERNET).unwrap_or(u16::MAX);
    put(bytes, 2, len);
    put(bytes, 6, fragment);
    put(bytes, 10, 0);
    let words = (0..10).map(|n| u32::from(field(bytes, 2 * n)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    put(bytes, 10, !u16::try_from(sum).unwrap_or(0));
}

/// The two halves of a plain IPv4 frame; another frame, or a short one, stays whole.
pub(super) fn split(frame: Frame) -> Vec<Frame> {
    let bytes = &frame.bytes;
    if !is_v4(bytes) || field(bytes, 6) & !WHOLE != 0 {
        return vec![frame];
    }
    let end = (ETHERNET + usize::from(field(bytes, 2))).min(bytes.len());
    let payload = &bytes[ETHERNET + 20..end];
    let first = payload.len() / 2 / 8 * 8;
    if first == 0 {
        return vec![frame];
    }
    let piece = |part: &[u8], fragment: u16| {
        let mut bytes = [&bytes[..ETHERNET + 20], part].concat();
        finish(&mut bytes, fragment);
        Frame::on_wire(bytes)
    };
    let offset = u16::try_from(first / 8).unwrap_or(0);
    vec![piece(&payload[..first], MORE), piece(&payload[first..], offset)]
}

impl Fragments {
    /// The result of a frame at a receiver: itself, nothing yet, or the packet that it completes.
    pub(super) fn take(&mut self, frame: Frame) -> Option<Frame> {
        if !is_v4(&frame.bytes) || field(&frame.bytes, 6) & !WHOLE == 0 {
            return Some(frame);
        }
        let source = frame.bytes[ETHERNET + 12..ETHERNET + 16].try_into().unwrap_or([0; 4]);
        let key = (source, field(&frame.bytes, 4));
        let parts = self.0.entry(key).or_default();
        parts.push(frame);
        parts.sort_by_key(|f| field(&f.bytes, 6) & 0x1fff);
        parts.dedup_by_key(|f| field(&f.bytes, 6));
        let mut whole = parts[0].bytes[..ETHERNET + 20].to_vec();
        let mut ended = false;
        for part in parts.iter() {
            let at = usize::from(field(&part.bytes, 6) & 0x1fff) * 8;
            if at + ETHERNET + 20 != whole.len() {
                break;
            }
            let end = (ETHERNET + usize::from(field(&part.bytes, 2))).min(part.bytes.len());
            // A broken one may say that it is shorter than its header.
            whole.extend(part.bytes.get(ETHERNET + 20..end).unwrap_or_default());
            ended = field(&part.bytes, 6) & MORE == 0;
        }
        if !ended {
            if self.0.len() > PACKETS_MAX {
                self.0.pop_first();
            }
            return None;
        }
        self.0.remove(&key);
        finish(&mut whole, 0);
        Some(Frame::on_wire(whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nightporter_check::wire::{Packet, ipv4_header_ok, tcp_checksum_ok};
    use nightporter_check::wire::{Segment, build};

    #[test]
    fn halves_come_together_again_in_any_order_and_with_right_checksums() {
        let s =
            Segment { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), ..Segment::default() };
        let frame = Frame::on_wire(build(&s, &[7; 1001]));
        for order in [[0, 1], [1, 0]] {
            let halves = split(frame.clone());
            assert_eq!(halves.len(), 2);
            let mut fragments = Fragments::default();
            assert_eq!(fragments.take(halves[order[0]].clone()), None);
            let whole = fragments.take(halves[order[1]].clone()).expect("complete");
            let packet = Packet::parse(&whole.bytes).expect("a packet");
            let (ip, tcp) = packet.tcp().expect("TCP");
            assert!(ipv4_header_ok(&whole.bytes, ip) && tcp_checksum_ok(&whole.bytes, ip));
            assert_eq!(tcp.payload_len, 1001);
        }
        assert_eq!(Fragments::default().take(frame.clone()), Some(frame));
    }
}
