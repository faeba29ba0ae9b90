//! Events of the host and the machines, besides frames.

/// An event of the host or a machine, besides frames: it changes what may be expected.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// The daemon died.
    Crashed,
    /// It runs again; `arena`: it found its predecessor's arena.
    Restarted {
        /// See above.
        arena: bool,
    },
    /// The guest started anew, its connections are gone.
    Rebooted(u16),
    /// The guest is gone for good.
    Destroyed(u16),
    /// The guest runs on another host now.
    Migrated(u16),
    /// The operator wants no new promises for this guest.
    Draining(u16),
    /// The operator wants ack offload on or off for this guest.
    Offload(u16, bool),
    /// The guest stopped running; `unseen`: with frames in its ring.
    Paused {
        /// Which.
        guest: u16,
        /// See above.
        unseen: bool,
    },
    /// It runs again.
    Resumed(u16),
    /// A middlebox reset the connection of this guest's TCP port and that of the remote.
    Killed(u16, u16, u16),
    /// The guest's driver has set its device up again.
    DriverReset(u16),
    /// Its VMM has hung up, and it may be on another host (LIFE-16), until its driver is there.
    Awaited(u16),
    /// And it is there again.
    DriverBack(u16),
    /// From here on nothing is lost and there are no faults.
    Healed,
}

impl Event {
    /// The guest it is about.
    pub(crate) fn guest(self) -> Option<u16> {
        match self {
            Self::Crashed | Self::Restarted { .. } | Self::Healed => None,
            Self::Rebooted(g)
            | Self::Destroyed(g)
            | Self::Migrated(g)
            | Self::Draining(g)
            | Self::Offload(g, _)
            | Self::Paused { guest: g, .. }
            | Self::Resumed(g)
            | Self::Killed(g, ..)
            | Self::DriverReset(g)
            | Self::Awaited(g)
            | Self::DriverBack(g) => Some(g),
        }
    }
}
