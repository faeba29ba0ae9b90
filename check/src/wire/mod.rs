//! Frames as the judges read, build, check and cut them, without code of the core.
//!
//! Code that reads a frame for a checker or a machine must not share a mistake with the code that
//! it judges. `etherparse` reads and sums headers; sequence numbers, options and the cut of
//! super-segments are our own, written from the RFCs. Two plain types are the core's: an address
//! and its family, which also name its flows. `check/tests/independence.rs` enforces this.

mod build;
mod cut;
mod number;
mod packet;
mod sum;
mod tcp;

pub use build::{Segment, build};
pub use cut::on_wire;
pub use nightporter_core::wire::ip::{IpAddr16, IpVersion};
pub use number::Seq;
pub use packet::{Arp, Eth, Ip, L4, Net, Packet, Unreadable};
pub use sum::{ipv4_header_ok, pseudo_header, tcp_checksum_ok, unfinished, written};
pub use tcp::{Sack, Tcp, TcpFlags, TcpOptions, Timestamps};

/// EtherType of ARP (RFC 826).
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// IP protocol number of TCP.
pub const PROTOCOL_TCP: u8 = 6;

/// virtio-net header, `flags`: the checksum has to be finished (VIRTIO 1.2 section 5.1.6).
pub const F_NEEDS_CSUM: u8 = 1;
/// The checksum is right.
pub const F_DATA_VALID: u8 = 2;
/// virtio-net header, `gso_type`: one packet.
pub const GSO_NONE: u8 = 0;
/// To be cut into TCP segments over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// To be cut into TCP segments over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// With CWR on the first of them.
pub const GSO_ECN: u8 = 0x80;
