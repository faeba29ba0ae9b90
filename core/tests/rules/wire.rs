//! A VM behind a tap that is already there: its port and the network's are the ends of a wire
//! (and all that passes).

use crate::common::world::mac;
use crate::common::{Setup, World};
use crate::{GUEST, sends_segments, warms_up};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use nightporter_core::tcp::flow::State;
use nightporter_core::wire::virtio_net::{GSO_UDP_L4, VirtioNetHdr};

/// The other end.
const UPLINK: PortId = PortId(0);

fn wire() -> Setup {
    Setup { wire: true, ..Setup::new() }
}

/// A frame without a known protocol.
fn frame(dst: [u8; 6], src: [u8; 6], ethertype: [u8; 2]) -> Vec<u8> {
    [&dst[..], &src, &ethertype, &[0x5a; 46]].concat()
}

/// Both ends get each other's frames as they are.
fn passes(w: &World<'_>, hdr: VirtioNetHdr, bytes: &[u8]) {
    for (from, to) in [(UPLINK, GUEST), (GUEST, UPLINK)] {
        let (mut now_hdr, mut now_bytes) = (hdr, bytes.to_vec());
        let verdict =
            w.engine(|engine, now| engine.handle_frame(now, from, &mut now_hdr, &mut now_bytes));
        assert_eq!(verdict, Verdict::Forward(to), "{bytes:02x?}");
        assert_eq!((now_hdr, &now_bytes[..]), (hdr, bytes));
    }
}

#[test]
fn com_03_a_frame_that_enters_at_one_end_of_a_wire_leaves_at_the_other_whatever_it_is() {
    let w = wire().opens();
    let (guest, other) = (mac(1), [2, 0, 0, 0, 0, 0x77]);
    let group = |last| [0x01, 0x80, 0xc2, 0, 0, last];
    for (dst, src, ethertype) in [
        (group(0), other, [0, 38]),         // STP
        (group(0x0e), guest, [0x88, 0xcc]), // LLDP
        ([0xff; 6], guest, [0x08, 0x06]),   // an ARP that is none
        (other, guest, [0x99, 0x99]),
        (guest, other, [0x08, 0x00]), // IP that is none
        (guest, guest, [0x99, 0x99]),
        (other, [0xff; 6], [0x99, 0x99]),
        (other, [0; 6], [0x81, 0x00]),
    ] {
        passes(&w, VirtioNetHdr::default(), &frame(dst, src, ethertype));
    }
    passes(&w, VirtioNetHdr::default(), &frame(other, guest, [0x99, 0x99])[..14]);
    let uso = VirtioNetHdr { flags: 1, gso_type: GSO_UDP_L4, gso_size: 1000, ..Default::default() };
    passes(&w, uso, &frame(other, guest, [0x99, 0x99]));
    // A storm is no concern of a wire.
    (0..10_000).for_each(|_| passes(&w, uso, &frame([0xff; 6], guest, [0x99, 0x99])));
}

#[test]
fn snoop_01_an_upload_over_a_wire_is_acknowledged_while_the_guest_is_off_its_core() {
    let (w, r, g) = wire().established();
    g.stops(0);
    sends_segments(&r, 1, 5);
    for n in 1..=5 {
        r.gets(&format!("1 ack {}", 1 + n * 1000));
    }
    g.runs();
    assert_eq!(w.state(), Some(State::On));
    g.gets("1:5001");
    g.sends("ack 5001");
    r.gets_nothing();
}

/// A handshake over a wire, whose guest's frames have this source: how many flows there are.
fn flows_after_a_handshake(src: [u8; 6]) -> usize {
    let w = Setup::new().opens();
    let config = GuestConfig {
        ack_offload: true,
        budget_bytes: 1 << 20,
        flows_max: 16,
        ..GuestConfig::default()
    };
    let port = w.add_port(PortConfig::guest("tap", config).on_wire("tap"), PortFeatures::ALL);
    let (r, g) = w.pair(&Setup::new());
    let hears = |from, frame: &[u8]| {
        let mut bytes = frame.to_vec();
        w.engine(|e, now| e.handle_frame(now, from, &mut VirtioNetHdr::default(), &mut bytes))
    };
    let arp = frame([0xff; 6], mac(1), [0x08, 0x06]);
    assert_eq!(hears(port, &arp), Verdict::Drop(DropReason::PortDown), "there is one end");
    let end = w.add_port(PortConfig::uplink("end").on_wire("tap"), PortFeatures::ALL);
    assert_eq!(hears(port, &arp), Verdict::Forward(end));
    let of_guest = |text| {
        let mut frame = g.frame_of(text);
        frame[6..12].copy_from_slice(&src);
        frame
    };
    assert_eq!(hears(end, &r.frame_of("S 0")), Verdict::Forward(port));
    assert_eq!(hears(port, &of_guest("S. 0 ack 1")), Verdict::Forward(end));
    assert_eq!(hears(end, &r.frame_of("1 ack 1")), Verdict::Forward(port));
    w.engine(|engine, _| engine.flows().filter(|(_, _, flow)| flow.state() == State::On).count())
}

#[test]
fn fwd_01_a_wire_learns_the_mac_of_the_first_frame_and_other_stations_have_no_flows() {
    assert_eq!(flows_after_a_handshake(mac(1)), 1);
    assert_eq!(flows_after_a_handshake(mac(9)), 0);
}

#[test]
fn life_05_what_is_said_for_a_vm_behind_a_wire_leaves_by_that_wire_alone() {
    for is_removed in [false, true] {
        let (w, r, g) = wire().established();
        warms_up(&r, &g);
        // Another network knows R's MAC, too.
        let other = w.add_port(PortConfig::uplink("other"), PortFeatures::ALL);
        let arp = frame([0xff; 6], mac(0), [0x08, 0x06]);
        w.frame(other, VirtioNetHdr::default(), &arp);
        g.stops(0);
        r.sends("1001:2001");
        r.gets("1 ack 2001");
        if is_removed {
            w.guest_is_destroyed();
            r.gets("R. 1 ack 2001");
        } else {
            w.engine(|engine, now| engine.remove_port(now, UPLINK));
            w.engine(|engine, now| engine.handle_detached(now, GUEST));
        }
        let leaves = w.engine(|engine, now| engine.poll_transmit(now).map(|made| made.port));
        assert_eq!(leaves, None);
    }
}
