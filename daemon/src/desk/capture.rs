//! A copy of a port's frames for an operator: pcap records in a bounded buffer.

use std::time::{SystemTime, UNIX_EPOCH};

use nightporter_core::time::Instant;

/// Bytes of records that may wait for a slow reader; then frames are missed, and counted. A reader
/// that loses its processor for 100 ms misses none at 2.6 Gbit/s. Taken only while it is slow.
pub(super) const BUFFER_BYTES_MAX: usize = 32 << 20;
/// Nanosecond pcap, as its first four bytes in host order say (draft-ietf-opsawg-pcap, section 4).
const MAGIC_NS: u32 = 0xa1b2_3c4d;
/// Larger than any super-segment.
const SNAPLEN: u32 = 262_144;
/// LINKTYPE_ETHERNET.
const LINKTYPE: u32 = 1;

/// The 24 bytes a pcap file starts with.
fn file_header() -> Vec<u8> {
    let mut h = Vec::with_capacity(24);
    h.extend(MAGIC_NS.to_le_bytes());
    h.extend(2u16.to_le_bytes());
    h.extend(4u16.to_le_bytes());
    h.extend([0; 8]);
    h.extend(SNAPLEN.to_le_bytes());
    h.extend(LINKTYPE.to_le_bytes());
    h
}

/// Frames of one port on their way to one client.
#[derive(Debug)]
pub(super) struct Capture {
    /// Wall-clock nanoseconds at instant zero: monotonic time alone means nothing in a file.
    epoch_ns: u64,
    buffer: Vec<u8>,
    /// Frames that found the buffer full.
    pub(super) missed: u64,
}

impl Capture {
    /// Starts at `now`, which is the wall clock's now.
    #[must_use]
    pub(super) fn new(now: Instant) -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_ns = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX);
        let epoch_ns = wall_ns.saturating_sub(now.as_nanos());
        Self { epoch_ns, buffer: file_header(), missed: 0 }
    }

    /// Starts one that gives a moment the same time as `other` does: what captures of two ports
    /// say can then be put in order, turn by turn.
    #[must_use]
    pub(super) fn beside(other: &Self) -> Self {
        Self { epoch_ns: other.epoch_ns, buffer: file_header(), missed: 0 }
    }

    /// Records one frame, given in pieces.
    pub(super) fn record(&mut self, now: Instant, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        if self.buffer.len() + 16 + len > BUFFER_BYTES_MAX {
            self.missed += 1;
            return;
        }
        let ns = self.epoch_ns.saturating_add(now.as_nanos());
        let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
        self.buffer.extend(small(ns / 1_000_000_000));
        self.buffer.extend(small(ns % 1_000_000_000));
        self.buffer.extend(small(len as u64));
        self.buffer.extend(small(len as u64));
        for part in parts {
            self.buffer.extend_from_slice(part);
        }
    }

    /// What was written since the last call; first of all the file's header.
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }
}

#[cfg(test)]
mod tests {
    use pcap_file::pcap::PcapReader;

    use super::*;

    #[test]
    fn another_implementation_reads_what_is_written() {
        let start = Instant::from_millis(7);
        let mut capture = Capture::new(start);
        capture.record(start, &[b"headers", b"payload"]);
        capture.record(Instant::from_millis(9), &[&[0x55; 65_000]]);
        let file = capture.take();
        let mut reader = PcapReader::new(&file[..]).unwrap();
        let first = reader.next_packet().unwrap().unwrap().into_owned();
        let second = reader.next_packet().unwrap().unwrap().into_owned();
        assert_eq!(&first.data[..], b"headerspayload");
        assert_eq!((second.data.len(), second.orig_len), (65_000, 65_000));
        assert_eq!((second.timestamp - first.timestamp).as_micros(), 2000);
        assert!(reader.next_packet().is_none());
    }

    #[test]
    fn captures_that_run_together_give_a_moment_the_same_time() {
        let mut first = Capture::new(Instant::from_millis(7));
        let mut second = Capture::beside(&first);
        for capture in [&mut first, &mut second] {
            capture.record(Instant::from_millis(9), &[b"a frame"]);
        }
        assert_eq!(first.take(), second.take());
    }

    #[test]
    fn a_full_buffer_misses_whole_frames() {
        let mut capture = Capture::new(Instant::ZERO);
        let frames = BUFFER_BYTES_MAX / 65_016 + 3;
        for _ in 0..frames {
            capture.record(Instant::ZERO, &[&[0; 65_000]]);
        }
        assert_eq!(capture.missed, 3);
        assert_eq!(capture.take().len(), 24 + (frames - 3) * 65_016);
    }
}
