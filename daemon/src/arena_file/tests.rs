//! How a daemon treats the file or directory that it finds at `daemon.arena`.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use nightporter_core::flow::key::FlowKey;
use nightporter_core::store::record::{Fins, L2Header, Record, name_hash};
use nightporter_core::wire::packet::{IpAddr16, IpVersion};

use super::*;

/// A directory of its own for one test, removed afterwards.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let dir = PathBuf::from(format!("/dev/shm/np-arena-{}-{name}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    fn path(&self) -> PathBuf {
        self.0.join("arena")
    }

    /// Bytes of memory that the file has.
    fn memory(&self) -> u64 {
        std::fs::metadata(self.path()).unwrap().blocks() * 512
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const SMALL: ArenaSize = ArenaSize { records: 8, pages: 4 };

/// The daemon that had it ends.
fn end(arena: Arena<'static>, lock: ArenaFile) {
    sys::end_of_process(arena, lock.file);
}

/// Memory of an arena of this size, in whole pages.
fn memory_of(size: ArenaSize) -> u64 {
    let pages = Arena::ranges(PLACES, size).map(|r| r.end.div_ceil(4096) - r.start / 4096);
    pages.iter().sum::<usize>() as u64 * 4096
}

/// A flow of guest "web1" that is owed `owed` bytes.
fn record(owed: u64) -> Record {
    let l2 = L2Header::new(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]).unwrap();
    Record {
        name_hash: name_hash("web1"),
        network_hash: 0,
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
        guest_isn: 6,
        marks: 0,
        fins: Fins::default(),
        net_nxt: (2 << 32) + 7,
        net_una: (2 << 32) + 7,
        net_window: 0,
        edge_to_net: (1 << 32) + 70_001,
        ts_recent: 0,
        ts_recent_at: 0,
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
    assert_eq!(dir.memory(), memory_of(SMALL));
}

#[test]
fn a_second_daemon_on_the_same_file_is_told_so() {
    let dir = Dir::new("second");
    let first = open(&dir.path(), SMALL).unwrap();
    let e = open(&dir.path(), SMALL).unwrap_err();
    assert!(matches!(e, ArenaFileError::InUse(_)), "{e}");
    end(first.0, first.1);
    open(&dir.path(), SMALL).unwrap();
}

#[test]
fn a_daemon_that_is_just_ending_is_waited_for() {
    let dir = Dir::new("ending");
    let first = open(&dir.path(), SMALL).unwrap();
    let path = dir.path();
    let second = std::thread::spawn(move || open(&path, SMALL).map(drop));
    let start = std::time::Instant::now();
    while start.elapsed() < 2 * BETWEEN_TRIES {
        std::thread::yield_now(); // it finds the first one there
    }
    end(first.0, first.1);
    second.join().unwrap().unwrap();
}

#[test]
fn a_run_that_settles_is_waited_for_however_long_its_taps_take() {
    let dir = Dir::new("settles");
    assert!(left_at(&dir.path()).is_none());
    let first = open(&dir.path(), SMALL).unwrap();
    assert!(left_at(&dir.path()).is_none(), "its daemon is there");
    end(first.0, first.1);
    let left = left_at(&dir.path()).unwrap();
    assert_eq!(left.size, SMALL);
    let settles = open(&dir.path(), SMALL).unwrap();
    let path = dir.path();
    let (end_of_wait, waits) = std::sync::mpsc::channel();
    let starts = std::thread::spawn(move || {
        let opened = open(&path, SMALL).map(drop);
        end_of_wait.send(()).unwrap();
        opened
    });
    let longer = BETWEEN_TRIES * u32::try_from(TRIES + 10).unwrap();
    assert!(waits.recv_timeout(longer).is_err());
    end(settles.0, settles.1);
    starts.join().unwrap().unwrap();
}

#[test]
fn one_that_has_waited_is_told_of_others_that_wait() {
    let dir = Dir::new("wanted");
    let waits = || {
        let path = dir.path();
        std::thread::spawn(move || open(&path, SMALL))
    };
    let first = open(&dir.path(), SMALL).unwrap();
    assert!(!first.1.is_wanted());
    let second = waits();
    while !first.1.is_wanted() {
        std::thread::yield_now();
    }
    end(first.0, first.1);
    let second = second.join().unwrap().unwrap();
    assert!(!second.1.is_wanted());
    let third = waits();
    while !third.is_finished() && !second.1.is_wanted() {
        std::thread::yield_now();
    }
    assert!(second.1.is_wanted());
    end(second.0, second.1);
    third.join().unwrap().unwrap();
}

#[test]
fn an_arena_that_its_daemon_removes_as_it_ends_is_not_taken_over() {
    let dir = Dir::new("removed");
    let first = open(&dir.path(), SMALL).unwrap();
    let path = dir.path();
    let second = std::thread::spawn(move || open(&path, SMALL));
    let start = std::time::Instant::now();
    while start.elapsed() < 2 * BETWEEN_TRIES {
        std::thread::yield_now(); // it has opened the file, and waits for its lock
    }
    first.1.remove().unwrap();
    end(first.0, first.1);
    let (_arena, second) = second.join().unwrap().unwrap();
    let there = std::fs::metadata(dir.path()).unwrap();
    assert_eq!(second.file.metadata().unwrap().ino(), there.ino());
    let e = open(&dir.path(), SMALL).unwrap_err();
    assert!(matches!(e, ArenaFileError::InUse(_)), "{e}");
    // A file that is not its own stays.
    std::fs::rename(dir.path(), dir.0.join("away")).unwrap();
    std::fs::write(dir.path(), "precious").unwrap();
    second.remove().unwrap();
    assert!(dir.path().exists());
}

#[test]
fn an_arena_that_is_left_is_the_next_ones_unless_it_is_damaged() {
    let dir = Dir::new("left");
    let left = || dir.0.join("arena.empty");
    let larger = ArenaSize { records: 16, pages: 9 };
    let (mut inode, mut records) = (None, 0);
    for (known, size) in (0..).zip([SMALL, larger, SMALL]) {
        let (mut arena, file) = open(&dir.path(), size).unwrap();
        assert!(file.is_new == (known == 0) && !left().exists());
        assert_eq!((arena.pages_total(), arena.records().count()), (size.pages, known));
        records = size.records.max(records);
        assert_eq!(dir.memory(), memory_of(ArenaSize { records, ..size }));
        let own = file.file.metadata().unwrap().ino();
        assert_eq!(*inode.get_or_insert(own), own);
        arena.alloc_record(&record(0)).unwrap();
        file.leave().unwrap();
        assert!(left().exists() && !dir.path().exists());
        end(arena, file);
    }
    // One that lacks memory or is another's makes place for a new one.
    let punch = |file: &File| {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let [.., pages] = Arena::ranges(PLACES, SMALL);
        fallocate(file, flags, bytes(pages.start), bytes(pages.len())).unwrap();
    };
    let other = |file: &File| file.write_all_at(&[0xff; 64], 0).unwrap();
    let short = |file: &File| file.set_len(100).unwrap();
    let damages: [&dyn Fn(&File); 3] = [&punch, &other, &short];
    for damage in damages {
        damage(&OpenOptions::new().write(true).open(left()).unwrap());
        let (arena, file) = open(&dir.path(), SMALL).unwrap();
        assert_eq!((arena.pages_total(), arena.records().count()), (4, 0));
        assert_eq!(dir.memory(), memory_of(SMALL));
        file.leave().unwrap();
        end(arena, file);
    }
    // A file that is not its own is not taken.
    std::fs::hard_link(left(), dir.0.join("name")).unwrap();
    let (_arena, file) = open(&dir.path(), SMALL).unwrap();
    assert_ne!(Some(file.file.metadata().unwrap().ino()), inode);
}

#[test]
fn promises_outlive_their_daemon_in_an_arena_of_the_same_size() {
    let dir = Dir::new("same");
    let (mut arena, lock) = open(&dir.path(), SMALL).unwrap();
    arena.alloc_record(&record(0)).unwrap();
    arena.alloc_record(&record(500)).unwrap();
    end(arena, lock);
    let (arena, _lock) = open(&dir.path(), SMALL).unwrap();
    assert_eq!(arena.records().map(|(_, r)| r).collect::<Vec<_>>(), [record(0), record(500)]);
}

#[test]
fn a_larger_arena_keeps_all_that_was_promised_and_takes_no_more_memory_than_it_has_to() {
    let dir = Dir::new("larger");
    let (mut arena, lock) = open(&dir.path(), SMALL).unwrap();
    let id = arena.alloc_record(&record(500)).unwrap();
    let page = arena.alloc_page(id, 0).unwrap();
    arena.write(page, 0, b"promised");
    end(arena, lock);
    let larger = ArenaSize { records: 8, pages: 9 };
    let (arena, lock) = open(&dir.path(), larger).unwrap();
    assert_eq!((arena.pages_total(), dir.memory()), (9, memory_of(larger)));
    assert_eq!(arena.records().map(|(_, r)| r).collect::<Vec<_>>(), [record(500)]);
    assert_eq!(&arena.page(page)[..8], b"promised");
    assert!(!lock.is_new && !dir.0.join("arena.new").exists());
    let e = open(&dir.path(), larger).unwrap_err();
    assert!(matches!(e, ArenaFileError::InUse(_)), "it is still locked: {e}");
}

#[test]
fn an_arena_gets_smaller_and_gives_its_memory_back_once_nobody_is_owed_anything() {
    let dir = Dir::new("smaller");
    let large = ArenaSize { records: 8, pages: 400 };
    let (mut arena, lock) = open(&dir.path(), large).unwrap();
    let id = arena.alloc_record(&record(500)).unwrap();
    let pages: Vec<_> = (0..300).map(|n| arena.alloc_page(id, n).unwrap()).collect();
    arena.write(pages[299], 0, b"promised");
    end(arena, lock);
    let (mut arena, lock) = open(&dir.path(), SMALL).unwrap();
    assert_eq!((arena.pages_total(), lock.size, dir.memory()), (400, large, memory_of(large)));
    assert_eq!(arena.records().map(|(_, r)| r).collect::<Vec<_>>(), [record(500)]);
    assert_eq!((&arena.page(pages[299])[..8], arena.free_pages()), (&b"promised"[..], 100));
    pages.into_iter().for_each(|page| arena.free_page(page));
    arena.free_record(id);
    end(arena, lock);
    let (arena, lock) = open(&dir.path(), SMALL).unwrap();
    assert_eq!((arena.pages_total(), lock.size, dir.memory()), (4, SMALL, memory_of(SMALL)));
    assert_eq!(arena.free_pages(), 4);
}

#[test]
fn an_arena_grows_while_it_is_used() {
    let dir = Dir::new("grows");
    let (mut arena, lock) = open(&dir.path(), SMALL).unwrap();
    let id = arena.alloc_record(&record(500)).unwrap();
    (0..4).for_each(|n| assert!(arena.alloc_page(id, n).is_some()));
    assert!(arena.alloc_page(id, 4).is_none());
    let larger = ArenaSize { records: 9, pages: 5 };
    lock.grow(SMALL, larger).unwrap();
    arena.resize(larger);
    let page = arena.alloc_page(id, 4).unwrap();
    arena.write(page, 0, &[7; PAGE]);
    assert_eq!(dir.memory(), memory_of(larger));
    let e = lock.grow(larger, ArenaSize { pages: PLACES.pages + 1, ..larger }).unwrap_err();
    assert!(matches!(e, ArenaFileError::NoRoom { .. }), "{e}");
    // Memory that its daemon took and did not come to use is given back by the next one.
    lock.grow(larger, ArenaSize { records: 8, pages: 4000 }).unwrap();
    end(arena, lock);
    let _opened = open(&dir.path(), larger).unwrap();
    assert_eq!(dir.memory(), memory_of(larger));
}

#[test]
fn what_an_arena_has_is_not_asked_for_again_when_it_grows() {
    let dir = Dir::new("grows-beyond");
    let (_arena, lock) = open(&dir.path(), SMALL).unwrap();
    // A hole, to see who fills it.
    let [.., pages] = Arena::ranges(PLACES, SMALL);
    give_back(lock.file, pages.clone());
    lock.grow(SMALL, ArenaSize { pages: SMALL.pages + 3, ..SMALL }).unwrap();
    let all = memory_of(ArenaSize { pages: SMALL.pages + 3, ..SMALL });
    assert_eq!(dir.memory(), all - pages.len() as u64);
}

#[test]
fn promises_beyond_a_lowered_flow_limit_are_carried_over_too() {
    let dir = Dir::new("lowered");
    let (mut arena, lock) = open(&dir.path(), SMALL).unwrap();
    arena.alloc_record(&record(500)).unwrap();
    arena.alloc_record(&record(600)).unwrap();
    end(arena, lock);
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
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    let e = open(&dir.path(), SMALL).unwrap_err();
    assert!(matches!(e, ArenaFileError::NotAnArena(_)), "{e}");
    assert_eq!(std::fs::read(dir.path()).unwrap(), [7; 10_000]);
}

#[test]
fn an_arena_that_somebody_else_may_have_put_there_is_not_believed() {
    let dir = Dir::new("planted");
    let why = |dir: &Dir| match open(&dir.path(), SMALL).unwrap_err() {
        ArenaFileError::NotOurs(_, why) => why,
        other => panic!("{other}"),
    };
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let (arena, lock) = open(&dir.path(), SMALL).unwrap();
    end(arena, lock);
    mode(&dir.path(), 0o660);
    assert_eq!(why(&dir), "others can read or write it");
    mode(&dir.path(), 0o600);
    std::fs::hard_link(dir.path(), dir.0.join("other")).unwrap();
    assert_eq!(why(&dir), "it has more than one hard link");
    std::fs::remove_file(dir.path()).unwrap();
    std::os::unix::fs::symlink(dir.0.join("other"), dir.path()).unwrap();
    assert_eq!(why(&dir), "it is a link");
    std::fs::remove_file(dir.path()).unwrap();
    mode(&dir.0, 0o777);
    assert_eq!(why(&dir), "others can write to its directory");
    mode(&dir.0, 0o1777);
    let (arena, lock) = open(&dir.path(), SMALL).unwrap();
    end(arena, lock);
    mode(&dir.0, 0o700);
    if geteuid().is_root() {
        // As a local user could, whom the directory lets write.
        std::os::unix::fs::chown(dir.path(), Some(65_534), None).unwrap();
        assert_eq!(why(&dir), "it belongs to somebody else");
        std::os::unix::fs::chown(&dir.0, Some(65_534), None).unwrap();
        assert_eq!(why(&dir), "its directory belongs to somebody else");
    }
    // Nor is what stands where a new one is made.
    std::fs::create_dir(dir.0.join("new")).unwrap();
    let (target, new) = (dir.0.join("new/target"), dir.0.join("new/arena.new"));
    std::fs::write(&target, "precious").unwrap();
    std::os::unix::fs::symlink(&target, &new).unwrap();
    open(&dir.0.join("new/arena"), SMALL).unwrap();
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
}

#[test]
fn no_room_is_an_error_with_the_size_and_leaves_nothing_behind() {
    let dir = Dir::new("room");
    // 64 TiB, for which there are no places.
    let size = ArenaSize { records: 8, pages: 1 << 32 };
    assert!(matches!(open(&dir.path(), size), Err(ArenaFileError::NoRoom { .. })));
    // A tebibyte, for which there are places.
    let size = ArenaSize { pages: PLACES.pages, ..size };
    let e = open(&dir.path(), size).unwrap_err();
    assert!(matches!(e, ArenaFileError::NoRoom { .. } | ArenaFileError::Io(..)), "{e}");
    assert!(!dir.0.join("arena.new").exists());
    open(&dir.path(), SMALL).unwrap();
}

#[test]
fn what_is_mapped_for_ever_is_whole_locked_and_mapped_once() {
    let dir = Dir::new("mapped");
    let file = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.open(dir.path()).unwrap()
    };
    let lock = |file, how| Flock::lock(file, how).map_err(|(_, e)| e).unwrap();
    file().set_len(4096).unwrap();
    let errno = |lock, len| sys::map_forever(lock, len).unwrap_err().raw_os_error();
    // A process that shares the lock may map it as well.
    let shared = [file(), file()].map(|file| lock(file, FlockArg::LockSharedNonblock));
    let [one, _other] = shared;
    assert_eq!(errno(one, 4096), Some(libc::EWOULDBLOCK));
    let other = Dir::new("mapped-other");
    let file = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.open(other.path()).unwrap()
    };
    let first = file();
    first.set_len(4096).unwrap();
    // The same open file has the same lock, however many have it.
    let again = || lock(first.try_clone().unwrap(), FlockArg::LockExclusiveNonblock);
    assert_eq!(errno(again(), 4097), Some(libc::EINVAL));
    let (memory, _file) = sys::map_forever(again(), 4096).unwrap();
    memory[4095] = 7;
    assert_eq!(errno(again(), 4096), Some(libc::EBUSY));
    let (_, e) = Flock::lock(file(), FlockArg::LockExclusiveNonblock).unwrap_err();
    assert_eq!(e, Errno::EWOULDBLOCK, "and it is never unlocked");
}

#[test]
fn the_store_is_in_no_core_dump() {
    let dir = Dir::new("dump");
    let (_arena, _lock) = open(&dir.path(), SMALL).unwrap();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let path = dir.path().display().to_string();
    let own = maps.lines().skip_while(|line| !line.ends_with(&path));
    let flags = own.skip(1).find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
}

#[test]
fn the_size_follows_from_budgets_and_flows() {
    assert_eq!(size_for(64 << 20, 16384), ArenaSize { records: 16384, pages: 4096 });
    assert_eq!(size_for(1, 1).pages, 1);
}

#[test]
fn an_allocation_of_more_than_a_second_is_in_the_log() {
    let gib = 1 << 30;
    assert_eq!(slow(gib, Duration::from_secs(1)), None);
    let words = "the allocation of 16G for the store took 7.3 s";
    assert_eq!(slow(16 * gib, Duration::from_millis(7300)).as_deref(), Some(words));
    let words = "the allocation of 1025M for the store took 1.0 s";
    assert_eq!(slow(gib + 1, Duration::from_millis(1001)).as_deref(), Some(words));
}
