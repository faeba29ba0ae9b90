//! Ports: what frames come in by and leave by.

pub mod guest;
pub mod tap;
pub mod vhost_user;

use nightporter_core::drops::DropReason;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::config::UplinkConfig;
use guest::GuestPort;
use tap::TapPort;

/// A port of the switch.
#[derive(Debug)]
pub enum Port {
    /// A tap or macvtap queue.
    Uplink(TapPort),
    /// A VM behind vhost-user.
    Guest(Box<GuestPort>),
    /// An uplink whose interface disappeared, and may come back.
    Lost(UplinkConfig),
}

/// What came of reading one frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Received {
    /// A frame of this many bytes is in the buffer.
    Frame(VirtioNetHdr, usize),
    /// Nothing there now.
    Empty,
    /// The port no longer exists.
    Gone,
}

/// What came of sending one frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sent {
    /// The port has it.
    Done,
    /// No room now.
    Full,
    /// This frame cannot be sent.
    Dropped(DropReason),
    /// The port no longer exists.
    Gone,
}

impl Port {
    /// Whether a VM is behind it.
    #[must_use]
    pub fn is_guest(&self) -> bool {
        matches!(self, Self::Guest(_))
    }

    /// `vm`, `tap` or `macvtap`, for operators.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Uplink(tap) => tap.config().kind.label(),
            Self::Guest(_) => "vm",
            Self::Lost(config) => config.kind.label(),
        }
    }

    /// Reads one frame into `buf`.
    pub fn receive(&mut self, buf: &mut [u8]) -> Received {
        match self {
            Self::Uplink(tap) => tap.receive(buf),
            Self::Guest(guest) => guest.receive(buf),
            Self::Lost(_) => Received::Empty,
        }
    }

    /// Asks to be woken by the next frame. `true`: there is one, now.
    #[must_use]
    pub fn arm(&mut self) -> bool {
        match self {
            Self::Guest(guest) => guest.arm(),
            // A level-triggered descriptor needs no asking.
            Self::Uplink(_) | Self::Lost(_) => false,
        }
    }

    /// Asks to be woken when a guest makes room. It may just have: look again.
    pub fn wait_for_room(&mut self) {
        if let Self::Guest(guest) = self {
            guest.wait_for_room();
        }
    }

    /// Sends one frame, given in pieces, whose header the peer understands.
    pub fn send(&mut self, hdr: &VirtioNetHdr, parts: &[&[u8]]) -> Sent {
        match self {
            Self::Uplink(tap) => tap.send(hdr, parts),
            Self::Guest(guest) => guest.send(hdr, parts),
            Self::Lost(_) => Sent::Dropped(DropReason::PortDown),
        }
    }
}
