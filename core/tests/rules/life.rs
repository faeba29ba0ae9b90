//! LIFE-01 to LIFE-11: tables, memory, drivers, guests, daemons and clocks that come and go.

use crate::common::segment::{Seen, pattern_bytes};
use crate::common::world::{HOST_MAC, Peer, mac};
use crate::common::{Setup, Spec, World};
use crate::{GUEST, flow, from_uplink, sends_segments, tear, warms_up};
use nightporter_check::event::Event;
use nightporter_core::engine::Verdict;
use nightporter_core::limits;
use nightporter_core::port::{GuestConfig, PortConfig, PortId, Vlans};
use nightporter_core::store::arena::Arena;
use nightporter_core::store::record::Record;
use nightporter_core::tcp::flow::{State, Why};
use nightporter_core::tcp::vm::Presence;
use nightporter_core::time::Duration;
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use zerocopy::IntoBytes;

#[test]
fn life_01_a_flood_of_syns_costs_a_fixed_amount_of_memory() {
    let setup = Setup { flows_max: 8, ..Setup::new() };
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    // Of 20,000 attempts G answers every tenth: its accept queue is long.
    let syn = r.frame_of("S 0");
    let syn_ack = g.frame_of("S. 0 ack 1");
    for n in 0..20_000_u32 {
        let port = (1024 + n % 60_000) as u16;
        let mut frame = syn.clone();
        frame[34..36].copy_from_slice(&port.to_be_bytes());
        frame[38..42].copy_from_slice(&n.to_be_bytes());
        crate::common::segment::fix_tcp_checksum(&mut frame);
        assert_eq!(from_uplink(&w, &frame), Verdict::Forward(GUEST));
        if n % 10 == 0 {
            let mut frame = syn_ack.clone();
            frame[36..38].copy_from_slice(&port.to_be_bytes());
            frame[42..46].copy_from_slice(&n.wrapping_add(1).to_be_bytes());
            crate::common::segment::fix_tcp_checksum(&mut frame);
            w.frame(GUEST, VirtioNetHdr::default(), &frame);
        }
        w.0.borrow_mut().outside.strays.clear();
        if n % 100 == 0 {
            // The live flow goes on.
            let at = 1001 + i64::from(n) / 100 * 10;
            r.sends(&format!("{at}:{}", at + 10));
            r.gets_last(&format!("ack {}", at + 10));
            g.gets_last(&format!("{at}:{}", at + 10));
            g.sends(&format!("ack {}", at + 10));
            r.takes_all();
        }
    }
    assert_eq!(w.state(), Some(State::On));
    assert!(w.0.borrow().engine.flows().count() <= 8);
}

/// `attempts` SYNs of made-up remotes, which G answers, and nobody completes.
fn floods_with_answered_syns(w: &World<'_>, attempts: u32) {
    let setup = Setup::new();
    let (r, g) = w.pair(&setup);
    let syn = r.frame_of("S 0");
    let syn_ack = g.frame_of("S. 0 ack 1");
    for n in 0..attempts {
        for (port, frame, ip_at) in [(PortId(0), &syn, 26), (GUEST, &syn_ack, 30)] {
            let mut frame = frame.clone();
            frame[ip_at..ip_at + 2].copy_from_slice(&[172, 16]);
            frame[ip_at + 2..ip_at + 4].copy_from_slice(&(n as u16).to_be_bytes());
            crate::common::segment::fix_ip_checksum(&mut frame, 14);
            crate::common::segment::fix_tcp_checksum(&mut frame);
            w.frame(port, VirtioNetHdr::default(), &frame);
        }
        w.0.borrow_mut().outside.strays.clear();
    }
}

fn flows_in(w: &World<'_>, state: State) -> usize {
    w.engine(|e, _| e.flows().filter(|(_, _, f)| f.state() == state).count())
}

#[test]
fn life_01_a_flood_of_handshakes_takes_no_idle_flow_its_offload() {
    let setup = Setup { flows_max: 48, budget_bytes: 16 << 20, ..Setup::new() };
    let w = setup.opens();
    let idle: Vec<_> = (0..40).map(|_| w.connects()).collect();
    w.after_ms(5000);
    floods_with_answered_syns(&w, 1000);
    assert_eq!((flows_in(&w, State::On), flows_in(&w, State::Handshake)), (40, 6));
    // A completed handshake comes in beside the flood.
    w.connects();
    assert_eq!(flows_in(&w, State::On), 41);
    drop(idle);
}

#[test]
fn life_01_a_flood_at_a_full_table_takes_the_quota_of_handshakes_and_no_more() {
    let setup = Setup { flows_max: 40, budget_bytes: 16 << 20, ..Setup::new() };
    let w = setup.opens();
    let idle: Vec<_> = (0..40).map(|_| w.connects()).collect();
    w.after_ms(5000);
    floods_with_answered_syns(&w, 1000);
    assert_eq!((flows_in(&w, State::On), flows_in(&w, State::Handshake)), (35, 5));
    drop(idle);
}

#[test]
fn life_01_a_handshake_that_takes_long_is_not_the_first_to_go() {
    // 10 may wait; the flood stops short of pushing out the one that came second.
    let setup = Setup { flows_max: 80, ..Setup::new() };
    let w = setup.opens();
    floods_with_answered_syns(&w, 1);
    let (r, g) = w.pair(&setup);
    r.sends_syn();
    g.gets_syn();
    g.sends_syn_ack();
    r.gets_syn();
    floods_with_answered_syns(&w, 9);
    r.sends("1 ack 1");
    g.gets("1 ack 1");
    assert_eq!(w.flow(1, |f| f.state()), Some(State::On));
}

#[test]
fn life_02_connections_that_are_reset_all_the_time_do_not_fill_the_table() {
    // A health check: opened, reset. An entry lives 60 s; 16 places would be taken after 0.1 s.
    let setup = Setup { flows_max: 16, ..Setup::new() };
    let w = setup.opens();
    for n in 0..100 {
        let (r, g) = w.connects();
        assert_eq!(w.flow(n, |f| f.state()), Some(State::On), "connection {n}");
        if n % 2 == 0 {
            g.sends("R. 1 ack 1")
        } else {
            r.sends("R 1")
        };
        w.after_ms(4);
    }
    // The newest still answer for their connections (SNOOP-16), as long as there is room.
    let (r, g) = w.connects();
    g.sends("R. 1 ack 1");
    r.gets("R. 1 ack 1");
    w.after_ms(4);
    for _ in 0..10 {
        w.connects();
    }
    r.sends("1 ack 1");
    r.gets("R. 1");
    let refused = w.engine(|e, _| e.vm(GUEST).map(|vm| vm.counters.flows_refused));
    assert_eq!(refused, Some(0));
}

#[test]
fn life_01_a_full_table_passes() {
    let setup = Setup { flows_max: 2, ..Setup::new() };
    let w = setup.opens();
    let pairs: Vec<_> = (0..3).map(|_| w.connects()).collect();
    for (r, g) in &pairs[..2] {
        r.sends("1:1001");
        r.gets("1 ack 1001");
        g.gets("1:1001");
    }
    let (r, g) = &pairs[2];
    assert_eq!(w.flow(2, |f| f.state()), None);
    r.sends("1:1001 ack 1");
    g.gets("1:1001 ack 1");
    r.gets_nothing();
    g.sends("1 ack 1001");
    r.gets("1 ack 1001");
    let vm = w.engine(|e, _| e.vm(GUEST).map(|vm| vm.counters)).expect("a VM");
    assert_eq!(vm.flows_refused, 1);
}

#[test]
fn life_02_only_what_owes_nothing_makes_room() {
    let setup = Setup { flows_max: 3, ..Setup::new() };
    let w = setup.opens();
    let held = w.connects();
    held.0.sends("1:1001"); // G does not acknowledge it
    let idle = w.connects();
    warms_up(&idle.0, &idle.1);
    w.after_ms(5000); // idle flows are parked by now
    let newcomers: Vec<_> = (0..20).map(|_| w.connects()).collect();
    assert_eq!(w.flow(0, |f| f.state()), Some(State::On), "it holds bytes");
    assert_eq!(w.flow(0, |f| f.held_bytes()), Some(1000));
    assert!(w.0.borrow().engine.flows().count() <= 3);
    // The one that had to go was in the middle of nothing: it works on, as it is.
    let (r, g) = &idle;
    r.takes_all();
    g.takes_all();
    w.set_lenient(1, true);
    r.sends("1001:2001 ack 1");
    g.gets_last("1001:2001 ack 1");
    drop(newcomers);
}

#[test]
fn life_02_an_idle_connection_is_forgotten_after_an_hour_and_not_before() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    w.after_ms(limits::T_IDLE.as_millis() - 10_000);
    assert_eq!(w.state(), Some(State::On));
    w.after_ms(30_000);
    assert_eq!(w.state(), None);
    r.takes_all();
    r.sends("1001:2001 ack 1");
    g.gets("1001:2001 ack 1");
    r.gets_nothing();
    // One that owes bytes is never forgotten.
    let (w, r, g) = Setup::new().established();
    g.stops(1);
    r.sends("1:1001");
    w.after_ms(3 * limits::T_IDLE.as_millis());
    assert_eq!(flow(&w, |f| f.held_bytes()), 1000);
}

#[test]
fn life_03_memory_pressure_never_touches_what_was_acknowledged() {
    // The arena has fewer pages than the budgets together could want: the last are refused.
    let setup = Setup { budget_bytes: 1 << 20, arena: (64, 4), ..Setup::new() };
    let w = setup.opens();
    let pairs: Vec<_> = (0..8).map(|_| w.connects()).collect();
    w.ring_takes(0, 0);
    for round in 0..40_i64 {
        for (n, (r, _)) in pairs.iter().enumerate() {
            let at = 1 + 5000 * round;
            if w.flow(n, |f| f.state()) == Some(State::On) {
                // The monitor reads the store after every step.
                r.sends(&format!("{at}:{}", at + 5000));
            }
        }
    }
    let vm = w.engine(|e, _| e.vm(GUEST).map(|vm| (vm.reserved_pages, vm.budget_pages)));
    let (reserved, budget) = vm.expect("a VM");
    assert!(reserved <= budget);
    assert!(w.engine(|e, _| e.arena().pages_total() - e.arena().free_pages()) <= 64);
}

#[test]
fn life_04_a_driver_that_is_reset_gets_everything_again() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.sends("1:1001 ack 1001");
    r.gets("1:1001");
    sends_segments(&r, 1001, 5);
    r.takes_all();
    assert_eq!(g.takes_all().len(), 5); // in a ring that is gone now
    w.set_features(GUEST, None);
    r.sends("6001:7001 ack 1001");
    r.gets_last("1001 ack 7001");
    w.after_ms(5000);
    g.gets_nothing();
    w.set_features(GUEST, Some(Setup::new().features));
    let seen = g.takes_all();
    let stream: Vec<u8> = seen.iter().flat_map(|s| s.payload().to_vec()).collect();
    assert!(stream == pattern_bytes(0, 1001, 6000));
    assert_eq!(seen.last().expect("some").ack(), 1001);
    g.sends("1001 ack 7001");
    r.sends("7001:8001");
    r.gets_last("1001 ack 8001");
    g.gets_last("7001:8001");
}

#[test]
fn life_05_a_guest_that_is_gone_is_not_kept_alive() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(0);
    g.sends("1:501 ack 1001");
    r.takes_all();
    r.sends("1001:2001 ack 1");
    r.gets("501 ack 2001");
    w.happens(Event::Destroyed(0));
    w.engine(|e, now| e.handle_guest_gone(now, GUEST));
    w.after_ms(1999);
    r.gets_nothing();
    w.after_ms(1);
    r.gets("R. 501 ack 2001");
    // Segments under way from R meet an exact RST.
    w.after_ms(5);
    r.sends("2001:3001 ack 101");
    r.gets("R. 101");
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Abort, Why::GuestGone));
    let vm = w.engine(|e, _| e.vm(GUEST).map(|vm| vm.reserved_pages));
    assert_eq!(vm, Some(0));
    // The next guest behind the port starts clean.
    g.runs();
    g.gets_nothing();
}

#[test]
fn life_05_a_guest_that_is_in_another_vlan_now_gets_nothing_of_the_one_before() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(0);
    g.sends("1:501 ack 1001");
    r.takes_all();
    r.sends("1001:2001 ack 1");
    r.gets("501 ack 2001");
    let set = |vlans: Vlans| {
        w.engine(|e, now| {
            let config = e.port_config(GUEST).and_then(PortConfig::as_guest).unwrap();
            let config = GuestConfig { vlans, ..config.clone() };
            e.set_guest(now, GUEST, config).unwrap();
        });
    };
    set(Vlans::Any);
    r.gets_nothing();
    w.happens(Event::Destroyed(0));
    set(Vlans::Access(7));
    r.gets("R. 501 ack 2001");
    let vm = w.engine(|e, _| e.vm(GUEST).map(|vm| vm.reserved_pages));
    assert_eq!(vm, Some(0));
    g.runs();
    g.gets_nothing();
}

/// A guest that has seen and acknowledged everything, and whose ring takes no more.
fn stopped_with_a_full_ring() -> (World<'static>, Peer<'static>) {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001 ack 1");
    g.sends("ack 1001");
    r.takes_all();
    g.stops(0);
    (w, r)
}

/// A while after it was promised something it is not answered for.
fn counts_as_silent(w: &World<'_>, r: &Peer<'_>) {
    r.sends("1001:2001 ack 1");
    r.gets_last("1 ack 2001");
    w.after_ms(20_000);
    r.sends("2000 ack 1");
    r.gets_nothing();
}

/// Found by simulation: frames that only passed through did not count as unseen, and a paused guest
/// whose ring they had filled was taken for an idle one, for ever.
#[test]
fn life_05_a_guest_that_has_not_seen_what_was_forwarded_to_it_is_not_idle() {
    let (w, r) = stopped_with_a_full_ring();
    r.sends("1001 ack 1"); // passes: G would have to answer it
    counts_as_silent(&w, &r);
}

/// Found by simulation: frames for everybody did not count as unseen either.
#[test]
fn life_05_a_guest_that_has_not_seen_a_broadcast_is_not_idle() {
    let (w, r) = stopped_with_a_full_ring();
    let mut arp = vec![0xff; 6];
    arp.extend([0x02, 0, 0, 0, 9, 9, 0x08, 0x06]);
    arp.resize(60, 0);
    let verdict = from_uplink(&w, &arp);
    assert_eq!(verdict, Verdict::Flood);
    counts_as_silent(&w, &r);
}

/// Found by simulation: what R repeats of a handshake or of a path cut in the middle was answered
/// for a guest that had been silent for minutes.
#[test]
fn life_05_an_old_segment_is_not_answered_for_a_silent_guest() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001 ack 1");
    g.sends("ack 1001");
    r.takes_all();
    g.stops(1);
    r.sends("1001:2001 ack 1");
    r.gets_last("1 ack 2001");
    w.after_ms(30_000);
    r.sends("500 ack 1");
    r.gets("1 ack 2001");
    w.after_ms(40_000);
    r.sends("500 ack 1");
    r.gets_nothing();
    // But one that begins anew learns that the old connection is still there (RFC 5961 section 4).
    r.is_forged("S 777");
    r.gets("1 ack 2001");
}

/// Seed 112618: a stranger's octet, whose clock is long gone, was answered for ever.
#[test]
fn inv_19_an_octet_with_an_old_clock_is_not_answered_for_a_silent_guest() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001 ack 1 <ts 100>");
    g.sends("ack 1001");
    r.takes_all();
    g.stops(1);
    r.sends("1001:2001 ack 1 <ts 200>");
    r.gets_last("1 ack 2001");
    w.after_ms(30_000);
    r.is_forged("2000:2001 ack 1 <ts 50>");
    r.gets("1 ack 2001");
    w.after_ms(40_000);
    r.is_forged("2000:2001 ack 1 <ts 50>");
    r.gets_nothing();
    // More than that is data that came late: R may miss the ACK (SNOOP-37).
    r.is_forged("1000:2001 ack 1 <ts 50>");
    r.gets("1 ack 2001");
}

#[test]
fn life_05_a_removed_port_resets_its_flows_and_frees_its_place() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001");
    r.takes_all();
    w.guest_is_destroyed();
    r.gets("R. 1 ack 1001");
    assert_eq!(w.0.borrow().engine.flows().count(), 0);
    let free = w.engine(|e, _| (e.arena().free_pages(), e.arena().free_records()));
    assert_eq!(free, (1024, 128));
    let again = w.engine(|e, now| {
        e.add_port(now, PortConfig::guest("guest", Setup::new().guest_config(mac(1))))
    });
    assert_eq!(again, Ok(GUEST));
}

#[test]
fn life_05_a_rebooted_guest_resets_what_it_does_not_know() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    r.sends("1001:2001");
    r.takes_all();
    g.takes_all();
    // Its kernel answers the delivered segment.
    g.sends("R 1");
    r.gets("R. 1 ack 2001");
    assert_eq!(w.state(), Some(State::Abort));
}

/// The source of a frame.
fn source(seen: &Seen) -> [u8; 6] {
    seen.packet.eth.src
}

#[test]
fn life_07_a_reset_for_a_vm_whose_rings_are_stopped_has_an_address_of_the_host() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001");
    assert_eq!(source(&r.gets("1 ack 1001")), mac(1));
    w.happens(Event::Destroyed(0));
    w.engine(|e, now| {
        e.set_port_features(now, GUEST, None);
        e.handle_guest_gone(now, GUEST);
    });
    w.after_ms(2000);
    assert_eq!(source(&r.gets("R. 1 ack 1001")), HOST_MAC);
    w.after_ms(1000);
    r.sends("1001:2001 ack 1"); // it was under way: the reset is repeated
    assert_eq!(source(&r.gets("R. 1 ack 1001")), HOST_MAC);
}

/// Switches know where it is.
#[test]
fn life_07_a_reset_for_a_vm_that_runs_has_its_own_address() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    r.sends("1001:2001");
    r.takes_all();
    g.takes_all();
    g.sends("R 1");
    assert_eq!(source(&r.gets("R. 1 ack 2001")), mac(1));
    w.engine(|e, now| e.remove_port(now, PortId(0)));
    assert_eq!(w.engine(|e, _| e.vm(GUEST).and_then(|vm| vm.host_mac)), None);
}

#[test]
fn life_07_the_resets_of_a_successor_have_an_address_of_the_host() {
    for is_known in [true, false] {
        let setup = Setup::new();
        let mut memory = three_flows_owe_bytes(&setup);
        if !is_known {
            forget_vm(&mut memory);
        }
        let w = setup.reopens_in(memory.as_mut_bytes());
        w.set_features(GUEST, None);
        let pairs: Vec<_> = (0..3).map(|_| w.pair(&setup)).collect();
        (0..3).for_each(|conn| w.set_lenient(conn, true));
        assert_eq!(w.engine(|e, now| e.handle_restart(now)).reset, 3);
        for (r, _) in &pairs {
            assert_eq!(source(&r.gets("R. 1 ack 1001")), HOST_MAC, "known {is_known}");
        }
    }
}

/// Four connections of a VM, of which one is told at once what all of them are told: the last of
/// them in the fourth turn.
fn told_one_by_one() -> (World<'static>, (Peer<'static>, Peer<'static>)) {
    let setup = Setup { flows_per_step: Some(1), ..Setup::new() };
    let w = setup.opens();
    let mut all: Vec<_> = (0..4).map(|_| w.connects()).collect();
    for (r, g) in &all {
        warms_up(r, g);
    }
    (w, all.pop().expect("four"))
}

/// Which of them have not been told.
fn not_told(w: &World<'_>) -> Vec<usize> {
    (0..4).filter(|conn| w.flow(*conn, |flow| flow.state()) == Some(State::On)).collect()
}

#[test]
fn life_08_what_is_promised_while_others_are_drained_is_kept() {
    let (w, (r, g)) = told_one_by_one();
    g.stops(0);
    w.engine(|e, now| e.drain(now, GUEST));
    assert_eq!(not_told(&w), [1, 2, 3]);
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    assert_eq!(not_told(&w), [2, 3]);
    w.after_ms(0);
    assert_eq!(not_told(&w), []);
    assert!(!w.engine(|e, _| e.is_drained(GUEST)), "it is owed what was promised meanwhile");
    g.runs();
    g.gets("1001:2001");
    g.sends("1 ack 2001");
    assert!(w.engine(|e, _| e.is_drained(GUEST)));
}

#[test]
fn life_04_what_is_promised_while_others_get_a_new_ring_is_kept() {
    let (w, (r, g)) = told_one_by_one();
    r.sends("1001:2001");
    r.gets("1 ack 2001");
    g.gets("1001:2001"); // in a ring that is gone now
    w.set_features(GUEST, None);
    w.set_features(GUEST, Some(Setup::new().features)); // the first is told
    r.sends("2001:3001"); // the second
    r.gets("1 ack 3001");
    g.gets_nothing(); // it would get the bytes before behind these
    w.after_ms(0);
    let seen = g.takes_all();
    let stream: Vec<u8> = seen.iter().flat_map(|s| s.payload().to_vec()).collect();
    assert!(stream == pattern_bytes(0, 1001, 2000), "all of it");
    g.sends("1 ack 3001");
}

#[test]
fn life_05_nobody_is_promised_anything_while_others_are_told_of_the_end() {
    let (w, (r, g)) = told_one_by_one();
    g.stops(0);
    w.happens(Event::Destroyed(0));
    w.engine(|e, now| {
        e.set_port_features(now, GUEST, None);
        e.handle_guest_gone(now, GUEST);
    });
    assert_eq!(not_told(&w), [0, 1, 2, 3]);
    // Another VM is there: the first is told.
    w.set_features(GUEST, Some(Setup::new().features));
    assert!(w.engine(|e, _| e.is_ending(GUEST)));
    assert_eq!(w.engine(|e, _| e.vm(GUEST).map(|vm| vm.presence)), Some(Presence::Replaced));
    r.sends("1001:2001 ack 1");
    r.gets("R. 1 ack 1001");
    assert_eq!(not_told(&w), []);
    w.after_ms(0);
    assert!(!w.engine(|e, _| e.is_ending(GUEST)));
    let vm = w.engine(|e, _| e.vm(GUEST).map(|vm| vm.reserved_pages));
    assert_eq!(vm, Some(0));
    g.runs();
    assert!(g.gets("R. 1001").payload().is_empty(), "the next VM's guest is told");
    g.gets_nothing();
}

/// R's third ACK, and data with it, was under way when the VMM hung up.
#[test]
fn life_05_nobody_is_promised_anything_who_comes_when_the_vm_has_gone() {
    let w = Setup::new().opens();
    let (r, g) = w.pair(&Setup::new());
    r.sends_syn();
    g.gets_syn();
    g.sends_syn_ack();
    r.gets_syn();
    w.happens(Event::Destroyed(0));
    w.engine(|e, now| {
        e.set_port_features(now, GUEST, None);
        e.handle_guest_gone(now, GUEST);
    });
    r.sends("1:1001 ack 1");
    r.gets_nothing();
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::GuestGone));
}

#[test]
fn life_08_drained_means_nobody_is_owed_anything() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    sends_segments(&r, 1001, 5);
    r.takes_all();
    w.engine(|e, now| e.drain(now, GUEST));
    assert!(!w.engine(|e, _| e.is_drained(GUEST)));
    assert_eq!(w.state(), Some(State::Drain));
    // Bytes within the edge are still taken, but not acknowledged; no connection is taken on.
    r.sends("6001:7001");
    r.gets_nothing();
    let (r2, g2) = w.connects();
    r2.sends("1:1001 ack 1");
    g2.gets("1:1001 ack 1");
    r2.gets_nothing();
    g.takes_all();
    g.sends("ack 7001 win 8388480"); // right of all that H has shown
    assert!(w.engine(|e, _| e.is_drained(GUEST)));
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::Operator));
    // R knows G's own window now, and from here on nothing is touched.
    let seen = r.gets_last_any();
    assert_eq!((seen.ack(), seen.window()), (7001, 8_388_480));
    r.sends("7001:8001 ack 1");
    g.gets("7001:8001 ack 1");
    r.gets_nothing();
}

#[test]
fn life_08_offload_off_and_on() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    w.engine(|e, now| e.set_offload(now, GUEST, false));
    let (r2, _g2) = w.connects();
    assert_eq!(w.flow(1, |f| f.state()), None);
    w.engine(|e, now| e.set_offload(now, GUEST, true));
    let (r3, _g3) = w.connects();
    assert_eq!(w.flow(2, |f| f.state()), Some(State::On));
    for r in [r2, r3, r] {
        r.takes_all();
    }
    g.takes_all();
}

/// A killed daemon's flows, and the acts of its successor.
fn killed(before: impl FnOnce(&World<'_>), after: impl FnOnce(&World<'_>, usize)) {
    let setup = Setup::new();
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    before(&setup.opens_in(memory.as_mut_bytes()));
    tear(&mut memory);
    let w = setup.reopens_in(memory.as_mut_bytes());
    let reset = w.engine(|e, now| e.handle_restart(now)).reset;
    after(&w, reset);
}

#[test]
fn life_09_a_promise_that_cannot_be_kept_is_broken_aloud() {
    killed(
        |w| {
            for bytes in [0, 1, 5000_i64] {
                let (r, g) = w.connects();
                g.stops(0);
                if bytes > 0 {
                    r.sends(&format!("1:{} gso 1000", 1 + bytes.max(1001)));
                }
                r.takes_all();
            }
        },
        |w, reset| {
            assert_eq!(reset, 2);
            let setup = Setup::new();
            let pairs: Vec<_> = (0..3).map(|_| w.pair(&setup)).collect();
            // They were made before the pairs of this world: look at what is queued now.
            w.engine(|_, _| ());
            let states: Vec<_> = (0..3).map(|n| w.flow(n, |f| f.state())).collect();
            assert_eq!(states, [None, Some(State::Abort), Some(State::Abort)]);
            for (n, (r, g)) in pairs.iter().enumerate().skip(1) {
                w.set_lenient(n, true);
                w.after_ms(5);
                r.sends("1001 ack 1");
                r.gets("R. 1");
                g.sends("1 ack 1");
                g.gets_last("R. 1");
            }
            // Pages and records are free again once R and G had their time.
            w.after_ms(70_000);
            let free = w.engine(|e, _| (e.arena().free_pages(), e.arena().free_records()));
            assert_eq!(free, (1024, 128));
        },
    );
}

#[test]
fn life_09_a_guest_that_comes_back_later_gets_its_reset_then() {
    let setup = Setup::new();
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    {
        let w = setup.opens_in(memory.as_mut_bytes());
        let (r, g) = w.connects();
        g.stops(1);
        r.sends("1:1001");
        g.gets("1:1001");
    }
    tear(&mut memory);
    let w = setup.reopens_in(memory.as_mut_bytes());
    w.set_features(GUEST, None);
    let (r, g) = w.pair(&setup);
    w.set_lenient(0, true);
    w.engine(|e, now| e.handle_restart(now));
    r.gets("R. 1 ack 1001");
    g.gets_nothing();
    w.after_ms(2000);
    w.set_features(GUEST, Some(setup.features));
    g.gets("R. 1001");
}

/// With timestamps where they were agreed on (RFC 7323 section 3.2).
#[test]
fn life_09_the_reset_of_a_successor_is_of_the_connections_family_and_has_its_options() {
    for n in 0..4 {
        let (v6, ts) = (n & 1 != 0, n & 2 != 0);
        let setup = Setup { v6, ts: [ts; 2], ..Setup::new() };
        let mut memory = vec![0_u64; setup.memory_len() / 8];
        {
            let w = setup.opens_in(memory.as_mut_bytes());
            let (r, g) = w.connects();
            g.stops(0);
            r.sends("1:1001");
        }
        tear(&mut memory);
        let w = setup.reopens_in(memory.as_mut_bytes());
        let (r, _) = w.pair(&setup);
        w.set_lenient(0, true);
        assert_eq!(w.engine(|engine, now| engine.handle_restart(now)).reset, 1);
        let reset = r.gets("R. 1 ack 1001");
        assert_eq!(reset.tcp().options.timestamps.is_some(), ts, "v6 {v6}");
    }
}

#[test]
fn life_09_the_arena_of_another_vm_is_not_mistaken() {
    let setup = Setup::new();
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    {
        let w = setup.opens_in(memory.as_mut_bytes());
        let (r, g) = w.connects();
        g.stops(0);
        r.sends("1:1001");
    }
    // The VM of that name does not exist any more.
    let arena = nightporter_core::store::arena::Arena::open(memory.as_mut_bytes());
    let config = nightporter_core::engine::EngineConfig::new(16, [7; 4]);
    let now = setup.start;
    let mut engine = nightporter_core::engine::Engine::new(now, config, arena.expect("an arena"));
    let uplink = PortConfig::uplink("uplink");
    engine.add_port(now, uplink).expect("an uplink");
    let guest = engine
        .add_port(now, PortConfig::guest("another", setup.guest_config(mac(1))))
        .expect("a guest");
    engine.set_port_features(now, guest, Some(setup.features));
    // Its remote is told, and nobody else.
    assert_eq!(engine.handle_restart(now).reset, 1);
    assert!(engine.poll_transmit(now).is_some());
    assert!(engine.poll_transmit(now).is_none());
    assert!(engine.poll_delivery(now, PortId(1), 65_562).is_none());
    assert_eq!(engine.arena().free_pages(), 1024);
}

/// Three flows of one VM owe bytes, and the arena says so; the caller restarts over it.
fn three_flows_owe_bytes(setup: &Setup) -> Vec<u64> {
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    let w = setup.opens_in(memory.as_mut_bytes());
    for _ in 0..3 {
        let (r, g) = w.connects();
        g.stops(0);
        r.sends("1:1001");
    }
    drop(w);
    tear(&mut memory);
    memory
}

/// Its flows are of another VM now, which does not exist.
fn forget_vm(memory: &mut [u64]) {
    let mut arena = Arena::open(memory.as_mut_bytes()).expect("an arena");
    let ids: Vec<_> = arena.records().collect();
    for (id, record) in ids {
        arena.free_record(id);
        let other = Record { name_hash: record.name_hash ^ 1, ..record };
        arena.alloc_record(&other).expect("room");
    }
}

#[test]
fn life_09_a_lower_flow_limit_after_the_restart_hides_no_broken_promise() {
    let setup = Setup::new();
    let mut memory = three_flows_owe_bytes(&setup);
    let lower = Setup { flows_max: 2, ..setup };
    let w = lower.reopens_in(memory.as_mut_bytes());
    let pairs: Vec<_> = (0..3).map(|_| w.pair(&lower)).collect();
    (0..3).for_each(|conn| w.set_lenient(conn, true));
    assert_eq!(w.engine(|e, now| e.handle_restart(now)).reset, 3);
    for (r, _) in &pairs {
        r.gets("R. 1 ack 1001");
    }
    w.after_ms(121_000);
    let free = w.engine(|e, _| (e.arena().free_pages(), e.arena().free_records()));
    assert_eq!(free, (1024, 128), "a record without an entry was kept");
}

#[test]
fn life_09_a_second_restart_tells_them_again_and_counts_them_no_more() {
    let setup = Setup::new();
    let mut memory = three_flows_owe_bytes(&setup);
    for counted in [3, 0] {
        let w = setup.reopens_in(memory.as_mut_bytes());
        let pairs: Vec<_> = (0..3).map(|_| w.pair(&setup)).collect();
        (0..3).for_each(|conn| w.set_lenient(conn, true));
        assert_eq!(w.engine(|e, now| e.handle_restart(now)).reset, counted);
        for (r, _) in &pairs {
            r.gets("R. 1 ack 1001");
        }
    }
}

/// A command had added the VM, so the next daemon does not know it.
#[test]
fn inv_21_remotes_of_a_vm_that_is_not_there_after_the_restart_are_told() {
    let setup = Setup::new();
    let mut memory = three_flows_owe_bytes(&setup);
    forget_vm(&mut memory);
    let w = setup.reopens_in(memory.as_mut_bytes());
    let pairs: Vec<_> = (0..3).map(|_| w.pair(&setup)).collect();
    assert_eq!(w.engine(|e, now| e.handle_restart(now)).reset, 3);
    for (r, _) in &pairs {
        r.gets("R. 1 ack 1001");
    }
    let free = w.engine(|e, _| (e.arena().free_pages(), e.arena().free_records()));
    assert_eq!(free, (1024, 128));
}

#[test]
fn life_09_two_records_of_one_flow_leave_none_behind() {
    let setup = Setup::new();
    let mut memory = three_flows_owe_bytes(&setup);
    {
        let mut arena = Arena::open(memory.as_mut_bytes()).expect("an arena");
        let (_, record) = arena.records().next().expect("a record");
        arena.alloc_record(&record).expect("room");
    }
    let w = setup.reopens_in(memory.as_mut_bytes());
    assert_eq!(w.engine(|e, now| e.handle_restart(now)).reset, 3);
    w.after_ms(121_000);
    assert_eq!(w.engine(|e, _| e.arena().free_records()), 128);
}

#[test]
fn life_11_the_host_was_suspended() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(100);
    sends_segments(&r, 1001, 5);
    r.takes_all();
    g.takes_all();
    // An hour is missing; the guest was as still as the host.
    let target = w.now() + Duration::from_secs(3600);
    w.0.borrow_mut().outside.now = target;
    w.until(target + Duration::from_millis(1));
    g.gets_nothing();
    assert_eq!(w.state(), Some(State::On));
    g.runs();
    w.after_ms(100);
    g.gets_nothing();
    g.sends("ack 6001");
    assert_eq!(flow(&w, |f| (f.state(), f.held_bytes())), (State::On, 0));
    let spec = Spec::parse("6001:7001");
    assert_eq!(r.sends_spec(&spec), Verdict::Absorbed);
}

#[test]
fn life_02_a_handshake_that_nobody_completes_has_its_time() {
    let setup = Setup::new();
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    r.sends_syn();
    g.sends_syn_ack();
    let flows = || w.engine(|engine, _| engine.flows().count());
    w.after_ms(limits::T_HANDSHAKE.as_millis() - 1000);
    assert_eq!(flows(), 1);
    w.after_ms(2000);
    assert_eq!(flows(), 0);
}
