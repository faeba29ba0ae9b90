//! Mistakes that no test noticed when they were put into core on purpose (`make
//! mutants-independent`): each has its test here.

use crate::GUEST;
use crate::common::Setup;
use crate::common::setup::ALL_FEATURES;
use nightporter_core::engine::PortFeatures;
use nightporter_core::tcp::flow::State;
use nightporter_core::wire::virtio_net::{GSO_NONE, GSO_TCPV4, GSO_TCPV6};

#[test]
fn com_17_super_segments_to_the_guest_go_by_the_offload_of_their_own_family() {
    for (v6, tso4, tso6) in
        [(false, true, false), (false, false, true), (true, true, false), (true, false, true)]
    {
        let features = PortFeatures { tso4, tso6, ..ALL_FEATURES };
        let (_w, r, g) = Setup { v6, features, ..Setup::new() }.established();
        r.sends("1:4001 gso 1000");
        let first = g.takes_all().swap_remove(0);
        let (end, gso) = match (v6, tso4, tso6) {
            (false, true, _) => (4001, GSO_TCPV4),
            (true, _, true) => (4001, GSO_TCPV6),
            _ => (1001, GSO_NONE),
        };
        assert_eq!((first.range(), first.hdr.gso_type), ((1, end), gso));
    }
}

#[test]
fn com_17_a_change_of_features_in_mid_flow_repeats_nothing() {
    let (w, r, g) = Setup::new().established();
    r.sends("1:1001");
    g.gets("1:1001");
    let fewer = PortFeatures { tso4: false, ..ALL_FEATURES };
    w.engine(|engine, now| engine.set_port_features(now, GUEST, Some(fewer)));
    g.gets_nothing();
    r.sends("1001:2001");
    g.gets("1001:2001");
}

#[test]
fn com_28_offload_turned_off_or_drained_during_the_handshake_is_off_for_that_connection() {
    for drained in [false, true] {
        let setup = Setup::new();
        let w = setup.opens();
        let (r, g) = w.pair(&setup);
        r.sends_syn();
        g.gets_syn();
        g.sends_syn_ack();
        r.gets_syn();
        w.engine(|engine, now| {
            if drained {
                engine.drain(now, GUEST);
            } else {
                engine.set_offload(now, GUEST, false);
            }
        });
        r.sends("1 ack 1");
        assert_eq!(w.state(), Some(State::Pass));
    }
}
