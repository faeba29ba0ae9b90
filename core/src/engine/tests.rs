//! How much is visited for one port when another has many flows: work is counted, not timed.

use super::*;
use crate::flow::key::tests::key;
use crate::port::{GuestConfig, Vlans};
use crate::store::arena::tests::record;
use crate::store::record::{Record, network_hash};
use crate::switch::Out;
use crate::tcp::flow::Why;
use crate::tcp::options::Offers;
use crate::tcp::vm::Presence;
use crate::wire::packet::VlanStack;

const NOW: Instant = Instant::from_secs(1000);
/// When a VM that has gone is waited for no longer.
const LATER: Instant = Instant::from_secs(1002);
const MANY: u32 = 20_000;

/// An engine with two guests: the first has four idle flows, the other [`MANY`].
fn with_engine(test: impl FnOnce(&mut Engine<'_>, PortId)) {
    let mut memory = vec![0_u64; Arena::layout_len(1, 8) / 8];
    let arena = Arena::format(zerocopy::IntoBytes::as_mut_bytes(&mut memory[..]), 1, 8, 1).unwrap();
    let config = EngineConfig::new(1 << 20, [1, 2, 3, 4]);
    let mut engine = Engine::new(NOW, config, arena);
    let mut guest = |name: &str, flows_max| {
        let config = GuestConfig { ack_offload: true, flows_max, ..GuestConfig::default() };
        engine.add_port(NOW, PortConfig::guest(name, config)).unwrap()
    };
    let [busy, small] = [guest("busy", MANY), guest("small", 4)];
    for n in 0..MANY {
        engine.insert_flow(FlowKey { port: busy.0, ..key(n) }, idle()).unwrap();
    }
    for n in 0..4 {
        engine.insert_flow(FlowKey { port: small.0, ..key(n) }, idle()).unwrap();
    }
    engine.flows.visited.take();
    test(&mut engine, small);
}

/// In the path, parked, owing nothing, with nothing promised that G does not show.
fn idle() -> Flow {
    let mut flow = Flow::new(NOW, Offers::default(), false);
    flow.take_on();
    flow
}

fn handshake() -> Flow {
    Flow::new(NOW, Offers::default(), false)
}

fn visited(engine: &Engine<'_>) -> usize {
    engine.flows.visited.take()
}

#[test]
fn inv_20_what_is_done_to_a_port_visits_its_own_flows() {
    with_engine(|engine, small| {
        engine.set_port_features(NOW, small, Some(PortFeatures::default()));
        assert_eq!(visited(engine), 4, "a driver reset");
        engine.drain(NOW, small);
        assert_eq!(visited(engine), 4, "draining");
        assert!(engine.is_drained(small));
        assert_eq!(visited(engine), 0, "nobody walks to see whether all is drained");
        engine.handle_guest_gone(NOW, small);
        engine.remove_port(NOW, small);
        assert!(visited(engine) <= 8, "leaving");
        assert_eq!(engine.flows.len(), MANY);
    });
}

fn drained(engine: &Engine<'_>) -> usize {
    engine.flows().filter(|(_, _, flow)| flow.state() == State::Pass).count()
}

#[test]
fn inv_20_what_is_done_to_many_flows_is_done_in_steps() {
    const STEP: usize = limits::FLOWS_PER_STEP as usize;
    let busy = PortId(0);
    with_engine(|engine, small| {
        engine.drain(NOW, small);
        assert_eq!((drained(engine), engine.walks.any()), (4, false), "a few are no matter");
        // All of them, at a stop; a link comes up meanwhile, twice.
        engine.drain_all(NOW);
        for features in [Some(PortFeatures::default()), None, Some(PortFeatures::default())] {
            engine.set_port_features(NOW, busy, features);
        }
        let mut steps = 0;
        while engine.poll_timeout() == Some(Instant::ZERO) {
            let before = drained(engine);
            engine.handle_timeout(NOW);
            assert!(drained(engine) - before <= STEP);
            steps += 1;
        }
        assert_eq!(drained(engine), MANY as usize + 4);
        assert_eq!(steps, 2 * (MANY as usize + 4).div_ceil(STEP), "a walk that begins anew is one");
        assert!(!engine.walks.any());
    });
    // A VM that is turned on again is not drained any further, and one that is gone is not walked
    // over.
    with_engine(|engine, _| {
        engine.set_offload(NOW, busy, false);
        engine.handle_timeout(NOW);
        engine.set_offload(NOW, busy, true);
        assert!(drained(engine) > 0 && drained(engine) <= STEP && !engine.is_draining());
        engine.set_port_features(NOW, busy, Some(PortFeatures::default()));
        assert!(engine.walks.any());
        engine.remove_port(NOW, busy);
        assert!(!engine.walks.any());
    });
}

#[test]
fn life_06_a_vm_is_not_drained_before_all_its_flows_know_of_it() {
    let busy = PortId(0);
    let all: [fn(&mut Engine<'_>); 3] = [
        |engine| engine.drain(NOW, PortId(0)),
        |engine| engine.set_offload(NOW, PortId(0), false),
        |engine| engine.drain_all(NOW),
    ];
    for begin in all {
        with_engine(|engine, _| {
            assert!(engine.is_drained(busy), "nobody is owed anything");
            // The link comes up, too: that is no drain.
            engine.set_port_features(NOW, busy, Some(PortFeatures::default()));
            assert!(engine.is_drained(busy) && !engine.is_draining());
            begin(engine);
            while drained(engine) < MANY as usize {
                assert!(!engine.is_drained(busy), "{} know", drained(engine));
                assert!(engine.is_draining());
                engine.handle_timeout(NOW);
            }
            while engine.poll_timeout() == Some(Instant::ZERO) {
                engine.handle_timeout(NOW);
            }
            assert!(engine.is_drained(busy) && !engine.is_draining());
        });
    }
    // Another VM's many flows are no matter of this one.
    with_engine(|engine, small| {
        engine.drain(NOW, busy);
        engine.drain(NOW, small);
        assert!(engine.is_drained(small) && !engine.is_drained(busy));
    });
}

#[test]
fn life_05_the_connections_of_a_vm_that_has_gone_end_in_steps() {
    const STEP: usize = limits::FLOWS_PER_STEP as usize;
    let busy = PortId(0);
    let live = |engine: &Engine<'_>| engine.flows.len_of_class(busy.0, Class::Live) as usize;
    let begins: [fn(&mut Engine<'_>); 2] = [
        |engine| {
            engine.handle_guest_gone(NOW, PortId(0));
            assert!(!engine.is_ending(PortId(0)) && engine.poll_timeout() == Some(LATER));
        },
        |engine| {
            engine.handle_guest_gone(NOW, PortId(0));
            engine.prepare_removal(PortId(0));
        },
    ];
    for (removed, begin) in begins.into_iter().enumerate() {
        with_engine(|engine, small| {
            engine.handle_guest_gone(NOW, small);
            assert!(!engine.is_ending(small), "a few are no matter");
            begin(engine);
            let mut steps = 0;
            while engine.is_ending(busy) || steps == 0 {
                let before = live(engine);
                engine.handle_timeout(LATER);
                assert!(before - live(engine) <= STEP);
                steps += 1;
            }
            assert_eq!((live(engine), steps), (0, (MANY as usize + 4).div_ceil(STEP)));
            let left = engine.flows.len_of_port(busy.0);
            assert_eq!(left, if removed == 1 { 0 } else { MANY });
            assert_eq!(engine.flows.len_of_port(small.0), 4, "others are met, and left");
            engine.remove_port(NOW, busy);
            assert_eq!((engine.flows.len_of_port(busy.0), engine.walks.any()), (0, false));
        });
    }
}

#[test]
fn life_05_the_connections_of_a_vm_that_comes_into_another_vlan_end_in_steps() {
    const STEP: usize = limits::FLOWS_PER_STEP as usize;
    let busy = PortId(0);
    let live = |engine: &Engine<'_>, port: PortId| engine.flows.len_of_class(port.0, Class::Live);
    let set = |engine: &mut Engine<'_>, port: PortId| {
        let guest = engine.port_config(port).and_then(PortConfig::as_guest).unwrap().clone();
        visited(engine);
        let vlans = Vlans::Access(7);
        engine.set_guest(NOW, port, GuestConfig { vlans, ..guest }).unwrap();
        visited(engine)
    };
    with_engine(|engine, small| {
        for port in [busy, small] {
            engine.set_port_features(NOW, port, Some(PortFeatures::default()));
        }
        while engine.walks.any() {
            engine.handle_timeout(NOW);
        }
        engine.prepare_move(NOW, small);
        assert!(!engine.is_ending(small) && live(engine, small) == 4, "a few are no matter");
        assert_eq!((set(engine, small), live(engine, small)), (4, 0));
        engine.prepare_move(NOW, busy);
        assert_eq!(engine.vm(busy).unwrap().presence, Presence::Gone, "it takes on no others");
        while engine.is_ending(busy) {
            let before = live(engine, busy);
            engine.handle_timeout(NOW);
            assert!((before - live(engine, busy)) as usize <= STEP);
        }
        // Even if it comes to nothing, it may have connections again.
        let guest = engine.port_config(busy).and_then(PortConfig::as_guest).unwrap().clone();
        let too_much = GuestConfig { vlans: Vlans::Access(7), budget_bytes: 1 << 40, ..guest };
        assert_eq!(engine.set_guest(NOW, busy, too_much), Err(AddPortError::BudgetExceedsArena));
        assert_eq!(engine.vm(busy).unwrap().presence, Presence::Here);
        engine.prepare_move(NOW, busy);
        assert_eq!((set(engine, busy), live(engine, busy)), (0, 0));
        assert_eq!(engine.vm(busy).unwrap().presence, Presence::Here);
    });
}

#[test]
fn life_02_the_flows_of_another_vm_do_not_stand_before_those_that_may_go() {
    with_engine(|engine, small| {
        // The first newcomer finds all flows just used, the second finds one that was not.
        let newcomers = [10, 11].map(|n| {
            engine.insert_flow(FlowKey { port: small.0, ..key(n) }, handshake());
            visited(engine)
        });
        assert!(newcomers.iter().sum::<usize>() < 10, "{newcomers:?}");
        assert_eq!(engine.flows.len_of_class(small.0, Class::Unproven), 1);
        assert_eq!(engine.flows.len_of_port(small.0), 4);
    });
}

#[test]
fn life_02_an_aborted_entry_goes_when_it_has_told_the_guest_and_not_before() {
    with_engine(|engine, small| {
        let ids: Vec<_> = engine.flows.of_class(small.0, Class::Live).collect();
        for id in &ids {
            engine.with_flow(NOW, *id, |flow, cx| flow.abort_both(cx, Why::GuestRefuses));
        }
        let newcomer = |engine: &mut Engine<'_>| {
            engine.insert_flow(FlowKey { port: small.0, ..key(10) }, handshake())
        };
        assert_eq!(newcomer(engine), None, "each owes the guest a reset");
        assert!(!engine.is_drained(small));
        engine.with_flow(NOW, ids[2], |flow, cx| flow.on_guest_gone(cx));
        assert!(newcomer(engine).is_some());
        assert!(engine.flows.get(ids[2]).is_none());
        assert_eq!(engine.vm(small).unwrap().owing_flows, 3);
    });
}

#[test]
fn inv_06_a_smaller_budget_is_free_for_others_when_what_it_held_is() {
    let mut memory = vec![0_u64; Arena::layout_len(1, 8) / 8];
    let arena = Arena::format(zerocopy::IntoBytes::as_mut_bytes(&mut memory[..]), 1, 8, 1).unwrap();
    let config = EngineConfig::new(16, [1, 2, 3, 4]);
    let mut engine = Engine::new(NOW, config, arena);
    let pages = |n: u64| GuestConfig {
        budget_bytes: n * limits::PAGE as u64,
        flows_max: 8,
        ack_offload: true,
        ..GuestConfig::default()
    };
    let a = engine.add_port(NOW, PortConfig::guest("a", pages(5))).unwrap();
    let b = engine.add_port(NOW, PortConfig::guest("b", pages(3))).unwrap();
    assert_eq!(engine.set_guest(NOW, b, pages(4)), Err(AddPortError::BudgetExceedsArena));
    assert!(engine.port_mut(a).unwrap().vm.reserve(4));
    engine.set_guest(NOW, a, pages(1)).unwrap();
    assert!(!engine.port_mut(a).unwrap().vm.reserve(1), "it has more than it may");
    assert_eq!(engine.set_guest(NOW, b, pages(5)), Err(AddPortError::BudgetExceedsArena));
    engine.set_guest(NOW, b, pages(4)).unwrap();
    engine.port_mut(a).unwrap().vm.unreserve(4);
    engine.set_guest(NOW, b, pages(7)).unwrap();
    assert_eq!(engine.pages_promised(None), 8);
}

#[test]
fn another_policy_for_a_vm_leaves_its_connections_and_drains_them_if_that_is_the_policy() {
    with_engine(|engine, small| {
        let on = engine.port_config(small).and_then(PortConfig::as_guest).unwrap().clone();
        engine
            .set_guest(NOW, small, GuestConfig { flows_max: 2, mtu: 9000, ..on.clone() })
            .unwrap();
        assert_eq!(engine.flows.len_of_port(small.0), 4);
        assert!(!engine.flows.has_room(small.0));
        assert_eq!(engine.vm(small).unwrap().mtu, 9000);
        let states = |engine: &Engine<'_>| {
            let of_small = engine.flows().filter(|(_, key, _)| key.port == small.0);
            of_small.map(|(_, _, flow)| flow.state()).collect::<Vec<_>>()
        };
        assert_eq!(states(engine), [State::On; 4]);
        engine.set_guest(NOW, small, GuestConfig { ack_offload: false, ..on }).unwrap();
        assert_eq!(states(engine), [State::Pass; 4]);
        assert_eq!(visited(engine), 4);
    });
}

#[test]
fn inv_21_remotes_of_a_vm_that_is_not_there_are_told_in_its_network_and_in_no_other() {
    let told_in = |network: &str| {
        let mut memory = vec![0_u64; Arena::layout_len(1, 8) / 8];
        let bytes = zerocopy::IntoBytes::as_mut_bytes(&mut memory[..]);
        let mut arena = Arena::format(bytes, 1, 8, 1).unwrap();
        let owing = Record { network_hash: network_hash(network), ..record("vm") };
        let owing = Record { rcv_nxt: owing.rcv_nxt + 1, ..owing };
        arena.alloc_record(&owing).unwrap();
        let config = EngineConfig::new(16, [1, 2, 3, 4]);
        let mut engine = Engine::new(NOW, config, arena);
        let uplinks = ["", "red", "blue"].map(|network| {
            let config = PortConfig::uplink(format!("up{network}")).in_network(network);
            engine.add_port(NOW, config).unwrap()
        });
        // It is in another network now.
        let vm = PortConfig::guest("vm", GuestConfig { flows_max: 4, ..GuestConfig::default() });
        let vm = engine.add_port(NOW, vm.in_network("green")).unwrap();
        let is_told = network != "gone";
        assert_eq!(engine.handle_restart(NOW).reset, usize::from(is_told));
        assert_eq!(engine.common.arena.free_records(), usize::from(is_told));
        assert_eq!(engine.left(), usize::from(!is_told));
        let (to, from, frame) = {
            let Some(told) = engine.poll_transmit(NOW) else { return Vec::new() };
            (told.port, told.ingress, told.parts().concat())
        };
        assert_eq!(to, None, "nobody has heard of the remote yet");
        let frame = FloodedFrame::of(&frame);
        let gets = |port: &PortId| engine.is_flooded(from, *port, frame);
        uplinks.into_iter().chain([vm]).filter(gets).map(|port| port.0).collect()
    };
    assert_eq!(told_in(""), [0]);
    assert_eq!(told_in("red"), [1]);
    assert_eq!(told_in("blue"), [2]);
    assert!(told_in("gone").is_empty());
}

#[test]
fn a_mac_that_is_listed_for_another_host_is_here_as_long_as_its_driver_is() {
    let mut memory = vec![0_u64; Arena::layout_len(1, 8) / 8];
    let arena = Arena::format(zerocopy::IntoBytes::as_mut_bytes(&mut memory[..]), 1, 8, 1).unwrap();
    let mut engine = Engine::new(NOW, EngineConfig::new(16, [1, 2, 3, 4]), arena);
    let [mac, other_mac] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
    let guest = |mac| GuestConfig { mac, flows_max: 4, ..GuestConfig::default() };
    let [vm, other] = [("vm", Some(mac)), ("other", None)]
        .map(|(name, mac)| engine.add_port(NOW, PortConfig::guest(name, guest(mac))).unwrap());
    let is_here = |engine: &mut Engine<'_>, mac| {
        let switch = engine.networks.of_mut(vm);
        switch.lookup(NOW, other, VlanStack::default(), mac) == Out::Port(vm)
    };
    engine.set_elsewhere(vm, true);
    assert!(!is_here(&mut engine, mac));
    engine.set_port_features(NOW, vm, Some(PortFeatures::default()));
    assert!(is_here(&mut engine, mac), "at once");
    engine.set_elsewhere(vm, true);
    assert!(is_here(&mut engine, mac), "an order that was under way");
    engine.set_port_features(NOW, vm, None);
    assert!(!is_here(&mut engine, mac));
    engine.set_guest(NOW, vm, guest(Some(other_mac))).unwrap();
    engine.set_port_features(NOW, vm, Some(PortFeatures::default()));
    engine.set_port_features(NOW, vm, None);
    assert!(is_here(&mut engine, other_mac), "nobody has said where this one is");
}
