use proptest::prelude::*;

use super::*;
use crate::limits::{OVERLAY_DATAGRAM_BYTES_MAX, OVERLAY_DATAGRAMS_MAX};
use crate::wire::packet::{TcpFlags, tcp_checksum_ok};
use crate::wire::samples::{Segment, arb_segment, v4_segment, v6_segment};

const NOW: Instant = Instant::from_secs(7);
const VNI: u32 = 0x0a_0b0c;
const MTU: u16 = 1450;
/// Bytes of the longest payload of a datagram: the path takes 1,500, 20 and 8 are IP's and UDP's.
const OUTER_MAX: usize = 1500 - 20 - 8;
const PLAIN: VirtioNetHdr =
    VirtioNetHdr { flags: 0, gso_type: 0, hdr_len: 0, gso_size: 0, csum_start: 0, csum_offset: 0 };

/// An overlay with the peers 192.0.2.9 (0) and 192.0.2.3 (1).
fn overlay() -> Overlay {
    Overlay::new(&OverlayConfig {
        vni: VNI,
        peers: ["192.0.2.9", "192.0.2.3"].map(|ip| ip.parse().unwrap()).into(),
        mtu: MTU,
        hash_seeds: [1, 2, 3, 4],
    })
}

/// The payloads of the datagrams of each batch.
type Batches = Vec<Vec<Vec<u8>>>;

/// A frame as it leaves: where to, and in what.
fn sent(hdr: &VirtioNetHdr, frame: &[u8]) -> Result<(Route, Batches), DropReason> {
    let mut overlay = overlay();
    let (route, mut datagrams) = overlay.handle_frame(NOW, hdr, frame)?;
    let mut buf = vec![0; OVERLAY_DATAGRAM_BYTES_MAX];
    let mut batches = Vec::new();
    while let Some(batch) = datagrams.next_into(&mut buf) {
        let bytes = &buf[..batch.len];
        batches.push(bytes.chunks(batch.datagram.into()).map(<[u8]>::to_vec).collect());
    }
    Ok((route, batches))
}

/// Frames that each datagram becomes at the peer.
fn arrived(batches: Batches) -> Vec<Vec<u8>> {
    let mut peer = overlay();
    let mut take = |mut datagram: Vec<u8>| {
        let taken = peer.handle_datagram(NOW, PeerId(0), Ecn::NotEct, &mut datagram);
        let (hdr, frame) = taken.unwrap();
        assert_eq!(hdr, PLAIN, "checksums are whole");
        frame.to_vec()
    };
    batches.into_iter().flatten().map(&mut take).collect()
}

fn payload_of(frame: &[u8]) -> Vec<u8> {
    let packet = Packet::parse(frame).unwrap();
    let (ip, tcp) = packet.tcp().unwrap();
    assert!(tcp_checksum_ok(frame, ip, tcp));
    assert!(frame.len() <= 14 + usize::from(MTU), "{} bytes", frame.len());
    frame[tcp.payload_offset as usize..ip.end as usize].to_vec()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect()
}

fn datagram(vni: u32, frame: &[u8]) -> Vec<u8> {
    [&vxlan::emit(vni)[..], frame].concat()
}

#[test]
fn a_frame_goes_through_the_tunnel_as_it_is_behind_a_header_of_its_network() {
    let arp = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 2, 8, 6, 0, 1, 8, 0, 6, 4], &[0; 28]].concat();
    for frame in [v4_segment(b"x").frame(), v6_segment(&bytes(1378)).frame(), arp] {
        let (_, batches) = sent(&PLAIN, &frame).unwrap();
        assert_eq!(batches, [[datagram(VNI, &frame)]]);
        assert_eq!(arrived(batches), [frame]);
    }
}

#[test]
fn a_partial_checksum_is_finished_before_it_leaves() {
    for segment in [v4_segment(&bytes(700)), v6_segment(&bytes(700))] {
        let (frame, hdr) = segment.partial_frame(1000);
        let (_, batches) = sent(&hdr, &frame).unwrap();
        assert_eq!(arrived(batches), [segment.frame()]);
    }
}

#[test]
fn a_super_segment_is_cut_at_the_inner_mtu_into_equal_datagrams_of_few_calls() {
    for segment in [v4_segment(&bytes(64_000)), v6_segment(&bytes(64_000))] {
        let (frame, hdr) = segment.partial_frame(1460);
        let (_, batches) = sent(&hdr, &frame).unwrap();
        assert_eq!(batches.len(), 2, "64,000 bytes and so many headers are more than a datagram");
        for batch in &batches {
            let len: usize = batch.iter().map(Vec::len).sum();
            assert!(len <= OVERLAY_DATAGRAM_BYTES_MAX && batch.len() <= OVERLAY_DATAGRAMS_MAX);
            let (last, others) = batch.split_last().unwrap();
            assert!(others.iter().all(|it| it.len() == batch[0].len()));
            assert!(last.len() <= batch[0].len());
        }
        let first = batches[0][0].len() - vxlan::LEN - 14;
        assert_eq!(first, usize::from(MTU), "as long as may be");
        let got: Vec<_> = arrived(batches).iter().flat_map(|frame| payload_of(frame)).collect();
        assert_eq!(got, bytes(64_000));
    }
}

#[test]
fn segments_are_not_made_longer_than_their_sender_wants() {
    let (frame, hdr) = v4_segment(&bytes(3000)).partial_frame(600);
    let (_, batches) = sent(&hdr, &frame).unwrap();
    let lens: Vec<_> = arrived(batches).iter().map(|frame| payload_of(frame).len()).collect();
    assert_eq!(lens, [600; 5]);
}

#[test]
fn small_segments_are_no_more_to_a_call_than_the_kernel_takes() {
    let (frame, hdr) = v4_segment(&bytes(10 * 130)).partial_frame(10);
    let (_, batches) = sent(&hdr, &frame).unwrap();
    assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [64, 64, 2]);
}

#[test]
fn tcp_that_is_too_long_is_cut_and_nothing_else_is() {
    let segment = v4_segment(&bytes(1448)); // of a guest whose MTU is 1500
    let (_, batches) = sent(&PLAIN, &segment.frame()).unwrap();
    let lens: Vec<_> = arrived(batches).iter().map(|frame| payload_of(frame).len()).collect();
    assert_eq!(lens, [1398, 50]);
    let mut udp = segment.frame();
    udp[23] = 17;
    assert_eq!(sent(&PLAIN, &udp), Err(DropReason::TooBig));
    let mut broken = segment.frame();
    *broken.last_mut().unwrap() ^= 1;
    let what = "cutting gives it no right checksum";
    assert_eq!(sent(&PLAIN, &broken), Err(DropReason::BadChecksum), "{what}");
}

#[test]
fn who_is_known_gets_a_frame_alone_and_others_are_looked_for_everywhere() {
    let mut overlay = overlay();
    let to = |overlay: &mut Overlay, dst: Mac| {
        let mut frame = v4_segment(b"x").frame();
        frame[..6].copy_from_slice(&dst);
        overlay.handle_frame(NOW, &PLAIN, &frame).unwrap().0.to
    };
    let station = [2, 0, 0, 0, 0, 2]; // who the segment is from
    assert_eq!(to(&mut overlay, station), To::All);
    for from in [PeerId(1), PeerId(0)] {
        let mut datagram = datagram(VNI, &v4_segment(b"x").frame());
        overlay.handle_datagram(NOW, from, Ecn::NotEct, &mut datagram).unwrap();
        assert_eq!(to(&mut overlay, station), To::Peer(from), "where it was heard last");
    }
    assert_eq!(to(&mut overlay, [0xff; 6]), To::All);
    overlay.tell_station(station, PeerId(1), &[]);
    assert_eq!(to(&mut overlay, station), To::Peer(PeerId(1)));
    let mut datagram = datagram(VNI, &v4_segment(b"x").frame());
    let taken = overlay.handle_datagram(NOW, PeerId(0), Ecn::NotEct, &mut datagram);
    assert_eq!(taken.map(|_| ()), Err(DropReason::SpoofedMac), "it was told better");
}

#[test]
fn a_narrow_path_counts_for_its_peer_and_for_what_goes_to_all_for_ten_minutes() {
    let mut overlay = overlay();
    let of = |overlay: &Overlay, now| {
        [To::Peer(PeerId(0)), To::Peer(PeerId(1)), To::All].map(|to| overlay.mtu(now, to))
    };
    overlay.note_narrow(NOW, PeerId(1), 1300);
    overlay.note_narrow(NOW, PeerId(1), 1350);
    assert_eq!(of(&overlay, NOW), [MTU, 1350, 1350]);
    overlay.set_peers(&["192.0.2.3".parse().unwrap(), "192.0.2.7".parse().unwrap()]);
    assert_eq!(of(&overlay, NOW), [1350, MTU, 1350], "it has another place");
    assert_eq!(of(&overlay, NOW + PATH_MTU_AGE), [MTU; 3]);
    overlay.set_mtu(1280);
    assert_eq!(of(&overlay, NOW), [1280; 3]);
}

#[test]
fn who_sends_too_long_a_packet_to_a_known_station_is_told_and_not_without_end() {
    let mut overlay = overlay();
    let mut udp = v4_segment(&bytes(1448)).frame();
    udp[23] = 17;
    let dst = *udp.first_chunk().unwrap();
    assert_eq!(overlay.complain(NOW, &udp), None, "it may be behind another port");
    overlay.tell_station(dst, PeerId(1), &[]);
    let error = overlay.complain(NOW, &udp).unwrap();
    assert_eq!((&error[..6], &error[6..12]), (&udp[6..12], &udp[..6]));
    let told = (0..1000).filter(|_| overlay.complain(NOW, &udp).is_some()).count();
    assert_eq!(told as u64, TOO_LONG_BURST - 1);
    let later = NOW + TOO_LONG_INTERVAL;
    assert!(overlay.complain(later, &udp).is_some());
    overlay.note_narrow(later, PeerId(0), 600);
    udp.truncate(14 + usize::from(MTU));
    let len = MTU.to_be_bytes();
    udp[16..18].copy_from_slice(&len);
    assert_eq!(overlay.complain(later + TOO_LONG_INTERVAL, &udp), None, "it fits on its path");
}

#[test]
fn a_sender_of_long_packets_takes_no_word_from_another() {
    let mut overlay = overlay();
    let mut udp = v4_segment(&bytes(1448)).frame();
    udp[23] = 17;
    overlay.tell_station(*udp.first_chunk().unwrap(), PeerId(1), &[]);
    let mut other = udp.clone();
    other[11] ^= 1;
    let mut told = |frame: &[u8]| overlay.complain(NOW, frame).is_some();
    assert!((0..1000).filter(|_| told(&udp)).count() > 1);
    assert!(!told(&udp) && told(&other));
}

#[test]
fn what_is_for_all_and_cannot_be_cut_goes_where_the_path_takes_it() {
    let mut overlay = overlay();
    overlay.note_narrow(NOW, PeerId(1), 1300);
    let mut udp = v4_segment(&bytes(1370)).frame();
    let tcp = udp.clone();
    udp[23] = 17;
    let mut buf = vec![0; OVERLAY_DATAGRAM_BYTES_MAX];
    let mut sent = |overlay: &mut Overlay, frame: &[u8]| {
        let (route, mut datagrams) = overlay.handle_frame(NOW, &PLAIN, frame)?;
        Ok((route.to, datagrams.next_into(&mut buf).unwrap()))
    };
    let (to, batch) = sent(&mut overlay, &udp).unwrap();
    assert_eq!((to, batch.len), (To::All, vxlan::LEN + udp.len()), "whole");
    let (_, batch) = sent(&mut overlay, &tcp).unwrap();
    assert!(batch.len > batch.datagram.into(), "cut, so that it goes everywhere");
    overlay.tell_station(*udp.first_chunk().unwrap(), PeerId(1), &[]);
    assert_eq!(sent(&mut overlay, &udp), Err(DropReason::TooBig));
}

#[test]
fn peers_are_known_by_their_addresses() {
    let overlay = overlay();
    let peer = |ip: &str| overlay.peer(ip.parse().unwrap());
    assert_eq!(peer("192.0.2.9"), Some(PeerId(0)));
    assert_eq!(peer("192.0.2.3"), Some(PeerId(1)));
    assert_eq!(peer("::ffff:192.0.2.3"), Some(PeerId(1)), "as an IPv6 socket has it");
    assert_eq!(peer("192.0.2.4"), None);
}

#[test]
fn with_other_peers_stations_stay_where_they_are_and_those_of_who_went_are_looked_for() {
    let mut overlay = overlay();
    let mut bytes = datagram(VNI, &v4_segment(b"x").frame());
    overlay.handle_datagram(NOW, PeerId(1), Ecn::NotEct, &mut bytes).unwrap();
    let answer = turned(&v4_segment(b"x").frame());
    let mut after = |peers: [&str; 2]| {
        overlay.set_peers(&peers.map(|ip| ip.parse().unwrap()));
        let known = peers.map(|ip| overlay.peer(ip.parse().unwrap()));
        assert_eq!(known, [Some(PeerId(0)), Some(PeerId(1))]);
        assert_eq!(overlay.peer("192.0.2.9".parse().unwrap()), None);
        overlay.handle_frame(NOW, &PLAIN, &answer).unwrap().0.to
    };
    assert_eq!(after(["192.0.2.3", "192.0.2.4"]), To::Peer(PeerId(0)));
    assert_eq!(after(["192.0.2.1", "192.0.2.4"]), To::All);
    assert_eq!(after(["192.0.2.3", "192.0.2.4"]), To::All, "it is not believed for what it was");
}

#[test]
fn a_vlan_tag_is_no_longer_a_packet() {
    for segment in [v4_segment(&bytes(64_000)), v6_segment(&bytes(64_000))] {
        let (frame, hdr) = segment.partial_frame(1460);
        for tags in [&[0x81, 0, 0, 7][..], &[0x88, 0xa8, 0, 9, 0x81, 0, 0, 7]] {
            let tagged = [&frame[..12], tags, &frame[12..]].concat();
            let moved = u16::try_from(tags.len()).unwrap();
            let hdr = VirtioNetHdr { csum_start: hdr.csum_start + moved, ..hdr };
            let (_, batches) = sent(&hdr, &tagged).unwrap();
            let longest = batches.iter().flatten().map(Vec::len).max().unwrap();
            assert_eq!(longest, OUTER_MAX, "as long as may be");
        }
    }
    let whole = |len: usize| [&[2; 12][..], &[0x81, 0, 0, 7, 0x88, 0xb5], &vec![0; len]].concat();
    assert!(sent(&PLAIN, &whole(usize::from(MTU) - 4)).is_ok());
    let longer = sent(&PLAIN, &whole(usize::from(MTU) - 3));
    assert_eq!(longer.map(|_| ()), Err(DropReason::TooBig));
}

#[test]
fn what_is_urgent_is_so_in_the_pieces_that_it_is_in() {
    let flags = TcpFlags::ACK | TcpFlags::URG;
    let (mut frame, hdr) = Segment { flags, ..v4_segment(&bytes(4000)) }.partial_frame(1000);
    frame[14 + 20 + 18..][..2].copy_from_slice(&[0x07, 0xd0]);
    let (_, batches) = sent(&hdr, &frame).unwrap();
    let urgent = |frame: Vec<u8>| {
        payload_of(&frame);
        let packet = Packet::parse(&frame).unwrap();
        let (ip, tcp) = packet.tcp().unwrap();
        let at = usize::from(ip.payload_offset) + 18;
        let pointer = u16::from_be_bytes([frame[at], frame[at + 1]]);
        tcp.flags.contains(TcpFlags::URG).then_some(pointer)
    };
    let seen: Vec<_> = arrived(batches).into_iter().map(urgent).collect();
    assert_eq!(seen, [Some(2000), Some(1000), None, None]);
}

#[test]
fn what_is_not_of_this_network_teaches_nothing() {
    let mut overlay = overlay();
    let frame = v4_segment(b"x").frame();
    let mut drop = |mut bytes: Vec<u8>, outer| {
        overlay.handle_datagram(NOW, PeerId(0), outer, &mut bytes).map(|_| ()).unwrap_err()
    };
    assert_eq!(drop(datagram(VNI + 1, &frame), Ecn::NotEct), DropReason::UnknownVni);
    assert_eq!(drop(vec![0; 60], Ecn::NotEct), DropReason::NotVxlan);
    assert_eq!(drop(datagram(VNI, &frame[..13]), Ecn::NotEct), DropReason::Truncated);
    assert_eq!(drop(datagram(VNI, &frame[..40]), Ecn::NotEct), DropReason::Truncated);
    let (route, _) = overlay.handle_frame(NOW, &PLAIN, &turned(&frame)).unwrap();
    assert_eq!(route.to, To::All);
}

/// The frame with its MACs exchanged: an answer goes back to who sent it.
fn turned(frame: &[u8]) -> Vec<u8> {
    [&frame[6..12], &frame[..6], &frame[12..]].concat()
}

#[test]
fn marks_of_the_path_between_hosts_reach_the_receiver() {
    let segment = |tos| Segment { tos, ..v4_segment(b"x") }.frame();
    let through = |tos, outer| {
        let mut bytes = datagram(VNI, &segment(tos));
        let taken = overlay().handle_datagram(NOW, PeerId(0), outer, &mut bytes).map(|_| ());
        taken.map(|()| bytes[vxlan::LEN..].to_vec())
    };
    assert_eq!(through(2, Ecn::Ce), Ok(segment(3)), "ECT(0) is marked, its checksum mended");
    assert_eq!(through(2, Ecn::NotEct), Ok(segment(2)));
    assert_eq!(through(0, Ecn::Ect0), Ok(segment(0)));
    assert_eq!(through(0, Ecn::Ce), Err(DropReason::EcnMismatch));
    for tos in 0..4 {
        let (route, _) = sent(&PLAIN, &segment(tos)).unwrap();
        assert_eq!(route.ecn, Ecn::of_tos(tos), "on the way in it is copied");
    }
}

#[test]
fn frames_of_a_flow_have_one_source_port_and_flows_have_several() {
    let hash = |segment: Segment| sent(&PLAIN, &segment.frame()).unwrap().0.flow_hash;
    let flow = |port| Segment { ports: (port, 80), ..v4_segment(b"x") };
    let later = Segment { payload: b"longer".to_vec(), ip_id: 7, tos: 2, ..flow(1000) };
    assert_eq!(hash(flow(1000)), hash(later));
    let mut hashes: Vec<_> = (1000..1064).map(|port| hash(flow(port)) % 16).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert!(hashes.len() >= 12, "64 flows use {} of 16 ports", hashes.len());
    let mut first = v4_segment(&bytes(100)).frame();
    first[20] = 0x20; // more fragments follow
    let mut other = first.clone();
    other[34..38].fill(9); // what would be ports
    let hash = |frame: &[u8]| overlay().flow_hash(frame, &Packet::parse(frame).unwrap());
    assert_eq!(hash(&first), hash(&other), "fragments have no ports");
}

proptest! {
    #[test]
    fn whatever_a_peer_sends_is_a_frame_or_a_drop(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        is_ours in any::<bool>(),
        outer in 0..4_u8,
    ) {
        if is_ours && bytes.len() >= vxlan::LEN {
            bytes[..vxlan::LEN].copy_from_slice(&vxlan::emit(VNI));
        }
        let _ = overlay().handle_datagram(NOW, PeerId(0), Ecn::of_tos(outer), &mut bytes);
    }

    #[test]
    fn any_segment_arrives_with_all_its_bytes(segment in arb_segment(), mss in 8..3000_u16) {
        let whole = segment.payload.clone();
        let (frame, hdr) = segment.partial_frame(mss);
        let (_, batches) = sent(&hdr, &frame).unwrap();
        let mut got = Vec::new();
        for mut datagram in batches.into_iter().flatten() {
            prop_assert!(datagram.len() <= OUTER_MAX);
            let mut peer = overlay();
            // One checksum in 65,536 looks partial; it is right all the same.
            let (_, frame) =
                peer.handle_datagram(NOW, PeerId(0), Ecn::NotEct, &mut datagram).unwrap();
            let packet = Packet::parse(frame).unwrap();
            let (ip, tcp) = packet.tcp().unwrap();
            prop_assert!(tcp_checksum_ok(frame, ip, tcp));
            got.extend_from_slice(&frame[tcp.payload_offset as usize..ip.end as usize]);
        }
        prop_assert_eq!(got, whole);
    }
}
