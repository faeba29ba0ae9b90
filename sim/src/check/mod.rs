//! The invariants of the specification (section 2), one file each, watching both sides of the port.

use core::fmt;

use nightporter_core::engine::{Engine, PortId};
use nightporter_core::time::Instant;
use nightporter_core::wire::packet::Packet;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::plan::{Machine, Plan};
use crate::stack::EndReport;
use crate::stack::address::machine_of;

/// Where a frame was seen, from the host's point of view.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Tap {
    /// Came in by the uplink.
    FromNet,
    /// Went out by the uplink.
    ToNet,
    /// Taken from the transmit ring of this guest (index into `Plan::guests`).
    FromGuest(u16),
    /// Put into the receive ring of this guest.
    ToGuest(u16),
}

/// A frame at a tap. `packet` is what its bytes say.
#[derive(Clone, Copy, Debug)]
pub struct Tapped<'a> {
    /// When.
    pub at: Instant,
    /// Which host: 0, or 1 after a migration.
    pub host: u8,
    /// Where.
    pub tap: Tap,
    /// Checksum and segmentation state.
    pub hdr: VirtioNetHdr,
    /// The frame.
    pub bytes: &'a [u8],
    /// The same, parsed; `None` if it cannot be.
    pub packet: Option<&'a Packet>,
    /// Sent by somebody in another's name, or broken on the way: it must count for nothing.
    pub forged: bool,
}

/// What happened to the host or a machine, besides frames: it changes what may be expected.
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
    /// The guest's driver has set its device up again.
    DriverReset(u16),
    /// From here on nothing is lost and nobody interferes.
    Healed,
}

/// An invariant that does not hold.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Violation {
    /// 1 to 25: INV-01 to INV-25.
    pub invariant: u8,
    /// What was seen, in one line.
    pub what: String,
    /// The flow it concerns, if it concerns one.
    pub flow: Option<FlowName>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "INV-{:02}: {}", self.invariant, self.what)
    }
}

/// A flow as the host sees it: one guest's side of one connection.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct FlowName {
    /// The guest: index into `Plan::guests`.
    pub guest: u16,
    /// Its TCP port.
    pub guest_port: u16,
    /// The remote's address; IPv4 is mapped into IPv6.
    pub remote: [u8; 16],
    /// The remote's TCP port.
    pub remote_port: u16,
}

/// The flow a segment belongs to, and whether the guest sent it. At the uplink the guest is the
/// end whose MAC is a guest's; between two guests of one host each has a flow of its own, and the
/// tap says whose side this is.
#[must_use]
pub fn flow_of(packet: &Packet, tap: Tap) -> Option<(FlowName, bool)> {
    let (ip, tcp) = packet.tcp()?;
    let from_guest = match tap {
        Tap::FromNet | Tap::ToGuest(_) => false,
        Tap::ToNet | Tap::FromGuest(_) => true,
    };
    let mac = if from_guest { packet.eth.src } else { packet.eth.dst };
    let Some(Machine::Guest(guest)) = machine_of(mac) else { return None };
    let (guest_port, remote, remote_port) = if from_guest {
        (tcp.src_port, ip.dst.0, tcp.dst_port)
    } else {
        (tcp.dst_port, ip.src.0, tcp.src_port)
    };
    Some((FlowName { guest, guest_port, remote, remote_port }, from_guest))
}

/// What a checker may look at between two steps of the host.
#[derive(Clone, Copy, Debug)]
pub struct HostView<'a, 'm> {
    /// Which host.
    pub host: u8,
    /// The engine, with its flows and its store.
    pub engine: &'a Engine<'m>,
    /// The port of each guest, while it is on this host.
    pub ports: &'a [Option<PortId>],
}

/// Keeps the history of every flow and asks every checker.
#[derive(Debug, Default)]
pub struct Observer;

impl Observer {
    /// Watches a run of `plan` from its beginning.
    #[must_use]
    pub fn new(_plan: &Plan) -> Self {
        Self
    }

    /// A frame passed a tap.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn on_frame(&mut self, _tapped: &Tapped<'_>) -> Result<(), Violation> {
        Ok(())
    }

    /// The host has done one step: one frame with all that follows, a batch end, a timeout or a
    /// command.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn on_step(&mut self, _now: Instant, _view: &HostView<'_, '_>) -> Result<(), Violation> {
        Ok(())
    }

    /// Something else happened.
    pub fn on_event(&mut self, _now: Instant, _event: Event) {}

    /// The run is over: every connection has ended, or time is up (`ended` says which).
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn on_end(
        &mut self,
        _now: Instant,
        _ended: bool,
        _ends: &[EndReport],
        _complaints: &[(Machine, &'static str, u64)],
        _engines: &[Engine<'_>],
    ) -> Result<(), Violation> {
        Ok(())
    }
}
