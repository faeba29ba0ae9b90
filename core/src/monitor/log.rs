//! The data path's log for the monitor: the headers, time and place of each frame.
//!
//! The data path appends, another reader takes. A full log misses frames and counts them; it never
//! waits.

use super::{Side, Way};
use crate::limits::MONITOR_LOG_FRAMES;
use crate::time::Instant;

/// Bytes of a frame that are kept: Ethernet with two tags, IPv6 and TCP with all options are 122.
/// Of a frame with extension headers or IP options the rest is not read.
pub const HEAD: usize = 122;

/// The headers of a frame.
#[derive(Clone, Debug)]
pub struct Entry {
    /// When it passed.
    pub at: Instant,
    /// Its bytes.
    pub len: u32,
    /// The VM's number.
    pub vm: u16,
    /// Where it passed.
    pub side: Side,
    /// In which direction.
    pub way: Way,
    head: [u8; HEAD],
}

impl Entry {
    /// The frame's first bytes.
    #[must_use]
    pub fn head(&self) -> &[u8] {
        &self.head[..HEAD.min(self.len as usize)]
    }
}

/// See the module doc.
#[derive(Clone, Debug)]
pub struct Log {
    entries: Vec<Entry>,
    missed: u64,
}

impl Default for Log {
    fn default() -> Self {
        Self { entries: Vec::with_capacity(MONITOR_LOG_FRAMES), missed: 0 }
    }
}

impl Log {
    /// Frames that found the log full.
    #[must_use]
    pub const fn missed(&self) -> u64 {
        self.missed
    }

    /// Keeps the headers of a frame.
    #[inline]
    pub fn push(&mut self, at: Instant, vm: u16, (side, way): (Side, Way), frame: &[u8]) {
        if self.entries.len() == self.entries.capacity() {
            self.missed += 1;
            return;
        }
        let head = match frame.first_chunk() {
            Some(head) => *head,
            None => {
                let mut head = [0; HEAD];
                head[..frame.len()].copy_from_slice(frame);
                head
            }
        };
        let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        self.entries.push(Entry { at, len, vm, side, way, head });
    }

    /// Takes the frames, the oldest first.
    pub fn drain(&mut self) -> impl Iterator<Item = Entry> {
        self.entries.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_log_counts_what_it_misses_and_takes_more_when_it_was_read() {
        let mut log = Log::default();
        let place = (Side::Guest, Way::ToGuest);
        for n in 0..MONITOR_LOG_FRAMES + 3 {
            log.push(Instant::from_millis(n as u64), 7, place, &[n.to_le_bytes()[0]; 60]);
        }
        assert_eq!((log.missed(), log.drain().count()), (3, MONITOR_LOG_FRAMES));
        log.push(Instant::ZERO, 7, place, &[9; 9000]);
        let entry = log.drain().next().unwrap();
        assert_eq!((entry.head(), entry.len, entry.vm), (&[9; HEAD][..], 9000, 7));
    }
}
