//! Counters of the guests and of their TCPs, beside the transfers.

use serde::Serialize;

use super::NetPath;
use crate::flood::Complaints;

/// A guest's share of the contended core.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct GuestShare {
    /// CPU time of its vCPU, percent of the core.
    pub(super) cpu_percent: f64,
    /// How often its vCPU was switched to, per second.
    pub(super) switches_per_s: f64,
    /// Work of its load, in percent of the work that the vCPU does alone on the core. The rest of
    /// `cpu_percent` went into network and timer work, and under TCG into cold caches.
    pub(super) load_done_percent: u64,
}

/// Counters of a guest's kernel (`TcpExt`), over all paths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct GuestTcp {
    /// `TCPTimeouts`.
    pub(super) timeouts: u64,
    /// `TCPLossProbes`: last segments sent again because no answer had come.
    pub(super) loss_probes: u64,
    /// `TCPLossProbeRecovery`: probes that were taken to have repaired a loss.
    pub(super) losses_probed: u64,
}

impl GuestTcp {
    /// The difference to earlier counters.
    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            timeouts: self.timeouts - before.timeouts,
            loss_probes: self.loss_probes - before.loss_probes,
            losses_probed: self.losses_probed - before.losses_probed,
        }
    }
}

/// Complaints of the TCPs of guest and remote while the guest sent over one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Trouble {
    /// The path.
    pub(super) path: NetPath,
    /// How often was looked: after the downloads of three rounds, and after three transfers
    /// both ways.
    pub(super) looks: usize,
    /// Looks that found a new timeout of the guest.
    pub(super) looks_with_timeouts: usize,
    /// Looks that found something new at the remote.
    pub(super) looks_with_remote: usize,
    /// `TCPTimeouts` of the guest.
    pub(super) guest_timeouts: u64,
    /// Segments that the guest sent again, timeouts included ([`Complaints::guest_copies`]), and
    /// those of data that it sent for the first time.
    pub(super) guest_copies: u64,
    /// See `guest_copies`.
    pub(super) guest_segments: u64,
    /// `PAWSEstab` of the remote.
    pub(super) remote_paws: u64,
    /// `TCPACKSkipped...` of the remote.
    pub(super) remote_acks_skipped: u64,
}

impl Trouble {
    /// No look yet.
    pub(super) const fn none(path: NetPath) -> Self {
        Self {
            path,
            looks: 0,
            looks_with_timeouts: 0,
            looks_with_remote: 0,
            guest_timeouts: 0,
            guest_copies: 0,
            guest_segments: 0,
            remote_paws: 0,
            remote_acks_skipped: 0,
        }
    }

    /// One more look.
    pub(super) fn add(&mut self, before: &Complaints, now: &Complaints) {
        let timeouts = now.guest_timeouts - before.guest_timeouts;
        let paws = now.remote_paws - before.remote_paws;
        let skipped = now.remote_acks_skipped - before.remote_acks_skipped;
        self.looks += 1;
        self.looks_with_timeouts += usize::from(timeouts > 0);
        self.looks_with_remote += usize::from(paws + skipped > 0);
        self.guest_timeouts += timeouts;
        self.guest_copies += now.guest_copies - before.guest_copies;
        self.guest_segments += now.guest_segments - before.guest_segments;
        self.remote_paws += paws;
        self.remote_acks_skipped += skipped;
    }
}
