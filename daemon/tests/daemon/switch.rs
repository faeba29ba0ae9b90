//! Reachability: isolation, VLANs, owners of MACs.

use std::collections::BTreeMap;

use nightporter_api::{Change, MacCursor, Reply, Request};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::guest::{Guest, PLAIN, SENDS_SUPER};
use crate::host::{Dir, Host};
use crate::segment::{ACK, End, Segment, parse};

const A: End = End(1, 40_001);
const B: End = End(2, 80);
const ALL: [u8; 6] = [0xff; 6];

/// A host with these VMs, and their guests with buffers.
fn host<const N: usize>(vms: [(&str, &str); N], features: u64) -> (Dir, Host, [Guest; N]) {
    let dir = Dir::new();
    let ports: String = vms.iter().map(|(name, more)| dir.vm(name, more)).collect();
    let host = Host::start(&dir, &dir.configure("metrics = \"off\"", &ports));
    let guests = vms.map(|(name, _)| {
        let mut guest = Guest::boot(&dir.join(name), features);
        guest.offer(32);
        guest
    });
    (dir, host, guests)
}

fn set(name: &str, key: &str, value: &str) -> Change {
    Change::SetVm { name: name.into(), keys: BTreeMap::from([(key.into(), value.into())]) }
}

fn frame(from: End, to: [u8; 6]) -> (VirtioNetHdr, Vec<u8>) {
    let mut frame = [to, from.mac()].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.resize(100, 0);
    (VirtioNetHdr::default(), frame)
}

/// The same frame with a tag.
fn tagged(vlan: u8, (hdr, mut frame): (VirtioNetHdr, Vec<u8>)) -> (VirtioNetHdr, Vec<u8>) {
    frame.splice(12..12, [0x81, 0, 0, vlan]);
    (hdr, frame)
}

fn written(end: End) -> String {
    end.mac().map(|byte| format!("{byte:02x}")).join(":")
}

#[test]
fn the_macs_of_all_ports_are_told_or_those_of_one() {
    let (_dir, host, [mut a, mut b]) = host([("a", ""), ("b", "")], PLAIN);
    a.send(&[frame(A, ALL)]);
    b.receive(1);
    b.send(&[frame(B, ALL)]);
    a.receive(1);
    let macs = |port: Option<&str>| {
        let (mut all, mut from) = (Vec::new(), MacCursor::default());
        loop {
            let request = Request::Macs { port: port.map(String::from), from };
            let Reply::Macs(page) = host.ask(&request) else { panic!("no MACs") };
            all.extend(page.macs.into_iter().map(|it| (it.mac, it.port, it.known)));
            match page.next {
                Some(next) => from = next,
                None => break,
            }
        }
        all.sort();
        all
    };
    let [of_a, of_b] =
        [(A, "a"), (B, "b")].map(|(end, port)| (written(end), port.to_owned(), "guest".to_owned()));
    assert_eq!(macs(None), [of_a, of_b.clone()]);
    assert_eq!(macs(Some("b")), [of_b]);
    let refused = host.ask(&Request::Macs { port: Some("c".into()), from: MacCursor::default() });
    assert!(matches!(refused, Reply::Error { fix, .. } if fix == "use one of: a, b"));
}

#[test]
fn a_vm_is_isolated_from_others_from_now_on_and_then_no_longer() {
    let (_dir, host, [mut a, mut b]) = host([("a", ""), ("b", "")], PLAIN);
    b.send(&[frame(B, ALL)]);
    a.receive(1);
    for (round, isolated) in (1..).zip(["a", "b"]) {
        assert!(host.change(set(isolated, "isolated", "true")).done);
        a.send(&[frame(A, B.mac()), frame(A, ALL)]);
        host.until("a", |a| a.drops.get("isolated") == Some(&round));
        assert_eq!(b.received().len(), 0);
        assert!(host.change(set(isolated, "isolated", "")).done);
        a.send(&[frame(A, B.mac()), frame(A, ALL)]);
        assert_eq!(b.receive(2).len(), 2);
    }
}

#[test]
fn one_vm_knows_nothing_of_its_vlan_and_the_other_sees_its_tags() {
    let (_dir, host, [mut access, mut trunk]) =
        host([("access", "vlan = 7"), ("trunk", "trunk = [7, 9]")], PLAIN);
    access.send(&[tagged(7, frame(A, ALL)), frame(A, ALL)]);
    assert_eq!(trunk.receive(1), [tagged(7, frame(A, ALL)).1], "what it tagged itself is dropped");
    assert_eq!(host.port("access").drops.get("vlan"), Some(&1));
    trunk.send(&[frame(B, ALL), tagged(8, frame(B, ALL))]);
    trunk.send(&[tagged(9, frame(B, A.mac())), tagged(9, frame(B, ALL)), tagged(7, frame(B, ALL))]);
    assert_eq!(access.receive(1), [frame(B, ALL).1], "nothing of another VLAN");
    trunk.is_announced(B.mac());
    assert_eq!(access.receive(1)[0][12..14], [0x80, 0x35], "in VLAN 7, and in 9");
    assert_eq!(host.port("trunk").drops.get("vlan"), Some(&2));
    trunk.send(&[tagged(7, frame(B, A.mac()))]);
    assert_eq!(access.receive(1), [frame(B, A.mac()).1]);
    // It gets another VLAN, and then none.
    assert!(host.change(set("access", "vlan", "9")).done);
    access.send(&[frame(A, B.mac())]);
    assert_eq!(trunk.receive(1), [tagged(9, frame(A, B.mac())).1]);
    assert!(host.change(set("access", "vlan", "")).done);
    access.send(&[tagged(7, frame(A, B.mac()))]);
    assert_eq!(trunk.receive(1), [tagged(7, frame(A, B.mac())).1]);
    assert!(host.change(set("trunk", "trunk", "11,12")).done);
    access.send(&[tagged(7, frame(A, B.mac())), tagged(12, frame(A, B.mac()))]);
    assert_eq!(trunk.receive(1), [tagged(12, frame(A, B.mac())).1]);
}

#[test]
fn a_super_segment_is_cut_and_summed_behind_the_tag_that_it_got() {
    let (_dir, _host, [mut a, mut b]) = host([("a", "vlan = 7"), ("b", "vlan = 7")], SENDS_SUPER);
    let payload: Vec<u8> = (0..3000).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let segment = Segment {
        flags: ACK,
        seq: 7,
        ack: 9,
        window: 500,
        payload: &payload,
        ..Segment::default()
    };
    a.send(&[segment.super_frame(A, B, 1400)]);
    let got: Vec<_> = b.receive(3).iter().map(|frame| parse(frame)).collect();
    assert_eq!(got.iter().flat_map(|s| s.payload.clone()).collect::<Vec<_>>(), payload);
}

#[test]
fn a_mac_stays_whose_it_was_until_a_vmm_announces_that_it_has_moved() {
    let vms = [("a", ""), ("thief", ""), ("b", "vlan = 7")];
    let (_dir, host, [mut a, mut thief, mut b]) = host(vms, PLAIN);
    a.send(&[tagged(7, frame(A, ALL))]);
    assert_eq!(b.receive(1), [frame(A, ALL).1]);
    thief.receive(1);
    drop(a);
    host.until("a", |a| !a.link);
    thief.send(&[tagged(7, frame(A, ALL))]);
    let refused = host.until("thief", |thief| thief.drops.get("spoofed_mac") == Some(&1));
    assert_eq!(refused.spoofed_mac, Some(written(A)), "a may come back");
    thief.is_announced(A.mac());
    thief.send(&[tagged(7, frame(A, ALL))]);
    assert_eq!(b.receive(1), [frame(A, ALL).1]);
    // Announcements for a guest in a VLAN are sent there.
    b.is_announced(B.mac());
    let told = thief.receive(1);
    assert_eq!((told[0].len(), &told[0][12..18]), (64, &[0x81, 0, 0, 7, 0x80, 0x35][..]));
}

#[test]
fn a_trusted_vm_has_others_behind_it() {
    let (_dir, host, [mut router, mut b]) = host([("router", "trusted = true"), ("b", "")], PLAIN);
    let behind = End(7, 1);
    b.send(&[frame(B, ALL)]);
    router.receive(1);
    router.send(&[frame(A, ALL), frame(behind, ALL), frame(B, ALL)]);
    assert_eq!(b.receive(2), [frame(A, ALL).1, frame(behind, ALL).1], "nobody speaks for b");
    assert_eq!(host.port("router").drops.get("spoofed_mac"), Some(&1));
    b.send(&[frame(B, behind.mac()), frame(B, A.mac()), frame(B, End(8, 1).mac())]);
    assert_eq!(router.receive(3).len(), 3, "also what is for somebody unknown");
    assert!(host.change(set("router", "trusted", "")).done);
    router.send(&[frame(A, B.mac()), frame(behind, B.mac())]);
    host.until("router", |router| router.drops.values().sum::<u64>() >= 2);
    b.send(&[frame(B, behind.mac()), frame(B, ALL)]);
    assert_eq!(router.receive(1).len(), 1);
}
