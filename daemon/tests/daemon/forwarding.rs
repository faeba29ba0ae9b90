//! Frames between two guests of one host.

use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::guest::{EVENTS, Guest, PLAIN, SENDS_SUPER};
use crate::host::{Dir, Host};
use crate::segment::{ACK, End, PSH, Segment, parse};

const A: End = End(1, 40_001);
const B: End = End(2, 80);

/// A host with two VMs that are plain switch ports.
fn host() -> (Dir, Host) {
    let dir = Dir::new();
    let plain = "ack_offload = false";
    let ports = dir.vm("a", plain) + &dir.vm("b", plain);
    let config = dir.configure("metrics = \"off\"", &ports);
    let host = Host::start(&dir, &config);
    (dir, host)
}

/// A frame that is nothing but Ethernet, with a number in it.
fn numbered(from: End, to: End, n: u16) -> (VirtioNetHdr, Vec<u8>) {
    let mut frame = [to.mac(), from.mac()].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.extend(n.to_be_bytes());
    frame.resize(60, 0);
    (VirtioNetHdr::default(), frame)
}

#[test]
fn two_guests_hear_each_other() {
    let (dir, _host) = host();
    let (mut a, mut b) = (Guest::boot(&dir.join("a"), PLAIN), Guest::boot(&dir.join("b"), PLAIN));
    a.offer(8);
    b.offer(8);
    a.send(&[numbered(A, B, 1)]);
    assert_eq!(b.receive(1), [numbered(A, B, 1).1]);
    b.send(&[numbered(B, A, 2), numbered(B, A, 3)]);
    assert_eq!(a.receive(2), [numbered(B, A, 2).1, numbered(B, A, 3).1]);
}

#[test]
fn a_guest_without_kicks_sends_and_makes_room_all_the_same() {
    let (dir, host) = host();
    let (mut a, mut b) = (Guest::boot(&dir.join("a"), PLAIN), Guest::boot(&dir.join("b"), PLAIN));
    b.is_polled();
    b.send(&[numbered(B, A, 0)]);
    a.offer(8);
    b.send(&[numbered(B, A, 1)]);
    assert_eq!(a.receive(2), [numbered(B, A, 0).1, numbered(B, A, 1).1]);
    a.send(&[numbered(A, B, 2)]);
    host.until("b", |b| b.backlog_bytes > 0);
    b.offer(8);
    assert_eq!(b.receive(1), [numbered(A, B, 2).1]);
}

#[test]
fn frames_for_a_guest_without_buffers_wait_in_order_and_no_more_than_a_thousand() {
    backlog(PLAIN);
    backlog(EVENTS);
}

fn backlog(features: u64) {
    let (dir, host) = host();
    let boot = |name| Guest::boot(&dir.join(name), features);
    let (mut a, mut b) = (boot("a"), boot("b"));
    b.send(&[numbered(B, A, 0)]);
    let all: Vec<_> = (0..1024).map(|n| numbered(A, B, n)).collect();
    all.chunks(64).for_each(|some| a.send(some));
    let waiting = host.until("b", |b| b.drops.get("queue_full") == Some(&24));
    assert_eq!((waiting.backlog_bytes, waiting.frames_to_port), (60_000, 0));
    let mut got = Vec::new();
    while got.len() < 1000 {
        b.offer(40);
        got.extend(b.receive(40));
    }
    assert_eq!(got, all[..1000].iter().map(|(_, frame)| frame.clone()).collect::<Vec<_>>());
    assert_eq!(host.port("b").backlog_bytes, 0);
}

#[test]
fn nobody_is_left_waiting_for_a_kick_that_was_not_asked_for() {
    let (sleeps, polls) = ("busy_poll_us = 0", "busy_poll_us = 50");
    for (features, daemon) in [(PLAIN, sleeps), (EVENTS, sleeps), (PLAIN, polls), (EVENTS, polls)] {
        let dir = Dir::new();
        let ports = dir.vm("a", "ack_offload = false") + &dir.vm("b", "ack_offload = false");
        let config = dir.configure(&format!("metrics = \"off\"\n{daemon}"), &ports);
        let _host = Host::start(&dir, &config);
        let boot = |name| Guest::boot(&dir.join(name), features);
        let (mut a, mut b) = (boot("a"), boot("b"));
        for n in 0..2000 {
            // Now the buffer is there first, now the frame.
            if n % 3 == 0 {
                b.offer(1);
            }
            a.send(&[numbered(A, B, n)]);
            if n % 3 != 0 {
                b.offer(1);
            }
            assert_eq!(b.receive(1), [numbered(A, B, n).1]);
        }
    }
}

#[test]
fn a_super_segment_reaches_a_plain_guest_as_segments_with_checksums() {
    let (dir, _host) = host();
    let mut a = Guest::boot(&dir.join("a"), SENDS_SUPER);
    let mut b = Guest::boot(&dir.join("b"), PLAIN);
    b.offer(16);
    let payload: Vec<u8> = (0..5000).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let flags = ACK | PSH;
    let segment =
        Segment { flags, seq: 7, ack: 9, window: 500, payload: &payload, ..Segment::default() };
    a.send(&[segment.super_frame(A, B, 1400)]);
    let got: Vec<_> = b.receive(4).iter().map(|frame| parse(frame)).collect();
    let seqs: Vec<_> = got.iter().map(|s| (s.seq, s.payload.len(), s.flags)).collect();
    assert_eq!(
        seqs,
        [(7, 1400, ACK), (1407, 1400, ACK), (2807, 1400, ACK), (4207, 800, ACK | PSH)]
    );
    assert_eq!(got.iter().flat_map(|s| s.payload.clone()).collect::<Vec<_>>(), payload);
}

#[test]
fn a_guest_that_dies_is_down_and_its_successor_gets_frames_again() {
    let (dir, host) = host();
    let (mut a, b) = (Guest::boot(&dir.join("a"), PLAIN), Guest::boot(&dir.join("b"), PLAIN));
    assert!(host.port("b").link);
    drop(b);
    host.until("b", |b| !b.link);
    a.send(&[numbered(A, B, 1)]);
    let mut b = Guest::boot(&dir.join("b"), PLAIN);
    b.offer(8);
    a.send(&[numbered(A, B, 2)]);
    assert_eq!(b.receive(1), [numbered(A, B, 2).1]);
}

#[test]
fn a_guest_that_floods_does_not_keep_another_from_being_heard() {
    let (dir, _host) = host();
    let (mut a, mut b) = (Guest::boot(&dir.join("a"), PLAIN), Guest::boot(&dir.join("b"), PLAIN));
    a.offer(8);
    for round in 0..50 {
        let many: Vec<_> = (0..64).map(|n| numbered(A, B, round * 64 + n)).collect();
        a.send(&many); // nobody reads them
    }
    b.send(&[numbered(B, A, 7)]);
    assert_eq!(a.receive(1), [numbered(B, A, 7).1]);
}

#[test]
fn no_frame_crosses_from_one_network_into_another() {
    let dir = Dir::new();
    let vm = |name, more: &str| dir.vm(name, &format!("ack_offload = false\n{more}"));
    let (red, mac) = ("network = \"red\"\n", "mac = \"02:00:00:00:00:02\"");
    let ports = vm("a", red) + &vm("b", &format!("{red}{mac}")) + &vm("c", "") + &vm("d", mac);
    let config = dir.configure("metrics = \"off\"", &ports);
    let _host = Host::start(&dir, &config);
    let [mut a, mut b, mut c, mut d] = ["a", "b", "c", "d"].map(|name| {
        let mut guest = Guest::boot(&dir.join(name), PLAIN);
        guest.offer(8);
        guest
    });
    let to_all = |from: End, n| {
        let (hdr, frame) = numbered(from, B, n);
        (hdr, [&[0xff; 6], &frame[6..]].concat())
    };
    // Both networks have stations with these two MACs.
    a.send(&[to_all(A, 1), numbered(A, B, 2)]);
    assert_eq!(b.receive(2), [to_all(A, 1).1, numbered(A, B, 2).1]);
    c.send(&[to_all(A, 3), numbered(A, B, 4)]);
    assert_eq!(d.receive(2), [to_all(A, 3).1, numbered(A, B, 4).1], "nothing came before");
    b.send(&[to_all(B, 5), numbered(B, A, 6)]);
    assert_eq!(a.receive(2), [to_all(B, 5).1, numbered(B, A, 6).1]);
    d.send(&[to_all(B, 7), numbered(B, A, 8)]);
    assert_eq!(c.receive(2), [to_all(B, 7).1, numbered(B, A, 8).1]);
    assert!(a.received().is_empty() && b.received().is_empty());
}
