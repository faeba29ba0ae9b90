//! Work that used to be done for each of many neighbours, in a whole daemon. Counted in its status:
//! frames read, given to each of them, waiting and dropped.

use nightporter_api::PortStatus;
use nightporter_core::limits::{BACKLOG_BYTES_MAX, BACKLOGS_BYTES_MAX, GROUP_BYTES_MAX};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::guest::{Guest, PLAIN, SENDS_SUPER};
use crate::segment::{ACK, End, Segment};
use crate::street::Street;

const BAD: End = End(9, 40_009);
const NEIGHBOUR: End = End(1, 80);
const ALL: [u8; 6] = [0xff; 6];

/// A street on which so many more live, with `offered` buffers each.
fn crowd(more: usize, offered: u64) -> (Street, Vec<Guest>) {
    let names: Vec<_> = (0..more).map(|n| format!("vm{n}")).collect();
    let street = Street::among("ack_offload = false", &names);
    let boot = |name: &String| {
        let mut guest = Guest::boot(&street.dir.join(name), PLAIN);
        guest.offer(offered);
        guest
    };
    let guests = names.iter().map(boot).collect();
    (street, guests)
}

fn all_drops(port: &PortStatus) -> u64 {
    port.drops.values().sum()
}

#[test]
fn super_segments_of_8_bytes_a_segment_are_cut_for_nobody() {
    let (mut street, _neighbours) = crowd(10, 8);
    let mut bad = Guest::boot(&street.dir.join("bad"), SENDS_SUPER);
    let payload = [7; 60_000];
    let segment = Segment { flags: ACK, payload: &payload, ..Segment::default() };
    let (hdr, to_one) = segment.super_frame(BAD, NEIGHBOUR, 8);
    let to_all = [&ALL[..], &to_one[6..]].concat();
    bad.send(&vec![(hdr, to_one); 20]);
    bad.send(&vec![(hdr, to_all); 20]);
    // Of 7,500 segments each, the half of them for each of twelve.
    street.host.until("bad", |port| all_drops(port) == 40);
    for port in street.host.status().ports {
        assert_eq!((port.frames_to_port, port.backlog_bytes), (0, 0), "{port:?}");
    }
    street.goes_on();
}

#[test]
fn long_broadcasts_for_forty_who_take_nothing_fill_no_more_than_all_may() {
    const FRAMES: usize = 600;
    let (mut street, _neighbours) = crowd(40, 0);
    let mut bad = Guest::boot(&street.dir.join("bad"), PLAIN);
    let mut frame = [ALL, BAD.mac()].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.resize(GROUP_BYTES_MAX, 7);
    for _ in 0..FRAMES / 50 {
        bad.send(&vec![(VirtioNetHdr::default(), frame.clone()); 50]);
    }
    street.host.until("bad", |port| port.frames_from_port == FRAMES as u64);
    let ports = street.host.status().ports;
    let of_crowd: Vec<_> = ports.iter().filter(|port| port.name.starts_with("vm")).collect();
    let mut waits = 0;
    for port in &of_crowd {
        let bytes = usize::try_from(port.backlog_bytes).unwrap();
        assert!(bytes <= BACKLOG_BYTES_MAX, "{port:?}");
        let dropped = usize::try_from(all_drops(port)).unwrap();
        assert_eq!(bytes / GROUP_BYTES_MAX + dropped, FRAMES, "each waits or is dropped");
        waits += bytes;
    }
    assert!(waits <= BACKLOGS_BYTES_MAX, "{waits} bytes wait");
    assert!(waits > BACKLOGS_BYTES_MAX / 2, "it was about the bound: {waits} bytes wait");
    street.goes_on();
}
