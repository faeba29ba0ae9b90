//! Guest memory that nobody has touched is charged to the daemon when the daemon touches it. Needs
//! root: the daemon is in a control group of its own.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nightporterd::config::Source;
use nightporterd::vhost::features::bit;
use rustix::fs::MemfdFlags;
use rustix::fs::{SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::driver::Ram;
use crate::guest::{Guest, PLAIN, RAM_LEN};
use crate::host::{Dir, Host, command_after};

const MIB: u64 = 1 << 20;
/// `vm.memory_max` of the VM that means harm.
const MOST: u64 = 32 * MIB;

/// A memory control group of the test's own, of either version.
struct Group(PathBuf);

impl Group {
    /// `None`, which is said: this host has none, or none for us.
    fn new() -> Option<Self> {
        let name = format!("np-charged-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let at = if v1.is_dir() { v1 } else { Path::new("/sys/fs/cgroup") }.join(name);
        let is_made = std::fs::create_dir(&at).is_ok();
        let group = Self(at);
        if !is_made || group.usage().is_none() {
            crate::skips("there is no control group for memory here (root)");
            return None;
        }
        Some(group)
    }

    /// The daemon's own memory and that of files without a disk; the page cache of its program is
    /// none of that.
    fn usage(&self) -> Option<u64> {
        let text = std::fs::read_to_string(self.0.join("memory.stat")).ok()?;
        let of = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().parse::<u64>().ok()
        };
        let v1 = of("total_rss ").zip(of("total_shmem "));
        v1.or_else(|| of("anon ").zip(of("shmem "))).map(|(own, shared)| own + shared)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The daemon's helpers are killed with it, but may still be listed.
        let begin = Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && begin.elapsed() < Duration::from_secs(5) {
            std::thread::yield_now();
        }
    }
}

/// A front-end in memory without content, of which each page is touched by the daemon alone.
fn touches_all(host: &Host, socket: &Path, ram: &Rc<Ram>, len: u64) {
    let ram = Rc::clone(ram);
    let Some(mut bad) = Guest::try_boot_in(socket, PLAIN | bit::INDIRECT_DESC, ram) else { return };
    if !bad.may_have_memory(len) {
        return;
    }
    host.until("bad", |port| port.link);
    let before = host.port("bad").frames_from_port;
    let (mut at, mut frames) = (RAM_LEN, 0);
    // Of 32 pages: more at once is nothing that honest guests do.
    while at + 32 * 4096 <= len {
        bad.sends_scattered(at, 4096, 32);
        (at, frames) = (at + 32 * 4096, frames + 1);
        host.until("bad", |port| !port.link || port.frames_from_port == before + frames);
    }
}

#[test]
#[ignore = "needs root: it makes a control group"]
fn what_a_front_end_has_charged_to_the_daemon_is_bounded() {
    let Some(group) = Group::new() else { return };
    let dir = Dir::new();
    let vms = dir.vm("bad", "ack_offload = false\nmemory_max = \"32M\"");
    let config = dir.configure("metrics = \"off\"", &vms);
    let source = Source { path: config.clone(), overrides: std::collections::BTreeMap::new() };
    let checked = source.load().unwrap();
    let enter = format!("echo $$ > {}/cgroup.procs", group.0.display());
    let host = Host::start_as(&dir, &mut command_after(&enter, &config));
    let (mut kept, mut most) = (Vec::new(), 0);
    for _ in 0..12 {
        let file = memfd_create("sparse", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let ram = Ram::of(file.into(), usize::try_from(RAM_LEN).unwrap());
        ftruncate(ram.fd(), MOST).unwrap();
        fcntl_add_seals(ram.fd(), SealFlags::SHRINK).unwrap();
        touches_all(&host, &dir.join("bad"), &ram, MOST);
        host.until("bad", |port| !port.link);
        kept.push(ram); // its pages are still there
        most = most.max(group.usage().unwrap());
    }
    let (own, shared) = (checked.memory_max(), checked.guest_memory_max().unwrap());
    assert_eq!(shared, MOST);
    assert!(most <= own + shared + shared / 10, "{} MiB", most / MIB);
    assert!(most > 2 * MOST, "{} MiB: it has tried", most / MIB);
    drop(kept);
    // And who has forgotten what it had is taken again.
    let ram = Ram::new(usize::try_from(RAM_LEN).unwrap());
    let _good = Guest::boot_in(&dir.join("bad"), PLAIN, ram);
    host.until("bad", |port| port.link);
}
