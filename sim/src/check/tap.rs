//! Frames at the four places where they are looked at, and the flows they belong to.

use nightporter_core::time::Instant;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::plan::Machine;
use crate::stack::address::machine_of;
use crate::wire::Packet;

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
    /// It may have been made before, and have waited for the guest's ring.
    pub waited: bool,
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
    // A frame that is flooded, or broken on the way, is nobody's.
    let there = match tap {
        Tap::FromNet | Tap::ToNet => true,
        Tap::FromGuest(g) | Tap::ToGuest(g) => g == guest,
    };
    let own = if from_guest { ip.src } else { ip.dst };
    let address = Machine::Guest(guest).address();
    if !there || ![address.ip(false), address.ip(true)].contains(&own) {
        return None;
    }
    let (guest_port, remote, remote_port) = if from_guest {
        (tcp.src_port, ip.dst.0, tcp.dst_port)
    } else {
        (tcp.dst_port, ip.src.0, tcp.src_port)
    };
    Some((FlowName { guest, guest_port, remote, remote_port }, from_guest))
}
