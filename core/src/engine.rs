//! The engine: frames in, frames out. The front door of `core`.
//!
//! One worker owns one `Engine`. The methods are of four kinds:
//!
//! 1. getters;
//! 2. `handle_*(now, ...)`: something happened; `handle_frame` returns that frame's [`Verdict`];
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

/// What to do with the frame given to [`Engine::handle_frame`], perhaps edited in place.
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

/// Pieces of one made frame at most: the headers and the pages a 64 KiB payload can touch.
pub const TRANSMIT_PARTS_MAX: usize = 8;

/// A frame the engine made, ready for `port`: a header and, for deliveries, stored payload.
#[derive(Clone, Copy, Debug)]
pub struct Transmit<'a> {
    /// Where it goes; `None` means out of every port but `ingress`.
    pub port: Option<PortId>,
    /// The port on whose behalf it was made.
    pub ingress: PortId,
    /// Checksum and segmentation state, already within what a guest port's features allow.
    pub hdr: VirtioNetHdr,
    parts: [&'a [u8]; TRANSMIT_PARTS_MAX],
    parts_len: u8,
}

impl<'a> Transmit<'a> {
    /// The frame's bytes, in order: L2 to L4 headers first, then payload pieces.
    #[must_use]
    pub fn parts(&self) -> &[&'a [u8]] {
        &self.parts[..usize::from(self.parts_len)]
    }
}

/// Why a port could not be added.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AddPortError {
    /// Another port has this name: give each port its own.
    NameTaken,
    /// All port slots are in use: raise the limit or remove a port.
    TooManyPorts,
    /// The budgets of all VMs together exceed the arena: lower a budget or enlarge the arena.
    BudgetExceedsArena,
}

/// One worker's switch, flows and store. See the module doc for the drain order.
#[derive(Debug, Default)]
pub struct Engine {
    ports: Vec<Option<PortConfig>>,
    macs: std::collections::BTreeMap<[u8; 6], PortId>,
}

impl Engine {
    /// Adds a port; frames may be given for it at once.
    pub fn add_port(&mut self, _now: Instant, config: PortConfig) -> Result<PortId, AddPortError> {
        self.ports.push(Some(config));
        Ok(PortId(u16::try_from(self.ports.len() - 1).map_err(|_| AddPortError::TooManyPorts)?))
    }

    /// The port and its VM are gone for good (LIFE-05): every remote it had promises to is told.
    pub fn remove_port(&mut self, _now: Instant, port: PortId) {
        self.ports[usize::from(port.0)] = None;
    }

    /// What the port's peer accepts from now on; `None` while no driver is there (link down).
    pub fn set_port_features(
        &mut self,
        _now: Instant,
        _port: PortId,
        _features: Option<PortFeatures>,
    ) {
    }

    /// A frame came in on `port`. It may be edited in place; on `Forward` and `Flood` the caller
    /// sends it on.
    pub fn handle_frame(
        &mut self,
        _now: Instant,
        port: PortId,
        _hdr: &mut VirtioNetHdr,
        frame: &mut [u8],
    ) -> Verdict {
        let Some(([dst, src], _)) = frame.split_first_chunk::<12>().map(|(m, rest)| {
            let mut dst = [0; 6];
            let mut src = [0; 6];
            dst.copy_from_slice(&m[..6]);
            src.copy_from_slice(&m[6..]);
            ([dst, src], rest)
        }) else {
            return Verdict::Drop(DropReason::Truncated);
        };
        self.macs.insert(src, port);
        match self.macs.get(&dst) {
            Some(&p) if p == port => Verdict::Drop(DropReason::Hairpin),
            Some(&p) => Verdict::Forward(p),
            None => Verdict::Flood,
        }
    }

    /// The end of a batch of frames: pending ACKs become due (SNOOP-07).
    pub fn handle_batch_end(&mut self, _now: Instant) {}

    /// Evidence about the guest of `port`. `drained`: it has seen everything delivered so far.
    /// Call on every kick from it and when its `used_event` or `avail.idx` moved (running time,
    /// spec section 1).
    pub fn handle_guest_progress(&mut self, _now: Instant, _port: PortId, _drained: bool) {}

    /// Timers that are due at `now` run.
    pub fn handle_timeout(&mut self, _now: Instant) {}

    /// The next instant at which [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    /// The next frame the engine made itself (ACK, RST, probe, window update), routed to a port.
    #[must_use]
    pub fn poll_transmit(&mut self, _now: Instant) -> Option<Transmit<'_>> {
        None
    }

    /// The next stored bytes for the guest of `port`, in a frame of at most `room` bytes.
    #[must_use]
    pub fn poll_delivery(
        &mut self,
        _now: Instant,
        _port: PortId,
        _room: usize,
    ) -> Option<Transmit<'_>> {
        None
    }

    /// Turns ack offload of a VM on for new connections, or off (its flows drain, then pass).
    pub fn set_offload(&mut self, _now: Instant, _port: PortId, _on: bool) {}

    /// Makes no new promises for this VM; see [`Self::is_drained`].
    pub fn drain(&mut self, _now: Instant, _port: PortId) {}

    /// Whether no flow of this VM owes anybody anything.
    #[must_use]
    pub fn is_drained(&self, _port: PortId) -> bool {
        true
    }
}
