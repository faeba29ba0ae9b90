//! A VM's flows go through another engine and back: what goes on is what an image has (LIFE-09).

use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::port::{PortConfig, PortFeatures, PortId};
use nightporter_core::store::arena::Arena;
use nightporter_core::time::{Duration, Instant};

use crate::plan::HostPlan;

/// The other engine's clock is ahead by this: a multiple of all units in which flows keep times.
const AHEAD: Duration = Duration::from_secs(128 * 3);

/// The flows of the VM of `port` end here and go on here, by way of an engine that was just
/// started; not while H sends for one of them, and only if it `moves`.
///
/// # Panics
/// If an image cannot be read, or a flow finds no place although nothing else is there.
pub(super) fn hand_over(
    engine: &mut Engine<'_>,
    host: &HostPlan,
    now: Instant,
    port: PortId,
    moves: bool,
) {
    let Some(config) = engine.port_config(port).cloned() else { return };
    let Ok(image) = engine.export(now, port) else { return }; // H sends for one of them
    if !moves {
        return;
    }
    let there = now + AHEAD;
    let words = Arena::layout_len(host.arena_records, host.arena_pages).div_ceil(8);
    let mut memory = vec![0_u64; words];
    let bytes = zerocopy::IntoBytes::as_mut_bytes(memory.as_mut_slice());
    let arena = Arena::format(bytes, host.arena_records, host.arena_pages, 1).expect("it fits");
    let mut other = Engine::new(there, EngineConfig::new(host.flows_max, [9, 8, 7, 6]), arena);
    let added = [PortConfig::uplink("uplink"), config].map(|config| {
        let added = other.add_port(there, config).expect("it is the first of this name");
        other.set_port_features(there, added, Some(PortFeatures::ALL));
        added
    });
    let imported = other.import(there, added[1], &image).expect("an honest image");
    assert_eq!(imported.reset, 0, "a flow without a place");
    let again = other.export(there, added[1]).expect("nothing is sent there");
    assert_eq!(image.len(), again.len(), "another image of the same flows");
    engine.forget(port);
    let imported = engine.import(now, port, &again).expect("an honest image");
    assert_eq!(imported.reset, 0, "a flow without a place");
}
