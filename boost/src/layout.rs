//! The cgroups of a VM: by which means it is boosted and pays back, or why it is not (BST-03,
//! BST-04).

use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

/// Highest and lowest weight in version 1 (`cpu.shares`) and 2 (`cpu.weight`).
const SHARES: (u32, u32) = (262_144, 2);
const WEIGHTS: (u32, u32) = (10_000, 1);

/// How a VM is boosted and pays back.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Means {
    /// `SCHED_RR`, and nice: its threads and those that compete are in one cgroup.
    Nice,
    /// The weight of its own cgroup.
    Weight {
        /// `cpu.shares` or `cpu.weight`.
        file: PathBuf,
        /// Boosted.
        high: u32,
        /// Paying back.
        low: u32,
    },
}

impl Means {
    pub(crate) const fn label(&self) -> &'static str {
        match self {
            Self::Nice => "nice",
            Self::Weight { .. } => "weight",
        }
    }
}

/// The hierarchy that has the `cpu` controller.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Hierarchy {
    root: PathBuf,
    is_v2: bool,
}

impl Hierarchy {
    /// This machine's.
    pub(crate) fn find() -> Option<Self> {
        Self::of_mounts(&read_to_string("/proc/self/mounts").ok()?)
    }

    fn of_mounts(mounts: &str) -> Option<Self> {
        let mut v2 = None;
        for line in mounts.lines() {
            let mut words = line.split(' ').skip(1);
            let (root, kind, options) = (words.next()?, words.next()?, words.next()?);
            if kind == "cgroup" && options.split(',').any(|option| option == "cpu") {
                return Some(Self { root: root.into(), is_v2: false });
            }
            if kind == "cgroup2" {
                v2 = Some(Self { root: root.into(), is_v2: true });
            }
        }
        v2
    }

    /// A directory of the hierarchy, as an operator names it.
    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        self.root.join(name.trim_start_matches('/'))
    }

    /// The cgroup that a thread competes in, by the content of its file `cgroup`.
    fn dir_of(&self, cgroup: &str) -> Option<PathBuf> {
        let path = cgroup.lines().find_map(|line| {
            let (_, line) = line.split_once(':')?;
            let (controllers, path) = line.split_once(':')?;
            let is_it = if self.is_v2 {
                controllers.is_empty()
            } else {
                controllers.split(',').any(|it| it == "cpu")
            };
            is_it.then_some(path)
        })?;
        let mut dir = self.dir(path);
        // In version 2 the controller may be off from some level on.
        while self.is_v2 && dir != self.root && !dir.join("cpu.weight").exists() {
            dir.pop();
        }
        Some(dir)
    }

    pub(crate) fn dir_of_thread(&self, pid: i32, tid: i32) -> Option<PathBuf> {
        self.dir_of(&read_to_string(format!("/proc/{pid}/task/{tid}/cgroup")).ok()?)
    }

    /// The cgroup at `dir` or above it that has a quota.
    pub(crate) fn quota(&self, dir: &Path) -> Option<PathBuf> {
        let limited = |dir: &&Path| {
            if self.is_v2 {
                let max = read_to_string(dir.join("cpu.max")).unwrap_or_default();
                !max.is_empty() && !max.starts_with("max")
            } else {
                let quota = read_to_string(dir.join("cpu.cfs_quota_us")).unwrap_or_default();
                quota.trim().parse::<i64>().is_ok_and(|quota| quota > 0)
            }
        };
        self.up(dir).find(limited).map(Path::to_path_buf)
    }

    /// The means for threads that compete in `dir`. `is_own`: whether a process is of this VM;
    /// `others`: where the threads of other VMs compete. Errors: words for the operator.
    pub(crate) fn means<'a>(
        &self,
        dir: &Path,
        is_own: &dyn Fn(i32) -> bool,
        mut others: impl Iterator<Item = &'a Path>,
    ) -> Result<Means, String> {
        let alone = |dir: &&Path| *dir != self.root && self.all_within(dir, is_own);
        if let Some(own) = self.up(dir).take_while(alone).last() {
            let (name, (high, low)) =
                if self.is_v2 { ("cpu.weight", WEIGHTS) } else { ("cpu.shares", SHARES) };
            return Ok(Means::Weight { file: own.join(name), high, low });
        }
        if let Some(other) = others.find(|other| *other != dir) {
            let [dir, other] = [dir, other].map(Path::display);
            return Err(format!(
                "it shares the cgroup {dir} with other processes, and another VM is in {other}: \
                 give each VM a cgroup, or put all into one"
            ));
        }
        if dir == self.root && has_autogroup() {
            return Err("autogroup is on, so that nice has no effect between sessions: \
                        sysctl kernel.sched_autogroup_enabled=0"
                .into());
        }
        Ok(Means::Nice)
    }

    fn up<'a>(&'a self, dir: &'a Path) -> impl Iterator<Item = &'a Path> {
        dir.ancestors().take_while(|dir| dir.starts_with(&self.root))
    }

    fn all_within(&self, dir: &Path, is_own: &dyn Fn(i32) -> bool) -> bool {
        let own = read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        let mut pids = own.lines().filter_map(|line| line.parse().ok());
        let below = || {
            let mut dirs = read_dir(dir).into_iter().flatten().flatten();
            dirs.all(|entry| {
                !entry.file_type().is_ok_and(|it| it.is_dir())
                    || self.all_within(&entry.path(), is_own)
            })
        };
        pids.all(is_own) && below()
    }
}

fn has_autogroup() -> bool {
    let path = "/proc/sys/kernel/sched_autogroup_enabled";
    read_to_string(path).is_ok_and(|text| text.trim() == "1")
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};

    use super::*;

    /// A hierarchy in a directory of this test's own.
    struct Fake(Hierarchy);

    impl Fake {
        fn new(name: &str, is_v2: bool) -> Self {
            let root = std::env::temp_dir().join(format!("np-boost-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            create_dir_all(&root).unwrap();
            Self(Hierarchy { root, is_v2 })
        }

        fn put(&self, file: &str, text: &str) -> PathBuf {
            let path = self.0.dir(file);
            create_dir_all(path.parent().unwrap()).unwrap();
            write(&path, text).unwrap();
            path.parent().unwrap().to_path_buf()
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0.root);
        }
    }

    #[test]
    fn the_hierarchy_with_the_controller_is_found() {
        let v1 = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                  cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n";
        let found = Hierarchy::of_mounts(v1).unwrap();
        assert_eq!(found.root, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        let dir = found.dir_of("5:memory:/a\n4:cpu,cpuacct:/m.slice/x\n0::/b\n").unwrap();
        assert_eq!(dir, found.root.join("m.slice/x"));
        let v2 = Hierarchy::of_mounts("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n").unwrap();
        assert!(v2.is_v2);
        assert_eq!(Hierarchy::of_mounts("tmpfs /tmp tmpfs rw 0 0\n"), None);
    }

    #[test]
    fn in_version_2_threads_compete_where_the_controller_is_on() {
        let fake = Fake::new("v2", true);
        fake.put("machine.slice/cpu.weight", "100");
        let dir = fake.0.dir_of("0::/machine.slice/vm1/vcpu0\n").unwrap();
        assert_eq!(dir, fake.0.dir("machine.slice"));
    }

    #[test]
    fn bst_03_a_quota_of_any_ancestor_is_found() {
        for (is_v2, file, without, with) in [
            (false, "cpu.cfs_quota_us", "-1\n", "50000\n"),
            (true, "cpu.max", "max 100000\n", "50000 100000\n"),
        ] {
            let fake = Fake::new(file, is_v2);
            let top = fake.put(&format!("slice/{file}"), without);
            let dir = fake.put(&format!("slice/vm/vcpu0/{file}"), without);
            assert_eq!(fake.0.quota(&dir), None);
            fake.put(&format!("slice/{file}"), with);
            assert_eq!(fake.0.quota(&dir), Some(top));
        }
    }

    #[test]
    fn bst_04_a_cgroup_of_its_own_pays_by_weight_and_one_cgroup_of_all_by_nice() {
        let fake = Fake::new("means", false);
        let own = fake.put("machine/vm1/cgroup.procs", "");
        let vcpu = fake.put("machine/vm1/vcpu0/cgroup.procs", "100\n101\n");
        let other = fake.put("machine/vm2/cgroup.procs", "200\n");
        let is_own = |pid| (100..200).contains(&pid);
        let none = || std::iter::empty::<&Path>();
        let means = fake.0.means(&vcpu, &is_own, [other.as_path()].into_iter());
        let file = own.join("cpu.shares");
        assert_eq!(means, Ok(Means::Weight { file, high: 262_144, low: 2 }));
        // All VMs in one.
        let session = fake.put("session/cgroup.procs", "100\n200\n");
        let one = [session.as_path(); 2].into_iter();
        assert_eq!(fake.0.means(&session, &is_own, one), Ok(Means::Nice));
        assert_eq!(fake.0.means(&session, &is_own, none()), Ok(Means::Nice));
        // Neither.
        let refused = fake.0.means(&session, &is_own, [other.as_path()].into_iter());
        assert!(refused.unwrap_err().contains("give each VM a cgroup"));
    }
}
