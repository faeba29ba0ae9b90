//! Ports: the ways by which frames come in and leave.

pub(crate) mod attached;
pub(crate) mod build;
pub(crate) mod front_end;
pub mod guest;
mod inbox;
mod messages;
mod outcome;
pub mod overlay;
mod paths;
pub mod shared;
pub mod tap;
pub mod vhost_user;

use std::os::fd::BorrowedFd;

use nightporter_api::AttachedStatus;
use nightporter_core::drops::DropReason;
use nightporter_core::port::PortConfig;
use nightporter_core::time::Instant;
use nightporter_core::turn::{Received, Sent};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::config::{OverlayConfig, UplinkConfig, VmConfig};
use crate::tap_address;
use attached::AttachedPort;
use guest::GuestPort;
use overlay::OverlayPort;
use tap::TapPort;
use vhost_user::VhostUserStats;

/// The engine's port for the uplink or overlay `name` of a network, or of the first one.
pub(crate) fn uplink_port(name: &str, network: &Option<String>) -> PortConfig {
    let network = network.as_deref().unwrap_or_default();
    PortConfig::uplink(name).with_mac(tap_address::of_own_end(name)).in_network(network)
}

/// A port of the switch.
#[derive(Debug)]
pub enum Port {
    /// A tap or macvtap queue.
    Uplink(TapPort),
    /// Other hosts, by VXLAN.
    Overlay(Box<OverlayPort>),
    /// A VM behind vhost-user.
    Guest(Box<GuestPort>),
    /// A VM behind a tap that is attached.
    Attached(Box<AttachedPort>),
    /// An uplink or overlay that could not be opened yet, or an uplink whose interface disappeared:
    /// it is tried again.
    Lost(Box<Lost>),
    /// Nothing: it was removed, and another one may get its number.
    Vacant,
}

/// A port that is not there.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The port that it should be.
    pub wanted: Wanted,
    /// Why it is not.
    pub why: String,
}

/// A port of the configuration that needs something of the host: an interface, an address.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Wanted {
    /// A tap or macvtap queue.
    Uplink(UplinkConfig),
    /// Other hosts.
    Overlay(OverlayConfig),
    /// A VM that has a tap.
    Attached(Box<VmConfig>),
}

impl Wanted {
    /// The port's name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Uplink(config) => &config.name,
            Self::Overlay(config) => &config.name,
            Self::Attached(vm) => &vm.name,
        }
    }

    /// The name of its interface, if it is one; of a VM's tap perhaps the beginning alone.
    pub(crate) fn ifname(&self) -> Option<&str> {
        match self {
            Self::Uplink(config) => Some(&config.ifname),
            Self::Overlay(_) => None,
            Self::Attached(vm) => vm.tap.as_deref(),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Uplink(config) => config.kind.label(),
            Self::Overlay(_) => "overlay",
            Self::Attached(_) => "vm",
        }
    }
}

impl Port {
    /// Whether a VM is behind it.
    #[must_use]
    pub fn is_guest(&self) -> bool {
        match self {
            Self::Guest(_) | Self::Attached(_) => true,
            Self::Lost(lost) => matches!(lost.wanted, Wanted::Attached(_)),
            Self::Uplink(_) | Self::Overlay(_) | Self::Vacant => false,
        }
    }

    /// The VM behind it, if there is one.
    pub fn as_guest_mut(&mut self) -> Option<&mut GuestPort> {
        match self {
            Self::Guest(guest) => Some(guest),
            _ => None,
        }
    }

    /// The attached tap behind it, if there is one.
    pub(crate) fn as_attached_mut(&mut self) -> Option<&mut AttachedPort> {
        match self {
            Self::Attached(attached) => Some(attached),
            _ => None,
        }
    }

    /// `vm`, `tap`, `macvtap` or `overlay`, for operators.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Uplink(tap) => tap.config().kind.label(),
            Self::Overlay(_) => "overlay",
            Self::Guest(_) | Self::Attached(_) => "vm",
            Self::Lost(lost) => lost.wanted.kind(),
            Self::Vacant => "none",
        }
    }

    /// The part of the configuration that it was opened by; `None` of a VM's socket, which is
    /// there from the beginning.
    pub(crate) fn wanted(&self) -> Option<Wanted> {
        match self {
            Self::Uplink(tap) => Some(Wanted::Uplink(tap.config().clone())),
            Self::Overlay(overlay) => Some(Wanted::Overlay(overlay.config().clone())),
            Self::Attached(attached) => Some(Wanted::Attached(Box::new(attached.vm().clone()))),
            Self::Lost(lost) => Some(lost.wanted.clone()),
            Self::Guest(_) | Self::Vacant => None,
        }
    }

    /// The name of its interface, if it is one.
    pub(crate) fn ifname(&self) -> Option<String> {
        match self {
            Self::Attached(attached) => Some(attached.tap().to_owned()),
            port => port.wanted()?.ifname().map(str::to_owned),
        }
    }

    /// The number of the interface behind it, if there is one. Such a port takes its time to close.
    pub(crate) fn index(&self) -> Option<u32> {
        match self {
            Self::Uplink(tap) => Some(tap.index()),
            Self::Attached(attached) => Some(attached.index()),
            Self::Overlay(_) | Self::Guest(_) | Self::Lost(_) | Self::Vacant => None,
        }
    }

    /// See [`Ports::room`](nightporter_core::turn::Ports::room).
    pub(crate) fn room(&mut self, want: usize) -> usize {
        match self {
            Self::Guest(guest) => guest.room(want),
            Self::Attached(attached) => attached.room(want),
            _ => 0,
        }
    }

    /// See [`Ports::progress`](nightporter_core::turn::Ports::progress).
    pub(crate) fn progress(&mut self) -> Option<bool> {
        match self {
            Self::Guest(guest) => guest.progress(),
            Self::Attached(attached) => attached.progress(),
            _ => None,
        }
    }

    /// See [`Ports::wait_for_room`](nightporter_core::turn::Ports::wait_for_room).
    pub(crate) fn wait_for_room(&mut self, waits: bool) {
        match self {
            Self::Guest(guest) if waits => guest.wait_for_room(),
            Self::Guest(guest) => guest.ignore_room(),
            Self::Attached(attached) => attached.wait_for_room(waits),
            _ => {}
        }
    }

    /// Whether it has to be looked at by the clock, because nothing tells what happens there.
    pub(crate) fn is_polled(&self) -> bool {
        match self {
            Self::Guest(guest) => guest.port.is_polled(),
            Self::Attached(attached) => attached.is_polled(),
            _ => false,
        }
    }

    /// Frames of the peer that the device dropped for `reason`.
    #[must_use]
    pub fn drops(&self, reason: DropReason) -> u64 {
        match self {
            Self::Overlay(overlay) => overlay.drops(reason),
            Self::Guest(guest) => guest.drops(reason),
            Self::Uplink(_) | Self::Attached(_) | Self::Lost(_) | Self::Vacant => 0,
        }
    }

    /// Whether a VM is behind it, or can come: its socket exists.
    #[must_use]
    pub fn listens(&self) -> bool {
        match self {
            Self::Guest(guest) => guest.port.listens(),
            Self::Lost(lost) => matches!(lost.wanted, Wanted::Attached(_)),
            _ => matches!(self, Self::Attached(_)),
        }
    }

    /// The guest has posted a receive buffer, as far as the daemon sees; true of all but guests.
    #[must_use]
    pub(crate) fn has_seen_buffers(&self) -> bool {
        !matches!(self, Self::Guest(guest) if !guest.port.has_seen_buffers())
    }

    /// The state of its tap, if one is attached.
    #[must_use]
    pub(crate) fn attached_status(&self) -> Option<AttachedStatus> {
        match self {
            Self::Attached(attached) => Some(attached.status()),
            _ => None,
        }
    }

    /// Counters of the device, if a VM is behind it.
    #[must_use]
    pub fn device(&self) -> Option<VhostUserStats> {
        match self {
            Self::Guest(guest) => Some(guest.port.stats()),
            _ => None,
        }
    }

    /// The descriptor that signals frames, if it is not a VM's.
    #[must_use]
    pub fn uplink_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Uplink(tap) => Some(tap.fd()),
            Self::Overlay(overlay) => Some(overlay.fd()),
            Self::Attached(attached) => Some(attached.fd()),
            Self::Guest(_) | Self::Lost(_) | Self::Vacant => None,
        }
    }

    /// Reads one frame into `buf`.
    pub fn receive(&mut self, now: Instant, buf: &mut [u8]) -> Received {
        match self {
            Self::Uplink(tap) => tap.receive(buf),
            Self::Overlay(overlay) => overlay.receive(now, buf),
            Self::Guest(guest) => guest.receive(buf),
            Self::Attached(attached) => attached.receive(buf),
            Self::Lost(_) | Self::Vacant => Received::Empty,
        }
    }

    /// Sends one frame, given in pieces, whose header the peer understands.
    pub fn send(&mut self, now: Instant, hdr: &VirtioNetHdr, parts: &[&[u8]]) -> Sent {
        match self {
            Self::Uplink(tap) => tap.send(hdr, parts),
            Self::Overlay(overlay) => overlay.send(now, hdr, parts),
            Self::Guest(guest) => guest.send(hdr, parts),
            Self::Attached(attached) => attached.send(hdr, parts),
            Self::Lost(_) | Self::Vacant => Sent::Dropped(DropReason::PortDown),
        }
    }
}
