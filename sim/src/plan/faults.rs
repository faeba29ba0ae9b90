//! The names of faults, and the machines that they concern.

use super::{FaultKind, Machine};

impl FaultKind {
    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Loss { .. } => "loss",
            Self::BurstLoss { .. } => "burst loss",
            Self::Reorder { .. } => "reordering",
            Self::Duplicate { .. } => "duplication",
            Self::Corrupt { .. } => "corruption",
            Self::Mark { .. } => "CE marking",
            Self::Mtu { .. } => "MTU change",
            Self::Rate { .. } => "slow path",
            Self::Cut { .. } => "cut path",
            Self::Pause { .. } => "guest paused",
            Self::Reboot { .. } => "guest rebooted",
            Self::Destroy { .. } => "guest destroyed",
            Self::Migrate { .. } => "guest migrated",
            Self::DriverReset { .. } => "driver reset",
            Self::StopReading { .. } => "application stops reading",
            Self::DropDelivered { .. } => "guest drops frames",
            Self::ShrinkWindow { .. } => "window taken back",
            Self::OneWay { fragments: false, .. } => "answers take another path",
            Self::OneWay { fragments: true, .. } => "answers in fragments",
            Self::Crash { arena: true, .. } => "crash, arena survives",
            Self::Crash { arena: false, .. } => "crash, arena lost",
            Self::Away { .. } => "daemon away",
            Self::OffloadOff { .. } => "offload turned off",
            Self::FloodsOff { .. } => "congestion offload turned off",
            Self::Drain { .. } => "guest drained",
            Self::Late { .. } => "late acknowledgements",
            Self::Handover { .. } => "hand-over",
            Self::FlowFlood { .. } => "flood of handshakes",
            Self::ManyAddresses { .. } => "addresses behind a guest",
            Self::Kill { .. } => "connection killed",
            Self::Forge { .. } => "forgery",
        }
    }

    /// The path it is about: remote, and whether toward the host.
    #[must_use]
    pub fn link(self) -> Option<(u16, bool)> {
        match self {
            Self::Loss { remote, to_host, .. }
            | Self::BurstLoss { remote, to_host, .. }
            | Self::Reorder { remote, to_host, .. }
            | Self::Duplicate { remote, to_host, .. }
            | Self::Corrupt { remote, to_host, .. }
            | Self::Mark { remote, to_host, .. }
            | Self::Mtu { remote, to_host, .. }
            | Self::Rate { remote, to_host, .. }
            | Self::Cut { remote, to_host } => Some((remote, to_host)),
            _ => None,
        }
    }

    /// The machines it happens to, or to the path to which it does.
    #[must_use]
    pub fn machines(self) -> [Option<Machine>; 2] {
        if let Some((remote, _)) = self.link() {
            return [Some(Machine::Remote(remote)), None];
        }
        match self {
            Self::StopReading { machine } | Self::ShrinkWindow { machine } => [Some(machine), None],
            Self::FlowFlood { remote, guest, .. } => {
                [Some(Machine::Guest(guest)), Some(Machine::Remote(remote))]
            }
            Self::Pause { guest }
            | Self::Reboot { guest }
            | Self::Destroy { guest }
            | Self::Migrate { guest }
            | Self::DriverReset { guest }
            | Self::DropDelivered { guest, .. }
            | Self::OneWay { guest, .. }
            | Self::OffloadOff { guest }
            | Self::FloodsOff { guest }
            | Self::Drain { guest }
            | Self::Late { guest }
            | Self::Handover { guest, .. }
            | Self::Kill { guest }
            | Self::ManyAddresses { guest, .. }
            | Self::Forge { guest, .. } => [Some(Machine::Guest(guest)), None],
            _ => [None, None],
        }
    }
}
