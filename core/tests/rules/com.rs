//! COM-01 to COM-19 and COM-30 to COM-34: parsing, checksums, gates.

use crate::common::segment::{fix_ip_checksum, fix_tcp_checksum};
use crate::common::setup::ALL_FEATURES;
use crate::common::world::mac;
use crate::common::{Setup, Spec};
use crate::{GUEST, flow, from_uplink, sends_segments, warms_up};
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Verdict;
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures};
use nightporter_core::tcp::flow::{State, Why};
use nightporter_core::wire::packet::{IpAddr16, Packet, TcpFlags};
use nightporter_core::wire::virtio_net::{F_DATA_VALID, VirtioNetHdr};

#[test]
fn com_01_every_initial_sequence_number_wraps() {
    let edges = [0, 1, 0x7fff_fff0, 0x8000_0000, 0xffff_ff00, 0xffff_ffff];
    for isn_r in edges {
        for isn_g in edges {
            let (_, r, g) = Setup { isn: [isn_r, isn_g], ..Setup::new() }.small().established();
            r.sends("1:5001 gso 1000");
            r.gets("1 ack 5001");
            g.gets("1:5001");
            g.sends("1:5001 ack 5001 gso 1000");
            r.gets("1:5001 ack 5001");
            r.sends("F. 5001:6001 ack 5001");
            r.gets("5001 ack 6001");
            g.gets("F. 5001:6001 ack 5001");
            g.sends("F. 5001 ack 6002");
            r.gets("F. 5001 ack 6002");
            r.sends("6002 ack 5002");
            g.gets("6002 ack 5002");
        }
    }
}

#[test]
fn com_01_five_gibibytes_wrap_twice() {
    const FRAME: i64 = 64_000;
    let setup = Setup { isn: [0xffff_ff00, 0xffff_ff00], ..Setup::new() };
    let (w, r, g) = setup.established();
    g.shows_window(1 << 20);
    warms_up(&r, &g);
    w.set_lenient(0, true); // byte by byte it would take minutes
    let (hdr, mut data) = {
        let inner = w.0.borrow();
        inner.outside.frame(0, crate::common::Side::R, &Spec::parse("1001:65001 gso 1000"))
    };
    let mut ack = g.frame_of("1 ack 1001");
    let inner = &mut *w.0.borrow_mut();
    let (now, uplink) = (inner.outside.now, inner.outside.uplink);
    let engine = &mut inner.engine;
    let rcv_nxt = |e: &nightporter_core::engine::Engine<'_>| {
        e.flows().next().expect("a flow").2.stats().rcv_nxt
    };
    let first = rcv_nxt(engine);
    let mut total = 0_u64;
    while total < 5 << 30 {
        let (mut h, mut frame) = (hdr, data.clone());
        assert_eq!(engine.handle_frame(now, uplink, &mut h, &mut frame), Verdict::Absorbed);
        while engine.poll_transmit(now).is_some() {}
        let mut delivered = 0;
        while let Some(out) = engine.poll_delivery(now, GUEST, 65_562) {
            let header = out.parts()[0].len();
            delivered += out.parts().concat().len() - header;
        }
        assert_eq!(delivered as i64, FRAME);
        total += FRAME as u64;
        // The next segment, and G's ACK of this one (its checksum is not looked at).
        let seq = u32::from_be_bytes([data[38], data[39], data[40], data[41]]);
        data[38..42].copy_from_slice(&seq.wrapping_add(FRAME as u32).to_be_bytes());
        ack[42..46].copy_from_slice(&seq.wrapping_add(FRAME as u32).to_be_bytes());
        let mut frame = ack.clone();
        let mut h = VirtioNetHdr::default();
        assert_eq!(engine.handle_frame(now, GUEST, &mut h, &mut frame), Verdict::Absorbed);
        while engine.poll_transmit(now).is_some() {}
    }
    assert_eq!(rcv_nxt(engine) - first, total);
    assert_eq!(engine.flows().next().expect("a flow").2.held_bytes(), 0);
}

#[test]
fn com_02_padded_data_counts_by_the_ip_header() {
    let (_, r, g) = Setup { ts: [false; 2], ..Setup::new() }.established();
    r.sends("1:2 pad");
    r.gets("1 ack 2");
    assert_eq!(g.gets("1:2").bytes.len(), 55);
}

#[test]
fn com_03_a_header_that_contradicts_itself_goes_no_further() {
    let (w, r, g) = Setup::new().established();
    let good = r.frame_of("1:1001");
    for doff in [0_u8, 4, 15] {
        let mut frame = good.clone();
        frame.truncate(14 + 20 + 56);
        frame[16..18].copy_from_slice(&76_u16.to_be_bytes());
        frame[46] = doff << 4;
        fix_ip_checksum(&mut frame, 14);
        assert!(matches!(from_uplink(&w, &frame), Verdict::Drop(_)), "doff {doff}");
    }
    for len in 0..good.len() {
        assert!(matches!(from_uplink(&w, &good[..len]), Verdict::Drop(_)), "length {len}");
    }
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes())), (State::On, 0));
    r.gets_nothing();
    g.gets_nothing();
}

#[test]
fn com_04_com_05_options_of_a_live_flow() {
    // Known options are taken; others pass unchanged, and the flow drains.
    let understood = ["", "0101", "00000000"];
    let not = [
        "1e08000000000000", // MPTCP
        "1c040000",         // UTO
        "fd04abcd",         // experiments
        "fe04e2d4",         // SMC
        "ac05010203",       // AccECN
        "4504abcd",         // TCP-ENO
        "0200",             // MSS of length 0
        "0501",             // SACK of length 1
        "08ff",             // timestamps beyond the header
        "030300",           // window scale on a segment without SYN
    ];
    for option in understood {
        let (w, r, g) = Setup::new().small().established();
        r.sends(&format!("1:1001 <opt {option}>"));
        r.gets("1 ack 1001");
        g.gets("1:1001");
        assert_eq!(w.state(), Some(State::On), "{option}");
    }
    for option in not {
        let (w, r, g) = Setup::new().small().established();
        r.sends(&format!("1:1001 <opt {option}>"));
        r.gets_nothing();
        let seen = g.gets("1:1001");
        assert_eq!(seen.bytes, r.frame_of(&format!("1:1001 <opt {option}>")), "{option}");
        // Nothing is owed, so it is out of the path already.
        assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Options), "{option}");
        g.sends("ack 1001");
        r.gets("1 ack 1001");
    }
}

#[test]
fn com_04_several_segments_nobody_understands_pass_one_after_the_other() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    g.gets("1:1001");
    g.sends("ack 1001");
    r.takes_all();
    for n in 1..20_i64 {
        let (from, to) = (1 + 1000 * n, 1001 + 1000 * n);
        r.sends(&format!("{from}:{to} <opt 1e08000000000000>"));
        g.gets(&format!("{from}:{to}"));
    }
    r.gets_nothing();
    g.sends("ack 20001");
    r.gets("1 ack 20001");
    assert_eq!(flow(&w, |f| f.why()), Why::Options);
}

#[test]
fn com_05_a_flow_with_an_unknown_option_ends_in_pass() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001 <opt 1c040000>");
    g.gets("1:1001");
    g.sends("ack 1001"); // shows an edge right of everything H has shown
    r.gets_last("1 ack 1001");
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Options));
    r.sends("1001:2001 <opt 1c040000>");
    g.gets("1001:2001");
    g.sends("ack 2001");
    r.gets("1 ack 2001");
    r.gets_nothing();
}

#[test]
fn com_06_flag_combinations() {
    for bits in 0..64_u16 {
        let flags = TcpFlags(bits);
        let (w, r, g) = Setup::new().small().established();
        warms_up(&r, &g);
        let mut spec = Spec::parse("1001:1011");
        spec.flags = Some(nightporter_check::wire::TcpFlags(bits));
        w.set_lenient(0, true);
        let verdict = r.sends_spec(&spec);
        let to_r = r.takes_all();
        let to_g = g.takes_all();
        let held = flow(&w, |f| f.held_bytes());
        let state = flow(&w, |f| f.state());
        if flags.rst() {
            // Exact: it ends the flow whatever else is set.
            assert_eq!((state, held), (State::Abort, 0), "{flags}");
            assert!(to_g.iter().all(|s| s.tcp().flags.rst()), "{flags}");
        } else if flags.syn() && flags.ack() {
            assert_eq!(verdict, Verdict::Drop(DropReason::SynOnLiveFlow), "{flags}");
            assert_eq!((to_r.len(), to_g.len(), held), (1, 0, 0), "{flags}: a challenge ACK");
        } else if flags.syn() {
            assert_eq!((verdict, held), (Verdict::Forward(GUEST), 0), "{flags}");
            assert_eq!((to_r.len(), to_g.len()), (0, 1), "{flags}: G's to answer (SNOOP-17)");
        } else if !flags.ack() {
            assert_eq!(verdict, Verdict::Drop(DropReason::BadFlags), "{flags}");
            assert_eq!((to_r.len(), to_g.len(), held), (0, 0, 0), "{flags}");
        } else if flags.urg() {
            assert_eq!((verdict, held), (Verdict::Forward(GUEST), 0), "{flags}");
            assert_eq!(to_r.len(), 0, "{flags}: not H's to acknowledge");
        } else {
            assert_eq!((verdict, held), (Verdict::Absorbed, 10), "{flags}");
            assert_eq!(to_r.last().map(|s| s.ack()), Some(1011), "{flags}");
            assert_eq!(to_g.last().map(|s| s.tcp().flags.fin()), Some(flags.fin()), "{flags}");
        }
    }
}

/// Found by simulation (seed 9681): it went on with R's newest acknowledgement, a duplicate for G.
#[test]
fn com_30_an_old_ack_with_ip_options_is_old_all_the_same() {
    let (_, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    // H has shown more than G does now, so that the flow stays in the path.
    g.sends_all(&["1:1001 ack 1001 win 2000", "1001:2001 ack 1001 win 2000"]);
    r.gets_all(&["1:1001", "1001:2001"]);
    r.sends("1001 ack 2001 ipopt");
    g.gets("1001 ack 2001");
    r.sends("1001 ack 1001 ipopt");
    g.gets_nothing();
}

/// Found by simulation (seed 35615): it lay behind a gap of R's data, and R got an ACK for it, the
/// same every time.
#[test]
fn com_30_an_ack_with_ip_options_that_may_not_pass_is_not_answered() {
    let (w, r, g) = Setup::new().small().established();
    g.sends("1:1001");
    r.gets("1:1001");
    r.sends("2001 ack 1001 ipopt"); // 1:2001 was lost
    g.gets("1 ack 1001");
    r.gets_nothing();
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Drain, Why::Options));
}

/// Found by simulation (seeds 38973, 40080): R's data with such options passes, and what G has no
/// room for it drops. R's ACK had its number from behind that, and G dropped it too: it took R for
/// dead, because nothing answered its keepalives.
#[test]
fn com_30_an_ack_with_ip_options_has_a_number_that_g_takes() {
    let (_, r, g) = Setup::new().small().established();
    warms_up(&r, &g);
    g.sends("1:1001 ack 1001 win 1024");
    r.gets("1:1001");
    r.sends("1001:2001 ack 1 ipopt");
    g.gets("1001:2001");
    r.sends("2001:3001 ack 1 ipopt");
    g.gets("2001:3001"); // beyond its window
    r.sends("3001 ack 1001 ipopt");
    g.gets("2025 ack 1001"); // the edge
}

/// Found by simulation (seed 80698): a segment that reached beyond the edge passed uncut, and G's
/// ACK of all of it was taken for one of what it did not have.
#[test]
fn com_07_g_may_acknowledge_all_of_a_segment_that_passed_uncut() {
    let (_, r, g) = Setup { window: [64_000, 4_000], ..Setup::new() }.small().established();
    g.sends("1 ack 1 win 1024"); // less than H has shown, so that the flow stays
    for text in ["1:1001", "1001:2001", "2001:3001", "3001:3501", "3501:4501"] {
        r.sends(&format!("{text} ipopt"));
        g.gets(text);
    }
    r.takes_all();
    g.sends("ack 4501 win 1024");
    r.gets_last("ack 4501");
}

#[test]
fn com_07_ip_options_are_not_acknowledged_early() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001 ipopt");
    r.gets_nothing();
    let seen = g.gets("1:1001");
    assert_eq!(seen.bytes, r.frame_of("1:1001 ipopt"));
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Options));
    g.sends("ack 1001");
    r.gets_last("1 ack 1001");
}

#[test]
fn com_09_ipv6_headers_before_tcp() {
    // Destination options (8 bytes, padding) between IPv6 and TCP: taken or passed, never misread.
    for count in [1_usize, 9] {
        let (w, r, g) = Setup { v6: true, ..Setup::new() }.established();
        let mut frame = r.frame_of("1:1001");
        let header = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
        for n in 0..count {
            let next = if n == 0 { 6 } else { 60 };
            frame.splice(54..54, header(next));
        }
        frame[20] = 60;
        let len = u16::from_be_bytes([frame[18], frame[19]]) + 8 * count as u16;
        frame[18..20].copy_from_slice(&len.to_be_bytes());
        w.set_lenient(0, true);
        let verdict = from_uplink(&w, &frame);
        assert_eq!(verdict, Verdict::Forward(GUEST), "{count}");
        r.gets_nothing();
        let passed = g.takes_all().pop().map(|s| s.bytes);
        let passed =
            passed.or_else(|| w.0.borrow_mut().outside.strays.pop().map(|(_, bytes)| bytes));
        assert_eq!(passed, Some(frame), "{count}");
        assert_eq!(flow(&w, |f| f.held_bytes()), 0);
    }
}

#[test]
fn com_10_two_vlans_are_two_flows() {
    let tags = |id: u8| vec![[0x81, 0, 0x20, id]];
    let base = Setup::new();
    let w = base.opens();
    let pairs = [7, 8].map(|id| {
        let setup = Setup { vlan: tags(id), isn: [u32::from(id), 99], ..base.clone() };
        let (r, g) = w.pair(&setup);
        for peer in [&r, &g] {
            peer.end(|end| end.tcp_port = if end.tcp_port == 80 { 80 } else { 40_000 });
        }
        w.handshake(&r, &g);
        (r, g)
    });
    // A monitor that ignores tags takes both for one.
    (0..2).for_each(|conn| w.set_lenient(conn, true));
    let [(r7, g7), (r8, g8)] = &pairs;
    r7.sends("1:1001");
    let ack = r7.gets("1 ack 1001");
    assert_eq!(ack.packet.eth.vlan.tags(), tags(7), "H's frames carry G's tags");
    g7.gets("1:1001");
    g8.gets_nothing();
    r8.sends("1:501");
    r8.gets("1 ack 501");
    g8.gets("1:501");
    r7.gets_nothing();
    assert_eq!(w.0.borrow().engine.flows().count(), 2);
}

#[test]
fn com_11_only_the_guests_own_addresses_are_offloaded() {
    let setup = Setup::new();
    let w = setup.opens();
    // Learned: a foreign group address makes no flow and goes no further.
    let (r, g) = w.pair(&setup);
    g.end(|end| end.ip = IpAddr16::from_v4([224, 0, 0, 9]));
    let drop = g.sends_syn_spec("S", &setup);
    assert_eq!(drop, Verdict::Drop(DropReason::SpoofedIp));
    r.gets_nothing();
    // Listed: anything else is dropped, also as a SYN-ACK.
    let mut config = setup.guest_config(mac(3));
    config.ips = Some(vec!["10.0.0.3".parse().expect("an address")]);
    let port = w.add_port(PortConfig::guest("listed", config), ALL_FEATURES);
    let (_, g) = w.pair_at(&setup, port, 3);
    g.end(|end| end.ip = IpAddr16::from_v4([10, 0, 0, 77]));
    assert_eq!(g.sends_syn_spec("S", &setup), Verdict::Drop(DropReason::SpoofedIp));
    g.end(|end| end.mac = mac(77));
    assert_eq!(g.sends_syn_spec("S", &setup), Verdict::Drop(DropReason::SpoofedMac));
    assert_eq!(w.0.borrow().engine.flows().count(), 0);
}

#[test]
fn com_11_a_guest_that_routes_for_a_thousand_addresses_loses_no_frame() {
    let setup = Setup { flows_max: 2000, guest_is_client: true, ..Setup::new() };
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    for n in 0..1000_u16 {
        let [hi, lo] = n.to_be_bytes();
        g.end(|end| end.ip = IpAddr16::from_v4([10, 1, hi, lo]));
        let verdict = g.sends_syn_spec("S", &setup);
        assert!(matches!(verdict, Verdict::Forward(_) | Verdict::Flood), "{n}: {verdict:?}");
        r.gets_syn();
    }
    // Of those it owns, the first sixteen, there are flows.
    assert_eq!(w.0.borrow().engine.flows().count(), 16);
}

#[test]
fn com_20_a_packet_longer_than_another_vms_mtu_is_dropped() {
    let setup = Setup::new();
    let w = setup.opens();
    let config = GuestConfig { mtu: 1000, ..setup.guest_config(mac(3)) };
    let other = w.add_port(PortConfig::guest("other", config), ALL_FEATURES);
    let sends = |to: u8, len: usize| {
        let mut frame = [&mac(to)[..], &mac(1)[..], &[0x88, 0xb5]].concat();
        frame.resize(14 + len, 0);
        w.frame(GUEST, VirtioNetHdr::default(), &frame)
    };
    assert_eq!(sends(3, 1000), Verdict::Forward(other));
    assert_eq!(sends(3, 1001), Verdict::Drop(DropReason::TooBig));
    assert_eq!(sends(9, 1001), Verdict::Flood, "to whomever an uplink leads");
}

#[test]
fn com_12_a_tunnel_is_not_looked_into() {
    let (w, r, _) = Setup::new().established();
    let inner = r.frame_of("1:1001");
    // VXLAN: IPv4, UDP 4789, 8 bytes, an Ethernet frame.
    let mut frame = [&mac(1)[..], &mac(2)[..], &[8, 0]].concat();
    let len = (20 + 8 + 8 + inner.len()) as u16;
    frame.extend([0x45, 0]);
    frame.extend(len.to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1, 0xc0, 0, 0x12, 0xb5]);
    frame.extend((len - 20).to_be_bytes());
    frame.extend([0, 0, 8, 0, 0, 0, 0, 0, 7, 0]);
    frame.extend(&inner);
    fix_ip_checksum(&mut frame, 14);
    assert_eq!(from_uplink(&w, &frame), Verdict::Forward(GUEST));
    assert_eq!(w.0.borrow().outside.strays, [(GUEST, frame)]);
    r.gets_nothing();
    assert_eq!(flow(&w, |f| f.held_bytes()), 0);
}

#[test]
fn com_13_a_checksum_somebody_vouches_for_is_not_computed_again() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001 partial");
    r.gets("1 ack 1001");
    let checked = VirtioNetHdr { flags: F_DATA_VALID, ..VirtioNetHdr::default() };
    let uplink = w.0.borrow().outside.uplink;
    let frame = r.frame_of("1001:2001 badsum");
    w.set_lenient(0, true);
    assert_eq!(w.frame(uplink, checked, &frame), Verdict::Absorbed);
    r.gets("1 ack 2001");
    assert_eq!(g.takes_all().len(), 2);
    // A guest vouches for nothing: what it says of its own frames is not passed on.
    let (w, r, g) = Setup::new().established();
    let frame = g.frame_of("1:11 ack 1");
    w.set_lenient(0, true);
    w.frame(GUEST, checked, &frame);
    assert_eq!(r.gets("1:11").hdr, VirtioNetHdr::default());
}

#[test]
fn com_16_a_hostile_virtio_header_is_a_counted_drop() {
    let (w, _, g) = Setup::new().established();
    let frame = g.frame_of("1:1001 ack 1");
    let before = w.0.borrow().engine.drops(GUEST).expect("a port").iter().sum::<u64>();
    let mut hostile = 0;
    for flags in 0..4 {
        for gso_type in [0, 1, 3, 4, 5, 0x81, 0xff] {
            for gso_size in [0, 1, 1000, 65_535] {
                for (csum_start, csum_offset) in [(0, 0), (34, 16), (34, 65_535), (65_535, 16)] {
                    let hdr = VirtioNetHdr {
                        flags,
                        gso_type,
                        hdr_len: 65_535,
                        gso_size,
                        csum_start,
                        csum_offset,
                    };
                    w.set_lenient(0, true);
                    if let Verdict::Drop(reason) = w.frame(GUEST, hdr, &frame) {
                        assert_eq!(reason, DropReason::MalformedVirtioHeader);
                        hostile += 1;
                    }
                }
            }
        }
    }
    let after = w.0.borrow().engine.drops(GUEST).expect("a port").iter().sum::<u64>();
    assert!(hostile > 0);
    assert_eq!(after - before, hostile);
}

#[test]
fn com_17_stored_bytes_leave_as_the_driver_takes_them_now() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:20001 gso 1000");
    r.sends("20001:40001 gso 1000");
    let plain = PortFeatures::default();
    w.set_features(GUEST, Some(plain));
    g.runs();
    let seen = g.takes_all();
    assert_eq!(seen.iter().map(|s| s.payload().len()).sum::<usize>(), 40_000);
    assert!(seen.iter().all(|s| s.payload().len() <= 1000 && s.hdr == VirtioNetHdr::default()));
    // And back: one frame again, with a checksum left to the guest.
    g.sends("ack 40001");
    w.set_features(GUEST, Some(ALL_FEATURES));
    r.sends("40001:60001 gso 1000");
    let seen = g.gets("40001:60001");
    assert!(seen.hdr.needs_csum() && seen.hdr.is_gso());
    assert_eq!(seen.hdr.gso_size, 1000);
}

#[test]
fn com_30_pure_acks_are_forwarded_one_to_one() {
    let (_, r, g) = Setup::new().established();
    sends_data(&g);
    r.takes_all();
    for _ in 0..5 {
        r.sends("1 ack 1001 <sack 2001:3001>");
    }
    for _ in 0..5 {
        g.gets("1 ack 1001 <sack 2001:3001>");
    }
    g.gets_nothing();
    r.gets_nothing();
}

fn sends_data(g: &crate::common::Peer<'_>) {
    for n in 0..3_i64 {
        g.sends(&format!("{}:{} ack 1", 1 + 1000 * n, 1001 + 1000 * n));
    }
}

#[test]
fn com_30_an_old_ack_does_not_reach_the_guest() {
    let (_, r, g) = Setup::new().established();
    sends_data(&g);
    r.sends("1 ack 2001");
    g.gets("1 ack 2001");
    r.sends("1 ack 1001 win 1280");
    g.gets_nothing();
}

#[test]
fn com_31_two_of_us_do_not_talk_for_ever() {
    // The far end answers whatever it gets with a segment out of its peer's window.
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    let mut acks = 0;
    for _ in 0..1000 {
        r.sends("300001 ack 1");
        acks += r.takes_all().len();
        w.after_ms(10);
    }
    assert!(acks <= 4 * 10, "{acks} ACKs in ten seconds");
    g.gets_nothing();
}

#[test]
fn com_34_frames_of_ours_do_not_fragment() {
    let (_, r, g) = Setup::new().established();
    r.sends("1:1001");
    let ack = r.gets("1 ack 1001");
    let data = g.gets("1:1001");
    for seen in [ack, data] {
        let (ip, _) = seen.packet.tcp().expect("TCP");
        assert!(ip.dont_fragment);
        assert_eq!(ip.ttl, 64);
    }
    // TTL as of the frames of the same sender (RFC 5082 peers want 255).
    r.end(|end| end.ttl = 255);
    g.end(|end| end.ttl = 254);
    g.sends("1:11 ack 1001");
    r.sends("1001:2001 ack 11");
    r.gets("1:11");
    assert_eq!(r.gets("11 ack 2001").packet.tcp().expect("TCP").0.ttl, 254);
    assert_eq!(g.gets("1001:2001").packet.tcp().expect("TCP").0.ttl, 255);
}

#[test]
fn a_segment_of_the_uplink_with_a_changed_byte_in_each_place_changes_no_stream() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    let good = r.frame_of("1001:1031");
    for at in 14..good.len() {
        let mut frame = good.clone();
        frame[at] ^= 0x04;
        if Packet::parse(&frame).is_ok() {
            from_uplink(&w, &frame);
        }
    }
    r.takes_all();
    g.takes_all();
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes())), (State::On, 0));
    let mut again = good;
    fix_tcp_checksum(&mut again);
    r.sends("1001:1031");
    r.gets("1 ack 1031");
    g.gets("1001:1031");
    sends_segments(&r, 1031, 3);
    r.gets_last("1 ack 4031");
}
