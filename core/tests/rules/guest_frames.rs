//! COM-10, COM-17, COM-30, SNOOP-12: what the frames look like that H makes for G.

use crate::common::segment::Seen;
use crate::common::world::Peer;
use crate::common::{Setup, Spec, World};
use crate::{flow, sends_segments, warms_up};
use nightporter_core::port::PortFeatures;
use nightporter_core::wire::packet::IpVersion;

/// The largest IP packet that a frame is, or becomes once it is cut.
fn packet_len(seen: &Seen) -> usize {
    let ip = seen.packet.tcp().expect("TCP").0;
    let headers = seen.tcp().payload_offset as usize - usize::from(ip.header_offset);
    let payload = if seen.hdr.is_gso() {
        usize::from(seen.hdr.gso_size).min(seen.payload().len())
    } else {
        seen.payload().len()
    };
    headers + payload
}

#[test]
fn com_17_no_packet_for_g_is_larger_than_its_ports_mtu() {
    for (mtu, v6, ts, tso) in
        (0..16).map(|n| (if n & 1 == 0 { 1500 } else { 1280 }, n & 2 != 0, n & 4 != 0, n & 8 != 0))
    {
        let features = PortFeatures { csum: tso, tso4: tso, tso6: tso, ecn: tso, uso: false };
        // G's own MSS is for another path, with larger packets.
        let setup = Setup { mss: 8000, mtu, v6, ts: [ts; 2], features, ..Setup::new() };
        let (_, r, g) = setup.small().established();
        r.sends("1:20001 ack 1 gso 8000");
        let largest = g.takes_all().iter().map(packet_len).max();
        assert_eq!(largest, Some(usize::from(mtu)), "v6 {v6}, timestamps {ts}, TSO {tso}");
    }
}

#[test]
fn com_17_a_super_segment_fills_an_ip_packet_with_whole_segments() {
    for (n, mss) in (0..4).flat_map(|n| [536, 1000, 1024, 1448, 8900].map(|mss| (n, mss))) {
        let (v6, ts) = (n & 1 != 0, n & 2 != 0);
        let (_, r, g) = Setup { mss, mtu: 9000, v6, ts: [ts; 2], ..Setup::new() }.established();
        g.shows_window(1 << 20);
        warms_up(&r, &g);
        g.stops(0);
        r.sends("1001:61001 ack 1 gso 500");
        r.sends("61001:121001 ack 1 gso 500");
        g.runs();
        let longest = g.takes_all().remove(0).bytes.len() - 14;
        let whole = longest <= 65_535 && longest + usize::from(mss) > 65_535;
        assert!(whole, "an IP packet of {longest}: MSS {mss}, v6 {v6}, timestamps {ts}");
    }
}

#[test]
fn com_17_a_super_segment_fills_the_ring_that_has_less_room() {
    for n in 0..8 {
        let (v6, ts, tagged) = (n & 1 != 0, n & 2 != 0, n & 4 != 0);
        let vlan = if tagged { vec![[0x81, 0, 0, 5]] } else { vec![] };
        let (w, r, g) = Setup { v6, ts: [ts; 2], vlan, ..Setup::new() }.small().established();
        g.stops(0);
        r.sends("1:20001 ack 1 gso 1000");
        let port = w.guest_port();
        for room in [200, 3000] {
            let len = w.engine(|engine, now| {
                engine.poll_delivery(now, port, room).map(|made| made.parts().concat().len())
            });
            assert_eq!(len, Some(room), "v6 {v6}, timestamps {ts}, tag {tagged}");
        }
    }
}

#[test]
fn com_17_super_segments_of_the_family_that_the_driver_takes() {
    for n in 0..8 {
        let (v6, tso4, tso6) = (n & 1 != 0, n & 2 != 0, n & 4 != 0);
        let features = PortFeatures { csum: true, tso4, tso6, ecn: true, uso: false };
        let (_, r, g) = Setup { v6, features, ..Setup::new() }.small().established();
        r.sends("1:10001 ack 1 gso 1000");
        let seen = g.takes_all();
        let takes = if v6 { tso6 } else { tso4 };
        assert_eq!(seen.len(), if takes { 1 } else { 10 }, "v6 {v6}, tso4 {tso4}, tso6 {tso6}");
        assert!(seen.iter().all(|s| s.hdr.is_gso() == takes));
    }
}

#[test]
fn com_17_the_header_length_counts_every_header_and_option() {
    for n in 0..8 {
        let (v6, ts, tagged) = (n & 1 != 0, n & 2 != 0, n & 4 != 0);
        let vlan = if tagged { vec![[0x81, 0, 0, 5]] } else { vec![] };
        let (_, r, g) = Setup { v6, ts: [ts; 2], vlan, ..Setup::new() }.small().established();
        r.sends("1:10001 ack 1 gso 1000");
        r.sends("10001:10501 ack 1");
        for seen in g.takes_all() {
            let headers = seen.tcp().payload_offset;
            assert_eq!(u32::from(seen.hdr.hdr_len), headers, "v6 {v6}, ts {ts}, tag {tagged}");
        }
    }
}

#[test]
fn com_10_stored_bytes_keep_the_class_of_service_and_the_hop_limit() {
    for v6 in [false, true] {
        let (_, r, g) = Setup { v6, ..Setup::new() }.small().established();
        warms_up(&r, &g);
        let expedited = 46 << 2;
        r.end(|end| end.ttl = 57);
        r.sends_spec(&Spec { ecn: Some(expedited), ..Spec::parse("1001:2001") });
        let seen = g.gets("1001:2001");
        let ip = seen.packet.tcp().expect("TCP").0;
        assert_eq!((ip.tos, ip.ttl), (expedited, 57));
        assert_eq!(ip.version == IpVersion::V6, v6);
        // And the other way: H's ACKs are of the class of G's segments, but never ECT.
        g.end(|end| end.ttl = 255);
        g.sends_spec(&Spec { ecn: Some(expedited | 2), ..Spec::parse("1 ack 2001") });
        r.takes_all();
        r.sends("2001:3001");
        let ack = r.gets("ack 3001");
        let ip = ack.packet.tcp().expect("TCP").0;
        assert_eq!((ip.tos, ip.ttl), (expedited, 255));
    }
}

#[test]
fn flows_of_a_guest_take_turns() {
    let setup = Setup { features: PortFeatures::default(), ..Setup::new() };
    let w = setup.opens();
    let pairs: Vec<_> = (0..3).map(|_| w.connects()).collect();
    w.ring_takes(0, 0);
    for (r, _) in &pairs {
        sends_segments(r, 1, 10);
        r.takes_all();
    }
    w.ring_takes(0, 9);
    w.engine(|_, _| ());
    for (_, g) in &pairs {
        assert_eq!(g.takes_all().len(), 3);
    }
}

/// Found by simulation: whose turn it was lost it to the others when the ring had no room.
#[test]
fn a_full_ring_costs_a_flow_no_turn() {
    two_share_a_ring_with_little_room(1);
}

/// Found by simulation: an acknowledgement went in place of bytes, and was larger than the room.
#[test]
fn a_full_ring_costs_a_flow_no_turn_though_an_acknowledgement_is_due_too() {
    two_share_a_ring_with_little_room(1001);
}

/// Two flows have four segments each, for a ring that takes one at a time and has no room for it
/// when it is asked first. R acknowledges what G has sent before: everything before `ack`.
fn two_share_a_ring_with_little_room(ack: i64) {
    let setup = Setup { features: PortFeatures::default(), ..Setup::new() };
    let w = setup.opens();
    let pairs: Vec<_> = (0..2).map(|_| w.connects()).collect();
    for (r, g) in pairs.iter().filter(|_| ack > 1) {
        g.sends(&format!("1:{ack}"));
        r.gets(&format!("1:{ack}"));
    }
    w.ring_takes(0, 0);
    let segment = |n| format!("{}:{} ack {ack}", 1 + 1000 * n, 1001 + 1000 * n);
    for (r, _) in &pairs {
        for n in 0..4 {
            r.sends(&segment(n));
        }
        r.takes_all();
    }
    let port = w.guest_port();
    for _ in 0..4 {
        w.ring_takes(0, 1);
        assert!(w.engine(|engine, now| engine.poll_delivery(now, port, 60).is_none()));
    }
    for (_, g) in &pairs {
        g.gets_all(&[&segment(0), &segment(1)]);
    }
}

/// G has sent five segments, of which R misses the second, and R's ACKs are in its data.
fn one_way_has_a_hole(setup: Setup) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = setup.small().established();
    warms_up(&r, &g);
    for n in 0..5 {
        g.sends(&format!("{}:{} ack 1001", 1 + 1000 * n, 1001 + 1000 * n));
    }
    r.takes_all();
    (w, r, g)
}

#[test]
fn com_30_sack_blocks_on_data_of_r_reach_g() {
    let (w, r, g) = one_way_has_a_hole(Setup::new());
    r.sends("1001:2001 ack 1001 <sack 2001:3001>");
    r.gets("ack 2001");
    // By themselves, for with the data they would be too large a packet.
    g.gets_all(&["1001 ack 1001 <sack 2001:3001>", "1001:2001 ack 1001"]);
    // More of them, and then the same: those would look like a duplicate ACK.
    r.sends("2001:3001 ack 1001 <sack 2001:4001>");
    g.gets_all(&["2001 ack 1001 <sack 2001:4001>", "2001:3001 ack 1001"]);
    r.sends("3001:4001 ack 1001 <sack 2001:4001>");
    g.gets_all(&["3001:4001 ack 1001"]);
    // As R itself says it without data, and then once more with data.
    r.sends("4001 ack 1001 <sack 2001:5001>");
    r.sends("4001:5001 ack 1001 <sack 2001:5001>");
    g.gets_all(&["4001 ack 1001 <sack 2001:5001>", "4001:5001 ack 1001"]);
    r.sends("5001:6001 ack 5001");
    g.gets_all(&["5001:6001 ack 5001"]);
    assert!(flow(&w, |f| !f.stats().has_losses));
}

#[test]
fn com_30_a_segment_that_brings_nothing_else_may_bring_sack_blocks() {
    let (_, r, g) = one_way_has_a_hole(Setup::new());
    r.sends("1001:2001 ack 1001");
    g.gets_all(&["1001:2001 ack 1001"]);
    r.sends("1001:2001 ack 1001 <sack 2001:3001>");
    g.gets_all(&["2001 ack 1001 <sack 2001:3001>"]);
    // Out of order as well, and behind a FIN.
    r.sends("3001:4001 ack 1001 <sack 2001:4001>");
    g.gets_all(&["2001 ack 1001 <sack 2001:4001>"]);
    r.sends("F. 4001:4001 ack 1001 <sack 2001:5001>");
    g.gets_all(&["2001 ack 1001 <sack 2001:5001>"]);
}

#[test]
fn com_30_of_sack_blocks_that_wait_the_newest_reach_g_with_their_own_ack() {
    let (_, r, g) = one_way_has_a_hole(Setup::new());
    g.stops(0);
    r.sends("1001:2001 ack 1001 <sack 2001:3001>");
    r.sends("2001:3001 ack 1001 <sack 4001:5001 2001:3001>");
    g.runs();
    g.gets_all(&["1001 ack 1001 <sack 4001:5001 2001:3001>", "1001:3001 ack 1001"]);
    // Bytes that R has acknowledged meanwhile would be taken for a duplicate (RFC 2883).
    g.stops(0);
    r.sends("3001:4001 ack 1001 <sack 2001:5001>");
    r.sends("4001:5001 ack 5001");
    g.runs();
    g.gets_all(&["3001:5001 ack 5001"]);
}

/// Found when these tests came to take the worker's turns: ACKs for a full ring went to the backlog
/// one by one.
#[test]
fn com_30_an_ack_waits_for_room_like_data() {
    let (w, r, g) = one_way_has_a_hole(Setup::new());
    g.stops(0);
    r.sends("1001:2001 ack 1001 <sack 2001:3001>");
    let port = w.guest_port();
    assert!(w.engine(|engine, now| engine.poll_delivery(now, port, 60).is_none()));
    g.runs();
    g.gets_all(&["1001 ack 1001 <sack 2001:3001>", "1001:2001 ack 1001"]);
}

#[test]
fn com_30_sack_blocks_for_g_only_where_both_agreed_on_them() {
    for sack in [[true, false], [false, true]] {
        let (_, r, g) = one_way_has_a_hole(Setup { sack, ..Setup::new() });
        r.sends("1001:2001 ack 1001 <sack 2001:3001>");
        g.gets_all(&["1001:2001 ack 1001"]);
    }
}

#[test]
fn com_30_three_blocks_beside_timestamps_and_four_without_reach_g() {
    let blocks = ["2001:3001", "4001:4101", "4201:4301", "4401:4501"];
    for (ts, most) in [(true, 3), (false, 4)] {
        let (_, r, g) = one_way_has_a_hole(Setup { ts: [ts; 2], ..Setup::new() });
        let sack = blocks[..most].join(" ");
        r.sends(&format!("1001:2001 ack 1001 <sack {sack}>"));
        let ack = g.gets(&format!("1001 ack 1001 <sack {sack}>"));
        assert!(packet_len(&ack) <= 20 + 60);
        g.gets("1001:2001 ack 1001");
    }
}
