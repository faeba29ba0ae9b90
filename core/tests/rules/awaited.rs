//! LIFE-16: a VM whose front-end has gone is waited for, because it may have moved, or come back.

use crate::common::world::{HOST_MAC, Peer, mac};
use crate::common::{Setup, World};
use crate::{GUEST, flow, from_uplink, warms_up};
use nightporter_check::event::Event;
use nightporter_core::tcp::flow::{State, Why};

/// A connection whose G is owed 1,000 bytes, and whose VMM has hung up: R has got nothing since.
fn hung_up(setup: &Setup, event: Event) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    g.stops(0);
    r.sends("1001:2001");
    r.gets_last("1 ack 2001");
    w.happens(event);
    w.happens(Event::Awaited(0));
    w.set_features(GUEST, None);
    w.engine(|e, now| e.handle_guest_gone(now, GUEST));
    r.gets_nothing();
    (w, r, g)
}

#[test]
fn life_16_a_guest_that_comes_back_as_it_was_keeps_its_connections() {
    let setup = Setup::new();
    let (w, r, g) = hung_up(&setup, Event::DriverReset(0));
    r.sends("2001:3001"); // nobody knows whether it is there
    w.after_ms(1900);
    r.gets_nothing();
    w.engine(|e, _| e.handle_guest_back(GUEST));
    w.happens(Event::DriverBack(0));
    w.set_features(GUEST, Some(setup.features));
    g.runs();
    g.gets("1001:2001");
    g.sends("1 ack 2001");
    r.sends("2001:3001");
    r.gets_last("1 ack 3001");
    g.gets("2001:3001");
    g.sends("1 ack 3001");
    w.after_ms(5000);
    r.gets_nothing();
    assert_eq!(flow(&w, |f| f.state()), State::On);
}

#[test]
fn life_16_another_guest_and_the_remote_are_told_as_soon_as_it_is_there() {
    let setup = Setup::new();
    let (w, r, g) = hung_up(&setup, Event::Rebooted(0));
    w.after_ms(700);
    w.happens(Event::DriverBack(0));
    w.set_features(GUEST, Some(setup.features));
    let reset = r.gets("R. 1 ack 2001");
    assert_eq!(reset.packet.eth.src, HOST_MAC);
    g.runs();
    g.gets("R. 1001"); // what it was given, and no more
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Abort, Why::GuestGone));
}

#[test]
fn life_16_of_a_guest_that_was_heard_elsewhere_only_debts_are_reset() {
    for owes in [true, false] {
        let (w, r, g) = Setup::new().established();
        warms_up(&r, &g);
        if owes {
            g.stops(0);
            r.sends("1001:2001");
            r.gets_last("1 ack 2001");
        }
        w.happens(Event::Migrated(0));
        w.engine(|e, now| e.handle_guest_gone(now, GUEST));
        w.after_ms(500);
        let announcement = [&[0xff; 6][..], &mac(1), &[0x80, 0x35], &[0; 46]].concat();
        from_uplink(&w, &announcement);
        w.after_ms(1500);
        if owes {
            assert_eq!(r.gets("R. 1 ack 2001").packet.eth.src, HOST_MAC);
        } else {
            r.gets_nothing();
            assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::GuestGone));
        }
    }
}

/// The guest runs elsewhere before its VMM here hangs up, and says so a few times within a second,
/// as QEMU does.
#[test]
fn life_16_a_guest_that_is_heard_elsewhere_before_its_vmm_hangs_up_has_moved() {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    let announcement = [&[0xff; 6][..], &mac(1), &[0x80, 0x35], &[0; 46]].concat();
    from_uplink(&w, &announcement); // of an earlier move, long ago
    w.happens(Event::Migrated(0));
    w.set_features(GUEST, None);
    w.after_ms(10);
    for _ in 0..5 {
        from_uplink(&w, &announcement);
        w.after_ms(50);
    }
    w.happens(Event::Awaited(0));
    w.engine(|e, now| e.handle_guest_gone(now, GUEST));
    w.after_ms(2000);
    r.gets_nothing();
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Pass, Why::GuestGone));
}

/// Neither timers nor commands of the operator make H speak in the name of a VM that may run
/// elsewhere.
#[test]
fn life_16_nothing_is_said_in_the_name_of_a_guest_that_is_awaited() {
    let setup = Setup::new();
    let (w, r, g) = setup.established();
    warms_up(&r, &g);
    w.engine(|e, now| e.set_late(now, GUEST, true));
    r.sends("1001:2001"); // not acknowledged: G has not
    w.happens(Event::DriverReset(0));
    w.happens(Event::Awaited(0));
    w.engine(|e, now| e.handle_guest_gone(now, GUEST));
    r.takes_all();
    w.engine(|e, now| e.set_late(now, GUEST, false));
    w.engine(|e, now| e.set_offload(now, GUEST, false));
    w.engine(|e, now| e.set_offload(now, GUEST, true));
    r.sends("2000:2001"); // a keepalive
    w.after_ms(1900);
    r.gets_nothing();
    w.engine(|e, _| e.handle_guest_back(GUEST));
    w.happens(Event::DriverBack(0));
    w.set_features(GUEST, Some(setup.features));
    r.gets("1 ack 2001");
}
