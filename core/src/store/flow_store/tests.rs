//! Bytes come back as they were written, and every page goes back.

use super::*;
use crate::store::arena::tests::{memory, record};
use crate::store::record::name_hash;
use proptest::prelude::*;
use std::sync::LazyLock;

const PAGES: usize = 6;
/// Three bytes before a page boundary, above 2^32.
const BASE: u64 = (1 << 32) + 7 * PAGE_BYTES - 3;

const PERIOD: u64 = 251;
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| (0..251).cycle().take(25 * PAGE).collect());

/// The stream's byte at each address: all copies of a byte are the same (INV-15).
fn stream(from: u64, len: u64) -> &'static [u8] {
    &PATTERN[usize::try_from(from % PERIOD).unwrap()..][..usize::try_from(len).unwrap()]
}

fn read(store: &FlowStore, arena: &Arena<'_>, from: u64, to: u64) -> Vec<u8> {
    store.slices(arena, from, to).collect::<Vec<_>>().concat()
}

fn with_arena(pages: usize, test: impl FnOnce(&mut Arena<'_>, RecordId)) {
    let mut mem = memory(1, pages);
    let mut arena = Arena::format(&mut mem, 1, pages, 1).unwrap();
    let rec = arena.alloc_record(&record("vm")).unwrap();
    test(&mut arena, rec);
}

#[test]
fn bytes_come_back_whatever_order_they_were_written_in() {
    with_arena(PAGES, |arena, rec| {
        let mut store = FlowStore::default();
        assert!(store.write(arena, rec, BASE + 4, b"efgh"));
        assert!(store.write(arena, rec, BASE, b"abcd"));
        let pieces: Vec<&[u8]> = store.slices(arena, BASE, BASE + 8).collect();
        assert_eq!(pieces, [&b"abc"[..], b"defgh"]);
        store.release(arena, BASE + 8);
        assert_eq!((store.held_pages(), arena.free_pages()), (0, PAGES));
    });
}

#[test]
fn an_empty_write_keeps_no_page() {
    with_arena(PAGES, |arena, rec| {
        let mut store = FlowStore::default();
        let page_start = 9 * PAGE_BYTES;
        assert!(store.write(arena, rec, page_start, b"abc"));
        assert!(store.write(arena, rec, page_start + 100, b""));
        store.release(arena, page_start + 3);
        assert_eq!((store.held_pages(), arena.free_pages()), (0, PAGES));
    });
}

#[derive(Clone, Copy, Debug)]
enum Op {
    /// Write so many bytes so far above what was released.
    Write(u64, u64),
    /// Release so many bytes.
    Release(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let distance = || prop_oneof![0_u64..100, PAGE_BYTES - 2..PAGE_BYTES + 2, 0..6 * PAGE_BYTES,];
    prop_oneof![
        3 => (distance(), distance()).prop_map(|(at, len)| Op::Write(at, len)),
        1 => distance().prop_map(|at| Op::Write(at, 0)),
        1 => distance().prop_map(Op::Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn inv_03_what_was_written_is_held_until_it_is_released(
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let mut mem = memory(1, PAGES);
        let mut arena = Arena::format(&mut mem, 1, PAGES, 1).unwrap();
        let rec = arena.alloc_record(&record("vm")).unwrap();
        let mut store = FlowStore::default();
        let mut held = crate::store::ranges::Ranges::default();
        let mut released = BASE;
        for op in ops {
            match op {
                Op::Write(at, len) => {
                    let seq = released + at;
                    let before = (store.held_pages(), arena.free_pages());
                    if store.write(&mut arena, rec, seq, stream(seq, len)) {
                        held.insert(seq, seq + len);
                    } else {
                        prop_assert_eq!((store.held_pages(), arena.free_pages()), before);
                        let needed = FlowStore::pages_for(len);
                        prop_assert!(arena.free_pages() < usize::try_from(needed).unwrap());
                    }
                }
                Op::Release(by) => {
                    released += by;
                    store.release(&mut arena, released);
                    held.remove_below(released);
                }
            }
            for (from, to) in held.iter() {
                prop_assert!(read(&store, &arena, from, to) == stream(from, to - from));
            }
            prop_assert_eq!(store.held_pages() as usize + arena.free_pages(), PAGES);
            if held.is_empty() {
                prop_assert_eq!(store.held_pages(), 0, "an empty store holds no page");
            }
            // INV-06: no more pages than a window up to the highest byte is charged for.
            let window = held.max_end().map_or(0, |end| end - released);
            prop_assert!(u64::from(store.held_pages()) <= FlowStore::pages_for(window));
        }
        store.clear(&mut arena);
        prop_assert_eq!(arena.free_pages(), PAGES);
    }

    /// INV-03, LIFE-09: the daemon dies after any step; the next one finds every promised byte, and
    /// none of the other direction although these have the same numbers.
    #[test]
    fn a_restart_after_any_step_finds_every_promised_byte(
        sizes in prop::collection::vec((1_u64..30_000, 0_u64..30_000), 1..12),
        steps in 0_usize..48,
    ) {
        let mut mem = memory(1, 16);
        let mut arena = Arena::format(&mut mem, 1, 16, 1).unwrap();
        let init = Record { rcv_nxt: BASE, guest_una: BASE, guest_nxt: BASE, ..record("vm") };
        let rec = arena.alloc_record(&init).unwrap();
        let (mut store, mut outbound) = (FlowStore::default(), FlowStore::default());
        let lent = Owner::Lent(name_hash("vm"));
        let (mut rcv_nxt, mut guest_una) = (BASE, BASE);
        let mut step = 0;
        let mut alive = || {
            step += 1;
            step <= steps
        };
        for (written, acked) in sizes {
            let _ = alive() && outbound.write(&mut arena, lent, rcv_nxt, &[0xee; 9000]);
            let stored = alive() && store.write(&mut arena, rec, rcv_nxt, stream(rcv_nxt, written));
            if stored && alive() {
                rcv_nxt += written;
                arena.commit_rcv_nxt(rec, rcv_nxt);
            } else if stored {
                break;
            }
            let acked = (guest_una + acked).min(rcv_nxt);
            if alive() {
                guest_una = acked;
                arena.commit_guest_una(rec, guest_una);
            }
            if alive() {
                store.release(&mut arena, guest_una);
                outbound.release(&mut arena, guest_una);
            }
        }
        drop(arena);
        let mut arena = Arena::open(&mut mem).unwrap();
        let [flow] = &mut recover(&mut arena)[..] else { panic!("one flow") };
        prop_assert!(flow.complete);
        prop_assert_eq!((flow.record.guest_una, flow.record.rcv_nxt), (guest_una, rcv_nxt));
        let kept = read(&flow.store, &arena, guest_una, rcv_nxt);
        prop_assert!(kept == stream(guest_una, rcv_nxt - guest_una));
        let held = flow.store.held_pages() as usize;
        prop_assert_eq!(held + arena.free_pages(), 16);
        prop_assert!(held as u64 <= FlowStore::pages_for(rcv_nxt - guest_una));
        // And it goes on from there.
        if arena.free_pages() > 0 {
            prop_assert!(flow.store.write(&mut arena, flow.id, rcv_nxt, stream(rcv_nxt, 100)));
            prop_assert!(read(&flow.store, &arena, guest_una, rcv_nxt + 100)
                == stream(guest_una, rcv_nxt + 100 - guest_una));
        }
        flow.store.clear(&mut arena);
        prop_assert_eq!(arena.free_pages(), 16);
    }
}

#[test]
fn inv_21_a_promised_page_that_is_missing_is_reported() {
    let mut mem = memory(1, 4);
    let mut arena = Arena::format(&mut mem, 1, 4, 1).unwrap();
    let init = Record { rcv_nxt: BASE, guest_una: BASE, ..record("vm") };
    let rec = arena.alloc_record(&init).unwrap();
    let mut store = FlowStore::default();
    assert!(store.write(&mut arena, rec, BASE, stream(BASE, PAGE_BYTES)));
    arena.commit_rcv_nxt(rec, BASE + 2 * PAGE_BYTES);
    drop(arena);
    let mut arena = Arena::open(&mut mem).unwrap();
    let flows = recover(&mut arena);
    assert!(!flows[0].complete);
    assert_eq!(flows[0].record.name_hash, name_hash("vm"));
    assert_eq!((flows[0].store.held_pages(), arena.free_pages()), (0, 4));
}

#[test]
fn inv_21_two_pages_for_the_same_bytes_are_reported() {
    let mut mem = memory(1, 4);
    let mut arena = Arena::format(&mut mem, 1, 4, 1).unwrap();
    let init = Record { rcv_nxt: BASE + 2, guest_una: BASE, ..record("vm") };
    let rec = arena.alloc_record(&init).unwrap();
    arena.alloc_page(rec, BASE / PAGE_BYTES).unwrap();
    arena.alloc_page(rec, BASE / PAGE_BYTES).unwrap();
    drop(arena);
    let mut arena = Arena::open(&mut mem).unwrap();
    assert!(!recover(&mut arena)[0].complete);
    assert_eq!(arena.free_pages(), 4);
}

#[test]
fn inv_21_a_promise_larger_than_any_flow_may_make_is_reported() {
    let mut mem = memory(1, 4);
    let mut arena = Arena::format(&mut mem, 1, 4, 1).unwrap();
    let init = Record { rcv_nxt: BASE + (1 << 40), guest_una: BASE, ..record("vm") };
    let rec = arena.alloc_record(&init).unwrap();
    arena.alloc_page(rec, BASE / PAGE_BYTES + 1).unwrap();
    drop(arena);
    let mut arena = Arena::open(&mut mem).unwrap();
    assert!(!recover(&mut arena)[0].complete);
    assert_eq!(arena.free_pages(), 4);
}

#[test]
fn what_g_acknowledged_beyond_rcv_nxt_is_owed_to_nobody() {
    let mut mem = memory(1, 1);
    let mut arena = Arena::format(&mut mem, 1, 1, 1).unwrap();
    let init = Record { rcv_nxt: BASE, guest_una: BASE + 500, ..record("vm") };
    let rec = arena.alloc_record(&init).unwrap();
    let flows = recover(&mut arena);
    assert!(flows[0].complete);
    assert_eq!(flows[0].record.rcv_nxt, BASE + 500);
    assert_eq!(arena.record(rec).unwrap().rcv_nxt, BASE + 500);
}

#[test]
fn a_largest_window_fits_at_every_alignment_and_more_does_not() {
    let window = usize::try_from(FLOW_BUFFER_MAX).unwrap();
    let bytes = vec![7; window];
    with_arena(2100, |arena, rec| {
        for shift in [0, 1, PAGE_BYTES - 1] {
            let mut store = FlowStore::default();
            assert!(store.write(arena, rec, shift, &bytes));
            assert!(u64::from(store.held_pages()) <= FlowStore::pages_for(FLOW_BUFFER_MAX));
            assert!(!store.write(arena, rec, shift + FLOW_BUFFER_MAX + PAGE_BYTES, b"x"));
            store.clear(arena);
            assert!(store.slots.is_empty(), "an idle flow keeps no large table");
        }
        assert!(!FlowStore::default().write(arena, rec, u64::MAX, b"xy"), "end of numbers");
    });
}

#[test]
fn a_write_below_what_is_held_widens_the_window_downward() {
    with_arena(40, |arena, rec| {
        let mut store = FlowStore::default();
        let high = BASE + 30 * PAGE_BYTES;
        assert!(store.write(arena, rec, high, b"late"));
        assert!(store.write(arena, rec, BASE, b"early"));
        assert_eq!(store.held_pages(), 4, "two across a boundary each");
        assert_eq!(read(&store, arena, BASE, BASE + 5), b"early");
        store.release(arena, BASE + 5);
        assert_eq!(read(&store, arena, high, high + 4), b"late");
        store.release(arena, u64::MAX);
        assert_eq!(arena.free_pages(), 40);
    });
}

#[test]
fn an_idle_flow_has_no_heap_and_a_busy_one_does_not_allocate_again_and_again() {
    with_arena(PAGES, |arena, rec| {
        let mut store = FlowStore::default();
        assert_eq!((size_of_val(&store), store.slots.len()), (40, 0));
        let mut seq = BASE;
        for _ in 0..10 {
            assert!(store.write(arena, rec, seq, &[1; 1448]));
            seq += 1448;
            store.release(arena, seq);
            assert_eq!((store.held_pages(), store.slots.len()), (0, SLOTS_MIN));
        }
    });
}
