//! Frames that wait for a guest to post receive buffers; the counterpart of a tap's transmit queue.

use std::collections::VecDeque;

use crate::limits::BACKLOG_BYTES_MAX;
use crate::wire::virtio_net::VirtioNetHdr;

/// A bounded first-in first-out queue of frames.
#[derive(Debug)]
pub struct Backlog {
    frames: VecDeque<(VirtioNetHdr, Box<[u8]>)>,
    frames_max: usize,
    bytes: usize,
}

impl Backlog {
    /// For so many frames, and [`BACKLOG_BYTES_MAX`] or what all queues together leave free.
    #[must_use]
    pub fn new(frames_max: usize) -> Self {
        Self { frames: VecDeque::new(), frames_max, bytes: 0 }
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Bytes waiting.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a copy of a frame, for which all queues together have `free` bytes; `false` if the
    /// queue is full.
    pub fn push(&mut self, hdr: &VirtioNetHdr, parts: &[&[u8]], free: usize) -> bool {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        let bytes_max = BACKLOG_BYTES_MAX.min(free);
        if self.frames.len() >= self.frames_max || self.bytes + len > bytes_max {
            return false;
        }
        self.bytes += len;
        self.frames.push_back((*hdr, parts.concat().into_boxed_slice()));
        true
    }

    /// Takes out the frame that has waited longest.
    pub fn pop(&mut self) -> Option<(VirtioNetHdr, Box<[u8]>)> {
        let (hdr, frame) = self.frames.pop_front()?;
        self.bytes -= frame.len();
        Some((hdr, frame))
    }

    /// Puts a frame back where [`Self::pop`] took it from.
    pub fn put_back(&mut self, hdr: VirtioNetHdr, frame: Box<[u8]>) {
        self.bytes += frame.len();
        self.frames.push_front((hdr, frame));
    }

    /// Drops all other frames, and returns how many.
    pub fn retain(&mut self, keeps: impl Fn(&[u8]) -> bool) -> usize {
        let before = self.frames.len();
        self.frames.retain(|(_, frame)| keeps(frame));
        self.bytes = self.frames.iter().map(|(_, frame)| frame.len()).sum();
        before - self.frames.len()
    }

    /// Drops all frames, and returns how many there were.
    pub fn clear(&mut self) -> usize {
        let count = self.frames.len();
        *self = Self::new(self.frames_max);
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMES_MAX: usize = 1000;
    const FREE: usize = usize::MAX;

    #[test]
    fn frames_come_out_in_order_and_count_their_bytes() {
        let mut b = Backlog::new(FRAMES_MAX);
        assert!(b.push(&VirtioNetHdr::default(), &[b"ab", b"c"], FREE));
        assert!(b.push(&VirtioNetHdr::default(), &[b"defg"], FREE));
        let (hdr, first) = b.pop().unwrap();
        assert_eq!((b.bytes(), &*first), (4, &b"abc"[..]));
        b.put_back(hdr, first);
        assert_eq!(b.bytes(), 7);
        assert_eq!(&*b.pop().unwrap().1, b"abc");
        assert_eq!(b.clear(), 1);
        assert!(b.is_empty() && b.bytes() == 0 && b.pop().is_none());
    }

    #[test]
    fn the_queue_is_bounded_in_frames_and_in_bytes() {
        let mut b = Backlog::new(FRAMES_MAX);
        for _ in 0..FRAMES_MAX {
            assert!(b.push(&VirtioNetHdr::default(), &[&[0; 60]], FREE));
        }
        assert!(!b.push(&VirtioNetHdr::default(), &[&[0; 60]], FREE));
        b.clear();
        let big = vec![0; 65_000];
        let fit = (0..FRAMES_MAX).take_while(|_| b.push(&VirtioNetHdr::default(), &[&big], FREE));
        assert_eq!(fit.count(), BACKLOG_BYTES_MAX / 65_000);
        assert!(b.push(&VirtioNetHdr::default(), &[&[0; 60]], FREE), "a small one still fits");
    }
}
