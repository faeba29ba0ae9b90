//! A VMM, as `/proc` tells of it: its vCPU threads, and what they do (BST-05).

use std::fs::{File, read_dir, read_link, read_to_string};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::sys::Class;

/// Beginnings of the names of vCPU threads: QEMU (with `debug-threads=on`), Cloud Hypervisor,
/// Firecracker, crosvm.
const NAMES: [&str; 4] = ["CPU ", "vcpu", "fc_vcpu", "crosvm_vcpu"];

/// A process that is the one that it was when it was opened.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    pidfd: OwnedFd,
}

impl Process {
    /// Errors: there is none with this number.
    pub fn open(pid: i32) -> io::Result<Self> {
        let id = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { pid, pidfd: pidfd_open(id, PidfdFlags::empty())? })
    }

    /// It has not ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }

    /// Its vCPUs' threads, and whether they come and go. `cgroup`: those in it, else by name, else
    /// those of a user-mode Linux. Errors: words for the operator.
    pub fn vcpus(&self, cgroup: Option<&Path>) -> Result<(Vec<Identity>, bool), String> {
        let tasks = tasks(self.pid).map_err(|e| format!("its threads cannot be read: {e}"))?;
        if let Some(dir) = cgroup {
            let listed = members(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
            let own = tasks.iter().filter(|it| listed.contains(&it.tid));
            let own: Vec<_> = own.map(Identity::of).collect();
            return if own.is_empty() {
                Err(format!("{} has no thread of process {}", dir.display(), self.pid))
            } else {
                Ok((own, false))
            };
        }
        let named = |it: &&Stat| NAMES.iter().any(|name| it.comm.starts_with(name));
        let vcpus: Vec<_> = tasks.iter().filter(named).map(Identity::of).collect();
        if !vcpus.is_empty() {
            return Ok((vcpus, false));
        }
        let traced = traced_children(self.pid);
        if traced.is_empty() {
            return Err(
                "no vCPU threads are found: run QEMU with -name NAME,debug-threads=on, or \
                        set vm.vcpu_cgroup"
                    .into(),
            );
        }
        let kernel = tasks.iter().filter(|it| it.tid == self.pid);
        Ok((kernel.chain(&traced).map(Identity::of).collect(), true))
    }
}

/// A thread, and when it began.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Identity {
    /// Its process.
    pub pid: i32,
    /// Its number.
    pub tid: i32,
    /// In clock ticks after the boot.
    pub start: u64,
}

impl Identity {
    fn of(stat: &Stat) -> Self {
        Self { pid: stat.pid, tid: stat.tid, start: stat.start }
    }
}

/// Of a line of `stat` (proc(5)).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Stat {
    pub(crate) pid: i32,
    pub(crate) tid: i32,
    /// Its name, at most 15 bytes.
    pub comm: String,
    pub(crate) state: char,
    pub(crate) nice: i32,
    pub(crate) start: u64,
    pub(crate) class: Class,
    /// The core on which it runs, waits or last ran.
    pub(crate) cpu: usize,
}

impl Stat {
    /// Of any thread.
    pub(crate) fn of(tid: i32) -> io::Result<Self> {
        parse(tid, &read_to_string(format!("/proc/{tid}/stat"))?)
    }

    /// It runs or waits for a core.
    #[must_use]
    pub const fn is_runnable(&self) -> bool {
        self.state == 'R'
    }
}

fn parse(pid: i32, line: &str) -> io::Result<Stat> {
    let stat = || {
        let (front, back) = line.rsplit_once(')')?;
        let (tid, comm) = front.split_once(" (")?;
        // As proc(5) counts, in rising order.
        let (mut fields, mut next) = (back.split_ascii_whitespace(), 3);
        let mut field = |nth: usize| {
            let skipped = nth - std::mem::replace(&mut next, nth + 1);
            fields.nth(skipped)
        };
        let state = field(3)?.chars().next()?;
        let nice = field(19)?.parse().ok()?;
        let start = field(22)?.parse().ok()?;
        let cpu = field(39)?.parse().ok()?;
        let priority = field(40)?.parse().ok()?;
        let class = Class { policy: field(41)?.parse().ok()?, priority };
        let (tid, comm) = (tid.parse().ok()?, comm.to_owned());
        Some(Stat { pid, tid, comm, state, nice, start, class, cpu })
    };
    stat().ok_or_else(|| io::Error::other("a line of stat has another form"))
}

/// All threads of a process.
fn tasks(pid: i32) -> io::Result<Vec<Stat>> {
    let mut stats = Vec::new();
    for entry in read_dir(format!("/proc/{pid}/task"))? {
        // One may have ended meanwhile.
        let Ok(line) = read_to_string(entry?.path().join("stat")) else { continue };
        stats.push(parse(pid, &line)?);
    }
    Ok(stats)
}

/// Threads in a cgroup: `cgroup.threads`, in version 1 `tasks`.
fn members(dir: &Path) -> io::Result<Vec<i32>> {
    let text = read_to_string(dir.join("cgroup.threads"))
        .or_else(|_| read_to_string(dir.join("tasks")))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// A user-mode Linux traces the processes in which its programs run.
fn traced_children(pid: i32) -> Vec<Stat> {
    let children = read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let traced = |child: &i32| {
        let status = read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
        let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
        tracer.is_some_and(|tracer| tracer.trim().parse() == Ok(pid))
    };
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    children.filter(traced).filter_map(|child| Stat::of(child).ok()).collect()
}

/// The process that holds the tap with this name, in the network namespace of the thread `near`.
/// Errors: words for the operator.
pub fn holder(tap: &str, near: i32) -> Result<i32, String> {
    let namespace = |pid: i32| read_link(format!("/proc/{pid}/ns/net")).ok();
    let all = read_dir("/proc").map_err(|e| format!("/proc cannot be read: {e}"))?;
    let pids = all.flatten().filter_map(|it| it.file_name().to_str()?.parse().ok());
    let wanted = namespace(near);
    let is_near = |&pid: &i32| wanted.is_some() && namespace(pid) == wanted;
    let holders: Vec<i32> = pids.filter(|&pid| holds(pid, tap)).filter(is_near).collect();
    match holders[..] {
        [pid] => Ok(pid),
        [] => Err(format!(
            "no process is seen that holds {tap}: start the VM, and give nightporter-boost \
             CAP_SYS_PTRACE, to see who has which descriptors"
        )),
        [one, other, ..] => Err(format!("processes {one} and {other} both hold {tap}")),
    }
}

/// `iff:` in `fdinfo` is the name of a tap (`tun_chr_show_fdinfo`, drivers/net/tun.c, 6.18).
fn holds(pid: i32, tap: &str) -> bool {
    let fds = read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let taps = fds.filter(|fd| read_link(fd.path()).is_ok_and(|it| it.ends_with("tun")));
    let mut infos = taps.filter_map(|fd| {
        read_to_string(format!("/proc/{pid}/fdinfo/{}", fd.file_name().to_str()?)).ok()
    });
    infos.any(|it| it.lines().any(|line| line.strip_prefix("iff:").map(str::trim) == Some(tap)))
}

/// An open thread: its files are of this one, even if its number is given to another.
#[derive(Debug)]
pub struct Thread {
    /// Which one.
    pub id: Identity,
    stat: File,
    schedstat: File,
}

impl Thread {
    /// Errors: it is gone, or is another one.
    pub fn open(id: Identity) -> io::Result<Self> {
        let open = |name| File::open(format!("/proc/{}/task/{}/{name}", id.pid, id.tid));
        let thread = Self { id, stat: open("stat")?, schedstat: open("schedstat")? };
        if thread.stat()?.start == id.start {
            Ok(thread)
        } else {
            Err(io::Error::other("another thread has its number"))
        }
    }

    /// Its line of `stat`. Errors: it has ended.
    pub fn stat(&self) -> io::Result<Stat> {
        parse(self.id.pid, &read(&self.stat)?)
    }

    /// Nanoseconds that it has used. A running thread's are those of the last tick; a change of its
    /// class brings them up to date.
    pub(crate) fn used(&self) -> io::Result<u64> {
        Ok(self.turns()?.ran_ns)
    }

    /// Its turns on a core; [`Self::used`] says how old they are. Errors: it has ended.
    pub fn turns(&self) -> io::Result<Turns> {
        let turns = Turns::parse(&read(&self.schedstat)?);
        turns.ok_or_else(|| io::Error::other("schedstat has another form"))
    }
}

/// A thread's turns on a core since it began: a line of `schedstat`
/// (Documentation/scheduler/sched-stats.rst). A wait counts once it is over.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Turns {
    /// CPU time, in nanoseconds.
    pub ran_ns: u64,
    /// Time in which it could have run and waited for a core, in nanoseconds.
    pub waited_ns: u64,
    /// How often it began to run.
    pub count: u64,
}

impl Turns {
    /// `None`: the text has another form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace().map(|word| word.parse().ok());
        let mut next = || words.next().flatten();
        Some(Self { ran_ns: next()?, waited_ns: next()?, count: next()? })
    }
}

fn read(file: &File) -> io::Result<String> {
    let mut buf = [0; 1024];
    let len = file.read_at(&mut buf, 0)?;
    Ok(String::from_utf8_lossy(&buf[..len]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_stat_is_read_whatever_the_name_is() {
        let line = "77 (CPU 0/) K (VM) R 1 2 3 0 -1 4194304 0 0 0 0 5 6 0 0 20 -5 3 0 4711 0 0 \
                    0 0 0 0 0 0 0 0 0 0 0 0 0 17 3 1 2 0 0 0";
        let stat = parse(70, line).unwrap();
        assert_eq!((stat.pid, stat.tid, stat.comm.as_str()), (70, 77, "CPU 0/) K (VM"));
        assert_eq!((stat.state, stat.nice, stat.start), ('R', -5, 4711));
        assert_eq!((stat.class, stat.cpu), (Class::round_robin(1), 3));
        assert!(parse(70, "77 (a) R 1 2").is_err());
    }

    #[test]
    fn a_line_of_schedstat_has_three_numbers() {
        let turns = Turns { ran_ns: 1_000, waited_ns: 20, count: 3 };
        assert_eq!(Turns::parse("1000 20 3\n"), Some(turns));
        assert_eq!(["", "1000 20", "1000 x 3", "-1 2 3"].map(Turns::parse), [None; 4]);
    }

    #[test]
    fn a_thread_is_the_one_that_began_then() {
        let own = std::process::id().cast_signed();
        let stat = Stat::of(own).unwrap();
        let id = Identity::of(&stat);
        let used = Thread::open(id).unwrap().used().unwrap();
        assert!(used > 0);
        assert!(Thread::open(Identity { start: id.start + 1, ..id }).is_err());
    }
}
