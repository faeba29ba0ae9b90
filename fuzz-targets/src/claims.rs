//! The switch's policy for a guest with a list of addresses (`core::switch`), judged by a reader of
//! frames of its own: whatever passes speaks for nobody but its guest.
//!
//! Input: whether the guest's own MAC is put in, and then a frame.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nightporter_core::port::PortId;
use nightporter_core::switch::Switch;
use nightporter_core::time::Instant;
use nightporter_core::wire::packet::Packet;

use crate::{captures, noise};

const GUEST: PortId = PortId(1);
const MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
const V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 10);
const V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
const LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0x00ff, 0xfe01, 0x0203);
/// EtherTypes.
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const TAGS: [u16; 2] = [0x8100, 0x88a8];
/// Protocols.
const ICMP: u8 = 1;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
/// Extension headers that a receiver walks over (RFC 8200 section 4), and that of fragments.
const EXTENSIONS: [u8; 3] = [0, 43, 60];
const FRAGMENT: u8 = 44;

/// Judges one input.
pub fn run(data: &[u8]) {
    let Some((own_mac, frame)) = data.split_first() else { return };
    let mut frame = frame.to_vec();
    if own_mac & 1 != 0
        && let Some(source) = frame.get_mut(6..12)
    {
        source.copy_from_slice(&MAC);
    }
    let mut switch = Switch::new([1, 2, 3, 4]);
    let ips = [IpAddr::V4(V4), IpAddr::V6(V6)];
    switch.add_guest(GUEST, Some(MAC), Some(&ips)).expect("the first");
    let Ok(packet) = Packet::parse(&frame) else { return };
    let now = Instant::from_secs(1000);
    let passes = switch.check_source(now, GUEST, &packet).is_ok()
        && (packet.tcp().is_some() || switch.check_claims(GUEST, &packet, &frame).is_ok());
    if passes {
        assert_eq!(frame[6..12], MAC, "it is of its guest's MAC");
        speaks_for_its_guest(&frame).unwrap_or_default();
    }
}

/// Frames of a real capture, and some that must not pass.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let own = |frame: &[u8]| [&[1], frame].concat();
    let frames = captures::frames().into_iter().map(|(_, frame)| own(&frame));
    frames.chain(own_frames().iter().map(|frame| own(frame))).chain([noise(1, 300)]).collect()
}

fn ethernet(kind: u16, body: &[u8]) -> Vec<u8> {
    [&[0x33, 0x33, 0, 0, 0, 1][..], &MAC, &kind.to_be_bytes(), body].concat()
}

fn v6(next: u8, body: &[u8]) -> Vec<u8> {
    let len = u16::try_from(body.len()).expect("short").to_be_bytes();
    let head = [0x60, 0, 0, 0, len[0], len[1], next, 255];
    let to = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).octets();
    ethernet(IPV6, &[&head[..], &LINK_LOCAL.octets(), &to, body].concat())
}

fn own_frames() -> Vec<Vec<u8>> {
    let advertisement = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    let fragment = |next, more| [next, 0, 0, more, 0, 0, 0, 9];
    let option = [ICMPV6, 0, 1, 4, 0, 0, 0, 0];
    let server = [0, 67, 0, 68, 0, 12, 0, 0, 2, 1, 6, 0];
    let udp_len = u16::try_from(20 + server.len()).expect("short").to_be_bytes();
    let v4_head = [0x45, 0, udp_len[0], udp_len[1], 0, 0, 0, 0, 64, UDP, 0, 0];
    let dhcp = [&v4_head[..], &V4.octets(), &[255; 4], &server].concat();
    let tagged = [&[0, 7][..], &IPV4.to_be_bytes(), &dhcp].concat();
    let arp = [&[0, 1, 8, 0, 6, 4, 0, 2][..], &MAC, &V4.octets(), &[0; 6], &[10, 0, 0, 1]];
    vec![
        v6(ICMPV6, &advertisement),
        v6(FRAGMENT, &[&fragment(ICMPV6, 0)[..], &advertisement].concat()),
        v6(FRAGMENT, &[&fragment(ICMPV6, 1)[..], &advertisement].concat()),
        v6(FRAGMENT, &[&fragment(FRAGMENT, 0)[..], &fragment(ICMPV6, 0), &advertisement].concat()),
        v6(60, &[&option[..], &advertisement].concat()),
        v6(FRAGMENT, &[&fragment(60, 0)[..], &option, &advertisement].concat()),
        v6(ICMPV6, &[&[136, 0, 0, 0, 0x60, 0, 0, 0][..], &V6.octets()].concat()),
        ethernet(IPV4, &dhcp),
        ethernet(TAGS[0], &tagged),
        ethernet(ARP, &arp.concat()),
    ]
}

/// Panics if not. `None`: nobody reads it as anything.
fn speaks_for_its_guest(frame: &[u8]) -> Option<()> {
    let (mut kind, mut body) = (be16(frame, 12)?, frame.get(14..)?);
    for _ in 0..2 {
        if TAGS.contains(&kind) {
            (kind, body) = (be16(body, 2)?, body.get(4..)?);
        }
    }
    match kind {
        ARP => arp(body),
        IPV4 => ipv4(body),
        IPV6 => ipv6(body),
        _ => Some(()),
    }
}

fn arp(body: &[u8]) -> Option<()> {
    let (sender, target): (&[u8; 4], &[u8; 4]) =
        (body.get(14..)?.first_chunk()?, body.get(24..)?.first_chunk()?);
    assert_eq!(body.get(8..14)?, MAC, "the sender of an ARP");
    let claims = if *sender == [0; 4] { target } else { sender };
    assert_eq!(*claims, V4.octets(), "it claims its own address");
    Some(())
}

fn ipv4(body: &[u8]) -> Option<()> {
    let len = usize::from(body.first()? & 15) * 4;
    let source: [u8; 4] = *body.get(12..)?.first_chunk()?;
    let (protocol, inner) = (*body.get(9)?, body.get(len.max(20)..)?);
    assert!(source == V4.octets() || source == [0; 4], "from {source:?}");
    if be16(body, 6)? & 0x1fff == 0 {
        is_harmless(protocol, inner, false);
    }
    Some(())
}

fn ipv6(body: &[u8]) -> Option<()> {
    let source: [u8; 16] = *body.get(8..)?.first_chunk()?;
    let mine = [V6.octets(), LINK_LOCAL.octets(), [0; 16]];
    assert!(mine.contains(&source), "from {source:?}");
    let (mut next, mut inner) = (*body.get(6)?, body.get(40..)?);
    loop {
        if next == FRAGMENT {
            if be16(inner, 2)? & 0xfff8 != 0 {
                return Some(());
            }
            (next, inner) = (*inner.first()?, inner.get(8..)?);
        } else if EXTENSIONS.contains(&next) {
            let len = 8 + 8 * usize::from(*inner.get(1)?);
            (next, inner) = (*inner.first()?, inner.get(len..)?);
        } else {
            is_harmless(next, inner, true);
            return Some(());
        }
    }
}

/// Nothing of a router, of a neighbour, or of a server of DHCP.
fn is_harmless(protocol: u8, body: &[u8], v6: bool) {
    match (protocol, body.first()) {
        (ICMP, Some(kind)) if !v6 => assert!(![5, 9].contains(kind), "of a router: {kind}"),
        (ICMPV6, Some(kind)) if v6 => {
            assert!(![134, 137].contains(kind), "of a router: {kind}");
            if *kind == 136 && body.len() >= 24 {
                let mine = [V6.octets(), LINK_LOCAL.octets()];
                assert!(mine.iter().any(|ip| body[8..24] == *ip), "a neighbour's address");
            }
        }
        (UDP, _) => {
            let to = be16(body, 2);
            assert!(![Some(68), Some(546)].contains(&to), "a server of DHCP");
        }
        _ => {}
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|it| u16::from_be_bytes(*it))
}
