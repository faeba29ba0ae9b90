//! LIFE-04b: a guest that reboots in the middle of an upload, which looks like a driver reset.

use crate::common::world::Peer;
use crate::common::{Setup, World};
use crate::{GUEST, flow, warms_up};
use nightporter_check::event::Event;
use nightporter_core::tcp::flow::{State, Why};

/// G is owed 1,000 bytes when its driver begins anew; they are given to it, and it says nothing for
/// 20 s, as a kernel that boots does.
fn booted(event: Event) -> (World<'static>, Peer<'static>, Peer<'static>) {
    let (w, r, g) = Setup::new().established();
    warms_up(&r, &g);
    g.stops(0);
    r.sends("1001:2001");
    r.gets_last("1 ack 2001");
    begins_anew(&w, event);
    g.runs();
    g.gets("1001:2001");
    w.after_ms(20_000);
    g.takes_all();
    (w, r, g)
}

/// G's driver goes because of `event`, and comes back.
fn begins_anew(w: &World<'static>, event: Event) {
    w.happens(event);
    w.set_features(GUEST, None);
    w.happens(Event::DriverBack(0));
    w.set_features(GUEST, Some(Setup::new().features));
}

/// Another connection that G opens, from the same address.
fn opens_another(w: &World<'static>) -> Peer<'static> {
    let (_, g) = w.pair(&Setup::new());
    g.sends_syn();
    g
}

#[test]
fn life_04b_a_guest_that_has_rebooted_is_asked_as_soon_as_it_speaks() {
    let (w, r, g) = booted(Event::Rebooted(0));
    opens_another(&w);
    g.gets("1000 ack 1");
    g.sends("R 1");
    r.gets("R. 1 ack 2001");
    assert_eq!(flow(&w, |f| f.state()), State::Abort);
}

/// Its filter drops segments of connections that it does not know.
#[test]
fn life_04b_a_guest_that_speaks_and_answers_no_probe_has_forgotten_the_connection() {
    let (w, r, g) = booted(Event::Rebooted(0));
    let other = opens_another(&w);
    for probe in 0..10 {
        g.gets("1000 ack 1");
        r.gets_nothing();
        if probe == 5 {
            other.sends_syn(); // once more
        }
        w.after_ms(200);
    }
    r.gets("R. 1 ack 2001");
    g.gets("R. 2001");
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Abort, Why::GuestGone));
}

/// One that says nothing more may have another way for its answers, or stands.
#[test]
fn life_04b_a_guest_that_falls_silent_is_waited_for() {
    let (w, r, g) = booted(Event::DriverReset(0));
    opens_another(&w);
    w.after_ms(10_000);
    r.gets_nothing();
    g.takes_all();
    g.sends("1 ack 2001");
    w.after_ms(10_000);
    g.gets_nothing();
    assert_ne!(flow(&w, |f| f.state()), State::Abort);
}

#[test]
fn life_04b_a_guest_whose_driver_was_only_bound_anew_goes_on() {
    let (w, r, g) = booted(Event::DriverReset(0));
    opens_another(&w);
    g.gets("1000 ack 1");
    g.sends("1 ack 1001"); // it lost the bytes with its ring
    g.gets_nothing();
    w.after_ms(300);
    g.gets("1001:2001");
    g.sends("1 ack 2001");
    w.after_ms(10_000);
    g.gets_nothing();
    r.gets_nothing();
}

/// It spoke behind the first reset; behind the second it has no address for a while, and answers
/// nothing.
#[test]
fn life_04b_what_was_heard_before_the_driver_began_anew_once_more_does_not_count() {
    let (w, r, g) = booted(Event::DriverReset(0));
    let other = opens_another(&w);
    g.gets("1000 ack 1");
    begins_anew(&w, Event::DriverReset(0));
    w.after_ms(3000);
    g.takes_all();
    other.sends_syn();
    g.gets("1000 ack 1");
    w.after_ms(200);
    r.gets_nothing();
    g.takes_all();
    g.sends("1 ack 2001");
    w.after_ms(10_000);
    r.gets_nothing();
    assert_ne!(flow(&w, |f| f.state()), State::Abort);
}

/// It loses its address for a while, and gets it back.
#[test]
fn life_04b_probes_of_a_silent_time_do_not_count_when_it_speaks_again() {
    let (w, r, g) = booted(Event::DriverReset(0));
    let other = opens_another(&w);
    w.after_ms(5000);
    g.takes_all();
    other.sends_syn();
    g.gets("1000 ack 1");
    w.after_ms(200);
    r.gets_nothing();
    g.takes_all();
    g.sends("1 ack 2001");
    assert_ne!(flow(&w, |f| f.state()), State::Abort);
}

/// One that speaks once and answers nothing is given up like a silent one (SNOOP-32).
#[test]
fn life_04b_a_guest_that_spoke_once_is_not_waited_for_without_end() {
    let (w, r, g) = booted(Event::Rebooted(0));
    opens_another(&w);
    w.after_ms(130_000);
    g.takes_all();
    r.gets_last("R. 1 ack 2001");
    assert_eq!(flow(&w, |f| (f.state(), f.why())), (State::Abort, Why::GuestGone));
}
