//! A frame, read once: every offset checked, every field that is used copied out.
//!
//! The cost of [`Packet::parse`] is paid by every frame, so the usual layout (Ethernet, IPv4
//! without options, TCP with NOP NOP timestamps) takes a straight path.

pub use super::ip::PROTOCOL_TCP;
pub use super::ip::{
    Ip, IpAddr16, IpVersion, L4, ipv4_header_ok, tcp_checksum_ok, tcp_pseudo_header,
};
pub use super::seq::Seq;
pub use super::tcp::{SackBlocks, Tcp, TcpFlags, TcpOptions, Timestamps};

use super::{array, be16, ip};
use crate::drops::DropReason;
use core::hash::{Hash, Hasher};
use core::net::Ipv4Addr;

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// Tag protocol identifier of a customer VLAN tag (IEEE 802.1Q).
pub const TPID_8021Q: u16 = 0x8100;
/// Tag protocol identifier of a service VLAN tag (IEEE 802.1ad).
pub const TPID_8021AD: u16 = 0x88a8;

/// Bytes of an Ethernet header without tags.
const ETHERNET: u8 = 14;

/// A parsed frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Packet {
    /// Layer 2.
    pub eth: Eth,
    /// Layer 3 and, if it is IP, layer 4.
    pub net: Net,
}

/// The Ethernet header and its VLAN tags.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Eth {
    /// Destination MAC.
    pub dst: [u8; 6],
    /// Source MAC.
    pub src: [u8; 6],
    /// VLAN tags.
    pub vlan: VlanStack,
    /// Bytes of layer 2, tags and EtherType included: layer 3 starts here.
    pub len: u8,
    /// EtherType after the tags; below 0x600 it is an 802.3 length.
    pub ethertype: u16,
}

/// Up to two VLAN tags, outermost first (COM-10).
///
/// Two stacks are equal if they name the same VLANs: kind of tag and VLAN id. Priority and
/// drop-eligible bits may differ from frame to frame of one flow.
#[derive(Clone, Copy, Debug, Default)]
pub struct VlanStack {
    n: u8,
    tags: [[u8; 4]; 2],
}

impl VlanStack {
    /// Most tags we look behind.
    pub const MAX: usize = 2;

    /// The tags as on the wire: identifier, then priority and VLAN id.
    #[must_use]
    pub fn tags(&self) -> &[[u8; 4]] {
        &self.tags[..usize::from(self.n)]
    }

    /// No tag.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The VLANs as one number: equal for equal stacks, 0 without tags. A priority tag (VID 0) is
    /// none (IEEE 802.1Q section 9.6): behind it is the VLAN of the next tag, if there is one.
    #[inline]
    #[must_use]
    pub const fn key(&self) -> u64 {
        if self.n == 0 {
            return 0;
        }
        let [outer, inner] = self.tags;
        let (outer, inner) = (Self::vlan_of(outer), Self::vlan_of(inner));
        if outer == 0 { inner << 32 } else { outer << 32 | inner }
    }

    /// Identifier and VLAN of a tag, 0 for a priority tag.
    const fn vlan_of(tag: [u8; 4]) -> u64 {
        let tag = u32::from_be_bytes(tag) & 0xffff_0fff;
        if tag & 0xfff == 0 { 0 } else { tag as u64 }
    }
}

impl PartialEq for VlanStack {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for VlanStack {}

impl Hash for VlanStack {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

/// Layer 3.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Net {
    /// ARP for IPv4 over Ethernet.
    Arp(Arp),
    /// IPv4 or IPv6.
    Ip(Ip),
    /// Anything else, and frames with more than two VLAN tags.
    Other,
}

/// An ARP message (RFC 826).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Arp {
    /// The sender's MAC.
    pub sender_mac: [u8; 6],
    /// The sender's address, as it says.
    pub sender_ip: Ipv4Addr,
    /// The address asked for, or answered to.
    pub target_ip: Ipv4Addr,
    /// 1 asks, 2 answers.
    pub op: u16,
}

impl Packet {
    /// Reads a frame without its virtio-net header or FCS.
    ///
    /// # Errors
    /// [`DropReason::Truncated`] if the frame ends before its headers say it does,
    /// [`DropReason::MalformedHeader`] if an IP header contradicts itself. A bad TCP header is
    /// [`L4::MalformedTcp`], for the caller to decide.
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<Self, DropReason> {
        let Some(h) = frame.first_chunk() else { return Err(DropReason::Truncated) };
        // Copies of these structs are most of the cost, hence a path without detours for the usual.
        let start = usize::from(ETHERNET);
        match Eth::ethertype(h) {
            ETHERTYPE_IPV4 => {
                if let Some(ip) = ip::usual_v4(frame, start) {
                    return Ok(Self { eth: Eth::untagged(h), net: Net::Ip(ip) });
                }
            }
            ETHERTYPE_IPV6 => {
                if let Some(ip) = ip::usual_v6(frame, start) {
                    return Ok(Self { eth: Eth::untagged(h), net: Net::Ip(ip) });
                }
            }
            _ => {}
        }
        Self::parse_any(frame, h)
    }

    #[inline(never)]
    fn parse_any(frame: &[u8], h: &[u8; ETHERNET as usize]) -> Result<Self, DropReason> {
        let mut eth = Eth::untagged(h);
        eth.parse_tags(frame)?;
        let start = usize::from(eth.len);
        let net = match eth.ethertype {
            ETHERTYPE_IPV4 => Net::Ip(ip::parse_v4(frame, start)?),
            ETHERTYPE_IPV6 => Net::Ip(ip::parse_v6(frame, start)?),
            ETHERTYPE_ARP => Arp::parse(&frame[start..])?.map_or(Net::Other, Net::Arp),
            _ => Net::Other,
        };
        Ok(Self { eth, net })
    }

    /// The IP packet and its TCP segment, if this is one.
    #[inline]
    #[must_use]
    pub const fn tcp(&self) -> Option<(&Ip, &Tcp)> {
        match &self.net {
            Net::Ip(ip) => match &ip.l4 {
                L4::Tcp(tcp) => Some((ip, tcp)),
                _ => None,
            },
            _ => None,
        }
    }
}

impl Eth {
    /// Reads just the L2 header, tags included.
    ///
    /// # Errors
    /// [`DropReason::Truncated`].
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<Self, DropReason> {
        let mut eth = Self::untagged(frame.first_chunk().ok_or(DropReason::Truncated)?);
        eth.parse_tags(frame)?;
        Ok(eth)
    }

    #[inline(always)]
    fn ethertype(h: &[u8; ETHERNET as usize]) -> u16 {
        be16(h, 12)
    }

    /// The header as if it had no tags.
    #[inline(always)]
    fn untagged(h: &[u8; ETHERNET as usize]) -> Self {
        Self {
            dst: array(&h[..6]),
            src: array(&h[6..12]),
            vlan: VlanStack::default(),
            len: ETHERNET,
            ethertype: Self::ethertype(h),
        }
    }

    /// Reads the tags; behind more than two `ethertype` stays that of a tag, which is no protocol.
    fn parse_tags(&mut self, frame: &[u8]) -> Result<(), DropReason> {
        for slot in &mut self.vlan.tags {
            if !is_tag(self.ethertype) {
                break;
            }
            let at = usize::from(self.len);
            let tag = frame.get(at - 2..at + 4).ok_or(DropReason::Truncated)?;
            slot.copy_from_slice(&tag[..4]);
            self.ethertype = be16(tag, 4);
            self.vlan.n += 1;
            self.len += 4;
        }
        Ok(())
    }
}

pub(crate) const fn is_tag(ethertype: u16) -> bool {
    matches!(ethertype, TPID_8021Q | TPID_8021AD)
}

impl Arp {
    /// `None` if it is ARP for something other than IPv4 over Ethernet.
    fn parse(b: &[u8]) -> Result<Option<Self>, DropReason> {
        let Some(b) = b.first_chunk::<28>() else { return Err(DropReason::Truncated) };
        // Hardware Ethernet, protocol IPv4, and their address lengths.
        if b[..6] != [0, 1, 8, 0, 6, 4] {
            return Ok(None);
        }
        Ok(Some(Self {
            op: be16(b, 6),
            sender_mac: [b[8], b[9], b[10], b[11], b[12], b[13]],
            sender_ip: Ipv4Addr::new(b[14], b[15], b[16], b[17]),
            target_ip: Ipv4Addr::new(b[24], b[25], b[26], b[27]),
        }))
    }
}

#[cfg(test)]
mod tests;
