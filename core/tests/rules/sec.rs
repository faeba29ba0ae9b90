//! SEC-01 to SEC-07: what a remote or a guest that means harm can do.

use crate::common::world::mac;
use crate::common::{Random, Setup, World};
use crate::{GUEST, flow, from_uplink, warms_up};
use nightporter_core::engine::Verdict;
use nightporter_core::limits;
use nightporter_core::port::PortConfig;
use nightporter_core::tcp::flow::State;
use nightporter_core::wire::packet::IpAddr16;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

#[test]
fn sec_01_a_guest_that_never_reads_bounds_what_its_remotes_can_fill() {
    let setup = Setup { budget_bytes: 2 << 20, flows_max: 256, ..Setup::new() };
    let w = setup.opens();
    let mut on = 0;
    for n in 0..60_usize {
        let (r, g) = w.connects();
        g.sends("1 ack 1 win 0");
        r.takes_all();
        if w.flow(n, |f| f.state()) != Some(State::On) {
            r.sends("1:1001 ack 1");
            g.gets_last("1:1001 ack 1");
            continue;
        }
        on += 1;
        let mut at = 1_i64;
        for _ in 0..100 {
            r.sends(&format!("{at}:{}", at + 5000));
            let seen = r.gets_last_any();
            at = i64::from(seen.ack());
            if seen.window() < 5000 {
                break;
            }
        }
    }
    assert!((8..60).contains(&on), "{on} flows");
    let used = w.engine(|e, _| e.arena().pages_total() - e.arena().free_pages());
    assert!(used <= (2 << 20) / limits::PAGE, "{used} pages");
}

#[test]
fn sec_02_a_guest_that_never_acknowledges_ends_in_a_reset() {
    // Its ACKs are filtered; what it sends otherwise shows that it runs.
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    let mut at = 1001_i64;
    for _ in 0..20 {
        r.sends(&format!("{at}:{}", at + 10_000));
        at = i64::from(r.gets_last_any().ack());
    }
    w.set_lenient(0, true);
    w.after_ms(limits::REFUSED_RUNNING.as_millis() + 5000);
    assert_eq!(w.state(), Some(State::Abort));
    assert!(r.gets_last_any().tcp().flags.rst());
    assert!(g.gets_last_any().tcp().flags.rst());
    assert_eq!(w.engine(|e, _| e.arena().free_pages()), 1024);
}

#[test]
fn sec_03_a_remote_cannot_acknowledge_what_was_not_sent() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.sends("1:1001 ack 1001");
    r.takes_all();
    // G has not sent it and says so; what R's window did not allow G to send H denies itself.
    for (ack, plausible) in [(1002, true), (50_001, true), (2_000_000_000, false)] {
        w.after_ms(600);
        r.lies(&format!("1001 ack {ack}"));
        if plausible {
            g.gets(&format!("1001 ack {ack}"));
            g.sends("1001 ack 1001");
        } else {
            r.gets("1001 ack 1001");
        }
        w.after_ms(600);
        r.lies(&format!("1001:2001 ack {ack}"));
        r.gets("1001 ack 1001");
        g.gets_nothing();
    }
    assert_eq!(flow(&w, |f| (f.stats().net_una, f.held_bytes())).1, 0);
    // A thousand duplicates are passed on for G to judge, one for one, and make no traffic of ours.
    r.takes_all();
    for _ in 0..1000 {
        r.sends("1001 ack 1");
    }
    assert_eq!(g.takes_all().len(), 1000);
    r.gets_nothing();
}

#[test]
fn sec_04_blind_segments_change_nothing_but_limited_acks() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    r.sends("1001:2001");
    r.takes_all();
    g.takes_all();
    let before = flow(&w, |f| {
        (f.state(), f.stats().rcv_nxt, f.stats().guest_una, f.stats().net_una, f.stats().ts_recent)
    });
    let good = r.frame_of("2001:2101 ack 1");
    let mut random = Random::new(1);
    let (mut bytes_in, mut bytes_out) = (0, 0);
    w.set_lenient(0, true);
    for n in 0..20_000_u32 {
        // An attacker who guesses has neither sequence, nor acknowledgement, nor clock.
        let mut frame = good.clone();
        frame[38..42].copy_from_slice(&(random.next() as u32).to_be_bytes());
        frame[42..46].copy_from_slice(&(random.next() as u32).to_be_bytes());
        frame[47] = (random.next() as u32) as u8 & 0x3f;
        frame[58..62].copy_from_slice(&(random.next() as u32).to_be_bytes());
        if n % 4 == 0 {
            frame[54] = (random.next() as u32) as u8; // another option in place of the first NOP
        }
        crate::common::segment::fix_tcp_checksum(&mut frame);
        bytes_in += frame.len();
        from_uplink(&w, &frame);
        let answers = r.takes_all();
        assert!(answers.len() <= 1, "SEC-07: at most one for one");
        bytes_out += answers.iter().map(|s| s.bytes.len()).sum::<usize>();
        g.takes_all();
        if n % 100 == 0 {
            w.after_ms(1);
        }
    }
    let after = flow(&w, |f| {
        (f.state(), f.stats().rcv_nxt, f.stats().guest_una, f.stats().net_una, f.stats().ts_recent)
    });
    assert_eq!(before, after);
    assert!(bytes_out <= bytes_in / 2, "{bytes_out} for {bytes_in}");
}

#[test]
fn sec_05_challenge_acks_of_one_flow_tell_nothing_of_another() {
    let setup = Setup::new();
    let w = setup.opens();
    let a = w.connects();
    let b = w.connects();
    for (r, _) in [&a, &b] {
        r.sends("1:1001"); // or G would have to answer
        r.takes_all();
    }
    for _ in 0..1000 {
        a.0.is_forged("S 5");
    }
    assert_eq!(a.0.takes_all().len(), 1);
    b.0.is_forged("S 5");
    assert_eq!(b.0.takes_all().len(), 1, "its own limit");
}

#[test]
fn sec_06_another_guest_cannot_speak_for_this_one() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    r.sends("1001:2001");
    r.takes_all();
    let other = w.add_guest("other", mac(3));
    let spoofed = g.frame_of("1 ack 2001");
    let verdict = w.frame(other, VirtioNetHdr::default(), &spoofed);
    assert!(matches!(verdict, Verdict::Drop(_)));
    assert_eq!(flow(&w, |f| f.held_bytes()), 1000);
    r.gets_nothing();
}

#[test]
fn sec_06_a_guest_behind_a_list_opens_only_for_its_own_address() {
    let setup = Setup::new();
    let w: World<'_> = setup.opens();
    let mut config = setup.guest_config(mac(4));
    config.ips = Some(vec!["10.0.0.4".parse().expect("an address")]);
    let port = w.add_port(PortConfig::guest("listed", config), setup.features);
    let (r, g) = w.pair_at(&setup, port, 4);
    w.set_lenient(0, true); // the world has no ring for this port
    g.sends_syn_spec("S", &Setup { guest_is_client: true, ..setup.clone() });
    r.gets_syn();
    assert_eq!(w.0.borrow().engine.flows().count(), 1);
    g.end(|end| end.ip = IpAddr16::from_v4([10, 0, 0, 5]));
    g.sends_syn();
    assert_eq!(w.0.borrow().engine.flows().count(), 1);
    assert_ne!(port, GUEST);
}

#[test]
fn sec_07_never_more_out_than_in() {
    // An unvalidated peer gets at most one packet of ours, of about the size of its own.
    for text in ["S 5", "900", "300001", "R 2002", "2001 ack 900001", "F. 300001"] {
        let (w, r, g) = Setup::new().established();
        warms_up(&r, &g);
        r.sends("1001:2001");
        r.takes_all();
        g.takes_all();
        let size = r.frame_of(text).len();
        let mut answers = Vec::new();
        for _ in 0..50 {
            r.is_forged(text);
            answers.extend(r.takes_all());
            w.after_ms(1);
        }
        assert!(answers.len() <= 1, "{text}: {}", answers.len());
        assert!(answers.iter().all(|a| a.bytes.len() * 10 <= size * 13), "{text}");
        g.gets_nothing();
    }
}
