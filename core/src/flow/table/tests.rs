//! The table against a map, and what it promises about memory and order.

use super::*;
use crate::flow::key::tests::key;
use crate::limits::{FLOW_INDEX_BYTES, FLOW_SLOT_OVERHEAD, FLOW_STATE_BYTES};
use crate::tcp::flow::Flow;
use proptest::prelude::*;
use std::collections::BTreeMap;

const SEEDS: [u64; 4] = [1, 2, 3, 4];

fn on_port(port: u16, n: u32) -> FlowKey {
    FlowKey { port, ..key(n) }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Insert(u16, u32),
    Remove(u32),
    Evict(u16, u32),
    SetClass(u32, Class),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0_u16..3, 0_u32..30).prop_map(|(port, n)| Op::Insert(port, n)),
        2 => (0_u32..40).prop_map(Op::Remove),
        1 => (0_u16..3, 0_u32..10).prop_map(|(port, steps)| Op::Evict(port, steps)),
        3 => (0_u32..40, 0_usize..3).prop_map(|(nth, c)| Op::SetClass(nth, Class::ALL[c])),
    ]
}

/// A table of flows in the path.
fn live<T: Copy>(port: u16, values: impl IntoIterator<Item = T>) -> (FlowTable<T>, Vec<FlowId>) {
    let mut table = FlowTable::new(1000, SEEDS);
    let values = (0..).zip(values);
    let ids = values.map(|(n, v)| table.insert(on_port(port, n), Class::Live, v).unwrap());
    let ids = ids.collect();
    (table, ids)
}

proptest! {
    #[test]
    fn flows_are_found_by_key_and_by_id_until_they_are_removed(
        ops in prop::collection::vec(op(), 1..300),
    ) {
        const CAPACITY: u32 = 40;
        const QUOTA: u32 = 15;
        let mut table = FlowTable::new(CAPACITY, SEEDS);
        table.set_quota(1, QUOTA);
        let mut model: BTreeMap<(u16, u32), (FlowId, u32)> = BTreeMap::new();
        let mut rings: BTreeMap<FlowId, (u16, Class)> = BTreeMap::new();
        let mut stale: Vec<FlowId> = Vec::new();
        let of_port = |model: &BTreeMap<(u16, u32), _>, port| {
            u32::try_from(model.keys().filter(|k| k.0 == port).count()).unwrap()
        };
        for (value, op) in (0..).zip(ops) {
            match op {
                Op::Insert(port, n) if model.contains_key(&(port, n)) => {
                    prop_assert_eq!(table.lookup(&on_port(port, n)), Some(model[&(port, n)].0));
                }
                Op::Insert(port, n) => match table.insert(on_port(port, n), Class::Live, value) {
                    Ok(id) => {
                        model.insert((port, n), (id, value));
                        rings.insert(id, (port, Class::Live));
                        stale.retain(|&old| old != id);
                    }
                    Err(TableFull::Port) => {
                        prop_assert_eq!((port, of_port(&model, 1)), (1, QUOTA));
                    }
                    Err(TableFull::Table) => prop_assert_eq!(model.len(), CAPACITY as usize),
                },
                Op::Remove(nth) => {
                    let Some((&(port, n), &(id, value))) = model.iter().nth(nth as usize) else {
                        continue;
                    };
                    prop_assert_eq!(table.remove(id), Some((on_port(port, n), value)));
                    prop_assert_eq!(table.remove(id), None);
                    model.remove(&(port, n));
                    rings.remove(&id);
                    stale.push(id);
                }
                Op::Evict(port, steps) => {
                    // The even ones owe somebody something.
                    if let Some(id) = table.find_unused(port, Class::Live, steps, |v| v % 2 == 1) {
                        prop_assert_eq!(rings.remove(&id), Some((port, Class::Live)));
                        let (key, gone) = table.remove(id).unwrap();
                        prop_assert_eq!(gone % 2, 1);
                        model.retain(|_, &mut (kept, _)| kept != id);
                        prop_assert_eq!(table.lookup(&key), None);
                        stale.push(id);
                    }
                }
                Op::SetClass(nth, class) => {
                    let Some(&(id, _)) = model.values().nth(nth as usize) else { continue };
                    table.set_class(id, class);
                    let port = table.key(id).unwrap().port;
                    rings.insert(id, (port, class));
                    prop_assert_eq!(table.of_class(port, class).filter(|&of| of == id).count(), 1);
                }
            }
            prop_assert_eq!(table.len() as usize, model.len());
            for port in 0..3 {
                prop_assert_eq!(table.len_of_port(port), of_port(&model, port));
            }
            prop_assert!(stale.iter().all(|&id| table.get(id).is_none()));
        }
        for (&(port, n), &(id, value)) in &model {
            prop_assert_eq!(table.lookup(&on_port(port, n)), Some(id));
            prop_assert_eq!(table.get(id), Some(&value));
            prop_assert_eq!(table.key(id), Some(&on_port(port, n)));
        }
        let walked: Vec<FlowId> = table.iter().map(|(id, ..)| id).collect();
        prop_assert_eq!(walked.len(), model.len());
        prop_assert!(walked.is_sorted_by_key(|id| id.index()));
        prop_assert!(walked.iter().all(|id| table.at(id.index()).is_some_and(|at| at.0 == *id)));
        for (port, class) in (0..3).flat_map(|port| Class::ALL.map(|class| (port, class))) {
            let mut ring: Vec<FlowId> = table.of_class(port, class).collect();
            ring.sort_unstable();
            let expected = rings.iter().filter(|(_, is)| **is == (port, class));
            prop_assert_eq!(ring, expected.map(|(id, _)| *id).collect::<Vec<_>>());
        }
    }
}

#[test]
fn iteration_order_does_not_depend_on_the_seeds() {
    let walk = |seeds| {
        let mut table = FlowTable::new(1000, seeds);
        let ids: Vec<_> = (0..500).map(|n| table.insert(key(n), Class::Live, n).unwrap()).collect();
        for id in ids.iter().step_by(3) {
            table.remove(*id);
        }
        table.insert(key(9999), Class::Live, 9999).unwrap();
        let slots = table.iter().map(|(id, _, &n)| (id, n)).collect::<Vec<_>>();
        (slots, table.of_class(3, Class::Live).collect::<Vec<_>>())
    };
    assert_eq!(walk(SEEDS), walk([5, 6, 7, 8]));
}

#[test]
fn an_id_of_a_removed_flow_does_not_answer_for_the_next_one_in_its_slot() {
    let mut table = FlowTable::new(10, SEEDS);
    let old = table.insert(key(1), Class::Live, "old").unwrap();
    table.remove(old);
    let new = table.insert(key(2), Class::Live, "new").unwrap();
    assert_eq!(old.index(), new.index());
    assert_eq!(table.get_mut(old), None);
    assert_eq!((table.get(old), table.key(old)), (None, None));
    table.set_class(old, Class::Spent);
    assert_eq!(table.len_of_class(3, Class::Live), 1);
    assert_eq!(table.get(new), Some(&"new"));
}

#[test]
fn life_02_eviction_gives_a_flow_that_was_looked_up_a_second_chance() {
    let (mut table, ids) = live(3, 0..4);
    let mut unused = |steps, may_go: fn(&i32) -> bool| {
        let id = table.find_unused(3, Class::Live, steps, may_go)?;
        table.remove(id).map(|(_, n)| n)
    };
    assert_eq!(unused(4, |_| true), None, "all were just used");
    assert_eq!(unused(0, |_| true), None, "no steps, no work");
    assert_eq!(unused(4, |&n| n != 0), Some(1));
    let _ = table.lookup(&on_port(3, 3));
    let mut unused = |may_go: fn(&i32) -> bool| table.find_unused(3, Class::Live, 4, may_go);
    assert_eq!(unused(|_| true), Some(ids[2]));
    assert_eq!(unused(|&n| n == 3), None, "it was looked up");
    assert_eq!(unused(|&n| n == 3), Some(ids[3]), "its second chance is over");
}

#[test]
fn flows_of_a_class_come_in_the_order_in_which_they_became_that() {
    let (mut table, ids) = live(3, 0..4);
    for n in [2, 0, 3] {
        table.set_class(ids[n], Class::Spent);
    }
    table.set_class(ids[2], Class::Spent); // it is that already
    assert_eq!(table.of_class(3, Class::Spent).collect::<Vec<_>>(), [ids[2], ids[0], ids[3]]);
    assert_eq!(table.of_class(3, Class::Live).collect::<Vec<_>>(), [ids[1]]);
    table.remove(ids[2]);
    assert_eq!(table.of_class(3, Class::Spent).collect::<Vec<_>>(), [ids[0], ids[3]]);
    assert_eq!(table.len_of_class(3, Class::Unproven), 0);
}

#[test]
fn inv_20_what_is_done_for_one_port_visits_its_own_flows_only() {
    let (mut table, _) = live(1, 0..900);
    for n in 0..3 {
        table.insert(on_port(2, n), Class::Live, 0).unwrap();
    }
    assert_eq!(table.of_class(2, Class::Live).count(), 3);
    assert_eq!(table.visited.take(), 3);
    assert_eq!(table.find_unused(2, Class::Live, 64, |_| true), None, "all were just used");
    assert!(table.find_unused(2, Class::Live, 64, |_| true).is_some());
    assert_eq!(table.visited.take(), 3 + 1);
    assert_eq!(table.of_class(9, Class::Live).count(), 0, "a port that never had one");
    assert_eq!(table.find_unused(9, Class::Live, 64, |_| true), None);
}

#[test]
fn inv_20_one_vm_at_its_quota_does_not_stop_another() {
    let mut table = FlowTable::new(100, SEEDS);
    table.set_quota(1, 2);
    table.insert(on_port(1, 1), Class::Live, ()).unwrap();
    let second = table.insert(on_port(1, 2), Class::Unproven, ()).unwrap();
    assert_eq!(table.insert(on_port(1, 3), Class::Live, ()), Err(TableFull::Port));
    assert!(table.insert(on_port(2, 3), Class::Live, ()).is_ok());
    table.remove(second);
    assert!(table.insert(on_port(1, 3), Class::Live, ()).is_ok());
}

#[test]
fn a_replaced_value_keeps_its_id_and_counts_once() {
    let mut table = FlowTable::new(1, SEEDS);
    let id = table.insert(key(1), Class::Live, 1).unwrap();
    assert_eq!(table.insert(key(1), Class::Spent, 2), Ok(id));
    assert_eq!((table.get(id), table.len(), table.len_of_port(3)), (Some(&2), 1, 1));
    assert_eq!(table.len_of_class(3, Class::Spent), 1);
}

#[test]
fn a_million_flows_cost_what_limits_says_and_no_shard_is_large() {
    const FLOWS: u32 = 1_000_000;
    assert_eq!(size_of::<Slot<Flow>>(), FLOW_STATE_BYTES + FLOW_SLOT_OVERHEAD);

    let mut table = FlowTable::new(16_384, SEEDS);
    table.set_capacity(FLOWS); // VMs that came later
    assert!(table.chunks.is_empty(), "memory is taken as flows come");
    for n in 0..FLOWS {
        table.insert(key(n), Class::Live, ()).unwrap();
    }
    assert_eq!(table.insert(key(FLOWS), Class::Live, ()), Err(TableFull::Table));
    let (bytes, largest) = table.index.bytes_and_largest();
    assert!(bytes <= FLOWS as usize * FLOW_INDEX_BYTES, "{bytes} bytes");
    assert!(largest < 1200, "the most that is moved at once: {largest}");
    assert!((0..FLOWS).step_by(997).all(|n| table.lookup(&key(n)).is_some()));
}
