//! Answers to "who has this address?" from stations that were told, so that no peer is asked.
//!
//! The daemon answers ARP requests (RFC 826) and neighbour solicitations (RFC 4861 section 4.3)
//! without a VLAN tag that go to all stations (ARP) or to a multicast group (solicitations). It
//! does not answer:
//!
//! - a request to one station alone, which goes to that station: its sender wants to know whether
//!   the station lives;
//! - a request of a station that wants to use the address itself (RFC 5227, RFC 4862), which goes
//!   to all hosts: a station that was told but lives no more must not keep its address from others;
//! - a request for an address that was told of two stations;
//! - a request for an address of a station of this host, which answers itself.
//!
//! The answer does not say that the station is a router, because registered stations are none.

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};

use crate::port::PortId;
use crate::switch::Mac;
use crate::wire::checksum::{Checksum, pseudo_header_v6};
use crate::wire::packet::{Arp, Ip, IpAddr16, IpVersion, L4, Net, Packet};

/// Bytes of the shortest frame without its FCS.
const FRAME_MIN: usize = 60;
/// Number of ICMPv6 (IANA).
const ICMPV6: u8 = 58;
/// Types (RFC 4861 section 4).
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Flags of an advertisement: it was asked for; it overrides what the receiver knows.
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
/// Bytes of an advertisement with its option.
const ADVERTISEMENT_LEN: u8 = 32;

/// The addresses of stations that were told.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    of: BTreeMap<Mac, Vec<IpAddr16>>,
    macs: BTreeSet<(IpAddr16, Mac)>,
    /// Those of stations of this host, and the port of each: two ports may have the same one.
    here: BTreeSet<(IpAddr16, PortId)>,
}

impl Addresses {
    pub(super) fn is_empty(&self) -> bool {
        self.macs.is_empty()
    }

    /// `mac` has these, and no others.
    pub(super) fn set(&mut self, mac: Mac, ips: &[IpAddr]) {
        let before = self.of.remove(&mac).unwrap_or_default();
        for ip in before {
            self.macs.remove(&(ip, mac));
        }
        let ips: Vec<_> = ips.iter().map(|&ip| IpAddr16::from(ip)).collect();
        self.macs.extend(ips.iter().map(|&ip| (ip, mac)));
        if !ips.is_empty() {
            self.of.insert(mac, ips);
        }
    }

    /// The station of this host behind `port` has these, and no others.
    pub(super) fn set_here(&mut self, port: PortId, ips: &[IpAddr]) {
        self.here.retain(|(_, of)| *of != port);
        self.here.extend(ips.iter().map(|&ip| (IpAddr16::from(ip), port)));
    }

    /// The one station that has `ip`, if none of this host has it.
    fn find(&self, ip: IpAddr16) -> Option<Mac> {
        if self.here.range((ip, PortId(0))..=(ip, PortId(u16::MAX))).next().is_some() {
            return None;
        }
        let mut macs = self.macs.range((ip, [0; 6])..=(ip, [0xff; 6])).map(|(_, mac)| *mac);
        let only = macs.next()?;
        macs.next().is_none().then_some(only)
    }

    /// See [`super::Overlay::answer`].
    pub(super) fn answer(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let packet = Packet::parse(frame).ok()?;
        if !packet.eth.vlan.is_empty() {
            return None;
        }
        let (asker, found) = match &packet.net {
            Net::Arp(arp) => (arp.sender_mac, self.answer_arp(arp)),
            Net::Ip(ip) => (packet.eth.src, self.answer_solicitation(ip, frame)),
            Net::Other => return None,
        };
        let (mac, ethertype, body) = found.filter(|(mac, ..)| *mac != asker)?;
        let mut answer = [&asker[..], &mac, &ethertype, &body].concat();
        answer.resize(answer.len().max(FRAME_MIN), 0);
        Some(answer)
    }

    fn answer_arp(&self, arp: &Arp) -> Option<(Mac, [u8; 2], Vec<u8>)> {
        // A host that announces itself does not ask; a host without an address asks the owner of
        // the address.
        if arp.op != 1 || arp.sender_ip == arp.target_ip || arp.sender_ip.is_unspecified() {
            return None;
        }
        let mac = self.find(IpAddr16::from(IpAddr::V4(arp.target_ip)))?;
        let (target, sender) = (arp.target_ip.octets(), arp.sender_ip.octets());
        let head = [0, 1, 8, 0, 6, 4, 0, 2];
        let body = [&head[..], &mac, &target, &arp.sender_mac, &sender].concat();
        Some((mac, [8, 6], body))
    }

    fn answer_solicitation(&self, ip: &Ip, frame: &[u8]) -> Option<(Mac, [u8; 2], Vec<u8>)> {
        if ip.version != IpVersion::V6 || !matches!(ip.l4, L4::Icmp) || ip.src.is_unspecified() {
            return None;
        }
        let at = usize::from(ip.payload_offset);
        // Its hop limit shows that it is from this link.
        let hop_limit = *frame.get(usize::from(ip.header_offset) + 7)?;
        let message = frame.get(at..ip.end as usize)?;
        let target = IpAddr16(*message.get(8..)?.first_chunk()?);
        if message[..2] != [SOLICITATION, 0] || hop_limit != 255 || !is_right(ip, message) {
            return None;
        }
        let mac = self.find(target)?;
        let to = ip.src;
        let mut advertisement = [0; ADVERTISEMENT_LEN as usize];
        (advertisement[0], advertisement[4]) = (ADVERTISEMENT, SOLICITED | OVERRIDE);
        advertisement[8..24].copy_from_slice(&target.0);
        advertisement[24..26].copy_from_slice(&[2, 1]); // the MAC of the target
        advertisement[26..].copy_from_slice(&mac);
        let len = ADVERTISEMENT_LEN;
        let mut sum = Checksum::new(pseudo_header_v6(target.0, to.0, ICMPV6, len.into()));
        sum.add_bytes(&advertisement);
        advertisement[2..4].copy_from_slice(&sum.finish().to_be_bytes());
        let head = [0x60, 0, 0, 0, 0, len, ICMPV6, 255];
        let body = [&head[..], &target.0, &to.0, &advertisement].concat();
        Some((mac, [0x86, 0xdd], body))
    }
}

/// Whether the checksum of an ICMPv6 message is right.
fn is_right(ip: &Ip, message: &[u8]) -> bool {
    let len = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut sum = Checksum::new(pseudo_header_v6(ip.src.0, ip.dst.0, ICMPV6, len));
    sum.add_bytes(message);
    sum.finish() == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ASKER: Mac = [2, 0, 0, 0, 0, 1];
    const STATION: Mac = [2, 0, 0, 0, 0, 2];
    const OTHER: Mac = [2, 0, 0, 0, 0, 3];
    const V4: [u8; 4] = [10, 0, 0, 2];
    const V6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
    const NEAR_V6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

    fn addresses() -> Addresses {
        let mut addresses = Addresses::default();
        addresses.set(STATION, &[V4.into(), V6.into()]);
        addresses
    }

    fn arp(asker: Mac, op: u8, sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
        let head = [8, 6, 0, 1, 8, 0, 6, 4, 0, op];
        [&[0xff; 6][..], &asker, &head, &asker, &sender, &[0; 6], &target].concat()
    }

    /// With a right checksum.
    fn solicitation(src: [u8; 16], target: [u8; 16]) -> Vec<u8> {
        let group = [&[0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff], &target[13..]].concat();
        let group: [u8; 16] = group.try_into().unwrap();
        let mut message = [&[SOLICITATION, 0, 0, 0, 0, 0, 0, 0][..], &target].concat();
        let mut sum = Checksum::new(pseudo_header_v6(src, group, ICMPV6, 24));
        sum.add_bytes(&message);
        message[2..4].copy_from_slice(&sum.finish().to_be_bytes());
        let ethernet = [&[0x33, 0x33, 0xff][..], &target[13..], &ASKER, &[0x86, 0xdd]].concat();
        [&ethernet[..], &[0x60, 0, 0, 0, 0, 24, ICMPV6, 255], &src, &group, &message].concat()
    }

    #[test]
    fn who_asks_for_the_mac_of_an_ipv4_address_gets_it() {
        let answer = addresses().answer(&arp(ASKER, 1, [10, 0, 0, 1], V4)).unwrap();
        assert_eq!((&answer[..6], answer.len()), (&ASKER[..], FRAME_MIN));
        let packet = Packet::parse(&answer).unwrap();
        assert_eq!(packet.eth.src, STATION);
        let Net::Arp(arp) = packet.net else { panic!("{packet:?}") };
        assert_eq!((arp.op, arp.sender_mac, arp.sender_ip), (2, STATION, V4.into()));
        assert_eq!(arp.target_ip.octets(), [10, 0, 0, 1]);
    }

    #[test]
    fn who_solicits_a_neighbour_hears_where_it_is() {
        let answer = addresses().answer(&solicitation(NEAR_V6, V6)).unwrap();
        let packet = Packet::parse(&answer).unwrap();
        assert_eq!((packet.eth.dst, packet.eth.src), (ASKER, STATION));
        let Net::Ip(ip) = packet.net else { panic!("{packet:?}") };
        assert_eq!((ip.src.0, ip.dst.0), (V6, NEAR_V6));
        let message = &answer[usize::from(ip.payload_offset)..];
        assert!(is_right(&ip, message));
        assert_eq!((message[0], message[4]), (ADVERTISEMENT, SOLICITED | OVERRIDE));
        assert_eq!((&message[8..24], &message[26..]), (&V6[..], &STATION[..]));
    }

    #[test]
    fn an_address_of_this_hosts_is_answered_for_by_who_has_it() {
        let mut known = addresses();
        let questions = [arp(ASKER, 1, [10, 0, 0, 1], V4), solicitation(NEAR_V6, V6)];
        let answered =
            |known: &Addresses| questions.each_ref().map(|frame| known.answer(frame).is_some());
        let (one, two) = (PortId(1), PortId(2));
        let v4 = [V4.into(), [10, 0, 0, 1].into()];
        known.set_here(one, &v4);
        assert_eq!(answered(&known), [false, true]);
        known.set_here(two, &[V6.into(), V4.into()]);
        known.set_here(one, &[]);
        assert_eq!(answered(&known), [false, false], "the other has that address too");
        known.set_here(two, &[V6.into()]);
        assert_eq!(answered(&known), [true, false]);
        known.set_here(two, &[]);
        assert_eq!(answered(&known), [true, true]);
    }

    #[test]
    fn nobody_is_answered_who_does_not_ask_for_another() {
        let mut known = addresses();
        let near = [10, 0, 0, 1];
        for (frame, why) in [
            (arp(ASKER, 2, near, V4), "an answer"),
            (arp(ASKER, 1, V4, V4), "it says where it is"),
            (arp(STATION, 1, near, V4), "the station asks for its own address"),
            (arp(ASKER, 1, [0; 4], V4), "it asks whether anybody has it before it uses it"),
            (solicitation([0; 16], V6), "likewise"),
            (arp(ASKER, 1, near, [10, 0, 0, 3]), "nobody knows"),
            (solicitation(NEAR_V6, NEAR_V6), "nobody knows"),
        ] {
            assert_eq!(known.answer(&frame), None, "{why}");
        }
        let mut tagged = arp(ASKER, 1, near, V4);
        tagged.splice(12..12, [0x81, 0, 0, 7]);
        assert_eq!(known.answer(&tagged), None, "of a VLAN nothing was told");
        let mut wrong = solicitation(NEAR_V6, V6);
        *wrong.last_mut().unwrap() ^= 1;
        assert_eq!(known.answer(&wrong), None, "a broken one");
        let mut far = solicitation(NEAR_V6, V6);
        far[21] = 254;
        assert_eq!(known.answer(&far), None, "one from another link");
        known.set(OTHER, &[V4.into()]);
        assert_eq!(known.answer(&arp(ASKER, 1, near, V4)), None, "two say that they have it");
        known.set(STATION, &[]);
        let answer = known.answer(&arp(ASKER, 1, near, V4)).unwrap();
        assert_eq!(answer[6..12], OTHER);
        known.set(OTHER, &[]);
        assert!(known.is_empty() && known.of.is_empty());
    }

    proptest! {
        #[test]
        fn whatever_is_asked_the_answer_is_a_frame(
            mut frame in prop::sample::select(vec![
                arp(ASKER, 1, [10, 0, 0, 1], V4),
                solicitation(NEAR_V6, V6),
            ]),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
            len in any::<prop::sample::Index>(),
        ) {
            for (at, byte) in changes {
                let at = at.index(frame.len());
                frame[at] = byte;
            }
            frame.truncate(len.index(frame.len() + 1));
            if let Some(answer) = addresses().answer(&frame) {
                let packet = Packet::parse(&answer).unwrap();
                prop_assert_eq!(packet.eth.src, STATION);
            }
        }
    }
}
