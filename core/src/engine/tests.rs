//! How much is visited for one port when another has many flows: work is counted, not timed.

use super::*;
use crate::flow::key::tests::key;
use crate::port::GuestConfig;
use crate::tcp::options::Offers;

const NOW: Instant = Instant::from_secs(1000);
const MANY: u32 = 20_000;

/// An engine with two guests: the first has four idle flows, the other [`MANY`].
fn with_engine(test: impl FnOnce(&mut Engine<'_>, PortId)) {
    let mut memory = vec![0_u64; Arena::layout_len(1, 8) / 8];
    let arena = Arena::format(zerocopy::IntoBytes::as_mut_bytes(&mut memory[..]), 1, 8, 1).unwrap();
    let config = EngineConfig { flows_max: 1 << 20, hash_seeds: [1, 2, 3, 4] };
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
