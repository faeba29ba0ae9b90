//! ACC: the host answers the SYN. R's numbers of G are those of H's SYN-ACK, G's are its own.

use crate::GUEST;
use crate::common::world::{Peer, mac};
use crate::common::{Setup, World};
use etherparse::checksum::Sum16BitWords;
use nightporter_check::event::Event;
use nightporter_core::drops::DropReason;
use nightporter_core::engine::{Engine, Verdict};
use nightporter_core::port::PortId;
use nightporter_core::tcp::accept::AcceptConfig;
use nightporter_core::tcp::accept::learned::AcceptFrom;
use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use zerocopy::IntoBytes;

/// H may answer R for the guest's port 80, where G has just accepted a connection of R. The next
/// one is the second, of which nothing was sent.
fn answering(setup: &Setup) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let w = setup.opens();
    let (r, g) = answers_in(&w, setup);
    (w, r, g)
}

fn answers_in<'m>(w: &World<'m>, setup: &Setup) -> (Peer<'m>, Peer<'m>) {
    answers_from(w, setup, Instant::ZERO)
}

fn answers_from<'m>(w: &World<'m>, setup: &Setup, begins_at: Instant) -> (Peer<'m>, Peer<'m>) {
    w.0.borrow_mut().outside.host_answers = true;
    let port = w.guest_port();
    let config = AcceptConfig { ports: vec![80..=80], from: AcceptFrom::Itself, begins_at };
    w.engine(|engine, _| engine.set_accept_offload(port, Some((config, [1, 2, 3, 4, 5, 6]))));
    let (r, g) = w.connects();
    r.sends("1:101 ack 1");
    g.sends("1 ack 101");
    r.takes_all();
    g.takes_all();
    w.pair(setup)
}

/// The Internet checksum of these bytes, 0 if it is in them and right.
fn checksum(bytes: &[u8]) -> u16 {
    u16::from_be(Sum16BitWords::new().add_slice(bytes).ones_complement())
}

/// R's SYN is answered by H, and R completes the handshake. G has been told of nothing yet.
fn accepted(setup: &Setup) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = answering(setup);
    g.stops(0);
    r.sends_syn();
    r.gets_syn();
    r.sends("1 ack 1");
    r.gets_nothing();
    g.gets_nothing();
    assert_eq!(state(&w), Some(State::Opening));
    (w, r, g)
}

fn state(w: &World<'_>) -> Option<State> {
    w.flow(1, |flow| flow.state())
}

#[test]
fn acc_03_r_s_bytes_wait_for_g_s_own_handshake() {
    let (w, r, g) = accepted(&Setup::new());
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.runs();
    g.gets_syn();
    g.gets_nothing();
    g.sends_syn_ack();
    r.gets_nothing();
    g.gets("1:1001 ack 1");
    assert_eq!(state(&w), Some(State::On));
    g.sends("1:501 ack 1001");
    r.gets("1:501 ack 1001");
    r.sends("1001 ack 501");
    g.gets("1001 ack 501");
}

/// G accepts as the setup says, and gets R's first 1,000 bytes with H's third ACK.
fn opens(w: &World<'_>, r: &Peer<'_>, g: &Peer<'_>) {
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.runs();
    g.gets_syn();
    g.sends_syn_ack();
    r.gets_nothing();
    g.gets("1:1001 ack 1");
    assert_eq!(state(w), Some(State::On));
}

#[test]
fn acc_01_others_than_the_source_are_for_g() {
    let (w, r, g) = answering(&Setup::new());
    r.end(|r| r.ip.0[15] = 77);
    r.sends_syn();
    r.gets_nothing();
    g.gets_syn();
    assert_eq!(state(&w), None);
}

#[test]
fn acc_01_a_port_that_is_not_named_is_for_g() {
    let (w, r, g) = answering(&Setup::new());
    let begins_at = Instant::ZERO;
    let config = AcceptConfig { ports: vec![1..=79, 81..=90], from: AcceptFrom::Any, begins_at };
    let port = w.guest_port();
    w.engine(|engine, _| engine.set_accept_offload(port, Some((config, [1; 6]))));
    r.sends_syn();
    r.gets_nothing();
    g.gets_syn();
}

#[test]
fn acc_01_a_minute_later_nothing_is_known() {
    let (w, r, g) = answering(&Setup::new());
    w.after_ms(60_001);
    r.sends_syn();
    r.gets_nothing();
    g.gets_syn();
}

#[test]
fn acc_01_a_guest_that_has_shown_no_life_for_two_seconds_is_asked_itself() {
    let (w, r, g) = answering(&Setup::new());
    g.stops(4);
    let other = w.pair(&Setup::new()).0;
    other.end(|r| r.ip.0[15] = 77);
    other.sends_syn();
    w.after_ms(2001);
    r.sends_syn();
    r.gets_nothing();
    g.gets_syn();
}

/// A server that speaks first is heard as soon as G has accepted.
#[test]
fn acc_04_g_speaks_first() {
    let (_, r, g) = accepted(&Setup::new());
    g.runs();
    g.gets_syn();
    g.sends_syn_ack();
    r.gets_nothing();
    g.gets("1 ack 1");
    g.sends("1:101 ack 1");
    r.gets("1:101 ack 1");
    r.sends("1:51 ack 101");
    r.gets("101 ack 51");
    g.gets("1:51 ack 101");
}

#[test]
fn acc_04_both_send_at_once_and_lose_some() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1:1001 ack 1");
    g.sends("1001:2001 ack 1");
    r.gets("1:1001 ack 1001");
    r.gets("1001:2001 ack 1001");
    r.sends("2001:3001 ack 1 <sack 1001:2001>");
    g.takes_all();
    r.sends("1001 ack 1 <sack 1001:2001>");
    let seen = g.gets_last_any();
    assert_eq!(seen.ack(), 1, "{}", w.trace());
    g.sends("1:1001 ack 1001");
    r.takes_all();
    r.sends("1001:2001 ack 2001");
    g.sends("2001 ack 3001");
    r.takes_all();
    g.takes_all();
}

/// Nothing of R reaches G before G's handshake, whatever R sends.
#[test]
fn acc_03_before_g_has_accepted_it_gets_a_syn_and_nothing_else() {
    let (w, r, g) = accepted(&Setup::new());
    g.stops(64);
    for text in ["1:101 ack 1", "101 ack 1", "101:201 ack 1 urg 5", "100 ack 1", "101:102 ack 1"] {
        r.sends(text);
        w.after_ms(1);
    }
    let seen = g.takes_all();
    assert!(seen.iter().all(|seen| seen.tcp().flags.syn()), "{}", w.trace());
    assert_eq!(seen.len(), 1, "{}", w.trace());
}

/// Of R's bytes 64 KiB are taken before G has accepted.
#[test]
fn acc_10_a_client_gets_no_more_room_than_the_syn_ack_showed() {
    let (w, r, g) = accepted(&Setup::new());
    for n in 0..70 {
        r.sends(&format!("{}:{} ack 1", 1 + n * 1000, 1001 + n * 1000));
    }
    let last = r.gets_last_any();
    assert!(last.ack() <= 65_537 && last.window() < 1000, "{}", w.trace());
    g.runs();
    g.gets_syn();
    g.sends_syn_ack();
    let bytes: usize = g.takes_all().iter().map(|seen| seen.payload().len()).sum();
    assert!(bytes >= 63_000, "{bytes}\n{}", w.trace());
}

#[test]
fn acc_09_a_full_accept_queue_is_waited_for() {
    let (w, r, g) = accepted(&Setup::new());
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.runs();
    g.gets_syn();
    // G drops it. After 250 ms of its time it gets another, and after 500 ms more.
    w.after_ms(300);
    g.gets_syn();
    w.after_ms(600);
    g.gets_syn();
    g.gets_nothing();
    // Meanwhile nobody else is answered.
    let (other, _) = w.pair(&Setup::new());
    other.sends_syn();
    other.gets_nothing();
    g.sends_syn_ack();
    g.gets("1:1001 ack 1");
    g.sends("1 ack 1001");
    r.gets("1 ack 1001");
}

#[test]
fn acc_09_a_guest_that_never_answers_is_given_up() {
    let (w, r, g) = accepted(&Setup::new());
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.runs();
    w.after_ms(70_000);
    let last = r.gets_last_any();
    assert!(last.tcp().flags.rst() && last.range() == (1, 1), "{}", w.trace());
    let syns = g.takes_all();
    assert!(syns.iter().filter(|seen| seen.tcp().flags.syn()).count() >= 5, "{}", w.trace());
    assert!(syns.last().is_some_and(|seen| seen.tcp().flags.rst()));
    assert_eq!(state(&w), Some(State::Abort));
}

/// The one promise that is broken so, as when a server dies after `accept`.
#[test]
fn acc_11_g_refuses_and_r_is_reset() {
    let (w, r, g) = accepted(&Setup::new());
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.runs();
    g.gets_syn();
    g.sends("R. 0:0 ack 1");
    let rst = r.gets("R. 1:1 ack 1001");
    assert_eq!(rst.range(), (1, 1));
    g.gets_nothing();
    // Its neighbours are not answered for ten minutes.
    let (other, _) = w.pair(&Setup::new());
    other.sends_syn();
    other.gets_nothing();
}

#[test]
fn acc_11_r_resets_before_g_has_the_syn() {
    let (w, r, g) = accepted(&Setup::new());
    r.sends("R. 1:1 ack 1");
    assert_eq!(state(&w), Some(State::Abort));
    g.runs();
    g.gets_nothing();
    r.gets_nothing();
}

#[test]
fn acc_11_r_resets_before_g_has_answered() {
    let (w, r, g) = accepted(&Setup::new());
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.runs();
    g.gets_syn();
    r.sends("R. 1001:1001 ack 1");
    g.gets_nothing();
    g.sends_syn_ack();
    let rst = g.gets("R 1:1");
    assert!(!rst.tcp().flags.ack());
    r.gets_nothing();
    assert_eq!(state(&w), Some(State::Abort));
}

/// G has another connection of that name in TIME_WAIT.
#[test]
fn acc_11_an_ack_of_another_connection_is_reset_and_asked_again() {
    let (w, r, g) = accepted(&Setup::new());
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.runs();
    g.gets_syn();
    g.sends("77:77 ack 5001");
    r.gets_nothing();
    g.gets("R 5001:5001");
    g.gets_syn();
    g.sends_syn_ack();
    g.gets("1:1001 ack 1");
    assert_eq!(state(&w), Some(State::On));
}

#[test]
fn acc_11_copies_of_g_s_syn_ack_are_acknowledged_by_h() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends_syn_ack();
    r.gets_nothing();
    let ack = g.gets_last_any();
    assert!(ack.tcp().flags.ack() && ack.ack() == 1, "{}", w.trace());
}

#[test]
fn acc_11_a_syn_of_g_ends_a_half_open_connection() {
    let (_, r, g) = answering(&Setup::new());
    r.sends_syn();
    r.gets_syn();
    g.sends_syn();
    r.gets_syn();
}

#[test]
fn acc_13_a_copy_of_the_syn_gets_the_same_answer() {
    let (w, r, g) = answering(&Setup::new());
    r.sends_syn();
    let first = r.gets_syn();
    w.after_ms(10);
    r.sends_syn();
    let second = r.gets_syn();
    assert_eq!(first.bytes, second.bytes);
    g.gets_nothing();
    r.sends("1 ack 1");
    // After the third ACK it is another's, and gets a challenge.
    r.sends_syn();
    r.gets("1 ack 1");
}

#[test]
fn acc_15_h_repeats_its_syn_ack() {
    let (w, r, g) = answering(&Setup::new());
    r.sends_syn();
    let first = r.gets_syn();
    for ms in [1000, 2000, 4000, 8000] {
        w.after_ms(ms);
        assert_eq!(r.gets_syn().bytes, first.bytes);
        r.gets_nothing();
    }
    w.after_ms(16_000);
    r.gets_nothing();
    // Its entry is gone: what comes now is for G.
    r.sends("1 ack 1");
    g.gets("1:1");
}

/// An old duplicate of the third ACK: its acknowledgement is not H's number.
#[test]
fn acc_03_a_stranger_does_not_complete_a_handshake() {
    let (w, r, g) = answering(&Setup::new());
    r.sends_syn();
    r.gets_syn();
    r.is_forged("1 ack 2");
    assert_eq!(state(&w), None);
    g.takes_all();
    r.is_forged("70000 ack 1");
    assert_eq!(state(&w), None);
    r.sends("1 ack 1");
    assert_eq!(state(&w), Some(State::Opening));
}

/// Data overtakes the third ACK.
#[test]
fn acc_03_the_third_ack_is_lost() {
    let (w, r, g) = answering(&Setup::new());
    g.stops(0);
    r.sends_syn();
    r.gets_syn();
    r.sends("1001:2001 ack 1");
    r.gets("1 ack 1 <sack 1001:2001>");
    r.sends("1:1001 ack 1");
    r.gets("1 ack 2001");
    g.runs();
    g.gets_syn();
    g.sends_syn_ack();
    let bytes: usize = g.takes_all().iter().map(|seen| seen.payload().len()).sum();
    assert_eq!(bytes, 2000, "{}", w.trace());
}

/// Each side closes, and frames that are left are still translated.
#[test]
fn acc_07_both_close() {
    for guest_first in [false, true] {
        let (w, r, g) = accepted(&Setup::new());
        opens(&w, &r, &g);
        g.sends("1 ack 1001");
        r.takes_all();
        if guest_first {
            g.sends("F. 1:1 ack 1001");
            r.gets("F. 1:1 ack 1001");
            r.sends("1001 ack 2");
            g.gets("1001 ack 2");
            r.sends("F. 1001:1001 ack 2");
            g.gets("F. 1001:1001 ack 2");
            g.sends("2:2 ack 1002");
            r.gets("2:2 ack 1002");
        } else {
            r.sends("F. 1001:1001 ack 1");
            g.gets("F. 1001:1001 ack 1");
            g.sends("1 ack 1002");
            r.gets("1 ack 1002");
            g.sends("F. 1:1 ack 1002");
            r.gets("F. 1:1 ack 1002");
            r.sends("1002:1002 ack 2");
            g.gets("1002:1002 ack 2");
        }
        assert_eq!(state(&w), Some(State::Translated), "{}", w.trace());
        g.sends("F. 1:1 ack 1002");
        r.gets("F. 1:1 ack 1002");
        r.sends("1002:1002 ack 2");
        g.gets("1002:1002 ack 2");
        w.after_ms(62_000);
        assert_eq!(state(&w), None);
        let port = w.guest_port();
        w.engine(|engine, _| assert_eq!(engine.vm(port).map(|vm| vm.translated_flows), Some(0)));
    }
}

#[test]
fn acc_04_resets_both_ways() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1:101 ack 1001");
    r.gets("1:101 ack 1001");
    g.sends("R. 101:101 ack 1001");
    r.gets("R. 101:101 ack 1001");
    assert_eq!(state(&w), Some(State::Abort));

    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1:101 ack 1001");
    r.takes_all();
    r.sends("R. 1001:1001 ack 101");
    g.gets("R 1001:1001");
    assert_eq!(state(&w), Some(State::Abort));
}

/// The ports are used again, after both ends have closed.
#[test]
fn acc_11_ports_are_used_again() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1 ack 1001");
    r.sends("F. 1001:1001 ack 1");
    g.takes_all();
    g.sends("F. 1:1 ack 1002");
    r.takes_all();
    r.sends("1002:1002 ack 2");
    g.takes_all();
    assert_eq!(state(&w), Some(State::Translated));
    for peer in [&r, &g] {
        peer.end(|end| {
            (end.isn, end.shown) = (end.isn.wrapping_add(1 << 20), None);
            (end.next, end.acked) = (0, 0);
        });
    }
    w.after_ms(100);
    w.handshake(&r, &g);
    assert_eq!(state(&w), Some(State::On));
    r.sends("1:101 ack 1");
    r.gets("1 ack 101");
    g.gets("1:101 ack 1");
}

#[test]
fn acc_05_g_answers_with_less() {
    // G's own: scale, SACK.
    for (scale, sack) in [(Some(7), false), (None, true), (Some(3), true), (Some(9), true)] {
        let (w, r, g) = accepted(&Setup::new());
        r.sends("1:1001 ack 1");
        r.gets("1 ack 1001");
        g.runs();
        g.gets_syn();
        let own = Setup { scale: [Some(7), scale], sack: [true, sack], ..Setup::new() };
        g.end(|end| end.shift = scale.unwrap_or(0));
        if scale.is_none() {
            g.end(|end| end.window = 64_000);
        }
        g.sends_syn_spec("S. ack 1", &own);
        g.gets_last_any();
        assert_eq!(state(&w), Some(State::On), "{}", w.trace());
        g.sends("1:1001 ack 1001 win 32768");
        r.gets("1:1001 ack 1001");
        g.sends("1001:2001 ack 1001 win 32768");
        r.gets("1001:2001 ack 1001");
        r.sends("1001 ack 1 <sack 1001:2001>");
        let seen = g.gets_last_any();
        assert_eq!(seen.sack().is_empty(), !sack, "{}", w.trace());
        r.sends("1001:2001 ack 2001");
        r.gets_last("2001 ack 2001");
        g.gets_last_any();
    }
}

#[test]
fn acc_05_without_timestamps_both_are_reset() {
    let (w, r, g) = accepted(&Setup::new());
    g.runs();
    g.gets_syn();
    g.sends_syn_spec("S. ack 1", &Setup { ts: [true, false], ..Setup::new() });
    g.gets("R 1:1");
    r.gets_last("R. 1:1 ack 1");
    assert_eq!(state(&w), Some(State::Abort));
}

/// A connection that would leave the path stays, and acknowledges late.
#[test]
fn acc_07_it_never_passes() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1 ack 1001");
    r.takes_all();
    let port = w.guest_port();
    w.engine(|engine, now| engine.drain(now, port));
    assert_eq!(state(&w), Some(State::Drain));
    assert!(w.engine(|engine, _| engine.is_drained(port)), "nobody waits for it");
    w.after_ms(5000);
    assert_eq!(state(&w), Some(State::Drain));
    r.sends("1001:2001 ack 1");
    r.gets_nothing();
    g.gets("1001:2001 ack 1");
    g.sends("1:101 ack 2001");
    r.gets("1:101 ack 2001");
    r.sends("2001 ack 101");
    g.gets("2001 ack 101");
    w.engine(|engine, now| engine.set_offload(now, port, true));
    assert_eq!(state(&w), Some(State::On));
}

/// Idle, it gives the place of its bytes back and keeps its record; then it goes on.
#[test]
fn acc_07_it_parks_with_its_record() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1 ack 1001");
    w.after_ms(3000);
    let parked = |w: &World<'_>| w.flow(1, |f| (f.is_parked(), f.record().is_some())).unwrap();
    assert_eq!(parked(&w), (true, true), "{}", w.trace());
    r.sends("1001:2001 ack 1");
    r.gets_last("1 ack 2001");
    g.gets("1001:2001 ack 1");
    assert_eq!(parked(&w), (false, true));
}

#[test]
fn acc_08_idle_for_two_hours_both_ends_are_asked() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1 ack 1001");
    r.takes_all();
    w.after_ms(7_203_000);
    g.gets_last("1000:1000 ack 1");
    r.gets_last("0:0 ack 1001");
    g.sends("1 ack 1001");
    r.sends("1001 ack 1");
    g.takes_all();
    r.takes_all();
    w.after_ms(600_000);
    r.gets_nothing();
    g.gets_nothing();
    assert_eq!(state(&w), Some(State::On));
    // Then nobody answers any more.
    w.after_ms(7_200_000 + 800_000);
    r.gets_last("R. 1:1 ack 1001");
    g.gets_last("R 1001:1001");
}

/// A connection from its SYN to its end, with a guest that is off its core at first.
fn lives(setup: &Setup) {
    let (w, r, g) = accepted(setup);
    opens(&w, &r, &g);
    g.sends("1:1001 ack 1001");
    r.gets("1:1001 ack 1001");
    r.sends("1001 ack 1001");
    g.gets_last_any();
    g.stops(0);
    for n in 1..20 {
        r.sends(&format!("{}:{} ack 1001", 1 + n * 1000, 1001 + n * 1000));
    }
    r.gets_last("1001 ack 20001");
    g.runs();
    g.takes_all();
    g.sends("F. 1001:1001 ack 20001");
    r.gets_last("F. 1001:1001 ack 20001");
    r.sends("F. 20001:20001 ack 1002");
    g.gets_last("F. 20001:20001 ack 1002");
    g.sends("1002:1002 ack 20002");
    r.gets_last("1002:1002 ack 20002");
    assert_eq!(state(&w), Some(State::Translated), "{}", w.trace());
}

#[test]
fn acc_04_of_all_kinds() {
    let new = Setup::new;
    lives(&new());
    lives(&Setup { v6: true, ..new() });
    lives(&Setup { vlan: vec![[0x81, 0, 0, 7]], ..new() });
    lives(&Setup { ts: [false; 2], ..new() });
    lives(&Setup { ts: [true, false], ..new() });
    lives(&Setup { sack: [false, true], ..new() });
    lives(&Setup { scale: [Some(0), Some(14)], window: [64_000, 49_152], ..new() });
    lives(&Setup { scale: [None, Some(7)], ..new() });
    lives(&Setup { ecn: true, ..new() });
    lives(&Setup { isn: [0xffff_fffe, 0xffff_fff0], clock: [0xffff_fff0, 0xffff_fffe], ..new() });
    lives(&Setup { features: nightporter_core::port::PortFeatures::default(), ..new() });
}

#[test]
fn acc_04_from_one_vm_to_another() {
    let (w, r, g) = accepted(&Setup { remote_is_vm: true, ..Setup::new() });
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.runs();
    g.gets_syn();
    g.sends_syn_ack();
    g.gets("1:1001 ack 1");
    g.sends("1:1001 ack 1001");
    r.gets_last("1:1001 ack 1001");
    r.sends("1001:2001 ack 1001");
    g.gets_last("1001:2001 ack 1001");
    assert_eq!(state(&w), Some(State::On));
}

/// H sends for G on a connection that it has accepted for it.
#[test]
fn acc_04_with_congestion_offload() {
    let (w, r, g) = accepted(&Setup { floods: true, ..Setup::new() });
    opens(&w, &r, &g);
    for n in 0..20 {
        g.sends(&format!("{}:{} ack 1001", 1 + n * 1000, 1001 + n * 1000));
    }
    r.takes_all();
    assert!(w.flow(1, |f| f.departing().is_some()).unwrap(), "{}", w.trace());
    r.sends("1001 ack 5001 <sack 7001:9001>");
    let ack = g.gets_last_any();
    assert!(ack.ack() >= 5001, "{}", w.trace());
    r.takes_all();
    for at in [9001, 15_001, 20_001] {
        w.after_ms(20);
        r.sends(&format!("1001 ack {at}"));
        r.takes_all();
    }
    assert_eq!(g.gets_last_any().ack(), 20_001, "{}", w.trace());
}

#[test]
fn acc_04_an_icmp_error_quotes_g_s_own_number() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1:1001 ack 1001");
    let left = r.gets("1:1001 ack 1001");
    let error = unreachable(3, &left.bytes, [10, 0, 0, 9], [10, 0, 0, 1]);
    w.frame(PortId(0), VirtioNetHdr::default(), &error);
    let (_, at_guest) = w.0.borrow_mut().outside.strays.pop().expect("it is forwarded");
    let own = g.end(|end| end.isn).wrapping_add(1);
    assert_eq!(at_guest[14 + 20 + 8 + 20 + 4..][..4], own.to_be_bytes(), "{}", w.trace());
    let sum = checksum(&at_guest[14 + 20..]);
    assert_eq!(sum, 0, "its checksum");
}

/// An ICMP error with this code about the segment in this frame.
fn unreachable(code: u8, frame: &[u8], from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    let mut icmp = vec![3, code, 0, 0, 0, 0, 2, 88]; // the MTU, where one is too long: 600
    icmp.extend(&frame[14..14 + 28]);
    let sum = checksum(&icmp).to_be_bytes();
    icmp[2..4].copy_from_slice(&sum);
    let mut header = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0];
    header.extend(from);
    header.extend(to);
    header[3] = u8::try_from(header.len() + icmp.len()).expect("short");
    let sum = checksum(&header).to_be_bytes();
    header[10..12].copy_from_slice(&sum);
    let (dst, src) = if to == [10, 0, 0, 1] { (mac(1), mac(9)) } else { (mac(2), mac(1)) };
    [&dst[..], &src[..], &[8, 0][..], &header, &icmp].concat()
}

/// G's filter answers H's SYN by an ICMP error, of which R hears nothing but its RST.
#[test]
fn acc_01b_an_icmp_error_of_g_is_a_refusal() {
    for code in [3, 4] {
        let (w, r, g) = accepted(&Setup::new());
        r.sends("1:1001 ack 1");
        r.gets("1 ack 1001");
        g.runs();
        let syn = g.gets_syn();
        w.set_lenient(1, true);
        let error = unreachable(code, &syn.bytes, [10, 0, 0, 1], [10, 0, 0, 2]);
        let verdict = w.frame(GUEST, VirtioNetHdr::default(), &error);
        assert_eq!(verdict, Verdict::Absorbed, "{code}");
        r.gets_last("R. 1:1 ack 1001");
        assert_eq!(state(&w), Some(State::Abort));
    }
}

/// After a kill nobody can translate, so both sides are reset, also of a flow that owes nothing.
#[test]
fn acc_07_after_a_kill_both_sides_are_reset() {
    for (opened, parked) in [(false, false), (true, false), (true, true)] {
        let setup = Setup::new();
        let mut memory = vec![0_u64; setup.memory_len() / 8];
        {
            let w = setup.opens_in(memory.as_mut_bytes());
            let (r, g) = answers_in(&w, &setup);
            g.stops(0);
            r.sends_syn();
            r.gets_syn();
            r.sends("1:1001 ack 1");
            r.gets("1 ack 1001");
            if opened {
                g.runs();
                g.gets_syn();
                g.sends_syn_ack();
                g.gets_last("1:1001 ack 1");
                g.sends("1:501 ack 1001");
                r.takes_all();
                r.sends("1001 ack 501");
            }
            if parked {
                w.after_ms(3000);
                assert!(w.flow(1, |f| f.is_parked()).unwrap());
            }
        }
        let w = setup.reopens_in(memory.leak().as_mut_bytes());
        w.set_features(GUEST, None);
        w.pair(&setup);
        let (r, g) = w.pair(&setup);
        w.set_lenient(0, true);
        w.set_lenient(1, true);
        let restarted = w.engine(|e, now| e.handle_restart(now));
        assert!(restarted.reset >= 1, "{restarted:?}");
        let rst = r.gets_last_any();
        assert!(rst.tcp().flags.rst() && rst.tcp().flags.ack(), "{}", w.trace());
        w.set_features(GUEST, Some(setup.features));
        let rst = g.gets_last_any();
        assert!(rst.tcp().flags.rst() && !rst.tcp().flags.ack(), "{}", w.trace());
        assert_eq!(rst.range().0, if opened { 1001 } else { 1 }, "{}", w.trace());
    }
}

/// The image has all of it, before and after G has accepted.
#[test]
fn acc_07_it_goes_on_in_another_engine() {
    for opened in [false, true] {
        let (w, r, g) = accepted(&Setup::new());
        if opened {
            opens(&w, &r, &g);
            g.sends("1 ack 1001");
            g.stops(0);
            r.takes_all();
            r.sends("1001:2001 ack 1");
            r.gets_last("1 ack 2001");
        } else {
            r.sends("1:2001 ack 1");
            r.gets("1 ack 2001");
        }
        let counts = w.engine(|e, now| {
            let image = e.export(now, GUEST).expect("an image");
            e.forget(GUEST);
            let count = |e: &Engine<'_>| e.vm(GUEST).map_or(0, |vm| vm.translated_flows);
            let before = count(e);
            assert_eq!(e.import(now, GUEST, &image).expect("it is one").reset, 0);
            (before, count(e))
        });
        assert_eq!(counts, (0, 1));
        g.runs();
        if !opened {
            g.gets_syn();
            g.sends_syn_ack();
        }
        let bytes: usize = g.takes_all().iter().map(|seen| seen.payload().len()).sum();
        assert_eq!(bytes, if opened { 1000 } else { 2000 }, "{}", w.trace());
        g.sends("1:501 ack 2001");
        r.gets_last("1:501 ack 2001");
        assert_eq!(state(&w), Some(State::On));
    }
}

/// In every rule about coming and going such a flow counts as one that owes.
#[test]
fn acc_07_a_guest_that_goes_takes_none_of_them_along() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1 ack 1001");
    r.takes_all();
    w.engine(|e, now| e.set_migrating(now, GUEST, true));
    w.happens(Event::Migrated(0));
    w.engine(|e, now| e.handle_guest_leaves(now, GUEST));
    r.gets_last("R. 1:1 ack 1001");
    assert_eq!(state(&w), Some(State::Abort));
}

/// A new ring gets the SYN again, or what G has yet to acknowledge.
#[test]
fn acc_09_a_driver_that_begins_anew() {
    let (w, r, g) = accepted(&Setup::new());
    r.sends("1:1001 ack 1");
    r.gets("1 ack 1001");
    g.runs();
    g.gets_syn();
    let begins_anew = |w: &World<'_>| {
        w.happens(Event::DriverReset(0));
        w.set_features(GUEST, None);
        w.set_features(GUEST, Some(Setup::new().features));
        w.happens(Event::DriverBack(0));
    };
    begins_anew(&w);
    g.gets_syn();
    g.sends_syn_ack();
    g.gets("1:1001 ack 1");
    begins_anew(&w);
    g.gets_last("1:1001 ack 1");
    g.sends("1 ack 1001");
    r.gets_last("1 ack 1001");
    // Earlier connections say nothing any more.
    let (other, _) = w.pair(&Setup::new());
    other.sends_syn();
    other.gets_nothing();
}

/// ACC-08: half of a VM's entries at most, and an eighth of its budget for those that wait.
#[test]
fn acc_08_half_of_the_entries_and_an_eighth_of_the_budget() {
    for (flows_max, budget_bytes, most) in [(64, 8 << 20, 15), (16, 8 << 20, 8), (64, 1 << 20, 2)] {
        let (w, r, g) = answering(&Setup { flows_max, budget_bytes, ..Setup::new() });
        g.stops(0);
        drop(r);
        let mut accepted = 0;
        for n in 0..20 {
            let (r, _) = w.pair(&Setup { isn: [77 * n, 5], ..Setup::new() });
            r.sends_syn();
            if let Some(syn_ack) = r.takes_all().pop() {
                assert!(syn_ack.tcp().flags.syn());
                r.sends("1 ack 1");
                accepted += 1;
            }
        }
        let limit = if flows_max == 64 && budget_bytes == 8 << 20 { 16 } else { most };
        assert_eq!(accepted, limit, "of {flows_max}, {budget_bytes}");
    }
}

/// A SYN without options says nothing of the server, nor does G's answer to it.
#[test]
fn acc_02_a_client_without_options_takes_none_from_others() {
    let (w, _, _) = answering(&Setup::new());
    w.after_ms(60_001);
    let none = Setup { ts: [false; 2], sack: [false; 2], scale: [None; 2], ..Setup::new() };
    let (plain, g) = w.pair(&none);
    w.handshake(&plain, &g);
    plain.sends("1:101 ack 1");
    g.sends("1 ack 101");
    let (r, _) = w.pair(&Setup::new());
    r.sends_syn();
    let options = r.gets_syn().tcp().options;
    assert!(options.timestamps.is_some() && options.sack_permitted, "{options:?}");
    assert!(options.window_scale.is_some(), "{options:?}");
}

/// G's answer to R's next connection is R's, also if H does not follow that one.
#[test]
fn acc_11_ports_are_used_again_without_the_offload() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1 ack 1001");
    r.sends("F. 1001:1001 ack 1");
    g.takes_all();
    g.sends("F. 1:1 ack 1002");
    r.takes_all();
    r.sends("1002:1002 ack 2");
    g.takes_all();
    assert_eq!(state(&w), Some(State::Translated));
    let port = w.guest_port();
    w.engine(|e, now| e.set_offload(now, port, false));
    for peer in [&r, &g] {
        peer.end(|end| {
            (end.isn, end.shown) = (end.isn.wrapping_add(1 << 20), None);
            (end.next, end.acked) = (0, 0);
        });
    }
    w.handshake(&r, &g);
}

/// After a ring reset each of them is asked: the guest may have booted, and R be silent.
#[test]
fn acc_08_after_a_ring_reset_both_ends_are_asked() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1 ack 1001");
    r.takes_all();
    w.happens(Event::DriverReset(0));
    w.set_features(GUEST, None);
    w.set_features(GUEST, Some(Setup::new().features));
    w.happens(Event::DriverBack(0));
    w.after_ms(80_000);
    g.gets_last("1000:1000 ack 1");
    r.gets_last("0:0 ack 1001");
}

/// For a VM that drains nothing more is promised (LIFE-08).
#[test]
fn acc_03_a_third_ack_in_a_drain_is_for_g() {
    let (w, r, g) = answering(&Setup::new());
    r.sends_syn();
    r.gets_syn();
    let port = w.guest_port();
    w.engine(|e, now| e.drain(now, port));
    r.sends("1 ack 1");
    g.gets("1:1");
    assert_eq!(state(&w), None);
}

/// Nobody speaks in the name of a guest that has moved, or stands (LIFE-07, LIFE-16).
#[test]
fn acc_15_an_answer_is_not_repeated_for_a_guest_that_may_be_elsewhere() {
    let migrates = |w: &World<'_>| w.engine(|e, now| e.set_migrating(now, GUEST, true));
    let leaves = |w: &World<'_>| {
        w.engine(|e, now| e.set_migrating(now, GUEST, true));
        w.happens(Event::Migrated(0));
        w.engine(|e, now| e.handle_guest_leaves(now, GUEST));
    };
    let has_no_driver = |w: &World<'_>| w.set_features(GUEST, None);
    for happens in [&migrates as &dyn Fn(&World<'_>), &leaves, &has_no_driver] {
        let (w, r, _) = answering(&Setup::new());
        r.sends_syn();
        r.gets_syn();
        happens(&w);
        w.after_ms(31_000);
        r.gets_nothing();
    }
}

/// The answer is repeated four times, whatever R sends meanwhile.
#[test]
fn acc_15_r_completes_a_handshake_for_which_there_is_no_place() {
    let (w, r, g) = answering(&Setup::new());
    r.sends_syn();
    r.gets_syn();
    let port = w.guest_port();
    w.engine(|e, now| e.set_offload(now, port, false));
    let mut repeated = 0;
    for _ in 0..30 {
        r.sends("1 ack 1");
        w.after_ms(1000);
        repeated += r.takes_all().len();
    }
    assert_eq!(repeated, 4, "{}", w.trace());
    g.gets_nothing();
    w.after_ms(2000);
    r.sends("1 ack 1");
    g.gets("1:1");
}

#[test]
fn acc_10_a_syn_is_answered_only_if_there_is_a_place_for_its_connection() {
    for (budget_bytes, most) in [(8 << 20, 16), (1 << 20, 2)] {
        let (w, _, g) = answering(&Setup { flows_max: 64, budget_bytes, ..Setup::new() });
        g.stops(0);
        let pair = |n: u32| w.pair(&Setup { isn: [77 * n, 5], ..Setup::new() }).0;
        let remotes: Vec<Peer<'_>> = (0..20).map(pair).collect();
        remotes.iter().for_each(Peer::sends_syn);
        let answered: Vec<_> = remotes.iter().filter(|r| !r.takes_all().is_empty()).collect();
        assert_eq!(answered.len(), most, "of {budget_bytes}");
        for r in answered {
            r.sends("1:101 ack 1");
            r.gets("1 ack 101");
        }
    }
}

/// G has the first copy of a SYN, also if many came since, or the daemon has begun anew.
#[test]
fn acc_13_a_copy_of_a_syn_that_g_has_is_for_g() {
    let w = Setup::new().opens();
    let begins_at = w.now() + Duration::from_millis(500);
    let (r, g) = answers_from(&w, &Setup::new(), begins_at);
    r.sends_syn();
    r.gets_nothing();
    g.gets_syn();
    for n in 0..100 {
        let (other, _) = w.pair(&Setup { isn: [77 * n, 5], ..Setup::new() });
        other.sends_syn();
        other.gets_nothing();
    }
    w.after_ms(1000);
    r.sends_syn();
    r.gets_nothing();
    g.gets_syn();
    let (new, _) = w.pair(&Setup::new());
    new.sends_syn();
    new.gets_syn();
}

/// Both have closed, but G has yet to see R's last ACK.
fn closed(w: &World<'_>, r: &Peer<'_>, g: &Peer<'_>) {
    opens(w, r, g);
    g.sends("1 ack 1001");
    r.sends("F. 1001:1001 ack 1");
    g.takes_all();
    g.sends("F. 1:1 ack 1002");
    r.takes_all();
    g.stops(4);
    r.sends("1002:1002 ack 2");
    assert_eq!(state(w), Some(State::Translated), "{}", w.trace());
}

/// Its FIN, or more, may come again when it is back.
#[test]
fn acc_07_a_closed_one_is_translated_until_g_has_seen_its_end() {
    let (w, r, g) = accepted(&Setup::new());
    closed(&w, &r, &g);
    w.after_ms(600_000);
    assert_eq!(state(&w), Some(State::Translated));
    g.runs();
    g.takes_all();
    g.sends("F. 1:1 ack 1002");
    r.gets("F. 1:1 ack 1002");
    r.sends("1002:1002 ack 2");
    g.gets("1002:1002 ack 2");
    w.after_ms(62_000);
    assert_eq!(state(&w), None);
}

#[test]
fn acc_07_a_guest_that_goes_ends_the_closed_ones_too() {
    let (w, r, g) = accepted(&Setup::new());
    closed(&w, &r, &g);
    w.engine(|e, now| e.set_migrating(now, GUEST, true));
    w.happens(Event::Migrated(0));
    w.engine(|e, now| e.handle_guest_leaves(now, GUEST));
    r.gets_last("R. 2:2 ack 1002");
    assert_eq!(state(&w), Some(State::Abort));
}

/// Nobody would see that it was broken before its numbers were edited.
#[test]
fn acc_04_a_broken_segment_of_a_closed_one_is_dropped() {
    let (w, r, g) = accepted(&Setup::new());
    closed(&w, &r, &g);
    let mut frame = r.frame_of("1002:1002 ack 2");
    let last = frame.len() - 1;
    frame[last] ^= 1;
    let verdict = w.frame(PortId(0), VirtioNetHdr::default(), &frame);
    assert_eq!(verdict, Verdict::Drop(DropReason::BadChecksum));
}

/// A guest that is not asked, because it is paused, is not silent.
#[test]
fn acc_08_silences_count_only_while_g_runs() {
    let (w, r, g) = accepted(&Setup::new());
    opens(&w, &r, &g);
    g.sends("1 ack 1001");
    r.takes_all();
    g.stops(4);
    w.after_ms(7_200_000 + 3_000_000);
    assert_eq!(state(&w), Some(State::On));
    r.takes_all();
    r.sends("1001 ack 1");
    g.runs();
    g.takes_all();
    g.sends("1 ack 1001");
    w.after_ms(600_000);
    assert_eq!(state(&w), Some(State::On));
}
