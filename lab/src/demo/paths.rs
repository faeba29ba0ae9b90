//! The ways between the remote host and the guest, and the directions.

use clap::ValueEnum;
use serde::Serialize;

/// A way from the remote host into the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum NetPath {
    /// QEMU's own tap on a Linux bridge.
    Tap,
    /// Nightporter with the offload off.
    Off,
    /// Nightporter with ack offload.
    AckOffload,
    /// Nightporter with ack offload and accept offload.
    AcceptOffload,
    /// QEMU's own tap, attached to Nightporter, with ack offload.
    Attached,
    /// Nightporter with congestion offload too, and a guest whose routes flood.
    FloodRoute,
    /// The same, with a guest that floods by `np_flood`.
    FloodBpf,
    /// passt, with the kernel's receive buffers.
    Passt,
    /// passt, with receive buffers of 8 MB.
    PasstTuned,
    /// [`Self::Tap`], with boost from outside.
    #[value(name = "tap+boost")]
    #[serde(rename = "tap+boost")]
    TapBoost,
    /// [`Self::AckOffload`], with boost.
    #[value(name = "ack-offload+boost")]
    #[serde(rename = "ack-offload+boost")]
    AckOffloadBoost,
    /// [`Self::FloodRoute`], with boost.
    #[value(name = "flood-route+boost")]
    #[serde(rename = "flood-route+boost")]
    FloodRouteBoost,
}

/// The sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// The remote: an upload into the guest.
    Up,
    /// The guest: a download from it.
    Down,
}

impl NetPath {
    /// Its name, as in `result.json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tap => "tap",
            Self::Off => "off",
            Self::AckOffload => "ack-offload",
            Self::AcceptOffload => "accept-offload",
            Self::Attached => "attached",
            Self::FloodRoute => "flood-route",
            Self::FloodBpf => "flood-bpf",
            Self::Passt => "passt",
            Self::PasstTuned => "passt-tuned",
            Self::TapBoost => "tap+boost",
            Self::AckOffloadBoost => "ack-offload+boost",
            Self::FloodRouteBoost => "flood-route+boost",
        }
    }

    /// The path of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::from_str(name, false).ok()
    }

    /// The same without boost.
    #[must_use]
    pub const fn unboosted(self) -> Self {
        match self {
            Self::TapBoost => Self::Tap,
            Self::AckOffloadBoost => Self::AckOffload,
            Self::FloodRouteBoost => Self::FloodRoute,
            path => path,
        }
    }

    /// It has boost.
    #[must_use]
    pub fn is_boosted(self) -> bool {
        self.unboosted() != self
    }

    /// It is over QEMU's tap.
    #[must_use]
    pub fn is_tap(self) -> bool {
        self.unboosted() == Self::Tap
    }

    /// It is over passt.
    #[must_use]
    pub const fn is_passt(self) -> bool {
        matches!(self, Self::Passt | Self::PasstTuned)
    }

    /// It is over Nightporter.
    #[must_use]
    pub fn is_nightporter(self) -> bool {
        !self.is_tap() && !self.is_passt()
    }

    /// The guest floods.
    #[must_use]
    pub const fn is_flood(self) -> bool {
        matches!(self, Self::FloodRoute | Self::FloodBpf | Self::FloodRouteBoost)
    }
}

impl std::fmt::Display for NetPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::fmt::Display for Direction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Self::Up { "up" } else { "down" })
    }
}
