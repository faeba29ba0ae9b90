//! Which port gets which frames, and which addresses it may claim.

use super::*;
use crate::limits::{LEARNED_IP_AGE, MAC_ENTRIES_MAX, MACS_MAX};
use crate::time::Duration;
use crate::wire::samples::{v4_segment, v6_segment};
use core::net::{Ipv4Addr, Ipv6Addr};

const UPLINK: PortId = PortId(0);
const A: PortId = PortId(1);
const B: PortId = PortId(2);
const MAC_A: Mac = [0x52, 0, 0, 0, 0, 0xa];
const MAC_B: Mac = [0x52, 0, 0, 0, 0, 0xb];
const MAC_FAR: Mac = [0x52, 0, 0, 0, 0, 0xf];
const MAC_NONE: Mac = [0; 6];
const BROADCAST: Mac = [0xff; 6];
const T0: Instant = Instant::from_millis(1_000_000);

fn untagged() -> VlanStack {
    VlanStack::default()
}

pub(super) fn tagged(tci: u16) -> VlanStack {
    behind(&[(0x8100, tci)], from(MAC_FAR, v4(1))).eth.vlan
}

/// The same frame behind these tags.
fn behind(tags: &[(u16, u16)], packet: Packet) -> Packet {
    let mut segment = v4_segment(b"");
    segment.l2[..12].copy_from_slice(&[packet.eth.dst, packet.eth.src].concat());
    let Net::Ip(ip) = packet.net else { panic!("not of {packet:?}") };
    segment.addresses.0 = ip.src;
    let tags = tags.iter().flat_map(|(tpid, tci)| [tpid.to_be_bytes(), tci.to_be_bytes()].concat());
    segment.l2.splice(12..12, tags);
    Packet::parse(&segment.frame()).unwrap()
}

/// A frame from `mac` with this source IP.
fn from(mac: Mac, ip: impl Into<IpAddr>) -> Packet {
    let ip = ip.into();
    let mut segment = if ip.is_ipv4() { v4_segment(b"") } else { v6_segment(b"") };
    segment.l2[6..12].copy_from_slice(&mac);
    segment.addresses.0 = IpAddr16::from(ip);
    Packet::parse(&segment.frame()).unwrap()
}

/// An ARP request.
fn arp(mac: Mac, sender_mac: Mac, sender_ip: [u8; 4]) -> Packet {
    let head = [0, 1, 8, 0, 6, 4, 0, 1];
    let target = [0, 0, 0, 0, 0, 0, 10, 0, 0, 99];
    let frame = [&BROADCAST[..], &mac, &[8, 6], &head, &sender_mac, &sender_ip, &target].concat();
    Packet::parse(&frame).unwrap()
}

fn v4(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, last)
}

fn own(ip: impl Into<IpAddr>) -> IpAddr16 {
    IpAddr16::from(ip.into())
}

/// An uplink, guest A bound to its MAC, 10.0.0.10 and others, guest B that is learned.
fn switch() -> Switch {
    let mut switch = Switch::new([1, 2, 3, 4]);
    let list = [v4(20).into(), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into(), v4(10).into()];
    switch.add_guest(A, Some(MAC_A), Some(&list)).unwrap();
    switch.add_guest(B, None, None).unwrap();
    switch
}

#[test]
fn a_known_guest_gets_its_frames_on_every_vlan_and_nobody_elses() {
    let mut switch = switch();
    for vlan in [untagged(), tagged(7)] {
        assert_eq!(switch.lookup(T0, UPLINK, vlan, MAC_A), Out::Port(A));
        assert_eq!(switch.lookup(T0, B, vlan, MAC_A), Out::Port(A));
        assert_eq!(switch.lookup(T0, A, vlan, MAC_A), Out::Drop(DropReason::Hairpin));
        assert_eq!(switch.lookup(T0, A, vlan, MAC_FAR), Out::Flood);
    }
}

#[test]
fn an_isolated_guest_reaches_uplinks_and_no_other_guest_and_none_reaches_it() {
    let mut switch = switch();
    switch.check_source(T0, B, &from(MAC_B, v4(11))).unwrap();
    switch.learn(T0, UPLINK, untagged(), MAC_FAR);
    let apart = Out::Drop(DropReason::Isolated);
    let ways = [(A, B, MAC_B), (B, A, MAC_A)];
    let reach = |switch: &mut Switch| {
        ways.map(|(from, to, mac)| (switch.lookup(T0, from, untagged(), mac), to))
    };
    let reached = |seen: [(Out, PortId); 2]| seen.map(|(out, to)| out == Out::Port(to));
    assert_eq!(reached(reach(&mut switch)), [true; 2]);
    for isolated in [A, B] {
        switch.set_isolated(isolated, true);
        assert_eq!(reach(&mut switch).map(|(out, _)| out), [apart; 2], "what was found before too");
        assert_eq!(switch.lookup(T0, isolated, untagged(), MAC_FAR), Out::Port(UPLINK));
        assert_eq!(switch.lookup(T0, UPLINK, untagged(), MAC_A), Out::Port(A));
        assert!(!switch.are_apart(isolated, UPLINK) && !switch.are_apart(UPLINK, isolated));
        switch.set_guest(A, Some(MAC_A), None).unwrap();
        assert_eq!(reach(&mut switch).map(|(out, _)| out), [apart; 2], "other addresses");
        switch.set_isolated(isolated, false);
        assert_eq!(reached(reach(&mut switch)), [true; 2]);
    }
}

#[test]
fn a_guest_is_found_in_its_vlans_and_nowhere_else() {
    let service = behind(&[(0x88a8, 7)], from(MAC_FAR, v4(1))).eth.vlan;
    let ways = [untagged(), tagged(7), tagged(0xe007), tagged(8), service];
    for (vlans, found) in [
        (Vlans::Any, [true; 5]),
        (Vlans::Access(7), [false, true, true, false, false]),
        (Vlans::Trunk(vec![8, 9]), [false, false, false, true, false]),
        (Vlans::Any, [true; 5]),
    ] {
        let mut switch = switch();
        switch.set_vlans(A, vlans.clone());
        for round in ["at first", "from memory"] {
            for (vlan, found) in ways.into_iter().zip(found) {
                let out = if found { Out::Port(A) } else { Out::Flood };
                assert_eq!(
                    switch.lookup(T0, UPLINK, vlan, MAC_A),
                    out,
                    "{vlan:?} {vlans:?} {round}"
                );
                assert_eq!(switch.is_in(A, vlan), found);
            }
        }
    }
    let mut switch = switch();
    assert_eq!(switch.lookup(T0, UPLINK, tagged(7), MAC_A), Out::Port(A));
    let before = switch.changes();
    switch.set_vlans(A, Vlans::Access(8));
    assert_ne!(switch.changes(), before, "who was staged is looked at again");
    assert_eq!(switch.lookup(T0, UPLINK, tagged(7), MAC_A), Out::Flood);
    switch.learn(T0, UPLINK, tagged(7), MAC_A);
    assert_eq!(switch.lookup(T0, B, tagged(7), MAC_A), Out::Port(UPLINK), "another with its MAC");
    assert_eq!(switch.lookup(T0, B, tagged(8), MAC_A), Out::Port(A));
}

#[test]
fn a_guest_speaks_in_its_vlans_and_one_of_no_vlan_puts_in_no_tag_itself() {
    const Q: u16 = 0x8100;
    let tags: [&[_]; 6] = [&[], &[(Q, 7)], &[(Q, 8)], &[(0x88a8, 7)], &[(Q, 7), (Q, 9)], &[(Q, 0)]];
    for (vlans, fine) in [
        (Vlans::Any, [true; 6]),
        (Vlans::Access(7), [false, true, false, false, false, false]),
        (Vlans::Trunk(vec![7]), [false, true, false, false, true, false]),
    ] {
        let mut switch = switch();
        switch.set_vlans(A, vlans.clone());
        for (tags, fine) in tags.into_iter().zip(fine) {
            let said = switch.check_source(T0, A, &behind(tags, from(MAC_A, v4(10))));
            let expected = if fine { Ok(()) } else { Err(DropReason::Vlan) };
            assert_eq!(said, expected, "{tags:x?} of {vlans:?}");
        }
        switch.set_guest(A, Some(MAC_A), None).unwrap();
        let other = switch.check_source(T0, A, &behind(&[(Q, 8)], from(MAC_A, v4(10))));
        assert_eq!(other.is_ok(), vlans == Vlans::Any, "other addresses");
    }
}

#[test]
fn group_addresses_flood_and_link_constrained_ones_stop_here() {
    let mut switch = switch();
    for dst in [BROADCAST, [0x33, 0x33, 0, 0, 0, 1], [0x01, 0x80, 0xc2, 0, 0, 0x10]] {
        assert_eq!(switch.lookup(T0, A, untagged(), dst), Out::Flood);
    }
    for last in 0..=0x0f {
        let out = switch.lookup(T0, A, untagged(), [0x01, 0x80, 0xc2, 0, 0, last]);
        assert_eq!(out, Out::Drop(DropReason::ReservedGroup));
    }
}

#[test]
fn flood_28_nobody_but_the_host_can_send_a_guest_a_heartbeat() {
    let mut switch = switch();
    let heartbeat = crate::wire::heartbeat::DESTINATION;
    for from in [UPLINK, A, B] {
        for vlan in [untagged(), tagged(7)] {
            let out = switch.lookup(T0, from, vlan, heartbeat);
            assert_eq!(out, Out::Drop(DropReason::ReservedGroup));
        }
    }
}

#[test]
fn what_is_behind_an_uplink_is_learned_per_vlan_and_forgotten_after_300_s() {
    let mut switch = switch();
    switch.learn(T0, UPLINK, tagged(7), MAC_FAR);
    assert_eq!(switch.lookup(T0, A, untagged(), MAC_FAR), Out::Flood);
    assert_eq!(switch.lookup(T0, A, tagged(8), MAC_FAR), Out::Flood);
    // The priority bits are not the VLAN.
    assert_eq!(switch.lookup(T0, A, tagged(0xe007), MAC_FAR), Out::Port(UPLINK));
    assert_eq!(switch.lookup(T0, UPLINK, tagged(7), MAC_FAR), Out::Drop(DropReason::Hairpin));
    let almost = T0 + Duration::from_millis(299_999);
    assert_eq!(switch.lookup(almost, A, tagged(7), MAC_FAR), Out::Port(UPLINK));
    assert_eq!(switch.lookup(T0 + MAC_AGE, A, tagged(7), MAC_FAR), Out::Flood);
    switch.learn(almost, UPLINK, tagged(7), MAC_FAR);
    assert_eq!(switch.lookup(T0 + MAC_AGE, A, tagged(7), MAC_FAR), Out::Port(UPLINK));
}

#[test]
fn a_priority_tag_is_no_vlan() {
    let mut switch = switch();
    switch.learn(T0, UPLINK, tagged(0x6000), MAC_FAR);
    assert_eq!(switch.lookup(T0, A, untagged(), MAC_FAR), Out::Port(UPLINK));
    // In front of a VLAN's tag it hides none.
    switch.set_vlans(A, Vlans::Trunk(vec![0, 7]));
    for (vlan, there) in [(7, true), (8, false)] {
        let stack = behind(&[(0x8100, 0x6000), (0x8100, vlan)], from(MAC_FAR, v4(1))).eth.vlan;
        assert_eq!(switch.is_in(A, stack), there, "{vlan}");
    }
    // Behind two of them nobody looks.
    let tags = [(0x8100, 0), (0x8100, 0), (0x8100, 8)];
    let eth = behind(&tags, from(MAC_FAR, v4(1))).eth;
    assert_eq!(switch.check_vlan(A, &eth), Err(DropReason::Vlan));
    let eth = behind(&tags[1..2], from(MAC_FAR, v4(1))).eth;
    assert_eq!(switch.check_vlan(A, &eth), Ok(()));
}

#[test]
fn a_station_may_move_from_one_uplink_to_another() {
    const SECOND: PortId = PortId(9);
    let mut switch = switch();
    switch.learn(T0, UPLINK, untagged(), MAC_FAR);
    switch.learn(T0, SECOND, untagged(), MAC_FAR);
    assert_eq!(switch.lookup(T0, A, untagged(), MAC_FAR), Out::Port(SECOND));
}

#[test]
fn sec_06_no_one_takes_a_guests_mac_over() {
    let mut switch = switch();
    switch.learn(T0, UPLINK, untagged(), MAC_A);
    switch.learn(T0, B, untagged(), MAC_FAR);
    assert_eq!(switch.check_source(T0, B, &from(MAC_A, v4(11))), Err(DropReason::SpoofedMac));
    assert_eq!(switch.lookup(T0, B, untagged(), MAC_A), Out::Port(A));
    assert_eq!(switch.lookup(T0, A, untagged(), MAC_FAR), Out::Flood);
    // A VM that moves away is found where it was heard as soon as its port is gone.
    switch.remove_port(A);
    assert_eq!(switch.lookup(T0, B, untagged(), MAC_A), Out::Port(UPLINK));
}

#[test]
fn sec_06_a_bound_guest_uses_its_own_addresses_only() {
    let mut switch = switch();
    let mut check = |packet| switch.check_source(T0, A, &packet);
    assert_eq!(check(from(MAC_A, v4(10))), Ok(()));
    assert_eq!(check(from(MAC_A, v4(11))), Err(DropReason::SpoofedIp));
    assert_eq!(check(from(MAC_A, Ipv6Addr::LOCALHOST)), Err(DropReason::SpoofedIp));
    assert_eq!(check(from(MAC_B, v4(10))), Err(DropReason::SpoofedMac));
    assert_eq!(check(arp(MAC_A, MAC_A, [10, 0, 0, 10])), Ok(()));
    assert_eq!(check(arp(MAC_A, MAC_A, [10, 0, 0, 11])), Err(DropReason::SpoofedIp));
    assert_eq!(check(arp(MAC_A, MAC_B, [10, 0, 0, 10])), Err(DropReason::SpoofedMac));
}

#[test]
fn every_guest_may_start_up_dhcp_probes_dad_and_link_local() {
    let mut switch = switch();
    let any = IpAddr::from(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));
    for (port, mac, link_local) in
        [(A, MAC_A, claims::link_local_of(MAC_A).to_ip()), (B, MAC_B, any)]
    {
        for packet in [
            from(mac, Ipv4Addr::UNSPECIFIED),
            from(mac, Ipv6Addr::UNSPECIFIED),
            from(mac, link_local),
            arp(mac, mac, [0; 4]),
        ] {
            assert_eq!(switch.check_source(T0, port, &packet), Ok(()));
        }
        assert!(!switch.is_own_ip(port, own(Ipv4Addr::UNSPECIFIED)));
        assert!(!switch.is_own_ip(port, own(link_local)));
    }
    let of_another = switch.check_source(T0, A, &from(MAC_A, any));
    assert_eq!(of_another, Err(DropReason::SpoofedIp), "it has a list");
}

#[test]
fn an_unbound_guest_is_bound_to_the_first_mac_it_uses() {
    let mut switch = switch();
    assert_eq!(switch.check_source(T0, B, &from(BROADCAST, v4(11))), Err(DropReason::SpoofedMac));
    assert_eq!(switch.check_source(T0, B, &from([0; 6], v4(11))), Err(DropReason::SpoofedMac));
    assert_eq!(switch.check_source(T0, B, &from(MAC_B, v4(11))), Ok(()));
    assert_eq!(switch.lookup(T0, A, tagged(3), MAC_B), Out::Port(B));
    assert_eq!(switch.check_source(T0, B, &from(MAC_FAR, v4(11))), Err(DropReason::SpoofedMac));
}

#[test]
fn com_11_an_unbound_guest_owns_the_first_sixteen_ips_it_uses_and_no_impossible_one() {
    let mut switch = switch();
    for last in 101..=116 {
        assert_eq!(switch.check_source(T0, B, &from(MAC_B, v4(last))), Ok(()));
        assert!(switch.is_own_ip(B, own(v4(last))));
    }
    let one_more = from(MAC_B, v4(117));
    assert_eq!(switch.check_source(T0, B, &one_more), Ok(()));
    assert!(!switch.is_own_ip(B, own(v4(117))));
    assert!(!switch.is_own_ip(A, own(v4(101))));
    // One that was silent for long makes room; the others were used meanwhile.
    let later = T0 + LEARNED_IP_AGE;
    for last in 101..=115 {
        assert_eq!(switch.check_source(later, B, &from(MAC_B, v4(last))), Ok(()));
    }
    assert_eq!(switch.check_source(later, B, &one_more), Ok(()));
    assert!(switch.is_own_ip(B, own(v4(117))));
    assert!(!switch.is_own_ip(B, own(v4(116))));
    for ip in [Ipv4Addr::BROADCAST, Ipv4Addr::LOCALHOST, Ipv4Addr::new(224, 0, 0, 1)] {
        let late = T0 + LEARNED_IP_AGE + LEARNED_IP_AGE;
        assert_eq!(switch.check_source(late, B, &from(MAC_B, ip)), Err(DropReason::SpoofedIp));
    }
}

#[test]
fn com_11_a_router_without_a_list_may_use_a_thousand_addresses_and_none_of_anothers_list() {
    let mut switch = switch();
    for n in 0..1000_u16 {
        let [hi, lo] = n.to_be_bytes();
        let ip = Ipv4Addr::new(10, 1, hi, lo);
        assert_eq!(switch.check_source(T0, B, &from(MAC_B, ip)), Ok(()));
        assert_eq!(switch.is_own_ip(B, own(ip)), n < 16, "the first are learned, and stay so");
    }
    let full = |switch: &mut Switch, packet| switch.check_source(T0, B, &packet);
    assert_eq!(full(&mut switch, arp(MAC_B, MAC_B, [10, 2, 0, 1])), Ok(()));
    assert_eq!(full(&mut switch, from(MAC_B, v4(10))), Err(DropReason::SpoofedIp));
    assert_eq!(full(&mut switch, from(MAC_FAR, v4(77))), Err(DropReason::SpoofedMac));
    assert_eq!(full(&mut switch, from(MAC_B, Ipv4Addr::BROADCAST)), Err(DropReason::SpoofedIp));
}

/// A router sends on what another guest gave it, from that guest's address.
#[test]
fn com_11_what_a_guest_forwards_for_another_takes_no_address_from_it() {
    const C: PortId = PortId(7);
    let mut switch = switch();
    switch.add_guest(C, None, None).unwrap();
    for last in 101..=116 {
        assert_eq!(switch.check_source(T0, C, &from(MAC_FAR, v4(last))), Ok(()));
    }
    assert_eq!(switch.check_source(T0, B, &from(MAC_B, v4(11))), Ok(()));
    assert_eq!(switch.check_source(T0, C, &from(MAC_FAR, v4(11))), Ok(()));
    assert!(switch.is_own_ip(B, own(v4(11))) && !switch.is_own_ip(C, own(v4(11))));
}

#[test]
fn an_ip_on_two_lists_is_guarded_until_both_ports_are_gone() {
    const C: PortId = PortId(7);
    let mut switch = switch();
    // Written twice, it counts once.
    switch.add_guest(C, None, Some(&[v4(10).into(), v4(10).into()])).unwrap();
    for guarded in [A, C] {
        assert_eq!(switch.check_source(T0, B, &from(MAC_B, v4(10))), Err(DropReason::SpoofedIp));
        switch.remove_port(guarded);
    }
    assert_eq!(switch.check_source(T0, B, &from(MAC_B, v4(10))), Ok(()));
    assert!(switch.listed.is_empty());
}

#[test]
fn com_11_the_list_is_what_a_bound_guest_owns() {
    let switch = switch();
    assert!(switch.is_own_ip(A, own(v4(10))));
    assert!(switch.is_own_ip(A, own(v4(20))));
    assert!(switch.is_own_ip(A, own(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1))));
    assert!(!switch.is_own_ip(A, own(v4(11))));
    assert!(!switch.is_own_ip(UPLINK, own(v4(10))));
    assert!(!switch.is_own_ip(PortId(77), own(v4(10))));
}

#[test]
fn an_unbound_guest_does_not_get_an_ip_that_is_on_anothers_list() {
    let mut switch = switch();
    assert_eq!(switch.check_source(T0, B, &from(MAC_B, v4(10))), Err(DropReason::SpoofedIp));
    assert_eq!(
        switch.check_source(T0, B, &arp(MAC_B, MAC_B, [10, 0, 0, 10])),
        Err(DropReason::SpoofedIp)
    );
}

#[test]
fn an_uplink_may_say_anything() {
    let mut switch = switch();
    assert_eq!(switch.check_source(T0, UPLINK, &from(MAC_FAR, v4(10))), Ok(()));
    assert_eq!(switch.check_source(T0, UPLINK, &arp(MAC_FAR, MAC_B, [10, 0, 0, 10])), Ok(()));
}

#[test]
fn a_configured_mac_is_refused_twice_and_wins_over_a_learned_one() {
    let mut switch = switch();
    assert_eq!(switch.add_guest(PortId(5), Some(MAC_A), None), Err(MacTaken(A)));
    switch.check_source(T0, B, &from(MAC_B, v4(11))).unwrap();
    switch.add_guest(PortId(5), Some(MAC_B), None).unwrap();
    assert_eq!(switch.lookup(T0, A, untagged(), MAC_B), Out::Port(PortId(5)));
    assert_eq!(switch.check_source(T0, B, &from(MAC_B, v4(11))), Err(DropReason::SpoofedMac));
}

#[test]
fn a_removed_port_leaves_nothing_behind() {
    let mut switch = switch();
    switch.learn(T0, UPLINK, untagged(), MAC_FAR);
    switch.remove_port(UPLINK);
    switch.remove_port(A);
    for dst in [MAC_FAR, MAC_A] {
        assert_eq!(switch.lookup(T0, B, untagged(), dst), Out::Flood);
    }
    assert_eq!(switch.learned, 0);
    switch.add_guest(PortId(5), Some(MAC_A), None).unwrap();
}

#[test]
fn a_replaced_guest_may_have_new_addresses_unless_they_are_configured() {
    let mut switch = switch();
    switch.check_source(T0, B, &from(MAC_B, v4(11))).unwrap();
    switch.forget_learned(T0, B);
    assert!(!switch.is_own_ip(B, own(v4(11))));
    assert_eq!(switch.lookup(T0, A, untagged(), MAC_B), Out::Flood);
    assert_eq!(switch.check_source(T0, B, &from(MAC_FAR, v4(12))), Ok(()));
    switch.forget_learned(T0, A);
    assert_eq!(switch.lookup(T0, B, untagged(), MAC_A), Out::Port(A));
    assert!(switch.is_own_ip(A, own(v4(10))));
}

#[test]
fn sec_06_no_frame_of_a_guest_takes_a_mac_that_was_heard_elsewhere() {
    const MOVED: Result<(), DropReason> = Err(DropReason::MacElsewhere);
    for vlan in [untagged(), tagged(7)] {
        let mut switch = switch();
        switch.learn(T0, UPLINK, vlan, MAC_FAR);
        let mut claims = |ms: u64| {
            let now = T0 + Duration::from_millis(ms);
            switch.check_source(now, B, &from(MAC_FAR, v4(11)))
        };
        assert_eq!([claims(0), claims(299_999)], [MOVED; 2]);
        assert_eq!(claims(300_000), Ok(()), "it was silent");
        assert_eq!(switch.lookup(T0 + MAC_AGE, A, vlan, MAC_FAR), Out::Port(B));
    }
}

#[test]
fn a_mac_that_was_heard_elsewhere_gives_way_to_the_vmm_and_to_the_configuration() {
    let mut announced = switch();
    announced.learn(T0, UPLINK, untagged(), MAC_FAR);
    assert!(announced.announce(T0, B, MAC_FAR), "it was heard elsewhere");
    assert_eq!(announced.lookup(T0, A, untagged(), MAC_FAR), Out::Port(B));
    assert_eq!(announced.check_source(T0, B, &from(MAC_FAR, v4(11))), Ok(()));
    assert!(!announced.announce(T0, B, MAC_B) && !announced.announce(T0, A, MAC_B));
    assert_eq!(announced.lookup(T0, UPLINK, untagged(), MAC_B), Out::Flood, "they have theirs");
    announced.add_guest(PortId(7), None, None).unwrap();
    for mac in [MAC_A, BROADCAST, MAC_NONE] {
        assert!(!announced.announce(T0, PortId(7), mac));
        let says = announced.check_source(T0, PortId(7), &from(mac, v4(12)));
        assert_eq!(says, Err(DropReason::SpoofedMac));
    }
    assert!(announced.may_be_behind(PortId(7)), "nobody's MAC, and none of a group");

    let mut configured = switch();
    configured.learn(T0, UPLINK, untagged(), MAC_FAR);
    configured.set_guest(B, Some(MAC_FAR), None).unwrap();
    assert_eq!(configured.check_source(T0, B, &from(MAC_FAR, v4(11))), Ok(()));
    assert_eq!(configured.lookup(T0, A, untagged(), MAC_FAR), Out::Port(B));
}

/// A VM that moves to another port of this host, or a spare one with its MAC that takes over.
#[test]
fn what_a_vmm_announces_while_another_guest_has_it_counts_when_that_one_has_gone() {
    const C: PortId = PortId(7);
    let mut switch = switch();
    switch.add_guest(C, None, None).unwrap();
    switch.check_source(T0, B, &from(MAC_B, v4(11))).unwrap();
    assert!(!switch.announce(T0, C, MAC_B));
    let says = |switch: &mut Switch| switch.check_source(T0, C, &from(MAC_B, v4(11)));
    assert_eq!(says(&mut switch), Err(DropReason::SpoofedMac), "the other one has it");
    switch.set_guest(C, None, None).unwrap();
    switch.forget_learned(T0, B);
    assert_eq!(says(&mut switch), Ok(()));
    assert_eq!(switch.lookup(T0, A, untagged(), MAC_B), Out::Port(C));
    // The next guest behind the port has not been announced.
    switch.forget_learned(T0, C);
    switch.add_guest(B, None, None).unwrap();
    switch.check_source(T0, B, &from(MAC_FAR, v4(12))).unwrap();
    assert!(!switch.announce(T0, C, MAC_FAR));
    switch.forget_learned(T0, C);
    switch.forget_learned(T0, B);
    let next = switch.check_source(T0, C, &from(MAC_FAR, v4(12)));
    assert_eq!(next, Err(DropReason::MacElsewhere));
}

#[test]
fn sec_06_a_station_of_another_vlan_keeps_no_mac_from_a_guest_that_knows_of_none() {
    const C: PortId = PortId(7);
    let says = |switch: &mut Switch, port| {
        switch.check_source(T0, port, &behind(&[(0x8100, 10)], from(MAC_FAR, v4(11))))
    };
    for (vlan, said) in [(20, Ok(())), (10, Err(DropReason::MacElsewhere))] {
        let mut switch = switch();
        switch.set_vlans(B, Vlans::Access(10));
        switch.learn(T0, UPLINK, tagged(vlan), MAC_FAR);
        assert_eq!(says(&mut switch, B), said, "of VLAN {vlan}");
    }
    // Nor does it free one of a guest that restarts for another guest.
    let mut switch = switch();
    switch.add_guest(C, None, None).unwrap();
    [B, C].into_iter().for_each(|port| switch.set_vlans(port, Vlans::Access(10)));
    assert_eq!(says(&mut switch, B), Ok(()));
    switch.forget_learned(T0, B);
    switch.learn(T0, UPLINK, tagged(20), MAC_FAR);
    assert_eq!(says(&mut switch, C), Err(DropReason::MacElsewhere));
    assert_eq!(says(&mut switch, B), Ok(()));
}

#[test]
fn a_list_guards_its_ips_in_the_vlans_of_its_guest() {
    const Q: u16 = 0x8100;
    let says = |switch: &mut Switch, vlan: &[(u16, u16)]| {
        switch.check_source(T0, B, &behind(vlan, from(MAC_B, v4(10)))).is_ok()
    };
    for (listed, own, may) in [
        (Vlans::Access(10), Vlans::Access(20), true),
        (Vlans::Access(20), Vlans::Access(20), false),
        (Vlans::Trunk(vec![10]), Vlans::Access(20), false),
        (Vlans::Any, Vlans::Access(20), false),
        (Vlans::Access(10), Vlans::Trunk(vec![20]), false),
        (Vlans::Access(10), Vlans::Any, false),
    ] {
        let mut switch = switch();
        switch.set_vlans(A, listed.clone());
        switch.set_vlans(B, own.clone());
        assert_eq!(says(&mut switch, &[(Q, 20)]), may, "on a list of {listed:?}, used in {own:?}");
        switch.set_guest(A, Some(MAC_A), Some(&[v4(10).into()])).unwrap();
        let again = from(MAC_B, v4(10));
        switch.set_guest(B, None, None).unwrap();
        let said = switch.check_source(T0, B, &behind(&[(Q, 20)], again));
        assert_eq!(said.is_ok(), may, "other addresses change no VLAN");
        switch.remove_port(A);
        assert!(switch.listed.is_empty());
    }
}

#[test]
fn sec_06_what_was_learned_in_one_vlan_passes_no_list_of_another() {
    const Q: u16 = 0x8100;
    let says = |switch: &mut Switch, vlan: u16| {
        switch.check_source(T0, B, &behind(&[(Q, vlan)], from(MAC_B, v4(10))))
    };
    let mut switch = switch();
    switch.set_vlans(A, Vlans::Access(10));
    switch.set_vlans(B, Vlans::Access(20));
    assert_eq!(says(&mut switch, 20), Ok(()), "on no list of this VLAN");
    switch.set_guest(B, None, None).unwrap();
    assert!(switch.is_own_ip(B, own(v4(10))), "the VLAN is the same");
    switch.set_guest(A, Some(MAC_A), Some(&[v4(10).into()])).unwrap();
    assert!(switch.is_own_ip(B, own(v4(10))), "nor does a list of another VLAN take it");
    switch.set_vlans(B, Vlans::Access(10));
    assert_eq!(says(&mut switch, 10), Err(DropReason::SpoofedIp));
}

#[test]
fn sec_06_a_list_takes_its_ips_from_who_has_learned_them() {
    let mut switch = switch();
    let says = |switch: &mut Switch, ip| switch.check_source(T0, B, &from(MAC_B, ip));
    assert_eq!(says(&mut switch, v4(77)), Ok(()));
    assert_eq!(says(&mut switch, v4(78)), Ok(()));
    switch.set_guest(A, Some(MAC_A), Some(&[v4(77).into()])).unwrap();
    assert_eq!(says(&mut switch, v4(77)), Err(DropReason::SpoofedIp));
    assert!(!switch.is_own_ip(B, own(v4(77))) && switch.is_own_ip(B, own(v4(78))));
}

#[test]
fn sec_06_the_mac_of_a_guest_that_restarts_is_kept_for_it() {
    const C: PortId = PortId(7);
    let mut switch = switch();
    switch.add_guest(C, None, None).unwrap();
    switch.check_source(T0, B, &from(MAC_B, v4(11))).unwrap();
    switch.forget_learned(T0, B);
    let thief = switch.check_source(T0, C, &from(MAC_B, v4(12)));
    assert_eq!(thief, Err(DropReason::MacElsewhere));
    assert_eq!(switch.lookup(T0, A, untagged(), MAC_B), Out::Flood);
    assert_eq!(switch.check_source(T0, B, &from(MAC_B, v4(11))), Ok(()));
    switch.forget_learned(T0, B);
    switch.remove_port(B);
    assert_eq!(switch.check_source(T0, C, &from(MAC_B, v4(12))), Ok(()), "its port has gone");
}

#[test]
fn stations_behind_tags_are_known_as_many_as_others() {
    let station = |n: usize| -> Mac {
        let [.., a, b] = n.to_be_bytes();
        [2, 1, 0, 0, a, b]
    };
    let mut switch = switch();
    (0..MACS_MAX).for_each(|n| switch.learn(T0, UPLINK, tagged(20), station(n)));
    let is_known =
        |switch: &mut Switch, n| switch.lookup(T0, A, tagged(20), station(n)) == Out::Port(UPLINK);
    let unknown = (0..MACS_MAX).find(|n| !is_known(&mut switch, *n));
    assert_eq!(unknown, None);
}

#[test]
fn inv_20_an_address_flood_cannot_grow_the_table_or_push_anyone_out() {
    let mut switch = switch();
    switch.learn(T0, UPLINK, untagged(), MAC_FAR);
    for n in 0..50_000_u32 {
        let [a, b, c, d] = n.to_be_bytes();
        switch.learn(T0, UPLINK, untagged(), [2, 1, a, b, c, d]);
    }
    assert_eq!((switch.learned, switch.macs.len()), (MAC_ENTRIES_MAX, MAC_ENTRIES_MAX + 1));
    assert_eq!(switch.lookup(T0, A, untagged(), MAC_FAR), Out::Port(UPLINK));
    assert_eq!(switch.lookup(T0, B, untagged(), MAC_A), Out::Port(A));
    // The known keep being known, and the flood is forgotten.
    let later = T0 + Duration::from_secs(200);
    switch.learn(later, UPLINK, untagged(), MAC_FAR);
    switch.learn(T0 + MAC_AGE, UPLINK, untagged(), [2; 6]);
    assert_eq!(switch.learned, 2);
    assert_eq!(switch.lookup(T0 + MAC_AGE, A, untagged(), [2; 6]), Out::Port(UPLINK));
    assert_eq!(switch.lookup(T0 + MAC_AGE, A, untagged(), MAC_FAR), Out::Port(UPLINK));
}

#[test]
fn other_addresses_for_a_guest_count_at_once_and_what_it_taught_stays() {
    let mut switch = Switch::new([1, 2, 3, 4]);
    let [one, two] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
    let ip = "10.0.0.7".parse().unwrap();
    switch.add_guest(A, None, None).unwrap();
    switch.add_guest(B, Some(two), Some(&[ip])).unwrap();
    let says = |switch: &mut Switch, port, mac, ip: [u8; 4]| {
        switch.check_ip_source(T0, port, mac, IpAddr16::from_v4(ip))
    };
    assert_eq!(says(&mut switch, A, one, [10, 0, 0, 1]), Ok(()));
    assert_eq!(switch.set_guest(A, Some(two), None), Err(MacTaken(B)));
    assert_eq!(switch.lookup(T0, UPLINK, VlanStack::default(), one), Out::Port(A));
    switch.set_guest(A, None, None).unwrap();
    assert_eq!(
        switch.lookup(T0, UPLINK, VlanStack::default(), one),
        Out::Port(A),
        "it taught that"
    );
    assert!(switch.is_own_ip(A, IpAddr16::from_v4([10, 0, 0, 1])));
    // The list of B goes: its address is free for A.
    assert_eq!(says(&mut switch, A, one, [10, 0, 0, 7]), Err(DropReason::SpoofedIp));
    switch.set_guest(B, Some(two), None).unwrap();
    assert_eq!(says(&mut switch, A, one, [10, 0, 0, 7]), Ok(()));
    // A gets another MAC: the one that it had is a stranger's.
    let three = [2, 0, 0, 0, 0, 3];
    switch.set_guest(A, Some(three), None).unwrap();
    assert_eq!(says(&mut switch, A, one, [10, 0, 0, 1]), Err(DropReason::SpoofedMac));
    assert_eq!(switch.lookup(T0, UPLINK, VlanStack::default(), three), Out::Port(A));
    assert_eq!(switch.lookup(T0, UPLINK, VlanStack::default(), one), Out::Flood);
}

#[test]
fn a_guest_that_lives_elsewhere_is_found_there_until_it_is_back() {
    let mut switch = switch();
    let to_a = |switch: &mut Switch| switch.lookup(T0, B, untagged(), MAC_A);
    assert_eq!(to_a(&mut switch), Out::Port(A));
    switch.set_away(A, true);
    assert_eq!(to_a(&mut switch), Out::Flood);
    switch.learn(T0, UPLINK, untagged(), MAC_A);
    assert_eq!(to_a(&mut switch), Out::Port(UPLINK));
    switch.set_away(A, false);
    assert_eq!(to_a(&mut switch), Out::Port(A));
    assert_eq!(switch.check_source(T0, A, &from(MAC_A, v4(10))), Ok(()));
}

#[test]
fn the_mac_of_a_guest_that_lives_elsewhere_is_nobody_elses_here() {
    let mut switch = Switch::new([1, 2, 3, 4]);
    switch.add_guest(A, Some(MAC_A), None).unwrap();
    switch.add_guest(B, None, None).unwrap();
    switch.set_away(A, true);
    let spoofed = Err(DropReason::SpoofedMac);
    assert_eq!(switch.check_source(T0, B, &from(MAC_A, v4(10))), spoofed);
    assert!(!switch.announce(T0, B, MAC_A));
    assert_eq!(switch.check_source(T0, B, &from(MAC_A, v4(10))), spoofed, "its VMM may not either");
    assert_eq!(switch.add_guest(PortId(7), Some(MAC_A), None), Err(MacTaken(A)));
    let to_a = |switch: &mut Switch| switch.lookup(T0, UPLINK, untagged(), MAC_A);
    // Another list changes nothing of that; another MAC ends it, as does none.
    switch.set_guest(A, Some(MAC_A), Some(&[])).unwrap();
    assert_eq!(to_a(&mut switch), Out::Flood);
    switch.set_away(A, false);
    assert_eq!(to_a(&mut switch), Out::Port(A));
    switch.set_away(A, true);
    switch.set_guest(A, None, None).unwrap();
    switch.set_away(A, true);
    assert_eq!(switch.check_source(T0, A, &from(MAC_A, v4(10))), Ok(()));
    assert_eq!(to_a(&mut switch), Out::Port(A), "nobody else knows whose it is");
}

#[test]
fn others_are_behind_a_trusted_guest_as_behind_an_uplink() {
    let (mut switch, mac_c) = (switch(), [0x52, 0, 0, 0, 0, 0xc]);
    switch.check_source(T0, B, &from(MAC_B, v4(11))).unwrap();
    let other = from(mac_c, v4(12));
    assert_eq!(switch.check_source(T0, B, &other), Err(DropReason::SpoofedMac));
    assert!(!switch.may_be_behind(B));
    switch.set_trusted(B, true);
    assert!(switch.may_be_behind(B));
    switch.check_source(T0, B, &other).unwrap();
    let tag = tagged(7);
    switch.check_source(T0, B, &behind(&[(0x8100, 7)], from(MAC_FAR, v4(13)))).unwrap();
    let there = |switch: &mut Switch, vlan, mac| switch.lookup(T0, UPLINK, vlan, mac);
    assert_eq!(there(&mut switch, untagged(), MAC_B), Out::Port(B));
    assert_eq!(there(&mut switch, untagged(), mac_c), Out::Port(B));
    assert_eq!(there(&mut switch, tag, MAC_FAR), Out::Port(B));
    assert_eq!(there(&mut switch, untagged(), MAC_FAR), Out::Flood, "known in its VLAN alone");
    // Not who is somebody here, or nobody, and not on others' addresses.
    for (mac, ip) in [(MAC_A, 12), (BROADCAST, 12), (MAC_NONE, 12)] {
        let spoofed = switch.check_source(T0, B, &from(mac, v4(ip)));
        assert_eq!(spoofed, Err(DropReason::SpoofedMac), "{mac:?}");
    }
    assert_eq!(switch.check_source(T0, B, &from(mac_c, v4(10))), Err(DropReason::SpoofedIp));
    // They move as stations of uplinks do, and no guest takes them.
    switch.add_guest(PortId(3), None, None).unwrap();
    let taken = switch.check_source(T0, PortId(3), &other);
    assert_eq!(taken, Err(DropReason::MacElsewhere));
    switch.learn(T0, UPLINK, untagged(), mac_c);
    assert_eq!(switch.lookup(T0, A, untagged(), mac_c), Out::Port(UPLINK));
    switch.check_source(T0, B, &other).unwrap();
    assert_eq!(there(&mut switch, untagged(), mac_c), Out::Port(B));
    // It is in no other VLANs than before.
    switch.set_vlans(B, Vlans::Trunk(vec![8]));
    assert_eq!(there(&mut switch, tag, MAC_FAR), Out::Flood);
    switch.set_vlans(B, Vlans::Any);
    assert_eq!(there(&mut switch, tag, MAC_FAR), Out::Port(B));
    // With other addresses it is trusted all the same; and then no longer, and so after its end.
    switch.set_guest(B, None, None).unwrap();
    switch.check_source(T0, B, &other).unwrap();
    let mut gone = switch;
    gone.forget_learned(T0, B);
    assert_eq!(there(&mut gone, untagged(), mac_c), Out::Flood);
    gone.check_source(T0, B, &other).unwrap();
    gone.set_trusted(B, false);
    assert_eq!(there(&mut gone, untagged(), mac_c), Out::Flood);
    gone.check_source(T0, B, &from(MAC_B, v4(11))).unwrap();
    assert_eq!(gone.check_source(T0, B, &other), Err(DropReason::SpoofedMac));
}
