//! FLOOD-28: a guest that may flood a connection for which H does not send is told to stop.

use crate::GUEST;
use crate::common::segment::fix_tcp_checksum;
use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::flood::floods;
use nightporter_core::engine::Verdict;
use nightporter_core::limits;
use nightporter_core::port::PortId;
use nightporter_core::tcp::flow::State;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

/// The heartbeat says go.
fn may_flood(w: &World<'_>) -> bool {
    w.engine(|engine, now| engine.controls_congestion(now, GUEST))
}

/// R's SYN and G's SYN-ACK pass.
fn shakes_half(r: &Peer<'_>, g: &Peer<'_>) {
    r.sends_syn();
    g.gets_syn();
    g.sends_syn_ack();
    r.gets_syn();
}

/// R's third ACK and its first data are lost, so H does not understand the handshake.
fn shakes_without_a_third_ack(w: &World<'_>, r: &Peer<'_>, g: &Peer<'_>) {
    shakes_half(r, g);
    r.sends("1001:2001 ack 1");
    assert_eq!(w.state(), Some(State::Pass));
}

/// G sends on a connection that H does not know: that stops it for 10 s, and only once.
fn is_stopped_once(w: &World<'_>, g: &Peer<'_>, conn: usize, from: i64) {
    w.set_lenient(conn, true);
    assert!(may_flood(w), "nothing was sent yet");
    assert_ne!(g.sends(&format!("{from}:{} ack 1", from + 1000)), Verdict::Absorbed);
    assert!(!may_flood(w), "it may go on with a thousand segments");
    w.after_ms(10_100);
    assert!(may_flood(w));
    g.sends(&format!("{}:{} ack 1", from + 1000, from + 2000));
    assert!(may_flood(w), "connections of another epoch do not flood");
}

#[test]
fn flood_28_a_guest_is_told_of_a_connection_that_was_idle_for_an_hour() {
    let (w, r, g) = floods(&Setup::new());
    g.sends("1:1001");
    r.gets("1:1001");
    r.sends("ack 1001");
    w.after_ms(limits::T_IDLE.as_millis() + 20_000);
    assert_eq!(w.state(), None, "forgotten");
    is_stopped_once(&w, &g, 0, 1001);
}

#[test]
fn flood_28_a_guest_is_told_of_a_connection_that_made_room_for_another() {
    let setup = Setup { floods: true, flows_max: 2, ..Setup::new() };
    let w = setup.opens();
    let (_, first) = w.connects();
    w.after_ms(5000); // it is parked by now
    (0..10).for_each(|_| drop(w.connects()));
    assert_eq!(w.flow(0, |f| f.state()), None, "forgotten");
    is_stopped_once(&w, &first, 0, 1);
}

#[test]
fn flood_28_a_guest_is_told_of_a_handshake_that_made_room_for_others() {
    let setup = Setup { floods: true, flows_max: 16, ..Setup::new() };
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    shakes_half(&r, &g);
    for _ in 0..2 {
        let (r, g) = w.pair(&setup);
        shakes_half(&r, &g);
    }
    assert_eq!(w.flow(0, |f| f.state()), None, "forgotten");
    w.set_lenient(0, true);
    r.sends("1 ack 1");
    is_stopped_once(&w, &g, 0, 1);
}

#[test]
fn flood_28_a_guest_is_told_of_a_connection_whose_syn_nobody_remembers() {
    let setup = Setup { floods: true, ..Setup::new() };
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    w.set_lenient(0, true);
    g.sends_syn_ack();
    r.gets_syn();
    r.sends("1 ack 1");
    assert_eq!(w.state(), None);
    is_stopped_once(&w, &g, 0, 1);
}

#[test]
fn flood_28_a_guest_is_told_of_a_handshake_that_h_does_not_understand() {
    let setup = Setup { floods: true, ..Setup::new() };
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    shakes_without_a_third_ack(&w, &r, &g);
    is_stopped_once(&w, &g, 0, 1);
}

/// The entry of that connection goes before G has sent anything.
#[test]
fn flood_28_a_guest_is_told_of_such_a_handshake_when_its_entry_has_gone() {
    let setup = Setup { floods: true, ..Setup::new() };
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    shakes_without_a_third_ack(&w, &r, &g);
    w.after_ms(limits::T_IDLE.as_millis() + 20_000);
    assert_eq!(w.state(), None, "forgotten");
    is_stopped_once(&w, &g, 0, 1);
}

/// G's third ACK is lost, and its first data comes with a FIN.
#[test]
fn flood_28_a_guest_is_told_of_data_that_h_takes_for_no_third_ack() {
    let setup = Setup { floods: true, guest_is_client: true, ..Setup::new() };
    let w = setup.opens();
    let (r, g) = w.pair(&setup);
    g.sends_syn();
    r.gets_syn();
    r.sends_syn_ack();
    g.gets_syn();
    g.sends("F. 1:1001 ack 1");
    assert_eq!((w.state(), may_flood(&w)), (Some(State::Pass), false));
}

/// The first segment of a flood was lost within the guest: H does not take over behind the hole.
#[test]
fn flood_28_a_guest_is_told_of_data_that_begins_with_a_hole() {
    let (w, r, g) = floods(&Setup::new());
    assert_ne!(g.sends("1001:2001"), Verdict::Absorbed);
    assert!(!may_flood(&w));
    r.gets("1001:2001");
    w.after_ms(10_100);
    assert!(may_flood(&w));
    g.sends("2001:3001");
    assert!(may_flood(&w), "some of it was under way");
}

/// Otherwise two packets in ten seconds, in anybody's name, would keep a guest from flooding.
#[test]
fn flood_28_a_remote_alone_does_not_stop_a_guest() {
    let (w, r, g) = floods(&Setup::new());
    let setup = Setup { floods: true, ..Setup::new() };
    let (other, guest) = w.pair(&setup);
    shakes_half(&other, &guest);
    other.sends("5001:6001 ack 1");
    assert_eq!(w.flow(1, |f| f.state()), Some(State::Pass), "what R sent means nothing");
    assert!(may_flood(&w));
    // G goes on with a connection that H knows, and with one that is older than H.
    assert_eq!(g.sends("1:1001"), Verdict::Absorbed);
    r.gets("1:1001");
    let mut older = g.frame_of("1:1001");
    older[14 + 20 + 1] ^= 1; // from another port
    fix_tcp_checksum(&mut older);
    let forwarded = w.frame(GUEST, VirtioNetHdr::default(), &older);
    assert_eq!(forwarded, Verdict::Forward(PortId(0)));
    assert!(may_flood(&w));
}
