//! LIFE-06: a VM migrates, and its flows are handed over to nobody.

use crate::common::Setup;
use crate::common::world::HOST_MAC;
use crate::flood::floods;
use crate::{GUEST, flow, warms_up};
use nightporter_check::event::Event;
use nightporter_core::tcp::flow::{State, Why};

#[test]
fn life_06_while_a_vm_may_migrate_its_flows_acknowledge_late() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    w.engine(|e, _| e.set_congestion_offload(GUEST, true));
    w.engine(|e, now| e.set_migrating(now, GUEST, true));
    assert!(!w.engine(|e, _| e.vm(GUEST).unwrap().congestion_offload));
    r.sends("1001:2001");
    r.gets_nothing();
    g.gets("1001:2001");
    g.sends("1 ack 2001");
    r.gets_last("1 ack 2001");
    // It was called off.
    w.engine(|e, now| e.set_migrating(now, GUEST, false));
    assert!(w.engine(|e, _| e.vm(GUEST).unwrap().congestion_offload));
    w.engine(|e, _| e.set_congestion_offload(GUEST, false));
    g.stops(0);
    r.sends("2001:3001");
    r.gets_last("1 ack 3001");
    g.runs();
    g.gets("2001:3001");
    g.sends("1 ack 3001");
}

/// R shows G the rest where it is then.
#[test]
fn life_06_a_flow_that_owes_r_nothing_goes_on_although_the_host_sent_for_it() {
    for acked in [1, 3001] {
        let (w, r, g) = floods(&Setup::new());
        g.sends_all(&["1:1001", "1001:2001", "2001:3001"]);
        r.gets_all(&["1:3001"]);
        g.stops(0); // the ACK for G waits
        r.sends(&format!("ack {acked} win 100"));
        w.engine(|e, now| e.set_migrating(now, GUEST, true));
        w.happens(Event::Migrated(0));
        w.engine(|e, now| e.handle_guest_leaves(now, GUEST));
        assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::GuestGone));
        r.gets_nothing();
    }
}

#[test]
fn life_06_when_its_rings_stop_debts_are_reset_and_the_host_is_mute() {
    for owes in [true, false] {
        let setup = Setup::new();
        let (w, r, g) = setup.established();
        warms_up(&r, &g);
        if owes {
            g.stops(0);
            r.sends("1001:2001");
            r.gets_last("1 ack 2001");
        }
        w.engine(|e, now| e.set_migrating(now, GUEST, true));
        w.happens(Event::Migrated(0));
        w.engine(|e, now| e.handle_guest_leaves(now, GUEST));
        if owes {
            // Before its rings have stopped, and not from its MAC: it may run elsewhere soon.
            assert_eq!(r.gets("R. 1 ack 2001").packet.eth.src, HOST_MAC);
        } else {
            assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::GuestGone));
        }
        w.set_features(GUEST, None);
        w.engine(|e, now| e.set_migrating(now, GUEST, false));
        // LIFE-07: of all that comes late nothing is answered, neither before its VMM hangs up nor
        // after.
        r.sends("2001:3001 ack 1");
        w.after_ms(3000);
        r.sends("2000:2001 ack 1");
        w.engine(|e, now| e.handle_guest_gone(now, GUEST));
        w.after_ms(3000);
        r.sends("2001:3001 ack 1");
        w.after_ms(3000);
        r.gets_nothing();
    }
}
