//! The engine: frames in, frames out. The front door of `core`.
//!
//! One worker owns one `Engine`. The methods are of four kinds:
//!
//! 1. getters;
//! 2. `handle_*(now, ...)`: something happened. `handle_frame` returns the [`Verdict`] for that frame;
//! 3. commands (`add_port`, `set_offload`, `drain`, ...);
//! 4. `poll_*`: what the engine wants done.
//!
//! **Drain order.** After one or a batch of `handle_*` calls and commands: `handle_batch_end(now)`,
//! then `poll_transmit(now)` until `None`, then for every guest port with room
//! `poll_delivery(now, port, room)` until `None`, then `poll_timeout()` for the next wake-up.
//! A frame whose verdict is `Forward`/`Flood` is sent before anything polled afterwards.

use crate::drops::DropReason;
use crate::time::Instant;
use crate::wire::virtio_net::VirtioNetHdr;

/// A port of the switch. Stable until the port is removed; then reused.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortId(pub u16);

/// What to do with the frame given to [`Engine::handle_frame`], which may have been edited in place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Send it out of this port.
    Forward(PortId),
    /// Send it out of every port but the one it came from.
    Flood,
    /// The engine has what it needs; nothing to send.
    Absorbed,
    /// Dropped and already counted.
    Drop(DropReason),
}

/// What a port's peer accepts *now* (it may change by driver reset or CTRL_GUEST_OFFLOADS; COM-17).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PortFeatures {
    /// Partial checksums may be handed over.
    pub csum: bool,
    /// IPv4 TCP super-segments may be handed over.
    pub tso4: bool,
    /// IPv6 TCP super-segments may be handed over.
    pub tso6: bool,
    /// Super-segments may carry CWR.
    pub ecn: bool,
}

/// What kind of port to add, and its policy.
#[derive(Clone, Debug, Default)]
pub struct PortConfig {
    /// Unique name: in metrics, in the CLI, and the identity of a VM across daemon restarts.
    pub name: String,
    /// A VM behind vhost-user (`true`) or an uplink (`false`).
    pub guest: bool,
    /// Anti-spoof: the only source MAC allowed. `None` learns the first one seen.
    pub mac: Option<[u8; 6]>,
    /// Anti-spoof: the only source IPs allowed. `None` learns (COM-11).
    pub ips: Option<Vec<core::net::IpAddr>>,
    /// Ack offload wanted.
    pub ack_offload: bool,
    /// Most bytes this VM's flows may hold and promise together (INV-06).
    pub budget_bytes: u64,
    /// Most flow entries this VM may have (LIFE-01).
    pub flows_max: u32,
    /// Largest IP packet the guest takes (virtio-net MTU).
    pub mtu: u16,
}
