//! Of VMs whose taps are attached.

use serde::{Deserialize, Serialize};

/// A VM's tap, since it was attached (docs/taps.md).
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct AttachedStatus {
    /// Frames of the VM that passed the daemon by, because it was away.
    pub plain_from_vm: u64,
    /// And those for the VM.
    pub plain_to_vm: u64,
    /// Frames of the VM that were lost, because the daemon did not take them in time.
    pub lost_from_vm: u64,
    /// And those for the VM.
    pub lost_to_vm: u64,
    /// Frames that its VMM has yet to read.
    pub queue_frames: u64,
    /// Their bytes.
    pub queue_bytes: u64,
    /// The most frames that the daemon puts there.
    pub window_frames: u64,
    /// And the most bytes.
    pub window_bytes: u64,
    /// Times that it was left plain for a while, because the worker was away often.
    #[serde(default)]
    pub back_offs: u64,
    /// It is plain for so long, or will be when its connections owe nothing.
    #[serde(default)]
    pub plain_for_ms: Option<u64>,
}

/// A bridge whose taps are attached.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct BridgeStatus {
    /// Its name.
    pub bridge: String,
    /// Its taps that are VMs of this daemon, or are about to be.
    pub taps: Vec<String>,
    /// Its other ports.
    pub skipped: Vec<SkippedTap>,
    /// It is not there.
    #[serde(default)]
    pub trouble: Option<String>,
}

/// A port of a bridge that is not attached.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SkippedTap {
    /// The interface.
    pub ifname: String,
    /// Why not.
    pub why: String,
}
