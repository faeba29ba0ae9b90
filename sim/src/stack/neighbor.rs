//! A machine's answers besides TCP: its addresses (ARP, RFC 826; neighbour discovery, RFC 4861). It
//! knows the addresses of others from their numbers and never asks.

use super::address::{Address, Key};
use super::emit::ETHERNET;
use nightporter_check::wire::{
    ETHERTYPE_ARP, ETHERTYPE_IPV6, Ip, IpAddr16, IpVersion, L4, Net, Packet, pseudo_header, written,
};

const ICMP_V6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Neighbour messages are sent with this hop limit, and believed with no other.
const HOP_LIMIT: u8 = 255;
const ARP_REQUEST: u16 = 1;

/// The answer to a question for one of our addresses.
pub(super) fn answer(own: &Address, frame: &[u8], packet: &Packet) -> Option<Vec<u8>> {
    match &packet.net {
        Net::Arp(arp) if arp.op == ARP_REQUEST && arp.target_ip.octets() == own.v4 => {
            let mut reply = ethernet(own, packet.eth.src, ETHERTYPE_ARP);
            reply.extend([0, 1, 8, 0, 6, 4, 0, 2]);
            reply.extend(own.mac);
            reply.extend(own.v4);
            reply.extend(arp.sender_mac);
            reply.extend(arp.sender_ip.octets());
            Some(reply)
        }
        Net::Ip(ip) if ip.l4 == L4::Icmp && ip.version == IpVersion::V6 => {
            let body = frame.get(usize::from(ip.payload_offset)..ip.end as usize)?;
            let asks = body.first() == Some(&SOLICITATION) && ip.ttl == HOP_LIMIT;
            let for_us = asks && body.get(8..24) == Some(&own.v6);
            for_us.then(|| advertisement(own, packet.eth.src, ip.src.0))
        }
        _ => None,
    }
}

/// Solicited, and overriding what was known (RFC 4861 section 4.4).
fn advertisement(own: &Address, mac: [u8; 6], to: [u8; 16]) -> Vec<u8> {
    const LEN: u16 = 32;
    let mut body = vec![ADVERTISEMENT, 0, 0, 0, 0x60, 0, 0, 0];
    body.extend(own.v6);
    body.extend([2, 1]); // target link-layer address
    body.extend(own.mac);
    let [src, dst] = [own.v6, to].map(IpAddr16);
    let pseudo = pseudo_header(IpVersion::V6, src, dst, ICMP_V6, LEN.into());
    let check = written(&pseudo.add_slice(&body));
    body[2..4].copy_from_slice(&check);
    let mut frame = ethernet(own, mac, ETHERTYPE_IPV6);
    frame.extend([0x60, 0, 0, 0]);
    frame.extend(LEN.to_be_bytes());
    frame.extend([ICMP_V6, HOP_LIMIT]);
    frame.extend(own.v6);
    frame.extend(to);
    frame.extend(body);
    frame
}

fn ethernet(own: &Address, to: [u8; 6], ethertype: u16) -> Vec<u8> {
    let mut frame = Vec::with_capacity(ETHERNET + 72);
    frame.extend(to);
    frame.extend(own.mac);
    frame.extend(ethertype.to_be_bytes());
    frame
}

/// An ICMP message that says a packet was too big (RFC 1191, RFC 8201).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct TooBig {
    /// The connection whose packet it was.
    pub(super) key: Key,
    /// Its sequence number.
    pub(super) seq: u32,
    /// The largest that would have passed.
    pub(super) mtu: u32,
}

/// Reads such a message. It quotes at least the IP header and eight bytes of the packet.
pub(super) fn too_big(frame: &[u8], ip: &Ip) -> Option<TooBig> {
    let body = frame.get(usize::from(ip.payload_offset)..ip.end as usize)?;
    let [kind, code] = [*body.first()?, *body.get(1)?];
    let word = |at: usize| Some(u32::from_be_bytes(*body.get(at..)?.first_chunk()?));
    let (mtu, quoted, header) = match (ip.version, ip.l4, kind, code) {
        (IpVersion::V4, L4::Icmp, 3, 4) => (word(4)? & 0xffff, 12, 20),
        (IpVersion::V6, L4::Icmp, 2, 0) => (word(4)?, 24, 40),
        _ => return None,
    };
    let (at, tcp) = (8 + quoted, 8 + header);
    let peer = match ip.version {
        IpVersion::V4 => {
            let [_, dst] = [word(at)?, word(at + 4)?];
            IpAddr16::from_v4(dst.to_be_bytes()).0
        }
        IpVersion::V6 => *body.get(at..)?.first_chunk()?,
    };
    let ports = word(tcp)?.to_be_bytes();
    let port = |at: usize| u16::from_be_bytes([ports[at], ports[at + 1]]);
    let key = Key { peer, own_port: port(0), peer_port: port(2) };
    Some(TooBig { key, seq: word(tcp + 4)?, mtu })
}
