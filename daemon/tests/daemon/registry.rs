//! The registry of a list: the overlay follows its stations. Needs root.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use nightporter_api::{Change, Reply, Request, StationInfo};
use nightporter_core::wire::checksum::{Checksum, pseudo_header_v6};

use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, Host};
use crate::overlay::{ALL, FAR, Peer, VM, VNI, World, numbered, overlay, two_hosts, world};
use crate::segment::End;
use crate::sockets::listen;
use crate::toe;

fn station(host: &str) -> String {
    format!(
        "[[station]]\nvni = {VNI}\nmac = \"02:00:00:00:00:02\"\nhost = \"{host}\"\n\
         ips = [\"10.0.0.2\"]\nvm = \"far\"\n"
    )
}

const VM_KEYS: &str = "ack_offload = false\nmac = \"02:00:00:00:00:01\"";

/// The daemon's list is another now.
fn list(w: &World, stations: &str) -> Vec<String> {
    let overlay = overlay("192.0.2.1", "\"192.0.2.2\", \"192.0.2.3\"");
    let ports = overlay + stations + &w.dir.vm("a", VM_KEYS);
    w.dir.configure("metrics = \"off\"", &ports);
    let plan = w.host.change(Change::Reload {});
    assert!(plan.done, "{plan:?}");
    plan.steps
}

pub(crate) fn stations(host: &Host) -> Vec<StationInfo> {
    match host.ask(&Request::Stations { after: None }) {
        Reply::Stations(page) => page.stations,
        other => panic!("{other:?}"),
    }
}

/// Who has 10.0.0.`last`?
fn arp(last: u8) -> Vec<u8> {
    arp_from(VM, [10, 0, 0, 1], last)
}

/// The same, asked by who has this address.
fn arp_from(end: End, sender: [u8; 4], last: u8) -> Vec<u8> {
    let mac = end.mac();
    let head = [8, 6, 0, 1, 8, 0, 6, 4, 0, 1];
    let mut frame = [&ALL[..], &mac, &head, &mac, &sender, &[0; 6], &[10, 0, 0, last]].concat();
    frame.resize(60, 0);
    frame
}

/// The VM, which is fd00::1, asks for the MAC of fd00::2 (RFC 4861 section 4.3).
fn solicitation() -> Vec<u8> {
    let [src, target] = [1, 2].map(address_v6);
    let group = "ff02::1:ff00:2".parse::<Ipv6Addr>().unwrap().octets();
    let mut message = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target].concat();
    let mut sum = Checksum::new(pseudo_header_v6(src, group, 58, 24));
    sum.add_bytes(&message);
    message[2..4].copy_from_slice(&sum.finish().to_be_bytes());
    let ethernet = [&[0x33, 0x33, 0xff, 0, 0, 2][..], &VM.mac(), &[0x86, 0xdd]].concat();
    [&ethernet[..], &[0x60, 0, 0, 0, 0, 24, 58, 255], &src, &group, &message].concat()
}

fn address_v6(last: u16) -> [u8; 16] {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).octets()
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_station_on_the_list_is_found_at_once_and_speaks_for_itself_when_it_is_taken_off() {
    let w = world(VM_KEYS);
    let [one, two] = &w.peers;
    let both = station("192.0.2.3").replace("\"10.0.0.2\"", "\"10.0.0.2\", \"fd00::2\"");
    assert_eq!(list(&w, &both), ["~ stations: 0 listed -> 1"]);
    let mut a = Guest::boot(&w.dir.join("a"), PLAIN);
    a.offer(16);
    a.send_plain(&numbered(FAR.mac(), VM, 1));
    assert_eq!(two.gets().0, numbered(FAR.mac(), VM, 1));
    // Who has its address? The answer is there, and no peer was asked.
    a.send_plain(&solicitation());
    let answer = a.receive(1).remove(0);
    assert_eq!((&answer[..6], &answer[6..12]), (&VM.mac()[..], &FAR.mac()[..]));
    assert_eq!((answer[54], &answer[62..78]), (136, &address_v6(2)[..]), "an advertisement");
    assert_eq!(answer[80..86], FAR.mac());
    a.send_plain(&arp(2));
    let answer = a.receive(1).remove(0);
    assert_eq!((&answer[..6], &answer[6..12]), (&VM.mac()[..], &FAR.mac()[..]));
    assert_eq!((&answer[20..22], &answer[28..32]), (&[0, 2][..], &[10, 0, 0, 2][..]));
    // Another peer says that it is there, and is not believed.
    one.sends(&numbered(ALL, FAR, 2));
    w.host.until("over", |over| over.drops.get("spoofed_mac") == Some(&1));
    a.send_plain(&arp(3));
    for peer in [one, two] {
        assert_eq!(peer.gets().0, arp(3), "nobody knows that one");
    }
    assert_eq!(list(&w, ""), ["~ stations: 1 listed -> 0"]);
    one.sends(&numbered(ALL, FAR, 3));
    assert_eq!(a.receive(1), [numbered(ALL, FAR, 3)]);
    for question in [arp(2), solicitation()] {
        a.send_plain(&question);
        for peer in [one, two] {
            assert_eq!(peer.gets().0, question, "it has to answer itself");
        }
    }
    a.send_plain(&numbered(FAR.mac(), VM, 4));
    assert_eq!(one.gets().0, numbered(FAR.mac(), VM, 4), "where it was heard");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn an_overlay_whose_address_comes_later_knows_what_was_told_before() {
    let (a, b) = two_hosts();
    let dir = Dir::new();
    let overlay = overlay("192.0.2.1", "\"192.0.2.2\", \"192.0.2.3\"");
    let ports = overlay + &station("192.0.2.3") + &dir.vm("a", VM_KEYS);
    a.ip("addr del 192.0.2.1/24 dev v0");
    let host = a.start(&dir, &dir.configure("metrics = \"off\"", &ports));
    let [one, two] = ["192.0.2.2", "192.0.2.3"].map(|ip| Peer::new(&b, ip));
    let mut vm = Guest::boot(&dir.join("a"), PLAIN);
    host.until("a", |a| a.link);
    assert!(!host.port("over").link);
    a.ip("addr add 192.0.2.1/24 dev v0");
    host.until("over", |over| over.link);
    vm.send_plain(&numbered(FAR.mac(), VM, 1));
    assert_eq!(two.gets().0, numbered(FAR.mac(), VM, 1));
    vm.send_plain(&numbered(ALL, VM, 2));
    assert_eq!(one.gets().0, numbered(ALL, VM, 2), "and nothing before");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_vm_that_was_made_anew_gets_the_address_that_the_list_has_of_its_old_mac() {
    let w = world(VM_KEYS);
    let new = End(3, 1);
    let keys = "ack_offload = false\nmac = \"02:00:00:00:00:03\"\nips = [\"10.0.0.2\"]";
    let of_vlan = keys.replace("00:03\"", "00:04\"") + "\nvlan = 7";
    list(&w, &(station("192.0.2.3") + &w.dir.vm("b", keys) + &w.dir.vm("c", &of_vlan)));
    let mut c = Guest::boot(&w.dir.join("c"), PLAIN);
    c.offer(16);
    w.host.until("c", |c| c.link);
    let found = stations(&w.host).into_iter().find(|it| it.vm == "c").unwrap();
    assert_eq!((found.claim.as_deref(), &found.ips[..]), (Some("unlisted"), &[][..]));
    let mut a = Guest::boot(&w.dir.join("a"), PLAIN);
    a.offer(16);
    a.send_plain(&arp(2));
    assert_eq!(a.receive(1)[0][6..12], FAR.mac(), "it is not there yet");
    let mut b = Guest::boot(&w.dir.join("b"), PLAIN);
    b.offer(16);
    w.host.until("b", |b| b.link);
    // It asks whether somebody has it (RFC 5227), then others ask for it.
    let questions = [(&mut b, arp_from(new, [0; 4], 2)), (&mut a, arp(2))];
    for (guest, question) in questions {
        guest.send_plain(&question);
        for peer in &w.peers {
            assert_eq!(peer.gets().0, question, "whoever lives answers");
        }
    }
    assert_eq!(a.receive(1), [arp_from(new, [0; 4], 2)], "and nobody has answered");
    assert_eq!(b.receive(1), [arp(2)], "it answers itself");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_vm_whose_link_is_down_may_be_on_another_host() {
    let w = world(VM_KEYS);
    let [one, _] = &w.peers;
    let claims = || stations(&w.host).into_iter().map(|s| s.claim.unwrap()).collect::<Vec<_>>();
    assert_eq!(claims(), [""; 0], "it is nowhere yet");
    let mut a = Guest::boot(&w.dir.join("a"), PLAIN);
    a.offer(16);
    w.host.until("a", |a| a.link);
    assert_eq!(claims(), ["unlisted"]);
    let moved = station("192.0.2.2").replace("00:02\"", "00:01\"");
    list(&w, &(moved + &w.dir.vm("b", "ack_offload = false")));
    let [found] = &stations(&w.host)[..] else { panic!("one station") };
    assert_eq!((found.claim.as_deref(), found.other), (Some("refused"), "192.0.2.2".parse().ok()));
    drop(a);
    w.host.until("a", |a| !a.link);
    let [found] = &stations(&w.host)[..] else { panic!("one station") };
    assert_eq!((found.claim.as_deref(), found.host), (None, "192.0.2.2".parse().unwrap()));
    let mut b = Guest::boot(&w.dir.join("b"), PLAIN);
    b.offer(16);
    b.send_plain(&numbered(ALL, VM, 1));
    w.host.until("b", |b| b.drops.get("spoofed_mac") == Some(&1));
    let to_it = numbered(VM.mac(), End(3, 1), 1);
    b.send_plain(&to_it);
    assert_eq!(one.gets().0, to_it, "a VM of its old host finds it there");
    one.sends(&numbered(ALL, VM, 2));
    assert_eq!(b.receive(1), [numbered(ALL, VM, 2)], "and hears it from there");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_frame_for_a_station_on_the_list_goes_to_its_host_alone_and_nobody_here_is_it() {
    let w = world(VM_KEYS);
    let [one, two] = &w.peers;
    list(&w, &(w.dir.vm("b", "ack_offload = false") + &w.dir.vm("c", "ack_offload = false")));
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|vm| Guest::boot(&w.dir.join(vm), PLAIN));
    [&mut a, &mut b, &mut c].into_iter().for_each(|guest| guest.offer(16));
    // One that has no MAC yet gets what is for nobody known; so does one that took this MAC.
    a.send_plain(&numbered(FAR.mac(), VM, 1));
    for guest in [&mut b, &mut c] {
        assert_eq!(guest.receive(1), [numbered(FAR.mac(), VM, 1)]);
    }
    b.send_plain(&numbered(VM.mac(), FAR, 2));
    assert_eq!(a.receive(1), [numbered(VM.mac(), FAR, 2)]);
    a.send_plain(&numbered(FAR.mac(), VM, 3));
    assert_eq!(b.receive(1), [numbered(FAR.mac(), VM, 3)]);
    for peer in [one, two] {
        assert_eq!(peer.gets().0, numbered(FAR.mac(), VM, 1));
    }
    let vms = w.dir.vm("b", "ack_offload = false") + &w.dir.vm("c", "ack_offload = false");
    list(&w, &(station("192.0.2.3") + &vms));
    a.send_plain(&numbered(FAR.mac(), VM, 4));
    assert_eq!(two.gets().0, numbered(FAR.mac(), VM, 4));
    b.send_plain(&numbered(VM.mac(), FAR, 5));
    w.host.until("b", |b| b.drops.get("spoofed_mac") == Some(&1));
    a.send_plain(&numbered(ALL, VM, 6));
    for guest in [&mut b, &mut c] {
        assert_eq!(guest.receive(1), [numbered(ALL, VM, 6)], "and nothing before");
    }
    assert_eq!(one.gets().0, numbered(ALL, VM, 6), "nor here");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn what_a_vm_of_this_host_listens_to_is_shown_also_with_a_list_unless_it_is_in_a_vlan() {
    let keys = format!("{VM_KEYS}\nips = [\"10.0.0.1\"]\ntoe = true");
    let of_vlan = keys.replace("00:01\"", "00:03\"") + "\nvlan = 7";
    let w = world(&keys);
    let ports = overlay("192.0.2.1", "\"192.0.2.2\", \"192.0.2.3\"") + &station("192.0.2.3");
    let ports = ports + &w.dir.vm("a", &keys) + &w.dir.vm("b", &of_vlan);
    w.dir.configure("metrics = \"off\"", &ports);
    assert!(w.host.change(Change::Reload {}).done);
    let mut cards = ["a", "b"].map(|vm| Guest::boot(&w.dir.join(vm), PLAIN));
    cards.iter_mut().for_each(|card| card.offer(16));
    // The first change is reported first.
    let mut guests = ["b", "a"].map(|vm| toe::boot(&w.dir, vm));
    guests.iter_mut().for_each(|guest| listen(guest, "10.0.0.1:80"));
    let shown = |name: &str| {
        let mut all = stations(&w.host).into_iter();
        all.find(|it| it.claim.is_some() && it.vm == name).and_then(|it| it.listens)
    };
    let until_shown = |listens: Option<Vec<u16>>| {
        let begun = std::time::Instant::now();
        while shown("a") != listens {
            assert!(begun.elapsed() < crate::host::LIMIT, "{:?}", shown("a"));
        }
    };
    until_shown(Some(vec![80]));
    assert_eq!(shown("b"), None);
    let of_others = stations(&w.host).into_iter().find(|it| it.vm == "far").unwrap();
    assert_eq!(of_others.listens, None, "a list says nothing of that");
    // Its link stays, and it is claimed as before. Its sockets end.
    for (vlan, listens) in [("7", None), ("", Some(vec![]))] {
        let keys = BTreeMap::from([("vlan".into(), vlan.into())]);
        assert!(w.host.change(Change::SetVm { name: "a".into(), keys }).done);
        until_shown(listens);
        assert!(w.host.port("a").link);
    }
}
