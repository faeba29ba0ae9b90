//! The arena keeps its promises whatever bytes it finds and whenever it is killed.

use super::*;
use crate::flow::key::FlowKey;
use crate::flow::key::tests::key;
use crate::limits::FLOW_RECORD_BYTES;
use crate::store::flow_store::recover;
use crate::store::record::{FLAG_SACK, FLAG_TS, Fins, L2Header, MARK_RESUMABLE, name_hash};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Memory that holds garbage. Large vectors are aligned to 16 by the system allocator.
pub(crate) fn memory(records: usize, pages: usize) -> Vec<u8> {
    vec![0xa5; Arena::layout_len(records, pages)]
}

/// A flow of this VM that owes nothing.
pub(crate) fn record(vm: &str) -> Record {
    Record {
        name_hash: name_hash(vm),
        network_hash: 0x1234_5678,
        key: FlowKey { port: 0, vlan: 0x8100_0007_0000_0000, ..key(9) },
        l2: L2Header::new(&[3; 18]).unwrap(),
        ttl: 255,
        ttl_to_g: 63,
        s_g: 7,
        s_r: 14,
        flags: FLAG_TS | FLAG_SACK,
        mss_to_g: 1448,
        mss_to_r: 1220,
        rcv_nxt: 0x1_0000_0001,
        guest_una: 0x1_0000_0001,
        guest_nxt: 0x1_0000_0001,
        guest_isn: 76,
        marks: MARK_RESUMABLE,
        fins: Fins { next: true, taken: true, given: true },
        net_nxt: 0x2_0000_004d,
        net_una: 0x1_ffff_fff0,
        net_window: 501,
        edge_to_net: 0x1_0001_0001,
        ts_recent: 6,
        ts_recent_at: 3,
        ts_emit_r: 5,
        ts_emit_g: 6,
    }
}

/// The 8-byte words in which two states of the memory differ, as `(byte offset, new bytes)`.
fn changed_words(before: &[u8], after: &[u8]) -> Vec<(usize, [u8; 8])> {
    let (old, _) = before.as_chunks::<8>();
    let (new, _) = after.as_chunks::<8>();
    let words = old.iter().zip(new).enumerate();
    words.filter(|(_, (o, n))| o != n).map(|(i, (_, n))| (i * 8, *n)).collect()
}

/// Where word `word` of record 0 is.
fn record_word(word: usize) -> usize {
    HEADER_BYTES + word * 8
}

#[test]
fn life_09_a_record_reads_back_as_it_was_written() {
    let mut mem = memory(2, 1);
    let mut arena = Arena::format(&mut mem, 2, 1, 9).unwrap();
    let id = arena.alloc_record(&record("vm")).unwrap();
    drop(arena);
    let arena = Arena::open(&mut mem).unwrap();
    assert_eq!(arena.records().collect::<Vec<_>>(), [(id, record("vm"))]);
    assert_eq!(arena.record(id), Some(record("vm")));
    assert_eq!(arena.instance(), 9);
}

#[test]
fn each_commit_changes_one_aligned_word_and_nothing_else() {
    type Commit = fn(&mut Arena<'_>, RecordId);
    type Expect = fn(&mut Record);
    const MOST: u64 = u64::MAX >> 1;
    let commits: [(Commit, Expect); 3] = [
        (|a, id| a.commit_rcv_nxt(id, MOST), |r| (r.rcv_nxt, r.fins.next) = (MOST, false)),
        (|a, id| a.commit_guest_una(id, MOST), |r| (r.guest_una, r.fins.taken) = (MOST, false)),
        (|a, id| a.commit_edge_to_net(id, u64::MAX), |r| r.edge_to_net = u64::MAX),
    ];
    for (commit, expect) in commits {
        let mut mem = memory(2, 1);
        let mut arena = Arena::format(&mut mem, 2, 1, 9).unwrap();
        let id = arena.alloc_record(&record("vm")).unwrap();
        drop(arena);
        let before = mem.clone();
        let mut arena = Arena::open(&mut mem).unwrap();
        commit(&mut arena, id);
        let mut expected = record("vm");
        expect(&mut expected);
        assert_eq!(arena.record(id), Some(expected));
        drop(arena);
        assert_eq!(changed_words(&before, &mem).len(), 1);
    }
}

#[test]
fn a_commit_of_all_progress_reads_back_and_leaves_the_rest() {
    let mut mem = memory(2, 1);
    let mut arena = Arena::format(&mut mem, 2, 1, 9).unwrap();
    let id = arena.alloc_record(&record("vm")).unwrap();
    let (rcv_nxt, guest_una, guest_nxt, edge_to_net) = (1 << 40, 2 << 40, 3 << 40, 5 << 40);
    let (net_nxt, net_una, net_window) = (0x2_1234_5678, 0x2_1234_0000, 9);
    let (ts_recent, ts_recent_at, ts_emit_r, ts_emit_g) = (60, 65, 70, 80);
    let progress = Progress {
        rcv_nxt,
        guest_una,
        guest_nxt,
        net_nxt,
        net_una,
        net_window,
        edge_to_net,
        ts_recent,
        ts_recent_at,
        ts_emit_r,
        ts_emit_g,
        fins: Fins { next: false, taken: true, given: false },
    };
    arena.commit(id, &progress);
    let all = Record {
        rcv_nxt,
        guest_una,
        guest_nxt,
        net_nxt,
        net_una,
        net_window,
        edge_to_net,
        ts_recent,
        ts_recent_at,
        ts_emit_r,
        ts_emit_g,
        fins: progress.fins,
        ..record("vm")
    };
    assert_eq!(arena.record(id), Some(all));
}

proptest! {
    /// Any subset of the stores of an allocation, in any order, as long as the state word is
    /// missing: no half-written record is ever seen.
    #[test]
    fn life_09_a_half_written_record_is_ignored(keep: u32) {
        let mut mem = memory(1, 1);
        drop(Arena::format(&mut mem, 1, 1, 9).unwrap());
        let before = mem.clone();
        let mut arena = Arena::open(&mut mem).unwrap();
        arena.alloc_record(&record("vm")).unwrap();
        drop(arena);
        let mut killed = before.clone();
        for (i, (at, bytes)) in changed_words(&before, &mem).into_iter().enumerate() {
            let is_mark = at == header::RECORDS_USED * 8;
            if is_mark || (at != record_word(record::STATE) && keep & 1 << (i % 32) != 0) {
                killed[at..at + 8].copy_from_slice(&bytes);
            }
        }
        // The state word was cleared before the mark moved.
        killed[record_word(record::STATE)..][..8].fill(0);
        let mut arena = Arena::open(&mut killed).unwrap();
        prop_assert_eq!(arena.records().count(), 0);
        prop_assert_eq!(arena.free_records(), 1);
        prop_assert!(arena.alloc_record(&record("vm")).is_some());
    }

    #[test]
    fn no_bytes_whatever_make_open_or_what_follows_panic(
        noise in prop::collection::vec((0_usize..20_000, any::<u64>()), 0..40),
        cut in 0_usize..9000,
        keep_header: bool,
    ) {
        let mut mem = memory(4, 3);
        let mut arena = Arena::format(&mut mem, 4, 3, 9).unwrap();
        let ids: Vec<_> = (0..3).map(|_| arena.alloc_record(&record("vm")).unwrap()).collect();
        for page_no in [0x4_0000, 0x4_0001] {
            arena.alloc_page(ids[0], page_no).unwrap();
        }
        arena.commit_rcv_nxt(ids[0], 0x1_0000_7000);
        arena.free_record(ids[1]);
        drop(arena);
        for (at, value) in noise {
            // Most of the noise goes where the structure is: header, records, descriptors.
            let structure = HEADER_BYTES + 4 * FLOW_RECORD_BYTES + 3 * 16;
            let at = if at % 4 == 0 { at } else { at % structure };
            if keep_header && at < HEADER_BYTES {
                continue;
            }
            let at = if at < HEADER_BYTES { at % 80 } else { at } & !7;
            let value = if value % 3 == 0 { value % 8 } else { value };
            mem[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let len = if cut < 100 { mem.len() - cut } else { mem.len() };
        if let Ok(mut arena) = Arena::open(&mut mem[..len]) {
            let flows = recover(&mut arena);
            let held: usize = flows.iter().map(|f| f.store.held_pages() as usize).sum();
            prop_assert_eq!(held + arena.free_pages(), arena.pages_total());
            prop_assert_eq!(flows.len() + arena.free_records(), arena.ready.records);
            for flow in &flows {
                let (from, to) = (flow.record.guest_una, flow.record.rcv_nxt);
                if flow.complete {
                    let pieces = flow.store.slices(&arena, from, to).map(<[u8]>::len);
                    prop_assert_eq!(pieces.sum::<usize>() as u64, to - from);
                }
            }
            while let Some(id) = arena.alloc_record(&record("other")) {
                arena.alloc_page(id, 1);
            }
        }
    }

    #[test]
    fn random_bytes_are_no_arena(mut bytes in prop::collection::vec(any::<u8>(), 0..6000)) {
        prop_assert!(Arena::open(&mut bytes).is_err());
    }

    #[test]
    fn pages_and_records_are_handed_out_once_and_come_back(
        ops in prop::collection::vec((0_u8..4, 0_usize..8), 1..80),
        reopen_at in 0_usize..80,
    ) {
        const RECORDS: usize = 4;
        const PAGES: usize = 5;
        let mut mem = memory(RECORDS, PAGES);
        drop(Arena::format(&mut mem, RECORDS, PAGES, 9).unwrap());
        let mut records: Vec<RecordId> = Vec::new();
        let mut pages: Vec<(RecordId, u64, PageId)> = Vec::new();
        let (before, after) = ops.split_at(reopen_at.min(ops.len()));
        for ops in [before, after] {
            let mut arena = Arena::open(&mut mem).unwrap();
            for &(op, n) in ops {
                match op {
                    0 => match arena.alloc_record(&record("vm")) {
                        Some(id) => {
                            prop_assert!(!records.contains(&id));
                            records.push(id);
                        }
                        None => prop_assert_eq!(records.len(), RECORDS),
                    },
                    1 if !records.is_empty() => {
                        let id = records.remove(n % records.len());
                        for (_, _, page) in pages.extract_if(.., |p| p.0 == id) {
                            arena.free_page(page);
                        }
                        arena.free_record(id);
                    }
                    2 if !records.is_empty() => {
                        let id = records[n % records.len()];
                        match arena.alloc_page(id, n as u64) {
                            Some(page) => {
                                prop_assert!(pages.iter().all(|p| p.2 != page));
                                pages.push((id, n as u64, page));
                            }
                            None => prop_assert_eq!(pages.len(), PAGES),
                        }
                    }
                    3 if !pages.is_empty() => {
                        arena.free_page(pages.remove(n % pages.len()).2);
                    }
                    _ => {}
                }
                prop_assert_eq!(arena.free_pages(), PAGES - pages.len());
                prop_assert_eq!(arena.free_records(), RECORDS - records.len());
            }
            let live: BTreeSet<RecordId> = arena.records().map(|(id, _)| id).collect();
            prop_assert_eq!(live, records.iter().copied().collect::<BTreeSet<_>>());
            let mut owned: Vec<_> = arena.owned_pages().collect();
            owned.sort_by_key(|p| p.2.index());
            pages.sort_by_key(|p| p.2.index());
            prop_assert_eq!(&owned, &pages);
        }
    }
}

#[test]
fn a_record_with_a_changed_static_word_is_ignored_and_so_are_its_pages() {
    for word in record::STATIC..record::WORDS {
        let mut mem = memory(1, 1);
        let mut arena = Arena::format(&mut mem, 1, 1, 9).unwrap();
        let id = arena.alloc_record(&record("vm")).unwrap();
        arena.alloc_page(id, 7).unwrap();
        drop(arena);
        mem[record_word(word)] ^= 1;
        let arena = Arena::open(&mut mem).unwrap();
        assert_eq!((arena.records().count(), arena.free_records()), (0, 1), "word {word}");
        assert_eq!((arena.owned_pages().count(), arena.free_pages()), (0, 1), "word {word}");
    }
}

#[test]
fn what_is_not_an_arena_of_ours_is_named() {
    let mut mem = memory(1, 1);
    drop(Arena::format(&mut mem, 1, 1, 9).unwrap());
    let with = |at: usize, value: u64| {
        let mut copy = mem.clone();
        copy[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes());
        Arena::open(&mut copy).err()
    };
    assert_eq!(with(header::INSTANCE, 10), None);
    assert_eq!(with(header::MAGIC, 0), Some(ArenaError::NotAnArena));
    assert_eq!(with(header::VERSION, VERSION + 1), Some(ArenaError::OtherLayout));
    assert_eq!(with(header::SIZES, SIZES + 1), Some(ArenaError::OtherLayout));
    let counts = [header::RECORDS, header::PAGES, header::RECORDS_USED, header::PAGES_USED];
    for word in counts.into_iter().chain([header::RECORDS_READY, header::PAGES_READY]) {
        for value in [100, 1 << 40, u64::MAX] {
            assert_eq!(with(word, value), Some(ArenaError::WrongLength), "{word} {value}");
        }
    }
    assert_eq!(Arena::open(&mut []).err(), Some(ArenaError::NotAnArena));
    assert_eq!(Arena::open(&mut memory(1, 1)).err(), Some(ArenaError::NotAnArena));
    let misaligned = Arena::format(&mut vec![0; mem.len() + 1][1..], 1, 1, 9).err();
    assert_eq!(misaligned, Some(ArenaError::Misaligned));
    let short = Arena::format(&mut mem[1..], 1, 1, 9).err();
    assert_eq!(short, Some(ArenaError::WrongLength));
}

#[test]
fn a_page_of_a_freed_record_is_free_after_a_kill_between_the_two() {
    let mut mem = memory(1, 2);
    let mut arena = Arena::format(&mut mem, 1, 2, 9).unwrap();
    let id = arena.alloc_record(&record("vm")).unwrap();
    arena.alloc_page(id, 7).unwrap();
    arena.free_record(id);
    // The same slot, but another flow: the page names the generation before.
    arena.alloc_record(&record("vm")).unwrap();
    drop(arena);
    let arena = Arena::open(&mut mem).unwrap();
    assert_eq!((arena.free_pages(), arena.owned_pages().count()), (2, 0));
}

#[test]
fn a_kill_while_a_page_changes_owner_leaves_it_with_its_number_or_free() {
    let mut mem = memory(1, 1);
    let mut arena = Arena::format(&mut mem, 1, 1, 9).unwrap();
    let id = arena.alloc_record(&record("vm")).unwrap();
    let page = arena.alloc_page(id, 7).unwrap();
    arena.free_page(page);
    drop(arena);
    let before = mem.clone();
    let mut arena = Arena::open(&mut mem).unwrap();
    arena.alloc_page(id, 8).unwrap();
    drop(arena);
    let stores: Vec<_> = changed_words(&before, &mem)
        .into_iter()
        .filter(|(at, _)| *at < before.len() - PAGE)
        .collect();
    let [owner, page_no] = stores[..] else { panic!("two words: {stores:?}") };
    // The number alone: the page is still free.
    let mut killed = before.clone();
    killed[page_no.0..page_no.0 + 8].copy_from_slice(&page_no.1);
    assert_eq!(Arena::open(&mut killed).unwrap().owned_pages().count(), 0);
    // Both: it has its new number.
    killed[owner.0..owner.0 + 8].copy_from_slice(&owner.1);
    assert_eq!(Arena::open(&mut killed).unwrap().owned_pages().next().unwrap().1, 8);
}

#[test]
fn sec_10_no_byte_of_one_vm_is_in_a_page_of_another() {
    const PAGES: usize = 4;
    let mut mem = memory(2, PAGES);
    let mut arena = Arena::format(&mut mem, 2, PAGES, 9).unwrap();
    let a = arena.alloc_record(&record("a")).unwrap();
    let b = arena.alloc_record(&record("b")).unwrap();
    let fill = |arena: &mut Arena<'_>, id, byte| {
        let pages: Vec<_> = (0..PAGES as u64).map(|n| arena.alloc_page(id, n).unwrap()).collect();
        let seen: BTreeSet<u8> = pages.iter().flat_map(|&p| *arena.page(p)).collect();
        for page in pages {
            arena.write(page, 0, &[byte; PAGE]);
            arena.free_page(page);
        }
        seen
    };
    assert_eq!(fill(&mut arena, a, b'a'), [0].into(), "first use: not what was there before");
    assert_eq!(fill(&mut arena, a, b'a'), [b'a'].into(), "its own bytes: no work");
    assert_eq!(fill(&mut arena, b, b'b'), [0].into());
    assert_eq!(fill(&mut arena, a, b'a'), [0].into());
    drop(arena);
    let mut arena = Arena::open(&mut mem).unwrap();
    assert_eq!(fill(&mut arena, a, b'a'), [0].into(), "after a restart the past is unknown");
}

#[test]
fn sec_10_a_lent_page_is_zeroed_for_another_vm_too_and_is_handed_out_once() {
    let mut mem = memory(1, 1);
    let mut arena = Arena::format(&mut mem, 1, 1, 9).unwrap();
    let a = arena.alloc_record(&record("a")).unwrap();
    let (hash_a, hash_b) = (name_hash("a"), name_hash("b"));
    for (vm, seen) in [(hash_a, 0), (hash_a, 1), (hash_b, 0), (hash_a, 0)] {
        let page = arena.lend_page(vm).unwrap();
        assert_eq!(arena.page(page), &[seen; PAGE]);
        arena.write(page, 0, &[1; PAGE]);
        assert_eq!((arena.lend_page(vm), arena.alloc_page(a, 7)), (None, None));
        assert_eq!((arena.free_pages(), arena.owned_pages().count()), (0, 0));
        arena.free_page(page);
    }
    let page = arena.alloc_page(a, 7).unwrap();
    assert_eq!((arena.page(page), arena.owned_pages().count()), (&[1; PAGE], 1));
}

#[test]
fn life_09_a_page_that_was_forgotten_is_lent_without_the_owner_it_had() {
    let mut mem = memory(1, 1);
    let mut arena = Arena::format(&mut mem, 1, 1, 9).unwrap();
    let id = arena.alloc_record(&record("vm")).unwrap();
    arena.alloc_page(id, 7).unwrap();
    arena.forget_pages(); // the record stays: its R has yet to be told
    arena.lend_page(name_hash("other")).unwrap();
    assert_eq!(arena.owned_pages().count(), 0);
    drop(arena);
    let arena = Arena::open(&mut mem).unwrap();
    assert_eq!((arena.records().count(), arena.owned_pages().count()), (1, 0));
    assert_eq!(arena.free_pages(), 1);
}

#[test]
fn formatting_touches_the_header_only() {
    let mut mem = memory(100, 10);
    drop(Arena::format(&mut mem, 100, 10, 9).unwrap());
    assert!(mem[HEADER_BYTES..].iter().all(|&b| b == 0xa5));
}

#[test]
fn a_name_hashes_as_fnv_1a_says() {
    // From the FNV reference vectors.
    assert_eq!(name_hash(""), 0xcbf2_9ce4_8422_2325);
    assert_eq!(name_hash("foobar"), 0x8594_4171_f739_67e8);
}

#[test]
fn an_arena_grows_where_it_is_and_its_successor_knows_how_far() {
    let mut mem = memory(4, 5);
    let mut arena = Arena::format(&mut mem, 4, 5, 9).unwrap();
    let places = ArenaSize { records: 4, pages: 5 };
    let [small, large] = [(1, 2), (3, 5)].map(|(records, pages)| ArenaSize { records, pages });
    arena.resize(small);
    let id = arena.alloc_record(&record("vm")).unwrap();
    assert!(arena.alloc_record(&record("vm")).is_none());
    let first = arena.alloc_page(id, 0).unwrap();
    arena.write(first, 0, b"promised");
    arena.alloc_page(id, 1).unwrap();
    assert!(arena.alloc_page(id, 2).is_none() && arena.lend_page(7).is_none());
    assert_eq!((arena.free_pages(), arena.free_records(), arena.pages_total()), (0, 0, 2));
    arena.resize(large);
    assert_eq!((arena.free_pages(), arena.free_records(), arena.pages_total()), (3, 2, 5));
    arena.alloc_record(&record("vm")).unwrap();
    arena.alloc_page(id, 2).unwrap();
    drop(arena);
    assert_eq!(Arena::sizes_of(&mem), Ok((places, large)));
    let mut arena = Arena::open(&mut mem).unwrap();
    assert_eq!((arena.free_pages(), arena.free_records(), arena.pages_total()), (2, 1, 5));
    assert_eq!(&arena.page(first)[..8], b"promised");
    arena.forget_pages();
    arena.resize(ArenaSize { records: 2, pages: 1 });
    assert_eq!((arena.free_pages(), arena.records().count()), (1, 2));
    drop(arena);
    let arena = Arena::open(&mut mem).unwrap();
    assert_eq!((arena.free_pages(), arena.owned_pages().count()), (1, 0));
}

#[test]
fn what_needs_memory_is_where_records_descriptors_and_pages_are() {
    let places = ArenaSize { records: 100, pages: 1000 };
    let all = Arena::layout_len(100, 1000);
    let ranges = Arena::ranges(places, ArenaSize { records: 3, pages: 10 });
    assert_eq!(ranges[0], 0..HEADER_BYTES + 3 * FLOW_RECORD_BYTES);
    assert_eq!(ranges[1].start, HEADER_BYTES + 100 * FLOW_RECORD_BYTES);
    assert_eq!((ranges[1].len(), ranges[2].len()), (160, 10 * PAGE));
    assert_eq!(ranges[2].start, all - 1000 * PAGE);
    assert_eq!(Arena::ranges(places, places)[2].end, all);
}
