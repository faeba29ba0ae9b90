//! Defaults for a plan that was written before a choice existed.

use nightporter_core::limits::FLOWS_PER_STEP;

/// As many as the daemon keeps.
pub(crate) fn backlog_frames() -> usize {
    1000
}

/// As the daemon: more than any world has.
pub(crate) const fn flows_per_step() -> u32 {
    FLOWS_PER_STEP
}
