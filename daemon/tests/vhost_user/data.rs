//! Frames through rings whose driver keeps the rules.

use nightporter_core::drops::DropReason;
use nightporter_core::turn::Sent;
use nightporter_core::wire::virtio_net::{F_NEEDS_CSUM, GSO_TCPV4, VirtioNetHdr};
use nightporterd::port::guest::GuestPort;
use nightporterd::vhost::features::bit;
use nightporterd::vhost::queue::PushError;
use proptest::prelude::*;

use crate::driver::WRITE;
use crate::world::{BUFFERS, LINUX, QUEUE_SIZE, World, count};

/// A driver's header of a 64 KB super-segment with 1448-byte segments.
const TSO: VirtioNetHdr = VirtioNetHdr {
    flags: F_NEEDS_CSUM,
    gso_type: GSO_TCPV4,
    hdr_len: 66,
    gso_size: 1448,
    csum_start: 34,
    csum_offset: 16,
};

/// Bytes that differ from place to place.
fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from((i * 31 + seed * 7 + i / 251) % 251).unwrap()).collect()
}

#[test]
fn a_frame_from_the_guest_is_the_same_however_it_is_cut() {
    let frame = bytes(1514, 1);
    let mut header = TSO.emit().to_vec();
    header.extend([0; 2]);
    let all = [&header[..], &frame].concat();
    // Cut points inside the header, at its end, and in the frame.
    for cuts in [vec![], vec![12], vec![1], vec![5, 11, 13], vec![12, 26, 1500], vec![700]] {
        for indirect in [false, true] {
            let mut world = World::running(LINUX);
            let mut buffers = Vec::new();
            let mut start = 0;
            for (i, end) in cuts.iter().copied().chain([all.len()]).enumerate() {
                let at = BUFFERS + 0x1000 * i as u64 + 3;
                world.ram.write(at, &all[start..end]);
                buffers.push((at, u32::try_from(end - start).unwrap()));
                start = end;
            }
            if indirect {
                world.tx.offer_indirect(BUFFERS + 0x8_0000, &buffers, 0);
            } else {
                world.tx.offer(&buffers, 0);
            }
            assert_eq!(world.poll_frames(), [(TSO, frame.clone())], "{cuts:?} {indirect}");
            assert_eq!(world.tx.used(), [(0, 0)]);
        }
    }
}

#[test]
fn the_largest_super_segment_passes_both_ways() {
    let frame = bytes(14 + 8 + 65535, 2);
    let mut world = World::running(LINUX);
    let buffer = world.put_frame(BUFFERS, 12, &frame);
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames()[0].1, frame);

    // 1526-byte buffers, as Linux posts them: the header is in the first one only.
    let buffers = (frame.len() as u64 + 12).div_ceil(1526);
    world.offer_buffers(BUFFERS + 0x8_0000, buffers, 1526);
    let (head, tail) = frame.split_at(54);
    assert_eq!(world.port.room_to_guest(0, 70_000) as u64, buffers * 1526 - 12);
    world.port.push_to_guest(0, &TSO, &[head, &[], tail]).unwrap();
    world.port.flush_to_guest(0);
    let used = world.rx.used();
    assert_eq!(used.len() as u64, buffers);
    assert!(used.iter().zip(0..).all(|((id, _), i)| *id == i), "in order");
    let written: usize = used.iter().map(|(_, len)| *len as usize).sum();
    assert_eq!(written, 12 + frame.len());
    let got = world.ram.read(BUFFERS + 0x8_0000, written);
    assert_eq!(got[..10], TSO.emit());
    assert_eq!(got[10..12], u16::try_from(buffers).unwrap().to_le_bytes(), "num_buffers");
    assert_eq!(got[12..], frame);
}

#[test]
fn a_frame_longer_than_the_callers_buffer_is_dropped_and_counted() {
    let mut world = World::running(LINUX);
    let long = world.put_frame(BUFFERS, 12, &bytes(1000, 0));
    world.tx.offer(&[long], 0);
    let short = world.put_frame(BUFFERS + 0x1000, 12, b"fits");
    world.tx.offer(&[short], 0);
    world.tx.offer(&[(BUFFERS, 11)], 0);
    let mut buf = [0; 999];
    assert_eq!(world.port.poll_from_guest(0, &mut buf), Some((VirtioNetHdr::default(), 4)));
    assert_eq!(world.port.poll_from_guest(0, &mut buf), None);
    let stats = world.port.stats();
    assert_eq!((stats.too_big, stats.truncated, stats.ring_faults), (1, 1, 0));
    world.port.flush_from_guest(0);
    assert_eq!(world.tx.used().len(), 3, "the guest gets all its buffers back");
}

#[test]
fn a_guest_gets_frames_without_the_tag_of_which_it_knows_nothing() {
    let mut world = World::running(LINUX);
    world.offer_buffers(BUFFERS, 2, 1526);
    let mut port = GuestPort::new(world.port, Some(7));
    let tagged = |tci: u8| [&[2; 12][..], &[0x81, 0, 0x60, tci], &[9; 60]].concat();
    let hdr = VirtioNetHdr::default();
    assert_eq!(port.send(&hdr, &[&tagged(7)]), Sent::Done, "of whatever priority");
    let other = port.send(&hdr, &[&tagged(8)]);
    assert_eq!(other, Sent::Dropped(DropReason::Vlan), "made before it was in this VLAN");
    assert_eq!(port.send(&hdr, &[&[3; 60]]), Sent::Done, "a heartbeat has no tag");
    port.flush();
    assert_eq!(world.rx.used(), [(0, 12 + 72), (1, 12 + 60)]);
}

#[test]
fn without_mergeable_buffers_a_frame_has_one() {
    let mut world = World::running(LINUX & !bit::MRG_RXBUF);
    assert_eq!(world.port.room_to_guest(0, 2000), 0);
    let hdr = VirtioNetHdr::default();
    assert_eq!(world.port.push_to_guest(0, &hdr, &[&[0; 60]]), Err(PushError::Full));
    world.offer_buffers(BUFFERS, 3, 1526);
    assert_eq!(world.port.room_to_guest(0, 9000), 1514);
    assert_eq!(world.port.push_to_guest(0, &hdr, &[&[0; 1515]]), Err(PushError::TooBig));
    assert_eq!(world.port.push_to_guest(0, &hdr, &[&[7; 1514]]), Ok(()));
    assert_eq!(world.port.push_to_guest(0, &hdr, &[&[8; 60]]), Ok(()));
    world.port.flush_to_guest(0);
    assert_eq!(world.rx.used(), [(0, 1526), (1, 72)]);
    assert_eq!(world.ram.read(BUFFERS + 10, 3), [1, 0, 7], "num_buffers is 1 (VERSION_1)");
}

#[test]
fn a_frame_that_does_not_fit_takes_nothing() {
    let mut world = World::running(LINUX);
    world.offer_buffers(BUFFERS, 2, 100);
    let hdr = VirtioNetHdr::default();
    assert_eq!(world.port.push_to_guest(0, &hdr, &[&[1; 189]]), Err(PushError::Full));
    assert_eq!(world.port.push_to_guest(0, &hdr, &[&[2; 188]]), Ok(()));
    assert_eq!(world.port.push_to_guest(0, &hdr, &[]), Err(PushError::Full));
    world.port.flush_to_guest(0);
    assert_eq!(world.rx.used(), [(0, 100), (1, 100)]);
    assert_eq!(world.ram.read(BUFFERS + 12, 188), [2; 188]);
}

#[test]
fn a_frame_longer_than_a_full_ring_does_not_block_it() {
    let mut world = World::running(LINUX);
    world.offer_buffers(BUFFERS, QUEUE_SIZE.into(), 20);
    let hdr = VirtioNetHdr::default();
    let all = vec![1; usize::from(QUEUE_SIZE) * 20];
    assert_eq!(world.port.push_to_guest(0, &hdr, &[&all[11..]]), Err(PushError::TooBig));
    assert_eq!(world.port.push_to_guest(0, &hdr, &[&all[12..]]), Ok(()));
}

#[test]
fn room_looks_no_further_than_wanted() {
    let mut world = World::running(LINUX);
    world.offer_buffers(BUFFERS, 10, 1526);
    assert_eq!(world.port.room_to_guest(0, 60), 1514);
    assert_eq!(world.port.room_to_guest(0, 1515), 2 * 1526 - 12);
    assert_eq!(world.port.room_to_guest(0, usize::MAX), 10 * 1526 - 12);
}

#[test]
fn a_receive_chain_of_several_buffers_is_filled_in_order() {
    let mut world = World::running(LINUX & !bit::MRG_RXBUF);
    // As Linux's "big packets" mode: the header apart, then pages.
    let pages = BUFFERS + 0x1000;
    world.rx.offer(&[(BUFFERS, 12), (pages, 4096), (pages + 8192, 4096)], WRITE);
    let frame = bytes(5000, 3);
    world.port.push_to_guest(0, &TSO, &[&frame]).unwrap();
    world.port.flush_to_guest(0);
    assert_eq!(world.rx.used(), [(0, 5012)]);
    assert_eq!(world.ram.read(pages, 4096), frame[..4096]);
    assert_eq!(world.ram.read(pages + 8192, 904), frame[4096..]);
}

#[test]
fn with_event_idx_a_signal_comes_when_the_driver_waits_for_it() {
    let mut world = World::running(LINUX);
    world.offer_buffers(BUFFERS, 20, 1526);
    let push = |world: &mut World| {
        world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&[0; 60]]).unwrap();
    };
    push(&mut world);
    world.port.flush_to_guest(0);
    assert_eq!(count(&world.call[0]), 1, "the first time always");
    world.rx.set_used_event(3);
    push(&mut world);
    world.port.flush_to_guest(0);
    push(&mut world);
    world.port.flush_to_guest(0);
    assert_eq!(count(&world.call[0]), 0, "it waits for more than three");
    push(&mut world);
    push(&mut world);
    world.port.flush_to_guest(0);
    assert_eq!(count(&world.call[0]), 1, "3 -> 5 passes 3, once");
    push(&mut world);
    world.port.flush_to_guest(0);
    world.port.flush_to_guest(0);
    assert_eq!(count(&world.call[0]), 0);
    assert_eq!(world.port.stats().signals, 2);
}

#[test]
fn without_event_idx_the_flags_decide() {
    let mut world = World::running(LINUX & !bit::EVENT_IDX);
    let buffer = world.put_frame(BUFFERS, 12, b"x");
    world.tx.offer(&[buffer], 0);
    world.tx.set_no_signal(true);
    assert_eq!(world.poll_frames().len(), 1);
    assert_eq!(count(&world.call[1]), 0);
    world.tx.set_no_signal(false);
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames().len(), 1);
    assert_eq!(count(&world.call[1]), 1);

    world.port.disable_kicks_from_guest(0);
    assert!(world.tx.kicks_are_off());
    assert!(!world.port.enable_kicks_from_guest(0));
    assert!(!world.tx.kicks_are_off());
    world.tx.offer(&[buffer], 0);
    assert!(world.port.enable_kicks_from_guest(0), "it came in between");
}

#[test]
fn enabling_kicks_finds_what_came_in_between() {
    let mut world = World::running(LINUX);
    let buffer = world.put_frame(BUFFERS, 12, b"x");
    world.tx.offer(&[buffer], 0);
    assert_eq!(world.poll_frames().len(), 1);
    assert!(!world.port.enable_kicks_from_guest(0));
    assert_eq!(world.tx.avail_event(), 1, "a kick for the very next frame");
    world.tx.offer(&[buffer], 0);
    world.tx.offer(&[buffer], 0);
    assert!(world.port.enable_kicks_from_guest(0));
    assert_eq!(world.poll_frames().len(), 2);
    world.port.disable_kicks_from_guest(0);
    assert_eq!(world.tx.avail_event(), 1, "left behind, where it asks for nothing");

    assert!(!world.port.enable_kicks_to_guest(0));
    world.offer_buffers(BUFFERS, 1, 1526);
    assert!(world.port.enable_kicks_to_guest(0), "there is room now");
}

#[test]
fn progress_and_drained_follow_the_driver() {
    let mut world = World::running(LINUX);
    assert_eq!(world.port.guest_progress(0), None);
    world.offer_buffers(BUFFERS, 8, 1526);
    assert_eq!(world.port.guest_progress(0), Some(true), "nothing was delivered yet");
    for _ in 0..2 {
        world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&[0; 60]]).unwrap();
    }
    world.port.flush_to_guest(0);
    assert_eq!(world.port.guest_progress(0), None, "delivered, but the guest has not run");
    world.rx.set_used_event(1);
    assert_eq!(world.port.guest_progress(0), Some(false), "it has seen the first");
    world.rx.set_used_event(2);
    assert_eq!(world.port.guest_progress(0), Some(true));
    assert_eq!(world.port.guest_progress(0), None);
}

#[test]
fn without_event_idx_a_full_refill_means_drained() {
    let mut world = World::running(LINUX & !bit::EVENT_IDX);
    world.offer_buffers(BUFFERS, 4, 1526);
    assert_eq!(world.port.room_to_guest(0, 60), 1514);
    assert_eq!(world.port.guest_progress(0), Some(true));
    for _ in 0..2 {
        world.port.push_to_guest(0, &VirtioNetHdr::default(), &[&[0; 60]]).unwrap();
    }
    world.port.flush_to_guest(0);
    world.offer_buffers(BUFFERS, 1, 1526);
    assert_eq!(world.port.guest_progress(0), Some(false), "one of two is back");
    world.offer_buffers(BUFFERS, 1, 1526);
    assert_eq!(world.port.guest_progress(0), Some(true));
}

#[test]
fn a_restarted_daemon_goes_on_without_a_kick() {
    // A predecessor had taken 65,530 frames and left; the driver has offered ten more.
    let mut world = World::prepared(LINUX, |world| {
        world.tx.start_at(65_530);
        for i in 0..10 {
            let at = BUFFERS + 0x100 * u64::from(i);
            let buffer = world.put_frame(at, 12, &[i; 60]);
            world.tx.offer(&[buffer], 0);
        }
    });
    let frames = world.poll_frames();
    assert_eq!(frames.len(), 10);
    assert!(frames.iter().zip(0..).all(|((_, frame), i)| *frame == [i; 60]));
    assert_eq!(world.tx.used().len(), 10);
    assert_eq!(world.stop_ring(1), 4, "65,540 modulo 2^16");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any mixture of bursts, across index wraps: every frame arrives once, whole, in order.
    #[test]
    fn nothing_is_lost_doubled_or_reordered(
        start in prop::sample::select(vec![0_u16, 65_500, 65_535]),
        bursts in prop::collection::vec((1_usize..40, 0_usize..40, 1_usize..3000), 1..40),
        features in prop::sample::select(vec![LINUX, LINUX & !bit::EVENT_IDX]),
    ) {
        let mut world = World::prepared(features, |world| {
            world.tx.start_at(start);
            world.rx.start_at(start);
        });
        let (mut sent, mut got) = (0, 0);
        let (mut offered, mut pushed, mut seen) = (0_u64, 0_usize, 0_usize);
        let mut buf = vec![0; 70_000];
        for (send, take, len) in bursts {
            for _ in 0..send.min(usize::from(QUEUE_SIZE) - (sent - got)) {
                let at = BUFFERS + 0x1000 * (sent as u64 % 64);
                let buffer = world.put_frame(at, 12, &bytes(len, sent));
                world.tx.offer(&[buffer], 0);
                sent += 1;
            }
            for _ in 0..take {
                let Some((_, n)) = world.port.poll_from_guest(0, &mut buf) else { break };
                // The length is that of an earlier burst, perhaps; the content names the frame.
                prop_assert_eq!(&buf[..n], &bytes(n, got)[..]);
                got += 1;
            }
            world.port.flush_from_guest(0);
            let _ = world.tx.used();

            // Towards the guest: single-buffer frames, numbered.
            while offered - (seen as u64) < u64::from(QUEUE_SIZE) {
                let at = BUFFERS + 0x8_0000 + 0x1000 * (offered % 64);
                world.rx.offer(&[(at, 4096)], WRITE);
                offered += 1;
            }
            let hdr = VirtioNetHdr::default();
            for _ in 0..send {
                match world.port.push_to_guest(0, &hdr, &[&bytes(len, pushed)]) {
                    Ok(()) => pushed += 1,
                    Err(error) => prop_assert_eq!(error, PushError::Full),
                }
            }
            world.port.flush_to_guest(0);
            for (_, written) in world.rx.used() {
                let at = BUFFERS + 0x8_0000 + 0x1000 * (seen as u64 % 64);
                let frame = world.ram.read(at + 12, written as usize - 12);
                prop_assert_eq!(&frame, &bytes(frame.len(), seen));
                seen += 1;
            }
            prop_assert_eq!(seen, pushed);
        }
        prop_assert_eq!(world.port.stats().ring_faults, 0);
    }
}
