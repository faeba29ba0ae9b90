//! The headers of the frames that pass at both sides of a VM's port, as a pcapng stream
//! (draft-ietf-opsawg-pcapng): what the data path writes for the monitor.
//!
//! The stream has two interfaces, in the order of [`Side`]. Each frame has the direction in which
//! it passed the host there: inbound or outbound (`epb_flags`). So every reader of pcapng shows
//! it, and the monitor gets what it asks for. The log is bounded: a reader that is too slow misses
//! frames, which an Interface Statistics Block says (`isb_ifdrop`, of both sides together). It
//! never waits.

use super::{Side, Way};
use crate::limits::MONITOR_LOG_BYTES;
use crate::time::Instant;

/// Bytes of a frame that are kept: Ethernet with two tags, IPv6 and TCP with all options are 122.
/// Of a frame with extension headers or IP options the rest is not read.
pub const HEAD: usize = 122;
/// `HEAD`, padded to 32 bits.
const PADDED: usize = HEAD.next_multiple_of(4);
/// An Enhanced Packet Block with so many bytes of a frame, and `epb_flags`.
const BLOCK: usize = 28 + PADDED + 16;
/// `epb_flags` of a frame that comes into the host there, and of one that leaves it.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;
/// Names of the interfaces, in their order.
const NAMES: [&[u8]; 2] = [b"network", b"guest"];

/// See the module doc.
#[derive(Clone, Debug)]
pub struct Log {
    /// Wall-clock nanoseconds at instant zero.
    epoch_ns: u64,
    bytes: Vec<u8>,
    missed: u64,
    /// As of the last statistics.
    missed_told: u64,
}

impl Log {
    /// Begins with the stream's head. `epoch_ns`: nanoseconds since 1970 at instant zero.
    #[must_use]
    pub fn new(epoch_ns: u64) -> Self {
        let mut bytes = Vec::new();
        // Version 1.0, of unknown length.
        let version = [0x1a2b_3c4d, 1, u32::MAX, u32::MAX];
        block(&mut bytes, 0x0a0d_0d0a, &version.map(u32::to_le_bytes).concat());
        for name in NAMES {
            let head = u32::try_from(HEAD).unwrap_or_default();
            let mut body = [1_u32.to_le_bytes(), head.to_le_bytes()].concat(); // Ethernet
            option(&mut body, 2, name);
            option(&mut body, 9, &[9]); // nanoseconds
            option(&mut body, 0, &[]);
            block(&mut bytes, 1, &body);
        }
        Self { epoch_ns, bytes, missed: 0, missed_told: 0 }
    }

    /// Frames that found the log full.
    #[must_use]
    pub const fn missed(&self) -> u64 {
        self.missed
    }

    /// Keeps the headers of a frame, which is given in pieces.
    #[inline]
    pub fn push(&mut self, at: Instant, place: (Side, Way), parts: &[&[u8]]) {
        if self.bytes.len() + BLOCK > MONITOR_LOG_BYTES {
            self.missed += 1;
            return;
        }
        let len = parts.iter().map(|part| part.len()).sum();
        match parts.first().and_then(|part| part.first_chunk()) {
            Some(head) => self.write(at, place, head, HEAD, len),
            None => self.push_short(at, place, parts, len),
        }
    }

    /// [`Self::push`] of a frame, or a first piece, that is shorter than what is kept.
    fn push_short(&mut self, at: Instant, place: (Side, Way), parts: &[&[u8]], len: usize) {
        let (mut head, mut kept) = ([0; HEAD], 0);
        for part in parts {
            let some = part.len().min(HEAD - kept);
            head[kept..kept + some].copy_from_slice(&part[..some]);
            kept += some;
        }
        self.write(at, place, &head, kept, len);
    }

    /// Writes an Enhanced Packet Block with `kept` bytes of `head`.
    #[inline]
    fn write(
        &mut self,
        at: Instant,
        (side, way): (Side, Way),
        head: &[u8; HEAD],
        kept: usize,
        len: usize,
    ) {
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let half = |half: u64| u32::try_from(half & u64::from(u32::MAX)).unwrap_or_default();
        let ns = self.epoch_ns.saturating_add(at.as_nanos());
        let end = 28 + kept.next_multiple_of(4);
        let size = small(end + 16);
        let direction = if way.comes_at(side) { INBOUND } else { OUTBOUND };
        let mut block = [0; BLOCK];
        let mut words = |at: usize, words: &[u32]| {
            for (to, word) in block[at..].chunks_exact_mut(4).zip(words) {
                to.copy_from_slice(&word.to_le_bytes());
            }
        };
        words(0, &[6, size, side as u32, half(ns >> 32), half(ns), small(kept), small(len)]);
        // The option `epb_flags` of four bytes, no more options, and the block's length again.
        words(end, &[2 | 4 << 16, direction, 0, size]);
        block[28..28 + kept].copy_from_slice(&head[..kept]);
        self.bytes.extend_from_slice(&block[..end + 16]);
    }

    /// Takes what there is of the stream since the last time.
    pub fn take(&mut self) -> Vec<u8> {
        if self.missed != self.missed_told {
            self.missed_told = self.missed;
            let mut body = [0; 12].to_vec(); // interface 0, no time
            option(&mut body, 5, &self.missed.to_le_bytes());
            option(&mut body, 0, &[]);
            block(&mut self.bytes, 5, &body);
        }
        let again = Vec::with_capacity(self.bytes.len());
        std::mem::replace(&mut self.bytes, again)
    }
}

/// Appends a block.
fn block(to: &mut Vec<u8>, kind: u32, body: &[u8]) {
    let len = u32::try_from(12 + body.len()).unwrap_or(u32::MAX);
    to.extend([kind, len].map(u32::to_le_bytes).as_flattened());
    to.extend(body);
    to.extend(len.to_le_bytes());
}

/// Appends an option.
fn option(to: &mut Vec<u8>, code: u16, value: &[u8]) {
    let len = u16::try_from(value.len()).unwrap_or(u16::MAX);
    to.extend([code, len].map(u16::to_le_bytes).as_flattened());
    to.extend(value);
    to.resize(to.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;
    use std::borrow::Cow;

    use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
    use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
    use pcap_file::pcapng::{Block, PcapNgReader};

    const EPOCH_NS: u64 = 1_700_000_000_123_456_789;

    #[test]
    fn another_implementation_reads_the_frames_their_times_sides_and_directions() {
        let mut log = Log::new(EPOCH_NS);
        let at = Instant::from_millis(7);
        log.push(at, (Side::Guest, Way::FromGuest), &[&[1; 60], &[], &[2; 9000]]);
        log.push(at, (Side::Net, Way::FromGuest), &[&[3; 61]]);
        log.push(at, (Side::Net, Way::ToGuest), &[&[4; HEAD]]);
        let mut bytes = log.take();
        log.push(at, (Side::Guest, Way::ToGuest), &[]);
        bytes.extend(log.take()); // a stream goes on
        let mut reader = PcapNgReader::new(&bytes[..]).unwrap();
        let mut frames = Vec::new();
        while let Some(block) = reader.next_block() {
            let Block::EnhancedPacket(it) = block.unwrap() else { continue };
            let [EnhancedPacketOption::Flags(flags)] = it.options[..] else { panic!("{it:?}") };
            let since = it.timestamp.as_nanos() - u128::from(EPOCH_NS);
            assert_eq!(since, u128::from(Duration::from_millis(7).as_nanos()));
            frames.push((it.interface_id, flags, it.data.to_vec(), it.original_len));
        }
        let long = [&[1; 60][..], &[2; HEAD - 60]].concat();
        let expected = [
            (1, INBOUND, long, 9060),
            (0, OUTBOUND, vec![3; 61], 61),
            (0, INBOUND, vec![4; HEAD], 122),
            (1, OUTBOUND, Vec::new(), 0),
        ];
        assert_eq!(frames, expected);
        let names = reader.interfaces().iter().map(|it| match &it.options[0] {
            InterfaceDescriptionOption::IfName(name) => name.clone(),
            other => panic!("{other:?}"),
        });
        assert_eq!(names.collect::<Vec<Cow<'_, str>>>(), ["network", "guest"]);
    }

    #[test]
    fn a_full_log_counts_what_it_misses_says_so_and_takes_more_when_it_was_read() {
        let mut log = Log::new(0);
        let place = (Side::Guest, Way::ToGuest);
        let room = (MONITOR_LOG_BYTES - log.bytes.len()) / BLOCK;
        (0..room + 3).for_each(|_| log.push(Instant::ZERO, place, &[&[0; 9000]]));
        assert_eq!(log.missed(), 3);
        let mut bytes = log.take();
        assert!(bytes.len() <= MONITOR_LOG_BYTES + 44, "{}", bytes.len());
        log.push(Instant::ZERO, place, &[&[0; 9000]]);
        bytes.extend(log.take());
        let mut reader = PcapNgReader::new(&bytes[..]).unwrap();
        let (mut frames, mut missed) = (0, Vec::new());
        while let Some(block) = reader.next_block() {
            match block.unwrap() {
                Block::EnhancedPacket(_) => frames += 1,
                Block::InterfaceStatistics(it) => missed.push(it.into_owned()),
                _ => {}
            }
        }
        assert_eq!((frames, missed.len()), (room + 1, 1), "told once");
        assert!(format!("{:?}", missed[0].options).contains("3"), "{missed:?}");
    }
}
