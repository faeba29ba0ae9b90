//! Further checks of the frames of a guest with a list of addresses: only frames that are
//! understood pass.
//!
//! The frame's source MAC and IP were checked before ([`Switch::check_source`]). This code checks
//! the rest: frames in which an unchecked address may be (ARP of other hardware, frames behind
//! three VLAN tags, unknown EtherTypes), the addresses inside ARP and neighbour discovery (RFC
//! 4861), and frames that speak for routers.

use super::{GuestPort, Mac, Switch, is_host_address};
use crate::drops::DropReason;
use crate::port::PortId;
use crate::wire::ip::IpVersion;
use crate::wire::packet::{Ip, IpAddr16, L4, Net, Packet};

/// EtherType of a reverse ARP (RFC 903): a VMM has one sent for a guest that has moved.
const ETHERTYPE_RARP: u16 = 0x8035;
/// Where the sender's and the target's MAC are in it.
const RARP_MACS: [usize; 2] = [8, 18];

const PROTOCOL_ICMP: u8 = 1;
/// Types of ICMP for IPv4: a redirect (RFC 792), and an advertisement of a router (RFC 1256).
const V4_OF_A_ROUTER: [u8; 2] = [5, 9];
/// Where in an IPv4 header a fragment's place is (RFC 791 section 3.1), below its flags.
const FRAGMENT_AT: usize = 6;
const FRAGMENT_OFFSET: u16 = 0x1fff;
/// The header of an IPv6 fragment (RFC 8200 section 4.5): where its place is, above its flags.
const V6_FRAGMENT: usize = 8;
const V6_FRAGMENT_AT: usize = 2;
const V6_FRAGMENT_OFFSET: u16 = 0xfff8;
const PROTOCOL_IGMP: u8 = 2;
const PROTOCOL_UDP: u8 = 17;
const PROTOCOL_ICMP_V6: u8 = 58;
/// Extension headers of IPv6, the one of fragments among them: behind one at which the walk ended
/// there may be anything.
const V6_EXTENSIONS: [u8; 4] = [0, 43, 44, 60];
/// Where a server of DHCP listens.
const DHCP_SERVER: [u8; 2] = [0, 67];
/// Ports at which clients of DHCP receive answers (RFC 2131, RFC 8415): some look at no other port.
const DHCP_CLIENTS: [[u8; 2]; 2] = [[0, 68], [2, 34]];
/// The cookie that marks a datagram as DHCP for IPv4 (RFC 2131 section 3), and its place.
const DHCP_COOKIE: [u8; 4] = [99, 130, 83, 99];
const DHCP_COOKIE_AT: usize = 8 + 236;

/// Types of ICMPv6 (RFC 4861 section 4).
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOR_SOLICITATION: u8 = 135;
const NEIGHBOR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;
/// Errors of ICMP for IPv4: unreachable, time exceeded, a parameter's problem (RFC 792).
const V4_ERRORS: [u8; 3] = [3, 11, 12];
/// The same of ICMPv6, and packet too big (RFC 4443 section 3).
const V6_ERRORS: [u8; 4] = [1, 2, 3, 4];
/// Where the packet that an error is about begins in it.
const QUOTED_AT: usize = 8;
/// Where the target is in a neighbour solicitation or advertisement.
const TARGET_AT: usize = 8;

impl Switch {
    /// Whether a frame from `port` that is no TCP says nothing but what is its guest's to say. True
    /// for uplinks, and for guests without a list.
    ///
    /// # Errors
    /// [`DropReason::SpoofedIp`].
    #[inline(never)] // most frames are TCP
    pub fn check_claims(
        &self,
        port: PortId,
        packet: &Packet,
        frame: &[u8],
    ) -> Result<(), DropReason> {
        let owns = |ip| self.owns_by_list(port, ip);
        let is_fine = match &packet.net {
            _ if !self.has_list(port) => true,
            Net::Other => is_own_rarp(packet, frame),
            // A station without an address asks whether the address that it wants to use is taken.
            Net::Arp(arp) if arp.sender_ip.is_unspecified() => owns(arp.target_ip.into()),
            Net::Arp(_) => true,
            Net::Ip(ip) if ip.version == IpVersion::V4 => {
                let speaks = !ip.src.is_unspecified() || asks_for_an_address(ip, frame);
                let begins = begins_v4(packet, ip, frame);
                speaks && !is_of_a_router(begins) && self.may_serve(port, begins)
            }
            Net::Ip(ip) if ip.l4 == L4::Icmp => {
                says_own(ip, frame.get(usize::from(ip.payload_offset)..).unwrap_or_default(), owns)
            }
            Net::Ip(ip) => {
                let begins = begins_v6(ip, frame);
                let hides = match begins {
                    _ if ip.l4 == L4::Opaque && ip.protocol == PROTOCOL_ICMP_V6 => true,
                    Some((protocol, _)) if V6_EXTENSIONS.contains(&protocol) => true,
                    // Not all receivers ignore neighbour discovery in fragments (RFC 6980), of
                    // which one may be the whole packet.
                    Some((PROTOCOL_ICMP_V6, message)) => !says_own(ip, message, owns),
                    _ => false,
                };
                !hides && !ip.src.is_unspecified() && self.may_serve(port, begins)
            }
        };
        if is_fine { Ok(()) } else { Err(DropReason::SpoofedIp) }
    }

    /// Whether a packet whose source the guest behind `port` does not own is an ICMP error that it
    /// may forward (FWD-07): of a router behind it, about a packet to an address that it owns. The
    /// source is no address on the list of another guest.
    ///
    /// # Errors
    /// [`DropReason::SpoofedIp`].
    #[inline(never)]
    pub fn check_error_from_behind(
        &self,
        port: PortId,
        packet: &Packet,
        frame: &[u8],
    ) -> Result<(), DropReason> {
        let vlan = self.guest(port).and_then(GuestPort::vlan);
        let passes = |ip: &Ip| {
            let is_others = !is_host_address(ip.src) || self.is_listed(ip.src, vlan);
            let quoted = quoted_destination(ip, frame);
            !is_others && quoted.is_some_and(|dst| self.owns_by_list(port, dst))
        };
        match &packet.net {
            Net::Ip(ip) if ip.l4 == L4::Icmp && passes(ip) => Ok(()),
            _ => Err(DropReason::SpoofedIp),
        }
    }

    /// Whether the guest behind `port` may send a packet that begins so: a DHCP server or router
    /// must be trusted.
    fn may_serve(&self, port: PortId, begins: Option<(u8, &[u8])>) -> bool {
        let answers = begins.is_some_and(|(protocol, body)| {
            let ports = body.first_chunk().map(|[_, _, to @ ..]: &[u8; 4]| *to);
            protocol == PROTOCOL_UDP && ports.is_some_and(|to| DHCP_CLIENTS.contains(&to))
        });
        !answers || self.guest(port).is_some_and(|guest| guest.trusted)
    }
}

/// The link-local address that a MAC makes (RFC 4291 appendix A).
pub(super) fn link_local_of(mac: Mac) -> IpAddr16 {
    let [a, b, c, d, e, f] = mac;
    IpAddr16([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

/// The destination of the packet that an ICMP error quotes (RFC 792, RFC 4443 section 3).
fn quoted_destination(ip: &Ip, frame: &[u8]) -> Option<IpAddr16> {
    let message = frame.get(usize::from(ip.payload_offset)..)?;
    let quoted = message.get(QUOTED_AT..)?;
    if ip.version == IpVersion::V4 {
        let is_error = V4_ERRORS.contains(message.first()?);
        let dst = quoted.get(16..20)?.first_chunk::<4>().copied()?;
        return is_error.then(|| IpAddr16::from_v4(dst));
    }
    let is_error = V6_ERRORS.contains(message.first()?);
    let dst = quoted.get(24..40)?.first_chunk::<16>().copied()?;
    is_error.then_some(IpAddr16(dst))
}

fn is_own_rarp(packet: &Packet, frame: &[u8]) -> bool {
    let body = frame.get(usize::from(packet.eth.len)..).unwrap_or_default();
    let is_own = |at: usize| body.get(at..at + 6) == Some(&packet.eth.src);
    packet.eth.ethertype == ETHERTYPE_RARP && RARP_MACS.into_iter().all(is_own)
}

/// A guest without an address asks DHCP for one, and joins groups.
fn asks_for_an_address(ip: &Ip, frame: &[u8]) -> bool {
    let port_at = usize::from(ip.payload_offset) + 2;
    match ip.l4 {
        L4::Udp => frame.get(port_at..port_at + 2) == Some(&DHCP_SERVER),
        _ => ip.protocol == PROTOCOL_IGMP,
    }
}

/// The protocol inside an IPv4 packet and its first bytes; `None` for a later part of a fragmented
/// one. Clients of DHCP that read packets themselves may take such a part for a whole one, so what
/// looks like DHCP counts as that wherever it says that it belongs.
fn begins_v4<'a>(packet: &Packet, ip: &Ip, frame: &'a [u8]) -> Option<(u8, &'a [u8])> {
    let at = usize::from(packet.eth.len) + FRAGMENT_AT;
    let is_first = be16(frame, at)? & FRAGMENT_OFFSET == 0;
    let body = frame.get(usize::from(ip.payload_offset)..).unwrap_or_default();
    let is_dhcp = || body.get(DHCP_COOKIE_AT..).is_some_and(|it| it.starts_with(&DHCP_COOKIE));
    (is_first || is_dhcp()).then_some((ip.protocol, body))
}

/// As [`begins_v4`].
fn begins_v6<'a>(ip: &Ip, frame: &'a [u8]) -> Option<(u8, &'a [u8])> {
    let body = frame.get(usize::from(ip.payload_offset)..).unwrap_or_default();
    if ip.l4 != L4::Fragment {
        return Some((ip.protocol, body));
    }
    let is_first = be16(body, V6_FRAGMENT_AT)? & V6_FRAGMENT_OFFSET == 0;
    is_first.then(|| (body[0], body.get(V6_FRAGMENT..).unwrap_or_default()))
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|it| u16::from_be_bytes(*it))
}

/// Whether an IPv4 packet that begins so is one that only a router sends.
fn is_of_a_router(begins: Option<(u8, &[u8])>) -> bool {
    begins.is_some_and(|(protocol, body)| {
        protocol == PROTOCOL_ICMP && body.first().is_none_or(|kind| V4_OF_A_ROUTER.contains(kind))
    })
}

/// Whether a message of ICMPv6 is about its sender alone.
fn says_own(ip: &Ip, message: &[u8], owns: impl Fn(IpAddr16) -> bool) -> bool {
    let target = || {
        let target = message.get(TARGET_AT..TARGET_AT + 16)?;
        target.try_into().ok().map(IpAddr16)
    };
    match message.first() {
        None | Some(&(ROUTER_ADVERTISEMENT | REDIRECT)) => false,
        // Without an address of its own it asks whether its next one is taken, else for others'.
        Some(&NEIGHBOR_SOLICITATION) if !ip.src.is_unspecified() => true,
        Some(&(NEIGHBOR_SOLICITATION | NEIGHBOR_ADVERTISEMENT)) => target().is_some_and(owns),
        Some(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::packet::TPID_8021Q;
    use core::net::{IpAddr, Ipv6Addr};

    const UPLINK: PortId = PortId(0);
    const LISTED: PortId = PortId(1);
    const LEARNED: PortId = PortId(2);
    const MAC: Mac = [0x52, 0x54, 0, 1, 2, 3];
    const OTHER: Mac = [0x52, 0x54, 0, 9, 9, 9];
    const V4: [u8; 4] = [10, 0, 0, 10];
    const V6: [u8; 16] = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).octets();
    const FOREIGN_V6: [u8; 16] = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2).octets();
    const LINK_LOCAL: [u8; 16] =
        Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0x00ff, 0xfe01, 0x0203).octets();

    fn switch() -> Switch {
        let mut switch = Switch::new([1, 2, 3, 4]);
        let list = [IpAddr::from(V4), IpAddr::from(V6)];
        switch.add_guest(LISTED, Some(MAC), Some(&list)).unwrap();
        switch.add_guest(LEARNED, Some(OTHER), None).unwrap();
        switch
    }

    /// Whether a frame with this EtherType and body passes both checks at `port`.
    fn passes_at(port: PortId, mac: Mac, ethertype: u16, body: &[u8]) -> bool {
        check(&mut switch(), port, mac, ethertype, body).is_ok()
    }

    fn check(
        switch: &mut Switch,
        port: PortId,
        mac: Mac,
        ethertype: u16,
        body: &[u8],
    ) -> Result<(), DropReason> {
        let frame = [&[0xff; 6][..], &mac, &ethertype.to_be_bytes(), body].concat();
        let packet = Packet::parse(&frame).unwrap();
        let now = crate::time::Instant::from_secs(1000);
        let checked = switch
            .check_source(now, port, &packet)
            .or_else(|_| switch.check_error_from_behind(port, &packet, &frame));
        checked.and_then(|()| switch.check_claims(port, &packet, &frame))
    }

    fn passes(ethertype: u16, body: &[u8]) -> bool {
        assert!(passes_at(UPLINK, MAC, ethertype, body), "whatever comes from the network");
        passes_at(LISTED, MAC, ethertype, body)
    }

    fn arp(hardware: u16, sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
        let hardware = hardware.to_be_bytes();
        [&hardware[..], &[8, 0, 6, 4, 0, 1], &MAC, &sender, &[0; 6], &target].concat()
    }

    fn v4(src: [u8; 4], protocol: u8, body: &[u8]) -> Vec<u8> {
        let [high, low] = u16::try_from(20 + body.len()).unwrap().to_be_bytes();
        let head = [0x45, 0, high, low, 0, 0, 0, 0, 64, protocol, 0, 0];
        [&head[..], &src, &[255; 4], body].concat()
    }

    fn v6(src: [u8; 16], next: u8, body: &[u8]) -> Vec<u8> {
        let len = u8::try_from(body.len()).unwrap();
        let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).octets();
        [&[0x60, 0, 0, 0, 0, len, next, 255][..], &src, &all_nodes, body].concat()
    }

    fn nd(kind: u8, target: [u8; 16]) -> Vec<u8> {
        [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target].concat()
    }

    #[test]
    fn arp_speaks_of_ethernet_and_for_its_own_addresses() {
        const ARP: u16 = 0x0806;
        const NOBODY: [u8; 4] = [0; 4];
        assert!(passes(ARP, &arp(1, V4, [10, 0, 0, 99])));
        assert!(!passes(ARP, &arp(6, V4, [10, 0, 0, 99])), "hardware of IEEE 802");
        assert!(!passes(ARP, &arp(1, [10, 0, 0, 11], V4)));
        assert!(passes(ARP, &arp(1, NOBODY, V4)), "a probe (RFC 5227)");
        assert!(!passes(ARP, &arp(1, NOBODY, [10, 0, 0, 1])), "of somebody's address");
        assert!(passes_at(LEARNED, OTHER, ARP, &arp(6, V4, V4)), "it has no list");
    }

    #[test]
    fn what_nobody_reads_does_not_pass() {
        let tags: Vec<u8> = [[0, 1], TPID_8021Q.to_be_bytes()].concat().repeat(2);
        let hidden = [&tags[..], &[0, 1, 8, 0], &v4([10, 0, 0, 11], 17, &[0; 8])].concat();
        assert!(!passes(TPID_8021Q, &hidden), "behind three tags");
        assert!(!passes(0x8847, &[0; 40]), "MPLS may have IP inside");
        assert!(!passes(0x0026, &[0xaa, 0xaa, 3, 0, 0, 0, 8, 0]), "so may a frame of 802.3");
        assert!(passes_at(LEARNED, OTHER, 0x8847, &[0; 40]));
        let rarp =
            |mac: Mac| [&[0, 1, 8, 0, 6, 4, 0, 3][..], &MAC, &[0; 4], &mac, &[0; 4]].concat();
        assert!(passes(ETHERTYPE_RARP, &rarp(MAC)), "it has moved");
        assert!(!passes(ETHERTYPE_RARP, &rarp(OTHER)));
    }

    #[test]
    fn who_has_no_address_asks_for_one_and_says_nothing_else() {
        const NONE: [u8; 16] = [0; 16];
        assert!(passes(0x0800, &v4([0; 4], 17, &[0, 68, 0, 67, 0, 8, 0, 0])));
        assert!(!passes(0x0800, &v4([0; 4], 17, &[0, 68, 0, 53, 0, 8, 0, 0])));
        assert!(passes(0x0800, &v4([0; 4], 2, &[0x22; 8])), "IGMP");
        assert!(!passes(0x0800, &v4([0; 4], 1, &[8; 8])));
        assert!(passes(0x86dd, &v6(NONE, 58, &nd(143, NONE))), "a report of MLD");
        assert!(!passes(0x86dd, &v6(NONE, 17, &[0; 8])));
    }

    #[test]
    fn nobody_speaks_for_a_router_or_for_a_neighbour() {
        let from = |src, kind, target| passes(0x86dd, &v6(src, 58, &nd(kind, target)));
        assert!(!from(LINK_LOCAL, ROUTER_ADVERTISEMENT, [0; 16]));
        assert!(!from(LINK_LOCAL, REDIRECT, V6));
        assert!(from(V6, NEIGHBOR_SOLICITATION, FOREIGN_V6), "where is it?");
        assert!(from([0; 16], NEIGHBOR_SOLICITATION, V6), "is it taken?");
        assert!(!from([0; 16], NEIGHBOR_SOLICITATION, FOREIGN_V6), "nobody is to have it");
        assert!(from(LINK_LOCAL, NEIGHBOR_ADVERTISEMENT, V6));
        assert!(from(V6, NEIGHBOR_ADVERTISEMENT, LINK_LOCAL));
        assert!(!from(V6, NEIGHBOR_ADVERTISEMENT, FOREIGN_V6));
        assert!(!passes(0x86dd, &v6(V6, 58, &[NEIGHBOR_ADVERTISEMENT, 0])), "cut short");
        let behind = [&[58, 0, 0, 0, 0, 0, 0, 0][..], &nd(ROUTER_ADVERTISEMENT, [0; 16])].concat();
        assert!(!passes(0x86dd, &v6(V6, 60, &behind)), "an option in front changes nothing");
        let twice = [&[0, 0, 0, 0, 0, 0, 0, 0][..], &behind].concat();
        assert!(!passes(0x86dd, &v6(V6, 0, &twice)), "nor a chain that we do not follow");
    }

    #[test]
    fn nobody_speaks_for_a_router_of_ipv4_either() {
        const IP: u16 = 0x0800;
        let says = |kind: u8| v4(V4, PROTOCOL_ICMP, &[kind, 1, 0, 0, 10, 0, 0, 10]);
        for kind in V4_OF_A_ROUTER {
            assert!(!passes(IP, &says(kind)), "{kind}");
            let others = v4([10, 0, 0, 77], PROTOCOL_ICMP, &[kind; 8]);
            assert!(passes_at(LEARNED, OTHER, IP, &others), "it has no list");
            let mut fragment = says(kind);
            fragment[FRAGMENT_AT] = 0x20; // more of them follow
            assert!(!passes(IP, &fragment), "the first part of {kind}");
            fragment[FRAGMENT_AT + 1] = 1;
            assert!(passes(IP, &fragment), "what comes later has no type");
        }
        assert!(!passes(IP, &v4(V4, PROTOCOL_ICMP, &[])), "cut short");
        for kind in [0, 3, 8, 11] {
            assert!(passes(IP, &says(kind)), "an echo, or an error: {kind}");
        }
        assert!(passes(IP, &v4(V4, 17, &[5; 8])), "a datagram");
    }

    #[test]
    fn a_fragment_that_begins_a_message_says_no_more_than_a_whole_one_may() {
        const IP: u16 = 0x86dd;
        // All of the packet, the first part of one, and behind another such header.
        let part = |more: u8, next: u8, body: &[u8]| {
            v6(LINK_LOCAL, 44, &[&[next, 0, 0, more, 0, 0, 0, 9][..], body].concat())
        };
        for more in [0, 1] {
            let passes_as = |message: &[u8]| passes(IP, &part(more, PROTOCOL_ICMP_V6, message));
            for kind in [ROUTER_ADVERTISEMENT, REDIRECT] {
                assert!(!passes_as(&[kind; 16]), "{kind}");
            }
            assert!(!passes_as(&nd(NEIGHBOR_ADVERTISEMENT, FOREIGN_V6)));
            assert!(!passes_as(&[]), "cut short");
            assert!(passes_as(&nd(NEIGHBOR_ADVERTISEMENT, V6)));
            assert!(passes_as(&[128; 16]), "an echo");
            let nested =
                [&[PROTOCOL_ICMP_V6, 0, 0, 0, 0, 0, 0, 9][..], &[ROUTER_ADVERTISEMENT; 16]];
            assert!(!passes(IP, &part(more, 44, &nested.concat())));
        }
        let later = [&[PROTOCOL_ICMP_V6, 0, 0, 9, 0, 0, 0, 9][..], &[ROUTER_ADVERTISEMENT; 16]];
        assert!(passes(IP, &v6(LINK_LOCAL, 44, &later.concat())), "what comes later has no type");
    }

    #[test]
    fn fwd_07_errors_of_routers_behind_it_about_its_own_packets_pass() {
        const ROUTER_V6: [u8; 16] = Ipv6Addr::new(0xfd00, 0, 0, 9, 0, 0, 0, 1).octets();
        let says = |router: [u8; 4], kind: u8, dst: [u8; 4]| {
            let quoted =
                [&[0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 77][..], &dst].concat();
            let error = [&[kind, 4, 0, 0, 0, 0, 5, 0][..], &quoted, &[0; 8]].concat();
            passes(0x0800, &v4(router, PROTOCOL_ICMP, &error))
        };
        let router = [172, 17, 0, 9];
        assert!(says(router, 3, V4) && says(router, 11, V4));
        assert!(!says(router, 3, [10, 0, 0, 11]), "about somebody else's");
        assert!(!says(router, 8, V4) && !says(router, 5, V4), "no error");
        assert!(!says([255; 4], 3, V4), "of nobody");
        let says_v6 = |router: [u8; 16], kind: u8, dst: [u8; 16]| {
            let quoted = [&[0x60, 0, 0, 0, 0, 20, 6, 64][..], &FOREIGN_V6, &dst].concat();
            let error = [&[kind, 0, 0, 0, 0, 0, 5, 0][..], &quoted, &[0; 8]].concat();
            passes(0x86dd, &v6(router, PROTOCOL_ICMP_V6, &error))
        };
        assert!(says_v6(ROUTER_V6, 2, V6) && says_v6(ROUTER_V6, 1, V6));
        assert!(!says_v6(ROUTER_V6, 2, FOREIGN_V6) && !says_v6(ROUTER_V6, 128, V6));
        // Another guest's address is not its routers'.
        let mut shared = switch();
        shared.add_guest(PortId(3), Some([2; 6]), Some(&[IpAddr::from(router)])).unwrap();
        let quoted = [&[0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 77][..], &V4].concat();
        let error = [&[3, 4, 0, 0, 0, 0, 5, 0][..], &quoted, &[0; 8]].concat();
        let body = v4(router, PROTOCOL_ICMP, &error);
        assert_eq!(check(&mut shared, LISTED, MAC, 0x0800, &body), Err(DropReason::SpoofedIp));
    }

    #[test]
    fn nobody_gives_out_addresses_but_who_is_trusted() {
        const IP: [u16; 2] = [0x0800, 0x86dd];
        let udp = |ports: [u8; 4]| [&ports[..], &[0, 8, 0, 0]].concat();
        let datagram =
            |ports| [v4(V4, PROTOCOL_UDP, &udp(ports)), v6(V6, PROTOCOL_UDP, &udp(ports))];
        // In the first part of a packet, or behind an option in that.
        let parts = |ports, place: u16, next: u8, front: &[u8]| {
            let [mut part, _] = datagram(ports);
            part[FRAGMENT_AT..][..2].copy_from_slice(&(place >> 3 | 0x2000).to_be_bytes());
            let [high, low] = (place | 1).to_be_bytes();
            let body = [&[next, 0, high, low, 0, 0, 0, 9][..], front, &udp(ports)].concat();
            [part, v6(V6, 44, &body)]
        };
        let mut trusted = switch();
        trusted.set_trusted(LISTED, true);
        for ports in [[0, 67, 0, 68], [4, 43, 0, 68], [2, 35, 2, 34], [0, 9, 2, 34]] {
            for (ip, body) in IP.into_iter().zip(datagram(ports)) {
                assert!(!passes(ip, &body), "{ports:?}");
                let may = check(&mut trusted, LISTED, MAC, ip, &body);
                assert_eq!(may, Ok(()), "{ports:?} of one who is trusted");
            }
            for (ip, body) in IP.into_iter().zip(parts(ports, 0, PROTOCOL_UDP, &[])) {
                assert!(!passes(ip, &body), "the first part of {ports:?}");
            }
            for (ip, body) in IP.into_iter().zip(parts(ports, 8, PROTOCOL_UDP, &[])) {
                assert!(passes(ip, &body), "what comes later has no ports");
            }
        }
        let [_, hidden] = parts([2, 35, 2, 34], 0, 60, &[PROTOCOL_UDP, 0, 1, 4, 0, 0, 0, 0]);
        assert!(!passes(IP[1], &hidden), "behind an option in the first part");
        for ports in [[0, 68, 0, 67], [2, 34, 2, 35], [0, 67, 0, 67], [0, 53, 4, 68]] {
            for (ip, body) in IP.into_iter().zip(datagram(ports)) {
                assert!(passes(ip, &body), "a question, a relay, or another service: {ports:?}");
            }
        }
        assert!(passes(IP[0], &v4(V4, PROTOCOL_UDP, &[0, 67])), "cut short");
        let mut late = [&udp([0, 67, 0, 68])[..], &[0; 236], &DHCP_COOKIE].concat();
        for passes_so in [false, true] {
            let mut part = v4(V4, PROTOCOL_UDP, &late);
            part[FRAGMENT_AT + 1] = 1;
            assert_eq!(passes(IP[0], &part), passes_so, "who looks at no place takes it for whole");
            late[DHCP_COOKIE_AT] = 0;
        }
    }

    #[test]
    fn a_link_local_address_is_made_of_the_mac_or_listed() {
        let foreign = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1).octets();
        assert_eq!(link_local_of(MAC), IpAddr16(LINK_LOCAL));
        assert!(passes(0x86dd, &v6(LINK_LOCAL, 17, &[0; 8])));
        assert!(!passes(0x86dd, &v6(foreign, 17, &[0; 8])));
        assert!(passes_at(LEARNED, OTHER, 0x86dd, &v6(foreign, 17, &[0; 8])));
    }
}
