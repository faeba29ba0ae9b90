//! Counters of a port.

use nightporter_core::drops::DropReason;

/// What went through a port. `from_port`: it entered the switch there; `to_port`: it left there.
#[derive(Clone, Debug, Default)]
pub struct PortStats {
    /// Frames read from the port. A super-segment is one frame.
    pub frames_from_port: u64,
    /// Their bytes, from the Ethernet header on.
    pub bytes_from_port: u64,
    /// Frames handed to the port.
    pub frames_to_port: u64,
    /// Their bytes.
    pub bytes_to_port: u64,
    drops: [u64; DropReason::ALL.len()],
}

impl PortStats {
    /// Counts a frame that entered the switch.
    pub fn count_from_port(&mut self, bytes: usize) {
        self.frames_from_port += 1;
        self.bytes_from_port += bytes as u64;
    }

    /// Counts a frame that left the switch.
    pub fn count_to_port(&mut self, bytes: usize) {
        self.frames_to_port += 1;
        self.bytes_to_port += bytes as u64;
    }

    /// Counts `n` dropped frames.
    pub fn count_drops(&mut self, reason: DropReason, n: u64) {
        self.drops[reason as usize] += n;
    }

    /// Frames dropped for `reason`.
    #[must_use]
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }
}
