//! What a daemon finds at `daemon.arena`, and what it makes of it.

use std::os::unix::fs::PermissionsExt;

use nightporter_core::flow::key::FlowKey;
use nightporter_core::store::record::{L2Header, name_hash};
use nightporter_core::wire::packet::{IpAddr16, IpVersion};

use super::*;

/// A directory of its own for one test, removed afterwards.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("np-arena-{}-{name}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    fn path(&self) -> PathBuf {
        self.0.join("arena")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const SMALL: ArenaSize = ArenaSize { records: 8, pages: 4 };

/// A flow of guest "web1" that is owed `owed` bytes.
fn record(owed: u64) -> Record {
    let l2 = L2Header::new(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]).unwrap();
    Record {
        name_hash: name_hash("web1"),
        key: FlowKey {
            g_addr: IpAddr16::from_v4([10, 0, 0, 2]),
            r_addr: IpAddr16::from_v4([10, 0, 0, 9]),
            vlan: 0,
            g_port: 80,
            r_port: 40_001,
            port: 0,
            version: IpVersion::V4,
        },
        l2,
        ttl: 64,
        ttl_to_g: 63,
        s_g: 7,
        s_r: 7,
        flags: 0,
        mss_to_g: 1460,
        mss_to_r: 1460,
        rcv_nxt: (1 << 32) + 1001 + owed,
        guest_una: (1 << 32) + 1001,
        guest_nxt: (1 << 32) + 1001,
        net_nxt: (1 << 32) + 7,
        edge_to_net: (1 << 32) + 70_001,
        ts_emit_r: 0,
        ts_emit_g: 0,
    }
}

#[test]
fn a_missing_file_becomes_an_arena_that_only_its_owner_reads() {
    let dir = Dir::new("missing");
    let (arena, _lock) = open(&dir.path(), SMALL).unwrap();
    assert_eq!((arena.pages_total(), arena.records().count()), (4, 0));
    let meta = std::fs::metadata(dir.path()).unwrap();
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    assert_eq!(meta.len(), SMALL.len() as u64);
}

#[test]
fn a_second_daemon_on_the_same_file_is_told_so() {
    let dir = Dir::new("second");
    let first = open(&dir.path(), SMALL).unwrap();
    let e = open(&dir.path(), SMALL).unwrap_err();
    assert!(matches!(e, ArenaFileError::InUse(_)), "{e}");
    drop(first);
    open(&dir.path(), SMALL).unwrap();
}

#[test]
fn promises_outlive_their_daemon_in_an_arena_of_the_same_size() {
    let dir = Dir::new("same");
    let (mut arena, lock) = open(&dir.path(), SMALL).unwrap();
    arena.alloc_record(&record(0)).unwrap();
    arena.alloc_record(&record(500)).unwrap();
    drop((arena, lock));
    let (arena, _lock) = open(&dir.path(), SMALL).unwrap();
    assert_eq!(arena.records().map(|(_, r)| r).collect::<Vec<_>>(), [record(0), record(500)]);
}

#[test]
fn what_is_owed_is_carried_into_an_arena_of_another_size() {
    let dir = Dir::new("other");
    let (mut arena, lock) = open(&dir.path(), SMALL).unwrap();
    arena.alloc_record(&record(0)).unwrap();
    arena.alloc_record(&record(500)).unwrap();
    drop((arena, lock));
    let larger = ArenaSize { records: 8, pages: 9 };
    let (arena, _lock) = open(&dir.path(), larger).unwrap();
    assert_eq!(arena.pages_total(), 9);
    assert_eq!(arena.records().map(|(_, r)| r).collect::<Vec<_>>(), [record(500)]);
    assert!(!dir.0.join("arena.new").exists());
    let e = open(&dir.path(), larger).unwrap_err();
    assert!(matches!(e, ArenaFileError::InUse(_)), "the new file is locked too: {e}");
}

#[test]
fn promises_beyond_a_lowered_flow_limit_are_carried_over_too() {
    let dir = Dir::new("lowered");
    let (mut arena, lock) = open(&dir.path(), SMALL).unwrap();
    arena.alloc_record(&record(500)).unwrap();
    arena.alloc_record(&record(600)).unwrap();
    drop((arena, lock));
    let lower = ArenaSize { records: 1, pages: 9 };
    let (arena, _lock) = open(&dir.path(), lower).unwrap();
    assert_eq!(arena.records().map(|(_, r)| r).collect::<Vec<_>>(), [record(500), record(600)]);
}

#[test]
fn a_daemon_that_owes_nothing_leaves_nothing() {
    let dir = Dir::new("remove");
    let (_arena, lock) = open(&dir.path(), SMALL).unwrap();
    lock.remove().unwrap();
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 0);
}

#[test]
fn somebody_elses_file_is_left_alone() {
    let dir = Dir::new("file");
    std::fs::write(dir.path(), [7; 10_000]).unwrap();
    let e = open(&dir.path(), SMALL).unwrap_err();
    assert!(matches!(e, ArenaFileError::NotAnArena(_)), "{e}");
    assert_eq!(std::fs::read(dir.path()).unwrap(), [7; 10_000]);
}

#[test]
fn no_room_is_an_error_with_the_size_and_leaves_nothing_behind() {
    let dir = Dir::new("room");
    // 64 TiB: no tmpfs has that.
    let size = ArenaSize { records: 8, pages: 1 << 32 };
    let e = open(&dir.path(), size).unwrap_err();
    assert!(matches!(e, ArenaFileError::NoRoom { .. } | ArenaFileError::Io(..)), "{e}");
    assert!(!dir.0.join("arena.new").exists());
    open(&dir.path(), SMALL).unwrap();
}

#[test]
fn the_size_follows_from_budgets_and_flows() {
    assert_eq!(ArenaSize::new(64 << 20, 16384), ArenaSize { records: 16384, pages: 4096 });
    assert_eq!(ArenaSize::new(1, 1).pages, 1);
}
