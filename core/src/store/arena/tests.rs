//! The arena keeps its promises whatever bytes it finds and whenever it is killed.

use super::*;
use crate::flow::key::FlowKey;
use crate::flow::key::tests::key;
use crate::store::record::{FLAG_SACK, FLAG_TS, L2Header, name_hash};

/// Memory for an arena. Large vectors are aligned to 16 by the system allocator.
pub(crate) fn memory(records: usize, pages: usize) -> Vec<u8> {
    vec![0xa5; Arena::layout_len(records, pages)]
}

pub(crate) fn record(vm: &str) -> Record {
    Record {
        name_hash: name_hash(vm),
        key: FlowKey { port: 0, vlan: 0x8100_0007_0000_0000, ..key(9) },
        l2_to_r: L2Header::new(&[3; 18]).unwrap(),
        l2_to_g: L2Header::new(&[4; 22]).unwrap(),
        ttl: 255,
        ttl_to_g: 63,
        s_g: 7,
        s_r: 14,
        flags: FLAG_TS | FLAG_SACK,
        mss_to_g: 1448,
        mss_to_r: 1220,
        rcv_nxt: 0x1_0000_0001,
        g_una: 0x1_0000_0001,
        g_nxt: 0x1_0000_0001,
        w_nxt: 77,
        h_re: 0x1_0001_0001,
        ts_emit_r: 5,
        ts_emit_g: 6,
    }
}

#[test]
fn a_record_reads_back_as_it_was_written() {
    let mut mem = memory(2, 1);
    let mut arena = Arena::format(&mut mem, 2, 1, 9).unwrap();
    let id = arena.alloc_record(&record("vm")).unwrap();
    drop(arena);
    let arena = Arena::open(&mut mem).unwrap();
    assert_eq!(arena.records().collect::<Vec<_>>(), [(id, record("vm"))]);
    assert_eq!(arena.instance(), 9);
}
