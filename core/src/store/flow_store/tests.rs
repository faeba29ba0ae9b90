//! Bytes come back as they were written, and every page goes back.

use super::*;
use crate::store::arena::tests::{memory, record};

const PAGES: usize = 6;

#[test]
fn bytes_come_back_whatever_order_they_were_written_in() {
    let mut mem = memory(1, PAGES);
    let mut arena = Arena::format(&mut mem, 1, PAGES, 1).unwrap();
    let rec = arena.alloc_record(&record("vm")).unwrap();
    let mut store = FlowStore::default();
    let base = 7 * PAGE_BYTES - 3;
    assert!(store.write(&mut arena, rec, base + 4, b"efgh"));
    assert!(store.write(&mut arena, rec, base, b"abcd"));
    let pieces: Vec<&[u8]> = store.slices(&arena, base, base + 8).collect();
    assert_eq!(pieces, [&b"abc"[..], b"defgh"]);
    store.release(&mut arena, base + 8);
    assert_eq!((store.held_pages(), arena.free_pages()), (0, PAGES));
}
