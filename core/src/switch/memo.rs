//! The switch's latest answers: the packet path asks the same few questions again and again.

use crate::port::PortId;
use crate::time::{Duration, Instant};

/// Answers kept; a power of two.
const ANSWERS: usize = 64;
/// How long an answer is used. Every change of the MAC table forgets them all, so this only
/// bounds how late a MAC is noted as seen.
const FRESH: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
struct Answer {
    key: u64,
    port: PortId,
    until: Instant,
}

/// A direct-mapped memory of (VLAN, MAC) to port.
#[derive(Debug)]
pub(super) struct Memo([Answer; ANSWERS]);

impl Memo {
    pub(super) const fn new() -> Self {
        Self([Answer { key: 0, port: PortId(0), until: Instant::ZERO }; ANSWERS])
    }

    /// The port found for `key` within the last second.
    #[inline]
    pub(super) fn recall(&self, now: Instant, key: u64) -> Option<PortId> {
        let answer = &self.0[place(key)];
        (answer.key == key && now < answer.until).then_some(answer.port)
    }

    /// Remembers an answer that holds until `expiry` at most.
    pub(super) fn note(&mut self, now: Instant, key: u64, port: PortId, expiry: Instant) {
        let until = expiry.min(now + FRESH);
        self.0[place(key)] = Answer { key, port, until };
    }

    pub(super) fn forget(&mut self) {
        *self = Self::new();
    }
}

/// Neighbouring MACs differ in their last bytes, bits 32 to 47, and VLANs in the bits above.
const fn place(key: u64) -> usize {
    let [low, ..] = (key >> 48 ^ key >> 40 ^ key >> 32).to_le_bytes();
    low as usize % ANSWERS
}
